//! Parity: the exclusive or of a group of datagrams, from which the one that was lost is made.
//!
//! The datagrams of a message are numbered by their offset; `n` of them in a row are a group. All but the last datagram
//! of a message have the same length; a shorter one counts as if zeroes followed.

use std::collections::BTreeMap;

/// Groups of one message that are under way.
const GROUPS: usize = 64;

/// Adds `bytes` to `sum`, which grows to its length.
pub(super) fn add(sum: &mut Vec<u8>, bytes: &[u8]) {
    if sum.len() < bytes.len() {
        sum.resize(bytes.len(), 0);
    }
    for (s, b) in sum.iter_mut().zip(bytes) {
        *s ^= b;
    }
}

#[derive(Debug, Default)]
struct Group {
    sum: Vec<u8>,
    /// Bit `i`: datagram `i` of the group is in the sum.
    have: u16,
    parity: bool,
}

/// What has come of the groups of a message.
#[derive(Debug)]
pub(super) struct Groups {
    length: u32,
    segment: u32,
    many: u32,
    open: BTreeMap<u32, Group>,
}

impl Groups {
    /// For a message of `length` bytes in datagrams of `segment`, `many` to a group. None: that makes no sense.
    pub(super) fn new(length: u32, segment: u16, many: u8) -> Option<Self> {
        (segment > 0 && many > 0).then(|| Self {
            length,
            segment: segment.into(),
            many: many.into(),
            open: BTreeMap::new(),
        })
    }

    /// Whether later datagrams say the same.
    pub(super) fn agrees(&self, segment: u16, many: u8) -> bool {
        self.segment == u32::from(segment) && self.many == u32::from(many)
    }

    /// Bytes of the datagram at `offset`.
    fn len_at(&self, offset: u32) -> u32 {
        self.segment.min(self.length.saturating_sub(offset))
    }

    /// A datagram of the message came, or a parity datagram. Returns the one that can be made of it: offset and bytes.
    pub(super) fn came(
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
            self.open.pop_first();
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
        add(&mut group.sum, payload);
        let missing = members - group.have.count_ones().min(members);
        if missing == 0 {
            self.open.remove(&number);
            return None;
        }
        if missing > 1 || !group.parity {
            return None;
        }
        let place = (0..members).find(|place| group.have & (1 << place) == 0)?;
        let group = self.open.remove(&number)?;
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
    fn any_one_of_a_group_is_made_from_the_others() {
        let message: Vec<u8> = (0..1050_u32).map(|n| (n * 7 % 251) as u8).collect();
        let cut: Vec<(u32, &[u8])> = message
            .chunks(100)
            .enumerate()
            .map(|(i, c)| (i as u32 * 100, c))
            .collect();
        for lost in 0..cut.len() {
            for late in [false, true] {
                let mut groups = Groups::new(1050, 100, 4).unwrap();
                let mut made = None;
                let group = lost / 4;
                let mut sum = Vec::new();
                for (_, c) in cut.iter().skip(group * 4).take(4) {
                    add(&mut sum, c);
                }
                let parity = (group as u32 * 400, sum);
                if !late {
                    made = groups.came(parity.0, &parity.1, true).or(made);
                }
                for (at, (offset, bytes)) in cut.iter().enumerate() {
                    if at != lost {
                        made = groups.came(*offset, bytes, false).or(made);
                    }
                }
                if late {
                    made = groups.came(parity.0, &parity.1, true).or(made);
                }
                let (offset, bytes) = cut[lost];
                assert_eq!(made, Some((offset, bytes.to_vec())), "{lost} {late}");
            }
        }
    }

    #[test]
    fn two_lost_ones_and_copies_make_nothing() {
        let mut groups = Groups::new(400, 100, 4).unwrap();
        assert_eq!(groups.came(0, &[1; 100], false), None);
        assert_eq!(groups.came(0, &[1; 100], false), None);
        assert_eq!(groups.came(100, &[2; 100], false), None);
        assert_eq!(groups.came(0, &[3; 100], true), None);
        assert_eq!(groups.came(0, &[3; 100], true), None);
        assert_eq!(groups.came(50, &[3; 100], false), None);
        assert_eq!(groups.came(100, &[3; 100], true), None);
        assert_eq!(groups.came(200, &[3; 99], false), None);
        assert!(groups.came(200, &[3; 100], false).is_some());
        assert!(Groups::new(1, 0, 4).is_none());
    }
}
