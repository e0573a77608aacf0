//! Completion counters: the number, or the bytes, of completed operations of the queue pairs that they are attached
//! to, and the number of failed ones (`ibv_create_comp_cntr(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::wc::{Status, WcOp};
use crate::error::Misuse;

/// The operations that a counter counts. The bits are those of `enum ibv_qp_attach_comp_cntr_op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ops(pub u32);

impl Ops {
    /// Sends of the queue pair.
    pub const SEND: Self = Self(1 << 0);
    /// Receives of the queue pair.
    pub const RECV: Self = Self(1 << 1);
    /// Reads of the queue pair.
    pub const READ: Self = Self(1 << 2);
    /// Reads of the peer.
    pub const REMOTE_READ: Self = Self(1 << 3);
    /// Writes of the queue pair.
    pub const WRITE: Self = Self(1 << 4);
    /// Writes of the peer.
    pub const REMOTE_WRITE: Self = Self(1 << 5);
    /// All operations of the queue pair's own requests.
    pub const LOCAL: Self = Self(Self::SEND.0 | Self::RECV.0 | Self::READ.0 | Self::WRITE.0);
    /// The operations of the peer that complete nothing here.
    pub const REMOTE: Self = Self(Self::REMOTE_READ.0 | Self::REMOTE_WRITE.0);

    /// The operation of a completion. Atomics, binds and invalidations have no bit, and records complete no request, so they
    /// are not counted. An atomic write counts as a Write, because its message is a Write.
    fn of(op: WcOp) -> Self {
        match op {
            WcOp::Send => Self::SEND,
            WcOp::Recv | WcOp::RecvWriteImm => Self::RECV,
            WcOp::Read => Self::READ,
            WcOp::Write | WcOp::AtomicWrite => Self::WRITE,
            WcOp::CompareSwap
            | WcOp::FetchAdd
            | WcOp::Bind
            | WcOp::LocalInvalidate
            | WcOp::Record => Self(0),
        }
    }

    fn has_any(self, of: Self) -> bool {
        self.0 & of.0 != 0
    }
}

/// The value that a successful operation adds. A failed operation adds 1 to the errors in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// One for each operation.
    Requests,
    /// The length of the operation in bytes.
    Bytes,
}

/// One of the two values of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Operations that completed successfully.
    Done = 0,
    /// Operations that failed.
    Failed = 1,
}

/// A completion counter. Both values wrap around.
#[derive(Debug)]
pub struct Counter {
    unit: Unit,
    values: [AtomicU64; 2],
}

impl Counter {
    /// A counter whose values are zero.
    pub fn new(unit: Unit) -> Self {
        Self {
            unit,
            values: Default::default(),
        }
    }

    fn value(&self, entry: Entry) -> &AtomicU64 {
        let [done, failed] = &self.values;
        match entry {
            Entry::Done => done,
            Entry::Failed => failed,
        }
    }

    /// Reads a value. The data of the operations that it counts is visible afterwards.
    pub fn read(&self, entry: Entry) -> u64 {
        self.value(entry).load(Ordering::Acquire)
    }

    /// Sets a value.
    pub fn set(&self, entry: Entry, to: u64) {
        self.value(entry).store(to, Ordering::Release);
    }

    /// Adds to a value.
    pub fn add(&self, entry: Entry, amount: u64) {
        self.value(entry).fetch_add(amount, Ordering::AcqRel);
    }
}

/// The counters of a queue pair. Each counts different operations.
#[derive(Debug, Default)]
pub(crate) struct Counters(Vec<(Ops, Arc<Counter>)>);

impl Counters {
    /// Adds a counter of `ops`.
    pub(crate) fn attach(&mut self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        if self.0.iter().any(|(taken, _)| taken.has_any(ops)) {
            return Err(Misuse::Busy);
        }
        self.0.push((ops, Arc::clone(counter)));
        Ok(())
    }

    /// Counts the completion of a request of this queue pair.
    #[cold]
    pub(crate) fn completed(&self, op: WcOp, status: Status, len: u64) {
        self.count(Ops::of(op), status, len);
    }

    /// Counts an operation.
    #[cold]
    pub(crate) fn count(&self, op: Ops, status: Status, len: u64) {
        let Some((_, counter)) = self.0.iter().find(|(ops, _)| ops.has_any(op)) else {
            return;
        };
        match (status, counter.unit) {
            (Status::Success, Unit::Requests) => counter.add(Entry::Done, 1),
            (Status::Success, Unit::Bytes) => counter.add(Entry::Done, len),
            _ => counter.add(Entry::Failed, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(counter: &Counter) -> (u64, u64) {
        (counter.read(Entry::Done), counter.read(Entry::Failed))
    }

    #[test]
    fn each_operation_has_at_most_one_counter() {
        let counter = Arc::new(Counter::new(Unit::Requests));
        let mut counters = Counters::default();
        counters
            .attach(&counter, Ops(Ops::SEND.0 | Ops::RECV.0))
            .unwrap();
        let again = counters.attach(&counter, Ops(Ops::RECV.0 | Ops::READ.0));
        assert!(matches!(again, Err(Misuse::Busy)));
        counters.attach(&counter, Ops::READ).unwrap();
        for op in [WcOp::Send, WcOp::Recv, WcOp::RecvWriteImm, WcOp::Read] {
            counters.completed(op, Status::Success, 10);
        }
        // No counter is attached for Writes, and the other operations have no bit.
        for op in [
            WcOp::Write,
            WcOp::AtomicWrite,
            WcOp::FetchAdd,
            WcOp::Bind,
            WcOp::Record,
        ] {
            counters.completed(op, Status::Success, 10);
            counters.completed(op, Status::Flushed, 10);
        }
        counters.completed(WcOp::Send, Status::Flushed, 10);
        assert_eq!(values(&counter), (4, 1));
    }

    #[test]
    fn bytes_and_wrap_around() {
        let counter = Arc::new(Counter::new(Unit::Bytes));
        let mut counters = Counters::default();
        counters.attach(&counter, Ops::REMOTE).unwrap();
        counters.count(Ops::REMOTE_WRITE, Status::Success, 4096);
        counters.count(Ops::REMOTE_READ, Status::Success, 0);
        counters.count(Ops::REMOTE_READ, Status::RemoteAccess, 77);
        assert_eq!(values(&counter), (4096, 1));
        counter.set(Entry::Done, u64::MAX);
        counters.count(Ops::REMOTE_WRITE, Status::Success, 1);
        assert_eq!(values(&counter), (0, 1));
    }
}
