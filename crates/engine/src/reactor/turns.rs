//! Turns: which idle polls read the clock and handle what depends on the time.
//!
//! An *idle poll* is a poll that found its completion queue empty. If a peer of the same host uses shared memory, such a poll looks
//! for its messages there, which takes little time; reading the clock takes as long as everything else together. So
//! only one of several idle polls of a busy loop makes a *turn*: it reads the clock, renews the lease (the time for which the polling
//! thread handles the sockets in place of the device's thread), runs deadlines, and checks the sockets if a check is due. The others only
//! look at the memory. If polls follow each other slowly, each of them makes a turn, because the lease would end otherwise.

use std::ops::RangeInclusive;

use crate::sync::{AtomicU64, Ordering};

/// One of this number of idle polls of a busy loop makes a turn. The numbers of polls after which the sockets are
/// checked, and after which a quiet thread yields, are multiples of it.
const TURN_EACH: u64 = 4;
/// The longest time between two turns of a busy loop, in nanoseconds.
const CLOSE: u64 = 2_000;
/// While shared memory is polled and the sockets have nothing to receive, the time between two checks of the sockets, in
/// nanoseconds: a fraction of the time since a socket had something, within these limits. A check is a system call, and a message that
/// arrives in memory meanwhile is received only after it. A message that arrives at a socket waits for the next check.
const SOCKETS_EACH: RangeInclusive<u64> = 5_000..=20_000;
const SOCKETS_FRACTION: u64 = 256;
/// How long the sockets are checked more often after one of them had something to receive, in nanoseconds.
const SOCKETS_BUSY: u64 = 1_000_000;

/// The longest time between two checks of the sockets while memory is polled slowly, in nanoseconds.
const SOCKETS_LATE: u64 = 100_000;

/// The state of all threads together. Times are in nanoseconds.
#[derive(Debug)]
pub(super) struct Turns {
    /// The time of the last turn.
    last: AtomicU64,
    /// The time between the last two turns.
    apart: AtomicU64,
    /// The time of the last check of the sockets, and of the last one that found something.
    checked_sockets: AtomicU64,
    found_in_sockets: AtomicU64,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            last: AtomicU64::new(0),
            apart: AtomicU64::new(u64::MAX),
            checked_sockets: AtomicU64::new(0),
            found_in_sockets: AtomicU64::new(0),
        }
    }

    /// Whether to check the sockets at `now`, while memory is polled.
    #[inline]
    pub(super) fn sockets_are_due(&self, now: u64) -> bool {
        let since = |time: &AtomicU64| now.saturating_sub(time.load(Ordering::Relaxed));
        let quiet = since(&self.found_in_sockets);
        let each = (quiet / SOCKETS_FRACTION).clamp(*SOCKETS_EACH.start(), *SOCKETS_EACH.end());
        quiet < SOCKETS_BUSY || since(&self.checked_sockets) >= each
    }

    /// Whether the sockets have to be checked at `now`, however few polls there were.
    #[inline]
    pub(super) fn sockets_are_late(&self, now: u64) -> bool {
        now.saturating_sub(self.checked_sockets.load(Ordering::Relaxed)) >= SOCKETS_LATE
    }

    /// Records a check of the sockets at `now`. `found`: whether one had something.
    #[inline]
    pub(super) fn on_sockets(&self, found: bool, now: u64) {
        self.checked_sockets.store(now, Ordering::Relaxed);
        if found {
            self.found_in_sockets.store(now, Ordering::Relaxed);
        }
    }

    /// Whether the idle poll with the number `poll` needs no turn.
    #[inline]
    pub(super) fn may_skip(&self, poll: u64) -> bool {
        !poll.is_multiple_of(TURN_EACH) && self.apart.load(Ordering::Relaxed) < CLOSE
    }

    /// Records a turn at `now`.
    #[inline]
    pub(super) fn on_turn(&self, now: u64) {
        let last = self.last.load(Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
        // Another thread may have stored a later time.
        let apart = now.saturating_sub(last);
        self.apart.store(apart, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Polls 80 times, `apart` nanoseconds from each other. Returns the number of turns.
    fn turns(turns: &Turns, from: u64, apart: u64) -> usize {
        (0..80)
            .filter(|&poll| {
                let makes_one = !turns.may_skip(poll);
                if makes_one {
                    turns.on_turn(from + poll * apart);
                }
                makes_one
            })
            .count()
    }

    #[test]
    fn sockets_are_checked_often_only_while_they_are_busy() {
        let turns = Turns::new();
        let checks = |from: u64, found: bool| {
            let times = (from..from + 2 * SOCKETS_BUSY).step_by(500);
            let due = times.filter(|&t| {
                let due = turns.sockets_are_due(t);
                if due {
                    turns.on_sockets(found, t);
                }
                due
            });
            due.count()
        };
        let start = 10 * SOCKETS_BUSY;
        // One each 20 µs, because no socket had anything for long.
        assert_eq!(checks(start, false), 100);
        assert_eq!(checks(start + 2 * SOCKETS_BUSY, true), 4_000);
        // In the first half of this time, the last socket that had something is less than `SOCKETS_BUSY` ago. In the second half the
        // time between two checks grows from 5 to 8 µs.
        assert_eq!(checks(start + 4 * SOCKETS_BUSY, false), 2_000 - 1 + 165);
        let last = start + 6 * SOCKETS_BUSY;
        turns.on_sockets(false, last);
        assert!(!turns.sockets_are_late(last + SOCKETS_LATE - 1));
        assert!(turns.sockets_are_late(last + SOCKETS_LATE));
    }

    #[test]
    fn a_busy_loop_makes_few_turns_and_a_slow_one_makes_all() {
        let state = Turns::new();
        let busy = turns(&state, 1_000_000, 100);
        assert!((20..=24).contains(&busy), "{busy}");
        // The first slow polls may still be skipped, until the next turn.
        let slow = turns(&state, 2_000_000, CLOSE);
        assert!(slow >= 77, "{slow}");
        assert_eq!(turns(&state, 3_000_000, CLOSE), 80);
    }
}
