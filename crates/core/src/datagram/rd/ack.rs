//! When acknowledgements are sent: after how many packets, and how long one is delayed for others.

use std::time::Duration;

/// Packets that are acknowledged together: where none is missing a part of what is under way, so that their sender goes on
/// meanwhile, with its least and its most; and where some are.
pub(super) fn together(under_way: u32) -> u32 {
    (under_way / PART).clamp(ACK_EACH, ACK_MOST)
}

pub(super) const PART: u32 = 4;
pub(super) const ACK_EACH: u32 = 32;
pub(super) const ACK_MOST: u32 = 128;
pub(super) const ACK_WITH_GAPS: u32 = 16;
/// Packets under way from which on an acknowledgement waits for a packet to travel with, and how long: some time, and more for each 1,000
/// bytes of a packet.
pub(super) const PIPELINE: u32 = 4;
pub(super) const ACK_DELAY: Duration = Duration::from_micros(5);
pub(super) const ACK_DELAY_PER_KILOBYTE: Duration = Duration::from_nanos(300);
/// The same where the sender has many more under way than are to be acknowledged: until its next run comes.
pub(super) const MANY: u32 = 128;
pub(super) const ACK_DELAY_MANY_PEERS: Duration = Duration::from_micros(60);
