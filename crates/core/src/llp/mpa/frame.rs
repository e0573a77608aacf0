//! MPA transmit side: adds a segment as an FPDU to a transmit batch.
//!
//! ```text
//!  0        2                2+n      2+n+pad          +4
//! +--------+----------------+--------+----------------+
//! | n      | ULPDU          | pad 0-3| CRC32C         |
//! +--------+----------------+--------+----------------+
//! ```

use super::crc::Crc32c;
use super::deframe::{CRC, LENGTH};
use super::marker::{INTERVAL, MARKER};
use crate::bounds;
use smallvec::SmallVec;

use crate::verbs::mr::{Memory, Placement};
use crate::verbs::source::Source;

/// Bytes to send, in order: bytes that the batch holds, and references to user memory.
#[derive(Debug)]
pub struct TxBatch {
    /// Headers, small payloads, padding, checksums.
    own: Vec<u8>,
    /// The runs up to the last one in user memory. (A run is a range of contiguous bytes, of the batch itself or of user memory.) Empty in
    /// most batches.
    pieces: Vec<Piece>,
    /// Start of the run of `own` that follows `pieces`.
    tail: usize,
    bytes: usize,
    /// Whether the batch has to be sent when a message ends in it, so that the next message begins a TCP segment.
    aligned: bool,
    /// Whether the batch is full after [`bounds::TX_BATCH_SMALL`] copied bytes.
    small: bool,
    /// The number of bytes at which the batch is full.
    most: usize,
    /// The number of the send request whose user memory is added.
    request: u64,
}

impl Default for TxBatch {
    fn default() -> Self {
        Self {
            own: Vec::new(),
            pieces: Vec::new(),
            tail: 0,
            bytes: 0,
            aligned: false,
            small: false,
            most: bounds::TX_BATCH_BYTES,
            request: 0,
        }
    }
}

#[derive(Debug, Clone)]
enum Piece {
    /// `own[from..to]`.
    Own { from: usize, to: usize },
    /// User memory of the send request with this number.
    User(Placement, u64),
}

/// One run of bytes of a batch.
#[derive(Debug, Clone, Copy)]
pub enum Run<'a> {
    /// Bytes that the batch holds.
    Own(&'a [u8]),
    /// `len` bytes of user memory from byte `from` of the range on.
    User {
        /// The range.
        place: &'a Placement,
        /// First byte.
        from: usize,
        /// Number of bytes.
        len: usize,
    },
}

impl<'a> Run<'a> {
    /// Number of bytes.
    #[allow(clippy::len_without_is_empty, reason = "a run has at least one byte")]
    pub fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::User { len, .. } => *len,
        }
    }

    /// The run without its first `skip` bytes.
    fn without(self, skip: usize) -> Self {
        match self {
            Self::Own(bytes) => Self::Own(bytes.get(skip..).unwrap_or(&[])),
            Self::User { place, from, len } => Self::User {
                place,
                from: from + skip,
                len: len - skip,
            },
        }
    }
}

impl TxBatch {
    /// Number of bytes in the batch.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the batch contains as many bytes as one system call should send.
    pub fn is_full(&self) -> bool {
        self.bytes >= self.most
            || self.own.len() >= self.copied_most()
            || self.pieces.len() + 1 >= bounds::TX_BATCH_PIECES
    }

    fn copied_most(&self) -> usize {
        if self.small {
            bounds::TX_BATCH_SMALL
        } else {
            bounds::TX_BATCH_COPIED
        }
    }

    /// Sets the number of bytes at which the batch is full. The last FPDU may go beyond this number. The setting stays when the batch is
    /// emptied.
    pub fn limit(&mut self, bytes: usize) {
        self.most = bytes.clamp(1, bounds::TX_BATCH_BYTES);
    }

    /// Sets whether the batch is full after [`bounds::TX_BATCH_SMALL`] copied bytes, to save memory when many peers do not read.
    pub fn keep_small(&mut self, small: bool) {
        self.small = small;
    }

    /// Sets whether each message begins at the start of a TCP segment. The setting stays when the batch is emptied.
    pub fn align(&mut self, aligned: bool) {
        self.aligned = aligned;
    }

    /// Whether each message begins at the start of a TCP segment.
    pub fn is_aligned(&self) -> bool {
        self.aligned
    }

    /// Whether the batch contains references to user memory.
    pub fn has_user_memory(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Sets the number of the send request whose user memory is added next.
    pub fn set_request(&mut self, number: u64) {
        self.request = number;
    }

    /// The number of the first send request whose memory the batch refers to after its first `skip` bytes.
    pub fn first_request(&self, skip: usize) -> Option<u64> {
        let mut end = 0;
        self.pieces.iter().find_map(|piece| {
            end += self.run(piece).len();
            match piece {
                Piece::User(_, request) if end > skip => Some(*request),
                _ => None,
            }
        })
    }

    /// All bytes, if none of them are in user memory.
    #[inline]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        self.pieces.is_empty().then_some(&self.own)
    }

    /// The runs after the first `skip` bytes of the batch, in order.
    pub fn rest(&self, skip: usize) -> impl Iterator<Item = Run<'_>> {
        let tail = self.own_run(self.tail, self.own.len());
        let mut skip = skip;
        let runs = self.pieces.iter().map(|piece| self.run(piece));
        let runs = runs.chain([tail]);
        runs.filter_map(move |run| {
            let gone = skip.min(run.len());
            skip -= gone;
            (gone < run.len()).then(|| run.without(gone))
        })
    }

    fn own_run(&self, from: usize, to: usize) -> Run<'_> {
        Run::Own(self.own.get(from..to).unwrap_or(&[]))
    }

    fn run<'a>(&'a self, piece: &'a Piece) -> Run<'a> {
        match piece {
            Piece::Own { from, to } => self.own_run(*from, *to),
            Piece::User(place, _) => Run::User {
                place,
                from: 0,
                len: usize::try_from(place.len()).unwrap_or(0),
            },
        }
    }

    /// Empties the batch and keeps its allocation.
    #[inline]
    pub fn clear(&mut self) {
        self.own.clear();
        self.bytes = 0;
        self.tail = 0;
        if !self.pieces.is_empty() {
            self.pieces.clear();
        }
    }

    /// Takes the allocation of an empty batch, to use it for another one.
    pub fn take_room(&mut self) -> Vec<u8> {
        debug_assert!(self.is_empty(), "room is taken from an empty batch");
        std::mem::take(&mut self.own)
    }

    /// Gives an empty batch an allocation.
    pub fn give_room(&mut self, mut room: Vec<u8>) {
        debug_assert!(self.is_empty(), "room is given to an empty batch");
        room.clear();
        self.own = room;
    }

    /// Capacity in bytes.
    pub fn room(&self) -> usize {
        self.own.capacity()
    }

    /// Adds bytes: start-up frames, and FPDUs that are framed elsewhere.
    pub fn push_raw(&mut self, bytes: &[u8]) {
        self.own.extend_from_slice(bytes);
        self.bytes += bytes.len();
    }

    /// Adds a range of user memory.
    fn push_user(&mut self, place: Placement) {
        let (from, to) = (self.tail, self.own.len());
        if from < to {
            self.pieces.push(Piece::Own { from, to });
        }
        self.tail = to;
        self.bytes += usize::try_from(place.len()).unwrap_or(0);
        self.pieces.push(Piece::User(place, self.request));
    }
}

/// A segment: its header, and the range of the message's source that follows.
#[derive(Debug, Clone)]
pub struct Segment {
    /// DDP and RDMAP header.
    pub header: SmallVec<[u8; 18]>,
    /// First payload byte in the message.
    pub from: u64,
    /// Payload bytes.
    pub len: usize,
    /// Whether it ends the message.
    pub last: bool,
}

/// The memory behind a segment is no longer registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalidated;

/// Appends the FPDU of `segment`, whose payload comes from `source`, to `batch`.
///
/// On error the batch is unchanged.
pub fn frame(
    segment: &Segment,
    source: &Source,
    with_crc: bool,
    memory: &dyn Memory,
    batch: &mut TxBatch,
) -> Result<(), Invalidated> {
    let framed = match source {
        Source::Bytes(bytes) => {
            let from = usize::try_from(segment.from).unwrap_or(usize::MAX);
            let payload = bytes.get(from..from + segment.len).unwrap_or(&[]);
            batch.push_fpdu(&segment.header, segment.len, with_crc, |own| {
                own.extend_from_slice(payload);
                true
            })
        }
        Source::Memory { places, volatile }
            if *volatile || with_crc || segment.len < bounds::COPY_LIMIT =>
        {
            let (from, len) = (segment.from, segment.len as u64);
            batch.push_fpdu(&segment.header, segment.len, with_crc, |own| {
                for_each_part(places, from, len, |place, from, len| {
                    let Some(pinned) = place.pin() else {
                        return false;
                    };
                    memory.gather(&pinned, from, len, own);
                    true
                })
            })
        }
        Source::Memory { places, .. } => {
            frame_by_reference(segment, places, batch);
            true
        }
    };
    if framed { Ok(()) } else { Err(Invalidated) }
}

/// Returns the length field of an FPDU, and the number of padding bytes at its end.
fn length_and_pad(ulpdu: usize) -> ([u8; LENGTH], usize) {
    // RFC 5044 §4.1 [mpa-fpdu-length]: the length counts the ULPDU alone.
    let length = u16::try_from(ulpdu).unwrap_or(u16::MAX);
    (length.to_be_bytes(), (4 - (LENGTH + ulpdu) % 4) % 4)
}

impl TxBatch {
    /// Appends an FPDU of this header and `len` bytes of payload, which `fill` appends. If `fill` returns false, the
    /// batch is unchanged and this returns false.
    // Inlined, because copying a header takes only two instructions if its length is a constant.
    #[inline(always)]
    pub(crate) fn push_fpdu(
        &mut self,
        header: &[u8],
        len: usize,
        with_crc: bool,
        fill: impl FnOnce(&mut Vec<u8>) -> bool,
    ) -> bool {
        const PAD_AND_CRC: usize = 3 + CRC;
        let own = &mut self.own;
        let start = own.len();
        let ulpdu = header.len() + len;
        let (length, pad) = length_and_pad(ulpdu);
        own.reserve(LENGTH + ulpdu + PAD_AND_CRC);
        own.extend_from_slice(&length);
        own.extend_from_slice(header);
        if !fill(own) {
            own.truncate(start);
            return false;
        }
        // Adding a constant number of bytes and truncating them is faster than adding the right number.
        let end = own.len();
        own.extend_from_slice(&[0; PAD_AND_CRC]);
        // RFC 5044 §4.4 [mpa-fpdu-crc]: the CRC covers length field to padding. Without CRCs the field is present too.
        if with_crc {
            own.truncate(end + pad);
            let crc = Crc32c::of(own.get(start..).unwrap_or(&[]));
            own.extend_from_slice(&crc);
        } else {
            own.truncate(end + pad + CRC);
        }
        self.bytes += own.len() - start;
        true
    }
}

/// The FPDU of a segment without user memory.
pub fn frame_bytes(segment: &Segment, source: &Source, with_crc: bool) -> Vec<u8> {
    struct Nothing;
    impl Memory for Nothing {
        fn place(&self, _: &crate::verbs::mr::Pinned<'_>, _: u64, _: &[u8]) {}
        fn gather(&self, _: &crate::verbs::mr::Pinned<'_>, _: u64, _: u64, _: &mut Vec<u8>) {}
        fn update(&self, _: &crate::verbs::mr::Pinned<'_>, _: &mut dyn FnMut(u64) -> u64) -> u64 {
            0
        }
    }
    let mut batch = TxBatch::default();
    let _ = frame(segment, source, with_crc, &Nothing, &mut batch);
    batch.own
}

/// Appends the FPDU of a segment on a stream without CRCs. The payload is not copied: the kernel
/// reads it from user memory.
fn frame_by_reference(segment: &Segment, places: &[Placement], batch: &mut TxBatch) {
    let (length, pad) = length_and_pad(segment.header.len() + segment.len);
    batch.push_raw(&length);
    batch.push_raw(&segment.header);
    for_each_part(
        places,
        segment.from,
        segment.len as u64,
        |place, from, len| {
            batch.push_user(place.part(from, len));
            true
        },
    );
    // Without CRCs the field is present too.
    batch.push_raw([0; 3 + CRC].get(..pad + CRC).unwrap_or(&[]));
}

/// Calls `each` for the parts of `[from, from + len)` of a list of ranges, until it returns false. Returns false then, and also
/// if the ranges end before `from + len`.
pub fn for_each_part(
    places: &[Placement],
    from: u64,
    len: u64,
    mut each: impl FnMut(&Placement, u64, u64) -> bool,
) -> bool {
    let mut skip = from;
    let mut left = len;
    for place in places {
        if left == 0 {
            break;
        }
        if skip >= place.len() {
            skip -= place.len();
            continue;
        }
        let take = left.min(place.len() - skip);
        if !each(place, skip, take) {
            return false;
        }
        skip = 0;
        left -= take;
    }
    left == 0
}

/// MULPDU for a TCP segment size: the segment minus length, CRC, padding and, if the peer requires them, markers.
// RFC 5044 §4.5 [mpa-mulpdu-plain] [mpa-mulpdu-markers]: the two formulas.
// RFC 5044 §3, §4.5 [mpa-mulpdu-range] [mpa-mulpdu-min]: the bounds hold for all paths.
pub fn mulpdu(emss: usize, markers: bool) -> usize {
    let markers = if markers { emss.div_ceil(INTERVAL) } else { 0 };
    emss.saturating_sub(6 + MARKER * markers + emss % 4)
        .clamp(bounds::MULPDU_MIN, bounds::MULPDU_ANYWARP)
}

#[cfg(test)]
mod tests {
    use smallvec::SmallVec;

    use super::*;
    use crate::ddp::tx::{Address, Message, segment};
    use crate::wire::rdmap::Opcode;
    use crate::wire::{Msn, Stag};

    struct NoMemory;
    impl Memory for NoMemory {
        fn place(&self, _: &crate::verbs::mr::Pinned<'_>, _: u64, _: &[u8]) {}
        fn gather(&self, _: &crate::verbs::mr::Pinned<'_>, _: u64, _: u64, _: &mut Vec<u8>) {}
        fn update(&self, _: &crate::verbs::mr::Pinned<'_>, _: &mut dyn FnMut(u64) -> u64) -> u64 {
            0
        }
    }

    #[test]
    fn a_send_of_hello_has_these_bytes() {
        let mut m = Message {
            opcode: Opcode::Send,
            address: Address::Untagged {
                qn: 0,
                msn: Msn(1),
                inv_stag: Stag(0),
                mo: 0,
            },
            source: Source::Bytes(SmallVec::from_slice(b"hello")),
            len: 5,
            sent: 0,
        };
        let s = segment(&mut m, 1500);
        let mut batch = TxBatch::default();
        frame(&s, &m.source, true, &NoMemory, &mut batch).unwrap();
        let hex: String = batch.own.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "0017414300000000000000000000000100000000".to_owned() + "68656c6c6f000000b990b10c"
        );
    }

    #[test]
    fn mulpdu_of_common_segment_sizes() {
        for (emss, want) in [
            (536, 530),
            (1448, 1442),
            (1460, 1454),
            (8948, 8942),
            (8960, 8954),
        ] {
            assert_eq!(mulpdu(emss, false), want);
        }
    }

    #[test]
    fn mulpdu_of_common_segment_sizes_with_markers() {
        for (emss, want) in [
            (536, 522),
            (1448, 1430),
            (1460, 1442),
            (8948, 8870),
            (8960, 8882),
        ] {
            assert_eq!(mulpdu(emss, true), want);
        }
    }

    // RFC 5044 §4.5 [mpa-mulpdu-plain] [mpa-mulpdu-markers] [mpa-mulpdu-min], §3 [mpa-mulpdu-range] [mpa-ulpdu-max]
    #[test]
    fn a_full_frame_fits_its_segment_and_mulpdu_stays_in_its_range() {
        for emss in 0..70_000 {
            let (plain, marked) = (mulpdu(emss, false), mulpdu(emss, true));
            for mulpdu in [plain, marked] {
                assert!((128..=64_768).contains(&mulpdu), "{emss}");
            }
            if (200..64_000).contains(&emss) {
                assert_eq!(plain, emss - (6 + emss % 4), "{emss}");
                let ceiling = emss / 512 + usize::from(emss % 512 > 0);
                assert_eq!(marked, emss - (6 + 4 * ceiling + emss % 4), "{emss}");
            }
        }
        assert_eq!((mulpdu(100, false), mulpdu(100, true)), (128, 128));
    }
}
