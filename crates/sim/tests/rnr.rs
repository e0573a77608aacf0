//! A message for which no receive is posted is retransmitted later, and the requests after it keep their order.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::sync::Arc;
use std::time::Duration;

use anywarp_core::error::TermCode;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::{State, rnr_timer_us};
use anywarp_core::verbs::srq::Srq;
use anywarp_core::verbs::wc::{Completion, Status, WcOp};
use anywarp_core::verbs::wr::{Bind, Op, RecvRequest, WorkRequest};
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::Header;
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Stag, To};
use anywarp_sim::{
    Fpdu, Request, Setup, World, access, each_seed, fetch_add, read, send, send_imm, write,
    write_imm,
};

fn statuses(completions: &[Completion]) -> Vec<(u64, Status)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn good(ids: std::ops::Range<u64>) -> Vec<(u64, Status)> {
    ids.map(|id| (id, Status::Success)).collect()
}

#[test]
fn a_send_waits_until_a_receive_is_posted() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let to = w[b].register(200_000, access::LOCAL);
        let data = w.rng.bytes(200_000);
        let from = w[a].register(200_000, access::LOCAL);
        w[a].fill(&from, &data);
        w[a].post(send(1).from(&[from.all()]));
        w.run_for(Duration::from_millis(20));
        assert!(w[a].completed().is_empty());
        assert_eq!(w[a].conn.state(), State::Rts);
        w[b].recv(9, &[to.all()]);
        w.run();
        assert_eq!(statuses(&w[a].completed()), good(1..2));
        assert_eq!(statuses(&w[b].received()), good(9..10));
        assert!(w[b].bytes(&to) == data);
    });
}

#[test]
fn the_wait_is_the_rnr_timer_of_the_receiver() {
    for code in [1, 12, 20] {
        let setup = Setup {
            min_rnr_timer: code,
            rnr_retry: 3,
            ..Setup::anywarp()
        };
        let mut w = World::new(1);
        let (a, b) = w.pair(&setup);
        w.run();
        for end in [a, b] {
            w.pipe_from(end).delay = Duration::ZERO;
        }
        let before = w.elapsed();
        w[a].post(send(1));
        w.run();
        let wait = Duration::from_micros(rnr_timer_us(code));
        assert_eq!(w.elapsed() - before, 3 * wait);
    }
}

#[test]
fn after_rnr_retry_attempts_the_send_fails_and_later_requests_are_flushed() {
    each_seed(20, |seed| {
        for rnr_retry in [0, 1, 6] {
            let setup = Setup {
                rnr_retry,
                ..Setup::anywarp()
            };
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            let there = w[b].register(70_000, access::ALL);
            let here = w[a].register(70_000, access::ALL);
            w[b].recv(1, &[there.all()]);
            w[a].post(send(1));
            w[a].post(read(2, there.remote(0)).from(&[here.all()]));
            w[a].post(send(3));
            w[a].post(write(4, there.remote(0)).inline(b"never"));
            w[a].post(read(5, there.remote(0)).from(&[here.all()]));
            w.run();
            assert_eq!(
                statuses(&w[a].completed()),
                [
                    (1, Status::Success),
                    (2, Status::Success),
                    (3, Status::RnrRetryExceeded),
                    (4, Status::Flushed),
                    (5, Status::Flushed)
                ]
            );
            assert_eq!(w[b].bytes(&there), vec![0; 70_000]);
        }
    });
}

#[test]
fn seven_retries_are_unlimited() {
    let setup = Setup {
        min_rnr_timer: 1,
        ..Setup::anywarp()
    };
    let mut w = World::new(1);
    let (a, b) = w.pair(&setup);
    w[a].post(send(1));
    w.run_for(Duration::from_millis(50));
    assert!(w[a].completed().is_empty());
    w[b].recv(1, &[]);
    w.run();
    assert_eq!(statuses(&w[a].completed()), good(1..2));
}

#[test]
fn a_write_with_immediate_repeats_only_the_immediate() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let data = w.rng.bytes(100_000);
        let there = w[b].register(100_000, access::ALL);
        let here = w[a].register(100_000, access::LOCAL);
        w[a].fill(&here, &data);
        w[a].post(write_imm(1, there.remote(0), [4, 3, 2, 1]).from(&[here.all()]));
        w.run_for(Duration::from_millis(100));
        let after_write = w.pipe_from(a).written;
        assert!(w[b].bytes(&there) == data, "the Write itself is placed");
        // Later changes by the application must not be overwritten.
        w[b].fill(&there, &[7; 100]);
        w.run_for(Duration::from_millis(10));
        assert!(w.pipe_from(a).written - after_write < 2_000);
        w[b].recv(5, &[]);
        w.run();
        let got = w[b].received();
        assert_eq!(statuses(&got), good(5..6));
        assert_eq!((got[0].op, got[0].byte_len), (WcOp::RecvWriteImm, 100_000));
        assert_eq!(got[0].imm, Some([4, 3, 2, 1]));
        assert_eq!(w[b].bytes(&there)[..100], [7; 100]);
        assert_eq!(statuses(&w[a].completed()), good(1..2));
    });
}

#[test]
fn requests_after_a_waiting_send_are_executed_once_and_in_order() {
    each_seed(60, |seed| {
        let setup = Setup {
            ord: 4,
            ird: 4,
            min_rnr_timer: 3,
            ..Setup::anywarp()
        };
        let mut w = World::new(seed);
        let (a, b) = w.pair(&setup);
        let there = w[b].register(30_000, access::ALL);
        let here = w[a].register(30_000, access::ALL);
        let word = w[b].register(8, access::ALL);
        let old = w[a].register(8, access::LOCAL);
        let (mut adds, mut recvs, mut posted) = (0, 0, 0);
        let mut sizes = Vec::new();
        for id in 0..80 {
            let size = *w.rng.pick(&[0, 10, 5_000, 30_000]);
            match w.rng.below(6) {
                0 => w[a].post(read(id, there.remote(0)).from(&[here.all()])),
                1 => w[a].post(write(id, there.remote(0)).from(&[here.part(0, size)])),
                2 => {
                    w[a].post(fetch_add(id, word.remote(0), 1).from(&[old.all()]));
                    adds += 1;
                }
                3 => {
                    w[a].post(write_imm(id, there.remote(0), [1; 4]).from(&[here.part(0, size)]));
                    sizes.push((size, Some([1; 4])));
                }
                4 => {
                    w[a].post(send_imm(id, [2; 4]).from(&[here.part(0, size)]));
                    sizes.push((size, Some([2; 4])));
                }
                _ => {
                    w[a].post(send(id).from(&[here.part(0, size)]));
                    sizes.push((size, None));
                }
            }
            posted += 1;
            if w.rng.chance(60) {
                w[b].recv(recvs, &[there.all()]);
                recvs += 1;
            }
            let until = w.now() + Duration::from_millis(2);
            for _ in 0..w.rng.below(8) {
                w.turn(until);
            }
        }
        while recvs < sizes.len() as u64 {
            w.run_for(Duration::from_micros(100));
            w[b].recv(recvs, &[there.all()]);
            recvs += 1;
        }
        w.run();
        assert_eq!(statuses(&w[a].completed()), good(0..posted));
        let got: Vec<_> = w[b]
            .received()
            .iter()
            .map(|c| (c.byte_len as usize, c.imm))
            .collect();
        assert_eq!(got, sizes);
        assert_eq!(w[b].word(&word, 0), adds, "each atomic was done once");
        assert_eq!(w[b].conn.state(), State::Rts);
    });
}

#[test]
fn a_send_that_waits_does_not_keep_a_queue_from_draining() {
    each_seed(10, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        for id in 0..3 {
            w[a].post(send(id));
        }
        w.run_for(Duration::from_millis(2));
        let attr = *w[a].conn.attr();
        let mask = anywarp_core::verbs::qp::mask::STATE
            | anywarp_core::verbs::qp::mask::EN_SQD_ASYNC_NOTIFY;
        w[a].conn
            .modify(mask, Some(State::Sqd), None, &attr)
            .unwrap();
        w.run_for(Duration::from_millis(10));
        assert_eq!(w[a].times(AsyncEvent::SqDrained), 1);
        for id in 0..3 {
            w[b].recv(id, &[]);
        }
        let mask = anywarp_core::verbs::qp::mask::STATE;
        w[a].conn
            .modify(mask, Some(State::Rts), None, &attr)
            .unwrap();
        w.run();
        assert_eq!(statuses(&w[a].completed()), good(0..3));
    });
}

#[test]
fn both_ends_may_wait_for_each_other() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        for id in 0..20 {
            w[a].post(send(id).inline(b"there"));
            w[b].post(send(id).inline(b"back"));
        }
        w.run_for(Duration::from_millis(5));
        let (to_a, to_b) = (
            w[a].register(8, access::LOCAL),
            w[b].register(8, access::LOCAL),
        );
        for id in 0..20 {
            w[a].recv(id, &[to_a.all()]);
            w.run_for(Duration::from_micros(300));
            w[b].recv(id, &[to_b.all()]);
        }
        w.run();
        for end in [a, b] {
            assert_eq!(statuses(&w[end].completed()), good(0..20));
            assert_eq!(statuses(&w[end].received()), good(0..20));
        }
    });
}

#[test]
fn a_bind_after_a_waiting_send_is_executed_once() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let mr = w[a].register(64, access::ALL);
        let host = w[a].host.clone();
        let window = host
            .rnic
            .regions
            .alloc_window(host.pd, true, &mut || host.random())
            .unwrap();
        let rkey = Stag(window.0 ^ 1);
        w[a].post(send(1));
        w[a].post(WorkRequest {
            op: Op::Bind(Bind {
                window,
                rkey,
                mr: mr.stag(),
                addr: mr.all().addr,
                len: 64,
                access: access::WRITE,
            }),
            ..send(2)
        });
        w[a].post(send(3));
        w[a].post(WorkRequest {
            op: Op::LocalInvalidate { stag: rkey },
            ..send(4)
        });
        w[a].post(send(5));
        w.run_for(Duration::from_millis(5));
        for id in 0..3 {
            w[b].recv(id, &[]);
            w.run_for(Duration::from_millis(2));
        }
        w.run();
        assert_eq!(statuses(&w[a].completed()), good(1..6));
    });
}

#[test]
fn an_empty_shared_queue_makes_its_senders_wait() {
    each_seed(10, |seed| {
        let mut w = World::new(seed);
        let (one, two, server) = (w.host(), w.host(), w.host());
        let srq = Arc::new(Srq::new(64, 4, 0, server.pd));
        let of_server = Setup {
            srq: Some(Arc::clone(&srq)),
            ..Setup::anywarp()
        };
        let (a, x) = w.connect(&one, &Setup::anywarp(), &server, &of_server);
        let (b, y) = w.connect(&two, &Setup::anywarp(), &server, &of_server);
        let memory = server.register(40_000, access::LOCAL);
        let from = one.register(40_000, access::LOCAL);
        for id in 0..10 {
            w[a].post(send(id).from(&[from.all()]));
            w[b].post(send(id).inline(b"two"));
        }
        for id in 0..20 {
            w.run_for(Duration::from_millis(1));
            srq.post(RecvRequest {
                id,
                sges: [memory.all()][..].into(),
            })
            .unwrap();
        }
        w.run();
        assert_eq!(statuses(&w[a].completed()), good(0..10));
        assert_eq!(statuses(&w[b].completed()), good(0..10));
        assert_eq!(w[x].received().len() + w[y].received().len(), 20);
    });
}

fn controls(fpdus: &[Fpdu]) -> Vec<Control> {
    fpdus
        .iter()
        .filter_map(|f| match f.header() {
            Header::Untagged(h) if h.opcode == Opcode::Control => Some(Control::parse(&h).unwrap()),
            _ => None,
        })
        .collect()
}

#[test]
fn requests_after_a_dropped_send_are_dropped_until_the_restart() {
    let mut w = World::new(1);
    let setup = Setup {
        min_rnr_timer: 9,
        ..Setup::anywarp()
    };
    let (end, peer) = w.raw(&setup, false);
    let mr = w[end].register(64, access::ALL);
    let hello = Control::Hello {
        version: 1,
        features: 0,
    };
    w[peer].sends(&hello.header().emit());
    let send = |msn| {
        anywarp_core::wire::ddp::Untagged {
            last: true,
            opcode: Opcode::Send,
            inv_stag: Stag(0),
            qn: 0,
            msn: anywarp_core::wire::Msn(msn),
            mo: 0,
        }
        .emit()
    };
    let write = |byte| {
        let header = anywarp_core::wire::ddp::Tagged {
            last: true,
            opcode: Opcode::Write,
            stag: mr.stag(),
            to: To(mr.all().addr),
        };
        [&header.emit()[..], &[byte]].concat()
    };
    w[peer].sends(&write(1));
    w[peer].sends(&send(1));
    w[peer].sends(&write(2));
    w[peer].sends(&send(2));
    w.run();
    assert_eq!(
        w[end].bytes(&mr)[0],
        1,
        "the Write that followed the dropped Send was placed"
    );
    let fpdus = w[peer].received();
    let sent = controls(&fpdus);
    assert!(
        sent.contains(&Control::Rnr { seq: 2, timer: 9 }),
        "{sent:?}"
    );
    assert_eq!(
        sent.iter()
            .filter(|c| matches!(c, Control::Rnr { .. }))
            .count(),
        1
    );
    w[end].recv(1, &[]);
    // This receive is posted too late: the message was dropped, and its sender was informed.
    w.run();
    assert!(w[end].received().is_empty());
    w[peer].sends(&Control::Restart { seq: 2 }.header().emit());
    w[peer].sends(&send(1));
    w[peer].sends(&write(3));
    w.run();
    assert_eq!(statuses(&w[end].received()), good(1..2));
    assert_eq!(w[end].bytes(&mr)[0], 3);
    assert_eq!(
        controls(&w[peer].received()).last(),
        Some(&Control::Ack { seq: 3 })
    );
    // A Restart without a preceding receiver-not-ready message ends the stream.
    w[peer].sends(&Control::Restart { seq: 9 }.header().emit());
    w.run();
    assert_eq!(w[end].conn.state(), State::Error);
}

#[test]
fn a_missing_receive_terminates_the_stream_of_a_standard_peer() {
    each_seed(5, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::standard());
        w.run();
        w[a].post(send(1).inline(b"x"));
        w.run();
        // The request completes when it is sent, before the peer has answered.
        assert_eq!(statuses(&w[a].completed()), good(1..2));
        assert_eq!(w[b].conn.state(), State::Error);
        assert_eq!(w[a].conn.state(), State::Error);
        assert!(w[b].raised(AsyncEvent::QpRequest));

        let (end, peer) = w.raw(&Setup::standard(), false);
        let header = anywarp_core::wire::ddp::Untagged {
            last: true,
            opcode: Opcode::Send,
            inv_stag: Stag(0),
            qn: 0,
            msn: anywarp_core::wire::Msn(1),
            mo: 0,
        };
        let ulpdu = [&header.emit()[..], b"abc"].concat();
        w[peer].sends(&ulpdu);
        w.run();
        let fpdus = w[peer].received();
        let t = fpdus[0].terminate().unwrap();
        assert_eq!(
            TermCode::new(t.layer, t.etype, t.code),
            TermCode::new(1, 2, 2)
        );
        assert_eq!(t.ddp_len, Some(21));
        assert_eq!(t.ddp_header.unwrap().as_slice(), &header.emit());
        assert_eq!(fpdus.len(), 1);
        assert!(w[peer].closed);
        assert_eq!(w[end].conn.state(), State::Error);
    });
}
