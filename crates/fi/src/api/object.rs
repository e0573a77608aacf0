//! Objects that C knows by address, and how a function that C calls begins and ends.

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

/// A table of functions, which nothing changes.
#[repr(transparent)]
pub(crate) struct Table<T>(pub(crate) T);

// SAFETY: the addresses in it are those of functions.
unsafe impl<T> Sync for Table<T> {}

/// An object of a domain: what C sees, then what belongs to this library.
#[repr(C)]
pub(crate) struct Object<F, R = ()> {
    /// The structure of the header, which begins with a `fid`.
    pub(crate) fid: F,
    /// The domain.
    pub(crate) domain: Arc<Domain>,
    /// Its name there.
    pub(crate) name: u32,
    /// What else it has.
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

/// What a completion queue has beside its entries.
pub(crate) struct Waiting {
    /// The descriptors, if the program waits for them.
    pub(crate) wait: Option<Wait>,
    /// A thread that waits is to return.
    pub(crate) signaled: AtomicBool,
}

/// The object behind a pointer of C.
///
/// # Safety
/// `at` is null, or was made by [`give`] of a `T` that lives.
pub(crate) unsafe fn known<'a, T, F>(at: *mut F) -> Result<&'a T, c_int> {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<T>().as_ref() }.ok_or(FI_EINVAL)
}

/// Gives an object to C, at `to`.
///
/// # Safety
/// `to` is null or a place for a pointer.
pub(crate) unsafe fn give<T, F>(object: T, to: *mut *mut F) -> Result<isize, c_int> {
    // SAFETY: the caller's promise.
    let to = unsafe { to.as_mut() }.ok_or(FI_EINVAL)?;
    *to = Box::into_raw(Box::new(object)).cast();
    Ok(0)
}

/// Takes an object back.
///
/// # Safety
/// As for [`known`], and C does not use it any more.
pub(crate) unsafe fn take<T, F>(at: *mut F) -> Result<Box<T>, c_int> {
    if at.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Box::from_raw(at.cast::<T>()) })
}

/// Ends a function of C: a count or 0, or an error with its sign changed. A panic, which is an error of this library, does
/// not enter the program.
pub(crate) fn ended(f: impl FnOnce() -> Result<isize, c_int>) -> isize {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(n)) => n,
        Ok(Err(why)) => -(why as isize),
        Err(_panic) => -(FI_EOTHER as isize),
    }
}

/// The same for functions that return an `int`.
pub(crate) fn ended_int(f: impl FnOnce() -> Result<isize, c_int>) -> c_int {
    c_int::try_from(ended(f)).unwrap_or(c_int::MAX)
}

/// Stands in the tables for a function that there is not. It has no arguments: on the platforms of this library a caller may
/// give more than a function takes, and the result has the register of an `int` or an `ssize_t`.
pub(crate) extern "C" fn no_function() -> isize {
    -(FI_ENOSYS as isize)
}

/// Its address.
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

/// Does something with an endpoint.
///
/// # Safety
/// `at` is null or an endpoint of the program.
pub(crate) unsafe fn with_endpoint<F>(
    at: *mut F,
    f: impl FnOnce(&mut Endpoint, &mut Shared) -> Result<isize, c_int>,
) -> Result<isize, c_int> {
    // SAFETY: the caller's promise.
    let object = unsafe { known::<EpObject, _>(at) }?;
    let mut guard = object.domain.lock();
    let state = &mut *guard;
    let endpoint = state.endpoints.get_mut(object.name).ok_or(FI_EINVAL)?;
    f(endpoint, &mut state.shared)
}
