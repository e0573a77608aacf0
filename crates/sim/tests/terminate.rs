//! Every rule that a peer can break, and the Terminate that reports it.
//!
//! Most rules are tested by scripts, one in each file of `scripts/*.pkt`. This file has the tests
//! that need a loop.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::path::Path;

use anywarp_core::bounds;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::ddp::{Tagged, Untagged};
use anywarp_core::wire::rdmap::{AtomicRequest, Opcode, ReadRequest};
use anywarp_core::wire::{Msn, Stag, To};
use anywarp_sim::{
    EndId, Mr, RawId, Request, Setup, World, access, each_seed, framed, run_script, write,
};

#[test]
fn every_script_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "pkt"))
        .collect();
    names.sort();
    assert!(names.len() > 80, "scripts are missing");
    let mut failed = Vec::new();
    for path in &names {
        let text = std::fs::read_to_string(path).unwrap();
        // Each script runs twenty times. The seed decides in which pieces the bytes arrive.
        let result = std::panic::catch_unwind(|| each_seed(20, |seed| run_script(&text, seed)));
        if result.is_err() {
            failed.push(path.file_name().unwrap().to_owned());
        }
    }
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

fn write_of(mr: &Mr, at: usize, last: bool, payload: &[u8]) -> Vec<u8> {
    let header = Tagged {
        last,
        opcode: Opcode::Write,
        stag: mr.stag(),
        to: To(mr.all().addr + at as u64),
    };
    [&header.emit()[..], payload].concat()
}

fn send_of(msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    let header = Untagged {
        last,
        opcode: Opcode::Send,
        inv_stag: Stag(0),
        qn: 0,
        msn: Msn(msn),
        mo,
    };
    [&header.emit()[..], payload].concat()
}

/// A responder under test that has received the first message of its peer.
fn started(seed: u64) -> (World, EndId, RawId) {
    started_with(seed, &Setup::standard())
}

fn started_with(seed: u64, setup: &Setup) -> (World, EndId, RawId) {
    let mut w = World::new(seed);
    let (end, peer) = w.raw(setup, false);
    let rtr = Tagged {
        last: true,
        opcode: Opcode::Write,
        stag: Stag(1),
        to: To(0),
    };
    w[peer].sends(&rtr.emit());
    w.run();
    (w, end, peer)
}

fn codes(w: &mut World, peer: RawId) -> Vec<(u8, u8, u8)> {
    w[peer]
        .received()
        .iter()
        .filter_map(|f| f.terminate().map(|t| (t.layer, t.etype, t.code)))
        .collect()
}

#[test]
fn a_frame_with_a_flipped_bit_fails_its_crc_and_is_not_delivered() {
    // The CRC of a small frame is checked before any header. A changed bit in the length field moves the end of the
    // frame, so that more bytes have to arrive before the error is found.
    let bits = {
        let (w, end, _) = started(1);
        framed(&write_of(
            &w[end].register(64, access::WRITE),
            0,
            true,
            &[0x77; 20],
        ))
        .len()
            * 8
    };
    for bit in 0..bits {
        let (mut w, end, peer) = started(bit as u64);
        let mr = w[end].register(64, access::WRITE);
        w[end].recv(1, &[]);
        let mut frame = framed(&write_of(&mr, 0, true, &[0x77; 20]));
        frame[bit / 8] ^= 1 << (bit % 8);
        w[peer].sends_bytes(&frame);
        w[peer].sends(&send_of(1, 0, true, &[]));
        w[peer].sends_bytes(&vec![0; 70_000]);
        w.run();
        assert_eq!(codes(&mut w, peer), [(2, 0, 2)], "bit {bit}");
        assert_eq!(w[end].received()[0].status, Status::Flushed);
        assert_eq!(w[end].bytes(&mr), [0; 64], "bit {bit}");
    }
}

#[test]
fn a_flipped_bit_in_a_large_directly_received_frame_is_detected() {
    each_seed(300, |seed| {
        let (mut w, end, peer) = started(seed);
        let mr = w[end].register(60_000, access::WRITE);
        let other = w[end].register(60_000, access::READ);
        w[end].recv(1, &[mr.all()]);
        w[end].recv(2, &[mr.all()]);
        let payload = w.rng.bytes(60_000);
        let ulpdu = if w.rng.chance(50) {
            write_of(&mr, 0, true, &payload)
        } else {
            send_of(1, 0, true, &payload)
        };
        let mut frame = framed(&ulpdu);
        // Half of the changed bits are in the header.
        let most = if w.rng.chance(50) {
            18
        } else {
            frame.len() - 2
        };
        let bit = 16 + w.rng.below(most * 8);
        frame[bit / 8] ^= 1 << (bit % 8);
        w[peer].sends_bytes(&frame);
        w[peer].sends(&send_of(2, 0, true, &[]));
        w.run();
        assert_eq!(codes(&mut w, peer), [(2, 0, 2)], "bit {bit}");
        let got: Vec<_> = w[end]
            .received()
            .iter()
            .map(|c| (c.wr_id, c.status))
            .collect();
        assert_eq!(got, [(1, Status::Flushed), (2, Status::Flushed)]);
        assert_eq!(w[end].bytes(&other), vec![0; 60_000]);
        w[end].check_guards(&[&mr, &other]);
        assert!(!w[end].raised(AsyncEvent::QpAccess) && !w[end].raised(AsyncEvent::QpRequest));
    });
}

/// A large frame that breaks a rule gets the same Terminate whether it arrives whole or in pieces.
#[test]
fn large_and_small_frames_follow_the_same_rules() {
    type Make = fn(&Mr, &[u8]) -> Vec<u8>;
    let cases: [(Make, (u8, u8, u8), Status); 6] = [
        (|mr, p| write_of(mr, 1, true, p), (1, 1, 1), Status::Flushed),
        (
            |mr, p| {
                let mut bytes = write_of(mr, 0, true, p);
                bytes[3] ^= 0x10;
                bytes
            },
            (1, 1, 0),
            Status::Flushed,
        ),
        (|_, p| send_of(2, 0, true, p), (1, 2, 3), Status::Flushed),
        (|_, p| send_of(1, 4, true, p), (1, 2, 4), Status::Flushed),
        (
            |_, p| send_of(1, 0, true, p),
            (1, 2, 5),
            Status::LocalLength,
        ),
        (
            |mr, p| {
                let mut bytes = write_of(mr, 0, true, p);
                bytes[1] = 0x42;
                bytes
            },
            (0, 2, 6),
            Status::Flushed,
        ),
    ];
    for ((make, code, receive), crc) in cases.into_iter().flat_map(|c| [(c, true), (c, false)]) {
        // Without CRCs the payload is received directly into user memory, if the access is allowed.
        let setup = Setup {
            crc,
            ..Setup::standard()
        };
        each_seed(40, |seed| {
            let (mut w, end, peer) = started_with(seed, &setup);
            let mr = w[end].register(60_000, access::WRITE);
            w[end].recv(1, &[mr.part(0, 59_999)]);
            let payload = w.rng.bytes(60_000);
            let ulpdu = make(&mr, &payload);
            w[peer].sends(&ulpdu);
            w.run();
            let fpdus = w[peer].received();
            let t = fpdus[0].terminate().unwrap();
            assert_eq!((t.layer, t.etype, t.code), code);
            assert_eq!(usize::from(t.ddp_len.unwrap()), ulpdu.len());
            let header = t.ddp_header.unwrap();
            assert_eq!(*header.as_slice(), ulpdu[..header.as_slice().len()]);
            assert_eq!(fpdus.len(), 1);
            let got: Vec<_> = w[end]
                .received()
                .iter()
                .map(|c| (c.wr_id, c.status))
                .collect();
            assert_eq!(got, [(1, receive)]);
            assert_eq!(w[end].bytes(&mr), vec![0; 60_000], "nothing was placed");
        });
    }
}

#[test]
fn a_frame_truncated_at_any_byte() {
    let mut w = World::new(1);
    let (end, peer) = w.raw(&Setup::standard(), false);
    let mr = w[end].register(64, access::WRITE);
    let length = framed(&send_of(1, 0, true, &[])).len();
    for cut in 0..=length {
        w[end].recv(cut as u64, &[]);
        let frame = framed(&send_of(cut as u32 + 1, 0, true, &[]));
        w[peer].sends_bytes(&frame[..cut]);
        w.run();
        w[peer].sends_bytes(&frame[cut..]);
        w.run();
    }
    // The first Send is the ready-to-receive message, which consumes no receive, so the last receive stays posted.
    let ids: Vec<_> = w[end].received().iter().map(|c| c.wr_id).collect();
    assert_eq!(ids, (0..length as u64).collect::<Vec<_>>());
    assert_eq!(w[end].conn.state(), State::Rts);
    for cut in 0..framed(&write_of(&mr, 0, true, &[1; 33])).len() {
        let payload = vec![cut as u8 + 1; 33];
        let frame = framed(&write_of(&mr, 0, true, &payload));
        w[peer].sends_bytes(&frame[..cut]);
        w.run();
        assert_ne!(
            w[end].bytes(&mr)[..33],
            payload[..],
            "before it was complete"
        );
        w[peer].sends_bytes(&frame[cut..]);
        w.run();
        assert_eq!(w[end].bytes(&mr)[..33], payload[..]);
    }
}

#[test]
fn a_segment_shorter_than_its_header_is_refused_and_ends_the_stream() {
    for (whole, least) in [(Tagged::LEN, 1), (Untagged::LEN, 1)] {
        for len in least..whole {
            let (mut w, end, peer) = started(len as u64);
            w[end].recv(1, &[]);
            let header = if whole == Tagged::LEN {
                Tagged {
                    last: true,
                    opcode: Opcode::Write,
                    stag: Stag(1),
                    to: To(0),
                }
                .emit()
                .to_vec()
            } else {
                send_of(1, 0, true, &[])
            };
            w[peer].sends(&header[..len]);
            w.run();
            assert_eq!(codes(&mut w, peer), [(2, 0, 3)], "{len} of {whole}");
            assert_eq!(w[end].received()[0].status, Status::Flushed);
        }
    }
}

fn read_of(msn: u32, mr: &Mr, size: usize) -> Vec<u8> {
    let header = Untagged {
        last: true,
        opcode: Opcode::ReadRequest,
        inv_stag: Stag(0),
        qn: 1,
        msn: Msn(msn),
        mo: 0,
    };
    let request = ReadRequest {
        sink_stag: Stag(1),
        sink_to: To(0),
        size: size as u32,
        source_stag: mr.stag(),
        source_to: To(mr.all().addr),
    };
    [&header.emit()[..], &request.emit()].concat()
}

#[test]
fn one_read_above_the_ird_ends_the_stream() {
    for ird in [1, 4] {
        for over in [0, 1] {
            let setup = Setup {
                ird,
                mulpdu: 60_000,
                ..Setup::standard()
            };
            let mut w = World::new(u64::from(ird));
            let (end, peer) = w.raw(&setup, false);
            w.pipe_from(end).capacity = 700;
            let mr = w[end].register(4 << 20, access::READ);
            for msn in 1..=ird + over {
                w[peer].sends(&read_of(msn, &mr, 4 << 20));
            }
            w.run();
            let terminates = codes(&mut w, peer);
            if over == 0 {
                assert_eq!(w[end].conn.state(), State::Rts);
                assert!(terminates.is_empty());
            } else {
                assert_eq!(terminates, [(1, 2, 2)]);
                assert!(w[end].raised(AsyncEvent::QpRequest));
            }
        }
    }
}

#[test]
fn atomics_take_the_same_slots_as_reads() {
    // RFC 7306 §5.2.1 (2) [atomic-one-buffer], §5.2.2 (4) [atomic-ird]: Reads and atomics together are limited by the IRD.
    for over in [0, 1] {
        let setup = Setup {
            ird: 4,
            mulpdu: 60_000,
            ..Setup::standard()
        };
        let mut w = World::new(3);
        let (end, peer) = w.raw(&setup, false);
        w.pipe_from(end).capacity = 700;
        let mr = w[end].register(4 << 20, access::ALL);
        w[peer].sends(&read_of(1, &mr, 4 << 20));
        for msn in 2..=4 + over {
            let header = Untagged {
                last: true,
                opcode: Opcode::AtomicRequest,
                inv_stag: Stag(0),
                qn: 1,
                msn: Msn(msn),
                mo: 0,
            };
            let request = AtomicRequest::fetch_add(msn, mr.stag(), To(mr.all().addr), 1);
            w[peer].sends(&[&header.emit()[..], &request.emit()].concat());
        }
        w.run();
        let terminates = codes(&mut w, peer);
        if over == 0 {
            assert_eq!(w[end].conn.state(), State::Rts);
            assert!(terminates.is_empty());
        } else {
            assert_eq!(terminates, [(1, 2, 2)]);
        }
        assert_eq!(
            w[end].word(&mr, 0),
            3,
            "not all three atomics within the IRD were done, or another one was"
        );
    }
}

#[test]
fn memory_that_is_deregistered_while_it_is_read_ends_the_stream_and_fails_that_read() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let (source, small) = (
            w[b].register(6 << 20, access::READ),
            w[b].register(8, access::READ),
        );
        let sink = w[a].register(6 << 20, access::LOCAL);
        w.pipe_from(b).capacity = 100_000;
        w[a].post(write(1, source.remote(0)).from(&[]));
        w[a].post(anywarp_sim::read(2, small.remote(0)).from(&[sink.part(0, 8)]));
        w[a].post(anywarp_sim::read(3, source.remote(0)).from(&[sink.all()]));
        w[a].post(anywarp_sim::read(4, small.remote(0)).from(&[sink.part(0, 8)]));
        let until = w.now() + std::time::Duration::from_secs(1);
        while w[a].send_cq.is_empty() {
            w.turn(until);
        }
        w[b].deregister(&source);
        w.run();
        let done: Vec<_> = w[a]
            .completed()
            .iter()
            .map(|c| (c.wr_id, c.status))
            .collect();
        assert_eq!(
            done,
            [
                (1, Status::Success),
                (2, Status::Success),
                (3, Status::RemoteAccess),
                (4, Status::Flushed)
            ]
        );
    });
}

#[test]
fn responses_to_a_peer_that_does_not_read_are_bounded() {
    let (mut w, end, peer) = {
        let mut w = World::new(1);
        let (end, peer) = w.raw(&Setup::anywarp(), false);
        let hello = anywarp_core::wire::control::Control::Hello {
            version: 1,
            features: 0,
        };
        w[peer].sends(&hello.header().emit());
        w.run();
        (w, end, peer)
    };
    w.pipe_from(end).capacity = 0;
    let ping = anywarp_core::wire::control::Control::Ping.header().emit();
    for _ in 0..bounds::RESPONSES_MAX * 3 {
        w[peer].sends(&ping);
    }
    w.run();
    w.pipe_from(end).capacity = 1 << 20;
    w.run();
    assert!(w[peer].received().len() <= bounds::RESPONSES_MAX * 2 + 2);
    assert_eq!(w[end].conn.state(), State::Rts);
}
