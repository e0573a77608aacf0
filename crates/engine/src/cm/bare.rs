//! Bare connections: private data and the end of a connection, and nothing else.
//!
//! On InfiniBand the connection manager's messages are not those of a queue pair, and some programs (UCX) want only
//! them: they connect with the number of a queue pair that they never use, exchange addresses as private data, and learn
//! from the connection's end that the peer is gone. An MPA connection needs an end that speaks RDMAP. So the identifier
//! makes a queue pair of its own that nobody can post to and that gives the peer no access.

use std::io;
use std::sync::{Arc, OnceLock};

use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::Capacity;
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;

use super::state::Phase;
use super::{CmId, os};
use crate::context::Context;
use crate::process::PerProcess;
use crate::qp::RcQp;

/// A context for queue pairs that no program has: nothing is ever told to it.
fn context() -> io::Result<&'static Arc<Context>> {
    static CONTEXT: PerProcess<OnceLock<Arc<Context>>> = PerProcess::new(OnceLock::new);
    let held = CONTEXT.get();
    if held.get().is_none() {
        // A failure is not kept: there may be a descriptor the next time.
        let _another_thread_was_faster = held.set(Context::open()?);
    }
    held.get().ok_or_else(|| os(libc::EMFILE))
}

/// No requests, no receives, no protection domain.
fn end() -> io::Result<Arc<RcQp>> {
    let context = context()?;
    RcQp::new(context, None, |qpn| Parts {
        rnic: Arc::clone(&context.engine.rnic),
        qpn,
        pd: 0,
        send_cq: Arc::new(Cq::new(1, None)),
        recv_cq: Arc::new(Cq::new(1, None)),
        rq: RecvQueue::None,
        capacity: Capacity::default(),
        sig_all: false,
    })
}

impl CmId {
    /// As `find_qp`; a number that is no connected queue pair's here asks for a bare connection. 0 asks for none.
    pub(super) fn find_or_make_qp(&self, number: u32) -> io::Result<Option<(Arc<RcQp>, bool)>> {
        let found = self.find_qp(number);
        if found.is_some() || number == 0 {
            return Ok(found);
        }
        let made = end()?;
        let mut state = self.lock();
        if state.destroyed || !matches!(state.phase, Phase::Routed | Phase::Requested) {
            drop(state);
            made.destroy();
            return Err(os(libc::EINVAL));
        }
        state.bare = Some(Arc::clone(&made));
        Ok(Some((made, false)))
    }

    /// The passive side is ready when it has answered.
    pub(super) fn ready_bare(&self) {
        let Some(qp) = self.lock().bare.clone() else {
            return;
        };
        self.make_ready(&qp, true, 0, 0);
        // Such a connection is to outlive a pause of the network; its programs ask for no repeats, having nothing to send.
        qp.with_attr(|attr| attr.retry_cnt = 7);
    }

    /// The active side is when its program says so (`rdma_establish(3)`): the peer hears of the connection only then.
    pub fn establish(&self) {
        if self.lock().phase == Phase::Connected {
            self.ready_bare();
        }
    }
}
