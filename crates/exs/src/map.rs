//! Maps whose keys are numbers that this library assigns. Peers and programs do not choose them, so the hash
//! function need not resist chosen keys.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with a fast hash function (one multiplication), because each call of the program looks up several
/// numbers.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Multiplies by 2^64 / φ, which spreads consecutive numbers over the high bits, and exchanges the halves, because the map
/// takes its bucket from the low bits.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_i32(&mut self, number: i32) {
        self.write_u64(u64::from(number.cast_unsigned()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}
