//! RDMAP (RFC 5040 §4, RFC 7306): opcodes and the headers that follow the DDP header.
//!
//! Offsets in the drawings count from the end of the DDP header, that is from byte 18 of the
//! segment.

use core::fmt;

use super::{Stag, To, put, take, take16, take32, take64};
use crate::error::PeerError;

/// What a message is: the low four bits of the RDMAP control byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// RDMA Write.
    Write,
    /// RDMA Read Request.
    ReadRequest,
    /// RDMA Read Response.
    ReadResponse,
    /// Send.
    Send,
    /// Send with Invalidate.
    SendInvalidate,
    /// Send with Solicited Event.
    SendSolicited,
    /// Send with Solicited Event and Invalidate.
    SendSolicitedInvalidate,
    /// Terminate.
    Terminate,
    /// Immediate Data (RFC 7306).
    Immediate,
    /// Immediate Data with Solicited Event (RFC 7306).
    ImmediateSolicited,
    /// Atomic Request (RFC 7306).
    AtomicRequest,
    /// Atomic Response (RFC 7306).
    AtomicResponse,
    /// 0xF untagged: our own control message, only between two anywarp ends.
    Control,
    /// 0xF tagged: RDMA Write-Record, only on datagrams. [`Opcode::from_bits`] never returns it,
    /// because the four bits alone do not tell it from [`Opcode::Control`].
    WriteRecord,
}

impl Opcode {
    /// The opcode of these four bits on a stream; `None` if nobody assigned them.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            0x0 => Self::Write,
            0x1 => Self::ReadRequest,
            0x2 => Self::ReadResponse,
            0x3 => Self::Send,
            0x4 => Self::SendInvalidate,
            0x5 => Self::SendSolicited,
            0x6 => Self::SendSolicitedInvalidate,
            0x7 => Self::Terminate,
            0x8 => Self::Immediate,
            0x9 => Self::ImmediateSolicited,
            0xa => Self::AtomicRequest,
            0xb => Self::AtomicResponse,
            0xf => Self::Control,
            _ => return None,
        })
    }

    /// The four bits of this opcode.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Write => 0x0,
            Self::ReadRequest => 0x1,
            Self::ReadResponse => 0x2,
            Self::Send => 0x3,
            Self::SendInvalidate => 0x4,
            Self::SendSolicited => 0x5,
            Self::SendSolicitedInvalidate => 0x6,
            Self::Terminate => 0x7,
            Self::Immediate => 0x8,
            Self::ImmediateSolicited => 0x9,
            Self::AtomicRequest => 0xa,
            Self::AtomicResponse => 0xb,
            Self::Control | Self::WriteRecord => 0xf,
        }
    }

    /// One of the four Sends.
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendInvalidate | Self::SendSolicited | Self::SendSolicitedInvalidate
        )
    }

    /// One of the two Immediates.
    pub const fn is_immediate(self) -> bool {
        matches!(self, Self::Immediate | Self::ImmediateSolicited)
    }

    /// Asks the receiver for an event even where it armed for solicited completions only.
    pub const fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }

    /// Carries an STag to invalidate.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "Write",
            Self::ReadRequest => "Read Request",
            Self::ReadResponse => "Read Response",
            Self::Send => "Send",
            Self::SendInvalidate => "Send+Inv",
            Self::SendSolicited => "Send+SE",
            Self::SendSolicitedInvalidate => "Send+SE+Inv",
            Self::Terminate => "Terminate",
            Self::Immediate => "Immediate",
            Self::ImmediateSolicited => "Immediate+SE",
            Self::AtomicRequest => "Atomic Request",
            Self::AtomicResponse => "Atomic Response",
            Self::Control => "Control",
            Self::WriteRecord => "Write-Record",
        })
    }
}

/// RDMA Read Request: copy `size` bytes from the source (at the receiver) to the sink (at the
/// sender).
///
/// ```text
///  0           4                      12     16          20                     28
/// +-----------+----------------------+------+-----------+----------------------+
/// | sink STag |       sink TO        | size | src STag  |      source TO       |
/// +-----------+----------------------+------+-----------+----------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadRequest {
    /// Where the response goes: buffer.
    pub sink_stag: Stag,
    /// Where the response goes: offset.
    pub sink_to: To,
    /// Bytes to read; 0 is allowed, and then neither STag is looked at.
    pub size: u32,
    /// Where the data is: buffer.
    pub source_stag: Stag,
    /// Where the data is: offset.
    pub source_to: To,
}

impl ReadRequest {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// Reads the request.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            sink_stag: Stag(take32::<0, { Self::LEN }>(b)),
            sink_to: To(take64::<4, { Self::LEN }>(b)),
            size: take32::<12, { Self::LEN }>(b),
            source_stag: Stag(take32::<16, { Self::LEN }>(b)),
            source_to: To(take64::<20, { Self::LEN }>(b)),
        }
    }

    /// The request as it goes on the wire.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 4>(&mut b, self.sink_stag.0.to_be_bytes());
        put::<4, { Self::LEN }, 8>(&mut b, self.sink_to.0.to_be_bytes());
        put::<12, { Self::LEN }, 4>(&mut b, self.size.to_be_bytes());
        put::<16, { Self::LEN }, 4>(&mut b, self.source_stag.0.to_be_bytes());
        put::<20, { Self::LEN }, 8>(&mut b, self.source_to.0.to_be_bytes());
        b
    }
}

/// What an Atomic Request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// Add, see [`fetch_add`].
    FetchAdd,
    /// Compare and swap, see [`cmp_swap`].
    CmpSwap,
}

/// Atomic Request (RFC 7306 §5): change eight bytes at the receiver and answer with what was there.
///
/// ```text
///  0       4     8       12        20        28          36        44          52
/// +-------+-----+-------+---------+---------+-----------+---------+-----------+
/// |... aop| id  | STag  |   TO    |  data   | data mask | compare | cmp. mask |
/// +-------+-----+-------+---------+---------+-----------+---------+-----------+
///  aop: low 4 bits, 0 FetchAdd, 2 CmpSwap; the 28 bits before it are reserved
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicRequest {
    /// What to do.
    pub op: AtomicOp,
    /// Comes back in the response.
    pub id: u32,
    /// The target: buffer.
    pub stag: Stag,
    /// The target: offset.
    pub to: To,
    /// What to add or to swap in.
    pub data: u64,
    /// Which field ends stop the carry, or which bits to swap.
    pub data_mask: u64,
    /// What to compare with.
    pub compare: u64,
    /// Which bits to compare.
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Bytes on the wire.
    pub const LEN: usize = 52;

    /// A plain 64-bit add.
    pub const fn fetch_add(id: u32, stag: Stag, to: To, add: u64) -> Self {
        // RFC 7306 §5.1 [atomic-add-compare]: the compare fields of an add are zero and all ones.
        let (data_mask, compare, compare_mask) = (0, 0, u64::MAX);
        Self {
            op: AtomicOp::FetchAdd,
            id,
            stag,
            to,
            data: add,
            data_mask,
            compare,
            compare_mask,
        }
    }

    /// A plain 64-bit compare and swap.
    pub const fn cmp_swap(id: u32, stag: Stag, to: To, compare: u64, swap: u64) -> Self {
        let (data_mask, compare_mask) = (u64::MAX, u64::MAX);
        Self {
            op: AtomicOp::CmpSwap,
            id,
            stag,
            to,
            data: swap,
            data_mask,
            compare,
            compare_mask,
        }
    }

    /// Reads the request.
    ///
    /// # Errors
    /// The operation is neither of the two.
    pub fn parse(b: &[u8; Self::LEN]) -> Result<Self, PeerError> {
        let [_, _, _, op, ..] = *b;
        // RFC 7306 §5.1 [atomic-opcode]: an operation that nobody assigned ends the stream.
        let op = match op & AOP_MASK {
            AOP_FETCH_ADD => AtomicOp::FetchAdd,
            AOP_CMP_SWAP => AtomicOp::CmpSwap,
            op => return Err(PeerError::AtomicOpcode { op }),
        };
        Ok(Self {
            op,
            id: take32::<4, { Self::LEN }>(b),
            stag: Stag(take32::<8, { Self::LEN }>(b)),
            to: To(take64::<12, { Self::LEN }>(b)),
            data: take64::<20, { Self::LEN }>(b),
            data_mask: take64::<28, { Self::LEN }>(b),
            compare: take64::<36, { Self::LEN }>(b),
            compare_mask: take64::<44, { Self::LEN }>(b),
        })
    }

    /// The request as it goes on the wire.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let op = match self.op {
            AtomicOp::FetchAdd => AOP_FETCH_ADD,
            AtomicOp::CmpSwap => AOP_CMP_SWAP,
        };
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 4>(&mut b, [0, 0, 0, op]);
        put::<4, { Self::LEN }, 4>(&mut b, self.id.to_be_bytes());
        put::<8, { Self::LEN }, 4>(&mut b, self.stag.0.to_be_bytes());
        put::<12, { Self::LEN }, 8>(&mut b, self.to.0.to_be_bytes());
        put::<20, { Self::LEN }, 8>(&mut b, self.data.to_be_bytes());
        put::<28, { Self::LEN }, 8>(&mut b, self.data_mask.to_be_bytes());
        put::<36, { Self::LEN }, 8>(&mut b, self.compare.to_be_bytes());
        put::<44, { Self::LEN }, 8>(&mut b, self.compare_mask.to_be_bytes());
        b
    }

    /// What the target holds afterwards, if it held `orig`.
    pub const fn apply(&self, orig: u64) -> u64 {
        match self.op {
            AtomicOp::FetchAdd => fetch_add(orig, self.data, self.data_mask),
            AtomicOp::CmpSwap => cmp_swap(
                orig,
                self.data,
                self.data_mask,
                self.compare,
                self.compare_mask,
            ),
        }
    }
}

/// Adds field by field: each set bit of `mask` is the most significant bit of a field, and no carry
/// leaves a field. Mask 0 is one field of 64 bits.
// RFC 7306 §5.1 [atomic-fetch-add]
pub const fn fetch_add(orig: u64, add: u64, mask: u64) -> u64 {
    // Without the top bit of each field no sum can leave its field: at most it sets that bit. The
    // top bits themselves are then added without carry, which is exclusive or.
    (orig & !mask).wrapping_add(add & !mask) ^ ((orig ^ add) & mask)
}

/// If `orig` and `cmp` agree in the bits of `cmp_mask`: `orig` with the bits of `swap_mask` taken
/// from `swap`; otherwise `orig`.
// RFC 7306 §5.1 [atomic-cmp-swap]
pub const fn cmp_swap(orig: u64, swap: u64, swap_mask: u64, cmp: u64, cmp_mask: u64) -> u64 {
    if (orig ^ cmp) & cmp_mask == 0 {
        (orig & !swap_mask) | (swap & swap_mask)
    } else {
        orig
    }
}

/// Atomic Response: what the target held before.
///
/// ```text
///  0                 4                                  12
/// +-----------------+----------------------------------+
/// | id of request   |          original value          |
/// +-----------------+----------------------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicResponse {
    /// Copied from the request.
    pub id: u32,
    /// The value before the operation.
    pub value: u64,
}

impl AtomicResponse {
    /// Bytes on the wire.
    pub const LEN: usize = 12;

    /// Reads the response.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            id: take32::<0, { Self::LEN }>(b),
            value: take64::<4, { Self::LEN }>(b),
        }
    }

    /// The response as it goes on the wire.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 4>(&mut b, self.id.to_be_bytes());
        put::<4, { Self::LEN }, 8>(&mut b, self.value.to_be_bytes());
        b
    }
}

/// Immediate Data (RFC 7306 §6).
///
/// ```text
///  0               4               8
/// +---------------+---------------+
/// | value         | zero, ignored |
/// +---------------+---------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate {
    /// The four bytes of a verbs immediate, as the application gave them.
    pub value: [u8; 4],
}

impl Immediate {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Reads the message.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            value: take::<0, { Self::LEN }, 4>(b),
        }
    }

    /// The message as it goes on the wire.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 4>(&mut b, self.value);
        b
    }
}

/// The DDP header of the segment that a Terminate complains about, as it came.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawHeader {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl RawHeader {
    /// The longest DDP header.
    pub const MAX: usize = 18;

    /// The header at the start of `segment`, or as much as is there.
    pub fn of(segment: &[u8]) -> Self {
        let full = match segment.first() {
            Some(ctrl) if ctrl & 0x80 != 0 => 14,
            _ => Self::MAX,
        };
        let mut header = Self {
            bytes: [0; Self::MAX],
            len: 0,
        };
        for (to, from) in header.bytes.iter_mut().zip(segment.iter().take(full)) {
            *to = *from;
            header.len += 1;
        }
        header
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

impl fmt::Debug for RawHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RawHeader(")?;
        for b in self.as_slice() {
            write!(f, "{b:02x}")?;
        }
        f.write_str(")")
    }
}

/// Terminate: why the sender gives the stream up.
///
/// ```text
///  0        1        2        3        4               6
/// +--------+--------+--------+--------+---------------+--------------+---------------+
/// |lay|ety |  code  |MDR.....| zero   | DDP seg. len. |  DDP header  | Read Request  |
/// +--------+--------+--------+--------+---------------+--------------+---------------+
///                    M 0x80            if M or D       if D: 14 or 18  if R: 28 bytes
///                    D 0x40
///                    R 0x20
/// ```
///
/// Linux siw on little-endian hosts has layer and type of byte 0 swapped, and M, D, R at 0x01,
/// 0x02, 0x04. [`Terminate::parse`] reads both; [`Terminate::emit`] writes the layout above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terminate {
    /// 0 RDMAP, 1 DDP, 2 MPA.
    pub layer: u8,
    /// Error type.
    pub etype: u8,
    /// Error code.
    pub code: u8,
    /// Length of the segment at fault.
    pub ddp_len: Option<u16>,
    /// DDP header of the segment at fault.
    pub ddp_header: Option<RawHeader>,
    /// Read Request header of the segment at fault.
    pub read_request: Option<[u8; ReadRequest::LEN]>,
}

impl Terminate {
    /// The longest Terminate: fixed part, segment length, untagged header, Read Request.
    pub const MAX_LEN: usize = 4 + 2 + RawHeader::MAX + ReadRequest::LEN;

    /// Reads as much of the message as is there. The stream is over in any case, so a Terminate
    /// that is cut short or makes no sense is not an error; what is missing reads as "unspecified".
    pub fn parse(payload: &[u8]) -> Self {
        let mut fixed = UNSPECIFIED;
        for (to, from) in fixed.iter_mut().zip(payload) {
            *to = *from;
        }
        let [kind, code, flags, _] = fixed;
        let (high, low) = (kind >> 4, kind & 0x0f);
        let (layer, etype, flags) = if is_rfc_layout(high, low, code, flags) {
            (high, low, flags & (FLAG_M | FLAG_D | FLAG_R))
        } else {
            // siw: the nibbles change places, and so do the bits of the flag byte.
            (low, high, flags.reverse_bits() & (FLAG_M | FLAG_D | FLAG_R))
        };
        let mut rest = payload.get(4..).unwrap_or_default();
        let mut t = Self {
            layer,
            etype,
            code,
            ddp_len: None,
            ddp_header: None,
            read_request: None,
        };
        if flags & (FLAG_M | FLAG_D) != 0 {
            let Some((len, after)) = rest.split_first_chunk::<2>() else {
                return t;
            };
            t.ddp_len = (flags & FLAG_M != 0).then(|| take16::<0, 2>(len));
            rest = after;
        }
        if flags & FLAG_D != 0 && !rest.is_empty() {
            let header = RawHeader::of(rest);
            rest = rest.get(header.as_slice().len()..).unwrap_or_default();
            t.ddp_header = Some(header);
        }
        if flags & FLAG_R != 0 {
            t.read_request = rest.first_chunk().copied();
        }
        t
    }

    /// The message as it goes on the wire, in the layout of the RFC.
    pub fn emit(&self) -> Vec<u8> {
        let mut flags = 0;
        // RFC 5040 §4.8 [term-hdrct]: M, D and R tell which of the three optional parts follow.
        if self.ddp_len.is_some() {
            flags |= FLAG_M;
        }
        if self.ddp_header.is_some() {
            flags |= FLAG_D;
        }
        if self.read_request.is_some() {
            flags |= FLAG_R;
        }
        let mut b = Vec::with_capacity(Self::MAX_LEN);
        b.extend([self.layer << 4 | self.etype & 0x0f, self.code, flags, 0]);
        if flags & (FLAG_M | FLAG_D) != 0 {
            b.extend(self.ddp_len.unwrap_or(0).to_be_bytes());
        }
        if let Some(header) = &self.ddp_header {
            b.extend(header.as_slice());
        }
        if let Some(request) = &self.read_request {
            b.extend(request);
        }
        b
    }
}

/// Whether the first bytes of a Terminate follow the RFC (otherwise: siw).
///
/// Where both readings make sense the RFC's one is taken: 0x10 code 0 is "DDP, local", 0x20 code
/// 6 is "MPA, not enough IRD". siw sends those bytes with flags, so nothing is lost in practice.
fn is_rfc_layout(high: u8, low: u8, code: u8, flags: u8) -> bool {
    if flags & (FLAG_M | FLAG_D | FLAG_R) != 0 {
        return true;
    }
    if flags != 0 {
        return false;
    }
    match (high, low) {
        (0, 0) => true,
        (0, 1) => matches!(code, 0x00..=0x04 | 0x09 | 0xff),
        (0, 2) => matches!(code, 0x05..=0x09 | 0xff),
        (1, 0) => code == 0x00,
        (1, 1) => code <= 0x04,
        (1, 2) => matches!(code, 0x01..=0x06),
        (2, 0) => matches!(code, 0x01..=0x07),
        _ => false,
    }
}

const FLAG_M: u8 = 0x80;
const FLAG_D: u8 = 0x40;
const FLAG_R: u8 = 0x20;
/// RDMAP, remote operation, unspecified: stands for a Terminate of which nothing arrived.
const UNSPECIFIED: [u8; 4] = [0x02, 0xff, 0, 0];

const AOP_MASK: u8 = 0x0f;
const AOP_FETCH_ADD: u8 = 0;
const AOP_CMP_SWAP: u8 = 2;
