//! Connections that no queue pair owns yet, and the ports that they arrive at.

pub mod startup;
