//! The clock: the one place that reads time.

use std::time::Instant;

/// Now.
pub fn now() -> Instant {
    Instant::now()
}
