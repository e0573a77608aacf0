//! Messages on the standard error.

use std::fmt;
use std::io::{self, Write};

/// Writes to standard error. An error is ignored, because there is no other place to report it.
pub(crate) fn to_stderr(text: fmt::Arguments<'_>) {
    let _not_writable = io::stderr().write_fmt(text);
}
