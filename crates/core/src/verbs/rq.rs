//! Receive queue: the queue pair's own queue, or the shared one that it was created with.

use std::collections::VecDeque;
use std::sync::Arc;

use super::cq::{Cq, Overflow};
use super::srq::Srq;
use super::wc::Completion;
use super::wr::RecvRequest;
use super::xrc::{XrcDomain, XrcSrq};
use crate::error::Misuse;

/// The source of the receives of a queue pair.
#[derive(Debug)]
pub enum RecvQueue {
    /// Its own queue.
    Own {
        /// Receives that were posted and not taken.
        requests: VecDeque<RecvRequest>,
        /// Largest number of receives.
        max_wr: u32,
        /// Longest scatter list of a receive.
        max_sge: u32,
    },
    /// A shared queue.
    Shared(Arc<Srq>),
    /// No queue: the queue pair only sends.
    None,
    /// Any queue of an XRC domain; the peer selects it.
    Xrc {
        /// The domain.
        domain: Arc<XrcDomain>,
        /// The queue that the peer chose.
        chosen: Option<Arc<XrcSrq>>,
        /// The queue of the receive that was taken last.
        taken: Option<Arc<XrcSrq>>,
    },
}

/// A receive that was taken.
#[derive(Debug)]
pub struct TakenRecv {
    /// The oldest posted receive.
    pub request: RecvRequest,
    /// Whether the shared queue fell below its limit.
    pub srq_limit_reached: bool,
}

impl RecvQueue {
    /// Posts a receive (`ibv_post_recv(3)`; with a shared queue, receives are posted to that queue).
    #[inline]
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
                if requests.try_reserve(1).is_err() {
                    return Err(Misuse::NoMemory);
                }
                requests.push_back(request);
                Ok(())
            }
            Self::Shared(_) => Err(Misuse::InvalidArgument(
                "post_recv on a queue pair with a shared receive queue",
            )),
            Self::None | Self::Xrc { .. } => Err(Misuse::InvalidArgument(
                "post_recv on a queue pair without a receive queue",
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
            Self::None => None,
            Self::Xrc { chosen, taken, .. } => {
                let queue = chosen.as_ref()?;
                let request = queue.take()?;
                *taken = Some(Arc::clone(queue));
                Some(TakenRecv {
                    request,
                    srq_limit_reached: false,
                })
            }
        }
    }

    /// Selects the queue that the peer named for its next requests. False if there is no such queue, or the queue pair
    /// is not of type XRC.
    pub fn choose(&mut self, number: u32) -> bool {
        match self {
            Self::Xrc { domain, chosen, .. } => match domain.find(number) {
                Some(queue) => {
                    *chosen = Some(queue);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }

    /// Completes the receive that was taken last. With XRC the completion goes to the completion queue of the XRC SRQ that the receive came
    /// from, otherwise to `own`, the completion queue of the queue pair.
    #[inline]
    pub fn complete(&self, entry: Completion, own: &Cq) -> Result<(), Overflow> {
        match self {
            Self::Xrc { taken, .. } => match taken {
                Some(queue) => queue.complete(entry),
                None => Ok(()),
            },
            _ => own.complete(entry),
        }
    }

    /// Forgets the selected queue, when a new stream begins.
    pub fn forget_choice(&mut self) {
        if let Self::Xrc { chosen, taken, .. } = self {
            (*chosen, *taken) = (None, None);
        }
    }

    /// Puts back a receive that was taken and not used, as the oldest one.
    pub fn put_back(&mut self, request: RecvRequest) {
        match self {
            Self::Own { requests, .. } => requests.push_front(request),
            Self::Shared(srq) => srq.put_back(request),
            // Only datagram queue pairs put receives back.
            Self::None | Self::Xrc { .. } => {}
        }
    }

    /// The oldest receive of the queue pair's own queue.
    #[inline]
    pub(crate) fn front_own(&self) -> Option<&RecvRequest> {
        match self {
            Self::Own { requests, .. } => requests.front(),
            Self::Shared(_) | Self::None | Self::Xrc { .. } => None,
        }
    }

    /// Drops the oldest receive of the queue pair's own queue, which was used in place.
    #[inline]
    pub(crate) fn drop_own(&mut self) {
        if let Self::Own { requests, .. } = self {
            requests.pop_front();
        }
    }

    /// Takes the next receive to flush. Receives of shared queues are not flushed.
    pub fn take_own(&mut self) -> Option<RecvRequest> {
        match self {
            Self::Own { requests, .. } => requests.pop_front(),
            Self::Shared(_) | Self::None | Self::Xrc { .. } => None,
        }
    }

    /// Whether no receive is posted.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Own { requests, .. } => requests.is_empty(),
            Self::Shared(srq) => srq.is_empty(),
            Self::None => true,
            Self::Xrc { chosen, .. } => chosen.as_ref().is_none_or(|q| q.is_empty()),
        }
    }

    /// Whether receives are shared.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(_))
    }

    /// Whether the peer chooses among shared queues.
    pub fn is_xrc(&self) -> bool {
        matches!(self, Self::Xrc { .. })
    }

    /// Number of the protection domain of the receive buffers, if it can differ from that of the queue pair.
    pub fn pd(&self) -> Option<u32> {
        match self {
            Self::Own { .. } | Self::None => None,
            Self::Shared(srq) => Some(srq.pd()),
            Self::Xrc { chosen, .. } => chosen.as_ref().map(|q| q.pd()),
        }
    }

    /// Drops all posted receives (reset).
    pub fn clear(&mut self) {
        if let Self::Own { requests, .. } = self {
            requests.clear();
        }
        self.forget_choice();
    }
}
