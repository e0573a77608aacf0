//! The hooks of the C library's streams: `fdopen`, `dprintf` and their variants. The C library's own functions make system calls
//! directly, which on an upgraded connection would read and write messages of the protocol in place of the program's data.

use super::cookie;
use super::life::pin;
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

/// The body of a function with variable arguments, after `$named` arguments that are integers or pointers: makes a `va_list` of the others, and
/// calls `$list` with the named arguments and, in the register `$place`, the address of the list. The oldest supported version of Rust cannot
/// define such a function.
#[cfg(target_arch = "x86_64")]
macro_rules! with_list {
    ($list:path, $named:literal, $place:literal) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            // The list at 0; the save area at 32, with the general registers and then the vector registers.
            "sub rsp, 216",
            ".cfi_adjust_cfa_offset 216",
            "mov [rsp + 32], rdi",
            "mov [rsp + 40], rsi",
            "mov [rsp + 48], rdx",
            "mov [rsp + 56], rcx",
            "mov [rsp + 64], r8",
            "mov [rsp + 72], r9",
            "test al, al",
            "je 2f",
            "movaps [rsp + 80], xmm0",
            "movaps [rsp + 96], xmm1",
            "movaps [rsp + 112], xmm2",
            "movaps [rsp + 128], xmm3",
            "movaps [rsp + 144], xmm4",
            "movaps [rsp + 160], xmm5",
            "movaps [rsp + 176], xmm6",
            "movaps [rsp + 192], xmm7",
            "2:",
            concat!("mov dword ptr [rsp], 8 * ", $named),
            "mov dword ptr [rsp + 4], 48",
            "lea rax, [rsp + 224]",
            "mov [rsp + 8], rax",
            "lea rax, [rsp + 32]",
            "mov [rsp + 16], rax",
            concat!("mov ", $place, ", rsp"),
            "call {list}",
            "add rsp, 216",
            ".cfi_adjust_cfa_offset -216",
            "ret",
            ".cfi_endproc",
            list = sym $list,
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! with_list {
    ($list:path, $named:literal, $place:literal) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            // The list at 16; the general registers x2 to x7 at 48, and the vector registers at 96.
            "stp x29, x30, [sp, #-256]!",
            ".cfi_def_cfa_offset 256",
            ".cfi_offset x29, -256",
            ".cfi_offset x30, -248",
            "mov x29, sp",
            "stp x2, x3, [sp, #48]",
            "stp x4, x5, [sp, #64]",
            "stp x6, x7, [sp, #80]",
            "stp q0, q1, [sp, #96]",
            "stp q2, q3, [sp, #128]",
            "stp q4, q5, [sp, #160]",
            "stp q6, q7, [sp, #192]",
            "add x8, sp, #256",
            "str x8, [sp, #16]",
            "add x8, sp, #96",
            "str x8, [sp, #24]",
            "add x8, sp, #224",
            "str x8, [sp, #32]",
            concat!("mov w8, #-8 * (8 - ", $named, ")"),
            "str w8, [sp, #40]",
            "mov w8, #-128",
            "str w8, [sp, #44]",
            concat!("add ", $place, ", sp, #16"),
            "bl {list}",
            "ldp x29, x30, [sp], #256",
            "ret",
            ".cfi_endproc",
            list = sym $list,
        )
    };
}

/// See `dprintf(3)`.
///
/// # Safety
/// The requirements of `dprintf` apply.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dprintf(fd: c_int, format: *const c_char) -> c_int {
    #[cfg(target_arch = "x86_64")]
    with_list!(vdprintf, 2, "rdx");
    #[cfg(target_arch = "aarch64")]
    with_list!(vdprintf, 2, "x2");
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
    #[cfg(target_arch = "x86_64")]
    with_list!(__vdprintf_chk, 3, "rcx");
    #[cfg(target_arch = "aarch64")]
    with_list!(__vdprintf_chk, 3, "x3");
}
