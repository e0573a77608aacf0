//! Times as nanoseconds since the reactor was made, which fit into an atomic integer.

use std::time::Instant;

/// The time that nanoseconds count from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epoch(Instant);

impl Epoch {
    pub(super) fn new(start: Instant) -> Self {
        Self(start)
    }

    /// Nanoseconds from the epoch to `at`.
    #[inline]
    pub(super) fn nanos(self, at: Instant) -> u64 {
        // 64 bits of nanoseconds are 584 years. `Duration::as_nanos` has 128 bits, which cost more.
        let since = at.saturating_duration_since(self.0);
        since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
    }
}
