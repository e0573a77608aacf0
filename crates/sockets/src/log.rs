//! Log lines on standard error, enabled by `ANYWARP_LOG`.

use crate::real;
use crate::sys;
use std::sync::OnceLock;

static ON: OnceLock<bool> = OnceLock::new();

/// Writes a line if the log is enabled. It bypasses `std::io`, whose locks may be held by another thread at a fork.
pub fn line(text: &str) {
    if is_on() {
        always(text);
    }
}

/// Writes a line if the log is enabled. `text` is called only then.
pub fn with(text: impl FnOnce() -> String) {
    if is_on() {
        always(&text());
    }
}

fn is_on() -> bool {
    *ON.get_or_init(|| {
        !sys::has_more_rights_than_its_caller()
            && std::env::var_os("ANYWARP_LOG").is_some_and(|v| !v.is_empty() && v != "off")
    })
}

/// Writes a line even if the log is disabled.
pub fn always(text: &str) {
    let line = format!("anywarp sockets[{}]: {text}\n", std::process::id());
    // SAFETY: the bytes are readable.
    let _ = unsafe { real::write(2, line.as_ptr().cast(), line.len()) };
}
