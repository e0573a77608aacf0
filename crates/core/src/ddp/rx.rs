//! DDP receive side: the outcome of the checks that a segment has to pass before it is placed (RFC 5041 §7.1).

use crate::error::PeerError;
use crate::verbs::mr::AccessError;
use crate::verbs::source::Places;
use crate::verbs::wc::Status;
use crate::wire::{Stag, To};

/// A rule that a segment of the peer broke, and the requests that fail because of it.
#[derive(Debug)]
pub(crate) struct Violation {
    /// The broken rule.
    pub(crate) error: PeerError,
    /// Completion status of the peer's request, if the segment belongs to a request.
    pub(crate) status: Option<Status>,
    /// Completion status of the receive in progress; `None`: it is flushed.
    pub(crate) receive: Option<Status>,
    /// Number and completion status of the local request to which the segment responds.
    pub(crate) own: Option<(u64, Status)>,
}

impl Violation {
    /// The segment belongs to a request of the peer, which fails with `status`.
    pub(crate) fn request(error: PeerError, status: Status) -> Self {
        Self {
            error,
            status: Some(status),
            receive: None,
            own: None,
        }
    }

    /// The segment is a response, or another message that is not a request.
    pub(crate) fn answer(error: PeerError) -> Self {
        Self {
            error,
            status: None,
            receive: None,
            own: None,
        }
    }

    /// The segment is the response to local request `number`, which fails with `status`.
    pub(crate) fn answer_to(number: u64, error: PeerError, status: Status) -> Self {
        Self {
            own: Some((number, status)),
            ..Self::answer(error)
        }
    }

    /// The segment is valid, but the posted receive cannot take it: the receive is too short, or its memory is not
    /// registered. The peer's request fails with `theirs`, and the receive with `ours`.
    pub(crate) fn receive(error: PeerError, theirs: Status, ours: Status) -> Self {
        Self {
            receive: Some(ours),
            ..Self::request(error, theirs)
        }
    }
}

/// The destination of the payload of an admitted segment.
pub(crate) enum Admitted {
    /// These ranges of memory.
    Place(Places),
    /// The protocol stack: the payload is not user data.
    Inspect,
    /// None: the segment is dropped.
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
