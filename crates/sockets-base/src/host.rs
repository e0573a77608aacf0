//! The addresses of this machine, for rules that name `@same-host` or an interface.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Answers queries of rules about the machine. Rules that name only addresses make no query.
pub trait Host {
    /// Returns whether the address belongs to this machine.
    fn is_here(&self, addr: IpAddr) -> bool;
    /// Returns whether the address belongs to this interface or to a network that the interface is in.
    fn is_on(&self, interface: &str, addr: IpAddr) -> bool;
}

/// An address of an interface, with the prefix length of its network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The name of the interface.
    pub interface: String,
    /// The address.
    pub addr: IpAddr,
    /// The prefix length of the network in bits.
    pub bits: u8,
}

/// The addresses of this network namespace. They are read for each query, because they can change.
#[derive(Debug, Clone, Copy, Default)]
pub struct Machine;

impl Host for Machine {
    fn is_here(&self, addr: IpAddr) -> bool {
        addr.is_loopback() || addresses().iter().any(|a| a.addr == addr)
    }

    fn is_on(&self, interface: &str, addr: IpAddr) -> bool {
        addresses()
            .iter()
            .any(|a| a.interface == interface && in_prefix(a.addr, a.bits, addr))
    }
}

/// Returns whether `addr` is the address of another host in a network that this machine is in.
pub fn is_neighbour(addr: IpAddr) -> bool {
    let addr = addr.to_canonical();
    let all = addresses();
    !all.iter().any(|a| a.addr == addr)
        && all
            .iter()
            .any(|a| !a.addr.is_loopback() && in_prefix(a.addr, a.bits, addr))
}

/// Returns whether this machine has an address that other hosts can reach.
pub fn has_network() -> bool {
    addresses().iter().any(|a| !a.addr.is_loopback())
}

/// Returns whether `addr` begins with the first `bits` of `prefix`.
pub fn in_prefix(prefix: IpAddr, bits: u8, addr: IpAddr) -> bool {
    let bits = u32::from(bits);
    match (prefix, addr) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
            u32::from(a) & mask == u32::from(b) & mask
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
            u128::from(a) & mask == u128::from(b) & mask
        }
        _ => false,
    }
}

/// Converts an address of `getifaddrs(3)`. Returns `None` for null and for families other than IPv4 and IPv6.
///
/// # Safety
/// `addr` is null or points to an address of the length of its family.
unsafe fn ip(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: every socket address begins with the family.
    match i32::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the caller guarantees the length of the address. It may be unaligned.
            let a = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(a.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Returns all addresses of this network namespace, or none if the kernel cannot be queried.
pub fn addresses() -> Vec<Address> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the argument is the address of a pointer, which the call sets.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let mut at = list;
    // SAFETY: the list ends with null, and is freed below.
    while let Some(one) = unsafe { at.as_ref() } {
        at = one.ifa_next;
        // SAFETY: both addresses are part of the list.
        let (addr, mask) = unsafe { (ip(one.ifa_addr), ip(one.ifa_netmask)) };
        let (Some(addr), Some(mask)) = (addr, mask) else {
            continue;
        };
        let bits = match mask {
            IpAddr::V4(m) => u32::from(m).leading_ones(),
            IpAddr::V6(m) => u128::from(m).leading_ones(),
        };
        // SAFETY: the name of each entry is a C string.
        let name = unsafe { CStr::from_ptr(one.ifa_name) };
        all.push(Address {
            interface: name.to_string_lossy().into_owned(),
            addr,
            bits: bits as u8,
        });
    }
    // SAFETY: the list was created above and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_address_belongs_to_the_host_and_its_interface() {
        let one: IpAddr = [127, 0, 0, 1].into();
        assert!(Machine.is_here(one) && Machine.is_here([127, 9, 9, 9].into()));
        assert!(!Machine.is_here([192, 0, 2, 1].into()));
        // A namespace whose loopback interface is down has no address.
        for a in addresses().iter().filter(|a| a.addr == one) {
            assert_eq!(a.bits, 8);
            assert!(Machine.is_on(&a.interface, [127, 3, 2, 1].into()));
            assert!(!Machine.is_on(&a.interface, [128, 0, 0, 1].into()));
        }
    }

    #[test]
    fn a_prefix_matches_its_addresses() {
        let is_in =
            |p: &str, bits, a: &str| in_prefix(p.parse().unwrap(), bits, a.parse().unwrap());
        assert!(is_in("10.0.0.0", 8, "10.255.0.1") && !is_in("10.0.0.0", 8, "11.0.0.1"));
        assert!(is_in("0.0.0.0", 0, "1.2.3.4") && !is_in("::", 0, "1.2.3.4"));
        assert!(is_in("fd00::", 16, "fd00::7") && !is_in("fd00::", 128, "fd00::7"));
    }
}
