//! Connections that no queue pair owns yet, and the ports at which they arrive.

pub mod half_open;
pub mod qpn_port;
pub mod signpost;
pub mod startup;
pub(crate) mod trunks;
