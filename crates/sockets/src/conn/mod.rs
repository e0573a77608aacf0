//! Connections and sets of the program, and the table that leads to them.
//!
//! A connection knows the sets that it is in, a set its connections, and both are found by number; so these files name each
//! other. A set's lock may be held when a connection's is acquired, never the other way.

pub mod number;
pub mod set;
pub mod sock;
pub mod table;
pub mod worker;
