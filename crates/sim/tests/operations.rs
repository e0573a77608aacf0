//! Every operation between two ends, with all bytes compared.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::sync::Arc;

use anywarp_core::bounds::{COALESCE_BEHIND, COALESCE_BYTES, COALESCE_TCP, COPY_LIMIT};
use anywarp_core::connection::{First, Peer};
use anywarp_core::llp::mpa::frame::{TxBatch, mulpdu};
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::counter::{Counter, Entry, Unit};
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Completion, Status, WcOp};
use anywarp_core::verbs::wr::{Bind, Op, Sge, WorkRequest};
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, Terminate};
use anywarp_core::wire::{Msn, QN_ATOMIC_RESPONSE, QN_READ, Stag, To};
use anywarp_sim::{
    Mr, Request, Rng, Setup, World, access, compare_swap, each_seed, fetch_add, read, send,
    send_imm, send_invalidate, write, write_imm,
};

/// Sizes just below, at and above the limits of segments, frames and batches.
const SIZES: [usize; 26] = [
    0,
    1,
    2,
    3,
    4,
    1423,
    1424,
    1425,
    4095,
    16 * 1024 - 1,
    16 * 1024,
    64_747,
    64_748,
    64_749,
    64_752,
    64_753,
    64_765,
    64_766,
    64_767,
    64_768,
    64_769,
    64_770,
    64_771,
    64_772,
    131_072,
    (1 << 20) + 3,
];

/// The setup of an end whose peer is anywarp, and that of an end whose peer is a standard implementation.
fn both() -> [Setup; 2] {
    [Setup::anywarp(), Setup::standard()]
}

fn ok(completions: &[Completion], ids: &[u64]) {
    let got: Vec<_> = completions.iter().map(|c| (c.wr_id, c.status)).collect();
    let want: Vec<_> = ids.iter().map(|id| (*id, Status::Success)).collect();
    assert_eq!(got, want);
}

/// The first `len` bytes of `mr` as a list of up to `most` elements of random lengths.
fn cut(rng: &mut Rng, mr: &Mr, len: usize, most: usize) -> Vec<Sge> {
    let mut sges = Vec::new();
    let mut at = 0;
    for i in 0..most {
        let left = len - at;
        let n = if i + 1 == most {
            left
        } else {
            rng.below(left + 1)
        };
        sges.push(mr.part(at, n));
        at += n;
    }
    sges
}

#[test]
fn a_send_of_any_size_arrives_in_its_receive() {
    for setup in both() {
        each_seed(2, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            for (i, size) in SIZES.into_iter().enumerate() {
                let id = i as u64;
                let data = w.rng.bytes(size);
                let from = w[a].register(size, access::LOCAL);
                let to = w[b].register(size + 7, access::LOCAL);
                w[a].fill(&from, &data);
                let (n, m) = (1 + w.rng.below(5), 1 + w.rng.below(5));
                let sges = cut(&mut w.rng.clone(), &from, size, n);
                let places = cut(&mut w.rng.clone(), &to, size + 7, m);
                w[b].recv(id, &places);
                w[a].post(send(id).from(&sges));
                w.run();
                ok(&w[a].completed(), &[id]);
                let got = w[b].received();
                ok(&got, &[id]);
                assert_eq!(
                    (got[0].byte_len as usize, got[0].op, got[0].imm),
                    (size, WcOp::Recv, None)
                );
                let bytes = w[b].bytes(&to);
                assert!(bytes[..size] == data, "{size} bytes differ");
                assert_eq!(bytes[size..], [0; 7]);
            }
        });
    }
}

#[test]
fn messages_arrive_in_order_and_fill_receives_in_order() {
    for setup in both() {
        each_seed(6, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let mut sent = Vec::new();
            for id in 0..100 {
                let size = *w.rng.pick(&[0, 1, 60, 900, 5_000, 20_000]);
                let data = w.rng.bytes(size);
                let (from, to) = (
                    w[a].register(size, access::LOCAL),
                    w[b].register(20_000, access::LOCAL),
                );
                w[a].fill(&from, &data);
                w[b].recv(1000 + id, &[to.all()]);
                w[a].post(send(id).from(&[from.all()]));
                sent.push((data, to));
                if w.rng.chance(20) {
                    let until = w.now() + std::time::Duration::from_micros(50);
                    w.turn(until);
                }
            }
            w.run();
            ok(&w[a].completed(), &(0..100).collect::<Vec<_>>());
            let got = w[b].received();
            ok(&got, &(1000..1100).collect::<Vec<_>>());
            for (c, (data, to)) in got.iter().zip(&sent) {
                assert_eq!(c.byte_len as usize, data.len());
                assert_eq!(w[b].bytes(to)[..data.len()], data[..]);
            }
        });
    }
}

#[test]
fn inline_data_is_copied_when_it_is_posted() {
    for setup in both() {
        let mut w = World::new(3);
        let (a, b) = w.pair(&setup);
        let to = w[b].register(600, access::ALL);
        for size in [0, 1, 63, 64, 65, 512] {
            let data = w.rng.bytes(size);
            w[b].recv(1, &[to.all()]);
            w[a].post(send(1).inline(&data));
            w[a].post(write(2, to.remote(10)).inline(&data));
            w.run();
            ok(&w[a].completed(), &[1, 2]);
            ok(&w[b].received(), &[1]);
            assert_eq!(w[b].bytes(&to)[10..10 + size], data[..]);
        }
        assert!(w[a].try_post(send(3).inline(&[0; 513])).is_err());
    }
}

#[test]
fn a_solicited_send_makes_a_solicited_completion() {
    for setup in both() {
        let mut w = World::new(4);
        let (a, b) = w.pair(&setup);
        let to = w[b].register(8, access::ALL);
        for id in 0..2 {
            w[b].recv(id, &[to.all()]);
        }
        w[a].post(send(1).inline(b"x").solicited());
        w[a].post(send(2).inline(b"y"));
        w.run();
        let solicited: Vec<_> = w[b].received().iter().map(|c| c.solicited).collect();
        assert_eq!(solicited, [true, false]);
    }
}

#[test]
fn a_send_with_immediate_carries_it_between_anywarp_ends() {
    each_seed(4, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let to = w[b].register(100_000, access::LOCAL);
        let data = w.rng.bytes(100_000);
        let from = w[a].register(100_000, access::LOCAL);
        w[a].fill(&from, &data);
        for id in 0..3 {
            w[b].recv(id, &[to.all()]);
        }
        w[a].post(send_imm(1, [1, 2, 3, 4]).from(&[from.all()]));
        w[a].post(send(2));
        w[a].post(send_imm(3, [0; 4]).solicited());
        w.run();
        ok(&w[a].completed(), &[1, 2, 3]);
        let imms: Vec<_> = w[b].received().iter().map(|c| c.imm).collect();
        assert_eq!(imms, [Some([1, 2, 3, 4]), None, Some([0; 4])]);
        assert_eq!(w[b].bytes(&to), data);
    });
}

#[test]
fn a_send_with_immediate_to_a_standard_peer_is_refused_and_nothing_of_it_is_sent() {
    let mut w = World::new(5);
    let (a, b) = w.pair(&Setup::standard());
    let to = w[b].register(8, access::LOCAL);
    w[b].recv(1, &[to.all()]);
    w[a].post(send_imm(1, [1, 2, 3, 4]).inline(b"x"));
    w.run();
    assert_eq!(w[a].completed()[0].status, Status::LocalQpOperation);
    assert_eq!(w[b].received()[0].status, Status::Flushed);
    assert_eq!(w[b].bytes(&to), [0; 8]);
}

/// A type 2 memory window over `mr`, bound by a work request of queue pair `of`.
fn bind(w: &mut World, of: anywarp_sim::EndId, mr: &Mr, access: Access) -> Stag {
    let end = &mut w[of];
    let host = end.host.clone();
    let window = host
        .rnic
        .regions
        .alloc_window(host.pd, true, &mut || host.random())
        .unwrap();
    let rkey = Stag(window.0 ^ 0x55);
    end.post(WorkRequest {
        op: Op::Bind(Bind {
            window,
            rkey,
            mr: mr.stag(),
            addr: mr.all().addr + 16,
            len: 32,
            access,
        }),
        ..send(900)
    });
    w.run();
    let done = w[of].completed();
    assert_eq!((done[0].status, done[0].op), (Status::Success, WcOp::Bind));
    rkey
}

#[test]
fn a_send_with_invalidate_ends_a_window_of_type_2() {
    for setup in both() {
        for solicited in [false, true] {
            let mut w = World::new(6);
            let (a, b) = w.pair(&setup);
            let mr = w[b].register(64, access::ALL);
            let rkey = bind(&mut w, b, &mr, access::WRITE);
            let remote = anywarp_core::verbs::wr::Remote {
                rkey,
                ..mr.remote(16)
            };
            w[b].recv(1, &[]);
            w[a].post(write(1, remote).inline(b"window"));
            let mut inv = send_invalidate(2, rkey);
            inv.solicited = solicited;
            w[a].post(inv);
            w.run();
            ok(&w[a].completed(), &[1, 2]);
            let got = w[b].received();
            ok(&got, &[1]);
            assert_eq!(got[0].invalidated, Some(rkey));
            assert_eq!(got[0].solicited, solicited);
            assert_eq!(w[b].bytes(&mr)[16..22], *b"window");
            // The window is invalid: the next access fails.
            w[a].post(write(3, remote).inline(b"w"));
            w.run();
            let status = w[a].completed()[0].status;
            if setup.peer == Peer::Anywarp {
                assert_eq!(status, Status::RemoteAccess);
            }
            assert_eq!(w[b].conn.state(), State::Error);
            assert!(w[b].raised(AsyncEvent::QpAccess));
        }
    }
}

/// The next stream of the queue pair, or the next queue pair with its number, may have another peer.
#[test]
fn the_windows_of_a_queue_pair_end_with_its_stream() {
    for destroyed in [false, true] {
        let mut w = World::new(6);
        let (_, b) = w.pair(&Setup::anywarp());
        let mr = w[b].register(64, access::ALL);
        let rkey = bind(&mut w, b, &mr, access::WRITE);
        let (host, qpn) = (w[b].host.clone(), w[b].qpn());
        let (pd, to) = (host.pd, To(mr.all().addr + 16));
        let usable = || {
            let regions = &host.rnic.regions;
            regions
                .check(rkey, pd, qpn, Access::REMOTE_WRITE, to, 8)
                .is_ok()
        };
        assert!(usable());
        if destroyed {
            w[b].conn.purge();
        } else {
            w[b].conn.set_state(State::Reset);
        }
        assert!(!usable(), "destroyed: {destroyed}");
    }
}

#[test]
fn a_window_of_another_queue_pair_is_not_invalidated_by_a_send() {
    for setup in both() {
        let mut w = World::new(8);
        let (near, far) = (w.host(), w.host());
        let (a, b) = w.connect(&near, &setup, &far, &setup);
        let (c, d) = w.connect(&near, &setup, &far, &setup);
        let mr = far.register(64, access::ALL);
        let rkey = bind(&mut w, d, &mr, access::WRITE);
        w[b].recv(1, &[]);
        w[a].post(send_invalidate(2, rkey));
        w.run();
        // RFC 5040 §5.3 [rdmap-invalidate]: the window belongs to another stream, so this stream fails.
        assert_eq!(w[b].conn.state(), State::Error);
        assert_eq!(w[b].received()[0].status, Status::Flushed);
        if setup.peer == Peer::Anywarp {
            assert_eq!(w[a].completed()[0].status, Status::RemoteAccess);
        }
        // The stream of the window can still use the window, and invalidate it.
        let remote = anywarp_core::verbs::wr::Remote {
            rkey,
            ..mr.remote(16)
        };
        w[d].recv(3, &[]);
        w[c].post(write(4, remote).inline(b"window"));
        w[c].post(send_invalidate(5, rkey));
        w.run();
        ok(&w[c].completed(), &[4, 5]);
        assert_eq!(w[d].received()[0].invalidated, Some(rkey));
        assert_eq!(far.bytes(&mr)[16..22], *b"window");
    }
}

#[test]
fn a_region_is_not_invalidated_by_a_send() {
    let mut w = World::new(7);
    let (a, b) = w.pair(&Setup::anywarp());
    let mr = w[b].register(64, access::ALL);
    w[b].recv(1, &[]);
    w[a].post(send_invalidate(2, mr.stag()));
    w.run();
    assert_eq!(w[a].completed()[0].status, Status::RemoteAccess);
    assert_eq!(w[b].received().len(), 1);
    let still = w[b]
        .rnic
        .regions
        .check(mr.stag(), w[b].pd, 0, access::WRITE, mr.remote(0).to, 64);
    assert!(still.is_ok());
}

#[test]
fn a_write_of_any_size_changes_only_its_destination() {
    for setup in both() {
        each_seed(2, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            for (i, size) in SIZES.into_iter().enumerate() {
                let data = w.rng.bytes(size);
                let from = w[a].register(size, access::LOCAL);
                let to = w[b].register(size + 20, access::WRITE);
                w[a].fill(&from, &data);
                let n = 1 + w.rng.below(6);
                let sges = cut(&mut w.rng.clone(), &from, size, n);
                w[a].post(write(i as u64, to.remote(9)).from(&sges));
                w.run();
                let done = w[a].completed();
                ok(&done, &[i as u64]);
                assert_eq!(done[0].op, WcOp::Write);
                let bytes = w[b].bytes(&to);
                assert_eq!(bytes[..9], [0; 9]);
                assert!(bytes[9..9 + size] == data, "{size} bytes differ");
                assert_eq!(bytes[9 + size..], [0; 11]);
            }
            assert!(w[b].received().is_empty());
        });
    }
}

#[test]
fn a_write_with_immediate_takes_a_receive_and_reports_its_length() {
    for setup in both() {
        each_seed(2, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            for (i, size) in SIZES.into_iter().enumerate() {
                let (id, data) = (i as u64, w.rng.bytes(size));
                let from = w[a].register(size, access::LOCAL);
                let to = w[b].register(size, access::WRITE);
                let untouched = w[b].register(16, access::LOCAL);
                w[a].fill(&from, &data);
                w[b].recv(id, &[untouched.all()]);
                let mut request =
                    write_imm(id, to.remote(0), [9, 8, 7, i as u8]).from(&[from.all()]);
                request.solicited = i % 2 == 0;
                w[a].post(request);
                w.run();
                ok(&w[a].completed(), &[id]);
                let got = w[b].received();
                ok(&got, &[id]);
                let c = &got[0];
                assert_eq!(
                    (c.op, c.imm),
                    (WcOp::RecvWriteImm, Some([9, 8, 7, i as u8]))
                );
                assert_eq!((c.byte_len as usize, c.solicited), (size, i % 2 == 0));
                assert!(w[b].bytes(&to) == data);
                assert_eq!(w[b].bytes(&untouched), [0; 16]);
            }
        });
    }
}

#[test]
fn a_read_of_any_size_returns_the_data() {
    for setup in both() {
        each_seed(2, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            for (i, size) in SIZES.into_iter().enumerate() {
                let data = w.rng.bytes(size + 5);
                let source = w[b].register(size + 5, access::READ);
                let sink = w[a].register(size + 9, access::LOCAL);
                w[b].fill(&source, &data);
                let n = 1 + w.rng.below(16);
                let sges = cut(&mut w.rng.clone(), &sink, size, n);
                w[a].post(read(i as u64, source.remote(5)).from(&sges));
                w.run();
                let done = w[a].completed();
                ok(&done, &[i as u64]);
                assert_eq!((done[0].op, done[0].byte_len as usize), (WcOp::Read, size));
                let bytes = w[a].bytes(&sink);
                assert!(bytes[..size] == data[5..], "{size} bytes differ");
                assert_eq!(bytes[size..], [0; 9]);
            }
            assert!(w[b].received().is_empty() && w[b].completed().is_empty());
        });
    }
}

#[test]
fn a_read_of_length_0_accesses_no_memory() {
    for setup in both() {
        let mut w = World::new(8);
        let (a, _b) = w.pair(&setup);
        let nowhere = anywarp_core::verbs::wr::Remote {
            rkey: Stag(0xdead_be00),
            to: To(u64::MAX),
        };
        w[a].post(read(1, nowhere));
        w[a].post(write(2, nowhere));
        w.run();
        ok(&w[a].completed(), &[1, 2]);
    }
}

#[test]
fn atomics_change_the_word_and_return_the_old_value() {
    for setup in both() {
        let mut w = World::new(9);
        let (a, b) = w.pair(&setup);
        let word = w[b].register(16, access::ATOMIC);
        let old = w[a].register(64, access::LOCAL);
        w[b].fill(&word, &[[0; 8], 40_u64.to_ne_bytes()].concat());
        w[a].post(fetch_add(1, word.remote(8), 2).from(&[old.part(0, 8)]));
        w[a].post(compare_swap(2, word.remote(8), 42, 1 << 40).from(&[old.part(8, 8)]));
        w[a].post(compare_swap(3, word.remote(8), 42, 7).from(&[old.part(16, 8)]));
        w[a].post(fetch_add(4, word.remote(8), u64::MAX).from(&[old.part(24, 8)]));
        w.run();
        let done = w[a].completed();
        ok(&done, &[1, 2, 3, 4]);
        assert_eq!(
            done.iter().map(|c| (c.op, c.byte_len)).collect::<Vec<_>>(),
            [
                (WcOp::FetchAdd, 8),
                (WcOp::CompareSwap, 8),
                (WcOp::CompareSwap, 8),
                (WcOp::FetchAdd, 8)
            ]
        );
        let olds: Vec<_> = (0..4).map(|i| w[a].word(&old, 8 * i)).collect();
        assert_eq!(olds, [40, 42, 1 << 40, 1 << 40]);
        assert_eq!(w[b].word(&word, 8), (1 << 40) - 1);
        assert_eq!(w[b].word(&word, 0), 0);
    }
}

#[test]
fn immediates_arrive_in_the_order_of_posting() {
    // RFC 7306 §6.3 [imm-order] [imm-issue-order]
    for setup in both() {
        let mut w = World::new(8);
        let (a, b) = w.pair(&setup);
        let there = w[b].register(8, access::ALL);
        let given: Vec<[u8; 4]> = (0..20_u32).map(u32::to_be_bytes).collect();
        for (id, value) in (0..).zip(&given) {
            w[b].recv(id, &[]);
            w[a].post(write_imm(id, there.remote(0), *value).inline(&value[..]));
        }
        w.run();
        let got = w[b].received();
        ok(&got, &(0..20).collect::<Vec<_>>());
        let got: Vec<_> = got.iter().filter_map(|c| c.imm).collect();
        assert_eq!(got, given);
    }
}

#[test]
fn an_atomic_completes_only_with_its_response() {
    // RFC 7306 §5.4 (1), (7) [atomic-complete]
    let mut w = World::new(9);
    let (end, peer) = w.raw(&Setup::standard(), true);
    let old = w[end].register(8, access::LOCAL);
    let remote = old.remote(0);
    w[end].post(fetch_add(1, remote, 2).from(&[old.all()]));
    w.run();
    assert_eq!(
        w[peer].received().len(),
        2,
        "the ready-to-receive message and the request"
    );
    assert!(w[end].completed().is_empty() && w[end].conn.state() == State::Rts);
    let header = Untagged {
        last: true,
        opcode: Opcode::AtomicResponse,
        inv_stag: Stag(0),
        qn: QN_ATOMIC_RESPONSE,
        msn: Msn(1),
        mo: 0,
    };
    let answer = AtomicResponse { id: 1, value: 40 };
    w[peer].sends(&[&header.emit()[..], &answer.emit()].concat());
    w.run();
    ok(&w[end].completed(), &[1]);
    assert_eq!(w[end].word(&old, 0), 40);
}

#[test]
fn headers_of_atomic_and_immediate_messages() {
    // RFC 7306 §4.1 [rdmap-new-invalidate], §5.2 [atomic-request-queue], §5.2.2 [atomic-response-queue], §6.3
    // [imm-untagged] [imm-queue] [imm-data]
    let mut w = World::new(9);
    let (end, peer) = w.raw(&Setup::standard(), true);
    let mr = w[end].register(64, access::ALL);
    w[end].post(fetch_add(1, mr.remote(0), 2).from(&[mr.part(8, 8)]));
    w[end].post(write_imm(2, mr.remote(0), [1, 2, 3, 4]).inline(b"x"));
    let header = Untagged {
        last: true,
        opcode: Opcode::AtomicRequest,
        inv_stag: Stag(0),
        qn: QN_READ,
        msn: Msn(1),
        mo: 0,
    };
    let request = AtomicRequest::fetch_add(7, mr.stag(), mr.remote(0).to, 1);
    w[peer].sends(&[&header.emit()[..], &request.emit()].concat());
    w.run();
    let fpdus = w[peer].received();
    let mut untagged = Vec::new();
    for f in &fpdus {
        if let Header::Untagged(h) = f.header() {
            assert_eq!((h.inv_stag, h.mo, h.last), (Stag(0), 0, true));
            untagged.push((h.opcode, h.qn));
            if h.opcode == Opcode::Immediate {
                assert_eq!(f.payload(), [1, 2, 3, 4, 0, 0, 0, 0]);
            }
        }
    }
    untagged.sort_by_key(|(opcode, _)| opcode.bits());
    let want = [
        (Opcode::Immediate, 0),
        (Opcode::AtomicRequest, 1),
        (Opcode::AtomicResponse, 3),
    ];
    assert_eq!(untagged, want);
}

#[test]
fn an_atomic_into_deregistered_memory_is_reported_to_the_peer() {
    // RFC 7306 §8.1 (1) [term-new-local]
    let mut w = World::new(9);
    let (end, peer) = w.raw(&Setup::standard(), true);
    let old = w[end].register(8, access::LOCAL);
    let request = fetch_add(1, old.remote(0), 2).from(&[old.all()]);
    w[end].deregister(&old);
    w[end].post(request);
    w.run();
    let done: Vec<_> = w[end].completed().iter().map(|c| c.status).collect();
    assert_eq!(done, [Status::LocalProtection]);
    let fpdus = w[peer].received();
    let [_ready, terminate_fpdu] = &fpdus[..] else {
        panic!("{fpdus:?}");
    };
    assert_eq!(terminate_fpdu.opcode(), Opcode::Terminate);
    let terminate = Terminate::parse(terminate_fpdu.payload());
    let code = (terminate.layer, terminate.etype, terminate.code);
    assert_eq!(code, (0, 0, 0));
    assert!(terminate.ddp_header.is_none() && terminate.read_request.is_none());
    assert!(w[peer].closed);
}

#[test]
fn atomics_of_both_ends_add_up() {
    each_seed(4, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let word = w[b].register(8, access::ATOMIC);
        let here = w[a].register(8, access::ATOMIC);
        let (old_a, old_b) = (
            w[a].register(8, access::LOCAL),
            w[b].register(8, access::LOCAL),
        );
        for id in 0..200 {
            w[a].post(fetch_add(id, word.remote(0), 3).from(&[old_a.all()]));
            w[b].post(fetch_add(id, here.remote(0), 5).from(&[old_b.all()]));
        }
        w.run();
        let all: Vec<_> = (0..200).collect();
        ok(&w[a].completed(), &all);
        ok(&w[b].completed(), &all);
        assert_eq!((w[b].word(&word, 0), w[a].word(&here, 0)), (600, 1000));
        assert_eq!((w[a].word(&old_a, 0), w[b].word(&old_b, 0)), (597, 995));
    });
}

#[test]
fn an_unsignaled_request_completes_only_in_error() {
    for setup in both() {
        let mut w = World::new(10);
        let (a, b) = w.pair(&setup);
        let to = w[b].register(8, access::ALL);
        let sink = w[a].register(8, access::LOCAL);
        w[b].recv(1, &[to.all()]);
        w[a].post(send(1).inline(b"x").unsignaled());
        w[a].post(write(2, to.remote(0)).inline(b"y").unsignaled());
        w[a].post(read(3, to.remote(0)).from(&[sink.all()]).unsignaled());
        w[a].post(write(4, to.remote(0)).inline(b"z"));
        w.run();
        ok(&w[a].completed(), &[4]);
        let foreign = Sge {
            lkey: Stag(0x100),
            ..sink.all()
        };
        w[a].post(send(5).from(&[foreign]).unsignaled());
        w.run();
        assert_eq!(w[a].completed()[0].status, Status::LocalProtection);
    }
    let all = Setup {
        sig_all: true,
        ..Setup::anywarp()
    };
    let mut w = World::new(10);
    let (a, b) = w.pair(&all);
    w[b].recv(1, &[]);
    w[a].post(send(1).unsignaled());
    w.run();
    ok(&w[a].completed(), &[1]);
}

#[test]
fn a_fenced_request_waits_for_the_reads_before_it() {
    for setup in both() {
        each_seed(10, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let data = w.rng.bytes(200_000);
            let source = w[b].register(200_000, access::ALL);
            let sink = w[a].register(200_000, access::LOCAL);
            let zeros = w[a].register(200_000, access::LOCAL);
            w[b].fill(&source, &data);
            // Without the fence, the Write would overtake the preceding Read.
            w[a].post(read(1, source.remote(0)).from(&[sink.all()]));
            w[a].post(write(2, source.remote(0)).from(&[zeros.all()]).fence());
            w.run();
            ok(&w[a].completed(), &[1, 2]);
            assert!(w[a].bytes(&sink) == data);
            assert_eq!(w[b].bytes(&source), vec![0; 200_000]);
        });
    }
}

#[test]
fn completions_keep_the_order_of_posting_although_a_write_may_overtake_a_read() {
    for setup in both() {
        each_seed(10, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let there = w[b].register(100_000, access::ALL);
            let here = w[a].register(100_000, access::LOCAL);
            let mut ids = Vec::new();
            for id in 0..60 {
                match w.rng.below(3) {
                    0 => w[a].post(read(id, there.remote(0)).from(&[here.all()])),
                    1 => w[a].post(write(id, there.remote(0)).inline(b"abc")),
                    _ => {
                        w[b].recv(id, &[]);
                        w[a].post(send(id));
                    }
                }
                ids.push(id);
            }
            w.run();
            ok(&w[a].completed(), &ids);
        });
    }
}

#[test]
fn reads_above_ord_wait_and_none_is_lost() {
    for ord in [1, 2, 3, 16] {
        for setup in both() {
            each_seed(3, |seed| {
                let setup = Setup {
                    ord,
                    ird: ord,
                    ..setup.clone()
                };
                let mut w = World::new(seed);
                let (a, b) = w.pair(&setup);
                let data = w.rng.bytes(40_000);
                let there = w[b].register(40_000, access::ALL);
                w[b].fill(&there, &data);
                let here = w[a].register(40_000, access::LOCAL);
                let old = w[a].register(8, access::LOCAL);
                for id in 0..40 {
                    // A Read into several elements is sent as one Read Request for each element.
                    let n = 1 + w.rng.below(6);
                    let sges = cut(&mut w.rng.clone(), &here, 40_000, n);
                    match w.rng.below(3) {
                        0 => w[a].post(fetch_add(id, there.remote(0), 0).from(&[old.all()])),
                        _ => w[a].post(read(id, there.remote(0)).from(&sges)),
                    }
                }
                w.run();
                ok(&w[a].completed(), &(0..40).collect::<Vec<_>>());
                assert!(w[a].bytes(&here) == data || w[a].bytes(&here) == vec![0; 40_000]);
                assert_eq!(w[b].conn.state(), State::Rts, "the peer's IRD was exceeded");
            });
        }
    }
}

#[test]
fn two_ends_that_both_stall_for_reads_do_not_block_each_other() {
    each_seed(10, |seed| {
        let setup = Setup {
            ord: 1,
            ird: 1,
            ..Setup::anywarp()
        };
        let mut w = World::new(seed);
        let (a, b) = w.pair(&setup);
        let (mr_a, mr_b) = (
            w[a].register(150_000, access::ALL),
            w[b].register(150_000, access::ALL),
        );
        let (in_a, in_b) = (
            w[a].register(150_000, access::LOCAL),
            w[b].register(150_000, access::LOCAL),
        );
        for id in 0..20 {
            w[a].post(read(id, mr_b.remote(0)).from(&[in_a.all()]));
            w[b].post(read(id, mr_a.remote(0)).from(&[in_b.all()]));
        }
        w.run();
        let all: Vec<_> = (0..20).collect();
        ok(&w[a].completed(), &all);
        ok(&w[b].completed(), &all);
    });
}

#[test]
fn a_read_fails_at_the_sender_if_ord_is_0() {
    let setup = Setup {
        ord: 0,
        ..Setup::anywarp()
    };
    let mut w = World::new(11);
    let (a, b) = w.pair(&setup);
    let there = w[b].register(8, access::ALL);
    let here = w[a].register(8, access::LOCAL);
    w[a].post(write(1, there.remote(0)).inline(b"before"));
    w[a].post(read(2, there.remote(0)).from(&[here.all()]));
    w[a].post(send(3));
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
            (2, Status::LocalQpOperation),
            (3, Status::Flushed)
        ]
    );
    assert_eq!(w[b].bytes(&there)[..6], *b"before");
}

#[test]
fn a_request_with_a_wrong_lkey_fails_after_the_earlier_ones() {
    for setup in both() {
        each_seed(5, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let there = w[b].register(70_000, access::ALL);
            let here = w[a].register(70_000, access::LOCAL);
            let wrong = Sge {
                lkey: Stag(here.stag().0 ^ 1),
                ..here.all()
            };
            w[a].post(read(1, there.remote(0)).from(&[here.all()]));
            w[a].post(write(2, there.remote(0)).from(&[here.all()]));
            w[a].post(write(3, there.remote(0)).from(&[wrong]));
            w[a].post(write(4, there.remote(0)).from(&[here.all()]));
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
                    (3, Status::LocalProtection),
                    (4, Status::Flushed)
                ]
            );
            assert_eq!(w[a].conn.state(), State::Error);
        });
    }
}

#[test]
fn all_operations_in_both_directions() {
    for setup in both() {
        each_seed(12, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let mut want = [Vec::new(), Vec::new()];
            let mut receives = [0_u64; 2];
            for id in 0..60 {
                for (side, from, to) in [(0, a, b), (1, b, a)] {
                    let size = *w.rng.pick(&[0, 8, 3_000, 70_000]);
                    let here = w[from].register(size.max(8), access::LOCAL);
                    let there = w[to].register(size.max(8), access::ALL);
                    let request = match w.rng.below(5) {
                        0 => read(id, there.remote(0)).from(&[here.all()]),
                        1 => write(id, there.remote(0)).from(&[here.all()]),
                        2 => fetch_add(id, there.remote(0), 1).from(&[here.part(0, 8)]),
                        n => {
                            w[to].recv(receives[side], &[there.all()]);
                            receives[side] += 1;
                            if n == 3 {
                                write_imm(id, there.remote(0), [0; 4]).from(&[here.all()])
                            } else {
                                send(id).from(&[here.all()])
                            }
                        }
                    };
                    w[from].post(request);
                    want[side].push(id);
                }
                if w.rng.chance(30) {
                    let until = w.now() + std::time::Duration::from_millis(1);
                    for _ in 0..w.rng.below(20) {
                        w.turn(until);
                    }
                }
            }
            w.run();
            ok(&w[a].completed(), &want[0]);
            ok(&w[b].completed(), &want[1]);
            ok(&w[b].received(), &(0..receives[0]).collect::<Vec<_>>());
            ok(&w[a].received(), &(0..receives[1]).collect::<Vec<_>>());
        });
    }
}

#[test]
fn operations_without_crc() {
    for setup in both() {
        let setup = Setup {
            crc: false,
            ..setup
        };
        let mut w = World::new(12);
        let (a, b) = w.pair(&setup);
        let data = w.rng.bytes(300_001);
        let (from, to) = (
            w[a].register(300_001, access::ALL),
            w[b].register(300_001, access::ALL),
        );
        w[a].fill(&from, &data);
        w[b].recv(1, &[]);
        w[a].post(write_imm(1, to.remote(0), [1; 4]).from(&[from.all()]));
        w.run();
        ok(&w[a].completed(), &[1]);
        assert!(w[b].bytes(&to) == data);
    }
}

#[test]
fn a_responder_sends_nothing_before_the_first_message() {
    for first in [First::Hello, First::Write, First::Read, First::Send] {
        let setup = Setup {
            first,
            ..if first == First::Hello {
                Setup::anywarp()
            } else {
                Setup::standard()
            }
        };
        let mut w = World::new(13);
        let (a, b) = w.pair(&setup);
        let to = w[a].register(8, access::LOCAL);
        w[a].recv(1, &[to.all()]);
        w[b].post(send(1).inline(b"late"));
        let stuck = w[b].register(8, access::LOCAL);
        w[b].recv(5, &[stuck.all()]);
        w.run();
        assert!(w[b].raised(AsyncEvent::Started), "{first:?}");
        ok(&w[b].completed(), &[1]);
        ok(&w[a].received(), &[1]);
        // The ready-to-receive message consumed no receive of the application.
        assert!(w[b].received().is_empty(), "{first:?}");
        w[a].post(send(2).inline(b"first"));
        w.run();
        ok(&w[a].completed(), &[2]);
        ok(&w[b].received(), &[5]);
    }
    let silent = Setup {
        first: First::Nothing,
        ..Setup::standard()
    };
    let mut w = World::new(14);
    let (a, b) = w.pair(&silent);
    w[b].post(send(1));
    w.run();
    assert!(w[b].completed().is_empty() && !w[b].raised(AsyncEvent::Started));
    w[b].recv(1, &[]);
    w[a].recv(1, &[]);
    w[a].post(send(1));
    w.run();
    ok(&w[b].completed(), &[1]);
}

/// RFC 6581 §9.2 [mpa-rtr-invisible]: a Write or Read that is the ready-to-receive message is not counted as an
/// operation of the application. Later ones are counted once each, for every length and receive path.
#[test]
fn a_counter_of_the_peers_operations_leaves_out_the_ready_to_receive_message() {
    for first in [First::Hello, First::Write, First::Read, First::Send] {
        for shortcuts in [true, false] {
            let counter = Arc::new(Counter::new(Unit::Requests));
            let setup = Setup {
                first,
                shortcuts,
                counter: Some(Arc::clone(&counter)),
                ..if first == First::Hello {
                    Setup::anywarp()
                } else {
                    Setup::standard()
                }
            };
            let mut w = World::new(15);
            let (a, b) = w.pair(&setup);
            w.run();
            assert_eq!(counter.read(Entry::Done), 0, "{first:?}");
            let (from, to) = (
                w[a].register(100_000, access::ALL),
                w[b].register(100_000, access::ALL),
            );
            let none = w[b].register(8, access::LOCAL);
            w[b].recv(9, &[none.all()]);
            w[a].post(write(1, to.remote(0)).from(&[from.all()]));
            w[a].post(write(2, to.remote(0)));
            w[a].post(write_imm(3, to.remote(0), [1, 2, 3, 4]).inline(b"short"));
            w[a].post(read(4, to.remote(0)).from(&[from.all()]));
            w[a].post(read(5, to.remote(0)));
            w.run();
            ok(&w[a].completed(), &[1, 2, 3, 4, 5]);
            assert_eq!(counter.read(Entry::Done), 5, "{first:?}, {shortcuts}");
            assert_eq!(counter.read(Entry::Failed), 0);
        }
    }
}

#[test]
fn a_standard_peer_gets_no_control_messages() {
    each_seed(4, |seed| {
        let mut w = World::new(seed);
        let (end, peer) = w.raw(&Setup::standard(), true);
        let mr = w[end].register(5_000, access::ALL);
        for id in 0..4 {
            w[end].recv(id, &[mr.all()]);
        }
        w[end].post(send(1).from(&[mr.all()]));
        w[end].post(write_imm(2, mr.remote(0), [1, 2, 3, 4]).from(&[mr.all()]));
        w[end].post(send(3).solicited());
        w.run();
        // The requests complete as soon as they are passed to the stream.
        ok(&w[end].completed(), &[1, 2, 3]);
        let opcodes: Vec<_> = w[peer].received().iter().map(|f| f.opcode()).collect();
        let send = [Opcode::Send; 4];
        let write = [Opcode::Write; 4];
        assert_eq!(
            opcodes,
            [
                &[Opcode::Write][..],
                &send,
                &write,
                &[Opcode::Immediate, Opcode::SendSolicited]
            ]
            .concat()
        );
    });
}

#[test]
fn markers_are_sent_to_a_peer_that_requests_them() {
    for crc in [true, false] {
        each_seed(10, |seed| {
            let setup = Setup {
                markers: true,
                crc,
                mulpdu: mulpdu(*Rng::new(seed).pick(&[536, 1460, 8960, 65_483]), true),
                ..Setup::standard()
            };
            let mut w = World::new(seed);
            let (end, peer) = w.raw(&setup, true);
            w[peer].wants_markers();
            let data = w.rng.bytes(100_000);
            let mr = w[end].register(100_000, access::LOCAL);
            w[end].fill(&mr, &data);
            w[end].post(write(1, mr.remote(0)).from(&[mr.all()]));
            w[end].post(send(2).inline(b"small"));
            w.run();
            ok(&w[end].completed(), &[1, 2]);
            let got = w[peer].received();
            // All FPDUs belong to the Write, except the first (the ready-to-receive message) and the last (the Send).
            let body: Vec<u8> = got[1..got.len() - 1]
                .iter()
                .flat_map(|f| f.payload().to_vec())
                .collect();
            assert!(body == data);
            assert_eq!(got[got.len() - 1].payload(), b"small");
            let largest = got.iter().map(|f| f.ulpdu.len()).max();
            assert_eq!(largest, Some(setup.mulpdu.min(COPY_LIMIT)));
        });
    }
}

#[test]
fn a_queue_pair_connected_to_itself_works() {
    each_seed(20, |seed| {
        let setup = Setup {
            first: First::Nothing,
            crc: false,
            ..Setup::anywarp()
        };
        let mut w = World::new(seed);
        let end = w.looped(&setup);
        let data = w.rng.bytes(50_000);
        let from = w[end].register(50_000, access::ALL);
        let to = w[end].register(50_000, access::ALL);
        w[end].fill(&from, &data);
        w[end].post(send_imm(1, [5; 4]).from(&[from.all()]));
        w[end].post(write(2, to.remote(0)).inline(b"behind"));
        w[end].post(read(3, from.remote(0)).from(&[to.part(10, 100)]));
        w[end].post(fetch_add(4, to.remote(256), 1).from(&[to.part(512, 8)]));
        // The Send waits for a receive.
        w.run_for(std::time::Duration::from_millis(3));
        assert!(w[end].completed().is_empty());
        w[end].recv(9, &[to.all()]);
        w.run();
        ok(&w[end].completed(), &[1, 2, 3, 4]);
        ok(&w[end].received(), &[9]);
        let got = w[end].bytes(&to);
        assert_eq!(got[..6], *b"behind");
        assert_eq!(got[10..110], data[..100]);
        w[end].conn.leave("destroyed");
        w.run();
        assert!(w[end].is_over());
    });
}

#[test]
fn segments_fill_the_mulpdu_and_no_more() {
    for mulpdu in [128, 1442, 1500, 8942, 64_766] {
        let setup = Setup {
            mulpdu,
            ..Setup::standard()
        };
        let mut w = World::new(15);
        let (end, peer) = w.raw(&setup, true);
        let mr = w[end].register(200_000, access::ALL);
        w[end].post(send(1).from(&[mr.all()]));
        w.run();
        let got = w[peer].received();
        let (last, full) = got[1..].split_last().unwrap();
        assert!(full.iter().all(|f| f.ulpdu.len() == mulpdu));
        assert!(last.ulpdu.len() <= mulpdu);
        assert_eq!(
            got[1..].iter().map(|f| f.payload().len()).sum::<usize>(),
            200_000
        );
        assert!(full.iter().all(|f| !f.header().last()) && last.header().last());
    }
}

/// A responder does not know the implementation of its peer before the Hello, and sends FPDUs of a size that all accept.
#[test]
fn segments_are_small_until_the_hello_of_the_peer() {
    for (says_hello, largest) in [(false, 1442), (true, 9000)] {
        let setup = Setup {
            mulpdu: 1442,
            mulpdu_anywarp: 9000,
            ..Setup::standard()
        };
        let mut w = World::new(16);
        let (end, peer) = w.raw(&setup, false);
        let first = if says_hello {
            let hello = Control::Hello {
                version: 1,
                features: 0,
            };
            hello.header().emit().to_vec()
        } else {
            let rtr = Tagged {
                last: true,
                opcode: Opcode::Write,
                stag: Stag(1),
                to: To(0),
            };
            rtr.emit().to_vec()
        };
        w[peer].sends(&first);
        let mr = w[end].register(50_000, access::ALL);
        w[end].post(send(1).from(&[mr.all()]));
        w.run();
        let got = w[peer].received();
        assert_eq!(got.iter().map(|f| f.ulpdu.len()).max(), Some(largest));
    }
}

/// Whether posted requests wait to be sent together depends on their number and on the length of the longest one.
#[test]
fn few_and_short_requests_wait_to_be_sent_together() {
    let (small, gathered) = (
        COALESCE_TCP.max_payload,
        COALESCE_BYTES / COALESCE_TCP.max_payload,
    );
    let mut w = World::new(3);
    let (a, b) = w.pair(&Setup::anywarp());
    let there = w[b].register(64, access::ALL);
    let here = w[a].register(64, access::LOCAL);
    w[a].post(write(0, there.remote(0)).from(&[here.all()]));
    w.run();
    assert!(
        !w[a].conn.may_coalesce_burst(&COALESCE_TCP, 1),
        "nothing was posted"
    );
    for id in 1..COALESCE_TCP.max_requests as u64 {
        w[a].post(write(id, there.remote(0)).from(&[here.all()]));
        assert_eq!(
            w[a].conn.may_coalesce_burst(&COALESCE_TCP, small),
            id < gathered
        );
        assert!(!w[a].conn.may_coalesce_burst(&COALESCE_TCP, small + 1));
        assert!(
            w[a].conn.may_coalesce_burst(&COALESCE_TCP, 64),
            "{id} requests wait"
        );
        assert!(
            !w[a].conn.may_coalesce_behind_ack(&COALESCE_TCP, 64),
            "no request is unacknowledged"
        );
    }
    w[a].post(write(99, there.remote(0)).from(&[here.all()]));
    assert!(!w[a].conn.may_coalesce_burst(&COALESCE_TCP, 64), "too many");
    // `poll_tx` takes the requests for sending. Their bytes are discarded, so the peer does not acknowledge them.
    let now = w.now();
    w[a].conn.poll_tx(now, true, &mut TxBatch::default());
    w[a].post(write(100, there.remote(0)).from(&[here.all()]));
    assert!(
        COALESCE_TCP.max_requests >= COALESCE_BEHIND
            && w[a].conn.may_coalesce_behind_ack(&COALESCE_TCP, 64)
    );
    assert!(!w[a].conn.may_coalesce_behind_ack(&COALESCE_TCP, small + 1));
    // To a standard peer, each request is sent when it is posted.
    let (end, _peer) = w.raw(&Setup::standard(), true);
    w[end].post(write(1, there.remote(0)).from(&[here.all()]));
    assert!(!w[end].conn.may_coalesce_burst(&COALESCE_TCP, 64));
}
