//! Send queue: posted requests in order, which of them may be taken next, and which are done.
//!
//! A request is *queued*, then *sent* (its last segment is framed), then *done* (socket, acknowledgement or answer
//! says so), and retires in posting order: its slot is free and its completion made only when all before it have
//! retired.

use std::collections::VecDeque;

use super::wc::Status;
use super::wr::WorkRequest;
use crate::bounds;
use crate::error::Misuse;

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not taken yet, or to be sent again.
    Queued,
    /// Some of its segments are framed.
    Sending,
    /// All of its segments are framed.
    Sent,
    /// Finished.
    Done,
}

/// A request in the queue.
#[derive(Debug)]
pub struct Posted {
    /// What the application asked for.
    pub request: WorkRequest,
    /// How far it has come.
    pub phase: Phase,
    /// Sequence numbers of its first and last request message.
    pub seq: (u32, u32),
    /// Message sequence numbers of queues 0 and 1 before it, to go back to when it must be sent again.
    pub msn_before: (u32, u32),
    /// Answers (Read Responses, Atomic Responses) that it still waits for.
    pub answers: u32,
    /// Bytes that it moved, for its completion.
    pub bytes: u64,
    /// Times it found no receive at the peer.
    pub rnr_tries: u8,
    /// Messages at its front that the peer has done already, when it is sent again.
    pub skip: u32,
    /// What went wrong with it on our side, in numbers and for the log; told when all before it have completed.
    pub failed: Option<(Status, &'static str)>,
    /// It is to fail like this when its turn comes ([`crate::fault`]).
    pub planted: Option<Status>,
}

/// The send queue.
#[derive(Debug)]
pub struct SendQueue {
    posted: VecDeque<Posted>,
    /// Number of the request at the front; requests are numbered from 0 for ever.
    front: u64,
    /// Number of the first request that was not taken.
    next: u64,
    /// A request that was taken has failed: none behind it is.
    blocked: bool,
    max_wr: u32,
    max_sge: u32,
    max_inline: u32,
}

impl SendQueue {
    /// An empty queue.
    pub fn new(max_wr: u32, max_sge: u32, max_inline: u32) -> Self {
        Self {
            posted: VecDeque::new(),
            front: 0,
            next: 0,
            blocked: false,
            max_wr,
            max_sge,
            max_inline,
        }
    }

    /// Adds a request, with what `ibv_post_send(3)` checks at once.
    pub fn post(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        match &request.payload {
            super::wr::Payload::Sges(sges) if sges.len() > self.max_sge as usize => {
                return Err(Misuse::TooManySge);
            }
            // The word of an atomic write is part of the request, not of its data.
            super::wr::Payload::Inline(data)
                if data.len() > self.max_inline as usize
                    && !matches!(request.op, super::wr::Op::AtomicWrite { .. }) =>
            {
                return Err(Misuse::InlineTooLarge);
            }
            _ => {}
        }
        if self.posted.len() >= self.max_wr as usize {
            return Err(Misuse::QueueFull);
        }
        if self.posted.try_reserve(1).is_err() {
            return Err(Misuse::NoMemory);
        }
        self.posted.push_back(Posted {
            request,
            phase: Phase::Queued,
            seq: (0, 0),
            msn_before: (0, 0),
            answers: 0,
            bytes: 0,
            rnr_tries: 0,
            skip: 0,
            failed: None,
            planted: None,
        });
        Ok(())
    }

    /// The request that was posted last will fail with `status` instead of being sent.
    pub fn plant(&mut self, status: Status) {
        if let Some(posted) = self.posted.back_mut()
            && posted.phase == Phase::Queued
        {
            posted.planted = Some(status);
        }
    }

    /// The next request to take, and its number.
    pub fn peek(&mut self) -> Option<(u64, &mut Posted)> {
        if self.blocked {
            return None;
        }
        let number = self.next;
        let at = usize::try_from(number - self.front).ok()?;
        self.posted.get_mut(at).map(|p| (number, p))
    }

    /// The request that [`Self::peek`] gave is taken.
    pub fn advance(&mut self) {
        self.next += 1;
    }

    /// Request `number`, while it is in the queue.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Posted> {
        let at = usize::try_from(number.checked_sub(self.front)?).ok()?;
        self.posted.get_mut(at)
    }

    /// Requests that were taken and have not retired, oldest first, with their numbers.
    pub fn taken_mut(&mut self) -> impl Iterator<Item = (u64, &mut Posted)> {
        let taken = usize::try_from(self.next - self.front).unwrap_or(0);
        let front = self.front;
        self.posted
            .iter_mut()
            .take(taken)
            .enumerate()
            .map(move |(i, p)| (front + i as u64, p))
    }

    /// Request `number`, which was taken, cannot be done by us. It fails when all before it have retired.
    pub fn fail(&mut self, number: u64, status: Status, why: &'static str) {
        if let Some(posted) = self.get_mut(number) {
            posted.failed = Some((status, why));
            posted.phase = Phase::Done;
            posted.answers = 0;
            self.blocked = true;
        }
    }

    /// What went wrong with the front request, when its turn has come to say so.
    pub fn front_failed(&self) -> Option<&'static str> {
        let first = self.posted.front()?;
        first.failed.map(|(_, why)| why)
    }

    /// Removes the front request if it is done and did not fail.
    pub fn retire(&mut self) -> Option<Posted> {
        let first = self.posted.front()?;
        if first.phase != Phase::Done || first.failed.is_some() {
            return None;
        }
        self.pop()
    }

    /// Removes the front request whatever its phase (flush).
    pub fn pop(&mut self) -> Option<Posted> {
        let first = self.posted.pop_front()?;
        self.front += 1;
        self.next = self.next.max(self.front);
        Some(first)
    }

    /// Goes back, so that request `number` is the next to be taken.
    pub fn rewind(&mut self, number: u64) {
        if number < self.front || number >= self.next {
            return;
        }
        self.next = number;
        self.blocked = false;
        let from = usize::try_from(number - self.front).unwrap_or(0);
        for posted in self.posted.iter_mut().skip(from) {
            // A bind or invalidate is no message: the peer did not drop it, and it cannot be done twice.
            if posted.phase == Phase::Done
                && posted.failed.is_none()
                && posted.request.op.is_local()
            {
                continue;
            }
            posted.phase = Phase::Queued;
            posted.answers = 0;
            posted.failed = None;
        }
    }

    /// Number of the request at the front.
    pub fn front_number(&self) -> u64 {
        self.front
    }

    /// Whether requests were taken and are not finished.
    pub fn has_outstanding(&self) -> bool {
        self.next > self.front
    }

    /// Whether nothing is posted.
    pub fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// How many requests wait to be taken.
    pub fn untaken(&self) -> usize {
        self.posted.len() - usize::try_from(self.next - self.front).unwrap_or(0)
    }

    /// Forgets everything (reset).
    pub fn clear(&mut self) {
        self.front += self.posted.len() as u64;
        self.next = self.front;
        self.blocked = false;
        self.posted.clear();
    }

    /// Sizes, for checks outside.
    pub fn limits(&self) -> (u32, u32, u32) {
        (self.max_wr, self.max_sge, self.max_inline)
    }
}

/// Whether a message may be that long.
pub fn fits(len: u64) -> bool {
    len <= bounds::MAX_MESSAGE
}

#[cfg(test)]
mod tests {
    use super::super::wr::{Op, Payload};
    use super::*;

    fn request(id: u64) -> WorkRequest {
        WorkRequest {
            id,
            op: Op::Send {
                imm: None,
                invalidate: None,
            },
            payload: Payload::empty(),
            signaled: true,
            solicited: false,
            fence: false,
            destination: None,
            srq: None,
        }
    }

    #[test]
    fn requests_retire_in_posting_order_only() {
        let mut sq = SendQueue::new(4, 1, 0);
        for id in 0..3 {
            sq.post(request(id)).unwrap();
            sq.peek().unwrap();
            sq.advance();
        }
        sq.get_mut(1).unwrap().phase = Phase::Done;
        assert!(sq.retire().is_none());
        sq.get_mut(0).unwrap().phase = Phase::Done;
        assert_eq!(sq.retire().unwrap().request.id, 0);
        assert_eq!(sq.retire().unwrap().request.id, 1);
        assert!(sq.retire().is_none());
    }

    #[test]
    fn a_rewound_request_is_taken_again_with_all_behind_it() {
        let mut sq = SendQueue::new(4, 1, 0);
        for id in 0..3 {
            sq.post(request(id)).unwrap();
            sq.advance();
        }
        sq.rewind(1);
        assert_eq!(sq.peek().unwrap().1.request.id, 1);
        assert_eq!(sq.untaken(), 2);
    }

    #[test]
    fn no_more_than_max_send_wr() {
        let mut sq = SendQueue::new(1, 1, 0);
        sq.post(request(0)).unwrap();
        assert!(matches!(sq.post(request(1)), Err(Misuse::QueueFull)));
    }
}
