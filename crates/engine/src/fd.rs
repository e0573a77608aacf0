//! File descriptors of the engine, which a forked child must not share.

use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::capture::{self, Direction};
use crate::process::{self, Changing};
use crate::sys::thread::Uncancelled;

/// A descriptor of the engine. In a forked child it is replaced by an unconnected socket, so that the child keeps no
/// connection open.
#[derive(Debug)]
pub struct EngineFd(ManuallyDrop<OwnedFd>);

impl EngineFd {
    /// Takes a descriptor.
    pub fn new(fd: OwnedFd) -> Self {
        process::record_fd(fd.as_raw_fd());
        Self(ManuallyDrop::new(fd))
    }

    /// Sends bytes to the stream: a start-up frame, a Terminate that follows it, or a wake-up.
    pub(crate) fn send(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let seen = capture::begin();
        let n = rustix::net::send(self, bytes, rustix::net::SendFlags::NOSIGNAL)?;
        if let Some(at) = seen {
            capture::stream(
                self.get(),
                at,
                Direction::Out,
                bytes.get(..n).unwrap_or(bytes),
            );
        }
        Ok(n)
    }

    /// Receives bytes of start-up frames or wake-ups, without waiting; 0 at the end of the stream.
    pub(crate) fn recv(&self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let result = rustix::net::recv(self, &mut *buffer, flags).map(|(n, _)| n);
        match result {
            Ok(0) => capture::stream_ended(self.get(), false),
            Ok(n) => {
                if let Some(at) = capture::begin() {
                    capture::stream(
                        self.get(),
                        at,
                        Direction::In,
                        buffer.get(..n).unwrap_or(&[]),
                    );
                }
            }
            Err(_) => {}
        }
        result
    }

    /// Sends a datagram of the connection manager.
    pub(crate) fn send_to(&self, bytes: &[u8], to: SocketAddr) -> rustix::io::Result<()> {
        let seen = capture::begin();
        rustix::net::sendto(self, bytes, rustix::net::SendFlags::NOSIGNAL, &to)?;
        if let Some(at) = seen {
            capture::datagram(self.get(), at, Direction::Out, None, to, bytes);
        }
        Ok(())
    }

    /// Borrows the descriptor.
    pub fn get(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    /// The number of the descriptor.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for EngineFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for EngineFd {
    fn drop(&mut self) {
        capture::closed(self.0.as_raw_fd());
        let _changing = Changing::new();
        process::forget_fd(self.0.as_raw_fd());
        // A thread of the program may get here when it posts or polls, and close(2) is a cancellation point.
        let _inside = Uncancelled::new();
        // SAFETY: the descriptor is dropped once, and is not used any more.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// Duplicates a descriptor of the program. `None` if it is not open.
pub fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call takes a number, and the kernel checks that it is a descriptor.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: the copy was just made, and nothing else owns it.
    (copy >= 0).then(|| unsafe { std::os::fd::FromRawFd::from_raw_fd(copy) })
}

/// Identifies a file: its device and inode.
pub fn identity(file: &OwnedFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}
