//! The shared libraries of this process.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The state of a scan.
struct Scan {
    /// Number of libraries that had been loaded by the time of the last scan.
    known: u64,
    /// Number of libraries that have been loaded so far, including those that were unloaded.
    adds: u64,
    /// The start of the file name that is looked for.
    prefix: &'static [u8],
    found: bool,
}

/// # Safety
/// The arguments are those of `dl_iterate_phdr`, and `scan` a [`Scan`].
unsafe extern "C" fn each_library(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    scan: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise. The C libraries that this is built for have `dlpi_adds`.
    let (info, scan) = unsafe { (&*info, &mut *scan.cast::<Scan>()) };
    scan.adds = info.dlpi_adds;
    if scan.adds == scan.known {
        // Nothing was loaded since the last scan.
        return 1;
    }
    if !info.dlpi_name.is_null() {
        // SAFETY: the name is a string, which stays while the callback runs.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        scan.found = name.starts_with(scan.prefix);
    }
    c_int::from(scan.found)
}

/// Whether a library is or was loaded in this process. The result and the number of examined libraries are stored.
#[derive(Debug)]
pub(crate) struct Library {
    prefix: &'static [u8],
    found: AtomicBool,
    known: AtomicU64,
}

impl Library {
    /// A library whose file name starts with `prefix`.
    pub(crate) const fn named(prefix: &'static [u8]) -> Self {
        Self {
            prefix,
            found: AtomicBool::new(false),
            known: AtomicU64::new(0),
        }
    }

    /// Searches for the library, unless it was found before or nothing was loaded since the last call.
    pub(crate) fn look(&self) {
        if self.was_found() {
            return;
        }
        let mut scan = Scan {
            known: self.known.load(Ordering::Relaxed),
            adds: 0,
            prefix: self.prefix,
            found: false,
        };
        // SAFETY: the callback gets the address of `scan`, which lives until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(each_library), (&raw mut scan).cast()) };
        self.known.store(scan.adds, Ordering::Relaxed);
        if scan.found {
            self.found.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a call of [`Self::look`] has found it.
    pub(crate) fn was_found(&self) -> bool {
        self.found.load(Ordering::Relaxed)
    }
}

/// Loads a library that runs no code when it is loaded. Returns the path of its file.
#[cfg(test)]
pub(crate) fn load(path: &CStr) -> String {
    // SAFETY: the caller's choice of the library.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
    assert!(!handle.is_null(), "{path:?}");
    let name = path.to_str().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let file = maps.lines().find(|line| line.ends_with(name)).unwrap();
    file[file.find('/').unwrap()..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_when_it_is_loaded() {
        let c = Library::named(b"libc.so");
        assert!(!c.was_found());
        c.look();
        assert!(c.was_found());
        // A library that this program does not need, and that is present on every system.
        let later = Library::named(b"libanl.so.1");
        later.look();
        later.look();
        assert!(!later.was_found());
        load(c"libanl.so.1");
        later.look();
        assert!(later.was_found());
    }
}
