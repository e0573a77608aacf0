//! Waits of a thread that has sent a request: it may poll for a moment before it sleeps.
//!
//! To wake a thread on another processor can take longer than the answer of the peer. If both ends poll while they wait for each other,
//! no thread has to be woken. Polling is of no use if the peer needs the processor of this thread, and is a waste if the answer takes
//! long. So a thread measures some of its waits, tries to poll if they are neither very short nor long, and continues only while its
//! waits are less than half as long as before. With each failure in succession it tries more seldom.
//!
//! A try succeeds only if the other end tries at the same time, because until then that end has to be woken. So the times at which threads
//! try again are multiples of periods of the host's clock, which are the same for all threads.
//!
//! Only waits after a write are considered: a thread that only receives gains nothing, because the bytes wait for it.

use crate::limits;
use crate::policy;
use crate::sys;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Whether a thread polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Sleeps,
    /// Polls for up to [`limits::SPIN_TRY`] in each wait, so that the peer has time to begin to poll too. The value is the number of
    /// waits so far in this phase.
    Tries(u8),
    Polls,
}

/// What a wait does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Sleep,
    /// Sleeps. The caller passes the duration to [`State::slept`].
    Measure,
    /// Polls for this time, then sleeps. The caller passes the result to [`State::polled`].
    Poll(Duration),
}

/// How the polling of a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polled {
    /// An answer has arrived.
    Found,
    /// No answer has arrived in the time for polls, so this thread has slept after them.
    Nothing,
    /// Another thread has used the processor meanwhile, so this thread has stopped polling and slept.
    Preempted,
}

/// The state of a thread.
#[derive(Debug, Clone, Copy)]
struct State {
    /// The thread has written since its last wait.
    has_written: bool,
    phase: Phase,
    /// The number of waits until the next one is measured.
    skips: u32,
    /// No wait is measured before this time, in milliseconds of the host's clock.
    until: u64,
    /// While the thread sleeps: the number of suitable waits in succession. During the tries: the number of short waits in succession.
    good: u8,
    /// The number of tries without an answer.
    misses: u8,
    /// The number of failures in succession.
    failures: u8,
    /// The sum of the suitable waits while the thread sleeps.
    asleep: Duration,
    /// The number and the sum of the waits of a series, while the thread polls.
    polls: (u32, Duration),
    /// The number and the sum of all waits since the thread began to poll.
    all: (u32, Duration),
}

impl State {
    const NEW: Self = Self {
        has_written: false,
        phase: Phase::Sleeps,
        skips: 0,
        until: 0,
        good: 0,
        misses: 0,
        failures: 0,
        asleep: Duration::ZERO,
        polls: (0, Duration::ZERO),
        all: (0, Duration::ZERO),
    };

    /// `now`: the time in milliseconds of the host's clock.
    fn plan(&mut self, limit: Duration, now: impl FnOnce() -> u64) -> Plan {
        match self.phase {
            Phase::Sleeps if self.skips > 0 => {
                self.skips -= 1;
                Plan::Sleep
            }
            Phase::Sleeps if self.until > 0 && now() < self.until => {
                self.skips = limits::SPIN_SKIPS;
                Plan::Sleep
            }
            Phase::Sleeps => Plan::Measure,
            Phase::Tries(_) => Plan::Poll(limits::SPIN_TRY),
            Phase::Polls => Plan::Poll(limit),
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.good = 0;
        self.misses = 0;
        self.polls = (0, Duration::ZERO);
    }

    /// Returns the mean duration of the suitable waits that were measured while the thread still slept in each wait.
    fn usual(&self) -> Duration {
        self.asleep / u32::from(limits::SPIN_SUITABLE)
    }

    /// Called after a measured wait. `may_poll`: whether there are several processors.
    fn slept(
        &mut self,
        took: Duration,
        may_poll: impl FnOnce() -> bool,
        now: impl FnOnce() -> u64,
    ) {
        if self.good == 0 {
            self.asleep = Duration::ZERO;
        }
        if !(limits::SPIN_LEAST..limits::SPIN_LONGEST).contains(&took) {
            self.good = 0;
            self.skips = limits::SPIN_SKIPS;
            return;
        }
        self.good += 1;
        self.asleep += took;
        if self.good >= limits::SPIN_SUITABLE {
            if may_poll() {
                self.enter(Phase::Tries(0));
            } else {
                self.fail(now);
            }
        }
    }

    /// Called after a wait that was polled.
    fn polled(
        &mut self,
        limit: Duration,
        result: Polled,
        took: Duration,
        now: impl FnOnce() -> u64,
    ) {
        let (n, sum) = self.all;
        self.all = (n.saturating_add(1), sum.saturating_add(took));
        match self.phase {
            Phase::Sleeps => {}
            Phase::Tries(n) => {
                self.phase = Phase::Tries(n + 1);
                self.good = match result {
                    Polled::Found if took <= limit => self.good + 1,
                    _ => 0,
                };
                self.misses += u8::from(result == Polled::Nothing);
                if self.good >= limits::SPIN_GOOD {
                    self.enter(Phase::Polls);
                } else if n + 1 >= limits::SPIN_TRIES
                    || self.misses >= limits::SPIN_MISSES
                    || result == Polled::Preempted
                {
                    self.fail(now);
                }
            }
            Phase::Polls => {
                let (n, sum) = self.polls;
                let (n, sum) = (n + 1, sum + took);
                self.polls = (n, sum);
                // The processor is not free, or the waits of the series take more than half as long as waits took before the polling.
                if result == Polled::Preempted || sum > self.usual() * (limits::SPIN_SERIES / 2) {
                    self.fail(now);
                } else if n >= limits::SPIN_SERIES {
                    self.polls = (0, Duration::ZERO);
                }
            }
        }
    }

    /// Makes the next waits sleep, up to the end of a period. The period grows with the number of failures in succession, and each one is a
    /// multiple of the shorter ones. So a thread that tries seldom does so when those that try often try too.
    fn fail(&mut self, now: impl FnOnce() -> u64) {
        let (n, sum) = std::mem::take(&mut self.all);
        if sum < self.usual().saturating_mul(n) / limits::SPIN_WORTH {
            // Until now the waits were much shorter than before the polling, so the thread tries again soon.
            self.failures = 0;
        } else {
            self.failures = (self.failures + 1).min(limits::SPIN_FAILURES);
        }
        self.enter(Phase::Sleeps);
        let period = limits::SPIN_PERIOD << (2 * self.failures);
        self.until = (now() / period + 1) * period;
    }
}

thread_local! {
    // Without a destructor, because waits also occur while a thread ends.
    static STATE: Cell<State> = const { Cell::new(State::NEW) };
}

/// Called when the thread has written to a stream.
#[inline]
pub fn wrote() {
    STATE.with(|state| {
        state.set(State {
            has_written: true,
            ..state.get()
        });
    });
}

/// Waits by `call(true)`, which may sleep and always returns a result. Before that, `call(false)` may be called several times, which
/// must not sleep and returns `None` if there is no result yet.
pub fn wait<R>(mut call: impl FnMut(bool) -> Option<R>) -> R {
    let mut state = STATE.with(Cell::get);
    let limit = Duration::from_micros(u64::from(policy::settings().spin));
    let plan = if !std::mem::take(&mut state.has_written) || limit.is_zero() {
        Plan::Sleep
    } else {
        state.plan(limit, sys::now_ms)
    };
    let result = match plan {
        Plan::Sleep => None,
        Plan::Measure => {
            let start = Instant::now();
            let result = call(true);
            state.slept(start.elapsed(), || sys::processors() > 1, sys::now_ms);
            result
        }
        Plan::Poll(time) => {
            let start = Instant::now();
            let (result, polled) = poll(&mut call, start, time);
            let result = result.or_else(|| call(true));
            state.polled(limit, polled, start.elapsed(), sys::now_ms);
            result
        }
    };
    // The program's other calls on this thread, in a signal handler, may have changed the state. That does not matter.
    STATE.with(|place| place.set(state));
    if let Some(result) = result {
        return result;
    }
    loop {
        if let Some(result) = call(true) {
            return result;
        }
    }
}

fn poll<R>(
    call: &mut impl FnMut(bool) -> Option<R>,
    start: Instant,
    time: Duration,
) -> (Option<R>, Polled) {
    let mut before = Duration::ZERO;
    loop {
        let result = call(false);
        if result.is_some() {
            return (result, Polled::Found);
        }
        let now = start.elapsed();
        if now.saturating_sub(before) > limits::SPIN_GAP {
            return (None, Polled::Preempted);
        }
        if now > time {
            return (None, Polled::Nothing);
        }
        before = now;
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(20);
    const SLOW: Duration = Duration::from_micros(60);
    const SOON: (Polled, Duration) = (Polled::Found, Duration::from_micros(3));
    const NEVER: (Polled, Duration) = (Polled::Nothing, Duration::from_micros(80));

    /// A thread that waits, and the host's clock.
    struct Thread {
        state: State,
        clock: Duration,
    }

    impl Thread {
        const NEW: Self = Self {
            state: State::NEW,
            clock: Duration::ZERO,
        };

        fn now(&self) -> impl FnOnce() -> u64 + use<> {
            let now = self.clock.as_millis() as u64;
            move || now
        }

        /// Waits once. The wait takes `asleep` if the thread sleeps; otherwise the polls end with `polls`, and the wait takes that
        /// time.
        fn wait(&mut self, plan: Plan, asleep: Duration, polls: (Polled, Duration)) {
            let now = self.now();
            match plan {
                Plan::Sleep => self.clock += asleep,
                Plan::Measure => {
                    self.clock += asleep;
                    self.state.slept(asleep, || true, now);
                }
                Plan::Poll(_) => {
                    self.clock += polls.1;
                    self.state.polled(LIMIT, polls.0, polls.1, now);
                }
            }
        }

        fn plan(&mut self) -> Plan {
            let now = self.now();
            self.state.plan(LIMIT, now)
        }
    }

    /// Waits `n` times, and returns how many of the waits polled; see [`Thread::wait`].
    fn waits(thread: &mut Thread, n: u32, asleep: Duration, polls: (Polled, Duration)) -> u32 {
        let mut polled = 0;
        for _ in 0..n {
            let plan = thread.plan();
            polled += u32::from(matches!(plan, Plan::Poll(_)));
            thread.wait(plan, asleep, polls);
        }
        polled
    }

    /// Two threads that wait for each other. An answer takes 4 µs, and 60 µs more for each end that has to be woken.
    #[test]
    fn two_ends_poll_although_they_have_failed_at_different_times() {
        let mut ends = [Thread::NEW, Thread::NEW];
        for (at, end) in [3, 97].into_iter().zip(&mut ends) {
            // One end has failed often, the other one once.
            end.state.failures = if at == 3 { limits::SPIN_FAILURES } else { 0 };
            end.clock = Duration::from_millis(at);
            let now = end.now();
            end.state.fail(now);
            end.clock = Duration::from_millis(100);
        }
        let mut together = 0;
        for _ in 0..100_000 {
            let [a, b] = &mut ends;
            let plans = [a.plan(), b.plan()];
            let sleepers = plans.iter().filter(|p| !matches!(p, Plan::Poll(_))).count() as u32;
            together += u32::from(sleepers == 0);
            let took = Duration::from_micros(4) + SLOW * sleepers;
            for (plan, end) in plans.into_iter().zip(&mut ends) {
                end.wait(plan, took, (Polled::Found, took));
            }
        }
        assert!(together > 80_000, "both polled in {together} of 100,000");
    }

    #[test]
    fn a_thread_polls_while_its_waits_are_shorter_than_before() {
        let mut thread = Thread::NEW;
        assert!(waits(&mut thread, 1000, SLOW, SOON) > 900);
        assert_eq!(thread.state.phase, Phase::Polls);
        // If one answer in ten is late, nothing changes. If every second answer is late, the polling ends.
        for _ in 0..1000 {
            assert_eq!(waits(&mut thread, 1, SLOW, NEVER), 1);
            assert_eq!(waits(&mut thread, 9, SLOW, SOON), 9);
        }
        let mut polled = 0;
        for _ in 0..100 {
            polled += waits(&mut thread, 1, SLOW, NEVER);
            polled += waits(&mut thread, 1, SLOW, SOON);
        }
        assert!(polled < 150, "{polled}");
    }

    #[test]
    fn a_thread_that_loses_the_processor_now_and_then_polls_most_of_the_time() {
        let mut thread = Thread::NEW;
        let lost = (Polled::Preempted, Duration::from_millis(3));
        let mut polled = 0;
        for _ in 0..100 {
            polled += waits(&mut thread, 500, SLOW, SOON);
            polled += waits(&mut thread, 1, SLOW, lost);
        }
        assert!(polled > 45_000, "{polled} of 50,100 waits polled");
    }

    #[test]
    fn waits_that_are_very_short_or_long_are_not_polled() {
        for asleep in [Duration::from_micros(3), Duration::from_millis(1)] {
            let mut thread = Thread::NEW;
            assert_eq!(waits(&mut thread, 100_000, asleep, SOON), 0);
        }
    }

    #[test]
    fn polls_that_help_little_are_seldom_tried() {
        for polls in [
            NEVER,
            (Polled::Preempted, SLOW),
            (Polled::Found, Duration::from_micros(30)),
        ] {
            let mut thread = Thread::NEW;
            waits(&mut thread, 100_000, SLOW, polls);
            let polled = waits(&mut thread, 100_000, SLOW, polls);
            assert!(polled < 1000, "{polls:?}: {polled} of 100,000 waits polled");
        }
        // The answer arrives while the thread polls, but not much sooner than if it had slept.
        let mut thread = Thread::NEW;
        let (before, now) = (Duration::from_micros(10), Duration::from_micros(7));
        waits(&mut thread, 100_000, before, (Polled::Found, now));
        let polled = waits(&mut thread, 100_000, before, (Polled::Found, now));
        assert!(polled < 1000, "{polled} of 100,000 waits polled");
    }

    #[test]
    fn with_one_processor_no_wait_is_polled() {
        let mut state = State::NEW;
        for now in 0..1000 {
            match state.plan(LIMIT, || now) {
                Plan::Sleep => {}
                Plan::Measure => state.slept(SLOW, || false, || now),
                Plan::Poll(_) => panic!("the wait is polled"),
            }
        }
    }

    #[test]
    fn only_waits_after_a_write_are_polled_and_all_return_a_result() {
        for writes in [false, true] {
            let mut polled = 0;
            for n in 0..200 {
                if writes {
                    wrote();
                }
                let result = wait(|sleeps| {
                    if sleeps {
                        std::thread::sleep(limits::SPIN_LEAST);
                    } else {
                        polled += 1;
                    }
                    sleeps.then_some(n)
                });
                assert_eq!(result, n);
            }
            assert!(writes || polled == 0);
        }
    }
}
