//! The timers of a connection.

use std::time::Instant;

/// A timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// The peer had no receive. Until the timer fires, no request is sent.
    Rnr,
    /// The peer is silent although it has requests to answer. When the timer fires, a Ping is sent.
    Probe,
    /// The peer has left, or cannot be reached. When the timer fires, posted requests fail.
    GiveUp,
}

impl Timer {
    /// All timers.
    pub(super) const ALL: [Self; 3] = [Self::Rnr, Self::Probe, Self::GiveUp];
}

/// The running timers with their times. The time of [`Timer::Probe`] is when the silence of the peer began: when the last bytes
/// arrived, or when the first request without an answer was sent. So only a time has to be stored whenever bytes arrive, and when the
/// timer fires is computed later. The time of each other timer is when it fires.
#[derive(Debug, Default)]
pub(super) struct Timers([Option<Instant>; Timer::ALL.len()]);

#[expect(clippy::indexing_slicing, reason = "one place for each variant")]
impl Timers {
    #[inline]
    pub(super) fn start(&mut self, timer: Timer, at: Instant) {
        self.0[timer as usize] = Some(at);
    }

    #[inline]
    pub(super) fn stop(&mut self, timer: Timer) {
        self.0[timer as usize] = None;
    }

    /// Whether a timer runs.
    #[inline]
    pub(super) fn runs(&self, timer: Timer) -> bool {
        self.0[timer as usize].is_some()
    }

    /// The time of a timer that runs.
    #[inline]
    pub(super) fn get(&self, timer: Timer) -> Option<Instant> {
        self.0[timer as usize]
    }
}
