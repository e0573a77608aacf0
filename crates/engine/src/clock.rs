//! The clock. Only this file reads the time.

use std::sync::OnceLock;
use std::time::Instant;

/// The current time.
pub fn now() -> Instant {
    Instant::now()
}

/// The start of the core's time scale: the first call of this function.
pub fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(now)
}
