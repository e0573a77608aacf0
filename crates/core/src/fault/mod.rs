//! Injected faults: plans of losses, errors and broken connections, and the decision for each request and datagram.
//!
//! A [`Plan`] is read from text (`docs/faults.md`); a [`Lane`] decides for one queue pair. Decisions depend on the
//! seed, on the position of the queue pair among those that the process created, and on how many requests and datagrams
//! it has had: never on the clock. So a program that runs twice with one seed has the same faults twice. The engine
//! carries them out.

mod decide;
mod plan;

pub use decide::{Cause, Decision, Lane, Service};
pub use plan::{Action, Direction, Link, Plan, Rule, What, WhichQp, Wrong};

#[cfg(test)]
mod tests;
