//! The kernel's reports about the program's memory: `userfaultfd(2)` reports when memory is unmapped, moved or emptied.
//!
//! Only these events are used. Memory is registered with the descriptor for write protection but never protected, so accesses of the
//! program are never stopped. A thread that unmaps memory waits in the kernel until its event
//! has been read.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_ulong, c_void};

use crate::errno;

/// A change of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The memory was unmapped, or replaced by another mapping.
    Gone { start: usize, end: usize },
    /// The pages were discarded (`madvise(2)`); the mapping remains.
    Emptied { start: usize, end: usize },
    /// The memory was moved (`mremap(2)`).
    Moved { start: usize, end: usize, to: usize },
}

/// The descriptor, and a page that is registered with it and never changes (see [`Watch::settled`]).
#[derive(Debug)]
pub(crate) struct Watch {
    fd: RawFd,
    page: usize,
    broken: AtomicBool,
}

const UFFD_USER_MODE_ONLY: c_int = 1;
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: c_ulong = 0x8010_aa01;
const UFFDIO_WRITEPROTECT: c_ulong = 0xc018_aa06;
const MODE_WP: u64 = 2;
/// Write protection, and events for moved, emptied and unmapped memory. The last bit requests exact addresses, and exists since
/// Linux 5.18. Earlier kernels miscount simultaneous changes, so that [`Watch::settled`] would not be reliable.
const FEATURES: u64 = 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 11;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Span {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Protect {
    start: u64,
    len: u64,
    mode: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    arg: [u64; 3],
}

/// The size of a page.
pub(crate) fn page() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: the call takes only a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(page).unwrap_or(4096)
    })
}

/// The pages that a range touches.
pub(crate) fn pages(range: &Range<usize>) -> Range<usize> {
    let page = page();
    let end = range.end.checked_next_multiple_of(page);
    range.start / page * page..end.unwrap_or(usize::MAX / page * page)
}

impl Watch {
    /// Opens the descriptor.
    ///
    /// # Errors
    ///
    /// The errno of the kernel: EPERM (seccomp), ENOSYS, or EINVAL before Linux 5.18.
    pub(crate) fn open() -> Result<Self, c_int> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: the call only creates a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = c_int::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(errno());
        }
        let mut watch = Self {
            fd,
            page: 0,
            broken: AtomicBool::new(false),
        };
        watch.start().inspect_err(|_| watch.close())?;
        Ok(watch)
    }

    /// Prepares the descriptor and the page.
    fn start(&mut self) -> Result<(), c_int> {
        let mut api = Api {
            api: UFFD_API,
            features: FEATURES,
            ioctls: 0,
        };
        self.control(UFFDIO_API, &raw mut api)?;
        // SAFETY: this is a new mapping.
        let page = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), page(), protection, flags, -1, 0)
        };
        if page == libc::MAP_FAILED {
            return Err(errno());
        }
        self.page = page.expose_provenance();
        self.add(&(self.page..self.page + self::page()))?;
        if self.settled() {
            Ok(())
        } else {
            Err(libc::ENOSYS)
        }
    }

    /// Closes the descriptor, and unmaps the page. Nothing else may use this object.
    pub(crate) fn close(&self) {
        // SAFETY: both belong to this object.
        unsafe {
            libc::close(self.fd);
            if self.page > 0 {
                let page = std::ptr::with_exposed_provenance_mut(self.page);
                libc::munmap(page, self::page());
            }
        }
    }

    fn control<T>(&self, request: c_ulong, argument: *mut T) -> Result<(), c_int> {
        // SAFETY: each request is passed with its structure.
        let done = unsafe { libc::ioctl(self.fd, request as _, argument) };
        if done < 0 { Err(errno()) } else { Ok(()) }
    }

    /// Starts reporting changes of these pages.
    pub(crate) fn add(&self, pages: &Range<usize>) -> Result<(), c_int> {
        let mut register = Register {
            start: pages.start as u64,
            len: pages.len() as u64,
            mode: MODE_WP,
            ioctls: 0,
        };
        self.control(UFFDIO_REGISTER, &raw mut register)
    }

    /// Stops reporting changes of these pages, some of which may be unmapped.
    pub(crate) fn forget(&self, pages: &Range<usize>) {
        let mut span = Span {
            start: pages.start as u64,
            len: pages.len() as u64,
        };
        let _gone_already = self.control(UFFDIO_UNREGISTER, &raw mut span);
    }

    /// Returns whether all changes that have begun have been read. The kernel counts a change from before it happens until
    /// its event has been read, and refuses this request meanwhile.
    pub(crate) fn settled(&self) -> bool {
        let mut protect = Protect {
            start: self.page as u64,
            len: page() as u64,
            mode: 0,
        };
        !self.broken.load(Ordering::SeqCst)
            && self.control(UFFDIO_WRITEPROTECT, &raw mut protect).is_ok()
    }

    /// Waits for changes. Returns `false` if there will be none.
    pub(crate) fn wait(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        loop {
            // SAFETY: the list has one element.
            let ready = unsafe { libc::poll(&raw mut poll, 1, -1) };
            if ready > 0 && poll.revents & libc::POLLIN != 0 {
                return true;
            }
            if ready >= 0 || errno() != libc::EINTR {
                self.broken.store(true, Ordering::SeqCst);
                self.release();
                return false;
            }
        }
    }

    /// Closes the kernel's object, which releases threads that wait for their events to be read.
    fn release(&self) {
        // Other threads may be about to use the number of the descriptor. It stays in use, so that no other object gets it.
        // SAFETY: no memory is passed, and the descriptor belongs to this object.
        unsafe {
            let other = libc::eventfd(0, libc::EFD_CLOEXEC);
            if other < 0 || libc::dup3(other, self.fd, libc::O_CLOEXEC) < 0 {
                libc::close(self.fd);
            }
            if other >= 0 {
                libc::close(other);
            }
        }
    }

    /// Returns the next change, if there is one.
    pub(crate) fn next(&self) -> Option<Change> {
        loop {
            let mut message = Message {
                event: 0,
                reserved: [0; 7],
                arg: [0; 3],
            };
            let to = (&raw mut message).cast::<c_void>();
            // SAFETY: the buffer has the size of one structure.
            let n = unsafe { libc::read(self.fd, to, size_of::<Message>()) };
            if n < 0 && errno() == libc::EINTR {
                continue;
            }
            if usize::try_from(n) != Ok(size_of::<Message>()) {
                return None;
            }
            let [first, second, third] = message.arg.map(|arg| usize::try_from(arg).unwrap_or(0));
            return Some(match message.event {
                EVENT_UNMAP => Change::Gone {
                    start: first,
                    end: second,
                },
                EVENT_REMOVE => Change::Emptied {
                    start: first,
                    end: second,
                },
                EVENT_REMAP => Change::Moved {
                    start: first,
                    end: first + third,
                    to: second,
                },
                // No other events were requested.
                _ => continue,
            });
        }
    }
}

/// Returns whether these pages are private anonymous memory. For other memory some changes are not reported: another process
/// can truncate a file, and segments of `shmat(2)` are detached without an event.
pub(crate) fn anonymous(pages: &Range<usize>) -> bool {
    // Names of files may contain any bytes.
    std::fs::read("/proc/self/maps")
        .is_ok_and(|maps| anonymous_in(&String::from_utf8_lossy(&maps), pages))
}

fn anonymous_in(maps: &str, pages: &Range<usize>) -> bool {
    let mut at = pages.start;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(access), Some(inode)) =
            (fields.next(), fields.next(), fields.nth(2))
        else {
            continue;
        };
        let number = |text| usize::from_str_radix(text, 16).ok();
        let Some((start, end)) = range
            .split_once('-')
            .and_then(|(start, end)| Some((number(start)?, number(end)?)))
        else {
            continue;
        };
        if end <= at {
            continue;
        }
        if start > at || !access.ends_with('p') || inode != "0" {
            return false;
        }
        at = end;
        if at >= pages.end {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn only_private_memory_without_a_file_counts() {
        let maps = "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 r--p 00000000 00:00 0    [heap]\n\
                    5000-6000 rw-s 00000000 00:01 0    /dev/zero (deleted)\n6000-7000 rw-p 00000000 fe:00 12  /lib/x\n";
        assert!(anonymous_in(maps, &(0x1000..0x2000)));
        assert!(anonymous_in(maps, &(0x2000..0x4000)));
        assert!(!anonymous_in(maps, &(0x3000..0x5000)), "a hole");
        assert!(!anonymous_in(maps, &(0x5000..0x6000)), "shared");
        assert!(!anonymous_in(maps, &(0x6000..0x7000)), "a file");
        assert!(!anonymous_in(maps, &(0x8000..0x9000)), "nothing");
        let here = vec![1u8; 3 * page()];
        let at = here.as_ptr().addr();
        assert!(anonymous(&pages(&(at..at + here.len()))));
    }

    #[test]
    fn names_of_mapped_files_need_not_be_text() {
        let name = OsStr::from_bytes(b"anywarp-buffers-\xff");
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, [1u8; 8]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: this is a new mapping.
        let mapped = unsafe {
            let null = std::ptr::null_mut();
            libc::mmap(
                null,
                8,
                libc::PROT_READ,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        std::fs::remove_file(&path).unwrap();
        assert_ne!(mapped, libc::MAP_FAILED);
        assert!(!anonymous(&pages(&(mapped.addr()..mapped.addr() + 8))));
        let here = vec![1u8; page()];
        let at = here.as_ptr().addr();
        assert!(anonymous(&pages(&(at..at + here.len()))));
        // SAFETY: the memory was mapped above.
        unsafe { libc::munmap(mapped, 8) };
    }
}
