//! Shared memory that carries the payload of one direction of a stream, if both ends are on one host.
//!
//! The writer of the direction makes the memory and offers it by a message of the stream. The reader opens it and sets a word in it.
//! From then on the writer copies long payloads into the ring in the memory, and announces them by messages, so that the
//! kernel's socket remains what a program waits for. Payload that does not fit into the ring is sent in messages as before.
//!
//! ```text
//!  offset 0: magic | 8: nonce | 64: accepted | 128: number of bytes read | 136: asked | 192: mark | 4096: the ring
//! ```
//!
//! The *mark* tells up to which byte the ring is filled: its low 40 bits are the number of bytes written, and its high 24 bits are the
//! *generation*. The mark is in the memory and in each announcement. A payload that is sent in a message ends the generation, so a
//! reader that has handled an announcement knows that all bytes up to a mark of the same generation come before any later message.
//!
//! A reader that knows no unread byte in the ring *asks* for the next announcement: it stores the number of announcements that it has
//! handled, and then looks at the mark again. The writer stores the mark, and then announces it if the bytes are the first ones of a
//! generation, or if the reader has handled all announcements that were sent and has asked for the next one. So bytes that arrive while the
//! reader is busy with earlier ones cost no message, and a reader that waits always gets one.
//!
//! The other end may write anything to the memory at any time. Each number from it is read once and checked before it is used.

use crate::limits;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use shared_memory::{FileId, Shared};
use std::net::IpAddr;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// The first word of memory that was not opened yet. The last byte is the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"aSK mem\x02");
const NONCE: usize = 8;
const ACCEPTED: usize = 64;
const READ: usize = 128;
const ASKED: usize = 136;
const MARK: usize = 192;
const RING: usize = 4096;
/// The size of the file.
const LEN: usize = RING + limits::RING;

/// The number of bits of a mark that hold the number of bytes written. They are its low bits.
const POSITION: u32 = 40;

/// Up to which byte the ring is filled, and the generation of these bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(u64);

impl Mark {
    /// The length in bytes of a mark in a message.
    pub const LEN: usize = 8;

    /// Returns the mark after the `written`th byte.
    pub fn new(generation: u64, written: u64) -> Self {
        Self(generation << POSITION | written & ((1 << POSITION) - 1))
    }

    fn generation(self) -> u64 {
        self.0 >> POSITION
    }

    /// Returns the number of bytes from `known` to the mark. `None`: the mark is before `known`.
    pub fn beyond(self, known: u64) -> Option<usize> {
        let n = (self.0 << (64 - POSITION)).wrapping_sub(known << (64 - POSITION));
        i64::try_from(n)
            .ok()
            .map(|n| (n >> (64 - POSITION)) as usize)
    }

    /// Returns the bytes in a message.
    pub fn emit(self) -> [u8; Self::LEN] {
        self.0.to_be_bytes()
    }

    /// Returns the mark with these bytes.
    pub fn parse(bytes: [u8; Self::LEN]) -> Self {
        Self(u64::from_be_bytes(bytes))
    }
}

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

/// The descriptors of memory that is offered and not accepted yet, and when it was offered. Each of them counts towards
/// [`limits::MEMORIES`]. No thread waits for the lock: another thread may have held it when this process was forked.
static OFFERED: Mutex<Vec<(File, u64)>> = Mutex::new(Vec::new());

/// Returns whether memory may carry one more direction of a stream. `offered`: the number of directions for which memory is
/// offered and not accepted yet.
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
    /// A random number, which is also in the memory. A process that does not know the number in some memory cannot make a reader use
    /// that memory.
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
    /// The number of bytes put into the ring, and of those that were announced.
    written: u64,
    announced: u64,
    /// The number of announcements.
    announcements: u64,
    generation: u64,
    /// The next bytes are of a new generation.
    is_over: bool,
}

impl Writer {
    /// Makes memory for a reader. `None`: the process has too many of them, another thread makes an offer, or no memory or descriptor
    /// is free.
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
            announced: 0,
            announcements: 0,
            generation: 0,
            is_over: false,
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

    /// Copies payload into the ring, which has room for it. Returns whether it has to be announced.
    pub fn put<'a>(&mut self, payload: impl Iterator<Item = &'a [u8]>) -> bool {
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
        self.written = position;
        self.generation += u64::from(self.is_over);
        let mark = self.mark().0;
        self.shared.word(MARK).store(mark, Ordering::Release);
        // Either this thread sees that the reader has asked, or the reader sees the mark after it has asked.
        fence(Ordering::SeqCst);
        let asked = self.shared.word(ASKED).load(Ordering::Relaxed);
        std::mem::take(&mut self.is_over) || asked == self.announcements
    }

    fn mark(&self) -> Mark {
        Mark::new(self.generation, self.written)
    }

    /// Returns the mark for an announcement, which the caller sends.
    pub fn announce(&mut self) -> Mark {
        self.announced = self.written;
        self.announcements += 1;
        self.mark()
    }

    /// Called before a message is sent that has to be handled after the bytes in the ring. Returns whether these have to be announced
    /// first.
    pub fn end_generation(&mut self) -> bool {
        self.is_over = true;
        self.announced != self.written && !self.is_empty()
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
    /// The number of known bytes that were not taken.
    unread: usize,
    /// The generation of the last announcement, and the number of announcements.
    generation: u64,
    announcements: u64,
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
            generation: 0,
            announcements: 0,
        })
    }

    /// Returns the number of known bytes that were not taken.
    pub fn unread(&self) -> usize {
        self.unread
    }

    /// Handles an announcement. Returns the number of bytes that were not known. `None`: they do not fit, which is an error of the peer.
    pub fn announced(&mut self, mark: Mark) -> Option<usize> {
        self.announcements += 1;
        self.generation = mark.generation();
        let told = self.fill_to(mark)?;
        Some(told + self.look()?)
    }

    /// Looks for bytes that were not announced. Returns their number. `None`: they do not fit, which is an error of the peer.
    pub fn look(&mut self) -> Option<usize> {
        let mark = Mark(self.shared.word(MARK).load(Ordering::Acquire));
        // Bytes of another generation come after messages that have not arrived.
        if self.announcements == 0 || mark.generation() != self.generation {
            return Some(0);
        }
        self.fill_to(mark)
    }

    /// Asks for the next announcement. The caller has to [`look`](Self::look) afterwards.
    pub fn ask(&self) {
        let asked = self.shared.word(ASKED);
        asked.store(self.announcements, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn fill_to(&mut self, mark: Mark) -> Option<usize> {
        let n = mark.beyond(self.read + self.unread as u64).unwrap_or(0);
        if n > limits::RING - self.unread {
            return None;
        }
        self.unread += n;
        Some(n)
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

/// Makes memory. Tries again if that fails: another test, which runs at the same time, may hold the lock.
#[cfg(test)]
pub fn offered() -> (Writer, Offer) {
    let all = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(1));
        Writer::offer()
    });
    all.take(1000).flatten().next().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Writer, Reader) {
        let (mut writer, offer) = offered();
        assert!(!writer.is_accepted());
        let reader = Reader::open(&offer).unwrap();
        assert!(writer.is_accepted());
        (writer, reader)
    }

    /// Puts payload into the ring. Afterwards the reader knows it, whether it was announced or not.
    fn put(writer: &mut Writer, reader: &mut Reader, payload: &[&[u8]]) {
        let before = reader.unread();
        if writer.put(payload.iter().copied()) {
            reader.announced(writer.announce()).unwrap();
        } else {
            reader.look().unwrap();
        }
        let len: usize = payload.iter().map(|part| part.len()).sum();
        assert_eq!(reader.unread() - before, len);
    }

    #[test]
    fn bytes_are_announced_only_to_a_reader_that_asks() {
        let (mut writer, mut reader) = pair();
        let bytes = || std::iter::once(&[1; 10][..]);
        assert!(writer.put(bytes()), "the first bytes");
        assert_eq!(reader.look(), Some(0), "nothing was announced");
        let first = writer.announce();
        assert!(!writer.put(bytes()), "the announcement was not handled");
        assert_eq!(reader.announced(first), Some(20));
        assert!(!writer.put(bytes()), "the reader has not asked");
        assert_eq!(reader.look(), Some(10));
        reader.ask();
        assert_eq!(reader.look(), Some(0));
        assert!(writer.put(bytes()));
        assert_eq!(reader.look(), Some(10), "before the announcement arrives");
        assert_eq!(reader.announced(writer.announce()), Some(0));
    }

    #[test]
    fn bytes_after_a_message_are_known_only_when_they_are_announced() {
        let (mut writer, mut reader) = pair();
        let bytes = || std::iter::once(&[1; 10][..]);
        assert!(writer.put(bytes()));
        let first = writer.announce();
        assert!(!writer.put(bytes()));
        assert!(writer.end_generation(), "ten bytes were not announced");
        let second = writer.announce();
        // A message is sent here.
        assert!(writer.put(bytes()), "the first bytes after a message");
        let third = writer.announce();
        assert_eq!(reader.announced(first), Some(10));
        assert_eq!(reader.look(), Some(0));
        assert_eq!(reader.announced(second), Some(10));
        assert_eq!(reader.look(), Some(0));
        assert_eq!(reader.announced(third), Some(10));
        reader.append_to(&mut Vec::new());
        assert!(!writer.put(bytes()));
        assert_eq!(reader.look(), Some(10));
        reader.append_to(&mut Vec::new());
        assert!(!writer.end_generation(), "the reader has read all bytes");
    }

    #[test]
    fn a_mark_has_the_generation_and_the_position_and_both_wrap() {
        for written in [0, 5, (1 << POSITION) - 3, 1 << POSITION, 1 << 50] {
            let mark = Mark::new(7, written + 4);
            assert_eq!(mark.generation(), 7);
            assert_eq!(mark.beyond(written), Some(4));
            assert_eq!(mark.beyond(written + 4), Some(0));
            assert_eq!(mark.beyond(written + 5), None);
            assert_eq!(Mark::parse(mark.emit()), mark);
        }
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
            put(&mut writer, &mut reader, &[a, b]);
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
        put(&mut writer, &mut reader, &[&payload]);
        assert_eq!((writer.room(), writer.is_empty()), (0, false));
        let beyond = Mark::new(0, limits::RING as u64 + 1);
        assert_eq!(reader.announced(beyond), None, "more than the ring holds");
        reader.append_to(&mut Vec::new());
        assert_eq!(writer.room(), limits::RING);
    }

    #[test]
    fn an_impossible_number_of_the_reader_means_no_room() {
        let (mut writer, reader) = pair();
        writer.put(std::iter::once(&[7; 100][..]));
        for read in [101, 1 << 40, 1 << 63] {
            reader.shared.word(READ).store(read, Ordering::Release);
            assert_eq!((writer.room(), writer.is_empty()), (0, false), "{read}");
        }
    }

    #[test]
    fn offers_that_are_not_accepted_are_closed() {
        let open = || OFFERED.lock().len();
        let (writer, _offer) = offered();
        let file = writer.file;
        let is_open = || OFFERED.lock().iter().any(|(f, _)| f.file == file);
        assert!(is_open() && open() <= limits::MEMORIES);
        // The time of the offer is over.
        for (f, at) in OFFERED.lock().iter_mut() {
            if f.file == file {
                *at -= limits::OFFER;
            }
        }
        let (writer, _offer) = offered();
        assert!(!is_open());
        let file = writer.file;
        drop(writer);
        assert!(!OFFERED.lock().iter().any(|(f, _)| f.file == file));
    }

    #[test]
    fn memory_is_opened_once_and_only_with_its_number() {
        let (_writer, offer) = offered();
        let wrong = Offer {
            nonce: offer.nonce ^ 1,
            ..offer
        };
        assert!(Reader::open(&wrong).is_none());
        assert!(Reader::open(&offer).is_some());
        assert!(Reader::open(&offer).is_none());
    }
}
