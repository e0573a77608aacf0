//! Stream sockets: a reliable queue pair, a ring that the peer writes into, and one message after each write.
//!
//! ```text
//!  New --bind--> Bound --listen--> Listening --(request)--> a new socket: Open
//!   +-------------+--connect--> Connecting --(established)--> Open --(either end)--> Over
//!                                    +-------(refused)--------------------------------^
//! ```
//!
//! The thread that handles the device's sockets accepts connection requests when they arrive, and queues the connections for
//! `raccept`. As with TCP sockets, `connect` of the peer does not wait for the listening program.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
use anywarp_core::lock::Mutex;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State as QpState};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Op, Payload, RecvRequest, Remote, Sge, WorkRequest};
use anywarp_core::wire::{Stag, To};
use anywarp_engine::cm::{self, CmId, ConnParam, Event, EventChannel, EventKind, PortSpace};
use anywarp_engine::log;
use anywarp_engine::qp::RcQp;

use super::again::Refused;
use super::buffer::{Buffer, Caller};
use super::flow::{CONTROL, Pieces, Receiver, Sender, Violation};
use super::iomap::Maps;
use super::options::Options;
use super::wire::{self, AREA, AREAS, Area, Hello, MAPPING, MESSAGE, Message};
use super::{Kind, Socket, Wait};
use crate::ffi::{misuse, os_errno};

/// The most bytes of the stream in one RDMA Write. With its header it fits into one FPDU.
pub(super) const TRANSFER: usize = 64_000;
/// The number of receives that are posted beyond the peer's credits (permissions to send a message), because its control messages use
/// no credits.
const EXTRA_RECEIVES: u32 = 2 * CONTROL;
/// The time that `rclose` waits until the peer has received the sent data, unless `SO_LINGER` sets another time; and the time that
/// `rshutdown` waits for room for its message.
const LINGER: Duration = Duration::from_secs(5);
/// The longest time that `rclose` then waits until a peer with librdmacm's rsockets has closed its end. The limit of [`LINGER`] or
/// `SO_LINGER` applies too. Sends of such a peer fail once this end has closed, and librdmacm then discards data that it has received.
const ANSWER: Duration = Duration::from_millis(100);
/// The smallest and the largest queue of accepted connections of a listener, whatever its backlog is. The number of descriptors that
/// peers may use can set a lower maximum.
const BACKLOG: std::ops::RangeInclusive<usize> = 8..=1024;

// The `wr_id` of a request: its kind in the upper half. The lower half is the slot of a receive, or the number of bytes of the
// local ring that a send uses.
const RECEIVE: u64 = 1 << 63;
/// An unsignaled write before a message. The completion of the message covers both.
const WRITE_BEFORE_MESSAGE: u64 = 1 << 32;
/// A message that announces bytes of the stream.
const DATA: u64 = 2 << 32;
/// A write to a mapping of the peer (memory that the peer has passed to `riomap`).
pub(super) const DIRECT: u64 = 3 << 32;
/// A message that announces a mapping.
const MAPPED: u64 = 4 << 32;
/// A control message that uses one send queue entry; `CONTROL_TWO` uses two.
const CONTROL_ONE: u64 = 5 << 32;
const CONTROL_TWO: u64 = 6 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Bound,
    Listening,
    Connecting,
    Open,
    Over,
    Closed,
}

/// A stream socket.
pub(super) struct Stream {
    phase: Phase,
    id: Arc<CmId>,
    end: Option<End>,
    /// The accepted connections that are queued for `raccept`.
    accepted: VecDeque<Arc<Socket>>,
    backlog: usize,
    /// Whether the queue of accepted connections is full. The channel is not watched then.
    full: bool,
    /// Whether this end may still receive.
    receiving: bool,
    /// Whether this end may still send.
    sending: bool,
    /// The errno of a connection that ended with an error.
    broken: Option<c_int>,
    /// The pending error, which `SO_ERROR` returns.
    error: c_int,
    /// Whether `rclose` still has to tell the peer that the stream ends.
    farewell: bool,
}

/// A queue pair with its memory.
pub(super) struct End {
    qp: Arc<RcQp>,
    cq: Arc<Cq>,
    /// The ring of the stream, to which the peer writes.
    ring: Buffer,
    /// The list in which the peer grants parts of its ring, followed by the table of the peer's mappings. The peer writes both.
    list: Buffer,
    /// The local ring: copies of the bytes that are being sent.
    copies: Buffer,
    /// The memory of the receives, each for one message.
    message_buffers: Buffer,
    pub(super) sender: Sender,
    receiver: Receiver,
    credits: u16,
    /// The largest number of bytes that are sent inline.
    inline: usize,
    pub(super) peer: Option<Hello>,
    pub(super) mappings: u32,
    pub(super) maps: Maps,
    arrived: Vec<Completion>,
    refused: Refused,
    /// The number of signaled sends that have not completed.
    outstanding: usize,
    /// Whether the peer has closed its end.
    disconnected: bool,
}

/// A summary of the polled completions.
#[derive(Default)]
struct Polled {
    shutdown: bool,
    /// A send failed.
    failed: Option<Status>,
    violation: Option<Violation>,
}

impl End {
    fn new(socket: &Socket, options: &Options) -> Result<Self, c_int> {
        let device = socket.device;
        let (engine, pd) = (device.context.engine, &device.pd);
        let requests = options.send_queue;
        let credits = options.recv_queue;
        let receives = u32::from(credits) + EXTRA_RECEIVES;
        let places = requests + EXTRA_RECEIVES;
        let failed = |e: std::io::Error| os_errno(&e);
        let half = options.recv_buffer.div_ceil(2);
        let ring = Buffer::new(engine, pd, half * 2, true).map_err(failed)?;
        let list_len = AREA * AREAS as usize + MAPPING * options.mappings as usize;
        let list = Buffer::new(engine, pd, list_len, true).map_err(failed)?;
        let copies = Buffer::new(engine, pd, options.send_buffer, false).map_err(failed)?;
        let message_buffers =
            Buffer::new(engine, pd, MESSAGE * receives as usize, false).map_err(failed)?;
        let capacity = Capacity {
            max_send_wr: places,
            max_recv_wr: receives,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: options.inline.max(MAPPING as u32),
        };
        capacity.check().map_err(|e| misuse("rsocket", &e))?;
        // The queue has room for every request that can be posted, so it never overflows.
        let cq = Arc::new(Cq::new((places + receives) as usize, Some(socket.notify())));
        let parts = |qpn| Parts {
            rnic: Arc::clone(&engine.rnic),
            qpn,
            pd: pd.id(),
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            rq: RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: receives,
                max_sge: 1,
            },
            capacity,
            sig_all: false,
        };
        let qp = RcQp::new(&device.context, None, parts).map_err(failed)?;
        qp.with_attr(|attr| attr.access = cm::rights(1));
        qp.set_state(QpState::Init);
        let end = Self {
            qp,
            cq,
            ring,
            list,
            copies,
            message_buffers,
            sender: Sender::new(requests, options.send_buffer),
            receiver: Receiver::new(credits, half * 2),
            credits,
            inline: options.inline as usize,
            peer: None,
            mappings: options.mappings,
            maps: Maps::default(),
            arrived: Vec::new(),
            refused: Refused::default(),
            outstanding: 0,
            disconnected: false,
        };
        // From here on, dropping `end` destroys the queue pair.
        end.post_receives(0..receives)
            .map_err(|(_, e)| misuse("rsocket", &e))?;
        Ok(end)
    }

    /// Returns the private data for the peer.
    fn hello(&self) -> Hello {
        let area = |buffer: &Buffer, len: usize| Area {
            addr: buffer.addr(),
            key: buffer.key().0,
            len: u32::try_from(len).unwrap_or(u32::MAX),
        };
        Hello {
            credits: self.credits,
            mappings: self.mappings,
            list: area(&self.list, AREAS as usize),
            data: area(&self.ring, self.receiver.granted()),
        }
    }

    /// Begins the stream with the private data of the peer.
    fn begin(&mut self, peer: Hello) {
        self.sender.begin(peer.credits, peer.data);
        self.receiver.begin(peer.list.len);
        self.peer = Some(peer);
    }

    fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), (usize, Misuse)> {
        let requests = slots.map(|slot| {
            Ok(RecvRequest {
                id: RECEIVE | u64::from(slot),
                sges: [self.message_buffers.sge(slot as usize * MESSAGE, MESSAGE)]
                    .into_iter()
                    .collect(),
            })
        });
        self.qp.post_recv(requests)
    }

    /// Reposts receives whose messages have been handled.
    fn repost(&mut self, again: impl IntoIterator<Item = u32>) {
        let mut refused = std::mem::take(&mut self.refused);
        refused.post(again, |all| self.post_receives(all.iter().copied()));
        self.refused = refused;
    }

    fn post<const N: usize>(&mut self, requests: [WorkRequest; N]) -> Result<(), c_int> {
        let signaled = requests.iter().filter(|r| r.signaled).count();
        let posted = self.qp.post_send(requests.into_iter().map(Ok));
        self.outstanding += signaled;
        posted.map_err(|(_, e)| {
            self.outstanding -= signaled;
            misuse("rsocket", &e)
        })
    }

    /// Posts a message, preceded by the write that belongs to it.
    fn post_message(
        &mut self,
        id: u64,
        before: Option<(Area, Payload)>,
        message: Message,
    ) -> Result<(), c_int> {
        let say = request(
            id,
            Op::Send {
                imm: None,
                invalidate: None,
            },
            Payload::Inline(message.emit().into_iter().collect()),
            true,
        );
        match before {
            Some((to, payload)) => {
                let write = request(
                    WRITE_BEFORE_MESSAGE,
                    write_to(to.key, to.addr),
                    payload,
                    false,
                );
                self.post([write, say])
            }
            None => self.post([say]),
        }
    }

    /// Returns the payload of a request with bytes of the caller: inline, or copied to the local ring. Also returns the
    /// number of bytes used in the ring.
    fn payload(&mut self, from: &Caller, skip: usize, len: usize) -> (Payload, usize) {
        if len <= self.inline {
            let bytes = from.copy(skip, len);
            return (Payload::Inline(bytes.into_iter().collect()), 0);
        }
        let parts: Pieces = self.sender.take_ring(len);
        self.copies.fill(parts, from, skip);
        let sges = parts.into_iter().filter(|(_, len)| *len > 0);
        let sges = sges.map(|(at, len)| -> Sge { self.copies.sge(at, len) });
        (Payload::Sges(sges.collect()), len)
    }

    /// Sends as many bytes of `from` as possible, from byte `skip` on. Returns 0 if there is no room.
    fn send(&mut self, from: &Caller, skip: usize) -> Result<usize, c_int> {
        if !self.announce_mappings()? {
            return Ok(0);
        }
        let list = &self.list;
        let room = self.sender.room(|slot| take_area(list, slot));
        let len = room.min(from.len().saturating_sub(skip)).min(TRANSFER);
        if len == 0 {
            return Ok(0);
        }
        let (payload, ring) = self.payload(from, skip, len);
        let to = self.sender.take_target(len);
        let id = DATA | ring as u64;
        self.post_message(id, Some((to, payload)), Message::Data(to.len))?;
        Ok(len)
    }

    /// Writes to a mapping of the peer. Returns 0 if there is no room, `None` if there is no such mapping.
    pub(super) fn write(
        &mut self,
        from: &Caller,
        skip: usize,
        offset: u64,
    ) -> Result<Option<usize>, c_int> {
        if !self.announce_mappings()? {
            return Ok(Some(0));
        }
        let Some((addr, key, left)) = self.find_mapping(offset) else {
            return Ok(None);
        };
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let len = self.sender.room_direct().min(left).min(TRANSFER);
        let len = len.min(from.len().saturating_sub(skip));
        if len == 0 {
            return Ok(Some(0));
        }
        let (payload, ring) = self.payload(from, skip, len);
        self.sender.take_direct();
        let id = DIRECT | ring as u64;
        self.post([request(id, write_to(key, addr), payload, true)])?;
        Ok(Some(len))
    }

    /// Finds the peer's memory at `offset` of its mappings: address, key, and the number of bytes up to the end of the mapping.
    fn find_mapping(&self, offset: u64) -> Option<(u64, u32, u64)> {
        (0..self.mappings as usize).find_map(|i| {
            let at = AREA * AREAS as usize + MAPPING * i;
            let mapping = wire::Mapping::parse(&self.list.load(at));
            let (addr, left) = mapping.find(offset)?;
            Some((addr, mapping.area.key, left))
        })
    }

    /// Announces new mappings to the peer. Returns false if some must wait.
    fn announce_mappings(&mut self) -> Result<bool, c_int> {
        let Some(peer) = self.peer else {
            return Ok(true);
        };
        while let Some((index, mapping)) = self.maps.next() {
            if !self.sender.take_mapping() {
                return Ok(false);
            }
            let entry = Area {
                addr: peer.list.addr.wrapping_add(
                    u64::from(peer.list.len) * AREA as u64 + index as u64 * MAPPING as u64,
                ),
                ..peer.list
            };
            let payload = Payload::Inline(mapping.emit().into_iter().collect());
            self.post_message(MAPPED, Some((entry, payload)), Message::Mapped)?;
            self.maps.mark_announced();
        }
        Ok(true)
    }

    /// Sends the grants that are due to the peer.
    fn send_grants(&mut self) -> Result<(), c_int> {
        let Some(peer) = self.peer else { return Ok(()) };
        loop {
            let cost = self.receiver.wants();
            if cost == 0 || !self.sender.take_control(cost) {
                return Ok(());
            }
            let grant = self.receiver.grant();
            let message = Message::Credits(grant.limit);
            match grant.memory {
                Some((at, len, slot)) => {
                    let area = Area {
                        addr: self.ring.addr() + at as u64,
                        key: self.ring.key().0,
                        len: u32::try_from(len).unwrap_or(0),
                    };
                    let entry = Area {
                        addr: peer.list.addr.wrapping_add(u64::from(slot) * AREA as u64),
                        ..peer.list
                    };
                    let payload = Payload::Inline(area.emit().into_iter().collect());
                    self.post_message(CONTROL_TWO, Some((entry, payload)), message)?;
                }
                None => self.post_message(CONTROL_ONE, None, message)?,
            }
        }
    }

    /// Copies received bytes to `to`, from byte `skip` on. With `peek` they stay in the ring.
    fn receive(&mut self, to: &Caller, skip: usize, peek: bool) -> usize {
        let len = self.receiver.readable().min(to.len().saturating_sub(skip));
        self.ring.drain(self.receiver.front(len), to, skip);
        if !peek {
            self.receiver.consume(len);
        }
        len
    }

    /// Handles all completions.
    fn poll(&mut self) -> Polled {
        let mut polled = Polled::default();
        let mut again: Vec<u32> = Vec::new();
        loop {
            let mut arrived = std::mem::take(&mut self.arrived);
            let n = self.cq.poll(64, |_, c| arrived.push(c.clone()));
            for c in arrived.drain(..) {
                if c.wr_id & RECEIVE == 0 {
                    self.sent(&c, &mut polled);
                } else if c.status == Status::Success {
                    let slot = c.wr_id as u32;
                    self.received_message(slot, c.byte_len, &mut polled);
                    again.push(slot);
                }
            }
            self.arrived = arrived;
            if n == 0 {
                break;
            }
        }
        self.repost(again);
        polled
    }

    /// Handles the completion of a send.
    fn sent(&mut self, c: &Completion, polled: &mut Polled) {
        let ring = (c.wr_id & u64::from(u32::MAX)) as usize;
        let (requests, control) = match c.wr_id & !u64::from(u32::MAX) {
            DATA => (2, 0),
            DIRECT => (1, 0),
            MAPPED => (2, 0),
            CONTROL_ONE => (0, 1),
            CONTROL_TWO => (0, 2),
            _ => (0, 0),
        };
        if requests + control > 0 {
            self.sender.done(requests, control, ring);
            self.outstanding = self.outstanding.saturating_sub(1);
        }
        if c.status != Status::Success && polled.failed.is_none_or(|s| s == Status::Flushed) {
            polled.failed = Some(c.status);
        }
    }

    /// Handles a received message. [`Receiver`] checks that the peer keeps within its limits.
    fn received_message(&mut self, slot: u32, len: u32, polled: &mut Polled) {
        if polled.violation.is_some() {
            return;
        }
        let message = if len as usize == MESSAGE {
            Message::parse(self.message_buffers.load(slot as usize * MESSAGE))
        } else {
            Message::Unknown
        };
        let judged = match message {
            Message::Data(n) => self.receiver.data(n),
            Message::Mapped => self.receiver.mapped(),
            Message::Credits(limit) => {
                self.sender.set_limit(limit);
                Ok(())
            }
            Message::Disconnect => {
                self.disconnected = true;
                Ok(())
            }
            Message::Shutdown => {
                polled.shutdown = true;
                Ok(())
            }
            Message::KeepAlive => Ok(()),
            Message::Unknown => Err(Violation::Message),
        };
        polled.violation = judged.err();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // The queue pair is destroyed before its memory is released.
        self.qp.destroy();
    }
}

fn request(id: u64, op: Op, payload: Payload, signaled: bool) -> WorkRequest {
    WorkRequest {
        id,
        op,
        payload,
        signaled,
        solicited: false,
        ack_later: false,
        fence: false,
        destination: None,
        srq: None,
    }
}

fn write_to(key: u32, addr: u64) -> Op {
    Op::Write {
        remote: Remote {
            rkey: Stag(key),
            to: To(addr),
        },
        imm: None,
    }
}

/// Takes an entry from the list of the peer's free memory if the peer has filled it.
///
/// The peer's write places the length last, so a nonzero length shows that the entry is complete. A taken entry is set to zero until
/// the peer fills it again.
fn take_area(list: &Buffer, slot: usize) -> Option<Area> {
    let (at, len_at) = (slot * AREA, slot * AREA + AREA - 4);
    if list.word(len_at) == 0 {
        return None;
    }
    let area = Area::parse(&list.load(at));
    if area.addr == 0 || area.key == 0 {
        // The device may be placing the entry at this moment. The next call finds it complete.
        return None;
    }
    list.store(at, &[0; AREA]);
    (area.len > 0).then_some(area)
}

impl Stream {
    /// Returns the state of a new socket, whose connection manager events go to `channel`.
    pub(super) fn new(channel: &Arc<EventChannel>) -> Result<Self, c_int> {
        let id = CmId::new(channel, PortSpace::Tcp).map_err(|e| os_errno(&e))?;
        // The connection manager reports a broken device only to identifiers whose `c_object` is not 0.
        id.c_object.store(1, Ordering::Release);
        Ok(Self::around(id))
    }

    fn around(id: Arc<CmId>) -> Self {
        Self {
            phase: Phase::New,
            id,
            end: None,
            accepted: VecDeque::new(),
            backlog: 0,
            full: false,
            receiving: false,
            sending: false,
            broken: None,
            error: 0,
            farewell: false,
        }
    }

    /// Returns the connection manager's identifier.
    pub(super) fn id(&self) -> &CmId {
        &self.id
    }

    /// Returns the queue pair with its memory, also after the end of the connection.
    pub(super) fn any_end(&mut self) -> Option<&mut End> {
        self.end.as_mut()
    }

    /// Returns false if the connection is open, and this end has shut down sending (`rshutdown`). In other phases it returns true, and
    /// [`Self::open_end`] the error.
    pub(super) fn may_send(&self) -> bool {
        self.phase != Phase::Open || self.sending
    }

    /// Returns whether the socket's queue pair was created, so that its sizes cannot be changed any more.
    pub(super) fn is_sized(&self) -> bool {
        self.end.is_some()
    }

    /// Returns whether the socket listens.
    pub(super) fn is_listening(&self) -> bool {
        self.phase == Phase::Listening
    }

    /// Returns whether the socket is connected.
    pub(super) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Returns and clears the pending error.
    pub(super) fn take_error(&mut self) -> c_int {
        std::mem::take(&mut self.error)
    }

    /// Returns the local address, if the socket has one.
    pub(super) fn local(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// Returns the peer's address, if the socket is or was connected, or failed to connect.
    pub(super) fn remote(&self) -> Option<SocketAddr> {
        matches!(self.phase, Phase::Open | Phase::Over)
            .then(|| self.id.remote())
            .flatten()
    }

    /// Returns the queue pair of an open connection with its memory, for [`super::iomap`].
    pub(super) fn open_end(&mut self) -> Result<&mut End, c_int> {
        match (self.phase, self.end.as_mut()) {
            (Phase::Open, Some(end)) => Ok(end),
            (Phase::Closed, _) => Err(libc::EBADF),
            (Phase::Over, _) => Err(self.broken.unwrap_or(libc::EPIPE)),
            _ => Err(libc::ENOTCONN),
        }
    }

    pub(super) fn bind(&mut self, to: SocketAddr) -> Result<(), c_int> {
        if self.phase != Phase::New {
            return Err(libc::EINVAL);
        }
        self.id.bind(to).map_err(|e| os_errno(&e))?;
        self.phase = Phase::Bound;
        Ok(())
    }

    pub(super) fn listen(&mut self, backlog: c_int, any: SocketAddr) -> Result<(), c_int> {
        match self.phase {
            Phase::New => self.bind(any)?,
            Phase::Bound => {}
            Phase::Listening => return Ok(()),
            Phase::Closed => return Err(libc::EBADF),
            _ => return Err(libc::EINVAL),
        }
        // As for rdma_listen(3), 0 and less mean the largest backlog.
        let asked = usize::try_from(backlog).unwrap_or(0);
        let asked = if asked == 0 { *BACKLOG.end() } else { asked };
        self.backlog = asked
            .clamp(*BACKLOG.start(), *BACKLOG.end())
            // Each connection holds several descriptors until it is accepted. Unauthenticated peers may use only a part of the
            // descriptors.
            .min(anywarp_engine::limits::peer_descriptors() / 2)
            .max(*BACKLOG.start());
        // Requests that wait while the queue of accepted connections is full hold descriptors too.
        let waiting = c_int::try_from(self.backlog).unwrap_or(c_int::MAX);
        self.id.listen(waiting).map_err(|e| os_errno(&e))?;
        self.phase = Phase::Listening;
        Ok(())
    }

    /// Starts to connect.
    pub(super) fn connect(&mut self, socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
        match self.phase {
            Phase::New | Phase::Bound => {}
            Phase::Connecting => return Err(libc::EALREADY),
            Phase::Open => return Err(libc::EISCONN),
            Phase::Listening => return Err(libc::EISCONN),
            Phase::Over => return Err(self.broken.unwrap_or(libc::ENOTCONN)),
            Phase::Closed => return Err(libc::EBADF),
        }
        // This may fail for lack of memory or descriptors. The identifier is not changed before, so the program may try again.
        let end = End::new(socket, &socket.options())?;
        let failed = |e: std::io::Error| os_errno(&e);
        self.id.resolve_addr(None, to).map_err(failed)?;
        // Resolving an address does not block: the result is in the channel at once.
        while let Some(event) = socket.next_event() {
            if event.kind == EventKind::AddrError {
                return Err(-event.status);
            }
        }
        self.id.resolve_route().map_err(failed)?;
        self.id.set_qp(Some(Arc::clone(&end.qp)));
        let param = param(end.hello());
        self.end = Some(end);
        self.phase = Phase::Connecting;
        self.id.connect(param).map_err(|e| {
            let e = os_errno(&e);
            self.give_up(e);
            e
        })
    }

    /// Records that connecting failed.
    fn give_up(&mut self, errno: c_int) {
        self.phase = Phase::Over;
        self.broken = Some(errno);
        self.error = errno;
    }

    /// Handles new events of the connection manager and new completions.
    pub(super) fn step(&mut self, socket: &Socket) {
        if self.phase == Phase::Closed {
            return;
        }
        let mut gone = None;
        if self.phase == Phase::Listening {
            self.accept_waiting(socket);
        } else {
            while let Some(event) = socket.next_event() {
                gone = self.event(&event).or(gone);
            }
        }
        if !matches!(self.phase, Phase::Open | Phase::Over) {
            return;
        }
        // A message that arrived before the connection ended has a completion by now, because the end is reported after it.
        let Some(end) = &mut self.end else { return };
        let polled = end.poll();
        let disconnected = end.disconnected;
        if self.phase != Phase::Open {
            return;
        }
        let given = end.send_grants();
        if let Some(violation) = polled.violation {
            log!(Warn, "rsocket {}: {violation}", socket.number);
            self.cut_off();
        } else if disconnected {
            self.over(None);
        } else if let Some(status) = polled.failed {
            log!(Info, "rsocket {}: a send failed: {status}", socket.number);
            self.over(Some(libc::ECONNRESET));
        } else if let Some(errno) = gone {
            self.over((errno != 0).then_some(errno));
        } else if given.is_err() {
            self.cut_off();
        } else if polled.shutdown {
            self.receiving = false;
            if !self.sending {
                self.over(None);
            }
        }
    }

    /// Handles an event of the connection manager. If the connection has ended, returns an errno, or 0 for a regular end.
    fn event(&mut self, event: &Event) -> Option<c_int> {
        match event.kind {
            EventKind::Established if self.phase == Phase::Connecting => {
                match (Hello::parse(&event.private_data), &mut self.end) {
                    (Ok(peer), Some(end)) => {
                        end.begin(peer);
                        self.open();
                    }
                    (Err(strange), Some(end)) => {
                        log!(Warn, "rconnect: {strange}");
                        end.qp.disconnect();
                        self.give_up(libc::ECONNREFUSED);
                    }
                    _ => self.give_up(libc::EIO),
                }
            }
            EventKind::Rejected => self.give_up(libc::ECONNREFUSED),
            EventKind::Unreachable | EventKind::ConnectError | EventKind::AddrError
                if self.phase == Phase::Connecting =>
            {
                self.give_up(if event.status < 0 {
                    -event.status
                } else {
                    libc::EHOSTUNREACH
                });
            }
            EventKind::ConnectError => return Some(libc::ECONNRESET),
            EventKind::Disconnected => return Some(0),
            EventKind::DeviceRemoval => {
                if self.phase == Phase::Connecting {
                    self.give_up(libc::EIO);
                }
                return Some(libc::EIO);
            }
            _ => {}
        }
        None
    }

    fn open(&mut self) {
        self.phase = Phase::Open;
        self.receiving = true;
        self.sending = true;
    }

    /// Records that the connection has ended.
    fn over(&mut self, broken: Option<c_int>) {
        self.phase = Phase::Over;
        self.receiving = false;
        self.sending = false;
        self.broken = broken;
        self.error = broken.unwrap_or(self.error);
    }

    /// Closes the connection with an error, because the peer violated the protocol or named memory that cannot exist, or because a
    /// request could not be posted.
    pub(super) fn cut_off(&mut self) {
        if let Some(end) = &self.end {
            end.qp.disconnect();
        }
        self.over(Some(libc::ECONNRESET));
    }

    // ------------------------------------------------------------------ listening

    /// Accepts queued connection requests, as many as there is room for.
    fn accept_waiting(&mut self, socket: &Socket) {
        while self.accepted.len() < self.backlog {
            let Some(event) = socket.next_event() else {
                if std::mem::take(&mut self.full) {
                    let token = *socket.token();
                    let _again = socket.engine().watch(token, socket.channel.fd(), false);
                }
                return;
            };
            match event.kind {
                EventKind::ConnectRequest => match accept(socket, &event) {
                    Ok(made) => self.accepted.push_back(made),
                    Err(errno) => {
                        log!(
                            Warn,
                            "rsocket {}: a connection was refused: {}",
                            socket.number,
                            std::io::Error::from_raw_os_error(errno)
                        );
                        let _ = event.id.reject(&[]);
                        event.id.destroy();
                    }
                },
                EventKind::DeviceRemoval => self.give_up(libc::EIO),
                _ => {}
            }
        }
        if !self.full {
            self.full = true;
            socket.engine().unwatch(socket.channel.fd());
        }
    }

    /// Takes the next accepted connection. Returns `None` if there is none yet.
    fn take_accepted(&mut self, socket: &Socket) -> Option<Result<Arc<Socket>, c_int>> {
        self.step(socket);
        if let Some(made) = self.accepted.pop_front() {
            self.step(socket);
            return Some(Ok(made));
        }
        match self.phase {
            Phase::Listening => None,
            Phase::Closed => Some(Err(libc::EBADF)),
            Phase::Over => Some(Err(libc::EIO)),
            _ => Some(Err(libc::EINVAL)),
        }
    }

    // ------------------------------------------------------------------ data

    /// Sends bytes of `from`, from byte `skip` on. Returns `None` if the caller has to wait.
    fn send(&mut self, from: &Caller, skip: usize) -> Option<Result<usize, c_int>> {
        match self.phase {
            Phase::Connecting => return None,
            Phase::Closed => return Some(Err(libc::EBADF)),
            Phase::New | Phase::Bound | Phase::Listening => return Some(Err(libc::ENOTCONN)),
            Phase::Over => return Some(Err(self.broken.unwrap_or(libc::EPIPE))),
            Phase::Open if !self.sending => return Some(Err(libc::EPIPE)),
            Phase::Open => {}
        }
        let Some(end) = &mut self.end else {
            return Some(Err(libc::ENOTCONN));
        };
        match end.send(from, skip) {
            Ok(0) => None,
            Ok(n) => Some(Ok(n)),
            Err(_) => {
                self.cut_off();
                Some(Err(libc::ECONNRESET))
            }
        }
    }

    /// Receives into `to`, from byte `skip` on. Returns `None` if nothing has arrived yet.
    fn receive(&mut self, to: &Caller, skip: usize, peek: bool) -> Option<Result<usize, c_int>> {
        match self.phase {
            Phase::Connecting => return None,
            Phase::Closed => return Some(Err(libc::EBADF)),
            Phase::New | Phase::Bound | Phase::Listening => return Some(Err(libc::ENOTCONN)),
            Phase::Open | Phase::Over => {}
        }
        if let Some(end) = &mut self.end
            && end.receiver.readable() > 0
        {
            let len = end.receive(to, skip, peek);
            // If a grant cannot be sent, the connection has ended. The caller still gets the bytes that were read.
            if self.phase == Phase::Open && end.send_grants().is_err() {
                self.cut_off();
            }
            return Some(Ok(len));
        }
        match self.broken {
            // The error is returned once. Later calls return the end of the stream, as TCP sockets do. A call that has read bytes before
            // (`MSG_WAITALL`) returns those, and leaves the error to the next call.
            Some(e) if self.error == e => {
                if skip == 0 {
                    self.error = 0;
                }
                Some(Err(e))
            }
            _ if self.receiving => None,
            _ => Some(Ok(0)),
        }
    }

    /// Returns the events that `poll(2)` would return for this socket.
    pub(super) fn readiness(&mut self) -> i16 {
        let (input, output) = (
            libc::POLLIN | libc::POLLRDNORM,
            libc::POLLOUT | libc::POLLWRNORM,
        );
        match self.phase {
            Phase::New | Phase::Bound => libc::POLLHUP | output,
            Phase::Listening if self.accepted.is_empty() => 0,
            Phase::Listening => input,
            Phase::Connecting => 0,
            Phase::Closed => libc::POLLNVAL,
            Phase::Over => {
                // Programs treat POLLHUP as the end of the stream. So it is reported only when everything has been read.
                let unread = self.end.as_ref().is_some_and(|e| e.receiver.readable() > 0);
                let end = match (unread, self.broken) {
                    (true, _) => 0,
                    (false, None) => libc::POLLHUP,
                    (false, Some(_)) => libc::POLLHUP | libc::POLLERR,
                };
                input | output | libc::POLLRDHUP | end
            }
            Phase::Open => {
                let mut ready = 0;
                if let Some(end) = &mut self.end {
                    if end.receiver.readable() > 0 {
                        ready |= input;
                    }
                    let list = &end.list;
                    if end.sender.room(|slot| take_area(list, slot)) > 0 {
                        ready |= output;
                    }
                }
                if !self.receiving {
                    ready |= input | libc::POLLRDHUP;
                }
                if !self.sending {
                    ready |= output;
                }
                ready
            }
        }
    }

    /// Requests a notification of the next completion.
    pub(super) fn arm(&self) {
        if let Some(end) = &self.end {
            end.cq.arm(false);
        }
    }

    /// Shuts down receiving, sending or both. The peer gets a message when this end stops sending, and when both directions are shut
    /// down. Returns `None` if the caller has to wait.
    fn shut(&mut self, how: c_int) -> Option<Result<(), c_int>> {
        match self.phase {
            Phase::Open => {}
            Phase::Over => return Some(Ok(())),
            Phase::Closed => return Some(Err(libc::EBADF)),
            _ => return Some(Err(libc::ENOTCONN)),
        }
        let Some(end) = &mut self.end else {
            return Some(Err(libc::ENOTCONN));
        };
        let (receiving, sending) = match how {
            libc::SHUT_RD => (false, self.sending),
            libc::SHUT_WR => (self.receiving, false),
            _ => (false, false),
        };
        let message = match (receiving, sending) {
            (false, false) => Message::Disconnect,
            (true, false) if self.sending => Message::Shutdown,
            _ => {
                self.receiving = receiving;
                return Some(Ok(()));
            }
        };
        if !end.sender.take_control(1) {
            return None;
        }
        let posted = end.post_message(CONTROL_ONE, None, message);
        (self.receiving, self.sending) = (receiving, sending);
        if !receiving && !sending {
            self.phase = Phase::Over;
        }
        Some(posted)
    }

    /// Ends both directions of an open connection, without waiting for room for a message to the peer: [`Self::is_sent`] sends it. Returns
    /// whether the connection was open.
    fn leave(&mut self) -> bool {
        let open = self.is_open();
        if open {
            self.over(None);
            self.farewell = true;
        }
        open
    }

    /// Returns whether all sends have completed, including the message that ends the stream, or one has failed.
    fn is_sent(&mut self) -> bool {
        match &mut self.end {
            Some(end) if self.phase == Phase::Over => {
                let polled = end.poll();
                if self.farewell && end.sender.take_control(1) {
                    self.farewell = false;
                    // If the message cannot be posted, the connection has ended.
                    let _ended = end.post_message(CONTROL_ONE, None, Message::Disconnect);
                }
                polled.failed.is_some() || (end.outstanding == 0 && !self.farewell)
            }
            _ => true,
        }
    }

    /// Returns whether the peer has closed its end. Always returns true for an anywarp peer: such a peer acknowledges messages, so
    /// [`Self::is_sent`] already shows that it has received all data.
    fn is_answered(&mut self) -> bool {
        self.end.as_mut().is_none_or(|end| {
            end.poll();
            end.disconnected || !end.qp.has_standard_peer()
        })
    }

    /// Closes the socket without notifying the peer.
    pub(super) fn abandon(&mut self) {
        self.phase = Phase::Closed;
        self.accepted.clear();
        drop(self.end.take());
        self.id.destroy();
    }
}

/// Accepts a connection request with a new socket.
fn accept(listener: &Socket, event: &Event) -> Result<Arc<Socket>, c_int> {
    let id = Arc::clone(&event.id);
    let peer = Hello::parse(&event.private_data).map_err(|strange| {
        log!(Warn, "raccept: {strange}");
        libc::EPROTO
    })?;
    id.c_object.store(1, Ordering::Release);
    let options = listener.options().inherited();
    let socket = Socket::make(listener.domain, options, |channel| {
        id.migrate(channel);
        Ok(Kind::Stream(Box::new(Mutex::new(Stream::around(id)))))
    })?;
    {
        let mut stream = socket.stream()?;
        let mut end = End::new(&socket, &socket.options())?;
        stream.id.set_qp(Some(Arc::clone(&end.qp)));
        let param = param(end.hello());
        end.begin(peer);
        stream.end = Some(end);
        stream.open();
        stream.id.accept(param).map_err(|e| os_errno(&e))?;
    }
    Ok(socket)
}

/// Returns the parameters of a connection with the private data `hello`.
fn param(hello: Hello) -> ConnParam {
    ConnParam {
        private_data: hello.emit().to_vec(),
        // The sockets post no RDMA Reads, but a Read may be the first message of a connection (peer-to-peer start-up).
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        qp_num: 0,
    }
}

// ---------------------------------------------------------------------- calls

/// `rconnect`.
pub(super) fn connect(socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
    socket.stream()?.connect(socket, to)?;
    let time = socket.options().send_timeout;
    let done = socket.block(socket.wait_limit(0, time), |_| {
        let mut stream = match socket.stream() {
            Ok(stream) => stream,
            Err(e) => return Some(Err(e)),
        };
        stream.step(socket);
        match stream.phase {
            Phase::Connecting => None,
            Phase::Open => Some(Ok(())),
            // The connection was established, and the peer has closed it since.
            Phase::Over if stream.broken.is_none() => Some(Ok(())),
            Phase::Closed => Some(Err(libc::EBADF)),
            // The error is returned here, so it is cleared.
            _ => Some(Err(match stream.take_error() {
                0 => stream.broken.unwrap_or(libc::ENOTCONN),
                e => e,
            })),
        }
    });
    match done {
        Err(libc::EAGAIN) => Err(libc::EINPROGRESS),
        done => done,
    }
}

/// `raccept`.
pub(super) fn accept_next(socket: &Socket) -> Result<Arc<Socket>, c_int> {
    let time = socket.options().recv_timeout;
    socket.block(socket.wait_limit(0, time), |_| {
        let mut stream = match socket.stream() {
            Ok(stream) => stream,
            Err(e) => return Some(Err(e)),
        };
        stream.take_accepted(socket)
    })
}

/// Sends all bytes, or as many as possible without waiting if the socket is non-blocking.
pub(super) fn send(socket: &Socket, from: &Caller, flags: c_int) -> Result<usize, c_int> {
    let limit = socket.wait_limit(flags, socket.options().send_timeout);
    let mut sent = 0;
    loop {
        let more = socket.block(limit, |arm| {
            let mut stream = match socket.stream() {
                Ok(stream) => stream,
                Err(e) => return Some(Err(e)),
            };
            if arm {
                stream.arm();
            }
            // Received messages are handled twice: at the start, because they may end the connection; and again when there is no
            // room, because they may grant credits.
            if sent == 0 || arm {
                stream.step(socket);
            }
            if from.len() == 0 && stream.phase == Phase::Open {
                return Some(Ok(0));
            }
            stream.send(from, sent).or_else(|| {
                stream.step(socket);
                stream.send(from, sent)
            })
        });
        match more {
            Ok(n) => {
                sent += n;
                if sent >= from.len() {
                    return Ok(sent);
                }
            }
            Err(_) if sent > 0 => return Ok(sent),
            Err(e) => return Err(e),
        }
    }
}

/// Receives the available bytes. With `MSG_WAITALL`, waits until `to` is full.
pub(super) fn receive(socket: &Socket, to: &Caller, flags: c_int) -> Result<usize, c_int> {
    if flags & libc::MSG_OOB != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let limit = socket.wait_limit(flags, socket.options().recv_timeout);
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0 && !peek;
    let mut got = 0;
    loop {
        if got >= to.len() && got > 0 {
            return Ok(got);
        }
        let more = socket.block(limit, |arm| {
            let mut stream = match socket.stream() {
                Ok(stream) => stream,
                Err(e) => return Some(Err(e)),
            };
            if arm {
                stream.arm();
            }
            stream.step(socket);
            if to.len() == 0 && matches!(stream.phase, Phase::Open | Phase::Over) {
                return Some(Ok(0));
            }
            stream.receive(to, got, peek)
        });
        match more {
            Ok(0) => return Ok(got),
            Ok(n) => {
                got += n;
                if !all {
                    return Ok(got);
                }
            }
            Err(_) if got > 0 => return Ok(got),
            Err(e) => return Err(e),
        }
    }
}

/// `rshutdown`.
pub(super) fn shutdown(socket: &Socket, how: c_int) -> Result<(), c_int> {
    if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
        return Err(libc::EINVAL);
    }
    let until = Instant::now().checked_add(LINGER);
    let done = socket.block(Wait::Until(until), |arm| {
        let mut stream = match socket.stream() {
            Ok(stream) => stream,
            Err(e) => return Some(Err(e)),
        };
        if arm {
            stream.arm();
        }
        stream.step(socket);
        stream.shut(how)
    });
    // Threads that wait for this socket check its state again.
    socket.wakers.wake_all();
    done
}

/// Finishes a stream before the socket is closed: waits until the peer has received the sent data and the end of the stream.
pub(super) fn finish(socket: &Socket) {
    let linger = socket.options().linger.unwrap_or(LINGER);
    if linger.is_zero() {
        return;
    }
    let until = Instant::now().checked_add(linger);
    let left = socket.stream().is_ok_and(|mut stream| {
        stream.step(socket);
        stream.leave()
    });
    // Threads that wait for this socket check its state again.
    socket.wakers.wake_all();
    let wait = |until, done: fn(&mut Stream) -> bool| {
        let _done = socket.block(Wait::Until(until), |arm| {
            let Kind::Stream(stream) = &socket.kind else {
                return Some(Ok(()));
            };
            let mut stream = stream.lock();
            if arm {
                stream.arm();
            }
            done(&mut stream).then_some(Ok(()))
        });
    };
    wait(until, Stream::is_sent);
    if left {
        let answer = Instant::now().checked_add(ANSWER);
        wait(until.min(answer).or(answer), Stream::is_answered);
    }
    // A send to a standard iWARP peer completes when the kernel has accepted its bytes. If the process exits before the peer has
    // acknowledged them, and the peer still sends, the kernel resets the connection and the bytes are lost. So this waits for the
    // acknowledgement.
    let Kind::Stream(stream) = &socket.kind else {
        return;
    };
    let qp = {
        let mut stream = stream.lock();
        let qp = stream.end.as_ref().map(|end| Arc::clone(&end.qp));
        stream.abandon();
        qp
    };
    if let Some(qp) = qp {
        qp.wait_drained(until);
    }
}

const _: () = assert!(TRANSFER <= bounds::MULPDU_ANYWARP);

#[cfg(test)]
mod tests {
    use super::super::RegisteredWaker;
    use super::super::wait::Waker;
    use super::*;

    fn socket() -> Arc<Socket> {
        let mut options = Options::fresh();
        options.recv_timeout = Some(Duration::from_secs(10));
        options.linger = Some(Duration::ZERO);
        let made = Socket::make(libc::AF_INET, options, |channel| {
            Ok(Kind::Stream(Box::new(Mutex::new(Stream::new(channel)?))))
        });
        made.unwrap()
    }

    /// A thread takes an event that another one, which sleeps in `raccept`, also waits for.
    #[test]
    fn a_thread_that_takes_an_event_wakes_those_that_wait() {
        let (listener, near) = (socket(), socket());
        let any = "127.0.0.1:0".parse().unwrap();
        listener.stream().unwrap().listen(8, any).unwrap();
        // The device's thread does not take the event.
        listener.engine().unwatch(listener.channel.fd());
        let waker = Arc::new(Waker::new().unwrap());
        let _waiting = RegisteredWaker::at(&listener.wakers, &waker);
        near.nonblocking.store(true, Ordering::Relaxed);
        let began = connect(&near, listener.local().unwrap());
        assert_eq!(began, Err(libc::EINPROGRESS));
        let until = Instant::now() + Duration::from_secs(10);
        while listener.channel.is_empty() {
            assert!(Instant::now() < until, "the request does not arrive");
            listener.engine().on_idle_poll();
        }
        assert!(waker.is_empty());
        let taken = listener.stream().unwrap().take_accepted(&listener);
        assert!(matches!(taken, Some(Ok(_))));
        assert!(!waker.is_empty());
    }

    /// Connects two sockets, and sends half of the far end's ring. Returns the far end when the bytes have arrived, the bytes, and the
    /// other sockets.
    fn half_a_ring() -> (Arc<Socket>, Vec<u8>, [Arc<Socket>; 2]) {
        let (listener, near) = (socket(), socket());
        let any = "127.0.0.1:0".parse().unwrap();
        listener.stream().unwrap().listen(8, any).unwrap();
        connect(&near, listener.local().unwrap()).unwrap();
        let far = accept_next(&listener).unwrap();

        let half = far.options().recv_buffer / 2;
        let sent: Vec<u8> = (0..half).map(|i| (i % 251) as u8).collect();
        // SAFETY: the object is live until the call returns.
        let from = unsafe { Caller::new(sent.as_ptr(), sent.len()) };
        assert_eq!(send(&near, &from, 0), Ok(half));
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            far.engine().on_idle_poll();
            let mut stream = far.stream().unwrap();
            stream.step(&far);
            if stream.any_end().unwrap().receiver.readable() == half {
                break;
            }
            assert!(Instant::now() < until, "the data does not arrive");
        }
        (far, sent, [listener, near])
    }

    /// When half of the ring has been read, a grant is due. The test makes sending it fail: the read returns the bytes, and
    /// the next call the error.
    #[test]
    fn bytes_that_were_read_are_not_lost_when_the_grant_cannot_be_sent() {
        let (far, sent, _others) = half_a_ring();
        let mut stream = far.stream().unwrap();
        stream.any_end().unwrap().qp.set_state(QpState::Reset);
        let mut got = vec![0_u8; sent.len()];
        // SAFETY: the object is live until the call returns.
        let to = unsafe { Caller::new(got.as_mut_ptr(), got.len()) };
        assert_eq!(stream.receive(&to, 0, false), Some(Ok(sent.len())));
        assert!(got == sent);
        assert_eq!(stream.receive(&to, 0, false), Some(Err(libc::ECONNRESET)));
        assert_eq!(stream.receive(&to, 0, false), Some(Ok(0)));
    }

    /// A call that waits for more bytes than arrive before the error returns them, and the next call the error.
    #[test]
    fn a_call_that_returns_bytes_leaves_the_error_to_the_next_one() {
        let (far, sent, _others) = half_a_ring();
        far.stream().unwrap().cut_off();
        let mut got = vec![0_u8; 2 * sent.len()];
        // SAFETY: the object is live until the calls return.
        let to = unsafe { Caller::new(got.as_mut_ptr(), got.len()) };
        let all = || receive(&far, &to, libc::MSG_WAITALL);
        assert_eq!(all(), Ok(sent.len()));
        assert!(got.starts_with(&sent));
        assert_eq!(all(), Err(libc::ECONNRESET));
        assert_eq!(all(), Ok(0));
    }

    /// Waits until the messages that the far end has sent have completed.
    fn await_completions(far: &Socket) {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            far.engine().on_idle_poll();
            let mut stream = far.stream().unwrap();
            stream.step(far);
            if stream.any_end().unwrap().outstanding == 0 {
                return;
            }
            assert!(Instant::now() < until, "a message does not complete");
        }
    }

    /// Uses the room of the far end for control messages, as if those that it has sent were unacknowledged. Returns the number
    /// of these messages.
    fn use_room(far: &Socket) -> u32 {
        // A message that completed later would make room.
        await_completions(far);
        let mut stream = far.stream().unwrap();
        let sender = &mut stream.any_end().unwrap().sender;
        std::iter::repeat_with(|| sender.take_control(1))
            .take_while(|taken| *taken)
            .map(u32::from)
            .sum()
    }

    #[test]
    fn closing_ends_at_its_time_limit_without_room_for_a_message() {
        let (far, _, _others) = half_a_ring();
        far.options().linger = Some(Duration::from_secs(1));
        use_room(&far);
        let begin = Instant::now();
        finish(&far);
        let time = begin.elapsed();
        assert!(time >= Duration::from_secs(1), "there was room");
        assert!(time < Duration::from_secs(3), "it takes {time:?}");
    }

    #[test]
    fn the_peer_is_told_the_end_when_there_is_room_again() {
        let (far, _, [_listener, near]) = half_a_ring();
        far.options().linger = Some(Duration::from_secs(10));
        let used = use_room(&far);
        let closing = {
            let far = Arc::clone(&far);
            std::thread::spawn(move || finish(&far))
        };
        std::thread::sleep(Duration::from_millis(200));
        let mut stream = far.stream().unwrap();
        stream.any_end().unwrap().sender.done(0, used, 0);
        drop(stream);
        far.wakers.wake_all();
        closing.join().unwrap();
        let mut got = [0_u8; 1];
        // SAFETY: the object is live until the call returns.
        let to = unsafe { Caller::new(got.as_mut_ptr(), got.len()) };
        assert_eq!(receive(&near, &to, 0), Ok(0));
    }

    /// While this end closes, any call may poll the peer's closing message. The call that waits for this message still has to notice it.
    #[test]
    fn it_is_known_that_the_peer_has_closed_whoever_polls_the_message() {
        let (far, _, [_listener, near]) = half_a_ring();
        // The next completion is then that of the closing message.
        await_completions(&far);
        assert!(far.stream().unwrap().leave());
        shutdown(&near, libc::SHUT_RDWR).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while far.stream().unwrap().any_end().unwrap().cq.is_empty() {
            assert!(Instant::now() < until, "the message does not arrive");
            far.engine().on_idle_poll();
        }
        let mut stream = far.stream().unwrap();
        stream.step(&far);
        let end = stream.any_end().unwrap();
        end.poll();
        assert!(end.disconnected);
    }
}
