//! Times as nanoseconds since the reactor was created, which fit into an atomic integer.

use std::time::Instant;

/// The start of this time scale.
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
        since
            .as_secs()
            .saturating_mul(1_000_000_000)
            .saturating_add(u64::from(since.subsec_nanos()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_time_beyond_the_integer_range_is_the_latest_time() {
        let start = Instant::now();
        let epoch = Epoch::new(start);
        assert_eq!(epoch.nanos(start + Duration::new(3, 7)), 3_000_000_007);
        assert_eq!(epoch.nanos(start + Duration::from_secs(1 << 40)), u64::MAX);
    }
}
