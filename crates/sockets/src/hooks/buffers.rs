//! What the hooks of UDP sockets share: buffers of threads, and lists of buffers of the program.

use crate::limits;
use crate::message::Kind;
use crate::sys;
use libc::{c_int, iovec, msghdr, size_t};
use std::cell::Cell;
use std::net::SocketAddr;

/// A buffer of a thread for one datagram. Callers hold a raw pointer and no guard, so nothing has to be dropped if the thread is
/// cancelled in a system call.
struct Buffer {
    at: Cell<*mut u8>,
    /// Whether a call uses the buffer. A signal handler that has interrupted this call must use another buffer.
    busy: Cell<bool>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        free(self.at.get());
    }
}

thread_local! {
    static BUFFER: Buffer = const { Buffer { at: Cell::new(std::ptr::null_mut()), busy: Cell::new(false) } };
}

/// Maps a buffer. The allocator is not used, because a signal handler may have interrupted it. Returns null if there is no memory.
fn make() -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: this is a new mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), limits::RECORD, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    at.cast()
}

fn free(at: *mut u8) {
    if !at.is_null() {
        sys::unmap(at.cast(), limits::RECORD);
    }
}

/// Returns a buffer of [`limits::RECORD`] bytes, which the caller passes to [`give_back`] after use. Returns null if there is no memory.
pub(super) fn take() -> *mut u8 {
    let own = BUFFER.try_with(|b| {
        if b.busy.replace(true) {
            return None;
        }
        if b.at.get().is_null() {
            b.at.set(make());
        }
        let at = b.at.get();
        // If there is no memory, the caller gets no buffer and will not release it, so the flag is cleared here.
        b.busy.set(!at.is_null());
        Some(at)
    });
    own.ok().flatten().unwrap_or_else(make)
}

pub(super) fn give_back(at: *mut u8) {
    let is_own = BUFFER.try_with(|b| b.at.get() == at && b.busy.replace(false));
    if is_own != Ok(true) {
        free(at);
    }
}

/// Returns whether the kernel would accept the buffer list of the message. A call with another list is passed to the kernel, which
/// returns the error.
///
/// # Safety
/// `msg` is readable, and so is its list, unless the list is longer than the kernel accepts.
pub(super) unsafe fn is_sound(msg: *const msghdr) -> bool {
    // SAFETY: upheld by the caller.
    unsafe {
        (*msg).msg_iovlen <= limits::BUFFERS
            && ((*msg).msg_iovlen == 0 || !(*msg).msg_iov.is_null())
            && parts(msg)
                .iter()
                .all(|part| !part.iov_base.is_null() || part.iov_len == 0)
    }
}

/// Returns the buffer list of a message.
///
/// # Safety
/// The message is valid.
pub(super) unsafe fn parts<'a>(msg: *const msghdr) -> &'a [iovec] {
    // SAFETY: upheld by the caller.
    unsafe {
        if (*msg).msg_iov.is_null() {
            return &[];
        }
        std::slice::from_raw_parts((*msg).msg_iov, (*msg).msg_iovlen)
    }
}

/// Copies bytes to a list of buffers. Returns the number of bytes copied.
///
/// # Safety
/// The buffers are writable.
pub(super) unsafe fn scatter(bytes: &[u8], parts: &[iovec]) -> usize {
    let mut done = 0;
    for part in parts {
        let n = part.iov_len.min(bytes.len() - done);
        if n > 0 {
            // SAFETY: upheld by the caller; at least `n` bytes are left in both.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), part.iov_base.cast(), n);
            }
        }
        done += n;
    }
    done
}

/// Copies the bytes of a list of buffers to `at`.
///
/// # Safety
/// The buffers are readable, and `at` has room for all of them.
pub(super) unsafe fn gather(parts: &[iovec], at: *mut u8) {
    let mut done = 0;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        // SAFETY: upheld by the caller.
        unsafe { std::ptr::copy_nonoverlapping(part.iov_base.cast(), at.add(done), part.iov_len) };
        done += part.iov_len;
    }
}

/// Returns the result of the program's call for a datagram of `length` bytes, of which `done` were copied.
pub(super) fn result((done, length): (usize, usize), flags: c_int) -> isize {
    // For an error report the kernel does not return the full length.
    if flags & libc::MSG_TRUNC != 0 && flags & libc::MSG_ERRQUEUE == 0 {
        length as isize
    } else {
        done as isize
    }
}

/// Returns a message header with this list of buffers.
pub(super) fn header(parts: *mut iovec, n: size_t) -> msghdr {
    // SAFETY: an all-zero message header is valid.
    let mut m: msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = parts;
    m.msg_iovlen = n as _;
    m
}

/// How to send a datagram as a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) peer: SocketAddr,
    pub(super) kind: Kind,
    /// Payload bytes.
    pub(super) length: usize,
}
