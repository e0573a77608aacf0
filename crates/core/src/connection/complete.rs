//! Completion of requests, acknowledgements, and how a queue pair fails.

use std::time::{Duration, Instant};

use super::Connection;
use super::stream::{End, Peer};
use super::timers::{Timer, Timers};
use crate::ddp::rx::Violation;
use crate::error::{PeerError, TermCode};
use crate::observe::Step;
use crate::rdmap::terminate::{self, TermContext};
use crate::verbs::event::AsyncEvent;
use crate::verbs::qp::State;
use crate::verbs::sq::{Phase, Retired};
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::wire::control::Control;

impl Connection {
    /// Completes the requests at the front of the send queue that are done.
    pub(super) fn retire(&mut self) {
        while let Some(posted) = self.base.sq.retire() {
            self.base.complete_send(&posted, Status::Success);
        }
        if let Some(why) = self.base.sq.front_failed() {
            self.give_up(why, None);
            return;
        }
        self.base.check_drained();
    }

    pub(super) fn complete_recv(&mut self, entry: Completion) {
        self.received += u64::from(entry.status == Status::Success);
        self.base.complete_recv(entry);
    }

    /// Fails the queue pair: every posted request completes, in order.
    ///
    /// `first` is the number of the request that caused the failure, and its status. Without a number the cause is the
    /// oldest request that is not done. `None`: no request caused the failure, and all that are not done are flushed.
    pub(super) fn fail(
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
        self.timers = Timers::default();
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
            // It is not known whether requests after an unfinished one are done.
            flushing |= status != Status::Success;
            self.base.complete_send(&posted, status);
        }
        if let Some(s) = &mut self.stream {
            s.requester.clear();
            s.direct = None;
            s.cut_request();
        }
        if let Some(receive) = self.take_receive_under_way() {
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

    pub(super) fn flush_sq(&mut self) {
        while let Some(posted) = self.base.sq.pop() {
            self.base.complete_send(&posted, Status::Flushed);
        }
    }

    /// Ends the stream because of a violation by the peer: sends a Terminate and fails the queue pair.
    pub(super) fn fail_by_peer(&mut self, violation: Violation, context: &TermContext) {
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
            s.requester.drop_parts();
            s.cut_request();
            // Earlier requests of the peer were valid, and are still answered.
            match (s.peer, status) {
                (Peer::Anywarp, Some(status)) => {
                    s.responder.push_control(Control::Nak {
                        seq: s.responder.done().wrapping_add(1),
                        status: status as u8,
                    });
                }
                _ => s.push_ack(),
            }
            let code = TermCode::encode(&error);
            let terminate = context.terminate(code);
            // RFC 5044 §7.1.2 [mpa-responder-waits]: before the first FPDU was received no Terminate may be sent.
            if s.may_send {
                s.push_terminate(terminate::message(&terminate));
            } else {
                s.responder.clear();
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

    /// Fails the queue pair because of a local error, and closes the stream.
    pub(super) fn give_up(&mut self, why: &'static str, event: Option<AsyncEvent>) {
        self.fail(None, why, event);
        if let Some(s) = &mut self.stream
            && s.peer == Peer::Standard
            && s.end == End::Open
            && s.may_send
            && !s.terminated
        {
            // RFC 5040 §7.1 (1) [term-local]: a Terminate without headers is sent instead of the request.
            let code = TermCode::encode(&PeerError::RdmapLocal);
            let terminate = TermContext::local().terminate(code);
            s.responder.clear();
            s.push_terminate(terminate::message(&terminate));
        }
        self.leave(why);
    }

    /// Fails the queue pair if a completion was lost. Called at the end of [`Self::handle_rx`], [`Self::handle_written`],
    /// [`Self::handle_carrier_ack`] and [`Self::poll_tx`], because a failure in the middle of them would complicate them. The other methods
    /// complete requests only when the queue pair fails anyway.
    pub(super) fn after(&mut self) {
        if self.base.must_fail() {
            self.give_up("a completion queue overflowed", Some(AsyncEvent::QpFatal));
        }
    }

    /// Handles a receiver-not-ready for request message `seq`: its request is sent again after the RNR timer.
    pub(super) fn handle_rnr(&mut self, seq: u32, timer: u8, now: Instant) {
        let rnr_retry = self.base.attr.rnr_retry;
        let Some(s) = self.stream.as_mut() else {
            return;
        };
        let found = self
            .base
            .sq
            .taken_mut()
            .find(|(_, posted)| s.requester.is_message_of(seq, posted));
        let Some((number, posted)) = found else {
            return;
        };
        // IBA 9.7.5.2.8: 7 means to try forever.
        if rnr_retry != 7 {
            if posted.rnr_tries >= rnr_retry {
                // The peer executed none of the later requests. The queue is rewound, so that this request is the last one taken from it.
                self.base.sq.rewind(number);
                self.base.sq.advance();
                s.requester.forget_from(number);
                s.cut_request();
                self.fail_request(
                    number,
                    Status::RnrRetryExceeded,
                    "the peer had no receive posted for too long",
                );
                return;
            }
            posted.rnr_tries += 1;
        }
        let (first, msn) = (posted.seq.0, posted.msn_before);
        // If the Write of a Write with immediate is done, only the immediate is sent again.
        posted.skip = seq.wrapping_sub(first);
        self.base.sq.rewind(number);
        s.requester.go_back(number, seq, first, msn);
        s.cut_request();
        self.not_ready += 1;
        let wait = Duration::from_micros(crate::verbs::qp::rnr_timer_us(timer));
        self.timers.start(Timer::Rnr, now + wait);
        // In SQD the requests after the rewound position count as not begun, so the queue may be drained now.
        self.retire();
    }

    /// Handles an acknowledgement of all request messages up to `seq` that the carrier transported. It may be older than
    /// an acknowledgement that was handled before.
    #[inline]
    pub fn handle_carrier_ack(&mut self, seq: u32) {
        let Some(s) = &self.stream else { return };
        if !s.requester.is_new_ack(seq) || s.end != End::Open || self.base.state == State::Error {
            return;
        }
        if !self.handle_ack(seq) {
            let error = PeerError::Control("an acknowledgement of a request that was not sent");
            self.fail_by_peer(Violation::answer(error), &TermContext::local());
        }
        self.after();
    }

    /// Handles an acknowledgement of all request messages up to `seq`. Returns false if `seq` was not sent.
    pub(super) fn handle_ack(&mut self, seq: u32) -> bool {
        let Some(s) = self.stream.as_mut() else {
            return true;
        };
        let is_valid = s.requester.acknowledge(seq, &mut self.base.sq);
        if is_valid {
            self.retire();
        }
        is_valid
    }
}
