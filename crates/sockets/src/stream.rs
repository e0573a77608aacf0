//! One upgraded stream: a TCP connection whose bytes are sent in RDMAP Sends. No function here blocks, except
//! [`Stream::hand_over`] and [`Stream::end`], which have a time limit.
//!
//! The *carrier* is the kernel's socket of that connection. A *Limit* message raises the number of bytes that its receiver may send; a
//! *Reply* is that of the MPA start-up; [`wire::Kind`] lists the other messages. The *memory* is a ring that two ends on one host share.

use crate::limits;
use crate::log;
use crate::memory::{self, Mark, Offer, Reader, Writer};
use crate::policy;
use crate::queue::{self, Dest, Queue};
use crate::remote;
use crate::sys;
use crate::wire::{self, Broken, Frame, HEAD, Kind, LONGEST, Private, Rx, Sink, TAIL, Tx};
use anywarp_core::llp::mpa::deframe::CRC;
use anywarp_core::llp::mpa::startup::{
    Incoming, Initiator, InitiatorConfig, Progress, Responder, ResponderLimits,
};
use anywarp_core::lock::Mutex;
use libc::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::time::{Duration, Instant};

/// Buffers for data that is not received directly into the program's memory.
static SCRATCH: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// The most bytes between two payloads: the end of an FPDU and the head of the next one.
const BEHIND: usize = TAIL + HEAD;

/// Where the bytes of one receive go: first those of a head (if `head`), then `there` bytes into the program's memory, then `own`
/// bytes into a buffer of the library.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    head: bool,
    there: usize,
    own: usize,
}

impl Plan {
    /// Returns the number of bytes that the receive asks for.
    pub fn asked(&self) -> usize {
        usize::from(self.head) * HEAD + self.there + self.own
    }
}

/// The memory of the library for one receive.
#[derive(Debug)]
pub struct Room<'a> {
    head: [u8; HEAD],
    /// For short receives, which are the most frequent: taking a buffer from the shared ones costs more than clearing this one.
    few: &'a mut [u8; limits::FEW],
    /// `None`: `few` is used.
    buffer: Option<Box<[u8]>>,
}

impl<'a> Room<'a> {
    /// Returns memory for a receive according to `plan`. A long buffer is taken from those that are kept for reuse.
    #[inline]
    pub fn of(plan: &Plan, few: &'a mut [u8; limits::FEW]) -> Self {
        let is_long = plan.there + plan.own > limits::FEW;
        Self {
            head: [0; HEAD],
            few,
            buffer: is_long.then(|| {
                // If another thread held the lock at a fork, it stays locked in the child.
                let kept = SCRATCH.try_lock().and_then(|mut all| all.pop());
                kept.unwrap_or_else(|| vec![0; limits::SCRATCH].into_boxed_slice())
            }),
        }
    }

    /// Calls `recv` with the buffers of the plan.
    pub fn receive(
        &mut self,
        plan: &Plan,
        dest: Option<&mut Dest<'_, '_>>,
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> Result<usize, c_int>,
    ) -> Result<usize, c_int> {
        let buffer = self.buffer.as_deref_mut().unwrap_or(self.few);
        let own = buffer.get_mut(..plan.own).unwrap_or(&mut []);
        let there = dest
            .and_then(|d| d.place().get_mut(..plan.there))
            .unwrap_or(&mut []);
        let own = IoSliceMut::new(own);
        match (plan.head, plan.there) {
            (false, 0) => recv(&mut [own]),
            (false, _) => recv(&mut [IoSliceMut::new(there), own]),
            (true, _) => {
                let head = IoSliceMut::new(&mut self.head);
                recv(&mut [head, IoSliceMut::new(there), own])
            }
        }
    }

    /// Returns the `n` received bytes, or `None` if `plan` does not place all of them into the buffer.
    pub fn all(&self, plan: &Plan, n: usize) -> Option<&[u8]> {
        if plan.head || plan.there > 0 {
            return None;
        }
        Some(self.behind(0, n))
    }

    /// Inserts `bytes` at the start of the buffer, before the `behind` bytes that a receive has placed there.
    fn put_before(&mut self, bytes: &[u8], behind: usize) {
        if bytes.is_empty() {
            return;
        }
        let buffer = self.buffer.as_deref_mut().unwrap_or(self.few);
        buffer.copy_within(..behind, bytes.len());
        if let Some(place) = buffer.get_mut(..bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn behind(&self, moved: usize, behind: usize) -> &[u8] {
        let buffer = self.buffer.as_deref().unwrap_or(self.few);
        buffer.get(..moved + behind).unwrap_or(&[])
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && let Some(mut all) = SCRATCH.try_lock()
            && all.len() < limits::SCRATCH_KEPT
        {
            all.push(buffer);
        }
    }
}

/// What a stream has to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Nothing.
    Nothing,
    /// Only corked bytes.
    Corked,
    /// Bytes that wait for the carrier, the peer's Reply or credit.
    Bytes,
}

/// What a call changed for other threads that wait for the stream.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct News {
    /// Bytes, the end or an error became readable.
    pub readable: bool,
    /// More can be written than before.
    pub writable: bool,
}

/// The state of a stream.
#[derive(Debug)]
pub struct Stream {
    rx: Rx,
    /// `None`: the peer's Reply has not arrived, and no early messages were sent. See [`Self::send_early`].
    tx: Option<Tx>,
    start: Option<Box<Start>>,
    queue: Queue,
    /// Bytes that the program has written and that are not in an FPDU yet: before the peer's Reply, without credit, or corked.
    held: Vec<u8>,
    /// The held bytes are corked: they wait for more bytes, to be sent in one message.
    corked: bool,
    /// The time in milliseconds until which the last corked bytes waited, or wait.
    corked_until: u64,
    /// Bytes of FPDUs that the carrier has not accepted yet.
    out: Vec<u8>,
    out_from: usize,
    /// `out` contains only a Limit message.
    out_is_limit: bool,
    /// The receive window: how many bytes the peer may send beyond what the program has read.
    window: u32,
    /// The peer has sent its last data. Its Limit messages may still arrive.
    eof: bool,
    /// The carrier has ended: the peer has closed the connection.
    closed: bool,
    /// The kernel has reported that the peer has closed the connection. Bytes may be unread before the end.
    hung_up: bool,
    /// The peer has reset the connection. The kernel reported this when a Limit message was sent, and does not report it again.
    was_reset: bool,
    /// An errno that was not returned to the program yet, or 0.
    error: c_int,
    /// The stream is broken: reads and writes fail.
    broken: bool,
    /// `shutdown(SHUT_RD)`, `shutdown(SHUT_WR)`.
    shut_rd: bool,
    shut_wr: bool,
    /// An End message must be sent after all data.
    end_due: bool,
    /// A Limit message must be sent when the carrier accepts it.
    limit_due: bool,
    /// The program has closed the stream, and the carrier is shut down for sending.
    fin: bool,
    /// The connection is plain TCP, because of the Reply or because both ends have sent Plain messages. Bytes written before
    /// that, and bytes received with the last message, may still be buffered here.
    plain: bool,
    /// This end has sent a Plain message.
    plain_reported: bool,
    /// The carrier's send buffer is full: it has accepted no byte of the last message, or of the last plain bytes.
    full: bool,
    /// The last receive returned fewer bytes than it asked for, so the carrier's receive buffer is empty.
    drained: bool,
    /// The last receive returned so few bytes that a short buffer would have been enough.
    few: bool,
    /// The carrier's receive buffer has payload.
    has_payload: bool,
    /// The program has closed the stream while another thread receives from the carrier without the lock of the stream. That thread may
    /// take bytes at any time, so what arrives here is discarded.
    blind: bool,
    /// The carrier is shut down for receiving: a receive returns bytes or none, and never waits for them. See [`Self::deafen`].
    deaf: bool,
    /// `SO_OOBINLINE`: urgent bytes are read like others.
    inline: bool,
    /// The place of an urgent byte in `held`.
    held_urgent: Option<usize>,
    memory_out: MemoryOut,
    /// The time in milliseconds at which a write last found the memory empty, or unread for so long that the connection was checked.
    /// See [`Self::is_unread`].
    checked: u64,
    /// The peer has offered memory. Further offers are ignored.
    was_offered: bool,
    news: News,
    /// The number of long messages that were sent in succession, up to [`limits::RUN`].
    run: u8,
    /// The carrier may delay bytes, to join long messages. See [`Self::joins`].
    joins: bool,
    /// The carrier's maximum segment size in bytes. 0: not known yet.
    segment: usize,
    /// The values of `TCP_NODELAY` and `TCP_CORK` that the program has set. On the carrier `TCP_CORK` is never set, and `TCP_NODELAY`
    /// is set except while many long messages are sent.
    pub delays: [c_int; 2],
    /// Payload bytes that the program has read.
    pub bytes_in: u64,
    /// Payload bytes that the program has written.
    pub bytes_out: u64,
}

/// The MPA start-up of the connecting end.
#[derive(Debug)]
struct Start {
    initiator: Initiator,
    got: Vec<u8>,
}

/// Returns the initial window in bytes.
fn window_first() -> u32 {
    policy::settings().window.0
}

/// Returns the private data of this end.
fn private() -> Private {
    Private {
        window: window_first(),
        longest: LONGEST as u32,
        namespace: 0,
        plain: false,
        memory: policy::settings().memory > 0,
    }
}

/// Returns the initiator of the start-up, with its Request.
pub fn initiator(crc: bool) -> Option<Initiator> {
    Initiator::new(InitiatorConfig {
        rev: 1,
        crc,
        markers: false,
        private_data: private().emit().to_vec(),
        ..InitiatorConfig::default()
    })
    .ok()
}

/// Returns the length of the Request in `bytes`, and a Reply that refuses the upgrade: plain TCP follows it. `None`: the bytes are
/// not a Request of this protocol.
pub fn refusal(bytes: &[u8]) -> Option<(usize, Vec<u8>)> {
    let mut responder = responder(false);
    let Ok(Incoming::Request(request)) = responder.handle_rx(start_up_frame(bytes)) else {
        return None;
    };
    Private::parse(&request.private_data)?;
    let private = Private {
        plain: true,
        ..private()
    };
    let accepted = responder.accept(0, 0, &private.emit()).ok()?;
    Some((request.consumed, accepted.reply))
}

/// Returns the first MPA start-up frame of `bytes` (RFC 5044 §7.1.1), or all bytes if they contain none. Early messages may follow it.
fn start_up_frame(bytes: &[u8]) -> &[u8] {
    const HEADER: usize = 20;
    let private = bytes
        .get(HEADER - 2..HEADER)
        .and_then(|b| b.try_into().ok());
    let frame = private.map(|length| HEADER + usize::from(u16::from_be_bytes(length)));
    frame.and_then(|n| bytes.get(..n)).unwrap_or(bytes)
}

fn responder(crc: bool) -> Responder {
    Responder::new(ResponderLimits {
        crc,
        markers: false,
        ..ResponderLimits::default()
    })
}

/// The first bytes of an accepted connection.
#[derive(Debug)]
pub enum First {
    /// A Request of this protocol: its length, the Reply, and the new stream.
    Request(usize, Vec<u8>, Box<Stream>),
    /// Something else.
    Other,
}

/// Parses the first bytes of an accepted connection. A Request is sent in one segment, so an incomplete one belongs to another
/// protocol.
pub fn first(bytes: &[u8], crc: bool) -> First {
    let mut responder = responder(crc);
    let Ok(Incoming::Request(request)) = responder.handle_rx(start_up_frame(bytes)) else {
        return First::Other;
    };
    let Some(peer) = Private::parse(&request.private_data) else {
        return First::Other;
    };
    if request.markers {
        return First::Other;
    }
    match responder.accept(0, 0, &private().emit()) {
        Ok(accepted) => {
            let crc = accepted.params.crc;
            let mut stream = Stream::new(crc);
            stream.tx = Some(Tx::new(&peer, crc));
            stream.memory_out = MemoryOut::of(&peer, crc);
            First::Request(request.consumed, accepted.reply, Box::new(stream))
        }
        Err(_) => First::Other,
    }
}

struct Arriving<'q, 'd, 'a, 'b> {
    queue: &'q mut Queue,
    dest: Option<&'d mut Dest<'a, 'b>>,
    with_crc: bool,
    has_urgent: bool,
    offer: &'q mut Option<Offer>,
}

impl Sink for Arriving<'_, '_, '_, '_> {
    fn data(&mut self, mut bytes: &[u8]) {
        if !self.with_crc
            && self.queue.held() == 0
            && let Some(dest) = &mut self.dest
        {
            let n = dest.put(bytes);
            bytes = bytes.get(n..).unwrap_or(&[]);
        }
        if !bytes.is_empty() {
            self.queue.push(bytes, !self.with_crc);
        }
    }

    fn verified(&mut self) {
        self.queue.verify();
    }

    fn urgent(&mut self, byte: u8) {
        self.queue.push_urgent(byte, !self.with_crc);
        self.has_urgent = true;
    }

    fn offer(&mut self, offer: Offer) {
        *self.offer = Some(offer);
    }

    fn memory(&mut self, mark: Mark, open: u32) -> Result<u32, Broken> {
        let n = self.queue.announced(mark).ok_or(Broken::Memory)?;
        let n = u32::try_from(n).ok().filter(|n| *n <= open);
        let n = n.ok_or(Broken::Credit)?;
        if let Some(dest) = &mut self.dest {
            self.queue.take(dest);
        }
        Ok(n)
    }
}

/// The memory for the payload that this end sends.
#[derive(Debug)]
enum MemoryOut {
    /// It is not used: the peer or the rules do not permit it, there are CRCs, the peer is on another host, or no offer could be made.
    Never,
    /// It may be offered when the program has written enough.
    Later,
    /// It was offered. The peer may have accepted it.
    Offered(Box<Writer>),
}

impl MemoryOut {
    fn of(peer: &Private, crc: bool) -> Self {
        if peer.memory && !crc && policy::settings().memory > 0 {
            Self::Later
        } else {
            Self::Never
        }
    }

    /// Returns the memory if the peer has accepted it.
    fn accepted(&mut self) -> Option<&mut Writer> {
        match self {
            Self::Offered(writer) => writer.is_accepted().then_some(writer),
            Self::Never | Self::Later => None,
        }
    }
}

impl Stream {
    fn new(crc: bool) -> Self {
        Self {
            rx: Rx::new(window_first(), crc),
            tx: None,
            start: None,
            queue: Queue::new(policy::settings().shares),
            held: Vec::new(),
            corked: false,
            corked_until: 0,
            out: Vec::new(),
            out_from: 0,
            out_is_limit: false,
            window: window_first(),
            eof: false,
            closed: false,
            hung_up: false,
            was_reset: false,
            error: 0,
            broken: false,
            shut_rd: false,
            shut_wr: false,
            end_due: false,
            limit_due: false,
            fin: false,
            plain: false,
            plain_reported: false,
            full: false,
            drained: true,
            few: true,
            has_payload: false,
            blind: false,
            deaf: false,
            inline: false,
            held_urgent: None,
            memory_out: MemoryOut::Never,
            checked: 0,
            was_offered: false,
            news: News::default(),
            run: 0,
            joins: false,
            segment: 0,
            delays: [0; 2],
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    /// Returns the stream of a connecting end whose Request was sent.
    pub fn connecting(initiator: Initiator) -> Box<Self> {
        let mut stream = Self::new(false);
        stream.start = Some(Box::new(Start {
            initiator,
            got: Vec::new(),
        }));
        Box::new(stream)
    }

    /// Returns the stream of a connection that has failed before it was upgraded.
    pub fn failed(error: c_int) -> Box<Self> {
        let mut stream = Self::new(false);
        stream.fail(error);
        Box::new(stream)
    }

    /// Sets the program's delay options on a connection that has become plain.
    pub fn delay(&self, fd: c_int) {
        let names = [libc::TCP_NODELAY, libc::TCP_CORK];
        for (value, name) in self.delays.iter().zip(names) {
            let _ = sys::set_option(fd, libc::IPPROTO_TCP, name, *value);
        }
    }

    /// Makes the socket send each message at once, as a carrier must. The program's delay options are saved in `delays`,
    /// from which `getsockopt` reports them.
    pub fn undelay(&mut self, fd: c_int) {
        let names = [libc::TCP_NODELAY, libc::TCP_CORK];
        for ((place, name), own) in self.delays.iter_mut().zip(names).zip([1, 0]) {
            *place = sys::option(fd, libc::IPPROTO_TCP, name).unwrap_or(0);
            if *place != own {
                let _ = sys::set_option(fd, libc::IPPROTO_TCP, name, own);
            }
        }
        // A connection inherits the option from its listener.
        self.set_inline(
            sys::option(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE).is_ok_and(|on| on != 0),
        );
    }

    /// Records that the program has set `TCP_NODELAY` (0) or `TCP_CORK` (1).
    pub fn set_delay(&mut self, fd: c_int, which: usize, value: c_int) {
        if let Some(place) = self.delays.get_mut(which) {
            *place = value;
        }
        // Setting `TCP_NODELAY` sends the bytes that the carrier has delayed.
        if !self.plain && self.delays[0] != 0 {
            self.joins(fd, 0);
        }
        if self.corked && (which == 0 || value == 0) {
            self.uncork(fd);
        }
    }

    // ------------------------------------------------------------------ readiness

    /// Returns whether a read returns at once.
    pub fn is_readable(&self) -> bool {
        !self.queue.is_empty()
            || self.has_payload
            || self.eof
            || self.error != 0
            || self.broken
            || self.shut_rd
    }

    /// Returns whether there is an urgent byte that the program has not read.
    pub fn is_urgent(&self) -> bool {
        self.queue.urgent().is_some()
    }

    /// Returns whether a write accepts at least one byte, or fails, at once.
    pub fn is_writable(&self) -> bool {
        if self.error != 0 || self.broken || self.shut_wr {
            return true;
        }
        match &self.tx {
            // No more credit arrives, so a write fails.
            Some(tx) if self.closed && !tx.has_room() => true,
            Some(tx) if self.start.is_none() => {
                (self.held.is_empty() || self.corked)
                    && self.out.is_empty()
                    && !self.full
                    && tx.has_room()
            }
            None if self.plain => self.held.is_empty() && !self.full,
            Some(_) | None => self.held.len() <= limits::HELD / 2,
        }
    }

    /// Returns whether anything waits to be sent: for the carrier, the peer's Reply or credit, or because it is corked.
    pub fn is_waiting(&self) -> bool {
        !self.broken
            && (!self.out.is_empty() || !self.held.is_empty() || self.end_due || self.limit_due)
    }

    /// Returns whether all bytes that wait are corked.
    pub fn is_corked(&self) -> bool {
        self.corked && self.out.is_empty() && !self.limit_due
    }

    /// Returns what the stream has to send.
    pub fn pending(&self) -> Pending {
        match self.is_waiting() {
            false => Pending::Nothing,
            true if self.is_corked() => Pending::Corked,
            true => Pending::Bytes,
        }
    }

    /// Returns whether bytes were corked a short time ago.
    pub fn was_corked(&self) -> bool {
        self.corked_until != 0 && sys::now_ms() < self.corked_until + limits::CORK_KEPT
    }

    /// Returns whether the peer's Reply has not arrived.
    pub fn is_starting(&self) -> bool {
        self.start.is_some() && !self.broken
    }

    /// Returns whether bytes wait for the carrier only.
    pub fn has_rest(&self) -> bool {
        !self.out.is_empty() || self.full
    }

    /// Returns whether the connection is plain and no bytes are buffered here, so that calls can go to the kernel.
    pub fn is_over(&self) -> bool {
        self.plain
            && self.queue.held() == 0
            && self.held.is_empty()
            && !self.end_due
            && !self.broken
    }

    /// Returns the number of payload bytes that may be sent.
    fn credit(&self) -> usize {
        self.tx.as_ref().map_or(0, Tx::credit)
    }

    /// Returns the current `poll` events of the stream.
    pub fn readiness(&self) -> i16 {
        let mut events = 0;
        let has_ended = self.eof || self.hung_up || self.shut_rd;
        if self.is_readable() || self.hung_up {
            events |= libc::POLLIN | libc::POLLRDNORM;
        }
        if self.is_writable() {
            events |= libc::POLLOUT | libc::POLLWRNORM;
        }
        if self.is_urgent() {
            events |= libc::POLLPRI;
        }
        if self.broken || has_ended {
            events |= libc::POLLRDHUP;
        }
        if self.broken || has_ended && self.shut_wr {
            events |= libc::POLLHUP;
        }
        if self.error != 0 {
            events |= libc::POLLERR;
        }
        events
    }

    /// Returns whether the end of the peer's data causes POLLHUP, which is reported to every wait.
    fn awaits_end(&self) -> bool {
        self.shut_wr && !(self.broken || self.eof || self.hung_up || self.shut_rd)
    }

    /// Returns the events to wait for at the carrier when the program waits for `wanted`.
    pub fn carrier_events(&self, wanted: i16) -> i16 {
        let mut events = wanted & !(libc::POLLIN | libc::POLLOUT);
        let reads = libc::POLLIN | libc::POLLRDHUP | libc::POLLPRI | libc::POLLRDNORM;
        if wanted & reads != 0 || self.awaits_end() {
            events |= libc::POLLIN;
        }
        if wanted & (libc::POLLOUT | libc::POLLWRNORM) != 0 {
            if self.is_writable() || self.has_rest() {
                events |= libc::POLLOUT;
            } else {
                events |= libc::POLLIN;
            }
        }
        events
    }

    /// Returns and clears what has changed for other threads since the last call.
    pub fn news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }

    /// Returns and clears the error, like `SO_ERROR`.
    pub fn take_error(&mut self) -> c_int {
        std::mem::take(&mut self.error)
    }

    /// Returns the number of bytes that can be read at once, for `FIONREAD`.
    pub fn readable_bytes(&self) -> usize {
        self.queue.available()
    }

    /// Returns the number of written bytes that the carrier has not accepted, which is a part of `SIOCOUTQ`.
    pub fn unsent_bytes(&self) -> usize {
        self.held.len() + self.out.len() - self.out_from
    }

    /// Returns the window in bytes.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Returns the memory of the stream in bytes.
    pub fn memory(&self) -> usize {
        let out = matches!(self.memory_out, MemoryOut::Offered(_));
        let memories = usize::from(out) + usize::from(self.queue.has_memory());
        size_of::<Self>()
            + self.queue.room()
            + self.held.capacity()
            + self.out.capacity()
            + memories * limits::RING
    }

    // ------------------------------------------------------------------ receiving

    /// Marks the stream as broken.
    fn fail(&mut self, error: c_int) {
        if !self.broken {
            self.broken = true;
            self.error = match error {
                // The kernel returns EPIPE too if the reset comes after the end of the peer's data.
                libc::ECONNRESET if self.eof => libc::EPIPE,
                error => error,
            };
            self.news.readable = true;
            self.news.writable = true;
        }
        self.held.clear();
        self.held_urgent = None;
        self.out.clear();
        self.out_from = 0;
        self.end_due = false;
        self.limit_due = false;
    }

    fn broke(&mut self, fd: c_int, why: &Broken) {
        if *why != Broken::Reset {
            log::line(&format!("stream {fd}: {why}; the stream is reset"));
            sys::reset_on_close(fd);
        }
        self.fail(libc::ECONNRESET);
    }

    /// Receives from the carrier once, about `most` bytes. Returns whether there were any.
    pub fn pull(&mut self, fd: c_int, mut dest: Option<&mut Dest<'_, '_>>, most: usize) -> bool {
        if self.closed || self.broken {
            return false;
        }
        let plan = self.plan(dest.as_deref(), most);
        let mut few = [0; limits::FEW];
        let mut room = Room::of(&plan, &mut few);
        let result = room.receive(&plan, dest.as_deref_mut(), |parts| sys::recv(fd, parts));
        self.arrived(fd, &plan, result, dest, &mut room)
    }

    /// Returns whether the next read has to wait for bytes from the carrier, so that the caller may receive them by a call that
    /// blocks.
    pub fn awaits_bytes(&self) -> bool {
        self.tx.is_some() && self.start.is_none() && !self.closed && !self.is_readable()
    }

    /// Returns whether the streams of the process have received as many bytes as they may keep for the program. With CRCs, bytes become
    /// readable only when their whole message has been received, so these streams are not limited.
    fn is_exhausted(&self) -> bool {
        queue::used() >= policy::settings().pool as usize && !self.rx.has_crc()
    }

    /// Decides where the next bytes from the carrier are received. At most `most` bytes are received into a buffer of the library.
    ///
    /// Payload of long messages is received directly into the program's memory. At the beginning of a message its length is not known:
    /// it is expected to be as long as the last one. If it is not, the bytes are moved.
    pub fn plan(&self, dest: Option<&Dest<'_, '_>>, most: usize) -> Plan {
        let most = match dest {
            _ if !self.is_exhausted() => most,
            Some(dest) => most.min(dest.room() + HEAD),
            None => most.min(limits::POOL_EMPTY),
        };
        let longest = if self.few {
            limits::FEW
        } else {
            limits::SCRATCH
        };
        let plain = Plan {
            head: false,
            there: 0,
            own: most.min(longest),
        };
        // For short reads it is better to receive many bytes at once.
        let Some(dest) = dest.filter(|d| d.room() > limits::COPIED) else {
            return plain;
        };
        if self.queue.held() > 0 || self.tx.is_none() || self.start.is_some() || self.blind {
            return plain;
        }
        let straight = self.rx.straight();
        let expected = self.rx.expected();
        let (head, payload) = if straight > 0 {
            (false, straight)
        } else if expected > limits::COPIED {
            (true, expected.min(limits::SCRATCH - BEHIND))
        } else {
            return plain;
        };
        let there = payload.min(dest.room());
        let own = if payload > limits::COPIED || there < payload {
            // The rest of this message and the head of the next one, whose payload can then be received directly too.
            payload.wrapping_neg() % 4 + CRC + HEAD
        } else {
            limits::COPIED
        };
        Plan { head, there, own }
    }

    /// Processes the result of a receive according to `plan`. Returns whether there were any bytes.
    pub fn arrived(
        &mut self,
        fd: c_int,
        plan: &Plan,
        result: Result<usize, c_int>,
        mut dest: Option<&mut Dest<'_, '_>>,
        room: &mut Room<'_>,
    ) -> bool {
        self.has_payload = false;
        let n = match result {
            Ok(0) if self.deaf && !sys::has_peer_ended(fd) => {
                self.drained = true;
                return false;
            }
            Ok(0) => {
                // A FIN ends the stream cleanly only between two messages.
                let is_clean = !self.was_reset || self.rx.ended();
                let may_end = self.start.is_none() && (self.plain || self.rx.is_between());
                if self.blind || may_end && is_clean {
                    self.eof = true;
                    self.closed = true;
                    self.news.readable = true;
                    self.news.writable = true;
                } else {
                    self.fail(libc::ECONNRESET);
                }
                return true;
            }
            Ok(n) => n,
            Err(libc::EAGAIN) => {
                self.drained = true;
                return false;
            }
            Err(libc::EINTR) => return false,
            Err(e) => {
                self.fail(e);
                return true;
            }
        };
        self.drained = n < plan.asked();
        if n >= limits::FEW {
            self.few = false;
        } else if self.rx.is_between() {
            // Only a short receive at the start of a message counts. Within a message it may be the end of a long one.
            self.few = true;
        }
        if self.blind {
            return true;
        }
        let head = if plan.head { n.min(HEAD) } else { 0 };
        let there = (n - head).min(plan.there);
        let behind = n - head - there;
        if head > 0 {
            let bytes = room.head;
            self.take_bytes(fd, bytes.get(..head).unwrap_or(&[]), None);
        }
        // The bytes in the program's memory that are payload of the current message stay there.
        let straight = there.min(self.rx.straight());
        let moved = there - straight;
        if straight > 0 {
            self.rx.went_straight(straight);
        }
        if let Some(dest) = &mut dest {
            room.put_before(dest.bytes(straight, moved), behind);
            dest.advance(straight);
        }
        if moved + behind > 0 {
            self.take_bytes(fd, room.behind(moved, behind), dest);
        }
        true
    }

    /// Handles `bytes`, which the last receive has returned, if they are exactly one message and its payload fits into the program's
    /// next buffer. The result is that of [`Self::arrived`] and then [`Self::read`], in less time. Otherwise returns false without a
    /// change.
    #[inline]
    pub fn read_whole(&mut self, fd: c_int, bytes: &[u8], dest: &mut Dest<'_, '_>) -> bool {
        if self.blind
            || self.plain
            || self.broken
            || self.start.is_some()
            || self.queue.held() > 0
            || !self.held.is_empty()
            || self.end_due
            || bytes.len() > dest.room() + HEAD + CRC
        {
            return false;
        }
        let Some(tx) = &mut self.tx else { return false };
        let credit = (tx.credit() > 0, tx.has_room());
        let Some(payload) = self.rx.whole(bytes, tx) else {
            return false;
        };
        self.news.writable |= credit != (tx.credit() > 0, tx.has_room());
        self.has_payload = false;
        self.drained = true;
        self.few = true;
        dest.put(payload);
        self.bytes_in += payload.len() as u64;
        self.open_window(fd);
        true
    }

    fn take_bytes(&mut self, fd: c_int, bytes: &[u8], dest: Option<&mut Dest<'_, '_>>) {
        // With `dest` this is part of a read, which asks for an announcement at its end.
        let is_read = dest.is_some();
        let mut behind = None;
        if let Some(start) = &mut self.start {
            start.got.extend_from_slice(bytes);
            match start.initiator.handle_rx(&start.got) {
                Ok(Progress::NeedMore) => return,
                Ok(Progress::Established {
                    consumed,
                    params,
                    private_data,
                    ..
                }) => {
                    let peer = Private::parse(&private_data);
                    let (Some(peer), false) = (peer, params.send_markers) else {
                        log::line(&format!(
                            "stream {fd}: the peer's Reply is of another protocol"
                        ));
                        remote::distrust(fd);
                        self.fail(libc::ECONNRESET);
                        return;
                    };
                    behind = Some(start.got.get(consumed..).unwrap_or(&[]).to_vec());
                    self.start = None;
                    if peer.plain {
                        self.go_plain(fd, behind.as_deref().unwrap_or(&[]));
                        return;
                    }
                    self.rx = Rx::new(window_first(), params.crc);
                    self.tx = Some(match self.tx.take() {
                        Some(early) => early.after_reply(&peer, params.crc),
                        None => Tx::new(&peer, params.crc),
                    });
                    self.memory_out = MemoryOut::of(&peer, params.crc);
                    self.news.writable = true;
                }
                Ok(_) | Err(_) => {
                    log::line(&format!(
                        "stream {fd}: the peer sent no MPA Reply; add a rule with the mode tcp for it"
                    ));
                    remote::distrust(fd);
                    sys::reset_on_close(fd);
                    self.fail(libc::ECONNRESET);
                    return;
                }
            }
        }
        if self.plain {
            let n = dest
                .filter(|_| self.queue.held() == 0)
                .map_or(0, |d| d.put(bytes));
            self.queue.push(bytes.get(n..).unwrap_or(&[]), true);
            self.news.readable = true;
            return;
        }
        let bytes = behind.as_deref().unwrap_or(bytes);
        if self.broken {
            return;
        }
        let before = (self.queue.len(), self.is_urgent());
        let Some(tx) = &mut self.tx else { return };
        let credit = (tx.credit() > 0, tx.has_room());
        let with_crc = self.rx.has_crc();
        let mut offer = None;
        let mut sink = Arriving {
            queue: &mut self.queue,
            dest,
            with_crc,
            has_urgent: false,
            offer: &mut offer,
        };
        let result = self.rx.feed(bytes, tx, &mut sink);
        let has_urgent = sink.has_urgent;
        if let Some(offer) = offer
            && !std::mem::replace(&mut self.was_offered, true)
            && !with_crc
            && policy::settings().memory > 0
            && memory::is_local(fd)
            && let Some(memory) = Reader::open(&offer)
        {
            log::with(|| format!("stream {fd}: received payload is in shared memory"));
            self.queue.set_memory(memory);
        }
        if credit != (tx.credit() > 0, tx.has_room()) {
            self.news.writable = true;
        }
        if self.queue.len() > before.0 || has_urgent || self.is_urgent() != before.1 {
            self.news.readable = true;
        }
        if let Err(why) = result {
            self.broke(fd, &why);
            return;
        }
        if !is_read {
            self.ask(fd, false);
        }
        if self.rx.ended() && !self.eof {
            self.eof = true;
            self.news.readable = true;
        }
        if self.rx.is_plain() && !self.plain {
            self.announce_plain(fd);
            self.go_plain(fd, &[]);
            return;
        }
        if !self.held.is_empty() || self.end_due {
            self.flush(fd);
        }
    }

    /// Looks for bytes in the memory that the peer has not announced. Returns whether there are any.
    fn look(&mut self, fd: c_int) -> bool {
        let found = self.queue.look();
        self.found(fd, found)
    }

    /// Asks the peer to announce the next bytes that it puts into the memory, so that a program can wait for them. Unless `always` is
    /// set, does nothing while the memory has unread bytes. Returns whether the peer has put bytes there that were not announced.
    fn ask(&mut self, fd: c_int, always: bool) -> bool {
        let found = self.queue.ask(always);
        self.found(fd, found)
    }

    fn found(&mut self, fd: c_int, n: Option<usize>) -> bool {
        if n == Some(0) || self.broken {
            return false;
        }
        let n = n.and_then(|n| u32::try_from(n).ok());
        match n.ok_or(Broken::Memory).and_then(|n| self.rx.found(n)) {
            Ok(()) => {
                self.news.readable = true;
                // The announcement of these bytes may be in the carrier's buffer, so that buffer does not count as empty. The peer
                // sends no other announcement until this one is handled.
                self.drained = false;
            }
            Err(why) => self.broke(fd, &why),
        }
        true
    }

    /// Sends a Plain message: this end sends plain TCP afterwards.
    fn announce_plain(&mut self, fd: c_int) {
        if !std::mem::replace(&mut self.plain_reported, true) {
            self.limit_due = false;
            self.control(fd, Kind::Plain, &[]);
        }
    }

    /// Makes the connection plain in both directions, for a program without the library. Bytes that the peer sends after its Plain
    /// message stay in the carrier. Returns false if the stream has unread data or the peer did not answer in time; the stream may be
    /// unusable then.
    pub fn hand_over(&mut self, fd: c_int, until: Instant) -> bool {
        self.queue.drop_read_urgent();
        if self.broken || self.start.is_some() || self.plain || self.queue.held() > 0 {
            return false;
        }
        self.uncork(fd);
        self.announce_plain(fd);
        while !self.is_over() {
            if self.broken || self.closed || self.queue.held() > 0 {
                return false;
            }
            let most = self.rx.missing();
            if most > 0 && self.pull(fd, None, most) {
                continue;
            }
            let events = if most > 0 {
                libc::POLLIN
            } else {
                libc::POLLOUT
            };
            let left = until.saturating_duration_since(Instant::now());
            let ms = c_int::try_from(left.as_millis()).unwrap_or(0);
            match sys::poll_one(fd, events, ms) {
                Ok(0) => return false,
                Err(e) if e != libc::EINTR => return false,
                _ => self.flush(fd),
            }
        }
        true
    }

    /// Turns the stream into a plain TCP connection in both directions. `bytes` were received after the peer's Plain message.
    fn go_plain(&mut self, fd: c_int, bytes: &[u8]) {
        self.plain = true;
        self.full = false;
        self.tx = None;
        // From now on a TCP FIN ends the data, instead of an End message.
        self.end_due |= self.shut_wr;
        self.queue.push(bytes, true);
        self.news.readable |= !bytes.is_empty();
        self.news.writable = true;
        self.flush(fd);
        // The peer's last message is acknowledged now. Otherwise Nagle's algorithm holds back what the peer writes next.
        let _ = sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
    }

    /// Handles events of the carrier: receives until there is something to report, and sends queued bytes. `wanted`: the events for
    /// which the program waits.
    pub fn on_carrier(&mut self, fd: c_int, events: i16, may_pull: bool, wanted: i16) {
        let inward = libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP;
        let broken = events & (libc::POLLHUP | libc::POLLERR) != 0;
        // The program does not wait for payload, but for something that may be behind it: the end, or an urgent byte.
        let unread = wanted & (libc::POLLIN | libc::POLLRDNORM) == 0;
        let until_end = unread && (wanted & libc::POLLRDHUP != 0 || self.awaits_end());
        let until_urgent = unread && wanted & libc::POLLPRI != 0;
        // If nothing can be written, everything is received, because a new limit may follow the payload.
        let is_enough =
            events & inward == libc::POLLIN && self.is_writable() && !until_end && !until_urgent;
        // The kernel reports the end with the bytes before it, and does not report it again to an edge-triggered set. A program that
        // has been told of the end reads on after a short read.
        self.hung_up |= events & libc::POLLRDHUP != 0 && !self.deaf;
        if events & inward == 0 || !may_pull {
            // Nothing is received.
        } else if is_enough && self.rx.straight() > 0 && self.queue.held() == 0 {
            // The first received byte is payload, so the stream is readable. The payload is left for the program's call.
            self.news.readable |= !self.has_payload;
            self.has_payload = true;
        } else if is_enough && self.is_exhausted() && !self.queue.is_empty() {
            // The queue already has bytes to report, and the streams of the process may not keep more bytes.
        } else {
            let before = self.queue.len();
            // Each pass receives what the peer was allowed to send, so there are few passes. Most of a long message is left for the
            // program's call, which receives it directly.
            let most = if is_enough && self.rx.is_long() {
                limits::WAIT_LONG
            } else {
                limits::WAIT_READ
            };
            // What is left in the carrier is not reported again to an edge-triggered set: the end behind a message without payload, or
            // a limit or an urgent byte behind the payload.
            let may_follow = |s: &Self| {
                broken || !s.is_writable() || until_end || until_urgent && !s.is_urgent()
            };
            while (self.queue.len() == before || may_follow(self)) && self.pull(fd, None, most) {}
        }
        if broken && self.closed && !self.fin && !self.plain && !self.broken {
            // The peer has reset the connection after its end. A receive returns only the end.
            let error = sys::option(fd, libc::SOL_SOCKET, libc::SO_ERROR);
            self.fail(error.unwrap_or(0));
        }
        if events & (libc::POLLOUT | libc::POLLERR | libc::POLLHUP) != 0 {
            self.news.writable |= std::mem::take(&mut self.full);
            self.flush(fd);
        }
    }

    /// Receives all bytes that are in the carrier's receive buffer, so that [`Self::readable_bytes`] counts them.
    pub fn fill(&mut self, fd: c_int) {
        self.drained = false;
        while !self.is_exhausted() && self.pull(fd, None, limits::SCRATCH) && !self.drained {}
        // The program may wait for more bytes than it can read now.
        self.ask(fd, true);
    }

    /// Reads the available bytes into `dest`. `all`: receives repeatedly as long as bytes are available. Without `may_pull`
    /// nothing is received from the carrier. `start`: the number of bytes that were in `dest` before this attempt to
    /// read. [`Self::arrived`] may have added some since then.
    ///
    /// # Errors
    /// EAGAIN if nothing is available; otherwise the stream's error, which is returned once.
    pub fn read(
        &mut self,
        fd: c_int,
        dest: &mut Dest<'_, '_>,
        start: usize,
        peek: bool,
        all: bool,
        may_pull: bool,
    ) -> Result<(), c_int> {
        if peek {
            self.look(fd);
            while may_pull && self.queue.is_empty() && self.pull(fd, None, limits::WAIT_READ) {}
            // The program may wait for more bytes than there are.
            self.ask(fd, true);
            self.queue.peek_into(dest);
        } else {
            self.take(fd, dest);
            while !dest.is_full() && !self.ends_read(dest) {
                if !self.look(fd) {
                    // The bytes in the kernel's buffer are read too, because a program may take a short read for the end of the data.
                    let pulls = may_pull && (dest.done() == start || !self.drained || all);
                    if !pulls || !self.pull(fd, Some(dest), limits::SCRATCH) {
                        break;
                    }
                }
                self.take(fd, dest);
            }
            while self.ask(fd, false) && !dest.is_full() && !self.ends_read(dest) {
                self.take(fd, dest);
            }
            let n = dest.done() - start;
            self.bytes_in += n as u64;
            if n > 0 {
                self.open_window(fd);
            }
        }
        if dest.done() > 0 || dest.is_full() {
            return Ok(());
        }
        if self.error != 0 && !self.eof {
            return Err(self.take_error());
        }
        if self.eof || self.broken || self.shut_rd {
            return Ok(());
        }
        Err(libc::EAGAIN)
    }

    /// Moves readable bytes to `dest`. A long read out of the memory takes pieces, so that the peer can fill the first part of the ring while
    /// this end reads the rest.
    fn take(&mut self, fd: c_int, dest: &mut Dest<'_, '_>) {
        loop {
            let before = dest.done();
            self.queue.take(dest);
            if dest.done() - before < limits::MEMORY_PIECE || dest.is_full() {
                break;
            }
            self.open_window(fd);
        }
    }

    /// Returns whether a read returns what it has, because the next byte is urgent.
    pub fn ends_read(&self, dest: &Dest<'_, '_>) -> bool {
        self.queue.is_at_urgent() && dest.done() > 0
    }

    /// Returns whether all bytes before the last urgent one were read, for `SIOCATMARK`.
    pub fn is_at_mark(&mut self, fd: c_int, may_pull: bool) -> bool {
        while may_pull
            && self.queue.held() == 0
            && !self.look(fd)
            && self.pull(fd, None, limits::WAIT_READ)
        {}
        self.queue.is_at_urgent()
    }

    /// Sets `SO_OOBINLINE`.
    pub fn set_inline(&mut self, inline: bool) {
        self.queue.set_inline(inline);
        self.inline = inline;
    }

    /// Reads the urgent byte. With `peek` it can be read again.
    ///
    /// # Errors
    /// EINVAL if there is none, or with `SO_OOBINLINE`.
    pub fn read_urgent(
        &mut self,
        fd: c_int,
        dest: &mut Dest<'_, '_>,
        peek: bool,
        may_pull: bool,
    ) -> Result<(), c_int> {
        // The kernel knows of an urgent byte behind any number of unread ones.
        while may_pull && !self.is_urgent() && self.pull(fd, None, limits::WAIT_READ) {}
        let byte = self.queue.urgent().filter(|_| !self.inline);
        dest.put(&[byte.ok_or(libc::EINVAL)?]);
        if !peek {
            self.queue.read_urgent();
        }
        Ok(())
    }

    /// Raises the peer's limit by the number of bytes that the program has read, unless that is less than half of the
    /// window, which is not worth a Limit message.
    fn open_window(&mut self, fd: c_int) {
        let ahead = self.rx.open() as usize + self.queue.held();
        let gone = (self.window as usize).saturating_sub(ahead);
        if gone < self.window as usize / 2 || self.rx.ended() || self.plain || self.closed {
            return;
        }
        // The queue is empty, so the program keeps up and a larger window may help.
        let most = policy::settings().window.1;
        if self.window < most && self.queue.is_empty() {
            self.window = self.window.saturating_mul(2).min(most);
        }
        let n = (self.window as usize).saturating_sub(ahead);
        self.rx.grant(u32::try_from(n).unwrap_or(0));
        self.limit_due = true;
        self.flush(fd);
    }

    // ------------------------------------------------------------------ sending

    /// Sends what is pending, in this order: the rest of an FPDU, a Limit, held bytes, the End.
    pub fn flush(&mut self, fd: c_int) {
        if self.plain {
            self.flush_plain(fd);
            return;
        }
        if !self.flush_out(fd) {
            return;
        }
        if self.limit_due && self.tx.is_some() {
            self.limit_due = false;
            self.control(fd, Kind::Limit, &[]);
        }
        if self.corked && sys::now_ms() >= self.corked_until {
            self.corked = false;
        }
        if !self.held.is_empty() && !self.corked && !self.flush_held(fd) {
            return;
        }
        if self.end_due && self.held.is_empty() && self.out.is_empty() && self.tx.is_some() {
            self.end_due = false;
            self.control(fd, Kind::End, &[]);
        }
    }

    /// Sends the held bytes for which there is credit. Returns false if the carrier accepts no more.
    fn flush_held(&mut self, fd: c_int) -> bool {
        let mut held = std::mem::take(&mut self.held);
        let mut sent = 0;
        let mut accepts = true;
        while accepts && sent < held.len() && self.out.is_empty() && self.credit() > 0 {
            let end = self.held_urgent.map_or(held.len(), |at| at.max(sent));
            let rest = held.get(sent..end).unwrap_or(&[]);
            if rest.is_empty() {
                self.held_urgent = None;
                self.control(fd, Kind::Urgent, held.get(sent..=sent).unwrap_or(&[]));
                if self.broken {
                    return false;
                }
                sent += 1;
                continue;
            }
            match self.data(fd, &[IoSlice::new(rest)], libc::MSG_NOSIGNAL) {
                Ok(n) => sent += n,
                Err(libc::EAGAIN) => accepts = false,
                Err(e) => {
                    self.report_later(e);
                    return false;
                }
            }
        }
        if sent < held.len() {
            held.drain(..sent);
            self.held_urgent = self.held_urgent.map(|at| at - sent);
            self.held = held;
        } else {
            self.news.writable = true;
        }
        accepts
    }

    /// Sends what the program has written, although the peer's Reply has not arrived. Called if this end cannot wait for the Reply any
    /// longer: the program has closed the stream or ends, and the peer has not used the connection yet. The messages follow the Request
    /// into the peer's kernel. If there are more than [`limits::EARLY_BYTES`] bytes, the connection is reset, so that the peer does not
    /// take the end of the connection for the end of the data.
    pub fn send_early(&mut self, fd: c_int) {
        if self.begin_early(fd) {
            self.flush(fd);
        }
    }

    /// Returns whether early messages may be sent.
    fn begin_early(&mut self, fd: c_int) -> bool {
        if !self.is_starting() || self.tx.is_some() {
            return false;
        }
        if self.held.len() > limits::EARLY_BYTES {
            sys::reset_on_close(fd);
            self.fail(libc::ECONNRESET);
            return false;
        }
        self.tx = Some(Tx::early());
        true
    }

    /// Sends all bytes for which there is credit, and waits until the peer's kernel has acknowledged them, but not longer than `until`. The
    /// process ends afterwards. What arrives is read and discarded: with unread messages of the peer, the kernel would send a reset.
    /// `shuts`: no other process has the connection, so a FIN can follow the bytes.
    ///
    /// The process may end in a signal handler, so no memory is allocated or freed.
    pub fn end(&mut self, fd: c_int, until: Instant, shuts: bool) {
        let has_bytes = !self.held.is_empty() || !self.out.is_empty();
        if has_bytes {
            self.begin_early(fd);
        }
        let has_sent = self.tx.as_ref().is_some_and(Tx::has_sent);
        if self.broken || self.plain || !(has_sent || has_bytes) || sys::linger(fd) == Some(0) {
            return;
        }
        let mut scrap = [0; limits::FEW];
        let (mut message, mut len, mut sent) = ([0; LAST], 0, 0);
        let mut held_from = 0;
        let mut is_shut = !shuts;
        loop {
            let mut is_sent = false;
            while !is_sent {
                let rest = match self.out.get(self.out_from..) {
                    Some(rest) if !rest.is_empty() => rest,
                    _ => message.get(sent..len).unwrap_or(&[]),
                };
                if rest.is_empty() {
                    (len, sent) = (self.last_message(&mut message, &mut held_from), 0);
                    is_sent = len == 0;
                    continue;
                }
                match sys::send(fd, &[IoSlice::new(rest)], libc::MSG_NOSIGNAL) {
                    Ok(n) if self.out_from < self.out.len() => self.out_from += n,
                    Ok(n) => sent += n,
                    Err(libc::EAGAIN | libc::EINTR) => break,
                    Err(_) => return,
                }
            }
            let is_whole = is_sent && held_from == self.held.len();
            if is_whole && !std::mem::replace(&mut is_shut, true) {
                let _ = sys::shut_down_sending(fd);
            }
            loop {
                match sys::recv(fd, &mut [IoSliceMut::new(&mut scrap)]) {
                    Ok(1..) if Instant::now() < until => {}
                    Ok(_) | Err(libc::EAGAIN | libc::EINTR) => break,
                    Err(_) => return,
                }
            }
            if is_sent && sys::is_delivered(fd)
                || Instant::now() >= until
                || sys::is_unreachable(fd)
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(limits::EXIT_TICK as u64));
        }
    }

    /// Builds the next message from the held bytes, of which `from` are sent already, and before it an announcement if the peer needs one.
    /// Returns the length, which is 0 if no byte is left or there is no more credit.
    fn last_message(&mut self, into: &mut [u8; LAST], from: &mut usize) -> usize {
        let mut len = 0;
        if let Some(writer) = self.memory_out.accepted()
            && *from < self.held.len()
            && writer.end_generation()
        {
            let mark = writer.announce();
            let message = self.announcement(mark);
            if let Some(place) = into.get_mut(..ANNOUNCEMENT) {
                place.copy_from_slice(&message);
                len = ANNOUNCEMENT;
            }
        }
        let limit = self.rx.granted();
        let Some(tx) = &mut self.tx else { return 0 };
        let n = tx.credit().min(tx.longest()).min(limits::CORKED);
        let rest = self.held.get(*from..).unwrap_or(&[]);
        let (kind, most) = match self.held_urgent.and_then(|at| at.checked_sub(*from)) {
            Some(0) => (Kind::Urgent, 1),
            Some(before) => (Kind::Data, before),
            None => (Kind::Data, rest.len()),
        };
        let payload = rest.get(..n.min(most)).unwrap_or(&[]);
        if payload.is_empty() {
            return len;
        }
        let frame = tx.frame(kind, limit, std::iter::once(payload));
        tx.went(&frame);
        *from += payload.len();
        let place = into.get_mut(len..).unwrap_or(&mut []);
        len + gather(place, &frame, std::iter::once(payload))
    }

    /// Sends what is pending, also corked bytes.
    pub fn uncork(&mut self, fd: c_int) {
        self.corked = false;
        self.flush(fd);
    }

    /// Like [`Self::flush`], for a connection that has become plain.
    fn flush_plain(&mut self, fd: c_int) {
        self.corked = false;
        if !self.flush_out(fd) {
            return;
        }
        while !self.held.is_empty() {
            let mut held = std::mem::take(&mut self.held);
            let (len, flags) = match self.held_urgent {
                Some(0) => (1, libc::MSG_NOSIGNAL | libc::MSG_OOB),
                Some(at) => (at, libc::MSG_NOSIGNAL),
                None => (held.len(), libc::MSG_NOSIGNAL),
            };
            let part = IoSlice::new(held.get(..len).unwrap_or(&held));
            let result = self.send_plain(fd, &[part], flags);
            if let Err(e) = result
                && self.broken
            {
                self.report_later(e);
                return;
            }
            let sent = result.unwrap_or(0);
            drop(held.drain(..sent));
            self.held_urgent = self.held_urgent.and_then(|at| at.checked_sub(sent));
            self.held = held;
            if result.is_err() {
                return;
            }
            self.news.writable |= self.held.is_empty();
        }
        if self.end_due {
            self.end_due = false;
            let _ = sys::shut_down_sending(fd);
        }
    }

    fn send_plain(
        &mut self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        flags: c_int,
    ) -> Result<usize, c_int> {
        let result = sys::send(fd, parts.get(..limits::PARTS).unwrap_or(parts), flags);
        self.accepted(result)
    }

    /// Records whether the carrier has accepted bytes of the program. Returns the result.
    fn accepted(&mut self, result: Result<usize, c_int>) -> Result<usize, c_int> {
        match result {
            Err(libc::EAGAIN) => self.full = true,
            // EFAULT: there is no memory at an address of the program, and nothing was sent.
            Err(libc::EINTR | libc::EFAULT) | Ok(_) => {}
            Err(e) => {
                self.fail(e);
                self.error = 0;
            }
        }
        result
    }

    /// Called when bytes of an earlier call cannot be sent. The next call of the program returns the error, but not EPIPE: what the peer has
    /// sent before its end can be read.
    fn report_later(&mut self, error: c_int) {
        if error != libc::EPIPE {
            self.error = error;
        }
    }

    /// Sends the rest of FPDUs. Returns whether all of it was sent.
    fn flush_out(&mut self, fd: c_int) -> bool {
        while self.out_from < self.out.len() {
            let rest = self.out.get(self.out_from..).unwrap_or(&[]);
            match sys::send(fd, &[IoSlice::new(rest)], libc::MSG_NOSIGNAL) {
                Ok(n) => self.out_from += n,
                Err(libc::EAGAIN | libc::EINTR) => return false,
                // The peer has closed the connection and needs no limit. What it has sent before can still be read.
                Err(e @ (libc::EPIPE | libc::ECONNRESET)) if self.out_is_limit => {
                    self.was_reset |= e == libc::ECONNRESET;
                    break;
                }
                Err(e) => {
                    self.fail(e);
                    return false;
                }
            }
        }
        if !self.out.is_empty() {
            self.out_from = 0;
            self.out_is_limit = false;
            self.out = Vec::new();
            self.news.writable = true;
        }
        !self.broken
    }

    /// Called before a message with `len` bytes of payload is sent. If the program sends many long messages that are shorter than a
    /// segment, and has not set `TCP_NODELAY`, the carrier joins them to long segments, as it does with such writes of a plain
    /// program. It must not delay other messages: the peer may wait for a limit or for a short answer.
    fn joins(&mut self, fd: c_int, len: usize) {
        let joins = if len > limits::COPIED && self.delays[0] == 0 {
            self.run = self.run.saturating_add(1).min(limits::RUN);
            if self.run == limits::RUN && self.segment == 0 {
                let segment = sys::option(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG);
                self.segment = segment.map_or(1, |n| usize::try_from(n).unwrap_or(1).max(1));
            }
            self.run == limits::RUN && len < self.segment
        } else {
            self.run = 0;
            false
        };
        if joins != self.joins {
            self.joins = joins;
            let _ = sys::set_option(
                fd,
                libc::IPPROTO_TCP,
                libc::TCP_NODELAY,
                c_int::from(!joins),
            );
        }
    }

    /// Queues bytes for the carrier.
    fn queue_out(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.out_is_limit = false;
            self.out.extend_from_slice(bytes);
        }
    }

    /// Sends a message that is not payload of the stream. What the carrier does not accept at once is queued.
    fn control(&mut self, fd: c_int, kind: Kind, payload: &[u8]) {
        self.joins(fd, 0);
        if matches!(kind, Kind::End | Kind::Urgent | Kind::Plain) {
            self.announce_rest();
        }
        let limit = self.rx.granted();
        let Some(tx) = &mut self.tx else { return };
        let frame = tx.frame(kind, limit, std::iter::once(payload));
        tx.went(&frame);
        let is_first = self.out.is_empty();
        for part in around(&frame, std::iter::once(payload)) {
            self.queue_out(part);
        }
        self.out_is_limit = is_first && kind == Kind::Limit;
        self.flush_out(fd);
    }

    /// Sends a prefix of the payload in one Send, or puts it into the memory. Returns the length of the prefix.
    fn data(&mut self, fd: c_int, parts: &[IoSlice<'_>], flags: c_int) -> Result<usize, c_int> {
        let total: usize = parts.iter().take(limits::PARTS).map(|p| p.len()).sum();
        let Some(tx) = &mut self.tx else {
            return Err(libc::EAGAIN);
        };
        let len = total.min(tx.credit()).min(tx.longest());
        if len == 0 {
            return Err(libc::EAGAIN);
        }
        self.full = false;
        match self.data_in_memory(fd, parts, total, flags) {
            Ok(0) => {}
            result => return result,
        }
        self.announce_rest();
        if !self.flush_out(fd) {
            return Err(libc::EAGAIN);
        }
        self.joins(fd, len);
        match parts {
            [part] => {
                let payload = part.get(..len).unwrap_or(&[]);
                self.data_of(fd, len, std::iter::once(payload), flags)
            }
            _ => self.data_of(fd, len, Cut::new(parts, len), flags),
        }
    }

    /// Adds payload to the corked bytes. Sends all of them if they are many, or if no `more` payload follows. Returns the length of the
    /// prefix that was added or sent.
    fn data_behind_cork(
        &mut self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        flags: c_int,
        more: bool,
    ) -> Result<usize, c_int> {
        let len = parts.iter().map(|p| p.len()).sum();
        let before = self.held.len();
        if before + len <= limits::CORKED.min(self.credit()) && self.tx.is_some() {
            parts.iter().for_each(|p| self.held.extend_from_slice(p));
            self.corked_until = match before {
                0 => sys::now_ms() + limits::CORK,
                _ => self.corked_until,
            };
            self.corked = true;
            if !more {
                self.uncork(fd);
            }
            return Ok(len);
        }
        if before == 0 {
            return self.data(fd, parts, flags);
        }
        let mut held = std::mem::take(&mut self.held);
        let mut all = Vec::with_capacity(parts.len() + 1);
        all.push(IoSlice::new(&held));
        all.extend(parts.iter().map(|p| IoSlice::new(p)));
        let result = self.data(fd, &all, flags);
        drop(all);
        drop(held.drain(..result.unwrap_or(0).min(before)));
        // The rest, if any, is sent as soon as possible.
        self.corked = false;
        self.held = held;
        match result?.saturating_sub(before) {
            0 => {
                self.flush(fd);
                Err(libc::EAGAIN)
            }
            n => Ok(n),
        }
    }

    /// Puts a prefix of the payload into the memory, and announces it if the peer has asked for that. Returns the length of the prefix: 0
    /// if the payload has to be sent in a message.
    fn data_in_memory(
        &mut self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        total: usize,
        flags: c_int,
    ) -> Result<usize, c_int> {
        // If the peer has closed the connection, a message is sent, for which the kernel returns the error.
        if self.closed || self.memory_out.accepted().is_none() {
            return Ok(0);
        }
        // The carrier must not delay the announcement, which is short, because the reader waits for it.
        self.joins(fd, 0);
        let (Some(writer), Some(tx)) = (self.memory_out.accepted(), &mut self.tx) else {
            return Ok(0);
        };
        let len = total
            .min(tx.credit())
            .min(limits::MEMORY_PIECE)
            .min(writer.room());
        // A short payload is sent in a message if the memory is empty. If it is not, the reader would have to copy the unread bytes
        // out of the memory before it could handle that message.
        if len == 0 || len <= limits::COPIED && writer.is_empty() {
            return Ok(0);
        }
        tx.put(len);
        if !writer.put(Cut::new(parts, len)) {
            return Ok(len);
        }
        let mark = writer.announce();
        let message = self.announcement(mark);
        // The reader may have seen the bytes already, so the announcement is queued if the carrier accepts nothing.
        let sent = match sys::send(fd, &[IoSlice::new(&message)], flags) {
            Err(libc::EAGAIN | libc::EINTR) => 0,
            result => self.accepted(result)?,
        };
        self.queue_out(message.get(sent..).unwrap_or(&[]));
        Ok(len)
    }

    /// Returns the announcement of the bytes up to `mark`: a Memory message, which has to be the next message of the stream.
    fn announcement(&mut self, mark: Mark) -> [u8; ANNOUNCEMENT] {
        let mut message = [0; ANNOUNCEMENT];
        let limit = self.rx.granted();
        if let Some(tx) = &mut self.tx {
            let payload = mark.emit();
            let frame = tx.frame(Kind::Memory, limit, std::iter::once(&payload[..]));
            tx.went(&frame);
            gather(&mut message, &frame, std::iter::once(&payload[..]));
        }
        message
    }

    /// Queues an announcement of the bytes in the memory that were not announced and that the peer may not know. Called before a message
    /// that the peer has to handle after these bytes.
    fn announce_rest(&mut self) {
        if let Some(writer) = self.memory_out.accepted()
            && writer.end_generation()
        {
            let mark = writer.announce();
            let message = self.announcement(mark);
            self.queue_out(&message);
        }
    }

    /// Offers memory to a peer on this host if the program has written enough.
    fn offer_memory(&mut self, fd: c_int) {
        if !matches!(self.memory_out, MemoryOut::Later)
            || self.bytes_out < u64::from(policy::settings().memory)
        {
            return;
        }
        self.memory_out = MemoryOut::Never;
        if !memory::is_local(fd) {
            return;
        }
        if let Some((writer, offer)) = Writer::offer() {
            self.memory_out = MemoryOut::Offered(Box::new(writer));
            self.control(fd, Kind::Offer, &wire::offer_payload(&offer));
        }
    }

    /// Sends `len` bytes of payload, which the credit permits.
    fn data_of<'a>(
        &mut self,
        fd: c_int,
        len: usize,
        payload: impl Iterator<Item = &'a [u8]> + Clone,
        flags: c_int,
    ) -> Result<usize, c_int> {
        let limit = self.rx.granted();
        let Some(tx) = &mut self.tx else {
            return Err(libc::EAGAIN);
        };
        let frame = tx.frame(Kind::Data, limit, payload.clone());
        let sent = if len <= SHORT {
            // Most messages are short, and clearing a long buffer takes longer than copying them.
            send_copy::<{ SHORT + BEHIND }>(fd, &frame, payload.clone(), flags)
        } else if len <= limits::COPIED {
            send_copy::<{ limits::COPIED + BEHIND }>(fd, &frame, payload.clone(), flags)
        } else {
            let mut list = [IoSlice::new(&[]); limits::PARTS + 2];
            let mut n = 0;
            let all = around(&frame, payload.clone());
            for (place, part) in list.iter_mut().zip(all) {
                *place = IoSlice::new(part);
                n += 1;
            }
            sys::send(fd, list.get(..n).unwrap_or(&[]), flags)
        };
        let sent = self.accepted(sent)?;
        if let Some(tx) = &mut self.tx {
            tx.went(&frame);
        }
        if sent < frame.total() {
            let mut skip = sent;
            for part in around(&frame, payload) {
                let gone = skip.min(part.len());
                skip -= gone;
                self.queue_out(part.get(gone..).unwrap_or(&[]));
            }
        }
        Ok(len)
    }

    /// Writes as many bytes as possible without waiting. With MSG_OOB, `parts` contains one byte, which is urgent.
    ///
    /// # Errors
    /// EAGAIN if nothing can be written; otherwise the stream's error.
    pub fn write(
        &mut self,
        fd: c_int,
        parts: &[IoSlice<'_>],
        flags: c_int,
        may_pull: bool,
    ) -> Result<usize, c_int> {
        if self.error != 0 {
            return Err(self.take_error());
        }
        if self.shut_wr || self.broken {
            return Err(libc::EPIPE);
        }
        let empty = parts.iter().all(|p| p.is_empty());
        if empty {
            return Ok(0);
        }
        let urgent = match flags & libc::MSG_OOB {
            0 => None,
            _ => parts.iter().find_map(|part| part.first()),
        };
        if urgent.is_some() {
            self.uncork(fd);
        } else if self.is_waiting() {
            self.flush(fd);
        }
        if may_pull
            && !self.plain
            && (self.start.is_some() || self.credit() <= self.held.len() || self.is_unread())
        {
            // An edge-triggered set has reported all bytes in the carrier's buffer, and does not report a limit among them again.
            while self.pull(fd, None, limits::WAIT_READ)
                && self.credit() <= self.held.len()
                && !self.plain
            {}
            if self.error != 0 {
                return Err(self.take_error());
            }
        }
        if self.start.is_some() {
            let n = self.hold(parts)?;
            if urgent.is_some() {
                self.held_urgent = Some(self.held.len() - 1);
            }
            return Ok(n);
        }
        if self.closed && self.tx.as_ref().is_some_and(|tx| tx.credit() == 0) {
            return Err(libc::EPIPE);
        }
        if (!self.held.is_empty() && !self.corked) || !self.out.is_empty() {
            return Err(libc::EAGAIN);
        }
        let more = flags & libc::MSG_MORE != 0 || self.delays[1] != 0;
        let n = if self.plain {
            self.send_plain(fd, parts, flags)?
        } else if let Some(byte) = urgent {
            if self.credit() == 0 {
                return Err(libc::EAGAIN);
            }
            self.control(fd, Kind::Urgent, &[*byte]);
            1
        } else if more || self.corked {
            self.data_behind_cork(fd, parts, flags & !libc::MSG_MORE, more)?
        } else {
            self.data(fd, parts, flags)?
        };
        self.bytes_out += n as u64;
        if n > limits::COPIED {
            self.offer_memory(fd);
        }
        Ok(n)
    }

    /// Returns whether the peer has left bytes in the memory unread for some time. The caller then receives from the carrier, because a
    /// write to the memory succeeds even if the peer has ended.
    fn is_unread(&mut self) -> bool {
        let checked = &mut self.checked;
        self.memory_out.accepted().is_some_and(|writer| {
            let now = sys::now_ms();
            let is_due = !writer.is_empty() && now >= *checked + limits::UNREAD;
            if is_due || writer.is_empty() {
                *checked = now;
            }
            is_due
        })
    }

    /// Stores bytes until the Reply arrives.
    fn hold(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, c_int> {
        let before = self.held.len();
        for part in parts {
            let room = limits::HELD.saturating_sub(self.held.len());
            self.held
                .extend_from_slice(part.get(..room.min(part.len())).unwrap_or(&[]));
        }
        match self.held.len() - before {
            0 => Err(libc::EAGAIN),
            n => {
                self.bytes_out += n as u64;
                Ok(n)
            }
        }
    }

    /// `shutdown(2)`.
    ///
    /// # Errors
    /// ENOTCONN if the stream is broken.
    pub fn shutdown(&mut self, fd: c_int, how: c_int) -> Result<(), c_int> {
        if self.broken {
            return Err(libc::ENOTCONN);
        }
        if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
            self.shut_rd = true;
            self.news.readable = true;
        }
        if (how == libc::SHUT_WR || how == libc::SHUT_RDWR) && !self.shut_wr {
            self.shut_wr = true;
            self.end_due = true;
            self.news.writable = true;
            self.uncork(fd);
        }
        Ok(())
    }

    /// Wakes the threads that receive from the carrier, after `shutdown(SHUT_RD)` or `close`. Nothing else can wake a thread in a blocking
    /// receive. The peer's messages still arrive afterwards.
    pub fn deafen(&mut self, fd: c_int) {
        self.deaf = true;
        sys::shut_down_receiving(fd);
    }

    /// See [`Self::deafen`].
    pub fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// Called when the program closes the stream. Returns whether [`Self::drain`] has to continue: bytes are left to send, or Limit
    /// messages of the peer may still arrive. `may_pull` is false if another thread receives from the carrier.
    pub fn close(&mut self, fd: c_int, may_pull: bool) -> bool {
        if self.broken {
            return false;
        }
        self.blind = !may_pull;
        if may_pull {
            self.pull(fd, None, limits::WAIT_READ);
        }
        if !self.queue.is_empty() || sys::linger(fd) == Some(0) {
            // Unread data is lost, or the program has asked for a reset (SO_LINGER with 0 seconds). TCP resets the peer's connection in both
            // cases. What the program has written before the peer's Reply is sent first, as the kernel would have sent it already.
            if !self.held.is_empty() {
                self.send_early(fd);
            }
            sys::reset_on_close(fd);
            return false;
        }
        self.limit_due = false;
        self.uncork(fd);
        let limits_may_come = !self.closed && self.tx.as_ref().is_some_and(Tx::has_sent);
        if self.is_waiting() {
            return true;
        }
        if limits_may_come && !self.broken {
            // The peer gets the end at once, as from the kernel, and not after the worker's next turn.
            self.finish_sending(fd);
            return true;
        }
        false
    }

    fn finish_sending(&mut self, fd: c_int) {
        self.fin = true;
        let _ = sys::shut_down_sending(fd);
    }

    /// Continues a closed stream: sends the remaining bytes, then the FIN. Returns whether the stream may be dropped.
    ///
    /// The carrier is read until the peer closes its end too. If a socket is closed while Limit messages of the peer are unread, or
    /// arrive later, the kernel sends a reset, and the peer loses data that it has not read yet.
    pub fn drain(&mut self, fd: c_int) -> bool {
        self.limit_due = false;
        if !self.plain {
            self.full = false;
        }
        self.flush(fd);
        if !self.is_waiting() && !self.fin {
            self.finish_sending(fd);
        }
        while !self.has_rest() && self.pull(fd, None, limits::WAIT_READ) {}
        if !self.queue.is_empty() {
            // Data has arrived after the program closed the stream. The reset tells the peer that it is lost.
            sys::reset_on_close(fd);
            return true;
        }
        self.broken || (self.closed && self.fin)
    }
}

/// The first `len` bytes of a list of buffers.
#[derive(Debug, Clone)]
pub struct Cut<'a, 'b> {
    parts: std::slice::Iter<'a, IoSlice<'b>>,
    left: usize,
}

impl<'a, 'b> Cut<'a, 'b> {
    /// Returns the first `len` bytes of `parts`.
    pub fn new(parts: &'a [IoSlice<'b>], len: usize) -> Self {
        Self {
            parts: parts.iter(),
            left: len,
        }
    }
}

impl<'a> Iterator for Cut<'a, '_> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.left == 0 {
            return None;
        }
        let part = self.parts.next()?;
        let now = part.get(..self.left.min(part.len()))?;
        self.left -= now.len();
        Some(now)
    }
}

/// The longest payload that is copied into the smaller of two buffers, in bytes.
const SHORT: usize = 400;

/// Sends an FPDU from a copy of `N` bytes.
fn send_copy<'a, const N: usize>(
    fd: c_int,
    frame: &Frame,
    payload: impl Iterator<Item = &'a [u8]>,
    flags: c_int,
) -> Result<usize, c_int> {
    let mut copy = [0u8; N];
    let n = gather(&mut copy, frame, payload);
    sys::send(fd, &[IoSlice::new(copy.get(..n).unwrap_or(&[]))], flags)
}

/// The most bytes that [`Stream::end`] builds at a time: an announcement, and a message with [`limits::CORKED`] bytes of payload.
const LAST: usize = ANNOUNCEMENT + limits::CORKED + BEHIND;

/// The length in bytes of a Memory message, which needs no padding and has a field for the CRC.
const ANNOUNCEMENT: usize = HEAD + Mark::LEN + CRC;
const _: () = assert!(ANNOUNCEMENT.is_multiple_of(4));

/// Returns the parts of an FPDU.
fn around<'f, 'a: 'f>(
    frame: &'f Frame,
    payload: impl Iterator<Item = &'a [u8]>,
) -> impl Iterator<Item = &'f [u8]> {
    std::iter::once(&frame.head[..])
        .chain(payload.map(|part| -> &'f [u8] { part }))
        .chain(std::iter::once(frame.tail()))
}

/// Copies an FPDU into one buffer. Returns its length.
fn gather<'a>(into: &mut [u8], frame: &Frame, payload: impl Iterator<Item = &'a [u8]>) -> usize {
    let mut at = 0;
    for part in around(frame, payload) {
        if let Some(place) = into.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
            at += part.len();
        }
    }
    at
}
