//! Reliable datagrams: each message is delivered once or its request fails, and a request succeeds only if its message was
//! delivered.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::datagram::options::{Options, RecordMode, Segment};
use anywarp_core::datagram::{Kind, TxDatagram};
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Status, WcOp};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{
    Mr, Request, Rng, access, each_seed, read, send, send_imm, send_invalidate, write, write_imm,
};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

fn options(ordered: bool) -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_send: 1 << 20,
        ordered,
        ..Options::default()
    }
}

/// A network that loses, duplicates, reorders and damages datagrams.
fn bad() -> Link {
    Link {
        loss: 0.05,
        duplicate: 0.05,
        reorder: 0.3,
        corrupt: 0.02,
        delay: MS,
        ..Link::default()
    }
}

fn pair(seed: u64, link: Link, options: Options) -> (Ether, Id, Id) {
    let mut net = Ether::new(seed, link);
    let a = net.join(Kind::Rd, options);
    let b = net.join(Kind::Rd, options);
    (net, a, b)
}

fn statuses(net: &mut Ether, of: Id) -> Vec<(u64, Status)> {
    let all = net[of].completed();
    all.iter().map(|c| (c.wr_id, c.status)).collect()
}

/// The number of a packet, if it has data.
fn packet(datagram: &TxDatagram) -> Option<u32> {
    let bytes = &datagram.bytes;
    (bytes[0] == 0xde && bytes[1] & 1 == 1)
        .then(|| u32::from_be_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]))
}

// ---------------------------------------------------------------------- records

/// If the queue of records is full, writers have to wait: no record is lost, and no Write completes without its
/// record.
#[test]
fn a_write_waits_for_room_for_its_record() {
    const MANY: u64 = 20;
    const MOST: usize = 4;
    each_seed(4, |seed| {
        for ordered in [true, false] {
            for record in [RecordMode::Robust, RecordMode::Thesis, RecordMode::Chunk] {
                let options = Options {
                    record,
                    max_records: MOST as u32,
                    ..options(ordered)
                };
                let what = format!("seed {seed}, ordered {ordered}, {record:?}");
                let (mut net, a, b) = pair(seed, bad(), options);
                let mut rng = Rng::new(seed);
                const ROOM: usize = 5000;
                let theirs = net[b].host.register(ROOM * MANY as usize, access::ALL);
                let texts: Vec<Vec<u8>> = (0..MANY)
                    .map(|_| {
                        let len = *rng.pick(&[0, 8, 1000, 3000, ROOM]);
                        rng.bytes(len)
                    })
                    .collect();
                for (id, text) in texts.iter().enumerate() {
                    let mine = net[a].host.register(text.len().max(1), access::ALL);
                    net[a].host.fill(&mine, text);
                    let remote = theirs.remote(ROOM * id);
                    let request = write_imm(id as u64, remote, (id as u32).to_be_bytes());
                    net.post(a, b, request.from(&[mine.part(0, text.len())]));
                }
                // For each message: the number of bytes in its records, and the number of its records.
                let mut recorded = vec![(0, 0); MANY as usize];
                let mut done = 0;
                let mut steps = 0;
                while done < MANY as usize {
                    steps += 1;
                    assert!(steps < 1000, "{what}: {recorded:?}");
                    net.run_until(3000 * MS, |net| {
                        done += net[a].completed().len();
                        let waiting = net[b].qp.records().len();
                        assert!(waiting <= MOST, "{what}");
                        // Each completed Write has a record, fetched by the program or not.
                        let whole = |(bytes, records): &(usize, usize), text: &Vec<u8>| {
                            *records > 0 && *bytes == text.len()
                        };
                        let taken = recorded.iter().zip(&texts).filter(|(t, x)| whole(t, x));
                        assert!(done <= taken.count() + waiting, "{what}");
                        false
                    });
                    if done < MANY as usize {
                        assert_eq!(net[b].qp.records().len(), MOST, "{what}: stuck");
                    }
                    // Fetching one record makes room, and so does fetching all.
                    for _ in 0..if rng.below(3) == 0 { MOST } else { 1 } {
                        let Some(r) = net[b].qp.poll_record() else {
                            break;
                        };
                        let id = u32::from_be_bytes(r.imm.unwrap()) as usize;
                        assert_eq!(r.chunk, record == RecordMode::Chunk, "{what}");
                        assert!(r.chunk || r.complete, "{what}: {r:?}");
                        let text = &texts[id];
                        assert_eq!(r.length as usize, text.len(), "{what}");
                        let from = ROOM * id + r.offset as usize;
                        let bytes = &net[b].host.bytes(&theirs)[from..from + r.valid as usize];
                        let part = r.offset as usize..(r.offset + r.valid) as usize;
                        assert_eq!(bytes, &text[part], "{what}");
                        recorded[id].0 += r.valid as usize;
                        recorded[id].1 += 1;
                    }
                }
                while let Some(r) = net[b].qp.poll_record() {
                    let id = u32::from_be_bytes(r.imm.unwrap()) as usize;
                    recorded[id].0 += r.valid as usize;
                    recorded[id].1 += 1;
                }
                for ((bytes, records), text) in recorded.iter().zip(&texts) {
                    assert_eq!(*bytes, text.len(), "{what}: {recorded:?}");
                    let one = record != RecordMode::Chunk || text.len() < 1300;
                    assert!(
                        *records == 1 || !one && *records > 1,
                        "{what}: {recorded:?}"
                    );
                }
                assert_eq!(net[b].qp.counters().rec_overflow, 0, "{what}");
                assert_eq!(net[a].qp.state(), State::Rts, "{what}");
            }
        }
    });
}

/// A Write of one datagram is not placed while it waits for room for its record. Its sender treats this like a missing
/// receive: the request fails when it has waited 100 ms for each retry that `rnr_retry` permits.
#[test]
fn writes_wait_while_the_queue_of_records_is_full() {
    let options = Options {
        max_records: 1,
        ..options(true)
    };
    let (mut net, a, b) = pair(3, Link::default(), options);
    net[a].qp.attr_mut().rnr_retry = 3;
    let mine = net[a].host.register(8, access::ALL);
    let theirs = net[b].host.register(16, access::ALL);
    net[a].host.fill(&mine, &[7; 8]);
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.post(a, b, write(2, theirs.remote(8)).from(&[mine.all()]));
    let mut done = Vec::new();
    let took = net.run_until(LONG, |net| {
        done.extend(statuses(net, a));
        done.len() == 2
    });
    assert!(took >= 300 * MS && took < 3000 * MS, "{took:?}");
    let ends = [(1, Status::Success), (2, Status::RnrRetryExceeded)];
    assert_eq!(done, ends);
    assert_eq!(net[b].host.bytes(&theirs)[8..], [0; 8]);
    let counters = net[b].qp.counters();
    assert_eq!((counters.rec_full, counters.rec_overflow), (1, 0));
    assert!(counters.rx_no_recv > 0);
}

/// A validity map that is not released uses the room of a record, and releasing it makes room for one.
#[test]
fn a_map_that_is_released_makes_room() {
    let options = Options {
        max_records: 1,
        keep_going: true,
        ..options(true)
    };
    let link = Link {
        rate: 1_000_000,
        ..Link::default()
    };
    let (mut net, a, b) = pair(5, link, options);
    const LEN: usize = 50_000;
    let mine = net[a].host.register(LEN, access::ALL);
    let gone = net[b].host.register(LEN, access::ALL);
    let there = net[b].host.register(8, access::ALL);
    net[a].host.fill(&mine, &[9; LEN]);
    net.post(a, b, write(1, gone.remote(0)).from(&[mine.all()]));
    net.post(a, b, write(2, there.remote(0)).from(&[mine.part(0, 8)]));
    net.run_until(LONG, |net| net[b].host.bytes(&gone)[LEN / 2] == 9);
    net[b].host.deregister(&gone);
    net.run(500 * MS);
    // The failed message leaves a record with the map of the bytes that arrived.
    let part = net[b].qp.poll_record().unwrap();
    assert!(!part.complete && part.map != 0, "{part:?}");
    net.run(500 * MS);
    assert_eq!(statuses(&mut net, a), [(1, Status::RemoteAccess)]);
    assert!(net[b].qp.release_map(part.map));
    net.run(5 * MS);
    assert_eq!(statuses(&mut net, a), [(2, Status::Success)]);
    assert!(net[b].qp.poll_record().unwrap().complete);
}

/// Packets that wait for room for a record are not delayed by packets that wait for a receive, and vice versa.
#[test]
fn packets_wait_only_for_the_resource_that_they_need() {
    let options = Options {
        max_records: 1,
        ..options(true)
    };
    let (mut net, a, b) = pair(4, Link::default(), options);
    let c = net.join(Kind::Rd, options);
    let mine = net[a].host.register(8, access::ALL);
    let other = net[c].host.register(8, access::ALL);
    let theirs = net[b].host.register(64, access::ALL);
    for id in 0..3 {
        net.post(a, b, write(id, theirs.remote(0)).from(&[mine.all()]));
    }
    net.run(50 * MS);
    for id in 0..2 {
        net.post(c, b, send(id).from(&[other.all()]));
    }
    net.run(50 * MS);
    let of = |net: &mut Ether| (net[a].completed().len(), net[c].completed().len());
    assert_eq!(of(&mut net), (1, 0));
    // The delivery happens at once, and not only at the next probe of the peer, which would take longer.
    net[b].recv(1, &[theirs.part(8, 50)]);
    net.run(5 * MS);
    assert_eq!(of(&mut net), (0, 1));
    assert!(net[b].qp.poll_record().is_some());
    net.run(5 * MS);
    assert_eq!(of(&mut net), (1, 0));
    net[b].recv(2, &[theirs.part(8, 50)]);
    assert!(net[b].qp.poll_record().is_some());
    net.run(5 * MS);
    assert_eq!(of(&mut net), (1, 1));
    assert_eq!(net[b].received().len(), 2);
}

// ---------------------------------------------------------------------- completion

/// On a bad network, with receives posted at any time, no request completes before its message is delivered.
#[test]
fn no_request_completes_before_its_message_is_delivered() {
    const MANY: u64 = 40;
    each_seed(6, |seed| {
        for ordered in [true, false] {
            let (mut net, a, b) = pair(seed, bad(), options(ordered));
            let what = format!("seed {seed}, ordered {ordered}");
            let mut rng = Rng::new(seed);
            let inbox = net[b].host.register(10_040, access::ALL);
            for id in 0..MANY {
                let len = *rng.pick(&[0, 100, 1500, 10_000]);
                let mine = net[a].host.register(10_000, access::ALL);
                let imm = (id as u32).to_be_bytes();
                net.post(a, b, send_imm(id, imm).from(&[mine.part(0, len)]));
            }
            let mut delivered = vec![0; MANY as usize];
            let mut done = 0;
            for id in 0..MANY {
                let pause = MS * rng.below(200) as u32;
                net.run_until(pause, |net| {
                    for c in net[b].received() {
                        delivered[u32::from_be_bytes(c.imm.unwrap()) as usize] += 1;
                    }
                    for c in net[a].completed() {
                        assert_eq!(c.status, Status::Success, "{what}");
                        assert_eq!(delivered[c.wr_id as usize], 1, "{what}, {}", c.wr_id);
                        done += 1;
                    }
                    false
                });
                net[b].recv(id, &[inbox.all()]);
            }
            net.run(LONG);
            done += net[a].completed().len();
            for c in net[b].received() {
                delivered[u32::from_be_bytes(c.imm.unwrap()) as usize] += 1;
            }
            assert_eq!(done, MANY as usize, "{what}");
            assert!(delivered.iter().all(|n| *n == 1), "{what}: {delivered:?}");
        }
    });
}

/// A packet that is acknowledged out of order and waits for a receive does not complete its request. If the receiving
/// queue pair is created again, the request fails.
#[test]
fn requests_that_wait_for_a_receive_fail_when_the_receiver_is_created_again() {
    for ordered in [true, false] {
        let (mut net, a, b) = pair(11, Link::default(), options(ordered));
        let mine = net[a].host.register(100, access::ALL);
        let inbox = net[b].host.register(200, access::ALL);
        net[b].recv(1, &[inbox.all()]);
        for id in 0..5 {
            net.post(a, b, send(id).from(&[mine.all()]));
        }
        net.run(300 * MS);
        assert_eq!(statuses(&mut net, a), [(0, Status::Success)]);
        net.restart(b, options(ordered));
        for id in 0..5 {
            net[b].recv(id, &[inbox.all()]);
        }
        net.run(LONG);
        let failed: Vec<_> = (1..5).map(|id| (id, Status::RemoteAborted)).collect();
        assert_eq!(statuses(&mut net, a), failed);
        assert!(net[b].received().is_empty());
    }
}

/// A message that arrives long after many messages with higher numbers is delivered as new.
#[test]
fn an_old_message_number_is_accepted() {
    let (mut net, a, b) = pair(12, Link::default(), options(false));
    let theirs = net[b].host.register(16_000, access::ALL);
    let other = net[b].host.register(16_000, access::ALL);
    let mine = net[a].host.register(16_000, access::ALL);
    net[a].host.fill(&mine, &[5; 16_000]);
    for len in [8, 16_000] {
        let held = Rc::new(Cell::new(true));
        let hold = Rc::clone(&held);
        let mut first = None;
        net.filter = Some(Box::new(move |datagram| {
            let Some(seq) = packet(datagram) else {
                return true;
            };
            !(hold.get() && seq == *first.get_or_insert(seq))
        }));
        let request = write(0, theirs.remote(0)).from(&[mine.part(0, len)]);
        net.post(a, b, request);
        // A receiver of unreliable datagrams remembers fewer message numbers of a source than are used here.
        for id in 1..1500 {
            net.post(a, b, write(id, other.remote(0)).from(&[mine.part(0, 8)]));
        }
        net.run(500 * MS);
        while let Some(record) = net[b].qp.poll_record() {
            assert_eq!(record.stag, other.stag());
        }
        assert_eq!(net[b].qp.counters().rec_overflow, 0);
        assert!(net[a].completed().is_empty());
        held.set(false);
        net.run(LONG);
        assert_eq!(net[a].completed().len(), 1500);
        let record = net[b].qp.poll_record().unwrap();
        assert_eq!((record.stag, record.valid as usize), (theirs.stag(), len));
        assert!(net[b].host.bytes(&theirs)[..len].iter().all(|b| *b == 5));
    }
}

// ---------------------------------------------------------------------- refusal

/// A request that is refused fails alone, even if others are under way at the same time.
#[test]
fn a_refused_message_fails_only_itself() {
    const MANY: u64 = 60;
    const ROOM: usize = 9000;
    each_seed(12, |seed| {
        for ordered in [true, false] {
            let options = Options {
                keep_going: true,
                ..options(ordered)
            };
            let what = format!("seed {seed}, ordered {ordered}");
            let (mut net, a, b) = pair(seed, bad(), options);
            let mut rng = Rng::new(seed);
            let open = net[b].host.register(ROOM, access::ALL);
            let closed = net[b].host.register(ROOM, access::LOCAL);
            let inbox = net[b].host.register(ROOM, access::ALL);
            let mine = net[a].host.register(ROOM, access::ALL);
            let mut bad = Vec::new();
            for id in 0..MANY {
                let len = *rng.pick(&[4, 1500, 6000]);
                let imm = (id as u32).to_be_bytes();
                let (request, refused) = match rng.below(6) {
                    0 => (write_imm(id, closed.remote(0), imm), true),
                    // The memory has no window that a Send could invalidate.
                    1 => (send_invalidate(id, open.stag()), true),
                    2 => (write_imm(id, open.remote(0), imm), false),
                    _ => (send_imm(id, imm), false),
                };
                bad.push(refused);
                net.post(a, b, request.from(&[mine.part(0, len)]));
                net[b].recv(id, &[inbox.all()]);
            }
            let mut delivered = vec![0; MANY as usize];
            net.run(LONG);
            for (id, status) in statuses(&mut net, a) {
                let refused = bad[id as usize];
                assert_eq!(
                    status != Status::Success,
                    refused,
                    "{what}, {id}: {status:?}"
                );
            }
            for c in net[b].received() {
                assert_eq!(c.status, Status::Success, "{what}");
                delivered[u32::from_be_bytes(c.imm.unwrap()) as usize] += 1;
            }
            while let Some(r) = net[b].qp.poll_record() {
                assert!(r.complete, "{what}");
                delivered[u32::from_be_bytes(r.imm.unwrap()) as usize] += 1;
            }
            for (id, n) in delivered.iter().enumerate() {
                assert_eq!(*n, usize::from(!bad[id]), "{what}, {id}: {delivered:?}");
            }
            // The number of delivered messages does not exceed the number of messages that were not
            // refused. Both queue pairs are still usable.
            let left = bad.len() - delivered.iter().sum::<usize>();
            assert!(left >= bad.iter().filter(|b| **b).count(), "{what}");
            let state = (net[a].qp.state(), net[b].qp.state());
            assert_eq!(state, (State::Rts, State::Rts), "{what}");
        }
    });
}

/// The target memory of a message is deregistered before the last segment arrives: the request fails, whatever part of it
/// was acknowledged, and the requests before and after it succeed.
#[test]
fn a_message_whose_memory_is_deregistered_fails() {
    each_seed(8, |seed| {
        for ordered in [true, false] {
            let options = Options {
                keep_going: true,
                ..options(ordered)
            };
            let link = Link {
                loss: 0.1,
                reorder: 0.5,
                rate: 2_000_000,
                delay: MS,
                ..Link::default()
            };
            let what = format!("seed {seed}, ordered {ordered}");
            let (mut net, a, b) = pair(seed, link, options);
            const LEN: usize = 200_000;
            let mine = net[a].host.register(LEN, access::ALL);
            let there = net[b].host.register(LEN, access::ALL);
            let gone = net[b].host.register(LEN, access::ALL);
            net[a].host.fill(&mine, &[9; LEN]);
            net.post(a, b, write(0, there.remote(0)).from(&[mine.all()]));
            net.post(a, b, write(1, gone.remote(0)).from(&[mine.all()]));
            net.post(a, b, write(2, there.remote(0)).from(&[mine.all()]));
            net.run_until(LONG, |net| net[b].host.bytes(&gone)[LEN / 3] == 9);
            assert_eq!(net[b].host.bytes(&gone)[LEN - 1], 0, "{what}");
            net[b].host.deregister(&gone);
            net.run(LONG);
            let ends = [
                (0, Status::Success),
                (1, Status::RemoteAccess),
                (2, Status::Success),
            ];
            assert_eq!(statuses(&mut net, a), ends, "{what}");
            let counters = net[b].qp.counters();
            assert_eq!(counters.rec_full, 2, "{what}");
        }
    });
}

/// A receive into memory that was deregistered completes once, in error, and the request of its sender fails.
#[test]
fn a_broken_receive_completes_once_and_fails_at_its_sender() {
    for ordered in [true, false] {
        for len in [100, 50_000] {
            let what = format!("ordered {ordered}, {len}");
            let link = Link {
                rate: 1_000_000,
                ..Link::default()
            };
            let (mut net, a, b) = pair(14, link, options(ordered));
            let mine = net[a].host.register(len, access::ALL);
            let inbox = net[b].host.register(len + 40, access::ALL);
            net[a].host.fill(&mine, &vec![9; len]);
            net[b].recv(7, &[inbox.all()]);
            net[b].recv(8, &[inbox.all()]);
            net.post(a, b, send(1).from(&[mine.all()]));
            if len > 100 {
                net.run_until(LONG, |net| net[b].host.bytes(&inbox)[len / 2] == 9);
            }
            net[b].host.deregister(&inbox);
            net.run(LONG);
            let got: Vec<_> = net[b]
                .received()
                .iter()
                .map(|c| (c.wr_id, c.status))
                .collect();
            let once = [(7, Status::LocalProtection), (8, Status::Flushed)];
            assert_eq!(got, once, "{what}");
            assert_eq!(net[b].qp.state(), State::Error, "{what}");
            let ends = statuses(&mut net, a);
            assert_eq!(ends, [(1, Status::RemoteOperation)], "{what}");
        }
    }
}

/// The memory of a posted request is deregistered while the request is being sent: the request fails, all later requests
/// are flushed, and no packet stays under way.
#[test]
fn a_request_whose_local_memory_is_deregistered_fails() {
    for ordered in [true, false] {
        let link = Link {
            rate: 1_000_000,
            ..Link::default()
        };
        let (mut net, a, b) = pair(15, link, options(ordered));
        let c = net.join(Kind::Rd, options(ordered));
        const LEN: usize = 4 << 20;
        let mine = net[a].host.register(LEN, access::ALL);
        let theirs = net[b].host.register(LEN, access::ALL);
        net[a].host.fill(&mine, &[9; LEN]);
        net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
        let others = net[c].host.register(LEN, access::ALL);
        net.post(a, c, write(2, others.remote(0)).from(&[mine.all()]));
        net.run_until(LONG, |net| net[b].host.bytes(&theirs)[5000] == 9);
        net[a].host.deregister(&mine);
        net.run(LONG);
        let ends = statuses(&mut net, a);
        assert_eq!(ends.len(), 2, "{ends:?}");
        let fails = |id| ends.contains(&(id, Status::LocalProtection));
        assert!(fails(1) || fails(2), "{ends:?}");
        assert!(
            ends.iter()
                .all(|(_, s)| matches!(s, Status::LocalProtection | Status::Flushed)),
            "{ends:?}"
        );
        assert_eq!(net[a].qp.state(), State::Error);
        // The queue pair can be used again.
        net[a].qp.set_state(State::Reset);
        net[a].qp.attr_mut().qkey = anywarp_sim::ether::QKEY;
        net[a].qp.set_state(State::Rts);
        let mine = net[a].host.register(8, access::ALL);
        net.post(a, b, write(3, theirs.remote(0)).from(&[mine.all()]));
        net.run(LONG);
        assert_eq!(statuses(&mut net, a), [(3, Status::Success)]);
    }
}

/// A Read of 4 MiB over a link with the given rate in bytes per second, and the memory at both ends.
fn long_read(seed: u64, rate: u64, options: Options) -> (Ether, Id, Id, [Mr; 2]) {
    const LEN: usize = 4 << 20;
    let link = Link {
        rate,
        ..Link::default()
    };
    let (mut net, a, b) = pair(seed, link, options);
    let mine = net[a].host.register(LEN, access::ALL);
    let theirs = net[b].host.register(LEN, access::ALL);
    net[b].host.fill(&theirs, &[9; LEN]);
    net.post(a, b, read(1, theirs.remote(0)).from(&[mine.all()]));
    (net, a, b, [mine, theirs])
}

/// When the source memory of a Read is deregistered during the Read, the Read fails at once.
#[test]
fn a_read_whose_source_is_deregistered_fails() {
    for keep_going in [true, false] {
        let options = Options {
            keep_going,
            ..options(true)
        };
        let (mut net, a, b, [mine, theirs]) = long_read(16, 1_000_000, options);
        net.run_until(LONG, |net| net[a].host.bytes(&mine)[5000] == 9);
        net[b].host.deregister(&theirs);
        let took = net.run(LONG);
        assert!(took < LONG, "{took:?}");
        assert_eq!(statuses(&mut net, a), [(1, Status::RemoteAccess)]);
        let state = if keep_going { State::Rts } else { State::Error };
        assert_eq!((net[a].qp.state(), net[b].qp.state()), (state, State::Rts));
        assert!(net[a].qp.poll_error().is_some());
    }
}

/// A peer that has acknowledged a Read Request fails or restarts before it has sent the whole answer. The requester has
/// no unacknowledged packet whose retransmission would reveal the failure, so it must probe the peer.
#[test]
fn a_read_from_a_peer_that_dies_fails() {
    for restarts in [false, true] {
        let (mut net, a, b, [mine, _]) = long_read(18, 1_000_000, options(true));
        net.run_until(LONG, |net| net[a].host.bytes(&mine)[5000] == 9);
        if restarts {
            net.restart(b, options(true));
        } else {
            net[b].dead = true;
        }
        let took = net.run(LONG);
        assert!(took < 20 * 1000 * MS, "{took:?}");
        let status = if restarts {
            Status::RemoteAborted
        } else {
            Status::RetryExceeded
        };
        assert_eq!(statuses(&mut net, a), [(1, status)], "restarts {restarts}");
    }
}

/// A Read whose answer is late does not fail as long as its peer answers probes.
#[test]
fn a_slow_answer_is_waited_for() {
    let (mut net, a, _, _) = long_read(19, 100_000, options(true));
    let took = net.run(LONG);
    assert!(took > 40 * 1000 * MS, "{took:?}");
    assert_eq!(statuses(&mut net, a), [(1, Status::Success)]);
}

/// A receive of an unreliable queue pair into memory that was deregistered completes once, in error.
#[test]
fn a_broken_receive_of_datagrams_completes_once() {
    let link = Link {
        rate: 1_000_000,
        ..Link::default()
    };
    let mut net = Ether::new(17, link);
    let a = net.join(Kind::Ud, options(true));
    let b = net.join(Kind::Ud, options(true));
    const LEN: usize = 50_000;
    let mine = net[a].host.register(LEN, access::ALL);
    let inbox = net[b].host.register(LEN + 40, access::ALL);
    net[a].host.fill(&mine, &[9; LEN]);
    net[b].recv(7, &[inbox.all()]);
    net.post(a, b, send(1).from(&[mine.all()]));
    net.run_until(LONG, |net| net[b].host.bytes(&inbox)[LEN / 2] == 9);
    net[b].host.deregister(&inbox);
    net.run(LONG);
    let got: Vec<_> = net[b].received();
    assert_eq!(got.len(), 1, "{got:?}");
    assert_eq!(
        (got[0].status, got[0].op),
        (Status::LocalProtection, WcOp::Recv)
    );
}
