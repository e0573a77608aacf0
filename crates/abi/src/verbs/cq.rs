//! Completion channels and completion queues.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use anywarp_engine::channel::Channel;
use anywarp_engine::objects::CompletionQueue;

use super::async_event::forget_events;
use super::handle::{CStruct, c_object, into_c, known, live, live_if_any, returned, set_c_object};
use super::object::{Acks, ChannelObject, ContextObject, CqObject, PdObject, Users};
use super::wait::block_on;
use crate::cancel_safe::Held;
use crate::entry;
use crate::ffi::{Errno, fail, misuse, or, os_errno};
use crate::profile::{Counted, CountedObject, profile};
use anywarp_verbs_sys::verbs::*;

entry! {
    /// `ibv_create_comp_channel(3)`.
    ///
    /// # Safety
    /// `context` is null or points to an open context.
    unsafe fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel, null, {
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }?;
        let channel = Channel::new().map_err(|e| os_errno(&e))?;
        let c = ibv_comp_channel { context, fd: channel.raw_fd(), refcnt: 0 };
        Ok(into_c(ChannelObject {
            c: CStruct::new(c),
            engine: Arc::new(channel),
            users: Users::default(),
        }))
    }
}

entry! {
    /// `ibv_destroy_comp_channel(3)`: EBUSY while a completion queue uses it.
    ///
    /// # Safety
    /// `channel` came from `ibv_create_comp_channel` and is not used after this returns 0.
    unsafe fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(channel) = unsafe { returned::<ChannelObject, _>(channel) }? else { return Ok(()) };
        if channel.users.any() {
            return Err(libc::EBUSY);
        }
        drop(channel.take());
        Ok(())
    }
}

/// Creates a completion queue.
///
/// # Safety
/// `context` is null or open, `channel` is null or points to a live object.
pub(crate) unsafe fn create_cq(
    context: *mut ibv_context,
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    domain: Option<&PdObject>,
) -> Result<*mut ibv_cq, Errno> {
    // SAFETY: upheld by the caller.
    let (device, events) = unsafe {
        (
            ContextObject::live(context)?,
            live_if_any::<ChannelObject, _>(channel)?,
        )
    };
    // SAFETY: the context is live, as was checked above.
    let vectors = unsafe { (*context).num_comp_vectors };
    if !(0..vectors).contains(&vector) || cqe > profile().max_cqe {
        return Err(libc::EINVAL);
    }
    let counted = CountedObject::take(Counted::Cq)?;
    let engine = CompletionQueue::new(&device.engine, cqe, events.map(|e| Arc::clone(&e.engine)))
        .map_err(|e| misuse("ibv_create_cq", &e))?;
    let c = ibv_cq_ex {
        context,
        channel,
        cq_context,
        cqe: c_int::try_from(cqe).unwrap_or(c_int::MAX),
        ..ibv_cq_ex::default()
    };
    if let Some(domain) = domain {
        domain.engine.enter();
    }
    let cq: *mut ibv_cq = into_c(CqObject {
        c: CStruct::new(c),
        engine: Arc::clone(&engine),
        comp_acks: Acks::default(),
        async_acks: Acks::default(),
        users: Users::default(),
        _channel: events.map(|e| e.users.enter()),
        domain: domain.map(|domain| Arc::clone(&domain.engine)),
        current: UnsafeCell::new(None),
        _counted: counted,
    });
    set_c_object(&engine.c_object, cq);
    Ok(cq)
}

entry! {
    /// `ibv_create_cq(3)`.
    ///
    /// # Safety
    /// `context` is null or open, `channel` is null or points to a live object.
    unsafe fn ibv_create_cq(
        context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int,
    ) -> *mut ibv_cq, null, {
        // SAFETY: upheld by the caller.
        unsafe { create_cq(context, u32::try_from(cqe).unwrap_or(0), cq_context, channel, vector, None) }
    }
}

entry! {
    /// `ibv_destroy_cq(3)`: EBUSY while a queue pair uses it. Waits until all events that were delivered to the program are
    /// acknowledged.
    ///
    /// # Safety
    /// `cq` came from `ibv_create_cq` and is not used after this returns 0.
    unsafe fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(queue) = unsafe { returned::<CqObject, _>(cq) }? else { return Ok(()) };
        if queue.users.any() {
            return Err(libc::EBUSY);
        }
        if let Some(channel) = &queue.engine.channel {
            channel.purge(|object| *object == cq.addr());
        }
        forget_events(queue.device(), cq.addr());
        queue.comp_acks.wait();
        queue.async_acks.wait();
        if let Some(domain) = &queue.domain {
            domain.leave();
        }
        drop(queue.take());
        Ok(())
    }
}

entry! {
    /// `ibv_resize_cq(3)`.
    ///
    /// # Safety
    /// `cq` is null or points to a live object.
    unsafe fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int, errno, {
        let size = u32::try_from(cqe).map_err(|_negative| libc::EINVAL)?;
        if cq.is_null() || size == 0 || size > profile().max_cqe {
            return Err(libc::EINVAL);
        }
        if !profile().has.resize_cq {
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: upheld by the caller.
        let queue = unsafe { live::<CqObject, _>(cq) }?;
        queue.engine.core.resize(size as usize).map_err(|_too_small| libc::EINVAL)?;
        queue.c.set(|c| c.cqe = cqe);
        Ok(())
    }
}

/// Takes the next event of a completion channel. Returns `None` if there is none and the caller has to wait.
///
/// # Safety
/// `cq` and `cq_context` are valid for writes.
unsafe fn try_event(
    events: &Channel<usize>,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> Result<Option<c_int>, Errno> {
    let taken = events.pop_with(|object| {
        let found: *mut ibv_cq = c_object(*object);
        // SAFETY: destroying a queue removes its events from the channel under the lock that is held here, so the queue is
        // live. From here on, destroying it waits until this event is acknowledged.
        let queue = unsafe { known::<CqObject, _>(found) };
        queue.comp_acks.delivered();
        (found, queue.c.get(|c| c.cq_context))
    });
    let Some((_, (found, its_context))) = taken else {
        return if events.is_nonblocking() {
            Err(libc::EAGAIN)
        } else {
            Ok(None)
        };
    };
    // SAFETY: valid for writes (guaranteed by the caller).
    unsafe {
        cq.write(found);
        cq_context.write(its_context);
    }
    Ok(Some(0))
}

/// `ibv_get_cq_event(3)`: waits for an event, unless the program made the channel's descriptor non-blocking.
///
/// The function is not defined by `entry!`, which would execute the wait inside `catch_unwind`:
/// the wait is a cancellation point, and cancellation unwinds the stack. The thread holds a
/// reference to the event queue, because a program may destroy the channel while a thread waits.
///
/// # Safety
/// `channel` is live when this is called. The others are valid for writes.
// SAFETY: the symbol is defined by this library: link/symbols.txt lists it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    if cq.is_null() || cq_context.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: upheld by the caller.
    let events = match unsafe { live::<ChannelObject, _>(channel) } {
        Ok(channel) => Held::new(&channel.engine),
        Err(e) => return fail(e, -1),
    };
    let mut waited = false;
    loop {
        let done = or("ibv_get_cq_event", Some(-1), || {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { try_event(events.get(), cq, cq_context) }
        });
        let done = match done {
            Some(done) => done,
            None => {
                waited = true;
                if block_on(events.get().raw_fd()) {
                    continue;
                }
                fail(libc::EINTR, -1)
            }
        };
        events.get().note_wait(waited);
        events.release();
        return done;
    }
}

entry! {
    /// `ibv_ack_cq_events(3)`.
    ///
    /// # Safety
    /// `cq` is null or points to a live object.
    unsafe fn ibv_ack_cq_events(cq: *mut ibv_cq, n: c_uint), nothing, {
        // SAFETY: upheld by the caller.
        let queue = unsafe { live_if_any::<CqObject, _>(cq) };
        if let Ok(Some(queue)) = queue {
            let show = |sum| queue.c.set(|c| c.comp_events_completed = sum);
            queue.comp_acks.acknowledged(n.into(), show);
        }
        Ok(())
    }
}
