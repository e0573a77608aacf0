//! Queue pairs and shared receive queues of identifiers, and the completion queues that the library creates for them.

use std::ffi::c_int;

use anywarp_engine::cm;
use anywarp_engine::objects::QueuePair;

use super::address::vector_to;
use super::device::shared;
use super::id::IdObject;
use crate::entry;
use crate::ffi::{Errno, arg, arg_mut, last_errno, put};
use crate::verbs::cq::{
    ibv_create_comp_channel, ibv_create_cq, ibv_destroy_comp_channel, ibv_destroy_cq,
};
use crate::verbs::handle::{known, live};
use crate::verbs::object::QpObject;
use crate::verbs::qp::{create_qp_ex, destroy, ibv_modify_qp, managed};
use crate::verbs::srq::{create_srq_ex, ibv_destroy_srq};
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// The Q_Key of datagram queue pairs of rdma_cm, the same in every implementation.
const UDP_QKEY: u32 = 0x0123_4567;

/// Returns the pointer that a verb returned, or the verb's errno if it is null.
fn made<T>(pointer: *mut T) -> Result<*mut T, Errno> {
    if pointer.is_null() {
        return Err(last_errno());
    }
    Ok(pointer)
}

// ---------------------------------------------------------------------- completion queues

/// A completion queue and its channel.
type Queue = (*mut ibv_comp_channel, *mut ibv_cq);

/// Creates a completion queue of `n` entries with a channel, for an identifier.
fn make_queue(id: *mut rdma_cm_id, verbs: *mut ibv_context, n: u32) -> Result<Queue, Errno> {
    let cqe = c_int::try_from(n.max(1)).unwrap_or(c_int::MAX);
    // SAFETY: the context of an identifier stays open, and the channel was created above.
    unsafe {
        let channel = made(ibv_create_comp_channel(verbs))?;
        match made(ibv_create_cq(verbs, cqe, id.cast(), channel, 0)) {
            Ok(cq) => Ok((channel, cq)),
            Err(e) => {
                ibv_destroy_comp_channel(channel);
                Err(e)
            }
        }
    }
}

/// Creates the completion queues that the program did not pass. A queue pair of type `IBV_QPT_XRC_SEND` needs only the one for sends,
/// and a queue pair of type `IBV_QPT_XRC_RECV` needs none.
fn make_queues(
    id: *mut rdma_cm_id,
    object: &IdObject,
    init: &mut ibv_qp_init_attr_ex,
) -> Result<(), Errno> {
    let sends = init.qp_type != IBV_QPT_XRC_RECV;
    let receives = sends && init.qp_type != IBV_QPT_XRC_SEND;
    let verbs = object.c.get(|c| c.verbs);
    if init.send_cq.is_null() && sends {
        if object.c.get(|c| c.send_cq).is_null() {
            let queue = make_queue(id, verbs, init.cap.max_send_wr)?;
            object.c.set(|c| (c.send_cq_channel, c.send_cq) = queue);
        }
        init.send_cq = object.c.get(|c| c.send_cq);
    }
    if init.recv_cq.is_null() && receives {
        if object.c.get(|c| c.recv_cq).is_null() {
            let queue = make_queue(id, verbs, init.cap.max_recv_wr)?;
            object.c.set(|c| (c.recv_cq_channel, c.recv_cq) = queue);
        }
        init.recv_cq = object.c.get(|c| c.recv_cq);
    }
    Ok(())
}

/// Destroys a completion queue and its channel, unless the queue is in use. Returns what was not destroyed.
fn drop_queue((channel, cq): Queue) -> Queue {
    // SAFETY: the objects are null or were created by `make_queue` for this identifier.
    unsafe {
        if !cq.is_null() && ibv_destroy_cq(cq) != 0 {
            return (channel, cq);
        }
        if !channel.is_null() {
            ibv_destroy_comp_channel(channel);
        }
    }
    (std::ptr::null_mut(), std::ptr::null_mut())
}

/// Destroys the completion queues that [`make_queues`] created, unless they are in use.
fn drop_queues(object: &IdObject) {
    let (send, recv) = object.c.get(|c| {
        (
            (c.send_cq_channel, c.send_cq),
            (c.recv_cq_channel, c.recv_cq),
        )
    });
    let (send, recv) = (drop_queue(send), drop_queue(recv));
    object.c.set(|c| {
        (c.send_cq_channel, c.send_cq) = send;
        (c.recv_cq_channel, c.recv_cq) = recv;
    });
}

// ---------------------------------------------------------------------- queue pairs

/// Creates the queue pair of an identifier. Fills in the attributes that the program left out.
///
/// # Safety
/// `id` and the objects in `init` are null or live.
unsafe fn create_qp(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let object = unsafe { live::<IdObject, _>(id) }?;
    let c = object.c.get(|c| *c);
    if c.verbs.is_null() || !c.qp.is_null() || init.qp_type != c.qp_type {
        return Err(libc::EINVAL);
    }
    if init.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || init.pd.is_null() {
        init.pd = c.pd;
        init.comp_mask |= IBV_QP_INIT_ATTR_PD;
    }
    // SAFETY: the caller passes null or a live object.
    if unsafe { arg(init.pd) }?.context != c.verbs {
        return Err(libc::EINVAL);
    }
    let no_domain = init.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || init.xrcd.is_null();
    if init.qp_type == IBV_QPT_XRC_RECV && no_domain {
        init.xrcd = shared()?.xrcd()?;
        init.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
    }
    let created = make_queues(id, object, init).and_then(|()| {
        // rdma_create_srq(3): queue pairs use the shared receive queue of the identifier.
        if init.srq.is_null() && init.qp_type != IBV_QPT_XRC_RECV {
            init.srq = c.srq;
        }
        // SAFETY: upheld by the caller.
        made(managed(|| unsafe { create_qp_ex(c.verbs, init) }))
    });
    let qp = created.inspect_err(|_e| drop_queues(object))?;
    if let Err(e) = attach(object, qp) {
        object.engine.set_qp(None);
        // SAFETY: the queue pair was created above, and no other code uses it.
        unsafe { destroy(qp) }?;
        drop_queues(object);
        return Err(e);
    }
    object.c.set(|c| (c.qp, c.pd) = (qp, init.pd));
    Ok(())
}

/// Assigns a new queue pair to its identifier and moves it to the last state that it can reach without a connection.
fn attach(object: &IdObject, qp: *mut ibv_qp) -> Result<(), Errno> {
    let mut attr = ibv_qp_attr {
        port_num: 1,
        ..ibv_qp_attr::default()
    };
    // SAFETY: the only caller has just created the queue pair, and no other code uses it yet.
    let engine = unsafe { known::<QpObject, _>(qp) }.engine.clone();
    let steps: &[(ibv_qp_state, c_int)] = match engine {
        QueuePair::Rc(rc) => {
            object.engine.set_qp(Some(rc));
            attr.qp_access_flags = cm::rights(1).0;
            &[(
                IBV_QPS_INIT,
                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            )]
        }
        datagram @ QueuePair::Dgram(_) => {
            object.engine.set_datagram(datagram, UDP_QKEY);
            attr.qkey = UDP_QKEY;
            &[
                (
                    IBV_QPS_INIT,
                    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
                ),
                (IBV_QPS_RTR, IBV_QP_STATE),
                (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN),
            ]
        }
    };
    for (state, mask) in steps {
        attr.qp_state = *state;
        // SAFETY: as above.
        match unsafe { ibv_modify_qp(qp, &raw mut attr, *mask) } {
            0 => {}
            e => return Err(e),
        }
    }
    Ok(())
}

/// Makes the queue pair in the public field of the identifier the one that the engine connects. A program may have moved it there from another
/// identifier, as uDAPL does, and a moved queue pair must not be connected by the identifier that had it before.
///
/// # Safety
/// The field is null or points to a live queue pair of this library.
pub(super) unsafe fn take_over_qp(object: &IdObject) {
    let qp = object.qp();
    if qp.is_null() {
        object.engine.set_qp(None);
        return;
    }
    // SAFETY: upheld by the caller.
    match unsafe { known::<QpObject, _>(qp) }.engine.clone() {
        QueuePair::Rc(rc) => object.engine.set_qp(Some(rc)),
        datagram @ QueuePair::Dgram(_) if object.is_datagram() => {
            object.engine.set_datagram(datagram, UDP_QKEY);
        }
        QueuePair::Dgram(_) => {}
    }
}

/// Like [`create_qp`], with an `ibv_qp_init_attr`.
///
/// # Safety
/// `id`, `pd` and the objects in `init` are null or live.
pub(super) unsafe fn create_plain_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    let mut ex = ibv_qp_init_attr_ex {
        qp_context: init.qp_context,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        cap: init.cap,
        qp_type: init.qp_type,
        sq_sig_all: init.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        ..ibv_qp_init_attr_ex::default()
    };
    // SAFETY: upheld by the caller.
    unsafe { create_qp(id, &mut ex) }?;
    (init.send_cq, init.recv_cq, init.srq) = (ex.send_cq, ex.recv_cq, ex.srq);
    init.cap = ex.cap;
    Ok(())
}

entry! {
    /// `rdma_create_qp(3)`.
    ///
    /// # Safety
    /// `id`, `pd` and the objects in `init` are null or live.
    unsafe fn rdma_create_qp(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { create_plain_qp(id, pd, arg_mut(init)?) }?;
        Ok(0)
    }
}

entry! {
    /// `rdma_create_qp_ex`.
    ///
    /// # Safety
    /// The requirements of `rdma_create_qp` apply.
    unsafe fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { create_qp(id, arg_mut(init)?) }?;
        Ok(0)
    }
}

/// Destroys the queue pair of an identifier, if it has one.
pub(super) fn destroy_qp(object: &IdObject) {
    object.engine.set_qp(None);
    let qp = object.take_qp();
    if !qp.is_null() {
        // The queue pair leaves the groups that the identifier has joined, also if the program has not called `rdma_leave_multicast`.
        // SAFETY: the queue pair was created by `create_qp`.
        let _always_succeeds = unsafe { destroy(qp) };
    }
    drop_queues(object);
}

entry! {
    /// `rdma_destroy_qp(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_destroy_qp(id: *mut rdma_cm_id), nothing, {
        // SAFETY: upheld by the caller.
        destroy_qp(unsafe { live(id) }?);
        Ok(())
    }
}

// ---------------------------------------------------------------------- shared receive queues

/// Creates the shared receive queue of an identifier. Fills in the attributes that the program left out.
///
/// # Safety
/// `id` and the objects in `init` are null or live.
unsafe fn create_srq(id: *mut rdma_cm_id, init: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let object = unsafe { live::<IdObject, _>(id) }?;
    let c = object.c.get(|c| *c);
    if c.verbs.is_null() || !c.srq.is_null() || init.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
        return Err(libc::EINVAL);
    }
    if init.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || init.pd.is_null() {
        init.pd = c.pd;
        init.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    }
    if init.srq_type == IBV_SRQT_XRC {
        if init.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || init.xrcd.is_null() {
            init.xrcd = shared()?.xrcd()?;
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || init.cq.is_null() {
            if c.recv_cq.is_null() {
                let queue = make_queue(id, c.verbs, init.attr.max_wr)?;
                object.c.set(|c| (c.recv_cq_channel, c.recv_cq) = queue);
            }
            init.cq = object.c.get(|c| c.recv_cq);
        }
        init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    }
    // SAFETY: upheld by the caller.
    let srq = made(unsafe { create_srq_ex(c.verbs, init) })
        // Queues that a queue pair uses are kept.
        .inspect_err(|_e| drop_queues(object))?;
    object.c.set(|c| (c.srq, c.pd) = (srq, init.pd));
    Ok(())
}

entry! {
    /// `rdma_create_srq(3)`: for an identifier of type IBV_QPT_XRC_RECV, creates a queue of an XRC domain.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `init` is null or valid.
    unsafe fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let (qp_type, plain) = unsafe { (arg(id)?.qp_type, arg_mut(init)?) };
        let receives_xrc = qp_type == IBV_QPT_XRC_RECV;
        let mut ex = ibv_srq_init_attr_ex {
            srq_context: plain.srq_context,
            attr: plain.attr,
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
            srq_type: if receives_xrc { IBV_SRQT_XRC } else { IBV_SRQT_BASIC },
            pd,
            ..ibv_srq_init_attr_ex::default()
        };
        // SAFETY: upheld by the caller.
        unsafe { create_srq(id, &mut ex) }?;
        plain.attr = ex.attr;
        Ok(0)
    }
}

entry! {
    /// `rdma_create_srq_ex`: creates a basic queue or a queue of an XRC domain.
    ///
    /// # Safety
    /// The requirements of `rdma_create_srq` apply.
    unsafe fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { create_srq(id, arg_mut(init)?) }?;
        Ok(0)
    }
}

/// Destroys the shared receive queue of an identifier, if it has one.
pub(super) fn destroy_srq(object: &IdObject) {
    let srq = object
        .c
        .set(|c| std::mem::replace(&mut c.srq, std::ptr::null_mut()));
    if !srq.is_null() {
        // SAFETY: the queue was created by `create_srq`.
        unsafe { ibv_destroy_srq(srq) };
    }
    if object.qp().is_null() {
        drop_queues(object);
    }
}

entry! {
    /// `rdma_destroy_srq(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_destroy_srq(id: *mut rdma_cm_id), nothing, {
        // SAFETY: upheld by the caller.
        destroy_srq(unsafe { live(id) }?);
        Ok(())
    }
}

// ---------------------------------------------------------------------- attributes

entry! {
    /// `rdma_init_qp_attr(3)`: returns attributes for a program that moves its queue pair through the states itself.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. The others are null or valid for writes.
    unsafe fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int, minus_one, {
        if mask.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let (object, attr) = unsafe { (live::<IdObject, _>(id)?, arg_mut(attr)?) };
        let (ird, ord, retry, rnr) = object.engine.agreed();
        let state = attr.qp_state;
        *attr = ibv_qp_attr { qp_state: state, port_num: 1, ..ibv_qp_attr::default() };
        let bits = match (state, object.is_datagram()) {
            (IBV_QPS_INIT, false) => {
                attr.qp_access_flags = cm::rights(1).0;
                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS
            }
            (IBV_QPS_INIT, true) => {
                attr.qkey = UDP_QKEY;
                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY
            }
            (IBV_QPS_RTR, false) => {
                if let Some(remote) = object.engine.remote() {
                    attr.ah_attr = vector_to(remote, object.engine.local());
                }
                attr.path_mtu = IBV_MTU_4096;
                // 0 stands for the connection of this identifier, whatever the number of the peer's queue pair.
                attr.dest_qp_num = 0;
                attr.max_dest_rd_atomic = ird;
                attr.min_rnr_timer = cm::MIN_RNR_TIMER;
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                    | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
            }
            (IBV_QPS_RTR, true) => IBV_QP_STATE,
            (IBV_QPS_RTS, false) => {
                attr.timeout = object.engine.ack_timeout();
                attr.retry_cnt = retry.min(7);
                attr.rnr_retry = rnr.min(7);
                attr.max_rd_atomic = ord;
                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                    | IBV_QP_MAX_QP_RD_ATOMIC
            }
            (IBV_QPS_RTS, true) => IBV_QP_STATE | IBV_QP_SQ_PSN,
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: upheld by the caller.
        unsafe { put(mask, bits) }?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::cm::id::{create_id, destroy_id};

    /// An identifier with a queue pair, which is passed to another thread.
    #[derive(Clone, Copy)]
    struct Id(*mut rdma_cm_id);
    // SAFETY: functions of librdmacm may be called from every thread.
    unsafe impl Send for Id {}

    impl Id {
        fn object(self) -> &'static IdObject {
            // SAFETY: the identifier is live until the end of the test.
            unsafe { live::<IdObject, _>(self.0) }.unwrap()
        }
    }

    /// A thread that took an event copies the state of the queue pair into the program's `ibv_qp`. Meanwhile `rdma_destroy_qp` waits.
    /// After `rdma_destroy_qp` no state is copied, because the identifier has no queue pair.
    #[test]
    fn a_queue_pair_is_not_destroyed_while_its_state_is_shown() {
        // SAFETY: the arguments are valid, and the identifier is destroyed once, at the end.
        unsafe {
            let id = create_id(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                RDMA_PS_TCP,
                None,
            );
            let id = Id(id.unwrap());
            id.object().show_device(shared().unwrap());
            let mut init = ibv_qp_init_attr {
                qp_type: IBV_QPT_RC,
                ..ibv_qp_init_attr::default()
            };
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (1, 1);
            let r = rdma_create_qp(id.0, std::ptr::null_mut(), &raw mut init);
            assert_eq!(r, 0, "{}", std::io::Error::last_os_error());

            let shows = id.object().lock_qp();
            let destroyer = thread::spawn(move || destroy_qp({ id }.object()));
            thread::sleep(Duration::from_millis(50));
            assert!(!id.object().qp().is_null() && !destroyer.is_finished());
            drop(shows);
            destroyer.join().unwrap();
            assert!(id.object().qp().is_null());

            let destroys = id.object().lock_qp();
            let shower = thread::spawn(move || { id }.object().show_qp_state());
            thread::sleep(Duration::from_millis(50));
            assert!(!shower.is_finished());
            drop(destroys);
            shower.join().unwrap();
            destroy_id(id.0).unwrap();
        }
    }
}
