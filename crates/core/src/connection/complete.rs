//! Completion of requests, acknowledgements, and how a queue pair fails.

use std::time::Instant;

use super::Connection;
use super::stream::{End, Peer, Response};
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

    /// The queue pair fails: every posted request completes, in order.
    ///
    /// `first` names the request that is to blame and its status; without a number it is the oldest that is not done.
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
            let code = TermCode::encode(&error);
            let terminate = context.terminate(code);
            // RFC 5044 §7.1.2 [mpa-responder-waits]: before the first FPDU was received no Terminate may be sent.
            if s.may_send {
                s.responses
                    .push_back(Response::Terminate(terminate::message(&terminate)));
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

    /// Fails the queue pair because of a local error, and closes the stream.
    pub(super) fn give_up(&mut self, why: &'static str, event: Option<AsyncEvent>) {
        self.fail(None, why, event);
        if let Some(s) = &mut self.stream
            && s.peer == Peer::Standard
            && s.end == End::Open
            && s.may_send
            && !s.terminated
        {
            // RFC 5040 §7.1 (1) [term-local]: instead of the request a Terminate, without headers.
            let code = TermCode::encode(&PeerError::RdmapLocal);
            let terminate = TermContext::local().terminate(code);
            s.terminated = true;
            s.responses.clear();
            s.responses
                .push_back(Response::Terminate(terminate::message(&terminate)));
        }
        self.leave(why);
    }

    /// Fails the queue pair if a completion was lost. Called at the end of each input and command.
    pub(super) fn after(&mut self) {
        if self.base.must_fail() {
            self.give_up("a completion queue overflowed", Some(AsyncEvent::QpFatal));
        }
    }

    /// The peer has no receive for request message `seq`: go back to the request it belongs to and wait.
    pub(super) fn handle_rnr(&mut self, seq: u32, timer: u8, now: Instant) {
        let rnr_retry = self.base.attr.rnr_retry;
        let Some(s) = self.stream.as_mut() else {
            return;
        };
        let acked = s.acked;
        let found = self.base.sq.taken_mut().find(|(_, p)| {
            let first = p.seq.0.wrapping_sub(acked);
            let last = p.seq.1.wrapping_sub(acked);
            let at = seq.wrapping_sub(acked);
            first <= at && at <= last && p.phase != Phase::Done
        });
        let Some((number, posted)) = found else {
            return;
        };
        // IBA 9.7.5.2.8 [rnr-retry]: 7 means to try for ever.
        if rnr_retry != 7 {
            if posted.rnr_tries >= rnr_retry {
                // Nothing behind it was done: take it all back, so that this is the last one taken.
                self.base.sq.rewind(number);
                self.base.sq.advance();
                self.drop_from(number);
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
        // A Write with immediate whose Write was done already repeats the immediate alone.
        posted.skip = seq.wrapping_sub(first);
        self.base.sq.rewind(number);
        s.seq = first.wrapping_sub(1);
        (s.next_send_msn, s.next_read_msn) = msn;
        self.drop_from(number);
        let Some(s) = self.stream.as_mut() else {
            return;
        };
        self.not_ready += 1;
        let wait = std::time::Duration::from_micros(crate::verbs::qp::rnr_timer_us(timer));
        s.rnr_until = Some(now + wait);
        s.restart = Some(seq);
        // What is sent again says again for whom.
        s.selected_srq = None;
        // While the queue drains, what was taken back counts as not begun.
        self.retire();
    }

    /// Forgets what is under way of request `number` and those behind it.
    fn drop_from(&mut self, number: u64) {
        let Some(s) = self.stream.as_mut() else {
            return;
        };
        s.reads
            .retain(|r| r.request < number || r.request == u64::MAX);
        s.atomics.retain(|a| a.request < number);
        s.parts.clear();
        if s.current.as_ref().is_some_and(|c| c.request.is_some()) {
            s.current = None;
        }
    }

    /// All of the peer's side up to `seq` is done. False if it cannot be.
    pub(super) fn handle_ack(&mut self, seq: u32) -> bool {
        let Some(s) = self.stream.as_mut() else {
            return true;
        };
        let ahead = seq.wrapping_sub(s.acked);
        if ahead > s.seq.wrapping_sub(s.acked) {
            return false;
        }
        s.acked = seq;
        s.ack_scan = s.ack_scan.max(self.base.sq.front_number());
        while let Some(posted) = self.base.sq.get_mut(s.ack_scan) {
            let known = matches!(posted.phase, Phase::Sent | Phase::Done);
            // Serial arithmetic: whether its last message comes after what is acknowledged.
            let after = posted.seq.1.wrapping_sub(s.acked);
            if !known || (after != 0 && after < 1 << 31) {
                break;
            }
            if posted.phase == Phase::Sent && posted.answers == 0 {
                posted.phase = Phase::Done;
            }
            s.ack_scan += 1;
        }
        self.retire();
        true
    }
}
