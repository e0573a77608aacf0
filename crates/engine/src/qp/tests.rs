//! Queue pairs whose connection cannot be established, or only later.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::connection::{First, OfferAfter, Peer, StreamConfig};
use anywarp_core::llp::mpa::frame::TxBatch;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::mr::Registration;
use anywarp_core::verbs::qp::{Attr, Capacity, State, mask};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::Status;
use anywarp_core::verbs::wr::{Payload, RecvRequest, Sge, WorkRequest};
use anywarp_core::wire::control::{Control, Handover};
use anywarp_core::wire::ddp::Untagged;
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::trunk::{self, HEADER};
use anywarp_core::wire::{Msn, QN_SEND, Stag};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Inner, Manager, RcQp, Receive, Route};
use crate::clock;
use crate::config::Framing;
use crate::connect::trunks::Waiting as _;
use crate::context::Context;
use crate::engine::engine;
use crate::fd::EngineFd;
use crate::net::shm;
use crate::net::tcp::Tcp;
use crate::net::tcp::tests::{fill, shared};
use crate::net::trunk::{Member, Trunk};
use crate::reactor::Source as _;
use crate::sys::Io;

/// Bytes of an FPDU without payload.
const FPDU: usize = 24;

/// Longest wait for something that has to happen.
const WAIT: Duration = Duration::from_secs(20);

/// A queue pair and its completion queues.
struct End {
    qp: Arc<RcQp>,
    sends: Arc<Cq>,
    receives: Arc<Cq>,
}

impl End {
    fn new() -> Self {
        let context = Context::open().unwrap();
        let [sends, receives] = [(); 2].map(|()| Arc::new(Cq::new(16, None)));
        let parts = |qpn| Parts {
            rnic: Arc::clone(&context.engine.rnic),
            qpn,
            pd: 1,
            send_cq: Arc::clone(&sends),
            recv_cq: Arc::clone(&receives),
            rq: RecvQueue::Own {
                requests: std::collections::VecDeque::new(),
                max_wr: 10,
                max_sge: 1,
            },
            capacity: Capacity {
                max_send_wr: 10,
                max_recv_wr: 10,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
            },
            sig_all: true,
        };
        let qp = RcQp::new(&context, None, parts).unwrap();
        Self {
            qp,
            sends,
            receives,
        }
    }

    fn post_send(&self, id: u64) {
        let request = WorkRequest {
            id,
            ..WorkRequest::blank()
        };
        self.qp.post_send([Ok(request)].into_iter()).unwrap();
    }

    fn post_recv(&self, id: u64) {
        let sges = std::iter::empty().collect();
        let request = RecvRequest { id, sges };
        self.qp.post_recv([Ok(request)].into_iter()).unwrap();
    }

    fn state(&self) -> State {
        self.qp.query().0
    }

    fn is_connected(&self) -> bool {
        self.qp.lock().conn.is_attached()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

/// Waits until `done`. The test fails if this takes longer than [`WAIT`].
fn wait_for(what: &str, done: impl Fn() -> bool) {
    let until = clock::now() + WAIT;
    while !done() {
        assert!(clock::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the next completion of a queue.
fn next(cq: &Cq) -> (u64, Status) {
    let got = std::cell::Cell::new(None);
    wait_for("no completion", || {
        cq.poll(1, |_, c| got.set(Some((c.wr_id, c.status)))) > 0
    });
    got.get().unwrap()
}

impl End {
    /// Moves the queue pair to INIT and RTR, and perhaps to RTS, as `ibv_modify_qp(3)` does.
    fn to(&self, peer: u32, states: &[State]) {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let route = Route {
            local,
            remote: local,
            qpn: peer,
            hop_limit: 0,
            traffic_class: 0,
            level: 0,
        };
        let attr = Attr {
            port: 1,
            path_mtu: 3,
            timeout: 1,
            retry_cnt: 1,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            dest_qpn: peer,
            ..Attr::default()
        };
        for state in states {
            let more = match state {
                State::Init => mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS,
                State::Rtr => {
                    mask::AV
                        | mask::PATH_MTU
                        | mask::DEST_QPN
                        | mask::RQ_PSN
                        | mask::MAX_DEST_RD_ATOMIC
                        | mask::MIN_RNR_TIMER
                }
                State::Rts => {
                    mask::TIMEOUT
                        | mask::RETRY_CNT
                        | mask::RNR_RETRY
                        | mask::SQ_PSN
                        | mask::MAX_QP_RD_ATOMIC
                }
                _ => 0,
            };
            let route = (*state == State::Rtr).then_some(route);
            self.qp
                .modify(mask::STATE | more, Some(*state), None, &attr, route)
                .unwrap();
        }
    }

    fn early_connections(&self) -> usize {
        self.qp.lock().early_connections.len()
    }

    /// Whether the time has passed after which requests that wait for the connection fail.
    fn has_given_up(&self) -> bool {
        self.qp.lock().dial_until.is_none()
    }
}

const READY: [State; 3] = [State::Init, State::Rtr, State::Rts];

/// Two queue pairs. The first one has to dial.
fn dialer_and_peer() -> (End, End) {
    let (a, b) = (End::new(), End::new());
    if a.qp.number() < b.qp.number() {
        (a, b)
    } else {
        (b, a)
    }
}

/// The state of a peer while its dialer waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    /// It keeps the connection, and answers later.
    Init,
    /// It rejects the connection.
    Error,
}

/// The peer's program sets up its end so late that a posted request would have failed by then. The dialer has posted none, and an idle queue
/// pair waits without a limit.
#[test]
fn a_peer_that_is_late_is_connected() {
    for late in [Late::Init, Late::Error] {
        let (a, b) = dialer_and_peer();
        let (to_a, to_b) = (a.qp.number(), b.qp.number());
        b.qp.set_state(match late {
            Late::Init => State::Init,
            Late::Error => State::Error,
        });
        a.to(to_b, &READY);
        wait_for("the attempts have no limit", || a.has_given_up());
        // The earlier connection is replaced by that of the next attempt.
        std::thread::sleep(Duration::from_millis(1200));
        assert_eq!((a.state(), a.is_connected()), (State::Rts, false));
        assert!(b.early_connections() <= 1, "{late:?}");
        b.qp.set_state(State::Reset);
        b.to(to_a, &READY);
        b.post_recv(1);
        b.post_send(2);
        a.post_recv(3);
        assert_eq!(next(&b.sends), (2, Status::Success), "{late:?}");
        a.post_send(4);
        assert_eq!(next(&a.receives), (3, Status::Success), "{late:?}");
        assert_eq!(next(&a.sends), (4, Status::Success), "{late:?}");
        assert_eq!(next(&b.receives), (1, Status::Success), "{late:?}");
    }
}

/// A request that is posted after the dialer has given up waits for as long as an adapter would retransmit it, and fails only if the peer
/// does not come in this time.
#[test]
fn a_request_that_is_posted_after_the_limit_has_its_own_time() {
    for comes in [false, true] {
        let (a, b) = dialer_and_peer();
        let (to_a, to_b) = (a.qp.number(), b.qp.number());
        b.qp.set_state(State::Error);
        a.to(to_b, &READY);
        wait_for("the attempts have no limit", || a.has_given_up());
        if comes {
            // 2 s.
            a.qp.with_attr(|attr| (attr.timeout, attr.retry_cnt) = (18, 1));
        }
        a.post_send(1);
        let begin = clock::now();
        if comes {
            std::thread::sleep(Duration::from_millis(100));
            assert!(a.sends.is_empty());
            b.qp.set_state(State::Reset);
            b.to(to_a, &READY);
            b.post_recv(2);
            assert_eq!(next(&a.sends), (1, Status::Success));
            assert_eq!(next(&b.receives), (2, Status::Success));
        } else {
            assert_eq!(next(&a.sends), (1, Status::RetryExceeded));
            assert!(clock::now() - begin >= Duration::from_millis(150));
        }
    }
}

/// A stream of a socket that epoll refuses: a file.
fn unwatchable() -> Tcp {
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    Tcp::new(EngineFd::new(file), None, Vec::new(), Framing::Aligned)
}

fn config(managed: bool) -> StreamConfig {
    StreamConfig {
        crc: false,
        mulpdu: bounds::MULPDU_ANYWARP,
        mulpdu_anywarp: bounds::MULPDU_ANYWARP,
        peer: Peer::Anywarp,
        ird: 4,
        ord: 4,
        initiator: managed,
        first: First::Nothing,
        managed,
        stays: false,
        markers: false,
        offer_after: OfferAfter::NEVER,
    }
}

/// Counts how often the connection was reported as ended.
#[derive(Default)]
struct Ends(AtomicUsize);

impl Manager for Ends {
    fn started(&self) {}
    fn gone(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Ends {
    /// Makes a new object the manager of a queue pair.
    fn of(end: &End) -> Arc<Self> {
        let ends = Arc::new(Self::default());
        let weak: Weak<dyn Manager> = Arc::downgrade(&ends) as _;
        end.qp.manage(weak);
        ends
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_managed_connection_whose_socket_cannot_be_watched_ends() {
    // The connection is attached before or after the queue pair is ready to receive.
    for before in [false, true] {
        let end = End::new();
        let ends = Ends::of(&end);
        end.qp
            .set_state(if before { State::Init } else { State::Rts });
        end.post_recv(1);
        let now = clock::now();
        end.qp
            .with(|inner| end.qp.start(inner, unwatchable(), config(true), now));
        if before {
            assert_eq!((end.state(), ends.count()), (State::Init, 0));
            end.qp.set_state(State::Rtr);
        }
        assert_eq!((end.state(), end.qp.raw_fd()), (State::Error, None));
        assert_ne!(ends.count(), 0);
        assert_eq!(next(&end.receives), (1, Status::Flushed));
        end.post_send(2);
        assert_eq!(next(&end.sends), (2, Status::Flushed));
    }
}

#[test]
fn requests_on_a_socket_that_cannot_be_watched_fail() {
    for posted_before in [false, true] {
        let end = End::new();
        end.qp.set_state(State::Rts);
        end.qp.with_attr(|attr| attr.timeout = 1);
        if posted_before {
            end.post_send(1);
        }
        let now = clock::now();
        end.qp
            .with(|inner| end.qp.start(inner, unwatchable(), config(false), now));
        assert!(!end.is_connected());
        if !posted_before {
            end.post_send(1);
        }
        assert_eq!(next(&end.sends), (1, Status::RetryExceeded));
    }
}

/// A connected socket of a queue pair, and the socket of its peer.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    peer.set_read_timeout(Some(WAIT)).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    (ours, peer)
}

/// Waits until poll(2) reports `flags` for a socket.
fn wait_polled(socket: &TcpStream, flags: PollFlags) {
    let mut fds = [PollFd::new(socket, flags)];
    let time = Timespec {
        tv_sec: WAIT.as_secs().try_into().unwrap(),
        tv_nsec: 0,
    };
    assert_eq!(poll(&mut fds, Some(&time)).unwrap(), 1, "{flags:?}");
}

/// The FPDU, without a CRC, of a message that has only a header.
fn fpdu(header: &Untagged) -> Vec<u8> {
    let mut out = (Untagged::LEN as u16).to_be_bytes().to_vec();
    out.extend_from_slice(&header.emit());
    out.resize(out.len().next_multiple_of(4) + 4, 0);
    out
}

/// The header of an empty Send.
fn send_header(number: u32) -> Untagged {
    Untagged {
        last: true,
        opcode: Opcode::send(false, false),
        inv_stag: Stag(0),
        qn: QN_SEND,
        msn: Msn(number),
        mo: 0,
    }
}

#[test]
fn what_arrived_before_a_reset_is_received_when_a_send_fails() {
    // Either the peer closes its socket in the regular way (the first request after that is sent, and is answered by a reset), or it sends a
    // reset at once. The request whose sending fails is sent by one of two functions.
    for (resets, by_progress) in [(false, false), (false, true), (true, false), (true, true)] {
        let end = End::new();
        let (ours, mut peer) = sockets();
        let watched = ours.try_clone().unwrap();
        let tcp = Tcp::new(
            EngineFd::new(ours.into()),
            None,
            Vec::new(),
            Framing::Aligned,
        );
        end.qp.set_state(State::Rts);
        end.post_recv(7);
        let now = clock::now();
        let post = |inner: &mut Inner, id: u64| {
            let request = WorkRequest {
                id,
                ..WorkRequest::blank()
            };
            inner.conn.post_send(request).unwrap();
            if by_progress || !end.qp.send_posted(inner, now) {
                end.qp.progress(inner, now, Receive::Nothing, false);
            }
        };
        // No thread can receive while this one has the lock.
        end.qp.with(|inner| {
            end.qp.start(inner, tcp, config(false), now);
            post(inner, 1);
            post(inner, 2);
            let mut requests = [0; 48];
            peer.read_exact(&mut requests).unwrap();
            assert_eq!(requests[24..], fpdu(&send_header(2)));
            let mut answers = fpdu(&Control::Ack { seq: 2 }.header());
            answers.extend(fpdu(&send_header(1)));
            peer.write_all(&answers).unwrap();
            if resets {
                rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            }
            drop(peer);
            wait_polled(&watched, PollFlags::RDHUP);
            post(inner, 3);
            wait_polled(&watched, PollFlags::HUP);
            post(inner, 4);
        });
        let sent: Vec<_> = (0..4).map(|_| next(&end.sends)).collect();
        assert_eq!(
            sent,
            [
                (1, Status::Success),
                (2, Status::Success),
                (3, Status::RetryExceeded),
                (4, Status::Flushed)
            ],
            "{resets} {by_progress}"
        );
        assert_eq!(next(&end.receives), (7, Status::Success));
        assert_eq!(end.state(), State::Error);
    }
}

#[test]
fn a_connection_that_is_closed_ends_although_its_peer_reads_nothing() {
    const LEN: usize = 8192;
    let end = End::new();
    let ends = Ends::of(&end);
    let (ours, peer) = sockets();
    for socket in [&ours, &peer] {
        // The kernel chooses the smallest size.
        rustix::net::sockopt::set_socket_send_buffer_size(socket, 1).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, 1).unwrap();
    }
    let bytes = [7; LEN];
    let start = bytes.as_ptr().expose_provenance() as u64;
    let what = Registration {
        start,
        len: LEN as u64,
        base: start,
        access: Access::LOCAL_WRITE,
        pd: 1,
        present: None,
    };
    let regions = &end.qp.engine.rnic.regions;
    let region = regions
        .register(&what, &mut crate::random::random_u32)
        .unwrap();
    let tcp = Tcp::new(
        EngineFd::new(ours.into()),
        None,
        Vec::new(),
        Framing::Aligned,
    );
    end.qp.set_state(State::Rts);
    let now = clock::now();
    end.qp
        .with(|inner| end.qp.start(inner, tcp, config(true), now));
    for id in 0..10 {
        let sge = Sge {
            addr: start,
            len: LEN as u32,
            lkey: region.stag(),
        };
        let request = WorkRequest {
            id,
            payload: Payload::Sges(std::iter::once(sge).collect()),
            ..WorkRequest::blank()
        };
        end.qp.post_send([Ok(request)].into_iter()).unwrap();
    }
    assert!(end.qp.lock().tcp.as_ref().is_some_and(|tcp| tcp.blocked));
    end.qp.disconnect();
    for id in 0..10 {
        assert_eq!(next(&end.sends), (id, Status::Flushed));
    }
    wait_for("the end", || ends.count() > 0);
    assert_eq!(end.qp.raw_fd(), None);
    regions.deregister(&region).unwrap();
}

#[test]
fn a_socket_that_only_receives_wake_ups_is_not_tried_first() {
    let tries = |memory: bool| {
        let end = End::new();
        let (one, _other) = shm::tests::pair();
        let (ours, _peer) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let tcp = if memory {
            shared(ours.into(), one)
        } else {
            Tcp::new(
                EngineFd::new(ours.into()),
                None,
                Vec::new(),
                Framing::Aligned,
            )
        };
        end.qp.set_state(State::Rts);
        let now = clock::now();
        end.qp
            .with(|inner| end.qp.start(inner, tcp, config(false), now));
        if let Some(watch) = end.qp.lock().tcp.as_ref().and_then(Tcp::watch) {
            end.qp
                .engine
                .add_memory(Arc::clone(watch) as _, end.qp.me.clone());
        }
        Arc::clone(&end.qp).try_recv_hot(now)
    };
    assert_eq!(tries(true), None);
    assert_eq!(tries(false), Some(false));
}

#[test]
fn a_peer_that_could_not_be_woken_is_woken_later() {
    let end = End::new();
    let (one, _other) = shm::tests::pair();
    // A pair of Unix sockets takes the place of the TCP connection.
    let (ours, mut peer) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    fill(&ours);
    let tcp = shared(ours.into(), one);
    end.qp.set_state(State::Rts);
    let now = clock::now();
    end.qp.with(|inner| {
        end.qp.start(inner, tcp, config(false), now);
        inner.conn.switch_tx_to_shm();
    });
    end.post_send(1);
    peer.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    let _ = peer.read_to_end(&mut bytes);
    // The byte that wakes the peer is 0, and may be sent while the others are read.
    if !bytes.contains(&0) {
        peer.set_nonblocking(false).unwrap();
        peer.set_read_timeout(Some(WAIT)).unwrap();
        assert_eq!(peer.read(&mut [9; 2]).unwrap(), 1);
    }
}

/// A trunk whose other end is a plain socket at this host.
fn trunk_from(number: u32, host: [u8; 4]) -> (Arc<Trunk>, TcpStream) {
    let (ours, peer) = sockets();
    let fd = EngineFd::new(ours.into());
    let end = (number, IpAddr::from(host), true);
    let trunk = Trunk::new(engine().unwrap(), end, fd, Vec::new(), |_| {}).unwrap();
    trunk.begin();
    // The empty frame with which it begins.
    (&peer).read_exact(&mut [0; HEADER]).unwrap();
    (trunk, peer)
}

/// A queue pair whose connection is `ours`.
fn on_connection(initiator: bool, ours: TcpStream) -> End {
    let end = End::new();
    let tcp = Tcp::new(
        EngineFd::new(ours.into()),
        None,
        Vec::new(),
        Framing::Aligned,
    );
    end.qp.set_state(State::Rts);
    let config = StreamConfig {
        initiator,
        first: if initiator {
            First::Hello
        } else {
            First::Nothing
        },
        offer_after: OfferAfter {
            shm: None,
            trunk: Some(1000),
        },
        ..config(false)
    };
    end.qp
        .with(|inner| end.qp.start(inner, tcp, config, clock::now()));
    end
}

/// A queue pair that has accepted the trunk that `peer` offered, and waits for the answer. `after` is called between the offer and the opening
/// of the trunk.
fn taking(trunk: &Arc<Trunk>, after: impl FnOnce(&End)) -> (End, TcpStream) {
    let (ours, mut peer) = sockets();
    let end = on_connection(true, ours);
    let offer = Control::Handover(Handover::OfferTrunk {
        process: 1,
        port: 9,
        channel: 77,
    });
    peer.write_all(&fpdu(&offer.header())).unwrap();
    let offered_by = || {
        let inner = end.qp.lock();
        inner.tcp.as_ref().and_then(Tcp::trunk_offered_by)
    };
    wait_for("the offer", || offered_by().is_some());
    after(&end);
    end.qp.trunk_opened(&offered_by().unwrap(), trunk);
    wait_for("the last message on the connection", || {
        let inner = end.qp.lock();
        inner.tcp.as_ref().is_some_and(|tcp| tcp.is_on_trunk().0)
    });
    (end, peer)
}

/// The kernel of a peer that is killed ends the trunk in order, if the peer has read everything there. Its own connection may be unread.
#[test]
fn a_request_on_the_own_connection_is_not_complete_when_the_trunk_ends() {
    let (trunk, trunk_peer) = trunk_from(2, [127, 0, 0, 1]);
    let (end, peer) = taking(&trunk, |end| end.post_send(1));
    drop(trunk_peer);
    wait_for("the end of the trunk", || !trunk.is_open());
    // The peer has not read the connection, so this is a reset.
    drop(peer);
    assert_eq!(next(&end.sends), (1, Status::RetryExceeded));
}

/// The trunk ends before the peer has answered. What the peer sends on the own connection is received, and the stream goes on there.
#[test]
fn a_queue_pair_stays_on_its_connection_if_the_trunk_ends_first() {
    let (trunk, trunk_peer) = trunk_from(2, [127, 0, 0, 1]);
    let (end, mut peer) = taking(&trunk, |end| end.post_send(1));
    end.post_recv(7);
    drop(trunk_peer);
    wait_for("the end of the trunk", || !trunk.is_open());
    let refuse = Control::Handover(Handover::Refuse);
    let mut last = fpdu(&Control::Ack { seq: 1 }.header());
    last.extend(fpdu(&send_header(1)));
    last.extend(fpdu(&refuse.header()));
    peer.write_all(&last).unwrap();
    assert_eq!(next(&end.sends), (1, Status::Success));
    assert_eq!(next(&end.receives), (7, Status::Success));
    assert_eq!(end.state(), State::Rts);
    // Hello, the Send and TakeTrunk are followed by the acknowledgement.
    peer.set_read_timeout(Some(WAIT)).unwrap();
    peer.read_exact(&mut [0; 3 * FPDU]).unwrap();
    let mut ack = [0; FPDU];
    peer.read_exact(&mut ack).unwrap();
    assert_eq!(ack.to_vec(), fpdu(&Control::Ack { seq: 1 }.header()));
}

#[test]
fn another_host_cannot_send_to_a_queue_pair_that_was_offered() {
    let (ours, mut peer) = sockets();
    let (trunk_of_stranger, mut attacker) = trunk_from(2, [10, 9, 9, 9]);
    let end = on_connection(false, ours);
    end.qp.with(|inner| {
        let member: Weak<dyn Member> = Arc::downgrade(&end.qp) as _;
        let Inner { tcp, conn, .. } = inner;
        tcp.as_mut().unwrap().offer_trunk(conn, (1, 9), member);
        end.qp
            .progress(inner, clock::now(), Receive::Nothing, false);
    });
    let mut offer = [0; FPDU];
    peer.read_exact(&mut offer).unwrap();
    let channel = u32::from_be_bytes(offer[16..20].try_into().unwrap());
    let bytes = [0; 5000];
    let header = trunk::Header {
        channel,
        kind: trunk::Kind::Data,
        len: bytes.len(),
    };
    attacker.write_all(&header.emit()).unwrap();
    attacker.write_all(&bytes).unwrap();
    // The next frame is handled after this one: the trunk ends.
    attacker.write_all(&[0; HEADER]).unwrap();
    wait_for("the end of the trunk", || !trunk_of_stranger.is_open());
    assert_eq!(end.state(), State::Rts);
}

/// The peer acknowledges a request, and resets the trunk. Sending fails before the acknowledgement is read.
#[test]
fn what_arrived_on_a_trunk_before_a_send_failed_is_received() {
    let (trunk, mut trunk_peer) = trunk_from(2, [127, 0, 0, 1]);
    let (end, mut peer) = taking(&trunk, |_| ());
    let mut messages = [0; 2 * FPDU];
    peer.read_exact(&mut messages).unwrap();
    let channel = u32::from_be_bytes(messages[FPDU + 16..][..4].try_into().unwrap());
    let switch = Control::Handover(Handover::Switch);
    peer.write_all(&fpdu(&switch.header())).unwrap();
    wait_for("the switch", || {
        let inner = end.qp.lock();
        inner.tcp.as_ref().is_some_and(|tcp| tcp.is_on_trunk().1)
    });
    end.post_send(1);
    // An empty frame, and that of the Send.
    trunk_peer
        .read_exact(&mut [0; HEADER + HEADER + FPDU])
        .unwrap();
    end.qp.with(|inner| {
        let ack = fpdu(&Control::Ack { seq: 1 }.header());
        let header = trunk::Header {
            channel,
            kind: trunk::Kind::Data,
            len: ack.len(),
        };
        let mut frame = header.emit().to_vec();
        frame.extend(ack);
        trunk_peer.write_all(&frame).unwrap();
        rustix::net::sockopt::set_socket_linger(&trunk_peer, Some(Duration::ZERO)).unwrap();
        drop(trunk_peer);
        // The acknowledgement cannot be handled meanwhile, because the queue pair is locked.
        std::thread::sleep(Duration::from_millis(50));
        for id in [2, 3] {
            let request = WorkRequest {
                id,
                signaled: true,
                ..WorkRequest::blank()
            };
            inner.conn.post_send(request).unwrap();
            end.qp
                .progress(inner, clock::now(), Receive::Nothing, false);
        }
    });
    let got = [next(&end.sends), next(&end.sends)];
    assert_eq!(got, [(1, Status::Success), (2, Status::RetryExceeded)]);
}

/// The peer has left after it had accepted a trunk that had ended. Its last messages are lost, and what it has not acknowledged does not count
/// as executed, although its kernel has taken it.
#[test]
fn requests_to_a_peer_that_has_left_on_an_ended_trunk_fail() {
    let (ours, mut peer) = sockets();
    let end = on_connection(false, ours);
    end.qp.with(|inner| {
        let member: Weak<dyn Member> = Arc::downgrade(&end.qp) as _;
        let Inner { tcp, conn, .. } = inner;
        tcp.as_mut().unwrap().offer_trunk(conn, (1, 9), member);
        end.qp
            .progress(inner, clock::now(), Receive::Nothing, false);
    });
    end.post_send(1);
    // The offer and the Send are read and thrown away.
    peer.read_exact(&mut [0; 2 * FPDU]).unwrap();
    let take = Control::Handover(Handover::TakeTrunk {
        trunk: 1234,
        channel: 5,
    });
    peer.write_all(&fpdu(&take.header())).unwrap();
    // The refusal.
    peer.read_exact(&mut [0; FPDU]).unwrap();
    drop(peer);
    assert_eq!(next(&end.sends), (1, Status::RetryExceeded));
}

/// A queue pair whose stream is on the trunk, and its number there.
fn on_trunk(trunk: &Arc<Trunk>, after: impl FnOnce(&End)) -> (End, TcpStream, u32) {
    let (end, mut peer) = taking(trunk, after);
    let mut messages = Vec::new();
    while messages.len() < 2 * FPDU || messages[messages.len() - FPDU + 7] != 5 {
        let mut message = [0; FPDU];
        peer.read_exact(&mut message).unwrap();
        messages.extend(message);
    }
    let channel = messages.last_chunk::<8>().unwrap();
    let channel = u32::from_be_bytes(*channel.first_chunk().unwrap());
    (end, peer, channel)
}

/// One frame of the trunk.
fn trunk_frame(channel: u32, kind: trunk::Kind, body: &[u8]) -> Vec<u8> {
    let header = trunk::Header {
        channel,
        kind,
        len: body.len(),
    };
    [&header.emit(), body].concat()
}

/// The peer answers, leaves and ends. Its last messages on the trunk, and the end of the trunk, arrive before the answer.
#[test]
fn last_messages_on_a_trunk_that_has_ended_are_handled_after_the_answer() {
    let (trunk, mut trunk_peer) = trunk_from(2, [127, 0, 0, 1]);
    let (end, mut peer, channel) = on_trunk(&trunk, |end| end.post_send(1));
    let mut last = fpdu(&Control::Ack { seq: 1 }.header());
    last.extend(fpdu(&Control::Bye.header()));
    let mut frames = trunk_frame(channel, trunk::Kind::Data, &last);
    frames.extend(trunk_frame(channel, trunk::Kind::End, &[]));
    trunk_peer.write_all(&frames).unwrap();
    drop(trunk_peer);
    wait_for("the end of the trunk", || !trunk.is_open());
    let switch = Control::Handover(Handover::Switch);
    peer.write_all(&fpdu(&switch.header())).unwrap();
    assert_eq!(next(&end.sends), (1, Status::Success));
}

/// The last messages of a queue pair that disconnects wait until the trunk has room.
#[test]
fn a_queue_pair_that_ends_on_a_full_trunk_sends_its_last_messages() {
    let (trunk, mut trunk_peer) = trunk_from(2, [127, 0, 0, 1]);
    let (end, mut peer, _) = on_trunk(&trunk, |_| ());
    let switch = Control::Handover(Handover::Switch);
    peer.write_all(&fpdu(&switch.header())).unwrap();
    wait_for("the switch", || {
        let inner = end.qp.lock();
        inner.tcp.as_ref().is_some_and(|tcp| tcp.is_on_trunk().1)
    });
    let mut batch = TxBatch::default();
    batch.push_raw(&vec![0; 400_000]);
    let fill = || trunk.send(engine().unwrap(), (1, 1), &batch, 0, true);
    while matches!(fill(), Io::Done(_)) {}
    end.qp.disconnect();
    trunk_peer.set_read_timeout(Some(WAIT)).unwrap();
    let bye = fpdu(&Control::Bye.header());
    let last = trunk_frame(77, trunk::Kind::Data, &bye);
    let (mut tail, mut room) = (Vec::<u8>::new(), vec![0; 1 << 16]);
    while !tail.windows(last.len()).any(|bytes| bytes == last) {
        let n = trunk_peer.read(&mut room).unwrap();
        assert!(n > 0, "the trunk has ended");
        tail.drain(..tail.len().saturating_sub(last.len()));
        tail.extend(&room[..n]);
    }
}
