//! Queue pairs of this process that communicate through sockets of the host.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anywarp_core::datagram::MULTICAST_QPN;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::mr::{Region, Registration};
use anywarp_core::verbs::qp::{Capacity, mask};
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::{Completion, Status, WcOp};
use anywarp_core::verbs::wr::{Op, Payload, Remote, Sge};
use anywarp_core::wire::To;
use smallvec::smallvec;

use super::*;
use crate::engine::Engine;
use crate::net::route::GROUP_PORT;

const PD: u32 = 7;
const THE_QKEY: u32 = 0x1234;

struct End {
    qp: Arc<DgramQp>,
    cq: Arc<Cq>,
    buffer: Box<[u8]>,
    region: Arc<Region>,
    ip: IpAddr,
}

impl End {
    fn new(kind: Kind, size: usize) -> Self {
        Self::with(&Context::open().unwrap(), kind, size)
    }

    fn with(context: &Arc<Context>, kind: Kind, size: usize) -> Self {
        let cq = Arc::new(Cq::new(4096, None));
        let rnic = Arc::clone(&context.engine.rnic);
        let buffer = vec![0_u8; size].into_boxed_slice();
        let start = buffer.as_ptr().expose_provenance() as u64;
        let what = Registration {
            start,
            len: size as u64,
            base: start,
            access: Access(0xf),
            pd: PD,
            present: None,
        };
        let region = rnic.regions.register(&what, &mut random_u32).unwrap();
        let qp = DgramQp::new(context, None, kind, Options::default(), |qpn| Parts {
            rnic,
            qpn,
            pd: PD,
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            rq: RecvQueue::Own {
                requests: Default::default(),
                max_wr: 4096,
                max_sge: 2,
            },
            capacity: Capacity {
                max_send_wr: 4096,
                max_recv_wr: 4096,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline: 64,
            },
            sig_all: true,
        })
        .unwrap();
        let ip = gids::gids()[0].ip;
        Self {
            qp,
            cq,
            buffer,
            region,
            ip,
        }
    }

    fn to_rts(&self, route: Option<Route>) {
        use mask::*;
        let uc = route.is_some();
        let attr = Attr {
            qkey: THE_QKEY,
            access: Access(0xf),
            dest_qpn: route.map_or(0, |r| r.qpn),
            ..Attr::default()
        };
        for next in [State::Init, State::Rtr, State::Rts] {
            let given = STATE
                | match (next, uc) {
                    (State::Init, false) => PKEY_INDEX | PORT | QKEY,
                    (State::Init, true) => PKEY_INDEX | PORT | ACCESS_FLAGS,
                    (State::Rtr, true) => AV | PATH_MTU | DEST_QPN | RQ_PSN,
                    (State::Rts, _) => SQ_PSN,
                    _ => 0,
                };
            let route = route.filter(|_| next == State::Rtr);
            self.qp
                .modify(given, Some(next), None, &attr, route)
                .unwrap();
        }
    }

    fn destination(&self) -> Destination {
        Destination {
            addr: SocketAddr::new(self.ip, (self.qp.common.number >> 8) as u16),
            source: None,
            qpn: self.qp.common.number,
            qkey: THE_QKEY,
            hop_limit: 5,
            traffic_class: 0x10,
        }
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.region.base() + at as u64,
            len: len as u32,
            lkey: self.region.stag(),
        }
    }

    fn recv(&self, id: u64, at: usize, len: usize) {
        let sges = smallvec![self.sge(at, len)];
        let request = RecvRequest { id, sges };
        self.qp.post_recv(std::iter::once(Ok(request))).unwrap();
    }

    fn send(&self, op: Op, at: usize, len: usize, to: Option<Destination>) {
        let request = WorkRequest {
            id: 1,
            op,
            payload: Payload::Sges(smallvec![self.sge(at, len)]),
            signaled: true,
            solicited: false,
            ack_later: false,
            fence: false,
            destination: to,
            srq: None,
        };
        self.qp.post_send(std::iter::once(Ok(request))).unwrap();
    }

    /// Returns the next completion of a receive if `receive` is true, and otherwise that of a send. Discards completions of the other
    /// kind. Waits for up to 5 seconds.
    fn next(&self, receive: bool) -> Option<Completion> {
        let until = clock::now() + Duration::from_secs(5);
        let mut found = None;
        while found.is_none() && clock::now() < until {
            self.cq.poll(1, |_, entry| found = Some(entry.clone()));
            let wanted =
                |e: &Completion| matches!(e.op, WcOp::Recv | WcOp::RecvWriteImm) == receive;
            found = found.filter(wanted);
            self.qp.common.context.engine.on_idle_poll();
        }
        found
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.qp.destroy();
        let _ = self
            .qp
            .common
            .context
            .engine
            .rnic
            .regions
            .deregister(&self.region);
    }
}

const SEND: Op = Op::Send {
    imm: Some([1, 2, 3, 4]),
    invalidate: None,
};

fn pattern(bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i * 7 + i / 251) as u8;
    }
}

#[test]
fn ud_messages_of_many_lengths_arrive_with_their_route() {
    let mut a = End::new(Kind::Ud, 8192);
    let b = End::new(Kind::Ud, 8192);
    pattern(&mut a.buffer);
    a.to_rts(None);
    b.to_rts(None);
    for len in [0, 1, 100, 1428, 1429, 4096] {
        b.recv(9, 0, 4096 + 40);
        a.send(SEND, 0, len, Some(b.destination()));
        assert_eq!(a.next(false).unwrap().status, Status::Success);
        let got = b.next(true).unwrap();
        assert_eq!((got.status, got.wr_id), (Status::Success, 9));
        assert_eq!((got.byte_len as usize, got.grh), (len + 40, true));
        assert_eq!(
            (got.src_qpn, got.imm),
            (a.qp.common.number, Some([1, 2, 3, 4]))
        );
        assert_eq!(b.buffer[40..40 + len], a.buffer[..len]);
        match a.ip {
            IpAddr::V4(ip) => {
                assert_eq!(b.buffer[20], 0x45);
                // Type of service, time to live and both addresses, as they were sent and as the socket received
                // them.
                assert_eq!((b.buffer[21], b.buffer[28]), (0x10, 5));
                assert_eq!(b.buffer[32..36], ip.octets());
                assert_eq!(b.buffer[36..40], ip.octets());
            }
            IpAddr::V6(ip) => {
                assert_eq!(b.buffer[8..24], ip.octets());
                assert_eq!(b.buffer[24..40], ip.octets());
            }
        }
    }
}

#[test]
fn ud_burst_is_sent_in_runs_and_arrives_in_order() {
    let a = End::new(Kind::Ud, 64 * 1024);
    let b = End::new(Kind::Ud, 400 * 200);
    a.to_rts(None);
    b.to_rts(None);
    for id in 0..400 {
        b.recv(id, 200 * id as usize, 200);
    }
    let list = (0..400_usize).map(|i| {
        Ok(WorkRequest {
            id: i as u64,
            op: SEND,
            payload: Payload::Sges(smallvec![a.sge(i, 100 + i / 100)]),
            signaled: true,
            solicited: false,
            ack_later: false,
            fence: false,
            destination: Some(b.destination()),
            srq: None,
        })
    });
    a.qp.post_send(list).unwrap();
    for id in 0..400 {
        let got = b.next(true).unwrap();
        assert_eq!((got.wr_id, got.byte_len), (id, 140 + id as u32 / 100));
    }
    assert_eq!(b.qp.counters().rx_messages, 400);
}

/// Returns an iterator that permits further attempts for up to 30 seconds. A single attempt may fail because of tests that run at the same
/// time: polls of these tests that find nothing end corking, which keeps posted requests back to send them together.
fn attempts() -> impl Iterator<Item = ()> {
    let until = clock::now() + Duration::from_secs(30);
    std::iter::from_fn(move || {
        std::thread::sleep(Duration::from_millis(1));
        (clock::now() < until).then_some(())
    })
}

/// Posts until a request is corked, and returns how many requests were posted.
fn post_until_corked(a: &End, b: &End) -> usize {
    for n in 1..=40_000 {
        // Simulates another thread that polls and finds something.
        a.qp.common.context.engine.on_successful_poll();
        a.send(SEND, 0, 100, Some(b.destination()));
        if a.qp.lock().cork.has_posted() {
            return n;
        }
    }
    panic!("no request was corked");
}

#[test]
fn corked_requests_are_sent_when_polling_ends() {
    let (a, b) = (End::new(Kind::Ud, 100), End::new(Kind::Ud, 200));
    a.to_rts(None);
    b.to_rts(None);
    let posted = post_until_corked(&a, &b);
    let until = clock::now() + Duration::from_secs(5);
    let mut done = 0;
    while done < posted && clock::now() < until {
        // Polls the queue, but not the sockets.
        done +=
            a.cq.poll(64, |_, entry| assert_eq!(entry.status, Status::Success));
        std::thread::yield_now();
    }
    assert_eq!(done, posted);
}

/// Corks requests, makes `flush` send them, and posts another request. Returns whether that request is corked.
fn is_corked_after(flush: impl Fn(&End, &End)) -> bool {
    let (a, b) = (End::new(Kind::Ud, 100), End::new(Kind::Ud, 200));
    a.to_rts(None);
    b.to_rts(None);
    attempts().any(|()| {
        post_until_corked(&a, &b);
        while a.qp.lock().cork.has_posted() {
            flush(&a, &b);
        }
        a.send(SEND, 0, 100, Some(b.destination()));
        let held = a.qp.lock().cork.posted_requests();
        while a.cq.poll(64, |_, _| ()) > 0 {}
        held > 0
    })
}

#[test]
fn datagrams_posted_after_a_full_run_are_corked_too() {
    // Further requests fill the run (the datagrams that one system call sends), which is then sent, unless another thread sends it
    // earlier. This thread does not poll.
    assert!(is_corked_after(|a, b| a.send(
        SEND,
        0,
        100,
        Some(b.destination())
    )));
}

#[test]
fn datagrams_posted_after_an_idle_poll_that_sends_corked_ones_are_corked_too() {
    assert!(is_corked_after(|a, _| a
        .qp
        .common
        .context
        .engine
        .on_idle_poll()));
}

#[test]
fn corked_datagrams_are_sent_before_the_queue_pair_is_destroyed() {
    let (a, b) = (End::new(Kind::Ud, 100), End::new(Kind::Ud, 200));
    a.to_rts(None);
    b.to_rts(None);
    let posted = post_until_corked(&a, &b);
    a.qp.set_state(State::Error);
    let all = a.qp.counters().tx_dgrams;
    assert_eq!(all, posted as u64);
}

/// The lease is the time for which the worker leaves the sockets to polling threads. If posts did not renew it, the worker
/// would wake in the middle of a list of posts and contend for the socket: 1,800 times a second in a ping-pong.
#[test]
fn posts_of_datagrams_renew_the_lease_of_a_polling_thread() {
    // The port of this queue pair belongs to the engine of the process, even if queue pair `a` shares the port.
    let b = End::new(Kind::Ud, 200);
    let context = Context::of(Engine::without_worker().unwrap()).unwrap();
    let a = End::with(&context, Kind::Ud, 100);
    a.to_rts(None);
    b.to_rts(None);
    let engine = context.engine;
    // Repeats idle polls, a pause and a post, until in one attempt the lease is still running at the time of the post, and the post is
    // sent at once or corked as expected.
    let renews = |idle_polls: usize| {
        attempts().any(|()| {
            for _ in 0..idle_polls {
                engine.on_idle_poll();
            }
            std::thread::sleep(Duration::from_millis(1));
            let (before, _) = engine.lease_end();
            a.send(SEND, 0, 100, Some(b.destination()));
            let (after, runs) = engine.lease_end();
            let is_corked = a.qp.lock().cork.has_posted();
            while a.cq.poll(64, |_, _| ()) > 0 {}
            // A post after two idle polls is sent at once, and one after a single idle poll is corked.
            let tested = runs && is_corked == (idle_polls == 1);
            assert!(!tested || after > before, "{idle_polls} idle polls");
            tested
        })
    };
    assert!(renews(2), "no post was sent at once");
    assert!(renews(1), "no post was corked");
}

#[test]
fn uc_messages_larger_than_a_datagram() {
    const BIG: usize = 1 << 20;
    let mut a = End::new(Kind::Uc, BIG);
    let b = End::new(Kind::Uc, BIG);
    pattern(&mut a.buffer);
    let route = |from: &End, to: &End| {
        Some(Route {
            local: from.ip,
            remote: to.ip,
            qpn: to.qp.common.number,
            hop_limit: 5,
            traffic_class: 0,
            level: 0,
        })
    };
    a.to_rts(route(&a, &b));
    b.to_rts(route(&b, &a));
    let write = Op::Write {
        remote: Remote {
            rkey: b.region.stag(),
            to: To(b.region.base()),
        },
        imm: Some([9; 4]),
    };
    for (op, kind) in [(write, WcOp::RecvWriteImm), (SEND, WcOp::Recv)] {
        for len in [10, 100_000, BIG] {
            b.recv(3, 0, BIG);
            a.send(op, 0, len, None);
            assert_eq!(a.next(false).unwrap().status, Status::Success);
            let got = b.next(true).unwrap();
            assert_eq!((got.status, got.op), (Status::Success, kind));
            assert_eq!(got.byte_len as usize, len);
            assert_eq!(b.buffer[..len], a.buffer[..len]);
        }
    }
}

#[test]
fn multicast_reaches_every_member_and_no_other_queue_pair() {
    // Random groups, because members in other processes and hosts would receive and count the same datagrams.
    let [a, b, c, _] = random_u32().to_be_bytes();
    let v4 = Ipv4Addr::new(239, a | 0x80, b, c);
    let v6 = Ipv6Addr::new(0xff12, 0, 0, 0, 0, a.into(), b.into(), c.into());
    for group in [IpAddr::V4(v4), IpAddr::V6(v6)] {
        let table = gids::gids();
        let home = table.iter().find(|g| g.ip.is_ipv4() == group.is_ipv4());
        // Linux has no route for IPv6 multicast on the loopback interface. IPv4 is tested on every host.
        if group.is_ipv6() && home.is_none_or(|g| g.ip.is_loopback()) {
            continue;
        }
        let a = End::new(Kind::Ud, 4096);
        let b = End::new(Kind::Ud, 4096);
        let c = End::new(Kind::Ud, 4096);
        for end in [&a, &b, &c] {
            end.to_rts(None);
            for id in 0..3 {
                end.recv(id, 0, 4096);
            }
        }
        for end in [&a, &b] {
            end.qp.multicast(group, true).unwrap();
            end.qp.multicast(group, true).unwrap();
        }
        assert!(c.qp.multicast(group, false).is_err());
        let to = Destination {
            addr: SocketAddr::new(group, GROUP_PORT),
            qpn: MULTICAST_QPN,
            ..c.destination()
        };
        c.send(SEND, 0, 50, Some(to));
        assert_eq!(c.next(false).unwrap().status, Status::Success);
        for end in [&a, &b] {
            let got = end.next(true).unwrap();
            assert_eq!(
                (got.status, got.byte_len, got.src_qpn),
                (Status::Success, 90, c.qp.common.number),
                "{group}: {got:?}"
            );
        }
        a.qp.multicast(group, false).unwrap();
        c.send(SEND, 0, 50, Some(to));
        assert!(b.next(true).is_some());
        assert_eq!(a.qp.counters().rx_messages, 1);
        assert_eq!(b.qp.counters().rx_messages, 2);
        // `rx_dgrams` is not checked, because tests that run at the same time share the port, and a late datagram for a queue pair
        // that had this number before counts there.
        assert_eq!(c.qp.counters().rx_messages, 0);
    }
}

#[test]
fn a_send_that_the_kernel_refuses_fails_alone() {
    let a = End::new(Kind::Ud, 4096);
    let b = End::new(Kind::Ud, 4096);
    a.to_rts(None);
    b.to_rts(None);
    b.recv(1, 0, 4096);
    let mut refused = b.destination();
    // An address that this host does not have, from the range for documentation.
    refused.source = Some(match b.ip {
        IpAddr::V4(_) => Ipv4Addr::new(203, 0, 113, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    });
    a.send(SEND, 0, 10, Some(refused));
    assert_eq!(a.next(false).unwrap().status, Status::LocalQpOperation);
    a.send(SEND, 0, 10, Some(b.destination()));
    assert_eq!(a.next(false).unwrap().status, Status::Success);
    assert!(b.next(true).is_some());
}

#[test]
fn a_send_to_a_number_without_port_is_lost() {
    // 0 and 1 are the numbers of management queue pairs, which this device does not have.
    for qpn in [0, 1] {
        let a = End::new(Kind::Ud, 4096);
        let b = End::new(Kind::Ud, 4096);
        a.to_rts(None);
        b.to_rts(None);
        b.recv(1, 0, 4096);
        let mut nowhere = b.destination();
        nowhere.qpn = qpn;
        nowhere.addr.set_port(0);
        a.send(SEND, 0, 10, Some(nowhere));
        assert_eq!(a.next(false).unwrap().status, Status::Success);
        assert_eq!(a.qp.counters().tx_errors, 0);
        a.send(SEND, 0, 10, Some(b.destination()));
        assert_eq!(a.next(false).unwrap().status, Status::Success);
        assert!(b.next(true).is_some());
        assert_eq!(b.qp.counters().rx_messages, 1);
    }
}

#[test]
fn numbers_are_reused_and_a_destroyed_queue_pair_sends_nothing() {
    let a = End::new(Kind::Ud, 4096);
    let b = End::new(Kind::Ud, 4096);
    a.to_rts(None);
    b.to_rts(None);
    b.recv(1, 0, 4096);
    let (port, number) = (Arc::clone(&b.qp.common.port), b.qp.number());
    b.qp.destroy();
    // Tests that run at the same time share the port, and a late datagram for a queue pair that had this number may have arrived.
    let before = b.qp.counters().rx_dgrams;
    a.send(SEND, 0, 10, Some(b.destination()));
    assert_eq!(a.next(false).unwrap().status, Status::Success);
    // When a later datagram to the same port has arrived, the earlier one has too.
    let c = End::new(Kind::Ud, 4096);
    c.to_rts(None);
    c.recv(2, 0, 4096);
    let behind = Destination {
        addr: b.destination().addr,
        ..c.destination()
    };
    if c.qp.number() >> 8 == number >> 8 {
        a.send(SEND, 0, 10, Some(behind));
        assert!(c.next(true).is_some());
    } else {
        b.qp.udp.catch_up();
    }
    assert_eq!(b.qp.counters().rx_dgrams, before);
    assert_eq!(b.cq.poll(1, |_, entry| panic!("{entry:?}")), 0);
    // Other tests allocate and free numbers of the port at the same time, and one may keep this number until it ends.
    let until = clock::now() + Duration::from_secs(60);
    let mut came_back = c.qp.number() == number;
    while !came_back && clock::now() < until {
        let taken: Vec<u32> = std::iter::from_fn(|| port.take_index()).collect();
        came_back = taken.contains(&number);
        taken.iter().for_each(|number| port.release(*number));
    }
    assert!(came_back, "0x{number:06x} is still taken");
}
