//! Completion queues and counters of the program.

use crate::abi::FiAddr;
use std::collections::VecDeque;

/// A completion, with the fields of all formats of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The context that the program passed to the operation, as an address.
    pub context: usize,
    /// `FI_SEND`, `FI_RECV` and so on.
    pub flags: u64,
    /// The number of bytes received, or written by a peer.
    pub len: usize,
    /// The address at which the message was received.
    pub buf: usize,
    /// The immediate data of the peer's program.
    pub data: u64,
    /// The tag of the message.
    pub tag: u64,
    /// The sender of the message.
    pub source: FiAddr,
    /// The error of libfabric, or 0.
    pub err: i32,
    /// The number of bytes that did not fit in the buffer.
    pub olen: usize,
}

impl Entry {
    /// Returns a success that has only a context and flags.
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

    /// Returns this completion as a failure.
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
    /// A descriptor that becomes readable when there is an entry, if the program requested one.
    pub event: Option<i32>,
    /// Whether the program waits for that descriptor.
    pub armed: bool,
}

impl Queue {
    /// Returns an empty queue with a format.
    pub fn new(format: u32) -> Self {
        Self {
            format,
            ..Self::default()
        }
    }

    /// Adds an entry. Returns whether the program's descriptor has to be made readable.
    pub fn push(&mut self, entry: Entry) -> bool {
        self.entries.push_back(entry);
        std::mem::take(&mut self.armed)
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether the queue has reached its limit, so that operations are refused.
    pub fn is_full(&self) -> bool {
        self.entries.len() >= crate::limits::ENTRIES
    }

    /// Removes and returns the first entry if it is a success.
    pub fn take(&mut self) -> Option<Entry> {
        self.first(|entry| entry.err == 0)
    }

    /// Removes and returns the first entry if it is a failure.
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

    /// Returns whether the first entry is a failure.
    pub fn error_is_first(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.err != 0)
    }
}

/// A counter.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    /// The number of operations that succeeded.
    pub value: u64,
    /// The number of operations that failed.
    pub errors: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_keep_their_order_among_the_successes() {
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
