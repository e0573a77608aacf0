//! A single deadline of something that has no socket, for example of datagrams that are sent later.

use std::time::Instant;

use super::sources::Token;

/// The earliest deadline that was set, and the source whose [`Source::timeout`](super::Source::timeout) is called then.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// The source, once it is registered.
    token: Option<Token>,
    at: Option<Instant>,
}

impl Alarm {
    /// Sets the deadline unless an earlier one is set. Returns the source: the caller has to request the deadline for it
    /// from the reactor. `register` registers the source when it is first needed.
    pub(crate) fn set(&mut self, at: Instant, register: impl FnOnce() -> Token) -> Option<Token> {
        if self.at.is_some_and(|earlier| earlier <= at) {
            return None;
        }
        self.at = Some(at);
        Some(*self.token.get_or_insert_with(register))
    }

    /// Called by the source at its deadline.
    pub(crate) fn passed(&mut self, now: Instant) {
        if self.at.is_some_and(|at| at <= now) {
            self.at = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_an_earlier_deadline_replaces_one_that_has_not_passed() {
        let mut alarm = Alarm::default();
        let start = crate::clock::now();
        let at = |ms| start + Duration::from_millis(ms);
        let set = |alarm: &mut Alarm, ms| alarm.set(at(ms), || Token(7)).is_some();
        assert!(set(&mut alarm, 20));
        assert!(!set(&mut alarm, 30));
        assert!(set(&mut alarm, 10));
        alarm.passed(at(9));
        assert!(!set(&mut alarm, 30));
        alarm.passed(at(10));
        assert!(set(&mut alarm, 30));
    }
}
