//! Steps of the data path, reported to an observer for logs, counters and tests.

use crate::error::PeerError;
use crate::verbs::wc::Completion;
use crate::verbs::wr::WorkRequest;
use crate::wire::ddp::Header;
use crate::wire::rdmap::{Opcode, Terminate};

/// One step of the data path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a> {
    /// The application posted a request.
    Post(&'a WorkRequest),
    /// The request with this `wr_id` was taken from the send queue.
    Take(u64),
    /// A message of this opcode and length was built.
    Build(Opcode, u64),
    /// A segment was built. The values are its number of payload bytes, and whether it is the last of its message.
    Segment(usize, bool),
    /// An FPDU was added to the batch. The value is the length of its ULPDU in bytes.
    Frame(usize),
    /// An FPDU was taken out of the stream, or a datagram arrived. The values are its header and its number of payload bytes.
    Deframe(&'a Header, usize),
    /// The payload of an FPDU passed the access check. The value is its number of bytes.
    Admit(u64),
    /// This number of bytes was placed.
    Place(u64),
    /// A message was delivered.
    Deliver(Opcode),
    /// A completion was made.
    Complete(&'a Completion),
    /// The peer broke a rule; the stream ends.
    Violation(&'a PeerError),
    /// The peer terminated the stream.
    Terminated(&'a Terminate),
    /// The queue pair failed and everything is flushed, or a request of an unreliable service failed.
    Failed(&'static str),
}

/// Receives the steps of all queue pairs of a device.
pub trait Observer: Send + Sync {
    /// Called when queue pair `qpn` has done `step`.
    fn step(&self, qpn: u32, step: &Step<'_>);
}
