//! The frames of a trunk: a TCP connection that carries the streams of many queue pairs of two processes.
//!
//! ```text
//!  0         4      5         8         12
//! +---------+------+---------+---------+------------------+
//! | channel | kind |   len   | CRC32C  |  len bytes ...   |
//! +---------+------+---------+---------+------------------+
//!  kind: 0 the next bytes of the channel's stream; 1 the end of the stream, of length 0
//! ```
//!
//! The channel is the number that the receiving process has given its queue pair. The CRC covers the first 8 bytes: a damaged header
//! must not deliver FPDUs, whose own CRCs are correct, to another queue pair.

use crate::error::PeerError;
use crate::llp::mpa::crc::Crc32c;

/// Bytes of the header.
pub const HEADER: usize = 12;
/// Bytes before the CRC.
const COVERED: usize = 8;
/// Most bytes of one frame after its header: an FPDU of any length fits.
pub const MAX: usize = 64 << 10 | 1 << 10;

/// What a frame contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Bytes of a stream.
    Data,
    /// The end of a stream.
    End,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The receiver's number of the queue pair.
    pub channel: u32,
    /// What follows.
    pub kind: Kind,
    /// How many bytes follow.
    pub len: usize,
}

impl Header {
    /// The header in wire format. `len` is at most [`MAX`].
    #[must_use]
    pub fn emit(&self) -> [u8; HEADER] {
        let kind = match self.kind {
            Kind::Data => 0_u32,
            Kind::End => 1,
        };
        let len = u32::try_from(self.len).unwrap_or(u32::MAX) & 0x00ff_ffff;
        let [c0, c1, c2, c3] = self.channel.to_be_bytes();
        let [k, l0, l1, l2] = (kind << 24 | len).to_be_bytes();
        let covered = [c0, c1, c2, c3, k, l0, l1, l2];
        let [s0, s1, s2, s3] = sum(&covered);
        [c0, c1, c2, c3, k, l0, l1, l2, s0, s1, s2, s3]
    }

    /// Reads the header at the front of `bytes`. `None` if they are too few.
    ///
    /// # Errors
    /// The header is damaged, or breaks a rule.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, PeerError> {
        let Some((head, _)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [c0, c1, c2, c3, kind, l0, l1, l2, s0, s1, s2, s3] = *head;
        let covered = [c0, c1, c2, c3, kind, l0, l1, l2];
        if sum(&covered) != [s0, s1, s2, s3] {
            return Err(PeerError::Control("a damaged frame of a trunk"));
        }
        let len = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        let kind = match kind {
            0 if len <= MAX => Kind::Data,
            1 if len == 0 => Kind::End,
            _ => return Err(PeerError::Control("an unknown frame of a trunk")),
        };
        Ok(Some(Self {
            channel: u32::from_be_bytes([c0, c1, c2, c3]),
            kind,
            len,
        }))
    }
}

fn sum(covered: &[u8; COVERED]) -> [u8; 4] {
    Crc32c::of(covered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for (kind, len) in [(Kind::Data, 0), (Kind::Data, MAX), (Kind::End, 0)] {
            let header = Header {
                channel: 0x0102_0304,
                kind,
                len,
            };
            let bytes = header.emit();
            assert_eq!(Header::parse(&bytes), Ok(Some(header)));
            for short in 0..HEADER {
                assert_eq!(Header::parse(&bytes[..short]), Ok(None));
            }
            for bit in 0..8 * HEADER {
                let mut damaged = bytes;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert!(Header::parse(&damaged).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn other_kinds_and_lengths_are_refused() {
        let parse = |kind: u8, len: u32| {
            let [_, l0, l1, l2] = len.to_be_bytes();
            let covered = [0, 0, 0, 1, kind, l0, l1, l2];
            let mut bytes = covered.to_vec();
            bytes.extend(sum(&covered));
            Header::parse(&bytes)
        };
        assert!(parse(0, 1).is_ok());
        assert!(parse(0, MAX as u32 + 1).is_err());
        assert!(parse(1, 0).is_ok());
        assert!(parse(1, 1).is_err());
        assert!(parse(2, 0).is_err());
    }
}
