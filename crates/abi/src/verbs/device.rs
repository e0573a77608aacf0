//! The device: listing, opening, asking, asynchronous events.

use std::ffi::{c_char, c_int, c_uint};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use anywarp_engine::channel::Channel;
use anywarp_engine::config::{Face, config};
use anywarp_engine::device::{self, AsyncItem, Context, event, lid_of};
use anywarp_engine::gids;

use super::object::{
    ContextObject, CqObject, QpObject, SrqObject, is_lost, is_lost_context, of, os_errno,
    set_cookie,
};
use super::types::*;
use super::{dm, domain, extended, memory, ops, qp, queue, xrc};
use crate::held::Held;
use crate::profile::{self, profile};
use crate::{entry, fail};

/// The device as programs see it, with zeroes behind it: libmlx5 and libefa look there for their own mark.
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

fn put<const N: usize>(into: &mut [c_char; N], text: &str) {
    for (to, from) in into.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
}

/// The one device of the process.
pub(crate) fn the_device() -> *mut ibv_device {
    static DEVICE: OnceLock<Shared> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            let mut object = DeviceObject {
                c: ibv_device::default(),
                behind: [0; 512],
            };
            let by_face = match config().face {
                Face::Roce | Face::Ib => (IBV_NODE_CA, IBV_TRANSPORT_IB),
                Face::Iwarp => (IBV_NODE_RNIC, IBV_TRANSPORT_IWARP),
            };
            (object.c.node_type, object.c.transport_type) = profile().node.unwrap_or(by_face);
            put(&mut object.c.name, device::NAME);
            put(&mut object.c.dev_name, device::NAME);
            put(
                &mut object.c.dev_path,
                "/sys/class/infiniband_verbs/anywarp0",
            );
            put(&mut object.c.ibdev_path, "/sys/class/infiniband/anywarp0");
            Shared(Box::into_raw(Box::new(object)).cast())
        })
        .0
}

entry! {
    /// `ibv_get_device_list(3)`: one device, then null. A forked child of a process that uses the device has none.
    ///
    /// # Safety
    /// `num` is null or a valid place for an int.
    unsafe fn ibv_get_device_list(num: *mut c_int) -> *mut *mut ibv_device, on_panic = std::ptr::null_mut(), {
        let list = vec![the_device(), std::ptr::null_mut()].into_boxed_slice();
        if !num.is_null() {
            // SAFETY: not null, so valid (caller's promise).
            unsafe { num.write(1) };
        }
        Box::into_raw(list).cast()
    }
}

entry! {
    /// `ibv_free_device_list`.
    ///
    /// # Safety
    /// `list` is null or came from `ibv_get_device_list`, and is not used again.
    unsafe fn ibv_free_device_list(list: *mut *mut ibv_device), on_panic = (), {
        if !list.is_null() {
            let slice = std::ptr::slice_from_raw_parts_mut(list, 2);
            // SAFETY: made as a boxed slice of two in `ibv_get_device_list`.
            drop(unsafe { Box::from_raw(slice) });
        }
    }
}

entry! {
    /// `ibv_get_device_name(3)`.
    ///
    /// # Safety
    /// `device` is null or from the list.
    unsafe fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char, on_panic = std::ptr::null(), {
        if device.is_null() {
            return std::ptr::null();
        }
        // SAFETY: from the list, which lives for ever.
        unsafe { (&raw const (*device).name).cast() }
    }
}

entry! {
    /// `ibv_get_device_guid(3)`, in network byte order.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_get_device_guid(_device: *mut ibv_device) -> be64, on_panic = 0, {
        device::node_guid().to_be()
    }
}

entry! {
    /// `ibv_get_device_index(3)`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_get_device_index(_device: *mut ibv_device) -> c_int, on_panic = -1, { 0 }
}

/// A slot of `ibv_context_ops` that only pre-2007 programs called.
unsafe extern "C" fn compat() -> *mut std::ffi::c_void {
    fail(libc::ENOSYS, std::ptr::null_mut())
}

/// Opens the device for a C program. Errno on failure.
pub(crate) fn open() -> Result<*mut ibv_context, i32> {
    profile::check()?;
    let has = &profile().has;
    let engine = Context::open().map_err(|e| os_errno(&e))?;
    engine.watch();
    let xrc = profile().types.contains(&IBV_QPT_XRC_SEND);
    let mut c = verbs_context {
        sz: size_of::<verbs_context>(),
        query_port: Some(query_port),
        advise_mr: (profile().odp.general_caps != 0).then_some(memory::advise_mr),
        alloc_null_mr: has.null_region.then_some(memory::alloc_null_mr),
        reg_dm_mr: (profile().max_dm_size > 0).then_some(dm::reg_dm_mr),
        alloc_dm: (profile().max_dm_size > 0).then_some(dm::alloc_dm),
        free_dm: (profile().max_dm_size > 0).then_some(dm::free_dm),
        alloc_td: has.domains.then_some(domain::alloc_td),
        dealloc_td: has.domains.then_some(domain::dealloc_td),
        alloc_parent_domain: has.domains.then_some(domain::alloc_parent_domain),
        query_device_ex: Some(extended::query_device_ex),
        create_cq_ex: has.extended_cq.then_some(extended::create_cq_ex),
        create_qp_ex: has.extended_qp.then_some(qp::create_qp_ex),
        create_srq_ex: (profile().max_srq > 0).then_some(extended::create_srq_ex),
        get_srq_num: xrc.then_some(xrc::get_srq_num),
        open_xrcd: xrc.then_some(xrc::open_xrcd),
        close_xrcd: xrc.then_some(xrc::close_xrcd),
        modify_cq: has.extended_cq.then_some(extended::modify_cq),
        query_rt_values: has.extended_cq.then_some(extended::query_rt_values),
        ..verbs_context::default()
    };
    let compat: compat_op = Some(compat);
    c.context = ibv_context {
        device: the_device(),
        cmd_fd: engine.command.as_raw_fd(),
        async_fd: engine.events.raw_fd(),
        num_comp_vectors: 1,
        abi_compat: VERBS_ABI_IS_EXTENDED,
        ..ibv_context::default()
    };
    c.context.ops = ibv_context_ops {
        alloc_mw: Some(memory::alloc_mw),
        bind_mw: Some(memory::bind_mw),
        dealloc_mw: Some(memory::dealloc_mw),
        poll_cq: Some(ops::poll_cq),
        req_notify_cq: Some(ops::req_notify_cq),
        post_srq_recv: Some(ops::post_srq_recv),
        post_send: Some(ops::post_send),
        post_recv: Some(ops::post_recv),
        _compat_query_port: Some(query_port_compat),
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
    let object = Box::into_raw(Box::new(ContextObject { c, engine }));
    // SAFETY: just made; the field's address is inside the object.
    let context = unsafe { &raw mut (*object).c.context };
    // SAFETY: just made.
    let engine = unsafe { &(*object).engine };
    set_cookie(&engine.cookie, context);
    Ok(context)
}

entry! {
    /// `ibv_open_device(3)`.
    ///
    /// # Safety
    /// `device` is from the list.
    unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context, on_panic = std::ptr::null_mut(), {
        if device != the_device() {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        match open() {
            Ok(context) => context,
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_close_device(3)`.
    ///
    /// # Safety
    /// `context` came from `ibv_open_device` and is not used again.
    unsafe fn ibv_close_device(context: *mut ibv_context) -> c_int, on_panic = -1, {
        if context.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: the caller's promise.
        if unsafe { is_lost_context(context) } {
            return 0;
        }
        // SAFETY: the caller's promise.
        let object: *const ContextObject = unsafe { ContextObject::of(context) };
        // SAFETY: made by `Box::into_raw` in `open`.
        drop(unsafe { Box::from_raw(object.cast_mut()) });
        0
    }
}

// ---------------------------------------------------------------------- attributes

/// The attributes of the device.
pub(crate) fn attributes() -> ibv_device_attr {
    let p = profile();
    let number = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
    let mut attr = ibv_device_attr {
        node_guid: device::node_guid().to_be(),
        sys_image_guid: device::node_guid().to_be(),
        max_mr_size: u64::MAX,
        page_size_cap: 0xffff_f000,
        vendor_id: p.vendor_id,
        vendor_part_id: p.vendor_part_id,
        hw_ver: 1,
        max_qp: number(p.max_qp),
        max_qp_wr: number(p.max_qp_wr),
        device_cap_flags: p.caps,
        max_sge: number(p.max_sge),
        max_sge_rd: number(p.max_sge_rd),
        max_cq: number(p.max_cq),
        max_cqe: number(p.max_cqe),
        max_mr: number(p.max_mr),
        max_pd: number(p.max_pd),
        max_qp_rd_atom: number(p.max_rd_atom),
        max_res_rd_atom: number(p.max_rd_atom.saturating_mul(p.max_qp)),
        max_qp_init_rd_atom: number(p.max_rd_atom),
        atomic_cap: p.atomic_cap,
        max_mw: number(p.max_mw),
        max_mcast_grp: number(p.max_mcast_grp),
        max_mcast_qp_attach: number(p.max_mcast_qp_attach),
        max_total_mcast_qp_attach: number(p.max_mcast_qp_attach.saturating_mul(p.max_mcast_grp)),
        max_ah: number(p.max_ah),
        max_srq: number(p.max_srq),
        max_srq_wr: number(p.max_srq_wr),
        max_srq_sge: number(p.max_srq_sge),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
        ..ibv_device_attr::default()
    };
    put(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr
}

entry! {
    /// `ibv_query_device(3)`.
    ///
    /// # Safety
    /// `attr` is a valid place.
    unsafe fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int, on_panic = libc::EIO, {
        if attr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: not null, so valid (caller's promise).
        unsafe { attr.write(attributes()) };
        0
    }
}

/// The attributes of the port.
fn port_attributes() -> ibv_port_attr {
    let lid = gids::gids().first().map_or(1, |g| lid_of(g.ip));
    let up = gids::is_up();
    let link_layer = match config().face {
        Face::Ib => IBV_LINK_LAYER_INFINIBAND,
        Face::Roce | Face::Iwarp => IBV_LINK_LAYER_ETHERNET,
    };
    ibv_port_attr {
        state: if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN },
        max_mtu: IBV_MTU_4096,
        active_mtu: IBV_MTU_4096,
        gid_tbl_len: gids::PLACES as c_int,
        max_msg_sz: profile().max_msg_sz,
        pkey_tbl_len: 1,
        lid,
        sm_lid: 0,
        max_vl_num: 1,
        active_width: 2,
        active_speed: 32,
        // LinkUp or Disabled.
        phys_state: if up { 5 } else { 3 },
        link_layer: link_layer as u8,
        flags: IBV_QPF_GRH_REQUIRED,
        ..ibv_port_attr::default()
    }
}

/// Writes as much of the port's attributes as the caller's struct has.
unsafe fn write_port(port: u8, attr: *mut ibv_port_attr, len: usize) -> c_int {
    crate::guard(libc::EIO, || {
        if port != 1 || attr.is_null() {
            return libc::EINVAL;
        }
        let all = port_attributes();
        let len = len.min(size_of::<ibv_port_attr>());
        // SAFETY: the caller's struct has `len` bytes (its promise), ours too.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast::<u8>(), len);
        };
        0
    })
}

unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: the header's inline function passes the size of the caller's struct.
    unsafe { write_port(port, attr, len) }
}

unsafe extern "C" fn query_port_compat(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: such a caller has the struct of the old size.
    unsafe {
        write_port(
            port,
            attr,
            std::mem::offset_of!(ibv_port_attr, port_cap_flags2),
        )
    }
}

entry! {
    /// `ibv_query_port(3)`, as programs built against old headers call it: with the struct's old size.
    ///
    /// # Safety
    /// `attr` has the size of the old struct.
    unsafe fn ibv_query_port(_context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int, on_panic = libc::EIO, {
        // SAFETY: the caller's promise.
        unsafe { write_port(port, attr, std::mem::offset_of!(ibv_port_attr, port_cap_flags2)) }
    }
}

/// A GID for C.
pub(crate) fn c_gid(raw: [u8; 16]) -> ibv_gid {
    ibv_gid { raw }
}

/// The address in a GID of a C program.
pub(crate) fn gid_ip(gid: &ibv_gid) -> IpAddr {
    // SAFETY: every byte pattern is a valid `raw`.
    device::ip_of(unsafe { gid.raw })
}

/// Address of GID table entry `index`.
pub(crate) fn own_ip(index: u8) -> Option<IpAddr> {
    gids::at(index.into()).map(|g| g.ip)
}

entry! {
    /// `ibv_query_gid(3)`: an empty place gives zeroes.
    ///
    /// # Safety
    /// `gid` is a valid place.
    unsafe fn ibv_query_gid(_context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int, on_panic = -1, {
        let place = usize::try_from(index).unwrap_or(usize::MAX);
        if port != 1 || gid.is_null() || place >= gids::PLACES {
            return fail(libc::EINVAL, -1);
        }
        let raw = gids::at(place).map_or([0; 16], |g| g.raw);
        // SAFETY: not null, so valid (caller's promise).
        unsafe { gid.write(c_gid(raw)) };
        0
    }
}

entry! {
    /// `ibv_query_gid_type`: RoCE v2 for every address (private: `ibv_devinfo` and pyverbs use it).
    ///
    /// # Safety
    /// `kind` is a valid place.
    unsafe fn ibv_query_gid_type(_context: *mut ibv_context, port: u8, index: c_uint, kind: *mut c_uint) -> c_int, on_panic = -1, {
        if port != 1 || kind.is_null() || index as usize >= gids::PLACES {
            return fail(libc::EINVAL, -1);
        }
        let taken = gids::at(index as usize).is_some();
        // The private numbering: 0 InfiniBand or RoCE v1, 1 RoCE v2.
        let number = c_uint::from(taken && config().face != Face::Ib);
        // SAFETY: not null, so valid (caller's promise).
        unsafe { kind.write(number) };
        0
    }
}

fn c_gid_entry(index: usize, gid: &device::Gid) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: c_gid(gid.raw),
        gid_index: u32::try_from(index).unwrap_or(0),
        port_num: 1,
        gid_type: match config().face {
            Face::Ib => IBV_GID_TYPE_IB,
            Face::Roce | Face::Iwarp => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: gid.interface,
    }
}

entry! {
    /// `ibv_query_gid_ex(3)`: ENODATA for an empty place.
    ///
    /// # Safety
    /// `out` has `size` bytes.
    unsafe fn _ibv_query_gid_ex(
        _context: *mut ibv_context, port: u32, index: u32, out: *mut ibv_gid_entry, flags: u32, size: usize,
    ) -> c_int, on_panic = libc::EIO, {
        if port != 1 || flags != 0 || out.is_null() || size > size_of::<ibv_gid_entry>() {
            return libc::EINVAL;
        }
        match gids::at(index as usize) {
            Some(gid) => {
                let all = c_gid_entry(index as usize, &gid);
                // SAFETY: `out` has `size` bytes, which is at most ours.
                unsafe { std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), out.cast::<u8>(), size) };
                0
            }
            None if (index as usize) < gids::PLACES => libc::ENODATA,
            None => libc::EINVAL,
        }
    }
}

entry! {
    /// `ibv_query_gid_table(3)`: the number of entries, or a negative errno (`-EINVAL` when they do not fit).
    ///
    /// # Safety
    /// `out` has room for `max` entries of `size` bytes.
    unsafe fn _ibv_query_gid_table(
        _context: *mut ibv_context, out: *mut ibv_gid_entry, max: usize, flags: u32, size: usize,
    ) -> isize, on_panic = -(libc::EIO as isize), {
        let table = gids::table();
        let taken = || table.iter().enumerate().filter_map(|(place, gid)| Some((place, gid.as_ref()?)));
        let count = taken().count();
        if flags != 0 || out.is_null() || count > max || size > size_of::<ibv_gid_entry>() {
            return -(libc::EINVAL as isize);
        }
        for (i, (place, gid)) in taken().enumerate() {
            let all = c_gid_entry(place, gid);
            // SAFETY: entry `i` is below `max`, each has `size` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), out.cast::<u8>().add(i * size), size);
            }
        }
        count.cast_signed()
    }
}

entry! {
    /// `ibv_query_pkey(3)`: one key, the default one.
    ///
    /// # Safety
    /// `pkey` is a valid place.
    unsafe fn ibv_query_pkey(_context: *mut ibv_context, port: u8, index: c_int, pkey: *mut be16) -> c_int, on_panic = -1, {
        if port != 1 || index != 0 || pkey.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: not null, so valid (caller's promise).
        unsafe { pkey.write(0xffff) };
        0
    }
}

entry! {
    /// `ibv_get_pkey_index(3)`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: be16) -> c_int, on_panic = -1, {
        if port == 1 && pkey == 0xffff { 0 } else { fail(libc::EINVAL, -1) }
    }
}

entry! {
    /// `ibv_resolve_eth_l2_from_gid`: there is no Ethernet header of ours to fill.
    ///
    /// # Safety
    /// `mac` has 6 bytes, `vid` is null or valid.
    unsafe fn ibv_resolve_eth_l2_from_gid(
        _context: *mut ibv_context, _attr: *mut ibv_ah_attr, mac: *mut u8, vid: *mut u16,
    ) -> c_int, on_panic = libc::EIO, {
        if mac.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: six bytes (caller's promise).
        unsafe { mac.write_bytes(0, 6) };
        if !vid.is_null() {
            // SAFETY: not null, so valid (caller's promise).
            unsafe { vid.write(0xffff) };
        }
        0
    }
}

// ---------------------------------------------------------------------- asynchronous events

/// One try at the next asynchronous event: 0, or -1 with errno; `None`: wait.
unsafe fn try_event(events: &Channel<AsyncItem>, out: *mut ibv_async_event) -> Option<c_int> {
    let popped = events.pop_with(|item| {
        let mut c = ibv_async_event {
            event_type: item.event,
            ..ibv_async_event::default()
        };
        match item.event {
            event::CQ_ERR => {
                let cq: *mut ibv_cq = std::ptr::with_exposed_provenance_mut(item.cookie);
                c.element.cq = cq;
                // SAFETY: destroying an object takes its waiting events out of the queue, under the lock that is held
                // here, so it lives; and from here on destroying it waits for the acknowledgement.
                unsafe { of::<CqObject, _>(cq) }.async_acks.delivered();
            }
            event::SRQ_LIMIT_REACHED | event::SRQ_ERR => {
                let srq: *mut ibv_srq = std::ptr::with_exposed_provenance_mut(item.cookie);
                c.element.srq = srq;
                // SAFETY: as above.
                unsafe { of::<SrqObject, _>(srq) }.acks.delivered();
            }
            event::QP_FATAL..=event::SQ_DRAINED | event::QP_LAST_WQE_REACHED => {
                let qp: *mut ibv_qp = std::ptr::with_exposed_provenance_mut(item.cookie);
                c.element.qp = qp;
                // SAFETY: as above.
                unsafe { of::<QpObject, _>(qp) }.acks.delivered();
            }
            _ => c.element.port_num = 1,
        }
        c
    });
    let Some((_, c)) = popped else {
        return events.is_nonblocking().then(|| fail(libc::EAGAIN, -1));
    };
    // SAFETY: valid (the program's promise).
    unsafe { out.write(c) };
    Some(0)
}

/// `ibv_get_async_event(3)`: waits, unless the program made `async_fd` non-blocking.
///
/// Not an `entry!`: the thread may be cancelled while it waits, and that must not meet a `catch_unwind`.
///
/// # Safety
/// `context` is open, `out` a valid place.
// SAFETY: the symbol is ours: link/symbols.txt names it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    out: *mut ibv_async_event,
) -> c_int {
    if context.is_null() || out.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: open (caller's promise).
    if unsafe { is_lost_context(context) } {
        return fail(libc::ENODEV, -1);
    }
    // Held: a program may close the device while a thread waits here, and may cancel it.
    // SAFETY: as above.
    let events = Held::new(unsafe { &ContextObject::of(context).engine.events });
    loop {
        // SAFETY: not null, so valid (caller's promise).
        let done = match crate::guard(Some(-1), || unsafe { try_event(events.get(), out) }) {
            Some(done) => done,
            None if queue::block_on(events.get().raw_fd()) => continue,
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
    /// `event` came from `ibv_get_async_event` and its object lives.
    unsafe fn ibv_ack_async_event(event: *mut ibv_async_event), on_panic = (), {
        if event.is_null() {
            return;
        }
        // SAFETY: valid (caller's promise).
        let event = unsafe { &*event };
        match event.event_type {
            event::CQ_ERR => {
                // SAFETY: the element that `ibv_get_async_event` wrote for this type.
                let cq = unsafe { event.element.cq };
                // SAFETY: the object lives (caller's promise).
                if !unsafe { is_lost::<CqObject, _>(cq) } {
                    // SAFETY: as above.
                    unsafe { of::<CqObject, _>(cq) }.async_acks.acknowledged(1);
                }
            }
            event::SRQ_LIMIT_REACHED | event::SRQ_ERR => {
                // SAFETY: as above.
                let srq = unsafe { event.element.srq };
                // SAFETY: as above.
                if !unsafe { is_lost::<SrqObject, _>(srq) } {
                    // SAFETY: as above.
                    unsafe { of::<SrqObject, _>(srq) }.acks.acknowledged(1);
                }
            }
            event::QP_FATAL..=event::SQ_DRAINED | event::QP_LAST_WQE_REACHED => {
                // SAFETY: as above.
                let qp = unsafe { event.element.qp };
                // SAFETY: as above.
                if !unsafe { is_lost::<QpObject, _>(qp) } {
                    // SAFETY: as above.
                    unsafe { of::<QpObject, _>(qp) }.acks.acknowledged(1);
                }
            }
            _ => {}
        }
    }
}

/// Takes the events of an object that is being destroyed out of its context's queue.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn forget_events(context: *mut ibv_context, cookie: usize) {
    // SAFETY: open (caller's promise).
    let object = unsafe { ContextObject::of(context) };
    object.engine.events.purge(|e| e.cookie == cookie);
}
