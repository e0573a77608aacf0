//! Requests of peers, the answers to these requests, and errors that peers report.

use std::net::IpAddr;

use super::rd::Event;
use super::reads::{REQUEST, Wanted};

use super::DatagramQp;
use super::outgoing::{ANSWER, index, peer_of};
use super::types::{Arrival, Dropped, ErrorReport, Peer};
use crate::bounds;
use crate::ddp::tx::Address;
use crate::error::TermCode;
use crate::verbs::access::Access;
use crate::verbs::source::{Places, Source};
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::wire::To;
use crate::wire::control::Control;
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::dgram::{self, Datagram, SUB_ERROR, SUB_PLAIN, Shim};
use crate::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest};

impl DatagramQp {
    // ------------------------------------------------------------------ requests of others

    /// Handles a Read Request: queues the answer.
    pub(super) fn serve_read(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        len: usize,
    ) -> Result<(), Dropped> {
        let shim = &d.shim;
        let (Some(request), true) = (d.payload.first_chunk(), d.header.last()) else {
            return Err(Dropped::Operation);
        };
        if shim.offset != 0 || d.payload.len() < REQUEST {
            return Err(Dropped::Operation);
        }
        let request = ReadRequest::parse(request);
        let reliable = self.kind.is_reliable();
        let most = if reliable {
            bounds::MAX_MESSAGE
        } else {
            self.options.max_read.into()
        };
        if u64::from(request.size) > most {
            return Err(Dropped::TooLong);
        }
        let mut places = Places::new();
        if request.size > 0 {
            let (stag, to) = (request.source_stag, request.source_to);
            places.push(self.remote(peer, stag, to, request.size.into(), Access::REMOTE_READ)?);
        }
        if !reliable {
            let answer = Shim::LEN + Tagged::LEN + dgram::CRC + request.size as usize;
            let cookie = d
                .payload
                .get(ReadRequest::LEN..)
                .and_then(|c| c.first_chunk());
            let cookie = cookie.map_or(0, |c| u64::from_be_bytes(*c));
            let proven = self.secret.has_issued_cookie(peer, cookie, self.now);
            if answer > len && !proven {
                self.send_cookie(arrival, peer, shim.id);
                return Ok(());
            }
            if self.has_enough_unreliable_answers(peer) {
                return Err(Dropped::Busy);
            }
            if !proven && !self.flow.spend(peer, answer) {
                return Err(Dropped::Busy);
            }
        } else if self.has_enough_answers(peer) {
            return Err(Dropped::Busy);
        }
        let address = Address::Tagged {
            stag: request.sink_stag,
            to: request.sink_to,
        };
        let source = Source::Memory {
            places,
            volatile: true,
        };
        self.respond(
            peer,
            arrival.to,
            shim.id,
            SUB_PLAIN,
            Opcode::ReadResponse,
            address,
            source,
            request.size.into(),
        );
        Ok(())
    }

    /// Whether the largest number of answers is queued, for this reliable peer or for all peers together. The limit bounds
    /// the memory for a peer that does not acknowledge answers, so that other peers are still served.
    fn has_enough_answers(&self, peer: &Peer) -> bool {
        let waiting = self
            .peer_queues
            .get(peer)
            .map_or(0, |to_peer| to_peer.answers);
        let most = bounds::RD_ANSWERS_PEER.max(self.options.max_reads.into());
        waiting >= most || (self.queued_answers >= bounds::RD_ANSWERS && waiting >= FAIR)
    }

    /// Whether the largest number of answers is queued on an unreliable queue pair, for this peer or for all peers together. A Read that
    /// is dropped here is not repeated. So a peer may have as many queued answers as a queue pair has outstanding Reads at most
    /// (`max_reads`), unless the limit of all peers is reached.
    fn has_enough_unreliable_answers(&self, peer: &Peer) -> bool {
        let most = usize::from(self.options.max_reads);
        let all = self.answers.len() + self.closed_answers.len();
        if all >= bounds::READ_ANSWERS.max(2 * most) {
            return true;
        }
        // The repeated requests of this end are in the same queues.
        let all = self.answers.iter().chain(&self.closed_answers);
        let answers = all.filter(|c| c.request.is_none());
        let theirs = answers.filter(|c| c.to.addr == peer.0 && index(c.to.qpn) == peer.1);
        theirs.count() >= most
    }

    /// Sends a cookie to a peer whose request has a long answer. The peer has to send the cookie back before it is
    /// answered, which shows that it receives at its address.
    fn send_cookie(&mut self, arrival: &Arrival, peer: &Peer, id: u32) {
        if self.outbox.len() >= bounds::DATAGRAM_PEERS || !self.flow.spend(peer, COOKIE) {
            return;
        }
        let cookie = self.secret.cookie(peer, self.now).to_be_bytes();
        let header = Control::Cookie.header();
        let datagram = self.control(peer, arrival.to, id, header, &cookie);
        self.outbox.push_back(datagram);
    }

    /// Handles an Atomic Request: executes it and queues the answer. The reliability layer has removed duplicates.
    pub(super) fn serve_atomic(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
    ) -> Result<(), Dropped> {
        let Ok(bytes) = <&[u8; AtomicRequest::LEN]>::try_from(d.payload) else {
            return Err(Dropped::Operation);
        };
        if !d.header.last() || d.shim.offset != 0 {
            return Err(Dropped::Operation);
        }
        if self.has_enough_answers(peer) {
            return Err(Dropped::Busy);
        }
        let request = AtomicRequest::parse(bytes).map_err(|_| Dropped::Operation)?;
        let place = self.remote(peer, request.stag, request.to, 8, Access::REMOTE_ATOMIC)?;
        if place.misaligned() {
            return Err(Dropped::Operation);
        }
        let value = {
            let pinned = place.pin().ok_or(Dropped::Access)?;
            let mut change = |old| request.apply(old);
            self.base.rnic.memory.update(&pinned, &mut change)
        };
        let response = AtomicResponse {
            id: request.id,
            value,
        };
        let (id, opcode) = (d.shim.id, Opcode::AtomicResponse);
        self.answer(peer, arrival.to, id, SUB_PLAIN, opcode, &response.emit());
        Ok(())
    }

    // ------------------------------------------------------------------ answers of others

    /// Handles a Read Response. The data is placed only into the memory of the request, and only while the
    /// request is outstanding.
    pub(super) fn receive_read_response(
        &mut self,
        peer: &Peer,
        d: &Datagram<'_>,
    ) -> Result<(), Dropped> {
        let shim = &d.shim;
        let Some(reading) = self.reads.get_mut(shim.id, peer) else {
            return Err(Dropped::Late);
        };
        let Wanted::Data {
            stag, to, coverage, ..
        } = &mut reading.wanted
        else {
            return Err(Dropped::Mismatch);
        };
        let begins = To(to.0.wrapping_add(shim.offset.into()));
        let fits = matches!(&d.header, Header::Tagged(h) if h.stag == *stag && h.to == begins);
        if !fits || shim.length != reading.size || shim.commit || shim.parity {
            return Err(Dropped::Mismatch);
        }
        let end = shim
            .offset
            .saturating_add(u32::try_from(d.payload.len()).unwrap_or(0));
        let fresh = coverage
            .add(shim.offset, end, bounds::RECORD_GAPS)
            .map_err(|_| Dropped::Gaps)?;
        let complete = coverage.is_complete(reading.size);
        let (places, number) = (reading.places.clone(), reading.number);
        let whole = fresh.iter().all(|(from, to)| {
            let part = (from - shim.offset) as usize..(to - shim.offset) as usize;
            let bytes = d.payload.get(part).unwrap_or(&[]);
            self.place(&places, u64::from(*from), bytes)
        });
        if !whole {
            self.reads.remove(shim.id);
            self.fail_answered(number, Status::LocalProtection);
            return Err(Dropped::Access);
        }
        if complete {
            self.reads.remove(shim.id);
            self.answered(number);
        } else if fresh.is_empty() {
            return Err(Dropped::Duplicate);
        }
        Ok(())
    }

    /// Handles an Atomic Response, with the old value.
    pub(super) fn receive_atomic_response(
        &mut self,
        peer: &Peer,
        d: &Datagram<'_>,
    ) -> Result<(), Dropped> {
        let Ok(bytes) = <&[u8; AtomicResponse::LEN]>::try_from(d.payload) else {
            return Err(Dropped::Operation);
        };
        let response = AtomicResponse::parse(bytes);
        let Some(reading) = self.reads.get_mut(d.shim.id, peer) else {
            return Err(Dropped::Late);
        };
        if response.id != d.shim.id || !matches!(reading.wanted, Wanted::Value) {
            return Err(Dropped::Mismatch);
        }
        let (places, number) = (reading.places.clone(), reading.number);
        self.reads.remove(d.shim.id);
        // The value has host byte order in memory, and network byte order on the wire.
        if self.place(&places, 0, &response.value.to_ne_bytes()) {
            self.answered(number);
        } else {
            self.fail_answered(number, Status::LocalProtection);
        }
        Ok(())
    }

    /// Marks a request whose answer has arrived as done.
    fn answered(&mut self, number: u64) {
        self.sent(number);
        self.retire();
    }

    /// Fails a request whose answer has arrived. A reliable queue pair then fails too, as after any other failed request.
    fn fail_answered(&mut self, number: u64, status: Status) {
        self.mark_failed(number, status);
        self.answered(number);
        if self.rd.is_some() {
            self.failed_towards_peer();
        }
    }

    // ------------------------------------------------------------------ errors

    /// Sends an error report for a refused message, if the options demand it. In a reliable service the reliability
    /// layer reports the error instead.
    pub(super) fn report_error(
        &mut self,
        arrival: &Arrival,
        peer: &Peer,
        d: &Datagram<'_>,
        why: Dropped,
    ) {
        let told = matches!(why, Dropped::Access | Dropped::TooLong | Dropped::Operation);
        if !told || !self.options.report_errors || self.rd.is_some() {
            return;
        }
        let second = self.now.as_secs();
        if self.errors_reported.0 != second {
            self.errors_reported = (second, 0);
        }
        if self.errors_reported.1 >= bounds::ERRORS_A_SECOND
            || self.outbox.len() >= bounds::DATAGRAM_PEERS
            || !self.flow.spend(peer, ERROR_REPORT)
        {
            return;
        }
        self.errors_reported.1 += 1;
        let [kind, code] = why.terminate().bytes();
        let payload = [kind, code, 0, 0];
        let header = Untagged {
            last: true,
            opcode: Opcode::Terminate,
            inv_stag: crate::wire::Stag(0),
            qn: crate::wire::QN_TERMINATE,
            msn: crate::wire::Msn(d.shim.id),
            mo: 0,
        };
        let id = d.shim.id;
        let datagram = self.control_as(SUB_ERROR, peer, arrival.to, id, header, &payload);
        self.counters.err_out += 1;
        self.outbox.push_back(datagram);
    }

    /// Handles an error report of a peer. On an unreliable queue pair the report may be forged, so it only ends a
    /// Read that is outstanding at this peer.
    pub(super) fn receive_error(&mut self, peer: &Peer, d: &Datagram<'_>) -> Result<(), Dropped> {
        let Some([kind, code, ..]) = d.payload.first_chunk::<4>().copied() else {
            return Err(Dropped::Operation);
        };
        self.counters.err_in += 1;
        let report = ErrorReport {
            from: peer.0,
            src_qpn: u32::from(peer.0.port()) << 8 | u32::from(peer.1),
            id: d.shim.id,
            layer: kind >> 4,
            etype: kind & 0x0f,
            code,
            status: Status::RemoteAccess,
            request: self.issued.request(d.shim.id),
        };
        self.push_error(report);
        if let Some(reading) = self.reads.get_mut(d.shim.id, peer) {
            let number = reading.number;
            self.reads.remove(d.shim.id);
            self.fail_answered(number, Status::RemoteAccess);
        }
        Ok(())
    }

    /// Reports an error to a reliable peer, because the memory of its Read was deregistered before the whole answer
    /// was sent.
    pub(super) fn answer_broken(&mut self, peer: &Peer, from: Option<IpAddr>, id: u32) {
        let [kind, code] = Dropped::Access.terminate().bytes();
        let payload = [kind, code, 0, 0];
        self.counters.err_out += 1;
        self.answer(peer, from, id, SUB_ERROR, Opcode::Terminate, &payload);
    }

    fn push_error(&mut self, report: ErrorReport) {
        if self.errors.len() >= bounds::ERRORS_WAITING {
            self.errors.pop_front();
        }
        self.errors.push_back(report);
    }

    // ------------------------------------------------------------------ the reliability layer

    /// Handles the events of the reliability layer.
    pub(super) fn handle_rd_events(&mut self) {
        while let Some(event) = self
            .rd
            .as_deref_mut()
            .and_then(super::rd::Reliable::poll_event)
        {
            match event {
                Event::Done(first, _) if first & ANSWER != 0 => {}
                Event::Done(first, last) => {
                    for tag in first..=last {
                        // A request with an answer is done when the answer arrives.
                        if let Some(posted) = self.base.sq.get_mut(tag)
                            && !posted.request.op.is_read_or_atomic()
                        {
                            posted.phase = Phase::Done;
                        }
                    }
                    self.retire();
                }
                Event::Failed(peer, tag, id, status) => self.refused_by(&peer, tag, id, status),
                Event::Lost(peer, status) => self.lost(&peer, status),
                // The peer was restarted and does not know the requests, so they fail. It does not know the first part of a
                // message either, so the rest of the message is not sent.
                Event::Restarted(peer) if self.relies_on(&peer) => {
                    self.lost(&peer, Status::RemoteAborted);
                }
                Event::Restarted(_) => {}
                Event::Skipped(peer, base) => {
                    let mut given_up = Vec::new();
                    self.messages.skip(&peer, base, &mut given_up);
                    self.give_up_all(given_up, base != u64::MAX);
                }
            }
        }
    }

    /// Handles the permanent refusal of a message by a peer.
    fn refused_by(&mut self, peer: &Peer, tag: Option<u64>, id: u32, status: Status) {
        let Some(tag) = tag else { return };
        if let Some(to_peer) = self.peer_queues.get_mut(peer) {
            // The rest of the message is not sent.
            let before = to_peer.queue.len();
            to_peer.queue.retain(|c| c.tag != tag);
            let gone = before - to_peer.queue.len();
            if tag & ANSWER == 0 {
                self.queued_requests -= gone;
            } else {
                to_peer.answers -= gone;
                self.queued_answers -= gone;
            }
        }
        if tag & ANSWER != 0 {
            return;
        }
        // The other statuses stand for several errors each.
        let TermCode { layer, etype, code } = match status {
            Status::RemoteAccess => TermCode::RDMAP_ACCESS,
            _ => TermCode::RDMAP_UNSPECIFIED,
        };
        self.counters.err_in += 1;
        let request = self.base.sq.get_mut(tag).map(|posted| posted.request.id);
        self.push_error(ErrorReport {
            from: peer.0,
            src_qpn: u32::from(peer.0.port()) << 8 | u32::from(peer.1),
            id,
            layer,
            etype,
            code,
            status,
            request,
        });
        self.reads.remove_number(tag);
        self.mark_failed(tag, status);
        self.sent(tag);
        self.failed_towards_peer();
    }

    /// Whether the peer has acknowledged something for which it must keep state: a request whose answer has not arrived, or
    /// the first part of a message.
    fn relies_on(&self, peer: &Peer) -> bool {
        let queue = self.peer_queues.get(peer).map(|to_peer| &to_peer.queue);
        let is_queued = |number| queue.is_some_and(|q| q.iter().any(|c| c.tag == number));
        let first = queue.and_then(std::collections::VecDeque::front);
        self.reads.to(peer).any(|number| !is_queued(number))
            || first.is_some_and(|c| c.tag & ANSWER == 0 && c.message.sent > 0)
    }

    /// Fails all requests to a peer that is lost.
    fn lost(&mut self, peer: &Peer, status: Status) {
        if let Some(to_peer) = self.peer_queues.remove(peer) {
            self.queued_requests -= to_peer.queue.len() - to_peer.answers;
            self.queued_answers -= to_peer.answers;
            // The peer may be alive, and would wait for its answers for ever. A peer that was restarted does not wait.
            if to_peer.answers > 0
                && status != Status::RemoteAborted
                && let Some(rd) = &mut self.rd
            {
                rd.begin_session(peer, self.now);
            }
        }
        let connected = self.kind.is_connected();
        let theirs = |to: &Option<crate::verbs::wr::Destination>| {
            connected || to.as_ref().map(peer_of) == Some(*peer)
        };
        let numbers: Vec<u64> = self
            .base
            .sq
            .taken_mut()
            .filter(|(_, p)| p.phase != Phase::Done && theirs(&p.request.destination))
            .map(|(number, _)| number)
            .collect();
        for number in &numbers {
            self.mark_failed(*number, status);
            self.reads.remove_number(*number);
            self.sent(*number);
        }
        if !numbers.is_empty() {
            self.failed_towards_peer();
        }
    }

    /// Handles a failed request of a reliable queue pair. The queue pair enters the error state, and sends again only after the
    /// program has moved it back to RTS (Grant's thesis, section 5.3). An RD queue pair with the option `keep_going` continues.
    fn failed_towards_peer(&mut self) {
        self.retire();
        if self.kind.is_connected() || !self.options.keep_going {
            self.fail("a request failed at its peer", None);
        }
    }
}

/// The number of answers that may be queued for each reliable peer when the limit for all peers is reached.
const FAIR: usize = 4;
/// Bytes of the datagram of a cookie.
const COOKIE: usize = Shim::LEN + Untagged::LEN + 8 + dgram::CRC;
/// Bytes of an error report.
const ERROR_REPORT: usize = Shim::LEN + Untagged::LEN + 4 + dgram::CRC;
