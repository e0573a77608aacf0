//! Sockets of the engine: their creation, options and addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::config::config;
use crate::fd::EngineFd;
use crate::net::congestion;
use crate::process::Changing;
use crate::sys::socket::set_option;

/// Receive buffer of a datagram socket, bytes; the kernel may grant less.
const DATAGRAM_RECEIVE_BUFFER: i32 = 16 << 20;
/// Send buffer of a datagram socket, bytes; the kernel may grant less.
const DATAGRAM_SEND_BUFFER: i32 = 4 << 20;

/// A non-blocking socket for addresses of the family of `ip`.
pub(crate) fn open(ip: IpAddr, kind: SocketType) -> io::Result<EngineFd> {
    let family = if ip.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let changing = Changing::new();
    let fd = EngineFd::new(rustix::net::socket_with(family, kind, flags, None)?);
    drop(changing);
    if kind == SocketType::STREAM {
        congestion::choose(fd.get());
    }
    Ok(fd)
}

/// A socket bound to `port` on every address of this host, and whether it is IPv6.
///
/// The GIDs are addresses of both families, so the IPv6 socket accepts IPv4 too. A host without IPv6 gets an IPv4
/// socket.
pub(crate) fn open_on_every_address(kind: SocketType, port: u16) -> io::Result<(EngineFd, bool)> {
    if let Ok(fd) = open(Ipv6Addr::UNSPECIFIED.into(), kind) {
        set_option(fd.get(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0);
        let any: SocketAddr = (Ipv6Addr::UNSPECIFIED, port).into();
        match rustix::net::bind(fd.get(), &any) {
            Ok(()) => return Ok((fd, true)),
            Err(e @ rustix::io::Errno::ADDRINUSE) => return Err(e.into()),
            Err(_) => {}
        }
    }
    let fd = open(Ipv4Addr::UNSPECIFIED.into(), kind)?;
    rustix::net::bind(fd.get(), &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    Ok((fd, false))
}

/// Sets the options of a TCP connection that carries MPA.
pub(crate) fn tune_stream(fd: &EngineFd) {
    set_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    // RFC 5042 §6.4: keepalives detect that a peer has failed even if nothing is sent to it, so that its connection
    // does not use resources forever.
    set_option(fd.get(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 30);
    set_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10);
    set_option(fd.get(), libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4);
}

/// Requests the local address that each datagram was sent to. For an IPv6 socket, this includes datagrams of IPv4.
pub(crate) fn report_destinations(fd: &EngineFd, ipv6: bool) {
    let (level, name) = if ipv6 {
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
    } else {
        (libc::IPPROTO_IP, libc::IP_PKTINFO)
    };
    set_option(fd.get(), level, name, 1);
}

/// Sets the options of a UDP socket that carries datagram queue pairs.
pub(crate) fn tune_datagram(fd: &EngineFd, ipv6: bool) {
    report_destinations(fd, ipv6);
    let fd = fd.get();
    let set = |level, name, value| set_option(fd, level, name, value);
    // The first option of each pair may exceed the host's limit, and needs CAP_NET_ADMIN.
    for (force, plain, bytes) in [
        (
            libc::SO_RCVBUFFORCE,
            libc::SO_RCVBUF,
            DATAGRAM_RECEIVE_BUFFER,
        ),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, DATAGRAM_SEND_BUFFER),
    ] {
        if !set(libc::SOL_SOCKET, force, bytes) {
            set(libc::SOL_SOCKET, plain, bytes);
        }
    }
    set(libc::SOL_UDP, libc::UDP_GRO, i32::from(config().gro));
    // The address in an address handle may be a broadcast address, to which the kernel sends only with this option.
    set(libc::SOL_SOCKET, libc::SO_BROADCAST, 1);
    // The Global Route Header of a received message is made from these values. IPv4 packets may arrive on an IPv6
    // socket too.
    set(libc::IPPROTO_IP, libc::IP_RECVTTL, 1);
    set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1);
    if ipv6 {
        set(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1);
        set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1);
    }
    // Path MTU discovery is off: a datagram that is longer than the MTU of the path is fragmented, and not refused with EMSGSIZE.
    set(
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_DONT,
    );
    if ipv6 {
        set(
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_DONT,
        );
    }
}

/// The local address of a socket.
pub(crate) fn local_addr(fd: &EngineFd) -> Option<SocketAddr> {
    let any = rustix::net::getsockname(fd.get()).ok()?;
    SocketAddr::try_from(any).ok().map(unmapped)
}

/// The address of the peer that a socket is connected to.
pub(crate) fn peer_addr(fd: &EngineFd) -> Option<SocketAddr> {
    let any = rustix::net::getpeername(fd.get()).ok()??;
    SocketAddr::try_from(any).ok().map(unmapped)
}

/// `address`, as IPv4 if it is an IPv4 address mapped into IPv6.
pub(crate) fn unmapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => (v4, v6.port()).into(),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}
