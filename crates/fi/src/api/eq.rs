//! Event queues, which are always empty: address vectors are filled synchronously, and there are no connections.

use std::time::Duration;

use libc::{c_char, c_int, c_void};

use super::object::{NONE, Table, ended, ended_int, give, head, known, ops, take};
use crate::abi::*;
use crate::event::Wait;

#[repr(C)]
struct EventQueue {
    c: fid_eq,
    wait: Option<Wait>,
}

static OPS: Table<fi_ops> = ops(close as *const (), NONE, control as *const ());
static EQ_OPS: Table<fi_ops_eq> = Table(fi_ops_eq {
    size: size_of::<fi_ops_eq>(),
    read: nothing as *const (),
    readerr: nothing as *const (),
    write: NONE,
    sread: sread as *const (),
    strerror: strerror as *const (),
});

pub(crate) unsafe extern "C" fn open(
    _fabric: *mut fid_fabric,
    attr: *mut fi_eq_attr,
    eq: *mut *mut fid_eq,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: the caller passes null or a valid pointer.
        let wanted = unsafe { attr.as_ref() }.map_or(FI_WAIT_NONE, |a| a.wait_obj);
        let wait = match wanted {
            FI_WAIT_NONE | FI_WAIT_UNSPEC => None,
            FI_WAIT_FD => Some(Wait::alone().ok_or(FI_ENOMEM)?),
            _ => return Err(FI_ENOSYS),
        };
        let c = fid_eq {
            fid: head(FI_CLASS_EQ, context, &OPS),
            ops: &raw const EQ_OPS.0,
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(EventQueue { c, wait }, eq) }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    // SAFETY: this process opened the object, and the program does not use it any more.
    ended_int(|| unsafe { take::<EventQueue, _>(at).map(|_| 0) })
}

unsafe extern "C" fn control(at: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    ended_int(|| {
        // SAFETY: the object was opened by this library; the argument is valid for writing a descriptor (guaranteed by the caller).
        unsafe {
            let queue = known::<EventQueue, _>(at)?;
            let (FI_GETWAIT, Some(wait)) = (command, &queue.wait) else {
                return Err(FI_ENOSYS);
            };
            *arg.cast::<c_int>().as_mut().ok_or(FI_EINVAL)? = wait.fd();
        }
        Ok(0)
    })
}

extern "C" fn nothing() -> isize {
    -(FI_EAGAIN as isize)
}

unsafe extern "C" fn sread(
    _eq: *mut fid_eq,
    _event: *mut u32,
    _buf: *mut c_void,
    _len: usize,
    timeout: c_int,
    _flags: u64,
) -> isize {
    ended(|| {
        // A negative time-out waits forever, since no event arrives.
        let ms = u64::try_from(timeout).unwrap_or(u64::MAX);
        std::thread::sleep(Duration::from_millis(ms));
        Err(FI_EAGAIN)
    })
}

unsafe extern "C" fn strerror(
    _eq: *mut fid_eq,
    errno: c_int,
    _data: *const c_void,
    _buf: *mut c_char,
    _len: usize,
) -> *const c_char {
    // SAFETY: every number has a text.
    unsafe { libc::strerror(errno) }
}
