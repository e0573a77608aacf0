//! CRC32C, the checksum of FPDUs and of datagrams (RFC 5044 §4.4).

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi};

/// A CRC32C computed over any number of pieces.
///
/// It has four bytes of state and does not allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    state: u32,
}

impl Crc32c {
    /// The checksum of no bytes.
    pub const fn new() -> Self {
        Self { state: u32::MAX }
    }

    /// The checksum of one piece, as the four bytes on the wire. Cheaper than [`Self::update`] with one piece.
    #[inline]
    pub fn of(bytes: &[u8]) -> [u8; 4] {
        let value = if bytes.len() < SHORT || !folds() {
            crc32c::crc32c(bytes)
        } else {
            crc32_iscsi(bytes)
        };
        Self { state: !value }.finish()
    }

    /// Adds bytes.
    ///
    /// Long pieces are folded by carry-less multiplication. Short pieces use the CRC instruction, because setting up the
    /// multiplication costs more than the checksum of a header. On a processor without the multiplication, long pieces use
    /// the CRC instruction too, because folding in software is ten times slower.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        if bytes.len() < SHORT || !folds() {
            self.state = !crc32c::crc32c_append(!self.state, bytes);
            return;
        }
        if self.state == u32::MAX {
            // The usual case of a single piece. A `Digest` would contain some hundred bytes of tables.
            self.state = !crc32_iscsi(bytes);
            return;
        }
        let mut digest =
            Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(self.state));
        digest.update(bytes);
        self.state = digest.get_state() as u32;
    }

    /// The checksum as a number, as error messages print it.
    pub const fn value(self) -> u32 {
        self.state ^ u32::MAX
    }

    /// The checksum as the four bytes that go on the wire.
    // RFC 5044 §4.4 [mpa-crc-order]: unlike all other numbers, the CRC has its least significant byte first.
    pub const fn finish(self) -> [u8; 4] {
        self.value().to_le_bytes()
    }
}

/// The length in bytes from which on folding is faster than the CRC instruction.
const SHORT: usize = 64;

/// Whether this processor has instructions that `crc_fast` folds with.
#[inline]
fn folds() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(not(target_arch = "x86_64"))]
    return true;
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of RFC 5044 / iSCSI vectors.
    fn vectors() -> [(Vec<u8>, u32, [u8; 4]); 5] {
        [
            (b"123456789".to_vec(), 0xe306_9283, [0x83, 0x92, 0x06, 0xe3]),
            (vec![0; 32], 0x8a91_36aa, [0xaa, 0x36, 0x91, 0x8a]),
            (vec![0xff; 32], 0x62a8_ab43, [0x43, 0xab, 0xa8, 0x62]),
            ((0..32).collect(), 0x46dd_794e, [0x4e, 0x79, 0xdd, 0x46]),
            (Vec::new(), 0, [0; 4]),
        ]
    }

    #[test]
    fn known_answers() {
        for (bytes, value, wire) in vectors() {
            let mut crc = Crc32c::new();
            crc.update(&bytes);
            assert_eq!(crc.value(), value);
            assert_eq!(crc.finish(), wire);
            assert_eq!(Crc32c::of(&bytes), wire);
        }
    }

    #[test]
    fn pieces_give_the_same_checksum() {
        let bytes: Vec<u8> = (0..700u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let whole = Crc32c::of(&bytes);
        for split in 0..bytes.len() {
            let (a, b) = bytes.split_at(split);
            let mut crc = Crc32c::new();
            crc.update(a);
            crc.update(b);
            assert_eq!(crc.finish(), whole, "split at {split}");
        }
    }

    #[test]
    fn any_length_agrees_with_the_definition() {
        // Bit by bit from the polynomial: slow, but obviously correct.
        fn slow(bytes: &[u8]) -> u32 {
            let mut crc = u32::MAX;
            for byte in bytes {
                crc ^= u32::from(*byte);
                for _ in 0..8 {
                    crc = if crc & 1 == 1 {
                        crc >> 1 ^ 0x82f6_3b78
                    } else {
                        crc >> 1
                    };
                }
            }
            !crc
        }
        let bytes: Vec<u8> = (0..600u32).map(|i| (i * 31 + 5) as u8).collect();
        for len in 0..bytes.len() {
            assert_eq!(
                Crc32c::of(&bytes[..len]),
                slow(&bytes[..len]).to_le_bytes(),
                "length {len}"
            );
        }
    }
}
