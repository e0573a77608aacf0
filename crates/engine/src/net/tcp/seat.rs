//! The place of a queue pair on a trunk. The queue pair's own TCP connection is called the *own connection*.

use std::sync::Arc;

use anywarp_core::wire::trunk::Kind;

use crate::net::trunk::{self, Process, Trunk};

/// The most bytes that a peer may send on the trunk before this end has read the peer's last message on the own connection. Such bytes are
/// called *early*. They can be an acknowledgement, a Terminate or a Bye.
const EARLY_MAX: usize = 4096;

/// The place of a queue pair on a trunk, or the offer of one.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) trunk: Option<Arc<Trunk>>,
    /// The process that has offered the trunk.
    pub(super) offered_by: Option<Process>,
    /// The number of this queue pair. `None` until this end has chosen it.
    pub(super) own: Option<u32>,
    /// The number of the peer's queue pair. `None` until the peer has chosen it.
    pub(super) peer: Option<u32>,
    /// Whether this end sends on the trunk.
    pub(super) tx: bool,
    /// Whether this end receives from the trunk.
    pub(super) rx: bool,
    /// Bytes of the peer that arrived early, and the trunk that they arrived on.
    pub(super) early: Vec<u8>,
    pub(super) early_from: Option<Arc<Trunk>>,
    /// Whether more than [`EARLY_MAX`] bytes arrived early. This counts as the peer's error only once the peer has named the trunk: until then the
    /// bytes may be those of another process.
    pub(super) early_overflow: bool,
    /// Whether the peer has ended its stream early.
    pub(super) early_end: bool,
    /// Set when the stream has ended: whether the peer has received all bytes of this end.
    pub(super) ended: Option<bool>,
    /// Whether the peer has read everything that this end has sent on the own connection.
    pub(super) confirmed: bool,
    /// Whether the trunk has ended before the peer has answered the TakeTrunk of this end. The peer will refuse it.
    pub(super) gone: bool,
    /// Whether the peer has closed the own connection.
    pub(super) closed: bool,
    /// How many bytes the trunk had received at the last check whether it still receives, and how many such checks were made.
    pub(super) checked: (u64, u32),
}

impl Seat {
    pub(super) fn new(own: Option<u32>, peer: Option<u32>) -> Self {
        Self {
            trunk: None,
            offered_by: None,
            own,
            peer,
            tx: false,
            rx: false,
            early: Vec::new(),
            early_from: None,
            early_overflow: false,
            early_end: false,
            ended: None,
            confirmed: false,
            gone: false,
            closed: false,
            checked: (0, 0),
        }
    }

    pub(super) fn is_on(&self, trunk: &Arc<Trunk>) -> bool {
        self.trunk
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, trunk))
    }

    /// Whether early bytes from `trunk` may be kept: there are none of another open trunk.
    pub(super) fn may_keep_early(&mut self, trunk: &Arc<Trunk>) -> bool {
        match &self.early_from {
            Some(from) if Arc::ptr_eq(from, trunk) => true,
            Some(from) if from.is_open() => false,
            _ => {
                self.early.clear();
                (self.early_end, self.early_overflow) = (false, false);
                self.early_from = Some(Arc::clone(trunk));
                true
            }
        }
    }

    /// Keeps early bytes.
    pub(super) fn keep_early(&mut self, trunk: &Arc<Trunk>, bytes: &[u8]) {
        if !self.may_keep_early(trunk) {
            return;
        }
        if self.early.len() + bytes.len() > EARLY_MAX {
            self.early_overflow = true;
        } else {
            self.early.extend_from_slice(bytes);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(own) = self.own else { return };
        drop(trunk::withdraw(own));
        let Some(trunk) = &self.trunk else { return };
        trunk.leave(own);
        if let Some(peer) = self.peer
            && self.tx
        {
            trunk.send_frame(peer, Kind::End);
            trunk.flush();
        }
    }
}
