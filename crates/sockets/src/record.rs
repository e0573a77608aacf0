//! The format in which the program's calls and the thread for reliable datagrams exchange datagrams, over a pair of local sockets.
//!
//! ```text
//!  kind (1) | flags (1) | control length (2) | payload length (4) | address length (4) | address (28)
//!  control messages | payload
//! ```
//!
//! Numbers have the byte order of the host, and lengths are in bytes. The address is the destination of a datagram from the
//! program, and the source of a datagram to the program.

use std::net::IpAddr;

/// The length of the header in bytes.
pub const HEAD: usize = 40;
/// The length of the longest address: a `sockaddr_in6`.
pub const ADDRESS: usize = 28;

/// Kinds of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A datagram.
    Datagram = 0,
    /// Only wakes the program: the socket has an error.
    Error = 1,
    /// The program passes the socket on: the thread must not use it any more.
    Release = 2,
}

/// A record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its kind.
    pub kind: Kind,
    /// The datagram was a message, not a plain datagram.
    pub is_message: bool,
    /// The bytes of a socket address.
    pub name: &'a [u8],
    /// Control messages in the format of cmsg(3). From the program: the local address to send from, 4 or 16 bytes, or nothing.
    pub control: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Returns a record without address, control messages and payload.
    pub const fn empty(kind: Kind) -> Self {
        Self {
            kind,
            is_message: false,
            name: &[],
            control: &[],
            payload: &[],
        }
    }

    /// Returns the header of a record with `length` bytes of payload.
    pub fn head(&self, length: usize) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let control = u16::try_from(self.control.len()).unwrap_or(0);
        let number = u32::try_from(length).unwrap_or(0);
        let fields: [&[u8]; 5] = [
            &[self.kind as u8, u8::from(self.is_message)],
            &control.to_ne_bytes(),
            &number.to_ne_bytes(),
            &u32::try_from(self.name.len()).unwrap_or(0).to_ne_bytes(),
            self.name,
        ];
        for (place, byte) in head.iter_mut().zip(fields.into_iter().flatten()) {
            *place = *byte;
        }
        head
    }

    /// Returns the whole record: header, control messages and payload.
    pub fn emit(&self) -> Vec<u8> {
        let head = self.head(self.payload.len());
        [&head[..], self.control, self.payload].concat()
    }

    /// Parses a record.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let [
            kind,
            flags,
            c0,
            c1,
            n0,
            n1,
            n2,
            n3,
            l0,
            l1,
            l2,
            l3,
            address @ ..,
        ] = head;
        let kind = match kind {
            0 => Kind::Datagram,
            1 => Kind::Error,
            2 => Kind::Release,
            _ => return None,
        };
        let name = address.get(..u32::from_ne_bytes([*l0, *l1, *l2, *l3]) as usize)?;
        let number = u32::from_ne_bytes([*n0, *n1, *n2, *n3]);
        let (control, payload) =
            rest.split_at_checked(usize::from(u16::from_ne_bytes([*c0, *c1])))?;
        (payload.len() == number as usize).then_some(Self {
            kind,
            is_message: *flags & 1 != 0,
            name,
            control,
            payload,
        })
    }

    /// Returns the payload length in the header of a datagram's record. The rest of the record may be missing. `None`: the
    /// record has another kind, or its header is incomplete.
    pub fn length(head: &[u8]) -> Option<usize> {
        let number: [u8; 4] = head.get(4..8)?.try_into().ok()?;
        (head.first() == Some(&0)).then_some(u32::from_ne_bytes(number) as usize)
    }
}

/// Returns the bytes of an address to send from, as they are in a record.
pub fn source(ip: IpAddr) -> ([u8; 16], usize) {
    let mut all = [0; 16];
    let octets: &[u8] = match &ip.to_canonical() {
        IpAddr::V4(ip) => &ip.octets(),
        IpAddr::V6(ip) => &ip.octets(),
    };
    for (place, byte) in all.iter_mut().zip(octets) {
        *place = *byte;
    }
    (all, octets.len())
}

/// Parses the bytes of [`source`].
pub fn parse_source(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

/// An iterator over the control messages of a datagram, which are in the format of cmsg(3).
#[derive(Debug, Clone)]
pub struct Controls<'a>(pub &'a [u8]);

/// A control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Control<'a> {
    /// Its level.
    pub level: i32,
    /// Its type.
    pub kind: i32,
    /// The data.
    pub data: &'a [u8],
    /// All its bytes, with header and padding.
    pub all: &'a [u8],
}

impl<'a> Iterator for Controls<'a> {
    type Item = Control<'a>;

    fn next(&mut self) -> Option<Control<'a>> {
        const HEAD: usize = size_of::<libc::cmsghdr>();
        let (length, rest) = self.0.split_first_chunk::<8>()?;
        let length = usize::from_ne_bytes(*length);
        let (level, rest) = rest.split_first_chunk::<4>()?;
        let (kind, _) = rest.split_first_chunk::<4>()?;
        let data = self.0.get(HEAD..length)?;
        let all = length.next_multiple_of(8).min(self.0.len());
        let (all, rest) = self.0.split_at(all);
        self.0 = rest;
        Some(Control {
            level: i32::from_ne_bytes(*level),
            kind: i32::from_ne_bytes(*kind),
            data,
            all,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back() {
        for payload in [&b""[..], b"hello", &[7; 65_507]] {
            let record = Record {
                is_message: true,
                name: &[1; ADDRESS],
                control: &[2; 24],
                payload,
                ..Record::empty(Kind::Datagram)
            };
            let bytes = record.emit();
            assert_eq!(Record::parse(&bytes), Some(record));
            assert_eq!(Record::length(&bytes), Some(payload.len()));
            for cut in [0, HEAD - 1, HEAD + 23, bytes.len() - 1] {
                assert_eq!(Record::parse(&bytes[..cut.min(bytes.len() - 1)]), None);
            }
        }
        let error = Record::empty(Kind::Error);
        assert_eq!(Record::parse(&error.emit()), Some(error));
        assert_eq!(Record::length(&error.emit()), None);
        assert_eq!(Record::parse(&[9; 100]), None);
    }

    #[test]
    fn sources_are_read_back() {
        for ip in ["10.1.2.3", "fd00::7"] {
            let ip: IpAddr = ip.parse().unwrap();
            let (bytes, n) = source(ip);
            assert_eq!(parse_source(&bytes[..n]), Some(ip));
        }
        assert_eq!(parse_source(&[]), None);
    }

    #[test]
    fn control_messages_end_with_the_bytes() {
        let mut bytes = Vec::new();
        for (kind, data) in [(8i32, &[1u8; 12][..]), (2, &[2; 4])] {
            bytes.extend_from_slice(&(16 + data.len()).to_ne_bytes());
            bytes.extend_from_slice(&0i32.to_ne_bytes());
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let found = |cut: usize| Controls(&bytes[..cut]).map(|c| c.kind).collect::<Vec<_>>();
        assert_eq!(found(bytes.len()), [8, 2]);
        assert_eq!(
            Controls(&bytes).map(|c| c.all.len()).sum::<usize>(),
            bytes.len()
        );
        assert_eq!(found(31), [8]);
        assert_eq!(found(20), [0i32; 0]);
    }
}
