//! Objects whose address is used as a C pointer.
//!
//! Each object begins with the structure of the header, so its address serves as the C pointer; private fields follow. [`into_c`]
//! passes an object to the program, [`live`] finds it by its pointer, and [`returned`] takes it back when the program destroys it.
//!
//! A child of fork(2) inherits the memory of its parent's objects but not the device behind them. Each object records the process
//! that created it. In a child, [`live`] fails with `ENODEV`, and [`returned`] returns `None`.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use anywarp_engine::process::generation;

use crate::ffi::Errno;

/// An object whose C type is `C`.
///
/// # Safety
/// The type is `#[repr(C)]`, and its first field is a [`CStruct`] whose structure begins with a `C`.
pub(crate) unsafe trait Object<C>: Sized {}

/// A structure of the header, which C code also reads and writes.
///
/// References to it exist only inside the closures of [`Self::get`] and [`Self::set`]. No other thread writes it while a closure
/// runs: the manual pages require this of programs, and the callers of [`live`] guarantee it.
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
        // SAFETY: no other thread uses it (see the type), closures are not nested, and the reference ends with the closure.
        write(unsafe { &mut *self.0.get() })
    }
}

impl<C> fmt::Debug for CStruct<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CStruct").finish_non_exhaustive()
    }
}

// SAFETY: the structures hold numbers, and pointers that the program may share between threads according to the manual pages;
// `CStruct` only copies them.
unsafe impl<C> Send for CStruct<C> {}
// SAFETY: as for `Send`.
unsafe impl<C> Sync for CStruct<C> {}

/// An object and the process that created it.
#[repr(C)]
struct Made<T> {
    object: T,
    generation: u32,
}

/// Moves an object to the heap and returns the C pointer for the program.
pub(crate) fn into_c<T: Object<C>, C>(object: T) -> *mut C {
    let generation = generation();
    Box::into_raw(Box::new(Made { object, generation })).cast()
}

/// Returns the object of a C pointer. `EINVAL` for null; `ENODEV` if the object was created by a process that forked this one.
///
/// # Safety
/// `pointer` is null or came from [`into_c`] for this `T` and the object was not destroyed. The program follows the manual pages, so
/// no other code writes the C structure during the call.
#[inline]
pub(crate) unsafe fn live<'a, T: Object<C> + 'a, C>(pointer: *mut C) -> Result<&'a T, Errno> {
    // SAFETY: the pointer is null or points to a live object (guaranteed by the caller).
    let made = unsafe { pointer.cast::<Made<T>>().as_ref() }.ok_or(libc::EINVAL)?;
    if made.generation != generation() {
        return Err(libc::ENODEV);
    }
    Ok(&made.object)
}

/// Like [`live`], for a pointer that may be null.
///
/// # Safety
/// The requirements of [`live`] apply.
pub(crate) unsafe fn live_if_any<'a, T: Object<C> + 'a, C>(
    pointer: *mut C,
) -> Result<Option<&'a T>, Errno> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: upheld by the caller.
    unsafe { live(pointer) }.map(Some)
}

/// Like [`live`], without its checks: for pointers that this library has stored, and for the data
/// path.
///
/// # Safety
/// `pointer` came from [`into_c`] for this `T` in this process, and the object was not destroyed.
#[inline]
pub(crate) unsafe fn known<'a, T: Object<C> + 'a, C>(pointer: *mut C) -> &'a T {
    // SAFETY: upheld by the caller.
    unsafe { &(*pointer.cast::<Made<T>>()).object }
}

/// An object that the program wants to destroy. The call may still fail, so the object stays unchanged until [`Self::take`].
pub(crate) struct Returned<T>(*mut Made<T>);

impl<T> Returned<T> {
    /// Takes the ownership of the object.
    pub(crate) fn take(self) -> T {
        // SAFETY: the pointer came from `into_c`, and the program does not use it again (guaranteed by the caller of `returned`).
        unsafe { Box::from_raw(self.0) }.object
    }
}

impl<T> Deref for Returned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the object is live until `take` (guaranteed by the caller of `returned`).
        unsafe { &(*self.0).object }
    }
}

/// Returns the object that a destroy call names. `EINVAL` for null; `None` if the object was created by a process that forked this
/// one: then there is nothing to destroy.
///
/// # Safety
/// The requirements of [`live`] apply. If the call succeeds, the program does not use `pointer` again.
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

/// Stores the address of a C object in the engine's object, so that events can refer to it.
pub(crate) fn set_c_object<C>(slot: &AtomicUsize, pointer: *mut C) {
    slot.store(pointer.expose_provenance(), Ordering::Release);
}

/// Returns the C object whose address was stored by [`set_c_object`].
pub(crate) fn c_object<C>(address: usize) -> *mut C {
    std::ptr::with_exposed_provenance_mut(address)
}
