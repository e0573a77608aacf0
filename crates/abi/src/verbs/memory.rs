//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use anywarp_core::error::Misuse;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::mr::{AccessError, Kind};
use anywarp_core::verbs::wr::Sge;
use anywarp_core::wire::To;
use anywarp_engine::objects::{MemoryRegion, Reregistration};

use super::convert::sges_of;
use super::handle::{CStruct, into_c, live, live_if_any, returned};
use super::object::{Backing, MrObject, PdObject};
use crate::entry;
use crate::ffi::{Errno, errno, misuse, null};
use crate::profile::{Counted, CountedObject, profile};
use anywarp_verbs_sys::verbs::*;

/// Returns the public structure of a region. The handle is the part of the key that stays the same when the key octet changes.
fn c_region(domain: &PdObject, pd: *mut ibv_pd, key: u32) -> ibv_mr {
    ibv_mr {
        context: domain.context(),
        pd,
        addr: std::ptr::null_mut(),
        length: 0,
        handle: key >> 8,
        lkey: key,
        rkey: key,
    }
}

/// Returns the errno of a failed registration: that of the misuse, or EFAULT if the memory is not mapped with the required
/// access.
fn refused(call: &str, e: Option<Misuse>) -> Errno {
    e.map_or(libc::EFAULT, |e| misuse(call, &e))
}

/// Registers memory of the program.
///
/// # Safety
/// The requirements of [`register_in`] apply.
pub(super) unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr, Errno> {
    if length == 0 {
        return Err(misuse("ibv_reg_mr", &Misuse::InvalidArgument("length 0")));
    }
    // SAFETY: upheld by the caller.
    unsafe { register_in(pd, addr, length, iova, access, Backing::Program) }
}

/// Registers memory of the program, of the device or of a buffer of `ibv_alloc_buf`.
///
/// # Safety
/// `pd` is null or points to a live protection domain. The memory stays mapped while it is registered.
pub(super) unsafe fn register_in(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
    backing: Backing,
) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: upheld by the caller.
    let domain = unsafe { live::<PdObject, _>(pd) }?;
    let engine = domain.device().engine;
    let counted = CountedObject::take(Counted::Mr)?;
    let access = profile().rights_of(access)?;
    let start = addr.expose_provenance() as u64;
    let len = length as u64;
    // SAFETY: the memory stays mapped (guaranteed by the caller); the program knows that peers may write it.
    let region =
        unsafe { MemoryRegion::register(engine, &domain.engine, start, len, iova, access) }
            .map_err(|e| refused("ibv_reg_mr", e))?;
    let c = ibv_mr {
        addr,
        length,
        ..c_region(domain, pd, region.region().stag().0)
    };
    Ok(into_c(MrObject {
        c: CStruct::new(c),
        engine: region,
        backing,
        _counted: counted,
    }))
}

entry! {
    /// `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// `pd` is live; the memory stays mapped while it is registered.
    unsafe fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr, null, {
        // SAFETY: upheld by the caller.
        unsafe { register(pd, addr, length, addr.addr() as u64, access.cast_unsigned()) }
    }
}

entry! {
    /// `ibv_reg_mr_iova(3)`.
    ///
    /// # Safety
    /// The requirements of `ibv_reg_mr` apply.
    unsafe fn ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr, null, {
        // SAFETY: upheld by the caller.
        unsafe { register(pd, addr, length, iova, access.cast_unsigned()) }
    }
}

entry! {
    /// `ibv_reg_mr_iova2`: the `ibv_reg_mr` macro calls it when the access flags are not constant, or contain optional flags
    /// (`IBV_ACCESS_OPTIONAL_RANGE`).
    ///
    /// # Safety
    /// The requirements of `ibv_reg_mr` apply.
    unsafe fn ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr, null, {
        // SAFETY: upheld by the caller.
        unsafe { register(pd, addr, length, iova, access) }
    }
}

entry! {
    /// `ibv_dereg_mr(3)`: EBUSY while a window is bound to the region. The memory is not accessed after the function returns 0.
    ///
    /// # Safety
    /// `mr` came from a registration and is not used after this returns 0.
    unsafe fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(region) = unsafe { returned::<MrObject, _>(mr) }? else { return Ok(()) };
        region.engine.deregister().map_err(|e| misuse("ibv_dereg_mr", &e))?;
        drop(region.take());
        Ok(())
    }
}

entry! {
    /// `ibv_rereg_mr(3)`: returns 0, or one of `enum ibv_rereg_mr_err_code` with errno set.
    ///
    /// # Safety
    /// The requirements of `ibv_reg_mr` apply.
    unsafe fn ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int,
    ) -> c_int, or(IBV_REREG_MR_ERR_CMD), {
        const ALL: c_int = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
        if !profile().has.reregister {
            return Err(libc::EOPNOTSUPP);
        }
        let invalid = || Ok(crate::ffi::fail(libc::EINVAL, IBV_REREG_MR_ERR_INPUT));
        let translation = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
        let new_domain = flags & IBV_REREG_MR_CHANGE_PD != 0;
        let new_access = flags & IBV_REREG_MR_CHANGE_ACCESS != 0;
        // Access flags without the flag that changes them are an error, as in libibverbs: otherwise a program would rely on rights that
        // the region does not have.
        if mr.is_null() || flags == 0 || flags & !ALL != 0 || (new_domain && pd.is_null())
            || (translation && (addr.is_null() || length == 0)) || (access != 0 && !new_access)
        {
            return invalid();
        }
        // SAFETY: the region is live, and the domain too if it changes (guaranteed by the caller).
        let (region, domain) = unsafe {
            let domain = if new_domain { pd } else { std::ptr::null_mut() };
            (live::<MrObject, _>(mr)?, live_if_any::<PdObject, _>(domain)?)
        };
        // Only a region of the program's memory or of a buffer can be changed. If an imported handle were changed, the original handle
        // would keep the old registration, and deregistering it would not end the new one.
        let is_plain = matches!(region.backing, Backing::Program | Backing::Buffer(_));
        if !is_plain || matches!(region.engine.region().kind(), Kind::Null { .. }) {
            return invalid();
        }
        let change = Reregistration {
            range: translation.then(|| (addr.expose_provenance() as u64, length as u64)),
            pd: domain.map(|domain| Arc::clone(&domain.engine)),
            access: new_access.then_some(access.cast_unsigned()),
        };
        // SAFETY: the new memory stays mapped (guaranteed by the caller).
        unsafe { region.engine.reregister(&change) }.map_err(|e| refused("ibv_rereg_mr", e))?;
        region.c.set(|c| {
            if translation {
                (c.addr, c.length) = (addr, length);
            }
            if new_domain {
                c.pd = pd;
            }
        });
        Ok(0)
    }
}

/// Checks whether pages of a region may be faulted in, and faults them in. The errno values are those of `ibv_advise_mr(3)`.
fn prefetch(domain: &PdObject, sge: &Sge, writes: bool) -> Result<(), Errno> {
    let regions = &domain.device().engine.rnic.regions;
    let (pd, to, len) = (domain.engine.id(), To(sge.addr), sge.len.into());
    let check = |need| regions.check(sge.lkey, pd, 0, need, to, len);
    let refused = |e, without_rights| match e {
        AccessError::Invalid => libc::ENOENT,
        AccessError::NotAssociated => libc::EPERM,
        AccessError::Rights => without_rights,
        AccessError::Bounds | AccessError::Wrap | AccessError::Absent => libc::EFAULT,
    };
    // A region without on-demand paging is not one of those that the call is about.
    check(Access::ON_DEMAND).map_err(|e| refused(e, libc::ENOENT))?;
    if writes {
        let need = Access::ON_DEMAND | Access::LOCAL_WRITE;
        check(need).map_err(|e| refused(e, libc::EPERM))?;
    }
    Ok(())
}

/// `ibv_advise_mr(3)`: faults in the pages of regions with on-demand paging.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    n: u32,
) -> c_int {
    errno("ibv_advise_mr", || {
        if pd.is_null() || list.is_null() || n == 0 || flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 {
            return Err(libc::EINVAL);
        }
        let writes = match advice {
            IBV_ADVISE_MR_ADVICE_PREFETCH | IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => false,
            IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
            _ => return Err(libc::EOPNOTSUPP),
        };
        let n = c_int::try_from(n).unwrap_or(c_int::MAX);
        // SAFETY: the domain is live, and the list has `n` elements (guaranteed by the program).
        let (domain, sges) = unsafe { (live::<PdObject, _>(pd)?, sges_of(list, n)) };
        for sge in sges {
            prefetch(domain, &sge, writes)?;
        }
        Ok(())
    })
}

/// `ibv_alloc_null_mr(3)`: writes to the region are discarded, and reads return zeros.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    null("ibv_alloc_null_mr", || {
        // SAFETY: the program passes null or a live object.
        let domain = unsafe { live::<PdObject, _>(pd) }?;
        let counted = CountedObject::take(Counted::Mr)?;
        let region = MemoryRegion::null(domain.device().engine, &domain.engine)
            .map_err(|e| misuse("ibv_alloc_null_mr", &e))?;
        let c = ibv_mr {
            length: usize::MAX,
            rkey: 0,
            ..c_region(domain, pd, region.region().stag().0)
        };
        Ok(into_c(MrObject {
            c: CStruct::new(c),
            engine: region,
            backing: Backing::Program,
            _counted: counted,
        }))
    })
}

entry! {
    /// `ibv_import_mr(3)`: the address of the region is null, as the manual page specifies.
    ///
    /// # Safety
    /// `pd` is null or points to a live protection domain.
    unsafe fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr, null, {
        // SAFETY: upheld by the caller.
        let domain = unsafe { live::<PdObject, _>(pd) }.map_err(|_any| libc::EINVAL)?;
        let counted = CountedObject::take(Counted::Mr)?;
        let region = MemoryRegion::import(domain.device().engine, &domain.engine, handle)
            .ok_or(libc::EINVAL)?;
        let c = ibv_mr {
            length: usize::try_from(region.region().len()).unwrap_or(usize::MAX),
            handle,
            ..c_region(domain, pd, region.region().stag().0)
        };
        Ok(into_c(MrObject {
            c: CStruct::new(c),
            engine: region,
            backing: Backing::Imported,
            _counted: counted,
        }))
    }
}

entry! {
    /// `ibv_unimport_mr(3)`.
    ///
    /// # Safety
    /// `mr` is null or came from `ibv_import_mr`, and is not used again.
    unsafe fn ibv_unimport_mr(mr: *mut ibv_mr), nothing, {
        // SAFETY: upheld by the caller.
        let region = unsafe { returned::<MrObject, _>(mr) }?;
        drop(region.map(|region| region.take()));
        Ok(())
    }
}
