//! Send queue: posted requests in order, which of them may be taken next, and which are done.
//!
//! A request is first *queued*. The connection *takes* it to build its messages: it is *sending* until all of its segments are
//! framed, then *sent*, and *done* when the socket, an acknowledgement or a response confirms it. Requests retire in
//! posting order: when all earlier ones have retired, the slot of a request that is done is freed and its completion is made.

use super::wc::{Completion, Status, WcOp};
use super::wr::{Op, Payload, WorkRequest, given};
use crate::bounds;
use crate::error::Misuse;
use crate::ring::Ring;

/// The progress of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not taken yet, or to be sent again.
    Queued,
    /// Taken, and not all of its segments are framed.
    Sending,
    /// All of its segments are framed.
    Sent,
    /// Finished.
    Done,
}

/// A request in the queue.
#[derive(Debug)]
pub struct Posted {
    /// The request of the application.
    pub request: WorkRequest,
    /// The progress of the request.
    pub phase: Phase,
    /// Numbers of its first and last message. All messages of the connection's requests are numbered in one sequence, which
    /// acknowledgements refer to.
    pub seq: (u32, u32),
    /// Message sequence numbers of queues 0 and 1 before it. They are restored when the request has to be sent again.
    pub msn_before: (u32, u32),
    /// Number of responses (Read Responses, Atomic Responses) that have not arrived.
    pub answers: u32,
    /// Bytes transferred, for its completion.
    pub bytes: u64,
    /// Number of its message, on a datagram queue pair.
    pub message: u32,
    /// Number of times that the peer had no receive for it.
    pub rnr_tries: u8,
    /// How many of its messages, from the first one on, the peer has executed already. They are left out if it is sent again.
    pub skip: u32,
    /// The local error of the request, as a status and as text for the log. It is reported when all requests before it
    /// have completed.
    pub failed: Option<(Status, &'static str)>,
    /// The injected status with which the request fails when it would be taken ([`crate::fault`]).
    pub injected: Option<Status>,
}

impl Posted {
    fn blank() -> Self {
        Self {
            request: WorkRequest::blank(),
            phase: Phase::Queued,
            seq: (0, 0),
            msn_before: (0, 0),
            answers: 0,
            bytes: 0,
            message: 0,
            rnr_tries: 0,
            skip: 0,
            failed: None,
            injected: None,
        }
    }

    /// Resets the request in this slot, except for its payload ([`WorkRequest::make_blank`]). Cheaper than
    /// [`Self::blank`], because it does not write bytes that are not read in a blank request.
    #[inline]
    fn make_blank(&mut self) {
        let Self {
            request,
            phase,
            seq,
            msn_before,
            answers,
            bytes,
            message,
            rnr_tries,
            skip,
            failed,
            injected,
        } = self;
        request.make_blank();
        *phase = Phase::Queued;
        *seq = (0, 0);
        *msn_before = (0, 0);
        (*answers, *bytes, *message) = (0, 0, 0);
        (*rnr_tries, *skip) = (0, 0);
        (*failed, *injected) = (None, None);
    }
}

/// A request that has left the queue: the fields that its completion needs.
#[derive(Debug, Clone, Copy)]
pub struct Retired {
    /// The `wr_id`.
    pub id: u64,
    /// The operation.
    pub op: WcOp,
    /// Whether a completion is made on success too.
    pub signaled: bool,
    /// Bytes transferred.
    pub bytes: u64,
    /// Number of its message, on a datagram queue pair.
    pub message: u32,
    /// The progress that it had made.
    pub phase: Phase,
    /// The local error of the request.
    pub failed: Option<(Status, &'static str)>,
}

impl From<&Posted> for Retired {
    #[inline]
    fn from(posted: &Posted) -> Self {
        Self {
            id: posted.request.id,
            op: match posted.request.op {
                Op::Send { .. } => WcOp::Send,
                Op::Write { .. } => WcOp::Write,
                Op::AtomicWrite { .. } => WcOp::AtomicWrite,
                Op::Read { .. } => WcOp::Read,
                Op::FetchAdd { .. } => WcOp::FetchAdd,
                Op::CompareSwap { .. } => WcOp::CompareSwap,
                Op::LocalInvalidate { .. } => WcOp::LocalInvalidate,
                Op::Bind(_) => WcOp::Bind,
            },
            signaled: posted.request.signaled,
            bytes: posted.bytes,
            message: posted.message,
            phase: posted.phase,
            failed: posted.failed,
        }
    }
}

impl Retired {
    /// Returns its completion.
    #[inline]
    pub fn completion(&self, status: Status, qpn: u32) -> Completion {
        let mut entry = Completion::new(self.id, status, self.op, qpn);
        entry.byte_len = u32::try_from(self.bytes).unwrap_or(u32::MAX);
        entry.message = self.message;
        entry
    }
}

/// The send queue.
#[derive(Debug)]
pub struct SendQueue {
    posted: Ring<Posted>,
    /// Number of the request at the front. Requests are numbered from 0, and the numbers are not reused.
    front: u64,
    /// Number of the first request that was not taken.
    next: u64,
    /// Whether a request that was taken has failed. No further request is then taken.
    blocked: bool,
    max_wr: u32,
    max_sge: u32,
    max_inline: u32,
}

impl SendQueue {
    /// An empty queue.
    pub fn new(max_wr: u32, max_sge: u32, max_inline: u32) -> Self {
        Self {
            posted: Ring::new(),
            front: 0,
            next: 0,
            blocked: false,
            max_wr,
            max_sge,
            max_inline,
        }
    }

    /// Adds a request, after the checks of `ibv_post_send(3)`.
    pub fn post(&mut self, request: WorkRequest) -> Result<(), Misuse> {
        self.post_with(given(Ok(request)))
    }

    /// Adds a request that `fill` writes in place, as [`Self::post`] does: a request is about 200 bytes, and moving it
    /// is slow.
    #[inline]
    pub fn post_with(
        &mut self,
        fill: impl FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    ) -> Result<(), Misuse> {
        let is_full = self.posted.len() >= self.max_wr as usize;
        let Ok(place) = self.posted.push(Posted::blank) else {
            return Err(Misuse::NoMemory);
        };
        place.make_blank();
        let (max_sge, max_inline) = (self.max_sge, self.max_inline);
        let mut new_entry = NewEntry {
            posted: &mut self.posted,
            is_made: false,
        };
        if let Some(posted) = new_entry.posted.back_mut() {
            fill(&mut posted.request)?;
            Self::fits(&posted.request, max_sge, max_inline)?;
        }
        if is_full {
            return Err(Misuse::QueueFull);
        }
        new_entry.is_made = true;
        Ok(())
    }

    /// Returns the number of requests that have not completed.
    #[inline]
    pub fn len(&self) -> usize {
        self.posted.len()
    }

    /// Returns the largest number of requests.
    pub fn max_wr(&self) -> usize {
        self.max_wr as usize
    }

    /// Checks whether these requests can be posted. `stay`: they need room at the same time.
    pub fn check(&self, requests: &[WorkRequest], stay: bool) -> Result<(), Misuse> {
        for request in requests {
            Self::fits(request, self.max_sge, self.max_inline)?;
        }
        if stay && self.posted.len() + requests.len() > self.max_wr as usize {
            return Err(Misuse::QueueFull);
        }
        Ok(())
    }

    fn fits(request: &WorkRequest, max_sge: u32, max_inline: u32) -> Result<(), Misuse> {
        match &request.payload {
            Payload::Sges(sges) if sges.len() > max_sge as usize => Err(Misuse::TooManySge),
            // The word of an atomic write is stored in the request itself and does not count as inline data.
            Payload::Inline(data)
                if data.len() > max_inline as usize
                    && !matches!(request.op, Op::AtomicWrite { .. }) =>
            {
                Err(Misuse::InlineTooLarge)
            }
            _ => Ok(()),
        }
    }

    /// Makes the request that was posted last fail with `status` when it would be sent.
    pub fn inject_error(&mut self, status: Status) {
        if let Some(posted) = self.posted.back_mut()
            && posted.phase == Phase::Queued
        {
            posted.injected = Some(status);
        }
    }

    /// Returns the next request to take, and its number.
    #[inline]
    pub fn peek(&mut self) -> Option<(u64, &mut Posted)> {
        if self.blocked {
            return None;
        }
        let number = self.next;
        let at = usize::try_from(number - self.front).ok()?;
        self.posted.get_mut(at).map(|p| (number, p))
    }

    /// Marks the request that [`Self::peek`] returned as taken.
    #[inline]
    pub fn advance(&mut self) {
        self.next += 1;
    }

    /// Returns request `number`, if it is in the queue.
    #[inline]
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Posted> {
        let at = usize::try_from(number.checked_sub(self.front)?).ok()?;
        self.posted.get_mut(at)
    }

    /// Requests that were taken and have not retired, oldest first, with their numbers.
    pub fn taken_mut(&mut self) -> impl Iterator<Item = (u64, &mut Posted)> {
        let taken = usize::try_from(self.next - self.front).unwrap_or(0);
        let front = self.front;
        self.posted
            .range_mut(0, taken)
            .enumerate()
            .map(move |(i, p)| (front + i as u64, p))
    }

    /// Marks request `number`, which was taken, as failed locally. The failure is reported when all earlier requests
    /// have retired.
    pub fn fail(&mut self, number: u64, status: Status, why: &'static str) {
        if let Some(posted) = self.get_mut(number) {
            posted.failed = Some((status, why));
            posted.phase = Phase::Done;
            posted.answers = 0;
            self.blocked = true;
        }
    }

    /// The local error of the front request, if it failed.
    #[inline]
    pub fn front_failed(&self) -> Option<&'static str> {
        let first = self.posted.front()?;
        first.failed.map(|(_, why)| why)
    }

    /// Whether [`Self::retire`] has something to remove.
    #[inline]
    pub fn is_front_done(&self) -> bool {
        let front = self.posted.front();
        front.is_some_and(|first| first.phase == Phase::Done && first.failed.is_none())
    }

    /// Removes the front request if it is done and did not fail.
    #[inline]
    pub fn retire(&mut self) -> Option<Retired> {
        let first = self.posted.front()?;
        if first.phase != Phase::Done || first.failed.is_some() {
            return None;
        }
        self.pop()
    }

    /// Removes the front request in any phase (flush).
    #[inline]
    pub fn pop(&mut self) -> Option<Retired> {
        let first = self.posted.get_mut(0)?;
        let retired = Retired::from(&*first);
        first.request.payload.forget_allocation();
        self.posted.pop_front();
        self.front += 1;
        self.next = self.next.max(self.front);
        Some(retired)
    }

    /// Queues request `number`, which was taken, and all later ones again: `number` is the next request to be taken.
    pub fn rewind(&mut self, number: u64) {
        if number < self.front || number >= self.next {
            return;
        }
        self.next = number;
        self.blocked = false;
        let from = usize::try_from(number - self.front).unwrap_or(0);
        for posted in self.posted.range_mut(from, usize::MAX) {
            // A bind or invalidate sends no message, so the peer has not dropped it, and it must not be executed
            // twice.
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
    #[inline]
    pub fn front_number(&self) -> u64 {
        self.front
    }

    /// Whether requests were taken and have not retired.
    #[inline]
    pub fn has_outstanding(&self) -> bool {
        self.next > self.front
    }

    /// Whether a request was taken and has not retired, even if it waits to be sent again.
    pub fn has_begun(&mut self) -> bool {
        // Message sequence numbers begin with 1, so those of a request that was taken are not 0.
        let is_repeated = |(_, posted): (u64, &mut Posted)| posted.msn_before != (0, 0);
        self.has_outstanding() || self.peek().is_some_and(is_repeated)
    }

    /// Whether nothing is posted.
    pub fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// Number of requests that are not taken.
    #[inline]
    pub fn untaken(&self) -> usize {
        self.posted.len() - usize::try_from(self.next - self.front).unwrap_or(0)
    }

    /// Removes all requests (reset).
    pub fn clear(&mut self) {
        self.front += self.posted.len() as u64;
        self.next = self.front;
        self.blocked = false;
        self.posted.clear();
    }

    /// Number of requests that were taken and have not retired.
    pub fn taken(&self) -> usize {
        usize::try_from(self.next - self.front).unwrap_or(0)
    }

    /// The request that was posted last.
    pub fn last(&self) -> Option<&Posted> {
        self.posted.back()
    }

    /// The limits: (`max_wr`, `max_sge`, `max_inline`).
    pub fn limits(&self) -> (u32, u32, u32) {
        (self.max_wr, self.max_sge, self.max_inline)
    }
}

/// A request that `fill` is writing. It is removed if `fill` fails or panics.
struct NewEntry<'a> {
    posted: &'a mut Ring<Posted>,
    is_made: bool,
}

impl Drop for NewEntry<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_made {
            if let Some(posted) = self.posted.back_mut() {
                posted.request.payload.forget_allocation();
            }
            self.posted.pop_back();
        }
    }
}

/// Whether a message of `len` bytes is allowed.
pub fn fits(len: u64) -> bool {
    len <= bounds::MAX_MESSAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: u64) -> WorkRequest {
        WorkRequest {
            id,
            signaled: true,
            ..WorkRequest::blank()
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
        assert_eq!(sq.retire().unwrap().id, 0);
        assert_eq!(sq.retire().unwrap().id, 1);
        assert!(sq.retire().is_none());
    }

    #[test]
    fn a_rewound_request_and_all_later_ones_are_taken_again() {
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
    fn a_request_that_fails_to_be_filled_is_removed() {
        let mut sq = SendQueue::new(2, 1, 0);
        let refused = sq.post_with(|_| Err(Misuse::InvalidArgument("opcode")));
        assert!(matches!(refused, Err(Misuse::InvalidArgument(_))) && sq.is_empty());
        let panics = std::panic::AssertUnwindSafe(|| sq.post_with(|_| panic!("asked to")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(sq.is_empty());
        sq.post(request(0)).unwrap();
        let too_long = Payload::Inline([0; 1].into_iter().collect());
        let refused = sq.post(WorkRequest {
            payload: too_long,
            ..request(1)
        });
        assert!(matches!(refused, Err(Misuse::InlineTooLarge)));
        assert_eq!(sq.untaken(), 1);
    }

    #[test]
    fn no_more_than_max_send_wr() {
        let mut sq = SendQueue::new(1, 1, 0);
        sq.post(request(0)).unwrap();
        assert!(matches!(sq.post(request(1)), Err(Misuse::QueueFull)));
    }
}
