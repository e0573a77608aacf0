//! Whether the program runs with more privileges than the process that started it.

/// True for a set-user-ID or set-group-ID program and for one with file capabilities (AT_SECURE of getauxval(3)).
pub fn has_more_rights_than_its_caller() -> bool {
    // SAFETY: reads a number that the kernel passed at start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
