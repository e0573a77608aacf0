//! Extended reliable connections: one connection from a process to a host, and behind it any shared receive queue of a
//! domain there.
//!
//! The sender names the queue in each request (IBA's XRCETH). Here it says so in a control message when the queue
//! changes ([`Control::SelectSrq`]); all requests up to the next one are for that queue. Its protection domain is the one
//! that the memory of these requests must belong to, and its completion queue gets the receives.
//!
//! [`Control::SelectSrq`]: crate::wire::control::Control::SelectSrq

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::cq::Cq;
use super::srq::Srq;

/// A shared receive queue of a domain.
#[derive(Debug)]
pub struct XrcSrq {
    /// Its number, by which peers name it.
    pub number: u32,
    /// The receives.
    pub srq: Arc<Srq>,
    /// Where they complete.
    pub cq: Arc<Cq>,
}

/// An XRC domain: the queues that its receiving queue pairs can reach.
#[derive(Debug, Default)]
pub struct XrcDomain {
    queues: Mutex<HashMap<u32, Weak<XrcSrq>>>,
}

impl XrcDomain {
    fn queues(&self) -> MutexGuard<'_, HashMap<u32, Weak<XrcSrq>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue can be reached from now on.
    pub fn enter(&self, queue: &Arc<XrcSrq>) {
        self.queues().insert(queue.number, Arc::downgrade(queue));
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
