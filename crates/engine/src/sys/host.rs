//! Network interfaces of this host and their addresses.

use std::net::IpAddr;

use super::address::from_sockaddr;

/// An address of an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddress {
    /// Interface name.
    pub interface: String,
    /// Interface index.
    pub index: u32,
    /// The address.
    pub ip: IpAddr,
    /// Whether the interface is up.
    pub up: bool,
    /// Whether it is a loopback interface.
    pub loopback: bool,
}

/// All addresses of this host. `None` if the kernel cannot be queried, for example because no descriptor is free.
pub fn host_addresses() -> Option<Vec<HostAddress>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: getifaddrs writes the head of a list that it allocates.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut complete = true;
    let mut at = list;
    while !at.is_null() {
        // SAFETY: not null, and an element of the list that getifaddrs made.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: ifa_addr is not null and points to a sockaddr.
        let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
        // SAFETY: all-zero is a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let size = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: an address of this family has `size` bytes, and the storage has room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                entry.ifa_addr.cast::<u8>(),
                (&raw mut storage).cast::<u8>(),
                size,
            );
        }
        let Some(ip) = from_sockaddr(&storage).map(|a| a.ip()) else {
            continue;
        };
        // SAFETY: ifa_name is not null and a C string of the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        // SAFETY: a valid C string.
        let index = unsafe { libc::if_nametoindex(entry.ifa_name) };
        // `if_nametoindex` opens a descriptor, which may fail; the interface may also be gone.
        complete &= index != 0;
        found.push(HostAddress {
            interface: name.to_string_lossy().into_owned(),
            index,
            ip,
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
        });
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    complete.then_some(found)
}

/// An interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLink {
    /// Its index.
    pub index: u32,
    /// Whether it is up.
    pub up: bool,
    /// Its hardware address.
    pub hardware: Vec<u8>,
}

/// All interfaces of this host; `None` if the kernel cannot be queried.
pub fn host_links() -> Option<Vec<HostLink>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: getifaddrs writes the head of a list that it allocates.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut at = list;
    while !at.is_null() {
        // SAFETY: not null, and an element of the list that getifaddrs made.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null, and every address begins with its family.
        if i32::from(unsafe { (*entry.ifa_addr).sa_family }) != libc::AF_PACKET {
            continue;
        }
        // SAFETY: an address of this family is a sockaddr_ll.
        let link = unsafe { entry.ifa_addr.cast::<libc::sockaddr_ll>().read_unaligned() };
        let len = usize::from(link.sll_halen).min(link.sll_addr.len());
        found.push(HostLink {
            index: u32::try_from(link.sll_ifindex).unwrap_or(0),
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            hardware: link.sll_addr.get(..len).unwrap_or(&[]).to_vec(),
        });
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Some(found)
}
