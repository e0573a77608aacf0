//! Datagram queue pairs against hostile peers: forged addresses, answers that are never acknowledged, messages
//! that are never completed.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::datagram::{Arrival, Dropped, Kind};
use anywarp_core::verbs::wc::Status;
use anywarp_core::verbs::wr::Destination;
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::dgram::{self, Shim};
use anywarp_core::wire::rd::{self, Packet};
use anywarp_core::wire::rdmap::{Opcode, ReadRequest};
use anywarp_core::wire::{Msn, QN_READ, QN_SEND, Stag, To};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{Mr, Request, access, read, send, write};

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);
const QKEY: u32 = 0x1111_1111;

fn options() -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_send: 1 << 20,
        keep_going: true,
        report_errors: true,
        ..Options::default()
    }
}

fn stranger(n: u32) -> SocketAddr {
    let [_, x, y, z] = n.to_be_bytes();
    SocketAddr::new(IpAddr::from([11, x, y, z]), 4000)
}

fn shim(id: u32, length: u32, offset: u32) -> Shim {
    Shim {
        epoch: 0x1234,
        qkey: QKEY,
        id,
        length,
        offset,
        sub_op: dgram::SUB_PLAIN,
        attributes: 0,
        dst_index: 5,
        src_index: 9,
        immediate: None,
        commit: false,
        parity: false,
        group: 0,
        segment: 0,
    }
}

fn untagged(opcode: Opcode, qn: u32, id: u32, offset: u32, last: bool) -> Header {
    Header::Untagged(Untagged {
        last,
        opcode,
        inv_stag: Stag(0),
        qn,
        msn: Msn(id),
        mo: offset,
    })
}

fn tagged(opcode: Opcode, stag: Stag, to: u64, last: bool) -> Header {
    Header::Tagged(Tagged {
        last,
        opcode,
        stag,
        to: To(to),
    })
}

/// A datagram without the CRC at its end.
fn body(shim: &Shim, header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = dgram::emit_head(shim, header);
    bytes.extend_from_slice(payload);
    bytes
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    dgram::seal(&mut bytes);
    bytes
}

/// The first or the second datagram of a Send of two datagrams.
fn half(id: u32, second: bool) -> Vec<u8> {
    let offset = if second { 8 } else { 0 };
    let header = untagged(Opcode::Send, QN_SEND, id, offset, second);
    body(&shim(id, 16, offset), &header, &[id as u8; 8])
}

fn read_request(id: u32, size: u32, from: &Mr, at: u64) -> Vec<u8> {
    let request = ReadRequest {
        sink_stag: Stag(1),
        sink_to: To(0),
        size,
        source_stag: from.stag(),
        source_to: To(from.remote(0).to.0 + at),
    };
    let mut payload = request.emit().to_vec();
    payload.extend_from_slice(&[0; 8]);
    let length = payload.len() as u32;
    let header = untagged(Opcode::ReadRequest, QN_READ, id, 0, true);
    body(&shim(id, length, 0), &header, &payload)
}

/// The datagrams that were sent to addresses at which there is no queue pair.
type Seen = Rc<RefCell<HashMap<SocketAddr, Vec<Vec<u8>>>>>;

fn watch(net: &mut Ether) -> Seen {
    let seen = Seen::default();
    let store = Rc::clone(&seen);
    let known: Vec<SocketAddr> = net.ids().map(|id| net[id].addr).collect();
    net.filter = Some(Box::new(move |d| {
        if !known.contains(&d.to) {
            let mut store = store.borrow_mut();
            store.entry(d.to).or_default().push(d.bytes.to_vec());
        }
        true
    }));
    seen
}

/// A peer of reliable datagrams whose packets are made by the test.
struct Stranger {
    addr: SocketAddr,
    to: SocketAddr,
    echo: u32,
    seq: u32,
}

impl Stranger {
    /// Returns a peer that has received a token. It echoes the token in its further packets, which are not accepted otherwise.
    fn meets(net: &mut Ether, seen: &Seen, n: u32, to: Id) -> Self {
        let mut s = Self {
            addr: stranger(n),
            to: net[to].addr,
            echo: 0,
            seq: 1000,
        };
        s.sends(net, None);
        net.run(Duration::ZERO);
        let answers = seen.borrow_mut().remove(&s.addr).unwrap();
        let (answer, data) = rd::parse(&answers[0]).unwrap();
        assert!(answer.challenge && answer.echo == 7 && data.is_none());
        s.echo = answer.token;
        s
    }

    fn packet(&self) -> Packet {
        Packet {
            token: 7,
            echo: self.echo,
            seq: self.seq,
            base: 1000,
            dst_index: 5,
            src_index: 9,
            window: 1 << 20,
            time: 1,
            ..Packet::default()
        }
    }

    fn sends(&mut self, net: &mut Ether, data: Option<&[u8]>) {
        let mut bytes = Vec::new();
        self.packet().put(data.is_some(), &mut bytes);
        bytes.extend_from_slice(data.unwrap_or(&[]));
        self.seq += u32::from(data.is_some());
        net.deliver(self.addr, self.to, &sealed(bytes));
    }
}

/// A forged source address is not sent more bytes than arrived from it.
#[test]
fn a_spoofed_address_gets_no_more_than_it_sent() {
    for kind in [Kind::Ud, Kind::Rd] {
        let mut net = Ether::new(1, Link::default());
        let b = net.join(kind, options());
        let open = net[b].host.register(1 << 20, access::ALL);
        let closed = net[b].host.register(100, access::LOCAL);
        let inbox = net[b].host.register(100, access::LOCAL);
        let to = net[b].addr;
        let seen = watch(&mut net);
        let record = |header: Header, commit| {
            let shim = Shim {
                sub_op: dgram::SUB_RECORD,
                attributes: dgram::ATTR_RECORD,
                commit,
                ..shim(1, 8, if commit { 8 } else { 0 })
            };
            (shim, header)
        };
        let at = |mr: &Mr, plus: u64| mr.remote(0).to.0 + plus;
        let wr = Opcode::WriteRecord;
        let (end, header) = record(tagged(wr, closed.stag(), at(&closed, 8), true), true);
        let commit = body(&end, &header, &[]);
        let (begin, header) = record(tagged(wr, closed.stag(), at(&closed, 0), true), false);
        let refused = body(&begin, &header, &[1; 8]);
        let empty = untagged(Opcode::Send, QN_SEND, 1, 0, true);
        let mut kinds = vec![
            body(&shim(1, 0, 0), &empty, &[]),
            commit,
            refused,
            read_request(1, 1 << 20, &open, 0),
            read_request(1, 20, &open, 0),
            read_request(1, 1000, &closed, 0),
            half(1, true),
            body(
                &shim(1, 4, 0),
                &untagged(Opcode::Terminate, 2, 1, 0, true),
                &[0; 4],
            ),
        ];
        // Also packets with guessed tokens: for each guess one with data, and one challenge.
        let mut guess = Stranger {
            addr: stranger(0),
            to,
            echo: 0,
            seq: 1,
        };
        for echo in [0, 1, 0xffff_ffff] {
            guess.echo = echo;
            let mut packet = Vec::new();
            guess.packet().put(true, &mut packet);
            packet.extend_from_slice(&kinds[0]);
            kinds.push(packet);
            let mut packet = Vec::new();
            Packet {
                challenge: true,
                ..guess.packet()
            }
            .put(false, &mut packet);
            kinds.push(packet);
        }
        let mut sent: HashMap<SocketAddr, usize> = HashMap::new();
        for (n, bytes) in kinds.iter().enumerate() {
            let bytes = sealed(bytes.clone());
            net[b].recv(n as u64, &[inbox.all()]);
            for source in 0..1500_u32 {
                // Half of the datagrams have one source address. Each of the others has an address of its own.
                let n = (n as u32 + 1) << 16;
                let from = stranger(if source % 2 == 0 { n | source } else { n | 1 });
                *sent.entry(from).or_default() += bytes.len();
                net.deliver(from, to, &bytes);
                if source % 100 == 0 {
                    net.run(MS);
                }
            }
            net.run(LONG);
        }
        let seen = seen.borrow();
        assert!(seen.len() > 100, "{kind:?}: {} were answered", seen.len());
        for (addr, all) in seen.iter() {
            let got: usize = all.iter().map(Vec::len).sum();
            let came = sent[addr];
            assert!(got <= came, "{kind:?}: {addr} got {got} for {came}");
        }
        assert_eq!(net[b].qp.peers(), 0);
        assert!(net[b].host.bytes(&closed).iter().all(|b| *b == 0));
    }
}

/// A peer that sends Reads and never acknowledges the answers: its queued answers are limited, and other peers are
/// served.
#[test]
fn unacknowledged_answers_are_bounded() {
    let options = Options {
        peer_timeout: LONG,
        ..options()
    };
    let mut net = Ether::new(2, Link::default());
    let b = net.join(Kind::Rd, options);
    let a = net.join(Kind::Rd, options);
    let open = net[b].host.register(1 << 20, access::ALL);
    let theirs = net[a].host.register(1 << 16, access::ALL);
    let seen = watch(&mut net);
    let mut strangers: Vec<Stranger> = (1..100)
        .map(|n| Stranger::meets(&mut net, &seen, n, b))
        .collect();
    for id in 0..500 {
        for s in &mut strangers {
            s.sends(&mut net, Some(&read_request(id, 1 << 20, &open, 0)));
        }
    }
    let busy = net[b].drops.get(&Dropped::Busy).copied().unwrap_or(0);
    assert!(busy > 0, "{:?}", net[b].drops);
    // These two requests complete within the time limit although the other peers acknowledge nothing.
    net.post(a, b, read(1, open.remote(0)).from(&[theirs.all()]));
    net.post(b, a, write(2, theirs.remote(0)).from(&[open.part(0, 1000)]));
    net.run(5 * 1000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[b].completed()[0].status, Status::Success);
    let answered: usize = seen.borrow().values().flatten().map(Vec::len).sum();
    // Each peer is sent one window, and some probes.
    assert!(answered < strangers.len() * (4 << 20), "{answered}");
}

/// When strangers use all entries for incomplete messages, a message of a good peer that is acknowledged in part is
/// kept.
#[test]
fn a_reliable_message_is_never_abandoned_for_another() {
    let mut net = Ether::new(3, Link::default());
    let a = net.join(Kind::Rd, options());
    let b = net.join(Kind::Rd, options());
    let seen = watch(&mut net);
    let mr = net[a].host.register(10_000, access::ALL);
    let text: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
    net[a].host.fill(&mr, &text);
    let inbox = net[b].host.register(20_000, access::ALL);
    net[b].recv(7, &[inbox.all()]);
    // The first datagram of the message arrives. Its other datagrams are dropped until `cut` is false.
    let cut = Rc::new(RefCell::new(true));
    let (at, left) = (net[b].addr, Rc::clone(&cut));
    let (mut inner, mut data) = (net.filter.take().unwrap(), 0);
    net.filter = Some(Box::new(move |d| {
        if d.to == at && d.bytes.len() > 1000 {
            data += 1;
            if data > 1 && *left.borrow() {
                return false;
            }
        }
        inner(d)
    }));
    net.post(a, b, send(1).from(&[mr.all()]));
    net.run(10 * MS);
    // Strangers begin more messages than there are entries.
    let small = net[b].host.register(56, access::ALL);
    for n in 0..8000 {
        net[b].recv(1000 + n, &[small.all()]);
    }
    let many = bounds::OPEN_MESSAGES as u32 / 60 + 3;
    let mut strangers: Vec<Stranger> = (1..=many)
        .map(|n| Stranger::meets(&mut net, &seen, n, b))
        .collect();
    for id in 0..70 {
        for s in &mut strangers {
            s.sends(&mut net, Some(&half(id, false)));
        }
    }
    assert!(net[b].drops.contains_key(&Dropped::Busy));
    *cut.borrow_mut() = false;
    net.run(2000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    let got = net[b].received();
    assert_eq!((got[0].wr_id, got.len()), (7, 1));
    assert_eq!(net[b].host.bytes(&inbox)[40..10_040], text);
    // A Write of the good peer is completed while the strangers use all other entries.
    net.post(a, b, write(2, inbox.remote(0)).from(&[mr.all()]));
    net.run(2000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[b].qp.counters().evicted, 0);
}

/// Without order, a packet that waits for a receive is acknowledged, and can still be refused. Its message then fails when
/// the packets before it have arrived.
#[test]
fn a_waiting_unordered_packet_can_be_refused() {
    let options = Options {
        ordered: false,
        ..options()
    };
    let mut net = Ether::new(4, Link::default());
    let a = net.join(Kind::Rd, options);
    let b = net.join(Kind::Rd, options);
    let mr = net[a].host.register(500, access::ALL);
    let open = net[b].host.register(500, access::ALL);
    let at = net[b].addr;
    let cut = Rc::new(RefCell::new(true));
    let held = Rc::clone(&cut);
    net.filter = Some(Box::new(move |d| {
        let is_write = rd::parse(&d.bytes)
            .ok()
            .and_then(|(_, data)| dgram::parse_covered(data?).ok())
            .is_some_and(|d| d.header.opcode() != Opcode::Send);
        d.to != at || !is_write || !*held.borrow()
    }));
    net.post(a, b, write(1, open.remote(0)).from(&[mr.part(0, 100)]));
    net.post(a, b, send(2).from(&[mr.part(0, 300)]));
    net.post(a, b, send(3).from(&[mr.part(0, 10)]));
    net.run(50 * MS);
    // The Send waited for a receive, and the receive that is posted is too short.
    let inbox = net[b].host.register(100, access::ALL);
    net[b].recv(7, &[inbox.all()]);
    net.run(50 * MS);
    *cut.borrow_mut() = false;
    net.run(LONG);
    let done: Vec<_> = net[a]
        .completed()
        .iter()
        .map(|c| (c.wr_id, c.status))
        .collect();
    let bad = Status::RemoteInvalidRequest;
    assert_eq!(done, [(1, Status::Success), (2, bad), (3, Status::Success)]);
    let got = net[b].received();
    assert_eq!((got.len(), got[0].byte_len), (1, 50));
}

/// Without order, a long message may miss every other datagram, and is complete when they have arrived.
#[test]
fn a_long_message_without_order_may_have_many_gaps() {
    for recorded in [false, true] {
        let options = Options {
            ordered: false,
            plain_writes: !recorded,
            ..options()
        };
        let mut net = Ether::new(
            5,
            Link {
                delay: 5 * MS,
                ..Link::default()
            },
        );
        let a = net.join(Kind::Rd, options);
        let b = net.join(Kind::Rd, options);
        let len = 400_000;
        let mr = net[a].host.register(len, access::ALL);
        let text: Vec<u8> = (0..len as u32).map(|n| (n % 249) as u8).collect();
        net[a].host.fill(&mr, &text);
        let inbox = net[b].host.register(len + 40, access::ALL);
        net[b].recv(1, &[inbox.all()]);
        // These Writes enlarge the sender's window, so that many datagrams are under way at the same time below.
        let warm = net[b].host.register(len, access::ALL);
        for _ in 0..10 {
            net.post(a, b, write(0, warm.remote(0)).from(&[mr.all()]));
            net.run(LONG);
        }
        assert_eq!(net[a].completed().len(), 10);
        let (at, mut n) = (net[b].addr, 0);
        net.filter = Some(Box::new(move |d| {
            let data = d.to == at && d.bytes.len() > 1000;
            n += u32::from(data);
            !(data && n < 400 && n % 2 == 0)
        }));
        let request = if recorded {
            write(1, inbox.remote(40))
        } else {
            send(1)
        };
        net.post(a, b, request.from(&[mr.all()]));
        net.run(LONG);
        assert_eq!(net[a].completed()[0].status, Status::Success);
        assert_eq!(net[b].host.bytes(&inbox)[40..], text);
    }
}

/// A network with a queue pair that receives datagrams made by the test, and memory of that queue pair.
fn receiver(options: Options) -> (Ether, Id, Mr) {
    let mut net = Ether::new(6, Link::default());
    let b = net.join(Kind::Ud, options);
    let mr = net[b].host.register(1 << 16, access::ALL);
    (net, b, mr)
}

/// A datagram with eight bytes of a Write-Record to the start of `mr`.
fn part(mr: &Mr, id: u32, length: u32, offset: u32) -> (Shim, Header, Vec<u8>) {
    let last = offset + 8 == length;
    let header = tagged(
        Opcode::WriteRecord,
        mr.stag(),
        mr.remote(0).to.0 + u64::from(offset),
        last,
    );
    let shim = Shim {
        sub_op: dgram::SUB_RECORD,
        attributes: dgram::ATTR_RECORD,
        ..shim(id, length, offset)
    };
    (shim, header, vec![(id as u8).wrapping_add(1).max(1); 8])
}

fn deliver(net: &mut Ether, to: Id, (shim, header, payload): (Shim, Header, Vec<u8>)) {
    let addr = net[to].addr;
    net.deliver(stranger(1), addr, &sealed(body(&shim, &header, &payload)));
}

#[test]
fn datagrams_of_a_message_that_contradict_it_are_dropped() {
    let (mut net, b, mr) = receiver(options());
    deliver(&mut net, b, part(&mr, 1, 24, 0));
    let (good, header, payload) = part(&mr, 1, 24, 16);
    let longer = (Shim { length: 32, ..good }, part(&mr, 1, 32, 16).1);
    let moved = (
        good,
        tagged(Opcode::WriteRecord, mr.stag(), mr.remote(64).to.0, true),
    );
    let sub = dgram::SUB_RECORD_IMMEDIATE;
    let immediate = Shim {
        immediate: Some([1; 4]),
        sub_op: sub,
        ..good
    };
    for (shim, header) in [longer, moved, (immediate, header)] {
        deliver(&mut net, b, (shim, header, payload.clone()));
    }
    assert_eq!(net[b].drops.get(&Dropped::Mismatch), Some(&3));
    assert!(net[b].host.bytes(&mr)[8..].iter().all(|b| *b == 0));
    deliver(&mut net, b, part(&mr, 1, 24, 16));
    deliver(&mut net, b, part(&mr, 1, 24, 8));
    let record = net[b].qp.poll_record().unwrap();
    assert!(record.complete && record.valid == 24);
}

#[test]
fn a_send_longer_than_agreed_consumes_no_receive() {
    let options = Options {
        max_send: 5000,
        ..options()
    };
    for (length, fits) in [(5000, true), (5001, false)] {
        let (mut net, b, mr) = receiver(options);
        net[b].recv(1, &[mr.all()]);
        let header = untagged(Opcode::Send, QN_SEND, 1, 0, false);
        deliver(&mut net, b, (shim(1, length, 0), header, vec![1; 8]));
        assert_eq!(net[b].drops.get(&Dropped::TooLong), (!fits).then_some(&1));
    }
}

#[test]
fn incomplete_messages_of_one_source_are_bounded_and_the_oldest_is_dropped() {
    // The numbers decrease, because a much larger number would end the earlier incomplete messages.
    let (mut net, b, mr) = receiver(options());
    let most = bounds::OPEN_MESSAGES_SOURCE as u32;
    for id in 0..most {
        deliver(&mut net, b, part(&mr, 1000 - id, 16, 0));
    }
    assert!(net[b].qp.poll_record().is_none());
    deliver(&mut net, b, part(&mr, 1000 - most, 16, 0));
    assert_eq!(net[b].qp.poll_record().unwrap().id, 1000);
    assert!(net[b].qp.poll_record().is_none());
    // A number that is larger by up to eight may come from reordering. One that is larger by nine ends the earlier message.
    let (mut net, b, mr) = receiver(options());
    deliver(&mut net, b, part(&mr, u32::MAX, 16, 0));
    deliver(&mut net, b, part(&mr, 7, 16, 0));
    assert!(net[b].qp.poll_record().is_none());
    deliver(&mut net, b, part(&mr, 8, 16, 0));
    let record = net[b].qp.poll_record().unwrap();
    assert_eq!(
        (record.id, record.valid, record.complete),
        (u32::MAX, 8, false)
    );
    assert_eq!(net[b].qp.records().map(record.map), Some(&[(0, 8)][..]));
    assert!(net[b].qp.release_map(record.map));
    assert!(!net[b].qp.release_map(record.map));
}

#[test]
fn another_epoch_begins_with_any_number() {
    let (mut net, b, mr) = receiver(options());
    for epoch in [1, 2] {
        let (shim, header, payload) = part(&mr, 5, 8, 0);
        deliver(&mut net, b, (Shim { epoch, ..shim }, header, payload));
        assert!(net[b].qp.poll_record().unwrap().complete, "{epoch}");
    }
}

/// Hands a datagram of `stranger(1)` to `to` at a time after the start. Returns whether it made a complete record.
fn deliver_at(
    net: &mut Ether,
    to: Id,
    at: Duration,
    (shim, header, payload): (Shim, Header, Vec<u8>),
) -> bool {
    let arrival = Arrival {
        from: stranger(1),
        to: Some(net[to].addr.ip()),
        hop_limit: 9,
        traffic_class: 0,
    };
    let now = net.now() + at;
    net[to].qp.set_now(now);
    let bytes = sealed(body(&shim, &header, &payload));
    let late = net[to].qp.handle_rx(&arrival, &bytes) == Err(Dropped::Late);
    let record = net[to].qp.poll_record();
    assert!(!late || record.is_none());
    record.is_some_and(|r| r.complete)
}

/// After a forged message with another epoch the messages of the true source are late for a few seconds, not for ever.
#[test]
fn a_forged_epoch_stops_its_source_for_a_few_seconds() {
    let (mut net, b, mr) = receiver(options());
    let mut writes = |at: Duration, epoch, id| {
        let (shim, header, payload) = part(&mr, id, 8, 0);
        deliver_at(&mut net, b, at, (Shim { epoch, ..shim }, header, payload))
    };
    assert!(writes(Duration::ZERO, 1, 5));
    assert!(writes(Duration::ZERO, 2, 900));
    let end = Duration::from_secs(5);
    for at in [Duration::ZERO, end - MS] {
        assert!(!writes(at, 1, 6));
    }
    assert!(writes(end - MS, 2, 901));
    assert!(writes(end, 1, 7));
    assert!(!writes(end, 1, 7), "a duplicate");
}

/// A Write-Record without payload needs no STag. One with another epoch does not end the messages of a source that sends.
#[test]
fn a_forged_message_without_payload_ends_no_message_of_its_source() {
    for form in ["single", "commit", "group"] {
        let (mut net, b, mr) = receiver(Options {
            deadline: Duration::from_secs(10),
            ..options()
        });
        let empty = |epoch, id| {
            let header = tagged(Opcode::WriteRecord, Stag(7), 0, form != "group");
            let shim = Shim {
                epoch,
                sub_op: dgram::SUB_RECORD,
                commit: form == "commit",
                parity: form == "group",
                group: u8::from(form == "group"),
                segment: 8 * u16::from(form == "group"),
                ..shim(id, 0, 0)
            };
            (shim, header, Vec::new())
        };
        let mut comes = |at: Duration, datagram| deliver_at(&mut net, b, at, datagram);
        let mut now = Duration::ZERO;
        assert!(!comes(now, part(&mr, 1, 16, 0)), "{form}");
        assert!(comes(now, empty(1, 900)), "{form}");
        // The first message of the source is still incomplete.
        now += Duration::from_secs(6);
        assert!(comes(now, empty(1, 901)), "{form}");
        assert!(comes(now, part(&mr, 1, 16, 8)), "{form}");
        assert!(comes(now, part(&mr, 2, 8, 0)), "{form}");
        now += Duration::from_secs(5) - MS;
        for _ in 0..2 {
            assert!(comes(now, empty(1, 902)), "{form}");
        }
        // The source is silent now, and the message begins a new epoch.
        now += MS;
        assert!(comes(now, empty(1, 903)), "{form}");
        assert!(!comes(now, empty(1, 903)), "{form}");
        assert!(!comes(now, part(&mr, 3, 8, 0)), "{form}");
    }
}

/// A Write to a multicast group is dropped (section 5.5.1 of R. Grant's thesis).
#[test]
fn a_write_to_a_group_is_not_placed() {
    let (mut net, b, mr) = receiver(options());
    let (shim, header, payload) = part(&mr, 5, 8, 0);
    let bytes = sealed(body(&shim, &header, &payload));
    for (to, fits) in [([239, 0, 0, 1], false), ([10, 0, 0, 9], true)] {
        let arrival = Arrival {
            from: stranger(1),
            to: Some(IpAddr::from(to)),
            hop_limit: 9,
            traffic_class: 0,
        };
        assert_eq!(net[b].qp.handle_rx(&arrival, &bytes).is_ok(), fits);
        assert_eq!(net[b].host.bytes(&mr)[0] != 0, fits);
    }
}

#[test]
fn bytes_that_have_arrived_are_not_placed_again() {
    let (mut net, b, mr) = receiver(options());
    deliver(&mut net, b, part(&mr, 1, 32, 0));
    let (shim, header, _) = part(&mr, 1, 32, 0);
    deliver(&mut net, b, (shim, header, vec![9; 16]));
    let bytes = net[b].host.bytes(&mr);
    assert_eq!((&bytes[..8], &bytes[8..16]), (&[2; 8][..], &[9; 8][..]));
}

#[test]
fn a_record_is_made_after_the_grace_time_or_the_deadline() {
    let (mut net, b, mr) = receiver(options());
    let (start, arrival) = (
        net.now(),
        Arrival {
            from: stranger(1),
            to: Some(net[b].addr.ip()),
            hop_limit: 9,
            traffic_class: 0,
        },
    );
    let mut comes = |at: Duration, id, offset| {
        let qp = &mut net[b].qp;
        qp.set_now(start + at);
        if let Some(offset) = offset {
            let (shim, header, payload) = part(&mr, id, 40, offset);
            let bytes = sealed(body(&shim, &header, &payload));
            qp.handle_rx(&arrival, &bytes).unwrap();
        }
        qp.poll_record().map(|r| (r.id, r.valid, r.final_seen))
    };
    let Options {
        grace, deadline, ..
    } = options();
    assert_eq!(comes(Duration::ZERO, 1, Some(32)), None);
    assert_eq!(comes(grace - MS, 1, Some(0)), None);
    assert_eq!(comes(grace, 1, None), Some((1, 16, true)));
    assert_eq!(comes(10 * MS, 2, Some(0)), None);
    assert_eq!(comes(10 * MS + deadline - MS, 2, Some(8)), None);
    assert_eq!(comes(10 * MS + 2 * deadline - 2 * MS, 2, None), None);
    assert_eq!(
        comes(10 * MS + 2 * deadline - MS, 2, None),
        Some((2, 16, false))
    );
}

/// A receiver that was not called for longer than the deadline handles the datagrams that arrived meanwhile before it
/// gives up a message.
#[test]
fn datagrams_that_waited_in_the_socket_are_not_late() {
    let (mut net, b, mr) = receiver(options());
    let arrival = Arrival {
        from: stranger(1),
        to: Some(net[b].addr.ip()),
        hop_limit: 9,
        traffic_class: 0,
    };
    let start = net.now();
    let qp = &mut net[b].qp;
    for (at, offset) in [(0, 0), (2, 8), (2, 16)] {
        qp.set_now(start + at * options().deadline);
        assert!(qp.gives_up() || offset != 8);
        let (shim, header, payload) = part(&mr, 1, 24, offset);
        let bytes = sealed(body(&shim, &header, &payload));
        qp.handle_rx(&arrival, &bytes).unwrap();
    }
    assert!(qp.poll_record().unwrap().complete);
}

/// A datagram to a multicast group is never answered, even if as many bytes have arrived from its source as the answer has.
#[test]
fn datagrams_to_a_group_are_not_answered() {
    let (mut net, b, mr) = receiver(options());
    let addr = net[b].addr;
    // Each of the first datagrams of a source is answered by a flow report. After them, only error reports are sent.
    for _ in 0..20 {
        deliver(&mut net, b, part(&mr, 1, 24, 0));
        let mut out = Vec::new();
        net[b].qp.poll_tx(&mut out);
        net[b].qp.handle_written(out.len());
    }
    let (shim, header, payload) = part(&mr, 5, 8, 0);
    let stag = Stag(mr.stag().0 ^ 0x0100);
    let Header::Tagged(tagged) = header else {
        panic!("a write")
    };
    let wrong = Header::Tagged(Tagged { stag, ..tagged });
    let bytes = sealed(body(&shim, &wrong, &payload));
    for (to, answers) in [(IpAddr::from([239, 0, 0, 1]), 0), (addr.ip(), 1)] {
        let arrival = Arrival {
            from: stranger(1),
            to: Some(to),
            hop_limit: 9,
            traffic_class: 0,
        };
        assert!(net[b].qp.handle_rx(&arrival, &bytes).is_err());
        let mut out = Vec::new();
        net[b].qp.poll_tx(&mut out);
        net[b].qp.handle_written(out.len());
        assert_eq!(out.len(), answers, "{to}");
    }
}

/// The parity group size of a message is that of its first datagram. Datagrams with a different size are dropped.
#[test]
fn groups_of_parity_are_those_of_the_first_datagram() {
    let (mut net, b, mr) = receiver(options());
    let arrival = Arrival {
        from: stranger(1),
        to: Some(net[b].addr.ip()),
        hop_limit: 9,
        traffic_class: 0,
    };
    let mut receive = |offset, group, segment| {
        let (shim, header, payload) = part(&mr, 1, 40, offset);
        let shim = Shim {
            group,
            segment,
            ..shim
        };
        let bytes = sealed(body(&shim, &header, &payload));
        net[b].qp.handle_rx(&arrival, &bytes)
    };
    assert_eq!(receive(0, 2, 8), Ok(()));
    assert_eq!(receive(8, 3, 8), Err(Dropped::Mismatch));
    assert_eq!(receive(8, 2, 16), Err(Dropped::Mismatch));
    assert_eq!(net[b].host.bytes(&mr)[8..16], [0; 8]);
}

/// The opcodes of the datagrams that a queue pair sends now, without control messages of 8 bytes.
fn sent_opcodes(net: &mut Ether, of: Id) -> Vec<Opcode> {
    let mut out = Vec::new();
    net[of].qp.poll_tx(&mut out);
    net[of].qp.handle_written(out.len());
    let opcode = |d: &anywarp_core::datagram::TxDatagram| {
        let datagram = dgram::parse(&d.bytes).unwrap();
        (datagram.payload.len() != 8 || datagram.header.opcode() != Opcode::Control)
            .then(|| datagram.header.opcode())
    };
    out.iter().filter_map(opcode).collect()
}

/// A Read Request that is padded to the length of its answer needs no cookie. If the answer is one byte longer, it
/// does.
#[test]
fn an_answer_without_a_cookie_is_not_longer_than_its_request() {
    for (more, answered) in [(0, true), (1, false)] {
        let (mut net, b, mr) = receiver(options());
        let addr = net[b].addr;
        // The flow reports for these datagrams first use up the credit of the source.
        for id in 10..20 {
            deliver(&mut net, b, part(&mr, id, 8, 0));
        }
        sent_opcodes(&mut net, b);
        let request = sealed(read_request(1, 0, &mr, 0));
        let fits = (request.len() - 44) as u32;
        net.deliver(
            stranger(1),
            addr,
            &sealed(read_request(1, fits + more, &mr, 0)),
        );
        let opcodes = sent_opcodes(&mut net, b);
        assert_eq!(
            opcodes.contains(&Opcode::ReadResponse),
            answered,
            "{opcodes:?}"
        );
    }
}

/// A source that has not proved its address is sent no more bytes than it sent, for requests of any kind.
#[test]
fn answers_are_limited_by_the_bytes_of_the_requests() {
    for size in [0, 40, 41, 5000] {
        let (mut net, b, mr) = receiver(options());
        let addr = net[b].addr;
        let (mut came, mut went) = (0, 0);
        for id in 0..40 {
            let request = sealed(read_request(id, size, &mr, 0));
            came += request.len();
            net.deliver(stranger(1), addr, &request);
            let mut out = Vec::new();
            net[b].qp.poll_tx(&mut out);
            net[b].qp.handle_written(out.len());
            went += out.iter().map(|d| d.bytes.len()).sum::<usize>();
            assert!(went <= came, "{went} of {came}, {size}");
        }
        assert!(went > 0);
    }
}

/// Error reports are limited to a number per second, for all peers together.
#[test]
fn error_reports_per_second_are_limited() {
    let (mut net, b, mr) = receiver(options());
    let (mut reports, wrong) = (0, Stag(mr.stag().0 ^ 0x0100));
    for id in 0..3 * bounds::ERRORS_A_SECOND {
        let (shim, header, payload) = part(&mr, id, 8, 0);
        let Header::Tagged(tagged) = header else {
            panic!("a write")
        };
        let wrong = Header::Tagged(Tagged {
            stag: wrong,
            ..tagged
        });
        let addr = net[b].addr;
        net.deliver(stranger(1), addr, &sealed(body(&shim, &wrong, &payload)));
        let opcodes = sent_opcodes(&mut net, b);
        reports += opcodes.iter().filter(|o| **o == Opcode::Terminate).count();
    }
    assert_eq!(reports, bounds::ERRORS_A_SECOND as usize);
}

#[test]
fn queued_read_answers_are_limited() {
    let (mut net, b, mr) = receiver(options());
    let addr = net[b].addr;
    let most = u32::from(options().max_reads);
    for id in 0..most + 3 {
        net.deliver(stranger(1), addr, &sealed(read_request(id, 8, &mr, 0)));
    }
    assert_eq!(net[b].drops.get(&Dropped::Busy), Some(&3));
    assert_eq!(sent_opcodes(&mut net, b).len() as u32, most);
}

/// Each reader has its share of the queued answers, and all together are limited too, also those without data.
#[test]
fn queued_read_answers_are_limited_for_each_reader_and_for_all() {
    for size in [0, 8] {
        let (mut net, b, mr) = receiver(options());
        let addr = net[b].addr;
        let most = u32::from(options().max_reads);
        let mut sends = |readers: u32| {
            for reader in 0..readers {
                for id in 0..most {
                    let request = sealed(read_request(id, size, &mr, 0));
                    net.deliver(stranger(reader), addr, &request);
                }
            }
            let busy = net[b].drops.remove(&Dropped::Busy).unwrap_or(0);
            let batches = std::iter::from_fn(|| {
                let batch = sent_opcodes(&mut net, b);
                (!batch.is_empty()).then_some(batch)
            });
            let sent: Vec<Opcode> = batches.flatten().collect();
            let answers = sent.iter().filter(|o| **o == Opcode::ReadResponse);
            (busy as usize, answers.count())
        };
        assert_eq!(sends(4), (0, 4 * most as usize));
        let dropped = 40 * most as usize - bounds::READ_ANSWERS;
        assert_eq!(sends(40), (dropped, bounds::READ_ANSWERS));
    }
}

#[test]
fn a_writer_may_ask_for_a_record_of_each_datagram() {
    let (mut net, b, mr) = receiver(options());
    let (shim, header, payload) = part(&mr, 1, 24, 8);
    let attributes = dgram::ATTR_RECORD | dgram::ATTR_NOT_AGGREGATED;
    deliver(&mut net, b, (Shim { attributes, ..shim }, header, payload));
    let record = net[b].qp.poll_record().unwrap();
    assert!(record.chunk && !record.complete);
    assert_eq!((record.offset, record.valid, record.map), (8, 8, 0));
}

#[test]
fn a_read_longer_than_the_limit_is_refused() {
    let options = Options {
        max_read: 1000,
        ..options()
    };
    for (size, why) in [(1000, None), (1001, Some(&1))] {
        let (mut net, b, mr) = receiver(options);
        let addr = net[b].addr;
        net.deliver(stranger(1), addr, &sealed(read_request(1, size, &mr, 0)));
        assert_eq!(net[b].drops.get(&Dropped::TooLong), why);
    }
}

/// A Read Response is placed only if it comes from the peer of the request, contains the sink of the request, and has
/// its length.
#[test]
fn an_unsolicited_answer_is_not_placed() {
    let mut net = Ether::new(7, Link::default());
    let a = net.join(Kind::Ud, options());
    let b = net.join(Kind::Ud, options());
    net[b].dead = true;
    let sink = net[a].host.register(64, access::ALL);
    let asked = Rc::new(RefCell::new(None));
    let (store, at) = (Rc::clone(&asked), net[b].addr);
    net.filter = Some(Box::new(move |d| {
        if d.to == at {
            *store.borrow_mut() = Some(d.bytes.to_vec());
        }
        true
    }));
    let from = net[b].host.register(64, access::ALL);
    net.post(a, b, read(1, from.remote(0)).from(&[sink.part(0, 16)]));
    net.run(MS);
    let bytes = asked.borrow_mut().take().unwrap();
    let request = dgram::parse(&bytes).unwrap();
    let id = request.shim.id;
    let ReadRequest {
        sink_stag, sink_to, ..
    } = ReadRequest::parse(request.payload.first_chunk().unwrap());
    let to = net[a].addr;
    let answer = |id, length, stag, to: u64, src_index| {
        let header = tagged(Opcode::ReadResponse, stag, to, length == 16);
        let shim = Shim {
            src_index,
            qkey: 0,
            ..shim(id, length, 0)
        };
        sealed(body(&shim, &header, &[7; 16]))
    };
    let (b_addr, right) = (net[b].addr, answer(id, 16, sink_stag, sink_to.0, 5));
    net.deliver(stranger(1), to, &right);
    net.deliver(b_addr, to, &answer(id, 16, sink_stag, sink_to.0, 6));
    net.deliver(b_addr, to, &answer(id + 1, 16, sink_stag, sink_to.0, 5));
    net.deliver(
        b_addr,
        to,
        &answer(id, 16, Stag(sink_stag.0 ^ 1), sink_to.0, 5),
    );
    net.deliver(b_addr, to, &answer(id, 16, sink_stag, sink_to.0 + 8, 5));
    net.deliver(b_addr, to, &answer(id, 24, sink_stag, sink_to.0, 5));
    let drops = |net: &Ether, why| net[a].drops.get(&why).copied().unwrap_or(0);
    assert_eq!(drops(&net, Dropped::Late), 3);
    assert_eq!(drops(&net, Dropped::Mismatch), 3);
    assert!(net[a].host.bytes(&sink).iter().all(|b| *b == 0));
    assert!(net[a].completed().is_empty());
    net.deliver(b_addr, to, &right);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[a].host.bytes(&sink)[..16], [7; 16]);
    net.deliver(b_addr, to, &right);
    assert_eq!(drops(&net, Dropped::Late), 4);
}

/// A datagram in a packet must have the same destination, source and Q_Key as the packet.
#[test]
fn a_packet_and_the_datagram_in_it_agree() {
    // Which byte of the packet is changed: the datagram's source index, destination index or Q_Key, or none.
    for (at, status) in [
        (None, Status::Success),
        (Some(63), Status::RemoteInvalidRequest),
        (Some(62), Status::RemoteInvalidRequest),
        (Some(47), Status::RemoteInvalidRequest),
    ] {
        let options = Options {
            keep_going: true,
            ..options()
        };
        let mut net = Ether::new(8, Link::default());
        let a = net.join(Kind::Rd, options);
        let b = net.join(Kind::Rd, options);
        let mine = net[a].host.register(8, access::ALL);
        let theirs = net[b].host.register(8, access::ALL);
        let held = Rc::new(RefCell::new(Vec::new()));
        let hold = Rc::clone(&held);
        // Packets with data are stored instead of delivered. The test changes and delivers them.
        net.filter = Some(Box::new(move |datagram| {
            let data = datagram.bytes[1] & 1 == 1;
            if data {
                *hold.borrow_mut() = datagram.bytes.to_vec();
            }
            !data
        }));
        net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(20 * MS);
        let mut bytes = held.borrow().clone();
        bytes.truncate(bytes.len() - dgram::CRC);
        if let Some(at) = at {
            bytes[at] ^= 1;
        }
        let (from, to) = (net[a].addr, net[b].addr);
        // A packet to another queue pair index is dropped.
        let mut stray = bytes.clone();
        stray[22] ^= 1;
        net.deliver(from, to, &sealed(stray));
        assert_eq!(net[b].drops.get(&Dropped::Index), Some(&1));
        net.run(MS);
        assert!(net[a].completed().is_empty());
        net.deliver(from, to, &sealed(bytes));
        net.run(5 * MS);
        let ends: Vec<_> = net[a].completed().iter().map(|c| c.status).collect();
        assert_eq!(ends, [status], "{at:?}");
    }
}

/// A message whose first part is missing in an ordered stream can never be complete, so it is refused and takes no receive.
#[test]
fn a_message_without_its_beginning_is_refused() {
    for ordered in [true, false] {
        let options = Options {
            ordered,
            ..options()
        };
        let mut net = Ether::new(11, Link::default());
        let b = net.join(Kind::Rd, options);
        let inbox = net[b].host.register(100, access::LOCAL);
        net[b].recv(1, &[inbox.all()]);
        let seen = watch(&mut net);
        let mut s = Stranger::meets(&mut net, &seen, 1, b);
        s.sends(&mut net, Some(&half(1, true)));
        net.run(50 * MS);
        let answers = seen.borrow_mut().remove(&s.addr).unwrap_or_default();
        let whys: Vec<u8> = answers
            .iter()
            .map(|bytes| rd::parse(bytes).unwrap().0.refused)
            .filter(|why| *why != 0)
            .collect();
        let refused = ordered.then_some(Status::RemoteInvalidRequest as u8);
        assert_eq!(whys, Vec::from_iter(refused), "ordered {ordered}");
        s.sends(&mut net, Some(&half(1, false)));
        net.run(50 * MS);
        let got = net[b].received().len();
        assert_eq!(got, usize::from(!ordered), "ordered {ordered}");
    }
}

/// A challenge that does not echo the token of this end was not sent by the peer in question, and is dropped.
#[test]
fn a_challenge_from_a_wrong_source_is_dropped() {
    let mut net = Ether::new(9, Link::default());
    let a = net.join(Kind::Rd, options());
    let b = net.join(Kind::Rd, options());
    let mine = net[a].host.register(8, access::ALL);
    net[b].dead = true;
    let echoes = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&echoes);
    net.filter = Some(Box::new(move |datagram| {
        let (packet, _) = rd::parse(&datagram.bytes).unwrap();
        seen.borrow_mut().push((packet.token, packet.echo));
        true
    }));
    net.post(a, b, send(1).from(&[mine.all()]));
    net.run(50 * MS);
    let (token, _) = echoes.borrow()[0];
    let (from, to) = (net[b].addr, net[a].addr);
    for (echo, believed) in [(token ^ 1, false), (token, true)] {
        let challenge = Packet {
            token: 99,
            echo,
            dst_index: 5,
            src_index: 5,
            time: 1,
            challenge: true,
            ..Packet::default()
        };
        let mut bytes = Vec::new();
        challenge.put(false, &mut bytes);
        net.deliver(from, to, &sealed(bytes));
        net.run(500 * MS);
        let last = echoes.borrow().last().copied();
        assert_eq!(last.map(|(_, echo)| echo == 99), Some(believed));
    }
}

/// An answer that arrives after its request's deadline is not placed, even if no time-out was handled in between.
#[test]
fn an_answer_after_its_deadline_is_not_placed() {
    for late in [false, true] {
        let mut net = Ether::new(10, Link::default());
        let a = net.join(Kind::Ud, options());
        let b = net.join(Kind::Ud, options());
        let mine = net[a].host.register(8, access::ALL);
        let theirs = net[b].host.register(8, access::ALL);
        net[b].host.fill(&theirs, &[9; 8]);
        let held = Rc::new(RefCell::new(Vec::new()));
        let hold = Rc::clone(&held);
        net.filter = Some(Box::new(move |datagram| {
            let answer = dgram::parse(&datagram.bytes)
                .is_ok_and(|d| d.header.opcode() == Opcode::ReadResponse);
            if answer {
                *hold.borrow_mut() = datagram.bytes.to_vec();
            }
            !answer
        }));
        net.post(a, b, read(1, theirs.remote(0)).from(&[mine.all()]));
        net.run(5 * MS);
        let arrival = Arrival {
            from: net[b].addr,
            to: Some(net[a].addr.ip()),
            hop_limit: 9,
            traffic_class: 0,
        };
        let over = net.now() - 5 * MS + options().read_timeout;
        let qp = &mut net[a].qp;
        qp.set_now(if late { over } else { over - MS });
        assert_eq!(qp.handle_rx(&arrival, &held.borrow()).is_err(), late);
        let status = if late {
            Status::RetryExceeded
        } else {
            Status::Success
        };
        assert_eq!(net[a].completed()[0].status, status);
        assert_eq!(net[a].host.bytes(&mine)[0] == 9, !late);
    }
}

/// The number of queued challenges is limited.
#[test]
fn queued_challenges_are_limited() {
    let mut net = Ether::new(11, Link::default());
    let b = net.join(Kind::Rd, options());
    let seen = watch(&mut net);
    let to = net[b].addr;
    for n in 0..bounds::RD_CHALLENGES as u32 + 7 {
        let mut s = Stranger {
            addr: stranger(n),
            to,
            echo: 0,
            seq: 1,
        };
        s.sends(&mut net, None);
    }
    net.run(Duration::ZERO);
    assert_eq!(seen.borrow().len(), bounds::RD_CHALLENGES);
    // For the senders of these packets, nothing is kept but the queued challenges.
    let late = Stranger::meets(&mut net, &seen, 1000, b);
    assert_ne!(late.echo, 0);
}

/// Acknowledgements that were not requested are sent after a number of packets (fewer while packets are missing), or
/// after a part of the window.
#[test]
fn acknowledgements_are_sent_in_time_and_are_few() {
    let of = |len: usize| {
        let mut net = Ether::new(12, Link::default());
        let b = net.join(Kind::Rd, options());
        let mr = net[b].host.register(1 << 16, access::ALL);
        let seen = watch(&mut net);
        let mut s = Stranger::meets(&mut net, &seen, 1, b);
        let mut send = move |id: u32, missing: bool| {
            let (shim, header, _) = part(&mr, id, 8, 0);
            let length = len as u32;
            let data = body(&Shim { length, ..shim }, &header, &vec![1; len]);
            s.seq += u32::from(missing);
            s.sends(&mut net, Some(&data));
            net.run(Duration::ZERO);
            let answers = seen.borrow_mut().remove(&s.addr).unwrap_or_default();
            assert!(answers.len() <= 1);
            let ack = answers.first().map(|a| rd::parse(a).unwrap().0);
            ack.map(|p| (p.ack.unwrap(), p.arrived.to_vec(), p.window, data.len()))
        };
        let many = 80;
        let mut answered = Vec::new();
        for id in 0..many {
            answered.extend(send(id, id == 40).map(|ack| (id + 1, ack)));
        }
        answered
    };
    let acks = of(8);
    let times: Vec<u32> = acks.iter().map(|(after, _)| *after).collect();
    // A packet after a gap is acknowledged at once.
    assert_eq!(times, [32, 41, 57, 73]);
    let ack = |n: usize| (acks[n].1.0, acks[n].1.1.clone());
    assert_eq!(ack(0), (1032, vec![]));
    assert_eq!(ack(1), (1040, vec![(1041, 1042)]));
    assert_eq!(ack(3), (1040, vec![(1041, 1074)]));
    // An acknowledgement is sent after a quarter of the window. A packet counts as 1024 bytes plus twice its length: about what it
    // occupies in the socket's receive buffer.
    let acks = of(60_000);
    let (_, _, window, len) = acks[0].1;
    let quarter = (window / 4).div_ceil(2 * len as u32 + 1024);
    assert!(quarter < 16, "{window}");
    assert_eq!((acks[0].0, acks[1].0), (quarter, 2 * quarter));
}

/// A peer that has echoed a token is sent at most three times the bytes that it sent, including repetitions, until it
/// echoes the time of a packet sent to it. Then there is no limit.
#[test]
fn a_silent_reliable_peer_is_sent_few_bytes() {
    let mut net = Ether::new(15, Link::default());
    let b = net.join(Kind::Rd, options());
    const MANY: u32 = 1 << 20;
    let mr = net[b].host.register(MANY as usize, access::ALL);
    let seen = watch(&mut net);
    for (n, size) in [8, 100, 1000, MANY].into_iter().enumerate() {
        let mut s = Stranger::meets(&mut net, &seen, n as u32, b);
        let data = read_request(1, size, &mr, 0);
        s.sends(&mut net, Some(&data));
        let came = Packet::LEN + data.len() + dgram::CRC;
        net.run(2000 * MS);
        let packets = seen.borrow_mut().remove(&s.addr).unwrap_or_default();
        let bytes = |packets: &Vec<Vec<u8>>| packets.iter().map(Vec::len).sum::<usize>();
        assert!(
            bytes(&packets) <= 3 * came,
            "{size}: {} for {came}",
            bytes(&packets)
        );
        let parsed: Vec<_> = packets.iter().map(|p| rd::parse(p).unwrap()).collect();
        let answered = parsed.iter().any(|(_, data)| data.is_some());
        assert_eq!(answered, size < 150);
        let proof = Packet {
            time_echo: parsed[0].0.time,
            ..s.packet()
        };
        let mut bytes_of = Vec::new();
        proof.put(false, &mut bytes_of);
        net.deliver(s.addr, s.to, &sealed(bytes_of));
        net.run(2000 * MS);
        let more = seen.borrow_mut().remove(&s.addr).unwrap_or_default();
        assert!(size < MANY || bytes(&more) > 10_000, "{}", bytes(&more));
    }
}

/// Control messages inside packets are dropped.
#[test]
fn control_in_a_packet_is_refused() {
    let mut net = Ether::new(13, Link::default());
    let b = net.join(Kind::Rd, options());
    let seen = watch(&mut net);
    let mut s = Stranger::meets(&mut net, &seen, 1, b);
    let mut header = Control::Cookie.header();
    header.msn = Msn(1);
    let data = body(&shim(1, 8, 0), &Header::Untagged(header), &[1; 8]);
    s.sends(&mut net, Some(&data));
    assert_eq!(net[b].drops.get(&Dropped::Operation), Some(&1));
    net.run(Duration::ZERO);
    let answer = rd::parse(&seen.borrow()[&s.addr][0]).unwrap().0;
    assert_eq!(answer.refused, Status::RemoteInvalidRequest as u8);
}

/// The queued answers to one reliable peer are limited. When the limit for all peers is reached, each may still have
/// a few.
#[test]
fn queued_answers_are_limited_for_each_peer_and_for_all() {
    let mut net = Ether::new(14, Link::default());
    let b = net.join(Kind::Rd, options());
    let mr = net[b].host.register(64, access::ALL);
    let seen = watch(&mut net);
    let all = (bounds::RD_ANSWERS / bounds::RD_ANSWERS_PEER) as u32;
    let mut strangers: Vec<Stranger> = (0..all + 2)
        .map(|n| Stranger::meets(&mut net, &seen, n, b))
        .collect();
    let busy = |net: &Ether| net[b].drops.get(&Dropped::Busy).copied().unwrap_or(0);
    let asks = |net: &mut Ether, s: &mut Stranger, many: usize| {
        for id in 0..many {
            s.sends(net, Some(&read_request(id as u32, 8, &mr, 0)));
        }
    };
    for (n, s) in strangers.iter_mut().enumerate().take(all as usize) {
        asks(&mut net, s, bounds::RD_ANSWERS_PEER);
        assert_eq!(busy(&net), n as u64);
        // One request more is dropped. The peer has to send it again after one of the answers has been sent.
        s.sends(&mut net, Some(&read_request(999, 8, &mr, 0)));
        assert_eq!(busy(&net), n as u64 + 1);
    }
    for s in strangers.iter_mut().skip(all as usize) {
        let before = busy(&net);
        asks(&mut net, s, 4);
        assert_eq!(busy(&net), before);
        s.sends(&mut net, Some(&read_request(999, 8, &mr, 0)));
        assert_eq!(busy(&net), before + 1);
    }
}

/// A reader repeats its request when the first cookie arrives, and not when further ones do.
#[test]
fn a_reader_repeats_its_request_once() {
    let mut net = Ether::new(15, Link::default());
    let a = net.join(Kind::Ud, options());
    let b = net.join(Kind::Ud, options());
    net[b].dead = true;
    let sink = net[a].host.register(4096, access::ALL);
    let from = net[b].host.register(4096, access::ALL);
    let asked = Rc::new(RefCell::new(Vec::new()));
    let (store, far) = (Rc::clone(&asked), net[b].addr);
    net.filter = Some(Box::new(move |d| {
        if d.to == far {
            store.borrow_mut().push(d.bytes.to_vec());
        }
        true
    }));
    net.post(a, b, read(1, from.remote(0)).from(&[sink.part(0, 4096)]));
    net.run(MS);
    let first = asked.borrow()[0].clone();
    let request = dgram::parse(&first).unwrap();
    let near = net[a].addr;
    for cookie in [7_u64, 8, 9] {
        let shim = Shim {
            src_index: request.shim.dst_index,
            dst_index: request.shim.src_index,
            ..shim(request.shim.id, 8, 0)
        };
        let mut header = Control::Cookie.header();
        header.msn = Msn(request.shim.id);
        let bytes = body(&shim, &Header::Untagged(header), &cookie.to_be_bytes());
        net.deliver(far, near, &sealed(bytes));
        net.run(MS);
    }
    let asked = asked.borrow();
    assert_eq!(asked.len(), 2);
    let again = dgram::parse(&asked[1]).unwrap();
    let brought = again.payload.get(ReadRequest::LEN..).unwrap();
    assert_eq!(brought.first_chunk(), Some(&7_u64.to_be_bytes()));
}

/// A reader has a cookie that the responder does not accept any more: it is some minutes old, or the responder was restarted. The reader gets
/// another cookie.
#[test]
fn a_cookie_that_has_expired_is_replaced() {
    for restarted in [false, true] {
        let mut net = Ether::new(16, Link::default());
        let a = net.join(Kind::Ud, options());
        let b = net.join(Kind::Ud, options());
        let sink = net[a].host.register(1 << 16, access::ALL);
        let from = net[b].host.register(1 << 16, access::ALL);
        for id in 0..3 {
            net.post(a, b, read(id, from.remote(0)).from(&[sink.all()]));
            net.run(LONG);
            let done = net[a].completed();
            assert_eq!(done[0].status, Status::Success, "{id}, {restarted}");
            if restarted {
                net.restart(b, options());
            } else {
                net.pass(Duration::from_secs(130));
            }
        }
    }
}

/// The answer to a Read Request, with as many bytes as it asks for.
fn read_response(request: &[u8]) -> Vec<u8> {
    let request = dgram::parse(request).unwrap();
    let wanted = ReadRequest::parse(request.payload.first_chunk().unwrap());
    let shim = Shim {
        src_index: request.shim.dst_index,
        dst_index: request.shim.src_index,
        ..shim(request.shim.id, wanted.size, 0)
    };
    let header = tagged(
        Opcode::ReadResponse,
        wanted.sink_stag,
        wanted.sink_to.0,
        true,
    );
    sealed(body(&shim, &header, &vec![5; wanted.size as usize]))
}

/// A cookie and the answer arrive together. The request is not sent again, and completes.
#[test]
fn a_read_that_was_answered_is_not_repeated() {
    let mut net = Ether::new(17, Link::default());
    let a = net.join(Kind::Ud, options());
    let (x, y) = (net.join(Kind::Ud, options()), net.join(Kind::Ud, options()));
    (net[x].dead, net[y].dead) = (true, true);
    let sink = net[a].host.register(4096, access::ALL);
    let from = net[x].host.register(4096, access::ALL);
    let asked = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&asked);
    net.filter = Some(Box::new(move |d| {
        store.borrow_mut().push(d.bytes.to_vec());
        true
    }));
    // The first request stays unanswered, so the second one cannot retire.
    net.post(a, x, read(1, from.remote(0)).from(&[sink.part(0, 8)]));
    net.post(a, y, read(2, from.remote(0)).from(&[sink.part(8, 8)]));
    net.run(MS);
    let (first, second) = (asked.borrow()[0].clone(), asked.borrow()[1].clone());
    let request = dgram::parse(&second).unwrap();
    let shim = Shim {
        src_index: request.shim.dst_index,
        dst_index: request.shim.src_index,
        ..shim(request.shim.id, 8, 0)
    };
    let header = Header::Untagged(Control::Cookie.header());
    let cookie = sealed(body(&shim, &header, &[7; 8]));
    let arrival = Arrival {
        from: net[y].addr,
        to: Some(net[a].addr.ip()),
        hop_limit: 9,
        traffic_class: 0,
    };
    let run = [cookie, read_response(&second)];
    let run = run.iter().map(Vec::as_slice);
    net[a]
        .qp
        .handle_rx_run(&arrival, run, |_, why| panic!("{why:?}"));
    net.run(MS);
    let (near, far) = (net[a].addr, net[x].addr);
    net.deliver(far, near, &read_response(&first));
    net.post(a, x, send(3).from(&[sink.part(0, 8)]));
    net.run(LONG);
    let done: Vec<_> = net[a]
        .completed()
        .iter()
        .map(|c| (c.wr_id, c.status))
        .collect();
    assert_eq!(done, [1, 2, 3].map(|id| (id, Status::Success)));
}

/// Only the answer to an outstanding Read makes a queue pair send a report.
#[test]
fn unsolicited_answers_are_not_reported() {
    let (mut net, b, _) = receiver(options());
    for to in [IpAddr::from([239, 0, 0, 1]), net[b].addr.ip()] {
        let arrival = Arrival {
            from: stranger(1),
            to: Some(to),
            hop_limit: 9,
            traffic_class: 0,
        };
        let header = tagged(Opcode::ReadResponse, Stag(1), 0, true);
        let bytes = sealed(body(&shim(1, 100, 0), &header, &[1; 100]));
        let result = net[b].qp.handle_rx(&arrival, &bytes);
        assert_eq!(result, Err(Dropped::Late));
        assert!(!net[b].qp.wants_tx(), "{to}");
    }
}

/// The sender of an incomplete Send becomes silent. Its receive is put back, and other messages can use it.
#[test]
fn an_incomplete_send_returns_its_receive() {
    for kind in [Kind::Ud, Kind::Rd] {
        let options = Options {
            // The defaults permit no Sends of more than 4096 bytes. A queue pair that permits them has a timer for each incomplete message.
            one_sided: true,
            ..Options::default()
        };
        let mut net = Ether::new(18, Link::default());
        let a = net.join(kind, options);
        let b = net.join(kind, options);
        let seen = watch(&mut net);
        let mr = net[a].host.register(8, access::ALL);
        let inbox = net[b].host.register(100, access::ALL);
        net[b].recv(7, &[inbox.all()]);
        if kind == Kind::Ud {
            let addr = net[b].addr;
            net.deliver(stranger(1), addr, &sealed(half(1, false)));
        } else {
            let mut s = Stranger::meets(&mut net, &seen, 1, b);
            s.sends(&mut net, Some(&half(1, false)));
        }
        net.run(LONG);
        assert!(net[b].received().is_empty());
        net.post(a, b, send(1).from(&[mr.all()]));
        net.run(MS);
        assert_eq!(net[a].completed()[0].status, Status::Success);
        let got = net[b].received();
        assert_eq!((got.len(), got[0].wr_id), (1, 7), "{kind:?}");
    }
}

/// A sender cannot keep a receive by repeating a datagram. Only new bytes postpone the deadline of a message.
#[test]
fn a_repeated_datagram_does_not_keep_a_receive() {
    let (mut net, b, _) = receiver(options());
    let addr = net[b].addr;
    let inbox = net[b].host.register(100, access::ALL);
    net[b].recv(7, &[inbox.all()]);
    let third = |n: u32| {
        let header = untagged(Opcode::Send, QN_SEND, 1, 8 * n, n == 2);
        sealed(body(&shim(1, 24, 8 * n), &header, &[1; 8]))
    };
    let Options { deadline, .. } = options();
    net.deliver(stranger(1), addr, &third(0));
    net.run(deadline - 10 * MS);
    net.deliver(stranger(1), addr, &third(1));
    for _ in 0..11 {
        assert_eq!(net[b].qp.counters().evicted, 0);
        net.run(deadline / 11);
        net.deliver(stranger(1), addr, &third(0));
    }
    net.run(MS);
    assert_eq!(net[b].qp.counters().evicted, 1);
    // The receive is free for another message.
    net.deliver(stranger(2), addr, &sealed(half(1, false)));
    net.deliver(stranger(2), addr, &sealed(half(1, true)));
    assert_eq!(net[b].received()[0].wr_id, 7);
}

/// A writer asks for a record of each datagram. The receiver then makes no other record of the message, even if a datagram is lost.
#[test]
fn datagrams_with_records_are_not_recorded_again() {
    let (mut net, b, mr) = receiver(options());
    for offset in [0, 16] {
        let (shim, header, payload) = part(&mr, 1, 24, offset);
        let attributes = dgram::ATTR_RECORD | dgram::ATTR_NOT_AGGREGATED;
        deliver(&mut net, b, (Shim { attributes, ..shim }, header, payload));
    }
    net.run(LONG);
    net.pass(LONG);
    net.run(MS);
    let records: Vec<_> = std::iter::from_fn(|| net[b].qp.poll_record()).collect();
    let ranges: Vec<_> = records
        .iter()
        .map(|r| (r.chunk, r.offset, r.valid))
        .collect();
    assert_eq!(ranges, [(true, 0, 8), (true, 16, 8)]);
}

/// A datagram is restored from parity after the memory was deregistered. The record does not claim its bytes.
#[test]
fn restored_bytes_that_cannot_be_placed_are_not_recorded() {
    let (mut net, b, mr) = receiver(options());
    let in_group = |parity, (shim, header, payload): (Shim, Header, Vec<u8>)| {
        let shim = Shim {
            group: 2,
            segment: 8,
            parity,
            ..shim
        };
        (shim, header, payload)
    };
    deliver(&mut net, b, in_group(false, part(&mr, 1, 24, 0)));
    net[b].host.deregister(&mr);
    deliver(&mut net, b, in_group(true, part(&mr, 1, 24, 0)));
    net.run(LONG);
    net.pass(LONG);
    net.run(MS);
    let records: Vec<_> = std::iter::from_fn(|| net[b].qp.poll_record()).collect();
    assert!(records.iter().all(|r| r.valid <= 8), "{records:?}");
}

/// A reliable sender abandons a message. The receiver notices this only when a later message has begun, and does not end that one.
#[test]
fn a_message_after_an_abandoned_one_is_kept() {
    let mut net = Ether::new(19, Link::default());
    let b = net.join(Kind::Rd, options());
    let mr = net[b].host.register(100, access::ALL);
    let inbox = net[b].host.register(100, access::ALL);
    let seen = watch(&mut net);
    let mut s = Stranger::meets(&mut net, &seen, 1, b);
    // A Send that waits for a receive. Four packets after it are lost, and abandoned.
    let header = untagged(Opcode::Send, QN_SEND, 1, 0, true);
    s.sends(&mut net, Some(&body(&shim(1, 8, 0), &header, &[1; 8])));
    s.seq += 4;
    let base = s.seq;
    for offset in [0, 8, 16] {
        if offset == 16 {
            net[b].recv(7, &[inbox.all()]);
            net.run(MS);
        }
        let (shim, header, payload) = part(&mr, 2, 24, offset);
        let mut bytes = Vec::new();
        Packet { base, ..s.packet() }.put(true, &mut bytes);
        bytes.extend_from_slice(&body(&shim, &header, &payload));
        net.deliver(s.addr, s.to, &sealed(bytes));
        s.seq += 1;
    }
    assert_eq!(net[b].received().len(), 1);
    let records: Vec<_> = std::iter::from_fn(|| net[b].qp.poll_record()).collect();
    assert!(matches!(&records[..], [r] if r.complete), "{records:?}");
}

/// A packet is lost, and the peer closes its window. Every 50 ms the sender asks whether it is open again.
#[test]
fn a_closed_window_is_probed_at_equal_intervals() {
    let mut net = Ether::new(20, Link::default());
    let b = net.join(Kind::Rd, options());
    let mr = net[b].host.register(100, access::ALL);
    let seen = watch(&mut net);
    let s = Stranger::meets(&mut net, &seen, 1, b);
    // To prove its address, the stranger returns the time in the answer to this packet.
    let mut question = Vec::new();
    Packet {
        ack_now: true,
        ..s.packet()
    }
    .put(false, &mut question);
    net.deliver(s.addr, s.to, &sealed(question));
    net.run(MS);
    let answers = seen.borrow_mut().remove(&s.addr).unwrap();
    let time_echo = rd::parse(answers.last().unwrap()).unwrap().0.time;
    let mut proof = Vec::new();
    Packet {
        time_echo,
        ..s.packet()
    }
    .put(false, &mut proof);
    net.deliver(s.addr, s.to, &sealed(proof));
    net.run(MS);
    let mut request = send(1).from(&[mr.all()]);
    request.destination = Some(Destination {
        addr: s.addr,
        source: None,
        qpn: 4000 << 8 | 9,
        qkey: QKEY,
        hop_limit: 0,
        traffic_class: 0,
    });
    let now = net.now();
    net[b].qp.set_now(now);
    net[b].qp.post_send(request).unwrap();
    net.run(MS);
    // The only packet with data is lost.
    let sent = seen.borrow_mut().remove(&s.addr).unwrap();
    let has_data = |bytes: &Vec<u8>| rd::parse(bytes).unwrap().1.is_some();
    assert!(sent.iter().any(has_data));
    let mut probes = [0; 2];
    for tenth in 0..400 {
        let answers = seen.borrow_mut().remove(&s.addr).unwrap_or_default();
        let asked = answers.iter().filter(|a| rd::parse(a).unwrap().0.ack_now);
        probes[tenth / 200] += asked.count();
        if tenth == 0 || !answers.is_empty() {
            let mut bytes = Vec::new();
            Packet {
                window: 0,
                ..s.packet()
            }
            .put(false, &mut bytes);
            net.deliver(s.addr, s.to, &sealed(bytes));
        }
        net.run(10 * MS);
    }
    assert!(probes.iter().all(|n| (35..=42).contains(n)), "{probes:?}");
}
