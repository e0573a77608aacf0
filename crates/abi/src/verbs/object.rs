//! C objects and the engine's objects behind them.
//!
//! Each object that a program holds begins with the struct of the header, so that its address serves as the C pointer;
//! what is ours follows. It is made by [`into_c`] and ends in [`from_c`].

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anywarp_core::error::Misuse;
use anywarp_core::verbs::pd::Pd;
use anywarp_engine::channel::Channel;
use anywarp_engine::device::Context;
use anywarp_engine::verbs::{
    CompletionQueue, DeviceMemory, MemoryRegion, QueuePair, SharedReceive,
};

use super::types::*;
use crate::profile::Place;

/// An opened device: what the program sees is the `context` at the end of `c`.
#[repr(C)]
pub(crate) struct ContextObject {
    pub(crate) c: verbs_context,
    pub(crate) engine: Arc<Context>,
}

impl ContextObject {
    /// The object around a context that `ibv_open_device` gave.
    ///
    /// # Safety
    /// `context` came from there and was not closed.
    pub(crate) unsafe fn of<'a>(context: *mut ibv_context) -> &'a Self {
        let at = std::mem::offset_of!(Self, c) + std::mem::offset_of!(verbs_context, context);
        // SAFETY: the context lies `at` bytes into its object (caller's promise), which lives.
        unsafe { &*context.cast::<u8>().sub(at).cast::<Self>() }
    }
}

/// A protection domain, or a parent domain around one.
#[repr(C)]
pub(crate) struct PdObject {
    pub(crate) c: ibv_pd,
    pub(crate) engine: Arc<Pd>,
    /// Keeps a parent domain's thread domain.
    pub(crate) _td: Option<Arc<()>>,
    pub(crate) _place: Place,
}

/// A thread domain.
#[repr(C)]
pub(crate) struct TdObject {
    pub(crate) c: ibv_td,
    /// Shared by the parent domains that have it.
    pub(crate) users: Arc<()>,
}

/// A piece of device memory.
#[repr(C)]
pub(crate) struct DmObject {
    pub(crate) c: ibv_dm,
    pub(crate) memory: Arc<DeviceMemory>,
    /// Regions that lie in it.
    pub(crate) regions: Arc<AtomicUsize>,
    pub(crate) imported: bool,
}

/// A memory region.
#[repr(C)]
pub(crate) struct MrObject {
    pub(crate) c: ibv_mr,
    pub(crate) engine: MemoryRegion,
    /// The device memory that it lies in, and how many regions do.
    pub(crate) device_memory: Option<(Arc<DeviceMemory>, Arc<AtomicUsize>)>,
    pub(crate) _place: Place,
}

/// A memory window.
#[repr(C)]
pub(crate) struct MwObject {
    pub(crate) c: ibv_mw,
    pub(crate) pd: Arc<Pd>,
    pub(crate) _place: Place,
}

/// An address handle.
#[repr(C)]
pub(crate) struct AhObject {
    pub(crate) c: ibv_ah,
    pub(crate) ip: std::net::IpAddr,
    pub(crate) source: Option<std::net::IpAddr>,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) pd: Arc<Pd>,
    pub(crate) _place: Place,
}

/// A completion channel.
#[repr(C)]
pub(crate) struct ChannelObject {
    pub(crate) c: ibv_comp_channel,
    pub(crate) engine: Arc<Channel<usize>>,
    pub(crate) users: AtomicUsize,
}

/// Events that were handed to the program, and those that it acknowledged: an object may only go when they are equal.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    counts: Mutex<AckCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AckCounts {
    delivered: u64,
    acknowledged: u64,
    /// Threads that wait: to wake nobody is a system call too.
    waiting: u32,
}

impl Acks {
    fn counts(&self) -> MutexGuard<'_, AckCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn delivered(&self) {
        self.counts().delivered += 1;
    }

    pub(crate) fn acknowledged(&self, n: u64) {
        let mut counts = self.counts();
        counts.acknowledged += n;
        if counts.waiting > 0 {
            // Before the lock is given back: whoever waits frees the object as soon as it has the lock.
            self.changed.notify_all();
        }
        drop(counts);
    }

    pub(crate) fn wait(&self) {
        self.wait_while(|counts| counts.delivered > counts.acknowledged);
    }

    /// Waits for those that were delivered before; more may be meanwhile.
    pub(crate) fn wait_for_past(&self) {
        let delivered = self.counts().delivered;
        self.wait_while(|counts| delivered > counts.acknowledged);
    }

    fn wait_while(&self, unfinished: impl Fn(&AckCounts) -> bool) {
        let mut counts = self.counts();
        counts.waiting += 1;
        while unfinished(&counts) {
            counts = self
                .changed
                .wait(counts)
                .unwrap_or_else(PoisonError::into_inner);
        }
        counts.waiting -= 1;
    }
}

/// A completion queue.
#[repr(C)]
pub(crate) struct CqObject {
    pub(crate) c: ibv_cq_ex,
    pub(crate) engine: Arc<CompletionQueue>,
    pub(crate) comp_acks: Acks,
    pub(crate) async_acks: Acks,
    pub(crate) users: AtomicUsize,
    /// The completion that the extended interface shows.
    pub(crate) current: std::cell::UnsafeCell<Option<super::extended::Shown>>,
    pub(crate) _place: Place,
}

/// A shared receive queue.
#[repr(C)]
pub(crate) struct SrqObject {
    pub(crate) c: ibv_srq,
    /// Its place in an XRC domain.
    pub(crate) xrc: Option<super::xrc::XrcPart>,
    pub(crate) engine: Arc<SharedReceive>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) acks: Acks,
    pub(crate) users: AtomicUsize,
    pub(crate) _place: Place,
}

/// A queue pair.
#[repr(C)]
pub(crate) struct QpObject {
    pub(crate) c: ibv_qp_ex,
    pub(crate) engine: QueuePair,
    pub(crate) pd: Arc<Pd>,
    pub(crate) acks: Acks,
    pub(crate) init: Mutex<ibv_qp_init_attr>,
    pub(crate) ah: Mutex<ibv_ah_attr>,
    /// Requests of a `wr_start` … `wr_complete` bracket.
    pub(crate) builder: Mutex<super::extended::Builder>,
    /// Users of the XRC domain, of which a receiving queue pair is one.
    pub(crate) xrc_users: Option<Arc<AtomicUsize>>,
    /// Wrote extended operations: `ibv_qp_to_qp_ex` may be used.
    pub(crate) extended: bool,
    pub(crate) _place: Place,
}

// SAFETY: the C structs hold pointers that the program shares between threads as it sees fit; what is ours behind them
// is behind locks. `init` holds such pointers too and is only copied.
unsafe impl Sync for QpObject {}
// SAFETY: as above.
unsafe impl Send for QpObject {}

/// An object as it lies in memory: behind it stands which process made it.
#[repr(C)]
struct Owned<T> {
    object: T,
    generation: u32,
}

/// Gives an object to the program.
pub(crate) fn into_c<T, C>(object: T) -> *mut C {
    let generation = anywarp_engine::process::generation();
    Box::into_raw(Box::new(Owned { object, generation })).cast()
}

/// Whether an object was made by a process that this one was forked from: it is gone here, and nothing of it may be
/// touched. Calls fail with ENODEV; a destroy call has nothing to do.
///
/// # Safety
/// As for [`of`].
pub(crate) unsafe fn is_lost<T, C>(pointer: *mut C) -> bool {
    // SAFETY: the caller's promise; only the number is read.
    let made_in = unsafe { (*pointer.cast::<Owned<T>>()).generation };
    made_in != anywarp_engine::process::generation()
}

/// [`is_lost`] for an open device.
///
/// # Safety
/// As for [`ContextObject::of`].
pub(crate) unsafe fn is_lost_context(context: *mut ibv_context) -> bool {
    // SAFETY: the caller's promise.
    !unsafe { ContextObject::of(context) }
        .engine
        .engine
        .is_current()
}

/// Looks at the object behind a C pointer.
///
/// # Safety
/// `pointer` came from [`into_c`] for this `T` and was not given back.
pub(crate) unsafe fn of<'a, T, C>(pointer: *mut C) -> &'a T {
    // SAFETY: the caller's promise.
    unsafe { &*pointer.cast::<T>() }
}

/// Takes an object back from the program.
///
/// # Safety
/// As for [`of`], and the program does not use it any more.
pub(crate) unsafe fn from_c<T, C>(pointer: *mut C) -> T {
    // SAFETY: the caller's promise.
    unsafe { Box::from_raw(pointer.cast::<Owned<T>>()) }.object
}

/// The errno of a misuse; logged, so that a person sees which rule it was.
pub(crate) fn misuse(call: &str, e: &Misuse) -> i32 {
    if anywarp_engine::log::wants(anywarp_engine::log::Level::Warn) {
        anywarp_engine::log::write(
            anywarp_engine::log::Level::Warn,
            format_args!("{call}: {e}"),
        );
    }
    e.errno()
}

/// The errno of an I/O error.
pub(crate) fn os_errno(e: &std::io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

/// Notes that a C object has this address.
pub(crate) fn set_cookie<C>(cookie: &AtomicUsize, pointer: *mut C) {
    cookie.store(pointer.expose_provenance(), Ordering::Release);
}
