//! Streams of the C library (`FILE`) that call this library's `read` and `write`.

use super::data::{read, write};
use super::fail;
use super::life::close;
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use std::ffi::CStr;
use std::ptr::{null_mut, without_provenance_mut};

/// The functions of a stream that [`fopencookie`] makes (`cookie_io_functions_t`).
#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut i64, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

/// The first fields of the C library's `FILE`. Programs were compiled with its layout, so it does not change.
#[repr(C)]
struct File {
    flags: c_int,
    buffers: [*mut c_char; 11],
    markers: *mut c_void,
    chain: *mut c_void,
    number: c_int,
}

unsafe extern "C-unwind" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut File;
}

unsafe extern "C-unwind" fn cookie_read(fd: *mut c_void, to: *mut c_char, n: size_t) -> ssize_t {
    // SAFETY: the C library passes its buffer.
    unsafe { read(fd.addr() as c_int, to.cast(), n) }
}

/// Writes all bytes, as the C library does on its own streams. Returns how many were written.
unsafe extern "C-unwind" fn cookie_write(
    fd: *mut c_void,
    from: *const c_char,
    n: size_t,
) -> ssize_t {
    // SAFETY: the C library passes its buffer.
    (unsafe { write_all(fd.addr() as c_int, from, n) }) as ssize_t
}

unsafe extern "C-unwind" fn cookie_seek(_: *mut c_void, _: *mut i64, _: c_int) -> c_int {
    fail(libc::ESPIPE)
}

unsafe extern "C-unwind" fn cookie_close(fd: *mut c_void) -> c_int {
    close(fd.addr() as c_int)
}

/// Writes until an error occurs. Returns how many bytes were written.
///
/// # Safety
/// `from` points to `n` bytes.
pub(super) unsafe fn write_all(fd: c_int, from: *const c_char, n: size_t) -> size_t {
    let mut done = 0;
    while done < n {
        // SAFETY: upheld by the caller.
        let sent = unsafe { write(fd, from.add(done).cast(), n - done) };
        let Ok(sent @ 1..) = usize::try_from(sent) else {
            break;
        };
        done += sent;
    }
    done
}

/// Opens a stream for `fd`. `mode` is that of `fdopen(3)`.
pub(super) fn open(fd: c_int, mode: &CStr) -> *mut c_void {
    let mode = mode.to_bytes();
    let both = mode.contains(&b'+');
    let mode = match mode.first() {
        Some(b'r') if both => c"r+",
        Some(b'r') => c"r",
        // `fdopen` does not truncate, and all writes to a socket append.
        Some(b'w' | b'a') if both => c"w+",
        Some(b'w' | b'a') => c"w",
        _ => {
            fail(libc::EINVAL);
            return null_mut();
        }
    };
    let functions = Functions {
        read: cookie_read,
        write: cookie_write,
        seek: cookie_seek,
        close: cookie_close,
    };
    let cookie = without_provenance_mut(fd as usize);
    // SAFETY: the mode is a C string.
    let file = unsafe { fopencookie(cookie, mode.as_ptr(), functions) };
    // SAFETY: the stream is new, and `File` has the layout of its first fields.
    if let Some(file) = unsafe { file.as_mut() } {
        // The result of `fileno`.
        file.number = fd;
    }
    file.cast()
}
