//! Limits for hosts and networks: entries in the table of peers, and memory of waiting packets and of answers.
//!
//! A host is an IPv4 address or the first 64 bits of an IPv6 address. A network is the first 24 or 48 bits. The
//! limits leave a part of the total for others: one network may use half of it, the next network half of the rest, and so on. One
//! host may use a third of the entries, and of the memory of answers.

use std::net::IpAddr;

use crate::bounds;
use crate::datagram::table::Table;
use crate::datagram::types::Peer;

/// What one host or network uses.
#[derive(Debug, Default)]
pub(super) struct Share {
    peers: u32,
    /// At most [`bounds::RD_WAITING`].
    waiting: u32,
    /// Bytes of answers under way, at most [`bounds::RD_ANSWER_BYTES`].
    answers: u32,
}

/// A host or a network as a key of the tables: the upper 64 bits of an IPv6 address, or an IPv4 address. It takes less memory than an
/// [`IpAddr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Prefix(u64);

impl Prefix {
    fn new(prefix: IpAddr) -> Self {
        match prefix {
            // No host has an IPv6 address with these upper bits.
            IpAddr::V4(ip) => Self(0xffff << 32 | u64::from(ip.to_bits())),
            IpAddr::V6(ip) => Self((ip.to_bits() >> 64) as u64),
        }
    }

    /// Returns the host and the network of a peer.
    fn of(peer: &Peer) -> (Self, Self) {
        let (host, network) = prefixes(peer);
        (Self::new(host), Self::new(network))
    }
}

/// The use of peer entries, and of memory for waiting packets and answers, by hosts and networks.
#[derive(Debug, Default)]
pub(super) struct Shares {
    hosts: Table<Prefix, Share>,
    networks: Table<Prefix, Share>,
    peers: usize,
    waiting: usize,
    answers: usize,
}

/// Returns the prefix of the host that an address belongs to (32 or 64 bits), with the other bits cleared. One host can have all IPv6
/// addresses with that prefix.
pub fn host_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        ip => ip,
    }
}

/// Returns the prefixes of a peer's host, as [`host_of`] does, and of its network (24 or 48 bits).
pub(super) fn prefixes(peer: &Peer) -> (IpAddr, IpAddr) {
    let host = host_of(peer.0.ip());
    let network = match host {
        IpAddr::V6(ip) => {
            let [a, b, c, ..] = ip.segments();
            IpAddr::from([a, b, c, 0, 0, 0, 0, 0])
        }
        IpAddr::V4(ip) => {
            let [a, b, c, _] = ip.octets();
            IpAddr::from([a, b, c, 0])
        }
    };
    (host, network)
}

impl Shares {
    /// Whether one more peer may be added. `is_incoming`: the peer sent the first packet; only then do the limits of its
    /// host and its network apply.
    pub(super) fn has_room_for_peer(&self, peer: &Peer, is_incoming: bool) -> bool {
        let left = bounds::RD_PEERS.saturating_sub(self.peers);
        let (host, network) = Prefix::of(peer);
        let of =
            |table: &Table<Prefix, Share>, key| table.get(&key).map_or(0, |s| s.peers as usize);
        left > 0
            && (!is_incoming
                || of(&self.networks, network) < left && of(&self.hosts, host) * 2 < left)
    }

    /// Counts a new peer.
    pub(super) fn enter(&mut self, peer: &Peer) {
        let (host, network) = Prefix::of(peer);
        self.hosts.entry(host).or_default().peers += 1;
        self.networks.entry(network).or_default().peers += 1;
        self.peers += 1;
    }

    /// Removes a peer for which no waiting packets and no answers are counted.
    pub(super) fn leave(&mut self, peer: &Peer) {
        let (host, network) = Prefix::of(peer);
        for (table, key) in [(&mut self.hosts, host), (&mut self.networks, network)] {
            if let Some(share) = table.get_mut(&key) {
                share.peers -= 1;
                if share.peers == 0 {
                    table.remove(&key);
                }
            }
        }
        self.peers -= 1;
    }

    /// Whether `more` bytes of packets of a peer may wait in addition to `theirs`.
    pub(super) fn has_room(&self, peer: &Peer, theirs: usize, more: usize) -> bool {
        let left = bounds::RD_WAITING.saturating_sub(self.waiting);
        let (_, network) = Prefix::of(peer);
        let of_network = self
            .networks
            .get(&network)
            .map_or(0, |s| s.waiting as usize);
        theirs + more <= bounds::RD_WAITING_PEER && more <= left && of_network + more <= left
    }

    /// Updates the waiting bytes of a peer from `before` to `after`.
    pub(super) fn change(&mut self, peer: &Peer, before: usize, after: usize) {
        if before == after {
            return;
        }
        let (_, network) = Prefix::of(peer);
        if let Some(share) = self.networks.get_mut(&network) {
            share.waiting = share.waiting + after as u32 - before as u32;
        }
        self.waiting = self.waiting + after - before;
    }

    /// Whether `more` bytes of answers to a peer may be under way.
    pub(super) fn has_room_for_answer(&self, peer: &Peer, more: usize) -> bool {
        let left = bounds::RD_ANSWER_BYTES.saturating_sub(self.answers);
        let (host, network) = Prefix::of(peer);
        let of =
            |table: &Table<Prefix, Share>, key| table.get(&key).map_or(0, |s| s.answers as usize);
        of(&self.networks, network) + more <= left && 2 * (of(&self.hosts, host) + more) <= left
    }

    /// Updates the bytes of answers under way to a peer from `before` to `after`.
    pub(super) fn change_answers(&mut self, peer: &Peer, before: usize, after: usize) {
        let (host, network) = Prefix::of(peer);
        for (table, key) in [(&mut self.hosts, host), (&mut self.networks, network)] {
            if let Some(share) = table.get_mut(&key) {
                share.answers = share.answers + after as u32 - before as u32;
            }
        }
        self.answers = self.answers + after - before;
    }

    /// The bytes of answers under way to all peers.
    pub(super) fn answers(&self) -> usize {
        self.answers
    }

    /// The waiting bytes of all peers.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether the sums of the hosts and of the networks are equal to the total.
    pub(super) fn is_consistent(&self) -> bool {
        let sum = |table: &Table<Prefix, Share>, of: fn(&Share) -> u32| {
            table
                .values()
                .map(|share| of(share) as usize)
                .sum::<usize>()
        };
        sum(&self.hosts, |s| s.peers) == self.peers
            && sum(&self.networks, |s| s.peers) == self.peers
            && sum(&self.networks, |s| s.waiting) == self.waiting
            && sum(&self.hosts, |s| s.answers) == self.answers
            && sum(&self.networks, |s| s.answers) == self.answers
    }

    /// Frees memory of the tables that is not needed any more.
    pub(super) fn shrink(&mut self) {
        for table in [&mut self.hosts, &mut self.networks] {
            if table.len() < table.capacity() / 4 {
                table.shrink_to(2 * table.len());
            }
        }
    }

    /// Whether no host uses anything.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.hosts.is_empty()
            && self.networks.is_empty()
            && self.waiting + self.peers + self.answers == 0
    }
}
