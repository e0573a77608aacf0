//! Locks and atomics: those of the standard library, or of loom when its tests are built.
//!
//! Only types whose use by several threads at once has a loom test come from here.

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::{
        Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};

/// Between a store and a load, both `SeqCst`, of which the order matters: nothing, except for loom, which takes
/// `SeqCst` accesses for `AcqRel` ones and knows the total order of fences only.
#[inline]
pub(crate) fn store_load_fence() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
