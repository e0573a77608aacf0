//! Datagram identifiers: one request and one reply instead of a connection.
//!
//! The active side queries the signpost of the port (a UDP socket of the listener, see `ports`) for the listener's UDP
//! port, and sends its request to that port until a reply arrives. The reply contains a queue pair number and its Q_Key.
//! Multicast groups are joined here too.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::datagram::MULTICAST_QPN;
use anywarp_core::wire::dgram::{CM_PRIVATE_DATA, Cm, CmReply, CmRequest};
use anywarp_core::wire::signpost::Port;
use rustix::net::SocketType;

use super::active::RETRY_REFUSED;
use super::sidr::{self, Budget, Endpoint, Outstanding, RequestId};
use super::state::{Input, Phase};
use super::{CmId, ConnParam, Event, EventKind, Peer, Requester, State, os};
use crate::clock;
use crate::connect::signpost::{self, Location, QueryResult};
use crate::fd::EngineFd;
use crate::locks::{MutexGuard, Rank};
use crate::net::route::GROUP_PORT;
use crate::net::socket::{self, unmapped};
use crate::random::random_u32;
use crate::reactor::Source;
use crate::sys::Io;

/// Largest number of datagrams received in one turn of the worker, so that a busy socket does not delay others.
const TURN_DATAGRAMS: usize = 64;
/// Q_Key of queue pairs that belong to identifiers. All implementations of rdma_cm use this value (`RDMA_UDP_QKEY`).
const UDP_QKEY: u32 = 0x0123_4567;

/// The UDP socket of an identifier.
struct UdpSource(Weak<CmId>);

impl Source for UdpSource {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.udp_ready();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.udp_timeout();
        }
    }
}

impl CmId {
    fn watch_udp(&self, fd: EngineFd, request: Option<Outstanding>) -> io::Result<Endpoint> {
        let source = Arc::new(UdpSource(self.me.clone()));
        let token = self.engine.add(source, fd.get(), false)?;
        Ok(Endpoint::new(fd, token, request))
    }

    /// Removes a socket from the engine and closes it.
    pub(super) fn drop_udp(&self, endpoint: Option<Endpoint>) {
        if let Some(endpoint) = endpoint {
            self.engine.remove(endpoint.token, Some(endpoint.fd.get()));
        }
    }

    /// Listens for datagram requests.
    pub(super) fn listen_udp(&self, state: &mut State, backlog: i32) -> io::Result<()> {
        let bind_request = state.bind_request.ok_or_else(|| os(libc::EINVAL))?;
        let fd = bind_request.datagram()?;
        socket::report_destinations(&fd, bind_request.to.is_ipv6());
        let at = socket::local_addr(&fd).map_or(0, |a| a.port());
        let endpoint = self.watch_udp(fd, None)?;
        if let Some(reservation) = &state.reservation
            && let Err(e) = reservation.listen(at, false)
        {
            self.drop_udp(Some(endpoint));
            return Err(e);
        }
        state.udp = Some(endpoint);
        state.backlog = usize::try_from(backlog).unwrap_or(1024).clamp(16, 1024);
        state.step(Input::Listen)
    }

    /// Requests the peer's queue pair (`rdma_connect(3)`).
    pub(super) fn request_qp(&self, param: ConnParam) -> io::Result<()> {
        if param.private_data.len() > CM_PRIVATE_DATA {
            return Err(os(libc::EINVAL));
        }
        let mut state = self.lock();
        state.allows(Input::Connect)?;
        let remote = state.remote.ok_or_else(|| os(libc::EINVAL))?;
        let fd = socket::open(remote.ip(), SocketType::DGRAM)?;
        if let Some(local) = state.local {
            rustix::net::bind(fd.get(), &SocketAddr::new(local.ip(), 0))?;
        }
        // The identifier keeps a port that the program has set, even if the request is sent from another UDP port.
        if let (None, Some(local)) = (&state.reservation, socket::local_addr(&fd)) {
            let ip = state.local.map_or_else(|| local.ip(), |l| l.ip());
            state.local = Some(SocketAddr::new(ip, local.port()));
        }
        let id = random_u32();
        let request = Cm::Request(CmRequest {
            id,
            private_data: param.private_data.clone(),
        });
        let request = Outstanding::new(id, request.emit());
        let endpoint = self.watch_udp(fd, Some(request))?;
        // This cannot fail: `allows` was true, and the lock is held since.
        if let Err(e) = state.step(Input::Connect) {
            drop(state);
            self.drop_udp(Some(endpoint));
            return Err(e);
        }
        state.param = param;
        state.udp = Some(endpoint);
        drop(state);
        self.udp_timeout();
        Ok(())
    }

    /// Makes the next try to send the request. After the last one, raises `RDMA_CM_EVENT_UNREACHABLE` instead.
    fn udp_timeout(&self) {
        {
            let mut state = self.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            let remote = state.remote;
            let Some(endpoint) = &mut state.udp else {
                return;
            };
            if let Some(pause) = endpoint.send_request() {
                self.engine.deadline(endpoint.token, clock::now() + pause);
                let is_unlocated = endpoint.to.is_none();
                drop(state);
                if let (true, Some(remote)) = (is_unlocated, remote) {
                    self.find_listener(remote);
                }
                return;
            }
            self.give_up(state, -libc::ETIMEDOUT);
        }
    }

    /// Ends an outstanding request with `RDMA_CM_EVENT_UNREACHABLE`.
    fn give_up(&self, mut state: MutexGuard<'_, State>, status: i32) {
        let endpoint = state.udp.take();
        if let Some(query) = state.query.take() {
            query.cancel();
        }
        state.end();
        drop(state);
        self.drop_udp(endpoint);
        self.push(EventKind::Unreachable, status);
    }

    /// Queries the peer's signpost for the listener's UDP port, unless a query is outstanding.
    fn find_listener(&self, remote: SocketAddr) {
        let port = Port {
            space: self.port_space as u16,
            number: remote.port(),
        };
        let me = self.me.clone();
        let done = move |location| {
            if let Some(id) = me.upgrade() {
                id.lock().query = None;
                id.listener_found(remote, location);
            }
        };
        let mut state = self.lock();
        if state.query.is_some() || state.destroyed {
            return;
        }
        match signpost::query(self.engine, port, remote, Box::new(done)) {
            Ok(QueryResult::Known(location)) => {
                drop(state);
                self.listener_found(remote, location);
            }
            Ok(QueryResult::Waiting(query)) => state.query = Some(query),
            // Out of descriptors or table entries: the next try of the request repeats the query.
            Err(_) => {}
        }
    }

    /// Sends the request to the port in the signpost's answer. Without an answer, the next try of the request repeats
    /// the query. If there is no listener, the query is repeated for [`RETRY_REFUSED`], because the peer's program may be starting.
    fn listener_found(&self, remote: SocketAddr, location: Location) {
        let mut state = self.lock();
        let is_connecting = state.phase == Phase::Connecting;
        let Some(endpoint) = &mut state.udp else {
            return;
        };
        match location {
            Location::At(port) => {
                let mut to = remote;
                to.set_port(port);
                endpoint.to = Some(to);
                endpoint.send_now();
            }
            Location::SamePort | Location::NotListening => {
                if is_connecting && endpoint.tried_for() > RETRY_REFUSED {
                    self.give_up(state, sidr::UNSUPPORTED.into());
                }
            }
            Location::Unanswered => {}
        }
    }

    fn udp_ready(&self) {
        for _ in 0..TURN_DATAGRAMS {
            let mut buffer = [0_u8; 2048];
            let got = {
                let state = self.lock();
                let Some(endpoint) = &state.udp else { return };
                endpoint.receive(&mut buffer)
            };
            let datagram = match got {
                Ok(datagram) => datagram,
                Err(Io::WouldBlock) => return,
                // An ICMP error for an earlier datagram, which this call has cleared.
                Err(_) => continue,
            };
            let from = unmapped(datagram.from);
            match Cm::parse(buffer.get(..datagram.len).unwrap_or(&[])) {
                Ok(Cm::Request(request)) => {
                    let received = RequestId {
                        from,
                        to: datagram.to,
                        id: request.id,
                    };
                    self.handle_udp_request(received, request.private_data, datagram.len);
                }
                Ok(Cm::Reply(reply)) => self.handle_udp_reply(from, reply),
                Err(_) => {}
            }
        }
    }

    /// Handles a request of `bytes` bytes: answers a repeated one, and creates an identifier for a new one.
    fn handle_udp_request(&self, received: RequestId, private_data: Vec<u8>, bytes: usize) {
        let channel = {
            let mut state = self.lock();
            if state.phase != Phase::Listening {
                return;
            }
            if let Some(endpoint) = &mut state.udp
                && endpoint.reply_again(received, bytes)
            {
                return;
            }
            state.pending.retain(|p| {
                p.upgrade()
                    .is_some_and(|id| id.lock().phase == Phase::Requested)
            });
            let known = state.pending.iter().filter_map(Weak::upgrade).any(|id| {
                let requester = &mut id.lock().requester;
                let requester = requester.as_mut().filter(|r| r.request == received);
                requester.map(|r| r.budget.received(bytes)).is_some()
            });
            if known || state.pending.len() >= state.backlog {
                // The program has not answered this request yet, or the backlog is full: the requester will try
                // again.
                return;
            }
            Arc::clone(&state.channel)
        };
        let kind = (self.port_space, self.is_datagram);
        let child = Self::make(self.engine, &channel, kind, Rank::CmRequest);
        {
            let local = self.lock().local;
            let mut state = child.lock();
            let _always_from_idle = state.step(Input::Request);
            state.local = local.map(|l| match received.to {
                Some(to) if l.ip().is_unspecified() => SocketAddr::new(to, l.port()),
                _ => l,
            });
            state.remote = Some(received.from);
            let mut budget = Budget::default();
            budget.received(bytes);
            state.requester = Some(Requester {
                request: received,
                budget,
                listener: self.me.clone(),
            });
        }
        // A request that arrives while the listener is being destroyed is not answered: the requester times out.
        let _ = self.offer(&child, |e| e.private_data = private_data);
    }

    /// Accepts or rejects the request for which this identifier was created.
    pub(super) fn reply(&self, accept: bool, private_data: &[u8]) -> io::Result<()> {
        if private_data.len() > CM_PRIVATE_DATA {
            return Err(os(libc::EINVAL));
        }
        let listener = {
            let state = self.lock();
            state.allows(Input::Answer)?;
            let requester = state.requester.as_ref();
            requester
                .ok_or_else(|| os(libc::EINVAL))?
                .listener
                .upgrade()
        };
        // Without the listener there is no socket to answer from, and the request stays unanswered.
        let listener = listener.ok_or_else(|| os(libc::ENOTCONN))?;
        let mut listening = listener.lock();
        let endpoint = listening.udp.as_mut().ok_or_else(|| os(libc::ENOTCONN))?;
        let (requester, qpn, qkey) = {
            let mut state = self.lock();
            state.allows(Input::Answer)?;
            let (qpn, qkey) = match &state.datagram {
                Some((qp, qkey)) => (qp.number(), *qkey),
                None => (state.param.qp_num, UDP_QKEY),
            };
            if accept && qpn == 0 {
                return Err(os(libc::EINVAL));
            }
            let requester = state.requester.clone();
            let requester = requester.ok_or_else(|| os(libc::EINVAL))?;
            state.step(if accept { Input::Answer } else { Input::End })?;
            (requester, qpn, qkey)
        };
        let bytes = Cm::Reply(CmReply {
            id: requester.request.id,
            status: if accept { 0 } else { sidr::REJECT },
            qpn,
            qkey,
            private_data: private_data.to_vec(),
        })
        .emit();
        endpoint.reply(requester.request, requester.budget, bytes);
        Ok(())
    }

    /// Handles a reply: raises `RDMA_CM_EVENT_ESTABLISHED` with the peer's queue pair, or `RDMA_CM_EVENT_UNREACHABLE`.
    fn handle_udp_reply(&self, from: SocketAddr, reply: CmReply) {
        {
            let mut state = self.lock();
            let request = state.udp.as_ref().and_then(|e| e.request.as_ref());
            let id = request.map(|r| r.id);
            let ip = state.remote.map(|r| r.ip());
            if state.phase != Phase::Connecting || id != Some(reply.id) || ip != Some(from.ip()) {
                return;
            }
            let accepted = reply.status == 0;
            let input = if accepted {
                Input::Established
            } else {
                Input::End
            };
            if state.step(input).is_err() {
                return;
            }
            let endpoint = state.udp.take();
            drop(state);
            self.drop_udp(endpoint);
        }
        if reply.status != 0 {
            let status = i32::from(reply.status);
            self.push_event(
                |e| e.private_data = reply.private_data,
                EventKind::Unreachable,
                status,
            );
            return;
        }
        let port = u16::try_from(reply.qpn >> 8).unwrap_or(0);
        self.push_event(
            |e| {
                e.private_data = reply.private_data;
                e.peer = Some(Peer {
                    addr: SocketAddr::new(from.ip(), port),
                    qpn: reply.qpn,
                    qkey: reply.qkey,
                });
            },
            EventKind::Established,
            0,
        );
    }

    // ------------------------------------------------------------------ groups

    /// Joins a multicast group (`rdma_join_multicast(3)`). The result is an event, which contains `context`.
    ///
    /// If the identifier has a queue pair, and `receives` is true, the queue pair receives the datagrams of the group from now on. A queue
    /// pair that is created later does not: the program attaches it.
    pub fn join(&self, group: IpAddr, receives: bool, context: usize) -> io::Result<()> {
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(os(libc::EINVAL));
        }
        let datagram = {
            let mut state = self.lock();
            let is_bound = state.local.is_some_and(|l| !l.ip().is_unspecified());
            if state.datagram.is_none() && !(self.is_datagram && is_bound) {
                return Err(os(libc::EINVAL));
            }
            state.groups.push((group, receives));
            state.datagram.clone()
        };
        let qkey = datagram.as_ref().map_or(UDP_QKEY, |(_, qkey)| *qkey);
        let joined = match datagram {
            Some((qp, _)) if receives => qp.multicast(group, true),
            _ => Ok(()),
        };
        let kind = if joined.is_ok() {
            EventKind::MulticastJoin
        } else {
            let mut state = self.lock();
            let mine = state.groups.iter().rposition(|g| *g == (group, receives));
            mine.map(|at| state.groups.remove(at));
            EventKind::MulticastError
        };
        let status = joined.err().map_or(0, |e| -e.errno());
        self.push_event(
            |e: &mut Event| {
                e.context = context;
                e.peer = Some(Peer {
                    addr: SocketAddr::new(group, GROUP_PORT),
                    qpn: MULTICAST_QPN,
                    qkey,
                });
            },
            kind,
            status,
        );
        Ok(())
    }

    /// Leaves a multicast group (`rdma_leave_multicast(3)`). Returns `EADDRNOTAVAIL` if the program has not joined it.
    pub fn leave(&self, group: IpAddr) -> io::Result<()> {
        let group = group.to_canonical();
        let (receives, datagram) = {
            let mut state = self.lock();
            let last = state
                .groups
                .iter()
                .rposition(|(joined, _)| *joined == group);
            let last = last.ok_or_else(|| os(libc::EADDRNOTAVAIL))?;
            let (_, receives) = state.groups.remove(last);
            // The program gets no event of a group that it has left.
            let is_of_group = |e: &Event| {
                let is_join =
                    matches!(e.kind, EventKind::MulticastJoin | EventKind::MulticastError);
                let peer = e.peer.map(|p| p.addr.ip());
                is_join && peer == Some(group) && std::ptr::eq(Arc::as_ptr(&e.id), self)
            };
            let is_joined_still = state.groups.iter().any(|(joined, _)| *joined == group);
            if !is_joined_still {
                state.channel.purge(is_of_group);
            }
            // The queue pair is attached once, however often the program has joined.
            let is_last = !state.groups.contains(&(group, true));
            (receives && is_last, state.datagram.clone())
        };
        if let Some((qp, _)) = datagram.filter(|_| receives) {
            // The call fails if the queue pair was created after the group was joined, or if the program has detached it.
            let _ = qp.multicast(group, false);
        }
        Ok(())
    }
}
