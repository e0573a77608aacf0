//! The place of a queue pair on a trunk.

use std::sync::{Arc, Weak};

use anywarp_core::wire::trunk::Kind;

use crate::net::trunk::{self, Trunk};

/// Bytes that a peer may send before this end has read the peer's last message on the own connection: an acknowledgement, a Terminate,
/// a Bye.
pub(super) const EARLY_MAX: usize = 4096;

/// The place of a queue pair on a trunk, or the offer of one.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) trunk: Option<Arc<Trunk>>,
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
    pub(super) early_from: Weak<Trunk>,
    /// The peer has ended its stream early, after it has received this number of bytes.
    pub(super) early_end: Option<u64>,
    /// Bytes that were sent, and received.
    pub(super) sent: u64,
    pub(super) received: u64,
    /// Set when the stream has ended: whether the peer has received all bytes of this end.
    pub(super) ended: Option<bool>,
    /// Whether the peer has closed the own connection.
    pub(super) closed: bool,
}

impl Seat {
    pub(super) fn new(own: Option<u32>, peer: Option<u32>) -> Self {
        Self {
            trunk: None,
            own,
            peer,
            tx: false,
            rx: false,
            early: Vec::new(),
            early_from: Weak::new(),
            early_end: None,
            sent: 0,
            received: 0,
            ended: None,
            closed: false,
        }
    }

    pub(super) fn is_on(&self, trunk: &Arc<Trunk>) -> bool {
        self.trunk
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, trunk))
    }

    /// Whether early bytes from `trunk` may be kept.
    pub(super) fn may_keep_early(&mut self, trunk: &Arc<Trunk>) -> bool {
        let from = Arc::downgrade(trunk);
        if self.early_from.strong_count() == 0 {
            self.early_from = from;
            return true;
        }
        Weak::ptr_eq(&self.early_from, &from)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(own) = self.own else { return };
        let Some(trunk) = &self.trunk else {
            drop(trunk::withdraw(own));
            return;
        };
        trunk.leave(own);
        if let Some(peer) = self.peer
            && self.tx
        {
            trunk.send_frame(peer, Kind::End, &self.received.to_be_bytes());
            trunk.flush();
        }
    }
}
