//! Names of peers, which `fi_getname` returns and `fi_av_insert` expects.
//!
//! A name is a socket address of 16 or 28 bytes with the UDP port of an endpoint. The endpoint's index on its port is in a byte that
//! socket addresses do not use: the first of `sin_zero`, the last of `sin6_flowinfo`.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::abi::{FI_ADDR_NOTAVAIL, FI_ADDR_UNSPEC, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FiAddr};
use crate::limits;

/// Bytes of an IPv4 name.
pub const LEN_V4: usize = 16;
/// Bytes of an IPv6 name.
pub const LEN_V6: usize = 28;

/// The address of a queue pair, on any host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Remote {
    /// The IP address of the host.
    pub ip: IpAddr,
    /// The number of the queue pair: UDP port and index.
    pub qpn: u32,
}

impl std::fmt::Display for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [_, high, low, index] = self.qpn.to_be_bytes();
        let address = SocketAddr::new(self.ip, u16::from_be_bytes([high, low]));
        write!(f, "{address}/{index}")
    }
}

impl Remote {
    /// Returns the name and its length.
    pub fn name(&self) -> ([u8; LEN_V6], usize) {
        let mut out = [0; LEN_V6];
        let [_, high, low, index] = self.qpn.to_be_bytes();
        let len = match self.ip {
            IpAddr::V4(ip) => {
                let family = (libc::AF_INET as u16).to_ne_bytes();
                let [a, b, c, d] = ip.octets();
                let name = [family[0], family[1], high, low, a, b, c, d, index];
                copy(&mut out, 0, &name);
                LEN_V4
            }
            IpAddr::V6(ip) => {
                let family = (libc::AF_INET6 as u16).to_ne_bytes();
                copy(
                    &mut out,
                    0,
                    &[family[0], family[1], high, low, 0, 0, 0, index],
                );
                copy(&mut out, 8, &ip.octets());
                LEN_V6
            }
        };
        (out, len)
    }

    /// Returns the queue pair of a name, or `None` if the bytes are not a valid name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        let (ip, port, index) = parts_of(name)?;
        Self::at(ip, port, index)
    }

    /// Returns the queue pair with this index on a port, or `None` if there cannot be one at this address.
    pub fn at(ip: IpAddr, port: u16, index: u8) -> Option<Self> {
        let cannot_be = port == 0 || ip.is_unspecified() || ip.is_multicast();
        (!cannot_be).then_some(Self {
            ip,
            qpn: u32::from(port) << 8 | u32::from(index),
        })
    }
}

/// Returns the address, the port and the index of a name, or `None` if the bytes are not a socket address.
pub fn parts_of(name: &[u8]) -> Option<(IpAddr, u16, u8)> {
    let (family, rest) = name.split_first_chunk::<2>()?;
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let (ip, index) = match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_INET => {
            let (ip, zero) = rest.split_first_chunk::<4>()?;
            (IpAddr::V4(Ipv4Addr::from(*ip)), *zero.first()?)
        }
        libc::AF_INET6 => {
            let ([_, _, _, index], rest) = rest.split_first_chunk::<4>()?;
            let (ip, _scope) = rest.split_first_chunk::<16>()?;
            (IpAddr::V6(Ipv6Addr::from(*ip)), *index)
        }
        _ => return None,
    };
    Some((ip.to_canonical(), u16::from_be_bytes(*port), index))
}

/// Returns the port of a service, which is a port number or a name that the system knows.
pub fn port_of_service(service: &str) -> Option<u16> {
    if service.bytes().all(|b| b.is_ascii_digit()) {
        return service.parse().ok();
    }
    let service = CString::new(service).ok()?;
    let mut found = std::ptr::null_mut();
    // SAFETY: the service is a C string. The list is read before it is freed, and its addresses, which have the family of the hint,
    // are socket addresses of IPv4.
    unsafe {
        let mut hint: libc::addrinfo = std::mem::zeroed();
        hint.ai_family = libc::AF_INET;
        if libc::getaddrinfo(
            std::ptr::null(),
            service.as_ptr(),
            &raw const hint,
            &raw mut found,
        ) != 0
        {
            return None;
        }
        let port = (*found).ai_addr.cast::<libc::sockaddr_in>().read().sin_port;
        libc::freeaddrinfo(found);
        Some(u16::from_be(port))
    }
}

fn copy(to: &mut [u8], at: usize, from: &[u8]) {
    for (to, from) in to.iter_mut().skip(at).zip(from) {
        *to = *from;
    }
}

/// Returns the length of a name in an address format.
pub fn name_len(format: u32) -> usize {
    match format {
        FI_SOCKADDR_IN6 => LEN_V6,
        _ => LEN_V4,
    }
}

/// Returns the address format of an IP address.
pub fn format_of(ip: IpAddr) -> u32 {
    if ip.is_ipv4() {
        FI_SOCKADDR_IN
    } else {
        FI_SOCKADDR_IN6
    }
}

/// An address vector.
#[derive(Debug, Default)]
pub struct Vector {
    peers: Vec<Option<Remote>>,
    /// The index that stands for each peer. A program may insert a name twice. Completions and receives then use one of the indexes:
    /// the first one or, after that was removed, the lowest of the others.
    first: HashMap<Remote, FiAddr>,
    /// For each peer with more than one index, the number of its indexes.
    several: HashMap<Remote, usize>,
    free: BTreeSet<FiAddr>,
    /// The peer that was looked up last, because many messages in a row often belong to one peer.
    last: Cell<Option<(Remote, FiAddr)>>,
}

impl Vector {
    /// Adds a peer at the lowest index that is not used. Returns the index, or `None` if there are too many.
    pub fn insert(&mut self, peer: Remote) -> Option<FiAddr> {
        let at = match self.free.pop_first() {
            Some(at) => at,
            None if self.peers.len() < limits::PEERS => {
                self.peers.push(None);
                self.peers.len() as FiAddr - 1
            }
            None => return None,
        };
        self.last.set(None);
        *self.slot(at)? = Some(peer);
        if *self.first.entry(peer).or_insert(at) != at {
            *self.several.entry(peer).or_insert(1) += 1;
        }
        Some(at)
    }

    /// Removes a peer. Returns whether there was one at this index.
    pub fn remove(&mut self, at: FiAddr) -> bool {
        let Some(peer) = self.slot(at).and_then(Option::take) else {
            return false;
        };
        self.last.set(None);
        self.free.insert(at);
        let others = self.several.remove(&peer).map_or(0, |n| n - 1);
        if others > 1 {
            self.several.insert(peer, others);
        }
        if self.first.get(&peer) == Some(&at) {
            self.first.remove(&peer);
            // If the peer has other indexes, the lowest of them stands for it now.
            let other = (others > 0).then(|| self.peers.iter().position(|p| *p == Some(peer)));
            if let Some(other) = other.flatten() {
                self.first.insert(peer, other as FiAddr);
            }
        }
        true
    }

    fn slot(&mut self, at: FiAddr) -> Option<&mut Option<Remote>> {
        self.peers.get_mut(usize::try_from(at).ok()?)
    }

    /// Returns the peer of an index.
    pub fn get(&self, at: FiAddr) -> Option<Remote> {
        *self.peers.get(usize::try_from(at).ok()?)?
    }

    /// Returns the index that stands for a peer; `FI_ADDR_NOTAVAIL` if the peer was not inserted.
    pub fn find(&self, peer: Remote) -> FiAddr {
        if let Some((last, at)) = self.last.get()
            && last == peer
        {
            return at;
        }
        let Some(at) = self.first.get(&peer).copied() else {
            return FI_ADDR_NOTAVAIL;
        };
        self.last.set(Some((peer, at)));
        at
    }

    /// Returns the index that stands for the peer with the index `at`; `None` if there is no such peer. `FI_ADDR_UNSPEC`,
    /// which means any peer, is returned unchanged.
    pub fn canonical(&self, at: FiAddr) -> Option<FiAddr> {
        if at == FI_ADDR_UNSPEC {
            return Some(at);
        }
        self.get(at).map(|peer| self.find(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_a_port_or_a_name() {
        assert_eq!(port_of_service("9228"), Some(9228));
        // Without /etc/services there are no names.
        assert!(matches!(port_of_service("http"), Some(80) | None));
        for none in ["65536", "", "no service", "1 2", "-1", "a\0b"] {
            assert_eq!(port_of_service(none), None, "{none}");
        }
    }

    fn peer(ip: &str, qpn: u32) -> Remote {
        Remote {
            ip: ip.parse().unwrap(),
            qpn,
        }
    }

    #[test]
    fn a_peer_is_converted_to_a_name_and_back() {
        for peer in [peer("127.0.0.1", 0x00ab_cd07), peer("fe80::1", 0x0000_0100)] {
            let (name, len) = peer.name();
            assert_eq!(len, name_len(format_of(peer.ip)));
            assert_eq!(Remote::from_name(&name[..len]), Some(peer));
        }
        assert_eq!(peer("10.1.2.3", 0x0012_3405).to_string(), "10.1.2.3:4660/5");
        let (name, _) = peer("10.1.2.3", 0x0012_3405).name();
        assert_eq!(
            &name[2..16],
            &[0x12, 0x34, 10, 1, 2, 3, 5, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn invalid_names_are_refused() {
        let (name, len) = peer("10.0.0.1", 0x0001_0000).name();
        assert!(Remote::from_name(&name[..len]).is_some());
        for bad in [
            peer("0.0.0.0", 0x0001_0000),
            peer("224.0.0.1", 0x0001_0000),
            peer("10.0.0.1", 7),
            peer("::", 0x0001_0000),
        ] {
            let (name, len) = bad.name();
            assert_eq!(Remote::from_name(&name[..len]), None, "{bad:?}");
        }
        assert_eq!(Remote::from_name(&[]), None);
        assert_eq!(Remote::from_name(&name[..7]), None);
        assert_eq!(Remote::from_name(&[0xff; 28]), None);
    }

    #[test]
    fn a_peer_that_is_inserted_twice_has_one_index_that_stands_for_it() {
        let (a, b) = (peer("10.0.0.1", 0x0001_0000), peer("10.0.0.1", 0x0001_0001));
        let mut vector = Vector::default();
        assert_eq!(vector.insert(a), Some(0));
        assert_eq!(vector.insert(b), Some(1));
        assert_eq!(vector.insert(a), Some(2));
        assert_eq!((vector.find(a), vector.canonical(2)), (0, Some(0)));
        assert!(vector.remove(0) && !vector.remove(0));
        assert_eq!((vector.find(a), vector.canonical(2)), (2, Some(2)));
        assert_eq!(vector.canonical(0), None);
        assert_eq!(vector.canonical(FI_ADDR_UNSPEC), Some(FI_ADDR_UNSPEC));
        assert_eq!(vector.insert(b), Some(0));
        assert!(vector.remove(2));
        assert_eq!(vector.find(a), FI_ADDR_NOTAVAIL);
        assert!(!vector.remove(FI_ADDR_NOTAVAIL));
    }
}
