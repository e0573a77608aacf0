//! Completion queues: entries, arming and overflow.

use std::fmt;
use std::sync::Arc;

use super::wc::{Completion, Status, WcOp};
use crate::ring::Ring;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};

/// Receives the events of a completion queue. It is called without the queue's lock.
pub trait Notify: Send + Sync {
    /// The queue was armed and has an entry of the requested kind. It is no longer armed.
    fn completion(&self);
    /// An entry was dropped because the queue was full: the queue is broken. Called once.
    fn overflow(&self);
}

/// The entries that raise an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

struct State {
    entries: Ring<Completion>,
    capacity: usize,
    armed: Armed,
    /// Whether an event was raised and the queue was not polled since. The program is expected to poll then, so an entry that
    /// arrives meanwhile does not count as missed, and arming raises no event for it.
    event_pending: bool,
    /// The kind of the entries that raised no event and arrived while no event was pending: `No` if there are no such entries,
    /// `Solicited` if one of them is solicited, otherwise `Any`. An entry that was polled counts until the queue is empty. Arming
    /// for this kind of entry raises an event at once.
    missed: Armed,
    overrun_allowed: bool,
}

impl State {
    /// Records an entry that raises no event.
    #[inline]
    fn note_missed(&mut self, solicited: bool) {
        if self.event_pending {
            return;
        }
        self.missed = match self.missed {
            Armed::Solicited => Armed::Solicited,
            _ if solicited => Armed::Solicited,
            _ => Armed::Any,
        };
    }
}

/// A completion queue.
pub struct Cq {
    state: Mutex<State>,
    /// Number of entries, readable without the lock so that polling an empty queue is cheap.
    waiting: AtomicUsize,
    /// The capacity, readable without the lock.
    capacity: AtomicUsize,
    /// Whether an entry was dropped although overruns are not allowed. Readable without the lock for the same reason; set with the lock
    /// held.
    broken: AtomicBool,
    notify: Option<Arc<dyn Notify>>,
}

/// The completion queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow;

impl Cq {
    /// A queue for `capacity` entries.
    pub fn new(capacity: usize, notify: Option<Arc<dyn Notify>>) -> Self {
        Self {
            state: Mutex::new(State {
                entries: Ring::new(),
                capacity,
                armed: Armed::No,
                event_pending: false,
                missed: Armed::No,
                overrun_allowed: false,
            }),
            waiting: AtomicUsize::new(0),
            capacity: AtomicUsize::new(capacity),
            broken: AtomicBool::new(false),
            notify,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds an entry.
    ///
    /// A full queue drops the entry and is broken: [`Notify::overflow`] is called once, and the queue pair whose
    /// completion was lost fails.
    pub fn complete(&self, entry: Completion) -> Result<(), Overflow> {
        let mut state = self.state();
        // IBA 11.4.2.2: an unsuccessful completion counts as solicited.
        let solicited = entry.solicited || entry.status != Status::Success;
        // If memory for the entry cannot be allocated, the queue counts as full.
        let has_room = state.entries.len() < state.capacity;
        let place = has_room.then(|| state.entries.push(blank).ok()).flatten();
        if let Some(place) = place {
            *place = entry;
        } else {
            if state.overrun_allowed {
                return Ok(());
            }
            let first = !self.is_broken();
            self.broken.store(true, Ordering::Release);
            drop(state);
            if first && let Some(notify) = &self.notify {
                notify.overflow();
            }
            return Err(Overflow);
        }
        let fires = match state.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => solicited,
        };
        if !fires {
            state.note_missed(solicited);
        }
        self.waiting.store(state.entries.len(), Ordering::Release);
        self.unlock_and_raise(state, fires);
        Ok(())
    }

    /// Adds the entries that `next` returns, as [`Self::complete`] does, but with one lock for all of them. `next` is called
    /// with the lock held. The result is an error if at least one entry was dropped.
    pub(crate) fn complete_all(
        &self,
        mut next: impl FnMut() -> Option<Completion>,
    ) -> Result<(), Overflow> {
        let mut result = Ok(());
        let mut state = self.state();
        while let Some(entry) = next() {
            let plain = state.armed == Armed::No && state.entries.len() < state.capacity;
            let solicited = entry.solicited || entry.status != Status::Success;
            if plain && let Ok(place) = state.entries.push(blank) {
                *place = entry;
                state.note_missed(solicited);
            } else {
                // The entry raises an event, or has no room.
                self.waiting.store(state.entries.len(), Ordering::Release);
                drop(state);
                let added = self.complete(entry);
                result = result.and(added);
                state = self.state();
            }
        }
        self.waiting.store(state.entries.len(), Ordering::Release);
        result
    }

    /// Removes up to `max` entries, calls `each` with the index and value of each, and returns their number.
    #[inline]
    pub fn poll(&self, max: usize, mut each: impl FnMut(usize, &Completion)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut guard = self.state();
        let state = &mut *guard;
        let n = max.min(state.entries.len());
        for i in 0..n {
            if let Some(entry) = state.entries.get(i) {
                each(i, entry);
            }
        }
        state.entries.pop_front_many(n);
        let left = state.entries.len();
        state.event_pending = false;
        if left == 0 {
            state.missed = Armed::No;
        }
        self.waiting.store(left, Ordering::Release);
        n
    }

    /// Unlocks the queue and raises the event if `fires`.
    fn unlock_and_raise(&self, mut state: MutexGuard<'_, State>, fires: bool) {
        if fires {
            state.armed = Armed::No;
            state.missed = Armed::No;
            state.event_pending = true;
        }
        drop(state);
        if fires && let Some(notify) = &self.notify {
            notify.completion();
        }
    }

    /// Whether the queue would have more than `most` entries, and more than its capacity, after `more` were added. Takes no lock.
    #[inline]
    pub(crate) fn may_overflow(&self, more: usize, most: usize) -> bool {
        let all = self.waiting.load(Ordering::Relaxed) + more;
        all > most && all > self.capacity.load(Ordering::Relaxed)
    }

    /// Returns the number of entries of send requests of queue pair `qpn`; 0 if the queue ignores overruns.
    #[cold]
    pub(crate) fn sends_of(&self, qpn: u32) -> usize {
        let state = self.state();
        if state.overrun_allowed {
            return 0;
        }
        (0..state.entries.len())
            .filter_map(|i| state.entries.get(i))
            .filter(|entry| entry.qpn == qpn && (entry.op as u32) < WcOp::Recv as u32)
            .count()
    }

    /// Whether the queue has no entries. Takes no lock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Arms the queue (`ibv_req_notify_cq(3)`): the next entry, or the next solicited one, raises an event.
    ///
    /// Arming for any entry stays in force when the queue is armed again for solicited entries only. An entry that
    /// arrived between the last poll and the arming raises the event at once, as network cards do: UCX arms and
    /// sleeps without polling again. If an event was raised since the last poll, arming does not raise another one: `ibv_rc_pingpong -e
    /// -t` arms before it polls and regards an event without entries as an error.
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
        self.unlock_and_raise(state, fires);
    }

    /// Drops the entries of queue pair `qpn`, which is destroyed or reset.
    pub fn purge(&self, qpn: u32) {
        let mut state = self.state();
        state.entries.retain(|e| e.qpn != qpn);
        if state.entries.is_empty() {
            state.missed = Armed::No;
            // The pending event was for an entry that is removed here. A poll of the empty queue leaves the flag set, and the
            // next entry must raise another event.
            state.event_pending = false;
        }
        self.waiting.store(state.entries.len(), Ordering::Release);
    }

    /// Changes the capacity. Fails if the queue has more entries than that.
    pub fn resize(&self, capacity: usize) -> Result<(), Overflow> {
        let mut state = self.state();
        if state.entries.len() > capacity {
            return Err(Overflow);
        }
        state.capacity = capacity;
        self.capacity.store(capacity, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the queue drop entries silently when it is full (`IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`).
    pub fn allow_overrun(&self) {
        self.state().overrun_allowed = true;
    }

    /// Whether an entry was dropped, in a queue that does not allow overruns. Takes no lock.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

/// The initial value of an entry of the queue.
fn blank() -> Completion {
    Completion::new(0, Status::Success, WcOp::Send, 0)
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Cq")
            .field("waiting", &state.entries.len())
            .field("capacity", &state.capacity)
            .field("armed", &state.armed)
            .field("broken", &self.is_broken())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
