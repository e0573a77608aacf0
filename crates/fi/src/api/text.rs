//! Texts of errors.

use std::ffi::CStr;

use libc::{c_char, c_int};

use crate::abi::*;

/// Returns the text of an error that only libfabric has. The C library does not know these numbers.
fn of_libfabric(error: c_int) -> Option<&'static CStr> {
    Some(match error {
        FI_EOTHER => c"Another error",
        FI_ETOOSMALL => c"The buffer is too small",
        FI_EOPBADSTATE => c"Not permitted in this state",
        FI_EAVAIL => c"There is an error to read",
        FI_EBADFLAGS => c"Flags that are not supported",
        FI_ENOEQ => c"No event queue",
        FI_EDOMAIN => c"Another domain",
        FI_ENOCQ => c"No completion queue",
        FI_ECRC => c"Wrong checksum",
        FI_ETRUNC => c"The message was truncated",
        FI_ENOKEY => c"No such key",
        FI_ENOAV => c"No address vector",
        FI_EOVERRUN => c"The queue has overflowed",
        FI_ENORX => c"The peer has no receive",
        _ => return None,
    })
}

/// Returns the text of an error, and copies as much of it to `buf` as fits.
///
/// # Safety
/// `buf` is null or has `len` bytes.
pub(crate) unsafe fn of_error(error: c_int, buf: *mut c_char, len: usize) -> *const c_char {
    // SAFETY: every number has a text; the rest is upheld by the caller.
    unsafe {
        let text =
            of_libfabric(error).map_or_else(|| libc::strerror(error).cast_const(), CStr::as_ptr);
        if !buf.is_null() && len > 0 {
            libc::strncpy(buf, text, len);
            *buf.add(len - 1) = 0;
        }
        text
    }
}
