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
use std::net::IpAddr;
use std::time::Duration;

use super::types::Peer;

/// How long a cookie is good at least; at most twice as long.
const LIFE: u64 = 60;
/// The same of a token with which a peer of reliable datagrams begins. A peer is remembered for longer than that, so the
/// token of one that was forgotten is never good any more.
const TOKEN_LIFE: u64 = 30;

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

    /// The number that a peer of reliable datagrams has to echo to begin. Never 0. `instead`: the token of the peer, if
    /// another queue pair there was known until now; else 0.
    pub(super) fn token(&self, peer: &Peer, instead: u32, now: Duration) -> u32 {
        self.token_of(peer, instead, now.as_secs() / TOKEN_LIFE)
    }

    fn token_of(&self, peer: &Peer, instead: u32, slot: u64) -> u32 {
        self.number((0_u8, peer, instead, slot))
    }

    fn number(&self, what: impl Hash) -> u32 {
        let [a, b, c, d, ..] = self.hash(what).to_be_bytes();
        u32::from_be_bytes([a, b, c, d]).max(1)
    }

    /// Whether `token` is one that the peer was given lately.
    pub(super) fn gave(&self, peer: &Peer, instead: u32, token: u32, now: Duration) -> bool {
        let slot = now.as_secs() / TOKEN_LIFE;
        self.token_of(peer, instead, slot) == token
            || self.token_of(peer, instead, slot.wrapping_sub(1)) == token
    }

    /// A number that cannot be guessed and that is another one each time. Never 0.
    pub(super) fn nonce(&self, peer: &Peer, now: Duration) -> u32 {
        self.number((3_u8, peer, now))
    }

    /// A small number that addresses of one prefix share.
    pub(super) fn bucket(&self, prefix: &IpAddr) -> u8 {
        self.hash((4_u8, prefix)) as u8
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
    }

    #[test]
    fn a_token_is_good_for_its_peer_for_a_shorter_while() {
        let secret = Secret::new([1, 2]);
        let peer = |host: u8| (([10, 0, 0, host], 4000).into(), 3);
        let at = |s| Duration::from_secs(s);
        let token = secret.token(&peer(1), 0, at(29));
        assert!(secret.gave(&peer(1), 0, token, at(0)));
        assert!(secret.gave(&peer(1), 0, token, at(59)));
        assert!(!secret.gave(&peer(1), 0, token, at(60)));
        assert!(!secret.gave(&peer(2), 0, token, at(29)));
        assert!(!secret.gave(&peer(1), 7, token, at(29)));
        assert_ne!(secret.nonce(&peer(1), at(1)), secret.nonce(&peer(1), at(2)));
    }
}
