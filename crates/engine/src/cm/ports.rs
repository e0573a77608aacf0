//! The port spaces of rdma_cm.
//!
//! As on InfiniBand and RoCE, a port of an identifier has nothing to do with the kernel's port of the same number: a program
//! may have both, and so may two programs. What makes a port taken is its signpost, a UDP socket at one of two places that
//! follow from space and number ([`Port::places`]). A peer asks the signpost where the listener is.
//!
//! A listener of reliable connections also has the TCP port of its number, if nothing else has it, because iWARP peers know
//! no signposts. It moves to another TCP port when a plain socket wants that one ([`make_room`], called by the `bind` of
//! libibverbs). A listener of datagrams never has the UDP port of its number: its peers all ask.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::wire::signpost::{LEN, Message, Port, Status};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType};

use super::{CmId, PortSpace, os};
use crate::config::config;
use crate::connect::signpost::{is_here, is_taken_here, release_elsewhere};
use crate::engine::{self, Engine};
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::socket::{self, local_addr, unmapped};
use crate::process::PerProcess;
use crate::reactor::{Source, Token};
use crate::sys::socket::set_option;

/// Tries to find a number that is free in the port space too.
const TRIES: u32 = 64;
/// Questions that one turn answers, so that a busy signpost does not keep other sockets waiting.
const TURN: usize = 64;

/// The ports of this process's identifiers.
static TAKEN: PerProcess<Mutex<Vec<Taken>>> =
    PerProcess::new(|| Mutex::new(Rank::CmPorts, Vec::new()));

/// The TCP ports that listeners of this process had: bit `n % 64` of word `n / 64`. Their connections go on after the
/// listener has moved, and a plain socket can share a port with them only if both allow it (`SO_REUSEADDR`).
static HAD: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn had(port: u16) -> Option<(&'static AtomicU64, u64)> {
    HAD.get(usize::from(port / 64)).map(|w| (w, 1 << (port % 64)))
}

/// A port as the process's list has it.
struct Taken {
    id: Weak<CmId>,
    port: Port,
    address: Address,
    reuse: bool,
    /// The UDP port of the signpost.
    place: Option<u16>,
    /// The TCP port that is bound, or listens.
    tcp: Option<u16>,
    /// Where peers connect to, or send requests.
    listening: Option<u16>,
}

/// The addresses that a socket takes.
#[derive(Debug, Clone, Copy)]
struct Address {
    ip: IpAddr,
    v6only: bool,
}

impl Address {
    /// Whether two sockets with these addresses cannot have one port.
    fn conflicts(self, other: Self) -> bool {
        let takes_all = |a: Self, b: Self| {
            a.ip.is_unspecified() && (a.ip.is_ipv4() == b.ip.is_ipv4() || a.ip.is_ipv6() && !a.v6only)
        };
        self.ip == other.ip || takes_all(self, other) || takes_all(other, self)
    }
}

/// The port of an identifier, which is free again when this is dropped.
pub(super) struct Place {
    engine: &'static Engine,
    id: Weak<CmId>,
    signpost: Option<(EngineFd, Token)>,
}

impl Drop for Place {
    fn drop(&mut self) {
        TAKEN.get().lock().retain(|t| !t.id.ptr_eq(&self.id));
        if let Some((fd, token)) = self.signpost.take() {
            self.engine.remove(token, Some(fd.get()));
        }
    }
}

/// What an identifier binds to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub(super) space: PortSpace,
    pub(super) to: SocketAddr,
    pub(super) reuse: bool,
    pub(super) v6only: bool,
}

impl Wish {
    fn is_stream(self) -> bool {
        matches!(self.space, PortSpace::Tcp | PortSpace::Ib)
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
        rustix::net::bind(fd.get(), &SocketAddr::new(self.to.ip(), port))
    }

    /// A TCP socket on a port of the kernel, to listen or connect; `None` if another socket has the port.
    pub(super) fn stream(self, port: u16) -> io::Result<Option<EngineFd>> {
        let fd = self.socket(SocketType::STREAM)?;
        // As for most servers: a restart does not wait for the TIME-WAIT of old connections.
        set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        match self.bind(&fd, port) {
            Ok(()) => Ok(Some(fd)),
            Err(Errno::ADDRINUSE) => Ok(None),
            Err(e) => Err(not_here(e)),
        }
    }
}

/// An address that this host does not have belongs to no device.
fn not_here(e: Errno) -> io::Error {
    if e == Errno::ADDRNOTAVAIL {
        os(libc::ENODEV)
    } else {
        e.into()
    }
}

/// What binding gave: the address, the port, and the TCP socket if the identifier has the kernel's port.
pub(super) struct Bound {
    pub(super) local: SocketAddr,
    pub(super) place: Place,
    pub(super) tcp: Option<EngineFd>,
}

/// Takes a port for `id`; number 0 takes a free one.
pub(super) fn take(engine: &'static Engine, id: &Weak<CmId>, wish: Wish) -> io::Result<Bound> {
    if wish.to.port() != 0 {
        let tcp = match wish.is_stream() && !config().ports_apart {
            true => wish.stream(wish.to.port())?,
            false => None,
        };
        return reserve(engine, id, wish, wish.to, tcp);
    }
    let mut last = os(libc::EADDRINUSE);
    for _ in 0..TRIES {
        let fd = if wish.is_stream() {
            wish.stream(0)?.ok_or_else(|| os(libc::EADDRINUSE))?
        } else {
            let fd = wish.socket(SocketType::DGRAM)?;
            wish.bind(&fd, 0).map_err(not_here)?;
            fd
        };
        let number = local_addr(&fd).map_or(0, |a| a.port());
        let local = SocketAddr::new(wish.to.ip(), number);
        let tcp = (wish.is_stream() && !config().ports_apart).then_some(fd);
        match reserve(engine, id, wish, local, tcp) {
            Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) => last = e,
            other => return other,
        }
    }
    Err(last)
}

/// Makes the port `local` taken.
fn reserve(
    engine: &'static Engine,
    id: &Weak<CmId>,
    wish: Wish,
    local: SocketAddr,
    tcp: Option<EngineFd>,
) -> io::Result<Bound> {
    let port = Port {
        space: wish.space as u16,
        number: local.port(),
    };
    let signpost = put_up(wish, port, None)?;
    if signpost.is_none() && tcp.is_none() {
        // Neither iWARP peers nor others could find it.
        return Err(os(libc::EADDRINUSE));
    }
    let mut place = Place {
        engine,
        id: id.clone(),
        signpost: None,
    };
    TAKEN.get().lock().push(Taken {
        id: id.clone(),
        port,
        address: wish.address(),
        reuse: wish.reuse,
        place: signpost.as_ref().and_then(local_addr).map(|a| a.port()),
        tcp: tcp.as_ref().map(|_| local.port()),
        listening: None,
    });
    if let Some(fd) = signpost {
        let token = engine.add(Arc::new(Signpost(id.clone())), fd.get(), false)?;
        place.signpost = Some((fd, token));
    }
    Ok(Bound { local, place, tcp })
}

/// A socket at one of the places of `port`, but not at `except`; `None` if others have both. `EADDRINUSE` if the port itself
/// is taken.
fn put_up(wish: Wish, port: Port, except: Option<u16>) -> io::Result<Option<EngineFd>> {
    let address = wish.address();
    // Those of this process whose signposts would be in the way.
    let (mine, own): (bool, Vec<u16>) = {
        let taken = TAKEN.get().lock();
        let near = || taken.iter().filter(|t| t.address.conflicts(address));
        let same = |t: &&Taken| t.port == port && !(t.reuse && wish.reuse);
        let mine = except.is_none() && near().any(|t| same(&t));
        (mine, near().filter_map(|t| t.place).collect())
    };
    if mine {
        return Err(os(libc::EADDRINUSE));
    }
    for place in port.places() {
        if Some(place) == except {
            continue;
        }
        let fd = wish.socket(SocketType::DGRAM)?;
        if wish.reuse {
            set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        }
        match wish.bind(&fd, place) {
            Ok(()) => return Ok(Some(fd)),
            Err(Errno::ADDRINUSE) if own.contains(&place) => {}
            Err(Errno::ADDRINUSE) => {
                if except.is_none() && is_taken_here(port, wish.to.ip()) {
                    return Err(os(libc::EADDRINUSE));
                }
            }
            Err(e) => return Err(not_here(e)),
        }
    }
    Ok(None)
}

impl Place {
    /// The identifier listens at the kernel's port `at`. `EADDRINUSE` if another identifier of this process does, which only
    /// those with `RDMA_OPTION_ID_REUSEADDR` come to.
    pub(super) fn listen(&self, at: u16, tcp: bool) -> io::Result<()> {
        let mut taken = TAKEN.get().lock();
        let Some(mine) = taken.iter().position(|t| t.id.ptr_eq(&self.id)) else {
            return Ok(());
        };
        let (port, address) = match taken.get(mine) {
            Some(t) => (t.port, t.address),
            None => return Ok(()),
        };
        let other = taken.iter().enumerate().any(|(n, t)| {
            n != mine && t.port == port && t.listening.is_some() && t.address.conflicts(address)
        });
        if other {
            return Err(os(libc::EADDRINUSE));
        }
        if let Some(t) = taken.get_mut(mine) {
            t.listening = Some(at);
            t.tcp = tcp.then_some(at);
        }
        if let (true, Some((word, bit))) = (tcp, had(at)) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        if let Some((fd, _)) = &self.signpost {
            // From now on the port is this identifier's alone.
            set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 0);
        }
        Ok(())
    }

    /// The kernel's TCP port of this number is no longer bound.
    pub(super) fn left_tcp(&self) {
        let mut taken = TAKEN.get().lock();
        if let Some(t) = taken.iter_mut().find(|t| t.id.ptr_eq(&self.id)) {
            t.tcp = None;
        }
    }

    /// Moves the signpost to its other place, because a plain socket wants the one that it has; whether it did.
    fn move_signpost(&mut self, wish: Wish, number: u16) -> bool {
        let Some((old, old_token)) = &self.signpost else {
            return false;
        };
        let except = local_addr(old).map(|a| a.port());
        let port = Port {
            space: wish.space as u16,
            number,
        };
        let Ok(Some(new)) = put_up(wish, port, except) else {
            return false;
        };
        let source = Arc::new(Signpost(self.id.clone()));
        let Ok(token) = self.engine.add(source, new.get(), false) else {
            return false;
        };
        self.engine.remove(*old_token, Some(old.get()));
        let place = local_addr(&new).map(|a| a.port());
        self.signpost = Some((new, token));
        let mut taken = TAKEN.get().lock();
        if let Some(t) = taken.iter_mut().find(|t| t.id.ptr_eq(&self.id)) {
            t.place = place;
        }
        true
    }
}

/// The answer for `port` to a peer of the signpost at `id`.
fn answer(id: &Weak<CmId>, port: Port) -> Status {
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
struct Signpost(Weak<CmId>);

impl Source for Signpost {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.answer_questions();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

impl CmId {
    fn answer_questions(&self) {
        for _ in 0..TURN {
            let mut buffer = [0_u8; LEN + 1];
            let (message, from) = {
                let state = self.lock();
                let Some((fd, _)) = state.place.as_ref().and_then(|p| p.signpost.as_ref()) else {
                    return;
                };
                match rustix::net::recvfrom(fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                    Ok((_, n, from)) => (
                        Message::parse(buffer.get(..n).unwrap_or(&[])),
                        from.and_then(|f| SocketAddr::try_from(f).ok()),
                    ),
                    Err(Errno::AGAIN) => return,
                    // An error about an earlier answer, which this call has cleared.
                    Err(_) => continue,
                }
            };
            let (Some(message), Some(from)) = (message, from) else {
                continue;
            };
            let reply = match message {
                Message::Ask(port, nonce) => Message::Answer(port, nonce, answer(&self.me, port)),
                // Only a process of this host can want a port of this host.
                Message::Release(port, nonce) if is_here(unmapped(from).ip()) => {
                    let is_released = answer(&self.me, port) != Status::Other
                        && release(SocketType::STREAM, port.number, None);
                    let status = match is_released {
                        true => Status::Released,
                        false => Status::Other,
                    };
                    Message::Answer(port, nonce, status)
                }
                Message::Release(..) | Message::Answer(..) => continue,
            };
            let state = self.lock();
            if let Some((fd, _)) = state.place.as_ref().and_then(|p| p.signpost.as_ref()) {
                // A socket without room: the question comes again.
                let _ = rustix::net::sendto(fd, &reply.emit(), SendFlags::NOSIGNAL, &from);
            }
        }
    }

    /// Leaves the kernel's port to a plain socket; whether there was one to leave.
    fn leave_kernel_port(&self, kind: SocketType, number: u16) -> bool {
        let mut state = self.lock();
        let Some(wish) = state.wish else {
            return false;
        };
        if kind == SocketType::DGRAM {
            let own = state.local.map_or(0, |l| l.port());
            return state
                .place
                .as_mut()
                .is_some_and(|place| place.move_signpost(wish, own));
        }
        let at = |fd: &EngineFd| local_addr(fd).map(|a| a.port()) == Some(number);
        if state.bound.as_ref().is_some_and(at) {
            state.bound = None;
            if let Some(place) = &state.place {
                place.left_tcp();
            }
            return true;
        }
        if !state.listener.as_ref().is_some_and(|(fd, _)| at(fd)) {
            return false;
        }
        drop(state);
        // What the kernel has accepted already is not lost.
        self.accept_sockets();
        let moved = self.lock().move_listener(self.engine, &self.me);
        match &moved {
            Ok(to) => log!(
                Info,
                "cm: a plain socket wants TCP port {number}; the listener moves to {to}"
            ),
            Err(e) => log!(
                Warn,
                "cm: a plain socket wants TCP port {number}, and the listener cannot move: {e}"
            ),
        }
        moved.is_ok()
    }
}

/// The identifiers of this process that have the kernel's port `number` leave it; whether one did. `at` is the address that a
/// plain socket wants, or `None` for any.
fn release(kind: SocketType, number: u16, at: Option<Address>) -> bool {
    let ids: Vec<Arc<CmId>> = {
        let taken = TAKEN.get().lock();
        let in_the_way = |t: &&Taken| {
            let port = match kind {
                SocketType::DGRAM => t.place,
                _ => t.tcp,
            };
            port == Some(number) && at.is_none_or(|at| at.conflicts(t.address))
        };
        let ids = taken.iter().filter(in_the_way);
        ids.filter_map(|t| t.id.upgrade()).collect()
    };
    ids.iter().fold(false, |left, id| id.leave_kernel_port(kind, number) || left)
}

/// What a plain socket that found its port taken can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Nothing: another plain socket has the port.
    None,
    /// Bind again.
    Made,
    /// Bind again, with `SO_REUSEADDR`: RDMA connections of this process have the port.
    Shared,
}

/// A plain socket of the program could not be bound to a port: listeners of rdma_cm leave it, in this process or in another
/// one of this host.
pub fn make_room(is_stream: bool, to: SocketAddr, v6only: bool) -> Room {
    let to = unmapped(to);
    if to.port() == 0 {
        return Room::None;
    }
    let at = Address {
        ip: to.ip(),
        v6only,
    };
    let kind = match is_stream {
        true => SocketType::STREAM,
        false => SocketType::DGRAM,
    };
    let mut room = Room::None;
    if engine::current().is_some() {
        if release(kind, to.port(), Some(at)) {
            room = Room::Made;
        }
        if is_stream && had(to.port()).is_some_and(|(w, bit)| w.load(Ordering::Relaxed) & bit != 0) {
            room = Room::Shared;
        }
    }
    if room == Room::None && is_stream {
        let spaces = [PortSpace::Tcp, PortSpace::Ib];
        if spaces.map(|s| release_elsewhere(s as u16, to.port(), to.ip())) != [false; 2] {
            room = Room::Made;
        }
    }
    room
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
