//! Quality of service: which queue pair may send next on a link that is slower than its senders.
//!
//! A queue pair has a service level, a service level has a virtual lane, and the lanes are arbitrated as on an
//! InfiniBand link (IBA 7.6.9): a table of high priority, and a table of low priority that gets its turn when the
//! limit of the high one is reached. [`Settings`] reads the tables under the names of OpenSM. A [`Link`] has the lanes
//! and decides in virtual time which queue pair sends the next packet. The engine asks the link before it sends.

mod link;
mod settings;

pub use link::{FlowId, Link, Nanos};
pub use settings::{LANES, LEVELS, Settings, Wrong, level_of_class};

#[cfg(test)]
mod tests;
