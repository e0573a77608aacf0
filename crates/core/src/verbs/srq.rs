//! Shared receive queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use super::wr::RecvRequest;
use crate::error::Misuse;
use crate::sync::{Mutex, MutexGuard};

#[derive(Debug)]
struct State {
    requests: VecDeque<RecvRequest>,
    max_wr: u32,
    limit: u32,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    state: Mutex<State>,
    max_sge: u32,
    pd: u32,
    /// Whether a receive was wanted since the last call of [`Srq::end_shortage`], and there was none.
    short: AtomicBool,
}

/// A receive that was taken.
#[derive(Debug)]
pub struct Taken {
    /// The oldest posted receive.
    pub request: RecvRequest,
    /// Whether the queue has just fallen below its limit, so `IBV_EVENT_SRQ_LIMIT_REACHED` is due.
    pub limit_reached: bool,
}

impl Srq {
    /// A queue for `max_wr` receives of up to `max_sge` elements, in protection domain `pd`.
    pub fn new(max_wr: u32, max_sge: u32, limit: u32, pd: u32) -> Self {
        Self {
            state: Mutex::new(State {
                requests: VecDeque::new(),
                max_wr,
                limit,
            }),
            max_sge,
            pd,
            short: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Posts a receive.
    pub fn post(&self, request: RecvRequest) -> Result<(), Misuse> {
        if request.sges.len() > self.max_sge as usize {
            return Err(Misuse::TooManySge);
        }
        let mut state = self.state();
        if state.requests.len() >= state.max_wr as usize {
            return Err(Misuse::QueueFull);
        }
        if state.requests.try_reserve(1).is_err() {
            return Err(Misuse::NoMemory);
        }
        state.requests.push_back(request);
        Ok(())
    }

    /// Takes the oldest receive.
    pub fn take(&self) -> Option<Taken> {
        let mut state = self.state();
        let Some(request) = state.requests.pop_front() else {
            self.short.store(true, Ordering::Release);
            return None;
        };
        let limit_reached = state.limit > 0 && state.requests.len() < state.limit as usize;
        if limit_reached {
            state.limit = 0;
        }
        Some(Taken {
            request,
            limit_reached,
        })
    }

    /// Returns whether a receive was wanted since the last call, and there was none. Called after receives were posted. If the result
    /// is true, the caller informs the queue pairs on which messages wait.
    #[inline]
    pub fn end_shortage(&self) -> bool {
        self.short.load(Ordering::Acquire) && self.short.swap(false, Ordering::AcqRel)
    }

    /// Puts back a receive that was taken and not used, as the oldest one. It is accepted even if the queue is full,
    /// since it would be lost otherwise.
    pub fn put_back(&self, request: RecvRequest) {
        self.state().requests.push_front(request);
    }

    /// Sets the size or the limit. Returns true if fewer receives are posted than the new limit, so that the event is
    /// due at once.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<bool, Misuse> {
        let mut state = self.state();
        let (new_max_wr, new_limit) =
            (max_wr.unwrap_or(state.max_wr), limit.unwrap_or(state.limit));
        if (new_max_wr as usize) < state.requests.len() && max_wr.is_some() {
            return Err(Misuse::InvalidArgument("max_wr below the posted receives"));
        }
        if new_limit > new_max_wr {
            return Err(Misuse::InvalidArgument("srq_limit above max_wr"));
        }
        (state.max_wr, state.limit) = (new_max_wr, new_limit);
        let due = limit.is_some() && state.limit > 0 && state.requests.len() < state.limit as usize;
        if due {
            state.limit = 0;
        }
        Ok(due)
    }

    /// Whether no receive is posted.
    pub fn is_empty(&self) -> bool {
        self.state().requests.is_empty()
    }

    /// Returns (`max_wr`, `max_sge`, `srq_limit`).
    pub fn attributes(&self) -> (u32, u32, u32) {
        let state = self.state();
        (state.max_wr, self.max_sge, state.limit)
    }

    /// Number of the protection domain that the buffers of the receives belong to.
    pub fn pd(&self) -> u32 {
        self.pd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recv(id: u64) -> RecvRequest {
        RecvRequest {
            id,
            sges: Default::default(),
        }
    }

    #[test]
    fn limit_fires_once_when_the_queue_falls_below() {
        let srq = Srq::new(4, 1, 2, 0);
        for i in 0..3 {
            srq.post(recv(i)).unwrap();
        }
        assert!(!srq.take().unwrap().limit_reached);
        assert!(srq.take().unwrap().limit_reached);
        assert!(!srq.take().unwrap().limit_reached);
        assert!(srq.take().is_none());
    }

    #[test]
    fn a_receive_that_is_put_back_is_the_oldest_again() {
        let srq = Srq::new(2, 1, 0, 0);
        srq.post(recv(1)).unwrap();
        srq.post(recv(2)).unwrap();
        let taken = srq.take().unwrap();
        srq.put_back(taken.request);
        assert_eq!(srq.take().unwrap().request.id, 1);
        assert_eq!(srq.take().unwrap().request.id, 2);
    }

    #[test]
    fn no_more_than_max_wr() {
        let srq = Srq::new(1, 1, 0, 0);
        srq.post(recv(1)).unwrap();
        assert!(matches!(srq.post(recv(2)), Err(Misuse::QueueFull)));
    }
}
