//! Transmit side: *take* the next request, *build* its message, *cut* datagrams from it.
//!
//! Requests are taken in order, and only while the queue pair is in RTS. A datagram is copied together and sealed
//! when it is cut, so what is sent always fits its checksum, whatever the application does to its buffer meanwhile.

use std::net::{IpAddr, SocketAddr};

use smallvec::SmallVec;

use super::flow::{Peer, Report};
use super::{DatagramQp, Kind, TxDatagram};
use crate::bounds;
use crate::connection::Step;
use crate::ddp::tx::{Address, Message, Places, Source};
use crate::error::Misuse;
use crate::llp::mpa::frame::for_each_part;
use crate::verbs::mr::{Access, Memory};
use crate::verbs::qp::State;
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Destination, Op, Payload, WorkRequest};
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::dgram::{self, ATTR_SOLICITED, SUB_PLAIN, Shim};
use crate::wire::rdmap::Opcode;
use crate::wire::{Msn, QN_SEND, Stag, To};

/// The STag of zero-length messages: it names nothing, and is not 0, which looks like a mistake.
const NO_STAG: Stag = Stag(1);

/// Most bytes in front of a payload.
const HEAD_MAX: usize = Shim::LEN + 8 + Untagged::LEN;

/// The message that is being cut into datagrams.
#[derive(Debug)]
pub(super) struct Current {
    message: Message,
    /// Number of its request.
    request: u64,
    to: Destination,
    /// What all its datagrams have; the offset is set for each.
    shim: Shim,
    /// Payload bytes of a datagram.
    segment: u64,
}

impl Current {
    /// Whose pace it follows; a group has none.
    fn peer(&self) -> Option<Peer> {
        let to = self.to.addr;
        let ip = to.ip().to_canonical();
        (!ip.is_multicast()).then(|| (SocketAddr::new(ip, to.port()), self.shim.dst_index))
    }
}

/// Why a request cannot be built.
struct Unbuildable(Status, &'static str);

/// What `ibv_post_send(3)` checks at once.
pub(super) fn check(kind: Kind, request: &WorkRequest) -> Result<(), Misuse> {
    match (&request.op, kind) {
        (
            Op::Send {
                invalidate: None, ..
            },
            _,
        )
        | (Op::Write { .. } | Op::LocalInvalidate { .. } | Op::Bind(_), Kind::Uc) => {}
        _ => {
            return Err(Misuse::InvalidArgument(
                "an operation that datagram queue pairs of this kind do not do",
            ));
        }
    }
    if kind == Kind::Ud && request.destination.is_none() {
        return Err(Misuse::InvalidArgument(
            "a send on a UD queue pair without an address handle",
        ));
    }
    Ok(())
}

impl DatagramQp {
    /// Adds to `out` what can be sent now, up to one batch.
    ///
    /// Each is to be sent, in this order, and reported by [`Self::handle_written`] or [`Self::handle_send_error`].
    /// What the socket does not take yet (EAGAIN, ENOBUFS) is kept by the caller and tried again. When the queue pair
    /// goes to RESET or to the error state, what was not sent is to be thrown away.
    pub fn poll_tx(&mut self, out: &mut Vec<TxDatagram>) {
        let mut bytes = 0;
        self.was_stalled = false;
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some((peer, from, report)) = self.flow.next_report()
        {
            let datagram = self.report(peer, from, &report);
            self.given_out.push_back((None, false));
            out.push(datagram);
        }
        while out.len() < bounds::DATAGRAM_BATCH && bytes < bounds::TX_BATCH_BYTES {
            let Some(current) = self.current.take() else {
                if self.take() {
                    continue;
                }
                break;
            };
            if let Some(peer) = current.peer()
                && !self.flow.may_send(&peer)
            {
                self.was_stalled = true;
                self.current = Some(current);
                break;
            }
            bytes += self.cut(current, out);
        }
        self.after();
    }

    /// A stall has lasted long enough: the peer does not report, and is sent to without.
    pub fn handle_stall(&mut self) {
        if self.flow.stall().is_some() {
            self.counters.tx_stalls += 1;
            self.flow.give_up_waiting();
        }
    }

    /// Tells a sender how far it was heard. To a queue pair, like everything else, but from no request.
    fn report(&self, (to, dst_index): Peer, from: Option<IpAddr>, report: &Report) -> TxDatagram {
        let (header, payload) = report.emit();
        let shim = Shim {
            epoch: self.epoch,
            qkey: 0,
            id: report.id,
            length: Report::LEN as u32,
            offset: 0,
            sub_op: SUB_PLAIN,
            attributes: 0,
            dst_index,
            src_index: index(self.qpn),
            immediate: None,
            commit: false,
            parity: false,
        };
        let mut bytes = dgram::emit_head(&shim, &Header::Untagged(header));
        bytes.extend_from_slice(&payload);
        dgram::seal(&mut bytes);
        TxDatagram {
            to,
            from,
            hop_limit: 0,
            traffic_class: 0,
            bytes,
        }
    }

    /// The next `datagrams` that were given out have been handed to the socket.
    pub fn handle_written(&mut self, datagrams: usize) {
        for _ in 0..datagrams {
            let Some((request, last)) = self.given_out.pop_front() else {
                break;
            };
            self.counters.tx_dgrams += 1;
            if let (Some(request), true) = (request, last) {
                self.sent(request);
            }
        }
        self.retire();
        self.after();
    }

    /// The socket refused the next datagram for good, and it was thrown away: its request fails, the queue pair goes
    /// on (with a lossy service an error of one destination is no business of the others).
    pub fn handle_send_error(&mut self) {
        let Some((request, last)) = self.given_out.pop_front() else {
            return;
        };
        self.counters.tx_errors += 1;
        let Some(request) = request else { return };
        self.condemn(request, Status::LocalQpOperation);
        if last {
            self.sent(request);
        }
        self.retire();
        self.after();
    }

    fn sent(&mut self, request: u64) {
        if let Some(posted) = self.sq.get_mut(request) {
            posted.phase = Phase::Done;
        }
    }

    /// Takes the next request of the send queue, if it may be sent now. False: nothing happened.
    fn take(&mut self) -> bool {
        if self.state != State::Rts || (self.kind == Kind::Uc && self.peer.is_none()) {
            return false;
        }
        let Some((number, posted)) = self.sq.peek() else {
            return false;
        };
        posted.phase = Phase::Sending;
        let id = posted.request.id;
        self.sq.advance();
        self.observe(&Step::Take(id));
        match self.build(number) {
            Ok(Some(current)) => {
                self.observe(&Step::Build(current.message.opcode, current.message.len));
                self.current = Some(current);
            }
            Ok(None) => {
                self.sent(number);
                self.retire();
            }
            Err(error) => self.fail_request(number, error),
        }
        true
    }

    /// A request fails by our own side's fault. Those before it finish, those behind it are flushed, receiving goes on.
    // IBA 10.3.1 [sqe]: an error of the send queue of an unreliable service stops that queue alone.
    fn fail_request(&mut self, number: u64, Unbuildable(status, why): Unbuildable) {
        self.observe(&Step::Failed(why));
        self.condemn(number, status);
        self.sent(number);
        self.current = None;
        self.state = State::Sqe;
        self.flush_untaken();
    }

    /// Builds the message of a request; none if there was nothing to send for it.
    fn build(&mut self, number: u64) -> Result<Option<Current>, Unbuildable> {
        let Some(posted) = self.sq.get_mut(number) else {
            return Ok(None);
        };
        let len = posted.request.payload.len();
        let limit = match self.kind {
            Kind::Ud => u64::from(bounds::UD_MTU),
            Kind::Uc => bounds::MAX_MESSAGE,
        };
        if len > limit {
            return Err(Unbuildable(
                Status::LocalLength,
                "a message longer than the queue pair can send",
            ));
        }
        posted.bytes = len;
        let (op, solicited) = (posted.request.op, posted.request.solicited);
        let destination = match self.kind {
            Kind::Ud => posted.request.destination,
            Kind::Uc => self.peer,
        };
        let id = self.next_id;
        let (opcode, address, imm) = match op {
            Op::Send { imm, .. } => {
                let opcode = if solicited {
                    Opcode::SendSolicited
                } else {
                    Opcode::Send
                };
                let address = Address::Untagged {
                    qn: QN_SEND,
                    msn: Msn(id),
                    inv_stag: Stag(0),
                    mo: 0,
                };
                (opcode, address, imm)
            }
            Op::Write { remote, imm } => {
                let (stag, to) = match len {
                    0 => (NO_STAG, To(0)),
                    _ => (remote.rkey, remote.to),
                };
                (Opcode::Write, Address::Tagged { stag, to }, imm)
            }
            Op::LocalInvalidate { stag } => {
                let done = self.rnic.regions.invalidate(stag, self.pd, self.qpn);
                return match done {
                    Ok(()) => Ok(None),
                    Err(_) => Err(Unbuildable(
                        Status::LocalProtection,
                        "local invalidate of an STag that may not be",
                    )),
                };
            }
            Op::Bind(bind) => {
                return match self.rnic.regions.bind(&bind, self.pd, self.qpn) {
                    Ok(()) => Ok(None),
                    Err(_) => Err(Unbuildable(
                        Status::WindowBind,
                        "a memory window that cannot be bound like this",
                    )),
                };
            }
            Op::AtomicWrite { .. }
            | Op::Read { .. }
            | Op::FetchAdd { .. }
            | Op::CompareSwap { .. } => {
                return Err(Unbuildable(
                    Status::LocalQpOperation,
                    "an operation that needs an answer",
                ));
            }
        };
        let source = self.source(number)?;
        let Some(to) = destination else {
            return Err(Unbuildable(Status::LocalQpOperation, "no destination"));
        };
        self.next_id = id.wrapping_add(1);
        let shim = Shim {
            epoch: self.epoch,
            qkey: self.qkey_for(&to),
            id,
            length: u32::try_from(len).unwrap_or(u32::MAX),
            offset: 0,
            sub_op: SUB_PLAIN,
            attributes: if solicited { ATTR_SOLICITED } else { 0 },
            dst_index: index(to.qpn),
            src_index: index(self.qpn),
            // In each datagram: any of them may be the one that completes the message.
            immediate: imm,
            commit: false,
            parity: false,
        };
        Ok(Some(Current {
            message: Message {
                opcode,
                address,
                source,
                len,
                sent: 0,
            },
            request: number,
            to,
            shim,
            segment: match self.kind {
                Kind::Ud => u64::from(bounds::UD_MTU),
                Kind::Uc => self.segment as u64,
            },
        }))
    }

    /// The key in the shim. IBA 10.2.5 [qkey-high]: a controlled key stands for the queue pair's own.
    fn qkey_for(&self, to: &Destination) -> u32 {
        match self.kind {
            Kind::Ud if to.qkey & 0x8000_0000 != 0 => self.attr.qkey,
            Kind::Ud => to.qkey,
            Kind::Uc => 0,
        }
    }

    /// The payload of a request, checked.
    fn source(&mut self, number: u64) -> Result<Source, Unbuildable> {
        let Some(posted) = self.sq.get_mut(number) else {
            return Ok(Source::Bytes(SmallVec::new()));
        };
        let sges = match &posted.request.payload {
            Payload::Inline(data) => return Ok(Source::Bytes(data.clone())),
            Payload::Sges(sges) => sges,
        };
        let mut places = Places::new();
        for sge in sges.iter().filter(|s| s.len > 0) {
            let (at, len) = (To(sge.addr), u64::from(sge.len));
            let place = self
                .rnic
                .regions
                .check(sge.lkey, self.pd, self.qpn, Access::NONE, at, len)
                .map_err(|_| {
                    Unbuildable(
                        Status::LocalProtection,
                        "a send from memory that its lkey does not allow",
                    )
                })?;
            places.push(place);
        }
        Ok(Source::Memory {
            places,
            volatile: true,
        })
    }

    /// Cuts the next datagram of a message; returns its length. The message goes on unless it ended or failed.
    fn cut(&mut self, mut current: Current, out: &mut Vec<TxDatagram>) -> usize {
        let message = &mut current.message;
        let from = message.sent;
        let len = current.segment.min(message.len - from);
        let last = from + len == message.len;
        let offset = u32::try_from(from).unwrap_or(u32::MAX);
        let opcode = message.opcode;
        let header = match message.address {
            Address::Tagged { stag, to } => Header::Tagged(Tagged {
                last,
                opcode,
                stag,
                to: To(to.0.wrapping_add(from)),
            }),
            Address::Untagged {
                qn, msn, inv_stag, ..
            } => Header::Untagged(Untagged {
                last,
                opcode,
                inv_stag,
                qn,
                msn,
                mo: offset,
            }),
        };
        let shim = Shim {
            offset,
            ..current.shim
        };
        let payload = usize::try_from(len).unwrap_or(0);
        let mut bytes = Vec::with_capacity(HEAD_MAX + payload + dgram::CRC);
        dgram::put_head(&shim, &header, &mut bytes);
        if !gather(&message.source, from, len, &*self.rnic.memory, &mut bytes) {
            let gone = Unbuildable(
                Status::LocalProtection,
                "memory of a posted request was deregistered",
            );
            self.fail_request(current.request, gone);
            return 0;
        }
        dgram::seal(&mut bytes);
        message.sent += len;
        self.observe(&Step::Segment(payload, last));
        self.given_out.push_back((Some(current.request), last));
        let size = bytes.len();
        if let Some(peer) = current.peer() {
            let end = u32::try_from(from + len).unwrap_or(u32::MAX);
            self.flow.sent(peer, shim.id, end, size);
        }
        out.push(TxDatagram {
            to: current.to.addr,
            from: current.to.source,
            hop_limit: current.to.hop_limit,
            traffic_class: current.to.traffic_class,
            bytes,
        });
        if last {
            if let Some(posted) = self.sq.get_mut(current.request) {
                posted.phase = Phase::Sent;
            }
        } else {
            self.current = Some(current);
        }
        size
    }
}

/// Which of the queue pairs of a port a number names.
pub(super) fn index(qpn: u32) -> u8 {
    let [.., index] = qpn.to_be_bytes();
    index
}

/// Appends `len` bytes of `source` from `from` on; false if their memory is gone.
fn gather(source: &Source, from: u64, len: u64, memory: &dyn Memory, out: &mut Vec<u8>) -> bool {
    match source {
        Source::Bytes(bytes) => {
            let start = usize::try_from(from).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
            match bytes.get(start..end) {
                Some(bytes) => {
                    out.extend_from_slice(bytes);
                    true
                }
                None => false,
            }
        }
        Source::Memory { places, .. } => for_each_part(places, from, len, |place, at, n| {
            let Some(pinned) = place.pin() else {
                return false;
            };
            memory.gather(&pinned, at, n, out);
            true
        }),
    }
}
