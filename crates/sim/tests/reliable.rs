//! Reliable datagrams between two or more queue pairs, on good and bad networks.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Status, WcOp};
use anywarp_core::verbs::wr::Bind;
use anywarp_core::wire::ddp::Header;
use anywarp_core::wire::{Stag, dgram, rd};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{
    Request, Rng, access, compare_swap, each_seed, fetch_add, read, send, send_imm,
    send_invalidate, write,
};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

fn options() -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_send: 1 << 20,
        ..Options::default()
    }
}

/// Networks from good to bad.
fn links() -> Vec<Link> {
    let mut all = Vec::new();
    for loss in [0.0, 0.01, 0.05, 0.1] {
        for delay in [Duration::ZERO, 10 * MS, 100 * MS] {
            all.push(Link {
                loss,
                delay,
                ..Link::default()
            });
        }
    }
    all.push(Link {
        loss: 0.05,
        duplicate: 0.1,
        reorder: 0.3,
        corrupt: 0.05,
        delay: 5 * MS,
        ..Link::default()
    });
    all
}

fn pair(seed: u64, link: Link, options: Options) -> (Ether, Id, Id) {
    let mut net = Ether::new(seed, link);
    let a = net.join(Kind::Rd, options);
    let b = net.join(Kind::Rd, options);
    (net, a, b)
}

/// Sends of many lengths are delivered once and completely, and in order if the option `ordered` is set.
#[test]
fn every_message_arrives_exactly_once() {
    each_seed(3, |seed| {
        for (n, link) in links().into_iter().enumerate() {
            for ordered in [true, false] {
                let options = Options {
                    ordered,
                    ..options()
                };
                let (mut net, a, b) = pair(seed * 100 + n as u64, link, options);
                let mut rng = Rng::new(seed + n as u64);
                const MANY: u64 = 60;
                const ROOM: usize = 20_040;
                let lens: Vec<usize> = (0..MANY)
                    .map(|_| *rng.pick(&[0, 1, 64, 1400, 4096, 20_000]))
                    .collect();
                let texts: Vec<Vec<u8>> = lens.iter().map(|n| rng.bytes(*n)).collect();
                let inbox = net[b].host.register(ROOM * MANY as usize, access::ALL);
                for id in 0..MANY {
                    let at = ROOM * id as usize;
                    net[b].recv(id, &[inbox.part(at, ROOM)]);
                }
                for (id, text) in texts.iter().enumerate() {
                    let mr = net[a].host.register(text.len().max(1), access::ALL);
                    net[a].host.fill(&mr, text);
                    let imm = (id as u32).to_be_bytes();
                    let request = send_imm(id as u64, imm).from(&[mr.part(0, text.len())]);
                    net.post(a, b, request);
                }
                net.run(LONG);
                let what = format!("seed {seed}, {link:?}, ordered {ordered}");
                let sent = net[a].completed();
                assert_eq!(sent.len(), MANY as usize, "{what}");
                for (id, c) in sent.iter().enumerate() {
                    assert_eq!((c.wr_id, c.status), (id as u64, Status::Success), "{what}");
                }
                let bytes = net[b].host.bytes(&inbox);
                let mut seen = Vec::new();
                for c in net[b].received() {
                    assert_eq!((c.status, c.op), (Status::Success, WcOp::Recv), "{what}");
                    let which = u32::from_be_bytes(c.imm.unwrap()) as usize;
                    assert_eq!(c.byte_len as usize, 40 + lens[which], "{what}");
                    let at = ROOM * c.wr_id as usize + 40;
                    assert_eq!(bytes[at..at + lens[which]], texts[which], "{what}");
                    seen.push(which);
                }
                if ordered {
                    assert!(seen.is_sorted(), "{what}: {seen:?}");
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..MANY as usize).collect::<Vec<_>>(), "{what}");
            }
        }
    });
}

/// Writes, Reads and atomics are each executed once.
#[test]
fn every_operation_is_done_once() {
    each_seed(3, |seed| {
        for (n, link) in links().into_iter().enumerate() {
            let (mut net, a, b) = pair(seed * 1000 + n as u64, link, options());
            const LEN: usize = 30_000;
            let what = format!("seed {seed}, {link:?}");
            let text = Rng::new(seed).bytes(LEN);
            let mine = net[a].host.register(LEN, access::ALL);
            let back = net[a].host.register(LEN, access::ALL);
            let old = net[a].host.register(8 * 20, access::ALL);
            let theirs = net[b].host.register(LEN, access::ALL);
            let word = net[b].host.register(8, access::ALL);
            net[a].host.fill(&mine, &text);
            net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
            let mut get = read(2, theirs.remote(0)).from(&[back.all()]);
            get.fence = true;
            net.post(a, b, get);
            for n in 0..10 {
                let add = fetch_add(3 + n, word.remote(0), 5);
                net.post(a, b, add.from(&[old.part(8 * n as usize, 8)]));
            }
            let swap = compare_swap(13, word.remote(0), 50, 7).from(&[old.part(80, 8)]);
            net.post(a, b, swap);
            net.run(LONG);
            let done = net[a].completed();
            let ids: Vec<_> = done.iter().map(|c| (c.wr_id, c.status)).collect();
            let good: Vec<_> = (1..=13).map(|id| (id, Status::Success)).collect();
            assert_eq!(ids, good, "{what}");
            assert_eq!(net[b].host.bytes(&theirs), text, "{what}");
            assert_eq!(net[a].host.bytes(&back), text, "{what}");
            assert_eq!(net[b].host.word(&word, 0), 7, "{what}");
            let olds: Vec<u64> = (0..11).map(|n| net[a].host.word(&old, 8 * n)).collect();
            assert_eq!(olds, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50], "{what}");
            // A Write leaves a record, which on a reliable queue pair is always complete.
            let record = net[b].qp.poll_record().unwrap();
            assert!(
                record.complete && record.valid as usize == LEN,
                "{record:?}"
            );
        }
    });
}

/// A Send for which no receive is posted waits, and no message of its sender is lost meanwhile.
#[test]
fn sends_wait_for_receives() {
    for ordered in [true, false] {
        let link = Link {
            loss: 0.05,
            delay: 2 * MS,
            ..Link::default()
        };
        let options = Options {
            ordered,
            ..options()
        };
        let (mut net, a, b) = pair(5, link, options);
        let mr = net[a].host.register(3000, access::ALL);
        let inbox = net[b].host.register(4000, access::ALL);
        for id in 0..20 {
            net.post(a, b, send(id).from(&[mr.all()]));
        }
        for id in 0..20 {
            net.run(300 * MS);
            assert_eq!(net[b].received().len(), usize::from(id > 0));
            net[b].recv(id, &[inbox.all()]);
        }
        net.run(LONG);
        assert_eq!(net[b].received().len(), 1);
        let done = net[a].completed();
        assert_eq!(done.len(), 20);
        assert!(done.iter().all(|c| c.status == Status::Success));
        assert_eq!(net[a].qp.state(), State::Rts);
    }
}

#[test]
fn a_missing_receive_fails_the_request_after_rnr_retry() {
    let (mut net, a, b) = pair(6, Link::default(), options());
    net[a].qp.attr_mut().rnr_retry = 3;
    let mr = net[a].host.register(100, access::ALL);
    net.post(a, b, send(1).from(&[mr.all()]));
    let mut done = Vec::new();
    let took = net.run_until(LONG, |net| {
        done.extend(net[a].completed());
        !done.is_empty()
    });
    assert_eq!(done[0].status, Status::RnrRetryExceeded);
    assert!(took >= 300 * MS && took < 3000 * MS, "{took:?}");
    assert_eq!(net[a].qp.state(), State::Error);
}

/// Requests to a failed peer fail. The queue pair stops, and continues when it is moved to RTS again (requirement DG-14 of
/// docs/datagram-iwarp.md). With the option `keep_going` it never stops.
#[test]
fn a_dead_peer_fails_only_its_requests() {
    for keep_going in [false, true] {
        let options = Options {
            keep_going,
            ..options()
        };
        let (mut net, a, b) = pair(7, Link::default(), options);
        let c = net.join(Kind::Rd, options);
        let mr = net[a].host.register(100, access::ALL);
        let inbox = net[c].host.register(1000, access::ALL);
        for id in 0..4 {
            net[c].recv(id, &[inbox.all()]);
        }
        net[b].dead = true;
        net.post(a, b, send(1).from(&[mr.all()]));
        net.post(a, c, send(2).from(&[mr.all()]));
        let took = net.run(LONG);
        assert!(
            took >= options.peer_timeout && took < options.peer_timeout * 3,
            "{took:?}"
        );
        let done = net[a].completed();
        assert_eq!((done[0].wr_id, done[0].status), (1, Status::RetryExceeded));
        assert_eq!((done[1].wr_id, done[1].status), (2, Status::Success));
        let state = if keep_going { State::Rts } else { State::Error };
        assert_eq!(net[a].qp.state(), state);
        net[a].qp.set_state(State::Rts);
        net.post(a, c, send(3).from(&[mr.all()]));
        net.run(LONG);
        assert_eq!(net[a].completed()[0].status, Status::Success);
        assert_eq!(net[c].received().len(), 2);
    }
}

/// A request that is not allowed is refused with an error report: it fails at its sender, and the queue pair that
/// refused it continues.
#[test]
fn a_refused_write_fails_at_its_source() {
    for keep_going in [false, true] {
        let options = Options {
            keep_going,
            ..options()
        };
        let link = Link {
            loss: 0.05,
            delay: MS,
            ..Link::default()
        };
        let (mut net, a, b) = pair(8, link, options);
        let mr = net[a].host.register(9000, access::ALL);
        let closed = net[b].host.register(9000, access::LOCAL);
        let open = net[b].host.register(9000, access::ALL);
        net[a].host.fill(&mr, &[7; 9000]);
        let refused = Rc::new(Cell::new(0));
        let (store, stag) = (Rc::clone(&refused), closed.stag());
        net.filter = Some(Box::new(move |d| {
            let data = rd::parse(&d.bytes).unwrap().1;
            if let Some(datagram) = data.and_then(|data| dgram::parse_covered(data).ok())
                && matches!(datagram.header, Header::Tagged(h) if h.stag == stag)
            {
                store.set(datagram.shim.id);
            }
            true
        }));
        net.post(a, b, write(1, open.remote(0)).from(&[mr.all()]));
        net.post(a, b, write(2, closed.remote(0)).from(&[mr.all()]));
        net.post(a, b, write(3, open.remote(0)).from(&[mr.all()]));
        net.run(LONG);
        let done: Vec<_> = net[a]
            .completed()
            .iter()
            .map(|c| (c.wr_id, c.status))
            .collect();
        let third = if keep_going {
            Status::Success
        } else {
            Status::Flushed
        };
        let good = [(1, Status::Success), (2, Status::RemoteAccess), (3, third)];
        assert_eq!(done, good);
        assert!(net[b].host.bytes(&closed).iter().all(|b| *b == 0));
        assert_eq!(net[b].qp.state(), State::Rts);
        let error = net[a].qp.poll_error().unwrap();
        assert_eq!(error.from, net[b].addr);
        assert_eq!(error.id, refused.get());
        // Requests after the refused one succeed.
        net[a].qp.set_state(State::Rts);
        net.post(a, b, write(4, open.remote(0)).from(&[mr.all()]));
        net.run(LONG);
        assert_eq!(net[a].completed()[0].status, Status::Success);
    }
}

/// A Send with Invalidate whose window is bound to another queue pair of the receiver is refused like any other access
/// that is not allowed, and the window stays valid.
#[test]
fn a_window_of_another_queue_pair_is_not_invalidated_by_a_send() {
    let (mut net, a, b) = pair(11, Link::default(), options());
    let host = net[b].host.clone();
    let regions = &host.rnic.regions;
    let mr = host.register(64, access::ALL);
    let inbox = host.register(100, access::ALL);
    let qpn = net[b].destination().qpn;
    let bound_to = |qpn: u32| {
        let window = regions.alloc_window(host.pd, true, &mut || host.random());
        let window = window.unwrap();
        let rkey = Stag(window.0 ^ 0x55);
        let bind = Bind {
            window,
            rkey,
            mr: mr.stag(),
            addr: mr.all().addr,
            len: 64,
            access: access::WRITE,
        };
        regions.bind(&bind, host.pd, qpn).unwrap();
        rkey
    };
    let (own, other) = (bound_to(qpn), bound_to(qpn + 1));
    let is_valid = |rkey, qpn| {
        regions
            .check(rkey, host.pd, qpn, access::WRITE, mr.remote(0).to, 64)
            .is_ok()
    };
    for id in 0..2 {
        net[b].recv(id, &[inbox.all()]);
    }
    net.post(a, b, send_invalidate(1, own));
    net.post(a, b, send_invalidate(2, other));
    net.run(LONG);
    let done = net[a].completed();
    let done: Vec<_> = done.iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(done, [(1, Status::Success), (2, Status::RemoteAccess)]);
    assert_eq!(net[b].received()[0].invalidated, Some(own));
    assert!(!is_valid(own, qpn));
    assert!(is_valid(other, qpn + 1));
}

/// A queue pair that is created again at the same address is another peer: requests that were under way to the
/// earlier one fail, and none of them is delivered to the new one.
#[test]
fn a_restarted_peer_is_noticed() {
    let (mut net, a, b) = pair(9, Link::default(), options());
    let mr = net[a].host.register(100, access::ALL);
    let inbox = net[b].host.register(1000, access::ALL);
    net[b].recv(1, &[inbox.all()]);
    net.post(a, b, send(1).from(&[mr.all()]));
    net.run(LONG);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    // One Send is under way, and waits because no receive is posted.
    net.post(a, b, send(2).from(&[mr.all()]));
    net.run(20 * MS);
    net.restart(b, options());
    net[b].recv(1, &[inbox.all()]);
    net.run(LONG);
    assert_eq!(net[a].completed()[0].status, Status::RemoteAborted);
    assert!(net[b].received().is_empty());
    net[a].qp.set_state(State::Rts);
    net.post(a, b, send(3).from(&[mr.all()]));
    net.run(LONG);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[b].received().len(), 1);
}

/// A Write that has arrived in part when its sender is created again leaves no record: reliable queue pairs make
/// records of whole messages only.
#[test]
fn a_restart_leaves_no_partial_record() {
    let (mut net, a, b) = pair(10, Link::default(), options());
    let mr = net[a].host.register(3000, access::ALL);
    let theirs = net[b].host.register(3000, access::ALL);
    let mut packets = 0;
    net.filter = Some(Box::new(move |d| {
        let data = rd::parse(&d.bytes).unwrap().1;
        packets += u32::from(data.is_some());
        data.is_none() || packets == 1
    }));
    net.post(a, b, write(1, theirs.remote(0)).from(&[mr.all()]));
    net.run(20 * MS);
    net.filter = None;
    net.restart(a, options());
    net.post(a, b, write(2, theirs.remote(0)).from(&[mr.part(0, 8)]));
    net.run(LONG);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    let record = net[b].qp.poll_record().unwrap();
    assert!(record.complete && record.length == 8, "{record:?}");
    assert_eq!(net[b].qp.poll_record(), None);
    assert_eq!(net[b].qp.counters().evicted, 1);
}

/// The payload rate from one end to the other over a link, in bytes a second.
fn goodput(seed: u64, link: Link, total: usize) -> f64 {
    let (mut net, a, b) = pair(seed, link, options());
    const MESSAGE: usize = 1 << 18;
    let mine = net[a].host.register(MESSAGE, access::ALL);
    let theirs = net[b].host.register(MESSAGE, access::ALL);
    let many = total / MESSAGE;
    for id in 0..many {
        net.post(a, b, write(id as u64, theirs.remote(0)).from(&[mine.all()]));
    }
    let mut done = 0;
    let took = net.run_until(LONG, |net| {
        done += net[a].completed().len();
        done == many
    });
    assert_eq!(done, many, "{link:?}");
    total as f64 / took.as_secs_f64()
}

/// The rate of TCP over a path with random losses, by the formula of Mathis and others (1997).
fn tcp_model(loss: f64, trip: Duration) -> f64 {
    1448.0 * 1.22 / (trip.as_secs_f64() * loss.sqrt())
}

#[test]
fn random_loss_costs_little_more_than_the_lost_bytes() {
    let link = |loss| Link {
        loss,
        delay: 5 * MS,
        rate: 12_500_000,
        queue: 125_000,
        ..Link::default()
    };
    let clean = goodput(1, link(0.0), 32 << 20);
    assert!(clean > 0.8 * 12_500_000.0, "{clean}");
    for (loss, share) in [(0.001, 0.9), (0.01, 0.85), (0.05, 0.7)] {
        let rate = goodput(2, link(loss), 32 << 20);
        assert!(rate > share * clean, "{loss}: {rate} of {clean}");
        assert!(rate > tcp_model(loss, 10 * MS), "{loss}: {rate}");
    }
}

/// Senders that share a link all make progress, and the link's queue does not overflow all the time.
#[test]
fn four_senders_share_a_link() {
    let link = Link {
        delay: 5 * MS,
        rate: 12_500_000,
        queue: 125_000,
        ..Link::default()
    };
    let mut net = Ether::new(3, link);
    let target = net.join(Kind::Rd, options());
    let theirs = net[target].host.register(1 << 16, access::ALL);
    let sources: Vec<Id> = (0..4).map(|_| net.join(Kind::Rd, options())).collect();
    for source in &sources {
        let mine = net[*source].host.register(1 << 16, access::ALL);
        for id in 0..2000 {
            let request = write(id, theirs.remote(0)).from(&[mine.all()]);
            net.post(*source, target, request);
        }
    }
    net.run(Duration::from_secs(5));
    let done: Vec<usize> = sources.iter().map(|s| net[*s].completed().len()).collect();
    let all: usize = done.iter().sum();
    let rate = (all << 16) as f64 / 5.0;
    assert!(rate > 0.6 * 12_500_000.0, "{rate} {done:?}");
    assert!(done.iter().all(|n| *n * 12 > all), "{done:?}");
    let sent = net.sent() as f64 * 1448.0;
    assert!(sent < 2.0 * (all << 16) as f64 + 4e6, "{sent} for {done:?}");
}

/// One queue pair with a thousand peers: failed peers do not delay the messages to the others.
#[test]
fn a_thousand_peers_and_one_queue_pair() {
    let link = Link {
        loss: 0.01,
        delay: MS,
        ..Link::default()
    };
    let mut net = Ether::new(4, link);
    let options = Options {
        keep_going: true,
        ..options()
    };
    let hub = net.join(Kind::Rd, options);
    let many = 1000;
    let inbox = net[hub].host.register(1000, access::ALL);
    let peers: Vec<Id> = (0..many).map(|_| net.join(Kind::Rd, options)).collect();
    for (n, peer) in peers.iter().enumerate() {
        net[hub].recv(n as u64, &[inbox.all()]);
        let mr = net[*peer].host.register(100, access::ALL);
        net.post(*peer, hub, send(1).from(&[mr.all()]));
    }
    net.run(LONG);
    assert_eq!(net[hub].received().len(), many);
    assert_eq!(net[hub].qp.peers(), many);
    // Every tenth peer has failed. The messages to the others arrive soon nevertheless.
    let mr = net[hub].host.register(100, access::ALL);
    for (n, peer) in peers.iter().enumerate() {
        net[*peer].dead = n % 10 == 0;
        if n % 10 != 0 {
            let inbox = net[*peer].host.register(200, access::ALL);
            net[*peer].recv(9, &[inbox.all()]);
        }
    }
    for peer in &peers {
        net.post(hub, *peer, send(2).from(&[mr.all()]));
    }
    net.run(Duration::from_secs(2));
    let got = peers.iter().filter(|p| net[**p].received().len() == 1);
    assert_eq!(got.count(), many - many / 10);
    net.run(LONG);
    let done = net[hub].completed();
    assert_eq!(done.len(), many);
    let failed = done.iter().filter(|c| c.status == Status::RetryExceeded);
    assert_eq!(failed.count(), many / 10);
}

/// Connects two queue pairs of a connected service, if `kind` is one.
fn connect(net: &mut Ether, kind: Kind, ends: [Id; 2]) {
    if kind.is_connected() {
        for (end, peer) in [(ends[0], ends[1]), (ends[1], ends[0])] {
            let peer = net[peer].destination();
            net[end].qp.set_peer(peer);
        }
    }
}

fn statuses(net: &mut Ether, of: Id) -> Vec<(u64, Status)> {
    let all = net[of].completed();
    all.iter().map(|c| (c.wr_id, c.status)).collect()
}

/// The local memory of a Read or of an atomic is deregistered before the answer arrives: the request fails, and the queue
/// pair stops, as after other failed requests.
#[test]
fn an_answer_without_memory_fails_the_queue_pair() {
    for kind in [Kind::Rd, Kind::Rc] {
        for atomic in [false, true] {
            for keep_going in [false, true] {
                let options = Options {
                    keep_going,
                    ..options()
                };
                let what = format!("{kind:?}, atomic {atomic}, keep_going {keep_going}");
                let mut net = Ether::new(21, Link::default());
                let ends = [net.join(kind, options), net.join(kind, options)];
                connect(&mut net, kind, ends);
                let [a, b] = ends;
                let mine = net[a].host.register(8, access::ALL);
                let theirs = net[b].host.register(8, access::ALL);
                let request = if atomic {
                    fetch_add(1, theirs.remote(0), 1)
                } else {
                    read(1, theirs.remote(0))
                };
                net.post(a, b, request.from(&[mine.all()]));
                net.run_until(LONG, |net| net[b].qp.counters().rx_dgrams > 1);
                net[a].host.deregister(&mine);
                net.run(LONG);
                assert_eq!(
                    statuses(&mut net, a),
                    [(1, Status::LocalProtection)],
                    "{what}"
                );
                let goes_on = keep_going && kind == Kind::Rd;
                let state = if goes_on { State::Rts } else { State::Error };
                assert_eq!(net[a].qp.state(), state, "{what}");
                assert_eq!(net[b].qp.state(), State::Rts, "{what}");
            }
        }
    }
}

/// A Read of 4 MiB at 1 MB/s, of which a part has arrived. The requester waits longer for its peer than the
/// peer for it.
fn half_read(kind: Kind, keep_going: bool) -> (Ether, Id, Id) {
    const LEN: usize = 4 << 20;
    let link = Link {
        rate: 1_000_000,
        ..Link::default()
    };
    let mut net = Ether::new(22, link);
    let options = Options {
        keep_going,
        ..options()
    };
    let patient = Options {
        peer_timeout: 60_000 * MS,
        ..options
    };
    let ends = [net.join(kind, patient), net.join(kind, options)];
    connect(&mut net, kind, ends);
    let [a, b] = ends;
    let mine = net[a].host.register(LEN, access::ALL);
    let theirs = net[b].host.register(LEN, access::ALL);
    net[b].host.fill(&theirs, &[9; LEN]);
    net.post(a, b, read(1, theirs.remote(0)).from(&[mine.all()]));
    net.run_until(LONG, |net| net[a].host.bytes(&mine)[100_000] == 9);
    (net, a, b)
}

/// A peer that was out of reach for long gives up the answer to a Read. When the path is good again, the Read fails
/// instead of waiting for ever, and later requests succeed.
#[test]
fn a_read_fails_if_its_answer_was_given_up() {
    for kind in [Kind::Rd, Kind::Rc] {
        for keep_going in [false, true] {
            let (mut net, a, b) = half_read(kind, keep_going);
            net.filter = Some(Box::new(|_| false));
            net.run(10_000 * MS);
            net.filter = None;
            let took = net.run(LONG);
            assert!(took < 20_000 * MS, "{kind:?}: {took:?}");
            assert_eq!(statuses(&mut net, a), [(1, Status::RemoteAborted)]);
            assert_eq!(net[b].qp.state(), State::Rts, "{kind:?}");
            if kind == Kind::Rd {
                net[a].qp.set_state(State::Rts);
                let mine = net[a].host.register(8, access::ALL);
                let word = net[b].host.register(8, access::ALL);
                net.post(a, b, fetch_add(2, word.remote(0), 3).from(&[mine.all()]));
                net.post(b, a, fetch_add(3, mine.remote(0), 3).from(&[word.all()]));
                net.run(LONG);
                assert_eq!(statuses(&mut net, a), [(2, Status::Success)]);
                assert_eq!(statuses(&mut net, b), [(3, Status::Success)]);
            }
        }
    }
}

/// A queue pair fails because of one peer, and continues at once. The Read of another peer, whose answer was under way,
/// fails instead of waiting for ever. So does an atomic whose answer waited behind it.
#[test]
fn a_read_fails_if_the_responder_was_reset() {
    for to in [State::Rts, State::Reset] {
        let (mut net, a, b) = half_read(Kind::Rd, true);
        let word = net[a].host.register(8, access::ALL);
        let theirs = net[b].host.register(8, access::ALL);
        net.post(a, b, fetch_add(2, theirs.remote(0), 3).from(&[word.all()]));
        net.run(100 * MS);
        net[b].qp.set_state(State::Error);
        again(&mut net, b, to);
        let took = net.run(LONG);
        assert!(took < 20_000 * MS, "{to:?}: {took:?}");
        let failed = [(1, Status::RemoteAborted), (2, Status::RemoteAborted)];
        assert_eq!(statuses(&mut net, a), failed, "{to:?}");
        net.post(a, b, fetch_add(3, theirs.remote(0), 3).from(&[word.all()]));
        net.run(LONG);
        assert_eq!(statuses(&mut net, a), [(3, Status::Success)], "{to:?}");
    }
}

/// Both ends give each other up, or the requester is in the error state for a long time, while an answer is under way. Later requests
/// succeed at the first attempt, although the responder has begun a new session.
#[test]
fn requests_after_a_failure_succeed() {
    for cut in [true, false] {
        for next in 0..3 {
            let what = format!("cut {cut}, {next}");
            let (mut net, a, b) = half_read(Kind::Rd, false);
            let status = if cut {
                net.filter = Some(Box::new(|_| false));
                net.run(100_000 * MS);
                net.filter = None;
                Status::RetryExceeded
            } else {
                net[a].qp.set_state(State::Error);
                net.run(10_000 * MS);
                Status::Flushed
            };
            assert_eq!(statuses(&mut net, a), [(1, status)], "{what}");
            again(&mut net, a, State::Rts);
            let mine = net[a].host.register(5000, access::ALL);
            let theirs = net[b].host.register(5040, access::ALL);
            net[b].recv(1, &[theirs.all()]);
            let request = match next {
                0 => send(2),
                1 => write(2, theirs.remote(0)),
                _ => read(2, theirs.remote(0)),
            };
            net.post(a, b, request.from(&[mine.all()]));
            net.run(LONG);
            assert_eq!(statuses(&mut net, a), [(2, Status::Success)], "{what}");
            assert_eq!(net[b].received().len(), usize::from(next == 0), "{what}");
        }
    }
}

/// Moves a queue pair to RTS, through `to`.
fn again(net: &mut Ether, of: Id, to: State) {
    net[of].qp.set_state(to);
    net[of].qp.attr_mut().qkey = anywarp_sim::ether::QKEY;
    net[of].qp.set_state(State::Rts);
}

/// A queue pair that fails, or is reset, in the middle of a Send of a healthy peer loses the first part of the message: the
/// Send fails, and no receive waits for the rest. A Send of which nothing has arrived, or whose packets only wait for a
/// receive, is delivered, once.
#[test]
fn a_message_that_a_reset_cuts_fails_and_others_arrive() {
    const LEN: usize = 200_000;
    for ordered in [true, false] {
        for to in [State::Rts, State::Reset] {
            let what = format!("ordered {ordered}, {to:?}");
            let link = Link {
                rate: 1_000_000,
                ..Link::default()
            };
            let options = Options {
                ordered,
                keep_going: true,
                ..options()
            };
            let mut net = Ether::new(23, link);
            let [a, b, c] = [(); 3].map(|()| net.join(Kind::Rd, options));
            let mine = net[a].host.register(LEN, access::ALL);
            let other = net[c].host.register(3000, access::ALL);
            let inbox = net[b].host.register(LEN + 40, access::ALL);
            net[a].host.fill(&mine, &[9; LEN]);
            net[b].recv(1, &[inbox.all()]);
            net.post(a, b, send(1).from(&[mine.all()]));
            net.run_until(LONG, |net| net[b].host.bytes(&inbox)[100_000] == 9);
            // Two packets, for which there is no receive.
            net.post(c, b, send(2).from(&[other.all()]));
            net.run(50 * MS);
            net[b].qp.set_state(State::Error);
            assert!(
                net[b]
                    .received()
                    .iter()
                    .all(|r| r.status == Status::Flushed)
            );
            again(&mut net, b, to);
            for id in 2..4 {
                net[b].recv(id, &[inbox.all()]);
            }
            net.run(LONG);
            assert_eq!(
                statuses(&mut net, a),
                [(1, Status::RemoteAborted)],
                "{what}"
            );
            assert_eq!(statuses(&mut net, c), [(2, Status::Success)], "{what}");
            let got = net[b].received();
            let lens: Vec<_> = got.iter().map(|r| (r.status, r.byte_len)).collect();
            assert_eq!(lens, [(Status::Success, 3040)], "{what}");
            net.post(a, b, send(3).from(&[mine.part(0, 5000)]));
            net.run(LONG);
            assert_eq!(statuses(&mut net, a), [(3, Status::Success)], "{what}");
            let got = net[b].received();
            let lens: Vec<_> = got.iter().map(|r| (r.status, r.byte_len)).collect();
            assert_eq!(lens, [(Status::Success, 5040)], "{what}");
        }
    }
}

/// A receive turns out to have no memory in the middle of a Send whose packets arrive in any order, and the queue pair
/// fails. The Send fails too, and no part of it takes a receive after the queue pair continues.
#[test]
fn a_message_cut_by_a_broken_receive_takes_no_other_receive() {
    const LEN: usize = 200_000;
    for ordered in [true, false] {
        each_seed(10, |seed| {
            let what = format!("ordered {ordered}, seed {seed}");
            let link = Link {
                loss: 0.05,
                reorder: 0.5,
                delay: 5 * MS,
                ..Link::default()
            };
            let options = Options {
                ordered,
                keep_going: true,
                ..options()
            };
            let (mut net, a, b) = pair(seed, link, options);
            let mine = net[a].host.register(LEN, access::ALL);
            let broken = net[b].host.register(LEN + 40, access::ALL);
            let inbox = net[b].host.register(LEN + 40, access::ALL);
            net[a].host.fill(&mine, &[9; LEN]);
            net[b].recv(1, &[broken.all()]);
            net.post(a, b, send(1).from(&[mine.all()]));
            net.run_until(LONG, |net| net[b].host.bytes(&broken)[50_000] == 9);
            net[b].host.deregister(&broken);
            net.run_until(LONG, |net| net[b].qp.state() == State::Error);
            let got = net[b].received();
            assert_eq!(got[0].status, Status::LocalProtection, "{what}");
            again(&mut net, b, State::Rts);
            net[b].recv(2, &[inbox.all()]);
            net.run(LONG);
            let ends = statuses(&mut net, a);
            let expected = [Status::RemoteOperation, Status::RemoteAborted];
            assert!(
                ends.len() == 1 && expected.contains(&ends[0].1),
                "{what}: {ends:?}"
            );
            net.post(a, b, send(2).from(&[mine.part(0, 5000)]));
            net.run(LONG);
            assert_eq!(statuses(&mut net, a), [(2, Status::Success)], "{what}");
            let got = net[b].received();
            let ids: Vec<_> = got.iter().map(|r| (r.wr_id, r.byte_len)).collect();
            assert_eq!(ids, [(2, 5040)], "{what}");
        });
    }
}

/// A connected queue pair that was reset delivers no message of the old connection in the new one. The request of the peer fails.
#[test]
fn no_message_of_an_old_connection_reaches_the_new_one() {
    for both in [false, true] {
        let mut net = Ether::new(24, Link::default());
        let ends = [net.join(Kind::Rc, options()), net.join(Kind::Rc, options())];
        connect(&mut net, Kind::Rc, ends);
        let [a, b] = ends;
        let mine = net[a].host.register(3000, access::ALL);
        let inbox = net[b].host.register(3000, access::ALL);
        // The packets wait for a receive.
        net.post(a, b, send(1).from(&[mine.all()]));
        net.post(a, b, send(2).from(&[mine.all()]));
        net.run(50 * MS);
        let ids = if both { &ends[..] } else { &ends[1..] };
        for id in ids {
            again(&mut net, *id, State::Reset);
        }
        connect(&mut net, Kind::Rc, ends);
        net[b].recv(1, &[inbox.all()]);
        net.run(LONG);
        assert!(net[b].received().is_empty(), "both {both}");
        if !both {
            let failed = [(1, Status::RemoteAborted), (2, Status::Flushed)];
            assert_eq!(statuses(&mut net, a), failed);
            again(&mut net, a, State::Reset);
            connect(&mut net, Kind::Rc, ends);
        }
        net.post(a, b, send(3).from(&[mine.part(0, 100)]));
        net.run(LONG);
        assert_eq!(statuses(&mut net, a), [(3, Status::Success)], "both {both}");
        assert_eq!(net[b].received()[0].byte_len, 100, "both {both}");
    }
}
