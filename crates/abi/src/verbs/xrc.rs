//! Extended reliable connections: domains, their shared receive queues, and queue pairs that send or receive only.
//!
//! A domain that is opened with a descriptor of a file is the same for all who open it with that file, within this
//! process: receive buffers of another process are out of reach of a device that lives inside this one.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anywarp_core::verbs::xrc::{XrcDomain, XrcSrq};
use anywarp_engine::fd;
use anywarp_engine::process::PerProcess;

use super::object::{CqObject, SrqObject, from_c, into_c, is_lost, is_lost_context, of};
use super::types::*;
use crate::fail;

/// An XRC domain as one caller has it.
#[repr(C)]
pub(crate) struct XrcdObject {
    c: ibv_xrcd,
    pub(crate) domain: Arc<XrcDomain>,
    /// Queue pairs and shared receive queues that were made with it.
    pub(crate) users: Arc<AtomicUsize>,
}

/// What a shared receive queue of a domain has besides.
pub(crate) struct XrcPart {
    queue: Arc<XrcSrq>,
    domain: Arc<XrcDomain>,
    users: Arc<AtomicUsize>,
    cq: *mut ibv_cq,
}

type Files = HashMap<(u64, u64), Weak<XrcDomain>>;

/// Domains by device and inode of their file.
fn files() -> MutexGuard<'static, Files> {
    static FILES: PerProcess<Mutex<Files>> = PerProcess::new(Mutex::default);
    FILES.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ibv_open_xrcd(3)`.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    crate::guard(std::ptr::null_mut(), || {
        const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        if context.is_null() || init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: open and valid (the program's promise).
        let (lost, init) = unsafe { (is_lost_context(context), &*init) };
        if lost {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        if init.comp_mask != NEEDED || init.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        match domain(init.fd, init.oflags) {
            Ok(domain) => into_c(XrcdObject {
                c: ibv_xrcd { context },
                domain,
                users: Arc::new(AtomicUsize::new(0)),
            }),
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    })
}

/// The domain of a file, as the flags ask for it; -1 is a domain of the caller's own.
fn domain(fd: c_int, flags: c_int) -> Result<Arc<XrcDomain>, i32> {
    let creates = flags & libc::O_CREAT != 0;
    if fd == -1 {
        return if creates {
            Ok(Arc::default())
        } else {
            Err(libc::EINVAL)
        };
    }
    let file = fd::duplicate(fd).ok_or(libc::EBADF)?;
    let key = fd::identity(&file).ok_or(libc::EBADF)?;
    let mut files = files();
    files.retain(|_, d| d.strong_count() > 0);
    match files.get(&key).and_then(Weak::upgrade) {
        Some(_) if creates && flags & libc::O_EXCL != 0 => Err(libc::EEXIST),
        Some(domain) => Ok(domain),
        None if creates => {
            let domain = Arc::new(XrcDomain::default());
            files.insert(key, Arc::downgrade(&domain));
            Ok(domain)
        }
        None => Err(libc::ENOENT),
    }
}

/// `ibv_close_xrcd(3)`: EBUSY while something was made with it.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    crate::guard(libc::EIO, || {
        if xrcd.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<XrcdObject, _>(xrcd) } {
            return 0;
        }
        // SAFETY: as above.
        if unsafe { of::<XrcdObject, _>(xrcd) }
            .users
            .load(Ordering::Acquire)
            > 0
        {
            return libc::EBUSY;
        }
        // SAFETY: not used again (the program's promise).
        drop(unsafe { from_c::<XrcdObject, _>(xrcd) });
        0
    })
}

/// Makes a shared receive queue reachable in a domain.
///
/// # Safety
/// They live, and the completion queue and the domain do for as long as the shared receive queue.
pub(crate) unsafe fn enter(srq: *mut ibv_srq, xrcd: *mut ibv_xrcd, cq: *mut ibv_cq) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    // SAFETY: the caller's promise.
    let (object, xrcd, queue_of) = unsafe {
        (
            &mut *srq.cast::<SrqObject>(),
            of::<XrcdObject, _>(xrcd),
            of::<CqObject, _>(cq),
        )
    };
    let owner = Arc::downgrade(&object.engine);
    let queue = Arc::new(XrcSrq::new(
        NEXT.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff,
        Arc::clone(&object.engine.core),
        Arc::clone(&queue_of.engine.core),
        Box::new(move || {
            if let Some(owner) = owner.upgrade() {
                owner.tell_limit();
            }
        }),
    ));
    xrcd.domain.enter(&queue);
    xrcd.users.fetch_add(1, Ordering::AcqRel);
    queue_of.users.fetch_add(1, Ordering::AcqRel);
    object.xrc = Some(XrcPart {
        queue,
        domain: Arc::clone(&xrcd.domain),
        users: Arc::clone(&xrcd.users),
        cq,
    });
}

impl XrcPart {
    /// The queue's number.
    pub(crate) fn number(&self) -> u32 {
        self.queue.number()
    }

    /// The shared receive queue goes: nothing of it is taken or told from now on.
    pub(crate) fn leave(&self) {
        self.domain.leave(self.queue.number());
        self.queue.close();
        self.users.fetch_sub(1, Ordering::AcqRel);
        // SAFETY: a completion queue lives while it is used.
        unsafe { of::<CqObject, _>(self.cq) }
            .users
            .fetch_sub(1, Ordering::AcqRel);
    }
}

/// `ibv_get_srq_num(3)`: numbers exist for XRC only.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    crate::guard(libc::EIO, || {
        if srq.is_null() || number.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<SrqObject, _>(srq) } {
            return libc::ENODEV;
        }
        // SAFETY: as above.
        match &unsafe { of::<SrqObject, _>(srq) }.xrc {
            Some(part) => {
                // SAFETY: not null, so valid (the program's promise).
                unsafe { number.write(part.number()) };
                0
            }
            None => libc::EOPNOTSUPP,
        }
    })
}
