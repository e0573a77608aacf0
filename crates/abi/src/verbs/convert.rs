//! Conversions between the structures of the header and the engine's types.

use std::ffi::{c_char, c_int, c_uint};
use std::net::{IpAddr, SocketAddr};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::qp::Attr;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{Bind, Destination, InlineData, Payload, Sge, Sges};
use anywarp_core::wire::Stag;
use anywarp_engine::address::ip_of;
use anywarp_engine::gids;
use anywarp_engine::gids::ip_of_lid;

use super::handle::known;
use super::object::AhObject;
use crate::ffi::arg;
use anywarp_verbs_sys::verbs::*;

/// Writes a text to the start of an array of zeros. The last byte stays zero: a text that does not fit is cut.
pub(crate) fn put_text<const N: usize>(into: &mut [c_char; N], text: &str) {
    for (to, from) in into.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
}

/// Converts a GID to the C structure.
pub(crate) fn c_gid(raw: [u8; 16]) -> ibv_gid {
    ibv_gid { raw }
}

/// Returns the IP address in a GID.
pub(crate) fn gid_ip(gid: &ibv_gid) -> IpAddr {
    // SAFETY: every byte pattern is a valid `raw`.
    ip_of(unsafe { gid.raw })
}

/// Returns the IP address of an entry of the GID table.
pub(crate) fn own_ip(index: u8) -> Option<IpAddr> {
    gids::at(index.into()).map(|g| g.ip)
}

/// Returns the peer's IP address in an address vector.
pub(crate) fn remote_ip(attr: &ibv_ah_attr) -> Result<IpAddr, Misuse> {
    if attr.port_num != 1 {
        return Err(Misuse::InvalidArgument("port_num is not 1"));
    }
    if attr.is_global != 0 {
        if gids::at(attr.grh.sgid_index.into()).is_none() {
            return Err(Misuse::InvalidArgument("no GID at sgid_index"));
        }
        return Ok(gid_ip(&attr.grh.dgid));
    }
    if attr.dlid == 0 {
        return Err(Misuse::InvalidArgument(
            "an address vector without GID and LID",
        ));
    }
    ip_of_lid(attr.dlid).ok_or(Misuse::InvalidArgument("no host has this LID"))
}

/// Returns the source address of datagrams to `ip`: the GID that the address vector selects. `None` leaves the choice to the
/// kernel, for example if the GID is a loopback address and the destination is another host.
pub(crate) fn source_to(ip: IpAddr, attr: &ibv_ah_attr) -> Option<IpAddr> {
    let named = || gids::at(attr.grh.sgid_index.into());
    let source = (attr.is_global != 0).then(named).flatten()?.ip;
    (!source.is_loopback() || ip.is_loopback()).then_some(source)
}

/// Converts the attributes of a queue pair.
pub(crate) fn attr_of(c: &ibv_qp_attr) -> Attr {
    Attr {
        access: Access(c.qp_access_flags),
        pkey_index: c.pkey_index,
        port: c.port_num,
        qkey: c.qkey,
        path_mtu: u8::try_from(c.path_mtu).unwrap_or(0),
        timeout: c.timeout,
        retry_cnt: c.retry_cnt,
        rnr_retry: c.rnr_retry,
        min_rnr_timer: c.min_rnr_timer,
        rq_psn: c.rq_psn,
        sq_psn: c.sq_psn,
        max_rd_atomic: c.max_rd_atomic,
        max_dest_rd_atomic: c.max_dest_rd_atomic,
        dest_qpn: c.dest_qp_num,
    }
}

/// Converts a scatter/gather list.
///
/// # Safety
/// `list` has `n` elements.
#[inline]
pub(crate) unsafe fn sges_of(list: *const ibv_sge, n: c_int) -> Sges {
    let mut sges = Sges::new();
    // SAFETY: upheld by the caller.
    unsafe { append_sges(&mut sges, list, n) };
    sges
}

/// Appends a scatter/gather list to `sges`.
///
/// # Safety
/// `list` has `n` elements.
#[inline]
pub(crate) unsafe fn append_sges(sges: &mut Sges, list: *const ibv_sge, n: c_int) {
    for i in 0..usize::try_from(n).unwrap_or(0) {
        // SAFETY: the caller passes `n` elements, and `i` is less than `n`.
        let sge = unsafe { &*list.add(i) };
        sges.push(Sge {
            addr: sge.addr,
            len: sge.length,
            lkey: Stag(sge.lkey),
        });
    }
}

/// The number of bytes that [`InlineData`] stores without an allocation.
const INLINE_WITHOUT_ALLOCATION: usize = 64;

/// Copies a buffer of the program to the inline data of a request, if that needs no allocation. Returns false otherwise.
///
/// # Safety
/// `from` has `len` readable bytes.
#[inline]
pub(crate) unsafe fn short_inline(into: &mut Payload, from: *const u8, len: usize) -> bool {
    if len > INLINE_WITHOUT_ALLOCATION {
        return false;
    }
    let data = into.make_inline();
    // SAFETY: `len` readable bytes (guaranteed by the caller). `InlineData` has room for as many.
    unsafe {
        std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), len);
        data.set_len(len);
    }
    true
}

/// Appends a buffer of the program to inline data.
///
/// # Safety
/// `from` has `len` readable bytes.
#[inline]
pub(crate) unsafe fn append_inline(
    data: &mut InlineData,
    from: *const u8,
    len: usize,
) -> Result<(), Misuse> {
    let end = data.len();
    if len > (bounds::MAX_INLINE as usize).saturating_sub(end) {
        return Err(Misuse::InlineTooLarge);
    }
    data.reserve(len);
    // SAFETY: `from` has `len` readable bytes (guaranteed by the caller), and `reserve` made room for as many after `end`.
    unsafe {
        std::ptr::copy_nonoverlapping(from, data.as_mut_ptr().add(end), len);
        data.set_len(end + len);
    }
    Ok(())
}

/// Returns the destination of a datagram. The upper 16 bits of a queue pair number are its UDP port.
///
/// # Safety
/// `ah` is null or points to a live object.
pub(crate) unsafe fn destination_of(
    ah: *mut ibv_ah,
    qpn: u32,
    qkey: u32,
) -> Result<Destination, Misuse> {
    if ah.is_null() {
        return Err(Misuse::InvalidArgument("no address handle"));
    }
    // SAFETY: the pointer is not null, so the handle is live (guaranteed by the caller).
    let ah = unsafe { known::<AhObject, _>(ah) };
    Ok(Destination {
        addr: SocketAddr::new(ah.ip, u16::try_from(qpn >> 8 & 0xffff).unwrap_or(0)),
        source: ah.source,
        qpn,
        qkey,
        hop_limit: ah.hop_limit,
        traffic_class: ah.traffic_class,
    })
}

/// Returns the operation that binds a memory window.
///
/// # Safety
/// `mw` and `info.mr` are null or live.
pub(crate) unsafe fn bind_of(
    mw: *const ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<Bind, Misuse> {
    // SAFETY: the caller passes null or a live object.
    let (window, region) = unsafe { (arg(mw), info.mr.as_ref()) };
    let window = window.map_err(|_null| Misuse::InvalidArgument("no memory window"))?;
    if region.is_none() && info.length != 0 {
        return Err(Misuse::InvalidArgument("a bind without a region"));
    }
    Ok(Bind {
        window: Stag(window.rkey),
        rkey: Stag(rkey),
        mr: Stag(region.map_or(0, |region| region.lkey)),
        addr: info.addr,
        len: info.length,
        access: Access(info.mw_access_flags),
    })
}

/// Returns the flags of a completion.
#[inline]
pub(crate) fn flags_of(c: &Completion) -> c_uint {
    let mut flags = 0;
    if c.grh {
        flags |= IBV_WC_GRH;
    }
    if c.imm.is_some() {
        flags |= IBV_WC_WITH_IMM;
    }
    if c.invalidated.is_some() {
        flags |= IBV_WC_WITH_INV;
    }
    flags
}

/// Returns the immediate data or the invalidated key, which share a union in the header.
#[inline]
pub(crate) fn imm_of(c: &Completion) -> be32 {
    match (c.imm, c.invalidated) {
        (Some(imm), _) => u32::from_ne_bytes(imm),
        (None, Some(stag)) => stag.0,
        (None, None) => 0,
    }
}
