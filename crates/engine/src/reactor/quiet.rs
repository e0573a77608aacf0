//! Yielding: when a polling thread lets other threads use its processor.
//!
//! A program that polls uses its processor fully, even while nothing arrives. If more threads poll than there are processors, the
//! thread with something to do waits until the scheduler ends the time slice of another one, which takes milliseconds. So
//! polls yield when nothing has been received for some time. While messages arrive they do not: another thread may then use
//! the processor for a whole time slice.

use crate::sync::{AtomicU64, Ordering};

/// The time without a received message after which polls yield. It is several times that of a round trip on one host.
const QUIET: u64 = 50_000;
/// After that, one of this number of idle polls yields.
const YIELD_EACH: u64 = 8;

/// The state of all threads together. Times are in nanoseconds.
#[derive(Debug)]
pub(super) struct Quiet {
    /// The time of the last idle poll that received something.
    found_at: AtomicU64,
}

impl Quiet {
    pub(super) fn new() -> Self {
        Self {
            found_at: AtomicU64::new(0),
        }
    }

    /// Handles the result of the idle poll with the number `poll`. Returns whether the thread should yield.
    #[inline]
    pub(super) fn on_poll(&self, poll: u64, found: bool, now: u64) -> bool {
        if found {
            self.found_at.store(now, Ordering::Relaxed);
            return false;
        }
        // Another thread may have stored a later time.
        let quiet = now.saturating_sub(self.found_at.load(Ordering::Relaxed));
        quiet > QUIET && poll.is_multiple_of(YIELD_EACH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_yield_only_when_nothing_has_arrived_for_some_time() {
        let quiet = Quiet::new();
        let yields = |polls: u64, now: u64| {
            let yields = (0..polls).filter(|&poll| quiet.on_poll(poll, false, now));
            yields.count()
        };
        assert!(!quiet.on_poll(0, true, 1_000_000));
        assert_eq!(yields(80, 1_000_000 + QUIET), 0);
        assert_eq!(yields(80, 1_000_001 + QUIET), 10);
        // A received message ends the quiet time.
        assert!(!quiet.on_poll(0, true, 2_000_000));
        assert_eq!(yields(80, 2_000_000 + QUIET), 0);
        // A thread whose poll began before another thread received something does not yield.
        assert_eq!(yields(80, 1_900_000), 0);
    }
}
