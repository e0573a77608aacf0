//! TCP: the socket of a reliable queue pair.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::Connection;
use anywarp_core::error::{PeerError, TermCode};
use anywarp_core::llp::mpa::frame::{self, TxBatch};
use anywarp_core::llp::mpa::marker::Inserter;
use anywarp_core::llp::mpa::startup::StreamParams;
use anywarp_core::verbs::qp::State;
use anywarp_core::wire::rdmap::Terminate;

use crate::device::Profile;
use crate::sys::{self, EngineFd, Io, PerProcess};
use crate::worker::{Engine, STAGE, Source, Token};

/// Bytes that one queue pair receives in one turn, before others have theirs.
const TURN: usize = 4 << 20;
/// Transmit buffer that an idle queue pair keeps, bytes.
const KEEP: usize = 4 * 1024;
/// How long a closed connection is read on, so that what we sent last is not lost to a reset.
const LINGER: Duration = Duration::from_secs(2);

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
    profile: Profile,
    /// The socket was full: waits to be writable.
    pub(crate) blocked: bool,
    /// Its batch waits for the peer.
    waiting: Option<Waiting>,
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
    pub fn new(fd: EngineFd, tx: Option<EngineFd>, leftover: Vec<u8>, profile: Profile) -> Self {
        Self {
            fd,
            tx,
            batch: TxBatch::default(),
            sent: 0,
            rest: leftover,
            profile,
            blocked: false,
            waiting: None,
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

    /// Gives the descriptor up.
    pub fn into_fd(self) -> EngineFd {
        self.fd
    }

    /// Receives what is there: *recv*, then hands it to *deframe* and up.
    pub fn receive(&mut self, engine: &Engine, conn: &mut Connection, now: Instant) -> Outcome {
        let mut stage = engine.stage();
        let outcome = self.receive_into(&mut stage, conn, now);
        engine.return_stage(stage);
        outcome
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
            match sys::receive(self.fd.get(), direct, room) {
                Ok((user, own)) => {
                    if user > 0 {
                        conn.handle_direct(now, user as u64);
                    }
                    filled += own;
                    turn += user + own;
                    fresh = true;
                    if user + own < asked {
                        // The socket is empty: no need to ask it.
                        let used = conn
                            .handle_rx(now, stage.get(..filled).unwrap_or(&[]))
                            .min(filled);
                        stage.copy_within(used..filled, 0);
                        filled -= used;
                        break;
                    }
                }
                Err(Io::WouldBlock) => break,
                Err(Io::Eof) => {
                    outcome = Outcome::Eof;
                    break;
                }
                Err(Io::Invalidated) => {
                    // The buffer was deregistered while its message arrives: receive the rest beside it; placing
                    // fails there and ends the stream.
                    match sys::receive(
                        self.fd.get(),
                        None,
                        stage.get_mut(filled..).unwrap_or(&mut []),
                    ) {
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
        let mut turn = 0;
        loop {
            if turn >= TURN {
                // Others have their turn; the socket is writable still, or will be, and brings us back.
                self.blocked = true;
                return Outcome::Open;
            }
            if self.batch.is_empty() {
                self.waiting = None;
                self.batch.keep_small(Waiting::many());
                if self.batch.room() < KEEP && conn.has_bulk() && !Waiting::many() {
                    self.batch.give_room(engine.room());
                }
                let aligned = self.profile.aligns(conn.peer());
                self.batch.align(aligned);
                if aligned && conn.has_bulk() {
                    conn.set_mulpdu(mulpdu(self.tx(), conn.sends_markers()));
                }
                conn.poll_tx(now, flush, &mut self.batch);
                if self.batch.is_empty() {
                    if self.batch.room() > KEEP {
                        engine.return_room(self.batch.take_room());
                    }
                    self.blocked = false;
                    return Outcome::Open;
                }
            }
            if conn.state() == State::Error && self.batch.has_user_memory() {
                // Its requests have completed, their memory is the program's again: the rest of the message is not sent.
                return Outcome::Broken(libc::ECANCELED);
            }
            match sys::send_batch(self.tx().get(), &self.batch, self.sent) {
                Io::Done(n) => {
                    turn += n;
                    self.sent += n;
                    if self.sent >= self.batch.len() {
                        self.batch.clear();
                        self.sent = 0;
                        conn.handle_written();
                    }
                }
                Io::WouldBlock => {
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
    let emss = sys::get_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_MAXSEG);
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
    linger(engine, fd);
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

/// A connection that is closed for sending: read until the peer closes too, then dropped.
struct Linger {
    engine: &'static Engine,
    fd: Mutex<Option<(EngineFd, Token)>>,
}

/// Closes a connection in order: what was sent gets there, what still comes is dropped.
pub(crate) fn linger(engine: &'static Engine, fd: EngineFd) {
    let _ = rustix::net::shutdown(fd.get(), rustix::net::Shutdown::Write);
    if engine.lingering.load(Ordering::Relaxed) >= crate::lobby::most() {
        // So many at once: descriptors matter more than the last words.
        return;
    }
    engine.lingering.fetch_add(1, Ordering::Relaxed);
    let linger = Arc::new(Linger {
        engine,
        fd: Mutex::new(None),
    });
    let token = engine.reserve(Arc::clone(&linger) as Arc<dyn Source>);
    let watched = engine.watch(token, fd.get(), false);
    *linger.fd.lock().unwrap_or_else(PoisonError::into_inner) = Some((fd, token));
    if watched.is_err() {
        linger.finish();
        return;
    }
    engine.deadline(token, crate::clock::now() + LINGER);
    // It may be over already.
    linger.ready(true, false, crate::clock::now());
}

impl Linger {
    fn finish(&self) {
        let gone = self
            .fd
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some((fd, token)) = gone {
            self.engine.lingering.fetch_sub(1, Ordering::Relaxed);
            self.engine.remove(token, Some(fd.get()));
        }
    }
}

impl Source for Linger {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        let mut stage = self.engine.stage();
        let over = {
            let held = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
            let Some((fd, _)) = &*held else { return };
            matches!(
                sys::receive(fd.get(), None, &mut stage),
                Err(Io::Eof | Io::Broken(_))
            )
        };
        self.engine.return_stage(stage);
        if over {
            self.finish();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.finish();
    }
}
