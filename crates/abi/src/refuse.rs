//! Exported functions that only fail.

/// Exports functions under their C names. They ignore their arguments and fail with one errno.
///
/// The word before the braces around the names selects how they fail: `null` and `minus_one` return null or -1 and set errno, `code`
/// returns the errno value and sets errno, `minus_code` returns its negative, `zero` returns 0 and sets errno, and `void` does nothing.
///
/// The functions declare no arguments although callers pass some. In the x86-64 and AArch64 procedure call standards the caller
/// allocates and frees the space of the arguments, so this is permitted.
#[macro_export]
macro_rules! refuse {
    ($errno:expr; $( $how:ident { $($name:ident),* $(,)? } )*) => {
        $($( $crate::refuse!(@ $how $errno, $name); )*)*
    };
    (@ null $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, *mut std::ffi::c_void, $crate::ffi::fail($errno, std::ptr::null_mut()));
    };
    (@ code $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, std::ffi::c_int, $crate::ffi::fail($errno, $errno));
    };
    // A wide type, so that the result is -1 as an `int`, a `ssize_t` and an `off_t`.
    (@ minus_one $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, isize, $crate::ffi::fail($errno, -1));
    };
    (@ minus_code $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, isize, -($errno as isize));
    };
    (@ zero $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, u64, $crate::ffi::fail($errno, 0));
    };
    (@ void $errno:expr, $name:ident) => {
        $crate::refuse!(@fn $name, (), ());
    };
    (@fn $name:ident, $ret:ty, $value:expr) => {
        #[doc = concat!("`", stringify!($name), "`: exported so that programs start; only fails.")]
        // SAFETY: the symbol is defined by this library: link/symbols.txt lists it once, and the map exports nothing else.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> $ret {
            $value
        }
    };
}

use crate::ffi::set_errno;
use libc::ENOSYS;
use std::ffi::{c_int, c_void};

// The symbol versions from before 2007 jump to these functions; `cargo xtask dist` creates the jumps.

/// Fails like a function that returns a pointer.
// SAFETY: the name has this library's prefix.
#[unsafe(no_mangle)]
pub extern "C" fn anywarp_legacy_null() -> *mut c_void {
    set_errno(ENOSYS);
    std::ptr::null_mut()
}

/// Fails like a function that returns 0 or an errno value.
// SAFETY: the name has this library's prefix.
#[unsafe(no_mangle)]
pub extern "C" fn anywarp_legacy_code() -> c_int {
    set_errno(ENOSYS);
    ENOSYS
}

/// Does nothing.
// SAFETY: the name has this library's prefix.
#[unsafe(no_mangle)]
pub extern "C" fn anywarp_legacy_void() {}
