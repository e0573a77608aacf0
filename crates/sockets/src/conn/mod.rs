//! Connections and epoll sets of the program, and the table that finds them by descriptor.
//!
//! A connection refers to its sets and a set to its connections, so these modules depend on each other. Lock order: first the
//! set, then the connection.

pub mod answers;
pub mod dgram;
pub mod early;
pub mod reliable;
pub mod set;
pub mod show;
pub mod sock;
pub mod table;
pub mod worker;
