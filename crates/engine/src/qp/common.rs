//! What stream and datagram queue pairs of the engine have in common: number, C objects, events and injected faults.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anywarp_core::verbs::event::AsyncEvent;

use crate::connect::qpn_port::Port;
use crate::context::Context;
use crate::events::{AsyncItem, event};
use crate::fault::Faults;
use crate::qos::Flow;
use crate::reactor::DelayedAck;

/// The part of a queue pair that does not depend on its kind.
pub struct Common {
    pub(crate) context: Arc<Context>,
    pub(crate) port: Arc<Port>,
    pub(crate) number: u32,
    /// Address of the C object; 0 for a queue pair that no program sees.
    pub(crate) c_object: AtomicUsize,
    /// Address of the shared receive queue's C object.
    srq_c_object: Option<Arc<AtomicUsize>>,
    /// Whether the engine has this queue pair in its list of delayed acknowledgements.
    ack_scheduled: AtomicBool,
    /// Injected faults.
    pub(crate) faults: Option<Box<Faults>>,
    /// The queue pair as a sender on a simulated link with virtual lanes (`crate::qos`).
    pub(crate) flow: Option<Box<Flow>>,
}

impl std::fmt::Debug for Common {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "0x{:06x}", self.number)
    }
}

impl Common {
    /// Allocates a queue pair number of the TCP and UDP port `wanted`, or of a port that the engine chooses if `wanted` is 0.
    pub(crate) fn allocate(
        context: &Arc<Context>,
        srq_c_object: Option<Arc<AtomicUsize>>,
        wanted: u16,
    ) -> io::Result<Self> {
        let (port, number) = match wanted {
            0 => Port::allocate(context.engine),
            wanted => Port::allocate_at(context.engine, wanted),
        }?;
        Ok(Self {
            context: Arc::clone(context),
            port,
            number,
            c_object: AtomicUsize::new(0),
            srq_c_object,
            ack_scheduled: AtomicBool::new(false),
            faults: Faults::of(context.engine, number).map(Box::new),
            flow: Flow::of(context.engine).map(Box::new),
        })
    }

    /// Frees the number, which another queue pair may get from now on.
    pub(crate) fn release_number(&self) {
        self.port.release(self.number);
    }

    /// Schedules an acknowledgement, and corked requests (kept back to be sent together with the next ones), to be sent by
    /// the next thread that polls. `me`: the queue pair.
    pub(crate) fn schedule_ack<T: DelayedAck + 'static>(
        &self,
        me: impl FnOnce() -> Option<Arc<T>>,
    ) {
        if !self.ack_scheduled.swap(true, Ordering::AcqRel)
            && let Some(me) = me()
        {
            self.context.engine.schedule_ack(me);
        }
    }

    /// Called when the scheduled acknowledgement is about to be sent.
    pub(crate) fn take_scheduled_ack(&self) {
        self.ack_scheduled.store(false, Ordering::Release);
    }

    /// Raises an asynchronous event (`ibv_get_async_event(3)`).
    pub(crate) fn raise_event(&self, what: AsyncEvent) {
        let number = match what {
            AsyncEvent::QpFatal => event::QP_FATAL,
            AsyncEvent::QpRequest => event::QP_REQ_ERR,
            AsyncEvent::QpAccess => event::QP_ACCESS_ERR,
            AsyncEvent::Established => event::COMM_EST,
            AsyncEvent::SqDrained => event::SQ_DRAINED,
            AsyncEvent::LastWqe => event::QP_LAST_WQE_REACHED,
            AsyncEvent::SrqLimit => event::SRQ_LIMIT_REACHED,
            // These are for the connection manager.
            AsyncEvent::Started | AsyncEvent::PeerGone => return,
        };
        let c_object = match (what, &self.srq_c_object) {
            (AsyncEvent::SrqLimit, Some(srq)) => srq.load(Ordering::Relaxed),
            _ => self.c_object.load(Ordering::Relaxed),
        };
        if c_object == 0 {
            // The queue pair of a connection for which the program has none (`cm::private_qp`).
            return;
        }
        self.context.events.push(AsyncItem {
            event: number,
            c_object,
        });
    }
}
