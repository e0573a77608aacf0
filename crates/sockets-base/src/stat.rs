//! The table of sockets that a process keeps in memory of its own for `anywarp sockets stat`.
//!
//! It is a memfd with the name [`NAME`]: who may read the process's descriptors may read it, also when the process is
//! stopped. A header, then a record for each number of a descriptor below [`RECORDS`], all in the byte order of the machine.
//!
//! ```text
//!  header: "aSKstat1" (8) | process (4) | 0 (4) | upgraded (8) | stayed plain (8)
//!  record: state (4) | why (4) | window (4) | memory (4) | bytes read (8) | bytes written (8)
//! ```

/// What the memfd is called.
pub const NAME: &str = "anywarp-sockets";
/// The first bytes, with the version of the layout.
pub const MAGIC: [u8; 8] = *b"aSKstat1";
/// Bytes of the header, and of a record.
pub const RECORD: usize = 32;
/// Numbers of descriptors that have a record. Those above are counted and not shown.
pub const RECORDS: usize = 16_384;
/// Bytes in all.
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
            /// The one with this number.
            pub fn of(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// What it is called.
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

states! {
    /// What is known of a descriptor.
    State {
        /// Nothing.
        Unknown = 0 "unknown",
        /// A listener whose connections are looked at.
        Listener = 1 "listener",
        /// A connection that is not decided about.
        Undecided = 2 "undecided",
        /// An iWARP stream.
        Upgraded = 3 "upgraded",
        /// A connection that is the kernel's.
        Plain = 4 "plain",
        /// A UDP socket whose datagrams may be Sends.
        Datagram = 5 "datagram",
        /// A UDP socket whose datagrams may be Write-Records.
        Record = 6 "record",
    }
}

states! {
    /// Why a connection is plain.
    Why {
        /// It was not looked at.
        NotSeen = 0 "not looked at",
        /// A rule says tcp or off.
        Rule = 1 "a rule says so",
        /// The listener is not in the directory.
        NotListed = 2 "the listener is not known to understand it",
        /// The first bytes of the peer are not a Request.
        NoRequest = 3 "the peer sent no Request",
        /// The program wrote before anything came.
        WroteFirst = 4 "the program wrote before a Request came",
        /// An option of the socket.
        Option = 5 "an option of the socket",
        /// The C library reads and writes it by itself.
        Stdio = 6 "fdopen",
        /// TCP did not connect.
        NotConnected = 7 "TCP did not connect",
        /// A socket that connects to itself.
        Itself = 8 "it connects to itself",
        /// It was handed to another program before it was used.
        Handed = 9 "it was handed to another program",
        /// The peer handed it to another program before it was used.
        Refused = 10 "the peer handed it to another program",
    }
}

/// A record as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// What it is.
    pub state: State,
    /// Why it is plain.
    pub why: Why,
    /// Payload bytes that the peer may have under way.
    pub window: u32,
    /// Bytes of memory.
    pub memory: u32,
    /// Payload bytes that the program has read.
    pub bytes_in: u64,
    /// Payload bytes that the program has written.
    pub bytes_out: u64,
}

/// A table as it was read.
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
    /// `None`: it is none, or of another layout.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        (bytes.starts_with(&MAGIC) && bytes.len() >= SIZE).then_some(Self { bytes })
    }

    /// The process whose it is.
    pub fn process(&self) -> u32 {
        u32_at(self.bytes, 8).unwrap_or(0)
    }

    /// Connections that were upgraded, and that were looked at and stayed plain.
    pub fn totals(&self) -> (u64, u64) {
        let at = |n| u64_at(self.bytes, n).unwrap_or(0);
        (at(16), at(24))
    }

    /// What is known of a descriptor.
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
