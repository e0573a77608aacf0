//! MPA: segments as frames (FPDUs) in a TCP byte stream (RFC 5044, RFC 6581).
//!
//! | file | what |
//! |---|---|
//! | [`startup`] | the two frames that open a stream, and what both ends then agree on |
//! | [`frame`] | segments into FPDUs |
//! | [`deframe`] | FPDUs out of the stream |
//! | [`marker`] | the pointers that a peer may want every 512 bytes |
//! | [`crc`] | CRC32C |

pub mod crc;
pub mod deframe;
pub mod frame;
pub mod marker;
pub mod startup;
