//! The clock: the one place that reads time.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Now.
pub fn now() -> Instant {
    Instant::now()
}

/// Time since the first call of this.
pub fn elapsed() -> Duration {
    now().saturating_duration_since(start())
}

/// The moment that [`elapsed`] counts from.
pub fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(now)
}
