//! Socket addresses of C.

use std::ffi::{c_int, c_void};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use anywarp_core::qos::level_of_class;
use anywarp_engine::address::gid_of;
use anywarp_engine::gids;
use libc::{sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};

use crate::ffi::Errno;
use crate::verbs::convert::c_gid;
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// Converts a socket address of C. Returns `None` for null and for a family other than IPv4 and IPv6.
///
/// # Safety
/// `addr` is null or points to an address of its family.
pub(crate) unsafe fn address_of(addr: *const sockaddr) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, so it points to an address of the size of its family, at any alignment.
    unsafe {
        match c_int::from((&raw const (*addr).sa_family).read_unaligned()) {
            libc::AF_INET => {
                let a = addr.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
                Some((ip, u16::from_be(a.sin_port)).into())
            }
            libc::AF_INET6 => {
                let a = addr.cast::<sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
                let port = u16::from_be(a.sin6_port);
                Some(SocketAddrV6::new(ip, port, 0, a.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// Like [`address_of`], for a call that requires an address: returns `EINVAL` without one.
///
/// # Safety
/// As for [`address_of`].
pub(super) unsafe fn needed_address(addr: *const sockaddr) -> Result<SocketAddr, Errno> {
    // SAFETY: upheld by the caller.
    unsafe { address_of(addr) }.ok_or(libc::EINVAL)
}

/// Like [`address_of`], for a call that also passes the length: returns `EINVAL` if the address is null or longer than `len`, and
/// `EAFNOSUPPORT` for another family.
///
/// # Safety
/// `addr` is null or points to `len` octets.
pub(crate) unsafe fn sized_address(
    addr: *const sockaddr,
    len: socklen_t,
) -> Result<SocketAddr, Errno> {
    let len = len as usize;
    if addr.is_null() || len < size_of::<sa_family_t>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: `len` covers the family (checked above); the address may have any alignment.
    let needed = match c_int::from(unsafe { (&raw const (*addr).sa_family).read_unaligned() }) {
        libc::AF_INET => size_of::<sockaddr_in>(),
        libc::AF_INET6 => size_of::<sockaddr_in6>(),
        _ => return Err(libc::EAFNOSUPPORT),
    };
    if len < needed {
        return Err(libc::EINVAL);
    }
    // SAFETY: `len` covers an address of this family (checked above).
    unsafe { needed_address(addr) }
}

/// Converts a socket address to the format of C.
pub(crate) fn c_address(address: SocketAddr) -> rdma_sockaddr {
    // SAFETY: all-zero is a valid address of no family.
    let mut out: rdma_sockaddr = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(a) => {
            out.sin = sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: a.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*a.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
        }
        SocketAddr::V6(a) => {
            out.sin6 = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: a.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: a.ip().octets(),
                },
                sin6_scope_id: a.scope_id(),
            };
        }
    }
    out
}

/// Returns the port of an address in network byte order, or 0 without an address.
pub(super) fn c_port(address: Option<SocketAddr>) -> be16 {
    address.map_or(0, |a| a.port().to_be())
}

/// Returns an address vector to `remote`.
pub(super) fn vector_to(remote: SocketAddr, local: Option<SocketAddr>) -> ibv_ah_attr {
    let own = local.and_then(|l| gids::index_of(l.ip())).unwrap_or(0);
    let mut attr = ibv_ah_attr {
        is_global: 1,
        port_num: 1,
        ..ibv_ah_attr::default()
    };
    attr.grh.dgid = c_gid(gid_of(remote.ip()));
    attr.grh.sgid_index = own;
    attr.grh.hop_limit = 64;
    attr
}

/// Returns the path record of a connection between the GIDs of `addr`, with the type of service and the time-out of
/// acknowledgements that the program set. It has the values that the kernel's rdma_cm computes for RoCE.
pub(super) fn path_between(
    addr: &rdma_ib_addr,
    tos: u8,
    ack_timeout: Option<u8>,
) -> ibv_sa_path_rec {
    /// "Exactly", as a selector of a path record.
    const EXACTLY: u8 = 2;
    /// The packet lifetime that rdma_cm assumes for Ethernet: 4.096 µs × 2^16, about a quarter of a second.
    const PACKET_LIFE_TIME: u8 = 16;
    // An acknowledgement takes the lifetime of two packets.
    let packet_life_time = match ack_timeout {
        None | Some(0) => PACKET_LIFE_TIME,
        Some(timeout) => timeout - 1,
    };
    ibv_sa_path_rec {
        dgid: addr.dgid,
        sgid: addr.sgid,
        hop_limit: 64,
        traffic_class: tos,
        reversible: 1,
        numb_path: 1,
        pkey: addr.pkey,
        sl: level_of_class(tos),
        mtu_selector: EXACTLY,
        mtu: IBV_MTU_4096 as u8,
        rate_selector: EXACTLY,
        rate: IBV_RATE_100_GBPS as u8,
        packet_life_time_selector: EXACTLY,
        packet_life_time,
        ..ibv_sa_path_rec::default()
    }
}

/// Copies private data.
///
/// # Safety
/// `data` is null or has `len` readable bytes.
pub(super) unsafe fn bytes_of(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() || len == 0 {
        return Vec::new();
    }
    // SAFETY: guaranteed by the caller; the slice is live for this statement.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}
