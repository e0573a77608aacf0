//! libibverbs: types, entry points, and what the header's inline functions call.

pub mod device;
pub(crate) mod dm;
pub(crate) mod domain;
pub mod extended;
pub mod host;
pub mod import;
pub mod kern;
pub mod memory;
pub(crate) mod object;
pub mod ops;
pub mod private;
pub mod qp;
pub mod queue;
pub mod rate;
pub mod text;
pub mod types;
pub(crate) mod xrc;
