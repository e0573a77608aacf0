//! Conversions between `SocketAddr` and the C structures for socket addresses.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// A socket address in the form that the kernel expects. For an IPv6 socket, an IPv4 address is mapped to IPv6.
pub(super) fn to_sockaddr(
    addr: SocketAddr,
    ipv6: bool,
) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut out: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at: *mut libc::sockaddr_storage = &raw mut out;
    let (v6, scope) = match (addr, ipv6) {
        (SocketAddr::V4(v4), false) => {
            // SAFETY: all-zero is a valid address.
            let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            name.sin_family = libc::AF_INET as _;
            name.sin_port = v4.port().to_be();
            name.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: a sockaddr_storage is large and aligned enough for every address.
            unsafe { at.cast::<libc::sockaddr_in>().write(name) };
            return (out, size_of::<libc::sockaddr_in>() as libc::socklen_t);
        }
        (SocketAddr::V4(v4), true) => (v4.ip().to_ipv6_mapped(), 0),
        (SocketAddr::V6(v6), _) => (*v6.ip(), v6.scope_id()),
    };
    // SAFETY: all-zero is a valid address.
    let mut name: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    name.sin6_family = libc::AF_INET6 as _;
    name.sin6_port = addr.port().to_be();
    name.sin6_addr.s6_addr = v6.octets();
    name.sin6_scope_id = scope;
    // SAFETY: as above.
    unsafe { at.cast::<libc::sockaddr_in6>().write(name) };
    (out, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
}

/// The socket address in a `sockaddr_storage`, for IPv4 and IPv6.
pub(super) fn from_sockaddr(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at: *const libc::sockaddr_storage = name;
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage is large and aligned enough for every address, and the family says which.
            let a = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some((ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddr::V6(SocketAddrV6::new(
                ip,
                u16::from_be(a.sin6_port),
                0,
                a.sin6_scope_id,
            )))
        }
        _ => None,
    }
}
