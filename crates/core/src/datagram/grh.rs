//! The route header in front of every Send that is received on UD or RD.
//!
//! Verbs programs find the address of a sender in the first 40 bytes of the receive buffer. The host has received an
//! ordinary IP header, which is presented in the layout of RoCE v2:
//!
//! ```text
//!  IPv6:  0                                                           40
//!        +------------------------------------------------------------+
//!        | version 6, traffic class, flow, length, next, hops, S, D   |
//!        +------------------------------------------------------------+
//!  IPv4:  0                     20                                    40
//!        +---------------------+--------------------------------------+
//!        | zero                | IPv4 header without options          |
//!        +---------------------+--------------------------------------+
//! ```
//!
//! `ibv_init_ah_from_wc(3)` tells the two apart by the version nibbles and the checksum of the IPv4 header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::outgoing::canonical;
use super::types::Arrival;
use crate::bounds;
use crate::wire::put;

/// Bytes of the header.
pub const LEN: usize = bounds::GRH_LEN as usize;

/// Protocol number of UDP, for the next-header field.
const UDP: u8 = 17;
/// Bytes of a UDP header.
const UDP_HEADER: usize = 8;
/// Bytes of an IPv4 header without options.
const IPV4_HEADER: usize = 20;

/// The addressing of the last datagram, and what is computed from it. Most datagrams have the addressing and the length of
/// the one before.
#[derive(Debug, Default)]
pub(super) struct LastArrival(Option<Known>);

/// What is known about datagrams with one addressing.
#[derive(Debug)]
pub(super) struct Known {
    arrival: Arrival,
    /// The source address in canonical form.
    pub(super) from: SocketAddr,
    /// Whether the datagrams were sent to a group.
    pub(super) to_group: bool,
    /// The result of [`kind`].
    pub(super) kind: u8,
    /// The length of the datagram for which `header` was built.
    len: usize,
    header: [u8; LEN],
}

impl LastArrival {
    /// Returns what is known about `arrival`. `to_group` tells whether an address is a group that the queue pair receives from.
    #[inline]
    pub(super) fn of(
        &mut self,
        arrival: &Arrival,
        to_group: impl FnOnce(IpAddr) -> bool,
    ) -> &mut Known {
        if !self
            .0
            .as_ref()
            .is_some_and(|known| known.arrival == *arrival)
        {
            self.0 = None;
        }
        self.0.get_or_insert_with(|| Known {
            arrival: *arrival,
            from: canonical(arrival.from),
            to_group: arrival.to.is_some_and(to_group),
            kind: kind(arrival),
            len: 0,
            header: build(arrival, 0),
        })
    }

    /// Forgets the last datagram, because the queue pair has joined or left a group.
    pub(super) fn forget(&mut self) {
        self.0 = None;
    }
}

impl Known {
    /// The route header of a datagram of `len` bytes.
    #[inline]
    pub(super) fn header(&mut self, len: usize) -> &[u8; LEN] {
        if self.len != len {
            self.len = len;
            self.header = build(&self.arrival, len);
        }
        &self.header
    }
}

/// Returns the header for a datagram of `len` bytes that arrived with this addressing.
pub fn build(arrival: &Arrival, len: usize) -> [u8; LEN] {
    let to = arrival.to.map(|to| to.to_canonical());
    match arrival.from.ip().to_canonical() {
        IpAddr::V4(from) => {
            let to = match to {
                Some(IpAddr::V4(to)) => to,
                _ => Ipv4Addr::UNSPECIFIED,
            };
            ipv4(arrival, from, to, len)
        }
        IpAddr::V6(from) => {
            let to = match to {
                Some(IpAddr::V6(to)) => to,
                _ => Ipv6Addr::UNSPECIFIED,
            };
            ipv6(arrival, from, to, len)
        }
    }
}

/// Returns the kind of header: see [`Completion::sl`](crate::verbs::wc::Completion::sl).
#[inline]
pub fn kind(arrival: &Arrival) -> u8 {
    const ROCE_V2: u8 = 8;
    match arrival.from.ip().to_canonical() {
        IpAddr::V4(_) => ROCE_V2 | 2,
        IpAddr::V6(_) => ROCE_V2 | 1,
    }
}

/// Returns a 16-bit length field, which is enough for every UDP datagram.
fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes()
}

#[inline]
fn ipv4(arrival: &Arrival, from: Ipv4Addr, to: Ipv4Addr, len: usize) -> [u8; LEN] {
    let (tos, ttl) = (arrival.traffic_class, arrival.hop_limit);
    let length = length(IPV4_HEADER + UDP_HEADER + len);
    let first = [0x45, tos];
    let third = [ttl, UDP];
    // RFC 791 §3.1: the complement of the ones' complement sum of the 16-bit words of the header. Carries wrap
    // around, so the sum of 32-bit words, folded to 16 bits, is the same.
    let word = |bytes| u64::from(u16::from_be_bytes(bytes));
    let mut sum = word(first) + word(length) + word(third);
    sum += u64::from(u32::from(from)) + u64::from(u32::from(to));
    sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    let mut out = [0; LEN];
    let [t0, t1] = first;
    let [l0, l1] = length;
    put::<20, LEN, 4>(&mut out, [t0, t1, l0, l1]);
    put::<28, LEN, 2>(&mut out, third);
    put::<30, LEN, 2>(&mut out, (!(sum as u16)).to_be_bytes());
    put::<32, LEN, 4>(&mut out, from.octets());
    put::<36, LEN, 4>(&mut out, to.octets());
    out
}

fn ipv6(arrival: &Arrival, from: Ipv6Addr, to: Ipv6Addr, len: usize) -> [u8; LEN] {
    let class = u32::from(arrival.traffic_class);
    let mut out = [0; LEN];
    let fields = (6 << 28 | class << 20)
        .to_be_bytes()
        .into_iter()
        .chain(length(UDP_HEADER + len))
        .chain([UDP, arrival.hop_limit])
        .chain(from.octets())
        .chain(to.octets());
    for (place, byte) in out.iter_mut().zip(fields) {
        *place = byte;
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The fields that a program reads from the 40 bytes: source, destination, hop limit, traffic class, datagram
    /// length.
    pub(crate) type Route = (IpAddr, IpAddr, u8, u8, usize);

    /// Reads the header as verbs programs do. Written from the description of RoCE v2, independent of `build`.
    pub(crate) fn read(grh: &[u8]) -> Option<Route> {
        let word = |at: usize| u16::from_be_bytes([grh[at], grh[at + 1]]);
        let inner = &grh[20..];
        let mut sum = 0_u64;
        for i in 0..10 {
            sum += u64::from(inner[2 * i]) * 256 + u64::from(inner[2 * i + 1]);
        }
        // The sum of a header with a correct checksum is a multiple of 65535, but not 0.
        let sum_is_right = sum.is_multiple_of(65_535) && sum != 0;
        if grh[0] >> 4 == 6 && !(inner[0] == 0x45 && sum_is_right) {
            assert_eq!(grh[6], 17);
            let from: [u8; 16] = grh[8..24].try_into().unwrap();
            let to: [u8; 16] = grh[24..40].try_into().unwrap();
            let class = (word(0) >> 4) as u8;
            return Some((
                from.into(),
                to.into(),
                grh[7],
                class,
                usize::from(word(4)) - 8,
            ));
        }
        if inner[0] != 0x45 || !sum_is_right || grh[..20].iter().any(|b| *b != 0) {
            return None;
        }
        assert_eq!(inner[9], 17);
        let from: [u8; 4] = inner[12..16].try_into().unwrap();
        let to: [u8; 4] = inner[16..20].try_into().unwrap();
        Some((
            from.into(),
            to.into(),
            inner[8],
            inner[1],
            usize::from(word(22)) - 28,
        ))
    }

    fn arrival(from: &str, to: Option<&str>, hop_limit: u8, traffic_class: u8) -> Arrival {
        Arrival {
            from: SocketAddr::new(from.parse().unwrap(), 4711),
            to: to.map(|a| a.parse().unwrap()),
            hop_limit,
            traffic_class,
        }
    }

    #[test]
    fn a_program_finds_both_addresses_of_either_family() {
        for (from, to) in [
            ("10.1.2.3", "10.1.2.4"),
            ("255.255.255.255", "255.255.255.255"),
            ("0.0.0.0", "224.0.0.1"),
            ("fe80::1", "2001:db8::7"),
            ("::1", "ff02::1"),
        ] {
            for (hops, class, len) in [(64, 0, 44), (1, 0xff, 0), (255, 0xb8, 4140)] {
                let grh = build(&arrival(from, Some(to), hops, class), len);
                assert_eq!(
                    read(&grh),
                    Some((from.parse().unwrap(), to.parse().unwrap(), hops, class, len))
                );
            }
        }
    }

    #[test]
    fn a_known_ipv4_header() {
        let grh = build(&arrival("10.0.0.1", Some("10.0.0.2"), 64, 0), 49);
        #[rustfmt::skip]
        let expected = [
            0x45, 0x00, 0x00, 0x4d, 0x00, 0x00, 0x00, 0x00, 0x40, 0x11, 0x66, 0x9e,
            10, 0, 0, 1, 10, 0, 0, 2,
        ];
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(grh[20..], expected);
    }

    #[test]
    fn mapped_addresses_are_ipv4_and_an_unknown_destination_is_zero() {
        let grh = build(
            &arrival("::ffff:10.0.0.1", Some("::ffff:10.0.0.2"), 64, 0),
            49,
        );
        let plain = build(&arrival("10.0.0.1", Some("10.0.0.2"), 64, 0), 49);
        assert_eq!(grh, plain);
        for (from, zero) in [("10.0.0.1", "0.0.0.0"), ("fe80::1", "::")] {
            let (_, to, ..) = read(&build(&arrival(from, None, 64, 0), 49)).unwrap();
            assert_eq!(to, zero.parse::<IpAddr>().unwrap());
        }
    }
}
