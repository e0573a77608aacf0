//! MPA: segments as frames (FPDUs) in a TCP byte stream (RFC 5044, RFC 6581).
//!
//! | file | content |
//! |---|---|
//! | [`startup`] | the two frames that open a stream, and the parameters that they agree on |
//! | [`frame`] | segments into FPDUs |
//! | [`deframe`] | FPDUs from the stream |
//! | [`marker`] | the pointers that a peer may require every 512 bytes |
//! | [`crc`] | CRC32C |

pub mod crc;
pub mod deframe;
pub mod frame;
pub mod marker;
pub mod startup;
