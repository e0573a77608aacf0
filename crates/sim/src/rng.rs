//! Numbers from a seed, and seeds for tests.

/// A small generator: the same seed gives the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator for `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub const fn next(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, 0 for `n` 0.
    pub const fn below(&mut self, n: usize) -> usize {
        if n == 0 {
            return 0;
        }
        (self.next() % n as u64) as usize
    }

    /// True with a probability of `percent` percent.
    pub const fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(n + 8);
        while out.len() < n {
            out.extend(self.next().to_le_bytes());
        }
        out.truncate(n);
        out
    }

    /// One of `these`.
    pub fn pick<'a, T>(&mut self, these: &'a [T]) -> &'a T {
        &these[self.below(these.len())]
    }
}

/// Runs `test` with `count` seeds, or with the seed in `ANYWARP_SEED`. `ANYWARP_SEEDS` multiplies the count.
pub fn each_seed(count: u64, mut test: impl FnMut(u64)) {
    if let Ok(text) = std::env::var("ANYWARP_SEED") {
        test(text.parse().expect("ANYWARP_SEED is a number"));
        return;
    }
    let more = std::env::var("ANYWARP_SEEDS").map_or(1, |n| n.parse().expect("a number"));
    (1..=count * more).for_each(&mut test);
}
