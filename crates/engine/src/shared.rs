//! Memory that two processes of one user share.
//!
//! The peer may write to it at any time, so no `&[u8]` to it is ever made: bytes are copied in and out by offset, words are
//! atomic, and every number that is read there is checked by the code that reads it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::mem::UserSlice;

/// The name that its memory has among a process's descriptors.
const NAME: &str = "anywarp-carrier";

/// A mapping of shared memory.
#[derive(Debug)]
pub(crate) struct Shared {
    start: usize,
    len: usize,
}

/// Length and size may not change, or reading could end in SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

impl Shared {
    /// New memory of `len` bytes, all zero, and the descriptor that the peer finds it by.
    pub(crate) fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(NAME, flags)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        let shared = Self::map(&file, len)?;
        Ok((shared, file))
    }

    /// The memory behind a descriptor of another process of this user.
    pub(crate) fn open(pid: u32, fd: u32, len: usize) -> io::Result<Self> {
        let path = format!("/proc/{pid}/fd/{fd}");
        // Opened with O_PATH first: opening a device or FIFO that a peer names could have side effects.
        let seen = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&seen)?;
        let link = rustix::fs::readlink(&path, Vec::new())?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw()
            && u64::try_from(stat.st_size) == Ok(len as u64)
            && link.to_bytes().starts_with(b"/memfd:anywarp-carrier");
        if !ours {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let path = format!("/proc/self/fd/{}", seen.as_raw_fd());
        let file: OwnedFd = File::options().read(true).write(true).open(path)?.into();
        let stat = rustix::fs::fstat(&file)?;
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SEALS) || u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Self::map(&file, len)
    }

    fn map(file: impl AsFd, len: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping, where the kernel finds room.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            start: start.expose_provenance(),
            len,
        })
    }

    fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| std::ptr::with_exposed_provenance_mut(self.start + at))
    }

    /// The word at `at`, which is a multiple of 8; 0 if it is outside.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        static NONE: AtomicU64 = AtomicU64::new(0);
        match self.at(at, 8) {
            // SAFETY: eight bytes of the mapping, which lives as long as `self`; a page begins with it, so a multiple of
            // 8 is aligned. The peer changes it by atomic operations; what else it does is its own harm.
            Some(word) if at.is_multiple_of(8) => unsafe { AtomicU64::from_ptr(word.cast()) },
            _ => &NONE,
        }
    }

    /// The 32-bit word at `at`, which is a multiple of 8; 0 if it is outside.
    pub(crate) fn flag(&self, at: usize) -> &AtomicU32 {
        static NONE: AtomicU32 = AtomicU32::new(0);
        match self.at(at, 4) {
            // SAFETY: as in `word`.
            Some(word) if at.is_multiple_of(8) => unsafe { AtomicU32::from_ptr(word.cast()) },
            _ => &NONE,
        }
    }

    /// Copies `bytes` to offset `at`; nothing if they do not fit.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        if let Some(to) = self.at(at, bytes.len()) {
            // SAFETY: `to` has room for them (`at`), and is no memory of ours.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies bytes from offset `at` to `out`; nothing if they are not there.
    pub(crate) fn get(&self, at: usize, out: &mut [u8]) {
        if let Some(from) = self.at(at, out.len()) {
            // SAFETY: the bytes are in the mapping (`at`), `out` is memory of ours.
            unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        }
    }

    /// Copies user memory to offset `at`; nothing if it does not fit.
    pub(crate) fn put_from(&self, at: usize, from: UserSlice<'_>) {
        if let Some(to) = self.at(at, from.len()) {
            // SAFETY: there is room (`at`), and the slice is valid while its lifetime lasts. Both may overlap: a program can
            // register any memory of its process.
            unsafe { std::ptr::copy(from.start(), to, from.len()) };
        }
    }

    /// Fills user memory with bytes from offset `at`; nothing if they are not there.
    pub(crate) fn get_to(&self, at: usize, to: UserSlice<'_>) {
        if let Some(from) = self.at(at, to.len()) {
            // SAFETY: as in `put_from`.
            unsafe { std::ptr::copy(from, to.start(), to.len()) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: mapped in `map`, and not referenced any more.
        unsafe { libc::munmap(start, self.len) };
    }
}

/// Copies from the memory of process `pid`, from `from` on, to where `to` says, memory that is pinned or our own, which it
/// fills. `mark` says which address of the process must hold which value: a number that another process has got since does
/// not pass for it.
pub(crate) fn pull(pid: u32, from: u64, to: &[UserSlice<'_>], mark: (u64, u64)) -> io::Result<()> {
    let len: usize = to.iter().map(|slice| slice.len()).sum();
    let mut value = 0_u64;
    let mut local: smallvec::SmallVec<[libc::iovec; 6]> =
        to.iter().map(|slice| slice.iovec()).collect();
    local.push(libc::iovec {
        iov_base: (&raw mut value).cast(),
        iov_len: 8,
    });
    let there = |address: u64, len: usize| libc::iovec {
        iov_base: std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0)),
        iov_len: len,
    };
    let remote = [there(from, len), there(mark.0, 8)];
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the local vectors are user slices, which are valid during the call, and `value`; the
    // remote ones are addresses of another process, which the kernel checks.
    let n = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as _,
            remote.as_ptr(),
            remote.len() as _,
            0,
        )
    };
    match usize::try_from(n) {
        Ok(n) if n == len + 8 && value == mark.1 => Ok(()),
        Ok(_) => Err(io::ErrorKind::NotFound.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_one_mapping_has_the_other_has() {
        let (one, file) = Shared::create(8192).unwrap();
        let fd = u32::try_from(file.as_raw_fd()).unwrap();
        let other = Shared::open(std::process::id(), fd, 8192).unwrap();
        one.put(4090, b"over the edge of a page");
        one.word(64).store(7, Ordering::Release);
        let mut bytes = [0; 23];
        other.get(4090, &mut bytes);
        assert_eq!(&bytes, b"over the edge of a page");
        assert_eq!(other.word(64).load(Ordering::Acquire), 7);
        // Outside there is nothing, and nothing breaks.
        other.put(8180, &[1; 20]);
        assert_eq!(other.word(8192).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn only_memory_made_for_it_is_opened() {
        let pid = std::process::id();
        let other = rustix::fs::memfd_create("something", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&other, 8192).unwrap();
        let fd = |f: &OwnedFd| u32::try_from(f.as_raw_fd()).unwrap();
        assert!(Shared::open(pid, fd(&other), 8192).is_err());
        // Of the right name, but it could shrink under us.
        let loose = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(Shared::open(pid, fd(&loose), 8192).is_err());
        let (_shared, good) = Shared::create(4096).unwrap();
        assert!(Shared::open(pid, fd(&good), 8192).is_err(), "another size");
        assert!(Shared::open(pid, fd(&good), 4096).is_ok());
        assert!(Shared::open(pid, 1_000_000, 4096).is_err());
    }

    #[test]
    fn a_process_that_is_not_the_one_is_noticed() {
        let mark = Box::new(0x1234_5678_u64);
        let address = (&raw const *mark).expose_provenance() as u64;
        let there = *b"bytes to pull";
        let from = there.as_ptr().expose_provenance() as u64;
        let mut here = [0_u8; 13];
        let to = [UserSlice::buffer(&mut here)];
        let pid = std::process::id();
        pull(pid, from, &to, (address, *mark)).unwrap();
        assert!(pull(pid, from, &to, (address, 1)).is_err());
        assert!(pull(pid, 16, &to, (address, *mark)).is_err());
        assert_eq!(here, there);
    }
}
