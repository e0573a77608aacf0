//! Extended reliable connections: one connection from a process to a host, and behind it any shared receive queue of a
//! domain there.
//!
//! The sender names the queue in each request (IBA's XRCETH). Here it says so in a control message when the queue
//! changes ([`Control::SelectSrq`]); all requests up to the next one are for that queue. Its protection domain is the one
//! that the memory of these requests must belong to, and its completion queue gets the receives.
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
    /// Whether the program still has it. Held while something is taken or completed, so that nothing is any more once it
    /// was closed: queue pairs may remember it for longer.
    open: Mutex<bool>,
}

impl std::fmt::Debug for XrcSrq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("XrcSrq").field(&self.number).finish()
    }
}

impl XrcSrq {
    /// A queue by which peers know `srq`; its receives complete in `cq`. `limit_reached` tells the program.
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

    /// Its number, by which peers name it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The protection domain of all memory that its requests name.
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

    /// Whether no receive is there to be taken.
    pub(super) fn is_empty(&self) -> bool {
        !*self.gate() || self.srq.is_empty()
    }

    /// A receive that was taken here is done. One whose queue is gone has nobody to be told to.
    pub(super) fn complete(&self, entry: Completion) -> Result<(), Overflow> {
        let open = self.gate();
        if *open {
            self.cq.complete(entry)
        } else {
            Ok(())
        }
    }

    /// The program destroys it: when this returns nothing is taken and nothing completes any more.
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

    /// A queue can be reached from now on.
    pub fn enter(&self, queue: &Arc<XrcSrq>) {
        self.queues().insert(queue.number(), Arc::downgrade(queue));
    }

    /// It cannot any more.
    pub fn leave(&self, number: u32) {
        self.queues().remove(&number);
    }

    /// The queue of this number.
    pub fn find(&self, number: u32) -> Option<Arc<XrcSrq>> {
        self.queues().get(&number).and_then(Weak::upgrade)
    }
}
