//! Rules of RFC 5040 and RFC 5041 that the scripts of conversations (`scripts/*.pkt`) cannot express: the fields of all headers, the order of messages, and the
//! reports of local failures.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::time::Duration;

use anywarp_core::connection::First;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Remote, Sge};
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::rdmap::{Opcode, ReadRequest, Terminate};
use anywarp_core::wire::{Msn, Stag, To};
use anywarp_sim::{
    EndId, Fpdu, Mr, RawId, Request, Setup, World, access, each_seed, read, send, send_invalidate,
    write,
};

/// A buffer that the peer has advertised.
const THERE: Remote = Remote {
    rkey: Stag(0x700),
    to: To(0x1000),
};

/// An end that opened a stream to a scripted peer; segments have 129 bytes at most.
fn opened(seed: u64) -> (World, EndId, RawId) {
    let mut w = World::new(seed);
    let setup = Setup {
        mulpdu: 129,
        first: First::Nothing,
        ..Setup::standard()
    };
    let (end, peer) = w.raw(&setup, true);
    (w, end, peer)
}

/// An end whose scripted peer opened the stream.
fn answering(seed: u64) -> (World, EndId, RawId) {
    let mut w = World::new(seed);
    let setup = Setup {
        mulpdu: 128,
        ..Setup::standard()
    };
    let (end, peer) = w.raw(&setup, false);
    w[peer].sends(&tagged(Opcode::Write, Stag(1), 0, true, &[]));
    w.run();
    (w, end, peer)
}

fn tagged(opcode: Opcode, stag: Stag, to: u64, last: bool, payload: &[u8]) -> Vec<u8> {
    let to = To(to);
    let header = Tagged {
        last,
        opcode,
        stag,
        to,
    };
    [&header.emit()[..], payload].concat()
}

fn untagged(opcode: Opcode, msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    let header = Untagged {
        last,
        opcode,
        inv_stag: Stag(0),
        qn: opcode.queue().unwrap(),
        msn: Msn(msn),
        mo,
    };
    [&header.emit()[..], payload].concat()
}

fn read_request(msn: u32, request: ReadRequest) -> Vec<u8> {
    untagged(Opcode::ReadRequest, msn, 0, true, &request.emit())
}

fn statuses(completions: &[Completion]) -> Vec<(u64, Status)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn of(fpdus: &[Fpdu], opcode: Opcode) -> Vec<&Fpdu> {
    fpdus.iter().filter(|f| f.opcode() == opcode).collect()
}

fn payload(fpdus: &[&Fpdu]) -> Vec<u8> {
    fpdus.iter().flat_map(|f| f.payload().to_vec()).collect()
}

fn tagged_of(f: &Fpdu) -> Tagged {
    match f.header() {
        Header::Tagged(h) => h,
        Header::Untagged(h) => panic!("untagged: {h:?}"),
    }
}

fn untagged_of(f: &Fpdu) -> Untagged {
    match f.header() {
        Header::Untagged(h) => h,
        Header::Tagged(h) => panic!("tagged: {h:?}"),
    }
}

// ---------------------------------------------------------------------- sending

#[test]
fn an_untagged_message_is_cut_at_the_mulpdu_and_its_segments_agree() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = opened(seed);
        let data = w.rng.bytes(300);
        let mr = w[end].register(300, access::LOCAL);
        w[end].fill(&mr, &data);
        w[end].post(send(1).from(&[mr.all()]));
        w[end].post(send(2));
        w[end].post(send_invalidate(3, Stag(0x900)).from(&[mr.part(0, 200)]));
        w.run();
        let fpdus = w[peer].received();
        // RFC 5041 §5.2 [ddp-segment] [ddp-mo-offset], §4.1 [ddp-last], §4.3 [ddp-mo-zero] [ddp-msn-first]
        // [ddp-msn-increment] [ddp-msn-same] [ddp-qn-same], §5.3 [ddp-mo-ascending]: each segment has room for 111 bytes of payload.
        let got: Vec<_> = fpdus
            .iter()
            .map(|f| {
                let h = untagged_of(f);
                (h.qn, h.msn.0, h.mo, f.payload().len(), h.last)
            })
            .collect();
        assert_eq!(
            got,
            [
                (0, 1, 0, 111, false),
                (0, 1, 111, 111, false),
                (0, 1, 222, 78, true),
                (0, 2, 0, 0, true),
                (0, 3, 0, 111, false),
                (0, 3, 111, 89, true),
            ]
        );
        // RFC 5041 §5.2 [ddp-send-all]
        assert_eq!(payload(&fpdus.iter().take(3).collect::<Vec<_>>()), data);
        // RFC 5041 §4.3 [ddp-rsvdulp-same], RFC 5040 §4.1 [rdmap-inv-stag] [rdmap-inv-stag-zero]: the field is the same in all segments
        // of a message.
        for (f, inv) in fpdus.iter().zip([0, 0, 0, 0, 0x900, 0x900]) {
            assert_eq!(untagged_of(f).inv_stag, Stag(inv));
            assert_eq!(f.ulpdu[2..6], u32::to_be_bytes(inv));
            assert!(f.ulpdu.len() <= 129);
        }
    });
}

#[test]
fn a_tagged_message_is_cut_at_the_mulpdu_and_its_segments_agree() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = opened(seed);
        let data = w.rng.bytes(300);
        let mr = w[end].register(300, access::LOCAL);
        w[end].fill(&mr, &data);
        w[end].post(write(1, THERE).from(&[mr.all()]));
        w[end].post(write(2, THERE));
        w.run();
        let fpdus = w[peer].received();
        // RFC 5041 §5.2 [ddp-segment] [ddp-to-offset] [ddp-zero-len-one], §4.1 [ddp-last], §4.2 [ddp-stag-sent]: each
        // segment has room for 115 bytes of payload.
        let got: Vec<_> = fpdus
            .iter()
            .map(|f| {
                let h = tagged_of(f);
                (h.to.0, f.payload().len(), h.last)
            })
            .collect();
        assert_eq!(
            got[..3],
            [
                (0x1000, 115, false),
                (0x1000 + 115, 115, false),
                (0x1000 + 230, 70, true)
            ]
        );
        assert_eq!((got.len(), got[3].1, got[3].2), (4, 0, true));
        assert!(fpdus[..3].iter().all(|f| tagged_of(f).stag == THERE.rkey));
        assert_eq!(payload(&fpdus.iter().collect::<Vec<_>>()), data);
    });
}

#[test]
fn every_header_bit_has_its_specified_value() {
    let (mut w, end, peer) = opened(1);
    let mr = w[end].register(64, access::ALL);
    w[end].post(send(1).inline(b"a"));
    w[end].post(send(2).inline(b"b").solicited());
    w[end].post(send_invalidate(3, Stag(0x900)));
    let mut both = send_invalidate(4, Stag(0x900));
    both.solicited = true;
    w[end].post(both);
    w[end].post(write(5, THERE).inline(b"c"));
    w[end].post(read(6, THERE).from(&[mr.part(8, 5)]));
    w.run();
    let source = ReadRequest {
        sink_stag: Stag(0x701),
        sink_to: To(7),
        size: 4,
        source_stag: mr.stag(),
        source_to: To(mr.all().addr),
    };
    w[peer].sends(&read_request(1, source));
    w[peer].sends(&tagged(Opcode::Write, Stag(2), 0, true, b"bad"));
    w.run();
    let fpdus = w[peer].received();
    // RFC 5040 §4.1 [rdmap-control] [rdmap-reserved] [rdmap-version] [rdmap-opcode] [rdmap-model] [rdmap-queues],
    // RFC 5041 §4.1 [ddp-reserved] [ddp-version]: the control octets of all segments, and the queue of untagged ones.
    let got: Vec<_> = fpdus
        .iter()
        .map(|f| {
            let untagged = f.ulpdu[0] & 0x80 == 0;
            let queue = untagged.then(|| f.ulpdu[9]);
            (f.ulpdu[0], f.ulpdu[1], queue)
        })
        .collect();
    assert_eq!(
        got,
        [
            (0x41, 0x43, Some(0)),
            (0x41, 0x45, Some(0)),
            (0x41, 0x44, Some(0)),
            (0x41, 0x46, Some(0)),
            (0xc1, 0x40, None),
            (0x41, 0x41, Some(1)),
            (0xc1, 0x42, None),
            (0x41, 0x47, Some(2)),
        ]
    );
    for f in &fpdus {
        let valid = matches!(
            f.opcode(),
            Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate
        );
        if let Header::Untagged(h) = f.header() {
            // RFC 5040 §4.1 [rdmap-inv-stag-zero]
            assert_eq!(h.inv_stag, Stag(if valid { 0x900 } else { 0 }));
        }
    }
    // RFC 5040 §4.4 [read-request-header]
    let request = [
        &mr.stag().0.to_be_bytes()[..],
        &(mr.all().addr + 8).to_be_bytes(),
        &5_u32.to_be_bytes(),
        &THERE.rkey.0.to_be_bytes(),
        &THERE.to.0.to_be_bytes(),
    ]
    .concat();
    assert_eq!(fpdus[5].payload(), request);
    // RFC 5040 §4.8 [term-header] [term-control] [term-reserved]: the Terminate reports an invalid STag, and contains the length and
    // the header of the segment.
    let bad = tagged(Opcode::Write, Stag(2), 0, true, &[]);
    let terminate = [&[0x11, 0x00, 0xc0, 0, 0, 17][..], &bad].concat();
    assert_eq!(fpdus[7].payload(), terminate);
}

#[test]
fn read_responses_come_in_the_order_of_the_requests_and_name_their_sinks() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = answering(seed);
        let data = w.rng.bytes(1000);
        let mr = w[end].register(1000, access::READ);
        w[end].fill(&mr, &data);
        let sizes = [300, 0, 5, 114, 1000];
        for (i, size) in sizes.into_iter().enumerate() {
            let request = ReadRequest {
                sink_stag: Stag(0xdead_0000 + i as u32),
                sink_to: To(u64::MAX - 5000 + i as u64),
                size,
                source_stag: mr.stag(),
                source_to: To(mr.all().addr + 1000 - u64::from(size)),
            };
            w[peer].sends(&read_request(i as u32 + 1, request));
        }
        w.run();
        let fpdus = w[peer].received();
        let mut rest = &fpdus[..];
        for (i, size) in sizes.into_iter().enumerate() {
            // RFC 5040 §4.4 [read-sink-copied], §5.2.1 [read-response] [read-process-order], §5.2.2 [read-order]
            // [read-response-sink], §5.5 (20).
            let mut got: Vec<u8> = Vec::new();
            loop {
                let (f, behind) = rest.split_first().unwrap();
                rest = behind;
                let h = tagged_of(f);
                assert_eq!(h.opcode, Opcode::ReadResponse);
                assert_eq!(h.stag, Stag(0xdead_0000 + i as u32));
                let to = u64::MAX - 5000 + i as u64 + got.len() as u64;
                assert_eq!(h.to.0, to);
                got.extend(f.payload());
                if h.last {
                    break;
                }
            }
            assert_eq!(got, data[1000 - size as usize..]);
        }
        assert!(rest.is_empty());
        // RFC 5040 §5.2.1 [read-not-delivered]: the application gets no completion.
        assert!(w[end].received().is_empty() && w[end].completed().is_empty());
    });
}

// ---------------------------------------------------------------------- receiving

#[test]
fn reserved_bits_and_an_unused_stag_field_are_ignored() {
    for twist in [0x3c_u8, 0x04, 0x20] {
        let (mut w, end, peer) = answering(u64::from(twist));
        let mr = w[end].register(64, access::WRITE);
        w[end].recv(1, &[mr.part(0, 8)]);
        // RFC 5041 §4.1 [ddp-reserved], RFC 5040 §4.1 [rdmap-reserved] [rdmap-inv-stag-zero]
        let mut send = untagged(Opcode::Send, 1, 0, true, b"ignored!");
        send[0] |= twist;
        send[1] |= 0x30;
        send[2..6].copy_from_slice(&mr.stag().0.to_be_bytes());
        w[peer].sends(&send);
        let mut write = tagged(
            Opcode::Write,
            mr.stag(),
            mr.all().addr + 8,
            true,
            b"written",
        );
        write[0] |= twist;
        write[1] |= 0x30;
        w[peer].sends(&write);
        w.run();
        let got = w[end].received();
        assert_eq!(statuses(&got), [(1, Status::Success)]);
        assert_eq!(got[0].invalidated, None);
        assert_eq!(w[end].bytes(&mr)[..15], *b"ignored!written");
        assert_eq!(w[end].conn.state(), State::Rts);
        assert!(w[peer].received().is_empty());
    }
}

#[test]
fn a_message_is_delivered_with_its_last_segment_and_once() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = answering(seed);
        let mr = w[end].register(64, access::WRITE);
        for id in 0..3 {
            w[end].recv(id, &[mr.all()]);
        }
        // RFC 5041 §5.3 [ddp-deliver-once], §5.4 [ddp-deliver] [ddp-deliver-length], RFC 5040 §5.5 (16) [rdmap-send-delivered].
        w[peer].sends(&untagged(Opcode::Send, 1, 0, false, &[1; 20]));
        w.run();
        assert!(w[end].received().is_empty());
        w[peer].sends(&untagged(Opcode::Send, 1, 20, false, &[2; 3]));
        w.run();
        assert!(w[end].received().is_empty());
        w[peer].sends(&untagged(Opcode::Send, 1, 23, true, &[]));
        w.run();
        let got = w[end].received();
        assert_eq!(statuses(&got), [(0, Status::Success)]);
        assert_eq!(got[0].byte_len, 23);
        // RFC 5041 §5.2 [ddp-place-all]
        assert_eq!(w[end].bytes(&mr)[..23], [&[1; 20][..], &[2; 3]].concat());
        // RFC 5040 §5.1 [rdmap-write-not-delivered]: a Write is placed without a completion.
        let write = tagged(Opcode::Write, mr.stag(), mr.all().addr + 30, true, &[3; 4]);
        w[peer].sends(&write);
        w.run();
        assert!(w[end].received().is_empty() && w[end].completed().is_empty());
        assert_eq!(w[end].bytes(&mr)[30..34], [3; 4]);
        // RFC 5040 §5.3 [rdmap-send-consumes]: each Send consumes one receive, even with length 0.
        for msn in 2..4 {
            w[peer].sends(&untagged(Opcode::Send, msn, 0, true, &[]));
        }
        w.run();
        let got = w[end].received();
        assert_eq!(statuses(&got), [(1, Status::Success), (2, Status::Success)]);
        assert!(got.iter().all(|c| c.byte_len == 0));
        w[end].check_guards(&[&mr]);
    });
}

#[test]
fn a_read_returns_earlier_writes() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = answering(seed);
        let mr = w[end].register(64, Access::REMOTE_READ | access::WRITE);
        w[end].recv(1, &[mr.part(32, 32)]);
        let request = ReadRequest {
            sink_stag: Stag(0x700),
            sink_to: To(0),
            size: 64,
            source_stag: mr.stag(),
            source_to: To(mr.all().addr),
        };
        // RFC 5040 §5.5 (12), (17) [read-after-delivery]: a Read is executed after all preceding messages are placed.
        let write = tagged(Opcode::Write, mr.stag(), mr.all().addr, true, &[7; 32]);
        w[peer].sends(&write);
        w[peer].sends(&untagged(Opcode::Send, 1, 0, true, &[8; 32]));
        w[peer].sends(&read_request(1, request));
        w.run();
        let fpdus = w[peer].received();
        let got = payload(&of(&fpdus, Opcode::ReadResponse));
        assert_eq!(got, [[7; 32], [8; 32]].concat());
    });
}

#[test]
fn a_read_completes_only_with_the_last_segment_of_its_response() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = opened(seed);
        let mr = w[end].register(64, access::LOCAL);
        w[end].post(read(1, THERE).from(&[mr.part(0, 20)]));
        w[end].post(read(2, THERE).from(&[mr.part(20, 8)]));
        w[end].post(write(3, THERE).inline(b"behind"));
        w.run();
        // RFC 5040 §5.5 (15) [rdmap-complete-order]: the Write was sent, and its completion waits for the preceding
        // Reads.
        assert_eq!(of(&w[peer].received(), Opcode::Write).len(), 1);
        assert!(w[end].completed().is_empty());
        let part = |at: usize, len: usize, last| {
            let (stag, to) = (mr.stag(), mr.all().addr + at as u64);
            tagged(
                Opcode::ReadResponse,
                stag,
                to,
                last,
                &vec![at as u8 + 1; len],
            )
        };
        w[peer].sends(&part(0, 12, false));
        w.run();
        // RFC 5040 §5.5 (19), (20) [read-complete].
        assert!(w[end].completed().is_empty());
        w[peer].sends(&part(12, 8, true));
        w.run();
        assert_eq!(statuses(&w[end].completed()), [(1, Status::Success)]);
        w[peer].sends(&part(20, 8, true));
        w.run();
        let done = statuses(&w[end].completed());
        assert_eq!(done, [(2, Status::Success), (3, Status::Success)]);
        let want = [&[1; 12][..], &[13; 8], &[21; 8], &[0; 36]].concat();
        assert_eq!(w[end].bytes(&mr), want);
    });
}

#[test]
fn ord_limits_the_outstanding_reads() {
    for ord in [1, 2, 5] {
        let mut w = World::new(u64::from(ord));
        let setup = Setup {
            ord,
            first: First::Nothing,
            ..Setup::standard()
        };
        let (end, peer) = w.raw(&setup, true);
        let mr = w[end].register(64, access::LOCAL);
        // The seven Reads are sent as eight Read Requests, because a Read with two elements needs two.
        w[end].post(read(0, THERE).from(&[mr.part(0, 4), mr.part(8, 4)]));
        for id in 1..7 {
            w[end].post(read(id, THERE).from(&[mr.part(0, 8)]));
        }
        w.run();
        // RFC 5040 §6.1 [read-ord-reported] [read-ord-limit]: each response allows one more request.
        let mut asked: Vec<ReadRequest> = Vec::new();
        for answered in 0..8 {
            for f in w[peer].received() {
                assert_eq!(untagged_of(&f).msn.0, asked.len() as u32 + 1);
                asked.push(ReadRequest::parse(f.payload().try_into().unwrap()));
            }
            assert_eq!(asked.len(), (answered + ord as usize).min(8));
            let ReadRequest {
                sink_stag: stag,
                sink_to: to,
                size,
                ..
            } = asked[answered];
            let data = vec![9; size as usize];
            w[peer].sends(&tagged(Opcode::ReadResponse, stag, to.0, true, &data));
            w.run();
        }
        let want: Vec<_> = (0..7).map(|id| (id, Status::Success)).collect();
        assert_eq!(statuses(&w[end].completed()), want);
    }
}

// ---------------------------------------------------------------------- the end of a stream

#[test]
fn completed_requests_arrive_although_the_sender_disconnects_at_once() {
    each_seed(5, |seed| {
        let mut w = World::new(seed);
        let setup = Setup {
            mulpdu: 8000,
            first: First::Nothing,
            ..Setup::standard()
        };
        let (end, peer) = w.raw(&setup, true);
        let mr = w[end].register(400_000, access::LOCAL);
        let data = w.rng.bytes(400_000);
        w[end].fill(&mr, &data);
        w.pipe_from(end).capacity = 100_000;
        for id in 0..12 {
            w[end].post(send(id).from(&[mr.all()]));
        }
        let until = w.now() + Duration::from_secs(10);
        let mut done = Vec::new();
        while done.is_empty() {
            assert!(w.turn(until));
            done.extend(w[end].completed());
        }
        w[end].conn.leave("disconnected");
        w.run();
        // RFC 5041 §6.2.1 [ddp-graceful-flush]
        let fpdus = w[peer].received();
        assert!(w[peer].closed);
        let whole = fpdus.iter().filter(|f| f.header().last()).count();
        assert!(whole >= done.len(), "{whole} of {}", done.len());
        for f in &fpdus {
            let at = untagged_of(f).mo as usize;
            assert_eq!(f.payload(), &data[at..at + f.payload().len()]);
        }
        let flushed = w[end].completed();
        assert!(flushed.iter().all(|c| c.status == Status::Flushed));
        assert_eq!(done.len() + flushed.len(), 12);
        assert!(!flushed.is_empty());
    });
}

/// Whether a Terminate reports a local failure. It then contains no length and no headers.
fn is_local(f: &Fpdu) -> bool {
    let bare = Terminate {
        layer: 0,
        etype: 0,
        code: 0,
        ddp_len: None,
        ddp_header: None,
        read_request: None,
    };
    f.terminate() == Some(bare) && f.payload() == [0; 4]
}

#[test]
fn a_request_that_cannot_be_built_is_reported_to_the_peer_in_its_place() {
    type Spoil = fn(&mut World, EndId, &Mr) -> Sge;
    let spoils: [Spoil; 2] = [
        |_, _, mr| Sge {
            lkey: Stag(mr.stag().0 ^ 0x0101_0100),
            ..mr.all()
        },
        |w, end, mr| {
            w[end].deregister(mr);
            mr.all()
        },
    ];
    for spoil in spoils {
        each_seed(10, |seed| {
            let (mut w, end, peer) = opened(seed);
            let mr = w[end].register(300, access::ALL);
            let sge = spoil(&mut w, end, &mr);
            w[end].recv(9, &[]);
            w[end].post(send(1).inline(b"good"));
            w[end].post(send(2).from(&[sge]));
            w[end].post(send(3).inline(b"behind"));
            w.run();
            let fpdus = w[peer].received();
            // RFC 5040 §7.1 (1) [term-local], §5.4 [term-last]: nothing is sent after the Terminate.
            assert_eq!(fpdus.len(), 2, "{fpdus:?}");
            assert_eq!(fpdus[0].payload(), b"good");
            assert!(is_local(&fpdus[1]), "{}", fpdus[1].text());
            let done = statuses(&w[end].completed());
            assert_eq!(
                done,
                [
                    (1, Status::Success),
                    (2, Status::LocalProtection),
                    (3, Status::Flushed)
                ]
            );
            assert_eq!(statuses(&w[end].received()), [(9, Status::Flushed)]);
            assert!(w[peer].closed);
            // RFC 5041 §6.2.1 [ddp-graceful-error]: requests that are posted now fail.
            w[end].post(send(4).inline(b"too late"));
            w.run();
            assert_eq!(statuses(&w[end].completed()), [(4, Status::Flushed)]);
            assert!(w[peer].received().is_empty());
        });
    }
}

#[test]
fn memory_deregistered_during_a_send_causes_a_terminate() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = opened(seed);
        let mr = w[end].register(4 << 20, access::ALL);
        w.pipe_from(end).capacity = 10_000;
        w[end].post(send(1).from(&[mr.all()]));
        let until = w.now() + Duration::from_secs(1);
        while w[peer].received().is_empty() {
            assert!(w.turn(until));
        }
        w[end].deregister(&mr);
        w.run();
        let fpdus = w[peer].received();
        let (terminate, before) = fpdus.split_last().unwrap();
        assert!(is_local(terminate), "{}", terminate.text());
        assert!(before.iter().all(|f| !f.header().last()), "cut short");
        let done = statuses(&w[end].completed());
        assert_eq!(done, [(1, Status::LocalProtection)]);
    });
}

#[test]
fn a_read_that_fails_in_the_middle_is_reported_with_its_remainder() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = answering(seed);
        let len = 4 << 20;
        let mr = w[end].register(len, access::READ);
        w.pipe_from(end).capacity = 10_000;
        let request = ReadRequest {
            sink_stag: Stag(0x700),
            sink_to: To(0x5000),
            size: len as u32,
            source_stag: mr.stag(),
            source_to: To(mr.all().addr),
        };
        w[peer].sends(&read_request(1, request));
        let until = w.now() + Duration::from_secs(1);
        let mut fpdus = Vec::new();
        while fpdus.is_empty() {
            assert!(w.turn(until));
            fpdus.extend(w[peer].received());
        }
        w[end].deregister(&mr);
        w.run();
        fpdus.extend(w[peer].received());
        let (terminate, before) = fpdus.split_last().unwrap();
        let got = payload(&before.iter().collect::<Vec<_>>()).len() as u64;
        assert!(got > 0 && got < len as u64);
        // RFC 5040 §4.8 [term-rdma-header]: the header describes the part of the Read that was not sent.
        let t = terminate.terminate().unwrap();
        assert_eq!((t.layer, t.etype, t.code), (0, 1, 0));
        let left = ReadRequest::parse(&t.read_request.unwrap());
        assert_eq!(
            left,
            ReadRequest {
                sink_to: To(0x5000 + got),
                size: (len as u64 - got) as u32,
                source_to: To(mr.all().addr + got),
                ..request
            }
        );
        assert_eq!((t.ddp_len, t.ddp_header), (None, None));
        assert!(w[peer].closed);
    });
}

#[test]
fn the_first_error_is_reported_and_later_segments_are_dropped() {
    each_seed(20, |seed| {
        let (mut w, end, peer) = answering(seed);
        let mr = w[end].register(64, access::WRITE);
        w[end].recv(1, &[mr.all()]);
        let base = mr.all().addr;
        w[peer].sends(&tagged(Opcode::Write, mr.stag(), base + 60, true, &[1; 5]));
        w[peer].sends(&tagged(Opcode::Write, Stag(3), base, true, &[2; 6]));
        w[peer].sends(&untagged(Opcode::Send, 9, 0, true, &[3; 7]));
        w[peer].sends(&tagged(Opcode::Write, mr.stag(), base, true, &[4; 8]));
        w[peer].sends(&untagged(Opcode::Send, 1, 0, true, &[5; 9]));
        w.run();
        let fpdus = w[peer].received();
        // RFC 5040 §7.1 (4) [term-first], §5.4 [term-once], RFC 5041 §7.1 [ddp-silent] [ddp-cease].
        assert_eq!(fpdus.len(), 1);
        let t = fpdus[0].terminate().unwrap();
        assert_eq!((t.layer, t.etype, t.code), (1, 1, 1));
        assert_eq!(t.ddp_len, Some(19));
        assert_eq!(w[end].bytes(&mr), [0; 64]);
        assert_eq!(statuses(&w[end].received()), [(1, Status::Flushed)]);
        assert!(w[end].raised(AsyncEvent::QpAccess));
    });
}

#[test]
fn a_completion_queue_overflow_ends_only_its_own_streams() {
    each_seed(10, |seed| {
        let mut w = World::new(seed);
        let (host_a, host_b) = (w.host(), w.host());
        let small = Setup {
            cqe: 3,
            ..Setup::anywarp()
        };
        let (a, b) = w.connect(&host_a, &small, &host_b, &Setup::anywarp());
        let (c, d) = w.connect(&host_a, &Setup::anywarp(), &host_b, &Setup::anywarp());
        for id in 0..20 {
            for (from, to) in [(a, b), (c, d)] {
                w[to].recv(id, &[]);
                w[from].post(send(id));
            }
        }
        w.run();
        // RFC 5040 §8.1.1 (10) [rdmap-cq-overflow]
        assert_eq!(w[a].conn.state(), State::Error);
        for end in [c, d] {
            assert_eq!(w[end].conn.state(), State::Rts);
        }
        let want: Vec<_> = (0..20).map(|id| (id, Status::Success)).collect();
        assert_eq!(statuses(&w[c].completed()), want);
        assert_eq!(statuses(&w[d].received()), want);
        w[c].post(send(20));
        w[d].recv(20, &[]);
        w.run();
        assert_eq!(statuses(&w[d].received()), [(20, Status::Success)]);
    });
}

#[test]
fn an_overflow_towards_a_standard_peer_is_reported_with_a_terminate() {
    let mut w = World::new(1);
    let setup = Setup {
        cqe: 3,
        first: First::Nothing,
        ..Setup::standard()
    };
    let (end, peer) = w.raw(&setup, true);
    for id in 0..4 {
        w[end].post(send(id));
    }
    w.run();
    let fpdus = w[peer].received();
    assert!(is_local(fpdus.last().unwrap()));
    assert!(
        fpdus[..fpdus.len() - 1]
            .iter()
            .all(|f| f.opcode() == Opcode::Send)
    );
    assert!(w[end].raised(AsyncEvent::QpFatal));
    assert!(w[peer].closed);
}
