//! MPA receive side: extracts FPDUs from the byte stream.

use super::crc::Crc32c;
use crate::error::PeerError;

/// Bytes of the length field.
pub const LENGTH: usize = 2;
/// Bytes of the CRC field.
pub const CRC: usize = 4;

/// The sizes of an FPDU, from its first two bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes of the ULPDU.
    pub ulpdu: usize,
    /// Bytes of padding after it.
    pub pad: usize,
}

impl Extent {
    /// Reads the length field, if its two bytes have arrived. All values are accepted: siw sends ULPDUs of up to 65,474
    /// bytes.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let length = bytes.first_chunk::<LENGTH>()?;
        let ulpdu = usize::from(u16::from_be_bytes(*length));
        Some(Self {
            ulpdu,
            pad: (4 - (LENGTH + ulpdu) % 4) % 4,
        })
    }

    /// Bytes of the whole FPDU.
    pub fn total(&self) -> usize {
        LENGTH + self.ulpdu + self.pad + CRC
    }
}

/// Returns the ULPDU of the FPDU at the front of `bytes`, if the FPDU is complete and its CRC is correct.
pub fn deframe(bytes: &[u8], extent: Extent, with_crc: bool) -> Result<Option<&[u8]>, PeerError> {
    let Some(fpdu) = bytes.get(..extent.total()) else {
        return Ok(None);
    };
    let (covered, field) = fpdu.split_at(fpdu.len() - CRC);
    if with_crc {
        let mut crc = Crc32c::new();
        crc.update(covered);
        verify(crc, field)?;
    }
    Ok(covered.get(LENGTH..LENGTH + extent.ulpdu))
}

/// Compares a CRC with the field on the wire.
// RFC 5044 §4.4 [mpa-crc-check]: an FPDU with a wrong CRC is not delivered.
pub fn verify(crc: Crc32c, field: &[u8]) -> Result<(), PeerError> {
    let expected = crc.finish();
    let got = field.first_chunk::<CRC>().copied().unwrap_or([0; CRC]);
    if got == expected {
        Ok(())
    } else {
        Err(PeerError::MpaCrc {
            expected: u32::from_le_bytes(expected),
            got: u32::from_le_bytes(got),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
            .collect()
    }

    #[test]
    fn truncated_frames_are_incomplete_and_flipped_bits_are_detected() {
        let frame = bytes("001741430000000000000000000000010000000068656c6c6f000000b990b10c");
        for n in 2..frame.len() {
            let extent = Extent::of(&frame[..n]).unwrap();
            assert_eq!(deframe(&frame[..n], extent, true), Ok(None));
        }
        let extent = Extent::of(&frame).unwrap();
        assert_eq!(deframe(&frame, extent, true).unwrap().unwrap().len(), 23);
        for bit in 16..frame.len() * 8 {
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(
                deframe(&bad, extent, true),
                Err(PeerError::MpaCrc { .. })
            ));
            assert!(deframe(&bad, extent, false).is_ok());
        }
    }

    // RFC 5044 §4.1 [mpa-pad-ignored]
    #[test]
    fn padding_may_have_any_value() {
        let mut frame = bytes("001741430000000000000000000000010000000068656c6c6f000000b990b10c");
        frame[25..28].copy_from_slice(&[1, 2, 3]);
        let extent = Extent::of(&frame).unwrap();
        assert!(matches!(
            deframe(&frame, extent, true),
            Err(PeerError::MpaCrc { .. })
        ));
        let crc = Crc32c::of(&frame[..28]);
        frame[28..].copy_from_slice(&crc);
        let ulpdu = deframe(&frame, extent, true).unwrap().unwrap();
        assert_eq!(ulpdu[18..], *b"hello");
    }
}
