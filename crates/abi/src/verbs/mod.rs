//! libibverbs: types, entry points, and what the header's inline functions call.

pub mod kern;
pub mod types;
