//! Shared receive queues, and the XRC domains that some of them belong to.
//!
//! All callers in a process that open an XRC domain with a descriptor of the same file get the same domain. Other processes get
//! another one, because a device inside a process cannot access receive buffers of another process.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, Weak};

use anywarp_core::lock::Mutex;
use anywarp_core::verbs::xrc::{XrcDomain, XrcSrq};
use anywarp_engine::fd;
use anywarp_engine::objects::SharedReceive;
use anywarp_engine::process::PerProcess;

use super::async_event::forget_events;
use super::handle::{CStruct, into_c, live, returned, set_c_object};
use super::object::{
    Acks, ContextObject, CqObject, PdObject, SrqObject, Users, XrcPart, XrcdObject,
};
use crate::entry;
use crate::ffi::{Errno, arg, arg_mut, errno, misuse, null, put};
use crate::profile::{Counted, CountedObject, profile};
use anywarp_verbs_sys::verbs::*;

/// Creates a shared receive queue.
///
/// # Safety
/// `pd` is null or points to a live protection domain.
unsafe fn create(
    pd: *mut ibv_pd,
    srq_context: *mut c_void,
    attr: &mut ibv_srq_attr,
    xrc: Option<(&XrcdObject, &CqObject)>,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: upheld by the caller.
    let domain = unsafe { live::<PdObject, _>(pd) }?;
    profile().admits_srq(attr)?;
    let counted = CountedObject::take(Counted::Srq)?;
    // ibv_create_srq(3): `srq_limit` is not an attribute of a new queue. Many programs leave it uninitialized.
    let engine = SharedReceive::new(domain.device(), attr.max_wr, attr.max_sge, &domain.engine)
        .map_err(|e| misuse("ibv_create_srq", &e))?;
    domain.engine.enter();
    let c = ibv_srq {
        context: domain.context(),
        srq_context,
        pd,
        ..ibv_srq::default()
    };
    let srq: *mut ibv_srq = into_c(SrqObject {
        c: CStruct::new(c),
        xrc: xrc.map(|(xrcd, cq)| enter(&engine, xrcd, cq)),
        engine: Arc::clone(&engine),
        pd: Arc::clone(&domain.engine),
        acks: Acks::default(),
        users: Users::default(),
        _counted: counted,
    });
    set_c_object(&engine.c_object, srq);
    Ok(srq)
}

entry! {
    /// `ibv_create_srq(3)`.
    ///
    /// # Safety
    /// `pd` is null or points to a live object, `init` is null or valid.
    unsafe fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq, null, {
        // SAFETY: upheld by the caller.
        unsafe {
            let init = arg_mut(init)?;
            create(pd, init.srq_context, &mut init.attr, None)
        }
    }
}

/// `ibv_create_srq_ex(3)`: creates a basic queue or a queue of an XRC domain.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    null("ibv_create_srq_ex", || {
        const KNOWN: u32 = IBV_SRQ_INIT_ATTR_TYPE
            | IBV_SRQ_INIT_ATTR_PD
            | IBV_SRQ_INIT_ATTR_XRCD
            | IBV_SRQ_INIT_ATTR_CQ;
        // SAFETY: the program passes null or a valid pointer.
        let init = unsafe { arg_mut(init) }?;
        let has = |bit: u32| init.comp_mask & bit != 0;
        if init.comp_mask & !KNOWN != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let xrc = match init.srq_type {
            _ if !has(IBV_SRQ_INIT_ATTR_TYPE) => false,
            IBV_SRQT_BASIC => false,
            IBV_SRQT_XRC => true,
            _ => return Err(libc::EOPNOTSUPP),
        };
        if !has(IBV_SRQ_INIT_ATTR_PD) {
            return Err(libc::EINVAL);
        }
        let of_domain = if xrc {
            if !has(IBV_SRQ_INIT_ATTR_XRCD) || !has(IBV_SRQ_INIT_ATTR_CQ) {
                return Err(libc::EINVAL);
            }
            // SAFETY: the program passes null or a live object.
            Some(unsafe {
                (
                    live::<XrcdObject, _>(init.xrcd)?,
                    live::<CqObject, _>(init.cq)?,
                )
            })
        } else {
            None
        };
        // SAFETY: the protection domain is null or points to a live object (guaranteed by the program).
        unsafe { create(init.pd, init.srq_context, &mut init.attr, of_domain) }
    })
}

entry! {
    /// `ibv_modify_srq(3)`.
    ///
    /// # Safety
    /// `srq` is null or points to a live object, `attr` is null or valid.
    unsafe fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int, errno, {
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let (srq, attr) = unsafe { (live::<SrqObject, _>(srq)?, arg(attr)?) };
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        if max_wr.is_some_and(|n| !profile().has.resize_srq || n > profile().max_srq_wr) {
            return Err(libc::EINVAL);
        }
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        srq.engine.modify(max_wr, limit).map_err(|e| misuse("ibv_modify_srq", &e))
    }
}

entry! {
    /// `ibv_query_srq(3)`.
    ///
    /// # Safety
    /// `srq` is null or points to a live object, `attr` is null or valid for writes.
    unsafe fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let srq = unsafe { live::<SrqObject, _>(srq) }?;
        let (max_wr, max_sge, srq_limit) = srq.engine.core.attributes();
        // SAFETY: upheld by the caller.
        unsafe { put(attr, ibv_srq_attr { max_wr, max_sge, srq_limit }) }
    }
}

entry! {
    /// `ibv_destroy_srq(3)`: EBUSY while a queue pair uses it.
    ///
    /// # Safety
    /// `srq` came from a create call and is not used after this returns 0.
    unsafe fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(queue) = unsafe { returned::<SrqObject, _>(srq) }? else { return Ok(()) };
        if queue.users.any() {
            return Err(libc::EBUSY);
        }
        if let Some(part) = &queue.xrc {
            part.leave();
        }
        forget_events(queue.device(), srq.addr());
        queue.acks.wait();
        queue.pd.leave();
        drop(queue.take());
        Ok(())
    }
}

// ---------------------------------------------------------------------- XRC

/// The descriptor keeps the file: otherwise another file could get its inode.
type Files = HashMap<(u64, u64), (Weak<XrcDomain>, OwnedFd)>;

/// XRC domains by device and inode of their file.
fn by_file() -> MutexGuard<'static, Files> {
    static FILES: PerProcess<Mutex<Files>> = PerProcess::new(Mutex::default);
    FILES.get().lock()
}

/// `ibv_open_xrcd(3)`.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    null("ibv_open_xrcd", || {
        const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        // SAFETY: the pointers are null, or open and valid (guaranteed by the program).
        let (_open, init) = unsafe { (ContextObject::live(context)?, arg(init)?) };
        if init.comp_mask != NEEDED || init.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(libc::EINVAL);
        }
        Ok(into_c(XrcdObject {
            c: CStruct::new(ibv_xrcd { context }),
            domain: domain_of(init.fd, init.oflags)?,
            users: Users::default(),
        }))
    })
}

/// Opens or creates the domain of a file, according to the flags. Descriptor -1 stands for a domain that is not shared.
fn domain_of(fd: c_int, flags: c_int) -> Result<Arc<XrcDomain>, Errno> {
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
    let mut files = by_file();
    forget_closed(&mut files);
    match files.get(&key).and_then(|(domain, _)| domain.upgrade()) {
        Some(_) if creates && flags & libc::O_EXCL != 0 => Err(libc::EEXIST),
        Some(domain) => Ok(domain),
        None if creates => {
            let domain = Arc::new(XrcDomain::default());
            files.insert(key, (Arc::downgrade(&domain), file));
            Ok(domain)
        }
        None => Err(libc::ENOENT),
    }
}

/// `ibv_close_xrcd(3)`: EBUSY while a shared receive queue or a queue pair uses it.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    errno("ibv_close_xrcd", || {
        // SAFETY: the pointer is null or a domain that is not used again (guaranteed by the program).
        let Some(xrcd) = unsafe { returned::<XrcdObject, _>(xrcd) }? else {
            return Ok(());
        };
        if xrcd.users.any() {
            return Err(libc::EBUSY);
        }
        drop(xrcd.take());
        forget_closed(&mut by_file());
        Ok(())
    })
}

/// Closes the files of domains that nothing uses any more.
fn forget_closed(files: &mut Files) {
    files.retain(|_, (domain, _)| domain.strong_count() > 0);
}

/// Adds a shared receive queue to an XRC domain, so that peers can address it by its number.
fn enter(srq: &Arc<SharedReceive>, xrcd: &XrcdObject, cq: &CqObject) -> XrcPart {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let owner = Arc::downgrade(srq);
    let next = || NEXT.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff;
    // After 16 million queues, the numbers begin again. A queue from before may still exist.
    let mut number = next();
    while xrcd.domain.find(number).is_some() {
        number = next();
    }
    let queue = Arc::new(XrcSrq::new(
        number,
        Arc::clone(&srq.core),
        Arc::clone(&cq.engine.core),
        Box::new(move || {
            if let Some(owner) = owner.upgrade() {
                owner.raise_limit_event();
            }
        }),
    ));
    xrcd.domain.enter(&queue);
    XrcPart {
        queue,
        domain: Arc::clone(&xrcd.domain),
        _uses: [xrcd.users.enter(), cq.users.enter()],
    }
}

/// `ibv_get_srq_num(3)`: only queues of an XRC domain have a number.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    errno("ibv_get_srq_num", || {
        // SAFETY: the queue is null or live, and `number` is null or valid for writes (guaranteed by the program).
        let srq = unsafe { live::<SrqObject, _>(srq) }?;
        if number.is_null() {
            return Err(libc::EINVAL);
        }
        let part = srq.xrc.as_ref().ok_or(libc::EOPNOTSUPP)?;
        // SAFETY: as above.
        unsafe { put(number, part.queue.number()) }
    })
}
