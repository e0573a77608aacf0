//! Errors by cause: the peer ([`PeerError`]) or the caller ([`Misuse`]).
//!
//! A [`PeerError`] means that bytes from the other end broke a rule. The stream then ends with the Terminate that
//! [`TermCode`] selects. A [`Misuse`] means that the caller broke a rule. The caller gets an errno, and nothing is
//! sent. A failed work request is neither (it has a completion status), nor is an error of the host (an I/O error of
//! the engine).

use core::fmt;

/// The other end broke a rule of the protocol.
///
/// Variants are named after the layer whose rule was broken. [`TermCode::encode`] returns the Terminate that reports
/// each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerError {
    // ---- MPA: framing and startup ----
    /// The CRC of an FPDU does not match its bytes.
    MpaCrc {
        /// The calculated CRC, as a number.
        expected: u32,
        /// The received CRC, as a number.
        got: u32,
    },
    /// A segment is shorter than its header.
    MpaTooShort {
        /// Length of the header, bytes.
        need: usize,
        /// Length of the segment, bytes.
        got: usize,
    },
    /// A marker does not point at the start of its FPDU.
    MpaMarker {
        /// Distance to the start of the FPDU.
        expected: u16,
        /// The distance in the marker.
        got: u16,
    },
    /// A Request or Reply frame that cannot be used; the text says why.
    MpaStartup(&'static str),
    /// A local failure of MPA that no other error describes.
    MpaLocal,
    /// The Reply requires more inbound Reads than this end can serve.
    MpaInsufficientIrd {
        /// Reads the peer will have outstanding.
        needed: u16,
        /// Reads that this end can serve.
        have: u16,
    },
    /// The Reply contains no ready-to-receive message that this end can send.
    MpaNoCommonRtr,

    // ---- DDP, tagged ----
    /// DDP version of a tagged segment is not 1.
    TaggedVersion {
        /// The received version.
        version: u8,
    },
    /// No such STag, or its key or state is wrong.
    TaggedStag {
        /// The STag.
        stag: u32,
    },
    /// The STag belongs to another protection domain or another stream.
    TaggedNotAssociated {
        /// The STag.
        stag: u32,
    },
    /// The STag gives no right to write.
    TaggedAccess {
        /// The STag.
        stag: u32,
    },
    /// Part of the segment lies outside the tagged buffer, or the buffer has no memory there (on-demand paging).
    TaggedBounds {
        /// The STag.
        stag: u32,
        /// Tagged offset of the segment.
        to: u64,
        /// Bytes of payload.
        len: u32,
    },
    /// Tagged offset plus length is 2^64 or more.
    TaggedWrap {
        /// Tagged offset of the segment.
        to: u64,
        /// Bytes of payload.
        len: u32,
    },

    // ---- DDP, untagged ----
    /// DDP version of an untagged segment is not 1.
    UntaggedVersion {
        /// The received version.
        version: u8,
    },
    /// The queue does not exist, or is not the queue of this operation.
    UntaggedQueue {
        /// The queue number.
        qn: u32,
    },
    /// No receive buffer is available for a message.
    UntaggedNoBuffer {
        /// The queue number.
        qn: u32,
        /// The message sequence number.
        msn: u32,
    },
    /// The message sequence number is not the next one.
    UntaggedMsn {
        /// The next number.
        expected: u32,
        /// The number of the message.
        got: u32,
    },
    /// The message offset is not where the previous segment ended.
    UntaggedOffset {
        /// The next offset.
        expected: u32,
        /// The offset of the segment.
        got: u32,
    },
    /// The message does not fit its receive buffer.
    UntaggedTooLong {
        /// Bytes in the buffer.
        buffer: u64,
        /// Bytes that the message needs at least.
        message: u64,
    },
    /// More reads and atomics outstanding than were negotiated.
    IrdOverrun {
        /// The negotiated number.
        limit: u32,
    },
    /// A local failure of DDP that no other error describes.
    DdpLocal,

    // ---- RDMAP, remote protection ----
    /// No such source or target STag.
    RemoteStag {
        /// The STag.
        stag: u32,
    },
    /// The source or target lies outside its buffer, or the buffer has no memory there (on-demand paging).
    RemoteBounds {
        /// The STag.
        stag: u32,
        /// The requested tagged offset.
        to: u64,
        /// The requested number of bytes.
        len: u32,
    },
    /// The STag does not give the right that the operation needs.
    RemoteAccess {
        /// The STag.
        stag: u32,
    },
    /// The STag belongs to another protection domain or another stream.
    RemoteNotAssociated {
        /// The STag.
        stag: u32,
    },
    /// Tagged offset plus length is 2^64 or more.
    RemoteWrap {
        /// The requested tagged offset.
        to: u64,
        /// The requested number of bytes.
        len: u32,
    },
    /// The STag of a Send with Invalidate may not be invalidated by this peer.
    CannotInvalidate {
        /// The STag.
        stag: u32,
    },

    // ---- RDMAP, remote operation ----
    /// RDMAP version is not 1.
    RdmapVersion {
        /// The received version.
        version: u8,
    },
    /// Unknown opcode, or one that is not allowed in this form or at this time.
    Opcode {
        /// The four opcode bits.
        opcode: u8,
    },
    /// An Atomic Request with an operation that is neither FetchAdd nor CmpSwap.
    AtomicOpcode {
        /// The four AOpCode bits.
        op: u8,
    },
    /// The target of an atomic is not a multiple of eight.
    AtomicMisaligned {
        /// Tagged offset of the target.
        to: u64,
    },
    /// A response without a request.
    UnexpectedResponse {
        /// The four opcode bits.
        opcode: u8,
    },
    /// A response that does not match its request; the text names the field.
    ResponseMismatch(&'static str),
    /// A message whose size or shape its opcode does not allow; the text says which.
    MessageShape(&'static str),
    /// An invalid control message; the text says why.
    Control(&'static str),
    /// A local failure of RDMAP that no other error describes.
    RdmapLocal,
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::MpaCrc { expected, got } => {
                write!(
                    f,
                    "crc mismatch: calculated 0x{expected:08x}, received 0x{got:08x}"
                )
            }
            Self::MpaTooShort { need, got } => {
                write!(
                    f,
                    "segment of {got} bytes is shorter than its header of {need}"
                )
            }
            Self::MpaMarker { expected, got } => {
                write!(
                    f,
                    "marker points {got} bytes back, frame starts {expected} bytes back"
                )
            }
            Self::MpaStartup(why) => write!(f, "bad mpa startup frame: {why}"),
            Self::MpaLocal => write!(f, "local mpa failure"),
            Self::MpaInsufficientIrd { needed, have } => {
                write!(f, "peer needs {needed} inbound reads, limit is {have}")
            }
            Self::MpaNoCommonRtr => write!(f, "no ready-to-receive message in common"),
            Self::TaggedVersion { version } => {
                write!(f, "ddp version {version} in tagged segment")
            }
            Self::TaggedStag { stag } => write!(f, "stag 0x{stag:08x} not registered"),
            Self::TaggedNotAssociated { stag } => {
                write!(f, "stag 0x{stag:08x} not usable on this stream")
            }
            Self::TaggedAccess { stag } => {
                write!(f, "stag 0x{stag:08x} gives no remote write access")
            }
            Self::TaggedBounds { stag, to, len } => {
                write!(f, "to 0x{to:x} len {len} outside stag 0x{stag:08x}")
            }
            Self::TaggedWrap { to, len } => write!(f, "to 0x{to:x} len {len} wraps"),
            Self::UntaggedVersion { version } => {
                write!(f, "ddp version {version} in untagged segment")
            }
            Self::UntaggedQueue { qn } => write!(f, "invalid queue {qn}"),
            Self::UntaggedNoBuffer { qn, msn } => {
                write!(f, "no buffer on queue {qn} for msn {msn}")
            }
            Self::UntaggedMsn { expected, got } => {
                write!(f, "msn {got} out of range, expected {expected}")
            }
            Self::UntaggedOffset { expected, got } => {
                write!(f, "message offset {got}, expected {expected}")
            }
            Self::UntaggedTooLong { buffer, message } => {
                write!(f, "message of {message} bytes, buffer of {buffer}")
            }
            Self::IrdOverrun { limit } => {
                write!(f, "more than {limit} reads and atomics outstanding")
            }
            Self::DdpLocal => write!(f, "local ddp failure"),
            Self::RemoteStag { stag } => write!(f, "remote stag 0x{stag:08x} not registered"),
            Self::RemoteBounds { stag, to, len } => {
                write!(f, "to 0x{to:x} len {len} outside remote stag 0x{stag:08x}")
            }
            Self::RemoteAccess { stag } => {
                write!(f, "remote stag 0x{stag:08x} does not give the access")
            }
            Self::RemoteNotAssociated { stag } => {
                write!(f, "remote stag 0x{stag:08x} not usable on this stream")
            }
            Self::RemoteWrap { to, len } => write!(f, "remote to 0x{to:x} len {len} wraps"),
            Self::CannotInvalidate { stag } => {
                write!(f, "stag 0x{stag:08x} may not be invalidated by the peer")
            }
            Self::RdmapVersion { version } => write!(f, "rdmap version {version}"),
            Self::Opcode { opcode } => write!(f, "unexpected opcode 0x{opcode:x}"),
            Self::AtomicOpcode { op } => write!(f, "unknown atomic operation {op}"),
            Self::AtomicMisaligned { to } => {
                write!(f, "atomic target 0x{to:x} not a multiple of 8")
            }
            Self::UnexpectedResponse { opcode } => {
                write!(
                    f,
                    "response with opcode 0x{opcode:x} that answers no request"
                )
            }
            Self::ResponseMismatch(what) => write!(f, "response differs from its request: {what}"),
            Self::MessageShape(what) => write!(f, "malformed message: {what}"),
            Self::Control(why) => write!(f, "bad control message: {why}"),
            Self::RdmapLocal => write!(f, "local rdmap failure"),
        }
    }
}

impl core::error::Error for PeerError {}

/// The error of a Terminate message: layer, error type and error code (RFC 5040 §4.8).
///
/// Only this file contains the codes: [`TermCode::encode`] returns the code that reports an error of the peer, and
/// [`TermCode::name`] the meaning of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TermCode {
    /// 0 RDMAP, 1 DDP, 2 MPA.
    pub layer: u8,
    /// Error type; its meaning depends on the layer.
    pub etype: u8,
    /// Error code; its meaning depends on layer and type.
    pub code: u8,
}

impl TermCode {
    /// RDMAP, remote protection error: access rights violation.
    pub const RDMAP_ACCESS: Self = Self::new(0, 1, 0x02);
    /// RDMAP, remote operation error: unexpected opcode.
    pub const RDMAP_OPCODE: Self = Self::new(0, 2, 0x06);
    /// RDMAP, remote operation error: unspecified.
    pub const RDMAP_UNSPECIFIED: Self = Self::new(0, 2, 0xff);
    /// DDP, untagged buffer error: no buffer available.
    pub const DDP_NO_BUFFER: Self = Self::new(1, 2, 0x02);
    /// DDP, untagged buffer error: message too long for the available buffer.
    pub const DDP_TOO_LONG: Self = Self::new(1, 2, 0x05);

    /// A code from its three parts.
    pub const fn new(layer: u8, etype: u8, code: u8) -> Self {
        Self { layer, etype, code }
    }

    /// The code from the first two bytes of a Terminate.
    pub const fn decode([kind, code]: [u8; 2]) -> Self {
        Self::new(kind >> 4, kind & 0x0f, code)
    }

    /// The first two bytes of a Terminate.
    pub const fn bytes(self) -> [u8; 2] {
        [self.layer << 4 | self.etype & 0x0f, self.code]
    }

    /// Whether it is a protection error: the peer may not access the memory that it named.
    pub const fn is_protection(self) -> bool {
        matches!((self.layer, self.etype), (0 | 1, 1))
    }

    /// Layer and type, and the meaning of the code if an RFC defines it.
    pub const fn name(self) -> (&'static str, Option<&'static str>) {
        let kind = match (self.layer, self.etype) {
            (0, 0) => "rdmap local",
            (0, 1) => "rdmap protection",
            (0, 2) => "rdmap operation",
            (1, 0) => "ddp local",
            (1, 1) => "ddp tagged",
            (1, 2) => "ddp untagged",
            (2, _) => "mpa",
            _ => "unknown",
        };
        let meaning = match (self.layer, self.etype, self.code) {
            (0, 0, _) | (1, 0, 0x00) | (2, 0, 0x05) => "catastrophic",
            (0 | 1, 1, 0x00) => "invalid stag",
            (0 | 1, 1, 0x01) => "base or bounds",
            (0, 1, 0x02) => "access rights",
            (0, 1, 0x03) | (1, 1, 0x02) => "stag not associated",
            (0, 1, 0x04) | (1, 1, 0x03) => "to wrap",
            (0, 1 | 2, 0x09) => "cannot invalidate",
            (0, 1 | 2, 0xff) => "unspecified",
            (0, 2, 0x05) | (1, 1, 0x04) | (1, 2, 0x06) => "version",
            (0, 2, 0x06) => "unexpected opcode",
            (0, 2, 0x07) => "catastrophic on stream",
            (0, 2, 0x08) => "catastrophic global",
            (1, 2, 0x01) => "invalid queue",
            (1, 2, 0x02) => "no buffer",
            (1, 2, 0x03) => "msn range",
            (1, 2, 0x04) => "message offset",
            (1, 2, 0x05) => "message too long",
            (2, 0, 0x01) => "tcp lost",
            (2, 0, 0x02) => "crc",
            (2, 0, 0x03) => "marker or length",
            (2, 0, 0x04) => "startup frame",
            (2, 0, 0x06) => "insufficient ird",
            (2, 0, 0x07) => "no common rtr",
            _ => return (kind, None),
        };
        (kind, Some(meaning))
    }
}

impl fmt::Display for TermCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{:02x}", self.layer, self.etype, self.code)
    }
}

impl TermCode {
    /// The code that reports an error of the peer.
    // The match is exhaustive: a new PeerError does not compile without a code.
    pub const fn encode(e: &PeerError) -> Self {
        use PeerError as E;
        match e {
            // RFC 5044 §8, RFC 6581 §8 [mpa-errors]: layer 2 has one error type.
            E::MpaCrc { .. } => Self::new(2, 0, 0x02),
            // The RFCs have no code for "shorter than its header": it is reported as a length mismatch.
            E::MpaTooShort { .. } | E::MpaMarker { .. } => Self::new(2, 0, 0x03),
            E::MpaStartup(_) => Self::new(2, 0, 0x04),
            E::MpaLocal => Self::new(2, 0, 0x05),
            E::MpaInsufficientIrd { .. } => Self::new(2, 0, 0x06),
            E::MpaNoCommonRtr => Self::new(2, 0, 0x07),

            // RFC 5041 §7.2 [ddp-errors-tagged]. A missing write right has no code in DDP; it
            // is reported like an unknown STag, as Linux siw does.
            E::TaggedStag { .. } | E::TaggedAccess { .. } => Self::new(1, 1, 0x00),
            E::TaggedBounds { .. } => Self::new(1, 1, 0x01),
            E::TaggedNotAssociated { .. } => Self::new(1, 1, 0x02),
            E::TaggedWrap { .. } => Self::new(1, 1, 0x03),
            E::TaggedVersion { .. } => Self::new(1, 1, 0x04),

            // RFC 5041 §7.2 [ddp-errors-untagged]. Reads beyond the IRD find no buffer on QN 1.
            E::UntaggedQueue { .. } => Self::new(1, 2, 0x01),
            E::UntaggedNoBuffer { .. } | E::IrdOverrun { .. } => Self::new(1, 2, 0x02),
            E::UntaggedMsn { .. } => Self::new(1, 2, 0x03),
            E::UntaggedOffset { .. } => Self::new(1, 2, 0x04),
            E::UntaggedTooLong { .. } => Self::new(1, 2, 0x05),
            E::UntaggedVersion { .. } => Self::new(1, 2, 0x06),
            E::DdpLocal => Self::new(1, 0, 0x00),

            // RFC 5040 §4.8 [rdmap-errors-protection]
            E::RemoteStag { .. } => Self::new(0, 1, 0x00),
            E::RemoteBounds { .. } => Self::new(0, 1, 0x01),
            E::RemoteAccess { .. } => Self::new(0, 1, 0x02),
            E::RemoteNotAssociated { .. } => Self::new(0, 1, 0x03),
            E::RemoteWrap { .. } => Self::new(0, 1, 0x04),
            E::CannotInvalidate { .. } => Self::new(0, 1, 0x09),

            // RFC 5040 §4.8, RFC 7306 §8.2 [rdmap-errors-operation]
            E::RdmapVersion { .. } => Self::new(0, 2, 0x05),
            E::Opcode { .. }
            | E::AtomicOpcode { .. }
            | E::UnexpectedResponse { .. }
            | E::Control(_) => Self::new(0, 2, 0x06),
            E::AtomicMisaligned { .. } | E::ResponseMismatch(_) | E::MessageShape(_) => {
                Self::new(0, 2, 0x07)
            }
            E::RdmapLocal => Self::new(0, 0, 0x00),
        }
    }
}

/// The caller broke a rule. Nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Misuse {
    /// An invalid argument; the text names it.
    InvalidArgument(&'static str),
    /// The call is not allowed in the state of the object; the text says which state.
    WrongState(&'static str),
    /// More scatter/gather entries than the queue was made for.
    TooManySge,
    /// More inline bytes than the queue was made for.
    InlineTooLarge,
    /// No room for another work request.
    QueueFull,
    /// Not supported by this device or this kind of queue pair.
    Unsupported(&'static str),
    /// The object is still in use by another one.
    Busy,
    /// A limit of the device or of memory is reached.
    NoMemory,
    /// The caller does not have the permission.
    Permission,
    /// An internal error broke the device.
    DeviceBroken,
}

impl Misuse {
    /// The `errno` value for a C caller.
    pub const fn errno(&self) -> i32 {
        match self {
            Self::InvalidArgument(_)
            | Self::WrongState(_)
            | Self::TooManySge
            | Self::InlineTooLarge => EINVAL,
            Self::QueueFull | Self::NoMemory => ENOMEM,
            Self::Unsupported(_) => EOPNOTSUPP,
            Self::Busy => EBUSY,
            Self::Permission => EPERM,
            Self::DeviceBroken => EIO,
        }
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(what) => write!(f, "invalid argument: {what}"),
            Self::WrongState(what) => write!(f, "wrong state: {what}"),
            Self::TooManySge => write!(f, "too many scatter/gather entries"),
            Self::InlineTooLarge => write!(f, "inline data too large"),
            Self::QueueFull => write!(f, "queue full"),
            Self::Unsupported(what) => write!(f, "not supported: {what}"),
            Self::Busy => write!(f, "still in use"),
            Self::NoMemory => write!(f, "out of memory or device limit reached"),
            Self::Permission => write!(f, "not permitted"),
            Self::DeviceBroken => write!(
                f,
                "an internal error broke the device; open it again in a new process"
            ),
        }
    }
}

impl core::error::Error for Misuse {}

// The numbers of Linux, since this crate does not use libc.
const EPERM: i32 = 1;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_error_has_the_terminate_code_of_the_rfcs() {
        use PeerError as E;
        let (stag, to, len) = (1, 2, 3);
        let (expected, got) = (1, 2);
        #[rustfmt::skip]
        let table = [
            (E::MpaCrc { expected, got },                        (2, 0, 0x02)),
            (E::MpaTooShort { need: 14, got: 13 },               (2, 0, 0x03)),
            (E::MpaMarker { expected: 4, got: 8 },               (2, 0, 0x03)),
            (E::MpaStartup("key"),                               (2, 0, 0x04)),
            (E::MpaLocal,                                        (2, 0, 0x05)),
            (E::MpaInsufficientIrd { needed: 2, have: 1 },       (2, 0, 0x06)),
            (E::MpaNoCommonRtr,                                  (2, 0, 0x07)),
            (E::TaggedStag { stag },                             (1, 1, 0x00)),
            (E::TaggedAccess { stag },                           (1, 1, 0x00)),
            (E::TaggedBounds { stag, to, len },                  (1, 1, 0x01)),
            (E::TaggedNotAssociated { stag },                    (1, 1, 0x02)),
            (E::TaggedWrap { to, len },                          (1, 1, 0x03)),
            (E::TaggedVersion { version: 0 },                    (1, 1, 0x04)),
            (E::UntaggedQueue { qn: 4 },                         (1, 2, 0x01)),
            (E::UntaggedNoBuffer { qn: 0, msn: 1 },              (1, 2, 0x02)),
            (E::IrdOverrun { limit: 16 },                        (1, 2, 0x02)),
            (E::UntaggedMsn { expected, got },                   (1, 2, 0x03)),
            (E::UntaggedOffset { expected, got },                (1, 2, 0x04)),
            (E::UntaggedTooLong { buffer: 1, message: 2 },       (1, 2, 0x05)),
            (E::UntaggedVersion { version: 0 },                  (1, 2, 0x06)),
            (E::DdpLocal,                                        (1, 0, 0x00)),
            (E::RemoteStag { stag },                             (0, 1, 0x00)),
            (E::RemoteBounds { stag, to, len },                  (0, 1, 0x01)),
            (E::RemoteAccess { stag },                           (0, 1, 0x02)),
            (E::RemoteNotAssociated { stag },                    (0, 1, 0x03)),
            (E::RemoteWrap { to, len },                          (0, 1, 0x04)),
            (E::CannotInvalidate { stag },                       (0, 1, 0x09)),
            (E::RdmapVersion { version: 0 },                     (0, 2, 0x05)),
            (E::Opcode { opcode: 12 },                           (0, 2, 0x06)),
            (E::AtomicOpcode { op: 1 },                          (0, 2, 0x06)),
            (E::UnexpectedResponse { opcode: 2 },                (0, 2, 0x06)),
            (E::Control("kind"),                                 (0, 2, 0x06)),
            (E::AtomicMisaligned { to },                         (0, 2, 0x07)),
            (E::ResponseMismatch("length"),                      (0, 2, 0x07)),
            (E::MessageShape("immediate"),                       (0, 2, 0x07)),
            (E::RdmapLocal,                                      (0, 0, 0x00)),
        ];
        for (error, (layer, etype, code)) in table {
            assert_eq!(
                TermCode::encode(&error),
                TermCode::new(layer, etype, code),
                "{error}"
            );
            let code = TermCode::encode(&error);
            assert_eq!(TermCode::decode(code.bytes()), code);
            assert!(code.name().1.is_some(), "{code} has no name");
        }
    }

    #[test]
    fn messages_are_lowercase_and_carry_the_values() {
        let e = PeerError::TaggedStag { stag: 0x12300 };
        assert_eq!(e.to_string(), "stag 0x00012300 not registered");
        let e = PeerError::TaggedBounds {
            stag: 0x12300,
            to: 4090,
            len: 10,
        };
        assert_eq!(e.to_string(), "to 0xffa len 10 outside stag 0x00012300");
        let e = PeerError::UntaggedNoBuffer { qn: 0, msn: 7 };
        assert_eq!(e.to_string(), "no buffer on queue 0 for msn 7");
        assert_eq!(Misuse::QueueFull.to_string(), "queue full");
        assert_eq!(TermCode::new(2, 0, 2).to_string(), "2/0/02");
    }

    #[test]
    fn a_misuse_has_its_errno() {
        for (misuse, errno) in [
            (Misuse::InvalidArgument("x"), 22),
            (Misuse::WrongState("x"), 22),
            (Misuse::TooManySge, 22),
            (Misuse::InlineTooLarge, 22),
            (Misuse::QueueFull, 12),
            (Misuse::NoMemory, 12),
            (Misuse::Unsupported("x"), 95),
            (Misuse::Busy, 16),
            (Misuse::Permission, 1),
        ] {
            assert_eq!(misuse.errno(), errno, "{misuse}");
        }
    }
}
