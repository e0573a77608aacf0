//! Protection domains: who may use whose memory.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// A protection domain. Regions and queue pairs of one domain may be used together.
#[derive(Debug)]
pub struct Pd {
    id: u32,
    users: AtomicUsize,
}

impl Pd {
    /// A new domain with an id that no other domain of this process has.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            users: AtomicUsize::new(0),
        }
    }

    /// The domain's number, for comparison only.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// One more object (region, queue pair, address handle) belongs to the domain.
    pub fn enter(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// An object of the domain is gone.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether objects still belong to the domain, so that it may not be freed.
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Relaxed) > 0
    }
}

impl Default for Pd {
    fn default() -> Self {
        Self::new()
    }
}
