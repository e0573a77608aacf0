//! Faults on demand: what is to go wrong, and when.
//!
//! A [`Plan`] is read from text (`docs/faults.md`); a [`Lane`] decides for one queue pair. Decisions depend on the seed, on
//! the position of the queue pair among those that the process created, and on how many requests and datagrams it has had:
//! never on the clock. So the same program with the same seed has the same faults. The engine carries them out.

mod decide;
mod plan;

pub use decide::{Cause, Decision, Lane, Service};
pub use plan::{Action, Direction, Link, Plan, Rule, What, WhichQp, Wrong};

#[cfg(test)]
mod tests;
