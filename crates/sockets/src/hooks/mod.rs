//! The functions that programs call in place of the C library's.
//!
//! Each function looks the descriptor up and passes calls that do not concern this library to the kernel. A thread may be
//! cancelled while it waits in the kernel, which unwinds its stack. So the functions that directly make calls that may wait hold no values
//! with destructors, except values that record that the thread no longer sleeps (`data.rs`, `wait.rs`), and the lists of descriptors in
//! `wait.rs`.

mod batch;
mod buffers;
mod cookie;
pub mod data;
mod dgram;
pub mod exec;
pub mod life;
mod reliable;
pub mod stdio;
mod variadic;
pub mod wait;

use crate::sys;
use libc::c_int;

/// Sets errno and returns -1.
pub(crate) fn fail(e: c_int) -> c_int {
    sys::set_errno(e);
    -1
}

/// Like [`fail`], for functions that return a length.
pub(crate) fn fail_long(e: c_int) -> isize {
    sys::set_errno(e);
    -1
}

/// Returns whether no object of the program can be at this address: it is in the first or the last page, like NULL, other small numbers and
/// -1. The kernel's calls fail with EFAULT there.
#[inline]
pub(crate) fn is_nowhere<T>(at: *const T) -> bool {
    const PAGE: usize = 4096;
    at.addr().wrapping_add(PAGE) < 2 * PAGE
}
