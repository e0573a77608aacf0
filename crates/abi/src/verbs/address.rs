//! Address handles.

use std::ffi::c_int;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anywarp_engine::address::ip_of;
use anywarp_engine::{gids, qos, reserve};

use super::convert::{c_gid, remote_ip, source_to};
use super::handle::{CStruct, into_c, live, returned};
use super::object::{AhObject, PdObject};
use crate::entry;
use crate::ffi::{Errno, arg, misuse, put};
use crate::profile::{Counted, CountedObject};
use anywarp_verbs_sys::verbs::*;

/// Creates an address handle.
///
/// # Safety
/// `pd` is null or points to a live protection domain.
pub(crate) unsafe fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    // SAFETY: upheld by the caller.
    let domain = unsafe { live::<PdObject, _>(pd) }?;
    if reserve::is_scarce() {
        return Err(libc::ENOMEM);
    }
    let counted = CountedObject::take(Counted::Ah)?;
    let ip = remote_ip(attr).map_err(|e| misuse("ibv_create_ah", &e))?;
    domain.engine.enter();
    let c = ibv_ah {
        context: domain.context(),
        pd,
        handle: 0,
    };
    let global = attr.is_global != 0;
    let class = if global { attr.grh.traffic_class } else { 0 };
    Ok(into_c(AhObject {
        c: CStruct::new(c),
        ip,
        source: source_to(ip, attr),
        hop_limit: if global { attr.grh.hop_limit } else { 0 },
        traffic_class: qos::service(attr.sl, class).1,
        pd: Arc::clone(&domain.engine),
        _counted: counted,
    }))
}

entry! {
    /// `ibv_create_ah(3)`.
    ///
    /// # Safety
    /// `pd` is null or points to a live object, `attr` is null or valid.
    unsafe fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah, null, {
        // SAFETY: upheld by the caller.
        unsafe { create(pd, arg(attr)?) }
    }
}

entry! {
    /// `ibv_destroy_ah(3)`.
    ///
    /// # Safety
    /// `ah` came from `ibv_create_ah` and is not used again.
    unsafe fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(ah) = unsafe { returned::<AhObject, _>(ah) }? else { return Ok(()) };
        ah.take().pd.leave();
        Ok(())
    }
}

/// The fields of the route header (GRH) of a datagram.
struct GlobalRoute {
    source: [u8; 16],
    destination: [u8; 16],
    traffic_class: u8,
    hop_limit: u8,
}

/// Parses a route header: an IPv6 header, or an IPv4 header in the last 20 octets, as in RoCE v2.
fn route_of(grh: &[u8; 40]) -> Option<GlobalRoute> {
    if grh.first()? >> 4 == 6 {
        let gid = |from: usize| grh.get(from..from + 16)?.try_into().ok();
        return Some(GlobalRoute {
            source: gid(8)?,
            destination: gid(24)?,
            traffic_class: (grh.first()? << 4) | (grh.get(1)? >> 4),
            hop_limit: *grh.get(7)?,
        });
    }
    let ip = grh.get(20..40)?;
    if ip.first()? >> 4 != 4 {
        return None;
    }
    let gid = |from: usize| -> Option<[u8; 16]> {
        let address: [u8; 4] = ip.get(from..from + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(address).to_ipv6_mapped().octets())
    };
    Some(GlobalRoute {
        source: gid(12)?,
        destination: gid(16)?,
        traffic_class: *ip.get(1)?,
        hop_limit: *ip.get(8)?,
    })
}

/// Returns the address vector for an answer to a datagram.
///
/// # Safety
/// `wc` is null or valid. `grh` is null, or points to 40 bytes if the completion has a route header.
unsafe fn answer(port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh) -> Result<ibv_ah_attr, Errno> {
    // SAFETY: upheld by the caller.
    let wc = unsafe { arg(wc) }?;
    if port != 1 {
        return Err(libc::EINVAL);
    }
    let mut attr = ibv_ah_attr {
        dlid: wc.slid,
        sl: 0,
        src_path_bits: wc.dlid_path_bits,
        port_num: port,
        ..ibv_ah_attr::default()
    };
    if wc.wc_flags & IBV_WC_GRH != 0 {
        // SAFETY: the pointer is null or points to 40 bytes (guaranteed by the caller); a byte array needs no alignment.
        let bytes = unsafe { arg(grh.cast::<[u8; 40]>()) }?;
        let route = route_of(bytes).ok_or(libc::EINVAL)?;
        attr.is_global = 1;
        attr.grh.dgid = c_gid(route.source);
        attr.grh.sgid_index = gids::index_of(ip_of(route.destination)).unwrap_or(0);
        attr.grh.hop_limit = if route.hop_limit == 0 {
            0xff
        } else {
            route.hop_limit
        };
        attr.grh.traffic_class = route.traffic_class;
    }
    Ok(attr)
}

entry! {
    /// `ibv_init_ah_from_wc(3)`.
    ///
    /// # Safety
    /// The pointers are null or valid. `grh` need be valid only if the completion has a route header.
    unsafe fn ibv_init_ah_from_wc(
        _context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, attr: *mut ibv_ah_attr,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { put(attr, answer(port, wc, grh)?) }?;
        Ok(0)
    }
}

entry! {
    /// `ibv_create_ah_from_wc(3)`.
    ///
    /// # Safety
    /// The requirements of `ibv_init_ah_from_wc` apply. `pd` is null or points to a live protection domain.
    unsafe fn ibv_create_ah_from_wc(
        pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8,
    ) -> *mut ibv_ah, null, {
        // SAFETY: upheld by the caller.
        unsafe { create(pd, &answer(port, wc, grh)?) }
    }
}
