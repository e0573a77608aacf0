//! Lookups in the host's routing table: source address, path MTU, broadcast.
//!
//! The results come from connecting a UDP socket, which sends nothing.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anywarp_core::datagram::MULTICAST_QPN;
use rustix::net::SocketType;

use super::socket;
use crate::clock;
use crate::locks::{Mutex, Rank};
use crate::process::PerProcess;
use crate::sys::socket::get_option;

/// The UDP port of every multicast group: the port in the queue pair number that all members have.
pub const GROUP_PORT: u16 = (MULTICAST_QPN >> 8) as u16;
/// The port of lookups for which the caller has none (`discard`). Nothing is sent there.
const LOOKUP_PORT: u16 = 9;
/// How long a path MTU is stored. A change of the route is noticed after this time.
const PATH_MTU_LIFETIME: Duration = Duration::from_secs(10);
/// Largest number of paths whose MTU is stored. On a host with more peers the MTU is looked up more often.
const PATHS_MAX: usize = 4096;
/// Bytes of IP and UDP headers in front of a payload.
const IPV4_HEADERS: i32 = 28;
const IPV6_HEADERS: i32 = 48;

/// The source address of packets from this host to `to`, with port 0. A link-local address has its interface.
pub(crate) fn source_for(mut to: SocketAddr) -> io::Result<SocketAddr> {
    let fd = socket::open(to.ip(), SocketType::DGRAM)?;
    if to.port() == 0 {
        to.set_port(LOOKUP_PORT);
    }
    rustix::net::connect(fd.get(), &to)?;
    let local = socket::local_addr(&fd);
    let mut local = local.ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    local.set_port(0);
    Ok(local)
}

/// Whether `ip` is the broadcast address of a network of this host. The kernel refuses to connect a socket without
/// `SO_BROADCAST` to such an address.
pub(crate) fn is_broadcast(ip: IpAddr) -> bool {
    if !ip.is_ipv4() {
        return false;
    }
    let Ok(fd) = socket::open(ip, SocketType::DGRAM) else {
        return false;
    };
    let to = SocketAddr::from((ip, GROUP_PORT));
    rustix::net::connect(fd.get(), &to) == Err(rustix::io::Errno::ACCESS)
}

/// The UDP payload, in bytes, that the path to `ip` carries without fragmentation, as far as this host knows.
pub(crate) fn path_mtu(ip: IpAddr) -> u16 {
    type Paths = Mutex<HashMap<IpAddr, (u16, Instant)>>;
    static PATHS: PerProcess<Paths> =
        PerProcess::new(|| Mutex::new(Rank::PathMtus, HashMap::new()));
    let now = clock::now();
    let mut paths = PATHS.get().lock();
    if let Some((mtu, since)) = paths.get(&ip)
        && now.saturating_duration_since(*since) < PATH_MTU_LIFETIME
    {
        return *mtu;
    }
    if paths.len() >= PATHS_MAX {
        paths.clear();
    }
    let mtu = lookup_path_mtu(ip).unwrap_or(1500);
    let headers = if ip.to_canonical().is_ipv4() {
        IPV4_HEADERS
    } else {
        IPV6_HEADERS
    };
    let mtu = u16::try_from(mtu.clamp(576, 65_535) - headers).unwrap_or(u16::MAX);
    paths.insert(ip, (mtu, now));
    mtu
}

fn lookup_path_mtu(ip: IpAddr) -> Option<i32> {
    let ip = ip.to_canonical();
    let (level, name) = match ip {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let fd = socket::open(ip, SocketType::DGRAM).ok()?;
    rustix::net::connect(fd.get(), &SocketAddr::new(ip, LOOKUP_PORT)).ok()?;
    get_option(fd.get(), level, name)
}

/// Address and interface index that multicast of one address family uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MulticastHome {
    /// An address of the interface.
    pub(crate) ip: IpAddr,
    /// The interface's index.
    pub(crate) interface: u32,
}

impl MulticastHome {
    /// The loopback interface, for a host without an address of the family.
    pub(crate) const LOOPBACK: Self = Self {
        ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
        interface: 1,
    };
}
