//! The log: lines on standard error, up to the level in `ANYWARP_LOG`. It is off by default, and a call then costs a
//! load and a branch.

use std::fmt::Arguments;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::config::config;
use crate::locks::{Mutex, Rank};

pub use crate::config::Level;

/// The level of the log: 0 until it is read from the configuration, then the [`Level`] plus one.
static LEVEL: AtomicU8 = AtomicU8::new(0);

#[cold]
fn read_level() -> u8 {
    let level = config().log as u8 + 1;
    LEVEL.store(level, Ordering::Relaxed);
    level
}

/// Whether lines of this level are written.
pub fn wants(at: Level) -> bool {
    let level = match LEVEL.load(Ordering::Relaxed) {
        0 => read_level(),
        level => level,
    };
    (at as u8) < level
}

/// Writes one line.
pub fn write(at: Level, text: Arguments<'_>) {
    let name = match at {
        Level::Off => return,
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    };
    let line = format!("anywarp[{}] {name}: {text}\n", std::process::id());
    // One system call without a lock: another thread could have held a lock when this process was forked. Errors are
    // ignored.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

/// Logs at a level: `log!(Info, "qp {}: up", n)`.
#[macro_export]
macro_rules! log {
    ($level:ident, $($text:tt)*) => {
        if $crate::log::wants($crate::log::Level::$level) {
            $crate::log::write($crate::log::Level::$level, format_args!($($text)*));
        }
    };
}

/// Selects one event in a thousand, so that log lines that any host can cause do not fill the disk.
#[derive(Debug)]
pub struct Rarely(AtomicU32);

impl Rarely {
    /// A fresh counter.
    #[allow(clippy::new_without_default, reason = "used in statics")]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// True for the first event and then for every 1,000th.
    pub fn now(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(1000)
    }
}

/// Limits the lines of one kind per second, and counts those that are left out.
#[derive(Debug)]
pub(crate) struct Throttle(Mutex<(Option<Instant>, u32, u32)>);

/// The largest number of lines of one kind per second, for lines that a peer can cause at any rate.
const LINES_PER_SECOND: u32 = 20;

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Rank::LogThrottle, (None, 0, 0)))
    }

    /// Returns `None` if no line may be written now, otherwise the number of lines suppressed since the last
    /// line.
    pub(crate) fn line(&self, now: Instant) -> Option<u32> {
        let mut state = self.0.lock();
        let (since, lines, left_out) = &mut *state;
        if since.is_none_or(|t| now.saturating_duration_since(t) >= Duration::from_secs(1)) {
            *since = Some(now);
            *lines = 0;
        }
        if *lines >= LINES_PER_SECOND {
            *left_out += 1;
            return None;
        }
        *lines += 1;
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn a_peer_cannot_fill_the_log() {
        let throttle = Throttle::new();
        let begin = clock::now();
        let written = (0..1000).filter(|_| throttle.line(begin).is_some()).count();
        assert_eq!(written, LINES_PER_SECOND as usize);
        // One second later, lines are written again. The first result is the number of suppressed lines.
        let later = begin + Duration::from_secs(1);
        assert_eq!(throttle.line(later), Some(1000 - LINES_PER_SECOND));
        assert_eq!(throttle.line(later), Some(0));
    }
}
