//! Connections for which the program has no queue pair.
//!
//! On InfiniBand the connection manager has its own messages, and some programs (UCX) use only those: they connect
//! with the number of a queue pair that they never use, exchange addresses as private data, and detect from the end
//! of the connection that the peer has failed. An MPA connection needs an RDMAP stream at each end. So the identifier
//! creates a queue pair, to which no program can post and which gives the peer no access.

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

/// The context of queue pairs that no program can access. Its events are never read.
fn context() -> io::Result<&'static Arc<Context>> {
    static CONTEXT: PerProcess<OnceLock<Arc<Context>>> = PerProcess::new(OnceLock::new);
    let held = CONTEXT.get();
    if held.get().is_none() {
        // An error is not stored: a descriptor may be free the next time.
        let _another_thread_was_faster = held.set(Context::open()?);
    }
    held.get().ok_or_else(|| os(libc::EMFILE))
}

/// Creates a queue pair without requests, receives and protection domain.
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
    /// Returns the queue pair that `find_qp` finds. If there is none with this number, and the number is not 0, creates a
    /// queue pair that the program cannot access.
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
        state.private_qp = Some(Arc::clone(&made));
        Ok(Some((made, false)))
    }

    /// Moves the queue pair to RTS, if there is one that this file created. The passive side does so when it accepts.
    pub(super) fn ready_private_qp(&self) {
        let Some(qp) = self.lock().private_qp.clone() else {
            return;
        };
        self.make_ready(&qp, true, 0, 0);
        // The connection has to survive a short network outage, but these programs set no retries because they send
        // no messages.
        qp.with_attr(|attr| attr.retry_cnt = 7);
    }

    /// Moves the queue pair of the active side to RTS, if this file created it (`rdma_establish(3)`). In RTS the queue pair sends
    /// its first message. When that message arrives, the passive side reports that the connection is established.
    ///
    /// `EINVAL` if the peer has not accepted the connection.
    pub fn establish(&self) -> io::Result<()> {
        let phase = self.lock().phase;
        match phase {
            Phase::Connected => self.ready_private_qp(),
            // The peer has disconnected meanwhile, which an event reports.
            Phase::Over => {}
            _ => return Err(os(libc::EINVAL)),
        }
        Ok(())
    }
}
