//! Where the payload of a message comes from: bytes of the stack's own, or ranges of registered memory.

use smallvec::SmallVec;

use super::mr::Placement;
use super::wr::InlineData;
use crate::wire::Stag;

/// Ranges of registered memory, in order.
pub type Places = SmallVec<[Placement; 2]>;

/// Where the payload of a message comes from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Bytes of our own: headers, inline data.
    Bytes(InlineData),
    /// User memory.
    Memory {
        /// The ranges, in order.
        places: Places,
        /// The bytes may change while they are sent, so a segment is always copied before its CRC is made.
        volatile: bool,
    },
}

impl Source {
    /// The STag of the memory, 0 for bytes of our own.
    pub(crate) fn stag(&self) -> Stag {
        match self {
            Self::Memory { places, .. } => places.first().map_or(Stag(0), Placement::stag),
            Self::Bytes(_) => Stag(0),
        }
    }
}
