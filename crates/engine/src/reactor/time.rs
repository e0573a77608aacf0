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
        u64::try_from(at.saturating_duration_since(self.0).as_nanos()).unwrap_or(u64::MAX)
    }
}
