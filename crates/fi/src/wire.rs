//! The header of each message between two providers, version 1 (docs/mpi.md).
//!
//! ```text
//!  0    1    2    3    4          8          16         24         32
//! +----+----+----+----+----------+----------+----------+----------+
//! | 1  |kind|flag| 0  |    id    |  length  |   tag    |   data   |
//! +----+----+----+----+----------+----------+----------+----------+
//! ```
//!
//! All fields are big-endian.

/// The version of the protocol. Messages of another version are dropped.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER: usize = 32;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message of the program, with its content after the header.
    Eager,
    /// An announced message of `length` bytes, which the sender identifies by `id`.
    Announce,
    /// The answer to an announcement: `length` bytes may be written to the address `data`. `tag` contains the key (high half)
    /// and the number that the receiver has assigned to the message (low half), which is the immediate data of the write.
    Grant,
    /// A write of `length` bytes has completed. `data` is the immediate data for the target's program.
    Written,
    /// An atomic operation. `id` identifies it, `tag` is the address, `data` the key (high half), the operation and the type (16
    /// bits each), and `length` the number of elements. The operands follow, then the values to compare with.
    Atomic,
    /// The answer to an atomic operation. `id` is that of the request, `tag` is 0 or an error, and `length` is the number of
    /// bytes that follow.
    AtomicDone,
    /// A message without content. Its delivery shows that the peer responds.
    Probe,
    /// With `length` 1: the sender of this message holds too many messages that came from its recipient and match no receive.
    /// From now on the recipient must announce all its messages. With `length` 0: the recipient may send messages without an
    /// announcement again.
    Hold,
    /// A step in the life of a link, which is a reliable connection between two busy endpoints. `length` is a [`Step`], `id` the
    /// sender's queue pair of the link, and `data` the receiver's. The meaning of `tag` depends on the step.
    Link,
    /// The receiver has read the announced message `id`, which was [`READABLE`], or will not read it. Or it has handled the message `id`,
    /// which was [`CONFIRMED`]: the content is in the memory of a receive, or is stored until there is a receive.
    Taken,
    /// A question about `length` operations that wait for the recipient, of the kind [`Waits`] in `tag`. Two numbers follow for each of
    /// them: the sender's, and the recipient's or 0.
    Ask,
    /// The answer to a question with the same `tag`: of the operations in the question, the sender of this answer does not know these
    /// `length` ones. The numbers of the end that has asked follow.
    Unknown,
}

/// What an operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waits {
    /// The grant for a message that the asking end has announced, the notice that the message was read, or the confirmation of a message
    /// that was [`CONFIRMED`].
    Message = 0,
    /// The answer to an atomic operation.
    Atomic = 1,
    /// The write of a message that the asking end has granted memory for.
    Write = 2,
}

impl Waits {
    /// Returns the kind with a number.
    pub fn from_number(number: u64) -> Option<Self> {
        let all = [Self::Message, Self::Atomic, Self::Write];
        all.into_iter().find(|waits| *waits as u64 == number)
    }
}

/// A step in the life of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The sender offers a link.
    Offer = 1,
    /// The sender has connected its queue pair to the offered one.
    Accept = 2,
    /// The sender accepts no link.
    Refuse = 3,
    /// The messages of the sender follow on the link.
    Moved = 4,
    /// The link has failed. `tag` is the number of messages that the sender has received on the link.
    Broken = 5,
    /// The sender closes its endpoint. `tag` is the number of messages that it has sent on the link, or [`u64::MAX`] if more may follow.
    Closed = 6,
    /// The sender has given up the link. Without its number (`data` 0), this answers a grant for a write over the link.
    Gone = 7,
}

impl Step {
    /// Returns the step with a number.
    pub fn from_number(number: u64) -> Option<Self> {
        let all = [
            Self::Offer,
            Self::Accept,
            Self::Refuse,
            Self::Moved,
            Self::Broken,
            Self::Closed,
            Self::Gone,
        ];
        all.into_iter().find(|step| *step as u64 == number)
    }
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::Eager,
        Self::Announce,
        Self::Grant,
        Self::Written,
        Self::Atomic,
        Self::AtomicDone,
        Self::Probe,
        Self::Hold,
        Self::Link,
        Self::Taken,
        Self::Ask,
        Self::Unknown,
    ];

    fn code(self) -> u8 {
        match self {
            Self::Eager => 1,
            Self::Announce => 2,
            Self::Grant => 3,
            Self::Written => 4,
            Self::Atomic => 5,
            Self::AtomicDone => 6,
            Self::Probe => 7,
            Self::Hold => 8,
            Self::Link => 9,
            Self::Taken => 10,
            Self::Ask => 11,
            Self::Unknown => 12,
        }
    }
}

/// The message has a tag.
pub const TAGGED: u8 = 1;
/// `data` is immediate data for the receiver's program.
pub const DATA: u8 = 2;
/// An atomic operation whose answer contains the former values.
pub const FETCH: u8 = 4;
/// An atomic operation with values to compare with.
pub const COMPARE: u8 = 8;
/// A grant of memory that the sender of the message writes over the link.
pub const LINKED: u8 = 16;

/// An announced message that the receiver may read: a [`Source`] follows the header.
pub const READABLE: u8 = 32;

/// A message with its content whose receiver sends [`Kind::Taken`] when it has handled the message.
pub const CONFIRMED: u8 = 64;

const FLAGS: u8 = TAGGED | DATA | FETCH | COMPARE | LINKED | READABLE | CONFIRMED;

/// Bytes of a [`Source`].
pub const SOURCE: usize = 12;

/// The sender's memory with an announced message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The key of the memory, for the queue pair that the announcement was sent to.
    pub rkey: u32,
    /// The address of the memory.
    pub base: u64,
}

impl Source {
    /// Returns the bytes that follow the header.
    pub fn encode(&self) -> [u8; SOURCE] {
        let mut out = [0; SOURCE];
        let bytes = self.rkey.to_be_bytes().into_iter();
        for (to, from) in out.iter_mut().zip(bytes.chain(self.base.to_be_bytes())) {
            *to = from;
        }
        out
    }

    /// Parses the bytes that follow the header.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (rkey, base) = bytes.split_first_chunk::<4>()?;
        Some(Self {
            rkey: u32::from_be_bytes(*rkey),
            base: u64::from_be_bytes(base.try_into().ok()?),
        })
    }
}

/// A message that waits at its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    /// The sender's number for it.
    pub id: u32,
    /// The memory from which the receiver may read it. Otherwise the receiver grants memory, and the sender writes.
    pub source: Option<Source>,
}

impl Announcement {
    /// Returns the announcement that a header and the bytes after it contain.
    pub fn new(header: &Header, follows: &[u8]) -> Self {
        Self {
            id: header.id,
            source: Source::decode(follows).filter(|_| header.has(READABLE)),
        }
    }
}

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message.
    pub kind: Kind,
    /// [`TAGGED`], [`DATA`], [`FETCH`], [`COMPARE`], [`LINKED`], [`READABLE`], [`CONFIRMED`].
    pub flags: u8,
    /// Identifies the operation at its sender.
    pub id: u32,
    /// The meaning of this field depends on [`Self::kind`].
    pub length: u64,
    /// The meaning of this field depends on [`Self::kind`].
    pub tag: u64,
    /// The meaning of this field depends on [`Self::kind`].
    pub data: u64,
}

impl Header {
    /// Returns a header of a kind, with all fields zero.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            id: 0,
            length: 0,
            tag: 0,
            data: 0,
        }
    }

    /// Returns a grant of no memory for the announced message `id`. The sender of that message completes it by a write of 0 bytes.
    /// The immediate data of the write is the name of no message, so that the receiver ignores the write.
    pub fn grant_of_nothing(id: u32) -> Self {
        Self {
            id,
            tag: crate::slab::NONE.into(),
            ..Self::new(Kind::Grant)
        }
    }

    /// Returns whether a flag is set.
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns the bytes of the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let [_, _, _, _, i0, i1, i2, i3] = u64::from(self.id).to_be_bytes();
        let head = [VERSION, self.kind.code(), self.flags, 0, i0, i1, i2, i3];
        let words = [
            head,
            self.length.to_be_bytes(),
            self.tag.to_be_bytes(),
            self.data.to_be_bytes(),
        ];
        let mut out = [0; HEADER];
        // Whole words, which the compiler copies without a loop over bytes.
        for (to, from) in out.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = from;
        }
        out
    }

    /// Parses the header of a message. Returns it with the bytes that follow, or `None` if the message is too short, of
    /// another version, or has inconsistent fields.
    pub fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = message.split_first_chunk::<HEADER>()?;
        let [version, code, flags, zero, rest_of_head @ ..] = head;
        if *version != VERSION || *zero != 0 || flags & !FLAGS != 0 {
            return None;
        }
        let kind = Kind::ALL.into_iter().find(|kind| kind.code() == *code)?;
        let (id, fields) = rest_of_head.split_first_chunk::<4>()?;
        let (length, fields) = fields.split_first_chunk::<8>()?;
        let (tag, fields) = fields.split_first_chunk::<8>()?;
        let (data, _) = fields.split_first_chunk::<8>()?;
        let header = Self {
            kind,
            flags: *flags,
            id: u32::from_be_bytes(*id),
            length: u64::from_be_bytes(*length),
            tag: u64::from_be_bytes(*tag),
            data: u64::from_be_bytes(*data),
        };
        let follows = rest.len() as u64;
        let fits = match kind {
            Kind::Eager => header.length == follows && follows <= crate::limits::EAGER as u64,
            Kind::Announce => {
                let source = if header.has(READABLE) { SOURCE } else { 0 };
                follows == source as u64 && header.length <= crate::limits::MESSAGE as u64
            }
            Kind::Hold => follows == 0 && header.length <= 1,
            Kind::Link => follows == 0 && Step::from_number(header.length).is_some(),
            Kind::AtomicDone => header.length == follows,
            Kind::Ask => header.length.checked_mul(8) == Some(follows),
            Kind::Unknown => header.length.checked_mul(4) == Some(follows),
            Kind::Atomic => follows <= 2 * crate::limits::ATOMIC as u64,
            Kind::Grant | Kind::Written | Kind::Probe | Kind::Taken => follows == 0,
        };
        fits.then_some((header, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire() {
        for kind in Kind::ALL {
            let header = Header {
                kind,
                flags: TAGGED | DATA,
                id: 0x0102_0304,
                length: match kind {
                    Kind::Announce => 1 << 20,
                    Kind::Link => 6,
                    _ => 0,
                },
                tag: 0x1112_1314_1516_1718,
                data: u64::MAX - 1,
            };
            assert_eq!(Header::decode(&header.encode()), Some((header, &[][..])));
        }
    }

    #[test]
    fn a_readable_announcement_has_a_source() {
        let source = Source {
            rkey: 0x0102_0304,
            base: 0x0506_0708_090a_0b0c,
        };
        let mut header = Header {
            flags: READABLE,
            id: 9,
            length: 1 << 20,
            ..Header::new(Kind::Announce)
        };
        let mut message = header.encode().to_vec();
        assert!(Header::decode(&message).is_none(), "without its source");
        message.extend(1..=12);
        let (decoded, follows) = Header::decode(&message).unwrap();
        assert_eq!(decoded, header);
        let announcement = Announcement::new(&decoded, follows);
        assert_eq!((announcement.id, announcement.source), (9, Some(source)));
        assert_eq!(source.encode()[..], message[HEADER..]);
        header.flags = 0;
        message[..HEADER].copy_from_slice(&header.encode());
        assert!(
            Header::decode(&message).is_none(),
            "a source without the flag"
        );
        assert_eq!(Announcement::new(&header, &[]).source, None);
    }

    #[test]
    fn the_bytes_are_those_of_the_document() {
        let header = Header {
            kind: Kind::Eager,
            flags: TAGGED,
            id: 0,
            length: 5,
            tag: 7,
            data: 0,
        };
        let mut message = header.encode().to_vec();
        message.extend(b"hello");
        let mut expected = vec![1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
        expected.extend([0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend(b"hello");
        assert_eq!(message, expected);
        assert_eq!(Header::decode(&message), Some((header, &b"hello"[..])));
    }

    #[test]
    fn invalid_headers_are_refused() {
        let good = Header::new(Kind::Eager).encode();
        assert!(Header::decode(&good).is_some());
        assert!(Header::decode(&good[..HEADER - 1]).is_none());
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Header::decode(&bytes).is_some()
        };
        assert!(!with(0, 2), "a version");
        assert!(!with(1, 0) && !with(1, 13), "a kind");
        assert!(with(2, 64) && !with(2, 128), "a flag");
        assert!(!with(3, 1), "the byte that must be zero");
        assert!(!with(15, 1), "a length that is not that of the message");
        let mut long = Header::new(Kind::Announce);
        long.length = crate::limits::MESSAGE as u64 + 1;
        assert!(Header::decode(&long.encode()).is_none(), "too long");
        let mut hold = Header::new(Kind::Hold);
        hold.length = 2;
        assert!(
            Header::decode(&hold.encode()).is_none(),
            "neither on nor off"
        );
        let mut link = Header::new(Kind::Link);
        for (number, known) in [(0, false), (1, true), (7, true), (8, false)] {
            link.length = number;
            assert_eq!(Header::decode(&link.encode()).is_some(), known, "{number}");
        }
        let mut more = Header::new(Kind::Grant).encode().to_vec();
        more.push(0);
        assert!(Header::decode(&more).is_none(), "bytes after a grant");
        for (kind, size) in [(Kind::Ask, 8), (Kind::Unknown, 4)] {
            let mut header = Header::new(kind);
            header.length = 2;
            let mut message = header.encode().to_vec();
            message.resize(HEADER + 2 * size, 0);
            assert!(Header::decode(&message).is_some(), "{kind:?}");
            message.pop();
            assert!(Header::decode(&message).is_none(), "{kind:?} is too short");
            header.length = u64::MAX / 4 + 1;
            assert!(Header::decode(&header.encode()).is_none(), "{kind:?}");
        }
    }
}
