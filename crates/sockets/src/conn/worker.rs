//! The thread that sends what a stream could not send at once: made when there is the first such stream, and asleep when
//! there is none. It looks every [`limits::WORKER_TICK`], because usually the program's next call sends the rest first.

use crate::conn::sock::{Mode, Sock};
use crate::conn::table;
use crate::limits;
use crate::stream::Stream;
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
    /// The peer's kernel has acknowledged all.
    delivered: bool,
}

#[derive(Debug, Default)]
struct Work {
    watched: Vec<(c_int, &'static Sock)>,
    draining: Vec<Draining>,
    running: bool,
}

static WORK: Mutex<Option<Work>> = Mutex::new(None);
/// Closed streams of which the peer's kernel has not acknowledged all.
static DRAINING: AtomicUsize = AtomicUsize::new(0);
/// Closed streams whose descriptors are still there.
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
    // Signals are for the program's threads.
    // SAFETY: the sets are local; the mask of this thread is set back.
    let old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let thread = std::thread::Builder::new()
        .name("anywarp-sockets".to_owned())
        .stack_size(128 * 1024)
        .spawn(run);
    work.running = thread.is_ok();
    // SAFETY: as above.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
    }
}

/// Sends what waits in the stream of `fd`, when the program does not.
pub fn watch(fd: c_int, sock: &'static Sock) {
    let mut guard = lock();
    let work = guard.get_or_insert_default();
    if !work
        .watched
        .iter()
        .any(|(f, s)| *f == fd && std::ptr::eq(*s, sock))
    {
        work.watched.push((fd, sock));
        start(work);
    }
}

/// Sends the rest of a stream that the program closed, and waits until the peer has closed it too.
pub fn drain(fd: c_int, stream: Box<Stream>) {
    let mut guard = lock();
    let work = guard.get_or_insert_default();
    if OPEN.load(Ordering::Acquire) >= limits::DRAINS {
        return;
    }
    let Some(fd) = sys::copy_high(fd) else { return };
    table::own(fd);
    OPEN.fetch_add(1, Ordering::AcqRel);
    DRAINING.fetch_add(1, Ordering::AcqRel);
    work.draining.push(Draining {
        fd,
        stream,
        until: Instant::now() + Duration::from_millis(limits::DRAIN),
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
        let still: Vec<_> = watched
            .into_iter()
            .filter(|(fd, sock)| turn(*fd, sock))
            .collect();
        draining.retain_mut(drain_turn);
        guard = lock();
        if let Some(work) = guard.as_mut() {
            work.watched.extend(still);
            work.draining.extend(draining);
        }
    }
}

/// Whether something still waits.
fn turn(fd: c_int, sock: &'static Sock) -> bool {
    // The number may be another descriptor's by now.
    if !table::sock(fd).is_some_and(|s| std::ptr::eq(s, sock))
        || sock.mode() != Mode::Up
        || !sock.is_ours(fd)
    {
        return false;
    }
    let done = sock.with(|stream| {
        stream.flush(fd);
        if stream.is_waiting() && !stream.has_rest() && sock.may_pull() {
            // For the Reply, or for credit.
            stream.pull(fd, None, limits::WAIT_READ);
        }
        stream.is_waiting()
    });
    done.is_some_and(|(waits, _)| waits)
}

fn drain_turn(d: &mut Draining) -> bool {
    let over = d.stream.drain(d.fd) || Instant::now() >= d.until;
    if !d.delivered && (over || (!d.stream.is_waiting() && sys::is_delivered(d.fd))) {
        d.delivered = true;
        DRAINING.fetch_sub(1, Ordering::AcqRel);
    }
    if over {
        table::close_own(d.fd);
        OPEN.fetch_sub(1, Ordering::AcqRel);
    }
    !over
}

/// Waits for streams that were closed, before the process ends.
pub fn finish(until: Instant) {
    while DRAINING.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Holds still while the process forks.
pub fn hold() -> Held {
    Held(lock())
}

/// The worker holds still.
#[derive(Debug)]
pub struct Held(MutexGuard<'static, Option<Work>>);

impl Held {
    /// In the child: it has no such thread, and the parent sends what waits.
    pub fn forked(mut self) {
        DRAINING.store(0, Ordering::Release);
        OPEN.store(0, Ordering::Release);
        if let Some(work) = self.0.take() {
            for d in work.draining {
                table::close_own(d.fd);
            }
        }
    }
}
