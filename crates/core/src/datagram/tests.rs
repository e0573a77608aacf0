//! Tests with two queue pairs, a simple memory table, and a list of datagrams instead of a network.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use smallvec::smallvec;

use super::grh::tests::read;
use super::*;
use crate::verbs::access::Access;
use crate::verbs::cq::Cq;
use crate::verbs::mr::{Memory, Pinned, Region, Registration};
use crate::verbs::qp;
use crate::verbs::rnic::Rnic;
use crate::verbs::rq::RecvQueue;
use crate::verbs::srq::Srq;
use crate::verbs::wc::{Completion, WcOp};
use crate::verbs::wr::{Bind, Op, Payload, RecvRequest, Remote, Sge};
use crate::wire::dgram::{self, Shim};
use crate::wire::rdmap::Opcode;
use crate::wire::{Stag, To, ddp};

const PD: u32 = 3;
const THE_QKEY: u32 = 0x1111_1111;
const ALL: Access = Access(0xf);

/// Memory whose addresses are indexes.
#[derive(Clone, Default)]
struct Table(Arc<Mutex<Vec<u8>>>);

impl Table {
    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        self.0.lock().unwrap()[at as usize..][..len].to_vec()
    }
    fn write(&self, at: u64, bytes: &[u8]) {
        self.0.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

impl Memory for Table {
    fn place(&self, to: &Pinned<'_>, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= to.len());
        self.write(to.start() + offset, bytes);
    }
    fn gather(&self, from: &Pinned<'_>, offset: u64, len: u64, out: &mut Vec<u8>) {
        assert!(offset + len <= from.len());
        out.extend(self.read(from.start() + offset, len as usize));
    }
    fn update(&self, _: &Pinned<'_>, _: &mut dyn FnMut(u64) -> u64) -> u64 {
        panic!("no test here executes an atomic")
    }
}

/// One end: a queue pair with its own device.
struct End {
    qp: DatagramQp,
    addr: SocketAddr,
    cq: Arc<Cq>,
    table: Table,
    region: Arc<Region>,
}

const SIZE: usize = 64 * 1024;

fn numbers(seed: u32) -> impl FnMut() -> u32 {
    let mut n = seed;
    move || {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        n.rotate_left(13)
    }
}

impl End {
    fn new(kind: Kind, host: u8, port: u16, index: u8, srq: Option<Arc<Srq>>) -> Self {
        Self::with(kind, Options::default(), host, port, index, srq)
    }

    fn with(
        kind: Kind,
        options: Options,
        host: u8,
        port: u16,
        index: u8,
        srq: Option<Arc<Srq>>,
    ) -> Self {
        let table = Table::default();
        table.0.lock().unwrap().resize(SIZE, 0);
        let rnic = Arc::new(Rnic {
            regions: Default::default(),
            memory: Box::new(table.clone()),
            observer: None,
        });
        let what = Registration {
            start: 0,
            len: SIZE as u64,
            base: 0x1000_0000,
            access: ALL,
            pd: PD,
            present: None,
        };
        let mut random = numbers(u32::from(host) + 1);
        let region = rnic.regions.register(&what, &mut random).unwrap();
        let cq = Arc::new(Cq::new(64, None));
        let rq = match srq {
            Some(srq) => RecvQueue::Shared(srq),
            None => RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: 16,
                max_sge: 4,
            },
        };
        let parts = Parts {
            rnic,
            qpn: u32::from(port) << 8 | u32::from(index),
            pd: PD,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            rq,
            capacity: qp::Capacity {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 128,
            },
            sig_all: false,
        };
        Self {
            qp: DatagramQp::new(parts, kind, options, [u64::from(random()), u64::from(host)]),
            addr: SocketAddr::new(IpAddr::from([10, 0, 0, host]), port),
            cq,
            table,
            region,
        }
    }

    fn go(&mut self, to: State) {
        use mask::*;
        let attr = Attr {
            qkey: THE_QKEY,
            access: ALL,
            dest_qpn: 7,
            ..Attr::default()
        };
        let uc = self.qp.kind() == Kind::Uc;
        for next in [State::Init, State::Rtr, State::Rts] {
            let given = STATE
                | match (next, uc) {
                    (State::Init, false) => PKEY_INDEX | PORT | QKEY,
                    (State::Init, true) => PKEY_INDEX | PORT | ACCESS_FLAGS,
                    (State::Rtr, true) => AV | PATH_MTU | DEST_QPN | RQ_PSN,
                    (State::Rts, _) => SQ_PSN,
                    _ => 0,
                };
            self.qp.modify(given, Some(next), None, &attr).unwrap();
            if next == to {
                return;
            }
        }
    }

    fn destination(&self) -> Destination {
        Destination {
            addr: self.addr,
            source: None,
            qpn: self.qp.base.qpn,
            qkey: THE_QKEY,
            hop_limit: 9,
            traffic_class: 0x20,
        }
    }

    fn sge(&self, at: u64, len: u32) -> Sge {
        Sge {
            addr: self.region.base() + at,
            len,
            lkey: self.region.stag(),
        }
    }

    fn recv(&mut self, id: u64, at: u64, len: u32) {
        let sges = smallvec![self.sge(at, len)];
        self.qp.post_recv(RecvRequest { id, sges }).unwrap();
    }

    fn done(&self) -> Vec<Completion> {
        let mut all = Vec::new();
        self.cq.poll(64, |_, entry| all.push(entry.clone()));
        all
    }

    /// Returns all datagrams that can be sent. The socket accepts them at once.
    fn tx(&mut self) -> Vec<TxDatagram> {
        let mut all = Vec::new();
        loop {
            let mut out = Vec::new();
            self.qp.poll_tx(&mut out);
            if out.is_empty() {
                if self.qp.stall().is_some() {
                    // In most of these tests the peer sends no reports.
                    self.qp.handle_stall();
                    continue;
                }
                return all;
            }
            self.qp.handle_written(out.len());
            all.append(&mut out);
        }
    }

    fn arrival(&self, to: &Self) -> Arrival {
        Arrival {
            from: self.addr,
            to: Some(to.addr.ip()),
            hop_limit: 9,
            traffic_class: 0x20,
        }
    }

    fn receive_datagram(&mut self, from: &Self, bytes: &[u8]) -> Result<(), Dropped> {
        self.qp.handle_rx(&from.arrival(self), bytes)
    }
}

fn pair(kind: Kind) -> (End, End) {
    let mut a = End::new(kind, 1, 4000, 5, None);
    let mut b = End::new(kind, 2, 5000, 6, None);
    a.go(State::Rts);
    b.go(State::Rts);
    if kind == Kind::Uc {
        a.qp.set_peer(b.destination());
        b.qp.set_peer(a.destination());
    }
    (a, b)
}

const SEND: Op = Op::Send {
    imm: None,
    invalidate: None,
};
const SEND_IMM: Op = Op::Send {
    imm: Some([1, 2, 3, 4]),
    invalidate: None,
};

fn request(id: u64, op: Op, payload: Payload, to: &End) -> WorkRequest {
    WorkRequest {
        id,
        op,
        payload,
        signaled: true,
        solicited: false,
        ack_later: false,
        fence: false,
        destination: Some(to.destination()),
        srq: None,
    }
}

fn inline(bytes: &[u8]) -> Payload {
    Payload::Inline(bytes.into())
}

fn write(to: &End, at: u64, imm: Option<[u8; 4]>) -> Op {
    Op::Write {
        remote: Remote {
            rkey: to.region.stag(),
            to: To(to.region.base() + at),
        },
        imm,
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251 + 1) as u8).collect()
}

fn statuses(all: &[Completion]) -> Vec<(u64, Status)> {
    all.iter().map(|e| (e.wr_id, e.status)).collect()
}

// ---------------------------------------------------------------------- UD

#[test]
fn ud_send_of_every_form_arrives_after_its_route_header() {
    let bytes = pattern(300);
    for op in [SEND, SEND_IMM] {
        for solicited in [false, true] {
            for form in 0..4 {
                let (mut a, mut b) = pair(Kind::Ud);
                a.table.write(100, &bytes);
                let payload = match form {
                    0 => Payload::empty(),
                    1 => inline(&bytes[..60]),
                    2 => Payload::Sges(smallvec![a.sge(100, 300)]),
                    _ => Payload::Sges(smallvec![
                        a.sge(100, 1),
                        a.sge(0, 0),
                        a.sge(101, 98),
                        a.sge(199, 201)
                    ]),
                };
                let len = payload.len() as usize;
                b.recv(77, 1000, 4096 + 40);
                let mut wr = request(5, op, payload, &b);
                wr.solicited = solicited;
                a.qp.post_send(wr).unwrap();
                let sent = a.tx();
                assert_eq!(sent.len(), 1);
                assert_eq!((sent[0].to, sent[0].hop_limit), (b.addr, 9));
                assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));

                let done = a.done();
                assert_eq!(statuses(&done), [(5, Status::Success)]);
                assert_eq!(done[0].op, WcOp::Send);
                let got = b.done();
                assert_eq!(statuses(&got), [(77, Status::Success)]);
                let got = &got[0];
                assert_eq!(
                    (got.op, got.byte_len as usize, got.qpn),
                    (WcOp::Recv, len + 40, b.qp.base.qpn)
                );
                assert_eq!((got.src_qpn, got.grh), (a.qp.base.qpn, true));
                assert_eq!(got.imm.is_some(), op == SEND_IMM);
                assert_eq!(got.solicited, solicited);
                assert_eq!(b.table.read(1040, len), bytes[..len]);
                assert_eq!(b.table.read(1040 + len as u64, 1), [0]);
                let route = read(&b.table.read(1000, 40)).unwrap();
                let on_wire = sent[0].bytes.len();
                assert_eq!(route, (a.addr.ip(), b.addr.ip(), 9, 0x20, on_wire));
                assert_eq!(b.qp.counters().rx_messages, 1);
            }
        }
    }
}

#[test]
fn ud_qkey_must_be_the_receivers_and_a_controlled_one_is_the_senders_own() {
    for (qkey, own, arrives) in [
        (THE_QKEY, 1, true),
        (THE_QKEY + 1, 1, false),
        (0x8000_0000, THE_QKEY, true),
        (0x8000_0000 | THE_QKEY, 1, false),
    ] {
        let (mut a, mut b) = pair(Kind::Ud);
        a.qp.attr_mut().qkey = own;
        b.recv(1, 0, 100);
        let mut wr = request(1, SEND, inline(b"x"), &b);
        wr.destination.as_mut().unwrap().qkey = qkey;
        a.qp.post_send(wr).unwrap();
        let sent = a.tx();
        let expected = if arrives { Ok(()) } else { Err(Dropped::Qkey) };
        assert_eq!(b.receive_datagram(&a, &sent[0].bytes), expected);
        assert_eq!(b.qp.counters().rx_qkey, u64::from(!arrives));
        assert_eq!(b.done().len(), usize::from(arrives));
    }
}

#[test]
fn ud_message_of_4096_bytes_fits_and_of_one_more_fails_locally() {
    let (mut a, mut b) = pair(Kind::Ud);
    b.recv(1, 0, 4096 + 40);
    for (id, len) in [(1, 4096), (2, 4097), (3, 1)] {
        let payload = Payload::Sges(smallvec![a.sge(0, len)]);
        a.qp.post_send(request(id, SEND, payload, &b)).unwrap();
    }
    let sent = a.tx();
    assert_eq!(sent.len(), 1);
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    assert_eq!(b.done()[0].byte_len, 4096 + 40);
    assert_eq!(
        statuses(&a.done()),
        [
            (1, Status::Success),
            (2, Status::LocalLength),
            (3, Status::Flushed)
        ]
    );
    // Only the send queue stopped; a change back to RTS starts it again.
    assert_eq!(a.qp.state(), State::Sqe);
    a.qp.post_send(request(4, SEND, inline(b"x"), &b)).unwrap();
    assert_eq!(statuses(&a.done()), [(4, Status::Flushed)]);
    a.qp.modify(mask::STATE, Some(State::Rts), None, &Attr::default())
        .unwrap();
    a.qp.post_send(request(5, SEND, inline(b"x"), &b)).unwrap();
    assert_eq!(a.tx().len(), 1);
    assert_eq!(statuses(&a.done()), [(5, Status::Success)]);
}

#[test]
fn ud_receive_that_is_too_short_for_route_header_and_message_stays_posted() {
    for (room, fits) in [(44, false), (45, true)] {
        let (mut a, mut b) = pair(Kind::Ud);
        b.recv(1, 0, room);
        a.qp.post_send(request(1, SEND, inline(b"hello"), &b))
            .unwrap();
        let sent = a.tx();
        let expected = if fits { Ok(()) } else { Err(Dropped::TooLong) };
        assert_eq!(b.receive_datagram(&a, &sent[0].bytes), expected);
        assert_eq!(b.qp.counters().rx_bounds, u64::from(!fits));
        assert_eq!(b.done().len(), usize::from(fits));
        if !fits {
            assert_eq!(b.table.read(0, 64), [0; 64]);
            a.qp.post_send(request(2, SEND, inline(b"hell"), &b))
                .unwrap();
            let sent = a.tx();
            assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
            assert_eq!(statuses(&b.done()), [(1, Status::Success)]);
        }
    }
}

#[test]
fn ud_without_a_receive_drops_and_counts() {
    let (mut a, mut b) = pair(Kind::Ud);
    a.qp.post_send(request(1, SEND, inline(b"hello"), &b))
        .unwrap();
    let sent = a.tx();
    assert_eq!(
        b.receive_datagram(&a, &sent[0].bytes),
        Err(Dropped::NoReceive)
    );
    assert_eq!(b.qp.counters().rx_no_recv, 1);
    assert_eq!(b.qp.state(), State::Rts);
    assert!(b.done().is_empty());
}

#[test]
fn ud_multicast_reaches_a_queue_pair_with_any_index() {
    let (mut a, mut b) = pair(Kind::Ud);
    b.recv(1, 0, 100);
    let mut wr = request(1, SEND, inline(b"x"), &b);
    let group = SocketAddr::from(([239, 1, 1, 1], 4000));
    let to = wr.destination.as_mut().unwrap();
    (to.addr, to.qpn) = (group, MULTICAST_QPN);
    a.qp.post_send(wr).unwrap();
    let sent = a.tx();
    assert_eq!(sent[0].to, group);
    assert_eq!(destination_index(&sent[0].bytes), Some(0xff));
    let mut arrival = a.arrival(&b);
    assert_eq!(
        b.qp.handle_rx(&arrival, &sent[0].bytes),
        Err(Dropped::Index)
    );
    arrival.to = Some(group.ip());
    assert_eq!(b.qp.handle_rx(&arrival, &sent[0].bytes), Ok(()));
    let (_, to, ..) = read(&b.table.read(0, 40)).unwrap();
    assert_eq!(to, group.ip());
    // The broadcast address of a subnet is a group for a queue pair that has joined it.
    let subnet = IpAddr::from([10, 0, 0, 255]);
    arrival.to = Some(subnet);
    b.recv(2, 0, 100);
    for joined in [false, true, false] {
        if joined {
            b.qp.join(subnet);
        } else {
            b.qp.leave(subnet);
        }
        let accepted = b.qp.handle_rx(&arrival, &sent[0].bytes);
        let wanted = if joined { Ok(()) } else { Err(Dropped::Index) };
        assert_eq!(accepted, wanted);
    }
}

fn destination_index(bytes: &[u8]) -> Option<u8> {
    let index = rx::destination_index(bytes);
    assert_eq!(index, dgram::parse(bytes).ok().map(|d| d.shim.dst_index));
    index
}

#[test]
fn operations_that_the_kind_does_not_do_are_refused_when_posted() {
    let (mut a, b) = pair(Kind::Ud);
    let (mut c, _) = pair(Kind::Uc);
    let remote = Remote {
        rkey: Stag(1),
        to: To(0),
    };
    let bind = Bind {
        window: Stag(1),
        rkey: Stag(1),
        mr: Stag(1),
        addr: 0,
        len: 0,
        access: Access::NONE,
    };
    let invalidating = Op::Send {
        imm: None,
        invalidate: Some(Stag(1)),
    };
    let add = Op::FetchAdd { remote, add: 1 };
    let swap = Op::CompareSwap {
        remote,
        compare: 0,
        swap: 0,
    };
    for (op, uc) in [
        (SEND, true),
        (Op::Write { remote, imm: None }, true),
        (Op::LocalInvalidate { stag: Stag(1) }, true),
        (Op::Bind(bind), true),
        (Op::Read { remote }, false),
        (add, false),
        (swap, false),
        (invalidating, false),
    ] {
        let wr = request(1, op, Payload::empty(), &b);
        assert_eq!(a.qp.post_send(wr.clone()).is_ok(), op == SEND, "{op:?}");
        assert_eq!(c.qp.post_send(wr).is_ok(), uc, "{op:?}");
    }
    let mut wr = request(1, SEND, Payload::empty(), &b);
    wr.destination = None;
    assert!(matches!(
        a.qp.post_send(wr),
        Err(Misuse::InvalidArgument(_))
    ));
}

#[test]
fn posting_and_receiving_depend_on_the_state() {
    let (mut a, mut b) = pair(Kind::Ud);
    a.qp.post_send(request(1, SEND, inline(b"x"), &b)).unwrap();
    let sent = a.tx();
    b.qp.reset();
    assert!(b.qp.post_recv(recv(1)).is_err());
    for (state, receives) in [
        (State::Init, false),
        (State::Rtr, true),
        (State::Rts, true),
        (State::Sqd, true),
        (State::Sqe, true),
        (State::Error, false),
        (State::Reset, false),
    ] {
        b.qp.set_state(state);
        b.qp.attr_mut().qkey = THE_QKEY;
        if state == State::Init {
            b.recv(1, 0, 100);
        }
        let wr = request(1, SEND, inline(b"x"), &a);
        let may_send = matches!(state, State::Rts | State::Sqd | State::Sqe | State::Error);
        assert_eq!(b.qp.post_send(wr).is_ok(), may_send, "{state:?}");
        let got = b.receive_datagram(&a, &sent[0].bytes);
        let expected = match (receives, state) {
            (false, _) => Err(Dropped::State),
            (true, State::Rtr) => Ok(()),
            (true, _) => Err(Dropped::NoReceive),
        };
        assert_eq!(got, expected, "{state:?}");
        // Datagrams are sent in RTS only.
        let mut out = Vec::new();
        b.qp.poll_tx(&mut out);
        out.retain(|d| !is_report(&d.bytes));
        assert_eq!(out.len(), usize::from(state == State::Rts), "{state:?}");
    }
}

fn is_report(bytes: &[u8]) -> bool {
    dgram::parse(bytes).unwrap().header.opcode() == Opcode::Control
}

fn recv(id: u64) -> RecvRequest {
    RecvRequest {
        id,
        sges: smallvec![],
    }
}

#[test]
fn every_request_is_flushed_exactly_once_and_in_order() {
    for kind in [Kind::Ud, Kind::Uc] {
        let (mut a, b) = pair(kind);
        for id in 0..3 {
            a.recv(100 + id, 0, 100);
            a.qp.post_send(request(id, SEND, inline(b"x"), &b)).unwrap();
        }
        let mut out = Vec::new();
        a.qp.poll_tx(&mut out);
        a.qp.handle_written(1);
        a.qp.modify(mask::STATE, Some(State::Error), None, &Attr::default())
            .unwrap();
        use Status::{Flushed, Success};
        assert_eq!(
            statuses(&a.done()),
            [
                (0, Success),
                (1, Flushed),
                (2, Flushed),
                (100, Flushed),
                (101, Flushed),
                (102, Flushed)
            ]
        );
        // The socket accepted the datagrams after the flush, so the result is ignored.
        a.qp.handle_written(2);
        a.qp.handle_send_error();
        a.recv(103, 0, 100);
        a.qp.post_send(request(3, SEND, inline(b"x"), &b)).unwrap();
        assert_eq!(statuses(&a.done()), [(103, Flushed), (3, Flushed)]);
        assert!(a.tx().is_empty());
    }
}

#[test]
fn a_send_completes_only_when_the_socket_accepted_it() {
    let (mut a, b) = pair(Kind::Ud);
    for id in 0..3 {
        let mut wr = request(id, SEND, inline(b"x"), &b);
        wr.signaled = id != 1;
        a.qp.post_send(wr).unwrap();
    }
    let mut out = Vec::new();
    a.qp.poll_tx(&mut out);
    assert_eq!(out.len(), 3);
    assert!(a.done().is_empty());
    a.qp.handle_written(1);
    assert_eq!(statuses(&a.done()), [(0, Status::Success)]);
    a.qp.handle_written(1);
    assert!(a.done().is_empty(), "not signaled");
    a.qp.handle_send_error();
    assert_eq!(statuses(&a.done()), [(2, Status::LocalQpOperation)]);
    assert_eq!(a.qp.state(), State::Rts);
    assert_eq!(a.qp.counters().tx_errors, 1);
}

#[test]
fn sq_drained_is_raised_after_the_last_datagram() {
    let (mut a, b) = pair(Kind::Ud);
    a.qp.post_send(request(0, SEND, inline(b"x"), &b)).unwrap();
    let mut out = Vec::new();
    a.qp.poll_tx(&mut out);
    let given = mask::STATE | mask::EN_SQD_ASYNC_NOTIFY;
    a.qp.modify(given, Some(State::Sqd), None, &Attr::default())
        .unwrap();
    a.qp.post_send(request(1, SEND, inline(b"x"), &b)).unwrap();
    assert_eq!(a.qp.poll_event(), None);
    assert!(a.qp.is_draining());
    a.qp.handle_written(1);
    assert_eq!(a.qp.poll_event(), Some(AsyncEvent::SqDrained));
    assert!(!a.qp.is_draining());
    assert!(a.tx().is_empty());
    a.qp.modify(mask::STATE, Some(State::Rts), None, &Attr::default())
        .unwrap();
    assert_eq!(a.tx().len(), 1);
}

#[test]
fn a_request_with_deregistered_memory_fails() {
    // The memory of a send request is deregistered before the request is taken from the queue, the memory of a receive
    // before the message arrives.
    let (mut a, mut b) = pair(Kind::Ud);
    b.recv(9, 0, 100);
    let payload = Payload::Sges(smallvec![a.sge(0, 8)]);
    a.qp.post_send(request(1, SEND, payload.clone(), &b))
        .unwrap();
    let sent = a.tx();
    a.qp.post_send(request(2, SEND, payload, &b)).unwrap();
    a.qp.base.rnic.regions.deregister(&a.region).unwrap();
    assert!(a.tx().is_empty());
    assert_eq!(
        statuses(&a.done()),
        [(1, Status::Success), (2, Status::LocalProtection)]
    );
    assert_eq!(a.qp.state(), State::Sqe);

    b.qp.base.rnic.regions.deregister(&b.region).unwrap();
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Err(Dropped::Local));
    assert_eq!(statuses(&b.done()), [(9, Status::LocalProtection)]);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn an_aborted_message_fails_once_and_leaves_no_state() {
    let (mut a, b) = pair(Kind::Uc);
    a.qp.set_segment(64);
    let payload = Payload::Sges(smallvec![a.sge(0, 8192)]);
    let op = write(&b, 0, None);
    a.qp.post_send(request(1, op, payload, &b)).unwrap();
    let mut out = Vec::new();
    a.qp.poll_tx(&mut out);
    a.qp.base.rnic.regions.deregister(&a.region).unwrap();
    assert!(!out.is_empty());
    let mut more = Vec::new();
    a.qp.poll_tx(&mut more);
    assert!(more.is_empty());
    assert_eq!(statuses(&a.done()), [(1, Status::LocalProtection)]);
    a.qp.handle_written(1);
    a.qp.handle_send_error();
    a.qp.set_state(State::Rts);
    a.qp.post_send(request(2, SEND, inline(b"x"), &b)).unwrap();
    a.qp.poll_tx(&mut more);
    a.qp.handle_written(out.len() - 3);
    a.qp.handle_send_error();
    a.qp.handle_send_error();
    assert_eq!(statuses(&a.done()), [(2, Status::LocalQpOperation)]);
}

#[test]
fn a_full_completion_queue_fails_the_queue_pair() {
    let (mut a, b) = pair(Kind::Ud);
    a.cq.resize(1).unwrap();
    for id in 0..3 {
        a.qp.post_send(request(id, SEND, inline(b"x"), &b)).unwrap();
    }
    a.tx();
    assert_eq!(a.qp.state(), State::Error);
    assert_eq!(a.qp.poll_event(), Some(AsyncEvent::QpFatal));
}

// ---------------------------------------------------------------------- shared receives

#[test]
fn a_shared_queue_provides_receives_and_raises_the_limit_and_last_wqe_events() {
    for kind in [Kind::Ud, Kind::Uc] {
        let (mut a, _) = pair(kind);
        let srq = Arc::new(Srq::new(8, 1, 2, PD));
        let mut b = End::new(kind, 2, 5000, 6, Some(srq.clone()));
        b.go(State::Rts);
        if kind == Kind::Uc {
            a.qp.set_peer(b.destination());
            b.qp.set_peer(a.destination());
        }
        for id in 0..2 {
            let sges = smallvec![b.sge(1000 * id, 1000)];
            srq.post(RecvRequest { id, sges }).unwrap();
        }
        assert!(b.qp.post_recv(recv(1)).is_err());
        a.qp.post_send(request(1, SEND, inline(b"x"), &b)).unwrap();
        let sent = a.tx();
        assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
        assert_eq!(statuses(&b.done()), [(0, Status::Success)]);
        assert_eq!(b.qp.poll_event(), Some(AsyncEvent::SrqLimit));
        for _ in 0..2 {
            b.qp.set_state(State::Error);
            assert!(
                b.done().is_empty(),
                "the other receive belongs to the shared queue"
            );
        }
        assert_eq!(b.qp.poll_event(), Some(AsyncEvent::LastWqe));
        assert_eq!(b.qp.poll_event(), None);
        assert_eq!(srq.take().unwrap().request.id, 1);
    }
}

#[test]
fn a_used_receive_returns_to_the_shared_queue_on_reset() {
    let (mut a, _) = pair(Kind::Uc);
    let srq = Arc::new(Srq::new(8, 1, 0, PD));
    let mut b = End::new(Kind::Uc, 2, 5000, 6, Some(srq.clone()));
    b.go(State::Rts);
    a.qp.set_peer(b.destination());
    b.qp.set_peer(a.destination());
    let sges = smallvec![b.sge(0, 1000)];
    srq.post(RecvRequest { id: 4, sges }).unwrap();
    let sent = five(&mut a, &b, SEND, 1);
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    assert!(srq.take().is_none());
    b.qp.reset();
    assert_eq!(srq.take().unwrap().request.id, 4);
}

// ---------------------------------------------------------------------- UC

const LEN: usize = 4 * 64 + 10;

/// Five datagrams of a message that starts at offset 0 of the sender's memory.
fn five(a: &mut End, b: &End, op: Op, id: u64) -> Vec<TxDatagram> {
    a.qp.set_segment(64);
    a.table.write(0, &pattern(LEN));
    let payload = Payload::Sges(smallvec![a.sge(0, 100), a.sge(100, LEN as u32 - 100)]);
    a.qp.post_send(request(id, op, payload, b)).unwrap();
    let sent = a.tx();
    assert_eq!(sent.len(), 5);
    assert_eq!(statuses(&a.done()), [(id, Status::Success)]);
    sent
}

fn uc_ops(b: &End) -> [Op; 4] {
    let imm = Some([5, 6, 7, 8]);
    [SEND, SEND_IMM, write(b, 2000, None), write(b, 2000, imm)]
}

/// What the receiver should have after a whole message: one completion, or none for a plain Write.
fn arrived(b: &End, op: Op, id: u64) {
    assert_eq!(b.table.read(2000, LEN), pattern(LEN), "{op:?}");
    assert_eq!(b.table.read(2000 + LEN as u64, 1), [0]);
    let got = b.done();
    let (kind, imm) = match op {
        Op::Write { imm: None, .. } => {
            assert!(got.is_empty());
            return;
        }
        Op::Write { imm, .. } => (WcOp::RecvWriteImm, imm),
        Op::Send { imm, .. } => (WcOp::Recv, imm),
        _ => panic!("not an operation of UC"),
    };
    assert_eq!(statuses(&got), [(id, Status::Success)]);
    let got = &got[0];
    assert_eq!((got.op, got.imm), (kind, imm));
    assert_eq!((got.byte_len as usize, got.grh), (LEN, false));
}

#[test]
fn uc_message_of_every_kind_arrives_in_any_order_of_its_datagrams() {
    for which in 0..4 {
        for order in 0..120_usize {
            let (mut a, mut b) = pair(Kind::Uc);
            let op = uc_ops(&b)[which];
            b.recv(50, 2000, LEN as u32 + 1);
            let mut sent = five(&mut a, &b, op, 1);
            let mut n = order;
            while !sent.is_empty() {
                let at = n % sent.len();
                n /= sent.len();
                let datagram = sent.remove(at);
                assert!(b.done().is_empty());
                assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
            }
            arrived(&b, op, 50);
            assert_eq!(b.qp.counters().rx_messages, 1);
        }
    }
}

#[test]
fn uc_loss_of_any_datagram_loses_only_its_message() {
    for which in 0..4 {
        for lost in 0..5 {
            let (mut a, mut b) = pair(Kind::Uc);
            let op = uc_ops(&b)[which];
            b.recv(50, 2000, LEN as u32 + 1);
            b.recv(51, 8000, LEN as u32 + 1);
            let sent = five(&mut a, &b, op, 1);
            for (i, datagram) in sent.iter().enumerate() {
                if i != lost {
                    assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
                }
            }
            assert!(b.done().is_empty());
            // The next message uses the receive that the first one had, or would have had.
            b.table.write(2000, &[0; LEN]);
            for datagram in five(&mut a, &b, op, 2) {
                assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
            }
            arrived(&b, op, 50);
            assert_eq!(b.qp.counters().evicted, 1);
            // The lost datagram was only delayed. It must not write into memory that is in use again.
            b.table.write(2000, &[0; LEN]);
            assert_eq!(
                b.receive_datagram(&a, &sent[lost].bytes),
                Err(Dropped::Late)
            );
            assert_eq!(b.table.read(2000, LEN), [0; LEN]);
            assert!(b.done().is_empty());
        }
    }
}

#[test]
fn uc_duplicate_of_any_datagram_is_placed_once() {
    for which in 0..4 {
        for twice in 0..5 {
            let (mut a, mut b) = pair(Kind::Uc);
            let op = uc_ops(&b)[which];
            b.recv(50, 2000, LEN as u32 + 1);
            b.recv(51, 8000, LEN as u32 + 1);
            let sent = five(&mut a, &b, op, 1);
            for (i, datagram) in sent.iter().enumerate() {
                assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
                if i == twice {
                    let at = 2000 + 64 * i as u64;
                    let there = b.table.read(at, 10);
                    b.table.write(at, &[0; 10]);
                    assert_eq!(
                        b.receive_datagram(&a, &datagram.bytes),
                        Err(Dropped::Duplicate)
                    );
                    assert_eq!(b.table.read(at, 10), [0; 10]);
                    b.table.write(at, &there);
                }
            }
            arrived(&b, op, 50);
            for datagram in &sent {
                assert_eq!(
                    b.receive_datagram(&a, &datagram.bytes),
                    Err(Dropped::Duplicate)
                );
            }
            assert!(b.done().is_empty());
            assert_eq!(b.qp.counters().rx_dup, 6);
        }
    }
}

#[test]
fn uc_messages_complete_in_the_order_they_were_sent() {
    let (mut a, mut b) = pair(Kind::Uc);
    for id in 0..3 {
        b.recv(50 + id, 2000, LEN as u32 + 1);
    }
    let first = five(&mut a, &b, SEND, 1);
    let second = five(&mut a, &b, SEND, 2);
    // The second message overtakes the first, which is given up. Datagrams of the first are late.
    for datagram in second.iter().chain(&first) {
        let late = first.contains(datagram);
        let expected = if late { Err(Dropped::Late) } else { Ok(()) };
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), expected);
    }
    assert_eq!(statuses(&b.done()), [(50, Status::Success)]);
}

#[test]
fn uc_messages_without_bytes() {
    for which in 0..4 {
        let (mut a, mut b) = pair(Kind::Uc);
        let op = uc_ops(&b)[which];
        b.recv(50, 0, 0);
        a.qp.post_send(request(1, op, Payload::empty(), &b))
            .unwrap();
        let sent = a.tx();
        assert_eq!(sent.len(), 1);
        assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
        let completions = usize::from(which != 2);
        assert_eq!(b.done().len(), completions);
        assert_eq!(
            b.receive_datagram(&a, &sent[0].bytes),
            Err(Dropped::Duplicate)
        );
        assert!(b.done().is_empty());
    }
}

#[test]
fn uc_accepts_only_its_peer() {
    let (mut a, mut b) = pair(Kind::Uc);
    b.recv(1, 2000, LEN as u32);
    let sent = five(&mut a, &b, SEND, 1);
    for wrong in 0..3 {
        let mut arrival = a.arrival(&b);
        let peer = a.destination();
        match wrong {
            0 => arrival.from.set_ip(IpAddr::from([10, 0, 0, 9])),
            1 => arrival.from.set_port(4001),
            _ => b.qp.set_peer(Destination {
                qpn: peer.qpn + 1,
                ..peer
            }),
        }
        assert_eq!(
            b.qp.handle_rx(&arrival, &sent[0].bytes),
            Err(Dropped::Source)
        );
    }
    assert_eq!(b.qp.counters().rx_stray, 3);
    // The same address as an IPv4-mapped IPv6 address is accepted.
    let mut arrival = a.arrival(&b);
    arrival.from.set_ip("::ffff:10.0.0.1".parse().unwrap());
    b.qp.set_peer(a.destination());
    assert_eq!(b.qp.handle_rx(&arrival, &sent[0].bytes), Ok(()));
}

#[test]
fn uc_write_is_placed_only_where_it_may_be() {
    let writes = |what: &dyn Fn(&mut End) -> (u64, Access)| {
        let (mut a, mut b) = pair(Kind::Uc);
        let (at, access) = what(&mut b);
        b.qp.attr_mut().access = access;
        let op = write(&b, at, None);
        let sent = five(&mut a, &b, op, 1);
        let results: Vec<_> = sent
            .iter()
            .map(|d| b.receive_datagram(&a, &d.bytes))
            .collect();
        let untouched = b.table.read(0, SIZE).iter().all(|byte| *byte == 0);
        assert_eq!(b.qp.state(), State::Rts);
        assert_eq!(b.qp.poll_event(), None);
        (results, untouched, b.qp.counters().rx_stag)
    };
    let end = (SIZE - LEN) as u64;
    let good = writes(&|_| (end, ALL));
    assert_eq!(good, (vec![Ok(()); 5], false, 0));
    let bad = (vec![Err(Dropped::Access); 5], true, 5);
    assert_eq!(writes(&|_| (end + 1, ALL)), bad);
    assert_eq!(writes(&|_| (0, Access::LOCAL_WRITE)), bad);
    let gone = writes(&|b| {
        b.qp.base.rnic.regions.deregister(&b.region).unwrap();
        (0, ALL)
    });
    assert_eq!(gone, bad);
}

#[test]
fn uc_write_with_immediate_needs_a_receive_at_its_end() {
    let (mut a, mut b) = pair(Kind::Uc);
    let op = write(&b, 2000, Some([1; 4]));
    let sent = five(&mut a, &b, op, 1);
    for datagram in &sent[..4] {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
    assert_eq!(
        b.receive_datagram(&a, &sent[4].bytes),
        Err(Dropped::NoReceive)
    );
    b.recv(1, 0, 0);
    assert_eq!(
        b.receive_datagram(&a, &sent[4].bytes),
        Err(Dropped::NoReceive),
        "a refused message is not accepted later"
    );
    for datagram in five(&mut a, &b, op, 2) {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
    arrived(&b, write(&b, 2000, Some([1; 4])), 1);
}

#[test]
fn uc_send_longer_than_the_receive_is_dropped_as_a_whole() {
    let (mut a, mut b) = pair(Kind::Uc);
    b.recv(1, 2000, LEN as u32 - 1);
    for datagram in five(&mut a, &b, SEND, 1) {
        assert_eq!(
            b.receive_datagram(&a, &datagram.bytes),
            Err(Dropped::TooLong)
        );
    }
    assert_eq!(b.table.read(2000, LEN), [0; LEN]);
    a.qp.post_send(request(2, SEND, inline(b"x"), &b)).unwrap();
    let sent = a.tx();
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    assert_eq!(statuses(&b.done()), [(1, Status::Success)]);
}

#[test]
fn uc_datagrams_of_a_new_epoch_are_received_and_those_of_the_old_one_are_not() {
    let (mut a, mut b) = pair(Kind::Uc);
    b.recv(1, 2000, LEN as u32 + 1);
    a.qp.next_id = 1000;
    let old = five(&mut a, &b, SEND, 1);
    for datagram in &old[..3] {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
    a.qp.epoch ^= 0x5555;
    a.qp.next_id = 1;
    let new = five(&mut a, &b, SEND, 2);
    for (i, datagram) in new.iter().enumerate() {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
        if i < 4 {
            assert_eq!(b.receive_datagram(&a, &old[3].bytes), Err(Dropped::Late));
        }
    }
    arrived(&b, SEND, 1);
}

/// A forged datagram with another epoch has no effect if its message cannot be received. Otherwise the datagrams of the real peer are
/// dropped as late for a limited time.
#[test]
fn uc_forged_epoch_stops_the_peer_for_a_few_seconds_at_most() {
    let (mut a, mut b) = pair(Kind::Uc);
    let mut now = Duration::from_secs(100);
    for id in 0..4 {
        b.recv(id, 2000, 100);
    }
    let epoch = a.qp.epoch;
    let mut sends = |now: Duration, epoch: u16, len: usize| {
        a.qp.epoch = epoch;
        let payload = Payload::Sges(smallvec![a.sge(0, len as u32)]);
        a.qp.post_send(request(1, SEND, payload, &b)).unwrap();
        let sent = a.tx();
        b.qp.set_now(now);
        let result = b.receive_datagram(&a, &sent[0].bytes);
        (result, statuses(&b.done()).len())
    };
    assert_eq!(sends(now, epoch, 10), (Ok(()), 1));
    let forged = epoch ^ 0x5555;
    assert_eq!(sends(now, forged, 101), (Err(Dropped::TooLong), 0));
    assert_eq!(sends(now, epoch, 10), (Ok(()), 1));
    assert_eq!(sends(now, forged, 10), (Ok(()), 1));
    now += Duration::from_secs(5) - Duration::from_nanos(1);
    assert_eq!(sends(now, epoch, 10), (Err(Dropped::Late), 0));
    now += Duration::from_nanos(1);
    assert_eq!(sends(now, epoch, 10), (Ok(()), 1));
}

#[test]
fn uc_forged_message_that_is_refused_ends_no_message() {
    for is_send in [true, false] {
        for (which, why) in [
            (0, Dropped::Access),
            (1, Dropped::Late),
            (2, Dropped::TooLong),
        ] {
            let (mut a, mut b) = pair(Kind::Uc);
            b.recv(50, 2000, LEN as u32 + 1);
            let true_op = match is_send {
                true => SEND,
                false => write(&b, 2000, None),
            };
            let sent = five(&mut a, &b, true_op, 1);
            assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
            let beyond = write(&b, SIZE as u64, None);
            let (op, len) = [(beyond, 100), (beyond, 0), (SEND, LEN as u32 + 2)][which];
            let payload = Payload::Sges(smallvec![a.sge(0, len)]);
            a.qp.epoch ^= 0x5555;
            a.qp.post_send(request(2, op, payload, &b)).unwrap();
            let forged = a.tx();
            assert_eq!(b.receive_datagram(&a, &forged[0].bytes), Err(why));
            for datagram in &sent[1..] {
                assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
            }
            arrived(&b, true_op, 50);
        }
    }
}

#[test]
fn uc_forged_write_with_immediate_data_and_without_a_receive_ends_no_message() {
    let (mut a, mut b) = pair(Kind::Uc);
    let true_op = write(&b, 2000, None);
    let sent = five(&mut a, &b, true_op, 1);
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    a.qp.epoch ^= 0x5555;
    let payload = Payload::Sges(smallvec![a.sge(0, 100)]);
    let forged = write(&b, 2000, Some([7; 4]));
    a.qp.post_send(request(2, forged, payload, &b)).unwrap();
    let forged = a.tx();
    let refused = Err(Dropped::NoReceive);
    assert_eq!(b.receive_datagram(&a, &forged[0].bytes), refused);
    for datagram in &sent[1..] {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
}

#[test]
fn uc_flush_completes_the_receive_in_use_first() {
    let (mut a, mut b) = pair(Kind::Uc);
    b.recv(1, 2000, LEN as u32);
    b.recv(2, 2000, LEN as u32);
    let sent = five(&mut a, &b, SEND, 1);
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    b.qp.set_state(State::Error);
    assert_eq!(
        statuses(&b.done()),
        [(1, Status::Flushed), (2, Status::Flushed)]
    );
    assert_eq!(b.receive_datagram(&a, &sent[1].bytes), Err(Dropped::State));
    assert!(b.done().is_empty());
}

#[test]
fn uc_datagrams_of_one_message_must_agree() {
    let (mut a, mut b) = pair(Kind::Uc);
    b.recv(1, 2000, LEN as u32);
    let sent = five(&mut a, &b, SEND, 1);
    assert_eq!(b.receive_datagram(&a, &sent[0].bytes), Ok(()));
    let parsed = dgram::parse(&sent[1].bytes).unwrap();
    let shim = Shim {
        length: LEN as u32 + 1,
        ..parsed.shim
    };
    let mut bytes = dgram::emit_head(&shim, &parsed.header);
    bytes.extend(parsed.payload);
    dgram::seal(&mut bytes);
    assert_eq!(b.receive_datagram(&a, &bytes), Err(Dropped::Mismatch));
    for datagram in &sent[1..] {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
    assert_eq!(statuses(&b.done()), [(1, Status::Success)]);
}

#[test]
fn uc_memory_operations_are_local() {
    let (mut a, b) = pair(Kind::Uc);
    let mut random = numbers(9);
    let window =
        a.qp.base
            .rnic
            .regions
            .alloc_window(PD, true, &mut random)
            .unwrap();
    let access = Access::MW_BIND | Access::LOCAL_WRITE;
    let what = Registration {
        start: 0,
        len: 64,
        base: 0,
        access,
        pd: PD,
        present: None,
    };
    let mr = a.qp.base.rnic.regions.register(&what, &mut random).unwrap();
    let bind = Op::Bind(Bind {
        window,
        rkey: window,
        mr: mr.stag(),
        addr: 0,
        len: 8,
        access: Access::REMOTE_WRITE,
    });
    let invalidate = Op::LocalInvalidate { stag: window };
    for (id, op) in [(1, bind), (2, invalidate), (3, invalidate)] {
        a.qp.post_send(request(id, op, Payload::empty(), &b))
            .unwrap();
    }
    assert!(a.tx().is_empty());
    assert_eq!(
        statuses(&a.done()),
        [
            (1, Status::Success),
            (2, Status::Success),
            (3, Status::LocalProtection)
        ]
    );
}

#[test]
fn uc_large_message_is_sent_in_bounded_batches() {
    let (mut a, mut b) = pair(Kind::Uc);
    a.qp.set_segment(0);
    assert_eq!(a.qp.segment, bounds::DATAGRAM_PAYLOAD_MIN);
    let payload = Payload::Sges(smallvec![a.sge(0, 8192)]);
    a.qp.post_send(request(1, write(&b, 0, None), payload, &b))
        .unwrap();
    let mut out = Vec::new();
    a.qp.poll_tx(&mut out);
    assert_eq!(out.len(), bounds::DATAGRAM_BATCH);
    a.qp.handle_written(out.len());
    assert!(a.done().is_empty());
    let rest = a.tx();
    assert_eq!(rest.len(), 64);
    assert_eq!(a.done().len(), 1);
    for datagram in out.iter().chain(&rest) {
        assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
    }
    assert_eq!(b.qp.counters().rx_messages, 1);

    // The longest datagram is one that UDP can carry.
    a.qp.set_segment(usize::MAX);
    let op = Op::Send {
        imm: Some([0; 4]),
        invalidate: None,
    };
    let payload = Payload::Sges(smallvec![a.sge(0, SIZE as u32)]);
    a.qp.post_send(request(2, op, payload, &b)).unwrap();
    let sent = a.tx();
    assert_eq!(sent.len(), 2);
    assert!(sent[0].bytes.len() <= 65_507);
}

// ---------------------------------------------------------------------- pace

#[test]
fn a_sender_waits_for_a_slow_receiver() {
    for kind in [Kind::Ud, Kind::Uc] {
        let (mut a, mut b) = pair(kind);
        b.qp.set_room(1 << 20);
        let mut on_the_way = VecDeque::new();
        let mut most = 0;
        let mut delivered = 0;
        let mut posted = 0;
        while delivered < 2000 {
            while posted < 2000
                && a.qp
                    .post_send(request(posted, SEND, inline(&[7; 100]), &b))
                    .is_ok()
            {
                posted += 1;
            }
            let mut out = Vec::new();
            a.qp.poll_tx(&mut out);
            a.qp.handle_written(out.len());
            on_the_way.extend(out);
            most = most.max(on_the_way.len());
            a.done();
            // The receiver is slower than the sender.
            for _ in 0..3 {
                let Some(datagram) = on_the_way.pop_front() else {
                    break;
                };
                b.recv(delivered, 1000, 200);
                assert_eq!(b.receive_datagram(&a, &datagram.bytes), Ok(()));
                delivered += 1;
            }
            b.done();
            let mut back = Vec::new();
            if b.qp.wants_tx() {
                b.qp.poll_tx(&mut back);
                b.qp.handle_written(back.len());
            }
            for datagram in back {
                assert_eq!((datagram.to, datagram.from), (a.addr, Some(b.addr.ip())));
                assert_eq!(a.receive_datagram(&b, &datagram.bytes), Ok(()));
            }
        }
        // The room is 1 MiB, and each datagram takes some 1.3 KB of it.
        assert!((500..1000).contains(&most), "{kind:?} {most}");
        assert_eq!(a.qp.counters().tx_stalls, 0);
        assert!(a.qp.counters().rx_dgrams < 20);
    }
}

#[test]
fn a_receiver_that_never_reports_stalls_its_sender_once() {
    let (mut a, b) = pair(Kind::Uc);
    let payload = Payload::Sges(smallvec![a.sge(0, 60_000)]);
    let mut sent = Vec::new();
    for id in 0..16 {
        let wr = request(id, write(&b, 0, None), payload.clone(), &b);
        a.qp.post_send(wr).unwrap();
    }
    a.qp.poll_tx(&mut sent);
    assert!(sent.len() < 4, "{}", sent.len());
    assert_eq!((a.qp.stall(), a.qp.wants_tx()), (Some(1), false));
    a.qp.handle_stall();
    assert_eq!((a.qp.stall(), a.qp.wants_tx()), (None, true));
    let mut before = 0;
    while sent.len() > before {
        before = sent.len();
        a.qp.poll_tx(&mut sent);
    }
    assert!((8..16).contains(&sent.len()), "{}", sent.len());
    // The rest is sent when the deadline has passed.
    for _ in 0..16 {
        if let Some(at) = a.qp.poll_timeout() {
            a.qp.set_now(at);
            a.qp.handle_timeout();
            a.qp.poll_tx(&mut sent);
        }
    }
    assert_eq!(sent.len(), 16);
    assert_eq!(a.qp.counters().tx_stalls, 1);
}

// ---------------------------------------------------------------------- random datagrams

#[test]
fn no_datagram_breaks_a_queue_pair() {
    let mut next = numbers(0x5eed);
    for kind in [Kind::Ud, Kind::Uc] {
        let (mut a, mut b) = pair(kind);
        let mut seeds = Vec::new();
        for op in [SEND, SEND_IMM] {
            a.qp.post_send(request(1, op, inline(&pattern(90)), &b))
                .unwrap();
            seeds.append(&mut a.tx());
        }
        a.done();
        if kind == Kind::Uc {
            for op in uc_ops(&b) {
                seeds.append(&mut five(&mut a, &b, op, 1));
            }
        }
        let mut accepted = 0;
        for round in 0..30_000_u32 {
            let mut bytes = seeds[next() as usize % seeds.len()].bytes.to_vec();
            bytes.truncate(bytes.len() - 4);
            for _ in 0..next() % 4 {
                match next() % 4 {
                    0 => bytes.truncate(next() as usize % (bytes.len() + 1)),
                    1 => bytes.extend([next() as u8; 3]),
                    _ => {
                        let at = next() as usize % bytes.len().max(1);
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte = match next() % 3 {
                                0 => next() as u8,
                                1 => *byte ^ 1 << (next() % 8),
                                _ => 0xff,
                            };
                        }
                    }
                }
            }
            // Most have a correct checksum, so that the checks after it are reached.
            if !next().is_multiple_of(16) {
                dgram::seal(&mut bytes);
            }
            if round % 8 == 0 {
                b.recv(u64::from(round), 2000, 200 + next() % 200);
            }
            accepted += usize::from(b.receive_datagram(&a, &bytes).is_ok());
            if round % 64 == 0 {
                b.done();
                b.qp.base.rq.clear();
                // A damaged message number may make all later ones late, so the state is reset.
                b.qp.incoming = Incoming::default();
            }
        }
        assert!(accepted > 100, "{accepted}");
        assert_eq!(b.qp.state(), State::Rts);
        let counters = b.qp.counters();
        let sum: u64 = counters
            .named()
            .iter()
            .filter(|(name, _)| {
                name.starts_with("rx_") && !matches!(*name, "rx_dgrams" | "rx_messages")
            })
            .map(|(_, n)| n)
            .sum();
        assert_eq!(sum + accepted as u64, counters.rx_dgrams);
    }
}

/// The gaps of all messages of a queue pair are limited together. Each message may still have a few, and a datagram
/// that fills a gap is accepted.
#[test]
fn gaps_of_all_messages_together_are_bounded() {
    let options = Options {
        one_sided: true,
        ..Options::default()
    };
    let a = End::new(Kind::Ud, 1, 4000, 5, None);
    let mut b = End::with(Kind::Ud, options, 2, 5000, 6, None);
    b.go(State::Rts);
    let (stag, base) = (b.region.stag(), b.region.base());
    let receive_datagram = |qp: &mut DatagramQp, offset: u32| {
        let shim = Shim {
            epoch: 1,
            qkey: THE_QKEY,
            id: 9,
            length: 8192,
            offset,
            sub_op: dgram::SUB_RECORD,
            attributes: dgram::ATTR_RECORD,
            dst_index: 6,
            src_index: 5,
            immediate: None,
            commit: false,
            parity: false,
            group: 0,
            segment: 0,
        };
        let header = ddp::Header::Tagged(ddp::Tagged {
            last: false,
            opcode: Opcode::WriteRecord,
            stag,
            to: To(base + u64::from(offset)),
        });
        let mut bytes = dgram::emit_head(&shim, &header);
        bytes.extend([7; 8]);
        dgram::seal(&mut bytes);
        let arrival = Arrival {
            from: a.addr,
            to: None,
            hop_limit: 9,
            traffic_class: 0,
        };
        qp.handle_rx(&arrival, &bytes)
    };
    b.qp.messages.note_runs(0, bounds::OPEN_RUNS - 1);
    for n in 0..bounds::DATAGRAM_RANGES as u32 {
        assert_eq!(receive_datagram(&mut b.qp, 16 * n), Ok(()), "gap {n}");
    }
    let one_more = 16 * bounds::DATAGRAM_RANGES as u32;
    assert_eq!(receive_datagram(&mut b.qp, one_more), Err(Dropped::Gaps));
    assert_eq!(receive_datagram(&mut b.qp, 8), Ok(()));
    assert_eq!(receive_datagram(&mut b.qp, one_more), Ok(()));
    assert_eq!(
        receive_datagram(&mut b.qp, one_more + 16),
        Err(Dropped::Gaps)
    );
    // Simulates that gaps of other messages have been filled.
    b.qp.messages.note_runs(bounds::OPEN_RUNS - 1, 0);
    assert_eq!(receive_datagram(&mut b.qp, one_more + 16), Ok(()));
}

/// On a reliable queue pair, a packet that would exceed the limit of gaps waits until there are fewer gaps.
#[test]
fn gaps_that_are_too_many_wait_on_a_reliable_queue_pair() {
    const PARTS: usize = 3 * bounds::DATAGRAM_RANGES;
    let options = Options {
        one_sided: true,
        ordered: false,
        segment: options::Segment::PathMtu,
        ..Options::default()
    };
    let mut a = End::with(Kind::Rd, options, 1, 4000, 5, None);
    let mut b = End::with(Kind::Rd, options, 2, 5000, 6, None);
    a.go(State::Rts);
    b.go(State::Rts);
    a.qp.set_paths(|_| 64);
    b.qp.set_room(bounds::DATAGRAM_WINDOW_MAX);
    let text = pattern(64 * PARTS);
    let mut now = Duration::ZERO;
    let mut both = |a: &mut End, b: &mut End| {
        now += Duration::from_millis(1);
        a.qp.set_now(now);
        b.qp.set_now(now);
        a.qp.handle_timeout();
        b.qp.handle_timeout();
    };
    let mut parts = Vec::new();
    // The first nine messages make the window large enough for the whole last message.
    for id in 0..10 {
        a.table.write(0, &text);
        a.table.write(0, &[id]);
        let payload = Payload::Sges(smallvec![a.sge(0, text.len() as u32)]);
        let all = request(id.into(), write(&b, 20_000, None), payload, &b);
        a.qp.post_send(all).unwrap();
        for _ in 0..1000 {
            both(&mut a, &mut b);
            for packet in a.tx() {
                if id == 9 {
                    parts.push(packet);
                } else {
                    b.receive_datagram(&a, &packet.bytes).unwrap();
                }
            }
            both(&mut a, &mut b);
            for packet in b.tx() {
                a.receive_datagram(&b, &packet.bytes).unwrap();
            }
            if id == 9 || !a.done().is_empty() {
                break;
            }
        }
    }
    assert_eq!(parts.len(), PARTS);
    b.qp.messages.note_runs(0, bounds::OPEN_RUNS - 1);
    let mut busy = 0;
    for first in [0, 1] {
        for packet in parts.iter().skip(first).step_by(2) {
            match b.receive_datagram(&a, &packet.bytes) {
                Ok(()) => {}
                Err(why) => {
                    assert_eq!(why, Dropped::Busy);
                    busy += 1;
                }
            }
        }
    }
    assert_eq!(busy, PARTS / 2 - bounds::DATAGRAM_RANGES);
    assert_eq!(b.table.read(20_000, 1), [9]);
    assert_eq!(b.table.read(20_001, text.len() - 1), text[1..]);
    for packet in b.tx() {
        a.receive_datagram(&b, &packet.bytes).unwrap();
    }
    assert_eq!(statuses(&a.done()), [(9, Status::Success)]);
}

/// If a request of a reliable connection fails, it has the status of the cause, and all later requests are flushed,
/// even those that were acknowledged before it.
#[test]
fn requests_after_a_failed_one_of_a_reliable_connection_are_flushed() {
    let mut a = End::new(Kind::Rc, 1, 4000, 5, None);
    let mut b = End::new(Kind::Rc, 2, 5000, 6, None);
    for end in [&mut a, &mut b] {
        end.qp.attr_mut().access = ALL;
        end.qp.set_state(State::Rts);
    }
    a.qp.set_peer(b.destination());
    b.qp.set_peer(a.destination());
    for id in 0..4 {
        b.recv(id, 2000, 100);
        a.qp.post_send(request(id, SEND, inline(&pattern(50)), &b))
            .unwrap();
    }
    let mut lost = 0;
    for ms in 0..20 {
        a.qp.set_now(Duration::from_millis(ms));
        b.qp.set_now(Duration::from_millis(ms));
        for packet in a.tx() {
            let (head, data) = crate::wire::rd::parse(&packet.bytes).unwrap();
            // The second packet never arrives.
            if data.is_some() && head.seq.wrapping_sub(head.base) == 1 && lost == 0 {
                lost = head.seq;
            }
            if data.is_none() || head.seq != lost {
                b.receive_datagram(&a, &packet.bytes).unwrap();
            }
        }
        for packet in b.tx() {
            a.receive_datagram(&b, &packet.bytes).unwrap();
        }
    }
    assert_ne!(lost, 0);
    assert_eq!(statuses(&a.done()), [(0, Status::Success)]);
    // Then the peer stops answering.
    for s in 1..100 {
        a.qp.set_now(Duration::from_secs(s));
        a.qp.handle_timeout();
        a.tx();
    }
    let all = [
        (1, Status::RetryExceeded),
        (2, Status::Flushed),
        (3, Status::Flushed),
    ];
    assert_eq!(statuses(&a.done()), all);
    assert_eq!(a.qp.state(), State::Error);
}

/// The attributes of a reliable connection limit how long a peer may be silent, but the limit is at least the option
/// `peer_timeout`.
#[test]
fn the_wait_for_a_silent_peer_follows_the_attributes() {
    // The attributes allow 4.096 µs × 2^timeout for each of eight attempts.
    for (timeout, from, to) in [(20, 34, 37), (10, 5, 8), (0, 90, 100)] {
        use mask::*;
        let mut a = End::new(Kind::Rc, 1, 4000, 5, None);
        let b = End::new(Kind::Rc, 2, 5000, 6, None);
        let attr = Attr {
            timeout,
            retry_cnt: 7,
            access: ALL,
            dest_qpn: 7,
            ..Attr::default()
        };
        let steps = [
            (State::Init, PKEY_INDEX | PORT | ACCESS_FLAGS),
            (
                State::Rtr,
                AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
            ),
            (
                State::Rts,
                SQ_PSN | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC,
            ),
        ];
        for (next, given) in steps {
            a.qp.modify(STATE | given, Some(next), None, &attr).unwrap();
        }
        a.qp.set_peer(b.destination());
        a.qp.post_send(request(1, SEND, inline(b"x"), &b)).unwrap();
        let mut gave_up = 0;
        while gave_up < 95 && a.qp.state() == State::Rts {
            gave_up += 1;
            a.qp.set_now(Duration::from_secs(gave_up));
            a.qp.handle_timeout();
            a.tx();
        }
        assert!(from <= gave_up && gave_up <= to, "{timeout}: {gave_up} s");
    }
}

#[test]
fn datagrams_of_consecutive_requests_share_an_entry_until_they_are_written() {
    use super::types::{SendEffect, Unwritten};
    let effects = [
        SendEffect::End(4),
        SendEffect::End(5),
        SendEffect::End(6),
        SendEffect::End(8),
        SendEffect::Nothing,
        SendEffect::Nothing,
        SendEffect::Part(9),
        SendEffect::Part(9),
        SendEffect::End(9),
        SendEffect::Ask(10),
        SendEffect::End(11),
        SendEffect::End(12),
    ];
    for most in 1..=effects.len() {
        let mut unwritten = Unwritten::default();
        effects.iter().for_each(|effect| unwritten.push(*effect));
        let mut taken = Vec::new();
        while let Some((effect, count)) = unwritten.take(most) {
            assert!(count as usize <= most && count > 0);
            taken.extend((0..count).map(|n| effect.after(n)));
        }
        assert_eq!(taken, effects, "at most {most}");
    }
}

#[test]
fn each_message_of_a_run_has_its_own_route_header() {
    let (mut a, mut b) = pair(Kind::Ud);
    let mut c = End::new(Kind::Ud, 3, 4000, 5, None);
    c.go(State::Rts);
    let lens = [10, 10, 40, 0, 40];
    for (n, len) in lens.iter().enumerate() {
        b.recv(n as u64, 200 * n as u64, 200);
        let payload = inline(&vec![n as u8; *len]);
        a.qp.post_send(request(0, SEND, payload.clone(), &b))
            .unwrap();
        c.qp.post_send(request(0, SEND, payload, &b)).unwrap();
    }
    let (from_a, from_c) = (a.tx(), c.tx());
    let run = |list: &[TxDatagram], b: &mut End, from: &Arrival| {
        let bytes = list.iter().map(|d| &*d.bytes);
        b.qp.handle_rx_run(from, bytes, |_, why| panic!("dropped: {why:?}"));
    };
    // The third message has another source, and the fourth another hop limit.
    let arrival = a.arrival(&b);
    let farther = Arrival {
        hop_limit: 3,
        ..arrival
    };
    let other = c.arrival(&b);
    run(&from_a[..2], &mut b, &arrival);
    run(&from_c[2..3], &mut b, &other);
    run(&from_a[3..4], &mut b, &farther);
    run(&from_a[4..], &mut b, &arrival);
    let arrivals = [arrival, arrival, other, farther, arrival];
    let done = b.done();
    assert_eq!(done.len(), lens.len());
    for (n, (len, arrival)) in lens.iter().zip(arrivals).enumerate() {
        let grh = b.table.read(200 * n as u64, grh::LEN);
        let datagram = 44 + len + 4;
        let route = (
            arrival.from.ip(),
            b.addr.ip(),
            arrival.hop_limit,
            arrival.traffic_class,
            datagram,
        );
        assert_eq!(read(&grh), Some(route), "message {n}");
        assert_eq!(done[n].wr_id, n as u64);
        assert_eq!(b.table.read(200 * n as u64 + 40, *len), vec![n as u8; *len]);
    }
}
