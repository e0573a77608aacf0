//! TCP: the socket of a reliable queue pair.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::Connection;
use anywarp_core::error::{PeerError, TermCode};
use anywarp_core::llp::mpa::frame::{self, TxBatch};
use anywarp_core::llp::mpa::marker::Inserter;
use anywarp_core::llp::mpa::startup::StreamParams;
use anywarp_core::verbs::mr::Placement;
use anywarp_core::verbs::qp::State;
use anywarp_core::wire::control::Handover;
use anywarp_core::wire::rdmap::Terminate;

use crate::config::Framing;
use crate::fd::EngineFd;
use crate::net::drain::drain;
use crate::net::shm::{Shm, Watch};
use crate::net::socket;
use crate::process::PerProcess;
use crate::stat;
use crate::sys::socket::{get_option, wait_readable};
use crate::sys::thread::Uncancelled;
use crate::sys::{Io, stream};
use crate::worker::{Engine, STAGE};

/// Bytes that one queue pair receives in one turn, before others have theirs.
const TURN: usize = 4 << 20;
/// Transmit buffer that an idle queue pair keeps, bytes.
const KEEP: usize = 4 * 1024;

/// A connected socket and what is half way in or out.
#[derive(Debug)]
pub struct Tcp {
    fd: EngineFd,
    /// A queue pair that is connected to itself sends here and receives from `fd`.
    tx: Option<EngineFd>,
    batch: TxBatch,
    sent: usize,
    /// Bytes of an incomplete FPDU.
    rest: Vec<u8>,
    framing: Framing,
    /// The socket was full: waits to be writable.
    pub(crate) blocked: bool,
    /// Its batch waits for the peer.
    waiting: Option<Waiting>,
    /// What was sent and received.
    pub(crate) counts: stat::Stream,
    /// Memory that carries the stream, or will.
    carrier: Option<Shm>,
    tx_carried: bool,
    rx_carried: bool,
}

/// A batch that the peer does not take now, counted.
#[derive(Debug)]
struct Waiting;

/// Batches of this process that wait for their peers.
static WAITING: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

impl Waiting {
    fn new() -> Self {
        WAITING.get().fetch_add(1, Ordering::Relaxed);
        Self
    }

    /// Whether there are so many that memory matters more than speed.
    fn many() -> bool {
        WAITING.get().load(Ordering::Relaxed) >= bounds::TX_LARGE_WAITING
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let count = WAITING.get();
        // One of the process that this one was forked from is not counted here.
        let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// What a turn of receiving or sending found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Go on.
    Open,
    /// The peer closed its side.
    Eof,
    /// The connection broke.
    Broken(i32),
}

impl Tcp {
    /// Takes a connected socket, and bytes that were read from it already.
    pub fn new(fd: EngineFd, tx: Option<EngineFd>, leftover: Vec<u8>, framing: Framing) -> Self {
        Self {
            fd,
            tx,
            batch: TxBatch::default(),
            sent: 0,
            rest: leftover,
            framing,
            blocked: false,
            waiting: None,
            counts: stat::Stream::default(),
            carrier: None,
            tx_carried: false,
            rx_carried: false,
        }
    }

    // ------------------------------------------------------------------ shared memory

    /// Offers the peer memory to share.
    pub(crate) fn offer_shm(&mut self, conn: &mut Connection) {
        // A thread that posts or polls does this, and files are opened and closed.
        let _inside = Uncancelled::new();
        let ends = (socket::local_addr(&self.fd), socket::peer_addr(&self.fd));
        let (Some(local), Some(remote)) = ends else {
            return conn.decline_shm();
        };
        self.carrier = Shm::offer(local, remote);
        match self.carrier.as_ref().and_then(Shm::name) {
            Some((pid, fd)) => conn.send_handover(Handover::Offer { pid, fd }),
            None => conn.decline_shm(),
        }
    }

    /// What is looked at for work, when the stream comes through memory.
    pub(crate) fn watch(&self) -> Option<&Arc<Watch>> {
        let carrier = self.carrier.as_ref()?;
        (self.rx_carried || self.tx_carried).then(|| carrier.watch())
    }

    /// Whether payload is copied from the peer's process.
    pub(crate) fn pulls(&self) -> bool {
        self.carrier.as_ref().is_some_and(Shm::pulls)
    }

    /// Whether its batch is sent as soon as the socket takes it, and not through memory.
    pub(crate) fn sends_by_socket(&self) -> bool {
        !self.tx_carried
    }

    /// Does what the peer said of memory to share; whether the stream comes through it from here on.
    fn hear_carrier(&mut self, conn: &mut Connection) -> bool {
        conn.has_handover_message() && self.answer_carrier(conn)
    }

    #[cold]
    #[inline(never)]
    fn answer_carrier(&mut self, conn: &mut Connection) -> bool {
        // As in `offer_shm`.
        let _inside = Uncancelled::new();
        match conn.poll_handover() {
            None => false,
            Some(Handover::Offer { pid, fd }) => {
                let ends = (socket::local_addr(&self.fd), socket::peer_addr(&self.fd));
                if let (Some(local), Some(remote)) = ends {
                    self.carrier = Shm::take(pid, fd, local, remote);
                }
                let takes = self.carrier.is_some();
                conn.send_handover(if takes {
                    Handover::Take
                } else {
                    Handover::Refuse
                });
                false
            }
            Some(Handover::Refuse) => {
                self.carrier = None;
                false
            }
            Some(what @ (Handover::Take | Handover::Switch)) => {
                let Some(carrier) = &mut self.carrier else {
                    return false;
                };
                if what == Handover::Take {
                    carrier.taken_by_peer();
                    conn.send_handover(Handover::Switch);
                }
                self.rx_carried = true;
                conn.switch_rx_to_shm();
                true
            }
        }
    }

    /// Wakes the peer. A byte that the socket does not take is one of many that are there.
    fn wake(&self) {
        let _ = self.fd.send(&[0]);
    }

    /// Takes the bytes that woke us.
    fn awake(&self) -> Outcome {
        let mut bytes = [0; 64];
        loop {
            match self.fd.recv(&mut bytes) {
                Ok(0) => return Outcome::Eof,
                Ok(n) if n < bytes.len() => return Outcome::Open,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Outcome::Open,
                Err(e) => return Outcome::Broken(e.raw_os_error()),
            }
        }
    }

    /// Waits until something can be received; false when `time` passed first.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        self.watch().is_some_and(|w| w.sleep()) || wait_readable(self.fd.get(), time)
    }

    fn read(
        &mut self,
        direct: Option<(&[Placement], u64, u64)>,
        room: &mut [u8],
    ) -> Result<(usize, usize), Io> {
        match &mut self.carrier {
            Some(carrier) if self.rx_carried => carrier.receive(direct, room),
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

    /// Whether everything framed is with the kernel.
    pub fn is_drained(&self) -> bool {
        self.batch.is_empty()
    }

    /// Bytes that were received so far, if all of them were used.
    pub(crate) fn received_bytes(&self) -> Option<u64> {
        self.rest.is_empty().then_some(self.counts.rx_bytes)
    }

    /// Gives the descriptor up.
    pub fn into_fd(self) -> EngineFd {
        self.fd
    }

    /// Receives what is there: *recv*, then hands it to *deframe* and up. `socket`: it may be readable.
    pub fn receive(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        socket: bool,
    ) -> Outcome {
        // The connection's end is the stream's when all that is in memory was taken.
        let connection = if self.rx_carried && socket {
            self.awake()
        } else {
            Outcome::Open
        };
        let mut stage = engine.stage();
        let outcome = self.receive_into(&mut stage, conn, now);
        engine.return_stage(stage);
        // Until our last word is on the connection every byte there is of the stream: that word wakes the peer too.
        if let Some(carrier) = &self.carrier
            && self.rx_carried
            && self.tx_carried
            && carrier.must_wake_for_room()
        {
            self.wake();
        }
        if outcome == Outcome::Open && !self.has_more() {
            connection
        } else {
            outcome
        }
    }

    /// Whether memory has more than one turn took.
    fn has_more(&self) -> bool {
        self.rx_carried && self.watch().is_some_and(|w| w.has_bytes())
    }

    fn receive_into(&mut self, stage: &mut [u8], conn: &mut Connection, now: Instant) -> Outcome {
        let mut filled = self.rest.len().min(stage.len());
        if let (Some(front), Some(rest)) = (stage.get_mut(..filled), self.rest.get(..filled)) {
            front.copy_from_slice(rest);
        }
        self.rest.clear();
        let mut outcome = Outcome::Open;
        let mut turn = 0;
        // Bytes behind the Reply of start-up may wait already.
        let mut fresh = filled > 0;
        loop {
            if fresh {
                let used = conn.handle_rx(now, stage.get(..filled).unwrap_or(&[]));
                let used = used.min(filled);
                stage.copy_within(used..filled, 0);
                filled -= used;
                if self.hear_carrier(conn) {
                    // What the socket brought behind the peer's last word on it was to wake us.
                    filled = 0;
                }
            }
            if turn >= TURN {
                break;
            }
            let direct = conn.direct();
            let wanted = direct.map_or(0, |(_, _, left)| {
                usize::try_from(left).unwrap_or(usize::MAX)
            });
            let Some(room) = stage.get_mut(filled..) else {
                break;
            };
            let asked = room.len().saturating_add(wanted);
            self.counts.rx_calls += u64::from(!self.rx_carried);
            match self.read(direct, room) {
                Ok((user, own)) => {
                    self.counts.rx_bytes += (user + own) as u64;
                    if user > 0 {
                        conn.handle_direct(now, user as u64);
                    }
                    filled += own;
                    turn += user + own;
                    fresh = true;
                    if user + own < asked && !self.rx_carried {
                        // The socket is empty: no need to ask it.
                        let used = conn
                            .handle_rx(now, stage.get(..filled).unwrap_or(&[]))
                            .min(filled);
                        stage.copy_within(used..filled, 0);
                        filled -= used;
                        if !self.hear_carrier(conn) {
                            break;
                        }
                        (filled, fresh) = (0, false);
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
                    // The buffer was deregistered while its message arrives: receive the rest beside it; placing
                    // fails there and ends the stream.
                    match self.read(None, stage.get_mut(filled..).unwrap_or(&mut [])) {
                        Ok((_, own)) => {
                            filled += own;
                            turn += own;
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
                .extend_from_slice(stage.get(..filled.min(STAGE)).unwrap_or(&[]));
        } else {
            self.rest = Vec::new();
        }
        outcome
    }

    /// Sends what can be sent: *frame* fills the batch, *gather* and *send* hand it to the kernel.
    pub fn transmit(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        flush: bool,
    ) -> Outcome {
        let outcome = self.transmit_batches(engine, conn, now, flush);
        if self.tx_carried
            && let Some(carrier) = &self.carrier
            && carrier.must_wake()
        {
            self.wake();
        }
        outcome
    }

    /// There is nothing to send, and the batch is empty.
    fn all_sent(&mut self, engine: &Engine) -> Outcome {
        self.waiting = None;
        self.blocked = false;
        if self.batch.room() > KEEP {
            engine.return_room(self.batch.take_room());
        }
        Outcome::Open
    }

    fn transmit_batches(
        &mut self,
        engine: &Engine,
        conn: &mut Connection,
        now: Instant,
        flush: bool,
    ) -> Outcome {
        let mut turn = 0;
        let mut more = true;
        if conn.state() == State::Error
            && let Some(carrier) = &self.carrier
            && carrier.lends()
        {
            // As below: what the peer has not copied yet is the program's again.
            carrier.withdraw();
            return Outcome::Broken(libc::ECANCELED);
        }
        loop {
            if turn >= TURN && !self.tx_carried {
                // Others have their turn; the socket is writable still, or will be, and brings us back.
                self.blocked = true;
                return Outcome::Open;
            }
            if self.batch.is_empty() {
                self.waiting = None;
                let many = Waiting::many();
                self.batch.keep_small(many);
                if self.batch.room() < KEEP && !many && conn.has_bulk() {
                    self.batch.give_room(engine.room());
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
                // Its requests have completed, their memory is the program's again: the rest of the message is not sent.
                return Outcome::Broken(libc::ECANCELED);
            }
            self.counts.tx_calls += u64::from(!self.tx_carried);
            let sent = match &mut self.carrier {
                Some(carrier) if self.tx_carried => carrier.send(&self.batch, self.sent),
                _ => stream::send_batch(self.tx().get(), &self.batch, self.sent),
            };
            match sent {
                Io::Done(n) => {
                    self.counts.tx_bytes += n as u64;
                    turn += n;
                    self.sent += n;
                    if self.sent >= self.batch.len() {
                        self.batch.clear();
                        self.sent = 0;
                        if conn.tx_is_sealed() && self.carrier.is_some() {
                            self.tx_carried = true;
                            conn.switch_tx_to_shm();
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
                    self.waiting.get_or_insert_with(Waiting::new);
                    return Outcome::Open;
                }
                Io::Invalidated => {
                    // The message cannot be finished, and nothing else can be said in the middle of it.
                    return Outcome::Broken(libc::EFAULT);
                }
                Io::Eof => return Outcome::Broken(libc::EPIPE),
                Io::Broken(e) => return Outcome::Broken(e),
            }
        }
    }
}

/// The largest ULPDU for a standard peer: a frame fills one segment of the connection as it is now.
// RFC 5044 §5.1 [mpa-emss]: the segment size is the one that TCP says it uses.
pub(crate) fn mulpdu(fd: &EngineFd, markers: bool) -> usize {
    const EVERY_PATH: usize = 536;
    let emss = get_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_MAXSEG);
    let emss = emss.and_then(|n| usize::try_from(n).ok());
    frame::mulpdu(emss.unwrap_or(EVERY_PATH), markers)
}

/// Ends a connection that an initiator cannot use although start-up succeeded: the peer hears why.
pub(crate) fn refuse(
    engine: &'static Engine,
    fd: EngineFd,
    params: &StreamParams,
    error: &PeerError,
) {
    // A few dozen bytes behind a Request that was answered: they fit the socket's buffer.
    let frame = terminate_frame(error, params);
    let _ = fd.send(&frame);
    let _draining = drain(engine, fd);
}

/// A Terminate for an error of start-up, as the first FPDU of a stream.
fn terminate_frame(error: &PeerError, params: &StreamParams) -> Vec<u8> {
    let code = TermCode::from(error);
    let body = Terminate {
        layer: code.layer,
        etype: code.etype,
        code: code.code,
        ddp_len: None,
        ddp_header: None,
        read_request: None,
    };
    let fpdu = anywarp_core::rdmap::tx::terminate_fpdu(&body, params.crc);
    if !params.send_markers {
        return fpdu;
    }
    let mut marked = Vec::new();
    Inserter::new().insert(&fpdu, params.crc, &mut marked);
    marked
}
