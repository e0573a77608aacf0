//! One end, as an application sees it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anywarp_core::connection::{Connection, First, OfferAfter, Peer, StreamConfig};
use anywarp_core::error::Misuse;
use anywarp_core::llp::mpa::frame::TxBatch;
use anywarp_core::llp::mpa::marker::Stripper;
use anywarp_core::lock::Mutex;
use anywarp_core::observe::Observer;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::counter::{Counter, Ops};
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::mr::{Region, Regions, Registration};
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rnic::Rnic;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::srq::Srq;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{Op, Payload, RecvRequest, Remote, Sge, WorkRequest};
use anywarp_core::wire::{Stag, To};

use crate::memory::{BASE, GUARD, Space};
use crate::raw::framed;
use crate::rng::Rng;

/// Sets of rights.
pub mod access {
    use super::Access;

    /// All remote rights, local write, and the right to bind windows.
    pub const ALL: Access = Access(0b1_1111);
    /// The right of memory into which received data is placed.
    pub const LOCAL: Access = Access::LOCAL_WRITE;
    /// The rights of memory that the peer may write.
    pub const WRITE: Access = Access(Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0);
    /// The right of memory that the peer may read.
    pub const READ: Access = Access::REMOTE_READ;
    /// The rights of memory on which the peer may execute atomics.
    pub const ATOMIC: Access = Access(Access::LOCAL_WRITE.0 | Access::REMOTE_ATOMIC.0);
}

/// The configuration of an end.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The responder's implementation, as the initiator knows it. The responder detects that of the initiator from
    /// the first message.
    pub peer: Peer,
    /// Whether CRCs are used.
    pub crc: bool,
    /// Largest ULPDU to send.
    pub mulpdu: usize,
    /// Largest ULPDU of a responder after its peer turned out to be anywarp; 0: unchanged.
    pub mulpdu_anywarp: usize,
    /// The number of Reads and atomics of the peer that are served at the same time.
    pub ird: u32,
    /// The largest number of outstanding Reads and atomics.
    pub ord: u32,
    /// Whether the connection manager set up the stream.
    pub managed: bool,
    /// Whether the queue pair of a stream that the connection manager set up stays as it is when the peer's program ends the stream.
    pub stays: bool,
    /// The first message of the initiator.
    pub first: First,
    /// Whether the peer gets markers.
    pub markers: bool,
    /// Access rights of the queue pair for the peer.
    pub access: Access,
    /// Number of retries when the peer has no receive.
    pub rnr_retry: u8,
    /// The RNR timer that the peer gets when no receive is posted.
    pub min_rnr_timer: u8,
    /// Entries of each completion queue.
    pub cqe: usize,
    /// The numbers of send requests, receives and list elements.
    pub capacity: Capacity,
    /// Whether every send request makes a completion.
    pub sig_all: bool,
    /// The shared receive queue, if there is one.
    pub srq: Option<Arc<Srq>>,
    /// Whether short messages may take the shortcuts of the data path, as in production.
    pub shortcuts: bool,
    /// Counts the operations of the peer.
    pub counter: Option<Arc<Counter>>,
}

impl Setup {
    /// An end whose peer is anywarp.
    pub fn anywarp() -> Self {
        Self {
            peer: Peer::Anywarp,
            crc: true,
            mulpdu: anywarp_core::bounds::MULPDU_ANYWARP,
            mulpdu_anywarp: 0,
            ird: 16,
            ord: 16,
            managed: false,
            stays: false,
            first: First::Hello,
            markers: false,
            access: access::ALL,
            rnr_retry: 7,
            min_rnr_timer: 12,
            cqe: 4096,
            capacity: Capacity {
                max_send_wr: 512,
                max_recv_wr: 512,
                max_send_sge: 16,
                max_recv_sge: 16,
                max_inline: 512,
            },
            sig_all: false,
            srq: None,
            shortcuts: true,
            counter: None,
        }
    }

    /// An end whose peer is another implementation.
    pub fn standard() -> Self {
        Self {
            peer: Peer::Standard,
            mulpdu: 1442,
            managed: true,
            stays: false,
            first: First::Write,
            ..Self::anywarp()
        }
    }

    pub(crate) fn stream(&self, initiator: bool) -> StreamConfig {
        StreamConfig {
            crc: self.crc,
            mulpdu: self.mulpdu,
            mulpdu_anywarp: if self.mulpdu_anywarp == 0 {
                self.mulpdu
            } else {
                self.mulpdu_anywarp
            },
            peer: if initiator { self.peer } else { Peer::Unknown },
            ird: self.ird,
            ord: self.ord,
            initiator,
            first: self.first,
            managed: self.managed,
            stays: self.stays,
            markers: self.markers,
            offer_after: OfferAfter::NEVER,
        }
    }
}

/// A device with its memory: ends of one host share regions.
#[derive(Debug, Clone)]
pub struct Host {
    /// The device.
    pub rnic: Arc<Rnic>,
    /// Its memory.
    pub space: Space,
    /// The default protection domain of ends and regions.
    pub pd: u32,
    rng: Arc<Mutex<Rng>>,
}

impl Host {
    pub(crate) fn new(seed: u64, observer: Option<Arc<dyn Observer>>) -> Self {
        let space = Space::default();
        Self {
            rnic: Arc::new(Rnic {
                regions: Regions::new(),
                memory: Box::new(space.clone()),
                observer,
            }),
            space,
            pd: Pd::new().id(),
            rng: Arc::new(Mutex::new(Rng::new(seed))),
        }
    }

    /// A random number for an STag.
    pub fn random(&self) -> u32 {
        let mut rng = self.rng.lock();
        rng.next() as u32
    }

    /// New memory, registered with these rights.
    pub fn register(&self, len: usize, access: Access) -> Mr {
        self.register_for(self.pd, len, access)
    }

    /// Registers new memory in another protection domain.
    pub fn register_for(&self, pd: u32, len: usize, access: Access) -> Mr {
        let start = self.space.alloc(len);
        let what = Registration {
            start,
            len: len as u64,
            base: start,
            access,
            pd,
            present: None,
        };
        let region = self
            .rnic
            .regions
            .register(&what, &mut || self.random())
            .expect("register");
        Mr { region }
    }

    /// Ends a registration.
    pub fn deregister(&self, mr: &Mr) {
        self.rnic
            .regions
            .deregister(&mr.region)
            .expect("deregister");
    }

    /// Writes into registered memory, from its start.
    pub fn fill(&self, mr: &Mr, bytes: &[u8]) {
        let at = (mr.region.start() - BASE) as usize;
        self.space.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The content of registered memory.
    pub fn bytes(&self, mr: &Mr) -> Vec<u8> {
        let at = (mr.region.start() - BASE) as usize;
        self.space.bytes()[at..at + mr.region.len() as usize].to_vec()
    }

    /// The word at byte `at`, in the byte order of this machine.
    pub fn word(&self, mr: &Mr, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(mr)[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Panics if a byte between two allocations was changed.
    pub fn check_guards(&self, regions: &[&Mr]) {
        let mut bytes = self.space.bytes().clone();
        for mr in regions {
            let at = (mr.region.start() - BASE) as usize;
            bytes[at..at + mr.region.len() as usize].fill(GUARD);
        }
        assert!(
            is_all(&bytes, GUARD),
            "a byte outside of every region was changed"
        );
    }
}

/// Whether each byte is `byte`. Compares slices: the fuzzers observe each comparison of a byte, which makes a loop slow.
pub(crate) fn is_all(bytes: &[u8], byte: u8) -> bool {
    match bytes {
        [first, rest @ ..] => *first == byte && *rest == bytes[..rest.len()],
        [] => true,
    }
}

/// Registered memory.
#[derive(Debug, Clone)]
pub struct Mr {
    /// The registration.
    pub region: Arc<Region>,
}

impl Mr {
    /// Its STag: the local key and the remote one.
    pub fn stag(&self) -> Stag {
        self.region.stag()
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.region.len() as usize
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// The whole memory as a list element.
    pub fn all(&self) -> Sge {
        self.part(0, self.len())
    }

    /// `len` bytes from `at` as a list element.
    pub fn part(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.region.start() + at as u64,
            len: len as u32,
            lkey: self.stag(),
        }
    }

    /// The STag and offset of byte `at`, as the peer uses them.
    pub fn remote(&self, at: usize) -> Remote {
        Remote {
            rkey: self.stag(),
            to: To(self.region.base() + at as u64),
        }
    }
}

/// One end.
#[derive(Debug)]
pub struct End {
    /// The connection.
    pub conn: Connection,
    /// Its device and memory.
    pub host: Host,
    /// The completion queue of send requests.
    pub send_cq: Arc<Cq>,
    /// The completion queue of receives.
    pub recv_cq: Arc<Cq>,
    /// The asynchronous events that were raised.
    pub events: Vec<AsyncEvent>,
    pub(crate) batch: TxBatch,
    pub(crate) sent: usize,
    pub(crate) rx: Vec<u8>,
    pub(crate) over: bool,
    qpn: u32,
    /// If this end requested markers: what removes them, and the bytes of an incomplete frame without its markers.
    markers: Option<(Stripper, Vec<u8>)>,
}

impl std::ops::Deref for End {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.host
    }
}

/// Takes all completions of a queue.
pub(crate) fn completions(cq: &Cq) -> Vec<Completion> {
    let mut all = Vec::new();
    cq.poll(usize::MAX, |_, c| all.push(c.clone()));
    all
}

impl End {
    pub(crate) fn new(host: &Host, qpn: u32, setup: &Setup) -> Self {
        let send_cq = Arc::new(Cq::new(setup.cqe, None));
        let recv_cq = Arc::new(Cq::new(setup.cqe, None));
        let rq = match &setup.srq {
            Some(srq) => RecvQueue::Shared(Arc::clone(srq)),
            None => RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: setup.capacity.max_recv_wr,
                max_sge: setup.capacity.max_recv_sge,
            },
        };
        let mut conn = Connection::new(Parts {
            rnic: Arc::clone(&host.rnic),
            qpn,
            pd: host.pd,
            send_cq: Arc::clone(&send_cq),
            recv_cq: Arc::clone(&recv_cq),
            rq,
            capacity: setup.capacity,
            sig_all: setup.sig_all,
        });
        conn.set_shortcuts(setup.shortcuts);
        if let Some(counter) = &setup.counter {
            let attached = conn.attach_counter(counter, Ops::REMOTE);
            debug_assert!(attached.is_ok(), "a new queue pair has no counter");
        }
        conn.set_state(State::Rts);
        let attr = conn.attr_mut();
        attr.access = setup.access;
        attr.rnr_retry = setup.rnr_retry;
        attr.min_rnr_timer = setup.min_rnr_timer;
        Self {
            conn,
            host: host.clone(),
            send_cq,
            recv_cq,
            events: Vec::new(),
            batch: TxBatch::default(),
            sent: 0,
            rx: Vec::new(),
            over: false,
            qpn,
            markers: None,
        }
    }

    /// Its queue pair number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Removes markers from what this end receives, as if it had requested them; the peer's `Setup::markers` must be set. anywarp
    /// itself never requests markers.
    pub fn wants_markers(&mut self) {
        self.markers = Some((Stripper::new(), Vec::new()));
    }

    /// The stream without its markers, with CRCs that do not cover them.
    fn without_markers(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let (stripper, waiting) = self.markers.as_mut()?;
        stripper.strip(bytes, true, waiting).expect("good markers");
        let mut out = Vec::new();
        while let Some(length) = waiting.first_chunk::<2>() {
            let ulpdu = usize::from(u16::from_be_bytes(*length));
            let whole = (2 + ulpdu).next_multiple_of(4) + 4;
            if waiting.len() < whole {
                break;
            }
            let fpdu: Vec<u8> = waiting.drain(..whole).collect();
            out.extend(framed(&fpdu[2..2 + ulpdu]));
        }
        Some(out)
    }

    /// Posts a send request.
    pub fn post(&mut self, request: WorkRequest) {
        self.conn.post_send(request).expect("post_send");
    }

    /// Posts a send request that may be refused.
    pub fn try_post(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        self.conn.post_send(request)
    }

    /// Posts a receive.
    pub fn recv(&mut self, id: u64, sges: &[Sge]) {
        self.try_recv(id, sges).expect("post_recv");
    }

    /// Posts a receive that may be refused.
    pub fn try_recv(&mut self, id: u64, sges: &[Sge]) -> Result<(), Misuse> {
        let sges = sges.into();
        self.conn.post_recv(RecvRequest { id, sges })
    }

    /// Takes the completions of send requests.
    pub fn completed(&mut self) -> Vec<Completion> {
        completions(&self.send_cq)
    }

    /// Takes the completions of receives.
    pub fn received(&mut self) -> Vec<Completion> {
        completions(&self.recv_cq)
    }

    /// Whether `event` was raised.
    pub fn raised(&self, event: AsyncEvent) -> bool {
        self.events.contains(&event)
    }

    /// How often `event` was raised.
    pub fn times(&self, event: AsyncEvent) -> usize {
        self.events.iter().filter(|e| **e == event).count()
    }

    /// Whether the stream is closed or broken.
    pub fn is_over(&self) -> bool {
        self.over
    }

    pub(crate) fn collect(&mut self) {
        while let Some(event) = self.conn.poll_event() {
            self.events.push(event);
        }
    }

    /// Handles bytes of the stream. If the connection requests that payload is received directly into memory, chance decides whether
    /// it is.
    pub(crate) fn take_bytes(&mut self, now: Instant, rng: &mut Rng, bytes: &[u8]) {
        let stripped = self.without_markers(bytes);
        let mut bytes = stripped.as_deref().unwrap_or(bytes);
        if self.rx.is_empty() {
            // This models one scatter receive: the first bytes go into user memory, the rest into a buffer.
            let straight = self.conn.direct().and_then(|(places, placed, left)| {
                rng.chance(60).then(|| {
                    let n = bytes.len().min(left as usize);
                    let mut at = 0;
                    let pinned = anywarp_core::llp::mpa::frame::for_each_part(
                        places,
                        placed,
                        n as u64,
                        |place, from, len| {
                            let Some(pin) = place.pin() else { return false };
                            let part = &bytes[at..at + len as usize];
                            self.host.rnic.memory.place(&pin, from, part);
                            at += len as usize;
                            true
                        },
                    );
                    pinned.then_some(n)
                })?
            });
            if let Some(n) = straight {
                self.conn.handle_direct(now, n as u64);
                bytes = &bytes[n..];
            }
        }
        self.rx.extend_from_slice(bytes);
        let used = self.conn.handle_rx(now, &self.rx);
        assert!(
            used <= self.rx.len(),
            "more bytes were used than there were"
        );
        self.rx.drain(..used);
        assert!(
            self.rx.len() <= 65_535 + 2 + 3 + 4,
            "a whole FPDU was left in the buffer"
        );
        self.collect();
    }
}

// ---------------------------------------------------------------------- requests

fn request(id: u64, op: Op) -> WorkRequest {
    WorkRequest {
        id,
        op,
        signaled: true,
        ..WorkRequest::blank()
    }
}

/// A Send.
pub fn send(id: u64) -> WorkRequest {
    request(
        id,
        Op::Send {
            imm: None,
            invalidate: None,
        },
    )
}

/// A Send with immediate.
pub fn send_imm(id: u64, imm: [u8; 4]) -> WorkRequest {
    request(
        id,
        Op::Send {
            imm: Some(imm),
            invalidate: None,
        },
    )
}

/// A Send with Invalidate.
pub fn send_invalidate(id: u64, stag: Stag) -> WorkRequest {
    request(
        id,
        Op::Send {
            imm: None,
            invalidate: Some(stag),
        },
    )
}

/// An RDMA Write.
pub fn write(id: u64, remote: Remote) -> WorkRequest {
    request(id, Op::Write { remote, imm: None })
}

/// An RDMA Write with immediate.
pub fn write_imm(id: u64, remote: Remote, imm: [u8; 4]) -> WorkRequest {
    request(
        id,
        Op::Write {
            remote,
            imm: Some(imm),
        },
    )
}

/// An RDMA Read.
pub fn read(id: u64, remote: Remote) -> WorkRequest {
    request(id, Op::Read { remote })
}

/// A fetch and add.
pub fn fetch_add(id: u64, remote: Remote, add: u64) -> WorkRequest {
    request(id, Op::FetchAdd { remote, add })
}

/// A compare and swap.
pub fn compare_swap(id: u64, remote: Remote, compare: u64, swap: u64) -> WorkRequest {
    request(
        id,
        Op::CompareSwap {
            remote,
            compare,
            swap,
        },
    )
}

/// Options of a request.
pub trait Request: Sized {
    /// Sets the memory of its data or result.
    #[must_use]
    fn from(self, sges: &[Sge]) -> Self;
    /// Sets inline data.
    #[must_use]
    fn inline(self, bytes: &[u8]) -> Self;
    /// Makes no completion if the request succeeds.
    #[must_use]
    fn unsignaled(self) -> Self;
    /// Makes the request wait for the Reads and atomics before it.
    #[must_use]
    fn fence(self) -> Self;
    /// Requests a solicited event at the peer.
    #[must_use]
    fn solicited(self) -> Self;
}

impl Request for WorkRequest {
    fn from(mut self, sges: &[Sge]) -> Self {
        self.payload = Payload::Sges(sges.into());
        self
    }
    fn inline(mut self, bytes: &[u8]) -> Self {
        self.payload = Payload::Inline(bytes.into());
        self
    }
    fn unsignaled(mut self) -> Self {
        self.signaled = false;
        self
    }
    fn fence(mut self) -> Self {
        self.fence = true;
        self
    }
    fn solicited(mut self) -> Self {
        self.solicited = true;
        self
    }
}
