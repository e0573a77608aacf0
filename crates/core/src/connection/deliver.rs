//! Delivers complete messages: completes receives, serves requests, completes local requests.

use std::time::Instant;

use super::Connection;
use super::responder::ReceiveUnderWay;
use super::stream::{End, First, Peer};
use crate::ddp::rx::Violation;
use crate::error::{PeerError, TermCode};
use crate::observe::Step;
use crate::rdmap::terminate::remote_error;
use crate::verbs::access::Access;
use crate::verbs::counter::Ops;
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::Placement;
use crate::verbs::rq::RecvQueue;
use crate::verbs::source::Places;
use crate::verbs::sq::Phase;
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::wire::control::Control;
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::rdmap::{AtomicRequest, Immediate, Opcode, ReadRequest, Terminate};
use crate::wire::{Msn, QN_ATOMIC_RESPONSE, QN_READ, QN_SEND, Stag, To};

impl Connection {
    /// Delivers the message of a segment, if the segment is its last one. The payload of Sends, Writes and Read Responses
    /// was placed before this call. The other messages consist of one segment, and are
    /// read from `header` and `payload`.
    pub(super) fn deliver(
        &mut self,
        now: Instant,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let opcode = header.opcode();
        if self.base.is_observed() && header.last() {
            self.base.observe(|| Step::Deliver(opcode));
        }
        match header {
            Header::Tagged(h) if h.opcode == Opcode::ReadResponse => {
                self.deliver_read_response(h);
                Ok(())
            }
            Header::Tagged(h) => {
                self.deliver_write(h);
                Ok(())
            }
            Header::Untagged(h) => match h.opcode {
                Opcode::Send
                | Opcode::SendInvalidate
                | Opcode::SendSolicited
                | Opcode::SendSolicitedInvalidate => self.deliver_send(h),
                Opcode::Immediate | Opcode::ImmediateSolicited => {
                    self.deliver_immediate(h, payload)
                }
                Opcode::ReadRequest => self.deliver_read_request(h, payload),
                Opcode::AtomicRequest => self.deliver_atomic_request(h, payload),
                Opcode::AtomicResponse => self.deliver_atomic_response(h, payload),
                Opcode::Terminate => self.deliver_terminate(h, payload),
                Opcode::Control => self.deliver_control(now, h),
                _ => Err(Violation::request(
                    PeerError::Opcode {
                        opcode: opcode.bits(),
                    },
                    Status::RemoteInvalidRequest,
                )),
            },
        }
    }

    /// Handles the first message of the peer: both ends may send from now on, and the message shows whether the peer is
    /// anywarp. Returns true if the message is a ready-to-receive Send, which is not delivered.
    pub(super) fn note_first(&mut self, header: &Header, len: usize) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        if s.started {
            return false;
        }
        s.started = true;
        // RFC 5044 §7.1.2 [mpa-responder-waits]: a responder sends no FPDU before it has received the first
        // one.
        s.may_send = true;
        if s.peer == Peer::Unknown {
            s.peer = if header.opcode() == Opcode::Control {
                // An anywarp peer accepts FPDUs that are larger than a TCP segment.
                s.config.mulpdu = s.config.mulpdu_anywarp;
                s.set_short_limit(self.shortcuts);
                Peer::Anywarp
            } else {
                Peer::Standard
            };
        }
        if s.config.initiator {
            return false;
        }
        // RFC 6581 §9.2 [mpa-rtr-invisible]: a ready-to-receive Send has a message sequence number, and consumes no
        // receive of the application. If the ends agreed on a ready-to-receive message, it is the first message, and
        // may be a Send, a Write or a Read.
        let expected = s.config.first != First::Nothing && s.config.first != First::Hello;
        let rtr = match header {
            Header::Untagged(h) => {
                h.opcode == Opcode::Send && len == 0 && h.last && h.mo == 0 && h.msn == Msn::FIRST
            }
            Header::Tagged(_) => false,
        };
        if expected && rtr {
            s.responder.count_send();
        } else if expected {
            s.ready_to_receive = match header.opcode() {
                Opcode::Write => Some(Ops::REMOTE_WRITE),
                Opcode::ReadRequest => Some(Ops::REMOTE_READ),
                _ => None,
            };
        }
        self.base.events.push_back(AsyncEvent::Started);
        expected && rtr
    }

    /// Accepts an FPDU without a ULPDU as the ready-to-receive message: some stacks send one (RFC 6581 §4.3,
    /// "zero-length FPDU").
    pub(super) fn take_empty_rtr(&mut self) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let expected = s.config.first != First::Nothing && s.config.first != First::Hello;
        if s.started || s.config.initiator || !expected {
            return false;
        }
        s.started = true;
        s.may_send = true;
        if s.peer == Peer::Unknown {
            s.peer = Peer::Standard;
        }
        self.base.events.push_back(AsyncEvent::Started);
        true
    }

    fn deliver_write(&mut self, h: &Tagged) {
        if let Some(s) = &mut self.stream
            && h.last
        {
            let len = s.responder.finish_write();
            self.count_remote(Ops::REMOTE_WRITE, len);
        }
    }

    /// Counts a request of the peer that is done, if a completion counter is attached.
    #[inline]
    pub(super) fn count_remote(&mut self, op: Ops, len: u64) {
        let Some(counters) = self.base.counters() else {
            return;
        };
        let Some(s) = &mut self.stream else { return };
        // RFC 6581 §9.2 [mpa-rtr-invisible]: a ready-to-receive message is not counted.
        if s.ready_to_receive == Some(op) {
            s.ready_to_receive = None;
            return;
        }
        counters.count(op, Status::Success, len);
    }

    fn deliver_send(&mut self, h: &Untagged) -> Result<(), Violation> {
        if !h.last {
            return Ok(());
        }
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        s.responder.count_send();
        let mut invalidated = None;
        if h.opcode.invalidates() {
            let stag = h.inv_stag;
            if self
                .base
                .rnic
                .regions
                .invalidate(stag, self.pd_of_peer(), self.base.qpn)
                .is_err()
            {
                return Err(Violation::request(
                    PeerError::CannotInvalidate { stag: stag.0 },
                    Status::RemoteAccess,
                ));
            }
            invalidated = Some(stag);
        }
        let receive = self
            .take_receive_under_way()
            .map(|r| (r.request_id, r.received));
        self.send_is_received(h, receive, invalidated);
        Ok(())
    }

    /// Completes the receive of a Send that has arrived. `receive` is the identifier of the receive and the length of
    /// the message.
    fn send_is_received(
        &mut self,
        h: &Untagged,
        receive: Option<(u64, u64)>,
        invalidated: Option<Stag>,
    ) {
        let imm = self.stream.as_mut().and_then(|s| s.responder.finish_send());
        let Some((id, received)) = receive else {
            return;
        };
        let mut entry = Completion::new(id, Status::Success, WcOp::Recv, self.base.qpn);
        entry.byte_len = u32::try_from(received).unwrap_or(u32::MAX);
        entry.imm = imm;
        entry.invalidated = invalidated;
        entry.solicited = h.opcode.is_solicited();
        self.complete_recv(entry);
    }

    /// Reports the [`Step`]s of a segment that [`Self::receive_short`] has received.
    #[inline]
    fn observe_received(&self, opcode: Opcode, len: u64, last: bool) {
        if self.base.is_observed() {
            self.base.observe(|| Step::Admit(len));
            if len > 0 {
                self.base.observe(|| Step::Place(len));
            }
            if last {
                self.base.observe(|| Step::Deliver(opcode));
            }
        }
    }

    /// The fast path for usual segments: admits, places and delivers a segment of a Write, or a Send of one
    /// segment whose receive is one range of memory that is long enough.
    ///
    /// Returns false, and has changed nothing, if the segment has to take the general path ([`Self::admit`]).
    /// Both paths have the same effect on memory and completions, and report the same [`Step`]s:
    /// `crates/sim/tests/shortcuts.rs` compares them.
    pub(super) fn receive_short(&mut self, header: &Header, payload: &[u8]) -> bool {
        match header {
            Header::Tagged(h) => self.receive_short_write(h, payload),
            Header::Untagged(h) => self.receive_short_send(h, payload),
        }
    }

    fn receive_short_write(&mut self, h: &Tagged, payload: &[u8]) -> bool {
        let is_write = h.opcode == Opcode::Write && self.base.attr.access.has(Access::REMOTE_WRITE);
        if !is_write || payload.is_empty() || !self.shortcuts {
            return false;
        }
        let (need, pd, len) = (
            Access::REMOTE_WRITE,
            self.pd_of_peer(),
            payload.len() as u64,
        );
        let Some(s) = &mut self.stream else {
            return false;
        };
        if s.responder.is_discarding() {
            return false;
        }
        let last = &mut self.last_written;
        let regions = &self.base.rnic.regions;
        let Ok(pinned) = regions.pin(last, h.stag, pd, self.base.qpn, need, h.to, len) else {
            return false;
        };
        self.base.rnic.memory.place(&pinned, 0, payload);
        drop(pinned);
        s.responder.count_write(len);
        if h.last {
            let whole = s.responder.finish_write();
            self.count_remote(Ops::REMOTE_WRITE, whole);
        }
        self.observe_received(h.opcode, len, h.last);
        true
    }

    fn receive_short_send(&mut self, h: &Untagged, payload: &[u8]) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let is_whole = h.last && h.mo == 0;
        let is_plain = matches!(h.opcode, Opcode::Send | Opcode::SendSolicited);
        let is_next = s.responder.is_next_send(h.msn) && !s.responder.is_discarding();
        if !is_whole || !is_plain || !is_next || !self.shortcuts {
            return false;
        }
        let RecvQueue::Own { requests, .. } = &mut self.base.rq else {
            return false;
        };
        let Some(request) = requests.front() else {
            return false;
        };
        let [sge] = request.sges.as_slice() else {
            return false;
        };
        let (to, room) = (To(sge.addr), u64::from(sge.len));
        let len = payload.len() as u64;
        if len > room {
            return false;
        }
        let (regions, need) = (&self.base.rnic.regions, Access::LOCAL_WRITE);
        let last = &mut self.last_written;
        let Ok(pinned) = regions.pin(last, sge.lkey, self.base.pd, self.base.qpn, need, to, room)
        else {
            return false;
        };
        self.base.rnic.memory.place(&pinned, 0, payload);
        drop(pinned);
        let id = request.id;
        requests.pop_front();
        s.responder.count_send();
        self.observe_received(h.opcode, len, true);
        self.send_is_received(h, Some((id, len)), None);
        true
    }

    pub(super) fn take_receive_under_way(&mut self) -> Option<ReceiveUnderWay> {
        self.stream.as_mut()?.responder.take_receive()
    }

    /// Completes the receive of a Send that has arrived in part. `status` is an error.
    pub(super) fn finish_receive(&mut self, status: Status) {
        if let Some(receive) = self.take_receive_under_way() {
            let mut entry = Completion::new(receive.request_id, status, WcOp::Recv, self.base.qpn);
            entry.byte_len = u32::try_from(receive.received).unwrap_or(u32::MAX);
            self.complete_recv(entry);
        }
    }

    fn deliver_immediate(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        let Ok(bytes) = <&[u8; Immediate::LEN]>::try_from(payload) else {
            return Err(Violation::request(
                PeerError::MessageShape("immediate data is not 8 bytes"),
                Status::RemoteInvalidRequest,
            ));
        };
        // Sends and immediate data share one sequence of MSNs, so this fails while a Send is incomplete.
        s.responder.check_first(h)?;
        let Some(request) = self.base.take_receive() else {
            return self.no_receive(h);
        };
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        let written = s.responder.count_send().unwrap_or(0);
        s.responder.finish_immediate(written);
        let mut entry = Completion::new(
            request.id,
            Status::Success,
            WcOp::RecvWriteImm,
            self.base.qpn,
        );
        entry.byte_len = written;
        entry.imm = Some(Immediate::parse(bytes).value);
        entry.solicited = h.opcode.is_solicited();
        self.complete_recv(entry);
        Ok(())
    }

    // ------------------------------------------------------------------ reads

    fn deliver_read_request(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Ok(bytes) = <&[u8; ReadRequest::LEN]>::try_from(payload) else {
            return Err(Violation::request(
                PeerError::MessageShape("read request is not 28 bytes"),
                Status::RemoteInvalidRequest,
            ));
        };
        if let Some(s) = &mut self.stream {
            s.responder.begin_service(h)?;
        }
        let request = ReadRequest::parse(bytes);
        let len = u64::from(request.size);
        let mut places = Places::new();
        // RFC 5040 §5.2 [read-zero]: a Read of length 0 accesses no memory.
        if len > 0 {
            let (stag, to) = (request.source_stag, request.source_to);
            places.push(self.check_source(Access::REMOTE_READ, stag, to, len)?);
        }
        if let Some(s) = &mut self.stream {
            s.responder.finish_read(&request, places);
        }
        Ok(())
    }

    /// The memory of this end that a Read Request or an atomic request names, if the peer has the access right `need`.
    #[inline]
    fn check_source(
        &self,
        need: Access,
        stag: Stag,
        to: To,
        len: u64,
    ) -> Result<Placement, Violation> {
        if !self.base.attr.access.has(need) {
            return Err(Violation::request(
                PeerError::RemoteAccess { stag: stag.0 },
                Status::RemoteAccess,
            ));
        }
        let (pd, qpn) = (self.pd_of_peer(), self.base.qpn);
        let regions = &self.base.rnic.regions;
        regions
            .check(stag, pd, qpn, need, to, len)
            .map_err(|e| Violation::request(remote_error(e, stag, to, len), Status::RemoteAccess))
    }

    fn deliver_read_response(&mut self, h: &Tagged) {
        if let Some(s) = &mut self.stream
            && h.last
            && let Some(number) = s.requester.finish_read()
        {
            self.answered(number);
        }
    }

    /// Records that a complete response to send request `number` has arrived. The request is done when no further
    /// response is expected.
    fn answered(&mut self, number: u64) {
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.answers = posted.answers.saturating_sub(1);
            if posted.answers == 0 && posted.phase == Phase::Sent {
                posted.phase = Phase::Done;
            }
        }
        self.retire();
    }

    // ------------------------------------------------------------------ atomics

    fn deliver_atomic_request(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Ok(bytes) = <&[u8; AtomicRequest::LEN]>::try_from(payload) else {
            return Err(Violation::request(
                PeerError::MessageShape("atomic request is not 52 bytes"),
                Status::RemoteInvalidRequest,
            ));
        };
        let request = AtomicRequest::parse(bytes)
            .map_err(|e| Violation::request(e, Status::RemoteInvalidRequest))?;
        if let Some(s) = &mut self.stream {
            s.responder.begin_service(h)?;
        }
        let (stag, to) = (request.stag, request.to);
        let place = self.check_source(Access::REMOTE_ATOMIC, stag, to, 8)?;
        // RFC 7306 §5.1 [atomic-aligned]: the address of the word is a multiple of eight.
        if place.misaligned() {
            return Err(Violation::request(
                PeerError::AtomicMisaligned { to: to.0 },
                Status::RemoteInvalidRequest,
            ));
        }
        let Some(pinned) = place.pin() else {
            return Err(Violation::request(
                PeerError::RemoteStag { stag: stag.0 },
                Status::RemoteAccess,
            ));
        };
        // RFC 7306 §5.2.1 [atomic-once]: an atomic is executed once, in the order of arrival, and its response carries
        // the old value.
        let value = self
            .base
            .rnic
            .memory
            .update(&pinned, &mut |old| request.apply(old));
        drop(pinned);
        if let Some(s) = &mut self.stream {
            s.responder.finish_atomic(request.id, value);
        }
        Ok(())
    }

    fn deliver_atomic_response(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        let (number, value, sink) = s.requester.accept_atomic_response(h, payload)?;
        let Some(pinned) = sink.pin() else {
            let error = PeerError::RdmapLocal;
            return Err(Violation::answer_to(number, error, Status::LocalProtection));
        };
        // The value is in host byte order in memory, and in network byte order on the wire.
        self.base
            .rnic
            .memory
            .place(&pinned, 0, &value.to_ne_bytes());
        self.answered(number);
        Ok(())
    }

    // ------------------------------------------------------------------ ends and private messages

    fn deliver_terminate(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        // RFC 5041 §7.1 [ddp-msn-range]: only one message may be sent on queue 2.
        if h.msn != Msn::FIRST {
            return Err(Violation::answer(PeerError::UntaggedMsn {
                expected: Msn::FIRST.0,
                got: h.msn.0,
            }));
        }
        let terminate = Terminate::parse(payload);
        self.base.observe(|| Step::Terminated(&terminate));
        let cause = self.cause_of(&terminate);
        let status = match terminate.term_code() {
            code if code.is_protection() => Status::RemoteAccess,
            TermCode::DDP_NO_BUFFER => Status::RnrRetryExceeded,
            TermCode::DDP_TOO_LONG | TermCode::RDMAP_OPCODE => Status::RemoteInvalidRequest,
            TermCode { layer: 0, .. } => Status::RemoteOperation,
            _ => Status::RemoteAborted,
        };
        self.fail(
            cause.map(|number| (number, status)),
            "the peer terminated the connection",
            Some(AsyncEvent::QpFatal),
        );
        if let Some(s) = &mut self.stream {
            s.current = None;
            s.responder.clear();
            s.end = End::Closing;
        }
        Ok(())
    }

    /// Returns the request that caused a Terminate: `Some(Some(number))` is the number of a send request,
    /// `Some(None)` the oldest outstanding one. `None`: no outstanding request is the cause.
    fn cause_of(&mut self, terminate: &Terminate) -> Option<Option<u64>> {
        let raw = terminate.ddp_header.as_ref();
        let Some(Ok((header, _))) = raw.map(|raw| Header::parse(raw.as_slice())) else {
            return Some(None);
        };
        match header {
            Header::Untagged(h) if h.qn == QN_READ || h.qn == QN_SEND => {
                let of_reads = h.qn == QN_READ;
                // A request may use several MSNs. The cause is the last request whose first MSN is not after the MSN
                // in the Terminate.
                let found = self.base.sq.taken_mut().filter(|(_, p)| {
                    let first = if of_reads {
                        p.msn_before.1
                    } else {
                        p.msn_before.0
                    };
                    p.request.op.is_read_or_atomic() == of_reads
                        && h.msn.0.wrapping_sub(first) < u32::MAX / 2
                });
                let (number, posted) = found.last()?;
                (posted.phase != Phase::Done).then_some(Some(number))
            }
            // Towards a standard peer a Write is complete when it is sent, so it cannot be the cause. Responses belong to requests of the
            // peer.
            Header::Tagged(_) => None,
            Header::Untagged(h) if h.qn == QN_ATOMIC_RESPONSE => None,
            Header::Untagged(_) => Some(None),
        }
    }

    fn deliver_control(&mut self, now: Instant, h: &Untagged) -> Result<(), Violation> {
        let what = Control::parse(h).map_err(Violation::answer)?;
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        // Control messages exist between two anywarp ends only.
        if s.peer != Peer::Anywarp {
            return Err(Violation::request(
                PeerError::Opcode {
                    opcode: Opcode::Control.bits(),
                },
                Status::RemoteInvalidRequest,
            ));
        }
        match what {
            Control::Hello { features, .. } => s.handover.set_peer_features(features),
            Control::Pong => {}
            Control::Handover(what) => s.handover.receive(what)?,
            Control::Cookie => {
                return Err(Violation::answer(PeerError::Control(
                    "a cookie on a stream",
                )));
            }
            Control::Ping => {
                if !s.responder.is_full() {
                    s.responder.push_control(Control::Pong);
                }
            }
            Control::Ack { seq } => {
                if !self.handle_ack(seq) {
                    return Err(Violation::answer(PeerError::Control(
                        "an acknowledgement of a request that was not sent",
                    )));
                }
            }
            Control::Rnr { seq, timer } => {
                if !self.handle_ack(seq.wrapping_sub(1)) {
                    return Err(Violation::answer(PeerError::Control(
                        "receiver-not-ready for a request that was not sent",
                    )));
                }
                self.handle_rnr(seq, timer, now);
            }
            Control::Restart { seq } => {
                if !s.responder.restart(seq) {
                    return Err(Violation::answer(PeerError::Control(
                        "a Restart without a receiver-not-ready",
                    )));
                }
            }
            Control::Nak { seq, status } => {
                let status =
                    Status::from_number(status).filter(|status| *status != Status::Success);
                let status = status.unwrap_or(Status::RemoteOperation);
                if !self.handle_ack(seq.wrapping_sub(1)) {
                    return Err(Violation::answer(PeerError::Control(
                        "a refusal of a request that was not sent",
                    )));
                }
                let cause = self.base.sq.taken_mut().find(|(_, p)| {
                    p.phase != Phase::Done && p.seq.1.wrapping_sub(seq) < u32::MAX / 2
                });
                let cause = cause.map(|(number, _)| number);
                self.fail(
                    Some((cause, status)),
                    "the peer refused a request",
                    Some(AsyncEvent::QpFatal),
                );
                if let Some(s) = &mut self.stream {
                    s.responder.clear();
                    s.end = End::Closing;
                }
            }
            Control::SendImmediate { value } => s.responder.set_immediate(value),
            // A SelectSrq is dropped like all requests until the Restart, after which the peer sends it again.
            Control::SelectSrq { .. } if s.responder.is_discarding() => {}
            Control::SelectSrq { number } => {
                if s.responder.is_receiving_send() {
                    return Err(Violation::answer(PeerError::Control(
                        "SelectSrq inside a message",
                    )));
                }
                if !self.base.rq.choose(number) {
                    return Err(Violation::request(
                        PeerError::Control(
                            "SelectSrq of a shared receive queue that does not exist",
                        ),
                        Status::RemoteInvalidRequest,
                    ));
                }
            }
            Control::Bye => s.bye_received = true,
        }
        Ok(())
    }
}
