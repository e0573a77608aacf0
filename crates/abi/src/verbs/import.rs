//! `ibv_import_*(3)`: objects of a context, found by handle from another context that was made of its `cmd_fd`.
//!
//! The descriptor stands for the device in one process: memory of another process is out of reach of a device that lives
//! inside this one, so a descriptor that came from elsewhere is refused with EOPNOTSUPP.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anywarp_core::verbs::pd::Pd;
use anywarp_engine::device::Context;
use anywarp_engine::process::PerProcess;
use anywarp_engine::verbs::MemoryRegion;

use super::object::{
    ContextObject, MrObject, PdObject, from_c, into_c, is_lost, is_lost_context, of,
};
use super::types::*;
use super::{device, dm};
use crate::profile::{Counted, Place};
use crate::{entry, fail};

/// Domains by handle.
pub(crate) fn domains() -> MutexGuard<'static, HashMap<u32, Weak<Pd>>> {
    static TABLE: PerProcess<Mutex<HashMap<u32, Weak<Pd>>>> = PerProcess::new(Mutex::default);
    TABLE.get().lock().unwrap_or_else(PoisonError::into_inner)
}

entry! {
    /// `ibv_import_device(3)`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_import_device(fd: c_int) -> *mut ibv_context, on_panic = std::ptr::null_mut(), {
        if !Context::is_own_descriptor(fd) {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        match device::open() {
            Ok(context) => context,
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_import_pd(3)`.
    ///
    /// # Safety
    /// `context` is open.
    unsafe fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd, on_panic = std::ptr::null_mut(), {
        // SAFETY: open (caller's promise), if it is not null.
        if context.is_null() || unsafe { is_lost_context(context) } {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        let place = match Place::take(Counted::Pd) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        match domains().get(&handle).and_then(Weak::upgrade) {
            Some(pd) => into_c(PdObject {
                c: ibv_pd { context, handle },
                engine: Arc::new(Pd::within(&pd)),
                _td: None,
                _place: place,
            }),
            None => fail(libc::EINVAL, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_unimport_pd(3)`.
    ///
    /// # Safety
    /// `pd` came from `ibv_import_pd` and is not used again.
    unsafe fn ibv_unimport_pd(pd: *mut ibv_pd), on_panic = (), {
        // SAFETY: lives (caller's promise), if it is not null.
        if !pd.is_null() && !unsafe { is_lost::<PdObject, _>(pd) } {
            // SAFETY: the caller's promise.
            drop(unsafe { from_c::<PdObject, _>(pd) });
        }
    }
}

entry! {
    /// `ibv_import_mr(3)`: its address is null, as the manual has it.
    ///
    /// # Safety
    /// `pd` lives.
    unsafe fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr, on_panic = std::ptr::null_mut(), {
        // SAFETY: lives (caller's promise), if it is not null.
        if pd.is_null() || unsafe { is_lost::<PdObject, _>(pd) } {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: as above.
        let domain = unsafe { of::<PdObject, _>(pd) };
        // SAFETY: its context is open while it lives.
        let engine = unsafe { ContextObject::of(domain.c.context) }.engine.engine;
        let place = match Place::take(Counted::Mr) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        let Some(region) = MemoryRegion::import(engine, &domain.engine, handle) else {
            return fail(libc::EINVAL, std::ptr::null_mut());
        };
        let key = region.region().stag().0;
        let length = usize::try_from(region.region().len()).unwrap_or(usize::MAX);
        into_c(MrObject {
            c: ibv_mr {
                context: domain.c.context,
                pd,
                addr: std::ptr::null_mut::<c_void>(),
                length,
                handle,
                lkey: key,
                rkey: key,
            },
            engine: region,
            device_memory: None,
            _place: place,
        })
    }
}

entry! {
    /// `ibv_unimport_mr(3)`.
    ///
    /// # Safety
    /// `mr` came from `ibv_import_mr` and is not used again.
    unsafe fn ibv_unimport_mr(mr: *mut ibv_mr), on_panic = (), {
        // SAFETY: lives (caller's promise), if it is not null.
        if !mr.is_null() && !unsafe { is_lost::<MrObject, _>(mr) } {
            // SAFETY: the caller's promise.
            drop(unsafe { from_c::<MrObject, _>(mr) });
        }
    }
}

entry! {
    /// `ibv_import_dm(3)`.
    ///
    /// # Safety
    /// `context` is open.
    unsafe fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm, on_panic = std::ptr::null_mut(), {
        // SAFETY: open (caller's promise), if it is not null.
        if context.is_null() || unsafe { is_lost_context(context) } {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: as above.
        unsafe { dm::import(context, handle) }
    }
}

entry! {
    /// `ibv_unimport_dm(3)`.
    ///
    /// # Safety
    /// `dm` came from `ibv_import_dm` and is not used again.
    unsafe fn ibv_unimport_dm(dm: *mut ibv_dm), on_panic = (), {
        // SAFETY: the caller's promise.
        let _refused = unsafe { dm::end(dm, true) };
    }
}
