//! Completion channels, completion queues, shared receive queues.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anywarp_engine::channel::Channel;
use anywarp_engine::verbs::{CompletionQueue, SharedReceive};

use super::device::forget_events;
use super::object::{
    Acks, ChannelObject, ContextObject, CqObject, PdObject, SrqObject, from_c, into_c, is_lost,
    is_lost_context, misuse, of, os_errno, set_cookie,
};
use super::types::*;
use crate::held::Held;
use crate::profile::{Counted, Place, profile};
use crate::{entry, fail};

/// Waits until a descriptor is readable; the calling thread moves bytes meanwhile. False when a signal handler ran that
/// wants calls to be interrupted: the caller fails with EINTR.
///
/// At most one turn: the caller looks again. The second half waits in `poll(2)` of the C library, where the program
/// may cancel the thread: no lock is held and nothing has to be undone here.
pub(crate) fn block_on(fd: c_int) -> bool {
    let Ok(engine) = anywarp_engine::worker::engine() else {
        return wait(fd, 100) >= 0;
    };
    // SAFETY: the descriptor belongs to a channel that the caller keeps alive.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    // No system call in there is one that a thread can be cancelled in.
    let worked = crate::guard(Ok(()), || engine.work_until_readable(borrowed));
    if worked.is_err() {
        return false;
    }
    if wait(fd, 0) == 0 {
        engine.hand_over();
        return wait(fd, -1) >= 0 || !anywarp_engine::sys::thread::handlers_interrupt();
    }
    true
}

/// `poll(2)` for one descriptor.
fn wait(fd: c_int, timeout: c_int) -> c_int {
    let mut fds = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut fds, 1, timeout) }
}

entry! {
    /// `ibv_create_comp_channel(3)`.
    ///
    /// # Safety
    /// `context` is open.
    unsafe fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel, on_panic = std::ptr::null_mut(), {
        if context.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: open (caller's promise).
        if unsafe { is_lost_context(context) } {
            return fail(libc::ENODEV, std::ptr::null_mut());
        }
        match Channel::new() {
            Ok(channel) => {
                let c = ibv_comp_channel { context, fd: channel.raw_fd(), refcnt: 0 };
                into_c(ChannelObject { c, engine: Arc::new(channel), users: AtomicUsize::new(0) })
            }
            Err(e) => fail(os_errno(&e), std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_destroy_comp_channel(3)`: EBUSY while a completion queue uses it.
    ///
    /// # Safety
    /// `channel` came from `ibv_create_comp_channel` and is not used after this returns 0.
    unsafe fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int, on_panic = libc::EIO, {
        if channel.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<ChannelObject, _>(channel) } {
            return 0;
        }
        // SAFETY: as above.
        if unsafe { of::<ChannelObject, _>(channel) }.users.load(Ordering::Acquire) > 0 {
            return libc::EBUSY;
        }
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<ChannelObject, _>(channel) });
        0
    }
}

/// Makes a completion queue for C.
///
/// # Safety
/// `context` is open, `channel` is null or lives.
pub(crate) unsafe fn create_cq(
    context: *mut ibv_context,
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> Result<*mut ibv_cq, i32> {
    if context.is_null() || vector != 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: open (caller's promise).
    if unsafe { is_lost_context(context) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: open (caller's promise).
    let object = unsafe { ContextObject::of(context) };
    // SAFETY: not null, so it lives (caller's promise).
    if !channel.is_null() && unsafe { is_lost::<ChannelObject, _>(channel) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: not null, so it lives (caller's promise).
    let channel_object = (!channel.is_null()).then(|| unsafe { of::<ChannelObject, _>(channel) });
    if cqe > profile().max_cqe {
        return Err(libc::EINVAL);
    }
    let place = Place::take(Counted::Cq)?;
    let engine = CompletionQueue::new(
        &object.engine,
        cqe,
        channel_object.map(|c| Arc::clone(&c.engine)),
    )
    .map_err(|e| misuse("ibv_create_cq", &e))?;
    if let Some(channel) = channel_object {
        channel.users.fetch_add(1, Ordering::AcqRel);
    }
    let c = ibv_cq_ex {
        context,
        channel,
        cq_context,
        cqe: c_int::try_from(cqe).unwrap_or(c_int::MAX),
        ..ibv_cq_ex::default()
    };
    let cq: *mut ibv_cq = into_c(CqObject {
        c,
        engine: Arc::clone(&engine),
        comp_acks: Acks::default(),
        async_acks: Acks::default(),
        users: AtomicUsize::new(0),
        current: std::cell::UnsafeCell::new(None),
        _place: place,
    });
    set_cookie(&engine.cookie, cq);
    Ok(cq)
}

entry! {
    /// `ibv_create_cq(3)`.
    ///
    /// # Safety
    /// `context` is open, `channel` is null or lives.
    unsafe fn ibv_create_cq(
        context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int,
    ) -> *mut ibv_cq, on_panic = std::ptr::null_mut(), {
        // SAFETY: the caller's promise.
        match unsafe { create_cq(context, u32::try_from(cqe).unwrap_or(0), cq_context, channel, vector) } {
            Ok(cq) => cq,
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_destroy_cq(3)`: EBUSY while a queue pair uses it; waits for events that were not acknowledged.
    ///
    /// # Safety
    /// `cq` came from `ibv_create_cq` and is not used after this returns 0.
    unsafe fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int, on_panic = libc::EIO, {
        if cq.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<CqObject, _>(cq) } {
            return 0;
        }
        // SAFETY: as above.
        let object = unsafe { of::<CqObject, _>(cq) };
        if object.users.load(Ordering::Acquire) > 0 {
            return libc::EBUSY;
        }
        let cookie = cq.addr();
        if let Some(channel) = &object.engine.channel {
            channel.purge(|c| *c == cookie);
        }
        // SAFETY: its context is open while it lives.
        unsafe { forget_events(object.c.context, cookie) };
        object.comp_acks.wait();
        object.async_acks.wait();
        if !object.c.channel.is_null() {
            // SAFETY: a channel lives while queues use it.
            unsafe { of::<ChannelObject, _>(object.c.channel) }.users.fetch_sub(1, Ordering::AcqRel);
        }
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<CqObject, _>(cq) });
        0
    }
}

entry! {
    /// `ibv_resize_cq(3)`.
    ///
    /// # Safety
    /// `cq` lives.
    unsafe fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int, on_panic = libc::EIO, {
        let Ok(size) = u32::try_from(cqe) else { return libc::EINVAL };
        if cq.is_null() || size == 0 || size > profile().max_cqe {
            return libc::EINVAL;
        }
        if !profile().has.resize_cq {
            return libc::EOPNOTSUPP;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<CqObject, _>(cq) } {
            return libc::ENODEV;
        }
        // SAFETY: as above.
        let object = unsafe { of::<CqObject, _>(cq) };
        if object.engine.core.resize(size as usize).is_err() {
            return libc::EINVAL;
        }
        // SAFETY: lives; the program does not resize from two threads at once.
        unsafe { (*cq).cqe = cqe };
        0
    }
}

/// One try at the next event of a completion channel: 0, or -1 with errno; `None`: wait.
///
/// # Safety
/// `cq` and `cq_context` are valid places.
unsafe fn try_event(
    events: &Channel<usize>,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> Option<c_int> {
    let popped = events.pop_with(|cookie| {
        let found: *mut ibv_cq = std::ptr::with_exposed_provenance_mut(*cookie);
        // SAFETY: destroying a queue takes its waiting events out of the channel, under the lock that is held here, so
        // it lives; and from here on destroying it waits until this event is acknowledged.
        let queue = unsafe { of::<CqObject, _>(found) };
        queue.comp_acks.delivered();
        (found, queue.c.cq_context)
    });
    let Some((_, (found, its_context))) = popped else {
        return events.is_nonblocking().then(|| fail(libc::EAGAIN, -1));
    };
    // SAFETY: valid (caller's promise).
    unsafe { cq.write(found) };
    // SAFETY: as above.
    unsafe { cq_context.write(its_context) };
    Some(0)
}

/// `ibv_get_cq_event(3)`: waits, unless the program made the channel's descriptor non-blocking.
///
/// Not an `entry!`: the thread may be cancelled while it waits, and that must not meet a `catch_unwind`. It holds the
/// events: a program may destroy the channel while a thread waits in it.
///
/// # Safety
/// `channel` lives when this is called, the others are valid places.
// SAFETY: the symbol is ours: link/symbols.txt names it once.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    if channel.is_null() || cq.is_null() || cq_context.is_null() {
        return fail(libc::EINVAL, -1);
    }
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<ChannelObject, _>(channel) } {
        return fail(libc::ENODEV, -1);
    }
    // SAFETY: as above.
    let events = Held::new(unsafe { &of::<ChannelObject, _>(channel).engine });
    loop {
        // SAFETY: not null, so valid (caller's promise).
        let done = match crate::guard(Some(-1), || unsafe {
            try_event(events.get(), cq, cq_context)
        }) {
            Some(done) => done,
            None if block_on(events.get().raw_fd()) => continue,
            None => fail(libc::EINTR, -1),
        };
        events.release();
        return done;
    }
}

entry! {
    /// `ibv_ack_cq_events(3)`.
    ///
    /// # Safety
    /// `cq` lives.
    unsafe fn ibv_ack_cq_events(cq: *mut ibv_cq, n: c_uint), on_panic = (), {
        // SAFETY: lives (caller's promise).
        if !cq.is_null() && !unsafe { is_lost::<CqObject, _>(cq) } {
            // SAFETY: as above.
            unsafe { of::<CqObject, _>(cq) }.comp_acks.acknowledged(n.into());
        }
    }
}

// ---------------------------------------------------------------------- shared receive queues

/// Makes a shared receive queue for C.
///
/// # Safety
/// `pd` lives.
pub(crate) unsafe fn create_srq(
    pd: *mut ibv_pd,
    srq_context: *mut c_void,
    attr: &mut ibv_srq_attr,
) -> Result<*mut ibv_srq, i32> {
    // SAFETY: lives (caller's promise).
    if unsafe { is_lost::<PdObject, _>(pd) } {
        return Err(libc::ENODEV);
    }
    // SAFETY: as above.
    let domain = unsafe { of::<PdObject, _>(pd) };
    // SAFETY: its context is open while it lives.
    let object = unsafe { ContextObject::of(domain.c.context) };
    profile().admits_srq(attr)?;
    let place = Place::take(Counted::Srq)?;
    let engine = SharedReceive::new(
        &object.engine,
        attr.max_wr,
        attr.max_sge,
        attr.srq_limit,
        &domain.engine,
    )
    .map_err(|e| misuse("ibv_create_srq", &e))?;
    domain.engine.enter();
    let c = ibv_srq {
        context: domain.c.context,
        srq_context,
        pd,
        ..ibv_srq::default()
    };
    let srq: *mut ibv_srq = into_c(SrqObject {
        c,
        xrc: None,
        engine: Arc::clone(&engine),
        pd: Arc::clone(&domain.engine),
        acks: Acks::default(),
        users: AtomicUsize::new(0),
        _place: place,
    });
    set_cookie(&engine.cookie, srq);
    Ok(srq)
}

entry! {
    /// `ibv_create_srq(3)`.
    ///
    /// # Safety
    /// `pd` lives, `init` is valid.
    unsafe fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq, on_panic = std::ptr::null_mut(), {
        if pd.is_null() || init.is_null() {
            return fail(libc::EINVAL, std::ptr::null_mut());
        }
        // SAFETY: valid (caller's promise).
        let init = unsafe { &mut *init };
        // SAFETY: the caller's promise.
        match unsafe { create_srq(pd, init.srq_context, &mut init.attr) } {
            Ok(srq) => srq,
            Err(e) => fail(e, std::ptr::null_mut()),
        }
    }
}

entry! {
    /// `ibv_modify_srq(3)`.
    ///
    /// # Safety
    /// `srq` lives, `attr` is valid.
    unsafe fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int, on_panic = libc::EIO, {
        if srq.is_null() || attr.is_null() || mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<SrqObject, _>(srq) } {
            return libc::ENODEV;
        }
        // SAFETY: they live (caller's promise).
        let (object, attr) = unsafe { (of::<SrqObject, _>(srq), &*attr) };
        if mask & IBV_SRQ_MAX_WR != 0 && (!profile().has.resize_srq || attr.max_wr > profile().max_srq_wr) {
            return libc::EINVAL;
        }
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        match object.engine.modify(max_wr, limit) {
            Ok(()) => 0,
            Err(e) => misuse("ibv_modify_srq", &e),
        }
    }
}

entry! {
    /// `ibv_query_srq(3)`.
    ///
    /// # Safety
    /// `srq` lives, `attr` is a valid place.
    unsafe fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int, on_panic = libc::EIO, {
        if srq.is_null() || attr.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<SrqObject, _>(srq) } {
            return libc::ENODEV;
        }
        // SAFETY: as above.
        let (max_wr, max_sge, srq_limit) = unsafe { of::<SrqObject, _>(srq) }.engine.core.attributes();
        // SAFETY: not null, so valid (caller's promise).
        unsafe { attr.write(ibv_srq_attr { max_wr, max_sge, srq_limit }) };
        0
    }
}

entry! {
    /// `ibv_destroy_srq(3)`: EBUSY while a queue pair uses it.
    ///
    /// # Safety
    /// `srq` came from a create call and is not used after this returns 0.
    unsafe fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int, on_panic = libc::EIO, {
        if srq.is_null() {
            return libc::EINVAL;
        }
        // SAFETY: lives (caller's promise).
        if unsafe { is_lost::<SrqObject, _>(srq) } {
            return 0;
        }
        // SAFETY: as above.
        let object = unsafe { of::<SrqObject, _>(srq) };
        if object.users.load(Ordering::Acquire) > 0 {
            return libc::EBUSY;
        }
        if let Some(part) = &object.xrc {
            part.leave();
        }
        // SAFETY: its context is open while it lives.
        unsafe { forget_events(object.c.context, srq.addr()) };
        object.acks.wait();
        object.pd.leave();
        // SAFETY: the caller's promise.
        drop(unsafe { from_c::<SrqObject, _>(srq) });
        0
    }
}
