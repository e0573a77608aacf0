//! Hash tables with peers as keys. Each datagram needs several lookups.
//!
//! An attacker chooses the source addresses of its datagrams, so the hash has a random secret key for each table. The
//! hash of each word is a 128-bit product folded to 64 bits, which is far faster than the hash of `std`. An attacker
//! that cannot observe the slots of a table cannot choose addresses that collide.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// A table whose keys are chosen by peers.
pub(super) type Table<K, V> = HashMap<K, V, Key>;

/// A table that remembers the entry used last, because one peer often sends many datagrams in a row. This lookup
/// needs no hash.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    places: Table<K, usize>,
    entries: Vec<(K, V)>,
    /// The index of the entry used last.
    last: Cell<usize>,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self {
            places: Table::default(),
            entries: Vec::new(),
            last: Cell::new(0),
        }
    }
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }

    /// The index of the entry of `key`.
    #[inline]
    fn place(&self, key: &K) -> Option<usize> {
        let last = self.last.get();
        if self.entries.get(last).is_some_and(|(k, _)| k == key) {
            return Some(last);
        }
        self.other_place(key)
    }

    #[inline(never)]
    fn other_place(&self, key: &K) -> Option<usize> {
        let place = *self.places.get(key)?;
        self.last.set(place);
        Some(place)
    }

    /// The entry that was used last, with its key.
    #[inline]
    pub(super) fn last_mut(&mut self) -> Option<(&K, &mut V)> {
        let (key, value) = self.entries.get_mut(self.last.get())?;
        Some((key, value))
    }

    /// Returns the entry of `key`.
    #[inline]
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        let (_, value) = self.entries.get(self.place(key)?)?;
        Some(value)
    }

    /// Returns the entry of `key`.
    #[inline]
    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = self.place(key)?;
        let (_, value) = self.entries.get_mut(place)?;
        Some(value)
    }

    /// Returns the entry of `key`, which `make` creates if needed. If the table has `most` entries already, all are
    /// removed first. The flag is true if they were removed.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "`place` is the index of an entry")]
    pub(super) fn get_or_insert(&mut self, key: K, most: usize, make: fn() -> V) -> (&mut V, bool) {
        let mut cleared = false;
        let place = match self.place(&key) {
            Some(place) => place,
            None => {
                cleared = self.len() >= most;
                self.insert(key, make(), cleared)
            }
        };
        (&mut self.entries[place].1, cleared)
    }

    #[cold]
    #[inline(never)]
    fn insert(&mut self, key: K, value: V, clear: bool) -> usize {
        if clear {
            self.clear();
        }
        let place = self.entries.len();
        self.entries.push((key, value));
        self.places.insert(key, place);
        self.last.set(place);
        place
    }
}

/// The secret key of one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key([u64; 2]);

impl Default for Key {
    fn default() -> Self {
        let random = RandomState::new();
        // The factor is odd, so that the product depends on every bit of the word.
        Self([random.hash_one(1_u8), random.hash_one(2_u8) | 1])
    }
}

impl BuildHasher for Key {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        let Self([state, factor]) = *self;
        Mixer { state, factor }
    }
}

/// The state of the hash of one key.
#[derive(Debug)]
pub(super) struct Mixer {
    state: u64,
    factor: u64,
}

impl Mixer {
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.state ^ word) * u128::from(self.factor);
        // The old state is mixed in again: otherwise a product of 0 would erase all words before.
        self.state = product as u64 ^ (product >> 64) as u64 ^ self.state.rotate_left(29);
    }
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.mix(word.first_chunk().map_or(0, |w| u64::from_le_bytes(*w)));
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(rest) {
                *to = *from;
            }
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.mix(n.into());
    }

    fn write_u16(&mut self, n: u16) {
        self.mix(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.mix(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.mix(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.mix(n as u64);
    }

    fn finish(&self) -> u64 {
        let product = u128::from(self.state) * u128::from(self.factor);
        product as u64 ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datagram::types::Peer;
    use std::collections::HashSet;
    use std::net::{IpAddr, Ipv6Addr, SocketAddr};

    fn spread(peers: impl Iterator<Item = Peer>, key: Key) {
        let hashes: Vec<u64> = peers.map(|p| key.hash_one(p)).collect();
        assert_eq!(
            hashes.iter().collect::<HashSet<_>>().len(),
            hashes.len(),
            "two keys have the same hash"
        );
        // A `HashMap` uses the upper 7 bits, and as many of the lower bits as its size needs.
        for shift in [0, 8, 57] {
            let mut places = [0_usize; 128];
            for hash in &hashes {
                places[(hash >> shift) as usize % 128] += 1;
            }
            let mean = hashes.len() / 128;
            let fair = |n: &usize| (mean / 2..mean * 2).contains(n);
            assert!(places.iter().all(fair), "{places:?}");
        }
    }

    #[test]
    fn peers_that_differ_in_little_are_spread_over_a_table() {
        for key in [
            Key([0x1234_5678_9abc_def0, 0x9e37_79b9_7f4a_7c15]),
            Key::default(),
        ] {
            let ports = |n: u16| (SocketAddr::from(([10, 0, 0, 1], n)), 3);
            spread((0..u16::MAX).map(ports), key);
            let hosts = |n: u32| (SocketAddr::from((n.to_be_bytes(), 4791)), 0);
            spread((0x0a00_0000..0x0a01_0000).map(hosts), key);
            let far = |n: u32| {
                let ip = IpAddr::V6(Ipv6Addr::from(u128::from(n) << 64 | 1));
                (SocketAddr::new(ip, 4791), 0)
            };
            spread((0..0x1_0000).map(far), key);
            let indices = |n: u32| (SocketAddr::from(([10, 0, (n >> 8) as u8, 1], 9)), n as u8);
            spread((0..0x1_0000).map(indices), key);
        }
    }

    #[test]
    fn the_cached_entry_is_used_only_for_its_key() {
        let mut recent = Recent::default();
        for n in 0..10_u16 {
            assert_eq!(recent.get(&n), None);
            let (entry, cleared) = recent.get_or_insert(n, 10, || 0);
            *entry += n * 10;
            assert!(!cleared);
        }
        for n in [3, 3, 9, 0, 3, 9, 9] {
            assert_eq!(recent.get(&n), Some(&(n * 10)));
            assert_eq!(recent.get_mut(&n), Some(&mut (n * 10)));
            assert_eq!(recent.get_or_insert(n, 10, || 0), (&mut (n * 10), false));
            assert_eq!(recent.get(&10), None);
        }
        assert_eq!(recent.len(), 10);
        assert_eq!(recent.get_or_insert(10, 10, || 7), (&mut 7, true));
        assert_eq!((recent.len(), recent.get(&9)), (1, None));
    }

    #[test]
    fn each_table_has_its_own_key() {
        let peer: Peer = (SocketAddr::from(([10, 0, 0, 1], 1)), 3);
        assert_ne!(Key::default().hash_one(peer), Key::default().hash_one(peer));
    }
}
