//! The requests of the peer on a stream: which have arrived and are done, and the messages that answer them.

use std::collections::VecDeque;

use crate::bounds;
use crate::ddp::rx::Violation;
use crate::ddp::tx::{Address, Message};
use crate::error::PeerError;
use crate::llp::mpa::frame::for_each_part;
use crate::rdmap::message::bytes_message;
use crate::verbs::source::{Places, Source};
use crate::verbs::wc::Status;
use crate::wire::control::Control;
use crate::wire::ddp::Untagged;
use crate::wire::rdmap::{AtomicResponse, Opcode, ReadRequest};
use crate::wire::{Msn, QN_ATOMIC_RESPONSE};

/// A message to send that does not come from the send queue.
#[derive(Debug)]
pub(super) enum Response {
    Read(Message),
    Atomic(Message),
    Control(Control),
    Terminate(Message),
    Rtr(Message),
}

/// A Send that is arriving.
#[derive(Debug)]
pub(super) struct ReceiveUnderWay {
    pub(super) request_id: u64,
    pub(super) places: Places,
    /// Length of the receive in bytes.
    pub(super) room: u64,
    /// How many of these bytes may be written, from the beginning on: all, unless an element is not in a region with the right of local
    /// writing.
    pub(super) writable: u64,
    pub(super) received: u64,
    pub(super) msn: Msn,
    pub(super) opcode: Opcode,
}

/// The responder of one stream.
#[derive(Debug)]
pub(super) struct Responder {
    /// Maximum number of Reads and atomics of the peer that are served at the same time.
    ird: u32,
    /// Number of Reads and atomics of the peer whose responses are not sent yet.
    serving: u32,
    responses: VecDeque<Response>,
    /// Sequence number of the last request message of the peer that is done.
    done: u32,
    /// Sequence number of the last request message that is acknowledged.
    done_acked: u32,
    send_msn: u32,
    read_msn: u32,
    next_atomic_response_msn: u32,
    receive: Option<ReceiveUnderWay>,
    /// The immediate of the Send that comes next or is arriving.
    send_immediate: Option<[u8; 4]>,
    /// Payload bytes of the Write that is arriving.
    write_bytes: u64,
    /// Length of the longest Write that is done and not acknowledged.
    longest_write: u64,
    /// Length of the last Write, if an immediate for it may follow.
    last_write: Option<u32>,
    /// Requests are dropped until the peer restarts at this number.
    discarding: Option<u32>,
}

impl Responder {
    pub(super) fn new(ird: u32) -> Self {
        Self {
            ird,
            serving: 0,
            responses: VecDeque::new(),
            done: 0,
            done_acked: 0,
            send_msn: 1,
            read_msn: 1,
            next_atomic_response_msn: 1,
            receive: None,
            send_immediate: None,
            write_bytes: 0,
            longest_write: 0,
            last_write: None,
            discarding: None,
        }
    }

    pub(super) fn set_ird(&mut self, ird: u32) {
        self.ird = ird;
    }

    /// For tests: adds `first` to all numbers.
    pub(super) fn number_from(&mut self, first: u32) {
        for number in [
            &mut self.send_msn,
            &mut self.read_msn,
            &mut self.next_atomic_response_msn,
            &mut self.done,
            &mut self.done_acked,
        ] {
            *number = number.wrapping_add(first);
        }
    }

    // ------------------------------------------------------------------ messages to send

    /// Queues a message.
    pub(super) fn push(&mut self, response: Response) {
        self.responses.push_back(response);
    }

    /// Queues a control message.
    pub(super) fn push_control(&mut self, message: Control) {
        self.push(Response::Control(message));
    }

    /// Takes the next message.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Response> {
        self.responses.pop_front()
    }

    /// Whether a message waits.
    #[inline]
    pub(super) fn has_responses(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Whether a Read Response of more than `len` bytes waits.
    #[inline]
    pub(super) fn has_read_above(&self, len: u64) -> bool {
        let is_long = |r: &Response| matches!(r, Response::Read(m) if m.len > len);
        self.has_responses() && self.responses.iter().any(is_long)
    }

    /// Whether no more messages may be queued for requests of the peer.
    pub(super) fn is_full(&self) -> bool {
        self.responses.len() >= bounds::RESPONSES_MAX
    }

    /// Drops the messages that wait.
    pub(super) fn clear(&mut self) {
        self.responses.clear();
    }

    // ------------------------------------------------------------------ acknowledgements

    /// Sequence number of the last request message that is done.
    #[inline]
    pub(super) fn done(&self) -> u32 {
        self.done
    }

    /// Counts one more request message as done.
    #[inline]
    pub(super) fn request_done(&mut self) {
        self.done = self.done.wrapping_add(1);
    }

    /// Number of request messages that are done and not acknowledged.
    #[inline]
    pub(super) fn unacknowledged(&self) -> u32 {
        self.done.wrapping_sub(self.done_acked)
    }

    /// The acknowledgement of all request messages that are done.
    #[inline]
    pub(super) fn acknowledge(&mut self) -> Control {
        Control::Ack {
            seq: self.acknowledge_all(),
        }
    }

    /// Records that all request messages that are done are acknowledged, and returns the number of the last one.
    #[inline]
    pub(super) fn acknowledge_all(&mut self) -> u32 {
        self.done_acked = self.done;
        self.longest_write = 0;
        self.done
    }

    // ------------------------------------------------------------------ Sends and immediates

    /// Whether requests are dropped until the peer restarts.
    #[inline]
    pub(super) fn is_discarding(&self) -> bool {
        self.discarding.is_some()
    }

    /// Queues a receiver-not-ready, because no receive is posted. `timer` is the code of the time after which the peer
    /// sends a Restart. Until the Restart, requests are dropped.
    pub(super) fn reject(&mut self, timer: u8) {
        let seq = self.done.wrapping_add(1);
        self.discarding = Some(seq);
        self.send_immediate = None;
        self.push_control(Control::Rnr { seq, timer });
    }

    /// Handles a Restart of the peer. Returns false if none is expected.
    pub(super) fn restart(&mut self, seq: u32) -> bool {
        let is_rnr = |r: &Response| matches!(r, Response::Control(Control::Rnr { .. }));
        if self.discarding != Some(seq) || self.responses.iter().any(is_rnr) {
            return false;
        }
        self.discarding = None;
        true
    }

    /// Stores the immediate data of the Send that comes next.
    pub(super) fn set_immediate(&mut self, value: [u8; 4]) {
        if !self.is_discarding() {
            self.send_immediate = Some(value);
        }
    }

    /// Whether a Send is arriving.
    #[inline]
    pub(super) fn is_receiving_send(&self) -> bool {
        self.receive.is_some()
    }

    /// Whether a Send or Write is arriving.
    pub(super) fn is_receiving(&self) -> bool {
        self.is_receiving_send() || self.is_receiving_write()
    }

    /// Whether a Write is arriving.
    pub(super) fn is_receiving_write(&self) -> bool {
        self.write_bytes > 0
    }

    /// Whether a Send or immediate may begin with this number now.
    #[inline]
    pub(super) fn is_next_send(&self, msn: Msn) -> bool {
        self.receive.is_none() && msn.0 == self.send_msn
    }

    /// Checks that a Send or immediate may begin with this header.
    pub(super) fn check_first(&self, h: &Untagged) -> Result<(), Violation> {
        if !self.is_next_send(h.msn) {
            return Err(wrong_msn(self.send_msn, h));
        }
        if h.mo != 0 {
            return Err(wrong_offset(0, h));
        }
        Ok(())
    }

    /// Records that a Send begins to arrive.
    pub(super) fn begin_receive(&mut self, receive: ReceiveUnderWay) {
        self.receive = Some(receive);
    }

    /// Checks a segment of the Send that is arriving. Returns the memory for its payload; `None` if no Send is arriving.
    pub(super) fn admit_send(
        &mut self,
        h: &Untagged,
        len: u64,
    ) -> Result<Option<Places>, Violation> {
        let Some(receive) = &mut self.receive else {
            return Ok(None);
        };
        if h.msn != receive.msn || h.opcode != receive.opcode {
            return Err(wrong_msn(receive.msn.0, h));
        }
        // RFC 5041 §7.1 [ddp-mo-order]: over TCP segments arrive in order, so each begins where the previous one
        // ended.
        if u64::from(h.mo) != receive.received {
            let expected = u32::try_from(receive.received).unwrap_or(u32::MAX);
            return Err(wrong_offset(expected, h));
        }
        let after = receive.received + len;
        if after > receive.room {
            return Err(Violation::receive(
                PeerError::UntaggedTooLong {
                    buffer: receive.room,
                    message: after,
                },
                Status::RemoteInvalidRequest,
                Status::LocalLength,
            ));
        }
        if after > receive.writable {
            return Err(Violation::receive(
                PeerError::RdmapLocal,
                Status::RemoteOperation,
                Status::LocalProtection,
            ));
        }
        let mut targets = Places::new();
        for_each_part(&receive.places, receive.received, len, |place, from, n| {
            targets.push(place.part(from, n));
            true
        });
        receive.received = after;
        Ok(Some(targets))
    }

    /// Counts a Send or immediate that has used its message sequence number. Returns the length of the Write before
    /// it, which an immediate reports.
    #[inline]
    pub(super) fn count_send(&mut self) -> Option<u32> {
        self.send_msn = self.send_msn.wrapping_add(1);
        self.last_write.take()
    }

    /// Ends the Send that is arriving, with or without its last segment, and returns its receive.
    pub(super) fn take_receive(&mut self) -> Option<ReceiveUnderWay> {
        self.receive.take()
    }

    /// Completes the Send that has arrived, and returns its immediate data.
    #[inline]
    pub(super) fn finish_send(&mut self) -> Option<[u8; 4]> {
        self.request_done();
        self.send_immediate.take()
    }

    // ------------------------------------------------------------------ Writes

    /// Counts the payload of an admitted Write, for the completion of an immediate that follows it.
    #[inline]
    pub(super) fn count_write(&mut self, len: u64) {
        self.write_bytes += len;
    }

    /// Completes the Write that was arriving, and returns its length.
    #[inline]
    pub(super) fn finish_write(&mut self) -> u64 {
        let len = std::mem::take(&mut self.write_bytes);
        self.last_write = Some(u32::try_from(len).unwrap_or(u32::MAX));
        self.request_done();
        self.longest_write = self.longest_write.max(len);
        len
    }

    /// Completes an immediate, which ends a request whose Write had `written` bytes.
    #[inline]
    pub(super) fn finish_immediate(&mut self, written: u32) {
        self.request_done();
        self.longest_write = self.longest_write.max(written.into());
    }

    /// Length of the longest Write that is done and not acknowledged.
    #[inline]
    pub(super) fn longest_write(&self) -> u64 {
        self.longest_write
    }

    // ------------------------------------------------------------------ Reads and atomics

    /// Checks number and limit of a Read Request or Atomic Request, and counts it.
    pub(super) fn begin_service(&mut self, h: &Untagged) -> Result<(), Violation> {
        if h.msn.0 != self.read_msn {
            return Err(wrong_msn(self.read_msn, h));
        }
        self.read_msn = self.read_msn.wrapping_add(1);
        self.last_write = None;
        // RFC 5040 §6.1 [read-ird-limit]. A peer whose ready-to-receive message is a Read needs one slot in any case.
        let limit = self.ird.max(1);
        if self.serving >= limit || self.is_full() {
            return Err(Violation::request(
                PeerError::IrdOverrun { limit },
                Status::RemoteInvalidRequest,
            ));
        }
        self.serving += 1;
        Ok(())
    }

    /// Records that the response to a Read or atomic was sent.
    pub(super) fn end_service(&mut self) {
        self.serving = self.serving.saturating_sub(1);
    }

    /// Queues the response to a Read whose memory has passed the access check. The Read counts as done already, before
    /// its response is sent.
    pub(super) fn finish_read(&mut self, request: &ReadRequest, places: Places) {
        self.request_done();
        self.push(Response::Read(Message {
            opcode: Opcode::ReadResponse,
            address: Address::Tagged {
                stag: request.sink_stag,
                to: request.sink_to,
            },
            source: Source::Memory {
                places,
                // The application and other peers may change this memory at any time, so the payload is copied before
                // its CRC is computed.
                volatile: true,
            },
            len: u64::from(request.size),
            sent: 0,
        }));
    }

    /// Queues the response to atomic `id`, with the old value.
    pub(super) fn finish_atomic(&mut self, id: u32, value: u64) {
        self.request_done();
        let msn = self.next_atomic_response_msn;
        self.next_atomic_response_msn = msn.wrapping_add(1);
        let response = AtomicResponse { id, value };
        self.push(Response::Atomic(bytes_message(
            Opcode::AtomicResponse,
            QN_ATOMIC_RESPONSE,
            msn,
            &response.emit(),
        )));
    }
}

fn wrong_msn(expected: u32, h: &Untagged) -> Violation {
    let got = h.msn.0;
    let error = PeerError::UntaggedMsn { expected, got };
    Violation::request(error, Status::RemoteInvalidRequest)
}

fn wrong_offset(expected: u32, h: &Untagged) -> Violation {
    let got = h.mo;
    let error = PeerError::UntaggedOffset { expected, got };
    Violation::request(error, Status::RemoteInvalidRequest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_write_counts_until_it_is_acknowledged() {
        let mut responder = Responder::new(1);
        responder.count_write(20_000);
        assert_eq!(
            responder.longest_write(),
            0,
            "only a part of the Write has arrived"
        );
        responder.count_write(10_000);
        assert_eq!(responder.finish_write(), 30_000);
        responder.count_write(100);
        responder.finish_write();
        assert_eq!(responder.longest_write(), 30_000);
        responder.acknowledge_all();
        assert_eq!(responder.longest_write(), 0);
        // The immediate ends the request of the Write before it, which may be acknowledged already.
        responder.finish_immediate(30_000);
        assert_eq!(
            (responder.longest_write(), responder.unacknowledged()),
            (30_000, 1)
        );
    }
}
