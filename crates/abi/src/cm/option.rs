//! The options of identifiers: `rdma_set_option(3)`.

use std::ffi::{c_int, c_void};

use anywarp_engine::cm::CmId;

use super::event::step;
use super::id::IdObject;
use crate::entry;
use crate::ffi::{Errno, os_errno};
use crate::verbs::handle::live;
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// Reads the value of an option. Returns `EINVAL` if it has another length.
///
/// # Safety
/// `value` points to `len` bytes.
unsafe fn value_of<T: Copy>(value: *const c_void, len: usize) -> Result<T, Errno> {
    if len != size_of::<T>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the value has the length of the type (checked above), and the caller passes only types of which every value is valid.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

entry! {
    /// `rdma_set_option(3)`.
    ///
    /// # Safety
    /// `id` is null or points to a live identifier. `value` is null or points to `len` bytes.
    unsafe fn rdma_set_option(
        id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, len: usize,
    ) -> c_int, minus_one, {
        if value.is_null() || len == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let id = unsafe { live::<IdObject, _>(id) }?;
        // SAFETY: upheld by the caller.
        let byte = || unsafe { value_of::<u8>(value, len) };
        // SAFETY: upheld by the caller.
        let flag = || unsafe { value_of::<c_int>(value, len) }.map(|on| on != 0);
        match (level, name) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => {
                id.engine.set_tos(byte()?);
                Ok(())
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => id.engine.set_options(Some(flag()?), None, None),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => id.engine.set_options(None, Some(flag()?), None),
            // Datagrams are not acknowledged.
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) if id.is_datagram() => return Err(libc::EINVAL),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => id.engine.set_options(None, None, Some(byte()? & 31)),
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) => {
                if !len.is_multiple_of(size_of::<ibv_path_data>()) {
                    return Err(libc::EINVAL);
                }
                // One of the paths must be for all packets of both directions.
                let is_usable = (0..len / size_of::<ibv_path_data>()).any(|n| {
                    // SAFETY: `value` points to this many paths (guaranteed by the caller), and every value of a path is valid.
                    let path = unsafe { value.cast::<ibv_path_data>().add(n).read_unaligned() };
                    path.flags == IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL
                });
                if !is_usable {
                    return Err(libc::EINVAL);
                }
                // The kernel's routing table determines the path, so the given one is not used. But the option takes the place of
                // `rdma_resolve_route`, and the program waits for the event that reports the route.
                return step(id, CmId::resolve_route).map(|()| 0);
            }
            _ => return Err(libc::ENOSYS),
        }
        .map_err(|e| os_errno(&e))?;
        Ok(0)
    }
}
