//! The port spaces of rdma_cm.
//!
//! As on InfiniBand and RoCE, a port of an identifier is independent of the kernel's port of the same number: a
//! program may have both, and two programs may have one each. A port is taken if it has a *signpost*: a UDP socket at one
//! of two UDP ports that are computed from space and number ([`Port::candidate_ports`]). In this file these two ports are called
//! *candidates*. A peer queries the signpost for the TCP or UDP port of the listener.
//!
//! A listener of reliable connections also has the TCP port of its number, if that is free, because standard iWARP
//! peers do not use signposts. It moves to another TCP port when a plain socket needs that one ([`make_room`], called
//! by the library's replacement of `bind(2)`). A listener of datagrams never has the UDP port of its number, because all
//! its peers use the signpost.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::wire::signpost::{Port, Status};
use rustix::io::Errno;
use rustix::net::SocketType;

use crate::clock;
use crate::config::config;
use crate::connect::signpost::{is_taken_here, release_elsewhere};
use crate::engine::{self, Engine};
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::socket::{self, local_addr, unmapped};
use crate::process::PerProcess;
use crate::reactor::{Source, Token};
use crate::sys::host::host_addresses;
use crate::sys::socket::set_option;

/// Largest number of ports that are tried to find one that is free in the kernel and in the port space, and has a free candidate for a signpost.
const TRIES: u32 = 64;
/// How long ports are tried. Each candidate that is taken by a socket that does not answer costs 100 ms.
const TRY_TIME: Duration = Duration::from_millis(300);
/// A query about a port at all addresses goes to each address of this host, but to no more than this number.
const ADDRESSES_MAX: usize = 32;

/// Port space of an identifier; the numbers are those of `enum rdma_port_space`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortSpace {
    /// Reliable connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// IPoIB multicast, which is handled like [`Self::Udp`].
    Ipoib = 0x0002,
    /// Any service of InfiniBand: handled like [`Self::Tcp`] for connections, and like [`Self::Udp`] for datagrams.
    Ib = 0x013f,
}

/// An owner of a port: an identifier.
pub(super) trait Holder: Send + Sync {
    /// Answers the queries that have arrived at the signpost.
    fn answer_queries(&self);
    /// Releases a port of the kernel for a plain socket: the TCP port `number`, or the signpost's UDP port `number`.
    /// Returns true if the identifier has released the port, and false if it did not have it or has to keep it.
    fn leave(&self, kind: SocketType, number: u16) -> bool;
}

/// The ports of this process's identifiers.
static TAKEN: PerProcess<Mutex<Vec<Taken>>> =
    PerProcess::new(|| Mutex::new(Rank::CmPorts, Vec::new()));

/// The TCP ports on which listeners of this process listen or have listened: bit `n % 64` of word `n / 64`. Their
/// connections continue after the listener has moved, and a plain socket can share a port with them only if both
/// allow it (`SO_REUSEADDR`).
static EVER_LISTENED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn had(port: u16) -> Option<(&'static AtomicU64, u64)> {
    EVER_LISTENED
        .get(usize::from(port / 64))
        .map(|w| (w, 1 << (port % 64)))
}

fn was_ours(port: u16) -> bool {
    had(port).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// An entry of [`TAKEN`]: a port of an identifier.
struct Taken {
    id: Weak<dyn Holder>,
    port: Port,
    address: Address,
    reuse: bool,
    /// The UDP port of the signpost.
    signpost_port: Option<u16>,
    /// The TCP port that is bound or listening.
    tcp: Option<u16>,
    /// The kernel's port that peers connect to or send requests to. Set when the identifier listens.
    listening: Option<u16>,
}

/// The addresses that a bound socket uses.
#[derive(Debug, Clone, Copy)]
struct Address {
    ip: IpAddr,
    v6only: bool,
}

impl Address {
    /// Whether two sockets with these addresses cannot have the same port.
    fn conflicts(self, other: Self) -> bool {
        let takes_all = |a: Self, b: Self| {
            a.ip.is_unspecified()
                && (a.ip.is_ipv4() == b.ip.is_ipv4() || a.ip.is_ipv6() && !a.v6only)
        };
        self.ip == other.ip || takes_all(self, other) || takes_all(other, self)
    }

    /// The error of a bind to a port that another identifier has. `other`: the address of that identifier, or `None` if it
    /// belongs to another process. The error is that of the kernel's rdma_cm.
    fn taken(self, other: Option<Self>) -> Errno {
        let is_any = |a: Self| a.ip.is_unspecified();
        if is_any(self) || other.is_some_and(is_any) {
            Errno::ADDRNOTAVAIL
        } else {
            Errno::ADDRINUSE
        }
    }
}

/// Whether a port could not be bound because another socket or identifier has it.
fn is_taken(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL)
    )
}

/// The port of an identifier, which is released when this is dropped.
pub(super) struct PortReservation {
    engine: &'static Engine,
    id: Weak<dyn Holder>,
    signpost: Option<(EngineFd, Token)>,
}

impl Drop for PortReservation {
    fn drop(&mut self) {
        TAKEN.get().lock().retain(|t| !t.id.ptr_eq(&self.id));
        if let Some((fd, token)) = self.signpost.take() {
            self.engine.remove(token, Some(fd.get()));
        }
    }
}

/// Address and options of a bind.
#[derive(Debug, Clone, Copy)]
pub(super) struct BindRequest {
    pub(super) space: PortSpace,
    /// Whether the identifier connects streams, not datagram queue pairs.
    pub(super) is_stream: bool,
    pub(super) to: SocketAddr,
    pub(super) reuse: bool,
    pub(super) v6only: bool,
}

impl BindRequest {
    fn port(self, number: u16) -> Port {
        Port {
            space: self.space as u16,
            number,
        }
    }

    fn address(self) -> Address {
        Address {
            ip: self.to.ip(),
            v6only: self.v6only || !self.to.ip().is_unspecified(),
        }
    }

    /// A socket of this kind, with the options of the address.
    fn socket(self, kind: SocketType) -> io::Result<EngineFd> {
        let fd = socket::open(self.to.ip(), kind)?;
        if self.to.is_ipv6() {
            let v6only = i32::from(self.address().v6only);
            set_option(fd.get(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, v6only);
        }
        Ok(fd)
    }

    fn bind(self, fd: &EngineFd, port: u16) -> rustix::io::Result<()> {
        rustix::net::bind(fd.get(), &at_port(self.to, port))
    }

    /// A UDP socket on any port of the kernel.
    pub(super) fn datagram(self) -> io::Result<EngineFd> {
        let fd = self.socket(SocketType::DGRAM)?;
        self.bind(&fd, 0)?;
        Ok(fd)
    }

    /// A TCP socket on a port of the kernel, to listen or connect. `None` if another socket has the port.
    pub(super) fn stream(self, port: u16) -> io::Result<Option<EngineFd>> {
        let fd = self.socket(SocketType::STREAM)?;
        // Most servers set this, so that a restarted program can bind while old connections are in TIME-WAIT.
        set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        match self.bind(&fd, port) {
            Ok(()) => Ok(Some(fd)),
            Err(Errno::ADDRINUSE) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// The address with another port. A link-local address keeps its interface.
fn at_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// The result of a bind: the address, the port, and the TCP socket if the identifier has the kernel's TCP port.
pub(super) struct Bound {
    pub(super) local: SocketAddr,
    pub(super) reservation: PortReservation,
    pub(super) tcp: Option<EngineFd>,
}

/// Reserves a port for `id`. Number 0 selects a free one.
pub(super) fn take(
    engine: &'static Engine,
    id: &Weak<dyn Holder>,
    bind_request: BindRequest,
) -> io::Result<Bound> {
    if bind_request.to.port() != 0 {
        let tcp = match bind_request.is_stream && !config().ports_apart {
            true => bind_request.stream(bind_request.to.port())?,
            false => None,
        };
        return reserve(engine, id, bind_request, bind_request.to, tcp);
    }
    let until = clock::now() + TRY_TIME;
    let mut left = TRIES;
    loop {
        left -= 1;
        // The kernel selects a number that no socket of this kind has.
        let fd = if bind_request.is_stream {
            bind_request.stream(0)?.ok_or(Errno::ADDRINUSE)?
        } else {
            bind_request.datagram()?
        };
        let number = local_addr(&fd).map_or(0, |a| a.port());
        let local = at_port(bind_request.to, number);
        let tcp = (bind_request.is_stream && !config().ports_apart).then_some(fd);
        let bound = reserve(engine, id, bind_request, local, tcp);
        let is_good = match &bound {
            Ok(bound) => bound.reservation.signpost.is_some(),
            Err(e) => !is_taken(e),
        };
        if is_good || left == 0 || clock::now() >= until {
            return bound;
        }
    }
}

/// Reserves the port `local` in the list of this process, with a signpost.
fn reserve(
    engine: &'static Engine,
    id: &Weak<dyn Holder>,
    bind_request: BindRequest,
    local: SocketAddr,
    tcp: Option<EngineFd>,
) -> io::Result<Bound> {
    let port = bind_request.port(local.port());
    let mut reservation = enter(
        engine,
        id,
        bind_request,
        port,
        tcp.as_ref().map(|_| local.port()),
    )?;
    match bind_signpost(bind_request, port, None)? {
        Some(signpost) => reservation.attach(signpost)?,
        // A listener with neither a signpost nor the TCP port of its number could not be found by peers.
        None if tcp.is_none() => return Err(Errno::ADDRINUSE.into()),
        None => log!(
            Info,
            "cm: both UDP ports for queries about rdma_cm port {} are taken, so peers find its listener only at the TCP port, which it keeps",
            port.number
        ),
    }
    Ok(Bound {
        local,
        reservation,
        tcp,
    })
}

/// Adds a port to the list. Fails if an identifier of this process has it ([`Address::taken`]).
fn enter(
    engine: &'static Engine,
    id: &Weak<dyn Holder>,
    bind_request: BindRequest,
    port: Port,
    tcp: Option<u16>,
) -> io::Result<PortReservation> {
    let address = bind_request.address();
    let mut taken = TAKEN.get().lock();
    let is_same = |t: &Taken| {
        t.port == port && t.address.conflicts(address) && !(t.reuse && bind_request.reuse)
    };
    if let Some(other) = taken.iter().find(|t| is_same(t)) {
        return Err(address.taken(Some(other.address)).into());
    }
    taken.push(Taken {
        id: id.clone(),
        port,
        address,
        reuse: bind_request.reuse,
        signpost_port: None,
        tcp,
        listening: None,
    });
    Ok(PortReservation {
        engine,
        id: id.clone(),
        signpost: None,
    })
}

/// Binds a socket to the first candidate of `port` that is free and is not `except`. `None` if there is none.
/// Fails if another process has the port ([`Address::taken`]).
fn bind_signpost(
    bind_request: BindRequest,
    port: Port,
    except: Option<u16>,
) -> io::Result<Option<EngineFd>> {
    let address = bind_request.address();
    // Signposts of this process need no query.
    let own: Vec<u16> = {
        let taken = TAKEN.get().lock();
        let near = taken.iter().filter(|t| t.address.conflicts(address));
        near.filter_map(|t| t.signpost_port).collect()
    };
    // With `except`, the signpost of a port of this process moves: no other process has the port.
    let is_elsewhere = |candidate| {
        except.is_none()
            && !own.contains(&candidate)
            && is_taken_here(port, candidate, &reached_by(address, bind_request.to))
    };
    let [first, second] = port.candidate_ports();
    if except != Some(first) {
        match bind_signpost_at(bind_request, first)? {
            // Another identifier may have the signpost of this port at the second candidate,
            // because the first one was taken when it bound. A signpost does not move when the
            // first candidate becomes free.
            Some(_) if first != second && is_elsewhere(second) => {
                // The second candidate can be bound only if both sockets share it (`RDMA_OPTION_ID_REUSEADDR`).
                let shared = bind_request
                    .reuse
                    .then(|| bind_signpost_at(bind_request, second))
                    .transpose()?;
                return match shared.flatten() {
                    Some(fd) => Ok(Some(fd)),
                    None => Err(address.taken(None).into()),
                };
            }
            Some(fd) => return Ok(Some(fd)),
            None if is_elsewhere(first) => return Err(address.taken(None).into()),
            None => log_taken(port, first, &own),
        }
    }
    if except != Some(second) {
        match bind_signpost_at(bind_request, second)? {
            Some(fd) => return Ok(Some(fd)),
            None if is_elsewhere(second) => return Err(address.taken(None).into()),
            None => log_taken(port, second, &own),
        }
    }
    Ok(None)
}

/// A socket at the UDP port `candidate`. `None` if another socket has it.
fn bind_signpost_at(bind_request: BindRequest, candidate: u16) -> io::Result<Option<EngineFd>> {
    let fd = bind_request.socket(SocketType::DGRAM)?;
    if bind_request.reuse {
        // SO_REUSEPORT permits sharing among sockets of one user only. With SO_REUSEADDR, any user could bind to the
        // candidate and receive its queries.
        set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
    }
    match bind_request.bind(&fd, candidate) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::ADDRINUSE) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn log_taken(port: Port, candidate: u16, own: &[u16]) {
    if !own.contains(&candidate) {
        log!(
            Info,
            "cm: UDP port {candidate}, one of two for queries about rdma_cm port {}, is taken",
            port.number
        );
    }
}

impl PortReservation {
    /// Records that the identifier listens on the kernel's port `at`. Fails if another identifier of this process listens
    /// on the same port of rdma_cm, which both share by `RDMA_OPTION_ID_REUSEADDR` ([`Address::taken`]).
    pub(super) fn listen(&self, at: u16, tcp: bool) -> io::Result<()> {
        let mut taken = TAKEN.get().lock();
        let Some(mine) = taken.iter().position(|t| t.id.ptr_eq(&self.id)) else {
            return Ok(());
        };
        let (port, address) = match taken.get(mine) {
            Some(t) => (t.port, t.address),
            None => return Ok(()),
        };
        let other = taken.iter().enumerate().find(|(n, t)| {
            *n != mine && t.port == port && t.listening.is_some() && t.address.conflicts(address)
        });
        if let Some((_, other)) = other {
            return Err(address.taken(Some(other.address)).into());
        }
        if let Some(t) = taken.get_mut(mine) {
            t.listening = Some(at);
            t.tcp = tcp.then_some(at);
        }
        if let (true, Some((word, bit))) = (tcp, had(at)) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        if let Some((fd, _)) = &self.signpost {
            end_sharing(fd);
        }
        Ok(())
    }

    /// Records that the identifier no longer has the kernel's TCP port of its number.
    pub(super) fn left_tcp(&self) {
        let mut taken = TAKEN.get().lock();
        if let Some(t) = taken.iter_mut().find(|t| t.id.ptr_eq(&self.id)) {
            t.tcp = None;
        }
    }

    /// Makes `fd` the signpost, and closes the previous one.
    fn attach(&mut self, fd: EngineFd) -> io::Result<()> {
        let source = Arc::new(Signpost(self.id.clone()));
        let token = self.engine.add(source, fd.get(), false)?;
        let port = local_addr(&fd).map(|a| a.port());
        if let Some((old, token)) = self.signpost.replace((fd, token)) {
            self.engine.remove(token, Some(old.get()));
        }
        let mut taken = TAKEN.get().lock();
        if let Some(t) = taken.iter_mut().find(|t| t.id.ptr_eq(&self.id)) {
            t.signpost_port = port;
            if let (Some(_), Some((fd, _))) = (t.listening, &self.signpost) {
                end_sharing(fd);
            }
        }
        Ok(())
    }

    /// Moves the signpost to its other candidate, because a plain socket needs the present one. Returns true if it has
    /// moved.
    pub(super) fn move_signpost(&mut self, bind_request: BindRequest, number: u16) -> bool {
        let Some((old, _)) = &self.signpost else {
            return false;
        };
        let except = local_addr(old).map(|a| a.port());
        match bind_signpost(bind_request, bind_request.port(number), except) {
            Ok(Some(new)) => self.attach(new).is_ok(),
            _ => false,
        }
    }

    /// The signpost, if there is one.
    pub(super) fn signpost(&self) -> Option<&EngineFd> {
        self.signpost.as_ref().map(|(fd, _)| fd)
    }
}

/// Ends the sharing of a signpost's candidate: no other socket can be bound to it from now on.
fn end_sharing(signpost: &EngineFd) {
    set_option(signpost.get(), libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
}

/// Returns the answer of the signpost of `id` to a query about `port`.
pub(super) fn answer(id: &Weak<dyn Holder>, port: Port) -> Status {
    let taken = TAKEN.get().lock();
    let Some(here) = taken.iter().find(|t| t.id.ptr_eq(id)) else {
        return Status::Other;
    };
    // Identifiers that share a port share its signposts.
    let mut same = taken
        .iter()
        .filter(|t| t.port == port && t.address.conflicts(here.address))
        .peekable();
    if same.peek().is_none() {
        return Status::Other;
    }
    same.find_map(|t| t.listening)
        .map_or(Status::Bound, Status::Listening)
}

/// The socket of a signpost.
struct Signpost(Weak<dyn Holder>);

impl Source for Signpost {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.answer_queries();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

/// Releases the kernel's port `number` from the identifiers of this process that have it. Returns true if one of them
/// has released it. `at` is the address that a plain socket needs, or `None` for any.
fn release(kind: SocketType, number: u16, at: Option<Address>) -> bool {
    let ids: Vec<Arc<dyn Holder>> = {
        let taken = TAKEN.get().lock();
        let is_in_the_way = |t: &&Taken| {
            let port = match kind {
                SocketType::DGRAM => t.signpost_port,
                _ => t.tcp,
            };
            port == Some(number) && at.is_none_or(|at| at.conflicts(t.address))
        };
        let ids = taken.iter().filter(is_in_the_way);
        ids.filter_map(|t| t.id.upgrade()).collect()
    };
    let mut left = false;
    for id in ids {
        left |= id.leave(kind, number);
    }
    left
}

/// Releases the TCP port `number` for a plain socket of another process. Returns true if a listener of this process has released it now,
/// or has ever listened on it. Connections may still use it, so the plain socket may need `SO_REUSEADDR`.
pub(super) fn release_to_process(number: u16) -> bool {
    release(SocketType::STREAM, number, None) || was_ours(number)
}

/// Makes identifiers of rdma_cm release a port to which the program could not bind a plain socket: a TCP port of a listener in any
/// process of this host, or a UDP port of a signpost in this process. Returns true if `bind` can succeed now. The socket may need
/// `SO_REUSEADDR`, because connections of the listener continue after it has moved.
pub fn make_room(is_stream: bool, to: SocketAddr, v6only: bool) -> bool {
    let to = unmapped(to);
    if to.port() == 0 {
        return false;
    }
    let at = Address {
        ip: to.ip(),
        v6only,
    };
    let kind = match is_stream {
        true => SocketType::STREAM,
        false => SocketType::DGRAM,
    };
    let has_engine = engine::current().is_some();
    if has_engine && release(kind, to.port(), Some(at)) {
        return true;
    }
    if !is_stream {
        return false;
    }
    let ports = [PortSpace::Tcp, PortSpace::Ib].map(|space| Port {
        space: space as u16,
        number: to.port(),
    });
    release_elsewhere(ports, &reached_by(at, to)) || has_engine && was_ours(to.port())
}

/// Returns addresses of this host that together reach every socket whose address conflicts with `at`, the address of
/// `to`.
fn reached_by(at: Address, to: SocketAddr) -> Vec<SocketAddr> {
    if !at.ip.is_unspecified() {
        return vec![to];
    }
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let others = host_addresses().unwrap_or_default();
    let up = others.into_iter().filter(|a| a.up).map(|a| a.ip);
    let mut found: Vec<IpAddr> = Vec::new();
    for ip in loopback.into_iter().chain(up) {
        if at.conflicts(Address { ip, v6only: true }) && !found.contains(&ip) {
            found.push(ip);
        }
    }
    found.truncate(ADDRESSES_MAX);
    found.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_conflict_as_those_of_the_kernel_do() {
        let at = |ip: &str, v6only| Address {
            ip: ip.parse().unwrap(),
            v6only,
        };
        for (one, other, expected) in [
            (at("0.0.0.0", true), at("10.0.0.1", true), true),
            (at("10.0.0.1", true), at("10.0.0.1", true), true),
            (at("10.0.0.2", true), at("10.0.0.1", true), false),
            (at("::", false), at("10.0.0.1", true), true),
            (at("::", false), at("0.0.0.0", true), true),
            (at("::", true), at("0.0.0.0", true), false),
            (at("::", true), at("::1", true), true),
            (at("::1", true), at("127.0.0.1", true), false),
            (at("0.0.0.0", true), at("::1", true), false),
        ] {
            assert_eq!(one.conflicts(other), expected, "{one:?} {other:?}");
            assert_eq!(other.conflicts(one), expected, "{other:?} {one:?}");
        }
    }
}
