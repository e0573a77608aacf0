//! Buffers of datagrams that were sent, kept for later datagrams.

use crate::bounds;

/// The kept buffers. Memory that was used before is faster than newly allocated memory, whose pages have to be
/// faulted in.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// The large buffers. They are separate from the small ones, so that small datagrams do not use up the large buffers.
    large: Vec<Vec<u8>>,
    small: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spare {
    /// Smallest size of a large buffer, in bytes.
    const LARGE: usize = 8 << 10;

    /// Returns an empty buffer with room for `len` bytes.
    #[inline]
    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        let buffers = if len >= Self::LARGE {
            &mut self.large
        } else {
            &mut self.small
        };
        match buffers.pop() {
            Some(mut buffer) => {
                self.bytes -= buffer.capacity();
                buffer.clear();
                buffer.reserve(len);
                buffer
            }
            None => Vec::with_capacity(len),
        }
    }

    #[inline]
    pub(super) fn give(&mut self, buffer: Vec<u8>) {
        if self.bytes + buffer.capacity() > bounds::DATAGRAM_SPARE {
            return;
        }
        self.bytes += buffer.capacity();
        if buffer.capacity() >= Self::LARGE {
            self.large.push(buffer);
        } else {
            self.small.push(buffer);
        }
    }
}
