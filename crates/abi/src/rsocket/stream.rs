//! Stream sockets: a reliable queue pair, a ring that the peer writes into, and messages that say what was written.
//!
//! ```text
//!  New --bind--> Bound --listen--> Listening --(request)--> a new socket: Open
//!   +-------------+--connect--> Connecting --(established)--> Open --(either end)--> Over
//!                                    +-------(refused)--------------------------------^
//! ```
//!
//! Requests are accepted as they come, by whoever moves the device's bytes, and wait in the listener for `raccept`: as
//! with other sockets, who connects does not depend on when the listener's program looks.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
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
use super::{Kind, Patience, Socket, lock};
use crate::ffi::{misuse, os_errno};

/// Bytes of one write of the stream: with its header one FPDU.
pub(super) const TRANSFER: usize = 64_000;
/// Receives that are posted beside those which the peer has credits for: its messages of control have none.
const BESIDE: u32 = 2 * CONTROL;
/// How long closing waits until the peer has what was sent, unless `SO_LINGER` says so.
const LINGER: Duration = Duration::from_secs(5);
/// How long of that it waits for librdmacm's own end to close too: what that end still sends fails once we have closed,
/// and librdmacm then forgets what it has received.
const ANSWER: Duration = Duration::from_millis(100);
/// Connections that wait in a listener, whatever its backlog says: at least, and at most.
const BACKLOG: std::ops::RangeInclusive<usize> = 8..=1024;

// What a request's number says: its kind in the upper half, bytes of the ring in the lower.
const RECEIVE: u64 = 1 << 63;
/// The write before a message: its message tells of both.
const BEFORE: u64 = 1 << 32;
/// Bytes of the stream.
const DATA: u64 = 2 << 32;
/// Bytes for a mapping.
pub(super) const DIRECT: u64 = 3 << 32;
/// Word of a mapping.
const MAPPED: u64 = 4 << 32;
/// One message of control, or two places of them.
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
    /// Connections that nobody has taken yet.
    accepted: VecDeque<Arc<Socket>>,
    backlog: usize,
    /// No room for more of them: the channel is not watched.
    full: bool,
    /// More can come from the peer, and may go to it.
    receiving: bool,
    sending: bool,
    /// Why it ended, if not in order.
    broken: Option<c_int>,
    /// For `SO_ERROR`.
    error: c_int,
}

/// A queue pair with its memory.
pub(super) struct End {
    qp: Arc<RcQp>,
    cq: Arc<Cq>,
    /// What the peer writes: the stream, and the list of its own memory with its mappings behind.
    ring: Buffer,
    list: Buffer,
    /// What we send, and where messages arrive.
    copies: Buffer,
    notes: Buffer,
    pub(super) sender: Sender,
    receiver: Receiver,
    credits: u16,
    /// Bytes up to which a send is copied into its request.
    inline: usize,
    pub(super) peer: Option<Hello>,
    pub(super) mappings: u32,
    pub(super) maps: Maps,
    arrived: Vec<Completion>,
    refused: Refused,
    /// Sends that are not done.
    outstanding: usize,
}

/// What completions told of.
#[derive(Default)]
struct News {
    disconnect: bool,
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
        let receives = u32::from(credits) + BESIDE;
        let places = requests + BESIDE;
        let failed = |e: std::io::Error| os_errno(&e);
        let half = options.recv_buffer.div_ceil(2);
        let ring = Buffer::new(engine, pd, half * 2, true).map_err(failed)?;
        let list_len = AREA * AREAS as usize + MAPPING * options.mappings as usize;
        let list = Buffer::new(engine, pd, list_len, true).map_err(failed)?;
        let copies = Buffer::new(engine, pd, options.send_buffer, false).map_err(failed)?;
        let notes = Buffer::new(engine, pd, MESSAGE * receives as usize, false).map_err(failed)?;
        let capacity = Capacity {
            max_send_wr: places,
            max_recv_wr: receives,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: options.inline.max(MAPPING as u32),
        };
        capacity.check().map_err(|e| misuse("rsocket", &e))?;
        // Room for everything that can be posted: it never overflows.
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
            notes,
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
        };
        // From here on its queue pair goes with it.
        end.post_receives(0..receives)
            .map_err(|(_, e)| misuse("rsocket", &e))?;
        Ok(end)
    }

    /// What the peer is told.
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

    /// The peer is known.
    fn begin(&mut self, peer: Hello) {
        self.sender.begin(peer.credits, peer.data);
        self.receiver.begin(peer.list.len);
        self.peer = Some(peer);
    }

    fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), (usize, Misuse)> {
        let requests = slots.map(|slot| {
            Ok(RecvRequest {
                id: RECEIVE | u64::from(slot),
                sges: [self.notes.sge(slot as usize * MESSAGE, MESSAGE)]
                    .into_iter()
                    .collect(),
            })
        });
        self.qp.post_recv(requests)
    }

    /// Posts receives again.
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

    /// A message, with what is written before it.
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
                let write = request(BEFORE, write_to(to.key, to.addr), payload, false);
                self.post([write, say])
            }
            None => self.post([say]),
        }
    }

    /// Bytes of the caller's for a request: in it, or in our ring; and how many of the ring.
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

    /// Sends as much as there is room for, of `[skip, …)`; 0 if there is none.
    fn send(&mut self, from: &Caller, skip: usize) -> Result<usize, c_int> {
        if !self.tell_maps()? {
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

    /// Writes to a mapping of the peer's; 0 if there is no room, `None` if there is no such mapping.
    pub(super) fn write(
        &mut self,
        from: &Caller,
        skip: usize,
        offset: u64,
    ) -> Result<Option<usize>, c_int> {
        if !self.tell_maps()? {
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

    /// The mapping that the peer made for `offset`: address, key, and bytes from there on.
    fn find_mapping(&self, offset: u64) -> Option<(u64, u32, u64)> {
        (0..self.mappings as usize).find_map(|i| {
            let at = AREA * AREAS as usize + MAPPING * i;
            let mapping = wire::Mapping::parse(&self.list.load(at));
            let (addr, left) = mapping.find(offset)?;
            Some((addr, mapping.area.key, left))
        })
    }

    /// Tells the peer of mappings that it does not know yet; false if some must wait.
    fn tell_maps(&mut self) -> Result<bool, c_int> {
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
            self.maps.told();
        }
        Ok(true)
    }

    /// Gives the peer back what it may use again.
    fn give(&mut self) -> Result<(), c_int> {
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

    /// Copies up to `[skip, …)` of what has arrived to the caller; it stays if `peek`.
    fn receive(&mut self, to: &Caller, skip: usize, peek: bool) -> usize {
        let len = self.receiver.readable().min(to.len().saturating_sub(skip));
        self.ring.drain(self.receiver.front(len), to, skip);
        if !peek {
            self.receiver.consume(len);
        }
        len
    }

    /// Looks at what has completed.
    fn poll(&mut self) -> News {
        let mut news = News::default();
        let mut again: Vec<u32> = Vec::new();
        loop {
            let mut arrived = std::mem::take(&mut self.arrived);
            let n = self.cq.poll(64, |_, c| arrived.push(c));
            for c in arrived.drain(..) {
                if c.wr_id & RECEIVE == 0 {
                    self.sent(&c, &mut news);
                } else if c.status == Status::Success {
                    let slot = c.wr_id as u32;
                    self.heard(slot, c.byte_len, &mut news);
                    again.push(slot);
                }
            }
            self.arrived = arrived;
            if n == 0 {
                break;
            }
        }
        self.repost(again);
        news
    }

    /// A send is done with.
    fn sent(&mut self, c: &Completion, news: &mut News) {
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
        if c.status != Status::Success && news.failed.is_none_or(|s| s == Status::Flushed) {
            news.failed = Some(c.status);
        }
    }

    /// A message arrived. What it says is the peer's word: [`Receiver`] judges it.
    fn heard(&mut self, slot: u32, len: u32, news: &mut News) {
        if news.violation.is_some() {
            return;
        }
        let message = if len as usize == MESSAGE {
            Message::parse(self.notes.load(slot as usize * MESSAGE))
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
                news.disconnect = true;
                Ok(())
            }
            Message::Shutdown => {
                news.shutdown = true;
                Ok(())
            }
            Message::KeepAlive => Ok(()),
            Message::Unknown => Err(Violation::Message),
        };
        news.violation = judged.err();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Before its memory is given back.
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

/// Takes an entry from the list of the peer's memory, if the peer has filled it.
///
/// Its length comes last and shows that it is there. It is all zero from then on, until the peer fills it again.
fn take_area(list: &Buffer, slot: usize) -> Option<Area> {
    let (at, len_at) = (slot * AREA, slot * AREA + AREA - 4);
    if list.word(len_at) == 0 {
        return None;
    }
    let area = Area::parse(&list.load(at));
    if area.addr == 0 || area.key == 0 {
        // The device may be in the middle of it: the next look finds all.
        return None;
    }
    list.store(at, &[0; AREA]);
    (area.len > 0).then_some(area)
}

impl Stream {
    /// A new socket's, whose events go to `channel`.
    pub(super) fn new(channel: &Arc<EventChannel>) -> Result<Self, c_int> {
        let id = CmId::new(channel, PortSpace::Tcp).map_err(|e| os_errno(&e))?;
        // Not zero: it hears when the device breaks.
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
        }
    }

    /// The connection manager's identifier.
    pub(super) fn id(&self) -> &CmId {
        &self.id
    }

    /// The end of a connection that may be over.
    pub(super) fn any_end(&mut self) -> Option<&mut End> {
        self.end.as_mut()
    }

    /// Whether nothing keeps it from sending: not our own `rshutdown`.
    pub(super) fn may_send(&self) -> bool {
        self.phase != Phase::Open || self.sending
    }

    /// Whether it has, or will have, a queue pair: its sizes cannot be changed any more.
    pub(super) fn is_sized(&self) -> bool {
        self.end.is_some()
    }

    /// Whether it listens.
    pub(super) fn is_listening(&self) -> bool {
        self.phase == Phase::Listening
    }

    /// Whether it is connected.
    pub(super) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// The pending error, once.
    pub(super) fn take_error(&mut self) -> c_int {
        std::mem::take(&mut self.error)
    }

    /// Our address, if there is one.
    pub(super) fn local(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// The peer's, while connected.
    pub(super) fn remote(&self) -> Option<SocketAddr> {
        matches!(self.phase, Phase::Open | Phase::Over)
            .then(|| self.id.remote())
            .flatten()
    }

    /// The end of a connection, for [`super::iomap`].
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
        self.id.bind(to).map_err(|e| match os_errno(&e) {
            // rdma_cm's word for an address that is not this host's.
            libc::ENODEV => libc::EADDRNOTAVAIL,
            e => e,
        })?;
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
        self.backlog = usize::try_from(backlog)
            .unwrap_or(0)
            .clamp(*BACKLOG.start(), *BACKLOG.end())
            // Each holds two descriptors until it is accepted: strangers get a part of them, and no more.
            .min(anywarp_engine::limits::peer_descriptors() / 2)
            .max(*BACKLOG.start());
        self.id.listen(backlog).map_err(|e| os_errno(&e))?;
        self.phase = Phase::Listening;
        Ok(())
    }

    /// Begins to connect.
    pub(super) fn connect(&mut self, socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
        match self.phase {
            Phase::New | Phase::Bound => {}
            Phase::Connecting => return Err(libc::EALREADY),
            Phase::Open => return Err(libc::EISCONN),
            Phase::Listening => return Err(libc::EISCONN),
            Phase::Over => return Err(self.broken.unwrap_or(libc::ENOTCONN)),
            Phase::Closed => return Err(libc::EBADF),
        }
        let failed = |e: std::io::Error| os_errno(&e);
        self.id.resolve_addr(None, to).map_err(failed)?;
        // Its outcome is there at once.
        while let Some(event) = socket.channel.pop() {
            if event.kind == EventKind::AddrError {
                return Err(-event.status);
            }
        }
        self.id.resolve_route().map_err(failed)?;
        let end = End::new(socket, &socket.options())?;
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

    /// Connecting came to nothing.
    fn give_up(&mut self, errno: c_int) {
        self.phase = Phase::Over;
        self.broken = Some(errno);
        self.error = errno;
    }

    /// What is new: events of the connection manager, and completions.
    pub(super) fn step(&mut self, socket: &Socket) {
        if self.phase == Phase::Closed {
            return;
        }
        let mut gone = None;
        if self.phase == Phase::Listening {
            self.accept_waiting(socket);
        } else {
            while let Some(event) = socket.channel.pop() {
                gone = self.event(&event).or(gone);
            }
        }
        if !matches!(self.phase, Phase::Open | Phase::Over) {
            return;
        }
        // What came before the end of the connection completed before that was told.
        let Some(end) = &mut self.end else { return };
        let news = end.poll();
        if self.phase != Phase::Open {
            return;
        }
        let given = end.give();
        if let Some(violation) = news.violation {
            log!(Warn, "rsocket {}: {violation}", socket.number);
            self.cut_off();
        } else if news.disconnect {
            self.over(None);
        } else if let Some(status) = news.failed {
            log!(Info, "rsocket {}: a send failed: {status}", socket.number);
            self.over(Some(libc::ECONNRESET));
        } else if let Some(errno) = gone {
            self.over((errno != 0).then_some(errno));
        } else if given.is_err() {
            self.cut_off();
        } else if news.shutdown {
            self.receiving = false;
            if !self.sending {
                self.over(None);
            }
        }
    }

    /// An event of the connection manager; an errno, or 0, if the connection is over.
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

    /// The connection is over.
    fn over(&mut self, broken: Option<c_int>) {
        self.phase = Phase::Over;
        self.receiving = false;
        self.sending = false;
        self.broken = broken;
        self.error = broken.unwrap_or(self.error);
    }

    /// Ends the connection from here: the peer broke the rules, or named memory that there cannot be.
    pub(super) fn cut_off(&mut self) {
        if let Some(end) = &self.end {
            end.qp.disconnect();
        }
        self.over(Some(libc::ECONNRESET));
    }

    // ------------------------------------------------------------------ listening

    /// Accepts the requests that wait, as many as there is room for.
    fn accept_waiting(&mut self, socket: &Socket) {
        while self.accepted.len() < self.backlog {
            let Some(event) = socket.channel.pop() else {
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

    /// The next connection.
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

    /// Sends of `[skip, …)`; `None` if that must wait.
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

    /// Receives into `[skip, …)`; `None` if nothing is there yet.
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
            // What was read is the caller's, also when the peer cannot be told: then the connection is over.
            if self.phase == Phase::Open && end.give().is_err() {
                self.cut_off();
            }
            return Some(Ok(len));
        }
        match self.broken {
            // Once: then it is the end of the stream, as with other sockets.
            Some(e) if self.error == e => {
                self.error = 0;
                Some(Err(e))
            }
            _ if self.receiving => None,
            _ => Some(Ok(0)),
        }
    }

    /// What `poll(2)` would say.
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
                // Programs take a hang-up for the end: it is told when all is read, as a TCP socket tells it late.
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

    /// Rings for the next completion.
    pub(super) fn arm(&self) {
        if let Some(end) = &self.end {
            end.cq.arm(false);
        }
    }

    /// Says that no more is sent, or received; `None` if that must wait.
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
        let said = end.post_message(CONTROL_ONE, None, message);
        (self.receiving, self.sending) = (receiving, sending);
        if !receiving && !sending {
            self.phase = Phase::Over;
        }
        Some(said)
    }

    /// Whether the peer has everything that was sent.
    fn is_sent(&mut self) -> bool {
        match &mut self.end {
            Some(end) if self.phase == Phase::Over => {
                let news = end.poll();
                end.outstanding == 0 || news.failed.is_some()
            }
            _ => true,
        }
    }

    /// Whether the peer has heard of our end as far as we can know.
    fn is_answered(&mut self) -> bool {
        self.end
            .as_mut()
            .is_none_or(|end| end.poll().disconnect || !end.qp.has_standard_peer())
    }

    /// Ends everything at once.
    pub(super) fn abandon(&mut self) {
        self.phase = Phase::Closed;
        self.accepted.clear();
        drop(self.end.take());
        self.id.destroy();
    }
}

/// Accepts a request: a new socket.
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

/// How connections are made.
fn param(hello: Hello) -> ConnParam {
    ConnParam {
        private_data: hello.emit().to_vec(),
        // Nothing is read over the connection, but one may be how the connection starts.
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
    let done = socket.block(socket.patience(0, time), |_| {
        let mut stream = match socket.stream() {
            Ok(stream) => stream,
            Err(e) => return Some(Err(e)),
        };
        stream.step(socket);
        match stream.phase {
            Phase::Connecting => None,
            Phase::Open => Some(Ok(())),
            Phase::Closed => Some(Err(libc::EBADF)),
            // Told here, and not again.
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
    socket.block(socket.patience(0, time), |_| {
        let mut stream = match socket.stream() {
            Ok(stream) => stream,
            Err(e) => return Some(Err(e)),
        };
        stream.take_accepted(socket)
    })
}

/// Sends everything, or as much as goes at once if the socket does not block.
pub(super) fn send(socket: &Socket, from: &Caller, flags: c_int) -> Result<usize, c_int> {
    let patience = socket.patience(flags, socket.options().send_timeout);
    let mut sent = 0;
    loop {
        let more = socket.block(patience, |arm| {
            let mut stream = match socket.stream() {
                Ok(stream) => stream,
                Err(e) => return Some(Err(e)),
            };
            if arm {
                stream.arm();
            }
            // What arrived is looked at when it matters: at the start, and when there is no room.
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

/// Receives what is there, or all that is asked for with `MSG_WAITALL`.
pub(super) fn receive(socket: &Socket, to: &Caller, flags: c_int) -> Result<usize, c_int> {
    if flags & libc::MSG_OOB != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let patience = socket.patience(flags, socket.options().recv_timeout);
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0 && !peek;
    let mut got = 0;
    loop {
        if got >= to.len() && got > 0 {
            return Ok(got);
        }
        let more = socket.block(patience, |arm| {
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
    let done = socket.block(Patience::Until(until), |arm| {
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
    // Other threads that wait for it look again.
    socket.bells.ring();
    done
}

/// What closing does first: the peer gets what was sent, and hears of the end.
pub(super) fn finish(socket: &Socket) {
    let linger = socket.options().linger.unwrap_or(LINGER);
    let open = socket.stream().is_ok_and(|s| s.is_open());
    if linger.is_zero() {
        return;
    }
    let wait = |until, done: fn(&mut Stream) -> bool| {
        let _done = socket.block(Patience::Until(until), |arm| {
            let Kind::Stream(stream) = &socket.kind else {
                return Some(Ok(()));
            };
            let mut stream = lock(stream);
            if arm {
                stream.arm();
            }
            done(&mut stream).then_some(Ok(()))
        });
    };
    let until = Instant::now().checked_add(linger);
    let said = open && shutdown(socket, libc::SHUT_RDWR).is_ok();
    wait(until, Stream::is_sent);
    if said {
        let answer = Instant::now().checked_add(ANSWER);
        wait(until.min(answer).or(answer), Stream::is_answered);
    }
    // Towards librdmacm's own end what was sent is with the kernel by now. It arrives as long as somebody reads what
    // still comes, and our process may be about to end.
    let Kind::Stream(stream) = &socket.kind else {
        return;
    };
    let qp = {
        let mut stream = lock(stream);
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

    /// Reading half of the ring is told to the peer. It cannot be: what was read is there all the same, and then the end.
    #[test]
    fn what_was_read_is_not_lost_when_the_peer_cannot_be_told() {
        let (listener, near) = (socket(), socket());
        let any = "127.0.0.1:0".parse().unwrap();
        listener.stream().unwrap().listen(8, any).unwrap();
        connect(&near, listener.local().unwrap()).unwrap();
        let far = accept_next(&listener).unwrap();

        let half = far.options().recv_buffer / 2;
        let sent: Vec<u8> = (0..half).map(|i| (i % 251) as u8).collect();
        // SAFETY: it lives until the call returns.
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
            assert!(Instant::now() < until, "it does not arrive");
        }

        let mut stream = far.stream().unwrap();
        stream.any_end().unwrap().qp.set_state(QpState::Reset);
        let mut got = vec![0_u8; half];
        // SAFETY: it lives until the call returns.
        let to = unsafe { Caller::new(got.as_mut_ptr(), got.len()) };
        assert_eq!(stream.receive(&to, 0, false), Some(Ok(half)));
        assert!(got == sent);
        assert_eq!(stream.receive(&to, 0, false), Some(Err(libc::ECONNRESET)));
        assert_eq!(stream.receive(&to, 0, false), Some(Ok(0)));
    }
}
