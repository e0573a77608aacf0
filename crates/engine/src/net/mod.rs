//! Carriers: how bytes travel between two hosts, one file each.

pub(crate) mod linger;
pub(crate) mod shm;
pub mod tcp;
pub mod udp;

#[cfg(test)]
mod tests;
