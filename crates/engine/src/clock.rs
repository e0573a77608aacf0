//! The clock. Other files read the time here or by `Instant::elapsed`, except `capture`, which also needs the time of day, and
//! `net/shm.rs` for its offers.

use std::time::Instant;

use crate::process::Inherited;

/// The current time.
pub fn now() -> Instant {
    Instant::now()
}

/// Nanoseconds of the host's monotonic clock, which is the same in all processes.
pub(crate) fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + nanos.unwrap_or(0)
}

/// The start of the core's time scale: the first call of this function.
pub fn start() -> Instant {
    static START: Inherited<Instant> = Inherited::new(now);
    *START.get()
}
