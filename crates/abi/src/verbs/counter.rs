//! Completion counters count completed requests or bytes, without an entry in a completion queue for each request.
//!
//! They were added in rdma-core 65. The distribution's headers may be older, so this file defines their types.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

use anywarp_core::verbs::counter::{Entry, Ops, Unit};
use anywarp_engine::config::config;
use anywarp_engine::objects::CompletionCounter;

use super::handle::{CStruct, Object, into_c, live, returned};
use super::object::{ContextObject, QpObject, Users};
use crate::entry;
use crate::ffi::{Errno, arg, misuse, put, put_prefix};
use crate::profile::{Counted, CountedObject, profile};
use anywarp_verbs_sys::verbs::*;

/// The public part of a completion counter.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_comp_cntr {
    context: *mut ibv_context,
    handle: u32,
}

/// The attributes of a new counter.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_comp_cntr_init_attr {
    comp_mask: u32,
    kind: c_uint,
    flags: u32,
}

const IBV_COMP_CNTR_TYPE_WRS: c_uint = 0;
const IBV_COMP_CNTR_TYPE_BYTES: c_uint = 1;

/// The operations that an attached counter counts.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_qp_attach_comp_cntr_attr {
    comp_mask: u32,
    op_mask: u32,
}

/// The capabilities of the device's counters.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ibv_comp_cntr_caps {
    max_value: u64,
    max_counters: u32,
    supported_qp_attach_ops: u32,
}

/// A completion counter.
#[repr(C)]
struct CounterObject {
    c: CStruct<ibv_comp_cntr>,
    engine: CompletionCounter,
    /// The queue pairs that the counter is attached to.
    users: Users,
    _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_comp_cntr` comes first.
unsafe impl Object<ibv_comp_cntr> for CounterObject {}

/// Returns the operations that can be counted. Queue pairs over UDP cannot count the operations of the peer.
fn supported() -> Ops {
    if config().rc_over_udp {
        Ops::LOCAL
    } else {
        Ops(Ops::LOCAL.0 | Ops::REMOTE.0)
    }
}

entry! {
    /// `_ibv_query_comp_cntr_caps`, the function behind `ibv_query_comp_cntr_caps(3)`.
    ///
    /// # Safety
    /// `context` is null or open, `caps` is null or has `size` bytes.
    unsafe fn _ibv_query_comp_cntr_caps(
        context: *mut ibv_context, caps: *mut ibv_comp_cntr_caps, size: usize,
    ) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }?;
        if profile().max_counters == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let all = ibv_comp_cntr_caps {
            max_value: u64::MAX,
            max_counters: profile().max_counters,
            supported_qp_attach_ops: supported().0,
        };
        // SAFETY: upheld by the caller.
        unsafe { put_prefix(caps, &all, size) }
    }
}

entry! {
    /// `ibv_create_comp_cntr(3)`.
    ///
    /// # Safety
    /// `context` is null or open, `attr` is null or valid.
    unsafe fn ibv_create_comp_cntr(
        context: *mut ibv_context, attr: *mut ibv_comp_cntr_init_attr,
    ) -> *mut ibv_comp_cntr, null, {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // SAFETY: upheld by the caller.
        let (device, attr) = unsafe { (ContextObject::live(context)?, arg(attr)?) };
        if attr.comp_mask != 0 || attr.flags != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let unit = match attr.kind {
            IBV_COMP_CNTR_TYPE_WRS => Unit::Requests,
            IBV_COMP_CNTR_TYPE_BYTES => Unit::Bytes,
            _ => return Err(libc::EOPNOTSUPP),
        };
        let counted = CountedObject::take(Counted::Counter)?;
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(into_c(CounterObject {
            c: CStruct::new(ibv_comp_cntr { context, handle }),
            engine: CompletionCounter::new(&device.engine, unit),
            users: Users::default(),
            _counted: counted,
        }))
    }
}

entry! {
    /// `ibv_destroy_comp_cntr(3)`: EBUSY while it is attached to a queue pair.
    ///
    /// # Safety
    /// `counter` came from `ibv_create_comp_cntr` and is not used after this returns 0.
    unsafe fn ibv_destroy_comp_cntr(counter: *mut ibv_comp_cntr) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let Some(counter) = unsafe { returned::<CounterObject, _>(counter) }? else { return Ok(()) };
        if counter.users.any() {
            return Err(libc::EBUSY);
        }
        drop(counter.take());
        Ok(())
    }
}

entry! {
    /// `ibv_qp_attach_comp_cntr(3)`: the counter stays attached until the queue pair is destroyed.
    ///
    /// # Safety
    /// `qp` and `counter` are null or live, `attr` is null or valid.
    unsafe fn ibv_qp_attach_comp_cntr(
        qp: *mut ibv_qp, counter: *mut ibv_comp_cntr, attr: *mut ibv_qp_attach_comp_cntr_attr,
    ) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let (qp, counter, attr) =
            unsafe { (live::<QpObject, _>(qp)?, live::<CounterObject, _>(counter)?, arg(attr)?) };
        if attr.comp_mask != 0 || attr.op_mask & !supported().0 != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if attr.op_mask == 0 {
            return Err(libc::EINVAL);
        }
        let attached = counter.users.enter();
        qp.engine
            .attach_counter(&counter.engine.core, Ops(attr.op_mask))
            .map_err(|e| misuse("ibv_qp_attach_comp_cntr", &e))?;
        qp.counters.lock().push(attached);
        Ok(())
    }
}

/// Calls `change` with a live counter.
///
/// # Safety
/// `counter` is null or points to a live counter.
unsafe fn with(
    counter: *mut ibv_comp_cntr,
    change: impl FnOnce(&CompletionCounter),
) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    change(unsafe { &live::<CounterObject, _>(counter)?.engine });
    Ok(())
}

entry! {
    /// `ibv_set_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live counter.
    unsafe fn ibv_set_comp_cntr(counter: *mut ibv_comp_cntr, value: u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { with(counter, |c| c.core.set(Entry::Done, value)) }
    }
}

entry! {
    /// `ibv_set_err_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live counter.
    unsafe fn ibv_set_err_comp_cntr(counter: *mut ibv_comp_cntr, value: u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { with(counter, |c| c.core.set(Entry::Failed, value)) }
    }
}

entry! {
    /// `ibv_inc_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live counter.
    unsafe fn ibv_inc_comp_cntr(counter: *mut ibv_comp_cntr, amount: u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { with(counter, |c| c.core.add(Entry::Done, amount)) }
    }
}

entry! {
    /// `ibv_inc_err_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live counter.
    unsafe fn ibv_inc_err_comp_cntr(counter: *mut ibv_comp_cntr, amount: u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { with(counter, |c| c.core.add(Entry::Failed, amount)) }
    }
}

entry! {
    /// `ibv_read_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live object, `value` is null or valid for writes.
    unsafe fn ibv_read_comp_cntr(counter: *mut ibv_comp_cntr, value: *mut u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { put(value, live::<CounterObject, _>(counter)?.engine.read(Entry::Done)) }
    }
}

entry! {
    /// `ibv_read_err_comp_cntr(3)`.
    ///
    /// # Safety
    /// `counter` is null or points to a live object, `value` is null or valid for writes.
    unsafe fn ibv_read_err_comp_cntr(counter: *mut ibv_comp_cntr, value: *mut u64) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { put(value, live::<CounterObject, _>(counter)?.engine.read(Entry::Failed)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The layout is that of the structures of rdma-core 65.
    #[test]
    fn the_structures_have_the_offsets_of_the_headers() {
        assert_eq!(size_of::<ibv_comp_cntr>(), 16);
        assert_eq!(offset_of!(ibv_comp_cntr, handle), 8);
        assert_eq!(size_of::<ibv_comp_cntr_init_attr>(), 12);
        assert_eq!(offset_of!(ibv_comp_cntr_init_attr, kind), 4);
        assert_eq!(offset_of!(ibv_comp_cntr_init_attr, flags), 8);
        assert_eq!(size_of::<ibv_qp_attach_comp_cntr_attr>(), 8);
        assert_eq!(size_of::<ibv_comp_cntr_caps>(), 16);
        assert_eq!(offset_of!(ibv_comp_cntr_caps, max_counters), 8);
        assert_eq!(offset_of!(ibv_comp_cntr_caps, supported_qp_attach_ops), 12);
    }
}
