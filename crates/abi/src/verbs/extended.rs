//! The extended interfaces: `ibv_cq_ex` (start, next, end, read), `ibv_qp_ex` (`wr_*`), and the `_ex` creators.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::PoisonError;

use anywarp_core::bounds;
use anywarp_core::datagram::Kind;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{Immediate, InlineData, Op, Payload, Remote, Sge, Sges, WorkRequest};
use anywarp_core::wire::{Stag, To};

use super::device;
use super::memory::bind_of;
use super::object::{CqObject, QpObject, is_lost, misuse, of};
use super::ops::{destination_of, flags_of, imm_of, sges_of};
use super::queue::{create_cq, create_srq};
use super::types::*;
use crate::fail;
use crate::profile::profile;

// ---------------------------------------------------------------------- completion queues

/// The completion that the reading functions show.
#[derive(Debug)]
pub(crate) struct Shown {
    completion: Completion,
    /// Nanoseconds of the real-time clock when it was taken.
    at: u64,
}

fn wallclock() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

/// Polls one completion and shows it; 0 or ENOENT.
unsafe fn show_next(cq: *mut ibv_cq_ex, first: bool) -> c_int {
    // SAFETY: lives (the program's promise).
    if unsafe { is_lost::<CqObject, _>(cq) } {
        return libc::ENODEV;
    }
    // SAFETY: lives, and only one thread polls between start and end (the program's promise).
    let object = unsafe { of::<CqObject, _>(cq) };
    let mut found = None;
    if first {
        object.engine.poll(1, |_, c| found = Some(c));
    } else {
        // No pass over the sockets: a completion that is made while the program empties the queue would raise an event
        // and be gone when the program comes to it.
        object.engine.poll_waiting(1, |_, c| found = Some(c));
    }
    let Some(completion) = found else {
        return libc::ENOENT;
    };
    // SAFETY: as above.
    let c = unsafe { &mut *cq };
    c.status = completion.status as u32;
    c.wr_id = completion.wr_id;
    // SAFETY: as above: nobody else looks at the slot.
    unsafe {
        *object.current.get() = Some(Shown {
            completion,
            at: wallclock(),
        });
    };
    0
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    crate::quick_guard(libc::EIO, || {
        // SAFETY: not null, so valid (the program's promise).
        if !attr.is_null() && unsafe { (*attr).comp_mask } != 0 {
            return libc::EINVAL;
        }
        // SAFETY: the program's promise.
        unsafe { show_next(cq, true) }
    })
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the program's promise.
    crate::quick_guard(libc::EIO, || unsafe { show_next(cq, false) })
}

unsafe extern "C" fn end_poll(_cq: *mut ibv_cq_ex) {}

/// Reads from the shown completion.
unsafe fn read<T: Default>(cq: *mut ibv_cq_ex, field: impl FnOnce(&Shown) -> T) -> T {
    // SAFETY: lives; between start and end only the polling thread uses the slot (the program's promise).
    let slot = unsafe { &*of::<CqObject, _>(cq).current.get() };
    slot.as_ref().map_or_else(T::default, field)
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    // SAFETY: the program's promise (all reading functions).
    unsafe { read(cq, |s| s.completion.op as u32) }
}
unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.completion.vendor_err) }
}
unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.completion.byte_len) }
}
unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> be32 {
    // SAFETY: as above.
    unsafe { read(cq, |s| imm_of(&s.completion)) }
}
unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.completion.qpn) }
}
unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.completion.src_qpn) }
}
unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: as above.
    unsafe { read(cq, |s| flags_of(&s.completion)) }
}
unsafe extern "C" fn read_zero32(_cq: *mut ibv_cq_ex) -> u32 {
    0
}
unsafe extern "C" fn read_zero16(_cq: *mut ibv_cq_ex) -> u16 {
    0
}
unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.completion.sl) }
}
unsafe extern "C" fn read_zero8(_cq: *mut ibv_cq_ex) -> u8 {
    0
}
unsafe extern "C" fn read_time(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: as above.
    unsafe { read(cq, |s| s.at) }
}

/// `ibv_create_cq_ex(3)`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    crate::guard(std::ptr::null_mut(), || {
        const WC: u64 = IBV_WC_EX_WITH_BYTE_LEN
            | IBV_WC_EX_WITH_IMM
            | IBV_WC_EX_WITH_QP_NUM
            | IBV_WC_EX_WITH_SRC_QP
            | IBV_WC_EX_WITH_SLID
            | IBV_WC_EX_WITH_SL
            | IBV_WC_EX_WITH_DLID_PATH_BITS
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        if init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (the program's promise).
        let init = unsafe { &*init };
        let flags = if init.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
            init.flags
        } else {
            0
        };
        let known = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        if init.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
            || init.wc_flags & !WC != 0
            || flags & !known != 0
        {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        let vector = c_int::try_from(init.comp_vector).unwrap_or(-1);
        // SAFETY: the program's promise.
        let cq =
            match unsafe { create_cq(context, init.cqe, init.cq_context, init.channel, vector) } {
                Ok(cq) => cq.cast::<ibv_cq_ex>(),
                Err(e) => return fail(e, std::ptr::null_mut()),
            };
        // SAFETY: just made.
        let (object, c) = unsafe { (of::<CqObject, _>(cq), &mut *cq) };
        if flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            object.engine.core.allow_overrun();
        }
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
        cq
    })
}

/// `ibv_modify_cq(3)`: moderation is accepted and changes nothing: events are never late here.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    crate::guard(libc::EIO, || {
        if cq.is_null() || attr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: not null, so valid (the program's promise).
        if unsafe { (*attr).attr_mask } & !IBV_CQ_ATTR_MODERATE != 0 {
            return libc::EOPNOTSUPP;
        }
        0
    })
}

// ---------------------------------------------------------------------- shared receive queues, device

/// `ibv_create_srq_ex(3)`: basic ones, and those of an XRC domain.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    crate::guard(std::ptr::null_mut(), || {
        const XRC: u32 = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
        if init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (the program's promise).
        let init = unsafe { &mut *init };
        let kind = if init.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 {
            init.srq_type
        } else {
            IBV_SRQT_BASIC
        };
        if kind != IBV_SRQT_BASIC && kind != IBV_SRQT_XRC {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || init.pd.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        let xrc = kind == IBV_SRQT_XRC;
        if xrc && (init.comp_mask & XRC != XRC || init.xrcd.is_null() || init.cq.is_null()) {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: the program's promise.
        match unsafe { create_srq(init.pd, init.srq_context, &mut init.attr) } {
            Ok(srq) => {
                if xrc {
                    // SAFETY: just made; the others live (the program's promise).
                    unsafe { super::xrc::enter(srq, init.xrcd, init.cq) };
                }
                srq
            }
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    })
}

/// `ibv_query_rt_values_ex(3)`.
pub(crate) unsafe extern "C" fn query_rt_values(
    _context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    crate::guard(libc::EIO, || {
        if values.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: not null, so valid (the program's promise).
        let values = unsafe { &mut *values };
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            let now = wallclock();
            values.raw_clock.tv_sec = i64::try_from(now / 1_000_000_000).unwrap_or(0);
            values.raw_clock.tv_nsec = i64::try_from(now % 1_000_000_000).unwrap_or(0);
        }
        values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        0
    })
}

/// `ibv_query_device_ex(3)`: fills what the caller's struct has room for.
pub(crate) unsafe extern "C" fn query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    crate::guard(libc::EIO, || {
        // SAFETY: not null, so valid (the program's promise).
        if attr.is_null() || !input.is_null() && unsafe { (*input).comp_mask } != 0 {
            return libc::EINVAL;
        }
        let p = profile();
        let mut all = ibv_device_attr_ex {
            orig_attr: device::attributes(),
            odp_caps: p.odp,
            max_dm_size: p.max_dm_size,
            xrc_odp_caps: p.xrc_odp,
            device_cap_flags_ex: p.caps.into(),
            phys_port_cnt_ex: 1,
            ..ibv_device_attr_ex::default()
        };
        if p.has.extended_cq {
            all.completion_timestamp_mask = u64::MAX;
            all.hca_core_clock = 1_000_000;
            all.cq_mod_caps = ibv_cq_moderation_caps {
                max_cq_count: u16::MAX,
                max_cq_period: u16::MAX,
            };
        }
        let size = size.min(size_of::<ibv_device_attr_ex>());
        // SAFETY: the caller's struct has `size` bytes, ours too.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast::<u8>(), size);
        };
        0
    })
}

// ---------------------------------------------------------------------- queue pairs

/// Requests between `wr_start` and `wr_complete`. Only a lock of the queue pair's own is held in between, so that other
/// verbs may be called there.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    requests: Vec<WorkRequest>,
    error: Option<Misuse>,
}

/// Operations that a queue pair of this type has.
pub(crate) fn known_ops(kind: ibv_qp_type) -> u64 {
    let send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let rest = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_ATOMIC_WRITE
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW
        | IBV_QP_EX_WITH_SEND_WITH_INV;
    let all = match kind {
        IBV_QPT_RC | IBV_QPT_XRC_SEND => send | write | rest,
        IBV_QPT_UC => send | write,
        IBV_QPT_UD => send,
        _ => 0,
    };
    all & profile().send_ops()
}

/// Operations that a datagram queue pair of our own making has.
pub(crate) fn known_datagram_ops(kind: Kind) -> u64 {
    let sends = known_ops(IBV_QPT_UD);
    let one_sided =
        IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
    match kind {
        Kind::Rd => known_ops(IBV_QPT_RC) & !IBV_QP_EX_WITH_ATOMIC_WRITE,
        _ => sends | one_sided,
    }
}

/// Puts the functions in.
pub(crate) fn fill(qp: &mut ibv_qp_ex, ops: u64) {
    let has = |bit: u64| ops & bit != 0;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_send = has(IBV_QP_EX_WITH_SEND).then_some(wr_send as _);
    qp.wr_send_imm = has(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm as _);
    qp.wr_send_inv = has(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv as _);
    qp.wr_rdma_write = has(IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write as _);
    qp.wr_rdma_write_imm =
        has(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm as _);
    qp.wr_rdma_read = has(IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read as _);
    qp.wr_atomic_cmp_swp = has(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp as _);
    qp.wr_atomic_fetch_add =
        has(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add as _);
    qp.wr_atomic_write = has(IBV_QP_EX_WITH_ATOMIC_WRITE).then_some(wr_atomic_write as _);
    qp.wr_local_inv = has(IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv as _);
    qp.wr_bind_mw = has(IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw as _);
}

unsafe fn with_builder<T: Default>(qp: *mut ibv_qp_ex, f: impl FnOnce(&mut Builder) -> T) -> T {
    // SAFETY: lives (the program's promise).
    if unsafe { is_lost::<QpObject, _>(qp) } {
        return T::default();
    }
    // SAFETY: lives (the program's promise).
    let object = unsafe { of::<QpObject, _>(qp) };
    crate::quick_guard(T::default(), || {
        f(&mut object
            .builder
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    })
}

unsafe fn begin(qp: *mut ibv_qp_ex, op: Op) {
    // SAFETY: lives (the program's promise).
    let (id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let request = WorkRequest {
        id,
        op,
        payload: Payload::empty(),
        signaled: flags & IBV_SEND_SIGNALED != 0,
        solicited: flags & IBV_SEND_SOLICITED != 0,
        fence: flags & IBV_SEND_FENCE != 0,
        destination: None,
        srq: None,
    };
    // SAFETY: the program's promise.
    unsafe { with_builder(qp, |b| b.requests.push(request)) };
}

unsafe fn set_payload(qp: *mut ibv_qp_ex, payload: Result<Payload, Misuse>) {
    // SAFETY: the program's promise.
    unsafe {
        with_builder(qp, |b| match (payload, b.requests.last_mut()) {
            (Ok(payload), Some(request)) => request.payload = payload,
            (Err(e), _) => b.error = Some(e),
            (Ok(_), None) => b.error = Some(Misuse::WrongState("wr_set_* before a wr_* operation")),
        });
    }
}

fn remote(rkey: u32, to: u64) -> Remote {
    Remote {
        rkey: Stag(rkey),
        to: To(to),
    }
}

fn imm(value: be32) -> Option<Immediate> {
    Some(value.to_ne_bytes())
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the program's promise (all functions of this group).
    unsafe {
        with_builder(qp, |b| {
            b.requests.clear();
            b.error = None;
        });
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    crate::quick_guard(libc::EIO, || {
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: as above.
        let (mut requests, error) =
            unsafe { with_builder(qp, |b| (std::mem::take(&mut b.requests), b.error.take())) };
        if let Some(e) = error {
            return misuse("ibv_wr_complete", &e);
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<QpObject, _>(qp) };
        let posted = object.engine.post_send(requests.drain(..).map(Ok));
        // The next ones have room there, if another thread has not begun with them.
        // SAFETY: as above.
        unsafe {
            with_builder(qp, |b| {
                if b.requests.is_empty() {
                    b.requests = requests;
                }
            });
        }
        match posted {
            Ok(()) => 0,
            Err((_, e)) => misuse("ibv_wr_complete", &e),
        }
    })
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as above.
    unsafe { with_builder(qp, |b| *b = Builder::default()) };
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Send {
                imm: None,
                invalidate: None,
            },
        );
    };
}
unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, value: be32) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Send {
                imm: imm(value),
                invalidate: None,
            },
        );
    };
}
unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Send {
                imm: None,
                invalidate: Some(Stag(rkey)),
            },
        );
    };
}
unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, to: u64) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Write {
                remote: remote(rkey, to),
                imm: None,
            },
        );
    };
}
unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, to: u64, value: be32) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Write {
                remote: remote(rkey, to),
                imm: imm(value),
            },
        );
    };
}
unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, to: u64) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::Read {
                remote: remote(rkey, to),
            },
        );
    };
}
unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    to: u64,
    compare: u64,
    swap: u64,
) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::CompareSwap {
                remote: remote(rkey, to),
                compare,
                swap,
            },
        );
    };
}
unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, to: u64, add: u64) {
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::FetchAdd {
                remote: remote(rkey, to),
                add,
            },
        );
    };
}
unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, to: u64, word: *const c_void) {
    let mut data = InlineData::new();
    if !word.is_null() {
        // SAFETY: eight bytes (the program's promise).
        data.extend_from_slice(&unsafe { word.cast::<[u8; 8]>().read_unaligned() });
    }
    // SAFETY: as above.
    unsafe {
        begin(
            qp,
            Op::AtomicWrite {
                remote: remote(rkey, to),
            },
        );
        with_builder(qp, |b| {
            if let Some(request) = b.requests.last_mut() {
                request.payload = Payload::Inline(data);
            }
        });
    };
}
unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, Op::LocalInvalidate { stag: Stag(rkey) }) };
}
unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    crate::quick_guard((), || {
        // SAFETY: valid (the program's promise).
        match unsafe { bind_of(mw, rkey, &*info) } {
            // SAFETY: as above.
            Ok(bind) => unsafe { begin(qp, Op::Bind(bind)) },
            // SAFETY: as above.
            Err(e) => unsafe { with_builder(qp, |b| b.error = Some(e)) },
        }
    });
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, number: u32) {
    // SAFETY: the program's promise.
    crate::quick_guard((), || unsafe {
        with_builder(qp, |b| match b.requests.last_mut() {
            Some(request) => request.srq = Some(number),
            None => {
                b.error = Some(Misuse::WrongState(
                    "wr_set_xrc_srqn before a wr_* operation",
                ));
            }
        });
    });
}
unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    crate::quick_guard((), || {
        // SAFETY: the handle lives (the program's promise).
        let to = unsafe { destination_of(ah, qpn, qkey) };
        // SAFETY: as above.
        unsafe {
            with_builder(qp, |b| match (to, b.requests.last_mut()) {
                (Ok(to), Some(request)) => request.destination = Some(to),
                (Err(e), _) => b.error = Some(e),
                (Ok(_), None) => {
                    b.error = Some(Misuse::WrongState("wr_set_ud_addr before a wr_* operation"));
                }
            });
        }
    });
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, len: u32) {
    crate::quick_guard((), || {
        let mut sges = Sges::new();
        sges.push(Sge {
            addr,
            len,
            lkey: Stag(lkey),
        });
        // SAFETY: as above.
        unsafe { set_payload(qp, Ok(Payload::Sges(sges))) };
    });
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, n: usize, list: *const ibv_sge) {
    crate::quick_guard((), || {
        // SAFETY: the list has `n` elements (the program's promise).
        let sges = unsafe { sges_of(list, c_int::try_from(n).unwrap_or(c_int::MAX)) };
        // SAFETY: as above.
        unsafe { set_payload(qp, Ok(Payload::Sges(sges))) };
    });
}

/// Appends the bytes of a C buffer.
///
/// # Safety
/// `addr` has `len` readable bytes.
unsafe fn append(data: &mut InlineData, addr: *const c_void, len: usize) -> Result<(), Misuse> {
    if len > (bounds::MAX_INLINE as usize).saturating_sub(data.len()) {
        return Err(Misuse::InlineTooLarge);
    }
    let end = data.len();
    data.resize(end + len, 0);
    if let Some(room) = data.get_mut(end..) {
        // SAFETY: `len` readable bytes (caller's promise); `room` is ours and as long.
        unsafe { std::ptr::copy_nonoverlapping(addr.cast::<u8>(), room.as_mut_ptr(), len) };
    }
    Ok(())
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, len: usize) {
    crate::quick_guard((), || {
        let mut data = InlineData::new();
        // SAFETY: the program's promise.
        let done = unsafe { append(&mut data, addr, len) };
        // SAFETY: as above.
        unsafe { set_payload(qp, done.map(|()| Payload::Inline(data))) };
    });
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    n: usize,
    list: *const ibv_data_buf,
) {
    crate::quick_guard((), || {
        let mut data = InlineData::new();
        let mut done = Ok(());
        for i in 0..n {
            // SAFETY: element `i` of `n` (the program's promise).
            let part = unsafe { &*list.add(i) };
            // SAFETY: each names readable memory (the program's promise).
            done = done.and_then(|()| unsafe { append(&mut data, part.addr, part.length) });
        }
        // SAFETY: as above.
        unsafe { set_payload(qp, done.map(|()| Payload::Inline(data))) };
    });
}
