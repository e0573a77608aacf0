//! librdmacm: types and entry points.

pub mod text;
pub mod types;
