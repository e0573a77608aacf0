//! Memory that two processes of one user share.
//!
//! The peer may write to the memory at any time, so no `&[u8]` to it is ever made: bytes are copied by offset, words
//! are atomic, and the code that reads a number from the memory checks the number before it uses it.

mod copy;
mod order;
mod stream;

pub use copy::copy;
pub use order::copy_last_word_last;
use stream::copy_for_other;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, Statx, StatxFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// The name of a memory file, as shown in `/proc/PID/fd`.
const NAME: &str = "anywarp-carrier";

/// A mapping of shared memory.
#[derive(Debug)]
pub struct Shared {
    start: usize,
    len: usize,
}

/// A descriptor that is closed by a system call. `OwnedFd` calls `close` of the C library, which a library that contains this crate may
/// have replaced.
#[derive(Debug)]
struct Own(RawFd);

impl AsFd for Own {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self` exists.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: only `self` has this descriptor.
        unsafe { rustix::io::close(self.0) };
    }
}

/// The size of the file must not change, because an access beyond its end causes SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

impl Shared {
    /// New memory of `len` bytes, all zero, and the descriptor by which the peer opens it.
    pub fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(NAME, flags)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        let shared = Self::map(file.as_fd(), len)?;
        Ok((shared, file))
    }

    /// Allocates all pages of new memory. Otherwise they are allocated when they are first written, and SIGBUS is raised if the system has
    /// none.
    pub fn allocate(&self, file: &OwnedFd) -> io::Result<()> {
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, self.len as u64)?;
        Ok(())
    }

    /// Opens the memory of a descriptor of another process of this user.
    pub fn open(pid: u32, fd: u32, len: usize) -> io::Result<Self> {
        let path = format!("/proc/{pid}/fd/{fd}");
        // Reading the link does not follow it. Following it may ask the server of a network file system.
        let is_named = |path: &str| {
            let link = rustix::fs::readlink(path, Vec::new())?;
            io::Result::Ok(link.to_bytes().starts_with(b"/memfd:anywarp-carrier"))
        };
        if !is_named(&path)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // The peer may name any file of any process, and the file must not block this process. So until the file is known
        // to be a memory file, it is only examined: O_PATH opens no device or FIFO and sends no request to a
        // file system, and STATX_DONT_SYNC does not wait for the server of a file system in user space (FUSE) either.
        let seen = Own(
            rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?.into_raw_fd(),
        );
        let stat = stat_at_once(seen.as_fd())?;
        let ours = device(&stat) == memory_device()?
            && stat.stx_uid == rustix::process::geteuid().as_raw()
            && stat.stx_size == len as u64
            && is_named(&format!("/proc/self/fd/{}", seen.0))?;
        if !ours {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let path = format!("/proc/self/fd/{}", seen.0);
        // Without O_NONBLOCK, a lease that the peer holds on the file (fcntl(2), F_SETLEASE) would delay this `open` for 45
        // seconds.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = Own(rustix::fs::open(path, flags, Mode::empty())?.into_raw_fd());
        let stat = rustix::fs::fstat(file.as_fd())?;
        let seals = rustix::fs::fcntl_get_seals(file.as_fd())?;
        if !seals.contains(SEALS) || u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Self::map(file.as_fd(), len)
    }

    fn map(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // The memory is mapped without the C library, because the descriptor is closed without it. ThreadSanitizer would see a call of
        // the C library's `mmap` but not that the descriptor is closed, and would report the next use of its number in another thread
        // as a data race.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the address is null, so the kernel chooses unused addresses for the new mapping.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)?
        };
        Ok(Self {
            start: start.expose_provenance(),
            len,
        })
    }

    #[inline]
    fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| std::ptr::with_exposed_provenance_mut(self.start + at))
    }

    /// The word at `at`, which is a multiple of 8. Outside of the memory it is a word with the value 0.
    #[inline]
    pub fn word(&self, at: usize) -> &AtomicU64 {
        static NONE: AtomicU64 = AtomicU64::new(0);
        match self.at(at, 8) {
            // SAFETY: eight bytes of the mapping, which lives as long as `self`. The mapping begins at a page, so a multiple
            // of 8 is aligned. The peer changes the word by atomic operations.
            Some(word) if at.is_multiple_of(8) => unsafe { AtomicU64::from_ptr(word.cast()) },
            _ => &NONE,
        }
    }

    /// The 32-bit word at `at`, which is a multiple of 8. Outside of the memory it is a word with the value 0.
    #[inline]
    pub fn flag(&self, at: usize) -> &AtomicU32 {
        static NONE: AtomicU32 = AtomicU32::new(0);
        match self.at(at, 4) {
            // SAFETY: as in `word`.
            Some(word) if at.is_multiple_of(8) => unsafe { AtomicU32::from_ptr(word.cast()) },
            _ => &NONE,
        }
    }

    /// Copies `bytes` to offset `at`. Does nothing if they do not fit.
    #[inline]
    pub fn put(&self, at: usize, bytes: &[u8]) {
        if let Some(to) = self.at(at, bytes.len()) {
            // SAFETY: `Self::at` has checked that `to` has room for `bytes`. They do not overlap, because `bytes` is not in the
            // shared memory.
            unsafe { copy_for_other(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies bytes from offset `at` to `out`. Does nothing if they are not inside the memory.
    pub fn get(&self, at: usize, out: &mut [u8]) {
        if let Some(from) = self.at(at, out.len()) {
            // SAFETY: `Self::at` has checked that the bytes are in the mapping, and `out` is not in the shared memory.
            unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        }
    }

    /// Appends `len` bytes from offset `at` to `out`. Does nothing if they are not inside the memory.
    #[inline]
    pub fn append_to(&self, at: usize, len: usize, out: &mut Vec<u8>) {
        let Some(from) = self.at(at, len) else { return };
        out.reserve(len);
        let end = out.len();
        // SAFETY: `Self::at` has checked that the bytes are in the mapping. `reserve` made room for them after `end`, in
        // memory that is not shared.
        unsafe {
            copy(from, out.as_mut_ptr().add(end), len);
            out.set_len(end + len);
        }
    }

    /// Copies `len` bytes from `from` to offset `at`. Does nothing if they do not fit.
    ///
    /// # Safety
    /// `from` points to `len` readable bytes. They may overlap the shared memory, and others may write them at the same time.
    #[inline]
    pub unsafe fn put_from(&self, at: usize, from: *const u8, len: usize) {
        if let Some(to) = self.at(at, len) {
            // SAFETY: `Self::at` has checked that there is room, and the caller promises the rest.
            unsafe { copy_for_other(from, to, len) };
        }
    }

    /// Copies `len` bytes from offset `at` to `to`, the last word last. Does nothing if they are not inside the memory.
    ///
    /// # Safety
    /// `to` points to `len` writable bytes. They may overlap the shared memory, and others may access them at the same time.
    #[inline]
    pub unsafe fn get_to(&self, at: usize, to: *mut u8, len: usize) {
        if let Some(from) = self.at(at, len) {
            // SAFETY: as in `put_from`.
            unsafe { copy_last_word_last(from, to, len) };
        }
    }
}

/// The numbers that together identify an open file on this machine: the device number and the inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId(u64, u64);

impl FileId {
    /// Returns the identity of the file that a descriptor refers to. `None`: the descriptor is not open.
    pub fn of(fd: RawFd) -> Option<Self> {
        if fd < 0 {
            return None;
        }
        // SAFETY: the number is only passed to the kernel, which checks it.
        let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()?;
        Some(Self(stat.st_dev, stat.st_ino))
    }
}

/// Returns the attributes of a file without a request to a file system in user space.
fn stat_at_once(file: BorrowedFd<'_>) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(rustix::fs::statx(
        file,
        c"",
        flags,
        StatxFlags::BASIC_STATS,
    )?)
}

fn device(stat: &Statx) -> (u32, u32) {
    (stat.stx_dev_major, stat.stx_dev_minor)
}

/// The device number of all files that `memfd_create` makes. No file of a mounted file system has this number.
fn memory_device() -> io::Result<(u32, u32)> {
    static DEVICE: OnceLock<(u32, u32)> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(*device);
    }
    let file = Own(rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC)?.into_raw_fd());
    let found = device(&stat_at_once(file.as_fd())?);
    Ok(*DEVICE.get_or_init(|| found))
}

impl Drop for Shared {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // ThreadSanitizer sees a call of the C library's `munmap`, and then forgets the accesses to these addresses.
        // SAFETY: mapped in `map`, and not referenced any more.
        unsafe { libc::munmap(start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    #[test]
    fn bytes_written_to_one_mapping_are_in_the_other() {
        let (one, file) = Shared::create(8192).unwrap();
        let fd = u32::try_from(file.as_raw_fd()).unwrap();
        let other = Shared::open(std::process::id(), fd, 8192).unwrap();
        one.put(4090, b"over the edge of a page");
        one.word(64).store(7, Ordering::Release);
        let mut bytes = [0; 23];
        other.get(4090, &mut bytes);
        assert_eq!(&bytes, b"over the edge of a page");
        assert_eq!(other.word(64).load(Ordering::Acquire), 7);
        // Accesses outside of the memory have no effect.
        other.put(8180, &[1; 20]);
        assert_eq!(other.word(8192).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_number_that_is_used_again_has_another_file() {
        let (_shared, file) = Shared::create(4096).unwrap();
        let (_other, second) = Shared::create(4096).unwrap();
        let id = FileId::of(file.as_raw_fd()).unwrap();
        assert_eq!(FileId::of(file.as_raw_fd()), Some(id));
        assert_ne!(FileId::of(second.as_raw_fd()), Some(id));
        assert_eq!(FileId::of(1_000_000), None);
        assert_eq!(FileId::of(-1), None);
    }

    #[test]
    fn only_memory_made_for_it_is_opened() {
        let pid = std::process::id();
        let other = rustix::fs::memfd_create("something", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&other, 8192).unwrap();
        let fd = |f: &OwnedFd| u32::try_from(f.as_raw_fd()).unwrap();
        assert!(Shared::open(pid, fd(&other), 8192).is_err());
        // A file with the right name whose size could be reduced.
        let loose = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(Shared::open(pid, fd(&loose), 8192).is_err());
        let (_shared, good) = Shared::create(4096).unwrap();
        assert!(Shared::open(pid, fd(&good), 8192).is_err(), "another size");
        assert!(Shared::open(pid, fd(&good), 4096).is_ok());
        assert!(Shared::open(pid, 1_000_000, 4096).is_err());
    }
}
