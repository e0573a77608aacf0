//! RDMAP: what the messages of RFC 5040 and RFC 7306 mean.

pub(crate) mod message;
pub mod terminate;
