//! Objects whose address is a C pointer, and the entry and exit of functions that C calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

// SAFETY: the table contains only addresses of functions.
unsafe impl<T> Sync for Table<T> {}

/// An object of a domain: first the structure of the C header, then the fields of this library.
#[repr(C)]
pub(crate) struct Object<F, R = ()> {
    /// The structure of the header, which begins with a `fid`.
    pub(crate) fid: F,
    /// The domain.
    pub(crate) domain: Arc<Domain>,
    /// The name of the object in the domain's tables.
    pub(crate) name: u32,
    /// More fields, which depend on the type.
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
pub(crate) type EpObject = Object<fid_ep, DefaultFlags>;
/// A completion queue of the program.
pub(crate) type CqObject = Object<fid_cq, Waiting>;

/// The flags of operations for which the program passes none. The aliases of an endpoint differ in them.
#[derive(Debug, Default)]
pub(crate) struct DefaultFlags {
    /// The flags of sends, reads, writes and atomic operations.
    pub(crate) send: AtomicU64,
    /// The flags of receives.
    pub(crate) receive: AtomicU64,
}

/// The additional fields of a completion queue.
pub(crate) struct Waiting {
    /// The descriptors to wait for, if the program opened the queue with them.
    pub(crate) wait: Option<Wait>,
    /// The kind of wait object: `FI_WAIT_FD`, `FI_WAIT_YIELD` or `FI_WAIT_NONE`.
    pub(crate) object: u32,
    /// Whether `fi_cq_signal` was called, after which a waiting thread must return.
    pub(crate) signaled: AtomicBool,
}

/// Returns the object of a C pointer. `FI_EINVAL` for null.
///
/// # Safety
/// `at` is null, or was returned by [`give`] for a `T` that is live.
pub(crate) unsafe fn known<'a, T, F>(at: *mut F) -> Result<&'a T, c_int> {
    // SAFETY: upheld by the caller.
    unsafe { at.cast::<T>().as_ref() }.ok_or(FI_EINVAL)
}

/// Moves an object to the heap and writes its address to `to`. The program owns it from then on.
///
/// # Safety
/// `to` is null or valid for writing a pointer.
pub(crate) unsafe fn give<T, F>(object: T, to: *mut *mut F) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    let to = unsafe { to.as_mut() }.ok_or(FI_EINVAL)?;
    *to = Box::into_raw(Box::new(object)).cast();
    Ok(0)
}

/// Takes back the ownership of an object that the program closes.
///
/// # Safety
/// The requirements of [`known`] apply, and C does not use the object any more.
pub(crate) unsafe fn take<T, F>(at: *mut F) -> Result<Box<T>, c_int> {
    if at.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: upheld by the caller.
    Ok(unsafe { Box::from_raw(at.cast::<T>()) })
}

/// Calls `f`, and returns what the C function returns: a count, 0, or a negated error. A panic is a bug of this library; it is
/// caught here and does not reach the program.
pub(crate) fn ended(f: impl FnOnce() -> Result<isize, c_int>) -> isize {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(n)) => n,
        Ok(Err(why)) => -(why as isize),
        Err(_panic) => -(FI_EOTHER as isize),
    }
}

/// Like [`ended`], for functions that return an `int`.
pub(crate) fn ended_int(f: impl FnOnce() -> Result<isize, c_int>) -> c_int {
    c_int::try_from(ended(f)).unwrap_or(c_int::MAX)
}

/// The table entry for functions that this provider does not have. It has no parameters: on the supported platforms a caller may pass
/// more arguments than a function has, and an `int` and an `ssize_t` are returned in the same register.
pub(crate) extern "C" fn no_function() -> isize {
    -(FI_ENOSYS as isize)
}

/// The address of [`no_function`].
pub(crate) const NONE: Call = no_function as *const ();

/// Returns the table of an object's general functions.
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

/// Returns the common first member of an object.
pub(crate) fn head(class: u32, context: *mut libc::c_void, ops: &'static Table<fi_ops>) -> fid {
    fid {
        fclass: class as usize,
        context,
        ops: &raw const ops.0,
    }
}

/// Returns the default flags of sends, reads, writes and atomic operations.
///
/// # Safety
/// `at` is null or an endpoint of the program.
pub(crate) unsafe fn send_flags<F>(at: *mut F) -> Result<u64, c_int> {
    // SAFETY: upheld by the caller.
    unsafe { known::<EpObject, _>(at) }.map(|object| object.rest.send.load(Ordering::Relaxed))
}

/// Returns the default flags of receives.
///
/// # Safety
/// `at` is null or an endpoint of the program.
pub(crate) unsafe fn receive_flags<F>(at: *mut F) -> Result<u64, c_int> {
    // SAFETY: upheld by the caller.
    unsafe { known::<EpObject, _>(at) }.map(|object| object.rest.receive.load(Ordering::Relaxed))
}

/// Calls a function with an endpoint and the shared state, with the domain locked.
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
