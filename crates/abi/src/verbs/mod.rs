//! libibverbs: types, entry points, and what the header's inline functions call.

pub mod host;
pub mod kern;
pub mod private;
pub mod rate;
pub mod text;
pub mod types;
