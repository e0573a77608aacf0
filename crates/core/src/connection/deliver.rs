//! Delivers complete messages: completes receives, serves requests, finishes our own requests.

use std::time::Instant;

use super::Connection;
use super::stream::{End, First, Peer, Response};
use crate::bounds;
use crate::ddp::rx::Violation;
use crate::ddp::tx::{Address, Message};
use crate::error::{PeerError, TermCode};
use crate::observe::Step;
use crate::rdmap::terminate::remote_error;
use crate::verbs::access::Access;
use crate::verbs::event::AsyncEvent;
use crate::verbs::rq::RecvQueue;
use crate::verbs::source::{Places, Source};
use crate::verbs::sq::Phase;
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::wire::control::Control;
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::rdmap::{
    AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate,
};
use crate::wire::{Msn, QN_ATOMIC_RESPONSE, QN_READ, QN_SEND, Stag, To};

impl Connection {
    /// A segment is placed (or is a message for the stack): if it ends its message, the message is delivered.
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

    /// The peer's first message: the stream works in both directions now, and we learn what the peer is. True if the
    /// message was for that alone.
    pub(super) fn note_first(&mut self, header: &Header, len: usize) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        if s.started {
            return false;
        }
        s.started = true;
        // RFC 5044 §7.1.2 [mpa-responder-waits]: a responder sends nothing before this.
        s.may_send = true;
        if s.peer == Peer::Unknown {
            s.peer = if header.opcode() == Opcode::Control {
                // One of us takes FPDUs that are larger than a segment.
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
        // RFC 6581 §9.2 [mpa-rtr-invisible]: a ready-to-receive Send has its number, and none of the application's
        // receives. It is the first message wherever one was agreed on, whichever form we expected.
        let expected = s.config.first != First::Nothing && s.config.first != First::Hello;
        let rtr = match header {
            Header::Untagged(h) => {
                h.opcode == Opcode::Send && len == 0 && h.last && h.mo == 0 && h.msn == Msn::FIRST
            }
            Header::Tagged(_) => false,
        };
        if expected && rtr {
            s.recv_send_msn = s.recv_send_msn.wrapping_add(1);
        }
        self.base.events.push_back(AsyncEvent::Started);
        expected && rtr
    }

    /// Takes an FPDU without a ULPDU as the ready-to-receive message, which some stacks send (RFC 6581 §4.3, "zero-length FPDU").
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

    /// One more of the peer's request messages is done.
    fn request_done(&mut self) {
        if let Some(s) = &mut self.stream {
            s.done = s.done.wrapping_add(1);
        }
    }

    fn deliver_write(&mut self, h: &Tagged) {
        let Some(s) = &mut self.stream else { return };
        if h.last {
            s.last_write = Some(u32::try_from(s.write_bytes).unwrap_or(u32::MAX));
            s.write_bytes = 0;
            self.request_done();
        }
    }

    /// Counts the payload of a Write that was admitted, for the completion of an immediate behind it.
    pub(super) fn count_write(&mut self, len: u64) {
        if let Some(s) = &mut self.stream {
            s.write_bytes += len;
        }
    }

    fn deliver_send(&mut self, h: &Untagged) -> Result<(), Violation> {
        if !h.last {
            return Ok(());
        }
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        s.recv_send_msn = s.recv_send_msn.wrapping_add(1);
        s.last_write = None;
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
        let receive = self.stream.as_mut().and_then(|s| s.receive.take());
        let receive = receive.map(|r| (r.request_id, r.received));
        self.send_is_received(h, receive, invalidated);
        Ok(())
    }

    /// A Send is complete: `receive` says which receive it used, and how many bytes of it.
    fn send_is_received(
        &mut self,
        h: &Untagged,
        receive: Option<(u64, u64)>,
        invalidated: Option<Stag>,
    ) {
        self.request_done();
        let imm = self.stream.as_mut().and_then(|s| s.send_immediate.take());
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

    /// Reports the steps of a segment that a shortcut has received.
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

    /// Admits, places and delivers a segment in one step, if it belongs to a Write, or is a whole Send and the next receive
    /// is one range of memory that is long enough, as is usual.
    ///
    /// Returns false, and has changed nothing, if the segment has to take the general path ([`Self::admit`]). Memory,
    /// completions and reported steps are the same on both paths: `crates/sim/tests/shortcuts.rs` compares them.
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
        if self.stream.as_ref().is_none_or(|s| s.discarding.is_some()) {
            return false;
        }
        let last = &mut self.last_written;
        let regions = &self.base.rnic.regions;
        let Ok(pinned) = regions.pin(last, h.stag, pd, self.base.qpn, need, h.to, len) else {
            return false;
        };
        self.base.rnic.memory.place(&pinned, 0, payload);
        drop(pinned);
        self.observe_received(h.opcode, len, h.last);
        self.count_write(len);
        self.deliver_write(h);
        true
    }

    fn receive_short_send(&mut self, h: &Untagged, payload: &[u8]) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let is_whole = h.last && h.mo == 0;
        let is_plain = matches!(h.opcode, Opcode::Send | Opcode::SendSolicited);
        let is_next = s.receive.is_none() && s.discarding.is_none() && h.msn.0 == s.recv_send_msn;
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
        s.recv_send_msn = s.recv_send_msn.wrapping_add(1);
        s.last_write = None;
        self.observe_received(h.opcode, len, true);
        self.send_is_received(h, Some((id, len)), None);
        true
    }

    /// The receive under way ends without its message.
    pub(super) fn finish_receive(&mut self, status: Status) {
        if let Some(receive) = self.stream.as_mut().and_then(|s| s.receive.take()) {
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
        // In the middle of a Send its number is taken, and the next one cannot come yet.
        if h.msn.0 != s.recv_send_msn || s.receive.is_some() {
            return Err(Violation::request(
                PeerError::UntaggedMsn {
                    expected: s.recv_send_msn,
                    got: h.msn.0,
                },
                Status::RemoteInvalidRequest,
            ));
        }
        let Some(request) = self.base.take_receive() else {
            return self.no_receive(h);
        };
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        s.recv_send_msn = s.recv_send_msn.wrapping_add(1);
        let written = s.last_write.take().unwrap_or(0);
        self.request_done();
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

    /// Checks number and limit of a request that needs an answer, and counts it.
    fn open_service(&mut self, h: &Untagged) -> Result<(), Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        if h.msn.0 != s.recv_read_msn {
            return Err(Violation::request(
                PeerError::UntaggedMsn {
                    expected: s.recv_read_msn,
                    got: h.msn.0,
                },
                Status::RemoteInvalidRequest,
            ));
        }
        s.recv_read_msn = s.recv_read_msn.wrapping_add(1);
        s.last_write = None;
        // RFC 5040 §6.1 [read-ird-limit]. A peer whose ready-to-receive message is a Read needs one slot in any case.
        let limit = s.config.ird.max(1);
        if s.serving >= limit || s.responses.len() >= bounds::RESPONSES_MAX {
            return Err(Violation::request(
                PeerError::IrdOverrun { limit },
                Status::RemoteInvalidRequest,
            ));
        }
        s.serving += 1;
        Ok(())
    }

    fn deliver_read_request(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Ok(bytes) = <&[u8; ReadRequest::LEN]>::try_from(payload) else {
            return Err(Violation::request(
                PeerError::MessageShape("read request is not 28 bytes"),
                Status::RemoteInvalidRequest,
            ));
        };
        self.open_service(h)?;
        let request = ReadRequest::parse(bytes);
        let len = u64::from(request.size);
        let mut places = Places::new();
        // RFC 5040 §5.2 [read-zero]: a Read of length 0 looks at no memory.
        if len > 0 {
            let (stag, to) = (request.source_stag, request.source_to);
            if !self.base.attr.access.has(Access::REMOTE_READ) {
                return Err(Violation::request(
                    PeerError::RemoteAccess { stag: stag.0 },
                    Status::RemoteAccess,
                ));
            }
            let place = self
                .base
                .rnic
                .regions
                .check(
                    stag,
                    self.pd_of_peer(),
                    self.base.qpn,
                    Access::REMOTE_READ,
                    to,
                    len,
                )
                .map_err(|e| {
                    Violation::request(remote_error(e, stag, to, len), Status::RemoteAccess)
                })?;
            places.push(place);
        }
        self.request_done();
        if let Some(s) = &mut self.stream {
            s.responses.push_back(Response::Read(Message {
                opcode: Opcode::ReadResponse,
                address: Address::Tagged {
                    stag: request.sink_stag,
                    to: request.sink_to,
                },
                source: Source::Memory {
                    places,
                    // The application and other peers may write there at any time; the CRC must fit what is sent.
                    volatile: true,
                },
                len,
                sent: 0,
            }));
        }
        Ok(())
    }

    fn deliver_read_response(&mut self, h: &Tagged) {
        if let Some(s) = &mut self.stream
            && h.last
            && let Some(read) = s.reads.pop_front()
        {
            self.answered(read.request);
        }
    }

    /// Counts the payload of a Read Response that was admitted.
    pub(super) fn count_read(&mut self, len: u64) {
        if let Some(read) = self.stream.as_mut().and_then(|s| s.reads.front_mut()) {
            read.received += len;
        }
    }

    /// An answer for send request `number` has come completely.
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
        self.open_service(h)?;
        let (stag, to) = (request.stag, request.to);
        if !self.base.attr.access.has(Access::REMOTE_ATOMIC) {
            return Err(Violation::request(
                PeerError::RemoteAccess { stag: stag.0 },
                Status::RemoteAccess,
            ));
        }
        let place = self
            .base
            .rnic
            .regions
            .check(
                stag,
                self.pd_of_peer(),
                self.base.qpn,
                Access::REMOTE_ATOMIC,
                to,
                8,
            )
            .map_err(|e| Violation::request(remote_error(e, stag, to, 8), Status::RemoteAccess))?;
        // RFC 7306 §5.1 [atomic-aligned]: the word is a multiple of eight.
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
        // RFC 7306 §5.1 [atomic-once]: done once, in the order of arrival; the answer carries the old value.
        let value = self
            .base
            .rnic
            .memory
            .update(&pinned, &mut |old| request.apply(old));
        drop(pinned);
        self.request_done();
        if let Some(s) = &mut self.stream {
            let msn = s.next_atomic_response_msn;
            s.next_atomic_response_msn = msn.wrapping_add(1);
            let response = AtomicResponse {
                id: request.id,
                value,
            };
            s.responses.push_back(Response::Atomic(Message {
                opcode: Opcode::AtomicResponse,
                address: Address::Untagged {
                    qn: QN_ATOMIC_RESPONSE,
                    msn: Msn(msn),
                    inv_stag: Stag(0),
                    mo: 0,
                },
                len: AtomicResponse::LEN as u64,
                source: Source::Bytes(response.emit().as_slice().into()),
                sent: 0,
            }));
        }
        Ok(())
    }

    fn deliver_atomic_response(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        let Some(pending) = s.atomics.pop_front() else {
            return Err(Violation::answer(PeerError::UnexpectedResponse {
                opcode: h.opcode.bits(),
            }));
        };
        let number = pending.request;
        let Ok(bytes) = <&[u8; AtomicResponse::LEN]>::try_from(payload) else {
            let error = PeerError::MessageShape("atomic response is not 12 bytes");
            return Err(Violation::answer_to(number, error, Status::BadResponse));
        };
        let response = AtomicResponse::parse(bytes);
        if h.msn.0 != s.recv_atomic_response_msn || response.id != pending.id {
            let error = PeerError::ResponseMismatch("atomic request identifier");
            return Err(Violation::answer_to(number, error, Status::BadResponse));
        }
        s.recv_atomic_response_msn = s.recv_atomic_response_msn.wrapping_add(1);
        match pending.sink.pin() {
            // Host byte order in memory, network byte order on the wire.
            Some(pinned) => self
                .base
                .rnic
                .memory
                .place(&pinned, 0, &response.value.to_ne_bytes()),
            None => {
                let error = PeerError::RdmapLocal;
                return Err(Violation::answer_to(number, error, Status::LocalProtection));
            }
        }
        self.answered(pending.request);
        Ok(())
    }

    // ------------------------------------------------------------------ ends and private messages

    fn deliver_terminate(&mut self, h: &Untagged, payload: &[u8]) -> Result<(), Violation> {
        // RFC 5041 §7.1 [ddp-msn-range]: the one message of queue 2.
        if h.msn != Msn::FIRST {
            return Err(Violation::answer(PeerError::UntaggedMsn {
                expected: Msn::FIRST.0,
                got: h.msn.0,
            }));
        }
        let terminate = Terminate::parse(payload);
        self.base.observe(|| Step::Terminated(&terminate));
        let blamed = self.blamed_by(&terminate);
        let status = match terminate.term_code() {
            code if code.is_protection() => Status::RemoteAccess,
            TermCode::DDP_NO_BUFFER => Status::RnrRetryExceeded,
            TermCode::DDP_TOO_LONG | TermCode::RDMAP_OPCODE => Status::RemoteInvalidRequest,
            TermCode { layer: 0, .. } => Status::RemoteOperation,
            _ => Status::RemoteAborted,
        };
        self.fail(
            blamed.map(|number| (number, status)),
            "the peer terminated the connection",
            Some(AsyncEvent::QpFatal),
        );
        if let Some(s) = &mut self.stream {
            s.current = None;
            s.responses.clear();
            s.end = End::Closing;
        }
        Ok(())
    }

    /// The request that a Terminate is about: inside, `None` means the oldest, outside, that it is none of those
    /// that are not done.
    fn blamed_by(&mut self, terminate: &Terminate) -> Option<Option<u64>> {
        let raw = terminate.ddp_header.as_ref();
        let Some(Ok((header, _))) = raw.map(|raw| Header::parse(raw.as_slice())) else {
            return Some(None);
        };
        match header {
            Header::Untagged(h) if h.qn == QN_READ || h.qn == QN_SEND => {
                let of_reads = h.qn == QN_READ;
                // The last request whose numbers began at or before this one.
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
            // A Write: over a standard stream it is done when it is sent.
            Header::Tagged(h) if h.opcode == Opcode::Write => None,
            _ => Some(None),
        }
    }

    fn deliver_control(&mut self, now: Instant, h: &Untagged) -> Result<(), Violation> {
        let what = Control::parse(h).map_err(Violation::answer)?;
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        // To a standard peer these messages do not exist.
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
                if s.responses.len() < bounds::RESPONSES_MAX {
                    s.responses.push_back(Response::Control(Control::Pong));
                }
            }
            Control::Ack { seq } => {
                if !self.handle_ack(seq) {
                    return Err(Violation::answer(PeerError::Control(
                        "acknowledges what was not sent",
                    )));
                }
            }
            Control::Rnr { seq, timer } => {
                if !self.handle_ack(seq.wrapping_sub(1)) {
                    return Err(Violation::answer(PeerError::Control(
                        "not ready for what was not sent",
                    )));
                }
                self.handle_rnr(seq, timer, now);
            }
            Control::Restart { seq } => {
                let unsaid = s
                    .responses
                    .iter()
                    .any(|r| matches!(r, Response::Control(Control::Rnr { .. })));
                if s.discarding != Some(seq) || unsaid {
                    return Err(Violation::answer(PeerError::Control(
                        "restart that nobody asked for",
                    )));
                }
                s.discarding = None;
            }
            Control::Nak { seq, status } => {
                let status = Status::from_number(status).unwrap_or(Status::RemoteOperation);
                if !self.handle_ack(seq.wrapping_sub(1)) {
                    return Err(Violation::answer(PeerError::Control(
                        "refuses what was not sent",
                    )));
                }
                let blamed = self.base.sq.taken_mut().find(|(_, p)| {
                    p.phase != Phase::Done && p.seq.1.wrapping_sub(seq) < u32::MAX / 2
                });
                let blamed = blamed.map(|(number, _)| number);
                self.fail(
                    Some((blamed, status)),
                    "the peer refused a request",
                    Some(AsyncEvent::QpFatal),
                );
                if let Some(s) = &mut self.stream {
                    s.responses.clear();
                    s.end = End::Closing;
                }
            }
            Control::SendImmediate { value } => {
                if s.discarding.is_none() {
                    s.send_immediate = Some(value);
                }
            }
            // What is dropped until a restart says it again then.
            Control::SelectSrq { .. } if s.discarding.is_some() => {}
            Control::SelectSrq { number } => {
                if s.receive.is_some() {
                    return Err(Violation::answer(PeerError::Control(
                        "chooses a shared receive queue inside a message",
                    )));
                }
                if !self.base.rq.choose(number) {
                    return Err(Violation::request(
                        PeerError::Control("chooses a shared receive queue that is not there"),
                        Status::RemoteInvalidRequest,
                    ));
                }
            }
            Control::Bye => s.bye_received = true,
        }
        Ok(())
    }
}
