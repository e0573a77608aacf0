//! The extended send interface, `ibv_qp_ex`: `ibv_wr_start`, one call for each part of a request, `ibv_wr_complete`.

use std::ffi::{c_int, c_void};
use std::sync::MutexGuard;

use anywarp_core::datagram::Kind;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::wr::{InlineData, Op, Payload, Remote, Sge, Sges, WorkRequest};
use anywarp_core::wire::{Stag, To};

use super::convert::{append_inline, bind_of, destination_of, sges_of};
use super::handle::live;
use super::object::{Builder, QpObject};
use crate::ffi::{Errno, arg, errno_fast, misuse, or_fast};
use crate::profile::profile;
use anywarp_verbs_sys::dv::ANYWARPDV_SEND_ACK_LATER;
use anywarp_verbs_sys::verbs::*;

/// Returns the operations that a queue pair of this type supports.
pub(crate) fn known_ops(kind: ibv_qp_type) -> u64 {
    let send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let windows = IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;
    let rest = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_ATOMIC_WRITE
        | IBV_QP_EX_WITH_SEND_WITH_INV;
    let all = match kind {
        IBV_QPT_RC | IBV_QPT_XRC_SEND => send | write | windows | rest,
        IBV_QPT_UC => send | write | windows,
        IBV_QPT_UD => send,
        _ => 0,
    };
    all & profile().send_ops()
}

/// Returns the operations that a datagram queue pair with the extensions of `anywarpdv.h` supports.
pub(crate) fn known_datagram_ops(kind: Kind) -> u64 {
    let sends = known_ops(IBV_QPT_UD);
    let one_sided =
        IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
    match kind {
        Kind::Rd => known_ops(IBV_QPT_RC) & !IBV_QP_EX_WITH_ATOMIC_WRITE,
        _ => sends | one_sided,
    }
}

/// Writes the functions for the operations `ops` into the structure.
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

impl QpObject {
    fn builder(&self) -> MutexGuard<'_, Builder> {
        self.builder.lock()
    }

    /// Begins a request, with the `wr_id` and the flags that the program wrote into the structure.
    fn begin(&self, op: Op) {
        let (id, flags) = self.c.get(|c| (c.wr_id, c.wr_flags));
        self.builder().requests.push(WorkRequest {
            id,
            op,
            payload: Payload::empty(),
            signaled: flags & IBV_SEND_SIGNALED != 0,
            solicited: flags & IBV_SEND_SOLICITED != 0,
            ack_later: flags & ANYWARPDV_SEND_ACK_LATER != 0,
            fence: flags & IBV_SEND_FENCE != 0,
            destination: None,
            srq: None,
        });
    }

    /// Changes the current request. An error is returned by `ibv_wr_complete`, the only function with a return value.
    fn amend(&self, change: impl FnOnce(&mut WorkRequest) -> Result<(), Misuse>) {
        let mut builder = self.builder();
        let changed = match builder.requests.last_mut() {
            Some(request) => change(request),
            None => Err(Misuse::WrongState("ibv_wr_set_* before an operation")),
        };
        if let Err(e) = changed {
            builder.error = Some(e);
        }
    }
}

/// Defines functions of the interface that return nothing. In a child of fork(2) they do nothing.
macro_rules! calls {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($qp:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block
    )*) => {$(
        $(#[$meta])*
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $type)*) {
            or_fast("ibv_wr", (), || {
                // SAFETY: the queue pair is live (guaranteed by the program).
                if let Ok($qp) = unsafe { live::<QpObject, _>(qp) } {
                    $body
                }
                Ok(())
            });
        }
    )*};
}

fn remote(rkey: u32, to: u64) -> Remote {
    Remote {
        rkey: Stag(rkey),
        to: To(to),
    }
}

calls! {
    fn wr_start(qp) {
        qp.batch.begin();
        let mut builder = qp.builder();
        builder.requests.clear();
        builder.error = None;
    }

    fn wr_abort(qp) {
        *qp.builder() = Builder::default();
        qp.batch.end();
    }

    fn wr_send(qp) {
        qp.begin(Op::Send { imm: None, invalidate: None });
    }

    fn wr_send_imm(qp, value: be32) {
        qp.begin(Op::Send { imm: Some(value.to_ne_bytes()), invalidate: None });
    }

    fn wr_send_inv(qp, rkey: u32) {
        qp.begin(Op::Send { imm: None, invalidate: Some(Stag(rkey)) });
    }

    fn wr_rdma_write(qp, rkey: u32, to: u64) {
        qp.begin(Op::Write { remote: remote(rkey, to), imm: None });
    }

    fn wr_rdma_write_imm(qp, rkey: u32, to: u64, value: be32) {
        qp.begin(Op::Write { remote: remote(rkey, to), imm: Some(value.to_ne_bytes()) });
    }

    fn wr_rdma_read(qp, rkey: u32, to: u64) {
        qp.begin(Op::Read { remote: remote(rkey, to) });
    }

    fn wr_atomic_cmp_swp(qp, rkey: u32, to: u64, compare: u64, swap: u64) {
        qp.begin(Op::CompareSwap { remote: remote(rkey, to), compare, swap });
    }

    fn wr_atomic_fetch_add(qp, rkey: u32, to: u64, add: u64) {
        qp.begin(Op::FetchAdd { remote: remote(rkey, to), add });
    }

    fn wr_atomic_write(qp, rkey: u32, to: u64, word: *const c_void) {
        let mut data = InlineData::new();
        // SAFETY: the pointer is null or points to eight octets (guaranteed by the program); an octet array needs no alignment.
        if let Some(word) = unsafe { word.cast::<[u8; 8]>().as_ref() } {
            data.extend_from_slice(word);
        }
        qp.begin(Op::AtomicWrite { remote: remote(rkey, to) });
        qp.amend(|request| {
            request.payload = Payload::Inline(data);
            Ok(())
        });
    }

    fn wr_local_inv(qp, rkey: u32) {
        qp.begin(Op::LocalInvalidate { stag: Stag(rkey) });
    }

    fn wr_bind_mw(qp, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
        // SAFETY: the pointers are null, or live and valid (guaranteed by the program).
        match unsafe { arg(info).map(|info| bind_of(mw, rkey, info)) } {
            Ok(Ok(bind)) => qp.begin(Op::Bind(bind)),
            Ok(Err(e)) => qp.builder().error = Some(e),
            Err(_null) => qp.builder().error = Some(Misuse::InvalidArgument("bind_info is null")),
        }
    }

    fn wr_set_xrc_srqn(qp, number: u32) {
        qp.amend(|request| {
            request.srq = Some(number);
            Ok(())
        });
    }

    fn wr_set_ud_addr(qp, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
        qp.amend(|request| {
            // SAFETY: the program passes null or a live object.
            request.destination = Some(unsafe { destination_of(ah, qpn, qkey) }?);
            Ok(())
        });
    }

    fn wr_set_sge(qp, lkey: u32, addr: u64, len: u32) {
        let mut sges = Sges::new();
        sges.push(Sge { addr, len, lkey: Stag(lkey) });
        qp.amend(|request| {
            request.payload = Payload::Sges(sges);
            Ok(())
        });
    }

    fn wr_set_sge_list(qp, n: usize, list: *const ibv_sge) {
        qp.amend(|request| {
            // SAFETY: the list has `n` elements (guaranteed by the program).
            let sges = unsafe { sges_of(list, c_int::try_from(n).unwrap_or(c_int::MAX)) };
            request.payload = Payload::Sges(sges);
            Ok(())
        });
    }

    fn wr_set_inline_data(qp, addr: *mut c_void, len: usize) {
        qp.amend(|request| {
            let mut data = InlineData::new();
            // SAFETY: `addr` has `len` readable octets (guaranteed by the program).
            unsafe { append_inline(&mut data, addr.cast(), len) }?;
            request.payload = Payload::Inline(data);
            Ok(())
        });
    }

    fn wr_set_inline_data_list(qp, n: usize, list: *const ibv_data_buf) {
        qp.amend(|request| {
            let mut data = InlineData::new();
            for i in 0..n {
                // SAFETY: `i` is less than `n`, and each element names readable octets (guaranteed by the program).
                unsafe {
                    let part = &*list.add(i);
                    append_inline(&mut data, part.addr.cast(), part.length)?;
                }
            }
            request.payload = Payload::Inline(data);
            Ok(())
        });
    }
}

/// Posts the requests since `ibv_wr_start`.
fn complete(qp: &QpObject) -> Result<(), Errno> {
    let mut builder = qp.builder();
    let (mut requests, error) = (std::mem::take(&mut builder.requests), builder.error.take());
    drop(builder);
    if let Some(e) = error {
        return Err(misuse("ibv_wr_complete", &e));
    }
    let profile = profile();
    let mut each = requests.iter();
    let admitted = each.try_for_each(|request| profile.admits(&request.op, &request.payload));
    let posted = match admitted {
        Ok(()) => qp.engine.post_batch(&mut requests),
        Err(e) => Err((0, e)),
    };
    // Keeps the allocation for the next `ibv_wr_start`.
    requests.clear();
    qp.builder().requests = requests;
    posted.map_err(|(_, e)| misuse("ibv_wr_complete", &e))
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    errno_fast("ibv_wr_complete", || {
        // SAFETY: the queue pair is live (guaranteed by the program).
        let qp = unsafe { live::<QpObject, _>(qp) }?;
        let posted = complete(qp);
        qp.batch.end();
        posted
    })
}
