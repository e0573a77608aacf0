//! Carriers: TCP, shared memory and UDP, and the sockets and routes that they use.

mod carrier;
mod congestion;
pub(crate) mod drain;
#[cfg(any(test, fuzzing))]
mod fuzz_handover;
#[cfg(any(test, fuzzing))]
mod fuzz_trunk;
mod outcome;
pub(crate) mod owner;
pub mod route;
pub(crate) mod shm;
mod sink;
pub(crate) mod socket;
pub mod tcp;
pub(crate) mod trunk;
pub mod udp;
mod wake;

/// For cargo-fuzz: one end of a ring in shared memory whose peer writes `data`.
#[cfg(fuzzing)]
pub fn fuzz_ring(data: &[u8]) {
    shm::fuzz(data);
}

/// For cargo-fuzz: a stream whose peer executes the hand-over commands in `data`.
#[cfg(fuzzing)]
pub fn fuzz_handover(data: &[u8]) {
    fuzz_handover::fuzz(data);
}

/// For cargo-fuzz: a stream whose peer executes the commands in `data`, which are about a trunk.
#[cfg(fuzzing)]
pub fn fuzz_trunk(data: &[u8]) {
    fuzz_trunk::fuzz(data);
}

#[cfg(test)]
mod carrier_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trunk_tests;
