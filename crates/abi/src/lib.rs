//! The C ABI of libibverbs and librdmacm over the software card of `anywarp-engine`.
//!
//! Every exported function is written with [`entry!`]: check the arguments, call the engine,
//! translate the answer. Everything historical or odd about the C API lives in this crate and
//! nothing of it below.
//!
//! - [`verbs`] and [`cm`]: one module for each of the two libraries; their `types` mirror the C
//!   headers and are held against them by the test in `layout`.
//! - `../link/`: which symbols are exported, under which version; `cargo xtask dist` links them,
//!   `cargo xtask matrix` compares with the distribution's libraries.

mod layout;

pub mod cm;
pub mod verbs;

use std::any::Any;
use std::ffi::c_int;

/// Exports a C entry point under its own name.
///
/// ```ignore
/// entry! {
///     /// `ibv_dealloc_pd(3)`.
///     ///
///     /// # Safety
///     /// `pd` is null or came from `ibv_alloc_pd`, and is not used after this returns 0.
///     unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, on_panic = EIO, { … }
/// }
/// ```
///
/// A panic must not cross into C: it is caught, `errno` becomes `EIO`, and the caller gets
/// `on_panic`.
#[macro_export]
macro_rules! entry {
    (
        $(#[$meta:meta])*
        unsafe fn $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $ret:ty)?, on_panic = $on_panic:expr, $body:block
    ) => {
        $(#[$meta])*
        // SAFETY: the symbol is ours: link/symbols.txt names it once, and the map exports nothing else.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $ret)? {
            // The caller's memory is plain bytes for us and our own state lies behind locks that know
            // poisoning, so nothing half-changed is observed after a panic.
            let body = std::panic::AssertUnwindSafe(move || $(-> $ret)? $body);
            match std::panic::catch_unwind(body) {
                Ok(value) => value,
                Err(payload) => {
                    $crate::panicked(stringify!($name), payload);
                    $on_panic
                }
            }
        }
    };
}

/// Sets the caller's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: the C library gives every thread a valid place for its errno.
    unsafe { libc::__errno_location().write(errno) };
}

/// Sets `errno` and hands back `value`: how a function that returns a pointer or -1 fails.
pub fn fail<T>(errno: c_int, value: T) -> T {
    set_errno(errno);
    value
}

/// The end of a panic that reached the C border: the program lives on and sees `EIO`.
#[doc(hidden)]
#[cold]
pub fn panicked(_entry: &'static str, payload: Box<dyn Any + Send>) {
    // Dropping a foreign payload may itself panic; leaking a few bytes is the lesser evil.
    let _leaked = std::mem::ManuallyDrop::new(payload);
    set_errno(libc::EIO);
}
