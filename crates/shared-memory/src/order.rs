//! Copies whose last word becomes visible last.
//!
//! An adapter writes the bytes of a message in the order of their addresses. Programs rely on this: they poll the last word of a
//! message, and then read the rest. `memcpy(3)` copies in any order: it often stores the last bytes before the first ones.

use crate::copy;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// The length of a word. It is aligned to the same number.
const WORD: usize = size_of::<u64>();

/// Copies `len` bytes. The last aligned word, or the part of it that is copied, is stored after all other bytes and, if its address and
/// length permit, in one step.
///
/// # Safety
/// There are `len` readable bytes at `from`, and as many writable ones at `to`. They may overlap, and others may access them at the same
/// time.
#[inline]
pub unsafe fn copy_last_word_last(from: *const u8, to: *mut u8, len: usize) {
    let beyond = to.addr().wrapping_add(len) % WORD;
    let last = len.min(if beyond == 0 { WORD } else { beyond });
    let rest = len - last;
    let mut word = [0; WORD];
    // SAFETY: the caller's promise. `last` is at most the length of a word.
    unsafe {
        std::ptr::copy_nonoverlapping(from.add(rest), word.as_mut_ptr(), last);
        copy(from, to, rest);
    }
    fence(Ordering::Release);
    // SAFETY: the caller's promise: these are the last bytes.
    unsafe { store(to.add(rest), word.get(..last).unwrap_or(&word)) };
}

/// Stores bytes in as few steps as alignment permits, in the order of their addresses.
///
/// # Safety
/// There are as many writable bytes at `to`.
#[inline]
unsafe fn store(mut to: *mut u8, mut bytes: &[u8]) {
    while let [first, ..] = *bytes {
        let aligned = |len: usize| to.addr().is_multiple_of(len);
        // SAFETY: the caller's promise; the addresses are aligned. All access to memory of the program is by address.
        let stored = unsafe {
            if let Some(word) = bytes.first_chunk().filter(|_| aligned(8)) {
                AtomicU64::from_ptr(to.cast()).store(u64::from_ne_bytes(*word), Ordering::Release);
                8
            } else if let Some(word) = bytes.first_chunk().filter(|_| aligned(4)) {
                AtomicU32::from_ptr(to.cast()).store(u32::from_ne_bytes(*word), Ordering::Release);
                4
            } else if let Some(word) = bytes.first_chunk().filter(|_| aligned(2)) {
                AtomicU16::from_ptr(to.cast()).store(u16::from_ne_bytes(*word), Ordering::Release);
                2
            } else {
                AtomicU8::from_ptr(to).store(first, Ordering::Release);
                1
            }
        };
        bytes = bytes.get(stored..).unwrap_or(&[]);
        to = to.wrapping_add(stored);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lengths_at_all_alignments_are_copied() {
        let source: Vec<u8> = (1..=100).collect();
        for at in 0..WORD {
            for len in 0..80 {
                let mut target = AlignedBytes([0; 128]);
                // SAFETY: both have more bytes.
                unsafe { copy_last_word_last(source.as_ptr(), target.0.as_mut_ptr().add(at), len) };
                let mut expected = [0; 128];
                expected[at..at + len].copy_from_slice(&source[..len]);
                assert_eq!(target.0, expected, "{len} bytes at {at}");
            }
        }
    }

    #[repr(align(8))]
    struct AlignedBytes([u8; 128]);

    #[test]
    fn a_reader_that_sees_the_last_word_sees_all_bytes() {
        use std::sync::atomic::AtomicBool;

        /// A length and an offset at which memcpy(3) stores the last bytes first.
        const WORDS: usize = 256;
        const ROUNDS: u64 = 20_000;
        static TAKEN: AtomicBool = AtomicBool::new(true);
        static MEMORY: [AtomicU64; WORDS + 1] = [const { AtomicU64::new(0) }; WORDS + 1];
        let to = MEMORY.get(1..).unwrap();
        // Not a scoped thread: the thread sanitizer does not see that its end is waited for.
        let reader = std::thread::spawn(move || {
            for round in 1..=ROUNDS {
                while to[WORDS - 1].load(Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                for word in to {
                    assert_eq!(word.load(Ordering::Relaxed), round);
                }
                TAKEN.store(true, Ordering::Release);
            }
        });
        for round in 1..=ROUNDS {
            while !TAKEN.swap(false, Ordering::Acquire) && !reader.is_finished() {
                std::hint::spin_loop();
            }
            let source = vec![round; WORDS];
            let target = to.as_ptr().cast_mut().cast();
            // SAFETY: both have this length, and the words are atomic.
            unsafe { copy_last_word_last(source.as_ptr().cast(), target, WORDS * WORD) };
        }
        reader.join().unwrap();
    }
}
