//! The addresses of the device: GIDs and LIDs that represent IP addresses of the host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::config::config;
use crate::sys::host::{self, HostAddress};

/// One entry of the GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// 16 bytes; IPv4 is mapped (`::ffff:a.b.c.d`).
    pub raw: [u8; 16],
    /// The address.
    pub ip: IpAddr,
    /// Interface index.
    pub interface: u32,
    /// Interface name.
    pub name: String,
}

/// The 16 bytes of a GID for an address.
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The IP address of a GID.
pub fn ip_of(gid: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(gid);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The addresses of a new GID table: `ANYWARP_ADDR` first if set, then the host's IPv4 addresses, IPv6 addresses, and
/// the loopback addresses. `None` if they cannot be read.
pub(crate) fn listing() -> Option<Vec<Gid>> {
    let chosen = config().address;
    let rank = |a: &HostAddress| match a.ip {
        ip if Some(ip) == chosen => 0,
        IpAddr::V4(_) if !a.loopback => 1,
        IpAddr::V6(_) if !a.loopback => 2,
        IpAddr::V4(_) => 3,
        IpAddr::V6(_) => 4,
    };
    let mut all: Vec<HostAddress> = host::host_addresses()?
        .into_iter()
        .filter(|a| a.up && !is_link_local(a.ip))
        .collect();
    all.sort_by_key(rank);
    let mut table: Vec<Gid> = Vec::new();
    for a in all {
        let raw = gid_of(a.ip);
        if table.iter().all(|g| g.raw != raw) {
            table.push(Gid {
                raw,
                ip: a.ip,
                interface: a.index,
                name: a.interface,
            });
        }
    }
    if table.is_empty() {
        table.push(loopback());
    }
    Some(table)
}

/// A line for the log if `ANYWARP_ADDR` names another address than that of GID 0.
pub(crate) fn unused_address(first: &Gid) -> Option<String> {
    unused(config().address?, first)
}

fn unused(chosen: IpAddr, first: &Gid) -> Option<String> {
    (first.ip != chosen).then(|| {
        format!(
            "ANYWARP_ADDR: no interface that is up has the address {chosen}, or it is link-local; GID 0 is {}",
            first.ip
        )
    })
}

/// The only entry on a host without addresses.
pub(crate) fn loopback() -> Gid {
    Gid {
        raw: gid_of(Ipv4Addr::LOCALHOST.into()),
        ip: Ipv4Addr::LOCALHOST.into(),
        interface: 1,
        name: "lo".into(),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments().first().is_some_and(|s| s & 0xffc0 == 0xfe80),
    }
}

/// The LID for an address: its low 16 bits, changed so that the LID is neither zero nor a multicast LID.
pub fn lid_of(ip: IpAddr) -> u16 {
    let low = match ip {
        IpAddr::V4(v4) => {
            let [_, _, c, d] = v4.octets();
            u16::from_be_bytes([c, d])
        }
        IpAddr::V6(v6) => v6.segments().last().copied().unwrap_or(1),
    };
    match low & 0xbfff {
        0 => 1,
        lid => lid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lid_has_the_low_bits_of_the_address_and_is_never_zero_or_multicast() {
        let lid = |a: &str| lid_of(a.parse().unwrap());
        assert_eq!(lid("10.77.0.1"), 0x0001);
        assert_eq!(lid("192.168.3.4"), 0x0304);
        assert_eq!(lid("10.0.0.0"), 1);
        assert!((0..=255).all(|c| lid(&format!("10.0.{c}.9")) < 0xc000));
    }

    #[test]
    fn a_chosen_address_that_is_not_used_is_reported() {
        let first = loopback();
        assert_eq!(unused(Ipv4Addr::LOCALHOST.into(), &first), None);
        let line = unused("192.0.2.1".parse().unwrap(), &first).unwrap();
        assert_eq!(
            line,
            "ANYWARP_ADDR: no interface that is up has the address 192.0.2.1, or it is link-local; GID 0 is 127.0.0.1"
        );
    }

    #[test]
    fn an_address_survives_the_conversion_to_a_gid() {
        for a in ["10.77.0.1", "fd00::2", "::1"] {
            let ip: IpAddr = a.parse().unwrap();
            assert_eq!(ip_of(gid_of(ip)), ip);
        }
    }
}
