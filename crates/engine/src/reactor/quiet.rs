//! How long polls have received nothing. This decides when delayed acknowledgements are sent, and when a polling thread
//! lets other threads use its processor.
//!
//! An *idle poll* is a poll that found its completion queue empty. The calling thread then handles the device's sockets and shared
//! memory, and may receive something from them.
//!
//! A program that polls uses its processor fully, even while nothing arrives. If more threads poll than there are processors, the
//! thread with something to do waits until the scheduler ends the time slice of another one, which takes milliseconds. So
//! polls yield (`sched_yield(2)`) when nothing has been received for some time. While messages arrive, polls do not yield,
//! because another thread might use the processor for a whole time slice.

use crate::sync::{AtomicU64, Ordering};

/// The time without a received message after which polls yield, in nanoseconds. It is several round-trip times on one host.
const QUIET: u64 = 50_000;
/// After that time, one in this many idle polls yields.
const YIELD_EACH: u64 = 8;
/// If a yield takes longer than this, in nanoseconds, the processor was used by a thread that computes.
const LONG_YIELD: u64 = 500_000;
/// The longest time for which no thread yields after a long yield, in nanoseconds.
const YIELD_PAUSE_MAX: u64 = 20_000_000;

/// The state of all threads together. Times are in nanoseconds.
#[derive(Debug)]
pub(super) struct Quiet {
    /// The time of the last idle poll that received something.
    received_at: AtomicU64,
    /// The time of the first idle poll since then that received nothing; 0: there was none. It is much later than `received_at` if
    /// the program computed between the two polls.
    polling_since: AtomicU64,
    /// No thread yields before this time.
    yield_at: AtomicU64,
}

impl Quiet {
    pub(super) fn new() -> Self {
        Self {
            received_at: AtomicU64::new(0),
            polling_since: AtomicU64::new(0),
            yield_at: AtomicU64::new(0),
        }
    }

    /// Called when a thread that yielded at `before` runs again at `now`. If the yield took long, another thread has computed
    /// meanwhile: a thread that only waits for messages would have yielded too. No thread yields again until this one has had
    /// as much time, but at most [`YIELD_PAUSE_MAX`].
    pub(super) fn on_yield(&self, before: u64, now: u64) {
        let took = now.saturating_sub(before);
        if took > LONG_YIELD {
            self.yield_at
                .store(now + took.min(YIELD_PAUSE_MAX), Ordering::Relaxed);
        }
    }

    /// Handles the result of an idle poll.
    #[inline]
    pub(super) fn on_poll(&self, found: bool, now: u64) {
        let since = self.polling_since.load(Ordering::Relaxed);
        if found {
            self.received_at.store(now, Ordering::Relaxed);
            if since != 0 {
                self.polling_since.store(0, Ordering::Relaxed);
            }
        } else if since == 0 {
            self.polling_since.store(now.max(1), Ordering::Relaxed);
        }
    }

    /// How long idle polls have received nothing. The time before the first of them does not count.
    #[inline]
    pub(super) fn polled_in_vain(&self, now: u64) -> u64 {
        match self.polling_since.load(Ordering::Relaxed) {
            0 => 0,
            since => now.saturating_sub(since),
        }
    }

    /// Whether the thread should yield after the idle poll with the number `poll`, which has received nothing. A program that
    /// has computed since the last message yields at once: the next message may depend on a thread that waits for the
    /// processor.
    #[inline]
    pub(super) fn should_yield(&self, poll: u64, now: u64) -> bool {
        // Another thread may have stored a later time.
        let quiet = now.saturating_sub(self.received_at.load(Ordering::Relaxed));
        quiet > QUIET
            && poll.is_multiple_of(YIELD_EACH)
            && now >= self.yield_at.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_yield_only_when_nothing_has_arrived_for_some_time() {
        let quiet = Quiet::new();
        let yields = |polls: u64, now: u64| {
            let yields = (0..polls).filter(|&poll| quiet.should_yield(poll, now));
            yields.count()
        };
        quiet.on_poll(true, 1_000_000);
        assert_eq!(yields(80, 1_000_000 + QUIET), 0);
        assert_eq!(yields(80, 1_000_001 + QUIET), 10);
        // A received message ends the quiet time.
        quiet.on_poll(true, 2_000_000);
        assert_eq!(yields(80, 2_000_000 + QUIET), 0);
        // A thread whose poll began before another thread received something does not yield.
        assert_eq!(yields(80, 1_900_000), 0);
    }

    #[test]
    fn the_time_of_polls_begins_with_the_first_one_that_receives_nothing() {
        let quiet = Quiet::new();
        quiet.on_poll(true, 1_000_000);
        assert_eq!(quiet.polled_in_vain(1_500_000), 0);
        quiet.on_poll(false, 2_000_000);
        quiet.on_poll(false, 2_000_500);
        assert_eq!(quiet.polled_in_vain(2_000_700), 700);
        quiet.on_poll(true, 2_000_800);
        assert_eq!(quiet.polled_in_vain(2_000_900), 0);
    }
    #[test]
    fn after_a_long_yield_polls_keep_the_processor_for_as_long() {
        let quiet = Quiet::new();
        let now = 10 * QUIET;
        quiet.on_yield(now, now + LONG_YIELD);
        assert!(quiet.should_yield(0, now + LONG_YIELD));
        let long = 6 * LONG_YIELD;
        quiet.on_yield(now, now + long);
        assert!(!quiet.should_yield(0, now + 2 * long - 1));
        assert!(quiet.should_yield(0, now + 2 * long));
        quiet.on_yield(now, now + 2 * YIELD_PAUSE_MAX);
        assert!(quiet.should_yield(0, now + 3 * YIELD_PAUSE_MAX));
    }
}
