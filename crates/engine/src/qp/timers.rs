//! Timers of a reliable queue pair.

use std::time::Instant;

/// The timers of a reliable queue pair. Timers that have expired when they are checked are handled in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// Connects to the peer again, after a failed attempt.
    Redial,
    /// Fails posted requests, because the peer has to connect and did not.
    PeerDials,
    /// Fails the connection, because the peer requested it and did not send the first message.
    FirstMessage,
    /// Ends a connection that is closed, but whose last bytes cannot be sent, because the peer does not read.
    Close,
    /// Tries once more to wake the peer that shares memory.
    Wake,
    /// Ends the stream of a queue pair on a trunk, when the peer has closed the queue pair's own connection but has not left the trunk.
    OwnClosed,
    /// Ends an injected delay, during which nothing is sent.
    Delay,
}

impl Timer {
    const ALL: [Self; 7] = [
        Self::Redial,
        Self::PeerDials,
        Self::FirstMessage,
        Self::Close,
        Self::Wake,
        Self::OwnClosed,
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

    /// Stops a timer that has expired at `now` and returns it: the first in the order of [`Timer`], if there are several.
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
