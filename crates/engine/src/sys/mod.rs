//! Safe functions around the system calls that `rustix` does not cover, one file for each subject.
//!
//! Outside tests, the `unsafe` blocks of the engine are only in these files and in `fd`, `mem`, `process`, `reserve` and
//! `shared`.

pub mod address;
mod cmsg;
pub mod datagram;
pub mod host;
pub(crate) mod loaded;
pub mod pages;
pub mod secure;
pub mod socket;
pub mod stream;
pub mod thread;

use std::io;

/// Outcome of a send or receive call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// The number of bytes that were sent or received.
    Done(usize),
    /// The socket has no room, or nothing to receive.
    WouldBlock,
    /// The peer closed its direction of the connection.
    Eof,
    /// The connection failed with this errno.
    Broken(i32),
    /// A memory region of the message was deregistered.
    Invalidated,
}

/// `errno` of the last call of this thread that failed.
fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The outcome of a send or receive call that returned -1.
fn failed() -> Io {
    match errno() {
        libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM => Io::WouldBlock,
        e => Io::Broken(e),
    }
}

/// A `msghdr` without address, buffers and control data.
fn empty_msghdr() -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: null pointers with zero lengths.
    unsafe { std::mem::zeroed() }
}
