//! Device memory: a few pages that belong to the device. Programs access it with two copy functions and through a region.
//!
//! Hardware accesses device memory in words of four octets. For compatibility, an offset or a length that is not a multiple
//! of four is refused here too.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, Weak};

use anywarp_core::bounds;
use anywarp_core::lock::Mutex;
use anywarp_core::verbs::access::Access;
use anywarp_engine::objects::DeviceMemory;
use anywarp_engine::process::PerProcess;

use super::handle::{CStruct, into_c, known, live, returned};
use super::memory::register_in;
use super::object::{Backing, ContextObject, DmObject, MrObject, Users};
use crate::entry;
use crate::ffi::{Errno, arg, errno, null};
use anywarp_verbs_sys::verbs::*;

/// Device memory by handle, for `ibv_import_dm`.
fn by_handle() -> MutexGuard<'static, HashMap<u32, Weak<DeviceMemory>>> {
    static TABLE: PerProcess<Mutex<HashMap<u32, Weak<DeviceMemory>>>> =
        PerProcess::new(Mutex::default);
    TABLE.get().lock()
}

fn make(context: *mut ibv_context, handle: u32, memory: Arc<DeviceMemory>) -> *mut ibv_dm {
    let c = ibv_dm {
        context,
        memcpy_to_dm: Some(copy_to),
        memcpy_from_dm: Some(copy_from),
        comp_mask: 0,
        handle,
    };
    into_c(DmObject {
        c: CStruct::new(c),
        memory,
        regions: Users::default(),
    })
}

/// `ibv_alloc_dm(3)`. A child of fork(2) may call it with a context of its parent, because it does not use the engine.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    null("ibv_alloc_dm", || {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // SAFETY: the program passes null or a valid pointer.
        let attr = unsafe { arg(attr) }?;
        if attr.comp_mask != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let aligned = attr.log_align_req <= bounds::DEVICE_MEMORY_ALIGN_LOG;
        if context.is_null() || attr.length == 0 || !aligned {
            return Err(libc::EINVAL);
        }
        let memory = Arc::new(DeviceMemory::new(attr.length).ok_or(libc::ENOMEM)?);
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut all = by_handle();
        all.retain(|_, memory| memory.strong_count() > 0);
        all.insert(handle, Arc::downgrade(&memory));
        drop(all);
        Ok(make(context, handle, memory))
    })
}

/// Frees a handle of `ibv_alloc_dm` or `ibv_import_dm`. EBUSY while a region exists that was registered with this handle.
///
/// # Safety
/// `dm` is null or points to a live object, and is not used again when this succeeds.
unsafe fn free(dm: *mut ibv_dm) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let Some(dm) = unsafe { returned::<DmObject, _>(dm) }? else {
        return Ok(());
    };
    if dm.regions.any() {
        return Err(libc::EBUSY);
    }
    drop(dm.take());
    Ok(())
}

/// `ibv_free_dm(3)`: EBUSY while a region exists that was registered with this handle.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: upheld by the program.
    errno("ibv_free_dm", || unsafe { free(dm) })
}

entry! {
    /// `ibv_import_dm(3)`.
    ///
    /// # Safety
    /// `context` is null or points to an open context.
    unsafe fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm, null, {
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }.map_err(|_any| libc::EINVAL)?;
        let memory = by_handle().get(&handle).and_then(Weak::upgrade).ok_or(libc::EINVAL)?;
        Ok(make(context, handle, memory))
    }
}

entry! {
    /// `ibv_unimport_dm(3)`. One of the users of the memory frees its handle, and the others call this function.
    ///
    /// # Safety
    /// `dm` is null or points to a live object, and is not used again.
    unsafe fn ibv_unimport_dm(dm: *mut ibv_dm), nothing, {
        // SAFETY: upheld by the caller.
        unsafe { free(dm) }
    }
}

/// Returns the address of `[offset, offset + length)` if the range is inside the memory and consists of whole words.
fn at(memory: &DeviceMemory, offset: u64, length: usize) -> Option<*mut u8> {
    const WORD: usize = 4;
    let offset = usize::try_from(offset).ok()?;
    let words = offset.is_multiple_of(WORD) && length.is_multiple_of(WORD);
    let inside = offset.checked_add(length)? <= memory.len();
    (words && inside).then(|| std::ptr::with_exposed_provenance_mut(memory.start() + offset))
}

/// Like [`at`], for the two copy functions.
///
/// # Safety
/// `dm` is live.
unsafe fn window(dm: *mut ibv_dm, offset: u64, length: usize) -> Result<*mut u8, Errno> {
    // SAFETY: `dm` is live (guaranteed by the caller). A child of fork(2) may call this: the pages are copied on write.
    let memory = unsafe { &known::<DmObject, _>(dm).memory };
    at(memory, offset, length).ok_or(libc::EINVAL)
}

unsafe extern "C" fn copy_to(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    errno("ibv_memcpy_to_dm", || {
        // SAFETY: `dm` is live and `from` has `length` readable bytes (guaranteed by the program); the window is inside the memory.
        unsafe { std::ptr::copy(from.cast(), window(dm, offset, length)?, length) };
        Ok(())
    })
}

unsafe extern "C" fn copy_from(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    errno("ibv_memcpy_from_dm", || {
        // SAFETY: `dm` is live and `to` has `length` writable bytes (guaranteed by the program); the window is inside the memory.
        unsafe { std::ptr::copy(window(dm, offset, length)?, to.cast(), length) };
        Ok(())
    })
}

/// `ibv_reg_dm_mr(3)`: the addresses of the region begin at 0.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    null("ibv_reg_dm_mr", || {
        if pd.is_null() || !Access(access).has(Access::ZERO_BASED) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the program passes null or a live object.
        let dm = unsafe { live::<DmObject, _>(dm) }?;
        let addr = at(&dm.memory, offset, length).ok_or(libc::EINVAL)?;
        let held = Backing::Device {
            _memory: Arc::clone(&dm.memory),
            _use: dm.regions.enter(),
        };
        // SAFETY: `pd` is live (guaranteed by the program); the region holds a reference to the memory.
        let mr = unsafe { register_in(pd, addr.cast(), length, 0, access, held) }?;
        // As on hardware, the program gets no address of the memory: the region shows address 0.
        // SAFETY: the object was created above.
        unsafe { known::<MrObject, _>(mr) }
            .c
            .set(|c| c.addr = std::ptr::null_mut());
        Ok(mr)
    })
}
