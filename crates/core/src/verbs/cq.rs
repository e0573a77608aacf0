//! Completion queues: where finished requests wait to be polled.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::wc::{Completion, Status};

/// Told when an armed completion queue gets the entry it was armed for, or overflows.
pub trait Notify: Send + Sync {
    /// An entry of the asked kind arrived; the queue is no longer armed.
    fn completion(&self);
    /// An entry found no room; the queue is broken from now on.
    fn overflow(&self);
}

/// For which entries a completion queue raises an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

struct State {
    entries: VecDeque<Completion>,
    capacity: usize,
    armed: Armed,
    /// An event was raised and nothing polled since: who hears of it will poll.
    told: bool,
    /// What an entry would have raised an event for that came while nobody asked nor was told, and waits still.
    missed: Armed,
    broken: bool,
    overrun_allowed: bool,
}

/// A completion queue.
pub struct Cq {
    state: Mutex<State>,
    /// Entries that wait, readable without the lock so that an idle poll is cheap.
    waiting: AtomicUsize,
    notify: Option<Arc<dyn Notify>>,
}

/// The completion queue had no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow;

impl Cq {
    /// A queue for `capacity` entries.
    pub fn new(capacity: usize, notify: Option<Arc<dyn Notify>>) -> Self {
        Self {
            state: Mutex::new(State {
                entries: VecDeque::new(),
                capacity,
                armed: Armed::No,
                told: false,
                missed: Armed::No,
                broken: false,
                overrun_allowed: false,
            }),
            waiting: AtomicUsize::new(0),
            notify,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry.
    ///
    /// A queue without room drops the entry and is broken: its owner hears of it once, and the queue pair that
    /// wanted to complete fails.
    pub fn complete(&self, entry: Completion) -> Result<(), Overflow> {
        let mut state = self.state();
        // No memory for one more is no room, too.
        if state.entries.len() >= state.capacity || state.entries.try_reserve(1).is_err() {
            if state.overrun_allowed {
                return Ok(());
            }
            let first = !state.broken;
            state.broken = true;
            drop(state);
            if first && let Some(notify) = &self.notify {
                notify.overflow();
            }
            return Err(Overflow);
        }
        // IBA 11.4.2.2: an unsuccessful completion counts as solicited.
        let solicited = entry.solicited || entry.status != Status::Success;
        let fires = match state.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => solicited,
        };
        if !fires && !state.told {
            state.missed = match state.missed {
                Armed::Solicited => Armed::Solicited,
                _ if solicited => Armed::Solicited,
                _ => Armed::Any,
            };
        }
        state.entries.push_back(entry);
        self.waiting.store(state.entries.len(), Ordering::Release);
        self.tell(state, fires);
        Ok(())
    }

    /// Takes up to `max` entries and hands each to `each`; returns how many.
    pub fn poll(&self, max: usize, mut each: impl FnMut(usize, Completion)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut state = self.state();
        let n = max.min(state.entries.len());
        for (i, entry) in state.entries.drain(..n).enumerate() {
            each(i, entry);
        }
        state.told = false;
        if state.entries.is_empty() {
            state.missed = Armed::No;
        }
        self.waiting.store(state.entries.len(), Ordering::Release);
        n
    }

    /// Raises the event, if it is time.
    fn tell(&self, mut state: MutexGuard<'_, State>, fires: bool) {
        if fires {
            state.armed = Armed::No;
            state.missed = Armed::No;
            state.told = true;
        }
        drop(state);
        if fires && let Some(notify) = &self.notify {
            notify.completion();
        }
    }

    /// Whether nothing waits; no lock is taken.
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Arms the queue: the next entry (or the next solicited one) raises an event.
    ///
    /// Arming for any entry stays in force when the queue is armed again for solicited ones only. An entry that came between
    /// the last poll and the arming raises the event at once, as cards do: UCX sleeps without another look. Not so behind an
    /// event that nobody has polled for yet: `ibv_rc_pingpong -e -t` arms, polls, and takes an event for nothing as an error.
    pub fn arm(&self, solicited_only: bool) {
        let mut state = self.state();
        let fires = match state.missed {
            Armed::No => false,
            Armed::Solicited => true,
            Armed::Any => !solicited_only,
        };
        if !solicited_only {
            state.armed = Armed::Any;
        } else if state.armed == Armed::No {
            state.armed = Armed::Solicited;
        }
        self.tell(state, fires);
    }

    /// Whether an event is asked for.
    pub fn is_armed(&self) -> bool {
        self.state().armed != Armed::No
    }

    /// Drops the entries of one queue pair, which is being destroyed or reset.
    pub fn purge(&self, qpn: u32) {
        let mut state = self.state();
        state.entries.retain(|e| e.qpn != qpn);
        if state.entries.is_empty() {
            state.missed = Armed::No;
        }
        self.waiting.store(state.entries.len(), Ordering::Release);
    }

    /// Changes the room; fails when more entries wait than would fit.
    pub fn resize(&self, capacity: usize) -> Result<(), Overflow> {
        let mut state = self.state();
        if state.entries.len() > capacity {
            return Err(Overflow);
        }
        state.capacity = capacity;
        Ok(())
    }

    /// The application promised that overflow cannot matter (`IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`).
    pub fn allow_overrun(&self) {
        self.state().overrun_allowed = true;
    }

    /// Whether an entry was lost.
    pub fn is_broken(&self) -> bool {
        self.state().broken
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Cq")
            .field("waiting", &state.entries.len())
            .field("capacity", &state.capacity)
            .field("armed", &state.armed)
            .field("broken", &state.broken)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::wc::WcOp;
    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize, AtomicUsize);
    impl Notify for Count {
        fn completion(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn overflow(&self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn entry(id: u64, status: Status, solicited: bool) -> Completion {
        let mut e = Completion::new(id, status, WcOp::Recv, 7);
        e.solicited = solicited;
        e
    }

    #[test]
    fn one_event_per_arming_and_only_for_the_asked_kind() {
        let count = Arc::new(Count::default());
        let cq = Cq::new(8, Some(count.clone()));
        cq.complete(entry(1, Status::Success, false)).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        cq.arm(true);
        cq.complete(entry(2, Status::Success, false)).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        cq.complete(entry(3, Status::Success, true)).unwrap();
        cq.complete(entry(4, Status::Success, true)).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        cq.arm(true);
        cq.complete(entry(5, Status::Flushed, false)).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn an_entry_that_came_before_the_arming_and_was_not_polled_raises_its_event() {
        let count = Arc::new(Count::default());
        let cq = Cq::new(8, Some(count.clone()));
        let told = || count.0.load(Ordering::Relaxed);
        cq.complete(entry(1, Status::Success, false)).unwrap();
        cq.arm(true);
        assert_eq!(told(), 0, "not of the asked kind");
        cq.arm(false);
        assert_eq!(told(), 1);
        cq.arm(false);
        assert_eq!(told(), 1, "it is told once");
        assert_eq!(cq.poll(8, |_, _| ()), 1);
        cq.complete(entry(2, Status::Success, false)).unwrap();
        assert_eq!(told(), 2);
        cq.complete(entry(3, Status::Success, true)).unwrap();
        cq.poll(8, |_, _| ());
        cq.arm(true);
        assert_eq!(told(), 2, "what was polled is no news");
        cq.complete(entry(4, Status::Success, true)).unwrap();
        assert_eq!(told(), 3);
        // Behind an event that is to be heard of yet none is raised for those that will be polled with it.
        cq.complete(entry(5, Status::Success, true)).unwrap();
        cq.arm(false);
        assert_eq!(told(), 3);
        assert_eq!(cq.poll(8, |_, _| ()), 2);
        cq.complete(entry(6, Status::Success, false)).unwrap();
        assert_eq!(told(), 4, "it is armed");
    }

    #[test]
    fn overflow_loses_the_new_entry_and_is_told_once() {
        let count = Arc::new(Count::default());
        let cq = Cq::new(2, Some(count.clone()));
        cq.complete(entry(1, Status::Success, false)).unwrap();
        cq.complete(entry(2, Status::Success, false)).unwrap();
        assert_eq!(cq.complete(entry(3, Status::Success, false)), Err(Overflow));
        assert_eq!(cq.complete(entry(4, Status::Success, false)), Err(Overflow));
        assert_eq!(count.1.load(Ordering::Relaxed), 1);
        let mut ids = Vec::new();
        assert_eq!(cq.poll(10, |_, e| ids.push(e.wr_id)), 2);
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn purge_takes_only_the_queue_pairs_own() {
        let cq = Cq::new(8, None);
        cq.complete(entry(1, Status::Success, false)).unwrap();
        cq.complete(Completion::new(2, Status::Success, WcOp::Send, 9))
            .unwrap();
        cq.purge(7);
        let mut ids = Vec::new();
        cq.poll(10, |_, e| ids.push(e.wr_id));
        assert_eq!(ids, [2]);
    }
}
