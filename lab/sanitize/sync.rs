//! What ThreadSanitizer has to know of a standard library that was built without it.
//!
//! Most of a lock is inlined into our code and seen. Not seen is what happens inside of the standard library's own
//! machine code: the slow way into a contended lock, waiting for a condition, the first call of a `Once`. The linker's
//! `--wrap` leads calls of these functions here, where they are reported to ThreadSanitizer; `xtask` gives the functions
//! their mangled names. The words that are named are the ones on which the inlined parts synchronize, so the two parts
//! make one picture. Nothing is reported that the functions do not do: a race that a lock does not prevent stays a race.

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

/// A lock for readers and a writer has two words; which one is its state is the compiler's choice.
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

/// The release comes before the state is set to complete: a thread that sees that state must find it.
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

/// The thread that drops the last `Arc` counts down with Release and then has a fence with Acquire. ThreadSanitizer knows no
/// fences, so the counting down is reported as both.
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
