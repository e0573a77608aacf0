//! Carriers: TCP, shared memory and UDP, and the sockets and routes that they use.

pub(crate) mod drain;
pub(crate) mod owner;
pub mod route;
pub(crate) mod shm;
pub(crate) mod socket;
pub mod tcp;
pub mod udp;
mod wake;

/// For cargo-fuzz: one end of a ring in shared memory whose peer writes `data`.
#[cfg(fuzzing)]
pub fn fuzz_ring(data: &[u8]) {
    shm::fuzz(data);
}

#[cfg(test)]
mod tests;
