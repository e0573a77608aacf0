//! The connection manager (`rdma_cm(7)`): identifiers that listen, connect, accept, reject and disconnect.
//!
//! The states are in `state`, the side that connects in `active`, the side that listens in `passive`, datagram
//! identifiers in `udp`, and connections without a queue pair of the program in `private_qp`.
//!
//! Ports are in `ports` and `holder`. A listener also has the TCP port with the number of its rdma_cm port, if that is
//! free, and private data is sent in the MPA frames. So siw and hardware RNICs can connect to this device, and this device
//! to them. The events of an identifier are queued in the channel with which it was created, or to which it was moved.
//!
//! Queue pairs and start-ups call identifiers ([`Manager`], [`Owner`]) without holding their own locks. Lock order:
//! first a listening identifier, then the identifier of a connect request that it received.

mod active;
mod holder;
mod passive;
mod ports;
mod private_qp;
mod sidr;
mod state;
mod timewait;
mod udp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use anywarp_core::bounds;
use anywarp_core::llp::mpa::startup::{Depths, Request};
use anywarp_core::qos::level_of_class;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::qp::State as QpState;

use crate::channel::Channel;
use crate::config::{Face, config};
use crate::connect::signpost::Query;
use crate::connect::startup::{Failure, Opened, Owner, Startup};
use crate::engine::{DeviceListener, Engine, engine};
use crate::fd::EngineFd;
use crate::gids;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log;
use crate::net::route::source_for;
use crate::net::socket::{local_addr, unmapped};
use crate::objects::QueuePair;
use crate::qp::{Manager, RcQp};
use crate::reactor::Token;
use ports::{BindRequest, Holder, PortReservation};
pub use ports::{PortSpace, make_room};
use state::{Input, Phase, Timewait};

/// Kind of an event. The numbers are those of `enum rdma_cm_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of rdma_get_cm_event(3)")]
pub enum EventKind {
    AddrResolved = 0,
    AddrError = 1,
    RouteResolved = 2,
    RouteError = 3,
    ConnectRequest = 4,
    ConnectResponse = 5,
    ConnectError = 6,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    MulticastJoin = 12,
    MulticastError = 13,
    AddrChange = 14,
    TimewaitExit = 15,
    AddrinfoResolved = 16,
    AddrinfoError = 17,
    User = 18,
}

/// A destination of datagrams: the queue pair in a peer's reply, or a multicast group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The address of the peer or of the group, with the UDP port that datagrams are sent to.
    pub addr: SocketAddr,
    /// The queue pair number of the destination.
    pub qpn: u32,
    /// The Q_Key of the destination.
    pub qkey: u32,
}

/// An event (`rdma_get_cm_event(3)`).
#[derive(Debug, Clone)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// The identifier that the event is for.
    pub id: Arc<CmId>,
    /// For a connect request: the listening identifier.
    pub listener: Option<Arc<CmId>>,
    /// 0 for success, otherwise a negative errno, a reject reason of the InfiniBand CM, or, for a datagram request, a status of `sidr`.
    pub status: i32,
    /// Private data of the peer.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics that this end serves at the same time.
    pub responder_resources: u8,
    /// RDMA Reads and atomics that this end may have outstanding.
    pub initiator_depth: u8,
    /// For datagrams: the destination.
    pub peer: Option<Peer>,
    /// The context that the program passed when it joined a group, or the argument of [`CmId::report`].
    pub context: usize,
}

/// A channel of events.
pub type EventChannel = Channel<Event>;

/// Parameters of connecting and accepting (`struct rdma_conn_param`).
#[derive(Debug, Clone, Default)]
pub struct ConnParam {
    /// Private data for the peer.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics that this end serves at the same time.
    pub responder_resources: u8,
    /// RDMA Reads and atomics that this end may have outstanding.
    pub initiator_depth: u8,
    /// Retries when the peer does not answer.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted.
    pub rnr_retry_count: u8,
    /// The number of the queue pair, if it was not created with `rdma_create_qp(3)`.
    pub qp_num: u32,
}

/// Reject reason for a reject by the peer's program (InfiniBand CM: consumer reject).
pub const REJECT_CONSUMER: i32 = 28;
/// Reject reason for a closed port (InfiniBand CM: invalid service ID).
pub const REJECT_NO_LISTENER: i32 = 8;
/// `min_rnr_timer` (`struct ibv_qp_attr`) of an identifier's queue pair: 10.24 ms.
///
/// The kernel's connection manager sets 655 ms. Programs that rely on few retries (five, in rdma-core's tests) expect
/// a long timer; programs whose receive queue is often empty need a short one.
pub const MIN_RNR_TIMER: u8 = 20;
/// Default `timeout` (`struct ibv_qp_attr`) of an identifier's queue pair: 4.096 µs × 2^18, about a second.
const TIMEOUT: u8 = 18;

struct State {
    phase: Phase,
    channel: Arc<EventChannel>,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// The port, if the identifier was bound to one.
    reservation: Option<PortReservation>,
    /// Address and options of the bind.
    bind_request: Option<BindRequest>,
    /// Reserves the TCP port between bind and listen or connect.
    bound: Option<EngineFd>,
    listener: Option<(EngineFd, Token)>,
    backlog: usize,
    /// Connect requests that the program has not answered.
    pending: Vec<Weak<CmId>>,
    qp: Option<Arc<RcQp>>,
    /// The queue pair of a connection for which the program has none (`private_qp`).
    private_qp: Option<Arc<RcQp>>,
    /// The queue pair with which the program has connected or accepted.
    connected_qp: Option<Weak<RcQp>>,
    datagram: Option<(QueuePair, u32)>,
    /// The multicast groups that the program has joined, in this order, and whether as a receiver of the group's datagrams.
    groups: Vec<(IpAddr, bool)>,
    udp: Option<sidr::Endpoint>,
    /// The outstanding query for the UDP port of a datagram peer's listener (`connect::signpost`).
    query: Option<Arc<Query>>,
    requester: Option<Requester>,
    startup: Option<Arc<Startup>>,
    param: ConnParam,
    /// Responder resources and initiator depth of a connect request, from the depths in the MPA Request (see
    /// [`event_depths`]).
    offered: (u8, u8),
    reuse: bool,
    v6only: bool,
    ack_timeout: Option<u8>,
    /// Type of service of the packets (`RDMA_OPTION_ID_TOS`).
    tos: u8,
    timewait: Timewait,
    destroyed: bool,
}

/// The sender of the datagram request for which this identifier was created.
#[derive(Debug, Clone)]
struct Requester {
    request: sidr::RequestId,
    budget: sidr::Budget,
    /// The identifier whose socket sends the reply.
    listener: Weak<CmId>,
}

impl State {
    /// Changes the phase. Returns `EINVAL` if `input` is not allowed in the present one.
    fn step(&mut self, input: Input) -> io::Result<()> {
        self.phase = self.phase.step(input).ok_or_else(|| os(libc::EINVAL))?;
        Ok(())
    }

    /// Returns `EINVAL` if `input` is not allowed in this phase.
    fn allows(&self, input: Input) -> io::Result<()> {
        match self.phase.step(input) {
            Some(_) => Ok(()),
            None => Err(os(libc::EINVAL)),
        }
    }

    /// Address and options of a bind to `to`.
    fn bind_request(&self, id: &CmId, to: SocketAddr) -> BindRequest {
        BindRequest {
            space: id.port_space,
            is_stream: !id.is_datagram,
            to,
            reuse: self.reuse,
            v6only: self.v6only,
        }
    }

    /// Ends the connection. Returns the previous phase.
    fn end(&mut self) -> Phase {
        std::mem::replace(&mut self.phase, Phase::Over)
    }
}

/// An identifier (`rdma_cm_id`).
pub struct CmId {
    engine: &'static Engine,
    /// Address of the C object.
    pub c_object: AtomicUsize,
    /// Its port space.
    pub port_space: PortSpace,
    /// Whether it connects datagram queue pairs. In [`PortSpace::Ib`] the type of the queue pairs decides this.
    is_datagram: bool,
    /// Whether the program has no channel from which it takes events of this identifier.
    pub is_synchronous: AtomicBool,
    me: Weak<Self>,
    state: Mutex<State>,
}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("CmId")
            .field("phase", &state.phase)
            .field("local", &state.local)
            .field("remote", &state.remote)
            .finish_non_exhaustive()
    }
}

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Returns `EINVAL` if the source address is of another family than the destination. A wildcard address has no family here, because
/// the source is chosen for the destination.
fn check_families(from: SocketAddr, to: SocketAddr) -> io::Result<()> {
    let from = unmapped(from);
    if from.is_ipv4() != to.is_ipv4() && !from.ip().is_unspecified() {
        return Err(os(libc::EINVAL));
    }
    Ok(())
}

impl CmId {
    /// Creates an identifier whose events are queued in `channel`.
    pub fn new(channel: &Arc<EventChannel>, port_space: PortSpace) -> io::Result<Arc<Self>> {
        let is_datagram = matches!(port_space, PortSpace::Udp | PortSpace::Ipoib);
        let kind = (port_space, is_datagram);
        Ok(Self::make(engine()?, channel, kind, Rank::CmId))
    }

    /// Like [`Self::new`], for datagram queue pairs in the port space [`PortSpace::Ib`].
    pub fn new_ib_datagram(channel: &Arc<EventChannel>) -> io::Result<Arc<Self>> {
        let kind = (PortSpace::Ib, true);
        Ok(Self::make(engine()?, channel, kind, Rank::CmId))
    }

    fn make(
        engine: &'static Engine,
        channel: &Arc<EventChannel>,
        (port_space, is_datagram): (PortSpace, bool),
        rank: Rank,
    ) -> Arc<Self> {
        let id = Arc::new_cyclic(|me| Self {
            engine,
            c_object: AtomicUsize::new(0),
            port_space,
            is_datagram,
            is_synchronous: AtomicBool::new(false),
            me: me.clone(),
            state: Mutex::new(
                rank,
                State {
                    phase: Phase::Idle,
                    channel: Arc::clone(channel),
                    local: None,
                    remote: None,
                    reservation: None,
                    bind_request: None,
                    bound: None,
                    listener: None,
                    backlog: 0,
                    pending: Vec::new(),
                    qp: None,
                    private_qp: None,
                    connected_qp: None,
                    datagram: None,
                    groups: Vec::new(),
                    udp: None,
                    query: None,
                    requester: None,
                    startup: None,
                    param: ConnParam::default(),
                    offered: (0, 0),
                    reuse: false,
                    v6only: false,
                    ack_timeout: None,
                    tos: 0,
                    timewait: Timewait::default(),
                    destroyed: false,
                },
            ),
        });
        let listener: Arc<dyn DeviceListener> = Arc::clone(&id) as _;
        engine.subscribe(Arc::downgrade(&listener));
        let listener: Arc<dyn gids::Listener> = Arc::clone(&id) as _;
        gids::listen(engine, Arc::downgrade(&listener));
        id
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    // ------------------------------------------------------------------ addresses

    /// The local address.
    pub fn local(&self) -> Option<SocketAddr> {
        self.lock().local
    }

    /// The peer's address.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.lock().remote
    }

    /// Sets `RDMA_OPTION_ID_REUSEADDR`, `RDMA_OPTION_ID_AFONLY` and `RDMA_OPTION_ID_ACK_TIMEOUT`. `None` keeps the value of an option.
    pub fn set_options(
        &self,
        reuse: Option<bool>,
        v6only: Option<bool>,
        ack_timeout: Option<u8>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        if (reuse.is_some() || v6only.is_some()) && state.phase != Phase::Idle {
            return Err(os(libc::EINVAL));
        }
        state.reuse = reuse.unwrap_or(state.reuse);
        state.v6only = v6only.unwrap_or(state.v6only);
        if ack_timeout.is_some() {
            state.ack_timeout = ack_timeout;
        }
        Ok(())
    }

    /// Sets `RDMA_OPTION_ID_TOS`, the type of service of the connection's packets. Its upper three bits are the service level.
    pub fn set_tos(&self, tos: u8) {
        self.lock().tos = tos;
    }

    /// The type of service and the time-out of acknowledgements that the program set.
    pub fn path_options(&self) -> (u8, Option<u8>) {
        let state = self.lock();
        (state.tos, state.ack_timeout)
    }

    /// Sets the service level and the type of service of a queue pair before it is connected.
    fn apply_tos(&self, qp: &RcQp) {
        let tos = self.lock().tos;
        if tos != 0 {
            qp.set_service_of(level_of_class(tos), tos);
        }
    }

    /// The acknowledgement timeout that the program set, or the default.
    pub fn ack_timeout(&self) -> u8 {
        self.lock().ack_timeout.unwrap_or(TIMEOUT)
    }

    /// Binds to an address (`rdma_bind_addr(3)`). Port 0 selects a free port.
    pub fn bind(&self, to: SocketAddr) -> io::Result<()> {
        let mut state = self.lock();
        state.allows(Input::Bind)?;
        let bind_request = state.bind_request(self, unmapped(to));
        let id: Weak<dyn Holder> = self.me.clone();
        let bound = ports::take(self.engine, &id, bind_request)?;
        state.local = Some(bound.local);
        state.bind_request = Some(bind_request);
        state.reservation = Some(bound.reservation);
        state.bound = bound.tcp;
        state.step(Input::Bind)
    }

    /// Binds to the source address of a connection. With port 0 no port of the port space is reserved, since no peer
    /// connects to it.
    fn bind_source(&self, from: SocketAddr) -> io::Result<()> {
        if from.port() != 0 {
            return self.bind(from);
        }
        let mut state = self.lock();
        state.allows(Input::Bind)?;
        let bind_request = state.bind_request(self, unmapped(from));
        let fd = bind_request
            .stream(0)?
            .ok_or_else(|| os(libc::EADDRINUSE))?;
        let mut local = bind_request.to;
        local.set_port(local_addr(&fd).map_or(0, |a| a.port()));
        state.local = Some(local);
        if !self.is_datagram {
            state.bound = Some(fd);
        }
        state.step(Input::Bind)
    }

    /// Finds the local address for a peer (`rdma_resolve_addr(3)`). The result is an event.
    pub fn resolve_addr(&self, from: Option<SocketAddr>, to: SocketAddr) -> io::Result<()> {
        let to = unmapped(to);
        if let Some(from) = from
            && self.lock().phase == Phase::Idle
        {
            check_families(from, to)?;
            self.bind_source(from)?;
        }
        let mut state = self.lock();
        state.allows(Input::ResolveAddr)?;
        if let Some(local) = state.local {
            check_families(local, to)?;
        }
        // As for connect(2), the wildcard address means this host.
        let target = match to.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => {
                SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port())
            }
            IpAddr::V6(ip) if ip.is_unspecified() => {
                SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port())
            }
            _ => to,
        };
        let source = match target.ip() {
            // A link-local address is complete only with its interface, which the GID of a datagram's destination does not contain.
            IpAddr::V6(ip) if self.is_datagram && ip.is_unicast_link_local() => {
                Err(os(libc::EADDRNOTAVAIL))
            }
            _ => source_for(target),
        };
        match source {
            Ok(source) => {
                let mut local = match state.local {
                    Some(local) if !local.ip().is_unspecified() => local,
                    _ => source,
                };
                local.set_port(state.local.map_or(0, |l| l.port()));
                state.local = Some(local);
                state.remote = Some(target);
                state.step(Input::ResolveAddr)?;
                drop(state);
                self.push(EventKind::AddrResolved, 0);
            }
            Err(e) => {
                drop(state);
                self.push(
                    EventKind::AddrError,
                    -e.raw_os_error().unwrap_or(libc::EHOSTUNREACH),
                );
            }
        }
        Ok(())
    }

    /// Resolves the route (`rdma_resolve_route(3)`). Nothing is left to do, because the kernel routes packets.
    pub fn resolve_route(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.step(Input::ResolveRoute)?;
        drop(state);
        self.push(EventKind::RouteResolved, 0);
        Ok(())
    }

    // ------------------------------------------------------------------ events

    fn push(&self, kind: EventKind, status: i32) {
        self.push_event(|_| {}, kind, status);
    }

    /// Adds an event that does not belong to a connection, unless the identifier was destroyed.
    pub fn report(&self, kind: EventKind, status: i32, argument: usize) {
        self.push_event(|event| event.context = argument, kind, status);
    }

    fn push_event(&self, fill: impl FnOnce(&mut Event), kind: EventKind, status: i32) {
        self.push_locked(&self.lock(), fill, kind, status);
    }

    /// Like [`Self::push_event`], for a caller that has changed the state: the event is in the channel before another thread sees the
    /// change.
    fn push_locked(
        &self,
        state: &State,
        fill: impl FnOnce(&mut Event),
        kind: EventKind,
        status: i32,
    ) {
        if state.destroyed {
            return;
        }
        let Some(id) = self.me.upgrade() else { return };
        let mut event = Event {
            kind,
            id,
            listener: None,
            status,
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
            peer: None,
            context: 0,
        };
        fill(&mut event);
        log!(Debug, "cm: {kind:?} status {status} for {:?}", state.remote);
        state.channel.push(event);
    }

    /// Moves the identifier and its queued events to another channel (`rdma_migrate_id(3)`).
    pub fn migrate(&self, to: &Arc<EventChannel>) {
        let mut state = self.lock();
        let from = std::mem::replace(&mut state.channel, Arc::clone(to));
        if Arc::ptr_eq(&from, to) {
            return;
        }
        let mut moved = Vec::new();
        from.purge(|e| {
            let about = |id: &Arc<Self>| std::ptr::eq(Arc::as_ptr(id), self);
            let mine = about(&e.id) || e.listener.as_ref().is_some_and(about);
            if mine {
                moved.push(e.clone());
            }
            mine
        });
        for event in moved {
            if event.listener.is_some() {
                // A connect request whose event was not read moves with its listener.
                event.id.lock().channel = Arc::clone(to);
            }
            to.push(event);
        }
    }

    // ------------------------------------------------------------------ queue pair

    /// Sets the queue pair of this identifier (`rdma_create_qp(3)`), or removes it (`rdma_destroy_qp(3)`).
    pub fn set_qp(&self, qp: Option<Arc<RcQp>>) {
        let mut state = self.lock();
        if qp.is_none() {
            state.datagram = None;
        }
        state.qp = qp;
    }

    /// Sets the datagram queue pair of this identifier, and the Q_Key for replies.
    pub fn set_datagram(&self, qp: QueuePair, qkey: u32) {
        self.lock().datagram = Some((qp, qkey));
    }

    /// Returns the queue pair to connect: that of the identifier, the one that `private_qp` created, or the one with this
    /// number. The flag is true for the queue pair of the identifier, which [`Self::make_ready`] moves to RTS.
    fn find_qp(&self, number: u32) -> Option<(Arc<RcQp>, bool)> {
        {
            let state = self.lock();
            if let Some(qp) = &state.qp {
                return Some((Arc::clone(qp), true));
            }
            if let Some(qp) = &state.private_qp {
                return Some((Arc::clone(qp), false));
            }
        }
        RcQp::find(number).map(|qp| (qp, false))
    }

    /// Returns the queue pair of the connection, with the flag of [`CmId::find_qp`]. `None` if the program has destroyed it: another
    /// queue pair may have its number now.
    fn connected_qp(&self) -> Option<(Arc<RcQp>, bool)> {
        let Some(qp) = self.lock().connected_qp.clone() else {
            // The program has connected without a queue pair.
            return self.find_qp(0);
        };
        let qp = qp.upgrade()?;
        let found = RcQp::find(qp.number())?;
        let is_own = |own: &Arc<RcQp>| Arc::ptr_eq(own, &qp);
        let own = self.lock().qp.as_ref().is_some_and(is_own);
        Arc::ptr_eq(&found, &qp).then_some((qp, own))
    }

    /// Whether the queue pair stays as it is when the peer disconnects: see `StreamConfig::stays`. The program of a synchronous identifier
    /// gets no event of the disconnection, and may be waiting for a completion, so the queue pair fails.
    fn stays(&self) -> bool {
        config().face != Face::Iwarp && !self.is_synchronous.load(Ordering::Relaxed)
    }

    /// Moves the queue pair of the identifier to RTS when a connection is established, as the kernel does.
    fn make_ready(&self, qp: &RcQp, own: bool, ird: u8, ord: u8) {
        let (param, timeout) = {
            let state = self.lock();
            (state.param.clone(), state.ack_timeout.unwrap_or(TIMEOUT))
        };
        if !own {
            // The program changes the states of this queue pair (`rdma_init_qp_attr(3)`), or `ready_private_qp` does.
            return;
        }
        qp.with_attr(|attr| {
            attr.access = rights(ird);
            attr.timeout = timeout;
            attr.retry_cnt = param.retry_count.min(7);
            attr.rnr_retry = match param.rnr_retry_count {
                // Most programs that pass 0 did not set the field: iWARP ignores it (rdma_connect(3)). With 0
                // retries, a message that arrives before its receive is posted would end the connection.
                0 => 7,
                n => n.min(7),
            };
            attr.min_rnr_timer = MIN_RNR_TIMER;
            attr.max_rd_atomic = ord;
            attr.max_dest_rd_atomic = ird;
        });
        if qp.query().0 != QpState::Error {
            qp.set_state(QpState::Rts);
        }
    }

    /// The agreed parameters, for `rdma_init_qp_attr(3)`: responder resources, initiator depth, retries, RNR retries.
    pub fn agreed(&self) -> (u8, u8, u8, u8) {
        let state = self.lock();
        // Before the connection is accepted, these are the values of the peer's request. An MPA Request contains no
        // retries: 7 retries is the maximum, and 7 RNR retries means no limit.
        match state.phase {
            Phase::Requested => (state.offered.0, state.offered.1, 7, 7),
            _ => (
                state.param.responder_resources,
                state.param.initiator_depth,
                state.param.retry_count,
                state.param.rnr_retry_count,
            ),
        }
    }

    /// Responder resources and initiator depth of the connect request for which this identifier was created.
    pub fn offered(&self) -> (u8, u8) {
        self.lock().offered
    }

    /// Adds an event of an established connection, with the depths in the peer's frame, or else the agreed ones.
    // RFC 6581 §9.1 [mpa-depths-reported]: these are the depths in the frame, before the agreement.
    fn push_agreed(
        &self,
        state: &State,
        kind: EventKind,
        private_data: Vec<u8>,
        peer: Option<Depths>,
    ) {
        let agreed = (state.param.responder_resources, state.param.initiator_depth);
        let (ird, ord) = peer.map_or(agreed, event_depths);
        self.push_locked(
            state,
            |e| {
                e.private_data = private_data;
                e.responder_resources = ird;
                e.initiator_depth = ord;
            },
            kind,
            0,
        );
    }

    // ------------------------------------------------------------------ the end

    /// Moves the queue pair of this identifier to the error state, if there is one. Its requests are flushed.
    fn fail_qp(&self) {
        let qp = self.lock().qp.clone();
        if let Some(qp) = qp {
            qp.disconnect();
        }
    }

    /// Disconnects (`rdma_disconnect(3)`). Both ends get an event.
    ///
    /// Returns false if no event of a disconnection follows: the connection has ended already, or there is none yet.
    pub fn disconnect(&self) -> io::Result<bool> {
        let phase = {
            let mut state = self.lock();
            if state.phase.is_of_connection() {
                self.leaves(&mut state);
            }
            state.phase
        };
        match phase {
            Phase::Connected | Phase::Accepting => {}
            Phase::Connecting | Phase::Requested => {
                // The queue pair fails at once. The event that follows reports how the attempt to connect ends; a connect request can
                // still be rejected.
                self.fail_qp();
                return Ok(false);
            }
            Phase::Over => {
                // The peer has disconnected, and the queue pair may be as before (`StreamConfig::stays`).
                if let Some((qp, _)) = self.connected_qp() {
                    qp.disconnect();
                }
                return Ok(false);
            }
            _ => {
                // As in librdmacm, the queue pair fails although there is no connection.
                self.fail_qp();
                return Err(os(libc::EINVAL));
            }
        }
        match self.connected_qp() {
            Some((qp, _)) => qp.disconnect(),
            // The program has destroyed the queue pair already.
            None => self.gone(),
        }
        Ok(true)
    }

    /// Destroys the identifier and drops its queued events. A connect request that was not answered is rejected.
    pub fn destroy(&self) {
        if self.is_datagram {
            // Without an answer the requester repeats its request, and each repetition would be a new connect request. `reply` fails if the
            // identifier has no unanswered request, or if its listener, whose socket sends the answer, does not exist any more.
            let _ = self.reply(false, &[]);
        }
        let (private_qp, listener, startup, phase, channel, pending) = {
            let mut state = self.lock();
            state.destroyed = true;
            self.end_timewait(&mut state);
            state.bound = None;
            state.reservation = None;
            if let Some(query) = state.query.take() {
                query.cancel();
            }
            state.qp = None;
            state.datagram = None;
            (
                state.private_qp.take(),
                state.listener.take(),
                state.startup.take(),
                state.end(),
                Arc::clone(&state.channel),
                // The events in the channel may have the only other references to these identifiers.
                std::mem::take(&mut state.pending)
                    .iter()
                    .filter_map(Weak::upgrade)
                    .collect::<Vec<_>>(),
            )
        };
        if let Some(qp) = private_qp {
            qp.destroy();
        }
        if let Some((fd, token)) = listener {
            self.engine.remove(token, Some(fd.get()));
        }
        if let Some(startup) = startup {
            if phase == Phase::Requested {
                let _ = startup.reject(&[]);
            } else {
                startup.cancel();
            }
        }
        channel.purge(|e| {
            let about = |id: &Arc<Self>| std::ptr::eq(Arc::as_ptr(id), self);
            about(&e.id) || e.listener.as_ref().is_some_and(about)
        });
        // Connect requests whose event was not read are unknown to the program, so they are destroyed here.
        for child in pending {
            if child.c_object.load(Ordering::Relaxed) == 0 {
                child.destroy();
            }
        }
        // The connect requests of a datagram identifier were rejected through this socket.
        let udp = self.lock().udp.take();
        self.drop_udp(udp);
    }
}

/// The access rights of a peer, as the kernel's connection manager sets them.
pub fn rights(ird: u8) -> Access {
    if ird > 0 {
        Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
    } else {
        Access::REMOTE_WRITE
    }
}

/// Returns responder resources and initiator depth of an event, from the depths in the peer's frame: the peer's
/// outbound depth is the inbound depth of this end, and vice versa.
fn event_depths(peer: Depths) -> (u8, u8) {
    let limit = |n: u16| {
        u8::try_from(n)
            .unwrap_or(u8::MAX)
            .min(bounds::MAX_RD_ATOMIC)
    };
    (limit(peer.ord), limit(peer.ird))
}

impl Owner for CmId {
    fn opened(&self, startup: &Arc<Startup>, opened: Opened) {
        self.handle_opened(startup, opened);
    }

    fn requested(&self, startup: &Arc<Startup>, request: Request) {
        self.handle_request(startup, request);
    }

    fn failed(&self, startup: &Arc<Startup>, failure: Failure) {
        self.handle_failure(startup, failure);
    }
}

impl DeviceListener for CmId {
    fn device_fatal(&self) {
        let local = self.lock().local;
        let names_device = local.is_some_and(|local| gids::names_device(local.ip()));
        let startup = {
            let mut state = self.lock();
            let is_bound = match state.phase {
                Phase::Idle => false,
                Phase::Bound => names_device,
                _ => true,
            };
            if !is_bound {
                return;
            }
            state.end();
            state.startup.take()
        };
        if let Some(startup) = startup {
            startup.cancel();
        }
        // An identifier without a C object is unknown to the program, which need not destroy it.
        if self.c_object.load(Ordering::Relaxed) != 0 {
            self.push(EventKind::DeviceRemoval, 0);
        }
    }
}

impl gids::Listener for CmId {
    /// Raises `RDMA_CM_EVENT_ADDR_CHANGE` if the interface of the local address has another hardware address now, as after a failover
    /// with bonding, so that the program can connect again.
    fn port_changed(&self, changes: &gids::PortChanges) {
        let affected = {
            let state = self.lock();
            let bound = !matches!(state.phase, Phase::Idle | Phase::Over);
            bound && state.local.is_some_and(|l| changes.moved.contains(&l.ip()))
        };
        if affected && self.c_object.load(Ordering::Relaxed) != 0 {
            self.push(EventKind::AddrChange, 0);
        }
    }
}

impl Manager for CmId {
    fn started(&self) {
        self.established();
    }

    fn gone(&self) {
        let mut state = self.lock();
        let (kind, status) = match state.end() {
            Phase::Connected => (EventKind::Disconnected, 0),
            Phase::Accepting => (EventKind::ConnectError, -libc::ECONNRESET),
            _ => return,
        };
        // `rdma_disconnect` of a connection that is over waits for no event, so the event is in the channel by then.
        self.push_locked(&state, |_| {}, kind, status);
        if kind == EventKind::Disconnected {
            self.has_ended(&mut state);
        }
    }
}
