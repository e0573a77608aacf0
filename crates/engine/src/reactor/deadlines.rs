//! The deadlines of sources, ordered by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::sources::{Sources, Token};
use super::time::Epoch;
use crate::locks::{Mutex, Rank};

/// Before a heap of at least this size grows, the deadlines of removed sources are deleted. They are most of a long
/// heap, because a source adds a deadline for each message that it waits for, and the removal of a source leaves its
/// deadlines in the heap.
const COMPACT_LEN: usize = 1024;
/// The value of [`Deadlines::first`] when there is no deadline.
const NEVER: u64 = u64::MAX;

type Heap = BinaryHeap<Reverse<(Instant, Token)>>;

/// The deadlines of all sources.
pub(super) struct Deadlines {
    heap: Mutex<Heap>,
    /// The first deadline in nanoseconds since the epoch. Polling threads compare it with the clock without the lock.
    first: AtomicU64,
}

impl Deadlines {
    pub(super) const fn new() -> Self {
        Self {
            heap: Mutex::new(Rank::Deadlines, Heap::new()),
            first: AtomicU64::new(NEVER),
        }
    }

    /// Adds a deadline. If it is the first one now, `set_timer` is called with the lock held: otherwise, of two
    /// threads, the one with the later deadline could set the timer last.
    pub(super) fn add(
        &self,
        token: Token,
        at: Instant,
        sources: &Sources,
        epoch: Epoch,
        set_timer: impl FnOnce(),
    ) {
        let mut heap = self.heap.lock();
        if heap.len() >= COMPACT_LEN && heap.len() == heap.capacity() {
            sources.with_live(|is_live| heap.retain(|Reverse((_, token))| is_live(*token)));
        }
        let is_first = heap.peek().is_none_or(|Reverse((first, _))| at < *first);
        heap.push(Reverse((at, token)));
        if is_first {
            self.first.store(epoch.nanos(at), Ordering::Relaxed);
            set_timer();
        }
    }

    /// Whether a deadline has passed at `t`.
    #[inline]
    pub(super) fn is_due(&self, t: u64) -> bool {
        t >= self.first.load(Ordering::Relaxed)
    }

    /// Removes and returns the first deadline if it has passed. Otherwise calls `set_timer` for it with the lock
    /// held.
    pub(super) fn pop_due(
        &self,
        now: Instant,
        epoch: Epoch,
        set_timer: impl FnOnce(Instant),
    ) -> Option<Token> {
        let mut heap = self.heap.lock();
        let first = heap.peek().map(|Reverse((at, _))| *at);
        let nanos = first.map_or(NEVER, |at| epoch.nanos(at));
        self.first.store(nanos, Ordering::Relaxed);
        match first {
            Some(at) if at <= now => heap.pop().map(|Reverse((_, token))| token),
            Some(at) => {
                set_timer(at);
                None
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::clock;
    use crate::reactor::sources::Source;

    struct Nothing;

    impl Source for Nothing {
        fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}
        fn timeout(self: Arc<Self>, _now: Instant) {}
    }

    #[test]
    fn deadlines_come_in_the_order_of_time() {
        let (sources, deadlines) = (Sources::new(), Deadlines::new());
        let start = clock::now();
        let epoch = Epoch::new(start);
        let at = |ms| start + Duration::from_millis(ms);
        let token = |_| sources.insert(Arc::new(Nothing));
        let [a, b] = [0, 1].map(token);
        let timer = Cell::new(None);
        let add = |token, ms| {
            timer.set(None);
            deadlines.add(token, at(ms), &sources, epoch, || timer.set(Some(at(ms))));
            timer.get()
        };
        assert_eq!(add(a, 20), Some(at(20)));
        assert_eq!(add(b, 10), Some(at(10)));
        assert_eq!(add(a, 30), None);
        assert!(!deadlines.is_due(epoch.nanos(at(9))));
        assert!(deadlines.is_due(epoch.nanos(at(10))));
        let pop = |ms| {
            timer.set(None);
            deadlines.pop_due(at(ms), epoch, |at| timer.set(Some(at)))
        };
        assert_eq!((pop(9), timer.get()), (None, Some(at(10))));
        assert_eq!((pop(25), timer.get()), (Some(b), None));
        assert_eq!((pop(25), timer.get()), (Some(a), None));
        assert_eq!((pop(25), timer.get()), (None, Some(at(30))));
        assert_eq!((pop(30), timer.get()), (Some(a), None));
        assert_eq!((pop(30), timer.get()), (None, None));
        assert!(!deadlines.is_due(u64::MAX - 1));
    }

    #[test]
    fn deadlines_of_removed_sources_do_not_make_the_heap_grow() {
        let (sources, deadlines) = (Sources::new(), Deadlines::new());
        let start = clock::now();
        let kept = sources.insert(Arc::new(Nothing));
        let far = start + Duration::from_secs(1000);
        deadlines.add(kept, far, &sources, Epoch::new(start), || ());
        for _ in 0..50 * COMPACT_LEN {
            let token = sources.insert(Arc::new(Nothing));
            deadlines.add(token, far, &sources, Epoch::new(start), || ());
            sources.remove(token);
        }
        let heap = deadlines.heap.lock();
        assert!(heap.len() <= 2 * COMPACT_LEN, "{}", heap.len());
        assert!(heap.iter().any(|Reverse((_, token))| *token == kept));
    }
}
