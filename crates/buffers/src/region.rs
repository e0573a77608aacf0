//! One registration, and the size at which a registration costs as much as a copy.

use std::time::{Duration, Instant};

use libc::{c_int, c_void};

use crate::ffi::{self, Ptr};
use crate::fork;

/// A registration of memory with a device, until it is dropped.
#[derive(Debug)]
pub struct Region {
    mr: Ptr<ffi::ibv_mr>,
    lkey: u32,
    rkey: u32,
    /// Of the process that has made it. A child of it drops the value alone.
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
    /// `pd` is a protection domain that outlives the region. The memory stays what it is until then; the device, and peers
    /// as far as `access` lets them, read and write it.
    pub unsafe fn new(
        pd: *mut ffi::ibv_pd,
        addr: u64,
        len: usize,
        access: u32,
    ) -> Result<Self, c_int> {
        let at = usize::try_from(addr).map_err(|_| libc::EFAULT)?;
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at);
        // SAFETY: as the caller promises; the library checks the range.
        let mr = unsafe { ffi::ibv_reg_mr(pd, at, len, access.cast_signed()) };
        if mr.is_null() {
            return Err(match crate::errno() {
                0 => libc::ENOMEM,
                errno => errno,
            });
        }
        // SAFETY: a registration that was just made.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self {
            mr: Ptr(mr),
            lkey,
            rkey,
            generation: fork::generation(),
        })
    }

    /// The key for requests of this end.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for requests of the peer.
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
        // SAFETY: made by `new`, and nothing else ends it.
        unsafe { ffi::ibv_dereg_mr(self.mr.0) };
    }
}

/// The smallest size that is measured.
const LEAST: usize = 4 << 10;
/// How often registering and copying are measured. The median counts.
const TRIES: usize = 7;

/// The largest size for which copying costs no more than registering and deregistering, up to `most` bytes: measured on
/// memory that is resident, in a few milliseconds.
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
            // SAFETY: the block is live longer than the region, and no peer knows of it.
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
            // A copy takes a time in proportion to the size.
            let size = size as u128 * registering / copying;
            return Ok(usize::try_from(size).unwrap_or(most).min(most));
        }
        if size >= most {
            return Ok(most);
        }
        size = (size * 2).min(most);
    }
}
