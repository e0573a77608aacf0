//! Limits of the resources that peers can use in this process.

/// Largest number of descriptors for connections that no queue pair owns.
const PEER_DESCRIPTORS_MAX: usize = 512;
/// Smallest number of such descriptors, even if the limit of the process is low. If there were only one, each new connection would close
/// the one before it, whose MPA Request may still arrive.
const PEER_DESCRIPTORS_MIN: usize = 2;

/// The number of descriptors for connections that no queue pair owns. The limit applies to each of two kinds: half-open
/// connections, and closed ones that are read until the peer closes too. It is a quarter of the descriptors that the process may
/// open (`RLIMIT_NOFILE`), but not less than `PEER_DESCRIPTORS_MIN` or more than `PEER_DESCRIPTORS_MAX`. So peers cannot use up
/// the descriptors of the program.
pub fn peer_descriptors() -> usize {
    share_of(rustix::process::getrlimit(rustix::process::Resource::Nofile).current)
}

/// The number of descriptors that peers may use if `limit` is that of the process; `None` means no limit.
fn share_of(limit: Option<u64>) -> usize {
    let quarter = limit.map_or(PEER_DESCRIPTORS_MAX, |n| {
        usize::try_from(n / 4).unwrap_or(PEER_DESCRIPTORS_MAX)
    });
    quarter.clamp(PEER_DESCRIPTORS_MIN, PEER_DESCRIPTORS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_open_connections_use_at_most_a_quarter_of_the_descriptors() {
        let limits = [Some(4), Some(24), Some(1024), Some(1 << 40), None];
        assert_eq!(limits.map(share_of), [2, 6, 256, 512, 512]);
    }
}
