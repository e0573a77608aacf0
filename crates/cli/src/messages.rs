//! Messages on the standard error.

use std::fmt;
use std::io::{self, Write};

/// Writes to the standard error. If that fails, nobody can be told.
pub(crate) fn to_stderr(text: fmt::Arguments<'_>) {
    let _not_writable = io::stderr().write_fmt(text);
}
