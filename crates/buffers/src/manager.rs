//! What is done with a buffer: copied, registered, or found registered.

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

/// Up to this length memory is always copied: to look whether it is registered takes as long.
const SHORT: usize = 4 << 10;

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is sent, or read by the peer.
    Send,
    /// It is received into, or read into.
    Receive,
}

/// How long the program leaves memory as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the buffer is released. What the kernel cannot watch is registered for one use.
    Use,
    /// Until the program calls [`Manager::invalidate`]. Its registration is kept from the first use on.
    Stable,
}

/// What has been done for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Its content is copied through memory of the manager.
    Copied,
    /// It is registered for this use.
    Registered,
    /// Its registration is kept for other uses.
    Kept,
}

/// How a manager works.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Rights of memory that is sent, and of memory that is received into (`enum ibv_access_flags`).
    pub send_access: u32,
    /// As above.
    pub receive_access: u32,
    /// Memory up to this size is copied. `None`: measured.
    pub critical: Option<usize>,
    /// Bytes to copy through, at most, for each use.
    pub pool_bytes: usize,
    /// Bytes whose registrations are kept, at most. 0: none are.
    pub cache_bytes: usize,
    /// Whether registrations are kept of memory that the kernel watches.
    pub watch: bool,
    /// The length of the pieces of long buffers.
    pub piece: usize,
    /// Threads that register pieces, with that of the caller.
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

/// Numbers of a manager since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The critical size, bytes.
    pub critical: u64,
    /// Whether the kernel reports changes of memory: 1, or 0.
    pub watching: u64,
    /// Buffers that were copied, and their bytes.
    pub copied: u64,
    /// As above.
    pub copied_bytes: u64,
    /// Buffers that were registered for one use.
    pub registered: u64,
    /// Buffers whose registration was there.
    pub hits: u64,
    /// Registrations that were made to be kept.
    pub kept: u64,
    /// Kept registrations that ended because their memory changed, or the program said so.
    pub invalidated: u64,
    /// Kept registrations that ended for others.
    pub evicted: u64,
    /// Registrations that are kept now, and their bytes.
    pub cached: u64,
    /// As above.
    pub cached_bytes: u64,
    /// Bytes registered to copy through.
    pub pool_bytes: u64,
    /// Buffers that are in use now.
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
        // In a child the list is as another thread may have left it, and the registrations are the parent's.
        if !fork::is_child() {
            cache::forget(self.id);
        }
    }
}

/// The buffers of one protection domain, and of all peers that may see what it registers.
#[derive(Debug)]
pub struct Manager(pub(crate) Arc<Inner>);

/// Memory that is ready for a request, until it is dropped or [released](Self::release).
pub struct Buffer {
    addr: u64,
    len: usize,
    kind: Kind,
    /// The last field to be dropped: when no buffer refers to the manager any more, their registrations have ended.
    _in_use: InUse,
}

/// A buffer in the statistics of its manager, and one reason for which the manager is busy.
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
    /// With the place of the program that received data is copied to.
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
    /// The errno of `ibv_reg_mr`, if the critical size is measured.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain that outlives the manager and all its buffers.
    pub unsafe fn open(pd: *mut ffi::ibv_pd, settings: Settings) -> Result<Self, c_int> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if fork::generation() != 0 {
            return Err(libc::EPERM);
        }
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

    /// Makes `len` bytes at `addr` ready to be sent. Data that is copied is copied now.
    ///
    /// # Errors
    ///
    /// EINVAL for no bytes, or the errno of `ibv_reg_mr`.
    ///
    /// # Safety
    ///
    /// The memory is the program's and stays as `lifetime` says.
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

    /// Makes `len` bytes at `addr` ready to be received into. Data that is copied is copied by [`Buffer::release`].
    ///
    /// # Errors
    ///
    /// As for [`Self::send`].
    ///
    /// # Safety
    ///
    /// As for [`Self::send`]; no other code reads or writes the memory until the buffer is released.
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

    /// Memory of the manager for `len` bytes that the caller copies himself. `None` if more are copied than registered, or
    /// if all is in use.
    #[must_use]
    pub fn piece(&self, of: Use, len: usize) -> Option<Piece> {
        if len > self.0.critical || fork::is_child() {
            return None;
        }
        self.0.pool(of).take(len)
    }

    /// Ends all kept registrations of memory in this range. Those in use end when they are released. How many ended.
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
        // A piece has only its pool.
        let pools = [&self.0.send, &self.0.receive];
        Arc::strong_count(&self.0) > 1 || pools.iter().any(|pool| Arc::strong_count(pool) > 1)
    }

    /// What it has done.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &self.0;
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
    /// As for [`Manager::send`].
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

    /// A buffer of the pool, with the data in it if it is sent.
    fn copied(&self, addr: u64, len: usize, of: Use) -> Option<Kind> {
        let piece = self.pool(of).take(len)?;
        if of == Use::Send {
            // SAFETY: the program passes this memory, and the piece is as long.
            unsafe { copy(addr, piece.addr(), len) };
        }
        self.copied.fetch_add(1, Relaxed);
        self.copied_bytes.fetch_add(len as u64, Relaxed);
        Some(Kind::Copied(piece, (of == Use::Receive).then_some(addr)))
    }

    /// # Safety
    ///
    /// As for [`Manager::send`].
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
                // SAFETY: the program leaves the memory as it is, or the kernel tells.
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
            // What is kept and not used may be what is too much.
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

/// Copies between memory of the program and of the pool.
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
    /// The address for requests.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length, bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "there is no buffer without bytes"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The key for requests of this end.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        match &self.kind {
            Kind::Copied(piece, _) => piece.keys().0,
            Kind::Registered(region) => region.lkey(),
            Kind::Kept(kept) => kept.lkey,
        }
    }

    /// The key for requests of the peer.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        match &self.kind {
            Kind::Copied(piece, _) => piece.keys().1,
            Kind::Registered(region) => region.rkey(),
            Kind::Kept(kept) => kept.rkey,
        }
    }

    /// What was done.
    #[must_use]
    pub fn how(&self) -> How {
        match &self.kind {
            Kind::Copied(..) => How::Copied,
            Kind::Registered(_) => How::Registered,
            Kind::Kept(_) => How::Kept,
        }
    }

    /// Ends the use, after the request has completed. The first `received` bytes that were received are put where the
    /// program wants them, at most as many as the buffer has.
    pub fn release(self, received: usize) {
        if let Kind::Copied(piece, Some(to)) = &self.kind {
            // SAFETY: the program has left this memory to the buffer until now.
            unsafe { copy(piece.addr(), *to, received.min(self.len)) };
        }
    }
}
