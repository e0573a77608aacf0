//! The queue of received bytes that the program has not read, and the buffers of a call that reads.

use crate::limits;
use crate::memory::{Mark, Reader};
use anywarp_core::lock::Mutex;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The capacity of the buffers of all queues in bytes.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Buffers of at most [`limits::SLAB`] bytes that no queue uses.
static FREE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
/// Longer buffers, of at most [`limits::LONG_SLAB`] bytes, that no queue uses.
static LONG: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Returns a buffer that no queue uses, for `n` bytes. It may have to grow.
fn kept(n: usize) -> Option<Vec<u8>> {
    let list = if n <= limits::SLAB { &FREE } else { &LONG };
    // If another thread held the lock at a fork, it stays locked in the child.
    list.try_lock()?.pop()
}

/// Keeps a buffer for other queues, if it is not too long, and not too many are kept.
fn keep(mut buffer: Vec<u8>) {
    let (list, most) = match buffer.capacity() {
        0 => return,
        n if n <= limits::SLAB => (&FREE, limits::SLABS_KEPT),
        n if n <= limits::LONG_SLAB => (&LONG, limits::LONG_SLABS_KEPT),
        _ => return,
    };
    buffer.clear();
    if let Some(mut list) = list.try_lock()
        && list.len() < most
    {
        list.push(buffer);
    }
}

/// Returns the capacity of the buffers of all queues in bytes.
pub fn used() -> usize {
    USED.load(Ordering::Relaxed)
}

/// The urgent byte that arrived last.
#[derive(Debug, Clone, Copy)]
struct Urgent {
    /// Its place among the unread bytes.
    at: usize,
    /// A call with MSG_OOB has read it.
    is_read: bool,
}

/// A byte queue. Bytes at the end may be unverified (their CRC has not been checked yet); these cannot be read. The last bytes may be in
/// memory that the peer shares, and are copied when they are read.
#[derive(Debug)]
pub struct Queue {
    bytes: Vec<u8>,
    from: usize,
    unverified: usize,
    /// The memory that the peer shares. Its bytes follow `bytes`.
    memory: Option<Box<Reader>>,
    /// An empty queue gives its buffer to other queues.
    shares: bool,
    /// As in TCP, the urgent byte is one of the bytes in the queue. A read ends before it, and the next read skips it, or with `inline` begins
    /// with it.
    urgent: Option<Urgent>,
    inline: bool,
}

/// The capacity in bytes that an empty queue keeps if it does not share.
const KEEP: usize = 32 * 1024;

impl Drop for Queue {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Queue {
    /// Returns an empty queue. `shares`: the queue has a buffer only while it has bytes.
    pub fn new(shares: bool) -> Self {
        Self {
            bytes: Vec::new(),
            from: 0,
            unverified: 0,
            memory: None,
            shares,
            urgent: None,
            inline: false,
        }
    }

    /// Sets `SO_OOBINLINE`.
    pub fn set_inline(&mut self, inline: bool) {
        self.inline = inline;
    }

    /// Appends an urgent byte. An earlier one becomes an ordinary byte. If it is the next byte, it is lost, unless `SO_OOBINLINE` is set.
    pub fn push_urgent(&mut self, byte: u8, verified: bool) {
        self.skip_urgent();
        self.push(&[byte], verified);
        self.urgent = Some(Urgent {
            at: self.bytes.len() - self.from - 1,
            is_read: false,
        });
    }

    /// Returns whether the next byte is the urgent one.
    pub fn is_at_urgent(&self) -> bool {
        self.urgent.is_some_and(|urgent| urgent.at == 0) && !self.verified().is_empty()
    }

    /// Returns the urgent byte if no call has read it.
    pub fn urgent(&self) -> Option<u8> {
        let urgent = self.urgent.filter(|urgent| !urgent.is_read)?;
        self.verified().get(urgent.at).copied()
    }

    /// Records that a call with MSG_OOB has read the urgent byte.
    pub fn read_urgent(&mut self) {
        if let Some(urgent) = &mut self.urgent {
            urgent.is_read = true;
        }
    }

    /// Removes the urgent byte if it is the next one and not read like others.
    fn skip_urgent(&mut self) {
        if self.is_at_urgent() && !self.inline {
            self.urgent = None;
            self.consume(1);
        }
    }

    /// Removes the urgent byte if it is the next one and `MSG_OOB` has read it.
    pub fn drop_read_urgent(&mut self) {
        if self.urgent.as_ref().is_some_and(|urgent| urgent.is_read) {
            self.skip_urgent();
        }
    }

    /// Returns how many of the next bytes a read skips.
    fn skipped(&self) -> usize {
        usize::from(self.is_at_urgent() && !self.inline)
    }

    /// Sets the memory in which the peer puts bytes.
    pub fn set_memory(&mut self, memory: Reader) {
        self.memory = Some(Box::new(memory));
    }

    /// Returns whether the peer may put bytes into memory.
    pub fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Appends the bytes in the memory up to a mark that the peer has announced, and those behind it that are known to follow. Returns
    /// their number. `None`: there is no memory or they do not fit, which is an error of the peer.
    pub fn announced(&mut self, mark: Mark) -> Option<usize> {
        self.memory.as_mut()?.announced(mark)
    }

    /// Appends bytes in the memory that were not announced. Returns their number. `None`: they do not fit, which is an error of the peer.
    pub fn look(&mut self) -> Option<usize> {
        self.memory.as_mut().map_or(Some(0), |memory| memory.look())
    }

    /// Asks the peer to announce the next bytes that it puts into the memory. Then does the same as [`Self::look`]. Unless `always` is
    /// set, nothing is done if there are unread bytes in the memory.
    pub fn ask(&mut self, always: bool) -> Option<usize> {
        match &mut self.memory {
            Some(memory) if always || memory.unread() == 0 => {
                memory.ask();
                memory.look()
            }
            _ => Some(0),
        }
    }

    /// Returns the number of bytes in the memory.
    fn in_memory(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.unread())
    }

    /// Copies the bytes in the memory into the queue's buffer.
    fn load(&mut self) {
        let n = self.in_memory();
        if n > 0
            && let Some(mut memory) = self.memory.take()
        {
            self.append(n, |bytes| memory.append_to(bytes));
            self.memory = Some(memory);
        }
    }

    /// Copies as many readable bytes as fit to the program's buffers. They stay in the queue.
    pub fn peek_into(&self, dest: &mut Dest<'_, '_>) {
        let ends_before = self.urgent.is_some_and(|urgent| urgent.at > 0);
        let bytes = self.peek().get(self.skipped()..).unwrap_or(&[]);
        if dest.put(bytes) < bytes.len() || ends_before {
            return;
        }
        if let Some(memory) = &self.memory {
            let mut done = 0;
            while done < memory.unread() && !dest.is_full() {
                let n = memory.peek(done, dest.place());
                dest.advance(n);
                done += n;
            }
        }
    }

    /// Moves readable bytes to the program's buffers: as many as fit, but at most a piece ([`limits::MEMORY_PIECE`]) out of the memory.
    pub fn take(&mut self, dest: &mut Dest<'_, '_>) {
        if self.is_at_urgent() && !dest.is_full() {
            if dest.done() > 0 {
                return;
            }
            self.skip_urgent();
        }
        if self.bytes.len() > self.from + self.unverified {
            let n = dest.put(self.peek());
            self.consume(n);
        }
        if self.bytes.is_empty()
            && let Some(memory) = &mut self.memory
        {
            let end = dest.done() + limits::MEMORY_PIECE;
            while memory.unread() > 0 && !dest.is_full() && dest.done() < end {
                let most = dest.room().min(end - dest.done());
                let n = memory.take(dest.place().get_mut(..most).unwrap_or(&mut []));
                dest.advance(n);
            }
        }
    }

    /// Returns the number of readable bytes, without an urgent one that the next read skips.
    pub fn len(&self) -> usize {
        let all = self.verified().len() + self.in_memory();
        all.saturating_sub(self.skipped())
    }

    /// Returns the number of bytes for `FIONREAD`: those before the urgent one.
    pub fn available(&self) -> usize {
        match self.urgent {
            Some(urgent) if !self.inline => urgent.at.min(self.verified().len()),
            _ => self.len(),
        }
    }

    /// Returns whether no bytes are readable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes in the queue, including unverified ones.
    pub fn held(&self) -> usize {
        self.bytes.len() - self.from + self.in_memory()
    }

    /// Returns the capacity of the queue's buffer in bytes.
    pub fn room(&self) -> usize {
        self.bytes.capacity()
    }

    /// Appends bytes. Unverified bytes become readable with [`Self::verify`].
    pub fn push(&mut self, bytes: &[u8], verified: bool) {
        if bytes.is_empty() {
            return;
        }
        self.load();
        self.append(bytes.len(), |all| all.extend_from_slice(bytes));
        if !verified {
            self.unverified += bytes.len();
        }
    }

    /// Appends `n` bytes to the buffer with `extend`.
    fn append(&mut self, n: usize, extend: impl FnOnce(&mut Vec<u8>)) {
        if self.from > 0 && self.from >= self.bytes.len() / 2 {
            self.bytes.drain(..self.from);
            self.from = 0;
        }
        let before = self.bytes.capacity();
        let needed = self.bytes.len() + n;
        if self.shares
            && needed > before
            && let Some(mut buffer) = kept(needed)
        {
            buffer.extend_from_slice(&self.bytes);
            keep(std::mem::replace(&mut self.bytes, buffer));
        }
        self.bytes.reserve(n);
        extend(&mut self.bytes);
        USED.fetch_add(self.bytes.capacity(), Ordering::Relaxed);
        USED.fetch_sub(before, Ordering::Relaxed);
    }

    /// Marks all bytes as verified.
    pub fn verify(&mut self) {
        self.unverified = 0;
    }

    /// Returns the verified bytes in the buffer.
    fn verified(&self) -> &[u8] {
        self.bytes
            .get(self.from..self.bytes.len() - self.unverified)
            .unwrap_or(&[])
    }

    /// Returns the readable bytes in the buffer, up to an urgent one behind them. Those in memory are not among them.
    pub fn peek(&self) -> &[u8] {
        let all = self.verified();
        match self.urgent {
            Some(Urgent { at: at @ 1.., .. }) => all.get(..at).unwrap_or(all),
            _ => all,
        }
    }

    /// Removes the first `n` readable bytes of the buffer.
    pub fn consume(&mut self, n: usize) {
        let n = n.min(self.bytes.len() - self.from - self.unverified);
        self.from += n;
        if n > 0
            && let Some(urgent) = self.urgent.take()
            && urgent.at >= n
        {
            self.urgent = Some(Urgent {
                at: urgent.at - n,
                ..urgent
            });
        }
        if self.from == self.bytes.len() {
            self.from = 0;
            self.bytes.clear();
            if self.shares || self.bytes.capacity() > KEEP {
                self.give_back();
            }
        }
    }

    /// Releases the buffer.
    fn give_back(&mut self) {
        let buffer = std::mem::take(&mut self.bytes);
        USED.fetch_sub(buffer.capacity(), Ordering::Relaxed);
        if self.shares {
            keep(buffer);
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

    /// Returns the length of [`Self::place`].
    pub fn room(&self) -> usize {
        self.parts.first().map_or(0, |p| p.len())
    }

    /// Returns `n` bytes of [`Self::place`] from `from` on.
    pub fn bytes(&self, from: usize, n: usize) -> &[u8] {
        let place = self.parts.first().map_or(&[][..], |p| p);
        place.get(from..from + n).unwrap_or(&[])
    }

    /// Records that the first `n` bytes of [`Self::place`] were filled.
    pub fn advance(&mut self, n: usize) {
        self.done += n;
        if let Some(first) = self.parts.first_mut()
            && n < first.len()
        {
            first.advance(n);
            return;
        }
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
        let mut q = Queue::new(false);
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

    /// A buffer that malloc returned to the kernel would cost a page fault for each of its pages.
    #[test]
    fn the_buffers_of_long_messages_are_kept_for_others() {
        let long = [7; 100_000];
        // Other tests use the same lists.
        let reused = (0..100).any(|_| {
            let mut q = Queue::new(true);
            q.push(&long[..1000], true);
            q.push(&long, true);
            assert_eq!(q.peek(), [7; 101_000]);
            let at = q.peek().as_ptr().addr();
            q.consume(101_000);
            assert_eq!(q.room(), 0);
            let mut other = Queue::new(true);
            other.push(&long, true);
            other.peek().as_ptr().addr() == at
        });
        assert!(reused);
        assert!(LONG.lock().len() <= limits::LONG_SLABS_KEPT);
    }

    #[test]
    fn bytes_in_memory_keep_their_place_among_the_others() {
        let (mut writer, offer) = crate::memory::offered();
        let mut q = Queue::new(false);
        assert_eq!((q.look(), q.ask(true)), (Some(0), Some(0)), "no memory");
        q.set_memory(Reader::open(&offer).unwrap());
        let mut put = |q: &mut Queue, bytes: &[u8]| {
            if writer.put(std::iter::once(bytes)) {
                assert_eq!(q.announced(writer.announce()), Some(bytes.len()));
            } else {
                assert_eq!(q.look(), Some(bytes.len()));
            }
        };
        q.push(b"ab", true);
        put(&mut q, b"cd");
        put(&mut q, b"ef");
        assert_eq!((q.len(), q.held(), q.peek()), (6, 6, &b"ab"[..]));
        let mut first = [0; 3];
        let mut parts = [IoSliceMut::new(&mut first)];
        q.take(&mut Dest::new(&mut parts));
        assert_eq!((&first, q.len()), (b"abc", 3));
        // Bytes of an ordinary message follow those in the memory.
        q.push(b"g", true);
        assert_eq!(q.peek(), b"defg");
        put(&mut q, b"hi");
        let mut all = [0; 5];
        let mut parts = [IoSliceMut::new(&mut all)];
        q.peek_into(&mut Dest::new(&mut parts));
        assert_eq!((&all, q.len()), (b"defgh", 6));
        let mut rest = [0; 9];
        let mut parts = [IoSliceMut::new(&mut rest)];
        let mut dest = Dest::new(&mut parts);
        q.take(&mut dest);
        assert_eq!(dest.done(), 6);
        assert_eq!(&rest[..6], b"defghi");
        assert!(q.is_empty());
    }

    /// Reads at most `most` bytes.
    fn read(q: &mut Queue, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut dest = Dest::new(&mut parts);
        q.take(&mut dest);
        let n = dest.done();
        bytes.truncate(n);
        bytes
    }

    #[test]
    fn a_read_ends_before_the_urgent_byte_and_the_next_one_skips_it() {
        for inline in [false, true] {
            let mut q = Queue::new(false);
            q.set_inline(inline);
            q.push(b"ab", true);
            q.push_urgent(b'!', true);
            q.push(b"cd", true);
            assert_eq!((q.urgent(), q.is_at_urgent()), (Some(b'!'), false));
            assert_eq!((q.held(), q.available()), (5, if inline { 5 } else { 2 }));
            assert_eq!(read(&mut q, 1), b"a");
            assert_eq!(read(&mut q, 9), b"b");
            assert!(q.is_at_urgent());
            q.read_urgent();
            assert_eq!((q.urgent(), q.is_at_urgent()), (None, true));
            let rest: &[u8] = if inline { b"!cd" } else { b"cd" };
            assert_eq!(q.len(), rest.len());
            assert_eq!(read(&mut q, 9), rest);
            assert!(!q.is_at_urgent() && q.held() == 0);
        }
    }

    #[test]
    fn a_later_urgent_byte_makes_the_earlier_one_ordinary() {
        let mut q = Queue::new(false);
        q.push(b"a", true);
        q.push_urgent(b'1', true);
        q.push_urgent(b'2', true);
        assert_eq!(read(&mut q, 9), b"a1");
        // The next byte is urgent, so it is lost.
        q.push_urgent(b'3', true);
        assert_eq!((q.held(), q.urgent()), (1, Some(b'3')));
        assert!(q.is_empty());
    }

    #[test]
    fn an_urgent_byte_counts_when_it_is_verified() {
        let mut q = Queue::new(false);
        q.push_urgent(b'!', false);
        assert_eq!((q.urgent(), q.is_at_urgent()), (None, false));
        assert!(read(&mut q, 9).is_empty());
        q.verify();
        assert_eq!((q.urgent(), q.is_at_urgent()), (Some(b'!'), true));
    }

    #[test]
    fn a_long_read_returns_its_room_piece_by_piece() {
        let (mut writer, offer) = crate::memory::offered();
        let mut q = Queue::new(false);
        q.set_memory(Reader::open(&offer).unwrap());
        let all = vec![1; 2 * limits::MEMORY_PIECE + 1];
        writer.put(std::iter::once(&all[..]));
        q.announced(writer.announce()).unwrap();
        let before = writer.room();
        let mut bytes = vec![0; all.len()];
        let (first, rest) = bytes.split_at_mut(10);
        let mut parts = [IoSliceMut::new(first), IoSliceMut::new(rest)];
        let mut dest = Dest::new(&mut parts);
        for most in [1, 2].map(|n| n * limits::MEMORY_PIECE) {
            q.take(&mut dest);
            assert_eq!((dest.done(), writer.room()), (most, before + most));
        }
        q.take(&mut dest);
        assert!(dest.is_full() && writer.is_empty() && bytes == all);
    }

    #[test]
    fn an_empty_queue_that_shares_has_no_memory() {
        let (mut own, mut shared) = (Queue::new(false), Queue::new(true));
        for q in [&mut own, &mut shared] {
            q.push(&[7; 1000], true);
            assert!(q.room() >= 1000);
            q.consume(1000);
        }
        assert!(own.room() >= 1000);
        assert_eq!(shared.room(), 0);
        // The buffer is used again, without its old bytes.
        shared.push(b"a", true);
        assert_eq!(shared.peek(), b"a");
        assert!(used() >= own.room() + shared.room());
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
