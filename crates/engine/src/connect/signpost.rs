//! Queries for the listener of an rdma_cm port.
//!
//! A listener has a *signpost*: a UDP socket at one of two UDP ports, its *candidates*, that are computed from the rdma_cm
//! port ([`Port::candidate_ports`]). The signpost answers with the listener's TCP or UDP port. The end that connects queries
//! both candidates.
//! A listener uses the first candidate unless it is taken. So an answer from the second candidate counts only if the first one
//! refuses, is the signpost of another port, or has not answered for a while. Otherwise a program could mislead peers
//! by binding the second candidate of a port that is in use.
//!
//! If the listener is on the same host, the answer of a signpost, or the kernel's refusal for a candidate without a socket, usually
//! arrives before `query` returns. If both candidates refuse, there is no signpost, and the TCP port has the same number as the
//! rdma_cm port, as with standard iWARP. Nothing is sent to that port before this is known, because it may belong to a service that
//! does not use RDMA. See docs/decisions/026.

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
use crate::sys::socket::{set_option, wait_readable};

/// The times at which the query is sent, counted from the first one. At the last time the query is not sent again, but counts as
/// unanswered.
const SENT_AT: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(30),
    Duration::from_millis(90),
    Duration::from_millis(200),
    Duration::from_millis(400),
];
/// Largest number of datagrams and errors that are received from the socket of a query in one call.
const RECEIVES_MAX: usize = 16;
/// How long a call waits for the answer of another process of this host.
const LOCAL_TIMEOUT: Duration = Duration::from_millis(100);
/// A call that waits for several answers sleeps on the socket of the first one, and reads the others at this
/// interval.
const LOCAL_CHECK_EVERY: Duration = Duration::from_millis(5);
/// How long a port is not queried again, after it did not answer a query and MPA start-up succeeded at the TCP port of the same
/// number.
const SILENT_LIFETIME: Duration = Duration::from_secs(60);
/// Largest number of such ports that are stored.
const SILENT_MAX: usize = 64;

/// The location of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Location {
    /// On this TCP or UDP port.
    At(u16),
    /// The rdma_cm port is bound by a program that does not listen yet.
    NotListening,
    /// There is no signpost: the listener, if there is one, is on the kernel's port of the same number.
    SamePort,
    /// No answer arrived, perhaps because the network drops the queries. The connection is tried as for
    /// [`Location::SamePort`].
    Unanswered,
}

/// The result of [`query`].
pub(crate) enum QueryResult {
    /// The answer has arrived already.
    Known(Location),
    /// `done` is called with the answer.
    Waiting(Arc<Query>),
}

type Done = Box<dyn FnOnce(Location) + Send>;

/// A query that is not answered yet.
pub(crate) struct Query {
    engine: &'static Engine,
    state: Mutex<State>,
}

struct State {
    query_socket: Option<QuerySocket>,
    token: Token,
    since: Instant,
    done: Option<Done>,
}

/// The socket of a query, and the answers that it has received.
struct QuerySocket {
    fd: EngineFd,
    port: Port,
    nonce: u64,
    candidates: [SocketAddr; 2],
    refused: [bool; 2],
    /// The answer of the second candidate, kept until that of the first is known.
    second: Option<Status>,
    tries: usize,
}

impl QuerySocket {
    fn new(port: Port, to: SocketAddr) -> io::Result<Self> {
        let fd = socket::open(to.ip(), SocketType::DGRAM)?;
        // With this option the kernel reports refused datagrams together with their destination.
        let (level, name) = match to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        set_option(fd.get(), level, name, 1);
        Ok(Self {
            fd,
            port,
            nonce: random_u64(),
            candidates: port
                .candidate_ports()
                .map(|candidate| at_port(to, candidate)),
            refused: [false; 2],
            second: None,
            tries: 0,
        })
    }

    /// Sends a message to the candidates that have not refused.
    fn send(&mut self, message: &Message) {
        self.tries += 1;
        for (candidate, refused) in self.candidates.iter().zip(&mut self.refused) {
            if *refused {
                continue;
            }
            let bytes = message.emit();
            let send = || rustix::net::sendto(&self.fd, &bytes, SendFlags::NOSIGNAL, candidate);
            // A call may report that the other candidate has refused a datagram. Such a call sends nothing, so it is repeated.
            let sent = match send() {
                Err(rustix::io::Errno::CONNREFUSED) => send(),
                other => other,
            };
            match sent {
                // The buffer is full, and the next try may find room.
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNREFUSED) => {}
                // No route, or a firewall: connecting will fail in the same way and report the error.
                Err(_) => *refused = true,
            }
        }
    }

    fn refuse(&mut self, port: u16) {
        for (candidate, refused) in self.candidates.iter().zip(&mut self.refused) {
            *refused |= candidate.port() == port;
        }
    }

    /// Receives datagrams and errors. Returns the answer to this query, if it is known now.
    ///
    /// The sender's address is not compared, because a host with several addresses may answer from any of them. The
    /// random number in the answer shows that the sender has received the query.
    fn receive(&mut self) -> Option<Status> {
        self.take_datagrams().or_else(|| {
            let [first, _] = self.refused;
            self.second.filter(|_| first)
        })
    }

    /// Receives datagrams. Returns the answer of the first candidate, if it is among them.
    fn take_datagrams(&mut self) -> Option<Status> {
        for _ in 0..RECEIVES_MAX {
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
                    let from = from.and_then(|f| SocketAddr::try_from(f).ok());
                    let from = from.map_or(0, |f| f.port());
                    let [first, _] = self.candidates;
                    if status == Status::Other {
                        self.refuse(from);
                    } else if from == first.port() {
                        return Some(status);
                    } else {
                        self.second = Some(status);
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

    /// Receives one error from the queue of the socket. Returns whether there was one.
    fn take_error(&mut self) -> bool {
        let mut buffer = [0_u8; LEN];
        let flags = RecvFlags::DONTWAIT | RecvFlags::ERRQUEUE;
        // The address is the destination of the refused datagram.
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

    /// Returns the location of the listener, if the answers so far determine it.
    fn location(&mut self) -> Option<Location> {
        match self.receive() {
            Some(status) => location_of(status),
            None => (self.refused == [true; 2]).then_some(Location::SamePort),
        }
    }
}

fn location_of(status: Status) -> Option<Location> {
    match status {
        Status::Listening(at) => Some(Location::At(at)),
        Status::Bound => Some(Location::NotListening),
        Status::Other | Status::Released => None,
    }
}

impl std::fmt::Debug for Query {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Query").finish_non_exhaustive()
    }
}

/// Queries the host of `to` for the listener of `port`, the port of `to`. Returns the answer if it is already available.
/// Otherwise calls `done` with it later, without holding locks.
pub(crate) fn query(
    engine: &'static Engine,
    port: Port,
    to: SocketAddr,
    done: Done,
) -> io::Result<QueryResult> {
    if SILENT.get().knows(to) {
        return Ok(QueryResult::Known(Location::SamePort));
    }
    let mut query_socket = QuerySocket::new(port, to)?;
    query_socket.send(&Message::Ask(port, query_socket.nonce));
    if let Some(location) = query_socket.location() {
        return Ok(QueryResult::Known(location));
    }
    let now = clock::now();
    let query = Arc::new(Query {
        engine,
        state: Mutex::new(
            Rank::Query,
            State {
                query_socket: None,
                token: Token::NONE,
                since: now,
                done: Some(done),
            },
        ),
    });
    let mut state = query.lock();
    let token = engine.reserve(Arc::clone(&query) as Arc<dyn Source>);
    if let Err(e) = engine.watch(token, query_socket.fd.get(), false) {
        engine.remove(token, None);
        return Err(e);
    }
    state.token = token;
    state.query_socket = Some(query_socket);
    let [_, second, ..] = SENT_AT;
    engine.deadline(token, now + second);
    drop(state);
    Ok(QueryResult::Waiting(query))
}

impl Query {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Cancels the query.
    pub(crate) fn cancel(&self) {
        drop(self.finish(&mut self.lock()));
    }

    fn finish(&self, state: &mut State) -> Option<Done> {
        let query_socket = state.query_socket.take();
        let token = std::mem::replace(&mut state.token, Token::NONE);
        self.engine
            .remove(token, query_socket.as_ref().map(|a| a.fd.get()));
        state.done.take()
    }

    fn step(&self, step: impl FnOnce(&mut QuerySocket) -> Option<Location>) {
        let mut state = self.lock();
        let Some(location) = state.query_socket.as_mut().and_then(step) else {
            return;
        };
        let done = self.finish(&mut state);
        drop(state);
        if let Some(done) = done {
            done(location);
        }
    }
}

impl Source for Query {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        self.step(QuerySocket::location);
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let (token, since) = {
            let state = self.lock();
            (state.token, state.since)
        };
        self.step(|query_socket| {
            let due = SENT_AT.get(query_socket.tries).copied().unwrap_or_default();
            if now >= since + due {
                if let Some(location) = query_socket.second.and_then(location_of) {
                    return Some(location);
                }
                if query_socket.tries + 1 >= SENT_AT.len() {
                    return Some(Location::Unanswered);
                }
                query_socket.send(&Message::Ask(query_socket.port, query_socket.nonce));
            }
            let next = SENT_AT.get(query_socket.tries).copied().unwrap_or_default();
            self.engine.deadline(token, since + next);
            None
        });
    }
}

/// Ports that did not answer a query although MPA start-up succeeded at the TCP port of the same number, the oldest first.
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

/// Stores that `port` did not answer a query, although MPA start-up succeeded at the TCP port of the same number.
pub(crate) fn remember_silent(port: SocketAddr) {
    let mut ports = SILENT.get().0.lock();
    ports.retain(|(known, _)| *known != port);
    if ports.len() >= SILENT_MAX {
        ports.pop_front();
    }
    ports.push_back((port, clock::now()));
}

/// The address with another port. A link-local address keeps its interface.
fn at_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

fn loopback(like: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match like {
        SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, 0)
}

/// Waits a short time for answers of this host. Returns whether there was one for which `is_wanted` returns true.
fn wait_for_answers(mut waiting: Vec<QuerySocket>, is_wanted: impl Fn(Status) -> bool) -> bool {
    let until = clock::now() + LOCAL_TIMEOUT;
    loop {
        let is_over = clock::now() >= until;
        let mut found = false;
        waiting.retain_mut(|query_socket| {
            let last = query_socket.second.filter(|_| is_over);
            let status = query_socket.receive().or(last);
            found |= status.is_some_and(&is_wanted);
            status.is_none() && query_socket.refused != [true; 2]
        });
        let Some(first) = waiting.first().filter(|_| !is_over) else {
            return found;
        };
        wait_readable(first.fd.get(), LOCAL_CHECK_EVERY);
    }
}

/// Whether `candidate`, one of the candidates of `port`, has a signpost of `port`, at one of the addresses `at` of this host.
pub(crate) fn is_taken_here(port: Port, candidate: u16, at: &[SocketAddr]) -> bool {
    let mut waiting = Vec::new();
    for to in at {
        let Ok(mut query_socket) = QuerySocket::new(port, *to) else {
            continue;
        };
        for (known, refused) in query_socket
            .candidates
            .iter()
            .zip(&mut query_socket.refused)
        {
            *refused = known.port() != candidate;
        }
        query_socket.send(&Message::Ask(port, query_socket.nonce));
        waiting.push(query_socket);
    }
    wait_for_answers(waiting, |status| {
        matches!(status, Status::Listening(_) | Status::Bound)
    })
}

/// Requests that other processes of this host release the kernel's ports of these numbers for a plain socket. Returns
/// whether one did. `at` contains the addresses of this host to which the requests are sent.
pub(crate) fn release_elsewhere(ports: [Port; 2], at: &[SocketAddr]) -> bool {
    let mut waiting = Vec::new();
    for (port, to) in ports
        .iter()
        .flat_map(|p| at.iter().map(move |to| (*p, *to)))
    {
        let Ok(mut query_socket) = QuerySocket::new(port, to) else {
            continue;
        };
        // Listeners accept such requests only from a loopback address.
        if rustix::net::bind(query_socket.fd.get(), &loopback(to)).is_ok() {
            query_socket.send(&Message::Release(port, query_socket.nonce));
            waiting.push(query_socket);
        }
    }
    wait_for_answers(waiting, |status| status == Status::Released)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    const PORT: Port = Port {
        space: 0x0106,
        number: 7471,
    };

    /// A query to two sockets of the test, instead of those that follow from the port.
    fn query_socket() -> (QuerySocket, [UdpSocket; 2]) {
        let at = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut query_socket = QuerySocket::new(PORT, (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        query_socket.candidates = [0, 1].map(|n: usize| at[n].local_addr().unwrap());
        query_socket.send(&Message::Ask(PORT, query_socket.nonce));
        (query_socket, at)
    }

    /// Answers the query that has arrived.
    fn answer(socket: &UdpSocket, status: Status) {
        let mut buffer = [0; 64];
        let (n, from) = socket.recv_from(&mut buffer).unwrap();
        let Some(Message::Ask(port, nonce)) = Message::parse(&buffer[..n]) else {
            panic!("not a query");
        };
        let answer = Message::Answer(port, nonce, status).emit();
        socket.send_to(&answer, from).unwrap();
    }

    #[test]
    fn the_first_place_precedes_the_second() {
        let (mut query_socket, [first, second]) = query_socket();
        answer(&second, Status::Listening(4000));
        assert_eq!(
            query_socket.location(),
            None,
            "the first candidate may still answer"
        );
        answer(&first, Status::Listening(5000));
        assert_eq!(query_socket.location(), Some(Location::At(5000)));
    }

    #[test]
    fn the_second_place_counts_when_the_first_is_of_another_port() {
        let (mut query_socket, [first, second]) = query_socket();
        answer(&second, Status::Bound);
        answer(&first, Status::Other);
        assert_eq!(query_socket.location(), Some(Location::NotListening));
    }

    #[test]
    fn the_second_place_counts_when_the_first_refuses() {
        let (mut query_socket, [first, second]) = query_socket();
        drop(first);
        query_socket.send(&Message::Ask(PORT, query_socket.nonce));
        answer(&second, Status::Listening(4000));
        assert_eq!(query_socket.location(), Some(Location::At(4000)));
    }

    #[test]
    fn two_refusals_mean_the_port_itself() {
        let (mut query_socket, sockets) = query_socket();
        drop(sockets);
        query_socket.send(&Message::Ask(PORT, query_socket.nonce));
        assert_eq!(query_socket.location(), Some(Location::SamePort));
    }
}
