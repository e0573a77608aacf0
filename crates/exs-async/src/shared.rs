//! Memory that the peer reads or writes while the program uses it.

use crate::Buffer;
use crate::driver::{self, Operation};
use libc::c_int;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// A buffer that the peer reads ([`Socket::share`](crate::Socket::share)) or writes ([`Socket::open`](crate::Socket::open)) at any time.
///
/// Both ends access it without synchronization: a copy may contain old and new bytes. Protocols that need consistent values add a
/// number that changes with each update, at the beginning and at the end. Dropping a `Shared` ends the operation without waiting.
#[derive(Debug)]
pub struct Shared {
    operation: Operation,
    bytes: *mut u8,
    len: usize,
}

// SAFETY: the memory is accessed only as atomic bytes, and the operation may be used by any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn start(
        fd: c_int,
        mut buffer: Buffer,
        call: impl FnOnce(c_int, isize, &mut Buffer) -> c_int,
    ) -> io::Result<Self> {
        let driver = driver::get()?;
        let (bytes, len) = (buffer.as_mut_ptr(), buffer.len());
        let mut operation = driver.start(fd, Some(buffer), |id, buffer| {
            buffer.map_or(-1, |b| call(driver.queue, id, b))
        });
        match operation.take_refusal() {
            Some(error) => Err(error),
            None => Ok(Self {
                operation,
                bytes,
                len,
            }),
        }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the driver keeps the buffer until the future of the operation returns it. Only `end` awaits that future, and `end`
        // consumes this object.
        unsafe { std::slice::from_raw_parts(self.bytes.cast(), self.len) }
    }

    /// Copies bytes of the buffer from offset `at` on.
    ///
    /// # Panics
    ///
    /// The range exceeds the buffer.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        let range = self.range(at, into.len());
        for (to, from) in into.iter_mut().zip(range) {
            *to = from.load(Relaxed);
        }
    }

    /// Copies bytes to the buffer from offset `at` on.
    ///
    /// # Panics
    ///
    /// The range exceeds the buffer.
    pub fn write(&self, at: usize, from: &[u8]) {
        for (to, from) in self.range(at, from.len()).iter().zip(from) {
            to.store(*from, Relaxed);
        }
    }

    fn range(&self, at: usize, len: usize) -> &[AtomicU8] {
        let end = at.checked_add(len);
        let range = end.and_then(|end| self.bytes().get(at..end));
        assert!(range.is_some(), "{len} bytes at {at} of {}", self.len);
        range.unwrap_or(&[])
    }

    /// Ends the operation, and waits until the peer does not use the buffer any more. Returns the buffer, after the registration that let
    /// peers write to it has ended. Peers may still be able to read it: see [`Buffer`].
    ///
    /// # Errors
    ///
    /// The connection ended before.
    pub async fn end(self) -> (io::Result<()>, Buffer) {
        self.operation.cancel();
        let (event, buffer) = self.operation.await;
        let result = match event {
            Err(error) if error.raw_os_error() != Some(libc::ECANCELED) => Err(error),
            _ => Ok(()),
        };
        (result, buffer.unwrap_or_else(Buffer::none))
    }
}
