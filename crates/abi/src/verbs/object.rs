//! The object behind each C pointer of the verbs interface: first the public structure, then private fields.

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
use crate::profile::CountedObject;
use anywarp_verbs_sys::verbs::*;

/// Counts the users of an object, which cannot be destroyed while there are any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Users(Arc<AtomicUsize>);

impl Users {
    /// Returns whether the object has users.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Adds a user until the returned value is dropped.
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

/// An opened device. The program's pointer is that of the field `context` at the end of `c`.
#[repr(C)]
pub(crate) struct ContextObject {
    pub(crate) c: verbs_context,
    pub(crate) engine: Arc<Context>,
}

impl ContextObject {
    /// Returns the object of a context. `EINVAL` for null; `ENODEV` if the context was opened by a process that forked this one.
    ///
    /// # Safety
    /// `context` is null or came from `ibv_open_device` and was not closed.
    pub(crate) unsafe fn live<'a>(context: *mut ibv_context) -> Result<&'a Self, Errno> {
        if context.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the pointer is not null, so the context is open (guaranteed by the caller).
        let object = unsafe { &*Self::around(context) };
        if !object.engine.engine.is_current() {
            return Err(libc::ENODEV);
        }
        Ok(object)
    }

    /// Returns the address of the object that contains a context.
    pub(crate) fn around(context: *mut ibv_context) -> *mut Self {
        let at = std::mem::offset_of!(Self, c) + std::mem::offset_of!(verbs_context, context);
        context.cast::<u8>().wrapping_sub(at).cast()
    }
}

/// Returns the device of an open context.
///
/// Objects store the pointer of their context in the public structure. `ibv_close_device(3)` forbids closing a context before its
/// objects are destroyed.
fn device_of<'a>(context: *mut ibv_context) -> &'a Arc<Context> {
    // SAFETY: the context of a live object is open (see above).
    unsafe { &(*ContextObject::around(context)).engine }
}

/// A protection domain, or a parent domain of one.
#[repr(C)]
pub(crate) struct PdObject {
    pub(crate) c: CStruct<ibv_pd>,
    pub(crate) engine: Arc<Pd>,
    /// The thread domain of a parent domain. The thread domain cannot be deallocated while the parent domain exists.
    pub(crate) _td: Option<Arc<()>>,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_pd` comes first.
unsafe impl Object<ibv_pd> for PdObject {}

impl PdObject {
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.c.get(|c| c.context)
    }

    /// Returns the device of the object.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.context())
    }
}

/// A thread domain.
#[repr(C)]
pub(crate) struct TdObject {
    pub(crate) c: CStruct<ibv_td>,
    /// Shared with the parent domains that use it.
    pub(crate) users: Arc<()>,
}

// SAFETY: `repr(C)`; an `ibv_td` comes first.
unsafe impl Object<ibv_td> for TdObject {}

/// A piece of device memory.
#[repr(C)]
pub(crate) struct DmObject {
    pub(crate) c: CStruct<ibv_dm>,
    pub(crate) memory: Arc<DeviceMemory>,
    /// The regions in this memory.
    pub(crate) regions: Users,
}

// SAFETY: `repr(C)`; an `ibv_dm` comes first.
unsafe impl Object<ibv_dm> for DmObject {}

/// The owner of a region's memory.
#[derive(Debug)]
pub(crate) enum Backing {
    /// The program.
    Program,
    /// A piece of device memory.
    Device {
        _memory: Arc<DeviceMemory>,
        _use: Use,
    },
    /// The pages of a buffer of `ibv_alloc_buf`.
    #[expect(dead_code, reason = "only held")]
    Buffer(Arc<Pages>),
    /// The owner of another handle's memory. This handle was imported from that one.
    Imported,
}

/// A memory region.
#[repr(C)]
pub(crate) struct MrObject {
    pub(crate) c: CStruct<ibv_mr>,
    pub(crate) engine: MemoryRegion,
    pub(crate) backing: Backing,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_mr` comes first.
unsafe impl Object<ibv_mr> for MrObject {}

/// A memory window.
#[repr(C)]
pub(crate) struct MwObject {
    pub(crate) c: CStruct<ibv_mw>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_mw` comes first.
unsafe impl Object<ibv_mw> for MwObject {}

impl MwObject {
    /// Returns the device of the object.
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
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_ah` comes first.
unsafe impl Object<ibv_ah> for AhObject {}

/// A completion channel.
#[repr(C)]
pub(crate) struct ChannelObject {
    pub(crate) c: CStruct<ibv_comp_channel>,
    pub(crate) engine: Arc<Channel<usize>>,
    /// The completion queues that use the channel.
    pub(crate) users: Users,
}

// SAFETY: `repr(C)`; an `ibv_comp_channel` comes first.
unsafe impl Object<ibv_comp_channel> for ChannelObject {}

/// Counts the delivered and the acknowledged events of an object. The object is destroyed only when both numbers are equal.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    counts: Mutex<AckCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AckCounts {
    delivered: u64,
    acknowledged: u64,
    /// The number of threads that wait. If it is 0, the condition variable is not notified, which saves a system call.
    waiting: u32,
}

impl Acks {
    fn counts(&self) -> MutexGuard<'_, AckCounts> {
        self.counts.lock()
    }

    /// Called when an event is delivered to the program.
    pub(crate) fn delivered(&self) {
        self.counts().delivered += 1;
    }

    /// Called when the program acknowledges `n` events. `show` writes the total to the public structure.
    pub(crate) fn acknowledged(&self, n: u64, show: impl FnOnce(u32)) {
        let mut counts = self.counts();
        counts.acknowledged += n;
        show(counts.acknowledged as u32);
        if counts.waiting > 0 {
            // Notified with the lock held: the waiting thread frees the object, including the lock, once it has acquired the lock.
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

/// The current completion of an `ibv_cq_ex`.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) completion: Completion,
    /// The time of the poll in nanoseconds of the real-time clock.
    pub(crate) at: u64,
}

/// A completion queue.
#[repr(C)]
pub(crate) struct CqObject {
    pub(crate) c: CStruct<ibv_cq_ex>,
    pub(crate) engine: Arc<CompletionQueue>,
    pub(crate) comp_acks: Acks,
    pub(crate) async_acks: Acks,
    /// The queue pairs, and the shared receive queues of XRC domains, that use the queue.
    pub(crate) users: Users,
    pub(crate) _channel: Option<Use>,
    /// The parent domain that the queue was created with. The queue is one of its users.
    pub(crate) domain: Option<Arc<Pd>>,
    /// The current completion of the extended interface. Only the thread between `start_poll` and `end_poll` accesses it.
    pub(crate) current: UnsafeCell<Option<Shown>>,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_cq_ex` comes first, which begins with the fields of an `ibv_cq`.
unsafe impl Object<ibv_cq> for CqObject {}
// SAFETY: as above.
unsafe impl Object<ibv_cq_ex> for CqObject {}

impl CqObject {
    /// Returns the device of the object.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.c.get(|c| c.context))
    }
}

/// The additional fields of a shared receive queue of an XRC domain.
#[derive(Debug)]
pub(crate) struct XrcPart {
    pub(crate) queue: Arc<XrcSrq>,
    pub(crate) domain: Arc<XrcDomain>,
    /// The uses of the domain and of the completion queue.
    pub(crate) _uses: [Use; 2],
}

impl XrcPart {
    /// Removes the shared receive queue from its domain. Its receives are not used from now on.
    pub(crate) fn leave(&self) {
        self.domain.leave(self.queue.number());
        self.queue.close();
    }
}

/// One handle of an XRC domain.
#[repr(C)]
pub(crate) struct XrcdObject {
    pub(crate) c: CStruct<ibv_xrcd>,
    pub(crate) domain: Arc<XrcDomain>,
    /// The queue pairs and shared receive queues that were created with this handle.
    pub(crate) users: Users,
}

// SAFETY: `repr(C)`; an `ibv_xrcd` comes first.
unsafe impl Object<ibv_xrcd> for XrcdObject {}

/// A shared receive queue.
#[repr(C)]
pub(crate) struct SrqObject {
    pub(crate) c: CStruct<ibv_srq>,
    /// Set for a queue of an XRC domain.
    pub(crate) xrc: Option<XrcPart>,
    pub(crate) engine: Arc<SharedReceive>,
    pub(crate) pd: Arc<Pd>,
    pub(crate) acks: Acks,
    /// The queue pairs that use the queue.
    pub(crate) users: Users,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_srq` comes first.
unsafe impl Object<ibv_srq> for SrqObject {}

impl SrqObject {
    /// Returns the device of the object.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.c.get(|c| c.context))
    }
}

/// Makes the calls from `ibv_wr_start` to `ibv_wr_complete` or `ibv_wr_abort` a critical section (ibv_wr_post(3)). It holds no lock
/// that another verb takes, so the program may call other verbs in it.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The thread in the section, and the number of threads that wait for it.
    owner: Mutex<(Option<libc::pthread_t>, usize)>,
    /// Signalled when the thread in the section leaves it.
    left: Condvar,
}

impl Batch {
    /// Waits until no other thread is in the section, and enters it. A thread that is in it already begins anew.
    pub(crate) fn begin(&self) {
        // SAFETY: no preconditions.
        let me = unsafe { libc::pthread_self() };
        let mut owner = self.owner.lock();
        while owner.0.is_some_and(|owner| owner != me) {
            owner.1 += 1;
            owner = self.left.wait(owner);
            owner.1 -= 1;
        }
        owner.0 = Some(me);
    }

    /// Leaves the section.
    pub(crate) fn end(&self) {
        let mut owner = self.owner.lock();
        owner.0 = None;
        // A notification is a system call, also if no thread waits.
        if owner.1 > 0 {
            self.left.notify_one();
        }
    }
}

/// The requests between `ibv_wr_start` and `ibv_wr_complete`.
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
    pub(crate) batch: Batch,
    /// The uses of the completion queues, the shared receive queue and the XRC domain.
    pub(crate) _uses: [Option<Use>; 4],
    /// The uses of completion counters.
    pub(crate) counters: Mutex<Vec<Use>>,
    /// Whether the queue pair has the extended send interface, for which `ibv_qp_to_qp_ex` is called.
    pub(crate) extended: bool,
    pub(crate) _counted: CountedObject,
}

// SAFETY: `repr(C)`; an `ibv_qp_ex` comes first, which begins with an `ibv_qp`.
unsafe impl Object<ibv_qp> for QpObject {}
// SAFETY: as above.
unsafe impl Object<ibv_qp_ex> for QpObject {}

// SAFETY: the pointers in `init` are copied and never dereferenced; everything else may be used from every thread.
unsafe impl Sync for QpObject {}
// SAFETY: as above.
unsafe impl Send for QpObject {}

impl QpObject {
    /// Returns the device of the object.
    pub(crate) fn device(&self) -> &Arc<Context> {
        device_of(self.base().context)
    }

    /// Returns a copy of the public structure.
    pub(crate) fn base(&self) -> ibv_qp {
        self.c.get(|c| c.qp_base)
    }

    /// Writes the state to the public structure.
    pub(crate) fn show_state(&self, state: ibv_qp_state) {
        self.c.set(|c| c.qp_base.state = state);
    }
}
