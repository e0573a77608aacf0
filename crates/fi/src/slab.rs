//! A table of values with 32-bit names. A name consists of an index and of a count of earlier uses of that index, modulo 4096, so that an
//! old name does not find a new value until the index has been used 4096 times. No value ever has the name [`NONE`].

use std::hash::{BuildHasher, RandomState};

const INDEX_BITS: u32 = 20;
const INDEX: u32 = (1 << INDEX_BITS) - 1;

/// A number that is never a name: its index is not used.
pub const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Slot<T> {
    uses: u32,
    value: Option<T>,
}

/// A table of named values.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// The count with which new indexes begin.
    first: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            first: 0,
        }
    }
}

impl<T> Slab<T> {
    /// Returns a table whose names most likely differ from those of other tables. A peer may still use the names of a process that has ended,
    /// in messages to another process with the same address.
    pub fn with_own_names() -> Self {
        // Tests compare names.
        let random = if cfg!(any(test, fuzzing)) {
            0
        } else {
            RandomState::new().hash_one(0_u8)
        };
        Self {
            first: u32::try_from(random & u64::from(u32::MAX >> INDEX_BITS)).unwrap_or(0),
            ..Self::default()
        }
    }

    /// Adds a value, and returns its name. Returns the value if there are no more names.
    pub fn insert(&mut self, value: T) -> Result<u32, T> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => match u32::try_from(self.slots.len()) {
                Ok(index) if index < INDEX => {
                    self.slots.push(Slot {
                        uses: self.first,
                        value: None,
                    });
                    index
                }
                _ => return Err(value),
            },
        };
        match self.slots.get_mut(index as usize) {
            Some(slot) => {
                slot.value = Some(value);
                Ok(slot.uses << INDEX_BITS | index)
            }
            None => Err(value),
        }
    }

    fn slot(&mut self, name: u32) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut((name & INDEX) as usize)?;
        (slot.uses == name >> INDEX_BITS).then_some(slot)
    }

    /// Returns the value of a name.
    pub fn get_mut(&mut self, name: u32) -> Option<&mut T> {
        self.slot(name)?.value.as_mut()
    }

    /// Returns the value of a name.
    pub fn get(&self, name: u32) -> Option<&T> {
        let slot = self.slots.get((name & INDEX) as usize)?;
        (slot.uses == name >> INDEX_BITS).then_some(slot.value.as_ref()?)
    }

    /// Removes a value.
    pub fn remove(&mut self, name: u32) -> Option<T> {
        let slot = self.slot(name)?;
        let value = slot.value.take()?;
        slot.uses = (slot.uses + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(name & INDEX);
        Some(value)
    }

    /// Returns all values with their names.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let named = |(index, slot): (u32, &Slot<T>)| slot.uses << INDEX_BITS | index;
        (0..)
            .zip(&self.slots)
            .filter_map(move |(index, slot)| Some((named((index, slot)), slot.value.as_ref()?)))
    }

    /// Returns all values.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|p| p.value.as_mut())
    }

    /// Returns whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_name_finds_nothing() {
        let mut slab = Slab::default();
        let a = slab.insert("a").unwrap();
        let b = slab.insert("b").unwrap();
        assert_eq!(slab.get(a), Some(&"a"));
        assert_eq!(slab.get_mut(b), Some(&mut "b"));
        assert_eq!(slab.remove(a), Some("a"));
        assert_eq!((slab.remove(a), slab.get(a)), (None, None));
        let c = slab.insert("c").unwrap();
        assert_ne!(a, c);
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(c, &"c"), (b, &"b")]);
        assert!(slab.get(u32::MAX).is_none() && !slab.is_empty());
        slab.values_mut().for_each(|v| *v = "d");
        assert_eq!((slab.remove(b), slab.remove(c)), (Some("d"), Some("d")));
        assert!(slab.is_empty());
    }

    #[test]
    fn the_last_number_is_no_name() {
        let mut slab = Slab::default();
        let names: Vec<u32> = std::iter::from_fn(|| slab.insert(()).ok()).collect();
        assert_eq!(names.len(), INDEX as usize);
        // After 4096 uses of an index its first name is used again. By then the loop has seen every name of the last index.
        let last = names.last().copied().unwrap();
        let mut name = last;
        loop {
            assert_ne!(name, NONE);
            slab.remove(name).unwrap();
            name = slab.insert(()).unwrap();
            if name == last {
                break;
            }
        }
        assert!(slab.insert(()).is_err() && slab.get(NONE).is_none());
    }

    #[test]
    fn names_are_reused() {
        let mut slab = Slab::default();
        let first = slab.insert(0).unwrap();
        slab.remove(first);
        for n in 1..1 << 12 {
            let name = slab.insert(n).unwrap();
            assert_ne!(name, first);
            slab.remove(name);
        }
        assert_eq!(slab.insert(0), Ok(first));
    }
}
