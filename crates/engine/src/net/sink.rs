//! The interface through which a UDP port passes datagrams to its queue pairs.

use std::slice::Chunks;
use std::time::Instant;

use anywarp_core::datagram::Arrival;

/// The receiver of datagrams of a UDP port: a datagram queue pair.
pub(crate) trait DatagramSink: Send + Sync + 'static {
    /// Called with datagrams from one source, in the order in which they arrived. `now` is a time shortly before they were received.
    /// [`Self::received`] follows.
    fn incoming(&self, arrival: &Arrival, run: Chunks<'_, u8>, now: Instant);
    /// Called after all calls of [`Self::incoming`] for the datagrams that were received together. The sink may now send its answers.
    fn received(&self);
    /// Called when the socket has room again, after a call of `UdpPort::wait_writable`.
    fn writable(&self);
}
