//! Messages without user memory: control messages, requests for a response, messages of length
//! zero. Requests for a response are Read and Atomic Requests. `bytes_message` makes them, and also
//! Atomic Responses and Immediates, whose few bytes the message itself holds.

use smallvec::SmallVec;

use crate::ddp::tx::{Address, Message};
use crate::verbs::source::Source;
use crate::verbs::wr::Remote;
use crate::wire::control::Control;
use crate::wire::rdmap::Opcode;
use crate::wire::{Msn, Stag, To};

/// The STag of zero-length messages. Any value is allowed, but some hardware rejects 0.
pub(crate) const NO_STAG: Stag = Stag(1);

/// The version that this end sends in its Hello.
pub(crate) const HELLO_VERSION: u8 = 1;

/// Returns a private control message.
pub(crate) fn control(what: Control) -> Message {
    let header = what.header();
    Message {
        opcode: header.opcode,
        address: Address::Untagged {
            qn: header.qn,
            msn: header.msn,
            inv_stag: header.inv_stag,
            mo: header.mo,
        },
        source: Source::Bytes(SmallVec::new()),
        len: 0,
        sent: 0,
    }
}

pub(crate) fn bytes_message(opcode: Opcode, qn: u32, msn: u32, bytes: &[u8]) -> Message {
    Message {
        opcode,
        address: Address::Untagged {
            qn,
            msn: Msn(msn),
            inv_stag: Stag(0),
            mo: 0,
        },
        len: bytes.len() as u64,
        source: Source::Bytes(SmallVec::from_slice(bytes)),
        sent: 0,
    }
}

pub(crate) fn tagged(opcode: Opcode, stag: Stag, to: To) -> Message {
    Message {
        opcode,
        address: Address::Tagged { stag, to },
        source: Source::Bytes(SmallVec::new()),
        len: 0,
        sent: 0,
    }
}

/// The STag of a Write. A Write of length 0 accesses no memory and carries [`NO_STAG`] (RFC 5041
/// §5.2).
pub(crate) fn write_stag(remote: Remote, len: u64) -> Stag {
    if len == 0 { NO_STAG } else { remote.rkey }
}
