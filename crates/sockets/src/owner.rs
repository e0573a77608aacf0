//! Which process uses a stream: a word of each stream in memory that forked processes share.

use crate::limits;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

static WORDS: OnceLock<Option<&'static [AtomicU32]>> = OnceLock::new();
static NEXT: AtomicUsize = AtomicUsize::new(0);
static ME: AtomicU32 = AtomicU32::new(0);

fn map() -> Option<&'static [AtomicU32]> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory, which is never unmapped.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), limits::OWNERS, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    let words = limits::OWNERS / size_of::<AtomicU32>();
    // SAFETY: so long is the mapping, zeros are valid words, and only atomics access it.
    Some(unsafe { std::slice::from_raw_parts(at.cast(), words) })
}

/// A word for a stream. Streams share words when there are more than words: then a fork with upgraded streams may leave
/// one that is shared to the wrong process, which gets EIO.
pub fn word() -> Option<&'static AtomicU32> {
    let words = (*WORDS.get_or_init(map))?;
    words.get(NEXT.fetch_add(1, Ordering::Relaxed) % words.len())
}

/// The number of this process.
pub fn me() -> u32 {
    match ME.load(Ordering::Relaxed) {
        0 => {
            let me = std::process::id();
            ME.store(me, Ordering::Relaxed);
            me
        }
        me => me,
    }
}

/// Whether this is a child that has the memory of another process, until it executes a program: of vfork, for example. What it
/// does with its descriptors concerns the kernel alone.
pub fn is_visitor() -> bool {
    me() != std::process::id()
}

/// In the child of a fork.
pub fn forked() {
    ME.store(0, Ordering::Relaxed);
}
