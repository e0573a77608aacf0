//! Short paths for immediate data, for the case that nothing else is in progress.
//!
//! Each function has the effect of a general function of [`Flow`], or returns that it cannot be used and changes nothing. The fuzzer runs both
//! functions and compares their effects.

use super::{Flow, Kind, OpId, Sent, Waiting};
use crate::wire::Message;

/// A receive that the immediate data of an arrived message completes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// The send that the message acknowledges, which has ended, and its length.
    pub(crate) sent: Option<(OpId, u64)>,
    /// The receive, in whose memory the data fits.
    pub(crate) recv: OpId,
    pub(crate) len: u64,
}

impl Flow {
    /// Returns whether nothing is in progress, except for receives that wait for data and sends that wait for their acknowledgements. Then
    /// [`Flow::progress`] has nothing to do.
    pub(super) fn is_quiet(&self) -> bool {
        let first_waits = |w: &Waiting| w.ended.is_none();
        self.sends.is_empty()
            && self.recvs.front().is_none_or(first_waits)
            && self.moves.is_empty()
            && self.adverts.is_empty()
            && self.buffer.asked == self.buffer.taken
            && self.waiting_controls.is_empty()
            && self.place.is_none()
            && self.persistent.is_none()
            && self.standing.is_none()
            && self.fin.is_none()
            && !self.fin_sent
            && !self.peer_fin
            && self.targets.waiting.is_empty()
            && self.ahead.count == 0
            && self.ahead.unbinding == 0
            && !self.ahead.due
            // No receive is advertised.
            && (self.ahead.pause > 0 || self.ahead.most == 0)
            && self.has_no_ends()
    }

    /// Returns whether nothing that has ended waits for its report or for the answer to the peer.
    fn has_no_ends(&self) -> bool {
        self.writes.is_empty()
            && self.cancelled.is_empty()
            && self.place_ends.is_empty()
            && self.persistent_ends.is_empty()
            && self.standing_ends.is_empty()
    }

    /// Does the same as [`Flow::send`], for a send of `len` bytes in one segment without an offset. Returns the message, to which the data
    /// has to be added.
    pub(crate) fn send_short(&mut self, id: OpId, len: u64) -> Option<Message> {
        if len > self.immediate || self.credits == 0 || !self.is_quiet() {
            return None;
        }
        let len32 = u32::try_from(len).ok()?;
        self.targets.in_step = false;
        self.credits -= 1;
        let seq = self.number();
        self.targets.last = seq;
        self.answers = true;
        self.sent.push_back(Sent {
            seq,
            op: Some(id),
            len,
            kind: Kind::Once,
            answer: None,
            cancels: None,
        });
        Some(Message::Immediate {
            seq,
            len: len32,
            acks: self.carried(),
        })
    }

    /// Does the same as [`Flow::arrived`], for a message with immediate data. The caller copies the data, and then releases the message buffer.
    pub(crate) fn arrived_short(&mut self, message: &Message) -> Option<Delivery> {
        let &Message::Immediate { seq, len, acks } = message else {
            return None;
        };
        let len = u64::from(len);
        let waiting = self.recvs.front()?;
        // The end of this receive does not cause the report of the next one, which was cancelled.
        let is_alone = self.recvs.get(1).is_none_or(|w| w.ended.is_none());
        let expected = seq == self.peer_seq.wrapping_add(1)
            && self.peer_unanswered < self.granted
            && len <= self.our_immediate;
        let fits = waiting.recv.segments.len() == 1
            && len <= waiting.len
            && waiting.asked == 0
            && !waiting.cancelled
            && waiting.recv.offset.is_none_or(|o| o == 0);
        if !expected || !fits || !is_alone || self.stream || !self.may_hold(seq) || !self.is_quiet()
        {
            return None;
        }
        let sent = match acks {
            None if self.credits == 0 => return None,
            None => None,
            Some(acked) => Some(self.take_acked(acked.get())?),
        };
        self.peer_seq = seq;
        self.ahead.last = seq;
        self.ahead.in_step = false;
        self.ahead.pause = self.ahead.pause.saturating_sub(1).max(1);
        self.next_move += 1;
        self.deferred = Some((seq, len));
        let recv = self.recvs.pop_front()?.recv.id;
        Some(Delivery { sent, recv, len })
    }

    /// Returns whether the acknowledgement of the message `seq` is held back for the next send of this end, provided that there is a credit for
    /// this send.
    fn may_hold(&self, seq: u32) -> bool {
        self.may_defer && self.answers && self.deferred.is_none() && seq != 0
    }

    /// Removes the oldest send, if `seq` is its number and its end does not cause the report of another. Returns its operation and length.
    fn take_acked(&mut self, seq: u32) -> Option<(OpId, u64)> {
        let is_next = |s: &&Sent| s.seq == seq && s.kind == Kind::Once && s.answer.is_none();
        let is_unanswered = |s: &Sent| s.kind == Kind::Once && s.answer.is_none();
        let sent = self.sent.front().filter(is_next)?;
        let ended = (sent.op?, sent.len);
        if !self.sent.get(1).is_none_or(is_unanswered) {
            return None;
        }
        self.sent.pop_front();
        self.credits += 1;
        Some(ended)
    }
}
