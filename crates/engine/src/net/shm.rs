//! Shared memory as the carrier of a stream between two processes of one user on one host.
//!
//! Each direction has a ring of records. A record holds bytes of the stream, or names the sender's memory that has them. The
//! receiver copies the latter from process to process, directly to their destination, if the kernel permits it. An end that
//! stops polling sets its `asleep` flag; its peer then wakes it with a byte on the TCP connection when there is something to
//! do. The end of the connection is the end of the stream.
//!
//! ```text
//! page 0: positions, flags, whose memory it is     ring of the end that offered     ring of the other end
//!
//!  0        4        8                 16                    16 + bytes, filled up to 16
//! +--------+--------+-----------------+---------------------
//! | kind   | bytes  | address         | bytes (kind BYTES)
//! +--------+--------+-----------------+---------------------
//! ```

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anywarp_core::bounds::{CARRIER_RING as RING, CARRIERS};
use anywarp_core::llp::mpa::frame::{Piece, TxBatch};
use smallvec::SmallVec;

use crate::capture;
use crate::config::{Transport, config};
use crate::mem::{PinnedPart, Unfilled, UserSlice};
use crate::net::wake;
use crate::process;
use crate::process::PerProcess;
use crate::random::random_u32;
use crate::reactor::PolledMemory;
use crate::shared::{Shared, pull};
use crate::sys::Io;
use crate::sys::thread::Uncancelled;

const LEN: usize = PAGE + 2 * RING;
const PAGE: usize = 4096;
const HEAD: usize = 16;
/// The first word of the page.
const MAGIC: u64 = 0x6177_6361_7272_0001;
/// Offset of the addresses of the connection that the memory is for, as text.
const CONNECTION: usize = 2048;
const CONNECTION_LEN: usize = 160;

/// Offsets of the words of one end in the page, each in a cache line of its own.
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
    /// Bytes that it has written.
    const fn written(self) -> usize {
        self.base
    }
    /// Bytes of the other ring that it has taken.
    const fn taken(self) -> usize {
        self.base + 64
    }
    /// It does not poll and has to be woken.
    const fn asleep(self) -> usize {
        self.base + 128
    }
    /// Its ring is full, and it has more to send.
    const fn blocked(self) -> usize {
        self.base + 192
    }
    /// It can copy from the memory of the other process.
    const fn pulls(self) -> usize {
        self.base + 256
    }
    /// Its process identifier.
    const fn pid(self) -> usize {
        self.base + 264
    }
    /// The address and value of its mark.
    const fn mark(self) -> usize {
        self.base + 272
    }
    /// The other end must not copy from its memory any more.
    const fn gone(self) -> usize {
        self.base + 320
    }
}

const BYTES: u32 = 1;
const PLACE: u32 = 2;

/// A random value at an address of this process, by which a peer that copies from it recognizes the process.
static MARK: PerProcess<AtomicU64> =
    PerProcess::new(|| AtomicU64::new(u64::from(random_u32()) << 32 | u64::from(random_u32()) | 1));

/// How many connections of this process share memory.
static COUNT: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

/// The part that a polling thread reads, without a lock on the queue pair.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Shared,
    us: Lines,
    them: Lines,
    /// Bytes of the peer's ring that were taken.
    taken: AtomicU64,
    /// When our ring was full this many bytes of it had been taken; `u64::MAX`: it was not full.
    full_at: AtomicU64,
}

impl Watch {
    /// Whether there is something to receive.
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
        wake::announce(self.shared.flag(self.us.asleep()), || self.is_ready())
    }
}

/// What carries streams between processes of one host. A capture shows what sockets carry, so with one it is always TCP.
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
    /// The peer's process and mark, if its memory can be copied from.
    peer: Option<(u32, (u64, u64))>,
    written: u64,
    taken: u64,
    /// The record that has been taken in part.
    current: Option<Record>,
    /// Position behind the last record of our ring that names memory.
    places_until: u64,
    /// The descriptor that the peer opens the memory by, until it has done so.
    file: Option<OwnedFd>,
    generation: u32,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    kind: u32,
    left: usize,
    /// Position of its next byte in the ring, or address in the peer's process.
    at: u64,
    /// Position behind it.
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
    /// New memory for the connection from `local` to `remote`. `None`: the process has too many, or no memory.
    pub(crate) fn offer(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        if COUNT.get().load(Ordering::Relaxed) >= CARRIERS {
            return None;
        }
        let (shared, file) = Shared::create(LEN).ok()?;
        shared.put(CONNECTION, &connection_text(local, remote));
        shared.word(0).store(MAGIC, Ordering::Release);
        Some(Self::new(shared, true, Some(file)))
    }

    /// The memory that the peer of the connection from `local` to `remote` offers.
    pub(crate) fn take(pid: u32, fd: u32, local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        if COUNT.get().load(Ordering::Relaxed) >= CARRIERS {
            return None;
        }
        let shared = Shared::open(pid, fd, LEN).ok()?;
        let mut theirs = [0; CONNECTION_LEN];
        shared.get(CONNECTION, &mut theirs);
        let good = shared.word(0).load(Ordering::Acquire) == MAGIC
            && theirs == connection_text(remote, local);
        good.then(|| {
            let mut shm = Self::new(shared, false, None);
            shm.try_pulling();
            shm
        })
    }

    fn new(shared: Shared, offerer: bool, file: Option<OwnedFd>) -> Self {
        let (us, them) = (Lines::of(offerer), Lines::of(!offerer));
        let mark = MARK.get();
        let address = (&raw const *mark).expose_provenance() as u64;
        let pid = u64::from(std::process::id());
        shared.word(us.pid()).store(pid, Ordering::Relaxed);
        shared.word(us.mark()).store(address, Ordering::Relaxed);
        let value = mark.load(Ordering::Relaxed);
        shared.word(us.mark() + 8).store(value, Ordering::Relaxed);
        // Until a thread polls, the peer has to wake this end.
        shared.flag(us.asleep()).store(1, Ordering::SeqCst);
        COUNT.get().fetch_add(1, Ordering::Relaxed);
        Self {
            watch: Arc::new(Watch {
                shared,
                us,
                them,
                taken: AtomicU64::new(0),
                full_at: AtomicU64::new(u64::MAX),
            }),
            peer: None,
            written: 0,
            taken: 0,
            current: None,
            places_until: 0,
            file,
            generation: process::generation(),
        }
    }

    /// The part that a polling thread reads.
    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// The process and descriptor by which the peer opens the memory.
    pub(crate) fn name(&self) -> Option<(u32, u32)> {
        let fd = u32::try_from(self.file.as_ref()?.as_raw_fd()).ok()?;
        Some((std::process::id(), fd))
    }

    /// The peer has opened the memory: closes the descriptor, and tries to copy from the peer's process.
    pub(crate) fn taken_by_peer(&mut self) {
        self.file = None;
        self.try_pulling();
    }

    /// Whether payload is copied directly from the peer's process.
    pub(crate) fn pulls(&self) -> bool {
        self.peer.is_some()
    }

    fn try_pulling(&mut self) {
        if config().transport == Transport::Copy {
            return;
        }
        let (shared, us, them) = (&self.watch.shared, self.watch.us, self.watch.them);
        let word = |at| shared.word(at).load(Ordering::Acquire);
        let Ok(pid) = u32::try_from(word(them.pid())) else {
            return;
        };
        let mark = (word(them.mark()), word(them.mark() + 8));
        if pull(pid, mark.0, &[], mark).is_ok() {
            self.peer = Some((pid, mark));
            shared.flag(us.pulls()).store(1, Ordering::Release);
        }
    }

    /// Sends the bytes of `batch` from `skip` on.
    pub(crate) fn send(&mut self, batch: &TxBatch, skip: usize) -> Io {
        // The peer may take bytes after the ring was found full and before it is marked so: then sending is tried again.
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
        let before = self.written;
        let pulls = {
            let watch = &self.watch;
            watch
                .shared
                .flag(watch.them.pulls())
                .load(Ordering::Acquire)
                == 1
        };
        let Some(mut room) = self.room() else {
            return Io::Broken(libc::EPROTO);
        };
        let mut done = 0;
        for (piece, skip, left) in batch.rest(skip) {
            if room < 2 * HEAD {
                break;
            }
            let fits = left.min(room - HEAD);
            let n = match piece {
                Piece::Own { from, .. } => {
                    let bytes = batch.own(from + skip, from + skip + fits);
                    self.header(BYTES, fits, 0);
                    self.for_each_run(self.written, fits, |shared, at, from, n| {
                        shared.put(at, bytes.get(from..from + n).unwrap_or(&[]));
                    });
                    self.advance(fits);
                    fits
                }
                Piece::User(place) => {
                    let Some(pinned) = place.pin() else {
                        self.publish(before);
                        return Io::Invalidated;
                    };
                    let whole = UserSlice::new(&pinned, skip as u64, left as u64);
                    if pulls {
                        self.header(PLACE, left, whole.start().addr() as u64);
                        self.places_until = self.written;
                        left
                    } else {
                        self.header(BYTES, fits, 0);
                        self.for_each_run(self.written, fits, |shared, at, from, n| {
                            shared.put_from(at, whole.part(from, n));
                        });
                        self.advance(fits);
                        fits
                    }
                }
            };
            done += n;
            room = self.room().unwrap_or(0);
            if n < left {
                break;
            }
        }
        self.publish(before);
        Io::Done(done)
    }

    /// Bytes that our ring has room for. `None`: the peer claims to have taken more than was written.
    fn room(&self) -> Option<usize> {
        let used = usize::try_from(self.written.checked_sub(self.taken_by_them())?).ok()?;
        RING.checked_sub(used)
    }

    /// Bytes of our ring that the peer has taken, as it claims.
    fn taken_by_them(&self) -> u64 {
        let watch = &self.watch;
        let taken = watch.shared.word(watch.them.taken());
        taken.load(Ordering::Acquire)
    }

    /// Marks the ring as full when `seen` bytes of it are taken, so that the peer wakes this end when it takes more. False if it
    /// has taken more already.
    fn wait_for_room(&mut self, seen: u64) -> bool {
        let watch = &self.watch;
        watch.full_at.store(seen, Ordering::Relaxed);
        let blocked = watch.shared.flag(watch.us.blocked());
        wake::announce(blocked, || self.taken_by_them() == seen)
    }

    fn header(&mut self, kind: u32, len: usize, address: u64) {
        let mut header = [0; HEAD];
        let (k, rest) = header.split_at_mut(4);
        let (l, a) = rest.split_at_mut(4);
        k.copy_from_slice(&kind.to_ne_bytes());
        l.copy_from_slice(&u32::try_from(len).unwrap_or(0).to_ne_bytes());
        a.copy_from_slice(&address.to_ne_bytes());
        self.for_each_run(self.written, HEAD, |shared, at, from, n| {
            shared.put(at, header.get(from..from + n).unwrap_or(&[]));
        });
        self.written += HEAD as u64;
    }

    fn advance(&mut self, bytes: usize) {
        self.written += bytes.next_multiple_of(HEAD) as u64;
    }

    /// Calls `each` for the one or two runs that `len` bytes from `position` of our ring on are.
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

    /// Makes what was written visible to the peer.
    fn publish(&mut self, before: u64) {
        if self.written == before {
            return;
        }
        let watch = &self.watch;
        watch
            .shared
            .word(watch.us.written())
            .store(self.written, Ordering::Release);
        watch.full_at.store(u64::MAX, Ordering::Relaxed);
    }

    /// Whether the peer sleeps and has to be woken. True only once each time that it sleeps.
    pub(crate) fn must_wake(&self) -> bool {
        let watch = &self.watch;
        wake::must_wake(watch.shared.flag(watch.them.asleep()))
    }

    /// Whether the peer has yet to copy memory that our records name.
    pub(crate) fn lends(&self) -> bool {
        self.taken_by_them() < self.places_until
    }

    /// Forbids the peer to copy memory that our records name.
    pub(crate) fn withdraw(&self) {
        let watch = &self.watch;
        watch
            .shared
            .flag(watch.us.gone())
            .store(1, Ordering::SeqCst);
    }

    /// Receives into user memory, or without `direct` into `buffer`. Returns the bytes in user memory and those in the buffer.
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
        if record.kind == PLACE {
            let Some((pid, mark)) = self.peer else {
                return Err(Io::Broken(libc::EPROTO));
            };
            let watch = &self.watch;
            pull(pid, record.at, &to, mark)
                .map_err(|e: io::Error| Io::Broken(e.raw_os_error().unwrap_or(libc::ECONNRESET)))?;
            if watch.shared.flag(watch.them.gone()).load(Ordering::SeqCst) == 1 {
                return Err(Io::Broken(libc::ECONNRESET));
            }
        } else {
            let (shared, ring) = (&self.watch.shared, self.watch.them.ring);
            let mut at = record.at;
            for target in &to {
                runs(at, target.len(), |from, of, n| {
                    shared.get_to(ring + from, target.part(of, n));
                });
                at += target.len() as u64;
            }
        }
        self.take_bytes(record, n);
        Ok((user, own))
    }

    /// The next record, after checks.
    fn next_record(&mut self) -> Result<Option<Record>, Io> {
        if let Some(current) = self.current {
            return Ok(Some(current));
        }
        let watch = &self.watch;
        let written = watch
            .shared
            .word(watch.them.written())
            .load(Ordering::Acquire);
        // The peer can write anything here, so every number is checked.
        let there = written.wrapping_sub(self.taken);
        if there == 0 {
            return Ok(None);
        }
        let broken = Io::Broken(libc::EPROTO);
        if there > RING as u64 || there < HEAD as u64 || !written.is_multiple_of(HEAD as u64) {
            return Err(broken);
        }
        let mut header = [0; HEAD];
        let ring = watch.them.ring;
        runs(self.taken, HEAD, |at, from, n| {
            watch
                .shared
                .get(ring + at, header.get_mut(from..from + n).unwrap_or(&mut []));
        });
        let (kind, rest) = header.split_first_chunk::<4>().ok_or(broken)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(broken)?;
        let address = rest.first_chunk::<8>().ok_or(broken)?;
        let kind = u32::from_ne_bytes(*kind);
        let left = u32::from_ne_bytes(*len) as usize;
        let start = self.taken + HEAD as u64;
        let record = match kind {
            BYTES if left > 0 && left <= RING => Record {
                kind,
                left,
                at: start,
                end: start + left.next_multiple_of(HEAD) as u64,
            },
            PLACE if left > 0 => Record {
                kind,
                left,
                at: u64::from_ne_bytes(*address),
                end: start,
            },
            _ => return Err(broken),
        };
        if record.end.wrapping_sub(self.taken) > there {
            return Err(broken);
        }
        self.current = Some(record);
        Ok(Some(record))
    }

    /// Marks `n` bytes of the record as taken.
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
        // The thread that posts or polls closes a file here, which is a cancellation point.
        let _inside = Uncancelled::new();
        self.file = None;
        let count = COUNT.get();
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        // A forked child must not withdraw the memory of its parent.
        if self.generation == process::generation() {
            self.withdraw();
        }
    }
}

/// Calls `each` for the one or two runs that `len` bytes from `position` on occupy in a ring: offset in the ring, offset in the
/// bytes, and length.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Shm, Shm) {
        let local: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let remote: SocketAddr = "127.0.0.1:2".parse().unwrap();
        let mut one = Shm::offer(local, remote).unwrap();
        let (pid, fd) = one.name().unwrap();
        assert!(
            Shm::take(pid, fd, local, remote).is_none(),
            "made for another connection"
        );
        let other = Shm::take(pid, fd, remote, local).unwrap();
        one.taken_by_peer();
        (one, other)
    }

    /// Takes all that is there.
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
    fn bytes_of_any_number_come_in_order_round_the_ring() {
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
                        1 => (random() % 5) | ((random() % 70_000) << 32),
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
            // The peer claims to have taken bytes that were never written.
            assert!(matches!(
                one.send(&batch, 0),
                Io::Broken(_) | Io::Done(100) | Io::WouldBlock
            ));
        }
        assert!(broken > 200, "{broken}");
    }
}
