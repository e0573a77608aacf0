//! The hooks of the C library's streams: `fdopen`, `dprintf` and their variants. The C library's own functions make system calls
//! directly. On an upgraded connection these would read messages of the protocol in place of the program's data, and write data that is in
//! no message.

use super::cookie;
use super::life::pin;
use super::variadic::with_list;
use crate::conn::show;
use crate::conn::sock::Mode;
use crate::conn::table::{self, Entry};
use crate::real;
use libc::{c_char, c_int, c_void};
use sockets_base::stat::Why;
use std::ffi::CStr;
use std::ptr::null_mut;

unsafe extern "C-unwind" {
    fn vasprintf(to: *mut *mut c_char, format: *const c_char, list: *mut c_void) -> c_int;
    fn __vasprintf_chk(
        to: *mut *mut c_char,
        flag: c_int,
        format: *const c_char,
        list: *mut c_void,
    ) -> c_int;
}

/// See `fdopen(3)`. An accepted connection whose first bytes have arrived becomes plain. The `FILE` of a connection that is upgraded, or
/// may be upgraded later, calls this library.
///
/// # Safety
/// The requirements of `fdopen` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    match table::get(fd) {
        Entry::Tcp => {
            pin(fd);
            show::plain(fd, Why::Stdio);
        }
        Entry::Sock(sock) => {
            match sock.mode() {
                Mode::Accepted => {
                    sock.refuse(fd, Why::Stdio);
                }
                _ => {
                    sock.decide(fd, false);
                }
            }
            if sock.mode() != Mode::Plain && !mode.is_null() {
                // SAFETY: upheld by the caller.
                return cookie::open(fd, unsafe { CStr::from_ptr(mode) });
            }
        }
        Entry::Dgram(dgram) => dgram.pin(fd, Why::Stdio),
        _ => {}
    }
    // SAFETY: upheld by the caller.
    unsafe { real::fdopen(fd, mode) }
}

/// Returns whether the library has to see what is written to `fd`.
fn is_known(fd: c_int) -> bool {
    matches!(table::get(fd), Entry::Sock(_) | Entry::Dgram(_))
}

/// Writes a text that the C library has formatted. `n` is the result of formatting it.
///
/// # Safety
/// `text` was allocated by the C library unless `n` is negative, and has `n` bytes.
unsafe fn print(fd: c_int, text: *mut c_char, n: c_int) -> c_int {
    let Ok(len) = usize::try_from(n) else {
        return -1;
    };
    // SAFETY: upheld by the caller. If the thread is cancelled meanwhile, the text is not freed.
    let done = unsafe { cookie::write_all(fd, text, len) };
    // SAFETY: as above. `free` keeps errno.
    unsafe { libc::free(text.cast()) };
    if done == len { n } else { -1 }
}

/// See `vdprintf(3)`. A `va_list` is passed by its address on the supported processors.
///
/// # Safety
/// The requirements of `vdprintf` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vdprintf(
    fd: c_int,
    format: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        if !is_known(fd) {
            return real::vdprintf(fd, format, list);
        }
        let mut text = null_mut();
        let n = vasprintf(&raw mut text, format, list);
        print(fd, text, n)
    }
}

/// See `vdprintf(3)`. Called by programs that were compiled with `_FORTIFY_SOURCE`.
///
/// # Safety
/// The requirements of `vdprintf` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    list: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe {
        if !is_known(fd) {
            return real::__vdprintf_chk(fd, flag, format, list);
        }
        let mut text = null_mut();
        let n = __vasprintf_chk(&raw mut text, flag, format, list);
        print(fd, text, n)
    }
}

/// See `dprintf(3)`.
///
/// # Safety
/// The requirements of `dprintf` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dprintf(fd: c_int, format: *const c_char) -> c_int {
    with_list!(vdprintf, 2);
}

/// See `dprintf(3)`. Called by programs that were compiled with `_FORTIFY_SOURCE`.
///
/// # Safety
/// The requirements of `dprintf` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __dprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
) -> c_int {
    with_list!(__vdprintf_chk, 3);
}
