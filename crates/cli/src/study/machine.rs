//! How much processor time was idle during a measurement, and how much the host of a virtual machine took (steal).

use std::fs;

/// Times of all processors since boot, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Times {
    all: u64,
    idle: u64,
    steal: u64,
}

impl Times {
    /// Reads the current times from /proc/stat.
    pub(crate) fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        // Columns: user, nice, system, idle, iowait, irq, softirq, steal. The columns after these are parts of user and nice.
        let all: Vec<u64> = line
            .split_whitespace()
            .take(8)
            .filter_map(|ticks| ticks.parse().ok())
            .collect();
        let at = |n: usize| all.get(n).copied();
        Some(Self {
            all: all.iter().sum(),
            idle: at(3)? + at(4)?,
            steal: at(7)?,
        })
    }

    /// Returns two percentages of the time since `then`: how much the processors were idle, and how much the host took.
    pub(crate) fn since(&self, then: &Self) -> Option<(f64, f64)> {
        let all = self.all.checked_sub(then.all).filter(|all| *all > 0)? as f64;
        let share = |now: u64, then: u64| now.saturating_sub(then) as f64 * 100.0 / all;
        Some((share(self.idle, then.idle), share(self.steal, then.steal)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_time_between_two_samples() {
        let then =
            Times::parse("cpu  10 0 10 70 0 0 0 10 5 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n").unwrap();
        let now = Times::parse("cpu  30 0 30 110 10 0 0 20 5 0\n").unwrap();
        assert_eq!(now.since(&then), Some((50.0, 10.0)));
        assert_eq!(then.since(&then), None);
        assert_eq!(Times::parse("cpu  1 2\n"), None);
        assert_eq!(Times::parse(""), None);
    }
}
