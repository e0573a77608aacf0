//! Shared memory that carries the payload of one direction of a stream, if both ends are on one host.
//!
//! The writer of the direction makes the memory and offers it by a message of the stream. The reader opens it and sets a word in it.
//! From then on the writer copies long payloads into the ring in the memory, and announces each by a message, so that the
//! kernel's socket remains what a program waits for. Payload that does not fit into the ring is sent in messages as before.
//!
//! ```text
//!  offset 0: magic | 8: nonce | 64: accepted | 128: number of bytes read | 4096: the ring
//! ```
//!
//! The other end may write anything to the memory at any time. Each number from it is read once and checked before it is used.

use crate::limits;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use shared_memory::{FileId, Shared};
use std::net::IpAddr;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The first word of memory that was not opened yet. The last byte is the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"aSK mem\x01");
const NONCE: usize = 8;
const ACCEPTED: usize = 64;
const READ: usize = 128;
const RING: usize = 4096;
/// The size of the file.
const LEN: usize = RING + limits::RING;

/// The number of directions that memory carries in this process.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A direction that memory carries.
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> Self {
        COUNT.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The descriptors of memory that is offered and not accepted yet, and when it was offered. Each of them has a slot of
/// [`limits::MEMORIES`]. The lock is only tried: another thread may have held it when this process was forked.
static OFFERED: Mutex<Vec<(File, u64)>> = Mutex::new(Vec::new());

/// Returns whether memory may carry one more direction of a stream, besides `offered` ones.
fn may_carry(offered: usize) -> bool {
    COUNT.load(Ordering::Relaxed) + offered < limits::MEMORIES
}

/// Returns the pieces of `len` bytes from `position` on: the offset of each in the ring, and its length.
fn runs(position: u64, len: usize) -> [(usize, usize); 2] {
    let at = (position % limits::RING as u64) as usize;
    let first = len.min(limits::RING - at);
    [(at, first), (0, len - first)]
}

/// What a reader needs to open the memory of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The process of the writer.
    pub pid: u32,
    /// A descriptor of the memory in that process.
    pub fd: u32,
    /// A random number, which is also in the memory. Another process cannot make a reader open memory of which it does not know the
    /// number.
    pub nonce: u64,
}

/// The descriptor by which the reader opens the memory.
#[derive(Debug)]
struct File {
    fd: c_int,
    file: FileId,
}

impl Drop for File {
    fn drop(&mut self) {
        // The program may have closed the descriptor, and its number may have another use.
        if FileId::of(self.fd) == Some(self.file) {
            sys::close(self.fd);
        }
    }
}

/// The end that puts payload into the memory.
#[derive(Debug)]
pub struct Writer {
    shared: Shared,
    /// The file by which the reader opens the memory.
    file: FileId,
    /// `None`: the reader has not accepted the memory.
    counted: Option<Counted>,
    /// The number of bytes put into the ring.
    written: u64,
}

impl Writer {
    /// Makes memory for a reader. `None`: the process has too many, or there is no memory or no descriptor.
    pub fn offer() -> Option<(Self, Offer)> {
        let now = sys::now_ms();
        let mut offered = OFFERED.try_lock()?;
        // A reader that accepts an offer does so at its next receive. One that cannot open the memory never does.
        offered.retain(|(_, at)| now.saturating_sub(*at) < limits::OFFER);
        if !may_carry(offered.len()) || !sys::may_have_file_of(LEN) {
            return None;
        }
        let (shared, file) = Shared::create(LEN).ok()?;
        let is_allocated = shared.allocate(&file).is_ok();
        let low = file.into_raw_fd();
        let fd = sys::copy_high(low);
        sys::close(low);
        let fd = fd?;
        let Some(id) = FileId::of(fd).filter(|_| is_allocated) else {
            sys::close(fd);
            return None;
        };
        let nonce = sys::random();
        shared.word(NONCE).store(nonce, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        offered.push((File { fd, file: id }, now));
        let offer = Offer {
            pid: std::process::id(),
            fd: u32::try_from(fd).ok()?,
            nonce,
        };
        let writer = Self {
            shared,
            file: id,
            counted: None,
            written: 0,
        };
        Some((writer, offer))
    }

    /// Returns whether the reader has opened the memory.
    pub fn is_accepted(&mut self) -> bool {
        if self.counted.is_none() {
            if self.shared.word(ACCEPTED).load(Ordering::Acquire) != 1 {
                return false;
            }
            self.counted = Some(Counted::new());
            self.withdraw();
        }
        true
    }

    /// Closes the file by which the reader opens the memory.
    fn withdraw(&self) {
        // If another thread holds the lock, the file is closed at a later offer.
        if let Some(mut offered) = OFFERED.try_lock() {
            offered.retain(|(file, _)| file.file != self.file);
        }
    }

    /// Returns the number of bytes that fit into the ring.
    pub fn room(&self) -> usize {
        limits::RING - self.unread().unwrap_or(limits::RING)
    }

    /// Returns whether the reader has read all bytes.
    pub fn is_empty(&self) -> bool {
        self.unread() == Some(0)
    }

    /// Returns the number of bytes that the reader has not read. `None`: the reader's number is impossible.
    fn unread(&self) -> Option<usize> {
        let read = self.shared.word(READ).load(Ordering::Acquire);
        let unread = usize::try_from(self.written.wrapping_sub(read)).ok()?;
        (unread <= limits::RING).then_some(unread)
    }

    /// Copies payload into the ring, which has room for it. The position advances with [`Self::went`].
    pub fn put<'a>(&self, payload: impl Iterator<Item = &'a [u8]>) {
        let mut position = self.written;
        for part in payload {
            let mut rest = part;
            for (at, n) in runs(position, part.len()) {
                let (now, behind) = rest.split_at(n.min(rest.len()));
                self.shared.put(RING + at, now);
                rest = behind;
            }
            position += part.len() as u64;
        }
    }

    /// Records that `n` bytes of the payload that was put were announced.
    pub fn went(&mut self, n: usize) {
        self.written += n as u64;
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.counted.is_none() {
            self.withdraw();
        }
    }
}

/// The end that takes payload from the memory.
#[derive(Debug)]
pub struct Reader {
    shared: Shared,
    _counted: Counted,
    /// The number of bytes taken from the ring.
    read: u64,
    /// The number of announced bytes that were not taken.
    unread: usize,
}

impl Reader {
    /// Opens the memory that the peer offers, and accepts it. `None`: the memory is not usable, or the process has too many.
    pub fn open(offer: &Offer) -> Option<Self> {
        if !may_carry(0) {
            return None;
        }
        let shared = Shared::open(offer.pid, offer.fd, LEN).ok()?;
        let fits = shared.word(NONCE).load(Ordering::Acquire) == offer.nonce
            && shared
                .word(0)
                .compare_exchange(MAGIC, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !fits {
            return None;
        }
        shared.word(ACCEPTED).store(1, Ordering::Release);
        Some(Self {
            shared,
            _counted: Counted::new(),
            read: 0,
            unread: 0,
        })
    }

    /// Returns the number of announced bytes that were not taken.
    pub fn unread(&self) -> usize {
        self.unread
    }

    /// Records that the peer has put `n` bytes into the ring. Returns false if these do not fit, which is an error of the peer.
    pub fn announce(&mut self, n: usize) -> bool {
        let all = self.unread.saturating_add(n);
        let fits = all <= limits::RING;
        if fits {
            self.unread = all;
        }
        fits
    }

    /// Appends all bytes to `out`.
    pub fn append_to(&mut self, out: &mut Vec<u8>) {
        for (at, n) in runs(self.read, self.unread) {
            self.shared.append_to(RING + at, n, out);
        }
        self.advance(self.unread);
    }

    /// Moves the first bytes to `place`. Returns their number.
    pub fn take(&mut self, place: &mut [u8]) -> usize {
        let n = self.peek(0, place);
        self.advance(n);
        n
    }

    /// Copies the bytes after the first `skip` ones to `place`. Returns their number.
    pub fn peek(&self, skip: usize, place: &mut [u8]) -> usize {
        let all = self.unread.saturating_sub(skip).min(place.len());
        let mut done = 0;
        for (at, n) in runs(self.read + skip as u64, all) {
            if let Some(out) = place.get_mut(done..done + n) {
                self.shared.get(RING + at, out);
            }
            done += n;
        }
        all
    }

    fn advance(&mut self, n: usize) {
        self.unread -= n;
        self.read += n as u64;
        self.shared.word(READ).store(self.read, Ordering::Release);
    }
}

/// Returns whether both ends of a connection are on this host, in one network namespace.
pub fn is_local(fd: c_int) -> bool {
    let of = |call| sys::name_of(fd, call).map(|a| a.ip().to_canonical());
    let (Some(here), Some(there)) = (of(libc::getsockname), of(libc::getpeername)) else {
        return false;
    };
    here == there || IpAddr::is_loopback(&here) && there.is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Writer, Reader) {
        let (mut writer, offer) = Writer::offer().unwrap();
        assert!(!writer.is_accepted());
        let reader = Reader::open(&offer).unwrap();
        assert!(writer.is_accepted());
        (writer, reader)
    }

    #[test]
    fn bytes_keep_their_order_around_the_end_of_the_ring() {
        let (mut writer, mut reader) = pair();
        let mut next = 0u8;
        for round in 0..40 {
            let payload: Vec<u8> = (0..50_000 + round)
                .map(|_| {
                    next = next.wrapping_mul(5).wrapping_add(1);
                    next
                })
                .collect();
            let (a, b) = payload.split_at(round);
            writer.put([a, b].into_iter());
            writer.went(payload.len());
            assert!(reader.announce(payload.len()));
            let mut first = vec![0; 20_000];
            assert_eq!(reader.take(&mut first), 20_000);
            reader.append_to(&mut first);
            assert!(first == payload, "round {round}");
            assert!(writer.is_empty() && reader.unread() == 0);
        }
    }

    #[test]
    fn a_full_ring_has_no_room_until_bytes_are_read() {
        let (mut writer, mut reader) = pair();
        let payload = vec![7; limits::RING];
        assert_eq!(writer.room(), limits::RING);
        writer.put(std::iter::once(&payload[..]));
        writer.went(payload.len());
        assert_eq!((writer.room(), writer.is_empty()), (0, false));
        assert!(reader.announce(payload.len()));
        assert!(!reader.announce(1), "more than the ring holds");
        reader.append_to(&mut Vec::new());
        assert_eq!(writer.room(), limits::RING);
    }

    #[test]
    fn an_impossible_number_of_the_reader_means_no_room() {
        let (mut writer, reader) = pair();
        writer.went(100);
        for read in [101, 1 << 40, 1 << 63] {
            reader.shared.word(READ).store(read, Ordering::Release);
            assert_eq!((writer.room(), writer.is_empty()), (0, false), "{read}");
        }
    }

    #[test]
    fn offers_that_are_not_accepted_are_closed() {
        let open = || OFFERED.lock().len();
        let (writer, _offer) = Writer::offer().unwrap();
        let file = writer.file;
        let is_open = || OFFERED.lock().iter().any(|(f, _)| f.file == file);
        assert!(is_open() && open() <= limits::MEMORIES);
        // The time of the offer is over.
        for (f, at) in OFFERED.lock().iter_mut() {
            if f.file == file {
                *at -= limits::OFFER;
            }
        }
        let next = Writer::offer();
        assert!(next.is_some() && !is_open());
        let (writer, _offer) = next.unwrap();
        let file = writer.file;
        drop(writer);
        assert!(!OFFERED.lock().iter().any(|(f, _)| f.file == file));
    }

    #[test]
    fn memory_is_opened_once_and_only_with_its_number() {
        let (_writer, offer) = Writer::offer().unwrap();
        let wrong = Offer {
            nonce: offer.nonce ^ 1,
            ..offer
        };
        assert!(Reader::open(&wrong).is_none());
        assert!(Reader::open(&offer).is_some());
        assert!(Reader::open(&offer).is_none());
    }
}
