//! Children of `fork(2)`: a child must not end registrations of the parent, and locks that the parent held stay locked in the child.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The number of forks between this process and the one that first used the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
}

/// Returns the generation of this process, for [`is_inherited`]. The first call installs a fork handler.
pub(crate) fn generation() -> u32 {
    static ONCE: Once = Once::new();
    // SAFETY: the handler takes no arguments and changes one atomic.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
    GENERATION.load(Relaxed)
}

/// Returns whether an object of this generation was created by a parent of this process.
pub(crate) fn is_inherited(generation: u32) -> bool {
    GENERATION.load(Relaxed) != generation
}

/// Returns whether this process is a child of one that has used the library.
pub(crate) fn is_child() -> bool {
    is_inherited(0)
}
