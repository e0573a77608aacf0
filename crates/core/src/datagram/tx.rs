//! Transmit side: *take* the next request, *build* its message, *cut* datagrams from it.
//!
//! Requests are taken in order, and only while the queue pair is in RTS. A datagram is copied together and sealed
//! when it is cut, so what is sent always fits its checksum, whatever the application does to its buffer meanwhile.
//!
//! Without reliability messages are cut one after the other, answers to others in turns with them. With it each peer has
//! a lane of its own, so that one which does not answer holds up nobody else.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use smallvec::SmallVec;

use super::flow::{Peer, Report};
use super::options::{Options, RecordMode, Segment};
use super::parity;
use super::rd::{Tag, Way};
use super::reads::{self, Reading, Wanted};
use super::reassemble::Coverage;
use super::{Bytes, DatagramQp, Given, Kind, MULTICAST_QPN, TxDatagram};
use crate::bounds;
use crate::ddp::tx::{Address, Message};
use crate::error::Misuse;
use crate::llp::mpa::frame::for_each_part;
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::mr::{LastRegion, Memory, Placement};
use crate::verbs::qp::State;
use crate::verbs::rnic::Rnic;
use crate::verbs::source::{Places, Source};
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::verbs::wr::{Destination, InlineData, Op, Payload, Remote, Sge, WorkRequest};
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::dgram::{
    self, ATTR_FINAL_COPY, ATTR_NOT_AGGREGATED, ATTR_RECORD, ATTR_SOLICITED, SUB_PLAIN, SUB_RECORD,
    SUB_RECORD_IMMEDIATE, Shim,
};
use crate::wire::rd::Packet;
use crate::wire::rdmap::{AtomicRequest, Opcode, ReadRequest};
use crate::wire::{Msn, QN_READ, QN_SEND, Stag, To};

/// The STag of zero-length messages: it names nothing, and is not 0, which looks like a mistake.
const NO_STAG: Stag = Stag(1);

/// Most bytes in front of a payload.
const HEAD_MAX: usize = Shim::LEN + 8 + Untagged::LEN;

/// Bytes of a UDP payload that every path is taken to carry: an Ethernet frame, less IPv6 and UDP.
const PATH_MTU: usize = 1500 - 48;
/// The same of jumbo frames.
const JUMBO_MTU: usize = 9000 - 48;
/// How long a queue pair believes what it was told of a path.
const PATH_MEMORY: Duration = Duration::from_millis(100);

/// The message that is being cut into datagrams.
#[derive(Debug)]
pub(super) struct Current {
    message: Message,
    /// Number of its request; an answer to somebody else has none.
    pub(super) request: Option<u64>,
    /// It asks for an answer, which completes the request.
    asks: bool,
    /// What the reliability layer knows it by.
    pub(super) tag: Tag,
    to: Destination,
    /// What all its datagrams have; the offset is set for each.
    shim: Shim,
    /// Payload bytes of a datagram.
    segment: u64,
    /// The exclusive or of the datagrams of the group under way, how many they are, and where it begins.
    group: (Vec<u8>, u8, u32),
    /// Since when it waits for its peer.
    waits: Option<Duration>,
}

impl Current {
    /// Whose pace it follows.
    fn peer(&self) -> Option<Peer> {
        (!is_many(&self.to)).then(|| peer_of(&self.to))
    }
}

/// Whether a destination has no pace: a group, or everybody on a subnet.
fn is_many(to: &Destination) -> bool {
    is_group(to.addr.ip()) || to.qpn == MULTICAST_QPN
}

/// A destination as a peer is known by.
pub(super) fn peer_of(to: &Destination) -> Peer {
    let addr = SocketAddr::new(to.addr.ip().to_canonical(), to.addr.port());
    (addr, index(to.qpn))
}

/// How a datagram to a destination travels.
fn way_of(to: &Destination) -> Way {
    Way {
        from: to.source,
        hop_limit: to.hop_limit,
        traffic_class: to.traffic_class,
    }
}

/// Whether an address is that of many.
pub fn is_group(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_multicast() || matches!(ip, IpAddr::V4(ip) if ip.is_broadcast())
}

/// What became of the request whose turn it was.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and every message would pay for a box"
)]
enum Taken {
    /// Its message is to be cut.
    Message(Current),
    /// It is over, or has failed.
    Done,
    /// There is none, or it has to wait.
    Nothing,
}

/// Why a request cannot be built.
struct Unbuildable(Status, &'static str);

/// Why, where it was there when the request was built.
const DEREGISTERED: &str = "memory of a posted request was deregistered";

/// The end of a Write-Record, to be said once more.
#[derive(Debug)]
pub(super) struct Trailer {
    datagram: TxDatagram,
    left: u8,
}

/// What `ibv_post_send(3)` checks at once.
pub(super) fn check(kind: Kind, options: &Options, request: &WorkRequest) -> Result<(), Misuse> {
    let fits = match &request.op {
        Op::Send {
            invalidate: None, ..
        } => true,
        Op::Write { .. } => kind != Kind::Ud || options.one_sided,
        Op::Read { .. } => kind.reads() || (kind == Kind::Ud && options.one_sided),
        Op::LocalInvalidate { .. } | Op::Bind(_) => kind != Kind::Ud,
        Op::Send { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. } => kind.reads(),
        Op::AtomicWrite { .. } => false,
    };
    if !fits {
        return Err(Misuse::InvalidArgument(
            "an operation that datagram queue pairs of this kind do not do",
        ));
    }
    if !kind.is_connected() && !request.op.is_local() {
        let Some(to) = &request.destination else {
            return Err(Misuse::InvalidArgument(
                "a request on a datagram queue pair without an address handle",
            ));
        };
        let sends = matches!(request.op, Op::Send { .. });
        if is_group(to.addr.ip()) && (kind.is_reliable() || !sends) {
            return Err(Misuse::InvalidArgument(
                "something else than an unreliable Send to a group",
            ));
        }
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
        self.was_stalled = false;
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some((peer, from, report)) = self.flow.next_report()
        {
            let datagram = self.report(peer, from, &report);
            self.given_out.push_back(Given::Nothing);
            out.push(datagram);
        }
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some(datagram) = self.outbox.pop_front()
        {
            self.given_out.push_back(Given::Nothing);
            out.push(datagram);
        }
        if self.rd.is_some() {
            self.poll_lanes(out);
        } else {
            self.poll_messages(out);
        }
        self.after();
    }

    // ------------------------------------------------------------------ without reliability

    fn poll_messages(&mut self, out: &mut Vec<TxDatagram>) {
        let mut bytes = 0;
        let mut answer = false;
        while has_room(bytes, out) {
            answer = !answer;
            if answer && let Some(mut current) = self.next_answer() {
                let goes_on = self.cut(&mut current, &mut bytes, out);
                if goes_on {
                    self.answers.push_front(current);
                }
                continue;
            }
            let taken = match self.current.take() {
                Some(current) => Taken::Message(current),
                None if self.send_single(&mut bytes, out) => Taken::Done,
                None => self.take(),
            };
            let mut current = match taken {
                Taken::Message(current) => current,
                Taken::Done => continue,
                // Alone at last: the ends of messages may be said again.
                Taken::Nothing if self.say_again(out) || self.has_open_answer() => continue,
                Taken::Nothing => break,
            };
            let peer = current.peer();
            // To its end, unless answers want their turn.
            let (mut goes_on, mut open) = (true, true);
            while goes_on && has_room(bytes, out) {
                open = peer.is_none_or(|peer| self.flow.may_send(&peer, self.now));
                if !open {
                    break;
                }
                goes_on = self.cut(&mut current, &mut bytes, out);
                if !self.answers.is_empty() {
                    break;
                }
            }
            if goes_on {
                self.current = Some(current);
            }
            if !open && !self.has_open_answer() {
                self.was_stalled = true;
                break;
            }
        }
    }

    /// Sends the next request if it is a Send or a Write of one datagram, as most are: its bytes go where they are sent from,
    /// and no account is kept of what is left. False: it is something else, or has to wait.
    fn send_single(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        if !matches!(self.kind, Kind::Ud | Kind::Rd) || self.base.state != State::Rts {
            return false;
        }
        let reading = !self.reads.is_empty();
        let Some((number, posted)) = self.base.sq.peek() else {
            return false;
        };
        let request = &posted.request;
        let plain = posted.injected.is_none() && !(request.fence && reading);
        let Some(to) = request.destination.filter(|_| plain) else {
            return false;
        };
        let (request_id, op, solicited) = (request.id, request.op, request.solicited);
        let len = request.payload.len();
        let reliable = self.rd.is_some();
        let peer = peer_of(&to);
        let pace = (!reliable && !is_many(&to)).then_some(peer);
        if !self.is_single(&op, len, &to) {
            return false;
        }
        let open = if reliable {
            // Who waits for a turn, or for a window, is not overtaken.
            self.ready.is_empty()
                && !self.lanes.contains_key(&peer)
                && self.has_window(&peer, way_of(&to))
        } else {
            pace.is_none_or(|peer| self.flow.is_open(&peer, self.now))
        };
        let Some((shim, opcode, address)) = self.head_of(&op, solicited, len).filter(|_| open)
        else {
            return false;
        };
        let shim = Shim {
            qkey: self.qkey_for(&to),
            dst_index: index(to.qpn),
            ..shim
        };
        self.base.observe(|| Step::Take(request_id));
        self.base.sq.advance();
        let payload = usize::try_from(len).unwrap_or(0);
        let mut datagram = self.buffer(payload);
        dgram::put_head(&shim, &header_of(opcode, address, 0, true), &mut datagram);
        let Some(posted) = self.base.sq.get_mut(number) else {
            return true;
        };
        posted.phase = Phase::Sent;
        posted.bytes = len;
        let gathered = match &posted.request.payload {
            Payload::Inline(data) => {
                datagram.extend_from_slice(data);
                Ok(())
            }
            Payload::Sges(sges) => {
                let last = &mut self.last_read;
                gather_at_once(
                    &self.base.rnic,
                    last,
                    sges,
                    self.base.pd,
                    self.base.qpn,
                    &mut datagram,
                )
            }
        };
        if let Err(error) = gathered {
            self.spare.give(datagram);
            self.fail_request(number, error);
            return true;
        }
        self.base.observe(|| Step::Build(opcode, len));
        self.base.observe(|| Step::Segment(payload, true));
        self.next_id = shim.id.wrapping_add(1);
        let now = self.now;
        if let Some(rd) = &mut self.rd {
            let alone = self.base.sq.untaken() == 0;
            if let Some((way, packet)) = rd.push(&peer, datagram, (number, true, alone), now) {
                *bytes += packet.len();
                self.hand_out(&peer, way, packet, out);
            }
            return true;
        }
        dgram::seal(&mut datagram);
        self.given_out.push_back(Given::End(number));
        if let Some(peer) = pace {
            self.flow
                .sent(peer, shim.id, shim.length, datagram.len(), now);
        }
        *bytes += datagram.len();
        out.push(TxDatagram {
            to: to.addr,
            from: to.source,
            hop_limit: to.hop_limit,
            traffic_class: to.traffic_class,
            bytes: datagram.into(),
        });
        if !self.trailers.is_empty() {
            self.say_again(out);
        }
        true
    }

    /// Whether it is a Send or a Write of one datagram, with nothing behind it.
    fn is_single(&mut self, op: &Op, len: u64, to: &Destination) -> bool {
        let most = match op {
            Op::Send { .. } if self.kind == Kind::Ud => bounds::UD_MTU.into(),
            Op::Send { imm, .. } => self.segment_for(to, imm.is_some()),
            // Their ends may be said again, and parity follows them.
            Op::Write { .. } if self.options.repeats > 0 || self.options.parity > 0 => {
                return false;
            }
            Op::Write { imm, .. } => self.segment_for(to, imm.is_some()),
            _ => return false,
        };
        let sends = matches!(op, Op::Send { .. });
        len <= most && !(sends && len > u64::from(self.options.max_send))
    }

    /// A buffer for a datagram with so many bytes of payload. With reliability there is room for the packet's header, which is
    /// written when its number is known.
    fn buffer(&mut self, payload: usize) -> Vec<u8> {
        let Some(rd) = &mut self.rd else {
            return self.spare.take(HEAD_MAX + payload + dgram::CRC);
        };
        rd.recycle(|buffer| self.spare.give(buffer));
        let mut buffer = self
            .spare
            .take(Packet::LEN + HEAD_MAX + payload + dgram::CRC);
        buffer.extend_from_slice(&[0; Packet::LEN]);
        buffer
    }

    /// The next answer whose asker keeps up. Those that do not are never waited for: they wait themselves.
    fn next_answer(&mut self) -> Option<Current> {
        if self.receives().is_err() {
            return None;
        }
        for _ in 0..self.answers.len() {
            let mut current = self.answers.pop_front()?;
            match current.peer() {
                Some(peer) if !self.flow.is_open(&peer, self.now) => {
                    current.waits.get_or_insert(self.now);
                    self.answers.push_back(current);
                }
                _ => return Some(current),
            }
        }
        None
    }

    pub(super) fn has_open_answer(&self) -> bool {
        let open = |c: &Current| {
            c.peer()
                .is_none_or(|peer| self.flow.is_open(&peer, self.now))
        };
        self.receives().is_ok() && self.answers.iter().any(open)
    }

    /// Answers to peers that have said nothing for too long go on without.
    pub(super) fn forgive_askers(&mut self) {
        for current in &mut self.answers {
            let over = |since: Duration| since + bounds::DATAGRAM_STALL <= self.now;
            if let (Some(peer), true) = (current.peer(), current.waits.is_some_and(over)) {
                self.flow.forgive(&peer);
                current.waits = None;
            }
        }
    }

    /// When [`Self::forgive_askers`] has something to do.
    pub(super) fn answers_until(&self) -> Option<Duration> {
        let waits = self.answers.iter().filter_map(|c| c.waits).min()?;
        Some(waits + bounds::DATAGRAM_STALL)
    }

    /// Says the end of an earlier Write-Record once more.
    fn say_again(&mut self, out: &mut Vec<TxDatagram>) -> bool {
        let Some(mut trailer) = self.trailers.pop_front() else {
            return false;
        };
        out.push(trailer.datagram.clone());
        self.given_out.push_back(Given::Nothing);
        trailer.left -= 1;
        if trailer.left > 0 {
            self.trailers.push_back(trailer);
        }
        true
    }

    /// A stall has lasted long enough: the peer does not report, and is sent to without.
    pub fn handle_stall(&mut self) {
        if self.flow.stall().is_some() {
            self.counters.tx_stalls += 1;
            self.flow.give_up_waiting();
        }
    }

    // ------------------------------------------------------------------ with reliability

    fn poll_lanes(&mut self, out: &mut Vec<TxDatagram>) {
        let mut bytes = 0;
        self.poll_reliable(&mut bytes, out);
        loop {
            while self.lanes_len < LANES && has_room(bytes, out) {
                if self.send_single(&mut bytes, out) {
                    continue;
                }
                match self.take() {
                    Taken::Message(current) => self.cut_at_once(current, &mut bytes, out),
                    Taken::Done => {}
                    Taken::Nothing => break,
                }
            }
            let Some(peer) = self.ready.front().copied().filter(|_| has_room(bytes, out)) else {
                break;
            };
            let goes_on = self.lane_turn(&peer, &mut bytes, out);
            // The queue pair may have failed, and nothing be left.
            let Some(peer) = self.ready.pop_front() else {
                break;
            };
            if goes_on {
                self.ready.push_back(peer);
            } else if let Some(lane) = self.lanes.get_mut(&peer) {
                lane.ready = false;
            }
        }
        // Peers that are not known are to be asked.
        self.poll_reliable(&mut bytes, out);
        self.handle_rd_events();
    }

    /// What the reliability layer itself wants to send.
    fn poll_reliable(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) {
        let now = self.now;
        while has_room(*bytes, out) {
            let packet = self.rd.as_deref_mut().and_then(|rd| rd.poll(now));
            let Some((peer, way, packet)) = packet else {
                break;
            };
            *bytes += packet.len();
            self.hand_out(&peer, way, packet, out);
        }
    }

    /// Some datagrams to one peer: as many as make a run for the kernel, and few enough that other peers have their
    /// turn. False: there are no more now.
    fn lane_turn(&mut self, peer: &Peer, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        let begin = out.len();
        let in_turn = |out: &Vec<TxDatagram>| out.len() < begin + LANE_TURN;
        while in_turn(out) && has_room(*bytes, out) {
            let Some((mut current, way)) = self.next_of(peer) else {
                return false;
            };
            let mut goes_on = true;
            let mut open = true;
            while goes_on && open && in_turn(out) && has_room(*bytes, out) {
                goes_on = self.cut(&mut current, bytes, out);
                open = goes_on && self.has_window(peer, way);
            }
            if goes_on {
                self.enter_lane(current, true, true);
            }
            if !open && goes_on {
                return false;
            }
        }
        true
    }

    /// Sends what can be sent of a message that was taken just now; the rest waits in the lane of its peer. Where others wait
    /// for their turn it goes there at once.
    fn cut_at_once(&mut self, mut current: Current, bytes: &mut usize, out: &mut Vec<TxDatagram>) {
        let peer = peer_of(&current.to);
        if !self.ready.is_empty() || self.lanes.contains_key(&peer) {
            self.enter_lane(current, false, true);
            return;
        }
        let way = way_of(&current.to);
        if !self.has_window(&peer, way) {
            // An acknowledgement makes it ready.
            self.enter_lane(current, false, false);
            return;
        }
        let (mut goes_on, mut open) = (true, true);
        while goes_on && open && has_room(*bytes, out) {
            goes_on = self.cut(&mut current, bytes, out);
            open = goes_on && self.has_window(&peer, way);
        }
        if goes_on {
            self.enter_lane(current, true, open);
        }
    }

    fn has_window(&mut self, peer: &Peer, way: Way) -> bool {
        let now = self.now;
        let rd = self.rd.as_deref_mut();
        rd.is_some_and(|rd| rd.may_send(peer, way, now))
    }

    /// The message of a lane that may go on now.
    fn next_of(&mut self, peer: &Peer) -> Option<(Current, Way)> {
        // Who only receives answers all the same.
        if self.receives().is_err() {
            return None;
        }
        let lane = self.lanes.get_mut(peer)?;
        let Some(first) = lane.queue.front() else {
            self.lanes.remove(peer);
            return None;
        };
        let way = way_of(&first.to);
        if !self.has_window(peer, way) {
            // An acknowledgement makes it ready again.
            return None;
        }
        let lane = self.lanes.get_mut(peer)?;
        let current = lane.queue.pop_front()?;
        if current.tag & OURS == 0 {
            self.lanes_len -= 1;
        } else {
            self.lanes_answers -= 1;
            lane.answers -= 1;
        }
        Some((current, way))
    }

    /// A message goes to the lane of its peer: its end, or its front if some of it has gone. `ready`: it may be sent now.
    fn enter_lane(&mut self, current: Current, front: bool, ready: bool) {
        let peer = peer_of(&current.to);
        let lane = self.lanes.entry(peer).or_default();
        if current.tag & OURS == 0 {
            self.lanes_len += 1;
        } else {
            self.lanes_answers += 1;
            lane.answers += 1;
        }
        if front {
            lane.queue.push_front(current);
        } else {
            lane.queue.push_back(current);
        }
        if ready && !lane.ready {
            lane.ready = true;
            self.ready.push_back(peer);
        }
    }

    /// A peer may be sent to again.
    pub(super) fn make_ready(&mut self, peer: &Peer) {
        if let Some(lane) = self.lanes.get_mut(peer)
            && !lane.ready
        {
            lane.ready = true;
            self.ready.push_back(*peer);
        }
    }

    fn hand_out(&mut self, peer: &Peer, way: Way, bytes: Bytes, out: &mut Vec<TxDatagram>) {
        self.given_out.push_back(Given::Nothing);
        out.push(TxDatagram {
            to: peer.0,
            from: way.from,
            hop_limit: way.hop_limit,
            traffic_class: way.traffic_class,
            bytes,
        });
    }

    // ------------------------------------------------------------------ control

    /// Tells a sender how far it was heard. To a queue pair, like everything else, but from no request.
    fn report(&self, peer: Peer, from: Option<IpAddr>, report: &Report) -> TxDatagram {
        let (header, payload) = report.emit();
        self.control(&peer, from, report.id, header, &payload)
    }

    /// A control datagram.
    pub(super) fn control(
        &self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        header: Untagged,
        payload: &[u8],
    ) -> TxDatagram {
        self.control_as(SUB_PLAIN, peer, from, id, header, payload)
    }

    /// A control datagram, or an error report.
    pub(super) fn control_as(
        &self,
        sub_op: u8,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        header: Untagged,
        payload: &[u8],
    ) -> TxDatagram {
        let shim = Shim {
            sub_op,
            id,
            length: u32::try_from(payload.len()).unwrap_or(0),
            dst_index: peer.1,
            ..self.shim()
        };
        let mut bytes = dgram::emit_head(&shim, &Header::Untagged(header));
        bytes.extend_from_slice(payload);
        dgram::seal(&mut bytes);
        TxDatagram {
            to: peer.0,
            from,
            hop_limit: 0,
            traffic_class: 0,
            bytes: bytes.into(),
        }
    }

    /// What all our datagrams say.
    fn shim(&self) -> Shim {
        Shim {
            epoch: self.epoch,
            qkey: 0,
            id: 0,
            length: 0,
            offset: 0,
            sub_op: SUB_PLAIN,
            attributes: 0,
            dst_index: 0,
            src_index: index(self.base.qpn),
            immediate: None,
            commit: false,
            parity: false,
            group: 0,
            segment: 0,
        }
    }

    /// A message of a few bytes to a peer, in answer to something: alone, or in the peer's lane.
    pub(super) fn answer(
        &mut self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        sub_op: u8,
        opcode: Opcode,
        payload: &[u8],
    ) {
        let address = Address::Untagged {
            qn: opcode.queue().unwrap_or(0),
            msn: Msn(id),
            inv_stag: Stag(0),
            mo: 0,
        };
        let source = Source::Bytes(SmallVec::from_slice(payload));
        self.respond(
            peer,
            from,
            id,
            sub_op,
            opcode,
            address,
            source,
            payload.len() as u64,
        );
    }

    /// A message to a peer that it asked for.
    #[expect(clippy::too_many_arguments, reason = "what a message is made of")]
    pub(super) fn respond(
        &mut self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        sub_op: u8,
        opcode: Opcode,
        address: Address,
        source: Source,
        len: u64,
    ) {
        let to = Destination {
            addr: peer.0,
            source: from,
            qpn: u32::from(peer.0.port()) << 8 | u32::from(peer.1),
            qkey: 0,
            hop_limit: 0,
            traffic_class: 0,
        };
        let shim = Shim {
            id,
            length: u32::try_from(len).unwrap_or(u32::MAX),
            sub_op,
            dst_index: peer.1,
            ..self.shim()
        };
        self.last_tag += 1;
        let current = Current {
            message: Message {
                opcode,
                address,
                source,
                len,
                sent: 0,
            },
            request: None,
            asks: false,
            tag: OURS | self.last_tag,
            to,
            shim,
            segment: self.segment_for(&to, false),
            group: (Vec::new(), 0, 0),
            waits: None,
        };
        if self.rd.is_some() {
            self.enter_lane(current, false, true);
        } else {
            self.answers.push_back(current);
        }
    }

    // ------------------------------------------------------------------ what became of it

    /// The next `datagrams` that were given out have been handed to the socket.
    pub fn handle_written(&mut self, datagrams: usize) {
        for _ in 0..datagrams {
            let Some(given) = self.given_out.pop_front() else {
                break;
            };
            self.counters.tx_dgrams += 1;
            if let Given::End(request) = given {
                self.sent(request);
            }
        }
        self.retire();
        self.after();
    }

    /// The socket refused the next datagram for good, and it was thrown away: its request fails, the queue pair goes
    /// on (with a lossy service an error of one destination is no business of the others). With reliability it is one
    /// more lost packet.
    pub fn handle_send_error(&mut self) {
        let Some(given) = self.given_out.pop_front() else {
            return;
        };
        self.counters.tx_errors += 1;
        match given {
            Given::Nothing => return,
            Given::Part(request) => self.mark_failed(request, Status::LocalQpOperation),
            Given::End(request) => {
                self.mark_failed(request, Status::LocalQpOperation);
                self.sent(request);
            }
            Given::Ask(request) => {
                self.mark_failed(request, Status::LocalQpOperation);
                self.reads.remove_number(request);
                self.sent(request);
            }
        }
        self.retire();
        self.after();
    }

    pub(super) fn sent(&mut self, request: u64) {
        if let Some(posted) = self.base.sq.get_mut(request) {
            posted.phase = Phase::Done;
        }
    }

    // ------------------------------------------------------------------ take, build, cut

    /// Takes the next request of the send queue, if it may be sent now.
    fn take(&mut self) -> Taken {
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
            self.fail_request(number, Unbuildable(status, "a fault was asked for"));
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

    /// A request fails by our own side's fault. Those before it finish, those behind it are flushed, receiving goes on.
    // IBA 10.3.1 [sqe]: an error of the send queue of an unreliable service stops that queue alone.
    fn fail_request(&mut self, number: u64, Unbuildable(status, why): Unbuildable) {
        self.base.observe(|| Step::Failed(why));
        self.mark_failed(number, status);
        self.reads.remove_number(number);
        self.sent(number);
        if self.rd.is_some() {
            // A reliable service has no such state: its queue pair fails.
            self.fail(why, None);
            return;
        }
        self.current = None;
        self.base.state = State::Sqe;
        self.flush_untaken();
    }

    /// What the datagrams of a Send or a Write of `len` bytes say, but for whom they are for. `None`: it is something else.
    fn head_of(&self, op: &Op, solicited: bool, len: u64) -> Option<(Shim, Opcode, Address)> {
        let mut shim = Shim {
            id: self.next_id,
            length: u32::try_from(len).unwrap_or(u32::MAX),
            ..self.shim()
        };
        let records = match self.kind {
            Kind::Ud => true,
            Kind::Rd => !self.options.plain_writes,
            Kind::Uc | Kind::ReliableUc | Kind::Rc => false,
        };
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
        // In each datagram: any of them may be the one that completes the message.
        shim.immediate = imm;
        Some((shim, opcode, address))
    }

    /// Bytes of a UDP payload that the path to an address carries. Asked now and then: who knows has a lock for it.
    fn path_mtu(&mut self, ip: IpAddr) -> usize {
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
    fn segment_for(&mut self, to: &Destination, immediate: bool) -> u64 {
        if self.kind == Kind::Uc {
            return self.segment as u64;
        }
        let udp = match self.options.segment {
            Segment::PathMtu => self.path_mtu(to.addr.ip()),
            Segment::Jumbo => JUMBO_MTU,
            Segment::Max => usize::MAX,
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
        // Multiples of 8 keep what follows aligned at the receiver.
        (payload & !7) as u64
    }

    /// Builds the message of a request; none if there was nothing to send for it.
    fn build(&mut self, number: u64) -> Result<Option<Current>, Unbuildable> {
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
        let segment = match self.kind {
            // What fits one datagram is one, whatever the path.
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

    /// The same for what is neither a Send nor a Write.
    fn build_other(
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
                let why = "local invalidate of an STag that may not be";
                done.map(|()| None)
                    .map_err(|_| Unbuildable(Status::LocalProtection, why))
            }
            Op::Bind(bind) => {
                let done = self
                    .base
                    .rnic
                    .regions
                    .bind(&bind, self.base.pd, self.base.qpn);
                let why = "a memory window that cannot be bound like this";
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
                "an operation that datagram queue pairs do not do",
            )),
        }
    }

    /// Builds the request of an operation that waits for an answer, and remembers it.
    fn build_asking(
        &mut self,
        number: u64,
        op: Op,
        to: Destination,
    ) -> Result<Current, Unbuildable> {
        let (places, size, sink) = self.sink(number)?;
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
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
                    with_cookie: cookie.is_some(),
                };
                (Opcode::ReadRequest, payload, wanted)
            }
            _ => {
                return Err(Unbuildable(
                    Status::LocalQpOperation,
                    "an operation without an answer",
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

    /// A request that asks for an answer.
    fn asking(
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
            tag: number.unwrap_or(OURS),
            to,
            shim,
            segment: bounds::DATAGRAM_PAYLOAD as u64,
            group: (Vec::new(), 0, 0),
            waits: None,
        }
    }

    /// The peer wants a cookie with the request `id`: it goes out once more.
    pub(super) fn ask_again(&mut self, id: u32, peer: &Peer, cookie: u64) {
        let Some(reading) = self.reads.get_mut(id, peer) else {
            return;
        };
        let Wanted::Data {
            request,
            with_cookie,
            ..
        } = &mut reading.wanted
        else {
            return;
        };
        if std::mem::replace(with_cookie, true) {
            // Once is enough: a second one would be a peer that makes us send.
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

    /// The key in the shim. IBA 10.2.5 [qkey-high]: a controlled key stands for the queue pair's own.
    fn qkey_for(&self, to: &Destination) -> u32 {
        if self.kind.is_connected() {
            0
        } else if to.qkey & 0x8000_0000 != 0 {
            self.base.attr.qkey
        } else {
            to.qkey
        }
    }

    /// The payload of a request, checked.
    fn source(&mut self, number: u64) -> Result<Source, Unbuildable> {
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

    /// The memory that an answer goes to, its length, and its first element.
    fn sink(&mut self, number: u64) -> Result<(Places, u32, Option<Sge>), Unbuildable> {
        let payload = self.base.sq.get_mut(number).map(|p| &p.request.payload);
        let Some(Payload::Sges(sges)) = payload else {
            return Err(Unbuildable(
                Status::LocalQpOperation,
                "an answer into inline data",
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

    /// Cuts the next datagram of a message, and adds its length to `bytes`. True: the message goes on; else it ended, or
    /// failed.
    fn cut(&mut self, current: &mut Current, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        let message = &mut current.message;
        let from = message.sent;
        let len = current.segment.min(message.len - from);
        let last = from + len == message.len;
        let offset = u32::try_from(from).unwrap_or(u32::MAX);
        let header = header_of(message.opcode, message.address, offset, last);
        let shim = Shim {
            offset,
            ..current.shim
        };
        let payload = usize::try_from(len).unwrap_or(0);
        let mut datagram = self.buffer(payload);
        dgram::put_head(&shim, &header, &mut datagram);
        let head = datagram.len();
        if !gather(
            &message.source,
            from,
            len,
            &*self.base.rnic.memory,
            &mut datagram,
        ) {
            let why = DEREGISTERED;
            match current.request {
                Some(number) => {
                    self.fail_request(number, Unbuildable(Status::LocalProtection, why));
                }
                // The asker's answer ends in the middle.
                None => {
                    self.base.observe(|| Step::Failed(why));
                    if self.rd.is_some() {
                        let to = &current.to;
                        self.answer_broken(&peer_of(to), to.source, current.shim.id);
                    }
                }
            }
            return false;
        }
        message.sent += len;
        self.base.observe(|| Step::Segment(payload, last));
        if current.shim.group > 0 {
            let (sum, many, start) = &mut current.group;
            if *many == 0 {
                *start = offset;
            }
            *many += 1;
            parity::add(sum, datagram.get(head..).unwrap_or(&[]));
        }
        *bytes += if self.rd.is_some() {
            self.cut_reliably(current, datagram, last, out)
        } else {
            dgram::seal(&mut datagram);
            self.cut_plainly(current, datagram, last, out)
        };
        if last && let Some(posted) = current.request.and_then(|n| self.base.sq.get_mut(n)) {
            posted.phase = Phase::Sent;
        }
        !last
    }

    fn cut_plainly(
        &mut self,
        current: &mut Current,
        bytes: Vec<u8>,
        last: bool,
        out: &mut Vec<TxDatagram>,
    ) -> usize {
        self.given_out.push_back(match current.request {
            Some(request) if current.asks => Given::Ask(request),
            Some(request) if last => Given::End(request),
            Some(request) => Given::Part(request),
            None => Given::Nothing,
        });
        let mut size = bytes.len();
        let end = u32::try_from(current.message.sent).unwrap_or(u32::MAX);
        if let Some(peer) = current.peer() {
            self.flow.sent(peer, current.shim.id, end, size, self.now);
        }
        out.push(self.datagram(current, bytes));
        let group = current.shim.group;
        if group > 0 && (last || current.group.1 == group) {
            // A group of one would be sent twice for nothing but its loss: that is what it is for.
            size += self.cut_parity(current, out);
        }
        if last && current.message.opcode == Opcode::WriteRecord && self.options.repeats > 0 {
            let datagram = self.end_again(current);
            if self.trailers.len() < TRAILERS {
                self.trailers.push_back(Trailer {
                    datagram,
                    left: self.options.repeats,
                });
            }
        } else if last && !self.trailers.is_empty() {
            self.say_again(out);
        }
        size
    }

    fn cut_reliably(
        &mut self,
        current: &mut Current,
        bytes: Vec<u8>,
        last: bool,
        out: &mut Vec<TxDatagram>,
    ) -> usize {
        let peer = peer_of(&current.to);
        let alone = last
            && self.lanes.get(&peer).is_none_or(|l| l.queue.is_empty())
            && self.base.sq.untaken() == 0;
        let (now, tag) = (self.now, current.tag);
        let pushed = self
            .rd
            .as_mut()
            .and_then(|rd| rd.push(&peer, bytes, (tag, last, alone), now));
        let Some((way, packet)) = pushed else {
            return 0;
        };
        let size = packet.len();
        self.hand_out(&peer, way, packet, out);
        size
    }

    fn datagram(&self, current: &Current, bytes: Vec<u8>) -> TxDatagram {
        TxDatagram {
            to: current.to.addr,
            from: current.to.source,
            hop_limit: current.to.hop_limit,
            traffic_class: current.to.traffic_class,
            bytes: bytes.into(),
        }
    }

    /// The parity datagram of the group that is complete.
    fn cut_parity(&mut self, current: &mut Current, out: &mut Vec<TxDatagram>) -> usize {
        let (sum, _, start) = std::mem::take(&mut current.group);
        let shim = Shim {
            offset: start,
            parity: true,
            ..current.shim
        };
        let header = header_of(
            current.message.opcode,
            current.message.address,
            start,
            false,
        );
        let mut bytes = dgram::emit_head(&shim, &header);
        bytes.extend_from_slice(&sum);
        dgram::seal(&mut bytes);
        let size = bytes.len();
        if let Some(peer) = current.peer() {
            let end = u32::try_from(current.message.sent).unwrap_or(u32::MAX);
            self.flow.sent(peer, current.shim.id, end, size, self.now);
        }
        self.given_out.push_back(Given::Nothing);
        out.push(self.datagram(current, bytes));
        size
    }

    /// A datagram without payload that says where the message ended.
    fn end_again(&self, current: &Current) -> TxDatagram {
        let message = &current.message;
        let shim = Shim {
            offset: current.shim.length,
            attributes: current.shim.attributes | ATTR_FINAL_COPY,
            commit: true,
            ..current.shim
        };
        let header = header_of(message.opcode, message.address, current.shim.length, true);
        let mut bytes = dgram::emit_head(&shim, &header);
        dgram::seal(&mut bytes);
        self.datagram(current, bytes)
    }
}

fn wanted_is_value(wanted: &Wanted) -> bool {
    matches!(wanted, Wanted::Value)
}

/// The DDP header of a message's datagram at `offset`.
fn header_of(opcode: Opcode, address: Address, offset: u32, last: bool) -> Header {
    match address {
        Address::Tagged { stag, to } => Header::Tagged(Tagged {
            last,
            opcode,
            stag,
            to: To(to.0.wrapping_add(u64::from(offset))),
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
    }
}

/// Messages that go to one peer of a reliable queue pair.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) queue: VecDeque<Current>,
    pub(super) ready: bool,
    /// How many of the messages answer somebody.
    pub(super) answers: usize,
}

/// Whether a batch takes one more datagram.
fn has_room(bytes: usize, out: &[TxDatagram]) -> bool {
    out.len() < bounds::DATAGRAM_BATCH && bytes < bounds::TX_BATCH_COPIED
}

/// Datagrams to a peer before other peers have their turn.
const LANE_TURN: usize = 16;
/// Requests in all lanes: those behind them stay in the send queue.
const LANES: usize = 4096;
/// Ends of messages that wait to be said again.
const TRAILERS: usize = 64;
/// In a tag: it is no number of the send queue.
pub(super) const OURS: Tag = 1 << 63;

/// Which of the queue pairs of a port a number names.
pub(super) fn index(qpn: u32) -> u8 {
    let [.., index] = qpn.to_be_bytes();
    index
}

/// The elements of a request's list, checked for what is needed.
fn checked(
    rnic: &Rnic,
    sges: &[Sge],
    pd: u32,
    qpn: u32,
    need: Access,
) -> Result<Places, Unbuildable> {
    let some = sges.iter().filter(|s| s.len > 0);
    some.map(|sge| checked_one(rnic, sge, pd, qpn, need))
        .collect()
}

/// The same of one element.
fn checked_one(
    rnic: &Rnic,
    sge: &Sge,
    pd: u32,
    qpn: u32,
    need: Access,
) -> Result<Placement, Unbuildable> {
    let (at, len) = (To(sge.addr), u64::from(sge.len));
    rnic.regions
        .check(sge.lkey, pd, qpn, need, at, len)
        .map_err(|_| not_allowed())
}

fn not_allowed() -> Unbuildable {
    Unbuildable(
        Status::LocalProtection,
        "a request with memory that its lkey does not allow",
    )
}

/// Appends the elements of a request's list, checked.
fn gather_at_once(
    rnic: &Rnic,
    last: &mut LastRegion,
    sges: &[Sge],
    pd: u32,
    qpn: u32,
    out: &mut Vec<u8>,
) -> Result<(), Unbuildable> {
    for sge in sges.iter().filter(|s| s.len > 0) {
        let (at, len) = (To(sge.addr), u64::from(sge.len));
        let pinned = rnic
            .regions
            .pin(last, sge.lkey, pd, qpn, Access::NONE, at, len)
            .map_err(|_| not_allowed())?;
        rnic.memory.gather(&pinned, 0, len, out);
    }
    Ok(())
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
