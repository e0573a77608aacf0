//! An endpoint: messages and one-sided operations on a reliable-datagram queue pair.
//!
//! Messages of at most [`limits::EAGER`] bytes are sent with their content. A longer one is announced; when a receive is
//! there, the receiver grants its memory to this one peer, the sender writes into it with a record (RDMA Write-Record), and
//! the record tells the receiver. Plain reads and writes of the program go through a second queue pair, whose writes leave no
//! records.

pub(crate) mod atomic;
mod one_sided;
mod progress;
mod receive;
mod send;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

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
    To, Way, Wc, error_of, kind_of, source_of,
};
use crate::wire::{COMPARE, DATA, FETCH, HEADER, Header, Kind, TAGGED, VERSION};

/// Memory that the program has registered.
#[derive(Debug, Clone, Copy)]
pub struct Registered {
    /// Its address.
    pub at: usize,
    /// Its length.
    pub len: usize,
    /// Peers may read it.
    pub read: bool,
    /// Peers may write it.
    pub write: bool,
}

/// What the endpoints of a domain share.
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
    /// Ways to hosts, as far as something was sent there.
    ways: HashMap<IpAddr, Arc<Way>>,
}

impl Shared {
    /// Of a new domain.
    pub fn new(pd: Arc<Pd>) -> Self {
        Self {
            pd,
            queues: Slab::default(),
            counters: Slab::default(),
            vectors: Slab::default(),
            registered: HashMap::new(),
            ways: HashMap::new(),
        }
    }

    fn way(&mut self, to: IpAddr, from: u8) -> Result<Arc<Way>, i32> {
        if let Some(way) = self.ways.get(&to) {
            return Ok(Arc::clone(way));
        }
        // A stranger may have as many addresses as it likes.
        if self.ways.len() >= limits::PEERS {
            self.ways.clear();
        }
        let way = Arc::new(Way::new(&self.pd, to, from)?);
        self.ways.insert(to, Arc::clone(&way));
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

/// What a counter of an endpoint counts.
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
    /// Each with the flag by which a counter is bound.
    pub const ALL: [(Self, u64); 6] = [
        (Self::Send, FI_SEND),
        (Self::Receive, FI_RECV),
        (Self::Read, FI_READ),
        (Self::Write, FI_WRITE),
        (Self::RemoteRead, FI_REMOTE_READ),
        (Self::RemoteWrite, FI_REMOTE_WRITE),
    ];
}

/// What is reported when an operation is over.
#[derive(Debug, Clone, Copy)]
struct Done {
    context: usize,
    flags: u64,
    /// A success is reported, too.
    reported: bool,
    counts: Counts,
}

/// A request of the device, or something that waits for a peer.
#[derive(Debug)]
enum Op {
    /// A message with its content, maybe in a slot. `None`: the program knows already.
    Sent {
        done: Option<Done>,
        slot: Option<u16>,
    },
    /// A message that was announced.
    Announced {
        done: Done,
        to: Remote,
        memory: UserMemory,
        regions: Vec<Region>,
        /// The announcement has arrived.
        known: bool,
        grant: Option<Grant>,
    },
    /// A read or a write of the program.
    OneSided {
        done: Done,
        slot: Option<u16>,
        _regions: Vec<Region>,
        /// What the target's program gets when it is done.
        notice: Option<(Remote, Header)>,
    },
    /// The message to the target's program that a write is done.
    Notified { done: Done },
    /// A question whether a peer is there.
    Probe { to: Remote },
    /// An atomic operation, which waits for its answer.
    Atomic {
        done: Done,
        to: Remote,
        result: UserMemory,
        /// Bytes of the answer.
        expects: usize,
        /// The request has arrived.
        known: bool,
    },
    /// The message that asks for the operation of this name.
    Request { slot: Option<u16>, of: u32 },
    /// An answer with content.
    Answer { slot: Option<u16> },
}

/// Memory of a peer that an announced message may be written to.
#[derive(Debug, Clone, Copy)]
struct Grant {
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
    /// A buffer for many messages.
    multi: Option<u32>,
}

/// A buffer for many messages.
#[derive(Debug)]
struct Multi {
    used: usize,
    /// Messages that are being written to it.
    underway: usize,
    /// No more messages go there.
    over: bool,
}

/// What a message is received into.
#[derive(Debug, Clone, Copy)]
struct Target {
    context: usize,
    memory: UserMemory,
    reported: bool,
    multi: Option<u32>,
}

/// A message that is being written to memory of the program.
#[derive(Debug)]
struct Incoming {
    target: Target,
    message: Arrived,
    granted: usize,
    base: u64,
    region: Option<Region>,
    /// Where it is written if the program's memory is in several pieces.
    aside: Option<Area>,
}

/// What is known of a message without its content.
#[derive(Debug, Clone, Copy)]
struct Arrived {
    from: Remote,
    source: FiAddr,
    tagged: bool,
    tag: u64,
    data: Option<u64>,
    length: u64,
}

/// What could not be sent because the send queue was full.
#[derive(Debug)]
enum Deferred {
    Answer(Remote, Header, Vec<u8>),
    Write(u32),
    Notice(Remote, Header, Done),
}

/// A message that stays in the device's receive, since too many wait already.
#[derive(Debug)]
struct Held {
    receive: usize,
    length: usize,
    from: Remote,
}

/// A message to send.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// Where to.
    pub to: FiAddr,
    /// Its bytes.
    pub memory: UserMemory,
    /// Its tag, if it has one.
    pub tag: Option<u64>,
    /// What goes beside it.
    pub data: Option<u64>,
    /// The program's word for it.
    pub context: usize,
    /// `FI_COMPLETION`, `FI_INJECT`, and levels of completion.
    pub flags: u64,
    /// Not even a completion: `fi_inject` and its siblings.
    pub silent: bool,
}

/// A receive to post.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The source of the message.
    pub source: FiAddr,
    /// Where it goes.
    pub memory: UserMemory,
    /// The tag and the bits that do not count, if it has one.
    pub tag: Option<(u64, u64)>,
    /// The program's word for it.
    pub context: usize,
    /// `FI_COMPLETION`, `FI_MULTI_RECV`, `FI_PEEK`, `FI_CLAIM`, `FI_DISCARD`.
    pub flags: u64,
}

/// An atomic operation.
#[derive(Debug, Clone, Copy)]
pub struct AtomicRequest {
    /// Whose memory.
    pub to: FiAddr,
    /// The elements there: address and key.
    pub at: (u64, u64),
    /// Their type, number and what is done with them, as libfabric numbers these.
    pub datatype: u32,
    /// See above.
    pub count: usize,
    /// See above.
    pub op: u32,
    /// Whether there is a result, and a comparison.
    pub class: Class,
    /// The operands.
    pub operand: UserMemory,
    /// What is compared with.
    pub compare: UserMemory,
    /// Where the former values go.
    pub result: UserMemory,
    /// The program's word for it.
    pub context: usize,
    /// As in [`Outgoing`].
    pub flags: u64,
    /// As in [`Outgoing`].
    pub silent: bool,
}

/// A read or a write.
#[derive(Debug, Clone, Copy)]
pub struct OneSidedRequest {
    /// Whose memory.
    pub to: FiAddr,
    /// The memory here.
    pub memory: UserMemory,
    /// The memory there: address and key.
    pub at: (u64, u64),
    /// It is read.
    pub read: bool,
    /// What the target's program gets.
    pub data: Option<u64>,
    /// The program's word for it.
    pub context: usize,
    /// As in [`Outgoing`].
    pub flags: u64,
    /// As in [`Outgoing`].
    pub silent: bool,
}

const KIND: u32 = 56;
/// A receive of the pool.
const RECEIVE: u64 = 0;
/// A request of an operation.
const OP: u64 = 1;
/// The announcement of one.
const ANNOUNCE: u64 = 2;
/// An answer that belongs to nothing here.
const ANSWER: u64 = 3;

const STRIDE: usize = (ROUTE_HEADER + HEADER + limits::EAGER).next_multiple_of(64);
const SLOT: usize = (HEADER + limits::EAGER).next_multiple_of(64);

/// How an endpoint is bound and what it was asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Binding {
    /// Where completions of what is sent go, and whether only those that are asked for.
    pub send_queue: Option<u32>,
    /// See above.
    pub send_selective: bool,
    /// Where completions of receives go.
    pub receive_queue: Option<u32>,
    /// See above.
    pub receive_selective: bool,
    /// The address vector.
    pub vector: Option<u32>,
    /// Counters, in the order of [`Counts::ALL`].
    pub counters: [Option<u32>; 6],
    /// Receives name their source.
    pub directed: bool,
    /// Flags of operations that name none.
    pub send_flags: u64,
    /// See above.
    pub receive_flags: u64,
    /// Bytes below which a buffer for many messages is given back.
    pub multi_min: usize,
}

/// An endpoint. Its fields are dropped from the first to the last: what the device uses after what uses it.
#[derive(Debug)]
pub struct Endpoint {
    qp: QueuePair,
    /// For plain reads and writes; made with the first of them.
    plain: Option<QueuePair>,
    cq: Completions,
    _receive_region: Region,
    receives: Area,
    receive_key: u32,
    slot_region: Region,
    slots: Area,
    free_slots: Vec<u16>,
    /// How it is bound.
    pub binding: Binding,
    /// Whether it was enabled.
    pub enabled: bool,
    name: Remote,
    place: u8,
    job: Job,
    ops: Slab<Op>,
    incoming: Slab<Incoming>,
    multis: Slab<Multi>,
    tagged: Matching<Receive>,
    untagged: Matching<Receive>,
    deferred: VecDeque<Deferred>,
    held: VecDeque<Held>,
    /// Requests that have not completed.
    outstanding: usize,
    asked: Instant,
    /// Messages that were dropped because they are none.
    bad: u64,
    /// A peer has refused a message.
    refused: bool,
    /// The queue pair has failed.
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
    /// An endpoint at an address of the device, which is at a place of its table, and at a port unless that is 0.
    pub fn new(
        shared: &Shared,
        device: &'static Device,
        channel: &Arc<Channel>,
        (ip, place): (IpAddr, u8),
        port: u16,
        job: Job,
        binding: Binding,
    ) -> Result<Self, i32> {
        let entries = 2 * limits::REQUESTS + limits::RECEIVES + limits::RECORDS;
        let cq = Completions::new(device, entries, Some(Arc::clone(channel)))?;
        let receives = Area::new(limits::RECEIVES * STRIDE).ok_or(FI_ENOMEM)?;
        let slots = Area::new(limits::SLOTS * SLOT).ok_or(FI_ENOMEM)?;
        // SAFETY: the areas live as long as their regions, and are read and written as the device allows: a receive or a
        // slot is either the device's or this endpoint's.
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
            _receive_region: receive_region,
            receives,
            slot_region,
            slots,
            free_slots: (0..count).rev().collect(),
            binding,
            enabled: false,
            name,
            place,
            job,
            ops: Slab::default(),
            incoming: Slab::default(),
            multis: Slab::default(),
            tagged: Matching::default(),
            untagged: Matching::default(),
            deferred: VecDeque::new(),
            held: VecDeque::new(),
            outstanding: 0,
            asked: Instant::now(),
            bad: 0,
            refused: false,
            failed: false,
        })
    }

    /// Its name.
    pub fn name(&self) -> Remote {
        self.name
    }

    /// Begins to receive.
    pub fn enable(&mut self) -> Result<(), i32> {
        if !self.enabled {
            for at in 0..limits::RECEIVES {
                self.post_receive(at)?;
            }
            self.enabled = true;
        }
        Ok(())
    }

    /// Requests an event for what the device completes next.
    pub fn arm(&self) {
        self.cq.arm();
    }

    /// Whether nothing that was posted waits for a peer.
    pub fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.deferred.is_empty()
    }

    fn post_receive(&self, at: usize) -> Result<(), i32> {
        let piece = Piece {
            at: self.receives.address(at * STRIDE),
            len: ROUTE_HEADER + HEADER + limits::EAGER,
            lkey: self.receive_key,
        };
        // SAFETY: the area is registered; nothing uses this part of it until the completion.
        unsafe { self.qp.receive(RECEIVE << KIND | at as u64, piece) }
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
        if !self.enabled {
            return Err(FI_EOPBADSTATE);
        }
        let queue = self.binding.send_queue.and_then(|q| cx.queues.get(q));
        if queue.is_some_and(Queue::is_full) {
            return Err(FI_EAGAIN);
        }
        Ok(())
    }
}

fn kind_flag(tagged: bool) -> u64 {
    if tagged { FI_TAGGED } else { FI_MSG }
}

/// The error for a request that could not be posted.
fn full(why: i32) -> i32 {
    if why == libc::ENOMEM { FI_EAGAIN } else { why }
}
