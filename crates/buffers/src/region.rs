//! One registration, and the size at which registering costs as much as copying.

use std::time::{Duration, Instant};

use libc::{c_int, c_void};

use crate::ffi::{self, Ptr};
use crate::fork;

/// A registration of memory with a device, which ends when this is dropped.
#[derive(Debug)]
pub struct Region {
    mr: Ptr<ffi::ibv_mr>,
    lkey: u32,
    rkey: u32,
    /// The generation (number of forks) of the process that created the region. In a forked child, dropping the value does not deregister.
    generation: u32,
}

impl Region {
    /// Registers `len` bytes at `addr`.
    ///
    /// # Errors
    ///
    /// The errno of `ibv_reg_mr`.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain that outlives the region. The memory stays mapped until the region is dropped. The device
    /// accesses the memory, and so do peers as far as `access` permits.
    pub unsafe fn new(
        pd: *mut ffi::ibv_pd,
        addr: u64,
        len: usize,
        access: u32,
    ) -> Result<Self, c_int> {
        let at = usize::try_from(addr).map_err(|_| libc::EFAULT)?;
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at);
        // SAFETY: upheld by the caller; the library checks the range.
        let mr = unsafe { ffi::ibv_reg_mr(pd, at, len, access.cast_signed()) };
        if mr.is_null() {
            return Err(match crate::errno() {
                0 => libc::ENOMEM,
                errno => errno,
            });
        }
        // SAFETY: the registration was created above.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self {
            mr: Ptr(mr),
            lkey,
            rkey,
            generation: fork::generation(),
        })
    }

    /// Returns the key for local requests.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the region of libibverbs, which is valid as long as this exists.
    #[must_use]
    pub fn mr(&self) -> *mut ffi::ibv_mr {
        self.mr.0
    }

    /// Returns the key for the peer's requests.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if fork::is_inherited(self.generation) {
            return;
        }
        // SAFETY: the registration was created by `new`, and nothing else ends it.
        unsafe { ffi::ibv_dereg_mr(self.mr.0) };
    }
}

/// The smallest size that is measured.
const LEAST: usize = 4 << 10;
/// The number of measurements of registering and of copying, of which the median is used.
const TRIES: usize = 7;

/// Measures the largest size, up to `most` bytes, for which copying takes no longer than registering and deregistering. This
/// takes a few milliseconds, and needs twice `most` bytes of resident memory while it runs.
///
/// # Errors
///
/// The errno of `ibv_reg_mr`.
///
/// # Safety
///
/// `pd` is a protection domain.
pub unsafe fn critical_size(
    pd: *mut ffi::ibv_pd,
    access: u32,
    most: usize,
) -> Result<usize, c_int> {
    let most = most.max(LEAST);
    let mut block = vec![1u8; 2 * most].into_boxed_slice();
    let (from, to) = block.split_at_mut(most);
    let addr = from.as_mut_ptr().expose_provenance() as u64;
    let mut size = LEAST;
    loop {
        let mut registering = [Duration::MAX; TRIES];
        let mut copying = [Duration::MAX; TRIES];
        for (registering, copying) in registering.iter_mut().zip(&mut copying) {
            let begun = Instant::now();
            // SAFETY: the block is live longer than the region, and no peer has its key.
            drop(unsafe { Region::new(pd, addr, size, access) }?);
            *registering = begun.elapsed();
            let begun = Instant::now();
            if let (Some(from), Some(to)) = (from.get(..size), to.get_mut(..size)) {
                to.copy_from_slice(from);
                std::hint::black_box(to);
            }
            *copying = begun.elapsed();
        }
        let [registering, copying] = [registering, copying].map(|mut times| {
            times.sort_unstable();
            times.get(TRIES / 2).map_or(1, Duration::as_nanos).max(1)
        });
        if registering < copying {
            // The time of a copy is proportional to the size.
            let size = size as u128 * registering / copying;
            return Ok(usize::try_from(size).unwrap_or(most).min(most));
        }
        if size >= most {
            return Ok(most);
        }
        size = (size * 2).min(most);
    }
}
