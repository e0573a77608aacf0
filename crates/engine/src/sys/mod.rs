//! Safe functions around the system calls that `rustix` does not cover, one file for each subject.
//!
//! `unsafe` code of the engine is in these files and in `mem`, `shared` and `reserve`.

pub mod address;
mod cmsg;
pub mod datagram;
pub mod host;
pub mod pages;
pub mod socket;
pub mod stream;
pub mod thread;

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

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

// ---------------------------------------------------------------------- fork

/// Descriptors that a child must not keep: bit n of word n / 64.
static FDS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// How often this process and its ancestors forked since the device was first opened.
///
/// What was made in another generation belongs to an ancestor: its locks may be held by threads that do not exist
/// here, and its sockets are gone. It must not be touched.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Lets children know that the device is not theirs.
pub(crate) fn watch_fork() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Ordering::AcqRel) {
        // SAFETY: the handler is async-signal-safe: atomics and system calls only.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

/// A socket that is connected to nothing and never will be: -1 if there is none to be had.
fn dead_socket() -> RawFd {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor, and touches no memory.
    unsafe { libc::socket(libc::AF_UNIX, kind, 0) }
}

/// Puts a dead socket in the place of each of the engine's descriptors.
///
/// The connections are the parent's alone, and the numbers stay taken: the child's own files cannot be mistaken for
/// what its copies of the parent's objects name.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut dead = -1;
    let mut extra = false;
    for (word, bits) in FDS.iter().enumerate() {
        let mut bits = bits.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = (word * 64 + bits.trailing_zeros() as usize) as RawFd;
            bits &= bits - 1;
            if dead < 0 {
                dead = dead_socket();
                extra = dead >= 0;
            }
            if dead < 0 {
                // No descriptor is free: this one makes room.
                // SAFETY: a descriptor of the parent's engine, which nobody in the child uses.
                unsafe { libc::close(fd) };
                dead = dead_socket();
                extra = dead >= 0 && dead != fd;
            }
            if dead >= 0 && dead != fd {
                // SAFETY: as above; it is closed by being replaced.
                unsafe { libc::dup3(dead, fd, libc::O_CLOEXEC) };
            }
        }
    }
    if extra {
        // SAFETY: made above and named by nothing.
        unsafe { libc::close(dead) };
    }
}

struct Made<T> {
    generation: u32,
    value: T,
}

/// Something that each process has of its own: a forked child starts with a fresh one.
///
/// The parent's stays where it is, unused: another thread may have held its locks at the moment of the fork.
#[derive(Debug)]
pub struct PerProcess<T> {
    made: AtomicPtr<Made<T>>,
    fresh: fn() -> T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Will be made by `fresh` when it is first used.
    pub const fn new(fresh: fn() -> T) -> Self {
        Self {
            made: AtomicPtr::new(std::ptr::null_mut()),
            fresh,
        }
    }

    /// This process's own.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let old = self.made.load(Ordering::Acquire);
            // SAFETY: null, or made below and never freed; nobody has it mutably.
            if let Some(made) = unsafe { old.as_ref() }
                && made.generation == generation
            {
                return &made.value;
            }
            let new = Box::into_raw(Box::new(Made {
                generation,
                value: (self.fresh)(),
            }));
            match self
                .made
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            {
                // SAFETY: never freed from here on.
                Ok(_) => return unsafe { &(*new).value },
                // SAFETY: another thread was faster, and this one was shown to nobody.
                Err(_) => drop(unsafe { Box::from_raw(new) }),
            }
        }
    }
}

pub(crate) fn fd_bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let n = usize::try_from(fd).ok()?;
    FDS.get(n / 64).map(|w| (w, 1 << (n % 64)))
}
