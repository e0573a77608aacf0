//! Event queues, from which `exs_qdequeue` takes events, and how threads wait for events.

use crate::lock::lock;
use crate::socket::Socket;
use libc::{c_int, c_void};
use rustc_hash::FxHashMap;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
    Ordering::SeqCst,
};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// An event, in the layout of `exs_event_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) kind: c_int,
    pub(crate) errno: c_int,
    pub(crate) fd: c_int,
    pub(crate) ahandle: isize,
    /// The union of `<exs.h>`, as 64-bit words.
    pub(crate) body: [u64; 6],
}

/// A bit of [`Queue::used`]: the queue is deleted.
const DELETED: usize = 1 << (usize::BITS - 1);
/// A flag in the event of a transfer: more events of the same call follow.
pub(crate) const MORE: u64 = 0x200;
/// The time that a thread polls before it sleeps, in the adaptive mode ([`Wait::Adaptive`]: poll, then sleep), if its last wait took
/// longer than [`SHORT_WAIT`].
const SPIN: Duration = Duration::from_micros(50);
/// The time that a thread polls if the last wait was not longer than this. Waking a sleeping peer involves four threads and
/// takes some 400 µs in each direction. If both ends stopped polling earlier, both would sleep in every exchange, although an
/// exchange takes 30 µs if both poll.
const SHORT_WAIT: Duration = Duration::from_millis(1);

/// How many sockets a waiting thread polls before it reads the clock again. A device may yield the processor in each poll, so a larger
/// number would delay the end of the polling on a busy machine.
const POLLS: usize = 8;

/// The interval at which a thread that only polls checks whether a signal has arrived.
const SIGNAL_CHECK: Duration = Duration::from_millis(1);

/// The signals of a thread that only polls. The thread cannot find out whether a handler has run. So signals are blocked between two
/// checks, and a check reports whether it has run a handler.
#[derive(Debug)]
struct Signals {
    /// The mask of the program.
    before: libc::sigset_t,
    checked: Instant,
}

impl Signals {
    /// Not blocked: signals of faults of the thread itself, and that of profilers, which have to see where the thread is.
    const NOT_BLOCKED: [c_int; 8] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
        libc::SIGABRT,
        libc::SIGPROF,
    ];

    fn block(now: Instant) -> Self {
        // SAFETY: both sets are initialized before they are used.
        unsafe {
            let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigfillset(set.as_mut_ptr());
            for signal in Self::NOT_BLOCKED {
                libc::sigdelset(set.as_mut_ptr(), signal);
            }
            libc::sigemptyset(before.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr());
            Self {
                before: before.assume_init(),
                checked: now,
            }
        }
    }

    /// Runs the handlers of signals that have arrived, if the last check is long enough ago. Returns whether there was one.
    fn interrupts(&mut self, now: Instant) -> bool {
        if now.duration_since(self.checked) < SIGNAL_CHECK {
            return false;
        }
        self.checked = now;
        let mut none = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // The function ppoll(3) is a point at which a thread may be cancelled, and the code here cannot be unwound.
        // SAFETY: the time and the mask, of which the kernel reads eight bytes, are live until the call returns. There are no descriptors.
        let n = unsafe {
            libc::syscall(
                libc::SYS_ppoll,
                std::ptr::null_mut::<libc::pollfd>(),
                0,
                &raw mut none,
                &raw const self.before,
                8,
            )
        };
        n < 0 && crate::errno() == libc::EINTR
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the mask is live until the call returns.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const self.before,
                std::ptr::null_mut(),
            );
        }
    }
}

thread_local! {
    /// The signals of queues that this thread has to raise, one bit each.
    static DUE: Cell<u64> = const { Cell::new(0) };
}

/// Raises the signals of the queues to which this thread has added events. The caller holds no lock, because the kernel may run a handler of
/// the program in this thread before the call returns.
pub(crate) fn raise_signals() {
    let mut due = DUE.replace(0);
    while due != 0 {
        let signal = due.trailing_zeros().cast_signed() + 1;
        due &= due - 1;
        // SAFETY: no memory is passed.
        unsafe { libc::kill(libc::getpid(), signal) };
    }
}

/// How threads wait in `exs_qdequeue`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Adaptive,
    Notify,
    BusyPoll,
}

#[derive(Debug)]
pub(crate) struct State {
    events: VecDeque<Event>,
    pub(crate) wait: Wait,
    /// The time that the next wait polls, in the adaptive mode.
    spin: Duration,
    /// The signal to send when an event is added to the empty queue.
    pub(crate) signal: Option<c_int>,
    members: FxHashMap<c_int, Arc<Socket>>,
    /// The members, which are the sockets whose events come to this queue, as a list for waiting threads. `None`: the members have changed.
    list: Option<Arc<[Arc<Socket>]>>,
    /// The descriptor for the program, once it has requested it. It is readable while there are events.
    eventfd: Option<c_int>,
    /// The number of threads that sleep on [`Queue::pushed`].
    sleepers: usize,
    /// Whether the queue is deleted.
    closed: bool,
}

/// An event queue.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    depth: AtomicUsize,
    /// The number of events and of entries that are reserved for the events of calls in progress. It is limited by the depth, and
    /// calls reserve entries without the lock. Contains [`DELETED`].
    used: AtomicUsize,
    /// The number of events added so far, modulo 2^32, plus one when the queue is closed. It changes only with the lock held. Waiting threads
    /// use it as a futex.
    pushed: AtomicU32,
    /// Distinguishes this queue from all others, also from those that were deleted.
    number: u64,
}

impl Queue {
    pub(crate) fn new(depth: usize) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        Self {
            state: Mutex::new(State {
                events: VecDeque::new(),
                wait: Wait::Adaptive,
                spin: SHORT_WAIT,
                signal: None,
                members: FxHashMap::default(),
                list: None,
                eventfd: None,
                sleepers: 0,
                closed: false,
            }),
            depth: AtomicUsize::new(depth),
            used: AtomicUsize::new(0),
            pushed: AtomicU32::new(0),
            number: NUMBER.fetch_add(1, Relaxed),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth.load(Relaxed)
    }

    pub(crate) fn set_depth(&self, depth: usize) {
        self.depth.store(depth, Relaxed);
    }

    /// Reserves entries for the events of a call on `socket`.
    pub(crate) fn reserve(&self, socket: &Arc<Socket>, events: usize) -> Result<(), c_int> {
        let depth = self.depth();
        // A reservation that is refused changes nothing: it must not make another call fail.
        let with_these = |used: usize| Some(used + events).filter(|used| *used <= depth);
        if let Err(used) = self.used.fetch_update(SeqCst, SeqCst, with_these) {
            let deleted = used & DELETED != 0;
            return Err(if deleted { libc::EBADF } else { libc::EAGAIN });
        }
        // The socket stays a member until it is closed, and most sockets use one queue.
        if socket.last_queue.load(Relaxed) != self.number {
            let mut state = self.lock();
            let members = &mut state.members;
            if members.insert(socket.fd, Arc::clone(socket)).is_none() {
                state.list = None;
            }
            socket.last_queue.store(self.number, Relaxed);
        }
        Ok(())
    }

    /// Releases reserved entries that no event will use.
    pub(crate) fn release(&self, events: usize) {
        if events > 0 {
            self.used.fetch_sub(events, SeqCst);
        }
    }

    pub(crate) fn forget(&self, fd: c_int) {
        let mut state = self.lock();
        let socket = state.members.remove(&fd);
        let list = state.list.take();
        drop(state);
        // If these are the last references, the socket is dropped after the lock was released, because dropping it may take long.
        drop((socket, list));
    }

    /// Adds the event of a call, for which room was reserved.
    pub(crate) fn push(&self, event: Event) {
        self.add(&mut self.lock(), event);
    }

    /// Adds an event of a call that will have more events. If an event of the same call is still in the queue, adds the length to that
    /// event and increments its counter instead.
    pub(crate) fn note(&self, event: Event) {
        let mut state = self.lock();
        let same = state.events.iter_mut().find(|e| {
            let more = |e: &Event| e.body.get(2).is_some_and(|f| f & MORE != 0);
            e.fd == event.fd
                && e.kind == event.kind
                && more(e)
                && e.body.get(5) == event.body.get(5)
        });
        if let Some([_, length, flags, ..]) = same.map(|e| &mut e.body) {
            let [_, more, ..] = event.body;
            *length = length.wrapping_add(more);
            *flags = flags.wrapping_add(1 << 32);
        } else {
            self.used.fetch_add(1, SeqCst);
            self.add(&mut state, event);
        }
    }

    /// Adds an event, which is already part of [`Queue::used`].
    fn add(&self, state: &mut State, event: Event) {
        let first = state.events.is_empty();
        state.events.push_back(event);
        if first {
            if let Some(fd) = state.eventfd {
                make_readable(fd);
            }
            if let Some(signal) = state.signal {
                DUE.set(DUE.get() | 1 << (signal - 1));
            }
        }
        self.wake_waiting(state);
    }

    /// Makes threads that wait for events look at the queue again.
    fn wake_waiting(&self, state: &State) {
        let pushed = self.pushed.load(Relaxed).wrapping_add(1);
        self.pushed.store(pushed, Release);
        if state.sleepers > 0 {
            // This cannot fail, because the word is mapped memory of this process.
            let _ = self.futex(libc::FUTEX_WAKE, i32::MAX.cast_unsigned(), None);
        }
    }

    /// Returns the descriptor for the program. It is created at the first call.
    pub(crate) fn fd(&self) -> Result<c_int, c_int> {
        let mut state = self.lock();
        if let Some(fd) = state.eventfd {
            return Ok(fd);
        }
        if state.closed {
            return Err(libc::EBADF);
        }
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(crate::errno());
        }
        state.eventfd = Some(fd);
        if !state.events.is_empty() {
            make_readable(fd);
        }
        Ok(fd)
    }

    /// Makes threads that wait for events return `EBADF`, and closes the descriptor. Threads of the program may keep the memory of the
    /// queue for longer (see `library::Recent`).
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.wake_waiting(&state);
        let members = std::mem::take(&mut state.members);
        let list = state.list.take();
        if let Some(fd) = state.eventfd.take() {
            // SAFETY: the queue owns the descriptor.
            unsafe { libc::close(fd) };
        }
        drop(state);
        drop((members, list));
    }

    /// Makes later calls fail. If a call in progress will add an event, returns false and changes nothing.
    pub(crate) fn delete(&self) -> bool {
        let state = self.lock();
        let used = state.events.len();
        let deleted = self
            .used
            .compare_exchange(used, used | DELETED, SeqCst, SeqCst);
        deleted.is_ok()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.lock().events.len()
    }

    /// Removes and returns up to `into.len()` events. If there are fewer than `least`, polls the sockets once before.
    pub(crate) fn look(&self, into: &mut [Event], least: usize) -> usize {
        let mut state = self.lock();
        if state.events.len() < least && state.wait != Wait::Notify {
            let members = state.list();
            drop(state);
            for member in &*members {
                member.spin();
            }
            state = self.lock();
        }
        self.take(&mut state, into)
    }

    /// Waits until there are `least` events, or for the time `limit`. Removes and returns up to `into.len()` events.
    pub(crate) fn dequeue(
        &self,
        into: &mut [Event],
        least: usize,
        limit: Option<Duration>,
    ) -> Result<usize, c_int> {
        // The times at which the wait began and at which the clock was read last. The clock is read only while there is nothing
        // to do.
        let mut began = None;
        let mut latest = None;
        let mut signals: Option<Signals> = None;
        loop {
            let mut state = self.lock();
            if state.closed {
                return Err(libc::EBADF);
            }
            let seen = self.pushed.load(Relaxed);
            if state.events.len() >= least {
                if let (Some(began), Some(latest)) = (began, latest) {
                    state.spin = spin_after(Instant::saturating_duration_since(&latest, began));
                }
                return Ok(self.take(&mut state, into));
            }
            let wait = state.wait;
            let members = if wait == Wait::Notify {
                None
            } else {
                Some(state.list())
            };
            let spin = state.spin;
            drop(state);
            let now = Instant::now();
            let start = *began.get_or_insert(now);
            let until = limit.map(|limit| start + limit);
            if latest.is_some() && until.is_some_and(|until| now >= until) {
                return Ok(self.take(&mut self.lock(), into));
            }
            latest = Some(now);
            let spin_until = start + spin;
            let spins = wait == Wait::BusyPoll || (wait == Wait::Adaptive && now < spin_until);
            let members = members.as_deref().unwrap_or(&[]);
            if spins && !members.is_empty() {
                if wait == Wait::BusyPoll && now.duration_since(start) >= SIGNAL_CHECK {
                    let signals = signals.get_or_insert_with(|| Signals::block(now));
                    if signals.interrupts(now) {
                        return Err(libc::EINTR);
                    }
                }
                let spin_until = if wait == Wait::BusyPoll {
                    now + SPIN
                } else {
                    spin_until
                };
                latest = self.poll(members, seen, spin_until, until).or(latest);
                continue;
            }
            signals = None;
            for member in members {
                member.stop_polling();
            }
            raise_signals();
            let timeout = until.map(|until| until.saturating_duration_since(now));
            self.lock().sleepers += 1;
            // If an event was added since `seen` was read, this returns at once.
            let result = self.futex(libc::FUTEX_WAIT, seen, timeout);
            self.lock().sleepers -= 1;
            latest = Some(Instant::now());
            if result == Err(libc::EINTR) {
                return Err(libc::EINTR);
            }
        }
    }

    /// Polls the completion queues of the sockets until there is an event. Returns the time at which it last read the clock, if it has read it.
    fn poll(
        &self,
        members: &[Arc<Socket>],
        seen: u32,
        spin_until: Instant,
        until: Option<Instant>,
    ) -> Option<Instant> {
        let passes = (POLLS / members.len().max(1)).max(1);
        let mut latest = None;
        loop {
            // Reading the clock takes as long as polling one socket.
            for _ in 0..passes {
                let mut polled = false;
                for member in members {
                    polled |= member.spin();
                }
                if self.pushed.load(Acquire) != seen {
                    return latest;
                }
                // If no socket was polled, other threads hold the locks of the sockets, and a pause lets them proceed. A pause after
                // every pass would make polling slower by a tenth.
                if !polled {
                    std::hint::spin_loop();
                }
            }
            // Events that were added to other queues.
            raise_signals();
            let now = Instant::now();
            latest = Some(now);
            if now >= spin_until || until.is_some_and(|until| now >= until) {
                return latest;
            }
        }
    }

    fn take(&self, state: &mut State, into: &mut [Event]) -> usize {
        let mut count = 0;
        for to in into {
            let Some(event) = state.events.pop_front() else {
                break;
            };
            *to = event;
            count += 1;
        }
        self.release(count);
        if let Some(fd) = state.eventfd
            && state.events.is_empty()
            && count > 0
        {
            let mut counter = 0u64;
            // SAFETY: eight bytes are written to a variable of that size.
            unsafe { libc::read(fd, (&raw mut counter).cast::<c_void>(), 8) };
        }
        count
    }

    fn futex(&self, operation: c_int, value: u32, timeout: Option<Duration>) -> Result<(), c_int> {
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: timeout.as_secs().min(1 << 30).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), |t| &raw const *t);
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word and the time are live until the call returns.
        let result = unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.pushed.as_ptr(),
                operation,
                value,
                timeout,
            )
        };
        if result < 0 {
            Err(crate::errno())
        } else {
            Ok(())
        }
    }
}

/// Returns how long the next wait polls before it sleeps, if the last one took `waited`.
fn spin_after(waited: Duration) -> Duration {
    if waited <= SHORT_WAIT {
        SHORT_WAIT
    } else {
        SPIN
    }
}

fn make_readable(fd: c_int) {
    let one = 1u64;
    // SAFETY: eight bytes are read from a variable of that size.
    unsafe { libc::write(fd, (&raw const one).cast::<c_void>(), 8) };
}

impl State {
    /// Returns the sockets whose completion queues a waiting thread polls.
    fn list(&mut self) -> Arc<[Arc<Socket>]> {
        let members = &self.members;
        let make = || members.values().cloned().collect();
        Arc::clone(self.list.get_or_insert_with(make))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_returns_when_the_queue_is_deleted() {
        for wait in [Wait::Adaptive, Wait::Notify] {
            let queue = Queue::new(4);
            queue.lock().wait = wait;
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(queue.delete());
                    queue.close();
                });
                let mut into = [Event {
                    kind: 0,
                    errno: 0,
                    fd: 0,
                    ahandle: 0,
                    body: [0; 6],
                }];
                let (begin, limit) = (Instant::now(), Duration::from_secs(20));
                let result = queue.dequeue(&mut into, 1, Some(limit));
                assert_eq!(result, Err(libc::EBADF));
                assert!(begin.elapsed() < limit, "it returns at the end of its time");
            });
        }
    }

    #[test]
    fn a_wait_that_was_short_lets_the_next_one_poll_longer() {
        let queue = Queue::new(4);
        let event = Event {
            kind: 1,
            errno: 0,
            fd: 0,
            ahandle: 0,
            body: [0; 6],
        };
        let wait = |after: Duration| {
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(after);
                    queue.push(event);
                });
                queue.dequeue(&mut [event], 1, None).unwrap();
            });
            queue.lock().spin
        };
        assert_eq!(wait(SHORT_WAIT * 20), SPIN);
        assert_eq!(spin_after(SHORT_WAIT / 2), SHORT_WAIT);
        // A call that finds an event at once does not change the polling time.
        queue.push(event);
        queue.dequeue(&mut [event], 1, None).unwrap();
        assert_eq!(queue.lock().spin, SPIN);
    }
}
