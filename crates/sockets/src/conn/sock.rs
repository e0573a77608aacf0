//! A TCP connection of the program that is undecided or upgraded. Plain connections (TCP without RDMA) have no state here.
//!
//! The connecting end sends a *Request* to upgrade the connection, and the accepting end answers with a *Reply*. An end is *undecided*
//! until it has sent the Request or seen the first bytes. The *carrier* of an upgraded stream is the TCP connection that carries it.
//! *Credit* is the number of payload bytes that the peer still permits this end to send.

use crate::conn::set::{Set, for_carrier};
use crate::conn::show;
use crate::conn::table::{self, Entry};
use crate::conn::worker;
use crate::limits;
use crate::log;
use crate::owner::Holders;
use crate::policy;
use crate::queue::Dest;
use crate::spin;
use crate::stream::{self, First, News, Pending, Room, Stream};
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use sockets_base::stat::Why;
use std::cell::RefCell;
use std::io::IoSlice;
use std::sync::MutexGuard;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::time::{Duration, Instant};

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Not in use, or plain.
    Plain = 0,
    /// Accepted. The first bytes from the peer decide whether the connection is upgraded.
    Accepted = 1,
    /// The Request is sent when TCP has connected.
    Connecting = 2,
    /// Upgraded.
    Up = 3,
}

/// The number of connections that are not plain. While it is 0, and no UDP socket has reliable datagrams, `poll`, `select` and their
/// variants go to the kernel unchanged.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The number of undecided connections.
pub static UNDECIDED: AtomicUsize = AtomicUsize::new(0);

/// A connection.
#[derive(Debug)]
pub struct Sock {
    mode: AtomicU8,
    /// A rule requires RDMA: the connection is shut down if it cannot be upgraded.
    strict: AtomicBool,
    /// The number of descriptors of the connection.
    numbers: AtomicI32,
    inner: Mutex<Option<Box<Stream>>>,
    /// The number of threads that sleep, or are about to sleep, until the carrier has bytes. [`Self::asleep`] counts them: [`Self::read`]
    /// calls it with `inner` locked after it has found too little to read, and other callers call it before they check the stream. While
    /// the number is greater than `watching`, no thread begins to receive from the carrier: it could take the bytes for which a counted
    /// thread is about to sleep, and that thread would not be woken.
    sleepers: AtomicI32,
    /// The number of threads that are counted in `sleepers` and have an eventfd in `watchers`. Another thread may receive from the carrier
    /// while they sleep, because it writes to these eventfds. The number is increased with `inner` locked, and decreased before `sleepers`.
    watching: AtomicI32,
    /// A thread receives from the carrier without holding `inner`, and no other thread may receive meanwhile. That thread is
    /// not counted in `sleepers`. It changes this field with `inner` locked, unless it was cancelled.
    direct: AtomicBool,
    /// The thread of `direct` (see [`this_thread`]).
    receiver: AtomicUsize,
    /// The number of writers that sleep.
    waiting_writers: AtomicU32,
    /// The eventfds of two kinds of threads. Followers (see `followers`) wait for a change of `turn`. Threads of the other kind poll the
    /// connection or sleep in a call that reads, and are not the only ones: another thread receives (see `direct`), or polls or reads as
    /// well. The kernel does not wake a thread for bytes that another thread has taken.
    watchers: Mutex<Vec<c_int>>,
    /// `watchers` may have elements. This field changes with `inner` locked.
    watched: AtomicBool,
    /// A writer without credit (the *leader*) sleeps until the carrier has bytes. It is not counted in `sleepers`: other threads may
    /// receive these bytes if they then wake the leader by `kick`.
    leads: AtomicBool,
    /// The eventfd that wakes the leader, or -1.
    kick: AtomicI32,
    /// The number of *followers*: writers other than the leader that wait for a change of `turn`, or are about to wait.
    followers: AtomicU32,
    /// Incremented by each event for which followers may wait, if there are followers.
    turn: AtomicU64,
    /// The epoll sets that contain the connection.
    sets: Mutex<Vec<&'static Set>>,
    in_sets: AtomicBool,
    /// The connection is, or was, in several sets.
    in_several: AtomicBool,
    /// The descriptor with which the connection was most recently added to a set.
    member: AtomicI32,
    /// The connection has, or had, several descriptors.
    copied: AtomicBool,
    /// The id of the process that uses the connection, or `NOBODY` after a fork: the first process that uses the connection sets it.
    owner: Mutex<Option<&'static AtomicU32>>,
    forked: AtomicBool,
    holders: Holders,
    /// The process has inherited the connection, or has forked while the mode was [`Mode::Accepted`], so another process may use it.
    may_be_shared: AtomicBool,
    /// This process was forked while a thread of the parent held a lock of the connection, so it cannot use the connection.
    lost: AtomicBool,
    /// The program has closed the last descriptor.
    closed: AtomicBool,
    /// The program has disconnected the socket.
    disconnected: AtomicBool,
    /// The connection has ended, and this object is used for another one as soon as no thread sleeps in a call on it.
    parked: AtomicBool,
}

/// Returned in place of an errno: the connection has become plain, so the caller passes the call to the kernel.
pub const GONE: c_int = -1;

/// What [`Sock::receive`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Got {
    /// `receive` was not called, or the stream is gone.
    Nothing,
    /// The stream has handled the result.
    Bytes,
    /// `receive` has read one whole message, and nothing else was in the carrier.
    Whole,
    /// The errno with which the call of the program fails if it has read nothing.
    Failed(c_int),
    /// The program has closed the connection, so the received bytes were discarded.
    Closed,
}

thread_local! {
    /// The connections of which this thread is counted as a sleeper, and whether it is counted in `watching` too.
    static SLEEPS: RefCell<Vec<(&'static Sock, bool)>> = const { RefCell::new(Vec::new()) };
}

/// Called at the start of a call that may sleep. If the thread still counts as a sleeper, a signal handler has left an earlier call by
/// siglongjmp, or the caller is a signal handler that has interrupted a wait. In both cases the thread does not sleep.
pub fn wake_this_thread() {
    let next = || SLEEPS.try_with(|all| all.try_borrow_mut().ok()?.pop());
    while let Ok(Some((sock, watches))) = next() {
        sock.uncount(watches);
    }
}

/// Returns a number that no other running thread has. Cheaper than the thread's id in the kernel.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    // `PLACE` has no destructor, so it can be accessed until the thread has ended.
    PLACE
        .try_with(|place| std::ptr::from_ref(place).addr())
        .unwrap_or(0)
}

/// A thread that receives from the carrier without the lock of the stream.
struct Receiver {
    sock: &'static Sock,
    is_over: bool,
    /// No other thread waits for this one.
    is_alone: bool,
}

impl Receiver {
    /// The stream must be locked.
    fn new(sock: &'static Sock) -> Self {
        sock.receiver.store(this_thread(), Ordering::Relaxed);
        sock.direct.store(true, Ordering::Release);
        Self {
            sock,
            is_over: false,
            is_alone: false,
        }
    }

    /// Called when the stream is locked again.
    fn end(&mut self) {
        self.is_over = true;
        self.sock.direct.store(false, Ordering::Release);
        // A thread that reads `direct` from now on may receive from the carrier itself.
        self.is_alone = self.sock.followers.load(Ordering::SeqCst) == 0
            && !self.sock.watched.load(Ordering::Acquire);
    }
}

/// The stream must not be locked. The thread may have been cancelled in the receive call, and then [`Receiver::end`] was not called.
impl Drop for Receiver {
    fn drop(&mut self) {
        if !self.is_over {
            self.end();
        }
        if !self.is_alone {
            self.sock.wake_followers();
            self.sock.ring_watchers();
        }
        self.sock.reuse();
    }
}

/// A writer that sleeps.
#[derive(Debug)]
pub struct WaitingWriter {
    sock: &'static Sock,
    /// `Some`: the writer is a follower, and the value is its eventfd, if it has one.
    follows: Option<Option<c_int>>,
}

impl Drop for WaitingWriter {
    fn drop(&mut self) {
        if let Some(kick) = self.follows {
            if let Some(kick) = kick {
                self.sock.unwatch(kick);
            }
            self.sock.followers.fetch_sub(1, Ordering::SeqCst);
        }
        self.sock.waiting_writers.fetch_sub(1, Ordering::SeqCst);
        self.sock.reuse();
    }
}

/// The other threads that read a stream, for a thread that is about to sleep until there is something to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// There is something to read.
    Left,
    /// There are none. No other thread receives from the carrier while this one sleeps.
    Absent,
    /// There are some. They write the eventfd. `None`: there is no eventfd.
    Present(Option<c_int>),
}

/// What a writer that can send nothing now has to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Another thread, which waits for the carrier. [`Sock::follow`] takes this value of `turn`.
    Other(u64),
    /// Room in the carrier's send buffer.
    Room,
    /// The peer's Reply. The stream has accepted the written bytes and sends them after the Reply, so the caller may wait for a moment,
    /// but need not.
    Reply,
    /// Credit. The caller waits for bytes from the carrier or for this eventfd (if any), then calls [`Sock::led`].
    Credit(Option<c_int>),
}

/// The events that a stream needs from its carrier.
#[derive(Debug, Clone, Copy)]
pub struct Carrier {
    /// The `poll` events of the carrier that can cause the events that the program waits for.
    pub events: i16,
    /// Bytes of FPDUs are queued until the carrier accepts them.
    pub has_rest: bool,
}

impl Carrier {
    fn of(stream: &Stream, wanted: u32) -> Self {
        Self {
            events: stream.carrier_events(for_carrier(wanted)),
            has_rest: stream.has_rest(),
        }
    }
}

static FREE: Mutex<Vec<&'static Sock>> = Mutex::new(Vec::new());

/// The lock of [`hold`].
pub type Held = MutexGuard<'static, Vec<&'static Sock>>;

/// Keeps other threads from creating or closing connections while the process forks, until the result is dropped.
pub fn hold() -> Held {
    lock(&FREE)
}

/// Consumes bytes that were peeked before. Returns whether they were still there.
fn take(fd: c_int, bytes: Option<&mut [u8]>) -> bool {
    bytes.is_some_and(|b| {
        let length = b.len();
        sys::recv(fd, &mut [std::io::IoSliceMut::new(b)]) == Ok(length)
    })
}

/// Refuses a Request that has arrived.
fn turn_back(fd: c_int) {
    let mut bytes = [0u8; limits::REQUEST];
    let n = sys::peek(fd, &mut bytes).unwrap_or(0);
    if let Some((length, reply)) = stream::refusal(bytes.get(..n).unwrap_or(&[]))
        && take(fd, bytes.get_mut(..length))
    {
        if n > length {
            // The peer has sent early messages (see `wire.rs`) behind the Request. Only a stream can read them, so the connection is reset.
            sys::disconnect(fd);
        }
        // If this fails the connection is broken, and the next call on it, if there is one, gets the error.
        let _ = sys::send(fd, &[IoSlice::new(&reply)], libc::MSG_NOSIGNAL);
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock()
}

impl Sock {
    fn fresh() -> Self {
        Self {
            mode: AtomicU8::new(0),
            strict: AtomicBool::new(false),
            numbers: AtomicI32::new(0),
            inner: Mutex::new(None),
            sleepers: AtomicI32::new(0),
            watching: AtomicI32::new(0),
            direct: AtomicBool::new(false),
            receiver: AtomicUsize::new(0),
            waiting_writers: AtomicU32::new(0),
            watchers: Mutex::new(Vec::new()),
            watched: AtomicBool::new(false),
            leads: AtomicBool::new(false),
            kick: AtomicI32::new(-1),
            followers: AtomicU32::new(0),
            turn: AtomicU64::new(0),
            sets: Mutex::new(Vec::new()),
            in_sets: AtomicBool::new(false),
            in_several: AtomicBool::new(false),
            member: AtomicI32::new(-1),
            copied: AtomicBool::new(false),
            owner: Mutex::new(None),
            forked: AtomicBool::new(false),
            holders: Holders::default(),
            may_be_shared: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            disconnected: AtomicBool::new(false),
            parked: AtomicBool::new(false),
        }
    }

    /// Returns a connection with one descriptor.
    pub fn new(mode: Mode, strict: bool) -> &'static Self {
        let sock = lock(&FREE).pop();
        let sock = sock.unwrap_or_else(|| Box::leak(Box::new(Self::fresh())));
        sock.strict.store(strict, Ordering::Relaxed);
        sock.numbers.store(1, Ordering::Relaxed);
        sock.copied.store(false, Ordering::Relaxed);
        sock.in_several.store(false, Ordering::Relaxed);
        sock.forked.store(false, Ordering::Relaxed);
        sock.may_be_shared.store(false, Ordering::Relaxed);
        sock.lost.store(false, Ordering::Relaxed);
        sock.closed.store(false, Ordering::Relaxed);
        sock.disconnected.store(false, Ordering::Relaxed);
        sock.mode.store(mode as u8, Ordering::Release);
        LIVE.fetch_add(1, Ordering::Relaxed);
        UNDECIDED.fetch_add(1, Ordering::Relaxed);
        sock
    }

    /// Changes the mode. Returns false if the connection was plain.
    fn becomes(&self, mode: Mode) -> bool {
        let old = self.mode.swap(mode as u8, Ordering::AcqRel);
        if old == Mode::Accepted as u8 || old == Mode::Connecting as u8 {
            UNDECIDED.fetch_sub(1, Ordering::Relaxed);
        }
        old != Mode::Plain as u8
    }

    /// Returns the state.
    #[inline]
    pub fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            1 => Mode::Accepted,
            2 => Mode::Connecting,
            3 => Mode::Up,
            _ => Mode::Plain,
        }
    }

    /// Returns whether a rule requires RDMA for the connection.
    pub fn is_strict(&self) -> bool {
        self.strict.load(Ordering::Relaxed)
    }

    /// Counts one more descriptor.
    pub fn add_number(&self) {
        self.copied.store(true, Ordering::Release);
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the connection has, or had, several descriptors.
    pub fn has_copies(&self) -> bool {
        self.copied.load(Ordering::Acquire)
    }

    /// Returns the stream if no other thread uses it at the moment.
    pub fn try_stream(&self) -> Option<MutexGuard<'_, Option<Box<Stream>>>> {
        self.inner.try_lock()
    }

    /// Locks and returns the stream; `None` inside if the connection is not upgraded.
    pub fn stream(&self) -> MutexGuard<'_, Option<Box<Stream>>> {
        lock(&self.inner)
    }

    // ------------------------------------------------------------------ decision

    /// Makes the connection plain, and removes `fd` from the table.
    fn go_plain(&'static self, fd: c_int, why: Why) {
        let is_new = self.becomes(Mode::Plain);
        self.leave(fd, why, is_new);
    }

    /// Makes a connection plain whose Request has not been sent. No other thread sends the Request meanwhile, because the caller passes
    /// the lock of the stream (`inner`).
    fn send_no_request(
        &'static self,
        inner: MutexGuard<'_, Option<Box<Stream>>>,
        fd: c_int,
        why: Why,
    ) {
        let is_new = self.becomes(Mode::Plain);
        drop(inner);
        self.leave(fd, why, is_new);
    }

    /// Removes `fd` from the table. `is_new`: the connection has just become plain.
    fn leave(&'static self, fd: c_int, why: Why, is_new: bool) {
        if is_new {
            LIVE.fetch_sub(1, Ordering::Relaxed);
            show::plain(fd, why);
            if why != Why::Disconnected {
                policy::stays_plain(fd, why);
            }
            for set in std::mem::take(&mut *lock(&self.sets)) {
                set.forget(fd);
            }
            self.in_sets.store(false, Ordering::Relaxed);
        }
        // Other descriptors of the connection see the new mode at their next use.
        if table::forget(fd, self) {
            self.drop_number();
        }
        // A socket that was disconnected has no connection that could be plain.
        if self.is_strict() && why != Why::Disconnected {
            log::line(&format!(
                "connection {fd} is plain, and a rule requires RDMA: it is shut down"
            ));
            // SAFETY: no pointer is passed.
            unsafe {
                crate::real::shutdown(fd, libc::SHUT_RDWR);
            }
        }
    }

    fn drop_number(&'static self) -> bool {
        let last = self.numbers.fetch_sub(1, Ordering::AcqRel) == 1;
        if last {
            if self.becomes(Mode::Plain) {
                LIVE.fetch_sub(1, Ordering::Relaxed);
            }
            *lock(&self.inner) = None;
            if let Some(word) = lock(&self.owner).take()
                && (!self.forked.load(Ordering::Acquire) || self.holders.is_one())
            {
                crate::owner::give_back(word);
                // No process has used the stream since the last fork.
                crate::owner::give_back_unowned(word);
            }
            self.holders.leave();
            self.in_sets.store(false, Ordering::Relaxed);
            lock(&self.sets).clear();
            // The threads are woken before `parked` is set: once it is set, the last of them makes this object available for another
            // connection and closes the leader's eventfd.
            self.wake(News {
                readable: true,
                writable: true,
            });
            self.parked.store(true, Ordering::SeqCst);
            self.reuse();
        }
        last
    }

    /// Makes this object available for another connection, if its own has ended and no thread sleeps in a call on it. Such a thread would
    /// take the new connection for the old one.
    fn reuse(&'static self) {
        let is_used = || {
            self.direct.load(Ordering::SeqCst)
                || self.sleepers.load(Ordering::SeqCst) > 0
                || self.waiting_writers.load(Ordering::SeqCst) > 0
        };
        if !self.parked.load(Ordering::SeqCst)
            || is_used()
            || !self.parked.swap(false, Ordering::SeqCst)
        {
            return;
        }
        self.leads.store(false, Ordering::SeqCst);
        let kick = self.kick.swap(-1, Ordering::AcqRel);
        if kick >= 0 {
            table::close_own(kick);
        }
        lock(&FREE).push(self);
    }

    /// Returns whether `fd` is not a descriptor of the connection any more: the program has closed it while this thread slept.
    pub fn is_closed(&'static self, fd: c_int) -> bool {
        let is_mine = || table::sock(fd).is_some_and(|sock| std::ptr::eq(sock, self));
        self.closed.load(Ordering::SeqCst) || self.mode() == Mode::Up && !is_mine()
    }

    /// Returns whether the program has disconnected the socket while this thread was in a call on it. The call fails, because the socket may
    /// have another connection now.
    pub fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::SeqCst)
    }

    /// Decides whether the connection is upgraded, if that is possible now. `writes`: the program writes before it reads, so the
    /// decision cannot wait for bytes from the peer.
    ///
    /// Returns the resulting mode.
    pub fn decide(&'static self, fd: c_int, writes: bool) -> Mode {
        if self.mode() == Mode::Up {
            return Mode::Up;
        }
        let errno = sys::errno();
        match self.mode() {
            Mode::Accepted => self.look(fd, writes),
            Mode::Connecting => {
                if sys::is_established(fd) {
                    self.start(fd);
                }
            }
            Mode::Plain => {
                self.go_plain(fd, Why::NotSeen);
            }
            Mode::Up => {}
        }
        sys::set_errno(errno);
        self.mode()
    }

    /// Peeks at the first bytes of an accepted connection, and decides.
    fn look(&'static self, fd: c_int, writes: bool) {
        if self.is_lost() {
            return;
        }
        let _stays = sys::NotCancelled::begin();
        let mut inner = lock(&self.inner);
        if self.mode() != Mode::Accepted {
            return;
        }
        let mut bytes = [0u8; limits::REQUEST];
        let n = match sys::peek(fd, &mut bytes) {
            Ok(n) => n,
            Err(libc::EAGAIN | libc::EINTR) if !writes => return,
            Err(libc::EAGAIN | libc::EINTR | libc::EBADF | libc::ENOTSOCK | libc::ENOTCONN) => 0,
            Err(error) => {
                self.failed(inner, error);
                return;
            }
        };
        let why = if n == 0 {
            Why::WroteFirst
        } else {
            Why::NoRequest
        };
        let first = stream::first(bytes.get(..n).unwrap_or(&[]), policy::settings().crc);
        let First::Request(length, reply, mut stream) = first else {
            drop(inner);
            self.go_plain(fd, why);
            return;
        };
        if !take(fd, bytes.get_mut(..length)) {
            // Another process that inherited the connection has consumed the Request.
            drop(inner);
            self.go_plain(fd, Why::Handed);
            return;
        }
        stream.undelay(fd);
        // A peer that has ended would answer the Reply with a reset.
        let is_due = !sys::has_peer_ended(fd);
        if is_due && sys::send(fd, &[IoSlice::new(&reply)], libc::MSG_NOSIGNAL) != Ok(reply.len()) {
            // The connection is broken. The next call of the program returns the error.
            log::line(&format!("stream {fd}: the Reply could not be sent"));
        }
        *inner = Some(stream);
        self.own();
        self.becomes(Mode::Up);
        show::upgraded(fd);
        log::line(&format!("stream {fd}: accepted"));
    }

    /// Called when an undecided connection has failed. The call that found this has consumed the kernel's error, so the connection becomes
    /// a broken stream, which returns the error to the program. `inner`: the lock of the stream.
    fn failed(&self, mut inner: MutexGuard<'_, Option<Box<Stream>>>, error: c_int) {
        *inner = Some(Stream::failed(error));
        self.own();
        self.becomes(Mode::Up);
    }

    /// Makes the connection plain at both ends, because it is passed to another program, which may not have the library. A pending
    /// Request is refused; for a stream, both ends exchange Plain messages. Returns whether the connection is plain.
    pub fn hand_over(&'static self, fd: c_int) -> bool {
        if self.is_lost() {
            return false;
        }
        let _stays = sys::NotCancelled::begin();
        let mut inner = lock(&self.inner);
        if self.mode() == Mode::Up {
            let until = Instant::now() + Duration::from_millis(limits::HAND_OVER);
            // The stream is not handed over while another thread receives from the carrier, because nothing makes that
            // thread return.
            let is_free = !self.is_received_elsewhere();
            let is_plain = is_free && inner.as_mut().is_some_and(|s| s.hand_over(fd, until));
            drop(inner);
            if is_plain {
                self.settle(fd, Why::Handed);
            }
            return is_plain;
        }
        match self.mode() {
            Mode::Accepted => self.turn_away(inner, fd, Why::Handed),
            Mode::Connecting => self.send_no_request(inner, fd, Why::Handed),
            Mode::Up | Mode::Plain => {}
        }
        true
    }

    /// Makes an accepted connection plain if its first bytes have arrived, and refuses a Request among them. Without bytes the
    /// connection stays undecided, because a later Request could not be refused any more.
    pub fn refuse(&'static self, fd: c_int, why: Why) {
        if self.is_lost() {
            return;
        }
        let _stays = sys::NotCancelled::begin();
        let inner = lock(&self.inner);
        if self.mode() == Mode::Accepted && sys::peek(fd, &mut [0]) != Err(libc::EAGAIN) {
            self.turn_away(inner, fd, why);
        }
    }

    /// Makes an accepted connection plain, and refuses a Request that has arrived. `inner`: the lock of the stream.
    fn turn_away(&'static self, inner: MutexGuard<'_, Option<Box<Stream>>>, fd: c_int, why: Why) {
        turn_back(fd);
        drop(inner);
        self.go_plain(fd, why);
    }

    /// Makes an undecided connection plain, because the program has set an option that streams do not have. Returns whether the
    /// connection is plain.
    pub fn stay_plain(&'static self, fd: c_int) -> bool {
        match self.mode() {
            Mode::Up => return false,
            Mode::Accepted if !self.is_lost() => {
                let _stays = sys::NotCancelled::begin();
                let inner = lock(&self.inner);
                if self.mode() == Mode::Accepted {
                    self.turn_away(inner, fd, Why::Option);
                }
            }
            Mode::Connecting if !self.is_lost() => {
                let _stays = sys::NotCancelled::begin();
                let inner = lock(&self.inner);
                if self.mode() == Mode::Connecting {
                    self.send_no_request(inner, fd, Why::Option);
                }
            }
            Mode::Accepted | Mode::Connecting | Mode::Plain => {}
        }
        self.mode() == Mode::Plain
    }

    /// Called when the program has disconnected the socket. Its next connection is plain. The stream is not closed, because that would end
    /// the next connection.
    pub fn disconnected(&'static self, fd: c_int) {
        let _stays = sys::NotCancelled::begin();
        let errno = sys::errno();
        if self.is_lost() {
            if table::forget(fd, self) {
                self.closing(fd, false);
            }
        } else {
            self.disconnected.store(true, Ordering::SeqCst);
            let stream = lock(&self.inner).take();
            if let Some(stream) = stream {
                stream.delay(fd);
            }
            self.go_plain(fd, Why::Disconnected);
            self.wake_followers();
        }
        sys::set_errno(errno);
    }

    /// Makes `fd` plain once the stream has become plain and has no more buffered bytes.
    fn settle(&'static self, fd: c_int, why: Why) {
        let mut inner = lock(&self.inner);
        if let Some(stream) = inner.as_ref().filter(|s| s.is_over()) {
            stream.delay(fd);
            *inner = None;
            drop(inner);
            self.go_plain(fd, why);
            self.wake_followers();
        }
    }

    /// Sends the Request. Called when TCP has connected.
    pub fn start(&'static self, fd: c_int) {
        if self.is_lost() {
            return;
        }
        let _stays = sys::NotCancelled::begin();
        let mut inner = lock(&self.inner);
        if self.mode() != Mode::Connecting {
            return;
        }
        match sys::peek(fd, &mut [0]) {
            Ok(_) => {
                // Either the accepting program has written before it saw a Request, so its end is plain, or it has closed the connection.
                drop(inner);
                self.go_plain(fd, Why::PeerWroteFirst);
                return;
            }
            Err(error @ (libc::ECONNRESET | libc::ETIMEDOUT)) => {
                self.failed(inner, error);
                return;
            }
            Err(_) => {}
        }
        let Some(initiator) = stream::initiator(policy::settings().crc) else {
            return;
        };
        let request = initiator.request();
        if sys::send(fd, &[IoSlice::new(&request)], libc::MSG_NOSIGNAL) != Ok(request.len()) {
            // The connection has failed already. The next call on it returns the error.
            drop(inner);
            self.go_plain(fd, Why::NotConnected);
            return;
        }
        let mut stream = Stream::connecting(initiator);
        stream.undelay(fd);
        *inner = Some(stream);
        self.own();
        self.becomes(Mode::Up);
        show::upgraded(fd);
        log::line(&format!("stream {fd}: Request sent"));
    }

    // ------------------------------------------------------------------ owner

    fn own(&self) {
        *lock(&self.owner) = crate::owner::word(crate::owner::me());
    }

    /// Called before a fork. The first of the two processes that uses the stream becomes its owner. Corked bytes are sent now, because
    /// afterwards each process has a copy of them, and they could be sent twice or never.
    pub fn before_fork(&'static self, fd: c_int) {
        if self.mode() == Mode::Accepted {
            self.may_be_shared.store(true, Ordering::Relaxed);
        }
        let is_first = || !self.has_copies() || table::find(Entry::Sock(self)) == Some(fd);
        if self.mode() == Mode::Up && !self.is_lost() && is_first() {
            self.holders.add();
        }
        self.uncork_now(fd);
        if let Some(owner) = self.owner.try_lock()
            && let Some(word) = *owner
            && word.load(Ordering::Relaxed) == crate::owner::me()
        {
            // While a thread of this process receives from the carrier, this process stays the owner.
            if !self.direct.load(Ordering::SeqCst) {
                word.store(crate::owner::NOBODY, Ordering::Release);
            }
            self.forked.store(true, Ordering::Release);
        }
    }

    /// Called in the child of a fork.
    pub fn after_fork(&self) {
        if self.inner.try_lock().is_none()
            || self.sets.try_lock().is_none()
            || self.owner.try_lock().is_none()
            || self.watchers.try_lock().is_none_or(|mut w| {
                w.clear();
                false
            })
        {
            self.lost.store(true, Ordering::Relaxed);
            self.forked.store(true, Ordering::Release);
        }
        self.sleepers.store(0, Ordering::Relaxed);
        self.watching.store(0, Ordering::Relaxed);
        self.direct.store(false, Ordering::Relaxed);
        self.watched.store(false, Ordering::Relaxed);
        self.leads.store(false, Ordering::Relaxed);
        self.followers.store(0, Ordering::Relaxed);
        self.waiting_writers.store(0, Ordering::Relaxed);
    }

    /// Returns whether this process may use the stream. If the stream has no owner, this process becomes the owner.
    #[inline]
    pub fn is_ours(&self, fd: c_int) -> bool {
        if !self.forked.load(Ordering::Acquire) {
            return true;
        }
        if self.is_lost() {
            return false;
        }
        let Some(word) = *lock(&self.owner) else {
            return false;
        };
        let owner = crate::owner::claim(word);
        let is_ours = owner == crate::owner::me();
        if !is_ours {
            log::always(&format!(
                "stream {fd} is used by another process ({owner}) since a fork; use it in one process, or add a rule with the mode tcp for it"
            ));
        }
        is_ours
    }

    /// Returns whether a lock of the connection stays locked in this process, because a thread of the parent held it at the fork.
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns whether this process has used the stream since the last fork, or created it.
    pub fn is_used_here(&self) -> bool {
        !self.forked.load(Ordering::Acquire)
            || !self.is_lost()
                && lock(&self.owner)
                    .is_some_and(|w| w.load(Ordering::Acquire) == crate::owner::me())
    }

    /// Returns whether another process has used the stream since the last fork.
    pub fn is_used_elsewhere(&self) -> bool {
        self.forked.load(Ordering::Acquire)
            && !self.is_lost()
            && lock(&self.owner)
                .and_then(crate::owner::owner_of)
                .is_some_and(|owner| owner != crate::owner::me())
    }

    /// Sends corked bytes if this process uses the stream.
    pub fn uncork_now(&self, fd: c_int) {
        self.with_free(None, |stream| {
            if stream.is_corked() {
                stream.uncork(fd);
            }
        });
    }

    /// Sends what this process has written, before it executes another program. Threads that use the stream are waited for until
    /// `patience`.
    pub fn before_exec(&self, fd: c_int, patience: Instant) {
        self.with_free(Some(patience), |stream| {
            if stream.is_corked() {
                stream.uncork(fd);
            }
            stream.send_early(fd);
        });
    }

    /// Sends the last bytes of the process, which may be in a signal handler. See [`Stream::end`]. The stream stays locked, because the
    /// other threads must not use it any more.
    pub fn end(&self, fd: c_int, until: Instant, patience: Instant) {
        let is_alone = !self.forked.load(Ordering::Acquire) || self.holders.is_one();
        let end = |stream: &mut Stream| stream.end(fd, until, is_alone);
        let inner = self.with_free(Some(patience), end);
        let _locked = std::mem::ManuallyDrop::new(inner);
        self.holders.leave();
    }

    /// Calls `f` with the stream if this process uses the stream and its lock is free, or becomes free before `patience`. Returns the
    /// lock.
    fn with_free(
        &self,
        patience: Option<Instant>,
        f: impl FnOnce(&mut Stream),
    ) -> Option<MutexGuard<'_, Option<Box<Stream>>>> {
        let is_here = |word: &AtomicU32| word.load(Ordering::Acquire) == crate::owner::me();
        let is_used_here = || match self.owner.try_lock() {
            Some(word) => word.is_some_and(is_here),
            None => false,
        };
        let _stays = sys::NotCancelled::begin();
        let may_use = self.mode() == Mode::Up
            && !self.is_lost()
            && (!self.forked.load(Ordering::Acquire) || is_used_here());
        if !may_use {
            return None;
        }
        let mut tries = 0..limits::LOCK_TRIES;
        let mut inner = loop {
            match self.inner.try_lock() {
                Some(inner) => break inner,
                None if patience.is_none_or(|until| Instant::now() >= until) => return None,
                // Another thread that uses the stream again and again leaves it free for short times only.
                None if tries.next().is_some() => std::hint::spin_loop(),
                None => std::thread::sleep(Duration::from_millis(limits::EXIT_TICK as u64)),
            }
        };
        f(inner.as_mut()?);
        Some(inner)
    }

    // ------------------------------------------------------------------ data

    /// Wakes the threads that wait for the stream in any way, also in epoll sets, after a call that changed the stream.
    fn notify_sets(&self, news: News) {
        if news == News::default() {
            return;
        }
        self.wake(news);
        if self.in_sets.load(Ordering::Acquire) {
            let sets: Vec<&'static Set> = lock(&self.sets).clone();
            for set in sets {
                set.mark(self, self.member.load(Ordering::Acquire));
            }
        }
    }

    /// Reads; see [`Stream::read`]. With `sleeps` the call may block, unless the descriptor is non-blocking. If, with `sleeps`, fewer bytes
    /// than the caller needs are available and this call may not wait for more (because it peeks, or because other threads receive or
    /// sleep), the caller is counted in `sleepers` and the second value is true.
    pub fn read(
        &'static self,
        fd: c_int,
        dest: &mut Dest<'_, '_>,
        peek: bool,
        all: bool,
        sleeps: bool,
    ) -> (Result<(), c_int>, bool) {
        sys::cancellation_point();
        let mut start = dest.done();
        // The kernel applies SO_RCVTIMEO to each receive call anew. `limit` ends this loop if messages without payload end such calls
        // again and again.
        let mut limit = sys::TimeLimit::default();
        loop {
            let mut stays = sys::NotCancelled::begin();
            let mut inner = lock(&self.inner);
            let mut received = None;
            let mut got = Got::Nothing;
            if sleeps
                && !peek
                && !dest.is_full()
                && self.may_pull()
                && inner.as_ref().is_some_and(|s| s.awaits_bytes())
            {
                let receiver = received.insert(Receiver::new(self));
                drop(stays);
                (inner, got, stays) = self.receive(inner, fd, dest);
                receiver.end();
            }
            let failed = match got {
                Got::Failed(errno) => errno,
                Got::Nothing | Got::Bytes | Got::Whole => 0,
                // `received` is dropped when this function returns, and must not be dropped while the stream is locked.
                Got::Closed => {
                    drop(inner);
                    return (Err(libc::EBADF), false);
                }
            };
            let Some(stream) = inner.as_mut() else {
                drop(inner);
                return (Err(GONE), false);
            };
            let may_pull = failed == 0 && self.may_pull();
            let mut result = if got == Got::Whole {
                Ok(())
            } else {
                stream.read(fd, dest, start, peek, all, may_pull)
            };
            let has_all = dest.is_full() || stream.is_readable() || stream.ends_read(dest);
            let more = result == Err(libc::EAGAIN) || (all && !has_all);
            let repeats = sleeps && more && failed == 0;
            let is_alone = repeats && !peek && self.may_pull() && stream.awaits_bytes();
            if failed != 0 && result == Err(libc::EAGAIN) {
                result = Err(failed);
            }
            let is_counted = repeats && !is_alone;
            if is_counted {
                self.asleep();
            }
            let mut news = stream.news();
            news.readable &= stream.is_readable() || stream.is_urgent();
            show::moved(fd, stream);
            let is_over = stream.is_over();
            let pending = stream.pending();
            drop(inner);
            drop(received);
            self.notify_sets(news);
            // The worker sends a Limit message (credit for the peer) that does not fit into the carrier's send buffer now.
            worker::watch(fd, self, pending);
            drop(stays);
            if is_alone && limit.left(fd, libc::SO_RCVTIMEO) != 0 {
                start = dest.done();
                continue;
            }
            if is_over && !is_counted {
                self.settle(fd, Why::Refused);
            }
            return (result, is_counted);
        }
    }

    /// Receives from the carrier by a call that blocks, while the stream is not locked. The thread may be cancelled only in that call.
    fn receive(
        &'static self,
        inner: MutexGuard<'static, Option<Box<Stream>>>,
        fd: c_int,
        dest: &mut Dest<'_, '_>,
    ) -> (
        MutexGuard<'static, Option<Box<Stream>>>,
        Got,
        sys::NotCancelled,
    ) {
        let Some(stream) = inner.as_ref() else {
            return (inner, Got::Nothing, sys::NotCancelled::begin());
        };
        let plan = stream.plan(Some(dest), limits::SCRATCH);
        drop(inner);
        let mut few = [0; limits::FEW];
        let mut room = Room::of(&plan, &mut few);
        let result = room.receive(&plan, Some(dest), |parts| {
            let mut is_first = true;
            spin::wait(|sleeps| {
                let flags = if sleeps { 0 } else { libc::MSG_DONTWAIT };
                match sys::recv_as(fd, parts, flags) {
                    Err(libc::EAGAIN) if !sleeps => {
                        let is_first = std::mem::take(&mut is_first);
                        (is_first && sys::is_nonblocking(fd)).then_some(Err(libc::EAGAIN))
                    }
                    result => Some(result),
                }
            })
        });
        let stays = sys::NotCancelled::begin();
        let mut inner = lock(&self.inner);
        // If the program has closed `fd` meanwhile, the bytes belong to another descriptor of the connection, if it has one.
        let fd = if self.is_closed(fd) {
            match table::find(Entry::Sock(self)) {
                Some(other) => other,
                None => return (inner, Got::Closed, stays),
            }
        } else {
            fd
        };
        if let Some(stream) = inner.as_mut() {
            if let Ok(n) = result
                && n < plan.asked()
                && let Some(bytes) = room.all(&plan, n)
                && stream.read_whole(fd, bytes, dest)
            {
                return (inner, Got::Whole, stays);
            }
            stream.arrived(fd, &plan, result, Some(dest), &mut room);
        }
        match result {
            Err(e @ (libc::EAGAIN | libc::EINTR)) => (inner, Got::Failed(e), stays),
            _ => (inner, Got::Bytes, stays),
        }
    }

    /// Called by a thread that is counted as a sleeper and is about to poll the carrier. If another thread receives from the carrier or
    /// sleeps too, or if this thread does not wait for bytes (`reads` is false), the eventfd that `kick` returns is written when the stream
    /// has changed, and the result is true.
    pub fn watch(&'static self, reads: bool, kick: impl FnOnce() -> Option<c_int>) -> bool {
        let _inner = lock(&self.inner);
        let is_alone = !self.is_received_elsewhere() && self.sleepers.load(Ordering::SeqCst) <= 1;
        // A thread that waits for room may sleep although the carrier has bytes, so other threads must be able to receive them.
        if is_alone && reads {
            return false;
        }
        let Some(kick) = kick() else { return false };
        self.add_watcher(kick);
        true
    }

    /// Adds the eventfd `kick` of this thread to `watchers`. The thread is counted in `sleepers` already, and is now counted in `watching` too.
    /// The caller holds the lock of the stream.
    fn add_watcher(&'static self, kick: c_int) {
        lock(&self.watchers).push(kick);
        self.watched.store(true, Ordering::Release);
        let found = SLEEPS.try_with(|all| {
            let mut all = all.try_borrow_mut().ok()?;
            let is_it = |entry: &&mut (&Self, bool)| std::ptr::eq(entry.0, self) && !entry.1;
            all.iter_mut().rev().find(is_it)?.1 = true;
            Some(())
        });
        if let Ok(Some(())) = found {
            self.watching.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Called by a thread that is counted as a sleeper and is about to sleep in a call that reads. If other threads receive or sleep too, the
    /// eventfd that `kick` returns is written when one of them has left something to read.
    pub fn watch_others(&'static self, kick: impl FnOnce() -> Option<c_int>) -> Others {
        let inner = lock(&self.inner);
        if inner.as_ref().is_none_or(|stream| stream.is_readable()) {
            return Others::Left;
        }
        if !self.is_received_elsewhere() && self.sleepers.load(Ordering::SeqCst) <= 1 {
            return Others::Absent;
        }
        let kick = kick();
        if let Some(kick) = kick {
            self.add_watcher(kick);
        }
        Others::Present(kick)
    }

    /// Writes the eventfds of the threads that watch.
    fn ring_watchers(&self) {
        if self.watched.load(Ordering::Acquire) {
            for kick in lock(&self.watchers).iter() {
                table::ring_own(*kick);
            }
        }
    }

    /// Ends [`Self::watch`] and [`Self::watch_others`].
    pub fn unwatch(&self, kick: c_int) {
        let _inner = lock(&self.inner);
        let mut watchers = lock(&self.watchers);
        watchers.retain(|k| *k != kick);
        self.watched.store(!watchers.is_empty(), Ordering::Release);
    }

    /// Called by a counted sleeper after it was woken.
    pub fn awake(&'static self) {
        let found = SLEEPS.try_with(|all| {
            let mut all = all.try_borrow_mut().ok()?;
            let at = all.iter().rposition(|(sock, _)| std::ptr::eq(*sock, self));
            Some(at.map(|at| all.swap_remove(at).1))
        });
        match found {
            // The list does not contain the connection: `wake_this_thread` has uncounted this thread already.
            Ok(Some(None)) => {}
            Ok(Some(Some(watches))) => self.uncount(watches),
            // The list cannot be used: it is borrowed, or was destroyed at the end of the thread.
            Ok(None) | Err(_) => self.uncount(false),
        }
    }

    fn uncount(&'static self, watches: bool) {
        if watches {
            self.watching.fetch_sub(1, Ordering::SeqCst);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.wake_followers();
        self.reuse();
    }

    /// Counts the caller, which is about to sleep until the carrier has events, as a sleeper. A caller that does not hold the lock of the
    /// stream has to check the stream after this call, before it sleeps.
    pub fn asleep(&'static self) {
        // A thread whose thread-local variables were destroyed has no list.
        let _ = SLEEPS.try_with(|all| all.try_borrow_mut().map(|mut all| all.push((self, false))));
        self.sleepers.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether the caller may receive from the carrier, because no thread receives from it without the lock or sleeps for its
    /// bytes without an eventfd. The stream must be locked.
    pub fn may_pull(&self) -> bool {
        let sleepers = self.sleepers.load(Ordering::SeqCst);
        sleepers <= self.watching.load(Ordering::SeqCst) && !self.is_received_elsewhere()
    }

    /// Returns whether another thread receives from the carrier without the lock. If `receiver` is this thread, a signal handler has left
    /// its receive call by siglongjmp, and `direct` is outdated.
    fn is_received_elsewhere(&self) -> bool {
        self.direct.load(Ordering::SeqCst) && self.receiver.load(Ordering::Relaxed) != this_thread()
    }

    /// Wakes the threads that wait for a change like `news`.
    fn wake(&self, news: News) {
        if (news.readable || news.writable) && !self.wake_followers() {
            self.ring_watchers();
        }
        if news.writable && self.leads.load(Ordering::SeqCst) {
            table::ring_own(self.kick.load(Ordering::Acquire));
        }
    }

    /// Wakes the threads that wait in [`Self::follow`], and all others that watch. Returns false if none waits there.
    fn wake_followers(&self) -> bool {
        let any = self.followers.load(Ordering::SeqCst) > 0;
        if any {
            self.turn.fetch_add(1, Ordering::SeqCst);
            // A follower that has read `turn` but is not in `watchers` yet holds this lock.
            drop(lock(&self.inner));
            self.ring_watchers();
        }
        any
    }

    /// Returns the eventfd for the leader, and creates it at the first call. The stream must be locked.
    fn kick(&self) -> Option<c_int> {
        let fd = self.kick.load(Ordering::Acquire);
        if fd >= 0 && table::is_own(fd) {
            return Some(fd);
        }
        let fd = sys::eventfd()?;
        table::own(fd);
        self.kick.store(fd, Ordering::Release);
        Some(fd)
    }

    /// Writes without blocking; see [`Stream::write`]. Also returns what the caller has to wait for, if nothing was written and the
    /// program waits (`waits`), or if bytes were written before the peer's Reply has arrived.
    pub fn write(
        &'static self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        flags: c_int,
        waits: bool,
    ) -> (Result<usize, c_int>, Option<Wait>) {
        sys::cancellation_point();
        let done = self.with(|stream| {
            let result = stream.write(fd, parts, flags, self.may_pull());
            show::moved(fd, stream);
            let wait = match result {
                Ok(_) => stream.is_starting().then_some(Wait::Reply),
                Err(libc::EAGAIN) if waits && stream.has_rest() => Some(Wait::Room),
                Err(libc::EAGAIN) if waits => {
                    // Counted before the conditions are checked, so that a thread that changes one of them later sees the follower.
                    self.followers.fetch_add(1, Ordering::SeqCst);
                    if !self.may_pull() || self.leads.load(Ordering::SeqCst) {
                        Some(Wait::Other(self.turn.load(Ordering::SeqCst)))
                    } else {
                        self.followers.fetch_sub(1, Ordering::SeqCst);
                        self.leads.store(true, Ordering::SeqCst);
                        Some(Wait::Credit(self.kick()))
                    }
                }
                Err(_) => None,
            };
            (result, wait, stream.has_rest(), stream.is_over())
        });
        let Some(((result, wait, has_rest, is_over), pending)) = done else {
            return (Err(GONE), None);
        };
        if result.is_ok() {
            spin::wrote();
        }
        worker::watch(fd, self, pending);
        if has_rest && self.in_sets.load(Ordering::Acquire) {
            let sets: Vec<&'static Set> = lock(&self.sets).clone();
            for set in sets {
                set.renew(self, self.member.load(Ordering::Acquire));
            }
        }
        if is_over && wait.is_none() {
            self.settle(fd, Why::Refused);
        }
        (result, wait)
    }

    /// Called by the leader after it was woken.
    pub fn led(&self) {
        self.leads.store(false, Ordering::SeqCst);
        self.wake_followers();
    }

    /// Calls `f` with the stream, then wakes the threads that the change concerns. Returns the result of `f` and what is left to send, or
    /// `None` if the connection is not upgraded. The thread is not cancelled meanwhile, because that would leave the stream in an
    /// intermediate state.
    pub fn with<R>(&self, f: impl FnOnce(&mut Stream) -> R) -> Option<(R, Pending)> {
        if self.is_lost() {
            return None;
        }
        let _stays = sys::NotCancelled::begin();
        let mut inner = lock(&self.inner);
        let stream = inner.as_mut()?;
        let result = f(stream);
        let (news, pending) = (stream.news(), stream.pending());
        drop(inner);
        self.notify_sets(news);
        Some((result, pending))
    }

    /// Returns the `poll` events of the carrier after which more can be sent. Used when the process exits.
    pub fn blocked_on(&self) -> i16 {
        let inner = lock(&self.inner);
        match inner.as_ref() {
            Some(stream) if stream.has_rest() => libc::POLLOUT,
            _ => libc::POLLIN,
        }
    }

    /// Called by a writer that is about to sleep. The result is dropped when it is awake.
    pub fn sleeping_writer(&'static self) -> WaitingWriter {
        self.waiting_writers.fetch_add(1, Ordering::SeqCst);
        WaitingWriter {
            sock: self,
            follows: None,
        }
    }

    /// Waits until the field `turn` differs from the argument, which [`Self::write`] has returned when it counted the caller as a follower.
    /// `kick` returns the eventfd of this thread. The wait is bounded, because a leader that is cancelled while it sleeps does not wake
    /// followers.
    ///
    /// # Errors
    /// EINTR.
    pub fn follow(
        &'static self,
        turn: u64,
        kick: impl FnOnce() -> Option<c_int>,
        timeout: c_int,
    ) -> Result<(), c_int> {
        let mut writer = self.sleeping_writer();
        writer.follows = Some(None);
        let inner = lock(&self.inner);
        if self.turn.load(Ordering::SeqCst) != turn {
            drop(inner);
            return Ok(());
        }
        let kick = kick();
        if let Some(kick) = kick {
            lock(&self.watchers).push(kick);
            self.watched.store(true, Ordering::Release);
            writer.follows = Some(Some(kick));
        }
        drop(inner);
        let longest = limits::FOLLOW as c_int;
        let ms = if timeout < 0 {
            longest
        } else {
            timeout.min(longest)
        };
        sys::poll_kicked(-1, 0, kick, ms).map(|_| ())
    }

    /// Shuts the stream down. If `how` ends reading, this wakes a thread that sleeps in a call that reads or polls.
    ///
    /// # Errors
    /// ENOTCONN if there is no stream, or it is broken.
    pub fn shut_down(&'static self, fd: c_int, how: c_int) -> Result<(), c_int> {
        let done = self.with(|stream| {
            stream.shutdown(fd, how)?;
            if how != libc::SHUT_WR && !self.may_pull() {
                stream.deafen(fd);
            }
            Ok(())
        });
        let Some((result, pending)) = done else {
            return Err(libc::ENOTCONN);
        };
        worker::watch(fd, self, pending);
        result
    }

    /// Processes events of the carrier. `wanted`: the events of the stream for which the program waits, or POLLIN if it
    /// does not wait for events.
    /// Returns the resulting events of the stream.
    pub fn process(&'static self, fd: c_int, events: i16, wanted: i16) -> i16 {
        let wanted = u32::from(wanted.cast_unsigned());
        let (ready, _, news, pending) = self.process_with(fd, events, wanted);
        self.notify_sets(news);
        worker::watch(fd, self, pending);
        ready
    }

    /// Like [`Self::process`], for an epoll set in which the program waits for `wanted`. Also returns the events to request from the
    /// carrier next, and whether [`Self::notify_others`] has to be called when the set is not locked any more. The caller holds the lock of
    /// the set, so this must not wait for the worker: a fork may have stopped the worker.
    pub fn process_for(
        &'static self,
        fd: c_int,
        events: i16,
        wanted: u32,
    ) -> (i16, Option<Carrier>, bool) {
        let (ready, carrier, news, pending) = self.process_with(fd, events, wanted);
        self.wake(news);
        worker::try_watch(fd, self, pending);
        let concerns_others = news != News::default() && self.in_several.load(Ordering::Acquire);
        (ready, carrier, concerns_others)
    }

    /// Marks the connection in the other sets that contain it, after `set` has found a change. The kernel does not report the change to
    /// them if the bytes were already received from the carrier.
    pub fn notify_others(&self, set: &Set) {
        let sets: Vec<&'static Set> = lock(&self.sets).clone();
        for other in sets {
            if !std::ptr::eq(other, set) {
                other.mark(self, self.member.load(Ordering::Acquire));
            }
        }
    }

    /// Like [`Self::process`], but wakes no other threads. Also returns the events to request from the carrier, and what has changed for
    /// other threads and sets.
    fn process_with(
        &self,
        fd: c_int,
        events: i16,
        wanted: u32,
    ) -> (i16, Option<Carrier>, News, Pending) {
        let _stays = sys::NotCancelled::begin();
        let done = self.with(|stream| {
            if events != 0 {
                stream.on_carrier(fd, events, self.may_pull(), for_carrier(wanted));
            }
            (
                stream.readiness(),
                Carrier::of(stream, wanted),
                stream.news(),
            )
        });
        let Some(((ready, carrier, news), pending)) = done else {
            return (libc::POLLNVAL, None, News::default(), Pending::Nothing);
        };
        (ready, Some(carrier), news, pending)
    }

    /// Returns the events to request from the carrier, if the connection is upgraded.
    pub fn carrier(&self, wanted: u32) -> Option<Carrier> {
        if self.mode() != Mode::Up || self.is_lost() {
            return None;
        }
        let inner = lock(&self.inner);
        inner.as_ref().map(|stream| Carrier::of(stream, wanted))
    }

    // ------------------------------------------------------------------ sets

    /// Records that the connection was added to a set by the descriptor `fd`.
    pub fn joined(&self, set: &'static Set, fd: c_int) {
        if self.is_lost() {
            return;
        }
        let before = self.member.swap(fd, Ordering::AcqRel);
        if before != fd && before >= 0 && self.in_sets.load(Ordering::Acquire) {
            self.copied.store(true, Ordering::Release);
        }
        let mut sets = lock(&self.sets);
        if !sets.iter().any(|s| std::ptr::eq(*s, set)) {
            sets.push(set);
        }
        if sets.len() > 1 {
            self.in_several.store(true, Ordering::Release);
        }
        self.in_sets.store(true, Ordering::Release);
    }

    /// Records that the connection was removed from a set.
    pub fn left(&self, set: &Set) {
        if self.is_lost() {
            return;
        }
        let mut sets = lock(&self.sets);
        sets.retain(|s| !std::ptr::eq(*s, set));
        self.in_sets.store(!sets.is_empty(), Ordering::Release);
    }

    // ------------------------------------------------------------------ the end

    /// Called when the program closes the descriptor `fd`, after it was removed from the table and before the kernel closes it. Without
    /// `by_program` the kernel has closed it before, and the number may belong to another connection.
    pub fn closing(&'static self, fd: c_int, by_program: bool) {
        let _stays = sys::NotCancelled::begin();
        if self.is_lost() {
            // A thread that does not exist in this process holds the locks of this object, so the object is not reused.
            if self.numbers.fetch_sub(1, Ordering::AcqRel) == 1 && self.becomes(Mode::Plain) {
                LIVE.fetch_sub(1, Ordering::Relaxed);
            }
            return;
        }
        if self.numbers.load(Ordering::Acquire) == 1 {
            self.closed.store(true, Ordering::SeqCst);
        }
        if self.has_copies() {
            let sets: Vec<&'static Set> = lock(&self.sets).clone();
            for set in sets {
                set.settle(fd);
            }
        }
        if self.numbers.load(Ordering::Acquire) == 1 {
            let sets = std::mem::take(&mut *lock(&self.sets));
            for set in &sets {
                set.forget(fd);
            }
            if self.mode() == Mode::Up && self.is_used_here() {
                let mut taken = lock(&self.inner).take();
                let may_pull = !self.is_received_elsewhere();
                if !may_pull && let Some(stream) = &mut taken {
                    // This makes the other thread's call fail. That thread could not be woken later, because the worker may take
                    // the bytes that arrive.
                    stream.deafen(fd);
                }
                if let Some(mut stream) = taken
                    && stream.close(fd, may_pull)
                {
                    for set in sets {
                        set.withdraw(fd);
                    }
                    worker::drain(fd, stream);
                }
            } else if by_program {
                self.leave_unused(fd);
            }
        } else if self.mode() == Mode::Up
            && self.is_used_here()
            && let Some(((), pending)) = self.with(|s| s.uncork(fd))
            && pending != Pending::Nothing
            && let Some(copy) = table::find(Entry::Sock(self))
        {
            // The worker may know the stream only by `fd`, which is being closed.
            worker::watch(copy, self, pending);
        }
        self.drop_number();
    }

    /// Called for a connection that the process has inherited.
    pub fn is_inherited(&self) {
        self.may_be_shared.store(true, Ordering::Relaxed);
    }

    /// Refuses the Request of an accepted connection that is closed before its first use. The kernel would answer an unread Request with
    /// a reset instead of the end of the data. If another process may have the connection, it decides. The functions that start a child
    /// with vfork call no fork handler, so a process with children leaves the Request unread.
    fn leave_unused(&self, fd: c_int) {
        if self.is_lost() || self.may_be_shared.load(Ordering::Relaxed) {
            return;
        }
        let _stays = sys::NotCancelled::begin();
        let errno = sys::errno();
        if let Some(_inner) = self.inner.try_lock()
            && self.mode() == Mode::Accepted
            && !sys::has_children()
        {
            turn_back(fd);
        }
        sys::set_errno(errno);
    }

    /// Sends the pending bytes before the process exits, and waits until the peer's kernel has acknowledged them. Otherwise the
    /// kernel could discard them: it resets a connection that is closed with unread bytes, such as a Limit message of the peer.
    pub fn finish(&'static self, fd: c_int, until: Instant) {
        self.finish_stream(fd, until);
        self.holders.leave();
    }

    fn finish_stream(&'static self, fd: c_int, until: Instant) {
        self.leave_unused(fd);
        if self.mode() != Mode::Up || self.is_lost() || !self.is_used_here() {
            return;
        }
        let early = Instant::now() + Duration::from_millis(limits::EARLY);
        while let Some((true, _)) = self.with(|s| {
            s.uncork(fd);
            s.is_waiting()
        }) {
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            if left.is_zero() {
                return;
            }
            let to_early = early.saturating_duration_since(now);
            let left = if to_early.is_zero() {
                self.with(|s| s.send_early(fd));
                left
            } else {
                left.min(to_early)
            };
            let events = self.blocked_on();
            let ms = i32::try_from(left.as_millis()).unwrap_or(0).max(1);
            match sys::poll_one(fd, events, ms.min(limits::EXIT_CHECK)) {
                Ok(0) if to_early.is_zero() && sys::is_unreachable(fd) => return,
                Ok(0) => {}
                Ok(ready) => {
                    self.process(fd, ready, libc::POLLIN);
                }
                Err(libc::EINTR) => {}
                Err(_) => return,
            }
        }
        while let Some((false, _)) = self.with(|s| {
            let is_free = !self.is_received_elsewhere();
            while is_free && Instant::now() < until && s.pull(fd, None, limits::WAIT_READ) {}
            sys::is_delivered(fd)
        }) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || sys::is_unreachable(fd) {
                return;
            }
            let tick = Duration::from_millis(limits::EXIT_TICK as u64);
            std::thread::sleep(left.min(tick));
        }
    }
}
