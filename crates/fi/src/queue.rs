//! Completion queues and counters, as data: what waits for the program.

use crate::abi::FiAddr;
use std::collections::VecDeque;

/// A completion, with what any format of a queue shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The program's word for the operation, an address.
    pub context: usize,
    /// `FI_SEND`, `FI_RECV` and so on.
    pub flags: u64,
    /// Bytes received.
    pub len: usize,
    /// Where a message is in a buffer for many.
    pub buf: usize,
    /// What the peer's program sent beside it.
    pub data: u64,
    /// The tag of the message.
    pub tag: u64,
    /// The sender of the message.
    pub source: FiAddr,
    /// What went wrong, or 0.
    pub err: i32,
    /// Bytes that did not fit.
    pub olen: usize,
}

impl Entry {
    /// A success with nothing but its context and flags.
    pub fn new(context: usize, flags: u64) -> Self {
        Self {
            context,
            flags,
            len: 0,
            buf: 0,
            data: 0,
            tag: 0,
            source: crate::abi::FI_ADDR_NOTAVAIL,
            err: 0,
            olen: 0,
        }
    }

    /// The same as a failure.
    pub fn failed(self, err: i32) -> Self {
        Self { err, ..self }
    }
}

/// A completion queue.
#[derive(Debug, Default)]
pub struct Queue {
    entries: VecDeque<Entry>,
    /// `FI_CQ_FORMAT_...`.
    pub format: u32,
    /// A descriptor that becomes readable when something waits, if the program asked for one.
    pub event: Option<i32>,
    /// The program waits for it.
    pub armed: bool,
}

impl Queue {
    /// A queue of a format.
    pub fn new(format: u32) -> Self {
        Self {
            format,
            ..Self::default()
        }
    }

    /// Adds an entry. Whether the program's descriptor is to be made readable.
    pub fn push(&mut self, entry: Entry) -> bool {
        self.entries.push_back(entry);
        std::mem::take(&mut self.armed)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether so much waits that nothing may be added.
    pub fn is_full(&self) -> bool {
        self.entries.len() >= crate::limits::ENTRIES
    }

    /// Takes the first entry if it is a success.
    pub fn take(&mut self) -> Option<Entry> {
        self.first(|entry| entry.err == 0)
    }

    /// Takes the first entry if it is a failure.
    pub fn take_error(&mut self) -> Option<Entry> {
        self.first(|entry| entry.err != 0)
    }

    fn first(&mut self, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
        if self.entries.front().is_some_and(wanted) {
            self.entries.pop_front()
        } else {
            None
        }
    }

    /// Whether the first entry is a failure.
    pub fn error_is_first(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.err != 0)
    }
}

/// A counter.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    /// Operations that succeeded.
    pub value: u64,
    /// Operations that failed.
    pub errors: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_keep_their_place_among_the_successes() {
        let mut queue = Queue::new(1);
        queue.push(Entry::new(1, 0));
        queue.push(Entry::new(2, 0).failed(5));
        queue.push(Entry::new(3, 0));
        assert!(!queue.error_is_first() && queue.take_error().is_none());
        assert_eq!(queue.take().map(|e| e.context), Some(1));
        assert!(queue.error_is_first() && queue.take().is_none());
        assert_eq!(queue.take_error().map(|e| e.context), Some(2));
        assert_eq!(queue.take().map(|e| e.context), Some(3));
        assert!(queue.is_empty());
    }

    #[test]
    fn a_waiting_program_is_woken_once() {
        let mut queue = Queue::new(1);
        assert!(!queue.push(Entry::new(1, 0)));
        queue.armed = true;
        assert!(queue.push(Entry::new(2, 0)) && !queue.push(Entry::new(3, 0)));
    }
}
