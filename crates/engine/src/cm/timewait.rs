//! The last event of a connection: `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
//!
//! On InfiniBand and RoCE, packets of a connection may be in the network for some time after its end, and the event reports that this time
//! is over. Programs wait for it before they release a connection: tgt does, with iSER. A TCP connection has no such packets, but
//! the event does not follow at once: a program that destroys its identifier soon after the connection has ended does not get it on
//! hardware either.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{CmId, EventKind, State, TIMEOUT};
use crate::clock;
use crate::config::{Face, config};
use crate::reactor::Source;

impl CmId {
    /// Records that the program disconnects.
    pub(super) fn leaves(&self, state: &mut State) {
        state.timewait.leaves = true;
        self.begin_timewait(state);
    }

    /// Records that `RDMA_CM_EVENT_DISCONNECTED` was raised.
    pub(super) fn has_ended(&self, state: &mut State) {
        state.timewait.ended = true;
        self.begin_timewait(state);
    }

    /// Sets the timer of the event, once the connection has ended at both ends. A program that takes no events of the identifier gets none,
    /// and on a device of type iWARP there is no such event.
    fn begin_timewait(&self, state: &mut State) {
        let timewait = &mut state.timewait;
        let is_due =
            timewait.leaves && timewait.ended && !timewait.over && timewait.timer.is_none();
        let is_connection = !self.is_datagram && config().face != Face::Iwarp;
        let is_read = !self.is_synchronous.load(Ordering::Relaxed)
            && self.c_object.load(Ordering::Relaxed) != 0;
        if !is_due || !is_read || !is_connection || state.destroyed {
            return;
        }
        // 0 means that acknowledgements are awaited without limit.
        let timeout = state.ack_timeout.filter(|t| *t != 0).unwrap_or(TIMEOUT);
        let time = Duration::from_nanos(4096 << timeout);
        let token = self.engine.reserve(Arc::new(Timer(self.me.clone())));
        state.timewait.timer = Some(token);
        self.engine.deadline(token, clock::now() + time);
    }

    /// Removes the timer of the event.
    pub(super) fn end_timewait(&self, state: &mut State) {
        if let Some(token) = state.timewait.timer.take() {
            self.engine.remove(token, None);
        }
    }

    /// Raises the event.
    fn timewait_over(&self) {
        let mut state = self.lock();
        if state.timewait.timer.is_none() {
            return;
        }
        self.end_timewait(&mut state);
        state.timewait.over = true;
        self.push_locked(&state, |_| {}, EventKind::TimewaitExit, 0);
    }
}

/// The timer of an identifier.
struct Timer(Weak<CmId>);

impl Source for Timer {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.timewait_over();
        }
    }
}
