//! The atomics of the state machines that loom checks: those of loom in builds with `--cfg loom`, otherwise those of
//! std.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
