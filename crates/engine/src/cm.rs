//! The connection manager (`rdma_cm(7)`): identifiers that listen, connect, accept, reject and disconnect.
//!
//! ```text
//!  active:   Idle --resolve_addr--> Resolved --resolve_route--> Routed --connect--> Connecting --Reply--> Connected
//!  passive:  Idle --bind--> Bound --listen--> Listening;  a Request makes a new one: Requested --accept--> Connected
//!  both:     Connected --disconnect, or the peer's end--> Over
//! ```
//!
//! A TCP port space port is the TCP port of that number, private data is the MPA frame's, so that siw and hardware
//! RNICs connect to and from it. Events of an identifier wait in the channel it was made with or moved to.

mod bare;
mod udp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::error::PeerError;
use anywarp_core::llp::mpa::startup::{Depths, InitiatorConfig, Request, RtrForms};
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::qp::State as QpState;
use rustix::net::SocketType;

use crate::channel::Channel;
use crate::config::{Framing, config};
use crate::connect::half_open;
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::engine::DeviceListener;
use crate::engine::{Engine, engine};
use crate::fd::EngineFd;
use crate::gids;
use crate::log;
use crate::net::route::source_for;
use crate::net::socket::{self, local_addr, unmapped};
use crate::net::tcp;
use crate::qp::{Manager, RcQp};
use crate::reactor::{Source, Token};
use crate::sys::socket::set_option;
use crate::verbs::QueuePair;

/// Port space of an identifier; the numbers are those of `enum rdma_port_space`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortSpace {
    /// Reliable connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// IPoIB multicast: as datagrams.
    Ipoib = 0x0002,
    /// Any service of InfiniBand: as connections.
    Ib = 0x013f,
}

/// Kind of an event; the numbers are those of `enum rdma_cm_event_type`.
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
}

/// For datagrams: the peer to send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Address and port of its QPN port.
    pub addr: SocketAddr,
    /// Its queue pair number.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// An event.
#[derive(Debug, Clone)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// To whom.
    pub id: Arc<CmId>,
    /// For a connect request: who listened.
    pub listener: Option<Arc<CmId>>,
    /// 0, or why not: a negative errno, or a reject reason of the InfiniBand CM.
    pub status: i32,
    /// What the peer's application said.
    pub private_data: Vec<u8>,
    /// Reads and atomics that we may be asked to serve.
    pub responder_resources: u8,
    /// Reads and atomics that we may have outstanding.
    pub initiator_depth: u8,
    /// For datagrams: whom to send to.
    pub peer: Option<Peer>,
    /// What the application gave when it joined a group.
    pub context: usize,
}

/// A channel of events.
pub type EventChannel = Channel<Event>;

/// What an application asks for when it connects or accepts (`struct rdma_conn_param`).
#[derive(Debug, Clone, Default)]
pub struct ConnParam {
    /// For the peer's application.
    pub private_data: Vec<u8>,
    /// Reads and atomics that we serve at once.
    pub responder_resources: u8,
    /// Reads and atomics that we will have outstanding.
    pub initiator_depth: u8,
    /// Tries after a loss of contact.
    pub retry_count: u8,
    /// Tries when no receive is posted.
    pub rnr_retry_count: u8,
    /// The queue pair, when it was not made through the identifier.
    pub qp_num: u32,
}

/// Reason of a reject that the application made (InfiniBand CM, consumer defined).
pub const REJECT_CONSUMER: i32 = 28;
/// Reason when nobody listens (invalid service).
pub const REJECT_NO_LISTENER: i32 = 8;
/// How long a port that nobody listens on is tried.
///
/// Programs connect while the other end is between `rdma_bind_addr` and `rdma_listen` (perftest with `-R` does). With
/// hardware the request takes milliseconds to get there, through management datagrams; a TCP connection is refused in
/// microseconds. See docs/decisions/004.
const RETRY_REFUSED: Duration = Duration::from_millis(400);
/// `min_rnr_timer` of connections made here: 10.24 ms.
///
/// The kernel's connection manager asks for 655 ms. Programs that count on a few repeats (five, in rdma-core's tests) do
/// so with that in mind; those that run dry often want it short.
pub const MIN_RNR_TIMER: u8 = 20;
/// `timeout` of connections made here: 4.096 µs × 2^18, about a second.
const TIMEOUT: u8 = 18;

/// Connections that the kernel keeps for a listener, at least.
const KERNEL_BACKLOG: i32 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Bound,
    Resolved,
    Routed,
    Listening,
    Connecting,
    Requested,
    Accepting,
    Connected,
    Over,
}

struct State {
    phase: Phase,
    channel: Arc<EventChannel>,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// Holds the port between bind and listen or connect.
    bound: Option<EngineFd>,
    listener: Option<(EngineFd, Token)>,
    backlog: usize,
    /// Requests that the application has not answered.
    pending: Vec<Weak<CmId>>,
    qp: Option<Arc<RcQp>>,
    /// The connection's own end, when the program brings no queue pair.
    bare: Option<Arc<RcQp>>,
    datagram: Option<(QueuePair, u32)>,
    udp: Option<udp::Side>,
    asker: Option<udp::Asker>,
    startup: Option<Arc<Startup>>,
    param: ConnParam,
    offered: (u8, u8),
    reuse: bool,
    v6only: bool,
    ack_timeout: Option<u8>,
    destroyed: bool,
}

/// An identifier.
pub struct CmId {
    engine: &'static Engine,
    /// Address of the C object.
    pub c_object: AtomicUsize,
    /// Its port space.
    pub port_space: PortSpace,
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

impl CmId {
    /// A new identifier whose events go to `channel`.
    pub fn new(channel: &Arc<EventChannel>, port_space: PortSpace) -> io::Result<Arc<Self>> {
        Ok(Self::make(engine()?, channel, port_space))
    }

    fn make(
        engine: &'static Engine,
        channel: &Arc<EventChannel>,
        port_space: PortSpace,
    ) -> Arc<Self> {
        let id = Arc::new_cyclic(|me| Self {
            engine,
            c_object: AtomicUsize::new(0),
            port_space,
            me: me.clone(),
            state: Mutex::new(State {
                phase: Phase::Idle,
                channel: Arc::clone(channel),
                local: None,
                remote: None,
                bound: None,
                listener: None,
                backlog: 0,
                pending: Vec::new(),
                qp: None,
                bare: None,
                datagram: None,
                udp: None,
                asker: None,
                startup: None,
                param: ConnParam::default(),
                offered: (0, 0),
                reuse: false,
                v6only: false,
                ack_timeout: None,
                destroyed: false,
            }),
        });
        let listener: Arc<dyn DeviceListener> = Arc::clone(&id) as _;
        engine.subscribe(Arc::downgrade(&listener));
        let listener: Arc<dyn gids::Listener> = Arc::clone(&id) as _;
        gids::listen(engine, Arc::downgrade(&listener));
        id
    }

    fn is_datagram(&self) -> bool {
        matches!(self.port_space, PortSpace::Udp | PortSpace::Ipoib)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ------------------------------------------------------------------ addresses

    /// Our address.
    pub fn local(&self) -> Option<SocketAddr> {
        self.lock().local
    }

    /// The peer's address.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.lock().remote
    }

    /// `RDMA_OPTION_ID_REUSEADDR`, `RDMA_OPTION_ID_AFONLY`, `RDMA_OPTION_ID_ACK_TIMEOUT`.
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

    /// The acknowledgement time-out that was set, or the default.
    pub fn ack_timeout(&self) -> u8 {
        self.lock().ack_timeout.unwrap_or(TIMEOUT)
    }

    /// Binds to an address (`rdma_bind_addr(3)`); port 0 takes a free one.
    pub fn bind(&self, to: SocketAddr) -> io::Result<()> {
        let mut state = self.lock();
        if state.phase != Phase::Idle {
            return Err(os(libc::EINVAL));
        }
        let to = unmapped(to);
        let kind = match self.port_space {
            PortSpace::Udp | PortSpace::Ipoib => SocketType::DGRAM,
            PortSpace::Tcp | PortSpace::Ib => SocketType::STREAM,
        };
        let fd = socket::open(to.ip(), kind)?;
        if to.is_ipv6() {
            let v6only = state.v6only || !to.ip().is_unspecified();
            set_option(
                fd.get(),
                libc::IPPROTO_IPV6,
                libc::IPV6_V6ONLY,
                i32::from(v6only),
            );
        }
        if kind == SocketType::STREAM {
            // As for every server: a restart does not have to wait for the old connections' TIME-WAIT. Two listeners on
            // one port still collide.
            set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        }
        match rustix::net::bind(fd.get(), &to) {
            Ok(()) => {}
            Err(rustix::io::Errno::ADDRNOTAVAIL) => return Err(os(libc::ENODEV)),
            Err(e) => return Err(e.into()),
        }
        state.local = local_addr(&fd).map(|a| SocketAddr::new(to.ip(), a.port()));
        state.bound = Some(fd);
        state.phase = Phase::Bound;
        Ok(())
    }

    /// Finds our address for a peer (`rdma_resolve_addr(3)`); the outcome is an event.
    pub fn resolve_addr(&self, from: Option<SocketAddr>, to: SocketAddr) -> io::Result<()> {
        if let Some(from) = from
            && self.lock().phase == Phase::Idle
        {
            self.bind(from)?;
        }
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Idle | Phase::Bound) {
            return Err(os(libc::EINVAL));
        }
        let to = unmapped(to);
        // The wildcard address means this host, as for connect(2).
        let target = match to.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => {
                SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port())
            }
            IpAddr::V6(ip) if ip.is_unspecified() => {
                SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port())
            }
            _ => to,
        };
        match source_for(target) {
            Ok(source) => {
                let (ip, port) = match state.local {
                    Some(local) if !local.ip().is_unspecified() => (local.ip(), local.port()),
                    Some(local) => (source, local.port()),
                    None => (source, 0),
                };
                state.local = Some(SocketAddr::new(ip, port));
                state.remote = Some(target);
                state.phase = Phase::Resolved;
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

    /// Finds the way (`rdma_resolve_route(3)`): the kernel has routed already.
    pub fn resolve_route(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.phase != Phase::Resolved {
            return Err(os(libc::EINVAL));
        }
        state.phase = Phase::Routed;
        drop(state);
        self.push(EventKind::RouteResolved, 0);
        Ok(())
    }

    // ------------------------------------------------------------------ events

    fn push(&self, kind: EventKind, status: i32) {
        self.push_event(|_| {}, kind, status);
    }

    fn push_event(&self, fill: impl FnOnce(&mut Event), kind: EventKind, status: i32) {
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
        log!(
            Debug,
            "cm: {kind:?} status {status} for {:?}",
            self.remote()
        );
        let state = self.lock();
        if !state.destroyed {
            state.channel.push(event);
        }
    }

    /// Moves the identifier and its waiting events to another channel (`rdma_migrate_id(3)`).
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
                // A request that nobody has seen moves with its listener.
                event.id.lock().channel = Arc::clone(to);
            }
            to.push(event);
        }
    }

    /// Puts a request before the application, unless the listener is going away. False: it is.
    ///
    /// The listener stays locked meanwhile: destroying it either comes first or takes the event away.
    fn offer(&self, child: &Arc<Self>, fill: impl FnOnce(&mut Event)) -> bool {
        let Some(me) = self.me.upgrade() else {
            return false;
        };
        let mut state = self.lock();
        if state.destroyed || state.phase != Phase::Listening {
            return false;
        }
        child.lock().channel = Arc::clone(&state.channel);
        state.pending.push(Arc::downgrade(child));
        child.push_event(
            |e| {
                e.listener = Some(me);
                fill(e);
            },
            EventKind::ConnectRequest,
            0,
        );
        true
    }

    // ------------------------------------------------------------------ queue pair

    /// The queue pair of this identifier (`rdma_create_qp(3)`), or none (`rdma_destroy_qp(3)`).
    pub fn set_qp(&self, qp: Option<Arc<RcQp>>) {
        let mut state = self.lock();
        if qp.is_none() {
            state.datagram = None;
        }
        state.qp = qp;
    }

    /// The datagram queue pair of this identifier, and the Q_Key that peers are told.
    pub fn set_datagram(&self, qp: QueuePair, qkey: u32) {
        self.lock().datagram = Some((qp, qkey));
    }

    /// The queue pair to connect: the identifier's own, or the one whose number the application gave, or the end that
    /// was made because there is no such.
    fn find_qp(&self, number: u32) -> Option<(Arc<RcQp>, bool)> {
        {
            let state = self.lock();
            if let Some(qp) = &state.qp {
                return Some((Arc::clone(qp), true));
            }
            if let Some(qp) = &state.bare {
                return Some((Arc::clone(qp), false));
            }
        }
        RcQp::find(number).map(|qp| (qp, false))
    }

    /// Brings the identifier's queue pair to ready-to-send, as the kernel does when a connection is made.
    fn make_ready(&self, qp: &RcQp, own: bool, ird: u8, ord: u8) {
        let (param, timeout) = {
            let state = self.lock();
            (state.param.clone(), state.ack_timeout.unwrap_or(TIMEOUT))
        };
        if !own {
            // The application moves it through the states itself (`rdma_init_qp_attr(3)`).
            return;
        }
        qp.with_attr(|attr| {
            attr.access = rights(ird);
            attr.timeout = timeout;
            attr.retry_cnt = param.retry_count.min(7);
            attr.rnr_retry = match param.rnr_retry_count {
                // Not set, more often than meant: with iWARP the field means nothing (rdma_connect(3)), and on hardware
                // a message that comes a moment too early would end the connection.
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

    /// What the connection agreed on, for `rdma_init_qp_attr(3)`: (responder resources, initiator depth, retries, RNR
    /// retries).
    pub fn agreed(&self) -> (u8, u8, u8, u8) {
        let state = self.lock();
        // Before the answer it is what the peer asked for; an MPA Request says nothing of repeats, so: for ever.
        let (retry, rnr_retry) = match state.phase {
            Phase::Requested => (7, 7),
            _ => (state.param.retry_count, state.param.rnr_retry_count),
        };
        (
            state.param.responder_resources,
            state.param.initiator_depth,
            retry,
            rnr_retry,
        )
    }

    // ------------------------------------------------------------------ active side

    /// Connects (`rdma_connect(3)`).
    pub fn connect(&self, param: ConnParam) -> io::Result<()> {
        if self.is_datagram() {
            return self.ask(param);
        }
        if param.private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let qp = self.find_or_make_qp(param.qp_num)?;
        let (remote, local) = {
            let mut state = self.lock();
            if state.phase != Phase::Routed {
                return Err(os(libc::EINVAL));
            }
            let remote = state.remote.ok_or_else(|| os(libc::EINVAL))?;
            state.phase = Phase::Connecting;
            state.param = param.clone();
            // The port that was held is for the connection now.
            state.bound = None;
            (remote, state.local)
        };
        if let Some((qp, _)) = &qp
            && let Some(me) = self.me.upgrade()
        {
            let manager: Weak<dyn Manager> = Arc::downgrade(&(me as Arc<dyn Manager>));
            qp.manage(manager);
        }
        let me: Arc<dyn Owner> = self.me.upgrade().ok_or_else(|| os(libc::EINVAL))?;
        let config = InitiatorConfig {
            crc: config().crc,
            ird: u16::from(param.responder_resources.min(bounds::MAX_RD_ATOMIC)),
            max_ird: u16::from(bounds::MAX_RD_ATOMIC),
            ord: u16::from(param.initiator_depth.min(bounds::MAX_RD_ATOMIC)),
            private_data: param.private_data,
            // All three are the mark by which two anywarp ends know each other.
            rtr: match config().framing {
                Framing::Standard => RtrForms {
                    send: false,
                    ..RtrForms::ALL
                },
                Framing::Aligned | Framing::Large => RtrForms::ALL,
            },
            ..InitiatorConfig::default()
        };
        let dial = Dial {
            peer: remote,
            bind: local,
            config,
            timeout: REPLY_TIMEOUT,
            retry_refused: RETRY_REFUSED,
        };
        match Startup::dial(self.engine, me, dial) {
            Ok(startup) => {
                self.lock().startup = Some(startup);
                Ok(())
            }
            Err(e) => {
                self.lock().phase = Phase::Over;
                self.push(
                    EventKind::Unreachable,
                    -e.raw_os_error().unwrap_or(libc::EHOSTUNREACH),
                );
                Ok(())
            }
        }
    }

    // ------------------------------------------------------------------ passive side

    /// Listens (`rdma_listen(3)`).
    pub fn listen(&self, backlog: i32) -> io::Result<()> {
        if self.lock().phase == Phase::Idle {
            self.bind((Ipv4Addr::UNSPECIFIED, 0).into())?;
        }
        let mut state = self.lock();
        if state.phase != Phase::Bound {
            return Err(os(libc::EINVAL));
        }
        if self.is_datagram() {
            return self.listen_udp(&mut state, backlog);
        }
        let fd = state.bound.take().ok_or_else(|| os(libc::EINVAL))?;
        let backlog = if backlog <= 0 { 1024 } else { backlog };
        // The application's number bounds what it has to answer. The kernel's queue is for all who knock, and a full one
        // costs whoever comes next a second.
        if let Err(e) = rustix::net::listen(fd.get(), backlog.max(KERNEL_BACKLOG)) {
            state.bound = Some(fd);
            return Err(e.into());
        }
        state.backlog = usize::try_from(backlog).unwrap_or(1024).max(16);
        state.phase = Phase::Listening;
        let source = Arc::new(ListenSource(self.me.clone()));
        let token = self.engine.add(source, fd.get(), false)?;
        state.listener = Some((fd, token));
        Ok(())
    }

    fn accept_sockets(&self) {
        let Some(owner) = self.me.upgrade() else {
            return;
        };
        let owner: Arc<dyn Owner> = owner;
        let state = self.lock();
        if let Some((listener, token)) = &state.listener {
            half_open::accept(self.engine, listener, *token, &owner);
        }
    }

    fn resume_listening(&self) {
        if let Some((listener, token)) = &self.lock().listener {
            half_open::resume(self.engine, listener, *token);
        }
    }

    /// Accepts a connect request (`rdma_accept(3)`).
    pub fn accept(&self, param: ConnParam) -> io::Result<()> {
        if self.is_datagram() {
            let private_data = param.private_data.clone();
            self.lock().param = param;
            return self.answer(0, &private_data);
        }
        if param.private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let qp = self.find_or_make_qp(param.qp_num)?;
        let (startup, offered) = {
            let mut state = self.lock();
            if state.phase != Phase::Requested {
                return Err(os(libc::EINVAL));
            }
            let startup = state.startup.take().ok_or_else(|| os(libc::EINVAL))?;
            state.param = param.clone();
            state.phase = Phase::Accepting;
            (startup, state.offered)
        };
        let Some((qp, own)) = qp else {
            self.lock().phase = Phase::Over;
            let _ = startup.reject(&[]);
            return Err(os(libc::EINVAL));
        };
        // The peer serves `offered.1` reads of ours and wants `offered.0` of its own served.
        let ird = param.responder_resources.min(bounds::MAX_RD_ATOMIC);
        let ord = param
            .initiator_depth
            .min(bounds::MAX_RD_ATOMIC)
            .min(offered.1);
        if let Some(me) = self.me.upgrade() {
            let manager: Weak<dyn Manager> = Arc::downgrade(&(me as Arc<dyn Manager>));
            qp.manage(manager);
        }
        let opened = match startup.accept(ird.into(), ord.into(), &param.private_data) {
            Ok(opened) => opened,
            Err(e) => {
                self.lock().phase = Phase::Over;
                return Err(e);
            }
        };
        let at_once = !opened.expects_rtr;
        self.make_ready(
            &qp,
            own,
            u8::try_from(opened.params.ird).unwrap_or(0),
            u8::try_from(opened.params.ord).unwrap_or(0),
        );
        qp.attach_managed(opened, false);
        self.ready_bare();
        if at_once {
            self.established();
        }
        Ok(())
    }

    /// Rejects a connect request (`rdma_reject(3)`).
    pub fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        if self.is_datagram() {
            return self.answer(udp::SIDR_REJECT, private_data);
        }
        if private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let startup = {
            let mut state = self.lock();
            if state.phase != Phase::Requested {
                return Err(os(libc::EINVAL));
            }
            state.phase = Phase::Over;
            state.startup.take().ok_or_else(|| os(libc::EINVAL))?
        };
        startup.reject(private_data)
    }

    fn established(&self) {
        {
            let mut state = self.lock();
            if state.phase != Phase::Accepting {
                return;
            }
            state.phase = Phase::Connected;
        }
        self.push_agreed(EventKind::Established, Vec::new(), None);
    }

    /// Tells of a connection, with the depths that the peer named, or else those that it works with.
    // RFC 6581 §9.1 [mpa-depths-told]: the application hears what the peer named, not what came of it.
    fn push_agreed(&self, kind: EventKind, private_data: Vec<u8>, peer: Option<Depths>) {
        let (ird, ord) = peer.map_or_else(
            || {
                let state = self.lock();
                (state.param.responder_resources, state.param.initiator_depth)
            },
            told,
        );
        self.push_event(
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

    /// Ends the connection (`rdma_disconnect(3)`); both ends hear of it.
    ///
    /// True when an event will say so; false when the connection is over already.
    pub fn disconnect(&self) -> io::Result<bool> {
        let number = {
            let state = self.lock();
            match state.phase {
                Phase::Connected | Phase::Accepting => state.param.qp_num,
                Phase::Over => return Ok(false),
                _ => return Err(os(libc::EINVAL)),
            }
        };
        match self.find_qp(number) {
            Some((qp, _)) => qp.disconnect(),
            // Its queue pair was destroyed first.
            None => self.gone(),
        }
        Ok(true)
    }

    /// The identifier goes away; its waiting events too.
    pub fn destroy(&self) {
        let (bare, listener, startup, phase, channel, pending, udp) = {
            let mut state = self.lock();
            state.destroyed = true;
            state.bound = None;
            state.qp = None;
            state.datagram = None;
            (
                state.bare.take(),
                state.listener.take(),
                state.startup.take(),
                std::mem::replace(&mut state.phase, Phase::Over),
                Arc::clone(&state.channel),
                std::mem::take(&mut state.pending),
                state.udp.take(),
            )
        };
        self.drop_udp(udp);
        if let Some(bare) = bare {
            bare.destroy();
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
        // Requests that the application never saw.
        for child in pending.iter().filter_map(Weak::upgrade) {
            if child.c_object.load(Ordering::Relaxed) == 0 {
                child.destroy();
            }
        }
    }
}

/// What the peer may do on a connection: as the kernel's connection manager grants it.
pub fn rights(ird: u8) -> Access {
    if ird > 0 {
        Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
    } else {
        Access::REMOTE_WRITE
    }
}

/// The peer's depths as an event tells them: its outbound is our inbound and the other way round.
fn told(peer: Depths) -> (u8, u8) {
    let limit = |n: u16| {
        u8::try_from(n)
            .unwrap_or(u8::MAX)
            .min(bounds::MAX_RD_ATOMIC)
    };
    (limit(peer.ord), limit(peer.ird))
}

impl Owner for CmId {
    fn opened(&self, startup: &Arc<Startup>, opened: Opened) {
        let number = {
            let mut state = self.lock();
            if state.destroyed
                || !state
                    .startup
                    .as_ref()
                    .is_none_or(|s| Arc::ptr_eq(s, startup))
            {
                return;
            }
            state.startup = None;
            if let Some(local) = local_addr(&opened.fd) {
                state.local = Some(local);
            }
            state.phase = Phase::Connected;
            state.param.responder_resources = u8::try_from(opened.params.ird).unwrap_or(u8::MAX);
            state.param.initiator_depth = u8::try_from(opened.params.ord).unwrap_or(u8::MAX);
            state.param.qp_num
        };
        let (ird, ord, ..) = self.agreed();
        let private_data = opened.private_data.clone();
        match self.find_qp(number) {
            Some((qp, own)) => {
                self.make_ready(&qp, own, ird, ord);
                // The event comes before the first bytes can raise another one.
                let kind = if own {
                    EventKind::Established
                } else {
                    EventKind::ConnectResponse
                };
                self.push_agreed(kind, private_data, opened.peer_depths);
                qp.attach_managed(opened, true);
            }
            None => {
                self.lock().phase = Phase::Over;
                // RFC 6581 §9.3 [mpa-local-error]: the peer took us for connected.
                let error = PeerError::MpaLocal;
                tcp::refuse(self.engine, opened.fd, &opened.params, &error);
                self.push(EventKind::ConnectError, -libc::EINVAL);
            }
        }
    }

    fn requested(&self, startup: &Arc<Startup>, request: Request) {
        let (channel, full) = {
            let mut state = self.lock();
            state.pending.retain(|p| {
                p.upgrade()
                    .is_some_and(|id| id.lock().phase == Phase::Requested)
            });
            let full = state.pending.len() >= state.backlog || state.phase != Phase::Listening;
            (Arc::clone(&state.channel), full)
        };
        if full {
            log!(Info, "cm: backlog is full, refusing {}", startup.peer);
            let _ = startup.reject(&[]);
            return;
        }
        let child = Self::make(self.engine, &channel, self.port_space);
        let (responder_resources, initiator_depth) = told(Depths {
            ird: request.ird.unwrap_or(u16::MAX),
            ord: request.ord.unwrap_or(u16::MAX),
        });
        {
            let mut state = child.lock();
            state.phase = Phase::Requested;
            state.local = startup.local();
            state.remote = Some(startup.peer);
            state.startup = Some(Arc::clone(startup));
            state.offered = (responder_resources, initiator_depth);
        }
        let offered = self.offer(&child, |e| {
            e.private_data = request.private_data;
            e.responder_resources = responder_resources;
            e.initiator_depth = initiator_depth;
        });
        if !offered {
            let _ = startup.reject(&[]);
        }
    }

    fn failed(&self, startup: &Arc<Startup>, failure: Failure) {
        {
            let mut state = self.lock();
            if state.phase != Phase::Connecting {
                // A connection to a listener that came to nothing concerns nobody.
                return;
            }
            if !state
                .startup
                .as_ref()
                .is_none_or(|s| Arc::ptr_eq(s, startup))
            {
                return;
            }
            state.startup = None;
            state.phase = Phase::Over;
        }
        log!(
            Info,
            "cm: connecting to {} failed: {failure:?}",
            startup.peer
        );
        match failure {
            Failure::Rejected {
                private_data,
                peer_depths,
                errno,
            } => {
                let refused_by_tcp = private_data.is_empty()
                    && errno == libc::ECONNREFUSED
                    && startup.never_connected();
                let reason = if refused_by_tcp {
                    REJECT_NO_LISTENER
                } else {
                    REJECT_CONSUMER
                };
                self.push_event(
                    |e| {
                        e.private_data = private_data;
                        (e.responder_resources, e.initiator_depth) =
                            peer_depths.map_or((0, 0), told);
                    },
                    EventKind::Rejected,
                    reason,
                );
            }
            Failure::Unreachable { errno } => self.push(EventKind::Unreachable, -errno),
            Failure::Broken { errno } => self.push(EventKind::ConnectError, -errno),
        }
    }
}

impl DeviceListener for CmId {
    fn device_fatal(&self) {
        let startup = {
            let mut state = self.lock();
            if matches!(state.phase, Phase::Idle | Phase::Bound) {
                // Not of this device yet.
                return;
            }
            state.phase = Phase::Over;
            state.startup.take()
        };
        if let Some(startup) = startup {
            startup.cancel();
        }
        // One that the program has not seen yet it need not give up.
        if self.c_object.load(Ordering::Relaxed) != 0 {
            self.push(EventKind::DeviceRemoval, 0);
        }
    }
}

impl gids::Listener for CmId {
    /// The interface behind our address is another card now (`RDMA_CM_EVENT_ADDR_CHANGE`): a hint, as when bonding moves
    /// traffic, for programs that want to connect anew.
    fn port_changed(&self, news: &gids::News) {
        let concerned = {
            let state = self.lock();
            let bound = !matches!(state.phase, Phase::Idle | Phase::Over);
            bound && state.local.is_some_and(|l| news.moved.contains(&l.ip()))
        };
        if concerned && self.c_object.load(Ordering::Relaxed) != 0 {
            self.push(EventKind::AddrChange, 0);
        }
    }
}

impl Manager for CmId {
    fn started(&self) {
        self.established();
    }

    fn gone(&self) {
        let before = {
            let mut state = self.lock();
            std::mem::replace(&mut state.phase, Phase::Over)
        };
        match before {
            Phase::Connected => self.push(EventKind::Disconnected, 0),
            Phase::Accepting => self.push(EventKind::ConnectError, -libc::ECONNRESET),
            _ => {}
        }
    }
}

struct ListenSource(Weak<CmId>);

impl Source for ListenSource {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.accept_sockets();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.resume_listening();
        }
    }
}
