//! Datagram queue pairs among peers that mean ill: spoofed addresses, answers that nobody fetches, messages without end.
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
use anywarp_core::datagram::{Dropped, Kind};
use anywarp_core::verbs::wc::Status;
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

/// A datagram without its CRC.
fn body(shim: &Shim, header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = dgram::emit_head(shim, header);
    bytes.extend_from_slice(payload);
    bytes
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    dgram::seal(&mut bytes);
    bytes
}

/// Half of a Send of two datagrams.
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

/// What the network carried to addresses that nobody has.
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

/// A peer of reliable datagrams made by hand, that does as it likes.
struct Stranger {
    addr: SocketAddr,
    to: SocketAddr,
    echo: u32,
    seq: u32,
}

impl Stranger {
    /// Shows that it receives at its address.
    fn meets(net: &mut Ether, seen: &Seen, n: u32, to: Id) -> Self {
        let mut s = Self {
            addr: stranger(n),
            to: net[to].addr,
            echo: 0,
            seq: 1000,
        };
        s.says(net, None);
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
            ack: None,
            window: 1 << 20,
            time: 1,
            time_echo: 0,
            arrived: Default::default(),
            challenge: false,
            not_ready: false,
            ack_now: false,
            ack_soon: false,
            refused: 0,
        }
    }

    fn says(&mut self, net: &mut Ether, data: Option<&[u8]>) {
        let mut bytes = Vec::new();
        self.packet().put(data.is_some(), &mut bytes);
        bytes.extend_from_slice(data.unwrap_or(&[]));
        self.seq += u32::from(data.is_some());
        net.hear(self.addr, self.to, &sealed(bytes));
    }
}

/// Whatever somebody sends under the address of another: no more bytes go there than came from there.
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
        // The same as packets of somebody who guesses, and packets of nothing.
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
                // One that comes again and again, and others that come once.
                let n = (n as u32 + 1) << 16;
                let from = stranger(if source % 2 == 0 { n | source } else { n | 1 });
                *sent.entry(from).or_default() += bytes.len();
                net.hear(from, to, &bytes);
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

/// A peer that asks and never fetches: what waits for it is bounded, and nobody else waits.
#[test]
fn answers_that_nobody_acknowledges_are_bounded() {
    let options = Options {
        patience: LONG,
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
            s.says(&mut net, Some(&read_request(id, 1 << 20, &open, 0)));
        }
    }
    let busy = net[b].drops.get(&Dropped::Busy).copied().unwrap_or(0);
    assert!(busy > 0, "{:?}", net[b].drops);
    // All of it in the time that a good peer and the program itself need, and a little more.
    net.post(a, b, read(1, open.remote(0)).from(&[theirs.all()]));
    net.post(b, a, write(2, theirs.remote(0)).from(&[open.part(0, 1000)]));
    net.run(5 * 1000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[b].completed()[0].status, Status::Success);
    let answered: usize = seen.borrow().values().flatten().map(Vec::len).sum();
    // A window for each, now and then a probe.
    assert!(answered < strangers.len() * (4 << 20), "{answered}");
}

/// Messages that strangers begin and never end do not cost a good peer its own, of which some is acknowledged.
#[test]
fn a_reliable_message_is_never_given_up_for_another() {
    let mut net = Ether::new(3, Link::default());
    let a = net.join(Kind::Rd, options());
    let b = net.join(Kind::Rd, options());
    let seen = watch(&mut net);
    let mr = net[a].host.register(10_000, access::ALL);
    let text: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
    net[a].host.fill(&mr, &text);
    let inbox = net[b].host.register(20_000, access::ALL);
    net[b].recv(7, &[inbox.all()]);
    // The first datagram of it arrives; the link is cut behind that.
    let cut = Rc::new(RefCell::new(None));
    let (at, left) = (net[b].addr, Rc::clone(&cut));
    let (mut inner, mut data) = (net.filter.take().unwrap(), 0);
    net.filter = Some(Box::new(move |d| {
        if d.to == at && d.bytes.len() > 1000 {
            data += 1;
            if data > 1 && left.borrow().is_none() {
                return false;
            }
        }
        inner(d)
    }));
    net.post(a, b, send(1).from(&[mr.all()]));
    net.run(10 * MS);
    // Strangers fill every place, and want more.
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
            s.says(&mut net, Some(&half(id, false)));
        }
    }
    assert!(net[b].drops.contains_key(&Dropped::Busy));
    *cut.borrow_mut() = Some(());
    net.run(2000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    let got = net[b].received();
    assert_eq!((got[0].wr_id, got.len()), (7, 1));
    assert_eq!(net[b].host.bytes(&inbox)[40..10_040], text);
    // And while they hold all that they can get, it goes on.
    net.post(a, b, write(2, inbox.remote(0)).from(&[mr.all()]));
    net.run(2000 * MS);
    assert_eq!(net[a].completed()[0].status, Status::Success);
    assert_eq!(net[b].qp.counters().evicted, 0);
}

/// Without order a packet may be refused that waited and was acknowledged: its message fails, once those before it came.
#[test]
fn what_waits_without_order_can_be_refused() {
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
    // The Send waited for a receive; the one that comes is too short for it.
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

/// Without order a long message may have a gap at every other datagram: they all close.
#[test]
fn a_long_message_without_order_may_have_many_gaps() {
    for recorded in [false, true] {
        let options = Options {
            ordered: false,
            plain_writes: !recorded,
            ..options()
        };
        let mut net = Ether::new(5, Link::default());
        let a = net.join(Kind::Rd, options);
        let b = net.join(Kind::Rd, options);
        let len = 400_000;
        let mr = net[a].host.register(len, access::ALL);
        let text: Vec<u8> = (0..len as u32).map(|n| (n % 249) as u8).collect();
        net[a].host.fill(&mr, &text);
        let inbox = net[b].host.register(len + 40, access::ALL);
        net[b].recv(1, &[inbox.all()]);
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
