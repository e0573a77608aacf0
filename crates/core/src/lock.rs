//! The locks of the standard library without poisoning.
//!
//! A panic is caught at the C interface, and the device is unusable afterwards, so an invariant that the panicking
//! thread broke is not relied on. The other threads of the program continue until they call the library again. If
//! they panicked because of a poisoned lock, the failure would only spread.

use std::sync::{self, LockResult, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard};
use std::sync::{TryLockError, WaitTimeoutResult};
use std::time::Duration;

/// The guard of a lock, whether or not the lock is poisoned.
#[inline]
pub(crate) fn ignore_poison<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Acquires the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        ignore_poison(self.0.lock())
    }

    /// Acquires the lock if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A reader-writer lock.
#[derive(Debug, Default)]
pub struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Acquires the lock for reading.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        ignore_poison(self.0.read())
    }

    /// Acquires the lock for writing.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        ignore_poison(self.0.write())
    }
}

/// A condition variable for threads that hold a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// A condition variable that no thread waits for.
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Releases the lock, waits, and acquires it again. It may return without a notification.
    #[inline]
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        ignore_poison(self.0.wait(guard))
    }

    /// As [`Condvar::wait`], but for at most `time`.
    #[inline]
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> (MutexGuard<'a, T>, WaitTimeoutResult) {
        ignore_poison(self.0.wait_timeout(guard, time))
    }

    /// Wakes one waiting thread.
    #[inline]
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    #[inline]
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_of_the_holder_leaves_a_lock_usable() {
        let mutex = Mutex::new(1);
        let table = RwLock::new(1);
        let died = catch_unwind(AssertUnwindSafe(|| {
            let _held = (mutex.lock(), table.write());
            panic!("while both are held");
        }));
        assert!(died.is_err());
        assert_eq!(*mutex.lock(), 1);
        assert_eq!(mutex.try_lock().as_deref(), Some(&1));
        *table.write() += 1;
        assert_eq!(*table.read(), 2);
        let (guard, result) = Condvar::new().wait_timeout(mutex.lock(), Duration::ZERO);
        assert_eq!((*guard, result.timed_out()), (1, true));
    }

    #[test]
    fn a_held_lock_is_not_acquired_again() {
        let mutex = Mutex::new(());
        let _held = mutex.lock();
        assert!(mutex.try_lock().is_none());
    }
}
