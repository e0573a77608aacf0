//! Queue pairs without a stream: unreliable datagrams (UD), reliable ones (RD), and the unreliable connection to one
//! fixed peer (UC).
//!
//! The same segments as on a stream travel in UDP datagrams, after the shim of [`crate::wire::dgram`]. Unreliable
//! services have no acknowledgements and no retransmission: a Send or Write is complete when the socket has taken its
//! datagrams, and a loss is not reported. Reliable services send datagrams in the packets of [`crate::wire::rd`], and
//! a request is complete when its peer has acknowledged all of it.
//!
//! | file | content |
//! |---|---|
//! | `mod.rs` | the queue pair: states, posting, completion, flush |
//! | `types.rs` | kinds, datagrams, reasons to drop one, counters |
//! | [`options`] | settings beyond those of verbs |
//! | `outgoing.rs` | messages to send, destinations |
//! | `tx/` | requests into datagrams: `build`, `cut`, then `unreliable` or `peer_queues`; `control` |
//! | `issued.rs` | the requests of recent messages, for late error reports |
//! | [`rx`] | arriving datagrams: checks, dispatch |
//! | `whole.rs` | the shortcut for a Send of one datagram that arrives |
//! | `deliver.rs` | placing into receives and registered memory; records |
//! | `respond.rs` | Reads, atomics and errors, of this end and of peers |
//! | `rd/` | reliability: numbers, acknowledgements, windows |
//! | [`messages`] | reassembly of messages from many sources |
//! | `reassemble.rs` | runs of bytes; reassembly of messages from one fixed peer |
//! | `reads.rs` | requests that wait for a response |
//! | `parity.rs` | recovery of lost datagrams from parity |
//! | `cookie.rs` | proof that a peer receives at its address |
//! | `flow.rs` | sending no faster than the peer receives |
//! | `table.rs` | hash tables keyed by peer |
//! | `spare.rs` | reuse of buffers |
//! | [`grh`] | the 40 bytes in front of a message on UD and RD |
//!
//! What differs between the kinds:
//!
//! | | UD | RD | UC | RC over UDP |
//! |---|---|---|---|---|
//! | destination | in each request | in each request | [`DatagramQp::set_peer`] | the same |
//! | source | anybody with the Q_Key | the same | the peer alone | the same |
//! | operations | Send; Write-Record, Read | the same, atomics | Send, Write | Send, Write, Read, atomics |
//! | an error that a peer reports | a counter, a report | the queue pair fails, except with `keep_going` | dropped | the queue pair fails |
//!
//! Methods come in the four kinds of [`crate::connection`]: commands (`post_send`, `post_recv`, `modify`, `set_peer`),
//! inputs (`set_now`, `handle_rx`, `handle_written`, `handle_send_error`, `handle_stall`, `handle_timeout`), outputs
//! (`poll_tx`, `wants_tx`, `stall`, `poll_timeout`, `poll_event`, `records`, `poll_error`) and getters.

mod cookie;
mod deliver;
mod flow;
mod issued;
mod outgoing;
mod parity;
mod rd;
mod reads;
mod reassemble;
mod respond;
mod spare;
mod table;

pub mod grh;
pub mod messages;
pub mod options;
pub mod rx;
mod tx;
mod types;
mod whole;

#[cfg(test)]
mod tests;

pub use outgoing::is_group;
pub use rd::host_of;
pub use types::{
    Arrival, Bytes, Counters, Dropped, ErrorReport, Kind, MULTICAST_QPN, PathMtu, TxDatagram,
};

use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::bounds;
use crate::error::Misuse;
use crate::observe::Step;
use crate::verbs::counter::{Counter, Ops};
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::LastRegion;
use crate::verbs::qp::{Attr, State, mask};
use crate::verbs::qp_base::{Parts, QpBase};
use crate::verbs::sq::Phase;
use crate::verbs::wc::{Completion, Status};
use crate::verbs::wr::{Destination, RecvRequest, WorkRequest, given};
use cookie::Secret;
use flow::Flow;
use grh::LastArrival;
use issued::Issued;
use messages::{GivenUp, Messages, Record, Records};
use options::Options;
use outgoing::{Current, PeerQueue, Trailer, check, index};
use parity::Budget;
use rd::Reliable;
use reads::Reads;
use reassemble::Incoming;
use spare::Spare;
use table::Table;
use types::{Peer, Resource, Unwritten};

/// How long a sender waits for a receive of its peer for each retry that `rnr_retry` allows.
const RNR_WAIT: Duration = Duration::from_millis(100);

/// A datagram queue pair.
pub struct DatagramQp {
    base: QpBase,
    kind: Kind,
    /// Whether messages of one datagram may take the shortcuts `send_ud`, `send_single` and `receive_whole`.
    shortcuts: bool,
    peer: Option<Destination>,
    counters: Counters,
    /// The memory region of the last request: the next one often has the same.
    last_read: LastRegion,
    /// The memory region of the last receive.
    last_written: LastRegion,
    // --- transmit ---
    epoch: u16,
    /// Number of the next message.
    next_id: u32,
    /// The requests of the latest messages, by message number.
    issued: Issued,
    /// UC: payload bytes of a datagram of a segmented message.
    segment: usize,
    current: Option<Current>,
    /// Answers to peers, and requests that are sent again.
    answers: VecDeque<Current>,
    /// Answers that could not be sent in their turn, because the windows of their peers were closed. They are not examined for
    /// each datagram that is sent.
    closed_answers: VecDeque<Current>,
    /// When `closed_answers` is examined next: the window of a silent peer opens as time passes, without a report.
    look_again: Duration,
    /// Short datagrams that are answers.
    outbox: VecDeque<TxDatagram>,
    /// Final datagrams of messages, which are repeated.
    trailers: VecDeque<Trailer>,
    /// Reliable services: messages by peer, the number of requests and answers of all peers, and the peers to which
    /// something can be sent.
    peer_queues: Table<Peer, PeerQueue>,
    queued_requests: usize,
    queued_answers: usize,
    ready: VecDeque<Peer>,
    last_tag: u64,
    /// An entry for each datagram that [`Self::poll_tx`] has returned and that is not sent yet.
    unwritten: Unwritten,
    flow: Flow,
    reads: Reads,
    /// Failed requests by number, with their status.
    failures: VecDeque<(u64, Status)>,
    /// Whether a reliable connection has failed. All later requests then complete as flushed, even if they have arrived.
    broken: bool,
    // --- receive ---
    incoming: Incoming,
    messages: Messages,
    /// Multicast and broadcast addresses whose datagrams the queue pair receives.
    joined: Vec<IpAddr>,
    /// The addressing of the last datagram.
    last_arrival: LastArrival,
    /// Completions of datagrams that were received together. They are added to their queue together.
    received: Vec<Completion>,
    parity: Budget,
    records: Records,
    errors: VecDeque<ErrorReport>,
    /// The present second, and the number of errors that were reported to peers in it.
    errors_reported: (u64, u32),
    // --- both ---
    options: Options,
    rd: Option<Box<Reliable>>,
    secret: Secret,
    paths: Option<PathMtu>,
    /// The last result of `paths`: address, time, and UDP payload in bytes.
    path: Option<(IpAddr, Duration, u16)>,
    spare: Spare,
    now: Duration,
    /// Whether the last [`Self::poll_tx`] stopped before a request, because the window of its peer was closed.
    was_stalled: bool,
    /// Reliable services: packets wait because there are too many open messages, gaps in them, or answers.
    rx_full: bool,
}

impl fmt::Debug for DatagramQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramQp")
            .field("kind", &self.kind)
            .field("qpn", &self.base.qpn)
            .field("state", &self.base.state)
            .field("sq", &self.base.sq)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl DatagramQp {
    /// A queue pair in RESET. `random` gives its epoch, by which a peer distinguishes it from an earlier queue pair
    /// of the same number, and other values that peers must not guess.
    pub fn new(parts: Parts, kind: Kind, options: Options, random: [u64; 2]) -> Self {
        let secret = Secret::new(random);
        let index = index(parts.qpn);
        let ordered = options.ordered || kind.is_connected();
        let rd = kind
            .is_reliable()
            .then(|| Box::new(Reliable::new(secret, index, ordered, options.peer_timeout)));
        Self {
            base: QpBase::new(parts),
            kind,
            shortcuts: true,
            peer: None,
            counters: Counters::default(),
            last_read: LastRegion::default(),
            last_written: LastRegion::default(),
            // 1 to 65535: 0 is not allowed on the wire.
            epoch: u16::try_from(secret.start(1) % 0xffff + 1).unwrap_or(1),
            next_id: secret.start(2),
            issued: Issued::new(options.one_sided),
            segment: bounds::DATAGRAM_PAYLOAD,
            current: None,
            answers: VecDeque::new(),
            closed_answers: VecDeque::new(),
            look_again: Duration::ZERO,
            outbox: VecDeque::new(),
            trailers: VecDeque::new(),
            peer_queues: Table::default(),
            queued_requests: 0,
            queued_answers: 0,
            rx_full: false,
            ready: VecDeque::new(),
            last_tag: 0,
            unwritten: Unwritten::default(),
            flow: Flow::new(),
            reads: Reads::default(),
            failures: VecDeque::new(),
            broken: false,
            incoming: Incoming::default(),
            messages: Messages::new(rd.is_some()),
            joined: Vec::new(),
            last_arrival: LastArrival::default(),
            received: Vec::new(),
            parity: Budget::default(),
            records: Records::default(),
            errors: VecDeque::new(),
            errors_reported: (0, 0),
            options,
            rd,
            secret,
            paths: None,
            path: None,
            spare: Spare::default(),
            now: Duration::ZERO,
            was_stalled: false,
        }
    }

    // ------------------------------------------------------------------ getters

    /// The service.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The state.
    pub fn state(&self) -> State {
        self.base.state
    }

    /// Returns whether the state is SQD and requests are outstanding.
    pub fn is_draining(&self) -> bool {
        self.base.is_draining()
    }

    /// The attributes.
    pub fn attr(&self) -> &Attr {
        &self.base.attr
    }

    /// The attributes, for the connection manager, which may set them without the checks of [`Self::modify`].
    pub fn attr_mut(&mut self) -> &mut Attr {
        &mut self.base.attr
    }

    /// The peer of a connected service.
    pub fn peer(&self) -> Option<&Destination> {
        self.peer.as_ref()
    }

    /// Panics if the memory that reliable peers use differs from what is charged to them. Everything is counted anew;
    /// simulations call this after each step.
    pub fn check_accounts(&self) {
        if let Some(rd) = &self.rd {
            rd.check_accounts();
        }
    }

    /// The counters.
    pub fn counters(&self) -> Counters {
        let counts = self.rd.as_deref().map(|rd| rd.counts).unwrap_or_default();
        Counters {
            rd_again: counts.again,
            rd_probes: counts.probes,
            rd_acks: counts.acks,
            rd_bad_echo: counts.bad_echo,
            ..self.counters
        }
    }

    /// Whether [`Self::poll_tx`] may have something to send. The caller checks this after other methods of the queue pair,
    /// such as [`Self::handle_rx`].
    pub fn wants_tx(&self) -> bool {
        let more =
            self.was_stalled || (self.base.sq.untaken() > 0 && self.base.state == State::Rts);
        self.flow.has_reports()
            || (self.flow.stall().is_none() && more)
            || !self.outbox.is_empty()
            || !self.ready.is_empty()
            || self.has_open_answer()
            || self.rd.as_deref().is_some_and(Reliable::wants_tx)
    }

    /// Whether an acknowledgement is due that waits for a datagram that can contain it. [`Self::flush`] sends it in a datagram of its
    /// own.
    pub fn ack_due(&self) -> bool {
        self.rd.as_deref().is_some_and(Reliable::ack_due)
    }

    /// Takes back the buffer of a datagram that was sent.
    pub fn recycle(&mut self, datagram: TxDatagram) {
        let buffer = match datagram.bytes {
            Bytes::Own(buffer) => Some(buffer),
            Bytes::Shared(packet) => Arc::try_unwrap(packet).ok(),
        };
        if let Some(buffer) = buffer {
            self.spare.give(buffer);
        }
    }

    /// Sends the acknowledgements that wait for a datagram that can contain them. Called when nothing else is about to be sent.
    pub fn flush(&mut self) {
        if let Some(rd) = &mut self.rd {
            rd.flush(Duration::MAX);
        }
    }

    /// As [`Self::flush`], but only for acknowledgements that have waited long enough. The caller calls this method again
    /// soon, for the others.
    pub fn flush_due(&mut self) {
        if let Some(rd) = &mut self.rd {
            rd.flush(self.now);
        }
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Records of incoming Write-Records, and their maps. Messages whose deadline has passed are given up first,
    /// which may make records.
    pub fn records(&mut self) -> &Records {
        self.expire();
        self.after();
        &self.records
    }

    /// Takes the oldest record of an incoming Write-Record.
    pub fn poll_record(&mut self) -> Option<Record> {
        self.expire();
        self.after();
        let record = self.records.poll()?;
        self.feed_records();
        Some(record)
    }

    /// Takes the oldest record of message `id` of the queue pair `src_qpn`.
    pub fn take_record(&mut self, src_qpn: u32, id: u32) -> Option<Record> {
        let record = self.records.take(src_qpn, id)?;
        self.feed_records();
        Some(record)
    }

    /// Releases a map that the program has read. False: there is no such map.
    pub fn release_map(&mut self, map: u64) -> bool {
        let released = self.records.release(map);
        self.feed_records();
        released
    }

    /// Handles packets of reliable peers that have waited until a record could be stored.
    fn feed_records(&mut self) {
        if self.rd.is_some() {
            self.feed(Resource::Record);
            self.after();
        }
    }

    /// The next error that a peer reported.
    pub fn poll_error(&mut self) -> Option<ErrorReport> {
        self.errors.pop_front()
    }

    /// Reliable services: the number of known peers.
    pub fn peers(&self) -> usize {
        self.rd.as_deref().map_or(0, Reliable::peers)
    }

    /// Reliable services: bytes that are charged for waiting packets.
    pub fn waiting(&self) -> usize {
        self.rd.as_deref().map_or(0, Reliable::waiting)
    }

    /// When [`Self::handle_timeout`] should be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let receiving = self.messages.any_holds_a_receive();
        let rd = self.rd.as_deref().and_then(|rd| rd.poll_timeout(receiving));
        // A program that polls for records gives up late messages when it polls, so no timer is needed for them.
        let long_sends = self.options.max_send > bounds::UD_MTU;
        let timed = self.options.records_complete || long_sends || receiving;
        let messages = self.messages.next_expiry().filter(|_| timed);
        let (reads, answers) = (self.reads.next_expiry(), self.answers_until());
        let all = [rd, messages, reads, answers, self.flow.silent_stall_end()];
        let first = all.into_iter().flatten().min();
        first.filter(|at| *at < Duration::MAX)
    }

    /// The number of the present wait for a report of the peer, if the queue pair waits for one. When the same wait has
    /// lasted for [`bounds::DATAGRAM_STALL`], the caller calls [`Self::handle_stall`].
    pub fn stall(&self) -> Option<u64> {
        self.flow.stall()
    }

    /// The next asynchronous event.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.base.events.pop_front()
    }

    /// A host (the first 64 bits of an IPv6 address) that has sent too many wrong tokens. For the rest of this second,
    /// packets of its unknown queue pairs are dropped if they echo any token.
    pub fn poll_guessed(&mut self) -> Option<IpAddr> {
        self.rd.as_deref_mut()?.guessed.take()
    }

    // ------------------------------------------------------------------ commands

    /// Sets the peer of a connected service. Without a peer nothing is sent or received.
    pub fn set_peer(&mut self, peer: Destination) {
        self.peer = Some(peer);
    }

    /// Makes the queue pair accept datagrams to the address `group`, whatever queue pair index they contain. Datagrams to
    /// multicast addresses and to 255.255.255.255 are accepted without this call, those to the broadcast address of a
    /// subnet are not.
    pub fn join(&mut self, group: IpAddr) {
        self.joined.push(group);
        self.last_arrival.forget();
    }

    /// The opposite of [`Self::join`].
    pub fn leave(&mut self, group: IpAddr) {
        self.joined.retain(|ip| *ip != group);
        self.last_arrival.forget();
    }

    /// For tests: sets whether messages of one datagram may take the shortcuts that bypass the general data path. The default is
    /// true.
    #[doc(hidden)]
    pub fn set_shortcuts(&mut self, shortcuts: bool) {
        self.shortcuts = shortcuts;
    }

    /// Sets the payload bytes of each datagram of a segmented message on UC, so that IP does not fragment the datagram on
    /// its path. The other services follow [`Options::segment`].
    pub fn set_segment(&mut self, payload: usize) {
        let payload = payload.clamp(bounds::DATAGRAM_PAYLOAD_MIN, bounds::DATAGRAM_PAYLOAD);
        // A multiple of 8 keeps the payload of later datagrams aligned at the receiver.
        self.segment = payload & !7;
    }

    /// Sets the size of the socket's receive buffer, as the kernel counts it, which is reported to peers.
    pub fn set_room(&mut self, room: u32) {
        self.flow.set_room(room);
        if let Some(rd) = &mut self.rd {
            rd.set_room(room);
        }
    }

    /// Sets the function that returns the UDP payload that a path carries. Without one, every path is assumed to carry an Ethernet frame.
    pub fn set_paths(&mut self, paths: PathMtu) {
        self.paths = Some(paths);
        self.path = None;
    }

    /// Sets the time, counted from any moment. It is called before other methods, and never with an earlier time.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
    }

    /// Handles the deadlines that have passed.
    pub fn handle_timeout(&mut self) {
        self.expire();
        self.flow.end_silent_stall(self.now);
        self.resume_late_answers();
        let blocked = match self.base.attr.rnr_retry {
            7 => None,
            tries => Some(RNR_WAIT * u32::from(tries)),
        };
        let now = self.now;
        if let Some(rd) = &mut self.rd {
            rd.handle_timeout(now, blocked, &self.messages);
        }
        self.handle_rd_events();
        // A message that was given up may have returned its receive.
        self.handle_receives();
        self.after();
    }

    /// Whether the deadline of an incomplete message has passed. The caller receives from the socket first, since the
    /// missing datagrams may be there.
    pub fn gives_up(&self) -> bool {
        self.messages.next_expiry().is_some_and(|at| at <= self.now)
    }

    /// Gives up messages with gaps and Reads without an answer whose deadline has passed.
    fn expire(&mut self) {
        if self.gives_up() {
            let mut given_up = Vec::new();
            self.messages.expire(self.now, &mut given_up);
            self.give_up_all(given_up, true);
        }
        self.expire_reads();
    }

    fn expire_reads(&mut self) {
        if self.reads.is_empty() {
            return;
        }
        if let Some(rd) = &mut self.rd {
            // The peer has acknowledged the request, so no packet is in flight whose retries could show that the peer is gone.
            // Therefore a probe is sent.
            for peer in self.reads.overdue(self.now, self.now + reads::ASK) {
                rd.ask(&peer, self.now);
            }
        } else {
            let expired = self.reads.expired(self.now);
            for number in &expired {
                self.counters.reads_timeout += 1;
                self.mark_failed(*number, Status::RetryExceeded);
                self.sent(*number);
            }
            if !expired.is_empty() {
                self.retire();
            }
        }
    }

    /// Posts a send request (`ibv_post_send(3)`).
    pub fn post_send(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        self.post_send_with(given(Ok(request)))
    }

    /// As [`Self::post_send`], but `fill` writes the request directly into the entry of the queue.
    #[inline]
    pub fn post_send_with(
        &mut self,
        fill: impl FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        let (kind, options) = (self.kind, &self.options);
        self.base.post_send_with(|into, _| {
            fill(into)?;
            check(kind, options, into)
        })?;
        match self.base.state {
            State::Error => self.flush_sq(),
            State::Sqe => self.flush_untaken(),
            _ => {}
        }
        self.after();
        Ok(())
    }

    /// Checks whether all these requests can be posted now.
    pub fn check_sends(&self, requests: &[WorkRequest]) -> Result<(), Misuse> {
        let check = |_: &_, request: &WorkRequest| check(self.kind, &self.options, request);
        self.base.check_sends(requests, check)
    }

    /// Makes the request that was posted last complete with `status` without being sent ([`crate::fault`]).
    pub fn inject_error(&mut self, status: Status) {
        self.base.sq.inject_error(status);
    }

    /// Posts a receive (`ibv_post_recv(3)`).
    pub fn post_recv(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        self.base.post_recv(request)?;
        self.handle_receives();
        Ok(())
    }

    /// Called when receives were posted to this queue pair or to its shared receive queue: delivers packets that waited for one.
    pub fn handle_receives(&mut self) {
        if self.base.state != State::Error && self.rd.is_some() {
            self.feed(Resource::Receive);
            self.after();
        }
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
        let kind = self.kind.qp_type();
        let to = self
            .base
            .modify(kind, attr_mask, next, expected_state, attr)?;
        if let (Kind::Rc, Some(rd)) = (self.kind, &mut self.rd)
            && attr_mask & mask::TIMEOUT != 0
        {
            // A peer's acknowledgements are sent by a program that may have to wait for its processor. The limit is
            // therefore at least the option `peer_timeout`.
            let limit = self.base.attr.silence_limit();
            rd.set_peer_timeout(limit.map_or(Duration::MAX, |t| t.max(self.options.peer_timeout)));
        }
        match to {
            State::Reset => self.reset(),
            State::Error => self.fail("moved to the error state", None),
            State::Sqd => self.base.enter_sqd(attr_mask),
            _ => self.base.state = to,
        }
        Ok(before)
    }

    /// Sets the state without checking the transition, for the connection manager.
    pub fn set_state(&mut self, to: State) {
        match to {
            State::Reset => self.reset(),
            State::Error => self.fail("disconnected", None),
            _ => self.base.state = to,
        }
    }

    /// Attaches a completion counter (`ibv_qp_attach_comp_cntr(3)`). Operations of peers cannot be counted: a Write
    /// may arrive in pieces for which no state is kept, and a Read Request may be sent twice.
    pub fn attach_counter(&mut self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        if ops.0 & Ops::REMOTE.0 != 0 {
            return Err(Misuse::Unsupported(
                "a counter of the peer's operations on a datagram queue pair",
            ));
        }
        self.base.attach_counter(counter, ops)
    }

    /// Forgets the completion counters, when the queue pair is destroyed.
    pub fn detach_counters(&mut self) {
        self.base.detach_counters();
    }

    /// Returns to RESET: drops all requests, messages and records. The epoch and the message numbers continue, because
    /// the peer may still remember them. Also called before a queue pair is destroyed, to return the receives under way
    /// to the shared queue.
    pub fn reset(&mut self) {
        if let Some(request) = self.incoming.abandon().flatten() {
            self.base.rq.put_back(request);
        }
        self.incoming = Incoming::default();
        let incomplete = self.messages.clear();
        self.records.clear();
        self.errors.clear();
        self.forget_tx(&incomplete);
        if let (true, Some(rd)) = (self.kind.is_connected(), &mut self.rd) {
            // The next connection is another one, even if it has the same peer: packets that wait are not for it. Peers of
            // RD are not connected, so their waiting packets stay valid.
            rd.reset();
        }
        for (_, _, mut open) in incomplete {
            if let Some(request) = open.receive.take() {
                self.base.rq.put_back(request);
            }
        }
        self.failures.clear();
        self.broken = false;
        self.peer = None;
        self.base.reset();
    }

    /// Clears everything that waits to be sent. `incomplete`: messages of peers that were given up. A peer whose message or
    /// answer is lost here gets a new session, so that its requests fail: parts of them are acknowledged, and it would
    /// wait for the answers for ever.
    fn forget_tx(&mut self, incomplete: &[GivenUp]) {
        if let Some(rd) = &mut self.rd {
            let sources = incomplete.iter().map(|(peer, ..)| *peer);
            let answers = self.peer_queues.iter().filter(|(_, q)| q.answers > 0);
            rd.abandon(sources.chain(answers.map(|(peer, _)| *peer)), self.now);
        }
        self.current = None;
        self.answers.clear();
        self.closed_answers.clear();
        self.outbox.clear();
        self.trailers.clear();
        self.peer_queues.clear();
        self.queued_requests = 0;
        self.queued_answers = 0;
        self.ready.clear();
        self.unwritten.clear();
        self.reads.clear();
        self.flow.reset();
    }

    // ------------------------------------------------------------------ completion

    /// Completes requests that are done, in order.
    fn retire(&mut self) {
        if self.failures.is_empty() && !self.broken && self.base.completes_plainly() {
            self.base.retire_successful();
            self.base.check_drained();
            return;
        }
        loop {
            let number = self.base.sq.front_number();
            let Some(posted) = self.base.sq.retire() else {
                break;
            };
            let status = self.final_status(number);
            self.base.complete_send(&posted, status);
        }
        self.base.check_drained();
    }

    /// Records that request `number` has failed. If it fails twice, the first status counts.
    fn mark_failed(&mut self, number: u64, status: Status) {
        if self.base.sq.get_mut(number).is_none() {
            // The request has failed already: the socket refused another datagram of the same message.
            return;
        }
        let at = self.failures.partition_point(|(n, _)| *n < number);
        if self.failures.get(at).is_none_or(|(n, _)| *n != number) {
            self.failures.insert(at, (number, status));
        }
    }

    /// The status of request `number`, which is the oldest one and is done.
    fn final_status(&mut self, number: u64) -> Status {
        let status = match self.failures.front() {
            Some((n, status)) if *n == number => {
                let status = *status;
                self.failures.pop_front();
                status
            }
            _ => Status::Success,
        };
        if self.broken {
            return Status::Flushed;
        }
        self.broken =
            status != Status::Success && self.kind.is_connected() && self.kind.is_reliable();
        status
    }

    /// Puts the queue pair into the error state, and completes every posted request, in order.
    fn fail(&mut self, why: &'static str, event: Option<AsyncEvent>) {
        if self.base.state == State::Error {
            return;
        }
        self.base.state = State::Error;
        self.base.observe(|| Step::Failed(why));
        self.base.events.extend(event);
        self.retire();
        let incomplete = self.messages.clear();
        self.forget_tx(&incomplete);
        self.flush_sq();
        // The receive under way is older than all posted ones, so it completes first.
        let under_way = self.incoming.abandon().flatten();
        if let Some(request) = under_way {
            self.base.flush_recv(request.id);
        }
        for (_, _, mut open) in incomplete {
            if let Some(request) = open.receive.take() {
                // A receive of a shared queue is returned, for other queue pairs.
                if self.base.rq.is_shared() {
                    self.base.rq.put_back(request);
                } else {
                    self.base.flush_recv(request.id);
                }
            }
        }
        self.base.end_rq();
    }

    /// Completes all send requests. The first request that is not done, and all later ones, complete as flushed.
    fn flush_sq(&mut self) {
        let mut flushing = false;
        loop {
            let number = self.base.sq.front_number();
            let Some(posted) = self.base.sq.pop() else {
                break;
            };
            flushing |= posted.phase != Phase::Done;
            let status = match self.final_status(number) {
                // A reliable queue pair may fail because of any request, not only the oldest. That request keeps its own
                // status.
                status if self.kind.is_reliable() && status != Status::Success => status,
                _ if flushing => Status::Flushed,
                status => status,
            };
            self.base.complete_send(&posted, status);
        }
    }

    /// Completes as flushed the send requests for which no message was built, after all earlier requests.
    fn flush_untaken(&mut self) {
        while let Some((number, posted)) = self.base.sq.peek() {
            posted.phase = Phase::Done;
            self.base.sq.advance();
            self.mark_failed(number, Status::Flushed);
        }
        self.retire();
    }

    /// Fails the queue pair if a completion queue has overflowed. Called at the end of a method, and not where the
    /// overflow happens, because a failure in the middle would complicate all methods.
    fn after(&mut self) {
        if self.base.must_fail() {
            self.fail("a completion queue overflowed", Some(AsyncEvent::QpFatal));
        }
    }
}
