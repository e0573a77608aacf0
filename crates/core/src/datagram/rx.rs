//! Receive side: checks arriving datagrams, places their payload, and completes messages.
//!
//! Any host can send datagrams here. A datagram that breaks a rule is dropped and counted. The checks come before the
//! payload is placed or a receive is consumed, except two that need the whole message: the STag of a Send with
//! Invalidate, and the receive of a segmented Write with immediate. An unreliable queue pair answers a dropped
//! datagram only if its options demand error reports.
//!
//! A message may also fail because of this end. If no receive is posted, or the receive is too short, an
//! unreliable service drops the message. A receive that is too short stays posted for the next message. IBA 9.9.3 lists
//! these as class D errors, and the kernel's rxe driver drops such messages too. If the memory of the receive is not writable,
//! the receive completes with a protection error and the queue pair fails.

use smallvec::smallvec;

use super::DatagramQp;
use super::flow::Report;
use super::outgoing::{canonical, index, is_group, peer_of};
use super::rd::RxOutcome;
use super::reassemble::{Coverage, Identity, MessageState, Open, Order};
use super::types::{Arrival, Dropped, Kind, Peer, Resource};
use crate::bounds;
use crate::llp::mpa::frame::for_each_part;
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::qp::State;
use crate::verbs::source::Places;
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::verbs::wr::RecvRequest;
use crate::wire::To;
use crate::wire::control::Control;
use crate::wire::ddp::Header;
use crate::wire::dgram::{self, ATTR_SOLICITED, Datagram, Shim};
use crate::wire::rd;
use crate::wire::rdmap::Opcode;

impl DatagramQp {
    /// Handles a datagram from the socket.
    ///
    /// # Errors
    /// The reason why the datagram was dropped. The counters are updated already.
    pub fn handle_rx(&mut self, arrival: &Arrival, bytes: &[u8]) -> Result<(), Dropped> {
        let result = self.receive_one(arrival, bytes);
        self.complete_received();
        self.after();
        result
    }

    /// Handles datagrams that came together from one source, in their order. `dropped` is called for each that was dropped,
    /// with the reason.
    pub fn handle_rx_run<'a>(
        &mut self,
        arrival: &Arrival,
        run: impl Iterator<Item = &'a [u8]>,
        mut dropped: impl FnMut(&[u8], Dropped),
    ) {
        for bytes in run {
            if let Err(why) = self.receive_one(arrival, bytes) {
                dropped(bytes, why);
            }
        }
        self.complete_received();
        self.after();
    }

    #[inline]
    fn receive_one(&mut self, arrival: &Arrival, bytes: &[u8]) -> Result<(), Dropped> {
        self.counters.rx_dgrams += 1;
        // Only Reads expire here. Messages do not: this datagram may be a missing part of one.
        if !self.reads.is_empty() {
            self.complete_received();
            self.expire_reads();
        }
        if self.receive_whole(arrival, bytes) {
            return Ok(());
        }
        self.complete_received();
        let result = if self.rd.is_some() {
            self.receive_packet(arrival, bytes)
        } else {
            self.receive(arrival, bytes)
        };
        if let Err(why) = result {
            self.counters.dropped(why);
        }
        self.after();
        result
    }

    /// Checks that the state of the queue pair allows it to receive and to answer.
    pub(super) fn receives(&self) -> Result<(), Dropped> {
        match self.base.state {
            State::Rtr | State::Rts | State::Sqd | State::Sqe => Ok(()),
            State::Reset | State::Init | State::Error => Err(Dropped::State),
        }
    }

    fn receive(&mut self, arrival: &Arrival, bytes: &[u8]) -> Result<(), Dropped> {
        self.receives()?;
        let datagram = dgram::parse(bytes).map_err(Dropped::Wire)?;
        self.base
            .observe(|| Step::Deframe(&datagram.header, datagram.payload.len()));
        // A multicast datagram is for every queue pair that joined the group, so its index is not checked.
        let to_group = |ip| is_group(ip) || self.joined.contains(&ip);
        let to_group = arrival.to.is_some_and(to_group);
        if !to_group && datagram.shim.dst_index != index(self.base.qpn) {
            return Err(Dropped::Index);
        }
        if to_group && self.options.blocks_own && self.has_sent(arrival, &datagram.shim) {
            return Ok(());
        }
        if datagram.header.opcode() == Opcode::Control {
            return self.receive_control(arrival, &datagram);
        }
        if self.kind == Kind::Uc {
            return self.receive_uc(arrival, &datagram, bytes.len());
        }
        self.admit(arrival, &datagram, bytes.len(), to_group)
    }

    /// Whether a datagram comes from this queue pair. A queue pair of another host can have the same number, but hardly ever the same epoch
    /// too.
    fn has_sent(&self, arrival: &Arrival, shim: &Shim) -> bool {
        let source = u32::from(arrival.from.port()) << 8 | u32::from(shim.src_index);
        source == self.base.qpn && shim.epoch == self.epoch
    }

    /// Handles a packet of the reliability layer.
    fn receive_packet(&mut self, arrival: &Arrival, bytes: &[u8]) -> Result<(), Dropped> {
        self.receives()?;
        let (packet, data) = rd::parse(bytes).map_err(Dropped::Wire)?;
        if packet.dst_index != index(self.base.qpn) {
            return Err(Dropped::Index);
        }
        let peer = (canonical(arrival.from), packet.src_index);
        if self.kind.is_connected() && self.peer.as_ref().map(peer_of) != Some(peer) {
            return Err(Dropped::Source);
        }
        let now = self.now;
        let Some(rd) = &mut self.rd else {
            return Err(Dropped::Operation);
        };
        let verdict = rd.handle(&peer, arrival, &packet, data, now);
        self.handle_rd_events();
        self.make_ready(&peer);
        let result = match (verdict, data) {
            (RxOutcome::Deliver(seq), Some(data)) => {
                // The acknowledgement in the packet may have failed the queue pair. The peer then sends the datagram again.
                self.receives()?;
                self.deliver_packet(arrival, &peer, seq, data)
            }
            // The base of the packet may show that missing packets will never arrive. Packets that waited for them can be
            // delivered now.
            _ => Ok(true),
        };
        if result.err().and_then(Dropped::resource).is_none() {
            if result != Ok(false) {
                self.drain(arrival, &peer);
            }
            self.feed_rx_full();
        }
        result.map(|_| ())
    }

    /// Delivers packets that waited for an earlier packet.
    fn drain(&mut self, arrival: &Arrival, peer: &Peer) {
        while self.receives().is_ok()
            && let Some((seq, data)) = self.rd.as_deref_mut().and_then(|rd| rd.take_waiting(peer))
        {
            match self.deliver_packet(arrival, peer, seq, &data) {
                Err(why) if why.resource().is_some() => break,
                Err(why) => self.counters.dropped(why),
                Ok(_) => {}
            }
            if self.rd.as_deref().is_some_and(|rd| rd.waits(peer, seq)) {
                break;
            }
        }
    }

    /// Delivers packets that waited for [`Resource::Room`], if there may be room again.
    pub(super) fn feed_rx_full(&mut self) {
        if !std::mem::take(&mut self.rx_full) {
            return;
        }
        for _ in 0..CROWD {
            let Some(peer) = self.next_blocked(Resource::Room) else {
                return;
            };
            self.drain(&waited(&peer), &peer);
        }
        // The other peers are next when another packet arrives.
        self.rx_full = true;
    }

    /// Delivers packets that waited for the resource `want`, which is available now.
    pub(super) fn feed(&mut self, want: Resource) {
        while let Some(peer) = self.next_blocked(want) {
            self.drain(&waited(&peer), &peer);
            let rd = self.rd.as_deref();
            if rd.is_some_and(|rd| rd.is_blocked(&peer, want)) {
                break;
            }
        }
    }

    fn next_blocked(&mut self, want: Resource) -> Option<Peer> {
        self.rd.as_deref_mut()?.next_blocked(want)
    }

    /// Delivers the datagram of a packet, and reports the result to the reliability layer. Returns whether other
    /// packets of the same peer may be waiting.
    fn deliver_packet(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        seq: u64,
        data: &[u8],
    ) -> Result<bool, Dropped> {
        let result = dgram::parse_covered(data)
            .map_err(Dropped::Wire)
            .and_then(|datagram| {
                self.base
                    .observe(|| Step::Deframe(&datagram.header, datagram.payload.len()));
                let ours = datagram.shim.dst_index == index(self.base.qpn)
                    && datagram.shim.src_index == peer.1;
                if !ours {
                    return Err(Dropped::Operation);
                }
                let result = self.admit(arrival, &datagram, data.len(), false);
                if self.messages.any_open() {
                    self.messages.note_packet(peer, datagram.shim.id, seq);
                }
                result
            });
        let mut waits = true;
        let Some(rd) = &mut self.rd else {
            return result.map(|()| waits);
        };
        // The sender completes its request when the packet is acknowledged, so only a datagram that was processed,
        // now or earlier, may be acknowledged.
        match result {
            Ok(()) | Err(Dropped::Late | Dropped::Duplicate) => waits = rd.delivered(peer, seq),
            Err(why) => match why.resource() {
                Some(want) => {
                    rd.mark_blocked(peer, seq, data, want);
                    self.rx_full |= want == Resource::Room;
                }
                None => {
                    let informed = rd.refused(peer, seq, data, why.status());
                    if why == Dropped::Local && !informed {
                        // This queue pair has failed, and the part of the message that it had received is lost.
                        rd.begin_session(peer, self.now);
                    }
                }
            },
        }
        result.map(|()| waits)
    }

    /// Checks a datagram that is addressed to this queue pair, and handles it by its opcode.
    fn admit(
        &mut self,
        arrival: &Arrival,
        d: &Datagram<'_>,
        len: usize,
        to_group: bool,
    ) -> Result<(), Dropped> {
        let opcode = d.header.opcode();
        let peer = source(arrival, &d.shim);
        // A response is matched with the request that it answers, so its Q_Key is not checked.
        match opcode {
            Opcode::ReadResponse => {
                let result = self.receive_read_response(&peer, d);
                // Only the answer to an outstanding request is counted and reported: any host can send other ones.
                let is_answer = matches!(
                    result,
                    Ok(()) | Err(Dropped::Duplicate | Dropped::Gaps | Dropped::Access)
                );
                if is_answer && !to_group && self.count_arrival(&peer, len) {
                    self.queue_report(&peer, arrival, d);
                }
                return result;
            }
            Opcode::AtomicResponse => return self.receive_atomic_response(&peer, d),
            Opcode::Terminate => return self.receive_error(&peer, d),
            _ => {}
        }
        let qkey = if self.kind.is_connected() {
            0
        } else {
            self.base.attr.qkey
        };
        if d.shim.qkey != qkey {
            return Err(Dropped::Qkey);
        }
        let tell = !to_group && self.count_arrival(&peer, len);
        let reads = self.kind.reads() || (self.options.one_sided && !to_group);
        let records = !self.kind.is_connected() && reads;
        let result = match opcode {
            Opcode::ReadRequest if reads => self.serve_read(arrival, &peer, d, len),
            Opcode::AtomicRequest if self.kind.reads() => self.serve_atomic(arrival, &peer, d),
            Opcode::Write if self.kind.is_reliable() => {
                self.receive_message(arrival, &peer, d, len)
            }
            Opcode::WriteRecord if records => self.receive_message(arrival, &peer, d, len),
            _ if opcode.is_send() && (self.kind.reads() || !opcode.invalidates()) => {
                self.receive_message(arrival, &peer, d, len)
            }
            _ => Err(Dropped::Operation),
        };
        if !to_group && let Err(why) = result {
            self.report_error(arrival, &peer, d, why);
        }
        if tell {
            self.queue_report(&peer, arrival, d);
        }
        result
    }

    /// Handles a control datagram: a flow report or a cookie.
    fn receive_control(&mut self, arrival: &Arrival, d: &Datagram<'_>) -> Result<(), Dropped> {
        let Header::Untagged(h) = &d.header else {
            return Err(Dropped::Operation);
        };
        let peer = source(arrival, &d.shim);
        if let Some(report) = Report::parse(h, d.payload) {
            // A forged report only changes how much data may be under way to the source address of the
            // report.
            self.flow.handle_report(&peer, &report);
            self.reopen_answers(&peer);
            return Ok(());
        }
        match (Control::parse(h), d.payload.first_chunk()) {
            (Ok(Control::Cookie), Some(cookie)) => {
                self.ask_again(d.shim.id, &peer, u64::from_be_bytes(*cookie));
                Ok(())
            }
            _ => Err(Dropped::Operation),
        }
    }

    /// Counts a datagram from `peer`. Returns whether a report to its sender is due; the caller then calls
    /// [`Self::queue_report`].
    fn count_arrival(&mut self, peer: &Peer, len: usize) -> bool {
        self.rd.is_none() && self.flow.count_arrival(*peer, len)
    }

    /// Queues a report to the sender of a datagram. Called after any other answer to the datagram was queued.
    fn queue_report(&mut self, peer: &Peer, arrival: &Arrival, d: &Datagram<'_>) {
        let payload = u32::try_from(d.payload.len()).unwrap_or(0);
        let end = d.shim.offset.saturating_add(payload);
        self.flow.schedule_report(*peer, arrival.to, d.shim.id, end);
    }

    // ------------------------------------------------------------------ UC

    fn receive_uc(
        &mut self,
        arrival: &Arrival,
        datagram: &Datagram<'_>,
        len: usize,
    ) -> Result<(), Dropped> {
        let shim = &datagram.shim;
        let Some(peer) = &self.peer else {
            return Err(Dropped::Source);
        };
        let same_host = peer.addr.ip().to_canonical() == arrival.from.ip().to_canonical();
        if !same_host
            || peer.addr.port() != arrival.from.port()
            || index(peer.qpn) != shim.src_index
        {
            return Err(Dropped::Source);
        }
        if shim.qkey != 0 {
            return Err(Dropped::Qkey);
        }
        let from = source(arrival, shim);
        if self.count_arrival(&from, len) {
            self.queue_report(&from, arrival, datagram);
        }
        let identity = identity(datagram)?;
        if identity.opcode == Opcode::WriteRecord || identity.invalidate.is_some() {
            return Err(Dropped::Operation);
        }
        self.base.note_arrival(identity.opcode);
        if u64::from(identity.length) > bounds::MAX_MESSAGE {
            return Err(Dropped::Operation);
        }
        match self.incoming.classify(shim.epoch, shim.id, self.now) {
            Order::Late => return Err(Dropped::Late),
            Order::Newest => {}
            Order::Newer => {
                self.give_up();
                let state = match self.open(identity) {
                    Ok(open) => MessageState::Open(Box::new(open)),
                    Err(Dropped::Local) => return Err(Dropped::Local),
                    Err(why) => MessageState::Refused(why),
                };
                self.incoming.state = Some(state);
            }
            Order::Replaces => {
                // Anyone can forge a datagram with another epoch. It counts only if its message can be received, and otherwise does not end
                // the incomplete message.
                if let Some(MessageState::Open(incomplete)) = &self.incoming.state {
                    match (&incomplete.receive, identity.base) {
                        // The STag of an empty Write is not checked, so anyone can send one.
                        (_, Some(_))
                            if identity.length == 0 && self.incoming.is_recent(self.now) =>
                        {
                            return Err(Dropped::Late);
                        }
                        (Some(request), None) if u64::from(identity.length) > room(request) => {
                            return Err(Dropped::TooLong);
                        }
                        (None, Some(_))
                            if identity.imm.is_some()
                                && self.base.rq.is_empty()
                                && self.incoming.is_recent(self.now) =>
                        {
                            return Err(Dropped::NoReceive);
                        }
                        // The Send gets the receive of the incomplete message.
                        (Some(_), None) => self.give_up(),
                        _ => {}
                    }
                }
                let open = self.open(identity)?;
                self.give_up();
                self.incoming.replace(shim.epoch, shim.id, self.now);
                self.incoming.state = Some(MessageState::Open(Box::new(open)));
            }
        }
        let (targets, complete) = match &mut self.incoming.state {
            Some(MessageState::Open(open)) => {
                if open.identity != identity {
                    return Err(Dropped::Mismatch);
                }
                let from = shim.offset;
                let to = from.saturating_add(u32::try_from(datagram.payload.len()).unwrap_or(0));
                let fresh = open
                    .coverage
                    .add(from, to, bounds::DATAGRAM_RANGES)
                    .map_err(|_| Dropped::Gaps)?;
                let complete = open.coverage.is_complete(identity.length);
                if fresh.is_empty() && !complete {
                    return Err(Dropped::Duplicate);
                }
                (fresh, complete)
            }
            Some(MessageState::Refused(why)) => return Err(*why),
            Some(MessageState::Done) => return Err(Dropped::Duplicate),
            None => return Err(Dropped::Late),
        };
        // Only bytes that had not arrived before are placed: after a Write the application may have changed the
        // others already.
        let whole = match &self.incoming.state {
            Some(MessageState::Open(open)) => targets.iter().all(|(from, to)| {
                let payload = (from - shim.offset) as usize..(to - shim.offset) as usize;
                let bytes = datagram.payload.get(payload).unwrap_or(&[]);
                self.place(&open.places, u64::from(*from), bytes)
            }),
            _ => true,
        };
        if !whole {
            return Err(self.broken_message());
        }
        if complete {
            self.finish()?;
        }
        Ok(())
    }

    /// Gives up the incomplete message. Its receive is used for the next message.
    fn give_up(&mut self) {
        if let Some(receive) = self.incoming.abandon() {
            self.counters.evicted += 1;
            if let Some(request) = receive {
                self.base.rq.put_back(request);
            }
        }
    }

    /// Finds the memory for a new message.
    fn open(&mut self, identity: Identity) -> Result<Open, Dropped> {
        let length = u64::from(identity.length);
        let (receive, places) = match identity.base {
            None => {
                let (request, places) = self.take_receive(length)?;
                (Some(request), places)
            }
            // RFC 5041 §5.2 [ddp-zero-len]: a message without payload is not placed, and its STag and TO are not
            // checked.
            Some(_) if length == 0 => (None, Places::new()),
            Some((stag, to)) => {
                let need = Access::REMOTE_WRITE;
                if !self.base.attr.access.has(need) {
                    return Err(Dropped::Access);
                }
                // The range of the whole message is checked first, so a message that leaves the region is not placed
                // in part.
                let place = self
                    .base
                    .rnic
                    .regions
                    .check(stag, self.base.pd, self.base.qpn, need, to, length)
                    .map_err(|_| Dropped::Access)?;
                (None, smallvec![place])
            }
        };
        Ok(Open {
            identity,
            coverage: Coverage::default(),
            receive,
            places,
        })
    }

    /// Completes the message, all bytes of which have been placed.
    fn finish(&mut self) -> Result<(), Dropped> {
        let Some(MessageState::Open(open)) = self.incoming.state.replace(MessageState::Done) else {
            return Ok(());
        };
        let identity = open.identity;
        let (request, op) = match (open.receive, identity.imm) {
            (Some(request), _) => (request, WcOp::Recv),
            (None, Some(_)) => match self.base.take_receive() {
                Some(request) => (request, WcOp::RecvWriteImm),
                None => {
                    self.incoming.state = Some(MessageState::Refused(Dropped::NoReceive));
                    return Err(Dropped::NoReceive);
                }
            },
            (None, None) => {
                self.counters.rx_messages += 1;
                self.base.observe(|| Step::Deliver(identity.opcode));
                return Ok(());
            }
        };
        let mut entry = Completion::new(request.id, Status::Success, op, self.base.qpn);
        entry.byte_len = identity.length;
        self.deliver(entry, &identity);
        Ok(())
    }

    /// Fails the incomplete message, because its memory was deregistered.
    fn broken_message(&mut self) -> Dropped {
        match self.incoming.abandon() {
            Some(Some(request)) => self.broken_receive(request.id),
            _ => {
                self.incoming.state = Some(MessageState::Refused(Dropped::Access));
                Dropped::Access
            }
        }
    }

    // ------------------------------------------------------------------ all services

    /// Takes the oldest posted receive for a message of `len` bytes. A receive that is too short stays posted.
    pub(super) fn take_receive(&mut self, len: u64) -> Result<(RecvRequest, Places), Dropped> {
        let request = self.base.take_receive().ok_or(Dropped::NoReceive)?;
        if len > room(&request) {
            self.base.rq.put_back(request);
            return Err(Dropped::TooLong);
        }
        let pd = self.base.rq.pd().unwrap_or(self.base.pd);
        let mut places = Places::new();
        let mut missing = len;
        for sge in request.sges.iter().filter(|s| s.len > 0) {
            if missing == 0 {
                break;
            }
            // Only the memory that the message fills has to be writable, as with adapters.
            let (at, len) = (To(sge.addr), missing.min(sge.len.into()));
            let need = Access::LOCAL_WRITE;
            let place = self
                .base
                .rnic
                .regions
                .check(sge.lkey, pd, self.base.qpn, need, at, len);
            match place {
                Ok(place) => places.push(place),
                Err(_) => return Err(self.broken_receive(request.id)),
            }
            missing -= len;
        }
        Ok((request, places))
    }

    /// Completes a receive with a protection error, because its memory is not writable, and fails the queue
    /// pair.
    pub(super) fn broken_receive(&mut self, id: u64) -> Dropped {
        self.base.complete_recv(Completion::new(
            id,
            Status::LocalProtection,
            WcOp::Recv,
            self.base.qpn,
        ));
        self.fail("a receive into memory that may not be written", None);
        Dropped::Local
    }

    /// Copies `bytes` to the memory of `places`, starting at offset `from`. Returns false if the memory was
    /// deregistered.
    pub(super) fn place(&self, places: &Places, from: u64, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let whole = for_each_part(places, from, bytes.len() as u64, |place, at, len| {
            let Ok(len) = usize::try_from(len) else {
                return false;
            };
            let Some(pinned) = place.pin() else {
                return false;
            };
            let (now, later) = rest.split_at(len.min(rest.len()));
            self.base.rnic.memory.place(&pinned, at, now);
            rest = later;
            true
        });
        if !bytes.is_empty() {
            self.base.observe(|| Step::Place(bytes.len() as u64));
        }
        whole
    }

    pub(super) fn deliver(&mut self, mut entry: Completion, identity: &Identity) {
        self.counters.rx_messages += 1;
        self.base.observe(|| Step::Deliver(identity.opcode));
        entry.imm = identity.imm;
        entry.solicited = identity.solicited;
        self.base.complete_recv(entry);
    }
}

/// The length of the longest message that a receive has room for.
fn room(request: &RecvRequest) -> u64 {
    request.sges.iter().map(|s| u64::from(s.len)).sum()
}

/// Returns the properties of the message that a datagram belongs to. Fails if the message is not a Send, a Write or a
/// Write-Record, or if the header and the shim contradict each other.
pub(super) fn identity(datagram: &Datagram<'_>) -> Result<Identity, Dropped> {
    let shim = &datagram.shim;
    let opcode = datagram.header.opcode();
    let recorded = opcode == Opcode::WriteRecord;
    if (shim.commit || shim.parity) && !recorded {
        return Err(Dropped::Operation);
    }
    let (base, invalidate) = match &datagram.header {
        Header::Tagged(h) if h.opcode == Opcode::Write || recorded => {
            // The parser has checked that the offset is not larger than TO.
            let base = To(h.to.0.wrapping_sub(u64::from(shim.offset)));
            (Some((h.stag, base)), None)
        }
        Header::Untagged(h) if h.opcode.is_send() && h.msn.0 == shim.id => {
            (None, opcode.invalidates().then_some(h.inv_stag))
        }
        _ => return Err(Dropped::Operation),
    };
    Ok(Identity {
        opcode,
        length: shim.length,
        base,
        imm: shim.immediate,
        invalidate,
        solicited: opcode.is_solicited() || shim.attributes & ATTR_SOLICITED != 0,
    })
}

/// Returns the addressing of a packet that waited. Only its source is known.
fn waited(peer: &Peer) -> Arrival {
    Arrival {
        from: peer.0,
        to: None,
        hop_limit: 0,
        traffic_class: 0,
    }
}

/// Largest number of peers whose waiting packets are handled in one call.
const CROWD: usize = 64;

/// Returns the peer that sent a datagram.
pub(super) fn source(arrival: &Arrival, shim: &Shim) -> Peer {
    (canonical(arrival.from), shim.src_index)
}

/// Returns the queue pair number of the sender: its UDP port, and the index of the queue pair on that port.
pub(super) fn source_qpn(arrival: &Arrival, shim: &Shim) -> u32 {
    u32::from(arrival.from.port()) << 8 | u32::from(shim.src_index)
}

/// Returns the index of the destination queue pair on its port, without any other check. It serves to find the queue
/// pair, which then checks the datagram.
pub fn destination_index(bytes: &[u8]) -> Option<u8> {
    bytes.get(DST_INDEX).copied()
}

/// Byte offset of [`Shim::dst_index`] in a datagram.
const DST_INDEX: usize = 22;
