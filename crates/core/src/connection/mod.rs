//! A reliable queue pair (RC, XRC) and its stream, as a state machine without I/O.
//!
//! Methods come in four kinds. *Commands* of the application: [`Connection::post_send`], [`Connection::post_recv`],
//! [`Connection::modify`]. *Inputs*: [`Connection::handle_rx`], [`Connection::handle_written`],
//! [`Connection::handle_eof`], [`Connection::handle_timeout`]. *Outputs*: [`Connection::poll_tx`],
//! [`Connection::poll_event`], [`Connection::poll_timeout`], [`Connection::end`]; they may change after any command or
//! input. Completions go straight to the completion queues. *Getters* change nothing.
//!
//! | file | steps |
//! |---|---|
//! | `stream.rs` | the state of one stream |
//! | `tx.rs` | take; calls segment (`ddp/tx.rs`) and frame (`llp/mpa/frame.rs`) |
//! | `build.rs` | build the messages of a request |
//! | `rx.rs` | calls deframe (`llp/mpa/deframe.rs`); admit, place |
//! | `deliver.rs` | deliver a message |
//! | `complete.rs` | complete requests; acknowledgements; failure |
//! | `shm_handover.rs` | from TCP to shared memory |

mod build;
mod complete;
mod deliver;
mod rx;
mod shm_handover;
mod stream;
mod tx;

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use crate::bounds;
use crate::error::Misuse;
use crate::llp::mpa::marker::Inserter;
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::LastRegion;
use crate::verbs::qp::{Attr, QpType, State};
use crate::verbs::qp_base::{Parts, QpBase};
use crate::verbs::rq::RecvQueue;
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Op, Payload, RecvRequest, WorkRequest, given};
use crate::wire::control::{Control, Handover};
use shm_handover::ShmHandover;
pub use stream::{End, First, Peer, StreamConfig};
use stream::{Response, Stream};

/// A reliable queue pair.
pub struct Connection {
    base: QpBase,
    stream: Option<Stream>,
    /// The peer of a stream without connection manager closed it in order. Requests posted from now on fail at `give_up_at`.
    peer_left: bool,
    /// When posted requests fail because the peer has left: after the time in which hardware would repeat them.
    give_up_at: Option<Instant>,
    /// Short messages may take the shortcuts `send_short` and `receive_short`.
    shortcuts: bool,
    /// Receives that have completed with success.
    received: u64,
    not_ready: u64,
    /// What was accessed last: to send it, and for the peer.
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
            give_up_at: None,
            shortcuts: true,
            received: 0,
            not_ready: 0,
            last_read: LastRegion::default(),
            last_written: LastRegion::default(),
        }
    }

    // ------------------------------------------------------------------ getters

    /// Number of messages that consumed a receive.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Number of times that requests were sent again because the peer had no receive.
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

    /// Whether a message of the peer has arrived.
    pub fn has_started(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.started)
    }

    /// Whether a message of the peer has begun to arrive and is not complete.
    pub fn is_receiving(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.receive.is_some() || s.direct.is_some() || s.write_bytes > 0)
    }

    /// Number of requests of the peer that are done and not acknowledged.
    fn unacknowledged(&self) -> u32 {
        let tells = |s: &&Stream| s.peer == Peer::Anywarp && s.end == End::Open;
        let stream = self.stream.as_ref().filter(tells);
        stream.map_or(0, |s| s.done.wrapping_sub(s.done_acked))
    }

    /// Whether an acknowledgement is due.
    pub fn ack_due(&self) -> bool {
        self.unacknowledged() > 0
    }

    /// Whether so many acknowledgements are due that one is sent without data.
    pub fn must_ack(&self) -> bool {
        self.unacknowledged() >= bounds::ACK_AFTER
    }

    /// Whether posted requests may wait to be sent together, behind requests that the peer has not acknowledged: the
    /// acknowledgement sends them at the latest.
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

    /// When [`Self::handle_timeout`] is to be called for a probe or a retry.
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

    /// The request that was posted last will fail with `status` when its turn comes, and is not sent ([`crate::fault`]).
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
    #[inline]
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

    /// Fails the queue pair, flushes all requests, and closes the stream after a Bye.
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
            handover: ShmHandover::new(config.shm_handover, config.first == First::Hello),
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
            stream.queue_first();
        }
        self.base.rq.forget_choice();
        self.peer_left = false;
        self.give_up_at = None;
        self.stream = Some(stream);
        if self.base.state == State::Error {
            self.leave("the queue pair failed before its stream was up");
        }
    }

    /// The peer must dial (it has the larger address and number) and has not. Posted requests fail with RETRY_EXC_ERR after
    /// `timeout` x `retry_cnt` unless it dials first.
    pub fn handle_not_connected(&mut self) {
        self.peer_left = true;
    }

    /// The connection to the peer failed or was refused. Posted requests fail with RETRY_EXC_ERR.
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
            // The peer's program destroyed its queue pair. As with hardware, only requests fail, and only after the time
            // that their retransmissions would take: see `check_peer_left`.
            self.stream = None;
            self.peer_left = true;
        } else {
            let first = (!self.base.sq.is_empty()).then_some((None, Status::RetryExceeded));
            self.fail(first, "the peer vanished", Some(AsyncEvent::QpFatal));
        }
    }

    /// Fails the requests for a peer that has left when their time is over.
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

    /// Whether it is in SQD and requests that were begun are still under way.
    pub fn is_draining(&self) -> bool {
        self.base.state == State::Sqd && self.base.sq.has_outstanding()
    }
}

// ---------------------------------------------------------------------- hand-over to shared memory

impl Connection {
    /// Whether shared memory is to be offered to the peer now: it can have it, and uses the connection.
    pub fn wants_shm_offer(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        s.handover.may_offer(s.seq.wrapping_add(s.done))
            && s.peer == Peer::Anywarp
            && s.started
            && s.end == End::Open
            && matches!(self.base.state, State::Rtr | State::Rts)
    }

    /// Says something of a carrier to the peer.
    pub fn send_handover(&mut self, what: Handover) {
        let Some(s) = &mut self.stream else { return };
        s.handover.sent(what);
        s.responses
            .push_back(Response::Control(Control::Handover(what)));
    }

    /// None will be offered on this connection.
    pub fn decline_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.decline();
        }
    }

    /// Whether the peer said something of a carrier.
    pub fn has_handover_message(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.handover.has_message())
    }

    /// What the peer said of a carrier.
    pub fn poll_handover(&mut self) -> Option<Handover> {
        self.stream.as_mut()?.handover.poll()
    }

    /// Whether everything that is framed goes to the connection, and what follows not.
    pub fn tx_is_sealed(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.handover.is_tx_sealed())
    }

    /// What is framed from here on goes to shared memory.
    pub fn switch_tx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_tx();
            s.crc_tx = false;
        }
    }

    /// What is received from here on comes from shared memory.
    pub fn switch_rx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.resume_rx();
            s.crc_rx = false;
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

#[cfg(test)]
mod tests;
