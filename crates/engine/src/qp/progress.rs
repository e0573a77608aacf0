//! Moves the bytes of a reliable queue pair: receives, sends, and delivers events.

use std::sync::Arc;
use std::sync::Weak;
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::{Carrier, End};
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;

use super::timers::Timer;
use super::{Inner, Notice, RcQp, Receive, is_live};
use crate::clock;
use crate::log;
use crate::net::drain::drain;
use crate::net::tcp::{Outcome, Tcp};
use crate::net::trunk::{REST_PAUSE_MAX, REST_TIME_MAX};
use crate::reactor::PolledMemory;
use crate::reactor::Token;
use crate::sys::thread;
use crate::test_panic;

/// If a connection that is being closed has bytes to send, but the peer has taken none for this long, the connection ends without sending
/// them. A peer whose process is stopped takes nothing, and the program waits for the event that reports the end.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// A peer that takes a few bytes in each [`CLOSE_TIMEOUT`] delays the end of a connection this many times at most. Even a slow path
/// carries the last bytes in so long a time.
const CLOSE_TURNS: u32 = 15;
/// The byte that wakes a peer that shares memory (`net::shm`) is sent again after this time if the kernel had no memory for it.
const WAKE_PAUSE: Duration = Duration::from_millis(1);

impl Inner {
    /// Queues a notice for the connection manager, which is called after the lock is released.
    pub(super) fn notify(&mut self, notice: Notice) {
        if let Some(manager) = &self.manager {
            self.notices.push_back((Weak::clone(manager), notice));
        }
    }
}

/// What one call of [`RcQp::receive_once`] did.
struct Received {
    /// Whether bytes arrived.
    any: bool,
    /// `Some` if the rest of a Write that has arrived in part is to be received. Contains the number of requests of the peer that are done.
    unfinished: Option<u32>,
}

impl RcQp {
    /// Receives what has arrived. Returns whether there was something.
    pub(super) fn receive(&self, receive: Receive, now: Instant) -> bool {
        let received = self.receive_once(receive, now, None);
        if let Some(done) = received.unfinished
            && !thread::is_worker()
            && !thread::is_waiting()
        {
            self.receive_rest(receive, now, done);
        }
        received.any
    }

    /// Receives once. The result has [`Received::unfinished`] in two cases: a Write of the peer has arrived in part, and this call has completed
    /// the last posted request; or `unfinished` is the result of an earlier call, and the same Write is still incomplete.
    fn receive_once(&self, receive: Receive, now: Instant, unfinished: Option<u32>) -> Received {
        let bytes = |inner: &Inner| inner.tcp.as_ref().map_or(0, |t| t.counts.rx_bytes);
        self.with(|inner| {
            test_panic::working();
            let (before, awaited) = (bytes(inner), inner.conn.has_outstanding());
            self.progress(inner, now, receive, false);
            let any = bytes(inner) != before;
            let completed_all = awaited && !inner.conn.has_outstanding();
            if !completed_all && unfinished.is_none() {
                return Received {
                    any,
                    unfinished: None,
                };
            }
            let done = inner.conn.requests_done();
            let is_same = unfinished.is_none_or(|before| before == done);
            let rest = inner.tcp.as_ref().map(Tcp::rest);
            let is_partial = rest.is_some_and(|rest| inner.conn.is_receiving_write(rest));
            Received {
                any,
                unfinished: (is_same && is_partial).then_some(done),
            }
        })
    }

    /// Receives the rest of a Write that has arrived in part, after `done` requests of the peer.
    ///
    /// The acknowledgement of the program's last request arrives in front of the peer's next message. A program that waits for
    /// that message by reading its memory in a loop no longer polls its completion queue once its request is complete, so nothing
    /// would be received until the worker takes over. Without this function, `ib_write_lat` of 64 KiB took 160 µs instead of 20.
    #[cold]
    fn receive_rest(&self, receive: Receive, since: Instant, done: u32) {
        let mut now = clock::now();
        let mut last = now;
        while now - last < REST_PAUSE_MAX && now - since < REST_TIME_MAX {
            self.engine.renew_lease(now);
            let received = self.receive_once(receive, now, Some(done));
            if received.unfinished.is_none() {
                return;
            }
            std::hint::spin_loop();
            now = clock::now();
            if received.any {
                last = now;
            }
        }
        self.engine.hand_over();
    }

    /// Receives if there is something to receive, sends as much as possible, and delivers events.
    ///
    /// `flush`: delayed acknowledgements, and corked requests (which were kept back to be sent together), are sent too.
    pub(super) fn progress(&self, inner: &mut Inner, now: Instant, receive: Receive, flush: bool) {
        let mut outcome = Outcome::Open;
        let (mut receive, mut flush) = (receive, flush);
        let live = is_live(inner.conn.state());
        let delayed = inner.timers.get(Timer::Delay).is_some() && self.is_delayed(inner, now);
        let allowed = self.common.flow.as_ref().map(|flow| {
            let ends = inner.destroyed || inner.conn.state() == State::Error;
            let allowed = if ends {
                usize::MAX
            } else {
                flow.ask(&self.me, now)
            };
            inner.paced = allowed == 0;
            allowed
        });
        if inner.unwatched
            && live
            && let Some(tcp) = &inner.tcp
        {
            inner.unwatched = false;
            receive = Receive::All;
            if let Err(e) = self.engine.watch(inner.token, tcp.fd().get(), false) {
                self.cannot_watch(inner, &e);
                outcome = Outcome::Broken(e.raw_os_error().unwrap_or(libc::EIO));
            }
        }
        if let Some(tcp) = &mut inner.tcp
            && live
            && outcome == Outcome::Open
        {
            let was_shared = tcp.watch().is_some();
            if receive != Receive::Nothing {
                let socket = receive == Receive::All;
                let before = tcp.received_bytes();
                outcome = tcp.receive(self.engine, &mut inner.conn, now, socket);
                let open = outcome == Outcome::Open;
                let in_vain = open && before == Some(tcp.counts.rx_bytes);
                // An owed acknowledgement is sent when a later poll of the memory has received nothing. A call that also reads the
                // socket does not count: it may belong to the poll that received the request, and the program has not seen the
                // request yet.
                flush |= in_vain && !socket && tcp.take_owed_ack();
                flush |= self.common.context.is_polled()
                    && inner.conn.owes_ack_of_write(bounds::ACK_AT_ONCE);
                if !flush && tcp.is_drained() && inner.conn.is_quiet() && !tcp.has_trunk_event() {
                    // This case is frequent: most polls find nothing.
                    if in_vain && !tcp.must_wake_again() {
                        return;
                    }
                    // There is nothing to send. Returning here lets the program get the completion sooner.
                    let idle = open && !tcp.blocked && !tcp.changes_carrier();
                    if idle && inner.conn.next_offer().is_none() && !inner.conn.must_ack() {
                        self.schedule(inner);
                        return;
                    }
                }
            }
            match inner.conn.next_offer() {
                None => {}
                Some(Carrier::SharedMemory) => tcp.offer_shm(&mut inner.conn),
                Some(Carrier::Trunk) => self.offer_trunk(inner, now),
            }
            let Some(tcp) = &mut inner.tcp else { return };
            if outcome == Outcome::Open && tcp.has_trunk_event() {
                outcome = self.handle_trunk_event(inner, now);
            }
            let Some(tcp) = &mut inner.tcp else { return };
            let waited_for_socket = tcp.waits_for_socket();
            if !delayed && allowed != Some(0) {
                let before = tcp.counts.tx_bytes;
                if let Some(allowed) = allowed {
                    tcp.limit(allowed);
                }
                let sent = tcp.transmit(self.engine, &mut inner.conn, now, flush);
                if let Some(flow) = &self.common.flow {
                    let bytes = tcp.counts.tx_bytes - before;
                    inner.paced = tcp.is_limited();
                    flow.sent(&self.me, now, bytes, inner.paced);
                }
                if outcome == Outcome::Open {
                    outcome = sent;
                    if matches!(sent, Outcome::Broken(_)) {
                        tcp.receive_last(self.engine, &mut inner.conn, now);
                    }
                }
            }
            if let (false, Some(watch)) = (was_shared, tcp.watch()) {
                log!(
                    Info,
                    "qp 0x{:06x}: shares memory with its peer",
                    self.common.number
                );
                let memory: Arc<dyn PolledMemory> = Arc::clone(watch) as _;
                self.engine.add_memory(memory, self.me.clone());
            }
            // The carrier may have changed from the socket to memory meanwhile. A socket that stayed watched for being writable would
            // wake the worker all the time.
            let waits_for_socket = tcp.waits_for_socket();
            if waits_for_socket != waited_for_socket {
                self.engine
                    .want_write(inner.token, tcp.fd().get(), waits_for_socket);
            }
        }
        self.note_end(inner, outcome);
        if inner.conn.check_peer_left(now) {
            self.dial_soon(inner, now);
        }
        self.deliver_events(inner, outcome);
    }

    /// Handles the result of receiving and sending: tells the connection if the peer has closed the TCP connection, or if it is lost.
    pub(super) fn note_end(&self, inner: &mut Inner, outcome: Outcome) {
        let all_taken = |inner: &Inner| {
            let tcp = inner.tcp.as_ref();
            tcp.is_some_and(|tcp| tcp.is_all_taken(outcome))
        };
        match outcome {
            Outcome::Open => {}
            Outcome::Eof => {
                let all_taken = all_taken(inner);
                inner.conn.handle_eof(false, all_taken);
            }
            Outcome::Broken(e) => {
                log!(
                    Info,
                    "qp 0x{:06x}: connection lost: {}",
                    self.common.number,
                    std::io::Error::from_raw_os_error(e)
                );
                let all_taken = all_taken(inner);
                inner.conn.handle_eof(true, all_taken);
            }
        }
    }

    /// Sends requests that were just posted: [`Self::progress`] in one step, for the usual case that there is nothing
    /// else to do. Returns false if the caller has to call [`Self::progress`], which continues from here.
    ///
    /// If the peer shares memory, `now` may be any time in the past.
    pub(super) fn send_posted(&self, inner: &mut Inner, now: Instant) -> bool {
        let Some(tcp) = &mut inner.tcp else {
            return false;
        };
        let only_sends =
            !inner.unwatched && inner.timers.get(Timer::Delay).is_none() && inner.conn.only_sends();
        if !only_sends || self.common.flow.is_some() {
            return false;
        }
        let shared = tcp.is_shared();
        let Some(outcome) = tcp.transmit_posted(self.engine, &mut inner.conn, now) else {
            return false;
        };
        if outcome == Outcome::Open && inner.conn.only_sends() {
            // A deadline that was set for earlier requests is early enough for these. A peer that shares memory is never
            // probed, so its requests need no deadline.
            let is_covered = inner.probe_covered || shared;
            if !is_covered || inner.conn.ack_due() || tcp.must_wake_again() {
                self.schedule(inner);
            }
        } else {
            if matches!(outcome, Outcome::Broken(_)) {
                tcp.receive_last(self.engine, &mut inner.conn, now);
            }
            self.note_end(inner, outcome);
            self.deliver_events(inner, outcome);
        }
        true
    }

    /// Raises the events of the connection, and closes the socket of a connection that has ended.
    pub(super) fn deliver_events(&self, inner: &mut Inner, outcome: Outcome) {
        while let Some(event) = inner.conn.poll_event() {
            self.raise_event(inner, event);
        }
        let ended = outcome != Outcome::Open;
        let done = match inner.conn.end() {
            End::Closing => {
                let tcp = inner.tcp.as_ref();
                tcp.is_some_and(|tcp| tcp.is_drained() && !tcp.blocked)
            }
            End::Dead => inner.conn.is_attached() || ended,
            End::Open => false,
        };
        if (done || ended) && inner.tcp.is_some() {
            inner.timers.stop(Timer::Close);
            inner.timers.stop(Timer::OwnClosed);
            inner.close_turns = 0;
            self.drop_token(inner);
            if let Some(tcp) = self.take_tcp(inner) {
                if ended {
                    drop(tcp);
                } else {
                    inner.draining = drain(self.engine, tcp.into_fd());
                }
            }
            inner.notify(Notice::Gone);
        } else if inner.conn.end() == End::Closing
            && inner.timers.get(Timer::Close).is_none()
            && let Some(tcp) = &inner.tcp
        {
            inner.taken_at_close = tcp.taken_by_peer();
            inner.close_turns += 1;
            self.start_timer(inner, Timer::Close, clock::now() + CLOSE_TIMEOUT);
        }
        self.schedule(inner);
    }

    /// Sets the deadlines of the connection, and schedules a delayed acknowledgement.
    pub(super) fn schedule(&self, inner: &mut Inner) {
        if let Some(at) = inner.conn.poll_timeout() {
            self.arm_deadline(inner, at);
            inner.probe_covered = true;
        }
        if inner.conn.ack_due() && inner.timers.get(Timer::Delay).is_none() && !inner.paced {
            let by_memory = inner.tcp.as_ref().is_some_and(Tcp::schedule_ack);
            if !by_memory {
                self.schedule_ack();
            }
        }
        if inner.tcp.as_ref().is_some_and(Tcp::must_wake_again)
            && inner.timers.get(Timer::Wake).is_none()
        {
            self.start_timer(inner, Timer::Wake, clock::now() + WAKE_PAUSE);
        }
    }

    /// Starts a timer.
    pub(super) fn start_timer(&self, inner: &mut Inner, timer: Timer, at: Instant) {
        inner.timers.set(timer, at);
        self.arm_deadline(inner, at);
    }

    /// Requests that [`Source::timeout`](crate::reactor::Source::timeout) is called at `at` at the latest.
    fn arm_deadline(&self, inner: &mut Inner, at: Instant) {
        if inner.deadline.is_some_and(|t| t <= at) {
            return;
        }
        if inner.token == Token::NONE {
            let Some(me) = self.me.upgrade() else { return };
            inner.token = self.engine.reserve(me);
        }
        inner.deadline = Some(at);
        self.engine.deadline(inner.token, at);
    }

    /// Whether nothing may be sent because of an injected delay.
    fn is_delayed(&self, inner: &mut Inner, now: Instant) -> bool {
        let Some(until) = inner.timers.get(Timer::Delay) else {
            return false;
        };
        if until <= now || inner.destroyed {
            inner.timers.stop(Timer::Delay);
            return false;
        }
        self.arm_deadline(inner, until);
        true
    }

    /// Handles the expired timers.
    pub(super) fn handle_timeout(&self, inner: &mut Inner, now: Instant) {
        inner.deadline = None;
        inner.probe_covered = false;
        let mut flush = false;
        while let Some(timer) = inner.timers.take_expired(now) {
            let failed = inner.conn.state() == State::Error;
            match timer {
                Timer::Redial => {
                    if inner.tcp.is_none() && inner.route.is_some() && !failed {
                        self.dial(inner, now);
                    }
                }
                Timer::PeerDials => {
                    if inner.tcp.is_none() && !failed {
                        log!(
                            Info,
                            "qp 0x{:06x}: the peer did not connect",
                            self.common.number
                        );
                        inner.conn.handle_not_connected();
                    }
                }
                Timer::FirstMessage => {
                    if !inner.conn.has_started() {
                        log!(
                            Info,
                            "qp 0x{:06x}: the peer requested a connection and sent no message",
                            self.common.number
                        );
                        inner.conn.leave("the peer sent no message");
                    }
                }
                Timer::Close => {
                    let taken = inner.tcp.as_ref().map(Tcp::taken_by_peer);
                    let is_stuck = taken == Some(inner.taken_at_close)
                        && inner.timers.get(Timer::Delay).is_none()
                        || inner.close_turns >= CLOSE_TURNS;
                    if inner.conn.end() == End::Closing && is_stuck {
                        let outcome = Outcome::Broken(libc::ETIMEDOUT);
                        self.note_end(inner, outcome);
                        self.deliver_events(inner, outcome);
                    }
                }
                Timer::Wake => {
                    if let Some(tcp) = &mut inner.tcp {
                        tcp.wake_again();
                    }
                }
                Timer::OwnClosed => {
                    if let Some(tcp) = inner.tcp.as_mut().filter(|tcp| tcp.awaits_end()) {
                        if tcp.may_end_later(CLOSE_TURNS) {
                            self.start_timer(inner, timer, now + CLOSE_TIMEOUT);
                        } else {
                            self.note_end(inner, Outcome::Eof);
                            self.deliver_events(inner, Outcome::Eof);
                        }
                    }
                }
                // Delayed acknowledgements are sent together with the data that the injected delay has held back.
                Timer::Delay => flush = true,
            }
        }
        if let Some(at) = inner.timers.next() {
            self.arm_deadline(inner, at);
        }
        inner.conn.handle_timeout(now);
        self.progress(inner, now, Receive::Nothing, flush);
    }

    // ------------------------------------------------------------------ events

    fn raise_event(&self, inner: &mut Inner, what: AsyncEvent) {
        // The shared receive queue outlives the queue pair.
        if inner.destroyed && what != AsyncEvent::SrqLimit {
            return;
        }
        // If connections end because the device is broken, only the device raises an event.
        let error = matches!(
            what,
            AsyncEvent::QpFatal | AsyncEvent::QpRequest | AsyncEvent::QpAccess
        );
        if error && self.engine.is_broken() {
            return;
        }
        match what {
            AsyncEvent::Started => inner.notify(Notice::Started),
            AsyncEvent::PeerGone => inner.notify(Notice::Gone),
            _ => self.common.raise_event(what),
        }
    }
}
