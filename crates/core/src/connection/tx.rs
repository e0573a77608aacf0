//! Transmit side of a connection: takes the next request or response, and segments and frames it.
//!
//! Requests are taken in order. A request, and with it all later ones, waits in three cases: it is fenced and an earlier
//! Read or atomic is not done; it needs an ORD slot and none is free; or the RNR timer runs. Responses never wait for
//! requests, so that two ends whose requests wait cannot block each other (RFC 5040 §5.3).

use std::time::Instant;

use super::Connection;
use super::build::Unbuildable;
use super::responder::Response;
use super::stream::{End, Outgoing, Stream};
use super::timers::Timer;
use crate::ddp::rx::Violation;
use crate::ddp::tx::{Address, Message, segment};
use crate::error::PeerError;
use crate::llp::mpa::frame::{Invalidated, Segment, TxBatch, frame};
use crate::llp::mpa::marker::Inserter;
use crate::observe::Step;
use crate::rdmap::message::{control, write_stag};
use crate::rdmap::terminate::TermContext;
use crate::verbs::access::Access;
use crate::verbs::counter::Ops;
use crate::verbs::mr::{LastRegion, Memory};
use crate::verbs::qp::State;
use crate::verbs::rnic::Rnic;
use crate::verbs::source::Source;
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Op, Payload, Sge};
use crate::wire::control::Control;
use crate::wire::ddp::{Tagged, Untagged};
use crate::wire::rdmap::{Opcode, ReadRequest};
use crate::wire::{QN_SEND, Stag, To};

/// The place of the message that is sent next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// There is no message to send.
    Nothing,
    /// The message under way.
    Current,
    /// The next message of the request that was taken last.
    Part,
}

/// The outcome of [`Connection::take`].
enum Taken {
    Nothing,
    /// The requester has messages of a request.
    Parts,
    /// A request without a message was done.
    Local,
}

impl Connection {
    /// Adds all messages that may be sent now to `batch`. An acknowledgement that is due comes before them. If it may
    /// wait and there are no messages, it is added only with `flush`. Returns whether there may be more messages: the
    /// batch is full, or it is aligned and ends with the end of a message.
    pub fn poll_tx(&mut self, now: Instant, flush: bool, batch: &mut TxBatch) -> bool {
        // The answer to a message must not overtake its acknowledgement: programs expect the completion of their Send
        // before that of the receive. In shared memory the carrier transports the acknowledgement with the answer.
        let by_message = self.ack_due() && self.stream.as_ref().is_some_and(|s| !s.in_memory);
        if by_message && (flush || self.must_ack() || self.has_messages()) {
            self.send_ack(batch);
        }
        let mut more = true;
        loop {
            if self.send_short(now, batch) {
                more = self.has_untaken();
                if !more || batch.is_aligned() {
                    break;
                }
            }
            if batch.is_full() {
                break;
            }
            let next = self.next_message(now);
            if next == Next::Nothing {
                more = false;
                break;
            }
            let ended = self.send_segment(next, batch);
            if ended && batch.is_aligned() {
                // The last FPDU of a message seldom fills a TCP segment. The batch ends with it, and the engine ends the
                // TCP segment at the end of the batch.
                break;
            }
        }
        self.after();
        more
    }

    /// Whether messages are queued or under way.
    fn has_messages(&self) -> bool {
        let is_idle = self.stream.as_ref().is_none_or(Stream::is_tx_idle);
        !is_idle || self.base.sq.untaken() > 0
    }

    /// Frames an acknowledgement of all requests of the peer that are done.
    fn send_ack(&mut self, batch: &mut TxBatch) {
        let Some(s) = &mut self.stream else { return };
        if !s.may_send || s.is_tx_sealed() {
            return;
        }
        let mut message = control(s.responder.acknowledge());
        let segment = segment(&mut message, s.config.mulpdu);
        let framed = frame_marked(
            &mut s.markers,
            s.crc_tx,
            &segment,
            &message.source,
            &*self.base.rnic.memory,
            batch,
        );
        debug_assert!(framed.is_ok(), "a control message has no user memory");
        self.base.observe_all(|| {
            [
                Step::Build(Opcode::Control, 0),
                Step::Segment(0, true),
                Step::Frame(segment.header.len()),
            ]
        });
    }

    /// Cuts and frames one segment. Returns whether its message ends with it.
    fn send_segment(&mut self, next: Next, batch: &mut TxBatch) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let (message, request, last) = match (next, &mut s.current) {
            (Next::Current, Some(out)) => (&mut out.message, out.request, out.last),
            _ => {
                let Some((number, last, message)) = s.requester.next_part() else {
                    return false;
                };
                (message, Some(number), last)
            }
        };
        let segment = segment(message, s.config.mulpdu);
        let (crc, memory) = (s.crc_tx, &*self.base.rnic.memory);
        batch.set_request(request.unwrap_or(0));
        let framed = frame_marked(
            &mut s.markers,
            crc,
            &segment,
            &message.source,
            memory,
            batch,
        );
        let ended = message.sent >= message.len;
        let is_read = message.opcode == Opcode::ReadResponse;
        if framed.is_err() || next == Next::Part || ended {
            // The message is moved out. If it has not ended, it is stored as the message under way.
            let message = match next {
                Next::Part => s.requester.pop_part(),
                _ => s.current.take().map(|out| out.message),
            };
            let Some(message) = message else { return false };
            if framed.is_err() {
                self.cannot_finish(request, &message, segment.from);
                return false;
            }
            if !ended {
                s.current = Some(Outgoing {
                    message,
                    request,
                    last,
                });
            }
        }
        if let Some(number) = request
            && segment.last
            && last
            && let Some(posted) = self.base.sq.get_mut(number)
        {
            posted.phase = Phase::Sent;
        }
        if segment.last && request.is_none() && last {
            // Without a request, `last` means that the message is a response that occupies an IRD slot.
            s.responder.end_service();
            if is_read {
                self.count_remote(Ops::REMOTE_READ, segment.from + segment.len as u64);
            }
        }
        self.base.observe_all(|| {
            [
                Step::Segment(segment.len, segment.last),
                Step::Frame(segment.header.len() + segment.len),
            ]
        });
        ended
    }

    /// Fails a message whose memory was deregistered before byte `from` was sent.
    fn cannot_finish(&mut self, request: Option<u64>, message: &Message, from: u64) {
        if let Some(number) = request {
            self.fail_request(
                number,
                Status::LocalProtection,
                "memory of a posted request was deregistered",
            );
            return;
        }
        if let Some(s) = &mut self.stream {
            // The peer would interpret the next Read Response as the rest of this one.
            s.responder.clear();
        }
        let stag = message.source.stag().0;
        let violation = Violation::answer(PeerError::RemoteStag { stag });
        let context = TermContext::read_response(rest_of_read(message, from));
        self.fail_by_peer(violation, &context);
    }

    /// Finds the next message to send: the message under way, a response, or a message of the send queue.
    fn next_message(&mut self, now: Instant) -> Next {
        loop {
            let Some(s) = self.stream.as_mut() else {
                return Next::Nothing;
            };
            if s.end == End::Dead || !s.may_send {
                return Next::Nothing;
            }
            if s.current.is_some() {
                return Next::Current;
            }
            if s.is_tx_sealed() {
                return Next::Nothing;
            }
            if let Some(response) = s.responder.pop() {
                let (message, last) = match response {
                    Response::Read(m) | Response::Atomic(m) => (m, true),
                    Response::Control(c) => {
                        if let Control::Handover(message) = c {
                            s.handover.framed(message);
                        }
                        (control(c), false)
                    }
                    Response::Terminate(m) | Response::Rtr(m) => (m, false),
                };
                let (opcode, len) = (message.opcode, message.len);
                s.current = Some(Outgoing {
                    message,
                    request: None,
                    last,
                });
                self.base.observe(|| Step::Build(opcode, len));
                return Next::Current;
            }
            let rnr = self.timers.get(Timer::Rnr);
            if s.end != End::Open || rnr.is_some_and(|t| t > now) {
                return Next::Nothing;
            }
            self.timers.stop(Timer::Rnr);
            if let Some(seq) = s.requester.take_restart() {
                s.current = Some(Outgoing {
                    message: control(Control::Restart { seq }),
                    request: None,
                    last: false,
                });
                return Next::Current;
            }
            match s.requester.part_waits() {
                Some(true) => return Next::Nothing,
                Some(false) => return Next::Part,
                None => {}
            }
            // The peer's silence is measured from the first request without an answer.
            if !self.base.sq.has_outstanding() && !s.in_memory {
                self.timers.start(Timer::Probe, now);
            }
            match self.take() {
                Taken::Nothing => {
                    // A request that fails locally ends the connection: a Terminate may be queued now.
                    if !self.has_responses() {
                        return Next::Nothing;
                    }
                }
                Taken::Parts | Taken::Local => {}
            }
        }
    }

    /// Takes, builds and frames requests that are one short message, as most requests are, each in one step. Ends at the
    /// first request that is not, or if another message has to be sent first. Returns whether a request was framed.
    ///
    /// The request at which it ends is unchanged, and has to take the general path ([`Self::next_message`]).
    /// Bytes, completions and reported steps are the same on both paths: `crates/sim/tests/shortcuts.rs` compares them.
    pub(super) fn send_short(&mut self, now: Instant, batch: &mut TxBatch) -> bool {
        let Some(s) = &mut self.stream else {
            return false;
        };
        let is_next = self.base.state == State::Rts
            && s.end == End::Open
            && s.may_send
            && s.is_tx_idle()
            && !self.timers.runs(Timer::Rnr)
            && !s.is_tx_sealed();
        if !is_next {
            return false;
        }
        let (rnic, pd, qpn) = (&*self.base.rnic, self.base.pd, self.base.qpn);
        let mut any = false;
        while !batch.is_full() {
            let outstanding = self.base.sq.has_outstanding();
            let Some((_, posted)) = self.base.sq.peek() else {
                break;
            };
            let request = &posted.request;
            let is_plain = posted.phase == Phase::Queued
                && posted.skip == 0
                && posted.injected.is_none()
                && request.srq.is_none()
                && !(request.fence && s.requester.has_pending());
            let len = request.payload.len();
            if !is_plain || len >= s.short_limit {
                break;
            }
            let size = usize::try_from(len).unwrap_or(usize::MAX);
            let last = &mut self.last_read;
            let fill = |own: &mut Vec<u8>| append(&request.payload, rnic, last, pd, qpn, own);
            let (opcode, header, framed) = match request.op {
                Op::Send {
                    imm: None,
                    invalidate,
                } => {
                    let header = Untagged {
                        last: true,
                        opcode: Opcode::send(invalidate.is_some(), request.solicited),
                        inv_stag: invalidate.unwrap_or(Stag(0)),
                        qn: QN_SEND,
                        msn: s.requester.send_msn(),
                        mo: 0,
                    };
                    let framed = batch.push_fpdu(&header.emit(), size, s.crc_tx, fill);
                    (header.opcode, Untagged::LEN, framed)
                }
                Op::Write { remote, imm: None } => {
                    let header = Tagged {
                        last: true,
                        opcode: Opcode::Write,
                        stag: write_stag(remote, len),
                        to: remote.to,
                    };
                    let framed = batch.push_fpdu(&header.emit(), size, s.crc_tx, fill);
                    (header.opcode, Tagged::LEN, framed)
                }
                _ => break,
            };
            if !framed {
                break;
            }
            if !outstanding && !s.in_memory {
                // The peer's silence is measured as in `next_message`.
                self.timers.start(Timer::Probe, now);
            }
            s.requester.number_short(posted, opcode != Opcode::Write);
            posted.bytes = len;
            posted.phase = Phase::Sent;
            if let Some(observer) = &rnic.observer {
                for step in [
                    Step::Take(posted.request.id),
                    Step::Build(opcode, len),
                    Step::Segment(size, true),
                    Step::Frame(header + size),
                ] {
                    observer.step(qpn, &step);
                }
            }
            self.base.sq.advance();
            any = true;
            if batch.is_aligned() {
                break;
            }
        }
        any
    }

    /// Takes the next request of the send queue, if it may be sent now.
    fn take(&mut self) -> Taken {
        if self.base.state != State::Rts {
            return Taken::Nothing;
        }
        let Some(s) = self.stream.as_mut() else {
            return Taken::Nothing;
        };
        let Some((number, posted)) = self.base.sq.peek() else {
            return Taken::Nothing;
        };
        if posted.request.fence && s.requester.has_pending() {
            return Taken::Nothing;
        }
        if let Some(status) = posted.injected {
            self.base.sq.advance();
            self.fail_request(number, status, "an injected fault");
            return Taken::Nothing;
        }
        if posted.request.op.is_read_or_atomic() {
            match s.requester.slots_are_taken() {
                Some(false) => {}
                Some(true) => return Taken::Nothing,
                None => {
                    self.base.sq.advance();
                    self.fail_request(
                        number,
                        Status::LocalQpOperation,
                        "a Read or atomic with max_rd_atomic 0",
                    );
                    return Taken::Nothing;
                }
            }
        }
        let id = posted.request.id;
        s.requester.note_start(posted);
        if posted.phase == Phase::Done {
            // The request is a bind or invalidate that was executed before a receiver-not-ready moved the send queue back.
            self.base.sq.advance();
            self.retire();
            return Taken::Local;
        }
        self.base.sq.advance();
        self.base.observe(|| Step::Take(id));
        // The list of messages is empty, and its allocation is used again.
        let mut parts = self
            .stream
            .as_mut()
            .map(|s| s.requester.take_list())
            .unwrap_or_default();
        // Most requests are one message.
        parts.reserve_exact(1);
        let built = self.select_srq(number).and_then(|select| {
            self.build(number, &mut parts)?;
            Ok(select)
        });
        match built {
            Ok(select) => {
                if let Some(posted) = self.base.sq.get_mut(number)
                    && posted.skip > 0
                {
                    let skip = std::mem::take(&mut posted.skip);
                    parts.drain(..parts.len().min(skip as usize));
                }
                if let Some(select) = select {
                    parts.push_front(select);
                }
                if self.base.is_observed() {
                    for m in &parts {
                        self.base.observe(|| Step::Build(m.opcode, m.len));
                    }
                }
                let Some(s) = self.stream.as_mut() else {
                    return Taken::Nothing;
                };
                let seq = s.requester.seq();
                if let Some(posted) = self.base.sq.get_mut(number) {
                    posted.seq.1 = seq;
                    posted.phase = if parts.is_empty() {
                        Phase::Done
                    } else {
                        Phase::Sending
                    };
                }
                let is_local = parts.is_empty();
                s.requester.set_parts(number, parts);
                if is_local {
                    self.retire();
                    return Taken::Local;
                }
                Taken::Parts
            }
            Err(Unbuildable(status, why)) => {
                self.fail_request(number, status, why);
                Taken::Nothing
            }
        }
    }
}

/// Appends the payload of a request. Returns false if the request may not access the memory, or if the memory is no
/// longer registered.
#[inline(always)]
fn append(
    payload: &Payload,
    rnic: &Rnic,
    last: &mut LastRegion,
    pd: u32,
    qpn: u32,
    own: &mut Vec<u8>,
) -> bool {
    match payload {
        Payload::Inline(data) => {
            own.extend_from_slice(data);
            true
        }
        Payload::Sges(sges) => append_memory(sges, rnic, last, pd, qpn, own),
    }
}

/// [`append`] for payload in registered memory.
#[inline(never)]
fn append_memory(
    sges: &[Sge],
    rnic: &Rnic,
    last: &mut LastRegion,
    pd: u32,
    qpn: u32,
    own: &mut Vec<u8>,
) -> bool {
    sges.iter().filter(|s| s.len > 0).all(|sge| {
        let (to, len) = (To(sge.addr), u64::from(sge.len));
        let regions = &rnic.regions;
        let pinned = regions.pin(last, sge.lkey, pd, qpn, Access::NONE, to, len);
        pinned.is_ok_and(|pinned| {
            rnic.memory.gather(&pinned, 0, len, own);
            true
        })
    })
}

/// The Read Request for the part of a Read Response from byte `from` on.
fn rest_of_read(response: &Message, from: u64) -> Option<ReadRequest> {
    let (Address::Tagged { stag, to }, Source::Memory { places, .. }) =
        (response.address, &response.source)
    else {
        return None;
    };
    let source = places.first()?;
    Some(ReadRequest {
        sink_stag: stag,
        sink_to: To(to.0.wrapping_add(from)),
        size: u32::try_from(response.len - from).unwrap_or(u32::MAX),
        source_stag: source.stag(),
        source_to: To(source.to().0.wrapping_add(from)),
    })
}

/// Appends the FPDU of a segment to the batch, with markers if the peer requests them.
fn frame_marked(
    markers: &mut Option<Inserter>,
    crc: bool,
    segment: &Segment,
    source: &Source,
    memory: &dyn Memory,
    batch: &mut TxBatch,
) -> Result<(), Invalidated> {
    let Some(markers) = markers else {
        return frame(segment, source, crc, memory, batch);
    };
    let mut whole = TxBatch::default();
    frame(segment, source, crc, memory, &mut whole)?;
    let mut marked = Vec::with_capacity(whole.len() + whole.len() / 64);
    markers.insert(whole.as_bytes().unwrap_or(&[]), crc, &mut marked);
    batch.push_raw(&marked);
    Ok(())
}
