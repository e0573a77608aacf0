//! Locks and atomics: those of the standard library, or of loom when its tests are built.

#[cfg(not(loom))]
pub(crate) use crate::lock::{Mutex, RwLock};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};

#[cfg(loom)]
pub(crate) use self::model::{Mutex, RwLock};
#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::{
        MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    },
    thread::yield_now,
};

/// The types of [`crate::lock`] for loom.
#[cfg(loom)]
mod model {
    use loom::sync::{self, MutexGuard, RwLockReadGuard, RwLockWriteGuard};

    use crate::lock::ignore_poison;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            ignore_poison(self.0.lock())
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct RwLock<T>(sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            ignore_poison(self.0.read())
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            ignore_poison(self.0.write())
        }
    }
}

/// The fence between a `SeqCst` store and a later `SeqCst` load whose order matters. Only loom needs it, because loom treats
/// `SeqCst` accesses as `AcqRel` accesses, and supports the order of `SeqCst` only for fences.
#[inline]
pub(crate) fn store_load_fence() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
