//! Locks that ignore poisoning.
//!
//! A panic is caught at the C boundary, and the other threads of the program continue. A lock that panics because another
//! thread did would only spread the failure.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Acquires a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
