//! Registered memory, and the devices that it is registered with.

use crate::ffi;
use libc::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// A pointer of the verbs libraries, which may be used by any thread.
pub(crate) struct Ptr<T>(pub(crate) *mut T);

impl<T> std::fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}

// SAFETY: the objects of verbs and rdma_cm may be used by any thread; who destroys them is settled by their owners.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}

/// An open device, with what all its sockets share. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Ptr<ffi::Context>,
    pub(crate) pd: Ptr<ffi::Pd>,
    pub(crate) channel: Ptr<ffi::CompChannel>,
    iwarp: bool,
}

impl Device {
    pub(crate) fn open(context: *mut ffi::Context) -> Result<Self, c_int> {
        // SAFETY: `context` is an open device of librdmacm, which stays open; both objects are new.
        unsafe {
            let pd = ffi::ibv_alloc_pd(context);
            if pd.is_null() {
                return Err(crate::errno());
            }
            let channel = ffi::ibv_create_comp_channel(context);
            if channel.is_null() {
                return Err(crate::errno());
            }
            let fd = (*channel).fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
                return Err(crate::errno());
            }
            let iwarp = (*(*context).device).transport_type == ffi::TRANSPORT_IWARP;
            Ok(Self {
                context: Ptr(context),
                pd: Ptr(pd),
                channel: Ptr(channel),
                iwarp,
            })
        }
    }
}

/// What memory is used for, and so what a peer may do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Message buffers: no peer names them.
    Local,
    /// Sends: the peer reads it.
    Source,
    /// Receives: this end's Reads write it.
    Sink,
    /// Persistent receives: the peer writes it.
    Target,
}

/// A registration with one device, until it is dropped.
#[derive(Debug)]
pub(crate) struct Region {
    mr: Ptr<ffi::Mr>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

impl Region {
    pub(crate) fn new(device: &Device, addr: u64, len: u64, what: Use) -> Result<Self, c_int> {
        let access = match what {
            Use::Source => ffi::ACCESS_REMOTE_READ,
            // The sink of a Read is named on the wire in iWARP, and must be open to it.
            Use::Sink if device.iwarp => ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE,
            Use::Local | Use::Sink => ffi::ACCESS_LOCAL_WRITE,
            Use::Target => ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE,
        };
        let len = usize::try_from(len).map_err(|_| libc::EINVAL)?;
        let addr = std::ptr::with_exposed_provenance_mut::<c_void>(
            usize::try_from(addr).map_err(|_| libc::EFAULT)?,
        );
        // SAFETY: the library checks the range; what it may do with it is the caller's contract.
        let mr = unsafe { ffi::ibv_reg_mr(device.pd.0, addr, len, access) };
        if mr.is_null() {
            return Err(crate::errno());
        }
        // SAFETY: a registration that was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self {
            mr: Ptr(mr),
            lkey,
            rkey,
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nothing else ends it.
        unsafe { ffi::ibv_dereg_mr(self.mr.0) };
    }
}

/// Memory of the program behind a handle: registered for each use when that first comes.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    regions: Mutex<Vec<(usize, Use, Arc<Region>)>>,
}

impl Memory {
    pub(crate) fn new(addr: u64, len: u64) -> Self {
        Self {
            addr,
            len,
            regions: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn contains(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.addr)
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= self.len)
    }

    pub(crate) fn region(&self, device: &Device, what: Use) -> Result<Arc<Region>, c_int> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let key = device.pd.0.addr();
        if let Some((_, _, region)) = regions.iter().find(|(k, u, _)| *k == key && *u == what) {
            return Ok(Arc::clone(region));
        }
        let region = Arc::new(Region::new(device, self.addr, self.len, what)?);
        regions.push((key, what, Arc::clone(&region)));
        Ok(region)
    }
}

/// Pages of a file in memory, until they are dropped.
#[derive(Debug)]
pub(crate) struct FileMap {
    base: Ptr<c_void>,
    len: usize,
    /// Where the asked bytes begin.
    pub(crate) addr: u64,
}

impl FileMap {
    pub(crate) fn new(fd: c_int, offset: i64, len: u64) -> Result<Self, c_int> {
        if fd < 0 {
            return Err(libc::EBADF);
        }
        // SAFETY: not the invalid descriptor -1; the call duplicates it, or fails if the program has none of this number.
        let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let metadata = file.and_then(|file| std::fs::File::from(file).metadata());
        let size = metadata
            .map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?
            .len();
        let size = i64::try_from(size).map_err(|_| libc::EFBIG)?;
        let end = i64::try_from(len).ok().and_then(|l| offset.checked_add(l));
        if offset < 0 || end.is_none_or(|end| end > size) {
            return Err(libc::EINVAL);
        }
        let before = offset & 4095;
        let len =
            usize::try_from(len).map_err(|_| libc::EINVAL)? + usize::try_from(before).unwrap_or(0);
        // SAFETY: a new mapping; a file that others make shorter costs this process a SIGBUS only if it reads there,
        // and it does not: the device does.
        let base = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                flags,
                fd,
                offset - before,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(crate::errno());
        }
        let addr = (base.expose_provenance() as u64).wrapping_add(before.cast_unsigned());
        Ok(Self {
            base: Ptr(base),
            len,
            addr,
        })
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own.
        unsafe { libc::munmap(self.base.0, self.len) };
    }
}
