//! Objects whose address is a C pointer.
//!
//! An object that a program holds begins with the structure of the header, so that its address serves as the C pointer;
//! what belongs to this library follows. [`into_c`] makes one, [`live`] finds it again, [`returned`] takes it back.
//!
//! A child of fork(2) inherits the memory of its parent's objects but not the device behind them. Each object records the
//! process that made it: in a child, [`live`] fails with `ENODEV` and [`returned`] finds nothing to do.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use anywarp_engine::process::generation;

use crate::ffi::Errno;

/// An object that C code sees as a `C`.
///
/// # Safety
/// The type is `#[repr(C)]`, and its first field is a [`CStruct`] whose structure begins with a `C`.
pub(crate) unsafe trait Object<C>: Sized {}

/// A structure of the header that C code reads and writes too.
///
/// References to it exist only inside the closures of [`Self::get`] and [`Self::set`]. No other thread writes it while a
/// closure runs: the manual pages demand this of programs, and it is part of what callers of [`live`] promise.
#[repr(transparent)]
pub(crate) struct CStruct<C>(UnsafeCell<C>);

impl<C> CStruct<C> {
    pub(crate) fn new(c: C) -> Self {
        Self(UnsafeCell::new(c))
    }

    /// Reads the structure.
    pub(crate) fn get<R>(&self, read: impl FnOnce(&C) -> R) -> R {
        // SAFETY: no other thread writes it (see the type), and the reference ends with the closure.
        read(unsafe { &*self.0.get() })
    }

    /// Changes the structure.
    pub(crate) fn set<R>(&self, write: impl FnOnce(&mut C) -> R) -> R {
        // SAFETY: no other thread uses it (see the type), the closures do not nest, and the reference ends with it.
        write(unsafe { &mut *self.0.get() })
    }
}

impl<C> fmt::Debug for CStruct<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CStruct").finish_non_exhaustive()
    }
}

// SAFETY: the structures hold numbers, and pointers that the program shares between its threads by the rules of the
// manual pages; `CStruct` only copies them.
unsafe impl<C> Send for CStruct<C> {}
// SAFETY: as for `Send`.
unsafe impl<C> Sync for CStruct<C> {}

/// An object and the process that made it.
#[repr(C)]
struct Made<T> {
    object: T,
    generation: u32,
}

/// Gives an object to the program.
pub(crate) fn into_c<T: Object<C>, C>(object: T) -> *mut C {
    let generation = generation();
    Box::into_raw(Box::new(Made { object, generation })).cast()
}

/// The object behind a C pointer: `EINVAL` for null, `ENODEV` if a process made it that this one was forked from.
///
/// # Safety
/// `pointer` is null or came from [`into_c`] for this `T` and was not given back; the program uses it as the manual
/// pages allow, so that nothing else writes its C structure during the call.
#[inline]
pub(crate) unsafe fn live<'a, T: Object<C> + 'a, C>(pointer: *mut C) -> Result<&'a T, Errno> {
    // SAFETY: null or an object (guaranteed by the caller).
    let made = unsafe { pointer.cast::<Made<T>>().as_ref() }.ok_or(libc::EINVAL)?;
    if made.generation != generation() {
        return Err(libc::ENODEV);
    }
    Ok(&made.object)
}

/// [`live`] for a pointer that may be null.
///
/// # Safety
/// As for [`live`].
pub(crate) unsafe fn live_if_any<'a, T: Object<C> + 'a, C>(
    pointer: *mut C,
) -> Result<Option<&'a T>, Errno> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: upheld by the caller.
    unsafe { live(pointer) }.map(Some)
}

/// The object behind a pointer that this library keeps, for objects that live as long as others use them.
///
/// # Safety
/// `pointer` came from [`into_c`] for this `T` in this process and was not given back.
#[inline]
pub(crate) unsafe fn known<'a, T: Object<C> + 'a, C>(pointer: *mut C) -> &'a T {
    // SAFETY: upheld by the caller.
    unsafe { &(*pointer.cast::<Made<T>>()).object }
}

/// An object that the program gives back. The call may still refuse it: nothing ends before [`Self::take`].
pub(crate) struct Returned<T>(*mut Made<T>);

impl<T> Returned<T> {
    /// Takes the object from the program.
    pub(crate) fn take(self) -> T {
        // SAFETY: a pointer of `into_c`, which the program does not use again (promised to `returned`).
        unsafe { Box::from_raw(self.0) }.object
    }
}

impl<T> Deref for Returned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the object is live until `take` (promised to `returned`).
        unsafe { &(*self.0).object }
    }
}

/// The object that a destroy call names: `EINVAL` for null, `None` if a process made it that this one was forked from.
///
/// # Safety
/// As for [`live`]; if the call succeeds, the program does not use `pointer` again.
pub(crate) unsafe fn returned<T: Object<C>, C>(
    pointer: *mut C,
) -> Result<Option<Returned<T>>, Errno> {
    // SAFETY: upheld by the caller.
    match unsafe { live::<T, C>(pointer) } {
        Ok(_) => Ok(Some(Returned(pointer.cast()))),
        Err(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Stores the address of a C object in the engine's object behind it, so that events can name it.
pub(crate) fn set_c_object<C>(slot: &AtomicUsize, pointer: *mut C) {
    slot.store(pointer.expose_provenance(), Ordering::Release);
}

/// The C object whose address was stored by [`set_c_object`].
pub(crate) fn c_object<C>(address: usize) -> *mut C {
    std::ptr::with_exposed_provenance_mut(address)
}
