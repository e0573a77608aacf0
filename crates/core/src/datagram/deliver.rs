//! Delivers incoming messages: Sends into posted receives, Writes into registered memory, and Write-Records with
//! their records.
//!
//! A *record* tells the program which bytes of a Write-Record have arrived. A message of one datagram is delivered at
//! once. For longer messages and incomplete Write-Records, [`Messages`](super::messages::Messages) keeps the state until
//! they end.

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::messages::{GivenUp, MessageStatus, Open, Record};
use super::options::RecordMode;
use super::parity::{Budget, Groups};
use super::reassemble::{Coverage, Identity, Range, TooManyGaps};
use super::rx::{identity, source_qpn};
use super::types::{Arrival, Dropped, Peer};
use super::{DatagramQp, grh};
use crate::bounds;
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::mr::Placement;
use crate::verbs::source::Places;
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::verbs::wr::RecvRequest;
use crate::wire::dgram::{ATTR_NOT_AGGREGATED, Datagram, Shim};
use crate::wire::rdmap::Opcode;
use crate::wire::{Stag, To};

/// What one datagram changed in a message.
struct Progress {
    /// The bytes that had not arrived before.
    fresh: SmallVec<[Range; 2]>,
    /// Whether all bytes have arrived.
    complete: bool,
    /// Whether each datagram of the message makes its own record.
    chunks: bool,
}

impl DatagramQp {
    /// Handles a datagram of a Send, a Write or a Write-Record.
    pub(super) fn receive_message(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        len: usize,
    ) -> Result<(), Dropped> {
        let shim = &d.shim;
        let identity = identity(d)?;
        let record = identity.opcode == Opcode::WriteRecord;
        let most = match identity.base {
            None if !self.kind.is_connected() => {
                u64::from(self.options.max_send.max(bounds::UD_MTU))
            }
            _ => bounds::MAX_MESSAGE,
        };
        if u64::from(identity.length) > most {
            return Err(Dropped::TooLong);
        }
        let single = d.header.last() && shim.offset == 0 && !shim.commit;
        if single && !record {
            return self.deliver_single(arrival, d, &identity, len);
        }
        if identity.opcode == Opcode::Write && identity.imm.is_none() {
            // Such a Write makes no record and no completion, so no state is kept: its datagrams are placed in any
            // order.
            return self.place_write(peer, d, &identity);
        }
        let mut given_up = Vec::new();
        let now = self.now;
        let status = self.messages.status(peer, shim.epoch, shim.id, now);
        let result = match status {
            MessageStatus::Late => Err(Dropped::Late),
            MessageStatus::Open => self.continue_message(arrival, peer, d, &identity),
            // An empty Write-Record needs neither an STag nor a receive, so anyone can forge one. If it appears to come from a new
            // queue pair of a source that sent messages lately, it must not end these messages. So it is recorded, and the state
            // of the source is not changed.
            MessageStatus::New
                if record
                    && identity.length == 0
                    && self.rd.is_none()
                    && self.messages.would_replace(peer, shim.epoch, now) =>
            {
                self.record_whole(arrival, peer, d, &identity);
                Ok(())
            }
            MessageStatus::New if single && shim.group == 0 && !shim.parity => {
                self.room_for_record()?;
                self.record_single(arrival, peer, d, &identity, &mut given_up)
            }
            // The first part of the message was acknowledged to its sender, but this end does not have it any more.
            MessageStatus::New if self.begins_late(shim) => Err(Dropped::Operation),
            // An acknowledged message must not be given up, so the packet waits and is not acknowledged.
            MessageStatus::New if self.rd.is_some() && self.messages.is_full(peer) => {
                Err(Dropped::Busy)
            }
            MessageStatus::New => self
                .open_message(arrival, peer, d, &identity, len)
                .and_then(|open| {
                    self.messages
                        .open(peer, shim.epoch, shim.id, open, self.now, &mut given_up);
                    if self.rd.is_none() {
                        self.messages
                            .give_up_overtaken(peer, shim.id, &mut given_up);
                    }
                    self.continue_message(arrival, peer, d, &identity)
                }),
        };
        self.give_up_all(given_up, true);
        result
    }

    /// Whether the datagram of a new message is not the first one of that message, although the peer's datagrams are
    /// delivered in order.
    fn begins_late(&self, shim: &Shim) -> bool {
        let ordered = self.options.ordered || self.kind.is_connected();
        self.rd.is_some() && ordered && shim.offset != 0 && !shim.commit && !shim.parity
    }

    /// Returns the length of the route header in front of a Send.
    fn route_header_len(&self, identity: &Identity) -> u64 {
        match identity.base {
            None if !self.kind.is_connected() => bounds::GRH_LEN.into(),
            _ => 0,
        }
    }

    /// Delivers a message of one datagram, for which no state is kept.
    fn deliver_single(
        &mut self,
        arrival: &Arrival,
        d: &Datagram<'_>,
        identity: &Identity,
        len: usize,
    ) -> Result<(), Dropped> {
        if identity.base.is_some() {
            let place = self.target(&super::rx::source(arrival, &d.shim), identity)?;
            let request = match identity.imm {
                Some(_) => Some(self.base.take_receive().ok_or(Dropped::NoReceive)?),
                None => None,
            };
            let placed = place.is_none_or(|p| self.place(&smallvec![p], 0, d.payload));
            if !placed {
                if let Some(request) = request {
                    self.base.rq.put_back(request);
                }
                return Err(Dropped::Access);
            }
            match request {
                Some(request) => {
                    self.complete_message(arrival, d, request, identity, WcOp::RecvWriteImm);
                }
                None => {
                    self.counters.rx_messages += 1;
                    self.base.observe(|| Step::Deliver(identity.opcode));
                }
            }
            return Ok(());
        }
        let lead = self.route_header_len(identity);
        let (request, places) = self.take_receive(lead + u64::from(identity.length))?;
        let header = grh::build(arrival, len);
        let lead_bytes = if lead > 0 { &header[..] } else { &[] };
        let whole = self.place_with_route_header(&places, lead_bytes, d.payload);
        if !whole {
            return Err(self.broken_receive(request.id));
        }
        if !self.invalidates(identity) {
            self.base.rq.put_back(request);
            return Err(Dropped::Access);
        }
        self.complete_message(arrival, d, request, identity, WcOp::Recv);
        Ok(())
    }

    /// Copies the route header and the message after it. Returns false if the memory was deregistered.
    fn place_with_route_header(&self, places: &Places, lead: &[u8], payload: &[u8]) -> bool {
        let at = lead.len() as u64;
        // Most receives have one range, which is pinned once for both copies.
        let [place] = places.as_slice() else {
            return self.place(places, 0, lead) && self.place(places, at, payload);
        };
        let Some(pinned) = place.pin() else {
            return false;
        };
        self.base.rnic.memory.place(&pinned, 0, lead);
        self.base.rnic.memory.place(&pinned, at, payload);
        if !payload.is_empty() {
            self.base.observe(|| Step::Place(payload.len() as u64));
        }
        true
    }

    /// Handles a Write-Record of one datagram, which is complete at once.
    fn record_single(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
        given_up: &mut Vec<GivenUp>,
    ) -> Result<(), Dropped> {
        let shim = &d.shim;
        let place = self.target(peer, identity)?;
        if self.rd.is_none() {
            self.messages
                .close_single(peer, shim.epoch, shim.id, self.now, given_up);
            self.messages.give_up_overtaken(peer, shim.id, given_up);
        }
        let placed = place.is_none_or(|p| self.place(&smallvec![p], 0, d.payload));
        if !placed {
            return Err(Dropped::Access);
        }
        self.record_whole(arrival, peer, d, identity);
        Ok(())
    }

    /// Makes the record of a Write-Record of one datagram.
    fn record_whole(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
    ) {
        if self.in_chunks(d) {
            self.record_chunk(arrival, d, identity, 0, identity.length);
        } else {
            let (id, ranges) = (d.shim.id, [(0, identity.length)]);
            self.record_of(peer, id, identity, &ranges, d.header.last());
        }
    }

    /// Returns whether each datagram of a Write-Record makes its own record.
    fn in_chunks(&self, d: &Datagram<'_>) -> bool {
        self.options.record == RecordMode::Chunk || d.shim.attributes & ATTR_NOT_AGGREGATED != 0
    }

    /// Invalidates the STag that a Send with Invalidate names. Returns false if the peer may not invalidate it.
    fn invalidates(&mut self, identity: &Identity) -> bool {
        match identity.invalidate {
            Some(stag) => {
                let done = self
                    .base
                    .rnic
                    .regions
                    .invalidate(stag, self.base.pd, self.base.qpn);
                done.is_ok()
            }
            None => true,
        }
    }

    /// Places one of several datagrams of a Write without a record.
    fn place_write(
        &mut self,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
    ) -> Result<(), Dropped> {
        let place = self.target(peer, identity)?;
        let placed =
            place.is_none_or(|p| self.place(&smallvec![p], u64::from(d.shim.offset), d.payload));
        if !placed {
            return Err(Dropped::Access);
        }
        if d.header.last() {
            self.counters.rx_messages += 1;
            self.base.observe(|| Step::Deliver(identity.opcode));
        }
        Ok(())
    }

    /// Returns the memory that a Write names, for the whole message. A message that extends beyond the region is rejected
    /// before any of it is placed.
    fn target(&self, peer: &Peer, identity: &Identity) -> Result<Option<Placement>, Dropped> {
        let Some((stag, to)) = identity.base else {
            return Ok(None);
        };
        // RFC 5041 §5.2 [ddp-zero-len]: a message without payload is not placed, and its STag and TO are not checked.
        if identity.length == 0 {
            return Ok(None);
        }
        self.remote(peer, stag, to, identity.length.into(), Access::REMOTE_WRITE)
            .map(Some)
    }

    /// Returns local memory that a peer names, after the check of its access rights.
    pub(super) fn remote(
        &self,
        peer: &Peer,
        stag: Stag,
        to: To,
        len: u64,
        need: Access,
    ) -> Result<Placement, Dropped> {
        if self.kind.is_connected() && !self.base.attr.access.has(need) {
            return Err(Dropped::Access);
        }
        let place = self
            .base
            .rnic
            .regions
            .check(stag, self.base.pd, self.base.qpn, need, to, len)
            .map_err(|_| Dropped::Access)?;
        let qpn = u32::from(peer.0.port()) << 8 | u32::from(peer.1);
        if !place.admits(peer.0.ip(), qpn) {
            return Err(Dropped::Access);
        }
        Ok(place)
    }

    /// Finds the receive and the memory for a new message.
    fn open_message(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
        len: usize,
    ) -> Result<Open, Dropped> {
        let record = identity.opcode == Opcode::WriteRecord;
        let (receive, places) = match identity.base {
            None => {
                let lead = self.route_header_len(identity);
                let (request, places) = self.take_receive(lead + u64::from(identity.length))?;
                if lead > 0 && !self.place(&places, 0, &grh::build(arrival, len)) {
                    return Err(self.broken_receive(request.id));
                }
                if let Some(rd) = &mut self.rd {
                    rd.note_receiving(self.now);
                }
                (Some(request), places)
            }
            Some(_) => {
                let place = self.target(peer, identity)?;
                (None, place.into_iter().collect::<Places>())
            }
        };
        let until = match self.rd {
            // No deadline: the reliability layer delivers the missing datagrams or reports that the peer is lost.
            Some(_) => Duration::MAX,
            None => self.now + self.options.deadline,
        };
        Ok(Open {
            identity: *identity,
            coverage: Coverage::default(),
            receive,
            places,
            record,
            chunks: record && self.in_chunks(d),
            final_seen: false,
            parity: None,
            last: self.now,
            packet: 0,
            failed: None,
            until,
            timer: until,
        })
    }

    /// Fails a message that cannot be completed. An unreliable service forgets the message. A reliable service
    /// refuses the later packets of the message for the same reason, and the sender then gives it up.
    fn fail_message(&mut self, peer: &Peer, id: u32, why: Dropped) -> Dropped {
        let receive = if self.rd.is_none() {
            self.messages.close(peer, id).and_then(|open| open.receive)
        } else if let Some(open) = self.messages.get_mut(peer, id) {
            open.failed = Some(why);
            open.receive.take()
        } else {
            None
        };
        if let Some(request) = receive.filter(|_| why == Dropped::Access) {
            self.base.rq.put_back(request);
        }
        why
    }

    /// Checks that a record of a reliable message can be stored. If it cannot, the packet stays unacknowledged until
    /// the program has fetched records. Unreliable services do not check: the message counts as delivered and the
    /// record is lost.
    fn room_for_record(&self) -> Result<(), Dropped> {
        if self.rd.is_none() || self.records.has_room(self.options.max_records) {
            return Ok(());
        }
        Err(Dropped::NoRecord)
    }

    /// Handles a datagram of a message that is open.
    fn continue_message(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
    ) -> Result<(), Dropped> {
        let shim = &d.shim;
        let now = self.now;
        let Some(open) = self.messages.get_mut(peer, shim.id) else {
            return Err(Dropped::Late);
        };
        if open.identity != *identity {
            return Err(Dropped::Mismatch);
        }
        if let Some(why) = open.failed {
            return Err(why);
        }
        let chunks = open.chunks;
        if chunks {
            self.room_for_record()?;
        }
        let Some(open) = self.messages.get_mut(peer, shim.id) else {
            return Err(Dropped::Late);
        };
        open.last = now;
        let made = match shim.group {
            0 => None,
            group => open.group(shim.segment, group, &self.parity)?.add_datagram(
                shim.offset,
                d.payload,
                shim.parity,
            ),
        };
        let mut progress = Progress {
            fresh: SmallVec::new(),
            complete: open.coverage.is_complete(identity.length),
            chunks,
        };
        let mut result = Ok(());
        if !shim.parity && !shim.commit {
            match self.place_new_bytes(peer, shim.id, shim.offset, d.payload, identity) {
                Ok(done) => progress = done,
                Err(why) => result = Err(why),
            }
        }
        if let Some((offset, bytes)) = made {
            match self.place_new_bytes(peer, shim.id, offset, &bytes, identity) {
                Ok(done) => {
                    progress.fresh.extend(done.fresh);
                    progress.complete |= done.complete;
                    self.counters.rx_repaired += 1;
                }
                // Without this error, the record would claim that the restored bytes are in the memory.
                Err(why @ (Dropped::Access | Dropped::Local)) => result = Err(why),
                Err(_) => {}
            }
        }
        if let Err(why @ (Dropped::Access | Dropped::Local)) = result {
            // The memory was deregistered, so the message fails.
            return Err(self.fail_message(peer, shim.id, why));
        }
        if d.header.last() {
            self.final_seen(peer, shim.id);
        }
        self.complete_due(arrival, peer, d, identity, &progress)?;
        result
    }

    /// Places the bytes of a datagram that had not arrived before.
    fn place_new_bytes(
        &mut self,
        peer: &Peer,
        id: u32,
        offset: u32,
        payload: &[u8],
        identity: &Identity,
    ) -> Result<Progress, Dropped> {
        let (lead, reliable) = (self.route_header_len(identity), self.rd.is_some());
        let rx_full = self.messages.has_too_many_runs();
        let Some(open) = self.messages.get_mut(peer, id) else {
            return Err(Dropped::Late);
        };
        let end = offset.saturating_add(u32::try_from(payload.len()).unwrap_or(u32::MAX));
        // Gaps of a reliable message are filled later, and the send window limits their number.
        let most = if (open.record || reliable) && !rx_full {
            bounds::RECORD_GAPS
        } else {
            bounds::DATAGRAM_RANGES
        };
        let before = open.coverage.ranges().len();
        let fresh = match open.coverage.add(offset, end, most) {
            Ok(fresh) => fresh,
            // Packets of this message may have been acknowledged, so it cannot fail: the packet waits until there are
            // fewer gaps. A packet that fills a gap is accepted always.
            Err(TooManyGaps) if reliable && rx_full => return Err(Dropped::Busy),
            Err(TooManyGaps) => return Err(Dropped::Gaps),
        };
        let runs = open.coverage.ranges().len();
        let complete = open.coverage.is_complete(identity.length);
        let chunks = open.chunks;
        if fresh.is_empty() && !complete && !payload.is_empty() {
            return Err(Dropped::Duplicate);
        }
        // Only new bytes postpone the deadline. Otherwise a sender could repeat one datagram, and the message would keep its
        // receive for ever.
        if !reliable && !open.final_seen && !fresh.is_empty() {
            open.until = self.now + self.options.deadline;
        }
        let places = open.places.clone();
        self.messages.note_runs(before, runs);
        // Only bytes that had not arrived before are placed: the application may have used the others already.
        for (from, to) in &fresh {
            let part = (from - offset) as usize..(to - offset) as usize;
            let bytes = payload.get(part).unwrap_or(&[]);
            if !self.place(&places, lead + u64::from(*from), bytes) {
                // The message is closed before the queue pair fails, since the failure flushes all other receives. Its
                // sender is informed by the refusal of this packet.
                let receive = self.messages.get_mut(peer, id);
                return Err(match receive.and_then(|open| open.receive.take()) {
                    Some(request) => {
                        self.messages.close(peer, id);
                        self.broken_receive(request.id)
                    }
                    None => Dropped::Access,
                });
            }
        }
        Ok(Progress {
            fresh,
            complete,
            chunks,
        })
    }

    /// Records that the final datagram of a message, or its end-of-message datagram, has arrived.
    fn final_seen(&mut self, peer: &Peer, id: u32) {
        let until = self.now + self.options.grace;
        let reliable = self.rd.is_some();
        let Some(open) = self.messages.get_mut(peer, id) else {
            return;
        };
        open.final_seen = true;
        if !reliable {
            self.messages.shorten_deadline(peer, id, until);
        }
    }

    /// Makes the records and completions that are due after a datagram.
    fn complete_due(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        identity: &Identity,
        progress: &Progress,
    ) -> Result<(), Dropped> {
        let id = d.shim.id;
        let record = identity.opcode == Opcode::WriteRecord;
        let chunks = progress.chunks;
        if chunks {
            for (from, to) in &progress.fresh {
                self.record_chunk(arrival, d, identity, *from, *to);
            }
            if identity.length == 0 {
                self.record_chunk(arrival, d, identity, 0, 0);
            }
        }
        if progress.complete {
            if identity.base.is_some() && identity.imm.is_some() && !record {
                // A Write with immediate consumes its receive at its end. Without a receive, the last packet stays
                // unacknowledged until one is posted.
                let Some(request) = self.base.take_receive() else {
                    return Err(Dropped::NoReceive);
                };
                self.messages.close(peer, id);
                self.complete_message(arrival, d, request, identity, WcOp::RecvWriteImm);
                return Ok(());
            }
            if record && !chunks {
                // If there is no room for the record, the bytes stay placed, and the record is made when the last packet is
                // handled again.
                self.room_for_record()?;
            }
            if !self.invalidates(identity) {
                return Err(self.fail_message(peer, id, Dropped::Access));
            }
            let Some(open) = self.messages.close(peer, id) else {
                return Ok(());
            };
            if let Some(request) = open.receive {
                self.complete_message(arrival, d, request, identity, WcOp::Recv);
            } else if !chunks {
                self.record(peer, id, &open);
            }
            return Ok(());
        }
        // A reliable message becomes complete unless its sender gives it up, so it is not recorded early.
        let thesis = record && self.options.record == RecordMode::Thesis && !chunks;
        if thesis
            && self.rd.is_none()
            && d.header.last()
            && let Some(open) = self.messages.close(peer, id)
        {
            // Grant's thesis, section 6.6.1: the record contains the bytes that have arrived by the time the final
            // datagram arrives.
            self.record(peer, id, &open);
        }
        Ok(())
    }

    fn complete_message(
        &mut self,
        arrival: &Arrival,
        d: &Datagram<'_>,
        request: RecvRequest,
        identity: &Identity,
        op: WcOp,
    ) {
        let lead = self.route_header_len(identity);
        let mut entry = Completion::new(request.id, Status::Success, op, self.base.qpn);
        let received = lead + u64::from(identity.length);
        entry.byte_len = u32::try_from(received).unwrap_or(u32::MAX);
        entry.invalidated = identity.invalidate;
        if !self.kind.is_connected() {
            entry.src_qpn = source_qpn(arrival, &d.shim);
            entry.grh = lead > 0;
            entry.sl = grh::kind(arrival);
        }
        self.deliver(entry, identity);
    }

    // ------------------------------------------------------------------ records

    /// Makes the record of a message that has ended.
    fn record(&mut self, peer: &Peer, id: u32, open: &Open) {
        let ranges = open.coverage.ranges();
        self.record_of(peer, id, &open.identity, ranges, open.final_seen);
    }

    /// Like [`Self::record`], with the ranges of bytes that have arrived.
    fn record_of(
        &mut self,
        peer: &Peer,
        id: u32,
        identity: &Identity,
        ranges: &[Range],
        final_seen: bool,
    ) {
        let (stag, base) = identity.base.unwrap_or((Stag(0), To(0)));
        let valid = ranges.iter().map(|(from, to)| to - from).sum();
        let complete = valid == identity.length;
        let record = Record {
            from: peer.0,
            src_qpn: u32::from(peer.0.port()) << 8 | u32::from(peer.1),
            id,
            stag,
            base,
            length: identity.length,
            valid,
            offset: 0,
            imm: identity.imm,
            complete,
            chunk: false,
            final_seen,
            map: 0,
        };
        if complete {
            self.counters.rx_messages += 1;
            self.base.observe(|| Step::Deliver(identity.opcode));
        }
        self.push_record(record, ranges, identity.solicited);
    }

    fn record_chunk(
        &mut self,
        arrival: &Arrival,
        d: &Datagram<'_>,
        identity: &Identity,
        from: u32,
        to: u32,
    ) {
        let (stag, base) = identity.base.unwrap_or((Stag(0), To(0)));
        let peer = super::rx::source(arrival, &d.shim);
        let record = Record {
            from: peer.0,
            src_qpn: source_qpn(arrival, &d.shim),
            id: d.shim.id,
            stag,
            base,
            length: identity.length,
            valid: to - from,
            offset: from,
            imm: identity.imm,
            complete: to - from == identity.length,
            chunk: true,
            final_seen: d.header.last(),
            map: 0,
        };
        self.push_record(record, &[], identity.solicited);
    }

    fn push_record(&mut self, record: Record, ranges: &[Range], solicited: bool) {
        let mut entry = Completion::new(
            record.id.into(),
            Status::Success,
            WcOp::Record,
            self.base.qpn,
        );
        entry.byte_len = record.valid;
        entry.src_qpn = record.src_qpn;
        entry.message = record.id;
        entry.imm = record.imm;
        entry.solicited = solicited;
        let whole = record.complete;
        if !self.records.push(record, ranges, self.options.max_records) {
            // The data was placed; only the record is lost.
            self.counters.rec_overflow += 1;
            return;
        }
        if whole {
            self.counters.rec_full += 1;
        } else {
            self.counters.rec_partial += 1;
        }
        if self.options.records_complete {
            self.base.complete_recv(entry);
        }
    }

    /// Ends messages that were given up before they were complete. If `recorded`, a Write-Record gets the record that
    /// the options demand.
    pub(super) fn give_up_all(&mut self, given_up: Vec<GivenUp>, recorded: bool) {
        for (peer, id, mut open) in given_up {
            if let Some(request) = open.receive.take() {
                self.counters.evicted += 1;
                self.base.rq.put_back(request);
            } else if open.record && recorded {
                if open.chunks {
                    // Each datagram that arrived had its record already.
                } else if self.options.record == RecordMode::Thesis {
                    // The final datagram was lost, so there is no record.
                    self.counters.evicted += 1;
                } else {
                    self.record(&peer, id, &open);
                }
            } else {
                self.counters.evicted += 1;
            }
        }
    }
}

impl Open {
    /// Returns the parity groups of the message. The first datagram that belongs to a group defines the length of the
    /// datagrams and the number of datagrams in a group.
    fn group(&mut self, segment: u16, group: u8, budget: &Budget) -> Result<&mut Groups, Dropped> {
        let length = self.identity.length;
        if self
            .parity
            .as_ref()
            .is_some_and(|g| !g.agrees(segment, group))
        {
            return Err(Dropped::Mismatch);
        }
        match &mut self.parity {
            Some(groups) => Ok(groups),
            none => {
                let groups =
                    Groups::new(length, segment, group, budget).ok_or(Dropped::Operation)?;
                Ok(none.insert(Box::new(groups)))
            }
        }
    }
}
