//! Functions that were added to librdmacm after rdma-core 44: resolution of addresses in the background, and events that the program
//! reports itself.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::Arc;

use anywarp_engine::cm::EventKind;
use anywarp_engine::sys::thread;

use super::addrinfo::{self, Failure, List, RAI_SA};
use super::event::{complete, prepare_wait};
use super::id::IdObject;
use crate::entry;
use crate::ffi::{Errno, os_errno, put};
use crate::verbs::handle::live;
use anywarp_verbs_sys::cm::*;

/// Resolution by name, which is the default.
const RAI_DNS: c_int = 0x20;

/// Copies a C string that may be null.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn owned(text: *const c_char) -> Option<CString> {
    // SAFETY: the pointer is not null, so it is a C string (guaranteed by the caller).
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_owned())
}

/// The arguments of a resolution. They are copies, because the program may free its own before the resolution ends.
struct Resolution {
    node: Option<CString>,
    service: Option<CString>,
    hints: Option<List>,
}

impl Resolution {
    /// Resolves the addresses. An error is the status of the event that reports it.
    fn run(&self) -> Result<List, c_int> {
        let text = |t: &Option<CString>| t.as_ref().map_or(std::ptr::null(), |t| t.as_ptr());
        // SAFETY: `self` owns the strings and the hints.
        let found = unsafe {
            let hints = self.hints.as_ref().and_then(|h| h.0.as_ref());
            addrinfo::look_up(text(&self.node), text(&self.service), hints)
        };
        found.map_err(Failure::status)
    }
}

entry! {
    /// `rdma_resolve_addrinfo(3)`: reports the result by RDMA_CM_EVENT_ADDRINFO_RESOLVED or RDMA_CM_EVENT_ADDRINFO_ERROR.
    ///
    /// # Safety
    /// `id` is live; `node` and `service` are null or C strings, `hints` is null or valid.
    unsafe fn rdma_resolve_addrinfo(
        id: *mut rdma_cm_id, node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let (object, given) = unsafe { (live::<IdObject, _>(id)?, hints.as_ref()) };
        let flags = given.map_or(0, |h| h.ai_flags);
        if flags & RAI_SA != 0 {
            return Err(if flags & RAI_DNS != 0 { libc::EINVAL } else { libc::EOPNOTSUPP });
        }
        if node.is_null() && service.is_null() && given.is_none() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let resolution = unsafe {
            Resolution {
                node: owned(node),
                service: owned(service),
                hints: given.map(|h| List(addrinfo::duplicate(h, false))),
            }
        };
        prepare_wait(object)?;
        object.resolved.set(None);
        let (engine, resolved) = (Arc::clone(&object.engine), object.resolved.clone());
        // A name server may take long to answer. The engine's own thread has connections to serve, and for an asynchronous identifier
        // this call returns at once, so another thread waits for the answer.
        let resolver = std::thread::Builder::new().name("anywarp-resolve".to_owned()).spawn(move || {
            thread::block_signals();
            let (kind, status) = match resolution.run() {
                Ok(list) => {
                    resolved.set(Some(list));
                    (EventKind::AddrinfoResolved, 0)
                }
                Err(status) => (EventKind::AddrinfoError, status),
            };
            engine.report(kind, status, 0);
        });
        resolver.map_err(|e| os_errno(&e))?;
        complete(object).map(|()| 0)
    }
}

entry! {
    /// `rdma_query_addrinfo(3)`: writes a copy of the addresses that `rdma_resolve_addrinfo` has found last. The program frees it.
    ///
    /// # Safety
    /// `id` is live, `info` is null or valid for writes.
    unsafe fn rdma_query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let object = unsafe { live::<IdObject, _>(id) }?;
        if info.is_null() {
            return Err(libc::EINVAL);
        }
        let list = object.resolved.duplicate().ok_or(libc::ENODATA)?;
        // SAFETY: `info` is valid for writes (guaranteed by the caller).
        unsafe { put(info, list) }?;
        Ok(0)
    }
}

entry! {
    /// `rdma_write_cm_event(3)`: allows only events of type RDMA_CM_EVENT_USER.
    ///
    /// # Safety
    /// `id` is live.
    unsafe fn rdma_write_cm_event(
        id: *mut rdma_cm_id, event: rdma_cm_event_type, status: c_int, arg: u64,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let object = unsafe { live::<IdObject, _>(id) }?;
        if event != EventKind::User as rdma_cm_event_type {
            return Err(libc::EINVAL);
        }
        let arg = usize::try_from(arg).map_err(|_too_wide| -> Errno { libc::EINVAL })?;
        object.engine.report(EventKind::User, status, arg);
        Ok(0)
    }
}
