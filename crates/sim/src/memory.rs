//! An address space: one vector that begins at [`BASE`].

use std::sync::{Arc, MutexGuard};

use anywarp_core::lock::Mutex;
use anywarp_core::verbs::mr::{Memory, Pinned};

/// Address of the first byte.
pub const BASE: u64 = 0x10_0000;

/// The memory of one host. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Space(Arc<Mutex<Vec<u8>>>);

impl Space {
    /// All bytes of the address space.
    pub fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock()
    }

    /// Allocates `len` bytes after a gap, and returns the address of the first.
    pub fn alloc(&self, len: usize) -> u64 {
        let mut bytes = self.bytes();
        let at = bytes.len().next_multiple_of(64) + 64;
        bytes.resize(at, GUARD);
        bytes.resize(at + len, 0);
        bytes.extend([GUARD; 64]);
        BASE + at as u64
    }

    fn range(start: u64, offset: u64, len: u64) -> std::ops::Range<usize> {
        let from = usize::try_from(start - BASE + offset).expect("an address of this space");
        from..from + usize::try_from(len).expect("a length of this space")
    }
}

/// The value of each byte in the gap between two allocations.
pub(crate) const GUARD: u8 = 0xa5;

impl Memory for Space {
    fn place(&self, to: &Pinned<'_>, offset: u64, bytes: &[u8]) {
        let len = (bytes.len() as u64).min(to.len().saturating_sub(offset));
        assert_eq!(
            len,
            bytes.len() as u64,
            "placed beyond what the check allowed"
        );
        self.bytes()[Self::range(to.start(), offset, len)].copy_from_slice(bytes);
    }

    fn place_both(&self, to: &Pinned<'_>, first: &[u8], second: &[u8]) {
        let len = first.len() + second.len();
        assert!(
            len as u64 <= to.len(),
            "placed beyond what the check allowed"
        );
        let range = Self::range(to.start(), 0, len as u64);
        let mut bytes = self.bytes();
        let (to_first, to_second) = bytes[range].split_at_mut(first.len());
        to_first.copy_from_slice(first);
        to_second.copy_from_slice(second);
    }

    fn gather(&self, from: &Pinned<'_>, offset: u64, len: u64, out: &mut Vec<u8>) {
        assert!(
            offset + len <= from.len(),
            "gathered beyond what the check allowed"
        );
        out.extend_from_slice(&self.bytes()[Self::range(from.start(), offset, len)]);
    }

    fn update(&self, at: &Pinned<'_>, change: &mut dyn FnMut(u64) -> u64) -> u64 {
        assert!(at.len() >= 8 && at.start().is_multiple_of(8));
        let mut bytes = self.bytes();
        let word = &mut bytes[Self::range(at.start(), 0, 8)];
        let old = u64::from_ne_bytes((&*word).try_into().expect("eight bytes"));
        word.copy_from_slice(&change(old).to_ne_bytes());
        old
    }
}
