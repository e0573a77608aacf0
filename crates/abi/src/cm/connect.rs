//! The steps of a connection (bind, resolve, listen, connect, accept, reject, disconnect), and multicast.

use std::ffi::{c_int, c_void};

use anywarp_core::bounds;
use anywarp_engine::cm::{CmId, ConnParam, PortSpace};
use anywarp_engine::gids;
use libc::sockaddr;

use super::address::{address_of, bytes_of, c_address, needed_address};
use super::device::shared;
use super::event::{complete, prepare_wait, step};
use super::id::IdObject;
use super::qp::take_over_qp;
use crate::entry;
use crate::ffi::{Errno, arg, os_errno};
use crate::verbs::handle::{known, live};
use crate::verbs::object::QpObject;
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// Binds an identifier to an address.
///
/// # Safety
/// `addr` is null or points to an address.
pub(super) unsafe fn bind(id: &IdObject, addr: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let address = unsafe { needed_address(addr) }?;
    // The device is opened first: if this fails, the identifier is not bound, and the program may try again.
    let device = gids::names_device(address.ip()).then(shared).transpose()?;
    id.engine.bind(address).map_err(|e| os_errno(&e))?;
    if let Some(device) = device {
        id.show_device(device);
    }
    id.show_addresses();
    Ok(())
}

entry! {
    /// `rdma_bind_addr(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. `addr` is null or points to an address.
    unsafe fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { bind(live(id)?, addr) }?;
        Ok(0)
    }
}

/// Resolves an address: binds the identifier to the device that can reach the address.
///
/// # Safety
/// `src` and `dst` are null or point to addresses.
pub(super) unsafe fn resolve(
    id: &IdObject,
    src: *const sockaddr,
    dst: *const sockaddr,
) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let (from, dst) = unsafe { (address_of(src), needed_address(dst)?) };
    if from.is_none() && !src.is_null() {
        return Err(libc::EINVAL);
    }
    prepare_wait(id)?;
    // The program may read the address when this call has returned, and when an event reports that it was not resolved.
    let before = id.show_destination(c_address(dst));
    if let Err(e) = id.engine.resolve_addr(from, dst) {
        id.show_destination(before);
        return Err(os_errno(&e));
    }
    complete(id)
}

entry! {
    /// `rdma_resolve_addr(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. `src` and `dst` are null or point to addresses.
    unsafe fn rdma_resolve_addr(
        id: *mut rdma_cm_id, src: *mut sockaddr, dst: *mut sockaddr, _timeout_ms: c_int,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { resolve(live(id)?, src, dst) }?;
        Ok(0)
    }
}

entry! {
    /// `rdma_resolve_route(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        step(unsafe { live(id) }?, CmId::resolve_route)?;
        Ok(0)
    }
}

entry! {
    /// `rdma_listen(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let id = unsafe { live::<IdObject, _>(id) }?;
        id.engine.listen(backlog).map_err(|e| os_errno(&e))?;
        id.show_addresses();
        Ok(0)
    }
}

/// Converts connection parameters. `most` is the largest number of responder resources and the largest initiator depth; it replaces a
/// null pointer and the values `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`.
///
/// # Safety
/// `param` is null or valid with its private data.
unsafe fn param_of(param: *const rdma_conn_param, id: &IdObject, most: (u8, u8)) -> ConnParam {
    let qp_num = if id.qp().is_null() {
        0
    } else {
        // SAFETY: the queue pair of an identifier is live until `rdma_destroy_qp`.
        unsafe { known::<QpObject, _>(id.qp()) }.base().qp_num
    };
    // SAFETY: upheld by the caller.
    let Ok(p) = (unsafe { arg(param) }) else {
        return ConnParam {
            private_data: Vec::new(),
            responder_resources: most.0,
            initiator_depth: most.1,
            retry_count: 7,
            rnr_retry_count: 7,
            qp_num,
        };
    };
    let depth = |n: u8, max: u8, most: u8| if n == max { most } else { n };
    ConnParam {
        // SAFETY: `private_data_len` is the length of the private data (guaranteed by the caller).
        private_data: unsafe { bytes_of(p.private_data, p.private_data_len) },
        responder_resources: depth(p.responder_resources, RDMA_MAX_RESP_RES, most.0),
        initiator_depth: depth(p.initiator_depth, RDMA_MAX_INIT_DEPTH, most.1),
        retry_count: p.retry_count,
        rnr_retry_count: p.rnr_retry_count,
        qp_num: if qp_num != 0 { qp_num } else { p.qp_num },
    }
}

entry! {
    /// `rdma_connect(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `param` is null or valid.
    unsafe fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int, minus_one, {
        let param_is_null = param.is_null();
        // SAFETY: upheld by the caller.
        let (id, param) = unsafe {
            let id = live::<IdObject, _>(id)?;
            take_over_qp(id);
            (id, param_of(param, id, (bounds::MAX_RD_ATOMIC, bounds::MAX_RD_ATOMIC)))
        };
        // Neither the identifier nor the program names a queue pair.
        if id.qp().is_null() && param_is_null && id.engine.port_space == PortSpace::Tcp {
            return Err(libc::EINVAL);
        }
        // The private data of `rdma_create_ep` precedes that of this call. An event contains the length of both as one byte.
        let mut data = id.connect_data();
        data.extend(param.private_data);
        if data.len() > usize::from(u8::MAX) {
            return Err(libc::EINVAL);
        }
        let param = ConnParam { private_data: data, ..param };
        step(id, |engine| engine.connect(param))?;
        Ok(0)
    }
}

entry! {
    /// `rdma_accept(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `param` is null or valid.
    unsafe fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let (id, param) = unsafe {
            let id = live::<IdObject, _>(id)?;
            take_over_qp(id);
            (id, param_of(param, id, id.engine.offered()))
        };
        if id.is_datagram() {
            // Datagram queue pairs: the response is a datagram, and no event follows. So nothing else would acknowledge the event of the
            // request, for which `rdma_destroy_id` of the listener waits.
            id.engine.accept(param).map_err(|e| os_errno(&e))?;
            if id.is_synchronous() {
                id.drop_event();
            }
            return Ok(0);
        }
        step(id, |engine| engine.accept(param))?;
        id.show_qp_state();
        Ok(0)
    }
}

/// Rejects a connect request.
///
/// # Safety
/// `id` is null or points to a live object, `data` is null or has `len` bytes.
unsafe fn reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> Result<c_int, Errno> {
    // SAFETY: upheld by the caller.
    let (id, data) = unsafe { (live::<IdObject, _>(id)?, bytes_of(data, len)) };
    id.engine.reject(&data).map_err(|e| os_errno(&e))?;
    Ok(0)
}

entry! {
    /// `rdma_reject(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `data` is null or has `len` bytes.
    unsafe fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { reject(id, data, len) }
    }
}

entry! {
    /// `rdma_reject_ece`: like `rdma_reject`. The device has no options for enhanced connection establishment.
    ///
    /// # Safety
    /// The requirements of `rdma_reject` apply.
    unsafe fn rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { reject(id, data, len) }
    }
}

entry! {
    /// `rdma_establish(3)`: for a connection whose queue pair does not belong to the identifier; otherwise EINVAL. The program itself
    /// changes the state of its queue pair. If the program has no queue pair for the connection, the engine has created a private
    /// one, which this function moves to RTS.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_establish(id: *mut rdma_cm_id) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let id = unsafe { live::<IdObject, _>(id) }?;
        if !id.qp().is_null() {
            return Err(libc::EINVAL);
        }
        id.engine.establish().map_err(|e| os_errno(&e))?;
        Ok(0)
    }
}

entry! {
    /// `rdma_notify(3)`: the program reports that the first message of a connection has arrived.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let id = unsafe { live::<IdObject, _>(id) }?;
        if event != IBV_EVENT_COMM_EST {
            return Err(libc::EINVAL);
        }
        id.engine.first_message_arrived().map_err(|e| os_errno(&e))?;
        Ok(0)
    }
}

entry! {
    /// `rdma_disconnect(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let id = unsafe { live::<IdObject, _>(id) }?;
        let event_follows = id.engine.disconnect().map_err(|e| os_errno(&e))?;
        // There is no event to wait for if there is no connection yet, or if it has ended before and the program has already taken
        // the event that reported this.
        if event_follows || id.is_synchronous() && id.has_events() {
            complete(id)?;
        }
        Ok(0)
    }
}

// ---------------------------------------------------------------------- multicast

/// Joins a multicast group, to receive its datagrams or only to send. An event reports the result.
///
/// # Safety
/// `id` is null or points to a live identifier. `addr` is null or points to an address.
unsafe fn join(
    id: *mut rdma_cm_id,
    addr: *const sockaddr,
    receives: bool,
    context: *mut c_void,
) -> Result<c_int, Errno> {
    // SAFETY: upheld by the caller.
    let (group, id) = unsafe { (needed_address(addr)?, live::<IdObject, _>(id)?) };
    step(id, |engine| {
        engine.join(group.ip(), receives, context.expose_provenance())
    })?;
    Ok(0)
}

entry! {
    /// `rdma_join_multicast(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. `addr` is null or points to an address.
    unsafe fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { join(id, addr, true, context) }
    }
}

entry! {
    /// `rdma_join_multicast_ex(3)`: joins as a full member, or as one that only sends.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `attr` is null or valid.
    unsafe fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id, attr: *mut rdma_cm_join_mc_attr_ex, context: *mut c_void,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let attr = unsafe { arg(attr) }?;
        if attr.comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED {
            return Err(libc::ENOTSUP);
        }
        let needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        if attr.comp_mask & needed != needed || attr.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED {
            return Err(libc::EINVAL);
        }
        let receives = attr.join_flags == RDMA_MC_JOIN_FLAG_FULLMEMBER;
        // SAFETY: upheld by the caller.
        unsafe { join(id, attr.addr, receives, context) }
    }
}

entry! {
    /// `rdma_leave_multicast(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. `addr` is null or points to an address.
    unsafe fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let (group, id) = unsafe { (needed_address(addr)?, live::<IdObject, _>(id)?) };
        id.engine.leave(group.ip()).map_err(|e| os_errno(&e))?;
        Ok(0)
    }
}
