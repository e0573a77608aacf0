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
    slabs: Vec<Slab>,
    bytes: usize,
    /// The free buffers of each size.
    free: [Vec<FreeBuffer>; CLASSES.len()],
}

#[derive(Debug)]
struct Slab {
    /// Dropped before the memory that it covers, because fields are dropped in order of declaration.
    _region: Region,
    _bytes: Box<[u8]>,
}

#[derive(Debug, Clone, Copy)]
struct FreeBuffer {
    addr: u64,
    lkey: u32,
    rkey: u32,
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

    /// Returns a buffer for `len` bytes. `None` if `len` is too large, if all buffers are in use and the limit is reached,
    /// or if registration fails.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Option<Piece> {
        let class = CLASSES.iter().position(|c| *c >= len)?;
        let size = *CLASSES.get(class)?;
        let mut state = lock(&self.state);
        let state = &mut *state;
        let free = state.free.get_mut(class)?;
        let slab = SLAB.max(size);
        if free.is_empty() && state.bytes + slab <= self.most {
            // `vec!` may return pages that are not resident. A write to each page makes it resident.
            let mut bytes = vec![0u8; slab].into_boxed_slice();
            for page in bytes.chunks_mut(4096) {
                if let Some(first) = page.first_mut() {
                    *first = 0;
                    std::hint::black_box(first);
                }
            }
            let addr = bytes.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: the pool's owner keeps the domain live, and the bytes are dropped after the region.
            let region = unsafe { Region::new(self.pd.0, addr, slab, self.access) }.ok()?;
            let (lkey, rkey) = (region.lkey(), region.rkey());
            free.extend((0..slab / size).rev().map(|i| FreeBuffer {
                addr: addr + (i * size) as u64,
                lkey,
                rkey,
            }));
            state.bytes += slab;
            state.slabs.push(Slab {
                _region: region,
                _bytes: bytes,
            });
        }
        Some(Piece {
            pool: Arc::clone(self),
            class,
            buffer: free.pop()?,
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
        if let Some(free) = lock(&self.pool.state).free.get_mut(self.class) {
            free.push(self.buffer);
        }
    }
}
