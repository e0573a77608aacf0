//! Protection domains: which queue pairs may use which memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// A protection domain. Regions and queue pairs of one domain may be used together.
#[derive(Debug)]
pub struct Pd {
    id: u32,
    users: AtomicUsize,
    /// The domain of which this one is a parent domain or an imported handle. That domain must not be freed before this one.
    of: Option<Arc<Self>>,
}

impl Pd {
    /// A new domain with an id that no other domain of this process has.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            users: AtomicUsize::new(0),
            of: None,
        }
    }

    /// A parent domain of `of` (`ibv_alloc_parent_domain(3)`), or an imported handle of it (`ibv_import_pd(3)`): objects of both
    /// may be used together, but each counts its own objects.
    pub fn within(of: &Arc<Self>) -> Self {
        of.enter();
        Self {
            id: of.id,
            users: AtomicUsize::new(0),
            of: Some(Arc::clone(of)),
        }
    }

    /// The domain's number. A parent domain and an imported handle have that of their domain.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Adds an object (region, queue pair, address handle) to the domain.
    pub fn enter(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes an object from the domain.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether objects still belong to the domain, so that it cannot be freed.
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if let Some(of) = &self.of {
            of.leave();
        }
    }
}

impl Default for Pd {
    fn default() -> Self {
        Self::new()
    }
}
