//! Which bytes of a segmented message have arrived, and the order of the messages of one fixed peer.
//!
//! Messages of an unreliable connection arrive in order or not at all (IBA 9.8.2). The first datagram of a newer
//! message ends the incomplete message, whose receive is used for the newer one. The datagrams of a message may
//! arrive in any order, since each contains its offset.

use std::time::Duration;

use smallvec::SmallVec;

use super::types::Dropped;
use crate::verbs::source::Places;
use crate::verbs::wr::RecvRequest;
use crate::wire::rdmap::Opcode;
use crate::wire::{Stag, To};

/// A run: a range of consecutive bytes of a message. The end is exclusive.
pub(crate) type Range = (u32, u32);

/// The bytes of a message that have arrived: runs in ascending order, with gaps between them.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    ranges: SmallVec<[Range; 4]>,
}

/// The error if there would be too many gaps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyGaps;

impl Coverage {
    /// Adds `[from, to)`, and returns the parts of it that are new. Fails if there would be more than `most` runs.
    pub(crate) fn add(
        &mut self,
        from: u32,
        to: u32,
        most: usize,
    ) -> Result<SmallVec<[Range; 2]>, TooManyGaps> {
        let mut fresh = SmallVec::new();
        if from >= to {
            return Ok(fresh);
        }
        // The runs that touch the new one are merged with it. The gaps between them are the new parts.
        let first = self.ranges.partition_point(|(_, end)| *end < from);
        let behind = self.ranges.partition_point(|(start, _)| *start <= to);
        let mut at = from;
        let mut merged = (from, to);
        for (start, end) in self.ranges.iter().take(behind).skip(first).copied() {
            if start > at {
                fresh.push((at, start.min(to)));
            }
            at = at.max(end);
            merged = (merged.0.min(start), merged.1.max(end));
        }
        if at < to {
            fresh.push((at, to));
        }
        if first == behind {
            if self.ranges.len() >= most {
                return Err(TooManyGaps);
            }
            self.ranges.insert(first, merged);
        } else {
            self.ranges.drain(first + 1..behind);
            if let Some(range) = self.ranges.get_mut(first) {
                *range = merged;
            }
        }
        Ok(fresh)
    }

    /// The runs, in order.
    pub(crate) fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Whether all of `length` bytes have arrived.
    pub(crate) fn is_complete(&self, length: u32) -> bool {
        match self.ranges.as_slice() {
            [] => length == 0,
            [(0, end)] => *end == length,
            _ => false,
        }
    }
}

/// What all datagrams of one message have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) opcode: Opcode,
    pub(crate) length: u32,
    /// STag and tagged offset of the first byte of a tagged message.
    pub(crate) base: Option<(Stag, To)>,
    pub(crate) imm: Option<[u8; 4]>,
    /// The STag that a Send with Invalidate names.
    pub(crate) invalidate: Option<Stag>,
    pub(crate) solicited: bool,
}

/// A message of which not all bytes have arrived.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) identity: Identity,
    pub(crate) coverage: Coverage,
    /// The receive that a Send fills.
    pub(crate) receive: Option<RecvRequest>,
    /// The memory of the message.
    pub(crate) places: Places,
}

/// The state of the newest message of the peer.
#[derive(Debug)]
pub(crate) enum MessageState {
    /// The message is incomplete.
    Open(Box<Open>),
    /// The message is complete.
    Done,
    /// The message is not placed, for this reason.
    Refused(Dropped),
}

/// The order of a datagram's message, from its message number and its epoch alone. (The epoch distinguishes a queue pair from an earlier
/// one with the same number.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The datagram belongs to the newest message.
    Newest,
    /// The datagram belongs to a newer message than any before.
    Newer,
    /// The datagram belongs to a queue pair that replaces the peer's earlier one.
    Replaces,
    /// The datagram belongs to an older message.
    Late,
}

/// How long the datagrams of a queue pair that was replaced count as [`Order::Late`].
///
/// This is longer than the queues of a network hold a datagram, so no datagram of the earlier queue pair changes memory. It is not
/// much longer, because a datagram with a forged source can pretend that the queue pair was replaced. The datagrams of the true peer are
/// then late for this time.
pub(crate) const REPLACED_FOR: Duration = Duration::from_secs(5);

/// How long numbers of messages of which no further datagram arrives are remembered.
///
/// No network holds a datagram for so long, so that a message that is over cannot be received again. On the other hand, no source sends half
/// of all message numbers in this time, after which a newer number would look older.
pub(crate) const LIFETIME: Duration = Duration::from_secs(60);

/// A queue pair of a peer that was replaced by another one with the same number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Replaced {
    epoch: u16,
    at: Duration,
}

impl Replaced {
    pub(crate) fn new(epoch: u16, now: Duration) -> Self {
        Self { epoch, at: now }
    }

    /// Whether datagrams of this epoch are late.
    pub(crate) fn covers(&self, epoch: u16, now: Duration) -> bool {
        self.epoch == epoch && now.saturating_sub(self.at) < REPLACED_FOR
    }
}

/// The messages of one peer.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    epoch: Option<u16>,
    before: Option<Replaced>,
    newest: Option<u32>,
    /// When the last datagram of the newest message arrived.
    at: Duration,
    pub(crate) state: Option<MessageState>,
}

impl Incoming {
    /// Classifies a datagram. If the result is [`Order::Newer`], its message becomes the newest, and the caller gives up
    /// the one in `state`. If the result is [`Order::Replaces`], the caller may call [`Self::replace`].
    pub(crate) fn classify(&mut self, epoch: u16, id: u32, now: Duration) -> Order {
        match self.epoch {
            Some(present) if present == epoch => {}
            Some(_) if self.before.is_some_and(|b| b.covers(epoch, now)) => return Order::Late,
            Some(_) => return Order::Replaces,
            None => self.epoch = Some(epoch),
        }
        let is_known = now.saturating_sub(self.at) < LIFETIME;
        match self.newest {
            Some(newest) if newest == id => {
                self.at = now;
                Order::Newest
            }
            // Numbers wrap around: a number is newer if it is ahead by less than 2^31.
            Some(newest) if is_known && id.wrapping_sub(newest) >= 1 << 31 => Order::Late,
            _ => {
                self.newest = Some(id);
                self.at = now;
                Order::Newer
            }
        }
    }

    /// Returns whether a datagram of the newest message has arrived in the last few seconds.
    pub(crate) fn is_recent(&self, now: Duration) -> bool {
        now.saturating_sub(self.at) < REPLACED_FOR
    }

    /// Begins with message `id` of the queue pair that replaces the peer's earlier one, whose numbers begin anew.
    pub(crate) fn replace(&mut self, epoch: u16, id: u32, now: Duration) {
        self.before = self.epoch.map(|before| Replaced::new(before, now));
        self.epoch = Some(epoch);
        self.newest = Some(id);
        self.at = now;
    }

    /// Ends the incomplete message and returns its receive. `None`: no message was incomplete. `Some(None)`:
    /// the message has no receive.
    pub(crate) fn abandon(&mut self) -> Option<Option<RecvRequest>> {
        match self.state.take() {
            Some(MessageState::Open(open)) => Some(open.receive),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_new_exactly_once() {
        // Comparison with a plain set of bytes. The ranges come from a small deterministic generator.
        let mut n = 1_u32;
        let mut next = move |below: u32| {
            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (n >> 8) % below
        };
        for _ in 0..300 {
            let length = 1 + next(100);
            let mut coverage = Coverage::default();
            let mut model = vec![false; length as usize];
            for _ in 0..60 {
                let from = next(length + 1);
                let to = from + next(length + 1 - from);
                let fresh = coverage.add(from, to, 64).unwrap();
                let mut expected = Vec::new();
                for at in from..to {
                    if !std::mem::replace(&mut model[at as usize], true) {
                        expected.push(at);
                    }
                }
                let got: Vec<u32> = fresh.iter().flat_map(|(a, b)| *a..*b).collect();
                assert_eq!(got, expected);
                assert_eq!(coverage.is_complete(length), model.iter().all(|b| *b));
                assert!(coverage.ranges.windows(2).all(|w| w[0].1 < w[1].0));
            }
        }
    }

    #[test]
    fn a_message_of_no_bytes_is_complete_at_once() {
        let mut coverage = Coverage::default();
        assert!(coverage.add(0, 0, 64).unwrap().is_empty());
        assert!(coverage.is_complete(0));
        assert!(!coverage.is_complete(1));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut coverage = Coverage::default();
        let max = 64;
        for i in 0..max {
            assert!(coverage.add(2 * i, 2 * i + 1, 64).is_ok());
        }
        assert_eq!(coverage.add(2 * max, 2 * max + 1, 64), Err(TooManyGaps));
        // A range that fills a gap is accepted even if there are `most` runs.
        assert!(coverage.add(1, 2, 64).is_ok());
        assert!(coverage.add(2 * max, 2 * max + 1, 64).is_ok());
    }

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn newer_is_ahead_by_less_than_half_of_the_numbers() {
        let mut rx = Incoming::default();
        assert_eq!(rx.classify(7, u32::MAX, NOW), Order::Newer);
        assert_eq!(rx.classify(7, u32::MAX, NOW), Order::Newest);
        assert_eq!(rx.classify(7, 0, NOW), Order::Newer);
        assert_eq!(rx.classify(7, u32::MAX, NOW), Order::Late);
        assert_eq!(rx.classify(7, 0x7fff_ffff, NOW), Order::Newer);
        assert_eq!(rx.classify(7, 0xffff_ffff, NOW), Order::Late);
    }

    #[test]
    fn numbers_are_forgotten_when_no_datagram_of_theirs_can_arrive() {
        let mut rx = Incoming::default();
        let half = 1 << 31;
        assert_eq!(rx.classify(7, 5, NOW), Order::Newer);
        let end = NOW + LIFETIME;
        let before = end - Duration::from_nanos(1);
        assert_eq!(rx.classify(7, 5 + half, before), Order::Late);
        assert_eq!(rx.classify(7, 5 + half, end), Order::Newer);
        assert_eq!(rx.classify(7, 5, end), Order::Late);
    }

    #[test]
    fn a_new_epoch_resets_the_numbers_and_the_old_one_is_late_for_some_time() {
        let mut rx = Incoming::default();
        assert_eq!(rx.classify(7, 100, NOW), Order::Newer);
        assert_eq!(rx.classify(8, 1, NOW), Order::Replaces);
        assert_eq!(rx.classify(7, 101, NOW), Order::Newer, "nothing changed");
        rx.replace(8, 1, NOW);
        assert_eq!(rx.classify(7, 102, NOW), Order::Late);
        assert_eq!(rx.classify(8, 2, NOW), Order::Newer);
        let end = NOW + REPLACED_FOR;
        assert_eq!(
            rx.classify(7, 103, end - Duration::from_nanos(1)),
            Order::Late
        );
        assert_eq!(rx.classify(7, 104, end), Order::Replaces);
    }
}
