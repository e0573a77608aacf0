//! Numbers that only the host at an address can know, because they were sent there.
//!
//! Anybody can put any address into a datagram. Before much is sent to an address on behalf of such a datagram, or memory
//! spent on it, its sender has to show that it receives there: it gives a number back that is a keyed hash of its address.
//! Nothing is remembered until then.

#![expect(
    deprecated,
    reason = "the hasher with keys of one's own has no successor in std; SipHash is what it promises"
)]

use std::hash::{Hash, Hasher, SipHasher};
use std::time::Duration;

use super::types::Peer;

/// How long a cookie is good at least; at most twice as long.
const LIFE: u64 = 60;

/// The key, from the random source of the host.
#[derive(Clone, Copy)]
pub(super) struct Secret(u64, u64);

impl Secret {
    pub(super) fn new(key: [u64; 2]) -> Self {
        Self(key[0], key[1])
    }

    fn hash(&self, what: impl Hash) -> u64 {
        let mut hasher = SipHasher::new_with_keys(self.0, self.1);
        what.hash(&mut hasher);
        hasher.finish()
    }

    /// The number that a peer of reliable datagrams has to echo. Never 0.
    pub(super) fn token(&self, peer: &Peer) -> u32 {
        let [a, b, c, d, ..] = self.hash((0_u8, peer)).to_be_bytes();
        u32::from_be_bytes([a, b, c, d]).max(1)
    }

    /// A first number for something that should not be guessed.
    pub(super) fn start(&self, what: u8) -> u32 {
        let [a, b, c, d, ..] = self.hash((1_u8, what)).to_be_bytes();
        u32::from_be_bytes([a, b, c, d])
    }

    /// What a peer has to bring before it gets large answers.
    pub(super) fn cookie(&self, peer: &Peer, now: Duration) -> u64 {
        self.hash((2_u8, peer, now.as_secs() / LIFE))
    }

    /// Whether `cookie` is one that the peer was given lately.
    pub(super) fn knows(&self, peer: &Peer, cookie: u64, now: Duration) -> bool {
        let slot = now.as_secs() / LIFE;
        self.hash((2_u8, peer, slot)) == cookie
            || self.hash((2_u8, peer, slot.wrapping_sub(1))) == cookie
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_good_for_its_peer_for_a_while() {
        let secret = Secret::new([1, 2]);
        let peer = |host: u8, index| (([10, 0, 0, host], 4000).into(), index);
        let at = |s| Duration::from_secs(s);
        let cookie = secret.cookie(&peer(1, 3), at(59));
        assert!(secret.knows(&peer(1, 3), cookie, at(0)));
        assert!(secret.knows(&peer(1, 3), cookie, at(119)));
        assert!(!secret.knows(&peer(1, 3), cookie, at(120)));
        assert!(!secret.knows(&peer(2, 3), cookie, at(59)));
        assert!(!secret.knows(&peer(1, 4), cookie, at(59)));
        assert!(!Secret::new([1, 3]).knows(&peer(1, 3), cookie, at(59)));
        assert_ne!(secret.token(&peer(1, 3)), secret.token(&peer(2, 3)));
    }
}
