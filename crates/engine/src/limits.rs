//! Limits of what peers can make this process hold.

/// Descriptors for connections that no queue pair owns, at most.
const PEER_DESCRIPTORS_MAX: usize = 512;
/// Descriptors for connections that no queue pair owns, however low the limit of the process is: one may be a stranger that
/// sends nothing.
const PEER_DESCRIPTORS_MIN: usize = 2;

/// How many descriptors peers may hold with connections that no queue pair owns: half-open ones, and closed ones that are
/// drained. A quarter of what the process may open (`RLIMIT_NOFILE`), so that peers cannot use up the program's descriptors.
pub fn peer_descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let quarter = limit.map_or(PEER_DESCRIPTORS_MAX, |n| {
        usize::try_from(n / 4).unwrap_or(PEER_DESCRIPTORS_MAX)
    });
    quarter.clamp(PEER_DESCRIPTORS_MIN, PEER_DESCRIPTORS_MAX)
}
