//! The manager of buffers, which copies or registers memory, or uses a cached registration.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::c_int;

use crate::cache::{self, Answer, Kept};
use crate::ffi::{self, Ptr};
use crate::fork;
use crate::pool::{self, Piece, Pool};
use crate::region::{self, Region};
use crate::table::{Counters, Wanted};

/// Memory up to this length, if it is not longer than the critical size, is copied without a lookup in the cache, because the lookup
/// takes as long as copying. It is registered if the pool is empty.
const SHORT: usize = 4 << 10;

/// The upper limit of [`Settings::threads`].
const MOST_THREADS: usize = 64;

/// How memory is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The memory is sent, or read by the peer.
    Send,
    /// Data is received or read into the memory.
    Receive,
}

/// How long the program keeps memory mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the buffer is released. Memory that the kernel cannot watch is registered for one use.
    Use,
    /// Until the program calls [`Manager::invalidate`]. The registration is cached from the first use on.
    Stable,
}

/// How a buffer is provided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// The data is copied through memory of the manager.
    Copied,
    /// The memory is registered for this use.
    Registered,
    /// The memory has a cached registration.
    Kept,
}

/// The settings of a manager.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The access rights of memory for sending (`enum ibv_access_flags`).
    pub send_access: u32,
    /// The access rights of memory for receiving.
    pub receive_access: u32,
    /// Memory up to this size is copied. `None`: the size is measured.
    pub critical: Option<usize>,
    /// The most bytes of memory to copy through, for each of sending and receiving.
    pub pool_bytes: usize,
    /// The most bytes with cached registrations. 0 disables the cache.
    pub cache_bytes: usize,
    /// Whether to cache registrations of memory that the kernel watches.
    pub watch: bool,
    /// The length of the pieces of long buffers.
    pub piece: usize,
    /// The number of threads that register pieces, including that of the caller; at most 64.
    pub threads: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            send_access: 0,
            receive_access: ffi::IBV_ACCESS_LOCAL_WRITE,
            critical: None,
            pool_bytes: 16 << 20,
            cache_bytes: 256 << 20,
            watch: true,
            piece: 1 << 20,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(4)),
        }
    }
}

/// Statistics of a manager since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The critical size in bytes.
    pub critical: u64,
    /// 1 if the kernel reports changes of memory, otherwise 0.
    pub watching: u64,
    /// The number of buffers that were copied.
    pub copied: u64,
    /// The total length of the copied buffers in bytes.
    pub copied_bytes: u64,
    /// The number of buffers that were registered for one use.
    pub registered: u64,
    /// The number of buffers for which a cached registration was found.
    pub hits: u64,
    /// The number of registrations that were added to the cache.
    pub kept: u64,
    /// The number of cached registrations that ended because their memory changed or the program invalidated them.
    pub invalidated: u64,
    /// The number of cached registrations that were evicted to make room.
    pub evicted: u64,
    /// The current number of cached registrations.
    pub cached: u64,
    /// The current number of bytes with cached registrations.
    pub cached_bytes: u64,
    /// The bytes of registered memory to copy through.
    pub pool_bytes: u64,
    /// The number of buffers currently in use.
    pub in_use: u64,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pd: Ptr<ffi::ibv_pd>,
    id: u64,
    pub(crate) settings: Settings,
    critical: usize,
    send: Arc<Pool>,
    receive: Arc<Pool>,
    counters: Arc<Counters>,
    copied: AtomicU64,
    copied_bytes: AtomicU64,
    registered: AtomicU64,
    in_use: AtomicUsize,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // In a child the table may be inconsistent, and the registrations belong to the parent.
        if !fork::is_child() {
            cache::forget(self.id);
        }
    }
}

/// Provides buffers for one protection domain. All peers of the domain may access the memory that the manager registers, as far as the
/// access rights permit.
#[derive(Debug)]
pub struct Manager(pub(crate) Arc<Inner>);

/// Memory that is ready for a request until it is dropped or [released](Self::release).
pub struct Buffer {
    addr: u64,
    len: usize,
    kind: Kind,
    /// Dropped last, so that the registrations of all buffers have ended when no buffer refers to the manager any more.
    _in_use: InUse,
}

/// Counts a buffer in the statistics of its manager. The manager is busy as long as it has such a buffer.
struct InUse(Arc<Inner>);

impl InUse {
    fn new(inner: &Arc<Inner>) -> Self {
        inner.in_use.fetch_add(1, Relaxed);
        Self(Arc::clone(inner))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.in_use.fetch_sub(1, Relaxed);
    }
}

enum Kind {
    /// With the address in the program's memory to which received data is copied.
    Copied(Piece, Option<u64>),
    Registered(Region),
    Kept(Kept),
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:#x} {}", self.how(), self.addr, self.len)
    }
}

impl Manager {
    /// Opens a manager.
    ///
    /// # Errors
    ///
    /// EPERM in a child of a process that has used the library; the errno of `ibv_reg_mr`, if the critical size is measured.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain that outlives the manager and all its buffers.
    pub unsafe fn open(pd: *mut ffi::ibv_pd, mut settings: Settings) -> Result<Self, c_int> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if fork::generation() != 0 {
            return Err(libc::EPERM);
        }
        settings.threads = settings.threads.min(MOST_THREADS);
        let critical = match settings.critical {
            Some(critical) => critical,
            // SAFETY: upheld by the caller.
            None => unsafe { region::critical_size(pd, settings.send_access, pool::LARGEST) }?,
        };
        let pool = |access| Arc::new(Pool::new(pd, access, settings.pool_bytes));
        Ok(Self(Arc::new(Inner {
            pd: Ptr(pd),
            id: NEXT.fetch_add(1, Relaxed),
            critical,
            send: pool(settings.send_access),
            receive: pool(settings.receive_access),
            settings,
            counters: Arc::default(),
            copied: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            registered: AtomicU64::new(0),
            in_use: AtomicUsize::new(0),
        })))
    }

    /// Prepares `len` bytes at `addr` for sending. If the data is copied, it is copied now.
    ///
    /// # Errors
    ///
    /// EINVAL if `addr` is null or `len` is 0, EFAULT if the memory would exceed the address space, EPERM in a child of a
    /// process that has used the library; otherwise the errno of `ibv_reg_mr`.
    ///
    /// # Safety
    ///
    /// The memory belongs to the program and stays mapped as `lifetime` says.
    pub unsafe fn send(
        &self,
        addr: *const u8,
        len: usize,
        lifetime: Lifetime,
    ) -> Result<Buffer, c_int> {
        let addr = addr.expose_provenance() as u64;
        // SAFETY: upheld by the caller.
        unsafe { Inner::get(&self.0, addr, len, Use::Send, lifetime) }
    }

    /// Prepares `len` bytes at `addr` for receiving. If the data is copied, [`Buffer::release`] copies it.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::send`].
    ///
    /// # Safety
    ///
    /// The requirements of [`Self::send`] apply. No other code reads or writes the memory until the buffer is released.
    pub unsafe fn receive(
        &self,
        addr: *mut u8,
        len: usize,
        lifetime: Lifetime,
    ) -> Result<Buffer, c_int> {
        let addr = addr.expose_provenance() as u64;
        // SAFETY: upheld by the caller.
        unsafe { Inner::get(&self.0, addr, len, Use::Receive, lifetime) }
    }

    /// Returns memory of the manager for `len` bytes, which the caller fills or reads itself. `None` if a buffer of this
    /// length would be registered instead of copied, or if all memory is in use.
    #[must_use]
    pub fn piece(&self, of: Use, len: usize) -> Option<Piece> {
        if len > self.0.critical || fork::is_child() {
            return None;
        }
        self.0.pool(of).take(len)
    }

    /// Ends all cached registrations of memory in this range. Those in use end when they are released. Returns how many registrations
    /// end.
    #[must_use = "or assign to _"]
    pub fn invalidate(&self, range: Range<usize>) -> usize {
        if fork::is_child() {
            return 0;
        }
        cache::invalidate(self.0.id, &range)
    }

    /// Returns whether buffers or pieces of it are in use.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        // A piece refers only to its pool, not to the manager.
        let pools = [&self.0.send, &self.0.receive];
        Arc::strong_count(&self.0) > 1 || pools.iter().any(|pool| Arc::strong_count(pool) > 1)
    }

    /// Returns the statistics.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &self.0;
        if !fork::is_child() {
            cache::refresh();
        }
        let counters = &inner.counters;
        Statistics {
            critical: inner.critical as u64,
            watching: u64::from(inner.watches()),
            copied: inner.copied.load(Relaxed),
            copied_bytes: inner.copied_bytes.load(Relaxed),
            registered: inner.registered.load(Relaxed),
            hits: counters.hits.load(Relaxed),
            kept: counters.kept.load(Relaxed),
            invalidated: counters.invalidated.load(Relaxed),
            evicted: counters.evicted.load(Relaxed),
            cached: counters.entries.load(Relaxed) as u64,
            cached_bytes: counters.bytes.load(Relaxed) as u64,
            pool_bytes: (inner.send.bytes() + inner.receive.bytes()) as u64,
            in_use: inner.in_use.load(Relaxed) as u64,
        }
    }
}

impl Inner {
    fn pool(&self, of: Use) -> &Arc<Pool> {
        match of {
            Use::Send => &self.send,
            Use::Receive => &self.receive,
        }
    }

    fn watches(&self) -> bool {
        self.settings.watch && self.settings.cache_bytes > 0 && cache::watch().is_ok()
    }

    /// # Safety
    ///
    /// The requirements of [`Manager::send`] apply.
    pub(crate) unsafe fn get(
        this: &Arc<Self>,
        addr: u64,
        len: usize,
        of: Use,
        lifetime: Lifetime,
    ) -> Result<Buffer, c_int> {
        if fork::is_child() {
            return Err(libc::EPERM);
        }
        let start = usize::try_from(addr).map_err(|_| libc::EFAULT)?;
        let end = start.checked_add(len).ok_or(libc::EFAULT)?;
        if len == 0 || start == 0 {
            return Err(libc::EINVAL);
        }
        let access = match of {
            Use::Send => this.settings.send_access,
            Use::Receive => this.settings.receive_access,
        };
        let short = len <= SHORT.min(this.critical);
        let kind = match short.then(|| this.copied(addr, len, of)).flatten() {
            Some(kind) => kind,
            None => {
                let wanted = Wanted {
                    owner: this.id,
                    range: start..end,
                    access,
                    counters: &this.counters,
                };
                // SAFETY: upheld by the caller.
                unsafe { this.registered(&wanted, of, lifetime) }?
            }
        };
        let addr = match &kind {
            Kind::Copied(piece, _) => piece.addr(),
            _ => addr,
        };
        Ok(Buffer {
            addr,
            len,
            kind,
            _in_use: InUse::new(this),
        })
    }

    /// Returns a buffer of the pool, or `None` if none is free. For sending, it contains the data.
    fn copied(&self, addr: u64, len: usize, of: Use) -> Option<Kind> {
        let piece = self.pool(of).take(len)?;
        if of == Use::Send {
            // SAFETY: the program passes this memory, and the piece has at least the same length.
            unsafe { copy(addr, piece.addr(), len) };
        }
        self.copied.fetch_add(1, Relaxed);
        self.copied_bytes.fetch_add(len as u64, Relaxed);
        Some(Kind::Copied(piece, (of == Use::Receive).then_some(addr)))
    }

    /// # Safety
    ///
    /// The requirements of [`Manager::send`] apply.
    unsafe fn registered(
        &self,
        wanted: &Wanted<'_>,
        of: Use,
        lifetime: Lifetime,
    ) -> Result<Kind, c_int> {
        let (addr, len) = (wanted.range.start as u64, wanted.range.len());
        let limit = self.settings.cache_bytes;
        let stable = lifetime == Lifetime::Stable;
        if limit > 0 && (stable || self.watches()) {
            let keep = match cache::find(wanted, !stable) {
                Answer::Kept(kept) => return Ok(Kind::Kept(kept)),
                Answer::Known => true,
                Answer::Unknown => stable,
            };
            if keep {
                // SAFETY: the program keeps the memory mapped, or the kernel reports the change.
                let kept = unsafe { cache::keep(self.pd.0, wanted, !stable, limit) };
                if let Ok(Some(kept)) = kept {
                    return Ok(Kind::Kept(kept));
                }
            }
        }
        if len <= self.critical
            && let Some(kind) = self.copied(addr, len, of)
        {
            return Ok(kind);
        }
        // SAFETY: upheld by the caller.
        let register = || unsafe { Region::new(self.pd.0, addr, len, wanted.access) };
        let region = match register() {
            // Unused cached registrations may be the reason for the failure.
            Err(libc::ENOMEM | libc::EAGAIN) if cache::shrink(self.id) => register(),
            other => other,
        };
        match region {
            Ok(region) => {
                self.registered.fetch_add(1, Relaxed);
                Ok(Kind::Registered(region))
            }
            Err(errno @ (libc::ENOMEM | libc::EAGAIN)) => self.copied(addr, len, of).ok_or(errno),
            Err(errno) => Err(errno),
        }
    }
}

/// Copies between memory of the program and memory of the pool.
///
/// # Safety
///
/// Both are memory of this length, and do not overlap.
unsafe fn copy(from: u64, to: u64, len: usize) {
    // SAFETY: upheld by the caller.
    unsafe {
        let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
        std::ptr::copy_nonoverlapping(from, to, len);
    }
}

impl Buffer {
    /// Returns the address for requests.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "there is no buffer without bytes"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the key for local requests.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        match &self.kind {
            Kind::Copied(piece, _) => piece.keys().0,
            Kind::Registered(region) => region.lkey(),
            Kind::Kept(kept) => kept.lkey,
        }
    }

    /// Returns the key for the peer's requests.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        match &self.kind {
            Kind::Copied(piece, _) => piece.keys().1,
            Kind::Registered(region) => region.rkey(),
            Kind::Kept(kept) => kept.rkey,
        }
    }

    /// Returns how the buffer is provided.
    #[must_use]
    pub fn how(&self) -> How {
        match &self.kind {
            Kind::Copied(..) => How::Copied,
            Kind::Registered(_) => How::Registered,
            Kind::Kept(_) => How::Kept,
        }
    }

    /// Releases the buffer after the request has completed. The first `received` bytes, at most the length of the buffer, are
    /// copied to the program's memory if the buffer was copied.
    pub fn release(self, received: usize) {
        if let Kind::Copied(piece, Some(to)) = &self.kind {
            // SAFETY: the program did not access this memory until now.
            unsafe { copy(piece.addr(), *to, received.min(self.len)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_is_limited() {
        let settings = Settings {
            critical: Some(1),
            threads: usize::MAX,
            ..Settings::default()
        };
        // SAFETY: the manager uses the domain only to register memory.
        let manager = unsafe { Manager::open(std::ptr::null_mut(), settings) }.unwrap();
        assert_eq!(manager.0.settings.threads, MOST_THREADS);
    }
}
