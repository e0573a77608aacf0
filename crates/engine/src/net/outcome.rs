//! The state of a stream after receiving or sending.

/// The state of a stream after a turn of receiving or sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The connection works.
    Open,
    /// The peer closed its direction.
    Eof,
    /// The connection failed with this errno.
    Broken(i32),
}
