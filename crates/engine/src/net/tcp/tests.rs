//! Tests of streams over shared memory, without a worker thread.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{OnceLock, Weak};

use anywarp_core::connection::{First, OfferAfter, Peer, StreamConfig};
use anywarp_core::observe::{Observer, Step};
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::mr::{Region, Regions, Registration};
use anywarp_core::verbs::qp::Capacity;
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rnic::Rnic;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wr::{Payload, Sge, WorkRequest};

use super::*;
use crate::mem::UserMemory;
use crate::net::shm::tests::{drain as drain_ring, pair};

/// The protection domain of the tests.
const PD: u32 = 1;

/// A connection in state RTS whose peer shares memory.
fn connection(rnic: Arc<Rnic>) -> Connection {
    let cq = Arc::new(Cq::new(16, None));
    let mut conn = Connection::new(Parts {
        rnic,
        qpn: 1,
        pd: PD,
        send_cq: Arc::clone(&cq),
        recv_cq: cq,
        rq: RecvQueue::Own {
            requests: std::collections::VecDeque::new(),
            max_wr: 16,
            max_sge: 1,
        },
        capacity: Capacity {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 64,
        },
        sig_all: true,
    });
    conn.set_state(State::Rts);
    let config = StreamConfig {
        crc: false,
        mulpdu: bounds::MULPDU_ANYWARP,
        mulpdu_anywarp: bounds::MULPDU_ANYWARP,
        peer: Peer::Anywarp,
        ird: 4,
        ord: 4,
        initiator: true,
        first: First::Nothing,
        managed: false,
        stays: false,
        markers: false,
        offer_after: OfferAfter::NEVER,
    };
    conn.attach(config, clock::now());
    conn.switch_tx_to_shm();
    conn
}

/// An end of a stream of which both directions go through `shm`.
pub(crate) fn shared(fd: OwnedFd, shm: Shm) -> Tcp {
    Tcp {
        shm: Some(shm),
        tx_shm: true,
        rx_shm: true,
        ..Tcp::new(EngineFd::new(fd), None, Vec::new(), Framing::Aligned)
    }
}

/// Writes to a non-blocking socket until it is full.
pub(crate) fn fill(mut socket: impl std::io::Write) {
    while socket.write(&[1; 4096]).is_ok() {}
}

/// Registers `bytes`.
fn register(regions: &Regions, bytes: &[u8]) -> Arc<Region> {
    let start = bytes.as_ptr().expose_provenance() as u64;
    let what = Registration {
        start,
        len: bytes.len() as u64,
        base: start,
        access: Access::LOCAL_WRITE,
        pd: PD,
        present: None,
    };
    regions
        .register(&what, &mut crate::random::random_u32)
        .unwrap()
}

/// Deregisters a region when the second FPDU has been framed.
#[derive(Default)]
struct Deregisters {
    region: OnceLock<(Weak<Rnic>, Arc<Region>)>,
    framed: AtomicUsize,
}

impl Observer for Deregisters {
    fn step(&self, _: u32, step: &Step<'_>) {
        if matches!(step, Step::Frame(_)) && self.framed.fetch_add(1, Ordering::Relaxed) == 1 {
            let (rnic, region) = self.region.get().unwrap();
            let rnic = rnic.upgrade().unwrap();
            rnic.regions.deregister(region).unwrap();
        }
    }
}

/// A request fails because its memory is deregistered while it is framed. The request that was posted before it is sent, and only once.
#[test]
fn messages_in_front_of_deregistered_memory_are_sent_once() {
    // Payload of this length is not copied when it is framed.
    const LEN: usize = bounds::COPY_LIMIT + 4096;
    let engine = Engine::without_worker().unwrap();
    let observer = Arc::new(Deregisters::default());
    let rnic = Arc::new(Rnic {
        regions: Regions::new(),
        memory: Box::new(UserMemory),
        observer: Some(Arc::clone(&observer) as Arc<dyn Observer>),
    });
    let payloads = [[0xa5; LEN], [0x5a; LEN]];
    let [first, second] = payloads.each_ref().map(|p| register(&rnic.regions, p));
    let mut conn = connection(Arc::clone(&rnic));
    for (id, region) in [(1, &first), (2, &second)] {
        let request = WorkRequest {
            id,
            payload: Payload::Sges(
                std::iter::once(Sge {
                    addr: region.base(),
                    len: LEN as u32,
                    lkey: region.stag(),
                })
                .collect(),
            ),
            ..WorkRequest::blank()
        };
        conn.post_send(request).unwrap();
    }
    let _ = observer.region.set((Arc::downgrade(&rnic), second));
    let (one, mut other) = pair();
    let (fd, _peer) = UnixStream::pair().unwrap();
    let mut tcp = shared(fd.into(), one);
    // As a queue pair does.
    let now = clock::now();
    let outcome = match tcp.transmit_posted(engine, &mut conn, now) {
        Some(outcome) => outcome,
        None => tcp.transmit(engine, &mut conn, now, false),
    };
    assert_eq!(outcome, Outcome::Broken(libc::EFAULT));
    let mut received = Vec::new();
    drain_ring(&mut other, &mut received).unwrap();
    let count = |byte| received.iter().filter(|b| **b == byte).count();
    assert_eq!((count(0xa5), count(0x5a)), (LEN, 0));
    assert_eq!(other.take_done(), Some(0), "this end's acknowledgement");
}

#[test]
fn a_peer_that_could_not_be_woken_is_marked_as_sleeping_again() {
    let engine = Engine::without_worker().unwrap();
    let (one, other) = pair();
    // The full Unix socket stands for a TCP socket that refuses the byte because the kernel has no memory. In both cases the kernel
    // reports no unsent bytes that would wake the peer.
    let (fd, mut peer) = UnixStream::pair().unwrap();
    fd.set_nonblocking(true).unwrap();
    peer.set_nonblocking(true).unwrap();
    fill(&fd);
    let mut tcp = shared(fd.into(), one);
    let mut conn = connection(Arc::clone(&engine.rnic));
    conn.post_send(WorkRequest::blank()).unwrap();
    let now = clock::now();
    let sent = tcp.transmit_posted(engine, &mut conn, now);
    assert_eq!(sent, Some(Outcome::Open));
    assert!(other.watch().withdraw_sleep(), "the peer is marked");
    assert!(other.watch().prepare_sleep(true), "there is a record");
    assert!(tcp.must_wake_again());
    tcp.wake_again();
    assert!(tcp.must_wake_again(), "the socket is still full");
    let mut bytes = Vec::new();
    let _ = peer.read_to_end(&mut bytes);
    tcp.wake_again();
    assert!(!tcp.must_wake_again());
    assert_eq!(peer.read(&mut [9; 2]).unwrap(), 1);
    tcp.wake_again();
    assert!(peer.read(&mut [9; 2]).is_err(), "it was woken");
}

#[test]
fn bytes_that_are_still_to_be_sent_wake_the_peer() {
    let engine = Engine::without_worker().unwrap();
    let (one, other) = pair();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let fd = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (_peer, _) = listener.accept().unwrap();
    fd.set_nonblocking(true).unwrap();
    fill(&fd);
    let mut tcp = shared(fd.into(), one);
    let mut conn = connection(Arc::clone(&engine.rnic));
    conn.post_send(WorkRequest::blank()).unwrap();
    let sent = tcp.transmit_posted(engine, &mut conn, clock::now());
    assert_eq!(sent, Some(Outcome::Open));
    assert!(!tcp.must_wake_again() && !other.watch().withdraw_sleep());
}
