//! Choices of a test that are derived from the input bytes of the fuzzer.

/// The rest of the input. After its last byte all numbers are 0.
#[derive(Debug)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    /// How many of 256 choices are odd, that is, something that a correct program or peer rarely does.
    odds: u8,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, odds: 60 }
    }

    /// Chooses the share of odd choices from now on.
    pub(super) fn set_odds(&mut self) {
        self.odds = self.one_of(&[0, 1, 8, 60]);
    }

    /// Decides whether the next choice is an odd one.
    pub(super) fn odd(&mut self) -> bool {
        self.byte() < self.odds
    }

    pub(super) fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Up to `len` bytes.
    pub(super) fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.bytes.split_at(len.min(self.bytes.len()));
        self.bytes = rest;
        head
    }

    pub(super) fn rest(&mut self) -> &'a [u8] {
        self.take(usize::MAX)
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from(self.u16()) << 16 | u32::from(self.u16())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from(self.u32()) << 32 | u64::from(self.u32())
    }

    /// A number less than `n`, which is at most 256.
    pub(super) fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    pub(super) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// A 32-bit number: usually `right`, otherwise a number near it or any number.
    pub(super) fn near(&mut self, right: u32) -> u32 {
        if !self.odd() {
            return right;
        }
        match self.byte() {
            n @ 0..40 => right.wrapping_add(u32::from(n)).wrapping_sub(20),
            _ => self.u32(),
        }
    }
}
