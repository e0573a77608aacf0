//! The datagram-iWARP messages that carry the program's datagrams: one message per datagram.
//!
//! A Send goes to queue pair 0 of the port, with the Q_Key [`KEY`]. A Write-Record starts at offset 0 of the STag [`STAG`], which
//! stands for the buffer that the program reads the datagram into. A datagram whose headers or CRC do not match was sent plain and
//! is delivered unchanged.

use anywarp_core::llp::mpa::crc::Crc32c;
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::dgram::{self, Shim, shim_bytes};
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Msn, QN_SEND, Stag, To};

/// The Q_Key of sockets: "aSKu".
pub const KEY: u32 = u32::from_be_bytes(*b"aSKu");
/// The STag that stands for the buffer that a program reads a datagram into.
pub const STAG: Stag = Stag(KEY);
/// The most bytes before the payload.
pub const HEAD: usize = Shim::LEN + Untagged::LEN;
/// Bytes after the payload.
pub const TAIL: usize = dgram::CRC;
/// The longest payload of UDP over IPv4, in bytes.
const UDP_MOST: usize = 65_507;
/// The longest payload of a message, in bytes. With its headers it fills the longest datagram.
pub const LONGEST: usize = UDP_MOST - HEAD - TAIL;

/// Kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Send.
    Send,
    /// Write-Record.
    Record,
    /// A Send over reliable datagrams, or an unreliable Send where that is not possible.
    Reliable,
}

/// Writes the header of a message of `length` payload bytes, and returns the length of the header. `epoch`: the number of the
/// sending socket. The number 0 is not valid in a header and is sent as 1. `id`: the number of the message.
pub fn head(kind: Kind, epoch: u16, id: u32, length: usize, out: &mut [u8; HEAD]) -> usize {
    let shim = Shim {
        epoch: epoch.max(1),
        qkey: KEY,
        id,
        length: u32::try_from(length).unwrap_or(u32::MAX),
        offset: 0,
        sub_op: match kind {
            Kind::Send | Kind::Reliable => dgram::SUB_PLAIN,
            Kind::Record => dgram::SUB_RECORD,
        },
        attributes: 0,
        dst_index: 0,
        src_index: 0,
        immediate: None,
        commit: false,
        parity: false,
        group: 0,
        segment: 0,
    };
    let (first, rest) = out.split_at_mut(Shim::LEN);
    first.copy_from_slice(&shim_bytes(&shim));
    match kind {
        Kind::Send | Kind::Reliable => {
            let header = Untagged {
                last: true,
                opcode: Opcode::Send,
                inv_stag: Stag(0),
                qn: QN_SEND,
                msn: Msn(id),
                mo: 0,
            };
            rest.copy_from_slice(&header.emit());
            Shim::LEN + Untagged::LEN
        }
        Kind::Record => {
            let header = Tagged {
                last: true,
                opcode: Opcode::WriteRecord,
                stag: STAG,
                to: To(0),
            };
            for (place, byte) in rest.iter_mut().zip(header.emit()) {
                *place = byte;
            }
            Shim::LEN + Tagged::LEN
        }
    }
}

/// Returns the bytes after the payload: the CRC.
pub fn tail<'a>(head: &[u8], payload: impl Iterator<Item = &'a [u8]>) -> [u8; TAIL] {
    let mut crc = Crc32c::new();
    crc.update(head);
    payload.for_each(|part| crc.update(part));
    crc.finish()
}

/// Returns the length of the header if a datagram begins with that of a message.
pub fn begins(bytes: &[u8]) -> Option<usize> {
    let (head, rest) = bytes.split_first_chunk::<{ Shim::LEN }>()?;
    // Version 1 without flags; the Q_Key; offset 0; no attributes, both queue pairs 0, no parity.
    let is_ours = head.starts_with(&[0xdc, 0x10])
        && head.get(4..8) == Some(&KEY.to_be_bytes())
        && head.get(16..20) == Some(&[0; 4])
        && head.get(21..) == Some(&[0; 5]);
    let (header, len) = Header::parse_datagram(rest).ok().filter(|_| is_ours)?;
    let fits = match header {
        Header::Untagged(h) => h.opcode == Opcode::Send && h.inv_stag == Stag(0) && h.last,
        Header::Tagged(h) => {
            h.opcode == Opcode::WriteRecord && h.stag == STAG && h.to == To(0) && h.last
        }
    };
    fits.then_some(Shim::LEN + len)
}

/// Returns the kind and the payload of a message, or `None` if the datagram is not a valid message.
pub fn open(bytes: &[u8]) -> Option<(Kind, &[u8])> {
    begins(bytes)?;
    let datagram = dgram::parse(bytes).ok()?;
    let kind = match datagram.header {
        Header::Untagged(h) if h.msn == Msn(datagram.shim.id) => Kind::Send,
        Header::Untagged(_) => return None,
        Header::Tagged(_) => Kind::Record,
    };
    Some((kind, datagram.payload))
}

/// Returns the payload of a message that the kernel quotes in an error report. The quotation may be cut off at any byte.
pub fn quoted(bytes: &[u8]) -> Option<&[u8]> {
    let rest = bytes.get(begins(bytes)?..)?;
    let length: [u8; 4] = bytes.get(12..16)?.try_into().ok()?;
    let length = u32::from_be_bytes(length) as usize;
    Some(rest.get(..length).unwrap_or(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let mut all = [0; HEAD];
        let length = head(kind, 0x1234, 7, payload.len(), &mut all);
        let mut all = all[..length].to_vec();
        let tail = tail(&all, [payload].into_iter());
        all.extend_from_slice(payload);
        all.extend_from_slice(&tail);
        all
    }

    #[test]
    fn messages_are_decoded() {
        for payload in [&b""[..], b"hello", &[0xdc; 1000], &vec![1; LONGEST]] {
            for kind in [Kind::Send, Kind::Record] {
                let all = message(kind, payload);
                assert!(all.len() <= UDP_MOST);
                assert_eq!(open(&all), Some((kind, payload)));
                // Of a message inside a message only the outer one is unwrapped.
                let twice = message(kind, all.get(..LONGEST.min(all.len())).unwrap());
                assert_eq!(open(&twice).unwrap().1.len(), all.len().min(LONGEST));
            }
        }
    }

    #[test]
    fn quotations_end_with_the_payload() {
        for kind in [Kind::Send, Kind::Record] {
            let all = message(kind, b"hello");
            let head = all.len() - TAIL - 5;
            for cut in 0..=all.len() {
                let expected = (cut >= head).then(|| &b"hello"[..(cut - head).min(5)]);
                assert_eq!(quoted(&all[..cut]), expected, "{kind:?} {cut}");
            }
        }
        assert_eq!(
            quoted(b"another program's datagram, of more than 44 bytes"),
            None
        );
    }

    #[test]
    fn other_datagrams_are_not_decoded() {
        for kind in [Kind::Send, Kind::Record] {
            let right = message(kind, b"hello");
            for at in 0..right.len() {
                for bit in 0..8 {
                    let mut wrong = right.clone();
                    wrong[at] ^= 1 << bit;
                    assert_eq!(open(&wrong), None, "byte {at} bit {bit}");
                    // With a recomputed CRC the changed datagram is a message only if the bit is in the number of the sending
                    // socket, the message number of a Write-Record, a header field that is not checked, or the payload.
                    wrong.truncate(right.len() - TAIL);
                    dgram::seal(&mut wrong);
                    let payload = right.len() - TAIL - 5..;
                    let is_number =
                        (2..4).contains(&at) || (kind == Kind::Record && (8..12).contains(&at));
                    let is_reserved =
                        (at == 26 && 0x3c >> bit & 1 == 1) || (at == 27 && 0x30 >> bit & 1 == 1);
                    let free = is_number || is_reserved || payload.contains(&at);
                    assert_eq!(open(&wrong).is_some(), free, "{kind:?} byte {at} bit {bit}");
                }
                assert_eq!(open(&right[..at]), None);
            }
            let longer = [&right[..], &[0]].concat();
            assert_eq!(open(&longer), None);
        }
        assert_eq!(open(&[]), None);
    }
}
