//! The context, protection domain and XRC domain that identifiers share, and the list of devices.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use anywarp_core::lock::Mutex;
use anywarp_engine::process::PerProcess;

use crate::entry;
use crate::ffi::{Errno, last_errno, put};
use crate::verbs::open::{free_list, ibv_close_device, list_of_one, open};
use crate::verbs::pd::ibv_alloc_pd;
use crate::verbs::srq::{close_xrcd, open_xrcd};
use anywarp_verbs_sys::verbs::*;

/// The context that all identifiers share, and the default protection domain.
#[derive(Debug)]
pub(super) struct Shared {
    context: AtomicPtr<ibv_context>,
    pd: AtomicPtr<ibv_pd>,
    /// Opened at its first use.
    xrcd: OnceLock<AtomicPtr<ibv_xrcd>>,
}

/// [`Shared`], and the lock under which it is created.
#[derive(Default)]
struct State {
    shared: OnceLock<Shared>,
    creation: Mutex<()>,
}

/// Returns the shared context. Opens the device at the first call.
pub(super) fn shared() -> Result<&'static Shared, Errno> {
    static STATE: PerProcess<State> = PerProcess::new(State::default);
    let state = STATE.get();
    if let Some(shared) = state.shared.get() {
        return Ok(shared);
    }
    let _creation = state.creation.lock();
    if let Some(shared) = state.shared.get() {
        return Ok(shared);
    }
    let context = open()?;
    // SAFETY: the context was opened above.
    let pd = unsafe { ibv_alloc_pd(context) };
    if pd.is_null() {
        let errno = last_errno();
        // SAFETY: nothing uses the context yet.
        unsafe { ibv_close_device(context) };
        return Err(errno);
    }
    Ok(state.shared.get_or_init(|| Shared {
        context: AtomicPtr::new(context),
        pd: AtomicPtr::new(pd),
        xrcd: OnceLock::new(),
    }))
}

impl Shared {
    pub(super) fn context(&self) -> *mut ibv_context {
        self.context.load(Ordering::Relaxed)
    }

    pub(super) fn pd(&self) -> *mut ibv_pd {
        self.pd.load(Ordering::Relaxed)
    }

    /// Returns the default XRC domain.
    pub(super) fn xrcd(&self) -> Result<*mut ibv_xrcd, Errno> {
        if let Some(xrcd) = self.xrcd.get() {
            return Ok(xrcd.load(Ordering::Relaxed));
        }
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        // SAFETY: the context stays open.
        let new = unsafe { open_xrcd(self.context(), &raw mut init) };
        if new.is_null() {
            return Err(last_errno());
        }
        let xrcd = self.xrcd.get_or_init(|| AtomicPtr::new(new));
        let xrcd = xrcd.load(Ordering::Relaxed);
        if xrcd != new {
            // Another thread has opened one meanwhile.
            // SAFETY: nothing uses this domain yet.
            unsafe { close_xrcd(new) };
        }
        Ok(xrcd)
    }
}

entry! {
    /// `rdma_get_devices(3)`.
    ///
    /// # Safety
    /// `num` is null or valid for writes.
    unsafe fn rdma_get_devices(num: *mut c_int) -> *mut *mut ibv_context, null, {
        let shared = shared();
        if !num.is_null() {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { put(num, shared.is_ok().into()) }?;
        }
        let shared = shared?;
        Ok(list_of_one(shared.context()))
    }
}

entry! {
    /// `rdma_free_devices(3)`.
    ///
    /// # Safety
    /// `list` is null or came from `rdma_get_devices`, and is not used again.
    unsafe fn rdma_free_devices(list: *mut *mut ibv_context), nothing, {
        // SAFETY: upheld by the caller.
        unsafe { free_list(list) };
        Ok(())
    }
}
