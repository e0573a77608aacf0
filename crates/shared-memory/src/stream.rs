//! Copies into memory that another processor reads next.
//!
//! A block that is copied with ordinary stores is in the caches of this processor afterwards, and the lines that it replaces were in those
//! of the reader. So each line crosses twice between the processors, one after the other. Non-temporal stores write the lines to memory
//! without reading them, and the reader's prefetcher gets them from there. Between two processors of an AMD EPYC, 16 KiB took 2.3 µs in place of
//! 5.7 one way if they share a cache, and 2.7 µs in place of 12 if they do not; 2 KiB took longer, 0.9 in place of 0.25.

use crate::copy;

/// Shorter blocks are copied with ordinary stores.
const LEAST: usize = 4096;

/// Copies `len` bytes to memory that another processor reads next. Stores that follow become visible after these.
///
/// # Safety
/// There are `len` readable bytes at `from`, and as many writable ones at `to`. They may overlap, and others may access them at the same
/// time.
#[inline]
pub(crate) unsafe fn copy_for_other(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; blocks that overlap are not passed on.
    unsafe {
        if len >= LEAST && pays() && from.addr().abs_diff(to.addr()) >= len {
            stream(from, to, len);
        } else {
            copy(from, to, len);
        }
    }
}

/// Whether non-temporal stores pay on this processor. They were measured on AMD only; on others a store that goes to memory may take longer.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn pays() -> bool {
    use std::sync::atomic::{AtomicU8, Ordering};

    const UNKNOWN: u8 = 0;
    const YES: u8 = 1;
    const NO: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);

    #[cold]
    fn find() -> bool {
        let vendor = std::arch::x86_64::__cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        let pays = matches!(name.as_flattened(), b"AuthenticAMD" | b"HygonGenuine");
        KNOWN.store(if pays { YES } else { NO }, Ordering::Relaxed);
        pays
    }

    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => find(),
        known => known == YES,
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline]
fn pays() -> bool {
    false
}

/// Length of a line of the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies whole lines with non-temporal stores, and the bytes before the first and after the last one as usual.
///
/// # Safety
/// As for [`copy_for_other`], and the blocks do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const PART: usize = size_of::<__m128i>();
    let before = to.addr().wrapping_neg() % LINE;
    let before = before.min(len);
    let lines = (len - before) / LINE;
    let end = before + lines * LINE;
    // SAFETY: the caller's promise; all offsets are at most `len`, and the targets of the stores are multiples of `LINE` and `PART`. Every
    // x86-64 processor has these instructions. The fence orders the stores before all that follow.
    unsafe {
        copy(from, to, before);
        for at in (before..end).step_by(LINE) {
            let load = |part: usize| _mm_loadu_si128(from.add(at + part * PART).cast());
            let line = [load(0), load(1), load(2), load(3)];
            for (part, value) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(at + part * PART).cast(), value);
            }
        }
        copy(from.add(end), to.add(end), len - end);
        _mm_sfence();
    }
}

/// Not called, because [`pays`] returns false.
///
/// # Safety
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_positions_and_lengths_are_copied() {
        let source: Vec<u8> = (0..20_000_u32).map(|i| (i % 251) as u8).collect();
        for from in [0, 1, 8, 63] {
            for at in 0..=LINE {
                for len in [0, 1, 63, 64, 65, 4095, 4096, 4097, 4159, 4160, 16_384] {
                    let mut target = vec![0xee; 17_000];
                    // SAFETY: both have more bytes.
                    unsafe {
                        stream(source.as_ptr().add(from), target.as_mut_ptr().add(at), len);
                    }
                    let (head, rest) = target.split_at(at);
                    let (bytes, tail) = rest.split_at(len);
                    assert!(bytes == &source[from..from + len], "{len} bytes at {at}");
                    assert!(head.iter().chain(tail).all(|b| *b == 0xee), "{len} at {at}");
                }
            }
        }
    }

    #[test]
    fn blocks_that_overlap_are_copied() {
        let mut memory: Vec<u8> = (0..20_000_u32).map(|i| (i % 251) as u8).collect();
        let mut expected = memory.clone();
        expected.copy_within(0..9000, 100);
        let start = memory.as_mut_ptr();
        // SAFETY: both blocks are in `memory`.
        unsafe { copy_for_other(start, start.add(100), 9000) };
        assert!(memory == expected);
    }

    #[test]
    fn a_reader_that_sees_a_later_store_sees_all_bytes() {
        use std::sync::atomic::{AtomicU64, Ordering};

        const WORDS: usize = 2048;
        const ROUNDS: u64 = 2_000;
        static MEMORY: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        static READ: AtomicU64 = AtomicU64::new(0);
        let reader = std::thread::spawn(|| {
            for round in 1..=ROUNDS {
                while WRITTEN.load(Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                let old = MEMORY.iter().find(|w| w.load(Ordering::Relaxed) != round);
                READ.store(round, Ordering::Release);
                assert!(old.is_none(), "a word of an earlier round");
            }
        });
        for round in 1..=ROUNDS {
            let source = vec![round; WORDS];
            let target = MEMORY.as_ptr().cast_mut().cast();
            // SAFETY: both have this length, and the words are atomic.
            unsafe { copy_for_other(source.as_ptr().cast(), target, WORDS * 8) };
            WRITTEN.store(round, Ordering::Release);
            while READ.load(Ordering::Acquire) != round && !reader.is_finished() {
                std::hint::spin_loop();
            }
        }
        reader.join().unwrap();
    }
}
