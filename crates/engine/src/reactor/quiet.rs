//! Yielding: when a polling thread lets other threads use its processor.
//!
//! A program that polls uses its processor fully, even while nothing arrives. If more threads poll than there are processors, the
//! thread with something to do waits until the scheduler ends the time slice of another one, which takes milliseconds. So
//! polls yield after a number of idle polls that have received nothing. While messages arrive they do not: a yield is a system
//! call, and another thread may then use the processor for a time slice.

use crate::sync::{AtomicU64, Ordering};

/// Number of idle polls without a received message after which polls yield. It is more than between two messages of a ping-pong:
/// such a poll takes 0.1 µs with polled memory, and 0.3 µs with sockets.
const QUIET_POLLS: u64 = 64;
/// After that, one of this number of idle polls yields.
const YIELD_EACH: u64 = 8;

/// The state of all threads together.
#[derive(Debug)]
pub(super) struct Quiet {
    /// The number of idle polls before the last one that received something.
    found_at: AtomicU64,
}

impl Quiet {
    pub(super) fn new() -> Self {
        Self {
            found_at: AtomicU64::new(0),
        }
    }

    /// Handles the result of an idle poll; `idle_polls` is the number of those before it. Returns whether the thread
    /// should yield.
    #[inline]
    pub(super) fn on_poll(&self, idle_polls: u64, found: bool) -> bool {
        if found {
            self.found_at.store(idle_polls, Ordering::Relaxed);
            return false;
        }
        // Another thread may have stored a larger number.
        let quiet = idle_polls.saturating_sub(self.found_at.load(Ordering::Relaxed));
        quiet > QUIET_POLLS && quiet.is_multiple_of(YIELD_EACH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_yield_only_when_nothing_has_arrived_for_some_time() {
        let quiet = Quiet::new();
        let yields = |polls: std::ops::Range<u64>| {
            let yields = polls.filter(|&poll| quiet.on_poll(poll, false));
            yields.collect::<Vec<u64>>()
        };
        assert_eq!(yields(0..65), []);
        assert_eq!(yields(65..90), [72, 80, 88]);
        // A received message ends the quiet time.
        assert!(!quiet.on_poll(100, true));
        assert_eq!(yields(101..165), []);
        assert_eq!(yields(165..175), [172]);
        // A thread whose poll began before another thread received something does not yield.
        assert!(!quiet.on_poll(1000, true));
        assert_eq!(yields(900..1000), []);
    }
}
