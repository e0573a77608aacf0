//! Quality of service: which queue pair may send next on a link that is slower than its senders.
//!
//! A queue pair has a service level, and each service level has a virtual lane. The lanes are arbitrated as on an
//! InfiniBand link (IBA 7.6.9), by two tables of lanes: lanes of the table of high priority send first, and a lane of the
//! table of low priority sends when none of them waits, or when the limit of the table of high priority is reached.
//! [`Settings`] reads the tables from options that have the names of OpenSM's options. A [`Link`] has the lanes and
//! decides in virtual time which queue pair sends the next packet. The engine asks the link before it sends.

mod link;
mod settings;

pub use link::{FlowId, Link, Nanos};
pub use settings::{LANES, LEVELS, Settings, Wrong, level_of_class};

#[cfg(test)]
mod tests;
