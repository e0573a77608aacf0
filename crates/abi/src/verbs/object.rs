//! The object behind each C pointer of the verbs: what the program sees, then what belongs to this library.

use std::cell::UnsafeCell;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};

use anywarp_core::error::Misuse;
use anywarp_core::lock::{Condvar, Mutex};
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::WorkRequest;
use anywarp_core::verbs::xrc::{XrcDomain, XrcSrq};
use anywarp_engine::channel::Channel;
use anywarp_engine::context::Context;
use anywarp_engine::objects::{
    CompletionQueue, DeviceMemory, MemoryRegion, QueuePair, SharedReceive,
};
use anywarp_engine::sys::pages::Pages;

use super::handle::{CStruct, Object};
use crate::ffi::Errno;
use crate::profile::Place;
use anywarp_verbs_sys::verbs::*;

/// Counts the objects that use another one, which must not be destroyed before them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Users(Arc<AtomicUsize>);

impl Users {
    /// Whether anything uses the object.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Counts one more user, until the value is dropped.
    pub(crate) fn enter(&self) -> Use {
        self.0.fetch_add(1, Ordering::AcqRel);
        Use(Arc::clone(&self.0))
    }
}

/// One user of an object.
#[derive(Debug)]
pub(crate) struct Use(Arc<AtomicUsize>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An opened device. The program's pointer is the `context` at the end of `c`.
#[repr(C)]
pub(crate) struct ContextObject {
    pub(crate) c: verbs_context,
    pub(crate) engine: Arc<Context>,
}

impl ContextObject {
    /// The object around a context: `EINVAL` for null, `ENODEV` if a process opened it that this one was forked from.
    ///
    /// # Safety
    /// `context` is null or came from `ibv_open_device` and was not closed.
    pub(crate) unsafe fn live<'a>(context: *mut ibv_context) -> Result<&'a Self, Errno> {
        if context.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: not null, so open (guaranteed by the caller).
        let object = unsafe { &*Self::around(context) };
        if !object.engine.engine.is_current() {
            return Err(libc::ENODEV);
        }
        Ok(object)
    }

    /// The address of the object around a context.
    pub(crate) fn around(context: *mut ibv_context) -> *mut Self {
        let at = std::mem::offset_of!(Self, c) + std::mem::offset_of!(verbs_context, context);
        context.cast::<u8>().wrapping_sub(at).cast()
    }
}

/// The device that the objects of an open context belong to.
///
/// Objects keep the pointer of their context, as the header has it. `ibv_close_device(3)` forbids to close a context before
/// its objects are destroyed.
fn device_of<'a>(context: *mut ibv_context) -> &'a Arc<Context> {
    // SAFETY: the context of a live object is open (see above).
    unsafe { &(*ContextObject::around(context)).engine }
}

/// A protection domain, or a parent domain around one.
#[repr(C)]
pub(crate) struct PdObject {
    pub(crate) c: CStruct<ibv_pd>,
    pub(crate) engine: Arc<Pd>,
    /// Keeps a parent domain's thread domain.
    pub(crate) _td: Option<Arc<()>>,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_pd` comes first.
unsafe impl Object<ibv_pd> for PdObject {}

impl PdObject {
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.c.get(|c| c.context)
    }

    /// The device that it belongs to.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.context())
    }
}

/// A thread domain.
#[repr(C)]
pub(crate) struct TdObject {
    pub(crate) c: CStruct<ibv_td>,
    /// Shared by the parent domains that have it.
    pub(crate) users: Arc<()>,
}

// SAFETY: `repr(C)`; an `ibv_td` comes first.
unsafe impl Object<ibv_td> for TdObject {}

/// A piece of device memory.
#[repr(C)]
pub(crate) struct DmObject {
    pub(crate) c: CStruct<ibv_dm>,
    pub(crate) memory: Arc<DeviceMemory>,
    /// The regions that lie in it.
    pub(crate) regions: Users,
    pub(crate) imported: bool,
}

// SAFETY: `repr(C)`; an `ibv_dm` comes first.
unsafe impl Object<ibv_dm> for DmObject {}

/// What keeps the memory of a region.
#[derive(Debug)]
pub(crate) enum Backing {
    /// The program.
    Program,
    /// The device memory that it lies in.
    Device {
        _memory: Arc<DeviceMemory>,
        _use: Use,
    },
    /// The pages of a buffer of `ibv_alloc_buf`.
    #[expect(dead_code, reason = "only held")]
    Buffer(Arc<Pages>),
}

/// A memory region.
#[repr(C)]
pub(crate) struct MrObject {
    pub(crate) c: CStruct<ibv_mr>,
    pub(crate) engine: MemoryRegion,
    pub(crate) _backing: Backing,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_mr` comes first.
unsafe impl Object<ibv_mr> for MrObject {}

/// A memory window.
#[repr(C)]
pub(crate) struct MwObject {
    pub(crate) c: CStruct<ibv_mw>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_mw` comes first.
unsafe impl Object<ibv_mw> for MwObject {}

impl MwObject {
    /// The device that it belongs to.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.c.get(|c| c.context))
    }
}

/// An address handle.
#[repr(C)]
pub(crate) struct AhObject {
    pub(crate) c: CStruct<ibv_ah>,
    pub(crate) ip: IpAddr,
    pub(crate) source: Option<IpAddr>,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) pd: Arc<Pd>,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_ah` comes first.
unsafe impl Object<ibv_ah> for AhObject {}

/// A completion channel.
#[repr(C)]
pub(crate) struct ChannelObject {
    pub(crate) c: CStruct<ibv_comp_channel>,
    pub(crate) engine: Arc<Channel<usize>>,
    /// Completion queues.
    pub(crate) users: Users,
}

// SAFETY: `repr(C)`; an `ibv_comp_channel` comes first.
unsafe impl Object<ibv_comp_channel> for ChannelObject {}

/// Counts the events of an object that the program took and those that it acknowledged. The object is destroyed only when
/// both are equal.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    counts: Mutex<AckCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AckCounts {
    delivered: u64,
    acknowledged: u64,
    /// Threads in `wait`. Waking is a system call even if there are none.
    waiting: u32,
}

impl Acks {
    fn counts(&self) -> MutexGuard<'_, AckCounts> {
        self.counts.lock()
    }

    /// The program takes an event.
    pub(crate) fn delivered(&self) {
        self.counts().delivered += 1;
    }

    /// The program acknowledges `n` events. `show` writes the sum where the program sees it.
    pub(crate) fn acknowledged(&self, n: u64, show: impl FnOnce(u32)) {
        let mut counts = self.counts();
        counts.acknowledged += n;
        show(counts.acknowledged as u32);
        if counts.waiting > 0 {
            // While the lock is held: the waiting thread frees the object, and the lock, as soon as it gets it.
            self.changed.notify_all();
        }
        drop(counts);
    }

    /// Waits until every delivered event is acknowledged.
    pub(crate) fn wait(&self) {
        self.wait_while(|counts| counts.delivered > counts.acknowledged);
    }

    /// Waits until the events delivered before this call are acknowledged.
    pub(crate) fn wait_for_past(&self) {
        let delivered = self.counts().delivered;
        self.wait_while(|counts| delivered > counts.acknowledged);
    }

    fn wait_while(&self, unfinished: impl Fn(&AckCounts) -> bool) {
        let mut counts = self.counts();
        counts.waiting += 1;
        while unfinished(&counts) {
            counts = self.changed.wait(counts);
        }
        counts.waiting -= 1;
    }
}

/// The completion that the reading functions of an `ibv_cq_ex` show.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) completion: Completion,
    /// Nanoseconds of the real-time clock when it was polled.
    pub(crate) at: u64,
}

/// A completion queue.
#[repr(C)]
pub(crate) struct CqObject {
    pub(crate) c: CStruct<ibv_cq_ex>,
    pub(crate) engine: Arc<CompletionQueue>,
    pub(crate) comp_acks: Acks,
    pub(crate) async_acks: Acks,
    /// Queue pairs, and shared receive queues of XRC domains.
    pub(crate) users: Users,
    pub(crate) _channel: Option<Use>,
    /// The completion that the extended interface shows. Only the thread between `start_poll` and `end_poll` uses it.
    pub(crate) current: UnsafeCell<Option<Shown>>,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_cq_ex` comes first, which begins with the fields of an `ibv_cq`.
unsafe impl Object<ibv_cq> for CqObject {}
// SAFETY: as above.
unsafe impl Object<ibv_cq_ex> for CqObject {}

impl CqObject {
    /// The device that it belongs to.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.c.get(|c| c.context))
    }
}

/// What a shared receive queue of an XRC domain has besides.
#[derive(Debug)]
pub(crate) struct XrcPart {
    pub(crate) queue: Arc<XrcSrq>,
    pub(crate) domain: Arc<XrcDomain>,
    /// Of the domain and of the completion queue.
    pub(crate) _uses: [Use; 2],
}

impl XrcPart {
    /// Takes the shared receive queue out of its domain: no receive of it is used from now on.
    pub(crate) fn leave(&self) {
        self.domain.leave(self.queue.number());
        self.queue.close();
    }
}

/// An XRC domain as one caller has it.
#[repr(C)]
pub(crate) struct XrcdObject {
    pub(crate) c: CStruct<ibv_xrcd>,
    pub(crate) domain: Arc<XrcDomain>,
    /// Queue pairs and shared receive queues that were made with it.
    pub(crate) users: Users,
}

// SAFETY: `repr(C)`; an `ibv_xrcd` comes first.
unsafe impl Object<ibv_xrcd> for XrcdObject {}

/// A shared receive queue.
#[repr(C)]
pub(crate) struct SrqObject {
    pub(crate) c: CStruct<ibv_srq>,
    /// Its place in an XRC domain, if it has one.
    pub(crate) xrc: Option<XrcPart>,
    pub(crate) engine: Arc<SharedReceive>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) acks: Acks,
    /// Queue pairs.
    pub(crate) users: Users,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_srq` comes first.
unsafe impl Object<ibv_srq> for SrqObject {}

impl SrqObject {
    /// The device that it belongs to.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.c.get(|c| c.context))
    }
}

/// Requests between `ibv_wr_start` and `ibv_wr_complete`. The bracket holds no lock that other verbs take, so they may be
/// called in it.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    pub(crate) requests: Vec<WorkRequest>,
    pub(crate) error: Option<Misuse>,
}

/// A queue pair.
#[repr(C)]
pub(crate) struct QpObject {
    pub(crate) c: CStruct<ibv_qp_ex>,
    pub(crate) engine: QueuePair,
    pub(crate) pd: Arc<Pd>,
    pub(crate) acks: Acks,
    pub(crate) init: Mutex<ibv_qp_init_attr>,
    pub(crate) ah: Mutex<ibv_ah_attr>,
    pub(crate) builder: Mutex<Builder>,
    /// Of its two completion queues, its shared receive queue and its XRC domain, as far as it has them.
    pub(crate) _uses: [Option<Use>; 4],
    /// Of its completion counters.
    pub(crate) counters: Mutex<Vec<Use>>,
    /// Has the functions of the extended interface: `ibv_qp_to_qp_ex` may be used.
    pub(crate) extended: bool,
    pub(crate) _place: Place,
}

// SAFETY: `repr(C)`; an `ibv_qp_ex` comes first, which begins with an `ibv_qp`.
unsafe impl Object<ibv_qp> for QpObject {}
// SAFETY: as above.
unsafe impl Object<ibv_qp_ex> for QpObject {}

// SAFETY: `init` holds pointers that are copied and never followed; everything else may be used from every thread.
unsafe impl Sync for QpObject {}
// SAFETY: as above.
unsafe impl Send for QpObject {}

impl QpObject {
    /// The device that it belongs to.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.base().context)
    }

    /// A copy of the structure that the program sees.
    pub(crate) fn base(&self) -> ibv_qp {
        self.c.get(|c| c.qp_base)
    }

    /// Writes the state where the program sees it.
    pub(crate) fn show_state(&self, state: ibv_qp_state) {
        self.c.set(|c| c.qp_base.state = state);
    }
}
