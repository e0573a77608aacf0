//! The functions of libibverbs that the library calls, and their types.

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

/// A pointer of libibverbs, which may be used by any thread.
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

// SAFETY: the objects of verbs may be used by any thread; who destroys them is settled by their owners.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}
