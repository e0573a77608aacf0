//! Queries of the device, its port, its GIDs and its partition key.

use std::ffi::{c_int, c_uint};

use anywarp_engine::address::{Gid, lid_of};
use anywarp_engine::config::{Face, config};
use anywarp_engine::gids;

use super::convert::{c_gid, put_text};
use crate::entry;
use crate::ffi::{Errno, arg_mut, errno, put, put_prefix};
use crate::profile::profile;
use anywarp_verbs_sys::verbs::*;

/// Returns the attributes of the device.
fn attributes() -> ibv_device_attr {
    let p = profile();
    let number = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
    let mut attr = ibv_device_attr {
        node_guid: gids::node_guid().to_be(),
        sys_image_guid: gids::node_guid().to_be(),
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
    put_text(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr
}

entry! {
    /// `ibv_query_device(3)`.
    ///
    /// # Safety
    /// `attr` is null or valid for writes.
    unsafe fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { put(attr, attributes()) }
    }
}

/// `ibv_query_device_ex(3)`: fills as many fields as the caller's structure has.
pub(crate) unsafe extern "C" fn query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    errno("ibv_query_device_ex", || {
        // SAFETY: the program passes null or a valid pointer.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0) {
            return Err(libc::EINVAL);
        }
        let p = profile();
        let mut all = ibv_device_attr_ex {
            orig_attr: attributes(),
            odp_caps: p.odp,
            max_dm_size: p.max_dm_size,
            xrc_odp_caps: p.xrc_odp,
            device_cap_flags_ex: p.caps.into(),
            phys_port_cnt_ex: 1,
            ..ibv_device_attr_ex::default()
        };
        if p.has.extended_cq {
            all.completion_timestamp_mask = u64::MAX;
            all.hca_core_clock = 1_000_000;
        }
        // SAFETY: the caller's structure has `size` bytes (the header's inline function passes its size).
        unsafe { put_prefix(attr, &all, size) }
    })
}

/// Returns the nanoseconds of the real-time clock.
pub(crate) fn wall_clock() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

/// `ibv_query_rt_values_ex(3)`.
pub(crate) unsafe extern "C" fn query_rt_values(
    _context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    errno("ibv_query_rt_values_ex", || {
        // SAFETY: the program passes null or a valid pointer.
        let values = unsafe { arg_mut(values) }?;
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            // As in the completions, one number of 64 bits. Many programs read only `tv_nsec`, where the drivers of mlx4 and mlx5
            // store it.
            values.raw_clock.tv_sec = 0;
            values.raw_clock.tv_nsec = i64::try_from(wall_clock()).unwrap_or(0);
        }
        values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        Ok(())
    })
}

// ---------------------------------------------------------------------- the port

/// Returns the attributes of the port.
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
        gid_tbl_len: gids::GID_ENTRIES as c_int,
        max_msg_sz: profile().max_msg_sz,
        pkey_tbl_len: 1,
        lid,
        sm_lid: 0,
        max_vl_num: 1,
        // 2 is four lanes, 32 is 25 Gb/s for each lane.
        active_width: 2,
        active_speed: 32,
        // 5 is LinkUp, 3 is Disabled.
        phys_state: if up { 5 } else { 3 },
        link_layer: link_layer as u8,
        flags: IBV_QPF_GRH_REQUIRED,
        ..ibv_port_attr::default()
    }
}

/// Writes as many bytes of the port's attributes as the caller's structure has.
///
/// # Safety
/// `attr` is null or points to `len` bytes.
unsafe fn put_port(port: u8, attr: *mut ibv_port_attr, len: usize) -> Result<(), Errno> {
    if port != 1 {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller.
    unsafe { put_prefix(attr, &port_attributes(), len) }
}

/// The size of `struct ibv_port_attr` in headers before rdma-core 17, in bytes.
const OLD_PORT_ATTR: usize = std::mem::offset_of!(ibv_port_attr, port_cap_flags2);

/// `ibv_query_port(3)`, as the header's inline function calls it.
pub(crate) unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: the header's inline function passes the size of the caller's structure.
    errno("ibv_query_port", || unsafe { put_port(port, attr, len) })
}

/// `ibv_query_port(3)` as programs built against old headers call it: through a function table.
pub(crate) unsafe extern "C" fn query_port_compat(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: a caller of this function has the structure of the old size.
    errno("ibv_query_port", || unsafe {
        put_port(port, attr, OLD_PORT_ATTR)
    })
}

entry! {
    /// `ibv_query_port(3)` as programs built against old headers call it: by the symbol, with the structure's old size.
    ///
    /// # Safety
    /// `attr` is null or has the size of the old structure.
    unsafe fn ibv_query_port(_context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { put_port(port, attr, OLD_PORT_ATTR) }
    }
}

// ---------------------------------------------------------------------- GIDs and the partition key

entry! {
    /// `ibv_query_gid(3)`: an empty entry is all zero.
    ///
    /// # Safety
    /// `gid` is null or valid for writes.
    unsafe fn ibv_query_gid(_context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int, minus_one, {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if port != 1 || index >= gids::GID_ENTRIES {
            return Err(libc::EINVAL);
        }
        let raw = gids::at(index).map_or([0; 16], |g| g.raw);
        // SAFETY: upheld by the caller.
        unsafe { put(gid, c_gid(raw)) }?;
        Ok(0)
    }
}

entry! {
    /// `ibv_query_gid_type`: a private function that `ibv_devinfo` and pyverbs use.
    ///
    /// # Safety
    /// `kind` is null or valid for writes.
    unsafe fn ibv_query_gid_type(_context: *mut ibv_context, port: u8, index: c_uint, kind: *mut c_uint) -> c_int, minus_one, {
        if port != 1 || index as usize >= gids::GID_ENTRIES {
            return Err(libc::EINVAL);
        }
        let taken = gids::at(index as usize).is_some();
        // The numbers of this private function: 0 is InfiniBand or RoCE v1, 1 is RoCE v2.
        let number = c_uint::from(taken && config().face != Face::Ib);
        // SAFETY: upheld by the caller.
        unsafe { put(kind, number) }?;
        Ok(0)
    }
}

fn c_gid_entry(index: usize, gid: &Gid) -> ibv_gid_entry {
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
    /// `ibv_query_gid_ex(3)`: ENODATA for an empty entry.
    ///
    /// # Safety
    /// `out` is null or has `size` bytes.
    unsafe fn _ibv_query_gid_ex(
        _context: *mut ibv_context, port: u32, index: u32, out: *mut ibv_gid_entry, flags: u32, size: usize,
    ) -> c_int, errno, {
        let index = index as usize;
        if port != 1 || flags != 0 || size > size_of::<ibv_gid_entry>() || index >= gids::GID_ENTRIES {
            return Err(libc::EINVAL);
        }
        let gid = gids::at(index).ok_or(libc::ENODATA)?;
        // SAFETY: upheld by the caller.
        unsafe { put_prefix(out, &c_gid_entry(index, &gid), size) }
    }
}

entry! {
    /// `ibv_query_gid_table(3)`: returns the number of entries, or a negative errno (`-EINVAL` if `max` is too small).
    ///
    /// # Safety
    /// `out` is null or has room for `max` entries of `size` bytes.
    unsafe fn _ibv_query_gid_table(
        _context: *mut ibv_context, out: *mut ibv_gid_entry, max: usize, flags: u32, size: usize,
    ) -> isize, or(-(libc::EIO as isize)), {
        let table = gids::table();
        let taken = || table.iter().enumerate().filter_map(|(index, gid)| Some((index, gid.as_ref()?)));
        let count = taken().count();
        if flags != 0 || count > max || size > size_of::<ibv_gid_entry>() {
            return Ok(-(libc::EINVAL as isize));
        }
        for (i, (index, gid)) in taken().enumerate() {
            let to = out.wrapping_byte_add(if out.is_null() { 0 } else { i * size });
            // SAFETY: entry `i` is below `max`, and each has `size` bytes (guaranteed by the caller).
            if unsafe { put_prefix(to, &c_gid_entry(index, gid), size) }.is_err() {
                return Ok(-(libc::EINVAL as isize));
            }
        }
        if out.is_null() { Ok(-(libc::EINVAL as isize)) } else { Ok(count.cast_signed()) }
    }
}

/// The default partition key, which is the only one.
const PKEY: be16 = 0xffff;

entry! {
    /// `ibv_query_pkey(3)`.
    ///
    /// # Safety
    /// `pkey` is null or valid for writes.
    unsafe fn ibv_query_pkey(_context: *mut ibv_context, port: u8, index: c_int, pkey: *mut be16) -> c_int, minus_one, {
        if port != 1 || index != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        unsafe { put(pkey, PKEY) }?;
        Ok(0)
    }
}

entry! {
    /// `ibv_get_pkey_index(3)`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: be16) -> c_int, minus_one, {
        if port == 1 && pkey == PKEY { Ok(0) } else { Err(libc::EINVAL) }
    }
}

entry! {
    /// `ibv_resolve_eth_l2_from_gid`: returns a zero address and no VLAN, because the kernel builds the Ethernet header.
    ///
    /// # Safety
    /// `mac` is null or has 6 bytes, `vid` is null or valid for writes.
    unsafe fn ibv_resolve_eth_l2_from_gid(
        _context: *mut ibv_context, _attr: *mut ibv_ah_attr, mac: *mut u8, vid: *mut u16,
    ) -> c_int, errno, {
        // SAFETY: `mac` is null or points to six bytes (guaranteed by the caller).
        unsafe { put(mac.cast::<[u8; 6]>(), [0; 6]) }?;
        if !vid.is_null() {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { put(vid, 0xffff) }?;
        }
        Ok(())
    }
}

// ---------------------------------------------------------------------- enhanced connection establishment

entry! {
    /// `ibv_query_ece(3)`: the device has no options for enhanced connection establishment.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int, errno, {
        Err(libc::EOPNOTSUPP)
    }
}

entry! {
    /// `ibv_set_ece(3)`: the device has no options for enhanced connection establishment.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int, errno, {
        Err(libc::EOPNOTSUPP)
    }
}

entry! {
    /// `ibv_query_qp_data_in_order(3)`: returns 0, because the device does not guarantee an order.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: ibv_wr_opcode, _flags: u32) -> c_int, or(0), {
        Ok(0)
    }
}
