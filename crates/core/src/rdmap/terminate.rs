//! The Terminate message: the segment that it reports, and the error codes of memory access.

use smallvec::SmallVec;

use crate::bounds;
use crate::ddp::tx::{Address, Message, segment};
use crate::error::{PeerError, TermCode};
use crate::llp::mpa::frame::frame_bytes;
use crate::verbs::mr::AccessError;
use crate::verbs::source::Source;
use crate::wire::ddp::{Header, Untagged};
use crate::wire::rdmap::{Opcode, RawHeader, ReadRequest, Terminate};
use crate::wire::{Msn, QN_TERMINATE, Stag, To};

/// The segment that caused an error, as a Terminate describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TermContext {
    header: RawHeader,
    /// Bytes of the segment, header and payload.
    len: u16,
    read: Option<[u8; ReadRequest::LEN]>,
}

impl TermContext {
    /// No segment: the error is a local one.
    pub(crate) fn local() -> Self {
        Self::segment(&[])
    }

    /// A whole segment.
    pub(crate) fn segment(ulpdu: &[u8]) -> Self {
        Self::partial_segment(ulpdu, ulpdu.len())
    }

    /// A segment of `len` bytes of which only `front` has arrived.
    pub(crate) fn partial_segment(front: &[u8], len: usize) -> Self {
        let is_read = matches!(
            Header::parse(front),
            Ok((header, _)) if header.opcode() == Opcode::ReadRequest
        );
        let read = is_read.then(|| front.get(Untagged::LEN..)?.first_chunk().copied());
        Self {
            header: RawHeader::of(front),
            len: u16::try_from(len).unwrap_or(u16::MAX),
            read: read.flatten(),
        }
    }

    /// An error while a Read Request is answered. `left`: the part of the request that is not answered yet.
    pub(crate) fn read_response(left: Option<ReadRequest>) -> Self {
        Self {
            read: left.map(|left| left.emit()),
            ..Self::local()
        }
    }

    /// The Terminate with this code.
    pub(crate) fn terminate(&self, code: TermCode) -> Terminate {
        // RFC 5040 §4.8 [term-headers]: a Terminate for an MPA error or a local error contains no headers.
        let with_header = code.layer != 2 && code.etype != 0 && !self.header.as_slice().is_empty();
        // RFC 5040 §4.8 [term-rdma-header]: for a protection error of a Read Request, the Terminate contains the
        // request, or its part that is not answered yet.
        let with_read = (code.layer, code.etype) == (0, 1);
        Terminate {
            layer: code.layer,
            etype: code.etype,
            code: code.code,
            ddp_len: with_header.then_some(self.len),
            ddp_header: with_header.then_some(self.header),
            read_request: self.read.filter(|_| with_read),
        }
    }
}

/// The RDMAP error for a Read or atomic whose memory may not be used (RFC 5040 §4.8).
pub(crate) fn remote_error(e: AccessError, stag: Stag, to: To, len: u64) -> PeerError {
    let (stag, to, len) = (stag.0, to.0, u32::try_from(len).unwrap_or(u32::MAX));
    match e {
        AccessError::Invalid => PeerError::RemoteStag { stag },
        AccessError::NotAssociated => PeerError::RemoteNotAssociated { stag },
        AccessError::Rights => PeerError::RemoteAccess { stag },
        AccessError::Bounds | AccessError::Absent => PeerError::RemoteBounds { stag, to, len },
        AccessError::Wrap => PeerError::RemoteWrap { to, len },
    }
}

/// The Terminate message.
pub(crate) fn message(what: &Terminate) -> Message {
    let bytes = what.emit();
    Message {
        opcode: Opcode::Terminate,
        // RFC 5040 §4.8: the Terminate is the only message of queue 2.
        address: Address::Untagged {
            qn: QN_TERMINATE,
            msn: Msn::FIRST,
            inv_stag: Stag(0),
            mo: 0,
        },
        len: bytes.len() as u64,
        source: Source::Bytes(SmallVec::from_vec(bytes)),
        sent: 0,
    }
}

/// A Terminate as one whole FPDU, for a connection that has no queue pair yet.
pub fn terminate_fpdu(what: &Terminate, with_crc: bool) -> Vec<u8> {
    let mut message = message(what);
    let segment = segment(&mut message, bounds::MULPDU_MIN);
    frame_bytes(&segment, &message.source, with_crc)
}
