//! Protection domains, regions, windows, address handles.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anywarp_core::error::Misuse;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::mr::Kind;
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::wr::{Bind, Op, Payload, WorkRequest};
use anywarp_core::wire::{Stag, To};
use anywarp_engine::device::{ip_of, ip_of_lid};
use anywarp_engine::gids;
use anywarp_engine::random::random_u32;
use anywarp_engine::reserve;
use anywarp_engine::verbs::{DeviceMemory, MemoryRegion, Reregistration};

use super::device::{c_gid, gid_ip};
use super::import;
use super::object::{
    AhObject, ContextObject, MrObject, MwObject, PdObject, QpObject, from_c, into_c, is_lost,
    is_lost_context, misuse, of,
};
use super::ops::sges_of;
use super::types::*;
use crate::profile::{Counted, Place, profile};
use crate::{entry, fail};

entry! {
    /// `ibv_alloc_pd(3)`.
    ///
    /// # Safety
    /// `context` is open.
    unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd, on_panic = std::ptr::null_mut(), {
        if context.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: open (caller's promise).
        if unsafe { is_lost_context(context) } {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        if reserve::is_scarce() {
            return fail(libc::ENOMEM, std::ptr::null_mut());
        }
        let place = match Place::take(Counted::Pd) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        let pd = Pd::new();
        let handle = pd.id();
        let engine = Arc::new(pd);
        let mut domains = import::domains();
        if domains.len() >= domains.capacity() {
            // Before the table grows.
            domains.retain(|_, pd| pd.strong_count() > 0);
        }
        domains.insert(handle, Arc::downgrade(&engine));
        drop(domains);
        into_c(PdObject { c: ibv_pd { context, handle }, engine, _td: None, _place: place })
    }
}

entry! {
    /// `ibv_dealloc_pd(3)`: EBUSY while something belongs to it.
    ///
    /// # Safety
    /// `pd` came from `ibv_alloc_pd` and is not used after this returns 0.
    unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, on_panic = libc::EIO, {
        if pd.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<PdObject, _>(pd) } {
            return 0;
        }
        // SAFETY: as above.
        if unsafe { of::<PdObject, _>(pd) }.engine.in_use() {
            return misuse("ibv_dealloc_pd", &Misuse::Busy);
        }
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<PdObject, _>(pd) });
        0
    }
}

/// Registers memory for C.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    if length == 0 {
        return fail(
            misuse("ibv_reg_mr", &Misuse::InvalidArgument("length 0")),
            std::ptr::null_mut(),
        );
    }
    // SAFETY: the caller's promise.
    unsafe { register_in(pd, addr, length, iova, access, None) }
}

/// Registers memory of the program's or of the device's.
///
/// # Safety
/// `pd` is null or lives; the memory stays mapped while it is registered.
pub(crate) unsafe fn register_in(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
    device_memory: Option<(Arc<DeviceMemory>, Arc<AtomicUsize>)>,
) -> *mut ibv_mr {
    if pd.is_null() {
        return fail(libc::EINVAL, std::ptr::null_mut());
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<PdObject, _>(pd) } {
        return fail(libc::ENODEV, std::ptr::null_mut());
    }
    // SAFETY: as above.
    let domain = unsafe { of::<PdObject, _>(pd) };
    // SAFETY: its context is open while it lives.
    let engine = unsafe { ContextObject::of(domain.c.context) }.engine.engine;
    let start = addr.expose_provenance() as u64;
    let (place, access) = match (Place::take(Counted::Mr), profile().rights_of(access)) {
        (Ok(place), Ok(access)) => (place, access),
        (Err(e), _) | (_, Err(e)) => return fail(e, std::ptr::null_mut()),
    };
    match MemoryRegion::register(engine, &domain.engine, start, length as u64, iova, access) {
        Ok(region) => {
            let key = region.region().stag().0;
            let c = ibv_mr {
                context: domain.c.context,
                pd,
                addr,
                length,
                handle: key >> 8,
                lkey: key,
                rkey: key,
            };
            into_c(MrObject {
                c,
                engine: region,
                device_memory,
                _place: place,
            })
        }
        Err(Some(e)) => fail(misuse("ibv_reg_mr", &e), std::ptr::null_mut()),
        Err(None) => fail(libc::EFAULT, std::ptr::null_mut()),
    }
}

entry! {
    /// `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// `pd` lives; the memory stays mapped while it is registered.
    unsafe fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr, on_panic = std::ptr::null_mut(), {
        // SAFETY: the caller's promise.
        unsafe { register(pd, addr, length, addr.addr() as u64, access.cast_unsigned()) }
    }
}

entry! {
    /// `ibv_reg_mr_iova(3)`.
    ///
    /// # Safety
    /// As for `ibv_reg_mr`.
    unsafe fn ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr, on_panic = std::ptr::null_mut(), {
        // SAFETY: the caller's promise.
        unsafe { register(pd, addr, length, iova, access.cast_unsigned()) }
    }
}

entry! {
    /// `ibv_reg_mr_iova2`: what the `ibv_reg_mr` macro calls when the access flags are not constant.
    ///
    /// # Safety
    /// As for `ibv_reg_mr`.
    unsafe fn ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr, on_panic = std::ptr::null_mut(), {
        // SAFETY: the caller's promise.
        unsafe { register(pd, addr, length, iova, access) }
    }
}

entry! {
    /// `ibv_dereg_mr(3)`: EBUSY while a window is bound to it. Nothing touches the memory after it returns.
    ///
    /// # Safety
    /// `mr` came from a registration and is not used after this returns 0.
    unsafe fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int, on_panic = libc::EIO, {
        if mr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<MrObject, _>(mr) } {
            return 0;
        }
        // SAFETY: as above.
        if let Err(e) = unsafe { of::<MrObject, _>(mr) }.engine.deregister() {
            return misuse("ibv_dereg_mr", &e);
        }
        // SAFETY: the caller's promise.
        let object = unsafe { from_c::<MrObject, _>(mr) };
        if let Some((_, regions)) = &object.device_memory {
            regions.fetch_sub(1, Ordering::AcqRel);
        }
        0
    }
}

entry! {
    /// `ibv_rereg_mr(3)`: 0, or one of `enum ibv_rereg_mr_err_code` with errno.
    ///
    /// # Safety
    /// As for `ibv_reg_mr`.
    unsafe fn ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int,
    ) -> c_int, on_panic = IBV_REREG_MR_ERR_CMD, {
        const ALL: c_int = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
        if !profile().has.reregister {
            return fail(libc::EOPNOTSUPP, IBV_REREG_MR_ERR_CMD);
        }
        let translation = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
        let domain = flags & IBV_REREG_MR_CHANGE_PD != 0;
        if mr.is_null() || flags == 0 || flags & !ALL != 0 || (domain && pd.is_null())
            || (translation && (addr.is_null() || length == 0))
        {
            return fail(libc::EINVAL, IBV_REREG_MR_ERR_INPUT);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<MrObject, _>(mr) } {
            return fail(libc::ENODEV, IBV_REREG_MR_ERR_CMD);
        }
        // SAFETY: lives (caller's promise).
        if matches!(unsafe { of::<MrObject, _>(mr) }.engine.region().kind(), Kind::Null { .. }) {
            return fail(libc::EINVAL, IBV_REREG_MR_ERR_INPUT);
        }
        let change = Reregistration {
            range: translation.then(|| (addr.expose_provenance() as u64, length as u64)),
            // SAFETY: lives (caller's promise), not null (checked).
            pd: domain.then(|| Arc::clone(unsafe { &of::<PdObject, _>(pd).engine })),
            access: (flags & IBV_REREG_MR_CHANGE_ACCESS != 0).then_some(access.cast_unsigned()),
        };
        // SAFETY: lives (caller's promise).
        match unsafe { of::<MrObject, _>(mr) }.engine.reregister(&change) {
            Ok(()) => {
                // SAFETY: lives; the program does not read it while it changes it.
                let c = unsafe { &mut *mr };
                if translation {
                    c.addr = addr;
                    c.length = length;
                }
                if domain {
                    c.pd = pd;
                }
                0
            }
            Err(Some(e)) => fail(misuse("ibv_rereg_mr", &e), IBV_REREG_MR_ERR_CMD),
            Err(None) => fail(libc::EFAULT, IBV_REREG_MR_ERR_CMD),
        }
    }
}

/// `ibv_advise_mr(3)`: brings pages of regions with on demand paging in.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    n: u32,
) -> c_int {
    crate::guard(libc::EIO, || {
        if pd.is_null() || list.is_null() || n == 0 || flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 {
            return libc::EINVAL;
        }
        let need = match advice {
            IBV_ADVISE_MR_ADVICE_PREFETCH | IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => Access::NONE,
            IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => Access::LOCAL_WRITE,
            _ => return libc::EOPNOTSUPP,
        };
        // SAFETY: they live (the program's promise).
        let (domain, n) = unsafe {
            (
                of::<PdObject, _>(pd),
                c_int::try_from(n).unwrap_or(c_int::MAX),
            )
        };
        // SAFETY: its context is open while it lives.
        let engine = unsafe { ContextObject::of(domain.c.context) }.engine.engine;
        // SAFETY: `n` elements (the program's promise).
        for sge in unsafe { sges_of(list, n) } {
            let to = To(sge.addr);
            let regions = &engine.rnic.regions;
            let id = domain.engine.id();
            // Not paged on demand, not there, or not of this domain. The check itself brings the pages in.
            let need = need | Access::ON_DEMAND;
            if regions
                .check(sge.lkey, id, 0, need, to, sge.len.into())
                .is_err()
            {
                return libc::EINVAL;
            }
        }
        0
    })
}

/// `ibv_alloc_null_mr(3)`: what is written there is gone, what is read there is zero.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    crate::guard(std::ptr::null_mut(), || {
        if pd.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<PdObject, _>(pd) } {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        // SAFETY: as above.
        let domain = unsafe { of::<PdObject, _>(pd) };
        // SAFETY: its context is open while it lives.
        let engine = unsafe { ContextObject::of(domain.c.context) }.engine.engine;
        let place = match Place::take(Counted::Mr) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        match MemoryRegion::null(engine, &domain.engine) {
            Ok(region) => {
                let key = region.region().stag().0;
                into_c(MrObject {
                    c: ibv_mr {
                        context: domain.c.context,
                        pd,
                        addr: std::ptr::null_mut(),
                        length: usize::MAX,
                        handle: key >> 8,
                        lkey: key,
                        rkey: 0,
                    },
                    engine: region,
                    device_memory: None,
                    _place: place,
                })
            }
            Err(e) => fail(misuse("ibv_alloc_null_mr", &e), std::ptr::null_mut()),
        }
    })
}

// ---------------------------------------------------------------------- windows

/// `ibv_alloc_mw(3)`.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    crate::guard(std::ptr::null_mut(), || {
        if pd.is_null() || (kind != IBV_MW_TYPE_1 && kind != IBV_MW_TYPE_2) {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<PdObject, _>(pd) } {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        // SAFETY: as above.
        let domain = unsafe { of::<PdObject, _>(pd) };
        // SAFETY: its context is open while it lives.
        let engine = unsafe { ContextObject::of(domain.c.context) }.engine.engine;
        if reserve::is_scarce() {
            return fail(libc::ENOMEM, std::ptr::null_mut());
        }
        let regions = &engine.rnic.regions;
        let place = match Place::take(Counted::Mw) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        match regions.alloc_window(domain.engine.id(), kind == IBV_MW_TYPE_2, &mut random_u32) {
            Ok(stag) => {
                domain.engine.enter();
                let c = ibv_mw {
                    context: domain.c.context,
                    pd,
                    rkey: stag.0,
                    handle: stag.0 >> 8,
                    r#type: kind,
                };
                into_c(MwObject {
                    c,
                    pd: Arc::clone(&domain.engine),
                    _place: place,
                })
            }
            Err(e) => fail(misuse("ibv_alloc_mw", &e), std::ptr::null_mut()),
        }
    })
}

/// `ibv_dealloc_mw(3)`.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    crate::guard(libc::EIO, || {
        if mw.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<MwObject, _>(mw) } {
            return 0;
        }
        // SAFETY: as above, and it is not used again.
        let object = unsafe { from_c::<MwObject, _>(mw) };
        // SAFETY: its context is open while it lives.
        let engine = unsafe { ContextObject::of(object.c.context) }.engine.engine;
        let freed = engine.rnic.regions.free_window(Stag(object.c.rkey));
        object.pd.leave();
        match freed {
            Ok(()) => 0,
            Err(e) => misuse("ibv_dealloc_mw", &e),
        }
    })
}

/// What to bind, from C.
///
/// # Safety
/// `mw` lives, and so does `info.mr` if it is not null.
pub(crate) unsafe fn bind_of(
    mw: *const ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<Bind, Misuse> {
    if mw.is_null() {
        return Err(Misuse::InvalidArgument("no memory window"));
    }
    if info.mr.is_null() && info.length != 0 {
        return Err(Misuse::InvalidArgument("a bind without a region"));
    }
    let mr = if info.mr.is_null() {
        0
    } else {
        // SAFETY: not null, so it lives (caller's promise).
        unsafe { (*info.mr).lkey }
    };
    Ok(Bind {
        // SAFETY: not null (checked), lives.
        window: Stag(unsafe { (*mw).rkey }),
        rkey: Stag(rkey),
        mr: Stag(mr),
        addr: info.addr,
        len: info.length,
        access: Access(info.mw_access_flags),
    })
}

/// `ibv_bind_mw(3)`: type 1 windows; the STag changes at once.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    crate::guard(libc::EIO, || {
        if qp.is_null() || mw.is_null() || bind.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: they live (the program's promise).
        let (object, c, what) = unsafe { (of::<QpObject, _>(qp), &mut *mw, &*bind) };
        if c.r#type != IBV_MW_TYPE_1 {
            return libc::EINVAL;
        }
        if !what.bind_info.mr.is_null() {
            // SAFETY: not null, so it lives (the program's promise).
            let region = unsafe { of::<MrObject, _>(what.bind_info.mr) };
            if !region.engine.region().access().has(Access::MW_BIND) && what.bind_info.length != 0 {
                return libc::EPERM;
            }
        }
        let rkey = c.rkey & !0xff | c.rkey.wrapping_add(1) & 0xff;
        // SAFETY: as above.
        let bind = match unsafe { bind_of(mw, rkey, &what.bind_info) } {
            Ok(bind) => bind,
            Err(e) => return misuse("ibv_bind_mw", &e),
        };
        let request = WorkRequest {
            id: what.wr_id,
            op: Op::Bind(bind),
            payload: Payload::empty(),
            signaled: what.send_flags & IBV_SEND_SIGNALED != 0,
            solicited: false,
            fence: what.send_flags & IBV_SEND_FENCE != 0,
            destination: None,
            srq: None,
        };
        match object.engine.post_send(std::iter::once(Ok(request))) {
            Ok(()) => {
                c.rkey = rkey;
                0
            }
            Err((_, e)) => misuse("ibv_bind_mw", &e),
        }
    })
}

// ---------------------------------------------------------------------- address handles

/// The peer's address in an address vector.
pub(crate) fn remote_ip(attr: &ibv_ah_attr) -> Result<std::net::IpAddr, Misuse> {
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
        return Err(Misuse::InvalidArgument("an address without GID and LID"));
    }
    ip_of_lid(attr.dlid).ok_or(Misuse::InvalidArgument("a LID of no host"))
}

/// The address that datagrams to `ip` come from: that of the table that the vector names. One of the loopback interface
/// does not get out of the host: there the kernel chooses.
fn source_to(ip: std::net::IpAddr, attr: &ibv_ah_attr) -> Option<std::net::IpAddr> {
    let named = || gids::at(attr.grh.sgid_index.into());
    let source = (attr.is_global != 0).then(named).flatten()?.ip;
    (!source.is_loopback() || ip.is_loopback()).then_some(source)
}

entry! {
    /// `ibv_create_ah(3)`.
    ///
    /// # Safety
    /// `pd` lives, `attr` is valid.
    unsafe fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah, on_panic = std::ptr::null_mut(), {
        if pd.is_null() || attr.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<PdObject, _>(pd) } {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        if reserve::is_scarce() {
            return fail(libc::ENOMEM, std::ptr::null_mut());
        }
        // SAFETY: they live (caller's promise).
        let (domain, attr) = unsafe { (of::<PdObject, _>(pd), &*attr) };
        let place = match Place::take(Counted::Ah) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        match remote_ip(attr) {
            Ok(ip) => {
                domain.engine.enter();
                into_c(AhObject {
                    c: ibv_ah { context: domain.c.context, pd, handle: 0 },
                    ip,
                    source: source_to(ip, attr),
                    hop_limit: if attr.is_global != 0 { attr.grh.hop_limit } else { 0 },
                    traffic_class: if attr.is_global != 0 { attr.grh.traffic_class } else { 0 },
                    pd: Arc::clone(&domain.engine),
                    _place: place,
                })
            }
            Err(e) => fail(misuse("ibv_create_ah", &e), std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_destroy_ah(3)`.
    ///
    /// # Safety
    /// `ah` came from `ibv_create_ah` and is not used again.
    unsafe fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int, on_panic = libc::EIO, {
        if ah.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<AhObject, _>(ah) } {
            return 0;
        }
        // SAFETY: the caller's promise.
        let object = unsafe { from_c::<AhObject, _>(ah) };
        object.pd.leave();
        0
    }
}

/// Addresses in the route header in front of a datagram: who sent it, to whom.
fn route_of(grh: &[u8; 40]) -> Option<([u8; 16], [u8; 16], u8, u8)> {
    let at = |from: usize| -> [u8; 16] {
        let mut out = [0; 16];
        if let Some(bytes) = grh.get(from..from + 16) {
            out.copy_from_slice(bytes);
        }
        out
    };
    if grh.first()? >> 4 == 6 {
        let class = (grh.first()? << 4) | (grh.get(1)? >> 4);
        return Some((at(8), at(24), class, *grh.get(7)?));
    }
    // IPv4 stands in the second half, as for RoCE v2.
    let ip = grh.get(20..40)?;
    if ip.first()? >> 4 != 4 {
        return None;
    }
    let v4 = |from: usize| -> Option<[u8; 16]> {
        let four: [u8; 4] = ip.get(from..from + 4)?.try_into().ok()?;
        Some(std::net::Ipv4Addr::from(four).to_ipv6_mapped().octets())
    };
    Some((v4(12)?, v4(16)?, *ip.get(1)?, *ip.get(8)?))
}

/// Fills an address vector that answers a datagram.
///
/// # Safety
/// `wc` and `attr` are valid; `grh` has 40 bytes if the completion says that there is a route header.
unsafe fn answer(
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> Result<(), i32> {
    if wc.is_null() || attr.is_null() || port != 1 {
        return Err(libc::EINVAL);
    }
    // SAFETY: not null, so valid (caller's promise).
    let wc = unsafe { &*wc };
    let mut out = ibv_ah_attr {
        dlid: wc.slid,
        sl: 0,
        src_path_bits: wc.dlid_path_bits,
        port_num: port,
        ..ibv_ah_attr::default()
    };
    if wc.wc_flags & IBV_WC_GRH != 0 {
        if grh.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: 40 bytes (caller's promise).
        let bytes = unsafe { grh.cast::<[u8; 40]>().read_unaligned() };
        let (source, target, class, hops) = route_of(&bytes).ok_or(libc::EINVAL)?;
        let own = gids::place_of(ip_of(target)).unwrap_or(0);
        out.is_global = 1;
        out.grh.dgid = c_gid(source);
        out.grh.sgid_index = own;
        out.grh.hop_limit = if hops == 0 { 0xff } else { hops };
        out.grh.traffic_class = class;
    }
    // SAFETY: not null, so valid (caller's promise).
    unsafe { attr.write(out) };
    Ok(())
}

entry! {
    /// `ibv_init_ah_from_wc(3)`.
    ///
    /// # Safety
    /// The pointers are valid, `grh` if the completion has a route header.
    unsafe fn ibv_init_ah_from_wc(
        _context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, attr: *mut ibv_ah_attr,
    ) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        match unsafe { answer(port, wc, grh, attr) } {
            Ok(()) => 0,
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `ibv_create_ah_from_wc(3)`.
    ///
    /// # Safety
    /// As for `ibv_init_ah_from_wc`; `pd` lives.
    unsafe fn ibv_create_ah_from_wc(
        pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8,
    ) -> *mut ibv_ah, on_panic = std::ptr::null_mut(), {
        let mut attr = ibv_ah_attr::default();
        // SAFETY: the caller's promise.
        match unsafe { answer(port, wc, grh, &raw mut attr) } {
            // SAFETY: the caller's promise; `attr` is ours.
            Ok(()) => unsafe { ibv_create_ah(pd, &raw mut attr) },
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}
