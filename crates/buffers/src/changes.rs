//! A queue of the changes of memory that the kernel has reported: each waits until the registrations of that memory are removed from the table.
//!
//! The thread that reads the kernel's reports adds the changes, without any lock. So a thread of the program that has locked the table may
//! itself change watched memory, or wait for a thread that does: a signal handler that interrupts it may unmap memory, and a
//! garbage collector may stop it and then discard memory.

use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use crate::watch::Change;

/// The most changes that wait. If more are read, all memory is taken for changed.
const ROOM: usize = 1024;

/// How many times [`Changes::wait_for_reader`] lets other threads run. The thread that reads never waits, but may not get a processor at once.
const WAITS: u32 = 1000;

/// The kinds of changes in [`Slot::kind`].
const GONE: u8 = 0;
const EMPTIED: u8 = 1;
const MOVED: u8 = 2;

#[derive(Debug)]
struct Slot {
    kind: AtomicU8,
    start: AtomicUsize,
    end: AtomicUsize,
    to: AtomicUsize,
}

/// A queue with one thread that adds changes. The thread that has locked the table takes them.
#[derive(Debug)]
pub(crate) struct Changes {
    slots: [Slot; ROOM],
    /// How many changes were added, and taken.
    added: AtomicUsize,
    taken: AtomicUsize,
    /// Whether a change may have been read that is not added yet.
    reading: AtomicBool,
    /// Whether a change was read for which there was no room.
    lost: AtomicBool,
}

/// A change that was taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    One(Change),
    /// Any memory may have changed.
    All,
}

impl Changes {
    pub(crate) const fn new() -> Self {
        Self {
            slots: [const {
                Slot {
                    kind: AtomicU8::new(0),
                    start: AtomicUsize::new(0),
                    end: AtomicUsize::new(0),
                    to: AtomicUsize::new(0),
                }
            }; ROOM],
            added: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            reading: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }
    }

    /// Adds the changes that `next` reads. Only one thread calls this.
    pub(crate) fn add(&self, mut next: impl FnMut() -> Option<Change>) {
        self.reading.store(true, SeqCst);
        while let Some(change) = next() {
            let added = self.added.load(Relaxed);
            let full = added.wrapping_sub(self.taken.load(Acquire)) >= ROOM;
            let Some(slot) = self.slots.get(added % ROOM).filter(|_| !full) else {
                self.lost.store(true, SeqCst);
                continue;
            };
            let (kind, start, end, to) = match change {
                Change::Gone { start, end } => (GONE, start, end, 0),
                Change::Emptied { start, end } => (EMPTIED, start, end, 0),
                Change::Moved { start, end, to } => (MOVED, start, end, to),
            };
            slot.kind.store(kind, Relaxed);
            slot.start.store(start, Relaxed);
            slot.end.store(end, Relaxed);
            slot.to.store(to, Relaxed);
            self.added.store(added.wrapping_add(1), SeqCst);
        }
        self.reading.store(false, SeqCst);
    }

    /// Waits a short time until a change that is being read is added. A thread that has unmapped memory continues as soon as the change is read, so
    /// without this wait its next call would find the registrations of that memory from time to time. The caller has not locked the table.
    pub(crate) fn wait_for_reader(&self) {
        for _ in 0..WAITS {
            if !self.reading.load(SeqCst) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Takes the next change. The caller has locked the table.
    pub(crate) fn take(&self) -> Option<Taken> {
        if self.lost.load(SeqCst) {
            // This is reset before the caller handles it, so that a change that is lost meanwhile is not overlooked.
            self.lost.store(false, SeqCst);
            return Some(Taken::All);
        }
        let taken = self.taken.load(Relaxed);
        if taken == self.added.load(SeqCst) {
            return None;
        }
        let slot = self.slots.get(taken % ROOM)?;
        let (start, end) = (slot.start.load(Relaxed), slot.end.load(Relaxed));
        let change = match slot.kind.load(Relaxed) {
            GONE => Change::Gone { start, end },
            EMPTIED => Change::Emptied { start, end },
            _ => Change::Moved {
                start,
                end,
                to: slot.to.load(Relaxed),
            },
        };
        self.taken.store(taken.wrapping_add(1), Release);
        Some(Taken::One(change))
    }

    /// Returns whether all changes that were read before this call have been taken. The caller has locked the table.
    pub(crate) fn are_taken(&self) -> bool {
        // The order matters: a change that was read is added before `reading` is reset.
        !self.reading.load(SeqCst)
            && !self.lost.load(SeqCst)
            && self.added.load(SeqCst) == self.taken.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(n: usize) -> Change {
        match n % 3 {
            0 => Change::Gone { start: n, end: n },
            1 => Change::Emptied { start: n, end: n },
            _ => Change::Moved {
                start: n,
                end: n,
                to: n + 1,
            },
        }
    }

    fn add(changes: &Changes, numbers: std::ops::Range<usize>) {
        let mut numbers = numbers;
        changes.add(|| {
            assert!(!changes.are_taken(), "while a change is read");
            numbers.next().map(change)
        });
    }

    #[test]
    fn changes_are_taken_in_order() {
        let changes = Changes::new();
        for round in 0..3 {
            assert!(changes.are_taken());
            add(&changes, round * ROOM..(round + 1) * ROOM);
            assert!(!changes.are_taken());
            for n in round * ROOM..(round + 1) * ROOM {
                assert_eq!(changes.take(), Some(Taken::One(change(n))));
            }
            assert_eq!(changes.take(), None);
        }
        assert!(changes.are_taken());
    }

    #[test]
    fn if_too_many_changes_are_read_all_memory_counts_as_changed() {
        let changes = Changes::new();
        add(&changes, 0..ROOM + 1);
        assert_eq!(changes.take(), Some(Taken::All));
        assert!(!changes.are_taken());
        for n in 0..ROOM {
            assert_eq!(changes.take(), Some(Taken::One(change(n))));
        }
        assert_eq!(changes.take(), None);
        assert!(changes.are_taken());
        add(&changes, 0..1);
        assert_eq!(changes.take(), Some(Taken::One(change(0))));
    }
}
