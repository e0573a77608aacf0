//! MPA markers (RFC 5044 §4.3): pointers in the stream by which a receiver that has lost the framing finds the start
//! of a frame.
//!
//! ```text
//!  stream position 0       4                           512     516
//!                 +-------+------+-------------------+-------+-----------+-----+
//!                 |marker | len  | ULPDU             |marker | ULPDU pad | CRC |
//!                 +-------+------+-------------------+-------+-----------+-----+
//!                  0 0 0 0 ^------------ 508 ---------^ 0 0 508
//! ```
//!
//! There is a marker every 512 bytes of stream, counted from the first byte after startup and including the markers.
//! It consists of two zero bytes and the 16-bit distance back to the length field of the frame that contains it, or 0
//! between two frames. This stack never requests markers, but a peer may request them. Markers are rare, so a
//! separate stage, [`Inserter`], adds them to complete frames. Only the peers in tests receive markers, and remove
//! them with [`Stripper`].

use super::crc::Crc32c;
use crate::error::PeerError;

/// Puts markers into the frames of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inserter {
    /// Position in the stream, modulo the interval.
    at: usize,
}

impl Inserter {
    /// Starts at the first byte after startup.
    pub const fn new() -> Self {
        Self { at: 0 }
    }

    /// Appends `fpdu`, a whole frame without markers, to `out`; its CRC is replaced by the CRC
    /// over the frame and its markers, or kept as it is if CRCs are off.
    ///
    /// The frame must not be longer than the 64,768 bytes that RFC 5044 allows, so that every distance
    /// fits its field.
    pub fn insert(&mut self, fpdu: &[u8], with_crc: bool, out: &mut Vec<u8>) {
        let Some((mut covered, crc_field)) = fpdu.split_last_chunk::<CRC>() else {
            return;
        };
        let from = out.len();
        let mut start = None;
        loop {
            // RFC 5044 §4.3 [mpa-marker-interval]: a marker may also come between padding and CRC, where it belongs
            // to this frame. A marker before the length field belongs to it too, but its distance is 0.
            if self.at == 0 {
                let distance = start.map_or(0, |start| out.len() - start);
                out.extend([0, 0]);
                out.extend((distance as u16).to_be_bytes());
                self.at = MARKER;
            }
            if covered.is_empty() {
                break;
            }
            start.get_or_insert(out.len());
            let room = INTERVAL - self.at;
            let (now, later) = covered.split_at(room.min(covered.len()));
            out.extend_from_slice(now);
            self.advance(now.len());
            covered = later;
        }
        // RFC 5044 §4.4 [mpa-crc-markers]: the CRC covers the markers in the frame and directly before it.
        let crc = if with_crc {
            Crc32c::of(out.get(from..).unwrap_or_default())
        } else {
            *crc_field
        };
        out.extend(crc);
        self.advance(CRC);
    }

    fn advance(&mut self, bytes: usize) {
        self.at = (self.at + bytes) % INTERVAL;
    }
}

/// Removes the markers from the stream of one direction and checks the CRCs. The CRCs cover the markers, so they
/// cannot be checked later.
#[derive(Clone, Copy, Debug)]
pub struct Stripper {
    /// Position in the stream, modulo the interval.
    at: usize,
    /// Bytes of stream since the length field of the current frame; 0 between two frames.
    since_start: usize,
    part: Part,
    /// The bytes that have arrived of an incomplete marker, length field or CRC field.
    marker: [u8; MARKER],
    length: [u8; LENGTH],
    crc_field: [u8; CRC],
    crc: Crc32c,
    /// A wrong marker of the current frame. It is reported only if the CRC is correct, because otherwise the marker
    /// itself may be damaged.
    wrong_marker: Option<PeerError>,
}

/// The field that the next byte belongs to, if it is not part of a marker.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The length field, of which `got` bytes have arrived.
    Length { got: usize },
    /// ULPDU and padding, of which `left` bytes are missing.
    Body { left: usize },
    /// The CRC field, of which `got` bytes have arrived.
    Crc { got: usize },
}

impl Stripper {
    /// Starts at the first byte after startup.
    pub const fn new() -> Self {
        Self {
            at: 0,
            since_start: 0,
            part: Part::Length { got: 0 },
            marker: [0; MARKER],
            length: [0; LENGTH],
            crc_field: [0; CRC],
            crc: Crc32c::new(),
            wrong_marker: None,
        }
    }

    /// Appends `bytes` without their markers to `out`.
    ///
    /// The CRC field of a frame is added only if the frame is correct, so a bad frame stays incomplete. The CRC of
    /// the output must not be checked again, because it covers the removed markers.
    ///
    /// # Errors
    /// A frame whose CRC or marker is wrong. The frames before it are in `out`. The function must not be
    /// called again afterwards.
    pub fn strip(
        &mut self,
        mut bytes: &[u8],
        with_crc: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), PeerError> {
        while !bytes.is_empty() {
            if self.at < MARKER {
                let now = fill(&mut self.marker, self.at, &mut bytes);
                self.crc.update(now);
                if self.at + now.len() == MARKER {
                    self.check_marker();
                }
                self.advance(now.len(), self.since_start > 0);
                continue;
            }
            let (mut run, later) = bytes.split_at((INTERVAL - self.at).min(bytes.len()));
            let before = run.len();
            match self.part {
                Part::Length { got } => {
                    let now = fill(&mut self.length, got, &mut run);
                    self.crc.update(now);
                    out.extend_from_slice(now);
                    self.part = if got + now.len() < LENGTH {
                        Part::Length {
                            got: got + now.len(),
                        }
                    } else {
                        let ulpdu = usize::from(u16::from_be_bytes(self.length));
                        Part::Body {
                            left: (LENGTH + ulpdu).next_multiple_of(4) - LENGTH,
                        }
                    };
                }
                Part::Body { left } => {
                    let (now, rest) = run.split_at(left.min(run.len()));
                    run = rest;
                    self.crc.update(now);
                    out.extend_from_slice(now);
                    let left = left - now.len();
                    self.part = if left > 0 {
                        Part::Body { left }
                    } else {
                        Part::Crc { got: 0 }
                    };
                }
                Part::Crc { got } => {
                    let got = got + fill(&mut self.crc_field, got, &mut run).len();
                    self.part = Part::Crc { got };
                }
            }
            let taken = before - run.len();
            bytes = if run.is_empty() {
                later
            } else {
                bytes.get(taken..).unwrap_or_default()
            };
            self.advance(taken, true);
            if let Part::Crc { got: CRC } = self.part {
                self.end_frame(with_crc)?;
                out.extend(self.crc_field);
            }
        }
        Ok(())
    }

    fn check_marker(&mut self) {
        let [_, _, high, low] = self.marker;
        // RFC 5044 §4.2 [mpa-marker-low-bits]: the two low bits of a distance read as zero.
        let got = u16::from_be_bytes([high, low]) & !3;
        // The distance is that of the marker's first byte, and `since_start` already includes the `at`
        // bytes of the marker that came in earlier calls. In a frame that is longer than the RFC
        // allows, the distance can exceed the field; then the low 16 bits are compared.
        let expected = self.since_start.saturating_sub(self.at) as u16;
        // RFC 5044 §8 [mpa-marker-check]: a marker must point to the length field of the current frame.
        if got != expected && self.wrong_marker.is_none() {
            self.wrong_marker = Some(PeerError::MpaMarker { expected, got });
        }
    }

    fn end_frame(&mut self, with_crc: bool) -> Result<(), PeerError> {
        // RFC 5044 §4.4 [mpa-crc-check]
        if with_crc && self.crc.finish() != self.crc_field {
            let (expected, got) = (self.crc.value(), u32::from_le_bytes(self.crc_field));
            return Err(PeerError::MpaCrc { expected, got });
        }
        if let Some(error) = self.wrong_marker {
            return Err(error);
        }
        self.crc = Crc32c::new();
        self.since_start = 0;
        self.part = Part::Length { got: 0 };
        Ok(())
    }

    fn advance(&mut self, bytes: usize, in_frame: bool) {
        self.at = (self.at + bytes) % INTERVAL;
        if in_frame {
            self.since_start += bytes;
        }
    }
}

impl Default for Stripper {
    fn default() -> Self {
        Self::new()
    }
}

/// Moves bytes from the front of `bytes` into `field` from `got` on, and returns them.
fn fill<'a, const N: usize>(field: &mut [u8; N], got: usize, bytes: &mut &'a [u8]) -> &'a [u8] {
    let (now, later) = bytes.split_at((N - got).min(bytes.len()));
    for (to, from) in field.iter_mut().skip(got).zip(now) {
        *to = *from;
    }
    *bytes = later;
    now
}

/// Bytes from the start of one marker to the start of the next (RFC 5044 §4.3).
pub const INTERVAL: usize = 512;
/// Bytes of a marker.
pub const MARKER: usize = 4;
const LENGTH: usize = 2;
const CRC: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
        let mut f = (ulpdu.len() as u16).to_be_bytes().to_vec();
        f.extend(ulpdu);
        f.resize(f.len().next_multiple_of(4), 0);
        let crc = Crc32c::of(&f);
        f.extend(crc);
        f
    }

    fn without_crc(fpdu: &[u8]) -> &[u8] {
        &fpdu[..fpdu.len() - 4]
    }

    /// A Send on queue 0 with 24 zero bytes, as in the RFC's figures.
    fn figure(msn: u8) -> Vec<u8> {
        let mut ulpdu = vec![0x41, 0x43];
        ulpdu.extend([0; 11]);
        ulpdu.push(msn);
        ulpdu.extend([0; 28]);
        fpdu(&ulpdu)
    }

    struct Rng(u64);
    impl Rng {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % n as u64) as usize
        }
    }

    #[test]
    fn the_first_frame_starts_with_a_marker_as_in_figure_5() {
        let mut out = Vec::new();
        Inserter::new().insert(&figure(1), true, &mut out);
        assert_eq!(out.len(), 0x34);
        assert_eq!(out[..6], [0, 0, 0, 0, 0, 0x2a]);
        assert_eq!(out[0x30..], [0x52, 0x23, 0x99, 0x83]);
    }

    #[test]
    fn a_marker_in_a_frame_points_to_its_start_as_in_figure_6() {
        let mut inserter = Inserter::new();
        let mut out = Vec::new();
        // The preceding frame, of 492 bytes with its marker.
        inserter.insert(&fpdu(&[7; 482]), true, &mut out);
        assert_eq!(out.len(), 0x1ec);
        inserter.insert(&figure(2), true, &mut out);
        assert_eq!(out[0x200..0x204], [0, 0, 0, 0x14]);
        assert_eq!(out[0x21c..], [0x84, 0x92, 0x58, 0x98]);
    }

    #[test]
    fn a_marker_between_frames_is_zero_and_belongs_to_the_following_frame() {
        let mut inserter = Inserter::new();
        let mut out = Vec::new();
        inserter.insert(&fpdu(&[7; 502]), true, &mut out);
        assert_eq!(out.len(), 512);
        inserter.insert(&figure(1), true, &mut out);
        assert_eq!(out[512..516], [0; 4]);
        assert_eq!(out[512 + 0x30..], [0x52, 0x23, 0x99, 0x83]);
    }

    #[test]
    fn a_marker_after_the_padding_points_to_the_preceding_frame() {
        let mut inserter = Inserter::new();
        let mut out = Vec::new();
        let frame = fpdu(&[7; 505]);
        assert_eq!(without_crc(&frame).len(), 508);
        inserter.insert(&frame, true, &mut out);
        assert_eq!(out.len(), 520);
        assert_eq!(out[512..516], [0, 0, 1, 0xfc]);
        assert_eq!(out[516..], Crc32c::of(&out[..516]));
        let mut back = Vec::new();
        Stripper::new().strip(&out, true, &mut back).unwrap();
        assert_eq!(without_crc(&back), without_crc(&frame));
    }

    #[test]
    fn frames_of_any_size_are_unchanged_in_any_segmentation() {
        for seed in 1..60 {
            let mut rng = Rng(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
            let with_crc = seed % 4 != 0;
            let (mut inserter, mut stripper) = (Inserter::new(), Stripper::new());
            let (mut sent, mut stream) = (Vec::new(), Vec::new());
            for _ in 0..20 {
                let len = match rng.below(4) {
                    0 => rng.below(8),
                    1 => 490 + rng.below(30),
                    2 => rng.below(2000),
                    _ => rng.below(64_700),
                };
                let frame = fpdu(&(0..len).map(|_| rng.below(256) as u8).collect::<Vec<_>>());
                inserter.insert(&frame, with_crc, &mut stream);
                sent.push(frame);
            }
            for (k, marker) in stream.chunks(INTERVAL).enumerate() {
                assert_eq!(marker[..2], [0, 0], "marker {k}");
                assert_eq!(marker[3] & 3, 0, "marker {k}");
            }
            let mut got = Vec::new();
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let most = if rng.below(3) == 0 { 5 } else { 3000 };
                let (now, later) = rest.split_at((1 + rng.below(most)).min(rest.len()));
                stripper.strip(now, with_crc, &mut got).unwrap();
                rest = later;
            }
            let mut got = &got[..];
            for frame in sent {
                let (now, later) = got.split_at(frame.len());
                assert_eq!(without_crc(now), without_crc(&frame));
                if !with_crc {
                    assert_eq!(now, frame);
                }
                got = later;
            }
            assert!(got.is_empty());
        }
    }

    #[test]
    fn a_frame_with_a_flipped_bit_is_detected_and_not_delivered() {
        let mut stream = Vec::new();
        let mut inserter = Inserter::new();
        let good = fpdu(&[1; 502]);
        inserter.insert(&good, true, &mut stream);
        let second = stream.len();
        inserter.insert(&fpdu(&[2; 700]), true, &mut stream);
        // The two length bytes are left out, because a different length would move the end of the frame.
        for at in (second..stream.len()).filter(|at| !(second + 4..second + 6).contains(at)) {
            let mut bad = stream.clone();
            bad[at] ^= 0x10;
            let mut out = Vec::new();
            let result = Stripper::new().strip(&bad, true, &mut out);
            assert!(
                matches!(result, Err(PeerError::MpaCrc { .. })),
                "byte {at}: {result:?}"
            );
            assert_eq!(without_crc(&out[..good.len()]), without_crc(&good));
            assert!(out.len() < good.len() + 708, "byte {at}");
        }
    }

    #[test]
    fn a_wrong_marker_is_an_error_even_without_crc() {
        let mut stream = Vec::new();
        Inserter::new().insert(&fpdu(&[1; 600]), false, &mut stream);
        stream[515] ^= 4;
        let result = Stripper::new().strip(&stream, false, &mut Vec::new());
        assert_eq!(
            result,
            Err(PeerError::MpaMarker {
                expected: 508,
                got: 504
            })
        );
        // The two low bits are ignored.
        stream[515] ^= 4 | 3;
        assert_eq!(
            Stripper::new().strip(&stream, false, &mut Vec::new()),
            Ok(())
        );
    }

    // RFC 5044 §4.3 [mpa-marker-all-same]
    #[test]
    fn every_marker_in_a_frame_points_to_its_length_field() {
        let mut out = Vec::new();
        let mut inserter = Inserter::new();
        // The second frame begins at 4 + 8, and the last of its markers is the one at 2560.
        inserter.insert(&fpdu(&[]), true, &mut out);
        let start = out.len();
        inserter.insert(&fpdu(&[7; 2700]), true, &mut out);
        for at in (INTERVAL..out.len()).step_by(INTERVAL) {
            let to = u16::from_be_bytes([out[at + 2], out[at + 3]]);
            assert_eq!(at - usize::from(to), start, "marker at {at}");
        }
        assert!(out.len() > 5 * INTERVAL);
    }

    // RFC 5044 §4.2 [mpa-marker-reserved-ignored]
    #[test]
    fn the_reserved_half_of_a_marker_is_covered_by_the_crc_and_means_nothing() {
        let mut stream = Vec::new();
        Inserter::new().insert(&fpdu(&[1; 600]), true, &mut stream);
        stream[512] = 0xa5;
        stream[513] = 0x5a;
        let spoiled = Stripper::new().strip(&stream, true, &mut Vec::new());
        assert!(matches!(spoiled, Err(PeerError::MpaCrc { .. })));
        let end = stream.len() - CRC;
        let crc = Crc32c::of(&stream[..end]);
        stream[end..].copy_from_slice(&crc);
        let mut out = Vec::new();
        assert_eq!(Stripper::new().strip(&stream, true, &mut out), Ok(()));
        assert_eq!(without_crc(&out), without_crc(&fpdu(&[1; 600])));
    }
}
