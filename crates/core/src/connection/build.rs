//! Builds the messages of a work request.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::Connection;
use super::stream::{Peer, Stream};
use super::timers::Timer;
use crate::ddp::tx::{Address, Message};
use crate::rdmap::message::{bytes_message, control, write_stag};
use crate::verbs::access::Access;
use crate::verbs::mr::{AccessError, Placement};
use crate::verbs::source::{Places, Source};
use crate::verbs::sq::{self};
use crate::verbs::wc::Status;
use crate::verbs::wr::{InlineData, Op, Payload, Remote, Sge};
use crate::wire::control::Control;
use crate::wire::rdmap::{AtomicRequest, Immediate, Opcode};
use crate::wire::{Msn, QN_SEND, Stag, To};

/// Why a request cannot be built.
pub(super) struct Unbuildable(pub(super) Status, pub(super) &'static str);

impl Connection {
    /// Fails request `number`, the last one that was taken. Its completion waits until all requests before it have
    /// completed; then the queue pair fails too. Until then only responses and control messages are sent.
    pub(super) fn fail_request(&mut self, number: u64, status: Status, why: &'static str) {
        self.base.sq.fail(number, status, why);
        if let Some(s) = self.stream.as_mut() {
            s.requester.forget_last(number);
        }
        self.timers.stop(Timer::Rnr);
        self.retire();
    }

    /// The SelectSrq message to send before a request, if the request is for another shared receive queue than the last
    /// one (XRC).
    pub(super) fn select_srq(&mut self, number: u64) -> Result<Option<Message>, Unbuildable> {
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
        let is_new = s.requester.select_srq(srq);
        Ok(is_new.then(|| control(Control::SelectSrq { number: srq })))
    }

    /// Builds the messages of a request.
    pub(super) fn build(
        &mut self,
        number: u64,
        parts: &mut VecDeque<Message>,
    ) -> Result<(), Unbuildable> {
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
                let msn = s.requester.number_send();
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
                s.requester.number_request();
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
                    let msn = s.requester.number_send();
                    // RFC 7306 §6 [imm-data]: eight bytes on queue 0; the four bytes of a verbs immediate come first.
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
                            "local invalidate of an STag that this queue pair may not invalidate",
                        )
                    })?;
            }
            Op::Bind(bind) => {
                self.base.bind(&bind).map_err(|_| {
                    Unbuildable(
                        Status::WindowBind,
                        "a memory window that cannot be bound with these rights or this range",
                    )
                })?;
            }
        }
        Ok(())
    }

    fn stream_mut(&mut self) -> Result<&mut Stream, Unbuildable> {
        self.stream
            .as_mut()
            .ok_or(Unbuildable(Status::Flushed, "the stream has ended"))
    }

    /// Builds one Read Request for each element of the list, because a Read Request has a single sink STag.
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
            let s = self.stream_mut()?;
            parts.push_back(s.requester.read(number, None, remote.rkey, from, 0));
        }
        for sge in &list {
            let why = "a Read into memory that its lkey does not allow";
            let sink = self.check_sink(sge, u64::from(sge.len), why)?;
            let s = self.stream_mut()?;
            let message = s
                .requester
                .read(number, Some(sink), remote.rkey, from, sge.len);
            parts.push_back(message);
            from = To(from.0.wrapping_add(u64::from(sge.len)));
        }
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.answers = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        }
        Ok(())
    }

    fn build_atomic(
        &mut self,
        number: u64,
        sink: Placement,
        parts: &mut VecDeque<Message>,
        request: impl FnOnce(u32) -> AtomicRequest,
    ) -> Result<(), Unbuildable> {
        let s = self.stream_mut()?;
        parts.push_back(s.requester.atomic(number, sink, request));
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.answers = 1;
            posted.bytes = 8;
        }
        Ok(())
    }

    /// The eight bytes of memory that the old value of an atomic is written to.
    fn atomic_sink(&mut self, number: u64) -> Result<Placement, Unbuildable> {
        let sge = match self.base.sq.get_mut(number).map(|p| &p.request.payload) {
            Some(Payload::Sges(sges)) => sges.first().copied(),
            _ => None,
        };
        let sge = sge.filter(|s| s.len >= 8).ok_or(Unbuildable(
            Status::LocalLength,
            "an atomic without 8 bytes of memory for its result",
        ))?;
        let why = "an atomic's result into memory that its lkey does not allow";
        self.check_sink(&sge, 8, why)
    }

    /// The first `len` bytes of an element that a response is written to. `why`: the text of a failure.
    #[inline]
    fn check_sink(&self, sge: &Sge, len: u64, why: &'static str) -> Result<Placement, Unbuildable> {
        let (need, to) = (Access::LOCAL_WRITE, To(sge.addr));
        let regions = &self.base.rnic.regions;
        regions
            .check(sge.lkey, self.base.pd, self.base.qpn, need, to, len)
            .map_err(|_| Unbuildable(Status::LocalProtection, why))
    }

    /// The payload of a Send or Write, after the access check.
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
}
