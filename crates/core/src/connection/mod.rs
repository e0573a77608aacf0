//! A reliable queue pair (RC, XRC) and its stream, as a state machine without I/O.
//!
//! Methods come in four kinds. *Commands* of the application: [`Connection::post_send`], [`Connection::post_recv`],
//! [`Connection::modify`]. *Inputs*: [`Connection::handle_rx`], [`Connection::handle_written`],
//! [`Connection::handle_eof`], [`Connection::handle_timeout`]. *Outputs*: [`Connection::poll_tx`],
//! [`Connection::poll_event`], [`Connection::poll_timeout`], [`Connection::end`]; they may change after any command or
//! input. Completions are added to the completion queues directly. *Getters* change nothing.
//!
//! | file | steps |
//! |---|---|
//! | `stream.rs` | the state of one stream |
//! | `requester.rs` | requests of this end on the stream: numbers, outstanding Reads and atomics, retries |
//! | `responder.rs` | the peer's requests on the stream, and the responses to them |
//! | `tx.rs` | take the next request from the send queue, segment (in `ddp/tx.rs`) and frame (in `llp/mpa/frame.rs`) its messages |
//! | `build.rs` | build the messages of a request |
//! | `rx.rs` | deframe the received bytes (in `llp/mpa/deframe.rs`), admit (check) a segment, place its payload |
//! | `deliver.rs` | deliver a message |
//! | `complete.rs` | complete requests; acknowledgements; failure |
//! | `handover.rs` | from the TCP connection to shared memory or to a trunk |
//! | `timers.rs` | timers |

mod build;
mod complete;
mod deliver;
mod handover;
mod requester;
mod responder;
mod rx;
mod stream;
mod timers;
mod tx;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bounds;
use crate::error::Misuse;
use crate::llp::mpa::deframe::LENGTH;
use crate::llp::mpa::frame::TxBatch;
use crate::verbs::counter::{Counter, Ops};
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::LastRegion;
use crate::verbs::qp::{Attr, QpType, State, check_modify};
use crate::verbs::qp_base::{Parts, QpBase};
use crate::verbs::rq::RecvQueue;
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Op, Payload, RecvRequest, WorkRequest, given};
use crate::wire::control::{Control, Handover};
use crate::wire::ddp::Header;
use crate::wire::rdmap::Opcode;
pub use handover::{Carrier, OfferAfter};
use stream::Stream;
pub use stream::{End, First, Peer, StreamConfig};
use timers::{Timer, Timers};

/// A reliable queue pair.
pub struct Connection {
    base: QpBase,
    stream: Option<Stream>,
    /// Without a connection manager: whether the peer closed the stream in order, has not connected, or cannot be reached.
    /// Posted requests then fail after the time that retransmissions of hardware would take ([`Timer::GiveUp`]).
    peer_left: bool,
    timers: Timers,
    /// Whether short messages may take the shortcuts `send_short` and `receive_short`.
    shortcuts: bool,
    /// The number of receives that have completed with success.
    received: u64,
    not_ready: u64,
    /// The regions that payload was last sent from, and that the peer last wrote to.
    last_read: LastRegion,
    last_written: LastRegion,
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
            timers: Timers::default(),
            shortcuts: true,
            received: 0,
            not_ready: 0,
            last_read: LastRegion::default(),
            last_written: LastRegion::default(),
        }
    }

    // ------------------------------------------------------------------ getters

    /// Number of receives that have completed with success.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Number of times that requests were sent again because the peer had no receive.
    pub fn not_ready(&self) -> u64 {
        self.not_ready
    }

    /// The state.
    #[inline]
    pub fn state(&self) -> State {
        self.base.state
    }

    /// The attributes.
    pub fn attr(&self) -> &Attr {
        &self.base.attr
    }

    /// The attributes, for the connection manager, which sets some of them (such as `retry_cnt`) without the checks of
    /// [`Self::modify`].
    pub fn attr_mut(&mut self) -> &mut Attr {
        &mut self.base.attr
    }

    /// Whether a stream is attached.
    pub fn is_attached(&self) -> bool {
        self.stream.is_some()
    }

    /// The implementation of the peer; `None` without a stream.
    #[inline]
    pub fn peer(&self) -> Option<Peer> {
        self.stream.as_ref().map(|s| s.peer)
    }

    /// Whether the stream is open. `Dead` without a stream.
    pub fn end(&self) -> End {
        self.stream.as_ref().map_or(End::Dead, |s| s.end)
    }

    /// Whether a message is being framed, or one of more than 2 KiB waits, so that a large transmit batch is worth
    /// allocating.
    pub fn has_bulk(&mut self) -> bool {
        const BULK: u64 = 2048;
        let Some(s) = &self.stream else { return false };
        if s.current.is_some() || s.responder.has_read_above(BULK) {
            return true;
        }
        // Inline data is always shorter than `BULK`.
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

    /// Whether FPDUs to the peer have markers.
    pub fn sends_markers(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.config.markers)
    }

    /// Whether a message of the peer has arrived.
    pub fn has_started(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.started)
    }

    /// Whether a message of the peer has begun to arrive and is not complete.
    pub fn is_receiving(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.direct.is_some() || s.responder.is_receiving())
    }

    /// Whether a Write of the peer has arrived in part. `rest` contains the received bytes of an FPDU that is still too short to be
    /// handled. It is empty if there is no such FPDU.
    pub fn is_receiving_write(&self, rest: &[u8]) -> bool {
        let Some(s) = &self.stream else { return false };
        if s.responder.is_receiving_write() {
            return true;
        }
        match rest.get(LENGTH..).map(Header::parse) {
            Some(Ok((Header::Tagged(h), _))) => h.opcode == Opcode::Write,
            Some(Ok((Header::Untagged(_), _))) => false,
            // The header is incomplete, so these bytes may be the start of a Write.
            Some(Err(_)) | None => !rest.is_empty(),
        }
    }

    /// The number of requests of the peer that are done, modulo 2³².
    pub fn requests_done(&self) -> u32 {
        self.stream.as_ref().map_or(0, |s| s.responder.done())
    }

    /// Whether posted requests were sent and are not complete.
    #[inline]
    pub fn has_outstanding(&self) -> bool {
        self.base.sq.has_outstanding()
    }

    /// Number of requests of the peer that are done and not acknowledged.
    fn unacknowledged(&self) -> u32 {
        let acknowledges = |s: &&Stream| s.peer == Peer::Anywarp && s.end == End::Open;
        let stream = self.stream.as_ref().filter(acknowledges);
        stream.map_or(0, |s| s.responder.unacknowledged())
    }

    /// Returns the number of the peer's last request that is done. All requests up to this one count as acknowledged
    /// then: the caller transports the number to the peer beside the stream, in shared memory.
    #[inline]
    pub fn carrier_ack(&mut self) -> u32 {
        let Some(s) = &mut self.stream else { return 0 };
        s.responder.acknowledge_all()
    }

    /// Whether an acknowledgement is due.
    #[inline]
    pub fn ack_due(&self) -> bool {
        self.unacknowledged() > 0
    }

    /// Whether so many requests are unacknowledged that an acknowledgement is sent even without data.
    pub fn must_ack(&self) -> bool {
        self.unacknowledged() >= bounds::ACK_AFTER
    }

    /// Whether a Write of at least `len` bytes is done and not acknowledged.
    #[inline]
    pub fn owes_ack_of_write(&self, len: u64) -> bool {
        let longest = self.stream.as_ref().map(|s| s.responder.longest_write());
        longest.is_some_and(|longest| longest >= len) && self.ack_due()
    }

    /// Whether posted requests may wait to be sent together because earlier requests are not acknowledged yet. They are
    /// sent at the latest when the acknowledgement arrives.
    ///
    /// `longest`: payload bytes of the longest request of the list that was posted.
    pub fn may_coalesce_behind_ack(&self, limits: &bounds::Coalesce, longest: u64) -> bool {
        self.base.sq.taken() >= bounds::COALESCE_BEHIND && self.may_coalesce_burst(limits, longest)
    }

    /// Whether posted requests may wait to be sent together, if the caller sends them soon.
    pub fn may_coalesce_burst(&self, limits: &bounds::Coalesce, longest: u64) -> bool {
        let Some(s) = &self.stream else { return false };
        let waiting = self.base.sq.untaken();
        let is_small =
            longest <= limits.max_payload && waiting as u64 * longest < bounds::COALESCE_BYTES;
        s.peer == Peer::Anywarp
            && s.end == End::Open
            && self.base.state == State::Rts
            && s.current.is_none()
            && self.timers.get(Timer::Rnr).is_none()
            && !s.responder.has_responses()
            && waiting < limits.max_requests
            && waiting > 0
            && is_small
    }

    /// Whether the rest of `batch` after its first `sent` bytes may be sent. It must not be sent if it refers to the memory of a request
    /// that has completed because the peer acknowledged a message before it was sent: the program may use this memory for something else.
    pub fn may_send_rest(&self, batch: &TxBatch, sent: usize) -> bool {
        let request = batch.first_request(sent);
        request.is_none_or(|number| number >= self.base.sq.front_number())
    }

    /// Whether requests in the send queue wait to be taken for sending.
    pub fn has_untaken(&self) -> bool {
        self.base.sq.untaken() > 0
    }

    /// When [`Self::handle_timeout`] is to be called: the time of the timer that fires next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if !self.timers.runs(Timer::Rnr) && !self.timers.runs(Timer::GiveUp) {
            return self.deadline(Timer::Probe);
        }
        let mut next: Option<Instant> = None;
        for timer in Timer::ALL {
            next = match (next, self.deadline(timer)) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        next
    }

    /// When `timer` fires, if it runs.
    #[inline]
    fn deadline(&self, timer: Timer) -> Option<Instant> {
        let at = self.timers.get(timer)?;
        match (timer, &self.stream) {
            (Timer::Rnr, Some(_)) | (Timer::GiveUp, None) => Some(at),
            (Timer::Probe, Some(s))
                if s.peer == Peer::Anywarp
                    && s.end == End::Open
                    && !s.in_memory
                    && self.base.sq.has_outstanding() =>
            {
                Some(at + self.base.attr.probe_after()?)
            }
            _ => None,
        }
    }

    /// How long the peer's machine may stay silent with requests outstanding: timeout and `retry_cnt` of the attributes.
    /// `None`: without limit.
    pub fn silence_limit(&self) -> Option<Duration> {
        self.base.attr.silence_limit()
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

    /// Posts the send request that `fill` writes in place in the send queue, as [`Self::post_send`] does.
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

    /// Checks whether all these requests can be posted now.
    pub fn check_sends(&self, requests: &[WorkRequest]) -> Result<(), Misuse> {
        self.base.check_sends(requests, may_post)
    }

    /// Injects a fault ([`crate::fault`]): the request that was posted last is not sent, but fails with `status` at the time
    /// when it would be taken from the send queue.
    pub fn inject_error(&mut self, status: Status) {
        self.base.sq.inject_error(status);
    }

    /// Cuts the stream, as an injected fault. The oldest unfinished request fails with RETRY_EXC_ERR, whether or not it
    /// was sent. Without a stream, the request that was posted last fails when it would be taken
    /// from the send queue.
    pub fn cut(&mut self) {
        self.inject_error(Status::RetryExceeded);
        if self.stream.is_none() || self.base.state == State::Error {
            return;
        }
        if !self.base.sq.has_outstanding()
            && let Some((number, _)) = self.base.sq.peek()
        {
            // Nothing is outstanding: the first request that was not sent is the cause of the failure.
            self.base.sq.advance();
            self.base
                .sq
                .fail(number, Status::RetryExceeded, "the stream was cut");
        }
        self.handle_eof(true, false);
    }

    /// Posts a receive (`ibv_post_recv(3)`).
    #[inline]
    pub fn post_recv(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        self.base.post_recv(request)
    }

    fn kind(&self) -> QpType {
        match &self.base.rq {
            RecvQueue::None => QpType::XrcSend,
            RecvQueue::Xrc { .. } => QpType::XrcRecv,
            RecvQueue::Own { .. } | RecvQueue::Shared(_) => QpType::Rc,
        }
    }

    /// Returns the error of [`Self::modify`] with these parameters, without a change.
    pub fn check_modify(
        &self,
        attr_mask: u32,
        next: Option<State>,
        expected_state: Option<State>,
        attr: &Attr,
    ) -> Result<(), Misuse> {
        let state = self.base.state;
        check_modify(self.kind(), state, next, attr_mask, attr, expected_state).map(drop)
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
        let kind = self.kind();
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

    /// Sets the state without checking the transition, as the kernel's connection manager does.
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
        self.timers = Timers::default();
    }

    /// Prepares RESET, or the destruction of the queue pair: discards all requests and completions, and closes the stream after a Bye (the
    /// control message for an orderly end), as [`Self::leave`] does. The caller sends the messages that remain. The state is ERROR until the
    /// caller changes it.
    ///
    /// Without the Bye the peer could not know that requests whose bytes its transport has delivered were not executed.
    pub fn discard(&mut self) {
        self.base.reset();
        self.base.state = State::Error;
        self.timers = Timers::default();
        if let Some(s) = &mut self.stream {
            s.requester.clear();
            s.direct = None;
        }
        self.close_stream();
    }

    /// Fails the queue pair, flushes all requests, and closes the stream after a Bye.
    pub fn leave(&mut self, why: &'static str) {
        self.fail(None, why, None);
        self.close_stream();
    }

    fn close_stream(&mut self) {
        if let Some(s) = &mut self.stream
            && s.end == End::Open
        {
            s.current = None;
            s.requester.drop_parts();
            if !s.terminated {
                s.responder.clear();
            }
            s.push_ack();
            if s.peer == Peer::Anywarp {
                s.responder.push_control(Control::Bye);
            }
            s.end = End::Closing;
        }
    }

    /// Attaches a stream, whose start-up has agreed on `config`. Requests that were posted and not sent go to its peer. If an
    /// earlier stream has sent some, the queue pair fails.
    pub fn attach(&mut self, mut config: StreamConfig, now: Instant) {
        if config.markers {
            // No payload is sent by reference, since markers interrupt it.
            config.mulpdu = config.mulpdu.min(bounds::COPY_LIMIT);
            config.mulpdu_anywarp = config.mulpdu;
        }
        self.base.rq.forget_choice();
        self.peer_left = false;
        self.timers = Timers::default();
        self.timers.start(Timer::Probe, now);
        self.stream = Some(Stream::new(config, self.shortcuts));
        if self.base.sq.has_begun() {
            // An earlier stream, which the peer has left, has sent requests. It is not known which of them the peer has
            // executed, and the acknowledgements of the new stream do not refer to them. An adapter's peer would refuse
            // them, because their sequence numbers are not those of the new connection.
            let blamed = Some((None, Status::RetryExceeded));
            self.fail(blamed, "the peer that had the requests has left", None);
        }
        if self.base.state == State::Error {
            self.leave("the queue pair failed before its stream was up");
        }
    }

    /// Records that the peer has not connected although it has to (the end with the smaller address and number
    /// connects). Posted requests fail with RETRY_EXC_ERR after [`Self::silence_limit`], unless the peer connects first.
    pub fn handle_not_connected(&mut self) {
        self.peer_left = true;
    }

    /// Records that the connection to the peer failed or was refused. Posted requests fail with RETRY_EXC_ERR.
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

    /// Sets the number of Reads and atomics that each end may have outstanding, when the program sets it with
    /// `ibv_modify_qp(3)` and the MPA start-up did not agree on it.
    pub fn set_depths(&mut self, ird: u32, ord: u32) {
        if let Some(s) = &mut self.stream
            && !s.config.managed
        {
            s.responder.set_ird(ird);
            s.requester.set_ord(ord);
        }
    }

    /// Limits the ULPDU of all further FPDUs, since the segment size of the path has changed.
    // RFC 5044 §5.1 [mpa-emss]: the limit may change in the middle of a message.
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

    /// For tests: whether short messages may take the shortcuts past the general data path. The default is true.
    #[doc(hidden)]
    pub fn set_shortcuts(&mut self, shortcuts: bool) {
        self.shortcuts = shortcuts;
        if let Some(s) = &mut self.stream {
            s.set_short_limit(shortcuts);
        }
    }

    /// For tests: adds `first` to all sequence numbers of a fresh stream, so that they wrap soon. Both ends must do this.
    #[doc(hidden)]
    pub fn number_from(&mut self, first: u32) {
        if let Some(s) = &mut self.stream {
            s.requester.number_from(first);
            s.responder.number_from(first);
        }
    }

    /// Attaches a completion counter (`ibv_qp_attach_comp_cntr(3)`).
    pub fn attach_counter(&mut self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        self.base.attach_counter(counter, ops)
    }

    /// Detaches the completion counters when the queue pair is destroyed: flushed requests are not counted then.
    pub fn detach_counters(&mut self) {
        self.base.detach_counters();
    }

    /// Drops the completions that were not polled, and unbinds the windows of type 2, when the queue pair is destroyed
    /// (`ibv_destroy_qp(3)`).
    pub fn purge(&mut self) {
        self.base.purge();
        self.base.unbind_windows();
    }

    // ------------------------------------------------------------------ outputs

    /// Whether there is nothing to send and no event to raise until bytes arrive, a request is posted or a timer fires.
    pub fn is_quiet(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        s.end == End::Open
            && matches!(self.base.state, State::Rtr | State::Rts)
            && s.is_tx_idle()
            && self.base.sq.untaken() == 0
            && self.base.events.is_empty()
    }

    /// Whether the queue pair sends on an open stream, and nothing else is to be done for it: it has no event, offers no
    /// carrier, and its peer has not left.
    #[inline]
    pub fn only_sends(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        s.end == End::Open
            && self.base.state == State::Rts
            && self.base.events.is_empty()
            && !self.peer_left
            && self.next_offer().is_none()
    }

    /// Whether a response or control message is queued.
    #[inline]
    pub fn has_responses(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.responder.has_responses())
    }

    /// Called when the socket has accepted all FPDUs framed so far.
    #[inline]
    pub fn handle_written(&mut self) {
        let Some(s) = &self.stream else { return };
        // RFC 5040 §5.5 (14) [rdmap-complete-after-ddp]: towards a standard peer a Send or Write is complete when the
        // LLP has accepted it.
        if s.peer == Peer::Standard {
            self.complete_sent();
        }
        self.after();
    }

    /// Completes the requests that wait only for an acknowledgement.
    fn complete_sent(&mut self) {
        for (_, posted) in self.base.sq.taken_mut() {
            if posted.phase == Phase::Sent && posted.answers == 0 {
                posted.phase = Phase::Done;
            }
        }
        self.retire();
    }

    /// Handles the timers that are due at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.check_peer_left(now);
        if self.is_due(Timer::Rnr, now) {
            self.timers.stop(Timer::Rnr);
        }
        if self.is_due(Timer::Probe, now)
            && let Some(s) = &mut self.stream
        {
            // The kernel notices that the peer's machine has failed only while bytes are unacknowledged, so a Ping is
            // sent.
            self.timers.stop(Timer::Probe);
            s.responder.push_control(Control::Ping);
        }
    }

    fn is_due(&self, timer: Timer, now: Instant) -> bool {
        self.deadline(timer).is_some_and(|at| at <= now)
    }

    /// Handles the end of the stream: the peer closed it (`reset` is false), or it broke. `all_taken`: the peer's
    /// transport has acknowledged all bytes that were sent.
    pub fn handle_eof(&mut self, reset: bool, all_taken: bool) {
        // A queue pair that closes its stream sends an acknowledgement and a Bye. If its process ended before that, the
        // acknowledgement of its transport is enough, as for a standard peer.
        // RFC 5040 §5.5 (14) [rdmap-complete-after-ddp]
        if all_taken && self.stream.as_ref().is_some_and(|s| !s.bye_received) {
            self.complete_sent();
        }
        let Some(s) = &mut self.stream else { return };
        // RFC 5041 §6.2 [ddp-fatal-reported]: an end of the stream in the middle of a message is an error.
        let quiet = s.bye_received && !s.responder.is_receiving_send() && s.direct.is_none();
        let fails = s.config.managed && !(quiet && s.config.stays);
        s.end = End::Dead;
        self.base.events.push_back(AsyncEvent::PeerGone);
        if self.base.state == State::Error {
            return;
        }
        if fails {
            // RFC 5040 §6.2: unfinished operations complete with an error.
            let first = (!quiet && self.base.sq.has_outstanding() && reset)
                .then_some((None, Status::RetryExceeded));
            self.fail(first, "the peer closed the connection", None);
        } else if quiet {
            // The peer's program disconnected or destroyed its queue pair. As with RoCE adapters, this queue pair fails only when requests are
            // posted, after the time that their retransmissions would take: see `check_peer_left`.
            self.stream = None;
            self.timers = Timers::default();
            self.peer_left = true;
        } else {
            // As with RoCE, a failed completion is enough to report the failure. The event is needed only if no
            // completion is pending.
            let first = (!self.base.sq.is_empty()).then_some((None, Status::RetryExceeded));
            let has_receives = !self.base.rq.is_shared() && !self.base.rq.is_empty();
            let unnoticed = first.is_none() && !has_receives;
            let event = unnoticed.then_some(AsyncEvent::QpFatal);
            self.fail(first, "the connection to the peer was lost", event);
        }
    }

    /// Starts the timer of requests that were posted after the peer has left, and fails them when it fires. Returns whether it was
    /// started now.
    pub fn check_peer_left(&mut self, now: Instant) -> bool {
        if !self.peer_left || self.base.sq.is_empty() || self.base.state == State::Error {
            self.timers.stop(Timer::GiveUp);
            return false;
        }
        match (self.timers.get(Timer::GiveUp), self.silence_limit()) {
            (None, Some(limit)) => {
                self.timers.start(Timer::GiveUp, now + limit);
                return true;
            }
            (Some(at), _) if at <= now => {
                let blamed = Some((None, Status::RetryExceeded));
                self.fail(blamed, "the peer has left", None);
            }
            _ => {}
        }
        false
    }

    // ------------------------------------------------------------------ completion

    /// Whether the queue pair is in SQD with requests outstanding.
    pub fn is_draining(&self) -> bool {
        self.base.is_draining()
    }
}

// ---------------------------------------------------------------------- hand-over to another carrier

impl Connection {
    /// The carrier to offer to the peer now: the peer supports it, and the connection is in use.
    #[inline]
    pub fn next_offer(&self) -> Option<Carrier> {
        let s = self.stream.as_ref()?;
        let carrier = s.handover.next_offer(s.requests())?;
        let may = s.peer == Peer::Anywarp
            && s.started
            && s.end == End::Open
            && matches!(self.base.state, State::Rtr | State::Rts);
        may.then_some(carrier)
    }

    /// Queues a hand-over message to the peer.
    pub fn send_handover(&mut self, what: Handover) {
        let Some(s) = &mut self.stream else { return };
        s.handover.sent(what);
        s.responder.push_control(Control::Handover(what));
    }

    /// Makes no offer of shared memory on this connection.
    pub fn decline_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.decline(Carrier::SharedMemory, None);
        }
    }

    /// The number of requests of both ends on this stream, modulo 2³².
    pub fn requests(&self) -> u32 {
        self.stream.as_ref().map_or(0, Stream::requests)
    }

    /// Makes no offer of a trunk until both ends have made twice as many requests as now.
    pub fn postpone_trunk(&mut self) {
        if let Some(s) = &mut self.stream {
            let until = s.requests().saturating_mul(2).max(1);
            s.handover.decline(Carrier::Trunk, Some(until));
        }
    }

    /// Whether a hand-over message of the peer waits for the engine.
    pub fn has_handover_message(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.handover.has_message())
    }

    /// Takes the hand-over message of the peer that waits for the engine.
    pub fn poll_handover(&mut self) -> Option<Handover> {
        self.stream.as_mut()?.handover.poll()
    }

    /// Whether the last FPDU of this end on its TCP connection is framed, so that further FPDUs wait for [`Self::switch_tx_to_shm`] or
    /// [`Self::resume_tx`].
    pub fn must_switch_tx(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.handover.must_switch())
    }

    /// Called when the engine sends by the trunk from now on, but the peer is not ready yet. Until [`Self::resume_tx`], only the last messages
    /// of a stream that ends are framed.
    pub fn switch_tx_to_trunk(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.tx_switched();
        }
    }

    /// Frames further FPDUs: for the trunk, or for the TCP connection if the peer has refused the trunk.
    pub fn resume_tx(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_tx();
        }
    }

    /// Expects all further FPDUs from the trunk, or from the TCP connection if this end has refused the trunk.
    pub fn resume_rx(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_rx();
        }
    }

    /// Frames all further FPDUs for shared memory, without CRCs. The shared memory also transports acknowledgements
    /// ([`Self::carrier_ack`]). A silent peer is not probed: the end of its process ends the stream, and its host is
    /// this host.
    pub fn switch_tx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_tx();
            s.crc_tx = false;
            s.in_memory = true;
            self.timers.stop(Timer::Probe);
        }
    }

    /// Expects all further FPDUs from shared memory, without CRCs.
    pub fn switch_rx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_rx();
            s.crc_rx = false;
        }
    }
}

/// Makes the checks of `ibv_post_send(3)` that the send queue cannot make.
#[inline]
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
            "a shared receive queue's number is required for requests of an XRC sender, and not allowed for others",
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

#[cfg(test)]
mod tests;
