//! The C ABI of libibverbs and librdmacm over the software card of `anywarp-engine`.
//!
//! Every exported function is written with [`entry!`]: check the arguments, call the engine,
//! translate the answer. Everything historical or odd about the C API lives in this crate and
//! nothing of it below.
//!
//! - [`verbs`] and [`cm`]: one module for each of the two libraries; their `types` mirror the C
//!   headers and are held against them by the test in `layout`.
//! - [`dv`]: what we have beyond both, `<infiniband/anywarpdv.h>`.
//! - [`rsocket`]: sockets over RDMA, which librdmacm has too.
//! - `profile`: the limits of other devices.
//! - [`pending`]: public symbols of what this device does not have; [`mod@refuse`]: how a symbol only fails.
//! - `../link/`: which symbols are exported, under which version; `cargo xtask dist` links them,
//!   `cargo xtask matrix` compares with the distribution's libraries.

// A panic ends at the C border, and can only end there if it unwinds.
#[cfg(not(panic = "unwind"))]
compile_error!(
    "build anywarp with panic = \"unwind\": with \"abort\" a panic takes the program down"
);

#[cfg(test)]
mod distribution;
mod held;
mod layout;

pub mod cm;
pub mod dv;
pub mod pending;
mod profile;
pub mod refuse;
pub mod rsocket;
pub mod verbs;

/// Of our code alone: the libraries export no allocator.
#[global_allocator]
static MEMORY: anywarp_engine::reserve::Allocator = anywarp_engine::reserve::Allocator;

use std::any::Any;
use std::ffi::c_int;

#[doc(hidden)]
pub use anywarp_engine::sys::thread::Uncancelled;

/// Exports a C entry point under its own name.
///
/// ```text
/// entry! {
///     /// `ibv_dealloc_pd(3)`.
///     ///
///     /// # Safety
///     /// `pd` is null or came from `ibv_alloc_pd`, and is not used after this returns 0.
///     unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, on_panic = EIO, { … }
/// }
/// ```
///
/// A panic must not cross into C: it is caught, the device counts as broken (`anywarp_engine::fatal`), `errno` becomes
/// `EIO`, and the caller gets `on_panic`. The thread is not cancelled in it.
#[macro_export]
macro_rules! entry {
    (
        $(#[$meta:meta])*
        unsafe fn $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $ret:ty)?, on_panic = $on_panic:expr, { $($body:tt)* }
    ) => {
        $(#[$meta])*
        #[allow(unreachable_pub, reason = "reached from C by its name, whatever module it is in")]
        // SAFETY: the symbol is ours: link/symbols.txt names it once, and the map exports nothing else.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $ret)? {
            let _inside = $crate::Uncancelled::new();
            // The caller's memory is plain bytes for us and our own state lies behind locks that know
            // poisoning, so nothing half-changed is observed after a panic.
            let body = std::panic::AssertUnwindSafe(move || $(-> $ret)? { $($body)* });
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

/// Runs the body of a function that C calls through a pointer; after a panic gives `on_panic`. The thread is not
/// cancelled meanwhile.
pub(crate) fn guard<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    let _inside = Uncancelled::new();
    quick_guard(on_panic, body)
}

/// The same for functions that make no system call in which a thread can be cancelled: those that post and poll.
pub(crate) fn quick_guard<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(payload) => {
            panicked("a verb", payload);
            on_panic
        }
    }
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

/// The end of a panic that reached the C border: the program lives on and sees `EIO`, and a broken device.
#[doc(hidden)]
#[cold]
pub fn panicked(entry: &'static str, payload: Box<dyn Any + Send>) {
    anywarp_engine::fatal::caught(entry, &*payload);
    // Dropping a foreign payload may itself panic; leaking a few bytes is the lesser evil.
    let _leaked = std::mem::ManuallyDrop::new(payload);
    set_errno(libc::EIO);
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    entry! {
        /// Panics.
        ///
        /// # Safety
        /// None needed.
        unsafe fn anywarp_test_panics(how: c_int) -> c_int, on_panic = -1, {
            if how != 0 {
                panic!("asked to");
            }
            0
        }
    }

    /// A panic ends at the C border: the caller sees the failure value and `EIO`.
    #[test]
    fn a_panic_does_not_cross_into_c() {
        // SAFETY: none needed.
        assert_eq!(unsafe { anywarp_test_panics(0) }, 0);
        super::set_errno(0);
        // SAFETY: none needed.
        assert_eq!(unsafe { anywarp_test_panics(1) }, -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EIO));
    }

    /// What C calls without `entry!` catches panics itself, or calls something that does.
    #[test]
    fn no_panic_leaves_a_function_that_c_calls() {
        const CATCH: [&str; 5] = [
            "guard(",
            "with_builder(",
            "begin(",
            "write_port(",
            // Reads a field of a struct that lies there.
            " read(",
        ];
        let mut folders = vec![std::path::PathBuf::from(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/src"
        ))];
        let mut seen = 0;
        let mut bare = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                for (at, _) in text.match_indices("unsafe extern \"C") {
                    let item = &text[at..];
                    // A definition: its name follows at once, and a body before any semicolon.
                    let Some((head, rest)) = item.split_once('{') else {
                        continue;
                    };
                    if head.contains(';') || head.contains("fn(") || head.contains('$') {
                        continue;
                    }
                    seen += 1;
                    let body = rest.split_once("\n}").map_or(rest, |(body, _)| body);
                    let body = if rest.starts_with('}') {
                        ""
                    } else {
                        body.trim()
                    };
                    let trivial = !body.contains('(') || body.starts_with("fail(libc::");
                    if !trivial && !CATCH.iter().any(|c| body.contains(c)) {
                        bare.push(format!("{}: {head}", path.display()));
                    }
                }
            }
        }
        assert!(seen > 40, "{seen} functions found");
        assert!(bare.is_empty(), "{}", bare.join("\n"));
    }

    #[allow(unreachable_pub, reason = "the macro makes what C reaches by its name")]
    mod refused {
        crate::refuse! { libc::ENOSYS;
            minus_one { anywarp_test_refused }
        }
    }

    /// `-1` is -1 for a caller that reads an `int`, a `ssize_t` or an `off_t`.
    #[test]
    fn refused_functions_fail_the_way_c_reads_it() {
        super::set_errno(0);
        assert_eq!(refused::anywarp_test_refused(), -1);
        assert_eq!(refused::anywarp_test_refused() as c_int, -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::ENOSYS));
        assert!(super::pending::ibv_reg_dmabuf_mr().is_null());
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EOPNOTSUPP));
    }
}
