//! Receive queue: the queue pair's own, or the shared one it was created with.

use std::collections::VecDeque;
use std::sync::Arc;

use super::srq::Srq;
use super::wr::RecvRequest;
use crate::error::Misuse;

/// Where a queue pair takes its receives from.
#[derive(Debug)]
pub enum RecvQueue {
    /// Its own queue.
    Own {
        /// Posted and not yet taken.
        requests: VecDeque<RecvRequest>,
        /// Room.
        max_wr: u32,
        /// Longest list.
        max_sge: u32,
    },
    /// A shared queue.
    Shared(Arc<Srq>),
}

/// What taking a receive gave.
#[derive(Debug)]
pub struct TakenRecv {
    /// The oldest posted receive.
    pub request: RecvRequest,
    /// The shared queue fell below its limit.
    pub srq_limit_reached: bool,
}

impl RecvQueue {
    /// Posts a receive (`ibv_post_recv(3)`; a queue pair with a shared queue has none of its own).
    pub fn post(&mut self, request: RecvRequest) -> Result<(), Misuse> {
        match self {
            Self::Own {
                requests,
                max_wr,
                max_sge,
            } => {
                if request.sges.len() > *max_sge as usize {
                    return Err(Misuse::TooManySge);
                }
                if requests.len() >= *max_wr as usize {
                    return Err(Misuse::QueueFull);
                }
                requests.push_back(request);
                Ok(())
            }
            Self::Shared(_) => Err(Misuse::InvalidArgument(
                "post_recv on a queue pair with a shared receive queue",
            )),
        }
    }

    /// Takes the oldest posted receive.
    pub fn take(&mut self) -> Option<TakenRecv> {
        match self {
            Self::Own { requests, .. } => requests.pop_front().map(|request| TakenRecv {
                request,
                srq_limit_reached: false,
            }),
            Self::Shared(srq) => srq.take().map(|t| TakenRecv {
                request: t.request,
                srq_limit_reached: t.limit_reached,
            }),
        }
    }

    /// Gives a receive back that was taken and not used: it is the oldest again.
    pub fn put_back(&mut self, request: RecvRequest) {
        match self {
            Self::Own { requests, .. } => requests.push_front(request),
            Self::Shared(srq) => srq.put_back(request),
        }
    }

    /// Takes the next receive to flush: only the queue pair's own are.
    pub fn take_own(&mut self) -> Option<RecvRequest> {
        match self {
            Self::Own { requests, .. } => requests.pop_front(),
            Self::Shared(_) => None,
        }
    }

    /// Whether no receive is posted.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Own { requests, .. } => requests.is_empty(),
            Self::Shared(srq) => srq.is_empty(),
        }
    }

    /// Whether receives are shared.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(_))
    }

    /// Number of the protection domain that receive buffers belong to, if not the queue pair's.
    pub fn pd(&self) -> Option<u32> {
        match self {
            Self::Own { .. } => None,
            Self::Shared(srq) => Some(srq.pd()),
        }
    }

    /// Forgets what is posted (reset).
    pub fn clear(&mut self) {
        if let Self::Own { requests, .. } = self {
            requests.clear();
        }
    }
}
