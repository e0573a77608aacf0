//! The C ABI of libibverbs and librdmacm for the software RNIC of `anywarp-engine`.
//!
//! Exported functions that do something are defined with [`entry!`], except those in which a thread may be cancelled. Exported
//! functions that only fail are defined with [`refuse!`]. A function of [`entry!`] checks its arguments, calls the engine and
//! converts the result.
//! Everything specific to the C API is in this crate; the crates below do not depend on it.
//!
//! - [`ffi`]: entry and exit of functions that C calls; `verbs/handle.rs`: objects behind C pointers.
//! - [`verbs`] and [`cm`]: one module for each of the two libraries.
//! - [`dv`]: extensions of verbs, `<infiniband/anywarpdv.h>`.
//! - [`rsocket`]: sockets over RDMA, which are a part of librdmacm.
//! - [`plain`]: `bind` and `listen` of the C library. If a plain socket of the program needs a port that an identifier of rdma_cm uses, the
//!   identifier moves to another port.
//! - `profile`: device profiles, which report and enforce the limits of other devices.
//! - [`pending`]: public symbols of features that this device lacks; [`mod@refuse`]: functions that only fail.
//! - `../link/`: the exported symbols and their versions. `cargo xtask dist` links them, and `cargo xtask matrix` compares them
//!   with those of the distribution's libraries.

// Panics are caught at the C boundary, which requires unwinding.
#[cfg(not(panic = "unwind"))]
compile_error!("build anywarp with panic = \"unwind\": with \"abort\" a panic ends the program");

mod cancel_safe;
#[cfg(test)]
mod distribution;

pub mod cm;
pub mod dv;
pub mod ffi;
pub mod pending;
pub mod plain;
mod profile;
pub mod refuse;
pub mod rsocket;
pub mod verbs;

/// The allocator of this library's own code. The libraries do not export an allocator.
#[global_allocator]
static MEMORY: anywarp_engine::reserve::Allocator = anywarp_engine::reserve::Allocator;

/// Exports a C entry point under its own name.
///
/// ```text
/// entry! {
///     /// `ibv_dealloc_pd(3)`.
///     ///
///     /// # Safety
///     /// `pd` is null or came from `ibv_alloc_pd`, and is not used after this returns 0.
///     unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, errno, { … }
/// }
/// ```
///
/// `errno` is a function of [`ffi`] that reports failures to C. The body returns a `Result`, whose error is an errno. With
/// the function [`ffi::value`] the body returns the result of the call itself.
#[macro_export]
macro_rules! entry {
    (
        $(#[$meta:meta])*
        unsafe fn $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $ret:ty)?,
        $how:ident $(($failed:expr))?, { $($body:tt)* }
    ) => {
        $(#[$meta])*
        #[allow(unreachable_pub, reason = "reached from C by its name, whatever module it is in")]
        // SAFETY: the symbol is defined by this library: link/symbols.txt lists it once, and the map exports nothing else.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $ret)? {
            $crate::ffi::$how(stringify!($name), $($failed,)? move || { $($body)* })
        }
    };
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    entry! {
        /// Panics if `how` is not 0.
        ///
        /// # Safety
        /// The function has no requirements.
        unsafe fn anywarp_test_panics(how: c_int) -> c_int, minus_one, {
            if how != 0 {
                panic!("on purpose");
            }
            Ok(0)
        }
    }

    /// A panic is caught at the C boundary: the caller gets the failure value and `EIO`.
    #[test]
    fn a_panic_does_not_cross_into_c() {
        // SAFETY: the function has no requirements.
        assert_eq!(unsafe { anywarp_test_panics(0) }, 0);
        super::ffi::set_errno(0);
        // SAFETY: the function has no requirements.
        assert_eq!(unsafe { anywarp_test_panics(1) }, -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EIO));
    }

    /// Every function that C calls, with or without `entry!`, begins with a call of a function of [`ffi`](crate::ffi) that catches
    /// panics, or only returns a constant.
    #[test]
    fn no_panic_leaves_a_function_that_c_calls() {
        const CATCH: [&str; 8] = [
            "errno",
            "errno_fast",
            "code_fast",
            "minus_one",
            "null",
            "nothing",
            "or",
            "or_fast",
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
                // Functions with "C-unwind" are not checked: a thread may be cancelled in them (see `cancel_safe`).
                for (at, _) in text.match_indices("unsafe extern \"C\" fn ") {
                    let Some((head, rest)) = text[at..].split_once('{') else {
                        continue;
                    };
                    // A type or a declaration has no body.
                    if head.contains(';') || head.trim_end().ends_with(',') {
                        continue;
                    }
                    seen += 1;
                    // The first statement after comments.
                    let code: String = rest
                        .lines()
                        .map(|line| line.split("//").next().unwrap_or_default().trim())
                        .collect();
                    let code = code.trim_start_matches("$crate::ffi::");
                    let constant = code.starts_with('}') || code.starts_with("fail(libc::");
                    let first = code.split('(').next().unwrap_or_default();
                    if !constant && !CATCH.contains(&first) && first != "$how" {
                        bare.push(format!("{}: {head}", path.display()));
                    }
                }
            }
        }
        assert!(seen > 30, "{seen} functions found");
        assert!(bare.is_empty(), "{}", bare.join("\n"));
    }

    #[allow(
        unreachable_pub,
        reason = "C reaches the functions of the macro by name"
    )]
    mod refused {
        crate::refuse! { libc::ENOSYS;
            minus_one { anywarp_test_refused }
        }
    }

    /// A `minus_one` function of `refuse!` returns a 64-bit -1, so a caller reads -1 whether the header declares the result as
    /// `int`, `ssize_t` or `off_t`.
    #[test]
    fn refused_functions_fail_by_the_convention_of_their_type() {
        super::ffi::set_errno(0);
        assert_eq!(refused::anywarp_test_refused(), -1);
        assert_eq!(refused::anywarp_test_refused() as c_int, -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::ENOSYS));
        assert!(super::pending::ibv_reg_dmabuf_mr().is_null());
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EOPNOTSUPP));
    }
}
