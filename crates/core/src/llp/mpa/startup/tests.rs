//! Frames of RFC 5044 and RFC 6581, byte for byte, and two ends that connect.

use super::responder::confirm;
use super::*;
use crate::error::{Misuse, PeerError};
use crate::wire::mpa::StartupFrame;

const REQ: &[u8] = b"MPA ID Req Frame";
const REP: &[u8] = b"MPA ID Rep Frame";

fn raw(key: &[u8], tail: &[u8]) -> Vec<u8> {
    [key, tail].concat()
}

fn config() -> InitiatorConfig {
    InitiatorConfig::default()
}

fn initiator(config: InitiatorConfig) -> Initiator {
    Initiator::new(config).unwrap()
}

/// Returns the result of this Reply at an initiator with this configuration.
fn reply_to(config: InitiatorConfig, tail: &[u8]) -> Result<Progress, PeerError> {
    initiator(config).handle_rx(&raw(REP, tail))
}

fn established(config: InitiatorConfig, tail: &[u8]) -> StreamParams {
    match reply_to(config, tail) {
        Ok(Progress::Established { params, .. }) => params,
        other => panic!("{other:?}"),
    }
}

fn responder(tail: &[u8]) -> (Responder, Request) {
    let mut r = Responder::new(ResponderLimits::default());
    match r.handle_rx(&raw(REQ, tail)) {
        Ok(Incoming::Request(request)) => (r, request),
        other => panic!("{other:?}"),
    }
}

/// Returns the Reply to this Request without its key, and the agreed parameters.
fn accept(tail: &[u8], ird: u16, ord: u16) -> (Vec<u8>, Accepted) {
    let accepted = responder(tail).0.accept(ird, ord, b"").unwrap();
    let (key, rest) = accepted.reply.split_at(16);
    assert_eq!(key, REP);
    (rest.to_vec(), accepted)
}

/// A frame of revision 2 after its key: the flags S and C, and the enhanced block.
fn v2(block: [u8; 4]) -> Vec<u8> {
    [&[0x50, 2, 0, 4][..], &block].concat()
}

// ---- frames, byte for byte ----

#[test]
fn request_of_revision_1() {
    let c = InitiatorConfig {
        rev: 1,
        private_data: b"hi".to_vec(),
        ..config()
    };
    let i = initiator(c);
    assert_eq!(i.request(), raw(REQ, &[0x40, 1, 0, 2, b'h', b'i']));
}

#[test]
fn request_of_revision_2() {
    let rtr = RtrForms {
        send: false,
        ..RtrForms::ALL
    };
    let i = initiator(InitiatorConfig { rtr, ..config() });
    assert_eq!(i.request(), raw(REQ, &v2([0x80, 0x10, 0xc0, 0x10])));
    // `config` offers the Send form too. An offer of all three forms shows that the initiator may be anywarp.
    assert_eq!(
        initiator(config()).request(),
        raw(REQ, &v2([0xc0, 0x10, 0xc0, 0x10]))
    );
}

#[test]
fn reply_that_chooses_write() {
    let (reply, accepted) = accept(&v2([0x80, 0x10, 0xc0, 0x10]), 16, 16);
    assert_eq!(reply, v2([0x80, 0x10, 0x80, 0x10]));
    assert_eq!(accepted.params.rtr, Some(Rtr::Write));
    assert!(accepted.expects_rtr && !accepted.peer_may_be_anywarp);
    let params = established(config(), &reply);
    assert_eq!(params.rtr, Some(Rtr::Write));
    assert!(params.peer_to_peer && params.crc && !params.peer_is_anywarp);
    assert_eq!((params.ird, params.ord, params.rev), (16, 16, 2));
}

// ---- two ends of ours ----

#[test]
fn two_anywarp_ends_recognize_each_other() {
    let mut i = initiator(InitiatorConfig {
        private_data: b"ping".to_vec(),
        ..config()
    });
    let mut r = Responder::new(ResponderLimits::default());
    let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
        panic!()
    };
    assert!(request.peer_may_be_anywarp && request.peer_to_peer && request.crc);
    assert_eq!((request.ird, request.ord), (Some(16), Some(16)));
    assert_eq!(request.private_data, b"ping");
    let accepted = r.accept(8, 4, b"pong").unwrap();
    assert!(accepted.expects_rtr && accepted.peer_may_be_anywarp);
    assert!(!accepted.params.peer_is_anywarp, "only a Hello proves it");
    assert_eq!((accepted.params.ird, accepted.params.ord), (8, 4));
    match i.handle_rx(&accepted.reply).unwrap() {
        Progress::Established {
            consumed,
            params,
            private_data,
            peer_depths,
            rtr,
            crc_unconfirmed,
        } => {
            assert_eq!(peer_depths, Some(Depths { ird: 8, ord: 4 }));
            assert_eq!(consumed, accepted.reply.len());
            assert!(params.peer_is_anywarp && params.peer_to_peer && params.crc);
            assert_eq!(
                (params.ird, params.ord),
                (16, 8),
                "ORD lowered to the peer's IRD"
            );
            assert_eq!(private_data, b"pong");
            assert_eq!(rtr, Some(Rtr::Write));
            assert!(!crc_unconfirmed);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_ends_of_revision_1() {
    let mut i = initiator(config().older().unwrap());
    assert!(
        initiator(config())
            .config
            .older()
            .unwrap()
            .older()
            .is_none()
    );
    let mut r = Responder::new(ResponderLimits::default());
    let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
        panic!()
    };
    assert_eq!((request.rev, request.ird, request.ord), (1, None, None));
    assert!(!request.peer_may_be_anywarp && !request.peer_to_peer);
    let accepted = r.accept(8, 4, b"").unwrap();
    assert_eq!(accepted.reply, raw(REP, &[0x40, 1, 0, 0]));
    assert!(!accepted.expects_rtr);
    let Ok(Progress::Established {
        params, rtr: None, ..
    }) = i.handle_rx(&accepted.reply)
    else {
        panic!()
    };
    assert_eq!((params.ird, params.ord, params.rev), (16, 16, 1));
}

// ---- frames in pieces ----

#[test]
fn a_reply_in_pieces_or_followed_by_fpdus_is_parsed() {
    let (tail, _) = accept(&v2([0xc0, 0x10, 0xc0, 0x10]), 16, 16);
    let mut bytes = raw(REP, &tail);
    let len = bytes.len();
    bytes.extend([0, 14, 0xc1, 0x40]);
    let mut i = initiator(config());
    for n in 0..=bytes.len() {
        match i.clone().handle_rx(&bytes[..n]).unwrap() {
            Progress::NeedMore => assert!(n < len),
            Progress::Established { consumed, .. } => {
                assert!(n >= len);
                assert_eq!(consumed, len);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(
        i.handle_rx(&bytes),
        Ok(Progress::Established { .. })
    ));
}

#[test]
fn a_request_in_pieces_is_parsed_and_data_after_it_is_refused() {
    let bytes = initiator(config()).request();
    let mut r = Responder::new(ResponderLimits::default());
    for n in 0..bytes.len() {
        assert_eq!(r.handle_rx(&bytes[..n]), Ok(Incoming::NeedMore));
    }
    let behind = Err(PeerError::MpaStartup("bytes after the request"));
    let more = [&bytes[..], &[0]].concat();
    assert_eq!(r.clone().handle_rx(&more), behind);
    assert!(matches!(r.handle_rx(&bytes), Ok(Incoming::Request(_))));
    assert_eq!(r.handle_rx(&[]), Ok(Incoming::NeedMore));
    assert_eq!(r.handle_rx(&[0]), behind);
}

#[test]
fn two_initiators_or_two_responders_do_not_connect() {
    let request = initiator(config()).request();
    let crossed = Err(PeerError::MpaStartup("a request instead of a reply"));
    assert_eq!(initiator(config()).handle_rx(&request), crossed);
    let crossed = Err(PeerError::MpaStartup("a reply instead of a request"));
    let reply = raw(REP, &[0x40, 1, 0, 0]);
    assert_eq!(
        Responder::new(ResponderLimits::default()).handle_rx(&reply),
        crossed
    );
}

// ---- private data ----

#[test]
fn private_data_of_every_size_that_fits() {
    for len in [0, 248, 252, 256, 508, 509, 512, 513] {
        let private_data = vec![7; len];
        for (rev, room) in [(2, 508), (1, 512)] {
            let c = InitiatorConfig {
                rev,
                private_data: private_data.clone(),
                ..config()
            };
            let Ok(i) = Initiator::new(c) else {
                assert!(len > room);
                continue;
            };
            assert!(len <= room);
            let mut r = Responder::new(ResponderLimits::default());
            let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
                panic!()
            };
            assert_eq!(request.private_data, private_data);
            assert!(r.clone().reject(&private_data).is_ok());
            assert!(r.accept(1, 1, &vec![7; room + 1]).is_err());
            assert!(r.accept(1, 1, &private_data).is_ok(), "may be tried again");
        }
    }
}

#[test]
fn a_frame_without_its_announced_enhanced_block_is_refused() {
    let absent = Err(PeerError::MpaStartup(
        "enhanced block announced but missing",
    ));
    assert_eq!(reply_to(config(), &[0x50, 2, 0, 3, 0, 0, 0]), absent);
    let mut r = Responder::new(ResponderLimits::default());
    let bytes = raw(REQ, &[0x50, 2, 0, 0]);
    assert_eq!(r.handle_rx(&bytes).map(|_| ()), absent.map(|_| ()));
}

// ---- IRD and ORD ----

#[test]
fn a_responder_replies_with_the_lower_depths_of_both_ends() {
    for (theirs, ours, reply) in [
        // (IRD, ORD) of the request, of our ULP, of the reply
        ((16, 16), (16, 16), (16, 16)),
        ((1, 16), (16, 16), (16, 1)),
        ((0, 16), (16, 16), (16, 0)),
        ((16, 16), (4, 0), (4, 0)),
        ((300, 300), (1000, 1000), (128, 128)),
        ((0, 0), (0, 0), (0, 0)),
        // 0x3fff in one field is answered in the other
        ((0x3fff, 16), (8, 8), (8, 0x3fff)),
        ((16, 0x3fff), (8, 8), (0x3fff, 8)),
        ((0x3fff, 0x3fff), (8, 8), (0x3fff, 0x3fff)),
    ] {
        let [ih, il] = u16::to_be_bytes(theirs.0);
        let [oh, ol] = u16::to_be_bytes(theirs.1);
        let (_, accepted) = accept(&v2([ih, il, oh, ol]), ours.0, ours.1);
        let (frame, _) = StartupFrame::parse(&accepted.reply).unwrap().unwrap();
        let block = frame.enhanced.unwrap();
        assert_eq!((block.ird, block.ord), reply, "{theirs:?} {ours:?}");
        let params = accepted.params;
        let unless = |field: u16, ours: u16| if field == 0x3fff { ours } else { field };
        assert_eq!(params.ird, unless(reply.0, ours.0), "{theirs:?} {ours:?}");
        assert_eq!(params.ord, unless(reply.1, ours.1), "{theirs:?} {ours:?}");
    }
}

#[test]
fn an_initiator_lowers_its_ord_and_raises_its_ird() {
    for (reply, agreed) in [
        // (IRD, ORD) of the reply, of the initiator afterwards
        ((16, 16), (16, 16)),
        ((1, 1), (16, 1)),
        ((0, 0), (16, 0)),
        ((100, 100), (100, 16)),
        ((100, 128), (128, 16)),
        ((0x3fff, 0x3fff), (16, 16)),
    ] {
        let [ih, il] = u16::to_be_bytes(reply.0);
        let [oh, ol] = u16::to_be_bytes(reply.1);
        let params = established(config(), &v2([ih | 0x80, il, oh | 0x80, ol]));
        assert_eq!((params.ird, params.ord), agreed, "{reply:?}");
    }
}

#[test]
fn a_peer_that_needs_a_larger_ird_is_rejected_with_the_reason() {
    let progress = reply_to(config(), &v2([0x80, 16, 0x80, 129])).unwrap();
    let Progress::InsufficientIrd {
        consumed: 24,
        params,
        needed: 129,
    } = progress
    else {
        panic!("{progress:?}");
    };
    assert_eq!((params.crc, params.ird), (true, 128));
    let error = PeerError::MpaInsufficientIrd {
        needed: 129,
        have: 128,
    };
    assert_eq!(progress.error(), Some(error));
}

#[test]
fn depths_beyond_14_bits_are_cut() {
    let c = InitiatorConfig {
        ird: u16::MAX,
        ord: u16::MAX,
        ..config()
    };
    let bytes = initiator(c).request();
    assert_eq!(bytes[20..], [0xff, 0xfe, 0xff, 0xfe]);
}

// ---- CRC ----

#[test]
fn crcs_are_used_if_either_end_requests_them() {
    for (asked, answered) in [(true, true), (true, false), (false, true), (false, false)] {
        let c = InitiatorConfig {
            crc: asked,
            ..config()
        };
        let flags = if answered { 0x50 } else { 0x10 };
        let progress = reply_to(c, &[flags, 2, 0, 4, 0x80, 16, 0x80, 16]).unwrap();
        let Progress::Established {
            params,
            crc_unconfirmed,
            ..
        } = progress
        else {
            panic!("{progress:?}");
        };
        assert_eq!(params.crc, asked || answered);
        assert_eq!(crc_unconfirmed, asked && !answered);
    }
}

#[test]
fn a_responder_confirms_the_crc_in_its_reply() {
    for (asked, wanted) in [(true, true), (true, false), (false, true), (false, false)] {
        let flags = if asked { 0x40 } else { 0 };
        let mut r = Responder::new(ResponderLimits {
            crc: wanted,
            ..Default::default()
        });
        r.handle_rx(&raw(REQ, &[flags, 1, 0, 0])).unwrap();
        let accepted = r.accept(1, 1, b"").unwrap();
        assert_eq!(accepted.params.crc, asked || wanted);
        assert_eq!(accepted.reply[16] & 0x40 != 0, asked || wanted);
    }
}

#[test]
fn markers_are_asked_for_each_direction() {
    let (reply, accepted) = accept(&[0xc0, 1, 0, 0], 1, 1);
    assert_eq!(reply, [0x40, 1, 0, 0]);
    assert!(accepted.params.send_markers && !accepted.params.recv_markers);
    let c = InitiatorConfig {
        rev: 1,
        markers: true,
        ..config()
    };
    let params = established(c, &[0x40, 1, 0, 0]);
    assert!(!params.send_markers && params.recv_markers);
    let c = InitiatorConfig { rev: 1, ..config() };
    let params = established(c, &[0xc0, 1, 0, 0]);
    assert!(params.send_markers && !params.recv_markers);
}

// ---- ready-to-receive messages ----

#[test]
fn a_read_as_ready_to_receive_gets_a_slot_even_with_ird_0() {
    // cxgb4: offers Read alone.
    let (reply, accepted) = accept(&v2([0x80, 0, 0x40, 0]), 0, 0);
    assert_eq!(reply, v2([0x80, 1, 0x40, 0]));
    assert_eq!(
        (accepted.params.ird, accepted.params.rtr),
        (1, Some(Rtr::Read))
    );
}

#[test]
fn a_responder_confirms_forms_that_the_peer_can_send() {
    for (offered, confirmed) in [
        // send, write, read
        ((true, true, true), (true, true, true)),
        ((false, true, true), (false, true, false)),
        ((false, true, false), (false, true, false)),
        ((false, false, true), (false, false, true)),
        ((true, false, true), (false, false, true)),
        ((true, true, false), (false, true, false)),
        ((true, false, false), (true, false, false)),
        ((false, false, false), (false, true, false)),
    ] {
        let forms = |(send, write, read): (bool, bool, bool)| RtrForms { send, write, read };
        let (offered, confirmed) = (forms(offered), forms(confirmed));
        assert_eq!(confirm(offered, true), confirmed, "{offered:?}");
        if offered != RtrForms::ALL {
            assert_eq!(confirm(offered, false), confirmed, "{offered:?}");
        }
    }
    // A responder that is not to be recognized as anywarp confirms a single form.
    let write = RtrForms {
        write: true,
        ..RtrForms::NONE
    };
    assert_eq!(confirm(RtrForms::ALL, false), write);
}

#[test]
fn an_initiator_sends_a_form_that_was_confirmed() {
    for (block, rtr) in [
        ([0x80, 16, 0x80, 16], Rtr::Write),
        ([0x80, 16, 0x40, 16], Rtr::Read),
        ([0x80, 16, 0xc0, 16], Rtr::Write),
        ([0xc0, 16, 0x40, 16], Rtr::Read),
        ([0xc0, 16, 0x00, 16], Rtr::Send),
    ] {
        let params = established(config(), &v2(block));
        assert_eq!(params.rtr, Some(rtr));
        assert!(!params.peer_is_anywarp);
    }
}

#[test]
fn all_three_confirmed_forms_mean_nothing_if_they_were_not_offered() {
    let rtr = RtrForms {
        send: false,
        ..RtrForms::ALL
    };
    let c = InitiatorConfig { rtr, ..config() };
    assert!(!established(c, &v2([0xc0, 16, 0xc0, 16])).peer_is_anywarp);
}

#[test]
fn no_common_form_ends_the_stream() {
    let rtr = RtrForms {
        write: true,
        ..RtrForms::NONE
    };
    let c = InitiatorConfig { rtr, ..config() };
    for (c, block) in [(c, [0x80, 16, 0x40, 16]), (config(), [0x80, 16, 0, 16])] {
        let progress = reply_to(c, &v2(block)).unwrap();
        assert!(matches!(
            progress,
            Progress::NoCommonRtr { consumed: 24, .. }
        ));
        assert_eq!(progress.error(), Some(PeerError::MpaNoCommonRtr));
    }
}

#[test]
fn a_reply_without_the_enhanced_bit_selects_the_plain_stream() {
    let params = established(config(), &v2([0x40, 16, 0xc0, 16]));
    assert!(!params.peer_to_peer && !params.peer_is_anywarp);
    assert_eq!(params.rtr, None);
    // The Reply has no A if the Request had none.
    let c = InitiatorConfig {
        peer_to_peer: false,
        ..config()
    };
    assert_eq!(initiator(c.clone()).request()[20..], [0, 16, 0, 16]);
    assert!(!established(c, &v2([0x80, 16, 0x80, 16])).peer_to_peer);
}

#[test]
fn a_request_without_the_enhanced_bit_gets_a_reply_without_it() {
    // Linux siw sends no A. Without A, the forms that are set are ignored.
    for block in [[0, 16, 0, 16], [0x40, 16, 0xc0, 16]] {
        let (_, request) = responder(&v2(block));
        assert!(!request.peer_to_peer && !request.peer_may_be_anywarp);
        assert_eq!(request.rtr, RtrForms::NONE);
        let (reply, accepted) = accept(&v2(block), 16, 16);
        assert_eq!(reply, v2([0, 16, 0, 16]));
        assert!(!accepted.expects_rtr && accepted.params.rtr.is_none());
    }
}

// ---- revisions ----

#[test]
fn a_reply_has_the_revision_and_the_enhanced_block_of_the_request() {
    // Revision 2 without S is a plain frame. The reserved bits that siw sets are not echoed.
    assert_eq!(accept(&[0x4f, 2, 0, 0], 1, 1).0, [0x40, 2, 0, 0]);
    assert_eq!(accept(&[0x48, 1, 0, 0], 1, 1).0, [0x40, 1, 0, 0]);
    let refused = |tail: &[u8], why| {
        assert_eq!(reply_to(config(), tail), Err(PeerError::MpaStartup(why)));
    };
    refused(&[0x40, 2, 0, 0], "reply does not mirror the enhanced block");
    refused(&[0x40, 1, 0, 0], "reply with a different revision");
    refused(
        &[0x50, 3, 0, 4, 0, 0, 0, 0],
        "reply with a different revision",
    );
    for rev in [0, 3, 255] {
        let mut r = Responder::new(ResponderLimits::default());
        let unknown = Err(PeerError::MpaStartup("unknown revision"));
        assert_eq!(
            r.handle_rx(&raw(REQ, &[0x40, rev, 0, 4, 0, 0, 0, 0])),
            unknown
        );
    }
    let c = InitiatorConfig { rev: 0, ..config() };
    assert_eq!(
        Initiator::new(c).err(),
        Some(Misuse::InvalidArgument("mpa revision"))
    );
}

// ---- rejection ----

#[test]
fn a_rejection_carries_private_data_and_depths() {
    let (mut r, _) = responder(&v2([0xc0, 16, 0xc0, 16]));
    let reply = r.reject(b"no").unwrap();
    assert_eq!(
        reply,
        raw(REP, &[0x70, 2, 0, 6, 0x80, 128, 0, 0, b'n', b'o'])
    );
    assert_eq!(
        initiator(config()).handle_rx(&reply),
        Ok(Progress::Rejected {
            consumed: 26,
            private_data: b"no".to_vec(),
            rev: 2,
            peer_depths: Some(Depths { ird: 128, ord: 0 }),
        })
    );
    // A rejection has the older revision of its Request.
    let progress = reply_to(config(), &[0x60, 1, 0, 0]).unwrap();
    assert!(matches!(
        progress,
        Progress::Rejected {
            rev: 1,
            peer_depths: None,
            ..
        }
    ));
}

#[test]
fn a_request_gets_one_reply() {
    let mut r = Responder::new(ResponderLimits::default());
    assert!(r.accept(1, 1, b"").is_err());
    assert!(r.reject(b"").is_err());
    r.handle_rx(&raw(REQ, &[0x40, 1, 0, 0])).unwrap();
    assert!(r.accept(1, 1, b"").is_ok());
    assert!(r.accept(1, 1, b"").is_err());
    assert!(r.reject(b"").is_err());
}

#[test]
fn no_bytes_make_either_end_panic() {
    let mut x = 1u64;
    for round in 0..20_000 {
        let mut bytes = if round % 2 == 0 {
            REQ.to_vec()
        } else {
            REP.to_vec()
        };
        for _ in 0..round % 40 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            bytes.push(if bytes.len() == 18 {
                x as u8 & 1
            } else {
                x as u8
            });
        }
        let _ = initiator(config()).handle_rx(&bytes);
        let mut r = Responder::new(ResponderLimits::default());
        if let Ok(Incoming::Request(_)) = r.handle_rx(&bytes) {
            let accepted = r.accept(5, 5, b"x").unwrap();
            assert!(StartupFrame::parse(&accepted.reply).unwrap().is_some());
        }
    }
}
