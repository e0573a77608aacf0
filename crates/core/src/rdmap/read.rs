//! Reads and atomics under way: what we asked for and wait for (ORD).

use crate::verbs::mr::Placement;
use crate::wire::{Stag, To};

/// An RDMA Read Request whose Response has not come completely.
#[derive(Debug)]
pub(crate) struct PendingRead {
    /// Number of the send request.
    pub request: u64,
    /// Where the data goes; none for a Read of length 0.
    pub sink: Option<Placement>,
    /// Sink STag, as the request named it.
    pub stag: Stag,
    /// Sink offset, as the request named it.
    pub to: To,
    /// Bytes asked for.
    pub len: u64,
    /// Bytes that came.
    pub received: u64,
}

/// An Atomic Request whose Response has not come.
#[derive(Debug)]
pub(crate) struct PendingAtomic {
    /// Number of the send request.
    pub request: u64,
    /// Request identifier on the wire.
    pub id: u32,
    /// Where the old value goes.
    pub sink: Placement,
}
