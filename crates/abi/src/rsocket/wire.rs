//! The formats of private data and messages between stream sockets, which are those of librdmacm over iWARP, and of the header of
//! datagrams (docs/rsockets.md).
//!
//! Numbers in private data and in the header of datagrams are big-endian. All other numbers have the byte order of the sender's
//! host, which a flag in the private data indicates. Only little-endian is supported.

/// Version in the private data.
const VERSION: u8 = 1;
/// Flag: the host is big-endian.
const FLAG_BIG_ENDIAN: u8 = 1;
/// Flag: the list of free memory is followed by a table of mappings.
const FLAG_MAPPINGS: u8 = 2;

/// The length of the private data in bytes.
pub(super) const HELLO: usize = 40;
/// The length of an entry of the list of free memory in bytes.
pub(super) const AREA: usize = 16;
/// The length of an entry of the table of mappings in bytes.
pub(super) const MAPPING: usize = 24;
/// The length of a message in bytes.
pub(super) const MESSAGE: usize = 4;
/// The number of entries of the list of free memory.
pub(super) const AREAS: u32 = 2;

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Area {
    pub(super) addr: u64,
    pub(super) key: u32,
    pub(super) len: u32,
}

impl Area {
    /// Returns the bytes of an entry of the list of free memory.
    pub(super) fn emit(&self) -> [u8; AREA] {
        let mut out = [0; AREA];
        fill(
            &mut out,
            &[
                &self.addr.to_le_bytes(),
                &self.key.to_le_bytes(),
                &self.len.to_le_bytes(),
            ],
        );
        out
    }

    pub(super) fn parse(bytes: &[u8; AREA]) -> Self {
        let mut at = Reader(bytes);
        Self {
            addr: u64::from_le_bytes(at.take()),
            key: u32::from_le_bytes(at.take()),
            len: u32::from_le_bytes(at.take()),
        }
    }
}

/// Memory of the peer that can be written by offset (`riomap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Mapping {
    pub(super) offset: u64,
    pub(super) area: Area,
}

impl Mapping {
    pub(super) fn emit(&self) -> [u8; MAPPING] {
        let mut out = [0; MAPPING];
        fill(&mut out, &[&self.offset.to_le_bytes(), &self.area.emit()]);
        out
    }

    pub(super) fn parse(bytes: &[u8; MAPPING]) -> Self {
        let mut at = Reader(bytes);
        Self {
            offset: u64::from_le_bytes(at.take()),
            area: Area::parse(&at.take()),
        }
    }

    /// Returns the address at `offset` and the number of bytes from there on, if the mapping contains `offset`.
    pub(super) fn find(&self, offset: u64) -> Option<(u64, u64)> {
        let within = offset.checked_sub(self.offset)?;
        let left = u64::from(self.area.len).checked_sub(within)?;
        if left == 0 {
            return None;
        }
        // The peer's numbers may be inconsistent, so the sum is checked.
        Some((self.area.addr.checked_add(within)?, left))
    }
}

/// The private data of a request and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The number of messages that the sender of this private data can receive.
    pub(super) credits: u16,
    /// The number of mappings that the sender has room for.
    pub(super) mappings: u32,
    /// Where the list of free memory is in the sender's memory. The receiver of this private data announces its own free memory by
    /// writing entries into this list. `len` is the number of entries.
    pub(super) list: Area,
    /// The sender's memory for the first bytes of the stream.
    pub(super) data: Area,
}

/// Why the private data of a peer is not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnsupportedPeer {
    /// The private data is shorter than that of an rsocket.
    Short,
    /// Another version.
    Version(u8),
    /// A big-endian host.
    BigEndian,
    /// A list without entries, or with too many.
    List(u32),
}

impl std::fmt::Display for UnsupportedPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Short => {
                f.write_str("the peer is not an rsocket: its private data has less than 40 bytes")
            }
            Self::Version(v) => write!(f, "the peer is an rsocket of version {v}, not 1"),
            Self::BigEndian => f.write_str("the peer is a big-endian rsocket"),
            Self::List(n) => write!(f, "the peer's list of free memory has {n} entries"),
        }
    }
}

impl Hello {
    pub(super) fn emit(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        let area = |a: &Area| -> [u8; AREA] {
            let mut out = [0; AREA];
            fill(
                &mut out,
                &[
                    &a.addr.to_be_bytes(),
                    &a.key.to_be_bytes(),
                    &a.len.to_be_bytes(),
                ],
            );
            out
        };
        fill(
            &mut out,
            &[
                &[VERSION, FLAG_MAPPINGS],
                &self.credits.to_be_bytes(),
                &[0, 0, 0, scale(self.mappings)],
                &area(&self.list),
                &area(&self.data),
            ],
        );
        out
    }

    // All checks of a peer's private data are here. Fields that are not checked may have any value.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, UnsupportedPeer> {
        let bytes: &[u8; HELLO] = bytes.first_chunk().ok_or(UnsupportedPeer::Short)?;
        let mut at = Reader(bytes);
        let [version, flags] = at.take();
        if version != VERSION {
            return Err(UnsupportedPeer::Version(version));
        }
        if flags & FLAG_BIG_ENDIAN != 0 {
            return Err(UnsupportedPeer::BigEndian);
        }
        let credits = u16::from_be_bytes(at.take());
        let [_, _, _, scaled] = at.take();
        let mut area = || Area {
            addr: u64::from_be_bytes(at.take()),
            key: u32::from_be_bytes(at.take()),
            len: u32::from_be_bytes(at.take()),
        };
        let (list, data) = (area(), area());
        if list.len == 0 || list.len > 1 << 16 {
            return Err(UnsupportedPeer::List(list.len));
        }
        let mappings = if flags & FLAG_MAPPINGS != 0 {
            unscale(scaled)
        } else {
            0
        };
        Ok(Self {
            credits,
            mappings,
            list,
            data,
        })
    }
}

/// Encodes a number of mappings in eight bits: up to 128 unchanged, above in units of 256.
pub(super) fn scale(n: u32) -> u8 {
    let scaled = if n <= 128 { n } else { 128 | (n >> 8).min(127) };
    u8::try_from(scaled).unwrap_or(u8::MAX)
}

/// Decodes a number of mappings that [`scale`] has encoded.
pub(super) fn unscale(n: u8) -> u32 {
    if n <= 128 {
        n.into()
    } else {
        u32::from(n & 127) << 8
    }
}

/// A message: three bits for the kind and 29 for the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// The number of bytes of the stream that the RDMA Write before this message has written.
    Data(u32),
    /// The number of the first message that must not be sent yet. An RDMA Write before this message may have filled an entry of the list
    /// of free memory.
    Credits(u16),
    /// An entry of the table of mappings was written before this message.
    Mapped,
    /// The sender closes the socket.
    Disconnect,
    /// The sender shuts down its sending direction.
    Shutdown,
    /// Has no content. It shows that the connection is alive.
    KeepAlive,
    /// A kind, or a value of the control kind, that must not be sent. Receiving it ends the connection.
    Unknown,
}

const KIND_DATA: u32 = 0;
const KIND_CREDITS: u32 = 4;
const KIND_MAPPED: u32 = 6;
const KIND_CONTROL: u32 = 7;
/// The largest value of a message.
const VALUE: u32 = (1 << 29) - 1;

impl Message {
    pub(super) fn emit(self) -> [u8; MESSAGE] {
        let (kind, value) = match self {
            Self::Data(n) => (KIND_DATA, n & VALUE),
            Self::Credits(n) => (KIND_CREDITS, n.into()),
            Self::Mapped => (KIND_MAPPED, 0),
            Self::Disconnect => (KIND_CONTROL, 0),
            Self::KeepAlive => (KIND_CONTROL, 1),
            Self::Shutdown => (KIND_CONTROL, 2),
            Self::Unknown => (KIND_CONTROL, VALUE),
        };
        (kind << 29 | value).to_le_bytes()
    }

    pub(super) fn parse(bytes: [u8; MESSAGE]) -> Self {
        let word = u32::from_le_bytes(bytes);
        let value = word & VALUE;
        match (word >> 29, value) {
            (KIND_DATA, n) => Self::Data(n),
            (KIND_CREDITS, n) => Self::Credits(n as u16),
            (KIND_MAPPED, _) => Self::Mapped,
            (KIND_CONTROL, 0) => Self::Disconnect,
            (KIND_CONTROL, 1) => Self::KeepAlive,
            (KIND_CONTROL, 2) => Self::Shutdown,
            _ => Self::Unknown,
        }
    }
}

// ---------------------------------------------------------------------- datagrams

/// The length in bytes of the header of each datagram: version, family, and the sender's port.
pub(super) const DATAGRAM_HEADER: usize = 4;

/// Returns the header of a datagram.
pub(super) fn datagram_header(ipv6: bool, port: u16) -> [u8; DATAGRAM_HEADER] {
    let [high, low] = port.to_be_bytes();
    [VERSION, if ipv6 { 6 } else { 4 }, high, low]
}

/// Returns the sender's port in the header of a datagram, or `None` if the header is not valid.
pub(super) fn datagram_port(header: [u8; DATAGRAM_HEADER]) -> Option<u16> {
    let [version, family, high, low] = header;
    (version == VERSION && matches!(family, 4 | 6)).then(|| u16::from_be_bytes([high, low]))
}

// ---------------------------------------------------------------------- bytes

/// Writes parts to `out`, one after the other.
fn fill(out: &mut [u8], parts: &[&[u8]]) {
    let bytes = parts.iter().flat_map(|part| part.iter());
    for (place, byte) in out.iter_mut().zip(bytes) {
        *place = *byte;
    }
}

/// Reads fields from a header that is long enough.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk::<N>() else {
            return [0; N];
        };
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            credits: 384,
            mappings: 5,
            list: Area {
                addr: 0x1122_3344_5566_7788,
                key: 0x99aa_bbcc,
                len: 2,
            },
            data: Area {
                addr: 0x0102_0304_0506_0708,
                key: 0x1357_9bdf,
                len: 65_536,
            },
        }
    }

    #[test]
    fn the_private_data_has_the_layout_of_librdmacm() {
        let bytes = hello().emit();
        assert_eq!(bytes[..8], [1, 2, 1, 0x80, 0, 0, 0, 5]);
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788_u64.to_be_bytes());
        assert_eq!(bytes[16..20], 0x99aa_bbcc_u32.to_be_bytes());
        assert_eq!(bytes[20..24], 2_u32.to_be_bytes());
        assert_eq!(bytes[36..40], 65_536_u32.to_be_bytes());
        assert_eq!(Hello::parse(&bytes), Ok(hello()));
        // Bytes after the private data are ignored, because the connection manager of InfiniBand adds padding.
        assert_eq!(Hello::parse(&[&bytes[..], &[0; 16]].concat()), Ok(hello()));
    }

    #[test]
    fn invalid_private_data_is_refused() {
        let good = hello().emit();
        for n in 0..HELLO {
            assert_eq!(Hello::parse(&good[..n]), Err(UnsupportedPeer::Short));
        }
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Hello::parse(&bytes)
        };
        assert_eq!(with(0, 2), Err(UnsupportedPeer::Version(2)));
        assert_eq!(with(1, 3), Err(UnsupportedPeer::BigEndian));
        assert_eq!(with(23, 0), Err(UnsupportedPeer::List(0)));
        assert_eq!(with(20, 1), Err(UnsupportedPeer::List((1 << 24) + 2)));
        // Without the flag there is no table of mappings.
        assert_eq!(with(1, 0).unwrap().mappings, 0);
    }

    #[test]
    fn messages_are_three_bits_and_a_value() {
        assert_eq!(Message::Data(5).emit(), 5_u32.to_le_bytes());
        assert_eq!(Message::Credits(7).emit(), (4 << 29 | 7_u32).to_le_bytes());
        assert_eq!(Message::Disconnect.emit(), (7_u32 << 29).to_le_bytes());
        for m in [
            Message::Data(0),
            Message::Data(VALUE),
            Message::Credits(u16::MAX),
            Message::Mapped,
            Message::Disconnect,
            Message::Shutdown,
            Message::KeepAlive,
            Message::Unknown,
        ] {
            assert_eq!(Message::parse(m.emit()), m);
        }
        for kind in [1_u32, 2, 3, 5] {
            let word = kind << 29 | 1;
            assert_eq!(Message::parse(word.to_le_bytes()), Message::Unknown);
        }
    }

    #[test]
    fn an_offset_is_found_in_its_mapping_and_nowhere_else() {
        let mapping = Mapping {
            offset: 100,
            area: Area {
                addr: 0x1000,
                key: 1,
                len: 10,
            },
        };
        assert_eq!(Mapping::parse(&mapping.emit()), mapping);
        assert_eq!(mapping.find(99), None);
        assert_eq!(mapping.find(100), Some((0x1000, 10)));
        assert_eq!(mapping.find(109), Some((0x1009, 1)));
        assert_eq!(mapping.find(110), None);
        let mut wraps = mapping;
        wraps.area.addr = u64::MAX - 4;
        assert_eq!(wraps.find(109), None);
    }

    #[test]
    fn the_number_of_mappings_survives_its_eight_bit_encoding() {
        for n in 0..=128 {
            assert_eq!(unscale(scale(n)), n);
        }
        assert_eq!(unscale(scale(256)), 256);
        assert_eq!(unscale(scale(1000)), 768);
        assert_eq!(unscale(scale(u32::MAX)), 127 << 8);
    }

    #[test]
    fn a_datagram_names_its_port() {
        assert_eq!(datagram_port(datagram_header(false, 7174)), Some(7174));
        assert_eq!(datagram_port(datagram_header(true, 1)), Some(1));
        assert_eq!(datagram_port([2, 4, 0, 1]), None);
        assert_eq!(datagram_port([1, 5, 0, 1]), None);
    }
}
