//! Whether arming a completion queue ends the lease.
//!
//! While a *lease* runs ([`super::lease`]), threads that poll completion queues handle the sockets, and the worker sleeps.
//! A thread that arms a completion queue and then sleeps in its own `poll` or `epoll_wait` handles no sockets meanwhile.
//! If the lease went on, the worker would receive the completion only at the end of the lease. So arming ends the
//! lease and wakes the worker. There are two exceptions, because waking the worker costs more than a message:
//!
//! - Another thread polls at that time ([`Pollers`]), and handles the sockets. Otherwise that thread and the worker
//!   would take the sockets from each other at every arming.
//! - The thread has not slept after its last armings ([`Armings`]), because an event was already there each time. The
//!   lease then ends by itself if the thread sleeps after all.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A thread that has not renewed the lease for this number of nanoseconds counts as not polling. A thread that polls without a
/// pause renews it every 0.7 ms.
const POLLED_WITHIN: u64 = 1_000_000;
/// Several threads poll if the lease was renewed by another thread than before twice within this number of nanoseconds.
const CHANGED_WITHIN: u64 = 10_000_000;
/// After this number of consecutive armings without sleep, arming does not end the lease.
const SLEEPLESS: u8 = 4;

/// The two threads that have renewed the lease last by polling.
///
/// The fields are independent atomics. If two threads change them at the same time, an entry may have the time of the
/// other thread. The only effect is that one arming wrongly ends the lease, or wrongly does not.
#[derive(Debug)]
pub(super) struct Pollers {
    /// Numbers of the threads; 0: none.
    threads: [AtomicUsize; 2],
    /// When they have renewed the lease.
    at: [AtomicU64; 2],
    /// When the lease was last renewed by another thread than before, and the time before that.
    changed: [AtomicU64; 2],
}

impl Pollers {
    pub(super) fn new() -> Self {
        Self {
            threads: [AtomicUsize::new(0), AtomicUsize::new(0)],
            at: [AtomicU64::new(0), AtomicU64::new(0)],
            changed: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    /// Called when the poll of a thread has renewed the lease.
    pub(super) fn on_renewal(&self, thread: usize, t: u64) {
        let [last, before] = &self.threads;
        let [last_at, before_at] = &self.at;
        let was = last.load(Ordering::Relaxed);
        if was != thread {
            before.store(was, Ordering::Relaxed);
            before_at.store(last_at.load(Ordering::Relaxed), Ordering::Relaxed);
            last.store(thread, Ordering::Relaxed);
            let [changed, changed_before] = &self.changed;
            changed_before.store(changed.load(Ordering::Relaxed), Ordering::Relaxed);
            changed.store(t, Ordering::Relaxed);
        }
        last_at.store(t, Ordering::Relaxed);
    }

    /// Whether several threads poll. A single change to another thread does not count, because a program often uses one thread after
    /// another; but the very first renewal is a change too. While two threads poll, each renewal has the same chance of being made
    /// by either.
    pub(super) fn are_several(&self, t: u64) -> bool {
        self.changed.iter().all(|at| {
            let at = at.load(Ordering::Relaxed);
            at != 0 && t < at + CHANGED_WITHIN
        })
    }

    /// Called when a thread is about to sleep, after which it no longer counts as polling. Returns whether another thread polls.
    pub(super) fn on_sleep(&self, thread: usize, t: u64) -> bool {
        let mut others = false;
        for (other, at) in self.threads.iter().zip(&self.at) {
            let other = other.load(Ordering::Relaxed);
            if other == thread {
                at.store(0, Ordering::Relaxed);
            } else if other != 0 {
                let at = at.load(Ordering::Relaxed);
                others |= at != 0 && t < at + POLLED_WITHIN;
            }
        }
        others
    }
}

/// The last armings of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Armings {
    /// How often the thread had slept at the last arming.
    sleeps: u64,
    /// The number of consecutive armings between which the thread did not sleep, up to [`SLEEPLESS`].
    sleepless: u8,
}

impl Armings {
    pub(super) const fn new() -> Self {
        Self {
            sleeps: 0,
            sleepless: 0,
        }
    }

    /// Called when the thread arms a completion queue. `sleeps`: how often the thread has slept. Returns whether it is
    /// expected to sleep now.
    pub(super) fn will_sleep(&mut self, sleeps: u64) -> bool {
        self.sleepless = if sleeps == self.sleeps {
            SLEEPLESS.min(self.sleepless + 1)
        } else {
            0
        };
        self.sleeps = sleeps;
        self.sleepless < SLEEPLESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 5 * POLLED_WITHIN;

    #[test]
    fn a_thread_that_polls_alone_has_no_other() {
        let pollers = Pollers::new();
        assert!(!pollers.on_sleep(1, START));
        pollers.on_renewal(1, START);
        assert!(!pollers.on_sleep(1, START + 1));
    }

    #[test]
    fn another_thread_counts_while_it_polls() {
        let pollers = Pollers::new();
        pollers.on_renewal(1, START);
        pollers.on_renewal(2, START + 1);
        assert!(pollers.on_sleep(2, START + 2));
        assert!(pollers.on_sleep(3, START + 2));
        assert!(!pollers.on_sleep(2, START + POLLED_WITHIN));
        pollers.on_renewal(1, START + POLLED_WITHIN);
        assert!(pollers.on_sleep(2, START + POLLED_WITHIN));
    }

    #[test]
    fn two_threads_are_several_while_both_poll() {
        let pollers = Pollers::new();
        let start = 2 * CHANGED_WITHIN;
        pollers.on_renewal(1, start - CHANGED_WITHIN);
        pollers.on_renewal(1, start);
        pollers.on_renewal(2, start + 1);
        assert!(!pollers.are_several(start + 2), "one after the other");
        pollers.on_renewal(2, start + 2);
        pollers.on_renewal(1, start + 3);
        assert!(pollers.are_several(start + 4));
        for n in 0..100 {
            pollers.on_renewal(1, start + 4 + n);
        }
        assert!(pollers.are_several(start + CHANGED_WITHIN));
        assert!(!pollers.are_several(start + 1 + CHANGED_WITHIN));
    }

    #[test]
    fn of_two_threads_that_both_sleep_the_second_ends_the_lease() {
        let pollers = Pollers::new();
        pollers.on_renewal(1, START);
        pollers.on_renewal(2, START);
        assert!(pollers.on_sleep(1, START + 1));
        assert!(!pollers.on_sleep(2, START + 2));
    }

    #[test]
    fn a_thread_that_never_sleeps_after_arming_is_expected_not_to_sleep_until_it_does() {
        let mut armings = Armings::new();
        for sleeps in 1..10 {
            assert!(armings.will_sleep(sleeps));
        }
        for _ in 1..SLEEPLESS {
            assert!(armings.will_sleep(9));
        }
        assert!(!armings.will_sleep(9));
        assert!(!armings.will_sleep(9));
        assert!(armings.will_sleep(10));
    }
}
