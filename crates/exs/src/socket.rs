//! A socket: the connection, its message buffers, and the program's operations.

use crate::ffi;
use crate::flow::{self, Action, CONTROLS, Delivery, Flow, OpId, Outcome, Recv, Send, Slot};
use crate::library::{self, CmEvent};
use crate::lock::lock;
use crate::memory::{Device, Use, register, zeroed};
use crate::op::{Keep, Op, Ops};
use crate::queue::{Event, MORE};
use crate::wire::{
    HEADER_LENGTH, HELLO_LENGTH, Hello, MAX_HEADER_LENGTH, Message, Segment, Segments,
};
use anywarp_buffers::{self as buffers, Manager, Piece, Region};
use anywarp_verbs_sys::ptr::Ptr;
use libc::{c_int, c_void};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The types of events, with the numbers of `<exs.h>`.
pub(crate) const EVT_POLL: c_int = 1;
pub(crate) const EVT_CONNECT: c_int = 2;
pub(crate) const EVT_ACCEPT: c_int = 3;
pub(crate) const EVT_SEND: c_int = 4;
pub(crate) const EVT_RECV: c_int = 5;
pub(crate) const EVT_SENDMSG: c_int = 6;
pub(crate) const EVT_RECVMSG: c_int = 7;
pub(crate) const EVT_SENDFILE: c_int = 8;
const EVT_SENDTIMEOUT: c_int = 9;
const EVT_RECVTIMEOUT: c_int = 10;
pub(crate) const EVT_SHUTDOWN: c_int = 11;
pub(crate) const EVT_CLOSE: c_int = 12;

/// A flag in the event of a transfer: the message was longer than the receive and was truncated.
const TRUNCATED: u64 = 0x100;
/// The most operations in progress on one socket.
const MAX_OPS: usize = 4096;
/// The time limit in milliseconds for resolving the address, and again for the route.
const CONNECT_MS: c_int = 5000;
/// The time that a close waits until the last messages are sent.
const CLOSE_WAIT: Duration = Duration::from_millis(100);
/// The most connections of a listener that are being established at the same time.
const HALF_OPEN: usize = 64;
/// When [`HALF_OPEN`] connections are being established: the time after which the oldest ends and the next request is answered. Peers
/// that do not confirm their connections thus delay others by no more than this.
const HALF_OPEN_TIME: Duration = Duration::from_millis(500);
/// The time after the limit of an operation within which the peer has to answer the request to cancel it. If it does not, it is taken for
/// dead, and the connection ends.
const SILENCE: Duration = Duration::from_secs(1);
/// The number of bytes in progress for which the peer has another millisecond, because its answer may have to wait for them.
const BYTES_PER_MS: u64 = 4 << 10;
/// The pause between two checks whether the last messages are sent, during [`CLOSE_WAIT`].
const CLOSE_PAUSE: Duration = Duration::from_micros(100);
/// The number of send queue entries for RDMA Reads and Writes: 16 transfers from the peer with up to 15 pieces each, and 16
/// to the peer with up to 8.
const TRANSFERS: u32 = 16 * 15 + 16 * 8;
/// The number of send queue entries for requests that belong to advertised receives and are posted apart from their messages: bindings, Writes
/// and invalidations.
const READY_REQUESTS: u32 = 3 * flow::MAX_READY as u32;

/// The default size of a stream's buffer in bytes. It has room for several messages of the lengths for which copying costs
/// less than waiting for a receive.
pub(crate) const STREAM_BUFFER: u32 = 256 << 10;

/// The number of bytes that the library has copied, for all sockets.
pub(crate) static COPIED: AtomicU64 = AtomicU64::new(0);
/// The number of bytes that devices have transferred without a copy by the library.
pub(crate) static DIRECT: AtomicU64 = AtomicU64::new(0);

/// The options of a socket. `credits`, `immediate`, `ready` and `buffer` cannot be changed after a connection was begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) credits: u16,
    pub(crate) immediate: u32,
    /// Whether receives are advertised to the peer, which then writes into their memory, and whether this end writes into the receives that
    /// the peer advertises.
    pub(crate) ready: bool,
    /// The most bytes of a stream that are read from the peer before there is a receive for them.
    pub(crate) buffer: u32,
    /// The time limits of sends and receives.
    pub(crate) send_timeout: Timeout,
    pub(crate) recv_timeout: Timeout,
    /// The time limit for establishing a connection.
    pub(crate) connect_timeout: Duration,
    /// The time that a close waits until the peer has answered all messages.
    pub(crate) linger: Duration,
    /// Whether cancelled operations are reported in the order of the calls, as all others are.
    pub(crate) ordered: bool,
}

/// A time limit for operations of one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Timeout {
    /// The limit. `None`: there is none.
    pub(crate) after: Option<Duration>,
    /// Whether the limit applies only to the next operation.
    pub(crate) once: bool,
}

impl Timeout {
    /// Returns the deadline of an operation that starts now.
    fn take(&mut self) -> Option<Instant> {
        let after = self.after;
        if self.once {
            *self = Self::default();
        }
        after.map(|after| Instant::now() + after)
    }
}

impl Settings {
    pub(crate) const DEFAULT: Self = Self {
        credits: 16,
        immediate: 0,
        ready: true,
        buffer: STREAM_BUFFER,
        send_timeout: Timeout {
            after: None,
            once: false,
        },
        recv_timeout: Timeout {
            after: None,
            once: false,
        },
        connect_timeout: Duration::from_secs(20),
        linger: Duration::from_secs(10),
        ordered: true,
    };
}

/// What [`Socket::start`] starts.
#[derive(Debug)]
pub(crate) enum Begin {
    /// A send of this memory, with the keys for the peer.
    Send(Segments),
    /// A receive into this memory, with the keys for the peer, and its offset in the peer's persistent send.
    Recv(Segments, Option<u64>),
    /// The end of the direction to the peer.
    Shutdown,
}

/// A call of exs_poll, which all its sockets share. The first ready socket reports it.
#[derive(Debug)]
pub(crate) struct PollCall {
    pub(crate) op: Mutex<Option<Op>>,
    pub(crate) ahandle: isize,
}

impl PollCall {
    fn lock(&self) -> MutexGuard<'_, Option<Op>> {
        lock(&self.op)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_none()
    }

    /// Reports the call unless another socket has done so: the socket at `index` is ready for `events`.
    fn fire(&self, fd: c_int, index: usize, events: i16, errno: c_int) {
        if let Some(op) = self.lock().take() {
            let ready = u64::from(events.cast_unsigned());
            op.queue.push(Event {
                kind: EVT_POLL,
                errno,
                fd,
                ahandle: op.ahandle,
                body: [op.user, op.offset, index as u64, ready, 0, 0],
            });
        }
    }
}

/// The entry of a socket in a call of exs_poll.
#[derive(Debug)]
struct Poll {
    call: Arc<PollCall>,
    index: usize,
    events: i16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    Listening,
    Connecting,
    Accepting,
    Connected,
    Ended(c_int),
}

/// The queues of a connection, and its message buffers: first those of receives, then those of sends.
#[derive(Debug)]
struct Link {
    device: Arc<Device>,
    cq: Ptr<ffi::ibv_cq>,
    qp: Ptr<ffi::ibv_qp>,
    buffers: Box<[u8]>,
    size: usize,
    free: Vec<Slot>,
    /// The buffers of the messages whose sending is not known to have completed, oldest first. Only some messages are signaled,
    /// and the completion of one shows that all before it have completed.
    sending: VecDeque<Slot>,
    /// The buffers of receives that are not posted again yet.
    released: Vec<Slot>,
    /// The number of messages since the last signaled one.
    unsignaled: usize,
    /// The longest message that is passed to the device inline.
    inline: usize,
    sends: usize,
    backlog: VecDeque<(Message, Extras)>,
    windows: Vec<Window>,
    region: Region,
    /// The buffer of a stream for bytes that arrive before their receive. It is created when it is first needed.
    early: Option<Early>,
    /// The completions of the last poll.
    done: [ffi::ibv_wc; COMPLETIONS as usize],
}

/// What belongs to a message to the peer.
#[derive(Debug, Clone, Copy, Default)]
struct Extras {
    /// The send whose data follows the header.
    data: Option<OpId>,
    /// The STag of a window of the peer, which the message invalidates.
    invalidates: Option<u32>,
}

/// A memory window, through which the peer writes into the memory of one receive.
#[derive(Debug)]
struct Window {
    mw: Ptr<ffi::ibv_mw>,
    rkey: u32,
    /// The number of the message that has advertised it, as long as it may be bound.
    ready: Option<u32>,
}

/// The buffer of a stream, which is a ring.
#[derive(Debug)]
struct Early {
    region: Region,
    bytes: Box<[u8]>,
}

impl Early {
    fn new(device: &Device, size: usize) -> Result<Self, c_int> {
        let mut bytes = zeroed(size)?;
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        let region = register(device, addr, size as u64, Use::Sink)?;
        Ok(Self { region, bytes })
    }

    /// Returns the memory of up to `len` bytes from position `at` of the stream on.
    fn segments(&self, at: u64, len: u64) -> Segments {
        let size = self.bytes.len() as u64;
        let base = self.bytes.as_ptr().addr() as u64;
        let from = at % size;
        let ring = [(base + from, size - from), (base, from)].map(|(addr, len)| Segment {
            addr,
            stag: self.region.lkey(),
            len: u32::try_from(len).unwrap_or(0),
        });
        flow::cut(&ring, 0, len)
    }
}

#[derive(Debug)]
struct Inner {
    state: State,
    id: Ptr<ffi::rdma_cm_id>,
    settings: Settings,
    link: Option<Link>,
    flow: Option<Flow>,
    ops: Ops,
    next_op: OpId,
    /// The number of outstanding pieces of each transfer from the peer (`moves`) and to it (`writes`).
    moves: FxHashMap<u64, usize>,
    writes: FxHashMap<OpId, usize>,
    connect: Option<OpId>,
    /// The listener, until an accept of the program gets this socket.
    listener: Option<c_int>,
    /// For a listener: the accepts of the program, the requests that are not answered yet, the connections that are being established, with
    /// the times of the answers, and those that are established and wait for an accept.
    accepts: VecDeque<OpId>,
    requests: VecDeque<(Ptr<ffi::rdma_cm_id>, Hello)>,
    half_open: VecDeque<(Arc<Socket>, Instant)>,
    established: VecDeque<Arc<Socket>>,
    backlog: usize,
    polls: Vec<Poll>,
    /// The earliest deadline that was passed to the library's thread.
    alarm: Option<Instant>,
    /// For a socket that is being accepted: the time at which the accept fails unless it is connected.
    establish_by: Option<Instant>,
    /// A close that waits until all messages are answered, and afterwards its result.
    closing: Option<Op>,
    closed: Option<(Op, c_int)>,
    /// For a socket whose close waits only until its last answers are sent: the end of this wait.
    send_by: Option<Instant>,
    /// An empty list of actions, whose allocation is used again.
    actions: Vec<Action>,
}

/// The registered buffers of a socket.
#[derive(Debug)]
enum Pool {
    Unused,
    Open(Manager),
    /// There are none: the device cannot have them, or the socket is closed.
    None,
}

/// A socket of the library.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: c_int,
    /// The family of its addresses.
    pub(crate) domain: c_int,
    pub(crate) stream: bool,
    inner: Mutex<Inner>,
    /// Once the socket is connected: the device, and the length of the longest immediate data (data that a message itself contains).
    device: OnceLock<(Arc<Device>, u64)>,
    /// Registered buffers for copying memory that the program has not registered.
    pool: Mutex<Pool>,
    /// The number of the queue that got the last operation of this socket.
    pub(crate) last_queue: AtomicU64,
    /// Whether the program has closed the socket, but its last messages are not sent yet.
    gone: AtomicBool,
    /// Whether threads of the program poll the completion queue, which is not armed then.
    hot: AtomicBool,
    /// Whether a thread of the program has polled since the last check by the library's thread.
    touched: AtomicBool,
    /// Whether the socket is in the list that the library's thread checks.
    watched: AtomicBool,
}

/// The lengths in bytes up to which messages are passed to the device inline. They are tried in this order, because a device that
/// does not support a length refuses to create the queue pair.
const INLINE: [u32; 4] = [128, 64, 32, 0];

/// The length in bytes up to which immediate data is copied to the message buffer although it is registered: a copy takes less time
/// than a second segment of the work request.
pub(crate) const SHORT: usize = 256;

/// How many receives are posted by one call.
const RELEASED: usize = 8;
const NO_RECV: ffi::ibv_recv_wr = ffi::ibv_recv_wr {
    wr_id: 0,
    next: std::ptr::null_mut(),
    sg_list: std::ptr::null_mut(),
    num_sge: 0,
};

/// Used in place of the number of a message buffer, for the empty Write of [`Link::signal_last`].
const NO_SLOT: Slot = usize::MAX >> 8;

/// How many completions one poll takes.
const COMPLETIONS: c_int = 8;

const RECEIVED: u64 = 1 << 56;
const SENT: u64 = 2 << 56;
const READ: u64 = 3 << 56;
const WRITTEN: u64 = 4 << 56;
const OPENED: u64 = 5 << 56;
const PUT: u64 = 6 << 56;
const BOUND: u64 = 7 << 56;
const UNBOUND: u64 = 8 << 56;
const KIND: u64 = 0xff << 56;

impl Socket {
    pub(crate) fn new(
        fd: c_int,
        domain: c_int,
        stream: bool,
        id: *mut ffi::rdma_cm_id,
        settings: Settings,
    ) -> Self {
        Self {
            fd,
            domain,
            stream,
            inner: Mutex::new(Inner {
                state: State::New,
                id: Ptr(id),
                settings,
                link: None,
                flow: None,
                ops: Ops::default(),
                next_op: 1,
                moves: FxHashMap::default(),
                writes: FxHashMap::default(),
                connect: None,
                listener: None,
                accepts: VecDeque::new(),
                requests: VecDeque::new(),
                half_open: VecDeque::new(),
                established: VecDeque::new(),
                backlog: 0,
                polls: Vec::new(),
                alarm: None,
                establish_by: None,
                closing: None,
                closed: None,
                send_by: None,
                actions: Vec::new(),
            }),
            device: OnceLock::new(),
            pool: Mutex::new(Pool::Unused),
            last_queue: AtomicU64::new(0),
            gone: AtomicBool::new(false),
            hot: AtomicBool::new(false),
            touched: AtomicBool::new(false),
            watched: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(crate) fn settings(&self, change: impl FnOnce(&mut Settings)) -> Result<Settings, c_int> {
        let mut inner = self.lock();
        let before = inner.settings;
        change(&mut inner.settings);
        let fixed = |s: &Settings| (s.credits, s.immediate, s.buffer, s.ready);
        let changed = fixed(&before) != fixed(&inner.settings);
        if changed && !matches!(inner.state, State::New | State::Listening) {
            inner.settings = before;
            return Err(libc::EISCONN);
        }
        Ok(inner.settings)
    }

    /// Returns the local address, or that of the peer.
    pub(crate) fn address(&self, peer: bool) -> Result<libc::sockaddr_storage, c_int> {
        let inner = self.lock();
        if peer && inner.state != State::Connected {
            return Err(libc::ENOTCONN);
        }
        if inner.id.0.is_null() {
            return Err(libc::EBADF);
        }
        // SAFETY: the id is live until `close`, which takes it under the lock. Both addresses have room for every family.
        let address = unsafe {
            let addr = &raw const (*inner.id.0).route.addr;
            if peer {
                (*addr).dst.storage
            } else {
                (*addr).src.storage
            }
        };
        Ok(in_domain(address, self.domain))
    }

    pub(crate) fn bind(&self, addr: *const libc::sockaddr) -> Result<(), c_int> {
        let inner = self.lock();
        if inner.state != State::New {
            return Err(libc::EINVAL);
        }
        // SAFETY: the id is live, and the caller has checked the length of the address.
        check(unsafe { ffi::rdma_bind_addr(inner.id.0, addr.cast_mut()) })
    }

    pub(crate) fn listen(&self, backlog: c_int) -> Result<(), c_int> {
        let mut inner = self.lock();
        if inner.state == State::New {
            // SAFETY: the id is live.
            check(unsafe { ffi::rdma_listen(inner.id.0, backlog.clamp(1, 4096)) })?;
            inner.state = State::Listening;
        } else if inner.state != State::Listening {
            return Err(libc::EINVAL);
        }
        inner.backlog = usize::try_from(backlog.clamp(1, 4096)).unwrap_or(1);
        Ok(())
    }

    pub(crate) fn connect(&self, mut op: Op, addr: *const libc::sockaddr) -> Result<(), c_int> {
        let mut inner = self.lock();
        let refused = match inner.state {
            State::New => {
                // SAFETY: the id is live, and the caller has checked the length of the address.
                let r = unsafe {
                    ffi::rdma_resolve_addr(
                        inner.id.0,
                        std::ptr::null_mut(),
                        addr.cast_mut(),
                        CONNECT_MS,
                    )
                };
                check(r).err()
            }
            State::Connecting | State::Accepting => Some(libc::EALREADY),
            State::Connected => Some(libc::EISCONN),
            State::Listening | State::Ended(_) => Some(libc::EINVAL),
        };
        if let Some(errno) = refused {
            return Err(errno);
        }
        inner.state = State::Connecting;
        op.deadline = Some(Instant::now() + inner.settings.connect_timeout);
        self.set_alarm(&mut inner, op.deadline);
        inner.connect = Some(inner.add(op));
        Ok(())
    }

    pub(crate) fn accept(&self, mut op: Op) -> Result<(), c_int> {
        let mut inner = self.lock();
        if inner.state != State::Listening {
            return Err(libc::EINVAL);
        }
        if inner.ops.len() >= MAX_OPS {
            return Err(libc::EAGAIN);
        }
        op.deadline = inner.settings.recv_timeout.take();
        self.set_alarm(&mut inner, op.deadline);
        let id = inner.add(op);
        inner.accepts.push_back(id);
        self.pair(&mut inner);
        if !inner.requests.is_empty() {
            library::settle(self.fd);
        }
        Ok(())
    }

    /// Adds the socket to a call of exs_poll at position `index`.
    pub(crate) fn poll(&self, call: &Arc<PollCall>, index: usize, events: i16) {
        let mut inner = self.lock();
        inner.polls.retain(|p| !p.call.is_over());
        inner.polls.push(Poll {
            call: Arc::clone(call),
            index,
            events,
        });
        self.drain(&mut inner);
        self.answer_polls(&mut inner);
        if self.gone.load(SeqCst) || inner.id.0.is_null() {
            end_polls(&mut inner, self.fd);
        }
    }

    /// Returns the events of exs_poll for which the socket is ready.
    pub(crate) fn ready(&self) -> i16 {
        let mut inner = self.lock();
        self.drain(&mut inner);
        inner.ready()
    }

    /// Returns whether the program has closed the socket.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Returns a registered buffer for `len` bytes of unregistered memory, if copying costs less.
    pub(crate) fn buffer(&self, device: &Device, len: u64, what: Use) -> Option<Piece> {
        let of = match what {
            Use::Source => buffers::Use::Send,
            Use::Sink => buffers::Use::Receive,
            Use::Local | Use::Target => return None,
        };
        let mut pool = lock(&self.pool);
        if matches!(*pool, Pool::Unused) {
            *pool = device.pool().map_or(Pool::None, Pool::Open);
        }
        match &*pool {
            Pool::Open(manager) => manager.piece(of, usize::try_from(len).ok()?),
            Pool::Unused | Pool::None => None,
        }
    }

    /// Makes the library's thread call [`Socket::expire`] at the deadline.
    fn set_alarm(&self, inner: &mut Inner, deadline: Option<Instant>) {
        if let Some(at) = deadline
            && !inner.id.0.is_null()
            && inner.alarm.is_none_or(|alarm| at < alarm)
        {
            inner.alarm = Some(at);
            library::alarm(at, self.fd);
        }
    }

    /// Ends the operations whose deadline has passed.
    pub(crate) fn expire(&self) {
        let mut inner = self.lock();
        let now = Instant::now();
        let due = |deadline: Option<Instant>| deadline.is_some_and(|d| d <= now);
        inner.alarm = None;
        self.drain(&mut inner);
        let silent = inner.ops.numbers(|op| op.late && due(op.deadline));
        let late = inner.ops.numbers(|op| !op.late && due(op.deadline));
        let patience = now + inner.flow.as_ref().map_or(SILENCE, patience);
        for id in late.iter().chain(&silent) {
            if let Some(op) = inner.ops.get_mut(*id) {
                op.deadline = (!op.late).then_some(patience);
                op.late = true;
            }
        }
        for id in late {
            inner.cancel(self, id);
        }
        let flow = inner.flow.as_ref();
        if flow.is_some_and(|flow| silent.iter().any(|id| flow.needs_peer(*id))) {
            self.end(&mut inner, libc::ETIMEDOUT);
        }
        if due(inner.establish_by) {
            self.end(&mut inner, libc::ETIMEDOUT);
        }
        if due(inner.closing.as_ref().and_then(|op| op.deadline)) {
            self.closed(&mut inner, libc::ETIMEDOUT);
        }
        if due(inner.send_by) {
            inner.send_by = None;
            library::discard(self.fd);
        }
        self.settle_locked(&mut inner);
        let deadlines = inner.ops.iter().filter_map(|op| op.deadline);
        let first = deadlines
            .chain(inner.establish_by)
            .chain(inner.closing.as_ref().and_then(|op| op.deadline))
            .chain(inner.send_by)
            .min();
        self.set_alarm(&mut inner, first);
    }

    /// Returns the device of the connection, with which memory is registered, and the longest immediate data.
    pub(crate) fn device(&self) -> Result<(&Device, u64), c_int> {
        if let Some((device, immediate)) = self.device.get() {
            return Ok((device, *immediate));
        }
        // The socket was never connected.
        match self.lock().state {
            State::Ended(_) => Err(libc::ECONNRESET),
            _ => Err(libc::ENOTCONN),
        }
    }

    /// Starts a transfer or a shutdown.
    pub(crate) fn start(&self, mut op: Op, begin: Begin) -> Result<(), c_int> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let persistent = op.flags & 1 != 0;
        // After the end of the connection a receive still gets the buffered data, and then the end of the data.
        let reads_end = || matches!(begin, Begin::Recv(..)) && !persistent && inner.is_at_end();
        match inner.state {
            State::Connected if inner.ops.len() >= MAX_OPS => return Err(libc::EAGAIN),
            State::Connected => {}
            State::Ended(_) if reads_end() => {}
            State::Ended(_) => return Err(libc::ECONNRESET),
            _ => return Err(libc::ENOTCONN),
        }
        let flow = inner.flow.as_mut().ok_or(libc::ENOTCONN)?;
        // A message tells the peer where the memory of a persistent receive is, and none may follow the end of this direction.
        let needs_direction = persistent || !matches!(begin, Begin::Recv(..));
        if needs_direction && flow.is_shut() {
            return Err(libc::EPIPE);
        }
        let id = inner.next_op;
        inner.next_op += 1;
        op.deadline = match begin {
            Begin::Send(_) if !persistent => inner.settings.send_timeout.take(),
            Begin::Recv(..) if !persistent => {
                // The end of an advertised receive requires an answer of the peer, so a receive with a deadline is not advertised.
                if inner.settings.recv_timeout.after.is_some() {
                    op.mr = None;
                }
                inner.settings.recv_timeout.take()
            }
            _ => None,
        };
        let deadline = op.deadline;
        if matches!(begin, Begin::Send(_))
            && op.flags == 0
            && op.offset == 0
            && let [segment] = op.segments.as_slice()
            && let Some(message) = flow.send_short(id, segment.len.into())
        {
            inner.ops.push(id, op);
            let extras = Extras {
                data: Some(id),
                ..Extras::default()
            };
            if let Err(errno) = inner.message(&message, extras, None) {
                self.end(inner, errno);
            }
            self.answer_polls(inner);
        } else {
            let mut actions = std::mem::take(&mut inner.actions);
            match begin {
                Begin::Send(segments) => {
                    let send = Send {
                        id,
                        segments,
                        persistent,
                        notify: op.flags & 2 != 0,
                        offset: (op.offset != 0).then_some(op.offset),
                    };
                    flow.send(send, &mut actions);
                }
                Begin::Recv(segments, offset) => {
                    let recv = Recv {
                        id,
                        segments,
                        persistent,
                        wait_all: op.flags & 4 != 0,
                        offset,
                        may_be_ready: op.mr.is_some(),
                    };
                    flow.recv(recv, &mut actions);
                }
                Begin::Shutdown => flow.shutdown(id, &mut actions),
            }
            inner.ops.push(id, op);
            self.perform(inner, actions);
            if inner.state != State::Connected {
                // A receive that waits for more bytes than are buffered ends now, because no more arrive.
                self.report(inner, id, libc::ECONNRESET, 0, 0);
            }
        }
        self.set_alarm(inner, deadline);
        Ok(())
    }

    /// Requests the end of all operations, or of those with the handle `ahandle`. Returns their number.
    pub(crate) fn cancel(&self, ahandle: Option<isize>) -> usize {
        let mut inner = self.lock();
        let chosen = inner
            .ops
            .numbers(|op| ahandle.is_none_or(|a| a == op.ahandle));
        for id in &chosen {
            inner.cancel(self, *id);
        }
        let polls = std::mem::take(&mut inner.polls);
        let (ended, kept): (Vec<_>, Vec<_>) = polls
            .into_iter()
            .filter(|p| !p.call.is_over())
            .partition(|p| ahandle.is_none_or(|a| a == p.call.ahandle));
        inner.polls = kept;
        for poll in &ended {
            poll.call.fire(self.fd, poll.index, 0, libc::ECANCELED);
        }
        chosen.len() + ended.len()
    }

    /// Starts a close, which is reported when the peer has answered all messages.
    pub(crate) fn begin_close(&self, mut op: Op) -> Result<(), c_int> {
        let mut inner = self.lock();
        if self.gone.swap(true, SeqCst) {
            return Err(libc::EBADF);
        }
        op.deadline = Some(Instant::now() + inner.settings.linger);
        self.set_alarm(&mut inner, op.deadline);
        inner.closing = Some(op);
        if inner.state != State::Connected {
            self.closed(&mut inner, 0);
            return Ok(());
        }
        end_polls(&mut inner, self.fd);
        let waiting = inner
            .ops
            .numbers(|op| op.flags & 1 != 0 || [EVT_RECV, EVT_RECVMSG].contains(&op.kind));
        for id in waiting {
            inner.cancel(self, id);
        }
        self.stop_deferring(&mut inner);
        inner.end_direction(self);
        self.drain(&mut inner);
        self.check_drained(&mut inner);
        Ok(())
    }

    /// Records the result of the close. The library's thread closes the socket and reports it, after the last messages are sent if the
    /// connection has not ended.
    fn closed(&self, inner: &mut Inner, errno: c_int) {
        let Some(op) = inner.closing.take() else {
            return;
        };
        inner.closed = Some((op, errno));
        if errno == 0
            && inner.state == State::Connected
            && let Some(link) = &mut inner.link
        {
            link.signal_last();
            if !link.sending.is_empty() {
                inner.send_by = Some(Instant::now() + CLOSE_WAIT);
                self.set_alarm(inner, inner.send_by);
                return;
            }
        }
        library::discard(self.fd);
    }

    /// Continues a close: when the peer has answered all messages, and when the last messages are sent.
    fn check_drained(&self, inner: &mut Inner) {
        let drained = |flow: &Flow| flow.is_drained();
        if inner.closing.is_some() && inner.flow.as_ref().is_some_and(drained) {
            self.closed(inner, 0);
        } else if inner.send_by.is_some()
            && inner.link.as_ref().is_none_or(|l| l.sending.is_empty())
        {
            inner.send_by = None;
            library::discard(self.fd);
        }
    }

    /// Ends the connection, and reports every operation. `wait`: waits until the last messages are sent, but not longer than
    /// [`CLOSE_WAIT`]. The library's thread, which serves all sockets, never waits here: after a close that has succeeded,
    /// [`Socket::closed`] sets an alarm for this wait, and the thread calls this function when the wait is over.
    pub(crate) fn close(&self, wait: bool) {
        let until = Instant::now() + CLOSE_WAIT;
        let mut inner = self.lock();
        self.gone.store(true, SeqCst);
        self.stop_deferring(&mut inner);
        // If the peer has received everything, it should see the end of the data instead of a broken connection. But if no accept has got the
        // socket, the program has not ended its data.
        if inner.state == State::Connected
            && inner.listener.is_none()
            && inner.flow.as_ref().is_some_and(Flow::has_delivered)
        {
            inner.end_direction(self);
        }
        if inner.state == State::Connected
            && let Some(link) = &mut inner.link
        {
            link.signal_last();
        }
        while wait
            && inner.state == State::Connected
            && inner.link.as_ref().is_some_and(|l| !l.sending.is_empty())
            && Instant::now() < until
        {
            if self.drain(&mut inner) == 0 {
                // The lock is released during the wait, because the library's thread, which serves all sockets, may need it.
                drop(inner);
                std::thread::sleep(CLOSE_PAUSE);
                inner = self.lock();
            }
        }
        self.end(&mut inner, libc::ECANCELED);
        let id = std::mem::replace(&mut inner.id, Ptr(std::ptr::null_mut()));
        inner.link = None;
        let requests = std::mem::take(&mut inner.requests);
        let half_open = std::mem::take(&mut inner.half_open);
        let established = std::mem::take(&mut inner.established);
        let closed = inner.closed.take();
        library::no_alarm(self.fd);
        drop(inner);
        // No accept gets these connections any more.
        for socket in half_open.into_iter().map(|(s, _)| s).chain(established) {
            library::discard(socket.fd);
        }
        // Threads of the program may keep the socket for some time (see `library::Recent`), but not its buffers.
        let pool = std::mem::replace(&mut *lock(&self.pool), Pool::None);
        drop(pool);
        // SAFETY: nothing else has these ids; the library's thread acknowledges their events without the lock.
        unsafe {
            for (request, _) in requests {
                ffi::rdma_reject(request.0, std::ptr::null(), 0);
                ffi::rdma_destroy_id(request.0);
            }
            if !id.0.is_null() {
                ffi::rdma_destroy_id(id.0);
            }
        }
        if let Some((op, errno)) = closed {
            op.queue.push(Event {
                kind: EVT_CLOSE,
                errno,
                fd: self.fd,
                ahandle: op.ahandle,
                body: [0; 6],
            });
        }
    }

    /// Handles completions, in a thread of the program that polls for events. Returns `false` if another thread holds the lock of the
    /// socket, and then handles none.
    pub(crate) fn spin(self: &Arc<Self>) -> bool {
        self.touched.store(true, Relaxed);
        if !self.hot.load(SeqCst) {
            self.hot.store(true, SeqCst);
        }
        if !self.watched.load(SeqCst) && !self.watched.swap(true, SeqCst) {
            library::watch_polled(Arc::clone(self));
        }
        let locked = self.inner.try_lock();
        let polled = locked.is_ok();
        if let Ok(mut inner) = locked {
            // The program polls again and has not answered the last message, so its acknowledgement is not held back any longer.
            self.flush(&mut inner);
            // `hot` is read with the lock held: `wake` takes the lock after each change of `hot` to false, and flushes.
            if let Some(flow) = &mut inner.flow
                && self.hot.load(SeqCst)
                && !self.is_gone()
            {
                flow.set_may_defer(true);
            }
            self.drain(&mut inner);
        }
        polled
    }

    /// Sends the acknowledgement that was held back for the program's next send.
    fn flush(&self, inner: &mut Inner) {
        if let Some(flow) = inner.flow.as_mut().filter(|flow| flow.has_held()) {
            let mut actions = std::mem::take(&mut inner.actions);
            flow.flush(&mut actions);
            self.perform(inner, actions);
        }
    }

    /// Sends the acknowledgement that was held back, and holds back none until a thread polls again.
    fn stop_deferring(&self, inner: &mut Inner) {
        if let Some(flow) = &mut inner.flow {
            flow.set_may_defer(false);
        }
        self.flush(inner);
    }

    /// Returns whether a thread has polled since the last call. Otherwise arms the completion queue, so that completions wake
    /// the library's thread.
    pub(crate) fn is_still_polled(&self) -> bool {
        if self.touched.swap(false, Relaxed) {
            return true;
        }
        self.watched.store(false, SeqCst);
        self.stop_polling();
        false
    }

    /// Called when a thread that has polled goes to sleep. Arms the completion queue, so that completions wake the library's thread.
    pub(crate) fn stop_polling(&self) {
        if self.hot.swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Handles completions in the library's thread.
    pub(crate) fn wake(&self) {
        let mut inner = self.lock();
        self.stop_deferring(&mut inner);
        loop {
            self.drain(&mut inner);
            if self.hot.load(SeqCst) {
                return;
            }
            inner.arm();
            if self.drain(&mut inner) == 0 {
                return;
            }
        }
    }

    /// Handles all completions. Returns their number.
    fn drain(&self, inner: &mut Inner) -> usize {
        let mut count = 0;
        while inner.state == State::Connected {
            let Some(link) = &mut inner.link else {
                return count;
            };
            // SAFETY: the queue is live as long as the link, and there is room for the completions.
            let n = unsafe {
                let cq = link.cq.0;
                (*(*cq).context)
                    .ops
                    .poll_cq
                    .map_or(0, |poll| poll(cq, COMPLETIONS, link.done.as_mut_ptr()))
            };
            if n == 0 {
                break;
            }
            let n = usize::try_from(n).ok().filter(|n| *n <= link.done.len());
            let Some(n) = n else {
                self.end(inner, libc::EIO);
                return count;
            };
            count += n;
            let mut actions = inner.take_actions();
            for at in 0..n {
                let done = inner.link.as_ref().and_then(|link| link.done.get(at));
                let Some(completion) = done.copied() else {
                    break;
                };
                if actions.is_empty() && self.deliver(inner, &completion) {
                    continue;
                }
                let handled = match completion.status {
                    ffi::IBV_WC_SUCCESS => inner.completed(&completion, &mut actions),
                    // The peer sent a message longer than permitted, or advertised memory that it does not have.
                    ffi::IBV_WC_LOC_LEN_ERR
                    | ffi::IBV_WC_REM_INV_REQ_ERR
                    | ffi::IBV_WC_REM_ACCESS_ERR => Err(libc::EPROTO),
                    _ => Err(libc::ECONNRESET),
                };
                if let Err(errno) = handled {
                    self.perform(inner, actions);
                    self.end(inner, errno);
                    return count;
                }
            }
            self.perform(inner, actions);
            // The queue is empty, or will be polled again. It is not polled once more here, because at a poll that finds nothing
            // a software device sends what it has held back for the program's answer.
            if n < COMPLETIONS as usize {
                break;
            }
        }
        if count > 0 {
            self.check_drained(inner);
        }
        count
    }

    /// Handles a message with immediate data for the first receive if nothing else is in progress. Otherwise changes nothing and returns false.
    fn deliver(&self, inner: &mut Inner, done: &ffi::ibv_wc) -> bool {
        if done.status != ffi::IBV_WC_SUCCESS || done.wr_id & KIND != RECEIVED {
            return false;
        }
        let (Some(link), Some(flow)) = (&mut inner.link, &mut inner.flow) else {
            return false;
        };
        let slot = usize::try_from(done.wr_id & !KIND).unwrap_or(usize::MAX);
        let Some(bytes) = link
            .buffer(slot)
            .and_then(|b| b.get(..done.byte_len as usize))
            .filter(|bytes| Message::is_immediate(bytes))
        else {
            return false;
        };
        let message = Message::read(bytes);
        let Some(Delivery { sent, recv, len }) = message.ok().and_then(|m| flow.arrived_short(&m))
        else {
            return false;
        };
        if let Some(local) = inner.ops.get(recv).and_then(|op| op.segments.first())
            && let Some(data) = bytes.get(HEADER_LENGTH..)
        {
            // SAFETY: the program does not access this memory until the event. The flow has checked that the data fits.
            unsafe {
                std::ptr::copy_nonoverlapping(data.as_ptr(), program(local.addr), data.len());
            }
        }
        COPIED.fetch_add(len, Relaxed);
        let released = link.release(slot);
        if let Some((send, len)) = sent {
            self.report(inner, send, 0, len, 0);
        }
        self.report(inner, recv, 0, len, 0);
        if let Err(errno) = released {
            self.end(inner, errno);
        }
        self.answer_polls(inner);
        true
    }

    fn perform(&self, inner: &mut Inner, mut actions: Vec<Action>) {
        for action in &actions {
            if let Action::Complete { op, outcome, len } = action {
                self.complete(inner, *op, *outcome, *len);
            } else if (inner.state == State::Connected || matches!(action, Action::Take { .. }))
                && let Err(errno) = inner.act(action)
            {
                self.end(inner, errno);
            }
        }
        actions.clear();
        inner.actions = actions;
        self.answer_polls(inner);
    }

    fn complete(&self, inner: &mut Inner, id: OpId, outcome: Outcome, len: u64) {
        if outcome == Outcome::WasRead {
            if let Some(op) = inner.ops.get(id) {
                op.queue.note(self.event(id, op, 0, len, MORE | (1 << 32)));
            }
            return;
        }
        let (errno, flags) = match outcome {
            Outcome::Done | Outcome::WasRead => (0, 0),
            Outcome::Truncated => (0, TRUNCATED),
            Outcome::Cancelled => (libc::ECANCELED, 0),
            Outcome::Invalid => (libc::EINVAL, 0),
            Outcome::BothPersistent => (libc::EBUSY, 0),
        };
        inner.writes.remove(&id);
        self.report(inner, id, errno, len, flags);
    }

    fn report(&self, inner: &mut Inner, id: OpId, errno: c_int, len: u64, flags: u64) {
        let Some(mut op) = inner.ops.remove(id) else {
            return;
        };
        if let (Some(to), Some(Keep::Pooled(piece))) = (op.bounce, op.keep.first()) {
            // SAFETY: the program does not access this memory until the event, and the buffer has at least the same length.
            unsafe {
                let len = usize::try_from(len).unwrap_or(0);
                std::ptr::copy_nonoverlapping(program(piece.addr()), program(to), len);
            }
            COPIED.fetch_add(len, Relaxed);
        }
        op.keep.clear();
        let mut event = self.event(id, &op, errno, len, flags);
        if op.late && matches!(errno, libc::ECANCELED | libc::ETIMEDOUT) {
            event.errno = libc::ETIMEDOUT;
            event.kind = match op.kind {
                _ if op.is_send() => EVT_SENDTIMEOUT,
                EVT_RECV | EVT_RECVMSG => EVT_RECVTIMEOUT,
                kind => kind,
            };
        }
        op.queue.release(op.places.saturating_sub(1));
        op.queue.push(event);
    }

    fn event(&self, id: OpId, op: &Op, errno: c_int, len: u64, flags: u64) -> Event {
        // An accept that has failed has no new descriptor.
        let first = if op.kind == EVT_ACCEPT {
            u64::from(u32::MAX)
        } else {
            op.user
        };
        Event {
            kind: op.kind,
            errno,
            fd: self.fd,
            ahandle: op.ahandle,
            body: [first, len, flags, op.offset, 0, id],
        }
    }

    /// Ends the connection: destroys the queue pair, so that the device accesses no more memory, and reports all operations.
    fn end(&self, inner: &mut Inner, errno: c_int) {
        if matches!(inner.state, State::Ended(_)) {
            return;
        }
        inner.state = State::Ended(errno);
        if let Some(link) = &mut inner.link
            && !link.qp.0.is_null()
        {
            // SAFETY: the id is live until `close` has ended the connection, and its queue pair is destroyed only here.
            unsafe {
                ffi::rdma_disconnect(inner.id.0);
                // A region to which a window is bound could not be deregistered.
                link.free_windows();
                library::destroy_qp(inner.id.0);
            }
            link.qp = Ptr(std::ptr::null_mut());
        }
        inner.connect = None;
        inner.establish_by = None;
        inner.accepts.clear();
        // A receive at the end of the data may still have waited for the end of its window.
        let last = |op: &Op| matches!(op.kind, EVT_RECV | EVT_RECVMSG) && op.flags & 1 == 0;
        let mut at_end = Vec::new();
        if let Some(flow) = inner.flow.as_ref().filter(|_| inner.is_at_end()) {
            at_end = inner.ops.numbers(last);
            at_end.retain(|id| flow.waits(*id));
        }
        if let Some(flow) = &mut inner.flow {
            flow.end_receives();
        }
        if self.gone.load(SeqCst) {
            end_polls(inner, self.fd);
        } else {
            self.answer_polls(inner);
        }
        for id in inner.ops.numbers(|_| true) {
            let errno = if at_end.contains(&id) { 0 } else { errno };
            self.report(inner, id, errno, 0, 0);
        }
        if let Some(listener) = inner.listener {
            library::settle(listener);
        }
        let drained = inner.flow.as_ref().is_some_and(Flow::is_drained);
        self.closed(inner, if drained { 0 } else { errno });
        if inner.send_by.take().is_some() {
            library::discard(self.fd);
        }
    }

    fn answer_polls(&self, inner: &mut Inner) {
        if inner.polls.is_empty() {
            return;
        }
        let now = inner.ready();
        inner.polls.retain(|poll| {
            let ready = poll.events & now;
            if ready != 0 {
                poll.call.fire(self.fd, poll.index, ready, 0);
            }
            !poll.call.is_over()
        });
    }

    /// Gives established connections to waiting accepts.
    fn pair(&self, inner: &mut Inner) {
        while let Some(id) = inner.accepts.front().copied()
            && let Some(socket) = inner.established.pop_front()
        {
            let Some(op) = inner.ops.get(id) else {
                inner.accepts.pop_front();
                inner.established.push_front(socket);
                continue;
            };
            if socket.give(op, self.fd) {
                inner.accepts.pop_front();
                inner.ops.remove(id);
            } else {
                library::discard(socket.fd);
            }
        }
    }

    /// Reports the socket to the program by the event of an accept. Returns `false` if the connection has ended.
    fn give(&self, op: &Op, listener: c_int) -> bool {
        let mut inner = self.lock();
        if !inner.is_acceptable() || inner.id.0.is_null() {
            return false;
        }
        inner.listener = None;
        // SAFETY: the id is live until `close`; the program does not access the memory for the address until the event.
        let length = unsafe {
            let peer = in_domain((*inner.id.0).route.addr.dst.storage, self.domain);
            crate::api::give_address(op.user, &raw const peer)
        };
        accept_event(op, listener, self.fd, length);
        true
    }

    /// Brings the connections of a listener forward: those that are established go to accepts, and waiting requests are answered. Only the
    /// library's thread calls this.
    pub(crate) fn settle(&self) {
        self.settle_locked(&mut self.lock());
    }

    fn settle_locked(&self, inner: &mut Inner) {
        if inner.state != State::Listening {
            return;
        }
        for (socket, since) in std::mem::take(&mut inner.half_open) {
            let (state, acceptable) = {
                let half = socket.lock();
                (half.state, half.is_acceptable())
            };
            if acceptable {
                inner.established.push_back(socket);
            } else if matches!(state, State::Ended(_)) {
                library::discard(socket.fd);
            } else {
                inner.half_open.push_back((socket, since));
            }
        }
        inner.established.retain(|socket| {
            let keep = socket.lock().is_acceptable();
            if !keep {
                library::discard(socket.fd);
            }
            keep
        });
        self.pair(inner);
        while !inner.requests.is_empty() && inner.has_room() {
            let now = Instant::now();
            if inner.half_open.len() >= HALF_OPEN {
                let Some((_, since)) = inner.half_open.front() else {
                    break;
                };
                let until = *since + HALF_OPEN_TIME;
                if now < until {
                    self.set_alarm(inner, Some(until));
                    break;
                }
                inner.drop_half_open();
            } else if let Some((id, hello)) = inner.requests.pop_front() {
                let admitted = library::admit(id, hello, self, inner.settings);
                inner.half_open.extend(admitted.map(|socket| (socket, now)));
            }
        }
        self.answer_polls(inner);
    }

    /// Answers a connection request. The socket was created for it.
    pub(crate) fn admit(&self, theirs: Hello, listener: c_int) {
        let mut inner = self.lock();
        inner.listener = Some(listener);
        inner.state = State::Accepting;
        let deadline = Some(Instant::now() + inner.settings.connect_timeout);
        inner.establish_by = deadline;
        self.set_alarm(&mut inner, deadline);
        if let Err(errno) = inner.accept(self.fd, self.stream, theirs) {
            self.end(&mut inner, errno);
        }
    }

    /// Handles an event of the connection manager.
    pub(crate) fn event_of_cm(&self, event: &CmEvent) {
        let mut inner = self.lock();
        if event.kind != ffi::RDMA_CM_EVENT_CONNECT_REQUEST && event.id != inner.id.0 {
            // The event may belong to a request that is not accepted yet.
            if let Some(at) = inner.requests.iter().position(|(id, _)| id.0 == event.id) {
                inner.requests.remove(at);
                drop(inner);
                // SAFETY: nothing else has this id.
                unsafe { ffi::rdma_destroy_id(event.id) };
            }
            return;
        }
        // A connection that was cancelled, or whose time was over, must not come into being afterwards.
        if matches!(inner.state, State::Ended(_))
            && event.kind != ffi::RDMA_CM_EVENT_CONNECT_REQUEST
        {
            return;
        }
        let failed = match event.kind {
            ffi::RDMA_CM_EVENT_ADDR_RESOLVED => {
                // SAFETY: the id is live until `close`.
                check(unsafe { ffi::rdma_resolve_route(inner.id.0, CONNECT_MS) }).err()
            }
            ffi::RDMA_CM_EVENT_ROUTE_RESOLVED => inner.dial(self.fd, self.stream).err(),
            ffi::RDMA_CM_EVENT_CONNECT_REQUEST => {
                self.request(&mut inner, event);
                None
            }
            ffi::RDMA_CM_EVENT_ESTABLISHED => self.established(&mut inner, event).err(),
            ffi::RDMA_CM_EVENT_ADDR_ERROR | ffi::RDMA_CM_EVENT_ROUTE_ERROR => {
                Some(libc::EHOSTUNREACH)
            }
            ffi::RDMA_CM_EVENT_REJECTED => Some(match Hello::read(&event.data) {
                Ok(hello) if hello.stream != self.stream => libc::EPROTOTYPE,
                Err(crate::wire::Bad::Version) => libc::EPROTONOSUPPORT,
                _ => libc::ECONNREFUSED,
            }),
            ffi::RDMA_CM_EVENT_UNREACHABLE | ffi::RDMA_CM_EVENT_CONNECT_ERROR => {
                Some(match event.status {
                    e if e == -libc::ECONNREFUSED || e == -libc::ECONNRESET => libc::ECONNREFUSED,
                    e if e == -libc::EHOSTUNREACH || e == -libc::ENETUNREACH => libc::EHOSTUNREACH,
                    _ => libc::ETIMEDOUT,
                })
            }
            ffi::RDMA_CM_EVENT_DISCONNECTED => {
                self.drain(&mut inner);
                Some(libc::ECONNRESET)
            }
            ffi::RDMA_CM_EVENT_DEVICE_REMOVAL => Some(libc::ENODEV),
            _ => None,
        };
        if let Some(errno) = failed {
            self.end(&mut inner, errno);
        }
    }

    fn request(&self, inner: &mut Inner, event: &CmEvent) {
        let hello = Hello::read(&event.data);
        let good = hello
            .ok()
            .filter(|h| h.stream == self.stream && inner.state == State::Listening);
        if good.is_some() && inner.requests.len() >= inner.backlog {
            self.settle_locked(inner);
        }
        if good.is_some() && inner.requests.len() >= inner.backlog && inner.has_room() {
            // The oldest peer that has not confirmed its connection makes room for a new one.
            inner.drop_half_open();
            self.settle_locked(inner);
        }
        if let Some(hello) = good.filter(|_| inner.requests.len() < inner.backlog) {
            inner.requests.push_back((Ptr(event.id), hello));
            self.settle_locked(inner);
            return;
        }
        let ours = inner.hello(self.stream).write();
        // SAFETY: the request is not owned by a socket yet; the private data is live until the call returns.
        unsafe {
            ffi::rdma_reject(event.id, ours.as_ptr().cast(), 16);
            ffi::rdma_destroy_id(event.id);
        }
    }

    fn established(&self, inner: &mut Inner, event: &CmEvent) -> Result<(), c_int> {
        if inner.state == State::Connecting {
            let theirs = Hello::read(&event.data).map_err(|bad| match bad {
                crate::wire::Bad::Version => libc::EPROTONOSUPPORT,
                _ => libc::EPROTO,
            })?;
            if theirs.stream != self.stream {
                return Err(libc::EPROTOTYPE);
            }
            // The peer grants *credits*: permissions to send one more message before the earlier ones are answered. This end uses at
            // most as many of them as it grants itself, because it has no buffers for more answers.
            let theirs = Hello {
                credits: theirs.credits.min(inner.settings.credits),
                ..theirs
            };
            inner.begin_flow(self.stream, theirs);
        }
        if inner.state == State::Connecting
            && let Some(link) = inner.link.as_ref().filter(|link| link.device.iwarp)
        {
            // The accepting end must not send before the first message of the connecting end has arrived (RFC 5044 §7). The connecting
            // program may start with a receive, so the library sends an empty Write first, which needs no memory of the peer.
            link.post_send(
                OPENED,
                ffi::IBV_WR_RDMA_WRITE,
                &mut [],
                (0, 0),
                ffi::IBV_SEND_SIGNALED,
            )?;
        }
        inner.state = State::Connected;
        inner.establish_by = None;
        if let (Some(link), Some(flow)) = (&inner.link, &inner.flow) {
            let device = (Arc::clone(&link.device), flow.immediate());
            self.device.get_or_init(|| device);
        }
        inner.arm();
        if let Some(id) = inner.connect.take() {
            self.report(inner, id, 0, 0, 0);
        }
        if let Some(listener) = inner.listener {
            library::settle(listener);
        }
        self.answer_polls(inner);
        self.drain(inner);
        Ok(())
    }
}

/// Ends the calls of exs_poll that include the socket, because the program has closed it.
fn end_polls(inner: &mut Inner, fd: c_int) {
    for poll in std::mem::take(&mut inner.polls) {
        poll.call.fire(fd, poll.index, 0, libc::ECANCELED);
    }
}

/// Returns an address in the family of a socket: for an IPv6 socket, an IPv4 address becomes an IPv4-mapped one.
fn in_domain(address: libc::sockaddr_storage, domain: c_int) -> libc::sockaddr_storage {
    if domain != libc::AF_INET6 || c_int::from(address.ss_family) != libc::AF_INET {
        return address;
    }
    // SAFETY: the storage has room for every family, and all bytes form valid addresses.
    unsafe {
        let short = (&raw const address).cast::<libc::sockaddr_in>().read();
        let mut long: libc::sockaddr_in6 = std::mem::zeroed();
        long.sin6_family = libc::sa_family_t::try_from(libc::AF_INET6).unwrap_or(0);
        long.sin6_port = short.sin_port;
        let octets = short.sin_addr.s_addr.to_ne_bytes();
        long.sin6_addr.s6_addr = std::net::Ipv4Addr::from(octets).to_ipv6_mapped().octets();
        let mut mapped: libc::sockaddr_storage = std::mem::zeroed();
        (&raw mut mapped).cast::<libc::sockaddr_in6>().write(long);
        mapped
    }
}

/// Returns how long the peer may take to answer.
fn patience(flow: &Flow) -> Duration {
    SILENCE + Duration::from_millis(flow.in_progress() / BYTES_PER_MS)
}

fn accept_event(op: &Op, listener: c_int, new: c_int, length: u32) {
    let new = u64::from(new.cast_unsigned());
    let body = [new, op.offset, u64::from(length), 0, 0, 0];
    op.queue.push(Event {
        kind: EVT_ACCEPT,
        errno: 0,
        fd: listener,
        ahandle: op.ahandle,
        body,
    });
}

fn check(result: c_int) -> Result<(), c_int> {
    if result == 0 {
        Ok(())
    } else {
        Err(crate::errno())
    }
}

impl Link {
    fn buffer(&mut self, slot: Slot) -> Option<&mut [u8]> {
        self.buffers
            .get_mut(slot * self.size..(slot + 1) * self.size)
    }

    /// Posts a receive with the message buffer `slot` again, once there are [`RELEASED`] such buffers.
    fn release(&mut self, slot: Slot) -> Result<(), c_int> {
        self.released.push(slot);
        if self.released.len() < RELEASED {
            return Ok(());
        }
        let mut slots = std::mem::take(&mut self.released);
        let posted = self.post_recvs(&slots);
        slots.clear();
        self.released = slots;
        posted
    }

    /// Posts a receive with each of the message buffers, by one call.
    fn post_recvs(&mut self, slots: &[Slot]) -> Result<(), c_int> {
        let length = u32::try_from(self.size).unwrap_or(0);
        let lkey = self.region.lkey();
        let mut sges = [ffi::ibv_sge::default(); RELEASED];
        let mut wrs = [const { NO_RECV }; RELEASED];
        let mut next = std::ptr::null_mut();
        for ((slot, sge), wr) in slots.iter().zip(&mut sges).zip(&mut wrs) {
            let Some(buffer) = self.buffer(*slot) else {
                return Err(libc::EIO);
            };
            *sge = ffi::ibv_sge {
                addr: buffer.as_mut_ptr().expose_provenance() as u64,
                length,
                lkey,
            };
            *wr = ffi::ibv_recv_wr {
                wr_id: RECEIVED | *slot as u64,
                next,
                sg_list: sge,
                num_sge: 1,
            };
            next = wr;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live until `qp` is set to null, and the requests until the call returns.
        let result = unsafe {
            let qp = self.qp.0;
            if qp.is_null() {
                return Err(libc::ECONNRESET);
            }
            (*(*qp).context)
                .ops
                .post_recv
                .map_or(libc::ENOSYS, |post| post(qp, next, &raw mut bad))
        };
        if result == 0 {
            Ok(())
        } else {
            Err(libc::ECONNRESET)
        }
    }

    /// Returns the flag of a request with `length` bytes that the device can copy when the request is posted, and 0 for a longer one.
    fn inline_flag(&self, length: usize) -> u32 {
        if length <= self.inline {
            ffi::IBV_SEND_INLINE
        } else {
            0
        }
    }

    /// Sends the message of `length` bytes in the buffer `slot`, after the request `before`.
    fn post_message(
        &mut self,
        slot: Slot,
        sges: &mut [ffi::ibv_sge],
        length: usize,
        before: Option<&mut ffi::ibv_send_wr>,
        invalidates: Option<u32>,
    ) -> Result<(), c_int> {
        let mut flags = 0;
        // At most a quarter of the buffers are used by messages after the last signaled one. The completion of that message shows
        // that the buffers of all messages before it are free again.
        if self.unsignaled >= self.sends / 4 {
            flags |= ffi::IBV_SEND_SIGNALED;
            self.unsignaled = 0;
        } else {
            self.unsignaled += 1;
        }
        flags |= self.inline_flag(length);
        self.sending.push_back(slot);
        let id = SENT | slot as u64;
        let mut wr = request(id, ffi::IBV_WR_SEND, sges, (0, 0), flags);
        if let Some(stag) = invalidates {
            wr.opcode = ffi::IBV_WR_SEND_WITH_INV;
            wr.imm_data = stag;
        }
        match before {
            None => self.post(&mut wr),
            Some(first) => {
                first.next = &raw mut wr;
                self.post(first)
            }
        }
    }

    /// Creates the windows of the connection. Returns how many there are.
    fn make_windows(&mut self, count: usize) -> usize {
        while self.windows.len() < count {
            let pd = self.device.pd.0;
            // SAFETY: the domain is live as long as the process.
            let mw = unsafe {
                (*(*pd).context)
                    .ops
                    .alloc_mw
                    .map_or(std::ptr::null_mut(), |alloc| alloc(pd, ffi::IBV_MW_TYPE_2))
            };
            if mw.is_null() {
                break;
            }
            // SAFETY: the window was created above. The header's inline function sets these fields for a program.
            let rkey = unsafe {
                (*mw).context = (*pd).context;
                (*mw).pd = pd;
                (*mw).r#type = ffi::IBV_MW_TYPE_2;
                (*mw).rkey
            };
            self.windows.push(Window {
                mw: Ptr(mw),
                rkey,
                ready: None,
            });
        }
        self.windows.len()
    }

    /// Frees all windows, which ends the peer's access.
    fn free_windows(&mut self) {
        for window in self.windows.drain(..) {
            // SAFETY: the link owns the windows, and its device is live as long as the process.
            unsafe {
                let mw = window.mw.0;
                (*(*mw).context).ops.dealloc_mw.map(|free| free(mw));
            }
        }
    }

    /// Records that the peer has written into the receive of the message `ready`. `EPROTO`: it has not invalidated the window.
    fn written(&mut self, ready: u32, done: &ffi::ibv_wc) -> Result<(), c_int> {
        let window = self.windows.iter_mut().find(|w| w.ready == Some(ready));
        let Some(window) = window else { return Ok(()) };
        // The kernel's rxe reports an invalidation with the kernel's value of this flag, which is the value of `IBV_WC_IP_CSUM_OK` in verbs.
        // Reliable connections do not use `IBV_WC_IP_CSUM_OK`.
        let with = ffi::IBV_WC_WITH_INV | ffi::IBV_WC_IP_CSUM_OK;
        if done.wc_flags & with == 0 || done.imm_data != window.rkey {
            return Err(libc::EPROTO);
        }
        window.ready = None;
        Ok(())
    }

    /// Invalidates the window of the message `ready`. `EPROTO`: the peer has invalidated it, and has not written to the receive.
    fn unbind(&self, ready: u32) -> Result<(), c_int> {
        let window = self.windows.iter().find(|w| w.ready == Some(ready));
        let rkey = window.ok_or(libc::EPROTO)?.rkey;
        let id = UNBOUND | u64::from(ready);
        let signaled = ffi::IBV_SEND_SIGNALED;
        let mut wr = request(id, ffi::IBV_WR_LOCAL_INV, &mut [], (0, 0), signaled);
        wr.imm_data = rkey;
        self.post(&mut wr)
    }

    /// If the last messages are not signaled, posts an empty Write that is signaled. Its completion shows that all messages have
    /// completed.
    fn signal_last(&mut self) {
        if self.unsignaled > 0 {
            self.unsignaled = 0;
            self.sending.push_back(NO_SLOT);
            let id = SENT | NO_SLOT as u64;
            // If this fails, the connection has ended, and the close waits until its time is over.
            let _ = self.post_send(
                id,
                ffi::IBV_WR_RDMA_WRITE,
                &mut [],
                (0, 0),
                ffi::IBV_SEND_SIGNALED,
            );
        }
    }

    /// Records that the message in the buffer `last`, and all before it, are sent.
    fn sent(&mut self, last: Slot) {
        while let Some(slot) = self.sending.pop_front() {
            if slot != NO_SLOT {
                self.free.push(slot);
            }
            if slot == last {
                return;
            }
        }
    }

    fn post_send(
        &self,
        wr_id: u64,
        opcode: u32,
        sges: &mut [ffi::ibv_sge],
        to: (u64, u32),
        send_flags: u32,
    ) -> Result<(), c_int> {
        self.post(&mut request(wr_id, opcode, sges, to, send_flags))
    }

    /// Posts a work request and those that follow it.
    fn post(&self, wr: &mut ffi::ibv_send_wr) -> Result<(), c_int> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_recvs`.
        let result = unsafe {
            let qp = self.qp.0;
            if qp.is_null() {
                return Err(libc::ECONNRESET);
            }
            (*(*qp).context)
                .ops
                .post_send
                .map_or(libc::ENOSYS, |post| post(qp, wr, &raw mut bad))
        };
        if result == 0 {
            Ok(())
        } else {
            Err(libc::ECONNRESET)
        }
    }
}

fn request(
    wr_id: u64,
    opcode: u32,
    sges: &mut [ffi::ibv_sge],
    to: (u64, u32),
    send_flags: u32,
) -> ffi::ibv_send_wr {
    ffi::ibv_send_wr {
        wr_id,
        next: std::ptr::null_mut(),
        sg_list: sges.as_mut_ptr(),
        num_sge: c_int::try_from(sges.len()).unwrap_or(0),
        opcode,
        send_flags,
        wr: ffi::ibv_send_wr_wr {
            rdma: ffi::ibv_send_wr_rdma {
                remote_addr: to.0,
                rkey: to.1,
            },
        },
        ..Default::default()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.free_windows();
        // SAFETY: the queue pair that used the queue was destroyed by `Socket::end`, or was never created.
        unsafe { ffi::ibv_destroy_cq(self.cq.0) };
    }
}

impl Inner {
    fn hello(&self, stream: bool) -> Hello {
        Hello {
            stream,
            credits: self.settings.credits,
            immediate: self.settings.immediate,
            ready: self.settings.ready,
            invalidates: self.settings.ready
                && self.link.as_ref().is_some_and(|l| l.device.windows),
        }
    }

    /// Returns an empty list of actions. [`Socket::perform`] gives its allocation back.
    fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    fn add(&mut self, op: Op) -> OpId {
        let id = self.next_op;
        self.next_op += 1;
        self.ops.push(id, op);
        id
    }

    /// Returns whether the peer has ended its data and closed the connection.
    fn is_at_end(&self) -> bool {
        self.state == State::Ended(libc::ECONNRESET)
            && self.flow.as_ref().is_some_and(Flow::is_at_end)
    }

    /// Returns whether an accept may get the socket: its connection is established, or has ended after all data has arrived.
    fn is_acceptable(&self) -> bool {
        self.state == State::Connected || self.is_at_end()
    }

    /// Returns whether further connections may wait for accepts.
    fn has_room(&self) -> bool {
        self.established.len() < self.backlog
    }

    /// Ends the oldest connection that is being established.
    fn drop_half_open(&mut self) {
        if let Some((socket, _)) = self.half_open.pop_front() {
            library::discard(socket.fd);
        }
    }

    /// Returns the readiness of the socket in the bits of exs_poll.
    fn ready(&self) -> i16 {
        let (input, output) = match self.state {
            State::Connected => self.flow.as_ref().map_or((false, false), Flow::ready),
            State::Listening => (!self.established.is_empty(), false),
            State::Ended(_) => (true, true),
            _ => (false, false),
        };
        i16::from(input) | (i16::from(output) * 4)
    }

    /// Ends the direction to the peer, without an event for the program.
    fn end_direction(&mut self, socket: &Socket) {
        if let Some(flow) = self.flow.as_mut().filter(|flow| !flow.is_shut()) {
            let mut actions = Vec::new();
            flow.shutdown(0, &mut actions);
            socket.perform(self, actions);
        }
    }

    fn cancel(&mut self, socket: &Socket, id: OpId) {
        let listed = self
            .accepts
            .iter()
            .position(|a| *a == id)
            .and_then(|at| self.accepts.remove(at))
            .is_some();
        if listed {
            socket.report(self, id, libc::ECANCELED, 0, 0);
        } else if self.connect == Some(id) {
            socket.end(self, libc::ECANCELED);
        } else if let Some(flow) = &mut self.flow {
            let mut actions = Vec::new();
            flow.set_ordered(self.settings.ordered);
            flow.cancel(id, &mut actions);
            socket.perform(self, actions);
        }
    }

    fn arm(&self) {
        if let Some(link) = &self.link {
            // SAFETY: the queue is live as long as the link.
            unsafe {
                (*(*link.cq.0).context)
                    .ops
                    .req_notify_cq
                    .map(|arm| arm(link.cq.0, 0))
            };
        }
    }

    /// Creates the queue pair and its message buffers, and posts the receives.
    fn equip(&mut self, fd: c_int, stream: bool, most_sends: u16) -> Result<(), c_int> {
        // SAFETY: the id is live until `close`.
        let device = library::device(unsafe { (*self.id.0).verbs })?;
        let ours = self.hello(stream);
        let controls = CONTROLS as usize;
        // Receives: for the peer's messages, and for its answers to local messages. Sends: for local messages, and twice for
        // local answers, because the peer may send its next message before this end has handled the completion of an answer. Some
        // buffers of receives wait to be posted again.
        let receives =
            usize::from(ours.credits) + usize::from(most_sends) + 2 * controls + RELEASED;
        let sends = usize::from(most_sends) + 2 * usize::from(ours.credits) + 4 * controls;
        let size = MAX_HEADER_LENGTH
            .max(HEADER_LENGTH + ours.immediate as usize)
            .next_multiple_of(64);
        let mut buffers = zeroed((receives + sends) * size)?;
        let addr = buffers.as_mut_ptr().expose_provenance() as u64;
        let region = register(&device, addr, buffers.len() as u64, Use::Local)?;
        // Each message can follow a Write that is not signaled.
        let depth = u32::try_from(receives + 2 * sends).map_err(|_| libc::EINVAL)?
            + TRANSFERS
            + READY_REQUESTS
            + 1;
        let context = std::ptr::without_provenance_mut::<c_void>(usize::try_from(fd).unwrap_or(0));
        let entries = c_int::try_from(depth).map_err(|_| libc::EINVAL)?;
        // SAFETY: the device and its channel are live as long as the process.
        let cq =
            unsafe { ffi::ibv_create_cq(device.context.0, entries, context, device.channel.0, 0) };
        if cq.is_null() {
            return Err(crate::errno());
        }
        let mut link = Link {
            device,
            cq: Ptr(cq),
            qp: Ptr(std::ptr::null_mut()),
            buffers,
            size,
            free: (receives..receives + sends).collect(),
            sending: VecDeque::with_capacity(sends),
            released: Vec::with_capacity(RELEASED),
            unsignaled: 0,
            inline: 0,
            sends,
            backlog: VecDeque::new(),
            windows: Vec::new(),
            region,
            early: None,
            done: [ffi::ibv_wc::default(); COMPLETIONS as usize],
        };
        let init = |inline| ffi::ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ffi::ibv_qp_cap {
                max_send_wr: u32::try_from(2 * sends).unwrap_or(0) + TRANSFERS + READY_REQUESTS + 1,
                max_recv_wr: u32::try_from(receives).unwrap_or(0),
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: ffi::IBV_QPT_RC,
            ..Default::default()
        };
        let mut result = Err(libc::EINVAL);
        for inline in INLINE {
            let mut init = init(inline);
            // SAFETY: the id is live until `close`, and the objects in the attributes at least as long as the link.
            result =
                check(unsafe { ffi::rdma_create_qp(self.id.0, link.device.pd.0, &raw mut init) });
            if result.is_ok() {
                link.inline = inline.min(init.cap.max_inline_data) as usize;
                break;
            }
        }
        result?;
        // SAFETY: as above; the id has a queue pair now.
        link.qp = Ptr(unsafe { (*self.id.0).qp });
        let slots: Vec<Slot> = (0..receives).collect();
        let posted = slots
            .chunks(RELEASED)
            .try_for_each(|slots| link.post_recvs(slots));
        self.link = Some(link);
        posted
    }

    /// Creates the state of the connection, for which the queue pair exists.
    fn begin_flow(&mut self, stream: bool, theirs: Hello) {
        let buffer = u64::from(self.settings.buffer);
        let mut flow = Flow::new(self.hello(stream), theirs, buffer);
        // Advertised receives give peers no more rights than they have in any case: on iWARP the memory of every receive permits remote
        // writes (`Use::access`), and with a window a peer can write to the memory of one receive until it ends.
        if let Some(link) = self.link.as_mut().filter(|link| !link.device.iwarp) {
            let most = if link.device.windows && theirs.invalidates {
                flow.most_ready()
            } else {
                0
            };
            flow.set_windows(link.make_windows(most));
        }
        self.flow = Some(flow);
    }

    fn dial(&mut self, fd: c_int, stream: bool) -> Result<(), c_int> {
        self.equip(fd, stream, self.settings.credits)?;
        let ours = self.hello(stream).write();
        let mut param = conn_param(&ours);
        // SAFETY: the id is live until `close`, the parameters until the call returns.
        check(unsafe { ffi::rdma_connect(self.id.0, &raw mut param) })
    }

    fn accept(&mut self, fd: c_int, stream: bool, theirs: Hello) -> Result<(), c_int> {
        let theirs = Hello {
            credits: theirs.credits.min(self.settings.credits),
            ..theirs
        };
        self.equip(fd, stream, theirs.credits)?;
        self.begin_flow(stream, theirs);
        let ours = self.hello(stream).write();
        let mut param = conn_param(&ours);
        // SAFETY: as in `dial`.
        check(unsafe { ffi::rdma_accept(self.id.0, &raw mut param) })
    }

    /// Handles a completion. `EPROTO`: the peer violated the protocol.
    fn completed(&mut self, done: &ffi::ibv_wc, out: &mut Vec<Action>) -> Result<(), c_int> {
        let (Some(link), Some(flow)) = (&mut self.link, &mut self.flow) else {
            return Err(libc::ECONNRESET);
        };
        let value = done.wr_id & !KIND;
        match done.wr_id & KIND {
            OPENED => Ok(()),
            RECEIVED => {
                let slot = usize::try_from(value).unwrap_or(usize::MAX);
                let length = done.byte_len as usize;
                let bytes = link.buffer(slot).and_then(|b| b.get(..length));
                let message = bytes.and_then(|bytes| Message::read(bytes).ok());
                let message = message.ok_or(libc::EPROTO)?;
                if let Message::Written { to, .. } = &message {
                    link.written(*to, done)?;
                }
                flow.arrived(message, slot, out).map_err(|_| libc::EPROTO)
            }
            UNBOUND => {
                let ready = u32::try_from(value).unwrap_or(0);
                let window = link.windows.iter_mut().find(|w| w.ready == Some(ready));
                if let Some(window) = window {
                    window.ready = None;
                }
                flow.unbound(ready, out);
                Ok(())
            }
            SENT => {
                link.sent(usize::try_from(value).unwrap_or(usize::MAX));
                self.post_backlog()
            }
            READ => {
                if let Some(left) = self.moves.get_mut(&value) {
                    *left -= 1;
                    if *left == 0 {
                        self.moves.remove(&value);
                        flow.moved(value, out);
                    }
                }
                Ok(())
            }
            _ => {
                if let Some(left) = self.writes.get_mut(&value) {
                    *left -= 1;
                    if *left == 0 {
                        self.writes.remove(&value);
                        flow.written(value, out);
                    }
                }
                Ok(())
            }
        }
    }

    /// Sends a message, after the request `before` if there is one.
    fn message(
        &mut self,
        message: &Message,
        extras: Extras,
        before: Option<&mut ffi::ibv_send_wr>,
    ) -> Result<(), c_int> {
        let Some(link) = &mut self.link else {
            return Err(libc::ECONNRESET);
        };
        if link.free.is_empty() || !link.backlog.is_empty() {
            // More answers than there are buffers can only be due if the peer exceeds its credits.
            if link.backlog.len() >= link.sends {
                return Err(libc::EPROTO);
            }
            link.backlog.push_back((message.clone(), extras));
            // This request needs no buffer, and has to precede the message.
            return before.map_or(Ok(()), |first| link.post(first));
        }
        self.post_message(message, extras, before)
    }

    /// Sends the messages that waited for a buffer.
    fn post_backlog(&mut self) -> Result<(), c_int> {
        while let Some(link) = self.link.as_mut().filter(|link| !link.free.is_empty())
            && let Some((message, extras)) = link.backlog.pop_front()
        {
            self.post_message(&message, extras, None)?;
        }
        Ok(())
    }

    fn post_message(
        &mut self,
        message: &Message,
        extras: Extras,
        before: Option<&mut ffi::ibv_send_wr>,
    ) -> Result<(), c_int> {
        let Some(link) = &mut self.link else {
            return Err(libc::ECONNRESET);
        };
        let Some(slot) = link.free.pop() else {
            return Err(libc::EIO);
        };
        let lkey = link.region.lkey();
        let Some(buffer) = link.buffer(slot) else {
            return Err(libc::EIO);
        };
        let mut length = message.write(buffer);
        let addr = buffer.as_ptr().addr() as u64;
        let mut sges = [ffi::ibv_sge::default(); 2];
        let mut count = 1;
        let segment = extras
            .data
            .and_then(|id| self.ops.get(id))
            .and_then(|op| op.segments.first().map(|s| (op, s)));
        let mut all = length;
        if let Some((op, segment)) = segment.filter(|(_, s)| s.len > 0) {
            let bytes = segment.len as usize;
            all += bytes;
            if op.keep.is_empty() || bytes <= SHORT {
                let Some(room) = buffer.get_mut(length..length + bytes) else {
                    return Err(libc::EMSGSIZE);
                };
                // SAFETY: the program does not access this memory until the event; the message buffer has the room.
                unsafe {
                    std::ptr::copy_nonoverlapping(program(segment.addr), room.as_mut_ptr(), bytes);
                };
                COPIED.fetch_add(u64::from(segment.len), Relaxed);
                length += bytes;
            } else {
                count = 2;
                sges[1] = ffi::ibv_sge {
                    addr: segment.addr,
                    length: segment.len,
                    lkey: segment.stag,
                };
            }
        }
        sges[0] = ffi::ibv_sge {
            addr,
            length: u32::try_from(length).unwrap_or(0),
            lkey,
        };
        let sges = sges.get_mut(..count).unwrap_or(&mut []);
        link.post_message(slot, sges, all, before, extras.invalidates)
    }

    fn act(&mut self, action: &Action) -> Result<(), c_int> {
        match *action {
            Action::Message(ref message, data) => {
                let extras = Extras {
                    data,
                    ..Extras::default()
                };
                self.message(message, extras, None)
            }
            Action::Ready { ref message, recv } => self.advertise(message, recv),
            Action::Unbind(ready) => self.link.as_ref().map_or(Ok(()), |link| link.unbind(ready)),
            Action::Put {
                ref message,
                send,
                to,
                window,
            } => {
                let op = self.ops.get(send).ok_or(libc::EIO)?;
                let local = op.segments.first().ok_or(libc::EIO)?;
                let mut sge = [ffi::ibv_sge {
                    addr: local.addr,
                    length: local.len,
                    lkey: local.stag,
                }];
                let to_memory = (to.addr, to.stag);
                // The answer to the message shows that the Write has completed. If the Write fails, it has a completion in any case.
                let mut write = request(PUT, ffi::IBV_WR_RDMA_WRITE, &mut sge, to_memory, 0);
                DIRECT.fetch_add(u64::from(to.len), Relaxed);
                let extras = Extras {
                    invalidates: window.then_some(to.stag),
                    ..Extras::default()
                };
                self.message(message, extras, Some(&mut write))
            }
            Action::Release(slot) => self.link.as_mut().map_or(Ok(()), |link| link.release(slot)),
            Action::Read {
                number,
                to,
                at,
                ref from,
            } => {
                if to == flow::BUFFER {
                    self.need_early()?;
                }
                let Some(link) = &self.link else {
                    return Err(libc::EIO);
                };
                let mut at = at;
                let mut pieces = 0;
                for remote in from {
                    let mut skip = 0;
                    for local in self.sink(to, at, u64::from(remote.len))? {
                        let mut sge = [ffi::ibv_sge {
                            addr: local.addr,
                            length: local.len,
                            lkey: local.stag,
                        }];
                        let source = (remote.addr.wrapping_add(skip), remote.stag);
                        link.post_send(
                            READ | number,
                            ffi::IBV_WR_RDMA_READ,
                            &mut sge,
                            source,
                            ffi::IBV_SEND_SIGNALED,
                        )?;
                        skip += u64::from(local.len);
                        pieces += 1;
                    }
                    at += u64::from(remote.len);
                    DIRECT.fetch_add(u64::from(remote.len), Relaxed);
                }
                self.moves.insert(number, pieces);
                Ok(())
            }
            Action::Write { send, to } => {
                let (Some(link), Some(op)) = (&self.link, self.ops.get_mut(send)) else {
                    return Err(libc::EIO);
                };
                if op.keep.is_empty() && to.len > 0 {
                    for segment in &mut op.segments {
                        let region = register(
                            &link.device,
                            segment.addr,
                            u64::from(segment.len),
                            Use::Source,
                        )?;
                        segment.stag = region.lkey();
                        op.keep.push(Keep::Own { _region: region });
                    }
                }
                let mut target = to.addr;
                let mut pieces = 0;
                for local in &op.segments {
                    if local.len == 0 && to.len > 0 {
                        continue;
                    }
                    let mut sge = [ffi::ibv_sge {
                        addr: local.addr,
                        length: local.len,
                        lkey: local.stag,
                    }];
                    let sges = if local.len == 0 {
                        &mut sge[..0]
                    } else {
                        &mut sge[..]
                    };
                    let inline = link.inline_flag(local.len as usize);
                    link.post_send(
                        WRITTEN | send,
                        ffi::IBV_WR_RDMA_WRITE,
                        sges,
                        (target, to.stag),
                        ffi::IBV_SEND_SIGNALED | inline,
                    )?;
                    target = target.wrapping_add(u64::from(local.len));
                    pieces += 1;
                    if to.len == 0 {
                        break;
                    }
                }
                DIRECT.fetch_add(u64::from(to.len), Relaxed);
                self.writes.insert(send, pieces);
                Ok(())
            }
            Action::Copy {
                to,
                at,
                slot,
                skip,
                len,
            } => {
                if to == flow::BUFFER {
                    self.need_early()?;
                }
                let sink = self.sink(to, at, len)?;
                let (Some(link), Ok(skip)) = (&mut self.link, usize::try_from(skip)) else {
                    return Err(libc::EIO);
                };
                let mut from = link
                    .buffer(slot)
                    .and_then(|b| b.get(HEADER_LENGTH + skip..))
                    .ok_or(libc::EIO)?;
                for local in sink {
                    let (part, rest) =
                        from.split_at_checked(local.len as usize).ok_or(libc::EIO)?;
                    // SAFETY: the program does not access this memory until the event.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            part.as_ptr(),
                            program(local.addr),
                            part.len(),
                        );
                    };
                    from = rest;
                }
                COPIED.fetch_add(len, Relaxed);
                Ok(())
            }
            Action::Take { to, at, from, len } => {
                let source = self.sink(flow::BUFFER, from, len)?;
                let sink = self.sink(to, at, len)?;
                copy(&source, &sink);
                COPIED.fetch_add(len, Relaxed);
                Ok(())
            }
            Action::Complete { .. } => Ok(()),
        }
    }

    /// Advertises a receive.
    fn advertise(&mut self, message: &Message, recv: OpId) -> Result<(), c_int> {
        let &Message::Ready {
            seq,
            segment,
            last,
            acks,
            window: true,
        } = message
        else {
            return self.message(message, Extras::default(), None);
        };
        let mr = self.ops.get(recv).and_then(|op| op.mr).ok_or(libc::EIO)?;
        let link = self.link.as_mut().ok_or(libc::EIO)?;
        let window = link.windows.iter_mut().find(|w| w.ready.is_none());
        let window = window.ok_or(libc::EIO)?;
        // Each binding has another key than the 255 before it, so that the peer cannot use one of those.
        window.rkey = (window.rkey & !0xff) | (window.rkey.wrapping_add(1) & 0xff);
        window.ready = Some(seq);
        let (mw, rkey) = (window.mw, window.rkey);
        let mut bind = request(BOUND, ffi::IBV_WR_BIND_MW, &mut [], (0, 0), 0);
        bind.op.bind_mw = ffi::ibv_send_wr_bind_mw {
            mw: mw.0,
            rkey,
            bind_info: ffi::ibv_mw_bind_info {
                mr: mr.0,
                addr: segment.addr,
                length: u64::from(segment.len),
                mw_access_flags: ffi::IBV_ACCESS_REMOTE_WRITE,
            },
        };
        let message = Message::Ready {
            seq,
            segment: Segment {
                stag: rkey,
                ..segment
            },
            last,
            acks,
            window: true,
        };
        self.message(&message, Extras::default(), Some(&mut bind))?;
        // Drivers of libibverbs pass this key to the device at the next binding, as the one that is replaced.
        // SAFETY: the link owns the window.
        unsafe { (*mw.0).rkey = rkey };
        Ok(())
    }

    /// Creates the buffer of the stream at its first use.
    fn need_early(&mut self) -> Result<(), c_int> {
        let size = self.settings.buffer as usize;
        let link = self.link.as_mut().ok_or(libc::EIO)?;
        if link.early.is_none() {
            link.early = Some(Early::new(&link.device, size)?);
        }
        Ok(())
    }

    /// Returns the memory of bytes `[at, at + len)` of a receive, or of the stream's buffer.
    fn sink(&self, of: OpId, at: u64, len: u64) -> Result<Segments, c_int> {
        if of == flow::BUFFER {
            let early = self.link.as_ref().and_then(|l| l.early.as_ref());
            return early.map(|e| e.segments(at, len)).ok_or(libc::EIO);
        }
        let op = self.ops.get(of).ok_or(libc::EIO)?;
        Ok(flow::cut(&op.segments, at, len))
    }
}

/// Copies bytes between two lists of memory of the same total length.
fn copy(from: &[Segment], to: &[Segment]) {
    let total = |all: &[Segment]| all.iter().map(|s| u64::from(s.len)).sum::<u64>();
    let mut at = 0;
    let len = total(from).min(total(to));
    while at < len {
        let rest = [from, to].map(|all| flow::cut(all, at, len - at).first().copied());
        let [Some(from), Some(to)] = rest else { return };
        let count = from.len.min(to.len);
        // SAFETY: both are memory of the library, or of an operation, whose memory the program does not access until its event.
        unsafe {
            std::ptr::copy_nonoverlapping(program(from.addr), program(to.addr), count as usize);
        };
        at += u64::from(count);
    }
}

/// Returns a pointer to memory of the program.
fn program(addr: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(addr as usize)
}

fn conn_param(hello: &[u8; HELLO_LENGTH]) -> ffi::rdma_conn_param {
    ffi::rdma_conn_param {
        private_data: hello.as_ptr().cast(),
        private_data_len: 16,
        responder_resources: 255,
        initiator_depth: 255,
        flow_control: 0,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}
