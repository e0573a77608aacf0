//! The entry points of the data path, which the inline functions of the header (`ibv_post_send`, `ibv_poll_cq` and others) call.

use std::ffi::{c_int, c_uint};

use anywarp_core::error::Misuse;
use anywarp_core::verbs::wr::{InlineData, Op, Payload, RecvRequest, Remote, WorkRequest};
use anywarp_core::wire::{Stag, To};

use super::convert::{
    append_inline, append_sges, bind_of, destination_of, flags_of, imm_of, sges_of, short_inline,
};
use super::handle::live;
use super::object::{CqObject, QpObject, SrqObject};
use crate::ffi::{Errno, errno_fast, misuse, or_fast};
use crate::profile::profile;
use anywarp_verbs_sys::dv::ANYWARPDV_SEND_ACK_LATER;
use anywarp_verbs_sys::verbs::*;

/// Appends the bytes of the scatter/gather list of an inline request.
///
/// # Safety
/// `list` has `n` elements, and each names readable memory.
unsafe fn inline_of(list: *const ibv_sge, n: c_int, data: &mut InlineData) -> Result<(), Misuse> {
    for i in 0..usize::try_from(n).unwrap_or(0) {
        // SAFETY: the caller passes `n` elements, and `i` is less than `n`.
        let sge = unsafe { &*list.add(i) };
        let from = std::ptr::with_exposed_provenance(usize::try_from(sge.addr).unwrap_or(0));
        // SAFETY: readable memory (guaranteed by the caller).
        unsafe { append_inline(data, from, sge.length as usize) }?;
    }
    Ok(())
}

/// A fast path: fills the blank request `into` if the work request is a Send or a Write with one short inline element, as
/// latency-bound requests usually are. Each device that ANYWARP_DEVICE_PROFILE can name supports such requests. Returns false for other requests, and leaves `into`
/// unchanged.
///
/// # Safety
/// The requirements of [`request_of`] apply. The queue pair is a connected one.
#[inline]
unsafe fn short_of(wr: &ibv_send_wr, into: &mut WorkRequest) -> bool {
    const SHORT: c_uint = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    if wr.send_flags & IBV_SEND_INLINE == 0 || wr.send_flags & !SHORT != 0 || wr.num_sge != 1 {
        return false;
    }
    // SAFETY: the list is null or has one element (guaranteed by the caller).
    let Some(sge) = (unsafe { wr.sg_list.as_ref() }) else {
        return false;
    };
    let op = match wr.opcode {
        IBV_WR_SEND => Op::Send {
            imm: None,
            invalidate: None,
        },
        IBV_WR_RDMA_WRITE => {
            // SAFETY: the opcode selects this union member; every byte pattern is valid.
            let r = unsafe { wr.wr.rdma };
            Op::Write {
                remote: Remote {
                    rkey: Stag(r.rkey),
                    to: To(r.remote_addr),
                },
                imm: None,
            }
        }
        _ => return false,
    };
    let from = std::ptr::with_exposed_provenance(usize::try_from(sge.addr).unwrap_or(0));
    // SAFETY: the program's buffer has this length (guaranteed by the caller).
    if !(unsafe { short_inline(&mut into.payload, from, sge.length as usize) }) {
        return false;
    }
    into.id = wr.wr_id;
    into.op = op;
    into.signaled = wr.send_flags & IBV_SEND_SIGNALED != 0;
    into.solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
    true
}

/// Fills the blank request `into` from a C work request.
///
/// # Safety
/// `wr` and everything that it points to are valid. `datagram` tells which union member the program has set.
#[inline(always)]
unsafe fn request_of(
    wr: &ibv_send_wr,
    datagram: bool,
    xrc: bool,
    into: &mut WorkRequest,
) -> Result<(), Misuse> {
    // SAFETY: upheld by the caller.
    if !datagram && !xrc && unsafe { short_of(wr, into) } {
        return Ok(());
    }
    // SAFETY: upheld by the caller.
    unsafe { any_request_of(wr, datagram, xrc, into) }
}

/// [`request_of`] without the fast path.
///
/// # Safety
/// The requirements of [`request_of`] apply.
#[inline(never)]
unsafe fn any_request_of(
    wr: &ibv_send_wr,
    datagram: bool,
    xrc: bool,
    into: &mut WorkRequest,
) -> Result<(), Misuse> {
    const KNOWN: c_uint = IBV_SEND_FENCE
        | IBV_SEND_SIGNALED
        | IBV_SEND_SOLICITED
        | IBV_SEND_INLINE
        | IBV_SEND_IP_CSUM;
    if wr.num_sge < 0 || (wr.num_sge > 0 && wr.sg_list.is_null()) {
        return Err(Misuse::InvalidArgument("num_sge or sg_list"));
    }
    let known = KNOWN
        | if datagram {
            ANYWARPDV_SEND_ACK_LATER
        } else {
            0
        };
    if wr.send_flags & !known != 0 {
        return Err(Misuse::InvalidArgument("send_flags"));
    }
    let imm = Some(wr.imm_data.to_ne_bytes());
    let rdma = || {
        // SAFETY: the opcode selects this union member; every byte pattern is valid.
        let r = unsafe { wr.wr.rdma };
        Remote {
            rkey: Stag(r.rkey),
            to: To(r.remote_addr),
        }
    };
    let atomic = || {
        // SAFETY: as above.
        let a = unsafe { wr.wr.atomic };
        (
            Remote {
                rkey: Stag(a.rkey),
                to: To(a.remote_addr),
            },
            a.compare_add,
            a.swap,
        )
    };
    let op = match wr.opcode {
        IBV_WR_SEND => Op::Send {
            imm: None,
            invalidate: None,
        },
        IBV_WR_SEND_WITH_IMM => Op::Send {
            imm,
            invalidate: None,
        },
        IBV_WR_SEND_WITH_INV => Op::Send {
            imm: None,
            invalidate: Some(Stag(wr.imm_data)),
        },
        IBV_WR_RDMA_WRITE => Op::Write {
            remote: rdma(),
            imm: None,
        },
        IBV_WR_RDMA_WRITE_WITH_IMM => Op::Write {
            remote: rdma(),
            imm,
        },
        IBV_WR_ATOMIC_WRITE => Op::AtomicWrite { remote: rdma() },
        IBV_WR_RDMA_READ => Op::Read { remote: rdma() },
        IBV_WR_ATOMIC_CMP_AND_SWP => {
            let (remote, compare, swap) = atomic();
            Op::CompareSwap {
                remote,
                compare,
                swap,
            }
        }
        IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let (remote, add, _) = atomic();
            Op::FetchAdd { remote, add }
        }
        IBV_WR_LOCAL_INV => Op::LocalInvalidate {
            stag: Stag(wr.imm_data),
        },
        IBV_WR_BIND_MW => {
            // SAFETY: the opcode selects this union member.
            let bind = unsafe { wr.op.bind_mw };
            // SAFETY: the caller passes null or a live object.
            Op::Bind(unsafe { bind_of(bind.mw, bind.rkey, &bind.bind_info) }?)
        }
        _ => return Err(Misuse::InvalidArgument("opcode")),
    };
    let sendable = matches!(
        op,
        Op::Send { .. } | Op::Write { .. } | Op::AtomicWrite { .. }
    );
    if wr.send_flags & IBV_SEND_INLINE != 0 && sendable {
        // SAFETY: upheld by the caller.
        unsafe { inline_of(wr.sg_list, wr.num_sge, into.payload.make_inline()) }?;
    } else {
        // SAFETY: upheld by the caller.
        into.payload = Payload::Sges(unsafe { sges_of(wr.sg_list, wr.num_sge) });
    }
    if datagram && !matches!(op, Op::Send { .. }) && !op.is_local() {
        // The destination (`ud`) and the address in the peer's memory (`rdma`) share a union, so a request cannot have both.
        return Err(Misuse::InvalidArgument(
            "an operation that datagram queue pairs support only with ibv_wr_*",
        ));
    }
    if datagram {
        // SAFETY: this is the union member of a datagram queue pair.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: the handle is live (guaranteed by the caller).
        into.destination = Some(unsafe { destination_of(ud.ah, ud.remote_qpn, ud.remote_qkey) }?);
    }
    profile().admits(&op, &into.payload)?;
    into.id = wr.wr_id;
    into.op = op;
    into.signaled = wr.send_flags & IBV_SEND_SIGNALED != 0;
    into.solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
    into.ack_later = wr.send_flags & ANYWARPDV_SEND_ACK_LATER != 0;
    into.fence = wr.send_flags & IBV_SEND_FENCE != 0;
    if xrc {
        // SAFETY: this is the union member of an XRC queue pair; every byte pattern is a valid number.
        into.srq = Some(unsafe { wr.qp_type.xrc }.remote_srqn);
    }
    Ok(())
}

/// Iterates over a linked list of C requests.
struct List<T> {
    at: *mut T,
    next: fn(&T) -> *mut T,
}

impl<T> Iterator for List<T> {
    type Item = *mut T;
    fn next(&mut self) -> Option<*mut T> {
        let this = self.at;
        if this.is_null() {
            return None;
        }
        // SAFETY: the pointer is not null, so it is an element of the program's list.
        self.at = (self.next)(unsafe { &*this });
        Some(this)
    }
}

/// Returns the result of posting a list. On failure, writes the first request that was not posted to `bad`.
///
/// # Safety
/// The list is valid, `bad` is null or valid for writes.
unsafe fn posted<T>(
    call: &str,
    result: Result<(), (usize, Misuse)>,
    list: List<T>,
    bad: *mut *mut T,
) -> Result<(), Errno> {
    result.map_err(|(n, e)| {
        let first = list.at;
        // SAFETY: the caller passes null or a valid pointer.
        if let Some(bad) = unsafe { bad.as_mut() } {
            *bad = { list }.nth(n).unwrap_or(first);
        }
        misuse(call, &e)
    })
}

/// `ibv_post_send(3)`.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    errno_fast("ibv_post_send", || {
        // SAFETY: the program passes null or a live object.
        let qp = unsafe { live::<QpObject, _>(qp) }?;
        let kind = qp.c.get(|c| c.qp_base.qp_type);
        let datagram = matches!(kind, IBV_QPT_UD | IBV_QPT_DRIVER);
        let xrc = kind == IBV_QPT_XRC_SEND;
        let list = || List {
            at: wr,
            next: |w: &ibv_send_wr| w.next,
        };
        let requests = list().map(|w| {
            // SAFETY: each element and everything that it points to are valid (guaranteed by the program).
            move |into: &mut WorkRequest| unsafe { request_of(&*w, datagram, xrc, into) }
        });
        let result = qp.engine.post_sends(requests);
        // SAFETY: valid (guaranteed by the program).
        unsafe { posted("ibv_post_send", result, list(), bad) }
    })
}

/// Fills the blank receive `into` from a C receive request.
///
/// # Safety
/// `wr` and its scatter/gather list are valid.
#[inline(always)]
unsafe fn recv_of(wr: &ibv_recv_wr, into: &mut RecvRequest) -> Result<(), Misuse> {
    if wr.num_sge < 0 || (wr.num_sge > 0 && wr.sg_list.is_null()) {
        return Err(Misuse::InvalidArgument("num_sge or sg_list"));
    }
    into.id = wr.wr_id;
    // SAFETY: upheld by the caller.
    unsafe { append_sges(&mut into.sges, wr.sg_list, wr.num_sge) };
    Ok(())
}

fn receive_list(wr: *mut ibv_recv_wr) -> List<ibv_recv_wr> {
    List {
        at: wr,
        next: |w| w.next,
    }
}

/// Returns an iterator over a linked list of C receive requests. Each item is a function that fills a blank receive from one
/// request.
///
/// # Safety
/// Each element and its scatter/gather list are valid.
unsafe fn receives(
    wr: *mut ibv_recv_wr,
) -> impl Iterator<Item = impl FnOnce(&mut RecvRequest) -> Result<(), Misuse>> {
    // SAFETY: upheld by the caller.
    receive_list(wr).map(|w| move |into: &mut RecvRequest| unsafe { recv_of(&*w, into) })
}

/// `ibv_post_recv(3)`.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue pair is null or live, and the list is valid (guaranteed by the program).
    errno_fast("ibv_post_recv", || unsafe {
        let result = live::<QpObject, _>(qp)?.engine.post_recvs(receives(wr));
        posted("ibv_post_recv", result, receive_list(wr), bad)
    })
}

/// `ibv_post_srq_recv(3)`.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue is null or live, and the list is valid (guaranteed by the program).
    errno_fast("ibv_post_srq_recv", || unsafe {
        let requests = receives(wr).map(RecvRequest::build);
        let result = live::<SrqObject, _>(srq)?.engine.post(requests);
        posted("ibv_post_srq_recv", result, receive_list(wr), bad)
    })
}

/// `ibv_poll_cq(3)`.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, n: c_int, wc: *mut ibv_wc) -> c_int {
    or_fast("ibv_poll_cq", -1, || {
        let max = usize::try_from(n).map_err(|_negative| libc::EINVAL)?;
        // SAFETY: the program passes null or a live object.
        let queue = unsafe { live::<CqObject, _>(cq) }?;
        let got = queue.engine.poll(max, |i, c| {
            let entry = ibv_wc {
                wr_id: c.wr_id,
                status: c.status as u32,
                opcode: c.op as u32,
                vendor_err: c.vendor_err,
                byte_len: c.byte_len,
                imm_data: imm_of(c),
                qp_num: c.qpn,
                src_qp: c.src_qpn,
                wc_flags: flags_of(c),
                pkey_index: 0,
                slid: 0,
                sl: c.sl,
                dlid_path_bits: 0,
            };
            // SAFETY: `i` is below `max`, and the program's array has that many elements.
            unsafe { wc.add(i).write(entry) };
        });
        if got == 0 && queue.engine.core.is_broken() {
            return Ok(-1);
        }
        Ok(c_int::try_from(got).unwrap_or(c_int::MAX))
    })
}

/// `ibv_req_notify_cq(3)`.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    errno_fast("ibv_req_notify_cq", || {
        // SAFETY: the program passes null or a live object.
        let queue = unsafe { live::<CqObject, _>(cq) }?;
        queue.engine.arm(solicited_only != 0);
        Ok(())
    })
}
