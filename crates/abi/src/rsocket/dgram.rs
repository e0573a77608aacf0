//! Datagram sockets: a UD queue pair, and requests of the connection manager (SIDR) that resolve a port to a queue pair.
//!
//! A bound socket listens at its UDP port for such requests, and the thread that handles the device's sockets answers them.
//! The first datagram to a port makes the socket request the queue pair of that port. Datagrams to the port are queued until
//! the answer arrives, and dropped if none arrives. Another socket may get the port, so after a while the next datagram repeats
//! the request; the old answer is used until the new one arrives.
//!
//! A server replies to the port that a datagram names as its source, which any host can choose freely. Requests for such a port may never be
//! answered. So the number of requests is limited, in all and for each host, and the number of queued datagrams, in all and for each port. A
//! request that stays unanswered makes room for others.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Kind as Service, host_of};
use anywarp_core::error::Misuse;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State as QpState};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Destination, Op, Payload, RecvRequest, WorkRequest};
use anywarp_engine::cm::{CmId, ConnParam, Event, EventChannel, EventKind, PortSpace};
use anywarp_engine::dgram::DgramQp;
use anywarp_engine::limits;

use super::address::unspecified;
use super::again::Refused;
use super::buffer::{Buffer, Caller};
use super::wire::{DATAGRAM_HEADER, datagram_header, datagram_port};
use super::{Kind, Socket};
use crate::ffi::{misuse, os_errno};
use anywarp_verbs_sys::cm::RDMA_UDP_QKEY;

/// The largest payload of a datagram in bytes.
pub(super) const PAYLOAD_MAX: usize = bounds::UD_MTU as usize - DATAGRAM_HEADER;
/// The length in bytes of the route header (GRH) before a received datagram.
const ROUTE: usize = bounds::GRH_LEN as usize;
/// The size in bytes of a slot for a received datagram.
const IN: usize = 4160;
/// The size in bytes of a slot for a datagram to send.
const OUT: usize = 4096;
/// The number of slots for datagrams to send: those that are queued until an answer arrives, and at least as many others.
const SENDS: u32 = 512;
/// The largest number of datagrams that are queued until answers arrive.
const WAITING: usize = SENDS as usize / 2;
/// The largest number of datagrams that are queued for one peer.
const WAITING_FOR_PEER: usize = 32;
/// The number of slots for received datagrams is the value of `SO_RCVBUF` divided by this, within [`RECEIVES`].
const BUFFER_PER_SLOT: usize = 1024;
/// The smallest and the largest number of slots for received datagrams.
const RECEIVES: std::ops::RangeInclusive<usize> = 64..=1024;
/// The largest number of peers whose queue pairs a socket caches.
const PEERS: usize = 1024;
/// The time after which the request for a known queue pair is repeated.
const ANSWER_VALID: Duration = Duration::from_secs(1);
/// The largest number of unanswered requests of a socket. Each uses two descriptors, so a process that may open few descriptors is
/// permitted fewer requests.
const ASKED: usize = 64;
/// The permitted number of unanswered requests to one host is the permitted number of all requests divided by this.
const HOST_SHARE: usize = 8;
/// The time after which an unanswered request makes room for another one, if there are as many as permitted. It is longer than two
/// intervals between the tries of a request.
const PATIENCE: Duration = Duration::from_millis(250);
/// The bit of a `wr_id` that marks a receive.
const RECEIVE: u64 = 1 << 63;
/// The largest number of requests of peers for this socket's queue pair that are not answered yet.
const REQUESTS_MAX: c_int = 1024;

/// A peer whose queue pair is known.
struct Peer {
    destination: Destination,
    since: Instant,
}

/// A request for the queue pair of a peer.
struct Request {
    id: Arc<CmId>,
    since: Instant,
}

/// A datagram that is queued until an answer arrives.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    to: SocketAddr,
    slot: u32,
    len: usize,
}

/// A datagram that has arrived.
#[derive(Debug, Clone, Copy)]
struct Arrived {
    slot: u32,
    len: usize,
    from: SocketAddr,
}

/// A queue pair with its memory.
struct End {
    qp: Arc<DgramQp>,
    cq: Arc<Cq>,
    incoming: Buffer,
    outgoing: Buffer,
    /// Free slots for datagrams to send.
    free: Vec<u32>,
    arrived: VecDeque<Arrived>,
    refused: Refused,
}

/// A datagram socket.
pub(super) struct Datagrams {
    closed: bool,
    id: Arc<CmId>,
    end: Option<End>,
    peers: HashMap<SocketAddr, Peer>,
    /// The unanswered requests.
    requests: HashMap<SocketAddr, Request>,
    /// The datagrams to peers whose queue pairs are not known, the oldest first. There may be no request for a peer yet, because too
    /// many others are unanswered.
    waiting: VecDeque<Waiting>,
    /// When the engine calls [`Self::step`], which then requests the queue pairs of further peers.
    asks_at: Option<Instant>,
    /// The peer set by `rconnect`.
    to: Option<SocketAddr>,
    /// The local address for datagrams to that peer.
    source: Option<IpAddr>,
    error: c_int,
}

/// A received datagram for the caller.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReceivedDatagram {
    /// The number of copied bytes.
    pub(super) copied: usize,
    /// The full length of the datagram.
    pub(super) len: usize,
    pub(super) from: SocketAddr,
}

impl End {
    fn new(socket: &Socket) -> Result<Self, c_int> {
        let device = socket.device;
        let (engine, pd) = (device.context.engine, &device.pd);
        let room = socket.options().recv_buffer / BUFFER_PER_SLOT;
        let receives = room.clamp(*RECEIVES.start(), *RECEIVES.end());
        let failed = |e: std::io::Error| os_errno(&e);
        let incoming = Buffer::new(engine, pd, receives * IN, false).map_err(failed)?;
        let outgoing = Buffer::new(engine, pd, SENDS as usize * OUT, false).map_err(failed)?;
        let receives = u32::try_from(receives).unwrap_or(0);
        let capacity = Capacity {
            max_send_wr: SENDS,
            max_recv_wr: receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let cq = Arc::new(Cq::new((SENDS + receives) as usize, Some(socket.notify())));
        let parts = |qpn| Parts {
            rnic: Arc::clone(&engine.rnic),
            qpn,
            pd: pd.id(),
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            rq: RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: receives,
                max_sge: 1,
            },
            capacity,
            sig_all: true,
        };
        let qp = DgramQp::new(
            &device.context,
            None,
            Service::Ud,
            Options::default(),
            parts,
        )
        .map_err(failed)?;
        qp.with_attr(|attr| attr.qkey = RDMA_UDP_QKEY);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.set_state(state);
        }
        let end = Self {
            qp,
            cq,
            incoming,
            outgoing,
            free: (0..SENDS).collect(),
            arrived: VecDeque::new(),
            refused: Refused::default(),
        };
        end.post_receives(0..receives)
            .map_err(|(_, e)| misuse("rsocket", &e))?;
        Ok(end)
    }

    fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), (usize, Misuse)> {
        let requests = slots.map(|slot| {
            Ok(RecvRequest {
                id: RECEIVE | u64::from(slot),
                sges: [self.incoming.sge(slot as usize * IN, IN)]
                    .into_iter()
                    .collect(),
            })
        });
        self.qp.post_recv(requests)
    }

    /// Posts the receives of free slots again, and those that could not be posted before.
    fn repost(&mut self, again: impl IntoIterator<Item = u32>) {
        let mut refused = std::mem::take(&mut self.refused);
        refused.post(again, |all| self.post_receives(all.iter().copied()));
        self.refused = refused;
    }

    /// Sends the datagram in a slot. The slot becomes free when the request has completed.
    fn post(&mut self, slot: u32, len: usize, to: Destination) -> Result<(), c_int> {
        let sge = self.outgoing.sge(slot as usize * OUT, len);
        let request = WorkRequest {
            id: slot.into(),
            op: Op::Send {
                imm: None,
                invalidate: None,
            },
            payload: Payload::Sges([sge].into_iter().collect()),
            signaled: true,
            solicited: false,
            ack_later: false,
            fence: false,
            destination: Some(to),
            srq: None,
        };
        let posted = self.qp.post_send(std::iter::once(Ok(request)));
        posted.map_err(|(_, e)| {
            self.free.push(slot);
            misuse("rsocket", &e)
        })
    }

    /// Handles all completions. If `only` is given, datagrams from other senders are dropped.
    fn poll(&mut self, only: Option<SocketAddr>) {
        let mut done: Vec<Completion> = Vec::new();
        while self.cq.poll(64, |_, c| done.push(c.clone())) > 0 {
            let mut again = Vec::new();
            for c in done.drain(..) {
                if c.wr_id & RECEIVE == 0 {
                    self.free.push(c.wr_id as u32);
                    continue;
                }
                let slot = c.wr_id as u32;
                match self.arrived_datagram(slot, &c) {
                    Some(arrived) if only.is_none_or(|o| o == arrived.from) => {
                        self.arrived.push_back(arrived);
                    }
                    _ if c.status == Status::Success => again.push(slot),
                    _ => {}
                }
            }
            self.repost(again);
        }
        self.repost([]);
    }

    /// Returns the datagram in a slot, if a datagram socket sent it.
    fn arrived_datagram(&self, slot: u32, c: &Completion) -> Option<Arrived> {
        if c.status != Status::Success {
            return None;
        }
        let len = (c.byte_len as usize).checked_sub(ROUTE + DATAGRAM_HEADER)?;
        let at = slot as usize * IN;
        let route: [u8; ROUTE] = self.incoming.load(at);
        let port = datagram_port(self.incoming.load(at + ROUTE))?;
        let from = SocketAddr::new(source_of(&route, c.sl)?, port);
        Some(Arrived { slot, len, from })
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // The queue pair is destroyed before its memory is released.
        self.qp.destroy();
    }
}

/// Returns the source address in a route header. `kind` is the value of [`Completion::sl`], whose low bits tell IPv6 from IPv4.
fn source_of(route: &[u8; ROUTE], kind: u8) -> Option<IpAddr> {
    let bytes = |at: usize| route.get(at..);
    if kind & 3 == 1 {
        let ip: &[u8; 16] = bytes(8)?.first_chunk()?;
        return Some(Ipv6Addr::from(*ip).to_canonical());
    }
    let ip: &[u8; 4] = bytes(32)?.first_chunk()?;
    Some(Ipv4Addr::from(*ip).into())
}

/// Returns the canonical form of an address, which is the key of a peer.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

impl Datagrams {
    /// The state of a new socket, whose connection manager events go to `channel`.
    pub(super) fn new(channel: &Arc<EventChannel>) -> Result<Self, c_int> {
        Ok(Self {
            closed: false,
            id: identifier(channel)?,
            end: None,
            peers: HashMap::new(),
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            asks_at: None,
            to: None,
            source: None,
            error: 0,
        })
    }

    /// Binds to an address, and from now on answers requests for the queue pair there.
    pub(super) fn bind(&mut self, socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
        if self.closed {
            return Err(libc::EBADF);
        }
        if self.end.is_some() {
            return Err(libc::EINVAL);
        }
        let end = End::new(socket)?;
        // If a step fails, the socket keeps its identifier, which is not bound, so the program may try again.
        let id = identifier(&socket.channel)?;
        let bound = id.bind(to).and_then(|()| id.listen(REQUESTS_MAX));
        if let Err(e) = bound {
            id.destroy();
            return Err(os_errno(&e));
        }
        std::mem::replace(&mut self.id, id).destroy();
        self.end = Some(end);
        Ok(())
    }

    /// Binds to any free port, unless the socket is bound already.
    fn start(&mut self, socket: &Socket) -> Result<(), c_int> {
        if self.end.is_none() {
            self.bind(socket, unspecified(socket.domain))?;
        }
        Ok(())
    }

    /// Sets the peer of the socket, or removes it.
    pub(super) fn connect(&mut self, socket: &Socket, to: Option<SocketAddr>) -> Result<(), c_int> {
        let Some(to) = to.map(plain) else {
            (self.to, self.source) = (None, None);
            return Ok(());
        };
        self.start(socket)?;
        // This may fail. The socket then keeps its peer.
        self.ask(socket, to)?;
        self.to = Some(to);
        self.source = None;
        if let Some(end) = &mut self.end {
            // Datagrams that arrived from other senders are dropped.
            let others: Vec<u32> = end
                .arrived
                .iter()
                .filter(|a| a.from != to)
                .map(|a| a.slot)
                .collect();
            end.arrived.retain(|a| a.from == to);
            end.repost(others);
        }
        let request = self.requests.get(&to);
        self.source = request.and_then(|r| r.id.local()).map(|a| a.ip());
        Ok(())
    }

    /// Returns the peer set by `rconnect`.
    pub(super) fn remote(&self) -> Option<SocketAddr> {
        self.to
    }

    /// Returns the local address.
    pub(super) fn local(&self) -> Option<SocketAddr> {
        let local = self.id.local()?;
        Some(match self.source {
            Some(ip) if local.ip().is_unspecified() => SocketAddr::new(ip, local.port()),
            _ => local,
        })
    }

    /// Returns and clears the pending error.
    pub(super) fn take_error(&mut self) -> c_int {
        std::mem::take(&mut self.error)
    }

    /// Requests the queue pair of a peer, unless a request is outstanding.
    fn ask(&mut self, socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
        if self.requests.contains_key(&to) {
            return Ok(());
        }
        let id = identifier(&socket.channel)?;
        let failed = |e: std::io::Error| os_errno(&e);
        id.resolve_addr(None, to).map_err(failed)?;
        // Resolving an address does not block: the result is in the channel at once.
        let mut unreachable = 0;
        let mut rest = Vec::new();
        while let Some(event) = socket.next_event() {
            if Arc::ptr_eq(&event.id, &id) && event.kind == EventKind::AddrError {
                unreachable = -event.status;
            }
            rest.push(event);
        }
        for event in rest {
            self.event(&event);
        }
        if unreachable != 0 {
            id.destroy();
            return Err(unreachable);
        }
        id.resolve_route().map_err(failed)?;
        id.connect(ConnParam::default()).map_err(failed)?;
        let since = Instant::now();
        self.requests.insert(to, Request { id, since });
        Ok(())
    }

    /// Returns whether the queue pair of a peer may be requested now. If there are as many requests as permitted, in all or for the
    /// peer's host, the oldest of them makes room if it has waited long enough.
    fn may_ask(&mut self, to: SocketAddr) -> bool {
        let most = limits::peer_descriptors() / 4;
        let most = most.clamp(HOST_SHARE, ASKED);
        let now = Instant::now();
        for (most, host) in [(most / HOST_SHARE, Some(host_of(to.ip()))), (most, None)] {
            let counted = || {
                let is_counted =
                    move |at: &SocketAddr| host.is_none_or(|host| host == host_of(at.ip()));
                self.requests.iter().filter(move |(at, _)| is_counted(at))
            };
            if counted().count() < most {
                continue;
            }
            let oldest = counted().min_by_key(|(_, r)| r.since);
            let oldest = oldest.filter(|(_, r)| now.duration_since(r.since) >= PATIENCE);
            let Some((&oldest, _)) = oldest else {
                return false;
            };
            self.give_up(oldest);
        }
        true
    }

    /// Requests the queue pairs of peers for which datagrams wait, as many as permitted.
    fn ask_next(&mut self, socket: &Socket) {
        let mut refused: Vec<IpAddr> = Vec::new();
        while let Some(to) = self
            .waiting
            .iter()
            .map(|w| w.to)
            .find(|to| !refused.contains(&host_of(to.ip())) && !self.requests.contains_key(to))
        {
            if !self.may_ask(to) {
                refused.push(host_of(to.ip()));
            } else if self.ask(socket, to).is_err() {
                self.give_up(to);
            }
        }
        if !refused.is_empty() {
            self.ask_later(socket);
        }
    }

    /// Makes the engine call [`Self::step`] when the next request has waited long enough to make room for another one.
    fn ask_later(&mut self, socket: &Socket) {
        let now = Instant::now();
        let times = self.requests.values().map(|r| r.since + PATIENCE);
        let next = times.filter(|at| *at > now).min().unwrap_or(now + PATIENCE);
        if self.asks_at.is_none_or(|at| at <= now || next < at) {
            self.asks_at = Some(next);
            socket.engine().deadline(*socket.token(), next);
        }
    }

    /// Ends the request for the queue pair of a peer, and drops the datagrams that wait for the answer.
    fn give_up(&mut self, to: SocketAddr) {
        if let Some(request) = self.requests.remove(&to) {
            request.id.destroy();
        }
        for waiting in self.take_waiting(to) {
            self.drop_datagram(waiting);
        }
    }

    /// Takes the datagrams that wait for an answer of a peer.
    fn take_waiting(&mut self, to: SocketAddr) -> VecDeque<Waiting> {
        let (taken, rest) = self.waiting.drain(..).partition(|w| w.to == to);
        self.waiting = rest;
        taken
    }

    fn drop_datagram(&mut self, datagram: Waiting) {
        if let Some(end) = &mut self.end {
            end.free.push(datagram.slot);
        }
    }

    /// Queues a datagram until the answer of its peer arrives. If there are too many to the peer, the oldest of them is dropped; if
    /// there are too many in all, the oldest to the host that has the most.
    fn queue(&mut self, datagram: Waiting) {
        self.waiting.push_back(datagram);
        let to_peer = |w: &Waiting| w.to == datagram.to;
        let lost = if self.waiting.iter().filter(|w| to_peer(w)).count() > WAITING_FOR_PEER {
            self.waiting.iter().position(to_peer)
        } else if self.waiting.len() > WAITING {
            let mut counts: HashMap<IpAddr, usize> = HashMap::new();
            for w in &self.waiting {
                *counts.entry(host_of(w.to.ip())).or_default() += 1;
            }
            let most = counts.values().max().copied();
            let is_lost = |w: &Waiting| counts.get(&host_of(w.to.ip())).copied() == most;
            self.waiting.iter().position(is_lost)
        } else {
            None
        };
        if let Some(lost) = lost.and_then(|at| self.waiting.remove(at)) {
            self.drop_datagram(lost);
        }
    }

    /// Handles new requests, new answers and new completions.
    pub(super) fn step(&mut self, socket: &Socket) {
        if self.closed {
            return;
        }
        while let Some(event) = socket.next_event() {
            self.event(&event);
        }
        self.ask_next(socket);
        if let Some(end) = &mut self.end {
            end.poll(self.to);
        }
    }

    fn event(&mut self, event: &Event) {
        match event.kind {
            EventKind::ConnectRequest => {
                event.id.c_object.store(1, Ordering::Release);
                if let Some(end) = &self.end {
                    let param = ConnParam {
                        qp_num: end.qp.number(),
                        ..ConnParam::default()
                    };
                    // If the answer cannot be sent, the peer repeats its request.
                    let _ = event.id.accept(param);
                }
                event.id.destroy();
            }
            EventKind::Established => self.answered(event),
            EventKind::Unreachable => {
                if let Some(to) = self.asked(&event.id) {
                    self.peers.remove(&to);
                    self.give_up(to);
                    if self.to == Some(to) {
                        self.error = libc::ECONNREFUSED;
                    }
                }
            }
            EventKind::DeviceRemoval => self.error = libc::EIO,
            _ => {}
        }
    }

    /// Returns the peer whose queue pair an identifier requests.
    fn asked(&self, id: &Arc<CmId>) -> Option<SocketAddr> {
        let mut requests = self.requests.iter();
        requests
            .find(|(_, r)| Arc::ptr_eq(&r.id, id))
            .map(|(to, _)| *to)
    }

    /// Handles an answer: sends the datagrams that were queued for it.
    fn answered(&mut self, event: &Event) {
        let (Some(to), Some(answer)) = (self.asked(&event.id), event.peer) else {
            return;
        };
        // The datagrams get the source address that the socket is bound to, because the peer may be connected to that address.
        let bound = self.id.local().map(|a| a.ip().to_canonical());
        let destination = Destination {
            addr: answer.addr,
            source: bound.filter(|ip| !ip.is_unspecified() && ip.is_ipv4() == to.is_ipv4()),
            qpn: answer.qpn,
            qkey: answer.qkey,
            hop_limit: 0,
            traffic_class: 0,
        };
        if self.peers.len() >= PEERS && !self.peers.contains_key(&to) {
            // The peer with the oldest answer makes room.
            let oldest = self.peers.iter().min_by_key(|(_, p)| p.since);
            if let Some(oldest) = oldest.map(|(to, _)| *to) {
                self.peers.remove(&oldest);
            }
        }
        let since = Instant::now();
        self.peers.insert(to, Peer { destination, since });
        if let Some(request) = self.requests.remove(&to) {
            request.id.destroy();
        }
        let waiting = self.take_waiting(to);
        if let Some(end) = &mut self.end {
            for Waiting { slot, len, .. } in waiting {
                let _lost = end.post(slot, len, destination);
            }
        }
    }

    /// Sends a datagram. Returns `None` if the caller has to wait.
    fn send(
        &mut self,
        socket: &Socket,
        from: &Caller,
        to: SocketAddr,
    ) -> Option<Result<usize, c_int>> {
        if self.closed {
            return Some(Err(libc::EBADF));
        }
        if self.error != 0 {
            return Some(Err(self.take_error()));
        }
        if let Err(e) = self.start(socket) {
            return Some(Err(e));
        }
        let now = Instant::now();
        let fresh = |p: &Peer| now.duration_since(p.since) < ANSWER_VALID;
        if !self.peers.get(&to).is_some_and(fresh) && !self.requests.contains_key(&to) {
            if !self.may_ask(to) {
                self.ask_later(socket);
            } else if let Err(e) = self.ask(socket, to) {
                return Some(Err(e));
            }
        }
        let port = self.id.local().map_or(0, |a| a.port());
        let end = self.end.as_mut()?;
        let slot = end.free.pop()?;
        let (at, len) = (slot as usize * OUT, DATAGRAM_HEADER + from.len());
        let header = datagram_header(to.is_ipv6(), port);
        end.outgoing.store(at, &header);
        let body = [(at + DATAGRAM_HEADER, from.len()), (0, 0)];
        end.outgoing.fill(body, from, 0);
        match self.peers.get(&to) {
            Some(peer) => {
                if let Err(e) = end.post(slot, len, peer.destination) {
                    return Some(Err(e));
                }
            }
            None => self.queue(Waiting { to, slot, len }),
        }
        Some(Ok(from.len()))
    }

    /// Receives a datagram. Returns `None` if there is none.
    fn receive(&mut self, to: &Caller, peek: bool) -> Option<Result<ReceivedDatagram, c_int>> {
        if self.closed {
            return Some(Err(libc::EBADF));
        }
        if self.error != 0 {
            return Some(Err(self.take_error()));
        }
        let end = self.end.as_mut()?;
        let arrived = *end.arrived.front()?;
        let copied = arrived.len.min(to.len());
        let at = arrived.slot as usize * IN + ROUTE + DATAGRAM_HEADER;
        end.incoming.drain([(at, copied), (0, 0)], to, 0);
        if !peek {
            end.arrived.pop_front();
            end.repost([arrived.slot]);
        }
        Some(Ok(ReceivedDatagram {
            copied,
            len: arrived.len,
            from: arrived.from,
        }))
    }

    /// Returns the events that `poll(2)` would return for this socket.
    pub(super) fn readiness(&self) -> i16 {
        if self.closed {
            return libc::POLLNVAL;
        }
        let mut ready = 0;
        let (arrived, full) = self.end.as_ref().map_or((false, false), |e| {
            (!e.arrived.is_empty(), e.free.is_empty())
        });
        if arrived || self.error != 0 {
            ready |= libc::POLLIN | libc::POLLRDNORM;
        }
        if !full {
            ready |= libc::POLLOUT | libc::POLLWRNORM;
        }
        if self.error != 0 {
            ready |= libc::POLLERR;
        }
        ready
    }

    /// Requests a notification of the next completion.
    pub(super) fn arm(&self) {
        if let Some(end) = &self.end {
            end.cq.arm(false);
        }
    }

    /// Closes the socket without waiting.
    pub(super) fn abandon(&mut self) {
        self.closed = true;
        for (_, request) in self.requests.drain() {
            request.id.destroy();
        }
        drop(self.end.take());
        self.id.destroy();
    }
}

fn identifier(channel: &Arc<EventChannel>) -> Result<Arc<CmId>, c_int> {
    let id = CmId::new(channel, PortSpace::Udp).map_err(|e| os_errno(&e))?;
    // A nonzero `c_object` subscribes the identifier to the event of a broken device.
    id.c_object.store(1, Ordering::Release);
    Ok(id)
}

// ---------------------------------------------------------------------- calls

fn state(socket: &Socket) -> Result<MutexGuard<'_, Datagrams>, c_int> {
    match &socket.kind {
        Kind::Datagrams(state) => Ok(state.lock()),
        Kind::Stream(_) => Err(libc::EOPNOTSUPP),
    }
}

/// `rbind`.
pub(super) fn bind(socket: &Socket, to: SocketAddr) -> Result<(), c_int> {
    state(socket)?.bind(socket, to)
}

/// `rconnect`. `None` disconnects the socket.
pub(super) fn connect(socket: &Socket, to: Option<SocketAddr>) -> Result<(), c_int> {
    state(socket)?.connect(socket, to)
}

/// `rsendto`, or `rsend` to the peer set by `rconnect`.
pub(super) fn send(
    socket: &Socket,
    from: &Caller,
    to: Option<SocketAddr>,
    flags: c_int,
) -> Result<usize, c_int> {
    if from.len() > PAYLOAD_MAX {
        return Err(libc::EMSGSIZE);
    }
    let to = match to {
        Some(to) => plain(to),
        None => state(socket)?.to.ok_or(libc::EDESTADDRREQ)?,
    };
    let limit = socket.wait_limit(flags, socket.options().send_timeout);
    socket.block(limit, |arm| {
        let mut state = match state(socket) {
            Ok(state) => state,
            Err(e) => return Some(Err(e)),
        };
        if arm {
            state.arm();
        }
        state.step(socket);
        state.send(socket, from, to)
    })
}

/// `rrecvfrom`.
pub(super) fn receive(
    socket: &Socket,
    to: &Caller,
    flags: c_int,
) -> Result<ReceivedDatagram, c_int> {
    let limit = socket.wait_limit(flags, socket.options().recv_timeout);
    let peek = flags & libc::MSG_PEEK != 0;
    socket.block(limit, |arm| {
        let mut state = match state(socket) {
            Ok(state) => state,
            Err(e) => return Some(Err(e)),
        };
        if arm {
            state.arm();
        }
        state.step(socket);
        state.receive(to, peek)
    })
}

#[cfg(test)]
mod tests {
    use super::super::RegisteredWaker;
    use super::super::options::Options as SocketOptions;
    use super::super::wait::Waker;
    use super::*;
    use anywarp_core::lock::Mutex;

    fn socket() -> Arc<Socket> {
        let mut options = SocketOptions::fresh();
        options.recv_timeout = Some(Duration::from_secs(10));
        let made = Socket::make(libc::AF_INET, options, |channel| {
            let state = Datagrams::new(channel)?;
            Ok(Kind::Datagrams(Box::new(Mutex::new(state))))
        });
        made.unwrap()
    }

    fn send_to(socket: &Socket, bytes: &[u8], to: Option<SocketAddr>) {
        // SAFETY: the object is live until the call returns.
        let from = unsafe { Caller::new(bytes.as_ptr(), bytes.len()) };
        assert_eq!(send(socket, &from, to, 0), Ok(bytes.len()));
    }

    fn receive_from(socket: &Socket) -> Result<(Vec<u8>, SocketAddr), c_int> {
        let mut bytes = vec![0_u8; 100];
        // SAFETY: the object is live until the call returns.
        let to = unsafe { Caller::new(bytes.as_mut_ptr(), bytes.len()) };
        let got = receive(socket, &to, 0)?;
        bytes.truncate(got.copied);
        Ok((bytes, got.from))
    }

    /// A socket on loopback uses the address that it is bound to, not the one that the kernel chooses.
    #[test]
    fn datagrams_come_from_the_address_that_their_socket_is_bound_to() {
        let (server, client) = (socket(), socket());
        bind(&server, "127.0.0.2:0".parse().unwrap()).unwrap();
        let at = server.local().unwrap();
        connect(&client, Some(at)).unwrap();
        send_to(&client, b"ask", None);
        let (bytes, from) = receive_from(&server).unwrap();
        assert_eq!(bytes, b"ask");
        send_to(&server, b"answer", Some(from));
        // The client accepts only datagrams from the server's address.
        assert_eq!(receive_from(&client), Ok((b"answer".to_vec(), at)));
    }

    #[test]
    fn a_socket_whose_new_peer_cannot_be_reached_keeps_the_old_one() {
        let (server, client) = (socket(), socket());
        bind(&server, "127.0.0.1:0".parse().unwrap()).unwrap();
        connect(&client, server.local()).unwrap();
        // The address lacks its interface.
        let nowhere = "[fe80::1]:9".parse().unwrap();
        assert_eq!(connect(&client, Some(nowhere)), Err(libc::EADDRNOTAVAIL));
        assert_eq!(state(&client).unwrap().remote(), server.local());
        send_to(&client, b"ask", None);
        let (bytes, _) = receive_from(&server).unwrap();
        assert_eq!(bytes, b"ask");
    }

    /// A thread takes an event that may free a slot for another thread, which sleeps in `rsendto`.
    #[test]
    fn a_thread_that_takes_an_event_wakes_those_that_wait() {
        let (server, client) = (socket(), socket());
        bind(&server, "127.0.0.1:0".parse().unwrap()).unwrap();
        // The device's thread does not take the event.
        server.engine().unwatch(server.channel.fd());
        let waker = Arc::new(Waker::new().unwrap());
        let _waiting = RegisteredWaker::at(&server.wakers, &waker);
        send_to(&client, b"ask", server.local());
        let until = Instant::now() + Duration::from_secs(10);
        while server.channel.is_empty() {
            assert!(Instant::now() < until, "the request does not arrive");
            server.engine().on_idle_poll();
        }
        assert!(waker.is_empty());
        state(&server).unwrap().step(&server);
        assert!(!waker.is_empty());
    }

    /// Sends an empty datagram to a peer whose queue pair is known. Its header names `port` as the sender's.
    fn send_as(socket: &Socket, port: u16, to: SocketAddr) {
        let mut state = state(socket).unwrap();
        state.step(socket);
        let destination = state.peers[&to].destination;
        let end = state.end.as_mut().unwrap();
        let slot = end.free.pop().unwrap();
        let header = datagram_header(to.is_ipv6(), port);
        end.outgoing.store(slot as usize * OUT, &header);
        end.post(slot, DATAGRAM_HEADER, destination).unwrap();
    }

    /// A host sends datagrams that name many ports as their source, and answers no requests for these ports. The server replies to all of
    /// them.
    #[test]
    fn replies_to_a_host_that_does_not_answer_leave_room_for_other_hosts() {
        let (server, strange, client) = (socket(), socket(), socket());
        bind(&server, "127.0.0.1:0".parse().unwrap()).unwrap();
        bind(&strange, "127.0.0.2:0".parse().unwrap()).unwrap();
        bind(&client, "127.0.0.3:0".parse().unwrap()).unwrap();
        let at = server.local().unwrap();
        let reply = |to| {
            // SAFETY: the object is live until the call returns.
            let from = unsafe { Caller::new(b"reply".as_ptr(), 5) };
            send(&server, &from, Some(to), libc::MSG_DONTWAIT)
        };
        send_to(&strange, b"hello", Some(at));
        let (_, from) = receive_from(&server).unwrap();
        for n in 0..256 {
            let port = from.port() ^ (1 + n % 64);
            send_as(&strange, port, at);
            let (bytes, from) = receive_from(&server).unwrap();
            assert_eq!((bytes.len(), from.port()), (0, port));
            assert_eq!(reply(from), Ok(5));
        }
        assert!(state(&server).unwrap().requests.len() <= ASKED / HOST_SHARE);

        send_to(&client, b"ask", Some(at));
        let (bytes, from) = receive_from(&server).unwrap();
        assert_eq!(bytes, b"ask");
        assert_eq!(reply(from), Ok(5));
        assert_eq!(receive_from(&client), Ok((b"reply".to_vec(), at)));
    }

    /// The socket sends to more peers of one host than it may request queue pairs from at a time.
    #[test]
    fn datagrams_to_many_new_peers_arrive_when_their_turn_comes() {
        let client = socket();
        let servers: Vec<Arc<Socket>> = (0..4 * ASKED / HOST_SHARE).map(|_| socket()).collect();
        for server in &servers {
            bind(server, "127.0.0.1:0".parse().unwrap()).unwrap();
            send_to(&client, b"first", server.local());
        }
        for server in &servers {
            let until = Instant::now() + Duration::from_secs(10);
            while state(server).unwrap().readiness() & libc::POLLIN == 0 {
                assert!(Instant::now() < until, "a datagram does not arrive");
                client.engine().on_idle_poll();
                server.ready();
            }
        }
    }

    /// The ports of a host do not answer, and the program only waits. A datagram to another port of the host is sent when the requests have
    /// waited long enough.
    #[test]
    fn a_datagram_to_a_live_port_does_not_wait_for_dead_ones() {
        let (client, server) = (socket(), socket());
        bind(&server, "127.0.0.1:0".parse().unwrap()).unwrap();
        let silent: Vec<_> = (0..ASKED / HOST_SHARE)
            .map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap())
            .collect();
        for port in &silent {
            send_to(&client, b"nobody", port.local_addr().ok());
        }
        send_to(&client, b"somebody", server.local());
        let until = Instant::now() + 8 * PATIENCE;
        while state(&server).unwrap().readiness() & libc::POLLIN == 0 {
            assert!(Instant::now() < until, "the datagram does not arrive");
            std::thread::sleep(Duration::from_millis(1));
            server.ready();
        }
    }

    #[test]
    fn a_source_is_read_from_either_header() {
        let mut v4 = [0_u8; ROUTE];
        v4[20] = 0x45;
        v4[32..36].copy_from_slice(&[10, 0, 0, 7]);
        assert_eq!(source_of(&v4, 8 | 2), Some("10.0.0.7".parse().unwrap()));
        let mut v6 = [0_u8; ROUTE];
        v6[0] = 0x60;
        let ip: Ipv6Addr = "fd00::7".parse().unwrap();
        v6[8..24].copy_from_slice(&ip.octets());
        assert_eq!(source_of(&v6, 8 | 1), Some(ip.into()));
    }
}
