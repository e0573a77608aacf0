//! Sockets over RDMA (`rsocket(7)`): stream and datagram sockets that transfer their bytes through queue pairs.
//!
//! - `entry`: the C functions; `address` and `buffer`: conversion of addresses, and memory.
//! - `stream`: stream sockets, over `flow` (flow control) and `wire` (formats); `iomap`: writes to mapped memory.
//! - `dgram`: datagrams over UD.
//! - `poll`, `repoll` and `wait`: waiting for one socket or many. `options`: socket options.
//!
//! The number of a socket is the descriptor of its event channel, so no other file of the process has the same number.
//!
//! Locking: one mutex protects the state of a socket, another one its options. A thread that holds the lock of the options must not
//! acquire that of the state, because a thread that accepts or connects holds the state and reads the options. A thread that holds the
//! lock of the state must not process events of the engine, because this may call `Socket::ready` of the same socket. The engine's
//! `on_idle_poll` processes events for a thread whose poll has found nothing.

mod address;
mod again;
mod buffer;
mod dgram;
pub mod entry;
mod flow;
mod iomap;
mod options;
mod poll;
pub mod repoll;
mod stream;
mod wait;
mod wire;

use std::collections::HashMap;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::lock::{Mutex, RwLock};
use anywarp_core::verbs::cq::Notify;
use anywarp_core::verbs::pd::Pd;
use anywarp_engine::channel::Channel;
use anywarp_engine::cm::{Event, EventChannel};
use anywarp_engine::context::Context;
use anywarp_engine::engine::Engine;
use anywarp_engine::process::PerProcess;
use anywarp_engine::reactor::{Source, Token};
use anywarp_engine::sys::thread;

use dgram::Datagrams;
use options::Options;
use stream::Stream;
use wait::{Waker, Wakers};

use crate::ffi::os_errno;

/// The device of all sockets of a process, and their protection domain.
struct Device {
    context: Arc<Context>,
    pd: Arc<Pd>,
}

fn device() -> Result<&'static Device, c_int> {
    static DEVICE: PerProcess<OnceLock<Device>> = PerProcess::new(OnceLock::new);
    let device = DEVICE.get();
    if let Some(device) = device.get() {
        if device.context.engine.is_broken() {
            return Err(libc::EIO);
        }
        return Ok(device);
    }
    let context = Context::open().map_err(|e| os_errno(&e))?;
    Ok(device.get_or_init(|| Device {
        context,
        pd: Arc::new(Pd::new()),
    }))
}

/// Returns the table of the process's sockets by number.
fn table() -> &'static RwLock<HashMap<c_int, Arc<Socket>>> {
    static TABLE: PerProcess<RwLock<HashMap<c_int, Arc<Socket>>>> =
        PerProcess::new(|| RwLock::new(HashMap::new()));
    TABLE.get()
}

/// Returns the socket with a number. `EBADF` if there is none.
fn find(number: c_int) -> Result<Arc<Socket>, c_int> {
    let table = table().read();
    table.get(&number).map(Arc::clone).ok_or(libc::EBADF)
}

fn insert(socket: Arc<Socket>) -> c_int {
    let number = socket.number;
    let mut table = table().write();
    table.insert(number, socket);
    number
}

fn remove(number: c_int) -> Result<Arc<Socket>, c_int> {
    let mut table = table().write();
    table.remove(&number).ok_or(libc::EBADF)
}

enum Kind {
    Stream(Box<Mutex<Stream>>),
    Datagrams(Box<Mutex<Datagrams>>),
}

/// A socket.
struct Socket {
    number: c_int,
    /// `AF_INET` or `AF_INET6`.
    domain: c_int,
    device: &'static Device,
    channel: Arc<EventChannel>,
    wakers: Arc<Wakers>,
    nonblocking: AtomicBool,
    fd_flags: AtomicI32,
    /// This lock is acquired after that of the state.
    options: Mutex<Options>,
    kind: Kind,
    /// The token of the socket's channel in the engine.
    token: Mutex<Token>,
}

/// Notifies the waiting threads of a socket (see `wait`) when a completion arrives.
struct OnCompletion(Arc<Wakers>);

impl Notify for OnCompletion {
    fn completion(&self) {
        self.0.wake_all();
    }

    fn overflow(&self) {
        self.0.wake_all();
    }
}

/// Called by the engine when events of the connection manager are in the socket's channel.
struct Watch(Weak<Socket>);

impl Source for Watch {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(socket) = self.0.upgrade() {
            socket.ready();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(socket) = self.0.upgrade() {
            socket.ready();
        }
    }
}

/// A waker that is registered at a socket until this is dropped.
struct RegisteredWaker<'a>(&'a Wakers, &'a Arc<Waker>);

impl<'a> RegisteredWaker<'a> {
    fn at(wakers: &'a Wakers, waker: &'a Arc<Waker>) -> Self {
        wakers.register(waker);
        Self(wakers, waker)
    }
}

impl Drop for RegisteredWaker<'_> {
    fn drop(&mut self) {
        self.0.unregister(self.1);
    }
}

/// How long a call waits.
#[derive(Debug, Clone, Copy)]
enum Wait {
    /// The call does not wait: it returns `EAGAIN`.
    None,
    /// The call waits until this time, or without a limit.
    Until(Option<Instant>),
}

impl Socket {
    /// Creates a socket of `domain`. `kind` is called with its channel.
    fn make(
        domain: c_int,
        options: Options,
        kind: impl FnOnce(&Arc<EventChannel>) -> Result<Kind, c_int>,
    ) -> Result<Arc<Self>, c_int> {
        let device = device()?;
        let channel: Arc<EventChannel> = Arc::new(Channel::new().map_err(|e| os_errno(&e))?);
        let kind = kind(&channel)?;
        let socket = Arc::new(Self {
            number: channel.raw_fd(),
            domain,
            device,
            channel,
            wakers: Arc::new(Wakers::default()),
            nonblocking: AtomicBool::new(false),
            fd_flags: AtomicI32::new(0),
            options: Mutex::new(options),
            kind,
            token: Mutex::new(Token::NONE),
        });
        let watch = Arc::new(Watch(Arc::downgrade(&socket)));
        let token = socket
            .engine()
            .add(watch, socket.channel.fd(), false)
            .map_err(|e| os_errno(&e))?;
        *socket.token() = token;
        Ok(socket)
    }

    fn engine(&self) -> &'static Engine {
        self.device.context.engine
    }

    fn token(&self) -> MutexGuard<'_, Token> {
        self.token.lock()
    }

    fn options(&self) -> MutexGuard<'_, Options> {
        self.options.lock()
    }

    /// Returns the notification for a completion queue of this socket.
    fn notify(&self) -> Arc<dyn Notify> {
        Arc::new(OnCompletion(Arc::clone(&self.wakers)))
    }

    /// Returns the state of a stream socket. `EOPNOTSUPP` for another socket.
    fn stream(&self) -> Result<MutexGuard<'_, Stream>, c_int> {
        match &self.kind {
            Kind::Stream(stream) => Ok(stream.lock()),
            Kind::Datagrams(_) => Err(libc::EOPNOTSUPP),
        }
    }

    /// Takes the next event of the connection manager, for a caller that holds the lock of the state.
    ///
    /// This function wakes the threads that wait for the socket, because nothing else would: the device's thread does not find the event
    /// any more. Those threads look at the state when the caller has handled the event and released the lock.
    fn next_event(&self) -> Option<Event> {
        let event = self.channel.pop()?;
        self.wakers.wake_all();
        Some(event)
    }

    /// Handles new events and completions, and wakes the waiting threads.
    fn ready(&self) {
        match &self.kind {
            Kind::Stream(stream) => stream.lock().step(self),
            Kind::Datagrams(state) => state.lock().step(self),
        }
        self.wakers.wake_all();
    }

    /// Returns the local address, if the socket has one.
    fn local(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Stream(stream) => stream.lock().local(),
            Kind::Datagrams(state) => state.lock().local(),
        }
    }

    /// Returns the peer's address, if the socket is connected.
    fn remote(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Stream(stream) => stream.lock().remote(),
            Kind::Datagrams(state) => state.lock().remote(),
        }
    }

    /// Returns and clears the pending error.
    fn take_error(&self) -> c_int {
        match &self.kind {
            Kind::Stream(stream) => {
                let mut stream = stream.lock();
                stream.step(self);
                stream.take_error()
            }
            Kind::Datagrams(state) => {
                let mut state = state.lock();
                state.step(self);
                state.take_error()
            }
        }
    }

    /// Returns how long a call with these flags waits. `time` is the socket's time-out.
    fn wait_limit(&self, flags: c_int, time: Option<Duration>) -> Wait {
        if flags & libc::MSG_DONTWAIT != 0 || self.nonblocking.load(Ordering::Relaxed) {
            return Wait::None;
        }
        Wait::Until(time.and_then(|t| Instant::now().checked_add(t)))
    }

    /// Calls `attempt` until it returns a result, or until `limit`. The argument of `attempt` tells whether it has to request
    /// notifications of completions.
    fn block<T>(
        &self,
        limit: Wait,
        mut attempt: impl FnMut(bool) -> Option<Result<T, c_int>>,
    ) -> Result<T, c_int> {
        if let Some(done) = attempt(false) {
            return done;
        }
        self.engine().on_idle_poll();
        if let Some(done) = attempt(false) {
            return done;
        }
        let Wait::Until(until) = limit else {
            return Err(libc::EAGAIN);
        };
        let waker = wait::waker().map_err(|e| os_errno(&e))?;
        let _registered = RegisteredWaker::at(&self.wakers, &waker);
        loop {
            while waker.pop().is_some() {}
            if let Some(done) = attempt(true) {
                return done;
            }
            if until.is_some_and(|t| t <= Instant::now()) {
                return Err(libc::EAGAIN);
            }
            match wait::wait(self.engine(), &waker, &mut [], until) {
                Err(libc::EINTR) if !thread::handlers_interrupt() => {}
                waited => waited?,
            }
        }
    }

    /// Closes the socket, after its number has been removed from the table.
    fn close(&self) {
        if let Kind::Stream(_) = self.kind {
            stream::finish(self);
        }
        self.abandon();
        // Wakes the threads that wait for this socket, so that their calls return.
        self.wakers.wake_all();
    }

    /// Closes the socket without waiting for the peer.
    fn abandon(&self) {
        let token = std::mem::replace(&mut *self.token(), Token::NONE);
        self.engine().remove(token, Some(self.channel.fd()));
        match &self.kind {
            Kind::Stream(stream) => stream.lock().abandon(),
            Kind::Datagrams(state) => state.lock().abandon(),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.abandon();
    }
}
