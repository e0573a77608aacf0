//! RDMAP: the messages of RFC 5040 and RFC 7306 and their errors.

pub(crate) mod message;
pub mod terminate;
