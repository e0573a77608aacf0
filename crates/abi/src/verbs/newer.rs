//! Functions that were added to libibverbs after rdma-core 44: registration with attributes in a structure, buffers that the device
//! allocates, and the speed of the port. The distribution's headers may be older, so this file defines the types.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use anywarp_engine::sys::pages::Pages;

use super::handle::{CStruct, Object, into_c, live, returned};
use super::memory::{register, register_in};
use super::object::{Backing, PdObject};
use crate::entry;
use crate::ffi::{Errno, arg, put};
use anywarp_verbs_sys::verbs::*;

/// The opaque handle that `ibv_alloc_buf` returns.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_buf {
    context: *mut ibv_context,
}

/// The attributes of `ibv_reg_mr_ex`: which memory it registers, and how.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_mr_init_attr {
    length: usize,
    access: c_int,
    comp_mask: u64,
    iova: u64,
    addr: *mut c_void,
    fd: c_int,
    fd_offset: u64,
    dmah: *mut c_void,
    buf: *mut ibv_buf,
}

const IBV_REG_MR_MASK_IOVA: u64 = 1 << 0;
const IBV_REG_MR_MASK_ADDR: u64 = 1 << 1;
const IBV_REG_MR_MASK_FD: u64 = 1 << 2;
const IBV_REG_MR_MASK_FD_OFFSET: u64 = 1 << 3;
const IBV_REG_MR_MASK_DMAH: u64 = 1 << 4;
const IBV_REG_MR_MASK_BUF: u64 = 1 << 5;

/// A buffer: pages of this process.
#[repr(C)]
struct BufObject {
    c: CStruct<ibv_buf>,
    pd: *mut ibv_pd,
    /// The pages. Regions of the buffer hold a reference too, so the pages stay mapped if the program frees the handle too early.
    pages: Arc<Pages>,
    len: usize,
}

// SAFETY: `repr(C)`; an `ibv_buf` comes first.
unsafe impl Object<ibv_buf> for BufObject {}

entry! {
    /// `ibv_alloc_buf(3)`: allocates zeroed pages.
    ///
    /// # Safety
    /// `pd` is null or points to a live object, `buf` is null or valid for writes.
    unsafe fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void, null, {
        // SAFETY: upheld by the caller.
        let domain = unsafe { live::<PdObject, _>(pd) }?;
        if size == 0 || buf.is_null() {
            return Err(libc::EINVAL);
        }
        let pages = Arc::new(Pages::new(size).ok_or(libc::ENOMEM)?);
        let start = pages.start();
        let c = CStruct::new(ibv_buf { context: domain.context() });
        // SAFETY: `buf` is not null, so it is valid for writes (guaranteed by the caller).
        unsafe { put(buf, into_c(BufObject { c, pd, pages, len: size })) }?;
        Ok(std::ptr::with_exposed_provenance_mut(start))
    }
}

entry! {
    /// `ibv_free_buf(3)`.
    ///
    /// # Safety
    /// `buf` is null or came from `ibv_alloc_buf`, and is not used again.
    unsafe fn ibv_free_buf(buf: *mut ibv_buf), nothing, {
        // SAFETY: upheld by the caller.
        let buffer = unsafe { returned::<BufObject, _>(buf) }?;
        drop(buffer.map(|buffer| buffer.take()));
        Ok(())
    }
}

entry! {
    /// `ibv_export_buf_dmabuf_fd(3)`: ENODATA, because no buffer of this device is a DMA-buf.
    ///
    /// # Safety
    /// `buf` is null or came from `ibv_alloc_buf`.
    unsafe fn ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        unsafe { live::<BufObject, _>(buf) }?;
        Err(libc::ENODATA)
    }
}

/// Registers a part of a buffer.
///
/// # Safety
/// `pd` and `buf` are null or live.
unsafe fn register_part(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    iova: Option<u64>,
    access: c_int,
) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: upheld by the caller.
    let buffer = unsafe { live::<BufObject, _>(buf) }?;
    let at = addr.addr().checked_sub(buffer.pages.start());
    let inside = at
        .and_then(|at| at.checked_add(length))
        .is_some_and(|end| end <= buffer.len);
    if pd != buffer.pd || length == 0 || !inside {
        return Err(libc::EINVAL);
    }
    let iova = iova.unwrap_or_else(|| addr.addr() as u64);
    let held = Backing::Buffer(Arc::clone(&buffer.pages));
    // SAFETY: the domain is live (guaranteed by the caller); the region holds the pages.
    unsafe { register_in(pd, addr, length, iova, access.cast_unsigned(), held) }
}

entry! {
    /// `ibv_reg_buf_mr(3)`: EINVAL if the protection domain is not that of the buffer, or the range is empty or exceeds the buffer.
    ///
    /// # Safety
    /// `pd` and `buf` are null or live.
    unsafe fn ibv_reg_buf_mr(
        pd: *mut ibv_pd, buf: *mut ibv_buf, addr: *mut c_void, length: usize, access: c_int,
    ) -> *mut ibv_mr, null, {
        // SAFETY: upheld by the caller.
        unsafe { register_part(pd, buf, addr, length, None, access) }
    }
}

entry! {
    /// `ibv_reg_mr_ex(3)`: EOPNOTSUPP for DMA-buf descriptors and DMA handles, which need hardware.
    ///
    /// # Safety
    /// `pd` is live, `attr` is null or valid; the memory stays mapped while it is registered.
    unsafe fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr, null, {
        const HARDWARE: u64 = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET | IBV_REG_MR_MASK_DMAH;
        const KNOWN: u64 = HARDWARE | IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR | IBV_REG_MR_MASK_BUF;
        // SAFETY: the caller passes null or a valid pointer.
        let attr = unsafe { arg(attr) }?;
        let has = |bit: u64| attr.comp_mask & bit != 0;
        if attr.comp_mask & !KNOWN != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let iova = has(IBV_REG_MR_MASK_IOVA).then_some(attr.iova);
        if has(IBV_REG_MR_MASK_BUF) {
            if has(IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET) || !has(IBV_REG_MR_MASK_ADDR) {
                return Err(libc::EINVAL);
            }
            if has(IBV_REG_MR_MASK_DMAH) {
                return Err(libc::EOPNOTSUPP);
            }
            // SAFETY: upheld by the caller.
            return unsafe { register_part(pd, attr.buf, attr.addr, attr.length, iova, attr.access) };
        }
        if has(HARDWARE) {
            return Err(libc::EOPNOTSUPP);
        }
        if !has(IBV_REG_MR_MASK_ADDR) {
            return Err(libc::EINVAL);
        }
        let iova = iova.unwrap_or_else(|| attr.addr.addr() as u64);
        // SAFETY: upheld by the caller.
        unsafe { register(pd, attr.addr, attr.length, iova, attr.access.cast_unsigned()) }
    }
}

/// The speed of the port in units of 100 Mb/s: four lanes of 25 Gb/s, as in `ibv_query_port`.
const PORT_SPEED: u64 = 4 * 250;

entry! {
    /// `ibv_query_port_speed(3)`.
    ///
    /// # Safety
    /// `speed` is null or valid for writes.
    unsafe fn ibv_query_port_speed(_context: *mut ibv_context, port: c_uint, speed: *mut u64) -> c_int, errno, {
        if port != 1 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        unsafe { put(speed, PORT_SPEED) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The layout is that of the headers of rdma-core 64 and later on 64-bit architectures.
    #[test]
    fn the_structure_has_the_offsets_of_the_headers() {
        assert_eq!(size_of::<ibv_mr_init_attr>(), 72);
        let offsets = [
            offset_of!(ibv_mr_init_attr, access),
            offset_of!(ibv_mr_init_attr, comp_mask),
            offset_of!(ibv_mr_init_attr, iova),
            offset_of!(ibv_mr_init_attr, addr),
            offset_of!(ibv_mr_init_attr, fd),
            offset_of!(ibv_mr_init_attr, fd_offset),
            offset_of!(ibv_mr_init_attr, dmah),
            offset_of!(ibv_mr_init_attr, buf),
        ];
        assert_eq!(offsets, [8, 16, 24, 32, 40, 48, 56, 64]);
    }
}
