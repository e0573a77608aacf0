//! Where the bytes go (RFC 5041): messages become segments, segments become placements.

pub mod rx;
pub mod tx;
