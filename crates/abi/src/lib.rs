//! The C ABI of libibverbs and librdmacm over the software card of `anywarp-engine`.
//!
//! Every exported function is written with [`entry!`]: check the arguments, call the engine,
//! translate the answer. Everything historical or odd about the C API lives in this crate and
//! nothing of it below.
//!
//! - [`ffi`]: how a function that C calls begins and ends; `verbs/handle.rs`: objects behind C pointers.
//!
//! - [`verbs`] and [`cm`]: one module for each of the two libraries; their `types` mirror the C
//!   headers and are held against them by the test in `layout`.
//! - [`dv`]: extensions of verbs, `<infiniband/anywarpdv.h>`.
//! - [`rsocket`]: sockets over RDMA, which librdmacm has too.
//! - [`plain`]: two functions of the C library, for plain sockets that want the port of a listener.
//! - `profile`: the limits of other devices.
//! - [`pending`]: public symbols of features that this device lacks; [`mod@refuse`]: functions that only fail.
//! - `../link/`: which symbols are exported, under which version; `cargo xtask dist` links them,
//!   `cargo xtask matrix` compares with the distribution's libraries.

// A panic ends at the C border, and can only end there if it unwinds.
#[cfg(not(panic = "unwind"))]
compile_error!(
    "build anywarp with panic = \"unwind\": with \"abort\" a panic takes the program down"
);

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

/// The allocator of this library's own code: the libraries export none.
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
/// `errno` is a function of [`ffi`]: it says how C learns of a failure. The body returns a `Result` with an errno value.
#[macro_export]
macro_rules! entry {
    (
        $(#[$meta:meta])*
        unsafe fn $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $ret:ty)?,
        $how:ident $(($failed:expr))?, { $($body:tt)* }
    ) => {
        $(#[$meta])*
        #[allow(unreachable_pub, reason = "reached from C by its name, whatever module it is in")]
        // SAFETY: the symbol is ours: link/symbols.txt names it once, and the map exports nothing else.
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
        /// Panics.
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

    /// A panic ends at the C border: the caller sees the failure value and `EIO`.
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

    /// Every function that C calls, with or without `entry!`, begins with one that catches panics, or is a constant.
    #[test]
    fn no_panic_leaves_a_function_that_c_calls() {
        const CATCH: [&str; 7] = [
            "errno",
            "errno_fast",
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
                // Functions with "C-unwind" are those in which a thread may be cancelled: see `cancel_safe`.
                for (at, _) in text.match_indices("unsafe extern \"C\" fn ") {
                    let Some((head, rest)) = text[at..].split_once('{') else {
                        continue;
                    };
                    // A type or a declaration has no body.
                    if head.contains(';') || head.trim_end().ends_with(',') {
                        continue;
                    }
                    seen += 1;
                    // The first statement, behind comments.
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

    #[allow(unreachable_pub, reason = "the macro makes what C reaches by its name")]
    mod refused {
        crate::refuse! { libc::ENOSYS;
            minus_one { anywarp_test_refused }
        }
    }

    /// `-1` is -1 for a caller that reads an `int`, a `ssize_t` or an `off_t`.
    #[test]
    fn refused_functions_fail_the_way_c_reads_it() {
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
