//! Lines for people: to standard error, if `ANYWARP_LOG` asks for it.

use crate::real;
use crate::sys;
use std::sync::OnceLock;

static ON: OnceLock<bool> = OnceLock::new();

/// Writes a line if the log is on. It is not written through std: its locks may be held at a fork.
pub fn line(text: &str) {
    if is_on() {
        always(text);
    }
}

/// Writes a line, which is made only if the log is on.
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

/// Writes a line, also without a log.
pub fn always(text: &str) {
    let line = format!("anywarp sockets[{}]: {text}\n", std::process::id());
    // SAFETY: the bytes are readable.
    let _ = unsafe { real::write(2, line.as_ptr().cast(), line.len()) };
}
