//! Locks and atomics: those of the standard library, or of loom when its tests are built.
//!
//! Locks ignore poisoning: a panic is caught at the border to C and breaks the device, and until then other threads go on.

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::{
        MutexGuard, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        MutexGuard, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};

#[cfg(loom)]
use loom::sync as imp;
#[cfg(not(loom))]
use std::sync as imp;
use std::sync::PoisonError;

/// A mutex that ignores poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reader-writer lock that ignores poisoning.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(imp::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::RwLock::new(value))
    }

    #[inline]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fence between a `SeqCst` store and a later `SeqCst` load whose order matters. Only loom needs it: loom treats
/// `SeqCst` accesses as `AcqRel`, and orders fences only.
#[inline]
pub(crate) fn store_load_fence() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
