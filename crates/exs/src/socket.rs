//! A socket: its connection, its message buffers, and the program's operations on it.

use crate::ffi;
use crate::flow::{self, Action, CONTROLS, Flow, OpId, Outcome, Recv, Send, Slot};
use crate::library::{self, CmEvent};
use crate::memory::{Device, FileMap, Memory, Ptr, Region, Use};
use crate::queue::{Event, MORE, Queue};
use crate::wire::{
    HEADER_LENGTH, HELLO_LENGTH, Hello, MAX_SEGMENTS, Message, SEGMENT_LENGTH, Segment,
};
use libc::{c_int, c_void};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Numbers of the events, as `<exs.h>` has them.
pub(crate) const EVT_POLL: c_int = 1;
pub(crate) const EVT_CONNECT: c_int = 2;
pub(crate) const EVT_ACCEPT: c_int = 3;
pub(crate) const EVT_SEND: c_int = 4;
pub(crate) const EVT_RECV: c_int = 5;
pub(crate) const EVT_SENDMSG: c_int = 6;
pub(crate) const EVT_RECVMSG: c_int = 7;
pub(crate) const EVT_SENDFILE: c_int = 8;
pub(crate) const EVT_SHUTDOWN: c_int = 11;

/// In the flags of a transfer: the receive was shorter than the message.
const TRUNCATED: u64 = 0x100;
/// Operations that may be under way on one socket.
const MAX_OPS: usize = 4096;
/// How long an address, a route and a connection may take to be found.
const CONNECT_MS: c_int = 5000;
/// How long a close waits until its last messages are sent.
const CLOSE_WAIT: Duration = Duration::from_millis(100);
/// How long it pauses between two looks.
const CLOSE_PAUSE: Duration = Duration::from_micros(100);
/// Places of the send queue for Reads and Writes: 16 moves in up to 15 pieces, 16 writes in up to 8.
const TRANSFERS: u32 = 16 * 15 + 16 * 8;

/// Bytes that the library has copied, for all sockets.
pub(crate) static COPIED: AtomicU64 = AtomicU64::new(0);
/// Bytes that devices have moved without a copy of the library's.
pub(crate) static DIRECT: AtomicU64 = AtomicU64::new(0);

/// What the program may set before it connects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) credits: u16,
    pub(crate) immediate: u32,
}

/// Keeps memory registered, or mapped, until its operation has ended.
#[derive(Debug)]
pub(crate) enum Keep {
    /// Registered by the program.
    Memory {
        _memory: Arc<Memory>,
        _region: Arc<Region>,
    },
    /// Registered for this operation.
    Own(Region),
    /// A file, mapped and registered for this operation; the registration goes first.
    File { _region: Region, _map: FileMap },
}

/// An operation of the program, from its call to its event.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: c_int,
    pub(crate) queue: Arc<Queue>,
    /// Places in the queue that the operation has.
    pub(crate) places: usize,
    pub(crate) ahandle: isize,
    /// What the event points to: the buffer, or the structure of the call.
    pub(crate) user: u64,
    pub(crate) flags: u64,
    pub(crate) offset: u64,
    /// The memory, with local keys.
    pub(crate) segments: Vec<Segment>,
    /// The same, with the keys that the peer uses.
    pub(crate) remote: Vec<Segment>,
    pub(crate) keep: Vec<Keep>,
    /// Of exs_poll: what is waited for.
    pub(crate) events: i16,
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

/// Message buffers of a connection: receives first, then sends.
#[derive(Debug)]
struct Link {
    device: Arc<Device>,
    cq: Ptr<ffi::Cq>,
    qp: Ptr<ffi::Qp>,
    buffers: Box<[u8]>,
    size: usize,
    free: Vec<Slot>,
    sends: usize,
    backlog: VecDeque<(Message, Option<OpId>)>,
    _region: Region,
}

#[derive(Debug)]
struct Inner {
    state: State,
    id: Ptr<ffi::CmId>,
    settings: Settings,
    link: Option<Link>,
    flow: Option<Flow>,
    ops: BTreeMap<OpId, Op>,
    next_op: OpId,
    /// Pieces of moves and of writes that are under way.
    moves: HashMap<u64, usize>,
    writes: HashMap<OpId, usize>,
    connect: Option<OpId>,
    /// Of a socket that is being accepted: the accept, and the socket it was called on.
    accept: Option<(c_int, Op)>,
    accepts: VecDeque<OpId>,
    requests: VecDeque<(Ptr<ffi::CmId>, Hello)>,
    backlog: usize,
    polls: Vec<OpId>,
}

/// A socket of the library.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: c_int,
    pub(crate) stream: bool,
    inner: Mutex<Inner>,
    /// Threads poll the completion queue, so that it need not be armed.
    hot: AtomicBool,
    /// A thread has polled since the thread of the library last looked.
    touched: AtomicBool,
    /// The thread of the library looks at this socket.
    watched: AtomicBool,
}

const RECEIVED: u64 = 1 << 56;
const SENT: u64 = 2 << 56;
const READ: u64 = 3 << 56;
const WRITTEN: u64 = 4 << 56;
const KIND: u64 = 0xff << 56;

impl Socket {
    pub(crate) fn new(fd: c_int, stream: bool, id: *mut ffi::CmId, settings: Settings) -> Self {
        Self {
            fd,
            stream,
            inner: Mutex::new(Inner {
                state: State::New,
                id: Ptr(id),
                settings,
                link: None,
                flow: None,
                ops: BTreeMap::new(),
                next_op: 1,
                moves: HashMap::new(),
                writes: HashMap::new(),
                connect: None,
                accept: None,
                accepts: VecDeque::new(),
                requests: VecDeque::new(),
                backlog: 0,
                polls: Vec::new(),
            }),
            hot: AtomicBool::new(false),
            touched: AtomicBool::new(false),
            watched: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn settings(&self, change: impl FnOnce(&mut Settings)) -> Result<Settings, c_int> {
        let mut inner = self.lock();
        let before = inner.settings;
        change(&mut inner.settings);
        let changed = (before.credits, before.immediate)
            != (inner.settings.credits, inner.settings.immediate);
        if changed && !matches!(inner.state, State::New | State::Listening) {
            inner.settings = before;
            return Err(libc::EISCONN);
        }
        Ok(inner.settings)
    }

    /// Calls `with` with the address of this end, or of the other.
    pub(crate) fn address(&self, peer: bool) -> Result<libc::sockaddr_storage, c_int> {
        let inner = self.lock();
        if peer && inner.state != State::Connected {
            return Err(libc::ENOTCONN);
        }
        if inner.id.0.is_null() {
            return Err(libc::EBADF);
        }
        // SAFETY: the id lives until `close`, which takes it under the lock.
        Ok(unsafe {
            if peer {
                (*inner.id.0).dst_addr
            } else {
                (*inner.id.0).src_addr
            }
        })
    }

    pub(crate) fn bind(&self, addr: *const libc::sockaddr) -> Result<(), c_int> {
        let inner = self.lock();
        if inner.state != State::New {
            return Err(libc::EINVAL);
        }
        // SAFETY: the id is not closed, and the caller has checked the length of the address.
        check(unsafe { ffi::rdma_bind_addr(inner.id.0, addr.cast_mut()) })
    }

    pub(crate) fn listen(&self, backlog: c_int) -> Result<(), c_int> {
        let mut inner = self.lock();
        if inner.state == State::New {
            // SAFETY: the id is not closed.
            check(unsafe { ffi::rdma_listen(inner.id.0, backlog.clamp(1, 4096)) })?;
            inner.state = State::Listening;
        } else if inner.state != State::Listening {
            return Err(libc::EINVAL);
        }
        inner.backlog = usize::try_from(backlog.clamp(1, 4096)).unwrap_or(1);
        Ok(())
    }

    pub(crate) fn connect(&self, op: Op, addr: *const libc::sockaddr) -> Result<(), c_int> {
        let mut inner = self.lock();
        let refused = match inner.state {
            State::New => {
                // SAFETY: the id is not closed, and the caller has checked the length of the address.
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
        inner.connect = Some(inner.add(op));
        Ok(())
    }

    pub(crate) fn accept(&self, op: Op) -> Result<(), c_int> {
        let mut inner = self.lock();
        if inner.state != State::Listening {
            return Err(libc::EINVAL);
        }
        let id = inner.add(op);
        inner.accepts.push_back(id);
        self.pair(&mut inner);
        Ok(())
    }

    pub(crate) fn poll(&self, op: Op) -> Result<(), c_int> {
        let mut inner = self.lock();
        let id = inner.add(op);
        inner.polls.push(id);
        self.drain(&mut inner);
        self.answer_polls(&mut inner);
        Ok(())
    }

    /// The device of the connection, to register memory with, and the longest immediate data.
    pub(crate) fn device(&self) -> Result<(Arc<Device>, u64), c_int> {
        let inner = self.lock();
        match (&inner.state, &inner.link, &inner.flow) {
            (State::Connected, Some(link), Some(flow)) => {
                Ok((Arc::clone(&link.device), flow.immediate()))
            }
            (State::Ended(_), ..) => Err(libc::ECONNRESET),
            _ => Err(libc::ENOTCONN),
        }
    }

    /// Starts a transfer or a shutdown: `begin` gives it to the flow.
    pub(crate) fn start(
        &self,
        op: Op,
        begin: impl FnOnce(&mut Flow, OpId, &Op, &mut Vec<Action>) -> Result<(), c_int>,
    ) -> Result<(), c_int> {
        let mut inner = self.lock();
        let refused = match inner.state {
            State::Connected if inner.ops.len() >= MAX_OPS => Some(libc::EAGAIN),
            State::Connected => None,
            State::Ended(_) => Some(libc::ECONNRESET),
            _ => Some(libc::ENOTCONN),
        };
        if let Some(errno) = refused {
            return Err(errno);
        }
        let mut actions = Vec::new();
        let id = inner.next_op;
        let begun = match &mut inner.flow {
            Some(flow) => begin(flow, id, &op, &mut actions),
            None => Err(libc::ENOTCONN),
        };
        begun?;
        inner.add(op);
        self.perform(&mut inner, actions);
        Ok(())
    }

    pub(crate) fn send(op: &Op, id: OpId) -> Send {
        Send {
            id,
            segments: op.remote.clone(),
            persistent: op.flags & 1 != 0,
            notify: op.flags & 2 != 0,
            offset: (op.offset != 0).then_some(op.offset),
        }
    }

    pub(crate) fn recv(op: &Op, id: OpId, offset: Option<u64>) -> Recv {
        Recv {
            id,
            segments: op.remote.clone(),
            persistent: op.flags & 1 != 0,
            wait_all: op.flags & 4 != 0,
            offset,
        }
    }

    /// Asks for the end of all operations, or of those with a handle.
    pub(crate) fn cancel(&self, ahandle: Option<isize>) -> usize {
        let mut inner = self.lock();
        let chosen: Vec<OpId> = inner
            .ops
            .iter()
            .filter(|(_, op)| ahandle.is_none_or(|a| a == op.ahandle))
            .map(|(id, _)| *id)
            .collect();
        for id in &chosen {
            inner.cancel(self, *id);
        }
        chosen.len()
    }

    /// Ends the connection; every operation gets its event.
    pub(crate) fn close(&self) {
        let until = Instant::now() + CLOSE_WAIT;
        let mut inner = self.lock();
        while inner.state == State::Connected
            && inner.link.as_ref().is_some_and(|l| l.free.len() < l.sends)
            && Instant::now() < until
        {
            if self.drain(&mut inner) == 0 {
                // The thread of the library needs the lock, and moves all other sockets too.
                drop(inner);
                std::thread::sleep(CLOSE_PAUSE);
                inner = self.lock();
            }
        }
        self.end(&mut inner, libc::ECANCELED);
        let id = std::mem::replace(&mut inner.id, Ptr(std::ptr::null_mut()));
        inner.link = None;
        let requests = std::mem::take(&mut inner.requests);
        drop(inner);
        // SAFETY: these ids are nowhere else now; the thread of the library acknowledges their events without a lock.
        unsafe {
            for (request, _) in requests {
                ffi::rdma_reject(request.0, std::ptr::null(), 0);
                ffi::rdma_destroy_id(request.0);
            }
            if !id.0.is_null() {
                ffi::rdma_destroy_id(id.0);
            }
        }
    }

    /// Moves the socket forward from a thread that polls for its events.
    pub(crate) fn spin(self: &Arc<Self>) {
        self.touched.store(true, Relaxed);
        self.hot.store(true, SeqCst);
        if !self.watched.swap(true, SeqCst) {
            library::heat(Arc::clone(self));
        }
        if let Ok(mut inner) = self.inner.try_lock() {
            self.drain(&mut inner);
        }
    }

    /// Whether threads still poll; if not, completions wake the thread of the library again.
    pub(crate) fn cool(&self) -> bool {
        if self.touched.swap(false, Relaxed) {
            return true;
        }
        self.watched.store(false, SeqCst);
        self.rest();
        false
    }

    /// A thread that has polled sleeps now: completions wake the thread of the library again.
    pub(crate) fn rest(&self) {
        if self.hot.swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Completions have arrived.
    pub(crate) fn wake(&self) {
        let mut inner = self.lock();
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

    /// Handles all completions; how many.
    fn drain(&self, inner: &mut Inner) -> usize {
        let mut count = 0;
        while inner.state == State::Connected {
            let mut done = [ffi::Wc::default(); 16];
            let Some(link) = &inner.link else {
                return count;
            };
            // SAFETY: the queue lives as long as the link, and there is room for 16 completions.
            let n = unsafe {
                let cq = link.cq.0;
                (*(*cq).context)
                    .poll_cq
                    .map_or(0, |poll| poll(cq, 16, done.as_mut_ptr()))
            };
            let Some(done) = usize::try_from(n).ok().and_then(|n| done.get(..n)) else {
                self.end(inner, libc::EIO);
                return count;
            };
            if done.is_empty() {
                break;
            }
            count += done.len();
            let mut actions = Vec::new();
            for completion in done {
                if completion.status != 0 {
                    self.perform(inner, actions);
                    self.end(inner, libc::ECONNRESET);
                    return count;
                }
                if !inner.completed(completion, &mut actions) {
                    self.perform(inner, actions);
                    self.end(inner, libc::EPROTO);
                    return count;
                }
            }
            self.perform(inner, actions);
        }
        if count > 0 && !inner.polls.is_empty() {
            self.answer_polls(inner);
        }
        count
    }

    fn perform(&self, inner: &mut Inner, actions: Vec<Action>) {
        for action in actions {
            if let Action::Complete { op, outcome, len } = action {
                self.complete(inner, op, outcome, len);
            } else if inner.state == State::Connected
                && let Err(errno) = inner.act(action)
            {
                self.end(inner, errno);
            }
        }
    }

    fn complete(&self, inner: &mut Inner, id: OpId, outcome: Outcome, len: u64) {
        if outcome == Outcome::WasRead {
            if let Some(op) = inner.ops.get(&id) {
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
        let Some(mut op) = inner.ops.remove(&id) else {
            return;
        };
        op.keep.clear();
        let event = self.event(id, &op, errno, len, flags);
        op.queue.release(op.places.saturating_sub(1));
        op.queue.push(event);
    }

    fn event(&self, id: OpId, op: &Op, errno: c_int, len: u64, flags: u64) -> Event {
        Event {
            kind: op.kind,
            errno,
            fd: self.fd,
            ahandle: op.ahandle,
            body: [op.user, len, flags, op.offset, 0, id],
        }
    }

    /// The connection is over: no device touches memory any more, and all operations are reported.
    fn end(&self, inner: &mut Inner, errno: c_int) {
        if matches!(inner.state, State::Ended(_)) {
            return;
        }
        inner.state = State::Ended(errno);
        if let Some(link) = &mut inner.link
            && !link.qp.0.is_null()
        {
            // SAFETY: the id lives until `close` has ended the connection, and its queue pair ends here, once.
            unsafe {
                ffi::rdma_disconnect(inner.id.0);
                ffi::rdma_destroy_qp(inner.id.0);
            }
            link.qp = Ptr(std::ptr::null_mut());
        }
        inner.connect = None;
        inner.accepts.clear();
        inner.polls.clear();
        let all: Vec<OpId> = inner.ops.keys().copied().collect();
        for id in all {
            self.report(inner, id, errno, 0, 0);
        }
        if let Some((listener, op)) = inner.accept.take() {
            accept_event(&op, listener, -1, libc::ECONNABORTED, 0);
            library::discard(self.fd);
        }
    }

    fn answer_polls(&self, inner: &mut Inner) {
        let (input, output) = match inner.state {
            State::Connected => inner.flow.as_ref().map_or((false, false), Flow::ready),
            State::Listening => (!inner.requests.is_empty(), false),
            State::Ended(_) => (true, true),
            _ => (false, false),
        };
        let now = i16::from(input) | (i16::from(output) * 4);
        let polls = std::mem::take(&mut inner.polls);
        for id in polls {
            let ready = inner.ops.get(&id).map_or(0, |op| op.events & now);
            if ready == 0 {
                inner.polls.push(id);
            } else {
                self.report(inner, id, 0, u64::from(ready.cast_unsigned()), 0);
            }
        }
        inner.polls.retain(|id| inner.ops.contains_key(id));
    }

    /// Joins accepts and requests.
    fn pair(&self, inner: &mut Inner) {
        while let (Some(op), Some(_)) = (inner.accepts.front().copied(), inner.requests.front()) {
            let Some((id, hello)) = inner.requests.pop_front() else {
                return;
            };
            inner.accepts.pop_front();
            let Some(op) = inner.ops.remove(&op) else {
                continue;
            };
            library::accept(id, hello, self.stream, inner.settings, self.fd, op);
        }
    }

    /// Makes the socket of a connection request, and accepts.
    pub(crate) fn admit(&self, theirs: Hello, listener: c_int, op: Op) {
        let mut inner = self.lock();
        inner.accept = Some((listener, op));
        inner.state = State::Accepting;
        if let Err(errno) = inner.accept(self.fd, self.stream, theirs) {
            self.end(&mut inner, errno);
        }
    }

    /// An event of the connection manager.
    pub(crate) fn event_of_cm(&self, event: &CmEvent) {
        let mut inner = self.lock();
        if event.kind != ffi::EVENT_CONNECT_REQUEST && event.id != inner.id.0 {
            // A request that was not accepted yet.
            if let Some(at) = inner.requests.iter().position(|(id, _)| id.0 == event.id) {
                inner.requests.remove(at);
                drop(inner);
                // SAFETY: nothing else has this id.
                unsafe { ffi::rdma_destroy_id(event.id) };
            }
            return;
        }
        let failed = match event.kind {
            ffi::EVENT_ADDR_RESOLVED => {
                // SAFETY: the id lives until `close`.
                check(unsafe { ffi::rdma_resolve_route(inner.id.0, CONNECT_MS) }).err()
            }
            ffi::EVENT_ROUTE_RESOLVED => inner.dial(self.fd, self.stream).err(),
            ffi::EVENT_CONNECT_REQUEST => {
                self.request(&mut inner, event);
                None
            }
            ffi::EVENT_ESTABLISHED => self.established(&mut inner, event).err(),
            ffi::EVENT_ADDR_ERROR | ffi::EVENT_ROUTE_ERROR => Some(libc::EHOSTUNREACH),
            ffi::EVENT_REJECTED => Some(match Hello::read(&event.data) {
                Ok(hello) if hello.stream != self.stream => libc::EPROTOTYPE,
                Err(crate::wire::Bad::Version) => libc::EPROTONOSUPPORT,
                _ => libc::ECONNREFUSED,
            }),
            ffi::EVENT_UNREACHABLE | ffi::EVENT_CONNECT_ERROR => Some(match event.status {
                e if e == -libc::ECONNREFUSED || e == -libc::ECONNRESET => libc::ECONNREFUSED,
                e if e == -libc::EHOSTUNREACH || e == -libc::ENETUNREACH => libc::EHOSTUNREACH,
                _ => libc::ETIMEDOUT,
            }),
            ffi::EVENT_DISCONNECTED => {
                self.drain(&mut inner);
                Some(libc::ECONNRESET)
            }
            ffi::EVENT_DEVICE_REMOVAL => Some(libc::ENODEV),
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
        if let Some(hello) = good.filter(|_| inner.requests.len() < inner.backlog) {
            inner.requests.push_back((Ptr(event.id), hello));
            self.pair(inner);
            self.answer_polls(inner);
            return;
        }
        let ours = inner.hello(self.stream).write();
        // SAFETY: the request is nobody's yet; the private data lives until the call returns.
        unsafe {
            ffi::rdma_reject(event.id, ours.as_ptr().cast(), 16);
            ffi::rdma_destroy_id(event.id);
        }
    }

    fn established(&self, inner: &mut Inner, event: &CmEvent) -> Result<(), c_int> {
        if inner.state == State::Connecting {
            let theirs = Hello::read(&event.data).map_err(|_| libc::EPROTO)?;
            if theirs.stream != self.stream {
                return Err(libc::EPROTOTYPE);
            }
            // This end has buffers for the answers to as many as it takes itself.
            let theirs = Hello {
                credits: theirs.credits.min(inner.settings.credits),
                ..theirs
            };
            inner.flow = Some(Flow::new(inner.hello(self.stream), theirs));
        }
        inner.state = State::Connected;
        inner.arm();
        if let Some(id) = inner.connect.take() {
            self.report(inner, id, 0, 0, 0);
        }
        if let Some((listener, op)) = inner.accept.take() {
            // SAFETY: the id lives until `close`; the memory for the address is the program's until the event.
            let length =
                unsafe { crate::api::give_address(op.user, &raw const (*inner.id.0).dst_addr) };
            accept_event(&op, listener, self.fd, 0, length);
        }
        self.drain(inner);
        Ok(())
    }
}

fn accept_event(op: &Op, listener: c_int, new: c_int, errno: c_int, length: u32) {
    let new = u64::from(new.cast_unsigned());
    let body = [new, op.offset, u64::from(length), 0, 0, 0];
    op.queue.push(Event {
        kind: EVT_ACCEPT,
        errno,
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

    fn post_recv(&mut self, slot: Slot) -> Result<(), c_int> {
        let length = u32::try_from(self.size).unwrap_or(0);
        let lkey = self._region.lkey;
        let Some(buffer) = self.buffer(slot) else {
            return Err(libc::EIO);
        };
        let mut sge = ffi::Sge {
            addr: buffer.as_mut_ptr().expose_provenance() as u64,
            length,
            lkey,
        };
        let mut wr = ffi::RecvWr {
            wr_id: RECEIVED | slot as u64,
            next: std::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives until the link says null, and the request until the call returns.
        let result = unsafe {
            let qp = self.qp.0;
            if qp.is_null() {
                return Err(libc::ECONNRESET);
            }
            (*(*qp).context)
                .post_recv
                .map_or(libc::ENOSYS, |post| post(qp, &raw mut wr, &raw mut bad))
        };
        if result == 0 {
            Ok(())
        } else {
            Err(libc::ECONNRESET)
        }
    }

    fn post_send(
        &self,
        wr_id: u64,
        opcode: u32,
        sges: &mut [ffi::Sge],
        to: (u64, u32),
    ) -> Result<(), c_int> {
        let mut wr = ffi::SendWr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: c_int::try_from(sges.len()).unwrap_or(0),
            opcode,
            send_flags: ffi::SEND_SIGNALED,
            imm_data: 0,
            remote_addr: to.0,
            rkey: to.1,
            _rest_of_wr: [0; 5],
            _more: [0; 7],
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_recv`.
        let result = unsafe {
            let qp = self.qp.0;
            if qp.is_null() {
                return Err(libc::ECONNRESET);
            }
            (*(*qp).context)
                .post_send
                .map_or(libc::ENOSYS, |post| post(qp, &raw mut wr, &raw mut bad))
        };
        if result == 0 {
            Ok(())
        } else {
            Err(libc::ECONNRESET)
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: the queue pair that used the queue has ended before: `Socket::end`, or it was never made.
        unsafe { ffi::ibv_destroy_cq(self.cq.0) };
    }
}

impl Inner {
    fn hello(&self, stream: bool) -> Hello {
        Hello {
            stream,
            credits: self.settings.credits,
            immediate: self.settings.immediate,
        }
    }

    fn add(&mut self, op: Op) -> OpId {
        let id = self.next_op;
        self.next_op += 1;
        self.ops.insert(id, op);
        id
    }

    fn cancel(&mut self, socket: &Socket, id: OpId) {
        let listed = self
            .accepts
            .iter()
            .position(|a| *a == id)
            .and_then(|at| self.accepts.remove(at))
            .is_some();
        let polls = self.polls.len();
        self.polls.retain(|p| *p != id);
        if listed || polls != self.polls.len() {
            socket.report(self, id, libc::ECANCELED, 0, 0);
        } else if self.connect == Some(id) {
            socket.end(self, libc::ECANCELED);
        } else if let Some(flow) = &mut self.flow {
            let mut actions = Vec::new();
            flow.cancel(id, &mut actions);
            socket.perform(self, actions);
        }
    }

    fn arm(&self) {
        if let Some(link) = &self.link {
            // SAFETY: the queue lives as long as the link.
            unsafe {
                (*(*link.cq.0).context)
                    .req_notify_cq
                    .map(|arm| arm(link.cq.0, 0))
            };
        }
    }

    /// Makes the queue pair and its buffers, with receives posted.
    fn equip(&mut self, fd: c_int, stream: bool, most_sends: u16) -> Result<(), c_int> {
        // SAFETY: the id lives until `close`.
        let device = library::device(unsafe { (*self.id.0).verbs })?;
        let ours = self.hello(stream);
        let controls = CONTROLS as usize;
        // The peer's messages and answers to ours; then ours, and answers to the peer's, some of which may be done
        // before their completions are seen.
        let receives = usize::from(ours.credits) + usize::from(most_sends) + 2 * controls;
        let sends = 2 * usize::from(most_sends) + usize::from(ours.credits) + 4 * controls;
        let size = (HEADER_LENGTH + (MAX_SEGMENTS * SEGMENT_LENGTH).max(ours.immediate as usize))
            .next_multiple_of(64);
        let mut buffers = vec![0u8; (receives + sends) * size].into_boxed_slice();
        let addr = buffers.as_mut_ptr().expose_provenance() as u64;
        let region = Region::new(&device, addr, buffers.len() as u64, Use::Local)?;
        let depth = u32::try_from(receives + sends).map_err(|_| libc::EINVAL)? + TRANSFERS;
        let context = std::ptr::without_provenance_mut::<c_void>(usize::try_from(fd).unwrap_or(0));
        let entries = c_int::try_from(depth).map_err(|_| libc::EINVAL)?;
        // SAFETY: the device and its channel live as long as the process.
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
            sends,
            backlog: VecDeque::new(),
            _region: region,
        };
        let mut init = ffi::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: std::ptr::null_mut(),
            max_send_wr: u32::try_from(sends).unwrap_or(0) + TRANSFERS,
            max_recv_wr: u32::try_from(receives).unwrap_or(0),
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: 0,
            qp_type: ffi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the id lives until `close`, and all that the queue pair is made of at least as long as the link.
        unsafe {
            check(ffi::rdma_create_qp(
                self.id.0,
                link.device.pd.0,
                &raw mut init,
            ))?;
            link.qp = Ptr((*self.id.0).qp);
        }
        let posted: Result<(), c_int> = (0..receives).try_for_each(|slot| link.post_recv(slot));
        self.link = Some(link);
        posted
    }

    fn dial(&mut self, fd: c_int, stream: bool) -> Result<(), c_int> {
        self.equip(fd, stream, self.settings.credits)?;
        let ours = self.hello(stream).write();
        let mut param = conn_param(&ours);
        // SAFETY: the id lives until `close`, the parameters until the call returns.
        check(unsafe { ffi::rdma_connect(self.id.0, &raw mut param) })
    }

    fn accept(&mut self, fd: c_int, stream: bool, theirs: Hello) -> Result<(), c_int> {
        let theirs = Hello {
            credits: theirs.credits.min(self.settings.credits),
            ..theirs
        };
        self.equip(fd, stream, theirs.credits)?;
        self.flow = Some(Flow::new(self.hello(stream), theirs));
        let ours = self.hello(stream).write();
        let mut param = conn_param(&ours);
        // SAFETY: as in `dial`.
        check(unsafe { ffi::rdma_accept(self.id.0, &raw mut param) })
    }

    /// Handles a completion; whether the peer kept to the protocol.
    fn completed(&mut self, done: &ffi::Wc, out: &mut Vec<Action>) -> bool {
        let (Some(link), Some(flow)) = (&mut self.link, &mut self.flow) else {
            return false;
        };
        let value = done.wr_id & !KIND;
        match done.wr_id & KIND {
            RECEIVED => {
                let slot = usize::try_from(value).unwrap_or(usize::MAX);
                let length = done.byte_len as usize;
                let bytes = link.buffer(slot).and_then(|b| b.get(..length));
                let read = bytes.map(Message::read);
                match read {
                    Some(Ok(message)) => flow.arrived(message, slot, out).is_ok(),
                    _ => false,
                }
            }
            SENT => {
                link.free.push(usize::try_from(value).unwrap_or(usize::MAX));
                let waiting = link.backlog.pop_front();
                waiting.is_none_or(|(message, op)| self.post_message(&message, op).is_ok())
            }
            READ => {
                if let Some(left) = self.moves.get_mut(&value) {
                    *left -= 1;
                    if *left == 0 {
                        self.moves.remove(&value);
                        flow.moved(value, out);
                    }
                }
                true
            }
            _ => {
                if let Some(left) = self.writes.get_mut(&value) {
                    *left -= 1;
                    if *left == 0 {
                        self.writes.remove(&value);
                        flow.written(value, out);
                    }
                }
                true
            }
        }
    }

    fn message(&mut self, message: &Message, data: Option<OpId>) -> Result<(), c_int> {
        let Some(link) = &mut self.link else {
            return Err(libc::ECONNRESET);
        };
        if link.free.is_empty() || !link.backlog.is_empty() {
            link.backlog.push_back((message.clone(), data));
            return Ok(());
        }
        self.post_message(message, data)
    }

    fn post_message(&mut self, message: &Message, data: Option<OpId>) -> Result<(), c_int> {
        let Some(link) = &mut self.link else {
            return Err(libc::ECONNRESET);
        };
        let Some(slot) = link.free.pop() else {
            return Err(libc::EIO);
        };
        let bytes = message.write();
        let lkey = link._region.lkey;
        let Some(buffer) = link.buffer(slot) else {
            return Err(libc::EIO);
        };
        let mut length = bytes.len();
        for (to, from) in buffer.iter_mut().zip(&bytes) {
            *to = *from;
        }
        let addr = buffer.as_ptr().addr() as u64;
        let mut sges = Vec::with_capacity(2);
        let segment = data
            .and_then(|id| self.ops.get(&id))
            .and_then(|op| op.segments.first().map(|s| (op, s)));
        if let Some((op, segment)) = segment.filter(|(_, s)| s.len > 0) {
            if op.keep.is_empty() {
                let count = segment.len as usize;
                let Some(room) = buffer.get_mut(length..length + count) else {
                    return Err(libc::EMSGSIZE);
                };
                // SAFETY: the program gave this memory to the library until the event; the room is the buffer's own.
                unsafe {
                    std::ptr::copy_nonoverlapping(program(segment.addr), room.as_mut_ptr(), count);
                };
                COPIED.fetch_add(u64::from(segment.len), Relaxed);
                length += count;
            } else {
                sges.push(ffi::Sge {
                    addr: segment.addr,
                    length: segment.len,
                    lkey: segment.stag,
                });
            }
        }
        sges.insert(
            0,
            ffi::Sge {
                addr,
                length: u32::try_from(length).unwrap_or(0),
                lkey,
            },
        );
        link.post_send(SENT | slot as u64, ffi::WR_SEND, &mut sges, (0, 0))
    }

    fn act(&mut self, action: Action) -> Result<(), c_int> {
        match action {
            Action::Message(message, data) => self.message(&message, data),
            Action::Release(slot) => self
                .link
                .as_mut()
                .map_or(Ok(()), |link| link.post_recv(slot)),
            Action::Read {
                number,
                to,
                at,
                from,
            } => {
                let (Some(link), Some(op)) = (&self.link, self.ops.get(&to)) else {
                    return Err(libc::EIO);
                };
                let mut at = at;
                let mut pieces = 0;
                for remote in from {
                    let mut skip = 0;
                    for local in flow::cut(&op.segments, at, u64::from(remote.len)) {
                        let mut sge = [ffi::Sge {
                            addr: local.addr,
                            length: local.len,
                            lkey: local.stag,
                        }];
                        let source = (remote.addr.wrapping_add(skip), remote.stag);
                        link.post_send(READ | number, ffi::WR_RDMA_READ, &mut sge, source)?;
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
                let (Some(link), Some(op)) = (&self.link, self.ops.get_mut(&send)) else {
                    return Err(libc::EIO);
                };
                if op.keep.is_empty() && to.len > 0 {
                    for segment in &mut op.segments {
                        let region = Region::new(
                            &link.device,
                            segment.addr,
                            u64::from(segment.len),
                            Use::Source,
                        )?;
                        segment.stag = region.lkey;
                        op.keep.push(Keep::Own(region));
                    }
                }
                let mut target = to.addr;
                let mut pieces = 0;
                for local in &op.segments {
                    if local.len == 0 && to.len > 0 {
                        continue;
                    }
                    let mut sge = [ffi::Sge {
                        addr: local.addr,
                        length: local.len,
                        lkey: local.stag,
                    }];
                    let sges = if local.len == 0 {
                        &mut sge[..0]
                    } else {
                        &mut sge[..]
                    };
                    link.post_send(WRITTEN | send, ffi::WR_RDMA_WRITE, sges, (target, to.stag))?;
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
                let (Some(link), Some(op)) = (&mut self.link, self.ops.get(&to)) else {
                    return Err(libc::EIO);
                };
                let Ok(skip) = usize::try_from(skip) else {
                    return Err(libc::EIO);
                };
                let mut from = link
                    .buffer(slot)
                    .and_then(|b| b.get(HEADER_LENGTH + skip..))
                    .ok_or(libc::EIO)?;
                for local in flow::cut(&op.segments, at, len) {
                    let (part, rest) =
                        from.split_at_checked(local.len as usize).ok_or(libc::EIO)?;
                    // SAFETY: the program gave this memory to the library until the event.
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
            Action::Complete { .. } => Ok(()),
        }
    }
}

/// A pointer to memory of the program.
fn program(addr: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(addr as usize)
}

fn conn_param(hello: &[u8; HELLO_LENGTH]) -> ffi::ConnParam {
    ffi::ConnParam {
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
