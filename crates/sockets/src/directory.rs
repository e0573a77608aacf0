//! The directory of a network namespace: which listeners accept an MPA Request, and which UDP sockets accept iWARP messages.
//!
//! To register, a process binds a UNIX socket to an abstract name and listens on it: `anywarp/tcp/ADDR/PORT` for a listener,
//! `anywarp/udp/ADDR/PORT` for a UDP socket, and also `anywarp/rd/ADDR/PORT` if the UDP socket accepts reliable datagrams. A query
//! connects to the name, which succeeds while a process holds it. A socket bound to `::` that accepts no IPv4 uses the name
//! with the suffix `/v6`. A socket that is bound to one interface is not registered. The owner of the name must be root or the
//! user of the querying process; names of other users are ignored.

use crate::limits;
use crate::real;
use crate::remote;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_int, sockaddr_un, socklen_t};
use sockets_base::name::{self, Name, Protocol};
use std::cell::Cell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The descriptors that hold the names of this process's listeners, by the descriptor of the listener.
static HELD: Mutex<Option<Names>> = Mutex::new(None);
/// This process was forked while another thread of the parent held the lock [`HELD`], so the lock is never released here.
static IS_LOST: AtomicBool = AtomicBool::new(false);

type Names = HashMap<c_int, c_int>;

/// Locks [`HELD`]. `None`: it cannot be locked, so this process changes none of the inherited names.
fn names() -> Option<MutexGuard<'static, Option<Names>>> {
    (!IS_LOST.load(Ordering::Relaxed)).then(|| HELD.lock())
}

fn address(name: &Name) -> (sockaddr_un, socklen_t) {
    let name: &[u8] = name.as_ref();
    // SAFETY: an all-zero address is valid.
    let mut un: sockaddr_un = unsafe { std::mem::zeroed() };
    un.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte is zero, which makes the name an abstract one.
    for (place, byte) in un.sun_path.iter_mut().skip(1).zip(name) {
        *place = *byte as libc::c_char;
    }
    let len = std::mem::offset_of!(sockaddr_un, sun_path) + 1 + name.len();
    (un, len as socklen_t)
}

fn unix() -> Option<c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(libc::AF_UNIX, kind, 0) };
    (fd >= 0).then_some(fd)
}

/// Binds the name. Returns the descriptor that holds it, or `None` if another socket holds the name.
fn hold(name: &Name) -> Option<c_int> {
    let fd = unix()?;
    let (un, len) = address(name);
    // SAFETY: the length is that of the address.
    let ok =
        unsafe { real::bind(fd, (&raw const un).cast(), len) == 0 && real::listen(fd, 4096) == 0 };
    let high = if ok { sys::copy_high(fd) } else { None };
    sys::close(fd);
    high
}

/// Returns the name for a socket that is bound to `addr`. `None`: the socket is bound to an interface, so it does not
/// receive all traffic for this address.
fn name_for(fd: c_int, protocol: Protocol, addr: SocketAddr) -> Option<Name> {
    let (ip, port) = (addr.ip(), addr.port());
    let v6_only = ip == IpAddr::from([0u8; 16])
        && sys::option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(1);
    (!sys::has_device(fd)).then(|| name::of(protocol, ip, port, v6_only))
}

/// Registers a listener. Returns the descriptor that holds its name.
pub fn enter(listener: c_int, addr: SocketAddr) -> Option<c_int> {
    // With SO_REUSEPORT, or in another process of the program, a listener with this address may hold the name already.
    let high = hold(&name_for(listener, Protocol::Tcp, addr)?)?;
    let Some(mut held) = names() else {
        sys::close(high);
        return None;
    };
    let held = held.get_or_insert_default();
    if let Some(old) = held.insert(listener, high)
        && !has_name(held, old)
    {
        sys::close(old);
    }
    Some(high)
}

/// Returns whether the descriptor `name` holds the name of a listener.
fn has_name(held: &Names, name: c_int) -> bool {
    held.values().any(|own| *own == name)
}

/// Records that `copy` is a duplicate of the descriptor `listener`. The name stays until the last of them is closed.
pub fn copied(listener: c_int, copy: c_int) {
    if let Some(held) = names().as_mut().and_then(|held| held.as_mut())
        && let Some(name) = held.get(&listener).copied()
    {
        held.insert(copy, name);
    }
}

/// Called when the program passes the listener to a process that may not have the library. Queries then fail, so that clients
/// stay plain. This affects all processes that share the name. Returns the descriptor that held it, which the caller closes.
pub fn give_up(listener: c_int) -> Option<c_int> {
    let mut held = names()?;
    let held = held.as_mut()?;
    let name = held.get(&listener).copied()?;
    held.retain(|_, own| *own != name);
    end_name(name);
    Some(name)
}

/// The names of UDP sockets that this process holds. Several of its sockets may have the same address.
#[derive(Debug, Default)]
struct Udp {
    /// By name: the descriptor that holds it, and the number of sockets that use it.
    by_addr: HashMap<Vec<u8>, (c_int, usize)>,
    /// By descriptor: the name that it holds.
    by_name: HashMap<c_int, Vec<u8>>,
}

static UDP: Mutex<Option<Udp>> = Mutex::new(None);

thread_local! {
    /// This thread holds the lock [`UDP`], or waits for it.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// A guard of the lock [`UDP`].
#[derive(Debug)]
struct Held(Option<MutexGuard<'static, Option<Udp>>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0 = None;
        let _ = IS_HERE.try_with(|here| here.set(false));
    }
}

/// Locks [`UDP`]. Returns `None` in a signal handler that has interrupted this thread while it held the lock or waited for it.
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

/// Called before a fork. Waits until no other thread holds the locks, for `HELD` at most [`limits::FORK_WAIT`]. A lock that another thread
/// holds during the fork stays locked in the child, because the child does not have that thread. The child could then not close the names
/// that it inherits.
pub fn stop() -> Stop {
    let until = Instant::now() + Duration::from_millis(limits::FORK_WAIT);
    let mut held = HELD.try_lock();
    while held.is_none() && Instant::now() < until {
        std::thread::yield_now();
        held = HELD.try_lock();
    }
    Stop { udp: udp(), held }
}

/// The locks that are held during a fork.
#[derive(Debug)]
pub struct Stop {
    udp: Option<Held>,
    held: Option<MutexGuard<'static, Option<Names>>>,
}

impl Stop {
    /// Called in the child of the fork.
    pub fn forked(self) {
        IS_LOST.store(self.held.is_none(), Ordering::Relaxed);
        drop(self.udp);
    }
}

/// Registers a UDP socket. Returns the descriptor that holds its name, and whether the descriptor is new.
pub fn enter_udp(fd: c_int, protocol: Protocol, addr: SocketAddr) -> Option<(c_int, bool)> {
    let text = name_for(fd, protocol, addr)?;
    let mut held = udp()?;
    let udp = held.get()?;
    if let Some((name, sockets)) = udp.by_addr.get_mut(text.as_ref()) {
        *sockets += 1;
        return Some((*name, false));
    }
    // The limit leaves most descriptors to the program. A socket that is not registered works too, and gets plain datagrams.
    if udp.by_addr.len() >= sys::descriptors() / limits::NAMES_PART {
        return None;
    }
    let name = hold(&text)?;
    udp.by_addr.insert(text.as_ref().to_vec(), (name, 1));
    udp.by_name.insert(name, text.as_ref().to_vec());
    Some((name, true))
}

/// Called when a UDP socket whose name the descriptor `name` holds was closed or became plain. Returns whether it was the last
/// socket with this name. If so, the caller closes the descriptor.
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

/// Called when the listener was closed. If it has no duplicate, returns the descriptor that held its name, which the caller closes.
pub fn leave(listener: c_int) -> Option<c_int> {
    let mut held = names()?;
    let held = held.as_mut()?;
    let name = held.remove(&listener)?;
    (!has_name(held, name)).then_some(name)
}

/// Called when the program is about to put a descriptor of its own at `fd`, the number of a descriptor of the library. If that holds a name,
/// the name is forgotten, because the library must not use `fd` any more.
pub fn lost(fd: c_int) {
    if let Some(held) = names().as_mut().and_then(|held| held.as_mut()) {
        held.retain(|_, own| *own != fd);
    }
    if let Some(udp) = udp().as_mut().and_then(Held::get)
        && let Some(key) = udp.by_name.remove(&fd)
    {
        udp.by_addr.remove(&key);
    }
}

/// Returns whether the listener at `addr` accepts an MPA Request.
pub fn ask(addr: SocketAddr) -> bool {
    if !is_here(addr) {
        return remote::ask(Protocol::Tcp, addr);
    }
    let names = name::to_ask(Protocol::Tcp, addr);
    names.iter().any(|name| ask_name(name) == Answer::Yes)
}

/// The result of a query about a UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The socket accepts messages.
    Yes,
    /// The socket is not registered, or the owner of the name is neither root nor this user.
    No,
    /// The backlog of the name is full, so the answer is unknown.
    Busy,
}

/// Queries whether the UDP socket at `addr` accepts messages ([`Protocol::Udp`]) or reliable datagrams ([`Protocol::Reliable`]).
pub fn ask_udp(protocol: Protocol, addr: SocketAddr) -> Answer {
    if !is_here(addr) {
        return if remote::ask(protocol, addr) {
            Answer::Yes
        } else {
            Answer::No
        };
    }
    let names = name::to_ask(protocol, addr);
    let mut answers = names.iter().map(ask_name);
    answers
        .find(|answer| *answer != Answer::No)
        .unwrap_or(Answer::No)
}

fn ask_name(name: &Name) -> Answer {
    let Some(fd) = unix() else { return Answer::No };
    let (un, len) = address(name);
    // SAFETY: the length is that of the address.
    let r = unsafe { real::connect(fd, (&raw const un).cast(), len) };
    // If the backlog is full, there is no connection by which the owner of the name could be checked.
    let answer = match r {
        0 if is_trusted(fd) => Answer::Yes,
        0 => Answer::No,
        _ if sys::errno() == libc::EAGAIN => Answer::Busy,
        _ => Answer::No,
    };
    sys::close(fd);
    answer
}

/// Returns the user who holds the name of the socket that receives what is sent to `addr` in this namespace.
pub fn owner(protocol: Protocol, addr: SocketAddr) -> Option<u32> {
    name::to_ask(protocol, addr).iter().find_map(|name| {
        let fd = unix()?;
        let (un, len) = address(name);
        // SAFETY: the length is that of the address.
        let is_there = unsafe { real::connect(fd, (&raw const un).cast(), len) } == 0;
        let user = is_there.then(|| user_of(fd)).flatten();
        sys::close(fd);
        user
    })
}

fn is_trusted(fd: c_int) -> bool {
    // SAFETY: no pointer is passed.
    user_of(fd).is_some_and(|user| user == 0 || user == unsafe { libc::geteuid() })
}

/// Returns the user at the other end of a connection.
fn user_of(fd: c_int) -> Option<u32> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: the length is that of the value.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    (r == 0).then_some(cred.uid)
}

/// Returns whether an address belongs to this namespace: it is a loopback address, or the kernel chooses the address itself as the
/// source of packets to it.
fn is_here(addr: SocketAddr) -> bool {
    addr.ip().to_canonical().is_loopback() || source(addr) == Some(addr.ip())
}

/// Returns the source address that the kernel chooses for packets to `addr`.
pub fn source(addr: SocketAddr) -> Option<IpAddr> {
    sys::source(addr).map(|source| source.ip())
}

/// Accepts and closes the connections of queries, which are queued in the backlogs of the names.
pub fn sweep() {
    let Some(held) = names() else { return };
    for fd in held.iter().flat_map(HashMap::values) {
        sweep_name(*fd);
    }
}

/// Like [`sweep`], for the name of a UDP socket, if the descriptor still holds it.
pub fn sweep_udp(name: c_int) {
    with_name(name, sweep_name);
}

/// Shuts down the descriptor that holds the name of a UDP socket, so that queries fail. This affects all processes that share it.
pub fn end_udp(name: c_int) {
    with_name(name, end_name);
}

/// Calls `call` if the descriptor still holds the name of a UDP socket: the program may have replaced it by a descriptor of its own.
fn with_name(name: c_int, call: impl FnOnce(c_int)) {
    if let Some(udp) = udp().as_mut().and_then(Held::get)
        && udp.by_name.contains_key(&name)
    {
        call(name);
    }
}

fn sweep_name(name: c_int) {
    for _ in 0..8192 {
        // SAFETY: null is passed for the address.
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
    // SAFETY: no pointer is passed.
    unsafe {
        real::shutdown(name, libc::SHUT_RDWR);
    }
}
