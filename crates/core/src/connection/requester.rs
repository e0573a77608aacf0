//! The requests of this end on a stream: their numbers, outstanding Reads and atomics, and retransmissions.

use std::collections::VecDeque;

use crate::ddp::rx::Violation;
use crate::ddp::tx::Message;
use crate::error::PeerError;
use crate::rdmap::message::{NO_STAG, bytes_message};
use crate::verbs::mr::Placement;
use crate::verbs::source::Places;
use crate::verbs::sq::{Phase, Posted, SendQueue};
use crate::verbs::wc::Status;
use crate::wire::ddp::{Tagged, Untagged};
use crate::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest};
use crate::wire::{Msn, QN_READ, Stag, To};

/// Stands for the request number of a Read that no program posted: the ready-to-receive Read of length 0.
const UNPOSTED: u64 = u64::MAX;

/// An RDMA Read whose Response has not arrived completely.
#[derive(Debug)]
struct PendingRead {
    /// Number of the send request.
    request: u64,
    /// Where the data goes; `None` for a Read of length 0.
    sink: Option<Placement>,
    /// Sink STag and offset of the Read Request.
    stag: Stag,
    to: To,
    /// Length in bytes.
    len: u64,
    /// Bytes that arrived.
    received: u64,
}

/// An atomic whose Response has not arrived.
#[derive(Debug)]
struct PendingAtomic {
    /// Number of the send request.
    request: u64,
    /// Request identifier on the wire.
    id: u32,
    /// Where the old value goes.
    sink: Placement,
}

/// The requester of one stream.
#[derive(Debug)]
pub(super) struct Requester {
    /// Largest number of outstanding Reads and atomics.
    ord: u32,
    /// The messages, not sent yet, of the request that was taken last.
    parts: VecDeque<Message>,
    /// Number of the request that `parts` belong to.
    parts_of: u64,
    /// Sequence number of the last request message.
    seq: u32,
    /// Sequence number of the last request message that the peer has acknowledged.
    acked: u32,
    /// The first request in the send queue that is not known to be acknowledged.
    ack_scan: u64,
    next_send_msn: u32,
    next_read_msn: u32,
    next_atomic_id: u32,
    /// Message sequence number of the next Atomic Response.
    atomic_response_msn: u32,
    reads: VecDeque<PendingRead>,
    atomics: VecDeque<PendingAtomic>,
    /// The shared receive queue that the last SelectSrq named (XRC).
    selected_srq: Option<u32>,
    /// The peer drops requests until it gets a Restart with this sequence number.
    restart: Option<u32>,
}

impl Requester {
    pub(super) fn new(ord: u32) -> Self {
        Self {
            ord,
            parts: VecDeque::new(),
            parts_of: 0,
            seq: 0,
            acked: 0,
            ack_scan: 0,
            next_send_msn: 1,
            next_read_msn: 1,
            next_atomic_id: 1,
            atomic_response_msn: 1,
            reads: VecDeque::new(),
            atomics: VecDeque::new(),
            selected_srq: None,
            restart: None,
        }
    }

    pub(super) fn set_ord(&mut self, ord: u32) {
        self.ord = ord;
    }

    /// For tests: adds `first` to all numbers.
    pub(super) fn number_from(&mut self, first: u32) {
        for number in [
            &mut self.next_send_msn,
            &mut self.next_read_msn,
            &mut self.next_atomic_id,
            &mut self.atomic_response_msn,
            &mut self.seq,
            &mut self.acked,
        ] {
            *number = number.wrapping_add(first);
        }
    }

    // ------------------------------------------------------------------ numbers

    /// Sequence number of the last request message.
    pub(super) fn seq(&self) -> u32 {
        self.seq
    }

    /// Message sequence number of the next message on queue 0.
    #[inline]
    pub(super) fn send_msn(&self) -> Msn {
        Msn(self.next_send_msn)
    }

    /// Numbers a message on queue 0 that is not a request.
    pub(super) fn next_send_msn(&mut self) -> u32 {
        let msn = self.next_send_msn;
        self.next_send_msn = msn.wrapping_add(1);
        msn
    }

    /// Numbers a Send or immediate.
    #[inline]
    pub(super) fn number_send(&mut self) -> u32 {
        self.number_request();
        self.next_send_msn()
    }

    /// Numbers a request message without a message sequence number, such as a Write.
    #[inline]
    pub(super) fn number_request(&mut self) {
        self.seq = self.seq.wrapping_add(1);
    }

    /// Stores the current numbers in `posted`, a request that is taken now.
    #[inline]
    pub(super) fn note_start(&self, posted: &mut Posted) {
        posted.msn_before = (self.next_send_msn, self.next_read_msn);
        posted.seq = (self.seq.wrapping_add(1), self.seq);
    }

    /// Numbers `posted`, which is taken now and is one message: a Send, or a Write.
    #[inline]
    pub(super) fn number_short(&mut self, posted: &mut Posted, is_send: bool) {
        posted.msn_before = (self.next_send_msn, self.next_read_msn);
        self.number_request();
        posted.seq = (self.seq, self.seq);
        self.next_send_msn = self.next_send_msn.wrapping_add(u32::from(is_send));
    }

    /// Selects shared receive queue `number` for the next request. Returns whether a SelectSrq has to be sent first.
    pub(super) fn select_srq(&mut self, number: u32) -> bool {
        self.selected_srq.replace(number) != Some(number)
    }

    // ------------------------------------------------------------------ messages to send

    /// Whether neither messages of a request nor a Restart wait to be sent.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.parts.is_empty() && self.restart.is_none()
    }

    /// Takes the list of messages, which is empty now, so that the request that is built now reuses its allocation.
    pub(super) fn take_list(&mut self) -> VecDeque<Message> {
        std::mem::take(&mut self.parts)
    }

    /// Sets the messages of request `number`.
    pub(super) fn set_parts(&mut self, number: u64, parts: VecDeque<Message>) {
        self.parts = parts;
        self.parts_of = number;
    }

    /// The next message of the request that was taken last: number of the request, whether it is its last message,
    /// and the message.
    pub(super) fn next_part(&mut self) -> Option<(u64, bool, &mut Message)> {
        let last = self.parts.len() == 1;
        let number = self.parts_of;
        self.parts
            .front_mut()
            .map(|message| (number, last, message))
    }

    /// Removes the message that [`Self::next_part`] returned.
    pub(super) fn pop_part(&mut self) -> Option<Message> {
        self.parts.pop_front()
    }

    /// Whether the next message of the request that was taken last has to wait for an ORD slot; `None` if the request
    /// has no more messages to send.
    pub(super) fn part_waits(&self) -> Option<bool> {
        let next = self.parts.front()?;
        if !needs_slot(next) || self.outstanding() <= self.ord as usize {
            return Some(false);
        }
        // `outstanding` also counts messages of this request that are not sent yet, which use no slot.
        let unsent = self.parts.iter().filter(|m| needs_slot(m)).count();
        Some(self.outstanding().saturating_sub(unsent) >= self.ord as usize)
    }

    /// The Restart to send, if the peer waits for one.
    pub(super) fn take_restart(&mut self) -> Option<u32> {
        self.restart.take()
    }

    // ------------------------------------------------------------------ Reads and atomics

    /// Number of Reads and atomics whose responses have not arrived.
    #[inline]
    fn outstanding(&self) -> usize {
        self.reads.len() + self.atomics.len()
    }

    /// Whether the response of a Read or atomic has not arrived, so that a fenced request waits.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.outstanding() > 0
    }

    /// Whether a Read or atomic has to wait for an ORD slot; `None` if the ORD is 0.
    pub(super) fn slots_are_taken(&self) -> Option<bool> {
        (self.ord > 0).then_some(self.outstanding() >= self.ord as usize)
    }

    /// The Read Request for `size` bytes of the peer's memory, which go to `sink`.
    pub(super) fn read(
        &mut self,
        number: u64,
        sink: Option<Placement>,
        rkey: Stag,
        from: To,
        size: u32,
    ) -> Message {
        let (stag, to) = sink
            .as_ref()
            .map_or((NO_STAG, To(0)), |p| (p.stag(), p.to()));
        let request = ReadRequest {
            sink_stag: stag,
            sink_to: to,
            size,
            source_stag: if size == 0 { NO_STAG } else { rkey },
            source_to: from,
        };
        self.reads.push_back(PendingRead {
            request: number,
            sink,
            stag,
            to,
            len: u64::from(size),
            received: 0,
        });
        self.queue_1(Opcode::ReadRequest, &request.emit())
    }

    /// The Read Request of length 0 that makes the stream ready.
    pub(super) fn ready_to_receive_read(&mut self) -> Message {
        self.read(UNPOSTED, None, NO_STAG, To(0), 0)
    }

    /// The Atomic Request that the closure `request` builds from a new request identifier; the old value goes to `sink`.
    pub(super) fn atomic(
        &mut self,
        number: u64,
        sink: Placement,
        request: impl FnOnce(u32) -> AtomicRequest,
    ) -> Message {
        let id = self.next_atomic_id;
        self.next_atomic_id = id.wrapping_add(1);
        self.atomics.push_back(PendingAtomic {
            request: number,
            id,
            sink,
        });
        self.queue_1(Opcode::AtomicRequest, &request(id).emit())
    }

    fn queue_1(&mut self, opcode: Opcode, body: &[u8]) -> Message {
        self.number_request();
        let msn = self.next_read_msn;
        self.next_read_msn = msn.wrapping_add(1);
        bytes_message(opcode, QN_READ, msn, body)
    }

    /// Checks a segment of a Read Response and counts its payload. Returns the memory for the payload.
    pub(super) fn admit_read_response(
        &mut self,
        h: &Tagged,
        len: u64,
    ) -> Result<Places, Violation> {
        // RFC 5040 §5.2 [read-order]: responses arrive in the order of the requests, so this one belongs to the
        // oldest.
        let Some(read) = self.reads.front_mut() else {
            return Err(unexpected(h.opcode));
        };
        let after = read.received + len;
        let mismatch = if h.stag != read.stag {
            Some("sink stag")
        } else if h.to.0 != read.to.0.wrapping_add(read.received) {
            Some("sink offset")
        } else if after > read.len || h.last != (after == read.len) || (len == 0 && read.len != 0) {
            Some("length")
        } else {
            None
        };
        if let Some(what) = mismatch {
            let error = PeerError::ResponseMismatch(what);
            return Err(Violation::answer_to(
                read.request,
                error,
                Status::BadResponse,
            ));
        }
        let sink = read.sink.as_ref().filter(|_| len > 0);
        let places = sink.map(|sink| sink.part(read.received, len));
        read.received = after;
        Ok(places.into_iter().collect())
    }

    /// Number of the request whose Read Response is expected or arriving.
    pub(super) fn oldest_read(&self) -> Option<u64> {
        self.reads.front().map(|read| read.request)
    }

    /// Completes the oldest Read, and returns the number of its request.
    pub(super) fn finish_read(&mut self) -> Option<u64> {
        self.reads.pop_front().map(|read| read.request)
    }

    /// Checks an Atomic Response. Returns the number of its request, the old value, and the memory for that value.
    pub(super) fn accept_atomic_response(
        &mut self,
        h: &Untagged,
        payload: &[u8],
    ) -> Result<(u64, u64, Placement), Violation> {
        let Some(pending) = self.atomics.pop_front() else {
            return Err(unexpected(h.opcode));
        };
        let refuse = |error| Violation::answer_to(pending.request, error, Status::BadResponse);
        let Ok(bytes) = <&[u8; AtomicResponse::LEN]>::try_from(payload) else {
            return Err(refuse(PeerError::MessageShape(
                "atomic response is not 12 bytes",
            )));
        };
        let response = AtomicResponse::parse(bytes);
        if h.msn.0 != self.atomic_response_msn || response.id != pending.id {
            return Err(refuse(PeerError::ResponseMismatch(
                "atomic request identifier",
            )));
        }
        self.atomic_response_msn = self.atomic_response_msn.wrapping_add(1);
        Ok((pending.request, response.value, pending.sink))
    }

    // ------------------------------------------------------------------ acknowledgements, retries, failure

    /// Whether an acknowledgement of all request messages up to `seq` is later than the last one.
    #[inline]
    pub(super) fn is_new_ack(&self, seq: u32) -> bool {
        // Serial number arithmetic.
        (1..1 << 31).contains(&seq.wrapping_sub(self.acked))
    }

    /// Handles an acknowledgement of all request messages up to `seq`: marks the requests of `sq` that it completes.
    /// Returns false if `seq` was not sent.
    pub(super) fn acknowledge(&mut self, seq: u32, sq: &mut SendQueue) -> bool {
        let unacknowledged = self.seq.wrapping_sub(self.acked);
        if unacknowledged >= 1 << 31 {
            // A request of which the peer has acknowledged the first messages is sent again from its beginning. Until
            // those messages are sent again, nothing new can be acknowledged.
            return seq == self.acked;
        }
        if seq.wrapping_sub(self.acked) > unacknowledged {
            return false;
        }
        self.acked = seq;
        self.ack_scan = self.ack_scan.max(sq.front_number());
        while let Some(posted) = sq.get_mut(self.ack_scan) {
            let known = matches!(posted.phase, Phase::Sent | Phase::Done);
            // Serial number arithmetic: whether its last message comes after `seq`.
            let after = posted.seq.1.wrapping_sub(seq);
            let is_covered = after == 0 || after >= 1 << 31;
            if posted.phase == Phase::Sending && is_covered {
                return false;
            }
            if !known || !is_covered {
                break;
            }
            if posted.phase == Phase::Sent && posted.answers == 0 {
                posted.phase = Phase::Done;
            }
            self.ack_scan += 1;
        }
        true
    }

    /// Whether message `seq` belongs to `posted`, and is not acknowledged.
    pub(super) fn is_message_of(&self, seq: u32, posted: &Posted) -> bool {
        let [first, at, last] =
            [posted.seq.0, seq, posted.seq.1].map(|n| n.wrapping_sub(self.acked));
        first <= at && at <= last && posted.phase != Phase::Done
    }

    /// Handles a receiver-not-ready for message `seq` of request `number`, whose numbers began with `first` and
    /// `msn`: this request and all later ones are sent again, after a Restart.
    pub(super) fn go_back(&mut self, number: u64, seq: u32, first: u32, msn: (u32, u32)) {
        self.forget_from(number);
        self.seq = first.wrapping_sub(1);
        (self.next_send_msn, self.next_read_msn) = msn;
        self.restart = Some(seq);
        // The peer dropped a SelectSrq too.
        self.selected_srq = None;
    }

    /// Forgets the Reads, atomics and messages of request `number` and those after it.
    pub(super) fn forget_from(&mut self, number: u64) {
        self.reads
            .retain(|r| r.request < number || r.request == UNPOSTED);
        self.atomics.retain(|a| a.request < number);
        self.parts.clear();
    }

    /// Forgets request `number`, the last one that was taken, which has failed.
    pub(super) fn forget_last(&mut self, number: u64) {
        self.parts.clear();
        self.restart = None;
        self.reads.retain(|r| r.request != number);
        self.atomics.retain(|a| a.request != number);
    }

    /// Drops the messages that are not sent yet.
    pub(super) fn drop_parts(&mut self) {
        self.parts.clear();
    }

    /// Forgets all requests, because the queue pair has failed.
    pub(super) fn clear(&mut self) {
        self.reads.clear();
        self.atomics.clear();
        self.parts.clear();
    }
}

/// Whether a message occupies an ORD slot.
fn needs_slot(message: &Message) -> bool {
    matches!(message.opcode, Opcode::ReadRequest | Opcode::AtomicRequest)
}

fn unexpected(opcode: Opcode) -> Violation {
    Violation::answer(PeerError::UnexpectedResponse {
        opcode: opcode.bits(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer has acknowledged the first messages of a request, and had no receive for the last
    /// one. Until the request is sent again, the peer can acknowledge nothing new.
    #[test]
    fn nothing_ahead_is_acknowledged_while_a_request_is_sent_again() {
        let mut sq = SendQueue::new(4, 1, 0);
        let mut requester = Requester::new(1);
        requester.seq = 10;
        assert!(requester.acknowledge(8, &mut sq));
        // Message 9 is the last one of a request that began with message 5.
        requester.seq = 4;
        for ahead in [9, 10, 100, 4, 5] {
            assert!(!requester.acknowledge(ahead, &mut sq), "{ahead}");
        }
        assert!(requester.acknowledge(8, &mut sq));
        requester.seq = 9;
        assert!(requester.acknowledge(9, &mut sq));
        assert!(!requester.acknowledge(10, &mut sq));
    }
}
