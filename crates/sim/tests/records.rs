//! Write-Record and Read over datagrams that may be lost.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::datagram::messages::Record;
use anywarp_core::datagram::options::{Options, RecordMode, Segment};
use anywarp_core::datagram::{Dropped, Kind};
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Status, WcOp};
use anywarp_core::wire::dgram;
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{Mr, Request, Rng, access, each_seed, read, send, write, write_imm};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(60);

fn options(record: RecordMode) -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        record,
        ..Options::default()
    }
}

fn pair(seed: u64, link: Link, options: Options) -> (Ether, Id, Id) {
    let mut net = Ether::new(seed, link);
    let a = net.join(Kind::Ud, options);
    let b = net.join(Kind::Ud, options);
    (net, a, b)
}

fn records(net: &mut Ether, of: Id) -> Vec<Record> {
    std::iter::from_fn(|| net[of].qp.poll_record()).collect()
}

/// Runs the network for up to `most`, then advances the clocks of the queue pairs, so that messages whose deadline
/// has passed are given up.
fn wait(net: &mut Ether, most: Duration) {
    net.run(most);
    let until = net.now() + most;
    for id in [0, 1].map(|n| nth(net, n)) {
        net[id].qp.set_now(until);
    }
}

fn nth(net: &Ether, n: usize) -> Id {
    net.ids().nth(n).unwrap()
}

/// The largest payload of a Write-Record datagram on a path with an MTU of 1500.
fn segment_len(net: &mut Ether, a: Id, b: Id) -> usize {
    let seen = Rc::new(RefCell::new(0));
    let store = Rc::clone(&seen);
    net.filter = Some(Box::new(move |d| {
        if let Ok(d) = dgram::parse(&d.bytes) {
            let longest = d.payload.len().max(*store.borrow());
            *store.borrow_mut() = longest;
        }
        true
    }));
    let mine = net[a].host.register(10_000, access::ALL);
    let theirs = net[b].host.register(10_000, access::ALL);
    net.post(a, b, write(0, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    net.filter = None;
    net[a].completed();
    records(net, b);
    seen.take()
}

/// Drops one Write-Record datagram: among those that carry data and are sent after this call, the one with the index `nth` (from 0).
fn lose_nth(net: &mut Ether, nth: usize) {
    let mut count = 0;
    net.filter = Some(Box::new(move |d| {
        let is_data = dgram::parse(&d.bytes)
            .is_ok_and(|d| d.shim.sub_op != 0 && !d.shim.commit && !d.shim.parity);
        count += usize::from(is_data);
        !(is_data && count == nth + 1)
    }));
}

/// Checks that the bytes in the validity map were written, and that the others were not. Releases the map.
fn check_map(net: &mut Ether, of: Id, record: &Record, mr: &Mr, text: &[u8]) {
    let whole = [(0, record.length)];
    let bytes = net[of].host.bytes(mr);
    let records = net[of].qp.records();
    let map = if record.complete {
        &whole[..]
    } else {
        records.map(record.map).unwrap()
    };
    let valid: u32 = map.iter().map(|(from, to)| to - from).sum();
    assert_eq!(valid, record.valid);
    let mut there = vec![false; text.len()];
    for (from, to) in map {
        there[*from as usize..*to as usize].fill(true);
    }
    for (at, there) in there.iter().enumerate() {
        let expected = if *there { text[at] } else { 0 };
        assert_eq!(bytes[at], expected, "byte {at} of {record:?}");
    }
    if record.map != 0 {
        let map = record.map;
        assert!(net[of].qp.release_map(map));
        assert!(!net[of].qp.release_map(map));
    }
}

/// Random bytes without zeros: a byte that was not written is zero, so it differs from them.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut text = Rng::new(seed).bytes(len);
    text.iter_mut().for_each(|b| *b |= 1);
    text
}

#[test]
fn a_write_is_recorded_and_takes_no_receive() {
    for record in [RecordMode::Thesis, RecordMode::Robust] {
        for len in [0, 1, 100, 1408, 5000, 1 << 20] {
            let (mut net, a, b) = pair(1, Link::default(), options(record));
            let text = text(len as u64, len);
            let mine = net[a].host.register(len.max(1), access::ALL);
            let theirs = net[b].host.register(len.max(1), access::ALL);
            let inbox = net[b].host.register(100, access::ALL);
            net[b].recv(1, &[inbox.all()]);
            net[a].host.fill(&mine, &text);
            let imm = [9, 8, 7, 6];
            let request = write_imm(5, theirs.remote(0), imm).from(&[mine.part(0, len)]);
            net.post(a, b, request);
            net.run(LONG);
            assert_eq!(net[a].completed()[0].status, Status::Success);
            let all = records(&mut net, b);
            assert_eq!(all.len(), 1, "{len}");
            let r = &all[0];
            assert!(r.complete && r.final_seen && r.map == 0);
            assert_eq!((r.from, r.imm), (net[a].addr, Some(imm)));
            assert_eq!((r.length, r.valid), (len as u32, len as u32));
            if len > 0 {
                assert_eq!((r.stag, r.base), (theirs.stag(), theirs.remote(0).to));
                check_map(&mut net, b, r, &theirs, &text);
            }
            assert!(net[b].received().is_empty());
        }
    }
}

/// For each record mode, and for each of the ten datagrams of a message: if the datagram is lost, only its bytes are missing.
/// Only in thesis mode, a lost final datagram also loses the record.
#[test]
fn the_loss_of_a_datagram_loses_only_its_bytes() {
    for mode in [RecordMode::Thesis, RecordMode::Robust, RecordMode::Chunk] {
        for lost in 0..10 {
            let (mut net, a, b) = pair(2, Link::default(), options(mode));
            let segment = segment_len(&mut net, a, b);
            let len = 9 * segment + 100;
            let text = text(3, len);
            let mine = net[a].host.register(len, access::ALL);
            let theirs = net[b].host.register(len, access::ALL);
            net[a].host.fill(&mine, &text);
            lose_nth(&mut net, lost);
            net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
            net.run(LONG);
            net.filter = None;
            wait(&mut net, LONG);
            let all = records(&mut net, b);
            let missing = if lost == 9 { 100 } else { segment };
            match mode {
                RecordMode::Chunk => {
                    assert_eq!(all.len(), 9);
                    assert!(all.iter().all(|r| r.chunk && r.map == 0));
                    let sum: u32 = all.iter().map(|r| r.valid).sum();
                    assert_eq!(sum as usize, len - missing);
                    assert!(!all.iter().any(|r| r.offset as usize == lost * segment));
                }
                RecordMode::Thesis if lost == 9 => {
                    assert!(all.is_empty(), "{all:?}");
                    assert_eq!(net[b].qp.counters().evicted, 1);
                }
                _ => {
                    assert_eq!(all.len(), 1, "{mode:?} {lost}");
                    let r = &all[0];
                    assert_eq!((r.complete, r.final_seen), (false, lost != 9));
                    assert_eq!(r.valid as usize, len - missing);
                    check_map(&mut net, b, r, &theirs, &text);
                }
            }
        }
    }
}

/// Messages of 1 MiB on paths that lose 1 % or 5 % of the datagrams; no datagram is longer than the MTU of the path.
#[test]
fn records_are_exact_on_a_lossy_path() {
    each_seed(2, |seed| {
        for (loss, mode) in [
            (0.01, RecordMode::Robust),
            (0.05, RecordMode::Robust),
            (0.01, RecordMode::Thesis),
        ] {
            let link = Link {
                loss,
                reorder: 0.02,
                duplicate: 0.01,
                corrupt: 0.001,
                delay: MS,
                ..Link::default()
            };
            let (mut net, a, b) = pair(seed, link, options(mode));
            const LEN: usize = 1 << 20;
            let text = text(seed, LEN);
            let mine = net[a].host.register(LEN, access::ALL);
            net[a].host.fill(&mine, &text);
            let (mut sent, mut valid, mut seen) = (0_u64, 0_u64, 0);
            for round in 0..20 {
                let theirs = net[b].host.register(LEN, access::ALL);
                net.post(a, b, write(round, theirs.remote(0)).from(&[mine.all()]));
                sent += LEN as u64;
                wait(&mut net, Duration::from_secs(1));
                for r in records(&mut net, b) {
                    assert_eq!(r.stag, theirs.stag());
                    check_map(&mut net, b, &r, &theirs, &text);
                    valid += u64::from(r.valid);
                    seen += 1;
                }
            }
            let share = valid as f64 / sent as f64;
            if mode == RecordMode::Robust {
                assert_eq!(seen, 20);
                let least = 1.0 - loss * 1.5;
                assert!(share >= least, "{share} at {loss}");
            } else {
                assert!(seen >= 15, "{seen}");
            }
        }
    });
}

/// A duplicate of a datagram that arrives after the end of its message changes nothing.
#[test]
fn late_duplicates_never_change_memory() {
    for mode in [RecordMode::Thesis, RecordMode::Robust, RecordMode::Chunk] {
        let (mut net, a, b) = pair(4, Link::default(), options(mode));
        let kept = Rc::new(RefCell::new(Vec::new()));
        let store = Rc::clone(&kept);
        net.filter = Some(Box::new(move |d| {
            store.borrow_mut().push(d.bytes.to_vec());
            true
        }));
        let mine = net[a].host.register(5000, access::ALL);
        let theirs = net[b].host.register(5000, access::ALL);
        net[a].host.fill(&mine, &[7; 5000]);
        net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(LONG);
        let before = records(&mut net, b).len();
        assert!(before >= 1);
        // The program continues to use its memory.
        net[b].host.fill(&theirs, &[1; 5000]);
        let (from, to) = (net[a].addr, net[b].addr);
        for _ in 0..3 {
            for bytes in kept.borrow().iter() {
                net.deliver(from, to, bytes);
            }
            wait(&mut net, LONG);
        }
        assert!(net[b].host.bytes(&theirs).iter().all(|b| *b == 1));
        assert!(records(&mut net, b).is_empty());
        assert!(net[b].drops[&Dropped::Late] >= 12);
    }
}

/// A queue pair that is created again has a different epoch: its messages are recorded, and datagrams of the earlier
/// epoch that arrive afterwards are dropped as late.
#[test]
fn a_writer_that_is_created_again_is_another_source() {
    let (mut net, a, b) = pair(5, Link::default(), options(RecordMode::Robust));
    let kept = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&kept);
    net.filter = Some(Box::new(move |d| {
        store.borrow_mut().push(d.bytes.to_vec());
        // Only the first datagram arrives.
        store.borrow().len() == 1
    }));
    let theirs = net[b].host.register(5000, access::ALL);
    let mine = net[a].host.register(5000, access::ALL);
    net[a].host.fill(&mine, &[7; 5000]);
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    net.filter = None;
    net.restart(a, options(RecordMode::Robust));
    let mine = net[a].host.register(5000, access::ALL);
    net[a].host.fill(&mine, &[9; 5000]);
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    let all = records(&mut net, b);
    assert_eq!(all.len(), 2);
    assert!(!all[0].complete && all[1].complete);
    let (from, to) = (net[a].addr, net[b].addr);
    for bytes in kept.borrow().iter() {
        net.deliver(from, to, bytes);
    }
    assert!(net[b].host.bytes(&theirs).iter().all(|b| *b == 9));
}

/// In thesis mode, a commit, which repeats the end of a message, causes the record if the final datagram is lost.
#[test]
fn a_repeated_end_closes_a_message() {
    let options = Options {
        repeats: 2,
        ..options(RecordMode::Thesis)
    };
    let (mut net, a, b) = pair(6, Link::default(), options);
    let segment = segment_len(&mut net, a, b);
    let mine = net[a].host.register(3 * segment, access::ALL);
    let theirs = net[b].host.register(3 * segment, access::ALL);
    lose_nth(&mut net, 2);
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    let all = records(&mut net, b);
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].valid as usize, 2 * segment);
}

#[test]
fn the_end_is_repeated_by_the_number_of_the_option() {
    for (repeats, messages) in [(0, 3), (1, 3), (3, 3), (1, 200), (3, 200)] {
        let options = Options {
            repeats,
            ..options(RecordMode::Robust)
        };
        let (mut net, a, b) = pair(11, Link::default(), options);
        let mine = net[a].host.register(5000, access::ALL);
        let theirs = net[b].host.register(5000, access::ALL);
        let many = Rc::new(Cell::new(0));
        let count = Rc::clone(&many);
        net.filter = Some(Box::new(move |datagram| {
            // Counts the commits.
            let commit = datagram.bytes[0] == 0xdc && datagram.bytes[1] & 2 != 0;
            count.set(count.get() + u32::from(commit));
            true
        }));
        for id in 0..messages {
            net.post(a, b, write(id, theirs.remote(0)).from(&[mine.all()]));
        }
        net.run(LONG);
        assert_eq!(many.get(), messages as u32 * u32::from(repeats));
    }
}

/// With parity, one lost datagram of a group is restored.
#[test]
fn parity_restores_one_datagram_of_a_group() {
    let options = Options {
        parity: 4,
        ..options(RecordMode::Robust)
    };
    for lost in 0..11 {
        let (mut net, a, b) = pair(7, Link::default(), options);
        let segment = segment_len(&mut net, a, b);
        let len = 10 * segment + 3;
        let text = text(8, len);
        let mine = net[a].host.register(len, access::ALL);
        let theirs = net[b].host.register(len, access::ALL);
        net[a].host.fill(&mine, &text);
        lose_nth(&mut net, lost);
        net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(LONG);
        let all = records(&mut net, b);
        assert_eq!(all.len(), 1, "{lost}");
        assert!(all[0].complete, "{lost} {:?}", all[0]);
        check_map(&mut net, b, &all[0], &theirs, &text);
        assert_eq!(net[b].qp.counters().rx_repaired, 1);
    }
}

/// With the option `records_complete`, each record also has a completion.
#[test]
fn records_can_make_completions() {
    let options = Options {
        records_complete: true,
        ..options(RecordMode::Robust)
    };
    let (mut net, a, b) = pair(9, Link::default(), options);
    let mine = net[a].host.register(5000, access::ALL);
    let theirs = net[b].host.register(5000, access::ALL);
    lose_nth(&mut net, 1);
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    // The program does not poll for records, so a timer ends the message.
    net.run(LONG);
    let got = net[b].received();
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].op, WcOp::Record);
    assert!(got[0].byte_len < 5000);
}

#[test]
fn unread_records_are_limited_and_memory_is_still_written() {
    let options = Options {
        max_records: 10,
        ..options(RecordMode::Robust)
    };
    let (mut net, a, b) = pair(10, Link::default(), options);
    let mine = net[a].host.register(64, access::ALL);
    let theirs = net[b].host.register(6400, access::ALL);
    net[a].host.fill(&mine, &[3; 64]);
    for n in 0..100 {
        let request = write(n, theirs.remote(64 * n as usize)).from(&[mine.all()]);
        net.post(a, b, request);
    }
    net.run(LONG);
    assert!(net[b].host.bytes(&theirs).iter().all(|b| *b == 3));
    assert_eq!(records(&mut net, b).len(), 10);
    assert_eq!(net[b].qp.counters().rec_overflow, 90);
}

/// A region can be restricted to one source. Datagrams of other sources are dropped, and with the option
/// `report_errors` these sources get an error report.
#[test]
fn a_region_can_be_for_one_source() {
    let options = Options {
        report_errors: true,
        ..options(RecordMode::Robust)
    };
    let (mut net, a, b) = pair(11, Link::default(), options);
    let c = net.join(Kind::Ud, options);
    let theirs = net[b].host.register(64, access::ALL);
    let (ip, qpn) = (net[a].addr.ip(), net[a].destination().qpn);
    let region = net[b].host.rnic.regions.find(theirs.stag().0 >> 8).unwrap();
    region.restrict(Some((ip, Some(qpn))));
    for (from, fill) in [(a, 1), (c, 2)] {
        let mine = net[from].host.register(64, access::ALL);
        net[from].host.fill(&mine, &[fill; 64]);
        net.post(from, b, write(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(LONG);
    }
    assert_eq!(records(&mut net, b).len(), 1);
    assert!(net[b].host.bytes(&theirs).iter().all(|b| *b == 1));
    assert_eq!(net[b].drops[&Dropped::Access], 1);
    let error = net[c].qp.poll_error().unwrap();
    assert_eq!(
        (error.from, error.layer, error.etype, error.code),
        (net[b].addr, 0, 1, 2)
    );
    assert_eq!(net[c].qp.state(), State::Rts);
    assert!(net[a].qp.poll_error().is_none());
}

// ---------------------------------------------------------------------- Send

#[test]
fn a_long_send_arrives_completely_or_its_receive_is_put_back() {
    let options = Options {
        max_send: 1 << 20,
        ..options(RecordMode::Robust)
    };
    for lost in [false, true] {
        let (mut net, a, b) = pair(12, Link::default(), options);
        let len = 100_000;
        let text = text(1, len);
        let mine = net[a].host.register(len, access::ALL);
        let inbox = net[b].host.register(len + 40, access::ALL);
        net[a].host.fill(&mine, &text);
        net[b].recv(1, &[inbox.all()]);
        if lost {
            let mut n = 0;
            net.filter = Some(Box::new(move |_| {
                n += 1;
                n != 20
            }));
        }
        net.post(a, b, send(1).from(&[mine.all()]));
        net.run(LONG);
        net.filter = None;
        if lost {
            assert!(net[b].received().is_empty());
            assert_eq!(net[b].qp.counters().evicted, 1);
            net.post(a, b, send(2).from(&[mine.all()]));
            net.run(LONG);
        }
        let got = net[b].received();
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].wr_id, got[0].byte_len as usize), (1, len + 40));
        assert_eq!(net[b].host.bytes(&inbox)[40..], text);
    }
}

// ---------------------------------------------------------------------- Read

#[test]
fn a_read_returns_the_memory_contents() {
    for len in [0, 1, 40, 1000, 2000, 300_000] {
        let (mut net, a, b) = pair(13, Link::default(), options(RecordMode::Robust));
        let text = text(1, len);
        let theirs = net[b].host.register(len.max(1), access::ALL);
        let mine = net[a].host.register(len.max(1), access::ALL);
        net[b].host.fill(&theirs, &text);
        for id in 0..3 {
            let request = read(id, theirs.remote(0)).from(&[mine.part(0, len)]);
            net.post(a, b, request);
        }
        net.run(LONG);
        let done = net[a].completed();
        assert_eq!(done.len(), 3, "{len}");
        assert!(done.iter().all(|c| c.status == Status::Success), "{done:?}");
        assert_eq!(net[a].host.bytes(&mine)[..len], text);
        assert!(records(&mut net, b).is_empty());
    }
}

/// A Read without a response completes once, with an error, after `read_timeout`. A response that arrives later is
/// not placed.
#[test]
fn a_late_answer_is_not_placed() {
    let (mut net, a, b) = pair(14, Link::default(), options(RecordMode::Robust));
    let theirs = net[b].host.register(5000, access::ALL);
    let mine = net[a].host.register(5000, access::ALL);
    net[b].host.fill(&theirs, &[7; 5000]);
    let held = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&held);
    let answers_from = net[b].addr;
    let asker = net[a].addr;
    net.filter = Some(Box::new(move |d| {
        let late = d.to == asker && d.bytes.len() > 300;
        if late {
            store.borrow_mut().push(d.bytes.to_vec());
        }
        !late
    }));
    net.post(a, b, read(1, theirs.remote(0)).from(&[mine.all()]));
    let took = net.run(LONG);
    assert!(took >= Options::default().read_timeout);
    let done = net[a].completed();
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].status, Status::RetryExceeded);
    assert_eq!(net[a].qp.state(), State::Rts);
    assert_eq!(net[a].qp.counters().reads_timeout, 1);
    assert!(!held.borrow().is_empty());
    for bytes in held.borrow().iter() {
        net.deliver(answers_from, asker, bytes);
    }
    assert!(net[a].host.bytes(&mine).iter().all(|b| *b == 0));
    assert!(net[a].completed().is_empty());
}

/// The responder sends at most an eighth more bytes to a forged source address than the requests with this source address
/// contain.
#[test]
fn a_responder_does_not_amplify() {
    let (mut net, a, b) = pair(15, Link::default(), options(RecordMode::Robust));
    let victim = SocketAddr::new(IpAddr::from([10, 9, 9, 9]), 4000);
    let theirs = net[b].host.register(1 << 20, access::ALL);
    // The requests of a real reader, with and without a cookie.
    let requests = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&requests);
    let responder = net[b].addr;
    net.filter = Some(Box::new(move |d| {
        let asks = d.to == responder
            && dgram::parse(&d.bytes).is_ok_and(|d| d.header.opcode().queue() == Some(1));
        if asks {
            store.borrow_mut().push(d.bytes.to_vec());
        }
        true
    }));
    for len in [1, 100, 1064, 1065, 100_000, 1 << 20] {
        let mine = net[a].host.register(len, access::ALL);
        net.post(a, b, read(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(LONG);
        assert_eq!(net[a].completed()[0].status, Status::Success, "{len}");
    }
    assert!(requests.borrow().len() > 6, "no request contained a cookie");
    let (sent, received) = (Rc::new(RefCell::new(0)), Rc::new(RefCell::new(0)));
    let store = Rc::clone(&received);
    net.filter = Some(Box::new(move |d| {
        if d.to == victim {
            *store.borrow_mut() += d.bytes.len();
        }
        true
    }));
    for _ in 0..50 {
        for bytes in requests.borrow().iter() {
            *sent.borrow_mut() += bytes.len();
            net.deliver(victim, responder, bytes);
        }
        net.run(LONG);
    }
    let (sent, received) = (*sent.borrow(), *received.borrow());
    // An eighth more is allowed, because the responder also reports received datagrams: the first ones, and later some of them.
    assert!(received <= sent + sent / 8, "{received} for {sent}");
}

/// The state of a queue pair stays limited if it receives first datagrams of messages from more sources than it stores.
#[test]
fn a_flood_from_many_sources_is_bounded() {
    let (mut net, a, b) = pair(16, Link::default(), options(RecordMode::Robust));
    let theirs = net[b].host.register(1 << 16, access::ALL);
    let mine = net[a].host.register(1 << 16, access::ALL);
    let first = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&first);
    net.filter = Some(Box::new(move |d| {
        store.borrow_mut().push(d.bytes.to_vec());
        false
    }));
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    net.filter = None;
    let bytes = first.borrow()[0].clone();
    let to = net[b].addr;
    let many = bounds::RECORD_SOURCES + 5000;
    for n in 0..many as u32 {
        let [_, x, y, z] = n.to_be_bytes();
        let from = SocketAddr::new(IpAddr::from([11, x, y, z]), 4000);
        net.deliver(from, to, &bytes);
    }
    // A message that is given up for a new one leaves a record of the bytes that have arrived.
    let counters = net[b].qp.counters();
    let recorded = counters.rec_partial + counters.rec_overflow;
    assert!(
        recorded as usize >= many - bounds::OPEN_MESSAGES,
        "{counters:?}"
    );
    wait(&mut net, LONG);
    let all = records(&mut net, b).len();
    assert!(all <= Options::default().max_records as usize);
    // A Write of an honest peer is still recorded.
    net.post(a, b, write(2, theirs.remote(0)).from(&[mine.all()]));
    net.run(LONG);
    assert_eq!(net[b].qp.counters().rec_full, 1);
}
