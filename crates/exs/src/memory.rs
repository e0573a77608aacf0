//! Registered memory, and the devices that it is registered with.

use crate::ffi;
use crate::lock::lock;
use libc::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

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

/// An open device, and the protection domain and completion channel of all its sockets. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Ptr<ffi::ibv_context>,
    pub(crate) pd: Ptr<ffi::ibv_pd>,
    pub(crate) channel: Ptr<ffi::ibv_comp_channel>,
    pub(crate) iwarp: bool,
    /// Memory that the program has not registered is copied up to this length, bytes: registering it would take longer.
    pub(crate) critical: u64,
}

/// The limit of [`Device::critical`], for devices on which registering takes very long.
const MAX_CRITICAL: usize = 64 << 10;
/// How often registering and copying are measured. The median counts.
const TRIES: usize = 9;

impl Device {
    pub(crate) fn open(context: *mut ffi::ibv_context) -> Result<Self, c_int> {
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
            let iwarp = (*(*context).device).transport_type == ffi::IBV_TRANSPORT_IWARP;
            let mut device = Self {
                context: Ptr(context),
                pd: Ptr(pd),
                channel: Ptr(channel),
                iwarp,
                critical: 0,
            };
            device.critical = device.measure()?;
            Ok(device)
        }
    }

    /// The length at which a registration takes as long as a copy.
    fn measure(&self) -> Result<u64, c_int> {
        let mut block = vec![1u8; 2 * MAX_CRITICAL].into_boxed_slice();
        let addr = block.as_mut_ptr().expose_provenance() as u64;
        let mut registering = [Duration::MAX; TRIES];
        let mut copying = [Duration::MAX; TRIES];
        for (registering, copying) in registering.iter_mut().zip(&mut copying) {
            let begun = Instant::now();
            drop(Region::new(self, addr, MAX_CRITICAL as u64, Use::Source)?);
            *registering = begun.elapsed();
            let (from, to) = block.split_at_mut(MAX_CRITICAL);
            let begun = Instant::now();
            to.copy_from_slice(from);
            std::hint::black_box(&mut *to);
            *copying = begun.elapsed();
        }
        let [registering, copying] = [registering, copying].map(|mut times| {
            times.sort_unstable();
            times.get(TRIES / 2).map_or(1, Duration::as_nanos).max(1)
        });
        let critical = registering * (MAX_CRITICAL as u128) / copying;
        Ok(u64::try_from(critical)
            .unwrap_or(u64::MAX)
            .min(MAX_CRITICAL as u64))
    }
}

/// What memory is used for. This decides the access rights of its registration.
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
    mr: Ptr<ffi::ibv_mr>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

impl Region {
    pub(crate) fn new(device: &Device, addr: u64, len: u64, what: Use) -> Result<Self, c_int> {
        let access = match what {
            Use::Source => ffi::IBV_ACCESS_REMOTE_READ,
            // In iWARP the Read Request carries the key of the sink, which must allow remote writes.
            Use::Sink if device.iwarp => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE,
            Use::Local | Use::Sink => ffi::IBV_ACCESS_LOCAL_WRITE,
            Use::Target => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE,
        };
        let len = usize::try_from(len).map_err(|_| libc::EINVAL)?;
        let addr = std::ptr::with_exposed_provenance_mut::<c_void>(
            usize::try_from(addr).map_err(|_| libc::EFAULT)?,
        );
        // SAFETY: the library checks the range; what it may do with it is the caller's contract.
        let mr = unsafe { ffi::ibv_reg_mr(device.pd.0, addr, len, access.cast_signed()) };
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

/// Memory that the program has registered. It is registered with a device, with the rights of a use, when it is first used
/// so.
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
        let mut regions = lock(&self.regions);
        let key = device.pd.0.addr();
        if let Some((_, _, region)) = regions.iter().find(|(k, u, _)| *k == key && *u == what) {
            return Ok(Arc::clone(region));
        }
        let region = Arc::new(Region::new(device, self.addr, self.len, what)?);
        regions.push((key, what, Arc::clone(&region)));
        Ok(region)
    }
}

/// The sizes of pooled buffers.
const CLASSES: [usize; 4] = [1 << 10, 4 << 10, 16 << 10, MAX_CRITICAL];
/// Memory that is registered at once, for buffers of one size.
const SLAB: usize = 256 << 10;
/// The largest number of slabs of a pool. When all buffers are in use, memory of the program is registered for the call.
const MAX_SLABS: usize = 8;

/// Registered buffers, to copy memory that the program has not registered. Each connection has a pool of its own, because
/// its peer may read everything that a registration covers.
#[derive(Debug)]
pub(crate) struct Pool {
    what: Use,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    slabs: Vec<Slab>,
    /// For each size, the buffers that are free.
    free: [Vec<Place>; CLASSES.len()],
}

#[derive(Debug)]
struct Slab {
    /// Dropped before the memory that it covers: fields are dropped in order.
    _region: Region,
    _bytes: Box<[u8]>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    addr: u64,
    lkey: u32,
    rkey: u32,
}

/// A buffer of a pool, until it is dropped.
#[derive(Debug)]
pub(crate) struct Piece {
    pool: Arc<Pool>,
    class: usize,
    place: Place,
}

impl Pool {
    pub(crate) fn new(what: Use) -> Self {
        Self {
            what,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }

    /// A buffer for `len` bytes. `None` if copying so many takes longer than registering them, or if all buffers are in use.
    pub(crate) fn take(self: &Arc<Self>, device: &Device, len: u64) -> Option<Piece> {
        let len = usize::try_from(len.max(1)).ok()?;
        if len as u64 > device.critical {
            return None;
        }
        let class = CLASSES.iter().position(|c| *c >= len)?;
        let size = *CLASSES.get(class)?;
        let mut state = self.lock();
        let state = &mut *state;
        let free = state.free.get_mut(class)?;
        if free.is_empty() && state.slabs.len() < MAX_SLABS {
            let mut bytes = vec![0u8; SLAB].into_boxed_slice();
            let addr = bytes.as_mut_ptr().expose_provenance() as u64;
            let region = Region::new(device, addr, SLAB as u64, self.what).ok()?;
            let (lkey, rkey) = (region.lkey, region.rkey);
            free.extend((0..SLAB / size).map(|i| Place {
                addr: addr + (i * size) as u64,
                lkey,
                rkey,
            }));
            state.slabs.push(Slab {
                _region: region,
                _bytes: bytes,
            });
        }
        Some(Piece {
            pool: Arc::clone(self),
            class,
            place: free.pop()?,
        })
    }
}

impl Piece {
    pub(crate) fn addr(&self) -> u64 {
        self.place.addr
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        (self.place.lkey, self.place.rkey)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(free) = self.pool.lock().free.get_mut(self.class) {
            free.push(self.place);
        }
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
    /// The address of the first requested byte; the mapping begins at a page border before it.
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
