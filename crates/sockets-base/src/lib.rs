//! The code that `libanywarp-sockets.so` and `anywarp sockets` share. The library is preloaded into arbitrary programs, so this
//! crate depends only on the C library.

pub mod host;
pub mod name;
pub mod place;
pub mod query;
pub mod rules;
pub mod sources;
pub mod stat;
