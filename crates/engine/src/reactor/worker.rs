//! The worker thread: handles sockets and deadlines while no thread polls.
//!
//! A thread that polls a completion queue handles the sockets itself, and has a *lease* for it: until the lease ends, the worker
//! sleeps (`lease.rs`).

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::{
    Reactor, TOKEN_DEADLINE, TOKEN_LEASE, TOKEN_SOCKETS, TOKEN_WAKE, Token, drain_counter,
    set_timer,
};
use crate::clock;
use crate::sys::thread;

/// The name of the worker thread.
pub(crate) const THREAD_NAME: &str = "anywarp";
/// Size of the worker's stack in bytes.
const STACK_BYTES: usize = 512 * 1024;
/// Largest number of rounds in which the worker handles ready sockets or memory before it waits in epoll again. Each round also checks the
/// deadlines.
pub(super) const ROUNDS_MAX: usize = 64;
/// How long the worker spins (checks sockets and memory in a loop) before it sleeps. Waking a sleeping worker takes longer, and
/// costs the sender time too.
const SPIN_FOR: Duration = Duration::from_micros(25);
/// The time between two checks of a spinning worker. Data that arrives within one interval is received, and
/// acknowledged, together.
const SPIN_PAUSE: Duration = Duration::from_nanos(1000);

/// How long the worker holds acknowledgements back if an answer may carry them ([`AckHold`]).
pub(super) const HOLD_FOR: Duration = Duration::from_micros(5);

/// Decides whether the worker holds acknowledgements back for [`HOLD_FOR`], while it spins.
///
/// A program may wait for a Write of the peer by reading the Write's target in a loop, and then answers within a microsecond of the
/// Write's arrival. If the worker sent the acknowledgement alone, the peer's program would get the completion of its Write before the
/// answer, and would wait for the answer in the same way. While a program reads its memory in a loop, no thread of its process polls a
/// completion queue, and the worker of that process sleeps until the lease of the last poll ends. So each message would wait at its
/// receiver for the end of a lease. The worker recognizes such a program by polls that found completions since the last
/// acknowledgements, because the program polls the completions of its own Writes. A passive target polls no completions, so the
/// acknowledgements for its peer are sent at once.
#[derive(Debug, Default)]
pub(super) struct AckHold {
    /// The number of polls that had found completions when acknowledgements were sent last.
    polls: u64,
}

impl AckHold {
    /// Called before acknowledgements are sent. `polls`: the number of polls of the process that found completions.
    pub(super) fn expects_answer(&mut self, polls: u64) -> bool {
        std::mem::replace(&mut self.polls, polls) != polls
    }
}

/// Decides whether the worker spins before it sleeps. Each spin during which data arrives earns credit for further
/// spins. If the sender shares the worker's processor, or sends rarely, no data arrives during spins, and without
/// credit the worker spins only from time to time.
#[derive(Debug)]
pub(super) struct SpinBudget {
    spin_for: Duration,
    credit: u32,
    /// How often the worker had no credit when it was about to sleep. Each 64th time it spins nevertheless.
    sleeps: u32,
}

impl SpinBudget {
    /// The largest credit. Five spins in which nothing arrives use it up.
    const CREDIT_MAX: u32 = 16;
    /// Credit for each spin in which something arrived.
    const CREDIT_PER_HIT: u32 = 2;
    /// Without credit, the worker spins once in this number of sleeps.
    const TRY_EACH: u32 = 64;

    pub(super) fn new(spin_for: Duration) -> Self {
        Self {
            spin_for,
            credit: 0,
            sleeps: 0,
        }
    }

    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn with_credit(spin_for: Duration, credit: u32) -> Self {
        Self {
            credit,
            ..Self::new(spin_for)
        }
    }

    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    /// Whether the worker spins, now that it has nothing to do.
    fn may_spin(&mut self) -> bool {
        if self.credit > 0 {
            return true;
        }
        self.sleeps = self.sleeps.wrapping_add(1);
        self.sleeps.is_multiple_of(Self::TRY_EACH)
    }

    /// Records a spin. `hit`: data arrived before its end. Later arrivals do not count, because another thread,
    /// perhaps the sender, may have used the processor in between.
    fn record(&mut self, hit: bool) {
        self.credit = if hit {
            Self::CREDIT_MAX.min(self.credit + Self::CREDIT_PER_HIT)
        } else {
            self.credit / 2
        };
    }
}

/// Starts the worker of a reactor. The worker begins its loop when `take` delivers the reactor, and ends if the sender of the
/// channel is dropped without sending one. `on_panic` receives the payload of a panic.
pub(crate) fn spawn(
    take: std::sync::mpsc::Receiver<&'static Reactor>,
    on_panic: fn(&(dyn Any + Send)),
) -> io::Result<()> {
    std::thread::Builder::new()
        .name(THREAD_NAME.into())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            thread::block_signals();
            thread::mark_worker();
            if let Ok(reactor) = take.recv() {
                reactor.work(on_panic);
            }
        })?;
    Ok(())
}

impl Reactor {
    /// The worker's loop. A panic in it makes the device unusable, but the process continues.
    fn work(&self, on_panic: fn(&(dyn Any + Send))) {
        let (mut spin, mut hold) = (SpinBudget::new(SPIN_FOR), AckHold::default());
        loop {
            let work = AssertUnwindSafe(|| self.sleep_and_work(&mut spin, &mut hold));
            if let Err(payload) = catch_unwind(work) {
                on_panic(&*payload);
                // Dropping the payload of a panic may panic again.
                let _leaked = std::mem::ManuallyDrop::new(payload);
            }
        }
    }

    /// Sleeps until the worker is needed, and does its work.
    pub(super) fn sleep_and_work(&self, spin: &mut SpinBudget, hold: &mut AckHold) {
        let mut events: [epoll::Event; 8] = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        let n = epoll::wait(self.worker.get(), events.as_mut_slice(), None).unwrap_or(0);
        self.count_wake();
        let mut lease_timer_fired = false;
        for event in events.iter().take(n) {
            match event.data.u64() {
                TOKEN_LEASE => {
                    drain_counter(&self.lease_timer);
                    lease_timer_fired = true;
                }
                TOKEN_DEADLINE => {
                    drain_counter(&self.deadline_timer);
                    self.run_late_deadlines(self.epoch.nanos(clock::now()));
                }
                TOKEN_WAKE => drain_counter(&self.wake),
                _ => {}
            }
        }
        let (mut rounds, mut hold_until, mut spin_until) = (0, None, None);
        while rounds < ROUNDS_MAX {
            let now = clock::now();
            let t = self.epoch.nanos(now);
            if let Some(left) = self.lease.on_wake(t) {
                // A thread polls: the lease timer wakes the worker when the lease ends.
                if lease_timer_fired {
                    // Two leases overlapped, and the timer of the shorter one was set last.
                    set_timer(&self.lease_timer, left);
                }
                return;
            }
            self.hot.set(&self.sources, Token::NONE);
            self.memory_end_sleep();
            let from_memory = self.poll_memory(now, |memory| memory.has_input());
            if self.poll_all(now) || from_memory {
                rounds += 1;
                if let Some(until) = spin_until.take() {
                    spin.record(now < until);
                }
                if self.is_delayed_too_long(t) {
                    self.flush_delayed(now);
                }
                if self.deadlines.is_due(t) {
                    self.run_deadlines();
                }
                continue;
            }
            if rounds > 0 && spin_until.is_none() && hold_until.is_none() {
                let expects = hold.expects_answer(self.lease.successful_polls());
                hold_until = Some(if expects { now + HOLD_FOR } else { now });
            }
            match spin_until {
                None if hold_until.is_some_and(|until| now < until) => {}
                None => {
                    hold_until = None;
                    self.flush_delayed(now);
                    if rounds == 0 || self.is_broken() || !spin.may_spin() {
                        break;
                    }
                    spin_until = Some(now + spin.spin_for);
                }
                Some(until) if now >= until => {
                    spin.record(false);
                    break;
                }
                Some(_) => {}
            }
            if self.deadlines.is_due(t) {
                self.run_deadlines();
            }
            // The loop does not yield: a thread that yields loses its whole time slice if other threads want the
            // processor.
            let next = now + SPIN_PAUSE;
            while clock::now() < next {
                std::hint::spin_loop();
            }
        }
        if rounds >= ROUNDS_MAX {
            // The peer may wait for a delayed acknowledgement, and send nothing that would wake the worker.
            self.flush_delayed(clock::now());
        }
        if self.memory_prepare_sleep() {
            // An event arrived before the worker slept: wake up at once.
            self.wake();
        }
        if self.is_broken() {
            // The sockets of a broken device are not read, so they would wake the worker forever.
            return;
        }
        let _ = epoll::modify(
            self.worker.get(),
            self.sockets.get(),
            EventData::new_u64(TOKEN_SOCKETS),
            EventFlags::IN | EventFlags::ONESHOT,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worker_spins_as_long_as_data_arrives_during_spins() {
        let mut spin = SpinBudget::new(SPIN_FOR);
        let tries = |spin: &mut SpinBudget| {
            (0..2 * SpinBudget::TRY_EACH)
                .filter(|_| spin.may_spin())
                .count()
        };
        assert_eq!(tries(&mut spin), 2);
        spin.record(true);
        assert!(spin.may_spin());
        for _ in 0..100 {
            spin.record(true);
        }
        for _ in 0..5 {
            assert!(spin.may_spin());
            spin.record(false);
        }
        assert_eq!(tries(&mut spin), 2);
    }
}
