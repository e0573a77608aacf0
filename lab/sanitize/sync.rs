//! Reports synchronization inside the standard library to ThreadSanitizer, because the standard library was compiled
//! without it.
//!
//! Most code of locks is inlined into the program and is therefore instrumented. Some functions are not: the slow path
//! of a contended lock, waiting for a condition variable, the first call of a `Once`. The linker's `--wrap` redirects
//! calls of these functions to this file, which reports them. `cargo lab sanitize` maps the mangled names. The reported
//! addresses are those on which the inlined code synchronizes, so that both parts refer to the same object. Only
//! synchronization that the functions really do is reported, so real data races are still detected.

use std::sync::OnceState;
use std::time::Duration;

unsafe extern "C" {
    fn __tsan_acquire(address: *const u32);
    fn __tsan_release(address: *const u32);
    fn __real___tsan_atomic64_fetch_sub(address: *mut u64, value: u64, order: i32) -> u64;
}

unsafe extern "Rust" {
    fn real_lock_contended(mutex: *const u32);
    fn real_read_contended(lock: *const u32);
    fn real_write_contended(lock: *const u32);
    fn real_wait(condvar: *const u32, mutex: *const u32);
    fn real_wait_timeout(condvar: *const u32, mutex: *const u32, timeout: Duration) -> bool;
    fn real_call(once: *const u32, ignore_poisoning: bool, f: &mut dyn FnMut(&OnceState));
}

#[unsafe(no_mangle)]
unsafe fn wrap_lock_contended(mutex: *const u32) {
    unsafe {
        real_lock_contended(mutex);
        __tsan_acquire(mutex);
    }
}

/// A read-write lock has two words. The compiler chooses which of them holds the state, so both are reported.
unsafe fn acquire_both(lock: *const u32) {
    unsafe {
        __tsan_acquire(lock);
        __tsan_acquire(lock.add(1));
    }
}

#[unsafe(no_mangle)]
unsafe fn wrap_read_contended(lock: *const u32) {
    unsafe {
        real_read_contended(lock);
        acquire_both(lock);
    }
}

#[unsafe(no_mangle)]
unsafe fn wrap_write_contended(lock: *const u32) {
    unsafe {
        real_write_contended(lock);
        acquire_both(lock);
    }
}

#[unsafe(no_mangle)]
unsafe fn wrap_wait(condvar: *const u32, mutex: *const u32) {
    unsafe {
        __tsan_release(mutex);
        real_wait(condvar, mutex);
        __tsan_acquire(mutex);
    }
}

#[unsafe(no_mangle)]
unsafe fn wrap_wait_timeout(condvar: *const u32, mutex: *const u32, timeout: Duration) -> bool {
    unsafe {
        __tsan_release(mutex);
        let in_time = real_wait_timeout(condvar, mutex, timeout);
        __tsan_acquire(mutex);
        in_time
    }
}

/// Reports the release at the end of `f`, before the `Once` is complete: a thread that finds the `Once` complete reports an acquire, and
/// the release must have been reported by then.
#[unsafe(no_mangle)]
unsafe fn wrap_call(once: *const u32, ignore_poisoning: bool, f: &mut dyn FnMut(&OnceState)) {
    unsafe {
        real_call(once, ignore_poisoning, &mut |state: &OnceState| {
            f(state);
            __tsan_release(once);
        });
        __tsan_acquire(once);
    }
}

/// The thread that drops the last `Arc` decrements the count with Release, followed by an Acquire fence. ThreadSanitizer does not
/// support fences, so the decrement is reported with the order AcqRel.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap___tsan_atomic64_fetch_sub(
    address: *mut u64,
    value: u64,
    order: i32,
) -> u64 {
    const RELEASE: i32 = 3;
    const ACQUIRE_AND_RELEASE: i32 = 4;
    let order = if order == RELEASE {
        ACQUIRE_AND_RELEASE
    } else {
        order
    };
    unsafe { __real___tsan_atomic64_fetch_sub(address, value, order) }
}
