//! Queue pairs: create, modify, query, destroy; multicast.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use anywarp_core::bounds;
use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::error::Misuse;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::qp::{Attr, Capacity, State, mask};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_engine::config::{Face, config};
use anywarp_engine::dgram::DgramQp;
use anywarp_engine::qp::{RcQp, Route};
use anywarp_engine::verbs::QueuePair;

use super::device::{forget_events, gid_ip, own_ip};
use super::extended::{self, Builder};
use super::memory::remote_ip;
use super::object::{
    Acks, ContextObject, CqObject, PdObject, QpObject, SrqObject, from_c, into_c, is_lost,
    is_lost_context, misuse, of, os_errno, set_cookie,
};
use super::types::*;
use super::xrc::XrcdObject;
use crate::profile::{Counted, Place, profile};
use crate::{entry, fail};

/// Makes a queue pair for C.
///
/// # Safety
/// `pd` and the queues of `init` live.
unsafe fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    send_ops: Option<u64>,
    chosen: Option<(Kind, Options)>,
) -> Result<*mut ibv_qp, i32> {
    if init.qp_type != IBV_QPT_XRC_RECV {
        // ibv_create_qp(3): the caller learns what it has.
        init.cap.max_inline_data = init
            .cap
            .max_inline_data
            .max(bounds::MIN_INLINE.min(profile().max_inline));
    }
    // The rest of the caller's stays as it is.
    let init = &mut init.clone();
    // The sending end of an XRC connection receives nothing, and has no queue for it.
    let xrc_send = init.qp_type == IBV_QPT_XRC_SEND;
    if xrc_send {
        init.recv_cq = std::ptr::null_mut();
        init.srq = std::ptr::null_mut();
        (init.cap.max_recv_wr, init.cap.max_recv_sge) = (0, 0);
    }
    if pd.is_null() || init.send_cq.is_null() || init.recv_cq.is_null() && !xrc_send {
        return Err(libc::EINVAL);
    }
    // SAFETY: they live (caller's promise), those that are not null.
    let lost = unsafe {
        is_lost::<PdObject, _>(pd)
            || is_lost::<CqObject, _>(init.send_cq)
            || !init.recv_cq.is_null() && is_lost::<CqObject, _>(init.recv_cq)
            || !init.srq.is_null() && is_lost::<SrqObject, _>(init.srq)
    };
    if lost {
        return Err(libc::ENODEV);
    }
    // SAFETY: lives (caller's promise).
    let domain = unsafe { of::<PdObject, _>(pd) };
    // SAFETY: its context is open while it lives.
    let context = unsafe { ContextObject::of(domain.c.context) };
    // SAFETY: they live (caller's promise).
    let (send_cq, recv_cq) = unsafe {
        (
            of::<CqObject, _>(init.send_cq),
            (!init.recv_cq.is_null()).then(|| of::<CqObject, _>(init.recv_cq)),
        )
    };
    // SAFETY: not null, so it lives (caller's promise).
    let srq = (!init.srq.is_null()).then(|| unsafe { of::<SrqObject, _>(init.srq) });
    if chosen.is_none() {
        profile().admits_qp(init)?;
    }
    let place = Place::take(Counted::Qp)?;
    let capacity = Capacity {
        max_send_wr: init.cap.max_send_wr,
        max_recv_wr: if srq.is_some() {
            0
        } else {
            init.cap.max_recv_wr
        },
        max_send_sge: init.cap.max_send_sge,
        max_recv_sge: if srq.is_some() {
            0
        } else {
            init.cap.max_recv_sge
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
    let parts = |qpn| Parts {
        rnic: Arc::clone(&context.engine.engine.rnic),
        qpn,
        pd: domain.engine.id(),
        send_cq: Arc::clone(&send_cq.engine.core),
        recv_cq: recv_cq.map_or_else(no_cq, |cq| Arc::clone(&cq.engine.core)),
        rq,
        capacity,
        sig_all: init.sq_sig_all != 0,
    };
    let srq_cookie = srq.map(|s| Arc::clone(&s.engine.cookie));
    let engine = match init.qp_type {
        IBV_QPT_RC if config().rc_over_udp && !MANAGED.get() => QueuePair::Dgram(
            DgramQp::new(&context.engine, srq_cookie, Kind::Rc, connected(), parts)
                .map_err(|e| os_errno(&e))?,
        ),
        IBV_QPT_RC | IBV_QPT_XRC_SEND => {
            QueuePair::Rc(RcQp::new(&context.engine, srq_cookie, parts).map_err(|e| os_errno(&e))?)
        }
        _ if let Some((kind, options)) = chosen => QueuePair::Dgram(
            DgramQp::new(&context.engine, srq_cookie, kind, options, parts)
                .map_err(|e| os_errno(&e))?,
        ),
        IBV_QPT_UC | IBV_QPT_UD => {
            let (kind, options) = match init.qp_type {
                IBV_QPT_UD => (Kind::Ud, Options::default()),
                _ if config().uc_over_rd => (Kind::ReliableUc, connected()),
                _ => (Kind::Uc, Options::default()),
            };
            QueuePair::Dgram(
                DgramQp::new(&context.engine, srq_cookie, kind, options, parts)
                    .map_err(|e| os_errno(&e))?,
            )
        }
        _ => {
            return Err(misuse(
                "ibv_create_qp",
                &Misuse::Unsupported("this type of queue pair"),
            ));
        }
    };
    if let QueuePair::Dgram(qp) = &engine {
        anywarp_engine::stat::know_datagrams(context.engine.engine, qp);
    }
    domain.engine.enter();
    send_cq.users.fetch_add(1, Ordering::AcqRel);
    if let Some(recv_cq) = recv_cq {
        recv_cq.users.fetch_add(1, Ordering::AcqRel);
    }
    if let Some(srq) = srq {
        srq.users.fetch_add(1, Ordering::AcqRel);
    }
    let number = engine.number();
    let mut c = ibv_qp_ex::default();
    c.qp_base = ibv_qp {
        context: domain.c.context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: number,
        qp_num: number,
        state: IBV_QPS_RESET,
        qp_type: init.qp_type,
        ..ibv_qp::default()
    };
    if let Some(ops) = send_ops {
        extended::fill(&mut c, ops);
    }
    let qp: *mut ibv_qp = into_c(QpObject {
        c,
        engine: engine.clone(),
        pd: Arc::clone(&domain.engine),
        acks: Acks::default(),
        init: Mutex::new(*init),
        ah: Mutex::new(ibv_ah_attr::default()),
        builder: Mutex::new(Builder::default()),
        xrc_users: None,
        extended: send_ops.is_some(),
        _place: place,
    });
    set_cookie(engine.cookie(), qp);
    Ok(qp)
}

thread_local! {
    /// The connection manager makes the queue pair: it connects over TCP.
    static MANAGED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `make`, which makes a queue pair for the connection manager.
pub(crate) fn managed<R>(make: impl FnOnce() -> R) -> R {
    let before = MANAGED.replace(true);
    let result = make();
    MANAGED.set(before);
    result
}

/// Options of a reliable connection over datagrams.
fn connected() -> Options {
    Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_reads: bounds::MAX_RD_ATOMIC.into(),
        plain_writes: true,
        ..Options::default()
    }
}

/// Makes a datagram queue pair with options of our own (`anywarpdv_create_qp_ex`).
///
/// # Safety
/// What `ex` names lives.
pub(crate) unsafe fn create_datagram_qp(
    ex: &mut ibv_qp_init_attr_ex,
    ops: Option<u64>,
    kind: Kind,
    options: Options,
) -> Result<*mut ibv_qp, i32> {
    let mut plain = ibv_qp_init_attr {
        qp_context: ex.qp_context,
        send_cq: ex.send_cq,
        recv_cq: ex.recv_cq,
        srq: ex.srq,
        cap: ex.cap,
        qp_type: ex.qp_type,
        sq_sig_all: ex.sq_sig_all,
    };
    // SAFETY: the caller's promise.
    let qp = unsafe { create(ex.pd, &mut plain, ops, Some((kind, options))) }?;
    ex.cap = plain.cap;
    Ok(qp)
}

/// The completion queue of an end that has none.
fn no_cq() -> Arc<Cq> {
    Arc::new(Cq::new(1, None))
}

/// Makes the receiving end of an XRC connection.
///
/// # Safety
/// `context` is open, `xrcd` lives.
unsafe fn create_xrc_receiver(
    context: *mut ibv_context,
    xrcd: *mut ibv_xrcd,
    qp_context: *mut c_void,
) -> Result<*mut ibv_qp, i32> {
    if context.is_null() || xrcd.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: they live (caller's promise).
    let (lost, of_context) = unsafe { (is_lost_context(context), ContextObject::of(context)) };
    if lost {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let xrcd = unsafe { of::<XrcdObject, _>(xrcd) };
    let place = Place::take(Counted::Qp)?;
    let parts = |qpn| Parts {
        rnic: Arc::clone(&of_context.engine.engine.rnic),
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
    let engine = RcQp::new(&of_context.engine, None, parts).map_err(|e| os_errno(&e))?;
    xrcd.users.fetch_add(1, Ordering::AcqRel);
    let users = Arc::clone(&xrcd.users);
    let engine = QueuePair::Rc(engine);
    let number = engine.number();
    let c = ibv_qp_ex {
        qp_base: ibv_qp {
            context,
            qp_context,
            handle: number,
            qp_num: number,
            state: IBV_QPS_RESET,
            qp_type: IBV_QPT_XRC_RECV,
            ..ibv_qp::default()
        },
        ..ibv_qp_ex::default()
    };
    let pd = Arc::new(Pd::new());
    pd.enter();
    let qp: *mut ibv_qp = into_c(QpObject {
        c,
        engine: engine.clone(),
        pd,
        acks: Acks::default(),
        init: Mutex::new(ibv_qp_init_attr {
            qp_context,
            qp_type: IBV_QPT_XRC_RECV,
            ..ibv_qp_init_attr::default()
        }),
        ah: Mutex::new(ibv_ah_attr::default()),
        builder: Mutex::new(Builder::default()),
        xrc_users: Some(users),
        extended: false,
        _place: place,
    });
    set_cookie(engine.cookie(), qp);
    Ok(qp)
}

entry! {
    /// `ibv_create_qp(3)`.
    ///
    /// # Safety
    /// `pd` and the queues of `init` live.
    unsafe fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp, on_panic = std::ptr::null_mut(), {
        if init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (caller's promise).
        match unsafe { create(pd, &mut *init, None, None) } {
            Ok(qp) => qp,
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

/// `ibv_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    crate::guard(std::ptr::null_mut(), || {
        const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_XRCD
            | IBV_QP_INIT_ATTR_CREATE_FLAGS
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (the program's promise).
        let ex = unsafe { &mut *init };
        if ex.comp_mask & !KNOWN != 0 {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        if ex.qp_type == IBV_QPT_XRC_RECV {
            let xrcd = if ex.comp_mask & IBV_QP_INIT_ATTR_XRCD != 0 {
                ex.xrcd
            } else {
                std::ptr::null_mut()
            };
            // SAFETY: the program's promise.
            return match unsafe { create_xrc_receiver(context, xrcd, ex.qp_context) } {
                Ok(qp) => qp,
                Err(e) => fail(e, std::ptr::null_mut()),
            };
        }
        if ex.comp_mask & IBV_QP_INIT_ATTR_PD == 0
            || ex.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && ex.create_flags != 0
        {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        let ops =
            (ex.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then_some(ex.send_ops_flags);
        if let Some(ops) = ops
            && ops & !extended::known_ops(ex.qp_type) != 0
        {
            return fail(libc::EOPNOTSUPP, std::ptr::null_mut());
        }
        let mut plain = ibv_qp_init_attr {
            qp_context: ex.qp_context,
            send_cq: ex.send_cq,
            recv_cq: ex.recv_cq,
            srq: ex.srq,
            cap: ex.cap,
            qp_type: ex.qp_type,
            sq_sig_all: ex.sq_sig_all,
        };
        // SAFETY: the program's promise.
        match unsafe { create(ex.pd, &mut plain, ops, None) } {
            Ok(qp) => {
                ex.cap = plain.cap;
                qp
            }
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    })
}

entry! {
    /// `ibv_qp_to_qp_ex`: null unless it was created with send operation flags.
    ///
    /// # Safety
    /// `qp` lives.
    unsafe fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex, on_panic = std::ptr::null_mut(), {
        if qp.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: lives (caller's promise).
        if unsafe { of::<QpObject, _>(qp) }.extended { qp.cast() } else { std::ptr::null_mut() }
    }
}

/// Attributes of C for the core.
fn attr_of(c: &ibv_qp_attr) -> Attr {
    Attr {
        access: Access(c.qp_access_flags),
        pkey_index: c.pkey_index,
        port: c.port_num,
        qkey: c.qkey,
        path_mtu: u8::try_from(c.path_mtu).unwrap_or(0),
        timeout: c.timeout,
        retry_cnt: c.retry_cnt,
        rnr_retry: c.rnr_retry,
        min_rnr_timer: c.min_rnr_timer,
        rq_psn: c.rq_psn,
        sq_psn: c.sq_psn,
        max_rd_atomic: c.max_rd_atomic,
        max_dest_rd_atomic: c.max_dest_rd_atomic,
        dest_qpn: c.dest_qp_num,
    }
}

entry! {
    /// `ibv_modify_qp(3)`.
    ///
    /// # Safety
    /// `qp` lives, `attr` is valid.
    unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, given: c_int) -> c_int, on_panic = libc::EIO, {
        if qp.is_null() || attr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: they live (caller's promise).
        let (object, attr) = unsafe { (of::<QpObject, _>(qp), &*attr) };
        let mut given = given.cast_unsigned();
        let migrates = given & mask::PATH_MIG_STATE != 0 && attr.path_mig_state != IBV_MIG_MIGRATED;
        if given & mask::ALT_PATH != 0 || migrates {
            return misuse("ibv_modify_qp", &Misuse::Unsupported("path migration: there is one path, and the kernel finds it"));
        }
        if attr.en_sqd_async_notify == 0 && attr.qp_state == IBV_QPS_SQD {
            given &= !mask::EN_SQD_ASYNC_NOTIFY;
        }
        let next = if given & mask::STATE != 0 {
            match State::from_number(attr.qp_state) {
                Some(state) => Some(state),
                None => return libc::EINVAL,
            }
        } else {
            None
        };
        let assumed = if given & mask::CUR_STATE != 0 { State::from_number(attr.cur_qp_state) } else { None };
        let route = if given & mask::AV != 0 {
            let remote = match remote_ip(&attr.ah_attr) {
                Ok(ip) => ip,
                Err(e) => return misuse("ibv_modify_qp", &e),
            };
            let grh = if attr.ah_attr.is_global != 0 { attr.ah_attr.grh } else { ibv_global_route::default() };
            own_ip(grh.sgid_index).map(|local| Route {
                local,
                remote,
                qpn: attr.dest_qp_num,
                hop_limit: grh.hop_limit,
                traffic_class: grh.traffic_class,
            })
        } else {
            None
        };
        let p = profile();
        if given & mask::MAX_QP_RD_ATOMIC != 0 && u32::from(attr.max_rd_atomic) > p.max_rd_atom
            || given & mask::MAX_DEST_RD_ATOMIC != 0 && u32::from(attr.max_dest_rd_atomic) > p.max_rd_atom
        {
            return misuse("ibv_modify_qp", &Misuse::InvalidArgument("more RDMA Reads at once than the device does"));
        }
        if next == Some(State::Rts) && !p.has.connects_itself && object.engine.names_its_peer() {
            return misuse("ibv_modify_qp", &Misuse::InvalidArgument("the profile's device connects with rdma_cm only"));
        }
        match object.engine.modify(given, next, assumed, &attr_of(attr), route) {
            Ok(()) => {
                if given & mask::AV != 0 {
                    *object.ah.lock().unwrap_or_else(PoisonError::into_inner) = attr.ah_attr;
                }
                if let Some(next) = next {
                    // SAFETY: lives; programs read `state` as they set it, from one thread at a time.
                    unsafe { (*qp).state = next as ibv_qp_state };
                }
                0
            }
            Err(e) => misuse("ibv_modify_qp", &e),
        }
    }
}

entry! {
    /// `ibv_query_qp(3)`.
    ///
    /// # Safety
    /// `qp` lives, `attr` and `init` are valid places.
    unsafe fn ibv_query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _mask: c_int, init: *mut ibv_qp_init_attr,
    ) -> c_int, on_panic = libc::EIO, {
        if qp.is_null() || attr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return libc::ENODEV;
        }
        // SAFETY: as above.
        let object = unsafe { of::<QpObject, _>(qp) };
        let (state, a) = object.engine.query();
        // On iWARP a queue pair is initialized from the start: the kernel's drivers know no state before that.
        let fresh = config().face == Face::Iwarp && state == State::Reset;
        let state = if fresh { State::Init } else { state };
        let made = *object.init.lock().unwrap_or_else(PoisonError::into_inner);
        let draining = match &object.engine {
            QueuePair::Rc(rc) => rc.is_draining(),
            // What is handed to UDP is done.
            QueuePair::Dgram(_) => false,
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
            ah_attr: *object.ah.lock().unwrap_or_else(PoisonError::into_inner),
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
        // SAFETY: not null, so valid (caller's promise).
        unsafe { attr.write(out) };
        if !init.is_null() {
            // SAFETY: not null, so valid (caller's promise).
            unsafe { init.write(made) };
        }
        // SAFETY: lives; as for `ibv_modify_qp`.
        unsafe { (*qp).state = state as ibv_qp_state };
        0
    }
}

entry! {
    /// `ibv_destroy_qp(3)`: waits for events that were not acknowledged; its waiting completions are dropped.
    ///
    /// # Safety
    /// `qp` came from a create call and is not used after this returns 0.
    unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int, on_panic = libc::EIO, {
        if qp.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<QpObject, _>(qp) } {
            return 0;
        }
        // SAFETY: as above.
        let object = unsafe { of::<QpObject, _>(qp) };
        object.engine.destroy();
        // SAFETY: its context is open while it lives.
        unsafe { forget_events(object.c.qp_base.context, qp.addr()) };
        object.acks.wait();
        object.pd.leave();
        let base = &object.c.qp_base;
        for cq in [base.send_cq, base.recv_cq] {
            if cq.is_null() {
                continue;
            }
            // SAFETY: a completion queue lives while queue pairs use it.
            unsafe { of::<CqObject, _>(cq) }.users.fetch_sub(1, Ordering::AcqRel);
        }
        if let Some(users) = &object.xrc_users {
            users.fetch_sub(1, Ordering::AcqRel);
        }
        if !base.srq.is_null() {
            // SAFETY: as above.
            unsafe { of::<SrqObject, _>(base.srq) }.users.fetch_sub(1, Ordering::AcqRel);
        }
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<QpObject, _>(qp) });
        0
    }
}

/// Joins or leaves a group.
///
/// # Safety
/// `qp` lives, `gid` is valid.
unsafe fn group(qp: *mut ibv_qp, gid: *const ibv_gid, join: bool) -> c_int {
    if qp.is_null() || gid.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<QpObject, _>(qp) } {
        return libc::ENODEV;
    }
    // SAFETY: they live (caller's promise).
    let (object, gid) = unsafe { (of::<QpObject, _>(qp), &*gid) };
    if profile().max_mcast_grp == 0 {
        return libc::EOPNOTSUPP;
    }
    match object.engine.multicast(gid_ip(gid), join) {
        Ok(()) => 0,
        Err(e) => misuse("ibv_attach_mcast", &e),
    }
}

entry! {
    /// `ibv_attach_mcast(3)`.
    ///
    /// # Safety
    /// `qp` lives, `gid` is valid.
    unsafe fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int, on_panic = libc::EIO, {
        // SAFETY: the caller's promise.
        unsafe { group(qp, gid, true) }
    }
}

entry! {
    /// `ibv_detach_mcast`.
    ///
    /// # Safety
    /// `qp` lives, `gid` is valid.
    unsafe fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int, on_panic = libc::EIO, {
        // SAFETY: the caller's promise.
        unsafe { group(qp, gid, false) }
    }
}

entry! {
    /// `ibv_query_ece(3)`: the device has no options for enhanced connection establishment.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int, on_panic = libc::EIO, {
        libc::EOPNOTSUPP
    }
}

entry! {
    /// `ibv_set_ece(3)`: as for `ibv_query_ece`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int, on_panic = libc::EIO, {
        fail(libc::EOPNOTSUPP, libc::EOPNOTSUPP)
    }
}

entry! {
    /// `ibv_query_qp_data_in_order(3)`: nothing is promised.
    ///
    /// # Safety
    /// None needed.
    unsafe fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: ibv_wr_opcode, _flags: u32) -> c_int, on_panic = 0, { 0 }
}
