//! Registered memory, and the devices that memory is registered with.

use crate::ffi;
use crate::lock::lock;
use anywarp_buffers::{self as buffers, Manager, Region};
use anywarp_verbs_sys::ptr::Ptr;
use libc::{c_int, c_void};
use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

/// An open device, with the protection domain and the completion channel of all its sockets. It exists until the process exits.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Ptr<ffi::ibv_context>,
    pub(crate) pd: Ptr<ffi::ibv_pd>,
    pub(crate) channel: Ptr<ffi::ibv_comp_channel>,
    pub(crate) iwarp: bool,
    /// Whether it has memory windows of type 2B, which a queue pair binds and a peer's Send with Invalidate ends.
    pub(crate) windows: bool,
    /// The length in bytes up to which memory that the program has not registered is copied, because registering it would
    /// take longer.
    critical: usize,
}

/// The upper limit of [`Device::critical`], for devices on which registering takes very long.
const MAX_CRITICAL: usize = 64 << 10;
/// The most bytes of registered buffers of one connection, for each direction. When all are in use, the program's memory is
/// registered for the call.
const MAX_POOL: usize = 2 << 20;

impl Device {
    pub(crate) fn open(context: *mut ffi::ibv_context) -> Result<Self, c_int> {
        // SAFETY: `context` is an open device of librdmacm, which stays open; both objects are new.
        unsafe {
            let pd = ffi::ibv_alloc_pd(context);
            if pd.is_null() {
                return Err(crate::errno());
            }
            let channel = ffi::ibv_create_comp_channel(context);
            let iwarp = (*(*context).device).transport_type == ffi::IBV_TRANSPORT_IWARP;
            let windows = has_windows(context);
            let access = Use::Source.access(iwarp, windows);
            let critical = do_not_block(channel)
                .and_then(|()| buffers::critical_size(pd, access, MAX_CRITICAL))
                .inspect_err(|_| {
                    if !channel.is_null() {
                        ffi::ibv_destroy_comp_channel(channel);
                    }
                    ffi::ibv_dealloc_pd(pd);
                })?;
            Ok(Self {
                context: Ptr(context),
                pd: Ptr(pd),
                channel: Ptr(channel),
                iwarp,
                windows,
                critical,
            })
        }
    }

    /// Creates the registered buffers for copying memory that the program has not registered. Each connection has separate
    /// ones, because its peer may read everything that a registration covers. Registrations are not cached, because the next user of
    /// a cached one could be another connection.
    pub(crate) fn pool(&self) -> Option<Manager> {
        let settings = buffers::Settings {
            send_access: Use::Source.access(self.iwarp, false),
            receive_access: Use::Sink.access(self.iwarp, false),
            critical: Some(self.critical),
            pool_bytes: MAX_POOL,
            cache_bytes: 0,
            ..buffers::Settings::default()
        };
        // SAFETY: the domain is live as long as the process.
        unsafe { Manager::open(self.pd.0, settings) }.ok()
    }
}

/// Returns whether a device has memory windows of type 2B.
///
/// # Safety
/// `context` is an open device.
unsafe fn has_windows(context: *mut ffi::ibv_context) -> bool {
    let mut attributes = std::mem::MaybeUninit::<ffi::ibv_device_attr>::zeroed();
    // SAFETY: upheld by the caller; all bytes form valid attributes.
    unsafe {
        ffi::ibv_query_device(context, attributes.as_mut_ptr()) == 0
            && attributes.assume_init().device_cap_flags & ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0
    }
}

/// Allocates zeroed bytes. ENOMEM if there is no memory for them, because a program may set large sizes.
pub(crate) fn zeroed(len: usize) -> Result<Box<[u8]>, c_int> {
    let layout = Layout::array::<u8>(len).map_err(|_too_long| libc::ENOMEM)?;
    if len == 0 {
        return Ok(Box::default());
    }
    // SAFETY: the layout is not empty. The vector has the length and the capacity of the allocation, whose bytes are zero.
    unsafe {
        let at = std::alloc::alloc_zeroed(layout);
        if at.is_null() {
            return Err(libc::ENOMEM);
        }
        Ok(Vec::from_raw_parts(at, len, len).into_boxed_slice())
    }
}

/// Makes a completion channel nonblocking. Fails if creating it has failed.
///
/// # Safety
/// `channel` is null or points to a live channel.
unsafe fn do_not_block(channel: *mut ffi::ibv_comp_channel) -> Result<(), c_int> {
    // SAFETY: upheld by the caller.
    let fd = unsafe { channel.as_ref() }.ok_or_else(crate::errno)?.fd;
    // SAFETY: no memory is passed.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if done < 0 {
        return Err(crate::errno());
    }
    Ok(())
}

/// How memory is used, which determines the access rights of its registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Message buffers: no peer accesses them by key.
    Local,
    /// Sends: the peer reads the memory.
    Source,
    /// Receives: local RDMA Reads write the memory.
    Sink,
    /// Persistent receives: the peer writes the memory.
    Target,
}

impl Use {
    /// Returns the access rights for this use, on an iWARP or another device, with or without memory windows.
    fn access(self, iwarp: bool, windows: bool) -> u32 {
        match self {
            Self::Source => ffi::IBV_ACCESS_REMOTE_READ,
            // In iWARP an RDMA Read Request contains the key of the sink, which must permit remote writes.
            Self::Sink if iwarp => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE,
            Self::Sink if windows => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_MW_BIND,
            Self::Local | Self::Sink => ffi::IBV_ACCESS_LOCAL_WRITE,
            Self::Target => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE,
        }
    }
}

/// Registers memory with a device.
pub(crate) fn register(device: &Device, addr: u64, len: u64, what: Use) -> Result<Region, c_int> {
    let len = usize::try_from(len).map_err(|_| libc::EINVAL)?;
    // SAFETY: the domain is live as long as the process; the caller guarantees that the memory may be accessed as `what` says.
    unsafe {
        Region::new(
            device.pd.0,
            addr,
            len,
            what.access(device.iwarp, device.windows),
        )
    }
}

/// The keys of memory, for local work requests and for the peer, and its registration, to which memory windows are bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) mr: Ptr<ffi::ibv_mr>,
}

impl Keys {
    pub(crate) fn of(region: &Region) -> Self {
        Self {
            lkey: region.lkey(),
            rkey: region.rkey(),
            mr: Ptr(region.mr()),
        }
    }
}

/// A bit of [`Memory::uses`]: the program has deregistered the memory.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Memory that the program has registered. It is registered with a device, with the access rights of a use, at the first such use.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    regions: Mutex<Vec<(usize, Use, Region)>>,
    /// The protection domain and the keys of the first registration for each use, which are read without a lock.
    first: [OnceLock<(usize, Keys)>; 4],
    /// The number of operations in progress with this memory, and [`CLOSED`].
    uses: AtomicUsize,
}

impl Memory {
    pub(crate) fn new(addr: u64, len: u64) -> Self {
        Self {
            addr,
            len,
            regions: Mutex::new(Vec::new()),
            first: [const { OnceLock::new() }; 4],
            uses: AtomicUsize::new(0),
        }
    }

    pub(crate) fn contains(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.addr)
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= self.len)
    }

    /// Returns the keys for a use. They are valid until [`Memory::close`].
    pub(crate) fn keys(&self, device: &Device, what: Use) -> Result<Keys, c_int> {
        let domain = device.pd.0.addr();
        let first = self.first.get(what as usize);
        if let Some((of, keys)) = first.and_then(OnceLock::get)
            && *of == domain
        {
            return Ok(*keys);
        }
        let mut regions = lock(&self.regions);
        if let Some((.., region)) = regions.iter().find(|(d, u, _)| *d == domain && *u == what) {
            return Ok(Keys::of(region));
        }
        let region = register(device, self.addr, self.len, what)?;
        let keys = Keys::of(&region);
        regions.push((domain, what, region));
        // If another device was first, its keys stay there.
        let _ = first.map(|first| first.set((domain, keys)));
        Ok(keys)
    }

    /// Deregisters the memory. `EBUSY`: an operation uses it.
    pub(crate) fn close(&self) -> Result<(), c_int> {
        let closed = self.uses.compare_exchange(0, CLOSED, SeqCst, SeqCst);
        closed.map_err(|_| libc::EBUSY)?;
        lock(&self.regions).clear();
        Ok(())
    }
}

/// Memory that an operation uses, and that is not deregistered as long as this exists. The pointer is not counted by the `Arc`: the
/// table of the library keeps its own reference until [`Memory::close`] has succeeded, and this call fails while the memory is used.
#[derive(Debug)]
pub(crate) struct Used(Ptr<Memory>);

impl Used {
    /// `EINVAL`: the program has deregistered the memory.
    ///
    /// # Safety
    ///
    /// The memory is in the table of the library, or was removed from it after [`Memory::close`] had succeeded.
    pub(crate) unsafe fn new(memory: &Arc<Memory>) -> Result<Self, c_int> {
        if memory.uses.fetch_add(1, SeqCst) & CLOSED != 0 {
            memory.uses.fetch_sub(1, SeqCst);
            return Err(libc::EINVAL);
        }
        Ok(Self(Ptr(Arc::as_ptr(memory).cast_mut())))
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        // SAFETY: the memory was not closed when it was counted as used. Since then it cannot be closed, so the table still owns it.
        unsafe { (*self.0.0).uses.fetch_sub(1, SeqCst) };
    }
}

/// Reads exactly `len` bytes of a file, or fails.
pub(crate) fn read_file(fd: c_int, offset: i64, into: u64, len: u64) -> Result<(), c_int> {
    if offset < 0 {
        return Err(libc::EINVAL);
    }
    let mut done = 0;
    while done < len {
        let to = std::ptr::with_exposed_provenance_mut::<c_void>((into + done) as usize);
        let at = offset.checked_add(done.cast_signed()).ok_or(libc::EINVAL)?;
        // SAFETY: the caller owns `len` bytes at `into`.
        let n = unsafe { libc::pread(fd, to, (len - done) as usize, at) };
        match u64::try_from(n) {
            Ok(0) => return Err(libc::EINVAL),
            Ok(n) => done += n,
            Err(_) if crate::errno() == libc::EINTR => {}
            Err(_) => return Err(crate::errno()),
        }
    }
    Ok(())
}

/// A mapping of a part of a file, until it is dropped.
#[derive(Debug)]
pub(crate) struct FileMap {
    base: Ptr<c_void>,
    len: usize,
    /// The address of the first requested byte. The mapping begins at the page that contains it.
    pub(crate) addr: u64,
}

impl FileMap {
    pub(crate) fn new(fd: c_int, offset: i64, len: u64) -> Result<Self, c_int> {
        if fd < 0 {
            return Err(libc::EBADF);
        }
        // SAFETY: the descriptor is not -1, which is invalid. The call duplicates it, or fails if the program has no such descriptor.
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
        // The offset of a mapping is a multiple of the page size, which is not 4096 on all machines.
        // SAFETY: no pointer is passed.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let before = offset % page.max(1);
        let len =
            usize::try_from(len).map_err(|_| libc::EINVAL)? + usize::try_from(before).unwrap_or(0);
        // SAFETY: this is a new mapping, which the library does not access. A software device accesses it in a thread of this process, and
        // receives SIGBUS if the file has been truncated. exs_sendfile(3) documents this.
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
        // SAFETY: this object owns the mapping.
        unsafe { libc::munmap(self.base.0, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_memory_is_an_error() {
        assert_eq!(zeroed(usize::MAX), Err(libc::ENOMEM));
        assert_eq!(zeroed(0).unwrap().len(), 0);
        assert_eq!(zeroed(100).unwrap()[..], [0; 100]);
    }
}
