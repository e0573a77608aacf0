//! Connections that no queue pair owns yet, and the ports that they arrive at.

pub mod half_open;
pub mod qpn_port;
pub mod signpost;
pub mod startup;
