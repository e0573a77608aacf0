//! Identifiers and event channels: the objects, and the calls that create, migrate and destroy them.
//!
//! An identifier that was created without a channel is *synchronous*: the library creates a private channel for it, each step waits
//! for its event, and the event stays in `id->event` until the next step.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use anywarp_core::lock::Mutex;
use anywarp_engine::address::gid_of;
use anywarp_engine::channel::Channel;
use anywarp_engine::cm::{CmId, EventChannel, PortSpace};
use anywarp_engine::config::{Face, config};

use super::address::{address_of, c_address, c_port, path_between};
use super::addrinfo::Resolved;
use super::device::Shared;
use crate::entry;
use crate::ffi::{Errno, arg, os_errno, put};
use crate::verbs::convert::c_gid;
use crate::verbs::handle::{
    CStruct, Object, c_object, into_c, known, live, returned, set_c_object,
};
use crate::verbs::object::{Acks, QpObject};
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// An event channel.
#[repr(C)]
pub(super) struct ChannelObject {
    c: CStruct<rdma_event_channel>,
    pub(super) engine: Arc<EventChannel>,
}

// SAFETY: `repr(C)`; an `rdma_event_channel` comes first.
unsafe impl Object<rdma_event_channel> for ChannelObject {}

/// An identifier.
#[repr(C)]
pub(super) struct IdObject {
    pub(super) c: CStruct<rdma_cm_id>,
    pub(super) engine: Arc<CmId>,
    pub(super) acks: Acks,
    /// The argument of `rdma_create_ep` for the queue pairs of connect requests.
    pub(super) template: Mutex<Option<ibv_qp_init_attr>>,
    connect_data: Mutex<Vec<u8>>,
    pub(super) resolved: Resolved,
    /// What `c.route.path_rec` points to.
    path: CStruct<ibv_sa_path_rec>,
    /// Held while `c.qp` is removed, and while a thread writes the state into the queue pair that `c.qp` points to.
    qp_in_use: Mutex<()>,
}

// SAFETY: `repr(C)`; an `rdma_cm_id` comes first.
unsafe impl Object<rdma_cm_id> for IdObject {}
// SAFETY: the pointers in `template` are copied and never dereferenced; everything else may be used from every thread.
unsafe impl Sync for IdObject {}
// SAFETY: as above.
unsafe impl Send for IdObject {}

impl IdObject {
    /// Returns whether each step waits for its event.
    pub(super) fn is_synchronous(&self) -> bool {
        self.engine.is_synchronous.load(Ordering::Relaxed)
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.c.get(|c| c.qp_type) == IBV_QPT_UD
    }

    /// Returns the channel that receives the identifier's events.
    pub(super) fn channel(&self) -> *mut rdma_event_channel {
        self.c.get(|c| c.channel)
    }

    /// Returns the queue pair that `rdma_create_qp` created, or null.
    pub(super) fn qp(&self) -> *mut ibv_qp {
        self.c.get(|c| c.qp)
    }

    /// See `qp_in_use`.
    pub(super) fn lock_qp(&self) -> MutexGuard<'_, ()> {
        self.qp_in_use.lock()
    }

    /// Removes the queue pair from the identifier and returns it. [`IdObject::show_qp_state`] no longer uses it, so the caller may
    /// destroy it.
    pub(super) fn take_qp(&self) -> *mut ibv_qp {
        let _alone = self.lock_qp();
        self.c
            .set(|c| std::mem::replace(&mut c.qp, std::ptr::null_mut()))
    }

    /// Writes the state of the identifier's queue pair, if there is one, to the field that the program reads. The lock
    /// prevents another thread from destroying the queue pair meanwhile: a thread that has received the event that reports the
    /// connection may already call `rdma_destroy_qp`.
    pub(super) fn show_qp_state(&self) {
        let _alone = self.lock_qp();
        let qp = self.qp();
        if !qp.is_null() {
            // SAFETY: a queue pair is live until `take_qp`, which waits for the lock.
            let qp = unsafe { known::<QpObject, _>(qp) };
            qp.show_state(qp.engine.query().0 as ibv_qp_state);
        }
    }

    /// Returns the private data that the program passed to `rdma_create_ep`. The connect request begins with it.
    pub(super) fn connect_data(&self) -> Vec<u8> {
        self.connect_data.lock().clone()
    }

    pub(super) fn set_connect_data(&self, data: Vec<u8>) {
        *self.connect_data.lock() = data;
    }

    /// Writes the addresses of the engine's identifier into the C structure.
    pub(super) fn show_addresses(&self) {
        let (local, remote) = (self.engine.local(), self.engine.remote());
        self.c.set(|c| {
            let addr = &mut c.route.addr;
            if let Some(local) = local {
                addr.src = c_address(local);
                if !local.ip().is_unspecified() {
                    addr.addr.ibaddr.sgid = c_gid(gid_of(local.ip()));
                }
            }
            if let Some(remote) = remote {
                addr.dst = c_address(remote);
                addr.addr.ibaddr.dgid = c_gid(gid_of(remote.ip()));
            }
            addr.addr.ibaddr.pkey = 0xffff;
        });
    }

    /// Writes an address that is about to be resolved into the C structure, and returns the previous one.
    pub(super) fn show_destination(&self, to: rdma_sockaddr) -> rdma_sockaddr {
        self.c.set(|c| std::mem::replace(&mut c.route.addr.dst, to))
    }

    /// Writes the path between the addresses into the C structure. Programs read `path_rec` if `num_paths` is 1. A device of
    /// type iWARP has no path records.
    pub(super) fn show_path(&self) {
        if config().face == Face::Iwarp {
            return;
        }
        let addr = self.c.get(|c| c.route.addr.addr);
        // SAFETY: all members of the union are this one.
        let addr = unsafe { addr.ibaddr };
        let (tos, ack_timeout) = self.engine.path_options();
        let path = self.path.set(|path| {
            *path = path_between(&addr, tos, ack_timeout);
            std::ptr::from_mut(path)
        });
        self.c
            .set(|c| (c.route.path_rec, c.route.num_paths) = (path, 1));
    }

    /// Writes the device into the C structure, if it is not set yet.
    pub(super) fn show_device(&self, device: &Shared) {
        self.c.set(|c| {
            if c.verbs.is_null() {
                c.verbs = device.context();
                c.port_num = 1;
                if c.pd.is_null() {
                    c.pd = device.pd();
                }
            }
        });
    }
}

/// Returns the C identifier of an identifier of the engine.
pub(super) fn c_id(engine: &CmId) -> *mut rdma_cm_id {
    c_object(engine.c_object.load(Ordering::Acquire))
}

// ---------------------------------------------------------------------- channels

entry! {
    /// `rdma_create_event_channel(3)`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rdma_create_event_channel() -> *mut rdma_event_channel, null, {
        create_channel()
    }
}

fn create_channel() -> Result<*mut rdma_event_channel, Errno> {
    anywarp_engine::engine::engine().map_err(|e| os_errno(&e))?;
    let channel = Channel::new().map_err(|e| os_errno(&e))?;
    let c = rdma_event_channel {
        fd: channel.raw_fd(),
    };
    Ok(into_c(ChannelObject {
        c: CStruct::new(c),
        engine: Arc::new(channel),
    }))
}

/// Destroys a channel.
///
/// # Safety
/// `channel` is null or points to a live object, and is not used again.
unsafe fn destroy_channel(channel: *mut rdma_event_channel) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let channel = unsafe { returned::<ChannelObject, _>(channel) }?;
    drop(channel.map(|channel| channel.take()));
    Ok(())
}

entry! {
    /// `rdma_destroy_event_channel(3)`.
    ///
    /// # Safety
    /// `channel` is null or came from `rdma_create_event_channel`, and is not used again.
    unsafe fn rdma_destroy_event_channel(channel: *mut rdma_event_channel), nothing, {
        // SAFETY: upheld by the caller.
        unsafe { destroy_channel(channel) }
    }
}

// ---------------------------------------------------------------------- identifiers

/// Creates a C identifier for one of the engine.
pub(super) fn make_id(
    engine: Arc<CmId>,
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    qp_type: ibv_qp_type,
    sync: bool,
) -> *mut rdma_cm_id {
    engine.is_synchronous.store(sync, Ordering::Relaxed);
    let c = rdma_cm_id {
        channel,
        context,
        ps: engine.port_space as rdma_port_space,
        qp_type,
        ..rdma_cm_id::default()
    };
    let id: *mut rdma_cm_id = into_c(IdObject {
        c: CStruct::new(c),
        engine: Arc::clone(&engine),
        acks: Acks::default(),
        template: Mutex::new(None),
        connect_data: Mutex::new(Vec::new()),
        resolved: Resolved::default(),
        path: CStruct::new(ibv_sa_path_rec::default()),
        qp_in_use: Mutex::new(()),
    });
    set_c_object(&engine.c_object, id);
    id
}

/// Creates an identifier. The type of its queue pairs follows from the port space, unless `qp_type` is given.
///
/// # Safety
/// `channel` is null or points to a live object.
pub(super) unsafe fn create_id(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: Option<ibv_qp_type>,
) -> Result<*mut rdma_cm_id, Errno> {
    let (space, usual) = match ps {
        RDMA_PS_TCP => (PortSpace::Tcp, IBV_QPT_RC),
        RDMA_PS_IB => (PortSpace::Ib, IBV_QPT_RC),
        RDMA_PS_UDP => (PortSpace::Udp, IBV_QPT_UD),
        RDMA_PS_IPOIB => (PortSpace::Ipoib, IBV_QPT_UD),
        _ => return Err(libc::EINVAL),
    };
    let sync = channel.is_null();
    let channel = if sync { create_channel()? } else { channel };
    // SAFETY: the channel was created above, or is live (guaranteed by the caller).
    let events = unsafe { live::<ChannelObject, _>(channel) }?;
    let made = match (space, qp_type) {
        (PortSpace::Ib, Some(IBV_QPT_UD)) => CmId::new_ib_datagram(&events.engine),
        _ => CmId::new(&events.engine, space),
    };
    let engine = match made {
        Ok(engine) => engine,
        Err(e) => {
            if sync {
                // SAFETY: the channel was created above for this identifier alone, whose creation failed, so nothing else refers to it.
                unsafe { destroy_channel(channel) }?;
            }
            return Err(os_errno(&e));
        }
    };
    let qp_type = qp_type.unwrap_or(usual);
    Ok(make_id(engine, channel, context, qp_type, sync))
}

entry! {
    /// `rdma_create_id(3)`: with a null channel the identifier is synchronous.
    ///
    /// # Safety
    /// `channel` is null or points to a live object, `id` is null or valid for writes.
    unsafe fn rdma_create_id(
        channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void, ps: rdma_port_space,
    ) -> c_int, minus_one, {
        if id.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        unsafe { put(id, create_id(channel, context, ps, None)?) }?;
        Ok(0)
    }
}

/// Destroys an identifier. Waits until its events are acknowledged.
///
/// # Safety
/// `id` is null or points to a live object, and is not used again.
pub(super) unsafe fn destroy_id(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: upheld by the caller.
    let Some(object) = unsafe { returned::<IdObject, _>(id) }? else {
        return Ok(());
    };
    object.drop_event();
    object.engine.destroy();
    object.acks.wait();
    let object = object.take();
    if object.is_synchronous() {
        // SAFETY: the channel was created for this identifier alone.
        unsafe { destroy_channel(object.channel()) }?;
    }
    Ok(())
}

entry! {
    /// `rdma_destroy_id(3)`: waits until its events are acknowledged.
    ///
    /// # Safety
    /// `id` came from `rdma_create_id` or an event, and is not used again.
    unsafe fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { destroy_id(id) }.map(|()| 0)
    }
}

// ---------------------------------------------------------------------- events that were delivered to the program

/// An event, with the private data that it points to.
#[repr(C)]
pub(super) struct EventObject {
    pub(super) c: rdma_cm_event,
    pub(super) data: Vec<u8>,
}

/// Acknowledges an event.
///
/// # Safety
/// `event` came from `rdma_get_cm_event` and is not used again. Its identifiers are live.
pub(super) unsafe fn acknowledge(event: *mut rdma_cm_event) -> Result<(), Errno> {
    if event.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller.
    let event = unsafe { Box::from_raw(event.cast::<EventObject>()) };
    // A connect request belongs to the listener until it is acknowledged.
    let owner = if event.c.listen_id.is_null() {
        event.c.id
    } else {
        event.c.listen_id
    };
    // SAFETY: an identifier is live until its events are acknowledged.
    if let Ok(owner) = unsafe { live::<IdObject, _>(owner) } {
        owner.acks.acknowledged(1, |_| ());
    }
    Ok(())
}

impl IdObject {
    /// Acknowledges the event that a synchronous identifier holds.
    pub(super) fn drop_event(&self) {
        let event = self
            .c
            .set(|c| std::mem::replace(&mut c.event, std::ptr::null_mut()));
        if !event.is_null() {
            // SAFETY: only this identifier refers to the event. The acknowledgement cannot fail.
            let _done = unsafe { acknowledge(event) };
        }
    }

    /// Returns whether events are queued in the identifier's channel.
    pub(super) fn has_events(&self) -> bool {
        // SAFETY: the channel of an identifier is live.
        !unsafe { known::<ChannelObject, _>(self.channel()) }
            .engine
            .is_empty()
    }
}

entry! {
    /// `rdma_migrate_id(3)`: with a null channel the identifier becomes synchronous. Waits until the events that were
    /// delivered from the old channel are acknowledged.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `channel` is null or points to a live object.
    unsafe fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { migrate(live(id)?, channel) }.map(|()| 0)
    }
}

/// Moves an identifier to another channel.
///
/// # Safety
/// `channel` is null or points to a live object.
pub(super) unsafe fn migrate(id: &IdObject, channel: *mut rdma_event_channel) -> Result<(), Errno> {
    let sync = channel.is_null();
    if sync && id.is_synchronous() {
        return Err(libc::EINVAL);
    }
    let channel = if sync { create_channel()? } else { channel };
    // SAFETY: the channel was created above, or is live (guaranteed by the caller).
    let to = unsafe { live::<ChannelObject, _>(channel) }?;
    // The structure names the new channel before the events are in it: a thread that takes an event from the new channel must not find
    // the old one, which may be destroyed when this call has returned.
    let old = id.c.set(|c| std::mem::replace(&mut c.channel, channel));
    id.engine.migrate(&to.engine);
    let was_sync = id.engine.is_synchronous.swap(sync, Ordering::Relaxed);
    if was_sync {
        id.drop_event();
        // SAFETY: the channel was created for this identifier alone.
        unsafe { destroy_channel(old) }?;
    }
    id.acks.wait_for_past();
    Ok(())
}

// ---------------------------------------------------------------------- properties

entry! {
    /// `rdma_get_src_port(3)`, in network byte order.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_get_src_port(id: *mut rdma_cm_id) -> be16, or(0), {
        // SAFETY: upheld by the caller.
        Ok(c_port(unsafe { live::<IdObject, _>(id) }?.engine.local()))
    }
}

entry! {
    /// `rdma_get_dst_port(3)`, in network byte order.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier.
    unsafe fn rdma_get_dst_port(id: *mut rdma_cm_id) -> be16, or(0), {
        // SAFETY: upheld by the caller.
        let destination = unsafe { live::<IdObject, _>(id) }?.c.get(|c| c.route.addr.dst);
        // SAFETY: the address has the size of the largest family.
        Ok(c_port(unsafe { address_of((&raw const destination).cast()) }))
    }
}

/// Returns whether an identifier has a queue pair. Enhanced connection establishment is negotiated before one is created.
///
/// # Safety
/// `id` is null or points to a live identifier.
unsafe fn has_qp(id: *mut rdma_cm_id) -> Result<bool, Errno> {
    // SAFETY: upheld by the caller. A child of fork(2) may call this, since only the C structure is read.
    Ok(!unsafe { arg(id) }?.qp.is_null())
}

entry! {
    /// `rdma_set_local_ece(3)`: checks the options and does not send them, because MPA has no field for them.
    ///
    /// # Safety
    /// `id` and `ece` are null or valid.
    unsafe fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let (late, ece) = unsafe { (has_qp(id)?, arg(ece)?) };
        if late || ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        Ok(0)
    }
}

entry! {
    /// `rdma_get_remote_ece(3)`: returns all zeros, which means no options.
    ///
    /// # Safety
    /// `id` is null or points to a live object, `ece` is null or valid for writes.
    unsafe fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        if unsafe { has_qp(id) }? {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        unsafe { put(ece, ibv_ece::default()) }?;
        Ok(0)
    }
}
