//! Which listeners of this network namespace understand a Request.
//!
//! A listener holds the abstract name `anywarp/tcp/ADDR/PORT`, as a UNIX socket that listens: connecting to it succeeds
//! as long as a process has it. Its owner must be the user of this process or root: another user's name is not believed.

use crate::real;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_int, sockaddr_un, socklen_t};
use sockets_base::name;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

/// The names that this process holds, by the number of the listener.
static HELD: Mutex<Option<HashMap<c_int, c_int>>> = Mutex::new(None);

fn address(name: &str) -> (sockaddr_un, socklen_t) {
    // SAFETY: zeros are a valid address.
    let mut un: sockaddr_un = unsafe { std::mem::zeroed() };
    un.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte is zero: the name is no file's.
    for (place, byte) in un.sun_path.iter_mut().skip(1).zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let len = std::mem::offset_of!(sockaddr_un, sun_path) + 1 + name.len();
    (un, len as socklen_t)
}

fn unix() -> Option<c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer.
    let fd = unsafe { real::socket(libc::AF_UNIX, kind, 0) };
    (fd >= 0).then_some(fd)
}

/// Enters a listener; returns the descriptor that holds its name.
pub fn enter(listener: c_int, addr: SocketAddr) -> Option<c_int> {
    let fd = unix()?;
    let (un, len) = address(&name::of(addr.ip(), addr.port()));
    // SAFETY: address and length belong together.
    let ok =
        unsafe { real::bind(fd, (&raw const un).cast(), len) == 0 && real::listen(fd, 4096) == 0 };
    // Another listener of this address (SO_REUSEPORT, another process of the program) may hold the name.
    let high = if ok { sys::copy_high(fd) } else { None };
    sys::close(fd);
    let high = high?;
    let mut held = HELD.lock();
    if let Some(old) = held.get_or_insert_default().insert(listener, high) {
        sys::close(old);
    }
    Some(high)
}

/// The listener was closed: returns the descriptor that held its name, which the caller closes.
pub fn leave(listener: c_int) -> Option<c_int> {
    let mut held = HELD.lock();
    held.as_mut().and_then(|h| h.remove(&listener))
}

/// The program puts another descriptor in this place: it is not ours any more.
pub fn lost(fd: c_int) {
    let mut held = HELD.lock();
    if let Some(held) = held.as_mut() {
        held.retain(|_, own| *own != fd);
    }
}

/// Whether the listener at `addr` of this namespace understands a Request.
pub fn ask(addr: SocketAddr) -> bool {
    if !is_here(addr) {
        return false;
    }
    name::to_ask(addr).iter().any(|name| ask_name(name))
}

fn ask_name(name: &str) -> bool {
    let Some(fd) = unix() else { return false };
    let (un, len) = address(name);
    // SAFETY: address and length belong together.
    let r = unsafe { real::connect(fd, (&raw const un).cast(), len) };
    // With a full backlog nothing is known, and the connection stays plain.
    let there = r == 0 && is_trusted(fd);
    sys::close(fd);
    there
}

fn is_trusted(fd: c_int) -> bool {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: value and length belong together; the second call has no pointer.
    unsafe {
        real::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        ) == 0
            && (cred.uid == 0 || cred.uid == libc::geteuid())
    }
}

/// Whether an address is one of this namespace: then packets to it come from it.
fn is_here(addr: SocketAddr) -> bool {
    addr.ip().to_canonical().is_loopback() || source(addr) == Some(addr.ip())
}

/// The address from which the kernel would send to another.
pub fn source(addr: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if addr.is_ipv4() {
        ([0u8; 4], 0).into()
    } else {
        ([0u8; 16], 0).into()
    };
    let socket =
        std::net::UdpSocket::bind(any).and_then(|s| s.connect(addr).and_then(|()| s.local_addr()));
    socket.ok().map(|local| local.ip())
}

/// Ends the connections of those that have asked: they wait in the backlogs of the names.
pub fn sweep() {
    let held = HELD.lock();
    for fd in held.iter().flat_map(HashMap::values) {
        for _ in 0..8192 {
            // SAFETY: no address is asked for.
            let asked = unsafe {
                real::accept4(
                    *fd,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC,
                )
            };
            if asked < 0 {
                break;
            }
            sys::close(asked);
        }
    }
}
