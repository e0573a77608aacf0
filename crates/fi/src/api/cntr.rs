//! Counters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{c_int, c_void};

use super::object::{
    CntrObject, DomainObject, NONE, Table, ended_int, give, head, known, ops, take,
};
use crate::abi::*;
use crate::queue::Counter;

static OPS: Table<fi_ops> = ops(close as *const (), NONE, NONE);
static CNTR_OPS: Table<fi_ops_cntr> = Table(fi_ops_cntr {
    size: size_of::<fi_ops_cntr>(),
    read: read as *const (),
    readerr: readerr as *const (),
    add: add as *const (),
    set: set as *const (),
    wait: wait as *const (),
    adderr: adderr as *const (),
    seterr: seterr as *const (),
});

pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_cntr_attr,
    cntr: *mut *mut fid_cntr,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: upheld by the caller.
        let (domain, attr) = unsafe { (&known::<DomainObject, _>(domain)?.domain, attr.as_ref()) };
        if let Some(attr) = attr {
            // Completions are counted, not bytes, and a wait yields the processor again and again.
            let yields = matches!(attr.wait_obj, FI_WAIT_NONE | FI_WAIT_UNSPEC | FI_WAIT_YIELD);
            if attr.events != 0 || !yields {
                return Err(FI_ENOSYS);
            }
            if attr.flags != 0 {
                return Err(FI_EINVAL);
            }
        }
        let name = domain.lock().shared.counters.insert(Counter::default());
        let object = CntrObject {
            fid: fid_cntr {
                fid: head(FI_CLASS_CNTR, context, &OPS),
                ops: &raw const CNTR_OPS.0,
            },
            domain: Arc::clone(domain),
            name: name.map_err(|_full| FI_ENOMEM)?,
            rest: (),
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(object, cntr) }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<CntrObject, _>(at) }?;
        let mut state = object.domain.lock();
        let used = state
            .endpoints
            .iter()
            .any(|(_, ep)| ep.binding.counters.contains(&Some(object.name)));
        if used {
            return Err(FI_EBUSY);
        }
        state.shared.counters.remove(object.name);
        drop(state);
        // SAFETY: the program does not use the object any more.
        unsafe { take::<CntrObject, _>(at) }?;
        Ok(0)
    })
}

/// Returns the value of the counter, without handling completions.
fn known_value(object: &CntrObject) -> Counter {
    let state = object.domain.lock();
    let counter = state.shared.counters.get(object.name);
    counter.copied().unwrap_or_default()
}

/// Returns the value of the counter, after handling the completions of the device.
fn value(object: &CntrObject) -> Counter {
    let mut state = object.domain.lock();
    state.progress();
    let counter = state.shared.counters.get(object.name);
    counter.copied().unwrap_or_default()
}

unsafe extern "C" fn read(cntr: *mut fid_cntr) -> u64 {
    // SAFETY: this process opened the object.
    unsafe { known::<CntrObject, _>(cntr) }.map_or(0, |object| value(object).value)
}

unsafe extern "C" fn readerr(cntr: *mut fid_cntr) -> u64 {
    // SAFETY: this process opened the object.
    unsafe { known::<CntrObject, _>(cntr) }.map_or(0, |object| value(object).errors)
}

/// # Safety
/// `cntr` is null or was opened by this library.
unsafe fn change(cntr: *mut fid_cntr, f: impl FnOnce(&mut Counter)) -> c_int {
    ended_int(|| {
        // SAFETY: upheld by the caller.
        let object = unsafe { known::<CntrObject, _>(cntr) }?;
        let mut state = object.domain.lock();
        f(state
            .shared
            .counters
            .get_mut(object.name)
            .ok_or(FI_EINVAL)?);
        Ok(0)
    })
}

unsafe extern "C" fn add(cntr: *mut fid_cntr, n: u64) -> c_int {
    // SAFETY: this process opened the object.
    unsafe { change(cntr, |c| c.value = c.value.wrapping_add(n)) }
}

unsafe extern "C" fn set(cntr: *mut fid_cntr, n: u64) -> c_int {
    // SAFETY: this process opened the object.
    unsafe { change(cntr, |c| c.value = n) }
}

unsafe extern "C" fn adderr(cntr: *mut fid_cntr, n: u64) -> c_int {
    // SAFETY: this process opened the object.
    unsafe { change(cntr, |c| c.errors = c.errors.wrapping_add(n)) }
}

unsafe extern "C" fn seterr(cntr: *mut fid_cntr, n: u64) -> c_int {
    // SAFETY: this process opened the object.
    unsafe { change(cntr, |c| c.errors = n) }
}

unsafe extern "C" fn wait(cntr: *mut fid_cntr, threshold: u64, timeout: c_int) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<CntrObject, _>(cntr) }?;
        let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
        // Completions are handled only afterwards, so that a failure that the device already knows of ends the wait.
        let before = known_value(object).errors;
        let begin = Instant::now();
        loop {
            let now = value(object);
            if now.value >= threshold {
                return Ok(0);
            }
            if now.errors != before {
                return Err(FI_EAVAIL);
            }
            if limit.is_some_and(|limit| begin.elapsed() >= limit) {
                return Err(FI_ETIMEDOUT);
            }
            std::thread::yield_now();
        }
    })
}
