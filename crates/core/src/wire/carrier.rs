//! Messages by which two UDP ports of one host agree on shared memory that carries their datagrams.
//!
//! A port that does not know them drops them, because of their first byte.
//!
//! ```text
//!  0    1    2        4        8        12               20    24
//! +----+----+--------+--------+--------+----------------+-----+
//! |0xDF|1 kd|  zero  |  pid   |   fd   |     proof      | CRC |
//! +----+----+--------+--------+--------+----------------+-----+
//!       kd: 1 offer, which has no proof; 2 take, which has no pid and fd; 3 wake, which has none of the three
//! ```

use super::dgram::{DgramError, checked, seal};
use super::{take32, take64};

const MAGIC: u8 = 0xdf;
const VERSION: u8 = 1;
/// Bytes of a message without its CRC.
const LEN: usize = 20;
const OFFER: u8 = 1;
const TAKE: u8 = 2;
const WAKE: u8 = 3;

/// A message between two UDP ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Offers the memory of a descriptor of the sender's process.
    Offer {
        /// The process.
        pid: u32,
        /// The descriptor in that process.
        fd: u32,
    },
    /// The sender has mapped the memory, and receives from it.
    Take {
        /// A word of the memory, which only a process that has mapped the memory can know.
        proof: u64,
    },
    /// The receiver sleeps, and there is something for it in the memory.
    Wake,
}

impl Message {
    /// Whether this datagram is such a message. Only the first byte is checked.
    #[inline]
    #[must_use]
    pub fn is(bytes: &[u8]) -> bool {
        bytes.first() == Some(&MAGIC)
    }

    /// Parses a message.
    ///
    /// # Errors
    /// The first rule that the message breaks. The caller drops the message.
    pub fn parse(bytes: &[u8]) -> Result<Self, DgramError> {
        let bytes = checked(bytes)?;
        let Some((head, [])) = bytes.split_first_chunk::<LEN>() else {
            return Err(DgramError::TooShort);
        };
        let [magic, version, ..] = *head;
        if magic != MAGIC {
            return Err(DgramError::Magic);
        }
        if version >> 4 != VERSION {
            return Err(DgramError::Version);
        }
        match version & 0x0f {
            OFFER => Ok(Self::Offer {
                pid: take32::<4, LEN>(head),
                fd: take32::<8, LEN>(head),
            }),
            TAKE => Ok(Self::Take {
                proof: take64::<12, LEN>(head),
            }),
            WAKE => Ok(Self::Wake),
            _ => Err(DgramError::CmKind),
        }
    }

    /// The message in wire format, with CRC.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let (kind, pid, fd, proof) = match *self {
            Self::Offer { pid, fd } => (OFFER, pid, fd, 0),
            Self::Take { proof } => (TAKE, 0, 0, proof),
            Self::Wake => (WAKE, 0, 0, 0),
        };
        let mut out = vec![MAGIC, VERSION << 4 | kind, 0, 0];
        out.extend(pid.to_be_bytes());
        out.extend(fd.to_be_bytes());
        out.extend(proof.to_be_bytes());
        seal(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        for message in [
            Message::Offer {
                pid: 0x0102_0304,
                fd: 77,
            },
            Message::Take {
                proof: 0x0102_0304_0506_0708,
            },
            Message::Wake,
        ] {
            let bytes = message.emit();
            assert_eq!(bytes.len(), LEN + 4);
            assert!(Message::is(&bytes));
            assert_eq!(Message::parse(&bytes), Ok(message));
            for len in 0..bytes.len() {
                assert!(Message::parse(&bytes[..len]).is_err());
            }
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 4;
                assert!(Message::parse(&damaged).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn other_versions_kinds_and_lengths_are_refused() {
        let with = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = Message::Wake.emit();
            bytes.truncate(LEN);
            change(&mut bytes);
            seal(&mut bytes);
            Message::parse(&bytes)
        };
        assert_eq!(with(&|_| ()), Ok(Message::Wake));
        assert_eq!(with(&|b| b[0] = 0xdc), Err(DgramError::Magic));
        assert_eq!(with(&|b| b[1] = 0x23), Err(DgramError::Version));
        assert_eq!(with(&|b| b[1] = 0x14), Err(DgramError::CmKind));
        assert_eq!(with(&|b| b.push(0)), Err(DgramError::TooShort));
    }
}
