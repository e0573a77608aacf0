//! DDP receive side: the outcome of the checks that a segment has to pass before it is placed (RFC 5041 §7.1).

use crate::error::PeerError;
use crate::verbs::mr::AccessError;
use crate::verbs::source::Places;
use crate::verbs::wc::Status;
use crate::wire::{Stag, To};

/// Why a segment was not admitted.
#[derive(Debug)]
pub(crate) struct Violation {
    /// The rule that it broke.
    pub(crate) error: PeerError,
    /// What the peer's request ends with, if it was a request.
    pub(crate) status: Option<Status>,
    /// What the receive under way ends with, if it is not just flushed.
    pub(crate) receive: Option<Status>,
    /// Our own request that it was the answer to, and what that ends with.
    pub(crate) own: Option<(u64, Status)>,
}

impl Violation {
    /// A request of the peer was wrong.
    pub(crate) fn request(error: PeerError, status: Status) -> Self {
        Self {
            error,
            status: Some(status),
            receive: None,
            own: None,
        }
    }

    /// An answer of the peer, or something else that is no request, was wrong.
    pub(crate) fn answer(error: PeerError) -> Self {
        Self {
            error,
            status: None,
            receive: None,
            own: None,
        }
    }

    /// The answer to our request `number` was wrong.
    pub(crate) fn answer_to(number: u64, error: PeerError, status: Status) -> Self {
        Self {
            own: Some((number, status)),
            ..Self::answer(error)
        }
    }

    /// A message that the peer may send does not fit the receive it met.
    pub(crate) fn receive(error: PeerError, theirs: Status, ours: Status) -> Self {
        Self {
            receive: Some(ours),
            ..Self::request(error, theirs)
        }
    }
}

/// What to do with the payload of a segment.
pub(crate) enum Admitted {
    /// Put it there.
    Place(Places),
    /// It is no data but a message for the stack.
    Inspect,
    /// Drop the segment.
    Drop,
}

/// The DDP error for a tagged segment that may not be placed (RFC 5041 §7.2).
pub(crate) fn tagged_error(e: AccessError, stag: Stag, to: To, len: u64) -> PeerError {
    let (stag, to, len) = (stag.0, to.0, u32::try_from(len).unwrap_or(u32::MAX));
    match e {
        AccessError::Invalid => PeerError::TaggedStag { stag },
        AccessError::NotAssociated => PeerError::TaggedNotAssociated { stag },
        AccessError::Rights => PeerError::TaggedAccess { stag },
        AccessError::Bounds | AccessError::Absent => PeerError::TaggedBounds { stag, to, len },
        AccessError::Wrap => PeerError::TaggedWrap { to, len },
    }
}
