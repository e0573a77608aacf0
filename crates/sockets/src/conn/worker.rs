//! The thread that sends the bytes that a stream could not send at once. It starts with the first such stream and sleeps while
//! there is none. Streams are handled only once per [`limits::WORKER_TICK`], because the next call of the program usually sends
//! the bytes earlier.

use crate::conn::sock::{Mode, Sock};
use crate::conn::table;
use crate::limits;
use crate::stream::{Pending, Stream};
use crate::sys;
use anywarp_core::lock::{Condvar, Mutex};
use libc::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Draining {
    fd: c_int,
    stream: Box<Stream>,
    until: Instant,
    /// When the stream no longer waits for the peer's Reply.
    early: Instant,
    /// The peer's kernel has acknowledged all bytes or does not answer, or the stream is no longer drained.
    delivered: bool,
}

#[derive(Debug, Default)]
struct Work {
    watched: Vec<(c_int, &'static Sock)>,
    draining: Vec<Draining>,
    /// The descriptors of all closed streams that are drained, also of those that the worker has taken out of `draining` meanwhile.
    descriptors: Vec<c_int>,
    running: bool,
    /// The worker waits for a longer time, because all bytes are corked.
    is_calm: bool,
}

impl Work {
    /// Adds a stream. Returns false if it is in the list already.
    fn add(&mut self, fd: c_int, sock: &'static Sock) -> bool {
        let is_new = !self
            .watched
            .iter()
            .any(|(f, s)| *f == fd && std::ptr::eq(*s, sock));
        if is_new {
            self.watched.push((fd, sock));
        }
        is_new
    }
}

static WORK: Mutex<Option<Work>> = Mutex::new(None);
/// The number of closed streams of which the peer's kernel has not acknowledged all bytes.
static DRAINING: AtomicUsize = AtomicUsize::new(0);
/// The number of closed streams whose descriptors are still open.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static MORE: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<Work>> {
    WORK.lock()
}

fn start(work: &mut Work) {
    if work.running {
        MORE.notify_one();
        return;
    }
    work.running = spawn("anywarp-sockets", run);
}

/// Starts a thread of the library. It blocks all signals, so that threads of the program handle them. Returns whether it was started.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> bool {
    // SAFETY: the sets are local; the mask of this thread is restored below.
    let old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let thread = std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(128 * 1024)
        .spawn(run);
    // SAFETY: as above.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
    }
    thread.is_ok()
}

/// If bytes of the stream of `fd` are pending, makes the worker send them, unless the program's next call sends them first.
pub fn watch(fd: c_int, sock: &'static Sock, pending: Pending) {
    if pending == Pending::Nothing {
        return;
    }
    watch_with(&mut lock(), fd, sock, pending);
}

/// Like [`watch`], for a thread that has locked an epoll set. A fork holds the worker's lock while it waits for the lock of the set, so this
/// thread must not wait for the worker's lock: it tries [`limits::WORKER_TRIES`] times to get it. If all attempts fail, the next call on the
/// stream makes the worker send the bytes.
pub fn try_watch(fd: c_int, sock: &'static Sock, pending: Pending) {
    for _ in 0..limits::WORKER_TRIES {
        if pending == Pending::Nothing {
            return;
        }
        if let Some(mut guard) = WORK.try_lock() {
            return watch_with(&mut guard, fd, sock, pending);
        }
        std::thread::yield_now();
    }
}

fn watch_with(work: &mut Option<Work>, fd: c_int, sock: &'static Sock, pending: Pending) {
    let work = work.get_or_insert_default();
    if work.add(fd, sock) || (pending == Pending::Bytes && work.is_calm) {
        start(work);
    }
}

/// Makes the worker send the rest of a stream that the program has closed, and keep a copy of its descriptor open until the peer has
/// closed the stream too. If [`limits::DRAINS`] streams are drained already, or no descriptor is free, the rest is discarded.
pub fn drain(fd: c_int, stream: Box<Stream>) {
    let mut guard = lock();
    let work = guard.get_or_insert_default();
    if OPEN.load(Ordering::Acquire) >= limits::DRAINS {
        return;
    }
    let Some(fd) = sys::copy_high(fd) else { return };
    // The worker closes the copy with its lock held.
    sys::close_at_once(fd);
    table::own(fd);
    OPEN.fetch_add(1, Ordering::AcqRel);
    DRAINING.fetch_add(1, Ordering::AcqRel);
    work.descriptors.push(fd);
    work.draining.push(Draining {
        fd,
        stream,
        until: Instant::now() + Duration::from_millis(limits::DRAIN),
        early: Instant::now() + Duration::from_millis(limits::EARLY),
        delivered: false,
    });
    start(work);
}

fn run() {
    let mut guard = lock();
    loop {
        let Some(work) = guard.as_mut() else { return };
        if work.watched.is_empty() && work.draining.is_empty() {
            guard = MORE.wait(guard);
            continue;
        }
        let watched = std::mem::take(&mut work.watched);
        let mut draining = std::mem::take(&mut work.draining);
        drop(guard);
        std::thread::sleep(Duration::from_millis(limits::WORKER_TICK as u64));
        let mut is_calm = true;
        let still: Vec<_> = watched
            .into_iter()
            .filter(|(fd, sock)| {
                let left = turn(*fd, sock);
                is_calm &= left != Left::Bytes;
                left != Left::Nothing
            })
            .collect();
        let ended: Vec<c_int> = draining
            .extract_if(.., |d| !drain_turn(d))
            .map(|d| d.fd)
            .collect();
        guard = lock();
        let Some(work) = guard.as_mut() else { return };
        // The lock is held until the descriptors are closed, so that the child of a fork closes its copies of exactly those in the list.
        for fd in ended {
            work.descriptors.retain(|other| *other != fd);
            table::close_own(fd);
            OPEN.fetch_sub(1, Ordering::AcqRel);
        }
        is_calm &= work.watched.is_empty() && work.draining.is_empty() && draining.is_empty();
        for (fd, sock) in still {
            work.add(fd, sock);
        }
        work.draining.extend(draining);
        if is_calm && !work.watched.is_empty() {
            let tick = Duration::from_millis(limits::CORK_TICK);
            work.is_calm = true;
            guard = MORE.wait_timeout(guard, tick).0;
            if let Some(work) = guard.as_mut() {
                work.is_calm = false;
            }
        }
    }
}

/// What a stream has after the worker has handled it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Nothing,
    /// Corked bytes, or none, but there were corked ones a short time ago.
    Corked,
    /// Bytes that could not be sent.
    Bytes,
}

/// Sends what can be sent of the stream of `fd`.
fn turn(fd: c_int, sock: &'static Sock) -> Left {
    // The program may have closed the socket, and `fd` may be another descriptor now.
    if !table::sock(fd).is_some_and(|s| std::ptr::eq(s, sock)) || sock.mode() != Mode::Up {
        return Left::Nothing;
    }
    let Some(((), pending)) = sock.with(|_| ()) else {
        return Left::Nothing;
    };
    // After a fork, a stream without pending bytes is left to the process that uses it first.
    let may_use = match pending {
        Pending::Nothing => sock.is_used_here(),
        Pending::Corked | Pending::Bytes => sock.is_ours(fd),
    };
    if !may_use {
        return Left::Nothing;
    }
    let done = sock.with(|stream| {
        stream.flush(fd);
        if stream.pending() == Pending::Bytes && !stream.has_rest() && sock.may_pull() {
            // The bytes cannot be sent before the peer's Reply or credit was received.
            stream.pull(fd, None, limits::WAIT_READ);
        }
        match stream.pending() {
            Pending::Bytes => Left::Bytes,
            _ if stream.was_corked() => Left::Corked,
            _ => Left::Nothing,
        }
    });
    done.map_or(Left::Nothing, |(left, _)| left)
}

fn drain_turn(d: &mut Draining) -> bool {
    // The program may have put a descriptor of its own at the number.
    let is_own = table::is_own(d.fd);
    if is_own && Instant::now() >= d.early {
        d.stream.send_early(d.fd);
    }
    let over = !is_own || d.stream.drain(d.fd) || Instant::now() >= d.until;
    let is_finished = !d.stream.is_waiting() && sys::is_delivered(d.fd);
    if !d.delivered && (over || is_finished || sys::is_unreachable(d.fd)) {
        d.delivered = true;
        DRAINING.fetch_sub(1, Ordering::AcqRel);
    }
    !over
}

/// Called when the process exits: waits until the peers' kernels have acknowledged all bytes of the closed streams, but not
/// longer than `until`.
pub fn finish(until: Instant) {
    while DRAINING.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stops the worker while the process forks, until the result is dropped.
pub fn hold() -> Held {
    Held(lock())
}

/// A lock that stops the worker while it is held.
#[derive(Debug)]
pub struct Held(MutexGuard<'static, Option<Work>>);

impl Held {
    /// Called in the child of a fork. The child has no worker thread and the parent sends the pending bytes, so the child discards
    /// the list of streams.
    pub fn forked(mut self) {
        DRAINING.store(0, Ordering::Release);
        OPEN.store(0, Ordering::Release);
        if let Some(work) = self.0.take() {
            for fd in work.descriptors {
                table::close_own(fd);
            }
        }
    }
}
