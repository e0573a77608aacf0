//! Takes requests from the send queue and builds their messages.

use std::net::IpAddr;
use std::time::Duration;

use smallvec::SmallVec;

use super::gather::{Unbuildable, checked};
use super::head::NO_STAG;
use crate::bounds;
use crate::datagram::DatagramQp;
use crate::datagram::options::{RecordMode, Segment};
use crate::datagram::outgoing::{ANSWER, Current, Taken, index, peer_of};
use crate::datagram::reads::{self, Reading, Wanted};
use crate::datagram::reassemble::Coverage;
use crate::datagram::types::{Kind, Peer};
use crate::ddp::tx::{Address, Message};
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::qp::State;
use crate::verbs::source::{Places, Source};
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Destination, InlineData, Op, Payload, Remote, Sge};
use crate::wire::ddp::Untagged;
use crate::wire::dgram::{
    self, ATTR_NOT_AGGREGATED, ATTR_RECORD, ATTR_SOLICITED, SUB_RECORD, SUB_RECORD_IMMEDIATE, Shim,
};
use crate::wire::rd::Packet;
use crate::wire::rdmap::{AtomicRequest, Opcode, ReadRequest};
use crate::wire::{Msn, QN_READ, QN_SEND, Stag, To};

/// The UDP payload, in bytes, that every path is assumed to carry: an Ethernet frame minus the headers of IPv6 and UDP.
const PATH_MTU: usize = 1500 - 48;
/// The UDP payload of a jumbo frame, in bytes.
const JUMBO_MTU: usize = 9000 - 48;
/// How long the MTU of a path is used before it is looked up again.
const PATH_MEMORY: Duration = Duration::from_millis(100);

impl DatagramQp {
    /// Takes the next request of the send queue, if it may be sent now.
    pub(super) fn take(&mut self) -> Taken {
        if self.base.state != State::Rts || (self.kind.is_connected() && self.peer.is_none()) {
            return Taken::Nothing;
        }
        let reading = self.reads.len();
        let most = usize::from(self.options.max_reads.max(1));
        let Some((number, posted)) = self.base.sq.peek() else {
            return Taken::Nothing;
        };
        if posted.request.fence && reading > 0 {
            return Taken::Nothing;
        }
        if posted.request.op.is_read_or_atomic() && reading >= most {
            return Taken::Nothing;
        }
        posted.phase = Phase::Sending;
        let id = posted.request.id;
        let injected = posted.injected;
        self.base.sq.advance();
        self.base.observe(|| Step::Take(id));
        if let Some(status) = injected {
            self.fail_request(number, Unbuildable(status, "an injected fault"));
            return Taken::Done;
        }
        match self.build(number) {
            Ok(Some(current)) => {
                self.base
                    .observe(|| Step::Build(current.message.opcode, current.message.len));
                return Taken::Message(current);
            }
            Ok(None) => {
                self.sent(number);
                self.retire();
            }
            Err(error) => self.fail_request(number, error),
        }
        Taken::Done
    }

    /// Fails a request because of an error of this end. In an unreliable service earlier requests finish, later ones are
    /// flushed, and receiving continues. In a reliable service the queue pair fails.
    // IBA 10.3.1 [sqe]: an error of the send queue of an unreliable service stops that queue alone.
    pub(super) fn fail_request(&mut self, number: u64, Unbuildable(status, why): Unbuildable) {
        self.base.observe(|| Step::Failed(why));
        self.mark_failed(number, status);
        self.reads.remove_number(number);
        self.sent(number);
        if self.rd.is_some() {
            // A reliable service has no state SQE, so its queue pair fails.
            self.fail(why, None);
            return;
        }
        self.current = None;
        self.base.state = State::Sqe;
        self.flush_untaken();
    }

    /// Returns whether RDMA Writes of this queue pair are Write-Records.
    pub fn writes_records(&self) -> bool {
        match self.kind {
            Kind::Ud => true,
            Kind::Rd => !self.options.plain_writes,
            Kind::Uc | Kind::ReliableUc | Kind::Rc => false,
        }
    }

    /// The headers of the datagrams of a Send or a Write of `len` bytes, without the destination. Returns `None` for any other
    /// operation.
    pub(super) fn head_of(
        &self,
        op: &Op,
        solicited: bool,
        len: u64,
    ) -> Option<(Shim, Opcode, Address)> {
        let mut shim = Shim {
            id: self.next_id,
            length: u32::try_from(len).unwrap_or(u32::MAX),
            ..self.shim()
        };
        let records = self.writes_records();
        let (opcode, address, imm) = match *op {
            Op::Send { imm, invalidate } => {
                let opcode = Opcode::send(invalidate.is_some(), solicited);
                let address = Address::Untagged {
                    qn: QN_SEND,
                    msn: Msn(shim.id),
                    inv_stag: invalidate.unwrap_or(Stag(0)),
                    mo: 0,
                };
                (opcode, address, imm)
            }
            Op::Write { remote, imm } => {
                let (stag, to) = match len {
                    0 => (NO_STAG, To(0)),
                    _ => (remote.rkey, remote.to),
                };
                let opcode = if records {
                    shim.attributes = ATTR_RECORD;
                    if self.options.record == RecordMode::Chunk {
                        shim.attributes |= ATTR_NOT_AGGREGATED;
                    }
                    shim.sub_op = match imm {
                        Some(_) => SUB_RECORD_IMMEDIATE,
                        None => SUB_RECORD,
                    };
                    Opcode::WriteRecord
                } else {
                    Opcode::Write
                };
                (opcode, Address::Tagged { stag, to }, imm)
            }
            _ => return None,
        };
        if solicited {
            shim.attributes |= ATTR_SOLICITED;
        }
        // Each datagram has the immediate data, since any of them may be the one that completes the message.
        shim.immediate = imm;
        Some((shim, opcode, address))
    }

    /// The UDP payload, in bytes, that the path to an address carries. The result for the last address is kept for
    /// [`PATH_MEMORY`], because the look-up takes a lock.
    pub(super) fn path_mtu(&mut self, ip: IpAddr) -> usize {
        let Some(ask) = self.paths else {
            return PATH_MTU;
        };
        match self.path {
            Some((of, at, mtu)) if of == ip && self.now.saturating_sub(at) < PATH_MEMORY => {
                mtu.into()
            }
            _ => {
                let mtu = ask(ip);
                self.path = Some((ip, self.now, mtu));
                mtu.into()
            }
        }
    }

    /// Payload bytes of the datagrams of a message.
    pub(super) fn segment_for(&mut self, to: &Destination, immediate: bool) -> u64 {
        if self.kind == Kind::Uc {
            return self.segment as u64;
        }
        let udp = match self.options.segment {
            Segment::PathMtu => self.path_mtu(to.addr.ip()),
            Segment::Jumbo => JUMBO_MTU,
            Segment::Max => usize::MAX,
            Segment::Bytes(bytes) => {
                return u64::from(bytes).min(bounds::DATAGRAM_PAYLOAD as u64 & !7);
            }
        };
        let mut heads = Shim::LEN + Untagged::LEN + dgram::CRC;
        if immediate {
            heads += 8;
        }
        if self.rd.is_some() {
            heads += Packet::LEN;
        }
        let payload = udp
            .saturating_sub(heads)
            .clamp(bounds::DATAGRAM_PAYLOAD_MIN, bounds::DATAGRAM_PAYLOAD);
        // A multiple of 8 keeps the payload of later datagrams aligned at the receiver.
        (payload & !7) as u64
    }

    /// Builds the message of a request. `None`: the request needs no message.
    pub(super) fn build(&mut self, number: u64) -> Result<Option<Current>, Unbuildable> {
        let Some(posted) = self.base.sq.get_mut(number) else {
            return Ok(None);
        };
        let len = posted.request.payload.len();
        let sends = matches!(posted.request.op, Op::Send { .. });
        let limit = match self.kind {
            Kind::Ud | Kind::Rd if sends => u64::from(self.options.max_send),
            _ => bounds::MAX_MESSAGE,
        };
        if len > limit {
            return Err(Unbuildable(
                Status::LocalLength,
                "a message longer than the queue pair can send",
            ));
        }
        posted.bytes = len;
        let (op, solicited) = (posted.request.op, posted.request.solicited);
        let destination = if self.kind.is_connected() {
            self.peer
        } else {
            posted.request.destination
        };
        let Some((mut shim, opcode, address)) = self.head_of(&op, solicited, len) else {
            return self.build_other(number, op, destination);
        };
        let source = self.source(number)?;
        let Some(to) = destination else {
            return Err(Unbuildable(Status::LocalQpOperation, "no destination"));
        };
        self.next_id = shim.id.wrapping_add(1);
        self.number_message(number, shim.id);
        let segment = match self.kind {
            // A Send that fits one datagram is one datagram, even if IP has to fragment it.
            Kind::Ud if sends && len <= u64::from(bounds::UD_MTU) => u64::from(bounds::UD_MTU),
            _ => self.segment_for(&to, shim.immediate.is_some()),
        };
        if opcode == Opcode::WriteRecord && self.rd.is_none() && self.options.parity > 0 {
            shim.group = self.options.parity;
            shim.segment = u16::try_from(segment).unwrap_or(u16::MAX);
        }
        let shim = Shim {
            qkey: self.qkey_for(&to),
            dst_index: index(to.qpn),
            ..shim
        };
        Ok(Some(Current {
            message: Message {
                opcode,
                address,
                source,
                len,
                sent: 0,
            },
            request: Some(number),
            asks: false,
            tag: number,
            to,
            shim,
            segment,
            group: (Vec::new(), 0, 0),
            waits: None,
        }))
    }

    /// As [`Self::build`], for operations other than Send and Write.
    pub(super) fn build_other(
        &mut self,
        number: u64,
        op: Op,
        destination: Option<Destination>,
    ) -> Result<Option<Current>, Unbuildable> {
        match op {
            Op::LocalInvalidate { stag } => {
                let done = self
                    .base
                    .rnic
                    .regions
                    .invalidate(stag, self.base.pd, self.base.qpn);
                let why = "local invalidate of an STag that this queue pair may not invalidate";
                done.map(|()| None)
                    .map_err(|_| Unbuildable(Status::LocalProtection, why))
            }
            Op::Bind(bind) => {
                let done = self.base.bind(&bind);
                let why = "a memory window that cannot be bound with these rights or this range";
                done.map(|()| None)
                    .map_err(|_| Unbuildable(Status::WindowBind, why))
            }
            Op::Read { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. } => {
                let Some(to) = destination else {
                    return Err(Unbuildable(Status::LocalQpOperation, "no destination"));
                };
                self.build_asking(number, op, to).map(Some)
            }
            Op::AtomicWrite { .. } | Op::Send { .. } | Op::Write { .. } => Err(Unbuildable(
                Status::LocalQpOperation,
                "an operation that datagram queue pairs do not support",
            )),
        }
    }

    /// Records the message number of a request.
    fn number_message(&mut self, number: u64, id: u32) {
        if let Some(posted) = self.base.sq.get_mut(number) {
            posted.message = id;
            self.issued.add(id, posted.request.id);
        }
    }

    /// Builds the request of an operation that has an answer, and stores it until the answer arrives.
    pub(super) fn build_asking(
        &mut self,
        number: u64,
        op: Op,
        to: Destination,
    ) -> Result<Current, Unbuildable> {
        let (places, size, sink) = self.sink(number)?;
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.number_message(number, id);
        let peer = peer_of(&to);
        let unreliable = self.rd.is_none();
        let atomic = |remote: Remote, make: fn(u32, Stag, To, u64, u64) -> AtomicRequest, a, b| {
            let request = make(id, remote.rkey, remote.to, a, b);
            (
                Opcode::AtomicRequest,
                request.emit().to_vec(),
                Wanted::Value,
            )
        };
        let (opcode, payload, wanted) = match op {
            Op::FetchAdd { remote, add } => atomic(
                remote,
                |id, stag, to, add, _| AtomicRequest::fetch_add(id, stag, to, add),
                add,
                0,
            ),
            Op::CompareSwap {
                remote,
                compare,
                swap,
            } => atomic(remote, AtomicRequest::cmp_swap, compare, swap),
            Op::Read { remote } => {
                let (sink_stag, sink_to) = sink.map_or((NO_STAG, To(0)), |s| (s.lkey, To(s.addr)));
                let request = ReadRequest {
                    sink_stag,
                    sink_to,
                    size,
                    source_stag: remote.rkey,
                    source_to: remote.to,
                };
                let cookie = self.reads.cookie(&peer).filter(|_| unreliable);
                let payload = reads::request_payload(&request, cookie, unreliable);
                let wanted = Wanted::Data {
                    stag: sink_stag,
                    to: sink_to,
                    coverage: Coverage::default(),
                    request,
                    repeated: false,
                };
                (Opcode::ReadRequest, payload, wanted)
            }
            _ => {
                return Err(Unbuildable(
                    Status::LocalQpOperation,
                    "an operation without a response",
                ));
            }
        };
        if wanted_is_value(&wanted) && size != 8 {
            return Err(Unbuildable(
                Status::LocalLength,
                "an atomic whose local buffer is not 8 bytes",
            ));
        }
        let reading = Reading {
            number,
            peer,
            places,
            size,
            until: self.now
                + if unreliable {
                    self.options.read_timeout
                } else {
                    reads::ASK
                },
            wanted,
        };
        self.reads.insert(id, reading);
        Ok(self.asking(Some(number), id, to, opcode, &payload))
    }

    /// The message of a request that has an answer.
    pub(super) fn asking(
        &self,
        number: Option<u64>,
        id: u32,
        to: Destination,
        opcode: Opcode,
        payload: &[u8],
    ) -> Current {
        let shim = Shim {
            qkey: self.qkey_for(&to),
            id,
            length: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            dst_index: index(to.qpn),
            ..self.shim()
        };
        Current {
            message: Message {
                opcode,
                address: Address::Untagged {
                    qn: QN_READ,
                    msn: Msn(id),
                    inv_stag: Stag(0),
                    mo: 0,
                },
                source: Source::Bytes(SmallVec::from_slice(payload)),
                len: payload.len() as u64,
                sent: 0,
            },
            request: number,
            asks: true,
            tag: number.unwrap_or(ANSWER),
            to,
            shim,
            segment: bounds::DATAGRAM_PAYLOAD as u64,
            group: (Vec::new(), 0, 0),
            waits: None,
        }
    }

    /// Sends the request `id` again with the cookie that its peer demands. The request may have contained an older cookie: a cookie
    /// is valid for a limited time.
    pub(in crate::datagram) fn ask_again(&mut self, id: u32, peer: &Peer, cookie: u64) {
        let Some(reading) = self.reads.get_mut(id, peer) else {
            return;
        };
        let Wanted::Data {
            request, repeated, ..
        } = &mut reading.wanted
        else {
            return;
        };
        if std::mem::replace(repeated, true) {
            // A request is repeated only once. Otherwise a peer that demands a cookie each time could make this end send any
            // number of datagrams.
            return;
        }
        let (request, number) = (*request, reading.number);
        self.reads.learn(*peer, cookie);
        let to = self
            .base
            .sq
            .get_mut(number)
            .and_then(|p| p.request.destination);
        if let Some(to) = to {
            let payload = reads::request_payload(&request, Some(cookie), false);
            let current = self.asking(Some(number), id, to, Opcode::ReadRequest, &payload);
            self.answers.push_back(current);
        }
    }

    /// The Q_Key in the shim. IBA 10.2.5: a key with the high bit set stands for the key of the queue
    /// pair itself.
    pub(super) fn qkey_for(&self, to: &Destination) -> u32 {
        if self.kind.is_connected() {
            0
        } else {
            qkey_for(to, self.base.attr.qkey)
        }
    }

    /// Checks the memory of a request and returns the source of its payload.
    pub(super) fn source(&mut self, number: u64) -> Result<Source, Unbuildable> {
        let Some(posted) = self.base.sq.get_mut(number) else {
            return Ok(Source::Bytes(SmallVec::new()));
        };
        match &posted.request.payload {
            Payload::Inline(data) => Ok(Source::Bytes(InlineData::from_slice(data))),
            Payload::Sges(sges) => Ok(Source::Memory {
                places: checked(
                    &self.base.rnic,
                    sges,
                    self.base.pd,
                    self.base.qpn,
                    Access::NONE,
                )?,
                volatile: true,
            }),
        }
    }

    /// The memory for the answer to a request, its length, and its first element.
    pub(super) fn sink(&mut self, number: u64) -> Result<(Places, u32, Option<Sge>), Unbuildable> {
        let payload = self.base.sq.get_mut(number).map(|p| &p.request.payload);
        let Some(Payload::Sges(sges)) = payload else {
            return Err(Unbuildable(
                Status::LocalQpOperation,
                "a response into inline data",
            ));
        };
        let places = checked(
            &self.base.rnic,
            sges,
            self.base.pd,
            self.base.qpn,
            Access::LOCAL_WRITE,
        )?;
        let size = sges.iter().map(|s| s.len).fold(0, u32::saturating_add);
        let first = sges.iter().find(|s| s.len > 0).copied();
        Ok((places, size, first))
    }
}

/// Returns the Q_Key for a destination. `own` is the key of the sending queue pair.
#[inline]
pub(super) fn qkey_for(to: &Destination, own: u32) -> u32 {
    if to.qkey & 0x8000_0000 != 0 {
        own
    } else {
        to.qkey
    }
}

fn wanted_is_value(wanted: &Wanted) -> bool {
    matches!(wanted, Wanted::Value)
}
