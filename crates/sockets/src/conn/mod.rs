//! Connections and epoll sets of the program, and the table that finds them by descriptor.
//!
//! A connection has references to its sets and a set has references to its connections, so these files name each other. The
//! lock of a connection may be acquired while that of a set is held, never the other way round.

pub mod dgram;
pub mod number;
pub mod set;
pub mod show;
pub mod sock;
pub mod table;
pub mod worker;
