//! Every posted request completes exactly once and in order, with errors, lost connections and state changes at any
//! point.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::sync::Arc;
use std::time::Duration;

use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::srq::Srq;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{RecvRequest, Remote, Sge};
use anywarp_core::wire::control::Control;
use anywarp_core::wire::{Stag, To};
use anywarp_sim::{
    EndId, Mr, Request, Setup, World, access, compare_swap, each_seed, fetch_add, read, send,
    send_imm, write, write_imm,
};

fn statuses(completions: &[Completion]) -> Vec<(u64, Status)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

/// The requests that were posted at one end, and those that have completed.
#[derive(Default)]
struct Ledger {
    sends: Vec<u64>,
    recvs: Vec<u64>,
    sent: Vec<Completion>,
    received: Vec<Completion>,
}

impl Ledger {
    fn poll(&mut self, w: &mut World, end: EndId) {
        self.sent.extend(w[end].completed());
        self.received.extend(w[end].received());
    }

    /// Checks that all posted requests completed once and in order, and that none succeeded after the first failure.
    fn check(&self) {
        let ids = |list: &[Completion]| list.iter().map(|c| c.wr_id).collect::<Vec<_>>();
        assert_eq!(ids(&self.sent), self.sends, "send queue");
        assert_eq!(ids(&self.received), self.recvs, "receive queue");
        for list in [&self.sent, &self.received] {
            let failed = list.iter().position(|c| c.status != Status::Success);
            let behind = failed.map_or(&[][..], |at| &list[at + 1..]);
            let one = |c: &&Completion| c.status != Status::Flushed;
            assert!(
                behind.iter().filter(one).count() <= 1,
                "after a failure: {:?}",
                statuses(list)
            );
            assert!(behind.iter().all(|c| c.status != Status::Success));
        }
    }
}

/// Posts a random request at end `from`: `here` is its source, `sink` its sink, and `there` the peer's memory. With
/// `bad`, its remote memory or its lkey is wrong.
fn request(w: &mut World, from: EndId, id: u64, [here, sink, there]: [&Mr; 3], bad: bool) {
    let size = *w.rng.pick(&[0, 1, 100, 9_000, 70_000]);
    let mut sge = here.part(0, size);
    let mut remote = there.remote(0);
    if bad {
        match w.rng.below(4) {
            0 => remote.rkey = Stag(remote.rkey.0 ^ 0x0101_0100),
            1 => remote.to = To(remote.to.0 + there.len() as u64),
            2 => sge.lkey = Stag(sge.lkey.0 ^ 0x0101_0100),
            _ => {
                remote = Remote {
                    rkey: here.stag(),
                    to: To(u64::MAX),
                }
            }
        }
    }
    let word = sink.part(0, 8);
    let into = Sge {
        addr: sge.addr - here.all().addr + sink.all().addr,
        lkey: Stag(sge.lkey.0 ^ here.stag().0 ^ sink.stag().0),
        ..sge
    };
    let mut wr = match w.rng.below(7) {
        0 => write(id, remote).from(&[sge]),
        1 => write_imm(id, remote, [1; 4]).from(&[sge]),
        2 => read(id, remote).from(&[into]),
        3 => fetch_add(id, remote, 1).from(&[word]),
        4 => compare_swap(id, remote, 1, 2).from(&[word]),
        5 => send_imm(id, [2; 4]).from(&[sge]),
        _ => send(id).from(&[sge]),
    };
    wr.fence = w.rng.chance(10);
    w[from].post(wr);
}

/// What goes wrong in a run.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Trouble {
    Nothing,
    Cut,
    Kill,
    BadRequest,
    Deregister,
    Leave,
    Error,
    CqFull,
    Drain,
    Everything,
}

fn run(seed: u64, setup: &Setup, trouble: Trouble) {
    let mut w = World::new(seed);
    let setup = Setup {
        sig_all: true,
        cqe: if trouble == Trouble::CqFull { 24 } else { 4096 },
        crc: w.rng.chance(80),
        mulpdu: *w.rng.pick(&[200, 1442, setup.mulpdu]),
        min_rnr_timer: *w.rng.pick(&[1, 12]),
        rnr_retry: if trouble == Trouble::Nothing {
            7
        } else {
            *w.rng.pick(&[0, 2, 7])
        },
        ..setup.clone()
    };
    let depth = *w.rng.pick(&[1, 2, 16]);
    let setup = Setup {
        ird: depth,
        ord: depth,
        ..setup
    };
    let (a, b) = w.pair(&setup);
    let ends = [a, b];
    // Memory that is being sent must not change, so the peer writes to another region.
    let memory: Vec<_> = ends
        .iter()
        .map(|e| w[*e].register(80_000, access::ALL))
        .collect();
    let sources: Vec<_> = ends
        .iter()
        .map(|e| w[*e].register(80_000, access::ALL))
        .collect();
    let mut ledgers = [Ledger::default(), Ledger::default()];
    if trouble == Trouble::Cut {
        let at = w.rng.below(400_000) as u64;
        let end = *w.rng.clone().pick(&ends);
        w.pipe_from(end).dies_at = Some(at);
    }
    let steps = 40;
    let when = w.rng.below(steps);
    for step in 0..steps {
        for side in 0..2 {
            let end = ends[side];
            let (target, here) = (memory[side].clone(), sources[side].clone());
            let there = memory[1 - side].clone();
            if w.rng.chance(80) {
                let id = ledgers[side].recvs.len() as u64;
                w[end].recv(id, &[target.all()]);
                ledgers[side].recvs.push(id);
            }
            if w.rng.chance(70) {
                let bad = match trouble {
                    Trouble::BadRequest => step == when,
                    Trouble::Everything => w.rng.chance(3),
                    _ => false,
                };
                let id = ledgers[side].sends.len() as u64;
                request(&mut w, end, id, [&here, &target, &there], bad);
                ledgers[side].sends.push(id);
            }
        }
        let now = match trouble {
            Trouble::Everything if w.rng.chance(3) => *w.rng.pick(&[
                Trouble::Kill,
                Trouble::Deregister,
                Trouble::Leave,
                Trouble::Error,
                Trouble::Drain,
            ]),
            Trouble::Drain => Trouble::Drain,
            _ if step == when => trouble,
            _ => Trouble::Nothing,
        };
        if now != Trouble::Nothing {
            match now {
                Trouble::Kill => w.kill(a),
                Trouble::Deregister => {
                    let side = w.rng.below(2);
                    let mr = w
                        .rng
                        .pick(&[memory[side].clone(), sources[side].clone()])
                        .clone();
                    w[ends[side]].deregister(&mr);
                }
                Trouble::Drain => {
                    let end = *w.rng.pick(&ends);
                    let next = match w[end].conn.state() {
                        State::Rts => State::Sqd,
                        State::Sqd => State::Rts,
                        _ => continue,
                    };
                    let attr = *w[end].conn.attr();
                    let mask = anywarp_core::verbs::qp::mask::STATE;
                    w[end].conn.modify(mask, Some(next), None, &attr).unwrap();
                }
                Trouble::Leave => w[a].conn.leave("test"),
                Trouble::Error => w[b].conn.set_state(State::Error),
                _ => {}
            }
        }
        let until = w.now() + Duration::from_millis(1);
        for _ in 0..w.rng.below(12) {
            w.turn(until);
        }
        for side in 0..2 {
            if trouble != Trouble::CqFull && w.rng.chance(50) {
                ledgers[side].poll(&mut w, ends[side]);
            }
        }
    }
    w.run_for(Duration::from_secs(5));
    if trouble == Trouble::CqFull {
        // Completions may be missing, but none is made twice, and the queue pair of a full queue has failed.
        for end in ends {
            let full = w[end].send_cq.is_broken() || w[end].recv_cq.is_broken();
            if full {
                assert_eq!(w[end].conn.state(), State::Error);
            }
            let (sent, received) = (w[end].completed(), w[end].received());
            assert!(sent.len() <= 24 && received.len() <= 24);
            assert!(sent.iter().map(|c| c.wr_id).eq(0..sent.len() as u64));
            assert!(
                received
                    .iter()
                    .map(|c| c.wr_id)
                    .eq(0..received.len() as u64)
            );
        }
        return;
    }
    // The application moves the queue pair to the error state: exactly the outstanding requests are flushed.
    for side in 0..2 {
        ledgers[side].poll(&mut w, ends[side]);
        w[ends[side]].conn.set_state(State::Error);
    }
    w.run();
    for side in 0..2 {
        ledgers[side].poll(&mut w, ends[side]);
        ledgers[side].check();
        assert!(w[ends[side]].is_over(), "the stream of side {side} is open");
    }
    if trouble == Trouble::Nothing {
        for ledger in &ledgers {
            let fine = |c: &Completion| matches!(c.status, Status::Success | Status::Flushed);
            assert!(ledger.sent.iter().all(fine), "{:?}", statuses(&ledger.sent));
        }
    }
    for side in 0..2 {
        w[ends[side]].check_guards(&[&memory[side], &sources[side]]);
    }
}

macro_rules! each_request_completes_once {
    ($($name:ident: $trouble:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            each_seed(150, |seed| run(seed, &Setup::anywarp(), Trouble::$trouble));
        }
    )*};
}

each_request_completes_once! {
    each_request_completes_once_when_nothing_goes_wrong: Nothing,
    each_request_completes_once_when_the_stream_is_cut_at_any_byte: Cut,
    each_request_completes_once_when_the_connection_breaks: Kill,
    each_request_completes_once_when_one_is_bad: BadRequest,
    each_request_completes_once_when_its_memory_is_deregistered: Deregister,
    each_request_completes_once_when_an_end_leaves: Leave,
    each_request_completes_once_when_an_end_is_moved_to_the_error_state: Error,
    each_request_completes_once_when_the_send_queue_drains_now_and_then: Drain,
    each_request_completes_once_when_everything_goes_wrong: Everything,
    no_completion_is_made_twice_when_a_completion_queue_is_full: CqFull,
}

#[test]
fn each_request_to_a_standard_peer_completes_once() {
    let setup = Setup {
        mulpdu: 5_000,
        ..Setup::standard()
    };
    for trouble in [
        Trouble::Cut,
        Trouble::Kill,
        Trouble::BadRequest,
        Trouble::Deregister,
        Trouble::Leave,
        Trouble::Error,
        Trouble::Everything,
    ] {
        each_seed(60, |seed| run(seed, &setup, trouble));
    }
}

/// With an even seed, the end that is reset sends a Bye before its stream closes. With an odd seed, the reset closes the stream at once, as if
/// the process had ended.
#[test]
fn a_reset_discards_everything_and_the_other_end_notices() {
    const LEN: usize = 200_000;
    let mut seen = [0; 3];
    each_seed(60, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        w[b].conn.attr_mut().timeout = 14;
        let there = w[b].register(LEN, access::ALL);
        let other = w[b].register(LEN, access::ALL);
        let here = w[a].register(LEN, access::ALL);
        let bytes = w.rng.bytes(LEN);
        w[b].fill(&there, &bytes);
        w[a].recv(1, &[here.part(0, 1)]);
        w[a].recv(2, &[here.part(0, 1)]);
        w[b].post(write(1, here.remote(0)).from(&[there.all()]));
        w[b].post(send(2));
        let until = w.now() + Duration::from_millis(1);
        for _ in 0..w.rng.below(30) {
            w.turn(until);
        }
        w[a].post(write(1, other.remote(0)).from(&[here.all()]));
        w[a].post(send(1));
        for _ in 0..w.rng.below(3) {
            w.turn(until);
        }
        let says_bye = seed % 2 == 0;
        if says_bye {
            w[a].conn.discard();
            assert!(w[a].completed().is_empty() && w[a].received().is_empty());
            w.run();
        }
        w[a].conn.set_state(State::Reset);
        assert!(w[a].completed().is_empty() && w[a].received().is_empty());
        w.run();
        let now = w.now();
        w[b].conn.check_peer_left(now);
        w.run();
        assert!(w[a].completed().is_empty() && w[a].received().is_empty());
        assert_eq!(w[a].conn.state(), State::Reset);
        assert!(w[a].try_post(send(1)).is_err());
        let done = statuses(&w[b].completed());
        let written = match done[..] {
            [(1, Status::Success), (2, Status::Success)] => 2,
            [(1, Status::Success), (2, Status::RetryExceeded)] => 1,
            [(1, Status::RetryExceeded), (2, Status::Flushed)] => 0,
            _ => panic!("{done:?}"),
        };
        seen[written] += 1;
        if written > 0 {
            assert!(w[a].bytes(&here) == bytes);
        }
        if written == 2 && says_bye {
            // All requests had completed when the peer left, so the queue pair has not failed. Only a new request would fail, after the
            // time for which hardware would retransmit it.
            assert_eq!(w[b].conn.state(), State::Rts);
        }
    });
    assert!(seen[0] > 0 && seen[2] > 0, "{seen:?}");
}

#[test]
fn a_delivered_message_is_acknowledged_even_if_the_receiver_disconnects_at_once() {
    each_seed(30, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        w[b].recv(1, &[]);
        w[a].post(send(1));
        let until = w.now() + Duration::from_millis(10);
        while w[b].recv_cq.is_empty() {
            assert!(w.turn(until));
        }
        w[b].conn.leave("destroyed");
        w.run();
        assert_eq!(statuses(&w[a].completed()), [(1, Status::Success)]);
    });
}

#[test]
fn after_the_peer_has_left_only_a_new_request_fails() {
    let mut w = World::new(1);
    let (a, b) = w.pair(&Setup::anywarp());
    w[a].conn.attr_mut().timeout = 14;
    w[a].recv(7, &[]);
    w[b].recv(1, &[]);
    w[a].post(send(1));
    w.run();
    w[b].conn.leave("destroyed");
    w.run();
    assert_eq!(statuses(&w[a].completed()), [(1, Status::Success)]);
    assert_eq!(w[a].conn.state(), State::Rts);
    assert!(w[a].received().is_empty());
    w[a].post(send(2));
    w[a].post(send(3));
    // The requests do not fail at once: hardware would retransmit them for a while, and a program that ends meanwhile
    // sees no error.
    let now = w.now();
    w[a].conn.check_peer_left(now);
    assert!(w[a].completed().is_empty());
    let Some(limit) = w[a].conn.silence_limit() else {
        panic!("the pair has a time-out")
    };
    assert_eq!(w[a].conn.poll_timeout(), Some(now + limit));
    w[a].conn.handle_timeout(now + limit);
    assert_eq!(
        statuses(&w[a].completed()),
        [(2, Status::RetryExceeded), (3, Status::Flushed)]
    );
    assert_eq!(statuses(&w[a].received()), [(7, Status::Flushed)]);
}

#[test]
fn a_disconnect_in_the_middle_of_a_message_flushes_its_receive() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let setup = Setup {
            mulpdu: 1442,
            ..Setup::anywarp()
        };
        let (a, b) = w.pair(&setup);
        let (from, to) = (
            w[a].register(3 << 20, access::LOCAL),
            w[b].register(3 << 20, access::LOCAL),
        );
        w[b].recv(1, &[to.all()]);
        w[b].recv(2, &[to.all()]);
        w.pipe_from(a).capacity = 60_000;
        w[a].post(send(1).from(&[from.all()]));
        let until = w.now() + Duration::from_millis(10);
        for _ in 0..10 {
            w.turn(until);
        }
        w[a].conn.leave("destroyed");
        w.run();
        w[b].conn.set_state(State::Error);
        w.run();
        let got = statuses(&w[b].received());
        assert_eq!(got, [(1, Status::Flushed), (2, Status::Flushed)]);
    });
}

#[test]
fn a_managed_queue_pair_fails_when_its_connection_ends() {
    for stays in [false, true] {
        let setup = Setup {
            managed: true,
            stays,
            ..Setup::anywarp()
        };
        let mut w = World::new(1);
        let (a, b) = w.pair(&setup);
        w[a].recv(1, &[]);
        w.run();
        w[b].conn.leave("disconnected");
        w.run();
        assert!(w[a].raised(AsyncEvent::PeerGone));
        if stays {
            assert_eq!(w[a].conn.state(), State::Rts);
            assert!(w[a].received().is_empty());
            w[a].conn.leave("disconnected");
        }
        assert_eq!(w[a].conn.state(), State::Error);
        assert_eq!(statuses(&w[a].received()), [(1, Status::Flushed)]);
    }
}

#[test]
fn requests_posted_in_the_error_state_are_flushed_at_once() {
    let mut w = World::new(1);
    let (a, _) = w.pair(&Setup::anywarp());
    w[a].conn.set_state(State::Error);
    w[a].recv(1, &[]);
    w[a].post(send(2).unsignaled());
    assert_eq!(statuses(&w[a].received()), [(1, Status::Flushed)]);
    assert_eq!(statuses(&w[a].completed()), [(2, Status::Flushed)]);
}

#[test]
fn a_draining_send_queue_finishes_taken_requests_and_raises_one_event() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (a, b) = w.pair(&Setup::anywarp());
        let (from, to) = (
            w[a].register(100_000, access::ALL),
            w[b].register(100_000, access::ALL),
        );
        for id in 0..10 {
            w[a].post(read(id, to.remote(0)).from(&[from.all()]));
        }
        let until = w.now() + Duration::from_millis(10);
        for _ in 0..w.rng.below(10) {
            w.turn(until);
        }
        let attr = *w[a].conn.attr();
        let mask = anywarp_core::verbs::qp::mask::STATE
            | anywarp_core::verbs::qp::mask::EN_SQD_ASYNC_NOTIFY;
        w[a].conn
            .modify(mask, Some(State::Sqd), None, &attr)
            .unwrap();
        w.run();
        assert_eq!(w[a].times(AsyncEvent::SqDrained), 1);
        let first = w[a].completed().len() as u64;
        let mask = anywarp_core::verbs::qp::mask::STATE;
        w[a].conn
            .modify(mask, Some(State::Rts), None, &attr)
            .unwrap();
        w.run();
        let rest: Vec<_> = w[a].completed().iter().map(|c| c.wr_id).collect();
        assert_eq!(rest, (first..10).collect::<Vec<_>>());
    });
}

#[test]
fn a_peer_that_is_silent_with_work_to_do_is_probed_once() {
    let mut w = World::new(1);
    let (end, peer) = w.raw(&Setup::anywarp(), true);
    w[end].conn.attr_mut().timeout = 14;
    w[end].conn.attr_mut().retry_cnt = 7;
    let limit = w[end].conn.silence_limit().unwrap();
    // The time of silence begins with the request, not with the last message before it.
    w.run_for(Duration::from_secs(100));
    w[peer].received();
    w[end].post(send(1));
    w.run_for(limit / 8);
    assert_eq!(w[peer].received().len(), 1);
    w.run_for(limit);
    let probes: Vec<_> = w[peer].received().iter().map(|f| f.text()).collect();
    assert_eq!(probes, ["Control Ping"]);
    w[peer].sends(&Control::Pong.header().emit());
    w.run_for(limit);
    assert_eq!(
        w[peer].received().len(),
        1,
        "no second probe was sent after the answer"
    );
    w[peer].sends(&Control::Ack { seq: 1 }.header().emit());
    w.run_for(limit * 4);
    assert!(
        w[peer].received().is_empty(),
        "a probe was sent although nothing is outstanding"
    );
    assert_eq!(statuses(&w[end].completed()), [(1, Status::Success)]);
}

// ---------------------------------------------------------------------- errors at each kind of request

type Ended = Vec<(u64, Status)>;

/// Posts a valid Write, Read and Send, then the request that `bad` makes, then a valid Send. Returns the completions
/// of both ends, and whether the peer raised `QpAccess` and `QpRequest`.
fn with_bad(
    seed: u64,
    bad: impl Fn(&Mr, &Mr) -> anywarp_core::verbs::wr::WorkRequest,
) -> (Ended, Ended, [bool; 2]) {
    let mut w = World::new(seed);
    let (a, b) = w.pair(&Setup::anywarp());
    let there = w[b].register(70_000, access::ALL);
    let here = w[a].register(70_000, access::ALL);
    for id in 0..5 {
        w[b].recv(id, &[there.part(0, 100)]);
    }
    w[a].post(write(1, there.remote(0)).from(&[here.all()]));
    w[a].post(read(2, there.remote(0)).from(&[here.all()]));
    w[a].post(send(3).inline(b"good"));
    w[a].post(bad(&here, &there));
    w[a].post(send(5).inline(b"behind"));
    w.run();
    assert_eq!(w[a].conn.state(), State::Error);
    assert_eq!(w[b].conn.state(), State::Error);
    let events = [
        w[b].raised(AsyncEvent::QpAccess),
        w[b].raised(AsyncEvent::QpRequest),
    ];
    (
        statuses(&w[a].completed()),
        statuses(&w[b].received()),
        events,
    )
}

fn behind_good(status: Status) -> Vec<(u64, Status)> {
    let good = [1, 2, 3].map(|id| (id, Status::Success));
    [&good[..], &[(4, status), (5, Status::Flushed)]].concat()
}

fn receives(first: Status, second: Status) -> Vec<(u64, Status)> {
    let flushed = [2, 3, 4].map(|id| (id, Status::Flushed));
    [&[(0, first), (1, second)][..], &flushed].concat()
}

#[test]
fn a_request_without_access_fails_with_remote_access_and_the_ones_before_it_succeed() {
    each_seed(10, |seed| {
        type Make = fn(&Mr, &Mr) -> anywarp_core::verbs::wr::WorkRequest;
        let cases: [Make; 6] = [
            |here, there| {
                write(
                    4,
                    Remote {
                        rkey: Stag(0x0bad_0000),
                        ..there.remote(0)
                    },
                )
                .from(&[here.all()])
            },
            |here, there| write(4, there.remote(1)).from(&[here.all()]),
            |here, there| {
                read(
                    4,
                    Remote {
                        rkey: Stag(0x0bad_0000),
                        ..there.remote(0)
                    },
                )
                .from(&[here.all()])
            },
            |here, there| read(4, there.remote(69_999)).from(&[here.part(0, 2)]),
            |here, there| fetch_add(4, there.remote(70_000), 1).from(&[here.part(0, 8)]),
            |here, there| write_imm(4, there.remote(70_000), [0; 4]).from(&[here.part(0, 8)]),
        ];
        for case in cases {
            let (sent, received, events) = with_bad(seed, case);
            assert_eq!(sent, behind_good(Status::RemoteAccess));
            assert_eq!(received, receives(Status::Success, Status::Flushed));
            assert_eq!(events, [true, false]);
        }
    });
}

#[test]
fn an_invalid_request_fails_with_remote_invalid_request() {
    each_seed(10, |seed| {
        let misaligned =
            |here: &Mr, there: &Mr| compare_swap(4, there.remote(4), 0, 0).from(&[here.part(0, 8)]);
        let (sent, received, events) = with_bad(seed, misaligned);
        assert_eq!(sent, behind_good(Status::RemoteInvalidRequest));
        assert_eq!(received, receives(Status::Success, Status::Flushed));
        assert_eq!(events, [false, true]);
        // A Send that is longer than its receive fails the receive as well.
        let (sent, received, _) = with_bad(seed, |here, _| send(4).from(&[here.part(0, 101)]));
        assert_eq!(sent, behind_good(Status::RemoteInvalidRequest));
        assert_eq!(received, receives(Status::Success, Status::LocalLength));
        let (sent, received, _) = with_bad(seed, |here, _| send(4).from(&[here.all()]));
        assert_eq!(sent, behind_good(Status::RemoteInvalidRequest));
        assert_eq!(received, receives(Status::Success, Status::LocalLength));
    });
}

#[test]
fn a_locally_failed_request_does_not_disturb_earlier_ones() {
    each_seed(10, |seed| {
        let wrong = |sge: Sge| Sge {
            lkey: Stag(sge.lkey.0 ^ 0x0101_0100),
            ..sge
        };
        type Make<'a> = &'a dyn Fn(&Mr, &Mr) -> anywarp_core::verbs::wr::WorkRequest;
        let cases: [(Status, Make<'_>); 5] = [
            (Status::LocalProtection, &|here, _| {
                send(4).from(&[here.part(0, 4), wrong(here.all())])
            }),
            (Status::LocalProtection, &|here, there| {
                write_imm(4, there.remote(0), [0; 4]).from(&[wrong(here.all())])
            }),
            (Status::LocalProtection, &|here, there| {
                read(4, there.remote(0)).from(&[here.part(0, 4), wrong(here.all())])
            }),
            (Status::LocalProtection, &|here, there| {
                fetch_add(4, there.remote(0), 1).from(&[wrong(here.part(0, 8))])
            }),
            (Status::LocalLength, &|here, there| {
                fetch_add(4, there.remote(0), 1).from(&[here.part(0, 7)])
            }),
        ];
        for (status, case) in cases {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&Setup::anywarp());
            let there = w[b].register(70_000, access::ALL);
            let here = w[a].register(70_000, access::ALL);
            for id in 0..5 {
                w[b].recv(id, &[there.part(0, 100)]);
            }
            w[a].post(write(1, there.remote(0)).from(&[here.all()]));
            w[a].post(read(2, there.remote(0)).from(&[here.all()]));
            w[a].post(send(3).inline(b"good"));
            w[a].post(case(&here, &there));
            w[a].post(send(5).inline(b"behind"));
            w.run();
            assert_eq!(statuses(&w[a].completed()), behind_good(status));
            assert_eq!(statuses(&w[b].received()), [(0, Status::Success)]);
        }
    });
}

#[test]
fn a_receive_into_foreign_memory_fails_at_both_ends() {
    each_seed(10, |seed| {
        for size in [10, 60_000] {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&Setup::anywarp());
            let from = w[a].register(size, access::LOCAL);
            let read_only = w[b].register(60_000, access::READ);
            w[b].recv(1, &[read_only.all()]);
            w[b].recv(2, &[]);
            w[a].post(send(1).from(&[from.all()]));
            w.run();
            assert_eq!(statuses(&w[a].completed()), [(1, Status::RemoteOperation)]);
            assert_eq!(
                statuses(&w[b].received()),
                [(1, Status::LocalProtection), (2, Status::Flushed)]
            );
            assert_eq!(w[b].bytes(&read_only), vec![0; 60_000]);
        }
    });
}

// ---------------------------------------------------------------------- shared receive queues, overflow

#[test]
fn queue_pairs_share_receives_and_the_limit_event_is_raised_once() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (one, two, server) = (w.host(), w.host(), w.host());
        let srq = Arc::new(Srq::new(64, 4, 0, server.pd));
        let of_server = Setup {
            srq: Some(Arc::clone(&srq)),
            ..Setup::anywarp()
        };
        let (a, x) = w.connect(&one, &Setup::anywarp(), &server, &of_server);
        let (b, y) = w.connect(&two, &Setup::anywarp(), &server, &of_server);
        let memory = server.register(100, access::LOCAL);
        for id in 0..20 {
            srq.post(RecvRequest {
                id,
                sges: [memory.all()][..].into(),
            })
            .unwrap();
        }
        assert!(!srq.modify(None, Some(5)).unwrap());
        for id in 0..10 {
            w[a].post(send(id).inline(b"one"));
            w[b].post(send(id).inline(b"two"));
        }
        w.run();
        assert_eq!(w[a].completed().len() + w[b].completed().len(), 20);
        let mut ids: Vec<_> = [x, y]
            .into_iter()
            .flat_map(|e| w[e].received())
            .map(|c| c.wr_id)
            .collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..20).collect::<Vec<_>>());
        let limits = w[x].times(AsyncEvent::SrqLimit) + w[y].times(AsyncEvent::SrqLimit);
        assert_eq!(limits, 1);
        assert!(
            w[x].conn
                .post_recv(RecvRequest {
                    id: 1,
                    sges: [][..].into()
                })
                .is_err()
        );
        // Receives that are posted now stay in the shared queue when a queue pair fails.
        srq.post(RecvRequest {
            id: 30,
            sges: [memory.all()][..].into(),
        })
        .unwrap();
        w.kill(a);
        w.run();
        assert_eq!(w[x].times(AsyncEvent::LastWqe), 1);
        w[x].conn.set_state(State::Error);
        assert_eq!(w[x].times(AsyncEvent::LastWqe), 1);
        assert!(w[x].received().is_empty());
        w[b].post(send(99).inline(b"still"));
        w.run();
        assert_eq!(statuses(&w[y].received()), [(30, Status::Success)]);
        assert_eq!(w[y].times(AsyncEvent::LastWqe), 0);
    });
}

#[test]
fn a_receive_taken_from_a_shared_queue_completes_when_its_queue_pair_fails() {
    each_seed(20, |seed| {
        let mut w = World::new(seed);
        let (one, server) = (w.host(), w.host());
        let srq = Arc::new(Srq::new(64, 4, 0, server.pd));
        let of_server = Setup {
            srq: Some(Arc::clone(&srq)),
            ..Setup::anywarp()
        };
        let (a, x) = w.connect(&one, &Setup::anywarp(), &server, &of_server);
        let memory = server.register(1 << 20, access::LOCAL);
        let from = w[a].register(1 << 20, access::LOCAL);
        srq.post(RecvRequest {
            id: 1,
            sges: [memory.all()][..].into(),
        })
        .unwrap();
        w.pipe_from(a).dies_at = Some(300_000);
        w[a].post(send(1).from(&[from.all()]));
        w.run();
        // The receive was consumed if a part of the message arrived before the end.
        let got = statuses(&w[x].received());
        assert!(
            srq.is_empty() && got == [(1, Status::Flushed)] || !srq.is_empty() && got.is_empty()
        );
        assert_eq!(w[x].times(AsyncEvent::LastWqe), 1);
    });
}

#[test]
fn an_overflowing_completion_queue_ends_its_queue_pair() {
    let setup = Setup {
        cqe: 3,
        ..Setup::anywarp()
    };
    let mut w = World::new(1);
    let (a, b) = w.pair(&setup);
    for id in 0..4 {
        w[b].recv(id, &[]);
        w[a].post(send(id));
    }
    w.run();
    assert_eq!(w[a].conn.state(), State::Error);
    assert!(w[a].send_cq.is_broken());
    assert!(w[a].raised(AsyncEvent::QpFatal));
    assert_eq!(w[a].completed().len(), 3);
}
