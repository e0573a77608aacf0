//! Datagrams over UDP: RFC 5041 segments after a shim, and messages of the connection manager.
//!
//! The shim contains what TCP and MPA provide on a stream: identity, length and order. Both kinds of datagram end
//! with a CRC32C, least significant byte first, which is always present and always checked. The first byte
//! distinguishes the kinds.

use core::fmt;

use super::ddp::{Header, Untagged};
use super::rdmap::Opcode;
use super::{Msn, QN_SEND, Stag, put, take, take16, take32};
use crate::error::PeerError;
use crate::llp::mpa::crc::Crc32c;

/// The header in front of the DDP header of a segment in a datagram.
///
/// ```text
///  0    1    2       4          8          12         16         20   21   22   23   24   26
/// +----+----+-------+----------+----------+----------+----------+----+----+----+----+----+
/// |0xDC|1 fl| epoch |  Q_Key   |    id    |  length  |  offset  |sub |attr|dst |src |seg |
/// +----+----+-------+----------+----------+----------+----------+----+----+----+----+----+
///       fl: I 0x1  Z 0x2  P 0x4
///  then, if I:  immediate (4), zero (4)
///  then: DDP header (14 or 18), payload, CRC32C (4)
/// ```
///
/// Without immediate data, the payload of a tagged segment starts at byte 40, and that of an untagged segment at byte 44.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shim {
    /// Random number, which distinguishes the queue pair from an earlier one with the same queue pair number. Never 0.
    pub epoch: u16,
    /// The Q_Key. The receiver drops the datagram unless this is the key of the destination queue pair.
    pub qkey: u32,
    /// Number of the message, counted per source queue pair over all destinations.
    pub id: u32,
    /// Length of the whole message, bytes.
    pub length: u32,
    /// Offset of this payload in the message.
    pub offset: u32,
    /// One of the `SUB_` constants.
    pub sub_op: u8,
    /// A set of `ATTR_` constants.
    pub attributes: u8,
    /// Index of the destination queue pair on its port.
    pub dst_index: u8,
    /// Index of the source queue pair on its port.
    pub src_index: u8,
    /// I: immediate data.
    pub immediate: Option<[u8; 4]>,
    /// Z: no payload; the datagram ends the message, and `offset` is the length of the message.
    pub commit: bool,
    /// P: the payload is the exclusive or of the payloads of the group of datagrams that begins at `offset`.
    pub parity: bool,
    /// Number of datagrams in a parity group, encoded in the upper four bits of the attributes byte. 0: there are no groups.
    pub group: u8,
    /// Payload length of all datagrams of the message but the last, if there are groups.
    pub segment: u16,
}

/// Sub-operation: the operation is that of the opcode.
pub const SUB_PLAIN: u8 = 0;
/// Sub-operation: Write-Record.
pub const SUB_RECORD: u8 = 1;
/// Sub-operation: Write-Record with immediate data for the record.
pub const SUB_RECORD_IMMEDIATE: u8 = 2;
/// Sub-operation: error report, a Terminate that does not end the queue pair.
pub const SUB_ERROR: u8 = 3;

/// Attribute: a solicited event is requested.
pub const ATTR_SOLICITED: u8 = 0x01;
/// Attribute of Write-Records. It has no meaning, and receivers ignore it.
pub const ATTR_RECORD: u8 = 0x02;
/// Attribute: copy of the final datagram.
pub const ATTR_FINAL_COPY: u8 = 0x04;
/// Attribute: one record per datagram, instead of one per message.
pub const ATTR_NOT_AGGREGATED: u8 = 0x08;

/// A segment in a datagram, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The shim.
    pub shim: Shim,
    /// The DDP header.
    pub header: Header,
    /// What follows the DDP header: data, or the RDMAP header of a Read Request, an atomic or a Terminate.
    pub payload: &'a [u8],
}

/// Why a datagram is dropped. A dropped datagram is not answered. Queue pairs count [`Self::Crc`] separately, and all other reasons together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DgramError {
    /// Shorter than its headers and CRC.
    TooShort,
    /// Wrong CRC.
    Crc,
    /// The first byte is not that of this kind.
    Magic,
    /// An unsupported version.
    Version,
    /// Epoch 0.
    Epoch,
    /// The DDP or RDMAP header breaks a rule.
    Header(PeerError),
    /// Sub-operation and opcode contradict each other.
    SubOperation,
    /// The offset of the shim differs from that of the DDP header, or the message would begin below address 0.
    Offset,
    /// The payload does not lie inside its message, or the last datagram does not end it.
    Length,
    /// A commit that has a payload, or that does not end its message.
    Commit,
    /// An unknown kind of connection manager message.
    CmKind,
    /// Private data that is longer than allowed, or does not have the length in its header.
    CmPrivateData,
}

impl fmt::Display for DgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort => write!(f, "datagram shorter than its headers"),
            Self::Crc => write!(f, "datagram crc mismatch"),
            Self::Magic => write!(f, "unknown kind of datagram"),
            Self::Version => write!(f, "unknown datagram version"),
            Self::Epoch => write!(f, "epoch 0"),
            Self::Header(e) => write!(f, "bad header in datagram: {e}"),
            Self::SubOperation => write!(f, "sub-operation does not fit the opcode"),
            Self::Offset => write!(f, "message offset does not fit the header"),
            Self::Length => write!(f, "payload does not fit the message"),
            Self::Commit => write!(f, "commit with payload or not last"),
            Self::CmKind => write!(f, "unknown connection manager message"),
            Self::CmPrivateData => write!(f, "bad private data length"),
        }
    }
}

impl core::error::Error for DgramError {}

/// Parses a datagram.
///
/// Checks all rules that need only the datagram. It does not check the Q_Key, the index, or whether the message is known.
///
/// # Errors
/// The first rule that the datagram breaks. The caller drops it.
pub fn parse(bytes: &[u8]) -> Result<Datagram<'_>, DgramError> {
    parse_covered(checked(bytes)?)
}

/// Parses a datagram that is covered by the CRC of the packet around it ([`super::rd`]).
///
/// # Errors
/// As [`parse`].
pub fn parse_covered(bytes: &[u8]) -> Result<Datagram<'_>, DgramError> {
    let Some((head, rest)) = bytes.split_first_chunk::<{ Shim::LEN }>() else {
        return Err(DgramError::TooShort);
    };
    let [magic, version, ..] = *head;
    if magic != MAGIC_DATA {
        return Err(DgramError::Magic);
    }
    if version >> 4 != VERSION {
        return Err(DgramError::Version);
    }
    let (immediate, rest) = if version & FLAG_IMMEDIATE != 0 {
        let Some((block, rest)) = rest.split_first_chunk::<IMMEDIATE_LEN>() else {
            return Err(DgramError::TooShort);
        };
        (Some(take::<0, IMMEDIATE_LEN, 4>(block)), rest)
    } else {
        (None, rest)
    };
    let [sub_op, attributes, dst_index, src_index] = take::<20, { Shim::LEN }, 4>(head);
    let shim = Shim {
        epoch: take16::<2, { Shim::LEN }>(head),
        qkey: take32::<4, { Shim::LEN }>(head),
        id: take32::<8, { Shim::LEN }>(head),
        length: take32::<12, { Shim::LEN }>(head),
        offset: take32::<16, { Shim::LEN }>(head),
        sub_op,
        attributes: attributes & 0x0f,
        dst_index,
        src_index,
        immediate,
        commit: version & FLAG_COMMIT != 0,
        parity: version & FLAG_PARITY != 0,
        group: attributes >> 4,
        segment: take16::<24, { Shim::LEN }>(head),
    };
    if shim.epoch == 0 {
        return Err(DgramError::Epoch);
    }
    let (header, header_len) = match Header::parse_datagram(rest) {
        Ok(parsed) => parsed,
        Err(PeerError::MpaTooShort { .. }) => return Err(DgramError::TooShort),
        Err(e) => return Err(DgramError::Header(e)),
    };
    let payload = rest.get(header_len..).unwrap_or_default();
    check(&shim, &header, payload.len())?;
    Ok(Datagram {
        shim,
        header,
        payload,
    })
}

/// Checks the rules that relate shim, DDP header and payload (docs/datagram-iwarp.md, section 2).
fn check(shim: &Shim, header: &Header, payload: usize) -> Result<(), DgramError> {
    let fits = match (header.opcode(), shim.sub_op) {
        (Opcode::WriteRecord, SUB_RECORD) | (Opcode::Terminate, SUB_ERROR) => true,
        (Opcode::WriteRecord, SUB_RECORD_IMMEDIATE) => shim.immediate.is_some(),
        (Opcode::WriteRecord | Opcode::Terminate, _) => false,
        (_, sub_op) => sub_op == SUB_PLAIN,
    };
    if !fits {
        return Err(DgramError::SubOperation);
    }
    // Tagged: TO minus offset is the beginning of the message, so it must not be negative.
    let in_place = match header {
        Header::Tagged(h) => h.to.0 >= u64::from(shim.offset),
        Header::Untagged(h) => h.mo == shim.offset,
    };
    if !in_place {
        return Err(DgramError::Offset);
    }
    if shim.commit && (payload > 0 || !header.last()) {
        return Err(DgramError::Commit);
    }
    let end = u64::from(shim.offset) + payload as u64;
    let length = u64::from(shim.length);
    if end > length || (header.last() && end != length) {
        return Err(DgramError::Length);
    }
    Ok(())
}

impl Shim {
    /// Length on the wire without the immediate block.
    pub const LEN: usize = 26;

    /// Length on the wire of everything in front of the payload.
    pub const fn head_len(&self, header: &Header) -> usize {
        let immediate = if self.immediate.is_some() {
            IMMEDIATE_LEN
        } else {
            0
        };
        Self::LEN + immediate + header.wire_len()
    }
}

/// Appends everything in front of the payload to `out`.
pub fn put_head(shim: &Shim, header: &Header, out: &mut Vec<u8>) {
    out.extend_from_slice(&shim_bytes(shim));
    if let Some(value) = shim.immediate {
        out.extend_from_slice(&value);
        out.extend_from_slice(&[0; 4]);
    }
    match header {
        Header::Tagged(h) => out.extend_from_slice(&h.emit()),
        Header::Untagged(h) => out.extend_from_slice(&h.emit()),
    }
}

/// The shim in wire format. The immediate data, if there are any, and the DDP header follow it.
pub fn shim_bytes(shim: &Shim) -> [u8; Shim::LEN] {
    let mut flags = 0;
    for (set, flag) in [
        (shim.immediate.is_some(), FLAG_IMMEDIATE),
        (shim.commit, FLAG_COMMIT),
        (shim.parity, FLAG_PARITY),
    ] {
        if set {
            flags |= flag;
        }
    }
    let mut head = [0; Shim::LEN];
    put::<0, { Shim::LEN }, 2>(&mut head, [MAGIC_DATA, VERSION << 4 | flags]);
    put::<2, { Shim::LEN }, 2>(&mut head, shim.epoch.to_be_bytes());
    put::<4, { Shim::LEN }, 4>(&mut head, shim.qkey.to_be_bytes());
    put::<8, { Shim::LEN }, 4>(&mut head, shim.id.to_be_bytes());
    put::<12, { Shim::LEN }, 4>(&mut head, shim.length.to_be_bytes());
    put::<16, { Shim::LEN }, 4>(&mut head, shim.offset.to_be_bytes());
    let attributes = shim.attributes & 0x0f | shim.group << 4;
    let small = [shim.sub_op, attributes, shim.dst_index, shim.src_index];
    put::<20, { Shim::LEN }, 4>(&mut head, small);
    put::<24, { Shim::LEN }, 2>(&mut head, shim.segment.to_be_bytes());
    head
}

/// The fields that differ between Sends that are one datagram without immediate data. Most datagrams are such Sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendHead {
    /// See [`Shim::epoch`].
    pub epoch: u16,
    /// See [`Shim::qkey`].
    pub qkey: u32,
    /// See [`Shim::id`].
    pub id: u32,
    /// See [`Shim::length`].
    pub length: u32,
    /// See [`Shim::dst_index`].
    pub dst_index: u8,
    /// See [`Shim::src_index`].
    pub src_index: u8,
    /// Whether a solicited event is requested.
    pub solicited: bool,
}

/// Length of the headers of a [`SendHead`] on the wire.
pub const SEND_HEAD: usize = Shim::LEN + Untagged::LEN;

/// The bytes of a head as numbers, which are compared faster than an array of bytes. The last two numbers overlap.
#[inline]
fn words(head: &[u8; SEND_HEAD]) -> [u64; 6] {
    [
        take::<0, SEND_HEAD, 8>(head),
        take::<8, SEND_HEAD, 8>(head),
        take::<16, SEND_HEAD, 8>(head),
        take::<24, SEND_HEAD, 8>(head),
        take::<32, SEND_HEAD, 8>(head),
        take::<36, SEND_HEAD, 8>(head),
    ]
    .map(u64::from_ne_bytes)
}

impl SendHead {
    /// Parses a datagram without checking its CRC. Returns `None` if it is not a whole Send of this kind.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (covered, _crc) = bytes.split_last_chunk::<CRC>()?;
        let (head, payload) = covered.split_first_chunk()?;
        let [sub_op, attributes, dst_index, src_index] = take::<20, SEND_HEAD, 4>(head);
        let this = Self {
            epoch: take16::<2, SEND_HEAD>(head),
            qkey: take32::<4, SEND_HEAD>(head),
            id: take32::<8, SEND_HEAD>(head),
            length: take32::<12, SEND_HEAD>(head),
            dst_index,
            src_index,
            solicited: attributes == ATTR_SOLICITED,
        };
        // All other fields must have the values of such a Send.
        let fits = sub_op == SUB_PLAIN
            && this.epoch != 0
            && this.length as usize == payload.len()
            && words(&this.emit()) == words(head);
        fits.then_some((this, payload))
    }

    /// The opcode.
    pub const fn opcode(&self) -> Opcode {
        Opcode::send(false, self.solicited)
    }

    /// The DDP header.
    #[inline]
    pub const fn untagged(&self) -> Untagged {
        Untagged {
            last: true,
            opcode: self.opcode(),
            inv_stag: Stag(0),
            qn: QN_SEND,
            msn: Msn(self.id),
            mo: 0,
        }
    }

    /// Everything in front of the payload.
    #[inline]
    pub fn emit(&self) -> [u8; SEND_HEAD] {
        let attributes = if self.solicited { ATTR_SOLICITED } else { 0 };
        let mut head = [0; SEND_HEAD];
        put::<0, SEND_HEAD, 2>(&mut head, [MAGIC_DATA, VERSION << 4]);
        put::<2, SEND_HEAD, 2>(&mut head, self.epoch.to_be_bytes());
        put::<4, SEND_HEAD, 4>(&mut head, self.qkey.to_be_bytes());
        put::<8, SEND_HEAD, 4>(&mut head, self.id.to_be_bytes());
        put::<12, SEND_HEAD, 4>(&mut head, self.length.to_be_bytes());
        let small = [SUB_PLAIN, attributes, self.dst_index, self.src_index];
        put::<20, SEND_HEAD, 4>(&mut head, small);
        put::<{ Shim::LEN }, SEND_HEAD, { Untagged::LEN }>(&mut head, self.untagged().emit());
        head
    }
}

/// Everything in front of the payload.
pub fn emit_head(shim: &Shim, header: &Header) -> Vec<u8> {
    let mut out = Vec::with_capacity(shim.head_len(header));
    put_head(shim, header, &mut out);
    out
}

/// Appends the CRC of `datagram`. If the payload is elsewhere in memory, the caller computes a [`Crc32c`] over the
/// pieces and sends its four bytes last.
#[inline]
pub fn seal(datagram: &mut Vec<u8>) {
    let crc = Crc32c::of(datagram);
    datagram.extend_from_slice(&crc);
}

/// Whether this is a message of the connection manager. Only the first byte is checked.
pub fn is_cm(bytes: &[u8]) -> bool {
    bytes.first() == Some(&MAGIC_CM)
}

/// A message of the connection manager, which finds the queue pair behind a port.
///
/// ```text
///  0    1    2       4          8    9        12         16         20
/// +----+----+-------+----------+----+--------+----------+----------+--------------+-----+
/// |0xDD|1 kd|pd len |    id    |stat|  zero  |   qpn    |  Q_Key   | private data | CRC |
/// +----+----+-------+----------+----+--------+----------+----------+--------------+-----+
///       kd: 1 request, which has no bytes 8 to 20; 2 reply
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cm {
    /// A request.
    Request(CmRequest),
    /// A reply.
    Reply(CmReply),
}

/// Requests the queue pair that listens on this port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CmRequest {
    /// Identifier that the reply repeats; it does not change when the request is sent again.
    pub id: u32,
    /// Private data of the application; at most [`CM_PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
}

/// The answer to a [`CmRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CmReply {
    /// Copied from the request.
    pub id: u32,
    /// 0: accepted. Otherwise the reason of the rejection.
    pub status: u8,
    /// The queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// Private data of the application; at most [`CM_PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
}

impl Cm {
    /// Parses a message.
    ///
    /// # Errors
    /// The first rule that the message breaks. The caller drops it.
    pub fn parse(bytes: &[u8]) -> Result<Self, DgramError> {
        let bytes = checked(bytes)?;
        let Some((head, rest)) = bytes.split_first_chunk::<CM_HEAD>() else {
            return Err(DgramError::TooShort);
        };
        let [magic, version, ..] = *head;
        if magic != MAGIC_CM {
            return Err(DgramError::Magic);
        }
        if version >> 4 != VERSION {
            return Err(DgramError::Version);
        }
        let len = usize::from(take16::<2, CM_HEAD>(head));
        let id = take32::<4, CM_HEAD>(head);
        let private_data = |bytes: &[u8]| {
            if len <= CM_PRIVATE_DATA && bytes.len() == len {
                Ok(bytes.to_vec())
            } else {
                Err(DgramError::CmPrivateData)
            }
        };
        match version & 0x0f {
            CM_REQUEST => Ok(Self::Request(CmRequest {
                id,
                private_data: private_data(rest)?,
            })),
            CM_REPLY => {
                let Some((fixed, rest)) = rest.split_first_chunk::<CM_REPLY_FIXED>() else {
                    return Err(DgramError::TooShort);
                };
                let [status, ..] = *fixed;
                Ok(Self::Reply(CmReply {
                    id,
                    status,
                    qpn: take32::<4, CM_REPLY_FIXED>(fixed),
                    qkey: take32::<8, CM_REPLY_FIXED>(fixed),
                    private_data: private_data(rest)?,
                }))
            }
            _ => Err(DgramError::CmKind),
        }
    }

    /// The message in wire format, with CRC. Private data beyond [`CM_PRIVATE_DATA`] is cut off.
    pub fn emit(&self) -> Vec<u8> {
        let (kind, id, private_data) = match self {
            Self::Request(m) => (CM_REQUEST, m.id, &m.private_data),
            Self::Reply(m) => (CM_REPLY, m.id, &m.private_data),
        };
        let private_data = private_data.get(..CM_PRIVATE_DATA).unwrap_or(private_data);
        let mut out = vec![MAGIC_CM, VERSION << 4 | kind];
        out.extend((private_data.len() as u16).to_be_bytes());
        out.extend(id.to_be_bytes());
        if let Self::Reply(m) = self {
            out.extend([m.status, 0, 0, 0]);
            out.extend(m.qpn.to_be_bytes());
            out.extend(m.qkey.to_be_bytes());
        }
        out.extend(private_data);
        seal(&mut out);
        out
    }
}

/// Returns the datagram without its CRC, if the CRC is correct. This is the first check, since all other fields of a
/// damaged datagram are meaningless.
#[inline]
pub(crate) fn checked(bytes: &[u8]) -> Result<&[u8], DgramError> {
    let Some((covered, crc)) = bytes.split_last_chunk::<CRC>() else {
        return Err(DgramError::TooShort);
    };
    if Crc32c::of(covered) == *crc {
        Ok(covered)
    } else {
        Err(DgramError::Crc)
    }
}

/// Largest private data in a connection manager message, bytes: `RDMA_MAX_PRIVATE_DATA` of the rdma_cm ABI.
pub const CM_PRIVATE_DATA: usize = 256;

/// Bytes after the payload.
pub const CRC: usize = 4;

const MAGIC_DATA: u8 = 0xdc;
const MAGIC_CM: u8 = 0xdd;
const VERSION: u8 = 1;
const FLAG_IMMEDIATE: u8 = 0x1;
const FLAG_COMMIT: u8 = 0x2;
const FLAG_PARITY: u8 = 0x4;
const IMMEDIATE_LEN: usize = 8;
const CM_REQUEST: u8 = 1;
const CM_REPLY: u8 = 2;
const CM_HEAD: usize = 8;
const CM_REPLY_FIXED: usize = 12;

#[cfg(test)]
mod tests {
    use super::super::To;
    use super::super::ddp::Tagged;
    use super::*;

    #[test]
    fn the_short_form_of_a_head_is_the_head() {
        for solicited in [false, true] {
            let head = SendHead {
                epoch: 0x1234,
                qkey: 0x8765_4321,
                id: 0xfedc_ba98,
                length: 70_000,
                dst_index: 3,
                src_index: 7,
                solicited,
            };
            let shim = Shim {
                qkey: head.qkey,
                attributes: u8::from(solicited),
                ..shim(head.id, head.length)
            };
            let header = Header::Untagged(Untagged {
                last: true,
                opcode: Opcode::send(false, solicited),
                inv_stag: Stag(0),
                qn: QN_SEND,
                msn: Msn(head.id),
                mo: 0,
            });
            assert_eq!(head.emit().to_vec(), emit_head(&shim, &header));
        }
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn shim(id: u32, length: u32) -> Shim {
        Shim {
            epoch: 0x1234,
            qkey: 0x1111_1111,
            id,
            length,
            offset: 0,
            sub_op: SUB_PLAIN,
            attributes: 0,
            dst_index: 3,
            src_index: 7,
            immediate: None,
            commit: false,
            parity: false,
            group: 0,
            segment: 0,
        }
    }

    fn send(msn: u32) -> Header {
        Header::Untagged(Untagged {
            last: true,
            opcode: Opcode::Send,
            inv_stag: Stag(0),
            qn: 0,
            msn: Msn(msn),
            mo: 0,
        })
    }

    fn record(to: u64) -> Header {
        let opcode = Opcode::WriteRecord;
        Header::Tagged(Tagged {
            last: true,
            opcode,
            stag: Stag(0x00ab_cd01),
            to: To(to),
        })
    }

    fn whole(shim: &Shim, header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut bytes = emit_head(shim, header);
        assert_eq!(bytes.len(), shim.head_len(header));
        bytes.extend(payload);
        seal(&mut bytes);
        bytes
    }

    fn record_shim(id: u32, length: u32) -> Shim {
        Shim {
            sub_op: SUB_RECORD,
            attributes: ATTR_RECORD,
            ..shim(id, length)
        }
    }

    #[test]
    fn datagrams_made_by_another_program() {
        let bytes: Vec<u8> = (0..16).collect();
        let immediate = Shim {
            sub_op: SUB_RECORD_IMMEDIATE,
            immediate: Some([0x11, 0x22, 0x33, 0x44]),
            ..record_shim(4, 8)
        };
        #[rustfmt::skip]
        let table = [
            (shim(1, 5), send(1), &b"hello"[..],
             "dc101234 11111111 00000001 00000005 00000000 0000 0307 0000
              4143 00000000 00000000 00000001 00000000 68656c6c6f 46b83bd7"),
            (record_shim(2, 8), record(0x1000), &bytes[..8],
             "dc101234 11111111 00000002 00000008 00000000 0102 0307 0000
              c14f 00abcd01 0000000000001000 0001020304050607 7c6e788e"),
            (Shim { offset: 8, ..record_shim(3, 16) }, record(0x1008), &bytes[8..],
             "dc101234 11111111 00000003 00000010 00000008 0102 0307 0000
              c14f 00abcd01 0000000000001008 08090a0b0c0d0e0f ba734475"),
            (immediate, record(0x1000), &bytes[..8],
             "dc111234 11111111 00000004 00000008 00000000 0202 0307 0000 11223344 00000000
              c14f 00abcd01 0000000000001000 0001020304050607 c3f79bba"),
        ];
        for (shim, header, payload, expected) in table {
            let bytes = whole(&shim, &header, payload);
            assert_eq!(bytes, hex(expected));
            assert_eq!(
                parse(&bytes),
                Ok(Datagram {
                    shim,
                    header,
                    payload
                })
            );
            assert!(!is_cm(&bytes));
        }
        assert_eq!(emit_head(&shim(1, 5), &send(1)).len(), 44);
        assert_eq!(emit_head(&record_shim(1, 5), &record(0)).len(), 40);
    }

    #[test]
    fn any_flipped_bit_and_any_cut_is_a_crc_error() {
        let bytes = whole(&shim(1, 5), &send(1), b"hello");
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&bad), Err(DgramError::Crc));
        }
        for len in 0..bytes.len() {
            let reason = if len < 4 {
                DgramError::TooShort
            } else {
                DgramError::Crc
            };
            // The CRC of no bytes is zero, so four zero bytes have a correct CRC.
            assert_eq!(parse(&bytes[..len]), Err(reason), "{len} bytes");
        }
        assert_eq!(parse(&[0; 4]), Err(DgramError::TooShort));
    }

    /// A datagram that is shorter than its headers, with a correct CRC. Such a datagram crashed a kernel driver.
    #[test]
    fn a_datagram_shorter_than_its_headers_is_dropped_with_any_crc() {
        let kinds = [
            emit_head(&shim(1, 5), &send(1)),
            emit_head(&record_shim(2, 8), &record(0x1000)),
            vec![0; 48],
            vec![0xff; 48],
        ];
        for head in kinds {
            for len in 0..head.len() {
                let mut bytes = head[..len].to_vec();
                seal(&mut bytes);
                assert!(parse(&bytes).is_err(), "{len} bytes of {head:02x?}");
            }
        }
    }

    #[test]
    fn each_rule_has_its_reason() {
        let drop = |shim: Shim, header: Header, payload: &[u8]| {
            parse(&whole(&shim, &header, payload)).map(|_| ()).err()
        };
        let more = |header: Header| match header {
            Header::Tagged(h) => Header::Tagged(Tagged { last: false, ..h }),
            Header::Untagged(h) => Header::Untagged(Untagged { last: false, ..h }),
        };
        let good = shim(1, 5);
        assert_eq!(drop(good, send(1), b"hello"), None);
        assert_eq!(
            drop(Shim { epoch: 0, ..good }, send(1), b"hello"),
            Some(DgramError::Epoch)
        );

        // The last datagram must end the message, and others must lie inside it.
        assert_eq!(drop(good, send(1), b"hell"), Some(DgramError::Length));
        assert_eq!(drop(good, send(1), b"hello!"), Some(DgramError::Length));
        assert_eq!(drop(good, more(send(1)), b"hell"), None);
        assert_eq!(drop(good, more(send(1)), b"hello"), None);
        assert_eq!(
            drop(good, more(send(1)), b"hello!"),
            Some(DgramError::Length)
        );
        let far = Shim {
            offset: u32::MAX,
            ..record_shim(1, u32::MAX)
        };
        assert_eq!(drop(far, record(u64::MAX), b"x"), Some(DgramError::Length));

        // The two offsets must agree.
        let at_1 = Shim {
            offset: 1,
            ..shim(1, 6)
        };
        assert_eq!(drop(at_1, send(1), b"hello"), Some(DgramError::Offset));
        let at_8 = Shim {
            offset: 8,
            ..record_shim(1, 16)
        };
        assert_eq!(drop(at_8, record(8), &[0; 8]), None);
        assert_eq!(drop(at_8, record(7), &[0; 8]), Some(DgramError::Offset));

        // Sub-operation and opcode.
        for (sub_op, fits) in [(0, false), (1, true), (2, false), (3, false), (4, false)] {
            let reason = drop(
                Shim {
                    sub_op,
                    ..record_shim(1, 1)
                },
                record(0),
                b"x",
            );
            assert_eq!(reason, (!fits).then_some(DgramError::SubOperation));
            let reason = drop(
                Shim {
                    sub_op,
                    ..shim(1, 1)
                },
                send(1),
                b"x",
            );
            assert_eq!(reason, (sub_op != 0).then_some(DgramError::SubOperation));
        }

        // A commit.
        let commit = Shim {
            commit: true,
            offset: 16,
            ..record_shim(1, 16)
        };
        assert_eq!(drop(commit, record(16), b""), None);
        assert_eq!(
            drop(commit, more(record(16)), b""),
            Some(DgramError::Commit)
        );
        let early = Shim {
            offset: 8,
            ..commit
        };
        assert_eq!(drop(early, record(16), b""), Some(DgramError::Length));
        assert_eq!(drop(early, record(16), &[0; 8]), Some(DgramError::Commit));

        // Version and kind, with a good CRC.
        let mut bytes = emit_head(&good, &send(1));
        bytes[1] = 0x20;
        seal(&mut bytes);
        assert_eq!(parse(&bytes), Err(DgramError::Version));
        let cm = Cm::Request(CmRequest {
            id: 1,
            private_data: vec![0; 64],
        })
        .emit();
        assert_eq!(parse(&cm), Err(DgramError::Magic));

        // A DDP header that breaks a rule, and headers that are cut off.
        let control = Untagged {
            opcode: Opcode::ReadRequest,
            ..untagged(send(1))
        };
        let wrong_queue = DgramError::Header(PeerError::UntaggedQueue { qn: 0 });
        assert_eq!(
            drop(good, Header::Untagged(control), b"hello"),
            Some(wrong_queue)
        );
        for len in 0..emit_head(&good, &send(1)).len() {
            let mut bytes = emit_head(&good, &send(1));
            bytes.truncate(len);
            seal(&mut bytes);
            assert_eq!(parse(&bytes), Err(DgramError::TooShort), "{len} bytes");
        }
    }

    fn untagged(header: Header) -> Untagged {
        match header {
            Header::Untagged(h) => h,
            Header::Tagged(_) => panic!("tagged"),
        }
    }

    #[test]
    fn no_bytes_with_a_correct_crc_cause_a_panic() {
        let mut x = 5u64;
        for round in 0..20_000 {
            let mut bytes = emit_head(&record_shim(1, 8), &record(0x1000));
            bytes.resize(round % 90, 0);
            for _ in 0..3 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                let len = bytes.len().max(1);
                if let Some(b) = bytes.get_mut(x as usize % len) {
                    *b = (x >> 32) as u8;
                }
            }
            seal(&mut bytes);
            if let Ok(d) = parse(&bytes) {
                assert_eq!(parse(&whole(&d.shim, &d.header, d.payload)), Ok(d));
            }
            let _ = Cm::parse(&bytes);
        }
    }

    #[test]
    fn connection_manager_messages_survive_the_wire() {
        let request = CmRequest {
            id: 0x0102_0304,
            private_data: b"hi".to_vec(),
        };
        let reply = CmReply {
            id: 0x0102_0304,
            status: 0,
            qpn: 0x0012_3405,
            qkey: 0x1111_1111,
            private_data: b"hi".to_vec(),
        };
        for (message, bytes) in [
            (
                Cm::Request(request.clone()),
                "dd110002 01020304 6869 9836b8b1",
            ),
            (
                Cm::Reply(reply.clone()),
                "dd120002 01020304 00000000 00123405 11111111 6869 b6de65e0",
            ),
        ] {
            assert_eq!(message.emit(), hex(bytes));
            assert!(is_cm(&hex(bytes)));
            assert_eq!(Cm::parse(&hex(bytes)), Ok(message));
        }
        for len in [0, 1, 255, 256] {
            let m = Cm::Reply(CmReply {
                private_data: vec![9; len],
                ..reply.clone()
            });
            assert_eq!(Cm::parse(&m.emit()), Ok(m));
        }
        let long = Cm::Request(CmRequest {
            private_data: vec![9; 300],
            ..request
        });
        let Ok(Cm::Request(cut)) = Cm::parse(&long.emit()) else {
            panic!()
        };
        assert_eq!(cut.private_data.len(), 256);
    }

    #[test]
    fn private_data_has_the_length_in_its_header_and_at_most_the_maximum() {
        let mut bytes = hex("dd110003 01020304 6869");
        seal(&mut bytes);
        assert_eq!(Cm::parse(&bytes), Err(DgramError::CmPrivateData));
        let mut bytes = hex("dd110101 01020304");
        bytes.extend([0; 257]);
        seal(&mut bytes);
        assert_eq!(Cm::parse(&bytes), Err(DgramError::CmPrivateData));
        for (head, reason) in [
            ("dd130000 01020304", DgramError::CmKind),
            ("dd210000 01020304", DgramError::Version),
            ("dc110000 01020304", DgramError::Magic),
            (
                "dd120000 01020304 00000000 00123405 111111",
                DgramError::TooShort,
            ),
            ("dd110000 010203", DgramError::TooShort),
        ] {
            let mut bytes = hex(head);
            seal(&mut bytes);
            assert_eq!(Cm::parse(&bytes), Err(reason), "{head}");
        }
    }
}
