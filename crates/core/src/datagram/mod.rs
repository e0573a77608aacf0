//! Queue pairs without a stream: unreliable datagrams (UD), and the unreliable connection to one fixed peer (UC).
//!
//! The same segments as on a stream travel in UDP datagrams, behind the shim of [`crate::wire::dgram`]. Nothing is
//! acknowledged and nothing sent again: a request is complete when the socket took its datagrams, and what is lost is
//! lost without a word.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | the queue pair: states, posting, completion, flush |
//! | [`tx`] | requests into datagrams |
//! | [`rx`] | datagrams into posted receives and registered memory |
//! | `reassemble.rs` | which bytes of a segmented message are there, and which message is the next |
//! | `flow.rs` | not to send faster than the peer receives |
//! | [`grh`] | the 40 bytes in front of a UD message |
//!
//! What differs between the two kinds:
//!
//! | | UD | UC |
//! |---|---|---|
//! | destination | in each request | [`DatagramQp::set_peer`] |
//! | source | anybody with the Q_Key | the peer alone |
//! | operations | Send | Send, Write, each with or without immediate |
//! | message | one datagram, [`bounds::UD_MTU`] at most | segmented, [`bounds::MAX_MESSAGE`] at most |
//!
//! Methods come in the four kinds of [`crate::connection`]: commands (`post_send`, `post_recv`, `modify`, `set_peer`),
//! inputs (`handle_rx`, `handle_written`, `handle_send_error`, `handle_stall`), outputs (`poll_tx`, `wants_tx`, `stall`,
//! `poll_event`) and getters. The only timeout is that of a stall; a message that stays incomplete costs one posted
//! receive, and the next message gives it back.

mod flow;
mod reassemble;

pub mod grh;
pub mod rx;
pub mod tx;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::bounds;
use crate::connection::{AsyncEvent, Parts, Rnic, Step, merge};
use crate::error::Misuse;
use crate::verbs::cq::Cq;
use crate::verbs::qp::{self, Attr, QpType, State, mask};
use crate::verbs::rq::RecvQueue;
use crate::verbs::sq::{Phase, Posted, SendQueue};
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::verbs::wr::{Destination, Op, RecvRequest, WorkRequest};
use crate::wire::dgram::DgramError;
use flow::Flow;
use reassemble::Incoming;

/// The queue pair number of every member of a multicast group.
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// Which of the two services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Unreliable datagram.
    Ud,
    /// Unreliable connection.
    Uc,
}

impl Kind {
    /// The type of queue pair.
    pub const fn qp_type(self) -> QpType {
        match self {
            Self::Ud => QpType::Ud,
            Self::Uc => QpType::Uc,
        }
    }
}

/// How a datagram came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Who sent it.
    pub from: SocketAddr,
    /// Our address that it was sent to, or the group, if the socket tells.
    pub to: Option<IpAddr>,
    /// Its hop limit or time to live.
    pub hop_limit: u8,
    /// Its traffic class or type of service.
    pub traffic_class: u8,
}

/// A datagram to send.
///
/// One call of the socket sends one of these; datagrams of one message are alike but for the last and have the same
/// destination, so that an engine may hand a run of them to the kernel at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxDatagram {
    /// Where to.
    pub to: SocketAddr,
    /// Which of our addresses it must come from, if that matters.
    pub from: Option<IpAddr>,
    /// Hop limit or time to live, 0 for the system's default.
    pub hop_limit: u8,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    /// All of it, checksum included.
    pub bytes: Vec<u8>,
}

/// Why a datagram was dropped, or a part of it not placed. Nobody is told; each reason has its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// It breaks a rule of the format.
    Wire(DgramError),
    /// The queue pair does not receive in its state.
    State,
    /// It is for another queue pair.
    Index,
    /// It has another Q_Key.
    Qkey,
    /// It does not come from the peer.
    Source,
    /// Something that this kind of queue pair does not do.
    Operation,
    /// It contradicts an earlier datagram of its message.
    Mismatch,
    /// All of it had arrived before.
    Duplicate,
    /// Its message was given up, or a newer one has begun.
    Late,
    /// No receive was posted.
    NoReceive,
    /// The memory that it names may not be written.
    Access,
    /// Its message is longer than the receive.
    TooLong,
    /// Its message has more gaps than are kept account of.
    Gaps,
    /// The receive's own memory could not be written; the queue pair has failed.
    Local,
}

/// What a queue pair has seen. Datagrams unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Arrived.
    pub rx_dgrams: u64,
    /// Messages that were delivered.
    pub rx_messages: u64,
    /// Dropped: damaged.
    pub rx_bad_crc: u64,
    /// Dropped: headers that break a rule, contradict each other, or ask for what is not done.
    pub rx_bad_hdr: u64,
    /// Dropped: wrong Q_Key.
    pub rx_qkey: u64,
    /// Dropped: for another queue pair, or not from the peer.
    pub rx_stray: u64,
    /// Dropped: the queue pair was not ready.
    pub rx_state: u64,
    /// Dropped: had arrived before.
    pub rx_dup: u64,
    /// Dropped: of a message that was over.
    pub rx_late: u64,
    /// Dropped: no receive posted.
    pub rx_no_recv: u64,
    /// Dropped: memory that may not be written.
    pub rx_stag: u64,
    /// Dropped: longer than the receive, or too many gaps.
    pub rx_bounds: u64,
    /// Messages that stayed incomplete.
    pub evicted: u64,
    /// Handed to the socket.
    pub tx_dgrams: u64,
    /// Refused by the socket.
    pub tx_errors: u64,
    /// Times that sending stopped for a peer that never said it might go on.
    pub tx_stalls: u64,
}

impl Counters {
    /// All of them with their names.
    pub fn named(&self) -> [(&'static str, u64); 16] {
        [
            ("rx_dgrams", self.rx_dgrams),
            ("rx_messages", self.rx_messages),
            ("rx_bad_crc", self.rx_bad_crc),
            ("rx_bad_hdr", self.rx_bad_hdr),
            ("rx_qkey", self.rx_qkey),
            ("rx_stray", self.rx_stray),
            ("rx_state", self.rx_state),
            ("rx_dup", self.rx_dup),
            ("rx_late", self.rx_late),
            ("rx_no_recv", self.rx_no_recv),
            ("rx_stag", self.rx_stag),
            ("rx_bounds", self.rx_bounds),
            ("evicted", self.evicted),
            ("tx_dgrams", self.tx_dgrams),
            ("tx_errors", self.tx_errors),
            ("tx_stalls", self.tx_stalls),
        ]
    }

    fn dropped(&mut self, why: Dropped) {
        let counter = match why {
            Dropped::Wire(DgramError::Crc) => &mut self.rx_bad_crc,
            Dropped::Wire(_) | Dropped::Operation | Dropped::Mismatch => &mut self.rx_bad_hdr,
            Dropped::State | Dropped::Local => &mut self.rx_state,
            Dropped::Index | Dropped::Source => &mut self.rx_stray,
            Dropped::Qkey => &mut self.rx_qkey,
            Dropped::Duplicate => &mut self.rx_dup,
            Dropped::Late => &mut self.rx_late,
            Dropped::NoReceive => &mut self.rx_no_recv,
            Dropped::Access => &mut self.rx_stag,
            Dropped::TooLong | Dropped::Gaps => &mut self.rx_bounds,
        };
        *counter += 1;
    }
}

/// A datagram queue pair.
pub struct DatagramQp {
    rnic: Arc<Rnic>,
    kind: Kind,
    qpn: u32,
    pd: u32,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    sig_all: bool,
    state: State,
    attr: Attr,
    sq: SendQueue,
    rq: RecvQueue,
    peer: Option<Destination>,
    counters: Counters,
    // --- transmit ---
    epoch: u16,
    /// Number of the next message.
    next_id: u32,
    /// Payload bytes of a datagram of a segmented message.
    segment: usize,
    current: Option<tx::Current>,
    /// For each datagram that was given out and not yet sent: its request if it has one, and whether it is the last one
    /// of it.
    given_out: VecDeque<(Option<u64>, bool)>,
    flow: Flow,
    /// Requests that did not go well, by number, and how they end.
    failures: VecDeque<(u64, Status)>,
    // --- receive ---
    incoming: Incoming,
    events: VecDeque<AsyncEvent>,
    /// Sending stopped for the peer's sake.
    was_stalled: bool,
    overflowed: bool,
    last_wqe_told: bool,
    drain_asked: bool,
}

impl fmt::Debug for DatagramQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramQp")
            .field("kind", &self.kind)
            .field("qpn", &self.qpn)
            .field("state", &self.state)
            .field("sq", &self.sq)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl DatagramQp {
    /// A queue pair in RESET. `random` makes its epoch, by which a peer tells it from one that had its number before.
    pub fn new(parts: Parts, kind: Kind, random: u32) -> Self {
        let c = &parts.capacity;
        Self {
            sq: SendQueue::new(c.max_send_wr, c.max_send_sge, c.max_inline),
            rnic: parts.rnic,
            kind,
            qpn: parts.qpn,
            pd: parts.pd,
            send_cq: parts.send_cq,
            recv_cq: parts.recv_cq,
            sig_all: parts.sig_all,
            state: State::Reset,
            attr: Attr::default(),
            rq: parts.rq,
            peer: None,
            counters: Counters::default(),
            // 1 to 65535: 0 is not allowed on the wire.
            epoch: u16::try_from(random % 0xffff + 1).unwrap_or(1),
            next_id: 1,
            segment: bounds::DATAGRAM_PAYLOAD,
            current: None,
            given_out: VecDeque::new(),
            flow: Flow::new(),
            failures: VecDeque::new(),
            incoming: Incoming::default(),
            events: VecDeque::new(),
            was_stalled: false,
            overflowed: false,
            last_wqe_told: false,
            drain_asked: false,
        }
    }

    // ------------------------------------------------------------------ getters

    /// Which of the two services.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Its attributes.
    pub fn attr(&self) -> &Attr {
        &self.attr
    }

    /// Attributes that the connection manager sets past the state machine.
    pub fn attr_mut(&mut self) -> &mut Attr {
        &mut self.attr
    }

    /// The peer of an unreliable connection.
    pub fn peer(&self) -> Option<&Destination> {
        self.peer.as_ref()
    }

    /// What it has seen.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether [`Self::poll_tx`] has something now that a datagram that came asked for.
    pub fn wants_tx(&self) -> bool {
        self.flow.has_reports() || (self.flow.stall().is_none() && self.was_stalled)
    }

    /// The queue pair waits for its peer to say that it keeps up: the number of this wait. When one and the same has
    /// lasted for [`bounds::DATAGRAM_STALL`], somebody should call [`Self::handle_stall`].
    pub fn stall(&self) -> Option<u64> {
        self.flow.stall()
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    // ------------------------------------------------------------------ commands

    /// Names the one peer of an unreliable connection. Without it nothing is sent and nothing received.
    pub fn set_peer(&mut self, peer: Destination) {
        self.peer = Some(peer);
    }

    /// Sets how many payload bytes a datagram of a segmented message has, for a path that should not see fragments.
    pub fn set_segment(&mut self, payload: usize) {
        let payload = payload.clamp(bounds::DATAGRAM_PAYLOAD_MIN, bounds::DATAGRAM_PAYLOAD);
        // Multiples of 8 keep what follows aligned at the receiver.
        self.segment = payload & !7;
    }

    /// Sets how many bytes the socket holds for us, as the kernel counts them; peers are told.
    pub fn set_room(&mut self, room: u32) {
        self.flow.set_room(room);
    }

    /// Posts a send request (`ibv_post_send(3)`).
    pub fn post_send(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        match self.state {
            State::Reset | State::Init | State::Rtr => {
                return Err(Misuse::WrongState(
                    "post_send before the queue pair is ready to send",
                ));
            }
            State::Rts | State::Sqd | State::Sqe | State::Error => {}
        }
        tx::check(self.kind, &request)?;
        self.observe(&Step::Post(&request));
        self.sq.post(request)?;
        match self.state {
            State::Error => self.flush_sq(),
            State::Sqe => self.flush_untaken(),
            _ => {}
        }
        self.after();
        Ok(())
    }

    /// Posts a receive (`ibv_post_recv(3)`).
    pub fn post_recv(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        if self.state == State::Reset {
            return Err(Misuse::WrongState("post_recv on a queue pair in RESET"));
        }
        self.rq.post(request)?;
        if self.state == State::Error {
            self.flush_rq();
        }
        Ok(())
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`); returns the state before.
    pub fn modify(
        &mut self,
        given: u32,
        next: Option<State>,
        assumed: Option<State>,
        attr: &Attr,
    ) -> Result<State, Misuse> {
        let before = self.state;
        let kind = self.kind.qp_type();
        let to = qp::check_modify(kind, before, next, given, attr, assumed)?;
        merge(&mut self.attr, given, attr);
        match to {
            State::Reset => self.reset(),
            State::Error => self.fail("moved to the error state", None),
            State::Sqd => {
                self.state = State::Sqd;
                self.drain_asked = given & mask::EN_SQD_ASYNC_NOTIFY != 0;
                self.check_drained();
            }
            _ => self.state = to,
        }
        Ok(before)
    }

    /// Sets the state without the rules, as the connection manager's kernel side does.
    pub fn set_state(&mut self, to: State) {
        match to {
            State::Reset => self.reset(),
            State::Error => self.fail("disconnected", None),
            _ => self.state = to,
        }
    }

    /// Forgets everything but epoch and message numbers, which the peer may still remember. To be called before a
    /// queue pair is destroyed as well: it gives a receive under way back to the shared queue.
    pub fn reset(&mut self) {
        if let Some(request) = self.incoming.abandon().flatten() {
            self.rq.put_back(request);
        }
        self.incoming = Incoming::default();
        self.sq.clear();
        self.rq.clear();
        self.current = None;
        self.given_out.clear();
        self.failures.clear();
        self.flow.reset();
        self.peer = None;
        self.state = State::Reset;
        self.attr = Attr::default();
        self.last_wqe_told = false;
        self.drain_asked = false;
        self.send_cq.purge(self.qpn);
        self.recv_cq.purge(self.qpn);
    }

    // ------------------------------------------------------------------ completion

    /// Retires what is done, in order.
    fn retire(&mut self) {
        loop {
            let number = self.sq.front_number();
            let Some(posted) = self.sq.retire() else {
                break;
            };
            let status = self.verdict(number);
            self.complete_send(&posted, status);
        }
        self.check_drained();
    }

    /// Request `number` does not go well. The first reason counts.
    fn condemn(&mut self, number: u64, status: Status) {
        if self.sq.get_mut(number).is_none() {
            // It is over already: a datagram of a message that was cut short came back.
            return;
        }
        let at = self.failures.partition_point(|(n, _)| *n < number);
        if self.failures.get(at).is_none_or(|(n, _)| *n != number) {
            self.failures.insert(at, (number, status));
        }
    }

    /// How request `number`, the oldest, ends when it is done.
    fn verdict(&mut self, number: u64) -> Status {
        match self.failures.front() {
            Some((n, status)) if *n == number => {
                let status = *status;
                self.failures.pop_front();
                status
            }
            _ => Status::Success,
        }
    }

    fn check_drained(&mut self) {
        if self.state == State::Sqd && self.drain_asked && !self.sq.has_outstanding() {
            self.drain_asked = false;
            self.events.push_back(AsyncEvent::SqDrained);
        }
    }

    fn complete_send(&mut self, posted: &Posted, status: Status) {
        if status == Status::Success && !posted.request.signaled && !self.sig_all {
            return;
        }
        let op = match posted.request.op {
            Op::Send { .. } => WcOp::Send,
            Op::Write { .. } => WcOp::Write,
            Op::AtomicWrite { .. } => WcOp::AtomicWrite,
            Op::Read { .. } => WcOp::Read,
            Op::FetchAdd { .. } => WcOp::FetchAdd,
            Op::CompareSwap { .. } => WcOp::CompareSwap,
            Op::LocalInvalidate { .. } => WcOp::LocalInvalidate,
            Op::Bind(_) => WcOp::Bind,
        };
        let mut entry = Completion::new(posted.request.id, status, op, self.qpn);
        entry.byte_len = u32::try_from(posted.bytes).unwrap_or(u32::MAX);
        self.observe(&Step::Complete(&entry));
        if self.send_cq.complete(entry).is_err() {
            self.overflowed = true;
        }
    }

    fn complete_recv(&mut self, entry: Completion) {
        self.observe(&Step::Complete(&entry));
        if self.recv_cq.complete(entry).is_err() {
            self.overflowed = true;
        }
    }

    /// The queue pair fails: every posted request completes, in order.
    fn fail(&mut self, why: &'static str, event: Option<AsyncEvent>) {
        if self.state == State::Error {
            return;
        }
        self.state = State::Error;
        self.observe(&Step::Failed(why));
        self.events.extend(event);
        self.retire();
        self.current = None;
        self.given_out.clear();
        self.flow.reset();
        self.flush_sq();
        // The receive under way is older than all that are posted.
        let under_way = self.incoming.abandon().flatten();
        if let Some(request) = under_way {
            self.flush_recv(request.id);
        }
        self.flush_rq();
        if self.rq.is_shared() && !self.last_wqe_told {
            self.last_wqe_told = true;
            self.events.push_back(AsyncEvent::LastWqe);
        }
    }

    /// All send requests complete, behind the first that is not done as flushed.
    fn flush_sq(&mut self) {
        let mut flushing = false;
        loop {
            let number = self.sq.front_number();
            let Some(posted) = self.sq.pop() else {
                break;
            };
            flushing |= posted.phase != Phase::Done;
            let status = match self.verdict(number) {
                _ if flushing => Status::Flushed,
                status => status,
            };
            self.complete_send(&posted, status);
        }
    }

    /// Send requests that were not taken complete as flushed, once those before them are done.
    fn flush_untaken(&mut self) {
        while let Some((number, posted)) = self.sq.peek() {
            posted.phase = Phase::Done;
            self.sq.advance();
            self.condemn(number, Status::Flushed);
        }
        self.retire();
    }

    fn flush_rq(&mut self) {
        while let Some(request) = self.rq.take_own() {
            self.flush_recv(request.id);
        }
    }

    fn flush_recv(&mut self, id: u64) {
        self.complete_recv(Completion::new(id, Status::Flushed, WcOp::Recv, self.qpn));
    }

    /// What must not happen in the middle of something else.
    fn after(&mut self) {
        if self.overflowed && self.state != State::Error {
            self.fail("a completion queue overflowed", Some(AsyncEvent::QpFatal));
        }
    }

    fn observe(&self, step: &Step<'_>) {
        if let Some(observer) = &self.rnic.observer {
            observer.step(self.qpn, step);
        }
    }
}
