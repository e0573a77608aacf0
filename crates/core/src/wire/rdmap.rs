//! RDMAP (RFC 5040 §4, RFC 7306): opcodes and the headers that follow the DDP header.
//!
//! Offsets in the drawings begin at the end of the DDP header, which is byte 18 of the segment.

use core::fmt;

use super::{Stag, To, put, take, take16, take32, take64};
use crate::error::{PeerError, TermCode};

/// The operation of a message: the low four bits of the RDMAP control byte.
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
    /// 0xF untagged: a private control message, only between two anywarp ends.
    Control,
    /// 0xF tagged: RDMA Write-Record, only on datagrams: an RDMA Write that records at the target what has arrived.
    /// [`Opcode::from_bits`] never returns it, because the four bits alone do not distinguish it from
    /// [`Opcode::Control`].
    WriteRecord,
}

impl Opcode {
    /// Returns the kind of Send (RFC 5040 §4.3, table of opcodes).
    pub const fn send(invalidates: bool, solicited: bool) -> Self {
        match (invalidates, solicited) {
            (false, false) => Self::Send,
            (false, true) => Self::SendSolicited,
            (true, false) => Self::SendInvalidate,
            (true, true) => Self::SendSolicitedInvalidate,
        }
    }

    /// The opcode of these four bits on a stream; `None` if they are unassigned.
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

    /// Whether this is one of the four Sends.
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendInvalidate | Self::SendSolicited | Self::SendSolicitedInvalidate
        )
    }

    /// Whether this is one of the two Immediates.
    pub const fn is_immediate(self) -> bool {
        matches!(self, Self::Immediate | Self::ImmediateSolicited)
    }

    /// Whether the receiver gets an event even if its completion queue is armed for solicited completions only.
    pub const fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }

    /// Whether the message contains an STag to invalidate.
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
    /// STag of the buffer for the response.
    pub sink_stag: Stag,
    /// Tagged offset for the response.
    pub sink_to: To,
    /// Bytes to read. 0 is allowed; neither STag is checked then.
    pub size: u32,
    /// STag of the data.
    pub source_stag: Stag,
    /// Tagged offset of the data.
    pub source_to: To,
}

impl ReadRequest {
    /// Length on the wire.
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

    /// The request in wire format.
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

/// The operation of an Atomic Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicOp {
    /// Add, see [`fetch_add`].
    FetchAdd,
    /// Compare and swap, see [`cmp_swap`].
    CmpSwap,
}

/// Atomic Request (RFC 7306 §5): changes eight bytes at the receiver. The response contains the old value.
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
    /// The operation.
    pub op: AtomicOp,
    /// Identifier that the response repeats.
    pub id: u32,
    /// STag of the target.
    pub stag: Stag,
    /// Tagged offset of the target.
    pub to: To,
    /// The value to add or to swap in.
    pub data: u64,
    /// For an add: the most significant bit of each field. For a swap: the bits to swap.
    pub data_mask: u64,
    /// The value to compare with.
    pub compare: u64,
    /// The bits to compare.
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Length on the wire.
    pub const LEN: usize = 52;

    /// An add to one field of 64 bits.
    pub const fn fetch_add(id: u32, stag: Stag, to: To, add: u64) -> Self {
        // RFC 7306 §5.2.1 [atomic-add-compare]: the compare data of an add is zero, and its compare mask is all ones.
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

    /// A 64-bit compare and swap without masks.
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
        // RFC 7306 §5.2.1 [atomic-opcode]: an unassigned operation ends the stream.
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

    /// The request in wire format.
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

    /// The new value of the target, if its value was `orig`.
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
// RFC 7306 §5.1.1 [atomic-fetch-add]
pub const fn fetch_add(orig: u64, add: u64, mask: u64) -> u64 {
    // Without the top bit of each field no sum can leave its field: the carry reaches the top bit at most. The top
    // bits are then added without carry, which is exclusive or.
    (orig & !mask).wrapping_add(add & !mask) ^ ((orig ^ add) & mask)
}

/// Returns `orig` with the bits of `swap_mask` taken from `swap`, if `orig` and `cmp` agree in the bits of `cmp_mask`. Otherwise
/// returns `orig`.
// RFC 7306 §5.1.2 [atomic-cmp-swap]
pub const fn cmp_swap(orig: u64, swap: u64, swap_mask: u64, cmp: u64, cmp_mask: u64) -> u64 {
    if (orig ^ cmp) & cmp_mask == 0 {
        (orig & !swap_mask) | (swap & swap_mask)
    } else {
        orig
    }
}

/// Atomic Response: the old value of the target.
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
    /// Length on the wire.
    pub const LEN: usize = 12;

    /// Reads the response.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            id: take32::<0, { Self::LEN }>(b),
            value: take64::<4, { Self::LEN }>(b),
        }
    }

    /// The response in wire format.
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
    /// The four bytes of a verbs immediate, in the order that the application gave.
    pub value: [u8; 4],
}

impl Immediate {
    /// Length on the wire.
    pub const LEN: usize = 8;

    /// Reads the message.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            value: take::<0, { Self::LEN }, 4>(b),
        }
    }

    /// The message in wire format.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put::<0, { Self::LEN }, 4>(&mut b, self.value);
        b
    }
}

/// The DDP header of the segment that a Terminate reports, as it was received.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawHeader {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl RawHeader {
    /// The longest DDP header.
    pub const MAX: usize = 18;

    /// The header at the start of `segment`, or its first part if the segment is shorter.
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

/// Terminate: the error for which the sender ends the stream.
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
    /// Length of the segment that caused the error.
    pub ddp_len: Option<u16>,
    /// DDP header of that segment.
    pub ddp_header: Option<RawHeader>,
    /// Read Request header of that segment.
    pub read_request: Option<[u8; ReadRequest::LEN]>,
}

impl Terminate {
    /// The longest Terminate: fixed part, segment length, untagged header, Read Request.
    pub const MAX_LEN: usize = 4 + 2 + RawHeader::MAX + ReadRequest::LEN;

    /// Layer, type and code of the error.
    pub const fn term_code(&self) -> TermCode {
        TermCode::new(self.layer, self.etype, self.code)
    }

    /// Parses as much of the message as has arrived. The stream ends in any case, so an incomplete or invalid
    /// Terminate is not an error. Missing fields are "unspecified".
    pub fn parse(payload: &[u8]) -> Self {
        let mut fixed = UNSPECIFIED;
        for (to, from) in fixed.iter_mut().zip(payload) {
            *to = *from;
        }
        let [kind, code, flags, _] = fixed;
        let (high, low) = (kind >> 4, kind & 0x0f);
        let (layer, etype, flags) = if is_rfc_layout(TermCode::new(high, low, code), flags) {
            (high, low, flags & (FLAG_M | FLAG_D | FLAG_R))
        } else {
            // siw: the nibbles are swapped, and the flag bits reversed.
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

    /// The message in wire format, in the layout of the RFC.
    pub fn emit(&self) -> Vec<u8> {
        let mut flags = 0;
        // RFC 5040 §4.8 [term-hdrct]: M, D and R show which of the three optional parts follow.
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
        b.extend(self.term_code().bytes());
        b.extend([flags, 0]);
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

/// Whether the first bytes of a Terminate have the layout of the RFC, and not the layout of siw.
///
/// If the flags do not decide and the bytes are a valid error in both layouts, the layout of the RFC is used: for
/// example, 0x10 code 0 is read as "DDP, local", and 0x20 code 6 as "MPA, not enough IRD". When siw sends these two it
/// sets flags, which show its layout.
fn is_rfc_layout(code: TermCode, flags: u8) -> bool {
    if flags & (FLAG_M | FLAG_D | FLAG_R) != 0 {
        return true;
    }
    // RFC 5040 §4.8 [term-reserved]: the reserved bits are ignored, except those where siw has M, D and R.
    if flags.reverse_bits() & (FLAG_M | FLAG_D | FLAG_R) != 0 {
        return false;
    }
    code.name().1.is_some()
}

const FLAG_M: u8 = 0x80;
const FLAG_D: u8 = 0x40;
const FLAG_R: u8 = 0x20;
/// RDMAP, remote operation, unspecified: the error of an empty Terminate.
const UNSPECIFIED: [u8; 4] = [0x02, 0xff, 0, 0];

const AOP_MASK: u8 = 0x0f;
const AOP_FETCH_ADD: u8 = 0;
const AOP_CMP_SWAP: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn array<const N: usize>(text: &str) -> [u8; N] {
        hex(text).try_into().unwrap()
    }

    struct Rng(u64);
    impl Rng {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }
    }

    #[test]
    fn each_opcode_has_one_encoding() {
        for bits in 0..=255 {
            match Opcode::from_bits(bits) {
                Some(opcode) => assert_eq!(opcode.bits(), bits),
                None => assert!(matches!(bits, 0xc..=0xe | 0x10..)),
            }
        }
    }

    #[test]
    fn a_read_request_survives_the_wire() {
        // A Read Request of length 0, without its DDP header.
        let bytes = array("00000000 0000000000000000 00000000 00000001 0000000000000000");
        let zero = ReadRequest {
            sink_stag: Stag(0),
            sink_to: To(0),
            size: 0,
            source_stag: Stag(1),
            source_to: To(0),
        };
        assert_eq!(ReadRequest::parse(&bytes), zero);
        assert_eq!(zero.emit(), bytes);
        let bytes = core::array::from_fn(|i| i as u8);
        let r = ReadRequest::parse(&bytes);
        assert_eq!((r.size, r.source_stag), (0x0c0d_0e0f, Stag(0x1011_1213)));
        assert_eq!(r.emit(), bytes);
    }

    #[test]
    fn atomics_survive_the_wire() {
        // A fetch-and-add.
        let bytes = array(
            "00000000 00000007 00abcd01 0000000000002000 0000000000000005 0000000000000000
             0000000000000000 ffffffffffffffff",
        );
        let add = AtomicRequest::fetch_add(7, Stag(0x00ab_cd01), To(0x2000), 5);
        assert_eq!(AtomicRequest::parse(&bytes), Ok(add));
        assert_eq!(add.emit(), bytes);
        let swap = AtomicRequest::cmp_swap(9, Stag(1), To(8), 3, 4);
        assert_eq!(swap.emit()[..4], [0, 0, 0, 2]);
        assert_eq!(AtomicRequest::parse(&swap.emit()), Ok(swap));
        let response = AtomicResponse {
            id: 7,
            value: 0x1234,
        };
        assert_eq!(response.emit(), array("00000007 0000000000001234"));
        assert_eq!(AtomicResponse::parse(&response.emit()), response);
    }

    #[test]
    fn an_unknown_atomic_operation_is_refused_and_reserved_bits_are_not() {
        let mut bytes = AtomicRequest::fetch_add(7, Stag(1), To(8), 5).emit();
        for op in 0..16 {
            bytes[..4].copy_from_slice(&[0xff, 0xff, 0xff, 0xf0 | op]);
            match op {
                0 | 2 => assert!(AtomicRequest::parse(&bytes).is_ok()),
                _ => {
                    let refused = Err(PeerError::AtomicOpcode { op });
                    assert_eq!(AtomicRequest::parse(&bytes), refused);
                }
            }
        }
    }

    #[test]
    fn the_compare_fields_of_a_fetch_add_are_ignored() {
        // RFC 7306 §5.2.1 [atomic-add-compare]
        let mut bytes = AtomicRequest::fetch_add(7, Stag(1), To(8), 5).emit();
        assert_eq!(bytes[36..], [[0; 8], [0xff; 8]].concat());
        bytes[36..].fill(0x5a);
        assert_eq!(AtomicRequest::parse(&bytes).unwrap().apply(37), 42);
    }

    #[test]
    fn immediate_data_keeps_its_bytes() {
        let i = Immediate {
            value: [0x11, 0x22, 0x33, 0x44],
        };
        assert_eq!(i.emit(), [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0]);
        assert_eq!(Immediate::parse(&[0x11, 0x22, 0x33, 0x44, 9, 9, 9, 9]), i);
    }

    #[test]
    fn fetch_add_does_not_carry_over_a_mask_bit() {
        // Bit by bit from the lowest up. A set bit of the mask ends a field, so its carry is dropped.
        fn slow(orig: u64, add: u64, mask: u64) -> u64 {
            let (mut sum, mut carry) = (0, 0);
            for bit in 0..64 {
                let column = (orig >> bit & 1) + (add >> bit & 1) + carry;
                sum |= (column & 1) << bit;
                carry = if mask >> bit & 1 == 1 { 0 } else { column >> 1 };
            }
            sum
        }
        assert_eq!(fetch_add(u64::MAX, 1, 0), 0);
        assert_eq!(fetch_add(0xffff_ffff, 1, 0), 0x1_0000_0000);
        assert_eq!(fetch_add(0xffff_ffff, 1, 0x8000_0000), 0);
        assert_eq!(fetch_add(0b1111, 0b0101, u64::MAX), 0b1010);
        let mut rng = Rng(7);
        for _ in 0..10_000 {
            let (orig, add) = (rng.next(), rng.next());
            for mask in [
                rng.next(),
                rng.next() & rng.next() & rng.next(),
                1 << 63,
                1,
                0,
            ] {
                assert_eq!(fetch_add(orig, add, mask), slow(orig, add, mask));
            }
        }
    }

    #[test]
    fn cmp_swap_compares_and_swaps_under_its_masks() {
        assert_eq!(cmp_swap(5, 9, u64::MAX, 5, u64::MAX), 9);
        assert_eq!(cmp_swap(5, 9, u64::MAX, 6, u64::MAX), 5);
        assert_eq!(cmp_swap(5, 9, u64::MAX, 6, 0), 9);
        assert_eq!(cmp_swap(0xaabb, 0xccdd, 0x00ff, 0xaa00, 0xff00), 0xaadd);
        assert_eq!(AtomicRequest::cmp_swap(0, Stag(1), To(0), 5, 9).apply(5), 9);
        assert_eq!(AtomicRequest::fetch_add(0, Stag(1), To(0), 5).apply(9), 14);
    }

    fn bare(layer: u8, etype: u8, code: u8) -> Terminate {
        Terminate {
            layer,
            etype,
            code,
            ddp_len: None,
            ddp_header: None,
            read_request: None,
        }
    }

    #[test]
    fn terminates_have_these_bytes() {
        // MPA, CRC error, without the optional parts.
        assert_eq!(bare(2, 0, 2).emit(), hex("20020000"));
        assert_eq!(Terminate::parse(&hex("20020000")), bare(2, 0, 2));
        // DDP, tagged buffer, invalid STag, with the length and the DDP header of the segment.
        let bytes = hex("1100c000 0016 c140 00abcd01 0000000000001000");
        let t = Terminate::parse(&bytes);
        assert_eq!((t.layer, t.etype, t.code, t.ddp_len), (1, 1, 0, Some(0x16)));
        assert_eq!(t.ddp_header.unwrap().as_slice(), &bytes[6..]);
        assert_eq!(t.read_request, None);
        assert_eq!(t.emit(), bytes);
    }

    #[test]
    fn a_terminate_with_everything_survives_the_wire() {
        let header = RawHeader::of(&hex("4141 00000000 00000001 00000003 00000000 ffff"));
        assert_eq!(header.as_slice().len(), 18);
        let request = core::array::from_fn(|i| i as u8);
        let t = Terminate {
            ddp_len: Some(46),
            ddp_header: Some(header),
            read_request: Some(request),
            ..bare(0, 1, 2)
        };
        let bytes = t.emit();
        assert_eq!(bytes.len(), Terminate::MAX_LEN);
        assert_eq!(bytes[..6], [0x01, 0x02, 0xe0, 0, 0, 46]);
        assert_eq!(Terminate::parse(&bytes), t);
    }

    #[test]
    fn the_terminate_layout_of_siw_is_parsed() {
        // RDMAP, remote protection, access rights; M, D and R at the low end.
        let mut bytes = hex("1002 0700 002e 4141 00000000 00000001 00000003 00000000");
        bytes.extend(0..28u8);
        let t = Terminate::parse(&bytes);
        assert_eq!((t.layer, t.etype, t.code, t.ddp_len), (0, 1, 2, Some(46)));
        assert_eq!(t.ddp_header.unwrap().as_slice(), &bytes[6..24]);
        assert_eq!(t.read_request.unwrap()[27], 27);
        #[rustfmt::skip]
        let table = [
            // The control bytes; the layer, type and code; the layout and its meaning.
            ("02020000", (2, 0, 2)),    // siw: MPA, CRC error
            ("20020000", (2, 0, 2)),    // RFC: MPA, CRC error
            ("11000000", (1, 1, 0)),    // equal in both layouts
            ("21020100", (1, 2, 2)),    // siw: DDP, untagged, no buffer, with M
            ("12020000", (1, 2, 2)),    // RFC: DDP, untagged, no buffer
            ("10010000", (0, 1, 1)),    // siw: RDMAP, base or bounds; in the layout of the RFC no error has these values
            ("10000000", (1, 0, 0)),    // valid in both layouts, parsed as RFC
            ("20060200", (0, 2, 6)),    // siw: RDMAP, unexpected opcode, with D
            ("20060000", (2, 0, 6)),    // valid in both layouts, parsed as RFC
            ("02060000", (0, 2, 6)),    // RFC: RDMAP, unexpected opcode
        ];
        for (bytes, (layer, etype, code)) in table {
            assert_eq!(
                Terminate::parse(&hex(bytes)),
                bare(layer, etype, code),
                "{bytes}"
            );
        }
    }

    #[test]
    fn a_truncated_terminate_is_parsed_as_far_as_possible() {
        assert_eq!(Terminate::parse(&[]), bare(0, 2, 0xff));
        assert_eq!(Terminate::parse(&[0x01]), bare(0, 1, 0xff));
        assert_eq!(Terminate::parse(&[0x12, 0x02]), bare(1, 2, 2));
        let whole = Terminate {
            ddp_len: Some(46),
            ddp_header: Some(RawHeader::of(&[0x41; 18])),
            read_request: Some([7; 28]),
            ..bare(0, 1, 2)
        };
        let bytes = whole.emit();
        for len in 3..bytes.len() {
            let t = Terminate::parse(&bytes[..len]);
            assert_eq!((t.layer, t.etype, t.code), (0, 1, 2));
            assert_eq!(t.ddp_len.is_some(), len >= 6);
            let header = t.ddp_header.map_or(0, |h| h.as_slice().len());
            assert_eq!(header, len.saturating_sub(6).min(18));
            assert_eq!(t.read_request, None);
        }
        // D without M: the length field is present and ignored.
        let t = Terminate::parse(&hex("11004000 0000 c140 00abcd01 0000000000001000"));
        assert_eq!(
            (t.ddp_len, t.ddp_header.unwrap().as_slice().len()),
            (None, 14)
        );
        assert_eq!(Terminate::parse(&t.emit()), t);
    }

    #[test]
    fn reserved_bits_of_a_terminate_are_ignored() {
        // RFC 5040 §4.8 [term-reserved]
        assert_eq!(Terminate::parse(&hex("200218ff")), bare(2, 0, 2));
        assert_eq!(Terminate::parse(&hex("010008ff")), bare(0, 1, 0));
        let t = Terminate::parse(&hex("1100df80 0011 c140 00abcd01 0000000000001000"));
        assert_eq!((t.layer, t.etype, t.ddp_len), (1, 1, Some(17)));
        assert_eq!(t.ddp_header.unwrap().as_slice().len(), 14);
    }

    #[test]
    fn any_bytes_parse_as_a_terminate() {
        let mut rng = Rng(3);
        for len in 0..70 {
            for _ in 0..200 {
                let bytes: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
                let t = Terminate::parse(&bytes);
                assert!(t.emit().len() <= Terminate::MAX_LEN);
            }
        }
    }
}
