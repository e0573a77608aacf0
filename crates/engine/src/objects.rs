//! Objects that a context creates: memory regions, device memory, completion queues and counters, shared receive queues,
//! queue pairs.

use std::fs::File;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::counter::{Counter, Entry, Ops, Unit};
use anywarp_core::verbs::cq::{Cq, Notify};
use anywarp_core::verbs::mr::{Kind, Present, Region, Registration};
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::srq::Srq;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{RecvRequest, WorkRequest};

use crate::channel::Channel;
use crate::context::Context;
use crate::dgram::DgramQp;
use crate::engine::Engine;
use crate::events::{AsyncItem, event};
use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log;
use crate::mem::look_for_hooks;
use crate::pin::{self, Pin};
use crate::process::{PerProcess, generation};
use crate::random::random_u32;
use crate::sys::pages;
use crate::sys::pages::Pages;

/// A completion channel. Each event is the address of the C object of a completion queue.
pub type CompChannel = Channel<usize>;

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    engine: &'static Engine,
    /// The queue of the core.
    pub core: Arc<Cq>,
    /// Address of the C object.
    pub c_object: Arc<AtomicUsize>,
    /// The channel for its events.
    pub channel: Option<Arc<CompChannel>>,
}

/// Passes the events of a completion queue to its channel and its context.
struct CqNotify {
    context: Arc<Context>,
    channel: Option<Arc<CompChannel>>,
    c_object: Arc<AtomicUsize>,
}

impl Notify for CqNotify {
    fn completion(&self) {
        if let Some(channel) = &self.channel {
            channel.push(self.c_object.load(Ordering::Relaxed));
        }
    }

    fn overflow(&self) {
        self.context.events.push(AsyncItem {
            event: event::CQ_ERR,
            c_object: self.c_object.load(Ordering::Relaxed),
        });
    }
}

impl Drop for CqNotify {
    fn drop(&mut self) {
        self.context.remove_queue();
    }
}

impl CompletionQueue {
    /// A queue for `capacity` entries (`ibv_create_cq(3)`: EINVAL if the capacity is 0 or too large).
    pub fn new(
        context: &Arc<Context>,
        capacity: u32,
        channel: Option<Arc<CompChannel>>,
    ) -> Result<Arc<Self>, Misuse> {
        context.engine.has_room()?;
        if capacity == 0 || capacity > bounds::MAX_CQE {
            return Err(Misuse::InvalidArgument("cqe"));
        }
        context.add_queue();
        let c_object = Arc::new(AtomicUsize::new(0));
        let notify = CqNotify {
            context: Arc::clone(context),
            channel: channel.clone(),
            c_object: Arc::clone(&c_object),
        };
        Ok(Arc::new(Self {
            engine: context.engine,
            core: Arc::new(Cq::new(capacity as usize, Some(Arc::new(notify)))),
            c_object,
            channel,
        }))
    }

    /// Passes up to `max` completions to `each`, and returns their number. If the queue is empty, the sockets that are ready
    /// are handled first.
    #[inline]
    pub fn poll(&self, max: usize, mut each: impl FnMut(usize, &Completion)) -> usize {
        let n = self.core.poll(max, &mut each);
        if n > 0 {
            self.engine.on_successful_poll();
        }
        if n > 0 || max == 0 {
            return n;
        }
        self.engine.on_idle_poll();
        self.core.poll(max, each)
    }

    /// Passes up to `max` completions that are in the queue to `each`, and returns their number. The sockets are not handled.
    pub fn poll_waiting(&self, max: usize, each: impl FnMut(usize, &Completion)) -> usize {
        self.core.poll(max, each)
    }

    /// Requests an event for the next completion (`ibv_req_notify_cq(3)`).
    pub fn arm(&self, solicited_only: bool) {
        self.core.arm(solicited_only);
        self.engine.on_arm();
        // A thread that waits for the event in a call of this library handles the sockets. A thread that waits in its own
        // `poll` or `epoll_wait` does not, and the worker leaves the sockets to polling threads until their lease ends
        // (`reactor/lease.rs`). So the lease ends now.
        if self
            .channel
            .as_ref()
            .is_some_and(|c| c.is_polled_by_program())
        {
            self.engine.end_lease();
        }
    }
}

/// A completion counter (`ibv_create_comp_cntr(3)`).
#[derive(Debug)]
pub struct CompletionCounter {
    engine: &'static Engine,
    /// The counter of the core.
    pub core: Arc<Counter>,
    /// The sum of both values (done and failed) at the last [`Self::read`].
    seen: AtomicU64,
}

impl CompletionCounter {
    /// A counter whose values are zero.
    pub fn new(context: &Context, unit: Unit) -> Self {
        Self {
            engine: context.engine,
            core: Arc::new(Counter::new(unit)),
            seen: AtomicU64::new(0),
        }
    }

    fn sum(&self) -> u64 {
        let failed = self.core.read(Entry::Failed);
        self.core.read(Entry::Done).wrapping_add(failed)
    }

    /// Reads a value. If nothing was counted since the last call, the sockets that are ready are handled first: a
    /// program may poll the counter instead of a completion queue.
    pub fn read(&self, entry: Entry) -> u64 {
        if self.sum() == self.seen.load(Ordering::Relaxed) {
            self.engine.on_idle_poll();
        } else {
            self.engine.on_successful_poll();
        }
        self.seen.store(self.sum(), Ordering::Relaxed);
        self.core.read(entry)
    }
}

/// A memory region.
#[derive(Debug)]
pub struct MemoryRegion {
    engine: &'static Engine,
    region: Mutex<Arc<Region>>,
    pd: Mutex<Arc<Pd>>,
    pin: Mutex<Option<Pin>>,
}

/// Changes of a memory region (`ibv_rereg_mr(3)`).
#[derive(Debug, Clone, Default)]
pub struct Reregistration {
    /// New address and length.
    pub range: Option<(u64, u64)>,
    /// New protection domain.
    pub pd: Option<Arc<Pd>>,
    /// New rights.
    pub access: Option<u32>,
}

fn check_range(start: u64, len: u64) -> Result<(), Misuse> {
    if start.checked_add(len).is_none() {
        return Err(Misuse::InvalidArgument("region exceeds the address space"));
    }
    Ok(())
}

/// Bytes that the process may lock.
fn lock_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock)
        .current
        .unwrap_or(u64::MAX)
}

/// Locks the pages of a region, or faults them in, as the environment variables configure. Does nothing for a region with on-demand
/// paging.
fn pinned(start: u64, len: u64, access: Access) -> Result<Option<Pin>, Option<Misuse>> {
    if access.has(Access::ON_DEMAND) {
        return Ok(None);
    }
    Pin::take(start, len, access.has(Access::LOCAL_WRITE)).map_err(|e| match e {
        pin::Refused::NotMapped => None,
        pin::Refused::Limit => {
            log!(
                Warn,
                "ANYWARP_PIN: {len} bytes more cannot be locked: raise the limit (ulimit -l, now {} KiB)",
                lock_limit() / 1024
            );
            Some(Misuse::NoMemory)
        }
    })
}

/// Whether the device can access `[start, start + len)` with these rights. Without this check, a message for memory that cannot be written
/// would end the process.
fn is_accessible(start: u64, len: u64, access: Access) -> bool {
    static MAPPINGS: PerProcess<OnceLock<EngineFd>> = PerProcess::new(OnceLock::new);
    let is_written = access.has(Access::LOCAL_WRITE);
    let mappings = MAPPINGS.get();
    if is_written
        && mappings.get().is_none()
        && let Ok(file) = File::open("/proc/self/maps")
    {
        let _another_thread_was_faster = mappings.set(EngineFd::new(file.into()));
    }
    let mappings = mappings.get().filter(|_| is_written);
    let is_writable = mappings.and_then(|file| pages::is_writable(file.get(), start, len));
    is_writable.unwrap_or_else(|| {
        // The kernel cannot tell, so only the first and the last page are written to.
        let ends = [start, (start + len).saturating_sub(1)];
        let is_there = |at: u64| !is_written || len == 0 || pages::is_there(at, 1, true);
        pages::is_mapped(start, len) && ends.into_iter().all(is_there)
    })
}

impl MemoryRegion {
    /// Registers `[start, start + len)`; peers address it from `iova` on. `Err(None)`: the memory is not mapped, or not with the rights.
    ///
    /// # Safety
    /// The memory stays mapped while it is registered, and nothing in this process relies on it being unchanged: the
    /// device and, if `access` allows it, peers write it at any time.
    pub unsafe fn register(
        engine: &'static Engine,
        pd: &Arc<Pd>,
        start: u64,
        len: u64,
        iova: u64,
        access: u32,
    ) -> Result<Self, Option<Misuse>> {
        engine.has_room()?;
        let access = Access::for_region(access)?;
        check_range(start, len)?;
        let on_demand = access.has(Access::ON_DEMAND);
        if !on_demand && !is_accessible(start, len, access) {
            return Err(None);
        }
        let pin = pinned(start, len, access)?;
        look_for_hooks();
        let base = if access.has(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        let what = Registration {
            start,
            len,
            base,
            access,
            pd: pd.id(),
            present: on_demand.then_some(pages::is_there as Present),
        };
        let region = engine.rnic.regions.register(&what, &mut random_u32)?;
        Ok(Self::of(engine, pd, region, pin))
    }

    /// A handle of a registration, which is a user of its protection domain.
    fn of(engine: &'static Engine, pd: &Arc<Pd>, region: Arc<Region>, pin: Option<Pin>) -> Self {
        pd.enter();
        Self {
            engine,
            region: Mutex::new(Rank::Region, region),
            pd: Mutex::new(Rank::RegionPd, Arc::clone(pd)),
            pin: Mutex::new(Rank::RegionPin, pin),
        }
    }

    fn pin(&self) -> MutexGuard<'_, Option<Pin>> {
        self.pin.lock()
    }

    /// A region that discards writes, and whose reads return zeros.
    pub fn null(engine: &'static Engine, pd: &Arc<Pd>) -> Result<Self, Misuse> {
        static AREA: PerProcess<OnceLock<(Pages, Pages)>> = PerProcess::new(OnceLock::new);
        engine.has_room()?;
        // All null regions share both areas: the sink is never read, and the zeroes are never written.
        let area = AREA.get();
        if area.get().is_none() {
            // A failure is not stored: later there may be memory, and a free descriptor.
            let make = || {
                let len = usize::try_from(bounds::MAX_MESSAGE).ok()?;
                Some((Pages::repeated(len)?, Pages::zeroes(len)?))
            };
            let _another_thread_was_faster = area.set(make().ok_or(Misuse::NoMemory)?);
        }
        let (sink, zeroes) = area.get().ok_or(Misuse::NoMemory)?;
        let kind = Kind::Null {
            sink: sink.start() as u64,
            zeroes: zeroes.start() as u64,
            len: bounds::MAX_MESSAGE,
        };
        let regions = &engine.rnic.regions;
        let region = regions.register_null(pd.id(), kind, &mut random_u32)?;
        Ok(Self::of(engine, pd, region, None))
    }

    /// A second handle of a registration, which is found by the upper 24 bits of its keys (`ibv_import_mr(3)`). When
    /// the handle is dropped, the region stays registered.
    pub fn import(engine: &'static Engine, pd: &Arc<Pd>, index: u32) -> Option<Self> {
        let region = engine.rnic.regions.find(index)?;
        (region.pd() == pd.id()).then(|| Self::of(engine, pd, region, None))
    }

    /// The current registration.
    pub fn region(&self) -> Arc<Region> {
        Arc::clone(&self.region.lock())
    }

    /// [`Region::restrict`]. A change of the registration at the same time keeps the restriction.
    pub fn restrict(&self, only: Option<(IpAddr, Option<u32>)>) {
        self.region.lock().restrict(only);
    }

    /// Changes the registration under the same keys. `Err(None)`: the memory is not mapped, or not with the rights.
    ///
    /// # Safety
    /// As for [`Self::register`], for the memory of `change`.
    pub unsafe fn reregister(&self, change: &Reregistration) -> Result<(), Option<Misuse>> {
        let mut region = self.region.lock();
        let (start, len, base) = match change.range {
            Some((start, len)) => (start, len, start),
            None => (region.start(), region.len(), region.base()),
        };
        let access = match change.access {
            Some(bits) => Access::for_region(bits)?,
            None => region.access(),
        };
        check_range(start, len)?;
        let on_demand = access.has(Access::ON_DEMAND);
        if !on_demand && !is_accessible(start, len, access) {
            return Err(None);
        }
        let pin = pinned(start, len, access)?;
        let pd = change.pd.as_ref().map_or_else(|| region.pd(), |p| p.id());
        let what = Registration {
            start,
            len,
            base: if access.has(Access::ZERO_BASED) {
                0
            } else {
                base
            },
            access,
            pd,
            present: on_demand.then_some(pages::is_there as Present),
        };
        *region = self.engine.rnic.regions.reregister(&region, &what)?;
        *self.pin() = pin;
        if let Some(new) = &change.pd {
            new.enter();
            let mut pd = self.pd.lock();
            pd.leave();
            *pd = Arc::clone(new);
        }
        Ok(())
    }

    /// Deregisters the region. After this method has returned, the memory is not accessed.
    pub fn deregister(&self) -> Result<(), Misuse> {
        let region = self.region();
        self.engine.rnic.regions.deregister(&region)?;
        *self.pin() = None;
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.pd.lock().leave();
    }
}

/// Device memory: zeroed pages of this process. Only copying functions and regions access them.
#[derive(Debug)]
pub struct DeviceMemory {
    pages: Pages,
    len: usize,
    /// The process that allocated it.
    generation: u32,
}

/// Bytes of device memory that are allocated in this process.
static DEVICE_MEMORY: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

impl DeviceMemory {
    /// Allocates `len` bytes at the start of a page. `None` if fewer bytes of device memory, or of the host's memory, are left.
    pub fn new(len: usize) -> Option<Self> {
        let most = bounds::DEVICE_MEMORY_MAX;
        let all = DEVICE_MEMORY.get();
        all.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(len).filter(|sum| *sum <= most)
        })
        .ok()?;
        match Pages::new(len) {
            Some(pages) => Some(Self {
                pages,
                len,
                generation: generation(),
            }),
            None => {
                all.fetch_sub(len, Ordering::AcqRel);
                None
            }
        }
    }

    /// Address of the first byte.
    pub fn start(&self) -> usize {
        self.pages.start()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // In a forked child this object is a copy of the parent's.
        if self.generation == generation() {
            DEVICE_MEMORY.get().fetch_sub(self.len, Ordering::AcqRel);
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct SharedReceive {
    context: Arc<Context>,
    /// The queue of the core.
    pub core: Arc<Srq>,
    /// Address of the C object.
    pub c_object: Arc<AtomicUsize>,
    /// The datagram queue pairs that use this queue.
    users: Mutex<Vec<Weak<DgramQp>>>,
}

impl SharedReceive {
    /// A queue for `max_wr` receives of `max_sge` elements, without a limit.
    pub fn new(
        context: &Arc<Context>,
        max_wr: u32,
        max_sge: u32,
        pd: &Pd,
    ) -> Result<Arc<Self>, Misuse> {
        context.engine.has_room()?;
        if max_wr == 0 || max_wr > bounds::MAX_SRQ_WR || max_sge > bounds::MAX_SGE {
            return Err(Misuse::InvalidArgument(
                "max_wr or max_sge of the shared receive queue",
            ));
        }
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            core: Arc::new(Srq::new(max_wr, max_sge, 0, pd.id())),
            c_object: Arc::new(AtomicUsize::new(0)),
            users: Mutex::new(Rank::SharedReceiveUsers, Vec::new()),
        }))
    }

    /// Called for each new queue pair that uses this queue.
    pub fn add_user(&self, qp: &QueuePair) {
        // Only datagram queue pairs have to be told of new receives. On a stream the peer sends a message again for which there was no
        // receive, as often as its attributes permit.
        if let QueuePair::Dgram(qp) = qp {
            let mut users = self.users.lock();
            users.retain(|user| user.strong_count() > 0);
            users.push(Arc::downgrade(qp));
        }
    }

    /// Posts receives until one is refused.
    pub fn post(
        &self,
        requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.context.engine.takes_requests().map_err(|e| (0, e))?;
        let mut result = Ok(());
        for (i, request) in requests.enumerate() {
            if let Err(e) = request.and_then(|r| self.core.post(r)) {
                result = Err((i, e));
                break;
            }
        }
        if self.core.end_shortage() {
            self.wake_users();
        }
        result
    }

    /// Tells the queue pairs that there are receives, because a message of a reliable peer may wait for one.
    #[cold]
    fn wake_users(&self) {
        let users: Vec<_> = self.users.lock().iter().filter_map(Weak::upgrade).collect();
        for qp in users {
            qp.take_shared_receives();
        }
    }

    /// Changes the size or the limit.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Misuse> {
        if max_wr.is_some_and(|n| n == 0 || n > bounds::MAX_SRQ_WR) {
            return Err(Misuse::InvalidArgument("max_wr"));
        }
        if self.core.modify(max_wr, limit)? {
            self.raise_limit_event();
        }
        Ok(())
    }

    /// Raises the event `IBV_EVENT_SRQ_LIMIT_REACHED`: fewer receives are posted than the limit of the queue.
    pub fn raise_limit_event(&self) {
        self.context.events.push(AsyncItem {
            event: event::SRQ_LIMIT_REACHED,
            c_object: self.c_object.load(Ordering::Relaxed),
        });
    }
}

/// A queue pair of any kind.
#[derive(Debug, Clone)]
pub enum QueuePair {
    /// RC or XRC over TCP.
    Rc(Arc<crate::qp::RcQp>),
    /// A queue pair over UDP: UD, RD, UC, or RC over reliable datagrams.
    Dgram(Arc<DgramQp>),
}

/// A work request that was refused: its index in the list, and the reason.
pub type Refused = (usize, Misuse);

impl QueuePair {
    /// Its number.
    pub fn number(&self) -> u32 {
        match self {
            Self::Rc(qp) => qp.number(),
            Self::Dgram(qp) => qp.number(),
        }
    }

    /// Address of its C object.
    pub fn c_object(&self) -> &AtomicUsize {
        match self {
            Self::Rc(qp) => &qp.common.c_object,
            Self::Dgram(qp) => &qp.common.c_object,
        }
    }

    /// Whether this is a stream queue pair whose peer the program has set itself (`ibv_modify_qp(3)`), without the connection manager.
    pub fn program_sets_peer(&self) -> bool {
        match self {
            Self::Rc(qp) => qp.route().is_some_and(|route| route.qpn != 0),
            Self::Dgram(_) => false,
        }
    }

    /// Posts send requests until one is refused.
    pub fn post_send(
        &self,
        requests: impl Iterator<Item = Result<WorkRequest, Misuse>>,
    ) -> Result<(), Refused> {
        match self {
            Self::Rc(qp) => qp.post_send(requests),
            Self::Dgram(qp) => qp.post_send(requests),
        }
    }

    /// Posts all send requests, or none if one of them is refused. The list is empty afterwards, unless they are refused.
    pub fn post_batch(&self, requests: &mut Vec<WorkRequest>) -> Result<(), Refused> {
        match self {
            Self::Rc(qp) => qp.post_batch(requests),
            Self::Dgram(qp) => qp.post_batch(requests),
        }
    }

    /// Posts send requests until one is refused. `requests` yields a function for each request, which writes the request to
    /// its slot in the send queue.
    #[inline]
    pub fn post_sends<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), Refused>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    {
        match self {
            Self::Rc(qp) => qp.post_sends(requests),
            Self::Dgram(qp) => qp.post_sends(requests),
        }
    }

    /// Posts receives until one is refused.
    #[inline]
    pub fn post_recv(
        &self,
        requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), Refused> {
        match self {
            Self::Rc(qp) => qp.post_recv(requests),
            Self::Dgram(qp) => qp.post_recv(requests),
        }
    }

    /// Posts receives until one is refused. `requests` yields a function for each receive, which writes its request.
    #[inline]
    pub fn post_recvs<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), Refused>
    where
        F: FnOnce(&mut RecvRequest) -> Result<(), Misuse>,
    {
        match self {
            Self::Rc(qp) => qp.post_recvs(requests),
            Self::Dgram(qp) => qp.post_recv(requests.map(RecvRequest::build)),
        }
    }

    /// State and attributes.
    pub fn query(
        &self,
    ) -> (
        anywarp_core::verbs::qp::State,
        anywarp_core::verbs::qp::Attr,
    ) {
        match self {
            Self::Rc(qp) => qp.query(),
            Self::Dgram(qp) => qp.query(),
        }
    }

    /// Changes attributes and state.
    pub fn modify(
        &self,
        attr_mask: u32,
        next: Option<anywarp_core::verbs::qp::State>,
        expected_state: Option<anywarp_core::verbs::qp::State>,
        attr: &anywarp_core::verbs::qp::Attr,
        route: Option<crate::qp::Route>,
    ) -> Result<(), Misuse> {
        match self {
            Self::Rc(qp) => qp.modify(attr_mask, next, expected_state, attr, route),
            Self::Dgram(qp) => qp.modify(attr_mask, next, expected_state, attr, route),
        }
    }

    /// Attaches a completion counter (`ibv_qp_attach_comp_cntr(3)`), which stays until the queue pair is destroyed.
    pub fn attach_counter(&self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        match self {
            Self::Rc(qp) => qp.attach_counter(counter, ops),
            Self::Dgram(qp) => qp.attach_counter(counter, ops),
        }
    }

    /// Destroys the queue pair.
    pub fn destroy(&self) {
        match self {
            Self::Rc(qp) => qp.destroy(),
            Self::Dgram(qp) => qp.destroy(),
        }
    }

    /// Joins or leaves a multicast group (`ibv_attach_mcast(3)`).
    pub fn multicast(&self, group: IpAddr, join: bool) -> Result<(), Misuse> {
        match self {
            Self::Rc(_) => Err(Misuse::InvalidArgument(
                "multicast on a connected queue pair",
            )),
            Self::Dgram(qp) => qp.multicast(group, join),
        }
    }

    /// Whether the queue pair is attached to a multicast group.
    pub fn is_in_group(&self) -> bool {
        match self {
            Self::Rc(_) => false,
            Self::Dgram(qp) => qp.is_in_group(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::engine;

    /// UCX's hooks are recognized by the file name of their library. The test loads another library under such a name.
    #[test]
    fn a_registration_finds_the_memory_hooks_of_ucx() {
        use crate::sys::loaded::load;
        let file = std::env::temp_dir().join(format!("libucm-{}.so.0", std::process::id()));
        std::fs::copy(load(c"libutil.so.1"), &file).unwrap();
        let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
        load(&path);
        std::fs::remove_file(&file).unwrap();
        let bytes = [0_u8; 64];
        let start = bytes.as_ptr().expose_provenance() as u64;
        let pd = Arc::new(Pd::new());
        // SAFETY: the memory lives until the end of the test, and only the device uses it.
        let region = unsafe { MemoryRegion::register(engine().unwrap(), &pd, start, 64, start, 0) };
        region.unwrap().deregister().unwrap();
        assert!(crate::mem::has_hooks());
    }

    /// Each bit of index and key is set in half of all STags. No STag depends on the one before, and each is different.
    #[test]
    fn stags_are_random() {
        const MANY: usize = 4096;
        // Six standard deviations of the number of heads in `MANY` coin tosses.
        const SLACK: usize = 192;
        let engine = engine().unwrap();
        let pd = Arc::new(Pd::new());
        let bytes = [0_u8; 64];
        let start = bytes.as_ptr().expose_provenance() as u64;
        let regions: Vec<_> = (0..MANY)
            .map(|_| {
                // SAFETY: the memory lives until the end of the test, and only the device uses it.
                unsafe { MemoryRegion::register(engine, &pd, start, 64, start, 0) }.unwrap()
            })
            .collect();
        let stags: Vec<u32> = regions.iter().map(|r| r.region().stag().0).collect();
        let near_half = |count: usize| count.abs_diff(MANY / 2) < SLACK;
        for bit in 0..32 {
            let set = stags.iter().filter(|s| *s >> bit & 1 == 1).count();
            assert!(near_half(set), "bit {bit} is set in {set} of {MANY}");
            let same = |w: &&[u32]| (w[0] ^ w[1]) >> bit & 1 == 0;
            let same = stags.windows(2).filter(same).count();
            assert!(near_half(same), "bit {bit} stays the same {same} times");
        }
        let steps: std::collections::HashSet<u32> =
            stags.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        assert!(steps.len() > MANY - 16, "{} different steps", steps.len());
        let indexes: std::collections::HashSet<u32> = stags.iter().map(|s| s >> 8).collect();
        assert_eq!(indexes.len(), MANY);
        for region in regions {
            region.deregister().unwrap();
        }
    }
}
