//! Carriers: TCP, shared memory and UDP, and the sockets and routes that they use.

pub(crate) mod drain;
mod owner;
pub mod route;
pub(crate) mod shm;
pub(crate) mod socket;
pub mod tcp;
pub mod udp;
mod wake;

#[cfg(test)]
mod tests;
