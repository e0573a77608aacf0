//! The TCP connection of a reliable queue pair, and the hand-over of its stream to shared memory or to a trunk.

mod on_trunk;
mod seat;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::{Connection, End};
use anywarp_core::error::{PeerError, TermCode};
use anywarp_core::llp::mpa::frame::{self, TxBatch};
use anywarp_core::llp::mpa::marker::Inserter;
use anywarp_core::llp::mpa::startup::StreamParams;
use anywarp_core::verbs::qp::State;
use anywarp_core::wire::control::Handover;
use anywarp_core::wire::rdmap::Terminate;
use rustix::io::Errno;

use crate::clock;
use crate::config::Framing;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::mem::Unfilled;
use crate::net::congestion::Congestion;
use crate::net::drain::drain;
pub use crate::net::outcome::Outcome;
use crate::net::shm::{Shm, Watch};
use crate::net::socket;
use crate::process::PerProcess;
use crate::reactor::{PolledMemory, RX_BUFFER_LEN};
use crate::sys::socket::{get_option, unacknowledged, unsent, wait_readable};
use crate::sys::thread::Uncancelled;
use crate::sys::{Io, stream};
use seat::Seat;

/// Bytes that a queue pair receives in one *turn*: one call of [`Tcp::receive`], which receives what has arrived up to a limit, so that
/// a busy connection does not keep others waiting. A turn of sending is one call of [`Tcp::transmit`].
const RX_TURN_BYTES: usize = 1 << 20;
/// Bytes of short records that a queue pair receives from shared memory in one turn.
const RX_RECORDS_BYTES: usize = 64 << 10;
/// Largest number of short records that are received in one turn. The message in a record takes less than half a microsecond.
const RX_RECORDS: usize = 128;
/// Largest number of turns in which all records of a full ring of shared memory are received.
pub(crate) const RX_RING_TURNS: usize = super::shm::RECORDS_MAX / RX_RECORDS + 1;
/// A received record counts as at least this many bytes, because each record takes some time.
const RX_RECORD_LEAST: usize = 64;
/// Bytes at the end of a message that are never received straight from a socket into user memory: one word.
const LAST_BYTES: u64 = 8;
/// Bytes that a queue pair sends in one turn. Sending costs more than receiving: with a limit of 1 MiB, eight
/// connections with long Read Responses delayed others by three milliseconds.
const TX_TURN_BYTES: usize = 256 << 10;
/// How long one turn may handle FPDUs. An FPDU may be as short as 20 bytes, so the number of bytes does not limit the
/// time. A connection that exceeds this time receives fewer bytes at a time from then on.
const TURN_TIME: Duration = Duration::from_micros(50);
/// The handling of at least this many received bytes is timed. The handling of fewer takes less than [`TURN_TIME`].
const TIMED_BYTES: usize = 4 * 1024;
/// Transmit buffer that an idle queue pair keeps, bytes. A larger buffer is returned to the engine for reuse.
const IDLE_TX_BUFFER: usize = 4 * 1024;

/// System calls and bytes of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// System calls for sending, successful or not.
    pub tx_calls: u64,
    /// Bytes that were sent.
    pub tx_bytes: u64,
    /// Attempts to send for which the socket, the shared ring or the trunk had no room.
    pub tx_full: u64,
    /// System calls for receiving, successful or not.
    pub rx_calls: u64,
    /// Bytes that were received.
    pub rx_bytes: u64,
    /// Attempts to receive that found nothing.
    pub rx_empty: u64,
}

impl Counters {
    /// All counters with their names.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("tx_calls", self.tx_calls),
            ("tx_bytes", self.tx_bytes),
            ("tx_full", self.tx_full),
            ("rx_calls", self.rx_calls),
            ("rx_bytes", self.rx_bytes),
            ("rx_empty", self.rx_empty),
        ]
    }
}

/// A connection, with the bytes that were received or framed in part.
#[derive(Debug)]
pub struct Tcp {
    fd: EngineFd,
    /// For a queue pair that is connected to itself: the socket to which it sends. It receives from `fd`.
    tx: Option<EngineFd>,
    batch: TxBatch,
    /// Bytes of `batch` that were sent.
    sent: usize,
    /// Bytes of an incomplete FPDU that were received.
    rest: Vec<u8>,
    /// The record of shared memory that is received now.
    record: Vec<u8>,
    /// Bytes that are received into the engine's buffer at a time.
    rx_limit: usize,
    /// Whether the last turn ended before it had received everything.
    rx_limited: bool,
    framing: Framing,
    congestion: Congestion,
    /// Whether sending goes on only when the socket is writable or the shared ring has room.
    pub(crate) blocked: bool,
    /// Bytes that may be sent in one turn.
    most: usize,
    /// Whether the last turn of sending ended because of `most`.
    limited: bool,
    waiting: Option<Waiting>,
    pub(crate) counts: Counters,
    /// The memory shared with the peer. Set when it is offered.
    shm: Option<Shm>,
    /// Whether the stream to the peer goes through `shm`.
    tx_shm: bool,
    /// Whether something was written to the shared memory since the last check whether the peer has to be woken.
    unannounced: bool,
    /// Whether the byte that wakes the peer could not be sent, and [`Self::wake_again`] is to be called.
    unwoken: bool,
    /// Whether the stream from the peer goes through `shm`.
    rx_shm: bool,
    /// The place on a trunk. Set when a trunk is offered.
    seat: Option<Box<Seat>>,
    /// A message of the peer about a trunk, for the queue pair.
    trunk_message: Option<Handover>,
    /// Whether the peer may have sent its last messages on a trunk that had ended, and nothing has arrived on this connection since.
    may_lack_last: bool,
}

/// Counts a batch for which the socket or ring has no room.
#[derive(Debug)]
struct Waiting;

/// Batches of this process for which there was no room.
static WAITING: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

impl Waiting {
    fn new() -> Self {
        WAITING.get().fetch_add(1, Ordering::Relaxed);
        Self
    }

    /// Whether there are so many waiting batches that new ones are kept small, to save memory.
    fn many() -> bool {
        WAITING.get().load(Ordering::Relaxed) >= bounds::TX_LARGE_WAITING
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let count = WAITING.get();
        // A batch that was counted before a fork is not part of the child's count.
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// The effect of a hand-over message of the peer.
#[derive(Debug, Clone, Copy)]
enum Handled {
    /// There was none, or the peer's stream does not switch.
    Unchanged,
    /// The peer's stream goes through shared memory from here on.
    Switched,
    /// The peer's stream goes through a trunk from here on.
    OnTrunk,
    /// The peer broke a rule, and its stream ends.
    Violation,
}

impl Tcp {
    /// Takes a connected socket and bytes that were received from it during start-up. With `tx`, sends to that socket.
    pub fn new(fd: EngineFd, tx: Option<EngineFd>, leftover: Vec<u8>, framing: Framing) -> Self {
        Self {
            fd,
            tx,
            batch: TxBatch::default(),
            sent: 0,
            rest: leftover,
            record: Vec::new(),
            rx_limit: RX_BUFFER_LEN,
            rx_limited: false,
            framing,
            congestion: Congestion::default(),
            blocked: false,
            most: usize::MAX,
            limited: false,
            waiting: None,
            counts: Counters::default(),
            shm: None,
            tx_shm: false,
            unannounced: false,
            unwoken: false,
            rx_shm: false,
            seat: None,
            trunk_message: None,
            may_lack_last: false,
        }
    }

    /// Called when this library has established the connection. The connection was opened with the congestion control for short paths; if its
    /// path is long, it gets that of the host.
    pub(crate) fn settle_congestion(&mut self) {
        self.congestion = Congestion::settle(self.fd.get());
    }

    // ------------------------------------------------------------------ shared memory

    /// Offers the peer shared memory for the stream.
    pub(crate) fn offer_shm(&mut self, conn: &mut Connection) {
        // Opening and closing files are cancellation points, at which the program's thread, which posts or polls, must not be
        // cancelled.
        let _inside = Uncancelled::new();
        let addresses = (socket::local_addr(&self.fd), socket::peer_addr(&self.fd));
        let (Some(local), Some(remote)) = addresses else {
            return conn.decline_shm();
        };
        self.shm = Shm::offer(local, remote);
        match self.shm.as_ref().and_then(Shm::name) {
            Some((pid, fd)) => conn.send_handover(Handover::Offer { pid, fd }),
            None => conn.decline_shm(),
        }
    }

    /// The state that is polled while shared memory carries a direction of the stream.
    pub(crate) fn watch(&self) -> Option<&Arc<Watch>> {
        let shm = self.shm.as_ref()?;
        (self.rx_shm || self.tx_shm).then(|| shm.watch())
    }

    /// The process and descriptor of memory that this end offers, for the fuzzer.
    #[cfg(any(test, fuzzing))]
    pub(super) fn offered(&self) -> Option<(u32, u32)> {
        self.shm.as_ref().and_then(Shm::name)
    }

    /// Whether the peer's stream goes through shared memory.
    pub(crate) fn receives_by_memory(&self) -> bool {
        self.rx_shm
    }

    /// Whether batches are sent through shared memory.
    #[inline]
    pub(crate) fn sends_by_memory(&self) -> bool {
        self.tx_shm
    }

    /// Whether batches are sent by the own socket, and not through shared memory or on a trunk.
    pub(crate) fn sends_by_socket(&self) -> bool {
        !self.tx_shm && !self.is_on_trunk().0
    }

    /// Whether sending goes on when the socket is writable. If shared memory is full, the peer wakes this end instead.
    pub(crate) fn waits_for_socket(&self) -> bool {
        self.blocked && self.sends_by_socket()
    }

    /// Handles a hand-over message of the peer, if there is one. Returns what the message changed: whether the peer's stream
    /// uses shared memory or a trunk from here on, or that the message breaks a rule. `behind`: number of bytes that were
    /// received after the message.
    fn handle_handover(&mut self, conn: &mut Connection, behind: usize, now: Instant) -> Handled {
        if conn.has_handover_message() {
            self.answer_handover(conn, behind, now)
        } else {
            Handled::Unchanged
        }
    }

    #[cold]
    #[inline(never)]
    fn answer_handover(&mut self, conn: &mut Connection, behind: usize, now: Instant) -> Handled {
        // As in `offer_shm`.
        let _inside = Uncancelled::new();
        match conn.poll_handover() {
            None => Handled::Unchanged,
            Some(Handover::Offer { pid, fd }) => {
                let addresses = (socket::local_addr(&self.fd), socket::peer_addr(&self.fd));
                if let (Some(local), Some(remote)) = addresses {
                    self.shm = Shm::take(pid, fd, local, remote);
                }
                conn.send_handover(match &self.shm {
                    Some(shm) => Handover::Take { proof: shm.proof() },
                    None => Handover::Refuse,
                });
                Handled::Unchanged
            }
            Some(message @ (Handover::OfferTrunk { .. } | Handover::TakeTrunk { .. })) => {
                self.trunk_message = Some(message);
                Handled::Unchanged
            }
            Some(Handover::Switch) if self.seat.is_some() => {
                if self.trunk_switched(conn, behind, now) {
                    Handled::OnTrunk
                } else {
                    Handled::Violation
                }
            }
            Some(Handover::Refuse) => {
                self.trunk_refused(conn);
                self.shm = None;
                Handled::Unchanged
            }
            Some(what @ (Handover::Take { .. } | Handover::Switch)) => {
                let Some(shm) = &mut self.shm else {
                    return Handled::Violation;
                };
                if let Handover::Take { proof } = what {
                    if !shm.taken_by_peer(proof) {
                        return Handled::Violation;
                    }
                    conn.send_handover(Handover::Switch);
                }
                // Bytes after the peer's last hand-over message only wake this end.
                if !shm.count_wakeups(behind) {
                    return Handled::Violation;
                }
                self.rx_shm = true;
                shm.watch().set_receives();
                conn.switch_rx_to_shm();
                Handled::Switched
            }
        }
    }

    /// Wakes the peer with a byte on the socket.
    fn wake(&mut self) {
        self.unwoken = false;
        if let Err(e) = self.fd.send(&[0]) {
            self.was_not_woken(e);
        }
    }

    /// Handles a byte that was not sent: it has to be sent later, unless the connection has failed, which wakes the peer too.
    #[cold]
    fn was_not_woken(&mut self, error: Errno) {
        let is_full = matches!(
            error,
            Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM
        );
        // If the socket is full, the bytes in it that are still to be sent wake the peer. But the kernel also refuses a byte for which it
        // has no memory.
        if is_full
            && unsent(self.fd.get()) == 0
            && let Some(shm) = &self.shm
        {
            shm.watch().was_not_woken();
            self.unwoken = true;
        }
    }

    /// Whether [`Self::wake_again`] is to be called.
    #[inline]
    pub(crate) fn must_wake_again(&self) -> bool {
        self.unwoken
    }

    /// Wakes the peer if that has failed before and the peer still sleeps.
    pub(crate) fn wake_again(&mut self) {
        let unwoken = std::mem::take(&mut self.unwoken);
        if unwoken && self.shm.as_ref().is_some_and(Shm::must_wake) {
            self.wake();
        }
    }

    /// Reads the bytes of [`Tcp::wake`] from the socket. A peer that sends more of them than allowed ends its stream.
    fn take_wakeups(&mut self, engine: &Engine) -> Outcome {
        // A peer rarely sends more than one. Initializing a larger buffer would take as long as handling a short message.
        let mut bytes = [0; 64];
        loop {
            match self.fd.recv(&mut bytes) {
                Ok(0) => return Outcome::Eof,
                Ok(n) => {
                    let known = self.shm.as_mut().is_some_and(|shm| shm.count_wakeups(n));
                    if !known {
                        return Outcome::Broken(libc::EPROTO);
                    }
                    engine.on_wake_up_taken();
                    if n < bytes.len() {
                        return Outcome::Open;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Outcome::Open,
                Err(e) => return Outcome::Broken(e.raw_os_error()),
            }
        }
    }

    /// Blocks until something can be received. Returns false after `time`.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        self.watch().is_some_and(|w| w.prepare_sleep(true)) || wait_readable(self.fd.get(), time)
    }

    fn read(
        &mut self,
        direct: Option<Unfilled<'_>>,
        room: &mut [u8],
    ) -> Result<(usize, usize), Io> {
        match &mut self.shm {
            Some(shm) if self.rx_shm => shm.receive(direct, room),
            _ => stream::receive(self.fd.get(), direct, room),
        }
    }

    /// The socket that is watched.
    pub fn fd(&self) -> &EngineFd {
        &self.fd
    }

    fn tx(&self) -> &EngineFd {
        self.tx.as_ref().unwrap_or(&self.fd)
    }

    /// Whether all framed bytes are sent.
    pub fn is_drained(&self) -> bool {
        self.batch.is_empty()
    }

    /// Number of bytes that were received so far, if the core has consumed all of them.
    pub(crate) fn received_bytes(&self) -> Option<u64> {
        self.rest.is_empty().then_some(self.counts.rx_bytes)
    }

    /// The front of an FPDU that has been received in part.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.rest
    }

    /// Whether the peer has received all sent data, after the connection has ended with `outcome`. The kernel resets
    /// a connection that is closed while it contains unread bytes, so if there was no reset, the peer has read
    /// everything. With shared memory, unread bytes may be wake-ups, and the positions in the memory are decisive.
    pub(crate) fn is_all_taken(&self, outcome: Outcome) -> bool {
        // A message that is not handled yet may be the last one on this connection.
        if !self.is_drained() || self.may_lack_last || self.trunk_message.is_some() {
            return false;
        }
        if let Some(all_taken) = self.all_taken_on_trunk() {
            return all_taken;
        }
        match &self.shm {
            Some(shm) if self.tx_shm => shm.is_all_taken(),
            _ => outcome == Outcome::Eof && unacknowledged(self.tx().get()) == 0,
        }
    }

    /// Number of sent bytes that the peer's transport has acknowledged, or that the peer claims to have read from shared memory.
    pub(crate) fn taken_by_peer(&self) -> u64 {
        if let Some(taken) = self.taken_on_trunk() {
            return taken;
        }
        match &self.shm {
            Some(shm) if self.tx_shm => shm.watch().taken_by_them(),
            _ => {
                let unacknowledged = unacknowledged(self.tx().get());
                self.counts.tx_bytes.saturating_sub(unacknowledged as u64)
            }
        }
    }

    /// Returns the socket and drops the rest.
    pub fn into_fd(self) -> EngineFd {
        self.fd
    }

    /// Receives what has arrived, and passes it to the core. `socket`: the socket may be readable.
    pub fn receive(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        socket: bool,
    ) -> Outcome {
        self.rx_limited = false;
        if self.is_on_trunk().1 {
            return if socket {
                self.receive_own_end()
            } else {
                Outcome::Open
            };
        }
        // The end of the connection is reported only after all bytes in shared memory are read.
        let connection = if self.rx_shm && socket {
            self.take_wakeups(engine)
        } else {
            Outcome::Open
        };
        let outcome = if self.rx_shm && self.receive_records(conn, now) {
            Outcome::Open
        } else {
            let mut buffer = engine.rx_buffer();
            let outcome = self.receive_into(&mut buffer, conn, now);
            engine.return_rx_buffer(buffer);
            outcome
        };
        // `tx_shm` is false until the last hand-over message of this end is sent. Until then, bytes that are sent on the socket belong to
        // the stream. They also wake the peer, so no byte has to be sent only for this.
        if let Some(shm) = &mut self.shm
            && self.rx_shm
        {
            if let Some(done) = shm.take_done() {
                conn.handle_carrier_ack(done);
            }
            if self.tx_shm && shm.must_wake_for_room() {
                self.wake();
            }
        }
        if outcome == Outcome::Open && !self.has_more() {
            connection
        } else {
            outcome
        }
    }

    /// Receives what arrived before sending failed. A kernel that receives a reset keeps the bytes that arrived before it. They may
    /// contain acknowledgements, without which executed requests would fail. The number of turns is limited, because sending can fail
    /// while the peer goes on sending.
    #[cold]
    pub(crate) fn receive_last(&mut self, engine: &Engine, conn: &mut Connection, now: Instant) {
        for _ in 0..RX_RING_TURNS {
            // In the error state all requests have completed.
            if conn.state() == State::Error || conn.end() == End::Dead {
                return;
            }
            let outcome = self.receive(engine, conn, now, true);
            if outcome != Outcome::Open || !self.has_more() {
                return;
            }
        }
    }

    /// Receives short records of shared memory, which contain whole FPDUs. Returns false if something else is to be
    /// received by [`Self::receive_into`].
    fn receive_records(&mut self, conn: &mut Connection, now: Instant) -> bool {
        let Some(shm) = &mut self.shm else {
            return false;
        };
        if !self.rest.is_empty() || conn.direct().is_some() {
            return false;
        }
        let mut received = 0;
        for _ in 0..RX_RECORDS {
            if received >= RX_RECORDS_BYTES {
                break;
            }
            self.record.clear();
            match shm.receive_short(&mut self.record) {
                Ok(true) => {}
                Ok(false) => return !shm.watch().has_bytes(),
                Err(_) => return false,
            }
            let len = self.record.len();
            received += len;
            self.counts.rx_bytes += len as u64;
            conn.handle_carrier_ack(shm.done_by_them());
            let used = conn.handle_rx(now, &self.record).min(len);
            if used < len {
                self.rest
                    .extend_from_slice(self.record.get(used..).unwrap_or(&[]));
                return false;
            }
        }
        // The next turn receives the rest.
        true
    }

    /// Whether there may be more than was received in the last turn, because of its limit.
    pub(crate) fn has_more(&self) -> bool {
        self.rx_limited || self.rx_shm && self.watch().is_some_and(|w| w.has_bytes())
    }

    /// Passes received bytes to the core, and adds the time to `spent`. Returns how many of them were consumed.
    fn handle_rx(
        &mut self,
        conn: &mut Connection,
        now: Instant,
        bytes: &[u8],
        spent: &mut Duration,
    ) -> usize {
        if bytes.len() < TIMED_BYTES {
            return conn.handle_rx(now, bytes).min(bytes.len());
        }
        let begin = clock::now();
        let used = conn.handle_rx(now, bytes).min(bytes.len());
        let time = begin.elapsed();
        if time > TURN_TIME {
            self.rx_limit = (bytes.len() / 2).max(TIMED_BYTES);
        } else if time < TURN_TIME / 4 {
            self.rx_limit = (self.rx_limit * 2).min(RX_BUFFER_LEN);
        }
        *spent += time;
        used
    }

    fn receive_into(&mut self, buffer: &mut [u8], conn: &mut Connection, now: Instant) -> Outcome {
        let mut filled = self.rest.len().min(buffer.len());
        if let (Some(front), Some(rest)) = (buffer.get_mut(..filled), self.rest.get(..filled)) {
            front.copy_from_slice(rest);
        }
        self.rest.clear();
        let mut outcome = Outcome::Open;
        let mut received = 0;
        let mut time = Duration::ZERO;
        // Bytes that were received after the Reply of start-up count as newly received.
        let mut fresh = filled > 0;
        loop {
            if fresh {
                let bytes = buffer.get(..filled).unwrap_or(&[]);
                let used = self.handle_rx(conn, now, bytes, &mut time);
                buffer.copy_within(used..filled, 0);
                filled -= used;
                match self.handle_handover(conn, filled, now) {
                    Handled::Switched => filled = 0,
                    Handled::Unchanged => {}
                    Handled::OnTrunk => return Outcome::Open,
                    Handled::Violation => {
                        outcome = Outcome::Broken(libc::EPROTO);
                        break;
                    }
                }
            }
            if received >= RX_TURN_BYTES || time > TURN_TIME {
                self.rx_limited = true;
                break;
            }
            let direct = conn.direct().and_then(|(places, filled, missing)| {
                // The kernel copies in any order. The last bytes are received into the buffer and placed from there, because the program
                // may poll the last word of the message. `Shm::receive` places them last itself.
                let kept = if self.rx_shm { 0 } else { LAST_BYTES };
                let missing = missing.checked_sub(kept).filter(|missing| *missing > 0)?;
                Some(Unfilled {
                    places,
                    filled,
                    missing,
                })
            });
            let wanted = direct.map_or(0, |direct| {
                usize::try_from(direct.missing).unwrap_or(usize::MAX)
            });
            let end = buffer.len().min(filled + self.rx_limit);
            let Some(room) = buffer.get_mut(filled..end) else {
                break;
            };
            let requested = room.len().saturating_add(wanted);
            self.counts.rx_calls += u64::from(!self.rx_shm);
            match self.read(direct, room) {
                Ok((user, own)) => {
                    if let Some(shm) = self.shm.as_ref().filter(|_| self.rx_shm) {
                        conn.handle_carrier_ack(shm.done_by_them());
                    }
                    self.counts.rx_bytes += (user + own) as u64;
                    self.may_lack_last = false;
                    if user > 0 {
                        conn.handle_direct(now, user as u64);
                    }
                    filled += own;
                    received += (user + own).max(RX_RECORD_LEAST);
                    fresh = true;
                    if user + own < requested && !self.rx_shm {
                        // The socket is empty: another call would find nothing.
                        let bytes = buffer.get(..filled).unwrap_or(&[]);
                        let used = self.handle_rx(conn, now, bytes, &mut time);
                        buffer.copy_within(used..filled, 0);
                        filled -= used;
                        match self.handle_handover(conn, filled, now) {
                            Handled::Switched => (filled, fresh) = (0, false),
                            Handled::OnTrunk => return Outcome::Open,
                            Handled::Unchanged => break,
                            Handled::Violation => {
                                outcome = Outcome::Broken(libc::EPROTO);
                                break;
                            }
                        }
                    }
                }
                Err(Io::WouldBlock) => {
                    self.counts.rx_empty += 1;
                    break;
                }
                Err(Io::Eof) => {
                    outcome = Outcome::Eof;
                    break;
                }
                Err(Io::Invalidated) => {
                    // The buffer was deregistered while its message arrives. The rest is received into a buffer of
                    // the engine. Placing it fails, which ends the stream.
                    match self.read(None, buffer.get_mut(filled..).unwrap_or(&mut [])) {
                        Ok((_, own)) => {
                            filled += own;
                            received += own;
                            fresh = true;
                        }
                        Err(Io::WouldBlock) => break,
                        Err(_) => {
                            outcome = Outcome::Broken(libc::ECONNRESET);
                            break;
                        }
                    }
                }
                Err(Io::Broken(e)) => {
                    outcome = Outcome::Broken(e);
                    break;
                }
                Err(Io::Done(_)) => break,
            }
        }
        if filled > 0 {
            self.rest
                .extend_from_slice(buffer.get(..filled.min(RX_BUFFER_LEN)).unwrap_or(&[]));
        } else {
            self.rest = Vec::new();
        }
        outcome
    }

    /// Limits the bytes of each turn of sending. The last FPDU may exceed the limit.
    pub(crate) fn limit(&mut self, bytes: usize) {
        self.most = bytes;
        self.batch.limit(bytes);
    }

    /// Whether the last turn of sending ended because of the limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited
    }

    /// Sends as much as possible: the core fills a batch, which is passed to the socket or to shared memory.
    pub fn transmit(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        flush: bool,
    ) -> Outcome {
        let outcome = self.transmit_batches(engine, conn, now, flush);
        // An acknowledgement whose record could not be written, or that is due without a record, is stored in page 0 of the
        // shared memory.
        let unsent = self.blocked || matches!(outcome, Outcome::Broken(_));
        if unsent || conn.ack_due() && (flush || conn.must_ack()) {
            self.publish_done(conn);
        }
        self.announce();
        self.flush_trunk();
        outcome
    }

    /// Stores the acknowledgement of the peer's requests in page 0, if the stream to the peer goes through shared memory.
    fn publish_done(&mut self, conn: &mut Connection) {
        if self.tx_shm
            && let Some(shm) = &mut self.shm
        {
            shm.publish_done(conn.carrier_ack());
        }
    }

    /// Wakes the peer that shares memory, if it sleeps, for the records that were written, or for an acknowledgement in page 0.
    fn announce(&mut self) {
        let Some(shm) = self.shm.as_ref().filter(|_| self.tx_shm) else {
            return;
        };
        let must_wake = if std::mem::take(&mut self.unannounced) {
            shm.must_wake()
        } else {
            shm.must_wake_for_ack()
        };
        if must_wake {
            self.wake();
        }
    }

    /// Does the work of [`Self::transmit`] in one step for requests that were just posted, if no earlier data is unsent.
    /// `None`: the caller has to call [`Self::transmit`], because there is data that was not framed or sent here.
    pub(crate) fn transmit_posted(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
    ) -> Option<Outcome> {
        if !self.batch.is_empty()
            || self.blocked
            || self.shm.is_some() != self.tx_shm
            || self.is_moving_to_trunk()
            || self.framing.aligns(conn.peer())
        {
            return None;
        }
        self.batch.align(false);
        let more = conn.poll_tx(now, false, &mut self.batch);
        if self.batch.is_empty() || conn.state() != State::Rts {
            return None;
        }
        let n = match self.send_rest(engine, conn) {
            Io::Done(n) => Ok(n),
            // A socket reports its error once: a second attempt would fail with a different one.
            Io::Broken(e) => Err(e),
            // As in `transmit_batches`. The first messages of the batch may be in the ring already, so it must not be sent again.
            Io::Invalidated => Err(libc::EFAULT),
            Io::WouldBlock | Io::Eof => return None,
        };
        let n = match n {
            Ok(n) => n,
            Err(e) => {
                self.publish_done(conn);
                self.announce();
                return Some(Outcome::Broken(e));
            }
        };
        self.counts.tx_bytes += n as u64;
        self.unannounced = true;
        if n < self.batch.len() {
            self.sent = n;
            return None;
        }
        self.batch.clear();
        conn.handle_written();
        if more || conn.has_responses() {
            return None;
        }
        self.all_sent(engine);
        self.announce();
        self.flush_trunk();
        Some(Outcome::Open)
    }

    /// Passes the rest of the batch to the carrier of the stream.
    #[inline]
    fn send_rest(&mut self, engine: &Engine, conn: &mut Connection) -> Io {
        if let Some(shm) = self.shm.as_mut().filter(|_| self.tx_shm) {
            shm.set_done(conn.carrier_ack());
            return shm.send(&self.batch, self.sent);
        }
        if let Some(sent) = self.send_on_trunk(engine, conn) {
            return sent;
        }
        self.counts.tx_calls += 1;
        stream::send_batch(self.tx().get(), &self.batch, self.sent)
    }

    /// Delays an acknowledgement to the peer that shares memory: the next poll that finds nothing sends it. Returns false if
    /// batches are sent by the socket.
    #[inline]
    pub(crate) fn schedule_ack(&self) -> bool {
        if let Some(shm) = self.shm.as_ref().filter(|_| self.tx_shm) {
            shm.watch().set_owes_ack(true);
        }
        self.tx_shm
    }

    /// Makes sure that the next acknowledgement of the peer wakes this end if it sleeps. Returns false if the acknowledgement has
    /// arrived already. An acknowledgement on a socket always wakes this end.
    pub(crate) fn await_ack(&self) -> bool {
        self.watch().is_none_or(|watch| watch.await_ack())
    }

    /// Whether [`Self::schedule_ack`] was called since this was last called, and no acknowledgement was sent.
    #[inline]
    pub(crate) fn take_owed_ack(&self) -> bool {
        let owes = self.watch().filter(|watch| watch.owes_ack());
        if let Some(watch) = owes {
            watch.set_owes_ack(false);
        }
        owes.is_some()
    }

    /// Whether both directions go through shared memory.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.rx_shm && self.tx_shm
    }

    /// Whether only one direction goes through shared memory, or none though memory was offered.
    #[inline]
    pub(crate) fn changes_carrier(&self) -> bool {
        self.shm.is_some() != self.tx_shm || self.rx_shm != self.tx_shm
    }

    /// Cleans up when the batch is empty and there is nothing to send.
    fn all_sent(&mut self, engine: &Engine) -> Outcome {
        self.waiting = None;
        self.blocked = false;
        self.return_room(engine);
        Outcome::Open
    }

    /// Returns the large buffer of an empty batch.
    fn return_room(&mut self, engine: &Engine) {
        if self.batch.is_empty() && self.batch.room() > IDLE_TX_BUFFER {
            engine.return_tx_buffer(self.batch.take_room());
        }
    }

    fn transmit_batches(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        flush: bool,
    ) -> Outcome {
        let mut written = 0;
        let mut renew_at = TX_TURN_BYTES;
        let mut more = true;
        self.limited = false;
        loop {
            if written >= self.most && self.batch.is_empty() {
                self.limited = true;
                return Outcome::Open;
            }
            if written >= TX_TURN_BYTES && !self.tx_shm {
                // The next turn begins when the socket, or that of the trunk, is reported writable.
                self.blocked = true;
                self.wait_on_trunk();
                self.return_room(engine);
                return Outcome::Open;
            }
            if self.batch.is_empty() {
                self.waiting = None;
                // If the trunk has no room, messages wait in the send queue. In batches, those of many queue pairs would occupy
                // much memory.
                let is_open = conn.end() == End::Open;
                if more && is_open && !conn.is_quiet() && !self.has_room_on_trunk() {
                    self.counts.tx_full += 1;
                    self.blocked = true;
                    self.return_room(engine);
                    return Outcome::Open;
                }
                let many = Waiting::many();
                self.batch.keep_small(many);
                if self.batch.room() < IDLE_TX_BUFFER && !many && conn.has_bulk() {
                    self.batch.give_room(engine.tx_buffer());
                }
                let aligned = self.framing.aligns(conn.peer());
                self.batch.align(aligned);
                if aligned && conn.has_bulk() {
                    conn.set_mulpdu(mulpdu(self.tx(), conn.sends_markers()));
                }
                more = conn.poll_tx(now, flush, &mut self.batch);
                if self.batch.is_empty() {
                    return self.all_sent(engine);
                }
            }
            if conn.state() == State::Error && self.batch.has_user_memory() {
                // The requests have completed and the program may reuse their memory, so the rest of the message is
                // not sent.
                return Outcome::Broken(libc::ECANCELED);
            }
            if !conn.may_send_rest(&self.batch, self.sent) {
                return Outcome::Broken(libc::EPROTO);
            }
            match self.send_rest(engine, conn) {
                Io::Done(n) => {
                    self.counts.tx_bytes += n as u64;
                    self.unannounced = true;
                    written += n;
                    if written >= renew_at && self.tx_shm {
                        // The turn goes on as long as the peer reads the ring, which can be longer than a lease.
                        renew_at = written + TX_TURN_BYTES;
                        engine.keep_lease();
                    }
                    self.sent += n;
                    if self.sent >= self.batch.len() {
                        self.batch.clear();
                        self.sent = 0;
                        if conn.must_switch_tx() {
                            if self.shm.is_some() {
                                self.tx_shm = true;
                                conn.switch_tx_to_shm();
                            } else {
                                self.switch_tx_to_trunk(conn);
                            }
                            more = true;
                        }
                        conn.handle_written();
                        if !more && !conn.has_responses() {
                            return self.all_sent(engine);
                        }
                    }
                }
                Io::WouldBlock => {
                    self.counts.tx_full += 1;
                    self.blocked = true;
                    if self.sends_by_socket() {
                        self.congestion.check(self.fd.get(), now);
                    }
                    self.waiting.get_or_insert_with(Waiting::new);
                    return Outcome::Open;
                }
                Io::Invalidated => {
                    // The message cannot be finished, and no other message may be sent in the middle of it.
                    return Outcome::Broken(libc::EFAULT);
                }
                Io::Eof => return Outcome::Broken(libc::EPIPE),
                Io::Broken(e) => return Outcome::Broken(e),
            }
        }
    }
}

/// Returns the MULPDU for a standard peer, so that an FPDU fills one segment of the connection.
// RFC 5044 §5.1 [mpa-emss]: the segment size is the effective maximum segment size of TCP.
pub(crate) fn mulpdu(fd: &EngineFd, markers: bool) -> usize {
    // The size that every IPv4 host accepts (RFC 9293, 3.7.1).
    const EMSS_DEFAULT: usize = 536;
    let emss = get_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_MAXSEG);
    let emss = emss.and_then(|n| usize::try_from(n).ok());
    frame::mulpdu(emss.unwrap_or(EMSS_DEFAULT), markers)
}

/// Closes a connection that an initiator cannot use although start-up succeeded, with a Terminate that reports the
/// reason.
pub(crate) fn refuse(
    engine: &'static Engine,
    fd: EngineFd,
    params: &StreamParams,
    error: &PeerError,
) {
    // The socket's buffer has room for a few dozen bytes, because the connection has carried only a Request.
    let frame = terminate_frame(error, params);
    let _ = fd.send(&frame);
    let _draining = drain(engine, fd);
}

/// A Terminate for an error of start-up, as the first FPDU of a stream.
fn terminate_frame(error: &PeerError, params: &StreamParams) -> Vec<u8> {
    let code = TermCode::encode(error);
    let body = Terminate {
        layer: code.layer,
        etype: code.etype,
        code: code.code,
        ddp_len: None,
        ddp_header: None,
        read_request: None,
    };
    let fpdu = anywarp_core::rdmap::terminate::terminate_fpdu(&body, params.crc);
    if !params.send_markers {
        return fpdu;
    }
    let mut marked = Vec::new();
    Inserter::new().insert(&fpdu, params.crc, &mut marked);
    marked
}

#[cfg(test)]
pub(crate) mod tests;
