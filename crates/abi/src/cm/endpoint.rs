//! Endpoints: `rdma_create_ep(3)`, which performs all steps before connecting, and `rdma_get_request(3)`.

use std::ffi::c_int;

use anywarp_engine::cm::CmId;

use super::address::bytes_of;
use super::connect::{bind, resolve};
use super::event::{rdma_get_cm_event, step};
use super::id::{IdObject, acknowledge, create_id, destroy_id, migrate};
use super::qp::{create_plain_qp, destroy_qp, destroy_srq};
use crate::entry;
use crate::ffi::{Errno, arg, minus_one, null, put};
use crate::verbs::handle::{known, live};
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// Prepares a new identifier with the arguments of `rdma_create_ep`.
///
/// # Safety
/// The requirements of `rdma_create_ep` apply. `id` is live.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: `id` is live and `init` is null or valid (guaranteed by the caller).
    let (object, init) = unsafe { (live::<IdObject, _>(id)?, init.as_mut()) };
    if info.ai_flags & RAI_PASSIVE != 0 {
        // SAFETY: the addresses of `info` are valid (guaranteed by the caller).
        unsafe { bind(object, info.ai_src_addr) }?;
        // The program registers memory with this domain before the first request arrives.
        if !pd.is_null() {
            object.c.set(|c| c.pd = pd);
        }
        *object.template.lock() = init.copied();
        return Ok(());
    }
    // SAFETY: the addresses of `info` are valid (guaranteed by the caller).
    unsafe { resolve(object, info.ai_src_addr, info.ai_dst_addr) }?;
    step(object, CmId::resolve_route)?;
    if let Some(init) = init {
        init.qp_type = info.ai_qp_type.cast_unsigned();
        // SAFETY: upheld by the caller.
        unsafe { create_plain_qp(id, pd, init) }?;
    }
    let len = u8::try_from(info.ai_connect_len).unwrap_or(u8::MAX);
    // SAFETY: the data is null or has the length `len` (guaranteed by the caller).
    let data = unsafe { bytes_of(info.ai_connect, len) };
    if !data.is_empty() {
        object.set_connect_data(data);
    }
    Ok(())
}

entry! {
    /// `rdma_create_ep(3)`.
    ///
    /// # Safety
    /// `id` is null or valid for writes. `res` is null or came from `rdma_getaddrinfo`. `pd` and the objects in `init` are
    /// null or live.
    unsafe fn rdma_create_ep(
        id: *mut *mut rdma_cm_id, res: *mut rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr,
    ) -> c_int, minus_one, {
        if id.is_null() {
            return Err(libc::EINVAL);
        }
        let none = std::ptr::null_mut();
        // SAFETY: upheld by the caller; the created identifier is live, and no other code refers to it.
        unsafe {
            let info = arg(res)?;
            let (space, kind) = (info.ai_port_space.cast_unsigned(), info.ai_qp_type.cast_unsigned());
            let made = create_id(none, none.cast(), space, Some(kind))?;
            if let Err(e) = prepare(made, info, pd, init) {
                destroy_ep(made)?;
                return Err(e);
            }
            put(id, made)?;
        }
        Ok(0)
    }
}

/// Destroys an identifier with its queue pair and its shared receive queue.
///
/// # Safety
/// `id` is null or points to a live object, and is not used again.
unsafe fn destroy_ep(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    if let Ok(object) = unsafe { live::<IdObject, _>(id) } {
        destroy_qp(object);
        destroy_srq(object);
    }
    // SAFETY: upheld by the caller.
    unsafe { destroy_id(id) }
}

entry! {
    /// `rdma_destroy_ep(3)`.
    ///
    /// # Safety
    /// `id` is null or came from `rdma_create_ep` or `rdma_get_request`, and is not used again.
    unsafe fn rdma_destroy_ep(id: *mut rdma_cm_id), nothing, {
        // SAFETY: upheld by the caller.
        unsafe { destroy_ep(id) }
    }
}

/// Acknowledges the last event of a synchronous listener, and returns the channel that receives its connect requests.
fn request_channel(listen: &IdObject) -> Result<*mut rdma_event_channel, Errno> {
    if !listen.is_synchronous() {
        return Err(libc::EINVAL);
    }
    listen.drop_event();
    Ok(listen.channel())
}

/// Makes the identifier of a connect request synchronous, and creates a queue pair for it if the listener has a template.
///
/// # Safety
/// `made` is live, and no other code refers to it.
unsafe fn equip(listen: &IdObject, made: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: the identifier is live (guaranteed by the caller).
    let child = unsafe { known::<IdObject, _>(made) };
    // SAFETY: a null channel is valid and makes the identifier synchronous.
    unsafe { migrate(child, std::ptr::null_mut()) }?;
    let template = *listen.template.lock();
    if let Some(mut init) = template {
        let (pd, qp_type) = (listen.c.get(|c| c.pd), child.c.get(|c| c.qp_type));
        init.qp_type = qp_type;
        // SAFETY: the program keeps the objects of the template, and the listener's protection domain, live as long as the listener.
        unsafe { create_plain_qp(made, pd, &mut init) }?;
    }
    Ok(())
}

/// Takes the identifier of a connect request and prepares it for the program. If this fails, the request is rejected.
///
/// # Safety
/// `listen` is live. `event` is an unacknowledged event of its channel.
unsafe fn take_request(
    listen: *mut rdma_cm_id,
    event: *mut rdma_cm_event,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: upheld by the caller.
    let (parent, kind, status, made) = unsafe {
        let event = &*event;
        (
            known::<IdObject, _>(listen),
            event.event,
            event.status,
            event.id,
        )
    };
    if status != 0 || kind != RDMA_CM_EVENT_CONNECT_REQUEST {
        // SAFETY: the event is not acknowledged yet (guaranteed by the caller).
        unsafe { acknowledge(event) }?;
        return Err(if status < 0 { -status } else { libc::EINVAL });
    }
    // SAFETY: the identifier of the request is live, and the program does not know it yet.
    if let Err(e) = unsafe { equip(parent, made) } {
        // SAFETY: the event is not acknowledged yet, and no other code refers to the identifier.
        unsafe {
            acknowledge(event)?;
            destroy_ep(made)?;
        }
        return Err(e);
    }
    // SAFETY: as above.
    unsafe { known::<IdObject, _>(made) }
        .c
        .set(|c| c.event = event);
    Ok(made)
}

/// `rdma_get_request(3)`: returns the next connect request of a synchronous listener.
///
/// This is not an `entry!`, because `entry!` calls `catch_unwind`: the wait is a cancellation point, and cancellation unwinds the
/// stack.
///
/// # Safety
/// `listen` is null or points to a live identifier. `id` is null or valid for writes.
// SAFETY: the symbol is defined by this library: link/symbols.txt lists it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_request(
    listen: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    let channel = null("rdma_get_request", || {
        if id.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        request_channel(unsafe { live(listen) }?)
    });
    let mut event = std::ptr::null_mut();
    // SAFETY: the listener's channel is live as long as the listener.
    if channel.is_null() || unsafe { rdma_get_cm_event(channel, &raw mut event) } != 0 {
        return -1;
    }
    minus_one("rdma_get_request", || {
        // SAFETY: the event was taken above; `id` is not null, so it is valid (guaranteed by the caller).
        unsafe { put(id, take_request(listen, event)?) }?;
        Ok(0)
    })
}
