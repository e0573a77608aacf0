//! Registered memory of a socket, and memory of the caller.
//!
//! A peer may write to registered memory at any time, and other threads of the program may write to the caller's memory. So no Rust
//! reference to either is created, except to an atomic: bytes are copied by address, as in `engine/mem.rs`.

use std::io;
use std::sync::Arc;

use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::wr::Sge;
use anywarp_core::wire::Stag;
use anywarp_engine::engine::Engine;
use anywarp_engine::objects::MemoryRegion;
use anywarp_engine::sys::pages::Pages;

use super::flow::Pieces;
use crate::ffi::misuse;

/// Registered pages.
pub(super) struct Buffer {
    pages: Pages,
    region: MemoryRegion,
    len: usize,
}

impl Buffer {
    /// Allocates and registers `len` zeroed bytes. The peer may write them if `remote`.
    pub(super) fn new(
        engine: &'static Engine,
        pd: &Arc<Pd>,
        len: usize,
        remote: bool,
    ) -> io::Result<Self> {
        let no_memory = || io::Error::from_raw_os_error(libc::ENOMEM);
        let len = len.max(1);
        let pages = Pages::new(len).ok_or_else(no_memory)?;
        let access = if remote {
            Access::LOCAL_WRITE | Access::REMOTE_WRITE
        } else {
            Access::LOCAL_WRITE
        };
        // SAFETY: the pages belong to this buffer, and `Drop` deregisters them before they are unmapped.
        let region = unsafe { register(engine, pd, pages.start(), len, access) }?;
        Ok(Self { pages, region, len })
    }

    /// Address of the buffer's first byte, for peers.
    pub(super) fn addr(&self) -> u64 {
        self.pages.start() as u64
    }

    /// The STag of the buffer, which is its local and its remote key.
    pub(super) fn key(&self) -> Stag {
        self.region.region().stag()
    }

    /// A scatter/gather element for a part of the buffer.
    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr() + at as u64,
            len: u32::try_from(len).unwrap_or(0),
            lkey: self.key(),
        }
    }

    /// The address of `[at, at + len)`, or `None` if that is not a part of the buffer.
    fn place(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| std::ptr::with_exposed_provenance_mut(self.pages.start() + at))
    }

    /// Copies bytes of the caller's memory, from its byte `skip` on, to `parts` of the buffer.
    pub(super) fn fill(&self, parts: Pieces, from: &Caller, mut skip: usize) {
        for (at, len) in parts {
            let Some(place) = self.place(at, len) else {
                return;
            };
            from.read(skip, place, len);
            skip += len;
        }
    }

    /// Copies `parts` of the buffer to the caller's memory, from its byte `skip` on.
    pub(super) fn drain(&self, parts: Pieces, to: &Caller, mut skip: usize) {
        for (at, len) in parts {
            let Some(place) = self.place(at, len) else {
                return;
            };
            to.write(skip, place, len);
            skip += len;
        }
    }

    /// Copies `bytes` to offset `at` of the buffer.
    pub(super) fn store(&self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.place(at, bytes.len()) {
            // SAFETY: `place` has this many bytes in the buffer's pages; `bytes` is separate memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        }
    }

    /// Returns `N` bytes from offset `at`, or zeros if they are not inside the buffer.
    pub(super) fn load<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        if let Some(place) = self.place(at, N) {
            // SAFETY: `place` has `N` bytes in the buffer's pages; `out` is a local.
            unsafe { std::ptr::copy_nonoverlapping(place, out.as_mut_ptr(), N) };
        }
        out
    }

    /// Returns a 32-bit word that the peer writes last: acquire ordering makes the bytes that were placed before it visible.
    /// 0 if the word is not inside the buffer or not aligned.
    pub(super) fn word(&self, at: usize) -> u32 {
        match self.place(at, 4) {
            Some(place) if place.addr().is_multiple_of(4) => {
                // SAFETY: the pointer is to four aligned bytes of the buffer's pages.
                let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(place.cast()) };
                u32::from_le(word.load(std::sync::atomic::Ordering::Acquire))
            }
            _ => 0,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // This does not fail, because no memory window is bound to the region.
        let _ = self.region.deregister();
    }
}

/// Registers memory with the rights `access`.
///
/// # Safety
/// The requirements of [`MemoryRegion::register`] apply.
pub(super) unsafe fn register(
    engine: &'static Engine,
    pd: &Arc<Pd>,
    start: usize,
    len: usize,
    access: Access,
) -> io::Result<MemoryRegion> {
    let start = start as u64;
    // SAFETY: upheld by the caller.
    let region = unsafe { MemoryRegion::register(engine, pd, start, len as u64, start, access.0) };
    region.map_err(|e| {
        let errno = e.map_or(libc::EFAULT, |e| misuse("rsocket", &e));
        io::Error::from_raw_os_error(errno)
    })
}

/// Memory that the caller passed to a function, in one or more parts. It is valid for that call only.
pub(super) struct Caller {
    first: (usize, usize),
    rest: Vec<(usize, usize)>,
    len: usize,
}

impl Caller {
    /// Wraps memory in one part.
    ///
    /// # Safety
    /// `[start, start + len)` is readable memory of the caller as long as the result is live, and writable if data is
    /// received into it.
    pub(super) unsafe fn new(start: *const u8, len: usize) -> Self {
        Self {
            first: (start.expose_provenance(), len),
            rest: Vec::new(),
            len,
        }
    }

    /// Wraps memory in several parts. `None` if their total length exceeds `isize::MAX`, the most that a call can return.
    ///
    /// # Safety
    /// The requirements of [`Self::new`] apply to each of `parts`.
    pub(super) unsafe fn gather(parts: impl Iterator<Item = (*const u8, usize)>) -> Option<Self> {
        let mut all = Self {
            first: (0, 0),
            rest: Vec::new(),
            len: 0,
        };
        for (i, (start, len)) in parts.enumerate() {
            let part = (start.expose_provenance(), len);
            all.len = all
                .len
                .checked_add(len)
                .filter(|n| *n <= isize::MAX as usize)?;
            if i == 0 {
                all.first = part;
            } else {
                all.rest.push(part);
            }
        }
        Some(all)
    }

    /// Returns the total length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Copies up to `len` bytes from byte `skip` on into a vector.
    pub(super) fn copy(&self, skip: usize, len: usize) -> Vec<u8> {
        let len = len.min(self.len.saturating_sub(skip));
        let mut out = vec![0_u8; len];
        self.read(skip, out.as_mut_ptr(), len);
        out
    }

    /// Returns the address and the length of each part of `[skip, skip + len)`.
    fn parts(&self, mut skip: usize, mut len: usize) -> impl Iterator<Item = (usize, usize)> {
        std::iter::once(self.first)
            .chain(self.rest.iter().copied())
            .filter_map(move |(start, n)| {
                let passed = skip.min(n);
                skip -= passed;
                let n = (n - passed).min(len);
                len -= n;
                (n > 0).then_some((start + passed, n))
            })
    }

    /// Copies `[skip, skip + len)` to `to`, which has room for `len`.
    fn read(&self, skip: usize, to: *mut u8, len: usize) {
        let mut at = 0;
        for (start, n) in self.parts(skip, len) {
            let from: *const u8 = std::ptr::with_exposed_provenance(start);
            // SAFETY: `from` is a part of the caller's memory (guaranteed by the caller of `new`); `to` has room for `len`
            // bytes, and the parts have at most `len` bytes in total. The ranges may overlap if the program passes memory of
            // this library.
            unsafe { std::ptr::copy(from, to.wrapping_add(at), n) };
            at += n;
        }
    }

    /// Copies `len` bytes at `from` to `[skip, skip + len)`.
    fn write(&self, skip: usize, from: *const u8, len: usize) {
        let mut at = 0;
        for (start, n) in self.parts(skip, len) {
            let to: *mut u8 = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: as in `read`, in the other direction: `from` has `len` bytes.
            unsafe { std::ptr::copy(from.wrapping_add(at), to, n) };
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_caller_are_one_range() {
        let (a, b, c) = ([1_u8, 2, 3], [0_u8; 0], [4_u8, 5]);
        let parts = [&a[..], &b[..], &c[..]];
        // SAFETY: the parts are locals that are live during the call.
        let all = unsafe { Caller::gather(parts.iter().map(|p| (p.as_ptr(), p.len()))) }.unwrap();
        assert_eq!(all.len(), 5);
        assert_eq!(all.copy(0, 9), [1, 2, 3, 4, 5]);
        assert_eq!(all.copy(2, 2), [3, 4]);
        assert_eq!(all.copy(4, 1), [5]);
        assert_eq!(all.copy(7, 1), []);
    }

    #[test]
    fn parts_longer_than_a_call_can_return_are_refused() {
        let parts = [(std::ptr::null(), usize::MAX / 2), (std::ptr::null(), 2)];
        // SAFETY: the memory is not accessed.
        assert!(unsafe { Caller::gather(parts.into_iter()) }.is_none());
    }
}
