//! The device as its queue pairs share it: the STag table, user memory, and an observer.

use std::fmt;
use std::sync::Arc;

use super::mr::{Memory, Regions};
use crate::observe::Observer;

/// The state that all queue pairs of the device share.
pub struct Rnic {
    /// The STag table.
    pub regions: Regions,
    /// User memory.
    pub memory: Box<dyn Memory + Send + Sync>,
    /// Receives every step of the data path; `None` costs one branch per step.
    pub observer: Option<Arc<dyn Observer>>,
}

impl fmt::Debug for Rnic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rnic")
            .field("regions", &self.regions.len())
            .finish_non_exhaustive()
    }
}
