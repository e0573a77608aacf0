//! librdmacm: types and entry points.

pub mod types;
