//! Access to registered user memory.
//!
//! The application has pointers to the same bytes and may write them at any time, so this code never creates a
//! `&[u8]` or `&mut [u8]` to them: bytes are copied by address. The address comes from a [`Pinned`], which only a
//! successful access check creates, and which keeps the region registered while it exists.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anywarp_core::verbs::mr::{Memory, Pinned, Placement};
use shared_memory::{copy, copy_last_word_last};
use smallvec::SmallVec;

use crate::sys::loaded::Library;
use crate::sys::pages::write_own_memory;
use crate::sys::thread::is_worker;

/// The memory of this process.
#[derive(Debug)]
pub(crate) struct UserMemory;

thread_local! {
    static TOLERATES_UNMAPPED: Cell<bool> = const { Cell::new(false) };
}

/// UCX's memory hooks. With these hooks, registered memory is unmapped before it is deregistered (decision 007).
static UNMAPS_FIRST: Library = Library::named(b"libucm");

/// Called when a region is registered: checks whether UCX's hooks are loaded.
pub(crate) fn look_for_hooks() {
    UNMAPS_FIRST.look();
}

/// Whether [`look_for_hooks`] has found the hooks.
#[cfg(test)]
pub(crate) fn has_hooks() -> bool {
    UNMAPS_FIRST.was_found()
}

/// While this value exists in a process with UCX, bytes that this thread places in unmapped registered memory are
/// lost, and the process continues (decision 007).
#[derive(Debug)]
pub(crate) struct TolerateUnmapped {
    /// Whether an outer value exists.
    outer: bool,
}

impl TolerateUnmapped {
    /// In the engine's thread, returns a value to keep while received datagrams are placed. The program may free memory at that time, and
    /// libraries that cache registrations (UCX) unmap it before they deregister it.
    pub(crate) fn in_worker() -> Option<Self> {
        is_worker().then(|| Self::if_needed(UNMAPS_FIRST.was_found()))
    }

    fn if_needed(needed: bool) -> Self {
        let outer = TOLERATES_UNMAPPED.get();
        TOLERATES_UNMAPPED.set(outer || needed);
        Self { outer }
    }
}

impl Drop for TolerateUnmapped {
    fn drop(&mut self) {
        TOLERATES_UNMAPPED.set(self.outer);
    }
}

/// Makes the kernel copy `bytes` to `target`, which need not be mapped. Returns false if the kernel does not permit
/// that to this process.
///
/// # Safety
/// As for [`write_own_memory`].
unsafe fn copy_by_kernel(target: *mut u8, bytes: &[u8]) -> bool {
    static REFUSED: AtomicBool = AtomicBool::new(false);
    if REFUSED.load(Ordering::Relaxed) {
        return false;
    }
    // SAFETY: the caller's promise.
    let result = unsafe { write_own_memory(target, bytes) };
    let copied = result.is_ok() || result == Err(libc::EFAULT);
    if !copied {
        REFUSED.store(true, Ordering::Relaxed);
    }
    copied
}

/// The part `[offset, offset + len)` of a pinned range, cut to what exists.
fn range(of: &Pinned<'_>, offset: u64, len: u64) -> (*mut u8, usize) {
    let offset = offset.min(of.len());
    let len = len.min(of.len() - offset);
    let address = usize::try_from(of.start() + offset).unwrap_or(0);
    (
        std::ptr::with_exposed_provenance_mut(address),
        usize::try_from(len).unwrap_or(0),
    )
}

impl Memory for UserMemory {
    fn place(&self, to: &Pinned<'_>, offset: u64, bytes: &[u8]) {
        let (target, len) = range(to, offset, bytes.len() as u64);
        if TOLERATES_UNMAPPED.get() {
            // SAFETY: `target..target+len` lies inside the pinned region (`range` cuts it).
            if unsafe { copy_by_kernel(target, bytes.get(..len).unwrap_or(bytes)) } {
                return;
            }
        }
        // The program may poll the last word of a message. An Atomic Write must be stored atomically, and any aligned word may be that of an
        // Atomic Write.
        // SAFETY: `target..target+len` lies inside the pinned region (`range` cuts it), which the application promised
        // to keep mapped while it is registered.
        unsafe { copy_last_word_last(bytes.as_ptr(), target, len) };
    }

    fn place_both(&self, to: &Pinned<'_>, first: &[u8], second: &[u8]) {
        let (target, len) = range(to, 0, (first.len() + second.len()) as u64);
        if TOLERATES_UNMAPPED.get() || len < first.len() {
            self.place(to, 0, first);
            self.place(to, first.len() as u64, second);
            return;
        }
        // SAFETY: as in `place`; `first` is not longer than `len`.
        unsafe { copy(first.as_ptr(), target, first.len()) };
        // SAFETY: `first` is not longer than `len`, so this address is in the region or just behind it.
        let behind = unsafe { target.add(first.len()) };
        // SAFETY: as in `place`; `len` is at most the length of both.
        unsafe { copy_last_word_last(second.as_ptr(), behind, len - first.len()) };
    }

    fn gather(&self, from: &Pinned<'_>, offset: u64, len: u64, out: &mut Vec<u8>) {
        let (source, len) = range(from, offset, len);
        out.reserve(len);
        let end = out.len();
        // SAFETY: the source lies inside the pinned region; `reserve` made room for `len` bytes after `end`, which do
        // not overlap it since they belong to our own vector.
        unsafe { copy(source, out.as_mut_ptr().add(end), len) };
        // SAFETY: the `len` bytes after `end` were just written.
        unsafe { out.set_len(end + len) };
    }

    fn update(&self, at: &Pinned<'_>, change: &mut dyn FnMut(u64) -> u64) -> u64 {
        let (word, len) = range(at, 0, 8);
        if len < 8 || word.addr() % 8 != 0 {
            return 0;
        }
        // SAFETY: eight bytes inside the pinned region, aligned (checked above); all access is atomic.
        let word = unsafe { AtomicU64::from_ptr(word.cast()) };
        let mut old = word.load(Ordering::SeqCst);
        loop {
            match word.compare_exchange_weak(old, change(old), Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return old,
                Err(seen) => old = seen,
            }
        }
    }
}

/// A range of writable memory that stays valid for `'pin`: a part of a pinned region, or a buffer of the engine.
///
/// System calls, and copies to and from shared memory, take a `UserSlice` instead of a Rust slice, because the application
/// may access the same bytes at any time.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct UserSlice<'pin> {
    range: libc::iovec,
    pin: PhantomData<&'pin [u8]>,
}

impl<'pin> UserSlice<'pin> {
    /// The part `[offset, offset + len)` of a pinned range, cut to what exists.
    pub(crate) fn new(of: &'pin Pinned<'_>, offset: u64, len: u64) -> Self {
        let (start, len) = range(of, offset, len);
        Self::raw(start, len)
    }

    /// A buffer of the engine.
    pub(crate) fn buffer(bytes: &'pin mut [u8]) -> Self {
        Self::raw(bytes.as_mut_ptr(), bytes.len())
    }

    fn raw(start: *mut u8, len: usize) -> Self {
        Self {
            range: libc::iovec {
                iov_base: start.cast(),
                iov_len: len,
            },
            pin: PhantomData,
        }
    }

    /// The part `[offset, offset + len)`, cut to what exists.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len());
        let start = self.start().wrapping_add(offset);
        Self::raw(start, len.min(self.len() - offset))
    }

    /// Address of the first byte. The `len` bytes from there may be accessed by raw pointer during `'pin`.
    pub(crate) fn start(self) -> *mut u8 {
        self.range.iov_base.cast()
    }

    /// Number of bytes.
    pub(crate) fn len(self) -> usize {
        self.range.iov_len
    }

    /// The range for a vectored system call.
    pub(crate) fn iovec(self) -> libc::iovec {
        self.range
    }
}

/// A part of a pinned range of user memory: `len` bytes from `offset` on.
#[derive(Debug)]
pub(crate) struct PinnedPart<'a> {
    pin: Pinned<'a>,
    offset: u64,
    len: u64,
}

impl PinnedPart<'_> {
    /// The bytes of the part.
    pub(crate) fn slice(&self) -> UserSlice<'_> {
        UserSlice::new(&self.pin, self.offset, self.len)
    }
}

/// The memory for a payload that is received in several parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unfilled<'a> {
    /// The ranges of user memory.
    pub(crate) places: &'a [Placement],
    /// Bytes that have been received.
    pub(crate) filled: u64,
    /// Bytes that are missing.
    pub(crate) missing: u64,
}

/// No further range is added to a vectored system call that has more ranges than this. The kernel's limit is 1024.
const RANGES_MAX: usize = 500;

impl<'a> Unfilled<'a> {
    /// Pins the ranges that are to be filled, up to the limit of one system call. Returns the number of their bytes.
    /// `None` if a region was deregistered.
    pub(crate) fn pin(self, parts: &mut SmallVec<[PinnedPart<'a>; 4]>) -> Option<usize> {
        let (mut skip, mut left, mut bytes) = (self.filled, self.missing, 0);
        for place in self.places {
            if skip >= place.len() {
                skip -= place.len();
                continue;
            }
            let len = left.min(place.len() - skip);
            parts.push(PinnedPart {
                pin: place.pin()?,
                offset: skip,
                len,
            });
            skip = 0;
            left -= len;
            bytes += usize::try_from(len).unwrap_or(0);
            if left == 0 || parts.len() > RANGES_MAX {
                break;
            }
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anywarp_core::verbs::access::Access;
    use anywarp_core::verbs::mr::Registration;
    use anywarp_core::wire::To;

    use crate::sys::pages::Pages;

    // RFC 7306 §5 [atomic-exclusive]
    #[test]
    fn an_atomic_of_another_stream_in_the_middle_of_one_is_not_lost() {
        let engine = crate::engine::engine().unwrap();
        let word = Box::new(AtomicU64::new(0));
        let base = word.as_ptr().expose_provenance() as u64;
        let what = Registration {
            start: base,
            len: 8,
            base,
            access: Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
            pd: 7,
            present: None,
        };
        let regions = &engine.rnic.regions;
        let region = regions.register(&what, &mut || 0x5a5a).unwrap();
        let of_stream = |qpn| {
            let access = Access::REMOTE_ATOMIC;
            let place = regions.check(region.stag(), 7, qpn, access, To(base), 8);
            place.unwrap()
        };
        let (one, other) = (of_stream(1), of_stream(2));
        let (one, other) = (one.pin().unwrap(), other.pin().unwrap());
        let mut between = Some(100);
        let old = UserMemory.update(&one, &mut |old| {
            // The word was read, and has not been written yet.
            if let Some(add) = between.take() {
                assert_eq!(UserMemory.update(&other, &mut |old| old + add), 0);
            }
            old + 1
        });
        assert_eq!((old, word.load(Ordering::SeqCst)), (100, 101));
        drop((one, other));
        regions.deregister(&region).unwrap();
    }

    #[test]
    fn placing_into_unmapped_registered_memory_raises_no_signal() {
        let engine = crate::engine::engine().unwrap();
        let pages = Pages::new(4096).unwrap();
        let what = Registration {
            start: pages.start() as u64,
            len: 4096,
            base: pages.start() as u64,
            access: Access::LOCAL_WRITE,
            pd: 7,
            present: None,
        };
        let regions = &engine.rnic.regions;
        let region = regions.register(&what, &mut || 0x005a_5a01).unwrap();
        let place = regions.check(region.stag(), 7, 1, Access::LOCAL_WRITE, To(what.base), 100);
        let place = place.unwrap();
        let pinned = place.pin().unwrap();
        let _tolerant = TolerateUnmapped::if_needed(true);
        // An inner value does not end the effect of the outer one.
        drop(TolerateUnmapped::if_needed(false));
        UserMemory.place(&pinned, 3, b"some bytes");
        let mut found = Vec::new();
        UserMemory.gather(&pinned, 0, 16, &mut found);
        assert_eq!(found, b"\0\0\0some bytes\0\0\0");
        drop(pages);
        UserMemory.place(&pinned, 3, b"some bytes");
        UserMemory.place(&pinned, 8, b"one word");
        drop(pinned);
        regions.deregister(&region).unwrap();
    }
}
