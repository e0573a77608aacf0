//! DDP segment headers (RFC 5041 §4), with the RDMAP control byte that fills their ULP field.
//!
//! One ULPDU is one segment. Its first byte tells which of the two headers it has. A tagged segment names a memory
//! location; an untagged segment names a queue and a message on it.

use super::rdmap::Opcode;
use super::{
    Msn, QN_ATOMIC_RESPONSE, QN_CONTROL, QN_READ, QN_SEND, QN_TERMINATE, Stag, To, put, take32,
    take64,
};
use crate::error::PeerError;

/// Header of a tagged segment.
///
/// ```text
///  0        1        2                 6                                14
/// +--------+--------+-----------------+----------------------------------+---------
/// |T L ..DV|RV ..op |      STag       |          Tagged Offset           | payload
/// +--------+--------+-----------------+----------------------------------+---------
///  T 0x80 = 1   L 0x40   reserved 0x3c   DV 0x03 = 1
///  RV 0xc0 = 1           reserved 0x30   op 0x0f
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tagged {
    /// Whether this is the last segment of its message.
    pub last: bool,
    /// The opcode of the message.
    pub opcode: Opcode,
    /// The buffer for the payload.
    pub stag: Stag,
    /// Offset in that buffer of this segment's payload.
    pub to: To,
}

/// Header of an untagged segment.
///
/// ```text
///  0        1        2           6           10          14          18
/// +--------+--------+-----------+-----------+-----------+-----------+---------
/// |T L ..DV|RV ..op | Inv. STag |    QN     |    MSN    |    MO     | payload
/// +--------+--------+-----------+-----------+-----------+-----------+---------
///  T 0x80 = 0, everything else as in a tagged segment
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Untagged {
    /// Whether this is the last segment of its message.
    pub last: bool,
    /// The opcode of the message.
    pub opcode: Opcode,
    /// The STag that a Send with Invalidate invalidates. Otherwise zero and ignored.
    pub inv_stag: Stag,
    /// The queue.
    pub qn: u32,
    /// Number of the message on that queue and in this direction.
    pub msn: Msn,
    /// Offset in the message of this segment's payload.
    pub mo: u32,
}

/// Either header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Header {
    /// The segment names a memory location.
    Tagged(Tagged),
    /// The segment uses the next buffer of a queue.
    Untagged(Untagged),
}

impl Header {
    /// Parses the header of a segment from a stream. Also returns the offset of the payload.
    ///
    /// Checks the versions, and that the opcode exists, and that it belongs to this kind of header and to this queue.
    ///
    /// # Errors
    /// The error of the first check that fails, or that the segment is shorter than its header.
    pub fn parse(ulpdu: &[u8]) -> Result<(Self, usize), PeerError> {
        Self::parse_with(ulpdu, Opcode::from_bits)
    }

    /// Parses the header of a segment from a datagram.
    ///
    /// Differs from [`Header::parse`] in one way: opcode 0xF in a tagged segment is a Write-Record, which exists on
    /// datagrams only.
    ///
    /// # Errors
    /// The errors of [`Header::parse`].
    pub fn parse_datagram(segment: &[u8]) -> Result<(Self, usize), PeerError> {
        let tagged = segment.first().is_some_and(|ctrl| ctrl & TAGGED != 0);
        Self::parse_with(segment, |bits| match Opcode::from_bits(bits) {
            Some(Opcode::Control) if tagged => Some(Opcode::WriteRecord),
            other => other,
        })
    }

    fn parse_with(
        ulpdu: &[u8],
        opcode_of: impl FnOnce(u8) -> Option<Opcode>,
    ) -> Result<(Self, usize), PeerError> {
        match ulpdu.first() {
            Some(ctrl) if ctrl & TAGGED != 0 => {
                let head = head_of::<{ Tagged::LEN }>(ulpdu)?;
                Ok((
                    Self::Tagged(Tagged::parse_with(head, opcode_of)?),
                    Tagged::LEN,
                ))
            }
            _ => {
                let head = head_of::<{ Untagged::LEN }>(ulpdu)?;
                Ok((
                    Self::Untagged(Untagged::parse_with(head, opcode_of)?),
                    Untagged::LEN,
                ))
            }
        }
    }

    /// The opcode of the message.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(h) => h.opcode,
            Self::Untagged(h) => h.opcode,
        }
    }

    /// Whether this is the last segment of its message.
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(h) => h.last,
            Self::Untagged(h) => h.last,
        }
    }

    /// Length of the header on the wire.
    pub const fn wire_len(&self) -> usize {
        match self {
            Self::Tagged(_) => Tagged::LEN,
            Self::Untagged(_) => Untagged::LEN,
        }
    }
}

impl Tagged {
    /// Length on the wire.
    pub const LEN: usize = 14;

    fn parse_with(
        head: &[u8; Self::LEN],
        opcode_of: impl FnOnce(u8) -> Option<Opcode>,
    ) -> Result<Self, PeerError> {
        let [ctrl, ulp, ..] = *head;
        // RFC 5041 §4.1 [ddp-version-tagged]: only DDP version 1 is supported.
        let version = ctrl & DDP_VERSION_MASK;
        if version != DDP_VERSION {
            return Err(PeerError::TaggedVersion { version });
        }
        let opcode = rdmap_control(ulp, opcode_of)?;
        // RFC 5040 §4.2 [rdmap-model]: each opcode is either always tagged or never.
        if !opcode.is_tagged() {
            return Err(PeerError::Opcode {
                opcode: opcode.bits(),
            });
        }
        Ok(Self {
            last: ctrl & LAST != 0,
            opcode,
            stag: Stag(take32::<2, { Self::LEN }>(head)),
            to: To(take64::<6, { Self::LEN }>(head)),
        })
    }

    /// The header in wire format.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 2>(&mut b, control(TAGGED, self.last, self.opcode));
        put::<2, { Self::LEN }, 4>(&mut b, self.stag.0.to_be_bytes());
        put::<6, { Self::LEN }, 8>(&mut b, self.to.0.to_be_bytes());
        b
    }
}

impl Untagged {
    /// Length on the wire.
    pub const LEN: usize = 18;

    fn parse_with(
        head: &[u8; Self::LEN],
        opcode_of: impl FnOnce(u8) -> Option<Opcode>,
    ) -> Result<Self, PeerError> {
        let [ctrl, ulp, ..] = *head;
        // RFC 5041 §4.1 [ddp-version-untagged]: only DDP version 1 is supported.
        let version = ctrl & DDP_VERSION_MASK;
        if version != DDP_VERSION {
            return Err(PeerError::UntaggedVersion { version });
        }
        let opcode = rdmap_control(ulp, opcode_of)?;
        // RFC 5041 §7.1 [ddp-qn]: the queue must exist, and must be the queue of this opcode.
        let qn = take32::<6, { Self::LEN }>(head);
        match opcode.queue() {
            None => {
                return Err(PeerError::Opcode {
                    opcode: opcode.bits(),
                });
            }
            Some(of_opcode) if of_opcode != qn => return Err(PeerError::UntaggedQueue { qn }),
            Some(_) => {}
        }
        Ok(Self {
            last: ctrl & LAST != 0,
            opcode,
            inv_stag: Stag(take32::<2, { Self::LEN }>(head)),
            qn,
            msn: Msn(take32::<10, { Self::LEN }>(head)),
            mo: take32::<14, { Self::LEN }>(head),
        })
    }

    /// The header in wire format.
    #[inline]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 2>(&mut b, control(0, self.last, self.opcode));
        put::<2, { Self::LEN }, 4>(&mut b, self.inv_stag.0.to_be_bytes());
        put::<6, { Self::LEN }, 4>(&mut b, self.qn.to_be_bytes());
        put::<10, { Self::LEN }, 4>(&mut b, self.msn.0.to_be_bytes());
        put::<14, { Self::LEN }, 4>(&mut b, self.mo.to_be_bytes());
        b
    }
}

impl Opcode {
    /// Whether messages of this kind are tagged.
    pub const fn is_tagged(self) -> bool {
        self.queue().is_none()
    }

    /// The queue of an untagged message, `None` for a tagged one.
    pub const fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse | Self::WriteRecord => None,
            Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::Immediate
            | Self::ImmediateSolicited => Some(QN_SEND),
            Self::ReadRequest | Self::AtomicRequest => Some(QN_READ),
            Self::Terminate => Some(QN_TERMINATE),
            Self::AtomicResponse => Some(QN_ATOMIC_RESPONSE),
            Self::Control => Some(QN_CONTROL),
        }
    }
}

fn head_of<const N: usize>(ulpdu: &[u8]) -> Result<&[u8; N], PeerError> {
    ulpdu.first_chunk().ok_or(PeerError::MpaTooShort {
        need: N,
        got: ulpdu.len(),
    })
}

fn rdmap_control(
    ulp: u8,
    opcode_of: impl FnOnce(u8) -> Option<Opcode>,
) -> Result<Opcode, PeerError> {
    // RFC 5040 §4.1 [rdmap-version]: only RDMAP version 1 is supported.
    let version = ulp >> 6;
    if version != RDMAP_VERSION {
        return Err(PeerError::RdmapVersion { version });
    }
    // RFC 5040 §4.1 [rdmap-opcode]: an unassigned opcode ends the stream.
    let bits = ulp & OPCODE_MASK;
    opcode_of(bits).ok_or(PeerError::Opcode { opcode: bits })
}

/// The first two bytes of either header.
fn control(tagged: u8, last: bool, opcode: Opcode) -> [u8; 2] {
    let last = if last { LAST } else { 0 };
    [
        tagged | last | DDP_VERSION,
        RDMAP_VERSION << 6 | opcode.bits(),
    ]
}

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_MASK: u8 = 0x03;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION: u8 = 1;
const OPCODE_MASK: u8 = 0x0f;

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Tagged = Tagged {
        last: true,
        opcode: Opcode::Write,
        stag: Stag(0x00ab_cd01),
        to: To(0x1000),
    };
    const SEND: Untagged = Untagged {
        last: true,
        opcode: Opcode::SendSolicitedInvalidate,
        inv_stag: Stag(0x00ab_cd01),
        qn: 0,
        msn: Msn(2),
        mo: 0,
    };

    #[test]
    fn headers_have_these_bytes() {
        // An RDMA Write, and a Send with Solicited Event and Invalidate.
        let write = [0xc1, 0x40, 0, 0xab, 0xcd, 1, 0, 0, 0, 0, 0, 0, 0x10, 0];
        assert_eq!(WRITE.emit(), write);
        assert_eq!(Header::parse(&write), Ok((Header::Tagged(WRITE), 14)));
        let send = [
            0x41, 0x46, 0, 0xab, 0xcd, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0,
        ];
        assert_eq!(SEND.emit(), send);
        assert_eq!(Header::parse(&send), Ok((Header::Untagged(SEND), 18)));
    }

    #[test]
    fn one_byte_less_than_the_header_is_too_short() {
        for (bytes, need) in [(&WRITE.emit()[..], 14), (&SEND.emit()[..], 18)] {
            assert!(Header::parse(bytes).is_ok());
            for got in 1..need {
                let short = Err(PeerError::MpaTooShort { need, got });
                assert_eq!(Header::parse(&bytes[..got]), short);
            }
        }
        assert_eq!(
            Header::parse(&[]),
            Err(PeerError::MpaTooShort { need: 18, got: 0 })
        );
    }

    #[test]
    fn other_versions_than_one_are_refused() {
        for version in [0, 2, 3] {
            let mut write = WRITE.emit();
            write[0] = write[0] & !3 | version;
            assert_eq!(
                Header::parse(&write),
                Err(PeerError::TaggedVersion { version })
            );
            let mut send = SEND.emit();
            send[0] = send[0] & !3 | version;
            assert_eq!(
                Header::parse(&send),
                Err(PeerError::UntaggedVersion { version })
            );
            let mut write = WRITE.emit();
            write[1] = version << 6;
            assert_eq!(
                Header::parse(&write),
                Err(PeerError::RdmapVersion { version })
            );
        }
    }

    #[test]
    fn reserved_bits_are_ignored() {
        let mut write = WRITE.emit();
        write[0] |= 0x3c;
        write[1] |= 0x30;
        assert_eq!(Header::parse(&write), Ok((Header::Tagged(WRITE), 14)));
    }

    #[test]
    fn each_opcode_has_one_buffer_model_and_one_queue() {
        for bits in 0..16 {
            let mut tagged = WRITE.emit();
            tagged[1] = 0x40 | bits;
            let mut untagged = SEND.emit();
            untagged[1] = 0x40 | bits;
            let refused = Err(PeerError::Opcode { opcode: bits });
            let queue = match bits {
                0 | 2 => {
                    assert!(Header::parse(&tagged).is_ok());
                    assert_eq!(Header::parse(&untagged), refused);
                    continue;
                }
                0xc..=0xe => {
                    assert_eq!(Header::parse(&tagged), refused);
                    assert_eq!(Header::parse(&untagged), refused);
                    continue;
                }
                1 | 0xa => 1,
                3..=6 | 8 | 9 => 0,
                7 => 2,
                0xb => 3,
                _ => 4,
            };
            assert_eq!(Header::parse(&tagged), refused);
            for qn in 0..6 {
                untagged[9] = qn;
                let parsed = Header::parse(&untagged);
                if qn == queue {
                    assert_eq!(parsed.unwrap().0.opcode().bits(), bits);
                } else {
                    assert_eq!(parsed, Err(PeerError::UntaggedQueue { qn: qn.into() }));
                }
            }
        }
    }

    #[test]
    fn a_write_record_exists_in_datagrams_only() {
        let record = Tagged {
            opcode: Opcode::WriteRecord,
            ..WRITE
        };
        let bytes = record.emit();
        assert_eq!(bytes[1], 0x4f);
        assert_eq!(Header::parse(&bytes), Err(PeerError::Opcode { opcode: 15 }));
        assert_eq!(
            Header::parse_datagram(&bytes),
            Ok((Header::Tagged(record), 14))
        );
        assert_eq!(
            Header::parse_datagram(&WRITE.emit()),
            Ok((Header::Tagged(WRITE), 14))
        );
        assert_eq!(
            Header::parse_datagram(&SEND.emit()),
            Ok((Header::Untagged(SEND), 18))
        );
    }

    #[test]
    fn parsed_random_bytes_are_written_unchanged() {
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..50_000 {
            let mut bytes = [0u8; 18];
            for b in &mut bytes {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                *b = x as u8;
            }
            // Most random headers fail early, so half of them get a valid version.
            if x & 0x100 != 0 {
                bytes[0] = bytes[0] & 0xc0 | 1;
                bytes[1] = bytes[1] & 0x0f | 0x40;
                let qn = bytes[9] & 7;
                bytes[6..10].copy_from_slice(&[0, 0, 0, qn]);
            }
            match Header::parse(&bytes) {
                Ok((Header::Tagged(h), 14)) => {
                    let clean = [bytes[0] & !0x3c, bytes[1] & !0x30];
                    assert_eq!(
                        (&h.emit()[..2], &h.emit()[2..]),
                        (&clean[..], &bytes[2..14])
                    );
                }
                Ok((Header::Untagged(h), 18)) => {
                    let clean = [bytes[0] & !0x3c, bytes[1] & !0x30];
                    assert_eq!((&h.emit()[..2], &h.emit()[2..]), (&clean[..], &bytes[2..]));
                }
                Ok(other) => panic!("{other:?}"),
                Err(_) => {}
            }
        }
    }
}
