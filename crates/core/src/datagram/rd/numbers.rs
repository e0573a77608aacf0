//! Packet numbers and times as the wire carries them: truncated to 32 bits.

use std::time::Duration;

pub(super) fn micros(at: Duration) -> u32 {
    // 0 means "none".
    (at.as_micros() as u32).max(1)
}

/// The number near `near` whose lower half is `wire`.
pub(super) fn expand(wire: u32, near: u64) -> u64 {
    let ahead = wire.wrapping_sub(near as u32).cast_signed();
    near.wrapping_add_signed(i64::from(ahead))
}
