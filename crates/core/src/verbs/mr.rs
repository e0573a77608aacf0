//! Memory regions and windows: the STag table, and the check that turns an STag and an offset into a [`Placement`].
//!
//! The addresses of a region are plain numbers in this crate. A [`Placement`] is made only by a successful check.
//! Pinning it gives a [`Pinned`], without which the engine cannot access user memory. Deregistering removes the
//! region from the table and waits until no pin is left, so the buffer is not accessed afterwards.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::access::Access;
use super::wr::Bind;
use crate::error::Misuse;
use crate::sync::{
    AtomicBool, AtomicU32, Ordering, RwLock, fence, spin_loop, store_load_fence, yield_now,
};
use crate::wire::{Stag, To};

/// The kind of object that an STag names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A memory region.
    Region,
    /// A bound memory window of type 1: belongs to the protection domain.
    WindowType1,
    /// A bound memory window of type 2: belongs to one queue pair.
    WindowType2 {
        /// That queue pair.
        qpn: u32,
    },
    /// A null region, which has no memory of the program (`ibv_alloc_null_mr(3)`).
    Null {
        /// Address of the memory that writes go to. It is never read.
        sink: u64,
        /// Address of the memory that reads come from. It is always zero.
        zeroes: u64,
        /// Length of each of the two, in bytes.
        len: u64,
    },
}

/// A registered range of user memory. Its addresses, protection domain and rights never change; a new registration is a new `Region`.
#[derive(Debug)]
pub struct Region {
    stag: Stag,
    /// Number of the registration, which [`Regions::reregister`] does not change.
    number: u64,
    kind: Kind,
    pd: u32,
    /// Address of the first byte in the process.
    start: u64,
    len: u64,
    /// Tagged offset of the first byte.
    base: u64,
    access: Access,
    valid: AtomicBool,
    pins: AtomicU32,
    /// Number of windows bound to this region. It cannot be deregistered while there are any.
    windows: AtomicU32,
    /// The region that a window gives access to.
    under: Option<Arc<Self>>,
    /// Tests whether a range of memory is accessible.
    present: Option<Present>,
    /// The only host, and its queue pair if given, whose datagrams may access the region; `None`: all may.
    only: RwLock<Option<(IpAddr, Option<u32>)>>,
}

/// The region that a queue pair accessed last, to find it again without the table.
#[derive(Debug, Default)]
pub struct LastRegion(Option<Arc<Region>>);

/// Tests whether the process can currently read, or write, its memory at `[start, start + len)`.
pub type Present = fn(start: u64, len: u64, write: bool) -> bool;

/// Why memory may not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessError {
    /// No such STag, or it was invalidated.
    Invalid,
    /// The STag belongs to another protection domain or stream.
    NotAssociated,
    /// The STag does not give this right.
    Rights,
    /// The range is not inside the region.
    Bounds,
    /// Offset plus length is 2^64 or more.
    Wrap,
    /// The access is allowed, but there is no memory at the address (on demand paging).
    Absent,
}

impl Region {
    /// Its STag.
    pub fn stag(&self) -> Stag {
        self.stag
    }

    /// Address of its first byte in the process.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tagged offset of its first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its protection domain.
    pub fn pd(&self) -> u32 {
        self.pd
    }

    /// Its rights.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Region or window.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Restricts access by datagrams to those of this host, and of this queue pair if given.
    pub fn restrict(&self, only: Option<(IpAddr, Option<u32>)>) {
        let only = only.map(|(ip, qpn)| (ip.to_canonical(), qpn));
        *self.only.write() = only;
    }

    fn admits(&self, ip: IpAddr, qpn: u32) -> bool {
        match *self.only.read() {
            None => true,
            Some((only, of)) => only == ip.to_canonical() && of.is_none_or(|of| of == qpn),
        }
    }

    /// The access check after the STag was found; returns the offset in the region, and the address.
    fn grant(
        &self,
        pd: u32,
        qpn: u32,
        need: Access,
        to: To,
        len: u64,
    ) -> Result<(u64, u64), AccessError> {
        // RFC 5041 §8.2 [stag-pd]: an STag is valid for the streams of its protection domain, or for one stream.
        if self.pd != pd || matches!(self.kind, Kind::WindowType2 { qpn: of } if of != qpn) {
            return Err(AccessError::NotAssociated);
        }
        if !self.access.has(need) {
            return Err(AccessError::Rights);
        }
        // RFC 5041 §7.1 [ddp-to-wrap]: offset plus length stays below 2^64.
        let end = to.0.checked_add(len).ok_or(AccessError::Wrap)?;
        // RFC 5041 §7.1 [ddp-bounds]: both ends inside the region.
        let offset = to.0.checked_sub(self.base).ok_or(AccessError::Bounds)?;
        if end - self.base > self.len {
            return Err(AccessError::Bounds);
        }
        let writes = Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0 | Access::REMOTE_ATOMIC.0;
        let writes = need.0 & writes != 0;
        let present = self
            .present
            .is_none_or(|p| len == 0 || p(self.start + offset, len, writes));
        if !present {
            return Err(AccessError::Absent);
        }
        let at = match self.kind {
            // A null region discards writes, and reads of it give zeros. It has separate memory for each.
            Kind::Null { zeroes, .. } if !need.has(Access::LOCAL_WRITE) => zeroes,
            Kind::Null { sink, .. } => sink,
            _ => self.start + offset,
        };
        if matches!(self.kind, Kind::Null { len: most, .. } if len > most) {
            return Err(AccessError::Bounds);
        }
        Ok((offset, at))
    }

    /// Pins the region for one access. `None` if it was deregistered or invalidated.
    pub fn pin(&self) -> Option<Pin<'_>> {
        // Pairs with `retire`. This function publishes the pin, then reads `valid`; `retire` writes `valid`, then
        // reads the number of pins. So at least one of the two sees the write of the other.
        self.pins.fetch_add(1, Ordering::SeqCst);
        store_load_fence();
        let pin = Pin { region: self };
        if !self.valid.load(Ordering::SeqCst) {
            return None;
        }
        if let Some(under) = &self.under
            && !under.valid.load(Ordering::SeqCst)
        {
            return None;
        }
        Some(pin)
    }

    /// Checks that no window is bound to the region, so that it may be deregistered (`ibv_dereg_mr(3)`).
    ///
    /// The caller holds the write lock of the table, as [`Regions::bind`] does, and removes the region from the table
    /// before it releases the lock. Otherwise a window that is bound in between would give access to deregistered
    /// memory.
    fn check_unbound(&self) -> Result<(), Misuse> {
        match self.windows.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(Misuse::Busy),
        }
    }

    /// Forbids further access, and waits for accesses in progress. Each lasts one system call at most.
    fn retire(&self) {
        self.valid.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut spins = 0_u32;
        while self.pins.load(Ordering::SeqCst) != 0 {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(64) {
                yield_now();
            } else {
                spin_loop();
            }
        }
        if let Some(under) = &self.under {
            under.windows.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// A pin of a region, dropped after the access.
#[derive(Debug)]
pub struct Pin<'a> {
    region: &'a Region,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.region.pins.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A range of a region that passed the access check: the permission to access it.
#[derive(Debug, Clone)]
pub struct Placement {
    region: Arc<Region>,
    offset: u64,
    /// Address of the first byte.
    at: u64,
    len: u64,
}

impl Placement {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a datagram of queue pair `qpn` at `ip` may access the range.
    pub fn admits(&self, ip: IpAddr, qpn: u32) -> bool {
        let under = self.region.under.as_ref();
        self.region.admits(ip, qpn) && under.is_none_or(|under| under.admits(ip, qpn))
    }

    /// The part from byte `from` on, of at most `len` bytes.
    #[must_use]
    pub fn part(&self, from: u64, len: u64) -> Self {
        let from = from.min(self.len);
        Self {
            region: Arc::clone(&self.region),
            offset: self.offset + from,
            at: self.at + from,
            len: len.min(self.len - from),
        }
    }

    /// Pins the range for one access. `None`: it was deregistered or invalidated since the check.
    pub fn pin(&self) -> Option<Pinned<'_>> {
        let pin = self.region.pin()?;
        Some(Pinned {
            _pin: pin,
            start: self.at,
            len: self.len,
        })
    }

    /// The region's STag.
    pub fn stag(&self) -> Stag {
        self.region.stag
    }

    /// Tagged offset of the first byte.
    pub fn to(&self) -> To {
        To(self.region.base.wrapping_add(self.offset))
    }

    /// Whether atomics are refused, because the address of the first byte is not a multiple of 8.
    pub fn misaligned(&self) -> bool {
        !self.at.is_multiple_of(8)
    }
}

/// A pinned range of user memory. While it exists, the range may be read or written as its check allowed.
#[derive(Debug)]
pub struct Pinned<'a> {
    _pin: Pin<'a>,
    start: u64,
    len: u64,
}

impl Pinned<'_> {
    /// Address in the process.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Access to user memory: copy in, copy out, atomic update. The engine implements it for the memory of the process.
pub trait Memory {
    /// Writes `bytes` to `to`, from its byte `offset` on. Bytes beyond its end are not written.
    fn place(&self, to: &Pinned<'_>, offset: u64, bytes: &[u8]);
    /// Writes `first` to the beginning of `to`, and `second` after it. Bytes beyond its end are not written.
    fn place_both(&self, to: &Pinned<'_>, first: &[u8], second: &[u8]) {
        self.place(to, 0, first);
        self.place(to, first.len() as u64, second);
    }
    /// Appends `from[offset..offset + len]` to `out`, as far as it exists.
    fn gather(&self, from: &Pinned<'_>, offset: u64, len: u64, out: &mut Vec<u8>);
    /// Replaces the aligned 64-bit word at `at` by the result of `change`, atomically, and returns the old value.
    fn update(&self, at: &Pinned<'_>, change: &mut dyn FnMut(u64) -> u64) -> u64;
}

/// STag indexes are random already, so a multiplication is enough to hash them.
#[derive(Debug, Default, Clone, Copy)]
struct IndexHasher(u64);

impl Hasher for IndexHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }
    fn write_u32(&mut self, n: u32) {
        // An index has only 24 bits. The multiplication spreads them to the high bits, which the hash table uses as tags.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Index = HashMap<u32, Entry, BuildHasherDefault<IndexHasher>>;

#[derive(Debug)]
enum Entry {
    Live(Arc<Region>),
    /// An allocated window that is not bound. It has an STag, and gives no access.
    Unbound {
        pd: u32,
        type2: bool,
    },
}

/// All STags of the device.
#[derive(Debug)]
pub struct Regions {
    table: RwLock<Index>,
}

/// The attributes of a new region.
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    /// Address in the process.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Tagged offset of the first byte.
    pub base: u64,
    /// Rights.
    pub access: Access,
    /// Protection domain.
    pub pd: u32,
    /// Tests whether the memory is accessible, for regions with on-demand paging. `None`: it is accessible as long as
    /// it is registered.
    pub present: Option<Present>,
}

impl Default for Regions {
    fn default() -> Self {
        Self::new()
    }
}

impl Regions {
    /// An empty table.
    pub fn new() -> Self {
        Self {
            table: RwLock::new(Index::default()),
        }
    }

    /// Registers memory. `random` gives unpredictable numbers, from which the STag is made.
    pub fn register(
        &self,
        what: &Registration,
        random: &mut dyn FnMut() -> u32,
    ) -> Result<Arc<Region>, Misuse> {
        if what.start.checked_add(what.len).is_none() || what.base.checked_add(what.len).is_none() {
            return Err(Misuse::InvalidArgument("region exceeds the address space"));
        }
        let mut table = self.table.write();
        let stag = free_stag(&table, random)?;
        let region = Arc::new(region(stag, Kind::Region, what, None));
        table.insert(stag.0 >> 8, Entry::Live(Arc::clone(&region)));
        Ok(region)
    }

    /// Registers a null region, which covers all addresses and has no memory of the program.
    pub fn register_null(
        &self,
        pd: u32,
        kind: Kind,
        random: &mut dyn FnMut() -> u32,
    ) -> Result<Arc<Region>, Misuse> {
        let what = Registration {
            start: 0,
            len: u64::MAX,
            base: 0,
            access: Access::LOCAL_WRITE,
            pd,
            present: None,
        };
        let mut table = self.table.write();
        let stag = free_stag(&table, random)?;
        let region = Arc::new(region(stag, kind, &what, None));
        table.insert(stag.0 >> 8, Entry::Live(Arc::clone(&region)));
        Ok(region)
    }

    /// Replaces registration `old` by a new one with the STag of `old`.
    pub fn reregister(
        &self,
        old: &Arc<Region>,
        what: &Registration,
    ) -> Result<Arc<Region>, Misuse> {
        if what.start.checked_add(what.len).is_none() || what.base.checked_add(what.len).is_none() {
            return Err(Misuse::InvalidArgument("region exceeds the address space"));
        }
        let mut new = region(old.stag, Kind::Region, what, None);
        let mut table = self.table.write();
        old.check_unbound()?;
        new.only = RwLock::new(*old.only.read());
        new.number = old.number;
        let new = Arc::new(new);
        table.insert(old.stag.0 >> 8, Entry::Live(Arc::clone(&new)));
        drop(table);
        old.retire();
        Ok(new)
    }

    /// Deregisters a region. After this call has returned, nothing accesses the memory. If the region was registered again since
    /// `handle` was found, the present registration ends. Does nothing if it was deregistered by another handle.
    pub fn deregister(&self, handle: &Arc<Region>) -> Result<(), Misuse> {
        let mut table = self.table.write();
        let index = handle.stag.0 >> 8;
        let present = match table.get(&index) {
            Some(Entry::Live(r)) if r.number == handle.number => Arc::clone(r),
            _ => return Ok(()),
        };
        present.check_unbound()?;
        table.remove(&index);
        drop(table);
        present.retire();
        Ok(())
    }

    /// Allocates a window and gives its STag.
    pub fn alloc_window(
        &self,
        pd: u32,
        type2: bool,
        random: &mut dyn FnMut() -> u32,
    ) -> Result<Stag, Misuse> {
        let mut table = self.table.write();
        let stag = free_stag(&table, random)?;
        table.insert(stag.0 >> 8, Entry::Unbound { pd, type2 });
        Ok(stag)
    }

    /// Frees a window, bound or not.
    pub fn free_window(&self, stag: Stag) -> Result<(), Misuse> {
        let gone = self.table.write().remove(&(stag.0 >> 8));
        match gone {
            Some(Entry::Live(region)) => {
                region.retire();
                Ok(())
            }
            Some(Entry::Unbound { .. }) => Ok(()),
            None => Err(Misuse::InvalidArgument("no such memory window")),
        }
    }

    /// Binds a window for queue pair `qpn` of domain `pd`, or unbinds it if the length is 0.
    pub fn bind(&self, bind: &Bind, pd: u32, qpn: u32) -> Result<(), AccessError> {
        let mut table = self.table.write();
        let index = bind.window.0 >> 8;
        let (window_pd, type2, old) = match table.get(&index) {
            Some(Entry::Unbound { pd, type2 }) => (*pd, *type2, None),
            // A bound window of type 2 must be invalidated before it is bound again.
            Some(Entry::Live(r)) if r.kind == Kind::WindowType1 => {
                (r.pd, false, Some(Arc::clone(r)))
            }
            _ => return Err(AccessError::Invalid),
        };
        if window_pd != pd || bind.rkey.0 >> 8 != index {
            return Err(AccessError::NotAssociated);
        }
        let new = if bind.len == 0 {
            Entry::Unbound { pd, type2 }
        } else {
            let under = match table.get(&(bind.mr.0 >> 8)) {
                Some(Entry::Live(r)) if r.stag == bind.mr && r.kind == Kind::Region => {
                    Arc::clone(r)
                }
                _ => return Err(AccessError::Invalid),
            };
            if under.pd != pd {
                return Err(AccessError::NotAssociated);
            }
            if !under.access.has(Access::MW_BIND)
                || (bind.access.has(Access::REMOTE_WRITE) || bind.access.has(Access::REMOTE_ATOMIC))
                    && !under.access.has(Access::LOCAL_WRITE)
            {
                return Err(AccessError::Rights);
            }
            let offset = bind
                .addr
                .checked_sub(under.base)
                .ok_or(AccessError::Bounds)?;
            let end = offset.checked_add(bind.len).ok_or(AccessError::Wrap)?;
            if end > under.len {
                return Err(AccessError::Bounds);
            }
            let kind = if type2 {
                Kind::WindowType2 { qpn }
            } else {
                Kind::WindowType1
            };
            under.windows.fetch_add(1, Ordering::SeqCst);
            let base = if bind.access.has(Access::ZERO_BASED) {
                0
            } else {
                bind.addr
            };
            let what = Registration {
                start: under.start + offset,
                len: bind.len,
                base,
                access: bind.access,
                pd,
                present: under.present,
            };
            Entry::Live(Arc::new(region(bind.rkey, kind, &what, Some(under))))
        };
        table.insert(index, new);
        drop(table);
        if let Some(old) = old {
            old.retire();
        }
        Ok(())
    }

    /// Invalidates a type 2 window of queue pair `qpn`, as requested by a local invalidate or by a Send with Invalidate that
    /// arrived on this queue pair.
    pub fn invalidate(&self, stag: Stag, pd: u32, qpn: u32) -> Result<(), AccessError> {
        let mut table = self.table.write();
        let index = stag.0 >> 8;
        let Some(Entry::Live(region)) = table.get(&index) else {
            return Err(AccessError::Invalid);
        };
        if region.stag != stag {
            return Err(AccessError::Invalid);
        }
        // RFC 5040 §5.3 [rdmap-invalidate], §8.1.1 (7) [rdmap-inv-not-shared]: a peer may not invalidate STags that
        // several streams share (regions, type 1 windows).
        if region.pd != pd || region.kind != (Kind::WindowType2 { qpn }) {
            return Err(AccessError::NotAssociated);
        }
        let old = Arc::clone(region);
        table.insert(index, Entry::Unbound { pd, type2: true });
        drop(table);
        old.retire();
        Ok(())
    }

    /// Unbinds the windows of type 2 of queue pair `qpn`, whose stream has ended.
    pub(crate) fn unbind_windows(&self, pd: u32, qpn: u32) {
        let mut unbound = Vec::new();
        for entry in self.table.write().values_mut() {
            if let Entry::Live(window) = entry
                && window.pd == pd
                && window.kind == (Kind::WindowType2 { qpn })
            {
                unbound.push(Arc::clone(window));
                *entry = Entry::Unbound { pd, type2: true };
            }
        }
        for window in unbound {
            window.retire();
        }
    }

    /// The region or window with this STag.
    fn live(&self, stag: Stag) -> Result<Arc<Region>, AccessError> {
        let table = self.table.read();
        match table.get(&(stag.0 >> 8)) {
            Some(Entry::Live(r)) if r.stag == stag => Ok(Arc::clone(r)),
            _ => Err(AccessError::Invalid),
        }
    }

    /// The region with this STag. The table is not searched if the region is `last` and still registered.
    #[inline]
    fn live_again<'a>(
        &self,
        last: &'a mut LastRegion,
        stag: Stag,
    ) -> Result<&'a Arc<Region>, AccessError> {
        let is_last = |r: &Arc<Region>| r.stag == stag && r.valid.load(Ordering::Acquire);
        if !last.0.as_ref().is_some_and(is_last) {
            last.0 = Some(self.live(stag)?);
        }
        last.0.as_ref().ok_or(AccessError::Invalid)
    }

    /// The access check of RFC 5040 §8 and RFC 5041 §7.1, in this order: the STag exists, it is associated with the stream, it gives
    /// the rights, and the range does not wrap and is within the bounds.
    #[inline]
    pub fn check(
        &self,
        stag: Stag,
        pd: u32,
        qpn: u32,
        need: Access,
        to: To,
        len: u64,
    ) -> Result<Placement, AccessError> {
        let region = self.live(stag)?;
        let (offset, at) = region.grant(pd, qpn, need, to, len)?;
        Ok(Placement {
            region,
            offset,
            at,
            len,
        })
    }

    /// The access check for the memory of a receive. If the region ends before the range does, returns the part inside the region: adapters
    /// check only the memory that they write.
    pub fn check_receive(
        &self,
        stag: Stag,
        pd: u32,
        qpn: u32,
        to: To,
        len: u64,
    ) -> Result<Placement, AccessError> {
        let region = self.live(stag)?;
        let inside = region.base.saturating_add(region.len).saturating_sub(to.0);
        let len = len.min(inside.max(1));
        self.check(stag, pd, qpn, Access::LOCAL_WRITE, to, len)
    }

    /// The access check and the pin in one step, for callers that access the memory immediately and use one region
    /// repeatedly.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parameters of an access, and the last region"
    )]
    #[inline]
    pub fn pin<'a>(
        &self,
        last: &'a mut LastRegion,
        stag: Stag,
        pd: u32,
        qpn: u32,
        need: Access,
        to: To,
        len: u64,
    ) -> Result<Pinned<'a>, AccessError> {
        let region = self.live_again(last, stag)?;
        let (_, start) = region.grant(pd, qpn, need, to, len)?;
        let pin = region.pin().ok_or(AccessError::Invalid)?;
        Ok(Pinned {
            _pin: pin,
            start,
            len,
        })
    }

    /// The region whose STag has these upper 24 bits.
    pub fn find(&self, index: u32) -> Option<Arc<Region>> {
        match self.table.read().get(&index) {
            Some(Entry::Live(region)) if region.kind == Kind::Region => Some(Arc::clone(region)),
            _ => None,
        }
    }

    /// How many STags there are.
    pub fn len(&self) -> usize {
        self.table.read().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn region(stag: Stag, kind: Kind, what: &Registration, under: Option<Arc<Region>>) -> Region {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    Region {
        stag,
        number: NEXT.fetch_add(1, Ordering::Relaxed),
        kind,
        pd: what.pd,
        start: what.start,
        len: what.len,
        base: what.base,
        access: what.access,
        valid: AtomicBool::new(true),
        pins: AtomicU32::new(0),
        windows: AtomicU32::new(0),
        under,
        present: what.present,
        only: RwLock::new(None),
    }
}

/// An unused STag: 24 unpredictable bits of index, and 8 bits of key. Index 0 is not used, because STag 0 means
/// "none" on the wire. The largest index is not used either, because programs such as UCX use the key 0xffff_ffff for "no memory key".
fn free_stag(table: &Index, random: &mut dyn FnMut() -> u32) -> Result<Stag, Misuse> {
    for _ in 0..64 {
        let stag = Stag(random());
        let index = stag.0 >> 8;
        if index != 0 && index != 0x00ff_ffff && !table.contains_key(&index) {
            return Ok(stag);
        }
    }
    Err(Misuse::NoMemory)
}

impl Stag {
    /// The low 8 bits, which the owner of a window chooses.
    pub fn key(self) -> u8 {
        self.0.to_be_bytes()[3]
    }
}

#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
