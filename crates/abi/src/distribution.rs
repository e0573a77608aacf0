//! Access to the distribution's libraries, for tests that compare their results with those of this library.

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

/// The distribution's libibverbs, by its full path, so that the one of this project is not loaded.
pub(crate) const IBVERBS: &CStr = path!("libibverbs.so.1");
/// The distribution's librdmacm.
pub(crate) const RDMACM: &CStr = path!("librdmacm.so.1");

/// Returns the address of `name` in `library`. If the library is not installed, prints a message and returns `None`.
pub(crate) fn symbol(library: &CStr, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the path is a C string; the library's constructors only set up its own state.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        eprintln!("{library:?} is not installed: nothing compared");
        return None;
    }
    // SAFETY: the handle came from `dlopen` and is never closed; the name is a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "{library:?} has no {name:?}");
    Some(address)
}
