//! Datagram sockets: a UD queue pair, and requests of the connection manager (SIDR) that resolve a port to a queue pair.
//!
//! A bound socket listens at its UDP port for such requests, and the thread that handles the device's sockets answers them.
//! The first datagram to a port makes the socket request the queue pair of that port. Datagrams to the port are queued until
//! the answer arrives, and dropped if none arrives. Another socket may get the port, so after a while the next datagram repeats
//! the request; the old answer is used until the new one arrives.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::datagram::Kind as Service;
use anywarp_core::datagram::options::Options;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State as QpState};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Destination, Op, Payload, RecvRequest, WorkRequest};
use anywarp_engine::cm::{CmId, ConnParam, Event, EventChannel, EventKind, PortSpace};
use anywarp_engine::dgram::DgramQp;

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
/// The number of slots for datagrams that are being sent.
const SENDS: u32 = 256;
/// The number of slots for received datagrams is the value of `SO_RCVBUF` divided by this, within [`RECEIVES`].
const BUFFER_PER_SLOT: usize = 1024;
/// The smallest and the largest number of slots for received datagrams.
const RECEIVES: std::ops::RangeInclusive<usize> = 64..=1024;
/// The largest number of peers whose queue pairs a socket caches.
const PEERS: usize = 1024;
/// The largest number of datagrams to one peer that are queued until an answer arrives.
const WAITING: usize = 32;
/// The time after which the request for a known queue pair is repeated.
const ANSWER_VALID: Duration = Duration::from_secs(1);
/// The bit of a `wr_id` that marks a receive.
const RECEIVE: u64 = 1 << 63;
/// The largest number of unanswered requests for the queue pair.
const REQUESTS_MAX: c_int = 1024;

/// A peer that datagrams are sent to.
struct Peer {
    known: Option<Destination>,
    since: Instant,
    asking: Option<Arc<CmId>>,
    /// The slots and lengths of the datagrams that are queued until an answer arrives.
    waiting: VecDeque<(u32, usize)>,
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

    /// Reposts the receives of slots whose datagrams have been read.
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
        self.id.bind(to).map_err(|e| match os_errno(&e) {
            libc::ENODEV => libc::EADDRNOTAVAIL,
            e => e,
        })?;
        self.end = Some(End::new(socket)?);
        self.id.listen(REQUESTS_MAX).map_err(|e| os_errno(&e))
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
        self.ask(socket, to)?;
        let asking = self.peers.get(&to).and_then(|p| p.asking.as_ref());
        self.source = asking.and_then(|id| id.local()).map(|a| a.ip());
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
        if self.peers.get(&to).is_some_and(|p| p.asking.is_some()) {
            return Ok(());
        }
        if self.peers.len() >= PEERS && !self.peers.contains_key(&to) {
            self.forget_one();
        }
        let id = identifier(&socket.channel)?;
        let failed = |e: std::io::Error| os_errno(&e);
        id.resolve_addr(None, to).map_err(failed)?;
        // Resolving an address does not block: the result is in the channel at once.
        let mut unreachable = 0;
        let mut rest = Vec::new();
        while let Some(event) = socket.channel.pop() {
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
        let peer = self.peers.entry(to).or_insert_with(|| Peer {
            known: None,
            since: Instant::now(),
            asking: None,
            waiting: VecDeque::new(),
        });
        peer.asking = Some(id);
        Ok(())
    }

    /// Removes the peer with the oldest answer, to make room for another peer.
    fn forget_one(&mut self) {
        let oldest = self
            .peers
            .iter()
            .min_by_key(|(_, p)| p.since)
            .map(|(to, _)| *to);
        if let Some(to) = oldest {
            self.forget(to);
        }
    }

    fn forget(&mut self, to: SocketAddr) {
        if let Some(peer) = self.peers.remove(&to) {
            if let Some(id) = peer.asking {
                id.destroy();
            }
            if let Some(end) = &mut self.end {
                end.free.extend(peer.waiting.iter().map(|(slot, _)| *slot));
            }
        }
    }

    /// Handles new requests, new answers and new completions.
    pub(super) fn step(&mut self, socket: &Socket) {
        if self.closed {
            return;
        }
        while let Some(event) = socket.channel.pop() {
            self.event(&event);
        }
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
                    self.forget(to);
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
        let is_it = |p: &Peer| p.asking.as_ref().is_some_and(|a| Arc::ptr_eq(a, id));
        self.peers.iter().find(|(_, p)| is_it(p)).map(|(to, _)| *to)
    }

    /// Handles an answer: sends the datagrams that were queued for it.
    fn answered(&mut self, event: &Event) {
        let Some(to) = self.asked(&event.id) else {
            return;
        };
        let (Some(peer), Some(answer)) = (self.peers.get_mut(&to), event.peer) else {
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
        peer.known = Some(destination);
        peer.since = Instant::now();
        if let Some(id) = peer.asking.take() {
            id.destroy();
        }
        let waiting = std::mem::take(&mut peer.waiting);
        if let Some(end) = &mut self.end {
            for (slot, len) in waiting {
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
        let fresh = |p: &Peer| p.known.is_some() && now.duration_since(p.since) < ANSWER_VALID;
        if !self.peers.get(&to).is_some_and(fresh)
            && let Err(e) = self.ask(socket, to)
        {
            return Some(Err(e));
        }
        let port = self.id.local().map_or(0, |a| a.port());
        let (end, peer) = (self.end.as_mut()?, self.peers.get_mut(&to)?);
        let slot = end.free.pop()?;
        let (at, len) = (slot as usize * OUT, DATAGRAM_HEADER + from.len());
        let header = datagram_header(to.is_ipv6(), port);
        end.outgoing.store(at, &header);
        let body = [(at + DATAGRAM_HEADER, from.len()), (0, 0)];
        end.outgoing.fill(body, from, 0);
        match peer.known {
            Some(destination) => {
                if let Err(e) = end.post(slot, len, destination) {
                    return Some(Err(e));
                }
            }
            None => {
                peer.waiting.push_back((slot, len));
                if peer.waiting.len() > WAITING
                    && let Some((lost, _)) = peer.waiting.pop_front()
                {
                    end.free.push(lost);
                }
            }
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
        for (_, peer) in self.peers.drain() {
            if let Some(id) = peer.asking {
                id.destroy();
            }
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
    use super::super::options::Options as SocketOptions;
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
