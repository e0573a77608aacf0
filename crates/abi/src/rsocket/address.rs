//! Conversion of socket addresses from and to the C structures.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, socklen_t};

/// Converts an address. `EINVAL` if it is too short for its family, or is an IPv4 address for an IPv6 socket, as in the
/// kernel; `EAFNOSUPPORT` if it is an IPv6 address for an IPv4 socket, or of another family.
///
/// # Safety
/// `addr` is null or points to `len` bytes.
pub(super) unsafe fn read(
    addr: *const sockaddr,
    len: socklen_t,
    domain: c_int,
) -> Result<SocketAddr, c_int> {
    let len = len as usize;
    if addr.is_null() || len < size_of::<libc::sa_family_t>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: `len` covers the family (checked above).
    let family = c_int::from(unsafe { (&raw const (*addr).sa_family).read_unaligned() });
    match family {
        libc::AF_INET if len >= size_of::<sockaddr_in>() => {
            if domain != libc::AF_INET {
                return Err(libc::EINVAL);
            }
            // SAFETY: the family and the length are those of an IPv4 address.
            let a = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Ok((ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
            if domain != libc::AF_INET6 {
                return Err(libc::EAFNOSUPPORT);
            }
            // SAFETY: the family and the length are those of an IPv6 address.
            let a = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            let port = u16::from_be(a.sin6_port);
            Ok(SocketAddrV6::new(ip, port, 0, a.sin6_scope_id).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Returns the address of an unbound socket: all zero.
pub(super) fn unspecified(domain: c_int) -> SocketAddr {
    if domain == libc::AF_INET6 {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    }
}

/// Writes an address in the family of `domain`, truncated to the caller's buffer. Sets `len` to the full length.
///
/// # Safety
/// `addr` is null or points to `*len` bytes; `len` is null or valid.
pub(super) unsafe fn write(
    addr: *mut sockaddr,
    len: *mut socklen_t,
    domain: c_int,
    address: SocketAddr,
) {
    if len.is_null() {
        return;
    }
    // SAFETY: the caller passes a valid pointer.
    let room = unsafe { len.read() } as usize;
    let ip = match address.ip() {
        IpAddr::V4(v4) if domain == libc::AF_INET6 => IpAddr::V6(v4.to_ipv6_mapped()),
        ip => ip,
    };
    let whole = match ip {
        IpAddr::V4(ip) => {
            // SAFETY: all-zero is a valid sockaddr_in.
            let mut sin: sockaddr_in = unsafe { std::mem::zeroed() };
            sin.sin_family = libc::AF_INET as libc::sa_family_t;
            sin.sin_port = address.port().to_be();
            sin.sin_addr.s_addr = u32::from(ip).to_be();
            // SAFETY: `addr` has `room` bytes, and `sin` is a local.
            unsafe { copy(addr, room, &sin) }
        }
        IpAddr::V6(ip) => {
            // SAFETY: all-zero is a valid sockaddr_in6.
            let mut sin6: sockaddr_in6 = unsafe { std::mem::zeroed() };
            sin6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            sin6.sin6_port = address.port().to_be();
            sin6.sin6_addr.s6_addr = ip.octets();
            if let SocketAddr::V6(a) = address {
                sin6.sin6_scope_id = a.scope_id();
            }
            // SAFETY: as above.
            unsafe { copy(addr, room, &sin6) }
        }
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { len.write(whole) };
}

/// Copies the part of `from` that fits. Returns the full length of `from`.
///
/// # Safety
/// `to` is null or points to `room` bytes.
unsafe fn copy<T>(to: *mut sockaddr, room: usize, from: &T) -> socklen_t {
    let len = size_of::<T>();
    if !to.is_null() {
        let from: *const T = from;
        // SAFETY: the length is at most that of both sides.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len.min(room)) };
    }
    len as socklen_t
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(address: &str, domain: c_int, expect: &str) {
        let address: SocketAddr = address.parse().unwrap();
        // SAFETY: all-zero is a valid address of no family.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
        let at: *mut libc::sockaddr_storage = &raw mut storage;
        // SAFETY: both point to locals, and the length is that of the storage.
        unsafe { write(at.cast(), &raw mut len, domain, address) };
        // SAFETY: as above.
        let back = unsafe { read(at.cast(), len, domain) }.unwrap();
        assert_eq!(back, expect.parse().unwrap());
        for short in [len - 1, 1] {
            // SAFETY: as above.
            let cut = unsafe { read(at.cast(), short, domain) };
            assert_eq!(cut, Err(libc::EINVAL));
        }
    }

    #[test]
    fn addresses_survive_the_conversion_to_c() {
        there_and_back("10.1.2.3:77", libc::AF_INET, "10.1.2.3:77");
        there_and_back("[fd00::1]:77", libc::AF_INET6, "[fd00::1]:77");
        there_and_back("10.1.2.3:77", libc::AF_INET6, "[::ffff:10.1.2.3]:77");
    }

    #[test]
    fn a_short_buffer_truncates_and_returns_the_full_length() {
        let mut len: socklen_t = 0;
        // SAFETY: null is passed for the address.
        unsafe {
            write(
                std::ptr::null_mut(),
                &raw mut len,
                libc::AF_INET6,
                unspecified(libc::AF_INET6),
            );
        }
        assert_eq!(len as usize, size_of::<sockaddr_in6>());
        let mut two = [0_u8; 2];
        let mut len: socklen_t = 2;
        // SAFETY: the address has two bytes, which `len` says.
        unsafe {
            write(
                two.as_mut_ptr().cast(),
                &raw mut len,
                libc::AF_INET,
                unspecified(libc::AF_INET),
            );
        }
        assert_eq!(two, (libc::AF_INET as u16).to_ne_bytes());
        assert_eq!(len as usize, size_of::<sockaddr_in>());
    }
}
