//! Event queues, from which `exs_qdequeue` takes events, and how threads wait for events.

use crate::lock::lock;
use crate::socket::Socket;
use libc::{c_int, c_void};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
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

/// A flag in the event of a transfer: more events of the same call follow.
pub(crate) const MORE: u64 = 0x200;
/// The time that a thread polls before it sleeps, in the adaptive mode, if events take longer than [`SHORT_WAIT`].
const SPIN: Duration = Duration::from_micros(50);
/// The time that a thread polls if the last wait was not longer than this. Waking a sleeping peer involves four threads and
/// takes some 400 µs in each direction. If both ends stopped polling earlier, both would sleep in every exchange, although an
/// exchange takes 30 µs if both poll.
const SHORT_WAIT: Duration = Duration::from_millis(1);

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
    /// The number of entries that are reserved for the events of calls in progress.
    reserved: usize,
    pub(crate) depth: usize,
    pub(crate) wait: Wait,
    /// The time that the next wait polls, in the adaptive mode.
    spin: Duration,
    /// The signal to send when an event is added to the empty queue.
    pub(crate) signal: Option<c_int>,
    members: FxHashMap<c_int, Arc<Socket>>,
    /// Whether the program has requested the descriptor. Otherwise it is not updated, which saves two system calls for each event.
    has_fd: bool,
}

/// An event queue.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// The number of events added so far, modulo 2^32. Waiting threads use it as a futex.
    pushed: AtomicU32,
    sleepers: AtomicU32,
    /// The descriptor for the program. If `has_fd`, it is readable while there are events.
    eventfd: c_int,
}

impl Queue {
    pub(crate) fn new(depth: usize) -> Result<Self, c_int> {
        // SAFETY: no memory is passed.
        let eventfd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if eventfd < 0 {
            return Err(crate::errno());
        }
        Ok(Self {
            state: Mutex::new(State {
                events: VecDeque::new(),
                reserved: 0,
                depth,
                wait: Wait::Adaptive,
                spin: SHORT_WAIT,
                signal: None,
                members: FxHashMap::default(),
                has_fd: false,
            }),
            pushed: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            eventfd,
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Reserves entries for the events of a call on `socket`.
    pub(crate) fn reserve(&self, socket: &Arc<Socket>, events: usize) -> Result<(), c_int> {
        let mut state = self.lock();
        if state.reserved + state.events.len() + events > state.depth {
            return Err(libc::EAGAIN);
        }
        state.reserved += events;
        state
            .members
            .entry(socket.fd)
            .or_insert_with(|| Arc::clone(socket));
        Ok(())
    }

    /// Releases reserved entries that no event will use.
    pub(crate) fn release(&self, events: usize) {
        let mut state = self.lock();
        state.reserved = state.reserved.saturating_sub(events);
    }

    pub(crate) fn forget(&self, fd: c_int) {
        // If this is the last reference, the socket is dropped after the lock was released, because dropping it may take long.
        let socket = self.lock().members.remove(&fd);
        drop(socket);
    }

    /// Adds the event of a call, for which room was reserved.
    pub(crate) fn push(&self, event: Event) {
        let mut state = self.lock();
        state.reserved = state.reserved.saturating_sub(1);
        self.add(&mut state, event);
    }

    /// Adds an event of a call that will have more events. If an event of the same call is still in the queue, increments its counter
    /// instead.
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
            self.add(&mut state, event);
        }
    }

    fn add(&self, state: &mut State, event: Event) {
        let first = state.events.is_empty();
        state.events.push_back(event);
        if first {
            if state.has_fd {
                self.make_readable();
            }
            if let Some(signal) = state.signal {
                // SAFETY: no memory is passed.
                unsafe { libc::kill(libc::getpid(), signal) };
            }
        }
        self.pushed.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            // This cannot fail, because the word is mapped memory of this process.
            let _ = self.futex(libc::FUTEX_WAKE, i32::MAX.cast_unsigned(), None);
        }
    }

    /// Returns the descriptor for the program.
    pub(crate) fn fd(&self) -> c_int {
        let mut state = self.lock();
        if !state.has_fd {
            state.has_fd = true;
            if !state.events.is_empty() {
                self.make_readable();
            }
        }
        self.eventfd
    }

    fn make_readable(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from a variable of that size.
        unsafe { libc::write(self.eventfd, (&raw const one).cast::<c_void>(), 8) };
    }

    /// Returns whether no call in progress will add an event.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().reserved == 0
    }

    pub(crate) fn waiting(&self) -> usize {
        self.lock().events.len()
    }

    /// Waits until there are `least` events or the deadline is reached. Removes and returns up to `into.len()` events.
    pub(crate) fn dequeue(
        &self,
        into: &mut [Event],
        least: usize,
        until: Option<Instant>,
    ) -> Result<usize, c_int> {
        let mut began = None;
        loop {
            let seen = self.pushed.load(SeqCst);
            let mut state = self.lock();
            let late = until.is_some_and(|until| Instant::now() >= until);
            if state.events.len() >= least || (late && began.is_some()) {
                if let Some(began) = began {
                    state.spin = spin_after(Instant::now().saturating_duration_since(began));
                }
                return Ok(self.take(&mut state, into));
            }
            let wait = state.wait;
            let members: Vec<_> = if wait == Wait::Notify {
                Vec::new()
            } else {
                state.members.values().cloned().collect()
            };
            let spin = state.spin;
            drop(state);
            let now = Instant::now();
            let spin_until = *began.get_or_insert(now) + spin;
            let spins = wait == Wait::BusyPoll || (wait == Wait::Adaptive && now < spin_until);
            if spins && !members.is_empty() {
                self.poll(
                    &members,
                    seen,
                    if wait == Wait::BusyPoll {
                        now + SPIN
                    } else {
                        spin_until
                    },
                    until,
                );
                continue;
            }
            for member in &members {
                member.stop_polling();
            }
            let timeout = until.map(|until| until.saturating_duration_since(now));
            self.sleepers.fetch_add(1, SeqCst);
            let result = self.futex(libc::FUTEX_WAIT, seen, timeout);
            self.sleepers.fetch_sub(1, SeqCst);
            if result == Err(libc::EINTR) {
                return Err(libc::EINTR);
            }
        }
    }

    /// Polls the completion queues of the sockets until there is an event.
    fn poll(
        &self,
        members: &[Arc<Socket>],
        seen: u32,
        spin_until: Instant,
        until: Option<Instant>,
    ) {
        let is_over = |until: Instant| Instant::now() >= until;
        let passes = match until {
            Some(until) if is_over(until) => 1,
            _ => (8 / members.len().max(1)).max(1),
        };
        loop {
            // Reading the clock takes as long as polling one socket.
            for _ in 0..passes {
                for member in members {
                    member.spin();
                }
                if self.pushed.load(SeqCst) != seen {
                    return;
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if now >= spin_until || until.is_some_and(|until| now >= until) {
                return;
            }
        }
    }

    fn take(&self, state: &mut State, into: &mut [Event]) -> usize {
        let count = state.events.len().min(into.len());
        for (to, event) in into.iter_mut().zip(state.events.drain(..count)) {
            *to = event;
        }
        if state.has_fd && state.events.is_empty() && count > 0 {
            let mut counter = 0u64;
            // SAFETY: eight bytes are written to a variable of that size.
            unsafe { libc::read(self.eventfd, (&raw mut counter).cast::<c_void>(), 8) };
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

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the queue owns the descriptor.
        unsafe { libc::close(self.eventfd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_was_short_lets_the_next_one_poll_longer() {
        let queue = Queue::new(4).unwrap();
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
