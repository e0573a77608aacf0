//! Proof that a peer receives at its address: it has to return a number that was sent there.
//!
//! Any host can send datagrams with a forged source address. Before this end sends much data to an address, or spends
//! memory on it, the queue pair there has to return a number that this end has sent to the address. The number is a
//! keyed hash of the address, so no state is kept until then.

#![expect(
    deprecated,
    reason = "std has no other hasher whose keys can be set; this one is SipHash"
)]

use std::hash::{Hash, Hasher, SipHasher};
use std::net::IpAddr;
use std::time::Duration;

use super::types::Peer;

/// The shortest time for which a cookie is valid, in seconds. The longest time is twice as long.
const LIFE: u64 = 60;
/// The shortest time for which the token of a reliable peer is valid, in seconds. The longest time is twice as long. A peer is
/// remembered for longer than its token is valid, so the token of a forgotten peer is not accepted.
const TOKEN_LIFE: u64 = 30;

/// The key, from the random source of the host.
#[derive(Clone, Copy)]
pub(super) struct Secret(u64, u64);

impl Secret {
    pub(super) fn new(key: [u64; 2]) -> Self {
        Self(key[0], key[1])
    }

    /// Another key, which is derived from this one.
    pub(super) fn next(self) -> Self {
        Self(self.hash((5_u8, 0_u8)), self.hash((5_u8, 1_u8)))
    }

    fn hash(&self, what: impl Hash) -> u64 {
        let mut hasher = SipHasher::new_with_keys(self.0, self.1);
        what.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the number that a reliable peer has to echo in its first packet. Never 0. `instead`: the token of a
    /// queue pair that would replace the known one at the same address, or 0.
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

    /// Whether `token` is one that was sent to the peer recently.
    pub(super) fn has_issued_token(
        &self,
        peer: &Peer,
        instead: u32,
        token: u32,
        now: Duration,
    ) -> bool {
        let slot = now.as_secs() / TOKEN_LIFE;
        self.token_of(peer, instead, slot) == token
            || self.token_of(peer, instead, slot.wrapping_sub(1)) == token
    }

    /// Returns a number that cannot be guessed, another one for each peer and each time. Never 0.
    pub(super) fn nonce(&self, peer: &Peer, now: Duration) -> u32 {
        self.number((3_u8, peer, now))
    }

    /// Returns the hash of an address prefix, one byte.
    pub(super) fn bucket(&self, prefix: &IpAddr) -> u8 {
        self.hash((4_u8, prefix)) as u8
    }

    /// Returns a number that cannot be guessed, for the purpose `what`: an epoch, an instance number, or the first number of a sequence.
    pub(super) fn start(&self, what: u8) -> u32 {
        let [a, b, c, d, ..] = self.hash((1_u8, what)).to_be_bytes();
        u32::from_be_bytes([a, b, c, d])
    }

    /// Returns the cookie that a peer has to send with requests for long answers.
    pub(super) fn cookie(&self, peer: &Peer, now: Duration) -> u64 {
        self.hash((2_u8, peer, now.as_secs() / LIFE))
    }

    /// Whether `cookie` is one that was sent to the peer recently.
    pub(super) fn has_issued_cookie(&self, peer: &Peer, cookie: u64, now: Duration) -> bool {
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
    fn a_cookie_is_valid_for_its_peer_for_a_limited_time() {
        let secret = Secret::new([1, 2]);
        let peer = |host: u8, index| (([10, 0, 0, host], 4000).into(), index);
        let at = |s| Duration::from_secs(s);
        let cookie = secret.cookie(&peer(1, 3), at(59));
        assert!(secret.has_issued_cookie(&peer(1, 3), cookie, at(0)));
        assert!(secret.has_issued_cookie(&peer(1, 3), cookie, at(119)));
        assert!(!secret.has_issued_cookie(&peer(1, 3), cookie, at(120)));
        assert!(!secret.has_issued_cookie(&peer(2, 3), cookie, at(59)));
        assert!(!secret.has_issued_cookie(&peer(1, 4), cookie, at(59)));
        assert!(!Secret::new([1, 3]).has_issued_cookie(&peer(1, 3), cookie, at(59)));
    }

    #[test]
    fn a_token_is_valid_for_its_peer_for_a_shorter_time() {
        let secret = Secret::new([1, 2]);
        let peer = |host: u8| (([10, 0, 0, host], 4000).into(), 3);
        let at = |s| Duration::from_secs(s);
        let token = secret.token(&peer(1), 0, at(29));
        assert!(secret.has_issued_token(&peer(1), 0, token, at(0)));
        assert!(secret.has_issued_token(&peer(1), 0, token, at(59)));
        assert!(!secret.has_issued_token(&peer(1), 0, token, at(60)));
        assert!(!secret.has_issued_token(&peer(2), 0, token, at(29)));
        assert!(!secret.has_issued_token(&peer(1), 7, token, at(29)));
        assert_ne!(secret.nonce(&peer(1), at(1)), secret.nonce(&peer(1), at(2)));
    }
}
