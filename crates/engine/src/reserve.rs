//! What is left when the host has no more memory.
//!
//! Rust ends the process when an allocation fails, and the process is the program's. So what malloc refuses is served from
//! a reserve: calls that are under way end in order, and those that would make or post something are refused with
//! `ENOMEM` until there is memory again. Nothing is held for it but pages that nobody has touched.
//!
//! One of the files where `unsafe` lives.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes that malloc must be able to give before there is memory again.
const PROBE: usize = 1 << 20;

/// Pieces of one size. Which of them are taken says one bit each, so that there is no lock that a fork could catch.
struct Class {
    size: usize,
    count: usize,
    /// Where its pieces begin.
    at: usize,
    /// Where its bits begin, in words.
    word: usize,
}

/// Sizes, and how many of each: small things of a few hundred calls, buffers of a few threads that send, and receive
/// buffers ([`crate::reactor::RX_BUFFER_LEN`]) of a few that poll.
#[allow(
    clippy::indexing_slicing,
    reason = "computed by the compiler, which would say so"
)]
const CLASSES: [Class; 7] = {
    let sizes = [
        (64, 1024),
        (256, 512),
        (1 << 10, 128),
        (4 << 10, 64),
        (16 << 10, 16),
        (64 << 10, 8),
        (256 << 10, 6),
    ];
    let mut classes = [const {
        Class {
            size: 0,
            count: 0,
            at: 0,
            word: 0,
        }
    }; 7];
    let (mut i, mut at, mut word) = (0, 0, 0);
    while i < sizes.len() {
        let (size, count) = sizes[i];
        classes[i] = Class {
            size,
            count,
            at,
            word,
        };
        at += size * count;
        word += count.div_ceil(64);
        i += 1;
    }
    classes
};

/// Bytes of all of them.
const SIZE: usize = CLASSES[6].at + CLASSES[6].size * CLASSES[6].count;
const WORDS: usize = CLASSES[6].word + 1;
/// Strictest alignment: that of the pages.
const ALIGN: usize = 4096;

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[u8; SIZE]>);

// SAFETY: the bytes are handed out as allocations, each to one owner; nothing else touches them.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new([0; SIZE]));
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Bytes of the pieces that are taken.
static USED: AtomicUsize = AtomicUsize::new(0);

fn start() -> *mut u8 {
    PAGES.0.get().cast()
}

impl Class {
    /// The words of its bits, and how many bits each has.
    fn words(&self) -> impl Iterator<Item = (&'static AtomicU64, usize)> {
        let count = self.count;
        let words = TAKEN.get(self.word..).unwrap_or(&[]);
        let bits = (0..count.div_ceil(64)).map(move |i| (count - i * 64).min(64));
        words.iter().zip(bits)
    }

    /// Takes a piece: its number.
    fn take(&self) -> Option<usize> {
        for (i, (word, bits)) in self.words().enumerate() {
            loop {
                let bit = (!word.load(Ordering::Relaxed)).trailing_zeros() as usize;
                if bit >= bits {
                    break;
                }
                if word.fetch_or(1 << bit, Ordering::Acquire) & 1 << bit == 0 {
                    return Some(i * 64 + bit);
                }
            }
        }
        None
    }
}

/// Takes a piece of the smallest size that has one.
fn take(layout: Layout) -> *mut u8 {
    for class in &CLASSES {
        // Each size is a multiple of every alignment that is not larger, up to that of the pages.
        if class.size < layout.size() || class.size.min(ALIGN) < layout.align() {
            continue;
        }
        if let Some(number) = class.take() {
            USED.fetch_add(class.size, Ordering::Relaxed);
            // SAFETY: inside the pages.
            return unsafe { start().add(class.at + number * class.size) };
        }
    }
    std::ptr::null_mut()
}

/// Gives a piece back.
fn give_back(piece: *mut u8) {
    let at = piece.addr() - start().addr();
    let Some(class) = CLASSES.iter().rfind(|c| c.at <= at) else {
        return;
    };
    let number = (at - class.at) / class.size;
    if let Some(word) = TAKEN.get(class.word + number / 64) {
        USED.fetch_sub(class.size, Ordering::Relaxed);
        word.fetch_and(!(1 << (number % 64)), Ordering::Release);
    }
}

fn is_ours(piece: *mut u8) -> bool {
    piece.addr().wrapping_sub(start().addr()) < SIZE
}

/// Whether malloc has memory to give.
fn malloc_has_some() -> bool {
    // SAFETY: any size may be asked for.
    let probe = unsafe { libc::malloc(PROBE) };
    // A compiler that sees the pair may leave it out, and say that there was memory.
    let probe = std::hint::black_box(probe);
    // SAFETY: null or just allocated.
    unsafe { libc::free(probe) };
    !probe.is_null()
}

/// Whether the reserve is in use and there is nothing else: nothing new is made now.
pub fn is_scarce() -> bool {
    USED.load(Ordering::Relaxed) != 0 && !malloc_has_some()
}

/// Whether most of the reserve is in use: not even requests are taken now.
pub(crate) fn is_low() -> bool {
    USED.load(Ordering::Relaxed) > SIZE / 2 && !malloc_has_some()
}

/// The allocator of everything in our libraries: malloc, and behind it the reserve. The program's own is not touched.
#[derive(Debug)]
pub struct Allocator;

// SAFETY: pieces are malloc's or the reserve's, told apart by their addresses; each is given back to where it came from.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is malloc's.
        let piece = unsafe { System.alloc(layout) };
        if piece.is_null() { take(layout) } else { piece }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let piece = unsafe { System.alloc_zeroed(layout) };
        if !piece.is_null() {
            return piece;
        }
        let piece = take(layout);
        if !piece.is_null() {
            // SAFETY: just taken, of that size.
            unsafe { piece.write_bytes(0, layout.size()) };
        }
        piece
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        if is_ours(piece) {
            give_back(piece);
        } else {
            // SAFETY: not ours, so malloc's.
            unsafe { System.dealloc(piece, layout) };
        }
    }

    unsafe fn realloc(&self, piece: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_ours(piece) {
            // SAFETY: not ours, so malloc's.
            let moved = unsafe { System.realloc(piece, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else {
            return std::ptr::null_mut();
        };
        // SAFETY: the size is not zero (the caller's promise).
        let moved = unsafe { self.alloc(wanted) };
        if !moved.is_null() {
            // SAFETY: two pieces that do not overlap, each at least this long.
            unsafe { moved.copy_from_nonoverlapping(piece, layout.size().min(size)) };
            // SAFETY: the caller gives it up.
            unsafe { self.dealloc(piece, layout) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests share the one reserve with nobody: malloc has memory.
    #[test]
    fn pieces_do_not_overlap_and_all_the_room_comes_back() {
        let mut pieces = Vec::new();
        for i in 1..=64_usize {
            let layout = Layout::from_size_align(i * 37, 1 << (i % 8)).unwrap();
            let piece = take(layout);
            assert!(is_ours(piece) && piece.addr().is_multiple_of(layout.align()));
            // SAFETY: just taken.
            unsafe { piece.write_bytes(i as u8, layout.size()) };
            pieces.push((piece, layout, i as u8));
        }
        assert!(take(Layout::from_size_align(SIZE, 1).unwrap()).is_null());
        assert!(!is_scarce(), "malloc has memory");
        for (piece, layout, value) in &pieces {
            // SAFETY: taken above, and written.
            let bytes = unsafe { std::slice::from_raw_parts(*piece, layout.size()) };
            assert!(bytes.iter().all(|b| b == value));
        }
        // One grows: it moves to malloc, with what it holds.
        let (piece, layout, value) = pieces.pop().unwrap();
        // SAFETY: taken above, given up here.
        let moved = unsafe { Allocator.realloc(piece, layout, 100_000) };
        assert!(!is_ours(moved));
        // SAFETY: as long as that, and more.
        let bytes = unsafe { std::slice::from_raw_parts(moved, layout.size()) };
        assert!(bytes.iter().all(|b| *b == value));
        let grown = Layout::from_size_align(100_000, layout.align()).unwrap();
        // SAFETY: allocated above with this layout.
        unsafe { Allocator.dealloc(moved, grown) };
        for (piece, layout, _) in pieces {
            // SAFETY: taken above.
            unsafe { Allocator.dealloc(piece, layout) };
        }
        assert_eq!(USED.load(Ordering::Relaxed), 0);

        // Every last piece of every size, and each where no other is.
        let mut all = Vec::new();
        for class in CLASSES.iter().rev() {
            for _ in 0..class.count {
                let piece =
                    take(Layout::from_size_align(class.size, class.size.min(ALIGN)).unwrap());
                assert!(is_ours(piece));
                all.push((piece.addr(), class.size));
            }
        }
        assert!(take(Layout::from_size_align(1, 1).unwrap()).is_null());
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0));
        for (at, _) in all {
            give_back(start().with_addr(at));
        }
        assert_eq!(USED.load(Ordering::Relaxed), 0);
    }
}
