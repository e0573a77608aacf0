//! Asynchronous events.

use std::ffi::c_int;

use anywarp_engine::channel::Channel;
use anywarp_engine::context::Context;
use anywarp_engine::events::{AsyncItem, event};

use super::handle::{c_object, known, live};
use super::object::{Acks, ContextObject, CqObject, QpObject, SrqObject};
use super::wait::block_on;
use crate::cancel_safe::Held;
use crate::entry;
use crate::ffi::{Errno, fail, or};
use anywarp_verbs_sys::verbs::*;

/// The object of an event.
enum About {
    Cq,
    Srq,
    Qp,
    Port,
}

impl About {
    fn of(kind: ibv_event_type) -> Self {
        match kind {
            event::CQ_ERR => Self::Cq,
            event::SRQ_LIMIT_REACHED | event::SRQ_ERR => Self::Srq,
            event::QP_FATAL..=event::SQ_DRAINED | event::QP_LAST_WQE_REACHED => Self::Qp,
            _ => Self::Port,
        }
    }
}

/// Converts the event to the C format, and counts it as delivered for its object.
///
/// # Safety
/// The object of the event is live.
unsafe fn deliver(item: &AsyncItem) -> ibv_async_event {
    let mut c = ibv_async_event {
        event_type: item.event,
        ..ibv_async_event::default()
    };
    // SAFETY: the object is live (guaranteed by the caller).
    let acks: &Acks = unsafe {
        match About::of(item.event) {
            About::Cq => {
                c.element.cq = c_object(item.c_object);
                &known::<CqObject, ibv_cq>(c_object(item.c_object)).async_acks
            }
            About::Srq => {
                c.element.srq = c_object(item.c_object);
                &known::<SrqObject, ibv_srq>(c_object(item.c_object)).acks
            }
            About::Qp => {
                c.element.qp = c_object(item.c_object);
                &known::<QpObject, ibv_qp>(c_object(item.c_object)).acks
            }
            About::Port => {
                c.element.port_num = 1;
                return c;
            }
        }
    };
    acks.delivered();
    c
}

/// Takes the next asynchronous event. Returns `None` if there is none and the caller has to wait.
///
/// # Safety
/// `out` is valid for writes.
unsafe fn try_event(
    events: &Channel<AsyncItem>,
    out: *mut ibv_async_event,
) -> Result<Option<c_int>, Errno> {
    // SAFETY: destroying an object removes its events from the queue under the lock that is held here, so the object is live. From
    // here on, destroying the object waits for the acknowledgement.
    let taken = events.pop_with(|item| unsafe { deliver(item) });
    match taken {
        Some((_, c)) => {
            // SAFETY: the caller passes a valid pointer.
            unsafe { out.write(c) };
            Ok(Some(0))
        }
        None if events.is_nonblocking() => Err(libc::EAGAIN),
        None => Ok(None),
    }
}

/// `ibv_get_async_event(3)`: waits for an event, unless the program made `async_fd` non-blocking.
///
/// This is not an `entry!`, because `entry!` calls `catch_unwind`: the wait is a cancellation point, and cancellation unwinds the
/// stack. The thread holds a reference to the event queue, because a program may close the device while a thread waits here.
///
/// # Safety
/// `context` is null or open, `out` is null or valid for writes.
// SAFETY: the symbol is defined by this library: link/symbols.txt lists it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    out: *mut ibv_async_event,
) -> c_int {
    if out.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: upheld by the caller.
    let events = match unsafe { ContextObject::live(context) } {
        Ok(context) => Held::new(&context.engine.events),
        Err(e) => return fail(e, -1),
    };
    loop {
        let done = or("ibv_get_async_event", Some(-1), || {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { try_event(events.get(), out) }
        });
        let done = match done {
            Some(done) => done,
            None if block_on(events.get().raw_fd()) => continue,
            None => fail(libc::EINTR, -1),
        };
        events.release();
        return done;
    }
}

entry! {
    /// `ibv_ack_async_event(3)`.
    ///
    /// # Safety
    /// `event` is null or came from `ibv_get_async_event`, and its object is live.
    unsafe fn ibv_ack_async_event(event: *mut ibv_async_event), nothing, {
        // SAFETY: the caller passes null or a valid pointer.
        let Some(event) = (unsafe { event.as_ref() }) else { return Ok(()) };
        // SAFETY: this is the member that `ibv_get_async_event` wrote for this type; its object is live (guaranteed by the caller).
        unsafe {
            match About::of(event.event_type) {
                About::Cq => {
                    let queue = live::<CqObject, _>(event.element.cq)?;
                    let show = |sum| queue.c.set(|c| c.async_events_completed = sum);
                    queue.async_acks.acknowledged(1, show);
                }
                About::Srq => {
                    let srq = live::<SrqObject, _>(event.element.srq)?;
                    srq.acks.acknowledged(1, |sum| srq.c.set(|c| c.events_completed = sum));
                }
                About::Qp => {
                    let qp = live::<QpObject, _>(event.element.qp)?;
                    let show = |sum| qp.c.set(|c| c.qp_base.events_completed = sum);
                    qp.acks.acknowledged(1, show);
                }
                About::Port => {}
            }
        }
        Ok(())
    }
}

/// Removes from the queue the events of an object that is being destroyed.
pub(crate) fn forget_events(device: &Context, object: usize) {
    device.events.purge(|event| event.c_object == object);
}
