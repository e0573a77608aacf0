//! Thread domains and parent domains: hints of a program about which objects one thread uses, and where it wants their
//! memory. All calls here may be made from any thread, and queues lie in memory of the device's own, so a parent domain
//! is its protection domain under another name; its allocators are never called (the manual leaves that to the device).

use std::ffi::c_int;
use std::sync::Arc;

use anywarp_core::verbs::pd::Pd;

use super::object::{PdObject, TdObject, from_c, into_c, is_lost, is_lost_context, of};
use super::types::*;
use crate::fail;
use crate::profile::{Counted, Place};

/// `ibv_alloc_td(3)`.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    init: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    crate::guard(std::ptr::null_mut(), || {
        if context.is_null() || init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: open and valid (the program's promise).
        let (lost, mask) = unsafe { (is_lost_context(context), (*init).comp_mask) };
        if lost {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        if mask != 0 {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        into_c(TdObject {
            c: ibv_td { context },
            users: Arc::new(()),
        })
    })
}

/// `ibv_dealloc_td(3)`: EBUSY while a parent domain has it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    crate::guard(libc::EIO, || {
        if td.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<TdObject, _>(td) } {
            return 0;
        }
        // SAFETY: as above.
        if Arc::strong_count(unsafe { &of::<TdObject, _>(td).users }) > 1 {
            return libc::EBUSY;
        }
        // SAFETY: it is not used again (the program's promise).
        drop(unsafe { from_c::<TdObject, _>(td) });
        0
    })
}

/// `ibv_alloc_parent_domain(3)`.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    crate::guard(std::ptr::null_mut(), || {
        const KNOWN: u32 =
            IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        if context.is_null() || attr.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (the program's promise).
        let attr = unsafe { &*attr };
        if attr.pd.is_null() || attr.comp_mask & !KNOWN != 0 {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // Both functions or none.
        if attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0
            && (attr.alloc.is_none() || attr.free.is_none())
        {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: they live (the program's promise), `td` if it is not null.
        let (lost, td) = unsafe {
            let lost = is_lost::<PdObject, _>(attr.pd);
            let td = (!attr.td.is_null()).then(|| Arc::clone(&of::<TdObject, _>(attr.td).users));
            (lost, td)
        };
        if lost {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        // SAFETY: as above.
        let domain = unsafe { of::<PdObject, _>(attr.pd) };
        let place = match Place::take(Counted::Pd) {
            Ok(place) => place,
            Err(e) => return fail(e, std::ptr::null_mut()),
        };
        let pd = Pd::within(&domain.engine);
        into_c(PdObject {
            c: ibv_pd {
                context,
                handle: pd.id(),
            },
            engine: Arc::new(pd),
            _td: td,
            _place: place,
        })
    })
}
