//! The data path's entry: what the header's inline functions call. *Post* begins here, *poll* ends here.

use std::ffi::{c_int, c_uint};

use anywarp_core::error::Misuse;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{
    Destination, InlineData, Op, Payload, RecvRequest, Remote, Sge, Sges, WorkRequest,
};
use anywarp_core::wire::{Stag, To};

use super::memory::bind_of;
use super::object::{AhObject, CqObject, QpObject, SrqObject, is_lost, misuse, of};
use super::types::*;
use crate::profile::profile;

/// A scatter/gather list of C.
///
/// # Safety
/// `list` has `n` elements.
pub(crate) unsafe fn sges_of(list: *const ibv_sge, n: c_int) -> Sges {
    let mut sges = Sges::new();
    for i in 0..usize::try_from(n).unwrap_or(0) {
        // SAFETY: element `i` of `n` (caller's promise).
        let sge = unsafe { &*list.add(i) };
        sges.push(Sge {
            addr: sge.addr,
            len: sge.length,
            lkey: Stag(sge.lkey),
        });
    }
    sges
}

/// The bytes of an inline list.
///
/// # Safety
/// `list` has `n` elements, each names readable memory.
unsafe fn inline_of(list: *const ibv_sge, n: c_int, data: &mut InlineData) -> Result<(), Misuse> {
    for i in 0..usize::try_from(n).unwrap_or(0) {
        // SAFETY: element `i` of `n` (caller's promise).
        let sge = unsafe { &*list.add(i) };
        let len = sge.length as usize;
        let end = data.len();
        if end + len > anywarp_core::bounds::MAX_INLINE as usize {
            return Err(Misuse::InlineTooLarge);
        }
        let from: *const u8 =
            std::ptr::with_exposed_provenance(usize::try_from(sge.addr).unwrap_or(0));
        if end == 0 && len <= INLINE_SHORT {
            // The usual case: no loop over bytes, as `resize` is.
            *data = InlineData::from_buf_and_len([0; INLINE_SHORT], len);
        } else {
            data.resize(end + len, 0);
        }
        if let Some(room) = data.get_mut(end..) {
            // SAFETY: `len` readable bytes (caller's promise); `room` is ours and as long.
            unsafe { std::ptr::copy_nonoverlapping(from, room.as_mut_ptr(), len) };
        }
    }
    Ok(())
}

/// Inline data of which `InlineData` allocates nothing.
const INLINE_SHORT: usize = 64;

/// Where a datagram goes.
///
/// # Safety
/// `ah` is null or lives.
pub(crate) unsafe fn destination_of(
    ah: *mut ibv_ah,
    qpn: u32,
    qkey: u32,
) -> Result<Destination, Misuse> {
    if ah.is_null() {
        return Err(Misuse::InvalidArgument("no address handle"));
    }
    // SAFETY: not null, so it lives (caller's promise).
    let ah = unsafe { of::<AhObject, _>(ah) };
    Ok(Destination {
        addr: std::net::SocketAddr::new(ah.ip, u16::try_from(qpn >> 8 & 0xffff).unwrap_or(0)),
        source: ah.source,
        qpn,
        qkey,
        hop_limit: ah.hop_limit,
        traffic_class: ah.traffic_class,
    })
}

/// Makes a work request of C one of ours, which is blank before.
///
/// # Safety
/// `wr` is valid with all it points to; `datagram` says which member of its union is meant.
unsafe fn request_of(
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
    if wr.send_flags & !KNOWN != 0 {
        return Err(Misuse::InvalidArgument("send_flags"));
    }
    let imm = Some(wr.imm_data.to_ne_bytes());
    let rdma = || {
        // SAFETY: the opcode says that this member is meant; every byte pattern is valid.
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
            // SAFETY: the opcode says that this member is meant.
            let bind = unsafe { wr.op.bind_mw };
            // SAFETY: the objects live (caller's promise).
            Op::Bind(unsafe { bind_of(bind.mw, bind.rkey, &bind.bind_info) }?)
        }
        _ => return Err(Misuse::InvalidArgument("opcode")),
    };
    let sendable = matches!(
        op,
        Op::Send { .. } | Op::Write { .. } | Op::AtomicWrite { .. }
    );
    if wr.send_flags & IBV_SEND_INLINE != 0 && sendable {
        into.payload = Payload::Inline(InlineData::new());
        if let Payload::Inline(data) = &mut into.payload {
            // SAFETY: the caller's promise.
            unsafe { inline_of(wr.sg_list, wr.num_sge, data) }?;
        }
    } else {
        // SAFETY: the caller's promise.
        into.payload = Payload::Sges(unsafe { sges_of(wr.sg_list, wr.num_sge) });
    }
    if datagram && !matches!(op, Op::Send { .. }) && !op.is_local() {
        // The member of the union that tells where to has no room for memory of the peer.
        return Err(Misuse::InvalidArgument(
            "an operation that datagram queue pairs have in ibv_wr_* only",
        ));
    }
    if datagram {
        // SAFETY: on a datagram queue pair this member is meant.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: the handle lives (caller's promise).
        into.destination = Some(unsafe { destination_of(ud.ah, ud.remote_qpn, ud.remote_qkey) }?);
    }
    profile().admits(&op, &into.payload)?;
    into.id = wr.wr_id;
    into.op = op;
    into.signaled = wr.send_flags & IBV_SEND_SIGNALED != 0;
    into.solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
    into.fence = wr.send_flags & IBV_SEND_FENCE != 0;
    if xrc {
        // SAFETY: it is a number, whatever bytes it has; on a queue pair of this type the member is meant.
        into.srq = Some(unsafe { wr.qp_type.xrc }.remote_srqn);
    }
    Ok(())
}

/// Walks a linked list of C requests.
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
        // SAFETY: not null, so an element of the program's list.
        self.at = (self.next)(unsafe { &*this });
        Some(this)
    }
}

/// Element `n` of a list.
fn nth<T>(first: *mut T, next: fn(&T) -> *mut T, n: usize) -> *mut T {
    List { at: first, next }.nth(n).unwrap_or(first)
}

/// `ibv_post_send(3)`.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    crate::quick_guard(libc::EIO, || {
        if qp.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<QpObject, _>(qp) };
        let datagram = matches!(object.c.qp_base.qp_type, IBV_QPT_UD | IBV_QPT_DRIVER);
        let xrc = object.c.qp_base.qp_type == IBV_QPT_XRC_SEND;
        let next = |w: &ibv_send_wr| w.next;
        // SAFETY: each element is valid with all it points to (the program's promise).
        let requests = List { at: wr, next }.map(|w| {
            // SAFETY: as above.
            move |into: &mut WorkRequest| unsafe { request_of(&*w, datagram, xrc, into) }
        });
        match object.engine.post_sends(requests) {
            Ok(()) => 0,
            Err((n, e)) => {
                if !bad.is_null() {
                    // SAFETY: not null, so valid (the program's promise).
                    unsafe { bad.write(nth(wr, next, n)) };
                }
                misuse("ibv_post_send", &e)
            }
        }
    })
}

/// A receive of C.
///
/// # Safety
/// `wr` is valid with its list.
unsafe fn recv_of(wr: &ibv_recv_wr) -> Result<RecvRequest, Misuse> {
    if wr.num_sge < 0 || (wr.num_sge > 0 && wr.sg_list.is_null()) {
        return Err(Misuse::InvalidArgument("num_sge or sg_list"));
    }
    Ok(RecvRequest {
        id: wr.wr_id,
        // SAFETY: the caller's promise.
        sges: unsafe { sges_of(wr.sg_list, wr.num_sge) },
    })
}

/// `ibv_post_recv(3)`.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    crate::quick_guard(libc::EIO, || {
        if qp.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<QpObject, _>(qp) };
        let next = |w: &ibv_recv_wr| w.next;
        // SAFETY: each element is valid (the program's promise).
        let requests = List { at: wr, next }.map(|w| unsafe { recv_of(&*w) });
        match object.engine.post_recv(requests) {
            Ok(()) => 0,
            Err((n, e)) => {
                if !bad.is_null() {
                    // SAFETY: not null, so valid (the program's promise).
                    unsafe { bad.write(nth(wr, next, n)) };
                }
                misuse("ibv_post_recv", &e)
            }
        }
    })
}

/// `ibv_post_srq_recv(3)`.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    crate::quick_guard(libc::EIO, || {
        if srq.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<SrqObject, _>(srq) } {
            return libc::ENODEV;
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<SrqObject, _>(srq) };
        let next = |w: &ibv_recv_wr| w.next;
        // SAFETY: each element is valid (the program's promise).
        let requests = List { at: wr, next }.map(|w| unsafe { recv_of(&*w) });
        match object.engine.post(requests) {
            Ok(()) => 0,
            Err((n, e)) => {
                if !bad.is_null() {
                    // SAFETY: not null, so valid (the program's promise).
                    unsafe { bad.write(nth(wr, next, n)) };
                }
                misuse("ibv_post_srq_recv", &e)
            }
        }
    })
}

/// The flags of a completion.
pub(crate) fn flags_of(c: &Completion) -> c_uint {
    let mut flags = 0;
    if c.grh {
        flags |= IBV_WC_GRH;
    }
    if c.imm.is_some() {
        flags |= IBV_WC_WITH_IMM;
    }
    if c.invalidated.is_some() {
        flags |= IBV_WC_WITH_INV;
    }
    flags
}

/// Immediate data or invalidated key, as the header's union has them.
pub(crate) fn imm_of(c: &Completion) -> be32 {
    match (c.imm, c.invalidated) {
        (Some(imm), _) => u32::from_ne_bytes(imm),
        (None, Some(stag)) => stag.0,
        (None, None) => 0,
    }
}

/// `ibv_poll_cq(3)`.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, n: c_int, wc: *mut ibv_wc) -> c_int {
    crate::quick_guard(-1, || {
        let Ok(max) = usize::try_from(n) else {
            return -1;
        };
        if cq.is_null() {
            return -1;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<CqObject, _>(cq) } {
            return -1;
        }
        // SAFETY: lives (the program's promise).
        let object = unsafe { of::<CqObject, _>(cq) };
        let got = object.engine.poll(max, |i, c| {
            let entry = ibv_wc {
                wr_id: c.wr_id,
                status: c.status as u32,
                opcode: c.op as u32,
                vendor_err: c.vendor_err,
                byte_len: c.byte_len,
                imm_data: imm_of(&c),
                qp_num: c.qpn,
                src_qp: c.src_qpn,
                wc_flags: flags_of(&c),
                pkey_index: 0,
                slid: 0,
                sl: c.sl,
                dlid_path_bits: 0,
            };
            // SAFETY: `i` is below `max`, for which the program has room.
            unsafe { wc.add(i).write(entry) };
        });
        if got == 0 && object.engine.core.is_broken() {
            return -1;
        }
        c_int::try_from(got).unwrap_or(c_int::MAX)
    })
}

/// `ibv_req_notify_cq(3)`.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    crate::quick_guard(libc::EIO, || {
        if cq.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (the program's promise).
        if unsafe { is_lost::<CqObject, _>(cq) } {
            return libc::ENODEV;
        }
        // SAFETY: lives (the program's promise).
        unsafe { of::<CqObject, _>(cq) }
            .engine
            .arm(solicited_only != 0);
        0
    })
}
