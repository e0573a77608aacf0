//! Questions to the signposts of other processes: where the listener of a port of rdma_cm is.
//!
//! The end that connects asks both places that a signpost can be at ([`Port::places`]). On one host the answer, or the
//! refusal of a place that nobody has, is there before the call returns, unless the listener sleeps. When both places refuse,
//! there is no signpost, and the TCP port of that number itself is meant, as for every iWARP peer. Nothing is sent to that
//! port before this is known: a service that is no RDMA may be there. See docs/decisions/026.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anywarp_core::wire::signpost::{LEN, Message, Port, Status};
use rustix::net::{RecvFlags, SendFlags, SocketType};

use crate::clock;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::net::socket;
use crate::process::PerProcess;
use crate::random::random_u64;
use crate::reactor::{Source, Token};
use crate::sys::host::host_addresses;
use crate::sys::socket::{set_option, wait_readable};

/// When the question is sent, counted from the first time; after the last of them it counts as unanswered.
const SENT_AT: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(30),
    Duration::from_millis(90),
    Duration::from_millis(200),
    Duration::from_millis(400),
];
/// Datagrams and errors that one look takes from the socket.
const TURN: usize = 16;
/// How long a process of this host has for an answer to a call that waits for it.
const LOCAL_PATIENCE: Duration = Duration::from_millis(100);
/// How long a port that turned out to be an iWARP listener is not asked about, when asking it means waiting.
const SILENT_LIFETIME: Duration = Duration::from_secs(60);
/// Such ports that are remembered.
const SILENT_MAX: usize = 64;

/// Where a listener is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// At this TCP or UDP port.
    At(u16),
    /// The port is taken by a program that does not listen yet.
    NotListening,
    /// There is no signpost: at the port of that number, if anywhere.
    Itself,
    /// No answer came. As [`Verdict::Itself`], for a network may drop the question.
    Silent,
}

/// What a question led to.
pub(crate) enum Asked {
    /// The answer was there at once.
    Known(Verdict),
    /// The function is called with it.
    Waiting(Arc<Question>),
}

type Done = Box<dyn FnOnce(Verdict) + Send>;

/// A question that is not answered yet.
pub(crate) struct Question {
    engine: &'static Engine,
    state: Mutex<State>,
}

struct State {
    asking: Option<Asking>,
    token: Token,
    since: Instant,
    done: Option<Done>,
}

/// The socket of a question, and what it has heard.
struct Asking {
    fd: EngineFd,
    port: Port,
    nonce: u64,
    places: [SocketAddr; 2],
    refused: [bool; 2],
    tries: usize,
}

impl Asking {
    fn new(port: Port, to: IpAddr) -> io::Result<Self> {
        let fd = socket::open(to, SocketType::DGRAM)?;
        // What the socket sent and was refused, with the place that refused it.
        let (level, name) = match to {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        set_option(fd.get(), level, name, 1);
        Ok(Self {
            fd,
            port,
            nonce: random_u64(),
            places: port.places().map(|place| SocketAddr::new(to, place)),
            refused: [false; 2],
            tries: 0,
        })
    }

    /// Sends a message to the places that have not refused.
    fn send(&mut self, message: &Message) {
        self.tries += 1;
        for (place, refused) in self.places.iter().zip(&mut self.refused) {
            if *refused {
                continue;
            }
            let bytes = message.emit();
            let send = || rustix::net::sendto(&self.fd, &bytes, SendFlags::NOSIGNAL, place);
            // A refusal of the other place is reported by the next call, which then does nothing else.
            let sent = match send() {
                Err(rustix::io::Errno::CONNREFUSED) => send(),
                other => other,
            };
            match sent {
                // A full buffer: the next try may find room.
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNREFUSED) => {}
                // No route, or a firewall: connecting will fail the same way and say so.
                Err(_) => *refused = true,
            }
        }
    }

    fn refuse(&mut self, port: u16) {
        for (place, refused) in self.places.iter().zip(&mut self.refused) {
            *refused |= place.port() == port;
        }
    }

    /// Takes what has arrived; the answer to this question, if it is among it.
    ///
    /// The sender's address is not compared: a host with several answers with any of them. The random number shows that the
    /// question arrived there.
    fn receive(&mut self) -> Option<Status> {
        for _ in 0..TURN {
            let mut buffer = [0_u8; LEN + 1];
            match rustix::net::recvfrom(&self.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, n, from)) => {
                    let message = Message::parse(buffer.get(..n).unwrap_or(&[]));
                    let Some(Message::Answer(port, nonce, status)) = message else {
                        continue;
                    };
                    if port != self.port || nonce != self.nonce {
                        continue;
                    }
                    if status != Status::Other {
                        return Some(status);
                    }
                    if let Some(from) = from.and_then(|f| SocketAddr::try_from(f).ok()) {
                        self.refuse(from.port());
                    }
                }
                Err(rustix::io::Errno::AGAIN) if !self.take_error() => return None,
                Err(_) => {
                    self.take_error();
                }
            }
        }
        None
    }

    /// Takes one error from the queue of the socket; whether there was one.
    fn take_error(&mut self) -> bool {
        let mut buffer = [0_u8; LEN];
        let flags = RecvFlags::DONTWAIT | RecvFlags::ERRQUEUE;
        // The address is that which the refused datagram was sent to.
        match rustix::net::recvfrom(&self.fd, &mut buffer[..], flags) {
            Ok((_, _, to)) => {
                if let Some(to) = to.and_then(|to| SocketAddr::try_from(to).ok()) {
                    self.refuse(to.port());
                }
                true
            }
            Err(_) => false,
        }
    }

    /// What is known by now.
    fn verdict(&mut self) -> Option<Verdict> {
        match self.receive() {
            Some(Status::Listening(at)) => Some(Verdict::At(at)),
            Some(Status::Bound) => Some(Verdict::NotListening),
            Some(Status::Other | Status::Released) => None,
            None => (self.refused == [true; 2]).then_some(Verdict::Itself),
        }
    }
}

impl std::fmt::Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Question").finish_non_exhaustive()
    }
}

/// Asks `to` where the listener of `port` is. `done` is called without locks, unless the answer is there at once.
pub(crate) fn ask(engine: &'static Engine, port: Port, to: IpAddr, done: Done) -> io::Result<Asked> {
    let to_port = SocketAddr::new(to, port.number);
    if SILENT.get().knows(to_port) {
        return Ok(Asked::Known(Verdict::Itself));
    }
    let mut asking = Asking::new(port, to)?;
    asking.send(&Message::Ask(port, asking.nonce));
    if let Some(verdict) = asking.verdict() {
        return Ok(Asked::Known(verdict));
    }
    let now = clock::now();
    let question = Arc::new(Question {
        engine,
        state: Mutex::new(
            Rank::Question,
            State {
                asking: None,
                token: Token::NONE,
                since: now,
                done: Some(done),
            },
        ),
    });
    let mut state = question.lock();
    let token = engine.reserve(Arc::clone(&question) as Arc<dyn Source>);
    if let Err(e) = engine.watch(token, asking.fd.get(), false) {
        engine.remove(token, None);
        return Err(e);
    }
    state.token = token;
    state.asking = Some(asking);
    let [_, second, ..] = SENT_AT;
    engine.deadline(token, now + second);
    drop(state);
    Ok(Asked::Waiting(question))
}

impl Question {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The answer is not wanted any more.
    pub(crate) fn cancel(&self) {
        drop(self.finish(&mut self.lock()));
    }

    fn finish(&self, state: &mut State) -> Option<Done> {
        let asking = state.asking.take();
        let token = std::mem::replace(&mut state.token, Token::NONE);
        self.engine
            .remove(token, asking.as_ref().map(|a| a.fd.get()));
        state.done.take()
    }

    fn step(&self, step: impl FnOnce(&mut Asking) -> Option<Verdict>) {
        let mut state = self.lock();
        let Some(verdict) = state.asking.as_mut().and_then(step) else {
            return;
        };
        let done = self.finish(&mut state);
        drop(state);
        if let Some(done) = done {
            done(verdict);
        }
    }
}

impl Source for Question {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        self.step(Asking::verdict);
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let (token, since) = {
            let state = self.lock();
            (state.token, state.since)
        };
        self.step(|asking| {
            let due = SENT_AT.get(asking.tries).copied().unwrap_or_default();
            if now >= since + due {
                if asking.tries + 1 >= SENT_AT.len() {
                    return Some(Verdict::Silent);
                }
                asking.send(&Message::Ask(asking.port, asking.nonce));
            }
            let next = SENT_AT.get(asking.tries).copied().unwrap_or_default();
            self.engine.deadline(token, since + next);
            None
        });
    }
}

/// Ports that turned out to be iWARP listeners although nothing answered the question, the oldest first.
#[derive(Debug)]
struct SilentPorts(Mutex<VecDeque<(SocketAddr, Instant)>>);

static SILENT: PerProcess<SilentPorts> =
    PerProcess::new(|| SilentPorts(Mutex::new(Rank::SilentPorts, VecDeque::new())));

impl SilentPorts {
    fn knows(&self, port: SocketAddr) -> bool {
        let mut ports = self.0.lock();
        if ports.is_empty() {
            return false;
        }
        let now = clock::now();
        ports.retain(|(_, at)| now.saturating_duration_since(*at) < SILENT_LIFETIME);
        ports.iter().any(|(known, _)| *known == port)
    }
}

/// Remembers that `port` is an iWARP listener, behind a network that does not answer questions.
pub(crate) fn remember_silent(port: SocketAddr) {
    let mut ports = SILENT.get().0.lock();
    ports.retain(|(known, _)| *known != port);
    if ports.len() >= SILENT_MAX {
        ports.pop_front();
    }
    ports.push_back((port, clock::now()));
}

/// The address of this host that reaches a socket bound to `ip`.
fn reaching(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        _ => ip,
    }
}

/// Sends a message to the signposts of this host for `port`, and waits for an answer for a short time.
fn ask_here(port: Port, to: IpAddr, message: fn(Port, u64) -> Message) -> Option<Status> {
    let mut asking = Asking::new(port, to).ok()?;
    asking.send(&message(port, asking.nonce));
    let until = clock::now() + LOCAL_PATIENCE;
    loop {
        if let Some(status) = asking.receive() {
            return Some(status);
        }
        let left = until.saturating_duration_since(clock::now());
        if asking.refused == [true; 2] || left.is_zero() {
            return None;
        }
        wait_readable(asking.fd.get(), left);
    }
}

/// Whether another process of this host has `port` on an address that conflicts with `ip`.
pub(crate) fn is_taken_here(port: Port, ip: IpAddr) -> bool {
    matches!(
        ask_here(port, reaching(ip), Message::Ask),
        Some(Status::Listening(_) | Status::Bound)
    )
}

/// Asks the other processes of this host to leave the kernel's ports of number `number` to a plain socket bound to `ip`;
/// whether one did.
pub(crate) fn release_elsewhere(space: u16, number: u16, ip: IpAddr) -> bool {
    let port = Port { space, number };
    // A listener on one address hears only what is sent to it.
    let mut addresses = vec![reaching(ip)];
    if ip.is_unspecified() {
        let all = host_addresses().unwrap_or_default();
        addresses.extend([Ipv4Addr::LOCALHOST.into(), IpAddr::from(Ipv6Addr::LOCALHOST)]);
        addresses.extend(all.into_iter().filter(|a| a.up).map(|a| a.ip));
        addresses.dedup();
    }
    let mut released = false;
    for address in addresses {
        released |= ask_here(port, address, Message::Release) == Some(Status::Released);
    }
    released
}

/// Whether `ip` is an address of this host: a socket can be bound to it.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    socket::open(ip, SocketType::DGRAM)
        .is_ok_and(|fd| rustix::net::bind(fd.get(), &SocketAddr::new(ip, 0)).is_ok())
}
