//! The policy for acknowledgements: after how many packets one is sent, and how long it may be delayed.

use std::time::Duration;

/// Returns the number of packets that one acknowledgement covers if none is missing. The number is a quarter of the packets
/// under way, so that an acknowledgement arrives before the sender's window is full, but at least [`ACK_EACH`] and at most
/// [`ACK_MOST`]. If packets are missing, [`ACK_WITH_GAPS`] applies.
pub(super) fn together(under_way: u32) -> u32 {
    (under_way / PART).clamp(ACK_EACH, ACK_MOST)
}

pub(super) const PART: u32 = 4;
pub(super) const ACK_EACH: u32 = 32;
pub(super) const ACK_MOST: u32 = 128;
pub(super) const ACK_WITH_GAPS: u32 = 16;
/// If at least this many packets are under way, an acknowledgement is delayed so that it can travel with a packet in
/// the other direction. The delay is [`ACK_DELAY`], plus [`ACK_DELAY_PER_KILOBYTE`] for each 1,000 bytes of a packet.
pub(super) const PIPELINE: u32 = 4;
pub(super) const ACK_DELAY: Duration = Duration::from_micros(5);
pub(super) const ACK_DELAY_PER_KILOBYTE: Duration = Duration::from_nanos(300);
/// If at least this many packets are under way, and fewer than a quarter of that number have arrived since the last
/// acknowledgement, the delay is longer by [`ACK_DELAY_MANY`]: the sender sends its next packets together, and one
/// acknowledgement then covers them too.
pub(super) const MANY: u32 = 128;
pub(super) const ACK_DELAY_MANY: Duration = Duration::from_micros(60);
