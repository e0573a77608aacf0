//! The extended completion queue, `ibv_cq_ex`: start, next, end, and the reading functions.

use std::ffi::{c_int, c_uint};

use anywarp_core::verbs::wc::Completion;

use super::attributes::wall_clock;
use super::convert::{flags_of, imm_of};
use super::cq::create_cq;
use super::handle::{known, live};
use super::object::{CqObject, PdObject, Shown};
use crate::ffi::{Errno, arg, code_fast, null, or_fast};
use anywarp_verbs_sys::verbs::*;

/// Polls one completion and makes it the current one, whose fields the reading functions return.
///
/// ENOENT: there is none, and the queue is still valid. EIO: there is none, and the queue has overflowed, so completions are missing.
///
/// # Safety
/// `cq` is null or points to a live object, and only this thread polls between start and end.
unsafe fn show_next(cq: *mut ibv_cq_ex, first: bool) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let queue = unsafe { live::<CqObject, _>(cq) }?;
    let mut found = None;
    if first {
        queue.engine.poll(1, |_, c| found = Some(c.clone()));
    } else {
        // Only completions that are already queued are polled. If this call also handled sockets, a completion could arrive while
        // the program empties the queue. The completion would raise an event, the program would still take the completion in the same
        // loop, and the queue would be empty when the program handles the event.
        queue.engine.poll_waiting(1, |_, c| found = Some(c.clone()));
    }
    let Some(completion) = found else {
        // If ENOENT were returned, a program would wait for ever for a completion that was dropped.
        let broken = queue.engine.core.is_broken();
        return Err(if broken { libc::EIO } else { libc::ENOENT });
    };
    queue.c.set(|c| {
        c.status = completion.status as u32;
        c.wr_id = completion.wr_id;
    });
    let shown = Shown {
        completion,
        at: wall_clock(),
    };
    // SAFETY: only the polling thread uses the slot (guaranteed by the caller).
    unsafe { *queue.current.get() = Some(shown) };
    Ok(())
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    code_fast("ibv_start_poll", || {
        // SAFETY: the program passes null or a valid pointer.
        if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the program.
        unsafe { show_next(cq, true) }
    })
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: upheld by the program.
    code_fast("ibv_next_poll", || unsafe { show_next(cq, false) })
}

unsafe extern "C" fn end_poll(_cq: *mut ibv_cq_ex) {}

/// Defines functions that read a field of the current completion.
macro_rules! readers {
    ($($name:ident: $type:ty = |$shown:ident| $value:expr;)*) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            or_fast("ibv_wc_read", 0, || {
                // SAFETY: the queue is live; between start and end only the polling thread uses the slot (guaranteed by the program).
                let slot = unsafe { &*known::<CqObject, _>(cq).current.get() };
                Ok(slot.as_ref().map_or(0, |$shown: &Shown| $value))
            })
        }
    )*};
}

readers! {
    read_opcode: ibv_wc_opcode = |s| s.completion.op as u32;
    read_vendor_err: u32 = |s| s.completion.vendor_err;
    read_byte_len: u32 = |s| s.completion.byte_len;
    read_imm_data: be32 = |s| imm_of(&s.completion);
    read_qp_num: u32 = |s| s.completion.qpn;
    read_src_qp: u32 = |s| s.completion.src_qpn;
    read_wc_flags: c_uint = |s| flags_of(&s.completion);
    read_sl: u8 = |s| s.completion.sl;
    read_time: u64 = |s| s.at;
    // These fields do not exist on this device.
    read_zero8: u8 = |_s| 0;
    read_zero16: u16 = |_s| 0;
    read_zero32: u32 = |_s| 0;
}

/// Returns the current completion of the queue.
///
/// # Safety
/// `cq` is null or points to a live queue. Only the calling thread polls it, and this thread does not poll it while
/// the result is used.
pub(crate) unsafe fn shown<'a>(cq: *mut ibv_cq_ex) -> Option<&'a Completion> {
    // SAFETY: upheld by the caller.
    let queue = unsafe { live::<CqObject, _>(cq) }.ok()?;
    // SAFETY: only the polling thread uses the slot (guaranteed by the caller).
    let slot = unsafe { &*queue.current.get() };
    slot.as_ref().map(|shown| &shown.completion)
}

/// `ibv_create_cq_ex(3)`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    null("ibv_create_cq_ex", || {
        const WC: u64 = IBV_WC_EX_WITH_BYTE_LEN
            | IBV_WC_EX_WITH_IMM
            | IBV_WC_EX_WITH_QP_NUM
            | IBV_WC_EX_WITH_SRC_QP
            | IBV_WC_EX_WITH_SLID
            | IBV_WC_EX_WITH_SL
            | IBV_WC_EX_WITH_DLID_PATH_BITS
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        // SAFETY: the program passes null or a valid pointer.
        let init = unsafe { arg(init) }?;
        let flags = if init.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
            init.flags
        } else {
            0
        };
        let allowed = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        if init.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
            || init.wc_flags & !WC != 0
            || flags & !allowed != 0
        {
            return Err(libc::EOPNOTSUPP);
        }
        let vector = c_int::try_from(init.comp_vector).unwrap_or(-1);
        let domain = if init.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            // SAFETY: the program passes null or a live object.
            Some(unsafe { live::<PdObject, _>(init.parent_domain) }?)
        } else {
            None
        };
        let (cqe, user) = (init.cqe, init.cq_context);
        // SAFETY: the program passes null or a live object.
        let cq = unsafe { create_cq(context, cqe, user, init.channel, vector, domain) }?;
        // SAFETY: the object was created above.
        let queue = unsafe { known::<CqObject, _>(cq) };
        if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            queue.engine.core.allow_overrun();
        }
        queue.c.set(|c| {
            c.start_poll = Some(start_poll);
            c.next_poll = Some(next_poll);
            c.end_poll = Some(end_poll);
            c.read_opcode = Some(read_opcode);
            c.read_vendor_err = Some(read_vendor_err);
            c.read_wc_flags = Some(read_wc_flags);
            c.read_byte_len = Some(read_byte_len);
            c.read_imm_data = Some(read_imm_data);
            c.read_qp_num = Some(read_qp_num);
            c.read_src_qp = Some(read_src_qp);
            c.read_slid = Some(read_zero32);
            c.read_sl = Some(read_sl);
            c.read_dlid_path_bits = Some(read_zero8);
            c.read_cvlan = Some(read_zero16);
            c.read_flow_tag = Some(read_zero32);
            c.read_completion_ts = Some(read_time);
            c.read_completion_wallclock_ns = Some(read_time);
        });
        Ok(cq.cast::<ibv_cq_ex>())
    })
}
