//! librdmacm: types and entry points.

pub mod addrinfo;
pub mod entry;
pub mod text;
pub mod types;
