//! Start-up frames from a peer: Requests to a responder, and Replies to an initiator.

use anywarp_core::llp::mpa::startup::{
    Incoming, Initiator, InitiatorConfig, Progress, Responder, ResponderLimits, RtrForms,
};
use anywarp_core::wire::mpa::{MAX_DEPTH, StartupFrame};

use super::input::Input;

/// The input chooses roles and limits, and contains the peer's frame.
pub fn startup(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(3) {
        0 => responder(&mut input),
        1 => initiator(&mut input),
        _ => both(&mut input),
    }
}

fn limits(input: &mut Input<'_>) -> ResponderLimits {
    let choice = input.byte();
    ResponderLimits {
        crc: choice & 1 != 0,
        markers: choice & 2 != 0,
        known: choice & 4 == 0,
        max_ird: input.u16(),
        max_ord: input.u16(),
    }
}

fn config(input: &mut Input<'_>) -> InitiatorConfig {
    let choice = input.byte();
    let len = usize::from(input.u16() % 520);
    InitiatorConfig {
        rev: choice & 3,
        crc: choice & 4 != 0,
        markers: choice & 8 != 0,
        peer_to_peer: choice & 16 != 0,
        rtr: RtrForms {
            send: choice & 32 != 0,
            write: choice & 64 != 0,
            read: choice & 128 != 0,
        },
        ird: input.u16(),
        max_ird: input.u16(),
        ord: input.u16(),
        private_data: vec![0x70; len],
    }
}

/// Passes the input to a responder in pieces, as a Request. Checks that the responder waits for no
/// more than a frame, that an error does not depend on the pieces, that a Request with bytes after
/// it is refused, and that the reply is within the limits.
fn responder(input: &mut Input<'_>) {
    let limits = limits(input);
    let (ird, ord) = (input.u16(), input.u16());
    let (accepts, step) = (input.byte() & 1 != 0, 1 + input.below(40));
    let bytes = input.rest();
    let mut responder = Responder::new(limits);
    let mut seen = 0;
    let asked = loop {
        let outcome = responder.handle_rx(&bytes[..seen]);
        match outcome {
            Ok(Incoming::NeedMore) if seen < bytes.len() => seen = bytes.len().min(seen + step),
            Ok(Incoming::NeedMore) => {
                assert!(seen < StartupFrame::MAX_LEN, "waits for more than a frame");
                return;
            }
            Ok(Incoming::Request(request)) => break request,
            Err(_) => {
                let mut again = Responder::new(limits);
                assert!(again.handle_rx(&bytes[..seen]).is_err());
                return;
            }
        }
    };
    assert_eq!(asked.consumed, seen, "bytes follow an accepted Request");
    let reply = if accepts {
        let accepted = responder.accept(ird, ord, b"welcome").expect("accept");
        assert!(accepted.params.ird <= limits.max_ird.clamp(1, MAX_DEPTH));
        assert!(accepted.params.ord <= limits.max_ord);
        assert!(asked.ird.is_none_or(|most| accepted.params.ord <= most));
        assert!(accepted.params.crc || !asked.crc);
        assert_eq!(accepted.params.send_markers, asked.markers);
        accepted.reply
    } else {
        responder.reject(b"no").expect("reject")
    };
    let (frame, len) = StartupFrame::parse(&reply)
        .expect("our own reply")
        .expect("a complete frame");
    assert_eq!(len, reply.len());
    assert!(frame.reply && frame.reject != accepts && frame.rev == asked.rev);
}

fn initiator(input: &mut Input<'_>) {
    let config = config(input);
    let step = 1 + input.below(40);
    let bytes = input.rest();
    let Ok(mut initiator) = Initiator::new(config.clone()) else {
        return;
    };
    let mut seen = 0;
    let outcome = loop {
        match initiator.handle_rx(&bytes[..seen]) {
            Ok(Progress::NeedMore) if seen < bytes.len() => seen = bytes.len().min(seen + step),
            other => break other,
        }
    };
    // Bytes after the Reply make no difference.
    let at_once = initiator.handle_rx(bytes);
    assert_eq!(at_once, outcome);
    match outcome {
        Ok(Progress::NeedMore) => assert!(seen < StartupFrame::MAX_LEN),
        Ok(Progress::Established {
            consumed, params, ..
        }) => {
            assert!(consumed <= StartupFrame::MAX_LEN);
            assert!(params.crc || !config.crc);
            assert!(params.ord <= config.ord && params.ird <= config.max_ird.max(config.ird));
        }
        _ => {}
    }
}

/// Checks that two anywarp ends agree, for any configurations.
fn both(input: &mut Input<'_>) {
    let (config, limits) = (config(input), limits(input));
    let (ird, ord) = (input.u16(), input.u16());
    let Ok(mut initiator) = Initiator::new(config.clone()) else {
        return;
    };
    let mut responder = Responder::new(limits);
    let Incoming::Request(_) = responder
        .handle_rx(&initiator.request())
        .expect("our request")
    else {
        panic!("the responder waits for more bytes than the request has");
    };
    let accepted = responder.accept(ird, ord, &[]).expect("accept");
    let there = accepted.params;
    match initiator.handle_rx(&accepted.reply).expect("our own reply") {
        Progress::Established { params: here, .. } => {
            assert_eq!(here.crc, there.crc);
            assert_eq!(here.send_markers, there.recv_markers);
            assert_eq!(here.recv_markers, there.send_markers);
            assert_eq!(here.peer_to_peer, there.peer_to_peer);
            if here.rev == 2 {
                assert!(here.ord <= there.ird, "{here:?} {there:?}");
                assert!(there.ord <= here.ird, "{here:?} {there:?}");
            }
        }
        Progress::InsufficientIrd { needed, .. } => assert!(needed > config.max_ird),
        Progress::NoCommonRtr { .. } => {
            assert!(config.peer_to_peer && config.rtr == RtrForms::NONE);
        }
        other => panic!("{other:?}"),
    }
}
