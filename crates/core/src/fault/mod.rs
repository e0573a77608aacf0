//! Injected faults: plans of losses, errors and broken connections, and the decision for each request and datagram.
//!
//! A [`Plan`] is read from text (`docs/faults.md`). [`Decisions`] decides for one queue pair. The decisions depend on
//! the seed, on the position of the queue pair among those that the process created, and on the number of its
//! requests and datagrams so far, but not on the clock. So a program that runs twice with the same seed has the same
//! faults. The engine injects them.

mod decide;
mod plan;

pub use decide::{Cause, Decision, Decisions, Service};
pub use plan::{Action, Direction, Link, Plan, Rule, What, WhichQp, Wrong};

#[cfg(test)]
mod tests;
