//! One reliable queue pair and its stream: the machine that the engine drives.
//!
//! Methods come in four kinds. *Commands* of the application: [`Connection::post_send`], [`Connection::post_recv`],
//! [`Connection::modify`]. *Inputs*: [`Connection::handle_rx`], [`Connection::handle_written`],
//! [`Connection::handle_eof`], [`Connection::handle_timeout`]. *Outputs*: [`Connection::poll_tx`],
//! [`Connection::poll_event`], [`Connection::poll_timeout`], [`Connection::end`]; they may change after any command or
//! input. Completions go straight to the completion queues. *Getters* change nothing.
//!
//! The steps of the data path are in the files named after them: `rdmap/tx.rs` (take, build), `ddp/tx.rs` (segment),
//! `llp/mpa/frame.rs` (frame), `llp/mpa/deframe.rs` (deframe), `ddp/rx.rs` (admit), `rdmap/rx.rs` (deliver).

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use crate::bounds;
use crate::ddp::rx::{Direct, TermContext, Violation};
use crate::ddp::tx::{Address, Message, Segment, Source, segment};
use crate::error::{Misuse, PeerError, TermCode};
use crate::llp::mpa::frame::{Invalidated, TxBatch, frame};
use crate::llp::mpa::marker::Inserter;
use crate::observe::Step;
use crate::rdmap::read::{PendingAtomic, PendingRead};
use crate::rdmap::rx::ReceiveUnderWay;
use crate::shm_handover::ShmHandover;
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::{LastRegion, Memory};
use crate::verbs::qp::{Attr, QpType, State};
use crate::verbs::qp_base::{Parts, QpBase};
use crate::verbs::rq::RecvQueue;
use crate::verbs::sq::{Phase, Retired};
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::verbs::wr::{Op, Payload, RecvRequest, WorkRequest, given};
use crate::wire::To;
use crate::wire::control::Control;
use crate::wire::ddp::Untagged;
use crate::wire::rdmap::{Opcode, ReadRequest};

/// What the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Standard iWARP: completions at the socket, no RNR, no Send with immediate.
    Standard,
    /// Another anywarp: acknowledgements, RNR, Send with immediate.
    Anywarp,
    /// The first message will tell.
    Unknown,
}

/// What start-up agreed on.
#[derive(Debug, Clone, Copy)]
pub struct StreamConfig {
    /// CRCs are made and checked.
    pub crc: bool,
    /// Largest ULPDU to send.
    pub mulpdu: usize,
    /// The same towards a peer that was unknown and turns out to be an anywarp.
    pub mulpdu_anywarp: usize,
    /// What the peer is.
    pub peer: Peer,
    /// Reads and atomics of the peer that we serve at once.
    pub ird: u32,
    /// Reads and atomics that we have outstanding at most.
    pub ord: u32,
    /// We began: we send first. Otherwise nothing is sent before the peer's first message.
    pub initiator: bool,
    /// The message that makes the stream ready, to be sent first.
    pub first: First,
    /// Made through the connection manager: its end fails the queue pair, as the manager's user expects.
    pub managed: bool,
    /// The peer wants markers in what we send.
    pub markers: bool,
    /// The peer is on this host, and memory may be shared with it after so many requests.
    pub shm_handover: Option<u32>,
}

/// What an initiator sends before anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// Nothing.
    Nothing,
    /// Our Hello.
    Hello,
    /// An RDMA Write of length 0.
    Write,
    /// An RDMA Read of length 0.
    Read,
    /// A Send of length 0.
    Send,
}

/// How far the end of the stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It goes on.
    Open,
    /// What is queued is to be sent, then the stream to be closed for sending.
    Closing,
    /// It is of no use any more.
    Dead,
}

/// A message in transmission, and whose it is.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) message: Message,
    /// Number of the request that it belongs to; none for responses.
    pub(crate) request: Option<u64>,
    /// Last message of its request.
    pub(crate) last: bool,
}

/// Where the message lies that is to be sent next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There is none.
    Nothing,
    /// The one under way.
    Current,
    /// The first of the request that was taken last.
    Part,
}

/// Something to send that is not on the send queue.
#[derive(Debug)]
pub(crate) enum Response {
    Read(Message),
    Atomic(Message),
    Control(Control),
    Terminate(Message),
    Rtr(Message),
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) config: StreamConfig,
    pub(crate) peer: Peer,
    pub(crate) end: End,
    pub(crate) handover: ShmHandover,
    /// A message with fewer payload bytes may be sent by the shortcut `send_short`; 0 turns that off.
    pub(crate) short_limit: u64,
    /// CRCs are made.
    pub(crate) crc_tx: bool,
    /// CRCs are checked.
    pub(crate) crc_rx: bool,
    // --- transmit ---
    pub(crate) may_send: bool,
    pub(crate) current: Option<Outgoing>,
    /// Messages of the request that was taken last, still to be sent.
    pub(crate) parts: VecDeque<Message>,
    pub(crate) parts_of: u64,
    pub(crate) responses: VecDeque<Response>,
    /// Sequence number of the last request message.
    pub(crate) seq: u32,
    pub(crate) next_send_msn: u32,
    pub(crate) next_read_msn: u32,
    pub(crate) next_atomic_response_msn: u32,
    pub(crate) next_atomic_id: u32,
    pub(crate) acked: u32,
    pub(crate) ack_scan: u64,
    /// The shared receive queue that the peer takes our requests to be for (XRC).
    pub(crate) selected_srq: Option<u32>,
    pub(crate) reads: VecDeque<PendingRead>,
    pub(crate) atomics: VecDeque<PendingAtomic>,
    pub(crate) rnr_until: Option<Instant>,
    /// The peer waits for a Restart at this number.
    pub(crate) restart: Option<u32>,
    pub(crate) terminated: bool,
    /// Puts markers into what we send, if the peer wants them.
    pub(crate) markers: Option<Inserter>,
    // --- receive ---
    pub(crate) started: bool,
    pub(crate) bye_received: bool,
    /// Request messages of the peer that are done.
    pub(crate) done: u32,
    pub(crate) done_acked: u32,
    pub(crate) recv_send_msn: u32,
    pub(crate) recv_read_msn: u32,
    pub(crate) recv_atomic_response_msn: u32,
    pub(crate) receive: Option<ReceiveUnderWay>,
    pub(crate) send_immediate: Option<[u8; 4]>,
    pub(crate) write_bytes: u64,
    pub(crate) last_write: Option<u32>,
    /// Requests are dropped until the peer restarts at this number.
    pub(crate) discarding: Option<u32>,
    pub(crate) serving: u32,
    pub(crate) direct: Option<Direct>,
    pub(crate) last_rx: Option<Instant>,
    pub(crate) pinged: bool,
}

/// Appends the FPDU of a segment to the batch, with markers if the peer wants them.
fn frame_marked(
    markers: &mut Option<Inserter>,
    crc: bool,
    segment: &Segment,
    source: &Source,
    memory: &dyn Memory,
    batch: &mut TxBatch,
) -> Result<(), Invalidated> {
    let Some(markers) = markers else {
        return frame(segment, source, crc, memory, batch);
    };
    let mut whole = TxBatch::default();
    frame(segment, source, crc, memory, &mut whole)?;
    let mut marked = Vec::with_capacity(whole.len() + whole.len() / 64);
    markers.insert(whole.own(0, whole.len()), crc, &mut marked);
    batch.push_raw(&marked);
    Ok(())
}

impl Stream {
    /// Sets the limit of the shortcut for sending: one segment, of which the payload is copied, and no markers.
    pub(crate) fn set_short_limit(&mut self, shortcuts: bool) {
        let room = self.config.mulpdu.saturating_sub(Untagged::LEN);
        self.short_limit = match &self.markers {
            None if shortcuts => (room + 1).min(bounds::COPY_LIMIT) as u64,
            _ => 0,
        };
    }

    /// Before the end: the peer hears of everything of it that is done.
    fn push_ack(&mut self) {
        if self.peer == Peer::Anywarp && self.done != self.done_acked {
            self.done_acked = self.done;
            self.responses
                .push_back(Response::Control(Control::Ack { seq: self.done }));
        }
    }
}

/// A reliable queue pair.
pub struct Connection {
    pub(crate) base: QpBase,
    pub(crate) stream: Option<Stream>,
    /// The peer of a stream that was not managed has left in order: requests posted now find nobody.
    pub(crate) peer_left: bool,
    /// Until when requests wait for a peer that has left, as a card would repeat them.
    pub(crate) give_up_at: Option<Instant>,
    /// Short messages may take the shortcuts `send_short` and `receive_short`.
    pub(crate) shortcuts: bool,
    /// Receives that have completed with success.
    received: u64,
    pub(crate) not_ready: u64,
    /// What was accessed last: to send it, and for the peer.
    pub(crate) last_read: LastRegion,
    pub(crate) last_written: LastRegion,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("qpn", &self.base.qpn)
            .field("state", &self.base.state)
            .field("sq", &self.base.sq)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// A queue pair in RESET.
    pub fn new(parts: Parts) -> Self {
        Self {
            base: QpBase::new(parts),
            stream: None,
            peer_left: false,
            give_up_at: None,
            shortcuts: true,
            received: 0,
            not_ready: 0,
            last_read: LastRegion::default(),
            last_written: LastRegion::default(),
        }
    }

    // ------------------------------------------------------------------ getters

    /// Messages that have used a receive.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Times that the peer had no receive, so that requests were sent again.
    pub fn not_ready(&self) -> u64 {
        self.not_ready
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.base.state
    }

    /// Its attributes.
    pub fn attr(&self) -> &Attr {
        &self.base.attr
    }

    /// Attributes that the connection manager sets past the state machine (`retry_cnt` and the like).
    pub fn attr_mut(&mut self) -> &mut Attr {
        &mut self.base.attr
    }

    /// Whether a stream is attached.
    pub fn is_attached(&self) -> bool {
        self.stream.is_some()
    }

    /// Whether the peer is another anywarp.
    pub fn peer(&self) -> Option<Peer> {
        self.stream.as_ref().map(|s| s.peer)
    }

    /// How far the end of the stream is. `Dead` without one.
    pub fn end(&self) -> End {
        self.stream.as_ref().map_or(End::Dead, |s| s.end)
    }

    /// Whether more than a few kilobytes wait to be framed, so that a transmit batch with room is worth having.
    pub fn has_bulk(&mut self) -> bool {
        const BULK: u64 = 2048;
        let Some(s) = &self.stream else { return false };
        if s.current.is_some() {
            return true;
        }
        let is_long = |r: &Response| matches!(r, Response::Read(m) if m.len > BULK);
        if !s.responses.is_empty() && s.responses.iter().any(is_long) {
            return true;
        }
        // Inline data is never so much.
        match self
            .base
            .sq
            .peek()
            .map(|(_, posted)| &posted.request.payload)
        {
            Some(payload @ Payload::Sges(_)) => payload.len() > BULK,
            _ => false,
        }
    }

    /// Whether the peer gets markers.
    pub fn sends_markers(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.config.markers)
    }

    /// Whether the peer has said anything.
    pub fn has_started(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.started)
    }

    /// Whether a message of the peer has begun to arrive and is not complete.
    pub fn is_receiving(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.receive.is_some() || s.direct.is_some() || s.write_bytes > 0)
    }

    /// Requests of the peer that are done and that it was not told of.
    fn unacknowledged(&self) -> u32 {
        let tells = |s: &&Stream| s.peer == Peer::Anywarp && s.end == End::Open;
        let stream = self.stream.as_ref().filter(tells);
        stream.map_or(0, |s| s.done.wrapping_sub(s.done_acked))
    }

    /// Whether an acknowledgement is due.
    pub fn ack_due(&self) -> bool {
        self.unacknowledged() > 0
    }

    /// Whether there are so many that the peer is told without company.
    pub fn must_ack(&self) -> bool {
        self.unacknowledged() >= bounds::ACK_AFTER
    }

    /// Whether what was posted may wait for company: fewer small requests than may, behind others that the peer has yet to
    /// acknowledge.
    ///
    /// That acknowledgement brings the connection back to its sending side in any case; a thread that polls comes sooner.
    /// `longest`: payload bytes of the longest request of the list that was posted.
    pub fn may_coalesce_behind_ack(&self, limits: &bounds::Coalesce, longest: u64) -> bool {
        self.base.sq.taken() >= bounds::COALESCE_BEHIND && self.may_coalesce_burst(limits, longest)
    }

    /// The same where somebody is sure to come soon.
    pub fn may_coalesce_burst(&self, limits: &bounds::Coalesce, longest: u64) -> bool {
        let Some(s) = &self.stream else { return false };
        let waiting = self.base.sq.untaken();
        let is_small =
            longest <= limits.max_payload && waiting as u64 * longest < bounds::COALESCE_BYTES;
        s.peer == Peer::Anywarp
            && s.end == End::Open
            && self.base.state == State::Rts
            && s.current.is_none()
            && s.rnr_until.is_none()
            && s.responses.is_empty()
            && waiting < limits.max_requests
            && waiting > 0
            && is_small
    }

    /// Whether requests wait to be taken.
    pub fn has_untaken(&self) -> bool {
        self.base.sq.untaken() > 0
    }

    /// Whether the time for a probe or retry may come: somebody should call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let Some(s) = self.stream.as_ref() else {
            return self.give_up_at;
        };
        let awaits = !s.pinged && s.peer == Peer::Anywarp && self.base.sq.has_outstanding();
        let probe = match s.last_rx {
            Some(at) if awaits => self.probe_after().map(|after| at + after),
            _ => None,
        };
        match (s.rnr_until, probe) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// How long the peer's machine may stay silent with requests outstanding: timeout and `retry_cnt` of the attributes.
    /// `None`: for ever.
    pub fn silence_limit(&self) -> Option<Duration> {
        self.base.attr.silence_limit()
    }

    fn probe_after(&self) -> Option<Duration> {
        self.silence_limit().map(|t| t / 4)
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.base.events.pop_front()
    }

    // ------------------------------------------------------------------ commands

    /// Posts a send request (`ibv_post_send(3)`).
    pub fn post_send(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        self.post_send_with(given(Ok(request)))
    }

    /// The same with a request that `fill` makes where it will lie.
    #[inline]
    pub fn post_send_with(
        &mut self,
        fill: impl FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        self.base.post_send_with(|into, rq| {
            fill(into)?;
            may_post(rq, into)
        })?;
        if self.base.state == State::Error {
            self.flush_sq();
        }
        Ok(())
    }

    /// The request that was posted last will fail with `status` when its turn comes, and is not sent ([`crate::violation`]).
    pub fn inject_error(&mut self, status: Status) {
        self.base.sq.inject_error(status);
    }

    /// The stream is cut with the request that was posted last: it fails as one that was never answered, if those before
    /// it were.
    pub fn cut(&mut self) {
        self.inject_error(Status::RetryExceeded);
        if self.stream.is_none() || self.base.state == State::Error {
            return;
        }
        if !self.base.sq.has_outstanding()
            && let Some((number, _)) = self.base.sq.peek()
        {
            // The first of the requests that were not sent has nothing before it that could be to blame.
            self.base.sq.advance();
            self.base
                .sq
                .fail(number, Status::RetryExceeded, "the stream was cut");
        }
        self.handle_eof(true);
    }

    /// Posts a receive (`ibv_post_recv(3)`).
    pub fn post_recv(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        self.base.post_recv(request)
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`); returns the state before.
    pub fn modify(
        &mut self,
        attr_mask: u32,
        next: Option<State>,
        expected_state: Option<State>,
        attr: &Attr,
    ) -> Result<State, Misuse> {
        let before = self.base.state;
        let kind = match &self.base.rq {
            RecvQueue::None => QpType::XrcSend,
            RecvQueue::Xrc { .. } => QpType::XrcRecv,
            RecvQueue::Own { .. } | RecvQueue::Shared(_) => QpType::Rc,
        };
        let to = self
            .base
            .modify(kind, attr_mask, next, expected_state, attr)?;
        match to {
            State::Reset => self.reset(),
            State::Error => {
                if before != State::Error {
                    self.leave("moved to the error state");
                }
            }
            State::Sqd => self.base.enter_sqd(attr_mask),
            _ => self.base.state = to,
        }
        Ok(before)
    }

    /// Sets the state without the rules, as the connection manager's kernel side does.
    pub fn set_state(&mut self, to: State) {
        match to {
            State::Reset => self.reset(),
            State::Error => self.leave("disconnected"),
            _ => self.base.state = to,
        }
    }

    fn reset(&mut self) {
        self.base.reset();
        self.stream = None;
        self.peer_left = false;
        self.give_up_at = None;
    }

    /// Everything is flushed, the peer is told, the stream closes when that is sent.
    pub fn leave(&mut self, why: &'static str) {
        self.fail(None, why, None);
        if let Some(s) = &mut self.stream
            && s.end == End::Open
        {
            s.current = None;
            s.parts.clear();
            if !s.terminated {
                s.responses.clear();
            }
            s.push_ack();
            if s.peer == Peer::Anywarp {
                s.responses.push_back(Response::Control(Control::Bye));
            }
            s.end = End::Closing;
        }
    }

    /// The stream is up: start-up has agreed on `config`.
    pub fn attach(&mut self, mut config: StreamConfig, now: Instant) {
        if config.markers {
            // Nothing is sent by reference, since markers cut it anyhow.
            config.mulpdu = config.mulpdu.min(bounds::COPY_LIMIT);
            config.mulpdu_anywarp = config.mulpdu;
        }
        let mut stream = Stream {
            markers: config.markers.then(Inserter::new),
            peer: config.peer,
            end: End::Open,
            handover: ShmHandover::default(),
            short_limit: 0,
            crc_tx: config.crc,
            crc_rx: config.crc,
            // RFC 5044 §7.1.2 [mpa-responder-waits]: a responder is quiet until the first FPDU. One whose peer is known
            // to be anywarp before that (their queue pairs were told of each other) need not be: that peer can take it.
            may_send: config.initiator || config.peer == Peer::Anywarp,
            current: None,
            parts: VecDeque::new(),
            parts_of: 0,
            responses: VecDeque::new(),
            seq: 0,
            next_send_msn: 1,
            next_read_msn: 1,
            next_atomic_response_msn: 1,
            next_atomic_id: 1,
            acked: 0,
            ack_scan: 0,
            reads: VecDeque::new(),
            atomics: VecDeque::new(),
            rnr_until: None,
            restart: None,
            terminated: false,
            started: false,
            bye_received: false,
            done: 0,
            done_acked: 0,
            recv_send_msn: 1,
            recv_read_msn: 1,
            recv_atomic_response_msn: 1,
            receive: None,
            send_immediate: None,
            selected_srq: None,
            write_bytes: 0,
            last_write: None,
            discarding: None,
            serving: 0,
            direct: None,
            last_rx: Some(now),
            pinged: false,
            config,
        };
        stream.set_short_limit(self.shortcuts);
        if config.initiator {
            crate::rdmap::tx::queue_first(&mut stream);
        }
        self.base.rq.forget_choice();
        self.peer_left = false;
        self.give_up_at = None;
        self.stream = Some(stream);
        if self.base.state == State::Error {
            self.leave("the queue pair failed before its stream was up");
        }
    }

    /// The peer, whose part it is, did not connect: requests fail after the time that repeating them would take, unless it
    /// does.
    pub fn handle_not_connected(&mut self) {
        self.peer_left = true;
    }

    /// The stream cannot be made: nobody there, refused, or it failed.
    pub fn handle_connect_failed(&mut self) {
        self.peer_left = true;
        if !self.base.sq.is_empty() {
            self.fail(
                Some((None, Status::RetryExceeded)),
                "the peer cannot be reached",
                Some(AsyncEvent::QpFatal),
            );
        }
    }

    /// Sets how many Reads and atomics each end may have outstanding, where the program says so and not start-up.
    pub fn set_depths(&mut self, ird: u32, ord: u32) {
        if let Some(s) = &mut self.stream
            && !s.config.managed
        {
            s.config.ird = ird;
            s.config.ord = ord;
        }
    }

    /// The path has another segment size: FPDUs that are cut from now on have this ULPDU at most.
    // RFC 5044 §5.1 [mpa-emss]: also in the middle of a message.
    pub fn set_mulpdu(&mut self, mulpdu: usize) {
        if let Some(s) = &mut self.stream {
            s.config.mulpdu = if s.config.markers {
                mulpdu.min(bounds::COPY_LIMIT)
            } else {
                mulpdu
            };
            s.set_short_limit(self.shortcuts);
        }
    }

    /// For tests: whether short messages may take the shortcuts past the general data path, as they do at first.
    #[doc(hidden)]
    pub fn set_shortcuts(&mut self, shortcuts: bool) {
        self.shortcuts = shortcuts;
        if let Some(s) = &mut self.stream {
            s.set_short_limit(shortcuts);
        }
    }

    /// For tests: all numbers of a fresh stream go on from `first`, at both ends, so that they wrap soon.
    #[doc(hidden)]
    pub fn number_from(&mut self, first: u32) {
        if let Some(s) = &mut self.stream {
            for number in [
                &mut s.next_send_msn,
                &mut s.next_read_msn,
                &mut s.next_atomic_response_msn,
                &mut s.next_atomic_id,
                &mut s.recv_send_msn,
                &mut s.recv_read_msn,
                &mut s.recv_atomic_response_msn,
                &mut s.seq,
                &mut s.acked,
                &mut s.done,
                &mut s.done_acked,
            ] {
                *number = number.wrapping_add(first);
            }
        }
    }

    /// Drops the completions that were not polled: the queue pair is going away (`ibv_destroy_qp(3)`).
    pub fn purge(&mut self) {
        self.base.purge();
    }

    // ------------------------------------------------------------------ outputs

    /// Adds to `batch` what can be sent now; `flush` sends acknowledgements even without company. Whether the batch was full
    /// first: there may be more.
    pub fn poll_tx(&mut self, now: Instant, flush: bool, batch: &mut TxBatch) -> bool {
        let before = batch.len();
        let mut more = true;
        while !batch.is_full() {
            if self.send_short(now, batch) {
                more = self.has_untaken();
                if !more || batch.is_aligned() {
                    break;
                }
                continue;
            }
            let next = self.next_message(now);
            if next == Next::Nothing {
                more = false;
                break;
            }
            let ended = self.send_segment(next, batch);
            if ended && batch.is_aligned() {
                // Its last FPDU seldom fills a segment: whoever sends the batch ends the segment there.
                break;
            }
        }
        let must_ack = self.must_ack();
        if self.ack_due()
            && let Some(s) = &mut self.stream
            && s.may_send
            && !s.handover.tx_sealed
            && (flush || must_ack || batch.len() > before)
        {
            s.done_acked = s.done;
            let mut message = crate::rdmap::tx::control(Control::Ack { seq: s.done });
            let segment = segment(&mut message, s.config.mulpdu);
            let framed = frame_marked(
                &mut s.markers,
                s.crc_tx,
                &segment,
                &message.source,
                &*self.base.rnic.memory,
                batch,
            );
            debug_assert!(framed.is_ok(), "a control message has no user memory");
            self.base.observe_all(|| {
                [
                    Step::Build(Opcode::Control, 0),
                    Step::Segment(0, true),
                    Step::Frame(segment.header.len()),
                ]
            });
        }
        self.after();
        more
    }

    /// Whether nothing is to be sent nor settled before something is received, posted, or due.
    pub fn is_quiet(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        s.end == End::Open
            && matches!(self.base.state, State::Rtr | State::Rts)
            && s.current.is_none()
            && s.parts.is_empty()
            && s.responses.is_empty()
            && s.restart.is_none()
            && self.base.sq.untaken() == 0
            && self.base.events.is_empty()
    }

    /// Whether something is to be sent that is not of the send queue.
    pub fn has_responses(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| !s.responses.is_empty())
    }

    /// Cuts and frames one segment; whether its message ends with it. A message whose memory is gone cannot be finished.
    fn send_segment(&mut self, next: Next, batch: &mut TxBatch) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let (message, request, last) = match (next, &mut s.current) {
            (Next::Current, Some(out)) => (&mut out.message, out.request, out.last),
            _ => {
                let last = s.parts.len() == 1;
                let Some(message) = s.parts.front_mut() else {
                    return false;
                };
                (message, Some(s.parts_of), last)
            }
        };
        let segment = segment(message, s.config.mulpdu);
        let (crc, memory) = (s.crc_tx, &*self.base.rnic.memory);
        let framed = frame_marked(
            &mut s.markers,
            crc,
            &segment,
            &message.source,
            memory,
            batch,
        );
        let ended = message.sent >= message.len;
        if framed.is_err() || next == Next::Part || ended {
            // Out of its place, which is free then or has it as the message under way.
            let message = match next {
                Next::Part => s.parts.pop_front(),
                _ => s.current.take().map(|out| out.message),
            };
            let Some(message) = message else { return false };
            if framed.is_err() {
                self.cannot_finish(request, &message, segment.from);
                return false;
            }
            if !ended {
                s.current = Some(Outgoing {
                    message,
                    request,
                    last,
                });
            }
        }
        if let Some(number) = request
            && segment.last
            && last
            && let Some(posted) = self.base.sq.get_mut(number)
        {
            posted.phase = Phase::Sent;
        }
        if segment.last && request.is_none() && last {
            // `last` marks responses that hold an IRD slot.
            s.serving = s.serving.saturating_sub(1);
        }
        self.base.observe_all(|| {
            [
                Step::Segment(segment.len, segment.last),
                Step::Frame(segment.header.len() + segment.len),
            ]
        });
        ended
    }

    /// The buffer behind a message was deregistered before byte `from` was sent.
    fn cannot_finish(&mut self, request: Option<u64>, message: &Message, from: u64) {
        if let Some(number) = request {
            self.fail_request(
                number,
                Status::LocalProtection,
                "memory of a posted request was deregistered",
            );
            return;
        }
        if let Some(s) = &mut self.stream {
            // The answers behind this one would be taken for it.
            s.responses.clear();
        }
        let stag = message.source.stag().0;
        let violation = Violation::answer(PeerError::RemoteStag { stag });
        let context = TermContext::read_response(rest_of_read(message, from));
        self.fail_by_peer(violation, &context);
    }

    /// Everything that was framed so far has been handed to the socket.
    pub fn handle_written(&mut self) {
        let Some(s) = &self.stream else { return };
        // RFC 5040 §5.5 (14) [rdmap-complete-after-ddp]: towards a standard peer a Send or Write is complete when the
        // LLP has it.
        if s.peer == Peer::Standard {
            for (_, posted) in self.base.sq.taken_mut() {
                if posted.phase == Phase::Sent && posted.answers == 0 {
                    posted.phase = Phase::Done;
                }
            }
            self.retire();
        }
        self.after();
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.check_peer_left(now);
        let after = self.probe_after();
        let outstanding = self.base.sq.has_outstanding();
        let Some(s) = &mut self.stream else { return };
        if let Some(until) = s.rnr_until
            && until <= now
        {
            s.rnr_until = None;
        }
        if let (Some(after), Some(at)) = (after, s.last_rx)
            && s.peer == Peer::Anywarp
            && outstanding
            && !s.pinged
            && at + after <= now
            && s.end == End::Open
        {
            // Something on its way makes the kernel notice that the peer's machine is gone.
            s.pinged = true;
            s.responses.push_back(Response::Control(Control::Ping));
        }
    }

    /// The stream ended: the peer closed it (`reset` false) or it broke.
    pub fn handle_eof(&mut self, reset: bool) {
        let Some(s) = &mut self.stream else { return };
        // RFC 5040 §6.2 [ddp-fatal-told]: an end in the middle of a message is no orderly one.
        let quiet = s.bye_received && s.receive.is_none() && s.direct.is_none();
        let managed = s.config.managed;
        s.end = End::Dead;
        self.base.events.push_back(AsyncEvent::PeerGone);
        if self.base.state == State::Error {
            return;
        }
        if managed {
            // RFC 5040 §6.2: operations that were not finished complete in error.
            let first = (!quiet && self.base.sq.has_outstanding() && reset)
                .then_some((None, Status::RetryExceeded));
            self.fail(first, "the peer closed the connection", None);
        } else if quiet {
            // The other program destroyed its queue pair. As with hardware only requests notice, and those when they
            // were repeated in vain: see `check_peer_left`.
            self.stream = None;
            self.peer_left = true;
        } else {
            let first = (!self.base.sq.is_empty()).then_some((None, Status::RetryExceeded));
            self.fail(first, "the peer vanished", Some(AsyncEvent::QpFatal));
        }
    }

    /// Requests for a peer that has left fail after the time that repeating them would take.
    pub fn check_peer_left(&mut self, now: Instant) {
        if !self.peer_left || self.base.sq.is_empty() || self.base.state == State::Error {
            self.give_up_at = None;
            return;
        }
        match self.give_up_at {
            None => self.give_up_at = self.silence_limit().map(|limit| now + limit),
            Some(at) if at <= now => {
                self.give_up_at = None;
                self.fail(
                    Some((None, Status::RetryExceeded)),
                    "the peer has left",
                    Some(AsyncEvent::QpFatal),
                );
            }
            Some(_) => {}
        }
    }

    // ------------------------------------------------------------------ completion

    /// Retires what is done, in order.
    pub(crate) fn retire(&mut self) {
        while let Some(posted) = self.base.sq.retire() {
            self.base.complete_send(&posted, Status::Success);
        }
        if let Some(why) = self.base.sq.front_failed() {
            self.give_up(why, None);
            return;
        }
        self.base.check_drained();
    }

    /// Whether it is in SQD and requests that were begun are still under way.
    pub fn is_draining(&self) -> bool {
        self.base.state == State::Sqd && self.base.sq.has_outstanding()
    }

    pub(crate) fn complete_recv(&mut self, entry: Completion) {
        self.received += u64::from(entry.status == Status::Success);
        self.base.complete_recv(entry);
    }

    /// The queue pair fails: every posted request completes, in order.
    ///
    /// `first` names the request that is to blame and its status; without a number it is the oldest that is not done.
    pub(crate) fn fail(
        &mut self,
        first: Option<(Option<u64>, Status)>,
        why: &'static str,
        event: Option<AsyncEvent>,
    ) {
        if self.base.state == State::Error {
            self.flush_sq();
            self.base.flush_rq();
            return;
        }
        self.base.state = State::Error;
        self.give_up_at = None;
        self.base.observe(|| Step::Failed(why));
        if let Some(event) = event {
            self.base.events.push_back(event);
        }
        let mut flushing = false;
        while let Some((number, posted)) = self.next_posted() {
            let done = posted.phase == Phase::Done && !flushing;
            let status = match (first, posted.failed) {
                (_, None) if done => Status::Success,
                (_, Some((status, _))) if done => status,
                (Some((None, status)), _) if !flushing => status,
                (Some((Some(to_blame), status)), _) if to_blame == number => status,
                _ => Status::Flushed,
            };
            // What comes after a request that was not done is not known to be done.
            flushing |= status != Status::Success;
            self.base.complete_send(&posted, status);
        }
        if let Some(s) = &mut self.stream {
            s.reads.clear();
            s.atomics.clear();
            s.parts.clear();
            s.rnr_until = None;
            s.direct = None;
            if s.current.as_ref().is_some_and(|c| c.request.is_some()) {
                // A message cut short: nothing that follows would make sense to the peer but our private messages.
                s.current = None;
            }
        }
        if let Some(receive) = self.stream.as_mut().and_then(|s| s.receive.take()) {
            let entry = Completion::new(
                receive.request_id,
                Status::Flushed,
                WcOp::Recv,
                self.base.qpn,
            );
            self.complete_recv(entry);
        }
        self.base.end_rq();
    }

    fn next_posted(&mut self) -> Option<(u64, Retired)> {
        let number = self.base.sq.front_number();
        self.base.sq.pop().map(|p| (number, p))
    }

    fn flush_sq(&mut self) {
        while let Some(posted) = self.base.sq.pop() {
            self.base.complete_send(&posted, Status::Flushed);
        }
    }

    /// The peer broke a rule: it is told, the queue pair fails, the stream closes.
    pub(crate) fn fail_by_peer(&mut self, violation: Violation, context: &TermContext) {
        let Violation {
            error,
            status,
            receive,
            own,
        } = violation;
        self.base.observe(|| Step::Violation(&error));
        if let Some(status) = receive {
            self.finish_receive(status);
        }
        if let Some(s) = &mut self.stream
            && s.end == End::Open
            && !s.terminated
        {
            s.terminated = true;
            s.parts.clear();
            if s.current.as_ref().is_some_and(|c| c.request.is_some()) {
                s.current = None;
            }
            // What the peer asked for before is still answered: those requests of it were good.
            match (s.peer, status) {
                (Peer::Anywarp, Some(status)) => {
                    s.responses.push_back(Response::Control(Control::Nak {
                        seq: s.done.wrapping_add(1),
                        status: status as u8,
                    }));
                }
                _ => s.push_ack(),
            }
            let code = TermCode::from(&error);
            let terminate = context.terminate(code);
            // RFC 5044 §7.1.2 [mpa-responder-waits]: before the first FPDU was received no Terminate may be sent.
            if s.may_send {
                s.responses
                    .push_back(Response::Terminate(crate::rdmap::tx::terminate(&terminate)));
            } else {
                s.responses.clear();
            }
            s.end = End::Closing;
        }
        let event = match status {
            Some(Status::RemoteAccess) => AsyncEvent::QpAccess,
            Some(_) => AsyncEvent::QpRequest,
            None => AsyncEvent::QpFatal,
        };
        let own = own.map(|(number, status)| (Some(number), status));
        self.fail(own, "the peer broke a rule", Some(event));
    }

    /// Something went wrong on our side: the queue pair fails, and the peer hears that the stream ends.
    fn give_up(&mut self, why: &'static str, event: Option<AsyncEvent>) {
        self.fail(None, why, event);
        if let Some(s) = &mut self.stream
            && s.peer == Peer::Standard
            && s.end == End::Open
            && s.may_send
            && !s.terminated
        {
            // RFC 5040 §7.1 (1) [term-local]: instead of the request a Terminate, without headers.
            let code = TermCode::from(&PeerError::RdmapLocal);
            let terminate = TermContext::local().terminate(code);
            s.terminated = true;
            s.responses.clear();
            s.responses
                .push_back(Response::Terminate(crate::rdmap::tx::terminate(&terminate)));
        }
        self.leave(why);
    }

    /// What must not happen in the middle of something else.
    pub(crate) fn after(&mut self) {
        if self.base.must_fail() {
            self.give_up("a completion queue overflowed", Some(AsyncEvent::QpFatal));
        }
    }
}

/// What `ibv_post_send(3)` checks at once and the send queue does not.
fn may_post(rq: &RecvQueue, request: &WorkRequest) -> Result<(), Misuse> {
    if matches!(
        (&request.op, &request.payload),
        (
            Op::Read { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. },
            Payload::Inline(_)
        )
    ) {
        return Err(Misuse::InvalidArgument("inline data with a Read or atomic"));
    }
    if rq.is_xrc() {
        return Err(Misuse::InvalidArgument(
            "post_send on the receiving end of an XRC connection",
        ));
    }
    if !request.op.is_local() && request.srq.is_some() != matches!(rq, RecvQueue::None) {
        return Err(Misuse::InvalidArgument(
            "a shared receive queue's number goes with requests of an XRC sender, and with no others",
        ));
    }
    if let Op::AtomicWrite { remote } = &request.op
        && (request.payload.len() != 8 || !remote.to.0.is_multiple_of(8))
    {
        return Err(Misuse::InvalidArgument(
            "an atomic write of anything but one aligned 64-bit word",
        ));
    }
    Ok(())
}

/// The Read Request that would ask for what a Read Response lacks from byte `from` on.
fn rest_of_read(response: &Message, from: u64) -> Option<ReadRequest> {
    let (Address::Tagged { stag, to }, Source::Memory { places, .. }) =
        (response.address, &response.source)
    else {
        return None;
    };
    let source = places.first()?;
    Some(ReadRequest {
        sink_stag: stag,
        sink_to: To(to.0.wrapping_add(from)),
        size: u32::try_from(response.len - from).unwrap_or(u32::MAX),
        source_stag: source.stag(),
        source_to: To(source.to().0.wrapping_add(from)),
    })
}
