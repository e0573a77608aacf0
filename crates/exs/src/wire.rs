//! The format of the bytes that two ends exchange: the private data of the connection, and the header of each message.
//!
//! `docs/exs.md` describes both, and the tests of this file read its vectors.

use smallvec::{SmallVec, smallvec};
use std::num::NonZeroU32;

/// The version of the protocol.
pub(crate) const VERSION: u8 = 1;
/// The length of the private data.
pub(crate) const HELLO_LENGTH: usize = 16;
/// The length of a header without segments.
pub(crate) const HEADER_LENGTH: usize = 32;
/// The length of one segment after a header.
pub(crate) const SEGMENT_LENGTH: usize = 16;
/// The most segments of an advertisement.
pub(crate) const MAX_SEGMENTS: usize = 8;
/// The length of the longest header, with all its segments.
pub(crate) const MAX_HEADER_LENGTH: usize = HEADER_LENGTH + MAX_SEGMENTS * SEGMENT_LENGTH;
/// The longest transfer in bytes, which is the longest message of most devices.
pub(crate) const MAX_LENGTH: u64 = 1 << 30;

const MAGIC: [u8; 4] = *b"EXSP";

/// The private data with which each end describes itself when the connection is established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Whether the socket is a byte stream. Otherwise it preserves message boundaries.
    pub(crate) stream: bool,
    /// The number of advertisements that this end can store before it has acknowledged one.
    pub(crate) credits: u16,
    /// The longest immediate data in bytes that this end accepts. Immediate data is data in the message itself.
    pub(crate) immediate: u32,
    /// Whether this end understands [`Message::Ready`] and [`Message::Written`]. They are used if both ends do.
    pub(crate) ready: bool,
    /// Whether this end can invalidate the window of a [`Message::Ready`]. The drivers of some devices cannot.
    pub(crate) invalidates: bool,
}

/// The bits of [`Hello::ready`] and [`Hello::invalidates`] in the last four bytes of the private data. Ends ignore the other bits.
const READY_FEATURE: u32 = 1;
const INVALIDATES_FEATURE: u32 = 2;

/// Why private data or a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    /// The peer speaks another protocol.
    NotExs,
    /// The peer uses another version of this protocol.
    Version,
    /// A field has a value that the protocol does not define.
    Field,
    /// The message is shorter or longer than its header says.
    Length,
    /// A message of this kind is not allowed at this moment.
    Order,
}

impl Hello {
    pub(crate) fn write(self) -> [u8; HELLO_LENGTH] {
        let mut bytes = [0; HELLO_LENGTH];
        let mut out = Writer(&mut bytes);
        out.bytes(MAGIC);
        out.bytes([VERSION, u8::from(self.stream)]);
        out.bytes(self.credits.to_be_bytes());
        out.bytes(self.immediate.to_be_bytes());
        let features = u32::from(self.ready) * READY_FEATURE
            + u32::from(self.invalidates) * INVALIDATES_FEATURE;
        out.bytes(features.to_be_bytes());
        bytes
    }

    /// Parses private data. Additional bytes are ignored, because some transports add padding.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Bad> {
        let mut from = Reader(bytes);
        if from.array::<4>().ok() != Some(MAGIC) {
            return Err(Bad::NotExs);
        }
        let [version, flags] = from.array::<2>()?;
        if version != VERSION {
            return Err(Bad::Version);
        }
        let (credits, immediate, features) = (from.u16()?, from.u32()?, from.u32()?);
        let hello = Self {
            stream: flags & 1 != 0,
            credits,
            immediate,
            ready: features & READY_FEATURE != 0,
            invalidates: features & INVALIDATES_FEATURE != 0,
        };
        if flags > 1 || hello.credits == 0 {
            return Err(Bad::Field);
        }
        Ok(hello)
    }
}

/// Memory of the sender of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) addr: u64,
    pub(crate) stag: u32,
    pub(crate) len: u32,
}

/// The memory of a transfer. Most transfers have one segment, which needs no allocation.
pub(crate) type Segments = SmallVec<[Segment; 1]>;

/// The result of a transfer, in an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// All data was transferred, or as much as the receive had room for.
    Done,
    /// The sender cancelled the transfer before anything was transferred.
    Cancelled,
    /// The receiver refused the transfer.
    Refused,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Advertises memory of the sender, which the receiver of the message reads.
    Advert {
        seq: u32,
        segments: Segments,
        persistent: bool,
        notify: bool,
        /// The peer's message that this one also acknowledges, with status `Done` and all bytes accepted.
        acks: Option<NonZeroU32>,
    },
    /// Data of this length follows in the message itself.
    Immediate {
        seq: u32,
        len: u32,
        acks: Option<NonZeroU32>,
    },
    /// Memory that the receiver of the message may write: a persistent receive.
    Place { seq: u32, segment: Segment },
    /// The answer to a message. Each message except `Ack` is answered once: by an `Ack`, by the field `acks` of another message, or, if it is a
    /// `Ready`, by `Written`.
    Ack { seq: u32, len: u64, status: Status },
    /// Reports that a part of a persistent advertisement was read.
    Notify { seq: u32, of: u32, len: u64 },
    /// Cancels the advertisement `of` of the sender.
    Cancel { seq: u32, of: u32 },
    /// Ends the sender's direction: no advertisement follows.
    Fin { seq: u32 },
    /// Advertises the memory of a receive, into which the receiver of this message may write its next send.
    Ready {
        seq: u32,
        segment: Segment,
        /// `None`: the receive directly follows the one that the last message of this kind has advertised. `Some`: all receives before this
        /// one have their data or are reading it. The number is that of the last message with data or an advertisement that the peer has
        /// sent to this end, or 0 if there was none.
        last: Option<u32>,
        acks: Option<NonZeroU32>,
        /// Whether the STag is that of a memory window. [`Message::Written`] then is a Send with Invalidate, which ends the access to the
        /// memory.
        window: bool,
    },
    /// The data of a send of this length was written to the memory that the peer's message `to` advertised.
    Written {
        seq: u32,
        to: u32,
        len: u32,
        acks: Option<NonZeroU32>,
    },
}

impl Message {
    /// Returns the peer's message that this one also acknowledges, with status `Done` and all bytes accepted.
    pub(crate) fn acks(&self) -> Option<NonZeroU32> {
        match self {
            Self::Advert { acks, .. }
            | Self::Immediate { acks, .. }
            | Self::Written { acks, .. }
            | Self::Ready { acks, .. } => *acks,
            _ => None,
        }
    }
}

const ADVERT: u8 = 1;
const ACK: u8 = 2;
const PLACE: u8 = 3;
const NOTIFY: u8 = 4;
const CANCEL: u8 = 5;
const FIN: u8 = 6;
const READY: u8 = 7;
const WRITTEN: u8 = 8;

const IMMEDIATE_FLAG: u8 = 1;
const PERSISTENT_FLAG: u8 = 2;
const NOTIFY_FLAG: u8 = 4;
const ACKS_FLAG: u8 = 8;
const FOLLOWS_READY_FLAG: u8 = 1;
const WINDOW_FLAG: u8 = 2;

/// The fields of a header. Each kind of message uses some of them, and the others are zero.
#[derive(Default)]
struct Header {
    kind: u8,
    flags: u8,
    seq: u32,
    length: u64,
    addr: u64,
    stag: u32,
    of: u32,
}

impl Message {
    /// Writes the message to the beginning of `into`, which has at least [`MAX_HEADER_LENGTH`] bytes. Returns its length.
    pub(crate) fn write(&self, into: &mut [u8]) -> usize {
        let mut more: &[Segment] = &[];
        let header = match self {
            Self::Advert {
                seq,
                segments,
                persistent,
                notify,
                acks,
            } => {
                let mut header = Header {
                    kind: ADVERT,
                    flags: u8::from(*persistent) * PERSISTENT_FLAG
                        + u8::from(*notify) * NOTIFY_FLAG
                        + u8::from(acks.is_some()) * ACKS_FLAG,
                    seq: *seq,
                    of: acks.map_or(0, NonZeroU32::get),
                    length: segments.iter().map(|s| u64::from(s.len)).sum(),
                    ..Header::default()
                };
                match segments.as_slice() {
                    [one] => (header.addr, header.stag) = (one.addr, one.stag),
                    several => more = several,
                }
                header
            }
            Self::Immediate { seq, len, acks } => Header {
                kind: ADVERT,
                flags: IMMEDIATE_FLAG + u8::from(acks.is_some()) * ACKS_FLAG,
                seq: *seq,
                of: acks.map_or(0, NonZeroU32::get),
                length: u64::from(*len),
                ..Header::default()
            },
            Self::Place { seq, segment } => Header {
                kind: PLACE,
                seq: *seq,
                length: u64::from(segment.len),
                addr: segment.addr,
                stag: segment.stag,
                ..Header::default()
            },
            Self::Ack { seq, len, status } => Header {
                kind: ACK,
                flags: match status {
                    Status::Done => 0,
                    Status::Cancelled => 1,
                    Status::Refused => 2,
                },
                seq: *seq,
                length: *len,
                ..Header::default()
            },
            Self::Notify { seq, of, len } => Header {
                kind: NOTIFY,
                seq: *seq,
                of: *of,
                length: *len,
                ..Header::default()
            },
            Self::Cancel { seq, of } => Header {
                kind: CANCEL,
                seq: *seq,
                of: *of,
                ..Header::default()
            },
            Self::Fin { seq } => Header {
                kind: FIN,
                seq: *seq,
                ..Header::default()
            },
            Self::Ready {
                seq,
                segment,
                last,
                acks,
                window,
            } => {
                more = std::slice::from_ref(segment);
                Header {
                    kind: READY,
                    flags: u8::from(last.is_none()) * FOLLOWS_READY_FLAG
                        + u8::from(*window) * WINDOW_FLAG
                        + u8::from(acks.is_some()) * ACKS_FLAG,
                    seq: *seq,
                    length: u64::from(segment.len),
                    addr: u64::from(last.unwrap_or(0)),
                    of: acks.map_or(0, NonZeroU32::get),
                    ..Header::default()
                }
            }
            Self::Written { seq, to, len, acks } => Header {
                kind: WRITTEN,
                flags: u8::from(acks.is_some()) * ACKS_FLAG,
                seq: *seq,
                length: u64::from(*len),
                addr: u64::from(*to),
                of: acks.map_or(0, NonZeroU32::get),
                ..Header::default()
            },
        };
        let length = HEADER_LENGTH + more.len() * SEGMENT_LENGTH;
        let mut out = Writer(into);
        out.bytes([header.kind, header.flags]);
        out.bytes(u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
        out.bytes(header.seq.to_be_bytes());
        out.bytes(header.length.to_be_bytes());
        out.bytes(header.addr.to_be_bytes());
        out.bytes(header.stag.to_be_bytes());
        out.bytes(header.of.to_be_bytes());
        for segment in more {
            out.bytes(segment.addr.to_be_bytes());
            out.bytes(segment.stag.to_be_bytes());
            out.bytes(segment.len.to_be_bytes());
        }
        length
    }

    /// Returns whether the bytes begin like those of [`Message::Immediate`].
    pub(crate) fn is_immediate(bytes: &[u8]) -> bool {
        matches!(bytes, [ADVERT, flags, ..] if flags & IMMEDIATE_FLAG != 0)
    }

    /// Parses a message. Immediate data begins after [`HEADER_LENGTH`] bytes.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Bad> {
        let mut from = Reader(bytes);
        let [kind, flags] = from.array()?;
        let header_length = usize::from(from.u16()?);
        let seq = from.u32()?;
        let length = from.u64()?;
        let addr = from.u64()?;
        let stag = from.u32()?;
        let of = from.u32()?;
        let may_acknowledge = [ADVERT, READY, WRITTEN].contains(&kind);
        let (flags, acks) = if may_acknowledge && flags & ACKS_FLAG != 0 {
            let acked = NonZeroU32::new(of).ok_or(Bad::Field)?;
            (flags & !ACKS_FLAG, Some(acked))
        } else {
            (flags, None)
        };
        let immediate = kind == ADVERT && flags == IMMEDIATE_FLAG;
        let behind = if immediate { length } else { 0 };
        let whole = u64::try_from(header_length)
            .ok()
            .and_then(|h| h.checked_add(behind));
        if whole != u64::try_from(bytes.len()).ok() || header_length < HEADER_LENGTH {
            return Err(Bad::Length);
        }
        let is_right = match kind {
            ADVERT if !immediate => true,
            READY => header_length == HEADER_LENGTH + SEGMENT_LENGTH,
            _ => header_length == HEADER_LENGTH,
        };
        if !is_right {
            return Err(Bad::Length);
        }
        let has_memory = kind == PLACE || (kind == ADVERT && !immediate);
        let one = has_memory && header_length == HEADER_LENGTH;
        let follows_ready = kind == READY && flags & FOLLOWS_READY_FLAG != 0;
        let flags_known = match kind {
            ADVERT => {
                immediate || [0, PERSISTENT_FLAG, PERSISTENT_FLAG | NOTIFY_FLAG].contains(&flags)
            }
            ACK => flags <= 2,
            READY => flags <= FOLLOWS_READY_FLAG | WINDOW_FLAG,
            _ => flags == 0,
        };
        let has_number = kind == WRITTEN || (kind == READY && !follows_ready);
        let number = u32::try_from(addr).ok().filter(|_| has_number);
        let fields_known = (one || ((addr == 0 || number.is_some()) && stag == 0))
            && (of == 0 || kind == NOTIFY || kind == CANCEL || acks.is_some())
            && (length == 0 || (kind != CANCEL && kind != FIN))
            && length <= MAX_LENGTH;
        if !flags_known || !fields_known {
            return Err(Bad::Field);
        }
        let len = u32::try_from(length).map_err(|_| Bad::Field)?;
        Ok(match kind {
            ADVERT if immediate => Self::Immediate { seq, len, acks },
            ADVERT => Self::Advert {
                seq,
                segments: if one {
                    smallvec![Segment { addr, stag, len }]
                } else {
                    Self::segments(&mut from, length)?
                },
                persistent: flags & PERSISTENT_FLAG != 0,
                notify: flags & NOTIFY_FLAG != 0,
                acks,
            },
            PLACE => Self::Place {
                seq,
                segment: Segment { addr, stag, len },
            },
            ACK => Self::Ack {
                seq,
                len: length,
                status: match flags {
                    0 => Status::Done,
                    1 => Status::Cancelled,
                    _ => Status::Refused,
                },
            },
            NOTIFY => Self::Notify {
                seq,
                of,
                len: length,
            },
            CANCEL => Self::Cancel { seq, of },
            FIN => Self::Fin { seq },
            READY => Self::Ready {
                seq,
                segment: Self::segment(&mut from).and_then(|s| {
                    if s.len == len {
                        Ok(s)
                    } else {
                        Err(Bad::Length)
                    }
                })?,
                last: number,
                acks,
                window: flags & WINDOW_FLAG != 0,
            },
            WRITTEN => Self::Written {
                seq,
                to: number.ok_or(Bad::Field)?,
                len,
                acks,
            },
            _ => return Err(Bad::Field),
        })
    }

    fn segment(from: &mut Reader<'_>) -> Result<Segment, Bad> {
        Ok(Segment {
            addr: from.u64()?,
            stag: from.u32()?,
            len: from.u32()?,
        })
    }

    fn segments(from: &mut Reader<'_>, length: u64) -> Result<Segments, Bad> {
        let count = from.0.len() / SEGMENT_LENGTH;
        if !from.0.len().is_multiple_of(SEGMENT_LENGTH) || !(2..=MAX_SEGMENTS).contains(&count) {
            return Err(Bad::Length);
        }
        let mut segments = Segments::with_capacity(count);
        let mut sum = 0;
        for _ in 0..count {
            let segment = Self::segment(from)?;
            sum += u64::from(segment.len);
            segments.push(segment);
        }
        if sum != length {
            return Err(Bad::Length);
        }
        Ok(segments)
    }
}

/// The part of a buffer that is not written yet.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn bytes<const N: usize>(&mut self, bytes: [u8; N]) {
        if let Some((to, rest)) = std::mem::take(&mut self.0).split_first_chunk_mut() {
            *to = bytes;
            self.0 = rest;
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Bad> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Bad::Length)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, Bad> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, Bad> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Bad> {
        Ok(u64::from_be_bytes(self.array()?))
    }
}

#[cfg(any(test, fuzzing))]
impl Message {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MAX_HEADER_LENGTH];
        let length = self.write(&mut bytes);
        bytes.truncate(length);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex
            .chars()
            .filter_map(|c| c.to_digit(16))
            .map(|d| d as u8)
            .collect();
        digits
            .chunks(2)
            .map(|pair| pair[0] * 16 + pair[1])
            .collect()
    }

    /// Returns the message for a vector of `docs/exs.md`, by its name.
    fn meant(name: &str) -> Message {
        let segment = |addr, stag, len| Segment { addr, stag, len };
        match name {
            "advert" => Message::Advert {
                seq: 1,
                segments: smallvec![segment(0x7f00_1122_3000, 0x0a0b_0c0d, 65536)],
                persistent: false,
                notify: false,
                acks: None,
            },
            "advert of two segments" => Message::Advert {
                seq: 2,
                segments: smallvec![segment(0x1000, 0x11, 16), segment(0x2000, 0x22, 32)],
                persistent: false,
                notify: false,
                acks: None,
            },
            "persistent advert with notify" => Message::Advert {
                seq: 3,
                segments: smallvec![segment(0x4000, 0x44, 4096)],
                persistent: true,
                notify: true,
                acks: None,
            },
            "immediate" => Message::Immediate {
                seq: 4,
                len: 5,
                acks: None,
            },
            "immediate that acknowledges" => Message::Immediate {
                seq: 5,
                len: 5,
                acks: NonZeroU32::new(3),
            },
            "advert that acknowledges" => Message::Advert {
                seq: 6,
                segments: smallvec![segment(0x9000, 0x99, 4096)],
                persistent: false,
                notify: false,
                acks: NonZeroU32::new(4),
            },
            "place" => Message::Place {
                seq: 5,
                segment: segment(0x8000, 0x88, 8192),
            },
            "ack" => Message::Ack {
                seq: 1,
                len: 65536,
                status: Status::Done,
            },
            "notify" => Message::Notify {
                seq: 6,
                of: 3,
                len: 100,
            },
            "cancel" => Message::Cancel { seq: 7, of: 2 },
            "fin" => Message::Fin { seq: 8 },
            "ready" => Message::Ready {
                seq: 9,
                segment: segment(0xa000, 0xaa, 65536),
                last: Some(6),
                acks: None,
                window: false,
            },
            "ready that acknowledges" => Message::Ready {
                seq: 10,
                segment: segment(0xa000, 0xaa, 65536),
                last: Some(6),
                acks: NonZeroU32::new(4),
                window: true,
            },
            "ready after a ready" => Message::Ready {
                seq: 11,
                segment: segment(0xb000, 0xaa, 65536),
                last: None,
                acks: NonZeroU32::new(7),
                window: false,
            },
            "written" => Message::Written {
                seq: 12,
                to: 9,
                len: 4096,
                acks: NonZeroU32::new(8),
            },
            other => panic!("docs/exs.md: {other}: no such vector"),
        }
    }

    #[test]
    fn the_vectors_of_the_document_are_parsed_and_written() {
        let document = include_str!("../../../docs/exs.md");
        let lines = document.lines().filter_map(|l| l.strip_prefix("vector "));
        let mut seen = 0;
        for line in lines {
            let (name, hex) = line.split_once(": ").unwrap();
            let raw = bytes(hex);
            seen += 1;
            if name.starts_with("private data") {
                let hello = Hello {
                    stream: true,
                    credits: 16,
                    immediate: 256,
                    ready: name != "private data",
                    invalidates: name != "private data",
                };
                assert_eq!(hello.write().to_vec(), raw);
                assert_eq!(Hello::read(&raw), Ok(hello));
                continue;
            }
            let message = meant(name);
            assert_eq!(Message::read(&raw), Ok(message.clone()), "{name}");
            let written = message.bytes();
            assert_eq!(raw.get(..written.len()), Some(&*written), "{name}");
        }
        assert_eq!(seen, 17);
    }

    #[test]
    fn messages_outside_the_protocol_are_refused() {
        let good = Message::Fin { seq: 8 }.bytes();
        for at in [0, 1, 2, 3, 15, 16, 24, 31] {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(Message::read(&bad).is_err(), "byte {at}");
        }
        assert_eq!(Message::read(&good[..31]), Err(Bad::Length));
        let mut long = good;
        long.push(0);
        assert_eq!(Message::read(&long), Err(Bad::Length));
        let segment = Segment {
            addr: 1,
            stag: 1,
            len: 1,
        };
        let advert = Message::Advert {
            seq: 1,
            segments: smallvec![segment; MAX_SEGMENTS + 1],
            persistent: false,
            notify: false,
            acks: None,
        };
        let mut bytes = [0; MAX_HEADER_LENGTH + SEGMENT_LENGTH];
        let length = advert.write(&mut bytes);
        assert_eq!(length, bytes.len());
        assert_eq!(Message::read(&bytes), Err(Bad::Length));
        assert_eq!(Hello::read(b"GET / HTTP/1.1\r\n"), Err(Bad::NotExs));
        let mut newer = Hello {
            stream: false,
            credits: 1,
            immediate: 0,
            ready: false,
            invalidates: false,
        }
        .write();
        newer[4] = 2;
        assert_eq!(Hello::read(&newer), Err(Bad::Version));
    }
}
