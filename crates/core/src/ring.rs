//! A queue whose slots are reused: an entry is written in its slot, and is removed without being moved.
//!
//! Entries of the send queue and of completion queues are large. Moving one into and out of a queue costs as much as
//! all other work on it.

/// The queue. The number of slots is 0 or a power of two. Only [`Ring::clear`] frees slots.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    slots: Vec<T>,
    first: usize,
    len: usize,
}

/// Number of slots that the first entry allocates.
const FIRST_SLOTS: usize = 4;

/// The allocation of more slots has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoMemory;

impl<T> Ring<T> {
    /// An empty queue without slots.
    pub(crate) const fn new() -> Self {
        Self {
            slots: Vec::new(),
            first: 0,
            len: 0,
        }
    }

    /// The number of entries.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the queue is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Index of the slot of entry `i`.
    #[inline]
    fn at(&self, i: usize) -> usize {
        self.first.wrapping_add(i) & self.slots.len().wrapping_sub(1)
    }

    /// Entry `i`, counted from the oldest.
    #[inline]
    pub(crate) fn get(&self, i: usize) -> Option<&T> {
        if i >= self.len {
            return None;
        }
        self.slots.get(self.at(i))
    }

    /// Entry `i`, counted from the oldest.
    #[inline]
    pub(crate) fn get_mut(&mut self, i: usize) -> Option<&mut T> {
        if i >= self.len {
            return None;
        }
        let at = self.at(i);
        self.slots.get_mut(at)
    }

    /// The oldest entry.
    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        self.get(0)
    }

    /// The newest entry.
    #[inline]
    pub(crate) fn back(&self) -> Option<&T> {
        self.get(self.len.wrapping_sub(1))
    }

    /// The newest entry.
    #[inline]
    pub(crate) fn back_mut(&mut self) -> Option<&mut T> {
        self.get_mut(self.len.wrapping_sub(1))
    }

    /// Adds an entry. Its initial value is that of an earlier entry in the slot, or the result of `blank`.
    #[inline]
    pub(crate) fn push(&mut self, blank: fn() -> T) -> Result<&mut T, NoMemory> {
        if self.len == self.slots.len() {
            self.grow(blank)?;
        }
        let at = self.at(self.len);
        let slot = self.slots.get_mut(at).ok_or(NoMemory)?;
        self.len += 1;
        Ok(slot)
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, blank: fn() -> T) -> Result<(), NoMemory> {
        let slots = (2 * self.slots.len()).max(FIRST_SLOTS);
        let more = slots - self.slots.len();
        self.slots.try_reserve_exact(more).map_err(|_| NoMemory)?;
        self.slots.rotate_left(self.first);
        self.first = 0;
        self.slots.resize_with(slots, blank);
        Ok(())
    }

    /// Removes the oldest entry. The value in its slot is kept.
    #[inline]
    pub(crate) fn pop_front(&mut self) {
        self.pop_front_many(1);
    }

    /// Removes the `n` oldest entries. The values in their slots are kept.
    #[inline]
    pub(crate) fn pop_front_many(&mut self, n: usize) {
        let n = n.min(self.len);
        self.first = self.at(n);
        self.len -= n;
    }

    /// Removes the newest entry. The value in its slot is kept.
    #[inline]
    pub(crate) fn pop_back(&mut self) {
        self.len = self.len.saturating_sub(1);
    }

    /// Removes all entries and frees the slots.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    /// The entries `from..to`, the oldest first.
    pub(crate) fn range_mut(&mut self, from: usize, to: usize) -> impl Iterator<Item = &mut T> {
        let to = to.min(self.len);
        let from = from.min(to);
        // The queue may wrap around: the oldest entries are then in the second part.
        let (last, first) = self.slots.split_at_mut(self.first);
        first.iter_mut().chain(last).take(to).skip(from)
    }

    /// Keeps the entries for which `keep` returns true, in their order.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.slots.rotate_left(self.first);
        self.first = 0;
        let mut kept = 0;
        for i in 0..self.len {
            if self.slots.get(i).is_some_and(&keep) {
                self.slots.swap(i, kept);
                kept += 1;
            }
        }
        self.len = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn all(ring: &mut Ring<u32>) -> Vec<u32> {
        let len = ring.len();
        ring.range_mut(0, len).map(|n| *n).collect()
    }

    #[test]
    fn it_is_a_queue_at_every_length_and_place() {
        let mut ring = Ring::new();
        let mut model = VecDeque::new();
        let mut seed = 7_u32;
        for n in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match seed >> 28 {
                // Mostly filled for a while, then mostly emptied.
                0..=6 if n % 400 < 200 => {
                    *ring.push(|| 0).unwrap() = n;
                    model.push_back(n);
                }
                7 => {
                    ring.pop_back();
                    model.pop_back();
                }
                8 => {
                    ring.retain(|n| n % 3 != 0);
                    model.retain(|n| n % 3 != 0);
                }
                9 => {
                    ring.pop_front_many(3);
                    model.drain(..model.len().min(3));
                }
                10 if n % 1000 == 10 => {
                    ring.clear();
                    model.clear();
                }
                11 => {
                    *ring.push(|| 0).unwrap() = n;
                    model.push_back(n);
                }
                _ => {
                    ring.pop_front();
                    model.pop_front();
                }
            }
            assert_eq!(ring.len(), model.len());
            assert_eq!(ring.is_empty(), model.is_empty());
            assert_eq!(ring.front(), model.front());
            assert_eq!(ring.back(), model.back());
            assert_eq!(ring.get(2), model.get(2));
            assert_eq!(ring.get_mut(1), model.get_mut(1));
            assert_eq!(ring.get(model.len()), None);
            assert_eq!(all(&mut ring), Vec::from(model.clone()));
            let middle: Vec<u32> = ring.range_mut(1, 3).map(|n| *n).collect();
            let expected: Vec<u32> = model.iter().copied().take(3).skip(1).collect();
            assert_eq!(middle, expected);
        }
    }

    #[test]
    fn a_slot_is_reused_with_its_old_value() {
        let mut ring = Ring::new();
        for n in 0..4 {
            *ring.push(|| 0).unwrap() = n;
        }
        ring.pop_front();
        assert_eq!(ring.push(|| 99), Ok(&mut 0));
    }
}
