//! Device memory: a few pages that belong to the device, reached by the copying functions and as a region.
//!
//! Hardware wants its accesses in words of four bytes, and programs are written for that; so here too an offset or a
//! length that is no multiple of four is refused.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anywarp_core::bounds;
use anywarp_core::verbs::access::Access;
use anywarp_engine::process::PerProcess;
use anywarp_engine::verbs::DeviceMemory;

use super::memory::register_in;
use super::object::{DmObject, from_c, into_c, is_lost, of};
use super::types::*;
use crate::fail;

/// All pieces by handle, for `ibv_import_dm`.
fn table() -> MutexGuard<'static, HashMap<u32, Weak<DeviceMemory>>> {
    static TABLE: PerProcess<Mutex<HashMap<u32, Weak<DeviceMemory>>>> =
        PerProcess::new(Mutex::default);
    TABLE.get().lock().unwrap_or_else(PoisonError::into_inner)
}

fn object(
    context: *mut ibv_context,
    handle: u32,
    memory: Arc<DeviceMemory>,
    imported: bool,
) -> DmObject {
    DmObject {
        c: ibv_dm {
            context,
            memcpy_to_dm: Some(copy_to),
            memcpy_from_dm: Some(copy_from),
            comp_mask: 0,
            handle,
        },
        memory,
        regions: Arc::new(AtomicUsize::new(0)),
        imported,
    }
}

/// `ibv_alloc_dm(3)`.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    crate::guard(std::ptr::null_mut(), || {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        if context.is_null() || attr.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // A forked child may do this with its parent's context: nothing of the engine is needed.
        // SAFETY: valid (the program's promise).
        let attr = unsafe { &*attr };
        if attr.comp_mask != 0 {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        if attr.length == 0 || attr.log_align_req > bounds::DEVICE_MEMORY_ALIGN_LOG {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        let Some(memory) = DeviceMemory::new(attr.length) else {
            return fail(libc::ENOMEM, std::ptr::null_mut());
        };
        let (handle, memory) = (NEXT.fetch_add(1, Ordering::Relaxed), Arc::new(memory));
        let mut all = table();
        all.retain(|_, m| m.strong_count() > 0);
        all.insert(handle, Arc::downgrade(&memory));
        drop(all);
        into_c(object(context, handle, memory, false))
    })
}

/// `ibv_free_dm(3)`: EBUSY while a region lies in it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    crate::guard(libc::EIO, || {
        // SAFETY: the program's promise.
        unsafe { end(dm, false) }
    })
}

/// Ends what `ibv_alloc_dm` or `ibv_import_dm` gave.
///
/// # Safety
/// `dm` lives and is not used again when this returns 0.
pub(crate) unsafe fn end(dm: *mut ibv_dm, imported: bool) -> c_int {
    if dm.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<DmObject, _>(dm) } {
        return 0;
    }
    // SAFETY: as above.
    let object = unsafe { of::<DmObject, _>(dm) };
    if object.imported != imported {
        return libc::EINVAL;
    }
    if object.regions.load(Ordering::Acquire) > 0 {
        return libc::EBUSY;
    }
    // SAFETY: not used again (caller's promise).
    drop(unsafe { from_c::<DmObject, _>(dm) });
    0
}

/// `ibv_import_dm(3)`.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn import(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    match table().get(&handle).and_then(Weak::upgrade) {
        Some(memory) => into_c(object(context, handle, memory, true)),
        None => fail(libc::EINVAL, std::ptr::null_mut()),
    }
}

/// Address of `[offset, offset + length)`, if that is inside and made of words.
fn place(memory: &DeviceMemory, offset: u64, length: usize) -> Option<*mut u8> {
    const WORD: usize = 4;
    let offset = usize::try_from(offset).ok()?;
    let words = offset.is_multiple_of(WORD) && length.is_multiple_of(WORD);
    let inside = offset.checked_add(length)? <= memory.len();
    (words && inside).then(|| std::ptr::with_exposed_provenance_mut(memory.start() + offset))
}

unsafe extern "C" fn copy_to(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    crate::guard(libc::EIO, || {
        // SAFETY: lives (the program's promise).
        let Some(to) = place(unsafe { &of::<DmObject, _>(dm).memory }, offset, length) else {
            return fail(libc::EINVAL, libc::EINVAL);
        };
        // SAFETY: inside of device memory (checked); `length` readable bytes (the program's promise).
        unsafe { std::ptr::copy(from.cast::<u8>(), to, length) };
        0
    })
}

unsafe extern "C" fn copy_from(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    crate::guard(libc::EIO, || {
        // SAFETY: lives (the program's promise).
        let Some(from) = place(unsafe { &of::<DmObject, _>(dm).memory }, offset, length) else {
            return fail(libc::EINVAL, libc::EINVAL);
        };
        // SAFETY: inside of device memory (checked); `length` writable bytes (the program's promise).
        unsafe { std::ptr::copy(from, to.cast::<u8>(), length) };
        0
    })
}

/// `ibv_reg_dm_mr(3)`: addresses of such a region begin at 0.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    crate::guard(std::ptr::null_mut(), || {
        if pd.is_null() || dm.is_null() || !Access(access).has(Access::ZERO_BASED) {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<DmObject, _>(dm) };
        let Some(addr) = place(&object.memory, offset, length) else {
            return fail(libc::EINVAL, std::ptr::null_mut());
        };
        object.regions.fetch_add(1, Ordering::AcqRel);
        let held = Some((Arc::clone(&object.memory), Arc::clone(&object.regions)));
        // SAFETY: the program's promise; the memory lives as long as the region, which holds it.
        let mr = unsafe { register_in(pd, addr.cast(), length, 0, access, held) };
        if mr.is_null() {
            object.regions.fetch_sub(1, Ordering::AcqRel);
        } else {
            // SAFETY: just made. The memory has no address of the program's.
            unsafe { (*mr).addr = std::ptr::null_mut() };
        }
        mr
    })
}
