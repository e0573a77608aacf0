//! Shared memory as the carrier of a stream between two processes of one user on one host.
//!
//! Each direction has a ring of records, and a record contains bytes of the stream. All payload goes through the
//! rings: a process never reads the memory of the other one (decision 020 gives the reasons). An end that stops
//! polling sets its `asleep` flag; the peer then wakes it with a byte on the TCP connection when there is something
//! to do. When the connection ends, the stream ends.
//!
//! One end offers the memory with the control message Offer, and the other accepts it with Take (`wire::control` of the
//! core).
//!
//! ```text
//! page 0: positions and flags                      ring of the end that offered     ring of the other end
//!
//!  0        4                          16                    16 + bytes, filled up to 16
//! +--------+--------------------------+---------------------
//! | bytes  | 0                        | bytes of the stream
//! +--------+--------------------------+---------------------
//! ```

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anywarp_core::bounds::{CARRIER_RING as RING, CARRIERS};
use anywarp_core::llp::mpa::frame::{Piece, TxBatch};
use smallvec::SmallVec;

use crate::capture;
use crate::config::{Transport, config};
use crate::locks::{Mutex, Rank};
use crate::mem::{PinnedPart, Unfilled, UserSlice};
use crate::net::{owner, wake};
use crate::process::PerProcess;
use crate::random::random_u32;
use crate::reactor::PolledMemory;
use crate::shared::Shared;
use crate::sys::Io;
use crate::sys::thread::Uncancelled;

const LEN: usize = PAGE + 2 * RING;
const PAGE: usize = 4096;
const HEAD: usize = 16;
/// Largest payload of a record. Long payload is divided, so that the receiver copies one record while the sender
/// writes the next.
const RECORD_BYTES: usize = 16 * 1024;
/// The first word of the page.
const MAGIC: u64 = 0x6177_6361_7272_0002;
/// Offset of a random word that the peer sends back in its Take.
const PROOF: usize = 8;
/// Offset of the addresses of the connection that the memory is for, as text.
const CONNECTION: usize = 2048;
const CONNECTION_LEN: usize = 160;
/// How long an unanswered offer keeps its descriptor and counts towards [`CARRIERS`].
const OFFER_LIFETIME: Duration = Duration::from_secs(5);

/// Largest number of bytes that the peer may send in one burst to wake this end: one system call receives many of them. An
/// end that sleeps and is woken alternately has one or two.
const WAKEUPS_MAX: u32 = 4096;

/// Offsets of the words of one end in the page, each in a separate cache line.
#[derive(Debug, Clone, Copy)]
struct Lines {
    base: usize,
    ring: usize,
}

impl Lines {
    const fn of(offerer: bool) -> Self {
        if offerer {
            Self {
                base: 64,
                ring: PAGE,
            }
        } else {
            Self {
                base: 1024,
                ring: PAGE + RING,
            }
        }
    }
    /// Number of bytes that this end has written.
    const fn written(self) -> usize {
        self.base
    }
    /// Number of bytes of the other ring that this end has read.
    const fn taken(self) -> usize {
        self.base + 64
    }
    /// This end does not poll and has to be woken.
    const fn asleep(self) -> usize {
        self.base + 128
    }
    /// The ring of this end is full, and it has more to send.
    const fn blocked(self) -> usize {
        self.base + 192
    }
}

/// How many connections of this process share memory.
static COUNT: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

/// Counts a connection that shares memory.
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> Self {
        COUNT.get().fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // A connection that was counted before a fork is not part of the child's count.
        let count = COUNT.get();
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// The descriptors by which peers open offered memory.
static OFFERS: PerProcess<Mutex<Vec<Offer>>> =
    PerProcess::new(|| Mutex::new(Rank::ShmOffers, Vec::new()));

/// A descriptor that is kept until the peer has opened the memory, or [`OFFER_LIFETIME`] has passed.
#[derive(Debug)]
struct Offer {
    proof: u64,
    made: Instant,
    file: OwnedFd,
}

impl Offer {
    /// Stores the descriptor and returns its number. `None` if the process has too many offers and carriers already.
    ///
    /// If a peer does not open the memory, the next offer after the lifetime of this one closes the descriptor. The
    /// peer cannot open the memory afterwards, and refuses the offer.
    fn keep(self) -> Option<u32> {
        let mut offers = OFFERS.get().lock();
        let now = self.made;
        offers.retain(|offer| now.duration_since(offer.made) < OFFER_LIFETIME);
        if offers.len() + COUNT.get().load(Ordering::Relaxed) >= CARRIERS {
            return None;
        }
        let fd = u32::try_from(self.file.as_raw_fd()).ok()?;
        offers.push(self);
        Some(fd)
    }

    fn close(proof: u64) {
        OFFERS.get().lock().retain(|offer| offer.proof != proof);
    }

    /// Closes the descriptor of an accepted offer, and counts the carrier. `None` if the offer had expired, and no
    /// further carrier is allowed.
    fn accepted(proof: u64) -> Option<Counted> {
        let mut offers = OFFERS.get().lock();
        let before = offers.len();
        offers.retain(|offer| offer.proof != proof);
        let has_place =
            offers.len() < before || offers.len() + COUNT.get().load(Ordering::Relaxed) < CARRIERS;
        has_place.then(Counted::new)
    }
}

/// The state that a polling thread reads without the lock of the queue pair.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Shared,
    us: Lines,
    them: Lines,
    /// Number of bytes of the peer's ring that were read.
    taken: AtomicU64,
    /// The number of bytes of our ring that had been read when it was found full. `u64::MAX`: it was not full.
    full_at: AtomicU64,
    /// Number of bytes that the peer may still send on the connection: one for each time that this end has gone to
    /// sleep. Unused ones are kept up to [`WAKEUPS_MAX`].
    wakeups_left: AtomicU32,
}

impl Watch {
    /// Whether there are bytes to receive.
    pub(crate) fn has_bytes(&self) -> bool {
        let written = self.shared.word(self.them.written());
        written.load(Ordering::Acquire) != self.taken.load(Ordering::Relaxed)
    }
}

impl PolledMemory for Watch {
    fn is_ready(&self) -> bool {
        if self.has_bytes() {
            return true;
        }
        let full_at = self.full_at.load(Ordering::Relaxed);
        full_at != u64::MAX
            && self.shared.word(self.them.taken()).load(Ordering::Acquire) != full_at
    }

    fn prepare_sleep(&self) -> bool {
        // Threads that go to sleep at the same time may exceed the limit by their number.
        if self.wakeups_left.load(Ordering::Relaxed) < WAKEUPS_MAX {
            self.wakeups_left.fetch_add(1, Ordering::Relaxed);
        }
        wake::announce(self.shared.flag(self.us.asleep()), || self.is_ready())
    }
}

/// The transport of streams between processes of one host. It is always TCP during a capture, which records only
/// sockets.
pub(crate) fn transport() -> Transport {
    if capture::is_on() {
        Transport::Tcp
    } else {
        config().transport
    }
}

/// One end of a stream in shared memory.
#[derive(Debug)]
pub(crate) struct Shm {
    watch: Arc<Watch>,
    written: u64,
    taken: u64,
    /// A record that has been read in part.
    current: Option<Record>,
    /// A random word in the memory. The peer's Take must contain it, which shows that the peer has opened the memory.
    proof: u64,
    /// The process and descriptor by which the peer opens the memory.
    name: Option<(u32, u32)>,
    counted: Option<Counted>,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    left: usize,
    /// Position of its next unread byte in the ring.
    at: u64,
    /// Position after its last byte.
    end: u64,
}

/// The addresses of a connection, as the end that offers the memory writes them.
fn connection_text(local: SocketAddr, remote: SocketAddr) -> [u8; CONNECTION_LEN] {
    let mut out = [0; CONNECTION_LEN];
    for (to, from) in out.iter_mut().zip(format!("{local} {remote}").bytes()) {
        *to = from;
    }
    out
}

impl Shm {
    /// Creates memory for the connection from `local` to `remote`. `None` if the process has too many carriers, or no
    /// memory, or if the peer belongs to another user.
    pub(crate) fn offer(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        // A peer of another user could not open the memory, but it could keep offers open.
        if !owner::is_this_user(remote, local) {
            return None;
        }
        let (shared, file) = Shared::create(LEN).ok()?;
        let proof = u64::from(random_u32()) << 32 | u64::from(random_u32()) | 1;
        shared.put(CONNECTION, &connection_text(local, remote));
        shared.word(PROOF).store(proof, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        let made = Instant::now();
        let fd = Offer { proof, made, file }.keep()?;
        let mut shm = Self::new(shared, true);
        shm.proof = proof;
        shm.name = Some((std::process::id(), fd));
        Some(shm)
    }

    /// Opens the memory that the peer of the connection from `local` to `remote` offers.
    pub(crate) fn take(pid: u32, fd: u32, local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        if COUNT.get().load(Ordering::Relaxed) >= CARRIERS || !owner::is_this_user(remote, local) {
            return None;
        }
        let shared = Shared::open(pid, fd, LEN).ok()?;
        let mut theirs = [0; CONNECTION_LEN];
        shared.get(CONNECTION, &mut theirs);
        let good = shared.word(0).load(Ordering::Acquire) == MAGIC
            && theirs == connection_text(remote, local);
        good.then(|| {
            let mut shm = Self::new(shared, false);
            shm.proof = shm.watch.shared.word(PROOF).load(Ordering::Relaxed);
            shm.counted = Some(Counted::new());
            shm
        })
    }

    fn new(shared: Shared, offerer: bool) -> Self {
        let (us, them) = (Lines::of(offerer), Lines::of(!offerer));
        // The peer has to wake this end until a thread polls.
        shared.flag(us.asleep()).store(1, Ordering::SeqCst);
        Self {
            watch: Arc::new(Watch {
                shared,
                us,
                them,
                taken: AtomicU64::new(0),
                full_at: AtomicU64::new(u64::MAX),
                wakeups_left: AtomicU32::new(1),
            }),
            written: 0,
            taken: 0,
            current: None,
            proof: 0,
            name: None,
            counted: None,
        }
    }

    /// The state that a polling thread reads.
    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// The process and descriptor by which the peer opens the memory.
    pub(crate) fn name(&self) -> Option<(u32, u32)> {
        self.name
    }

    /// The word that the peer's Take must contain.
    pub(crate) fn proof(&self) -> u64 {
        self.proof
    }

    /// Handles the peer's Take: closes the descriptor. Returns false if the proof is wrong, or if the Take is so late
    /// that the process has the largest number of carriers.
    pub(crate) fn taken_by_peer(&mut self, proof: u64) -> bool {
        if self.name.is_none() || proof != self.proof {
            return false;
        }
        self.counted = Offer::accepted(proof);
        self.counted.is_some()
    }

    /// Counts bytes on the connection that woke this end. Returns false if the peer sent more than allowed.
    pub(crate) fn count_wakeups(&mut self, bytes: usize) -> bool {
        let left = &self.watch.wakeups_left;
        let take = |left: u32| left.checked_sub(u32::try_from(bytes).ok()?);
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    /// Sends the bytes of `batch` from `skip` on.
    pub(crate) fn send(&mut self, batch: &TxBatch, skip: usize) -> Io {
        // The peer may read bytes between the check for room and the mark that the ring is full. Sending is then
        // tried again.
        for _ in 0..4 {
            let seen = self.taken_by_them();
            match self.try_send(batch, skip) {
                Io::Done(0) => {}
                result => return result,
            }
            if self.wait_for_room(seen) {
                break;
            }
        }
        Io::WouldBlock
    }

    fn try_send(&mut self, batch: &TxBatch, skip: usize) -> Io {
        let mut done = 0;
        'pieces: for (piece, mut skip, mut left) in batch.rest(skip) {
            let pinned = match piece {
                Piece::Own { .. } => None,
                Piece::User(place) => match place.pin() {
                    Some(pinned) => Some(pinned),
                    None => {
                        self.publish();
                        return Io::Invalidated;
                    }
                },
            };
            while left > 0 {
                let Some(room) = self.room() else {
                    return Io::Broken(libc::EPROTO);
                };
                if room < 2 * HEAD {
                    break 'pieces;
                }
                let n = left.min(room - HEAD).min(RECORD_BYTES);
                self.header(n);
                match (piece, &pinned) {
                    (Piece::Own { from, .. }, _) => {
                        let bytes = batch.own(from + skip, from + skip + n);
                        self.for_each_run(self.written, n, |shared, at, from, n| {
                            shared.put(at, bytes.get(from..from + n).unwrap_or(&[]));
                        });
                    }
                    (Piece::User(_), Some(pinned)) => {
                        let whole = UserSlice::new(pinned, skip as u64, n as u64);
                        self.for_each_run(self.written, n, |shared, at, from, n| {
                            shared.put_from(at, whole.part(from, n));
                        });
                    }
                    (Piece::User(_), None) => break 'pieces,
                }
                self.written += n.next_multiple_of(HEAD) as u64;
                (done, skip, left) = (done + n, skip + n, left - n);
                if n == RECORD_BYTES {
                    self.publish();
                }
            }
        }
        self.publish();
        Io::Done(done)
    }

    /// Free bytes in the ring of this end. `None`: the peer claims to have read more than was written.
    fn room(&self) -> Option<usize> {
        let used = usize::try_from(self.written.checked_sub(self.taken_by_them())?).ok()?;
        RING.checked_sub(used)
    }

    /// Number of bytes of the ring of this end that the peer claims to have read.
    fn taken_by_them(&self) -> u64 {
        let watch = &self.watch;
        let taken = watch.shared.word(watch.them.taken());
        taken.load(Ordering::Acquire)
    }

    /// Marks the ring as full while `seen` bytes of it have been read, so that the peer wakes this end when it reads
    /// more. Returns false if it has read more already.
    fn wait_for_room(&mut self, seen: u64) -> bool {
        let watch = &self.watch;
        watch.full_at.store(seen, Ordering::Relaxed);
        let blocked = watch.shared.flag(watch.us.blocked());
        wake::announce(blocked, || self.taken_by_them() == seen)
    }

    fn header(&mut self, len: usize) {
        let mut header = [0; HEAD];
        let (l, _) = header.split_at_mut(4);
        l.copy_from_slice(&u32::try_from(len).unwrap_or(0).to_ne_bytes());
        // A record begins at a multiple of HEAD, as the ring does, so the header does not wrap around.
        let at = usize::try_from(self.written % RING as u64).unwrap_or(0);
        let watch = &self.watch;
        watch.shared.put(watch.us.ring + at, &header);
        self.written += HEAD as u64;
    }

    /// Calls `each` for the one or two parts of the ring of this end that contain `len` bytes from `position` on.
    fn for_each_run(
        &self,
        position: u64,
        len: usize,
        mut each: impl FnMut(&Shared, usize, usize, usize),
    ) {
        runs(position, len, |at, from, n| {
            each(&self.watch.shared, self.watch.us.ring + at, from, n);
        });
    }

    /// Makes the written bytes visible to the peer.
    fn publish(&mut self) {
        let watch = &self.watch;
        let word = watch.shared.word(watch.us.written());
        word.store(self.written, Ordering::Release);
        watch.full_at.store(u64::MAX, Ordering::Relaxed);
    }

    /// Whether the peer claims to have read all that was written. A false claim harms only the peer, since it
    /// concerns data sent to it.
    pub(crate) fn is_all_taken(&self) -> bool {
        self.taken_by_them() == self.written
    }

    /// Whether the peer sleeps and has to be woken. True only once for each time that it sleeps.
    pub(crate) fn must_wake(&self) -> bool {
        let watch = &self.watch;
        wake::must_wake(watch.shared.flag(watch.them.asleep()))
    }

    /// Receives into user memory, or into `buffer` if `direct` is `None`. Returns the number of bytes in user memory
    /// and in the buffer.
    pub(crate) fn receive(
        &mut self,
        direct: Option<Unfilled<'_>>,
        buffer: &mut [u8],
    ) -> Result<(usize, usize), Io> {
        let Some(record) = self.next_record()? else {
            return Err(Io::WouldBlock);
        };
        let mut parts: SmallVec<[PinnedPart<'_>; 4]> = SmallVec::new();
        let user = match direct {
            Some(mut direct) => {
                direct.missing = direct.missing.min(record.left as u64);
                direct.pin(&mut parts).ok_or(Io::Invalidated)?
            }
            None => 0,
        };
        let mut to: SmallVec<[UserSlice<'_>; 5]> = SmallVec::new();
        to.extend(parts.iter().map(PinnedPart::slice));
        let mut own = 0;
        if user == 0 {
            own = record.left.min(buffer.len());
            to.push(UserSlice::buffer(buffer.get_mut(..own).unwrap_or(&mut [])));
        }
        let n = user + own;
        let (shared, ring) = (&self.watch.shared, self.watch.them.ring);
        let mut at = record.at;
        for target in &to {
            runs(at, target.len(), |from, of, n| {
                shared.get_to(ring + from, target.part(of, n));
            });
            at += target.len() as u64;
        }
        self.take_bytes(record, n);
        Ok((user, own))
    }

    /// Checks and returns the next record.
    fn next_record(&mut self) -> Result<Option<Record>, Io> {
        if let Some(current) = self.current {
            return Ok(Some(current));
        }
        let watch = &self.watch;
        let written = watch.shared.word(watch.them.written());
        // The peer can write any value here, so every number is checked.
        let there = written.load(Ordering::Acquire).wrapping_sub(self.taken);
        if there == 0 {
            return Ok(None);
        }
        let broken = Io::Broken(libc::EPROTO);
        if there > RING as u64 || there < HEAD as u64 || !there.is_multiple_of(HEAD as u64) {
            return Err(broken);
        }
        let mut len = [0; 4];
        let at = usize::try_from(self.taken % RING as u64).unwrap_or(0);
        watch.shared.get(watch.them.ring + at, &mut len);
        let left = u32::from_ne_bytes(len) as usize;
        let start = self.taken + HEAD as u64;
        if left == 0 || left > RING {
            return Err(broken);
        }
        let end = start + left.next_multiple_of(HEAD) as u64;
        if end - self.taken > there {
            return Err(broken);
        }
        let record = Record {
            left,
            at: start,
            end,
        };
        self.current = Some(record);
        Ok(Some(record))
    }

    /// Marks `n` bytes of the record as read.
    fn take_bytes(&mut self, record: Record, n: usize) {
        let left = record.left.saturating_sub(n);
        if left > 0 {
            self.current = Some(Record {
                left,
                at: record.at + n as u64,
                ..record
            });
            return;
        }
        self.current = None;
        self.taken = record.end;
        let watch = &self.watch;
        watch.taken.store(self.taken, Ordering::Relaxed);
        watch
            .shared
            .word(watch.us.taken())
            .store(self.taken, Ordering::Release);
    }

    /// Whether the peer sleeps until its ring has room, and has to be woken.
    pub(crate) fn must_wake_for_room(&self) -> bool {
        let watch = &self.watch;
        let (blocked, asleep) = (watch.them.blocked(), watch.them.asleep());
        wake::must_wake_for_room(watch.shared.flag(blocked), watch.shared.flag(asleep))
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        if self.name.is_some() && self.counted.is_none() {
            // The thread that posts or polls closes a file here, which is a cancellation point.
            let _inside = Uncancelled::new();
            Offer::close(self.proof);
        }
    }
}

/// Calls `each` for the one or two parts of a ring that contain `len` bytes from `position` on, with the offset in
/// the ring, the offset in the bytes, and the length.
fn runs(position: u64, len: usize, mut each: impl FnMut(usize, usize, usize)) {
    let at = usize::try_from(position % RING as u64).unwrap_or(0);
    let first = len.min(RING - at);
    if first > 0 {
        each(at, 0, first);
    }
    if len > first {
        each(0, first, len - first);
    }
}

/// The number of carriers and of open offers, for the fuzzer.
#[cfg(any(test, fuzzing))]
pub(super) fn held() -> (usize, usize) {
    let offers = OFFERS.get().lock().len();
    (COUNT.get().load(Ordering::Relaxed), offers)
}

#[cfg(any(test, fuzzing))]
impl Shm {
    /// Writes a word of the page with positions and flags, as a peer can.
    pub(super) fn overwrite(&self, at: usize, value: u64) {
        let word = self.watch.shared.word((at % PAGE) & !7);
        word.store(value, Ordering::Release);
    }
}

/// Runs one end of a ring. `data` determines what the peer writes, and when this end sends and receives.
#[cfg(any(test, fuzzing))]
#[expect(clippy::panic, reason = "the fuzzer detects broken rules by panics")]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok((shared, _file)) = Shared::create(LEN) else {
        return;
    };
    let mut shm = Shm::new(shared, data.first().is_some_and(|b| b & 1 == 1));
    let mut rest = data.get(1..).unwrap_or(&[]).iter().copied();
    let mut out = vec![0; 4096];
    while let Some(op) = rest.next() {
        let mut byte = || rest.next().unwrap_or(0);
        let small = usize::from(byte());
        let large = u64::from_le_bytes(std::array::from_fn(|i| if i < 4 { byte() } else { 0 }));
        let watch = Arc::clone(shm.watch());
        let word = |at| watch.shared.word(at);
        let them = watch.them;
        match op % 9 {
            // Positions: near the true ones, or any.
            0 => word(them.written())
                .store(shm.taken.wrapping_add(small as u64 * 16), Ordering::Release),
            1 => word(them.written()).store(large.wrapping_mul(0x1_0000_0001), Ordering::Release),
            2 => {
                word(them.taken()).store(shm.written.wrapping_sub(small as u64), Ordering::Release);
            }
            3 => word(them.taken()).store(large.wrapping_mul(0x1_0000_0001), Ordering::Release),
            4 => {
                watch
                    .shared
                    .flag(them.asleep())
                    .store(small as u32 & 3, Ordering::SeqCst);
                watch
                    .shared
                    .flag(them.blocked())
                    .store(large as u32 & 3, Ordering::SeqCst);
            }
            // The header of the next record, or a correct record.
            5 => {
                let at = usize::try_from(shm.taken % RING as u64).unwrap_or(0);
                watch
                    .shared
                    .put(them.ring + at, &(large as u32).to_ne_bytes());
            }
            6 => {
                let at = usize::try_from(shm.taken % RING as u64).unwrap_or(0);
                let len = small.max(1);
                watch
                    .shared
                    .put(them.ring + at, &(len as u32).to_ne_bytes());
                let end = shm.taken + (HEAD + len.next_multiple_of(HEAD)) as u64;
                word(them.written()).store(end, Ordering::Release);
            }
            7 => {
                let room = out.get_mut(..small * 16).unwrap_or(&mut []);
                let len = room.len();
                let before = shm.taken;
                match shm.receive(None, room) {
                    Ok((0, n)) if n <= len => {}
                    Ok(n) => panic!("{n:?} bytes into {len}"),
                    Err(Io::WouldBlock) => {}
                    Err(_) => return,
                }
                let moved = shm.taken.wrapping_sub(before);
                assert!(
                    moved <= RING as u64,
                    "{moved} bytes of the ring were taken at once"
                );
            }
            _ => {
                let mut batch = TxBatch::default();
                batch.push_raw(out.get(..small * 16 + 1).unwrap_or(&[0]));
                match shm.send(&batch, 0) {
                    Io::Done(n) if n <= batch.len() => {}
                    Io::Done(n) => panic!("{n} bytes of {}", batch.len()),
                    Io::WouldBlock => {}
                    _ => return,
                }
                let _ = (
                    shm.is_all_taken(),
                    shm.must_wake(),
                    shm.must_wake_for_room(),
                );
                let _ = (
                    watch.is_ready(),
                    watch.prepare_sleep(),
                    shm.count_wakeups(small),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The addresses of a connection, and its two ends, which keep it open.
    fn connection() -> (TcpStream, TcpStream, SocketAddr, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let (one, other) = (server.local_addr().unwrap(), client.local_addr().unwrap());
        (server, client, one, other)
    }

    fn pair() -> (Shm, Shm) {
        let (_server, _client, local, remote) = connection();
        let mut one = Shm::offer(local, remote).unwrap();
        let (pid, fd) = one.name().unwrap();
        assert!(
            Shm::take(pid, fd, local, remote).is_none(),
            "made for another connection"
        );
        let other = Shm::take(pid, fd, remote, local).unwrap();
        assert!(one.taken_by_peer(other.proof()));
        (one, other)
    }

    #[test]
    fn a_peer_that_writes_anything_breaks_nothing() {
        crate::net::tests::replay("ring", fuzz);
    }

    #[test]
    fn memory_is_offered_only_to_a_socket_of_this_user() {
        let (server, client, local, remote) = connection();
        let one = Shm::offer(local, remote).unwrap();
        let (pid, fd) = one.name().unwrap();
        drop((server, client));
        // A connection that does not exist here is one of another host, or of another network namespace.
        let nobody: SocketAddr = "127.0.0.1:1".parse().unwrap();
        assert!(Shm::offer(local, nobody).is_none());
        assert!(Shm::take(pid, fd, nobody, local).is_none());
    }

    #[test]
    fn a_take_shows_that_the_memory_was_opened() {
        let (_server, _client, local, remote) = connection();
        let mut one = Shm::offer(local, remote).unwrap();
        assert!(!one.taken_by_peer(0));
        assert!(!one.taken_by_peer(one.proof() ^ 1));
        let (pid, fd) = one.name().unwrap();
        let mut other = Shm::take(pid, fd, remote, local).unwrap();
        assert!(!other.taken_by_peer(other.proof()), "it made no offer");
        assert!(one.taken_by_peer(other.proof()));
        assert!(
            Shm::take(pid, fd, remote, local).is_none(),
            "the descriptor is closed"
        );
    }

    #[test]
    fn an_offer_without_an_answer_is_closed_after_a_while() {
        let (_server, _client, local, remote) = connection();
        let offer = Shm::offer(local, remote).unwrap();
        let (pid, fd) = offer.name().unwrap();
        {
            let mut offers = OFFERS.get().lock();
            let ours = offers.iter_mut().find(|o| o.proof == offer.proof).unwrap();
            ours.made = ours.made.checked_sub(OFFER_LIFETIME).unwrap();
        }
        let next = Shm::offer(local, remote).unwrap();
        assert!(
            Shm::take(pid, fd, remote, local).is_none() || next.name() == Some((pid, fd)),
            "the peer came too late"
        );
        let offers = OFFERS.get().lock();
        assert!(offers.iter().all(|o| o.proof != offer.proof));
    }

    #[test]
    fn excess_wake_ups_are_noticed() {
        let (mut one, other) = pair();
        // Both ends are marked as sleeping at first.
        assert!(other.must_wake() && one.count_wakeups(1));
        assert!(!one.count_wakeups(1), "it did not sleep again");
        let (mut one, other) = pair();
        for _ in 0..10 {
            let _ = one.watch().prepare_sleep();
            assert!(other.must_wake() && one.count_wakeups(1));
        }
        // It has slept eleven times (once before the first poll), and the peer may wake it each time.
        assert!(one.count_wakeups(1) && !one.count_wakeups(1));
        // Even if this end slept often without being woken, the peer may send only a limited number of bytes at once.
        let (mut one, _other) = pair();
        for _ in 0..100_000 {
            let _ = one.watch().prepare_sleep();
        }
        assert!(!one.count_wakeups(WAKEUPS_MAX as usize + 1));
        assert!(one.count_wakeups(WAKEUPS_MAX as usize) && !one.count_wakeups(1));
    }

    /// Receives all available bytes.
    fn drain(from: &mut Shm, out: &mut Vec<u8>) -> Result<(), Io> {
        let mut buffer = vec![0; 10_000];
        loop {
            match from.receive(None, &mut buffer) {
                Ok((0, n)) => out.extend_from_slice(&buffer[..n]),
                Err(Io::WouldBlock) => return Ok(()),
                other => return other.map(|_| ()),
            }
        }
    }

    #[test]
    fn any_number_of_bytes_stays_in_order_in_the_ring() {
        let (mut one, mut other) = pair();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        let mut state = 7_u32;
        for round in 0..400_usize {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let len = [1, 15, 16, 17, 64, 4096, 65_000, 300_000][state as usize >> 8 & 7];
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + round) as u8).collect();
            let mut batch = TxBatch::default();
            batch.push_raw(&bytes);
            let mut done = 0;
            while done < len {
                match one.send(&batch, done) {
                    Io::Done(n) => done += n,
                    Io::WouldBlock => {
                        assert!(
                            !one.watch().prepare_sleep(),
                            "the ring is full and nothing was taken"
                        );
                        drain(&mut other, &mut got).unwrap();
                        assert!(one.watch().is_ready(), "there is room again");
                        assert!(other.must_wake_for_room());
                    }
                    io => panic!("{io:?}"),
                }
            }
            sent.extend_from_slice(&bytes);
        }
        drain(&mut other, &mut got).unwrap();
        assert!(got == sent);
    }

    #[test]
    fn a_sleeping_end_is_woken_once() {
        let (mut one, mut other) = pair();
        let mut batch = TxBatch::default();
        batch.push_raw(b"some");
        assert!(!other.watch().prepare_sleep(), "there is nothing");
        assert_eq!(one.send(&batch, 0), Io::Done(4));
        assert!(one.must_wake() && !one.must_wake());
        assert!(other.watch().prepare_sleep(), "there is something");
        let mut out = Vec::new();
        drain(&mut other, &mut out).unwrap();
        assert_eq!(out, b"some");
    }

    #[test]
    fn a_peer_that_writes_anything_breaks_its_stream_and_nothing_else() {
        let mut state = 1_u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state >> 16
        };
        let mut broken = 0;
        for round in 0..300 {
            let (mut one, evil) = pair();
            let page = &evil.watch().shared;
            let us = evil.watch().us;
            for at in (0..4096).step_by(8) {
                page.word(us.ring + at).store(
                    match random() % 3 {
                        0 => random(),
                        1 => random() % 70_000,
                        _ => random() % 4096,
                    },
                    Ordering::Relaxed,
                );
            }
            let written = match round % 4 {
                0 => random(),
                1 => random() % 4096,
                2 => 4096,
                _ => RING as u64 + 16 * (random() % 3),
            };
            page.word(us.written()).store(written, Ordering::Release);
            page.word(us.taken()).store(random(), Ordering::Release);
            let mut out = Vec::new();
            let result = drain(&mut one, &mut out);
            broken += usize::from(matches!(result, Err(Io::Broken(_))));
            assert!(out.len() <= 100_000_000);
            let mut batch = TxBatch::default();
            batch.push_raw(&[1; 100]);
            // The peer claims to have read bytes that were never written.
            assert!(matches!(
                one.send(&batch, 0),
                Io::Broken(_) | Io::Done(100) | Io::WouldBlock
            ));
        }
        assert!(broken > 200, "{broken}");
    }
}
