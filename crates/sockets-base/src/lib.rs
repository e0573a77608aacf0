//! What `libanywarp-sockets.so` and `anywarp sockets` have in common. It is loaded into other people's programs, so that it
//! depends on the C library alone.

pub mod host;
pub mod name;
pub mod place;
pub mod rules;
pub mod sources;
pub mod stat;
