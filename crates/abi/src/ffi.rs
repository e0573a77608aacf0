//! The entry and exit of functions that C calls: panics and error reporting.
//!
//! The body of every such function runs inside [`errno`], [`minus_one`], [`null`], [`nothing`], [`or`] or [`value`]. The name
//! tells how the function reports a failure: [`errno`] sets `errno` and returns its value; the others set `errno` and return the
//! value that means failure. A panic is caught here, because it must not unwind into C. The device is marked as broken
//! (`anywarp_engine::engine::caught`), and the call fails with `EIO`.
//!
//! The `_fast` forms are for the data path. They make no system call that is a cancellation point, so they need not
//! disable the cancellation of the thread.

use std::any::Any;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anywarp_core::error::Misuse;
use anywarp_engine::log;
use anywarp_engine::sys::thread::Uncancelled;

/// A value of `errno`.
pub type Errno = c_int;

/// Runs a body; a panic becomes `EIO`.
#[inline]
fn catch<T>(name: &'static str, body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Unwind safety: this library treats the caller's memory as plain bytes, and protects its own state by locks that recover from
    // poisoning.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => {
            panicked(name, payload);
            Err(libc::EIO)
        }
    }
}

/// For functions that return 0 or an errno value. The manual pages call the result the value of errno. Some programs read `errno`
/// instead of the result: UCX prints it (`%m`). So a failure also sets `errno`.
pub fn errno(name: &'static str, body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    let _inside = Uncancelled::new();
    errno_fast(name, body)
}

/// [`errno`] for the data path.
#[inline]
pub fn errno_fast(name: &'static str, body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match catch(name, body) {
        Ok(()) => 0,
        Err(e) => fail(e, e),
    }
}

/// [`errno_fast`] for polls. It leaves `errno` alone, because an empty queue is no failure.
#[inline]
pub fn code_fast(name: &'static str, body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match catch(name, body) {
        Ok(()) => 0,
        Err(e) => e,
    }
}

/// For functions that return a number, or -1 with `errno`.
pub fn minus_one<T: From<i8>>(name: &'static str, body: impl FnOnce() -> Result<T, Errno>) -> T {
    or(name, T::from(-1), body)
}

/// For functions that return a pointer, or null with `errno`.
pub fn null<T>(name: &'static str, body: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    or(name, std::ptr::null_mut(), body)
}

/// For functions that return nothing.
pub fn nothing(name: &'static str, body: impl FnOnce() -> Result<(), Errno>) {
    or(name, (), body);
}

/// For functions that return `failed` with `errno`.
pub fn or<T>(name: &'static str, failed: T, body: impl FnOnce() -> Result<T, Errno>) -> T {
    let _inside = Uncancelled::new();
    or_fast(name, failed, body)
}

/// For functions that cannot fail. `panicked` is the result after a panic.
pub fn value<T>(name: &'static str, panicked: T, body: impl FnOnce() -> T) -> T {
    or(name, panicked, || Ok(body()))
}

/// [`or`] for the data path.
#[inline]
pub fn or_fast<T>(name: &'static str, failed: T, body: impl FnOnce() -> Result<T, Errno>) -> T {
    match catch(name, body) {
        Ok(value) => value,
        Err(e) => fail(e, failed),
    }
}

/// Sets the caller's `errno`.
pub fn set_errno(errno: Errno) {
    // SAFETY: the C library gives every thread a valid location for errno.
    unsafe { libc::__errno_location().write(errno) };
}

/// Sets `errno` and returns `value`.
pub fn fail<T>(errno: Errno, value: T) -> T {
    set_errno(errno);
    value
}

/// Returns the `errno` that the last call of a C function has set.
pub(crate) fn last_errno() -> Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// Marks the device as broken after a panic and sets `errno` to `EIO`. The process continues.
#[doc(hidden)]
#[cold]
pub fn panicked(name: &'static str, payload: Box<dyn Any + Send>) {
    anywarp_engine::engine::caught(name, &*payload);
    // Dropping the payload of the panic may panic again, because it can have any type. So it is leaked, usually a few bytes.
    let _leaked = std::mem::ManuallyDrop::new(payload);
    set_errno(libc::EIO);
}

/// Returns the errno of an invalid call, and logs the violated rule, which the errno alone rarely identifies.
#[cold]
pub(crate) fn misuse(call: &str, e: &Misuse) -> Errno {
    if log::wants(log::Level::Warn) {
        log::write(log::Level::Warn, format_args!("{call}: {e}"));
    }
    e.errno()
}

/// Returns the errno of an I/O error.
pub(crate) fn os_errno(e: &std::io::Error) -> Errno {
    e.raw_os_error().unwrap_or(libc::EIO)
}

/// Returns a structure that C passes by pointer. `EINVAL` for null.
///
/// # Safety
/// `pointer` is null or valid for reads, and C does not write it while the reference is live.
pub(crate) unsafe fn arg<'a, T>(pointer: *const T) -> Result<&'a T, Errno> {
    // SAFETY: upheld by the caller.
    unsafe { pointer.as_ref() }.ok_or(libc::EINVAL)
}

/// Returns a structure that C passes by pointer and that the call changes. `EINVAL` for null.
///
/// # Safety
/// `pointer` is null or valid, and C does not access the structure while the reference is live.
pub(crate) unsafe fn arg_mut<'a, T>(pointer: *mut T) -> Result<&'a mut T, Errno> {
    // SAFETY: upheld by the caller.
    unsafe { pointer.as_mut() }.ok_or(libc::EINVAL)
}

/// Writes a result through a pointer that C passes. `EINVAL` for null.
///
/// # Safety
/// `pointer` is null or valid for writes.
pub(crate) unsafe fn put<T>(pointer: *mut T, value: T) -> Result<(), Errno> {
    if pointer.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller passes null or a valid pointer, and null was excluded.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes the first `len` bytes of a structure, for a caller that was compiled with an older, shorter one. If the caller's structure is
/// longer, because its header is newer than the fields that are known here, the rest becomes zero: such a field has no value.
///
/// # Safety
/// `pointer` is null or points to `len` bytes.
pub(crate) unsafe fn put_prefix<T: Copy>(
    pointer: *mut T,
    value: &T,
    len: usize,
) -> Result<(), Errno> {
    if pointer.is_null() {
        return Err(libc::EINVAL);
    }
    let known = len.min(size_of::<T>());
    let to: *mut u8 = pointer.cast();
    // SAFETY: the caller's structure has `len` bytes (guaranteed by the caller), at least `known` of which `value` has too.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), to, known);
        to.add(known).write_bytes(0, len - known);
    }
    Ok(())
}
