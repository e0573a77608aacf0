//! Byte layouts, one file per header family.
//!
//! Headers are parsed in this module only, except the length field of an FPDU (`llp::mpa`). Every `parse` checks all
//! rules of its header, so the resulting value is valid, and later code reads no raw header bytes. All fields are
//! big-endian on the wire except the CRC.
//!
//! | file | content |
//! |---|---|
//! | [`ddp`] | the tagged and untagged segment headers |
//! | [`rdmap`] | opcodes and what follows the DDP header |
//! | [`mpa`] | the two frames that open a stream over TCP |
//! | [`control`] | private messages between two anywarp ends |
//! | [`dgram`] | the shim that carries segments over UDP |
//! | [`rd`] | the packet of reliable datagrams, which contains such a datagram |
//! | [`carrier`] | messages about shared memory between two UDP ports of one host |
//! | [`signpost`] | where the listener of an rdma_cm port is |
//! | [`trunk`] | the frames of a TCP connection that carries the streams of many queue pairs |
//! | [`pretty`] | one line of text for a segment, a start-up frame or a UDP datagram |

use core::fmt;

pub mod carrier;
pub mod control;
pub mod ddp;
pub mod dgram;
pub mod mpa;
pub mod pretty;
pub mod rd;
pub mod rdmap;
pub mod signpost;
pub mod trunk;

/// Steering tag: names a registered buffer to the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stag(pub u32);

/// Tagged offset: an offset in the buffer that an [`Stag`] names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct To(pub u64);

/// Message sequence number: counts the messages of one untagged queue and direction, from 1,
/// modulo 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Msn(pub u32);

impl Msn {
    /// The number of the first message of a queue.
    pub const FIRST: Self = Self(1);

    /// The number after this one.
    // RFC 5041 §4.3 [ddp-msn-modulo]: after 0xffffffff comes 0, which is an ordinary number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

impl fmt::Display for Stag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:08x}", self.0)
    }
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:x}", self.0)
    }
}

impl fmt::Display for Msn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Queue of Sends and Immediates; its buffers are posted receives.
pub const QN_SEND: u32 = 0;
/// Queue of Read and Atomic Requests; its buffers are the IRD slots of the responder.
pub const QN_READ: u32 = 1;
/// Queue of the one Terminate message.
pub const QN_TERMINATE: u32 = 2;
/// Queue of Atomic Responses; its buffers are the ORD slots of the requester.
pub const QN_ATOMIC_RESPONSE: u32 = 3;
/// Queue of private control messages; used between two anywarp ends only.
pub const QN_CONTROL: u32 = 4;

// The functions below access fields at constant offsets in arrays of constant length. The compiler
// checks both bounds of every access, so the fallbacks are never used and cost nothing.

/// The `M` bytes at offset `AT` of `bytes`.
pub(crate) fn take<const AT: usize, const N: usize, const M: usize>(bytes: &[u8; N]) -> [u8; M] {
    const { assert!(AT + M <= N, "field lies inside the header") };
    match bytes.get(AT..).and_then(<[u8]>::first_chunk) {
        Some(field) => *field,
        None => [0; M],
    }
}

/// The 16-bit number at offset `AT`.
pub(crate) fn take16<const AT: usize, const N: usize>(bytes: &[u8; N]) -> u16 {
    u16::from_be_bytes(take::<AT, N, 2>(bytes))
}

/// The 32-bit number at offset `AT`.
pub(crate) fn take32<const AT: usize, const N: usize>(bytes: &[u8; N]) -> u32 {
    u32::from_be_bytes(take::<AT, N, 4>(bytes))
}

/// The 64-bit number at offset `AT`.
pub(crate) fn take64<const AT: usize, const N: usize>(bytes: &[u8; N]) -> u64 {
    u64::from_be_bytes(take::<AT, N, 8>(bytes))
}

/// Writes `field` at offset `AT` of `bytes`.
pub(crate) fn put<const AT: usize, const N: usize, const M: usize>(
    bytes: &mut [u8; N],
    field: [u8; M],
) {
    const { assert!(AT + M <= N, "field lies inside the header") };
    if let Some(place) = bytes.get_mut(AT..).and_then(<[u8]>::first_chunk_mut) {
        *place = field;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newtypes_print_as_people_write_them() {
        assert_eq!(Stag(0x00ab_cd01).to_string(), "0x00abcd01");
        assert_eq!(To(0x1000).to_string(), "0x1000");
        assert_eq!(Msn(3).to_string(), "3");
    }

    #[test]
    fn zero_follows_the_last_msn() {
        assert_eq!(Msn::FIRST, Msn(1));
        assert_eq!(Msn(u32::MAX).next(), Msn(0));
        assert_eq!(Msn(0).next(), Msn(1));
    }

    #[test]
    fn a_field_that_is_put_can_be_read() {
        let mut b = [0u8; 14];
        put::<6, 14, 8>(&mut b, 0x0102_0304_0506_0708u64.to_be_bytes());
        assert_eq!(b[6..], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(take64::<6, 14>(&b), 0x0102_0304_0506_0708);
        assert_eq!(take32::<10, 14>(&b), 0x0506_0708);
        assert_eq!(take16::<12, 14>(&b), 0x0708);
    }
}
