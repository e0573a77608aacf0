//! Extended reliable connections: one connection from a process to a host reaches all shared receive queues of an XRC
//! domain on that host.
//!
//! In IBA each request names the queue (XRCETH). Here the sender sends a control message when the queue changes
//! ([`Control::SelectSrq`]), and all requests up to the next such message are for that queue. The receiver's memory
//! that these requests name must belong to the protection domain of that queue, and the receives that they consume complete in its completion
//! queue.
//!
//! [`Control::SelectSrq`]: crate::wire::control::Control::SelectSrq

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::cq::{Cq, Overflow};
use super::srq::Srq;
use super::wc::Completion;
use super::wr::RecvRequest;
use crate::sync::{Mutex, MutexGuard};

/// A shared receive queue of a domain.
pub struct XrcSrq {
    number: u32,
    srq: Arc<Srq>,
    cq: Arc<Cq>,
    limit_reached: Box<dyn Fn() + Send + Sync>,
    /// False after the program has destroyed the queue; queue pairs may refer to it for longer. The lock is held
    /// while a receive is taken or completed, so neither happens after the queue was closed.
    open: Mutex<bool>,
}

impl std::fmt::Debug for XrcSrq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("XrcSrq").field(&self.number).finish()
    }
}

impl XrcSrq {
    /// The XRC queue of `srq`, whose receives complete in `cq`. `limit_reached` is called when the queue falls below
    /// its limit.
    pub fn new(
        number: u32,
        srq: Arc<Srq>,
        cq: Arc<Cq>,
        limit_reached: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            number,
            srq,
            cq,
            limit_reached,
            open: Mutex::new(true),
        }
    }

    fn gate(&self) -> MutexGuard<'_, bool> {
        self.open.lock()
    }

    /// The number by which peers select the queue.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The protection domain of the receives of this queue. Memory that is named by requests for this queue must belong to it too.
    pub fn pd(&self) -> u32 {
        self.srq.pd()
    }

    /// Takes the oldest receive.
    pub(super) fn take(&self) -> Option<RecvRequest> {
        let open = self.gate();
        if !*open {
            return None;
        }
        let taken = self.srq.take()?;
        if taken.limit_reached {
            (self.limit_reached)();
        }
        Some(taken.request)
    }

    /// Whether no receive is posted, or the queue is closed.
    pub(super) fn is_empty(&self) -> bool {
        !*self.gate() || self.srq.is_empty()
    }

    /// Completes a receive of this queue. If the queue is closed, the completion is dropped.
    pub(super) fn complete(&self, entry: Completion) -> Result<(), Overflow> {
        let open = self.gate();
        if *open {
            self.cq.complete(entry)
        } else {
            Ok(())
        }
    }

    /// Closes the queue when the program destroys it: after this returns no receive is taken and none completes.
    pub fn close(&self) {
        *self.gate() = false;
    }
}

/// An XRC domain: the queues that its receiving queue pairs can reach.
#[derive(Debug, Default)]
pub struct XrcDomain {
    queues: Mutex<HashMap<u32, Weak<XrcSrq>>>,
}

impl XrcDomain {
    fn queues(&self) -> MutexGuard<'_, HashMap<u32, Weak<XrcSrq>>> {
        self.queues.lock()
    }

    /// Adds a queue.
    pub fn enter(&self, queue: &Arc<XrcSrq>) {
        self.queues().insert(queue.number(), Arc::downgrade(queue));
    }

    /// Removes a queue.
    pub fn leave(&self, number: u32) {
        self.queues().remove(&number);
    }

    /// The queue of this number.
    pub fn find(&self, number: u32) -> Option<Arc<XrcSrq>> {
        self.queues().get(&number).and_then(Weak::upgrade)
    }
}
