//! Objects that C names by address, and the beginning and the end of each function that C calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use libc::c_int;

use crate::abi::{
    Call, FI_EINVAL, FI_ENOSYS, FI_EOTHER, fi_ops, fid, fid_av, fid_cntr, fid_cq, fid_domain,
    fid_ep, fid_fabric,
};
use crate::domain::Domain;
use crate::endpoint::{Endpoint, Shared};
use crate::event::Wait;

/// A constant table of functions.
#[repr(transparent)]
pub(crate) struct Table<T>(pub(crate) T);

// SAFETY: the addresses in it are those of functions.
unsafe impl<T> Sync for Table<T> {}

/// An object of a domain: first the structure of the C header, then the fields of this library.
#[repr(C)]
pub(crate) struct Object<F, R = ()> {
    /// The structure of the header, which begins with a `fid`.
    pub(crate) fid: F,
    /// The domain.
    pub(crate) domain: Arc<Domain>,
    /// The name of the object in the domain.
    pub(crate) name: u32,
    /// Further fields, which depend on the type.
    pub(crate) rest: R,
}

/// A fabric of the program.
#[repr(C)]
pub(crate) struct FabricObject {
    pub(crate) fid: fid_fabric,
}

/// A domain of the program.
pub(crate) type DomainObject = Object<fid_domain>;
/// An address vector of the program.
pub(crate) type AvObject = Object<fid_av>;
/// A counter of the program.
pub(crate) type CntrObject = Object<fid_cntr>;
/// An endpoint of the program.
pub(crate) type EpObject = Object<fid_ep>;
/// A completion queue of the program.
pub(crate) type CqObject = Object<fid_cq, Waiting>;

/// The further fields of a completion queue.
pub(crate) struct Waiting {
    /// The descriptors, if the program waits for them.
    pub(crate) wait: Option<Wait>,
    /// `fi_cq_signal` was called: a waiting thread has to return.
    pub(crate) signaled: AtomicBool,
}

/// The object behind a pointer of C.
///
/// # Safety
/// `at` is null, or was made by [`give`] of a `T` that is live.
pub(crate) unsafe fn known<'a, T, F>(at: *mut F) -> Result<&'a T, c_int> {
    // SAFETY: upheld by the caller.
    unsafe { at.cast::<T>().as_ref() }.ok_or(FI_EINVAL)
}

/// Writes the address of an object to `to`. From then on it belongs to the program.
///
/// # Safety
/// `to` is null or a place for a pointer.
pub(crate) unsafe fn give<T, F>(object: T, to: *mut *mut F) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    let to = unsafe { to.as_mut() }.ok_or(FI_EINVAL)?;
    *to = Box::into_raw(Box::new(object)).cast();
    Ok(0)
}

/// Takes an object back from the program, which closes it.
///
/// # Safety
/// As for [`known`], and C does not use it any more.
pub(crate) unsafe fn take<T, F>(at: *mut F) -> Result<Box<T>, c_int> {
    if at.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: upheld by the caller.
    Ok(unsafe { Box::from_raw(at.cast::<T>()) })
}

/// Returns the result of a C function: a count, 0, or a negated error. A panic, which is a bug of this library, is caught
/// here and does not reach the program.
pub(crate) fn ended(f: impl FnOnce() -> Result<isize, c_int>) -> isize {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(n)) => n,
        Ok(Err(why)) => -(why as isize),
        Err(_panic) => -(FI_EOTHER as isize),
    }
}

/// [`ended`] for functions that return an `int`.
pub(crate) fn ended_int(f: impl FnOnce() -> Result<isize, c_int>) -> c_int {
    c_int::try_from(ended(f)).unwrap_or(c_int::MAX)
}

/// Stands in the tables for functions that this provider does not have. It has no parameters: on the platforms of this
/// library a caller may pass more arguments than a function has, and the result is returned in the same register for an
/// `int` and an `ssize_t`.
pub(crate) extern "C" fn no_function() -> isize {
    -(FI_ENOSYS as isize)
}

/// The address of [`no_function`].
pub(crate) const NONE: Call = no_function as *const ();

/// The general functions of an object.
pub(crate) const fn ops(close: Call, bind: Call, control: Call) -> Table<fi_ops> {
    Table(fi_ops {
        size: size_of::<fi_ops>(),
        close,
        bind,
        control,
        ops_open: NONE,
        tostr: std::ptr::null(),
        ops_set: NONE,
    })
}

/// The beginning of an object.
pub(crate) fn head(class: u32, context: *mut libc::c_void, ops: &'static Table<fi_ops>) -> fid {
    fid {
        fclass: class as usize,
        context,
        ops: &raw const ops.0,
    }
}

/// Calls a function with an endpoint and the shared state, under the lock of the domain.
///
/// # Safety
/// `at` is null or an endpoint of the program.
pub(crate) unsafe fn with_endpoint<F>(
    at: *mut F,
    f: impl FnOnce(&mut Endpoint, &mut Shared) -> Result<isize, c_int>,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    let object = unsafe { known::<EpObject, _>(at) }?;
    let mut guard = object.domain.lock();
    let state = &mut *guard;
    let endpoint = state.endpoints.get_mut(object.name).ok_or(FI_EINVAL)?;
    f(endpoint, &mut state.shared)
}
