//! Which listeners of this network namespace understand a Request, and which UDP sockets understand messages.
//!
//! A listener holds the abstract name `anywarp/tcp/ADDR/PORT`, a UDP socket `anywarp/udp/ADDR/PORT`, as a UNIX socket that
//! listens: connecting to it succeeds as long as a process has it. A socket at `::` that takes nothing of IPv4 has the name with
//! `/v6` behind it, and one that takes only what comes by one interface has none. Its owner must be the user of this process or root:
//! another user's name is not believed.

use crate::limits;
use crate::real;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_int, sockaddr_un, socklen_t};
use sockets_base::name::{self, Name, Protocol};
use std::cell::Cell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::MutexGuard;

/// The names that this process holds, by the number of the listener.
static HELD: Mutex<Option<HashMap<c_int, c_int>>> = Mutex::new(None);

fn address(name: &Name) -> (sockaddr_un, socklen_t) {
    let name: &[u8] = name.as_ref();
    // SAFETY: zeros are a valid address.
    let mut un: sockaddr_un = unsafe { std::mem::zeroed() };
    un.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte is zero: the name is no file's.
    for (place, byte) in un.sun_path.iter_mut().skip(1).zip(name) {
        *place = *byte as libc::c_char;
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

/// Takes a name: the descriptor that holds it. `None`: another socket has it.
fn hold(name: &Name) -> Option<c_int> {
    let fd = unix()?;
    let (un, len) = address(name);
    // SAFETY: address and length belong together.
    let ok =
        unsafe { real::bind(fd, (&raw const un).cast(), len) == 0 && real::listen(fd, 4096) == 0 };
    let high = if ok { sys::copy_high(fd) } else { None };
    sys::close(fd);
    high
}

/// The name of a socket that is bound to `addr`; `None`: it does not get all that is sent there.
fn name_for(fd: c_int, protocol: Protocol, addr: SocketAddr) -> Option<Name> {
    let (ip, port) = (addr.ip(), addr.port());
    let v6_only = ip == IpAddr::from([0u8; 16])
        && sys::option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
    (!sys::has_device(fd)).then(|| name::of(protocol, ip, port, v6_only))
}

/// Enters a listener; returns the descriptor that holds its name.
pub fn enter(listener: c_int, addr: SocketAddr) -> Option<c_int> {
    // Another listener of this address (SO_REUSEPORT, another process of the program) may hold the name.
    let high = hold(&name_for(listener, Protocol::Tcp, addr)?)?;
    let mut held = HELD.lock();
    if let Some(old) = held.get_or_insert_default().insert(listener, high) {
        sys::close(old);
    }
    Some(high)
}

/// The names of UDP sockets that this process holds. Several sockets of it may have one address.
#[derive(Debug, Default)]
struct Udp {
    /// The descriptor that holds a name, and how many sockets have it.
    by_addr: HashMap<Vec<u8>, (c_int, usize)>,
    by_name: HashMap<c_int, Vec<u8>>,
}

static UDP: Mutex<Option<Udp>> = Mutex::new(None);

thread_local! {
    /// This thread has [`UDP`], or waits for it.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// The names of UDP sockets, locked by this thread.
#[derive(Debug)]
struct Held(Option<MutexGuard<'static, Option<Udp>>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0 = None;
        let _ = IS_HERE.try_with(|here| here.set(false));
    }
}

/// `None`: this is the handler of a signal that has interrupted this thread here.
fn udp() -> Option<Held> {
    if IS_HERE.try_with(|here| here.replace(true)) == Ok(true) {
        return None;
    }
    Some(Held(Some(UDP.lock())))
}

impl Held {
    fn get(&mut self) -> Option<&mut Udp> {
        Some(self.0.as_mut()?.get_or_insert_default())
    }
}

/// A fork waits until no other thread has the names of UDP sockets: the child could not close its own.
pub fn stop() -> Stop {
    Stop { _held: udp() }
}

/// The lock that stops them.
#[derive(Debug)]
pub struct Stop {
    _held: Option<Held>,
}

/// Enters a UDP socket; returns the descriptor that holds its name, and whether it is new.
pub fn enter_udp(fd: c_int, addr: SocketAddr) -> Option<(c_int, bool)> {
    let text = name_for(fd, Protocol::Udp, addr)?;
    let mut held = udp()?;
    let udp = held.get()?;
    if let Some((name, sockets)) = udp.by_addr.get_mut(text.as_ref()) {
        *sockets += 1;
        return Some((*name, false));
    }
    // The descriptors are the program's: without a name its socket works as well, and gets plain answers.
    if udp.by_addr.len() >= sys::descriptors() / limits::NAMES_PART {
        return None;
    }
    let name = hold(&text)?;
    udp.by_addr.insert(text.as_ref().to_vec(), (name, 1));
    udp.by_name.insert(name, text.as_ref().to_vec());
    Some((name, true))
}

/// A UDP socket with this name was closed; whether it was the last, so that the caller closes the name.
pub fn leave_udp(name: c_int) -> bool {
    let mut held = udp();
    let Some(udp) = held.as_mut().and_then(Held::get) else {
        return false;
    };
    let Some(key) = udp.by_name.get(&name).cloned() else {
        return false;
    };
    if let Some((_, sockets)) = udp.by_addr.get_mut(&key)
        && *sockets > 1
    {
        *sockets -= 1;
        return false;
    }
    udp.by_name.remove(&name);
    udp.by_addr.remove(&key);
    true
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
    drop(held);
    if let Some(udp) = udp().as_mut().and_then(Held::get)
        && let Some(key) = udp.by_name.remove(&fd)
    {
        udp.by_addr.remove(&key);
    }
}

/// Whether the listener at `addr` of this namespace understands a Request.
pub fn ask(addr: SocketAddr) -> bool {
    if !is_here(addr) {
        return false;
    }
    let names = name::to_ask(Protocol::Tcp, addr);
    names.iter().any(|name| ask_name(name) == Answer::Yes)
}

/// What the directory says about a UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It understands messages.
    Yes,
    /// It does not, as far as is known.
    No,
    /// Too many ask at once.
    Busy,
}

/// Whether the UDP socket at `addr` of this namespace understands messages.
pub fn ask_udp(addr: SocketAddr) -> Answer {
    if !is_here(addr) {
        return Answer::No;
    }
    let names = name::to_ask(Protocol::Udp, addr);
    let mut answers = names.iter().map(ask_name);
    answers
        .find(|answer| *answer != Answer::No)
        .unwrap_or(Answer::No)
}

fn ask_name(name: &Name) -> Answer {
    let Some(fd) = unix() else { return Answer::No };
    let (un, len) = address(name);
    // SAFETY: address and length belong together.
    let r = unsafe { real::connect(fd, (&raw const un).cast(), len) };
    // With a full backlog nothing is known.
    let answer = match r {
        0 if is_trusted(fd) => Answer::Yes,
        0 => Answer::No,
        _ if sys::errno() == libc::EAGAIN => Answer::Busy,
        _ => Answer::No,
    };
    sys::close(fd);
    answer
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
    sys::source(addr).map(|source| source.ip())
}

/// Ends the connections of those that have asked: they wait in the backlogs of the names.
pub fn sweep() {
    let held = HELD.lock();
    for fd in held.iter().flat_map(HashMap::values) {
        sweep_name(*fd);
    }
}

/// The same for the name of a UDP socket, if the descriptor still holds it.
pub fn sweep_udp(name: c_int) {
    with_name(name, sweep_name);
}

/// The name of a UDP socket ends in all processes that have it.
pub fn end_udp(name: c_int) {
    with_name(name, end_name);
}

/// The program may put a descriptor of its own in the place of a name.
fn with_name(name: c_int, call: impl FnOnce(c_int)) {
    if let Some(udp) = udp().as_mut().and_then(Held::get)
        && udp.by_name.contains_key(&name)
    {
        call(name);
    }
}

fn sweep_name(name: c_int) {
    for _ in 0..8192 {
        // SAFETY: no address is asked for.
        let asked = unsafe {
            real::accept4(
                name,
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

fn end_name(name: c_int) {
    // SAFETY: no pointer.
    unsafe {
        real::shutdown(name, libc::SHUT_RDWR);
    }
}
