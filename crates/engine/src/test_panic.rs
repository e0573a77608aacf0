//! Panics on demand, for tests of the handling of internal errors.
//!
//! This works only in builds with debug assertions, and only when `ANYWARP_TEST_PANIC` is set. A request that is
//! posted with the identifier [`IN_CALL`] panics in the call; one with [`IN_WORKER`] makes the worker panic when it
//! next handles the socket or a timeout of a reliable queue pair.

#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicBool, Ordering};

/// Identifier of a request that panics in the call: "panic" in ASCII, then 1.
#[cfg(debug_assertions)]
pub(crate) const IN_CALL: u64 = 0x7061_6e69_6300_0001;
/// Identifier of a request that makes the worker panic: "panic" in ASCII, then 2.
#[cfg(debug_assertions)]
pub(crate) const IN_WORKER: u64 = 0x7061_6e69_6300_0002;

#[cfg(debug_assertions)]
static ARMED: AtomicBool = AtomicBool::new(false);

/// Called for each request that is posted: panics for [`IN_CALL`], and requests the panic of the worker for [`IN_WORKER`].
#[cfg(debug_assertions)]
#[allow(clippy::panic, reason = "panic requested by a test")]
pub(crate) fn posted(id: u64) {
    if !matches!(id, IN_CALL | IN_WORKER) || !crate::config::config().test_panic {
        return;
    }
    if id == IN_CALL {
        panic!("panic requested by a test");
    }
    ARMED.store(true, Ordering::Relaxed);
}

/// Called when the worker, or a program thread that polls in place of the worker, handles a queue pair: panics in the
/// worker if [`posted`] has requested it.
#[cfg(debug_assertions)]
#[allow(clippy::panic, reason = "panic requested by a test")]
pub(crate) fn working() {
    if std::thread::current().name() == Some(crate::reactor::worker::THREAD_NAME)
        && ARMED.swap(false, Ordering::Relaxed)
    {
        panic!("panic requested by a test");
    }
}

/// Does nothing in builds without debug assertions.
#[cfg(not(debug_assertions))]
pub(crate) fn posted(_id: u64) {}

/// Does nothing in builds without debug assertions.
#[cfg(not(debug_assertions))]
pub(crate) fn working() {}
