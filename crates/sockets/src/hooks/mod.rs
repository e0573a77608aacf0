//! The functions that programs call in place of the C library's.
//!
//! Each looks the number up and passes calls on that are not about a connection of ours. What may wait in the kernel is
//! called from frames without destructors: a cancelled thread is unwound through them.

mod batch;
pub mod data;
mod dgram;
pub mod life;
pub mod wait;

use crate::sys;
use libc::c_int;

/// Returns an error as the C library does.
pub(crate) fn fail(e: c_int) -> c_int {
    sys::set_errno(e);
    -1
}

/// The same for functions that return a length.
pub(crate) fn fail_long(e: c_int) -> isize {
    sys::set_errno(e);
    -1
}
