//! The connection manager's entry points: C identifiers and events over the engine's.
//!
//! An identifier without a channel is *synchronous*: it has a channel of its own, and each step waits for its event,
//! which stays in `id->event` until the next step.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anywarp_core::bounds;
use anywarp_engine::channel::Channel;
use anywarp_engine::cm::{self, CmId, ConnParam, Event, EventChannel, EventKind, PortSpace};
use anywarp_engine::device::gid_of;
use anywarp_engine::gids;
use anywarp_engine::process::PerProcess;
use anywarp_engine::verbs::QueuePair;

use libc::{sockaddr, sockaddr_in, sockaddr_in6};

use super::types::*;
use crate::held::Held;
use crate::verbs::device;
use crate::verbs::extended::create_srq_ex;
use crate::verbs::memory::ibv_alloc_pd;
use crate::verbs::object::{Acks, QpObject, from_c, into_c, is_lost, of, os_errno, set_cookie};
use crate::verbs::qp::{create_qp_ex, ibv_destroy_qp, ibv_modify_qp, managed};
use crate::verbs::queue::{
    block_on, ibv_create_comp_channel, ibv_create_cq, ibv_destroy_comp_channel, ibv_destroy_cq,
    ibv_destroy_srq,
};
use crate::verbs::types::*;
use crate::verbs::xrc::open_xrcd;
use crate::{entry, fail};

/// Q_Key of datagram queue pairs made here, as every rdma_cm uses it.
const UDP_QKEY: u32 = 0x0123_4567;
/// Time that a synchronous step asks for, milliseconds; resolving takes none here.
const STEP_MS: c_int = 2000;

/// An event channel.
#[repr(C)]
pub(crate) struct ChannelObject {
    c: rdma_event_channel,
    engine: Arc<EventChannel>,
}

/// An identifier.
#[repr(C)]
pub(crate) struct IdObject {
    c: rdma_cm_id,
    engine: Arc<CmId>,
    /// No channel of the program's.
    sync: AtomicBool,
    acks: Acks,
    /// What `rdma_create_ep` keeps for `rdma_get_request`.
    template: Mutex<Option<(AtomicPtr<ibv_pd>, Option<ibv_qp_init_attr>)>>,
    connect_data: Mutex<Vec<u8>>,
}

// SAFETY: the C struct holds pointers that the program shares between threads as it sees fit; the rest is behind locks.
unsafe impl Sync for IdObject {}
// SAFETY: as above.
unsafe impl Send for IdObject {}

/// An event, with the private data that it points to.
#[repr(C)]
struct EventObject {
    c: rdma_cm_event,
    data: Vec<u8>,
}

/// The context of all identifiers, and its protection domain for programs that give none.
struct Shared {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    /// Made when the first one asks for it.
    xrcd: OnceLock<AtomicPtr<ibv_xrcd>>,
}
// SAFETY: both objects may be used from every thread, as the verbs allow.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

#[derive(Default)]
struct Home {
    shared: OnceLock<Shared>,
    making: Mutex<()>,
}

fn shared() -> Result<&'static Shared, c_int> {
    static HOME: PerProcess<Home> = PerProcess::new(Home::default);
    let home = HOME.get();
    if let Some(shared) = home.shared.get() {
        return Ok(shared);
    }
    let _making = home.making.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = home.shared.get() {
        return Ok(shared);
    }
    let context = device::open()?;
    // SAFETY: just opened.
    let pd = unsafe { ibv_alloc_pd(context) };
    let xrcd = OnceLock::new();
    Ok(home.shared.get_or_init(|| Shared { context, pd, xrcd }))
}

/// The XRC domain of all identifiers whose programs give none.
fn shared_xrcd() -> Result<*mut ibv_xrcd, c_int> {
    let shared = shared()?;
    let xrcd = shared.xrcd.get_or_init(|| {
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        // SAFETY: the context stays open.
        AtomicPtr::new(unsafe { open_xrcd(shared.context, &raw mut init) })
    });
    let xrcd = xrcd.load(Ordering::Relaxed);
    if xrcd.is_null() {
        Err(libc::ENODEV)
    } else {
        Ok(xrcd)
    }
}

// ---------------------------------------------------------------------- addresses

/// A socket address of C.
///
/// # Safety
/// `addr` is null or points to an address of its family.
pub(crate) unsafe fn address_of(addr: *const sockaddr) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: not null, so an address.
    match c_int::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an IPv4 address by its family; it may lie anywhere.
            let a = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            Some(
                (
                    Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)),
                    u16::from_be(a.sin_port),
                )
                    .into(),
            )
        }
        libc::AF_INET6 => {
            // SAFETY: an IPv6 address by its family.
            let a = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddr::V6(std::net::SocketAddrV6::new(
                ip,
                u16::from_be(a.sin6_port),
                0,
                a.sin6_scope_id,
            )))
        }
        _ => None,
    }
}

/// A socket address for C.
pub(crate) fn c_address(address: SocketAddr) -> rdma_sockaddr {
    // SAFETY: all-zero is a valid address of no family.
    let mut out: rdma_sockaddr = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(a) => {
            // SAFETY: all-zero is a valid sockaddr_in.
            let mut sin: sockaddr_in = unsafe { std::mem::zeroed() };
            sin.sin_family = libc::AF_INET as u16;
            sin.sin_port = a.port().to_be();
            sin.sin_addr.s_addr = u32::from(*a.ip()).to_be();
            out.sin = sin;
        }
        SocketAddr::V6(a) => {
            // SAFETY: all-zero is a valid sockaddr_in6.
            let mut sin6: sockaddr_in6 = unsafe { std::mem::zeroed() };
            sin6.sin6_family = libc::AF_INET6 as u16;
            sin6.sin6_port = a.port().to_be();
            sin6.sin6_addr.s6_addr = a.ip().octets();
            sin6.sin6_scope_id = a.scope_id();
            out.sin6 = sin6;
        }
    }
    out
}

/// Writes what the engine knows of an identifier's addresses into the C struct.
///
/// # Safety
/// `id` lives and no other thread uses it now.
unsafe fn show_addresses(id: *mut rdma_cm_id) {
    // SAFETY: lives (caller's promise).
    let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
    // SAFETY: as above; no reference to the object is held.
    let c = unsafe { &mut *id };
    if let Some(local) = engine.local() {
        c.route.addr.src = c_address(local);
        if !local.ip().is_unspecified() {
            c.route.addr.addr.ibaddr.sgid = device::c_gid(gid_of(local.ip()));
        }
    }
    if let Some(remote) = engine.remote() {
        c.route.addr.dst = c_address(remote);
        c.route.addr.addr.ibaddr.dgid = device::c_gid(gid_of(remote.ip()));
    }
    c.route.addr.addr.ibaddr.pkey = 0xffff;
}

/// Gives an identifier its device.
///
/// # Safety
/// As for [`show_addresses`].
unsafe fn show_device(id: *mut rdma_cm_id) -> Result<(), c_int> {
    let shared = shared()?;
    // SAFETY: the caller's promise.
    let c = unsafe { &mut *id };
    if c.verbs.is_null() {
        c.verbs = shared.context;
        c.pd = shared.pd;
        c.port_num = 1;
    }
    Ok(())
}

// ---------------------------------------------------------------------- channels and events

entry! {
    /// `rdma_create_event_channel(3)`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn rdma_create_event_channel() -> *mut rdma_event_channel, on_panic = std::ptr::null_mut(), {
        if let Err(e) = anywarp_engine::worker::engine() {
            return fail(os_errno(&e), std::ptr::null_mut());
        }
        match Channel::new() {
            Ok(channel) => {
                let c = rdma_event_channel { fd: channel.raw_fd() };
                into_c(ChannelObject { c, engine: Arc::new(channel) })
            }
            Err(e) => fail(os_errno(&e), std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `rdma_destroy_event_channel(3)`.
    ///
    /// # Safety
    /// `channel` came from `rdma_create_event_channel` and is not used again.
    unsafe fn rdma_destroy_event_channel(channel: *mut rdma_event_channel), on_panic = (), {
        // SAFETY: the caller's promise.
        if !channel.is_null() && !unsafe { is_lost::<ChannelObject, _>(channel) } {
            // SAFETY: as above.
            drop(unsafe { from_c::<ChannelObject, _>(channel) });
        }
    }
}

/// Makes a C identifier around the engine's.
fn make_id(
    engine: Arc<CmId>,
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    qp_type: ibv_qp_type,
    sync: bool,
) -> *mut rdma_cm_id {
    let c = rdma_cm_id {
        channel,
        context,
        ps: engine.port_space as rdma_port_space,
        qp_type,
        ..rdma_cm_id::default()
    };
    let id: *mut rdma_cm_id = into_c(IdObject {
        c,
        engine: Arc::clone(&engine),
        sync: AtomicBool::new(sync),
        acks: Acks::default(),
        template: Mutex::new(None),
        connect_data: Mutex::new(Vec::new()),
    });
    set_cookie(&engine.cookie, id);
    id
}

fn port_space(ps: rdma_port_space) -> Option<PortSpace> {
    Some(match ps {
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IPOIB => PortSpace::Ipoib,
        RDMA_PS_IB => PortSpace::Ib,
        _ => return None,
    })
}

/// `rdma_create_id` with the queue pair type that the port space implies or `rdma_create_ep` says.
unsafe fn create_id(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: Option<ibv_qp_type>,
) -> Result<*mut rdma_cm_id, c_int> {
    let space = port_space(ps).ok_or(libc::EPROTONOSUPPORT)?;
    let sync = channel.is_null();
    let channel = if sync {
        // SAFETY: none needed.
        unsafe { rdma_create_event_channel() }
    } else {
        channel
    };
    if channel.is_null() {
        return Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::ENODEV));
    }
    // SAFETY: lives (the program's promise), or was just made.
    if unsafe { is_lost::<ChannelObject, _>(channel) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let events = unsafe { &of::<ChannelObject, _>(channel).engine };
    let engine = CmId::new(events, space).map_err(|e| os_errno(&e))?;
    let qp_type = qp_type.unwrap_or(match space {
        PortSpace::Tcp | PortSpace::Ib => IBV_QPT_RC,
        PortSpace::Udp | PortSpace::Ipoib => IBV_QPT_UD,
    });
    Ok(make_id(engine, channel, context, qp_type, sync))
}

entry! {
    /// `rdma_create_id(3)`: without a channel the identifier is synchronous.
    ///
    /// # Safety
    /// `channel` is null or lives, `id` is a valid place.
    unsafe fn rdma_create_id(
        channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void, ps: rdma_port_space,
    ) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: the caller's promise.
        match unsafe { create_id(channel, context, ps, None) } {
            Ok(made) => {
                // SAFETY: not null, so valid (caller's promise).
                unsafe { id.write(made) };
                0
            }
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `rdma_destroy_id(3)`: waits until its events are acknowledged.
    ///
    /// # Safety
    /// `id` came from here and is not used again.
    unsafe fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return 0;
        }
        // SAFETY: as above.
        unsafe { drop_event(id) };
        // SAFETY: as above.
        let object = unsafe { of::<IdObject, _>(id) };
        object.engine.destroy();
        object.acks.wait();
        let channel = object.sync.load(Ordering::Relaxed).then_some(object.c.channel);
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<IdObject, _>(id) });
        if let Some(channel) = channel {
            // SAFETY: made for this identifier alone.
            unsafe { rdma_destroy_event_channel(channel) };
        }
        0
    }
}

/// Acknowledges the event that a synchronous identifier holds.
///
/// # Safety
/// `id` lives and no other thread uses it now.
unsafe fn drop_event(id: *mut rdma_cm_id) {
    // SAFETY: the caller's promise.
    let event = unsafe { std::mem::replace(&mut (*id).event, std::ptr::null_mut()) };
    if !event.is_null() {
        // SAFETY: held by this identifier alone.
        unsafe { rdma_ack_cm_event(event) };
    }
}

/// The C identifier of an engine's.
fn c_id(engine: &CmId) -> *mut rdma_cm_id {
    std::ptr::with_exposed_provenance_mut(engine.cookie.load(Ordering::Acquire))
}

/// Finds the C identifiers of an event and counts it as delivered; a connect request gets its identifier here.
///
/// Called while the event is taken out of its channel, so that destroying an identifier either takes the event away or
/// waits for its acknowledgement.
///
/// # Safety
/// The identifiers of the event live.
unsafe fn deliver(event: &Event) -> (*mut rdma_cm_id, *mut rdma_cm_id) {
    let Some(listener) = &event.listener else {
        let id = c_id(&event.id);
        // SAFETY: an identifier lives while its events wait: destroying it takes them away.
        unsafe { of::<IdObject, _>(id) }.acks.delivered();
        return (id, std::ptr::null_mut());
    };
    let listen_id = c_id(listener);
    // SAFETY: as above.
    let parent = unsafe { of::<IdObject, _>(listen_id) };
    let made = make_id(
        Arc::clone(&event.id),
        parent.c.channel,
        parent.c.context,
        parent.c.qp_type,
        false,
    );
    parent.acks.delivered();
    (made, listen_id)
}

/// Makes the C event.
///
/// # Safety
/// The identifiers live: the event counts as delivered.
unsafe fn c_event(
    event: Event,
    id: *mut rdma_cm_id,
    listen_id: *mut rdma_cm_id,
) -> Result<*mut rdma_cm_event, c_int> {
    // SAFETY: lives.
    unsafe { show_device(id) }?;
    // SAFETY: as above.
    unsafe { show_addresses(id) };
    // SAFETY: as above.
    let c = unsafe { &mut *id };
    if event.kind == EventKind::RouteResolved {
        c.route.num_paths = 1;
    }
    // The program destroys no queue pair whose connection is being made; one whose connection ended it may be
    // destroying right now in another thread.
    if event.kind == EventKind::Established && !c.qp.is_null() {
        // SAFETY: the queue pair of an identifier lives until `rdma_destroy_qp`.
        let (state, _) = unsafe { of::<QpObject, _>(c.qp) }.engine.query();
        // SAFETY: as above.
        unsafe { (*c.qp).state = state as ibv_qp_state };
    }
    let datagram = c.qp_type == IBV_QPT_UD;
    let mut object = Box::new(EventObject {
        c: rdma_cm_event {
            id,
            listen_id,
            event: event.kind as rdma_cm_event_type,
            status: event.status,
            ..rdma_cm_event::default()
        },
        data: event.private_data,
    });
    let private_data: *const c_void = if object.data.is_empty() {
        std::ptr::null()
    } else {
        object.data.as_ptr().cast()
    };
    let private_data_len = u8::try_from(object.data.len()).unwrap_or(u8::MAX);
    if datagram {
        let mut ud = rdma_ud_param {
            private_data,
            private_data_len,
            ..rdma_ud_param::default()
        };
        if let Some(peer) = event.peer {
            ud.qp_num = peer.qpn;
            ud.qkey = peer.qkey;
            ud.ah_attr = vector_to(peer.addr, event.id.local());
        }
        if event.context != 0 {
            // What `rdma_join_multicast` was given.
            ud.private_data = std::ptr::with_exposed_provenance(event.context);
        }
        object.c.param.ud = ud;
    } else {
        object.c.param.conn = rdma_conn_param {
            private_data,
            private_data_len,
            responder_resources: event.responder_resources,
            initiator_depth: event.initiator_depth,
            retry_count: 7,
            rnr_retry_count: 7,
            ..rdma_conn_param::default()
        };
    }
    Ok(Box::into_raw(object).cast())
}

/// An address vector to `remote`.
fn vector_to(remote: SocketAddr, local: Option<SocketAddr>) -> ibv_ah_attr {
    let own = local.and_then(|l| gids::place_of(l.ip())).unwrap_or(0);
    let mut attr = ibv_ah_attr {
        is_global: 1,
        port_num: 1,
        ..ibv_ah_attr::default()
    };
    attr.grh.dgid = device::c_gid(gid_of(remote.ip()));
    attr.grh.sgid_index = own;
    attr.grh.hop_limit = 64;
    attr
}

/// One try at the next event: 0, or -1 with errno; `None`: wait.
///
/// # Safety
/// `out` is a valid place.
unsafe fn try_event(events: &EventChannel, out: *mut *mut rdma_cm_event) -> Option<c_int> {
    // SAFETY: the identifiers of a waiting event live.
    let popped = events.pop_with(|event| unsafe { deliver(event) });
    let Some((event, (id, listen_id))) = popped else {
        return events.is_nonblocking().then(|| fail(libc::EAGAIN, -1));
    };
    // SAFETY: the event counts as delivered.
    match unsafe { c_event(event, id, listen_id) } {
        Ok(event) => {
            // SAFETY: valid (caller's promise).
            unsafe { out.write(event) };
            Some(0)
        }
        Err(e) => Some(fail(e, -1)),
    }
}

/// Holds the events of a channel: a program may destroy the channel while a thread waits in it (rping does), and that
/// thread then waits for ever, as in a `read` of the descriptor.
///
/// # Safety
/// `channel` is null or lives.
unsafe fn hold(channel: *mut rdma_event_channel) -> Result<Held<EventChannel>, c_int> {
    if channel.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<ChannelObject, _>(channel) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let object = unsafe { of::<ChannelObject, _>(channel) };
    Ok(Held::new(&object.engine))
}

/// `rdma_get_cm_event(3)`: waits, unless the program made the channel's descriptor non-blocking.
///
/// Not an `entry!`: the thread may be cancelled while it waits, and that must not meet a `catch_unwind`.
///
/// # Safety
/// `channel` lives when this is called, `event` is a valid place.
// SAFETY: the symbol is ours: link/symbols.txt names it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    if event.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: the caller's promise.
    let events = match unsafe { hold(channel) } {
        Ok(events) => events,
        Err(e) => return fail(e, -1),
    };
    loop {
        // SAFETY: not null, so valid (caller's promise).
        let done = match crate::guard(Some(-1), || unsafe { try_event(events.get(), event) }) {
            Some(done) => done,
            None if block_on(events.get().raw_fd()) => continue,
            None => fail(libc::EINTR, -1),
        };
        events.release();
        return done;
    }
}

entry! {
    /// `rdma_ack_cm_event(3)`.
    ///
    /// # Safety
    /// `event` came from `rdma_get_cm_event` and is not used again.
    unsafe fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int, on_panic = -1, {
        if event.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: the caller's promise.
        let object = unsafe { Box::from_raw(event.cast::<EventObject>()) };
        // A connect request belongs to the listener until it is acknowledged.
        let whose = if object.c.listen_id.is_null() { object.c.id } else { object.c.listen_id };
        // SAFETY: an identifier lives until its events are acknowledged.
        if !unsafe { is_lost::<IdObject, _>(whose) } {
            // SAFETY: as above.
            unsafe { of::<IdObject, _>(whose) }.acks.acknowledged(1);
        }
        0
    }
}

/// Ends a step: a synchronous identifier waits for its event.
///
/// # Safety
/// `id` lives and no other thread uses it now.
unsafe fn complete(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: lives (caller's promise).
    let sync = unsafe { of::<IdObject, _>(id) }
        .sync
        .load(Ordering::Relaxed);
    if !sync {
        return 0;
    }
    // SAFETY: as above.
    unsafe { drop_event(id) };
    let mut event = std::ptr::null_mut();
    // SAFETY: as above; a synchronous identifier has its own channel.
    if unsafe { rdma_get_cm_event((*id).channel, &raw mut event) } != 0 {
        return -1;
    }
    // SAFETY: as above.
    unsafe { (*id).event = event };
    // SAFETY: just made.
    let (kind, status) = unsafe { ((*event).event, (*event).status) };
    if status == 0 {
        return 0;
    }
    let errno = match (kind, status) {
        (RDMA_CM_EVENT_REJECTED, _) => libc::ECONNREFUSED,
        (_, s) if s < 0 => -s,
        (_, s) => s,
    };
    fail(errno, -1)
}

/// Runs a step of the engine, then waits if the identifier is synchronous.
unsafe fn step(id: *mut rdma_cm_id, f: impl FnOnce(&CmId) -> std::io::Result<()>) -> c_int {
    if id.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: lives (the program's promise).
    if unsafe { is_lost::<IdObject, _>(id) } {
        return fail(libc::ENODEV, -1);
    }
    // SAFETY: as above.
    let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
    match f(&engine) {
        // SAFETY: as above.
        Ok(()) => unsafe { complete(id) },
        Err(e) => fail(os_errno(&e), -1),
    }
}

// ---------------------------------------------------------------------- steps

/// Whether binding to an address binds to the device. A loopback address does not, as in the kernel's rdma_cm: libfabric
/// asks for "localhost" to learn whether it may offer the device's other addresses. It does where it is the device's own.
fn names_device(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let at_home = || gids::at(0).is_some_and(|first| first.ip.is_loopback());
    !ip.is_unspecified() && (!ip.is_loopback() || at_home())
}

entry! {
    /// `rdma_bind_addr(3)`.
    ///
    /// # Safety
    /// `id` lives, `addr` is an address.
    unsafe fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        let Some(address) = (unsafe { address_of(addr) }) else { return fail(libc::EINVAL, -1) };
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
        if let Err(e) = engine.bind(address) {
            return fail(os_errno(&e), -1);
        }
        if names_device(address.ip()) {
            // SAFETY: as above.
            if let Err(e) = unsafe { show_device(id) } {
                return fail(e, -1);
            }
        }
        // SAFETY: as above.
        unsafe { show_addresses(id) };
        0
    }
}

entry! {
    /// `rdma_resolve_addr(3)`.
    ///
    /// # Safety
    /// `id` lives, `src` is null or an address, `dst` an address.
    unsafe fn rdma_resolve_addr(
        id: *mut rdma_cm_id, src: *mut sockaddr, dst: *mut sockaddr, _timeout_ms: c_int,
    ) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        let (src, dst) = unsafe { (address_of(src), address_of(dst)) };
        let Some(dst) = dst else { return fail(libc::EINVAL, -1) };
        // SAFETY: the caller's promise.
        unsafe { step(id, |e| e.resolve_addr(src, dst)) }
    }
}

entry! {
    /// `rdma_resolve_route(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        unsafe { step(id, CmId::resolve_route) }
    }
}

entry! {
    /// `rdma_listen(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
        match engine.listen(backlog) {
            Ok(()) => {
                // SAFETY: as above.
                unsafe { show_addresses(id) };
                0
            }
            Err(e) => fail(os_errno(&e), -1),
        }
    }
}

/// Connection parameters of C; without them as much as the device has.
///
/// # Safety
/// `param` is null or valid with its private data.
unsafe fn param_of(param: *const rdma_conn_param, id: &IdObject) -> ConnParam {
    let qp_num = if id.c.qp.is_null() {
        0
    } else {
        // SAFETY: the queue pair of an identifier lives until `rdma_destroy_qp`.
        unsafe { (*id.c.qp).qp_num }
    };
    if param.is_null() {
        return ConnParam {
            private_data: id
                .connect_data
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            responder_resources: bounds::MAX_RD_ATOMIC,
            initiator_depth: bounds::MAX_RD_ATOMIC,
            retry_count: 7,
            rnr_retry_count: 7,
            qp_num,
        };
    }
    // SAFETY: not null, so valid (caller's promise).
    let p = unsafe { &*param };
    let depth = |n: u8| {
        if n == RDMA_MAX_RESP_RES {
            bounds::MAX_RD_ATOMIC
        } else {
            n
        }
    };
    ConnParam {
        // SAFETY: the private data has the length that stands beside it (caller's promise).
        private_data: unsafe { bytes_of(p.private_data, p.private_data_len) },
        responder_resources: depth(p.responder_resources),
        initiator_depth: depth(p.initiator_depth),
        retry_count: p.retry_count,
        rnr_retry_count: p.rnr_retry_count,
        qp_num: if qp_num != 0 { qp_num } else { p.qp_num },
    }
}

/// Copies private data.
///
/// # Safety
/// `data` is null or has `len` readable bytes.
unsafe fn bytes_of(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() || len == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise; the slice lives for this statement.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

entry! {
    /// `rdma_connect(3)`.
    ///
    /// # Safety
    /// `id` lives, `param` is null or valid.
    unsafe fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: the caller's promise.
        let param = unsafe { param_of(param, of::<IdObject, _>(id)) };
        // SAFETY: as above.
        unsafe { step(id, |e| e.connect(param)) }
    }
}

entry! {
    /// `rdma_accept(3)`.
    ///
    /// # Safety
    /// `id` lives, `param` is null or valid.
    unsafe fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: the caller's promise.
        let datagram = unsafe { of::<IdObject, _>(id) }.c.qp_type == IBV_QPT_UD;
        // SAFETY: the caller's promise.
        let param = unsafe { param_of(param, of::<IdObject, _>(id)) };
        if datagram {
            // The answer is a datagram: no event follows.
            // SAFETY: as above.
            let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
            return match engine.accept(param) {
                Ok(()) => 0,
                Err(e) => fail(os_errno(&e), -1),
            };
        }
        // SAFETY: as above.
        let done = unsafe { step(id, |e| e.accept(param)) };
        // SAFETY: as above.
        let c = unsafe { &mut *id };
        if done == 0 && !c.qp.is_null() {
            // SAFETY: the queue pair of an identifier lives until `rdma_destroy_qp`.
            unsafe { (*c.qp).state = IBV_QPS_RTS };
        }
        done
    }
}

entry! {
    /// `rdma_reject(3)`.
    ///
    /// # Safety
    /// `id` lives, `data` has `len` bytes.
    unsafe fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: the caller's promise.
        let data = unsafe { bytes_of(data, len) };
        // SAFETY: as above.
        match unsafe { of::<IdObject, _>(id) }.engine.reject(&data) {
            Ok(()) => 0,
            Err(e) => fail(os_errno(&e), -1),
        }
    }
}

entry! {
    /// `rdma_reject_ece`: a reject; there is no enhanced connection establishment to disagree about.
    ///
    /// # Safety
    /// As for `rdma_reject`.
    unsafe fn rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        unsafe { rdma_reject(id, data, len) }
    }
}

entry! {
    /// `rdma_establish(3)`: a queue pair that the program moves itself was connected when the response came; a connection
    /// without one is now.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_establish(id: *mut rdma_cm_id) -> c_int, on_panic = -1, {
        // SAFETY: lives (caller's promise).
        if id.is_null() || !unsafe { (*id).qp }.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: as above.
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        unsafe { of::<IdObject, _>(id) }.engine.establish();
        0
    }
}

entry! {
    /// `rdma_notify(3)`.
    ///
    /// # Safety
    /// None needed.
    unsafe fn rdma_notify(_id: *mut rdma_cm_id, event: ibv_event_type) -> c_int, on_panic = -1, {
        if event == IBV_EVENT_COMM_EST { 0 } else { fail(libc::EINVAL, -1) }
    }
}

entry! {
    /// `rdma_disconnect(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        let engine = unsafe { Arc::clone(&of::<IdObject, _>(id).engine) };
        match engine.disconnect() {
            Ok(told) => {
                // SAFETY: as above; a synchronous identifier has a channel of its own.
                let waits = unsafe {
                    let object = of::<IdObject, _>(id);
                    let sync = object.sync.load(Ordering::Relaxed);
                    sync && (told || !of::<ChannelObject, _>(object.c.channel).engine.is_empty())
                };
                // One whose connection is over and told of has nothing to wait for.
                // SAFETY: as above.
                if waits { unsafe { complete(id) } } else { 0 }
            }
            Err(e) => fail(os_errno(&e), -1),
        }
    }
}

entry! {
    /// `rdma_migrate_id(3)`: without a channel the identifier becomes synchronous. Waits until the events that were taken
    /// from the old channel are acknowledged.
    ///
    /// # Safety
    /// `id` lives, `channel` is null or lives.
    unsafe fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int, on_panic = -1, {
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        let sync = channel.is_null();
        // SAFETY: as above.
        if sync && unsafe { of::<IdObject, _>(id) }.sync.load(Ordering::Relaxed) {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: none needed.
        let channel = if sync { unsafe { rdma_create_event_channel() } } else { channel };
        if channel.is_null() {
            return -1;
        }
        // SAFETY: they live (caller's promise).
        let (object, to) = unsafe { (of::<IdObject, _>(id), of::<ChannelObject, _>(channel)) };
        object.engine.migrate(&to.engine);
        let was_sync = object.sync.swap(sync, Ordering::Relaxed);
        // SAFETY: lives; no other thread uses it while it moves (caller's promise).
        let old = unsafe { std::mem::replace(&mut (*id).channel, channel) };
        if was_sync {
            // SAFETY: as above.
            unsafe { drop_event(id) };
            // SAFETY: made for this identifier alone.
            unsafe { rdma_destroy_event_channel(old) };
        }
        // SAFETY: lives.
        unsafe { of::<IdObject, _>(id) }.acks.wait_for_past();
        0
    }
}

entry! {
    /// `rdma_set_option(3)`.
    ///
    /// # Safety
    /// `id` lives, `value` has `len` bytes.
    unsafe fn rdma_set_option(
        id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, len: usize,
    ) -> c_int, on_panic = -1, {
        if id.is_null() || value.is_null() || len == 0 {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        let engine = unsafe { &of::<IdObject, _>(id).engine };
        // SAFETY: at least one byte (checked).
        let byte = unsafe { value.cast::<u8>().read() };
        // SAFETY: an int if `len` says so.
        let int = (len >= size_of::<c_int>()).then(|| unsafe { value.cast::<c_int>().read_unaligned() });
        let set = match (level, name, int) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, _) => Ok(()),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, Some(on)) => engine.set_options(Some(on != 0), None, None),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, Some(on)) => engine.set_options(None, Some(on != 0), None),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, _) => engine.set_options(None, None, Some(byte & 31)),
            // The way is the kernel's.
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, _) => Ok(()),
            _ => Err(std::io::Error::from_raw_os_error(libc::ENOSYS)),
        };
        match set {
            Ok(()) => 0,
            Err(e) => fail(os_errno(&e), -1),
        }
    }
}

// ---------------------------------------------------------------------- queue pairs

/// Why the verb that was just called failed.
fn last_errno() -> c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// A completion queue of `n` entries with a channel, for an identifier.
///
/// # Safety
/// `id` lives and has a device.
unsafe fn make_queue(
    id: *mut rdma_cm_id,
    n: u32,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), c_int> {
    // SAFETY: lives (caller's promise).
    let verbs = unsafe { (*id).verbs };
    // SAFETY: an identifier's context stays open.
    let channel = unsafe { ibv_create_comp_channel(verbs) };
    if channel.is_null() {
        return Err(last_errno());
    }
    let cqe = c_int::try_from(n.max(1)).unwrap_or(c_int::MAX);
    // SAFETY: as above.
    let cq = unsafe { ibv_create_cq(verbs, cqe, id.cast(), channel, 0) };
    if cq.is_null() {
        let e = last_errno();
        // SAFETY: just made.
        unsafe { ibv_destroy_comp_channel(channel) };
        return Err(e);
    }
    Ok((channel, cq))
}

/// Makes queues for an identifier whose program gave none. An end of XRC has only those that it uses.
///
/// # Safety
/// `id` lives.
unsafe fn make_queues(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), c_int> {
    let sends = init.qp_type != IBV_QPT_XRC_RECV;
    let receives = sends && init.qp_type != IBV_QPT_XRC_SEND;
    // SAFETY: lives; no other thread uses it now (the program's promise).
    let c = unsafe { &mut *id };
    if init.send_cq.is_null() && sends {
        if c.send_cq.is_null() {
            // SAFETY: lives and has a device (`create_qp`).
            (c.send_cq_channel, c.send_cq) = unsafe { make_queue(id, init.cap.max_send_wr) }?;
        }
        init.send_cq = c.send_cq;
    }
    if init.recv_cq.is_null() && receives {
        if c.recv_cq.is_null() {
            // SAFETY: as above.
            (c.recv_cq_channel, c.recv_cq) = unsafe { make_queue(id, init.cap.max_recv_wr) }?;
        }
        init.recv_cq = c.recv_cq;
    }
    Ok(())
}

/// Destroys the queues that were made here and that nothing uses any more.
///
/// # Safety
/// `id` lives.
unsafe fn drop_queues(id: *mut rdma_cm_id) {
    // SAFETY: as for `make_queues`.
    let c = unsafe { &mut *id };
    for (channel, cq) in [
        (&mut c.send_cq_channel, &mut c.send_cq),
        (&mut c.recv_cq_channel, &mut c.recv_cq),
    ] {
        // SAFETY: made here.
        if !cq.is_null() && unsafe { ibv_destroy_cq(*cq) } != 0 {
            continue;
        }
        *cq = std::ptr::null_mut();
        if !channel.is_null() {
            // SAFETY: made here, its queue is gone.
            unsafe { ibv_destroy_comp_channel(*channel) };
            *channel = std::ptr::null_mut();
        }
    }
}

/// Makes the queue pair of an identifier; what the program left out is filled in.
///
/// # Safety
/// `id` and what `init` names live.
unsafe fn create_qp(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), c_int> {
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<IdObject, _>(id) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let c = unsafe { &mut *id };
    if c.verbs.is_null() || !c.qp.is_null() || init.qp_type != c.qp_type {
        return Err(libc::EINVAL);
    }
    if init.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || init.pd.is_null() {
        init.pd = c.pd;
        init.comp_mask |= IBV_QP_INIT_ATTR_PD;
    }
    // SAFETY: not null, so it lives.
    if unsafe { (*init.pd).context } != c.verbs {
        return Err(libc::EINVAL);
    }
    let no_domain = init.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || init.xrcd.is_null();
    if init.qp_type == IBV_QPT_XRC_RECV && no_domain {
        init.xrcd = shared_xrcd()?;
        init.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
    }
    let verbs = c.verbs;
    // SAFETY: the caller's promise.
    if let Err(e) = unsafe { make_queues(id, init) } {
        // SAFETY: lives.
        unsafe { drop_queues(id) };
        return Err(e);
    }
    // rdma_create_srq(3): the identifier's shared receive queue serves its queue pair.
    if init.srq.is_null() && init.qp_type != IBV_QPT_XRC_RECV {
        // SAFETY: lives (caller's promise).
        init.srq = unsafe { (*id).srq };
    }
    // SAFETY: the caller's promise.
    let qp = managed(|| unsafe { create_qp_ex(verbs, init) });
    if qp.is_null() {
        let e = last_errno();
        // SAFETY: lives.
        unsafe { drop_queues(id) };
        return Err(e);
    }
    // SAFETY: just made.
    let object = unsafe { of::<QpObject, _>(qp) };
    // SAFETY: lives.
    let identifier = unsafe { of::<IdObject, _>(id) };
    let ready = match object.engine.clone() {
        QueuePair::Rc(rc) => {
            identifier.engine.set_qp(Some(rc));
            // SAFETY: just made.
            unsafe { to_init(qp, cm::rights(1).0) }
        }
        #[allow(unreachable_patterns, reason = "datagram queue pairs")]
        datagram => {
            identifier.engine.set_datagram(datagram, UDP_QKEY);
            // SAFETY: just made.
            unsafe { datagram_ready(qp) }
        }
    };
    if ready != 0 {
        identifier.engine.set_qp(None);
        // SAFETY: just made, used by nobody.
        unsafe { ibv_destroy_qp(qp) };
        // SAFETY: lives.
        unsafe { drop_queues(id) };
        return Err(ready);
    }
    // SAFETY: lives; no reference to it is held.
    let c = unsafe { &mut *id };
    c.qp = qp;
    c.pd = init.pd;
    Ok(())
}

/// The same with attributes of the first form.
///
/// # Safety
/// `id`, `pd` and what `init` names live.
unsafe fn create_plain_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
) -> Result<(), c_int> {
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
    // SAFETY: the caller's promise.
    unsafe { create_qp(id, &mut ex) }?;
    (init.send_cq, init.recv_cq, init.srq) = (ex.send_cq, ex.recv_cq, ex.srq);
    init.cap = ex.cap;
    Ok(())
}

/// RESET to INIT.
unsafe fn to_init(qp: *mut ibv_qp, access: u32) -> c_int {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: 1,
        qp_access_flags: access,
        ..ibv_qp_attr::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    // SAFETY: the queue pair lives (caller's promise).
    unsafe { ibv_modify_qp(qp, &raw mut attr, mask as c_int) }
}

/// A datagram queue pair, RESET to RTS.
unsafe fn datagram_ready(qp: *mut ibv_qp) -> c_int {
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: 1,
        qkey: UDP_QKEY,
        ..ibv_qp_attr::default()
    };
    let steps = [
        (
            IBV_QPS_INIT,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
        ),
        (IBV_QPS_RTR, IBV_QP_STATE),
        (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN),
    ];
    for (state, mask) in steps {
        attr.qp_state = state;
        // SAFETY: the queue pair lives (caller's promise).
        let done = unsafe { ibv_modify_qp(qp, &raw mut attr, mask as c_int) };
        if done != 0 {
            return done;
        }
    }
    0
}

entry! {
    /// `rdma_create_qp(3)`.
    ///
    /// # Safety
    /// `id`, `pd` and what `init` names live.
    unsafe fn rdma_create_qp(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr,
    ) -> c_int, on_panic = -1, {
        if id.is_null() || init.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: the caller's promise.
        match unsafe { create_plain_qp(id, pd, &mut *init) } {
            Ok(()) => 0,
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `rdma_create_qp_ex`.
    ///
    /// # Safety
    /// As for `rdma_create_qp`.
    unsafe fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int, on_panic = -1, {
        if id.is_null() || init.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: valid (caller's promise).
        match unsafe { create_qp(id, &mut *init) } {
            Ok(()) => 0,
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `rdma_destroy_qp(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_destroy_qp(id: *mut rdma_cm_id), on_panic = (), {
        if id.is_null() {
            return;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return;
        }
        // SAFETY: as above.
        unsafe { &of::<IdObject, _>(id).engine }.set_qp(None);
        // SAFETY: as above.
        let qp = unsafe { std::mem::replace(&mut (*id).qp, std::ptr::null_mut()) };
        if !qp.is_null() {
            // SAFETY: made by `rdma_create_qp`.
            unsafe { ibv_destroy_qp(qp) };
        }
        // SAFETY: lives.
        unsafe { drop_queues(id) };
    }
}

/// Makes the shared receive queue of an identifier; what the program left out is filled in.
///
/// # Safety
/// `id` and what `init` names live.
unsafe fn create_srq(id: *mut rdma_cm_id, init: &mut ibv_srq_init_attr_ex) -> Result<(), c_int> {
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<IdObject, _>(id) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let c = unsafe { &mut *id };
    if c.verbs.is_null() || !c.srq.is_null() || init.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
        return Err(libc::EINVAL);
    }
    if init.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || init.pd.is_null() {
        init.pd = c.pd;
        init.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    }
    if init.srq_type == IBV_SRQT_XRC {
        if init.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || init.xrcd.is_null() {
            init.xrcd = shared_xrcd()?;
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || init.cq.is_null() {
            if c.recv_cq.is_null() {
                // SAFETY: lives and has a device (checked).
                (c.recv_cq_channel, c.recv_cq) = unsafe { make_queue(id, init.attr.max_wr) }?;
            }
            init.cq = c.recv_cq;
        }
        init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    }
    // SAFETY: the caller's promise.
    let srq = unsafe { create_srq_ex(c.verbs, init) };
    if srq.is_null() {
        let e = last_errno();
        // SAFETY: lives; those that a queue pair uses stay.
        unsafe { drop_queues(id) };
        return Err(e);
    }
    c.srq = srq;
    c.pd = init.pd;
    Ok(())
}

entry! {
    /// `rdma_create_srq(3)`: one of an XRC domain for an identifier that receives XRC.
    ///
    /// # Safety
    /// `id` lives, `init` is valid.
    unsafe fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> c_int, on_panic = -1, {
        if id.is_null() || init.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: they live (caller's promise).
        let (receives_xrc, plain) = unsafe { ((*id).qp_type == IBV_QPT_XRC_RECV, &mut *init) };
        let mut ex = ibv_srq_init_attr_ex {
            srq_context: plain.srq_context,
            attr: plain.attr,
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
            srq_type: if receives_xrc { IBV_SRQT_XRC } else { IBV_SRQT_BASIC },
            pd,
            ..ibv_srq_init_attr_ex::default()
        };
        // SAFETY: the caller's promise.
        match unsafe { create_srq(id, &mut ex) } {
            Ok(()) => {
                plain.attr = ex.attr;
                0
            }
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `rdma_create_srq_ex`: basic ones, and those of an XRC domain.
    ///
    /// # Safety
    /// As for `rdma_create_srq`.
    unsafe fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int, on_panic = -1, {
        if id.is_null() || init.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: valid (caller's promise).
        match unsafe { create_srq(id, &mut *init) } {
            Ok(()) => 0,
            Err(e) => fail(e, -1),
        }
    }
}

entry! {
    /// `rdma_destroy_srq(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_destroy_srq(id: *mut rdma_cm_id), on_panic = (), {
        if id.is_null() {
            return;
        }
        // SAFETY: lives (caller's promise).
        let srq = unsafe { std::mem::replace(&mut (*id).srq, std::ptr::null_mut()) };
        if !srq.is_null() {
            // SAFETY: made by `rdma_create_srq`.
            unsafe { ibv_destroy_srq(srq) };
        }
        // SAFETY: lives (caller's promise).
        if unsafe { (*id).qp.is_null() } {
            // SAFETY: as above.
            unsafe { drop_queues(id) };
        }
    }
}

entry! {
    /// `rdma_init_qp_attr(3)`: attributes for a program that moves its queue pair itself.
    ///
    /// # Safety
    /// `id` lives, the others are valid places.
    unsafe fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int, on_panic = -1, {
        if id.is_null() || attr.is_null() || mask.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: they live (caller's promise).
        let (object, attr) = unsafe { (of::<IdObject, _>(id), &mut *attr) };
        let (ird, ord, retry, rnr) = object.engine.agreed();
        let state = attr.qp_state;
        let datagram = object.c.qp_type == IBV_QPT_UD;
        *attr = ibv_qp_attr { qp_state: state, port_num: 1, ..ibv_qp_attr::default() };
        let bits = match (state, datagram) {
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
                // 0: the connection of this identifier, whatever the peer's number is.
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
            _ => return fail(libc::EINVAL, -1),
        };
        // SAFETY: not null, so valid (caller's promise).
        unsafe { mask.write(bits as c_int) };
        0
    }
}

// ---------------------------------------------------------------------- endpoints

entry! {
    /// `rdma_create_ep(3)`.
    ///
    /// # Safety
    /// `id` is a valid place, `res` came from `rdma_getaddrinfo`, `pd` and what `init` names live or are null.
    unsafe fn rdma_create_ep(
        id: *mut *mut rdma_cm_id, res: *mut rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr,
    ) -> c_int, on_panic = -1, {
        if id.is_null() || res.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: valid (caller's promise).
        let info = unsafe { &*res };
        // SAFETY: no channel: synchronous.
        let made = unsafe {
            create_id(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                info.ai_port_space.cast_unsigned(),
                Some(info.ai_qp_type.cast_unsigned()),
            )
        };
        let made = match made {
            Ok(made) => made,
            Err(e) => return fail(e, -1),
        };
        let undo = |e: c_int| {
            // SAFETY: just made, known to nobody.
            unsafe { rdma_destroy_ep(made) };
            fail(e, -1)
        };
        if info.ai_flags & RAI_PASSIVE != 0 {
            // SAFETY: the addresses of `res` are valid.
            if unsafe { rdma_bind_addr(made, info.ai_src_addr) } != 0 {
                return undo(last_errno());
            }
            // SAFETY: not null, so valid (caller's promise).
            let template = (!init.is_null()).then(|| unsafe { *init });
            // SAFETY: just made.
            *unsafe { of::<IdObject, _>(made) }.template.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((AtomicPtr::new(pd), template));
            // SAFETY: not null, so valid (caller's promise).
            unsafe { id.write(made) };
            return 0;
        }
        // SAFETY: the addresses of `res` are valid.
        if unsafe { rdma_resolve_addr(made, info.ai_src_addr, info.ai_dst_addr, STEP_MS) } != 0
            // SAFETY: just made.
            || unsafe { rdma_resolve_route(made, STEP_MS) } != 0
        {
            return undo(last_errno());
        }
        if !init.is_null() {
            // SAFETY: valid (caller's promise).
            let init = unsafe { &mut *init };
            init.qp_type = info.ai_qp_type.cast_unsigned();
            // SAFETY: the caller's promise.
            if let Err(e) = unsafe { create_plain_qp(made, pd, init) } {
                return undo(e);
            }
        }
        if !info.ai_connect.is_null() && info.ai_connect_len > 0 {
            let len = u8::try_from(info.ai_connect_len).unwrap_or(u8::MAX);
            // SAFETY: the connect data has the length beside it.
            let data = unsafe { bytes_of(info.ai_connect, len) };
            // SAFETY: just made.
            *unsafe { of::<IdObject, _>(made) }.connect_data.lock().unwrap_or_else(PoisonError::into_inner) = data;
        }
        // SAFETY: not null, so valid (caller's promise).
        unsafe { id.write(made) };
        0
    }
}

entry! {
    /// `rdma_destroy_ep(3)`.
    ///
    /// # Safety
    /// `id` came from here and is not used again.
    unsafe fn rdma_destroy_ep(id: *mut rdma_cm_id), on_panic = (), {
        if id.is_null() {
            return;
        }
        // SAFETY: lives (caller's promise).
        unsafe {
            rdma_destroy_qp(id);
            rdma_destroy_srq(id);
            rdma_destroy_id(id);
        }
    }
}

/// The channel in which the connect requests of a synchronous listener come; null and errno for another one.
///
/// # Safety
/// `listen` is null or lives; no other thread uses it now.
unsafe fn request_channel(listen: *mut rdma_cm_id) -> *mut rdma_event_channel {
    if listen.is_null() {
        return fail(libc::EINVAL, std::ptr::null_mut());
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<IdObject, _>(listen) } {
        return fail(libc::ENODEV, std::ptr::null_mut());
    }
    // SAFETY: as above.
    if !unsafe { of::<IdObject, _>(listen) }
        .sync
        .load(Ordering::Relaxed)
    {
        return fail(libc::EINVAL, std::ptr::null_mut());
    }
    // SAFETY: as above.
    unsafe { drop_event(listen) };
    // SAFETY: as above.
    unsafe { (*listen).channel }
}

/// Makes a synchronous identifier of a connect request, with a queue pair if the listener has a template.
///
/// # Safety
/// `listen` lives, `event` is one of its channel and not acknowledged, `id` is a valid place.
unsafe fn take_request(
    listen: *mut rdma_cm_id,
    event: *mut rdma_cm_event,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: the caller's promise.
    let (kind, status, made) = unsafe { ((*event).event, (*event).status, (*event).id) };
    if status != 0 || kind != RDMA_CM_EVENT_CONNECT_REQUEST {
        // SAFETY: ours to acknowledge.
        unsafe { rdma_ack_cm_event(event) };
        return fail(if status < 0 { -status } else { libc::EINVAL }, -1);
    }
    // SAFETY: the new identifier lives.
    unsafe { rdma_migrate_id(made, std::ptr::null_mut()) };
    // SAFETY: lives.
    let parent = unsafe { of::<IdObject, _>(listen) };
    let template = {
        let held = parent
            .template
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        held.as_ref()
            .and_then(|(pd, init)| init.map(|i| (pd.load(Ordering::Relaxed), i)))
    };
    if let Some((pd, mut init)) = template {
        // SAFETY: what the template names lives while the listener does (the program's promise).
        let c = unsafe { &*made };
        init.qp_type = c.qp_type;
        // SAFETY: as above.
        if let Err(e) = unsafe { create_plain_qp(made, pd, &mut init) } {
            // SAFETY: ours.
            unsafe {
                rdma_ack_cm_event(event);
                rdma_destroy_ep(made);
            }
            return fail(e, -1);
        }
    }
    // SAFETY: lives, known to nobody else.
    unsafe { (*made).event = event };
    // SAFETY: valid (caller's promise).
    unsafe { id.write(made) };
    0
}

/// `rdma_get_request(3)`: the next connect request of a synchronous listener.
///
/// Not an `entry!`: the thread may be cancelled while it waits, and that must not meet a `catch_unwind`.
///
/// # Safety
/// `listen` lives, `id` is a valid place.
// SAFETY: the symbol is ours: link/symbols.txt names it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_request(
    listen: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    if id.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: the caller's promise.
    let channel = crate::guard(std::ptr::null_mut(), || unsafe { request_channel(listen) });
    if channel.is_null() {
        return -1;
    }
    let mut event = std::ptr::null_mut();
    // SAFETY: the listener's channel lives as long as the listener.
    if unsafe { rdma_get_cm_event(channel, &raw mut event) } != 0 {
        return -1;
    }
    // SAFETY: the event was just taken; `id` is not null, so valid (caller's promise).
    crate::guard(-1, || unsafe { take_request(listen, event, id) })
}

// ---------------------------------------------------------------------- lists, ports, ECE

entry! {
    /// `rdma_get_devices(3)`.
    ///
    /// # Safety
    /// `num` is null or a valid place.
    unsafe fn rdma_get_devices(num: *mut c_int) -> *mut *mut ibv_context, on_panic = std::ptr::null_mut(), {
        match shared() {
            Ok(shared) => {
                if !num.is_null() {
                    // SAFETY: not null, so valid (caller's promise).
                    unsafe { num.write(1) };
                }
                Box::into_raw(vec![shared.context, std::ptr::null_mut()].into_boxed_slice()).cast()
            }
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `rdma_free_devices(3)`.
    ///
    /// # Safety
    /// `list` is null or came from `rdma_get_devices`, and is not used again.
    unsafe fn rdma_free_devices(list: *mut *mut ibv_context), on_panic = (), {
        if !list.is_null() {
            // SAFETY: made as a boxed slice of two.
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, 2)) });
        }
    }
}

/// The port of an address, in network byte order.
fn port_of(address: Option<SocketAddr>) -> be16 {
    address.map_or(0, |a| a.port().to_be())
}

entry! {
    /// `rdma_get_src_port(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_get_src_port(id: *mut rdma_cm_id) -> be16, on_panic = 0, {
        if id.is_null() {
            return 0;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return 0;
        }
        // SAFETY: as above.
        port_of(unsafe { of::<IdObject, _>(id) }.engine.local())
    }
}

entry! {
    /// `rdma_get_dst_port(3)`.
    ///
    /// # Safety
    /// `id` lives.
    unsafe fn rdma_get_dst_port(id: *mut rdma_cm_id) -> be16, on_panic = 0, {
        if id.is_null() {
            return 0;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return 0;
        }
        // SAFETY: as above.
        port_of(unsafe { of::<IdObject, _>(id) }.engine.remote())
    }
}

entry! {
    /// `rdma_set_local_ece(3)`: checked, and told to nobody: MPA has no field for it, and an iWARP peer knows none.
    ///
    /// # Safety
    /// `id` and `ece` are null or valid.
    unsafe fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int, on_panic = -1, {
        if id.is_null() || ece.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: not null, so valid (caller's promise).
        let (made, ece) = unsafe { (!(*id).qp.is_null(), &*ece) };
        if made || ece.vendor_id == 0 || ece.comp_mask != 0 {
            return fail(libc::EINVAL, -1);
        }
        0
    }
}

entry! {
    /// `rdma_get_remote_ece(3)`: none.
    ///
    /// # Safety
    /// `id` is null or lives, `ece` is a valid place.
    unsafe fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int, on_panic = -1, {
        // SAFETY: not null, so it lives (caller's promise).
        if id.is_null() || ece.is_null() || !unsafe { (*id).qp }.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: not null, so valid (caller's promise).
        unsafe { ece.write(ibv_ece::default()) };
        0
    }
}

entry! {
    /// `rdma_join_multicast(3)`.
    ///
    /// # Safety
    /// `id` lives, `addr` is an address.
    unsafe fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        unsafe { join(id, addr, context) }
    }
}

entry! {
    /// `rdma_join_multicast_ex(3)`: full members.
    ///
    /// # Safety
    /// `id` lives, `attr` is valid.
    unsafe fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id, attr: *mut rdma_cm_join_mc_attr_ex, context: *mut c_void,
    ) -> c_int, on_panic = -1, {
        if attr.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: not null, so valid (caller's promise).
        let attr = unsafe { &*attr };
        // SAFETY: the caller's promise.
        unsafe { join(id, attr.addr, context) }
    }
}

/// Joins a group; the outcome is an event.
unsafe fn join(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int {
    // SAFETY: the program's promise.
    let Some(group) = (unsafe { address_of(addr) }) else {
        return fail(libc::EINVAL, -1);
    };
    // SAFETY: as above.
    unsafe { step(id, |e| e.join(group.ip(), context.expose_provenance())) }
}

entry! {
    /// `rdma_leave_multicast(3)`.
    ///
    /// # Safety
    /// `id` lives, `addr` is an address.
    unsafe fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int, on_panic = -1, {
        // SAFETY: the caller's promise.
        let Some(group) = (unsafe { address_of(addr) }) else { return fail(libc::EINVAL, -1) };
        if id.is_null() {
            return fail(libc::EINVAL, -1);
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<IdObject, _>(id) } {
            return fail(libc::ENODEV, -1);
        }
        // SAFETY: as above.
        match unsafe { of::<IdObject, _>(id) }.engine.leave(group.ip()) {
            Ok(()) => 0,
            Err(e) => fail(os_errno(&e), -1),
        }
    }
}
