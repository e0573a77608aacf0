//! Direct data placement (RFC 5041): messages are cut into segments, and segments are placed.

pub mod rx;
pub mod tx;
