//! Buffers of datagrams that were sent, kept for the next ones.

use crate::bounds;

/// Buffers of datagrams that are sent, for those to come: memory that was touched costs less than new memory.
#[derive(Debug, Default)]
pub(super) struct Spare {
    /// Those that are large, and others: a small datagram in a large buffer would leave too little for large ones.
    large: Vec<Vec<u8>>,
    small: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spare {
    /// Bytes from which on a buffer is large.
    const LARGE: usize = 8 << 10;

    /// An empty buffer with room for `len` bytes.
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
