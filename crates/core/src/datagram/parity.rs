//! Parity: the exclusive or of a group of datagrams, from which one lost datagram of the group can be restored.
//!
//! The datagrams of a message are numbered by their offset. A group is `n` consecutive datagrams. All datagrams of a
//! message except the last have the same length; a shorter one is padded with zeros for the sum.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bounds;

/// Largest number of incomplete groups of one message.
const GROUPS: usize = 64;

/// Combines `bytes` into `sum` by exclusive or. `sum` grows to the length of `bytes`.
pub(super) fn add(sum: &mut Vec<u8>, bytes: &[u8]) {
    if sum.len() < bytes.len() {
        sum.resize(bytes.len(), 0);
    }
    for (s, b) in sum.iter_mut().zip(bytes) {
        *s ^= b;
    }
}

/// Limits the memory of the groups of all messages of a queue pair.
#[derive(Debug, Clone, Default)]
pub(super) struct Budget(Arc<AtomicUsize>);

impl Budget {
    /// Reserves `bytes`. Returns false if the limit would be exceeded.
    fn take(&self, bytes: usize) -> bool {
        let taken = self.0.load(Ordering::Relaxed) + bytes;
        let fits = taken <= bounds::PARITY_BYTES;
        if fits {
            self.0.store(taken, Ordering::Relaxed);
        }
        fits
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Group {
    sum: Vec<u8>,
    /// Bit `i`: datagram `i` of the group is in the sum.
    have: u16,
    parity: bool,
}

/// The incomplete groups of a message, of which some datagrams have arrived.
#[derive(Debug)]
pub(super) struct Groups {
    length: u32,
    segment: u32,
    many: u32,
    open: BTreeMap<u32, Group>,
    budget: Budget,
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.budget
            .give_back(self.open.values().map(|g| g.sum.len()).sum());
    }
}

impl Groups {
    /// Groups of `many` datagrams, for a message of `length` bytes in datagrams of `segment` bytes. `None` if `segment` or
    /// `many` is 0.
    pub(super) fn new(length: u32, segment: u16, many: u8, budget: &Budget) -> Option<Self> {
        (segment > 0 && many > 0).then(|| Self {
            length,
            segment: segment.into(),
            many: many.into(),
            open: BTreeMap::new(),
            budget: budget.clone(),
        })
    }

    fn close(&mut self, number: u32) -> Option<Group> {
        let group = self.open.remove(&number)?;
        self.budget.give_back(group.sum.len());
        Some(group)
    }

    /// Whether a later datagram names the same `segment` and `many`.
    pub(super) fn agrees(&self, segment: u16, many: u8) -> bool {
        self.segment == u32::from(segment) && self.many == u32::from(many)
    }

    /// Length of the datagram at `offset`.
    fn len_at(&self, offset: u32) -> u32 {
        self.segment.min(self.length.saturating_sub(offset))
    }

    /// Adds a datagram of the message, or a parity datagram. Returns the datagram that can be restored now: its
    /// offset and bytes.
    pub(super) fn add_datagram(
        &mut self,
        offset: u32,
        payload: &[u8],
        parity: bool,
    ) -> Option<(u32, Vec<u8>)> {
        if !offset.is_multiple_of(self.segment) {
            return None;
        }
        let index = offset / self.segment;
        let (number, place) = (index / self.many, index % self.many);
        let whole = payload.len() as u64 == u64::from(self.len_at(offset));
        if !whole || (parity && place != 0) {
            return None;
        }
        if !self.open.contains_key(&number) && self.open.len() >= GROUPS {
            let oldest = self.open.first_key_value().map(|(number, _)| *number);
            if let Some(oldest) = oldest {
                self.close(oldest);
            }
        }
        let first = number * self.many * self.segment;
        let left = self.length.saturating_sub(first);
        let members = left.div_ceil(self.segment).min(self.many);
        let group = self.open.entry(number).or_default();
        if parity {
            if std::mem::replace(&mut group.parity, true) {
                return None;
            }
        } else {
            let bit = 1 << place;
            if group.have & bit != 0 {
                return None;
            }
            group.have |= bit;
        }
        let more = payload.len().saturating_sub(group.sum.len());
        if !self.budget.take(more) {
            // Lost datagrams of this group cannot be restored any more.
            self.close(number);
            return None;
        }
        add(&mut group.sum, payload);
        let missing = members - group.have.count_ones().min(members);
        if missing == 0 {
            self.close(number);
            return None;
        }
        if missing > 1 || !group.parity {
            return None;
        }
        let place = (0..members).find(|place| group.have & (1 << place) == 0)?;
        let group = self.close(number)?;
        let offset = first + place * self.segment;
        let mut bytes = group.sum;
        bytes.truncate(usize::try_from(self.len_at(offset)).ok()?);
        Some((offset, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_datagram_of_a_group_is_restored_from_the_others() {
        let message: Vec<u8> = (0..1050_u32).map(|n| (n * 7 % 251) as u8).collect();
        let cut: Vec<(u32, &[u8])> = message
            .chunks(100)
            .enumerate()
            .map(|(i, c)| (i as u32 * 100, c))
            .collect();
        for lost in 0..cut.len() {
            for late in [false, true] {
                let mut groups = Groups::new(1050, 100, 4, &Budget::default()).unwrap();
                let mut made = None;
                let group = lost / 4;
                let mut sum = Vec::new();
                for (_, c) in cut.iter().skip(group * 4).take(4) {
                    add(&mut sum, c);
                }
                let parity = (group as u32 * 400, sum);
                if !late {
                    made = groups.add_datagram(parity.0, &parity.1, true).or(made);
                }
                for (at, (offset, bytes)) in cut.iter().enumerate() {
                    if at != lost {
                        made = groups.add_datagram(*offset, bytes, false).or(made);
                    }
                }
                if late {
                    made = groups.add_datagram(parity.0, &parity.1, true).or(made);
                }
                let (offset, bytes) = cut[lost];
                assert_eq!(made, Some((offset, bytes.to_vec())), "{lost} {late}");
            }
        }
    }

    /// The offset of a parity datagram must be that of the first datagram of its group. A parity datagram with another offset
    /// restores nothing.
    #[test]
    fn a_parity_datagram_with_a_wrong_offset_is_ignored() {
        let mut groups = Groups::new(400, 100, 2, &Budget::default()).unwrap();
        assert_eq!(groups.add_datagram(100, &[3; 100], true), None);
        assert_eq!(groups.add_datagram(0, &[1; 100], false), None);
        assert_eq!(
            groups.add_datagram(0, &[3; 100], true),
            Some((100, vec![2; 100]))
        );
    }

    #[test]
    fn two_lost_datagrams_are_not_restored_and_duplicates_are_ignored() {
        let mut groups = Groups::new(400, 100, 4, &Budget::default()).unwrap();
        assert_eq!(groups.add_datagram(0, &[1; 100], false), None);
        assert_eq!(groups.add_datagram(0, &[1; 100], false), None);
        assert_eq!(groups.add_datagram(100, &[2; 100], false), None);
        assert_eq!(groups.add_datagram(0, &[3; 100], true), None);
        assert_eq!(groups.add_datagram(0, &[3; 100], true), None);
        assert_eq!(groups.add_datagram(50, &[3; 100], false), None);
        assert_eq!(groups.add_datagram(100, &[3; 100], true), None);
        assert_eq!(groups.add_datagram(200, &[3; 99], false), None);
        assert!(groups.add_datagram(200, &[3; 100], false).is_some());
        assert!(Groups::new(1, 0, 4, &Budget::default()).is_none());
    }

    #[test]
    fn groups_of_all_messages_together_are_bounded() {
        let budget = Budget::default();
        let new = || Groups::new(u32::MAX, 60_000, 15, &budget).unwrap();
        let mut messages: Vec<Groups> = (0..100).map(|_| new()).collect();
        for n in 0..GROUPS as u32 + 9 {
            for message in &mut messages {
                message.add_datagram(n * 15 * 60_000, &[1; 60_000], false);
            }
            let held: usize = messages
                .iter()
                .flat_map(|m| m.open.values())
                .map(|g| g.sum.len())
                .sum();
            assert_eq!(held, budget.0.load(Ordering::Relaxed));
            assert!(held <= bounds::PARITY_BYTES);
        }
        // Memory that one message frees is available to others.
        messages.clear();
        assert_eq!(budget.0.load(Ordering::Relaxed), 0);
        let mut message = Groups::new(200, 100, 2, &budget).unwrap();
        assert_eq!(message.add_datagram(0, &[1; 100], false), None);
        assert!(message.add_datagram(0, &[3; 100], true).is_some());
        assert_eq!(budget.0.load(Ordering::Relaxed), 0);
    }
}
