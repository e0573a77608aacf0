//! Memory that is registered in advance, to copy the program's data through.

use std::sync::{Arc, Mutex};

use crate::ffi::{self, Ptr};
use crate::fork;
use crate::lock::lock;
use crate::region::Region;

/// The sizes of pooled buffers.
const CLASSES: [usize; 6] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// The largest buffer of a pool.
pub(crate) const LARGEST: usize = 1 << 20;
/// The bytes that are registered together for buffers of one size, unless a single buffer is larger.
const SLAB: usize = 256 << 10;

/// Buffers that are registered with the same access rights: one pool is for sending, another for receiving. The buffer that was
/// released last is used first, because it is still in the processor's cache.
#[derive(Debug)]
pub(crate) struct Pool {
    pd: Ptr<ffi::ibv_pd>,
    access: u32,
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None`: the slab was ended, and another one may take its place.
    slabs: Vec<Option<Slab>>,
    bytes: usize,
    /// The free buffers of each size.
    free: [Vec<FreeBuffer>; CLASSES.len()],
}

#[derive(Debug)]
struct Slab {
    /// The number of its buffers that are in use.
    used: usize,
    /// The size of its buffers, as an index into [`CLASSES`].
    class: usize,
    /// Dropped before the memory that it covers, because fields are dropped in order of declaration.
    region: Region,
    bytes: Box<[u8]>,
}

#[derive(Debug, Clone, Copy)]
struct FreeBuffer {
    addr: u64,
    lkey: u32,
    rkey: u32,
    /// The index of its slab.
    slab: usize,
}

impl State {
    /// Adds a slab with buffers of a size. Returns whether it was registered.
    fn add(&mut self, pd: *mut ffi::ibv_pd, access: u32, class: usize, len: usize) -> bool {
        // `vec!` may return pages that are not resident. A write to each page makes it resident.
        let mut bytes = vec![0u8; len].into_boxed_slice();
        for page in bytes.chunks_mut(4096) {
            if let Some(first) = page.first_mut() {
                *first = 0;
                std::hint::black_box(first);
            }
        }
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the pool's owner keeps the domain live, and the bytes are dropped after the region.
        let Ok(region) = (unsafe { Region::new(pd, addr, len, access) }) else {
            return false;
        };
        let slab = Some(Slab {
            used: 0,
            class,
            region,
            bytes,
        });
        let index = match self.slabs.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.slabs.push(None);
                self.slabs.len() - 1
            }
        };
        if let Some(place) = self.slabs.get_mut(index) {
            *place = slab;
        }
        self.bytes += len;
        self.divide(index, class);
        true
    }

    /// Divides an idle slab into free buffers of a size.
    fn divide(&mut self, index: usize, class: usize) {
        let (Some(Some(slab)), Some(size)) = (self.slabs.get_mut(index), CLASSES.get(class)) else {
            return;
        };
        if let Some(free) = self.free.get_mut(slab.class) {
            free.retain(|buffer| buffer.slab != index);
        }
        slab.class = class;
        let addr = slab.bytes.as_mut_ptr().expose_provenance() as u64;
        let (lkey, rkey) = (slab.region.lkey(), slab.region.rkey());
        if let Some(free) = self.free.get_mut(class) {
            free.extend((0..slab.bytes.len() / size).rev().map(|i| FreeBuffer {
                addr: addr + (i * size) as u64,
                lkey,
                rkey,
                slab: index,
            }));
        }
    }

    /// Returns the indices and lengths of the slabs whose buffers are all free.
    fn idle(&self) -> impl Iterator<Item = (usize, usize)> {
        let slabs = self.slabs.iter().enumerate();
        slabs.filter_map(|(index, slab)| {
            let slab = slab.as_ref().filter(|slab| slab.used == 0)?;
            Some((index, slab.bytes.len()))
        })
    }

    /// Ends an idle slab.
    fn end(&mut self, index: usize) {
        let Some(slab) = self.slabs.get_mut(index).and_then(Option::take) else {
            return;
        };
        self.bytes -= slab.bytes.len();
        if let Some(free) = self.free.get_mut(slab.class) {
            free.retain(|buffer| buffer.slab != index);
        }
    }

    /// Called when no buffer of a size is free: provides some if possible, from a new slab, or else from the memory of idle slabs of
    /// other sizes. So buffers of one size that the program no longer uses leave room for other sizes.
    fn provide(&mut self, pd: *mut ffi::ibv_pd, access: u32, class: usize, most: usize) {
        let len = CLASSES.get(class).map_or(SLAB, |size| SLAB.max(*size));
        if self.bytes + len <= most && self.add(pd, access, class, len) {
            return;
        }
        // An idle slab that is long enough is divided anew, and keeps its registration.
        let long = self.idle().filter(|(_, other)| *other >= len);
        if let Some((index, _)) = long.min_by_key(|(_, other)| *other) {
            self.divide(index, class);
            return;
        }
        let idle: usize = self.idle().map(|(_, len)| len).sum();
        if self.bytes - idle + len > most {
            return;
        }
        while self.bytes + len > most {
            let Some((index, _)) = self.idle().next() else {
                return;
            };
            self.end(index);
        }
        self.add(pd, access, class, len);
    }
}

/// A buffer of a pool, which is released when this is dropped.
#[derive(Debug)]
pub struct Piece {
    pool: Arc<Pool>,
    class: usize,
    buffer: FreeBuffer,
}

impl Pool {
    /// Returns an empty pool that registers at most `most` bytes.
    pub(crate) fn new(pd: *mut ffi::ibv_pd, access: u32, most: usize) -> Self {
        Self {
            pd: Ptr(pd),
            access,
            most,
            state: Mutex::default(),
        }
    }

    /// Returns the number of registered bytes.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.state).bytes
    }

    /// Returns a buffer for `len` bytes, which may be larger. `None` if `len` is too large, if all buffers that are large enough are in
    /// use and the limit is reached, or if registration fails.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Option<Piece> {
        let class = CLASSES.iter().position(|c| *c >= len)?;
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.free.get(class)?.is_empty() {
            state.provide(self.pd.0, self.access, class, self.most);
        }
        let larger = state.free.iter_mut().enumerate().skip(class);
        let (class, buffer) = larger
            .filter_map(|(class, free)| Some((class, free.pop()?)))
            .next()?;
        if let Some(Some(slab)) = state.slabs.get_mut(buffer.slab) {
            slab.used += 1;
        }
        Some(Piece {
            pool: Arc::clone(self),
            class,
            buffer,
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if fork::is_child() {
            // In a child, registered memory may be unmapped (`ibv_fork_init(3)`), so it cannot be freed.
            let state = self.state.get_mut();
            let state = state.unwrap_or_else(std::sync::PoisonError::into_inner);
            let _leaked = std::mem::ManuallyDrop::new(std::mem::take(&mut state.slabs));
        }
    }
}

impl Piece {
    /// Returns the address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.buffer.addr
    }

    /// Returns the keys for local requests and for those of the peer.
    #[must_use]
    pub fn keys(&self) -> (u32, u32) {
        (self.buffer.lkey, self.buffer.rkey)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut state = lock(&self.pool.state);
        if let Some(Some(slab)) = state.slabs.get_mut(self.buffer.slab) {
            slab.used -= 1;
        }
        if let Some(free) = state.free.get_mut(self.class) {
            free.push(self.buffer);
        }
    }
}
