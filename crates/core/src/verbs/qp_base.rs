//! State and queues that queue pairs of all kinds have: attributes, requests, completions and events.
//!
//! [`Connection`](crate::connection::Connection) and [`DatagramQp`](crate::datagram::DatagramQp) each contain one
//! `QpBase`, and add the transport of requests to the peer.

use std::collections::VecDeque;
use std::sync::Arc;

use super::counter::{Counter, Counters, Ops};
use super::cq::Cq;
use super::event::AsyncEvent;
use super::mr::AccessError;
use super::qp::{self, Attr, QpType, State, mask};
use super::rnic::Rnic;
use super::rq::RecvQueue;
use super::sq::{Retired, SendQueue};
use super::wc::{Completion, Status, WcOp};
use super::wr::{Bind, RecvRequest, WorkRequest};
use crate::error::Misuse;
use crate::observe::Step;
use crate::wire::rdmap::Opcode;

/// The parts that a queue pair is created from.
#[derive(Debug)]
pub struct Parts {
    /// The device.
    pub rnic: Arc<Rnic>,
    /// Queue pair number.
    pub qpn: u32,
    /// Number of the protection domain.
    pub pd: u32,
    /// Completion queue of send requests.
    pub send_cq: Arc<Cq>,
    /// Completion queue of receives.
    pub recv_cq: Arc<Cq>,
    /// Source of posted receives.
    pub rq: RecvQueue,
    /// Sizes of the queues.
    pub capacity: qp::Capacity,
    /// Whether every send request makes a completion (`sq_sig_all`).
    pub sig_all: bool,
}

/// The part that queue pairs of all kinds have in common.
#[derive(Debug)]
pub(crate) struct QpBase {
    pub(crate) rnic: Arc<Rnic>,
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    sig_all: bool,
    pub(crate) state: State,
    pub(crate) attr: Attr,
    pub(crate) sq: SendQueue,
    pub(crate) rq: RecvQueue,
    /// Asynchronous events that were not polled yet.
    pub(crate) events: VecDeque<AsyncEvent>,
    /// Whether a completion found no room in its queue.
    overflowed: bool,
    /// [`AsyncEvent::LastWqe`] was raised since the last reset.
    last_wqe_raised: bool,
    /// [`AsyncEvent::Established`] was raised since the last reset.
    established_raised: bool,
    /// [`AsyncEvent::SqDrained`] is to be raised when no request is outstanding.
    drain_event_wanted: bool,
    /// Completion counters that are attached.
    counters: Option<Box<Counters>>,
    /// Whether windows were bound since the last reset.
    has_windows: bool,
}

impl QpBase {
    /// A queue pair in RESET.
    pub(crate) fn new(parts: Parts) -> Self {
        let c = &parts.capacity;
        Self {
            sq: SendQueue::new(c.max_send_wr, c.max_send_sge, c.max_inline),
            rnic: parts.rnic,
            qpn: parts.qpn,
            pd: parts.pd,
            send_cq: parts.send_cq,
            recv_cq: parts.recv_cq,
            sig_all: parts.sig_all,
            state: State::Reset,
            attr: Attr::default(),
            rq: parts.rq,
            events: VecDeque::new(),
            overflowed: false,
            last_wqe_raised: false,
            established_raised: false,
            drain_event_wanted: false,
            counters: None,
            has_windows: false,
        }
    }

    // ------------------------------------------------------------------ posting

    /// Adds a send request, which `fill` writes directly into the entry of the queue, if the state allows posting (`ibv_post_send(3)`).
    #[inline]
    pub(crate) fn post_send_with(
        &mut self,
        fill: impl FnOnce(&mut WorkRequest, &RecvQueue) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        match self.state {
            State::Reset | State::Init | State::Rtr => {
                return Err(Misuse::WrongState(
                    "post_send before the queue pair is ready to send",
                ));
            }
            State::Rts | State::Sqd | State::Sqe | State::Error => {}
        }
        if self.lacks_places(1) {
            return Err(Misuse::QueueFull);
        }
        let rq = &self.rq;
        self.sq.post_with(|into| fill(into, rq))?;
        if let (Some(observer), Some(posted)) = (&self.rnic.observer, self.sq.last()) {
            observer.step(self.qpn, &Step::Post(&posted.request));
        }
        Ok(())
    }

    /// Returns whether the send queue has no room for `more` requests, if completed requests whose completions were not polled count too.
    ///
    /// With an adapter, a program gets the place of a request back only when it polls the completion. A program that posts until the queue
    /// is full, and then polls, therefore needs a completion queue of no more entries than the send queue has. Here places become free
    /// earlier, so this rule is applied when the completion queue could overflow.
    #[inline]
    fn lacks_places(&self, more: usize) -> bool {
        let all = self.sq.len() + more;
        // The completion queue may also hold entries of other requests, so those of this queue pair's send requests are counted. That
        // takes the lock of the queue.
        self.send_cq.may_overflow(all, self.sq.max_wr())
            && all + self.send_cq.sends_of(self.qpn) > self.sq.max_wr()
    }

    /// Checks whether all these send requests can be posted now. `check` has the rules of the kind of queue pair.
    pub(crate) fn check_sends(
        &self,
        requests: &[WorkRequest],
        check: impl Fn(&RecvQueue, &WorkRequest) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        requests
            .iter()
            .try_for_each(|request| check(&self.rq, request))?;
        if self.lacks_places(requests.len()) {
            return Err(Misuse::QueueFull);
        }
        // In other states, requests complete at once and need no room.
        let stay = matches!(self.state, State::Rts | State::Sqd);
        self.sq.check(requests, stay)
    }

    /// Adds a receive (`ibv_post_recv(3)`).
    #[inline]
    pub(crate) fn post_recv(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        if self.state == State::Reset {
            return Err(Misuse::WrongState("post_recv on a queue pair in RESET"));
        }
        self.rq.post(request)?;
        if self.state == State::Error {
            self.flush_rq();
        }
        Ok(())
    }

    // ------------------------------------------------------------------ states

    /// Checks a change of attributes and applies it (`ibv_modify_qp(3)`). Returns the new state, which the caller
    /// enters.
    pub(crate) fn modify(
        &mut self,
        kind: QpType,
        attr_mask: u32,
        next: Option<State>,
        expected_state: Option<State>,
        attr: &Attr,
    ) -> Result<State, Misuse> {
        let to = qp::check_modify(kind, self.state, next, attr_mask, attr, expected_state)?;
        self.attr.merge(attr_mask, attr);
        Ok(to)
    }

    /// Enters SQD, or changes attributes in it.
    pub(crate) fn enter_sqd(&mut self, attr_mask: u32) {
        // Only the call that enters SQD decides whether SQ_DRAINED is raised: a second call while the queue drains must
        // not cancel the event.
        if self.state != State::Sqd {
            self.drain_event_wanted = attr_mask & mask::EN_SQD_ASYNC_NOTIFY != 0;
        }
        self.state = State::Sqd;
        self.check_drained();
    }

    /// Raises SQ_DRAINED when it is wanted and nothing is outstanding.
    pub(crate) fn check_drained(&mut self) {
        if self.state == State::Sqd && self.drain_event_wanted && !self.sq.has_outstanding() {
            self.drain_event_wanted = false;
            self.events.push_back(AsyncEvent::SqDrained);
        }
    }

    /// Called for each segment of a message of the peer. The first one in RTR raises an event, after which the program can move the queue
    /// pair to RTS.
    #[inline]
    pub(crate) fn note_arrival(&mut self, opcode: Opcode) {
        if self.state == State::Rtr && !self.established_raised && opcode != Opcode::Control {
            self.established_raised = true;
            self.events.push_back(AsyncEvent::Established);
        }
    }

    /// Returns whether the state is SQD and requests are outstanding.
    pub(crate) fn is_draining(&self) -> bool {
        self.state == State::Sqd && self.sq.has_outstanding()
    }

    /// Returns to RESET: removes posted requests, attributes, and completions that were not polled.
    pub(crate) fn reset(&mut self) {
        self.sq.clear();
        self.rq.clear();
        self.state = State::Reset;
        self.attr = Attr::default();
        self.overflowed = false;
        self.last_wqe_raised = false;
        self.established_raised = false;
        self.drain_event_wanted = false;
        self.purge();
        self.unbind_windows();
    }

    /// Binds a window, or unbinds it.
    pub(crate) fn bind(&mut self, bind: &Bind) -> Result<(), AccessError> {
        self.rnic.regions.bind(bind, self.pd, self.qpn)?;
        self.has_windows = true;
        Ok(())
    }

    /// Unbinds the windows of type 2 that belong to this queue pair.
    // RFC 5041 §8.2 [stag-stream]: after a reset the queue pair has another stream, and after its destruction another queue pair may get
    // its number.
    pub(crate) fn unbind_windows(&mut self) {
        if std::mem::take(&mut self.has_windows) {
            self.rnic.regions.unbind_windows(self.pd, self.qpn);
        }
    }

    /// Drops the completions that were not polled.
    pub(crate) fn purge(&self) {
        self.send_cq.purge(self.qpn);
        self.recv_cq.purge(self.qpn);
    }

    /// Whether a completion was lost, so that the queue pair has to fail.
    #[inline]
    pub(crate) fn must_fail(&self) -> bool {
        self.overflowed && self.state != State::Error
    }

    // ------------------------------------------------------------------ completion

    /// Attaches a completion counter of `ops`, which stays until [`Self::detach_counters`].
    pub(crate) fn attach_counter(
        &mut self,
        counter: &Arc<Counter>,
        ops: Ops,
    ) -> Result<(), Misuse> {
        if !matches!(self.state, State::Reset | State::Init) {
            return Err(Misuse::WrongState(
                "a counter can be attached only in RESET or INIT",
            ));
        }
        self.counters.get_or_insert_default().attach(counter, ops)
    }

    /// Forgets the completion counters: the queue pair is destroyed.
    pub(crate) fn detach_counters(&mut self) {
        self.counters = None;
    }

    /// The completion counters, if there are any.
    #[inline]
    pub(crate) fn counters(&self) -> Option<&Counters> {
        self.counters.as_deref()
    }

    /// Counts a completion. Separate from the callers, because few programs attach a counter.
    #[cold]
    #[inline(never)]
    fn count(&self, op: WcOp, status: Status, len: u64) {
        if let Some(counters) = &self.counters {
            counters.completed(op, status, len);
        }
    }

    /// Completes a send request. A successful one makes an entry only if it is signaled.
    #[inline]
    pub(crate) fn complete_send(&mut self, retired: &Retired, status: Status) {
        if self.counters.is_some() {
            self.count(retired.op, status, retired.bytes);
        }
        if status == Status::Success && !retired.signaled && !self.sig_all {
            return;
        }
        let entry = retired.completion(status, self.qpn);
        self.observe(|| Step::Complete(&entry));
        if self.send_cq.complete(entry).is_err() {
            self.overflowed = true;
        }
    }

    /// Whether a completion only has to be added to its queue, because no completion counter and no observer is attached.
    #[inline]
    pub(crate) fn completes_plainly(&self) -> bool {
        self.counters.is_none() && self.rnic.observer.is_none()
    }

    /// Completes the requests at the front of the send queue that are done. The caller ensures that all of them have succeeded, and
    /// that [`Self::completes_plainly`] is true.
    pub(crate) fn retire_successful(&mut self) {
        if !self.sq.is_front_done() {
            return;
        }
        let (sq, sig_all, qpn) = (&mut self.sq, self.sig_all, self.qpn);
        let next = || {
            while let Some(retired) = sq.retire() {
                if retired.signaled || sig_all {
                    return Some(retired.completion(Status::Success, qpn));
                }
            }
            None
        };
        if self.send_cq.complete_all(next).is_err() {
            self.overflowed = true;
        }
    }

    /// Completes several receives of the queue pair's own receive queue. The caller ensures that [`Self::completes_plainly`] is true.
    pub(crate) fn complete_recvs(&mut self, entries: impl Iterator<Item = Completion>) {
        let mut entries = entries;
        if self.recv_cq.complete_all(|| entries.next()).is_err() {
            self.overflowed = true;
        }
    }

    /// Completes a receive.
    #[inline]
    pub(crate) fn complete_recv(&mut self, entry: Completion) {
        if self.counters.is_some() {
            self.count(entry.op, entry.status, entry.byte_len.into());
        }
        self.observe(|| Step::Complete(&entry));
        if self.rq.complete(entry, &self.recv_cq).is_err() {
            self.overflowed = true;
        }
    }

    /// Completes receive `id` as flushed.
    pub(crate) fn flush_recv(&mut self, id: u64) {
        self.complete_recv(Completion::new(id, Status::Flushed, WcOp::Recv, self.qpn));
    }

    /// Completes all posted receives of the queue pair's own queue as flushed.
    pub(crate) fn flush_rq(&mut self) {
        while let Some(request) = self.rq.take_own() {
            self.flush_recv(request.id);
        }
    }

    /// Flushes the receive queue of a queue pair that has failed: no receive completes for it after this.
    pub(crate) fn end_rq(&mut self) {
        self.flush_rq();
        if self.rq.is_shared() && !self.last_wqe_raised {
            self.last_wqe_raised = true;
            self.events.push_back(AsyncEvent::LastWqe);
        }
    }

    /// Takes the oldest receive.
    pub(crate) fn take_receive(&mut self) -> Option<RecvRequest> {
        let taken = self.rq.take()?;
        if taken.srq_limit_reached {
            self.events.push_back(AsyncEvent::SrqLimit);
        }
        Some(taken.request)
    }

    /// Whether steps are reported.
    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.rnic.observer.is_some()
    }

    /// Reports the step that `step` makes, if the device has an observer.
    #[inline]
    pub(crate) fn observe<'a>(&self, step: impl FnOnce() -> Step<'a>) {
        if let Some(observer) = &self.rnic.observer {
            observer.step(self.qpn, &step());
        }
    }

    /// Reports several steps, if the device has an observer.
    #[inline]
    pub(crate) fn observe_all<'a, const N: usize>(&self, steps: impl FnOnce() -> [Step<'a>; N]) {
        if let Some(observer) = &self.rnic.observer {
            for step in steps() {
                observer.step(self.qpn, &step);
            }
        }
    }
}
