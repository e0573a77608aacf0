//! `fi_fabric`, and the objects that are opened on a fabric.

use libc::{c_int, c_void};

use super::object::{FabricObject, NONE, Table, ended_int, give, head, ops, take};
use crate::abi::*;
use crate::opened::OPENED;

static OPS: Table<fi_ops> = ops(close as *const (), NONE, NONE);
static FABRIC_OPS: Table<fi_ops_fabric> = Table(fi_ops_fabric {
    size: size_of::<fi_ops_fabric>(),
    domain: super::domain::open as *const (),
    passive_ep: NONE,
    eq_open: super::eq::open as *const (),
    wait_open: NONE,
    trywait: trywait as *const (),
    domain2: NONE,
});

/// Opens the fabric.
pub(crate) unsafe extern "C" fn open(
    attr: *const fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: the caller passes null or a valid pointer.
        let attr = unsafe { attr.as_ref() }.ok_or(FI_EINVAL)?;
        let fid = fid_fabric {
            fid: head(FI_CLASS_FABRIC, context, &OPS),
            ops: &raw const FABRIC_OPS.0,
            api_version: attr.api_version,
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe {
            let given = give(FabricObject { fid }, fabric)?;
            OPENED.add_fabric(*fabric);
            Ok(given)
        }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        if OPENED.has_domains(at) {
            return Err(FI_EBUSY);
        }
        OPENED.remove(at);
        // SAFETY: this process opened the object, and the program does not use it any more.
        unsafe { take::<FabricObject, _>(at) }.map(|_| 0)
    })
}

unsafe extern "C" fn trywait(_fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int {
    ended_int(|| {
        for i in 0..usize::try_from(count).map_err(|_negative| FI_EINVAL)? {
            // SAFETY: the list has `count` objects (guaranteed by the caller).
            let (at, class) = unsafe {
                let at = *fids.add(i);
                (at, at.as_ref().ok_or(FI_EINVAL)?.fclass)
            };
            match u32::try_from(class).unwrap_or(0) {
                // SAFETY: the class tells the type of the object.
                FI_CLASS_CQ => unsafe { super::cq::trywait(at.cast()) }?,
                // SAFETY: as above.
                FI_CLASS_EQ => unsafe { super::eq::trywait(at.cast()) }?,
                _ => return Err(FI_ENOSYS),
            }
        }
        Ok(0)
    })
}
