//! A cache of datagram peers: the rule for each one, and whether it accepts messages.
//!
//! The table has a fixed size, is shared by all sockets of the process, and never blocks: an entry that another thread is writing,
//! or was writing at a fork, counts as missing.

use crate::limits;
use crate::sys;
use sockets_base::rules::Mode;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The cached facts about a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The mode of the rule for sending to the peer, if any, and whether the peer is assumed to accept messages without a
    /// query.
    pub rule: Option<(Mode, bool)>,
    /// Whether the peer accepts messages. `None`: the directory was not queried, because no rule requires that.
    pub messages: Option<bool>,
    /// The same for reliable datagrams.
    pub reliable: Option<bool>,
}

fn answer_bits(answer: Option<bool>) -> u64 {
    match answer {
        None => 0,
        Some(false) => 1,
        Some(true) => 2,
    }
}

fn answer_of(bits: u64) -> Option<bool> {
    match bits & 3 {
        0 => None,
        n => Some(n == 2),
    }
}

impl Known {
    fn bits(self) -> u64 {
        let rule = match self.rule {
            None => 0,
            Some((Mode::Datagram, unasked)) => 2 | u64::from(unasked),
            Some((Mode::Record, unasked)) => 4 | u64::from(unasked),
            Some((Mode::Reliable, unasked)) => 6 | u64::from(unasked),
            Some(_) => 1,
        };
        rule << 4 | answer_bits(self.reliable) << 2 | answer_bits(self.messages)
    }

    fn of(bits: u64) -> Self {
        let unasked = bits & 16 != 0;
        Self {
            rule: match bits >> 4 & 7 {
                0 => None,
                2 | 3 => Some((Mode::Datagram, unasked)),
                4 | 5 => Some((Mode::Record, unasked)),
                6 | 7 => Some((Mode::Reliable, unasked)),
                _ => Some((Mode::Udp, false)),
            },
            messages: answer_of(bits),
            reliable: answer_of(bits >> 2),
        }
    }
}

struct Slot {
    /// A sequence number, odd while the entry is written.
    turn: AtomicU32,
    /// The IPv6 (or mapped IPv4) address.
    addr: [AtomicU64; 2],
    /// The port (16 bits), the facts (8 bits), and the millisecond at which the entry expires (40 bits).
    rest: AtomicU64,
}

static SLOTS: [Slot; limits::PEERS] = [const {
    Slot {
        turn: AtomicU32::new(0),
        addr: [AtomicU64::new(0), AtomicU64::new(0)],
        rest: AtomicU64::new(0),
    }
}; limits::PEERS];

fn key(addr: SocketAddr) -> ([u64; 2], u64) {
    let ip = match addr.ip().to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let n = u128::from(ip);
    ([(n >> 64) as u64, n as u64], u64::from(addr.port()))
}

fn slot(addr: [u64; 2], port: u64) -> Option<&'static Slot> {
    // The factor is 2^64 divided by the golden ratio. Products with it are spread evenly, even for peers of one host, which differ
    // only in their ports.
    let mix = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = mix(mix(addr[0] ^ addr[1].rotate_left(17)) ^ port);
    SLOTS.get((hash >> 32) as usize % limits::PEERS)
}

/// Returns the entry of a peer, if there is one that has not expired.
pub fn get(addr: SocketAddr) -> Option<Known> {
    let (ip, port) = key(addr);
    let slot = slot(ip, port)?;
    let turn = slot.turn.load(Ordering::Acquire);
    let found = [0, 1].map(|i: usize| slot.addr.get(i).map_or(0, |a| a.load(Ordering::Relaxed)));
    let rest = slot.rest.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    let is_whole = turn % 2 == 0 && slot.turn.load(Ordering::Relaxed) == turn;
    let is_it = is_whole && turn > 0 && found == ip && rest & 0xffff == port;
    (is_it && sys::now_ms() < rest >> 24).then(|| Known::of(rest >> 16))
}

fn put(addr: SocketAddr, change: impl FnOnce(&Slot, bool, u64)) {
    let (ip, port) = key(addr);
    let Some(slot) = slot(ip, port) else { return };
    let turn = slot.turn.load(Ordering::Relaxed);
    let writes = turn % 2 == 0
        && slot
            .turn
            .compare_exchange(turn, turn | 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
    if !writes {
        return;
    }
    fence(Ordering::Release);
    let rest = slot.rest.load(Ordering::Relaxed);
    let mut is_it = rest & 0xffff == port;
    for (place, half) in slot.addr.iter().zip(ip) {
        is_it &= place.load(Ordering::Relaxed) == half;
    }
    change(slot, is_it, port);
    slot.turn
        .store(turn.wrapping_add(2).max(2), Ordering::Release);
}

/// Stores the facts about a peer.
pub fn set(addr: SocketAddr, known: Known) {
    let until = sys::now_ms() + limits::KNOWN;
    let (ip, _) = key(addr);
    put(addr, |slot, _, port| {
        for (place, half) in slot.addr.iter().zip(ip) {
            place.store(half, Ordering::Relaxed);
        }
        slot.rest
            .store(until << 24 | known.bits() << 16 | port, Ordering::Relaxed);
    });
}

/// Removes the entry of a peer, so that it is looked up again.
pub fn forget(addr: SocketAddr) {
    put(addr, |slot, is_it, _| {
        if is_it {
            slot.rest.store(0, Ordering::Relaxed);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_until_they_are_removed() {
        let of = |port: u16| SocketAddr::from(([192, 0, 2, 9], port));
        let all = [
            None,
            Some((Mode::Udp, false)),
            Some((Mode::Datagram, false)),
            Some((Mode::Datagram, true)),
            Some((Mode::Record, false)),
            Some((Mode::Record, true)),
            Some((Mode::Reliable, false)),
            Some((Mode::Reliable, true)),
        ];
        let answers = [None, Some(false), Some(true)];
        for (port, rule) in (1..).zip(all) {
            for (messages, reliable) in answers.iter().flat_map(|a| answers.map(|b| (*a, b))) {
                let known = Known {
                    rule,
                    messages,
                    reliable,
                };
                assert_eq!(Known::of(known.bits()), known);
                set(of(port), known);
                assert_eq!(get(of(port)), Some(known));
            }
        }
        let mapped: SocketAddr = "[::ffff:192.0.2.9]:1".parse().unwrap();
        assert!(get(mapped).is_some() && get(of(99)).is_none());
        forget(of(1));
        assert!(get(mapped).is_none());
        std::thread::sleep(std::time::Duration::from_millis(limits::KNOWN + 10));
        assert!(get(of(2)).is_none());
    }

    #[test]
    fn threads_never_find_partial_entries() {
        let of = |n: u16| SocketAddr::from(([198, 51, (n >> 8) as u8, n as u8], 7));
        std::thread::scope(|s| {
            for thread in 0..4u16 {
                s.spawn(move || {
                    for i in 0..60_000u16 {
                        let n = i.wrapping_mul(7) ^ thread;
                        let known = Known {
                            rule: (n % 2 == 0).then_some((Mode::Datagram, false)),
                            messages: (n % 3 > 0).then_some(n % 3 == 1),
                            reliable: (n % 5 > 0).then_some(n % 5 == 1),
                        };
                        set(of(n), known);
                        if let Some(found) = get(of(n)) {
                            assert_eq!(found, known);
                        }
                    }
                });
            }
        });
    }
}
