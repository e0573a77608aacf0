//! The shortcuts for short messages have the same effects as the general data path.
//!
//! Each seed is run with and without the shortcuts. Both runs must put the same bytes on the wire, leave the same
//! bytes in memory, make the same completions and events at the same virtual time, and report the same steps.
#![allow(
    clippy::indexing_slicing,
    reason = "a test stops where something is wrong"
)]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::bounds::COPY_LIMIT;
use anywarp_core::connection::{First, Peer};
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Counters, Kind, TxDatagram};
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::{State, mask};
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Op, Payload, WorkRequest};
use anywarp_sim::ether::{Ether, Link};
use anywarp_sim::{
    EndId, Log, Mr, Request, Rng, Setup, World, access, compare_swap, each_seed, fetch_add, read,
    send, send_imm, send_invalidate, write, write_imm,
};

/// The effects of a run that an application, a peer or an observer can see.
#[derive(Debug, PartialEq)]
struct Outcome {
    wire: [Vec<u8>; 2],
    memory: [Vec<u8>; 2],
    completions: Vec<(usize, Duration, Completion)>,
    events: [Vec<AsyncEvent>; 2],
    states: [State; 2],
    counters: [(u64, u64); 2],
    elapsed: Duration,
    steps: Vec<(u32, String)>,
}

const LEN: usize = 100_000;

/// The parameters of a run.
#[derive(Clone, Copy)]
struct How {
    shortcuts: bool,
    observed: bool,
}

struct Run {
    w: World,
    ends: [EndId; 2],
    mrs: [Mr; 2],
    /// Decides what is posted. The generator of the world decides in which pieces bytes arrive, and how late.
    rng: Rng,
    to_anywarp: bool,
    next_id: u64,
    completions: Vec<(usize, Duration, Completion)>,
}

fn setup(rng: &mut Rng, shortcuts: bool) -> Setup {
    let setup = if rng.chance(70) {
        Setup::anywarp()
    } else {
        Setup::standard()
    };
    let markers = rng.chance(10);
    Setup {
        crc: markers || rng.chance(60),
        mulpdu: *rng.pick(&[128, 1442, 9000, setup.mulpdu]),
        ord: *rng.pick(&[1, 2, 16]),
        markers,
        rnr_retry: *rng.pick(&[1, 7, 7, 7]),
        sig_all: rng.chance(50),
        // Sometimes so few entries that the queue overflows.
        cqe: *rng.pick(&[40, 4096, 4096, 4096]),
        shortcuts,
        ..setup
    }
}

impl Run {
    fn new(seed: u64, how: How) -> (Self, Log) {
        let mut rng = Rng::new(!seed);
        let log = Log::default();
        let mut w = World::new(seed);
        let observer = || how.observed.then(|| log.observer());
        let hosts = [w.host_with(observer()), w.host_with(observer())];
        let setup = setup(&mut rng, how.shortcuts);
        let to_anywarp = setup.peer == Peer::Anywarp && setup.first == First::Hello;
        let (a, b) = w.connect(&hosts[0], &setup, &hosts[1], &setup);
        let mrs = [
            w[a].register(LEN, access::ALL),
            w[b].register(LEN, access::ALL),
        ];
        for end in [a, b] {
            w.pipe_from(end).kept = Some(Vec::new());
            if setup.markers {
                w[end].wants_markers();
            }
        }
        if rng.chance(10) {
            w.pipe_from(a).dies_at = Some(rng.below(100_000) as u64);
        }
        let run = Self {
            w,
            ends: [a, b],
            mrs,
            rng,
            to_anywarp,
            next_id: 0,
            completions: Vec::new(),
        };
        (run, log)
    }

    fn len(&mut self) -> usize {
        match self.rng.below(10) {
            0 => 0,
            1..6 => self.rng.below(200),
            6 => COPY_LIMIT - 2 + self.rng.below(4),
            7 | 8 => self.rng.below(3_000),
            _ => self.rng.below(30_000),
        }
    }

    fn request(&mut self, side: usize) -> WorkRequest {
        let (mine, theirs) = (self.mrs[side].clone(), self.mrs[1 - side].clone());
        self.next_id += 1;
        let id = self.next_id;
        let len = self.len();
        let from = self.rng.below(LEN - len);
        let to = self.rng.below(LEN - len);
        let remote = theirs.remote(to);
        let imm = [1, 2, 3, id as u8];
        let request = match self.rng.below(20) {
            0..7 => send(id),
            7..13 => write(id, remote),
            13 => write_imm(id, remote, imm),
            14 if self.to_anywarp => send_imm(id, imm),
            15 => return read(id, remote).from(&[mine.part(from, len)]),
            16 => {
                let sink = mine.part(from & !7, 8);
                return fetch_add(id, theirs.remote(to & !7), 3).from(&[sink]);
            }
            17 => {
                let sink = mine.part(from & !7, 8);
                return compare_swap(id, theirs.remote(to & !7), 0, id).from(&[sink]);
            }
            // Requests that fail: no such window, no such memory.
            18 if self.rng.chance(2) => send_invalidate(id, theirs.stag()),
            19 if self.rng.chance(2) => write(id, theirs.remote(LEN - len + 1)),
            _ => send(id).solicited(),
        };
        let request = match self.rng.below(6) {
            0 if len <= 512 => request.inline(&self.w[self.ends[side]].bytes(&mine)[..len]),
            1 => request.from(&[
                mine.part(from, len / 2),
                mine.part(from + len / 2, len - len / 2),
            ]),
            _ => request.from(&[mine.part(from, len)]),
        };
        match self.rng.below(8) {
            0 => request.fence(),
            1 | 2 => request.unsignaled(),
            _ => request,
        }
    }

    fn receive(&mut self, side: usize) {
        self.next_id += 1;
        let mr = &self.mrs[side];
        let at = self.rng.below(LEN - 30_000);
        let sges = match self.rng.below(8) {
            0 => vec![mr.part(at, 100), mr.part(at + 100, 29_900)],
            // Too short for some messages.
            1 if self.rng.chance(1) => vec![mr.part(at, 50)],
            _ => vec![mr.part(at, 30_000)],
        };
        let _ = self.w[self.ends[side]].try_recv(self.next_id, &sges);
    }

    fn collect(&mut self) {
        for side in 0..2 {
            let now = self.w.elapsed();
            let end = &mut self.w[self.ends[side]];
            for c in end.completed().into_iter().chain(end.received()) {
                self.completions.push((side, now, c));
            }
        }
    }

    fn step(&mut self) {
        let side = self.rng.below(2);
        let end = self.ends[side];
        match self.rng.below(40) {
            0..16 => {
                for _ in 0..1 + self.rng.below(4) {
                    let request = self.request(side);
                    let _ = self.w[end].try_post(request);
                }
            }
            16..30 => {
                for _ in 0..1 + self.rng.below(4) {
                    self.receive(side);
                }
            }
            // The send queue drains, and is then resumed.
            30 => {
                let attr = *self.w[end].conn.attr();
                let to = match self.w[end].conn.state() {
                    State::Rts => State::Sqd,
                    State::Sqd => State::Rts,
                    _ => return,
                };
                let _ = self.w[end].conn.modify(mask::STATE, Some(to), None, &attr);
            }
            31 => {
                let mulpdu = *self.rng.pick(&[128, 1442, 9000]);
                self.w[end].conn.set_mulpdu(mulpdu);
            }
            32 if self.rng.chance(3) => {
                let mr = self.mrs[side].clone();
                self.w[end].host.deregister(&mr);
                self.mrs[side] = self.w[end].register(LEN, access::ALL);
            }
            _ => {
                let until = self.w.now() + Duration::from_millis(5);
                for _ in 0..self.rng.below(20) {
                    self.w.turn(until);
                }
                self.collect();
            }
        }
    }
}

fn run(seed: u64, how: How) -> Outcome {
    let (mut run, log) = Run::new(seed, how);
    for side in 0..2 {
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7 + side) as u8).collect();
        let mr = run.mrs[side].clone();
        run.w[run.ends[side]].fill(&mr, &bytes);
    }
    // A Send without a receive ends the stream of a standard peer.
    let posted = if run.to_anywarp { 3 } else { 200 };
    for side in 0..2 {
        for _ in 0..posted {
            run.receive(side);
        }
    }
    for _ in 0..120 {
        run.step();
    }
    // Messages that still wait for a receive get one.
    for side in 0..2 {
        for _ in 0..100 {
            run.receive(side);
        }
    }
    run.w.run();
    run.collect();
    let ends = run.ends;
    Outcome {
        wire: ends.map(|end| run.w.pipe_from(end).kept.take().unwrap_or_default()),
        memory: ends.map(|end| run.w[end].host.space.bytes().clone()),
        completions: run.completions,
        events: ends.map(|end| run.w[end].events.clone()),
        states: ends.map(|end| run.w[end].conn.state()),
        counters: ends.map(|end| (run.w[end].conn.received(), run.w[end].conn.not_ready())),
        elapsed: run.w.elapsed(),
        steps: log.take(),
    }
}

#[test]
fn a_conversation_is_the_same_with_and_without_shortcuts() {
    let how = |shortcuts, observed| How {
        shortcuts,
        observed,
    };
    let (mut failed, mut good, mut not_ready) = (0, 0, 0);
    each_seed(400, |seed| {
        let with = run(seed, how(true, true));
        let without = run(seed, how(false, true));
        for (i, (a, b)) in with.steps.iter().zip(&without.steps).enumerate() {
            assert_eq!(a, b, "step {i}, with and without shortcuts");
        }
        assert!(
            with == without,
            "completions, memory, wire or events differ"
        );
        failed += u32::from(with.states.contains(&State::Error));
        good += with
            .completions
            .iter()
            .filter(|(_, _, c)| c.status == Status::Success)
            .count();
        not_ready += with.counters[0].1 + with.counters[1].1;
    });
    // The runs cover requests that succeed, queue pairs that fail, and peers that are not ready.
    assert!(
        failed > 50 && good > 20_000 && not_ready > 100,
        "{failed} {good} {not_ready}"
    );
}

#[test]
fn an_observer_changes_nothing() {
    each_seed(100, |seed| {
        let mut observed = run(
            seed,
            How {
                shortcuts: true,
                observed: true,
            },
        );
        let plain = run(
            seed,
            How {
                shortcuts: true,
                observed: false,
            },
        );
        observed.steps.clear();
        assert!(observed == plain, "the observer changed the conversation");
    });
}

// ---------------------------------------------------------------------- datagrams

/// The effects of a run between two datagram queue pairs that an application or a peer can see.
#[derive(Debug, PartialEq)]
struct DatagramOutcome {
    wire: Vec<TxDatagram>,
    memory: [Vec<u8>; 2],
    completions: Vec<(usize, Completion)>,
    states: [State; 2],
    counters: [Counters; 2],
    elapsed: Duration,
}

fn run_datagrams(seed: u64, kind: Kind, shortcuts: bool) -> DatagramOutcome {
    let mut rng = Rng::new(!seed);
    let loss = *rng.pick(&[0.0, 0.0, 0.05]);
    let mut net = Ether::new(
        seed,
        Link {
            loss,
            ..Link::default()
        },
    );
    net.coalesce = rng.chance(50);
    let options = Options {
        one_sided: true,
        parity: *rng.pick(&[0, 0, 4]),
        ..Options::default()
    };
    let ends = [net.join(kind, options), net.join(kind, options)];
    if kind.is_connected() {
        for (end, peer) in [(ends[0], ends[1]), (ends[1], ends[0])] {
            let peer = net[peer].destination();
            net[end].qp.set_peer(peer);
        }
    }
    let wire = Rc::new(RefCell::new(Vec::new()));
    let log = Rc::clone(&wire);
    net.filter = Some(Box::new(move |datagram| {
        log.borrow_mut().push(datagram.clone());
        true
    }));
    let mrs = ends.map(|end| net[end].host.register(LEN, access::ALL));
    for end in ends {
        net[end].qp.set_shortcuts(shortcuts);
    }
    let mut completions = Vec::new();
    let mut collect = |net: &mut Ether| {
        for (side, end) in ends.into_iter().enumerate() {
            let member = &mut net[end];
            let all = member.completed().into_iter().chain(member.received());
            completions.extend(all.map(|c| (side, c)));
        }
    };
    for step in 0..80 {
        let side = rng.below(2);
        let (mine, theirs) = (&mrs[side], &mrs[1 - side]);
        let len = *rng.pick(&[0, 1, 40, 700, 1400, 3_000]);
        let from = mine.part(rng.below(LEN - len), len);
        let to = theirs.remote(rng.below(LEN - len));
        let request = match rng.below(12) {
            0..4 => send(step),
            4..8 => write(step, to),
            8 => send_imm(step, [1, 2, 3, 4]),
            9 if !matches!(kind, Kind::Uc | Kind::ReliableUc) => read(step, to),
            // Memory that the peer does not have.
            10 if rng.chance(3) => write(step, theirs.remote(LEN)),
            _ => {
                let at = rng.below(LEN - 4_000);
                let (one, two) = (mine.part(at, 1_000), mine.part(at + 1_000, 3_000));
                let ranges = match rng.below(12) {
                    // Two ranges; two ranges of which one is empty; a single short range.
                    0 => vec![one, two],
                    1 => vec![mine.part(at, 0), mine.part(at, 4_000)],
                    2 if kind == Kind::Ud => vec![mine.part(at, 60)],
                    _ => vec![mine.part(at, 4_000)],
                };
                net[ends[side]].recv(1_000 + step, &ranges);
                continue;
            }
        };
        let request = match rng.below(5) {
            0 => request.from(&[from]).fence(),
            1 => request.from(&[from]).unsignaled(),
            2 if len <= 40 => request.inline(&vec![7; len]),
            3 => request.from(&[from]).solicited(),
            _ => request.from(&[from]),
        };
        let is_open = net[ends[side]].qp.state() == State::Rts;
        let is_inline_read =
            matches!(request.op, Op::Read { .. }) && matches!(request.payload, Payload::Inline(_));
        if is_open && !is_inline_read {
            net.post(ends[side], ends[1 - side], request);
        }
        if rng.chance(40) {
            net.run(Duration::from_micros(rng.below(400) as u64));
            collect(&mut net);
        }
    }
    // Messages that still wait for a receive get one.
    for (side, end) in ends.into_iter().enumerate() {
        for id in 0..80 {
            net[end].recv(2_000 + id, &[mrs[side].part(0, 4_000)]);
        }
    }
    net.run(Duration::from_millis(300));
    collect(&mut net);
    DatagramOutcome {
        wire: wire.take(),
        memory: ends.map(|end| net[end].host.space.bytes().clone()),
        states: ends.map(|end| net[end].qp.state()),
        counters: ends.map(|end| net[end].qp.counters()),
        elapsed: net.now(),
        completions,
    }
}

#[test]
fn datagrams_are_the_same_with_and_without_shortcuts() {
    for kind in [Kind::Ud, Kind::Uc, Kind::Rd, Kind::ReliableUc, Kind::Rc] {
        let (mut good, mut datagrams) = (0, 0);
        each_seed(60, |seed| {
            let with = run_datagrams(seed, kind, true);
            let without = run_datagrams(seed, kind, false);
            for (i, (a, b)) in with.wire.iter().zip(&without.wire).enumerate() {
                assert_eq!(a, b, "{kind:?}, datagram {i}, with and without shortcuts");
            }
            assert!(with == without, "{kind:?}: completions or memory differ");
            good += with
                .completions
                .iter()
                .filter(|(_, c)| c.status == Status::Success)
                .count();
            datagrams += with.wire.len();
        });
        assert!(good > 1_500 && datagrams > 3_000, "{good} {datagrams}");
    }
}
