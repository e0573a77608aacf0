//! Memory of the program, and memory that the device accesses for this library.
//!
//! This library copies the program's memory, or changes it by atomic operations. It accesses the memory by address. Rust references to
//! this memory exist only during the atomic operations.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use libc::{c_void, iovec};

use crate::limits;

/// A list of the program's buffers.
#[derive(Debug, Clone, Copy, Default)]
pub struct UserMemory {
    parts: [(usize, usize); limits::IOV],
    count: usize,
}

/// The error for a list that has more buffers than [`limits::IOV`], or whose array is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadList;

impl UserMemory {
    /// Wraps one buffer.
    ///
    /// # Safety
    /// The memory stays mapped, and the program does not access it, until the operation has completed.
    pub unsafe fn one(at: *const c_void, len: usize) -> Self {
        let mut parts = [(0, 0); limits::IOV];
        parts[0] = (at.expose_provenance(), len);
        Self { parts, count: 1 }
    }

    /// Wraps a list of buffers.
    ///
    /// # Safety
    /// `list` is null or has `count` elements. The requirements of [`Self::one`] apply to each.
    pub unsafe fn list(list: *const iovec, count: usize) -> Result<Self, BadList> {
        if count > limits::IOV || (count > 0 && list.is_null()) {
            return Err(BadList);
        }
        let mut parts = [(0, 0); limits::IOV];
        for (i, part) in parts.iter_mut().take(count).enumerate() {
            // SAFETY: `i` is less than `count`, the number of elements (guaranteed by the caller).
            let iov = unsafe { &*list.add(i) };
            *part = (iov.iov_base.expose_provenance(), iov.iov_len);
        }
        Ok(Self { parts, count })
    }

    /// Returns the address and the length of each buffer.
    pub fn parts(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.parts.iter().take(self.count).copied()
    }

    /// Returns the buffers without their first `skip` bytes.
    pub fn behind(&self, mut skip: usize) -> Self {
        let mut rest = *self;
        for (at, len) in rest.parts.iter_mut().take(self.count) {
            let now = skip.min(*len);
            *at = at.wrapping_add(now);
            *len -= now;
            skip -= now;
        }
        rest
    }

    /// Returns the pieces of the `len` bytes from byte `skip` on: for each the number of its buffer, the address and the length.
    /// Empty buffers are not counted.
    pub fn range(
        &self,
        mut skip: usize,
        mut len: usize,
    ) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let parts = self.parts().filter(|(_, len)| *len > 0).enumerate();
        parts.filter_map(move |(number, (at, size))| {
            let before = skip.min(size);
            let now = (size - before).min(len);
            skip -= before;
            len -= now;
            (now > 0).then_some((number, at.wrapping_add(before), now))
        })
    }

    /// Returns the total length in bytes.
    pub fn len(&self) -> usize {
        self.parts()
            .fold(0, |sum, (_, len)| sum.saturating_add(len))
    }

    /// Returns whether the total length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the only nonempty buffer, or the first buffer if all are empty. Returns `None` if several are not empty, or the list
    /// has no buffer.
    pub fn single(&self) -> Option<(usize, usize)> {
        let mut parts = self.parts().filter(|(_, len)| *len > 0);
        let first = parts.next().or_else(|| self.parts().next());
        if parts.next().is_some() { None } else { first }
    }

    /// Copies `from` to the buffers from byte `at` on. Returns the number of bytes that fitted.
    pub fn write(&self, mut at: usize, mut from: &[u8]) -> usize {
        let mut written = 0;
        for (start, len) in self.parts() {
            if at >= len {
                at -= len;
                continue;
            }
            let (now, rest) = from.split_at(from.len().min(len - at));
            let to = std::ptr::with_exposed_provenance_mut::<u8>(start.wrapping_add(at));
            // SAFETY: `at + now.len()` is inside a buffer that the program passed for this operation (guaranteed by the
            // callers of the constructors), and no reference to that memory exists.
            unsafe { std::ptr::copy(now.as_ptr(), to, now.len()) };
            written += now.len();
            from = rest;
            at = 0;
            if from.is_empty() {
                break;
            }
        }
        written
    }

    /// Fills `to` with the bytes of the buffers from byte `at` on. Returns the number of bytes that were copied.
    pub fn read(&self, mut at: usize, to: &mut [u8]) -> usize {
        let mut read = 0;
        for (start, len) in self.parts() {
            if at >= len {
                at -= len;
                continue;
            }
            let Some(to) = to.get_mut(read..) else { break };
            let now = to.len().min(len - at);
            let from = std::ptr::with_exposed_provenance::<u8>(start.wrapping_add(at));
            // SAFETY: as in `write`.
            unsafe { std::ptr::copy(from, to.as_mut_ptr(), now) };
            read += now;
            at = 0;
        }
        read
    }
}

/// Changes an element of `size` bytes in the program's memory by `f`, which may be called more than once. Returns the former
/// value. The change is atomic if the element is aligned to its size.
///
/// # Safety
/// The element is in memory that the program has registered for peers to write. If `f` returns its argument, memory that is
/// registered for peers to read is enough, because an unchanged element is not written.
pub unsafe fn change(at: usize, size: usize, f: impl Fn(u64) -> u64) -> u64 {
    macro_rules! at_once {
        ($atomic:ty, $int:ty) => {{
            let to = std::ptr::with_exposed_provenance_mut::<$int>(at);
            // SAFETY: the memory is registered (guaranteed by the caller) and aligned (checked below). Peers and the program
            // change it only by atomic operations meanwhile.
            let element = unsafe { <$atomic>::from_ptr(to) };
            let mut old = element.load(Ordering::Acquire);
            loop {
                let new = f(u64::from(old)) as $int;
                if new == old {
                    return u64::from(old); // Nothing is written, because the memory may be read-only.
                }
                match element.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return u64::from(old),
                    Err(now) => old = now,
                }
            }
        }};
    }
    match (size, at.is_multiple_of(size.max(1))) {
        (1, true) => at_once!(AtomicU8, u8),
        (2, true) => at_once!(AtomicU16, u16),
        (4, true) => at_once!(AtomicU32, u32),
        (8, true) => at_once!(AtomicU64, u64),
        _ => {}
    }
    let size = size.min(8);
    let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
    let mut bytes = [0; 8];
    // SAFETY: as above, except that these copies need no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), size);
        let old = u64::from_le_bytes(bytes);
        let new = f(old);
        if new != old {
            std::ptr::copy_nonoverlapping(new.to_le_bytes().as_ptr(), at, size);
        }
        old
    }
}

/// Pages of this library that the device reads and writes. Pages that were never used need no memory.
#[derive(Debug)]
pub struct Area {
    start: *mut u8,
    len: usize,
}

// SAFETY: the value owns the pages and may be used by any thread.
unsafe impl Send for Area {}

impl Area {
    /// Allocates pages for `len` bytes. Returns `None` if there is no memory.
    pub fn new(len: usize) -> Option<Self> {
        // SAFETY: this is a new mapping, which overlaps no other one.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        (at != libc::MAP_FAILED).then_some(Self {
            start: at.cast(),
            len,
        })
    }

    /// Returns the address of byte `at`.
    pub fn address(&self, at: usize) -> usize {
        self.start.expose_provenance().wrapping_add(at)
    }

    /// Returns the length in bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Returns bytes into which the device has placed data, or an empty slice if the range exceeds the area.
    ///
    /// # Safety
    /// The device does not write to the bytes while the result is live: they belong to a receive that has completed and was
    /// not posted again.
    pub unsafe fn received(&self, at: usize, len: usize) -> &[u8] {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return &[];
        }
        // SAFETY: the range is inside the mapping (checked above), initialized by the kernel, and not changed meanwhile
        // (guaranteed by the caller).
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }

    /// Returns bytes to fill before the device reads them, or an empty slice if the range exceeds the area.
    ///
    /// # Safety
    /// The device does not read the bytes while the result is live: they belong to a slot that no request uses.
    pub unsafe fn to_send(&mut self, at: usize, len: usize) -> &mut [u8] {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return &mut [];
        }
        // SAFETY: the range is inside the mapping (checked above), initialized by the kernel, and not used elsewhere
        // (guaranteed by the caller).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and its registration has ended, because owners drop the registration first.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(parts: &mut [&mut [u8]]) -> UserMemory {
        let list: Vec<iovec> = parts
            .iter_mut()
            .map(|p| iovec {
                iov_base: p.as_mut_ptr().cast(),
                iov_len: p.len(),
            })
            .collect();
        // SAFETY: the buffers of the test outlive the result.
        unsafe { UserMemory::list(list.as_ptr(), list.len()) }.unwrap()
    }

    #[test]
    fn bytes_go_across_buffers() {
        let (mut a, mut b, mut c) = ([0; 3], [0; 0], [0; 4]);
        let all = memory(&mut [&mut a, &mut b, &mut c]);
        assert_eq!(all.len(), 7);
        assert_eq!(all.write(2, b"hello!"), 5);
        assert_eq!((a, c), ([0, 0, b'h'], *b"ello"));
        let mut back = [0; 8];
        assert_eq!(all.read(1, &mut back), 6);
        assert_eq!(&back[..6], b"\0hello");
        assert_eq!(all.write(7, b"x"), 0);
        assert_eq!(all.read(9, &mut back), 0);
        assert_eq!((all.behind(4).len(), all.behind(8).len()), (3, 0));
        assert_eq!(all.behind(5).read(0, &mut back), 2);
        assert_eq!(&back[..2], b"lo");
    }

    #[test]
    fn a_range_has_the_bytes_that_are_asked_for() {
        let (mut a, mut b, mut c) = ([0; 3], [0; 0], [0; 4]);
        let starts = [a.as_ptr() as usize, c.as_ptr() as usize];
        let all = memory(&mut [&mut a, &mut b, &mut c]);
        for skip in 0..8 {
            for len in 0..8 {
                let wanted: Vec<(usize, usize)> = (0..7)
                    .skip(skip)
                    .take(len)
                    .map(|i| {
                        if i < 3 {
                            (0, starts[0] + i)
                        } else {
                            (1, starts[1] + i - 3)
                        }
                    })
                    .collect();
                let got: Vec<(usize, usize)> = all
                    .range(skip, len)
                    .flat_map(|(number, at, len)| (at..at + len).map(move |at| (number, at)))
                    .collect();
                assert_eq!(got, wanted, "{len} bytes from {skip}");
            }
        }
    }

    #[test]
    fn only_one_buffer_with_bytes_is_a_single_one() {
        let (mut a, mut b, mut c) = ([0; 3], [0; 0], [0; 4]);
        assert_eq!(memory(&mut [&mut a, &mut b]).single().map(|p| p.1), Some(3));
        assert_eq!(memory(&mut [&mut b, &mut a]).single().map(|p| p.1), Some(3));
        assert_eq!(memory(&mut [&mut b]).single().map(|p| p.1), Some(0));
        assert!(memory(&mut [&mut a, &mut c]).single().is_none());
        assert!(memory(&mut []).single().is_none());
        let too_many = [iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; limits::IOV + 1];
        // SAFETY: the list has `len()` elements.
        assert!(unsafe { UserMemory::list(too_many.as_ptr(), too_many.len()) }.is_err());
    }

    #[test]
    fn an_element_is_changed_wherever_it_lies() {
        let mut memory = [0_u64; 3];
        let start = memory.as_mut_ptr().expose_provenance();
        for size in [1, 2, 4, 8] {
            for at in 0..9 {
                let bits = u64::MAX >> (64 - 8 * size);
                // SAFETY: the element is inside `memory`.
                let (before, old) = unsafe {
                    change(start + at, size, |_| 0x0807_0605_0403_0201 & bits);
                    let before = change(start + at, size, |old| old + 1);
                    (before, change(start + at, size, |_| 0))
                };
                assert_eq!((before, old), (0x0807_0605_0403_0201 & bits, before + 1));
            }
        }
        assert_eq!(memory, [0; 3]);
    }

    #[test]
    fn an_area_has_a_bound() {
        let mut area = Area::new(8192).unwrap();
        // SAFETY: no device uses the area.
        unsafe {
            area.to_send(8190, 2).copy_from_slice(b"ab");
            assert_eq!(area.received(8190, 2), b"ab");
            assert!(area.received(8191, 2).is_empty() && area.to_send(usize::MAX, 2).is_empty());
        }
    }
}
