//! Log lines on standard error, enabled by `ANYWARP_LOG`.

use crate::inherited::Inherited;
use crate::real;
use crate::sys;
use anywarp_core::env::LOG_LEVELS;

static ON: Inherited<bool> = Inherited::new(|| {
    if sys::has_more_rights_than_its_caller() {
        return false;
    }
    let level = std::env::var_os("ANYWARP_LOG").unwrap_or_default();
    let (is_on, warning) = read(&level.to_string_lossy());
    if let Some(warning) = warning {
        always(&warning);
    }
    is_on
});

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
    *ON.get()
}

/// Returns whether a value of `ANYWARP_LOG` enables the log, and a warning if it is unknown. As in the device, an unknown value
/// leaves the log off, as if the variable were not set, and is reported nevertheless.
fn read(level: &str) -> (bool, Option<String>) {
    let known = |name: &str| level.eq_ignore_ascii_case(name);
    if level.is_empty() || known("off") {
        (false, None)
    } else if LOG_LEVELS.into_iter().chain(["warning"]).any(known) {
        (true, None)
    } else {
        let warning = format!(
            "warning: ANYWARP_LOG: unknown value '{level}', the log is off; the values are {}",
            LOG_LEVELS.join(", ")
        );
        (false, Some(warning))
    }
}

/// Writes a line even if the log is disabled.
pub fn always(text: &str) {
    let line = format!("anywarp sockets[{}]: {text}\n", std::process::id());
    // SAFETY: the bytes are readable.
    let _ = unsafe { real::write(2, line.as_ptr().cast(), line.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_level_is_as_if_unset_and_reported() {
        for level in ["", "off", "OFF"] {
            assert_eq!(read(level), (false, None), "{level}");
        }
        for level in ["info", "INFO", "warning", "trace"] {
            assert_eq!(read(level), (true, None), "{level}");
        }
        let (is_on, warning) = read("foo");
        assert!(!is_on && warning.unwrap().contains("unknown value 'foo'"));
    }
}
