//! The distribution's libraries, for tests that compare the results of our functions with those of the originals.

use std::ffi::{CStr, c_void};

/// The full path of a library in Debian's multiarch folder.
macro_rules! path {
    ($name:literal) => {
        match CStr::from_bytes_with_nul(
            if cfg!(target_arch = "aarch64") {
                concat!("/usr/lib/aarch64-linux-gnu/", $name, "\0")
            } else {
                concat!("/usr/lib/x86_64-linux-gnu/", $name, "\0")
            }
            .as_bytes(),
        ) {
            Ok(path) => path,
            Err(_) => c"",
        }
    };
}

/// The distribution's libibverbs, by path: never the one that we build.
pub(crate) const IBVERBS: &CStr = path!("libibverbs.so.1");
/// The distribution's librdmacm.
pub(crate) const RDMACM: &CStr = path!("librdmacm.so.1");

/// The address of `name` in `library`. If the library is not installed: a message on stderr, and `None`.
pub(crate) fn symbol(library: &CStr, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string; the library's constructors only set up its own state.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        eprintln!("{library:?} is not installed: nothing compared");
        return None;
    }
    // SAFETY: a handle from `dlopen` that is never closed, and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "{library:?} has no {name:?}");
    Some(address)
}
