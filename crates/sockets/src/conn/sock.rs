//! A connection of the program: undecided, or upgraded. A plain one is not known here any more.

use crate::conn::set::{Set, for_carrier};
use crate::conn::show;
use crate::conn::table;
use crate::conn::worker;
use crate::limits;
use crate::log;
use crate::policy;
use crate::queue::Dest;
use crate::stream::{self, First, News, Stream};
use crate::sys;
use anywarp_core::lock::{Condvar, Mutex};
use libc::c_int;
use sockets_base::stat::Why;
use std::io::IoSlice;
use std::sync::MutexGuard;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::time::{Duration, Instant};

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Not in use, or plain.
    Plain = 0,
    /// Accepted; its first bytes decide.
    Accepted = 1,
    /// It will send a Request when TCP has connected.
    Connecting = 2,
    /// Upgraded.
    Up = 3,
}

/// Connections that are not plain: as long as there are none, waits are the kernel's.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Connections that are neither plain nor upgraded yet.
pub static UNDECIDED: AtomicUsize = AtomicUsize::new(0);

/// A connection.
#[derive(Debug)]
pub struct Sock {
    mode: AtomicU8,
    /// The program closes a connection that is not upgraded.
    strict: AtomicBool,
    /// Numbers of it.
    numbers: AtomicI32,
    inner: Mutex<Option<Box<Stream>>>,
    /// Threads that sleep until the carrier has bytes. They are counted with `inner` locked, after they found nothing, and
    /// while there are any no other thread takes bytes from the carrier: else one could take those that a sleeper is
    /// about to sleep for.
    sleepers: AtomicI32,
    /// A writer without credit sleeps until the carrier has bytes, and was counted as the sleepers are. Others may take these,
    /// and then wake it by `kick`.
    leads: AtomicBool,
    /// An eventfd for the writer that leads; -1: there is none yet.
    kick: AtomicI32,
    /// Signalled when `turn` changes, if `followers` is not 0: a signal is a system call even if no thread waits.
    taken: Condvar,
    /// Threads that wait for `taken`.
    followers: AtomicU32,
    /// Counts what writers that follow another thread wait for.
    turn: AtomicU64,
    /// The sets that it is in.
    sets: Mutex<Vec<&'static Set>>,
    in_sets: AtomicBool,
    /// The number that it was added to a set with last.
    member: AtomicI32,
    /// It has, or had, several numbers.
    copied: AtomicBool,
    /// The process that uses it; 0 after a fork: the first that uses it.
    owner: Mutex<Option<&'static AtomicU32>>,
    forked: AtomicBool,
    /// The child cannot use it: a thread of the parent was in it at the fork.
    lost: AtomicBool,
}

/// In place of an errno: the connection has become plain, and the call is the kernel's.
pub const GONE: c_int = -1;

/// What a writer waits for that can send nothing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Another thread waits for the carrier: see [`Sock::follow`].
    Other(u64),
    /// Room in the carrier.
    Room,
    /// Credit. The caller waits for the carrier and for this eventfd, if there is one, then calls [`Sock::led`].
    Credit(Option<c_int>),
}

/// What a stream needs of its carrier.
#[derive(Debug, Clone, Copy)]
pub struct Carrier {
    /// Events of `poll` that lead to those which the program waits for.
    pub events: i16,
    /// Bytes of FPDUs wait for the carrier.
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

/// Takes bytes that were looked at; whether they were still there.
fn take(fd: c_int, bytes: Option<&mut [u8]>) -> bool {
    bytes.is_some_and(|b| {
        let length = b.len();
        sys::recv(fd, &mut [std::io::IoSliceMut::new(b)]) == Ok(length)
    })
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
            leads: AtomicBool::new(false),
            kick: AtomicI32::new(-1),
            taken: Condvar::new(),
            followers: AtomicU32::new(0),
            turn: AtomicU64::new(0),
            sets: Mutex::new(Vec::new()),
            in_sets: AtomicBool::new(false),
            member: AtomicI32::new(-1),
            copied: AtomicBool::new(false),
            owner: Mutex::new(None),
            forked: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }
    }

    /// A connection with one number.
    pub fn new(mode: Mode, strict: bool) -> &'static Self {
        let sock = lock(&FREE).pop();
        let sock = sock.unwrap_or_else(|| Box::leak(Box::new(Self::fresh())));
        sock.strict.store(strict, Ordering::Relaxed);
        sock.numbers.store(1, Ordering::Relaxed);
        sock.sleepers.store(0, Ordering::Relaxed);
        sock.copied.store(false, Ordering::Relaxed);
        sock.forked.store(false, Ordering::Relaxed);
        sock.lost.store(false, Ordering::Relaxed);
        sock.mode.store(mode as u8, Ordering::Release);
        LIVE.fetch_add(1, Ordering::Relaxed);
        UNDECIDED.fetch_add(1, Ordering::Relaxed);
        sock
    }

    /// Changes the mode; whether it was another one than plain.
    fn becomes(&self, mode: Mode) -> bool {
        let old = self.mode.swap(mode as u8, Ordering::AcqRel);
        if old == Mode::Accepted as u8 || old == Mode::Connecting as u8 {
            UNDECIDED.fetch_sub(1, Ordering::Relaxed);
        }
        old != Mode::Plain as u8
    }

    /// How far it is.
    #[inline]
    pub fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            1 => Mode::Accepted,
            2 => Mode::Connecting,
            3 => Mode::Up,
            _ => Mode::Plain,
        }
    }

    /// Whether it must not stay plain.
    pub fn is_strict(&self) -> bool {
        self.strict.load(Ordering::Relaxed)
    }

    /// It got another number.
    pub fn add_number(&self) {
        self.copied.store(true, Ordering::Release);
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it has, or had, several numbers.
    pub fn has_copies(&self) -> bool {
        self.copied.load(Ordering::Acquire)
    }

    /// Its state, if it is upgraded.
    pub fn stream(&self) -> MutexGuard<'_, Option<Box<Stream>>> {
        lock(&self.inner)
    }

    // ------------------------------------------------------------------ decision

    /// Leaves this number to the kernel from here on.
    fn go_plain(&'static self, fd: c_int, why: Why) {
        if self.becomes(Mode::Plain) {
            LIVE.fetch_sub(1, Ordering::Relaxed);
            show::plain(fd, why);
            policy::stays_plain(fd, why);
            for set in std::mem::take(&mut *lock(&self.sets)) {
                set.forget(fd);
            }
            self.in_sets.store(false, Ordering::Relaxed);
        }
        // Other numbers of it find the mode.
        if table::forget(fd, self) {
            self.drop_number();
        }
        if self.is_strict() {
            log::line(&format!(
                "connection {fd} is plain, and a rule requires RDMA: it is shut down"
            ));
            // SAFETY: no pointer.
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
            *lock(&self.owner) = None;
            self.leads.store(false, Ordering::SeqCst);
            let kick = self.kick.swap(-1, Ordering::AcqRel);
            if kick >= 0 {
                table::close_own(kick);
            }
            self.in_sets.store(false, Ordering::Relaxed);
            lock(&self.sets).clear();
            lock(&FREE).push(self);
        }
        last
    }

    /// Decides if it can be decided now. `writes`: the program writes first, so that nothing can be waited for.
    ///
    /// Returns what the connection is then.
    pub fn decide(&'static self, fd: c_int, writes: bool) -> Mode {
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
        self.mode()
    }

    /// Looks at the first bytes of an accepted connection.
    fn look(&'static self, fd: c_int, writes: bool) {
        let mut inner = lock(&self.inner);
        if self.mode() != Mode::Accepted {
            return;
        }
        let mut bytes = [0u8; limits::REQUEST];
        let n = match sys::peek(fd, &mut bytes) {
            Ok(n) => n,
            Err(libc::EAGAIN | libc::EINTR) if !writes => return,
            Err(_) => 0,
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
            // Another process that inherited the connection was first.
            drop(inner);
            self.go_plain(fd, Why::Handed);
            return;
        }
        stream.undelay(fd);
        if sys::send(fd, &[IoSlice::new(&reply)], libc::MSG_NOSIGNAL) != Ok(reply.len()) {
            // The peer is gone; the next call of the program finds out.
            log::line(&format!("stream {fd}: the Reply could not be sent"));
        }
        *inner = Some(stream);
        self.own();
        self.becomes(Mode::Up);
        show::upgraded(fd);
        log::line(&format!("stream {fd}: accepted"));
    }

    /// The connection is about to go to another program, which may not have the library: it becomes plain for both ends. A
    /// Request is refused; of a stream the two ends agree. Whether it is plain.
    pub fn hand_over(&'static self, fd: c_int) -> bool {
        let mut inner = lock(&self.inner);
        if self.mode() == Mode::Up {
            let until = Instant::now() + Duration::from_millis(limits::HAND_OVER);
            let is_plain = inner.as_mut().is_some_and(|s| s.hand_over(fd, until));
            drop(inner);
            if is_plain {
                self.settle(fd, Why::Handed);
            }
            return is_plain;
        }
        if self.mode() != Mode::Accepted {
            return true;
        }
        let mut bytes = [0u8; limits::REQUEST];
        let n = sys::peek(fd, &mut bytes).unwrap_or(0);
        if let Some((length, reply)) = stream::refusal(bytes.get(..n).unwrap_or(&[]))
            && take(fd, bytes.get_mut(..length))
        {
            // A peer that is gone is found out by the other program.
            let _ = sys::send(fd, &[IoSlice::new(&reply)], libc::MSG_NOSIGNAL);
        }
        drop(inner);
        self.go_plain(fd, Why::Handed);
        true
    }

    /// Leaves a connection to the kernel that has become plain, when nothing of it is left here.
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

    /// TCP has connected: sends the Request.
    pub fn start(&'static self, fd: c_int) {
        let mut inner = lock(&self.inner);
        if self.mode() != Mode::Connecting {
            return;
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
        let word = crate::owner::word();
        if let Some(word) = word {
            word.store(crate::owner::me(), Ordering::Relaxed);
        }
        *lock(&self.owner) = word;
    }

    /// The process is about to fork: the first of the two that uses the stream will own it.
    pub fn before_fork(&self) {
        if let Some(owner) = self.owner.try_lock()
            && let Some(word) = *owner
            && word.load(Ordering::Relaxed) == crate::owner::me()
        {
            word.store(0, Ordering::Release);
            self.forked.store(true, Ordering::Release);
        }
    }

    /// In the child.
    pub fn after_fork(&self) {
        if self.inner.try_lock().is_none()
            || self.sets.try_lock().is_none()
            || self.owner.try_lock().is_none()
        {
            self.lost.store(true, Ordering::Relaxed);
        }
        self.sleepers.store(0, Ordering::Relaxed);
    }

    /// Whether this process may use the stream.
    #[inline]
    pub fn is_ours(&self, fd: c_int) -> bool {
        if !self.forked.load(Ordering::Acquire) {
            return true;
        }
        if self.lost.load(Ordering::Relaxed) {
            return false;
        }
        let Some(word) = *lock(&self.owner) else {
            return false;
        };
        let me = crate::owner::me();
        match word.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(owner) if owner == me => true,
            Err(owner) => {
                log::always(&format!(
                    "stream {fd} is used by another process ({owner}) since a fork; use it in one process, or set it to tcp"
                ));
                false
            }
        }
    }

    /// Whether this process used the stream since it was forked, or made it.
    fn is_used_here(&self) -> bool {
        !self.forked.load(Ordering::Acquire)
            || lock(&self.owner).is_some_and(|w| w.load(Ordering::Acquire) == crate::owner::me())
    }

    // ------------------------------------------------------------------ data

    /// Wakes the threads that wait for the stream in a set, after a call that changed it.
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

    /// Reads without waiting; see [`Stream::read`]. With `sleeps`, the caller is counted as sleeper if there is less than
    /// it needs; then the second value is true.
    pub fn read(
        &'static self,
        fd: c_int,
        dest: &mut Dest<'_, '_>,
        peek: bool,
        all: bool,
        sleeps: bool,
    ) -> (Result<(), c_int>, bool) {
        let mut inner = lock(&self.inner);
        let Some(stream) = inner.as_mut() else {
            return (Err(GONE), false);
        };
        let result = stream.read(fd, dest, peek, all, self.may_pull());
        let more = result == Err(libc::EAGAIN) || (all && !dest.is_full() && !stream.is_readable());
        if sleeps && more {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
        }
        let mut news = stream.news();
        news.readable &= stream.is_readable();
        show::moved(fd, stream);
        let is_over = stream.is_over();
        drop(inner);
        self.notify_sets(news);
        if is_over && !(sleeps && more) {
            self.settle(fd, Why::Refused);
        }
        (result, sleeps && more)
    }

    /// A sleeper is awake.
    pub fn awake(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.wake_followers();
    }

    /// A thread is about to look at the stream, and to sleep until the carrier has events.
    pub fn asleep(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether bytes may be taken from the carrier: no thread sleeps for them. The caller has locked the stream.
    pub fn may_pull(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) <= 0
    }

    /// Wakes the threads that a change of the stream concerns.
    fn wake(&self, news: News) {
        if news.readable || news.writable {
            self.wake_followers();
        }
        if news.writable && self.leads.load(Ordering::SeqCst) {
            let one = 1u64.to_ne_bytes();
            let kick = self.kick.load(Ordering::Acquire);
            // SAFETY: eight bytes.
            let _ = unsafe { crate::real::write(kick, one.as_ptr().cast(), one.len()) };
        }
    }

    /// Wakes the threads that wait in [`Self::follow`].
    fn wake_followers(&self) {
        self.turn.fetch_add(1, Ordering::SeqCst);
        if self.followers.load(Ordering::SeqCst) > 0 {
            // One that is counted and does not wait yet holds the lock.
            drop(lock(&self.inner));
            self.taken.notify_all();
        }
    }

    /// The eventfd for the writer that leads. The caller has locked the stream.
    fn kick(&self) -> Option<c_int> {
        let fd = self.kick.load(Ordering::Acquire);
        if fd >= 0 {
            return Some(fd);
        }
        let fd = sys::eventfd()?;
        table::own(fd);
        self.kick.store(fd, Ordering::Release);
        Some(fd)
    }

    /// Writes without waiting; see [`Stream::write`]. If nothing goes and the program `waits`, also what for.
    pub fn write(
        &'static self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        flags: c_int,
        waits: bool,
    ) -> (Result<usize, c_int>, Option<Wait>) {
        let done = self.with(|stream| {
            let result = stream.write(fd, parts, flags, self.may_pull());
            show::moved(fd, stream);
            let wait = (waits && result == Err(libc::EAGAIN)).then(|| {
                if stream.has_rest() {
                    Wait::Room
                } else if !self.may_pull() || self.leads.load(Ordering::SeqCst) {
                    Wait::Other(self.turn.load(Ordering::SeqCst))
                } else {
                    self.leads.store(true, Ordering::SeqCst);
                    Wait::Credit(self.kick())
                }
            });
            (result, wait, stream.has_rest(), stream.is_over())
        });
        let Some(((result, wait, has_rest, is_over), is_waiting)) = done else {
            return (Err(GONE), None);
        };
        if is_waiting {
            worker::watch(fd, self);
        }
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

    /// The writer that led does not sleep any more.
    pub fn led(&self) {
        self.leads.store(false, Ordering::SeqCst);
        self.wake_followers();
    }

    /// Does something with the stream, and tells others what changed. Also whether something waits to be sent.
    pub fn with<R>(&self, f: impl FnOnce(&mut Stream) -> R) -> Option<(R, bool)> {
        let mut inner = lock(&self.inner);
        let stream = inner.as_mut()?;
        let result = f(stream);
        let (news, waits) = (stream.news(), stream.is_waiting());
        drop(inner);
        self.notify_sets(news);
        Some((result, waits))
    }

    /// What a process that ends waits for, to send the rest.
    pub fn blocked_on(&self) -> i16 {
        let inner = lock(&self.inner);
        match inner.as_ref() {
            Some(stream) if stream.has_rest() => libc::POLLOUT,
            _ => libc::POLLIN,
        }
    }

    /// Waits until another thread has changed something since `turn`, a bounded time: one that was cancelled while it slept
    /// does not wake others.
    pub fn follow(&self, turn: u64) {
        let inner = lock(&self.inner);
        // Counted before the turn is looked at: what changes it in between sees the follower.
        self.followers.fetch_add(1, Ordering::SeqCst);
        if self.turn.load(Ordering::SeqCst) == turn {
            let wait = Duration::from_millis(limits::FOLLOW);
            drop(self.taken.wait_timeout(inner, wait));
        }
        self.followers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Events of the carrier were found: processes them, and returns the events of the stream.
    pub fn process(&self, fd: c_int, events: i16) -> i16 {
        self.process_for(fd, events, 0).0
    }

    /// As [`Self::process`], for a set of which the program wants to know `wanted`: also what to ask of the carrier next.
    pub fn process_for(&self, fd: c_int, events: i16, wanted: u32) -> (i16, Option<Carrier>) {
        let done = self.with(|stream| {
            if events != 0 {
                stream.on_carrier(fd, events, self.may_pull());
            }
            // The caller reports them; only threads that wait for the stream itself are woken.
            (
                stream.readiness(),
                Carrier::of(stream, wanted),
                stream.news(),
            )
        });
        let Some(((ready, carrier, news), _)) = done else {
            return (libc::POLLNVAL, None);
        };
        self.wake(news);
        (ready, Some(carrier))
    }

    /// What to ask of the carrier of an upgraded stream.
    pub fn carrier(&self, wanted: u32) -> Option<Carrier> {
        if self.mode() != Mode::Up {
            return None;
        }
        let inner = lock(&self.inner);
        inner.as_ref().map(|stream| Carrier::of(stream, wanted))
    }

    // ------------------------------------------------------------------ sets

    /// It was added to a set, with this number.
    pub fn joined(&self, set: &'static Set, fd: c_int) {
        let before = self.member.swap(fd, Ordering::AcqRel);
        if before != fd && before >= 0 && self.in_sets.load(Ordering::Acquire) {
            self.copied.store(true, Ordering::Release);
        }
        let mut sets = lock(&self.sets);
        if !sets.iter().any(|s| std::ptr::eq(*s, set)) {
            sets.push(set);
        }
        self.in_sets.store(true, Ordering::Release);
    }

    /// It was removed from a set.
    pub fn left(&self, set: &Set) {
        let mut sets = lock(&self.sets);
        sets.retain(|s| !std::ptr::eq(*s, set));
        self.in_sets.store(!sets.is_empty(), Ordering::Release);
    }

    // ------------------------------------------------------------------ the end

    /// The program closes the number `fd`, which the table has forgotten; the kernel's close follows.
    pub fn closing(&'static self, fd: c_int) {
        if self.has_copies() {
            let sets: Vec<&'static Set> = lock(&self.sets).clone();
            for set in sets {
                set.settle(fd);
            }
        }
        if self.numbers.load(Ordering::Acquire) == 1 {
            for set in std::mem::take(&mut *lock(&self.sets)) {
                set.forget(fd);
            }
            if self.mode() == Mode::Up && !self.lost.load(Ordering::Relaxed) && self.is_used_here()
            {
                let taken = lock(&self.inner).take();
                if let Some(mut stream) = taken
                    && stream.close(fd)
                {
                    worker::drain(fd, stream);
                }
            }
        }
        if self.lost.load(Ordering::Relaxed) {
            // Its locks are those of a thread that does not exist: it is not used again.
            LIVE.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.drop_number();
    }

    /// Sends what waits, before the process ends, and waits until the peer's kernel has it: a socket that the kernel closes
    /// with limits of the peer unread would drop it.
    pub fn finish(&self, fd: c_int, until: Instant) {
        if self.mode() != Mode::Up || self.lost.load(Ordering::Relaxed) || !self.is_used_here() {
            return;
        }
        while let Some((true, _)) = self.with(|s| {
            s.flush(fd);
            s.is_waiting()
        }) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let events = self.blocked_on();
            let ms = i32::try_from(left.as_millis()).unwrap_or(0).max(1);
            match sys::poll_one(fd, events, ms) {
                Ok(0) => return,
                Ok(ready) => {
                    self.process(fd, ready);
                }
                Err(libc::EINTR) => {}
                Err(_) => return,
            }
        }
        while let Some((false, _)) = self.with(|s| {
            while s.pull(fd, None, limits::WAIT_READ) {}
            sys::is_delivered(fd)
        }) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let tick = Duration::from_millis(limits::EXIT_TICK as u64);
            std::thread::sleep(left.min(tick));
        }
    }
}
