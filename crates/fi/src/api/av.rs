//! Address vectors.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use libc::{c_char, c_int, c_void};

use super::object::{AvObject, DomainObject, NONE, Table, ended_int, give, head, known, ops, take};
use crate::abi::*;
use crate::address::{LEN_V4, LEN_V6, Remote, Vector, port_of_service};
use crate::limits;

static OPS: Table<fi_ops> = ops(close as *const (), bind as *const (), NONE);
static AV_OPS: Table<fi_ops_av> = Table(fi_ops_av {
    size: size_of::<fi_ops_av>(),
    insert: insert as *const (),
    insertsvc: insertsvc as *const (),
    insertsym: insertsym as *const (),
    remove: remove as *const (),
    lookup: lookup as *const (),
    straddr: straddr as *const (),
    av_set: NONE,
});

pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    av: *mut *mut fid_av,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: upheld by the caller.
        let (domain, attr) = unsafe {
            let attr = attr.as_mut().ok_or(FI_EINVAL)?;
            (&known::<DomainObject, _>(domain)?.domain, attr)
        };
        // FI_SYMMETRIC only describes the addresses.
        if attr.flags & !FI_SYMMETRIC != 0 || !attr.name.is_null() {
            // Neither events of insertions nor vectors that several processes share are supported.
            return Err(FI_ENOSYS);
        }
        if attr.r#type == FI_AV_UNSPEC {
            attr.r#type = FI_AV_TABLE;
        }
        let mut state = domain.lock();
        let name = state.shared.vectors.insert(Vector::default());
        let object = AvObject {
            fid: fid_av {
                fid: head(FI_CLASS_AV, context, &OPS),
                ops: &raw const AV_OPS.0,
            },
            domain: Arc::clone(domain),
            name: name.map_err(|_full| FI_ENOMEM)?,
            rest: (),
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(object, av) }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<AvObject, _>(at) }?;
        let mut state = object.domain.lock();
        let used = state
            .endpoints
            .iter()
            .any(|(_, ep)| ep.binding.vector == Some(object.name));
        if used {
            return Err(FI_EBUSY);
        }
        state.shared.vectors.remove(object.name);
        drop(state);
        // SAFETY: the program does not use the object any more.
        unsafe { take::<AvObject, _>(at) }?;
        Ok(0)
    })
}

unsafe extern "C" fn bind(_at: *mut fid, _other: *mut fid, _flags: u64) -> c_int {
    -FI_ENOSYS
}

fn add(object: &AvObject, peers: &[Option<Remote>], mut each: impl FnMut(usize, FiAddr)) -> isize {
    let mut guard = object.domain.lock();
    let state = &mut *guard;
    let mut added = 0;
    for (i, peer) in peers.iter().enumerate() {
        let vector = state.shared.vectors.get_mut(object.name);
        let at = peer.and_then(|peer| vector?.insert(peer));
        added += isize::from(at.is_some());
        each(i, at.unwrap_or(FI_ADDR_NOTAVAIL));
    }
    for endpoint in state.endpoints.values_mut() {
        if endpoint.binding.vector == Some(object.name) {
            endpoint.renew_sources(&state.shared);
        }
    }
    added
}

/// Returns where the program wants the error of each insertion, if it does.
fn errors_of(flags: u64, context: *mut c_void) -> Result<Option<*mut c_int>, c_int> {
    let wants_errors = flags & FI_SYNC_ERR != 0;
    if flags & !(FI_SYNC_ERR | FI_MORE) != 0 || (wants_errors && context.is_null()) {
        return Err(FI_EBADFLAGS);
    }
    Ok(wants_errors.then_some(context.cast()))
}

/// Adds peers, and reports the index and the error of each.
///
/// # Safety
/// `fi_addr` and `errors` are null or have an element for each peer.
unsafe fn add_and_report(
    object: &AvObject,
    peers: &[Option<Remote>],
    fi_addr: *mut FiAddr,
    errors: Option<*mut c_int>,
) -> isize {
    add(object, peers, |i, at| {
        // SAFETY: upheld by the caller.
        unsafe {
            if !fi_addr.is_null() {
                *fi_addr.add(i) = at;
            }
            if let Some(errors) = errors {
                let bad = at == FI_ADDR_NOTAVAIL;
                *errors.add(i) = if bad { FI_EINVAL } else { 0 };
            }
        }
    })
}

unsafe extern "C" fn insert(
    av: *mut fid_av,
    addr: *const c_void,
    count: usize,
    fi_addr: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<AvObject, _>(av) }?;
        let errors = errors_of(flags, context)?;
        if addr.is_null() && count > 0 {
            return Err(FI_EINVAL);
        }
        let mut at = addr.cast::<u8>();
        let mut peers = Vec::new();
        for _ in 0..count {
            // SAFETY: a name begins with its family, which determines its length (guaranteed by the caller). Names of unknown
            // families are assumed to have at least the length of an IPv4 name.
            let name = unsafe {
                let family = std::ptr::read_unaligned(at.cast::<u16>());
                let len = if i32::from(family) == libc::AF_INET6 {
                    LEN_V6
                } else {
                    LEN_V4
                };
                let name = std::slice::from_raw_parts(at, len);
                at = at.add(len);
                name
            };
            peers.push(Remote::from_name(name));
        }
        // SAFETY: the lists are null or have `count` elements (guaranteed by the caller).
        Ok(unsafe { add_and_report(object, &peers, fi_addr, errors) })
    })
}

/// Returns the host and the port that a program has named.
///
/// # Safety
/// The texts are null or C strings.
unsafe fn host_and_port<'a>(
    node: *const c_char,
    service: *const c_char,
) -> Result<(&'a str, u16), c_int> {
    if node.is_null() || service.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: upheld by the caller.
    let (node, service) = unsafe { (CStr::from_ptr(node), CStr::from_ptr(service)) };
    let service = service.to_str().map_err(|_| FI_EINVAL)?;
    let port = port_of_service(service).ok_or(FI_EINVAL)?;
    Ok((node.to_str().map_err(|_| FI_EINVAL)?, port))
}

/// Returns the address of a host.
fn address_of(node: &str) -> Option<IpAddr> {
    let mut found = (node, 0).to_socket_addrs().ok()?;
    found.next().map(|addr| addr.ip().to_canonical())
}

unsafe extern "C" fn insertsvc(
    av: *mut fid_av,
    node: *const c_char,
    service: *const c_char,
    fi_addr: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { insertsym(av, node, 1, service, 1, fi_addr, flags, context) }
}

/// Returns the address of the host with the number `i` in a range that begins with `first`: an address, or a name that ends with a
/// number.
fn host_of_range(first: &str, i: usize) -> Option<IpAddr> {
    if i == 0 {
        return address_of(first);
    }
    // The scope of an address, such as %eth0, is the same for the whole range. A name contains no %.
    match first.split('%').next().unwrap_or(first).parse() {
        Ok(IpAddr::V4(ip)) => {
            let at = u32::from(ip).checked_add(u32::try_from(i).ok()?)?;
            Some(Ipv4Addr::from(at).into())
        }
        Ok(IpAddr::V6(ip)) => Some(Ipv6Addr::from(u128::from(ip).checked_add(i as u128)?).into()),
        Err(_name) => address_of(&name_of_range(first, i)?),
    }
}

/// Returns the name with the number `i` in a range that begins with `first`: `a1` follows `a0`, and `a10` follows `a09`.
fn name_of_range(first: &str, i: usize) -> Option<String> {
    let letters = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = first.strip_prefix(letters)?;
    let number: usize = digits.parse().ok()?;
    let number = number.checked_add(i)?;
    Some(format!("{letters}{number:0width$}", width = digits.len()))
}

unsafe extern "C" fn insertsym(
    av: *mut fid_av,
    node: *const c_char,
    nodes: usize,
    service: *const c_char,
    services: usize,
    fi_addr: *mut FiAddr,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        let errors = errors_of(flags, context)?;
        // SAFETY: the object was opened by this library; the texts are null or C strings (guaranteed by the caller).
        let (object, (node, port)) =
            unsafe { (known::<AvObject, _>(av)?, host_and_port(node, service)?) };
        if nodes.saturating_mul(services.max(1)) > limits::PEERS {
            return Err(FI_EINVAL);
        }
        let mut peers = Vec::with_capacity(nodes * services);
        for host in 0..nodes {
            let ip = host_of_range(node, host);
            peers.extend((0..services).map(|i| {
                let port = usize::from(port) + i;
                Remote::at(ip?, u16::try_from(port).ok()?, 0)
            }));
        }
        // SAFETY: the lists are null or have an element for each address (guaranteed by the caller).
        Ok(unsafe { add_and_report(object, &peers, fi_addr, errors) })
    })
}

unsafe extern "C" fn remove(
    av: *mut fid_av,
    fi_addr: *mut FiAddr,
    count: usize,
    _flags: u64,
) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<AvObject, _>(av) }?;
        if fi_addr.is_null() {
            return Err(FI_EINVAL);
        }
        let mut guard = object.domain.lock();
        let state = &mut *guard;
        let vector = state.shared.vectors.get_mut(object.name).ok_or(FI_EINVAL)?;
        let mut result = Ok(0);
        let mut moved = Vec::new();
        for i in 0..count {
            // SAFETY: the list has `count` elements (guaranteed by the caller).
            let at = unsafe { *fi_addr.add(i) };
            let peer = vector.get(at);
            if !vector.remove(at) {
                result = Err(FI_EINVAL);
            }
            let other = peer.map_or(FI_ADDR_NOTAVAIL, |peer| vector.find(peer));
            if other != FI_ADDR_NOTAVAIL {
                moved.push((at, other));
            }
        }
        for endpoint in state.endpoints.values_mut() {
            if endpoint.binding.vector == Some(object.name) {
                endpoint.move_sources(&moved);
                endpoint.renew_sources(&state.shared);
            }
        }
        result
    })
}

unsafe extern "C" fn lookup(
    av: *mut fid_av,
    fi_addr: FiAddr,
    addr: *mut c_void,
    addrlen: *mut usize,
) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<AvObject, _>(av) }?;
        let state = object.domain.lock();
        let vector = state.shared.vectors.get(object.name).ok_or(FI_EINVAL)?;
        let peer = vector.get(fi_addr).ok_or(FI_EINVAL)?;
        // SAFETY: `addr` has `addrlen` bytes (guaranteed by the caller).
        unsafe { copy_name(peer, addr, addrlen) }.map(|_whole| 0)
    })
}

/// Copies as much of a name as fits, and sets `len` to its full length. Returns whether all of it was copied.
///
/// # Safety
/// `len` is null or valid, and `to` has that many bytes or is null.
pub(crate) unsafe fn copy_name(
    peer: Remote,
    to: *mut c_void,
    len: *mut usize,
) -> Result<bool, c_int> {
    let (name, needed) = peer.name();
    // SAFETY: upheld by the caller.
    unsafe {
        let len = len.as_mut().ok_or(FI_EINVAL)?;
        let room = if to.is_null() { 0 } else { *len };
        std::ptr::copy_nonoverlapping(name.as_ptr(), to.cast(), needed.min(room));
        *len = needed;
        Ok(room >= needed)
    }
}

unsafe extern "C" fn straddr(
    _av: *mut fid_av,
    addr: *const c_void,
    buf: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    // SAFETY: the bytes are a name, which begins with its family, and the buffer has `len` bytes (guaranteed by the caller).
    unsafe {
        let (Some(len), false, false) = (len.as_mut(), addr.is_null(), buf.is_null()) else {
            return buf;
        };
        let family = std::ptr::read_unaligned(addr.cast::<u16>());
        let bytes = if i32::from(family) == libc::AF_INET6 {
            LEN_V6
        } else {
            LEN_V4
        };
        let name = std::slice::from_raw_parts(addr.cast::<u8>(), bytes);
        let text = match crate::address::parts_of(name) {
            Some((ip, port, index)) => {
                format!("fi_anywarp://{}/{index}\0", SocketAddr::new(ip, port))
            }
            None => "fi_anywarp://?\0".to_owned(),
        };
        let fits = text.len().min(*len);
        std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), fits);
        if fits > 0 {
            *buf.add(fits - 1) = 0;
        }
        *len = text.len();
    }
    buf
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_hosts_counts_addresses_and_the_numbers_of_names() {
        let ip = |text: &str| Some(text.parse().unwrap());
        assert_eq!(host_of_range("10.1.1.254", 0), ip("10.1.1.254"));
        assert_eq!(host_of_range("10.1.1.254", 3), ip("10.1.2.1"));
        assert_eq!(host_of_range("2001:db8::ffff", 1), ip("2001:db8::1:0"));
        assert_eq!(host_of_range("fe80::1%eth0", 1), ip("fe80::2"));
        assert_eq!(host_of_range("255.255.255.255", 1), None);
        assert_eq!(name_of_range("host10", 2).as_deref(), Some("host12"));
        assert_eq!(name_of_range("node09", 1).as_deref(), Some("node10"));
        assert_eq!(name_of_range("host", 1), None);
        assert_eq!(name_of_range("host18446744073709551615", 1), None);
    }
}
