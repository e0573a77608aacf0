//! The queue of received bytes that the program has not read, and the buffers of a call that reads.

use std::io::IoSliceMut;

/// A byte queue. Bytes at the end may be unverified (their CRC has not been checked yet); these cannot be read.
#[derive(Debug, Default)]
pub struct Queue {
    bytes: Vec<u8>,
    from: usize,
    unverified: usize,
}

/// The capacity in bytes that an empty queue keeps.
const KEEP: usize = 32 * 1024;

impl Queue {
    /// Returns the number of readable bytes.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.from - self.unverified
    }

    /// Returns whether no bytes are readable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes in the queue, including unverified ones.
    pub fn held(&self) -> usize {
        self.bytes.len() - self.from
    }

    /// Returns the memory of the queue in bytes.
    pub fn room(&self) -> usize {
        self.bytes.capacity()
    }

    /// Appends bytes. Unverified bytes become readable with [`Self::verify`].
    pub fn push(&mut self, bytes: &[u8], verified: bool) {
        if self.from > 0 && self.from >= self.bytes.len() / 2 {
            self.bytes.drain(..self.from);
            self.from = 0;
        }
        self.bytes.extend_from_slice(bytes);
        if !verified {
            self.unverified += bytes.len();
        }
    }

    /// Marks all bytes as verified.
    pub fn verify(&mut self) {
        self.unverified = 0;
    }

    /// Returns the readable bytes.
    pub fn peek(&self) -> &[u8] {
        self.bytes
            .get(self.from..self.bytes.len() - self.unverified)
            .unwrap_or(&[])
    }

    /// Removes the first `n` readable bytes.
    pub fn consume(&mut self, n: usize) {
        self.from += n.min(self.len());
        if self.from == self.bytes.len() {
            self.from = 0;
            self.bytes.clear();
            if self.bytes.capacity() > KEEP {
                self.bytes = Vec::new();
            }
        }
    }
}

/// The buffers of a call that reads.
#[derive(Debug)]
pub struct Dest<'a, 'b> {
    parts: &'a mut [IoSliceMut<'b>],
    done: usize,
}

impl<'a, 'b> Dest<'a, 'b> {
    /// Wraps buffers that are all unfilled.
    pub fn new(parts: &'a mut [IoSliceMut<'b>]) -> Self {
        let mut dest = Self { parts, done: 0 };
        dest.advance(0);
        dest
    }

    /// Returns the number of bytes filled.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Returns the unfilled part.
    pub fn rest(&mut self) -> &mut [IoSliceMut<'b>] {
        self.parts
    }

    /// Returns whether all buffers are filled.
    pub fn is_full(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the unfilled part of the current buffer.
    pub fn place(&mut self) -> &mut [u8] {
        self.parts.first_mut().map_or(&mut [], |p| &mut *p)
    }

    /// Records that the first `n` bytes of [`Self::place`] were filled.
    pub fn advance(&mut self, n: usize) {
        self.done += n;
        let mut parts = std::mem::take(&mut self.parts);
        IoSliceMut::advance_slices(&mut parts, n);
        self.parts = parts;
    }

    /// Copies as many bytes as fit. Returns their number.
    pub fn put(&mut self, mut bytes: &[u8]) -> usize {
        let before = bytes.len();
        while !bytes.is_empty() && !self.is_full() {
            let place = self.place();
            let n = place.len().min(bytes.len());
            let (now, rest) = bytes.split_at(n);
            if let Some(place) = place.get_mut(..n) {
                place.copy_from_slice(now);
            }
            bytes = rest;
            self.advance(n);
        }
        before - bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_returned_unchanged_and_only_verified() {
        let mut q = Queue::default();
        q.push(b"abc", true);
        q.push(b"def", false);
        assert_eq!((q.peek(), q.held()), (&b"abc"[..], 6));
        q.consume(100);
        assert!(q.is_empty());
        q.verify();
        assert_eq!(q.peek(), b"def");
        q.consume(2);
        q.push(b"g", true);
        assert_eq!(q.peek(), b"fg");
        q.consume(2);
        assert_eq!(q.held(), 0);
    }

    #[test]
    fn a_dest_fills_its_parts_in_order_and_skips_empty_ones() {
        let (mut a, mut b) = ([0; 2], [0; 3]);
        let mut parts = [
            IoSliceMut::new(&mut []),
            IoSliceMut::new(&mut a),
            IoSliceMut::new(&mut []),
            IoSliceMut::new(&mut b),
        ];
        let mut dest = Dest::new(&mut parts);
        assert_eq!(dest.put(b"x"), 1);
        assert_eq!(dest.put(b"yzzzzz"), 4);
        assert!(dest.is_full());
        assert_eq!(dest.done(), 5);
        assert_eq!((&a, &b), (b"xy", b"zzz"));
    }
}
