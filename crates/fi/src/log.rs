//! Messages for users, in the log of libfabric (`FI_LOG_LEVEL`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

type Log =
    unsafe extern "C" fn(*const c_void, c_int, c_int, *const c_char, c_int, *const c_char, ...);

static PROVIDER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
type Enabled = unsafe extern "C" fn(*const c_void, c_int, c_int) -> c_int;

static LOG: OnceLock<Option<(Log, Enabled)>> = OnceLock::new();

/// The level for problems that the user has to solve.
const WARNING: c_int = 0;
/// The level for explanations of the provider's decisions.
const INFO: c_int = 2;
/// The subsystem `FI_LOG_CORE`.
const CORE: c_int = 0;

unsafe extern "C" fn each_library(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a structure with the name of a library, and the pointer that `find` passed.
    unsafe {
        let name = (*info).dlpi_name;
        if name.is_null() {
            return 0;
        }
        let name = CStr::from_ptr(name);
        let is_it = name.to_string_lossy().contains("/libfabric.so");
        if is_it {
            *found.cast::<Option<CString>>() = Some(name.into());
        }
        c_int::from(is_it)
    }
}

/// Returns `fi_log` and `fi_log_enabled` of the loaded libfabric, or `None` if no libfabric with these functions is found.
fn find() -> Option<(Log, Enabled)> {
    let mut library: Option<CString> = None;
    // SAFETY: the callback gets the address of `library`, which is live during the call. The library is loaded already, and
    // its functions have had these types since its first version.
    unsafe {
        libc::dl_iterate_phdr(Some(each_library), (&raw mut library).cast());
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
        let handle = libc::dlopen(library?.as_ptr(), flags);
        if handle.is_null() {
            return None;
        }
        let log = libc::dlsym(handle, c"fi_log".as_ptr());
        let enabled = libc::dlsym(handle, c"fi_log_enabled".as_ptr());
        (!log.is_null() && !enabled.is_null()).then(|| {
            (
                std::mem::transmute::<*mut c_void, Log>(log),
                std::mem::transmute::<*mut c_void, Enabled>(enabled),
            )
        })
    }
}

/// Returns the value of an environment variable, or `None` in a set-user-ID program, which must not trust its environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    // SAFETY: the call returns a number that the kernel passed at start.
    let has_more_rights = unsafe { libc::getauxval(libc::AT_SECURE) != 0 };
    if has_more_rights {
        return None;
    }
    std::env::var(name).ok()
}

/// Sets the `fi_provider` that is named in all lines. libfabric identifies a provider by the address of this structure. Lines
/// before this call are not written.
pub(crate) fn init(provider: *mut c_void) {
    PROVIDER.store(provider, Ordering::Release);
}

/// Writes a line about a problem that the user has to solve.
pub(crate) fn warn(text: &str) {
    line(WARNING, text);
}

/// Writes a line that explains a decision of the provider.
pub(crate) fn info(text: &str) {
    line(INFO, text);
}

fn line(level: c_int, text: &str) {
    let provider = PROVIDER.load(Ordering::Acquire);
    if provider.is_null() {
        return;
    }
    let Some((log, enabled)) = *LOG.get_or_init(find) else {
        return;
    };
    let Ok(text) = CString::new(format!("{text}\n")) else {
        return;
    };
    // SAFETY: the format takes one string.
    unsafe {
        if enabled(provider, level, CORE) != 0 {
            let (function, format) = (c"anywarp".as_ptr(), c"%s".as_ptr());
            log(provider, level, CORE, function, 0, format, text.as_ptr());
        }
    }
}
