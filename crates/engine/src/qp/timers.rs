//! Timers of a reliable queue pair.

use std::time::Instant;

/// What a reliable queue pair does at a certain time, in the order in which timers of one time expire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// The peer is dialed again, after a connection attempt that failed.
    Redial,
    /// Posted requests fail, because the peer has to dial and did not.
    PeerDials,
    /// The connection fails, because the peer requested the connection and did not send the first message.
    FirstMessage,
    /// An injected delay ends: until then nothing is sent.
    Delay,
}

impl Timer {
    const ALL: [Self; 4] = [
        Self::Redial,
        Self::PeerDials,
        Self::FirstMessage,
        Self::Delay,
    ];
}

/// When each timer expires.
#[derive(Debug, Default)]
pub(super) struct Timers([Option<Instant>; Timer::ALL.len()]);

impl Timers {
    /// Starts a timer, or changes when it expires.
    pub(super) fn set(&mut self, timer: Timer, at: Instant) {
        if let Some(slot) = self.0.get_mut(timer as usize) {
            *slot = Some(at);
        }
    }

    /// Stops a timer.
    pub(super) fn stop(&mut self, timer: Timer) {
        if let Some(slot) = self.0.get_mut(timer as usize) {
            *slot = None;
        }
    }

    /// When a timer expires; `None` if it does not run.
    #[inline]
    pub(super) fn get(&self, timer: Timer) -> Option<Instant> {
        self.0.get(timer as usize).copied().flatten()
    }

    /// When the first timer expires.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.iter().copied().flatten().min()
    }

    /// Stops the first timer that has expired at `now` and returns it.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<Timer> {
        let expired = Timer::ALL
            .into_iter()
            .find(|timer| self.get(*timer).is_some_and(|at| at <= now))?;
        self.stop(expired);
        Some(expired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn timers_expire_once_and_in_the_order_of_their_list() {
        let now = crate::clock::now();
        let later = now + Duration::from_secs(1);
        let mut timers = Timers::default();
        assert_eq!((timers.next(), timers.take_expired(later)), (None, None));
        timers.set(Timer::Delay, now);
        timers.set(Timer::PeerDials, later);
        timers.set(Timer::Redial, now);
        timers.set(Timer::FirstMessage, later);
        timers.stop(Timer::FirstMessage);
        assert_eq!(timers.next(), Some(now));
        assert_eq!(timers.take_expired(now), Some(Timer::Redial));
        assert_eq!(timers.take_expired(now), Some(Timer::Delay));
        assert_eq!(timers.take_expired(now), None);
        assert_eq!(timers.next(), Some(later));
        assert_eq!(timers.take_expired(later), Some(Timer::PeerDials));
        assert_eq!(timers.take_expired(later), None);
    }
}
