//! RDMAP transmit side: *take* the next request that may be sent, *build* its messages.
//!
//! Requests are taken in order. One waits, and everything behind it, while it is fenced and an earlier Read or atomic
//! is not done, while all ORD slots are taken, or while an RNR timer runs. Responses to the peer never wait for them,
//! so that two ends that stall cannot block each other (RFC 5040 §5.3 via the sheet).

use std::collections::VecDeque;
use std::time::Instant;

use smallvec::SmallVec;

use super::read::{PendingAtomic, PendingRead};
use crate::bounds;
use crate::connection::{Connection, End, First, Next, Outgoing, Peer, Response, Stream};
use crate::ddp::tx::{Address, Message, Places, Source};
use crate::llp::mpa::frame::TxBatch;
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::mr::{AccessError, LastRegion};
use crate::verbs::qp::State;
use crate::verbs::rnic::Rnic;
use crate::verbs::sq::{self, Phase};
use crate::verbs::wc::Status;
use crate::verbs::wr::{InlineData, Op, Payload, Remote, Sge};
use crate::wire::control::Control;
use crate::wire::ddp::{Tagged, Untagged};
use crate::wire::rdmap::{AtomicRequest, Immediate, Opcode, ReadRequest, Terminate};
use crate::wire::{Msn, QN_READ, QN_SEND, QN_TERMINATE, Stag, To};

/// The STag of zero-length messages: any will do but 0, which some hardware refuses.
const NO_STAG: Stag = Stag(1);

/// Version of our Hello.
pub(crate) const HELLO_VERSION: u8 = 1;

/// A private control message.
pub(crate) fn control(what: Control) -> Message {
    let header = what.header();
    Message {
        opcode: header.opcode,
        address: Address::Untagged {
            qn: header.qn,
            msn: header.msn,
            inv_stag: header.inv_stag,
            mo: header.mo,
        },
        source: Source::Bytes(SmallVec::new()),
        len: 0,
        sent: 0,
    }
}

/// The Terminate message.
pub(crate) fn terminate(what: &Terminate) -> Message {
    let bytes = what.emit();
    Message {
        opcode: Opcode::Terminate,
        // RFC 5040 §4.8: the one message of queue 2.
        address: Address::Untagged {
            qn: QN_TERMINATE,
            msn: Msn::FIRST,
            inv_stag: Stag(0),
            mo: 0,
        },
        len: bytes.len() as u64,
        source: Source::Bytes(SmallVec::from_vec(bytes)),
        sent: 0,
    }
}

fn bytes_message(opcode: Opcode, qn: u32, msn: u32, bytes: &[u8]) -> Message {
    Message {
        opcode,
        address: Address::Untagged {
            qn,
            msn: Msn(msn),
            inv_stag: Stag(0),
            mo: 0,
        },
        len: bytes.len() as u64,
        source: Source::Bytes(SmallVec::from_slice(bytes)),
        sent: 0,
    }
}

/// Queues the message that makes the stream ready.
pub(crate) fn queue_first(s: &mut Stream) {
    match s.config.first {
        First::Nothing => {}
        First::Hello => s.responses.push_back(Response::Control(Control::Hello {
            version: HELLO_VERSION,
            features: s.features(),
        })),
        First::Write => s
            .responses
            .push_back(Response::Rtr(tagged(Opcode::Write, NO_STAG, To(0)))),
        First::Read => {
            let request = ReadRequest {
                sink_stag: NO_STAG,
                sink_to: To(0),
                size: 0,
                source_stag: NO_STAG,
                source_to: To(0),
            };
            let msn = s.next_read_msn;
            s.next_read_msn = msn.wrapping_add(1);
            s.seq = s.seq.wrapping_add(1);
            s.reads.push_back(PendingRead {
                request: u64::MAX,
                sink: None,
                stag: NO_STAG,
                to: To(0),
                len: 0,
                received: 0,
            });
            s.responses.push_back(Response::Rtr(bytes_message(
                Opcode::ReadRequest,
                QN_READ,
                msn,
                &request.emit(),
            )));
        }
        First::Send => {
            let msn = s.next_send_msn;
            s.next_send_msn = msn.wrapping_add(1);
            s.responses.push_back(Response::Rtr(bytes_message(
                Opcode::Send,
                QN_SEND,
                msn,
                &[],
            )));
        }
    }
}

fn tagged(opcode: Opcode, stag: Stag, to: To) -> Message {
    Message {
        opcode,
        address: Address::Tagged { stag, to },
        source: Source::Bytes(SmallVec::new()),
        len: 0,
        sent: 0,
    }
}

/// Why a request cannot be built.
struct Unbuildable(Status, &'static str);

impl Connection {
    /// The next message to send: the one under way, a response, or the next of the send queue.
    pub(crate) fn next_message(&mut self, now: Instant) -> Next {
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
            if s.handover.tx_sealed {
                return Next::Nothing;
            }
            if let Some(response) = s.responses.pop_front() {
                let (message, last) = match response {
                    Response::Read(m) | Response::Atomic(m) => (m, true),
                    Response::Control(c) => {
                        s.handover.tx_sealed = matches!(c, Control::Handover(w) if w.is_last());
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
            if s.end != End::Open || s.rnr_until.is_some_and(|t| t > now) {
                return Next::Nothing;
            }
            s.rnr_until = None;
            if let Some(seq) = s.restart.take() {
                s.current = Some(Outgoing {
                    message: control(Control::Restart { seq }),
                    request: None,
                    last: false,
                });
                return Next::Current;
            }
            if let Some(next) = s.parts.front() {
                let waits = matches!(next.opcode, Opcode::ReadRequest | Opcode::AtomicRequest)
                    && s.reads.len() + s.atomics.len() > s.config.ord as usize;
                // The entries of this request are in `reads` already: one above the limit means "no free slot".
                if waits && !self.first_unsent_fits() {
                    return Next::Nothing;
                }
                return Next::Part;
            }
            // The peer's silence counts from the first request that it owes an answer to.
            if !self.base.sq.has_outstanding() {
                s.last_rx = Some(now);
                s.pinged = false;
            }
            match self.take() {
                Taken::Nothing => {
                    // A request that cannot be done ends the connection, and the peer hears of it.
                    if self.stream.as_ref().is_none_or(|s| s.responses.is_empty()) {
                        return Next::Nothing;
                    }
                }
                Taken::Parts | Taken::Local => {}
            }
        }
    }

    /// Takes, builds and frames the next request in one step, if it is one short message and nothing is to be sent before
    /// it, as is usual.
    ///
    /// Returns false, and has changed nothing, if the request has to take the general path ([`Self::next_message`]). Bytes,
    /// completions and reported steps are the same on both paths: `crates/sim/tests/shortcuts.rs` compares them.
    pub(crate) fn send_short(&mut self, now: Instant, batch: &mut TxBatch) -> bool {
        let outstanding = self.base.sq.has_outstanding();
        let (Some(s), Some((_, posted))) = (&mut self.stream, self.base.sq.peek()) else {
            return false;
        };
        let request = &posted.request;
        let is_next = self.base.state == State::Rts
            && s.end == End::Open
            && s.may_send
            && s.current.is_none()
            && s.parts.is_empty()
            && s.responses.is_empty()
            && s.restart.is_none()
            && s.rnr_until.is_none()
            && !s.handover.tx_sealed;
        let is_plain = posted.phase == Phase::Queued
            && posted.skip == 0
            && posted.injected.is_none()
            && request.srq.is_none()
            && !(request.fence && (!s.reads.is_empty() || !s.atomics.is_empty()));
        let len = request.payload.len();
        if !is_next || !is_plain || len >= s.short_limit {
            return false;
        }
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        let (rnic, pd, qpn) = (&*self.base.rnic, self.base.pd, self.base.qpn);
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
                    msn: Msn(s.next_send_msn),
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
            _ => return false,
        };
        if !framed {
            return false;
        }
        if !outstanding {
            // As in `next_message`.
            s.last_rx = Some(now);
            s.pinged = false;
        }
        let seq = s.seq.wrapping_add(1);
        s.seq = seq;
        posted.msn_before = (s.next_send_msn, s.next_read_msn);
        posted.seq = (seq, seq);
        posted.bytes = len;
        posted.phase = Phase::Sent;
        if opcode != Opcode::Write {
            s.next_send_msn = s.next_send_msn.wrapping_add(1);
        }
        let id = request.id;
        self.base.sq.advance();
        self.base.observe_all(|| {
            [
                Step::Take(id),
                Step::Build(opcode, len),
                Step::Segment(size, true),
                Step::Frame(header + size),
            ]
        });
        true
    }

    /// Whether the next unsent Read Request still finds an ORD slot: outstanding ones before it are counted.
    fn first_unsent_fits(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        let unsent = s
            .parts
            .iter()
            .filter(|m| matches!(m.opcode, Opcode::ReadRequest | Opcode::AtomicRequest))
            .count();
        let outstanding = (s.reads.len() + s.atomics.len()).saturating_sub(unsent);
        outstanding < s.config.ord as usize
    }

    /// Takes the next request of the send queue, if it may be sent now.
    fn take(&mut self) -> Taken {
        if self.base.state != State::Rts {
            return Taken::Nothing;
        }
        let Some(s) = self.stream.as_mut() else {
            return Taken::Nothing;
        };
        let outstanding = s.reads.len() + s.atomics.len();
        let Some((number, posted)) = self.base.sq.peek() else {
            return Taken::Nothing;
        };
        if posted.request.fence && outstanding > 0 {
            return Taken::Nothing;
        }
        if let Some(status) = posted.injected {
            self.base.sq.advance();
            self.fail_request(number, status, "a fault was asked for");
            return Taken::Nothing;
        }
        if posted.request.op.is_read_or_atomic() {
            if s.config.ord == 0 {
                self.base.sq.advance();
                self.fail_request(
                    number,
                    Status::LocalQpOperation,
                    "a Read or atomic with max_rd_atomic 0",
                );
                return Taken::Nothing;
            }
            if outstanding >= s.config.ord as usize {
                return Taken::Nothing;
            }
        }
        let id = posted.request.id;
        posted.msn_before = (s.next_send_msn, s.next_read_msn);
        posted.seq = (s.seq.wrapping_add(1), s.seq);
        if posted.phase == Phase::Done {
            // A bind or invalidate that was done before the queue went back.
            self.base.sq.advance();
            self.retire();
            return Taken::Local;
        }
        self.base.sq.advance();
        self.base.observe(|| Step::Take(id));
        // They are empty now, and keep their room.
        let mut parts = self
            .stream
            .as_mut()
            .map(|s| std::mem::take(&mut s.parts))
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
                let seq = s.seq;
                if let Some(posted) = self.base.sq.get_mut(number) {
                    posted.seq.1 = seq;
                    posted.phase = if parts.is_empty() {
                        Phase::Done
                    } else {
                        Phase::Sending
                    };
                }
                let is_local = parts.is_empty();
                s.parts = parts;
                if is_local {
                    self.retire();
                    return Taken::Local;
                }
                s.parts_of = number;
                Taken::Parts
            }
            Err(Unbuildable(status, why)) => {
                self.fail_request(number, status, why);
                Taken::Nothing
            }
        }
    }

    /// Request `number`, the last one that was taken, cannot be done. When all before it have completed it fails, and
    /// the queue pair with it; until then nothing more is sent but answers.
    pub(crate) fn fail_request(&mut self, number: u64, status: Status, why: &'static str) {
        self.base.sq.fail(number, status, why);
        if let Some(s) = self.stream.as_mut() {
            s.parts.clear();
            s.restart = None;
            s.rnr_until = None;
            s.reads.retain(|r| r.request != number);
            s.atomics.retain(|a| a.request != number);
        }
        self.retire();
    }

    /// What tells the peer for which shared receive queue a request is, if it takes it to be for another (XRC).
    fn select_srq(&mut self, number: u64) -> Result<Option<Message>, Unbuildable> {
        let Some(posted) = self.base.sq.get_mut(number) else {
            return Ok(None);
        };
        let Some(srq) = posted.request.srq else {
            return Ok(None);
        };
        if posted.request.op.is_local() {
            return Ok(None);
        }
        let s = self.stream_mut()?;
        if s.peer != Peer::Anywarp {
            return Err(Unbuildable(
                Status::LocalQpOperation,
                "XRC to a standard iWARP peer",
            ));
        }
        let known = s.selected_srq.replace(srq) == Some(srq);
        Ok((!known).then(|| control(Control::SelectSrq { number: srq })))
    }

    /// Builds the messages of a request.
    fn build(&mut self, number: u64, parts: &mut VecDeque<Message>) -> Result<(), Unbuildable> {
        let Some(posted) = self.base.sq.get_mut(number) else {
            return Ok(());
        };
        let op = posted.request.op;
        let solicited = posted.request.solicited;
        let len = posted.request.payload.len();
        if !sq::fits(len) {
            return Err(Unbuildable(
                Status::LocalLength,
                "a message above max_msg_sz",
            ));
        }
        posted.bytes = len;
        match op {
            Op::Send { imm, invalidate } => {
                let source = self.source(number)?;
                let s = self.stream_mut()?;
                if let Some(value) = imm {
                    if s.peer != Peer::Anywarp {
                        return Err(Unbuildable(
                            Status::LocalQpOperation,
                            "Send with immediate to a standard iWARP peer",
                        ));
                    }
                    parts.push_back(control(Control::SendImmediate { value }));
                }
                let msn = s.next_send_msn;
                s.next_send_msn = msn.wrapping_add(1);
                s.seq = s.seq.wrapping_add(1);
                parts.push_back(Message {
                    opcode: Opcode::send(invalidate.is_some(), solicited),
                    address: Address::Untagged {
                        qn: QN_SEND,
                        msn: Msn(msn),
                        inv_stag: invalidate.unwrap_or(Stag(0)),
                        mo: 0,
                    },
                    source,
                    len,
                    sent: 0,
                });
            }
            // On the wire an atomic write is a Write: one segment, which the receiver places as one word.
            Op::Write { remote, .. } | Op::AtomicWrite { remote } => {
                let imm = match op {
                    Op::Write { imm, .. } => imm,
                    _ => None,
                };
                let source = self.source(number)?;
                let s = self.stream_mut()?;
                s.seq = s.seq.wrapping_add(1);
                let stag = write_stag(remote, len);
                parts.push_back(Message {
                    opcode: Opcode::Write,
                    address: Address::Tagged {
                        stag,
                        to: remote.to,
                    },
                    source,
                    len,
                    sent: 0,
                });
                if let Some(value) = imm {
                    let msn = s.next_send_msn;
                    s.next_send_msn = msn.wrapping_add(1);
                    s.seq = s.seq.wrapping_add(1);
                    // RFC 7306 §6 [imm-data]: eight bytes on queue 0; the verbs' four come first.
                    let opcode = if solicited {
                        Opcode::ImmediateSolicited
                    } else {
                        Opcode::Immediate
                    };
                    parts.push_back(bytes_message(
                        opcode,
                        QN_SEND,
                        msn,
                        &Immediate { value }.emit(),
                    ));
                }
            }
            Op::Read { remote } => self.build_read(number, remote, len, parts)?,
            Op::FetchAdd { remote, add } => {
                let sink = self.atomic_sink(number)?;
                self.build_atomic(number, sink, parts, |id| {
                    AtomicRequest::fetch_add(id, remote.rkey, remote.to, add)
                })?;
            }
            Op::CompareSwap {
                remote,
                compare,
                swap,
            } => {
                let sink = self.atomic_sink(number)?;
                self.build_atomic(number, sink, parts, |id| {
                    AtomicRequest::cmp_swap(id, remote.rkey, remote.to, compare, swap)
                })?;
            }
            Op::LocalInvalidate { stag } => {
                let (pd, qpn) = (self.base.pd, self.base.qpn);
                self.base
                    .rnic
                    .regions
                    .invalidate(stag, pd, qpn)
                    .map_err(|_| {
                        Unbuildable(
                            Status::LocalProtection,
                            "local invalidate of an STag that may not be",
                        )
                    })?;
            }
            Op::Bind(bind) => {
                let (pd, qpn) = (self.base.pd, self.base.qpn);
                self.base.rnic.regions.bind(&bind, pd, qpn).map_err(|_| {
                    Unbuildable(
                        Status::WindowBind,
                        "a memory window that cannot be bound like this",
                    )
                })?;
            }
        }
        Ok(())
    }

    fn stream_mut(&mut self) -> Result<&mut Stream, Unbuildable> {
        self.stream
            .as_mut()
            .ok_or(Unbuildable(Status::Flushed, "the stream is gone"))
    }

    /// One Read Request for each element of the list: the wire has a single sink STag.
    fn build_read(
        &mut self,
        number: u64,
        remote: Remote,
        len: u64,
        parts: &mut VecDeque<Message>,
    ) -> Result<(), Unbuildable> {
        let list: SmallVec<[Sge; 4]> =
            match self.base.sq.get_mut(number).map(|p| &p.request.payload) {
                Some(Payload::Sges(sges)) => sges.iter().copied().filter(|s| s.len > 0).collect(),
                _ => SmallVec::new(),
            };
        let mut from = remote.to;
        if len == 0 {
            self.push_read(number, None, remote.rkey, from, 0, parts)?;
        }
        for sge in &list {
            let sink = self
                .base
                .rnic
                .regions
                .check(
                    sge.lkey,
                    self.base.pd,
                    self.base.qpn,
                    Access::LOCAL_WRITE,
                    To(sge.addr),
                    u64::from(sge.len),
                )
                .map_err(|_| {
                    Unbuildable(
                        Status::LocalProtection,
                        "a Read into memory that its lkey does not allow",
                    )
                })?;
            self.push_read(number, Some(sink), remote.rkey, from, sge.len, parts)?;
            from = To(from.0.wrapping_add(u64::from(sge.len)));
        }
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.answers = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        }
        Ok(())
    }

    fn push_read(
        &mut self,
        number: u64,
        sink: Option<crate::verbs::mr::Placement>,
        rkey: Stag,
        from: To,
        size: u32,
        parts: &mut VecDeque<Message>,
    ) -> Result<(), Unbuildable> {
        let (stag, to) = sink
            .as_ref()
            .map_or((NO_STAG, To(0)), |p| (p.stag(), p.to()));
        let s = self.stream_mut()?;
        let request = ReadRequest {
            sink_stag: stag,
            sink_to: to,
            size,
            source_stag: if size == 0 { NO_STAG } else { rkey },
            source_to: from,
        };
        let msn = s.next_read_msn;
        s.next_read_msn = msn.wrapping_add(1);
        s.seq = s.seq.wrapping_add(1);
        s.reads.push_back(PendingRead {
            request: number,
            sink,
            stag,
            to,
            len: u64::from(size),
            received: 0,
        });
        parts.push_back(bytes_message(
            Opcode::ReadRequest,
            QN_READ,
            msn,
            &request.emit(),
        ));
        Ok(())
    }

    fn build_atomic(
        &mut self,
        number: u64,
        sink: crate::verbs::mr::Placement,
        parts: &mut VecDeque<Message>,
        request: impl FnOnce(u32) -> AtomicRequest,
    ) -> Result<(), Unbuildable> {
        let s = self.stream_mut()?;
        let id = s.next_atomic_id;
        s.next_atomic_id = id.wrapping_add(1);
        let msn = s.next_read_msn;
        s.next_read_msn = msn.wrapping_add(1);
        s.seq = s.seq.wrapping_add(1);
        s.atomics.push_back(PendingAtomic {
            request: number,
            id,
            sink,
        });
        parts.push_back(bytes_message(
            Opcode::AtomicRequest,
            QN_READ,
            msn,
            &request(id).emit(),
        ));
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.answers = 1;
            posted.bytes = 8;
        }
        Ok(())
    }

    /// The eight bytes that an atomic's old value goes to.
    fn atomic_sink(&mut self, number: u64) -> Result<crate::verbs::mr::Placement, Unbuildable> {
        let sge = match self.base.sq.get_mut(number).map(|p| &p.request.payload) {
            Some(Payload::Sges(sges)) => sges.first().copied(),
            _ => None,
        };
        let sge = sge.filter(|s| s.len >= 8).ok_or(Unbuildable(
            Status::LocalLength,
            "an atomic without 8 bytes of memory for its result",
        ))?;
        self.base
            .rnic
            .regions
            .check(
                sge.lkey,
                self.base.pd,
                self.base.qpn,
                Access::LOCAL_WRITE,
                To(sge.addr),
                8,
            )
            .map_err(|_| {
                Unbuildable(
                    Status::LocalProtection,
                    "an atomic's result into memory that its lkey does not allow",
                )
            })
    }

    /// The payload of a Send or Write, checked.
    fn source(&mut self, number: u64) -> Result<Source, Unbuildable> {
        let Some(posted) = self.base.sq.get_mut(number) else {
            return Ok(Source::Bytes(SmallVec::new()));
        };
        match &posted.request.payload {
            Payload::Inline(data) => Ok(Source::Bytes(InlineData::from_slice(data))),
            Payload::Sges(sges) => {
                let mut places = Places::new();
                for sge in sges.iter().filter(|s| s.len > 0) {
                    let place = self
                        .base
                        .rnic
                        .regions
                        .check(
                            sge.lkey,
                            self.base.pd,
                            self.base.qpn,
                            Access::NONE,
                            To(sge.addr),
                            u64::from(sge.len),
                        )
                        .map_err(|_: AccessError| {
                            Unbuildable(
                                Status::LocalProtection,
                                "a send from memory that its lkey does not allow",
                            )
                        })?;
                    places.push(place);
                }
                Ok(Source::Memory {
                    places,
                    volatile: false,
                })
            }
        }
    }

    /// The peer has no receive for request message `seq`: go back to the request it belongs to and wait.
    pub(crate) fn handle_rnr(&mut self, seq: u32, timer: u8, now: Instant) {
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
    pub(crate) fn handle_ack(&mut self, seq: u32) -> bool {
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

/// Appends what is to be sent. False: it is not allowed, or is no longer there.
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
        Payload::Sges(sges) => sges.iter().filter(|s| s.len > 0).all(|sge| {
            let (to, len) = (To(sge.addr), u64::from(sge.len));
            let pinned = rnic
                .regions
                .pin(last, sge.lkey, pd, qpn, Access::NONE, to, len);
            pinned.is_ok_and(|pinned| {
                rnic.memory.gather(&pinned, 0, len, own);
                true
            })
        }),
    }
}

/// Sheet 4.5: a Write of length 0 names no memory; STag 0 would upset some receivers.
fn write_stag(remote: Remote, len: u64) -> Stag {
    if len == 0 { NO_STAG } else { remote.rkey }
}

/// What [`Connection::take`] found.
enum Taken {
    Nothing,
    /// Messages wait in `parts`.
    Parts,
    /// A request with nothing on the wire was done.
    Local,
}

/// A Terminate as one whole FPDU, for ends that have no queue pair yet.
pub fn terminate_fpdu(what: &Terminate, with_crc: bool) -> Vec<u8> {
    let mut message = terminate(what);
    let segment = crate::ddp::tx::segment(&mut message, bounds::MULPDU_MIN);
    crate::llp::mpa::frame::frame_bytes(&segment, &message.source, with_crc)
}
