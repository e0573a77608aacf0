//! Page-aligned memory of this process, and queries about pages of user memory.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use super::errno;
use crate::process::Inherited;

/// Zeroed pages of this process.
#[derive(Debug)]
pub struct Pages {
    start: usize,
    len: usize,
}

impl Pages {
    /// Maps `len` bytes, rounded up to whole pages.
    pub fn new(len: usize) -> Option<Self> {
        let (read_write, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, read_write, private, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self {
            start: start.expose_provenance(),
            len,
        })
    }

    /// Maps `len` bytes that are zero and read-only. They take no memory.
    pub fn zeroes(len: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self {
            start: start.expose_provenance(),
            len,
        })
    }

    /// Maps one piece of 2 MiB repeatedly until `len` bytes are covered. They can be written and use no more memory
    /// than one piece.
    pub fn repeated(len: usize) -> Option<Self> {
        const PIECE: usize = 2 << 20;
        let file =
            rustix::fs::memfd_create("anywarp-null", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
        rustix::fs::ftruncate(&file, PIECE as u64).ok()?;
        let area = Self::zeroes(len)?;
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
        );
        for at in (0..len).step_by(PIECE) {
            let place = std::ptr::with_exposed_provenance_mut(area.start + at);
            let n = PIECE.min(len - at);
            // SAFETY: replaces a part of the mapping that was just made, to which there is no other reference.
            let r = unsafe { libc::mmap(place, n, access, flags, file.as_raw_fd(), 0) };
            if r == libc::MAP_FAILED {
                return None;
            }
        }
        Some(area)
    }

    /// Address of the first byte.
    pub fn start(&self) -> usize {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by a constructor, and not referenced any more.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.start), self.len) };
    }
}

/// The page size of this host, bytes.
pub fn page_size() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// Whether the kernel has `MADV_POPULATE_READ` (since 5.14). Tested with memory that is certainly readable.
fn can_populate() -> bool {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let here = (&raw const KNOWN).expose_provenance() as u64;
            let known = advise_populate(here, 1, false).is_ok();
            KNOWN.store(1 + u32::from(known), Ordering::Relaxed);
            known
        }
        n => n == 2,
    }
}

/// Applies `MADV_POPULATE_READ` or `_WRITE` to the pages of a range. It fails if one of them cannot be accessed in
/// this way.
fn advise_populate(start: u64, len: u64, write: bool) -> Result<(), i32> {
    const READ: libc::c_int = 22;
    const WRITE: libc::c_int = 23;
    let page = page_size();
    let end = start
        .checked_add(len)
        .and_then(|e| e.checked_next_multiple_of(page));
    let from = start & !(page - 1);
    let (Some(end), Ok(at)) = (end, usize::try_from(from)) else {
        return Err(libc::ENOMEM);
    };
    let len = usize::try_from(end - from).map_err(|_| libc::ENOMEM)?;
    let advice = if write { WRITE } else { READ };
    // SAFETY: changes no byte; if a page is not mapped, the call fails.
    match unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(at), len, advice) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Whether every page of `[start, start + len)` can be read, or, if `write` is set, written. Faults them in, as on-demand paging
/// does.
pub fn is_there(start: u64, len: u64, write: bool) -> bool {
    match advise_populate(start, len, write) {
        Ok(()) => return true,
        // A kernel before 5.14 only reports whether pages are mapped.
        Err(libc::EINVAL) if !can_populate() => {}
        Err(_) => return false,
    }
    pages_mapped(start, len)
}

/// Whether each page of a range is mapped, by `mincore(2)`.
fn pages_mapped(start: u64, len: u64) -> bool {
    const PAGES: usize = 4096;
    let size = page_size();
    let Some(end) = start.checked_add(len) else {
        return false;
    };
    let mut at = start & !(size - 1);
    let mut resident = [0_u8; PAGES];
    while at < end {
        let n = (end - at).min(PAGES as u64 * size);
        let (Ok(page), Ok(bytes)) = (usize::try_from(at), usize::try_from(n)) else {
            return false;
        };
        // SAFETY: mincore reads no user memory. It writes one byte for each page into `resident`, which has room for them.
        let r = unsafe {
            libc::mincore(
                std::ptr::with_exposed_provenance_mut(page),
                bytes,
                resident.as_mut_ptr(),
            )
        };
        if r != 0 {
            return false;
        }
        at += n;
    }
    true
}

/// Locks pages in memory (`mlock(2)`), within the limit of the process.
pub fn lock_pages(start: u64, len: u64) -> Result<(), i32> {
    let (Ok(at), Ok(len)) = (usize::try_from(start), usize::try_from(len)) else {
        return Err(libc::ENOMEM);
    };
    // SAFETY: changes no byte; if a page is not mapped, the call fails.
    match unsafe { libc::mlock(std::ptr::with_exposed_provenance(at), len) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Unlocks pages that were locked. They may have been unmapped.
pub fn unlock_pages(start: u64, len: u64) {
    if let (Ok(at), Ok(len)) = (usize::try_from(start), usize::try_from(len)) {
        // SAFETY: changes no byte. If a page is not mapped the call fails, and that page is not locked.
        unsafe { libc::munlock(std::ptr::with_exposed_provenance(at), len) };
    }
}

/// Whether all of `[start, start + len)` is mapped.
pub fn is_mapped(start: u64, len: u64) -> bool {
    // The kernel would round an end in the last page of the address space up to 0. If the range began in the first page, `msync` would
    // take it for empty, and succeed.
    let end = start.checked_add(len);
    if end
        .and_then(|end| end.checked_next_multiple_of(page_size()))
        .is_none()
    {
        return false;
    }
    // Valgrind treats `msync` as a read of the memory, and would report bytes of the page that the program has not initialized.
    if is_watched() {
        return len == 0 || pages_mapped(start, len);
    }
    let first = start & !(page_size() - 1);
    let (Ok(at), Ok(bytes)) = (usize::try_from(first), usize::try_from(start - first + len)) else {
        return false;
    };
    // MS_ASYNC writes nothing back and touches no page: the kernel walks its list of mappings and fails if there is a
    // gap. `mincore` would need a byte for each page.
    // SAFETY: the kernel only inspects the mappings.
    len == 0 || unsafe { libc::syscall(libc::SYS_msync, at, bytes, libc::MS_ASYNC) } == 0
}

/// Whether the process runs under Valgrind.
fn is_watched() -> bool {
    static WATCHED: Inherited<bool> = Inherited::new(|| {
        std::env::var("LD_PRELOAD").is_ok_and(|preloaded| preloaded.contains("vgpreload"))
    });
    *WATCHED.get()
}

/// Whether all of `[start, start + len)` is mapped with the right to write. `mappings` is `/proc/self/maps`. `None`: the kernel cannot
/// tell (before Linux 6.11).
pub fn is_writable(mappings: BorrowedFd<'_>, start: u64, len: u64) -> Option<bool> {
    /// `struct procmap_query` of `<linux/fs.h>`.
    #[repr(C)]
    #[derive(Default)]
    struct Query {
        size: u64,
        flags: u64,
        addr: u64,
        vma_start: u64,
        vma_end: u64,
        vma_flags: u64,
        vma_page_size: u64,
        vma_offset: u64,
        inode: u64,
        dev_major: u32,
        dev_minor: u32,
        vma_name_size: u32,
        build_id_size: u32,
        vma_name_addr: u64,
        build_id_addr: u64,
    }
    const PROCMAP_QUERY: libc::Ioctl = libc::_IOWR::<Query>(b'f' as u32, 17);
    /// Only a mapping with the right to write is found.
    const PROCMAP_QUERY_VMA_WRITABLE: u64 = 2;
    // Valgrind does not know the request.
    if is_watched() {
        return None;
    }
    let Some(end) = start.checked_add(len) else {
        return Some(false);
    };
    let mut at = start;
    while at < end {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags: PROCMAP_QUERY_VMA_WRITABLE,
            addr: at,
            ..Query::default()
        };
        // SAFETY: the kernel writes into `query`, which has the size that it contains.
        match unsafe { libc::ioctl(mappings.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } {
            0 if query.vma_end > at => at = query.vma_end,
            _ => return (errno() == libc::ENOENT).then_some(false),
        }
    }
    Some(true)
}

/// Lets the kernel copy `bytes` to `target` in this process. For memory that is not mapped, the kernel returns EFAULT and
/// raises no signal.
///
/// # Errors
/// The errno, also if only a part was copied (EFAULT).
///
/// # Safety
/// Every mapped byte of `target..target + bytes.len()` is memory that the caller may write.
pub(crate) unsafe fn write_own_memory(target: *mut u8, bytes: &[u8]) -> Result<(), i32> {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: target.cast(),
        iov_len: bytes.len(),
    };
    let this = rustix::process::getpid().as_raw_pid();
    // SAFETY: `local` is only read. The caller may write at `target`, and the kernel checks that it is mapped.
    let n = unsafe { libc::process_vm_writev(this, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(n) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(libc::EFAULT),
        Err(_) => Err(errno()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_page_without_the_right_to_write_is_found_in_the_middle() {
        let page = page_size();
        let len = usize::try_from(page).unwrap();
        let area = Pages::new(3 * len).unwrap();
        let start = area.start() as u64;
        let maps = File::open("/proc/self/maps").unwrap();
        let Some(before) = is_writable(maps.as_fd(), start, 3 * page) else {
            // Before Linux 6.11 the kernel cannot tell.
            return;
        };
        assert!(before);
        let middle = std::ptr::with_exposed_provenance_mut(area.start() + len);
        // SAFETY: a page of `area`, which nothing else uses.
        assert_eq!(unsafe { libc::mprotect(middle, len, libc::PROT_READ) }, 0);
        let is_writable = |from: u64, pages: u64| {
            let at = start + from * page;
            is_writable(maps.as_fd(), at, pages * page).unwrap()
        };
        assert!(!is_writable(0, 3) && !is_writable(1, 1));
        assert!(is_writable(0, 1) && is_writable(2, 1));
        assert!(is_mapped(start, 3 * page));
        assert!(!is_mapped(u64::MAX - page, page));
    }
}
