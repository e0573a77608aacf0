//! The two state machines of MPA start-up connected by a stream that arrives in random pieces.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use anywarp_core::llp::mpa::startup::{
    Accepted, Incoming, Initiator, InitiatorConfig, Progress, Request, Responder, ResponderLimits,
    RtrForms, StreamParams,
};
use anywarp_sim::{Rng, each_seed};

/// Lets `bytes`, followed by `behind`, arrive in pieces of random lengths. Passes all that has arrived to `handle` after each piece, until it
/// returns a result.
fn arrive<T>(
    rng: &mut Rng,
    bytes: &[u8],
    behind: &[u8],
    mut handle: impl FnMut(&[u8]) -> Option<T>,
) -> T {
    let all = [bytes, behind].concat();
    let mut here = 0;
    loop {
        here += 1 + rng.below(*rng.clone().pick(&[1, 9, 200]));
        here = here.min(all.len());
        if let Some(done) = handle(&all[..here]) {
            return done;
        }
        assert!(
            here < all.len(),
            "the state machine waits for more bytes than were sent"
        );
    }
}

/// The outcome at both ends when the stream is open.
struct Opened {
    request: Request,
    accepted: Accepted,
    progress: Progress,
}

fn open(
    rng: &mut Rng,
    config: &InitiatorConfig,
    limits: ResponderLimits,
    (ird, ord): (u16, u16),
) -> Opened {
    let mut initiator = Initiator::new(config.clone()).unwrap();
    let mut responder = Responder::new(limits);
    let request = arrive(rng, &initiator.request(), &[], |bytes| {
        match responder.handle_rx(bytes).unwrap() {
            Incoming::NeedMore => None,
            Incoming::Request(request) => Some(request),
        }
    });
    let accepted = responder.accept(ird, ord, b"welcome").unwrap();
    // FPDUs may come directly after the Reply.
    let progress = arrive(
        rng,
        &accepted.reply,
        &[0, 14, 0xc1, 0x40],
        |bytes| match initiator.handle_rx(bytes).unwrap() {
            Progress::NeedMore => None,
            progress => Some(progress),
        },
    );
    Opened {
        request,
        accepted,
        progress,
    }
}

#[test]
fn any_two_configurations_agree() {
    let forms: Vec<_> = (0..8)
        .map(|n| RtrForms {
            send: n & 1 != 0,
            write: n & 2 != 0,
            read: n & 4 != 0,
        })
        .collect();
    let depths = [0, 1, 16, 128, 0x3ffe, 0x3fff];
    each_seed(4000, |seed| {
        let mut rng = Rng::new(seed);
        let half = |rng: &mut Rng| rng.chance(50);
        let config = InitiatorConfig {
            rev: if half(&mut rng) { 2 } else { 1 },
            crc: half(&mut rng),
            markers: half(&mut rng),
            peer_to_peer: half(&mut rng),
            rtr: *rng.pick(&forms),
            ird: *rng.pick(&depths),
            max_ird: *rng.pick(&depths),
            ord: *rng.pick(&depths),
            private_data: rng.clone().bytes(rng.below(200)),
        };
        let limits = ResponderLimits {
            crc: half(&mut rng),
            markers: half(&mut rng),
            max_ird: *rng.pick(&depths),
            max_ord: *rng.pick(&depths),
            known: half(&mut rng),
        };
        let wanted = (*rng.pick(&depths), *rng.pick(&depths));
        let Opened {
            request,
            accepted,
            progress,
        } = open(&mut rng, &config, limits, wanted);
        assert_eq!(request.private_data, config.private_data);
        assert_eq!((request.crc, request.markers), (config.crc, config.markers));
        let theirs = accepted.params;
        let ours: StreamParams = match progress {
            Progress::Established {
                consumed,
                params,
                private_data,
                rtr,
                ..
            } => {
                assert_eq!(consumed, accepted.reply.len());
                assert_eq!(private_data, b"welcome");
                assert_eq!(rtr.is_some(), accepted.expects_rtr);
                if let Some(rtr) = rtr {
                    let can = match rtr {
                        anywarp_core::llp::mpa::startup::Rtr::Send => config.rtr.send,
                        anywarp_core::llp::mpa::startup::Rtr::Write => config.rtr.write,
                        anywarp_core::llp::mpa::startup::Rtr::Read => config.rtr.read,
                    };
                    assert!(
                        can,
                        "the responder chose a form that the initiator cannot send"
                    );
                }
                params
            }
            Progress::NoCommonRtr { params, .. } => {
                // Only an initiator that can send no form of RTR has none in common with the responder.
                assert_eq!(config.rtr, RtrForms::NONE);
                assert!(config.peer_to_peer && config.rev == 2);
                params
            }
            Progress::InsufficientIrd { needed, params, .. } => {
                assert!(needed > params.ird && needed <= theirs.ord);
                assert_eq!(config.rev, 2);
                return;
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(ours.rev, theirs.rev);
        assert_eq!(ours.crc, theirs.crc);
        assert_eq!(ours.crc, config.crc || limits.crc);
        assert_eq!(
            (ours.send_markers, ours.recv_markers),
            (theirs.recv_markers, theirs.send_markers)
        );
        assert_eq!(ours.peer_to_peer, theirs.peer_to_peer && ours.peer_to_peer);
        if config.rev == 2 && config.ord != 0x3fff && theirs.ird != 0x3fff {
            assert!(
                ours.ord <= theirs.ird,
                "the initiator sends more Reads than the responder serves"
            );
        }
        if config.rev == 2 && config.ird != 0x3fff && wanted.1 != 0x3fff {
            assert!(
                theirs.ord <= ours.ird,
                "the responder sends more Reads than the initiator serves"
            );
        }
        // The two ends recognize each other as anywarp if and only if the request offers all forms of RTR, and the
        // responder confirms all of them.
        let marked = config.rev == 2 && config.peer_to_peer && config.rtr == RtrForms::ALL;
        let all = marked && limits.known;
        assert_eq!(accepted.peer_may_be_anywarp, all);
        assert_eq!(ours.peer_is_anywarp, all);
    });
}

#[test]
fn a_rejection_arrives_with_its_reason() {
    each_seed(200, |seed| {
        let mut rng = Rng::new(seed);
        let config = InitiatorConfig {
            rev: 1 + rng.below(2) as u8,
            ..InitiatorConfig::default()
        };
        let mut initiator = Initiator::new(config.clone()).unwrap();
        let mut responder = Responder::new(ResponderLimits::default());
        arrive(&mut rng, &initiator.request(), &[], |bytes| match responder
            .handle_rx(bytes)
            .unwrap()
        {
            Incoming::NeedMore => None,
            Incoming::Request(_) => Some(()),
        });
        let reason = rng.bytes(100);
        let reply = responder.reject(&reason).unwrap();
        let progress = arrive(&mut rng, &reply, &[], |bytes| {
            match initiator.handle_rx(bytes).unwrap() {
                Progress::NeedMore => None,
                progress => Some(progress),
            }
        });
        let Progress::Rejected {
            private_data, rev, ..
        } = progress
        else {
            panic!("{progress:?}");
        };
        assert_eq!((private_data, rev), (reason, config.rev));
        assert!(responder.accept(1, 1, &[]).is_err());
    });
}

#[test]
fn damaged_frames_never_lead_to_different_parameters() {
    // An inverted bit may change the request, but never causes a panic, and never makes a machine wait for more bytes
    // than a frame can have.
    each_seed(3000, |seed| {
        let mut rng = Rng::new(seed);
        let mut initiator = Initiator::new(InitiatorConfig::default()).unwrap();
        let mut responder = Responder::new(ResponderLimits::default());
        let mut request = initiator.request();
        for _ in 0..rng.below(3) {
            let bit = rng.below(request.len() * 8);
            request[bit / 8] ^= 1 << (bit % 8);
        }
        request.resize(600, 0);
        let _ = responder.handle_rx(&request[..24]);
        let incoming = responder.handle_rx(&request);
        assert_ne!(
            incoming,
            Ok(Incoming::NeedMore),
            "the state machine waits for more bytes than a frame can have"
        );
        let mut responder = Responder::new(ResponderLimits::default());
        responder.handle_rx(&initiator.request()).unwrap();
        let mut reply = responder.accept(8, 8, b"data").unwrap().reply;
        for _ in 0..1 + rng.below(3) {
            let bit = rng.below(reply.len() * 8);
            reply[bit / 8] ^= 1 << (bit % 8);
        }
        reply.resize(600, 0);
        let progress = initiator.handle_rx(&reply);
        assert_ne!(
            progress,
            Ok(Progress::NeedMore),
            "the state machine waits for more bytes than a frame can have"
        );
    });
}
