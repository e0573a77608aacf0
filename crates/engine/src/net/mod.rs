//! Carriers: how bytes travel between two hosts, one file each.

pub mod tcp;
pub mod udp;

#[cfg(test)]
mod tests;
