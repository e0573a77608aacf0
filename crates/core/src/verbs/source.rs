//! The source of the payload of a message: bytes that the message holds, or ranges of registered memory.

use smallvec::SmallVec;

use super::mr::Placement;
use super::wr::InlineData;
use crate::wire::Stag;

/// Ranges of registered memory, in order.
pub type Places = SmallVec<[Placement; 2]>;

/// The source of the payload of a message.
#[derive(Debug, Clone)]
pub enum Source {
    /// Bytes that the message holds: headers, inline data.
    Bytes(InlineData),
    /// User memory.
    Memory {
        /// The ranges, in order.
        places: Places,
        /// Whether the bytes may change while they are sent. A segment is then always copied before its CRC is made.
        volatile: bool,
    },
}

impl Source {
    /// The STag of the memory, or 0 if the message holds the bytes.
    pub(crate) fn stag(&self) -> Stag {
        match self {
            Self::Memory { places, .. } => places.first().map_or(Stag(0), Placement::stag),
            Self::Bytes(_) => Stag(0),
        }
    }
}
