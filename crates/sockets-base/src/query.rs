//! The query by which a program asks another host whether the socket at a port accepts RDMA, and the answer.
//!
//! ```text
//!  "aSKd" (4) | version 1 | kind | protocol | status | port (2) | 0 (6) | nonce (8)
//! ```
//!
//! The query is sent to the UDP port [`PORT`] at the IP address of the socket that it asks about. An answer is as
//! long as its query, so a responder sends no more bytes than it gets.

use crate::name::Protocol;

/// The UDP port of the directory. It is above the ports that Linux assigns automatically, in a range without registered services.
pub const PORT: u16 = 61_753;
/// The length of a query and of an answer in bytes.
pub const LEN: usize = 24;

const MAGIC: &[u8; 4] = b"aSKd";
const VERSION: u8 = 1;
const QUERY: u8 = 0;
const ANSWER: u8 = 1;

fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 0,
        Protocol::Udp => 1,
        Protocol::Reliable => 2,
    }
}

fn emit(kind: u8, protocol: Protocol, status: u8, port: u16, nonce: u64) -> [u8; LEN] {
    let mut b = [0; LEN];
    let fields: [&[u8]; 5] = [
        MAGIC,
        &[VERSION, kind, number(protocol), status],
        &port.to_be_bytes(),
        &[0; 6],
        &nonce.to_be_bytes(),
    ];
    for (place, byte) in b.iter_mut().zip(fields.into_iter().flatten()) {
        *place = *byte;
    }
    b
}

/// Returns a query about the socket at `port`. `nonce`: bits that others cannot guess.
pub fn query(protocol: Protocol, port: u16, nonce: u64) -> [u8; LEN] {
    emit(QUERY, protocol, 0, port, nonce)
}

/// Parses a query. Returns the protocol, the port and the nonce.
pub fn parse(bytes: &[u8]) -> Option<(Protocol, u16, u64)> {
    let bytes: &[u8; LEN] = bytes.try_into().ok()?;
    let [_, _, _, _, _, _, protocol, _, p0, p1, ..] = *bytes;
    let protocol = match protocol {
        0 => Protocol::Tcp,
        1 => Protocol::Udp,
        2 => Protocol::Reliable,
        _ => return None,
    };
    let port = u16::from_be_bytes([p0, p1]);
    let nonce = u64::from_be_bytes(*bytes.last_chunk()?);
    (port != 0 && query(protocol, port, nonce) == *bytes).then_some((protocol, port, nonce))
}

/// Returns the answer to a query.
pub fn answer(query: (Protocol, u16, u64), yes: bool) -> [u8; LEN] {
    let (protocol, port, nonce) = query;
    emit(ANSWER, protocol, u8::from(yes), port, nonce)
}

/// Parses the answer to `query`: whether the socket accepts RDMA. Returns `None` if `bytes` are not an answer to this query.
pub fn parse_answer(bytes: &[u8], query: &[u8; LEN]) -> Option<bool> {
    let about = parse(query)?;
    [false, true]
        .into_iter()
        .find(|yes| bytes == answer(about, *yes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_belongs_to_its_query_alone() {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Reliable] {
            let about = (protocol, 6379, 0x0102_0304_0506_0708);
            let asked = query(protocol, 6379, about.2);
            assert_eq!(parse(&asked), Some(about));
            for yes in [false, true] {
                let answered = answer(about, yes);
                assert_eq!(parse_answer(&answered, &asked), Some(yes));
                assert_eq!(parse(&answered), None, "an answer is not a query");
                let others = [query(protocol, 6379, 9), query(protocol, 80, about.2)];
                for other in others {
                    assert_eq!(parse_answer(&answered, &other), None);
                }
                for at in 0..LEN {
                    for bit in 0..8 {
                        let mut wrong = answered;
                        wrong[at] ^= 1 << bit;
                        let expected = (at == 7 && bit == 0).then_some(!yes);
                        assert_eq!(
                            parse_answer(&wrong, &asked),
                            expected,
                            "byte {at} bit {bit}"
                        );
                    }
                }
            }
            assert_eq!(parse_answer(&asked, &asked), None);
        }
        assert_eq!(parse(&query(Protocol::Tcp, 0, 1)), None);
        for cut in 0..LEN {
            assert_eq!(parse(&query(Protocol::Tcp, 80, 1)[..cut]), None);
        }
    }

    #[test]
    fn the_bytes_of_a_query() {
        let bytes = query(Protocol::Reliable, 0x1234, 0x0102_0304_0506_0708);
        assert_eq!(
            bytes,
            *b"aSKd\x01\x00\x02\x00\x12\x34\0\0\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08"
        );
    }
}
