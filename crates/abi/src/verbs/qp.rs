//! Queue pairs: create, modify, query, destroy; multicast.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use anywarp_core::bounds;
use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::error::Misuse;
use anywarp_core::lock::Mutex;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::qp::{Capacity, QpType, State, mask, of_this_end};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_engine::config::{Face, config};
use anywarp_engine::dgram::DgramQp;
use anywarp_engine::objects::QueuePair;
use anywarp_engine::qos;
use anywarp_engine::qp::{RcQp, Route};

use super::async_event::forget_events;
use super::convert::{attr_of, gid_ip, own_ip, remote_ip};
use super::handle::{CStruct, into_c, live, live_if_any, returned, set_c_object};
use super::object::{
    Acks, Batch, Builder, ContextObject, CqObject, PdObject, QpObject, SrqObject, Use, XrcdObject,
};
use super::wr_ex;
use crate::entry;
use crate::ffi::{Errno, arg, arg_mut, misuse, null, os_errno, put};
use crate::profile::{Counted, CountedObject, profile};
use anywarp_verbs_sys::verbs::*;

/// Converts extended attributes to an `ibv_qp_init_attr`.
fn plain_of(ex: &ibv_qp_init_attr_ex) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: ex.qp_context,
        send_cq: ex.send_cq,
        recv_cq: ex.recv_cq,
        srq: ex.srq,
        cap: ex.cap,
        qp_type: ex.qp_type,
        sq_sig_all: ex.sq_sig_all,
    }
}

/// Creates a queue pair. `chosen` is the kind of datagram queue pair and its options, if the program selected them with `anywarpdv.h` or with
/// a create flag.
///
/// # Safety
/// `pd` and the objects in `init` are null or live.
unsafe fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    send_ops: Option<u64>,
    chosen: Option<(Kind, Options)>,
) -> Result<*mut ibv_qp, Errno> {
    if init.qp_type != IBV_QPT_XRC_RECV {
        // ibv_create_qp(3): the actual size is returned to the caller.
        let of_list = init.cap.max_send_sge.saturating_mul(bounds::INLINE_PER_SGE);
        let least = bounds::MIN_INLINE.max(of_list).min(profile().max_inline);
        init.cap.max_inline_data = init.cap.max_inline_data.max(least);
    }
    // A copy is changed, so that the other fields of the caller's structure stay as they are.
    let init = &mut init.clone();
    // The sending end of an XRC connection has no receive queue.
    let xrc_send = init.qp_type == IBV_QPT_XRC_SEND;
    if xrc_send {
        init.recv_cq = std::ptr::null_mut();
        init.srq = std::ptr::null_mut();
        (init.cap.max_recv_wr, init.cap.max_recv_sge) = (0, 0);
    }
    // SAFETY: upheld by the caller.
    let (domain, send_cq, recv_cq, srq) = unsafe {
        (
            live::<PdObject, _>(pd)?,
            live::<CqObject, _>(init.send_cq)?,
            live_if_any::<CqObject, _>(init.recv_cq)?,
            live_if_any::<SrqObject, _>(init.srq)?,
        )
    };
    if recv_cq.is_none() && !xrc_send {
        return Err(libc::EINVAL);
    }
    if chosen.is_none() {
        profile().admits_qp(init)?;
    }
    let counted = CountedObject::take(Counted::Qp)?;
    let own_receives = srq.is_none();
    let capacity = Capacity {
        max_send_wr: init.cap.max_send_wr,
        max_recv_wr: if own_receives {
            init.cap.max_recv_wr
        } else {
            0
        },
        max_send_sge: init.cap.max_send_sge,
        max_recv_sge: if own_receives {
            init.cap.max_recv_sge
        } else {
            0
        },
        max_inline: init.cap.max_inline_data,
    };
    capacity.check().map_err(|e| misuse("ibv_create_qp", &e))?;
    let rq = match srq {
        _ if xrc_send => RecvQueue::None,
        Some(srq) => RecvQueue::Shared(Arc::clone(&srq.engine.core)),
        None => RecvQueue::Own {
            requests: std::collections::VecDeque::new(),
            max_wr: capacity.max_recv_wr,
            max_sge: capacity.max_recv_sge,
        },
    };
    let device = domain.device();
    let parts = |qpn| Parts {
        rnic: Arc::clone(&device.engine.rnic),
        qpn,
        pd: domain.engine.id(),
        send_cq: Arc::clone(&send_cq.engine.core),
        recv_cq: recv_cq.map_or_else(no_cq, |cq| Arc::clone(&cq.engine.core)),
        rq,
        capacity,
        sig_all: init.sq_sig_all != 0,
    };
    let srq_object = srq.map(|s| Arc::clone(&s.engine.c_object));
    let engine = match kind_of(init.qp_type, chosen)? {
        None => RcQp::new(device, srq_object, parts).map(QueuePair::Rc),
        Some((kind, options)) => {
            DgramQp::new(device, srq_object, kind, options, parts).map(QueuePair::Dgram)
        }
    }
    .map_err(|e| os_errno(&e))?;
    if let QueuePair::Dgram(qp) = &engine {
        qp.register_counters();
    }
    if let Some(srq) = srq {
        srq.engine.add_user(&engine);
    }
    domain.engine.enter();
    let uses = [
        Some(send_cq.users.enter()),
        recv_cq.map(|cq| cq.users.enter()),
        srq.map(|srq| srq.users.enter()),
        None,
    ];
    let base = ibv_qp {
        context: domain.context(),
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        qp_type: init.qp_type,
        ..ibv_qp::default()
    };
    let pd = Arc::clone(&domain.engine);
    Ok(finish(base, *init, engine, send_ops, pd, uses, counted))
}

/// Returns the kind of datagrams for a type of queue pair, or `None` for a queue pair over TCP.
fn kind_of(
    qp_type: ibv_qp_type,
    chosen: Option<(Kind, Options)>,
) -> Result<Option<(Kind, Options)>, Errno> {
    Ok(match qp_type {
        IBV_QPT_RC if config().rc_over_udp && !MANAGED.get() => Some((Kind::Rc, connected())),
        IBV_QPT_RC | IBV_QPT_XRC_SEND => None,
        _ if chosen.is_some() => chosen,
        IBV_QPT_UD => Some((Kind::Ud, Options::default())),
        IBV_QPT_UC if config().uc_over_rd => Some((Kind::ReliableUc, connected())),
        IBV_QPT_UC => Some((Kind::Uc, Options::default())),
        _ => {
            let e = Misuse::Unsupported("this type of queue pair");
            return Err(misuse("ibv_create_qp", &e));
        }
    })
}

/// Creates the C object for a queue pair of the engine.
fn finish(
    base: ibv_qp,
    init: ibv_qp_init_attr,
    engine: QueuePair,
    send_ops: Option<u64>,
    pd: Arc<Pd>,
    uses: [Option<Use>; 4],
    counted: CountedObject,
) -> *mut ibv_qp {
    let number = engine.number();
    let mut c = ibv_qp_ex {
        qp_base: ibv_qp {
            handle: number,
            qp_num: number,
            state: IBV_QPS_RESET,
            ..base
        },
        ..ibv_qp_ex::default()
    };
    if let Some(ops) = send_ops {
        wr_ex::fill(&mut c, ops);
    }
    let qp: *mut ibv_qp = into_c(QpObject {
        c: CStruct::new(c),
        engine: engine.clone(),
        pd,
        acks: Acks::default(),
        init: Mutex::new(init),
        ah: Mutex::new(ibv_ah_attr::default()),
        builder: Mutex::new(Builder::default()),
        batch: Batch::default(),
        _uses: uses,
        counters: Mutex::default(),
        extended: send_ops.is_some(),
        _counted: counted,
    });
    set_c_object(engine.c_object(), qp);
    qp
}

thread_local! {
    /// Whether the connection manager is creating a queue pair, which will connect over TCP.
    static MANAGED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `make`, which creates a queue pair for the connection manager.
pub(crate) fn managed<R>(make: impl FnOnce() -> R) -> R {
    let before = MANAGED.replace(true);
    let result = make();
    MANAGED.set(before);
    result
}

/// Returns the options of a connection over reliable datagrams.
fn connected() -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_reads: bounds::MAX_RD_ATOMIC.into(),
        plain_writes: true,
        ..Options::default()
    }
}

/// Creates a datagram queue pair with the options of `anywarpdv_create_qp_ex`.
///
/// # Safety
/// The objects in `ex` are null or live.
pub(crate) unsafe fn create_datagram_qp(
    ex: &mut ibv_qp_init_attr_ex,
    ops: Option<u64>,
    kind: Kind,
    options: Options,
) -> Result<*mut ibv_qp, Errno> {
    let mut plain = plain_of(ex);
    // SAFETY: upheld by the caller.
    let qp = unsafe { create(ex.pd, &mut plain, ops, Some((kind, options))) }?;
    ex.cap = plain.cap;
    Ok(qp)
}

/// Returns a completion queue that stays empty. The core needs one for each direction, also at the ends of an XRC connection:
/// the sending end has no receives, and the receives of the receiving end complete in the queues of the SRQs.
fn no_cq() -> Arc<Cq> {
    Arc::new(Cq::new(1, None))
}

/// Creates the receiving end of an XRC connection.
///
/// # Safety
/// `context` is null or open, `xrcd` is null or points to a live object.
unsafe fn create_xrc_receiver(
    context: *mut ibv_context,
    xrcd: *mut ibv_xrcd,
    qp_context: *mut c_void,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: upheld by the caller.
    let (open, xrcd) = unsafe { (ContextObject::live(context)?, live::<XrcdObject, _>(xrcd)?) };
    let counted = CountedObject::take(Counted::Qp)?;
    let parts = |qpn| Parts {
        rnic: Arc::clone(&open.engine.engine.rnic),
        qpn,
        pd: 0,
        send_cq: no_cq(),
        recv_cq: no_cq(),
        rq: RecvQueue::Xrc {
            domain: Arc::clone(&xrcd.domain),
            chosen: None,
            taken: None,
        },
        capacity: Capacity::default(),
        sig_all: false,
    };
    let engine = RcQp::new(&open.engine, None, parts).map_err(|e| os_errno(&e))?;
    let base = ibv_qp {
        context,
        qp_context,
        qp_type: IBV_QPT_XRC_RECV,
        ..ibv_qp::default()
    };
    let init = ibv_qp_init_attr {
        qp_context,
        qp_type: IBV_QPT_XRC_RECV,
        ..ibv_qp_init_attr::default()
    };
    let pd = Arc::new(Pd::new());
    pd.enter();
    let uses = [None, None, None, Some(xrcd.users.enter())];
    Ok(finish(
        base,
        init,
        QueuePair::Rc(engine),
        None,
        pd,
        uses,
        counted,
    ))
}

entry! {
    /// `ibv_create_qp(3)`.
    ///
    /// # Safety
    /// `pd` and the objects in `init` are null or live.
    unsafe fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp, null, {
        // SAFETY: upheld by the caller.
        unsafe { create(pd, arg_mut(init)?, None, None) }
    }
}

/// `ibv_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    null("ibv_create_qp_ex", || {
        const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_XRCD
            | IBV_QP_INIT_ATTR_CREATE_FLAGS
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        // SAFETY: the program passes null or a valid pointer.
        let ex = unsafe { arg_mut(init) }?;
        let has = |bit: u32| ex.comp_mask & bit != 0;
        if ex.comp_mask & !KNOWN != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if ex.qp_type == IBV_QPT_XRC_RECV {
            if !has(IBV_QP_INIT_ATTR_XRCD) {
                return Err(libc::EINVAL);
            }
            // SAFETY: upheld by the program.
            return unsafe { create_xrc_receiver(context, ex.xrcd, ex.qp_context) };
        }
        if !has(IBV_QP_INIT_ATTR_PD) {
            return Err(libc::EINVAL);
        }
        let chosen = match ex.create_flags {
            _ if !has(IBV_QP_INIT_ATTR_CREATE_FLAGS) => None,
            0 => None,
            IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
                if ex.qp_type == IBV_QPT_UD && profile().has.blocks_own_multicast =>
            {
                let options = Options {
                    blocks_own: true,
                    ..Options::default()
                };
                Some((Kind::Ud, options))
            }
            _ => return Err(libc::EOPNOTSUPP),
        };
        let ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(ex.send_ops_flags);
        if ops.is_some_and(|ops| ops & !wr_ex::known_ops(ex.qp_type) != 0) {
            return Err(libc::EOPNOTSUPP);
        }
        let mut plain = plain_of(ex);
        if chosen.is_some() {
            profile().admits_qp(&plain)?;
        }
        // SAFETY: upheld by the program.
        let qp = unsafe { create(ex.pd, &mut plain, ops, chosen) }?;
        ex.cap = plain.cap;
        Ok(qp)
    })
}

entry! {
    /// `ibv_qp_to_qp_ex`: returns null unless the queue pair was created with `send_ops_flags`.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair.
    unsafe fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex, null, {
        // SAFETY: upheld by the caller.
        let extended = unsafe { live_if_any::<QpObject, _>(qp) }?.is_some_and(|qp| qp.extended);
        Ok(if extended { qp.cast() } else { std::ptr::null_mut() })
    }
}

/// Returns the path of an address vector, or `None` if the GID table has no entry at `sgid_index`.
fn route_of(attr: &ibv_qp_attr) -> Result<Option<Route>, Misuse> {
    let remote = remote_ip(&attr.ah_attr)?;
    let grh = if attr.ah_attr.is_global != 0 {
        attr.ah_attr.grh
    } else {
        ibv_global_route::default()
    };
    let (level, traffic_class) = qos::service(attr.ah_attr.sl, grh.traffic_class);
    Ok(own_ip(grh.sgid_index).map(|local| Route {
        local,
        remote,
        qpn: attr.dest_qp_num,
        hop_limit: grh.hop_limit,
        traffic_class,
        level,
    }))
}

/// `ibv_modify_qp(3)`.
fn modify(qp: &QpObject, attr: &ibv_qp_attr, attr_mask: u32) -> Result<(), Misuse> {
    let attr_mask = match qp.init.lock().qp_type {
        IBV_QPT_XRC_SEND => of_this_end(QpType::XrcSend, attr_mask),
        IBV_QPT_XRC_RECV => of_this_end(QpType::XrcRecv, attr_mask),
        _ => attr_mask,
    };
    let has = |bit: u32| attr_mask & bit != 0;
    let migrates = has(mask::PATH_MIG_STATE) && attr.path_mig_state != IBV_MIG_MIGRATED;
    if has(mask::ALT_PATH) || migrates {
        return Err(Misuse::Unsupported(
            "path migration: there is only one path, which the kernel chooses",
        ));
    }
    if has(mask::RATE_LIMIT) {
        return Err(Misuse::Unsupported("a rate limit of one queue pair"));
    }
    let state = |bit, number| -> Result<Option<State>, Misuse> {
        if !has(bit) {
            return Ok(None);
        }
        let state = State::from_number(number);
        state.map(Some).ok_or(Misuse::InvalidArgument("qp_state"))
    };
    let next = state(mask::STATE, attr.qp_state)?;
    // An invalid `cur_qp_state` is ignored.
    let expected_state = state(mask::CUR_STATE, attr.cur_qp_state).unwrap_or(None);
    let route = if has(mask::AV) { route_of(attr)? } else { None };
    let p = profile();
    if has(mask::MAX_QP_RD_ATOMIC) && u32::from(attr.max_rd_atomic) > p.max_rd_atom
        || has(mask::MAX_DEST_RD_ATOMIC) && u32::from(attr.max_dest_rd_atomic) > p.max_rd_atom
    {
        return Err(Misuse::InvalidArgument(
            "more RDMA Reads at once than the device allows",
        ));
    }
    if next == Some(State::Rts) && !p.has.connects_itself && qp.engine.program_sets_peer() {
        return Err(Misuse::InvalidArgument(
            "the device that ANYWARP_DEVICE_PROFILE names connects with rdma_cm only",
        ));
    }
    let mut attr_mask = attr_mask;
    if attr.en_sqd_async_notify == 0 && attr.qp_state == IBV_QPS_SQD {
        attr_mask &= !mask::EN_SQD_ASYNC_NOTIFY;
    }
    qp.engine
        .modify(attr_mask, next, expected_state, &attr_of(attr), route)?;
    if has(mask::AV) {
        *qp.ah.lock() = attr.ah_attr;
    }
    if let Some(next) = next {
        qp.show_state(next as ibv_qp_state);
    }
    Ok(())
}

entry! {
    /// `ibv_modify_qp(3)`.
    ///
    /// # Safety
    /// `qp` is null or points to a live object, `attr` is null or valid.
    unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let (qp, attr) = unsafe { (live::<QpObject, _>(qp)?, arg(attr)?) };
        modify(qp, attr, attr_mask.cast_unsigned()).map_err(|e| misuse("ibv_modify_qp", &e))
    }
}

entry! {
    /// `ibv_query_qp(3)`.
    ///
    /// # Safety
    /// `qp` is null or points to a live object, `attr` and `init` are null or valid for writes.
    unsafe fn ibv_query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int, init: *mut ibv_qp_init_attr,
    ) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let object = unsafe { live::<QpObject, _>(qp) }?;
        let (state, a) = object.engine.query();
        // An iWARP queue pair is shown as INIT from the start, because the kernel's iWARP drivers have no RESET state.
        let fresh = config().face == Face::Iwarp && state == State::Reset;
        let state = if fresh { State::Init } else { state };
        let made = *object.init.lock();
        let draining = match &object.engine {
            QueuePair::Rc(rc) => rc.is_draining(),
            QueuePair::Dgram(qp) => qp.is_draining(),
        };
        let out = ibv_qp_attr {
            sq_draining: draining.into(),
            qp_state: state as ibv_qp_state,
            cur_qp_state: state as ibv_qp_state,
            path_mtu: a.path_mtu.into(),
            path_mig_state: IBV_MIG_MIGRATED,
            qkey: a.qkey,
            rq_psn: a.rq_psn,
            sq_psn: a.sq_psn,
            dest_qp_num: a.dest_qpn,
            qp_access_flags: a.access.0,
            cap: made.cap,
            ah_attr: *object.ah.lock(),
            pkey_index: a.pkey_index,
            max_rd_atomic: a.max_rd_atomic,
            max_dest_rd_atomic: a.max_dest_rd_atomic,
            min_rnr_timer: a.min_rnr_timer,
            port_num: a.port,
            timeout: a.timeout,
            retry_cnt: a.retry_cnt,
            rnr_retry: a.rnr_retry,
            ..ibv_qp_attr::default()
        };
        // SAFETY: upheld by the caller.
        unsafe { put(attr, out) }?;
        if !init.is_null() {
            // SAFETY: the caller passes null or a valid pointer, and null was excluded.
            unsafe { put(init, made) }?;
        }
        // All attributes are returned, whatever the mask is. The state in the public structure is updated only if the mask
        // contains STATE: a program that queries other attributes, of a queue pair that has failed meanwhile, does not expect
        // that the call changes the structure.
        if attr_mask.cast_unsigned() & mask::STATE != 0 {
            object.show_state(state as ibv_qp_state);
        }
        Ok(())
    }
}

/// Destroys a queue pair, which leaves its multicast groups.
///
/// # Safety
/// `qp` is null, or came from a create call and is not used after this succeeds.
pub(crate) unsafe fn destroy(qp: *mut ibv_qp) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let Some(object) = unsafe { returned::<QpObject, _>(qp) }? else {
        return Ok(());
    };
    object.engine.destroy();
    forget_events(object.device(), qp.addr());
    object.acks.wait();
    object.pd.leave();
    drop(object.take());
    Ok(())
}

entry! {
    /// `ibv_destroy_qp(3)`: EBUSY while the queue pair is attached to a multicast group. Waits until all events that were delivered to
    /// the program are acknowledged. Completions that were not polled are discarded.
    ///
    /// # Safety
    /// `qp` came from a create call and is not used after this returns 0.
    unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        let object = unsafe { returned::<QpObject, _>(qp) }?;
        if object.is_some_and(|object| object.engine.is_in_group()) {
            return Err(misuse("ibv_destroy_qp", &Misuse::Busy));
        }
        // SAFETY: upheld by the caller.
        unsafe { destroy(qp) }
    }
}

/// Joins or leaves a multicast group.
///
/// # Safety
/// `qp` is null or points to a live queue pair. `gid` is null or valid.
unsafe fn multicast(qp: *mut ibv_qp, gid: *const ibv_gid, join: bool) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let (qp, gid) = unsafe { (live::<QpObject, _>(qp)?, arg(gid)?) };
    if profile().max_mcast_grp == 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let call = if join {
        "ibv_attach_mcast"
    } else {
        "ibv_detach_mcast"
    };
    qp.engine
        .multicast(gid_ip(gid), join)
        .map_err(|e| misuse(call, &e))
}

entry! {
    /// `ibv_attach_mcast(3)`.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `gid` is null or valid.
    unsafe fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { multicast(qp, gid, true) }
    }
}

entry! {
    /// `ibv_detach_mcast(3)`.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `gid` is null or valid.
    unsafe fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int, errno, {
        // SAFETY: upheld by the caller.
        unsafe { multicast(qp, gid, false) }
    }
}
