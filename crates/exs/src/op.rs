//! The operations of the program on a socket, from their calls to their events.

use crate::flow::OpId;
use crate::memory::{FileMap, Used};
use crate::queue::Queue;
use crate::wire::Segments;
use anywarp_buffers::{Piece, Region};
use libc::c_int;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Keeps memory registered or mapped until its operation has ended.
#[derive(Debug)]
pub(crate) enum Keep {
    /// Registered by the program.
    Memory(#[expect(dead_code, reason = "held until the end")] Used),
    /// Registered for this operation.
    Own { _region: Region },
    /// A mapped file. Its registration is the preceding element, which is dropped first.
    Map { _map: FileMap },
    /// A buffer of the connection's pool.
    Pooled(Piece),
}

/// An operation of the program, from its call to its event.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: c_int,
    pub(crate) queue: Arc<Queue>,
    /// The number of event queue entries that are reserved for the operation.
    pub(crate) places: usize,
    pub(crate) ahandle: isize,
    /// The address in the event: that of the buffer, or of the structure passed to the call.
    pub(crate) user: u64,
    pub(crate) flags: u64,
    pub(crate) offset: u64,
    /// The memory with local keys.
    pub(crate) segments: Segments,
    /// The memory with the keys for the peer, until the operation starts.
    pub(crate) remote: Segments,
    pub(crate) keep: SmallVec<[Keep; 1]>,
    /// The memory of the program into which a pooled buffer is copied after the receive.
    pub(crate) bounce: Option<u64>,
    /// The deadline, and whether it has passed.
    pub(crate) deadline: Option<Instant>,
    pub(crate) late: bool,
}

/// The operations of a socket, oldest first. Most operations end in the order of their calls, so they are found and removed near
/// the front.
#[derive(Debug, Default)]
pub(crate) struct Ops(VecDeque<(OpId, Op)>);

impl Ops {
    /// Adds an operation, whose number is higher than all before.
    pub(crate) fn push(&mut self, id: OpId, op: Op) {
        self.0.push_back((id, op));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn find(&self, id: OpId) -> Option<usize> {
        // Most often the oldest operation ends.
        if self.0.front().is_some_and(|(first, _)| *first == id) {
            return Some(0);
        }
        self.0.binary_search_by_key(&id, |(id, _)| *id).ok()
    }

    pub(crate) fn get(&self, id: OpId) -> Option<&Op> {
        self.find(id)
            .and_then(|at| self.0.get(at))
            .map(|(_, op)| op)
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut Op> {
        let at = self.find(id)?;
        self.0.get_mut(at).map(|(_, op)| op)
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<Op> {
        let at = self.find(id)?;
        self.0.remove(at).map(|(_, op)| op)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (OpId, &Op)> {
        self.0.iter().map(|(id, op)| (*id, op))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (OpId, &mut Op)> {
        self.0.iter_mut().map(|(id, op)| (*id, op))
    }
}
