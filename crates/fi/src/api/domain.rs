//! Domains, and memory regions registered with them.

use std::sync::Arc;

use libc::{c_int, c_void, iovec};

use super::object::{
    DomainObject, FabricObject, NONE, Object, Table, ended_int, give, head, known, ops, take,
};
use crate::abi::*;
use crate::atomics::Class;
use crate::domain::Domain;
use crate::endpoint::Registered;
use crate::opened::OPENED;
use crate::verbs::{Access, Device, Region};

type MrObject = Object<fid_mr, Region>;

static OPS: Table<fi_ops> = ops(close as *const (), bind as *const (), NONE);
static DOMAIN_OPS: Table<fi_ops_domain> = Table(fi_ops_domain {
    size: size_of::<fi_ops_domain>(),
    av_open: super::av::open as *const (),
    cq_open: super::cq::open as *const (),
    endpoint: super::ep::open as *const (),
    scalable_ep: NONE,
    cntr_open: super::cntr::open as *const (),
    poll_open: NONE,
    stx_ctx: NONE,
    srx_ctx: NONE,
    query_atomic: query_atomic as *const (),
    query_collective: NONE,
    endpoint2: NONE,
});
static MR_OPS: Table<fi_ops_mr> = Table(fi_ops_mr {
    size: size_of::<fi_ops_mr>(),
    reg: reg as *const (),
    regv: regv as *const (),
    regattr: regattr as *const (),
});
static REGION_OPS: Table<fi_ops> =
    ops(close_region as *const (), NONE, control_region as *const ());

pub(crate) unsafe extern "C" fn open(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    domain: *mut *mut fid_domain,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: the fabric was opened by this library (guaranteed by the caller).
        let api = unsafe { known::<FabricObject, _>(fabric) }?.fid.api_version;
        if info.is_null() {
            return Err(FI_EINVAL);
        }
        let device = Device::get().map_err(|why| {
            crate::log::warn(&why.to_string());
            FI_ENODEV
        })?;
        let object = DomainObject {
            fid: fid_domain {
                fid: head(FI_CLASS_DOMAIN, context, &OPS),
                ops: &raw const DOMAIN_OPS.0,
                mr: &raw const MR_OPS.0,
            },
            domain: Domain::new(device, api)?,
            name: 0,
            rest: (),
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe {
            let given = give(object, domain)?;
            OPENED.add_domain(*domain, fabric);
            Ok(given)
        }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<DomainObject, _>(at) }?;
        if Arc::strong_count(&object.domain) > 1 {
            return Err(FI_EBUSY);
        }
        OPENED.remove(at);
        super::eq::unbind(at);
        // SAFETY: the program does not use the object any more.
        unsafe { take::<DomainObject, _>(at) }?;
        Ok(0)
    })
}

unsafe extern "C" fn bind(at: *mut fid, other: *mut fid, flags: u64) -> c_int {
    ended_int(|| {
        // With FI_REG_MR, registrations would have to report their end as events.
        if flags != 0 {
            return Err(FI_EBADFLAGS);
        }
        // SAFETY: the pointer is null or an object (guaranteed by the caller).
        let class = unsafe { other.as_ref() }.ok_or(FI_EINVAL)?.fclass;
        // A domain has no events, so binding an event queue only keeps the queue open.
        if class == FI_CLASS_EQ as usize {
            super::eq::bind(at, other);
            Ok(0)
        } else {
            Err(FI_EINVAL)
        }
    })
}

unsafe extern "C" fn query_atomic(
    _domain: *mut fid_domain,
    datatype: u32,
    op: u32,
    attr: *mut fi_atomic_attr,
    flags: u64,
) -> c_int {
    ended_int(|| {
        let class = match flags {
            0 => Class::Write,
            FI_FETCH_ATOMIC => Class::Fetch,
            FI_COMPARE_ATOMIC => Class::Compare,
            _ => return Err(FI_EBADFLAGS),
        };
        // SAFETY: the caller passes null or a valid pointer.
        let attr = unsafe { attr.as_mut() }.ok_or(FI_EINVAL)?;
        let (count, size) = super::atomic::room_for(datatype, op, class)?;
        attr.count = count;
        attr.size = size;
        Ok(0)
    })
}

/// # Safety
/// `at` is null or a domain of the program. Until the region is closed, the memory stays mapped, and if `access` has a remote right to
/// write, no code relies on the memory being unchanged. `mr` is null or has room for a pointer.
unsafe fn register(
    at: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    mr: *mut *mut fid_mr,
    context: *mut c_void,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    let domain = &unsafe { known::<DomainObject, _>(at) }?.domain;
    let rights = Access::Remote {
        read: access & FI_REMOTE_READ != 0,
        write: access & FI_REMOTE_WRITE != 0,
    };
    // SAFETY: upheld by the caller.
    let region = unsafe { Region::new(&domain.pd, buf.expose_provenance(), len, rights) }?;
    let registered = Registered {
        at: buf.expose_provenance(),
        len,
        read: access & FI_REMOTE_READ != 0,
        write: access & FI_REMOTE_WRITE != 0,
    };
    let key = region.rkey();
    let object = MrObject {
        fid: fid_mr {
            fid: head(FI_CLASS_MR, context, &REGION_OPS),
            mem_desc: std::ptr::null_mut(),
            key: key.into(),
        },
        domain: Arc::clone(domain),
        name: 0,
        rest: region,
    };
    // SAFETY: upheld by the caller.
    let given = unsafe { give(object, mr) }?;
    // Only now, so that a region that the program did not get is not in the table.
    domain.lock().shared.registered.insert(key, registered);
    Ok(given)
}

unsafe extern "C" fn reg(
    at: *mut fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    _offset: u64,
    _key: u64,
    flags: u64,
    mr: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        if flags != 0 {
            return Err(FI_EBADFLAGS);
        }
        // SAFETY: upheld by the caller.
        unsafe { register(at, buf, len, access, mr, context) }
    })
}

unsafe extern "C" fn regv(
    at: *mut fid,
    iov: *const iovec,
    count: usize,
    access: u64,
    _offset: u64,
    _key: u64,
    flags: u64,
    mr: *mut *mut fid_mr,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        if flags != 0 {
            return Err(FI_EBADFLAGS);
        }
        if count != 1 {
            return Err(FI_EINVAL);
        }
        // SAFETY: upheld by the caller; the list has one element.
        unsafe {
            let iov = iov.as_ref().ok_or(FI_EINVAL)?;
            register(at, iov.iov_base, iov.iov_len, access, mr, context)
        }
    })
}

unsafe extern "C" fn regattr(
    at: *mut fid,
    attr: *const fi_mr_attr,
    flags: u64,
    mr: *mut *mut fid_mr,
) -> c_int {
    ended_int(|| {
        if flags != 0 {
            return Err(FI_EBADFLAGS);
        }
        // SAFETY: the attributes are null, or they and their list are valid (guaranteed by the caller).
        unsafe {
            let attr = attr.as_ref().ok_or(FI_EINVAL)?;
            if attr.iov_count != 1 {
                return Err(FI_EINVAL);
            }
            let iov = attr.mr_iov.as_ref().ok_or(FI_EINVAL)?;
            register(at, iov.iov_base, iov.iov_len, attr.access, mr, attr.context)
        }
    })
}

unsafe extern "C" fn close_region(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: the object was created by this library, and the program does not use it any more.
        let object = unsafe { take::<MrObject, _>(at) }?;
        let mut state = object.domain.lock();
        state.shared.registered.remove(&object.rest.rkey());
        Ok(0)
    })
}

/// `fi_mr_enable` has no effect, because regions are enabled from the start.
unsafe extern "C" fn control_region(_at: *mut fid, command: c_int, _arg: *mut c_void) -> c_int {
    if command == FI_ENABLE { 0 } else { -FI_ENOSYS }
}
