//! Protection domains, and the parent and thread domains of `ibv_alloc_parent_domain(3)`.
//!
//! Thread and parent domains tell a device which objects are used by a single thread, and where to allocate their memory. This device
//! allows all calls from every thread and allocates its queues itself. A parent domain is therefore another handle of its protection
//! domain, and its allocators are never called, which the manual page allows.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, MutexGuard, Weak};

use anywarp_core::error::Misuse;
use anywarp_core::lock::Mutex;
use anywarp_core::verbs::pd::Pd;
use anywarp_engine::process::PerProcess;
use anywarp_engine::reserve;

use super::handle::{CStruct, into_c, live, live_if_any, returned};
use super::object::{ContextObject, PdObject, TdObject};
use crate::entry;
use crate::ffi::{arg, errno, misuse, null};
use crate::profile::{Counted, CountedObject};
use anywarp_verbs_sys::verbs::*;

/// Protection domains by handle, for `ibv_import_pd`.
fn by_handle() -> MutexGuard<'static, HashMap<u32, Weak<Pd>>> {
    static TABLE: PerProcess<Mutex<HashMap<u32, Weak<Pd>>>> = PerProcess::new(Mutex::default);
    TABLE.get().lock()
}

entry! {
    /// `ibv_alloc_pd(3)`.
    ///
    /// # Safety
    /// `context` is null or points to an open context.
    unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd, null, {
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }?;
        if reserve::is_scarce() {
            return Err(libc::ENOMEM);
        }
        let counted = CountedObject::take(Counted::Pd)?;
        let pd = Pd::new();
        let handle = pd.id();
        let engine = Arc::new(pd);
        let mut domains = by_handle();
        if domains.len() >= domains.capacity() {
            // Removes the entries of destroyed domains before the table grows.
            domains.retain(|_, pd| pd.strong_count() > 0);
        }
        domains.insert(handle, Arc::downgrade(&engine));
        drop(domains);
        let c = CStruct::new(ibv_pd { context, handle });
        Ok(into_c(PdObject { c, engine, _td: None, _counted: counted }))
    }
}

entry! {
    /// `ibv_dealloc_pd(3)`: EBUSY while an object uses it.
    ///
    /// # Safety
    /// `pd` is null, or came from `ibv_alloc_pd` or `ibv_alloc_parent_domain` and is not used after this returns 0.
    unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(pd) = unsafe { returned::<PdObject, _>(pd) }? else { return Ok(()) };
        if pd.engine.in_use() {
            return Err(misuse("ibv_dealloc_pd", &Misuse::Busy));
        }
        drop(pd.take());
        Ok(())
    }
}

entry! {
    /// `ibv_import_pd(3)`.
    ///
    /// # Safety
    /// `context` is null or points to an open context.
    unsafe fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd, null, {
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }.map_err(|_any| libc::EINVAL)?;
        let counted = CountedObject::take(Counted::Pd)?;
        let pd = by_handle().get(&handle).and_then(Weak::upgrade).ok_or(libc::EINVAL)?;
        Ok(into_c(PdObject {
            c: CStruct::new(ibv_pd { context, handle }),
            engine: Arc::new(Pd::within(&pd)),
            _td: None,
            _counted: counted,
        }))
    }
}

entry! {
    /// `ibv_unimport_pd(3)`.
    ///
    /// # Safety
    /// `pd` is null or came from `ibv_import_pd`, and is not used again.
    unsafe fn ibv_unimport_pd(pd: *mut ibv_pd), nothing, {
        // SAFETY: upheld by the caller.
        let pd = unsafe { returned::<PdObject, _>(pd) }?;
        drop(pd.map(|pd| pd.take()));
        Ok(())
    }
}

// ---------------------------------------------------------------------- thread and parent domains

/// `ibv_alloc_td(3)`.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    init: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    null("ibv_alloc_td", || {
        // SAFETY: the pointers are null, or open and valid (guaranteed by the program).
        let (_open, init) = unsafe { (ContextObject::live(context)?, arg(init)?) };
        if init.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        Ok(into_c(TdObject {
            c: CStruct::new(ibv_td { context }),
            users: Arc::new(()),
        }))
    })
}

/// `ibv_dealloc_td(3)`: EBUSY while a parent domain uses it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    errno("ibv_dealloc_td", || {
        // SAFETY: the pointer is null or a thread domain that is not used again (guaranteed by the program).
        let Some(td) = unsafe { returned::<TdObject, _>(td) }? else {
            return Ok(());
        };
        if Arc::strong_count(&td.users) > 1 {
            return Err(libc::EBUSY);
        }
        drop(td.take());
        Ok(())
    })
}

/// Permits a device to allocate buffers (`ibv_alloc_buf`) in memory that is not encrypted, if it cannot access other memory of a
/// confidential virtual machine. It has been in the headers since rdma-core 64. This device accesses all memory of the process.
const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC: u32 = 1 << 2;

/// `ibv_alloc_parent_domain(3)`.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    null("ibv_alloc_parent_domain", || {
        const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
            | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
            | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC;
        // SAFETY: the program passes null or a valid pointer.
        let attr = unsafe { arg(attr) }?;
        let one_allocator = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0
            && (attr.alloc.is_none() || attr.free.is_none());
        if context.is_null() || attr.comp_mask & !KNOWN != 0 || one_allocator {
            return Err(libc::EINVAL);
        }
        // SAFETY: the program passes null or a live object.
        let (domain, td) = unsafe {
            (
                live::<PdObject, _>(attr.pd)?,
                live_if_any::<TdObject, _>(attr.td)?,
            )
        };
        let counted = CountedObject::take(Counted::Pd)?;
        let pd = Pd::within(&domain.engine);
        let handle = pd.id();
        Ok(into_c(PdObject {
            c: CStruct::new(ibv_pd { context, handle }),
            engine: Arc::new(pd),
            _td: td.map(|td| Arc::clone(&td.users)),
            _counted: counted,
        }))
    })
}
