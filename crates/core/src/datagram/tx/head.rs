//! DDP headers of datagrams.

use crate::ddp::tx::Address;
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::dgram::Shim;
use crate::wire::rdmap::Opcode;
use crate::wire::{Stag, To};

/// The STag of zero-length messages. It names no memory. 0 is not used, because it would look like a missing field.
pub(super) const NO_STAG: Stag = Stag(1);

/// The DDP header of a message's datagram at `offset`.
pub(super) fn header_of(opcode: Opcode, address: Address, offset: u32, last: bool) -> Header {
    match address {
        Address::Tagged { stag, to } => Header::Tagged(Tagged {
            last,
            opcode,
            stag,
            to: To(to.0.wrapping_add(u64::from(offset))),
        }),
        Address::Untagged {
            qn, msn, inv_stag, ..
        } => Header::Untagged(Untagged {
            last,
            opcode,
            inv_stag,
            qn,
            msn,
            mo: offset,
        }),
    }
}

/// The largest number of bytes in front of a payload.
pub(super) const HEAD_MAX: usize = Shim::LEN + 8 + Untagged::LEN;
