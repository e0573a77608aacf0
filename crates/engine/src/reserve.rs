//! A reserve of memory that serves allocations when malloc fails.
//!
//! Rust aborts the process when an allocation fails, but a library must not abort the program that has loaded it. So if
//! malloc fails, an allocation is served from a reserve: calls in progress finish normally, and calls that create objects
//! or post requests fail with `ENOMEM` until malloc has memory again. The reserve consists of static pages, which use no
//! memory of the host before they are used.
//!
//! This is one of the files that may have `unsafe` code.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes that malloc must be able to allocate; otherwise the host counts as out of memory.
const PROBE: usize = 1 << 20;

/// Pieces of one size. Each has one bit, which is set while the piece is in use. There is no lock, because a fork
/// could happen while another thread holds it.
struct Class {
    size: usize,
    count: usize,
    /// Offset of its first piece in the reserve.
    at: usize,
    /// Index of the first word of its bits.
    word: usize,
}

/// The sizes of pieces, and how many there are of each: small objects of a few hundred calls, transmit buffers of a few
/// threads, and receive buffers ([`crate::reactor::RX_BUFFER_LEN`]) of a few threads that poll.
#[allow(
    clippy::indexing_slicing,
    reason = "evaluated at compile time, where an error would not compile"
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

/// Bytes of the reserve.
const SIZE: usize = CLASSES[6].at + CLASSES[6].size * CLASSES[6].count;
const WORDS: usize = CLASSES[6].word + 1;
/// The strictest alignment that the reserve can serve, in bytes: that of its pages.
const ALIGN: usize = 4096;

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[u8; SIZE]>);

// SAFETY: the bytes are handed out as allocations, each to one owner; nothing else touches them.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new([0; SIZE]));
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Bytes of all pieces in use.
static USED: AtomicUsize = AtomicUsize::new(0);

fn start() -> *mut u8 {
    PAGES.0.get().cast()
}

impl Class {
    /// The words with the bits of this size, and how many bits each word has.
    fn words(&self) -> impl Iterator<Item = (&'static AtomicU64, usize)> {
        let count = self.count;
        let words = TAKEN.get(self.word..).unwrap_or(&[]);
        let bits = (0..count.div_ceil(64)).map(move |i| (count - i * 64).min(64));
        words.iter().zip(bits)
    }

    /// Reserves a free piece and returns its number.
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

/// Reserves a free piece of the smallest size that fits; null if there is none.
fn take(layout: Layout) -> *mut u8 {
    for class in &CLASSES {
        // A piece of this size is aligned to its size, and at most to a page.
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

/// Returns a piece to the reserve.
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

/// Whether malloc can allocate memory.
fn malloc_has_some() -> bool {
    // SAFETY: malloc takes any size.
    let probe = unsafe { libc::malloc(PROBE) };
    // Without `black_box` the compiler may remove both calls and assume that malloc had memory.
    let probe = std::hint::black_box(probe);
    // SAFETY: null or just allocated.
    unsafe { libc::free(probe) };
    !probe.is_null()
}

/// Whether the reserve is in use and malloc has no memory. New objects are not created then.
pub fn is_scarce() -> bool {
    USED.load(Ordering::Relaxed) != 0 && !malloc_has_some()
}

/// Whether more than half of the reserve is in use and malloc has no memory. Requests are not accepted then either.
pub(crate) fn is_low() -> bool {
    USED.load(Ordering::Relaxed) > SIZE / 2 && !malloc_has_some()
}

/// The allocator of the anywarp libraries: malloc, and the reserve when malloc fails. The program's own allocator is
/// not replaced.
#[derive(Debug)]
pub struct Allocator;

// SAFETY: pieces are malloc's or the reserve's, distinguished by their addresses; each is returned to its origin.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller fulfils the requirements, which are those of malloc.
        let piece = unsafe { System.alloc(layout) };
        if piece.is_null() { take(layout) } else { piece }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller fulfils the requirements, which are those of malloc.
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
            // SAFETY: the caller does not use the old piece any more.
            unsafe { self.dealloc(piece, layout) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests do not use the reserve, because malloc has memory.
    #[test]
    fn pieces_do_not_overlap_and_are_all_returned() {
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
        // A piece that grows is moved to malloc memory with its content.
        let (piece, layout, value) = pieces.pop().unwrap();
        // SAFETY: taken above, given up here.
        let moved = unsafe { Allocator.realloc(piece, layout, 100_000) };
        assert!(!is_ours(moved));
        // SAFETY: `moved` is longer than that.
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

        // Every piece of every size can be taken, and no two overlap.
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
