//! The operations of the program on a socket, from their calls to their events.

use crate::ffi;
use crate::flow::OpId;
use crate::memory::{FileMap, Used};
use crate::queue::Queue;
use crate::socket::{EVT_SEND, EVT_SENDFILE, EVT_SENDMSG};
use crate::wire::Segments;
use anywarp_buffers::{Piece, Region};
use anywarp_verbs_sys::ptr::Ptr;
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
    /// A copy of a part of a file. Its registration is the preceding element.
    Copy { _bytes: Box<[u8]> },
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
    pub(crate) keep: SmallVec<[Keep; 1]>,
    /// The memory of the program into which a pooled buffer is copied after the receive.
    pub(crate) bounce: Option<u64>,
    /// The deadline, and whether it has passed. Then the deadline is the time until which the peer has to answer.
    pub(crate) deadline: Option<Instant>,
    pub(crate) late: bool,
    /// The registration of the memory of a receive, if it has one that lasts as long as the operation. Memory windows are bound to it.
    pub(crate) mr: Option<Ptr<ffi::ibv_mr>>,
}

impl Op {
    pub(crate) fn is_send(&self) -> bool {
        matches!(self.kind, EVT_SEND | EVT_SENDMSG | EVT_SENDFILE)
    }
}

/// The operations of a socket: first the sends, then the receives and all others, each oldest first. Most operations of one direction
/// end in the order of their calls, so they are found and removed at the front.
#[derive(Debug, Default)]
pub(crate) struct Ops([VecDeque<(OpId, Op)>; 2]);

impl Ops {
    /// Adds an operation, whose number is higher than all before.
    pub(crate) fn push(&mut self, id: OpId, op: Op) {
        let [sends, others] = &mut self.0;
        if op.is_send() {
            sends.push_back((id, op));
        } else {
            others.push_back((id, op));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    /// Returns the direction of an operation, and its position there.
    fn find(&self, id: OpId) -> Option<(usize, usize)> {
        let [sends, others] = &self.0;
        let is_first = |all: &VecDeque<(OpId, Op)>| all.front().is_some_and(|(f, _)| *f == id);
        if is_first(sends) {
            return Some((0, 0));
        }
        if is_first(others) {
            return Some((1, 0));
        }
        let search = |all: &VecDeque<_>| all.binary_search_by_key(&id, |(id, _)| *id).ok();
        search(sends)
            .map(|at| (0, at))
            .or_else(|| search(others).map(|at| (1, at)))
    }

    pub(crate) fn get(&self, id: OpId) -> Option<&Op> {
        let (direction, at) = self.find(id)?;
        let (_, op) = self.0.get(direction)?.get(at)?;
        Some(op)
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut Op> {
        let (direction, at) = self.find(id)?;
        let (_, op) = self.0.get_mut(direction)?.get_mut(at)?;
        Some(op)
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<Op> {
        let (direction, at) = self.find(id)?;
        let all = self.0.get_mut(direction)?;
        let (_, op) = if at == 0 {
            all.pop_front()
        } else {
            all.remove(at)
        }?;
        Some(op)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Op> {
        self.0.iter().flatten().map(|(_, op)| op)
    }

    /// Returns the numbers of the operations that `which` selects, in the order of their calls.
    pub(crate) fn numbers(&self, which: impl Fn(&Op) -> bool) -> Vec<OpId> {
        let all = self.0.iter().flatten();
        let mut numbers: Vec<OpId> = all.filter(|(_, op)| which(op)).map(|(id, _)| *id).collect();
        numbers.sort_unstable();
        numbers
    }
}
