//! System calls of the raw peers that std does not provide. All unsafe code of this crate is here and in [`crate::sys`].
#![allow(
    unsafe_code,
    reason = "system calls that std does not offer, and memory that two processes share"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::{result, set_option};

/// `SOL_UDP` option of the kernel's datagram segmentation.
const UDP_SEGMENT: libc::c_int = 103;

/// `SOL_UDP` option of the kernel's datagram coalescing.
const UDP_GRO: libc::c_int = 104;

/// Makes the kernel split the sent bytes into datagrams of `size`.
pub(crate) fn segment(socket: &impl AsRawFd, size: u16) -> io::Result<()> {
    set_option(socket, libc::SOL_UDP, UDP_SEGMENT, size.into())
}

/// Makes the kernel deliver several datagrams as one.
pub(crate) fn coalesce(socket: &impl AsRawFd) -> io::Result<()> {
    set_option(socket, libc::SOL_UDP, UDP_GRO, 1)
}

/// Sets the sizes of the receive and send buffers in bytes, beyond the host's limit if the process is privileged.
pub(crate) fn room(socket: &impl AsRawFd, (receive, send): (i32, i32)) -> io::Result<()> {
    for (forced, asked, bytes) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, receive),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, send),
    ] {
        set_option(socket, libc::SOL_SOCKET, forced, bytes)
            .or_else(|_| set_option(socket, libc::SOL_SOCKET, asked, bytes))?;
    }
    Ok(())
}

/// Sets the congestion control of a TCP socket.
pub(crate) fn choose_congestion(socket: &impl AsRawFd, name: &str) -> io::Result<()> {
    let size = libc::socklen_t::try_from(name.len()).unwrap_or_default();
    // SAFETY: `name` outlives the call and `size` is its size.
    result(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            size,
        )
    })
}

/// Returns the congestion control of a TCP socket.
pub(crate) fn congestion(socket: &impl AsRawFd) -> io::Result<String> {
    let mut name = [0u8; 16];
    let mut size = libc::socklen_t::try_from(name.len()).unwrap_or_default();
    // SAFETY: `name` has `size` bytes, and both outlive the call.
    result(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_mut_ptr().cast(),
            &raw mut size,
        )
    })?;
    let name = name.split(|&b| b == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Lets any process of this user write to the memory of this one.
pub(crate) fn allow_access() {
    // SAFETY: the call takes only numbers. Kernels that do not restrict access do not know the option and return an error.
    let _not_restricted = unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
}

/// Writes `from` to the memory of another process.
pub(crate) fn write_into(pid: i32, to: u64, from: &[u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: from.as_ptr().cast_mut().cast(),
        iov_len: from.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(to as usize),
        iov_len: from.len(),
    };
    // SAFETY: `local` is only read. The kernel looks the other address up in the other process.
    let n = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    whole(n, from.len())
}

/// Reads `to.len()` bytes from the memory of another process.
pub(crate) fn read_from(pid: i32, from: u64, to: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: to.as_mut_ptr().cast(),
        iov_len: to.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(from as usize),
        iov_len: to.len(),
    };
    // SAFETY: `local` is `to`, which is not used elsewhere. The kernel looks the other address up in the other process.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    whole(n, to.len())
}

fn whole(n: isize, wanted: usize) -> io::Result<()> {
    match usize::try_from(n) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == wanted => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// A file that two processes have mapped.
#[derive(Debug)]
pub(crate) struct Shared {
    start: NonNull<u8>,
    len: usize,
}

impl Shared {
    /// Maps the first `len` bytes of `file`, which is at least as long.
    pub(crate) fn map(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: this is a new mapping at an address that the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Returns the eight bytes at `at` as an atomic.
    pub(crate) fn flag(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len);
        // SAFETY: the bytes are inside the mapping and aligned (checked above; mappings begin at a page). The mapping is
        // valid as long as `self`. Both processes access these bytes only as an atomic.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copies `from` to `at`. The other process must not read the bytes before a flag is set.
    pub(crate) fn put(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.len);
        // SAFETY: the range is inside the mapping (checked above), and does not overlap `from`, which is a Rust slice.
        unsafe {
            self.start
                .as_ptr()
                .add(at)
                .copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
    }

    /// Copies bytes at `at` to `to`. The other process must not write the bytes before a flag is set.
    pub(crate) fn get(&self, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= self.len);
        // SAFETY: the range is inside the mapping (checked above), and does not overlap `to`, which is a Rust slice.
        unsafe {
            to.as_mut_ptr()
                .copy_from_nonoverlapping(self.start.as_ptr().add(at), to.len());
        }
    }

    /// Polls the flag at `at` until it is `wanted`. Returns false after `turns` polls.
    pub(crate) fn spin(&self, at: usize, wanted: u64, turns: u64) -> bool {
        let flag = self.flag(at);
        for _ in 0..turns {
            if flag.load(Ordering::Acquire) == wanted {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map`, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
