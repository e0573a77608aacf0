//! Hash maps whose keys the program itself chooses: descriptors, and the data of its epoll events. Peers cannot choose keys that
//! collide, so the hash needs no secret and can be fast.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hash map with an integer key.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// A hasher for one integer.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_i32(&mut self, n: i32) {
        self.write_u64(u64::from(n.cast_unsigned()));
    }

    fn write_u64(&mut self, n: u64) {
        // 2^64 divided by the golden ratio. The multiplication spreads consecutive numbers. Both halves are mixed, because the table
        // uses both the upper and the lower bits.
        let n = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = n ^ (n >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    #[test]
    fn descriptors_and_addresses_have_different_hashes() {
        let build = BuildHasherDefault::<Mix>::default();
        let mut seen: Vec<u64> = (0..4096_i32).map(|fd| build.hash_one(fd)).collect();
        seen.extend((0..4096_u64).map(|n| build.hash_one(0x7f00_0000_0000 + n * 64)));
        let lower = |n: &u64| n & 0xffff;
        let mut buckets: Vec<u64> = seen.iter().map(lower).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 8192);
        buckets.sort_unstable();
        buckets.dedup();
        // Random numbers would use 65536 × (1 - e^(-8192/65536)) = 7700 buckets.
        assert!(buckets.len() > 7000, "{}", buckets.len());
    }
}
