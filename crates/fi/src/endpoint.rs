//! An endpoint: messages and one-sided operations on a reliable-datagram queue pair.
//!
//! Messages of at most [`limits::EAGER`] bytes are sent with their content. A longer one is announced; when a receive is
//! there, the receiver grants its memory to this one peer, the sender writes into it with a record (RDMA Write-Record), and
//! the record tells the receiver. Plain reads and writes of the program go through a second queue pair, whose writes leave no
//! records.

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
use crate::wire::{COMPARE, DATA, FETCH, HEADER, Header, Kind, TAGGED};

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
    /// An endpoint at an address of the device, which is at a place of its table.
    pub fn new(
        shared: &Shared,
        device: &'static Device,
        channel: &Arc<Channel>,
        (ip, place): (IpAddr, u8),
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
        let qp = QueuePair::new(&shared.pd, &cq, job, false)?;
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

    // ------------------------------------------------------------------ sending

    /// Sends a message.
    pub fn send(&mut self, cx: &mut Shared, message: &Outgoing) -> Result<(), i32> {
        self.ready(cx)?;
        let length = message.memory.len();
        if length > limits::MESSAGE || (message.flags & FI_INJECT != 0 && length > limits::INJECT) {
            return Err(FI_EMSGSIZE);
        }
        match self.try_send(cx, message, length) {
            Err(FI_EAGAIN) => {
                self.progress(cx);
                self.try_send(cx, message, length)
            }
            other => other,
        }
    }

    fn try_send(&mut self, cx: &mut Shared, message: &Outgoing, length: usize) -> Result<(), i32> {
        let to = self.peer(cx, message.to)?;
        let way = cx.way(to.ip, self.place)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let kind = if message.tag.is_some() {
            FI_TAGGED
        } else {
            FI_MSG
        };
        let done = Done {
            context: message.context,
            flags: FI_SEND | kind,
            reported: !message.silent
                && (message.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts: Counts::Send,
        };
        let mut header = Header::new(if length > limits::EAGER {
            Kind::Announce
        } else {
            Kind::Eager
        });
        header.length = length as u64;
        if let Some(tag) = message.tag {
            header.flags |= TAGGED;
            header.tag = tag;
        }
        if let Some(data) = message.data {
            header.flags |= DATA;
            header.data = data;
        }
        if length > limits::EAGER {
            return self.announce(cx, to, to_whom, message.memory, header, done);
        }
        let at_once = message.flags & (FI_INJECT | FI_INJECT_COMPLETE) != 0
            && message.flags & (FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE) == 0
            || message.silent;
        let later = (!at_once).then_some(done);
        let total = HEADER + length;
        let slot = if total > limits::INLINE {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let Ok(op) = self.ops.insert(Op::Sent { done: later, slot }) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let id = OP << KIND | u64::from(op);
        let posted = match slot {
            None => {
                let mut bytes = [0; limits::INLINE];
                fill(&mut bytes, &header, &message.memory);
                let bytes = bytes.get(..total).unwrap_or_default();
                self.qp.send_copy(to_whom, id, bytes, true)
            }
            Some(slot) => {
                let at = usize::from(slot) * SLOT;
                // SAFETY: the slot is free: no request uses it.
                let bytes = unsafe { self.slots.to_send(at, total) };
                fill(bytes, &header, &message.memory);
                let piece = Piece {
                    at: self.slots.address(at),
                    len: total,
                    lkey: self.slot_region.lkey(),
                };
                // SAFETY: the slots are registered, and this one is not free until the completion.
                unsafe { self.qp.send(to_whom, id, piece) }
            }
        };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        if at_once {
            self.finish(cx, &done, 0);
        }
        Ok(())
    }

    fn announce(
        &mut self,
        cx: &Shared,
        to: Remote,
        to_whom: To<'_>,
        memory: UserMemory,
        mut header: Header,
        done: Done,
    ) -> Result<(), i32> {
        let mut regions = Vec::new();
        for (at, len) in memory.parts().filter(|(_, len)| *len > 0) {
            // SAFETY: memory of the program, which leaves it as it is until the operation is over.
            regions.push(unsafe { Region::new(&cx.pd, at, len, Access::Source) }?);
        }
        let announced = Op::Announced {
            done,
            to,
            memory,
            regions,
            known: false,
            grant: None,
        };
        let op = self.ops.insert(announced).map_err(|_full| FI_EAGAIN)?;
        header.id = op;
        let id = ANNOUNCE << KIND | u64::from(op);
        if let Err(why) = self.qp.send_copy(to_whom, id, &header.encode(), true) {
            self.ops.remove(op);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
    }

    /// An operation is over.
    fn finish(&self, cx: &mut Shared, done: &Done, err: i32) {
        let counter = self.counter(done.counts);
        cx.count(counter, err != 0);
        if done.reported || err != 0 {
            let entry = Entry::new(done.context, done.flags).failed(err);
            cx.push(self.binding.send_queue, entry);
        }
    }

    fn counter(&self, counts: Counts) -> Option<u32> {
        self.binding
            .counters
            .get(index_of(counts))
            .copied()
            .flatten()
    }

    /// Sends a header to a peer, now or when there is room.
    fn answer(&mut self, cx: &mut Shared, to: Remote, header: Header) {
        if self.deferred.is_empty() && self.try_answer(cx, to, &header) {
            return;
        }
        self.deferred
            .push_back(Deferred::Answer(to, header, Vec::new()));
    }

    /// Whether it need not be tried again.
    fn try_answer(&mut self, cx: &mut Shared, to: Remote, header: &Header) -> bool {
        match self.post_header(cx, to, ANSWER << KIND, header) {
            Ok(()) => true,
            Err(why) => full(why) != FI_EAGAIN,
        }
    }

    fn post_header(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        id: u64,
        header: &Header,
    ) -> Result<(), i32> {
        let way = cx.way(to.ip, self.place)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        self.qp.send_copy(to_whom, id, &header.encode(), true)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Writes a message that was announced to the memory that was granted for it. Whether it need not be tried again.
    fn write_granted(&mut self, cx: &mut Shared, op: u32) -> bool {
        let Some(Op::Announced {
            to,
            memory,
            regions,
            grant: Some(grant),
            ..
        }) = self.ops.get(op)
        else {
            return true;
        };
        let Ok(way) = cx.way(to.ip, self.place) else {
            return true;
        };
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let parts = memory.parts().filter(|(_, len)| *len > 0);
        let mut left = grant.length;
        let mut pieces = Vec::with_capacity(regions.len());
        for ((at, len), region) in parts.zip(regions) {
            let len = len.min(left);
            left -= len;
            if len > 0 {
                let lkey = region.lkey();
                pieces.push(Piece { at, len, lkey });
            }
        }
        let id = OP << KIND | u64::from(op);
        let what = OneSided::Record(grant.word);
        // SAFETY: the regions live until the operation is over.
        let posted = unsafe {
            self.qp
                .one_sided(to_whom, id, what, (grant.rkey, grant.base), &pieces)
        };
        match posted {
            Ok(()) => {
                self.outstanding += 1;
                true
            }
            Err(why) if full(why) == FI_EAGAIN => false,
            Err(why) => {
                if let Some(Op::Announced { done, .. }) = self.ops.remove(op) {
                    self.finish(cx, &done, why);
                }
                true
            }
        }
    }

    // ------------------------------------------------------------------ reading and writing

    /// Reads or writes memory of a peer.
    pub fn access(&mut self, cx: &mut Shared, what: &OneSidedRequest) -> Result<(), i32> {
        self.ready(cx)?;
        let length = what.memory.len();
        if length > limits::MESSAGE || (what.flags & FI_INJECT != 0 && length > limits::INJECT) {
            return Err(FI_EMSGSIZE);
        }
        match self.try_access(cx, what, length) {
            Err(FI_EAGAIN) => {
                self.progress(cx);
                self.try_access(cx, what, length)
            }
            other => other,
        }
    }

    fn try_access(
        &mut self,
        cx: &mut Shared,
        what: &OneSidedRequest,
        length: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, what.to)?;
        let rkey = u32::try_from(what.at.1).map_err(|_| FI_ENOKEY)?;
        let way = cx.way(to.ip, self.place)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let done = Done {
            context: what.context,
            flags: FI_RMA | if what.read { FI_READ } else { FI_WRITE },
            reported: !what.silent
                && (what.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts: if what.read {
                Counts::Read
            } else {
                Counts::Write
            },
        };
        let inject = what.silent || what.flags & FI_INJECT != 0;
        let slot = if !what.read && (inject || length <= limits::INJECT) {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let (mut regions, mut pieces) = (Vec::new(), Vec::new());
        if let Some(slot) = slot {
            let at = usize::from(slot) * SLOT;
            // SAFETY: the slot is free: no request uses it.
            what.memory
                .read(0, unsafe { self.slots.to_send(at, length) });
            pieces.push(Piece {
                at: self.slots.address(at),
                len: length,
                lkey: self.slot_region.lkey(),
            });
        } else {
            let access = if what.read {
                Access::Sink
            } else {
                Access::Source
            };
            for (at, len) in what.memory.parts().filter(|(_, len)| *len > 0) {
                // SAFETY: memory of the program, which is the device's until the operation is over.
                let region = unsafe { Region::new(&cx.pd, at, len, access) }?;
                let lkey = region.lkey();
                pieces.push(Piece { at, len, lkey });
                regions.push(region);
            }
        }
        if self.plain.is_none() {
            match QueuePair::new(&cx.pd, &self.cq, self.job, true) {
                Ok(qp) => self.plain = Some(qp),
                Err(why) => {
                    self.free_slots.extend(slot);
                    return Err(why);
                }
            }
        }
        let Some(qp) = &self.plain else {
            return Err(FI_EOTHER);
        };
        let notice = what.data.filter(|_| !what.read).map(|data| {
            let mut header = Header::new(Kind::Written);
            header.flags |= DATA;
            header.data = data;
            header.length = length as u64;
            (to, header)
        });
        let op = Op::OneSided {
            done,
            slot,
            _regions: regions,
            notice,
        };
        let Ok(op) = self.ops.insert(op) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let kind = if what.read {
            OneSided::Read
        } else {
            OneSided::Write
        };
        let id = OP << KIND | u64::from(op);
        // SAFETY: the regions and the slot are the operation's until it is over.
        let posted = unsafe { qp.one_sided(to_whom, id, kind, (rkey, what.at.0), &pieces) };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Sends to the target's program that a write is done, now or when there is room.
    fn notify(&mut self, cx: &mut Shared, to: Remote, header: Header, done: Done) {
        if !self.deferred.is_empty() || !self.try_notify(cx, to, &header, done) {
            self.deferred.push_back(Deferred::Notice(to, header, done));
        }
    }

    /// Whether it need not be tried again.
    fn try_notify(&mut self, cx: &mut Shared, to: Remote, header: &Header, done: Done) -> bool {
        let Ok(op) = self.ops.insert(Op::Notified { done }) else {
            return false;
        };
        let id = OP << KIND | u64::from(op);
        match self.post_header(cx, to, id, header) {
            Ok(()) => true,
            Err(why) => {
                self.ops.remove(op);
                if full(why) == FI_EAGAIN {
                    return false;
                }
                self.finish(cx, &done, why);
                true
            }
        }
    }

    // ------------------------------------------------------------------ atomic operations

    /// Does an atomic operation on memory of a peer: the peer's library does it.
    pub fn atomic(&mut self, cx: &mut Shared, what: &AtomicRequest) -> Result<(), i32> {
        self.ready(cx)?;
        let kind = Type::from_number(what.datatype)
            .filter(|kind| atomics::is_valid(*kind, what.op, what.class))
            .ok_or(FI_EOPNOTSUPP)?;
        let bytes = what.count.saturating_mul(kind.size());
        if bytes > limits::ATOMIC || bytes == 0 {
            return Err(FI_EINVAL);
        }
        let reads = what.op == FI_ATOMIC_READ;
        if (!reads && what.operand.len() != bytes)
            || (what.class != Class::Write && what.result.len() != bytes)
            || (what.class == Class::Compare && what.compare.len() != bytes)
        {
            return Err(FI_EINVAL);
        }
        match self.try_atomic(cx, what, bytes) {
            Err(FI_EAGAIN) => {
                self.progress(cx);
                self.try_atomic(cx, what, bytes)
            }
            other => other,
        }
    }

    fn try_atomic(
        &mut self,
        cx: &mut Shared,
        what: &AtomicRequest,
        bytes: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, what.to)?;
        let rkey = u32::try_from(what.at.1).map_err(|_| FI_ENOKEY)?;
        let mut header = Header::new(Kind::Atomic);
        header.length = what.count as u64;
        header.tag = what.at.0;
        header.data =
            u64::from(rkey) << 32 | u64::from(what.op & 0xffff) << 16 | u64::from(what.datatype);
        let mut content = Vec::with_capacity(2 * bytes);
        if what.op != FI_ATOMIC_READ {
            content.resize(bytes, 0);
            what.operand.read(0, &mut content);
        }
        let fetches = what.class != Class::Write;
        if fetches {
            header.flags |= FETCH;
        }
        if what.class == Class::Compare {
            header.flags |= COMPARE;
            let from = content.len();
            content.resize(from + bytes, 0);
            what.compare
                .read(0, content.get_mut(from..).unwrap_or_default());
        }
        let done = Done {
            context: what.context,
            flags: FI_ATOMIC | if fetches { FI_READ } else { FI_WRITE },
            reported: !what.silent
                && (what.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts: if fetches { Counts::Read } else { Counts::Write },
        };
        let op = Op::Atomic {
            done,
            to,
            result: what.result,
            expects: if fetches { bytes } else { 0 },
            known: false,
        };
        let op = self.ops.insert(op).map_err(|_full| FI_EAGAIN)?;
        header.id = op;
        let sent = self.post_message(cx, to, &header, &content, |slot| Op::Request {
            slot,
            of: op,
        });
        if sent.is_err() {
            self.ops.remove(op);
        }
        sent
    }

    /// Sends a header with content, and has it kept as an operation.
    fn post_message(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        header: &Header,
        content: &[u8],
        kept: impl FnOnce(Option<u16>) -> Op,
    ) -> Result<(), i32> {
        let total = HEADER + content.len();
        let way = cx.way(to.ip, self.place)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let slot = if total > limits::INLINE {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let Ok(op) = self.ops.insert(kept(slot)) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let id = OP << KIND | u64::from(op);
        let posted = match slot {
            None => {
                let mut message = Vec::with_capacity(total);
                message.extend_from_slice(&header.encode());
                message.extend_from_slice(content);
                self.qp.send_copy(to_whom, id, &message, true)
            }
            Some(slot) => {
                let at = usize::from(slot) * SLOT;
                // SAFETY: the slot is free: no request uses it.
                let bytes = unsafe { self.slots.to_send(at, total) };
                if let Some((head, rest)) = bytes.split_first_chunk_mut::<HEADER>() {
                    *head = header.encode();
                    rest.copy_from_slice(content);
                }
                let piece = Piece {
                    at: self.slots.address(at),
                    len: total,
                    lkey: self.slot_region.lkey(),
                };
                // SAFETY: the slots are registered, and this one is not free until the completion.
                unsafe { self.qp.send(to_whom, id, piece) }
            }
        };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Whether it need not be tried again.
    fn try_reply(&mut self, cx: &mut Shared, to: Remote, header: &Header, content: &[u8]) -> bool {
        let sent = self.post_message(cx, to, header, content, |slot| Op::Answer { slot });
        sent != Err(FI_EAGAIN)
    }

    /// A peer asks for an atomic operation on memory of this process.
    fn operate(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        // SAFETY: the receive has completed and is not posted again yet.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        let content = datagram.get(ROUTE_HEADER + HEADER..).unwrap_or_default();
        let mut answer = Header::new(Kind::AtomicDone);
        answer.id = header.id;
        let former = match operation(cx, header, content) {
            Ok(former) => former,
            Err(why) => {
                answer.tag = u64::try_from(why).unwrap_or(1);
                Vec::new()
            }
        };
        answer.length = former.len() as u64;
        if !self.deferred.is_empty() || !self.try_reply(cx, from, &answer, &former) {
            self.deferred
                .push_back(Deferred::Answer(from, answer, former));
        }
    }

    /// The answer to an atomic operation.
    fn operated(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        let Some(Op::Atomic {
            to,
            expects,
            result,
            done,
            ..
        }) = self.ops.get(header.id)
        else {
            return;
        };
        // SAFETY: as in `operate`.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        let content = datagram.get(ROUTE_HEADER + HEADER..).unwrap_or_default();
        let failed = header.tag != 0;
        if *to != from || (!failed && content.len() != *expects) {
            return;
        }
        let done = *done;
        let err = if failed {
            i32::try_from(header.tag)
                .ok()
                .filter(|e| (1..4096).contains(e))
                .unwrap_or(FI_EREMOTEIO)
        } else {
            result.write(0, content);
            0
        };
        self.ops.remove(header.id);
        self.finish(cx, &done, err);
    }

    // ------------------------------------------------------------------ receiving

    /// Posts a receive, or looks for a message.
    pub fn receive(&mut self, cx: &mut Shared, wanted: &Wanted) -> Result<(), i32> {
        if !self.enabled {
            return Err(FI_EOPBADSTATE);
        }
        let source = if self.binding.directed {
            let vector = self.binding.vector.and_then(|v| cx.vectors.get(v));
            vector
                .map_or(Some(wanted.source), |v| v.canonical(wanted.source))
                .ok_or(FI_EINVAL)?
        } else {
            FI_ADDR_UNSPEC
        };
        let (tag, ignore) = wanted.tag.unwrap_or((0, u64::MAX));
        let pattern = Pattern {
            source,
            tag,
            ignore,
        };
        let tagged = wanted.tag.is_some();
        let reported = wanted.flags & FI_COMPLETION != 0 || !self.binding.receive_selective;
        if wanted.flags & FI_PEEK != 0 {
            self.progress(cx);
            self.peek(cx, wanted, &pattern, tagged);
            return Ok(());
        }
        let mut receive = Receive {
            context: wanted.context,
            memory: wanted.memory,
            reported,
            multi: None,
        };
        if wanted.flags & FI_CLAIM != 0 {
            let message = self.matching(tagged).take_claimed(wanted.context);
            let message = message.ok_or(FI_EINVAL)?;
            if wanted.flags & FI_DISCARD != 0 {
                self.discard(cx, wanted, &message, tagged);
                return Ok(());
            }
            let target = self.target(&receive, message.length);
            self.land(cx, target, tagged, message);
            return Ok(());
        }
        if wanted.flags & FI_MULTI_RECV != 0 {
            if tagged || wanted.memory.single().is_none() {
                return Err(FI_EINVAL);
            }
            let multi = Multi {
                used: 0,
                underway: 0,
                over: false,
            };
            receive.multi = Some(self.multis.insert(multi).map_err(|_full| FI_EAGAIN)?);
        }
        while let Some(message) = self.matching(tagged).take_message(&pattern) {
            let target = self.target(&receive, message.length);
            self.land(cx, target, tagged, message);
            if self.is_over(&receive) {
                return Ok(());
            }
        }
        self.matching(tagged).post(pattern, receive);
        Ok(())
    }

    fn matching(&mut self, tagged: bool) -> &mut Matching<Receive> {
        if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        }
    }

    /// Whether nothing more goes into a receive that has had a message.
    fn is_over(&self, receive: &Receive) -> bool {
        let multi = receive.multi.and_then(|m| self.multis.get(m));
        multi.is_none_or(|m| m.over)
    }

    fn peek(&mut self, cx: &mut Shared, wanted: &Wanted, pattern: &Pattern, tagged: bool) {
        let queue = self.binding.receive_queue;
        let claim = wanted.flags & FI_CLAIM != 0;
        let matching = self.matching(tagged);
        let found = if claim {
            matching.claim(pattern, wanted.context)
        } else {
            matching.message_for(pattern)
        };
        let entry = Entry::new(wanted.context, FI_RECV | kind_flag(tagged));
        let Some(message) = found else {
            let (tag, _) = wanted.tag.unwrap_or_default();
            let entry = Entry { tag, ..entry };
            return cx.push(queue, entry.failed(FI_ENOMSG));
        };
        let data = message.data.map_or(0, |_| FI_REMOTE_CQ_DATA);
        let entry = Entry {
            flags: entry.flags | data,
            len: usize::try_from(message.length).unwrap_or(usize::MAX),
            data: message.data.unwrap_or(0),
            tag: message.envelope.tag,
            source: message.envelope.source,
            ..entry
        };
        if wanted.flags & FI_DISCARD != 0
            && !claim
            && let Some(message) = self.matching(tagged).take_message(pattern)
        {
            self.refuse(cx, &message);
        }
        cx.push(queue, entry);
    }

    /// A message that is claimed and not wanted.
    fn discard(&mut self, cx: &mut Shared, wanted: &Wanted, message: &Message, tagged: bool) {
        self.refuse(cx, message);
        let entry = Entry {
            tag: message.envelope.tag,
            source: message.envelope.source,
            ..Entry::new(wanted.context, FI_RECV | kind_flag(tagged))
        };
        cx.push(self.binding.receive_queue, entry);
    }

    /// The sender of a message that is not wanted need not keep it.
    fn refuse(&mut self, cx: &mut Shared, message: &Message) {
        if let Content::Announced(id) = message.content {
            let mut header = Header::new(Kind::Grant);
            header.id = id;
            header.tag = u64::from(u32::MAX);
            self.answer(cx, message.from, header);
        }
    }

    /// Where a message of `length` bytes goes. A buffer for many keeps the rest.
    fn target(&mut self, receive: &Receive, length: u64) -> Target {
        let mut memory = receive.memory;
        if let Some(multi) = receive.multi.and_then(|m| self.multis.get_mut(m)) {
            memory = receive.memory.behind(multi.used);
            let room = memory.len();
            let used = usize::try_from(length).unwrap_or(usize::MAX).min(room);
            multi.used += used;
            multi.underway += 1;
            multi.over = room - used < self.binding.multi_min.max(1);
        }
        Target {
            context: receive.context,
            memory,
            reported: receive.reported,
            multi: receive.multi,
        }
    }

    /// A message has its receive.
    fn land(&mut self, cx: &mut Shared, target: Target, tagged: bool, message: Message) {
        let arrived = Arrived {
            from: message.from,
            source: message.envelope.source,
            tagged,
            tag: message.envelope.tag,
            data: message.data,
            length: message.length,
        };
        match message.content {
            Content::Here(bytes) => {
                let len = target.memory.write(0, &bytes);
                self.received(cx, &target, &arrived, len, 0);
            }
            Content::Announced(id) => self.grant(cx, target, arrived, id),
        }
    }

    /// A message is received, or failed.
    fn received(&mut self, cx: &mut Shared, target: &Target, m: &Arrived, len: usize, err: i32) {
        let mut flags = FI_RECV | kind_flag(m.tagged);
        if m.data.is_some() {
            flags |= FI_REMOTE_CQ_DATA;
        }
        let mut last = false;
        if let Some(name) = target.multi
            && let Some(multi) = self.multis.get_mut(name)
        {
            multi.underway = multi.underway.saturating_sub(1);
            if multi.over && multi.underway == 0 {
                last = true;
                flags |= FI_MULTI_RECV;
                self.multis.remove(name);
            }
        }
        let olen = usize::try_from(m.length).unwrap_or(usize::MAX) - len;
        let err = if err == 0 && olen > 0 { FI_ETRUNC } else { err };
        cx.count(self.counter(Counts::Receive), err != 0);
        if target.reported || err != 0 || last {
            let entry = Entry {
                context: target.context,
                flags,
                len,
                buf: target.memory.parts().next().map_or(0, |(at, _)| at),
                data: m.data.unwrap_or(0),
                tag: m.tag,
                source: m.source,
                err,
                olen,
            };
            cx.push(self.binding.receive_queue, entry);
        }
    }

    /// Lets the sender of an announced message write it.
    fn grant(&mut self, cx: &mut Shared, target: Target, message: Arrived, id: u32) {
        let wanted = usize::try_from(message.length).unwrap_or(usize::MAX);
        let granted = wanted.min(target.memory.len());
        let mut header = Header::new(Kind::Grant);
        header.id = id;
        let (region, aside, base) = match self.prepare(cx, &target, message.from, granted) {
            Ok(prepared) => prepared,
            Err(why) => {
                header.tag = u64::from(u32::MAX);
                self.answer(cx, message.from, header);
                self.received(cx, &target, &message, 0, why);
                return;
            }
        };
        let rkey = region.as_ref().map_or(0, Region::rkey);
        let from = message.from;
        let incoming = Incoming {
            target,
            message,
            granted,
            base,
            region,
            aside,
        };
        match self.incoming.insert(incoming) {
            Ok(name) => {
                header.length = granted as u64;
                header.tag = u64::from(rkey) << 32 | u64::from(name);
                header.data = base;
                self.answer(cx, from, header);
            }
            Err(incoming) => {
                self.received(cx, &incoming.target, &incoming.message, 0, FI_ENOMEM);
            }
        }
    }

    fn prepare(
        &self,
        cx: &Shared,
        target: &Target,
        from: Remote,
        granted: usize,
    ) -> Result<(Option<Region>, Option<Area>, u64), i32> {
        if granted == 0 {
            return Ok((None, None, 0));
        }
        let (at, aside) = match target.memory.single() {
            Some((at, _)) => (at, None),
            None => {
                let area = Area::new(granted).ok_or(FI_ENOMEM)?;
                (area.address(0), Some(area))
            }
        };
        // SAFETY: memory of the program, which is the device's until the receive is over, or of this library alone.
        let region = unsafe { Region::new(&cx.pd, at, granted, Access::RemoteSink) }?;
        region.restrict_to(from)?;
        Ok((Some(region), aside, at as u64))
    }

    /// Cancels a receive. Whether there was one.
    pub fn cancel(&mut self, cx: &mut Shared, context: usize) -> bool {
        for tagged in [true, false] {
            let fits = |r: &Receive| r.context == context;
            if let Some(receive) = self.matching(tagged).cancel(fits) {
                self.canceled(cx, &receive, tagged);
                return true;
            }
        }
        false
    }

    fn canceled(&mut self, cx: &mut Shared, receive: &Receive, tagged: bool) {
        if let Some(name) = receive.multi
            && let Some(multi) = self.multis.get_mut(name)
        {
            multi.over = true;
            if multi.underway > 0 {
                // The last message that is written to the buffer tells that it is over.
                return;
            }
            self.multis.remove(name);
        }
        cx.count(self.counter(Counts::Receive), true);
        let entry = Entry::new(receive.context, FI_RECV | kind_flag(tagged));
        cx.push(self.binding.receive_queue, entry.failed(FI_ECANCELED));
    }

    /// The address vector has changed.
    pub fn renew_sources(&mut self, cx: &Shared) {
        let Some(vector) = self.binding.vector.and_then(|v| cx.vectors.get(v)) else {
            return;
        };
        self.tagged.renew_sources(|peer| vector.find(peer));
        self.untagged.renew_sources(|peer| vector.find(peer));
    }

    // ------------------------------------------------------------------ progress

    /// Handles what the device has completed.
    pub fn progress(&mut self, cx: &mut Shared) {
        if !self.enabled {
            return;
        }
        self.send_deferred(cx);
        self.take_held(cx);
        let mut batch = [Wc::default(); limits::BATCH];
        // Answers that cannot be sent wait here, and completions that the program does not read; what is not received waits at
        // the peers.
        let queue = self.binding.receive_queue.and_then(|q| cx.queues.get(q));
        if self.deferred.len() < limits::DEFERRED && !queue.is_some_and(Queue::is_full) {
            let n = self.cq.poll(&mut batch);
            for wc in batch.iter().take(n) {
                self.completed(cx, wc);
            }
        }
        if !self.incoming.is_empty() || !self.ops.is_empty() {
            self.ask(cx);
        }
    }

    fn send_deferred(&mut self, cx: &mut Shared) {
        while let Some(first) = self.deferred.pop_front() {
            let done = match &first {
                Deferred::Answer(to, header, content) if content.is_empty() => {
                    self.try_answer(cx, *to, header)
                }
                Deferred::Answer(to, header, content) => self.try_reply(cx, *to, header, content),
                Deferred::Write(op) => self.write_granted(cx, *op),
                Deferred::Notice(to, header, done) => self.try_notify(cx, *to, header, *done),
            };
            if !done {
                self.deferred.push_front(first);
                // Requests that have completed make room.
                let mut batch = [Wc::default(); limits::BATCH];
                if self.deferred.len() >= limits::DEFERRED {
                    let n = self.cq.poll(&mut batch);
                    for wc in batch.iter().take(n) {
                        self.completed(cx, wc);
                    }
                }
                return;
            }
        }
    }

    fn completed(&mut self, cx: &mut Shared, wc: &Wc) {
        let err = error_of(wc);
        let kind = wc.wr_id >> KIND;
        if err == 0 {
            match kind_of(wc) {
                Of::Receive => return self.arrived(cx, wc),
                Of::Record => return self.recorded(cx, wc),
                Of::Request => {}
            }
        }
        if kind == RECEIVE {
            // The queue pair has failed: nothing more is received.
            return;
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        let name = u32::try_from(wc.wr_id & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        if kind == ANNOUNCE && err == 0 {
            if let Some(Op::Announced { known, .. }) = self.ops.get_mut(name) {
                *known = true;
            }
            return;
        }
        if kind == ANSWER {
            return;
        }
        let Some(op) = self.ops.remove(name) else {
            return;
        };
        match op {
            Op::Sent { done, slot } => {
                self.free_slots.extend(slot);
                self.finish_or_report(cx, done, err);
            }
            Op::OneSided {
                done, slot, notice, ..
            } => {
                self.free_slots.extend(slot);
                match notice {
                    Some((to, header)) if err == 0 => self.notify(cx, to, header, done),
                    _ => self.finish(cx, &done, err),
                }
            }
            Op::Announced { done, to, .. } => {
                self.finish(cx, &done, err);
                self.lost(cx, to, err);
            }
            Op::Notified { done } => self.finish(cx, &done, err),
            Op::Probe { to } => self.lost(cx, to, err),
            Op::Answer { slot } => self.free_slots.extend(slot),
            Op::Request { slot, of } => {
                self.free_slots.extend(slot);
                self.requested(cx, of, err);
            }
            Op::Atomic { .. } => {}
        }
    }

    /// An operation is over, of which the program may know already. A failure is reported all the same.
    fn finish_or_report(&self, cx: &mut Shared, done: Option<Done>, err: i32) {
        match done {
            Some(done) => self.finish(cx, &done, err),
            None if err != 0 => {
                let done = Done {
                    context: 0,
                    flags: FI_SEND,
                    reported: true,
                    counts: Counts::Send,
                };
                self.finish(cx, &done, err);
            }
            None => {}
        }
    }

    /// The request for an atomic operation has arrived, or failed.
    fn requested(&mut self, cx: &mut Shared, name: u32, err: i32) {
        if err == 0 {
            if let Some(Op::Atomic { known, .. }) = self.ops.get_mut(name) {
                *known = true;
            }
        } else if let Some(Op::Atomic { done, to, .. }) = self.ops.remove(name) {
            self.finish(cx, &done, err);
            self.lost(cx, to, err);
        }
    }

    /// A peer does not answer: what waits for it fails.
    fn lost(&mut self, cx: &mut Shared, peer: Remote, err: i32) {
        if err != FI_EHOSTUNREACH && err != FI_ECONNRESET {
            return;
        }
        // Those that the device has a request of fail by that.
        let waiting = self.ops.iter().filter(|(_, op)| {
            matches!(op, Op::Announced { to, known: true, grant: None, .. } | Op::Atomic { to, known: true, .. }
                if *to == peer)
        });
        let waiting: Vec<u32> = waiting.map(|(name, _)| name).collect();
        for name in waiting {
            if let Some(Op::Announced { done, .. } | Op::Atomic { done, .. }) =
                self.ops.remove(name)
            {
                self.finish(cx, &done, err);
            }
        }
        let incoming = self.incoming.iter().filter(|(_, i)| i.message.from == peer);
        let incoming: Vec<u32> = incoming.map(|(name, _)| name).collect();
        for name in incoming {
            if let Some(mut incoming) = self.incoming.remove(name) {
                // Nothing is written to it any more when the program learns of it.
                incoming.region = None;
                self.received(cx, &incoming.target, &incoming.message, 0, err);
            }
        }
        self.tagged.forget_announced(peer);
        self.untagged.forget_announced(peer);
    }

    /// Asks peers that others wait for, now and then, whether they are there: the device only knows of those that something
    /// is sent to.
    fn ask(&mut self, cx: &mut Shared) {
        if self.asked.elapsed() < limits::ASK_AFTER {
            return;
        }
        self.asked = Instant::now();
        let waits = |(_, op): (u32, &Op)| match op {
            Op::Announced { to, .. } | Op::Atomic { to, .. } => Some(*to),
            _ => None,
        };
        let mut peers: Vec<Remote> = self.ops.iter().filter_map(waits).collect();
        peers.extend(self.incoming.iter().map(|(_, i)| i.message.from));
        peers.sort_unstable();
        peers.dedup();
        for (_, op) in self.ops.iter() {
            if let Op::Probe { to } = op {
                peers.retain(|peer| peer != to);
            }
        }
        for to in peers {
            let Ok(op) = self.ops.insert(Op::Probe { to }) else {
                return;
            };
            let id = OP << KIND | u64::from(op);
            let header = Header::new(Kind::Probe);
            if self.post_header(cx, to, id, &header).is_err() {
                self.ops.remove(op);
                return;
            }
        }
    }

    fn arrived(&mut self, cx: &mut Shared, wc: &Wc) {
        let at = usize::try_from(wc.wr_id & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        let length = wc.byte_len as usize;
        // SAFETY: the receive has completed and is posted again below.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        let (route, message) = datagram.split_at(datagram.len().min(ROUTE_HEADER));
        let Some(ip) = source_of(route) else {
            return self.again(at);
        };
        let from = Remote { ip, qpn: wc.src_qp };
        let Some((header, _)) = Header::decode(message) else {
            self.bad = self.bad.wrapping_add(1);
            return self.again(at);
        };
        match header.kind {
            Kind::Eager | Kind::Announce => {
                if !self.held.is_empty() || self.is_crowded() {
                    let receive = at;
                    self.held.push_back(Held {
                        receive,
                        length,
                        from,
                    });
                    return;
                }
                self.take(cx, at, length, from);
            }
            Kind::Grant => self.granted(cx, from, &header),
            Kind::Written => {
                cx.count(self.counter(Counts::RemoteWrite), false);
                let entry = Entry {
                    len: usize::try_from(header.length).unwrap_or(usize::MAX),
                    data: header.data,
                    source: self.source(cx, from),
                    ..Entry::new(0, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)
                };
                cx.push(self.binding.receive_queue, entry);
            }
            Kind::Atomic => self.operate(cx, from, &header, at, length),
            Kind::AtomicDone => self.operated(cx, from, &header, at, length),
            Kind::Probe => {}
        }
        self.again(at);
    }

    fn again(&self, at: usize) {
        // It fails only when the queue pair has failed, and then nothing is received any more.
        let _posted = self.post_receive(at);
    }

    /// Whether so many messages wait for receives that no more may be copied.
    fn is_crowded(&self) -> bool {
        self.tagged.bytes() + self.untagged.bytes() > limits::UNEXPECTED
    }

    fn take_held(&mut self, cx: &mut Shared) {
        for _ in 0..self.held.len() {
            if self.is_crowded() {
                return;
            }
            let Some(held) = self.held.pop_front() else {
                return;
            };
            let Held {
                receive,
                length,
                from,
            } = held;
            self.take(cx, receive, length, from);
            self.again(receive);
        }
    }

    /// Finds the receive of a message, or keeps it.
    fn take(&mut self, cx: &mut Shared, at: usize, length: usize, from: Remote) {
        let source = self.source(cx, from);
        // SAFETY: the receive has completed and is not posted again yet.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        let message = datagram.get(ROUTE_HEADER..).unwrap_or_default();
        let Some((header, content)) = Header::decode(message) else {
            return;
        };
        let tagged = header.has(TAGGED);
        let envelope = Envelope {
            source,
            tag: if tagged { header.tag } else { 0 },
        };
        let data = header.has(DATA).then_some(header.data);
        let arrived = Arrived {
            from,
            source,
            tagged,
            tag: envelope.tag,
            data,
            length: header.length,
        };
        let announced = header.kind == Kind::Announce;
        let matching = if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        };
        let Some((place, receive)) = matching.receive_for(&envelope) else {
            let content = if announced {
                Content::Announced(header.id)
            } else {
                Content::Here(content.to_vec())
            };
            matching.keep(Message {
                envelope,
                from,
                length: header.length,
                data,
                content,
            });
            return;
        };
        let receive = *receive;
        if announced {
            let target = self.target(&receive, header.length);
            if self.is_over(&receive) {
                self.matching(tagged).remove_receive(place);
            }
            self.grant(cx, target, arrived, header.id);
            return;
        }
        // The content is in the device's receive, which `target` and `received` do not touch.
        let mut memory = receive.memory;
        if let Some(multi) = receive.multi.and_then(|m| self.multis.get(m)) {
            memory = memory.behind(multi.used);
        }
        let len = memory.write(0, content);
        let target = self.target(&receive, header.length);
        if self.is_over(&receive) {
            self.matching(tagged).remove_receive(place);
        }
        self.received(cx, &target, &arrived, len, 0);
    }

    /// A peer lets a message be written.
    fn granted(&mut self, cx: &mut Shared, from: Remote, header: &Header) {
        let Some(Op::Announced {
            to,
            memory,
            grant: grant @ None,
            ..
        }) = self.ops.get_mut(header.id)
        else {
            return;
        };
        if *to != from {
            return;
        }
        let [rkey, word] = [header.tag >> 32, header.tag & u64::from(u32::MAX)];
        let most = memory.len();
        *grant = Some(Grant {
            rkey: u32::try_from(rkey).unwrap_or(0),
            word: u32::try_from(word).unwrap_or(0),
            base: header.data,
            length: usize::try_from(header.length).unwrap_or(most).min(most),
        });
        if !self.deferred.is_empty() || !self.write_granted(cx, header.id) {
            self.deferred.push_back(Deferred::Write(header.id));
        }
    }

    /// A peer has written.
    fn recorded(&mut self, cx: &mut Shared, wc: &Wc) {
        let Some(record) = self.qp.record() else {
            return;
        };
        debug_assert_eq!(
            record.qpn, wc.src_qp,
            "records come in the order of their completions"
        );
        let Some(name) = record.word else {
            return; // A write of a program that is not one of ours.
        };
        let fits = self.incoming.get(name).is_some_and(|i| fits(i, &record));
        if !fits {
            self.bad = self.bad.wrapping_add(1);
            return;
        }
        let Some(mut incoming) = self.incoming.remove(name) else {
            return;
        };
        // From here on the memory is the program's alone.
        incoming.region = None;
        if let Some(aside) = &incoming.aside {
            // SAFETY: the region is gone, so the device does not write to it any more.
            let bytes = unsafe { aside.received(0, incoming.granted) };
            incoming.target.memory.write(0, bytes);
        }
        self.received(cx, &incoming.target, &incoming.message, incoming.granted, 0);
    }

    /// Everything that waits fails: the endpoint closes.
    pub fn close(&mut self, cx: &mut Shared) {
        let tagged: Vec<Receive> = self.tagged.cancel_all().collect();
        let untagged: Vec<Receive> = self.untagged.cancel_all().collect();
        drop((tagged, untagged));
        let until = Instant::now() + limits::LINGER;
        while !self.is_idle() && Instant::now() < until {
            self.progress(cx);
        }
    }
}

fn kind_flag(tagged: bool) -> u64 {
    if tagged { FI_TAGGED } else { FI_MSG }
}

/// Whether a record is of what was granted.
fn fits(incoming: &Incoming, record: &Record) -> bool {
    let same_memory = incoming
        .region
        .as_ref()
        .is_none_or(|r| r.rkey() == record.rkey && incoming.base == record.base);
    incoming.message.from.qpn == record.qpn
        && incoming.granted == record.length as usize
        && same_memory
}

/// Writes a message: its header and its content.
fn fill(to: &mut [u8], header: &Header, content: &UserMemory) {
    if let Some((head, rest)) = to.split_first_chunk_mut::<HEADER>() {
        *head = header.encode();
        content.read(0, rest);
    }
}

/// The error for a request that could not be posted.
fn full(why: i32) -> i32 {
    if why == libc::ENOMEM { FI_EAGAIN } else { why }
}

/// Does an atomic operation on registered memory: the former values, if they are asked for.
fn operation(cx: &Shared, header: &Header, content: &[u8]) -> Result<Vec<u8>, i32> {
    let low = |bits: u64| u32::try_from(bits & 0xffff).unwrap_or(0);
    let (rkey, op, datatype) = (header.data >> 32, low(header.data >> 16), low(header.data));
    let kind = Type::from_number(datatype).ok_or(FI_EOPNOTSUPP)?;
    let class = match (header.has(COMPARE), header.has(FETCH)) {
        (true, true) => Class::Compare,
        (true, false) => return Err(FI_EOPNOTSUPP),
        (false, true) => Class::Fetch,
        (false, false) => Class::Write,
    };
    if !atomics::is_valid(kind, op, class) {
        return Err(FI_EOPNOTSUPP);
    }
    let size = kind.size();
    let bytes = usize::try_from(header.length)
        .ok()
        .and_then(|count| count.checked_mul(size))
        .filter(|bytes| *bytes <= limits::ATOMIC)
        .ok_or(FI_EINVAL)?;
    let operands = if op == FI_ATOMIC_READ { 0 } else { bytes };
    let compared = if class == Class::Compare { bytes } else { 0 };
    if content.len() != operands + compared {
        return Err(FI_EINVAL);
    }
    let (with, than) = content.split_at(operands);
    let memory = u32::try_from(rkey)
        .ok()
        .and_then(|key| cx.registered.get(&key))
        .ok_or(FI_EACCES)?;
    let allowed = if op == FI_ATOMIC_READ {
        memory.read
    } else {
        memory.write && (class == Class::Write || memory.read)
    };
    let at = usize::try_from(header.tag).map_err(|_| FI_EACCES)?;
    let offset = at.checked_sub(memory.at).ok_or(FI_EACCES)?;
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= memory.len);
    if !allowed || !inside {
        return Err(FI_EACCES);
    }
    let mut former = Vec::new();
    let (mut with, mut than) = (with.chunks_exact(size), than.chunks_exact(size));
    for i in 0..bytes / size {
        let (w, t) = (
            with.next().map_or(0, atomics::bits_of),
            than.next().map_or(0, atomics::bits_of),
        );
        let f = |old| atomics::compute(kind, op, old, w, t);
        // SAFETY: inside of registered memory that peers may change (checked), which stays registered while the domain is
        // locked.
        let old = unsafe { memory::change(at + i * size, size, f) };
        if class != Class::Write {
            former.extend(old.to_le_bytes().iter().take(size));
        }
    }
    Ok(former)
}
