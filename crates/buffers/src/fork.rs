//! Children of `fork(2)`: what the parent has registered is not theirs to end, and locks of the parent may be held for ever.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How many forks lie between this process and the one that used the library first.
static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
}

/// The generation of this process, for [`is_inherited`]. From the first call on, forks are noticed.
pub(crate) fn generation() -> u32 {
    static ONCE: Once = Once::new();
    // SAFETY: a function without arguments that changes one value.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    GENERATION.load(Relaxed)
}

/// Returns whether something is of a parent of this process.
pub(crate) fn is_inherited(generation: u32) -> bool {
    GENERATION.load(Relaxed) != generation
}

/// Returns whether this process is a child of one that has used the library.
pub(crate) fn is_child() -> bool {
    is_inherited(0)
}
