//! Events: converting the engine's events to those of the C interface, and waiting for them.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use anywarp_engine::cm::{CmId, Event, EventChannel, EventKind};

use super::address::vector_to;
use super::device::{Shared, shared};
use super::id::{ChannelObject, EventObject, IdObject, acknowledge, c_id, make_id};
use crate::cancel_safe::Held;
use crate::entry;
use crate::ffi::{Errno, fail, or, os_errno};
use crate::verbs::handle::{known, live};
use crate::verbs::wait::block_on;
use anywarp_verbs_sys::cm::*;

/// Finds the C identifiers of an event and counts the event as delivered. For a connect request, creates the new identifier.
///
/// Called under the lock of the channel's queue, so a thread that destroys an identifier either removes the event or waits for its
/// acknowledgement.
///
/// `channel` is the channel that had the event. The engine's identifier of a connect request belongs to the same channel: if the
/// listener moves to another channel, the identifier moves together with the event. The C structure of the listener may already name
/// the other channel, because a thread in `rdma_migrate_id` changes the structure before the events move.
///
/// # Safety
/// The identifiers of the event are live.
unsafe fn deliver(
    event: &Event,
    channel: *mut rdma_event_channel,
) -> (*mut rdma_cm_id, *mut rdma_cm_id) {
    let owner = c_id(event.listener.as_ref().unwrap_or(&event.id));
    // SAFETY: an identifier is live while its events are queued, because destroying it removes them.
    let object = unsafe { known::<IdObject, _>(owner) };
    object.acks.delivered();
    if event.listener.is_none() {
        return (owner, std::ptr::null_mut());
    }
    let (context, qp_type) = object.c.get(|c| (c.context, c.qp_type));
    let made = make_id(Arc::clone(&event.id), channel, context, qp_type, false);
    (made, owner)
}

/// Creates the C event. This cannot fail, because the event was counted as delivered: the program has to get it, or it could not
/// acknowledge it, and `rdma_destroy_id` would wait for ever.
///
/// # Safety
/// The identifiers are live, because the event was counted as delivered.
unsafe fn c_event(
    event: Event,
    id: *mut rdma_cm_id,
    listen_id: *mut rdma_cm_id,
    device: &Shared,
) -> *mut rdma_cm_event {
    // SAFETY: the identifier is live (guaranteed by the caller).
    let object = unsafe { known::<IdObject, _>(id) };
    object.show_device(device);
    object.show_addresses();
    if matches!(
        event.kind,
        EventKind::RouteResolved | EventKind::ConnectRequest
    ) {
        object.show_path();
    }
    if event.kind == EventKind::Established {
        object.show_qp_state();
    }
    let mut made = Box::new(EventObject {
        c: rdma_cm_event {
            id,
            listen_id,
            event: event.kind as rdma_cm_event_type,
            status: event.status,
            ..rdma_cm_event::default()
        },
        data: event.private_data,
    });
    let private_data: *const c_void = if made.data.is_empty() {
        std::ptr::null()
    } else {
        made.data.as_ptr().cast()
    };
    let private_data_len = u8::try_from(made.data.len()).unwrap_or(u8::MAX);
    if event.kind == EventKind::User {
        // The union member `arg`, which older headers do not have, occupies the first 64 bits.
        made.c.param.conn.private_data = std::ptr::with_exposed_provenance(event.context);
    } else if object.is_datagram() {
        let mut ud = rdma_ud_param {
            private_data,
            private_data_len,
            ..rdma_ud_param::default()
        };
        if let Some(peer) = event.peer {
            ud.qp_num = peer.qpn;
            ud.qkey = peer.qkey;
            ud.ah_attr = vector_to(peer.addr, event.id.local());
        }
        if event.context != 0 {
            // This is the `context` argument of `rdma_join_multicast`.
            ud.private_data = std::ptr::with_exposed_provenance(event.context);
        }
        made.c.param.ud = ud;
    } else {
        made.c.param.conn = rdma_conn_param {
            private_data,
            private_data_len,
            responder_resources: event.responder_resources,
            initiator_depth: event.initiator_depth,
            retry_count: 7,
            rnr_retry_count: 7,
            ..rdma_conn_param::default()
        };
    }
    Box::into_raw(made).cast()
}

/// Takes the next event of a channel. Returns `None` if there is none and the caller has to wait. `channel` is the C pointer of the
/// channel and is not dereferenced.
///
/// # Safety
/// `out` is valid for writes.
unsafe fn try_event(
    channel: *mut rdma_event_channel,
    events: &EventChannel,
    out: *mut *mut rdma_cm_event,
) -> Result<Option<c_int>, Errno> {
    if !events.is_empty() {
        // The first event of a process opens the device, which may fail because there are no descriptors. The event is still in the
        // channel then, and a later call returns it.
        let device = shared()?;
        // SAFETY: the identifiers of a queued event are live.
        let taken = events.pop_with(|event| unsafe { deliver(event, channel) });
        if let Some((event, (id, listen_id))) = taken {
            // SAFETY: the event was counted as delivered; `out` is valid (guaranteed by the caller).
            unsafe { out.write(c_event(event, id, listen_id, device)) };
            return Ok(Some(0));
        }
        // Another thread has taken the event meanwhile.
    }
    if events.is_nonblocking() {
        return Err(libc::EAGAIN);
    }
    Ok(None)
}

/// `rdma_get_cm_event(3)`: waits for an event, unless the program made the channel's descriptor non-blocking.
///
/// This function is not defined by `entry!`, which calls `catch_unwind`: the wait is a cancellation
/// point, cancellation unwinds the stack, and this must not be caught. The thread holds a reference
/// to the event queue, because a program may destroy the channel while a thread waits for an event
/// of it (rping does). That thread then waits forever, as it would in a `read` of the descriptor.
///
/// # Safety
/// `channel` is null or points to an object that is live when this is called. `event` is null or valid for writes.
// SAFETY: the symbol is defined by this library: link/symbols.txt lists it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    if event.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: upheld by the caller.
    let events = match unsafe { live::<ChannelObject, _>(channel) } {
        Ok(channel) => Held::new(&channel.engine),
        Err(e) => return fail(e, -1),
    };
    loop {
        let done = or("rdma_get_cm_event", Some(-1), || {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { try_event(channel, events.get(), event) }
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
    /// `rdma_ack_cm_event(3)`.
    ///
    /// # Safety
    /// `event` is null or came from `rdma_get_cm_event`, and is not used again.
    unsafe fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int, minus_one, {
        // SAFETY: upheld by the caller; identifiers are live until their events are acknowledged.
        unsafe { acknowledge(event) }.map(|()| 0)
    }
}

// ---------------------------------------------------------------------- steps of synchronous identifiers

/// Completes a step of connecting, such as the resolution of an address. A synchronous identifier
/// waits for the event that reports the step, and stores the event.
pub(super) fn complete(id: &IdObject) -> Result<(), Errno> {
    if !id.is_synchronous() {
        return Ok(());
    }
    id.drop_event();
    let mut event = std::ptr::null_mut();
    // SAFETY: a synchronous identifier has a channel of its own.
    if unsafe { rdma_get_cm_event(id.channel(), &raw mut event) } != 0 {
        return Err(crate::ffi::last_errno());
    }
    id.c.set(|c| c.event = event);
    // SAFETY: the event was taken above and is acknowledged later.
    let (kind, status) = unsafe { ((*event).event, (*event).status) };
    match (kind, status) {
        (_, 0) => Ok(()),
        (RDMA_CM_EVENT_REJECTED, _) => Err(libc::ECONNREFUSED),
        (_, status) => Err(status.abs()),
    }
}

/// Opens the device if a synchronous identifier will wait for an event, which it cannot get without the device.
///
/// This is called before the step begins. If the device could not be opened after the step had begun, the event of this step would stay
/// in the channel, and the next step would take it for its own.
pub(super) fn prepare_wait(id: &IdObject) -> Result<(), Errno> {
    if id.is_synchronous() {
        shared()?;
    }
    Ok(())
}

/// Runs a step of the engine. A synchronous identifier then waits for the event.
pub(super) fn step(
    id: &IdObject,
    step: impl FnOnce(&CmId) -> std::io::Result<()>,
) -> Result<(), Errno> {
    prepare_wait(id)?;
    step(&id.engine).map_err(|e| os_errno(&e))?;
    complete(id)
}
