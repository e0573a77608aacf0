//! Listing, opening and closing the device, and the function table that the inline functions of the header use.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;

use anywarp_engine::config::{Face, config};
use anywarp_engine::context::{self, Context};
use anywarp_engine::gids;
use anywarp_engine::process::Inherited;

use super::convert::put_text;
use super::handle::set_c_object;
use super::object::ContextObject;
use super::{attributes, cq_ex, dm, memory, ops, pd, qp, srq, window};
use crate::entry;
use crate::ffi::{Errno, fail, os_errno, put};
use crate::profile::{self, profile};
use anywarp_verbs_sys::verbs::*;

/// The public device structure, and zeros after it: libmlx5 and libefa read a pointer there to
/// recognize their own devices.
#[repr(C)]
struct DeviceObject {
    c: ibv_device,
    behind: [u8; 512],
}

struct Shared(*mut ibv_device);
// SAFETY: the device is written once, before it is shared, and only read afterwards.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the pointer was made in `the_device`. `Inherited::get` drops a device only if another thread has stored one first, so
        // nothing refers to the dropped device.
        drop(unsafe { Box::from_raw(self.0.cast::<DeviceObject>()) });
    }
}

/// Returns the only device of the process.
fn the_device() -> *mut ibv_device {
    static DEVICE: Inherited<Shared> = Inherited::new(|| {
        let mut object = DeviceObject {
            c: ibv_device::default(),
            behind: [0; 512],
        };
        let by_face = match config().face {
            Face::Roce | Face::Ib => (IBV_NODE_CA, IBV_TRANSPORT_IB),
            Face::Iwarp => (IBV_NODE_RNIC, IBV_TRANSPORT_IWARP),
        };
        (object.c.node_type, object.c.transport_type) = profile().node.unwrap_or(by_face);
        put_text(&mut object.c.name, context::NAME);
        put_text(&mut object.c.dev_name, context::NAME);
        put_text(
            &mut object.c.dev_path,
            "/sys/class/infiniband_verbs/anywarp0",
        );
        put_text(&mut object.c.ibdev_path, "/sys/class/infiniband/anywarp0");
        Shared(Box::into_raw(Box::new(object)).cast())
    });
    DEVICE.get().0
}

/// Returns a null-terminated list of one, which [`free_list`] frees.
pub(crate) fn list_of_one<T>(one: *mut T) -> *mut *mut T {
    Box::into_raw(vec![one, std::ptr::null_mut()].into_boxed_slice()).cast()
}

/// Frees a list of [`list_of_one`].
///
/// # Safety
/// `list` is null or came from [`list_of_one`], and is not used again.
pub(crate) unsafe fn free_list<T>(list: *mut *mut T) {
    if !list.is_null() {
        // SAFETY: the list is a boxed slice of two (guaranteed by the caller).
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, 2)) });
    }
}

entry! {
    /// `ibv_get_device_list(3)`: returns one device and a terminating null.
    ///
    /// # Safety
    /// `num` is null or valid for writes.
    unsafe fn ibv_get_device_list(num: *mut c_int) -> *mut *mut ibv_device, null, {
        if !num.is_null() {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { put(num, 1) }?;
        }
        Ok(list_of_one(the_device()))
    }
}

entry! {
    /// `ibv_free_device_list(3)`.
    ///
    /// # Safety
    /// `list` is null or came from `ibv_get_device_list`, and is not used again.
    unsafe fn ibv_free_device_list(list: *mut *mut ibv_device), nothing, {
        // SAFETY: upheld by the caller.
        unsafe { free_list(list) };
        Ok(())
    }
}

entry! {
    /// `ibv_get_device_name(3)`.
    ///
    /// # Safety
    /// `device` is null or from the list.
    unsafe fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char, or(std::ptr::null()), {
        // SAFETY: the pointer is null or from the list (guaranteed by the caller); devices are never freed.
        Ok(unsafe { device.as_ref() }.map_or(std::ptr::null(), |device| device.name.as_ptr()))
    }
}

entry! {
    /// `ibv_get_device_guid(3)`, in network byte order.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_get_device_guid(_device: *mut ibv_device) -> be64, or(0), {
        Ok(gids::node_guid().to_be())
    }
}

entry! {
    /// `ibv_get_device_index(3)`. The index is the kernel's number of a device, by which programs ask the kernel over NETLINK_RDMA.
    /// The kernel does not know this device, so the device has no index.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_get_device_index(_device: *mut ibv_device) -> c_int, minus_one, { Ok(-1) }
}

/// Fails with ENOSYS. This function is in the entries of `ibv_context_ops` that only programs from before 2007 call.
unsafe extern "C" fn compat() -> *mut c_void {
    fail(libc::ENOSYS, std::ptr::null_mut())
}

/// Returns the function table of the device, with the functions that the profile includes (`ANYWARP_DEVICE_PROFILE`: the device whose
/// limits and missing features are imitated).
fn functions() -> verbs_context {
    let has = &profile().has;
    let xrc = profile().types.contains(&IBV_QPT_XRC_SEND);
    let mut c = verbs_context {
        sz: size_of::<verbs_context>(),
        query_port: Some(attributes::query_port),
        advise_mr: (profile().odp.general_caps != 0).then_some(memory::advise_mr),
        alloc_null_mr: has.null_region.then_some(memory::alloc_null_mr),
        reg_dm_mr: (profile().max_dm_size > 0).then_some(dm::reg_dm_mr),
        alloc_dm: (profile().max_dm_size > 0).then_some(dm::alloc_dm),
        free_dm: (profile().max_dm_size > 0).then_some(dm::free_dm),
        alloc_td: has.domains.then_some(pd::alloc_td),
        dealloc_td: has.domains.then_some(pd::dealloc_td),
        alloc_parent_domain: has.domains.then_some(pd::alloc_parent_domain),
        query_device_ex: Some(attributes::query_device_ex),
        create_cq_ex: has.extended_cq.then_some(cq_ex::create_cq_ex),
        create_qp_ex: has.extended_qp.then_some(qp::create_qp_ex),
        create_srq_ex: (profile().max_srq > 0).then_some(srq::create_srq_ex),
        get_srq_num: xrc.then_some(srq::get_srq_num),
        open_xrcd: xrc.then_some(srq::open_xrcd),
        close_xrcd: xrc.then_some(srq::close_xrcd),
        query_rt_values: has.extended_cq.then_some(attributes::query_rt_values),
        ..verbs_context::default()
    };
    let compat: compat_op = Some(compat);
    c.context.ops = ibv_context_ops {
        alloc_mw: Some(window::alloc_mw),
        bind_mw: Some(window::bind_mw),
        dealloc_mw: Some(window::dealloc_mw),
        poll_cq: Some(ops::poll_cq),
        req_notify_cq: Some(ops::req_notify_cq),
        post_srq_recv: Some(ops::post_srq_recv),
        post_send: Some(ops::post_send),
        post_recv: Some(ops::post_recv),
        _compat_query_port: Some(attributes::query_port_compat),
        _compat_alloc_pd: compat,
        _compat_dealloc_pd: compat,
        _compat_reg_mr: compat,
        _compat_rereg_mr: compat,
        _compat_dereg_mr: compat,
        _compat_create_cq: compat,
        _compat_cq_event: compat,
        _compat_resize_cq: compat,
        _compat_destroy_cq: compat,
        _compat_create_srq: compat,
        _compat_modify_srq: compat,
        _compat_query_srq: compat,
        _compat_destroy_srq: compat,
        _compat_create_qp: compat,
        _compat_query_qp: compat,
        _compat_modify_qp: compat,
        _compat_destroy_qp: compat,
        _compat_create_ah: compat,
        _compat_destroy_ah: compat,
        _compat_attach_mcast: compat,
        _compat_detach_mcast: compat,
        _compat_async_event: compat,
        ..ibv_context_ops::default()
    };
    c
}

/// Returns the number of completion vectors. A vector of an adapter selects the processor that handles the interrupts of a completion
/// queue, and most adapters have one for each processor. Here they make no difference, but programs distribute their queues or threads
/// over the vectors.
fn completion_vectors() -> c_int {
    // SAFETY: no memory is passed.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    c_int::try_from(online).unwrap_or(1).max(1)
}

/// Opens the device.
pub(crate) fn open() -> Result<*mut ibv_context, Errno> {
    profile::check()?;
    let engine = Context::open().map_err(|e| os_errno(&e))?;
    engine.watch();
    let mut c = functions();
    c.context = ibv_context {
        device: the_device(),
        ops: c.context.ops,
        cmd_fd: engine.command.as_raw_fd(),
        async_fd: engine.events.raw_fd(),
        num_comp_vectors: completion_vectors(),
        abi_compat: VERBS_ABI_IS_EXTENDED,
        ..ibv_context::default()
    };
    let object = Box::into_raw(Box::new(ContextObject { c, engine }));
    // SAFETY: the object was created above, and the field is inside the object.
    let (context, engine) = unsafe { (&raw mut (*object).c.context, &(*object).engine) };
    set_c_object(&engine.c_object, context);
    Ok(context)
}

entry! {
    /// `ibv_open_device(3)`.
    ///
    /// # Safety
    /// `device` is from the list.
    unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context, null, {
        if device == the_device() { open() } else { Err(libc::ENODEV) }
    }
}

entry! {
    /// `ibv_close_device(3)`.
    ///
    /// # Safety
    /// `context` came from `ibv_open_device` and is not used again.
    unsafe fn ibv_close_device(context: *mut ibv_context) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        match unsafe { ContextObject::live(context) } {
            // SAFETY: the object was created by `Box::into_raw` in `open` and is not used again (guaranteed by the caller).
            Ok(_) => drop(unsafe { Box::from_raw(ContextObject::around(context)) }),
            // In a child of fork(2) the object belongs to the parent.
            Err(libc::ENODEV) => {}
            Err(e) => return Err(e),
        }
        Ok(0)
    }
}

entry! {
    /// `ibv_import_device(3)`: works inside one process. The device is part of the process and cannot access the memory of
    /// another one, so a descriptor of another process is refused with EOPNOTSUPP.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_import_device(fd: c_int) -> *mut ibv_context, null, {
        if Context::is_own_descriptor(fd) { open() } else { Err(libc::EOPNOTSUPP) }
    }
}
