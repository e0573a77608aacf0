//! The functions of libibverbs that the library calls, and their types.

pub(crate) use anywarp_verbs_sys::ptr::Ptr;
pub(crate) use anywarp_verbs_sys::verbs::*;
use libc::{c_int, c_void};

#[link(name = "ibverbs")]
unsafe extern "C" {
    pub(crate) fn ibv_reg_mr(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        len: usize,
        access: c_int,
    ) -> *mut ibv_mr;
    pub(crate) fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
}
