//! MPA startup frames: the Request and the Reply that open a stream (RFC 5044 §7.1, RFC 6581).

use super::{take, take16};
use crate::error::PeerError;

/// A Request or a Reply.
///
/// ```text
///  0                               16       17       18              20
/// +-------------------------------+--------+--------+---------------+--------------
/// | "MPA ID Req Frame" or "…Rep…" |MCRS....|  Rev   |   PD_Length   | private data
/// +-------------------------------+--------+--------+---------------+--------------
///                                  M 0x80   C 0x40   R 0x20   S 0x10   rest reserved, ignored
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartupFrame {
    /// A Reply; otherwise a Request.
    pub reply: bool,
    /// M: the sender of the frame requests markers in the stream that it receives.
    pub markers: bool,
    /// C: the sender of the frame requests CRCs.
    pub crc: bool,
    /// R: the connection is rejected. Valid in a Reply only.
    pub reject: bool,
    /// MPA revision.
    pub rev: u8,
    /// The block that the S bit announces; revision 2 and later.
    pub enhanced: Option<Enhanced>,
    /// Private data of the ULP, without the enhanced block.
    pub private_data: Vec<u8>,
}

/// The enhanced block: the first four bytes of private data if S is set (RFC 6581 §9).
///
/// ```text
///  0       2       4
/// +-------+-------+
/// |AB IRD |CD ORD |      A, C 0x8000   B, D 0x4000   IRD, ORD 0x3fff
/// +-------+-------+
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enhanced {
    /// A: the initiator sends a ready-to-receive message before anything else.
    pub peer_to_peer: bool,
    /// B: that message may be a zero-length Send.
    pub rtr_send: bool,
    /// C: that message may be a zero-length RDMA Write.
    pub rtr_write: bool,
    /// D: that message may be a zero-length RDMA Read.
    pub rtr_read: bool,
    /// Inbound Reads that the sender of this frame serves concurrently; 14 bits.
    pub ird: u16,
    /// Outbound Reads that the sender of this frame will have outstanding; 14 bits.
    pub ord: u16,
}

impl Enhanced {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads the block.
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        let (ird, ord) = (take16::<0, { Self::LEN }>(b), take16::<2, { Self::LEN }>(b));
        Self {
            peer_to_peer: ird & HIGH != 0,
            rtr_send: ird & LOW != 0,
            rtr_write: ord & HIGH != 0,
            rtr_read: ord & LOW != 0,
            ird: ird & DEPTH_MASK,
            ord: ord & DEPTH_MASK,
        }
    }

    /// The block in wire format. Depths are cut to 14 bits.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let word = |high: bool, low: bool, depth: u16| {
            (if high { HIGH } else { 0 } | if low { LOW } else { 0 } | depth & DEPTH_MASK)
                .to_be_bytes()
        };
        let [i0, i1] = word(self.peer_to_peer, self.rtr_send, self.ird);
        let [o0, o1] = word(self.rtr_write, self.rtr_read, self.ord);
        [i0, i1, o0, o1]
    }
}

impl StartupFrame {
    /// Bytes before the private data.
    pub const HEAD: usize = 20;

    /// The longest frame.
    pub const MAX_LEN: usize = Self::HEAD + MAX_PRIVATE_DATA;

    /// Parses the frame at the start of `bytes`, and returns it with its length. `None`: more bytes are needed.
    ///
    /// # Errors
    /// The bytes cannot be the start of a valid frame.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, PeerError> {
        // RFC 5044 §7.1 [mpa-key]: bytes that begin with neither key are not MPA. The bytes that have arrived are
        // compared immediately, so a connection of another protocol is rejected immediately.
        let is_prefix = |key: &[u8; 16]| bytes.iter().zip(key).all(|(got, key)| got == key);
        if !is_prefix(KEY_REQUEST) && !is_prefix(KEY_REPLY) {
            return Err(PeerError::MpaStartup("unknown key"));
        }
        let Some(head) = bytes.first_chunk::<{ Self::HEAD }>() else {
            return Ok(None);
        };
        let [flags, rev] = take::<16, { Self::HEAD }, 2>(head);
        let pd_length = usize::from(take16::<18, { Self::HEAD }>(head));
        // RFC 5044 §7.1 [mpa-pd-length]: private data is at most 512 bytes.
        if pd_length > MAX_PRIVATE_DATA {
            return Err(PeerError::MpaStartup("private data longer than 512 bytes"));
        }
        // RFC 6581 §6 [mpa-s-rev]: the S bit is defined from revision 2 on.
        let has_block = flags & FLAG_S != 0 && rev >= 2;
        // RFC 6581 §6 [mpa-s-length]: if S is set, the private data begins with the four bytes of the enhanced block.
        if has_block && pd_length < Enhanced::LEN {
            return Err(PeerError::MpaStartup(
                "enhanced block announced but missing",
            ));
        }
        let len = Self::HEAD + pd_length;
        let Some(mut private_data) = bytes.get(Self::HEAD..len) else {
            return Ok(None);
        };
        let mut enhanced = None;
        if has_block && let Some((block, rest)) = private_data.split_first_chunk() {
            enhanced = Some(Enhanced::parse(block));
            private_data = rest;
        }
        let frame = Self {
            reply: take::<0, { Self::HEAD }, 16>(head) == *KEY_REPLY,
            markers: flags & FLAG_M != 0,
            crc: flags & FLAG_C != 0,
            reject: flags & FLAG_R != 0,
            rev,
            enhanced,
            private_data: private_data.to_vec(),
        };
        Ok(Some((frame, len)))
    }

    /// The frame in wire format.
    ///
    /// Private data beyond [`StartupFrame::room`] is cut off; the startup machine rejects it before.
    pub fn emit(&self) -> Vec<u8> {
        let mut flags = 0;
        for (set, flag) in [
            (self.markers, FLAG_M),
            (self.crc, FLAG_C),
            (self.reject, FLAG_R),
            (self.enhanced.is_some(), FLAG_S),
        ] {
            if set {
                flags |= flag;
            }
        }
        let block = self.enhanced.as_ref().map(Enhanced::emit);
        let private_data = self
            .private_data
            .iter()
            .take(Self::room(self.enhanced.is_some()))
            .copied();
        let pd_length = block.map_or(0, |b| b.len()) + private_data.len();
        let mut bytes = Vec::with_capacity(Self::HEAD + pd_length);
        bytes.extend(if self.reply { KEY_REPLY } else { KEY_REQUEST });
        bytes.extend([flags, self.rev]);
        bytes.extend(u16::try_from(pd_length).unwrap_or(u16::MAX).to_be_bytes());
        bytes.extend(block.iter().flatten());
        bytes.extend(private_data);
        bytes
    }

    /// Bytes of ULP private data that fit a frame with or without the enhanced block.
    pub const fn room(enhanced: bool) -> usize {
        if enhanced {
            MAX_PRIVATE_DATA - Enhanced::LEN
        } else {
            MAX_PRIVATE_DATA
        }
    }
}

/// Most bytes of private data in a frame, the enhanced block included (RFC 5044 §7.1).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Value of an IRD or ORD field by which the sender leaves the depth to the ULP, instead of negotiating it in MPA.
pub const DEPTH_NOT_NEGOTIATED: u16 = 0x3fff;

/// The largest IRD or ORD that can be negotiated.
pub const MAX_DEPTH: u16 = 0x3ffe;

const KEY_REQUEST: &[u8; 16] = b"MPA ID Req Frame";
const KEY_REPLY: &[u8; 16] = b"MPA ID Rep Frame";
const FLAG_M: u8 = 0x80;
const FLAG_C: u8 = 0x40;
const FLAG_R: u8 = 0x20;
const FLAG_S: u8 = 0x10;
const HIGH: u16 = 0x8000;
const LOW: u16 = 0x4000;
const DEPTH_MASK: u16 = 0x3fff;

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(reply: bool, rev: u8, enhanced: Option<Enhanced>, private: &[u8]) -> StartupFrame {
        StartupFrame {
            reply,
            markers: false,
            crc: true,
            reject: false,
            rev,
            enhanced,
            private_data: private.to_vec(),
        }
    }

    fn raw(key: &[u8], flags: u8, rev: u8, pd_length: u16, private: &[u8]) -> Vec<u8> {
        let mut b = key.to_vec();
        b.extend([flags, rev]);
        b.extend(pd_length.to_be_bytes());
        b.extend(private);
        b
    }

    #[test]
    fn startup_frames_have_these_bytes() {
        let both = Enhanced {
            peer_to_peer: true,
            rtr_send: false,
            rtr_write: true,
            rtr_read: true,
            ird: 16,
            ord: 16,
        };
        let write = Enhanced {
            rtr_read: false,
            ..both
        };
        for (frame, bytes) in [
            (
                frame(false, 1, None, b"hi"),
                raw(KEY_REQUEST, 0x40, 1, 2, b"hi"),
            ),
            (
                frame(false, 2, Some(both), b""),
                raw(KEY_REQUEST, 0x50, 2, 4, &[0x80, 0x10, 0xc0, 0x10]),
            ),
            (
                frame(true, 2, Some(write), b""),
                raw(KEY_REPLY, 0x50, 2, 4, &[0x80, 0x10, 0x80, 0x10]),
            ),
        ] {
            assert_eq!(frame.emit(), bytes);
            let len = bytes.len();
            assert_eq!(StartupFrame::parse(&bytes), Ok(Some((frame.clone(), len))));
            // Bytes after a frame do not belong to it, and no prefix of it is a complete frame.
            let mut more = bytes.clone();
            more.extend([0, 23, 0x41]);
            assert_eq!(StartupFrame::parse(&more), Ok(Some((frame, len))));
            for short in 0..len {
                assert_eq!(
                    StartupFrame::parse(&bytes[..short]),
                    Ok(None),
                    "{short} bytes"
                );
            }
        }
    }

    #[test]
    fn every_flag_and_field_survives_the_wire() {
        for bits in 0..=255u8 {
            let bit = |n: u8| bits & 1 << n != 0;
            let enhanced = bit(0).then(|| Enhanced {
                peer_to_peer: bit(1),
                rtr_send: bit(2),
                rtr_write: bit(3),
                rtr_read: bit(4),
                ird: 0x3fff,
                ord: 0x1234,
            });
            let f = StartupFrame {
                reply: bit(5),
                markers: bit(6),
                crc: bit(7),
                reject: bit(3),
                rev: 2,
                enhanced,
                private_data: vec![bits; usize::from(bits) * 2 % 508],
            };
            let bytes = f.emit();
            assert_eq!(StartupFrame::parse(&bytes), Ok(Some((f, bytes.len()))));
        }
    }

    #[test]
    fn a_key_is_refused_at_its_first_wrong_byte() {
        let unknown = Err(PeerError::MpaStartup("unknown key"));
        assert_eq!(StartupFrame::parse(b"GET / HTTP/1.1"), unknown);
        for at in 0..16 {
            let mut key = *KEY_REQUEST;
            key[at] ^= 0x80;
            assert_eq!(StartupFrame::parse(&key[..at]), Ok(None));
            assert_eq!(StartupFrame::parse(&key[..=at]), unknown);
        }
    }

    #[test]
    fn private_data_has_at_most_512_bytes() {
        for len in [0u16, 1, 248, 252, 256, 508, 511, 512] {
            let bytes = raw(KEY_REQUEST, 0x40, 1, len, &vec![7; len.into()]);
            let (f, _) = StartupFrame::parse(&bytes).unwrap().unwrap();
            assert_eq!(f.private_data.len(), usize::from(len));
        }
        // The frame is refused from its head alone.
        let bytes = raw(KEY_REQUEST, 0x40, 1, 513, &[]);
        let long = Err(PeerError::MpaStartup("private data longer than 512 bytes"));
        assert_eq!(StartupFrame::parse(&bytes), long);
        assert_eq!(StartupFrame::parse(&bytes[..19]), Ok(None));
        assert_eq!(
            frame(false, 1, None, &[7; 600]).emit().len(),
            StartupFrame::MAX_LEN
        );
        let block = Some(Enhanced::default());
        assert_eq!(
            frame(false, 2, block, &[7; 600]).emit().len(),
            StartupFrame::MAX_LEN
        );
    }

    #[test]
    fn an_enhanced_block_that_is_announced_must_be_there() {
        for len in 0..4 {
            let bytes = raw(KEY_REPLY, 0x50, 2, len, &vec![0; len.into()]);
            let absent = Err(PeerError::MpaStartup(
                "enhanced block announced but missing",
            ));
            assert_eq!(StartupFrame::parse(&bytes), absent);
        }
        assert!(
            StartupFrame::parse(&raw(KEY_REPLY, 0x50, 2, 4, &[0; 4]))
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn the_s_bit_before_revision_2_and_reserved_bits_are_ignored() {
        let (f, _) = StartupFrame::parse(&raw(KEY_REQUEST, 0x5f, 1, 2, b"hi"))
            .unwrap()
            .unwrap();
        assert_eq!(f, frame(false, 1, None, b"hi"));
    }
}
