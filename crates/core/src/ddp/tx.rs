//! DDP transmit side: cuts messages into segments.
//!
//! The payload of a segment is at most MULPDU minus the length of the header. The segments of a message are sent in
//! order, the offset advances by the payload, and only the last one has the L bit (RFC 5041 §5).

use smallvec::SmallVec;

use crate::llp::mpa::frame::Segment;
use crate::verbs::source::Source;
use crate::wire::ddp::{Tagged, Untagged};
use crate::wire::rdmap::Opcode;
use crate::wire::{Msn, Stag, To};

/// How the segments of a message are addressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// A buffer that the peer advertised.
    Tagged {
        /// The buffer.
        stag: Stag,
        /// Offset of the message's first byte.
        to: To,
    },
    /// The next buffer of a queue.
    Untagged {
        /// The queue.
        qn: u32,
        /// Number of the message on that queue.
        msn: Msn,
        /// STag to invalidate, 0 for none.
        inv_stag: Stag,
        /// Offset field of the first segment. 0 except in control messages, which use the field for other data.
        mo: u32,
    },
}

/// A message to send.
#[derive(Debug, Clone)]
pub struct Message {
    /// The opcode.
    pub opcode: Opcode,
    /// The addressing of its segments.
    pub address: Address,
    /// The payload.
    pub source: Source,
    /// Payload bytes in total.
    pub len: u64,
    /// Payload bytes already in segments.
    pub sent: u64,
}

/// Cuts the next segment from `message`. A message of length zero is one segment.
pub fn segment(message: &mut Message, mulpdu: usize) -> Segment {
    let room = |header: usize| (mulpdu.saturating_sub(header)) as u64;
    let from = message.sent;
    let left = message.len - from;
    let (header, len, last) = match message.address {
        Address::Tagged { stag, to } => {
            let len = left.min(room(Tagged::LEN));
            let last = len == left;
            let header = Tagged {
                last,
                opcode: message.opcode,
                stag,
                to: To(to.0.wrapping_add(from)),
            };
            (SmallVec::from_slice(&header.emit()), len, last)
        }
        Address::Untagged {
            qn,
            msn,
            inv_stag,
            mo,
        } => {
            let len = left.min(room(Untagged::LEN));
            let last = len == left;
            let header = Untagged {
                last,
                opcode: message.opcode,
                inv_stag,
                qn,
                msn,
                mo: mo.wrapping_add(u32::try_from(from).unwrap_or(u32::MAX)),
            };
            (SmallVec::from_slice(&header.emit()), len, last)
        }
    };
    message.sent += len;
    Segment {
        header,
        from,
        len: usize::try_from(len).unwrap_or(0),
        last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ddp::Header;

    fn message(address: Address, len: usize) -> Message {
        Message {
            opcode: match address {
                Address::Tagged { .. } => Opcode::Write,
                Address::Untagged { .. } => Opcode::Send,
            },
            address,
            source: Source::Bytes(SmallVec::from_elem(7, len)),
            len: len as u64,
            sent: 0,
        }
    }

    #[test]
    fn a_message_of_2048_bytes_at_mulpdu_1500_has_these_segments() {
        let untagged = Address::Untagged {
            qn: 0,
            msn: Msn(1),
            inv_stag: Stag(0),
            mo: 0,
        };
        let mut m = message(untagged, 2048);
        assert_eq!(segment(&mut m, 1500).len, 1482);
        let last = segment(&mut m, 1500);
        assert_eq!((last.len, last.last), (566, true));
        let mut m = message(
            Address::Tagged {
                stag: Stag(1),
                to: To(100),
            },
            2048,
        );
        let first = segment(&mut m, 1500);
        assert_eq!((first.len, first.last), (1486, false));
        let last = segment(&mut m, 1500);
        assert_eq!((last.len, last.last), (562, true));
        let (Header::Tagged(h), _) = Header::parse(&last.header).unwrap() else {
            panic!()
        };
        assert_eq!(h.to, To(1586));
    }

    #[test]
    fn a_zero_length_message_is_one_last_segment() {
        let mut m = message(
            Address::Tagged {
                stag: Stag(1),
                to: To(0),
            },
            0,
        );
        let s = segment(&mut m, 1500);
        assert_eq!((s.len, s.last, m.sent == m.len), (0, true, true));
    }
}
