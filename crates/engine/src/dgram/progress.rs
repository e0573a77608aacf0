//! Receives and sends the datagrams of a queue pair.
//!
//! A *turn* is what a queue pair or its port does at a time: it receives what has arrived, or sends what is to be sent, up to a limit.
//! A *run* is a number of datagrams that one system call sends or receives.

use std::sync::Arc;
use std::time::Instant;

use anywarp_core::bounds;
use anywarp_core::datagram::{Arrival, TxDatagram};
use anywarp_core::qos::level_of_class;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::State;
use anywarp_core::wire::pretty;

use super::cork::Decision;
use super::{DgramQp, Inner};
use crate::clock;
use crate::log;
use crate::reactor::{DelayedAck, Token};
use crate::sys::Io;

/// Number of datagrams received in a turn after which answers are sent, for unreliable services.
const ANSWER_EACH: usize = 24;
/// As [`ANSWER_EACH`], for reliable services. Their senders request an acknowledgement once, at the end of a run, because
/// handling an acknowledgement costs as much as handling several datagrams.
const RELIABLE_ANSWER_EACH: usize = 64;
/// Number of received bytes after which answers are sent. Long datagrams are few, but their sender waits for a report
/// or an acknowledgement too.
const ANSWER_BYTES: usize = 128 << 10;
/// Number of bytes that a queue pair sends in one turn, so that a busy queue pair does not delay others.
const TURN_BYTES: usize = 1 << 20;

/// The datagrams at the front of a list that have this traffic class, up to the one with which their total length reaches `bytes`.
fn of_class(list: &[TxDatagram], class: u8, bytes: usize) -> &[TxDatagram] {
    let mut left = bytes;
    let count = list.iter().take_while(|datagram| {
        let fits = left > 0 && datagram.traffic_class == class;
        left = left.saturating_sub(datagram.bytes.len());
        fits
    });
    let count = count.count();
    list.get(..count).unwrap_or(list)
}

impl DgramQp {
    /// Sends posted requests, or corks them (keeps them back, to send them together with the next ones).
    #[inline]
    pub(super) fn send_or_cork(&self, inner: &mut Inner) {
        let engine = self.common.context.engine;
        let (polls, posts) = (engine.polls(), engine.datagram_posts());
        if inner.cork.goes_on(polls, posts) {
            engine.cork_more();
            return;
        }
        let now = clock::now();
        inner.set_now(now);
        match inner.cork.decide(polls, engine.nanos(now), posts) {
            Decision::SendNow => {
                self.transmit(inner);
                engine.on_post(now);
            }
            Decision::Cork { first } => {
                let me = if first { self.me.upgrade() } else { None };
                let me = me.map(|me| me as Arc<dyn DelayedAck>);
                engine.cork_since(polls.idle, now, me);
            }
        }
    }

    /// Drops datagrams that are not sent yet.
    pub(super) fn discard_pending(&self, inner: &mut Inner) {
        inner.pending.clear();
        inner.sent = 0;
        if let Some(faults) = &self.common.faults {
            faults.forget();
        }
    }

    /// Receives datagrams, after fault injection. `now`: a time shortly before they were received.
    pub(super) fn deliver_run<'a>(
        &self,
        arrival: &Arrival,
        run: impl Iterator<Item = &'a [u8]>,
        now: Instant,
    ) {
        let mut inner = self.lock_timeless();
        // Only reliable services measure how long an answer takes.
        let now = if self.kind.is_reliable() {
            clock::now()
        } else {
            now
        };
        inner.set_now(now);
        if inner.destroyed {
            return;
        }
        let (number, from) = (self.common.number, arrival.from);
        let answer = if self.kind.is_reliable() {
            RELIABLE_ANSWER_EACH
        } else {
            ANSWER_EACH
        };
        let mut run = run.peekable();
        while run.peek().is_some() {
            let Inner {
                core, unanswered, ..
            } = &mut *inner;
            let is_answer_due =
                |&(datagrams, bytes): &(usize, usize)| datagrams >= answer || bytes >= ANSWER_BYTES;
            let part = std::iter::from_fn(|| {
                if is_answer_due(unanswered) {
                    return None;
                }
                let bytes = run.next()?;
                *unanswered = (unanswered.0 + 1, unanswered.1 + bytes.len());
                log!(
                    Trace,
                    "qp 0x{number:06x}: from {from}: {}",
                    pretty::udp(bytes)
                );
                Some(bytes)
            });
            core.handle_rx_run(arrival, part, |bytes, why| {
                log!(
                    Debug,
                    "qp 0x{number:06x}: dropped a datagram from {from}: {why:?}: {}",
                    pretty::udp(bytes)
                );
            });
            // One answer for many datagrams saves work, but it must be sent before the sender's window is used up.
            if is_answer_due(unanswered) {
                *unanswered = (0, 0);
                if !inner.blocked && inner.core.wants_tx() {
                    self.transmit(&mut inner);
                }
            }
        }
    }

    /// Sends the answers to received datagrams.
    pub(super) fn answer(&self) {
        // The time was set when the datagrams were received.
        let mut inner = self.lock_timeless();
        if inner.destroyed {
            return;
        }
        inner.unanswered = (0, 0);
        if !inner.blocked && inner.core.wants_tx() {
            self.transmit(&mut inner);
        } else {
            self.schedule(&mut inner);
        }
        self.schedule_ack(&inner);
        self.deliver_events(&mut inner);
    }

    /// Schedules a delayed acknowledgement, if there is one.
    pub(super) fn schedule_ack(&self, inner: &Inner) {
        if inner.core.ack_due() {
            self.common.schedule_ack(|| self.me.upgrade());
        }
    }

    /// Sends acknowledgements and corked datagrams before the queue pair ends.
    pub(super) fn flush_before_end(&self, inner: &mut Inner) {
        if inner.core.ack_due() {
            inner.core.flush();
        } else if !inner.cork.has_posted() {
            return;
        }
        if !inner.blocked {
            self.transmit(inner);
        }
    }

    /// Sends pending datagrams after an event of the core.
    pub(super) fn send_pending(&self, inner: &mut Inner) {
        if inner.core.wants_tx() || inner.core.state() == State::Error {
            self.state_changed(inner);
        } else {
            self.schedule(inner);
            self.deliver_events(inner);
        }
    }

    /// Discards or sends pending datagrams, after the state may have changed.
    pub(super) fn state_changed(&self, inner: &mut Inner) {
        if matches!(inner.core.state(), State::Reset | State::Error) {
            self.discard_pending(inner);
        }
        if !inner.blocked {
            self.transmit(inner);
        }
        self.deliver_events(inner);
    }

    /// Sends as many datagrams as possible, and sets the deadlines.
    pub(super) fn transmit(&self, inner: &mut Inner) {
        let (mut bytes, mut more) = (0, true);
        inner.cork.sending();
        loop {
            if inner.sent >= inner.pending.len() {
                for datagram in inner.pending.drain(..) {
                    inner.core.recycle(datagram);
                }
                inner.sent = 0;
                if more {
                    more = inner.core.poll_tx(&mut inner.pending);
                }
                if inner.pending.is_empty() {
                    self.schedule(inner);
                    return;
                }
                if bytes >= TURN_BYTES {
                    break;
                }
            }
            let rest = inner.pending.get(inner.sent..).unwrap_or(&[]);
            let rest = match &self.common.flow {
                None => rest,
                Some(flow) => {
                    let class = rest.first().map_or(0, |d| d.traffic_class);
                    flow.set_level(level_of_class(class));
                    of_class(rest, class, flow.ask(&self.me, clock::now()))
                }
            };
            if rest.is_empty() {
                // The simulated link (`qos`) is busy, and will call this queue pair when the queue pair may send.
                self.schedule(inner);
                return;
            }
            inner.calls += 1;
            let sent = match &self.common.faults {
                None => self.udp.send(rest, inner.source, &mut inner.run_max),
                Some(faults) => {
                    faults.send(self.udp.socket(), rest, inner.source, &mut inner.run_max)
                }
            };
            match sent {
                Ok(n) => {
                    let sent = rest.iter().take(n).map(|d| d.bytes.len()).sum::<usize>();
                    bytes += sent;
                    inner.sent += n;
                    inner.core.handle_written(n);
                    if let Some(flow) = &self.common.flow {
                        let more = inner.sent < inner.pending.len() || inner.core.wants_tx();
                        flow.sent(&self.me, clock::now(), sent as u64, more);
                    }
                }
                // The number of the destination contains no port, so no queue pair has it. As in a network, a datagram to such a
                // queue pair is lost, and its request succeeds. eRPC waits for such a request to learn that those before it are done.
                Err(Io::Broken(_)) if rest.first().is_some_and(|d| d.to.port() == 0) => {
                    inner.sent += 1;
                    inner.core.handle_written(1);
                    more = true;
                }
                Err(Io::Broken(e)) => {
                    static LIMIT: log::Rarely = log::Rarely::new();
                    if LIMIT.now() {
                        let to = rest.first().map(|d| d.to);
                        let e = std::io::Error::from_raw_os_error(e);
                        log!(
                            Warn,
                            "qp 0x{:06x}: cannot send to {to:?}: {e}",
                            self.common.number
                        );
                    }
                    inner.sent += 1;
                    inner.core.handle_send_error();
                    more = true;
                }
                Err(_) => break,
            }
            if inner.core.state() == State::Error {
                // A completion queue overflowed.
                self.discard_pending(inner);
            }
        }
        // Sending continues when the socket is writable.
        inner.blocked = true;
        if let Some(flow) = &self.common.flow {
            flow.sent(&self.me, clock::now(), 0, false);
        }
        let next = inner.pending.get(inner.sent).map(|d| d.to);
        self.udp.wait_writable(self.me.clone(), next);
        self.schedule(inner);
    }

    /// Sets the deadline of the core's timers, and of the current stall (a wait for a report of the peer).
    pub(super) fn schedule(&self, inner: &mut Inner) {
        if inner.destroyed {
            return;
        }
        let stall = inner.core.stall();
        if stall != inner.stall.map(|(number, _)| number) {
            inner.stall = stall.map(|number| (number, clock::now()));
        }
        let stall = inner.stall.map(|(_, since)| since + bounds::DATAGRAM_STALL);
        let core = inner.core.poll_timeout().map(|at| clock::start() + at);
        let Some(at) = stall.into_iter().chain(core).min() else {
            return;
        };
        if inner.deadline.is_some_and(|t| t <= at) {
            return;
        }
        if inner.token == Token::NONE {
            let Some(me) = self.me.upgrade() else { return };
            inner.token = self.common.context.engine.reserve(me);
        }
        inner.deadline = Some(at);
        self.common.context.engine.deadline(inner.token, at);
    }

    /// Raises the events of the core.
    pub(super) fn deliver_events(&self, inner: &mut Inner) {
        while let Some(what) = inner.core.poll_event() {
            // The shared receive queue outlives the queue pair.
            if !inner.destroyed || what == AsyncEvent::SrqLimit {
                self.common.raise_event(what);
            }
        }
        if let Some(host) = inner.core.poll_guessed() {
            static LIMIT: log::Throttle = log::Throttle::new();
            if let Some(left_out) = LIMIT.line(clock::now()) {
                log!(
                    Warn,
                    "qp 0x{:06x}: packets from {host} echo wrong tokens; for the rest of this second this queue pair \
                     accepts only known peers from that host ({left_out} lines left out)",
                    self.common.number
                );
            }
        }
    }
}
