//! The table of sockets that a process keeps in its memory for `anywarp sockets stat`.
//!
//! The table is a memfd with the name [`NAME`]. It can be read, even while the process is stopped, by anyone who may open the
//! process's descriptors. It consists of a header and a record for each descriptor number below [`RECORDS`], in native byte order.
//!
//! ```text
//!  header: "aSKstat1" (8) | process (4) | 0 (4) | upgraded (8) | stayed plain (8)
//!  record: state (4) | why (4) | window (4) | memory (4) | bytes read (8) | bytes written (8)
//! ```

/// The name of the memfd.
pub const NAME: &str = "anywarp-sockets";
/// The first bytes, which include the version of the layout.
pub const MAGIC: [u8; 8] = *b"aSKstat1";
/// The size in bytes of the header and of a record.
pub const RECORD: usize = 32;
/// The number of records. Higher descriptors are counted in the header only.
pub const RECORDS: usize = 16_384;
/// The size of the table in bytes.
pub const SIZE: usize = RECORD * (1 + RECORDS);

macro_rules! states {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$of])* $variant = $number,)*
        }

        impl $name {
            /// Returns the value with this number.
            pub fn of(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Returns the text for users.
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

states! {
    /// The state of a descriptor.
    State {
        /// The record is not in use.
        Unknown = 0 "unknown",
        /// A listener whose connections may be upgraded.
        Listener = 1 "listener",
        /// A connection that may still be upgraded.
        Undecided = 2 "undecided",
        /// An iWARP stream.
        Upgraded = 3 "upgraded",
        /// A connection that was left to the kernel.
        Plain = 4 "plain",
        /// A UDP socket whose datagrams may be sent as Sends.
        Datagram = 5 "datagram",
        /// A UDP socket whose datagrams may be sent as Write-Records.
        Record = 6 "record",
        /// A UDP socket whose datagrams may be sent reliably.
        Reliable = 7 "reliable",
        /// A descriptor of the library, which is not shown.
        Own = 8 "library",
    }
}

states! {
    /// Why a connection is plain.
    Why {
        /// The library did not see the connection being opened.
        NotSeen = 0 "opened without the library",
        /// The mode of the matching rule is `tcp` or `off`.
        Rule = 1 "by a rule",
        /// The listener is not registered in the directory.
        NotListed = 2 "the listener is not known to accept RDMA",
        /// The first bytes from the peer are not a Request.
        NoRequest = 3 "the peer sent no Request",
        /// The program wrote before the peer sent anything.
        WroteFirst = 4 "the program wrote before a Request came",
        /// The program has set a socket option that streams do not support.
        Option = 5 "the program set an unsupported socket option",
        /// The program has called `fdopen`: the C library makes the system calls directly.
        Stdio = 6 "the program called fdopen",
        /// TCP did not connect.
        NotConnected = 7 "TCP did not connect",
        /// The socket is connected to itself.
        Itself = 8 "the socket is connected to itself",
        /// The connection was passed to another program before its first use.
        Handed = 9 "the program passed it to another program",
        /// The peer passed the connection to another program before its first use.
        Refused = 10 "the peer passed it to another program",
        /// The peer wrote, or closed the connection, before the Request was sent.
        PeerWroteFirst = 11 "the peer wrote before the Request was sent",
        /// The program has disconnected the socket, by `connect` with AF_UNSPEC.
        Disconnected = 12 "the program disconnected the socket",
    }
}

/// A record of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The state of the descriptor.
    pub state: State,
    /// Why the connection is plain.
    pub why: Why,
    /// The receive window in payload bytes.
    pub window: u32,
    /// The memory of the stream in bytes.
    pub memory: u32,
    /// Payload bytes that the program has read.
    pub bytes_in: u64,
    /// Payload bytes that the program has written.
    pub bytes_out: u64,
}

/// The bytes of a table.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    bytes: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let b = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let b = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*b))
}

impl<'a> Table<'a> {
    /// Reads bytes as a table. Returns `None` if they are not one of this layout.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        (bytes.starts_with(&MAGIC) && bytes.len() >= SIZE).then_some(Self { bytes })
    }

    /// Returns the id of the process that wrote the table.
    pub fn process(&self) -> u32 {
        u32_at(self.bytes, 8).unwrap_or(0)
    }

    /// Returns the number of upgraded connections, and of those that could have been upgraded but stayed plain.
    pub fn totals(&self) -> (u64, u64) {
        let at = |n| u64_at(self.bytes, n).unwrap_or(0);
        (at(16), at(24))
    }

    /// Returns the record of a descriptor.
    pub fn record(&self, fd: u32) -> Option<Record> {
        let from = RECORD.checked_mul(1 + usize::try_from(fd).ok()?)?;
        let b = self.bytes.get(from..from.checked_add(RECORD)?)?;
        Some(Record {
            state: State::of(u32_at(b, 0)?)?,
            why: Why::of(u32_at(b, 4)?)?,
            window: u32_at(b, 8)?,
            memory: u32_at(b, 12)?,
            bytes_in: u64_at(b, 16)?,
            bytes_out: u64_at(b, 24)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_back_and_others_are_refused() {
        let mut bytes = vec![0; SIZE];
        assert!(Table::new(&bytes).is_none());
        bytes[..8].copy_from_slice(&MAGIC);
        assert!(Table::new(&bytes[..SIZE - 1]).is_none());
        bytes[8..12].copy_from_slice(&7u32.to_ne_bytes());
        bytes[24..32].copy_from_slice(&9u64.to_ne_bytes());
        let at = RECORD * 6;
        bytes[at] = 3u32.to_ne_bytes()[0];
        bytes[at + 8..at + 12].copy_from_slice(&16384u32.to_ne_bytes());
        bytes[at + 16..at + 24].copy_from_slice(&5u64.to_ne_bytes());
        if cfg!(target_endian = "little") {
            let table = Table::new(&bytes).unwrap();
            assert_eq!((table.process(), table.totals()), (7, (0, 9)));
            let record = table.record(5).unwrap();
            assert_eq!((record.state, record.window), (State::Upgraded, 16384));
            assert_eq!((record.bytes_in, record.bytes_out), (5, 0));
            assert_eq!(table.record(4).unwrap().state, State::Unknown);
            assert!(table.record(RECORDS as u32).is_none() && table.record(u32::MAX).is_none());
        }
        bytes[at] = 99;
        assert!(Table::new(&bytes).unwrap().record(5).is_none());
    }
}
