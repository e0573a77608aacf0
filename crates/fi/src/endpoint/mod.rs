//! An endpoint: messages and one-sided operations on a reliable-datagram queue pair.
//!
//! Messages of at most [`limits::EAGER`] bytes are sent with their content. A longer message is announced. When the
//! announcement has been matched with a receive, the receiver registers the memory for this one peer and sends it the key (a
//! *grant*). The sender writes the message with RDMA Write-Record, whose record shows the receiver that the message is
//! complete. As an option, the receiver reads the message instead (`fetch.rs`). Reads and writes of the program use a second queue
//! pair, whose writes create no records.
//!
//! Busy pairs of endpoints send their messages and announcements over a connection (`link.rs`).

pub(crate) mod atomic;
mod credit;
mod fence;
mod fetch;
mod held;
mod link;
mod one_sided;
mod progress;
mod question;
mod receive;
mod send;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use held::{Held, HeldMessages};

use crate::abi::*;
use crate::address::{Remote, Vector};
use crate::atomics::{self, Class, Type};
use crate::ffi::ROUTE_HEADER;
use crate::limits;
use crate::matching::{Content, Envelope, Matching, Message, Pattern};
use crate::memory::{self, Area, UserMemory};
use crate::queue::{Counter, Entry, Queue};
use crate::slab::Slab;
use crate::verbs::{
    Access, Channel, Completions, Device, Job, Of, OneSided, Pd, Piece, QueuePair, Record, Region,
    Stream, To, Way, Wc, error_of, kind_of, source_of, written_word,
};
use crate::wire::{
    Announcement, COMPARE, CONFIRMED, DATA, FETCH, HEADER, Header, Kind, LINKED, READABLE, Source,
    Step, TAGGED, VERSION,
};

/// Memory that the program has registered.
#[derive(Debug, Clone, Copy)]
pub struct Registered {
    /// Its address.
    pub at: usize,
    /// Its length.
    pub len: usize,
    /// Whether peers may read it.
    pub read: bool,
    /// Whether peers may write it.
    pub write: bool,
}

/// The state that the endpoints of a domain share.
#[derive(Debug)]
pub struct Shared {
    /// The protection domain.
    pub pd: Arc<Pd>,
    /// Completion queues of the program.
    pub queues: Slab<Queue>,
    /// Counters of the program.
    pub counters: Slab<Counter>,
    /// Address vectors.
    pub vectors: Slab<Vector>,
    /// Registered memory by its key, for atomic operations of peers.
    pub registered: HashMap<u32, Registered>,
    /// The routes to the hosts that a message was sent to, each from one address of the device. Endpoints of a domain may have different
    /// addresses.
    ways: HashMap<(IpAddr, u8), Arc<Way>>,
    /// The route that was used last.
    last_way: Option<((IpAddr, u8), Arc<Way>)>,
}

impl Shared {
    /// Returns the state of a new domain.
    pub fn new(pd: Arc<Pd>) -> Self {
        Self {
            pd,
            queues: Slab::default(),
            counters: Slab::default(),
            vectors: Slab::default(),
            registered: HashMap::new(),
            ways: HashMap::new(),
            last_way: None,
        }
    }

    fn way(&mut self, to: IpAddr, from: u8) -> Result<Arc<Way>, i32> {
        let key = (to, from);
        if let Some((last, way)) = &self.last_way
            && *last == key
        {
            return Ok(Arc::clone(way));
        }
        if let Some(way) = self.ways.get(&key) {
            self.last_way = Some((key, Arc::clone(way)));
            return Ok(Arc::clone(way));
        }
        // Unknown peers can have any number of addresses, so the size of the table is limited.
        if self.ways.len() >= limits::PEERS {
            self.ways.clear();
        }
        let way = Arc::new(Way::new(&self.pd, to, from)?);
        self.ways.insert(key, Arc::clone(&way));
        Ok(way)
    }

    fn push(&mut self, queue: Option<u32>, entry: Entry) {
        let Some(queue) = queue.and_then(|q| self.queues.get_mut(q)) else {
            return;
        };
        if queue.push(entry)
            && let Some(event) = queue.event
        {
            crate::event::raise(event);
        }
    }

    fn count(&mut self, counter: Option<u32>, failed: bool) {
        let Some(counter) = counter.and_then(|c| self.counters.get_mut(c)) else {
            return;
        };
        let n = if failed {
            &mut counter.errors
        } else {
            &mut counter.value
        };
        *n = n.wrapping_add(1);
    }
}

/// The events that a counter of an endpoint counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// Messages sent.
    Send,
    /// Messages received.
    Receive,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads of peers.
    RemoteRead,
    /// Writes of peers.
    RemoteWrite,
}

impl Counts {
    /// All events, each with the flag for binding a counter to it.
    pub const ALL: [(Self, u64); 6] = [
        (Self::Send, FI_SEND),
        (Self::Receive, FI_RECV),
        (Self::Read, FI_READ),
        (Self::Write, FI_WRITE),
        (Self::RemoteRead, FI_REMOTE_READ),
        (Self::RemoteWrite, FI_REMOTE_WRITE),
    ];
}

/// How an operation is reported when it has completed.
#[derive(Debug, Clone, Copy)]
struct Done {
    context: usize,
    flags: u64,
    /// Whether to report success too, not only failure.
    reported: bool,
    counts: Counts,
}

/// An operation: a request that the device executes, or one that a peer has to answer.
#[derive(Debug)]
enum Op {
    /// A message with its content, which may be in a slot. `done` is `None` if the completion was already reported.
    Sent {
        done: Option<Done>,
        to: Remote,
        slot: Option<u16>,
        confirmation: Confirmation,
    },
    /// An announced message.
    Announced {
        /// `None` if the completion was already reported.
        done: Option<Done>,
        to: Remote,
        memory: UserMemory,
        regions: Vec<Region>,
        /// A copy of the content of an injected message. The number of references to the `Arc` is the number of such copies, which
        /// `credit.rs` limits. The field is declared after `regions`, so that the content is dropped after them.
        _copy: Option<(Vec<u8>, Arc<()>)>,
        /// Set if the peer has reported that its memory for unexpected messages of this endpoint is used up (`credit.rs`). The number of
        /// references to the `Arc` is the number of messages that were announced to this peer since.
        _counted: Option<Arc<()>>,
        /// Whether the device has delivered the announcement.
        known: bool,
        offer: Offer,
        grant: Option<Grant>,
        /// The number of bytes that have been written, or are being written.
        written: usize,
    },
    /// The reading of a message that a peer has announced under the number `id`.
    Fetch {
        target: Target,
        message: Arrived,
        id: u32,
        source: Source,
        regions: Vec<Region>,
        /// The number of bytes to read.
        length: usize,
        /// The number of bytes that have been requested.
        posted: usize,
    },
    /// A read or a write of the program.
    OneSided {
        done: Done,
        to: Remote,
        what: OneSided,
        memory: UserMemory,
        /// The key and the address of the peer's memory.
        at: (u32, u64),
        slot: Option<u16>,
        regions: Vec<Region>,
        /// The number of bytes that have been requested.
        posted: usize,
        /// The message to the target's program that is sent after the write.
        notice: Option<(Remote, Header)>,
    },
    /// The message to the target's program that reports a completed write.
    Notified { done: Done, to: Remote },
    /// A message that checks whether a peer responds.
    Probe { to: Remote },
    /// A message that tells a peer with a link that this endpoint is closed.
    CloseNotice { to: Remote },
    /// An atomic operation that waits for its answer.
    Atomic {
        done: Done,
        to: Remote,
        result: UserMemory,
        /// The length of the answer in bytes.
        expects: usize,
        /// Whether the device has delivered the request.
        known: bool,
    },
    /// The message that requests the operation `of`.
    Request { slot: Option<u16>, of: u32 },
    /// An answer to a peer, with its content.
    Answer { slot: Option<u16>, to: Remote },
}

/// The reports that a message with its content still waits for before it is complete. With `FI_DELIVERY_COMPLETE`, the provider at the
/// receiver has to confirm the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Confirmation {
    /// The message is complete when the device has delivered it.
    NotNeeded,
    /// The device has not delivered it, and the receiver has not confirmed it.
    Both,
    /// The receiver has not confirmed it.
    Receiver,
    /// The device has not reported that it was delivered.
    Device,
}

/// Whether the receiver of an announced message may read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offer {
    /// It may not.
    None,
    /// It may, and has not finished.
    Open,
    /// It has read the message, but the device has not yet reported that the announcement was delivered.
    Taken,
}

/// Memory of a peer that an announced message may be written to.
#[derive(Debug, Clone, Copy)]
struct Grant {
    /// Whether the message is written over the link.
    linked: bool,
    rkey: u32,
    word: u32,
    base: u64,
    length: usize,
}

/// A posted receive.
#[derive(Debug, Clone, Copy)]
struct Receive {
    context: usize,
    memory: UserMemory,
    reported: bool,
    /// The multi-receive buffer that the receive uses, if any.
    multi: Option<u32>,
}

/// A multi-receive buffer (`FI_MULTI_RECV`), which holds several messages.
#[derive(Debug)]
struct Multi {
    used: usize,
    /// The number of messages that are being written to it.
    underway: usize,
    /// Whether the buffer accepts no more messages.
    over: bool,
}

/// The memory that a message is received into.
#[derive(Debug, Clone, Copy)]
struct Target {
    context: usize,
    memory: UserMemory,
    reported: bool,
    multi: Option<u32>,
}

/// A message that is being written to the program's memory.
#[derive(Debug)]
struct Incoming {
    target: Target,
    message: Arrived,
    /// The sender's number for the message.
    id: u32,
    granted: usize,
    /// The number of bytes that have been written.
    placed: usize,
    base: u64,
    region: Option<Region>,
    /// The link that the peer writes over, if any, and the grant that is sent when the window is bound.
    link: Option<(link::Name, Header)>,
    /// The memory that the peer writes, if the program's memory consists of several pieces.
    aside: Option<Area>,
}

/// A message without its content.
#[derive(Debug, Clone, Copy)]
struct Arrived {
    from: Remote,
    source: FiAddr,
    tagged: bool,
    tag: u64,
    data: Option<u64>,
    length: u64,
}

/// A message that is queued because the send queue is full.
#[derive(Debug)]
enum Deferred {
    Answer(Remote, Header, Vec<u8>),
    Write(u32),
    Access(u32),
    Fetch(u32),
    Notice(Remote, Header, Done),
}

/// A message to send.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// The peer.
    pub to: FiAddr,
    /// The memory with the content.
    pub memory: UserMemory,
    /// The tag of a tagged message.
    pub tag: Option<u64>,
    /// The immediate data, if there is any.
    pub data: Option<u64>,
    /// The context of the program.
    pub context: usize,
    /// `FI_COMPLETION`, `FI_INJECT`, and completion levels.
    pub flags: u64,
    /// Whether to report no completion: `fi_inject` and its variants.
    pub silent: bool,
}

/// A receive to post.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The source of the message.
    pub source: FiAddr,
    /// The memory that it is received into.
    pub memory: UserMemory,
    /// For tagged messages: the tag, and the bits of it that are ignored.
    pub tag: Option<(u64, u64)>,
    /// The context of the program.
    pub context: usize,
    /// `FI_COMPLETION`, `FI_MULTI_RECV`, `FI_PEEK`, `FI_CLAIM`, `FI_DISCARD`.
    pub flags: u64,
}

/// An atomic operation.
#[derive(Debug, Clone, Copy)]
pub struct AtomicRequest {
    /// The peer.
    pub to: FiAddr,
    /// The address and the key of the elements in the peer's memory.
    pub at: (u64, u64),
    /// The type of the elements, as a number of libfabric.
    pub datatype: u32,
    /// The number of elements.
    pub count: usize,
    /// The operation, as a number of libfabric.
    pub op: u32,
    /// Whether the operation returns a result, and whether it compares.
    pub class: Class,
    /// The operands.
    pub operand: UserMemory,
    /// The values that the target is compared with.
    pub compare: UserMemory,
    /// The memory for the former values.
    pub result: UserMemory,
    /// The context of the program.
    pub context: usize,
    /// The same flags as in [`Outgoing`].
    pub flags: u64,
    /// Whether to report no completion.
    pub silent: bool,
}

/// A read or a write of a peer's memory.
#[derive(Debug, Clone, Copy)]
pub struct OneSidedRequest {
    /// The peer.
    pub to: FiAddr,
    /// The memory of this process.
    pub memory: UserMemory,
    /// The address and the key of the peer's memory.
    pub at: (u64, u64),
    /// Whether the peer's memory is read; otherwise it is written.
    pub read: bool,
    /// The immediate data for the target's program.
    pub data: Option<u64>,
    /// The context of the program.
    pub context: usize,
    /// The same flags as in [`Outgoing`].
    pub flags: u64,
    /// Whether to report no completion.
    pub silent: bool,
}

/// The position of the kind in a `wr_id`: its upper bits have one of the following values. The lower bits name a receive, an
/// operation or a link.
const KIND: u32 = 56;
/// `wr_id` of a posted receive.
const RECEIVE: u64 = 0;
/// `wr_id` of a request that belongs to an operation.
const OP: u64 = 1;
/// `wr_id` of the announcement of an operation's message.
const ANNOUNCE: u64 = 2;
/// `wr_id` of an answer to a peer. The operation in the rest of the number is the answer, not one of the program.
const ANSWER: u64 = 3;

/// `wr_id` of a message on a link.
const LINK_SEND: u64 = 4;
/// `wr_id` of a receive of a link.
const LINK_RECEIVE: u64 = 5;
/// `wr_id` of the binding of a window on a link.
const LINK_BIND: u64 = 6;

const STRIDE: usize = (ROUTE_HEADER + HEADER + limits::EAGER).next_multiple_of(64);
const SLOT: usize = (HEADER + limits::EAGER).next_multiple_of(64);

/// The objects that an endpoint is bound to, and its options.
#[derive(Debug, Clone, Copy, Default)]
pub struct Binding {
    /// The completion queue for outgoing operations. `send_selective`: only operations with `FI_COMPLETION` are reported.
    pub send_queue: Option<u32>,
    /// See `send_queue`.
    pub send_selective: bool,
    /// The completion queue for receives. `receive_selective`: only receives with `FI_COMPLETION` are reported.
    pub receive_queue: Option<u32>,
    /// See `receive_queue`.
    pub receive_selective: bool,
    /// The address vector.
    pub vector: Option<u32>,
    /// Counters, in the order of [`Counts::ALL`].
    pub counters: [Option<u32>; 6],
    /// The capabilities that the program requested.
    pub caps: u64,
    /// A multi-receive buffer is returned to the program when fewer bytes than this remain in it.
    pub multi_min: usize,
}

impl Binding {
    /// Whether receives are matched by source.
    pub fn directed(&self) -> bool {
        self.caps & FI_DIRECTED_RECV != 0
    }

    /// Returns whether each direction of the endpoint has a queue or a counter, so that the program can see completions.
    pub fn is_complete(&self) -> bool {
        let counted = |flags: u64| {
            let mut counters = Counts::ALL.iter().zip(&self.counters);
            counters.any(|((_, flag), counter)| flags & flag != 0 && counter.is_some())
        };
        let requests = FI_SEND | FI_READ | FI_WRITE;
        let has = |flags: u64, queue: Option<u32>| {
            self.caps & flags == 0 || queue.is_some() || counted(flags)
        };
        let receives = self.caps & (FI_MSG | FI_TAGGED) != 0;
        has(requests, self.send_queue) && (!receives || has(FI_RECV, self.receive_queue))
    }
}

/// An endpoint. Fields are dropped in order of declaration, so the queue pairs come before the memory that the device accesses for
/// them.
#[derive(Debug)]
pub struct Endpoint {
    qp: QueuePair,
    /// Links to busy peers.
    links: link::Links,
    /// The queue pair for reads and writes of the program. It is created for the first of them.
    plain: Option<QueuePair>,
    cq: Completions,
    _receive_region: Region,
    receives: Area,
    receive_key: u32,
    /// Receives that are to be posted again.
    used_receives: Vec<usize>,
    slot_region: Region,
    slots: Area,
    free_slots: Vec<u16>,
    /// The objects that the endpoint is bound to.
    pub binding: Binding,
    /// Whether the endpoint was enabled.
    pub enabled: bool,
    /// The number of objects of the program for this endpoint: one, and its aliases.
    pub objects: usize,
    name: Remote,
    gid_index: u8,
    job: Job,
    ops: Slab<Op>,
    incoming: Slab<Incoming>,
    multis: Slab<Multi>,
    tagged: Matching<Receive>,
    untagged: Matching<Receive>,
    deferred: VecDeque<Deferred>,
    postponed: VecDeque<fence::Postponed>,
    credit: credit::Credit,
    held: HeldMessages,
    /// The number of requests that have not completed.
    outstanding: usize,
    /// Peers with messages that need not be acknowledged soon: at most [`limits::LATER`].
    later: Vec<Remote>,
    /// When peers were last asked whether they still know the operations that wait for them.
    asked: Instant,
    /// The operations that waited for a peer when this was last examined: then, or half the time later.
    waited: Vec<question::Waiting>,
    /// Whether it was examined since then.
    has_looked: bool,
    /// The numbers of the announced messages that peers have asked about: at most [`limits::ANNOUNCED`] of each of [`limits::COUNTED`]
    /// peers.
    questions: HashMap<Remote, Vec<u32>>,
    /// The number of calls of the program since the clock was last read. The clock shows whether peers have to be asked again.
    calls: u32,
    /// The number of invalid messages that were dropped.
    bad: u64,
    /// Whether a peer has refused a message. The first one is logged.
    refused: bool,
    /// Whether the queue pair has failed.
    failed: bool,
}

fn index_of(counts: Counts) -> usize {
    match counts {
        Counts::Send => 0,
        Counts::Receive => 1,
        Counts::Read => 2,
        Counts::Write => 3,
        Counts::RemoteRead => 4,
        Counts::RemoteWrite => 5,
    }
}

impl Endpoint {
    /// Returns an endpoint at an address of the device, which has the given index in the GID table. `port`: the UDP port, or
    /// 0 to let the device choose one.
    pub fn new(
        shared: &Shared,
        device: &'static Device,
        channel: &Arc<Channel>,
        (ip, gid_index): (IpAddr, u8),
        port: u16,
        job: Job,
        binding: Binding,
    ) -> Result<Self, i32> {
        let entries = 2 * limits::REQUESTS
            + limits::RECEIVES
            + limits::RECORDS
            + (2 * limits::LINK_DEPTH + limits::BINDS) * limits::LINKS;
        let cq = Completions::new(device, entries, Some(Arc::clone(channel)))?;
        let receives = Area::new(limits::RECEIVES * STRIDE).ok_or(FI_ENOMEM)?;
        let slots = Area::new(limits::SLOTS * SLOT).ok_or(FI_ENOMEM)?;
        // SAFETY: the areas are live as long as their regions. Each receive and each slot is used either by the device or by
        // this endpoint, never by both.
        let (receive_region, slot_region) = unsafe {
            (
                Region::new(
                    &shared.pd,
                    receives.address(0),
                    receives.size(),
                    Access::Sink,
                )?,
                Region::new(&shared.pd, slots.address(0), slots.size(), Access::Source)?,
            )
        };
        let qp = QueuePair::new(&shared.pd, &cq, job, false, port)?;
        let name = Remote {
            ip,
            qpn: qp.number(),
        };
        let count = u16::try_from(limits::SLOTS).unwrap_or(u16::MAX);
        Ok(Self {
            qp,
            plain: None,
            cq,
            receive_key: receive_region.lkey(),
            used_receives: Vec::with_capacity(limits::REPOST),
            _receive_region: receive_region,
            receives,
            slot_region,
            slots,
            free_slots: (0..count).rev().collect(),
            binding,
            enabled: false,
            objects: 1,
            name,
            gid_index,
            job,
            ops: Slab::with_own_names(),
            incoming: Slab::with_own_names(),
            multis: Slab::default(),
            tagged: Matching::default(),
            untagged: Matching::default(),
            deferred: VecDeque::new(),
            postponed: VecDeque::new(),
            credit: credit::Credit::default(),
            links: link::Links::new(job.links),
            held: HeldMessages::default(),
            outstanding: 0,
            later: Vec::new(),
            asked: Instant::now(),
            waited: Vec::new(),
            has_looked: false,
            questions: HashMap::new(),
            calls: 0,
            bad: 0,
            refused: false,
            failed: false,
        })
    }

    /// Returns the name of the endpoint.
    pub fn name(&self) -> Remote {
        self.name
    }

    /// Changes the address of an endpoint that is not enabled. `port`: 0 if it does not change.
    pub fn rename(
        &mut self,
        shared: &Shared,
        (ip, gid_index): (IpAddr, u8),
        port: u16,
    ) -> Result<(), i32> {
        if port != 0 && self.name.qpn >> 8 != u32::from(port) {
            self.qp = QueuePair::new(&shared.pd, &self.cq, self.job, false, port)?;
        }
        self.gid_index = gid_index;
        self.name = Remote {
            ip,
            qpn: self.qp.number(),
        };
        Ok(())
    }

    /// Enables the endpoint: posts its receives.
    pub fn enable(&mut self) -> Result<(), i32> {
        if !self.enabled {
            for at in 0..limits::RECEIVES {
                self.used_receives.push(at);
                if self.used_receives.len() == limits::REPOST || at + 1 == limits::RECEIVES {
                    self.post_receives()?;
                }
            }
            self.enabled = true;
            // A thread that waits already has requested events of the endpoints that there were before.
            self.cq.arm();
        }
        Ok(())
    }

    /// Requests an event for the next completion of the device.
    pub fn arm(&mut self) {
        self.cq.arm();
        // A program that waits for events makes few calls, so the next one reads the clock, to find out whether peers have to be
        // asked.
        self.calls = limits::ASK_CALLS;
    }

    /// Returns whether no operation waits for a peer.
    pub fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.deferred.is_empty() && self.postponed.is_empty()
    }

    /// Returns the number of requests and operations that have not completed.
    pub(super) fn unfinished(&self) -> usize {
        let waiting = self.deferred.len() + self.postponed.len();
        self.outstanding + self.ops.iter().count() + waiting
    }

    /// Returns whether a peer has not received the content of an announced message whose completion was already reported.
    pub(super) fn owes_content(&self) -> bool {
        let owes = |op: &Op| matches!(op, Op::Announced { done: None, to, .. } if !self.links.has_closed(*to));
        self.ops.iter().any(|(_, op)| owes(op))
    }

    /// Posts the receives that were used.
    pub(super) fn post_receives(&mut self) -> Result<(), i32> {
        let receive = |at: usize| {
            let piece = Piece {
                at: self.receives.address(at * STRIDE),
                len: ROUTE_HEADER + HEADER + limits::EAGER,
                lkey: self.receive_key,
            };
            (RECEIVE << KIND | at as u64, piece)
        };
        let used = self.used_receives.iter().map(|at| receive(*at));
        // SAFETY: the area is registered, and these parts of it are not used before the completion.
        let posted = unsafe { self.qp.receives(used) };
        self.used_receives.clear();
        posted
    }

    fn peer(&self, cx: &Shared, at: FiAddr) -> Result<Remote, i32> {
        let vector = self.binding.vector.and_then(|v| cx.vectors.get(v));
        vector.and_then(|v| v.get(at)).ok_or(FI_EINVAL)
    }

    fn source(&self, cx: &Shared, from: Remote) -> FiAddr {
        let vector = self.binding.vector.and_then(|v| cx.vectors.get(v));
        vector.map_or(FI_ADDR_NOTAVAIL, |v| v.find(from))
    }

    fn ready(&self, cx: &Shared) -> Result<(), i32> {
        if !self.enabled || self.failed {
            return Err(FI_EOPBADSTATE);
        }
        let queue = self.binding.send_queue.and_then(|q| cx.queues.get(q));
        if queue.is_some_and(Queue::is_full) {
            return Err(FI_EAGAIN);
        }
        Ok(())
    }
}

/// Returns the pieces of a request for `len` bytes of `memory` from `from` on. Each nonempty buffer of the memory has a region.
fn pieces(memory: &UserMemory, regions: &[Region], from: usize, len: usize) -> Vec<Piece> {
    let piece = |(number, at, len)| {
        let lkey = regions.get(number).map_or(0, Region::lkey);
        Piece { at, len, lkey }
    };
    memory.range(from, len).map(piece).collect()
}

fn kind_flag(tagged: bool) -> u64 {
    if tagged { FI_TAGGED } else { FI_MSG }
}

/// Returns the error for a request that could not be posted: `FI_EAGAIN` if the send queue is full.
fn full(why: i32) -> i32 {
    if why == libc::ENOMEM { FI_EAGAIN } else { why }
}
