//! The clock: the one place that reads time.

use std::sync::OnceLock;
use std::time::Instant;

/// Now.
pub fn now() -> Instant {
    Instant::now()
}

/// The moment that the core's times count from: that of the first call of this.
pub fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(now)
}
