//! Memory that two processes of one user on one host share: the carrier of a stream, or of datagrams ([`super::carrier`]).
//!
//! Each direction has a ring of records, and a record contains bytes of the stream, or one datagram. All payload goes through the
//! rings: a process never reads the memory of the other one (decision 020 gives the reasons). An end that stops
//! polling sets its `asleep` flag. When there is something to do, the peer wakes it: with a byte on the TCP connection of the
//! stream, or with a message to the UDP port. When the connection ends, the stream ends.
//!
//! One end offers the memory with the control message Offer, and the other accepts it with Take (`wire::control` of the
//! core).
//!
//! ```text
//! the memory: page 0 with positions and flags, the ring of the end that offered, the ring of the other end
//!
//! a record:
//!  0        4        8                    8 + bytes, filled up to a multiple of 64
//! +--------+--------+---------------------
//! | bytes  | done   | bytes of the stream
//! +--------+--------+---------------------
//! ```
//!
//! The first word of a record is written last, and the first word of the next record is set to 0 before that. So the
//! receiver polls the word in which it expects a record, and finds a short message in the same or the next cache line.
//!
//! If the receiver of a stream has read at least half of what was written since the start of the ring, the sender may continue at the start:
//! the highest bit of `bytes` ([`RESTART`]) announces this in the last record before the start. So as long as the receiver is fast, both ends use only the first 16 to 32 KiB of a ring.
//! 64 rings of 256 KiB do not fit into the caches of a processor.
//!
//! `done` is the number of the last request of the peer that this end has executed. So each record acknowledges requests, and
//! acknowledgements need no messages. An end that has nothing to send writes the number to page 0.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anywarp_core::bounds::{CARRIER_RING as RING, CARRIERS};
use anywarp_core::llp::mpa::frame::{Run, TxBatch};
use smallvec::SmallVec;

use crate::capture;
use crate::config::{Transport, config};
use crate::locks::{Mutex, Rank};
use crate::mem::{PinnedPart, Unfilled, UserSlice};
use crate::net::{owner, wake};
use crate::process::PerProcess;
use crate::random::random_u32;
use crate::reactor::PolledMemory;
use crate::shared::{Shared, UserCopies as _};
use crate::sys::Io;
use crate::sys::thread::Uncancelled;

const LEN: usize = PAGE + 2 * RING;
const PAGE: usize = 4096;
const HEAD: usize = 8;
/// Records begin with a cache line.
const LINE: usize = 64;
/// Largest payload of a record of a stream. Long payload is divided, so that the receiver copies one record while the sender
/// writes the next.
const RECORD_BYTES: usize = 16 * 1024;
/// Longest record of a datagram. No datagram is longer. The record is short enough that the peer wakes this end when the
/// ring has room for the record again ([`Shm::must_wake_for_room`]).
pub(super) const RECORD_MAX: usize = RING / 2 - 2 * LINE;
/// The largest number of records in a ring.
pub(super) const RECORDS_MAX: usize = RING / LINE;
/// Longest payload of a record that is received into a buffer of the connection, bytes.
const SHORT: usize = 4 * 1024;
/// A ring has this many parts. A peer that waits for room is woken when a part of its ring has been read completely.
const WAKE_PARTS: u64 = 4;
/// Set in the first word of a record that is followed by one at the start of the ring.
const RESTART: u64 = 1 << 31;
/// After at least this many bytes the sender checks whether the next record can be at the start of the ring.
const RESTART_STEP: u64 = 16 * 1024;
/// After this many checks without a full ring the step is halved.
const RESTART_CHECKS: u32 = 64;
/// The first word of the page.
const MAGIC: u64 = 0x6177_6361_7272_0005;
/// Set in the word of [`Lines::done`] once it contains a number.
const DONE_VALID: u64 = 1 << 32;
/// Offset of a random word that the peer sends back in its Take.
const PROOF: usize = 8;
/// Offset of the addresses of the connection that the memory is for, as text.
const CONNECTION: usize = 2048;
const CONNECTION_LEN: usize = 160;
/// The age from which an unanswered offer is given up when the next one is made: its descriptor is closed, and it does not count towards
/// the limit [`CARRIERS`] any more.
pub(super) const OFFER_LIFETIME: Duration = Duration::from_secs(5);

/// Largest number of bytes that the peer may send in one burst to wake this end. An end that sleeps
/// and is woken alternately gets one or two. The limit can be much larger, because one system call
/// receives many such bytes.
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
    /// Number of the last request of the other end that this end has executed, and [`DONE_VALID`].
    const fn done(self) -> usize {
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
    /// This end of a carrier of datagrams ([`super::carrier`]) has written its last record.
    const fn closed(self) -> usize {
        self.base + 256
    }
}

/// How many connections and pairs of UDP ports of this process share memory.
static COUNT: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

/// Counts a connection, or a pair of UDP ports, that shares memory.
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
    /// If a peer does not open the memory, the first offer that is made after the lifetime of this one closes the
    /// descriptor. The peer cannot open the memory afterwards, and refuses the offer.
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
    /// Whether the peer has switched to this memory. Until then the peer's records and acknowledgements are ignored, and do not
    /// make the memory ready: no thread handles them, so a thread that is woken for ready memory could never sleep again.
    receives: AtomicBool,
    /// The word of [`Lines::done`] of the peer that was handled last.
    done_seen: AtomicU64,
    /// Whether the next poll that finds nothing has to send the peer an acknowledgement.
    owes_ack: AtomicBool,
    /// The number of bytes of our ring that had been read when it was found full. `u64::MAX`: it was not full.
    full_at: AtomicU64,
    /// Number of bytes that the peer may still send on the connection: one for each time that this end has gone to
    /// sleep. Unused ones are kept up to [`WAKEUPS_MAX`].
    wakeups_left: AtomicU32,
}

impl Watch {
    /// Whether there are bytes to receive.
    #[inline]
    pub(crate) fn has_bytes(&self) -> bool {
        self.first_word(self.taken.load(Ordering::Relaxed)) != 0
    }

    /// The first word of the peer's record at `position`; 0: there is none yet.
    #[inline]
    fn first_word(&self, position: u64) -> u64 {
        let word = self.shared.word(self.them.ring + in_ring(position));
        word.load(Ordering::Acquire)
    }

    /// Whether page 0 has an acknowledgement that was not handled.
    #[inline]
    fn has_done(&self) -> bool {
        let done = self.shared.word(self.them.done());
        done.load(Ordering::Acquire) != self.done_seen.load(Ordering::Relaxed)
    }

    /// From now on the peer's records are received.
    pub(crate) fn set_receives(&self) {
        self.receives.store(true, Ordering::Release);
    }

    /// Sets whether the next poll that finds nothing sends an acknowledgement. The caller has the lock of the queue pair.
    #[inline]
    pub(crate) fn set_owes_ack(&self, owes: bool) {
        self.owes_ack.store(owes, Ordering::Relaxed);
    }

    /// Whether our ring was full, and the peer has read from it since.
    pub(super) fn has_room_again(&self) -> bool {
        let full_at = self.full_at.load(Ordering::Relaxed);
        full_at != u64::MAX
            && self.shared.word(self.them.taken()).load(Ordering::Acquire) != full_at
    }

    /// Whether our ring was full, and the peer has not read from it since.
    pub(super) fn is_full(&self) -> bool {
        self.full_at.load(Ordering::Relaxed) == self.taken_by_them()
    }

    /// Number of bytes of our ring that the peer claims to have read.
    pub(super) fn taken_by_them(&self) -> u64 {
        self.shared.word(self.them.taken()).load(Ordering::Acquire)
    }

    /// Announces that this end sleeps, and returns the result of `condition`, which is evaluated after that.
    pub(super) fn announce_sleep(&self, condition: impl FnOnce() -> bool) -> bool {
        wake::announce(self.shared.flag(self.us.asleep()), condition)
    }

    /// Withdraws the announcement that this end sleeps. Returns false if there is none, or if the peer has seen it and sends a wake-up.
    pub(super) fn withdraw_sleep(&self) -> bool {
        wake::withdraw(self.shared.flag(self.us.asleep()))
    }

    /// Makes an acknowledgement wake this end if it sleeps. Returns false if one has arrived already.
    pub(super) fn await_ack(&self) -> bool {
        wake::await_ack(self.shared.flag(self.us.asleep()), || !self.has_done())
    }

    /// Marks the peer as sleeping again, because the message that wakes it was not sent.
    pub(super) fn was_not_woken(&self) {
        self.shared
            .flag(self.them.asleep())
            .store(1, Ordering::SeqCst);
    }

    /// Announces that this end writes no more records.
    pub(super) fn close(&self) {
        self.shared
            .flag(self.us.closed())
            .store(1, Ordering::Release);
    }

    /// Whether the peer writes no more records.
    #[inline]
    pub(super) fn is_closed_by_peer(&self) -> bool {
        self.shared.flag(self.them.closed()).load(Ordering::Acquire) != 0
    }
}

impl PolledMemory for Watch {
    fn has_input(&self) -> bool {
        let receives = self.receives.load(Ordering::Relaxed);
        receives && (self.has_bytes() || self.has_done()) || self.has_room_again()
    }

    fn owes_ack(&self) -> bool {
        self.owes_ack.load(Ordering::Relaxed)
    }

    fn prepare_sleep(&self, acks: bool) -> bool {
        // Threads that go to sleep at the same time may exceed the limit by their number.
        if self.wakeups_left.load(Ordering::Relaxed) < WAKEUPS_MAX {
            self.wakeups_left.fetch_add(1, Ordering::Relaxed);
        }
        wake::announce_sleep(self.shared.flag(self.us.asleep()), acks, || self.is_ready())
    }

    fn end_sleep(&self) {
        if self.withdraw_sleep() {
            // The peer will send no wake-up for this sleep.
            let less = |left: u32| left.checked_sub(1);
            let _ = self
                .wakeups_left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}

/// The transport between processes of one host. It is always TCP and UDP during a capture, which records only
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
    /// Number of bytes of our ring that the peer had read when that was last checked.
    read_by_them: u64,
    /// Whether our ring was full, and nothing was written since.
    was_full: bool,
    /// After this many bytes it is checked whether the next record can be at the start of the ring. The step is doubled when the ring is
    /// full while a part that was skipped counts as used.
    restart_step: u64,
    /// The position behind which the next check is made.
    restart_check: u64,
    /// The position of the record that was last put at the start of the ring before the ring was used up to its end.
    restarted_at: u64,
    /// Number of checks since the step was changed.
    restart_checks: u32,
    /// The number of the last request of the peer that is executed, for the records that are sent.
    done: u32,
    /// The number of the last request of this end that the peer has executed, from the peer's last record.
    done_by_them: u32,
    /// A part of the peer's ring was read completely since [`Self::must_wake_for_room`] was last called.
    part_taken: bool,
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
        Self::offer_to_this_user(local, remote)
    }

    /// Creates memory for the datagrams between the UDP ports `local` and `remote`. `None` as for [`Self::offer`].
    pub(super) fn offer_to_port(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        if !owner::is_udp_of_this_user(remote) {
            return None;
        }
        Self::offer_to_this_user(local, remote)
    }

    fn offer_to_this_user(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
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
        Self::take_from_this_user(pid, fd, local, remote)
    }

    /// Opens the memory that the UDP port `remote` offers to the port `local`.
    pub(super) fn take_from_port(
        pid: u32,
        fd: u32,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<Self> {
        if COUNT.get().load(Ordering::Relaxed) >= CARRIERS || !owner::is_udp_of_this_user(remote) {
            return None;
        }
        Self::take_from_this_user(pid, fd, local, remote)
    }

    fn take_from_this_user(
        pid: u32,
        fd: u32,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<Self> {
        let shared = Shared::open(pid, fd, LEN).ok()?;
        let mut theirs = [0; CONNECTION_LEN];
        shared.get(CONNECTION, &mut theirs);
        // Memory is opened once: two ends with their own positions would both receive its records.
        let good = theirs == connection_text(remote, local)
            && shared
                .word(0)
                .compare_exchange(MAGIC, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
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
        Self::with(Arc::new(Watch {
            shared,
            us,
            them,
            taken: AtomicU64::new(0),
            receives: AtomicBool::new(false),
            done_seen: AtomicU64::new(0),
            owes_ack: AtomicBool::new(false),
            full_at: AtomicU64::new(u64::MAX),
            wakeups_left: AtomicU32::new(1),
        }))
    }

    /// A second end of the same memory, for receiving, while this one sends. Datagrams are sent and received under
    /// different locks.
    pub(super) fn receiver(&self) -> Self {
        Self::with(Arc::clone(&self.watch))
    }

    fn with(watch: Arc<Watch>) -> Self {
        Self {
            watch,
            written: 0,
            read_by_them: 0,
            was_full: false,
            restart_step: RESTART_STEP,
            restart_check: RESTART_STEP,
            restarted_at: 0,
            restart_checks: 0,
            done: 0,
            done_by_them: 0,
            part_taken: false,
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

    /// Handles the peer's Take: closes the descriptor. Returns false if the proof is wrong, or if the offer has expired
    /// and the process has the largest number of carriers.
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

    // ------------------------------------------------------------------ acknowledgements

    /// Sets the number of the last request of the peer that is executed. The next record contains it.
    #[inline]
    pub(crate) fn set_done(&mut self, done: u32) {
        self.done = done;
        self.watch.set_owes_ack(false);
    }

    /// Writes the number to page 0, for a peer to which there is nothing else to send.
    pub(crate) fn publish_done(&mut self, done: u32) {
        self.set_done(done);
        let word = self.watch.shared.word(self.watch.us.done());
        word.store(DONE_VALID | u64::from(done), Ordering::Release);
    }

    /// The number in the record of the peer that was received last.
    #[inline]
    pub(crate) fn done_by_them(&self) -> u32 {
        self.done_by_them
    }

    /// The number that the peer has written to page 0, if it was not handled yet.
    #[inline]
    pub(crate) fn take_done(&mut self) -> Option<u32> {
        let watch = &self.watch;
        if !watch.has_done() {
            return None;
        }
        let word = watch.shared.word(watch.them.done()).load(Ordering::Acquire);
        watch.done_seen.store(word, Ordering::Relaxed);
        Some(word as u32)
    }

    // ------------------------------------------------------------------ sending

    /// Sends the bytes of `batch` from `skip` on.
    #[inline]
    pub(crate) fn send(&mut self, batch: &TxBatch, skip: usize) -> Io {
        if skip == 0
            && let Some(bytes) = batch.as_bytes()
            && self.send_short(bytes)
        {
            return Io::Done(bytes.len());
        }
        self.send_runs(batch, skip)
    }

    /// Sends bytes as one record, which is not divided at the end of the ring. Returns false if that is not possible or there is
    /// no room. Most messages are sent by this function.
    #[inline]
    fn send_short(&mut self, bytes: &[u8]) -> bool {
        let at = in_ring(self.written) + HEAD;
        if bytes.is_empty() || bytes.len() > RECORD_BYTES || at + bytes.len() > RING {
            return false;
        }
        if self
            .room_for(bytes.len())
            .is_none_or(|room| room < bytes.len())
        {
            return false;
        }
        let watch = &self.watch;
        watch.shared.put(watch.us.ring + at, bytes);
        self.publish(bytes.len());
        true
    }

    #[inline(never)]
    fn send_runs(&mut self, batch: &TxBatch, skip: usize) -> Io {
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
        for run in batch.rest(skip) {
            let (pinned, mut from, mut left) = match run {
                Run::Own(bytes) => (None, 0, bytes.len()),
                Run::User { place, from, len } => match place.pin() {
                    Some(pinned) => (Some(pinned), from, len),
                    None => return Io::Invalidated,
                },
            };
            while left > 0 {
                let Some(room) = self.room_for(left.min(RECORD_BYTES)) else {
                    return Io::Broken(libc::EPROTO);
                };
                if room == 0 {
                    return Io::Done(done);
                }
                let n = left.min(room).min(RECORD_BYTES);
                let start = self.written + HEAD as u64;
                match (run, &pinned) {
                    (Run::Own(bytes), _) => self.for_each_run(start, n, |shared, at, of, n| {
                        let (of, end) = (from + of, from + of + n);
                        shared.put(at, bytes.get(of..end).unwrap_or(&[]));
                    }),
                    (Run::User { .. }, Some(pinned)) => {
                        let whole = UserSlice::new(pinned, from as u64, n as u64);
                        self.for_each_run(start, n, |shared, at, of, n| {
                            shared.put_user(at, whole.part(of, n));
                        });
                    }
                    (Run::User { .. }, None) => return Io::Invalidated,
                }
                self.publish(n);
                (done, from, left) = (done + n, from + n, left - n);
            }
        }
        Io::Done(done)
    }

    /// Sends `head` and `bytes` as one record.
    #[inline]
    pub(super) fn send_record(&mut self, head: &[u8], bytes: &[u8]) -> Io {
        let len = head.len() + bytes.len();
        if len > RECORD_MAX {
            return Io::Broken(libc::EMSGSIZE);
        }
        // As in `send_runs`.
        for _ in 0..4 {
            let seen = self.taken_by_them();
            match self.room_for(len) {
                None => return Io::Broken(libc::EPROTO),
                Some(room) if room >= len => {
                    let start = self.written + HEAD as u64;
                    self.put(start, head);
                    self.put(start + head.len() as u64, bytes);
                    // After a restart there is less room until the peer has read more. A sender of datagrams must not wait for a peer
                    // that has stopped, so all room stays usable.
                    self.publish_record(len, self.written + record_bytes(len), 0);
                    return Io::Done(len);
                }
                Some(_) => {}
            }
            if self.wait_for_room(seen) {
                break;
            }
        }
        Io::WouldBlock
    }

    /// Clears the mark that the ring was full. The peer does not wake this end for room from now on.
    pub(super) fn forget_full(&mut self) {
        self.was_full = false;
        let watch = &self.watch;
        watch.full_at.store(u64::MAX, Ordering::Relaxed);
        watch
            .shared
            .flag(watch.us.blocked())
            .store(0, Ordering::Relaxed);
    }

    /// Whether the ring was full, and nothing was written since.
    pub(super) fn was_full(&self) -> bool {
        self.was_full
    }

    /// Whether memory was offered that the peer has not opened.
    pub(super) fn is_offered(&self) -> bool {
        self.name.is_some() && self.counted.is_none()
    }

    /// Number of bytes that were written to the ring of this end.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Copies `bytes` to the ring of this end, from `position` on.
    #[inline]
    fn put(&self, position: u64, bytes: &[u8]) {
        self.for_each_run(position, bytes.len(), |shared, at, of, n| {
            shared.put(at, bytes.get(of..of + n).unwrap_or(&[]));
        });
    }

    /// The largest payload of a record for which the ring of this end has room. The position of the peer is read again
    /// only if its last known value leaves no room for `wanted` bytes. `None`: the peer claims to have read more than was
    /// written.
    #[inline]
    fn room_for(&mut self, wanted: usize) -> Option<usize> {
        let room = self.room()?;
        if room >= wanted {
            return Some(room);
        }
        self.read_by_them = self.taken_by_them();
        self.room()
    }

    #[inline]
    fn room(&self) -> Option<usize> {
        let used = usize::try_from(self.written.checked_sub(self.read_by_them)?).ok()?;
        // The line of the next record has to be free too, because its first word is set to 0.
        Some(RING.checked_sub(used)?.saturating_sub(LINE + HEAD))
    }

    /// Number of bytes of the ring of this end that the peer claims to have read.
    fn taken_by_them(&self) -> u64 {
        self.watch.taken_by_them()
    }

    /// Marks the ring as full while `seen` bytes of it have been read, so that the peer wakes this end when it reads
    /// more. Returns false if it has read more already.
    fn wait_for_room(&mut self, seen: u64) -> bool {
        // Until the peer has read the last record before the restart, the skipped part of the ring cannot be used.
        if !self.was_full && seen < self.restarted_at {
            self.set_restart_step(2 * self.restart_step);
        }
        let watch = &self.watch;
        self.was_full = true;
        watch.full_at.store(seen, Ordering::Relaxed);
        let blocked = watch.shared.flag(watch.us.blocked());
        wake::announce(blocked, || self.taken_by_them() == seen)
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

    /// Like [`Self::publish_record`]. The next record may be at the start of the ring.
    #[inline]
    fn publish(&mut self, len: usize) {
        let mut next = self.written + record_bytes(len);
        let mut flag = 0;
        // Each check transfers a cache line, so not each record is checked.
        if next >= self.restart_check {
            if self.can_restart(next) {
                next = next.next_multiple_of(RING as u64);
                flag = RESTART;
                self.restarted_at = next;
            }
            self.restart_check = next + self.restart_step;
        }
        self.publish_record(len, next, flag);
    }

    /// Makes a record of `len` bytes, which have been written after its first word, visible to the peer. The next record is at `next`.
    #[inline]
    fn publish_record(&mut self, len: usize, next: u64, flag: u64) {
        let len = u64::from(u32::try_from(len).unwrap_or(0));
        let word = len | flag | u64::from(self.done) << 32;
        let watch = &self.watch;
        let first = |position| watch.shared.word(watch.us.ring + in_ring(position));
        first(next).store(0, Ordering::Relaxed);
        first(self.written).store(word, Ordering::Release);
        self.written = next;
        if self.was_full {
            self.forget_full();
        }
    }

    /// Whether the record at `next` can be at the start of the ring, because the peer has read at least half of what is before it. Then
    /// both ends use only a part of the ring, which stays in the caches of their processors.
    fn can_restart(&mut self, next: u64) -> bool {
        let used = in_ring(next) as u64;
        self.read_by_them = self.taken_by_them();
        let unread = next.saturating_sub(self.read_by_them);
        let restart = used >= self.restart_step && unread <= used / 2;
        self.restart_checks += 1;
        if self.restart_checks >= RESTART_CHECKS {
            self.set_restart_step(self.restart_step / 2);
        }
        restart
    }

    fn set_restart_step(&mut self, step: u64) {
        self.restart_step = step.clamp(RESTART_STEP, RING as u64);
        self.restart_checks = 0;
    }

    /// Whether the peer claims to have read all that was written. A false claim harms only the peer, since it
    /// concerns data sent to it.
    pub(crate) fn is_all_taken(&self) -> bool {
        self.taken_by_them() == self.written
    }

    /// Whether the peer sleeps and has to be woken. True only once for each time that it sleeps.
    #[inline]
    pub(crate) fn must_wake(&self) -> bool {
        let watch = &self.watch;
        wake::must_wake(watch.shared.flag(watch.them.asleep()))
    }

    /// As [`Self::must_wake`], if no record was written but only an acknowledgement in page 0.
    #[inline]
    pub(crate) fn must_wake_for_ack(&self) -> bool {
        let watch = &self.watch;
        wake::must_wake_for_ack(watch.shared.flag(watch.them.asleep()))
    }

    // ------------------------------------------------------------------ receiving

    /// Receives a record into `out`, which is empty, if the record is short and nothing of it has been read. Returns
    /// false if there is none.
    #[inline]
    pub(crate) fn receive_short(&mut self, out: &mut Vec<u8>) -> Result<bool, Io> {
        let Some(record) = self.next_record()? else {
            return Ok(false);
        };
        if record.left > SHORT || record.at != self.taken + HEAD as u64 {
            return Ok(false);
        }
        self.append(record.at, record.left, out);
        self.take_bytes(record, record.left);
        Ok(true)
    }

    /// Copies the first bytes of the next record to `head`, and returns the length of what follows them. `None`: there is
    /// no record.
    #[inline]
    pub(super) fn peek_record(&mut self, head: &mut [u8]) -> Result<Option<usize>, Io> {
        let Some(record) = self.next_record()? else {
            return Ok(None);
        };
        let Some(rest) = record.left.checked_sub(head.len()) else {
            return Err(Io::Broken(libc::EPROTO));
        };
        let (shared, ring) = (&self.watch.shared, self.watch.them.ring);
        runs(record.at, head.len(), |at, of, n| {
            shared.get(ring + at, head.get_mut(of..of + n).unwrap_or(&mut []));
        });
        Ok(Some(rest))
    }

    /// Appends the next record without its first `head` bytes to `out`.
    #[inline]
    pub(super) fn receive_record(&mut self, head: usize, out: &mut Vec<u8>) {
        if let Some(record) = self.current {
            let len = record.left.saturating_sub(head);
            self.append(record.at + head as u64, len, out);
            self.take_bytes(record, record.left);
        }
    }

    /// Appends bytes of the peer's ring to `out`.
    #[inline]
    fn append(&self, position: u64, len: usize, out: &mut Vec<u8>) {
        let (shared, ring) = (&self.watch.shared, self.watch.them.ring);
        runs(position, len, |at, _, n| {
            shared.append_to(ring + at, n, out);
        });
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
                shared.get_user(ring + from, target.part(of, n));
            });
            at += target.len() as u64;
        }
        self.take_bytes(record, n);
        Ok((user, own))
    }

    /// Checks and returns the next record.
    #[inline]
    fn next_record(&mut self) -> Result<Option<Record>, Io> {
        if let Some(current) = self.current {
            return Ok(Some(current));
        }
        // The peer can write any value here, so it is read once and checked.
        let first = self.watch.first_word(self.taken);
        if first == 0 {
            return Ok(None);
        }
        let left = (first & !RESTART) as u32 as usize;
        if left == 0 || left > RING - LINE - HEAD {
            return Err(Io::Broken(libc::EPROTO));
        }
        self.done_by_them = (first >> 32) as u32;
        let mut end = self.taken + record_bytes(left);
        if first & RESTART != 0 {
            end = end.next_multiple_of(RING as u64);
        }
        let record = Record {
            left,
            at: self.taken + HEAD as u64,
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
        let part = RING as u64 / WAKE_PARTS;
        self.part_taken |= self.taken / part != record.end / part;
        self.taken = record.end;
        let watch = &self.watch;
        watch.taken.store(self.taken, Ordering::Relaxed);
        watch
            .shared
            .word(watch.us.taken())
            .store(self.taken, Ordering::Release);
    }

    /// Whether the peer sleeps until its ring has room, and has to be woken.
    ///
    /// This is checked only when a part of the ring has been read completely. A peer whose ring is full is woken in
    /// time: when it sets its flag, the end of at least one part is still to be read, and when the last of these has been read, the ring has room
    /// for any record.
    #[inline]
    pub(crate) fn must_wake_for_room(&mut self) -> bool {
        if !std::mem::take(&mut self.part_taken) {
            return false;
        }
        let watch = &self.watch;
        let (blocked, asleep) = (watch.them.blocked(), watch.them.asleep());
        wake::must_wake_for_room(watch.shared.flag(blocked), watch.shared.flag(asleep))
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        if self.name.is_some() && self.counted.is_none() {
            // A thread of the program may close a file here, and close(2) is a cancellation point.
            let _inside = Uncancelled::new();
            Offer::close(self.proof);
        }
    }
}

/// Converts a position, which counts all bytes since the start of the stream of records, to an
/// offset in a ring.
#[inline]
fn in_ring(position: u64) -> usize {
    position as usize % RING
}

/// The length of a record with `len` bytes of payload.
#[inline]
fn record_bytes(len: usize) -> u64 {
    (HEAD + len).next_multiple_of(LINE) as u64
}

/// Calls `each` for the one or two parts of a ring that contain `len` bytes from `position` on, with the offset in
/// the ring, the offset in the bytes, and the length.
fn runs(position: u64, len: usize, mut each: impl FnMut(usize, usize, usize)) {
    let at = in_ring(position);
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
            // 0 writes the first word of a record, with any length. 1 writes an acknowledgement.
            0 => word(them.ring + in_ring(shm.taken))
                .store(large.wrapping_mul(0x1_0000_0001), Ordering::Release),
            1 => word(them.done()).store(large.wrapping_mul(0x1_0000_0001), Ordering::Release),
            // 2 and 3 write the position up to which the peer has read: one near the true position,
            // or any.
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
            // 5 writes the first word of the record behind one with `small` bytes of payload. 6 writes the first word of a correct
            // record with `small` bytes.
            5 => {
                let next = shm.taken + record_bytes(small);
                word(them.ring + in_ring(next)).store(large, Ordering::Release);
            }
            6 => {
                let first = |position| word(them.ring + in_ring(position));
                let (next, restart) = match large & 8 {
                    0 => (shm.taken + record_bytes(small), 0),
                    _ => (0, RESTART),
                };
                first(next).store(0, Ordering::Relaxed);
                first(shm.taken).store(small.max(1) as u64 | restart, Ordering::Release);
            }
            7 => {
                let room = out.get_mut(..small * 16).unwrap_or(&mut []);
                let len = room.len();
                let before = shm.taken;
                let _ = (shm.take_done(), shm.done_by_them());
                if large & 1 == 0 {
                    let mut record = Vec::new();
                    match shm.receive_short(&mut record) {
                        Ok(there) if there != record.is_empty() && record.len() <= SHORT => {}
                        Ok(_) => panic!("a short record of {} bytes", record.len()),
                        Err(_) => return,
                    }
                }
                match shm.receive(None, room) {
                    Ok((0, n)) if n <= len => {}
                    Ok(n) => panic!("{n:?} bytes into {len}"),
                    Err(Io::WouldBlock) => {}
                    Err(_) => return,
                }
                let moved = shm.taken.wrapping_sub(before);
                assert!(
                    moved <= 4 * RING as u64,
                    "{moved} bytes of the ring were taken by two records"
                );
            }
            _ if large & 2 == 2 => {
                // As a carrier of datagrams.
                match shm.send_record(&[0; 4], out.get(..small * 16).unwrap_or(&[])) {
                    Io::Done(n) if n == 4 + small * 16 => {}
                    Io::Done(n) => panic!("a record of {n} bytes for {}", small * 16),
                    Io::WouldBlock => {}
                    _ => return,
                }
                let before = shm.taken;
                let mut run = Vec::new();
                match shm.peek_record(&mut [0; 4]) {
                    Ok(Some(len)) => {
                        shm.receive_record(4, &mut run);
                        assert_eq!(run.len(), len, "the announced length");
                    }
                    Ok(None) => {}
                    Err(_) => return,
                }
                assert!(shm.taken.wrapping_sub(before) <= 2 * RING as u64);
                let _ = (watch.is_full(), watch.has_room_again());
                shm.forget_full();
            }
            _ => {
                let mut batch = TxBatch::default();
                batch.push_raw(out.get(..small * 16 + 1).unwrap_or(&[0]));
                if large & 1 == 0 {
                    shm.set_done(large as u32);
                } else {
                    shm.publish_done(large as u32);
                }
                match shm.send(&batch, 0) {
                    Io::Done(n) if n <= batch.len() => {}
                    Io::Done(n) => panic!("{n} bytes of {}", batch.len()),
                    Io::WouldBlock => {}
                    _ => return,
                }
                let _ = (
                    shm.is_all_taken(),
                    shm.must_wake_for_ack(),
                    shm.must_wake(),
                    shm.must_wake_for_room(),
                );
                let _ = (
                    watch.is_ready(),
                    watch.prepare_sleep(large & 4 == 4),
                    watch.await_ack(),
                    shm.count_wakeups(small),
                );
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
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

    /// The two ends of memory between a connection of this process to itself.
    pub(crate) fn pair() -> (Shm, Shm) {
        let (_server, _client, local, remote) = connection();
        let mut one = Shm::offer(local, remote).unwrap();
        let (pid, fd) = one.name().unwrap();
        assert!(
            Shm::take(pid, fd, local, remote).is_none(),
            "made for another connection"
        );
        let other = Shm::take(pid, fd, remote, local).unwrap();
        assert!(one.taken_by_peer(other.proof()));
        one.watch().set_receives();
        other.watch().set_receives();
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
    fn an_acknowledgement_wakes_only_an_end_that_wants_it() {
        let (one, mut other) = pair();
        let one = one.watch();
        let _ = one.prepare_sleep(false);
        other.publish_done(1);
        assert!(!other.must_wake_for_ack());
        assert!(other.must_wake(), "a record wakes it");
        let _ = one.prepare_sleep(true);
        assert!(other.must_wake_for_ack());
        assert!(!other.must_wake(), "it is awake");
        // Requests are posted that wait for the acknowledgement while the worker sleeps.
        let (one, mut other) = pair();
        let _ = one.watch().prepare_sleep(false);
        assert!(one.watch().await_ack());
        other.publish_done(1);
        assert!(other.must_wake_for_ack());
        assert!(!one.watch().await_ack(), "it has arrived");
    }

    #[test]
    fn excess_wake_ups_are_noticed() {
        let (mut one, other) = pair();
        // Both ends are marked as sleeping at first.
        assert!(other.must_wake() && one.count_wakeups(1));
        assert!(!one.count_wakeups(1), "it did not sleep again");
        let (mut one, other) = pair();
        for _ in 0..10 {
            let _ = one.watch().prepare_sleep(true);
            assert!(other.must_wake() && one.count_wakeups(1));
        }
        // It has slept eleven times (once before the first poll), and the peer may wake it each time.
        assert!(one.count_wakeups(1) && !one.count_wakeups(1));
        // A sleep that was withdrawn permits no wake-up, unless the peer has seen it before.
        let (mut one, other) = pair();
        one.watch().end_sleep();
        assert!(!other.must_wake() && !one.count_wakeups(1));
        let _ = one.watch().prepare_sleep(true);
        assert!(other.must_wake());
        one.watch().end_sleep();
        assert!(one.count_wakeups(1) && !one.count_wakeups(1));
        // Even if this end slept often without being woken, the peer may send only a limited number of bytes at once.
        let (mut one, _other) = pair();
        for _ in 0..100_000 {
            let _ = one.watch().prepare_sleep(true);
        }
        assert!(!one.count_wakeups(WAKEUPS_MAX as usize + 1));
        assert!(one.count_wakeups(WAKEUPS_MAX as usize) && !one.count_wakeups(1));
    }

    /// Receives all available bytes.
    pub(in crate::net) fn drain(from: &mut Shm, out: &mut Vec<u8>) -> Result<(), Io> {
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
                            !one.watch().prepare_sleep(true),
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
    fn a_ring_that_is_read_in_time_begins_again_at_its_start() {
        let (mut one, mut other) = pair();
        let mut batch = TxBatch::default();
        batch.push_raw(&[7; 4000]);
        let mut out = Vec::new();
        let mut farthest = 0;
        // The peer always leaves one record unread.
        assert_eq!(one.send(&batch, 0), Io::Done(4000));
        for _ in 0..200 {
            assert_eq!(one.send(&batch, 0), Io::Done(4000));
            farthest = farthest.max(in_ring(one.written));
            assert_eq!(other.receive(None, &mut [0; 4000]), Ok((0, 4000)));
        }
        assert!(farthest < 2 * RESTART_STEP as usize, "{farthest}");
        drain(&mut other, &mut out).unwrap();
        assert!(one.is_all_taken() && out.len() == 4000);
    }

    #[test]
    fn a_burst_after_a_restart_has_the_room_of_what_was_read() {
        let mut batch = TxBatch::default();
        batch.push_raw(&[7; 4000]);
        let (mut restarted, mut least) = (0, usize::MAX);
        for read in 0..100 {
            let (mut one, mut other) = pair();
            let mut out = Vec::new();
            for _ in 0..read {
                assert_eq!(one.send(&batch, 0), Io::Done(4000));
                drain(&mut other, &mut out).unwrap();
            }
            // The peer stops reading.
            let mut unread = 0;
            while let Io::Done(n) = one.send(&batch, 0) {
                unread += n;
            }
            restarted += usize::from(one.restarted_at > other.taken);
            least = least.min(unread);
            // The step is doubled once, however often the ring is found full.
            assert_eq!(one.send(&batch, 0), Io::WouldBlock);
            assert!(one.restart_step <= 2 * RESTART_STEP);
            out.clear();
            drain(&mut other, &mut out).unwrap();
            assert!(out.len() == unread && out.iter().all(|byte| *byte == 7));
            assert!(one.is_all_taken() && other.must_wake_for_room());
        }
        assert!(restarted > 10, "{restarted}");
        assert!(least >= RESTART_STEP as usize / 2, "{least}");
    }

    #[test]
    fn all_room_is_usable_for_datagrams() {
        for read in 0..100 {
            let (mut one, mut other) = pair();
            for _ in 0..read {
                assert_eq!(one.send_record(&[1; 4], &[7; 4000]), Io::Done(4004));
                assert_eq!(other.peek_record(&mut [0; 4]), Ok(Some(4000)));
                other.receive_record(4, &mut Vec::new());
            }
            let mut unread = 0;
            while one.send_record(&[1; 4], &[7; 4000]) == Io::Done(4004) {
                unread += 1;
            }
            assert_eq!(unread, (RING - LINE) / record_bytes(4004) as usize);
        }
    }

    #[test]
    fn memory_is_not_ready_before_its_bytes_are_received() {
        let (one, mut other) = pair();
        one.watch().receives.store(false, Ordering::Relaxed);
        let mut batch = TxBatch::default();
        batch.push_raw(b"some");
        assert_eq!(other.send(&batch, 0), Io::Done(4));
        other.publish_done(7);
        assert!(!one.watch().is_ready());
        one.watch().set_receives();
        assert!(one.watch().is_ready());
    }

    #[test]
    fn records_and_the_page_acknowledge() {
        let (mut one, mut other) = pair();
        let mut batch = TxBatch::default();
        batch.push_raw(b"some");
        one.set_done(0x8000_0007);
        assert_eq!(one.send(&batch, 0), Io::Done(4));
        let mut record = Vec::new();
        assert_eq!(other.receive_short(&mut record), Ok(true));
        assert_eq!(
            (record.as_slice(), other.done_by_them()),
            (&b"some"[..], 0x8000_0007)
        );
        assert!(!other.watch().is_ready() && other.take_done().is_none());
        // Without a record the number is in page 0, and is seen once. Any number may be the first, even 0.
        for done in [0, 1, u32::MAX] {
            one.watch().set_owes_ack(true);
            assert!(one.watch().is_ready(), "the next poll has to acknowledge");
            one.publish_done(done);
            assert!(!one.watch().is_ready() && other.watch().is_ready());
            assert_eq!((other.take_done(), other.take_done()), (Some(done), None));
            assert!(!other.watch().is_ready());
        }
    }

    #[test]
    fn a_long_record_is_not_received_as_a_short_one() {
        let (mut one, mut other) = pair();
        let mut batch = TxBatch::default();
        batch.push_raw(&[7; SHORT + 1]);
        assert_eq!(one.send(&batch, 0), Io::Done(SHORT + 1));
        let mut record = Vec::new();
        assert_eq!(other.receive_short(&mut record), Ok(false));
        // The rest of a record that was read in part is not received as a record either.
        assert_eq!(other.receive(None, &mut [0; 10]), Ok((0, 10)));
        assert_eq!(other.receive_short(&mut record), Ok(false));
        assert!(record.is_empty());
        let mut out = Vec::new();
        drain(&mut other, &mut out).unwrap();
        assert_eq!(out.len(), SHORT - 9);
    }

    #[test]
    fn a_sleeping_end_is_woken_once() {
        let (mut one, mut other) = pair();
        let mut batch = TxBatch::default();
        batch.push_raw(b"some");
        assert!(!other.watch().prepare_sleep(true), "there is nothing");
        assert_eq!(one.send(&batch, 0), Io::Done(4));
        assert!(one.must_wake() && !one.must_wake());
        assert!(other.watch().prepare_sleep(true), "there is something");
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
            // The first record: any length, one that fits, or one of about the length of the ring.
            let first = match round % 3 {
                0 => random(),
                1 => random() % 4096,
                _ => RING as u64 - 128 + 8 * (random() % 32),
            };
            page.word(us.ring).store(first, Ordering::Release);
            page.word(us.done()).store(random(), Ordering::Release);
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
        assert!(broken > 150, "{broken}");
    }
}
