//! Which listeners of this network namespace understand a Request.
//!
//! A listener holds the abstract name `anywarp/tcp/ADDR/PORT`, as a UNIX socket that listens: connecting to it succeeds
//! as long as a process has it. Its owner must be the user of this process or root: another user's name is not believed.

use crate::real;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_int, sockaddr_un, socklen_t};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

/// The names that this process holds, by the number of the listener.
static HELD: Mutex<Option<HashMap<c_int, c_int>>> = Mutex::new(None);

fn name(addr: IpAddr, port: u16) -> (sockaddr_un, socklen_t) {
    // SAFETY: zeros are a valid address.
    let mut un: sockaddr_un = unsafe { std::mem::zeroed() };
    un.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = format!("anywarp/tcp/{}/{port}", addr.to_canonical());
    // The first byte is zero: the name is no file's.
    for (place, byte) in un.sun_path.iter_mut().skip(1).zip(text.bytes()) {
        *place = byte as libc::c_char;
    }
    let len = std::mem::offset_of!(sockaddr_un, sun_path) + 1 + text.len();
    (un, len as socklen_t)
}

fn unix() -> Option<c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer.
    let fd = unsafe { real::socket(libc::AF_UNIX, kind, 0) };
    (fd >= 0).then_some(fd)
}

/// Enters a listener.
pub fn enter(listener: c_int, addr: SocketAddr) {
    let Some(fd) = unix() else { return };
    let (un, len) = name(addr.ip(), addr.port());
    // SAFETY: address and length belong together.
    let ok =
        unsafe { real::bind(fd, (&raw const un).cast(), len) == 0 && real::listen(fd, 4096) == 0 };
    // Another listener of this address (SO_REUSEPORT, another process of the program) may hold the name.
    let high = if ok { sys::copy_high(fd) } else { None };
    sys::close(fd);
    if let Some(high) = high {
        let mut held = HELD.lock();
        if let Some(old) = held.get_or_insert_default().insert(listener, high) {
            sys::close(old);
        }
    }
}

/// The listener was closed.
pub fn leave(listener: c_int) {
    let mut held = HELD.lock();
    if let Some(fd) = held.as_mut().and_then(|h| h.remove(&listener)) {
        sys::close(fd);
    }
}

/// Whether the listener at `addr` of this namespace understands a Request.
pub fn ask(addr: SocketAddr) -> bool {
    if !is_here(addr) {
        return false;
    }
    let unspecified: IpAddr = if addr.ip().to_canonical().is_ipv4() {
        IpAddr::from([0u8; 4])
    } else {
        IpAddr::from([0u8; 16])
    };
    let wide: IpAddr = IpAddr::from([0u8; 16]);
    ask_name(addr.ip(), addr.port())
        || ask_name(unspecified, addr.port())
        || (unspecified != wide && ask_name(wide, addr.port()))
}

fn ask_name(addr: IpAddr, port: u16) -> bool {
    let Some(fd) = unix() else { return false };
    let (un, len) = name(addr, port);
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
    if addr.ip().to_canonical().is_loopback() {
        return true;
    }
    let any: SocketAddr = if addr.is_ipv4() {
        ([0u8; 4], 0).into()
    } else {
        ([0u8; 16], 0).into()
    };
    let socket =
        std::net::UdpSocket::bind(any).and_then(|s| s.connect(addr).and_then(|()| s.local_addr()));
    socket.is_ok_and(|local| local.ip() == addr.ip())
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
