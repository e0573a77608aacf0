//! A reliable queue pair: the core's [`Connection`], its TCP socket, and how the two find each other.
//!
//! Without the connection manager the program tells both ends the other's address and number (`ibv_modify_qp`). The
//! end with the smaller (address, number) dials the other's QPN port; the other waits for it. Work requests may be
//! posted at once and wait. A queue pair that is connected to itself gets a socket pair.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::{Connection, End, First, Peer, StreamConfig};
use anywarp_core::error::Misuse;
use anywarp_core::fault::{Service, What};
use anywarp_core::llp::mpa::startup::{InitiatorConfig, Request, Rtr, StreamParams};
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::{Attr, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::wr::{RecvRequest, WorkRequest, given};

use crate::clock;
use crate::config::{Framing, config};
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::device::{self, AsyncItem, Context, event};
use crate::fatal::{Mortal, provoke};
use crate::fault::{Faults, RequestEffect};
use crate::fd::EngineFd;
use crate::log;
use crate::net::drain::{Draining, drain};
use crate::net::socket;
use crate::net::tcp::{self, Outcome, Tcp};
use crate::port::{HELLO, Port};
use crate::stat::{self, Counted};
use crate::sys::socket::set_option;
use crate::verbs::made;
use crate::worker::{Engine, Owes, Source, Token};

/// How long the peer's port may refuse us before the connection counts as failed, at least.
const DIAL_AT_LEAST: Duration = Duration::from_secs(3);
/// How long the rest of a message that is half here is waited for when its queue pair is destroyed.
const LAST_MESSAGE: Duration = Duration::from_millis(20);
/// Peers that wait for a queue pair to be told of them.
const PARKED_MAX: usize = 8;
/// Pause before it is tried again.
const DIAL_AGAIN: Duration = Duration::from_millis(20);

/// Told of a queue pair's connection by whoever manages it.
pub trait Manager: Send + Sync {
    /// The peer's first message came: the connection works both ways.
    fn started(&self);
    /// The connection is over.
    fn gone(&self);
}

/// Where a queue pair's peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The peer's queue pair number; 0: the connection manager finds it.
    pub qpn: u32,
    /// Hop limit or time to live of datagrams, 0 for the system's default.
    pub hop_limit: u8,
    /// Traffic class or type of service of datagrams.
    pub traffic_class: u8,
}

struct Inner {
    conn: Connection,
    tcp: Option<Tcp>,
    token: Token,
    route: Option<Route>,
    /// A peer that dialed before our program told us of it.
    parked: Vec<(Arc<Startup>, u32)>,
    dialing: Option<Arc<Startup>>,
    dial_until: Option<Instant>,
    redial: Option<Instant>,
    /// Until then the peer, whose part it is, should have dialed: afterwards nobody is there.
    awaited_until: Option<Instant>,
    manager: Option<Weak<dyn Manager>>,
    managed: bool,
    destroyed: bool,
    /// Its socket is not watched yet.
    unwatched: bool,
    /// When a peer that asked for a connection must have said something.
    first_by: Option<Instant>,
    deadline: Option<Instant>,
    /// A fault: nothing is sent before then.
    held_until: Option<Instant>,
    /// Requests wait for more, and the engine knows.
    holds: bool,
    /// Requests that were posted, and their bytes.
    requests: (u64, u64),
    /// What the last connection was closed with.
    draining: Draining,
}

/// A reliable queue pair.
pub struct RcQp {
    engine: &'static Engine,
    context: Arc<Context>,
    /// Its number.
    pub number: u32,
    /// Address of the C object.
    pub cookie: Arc<AtomicUsize>,
    /// Address of the shared receive queue's C object.
    srq_cookie: Option<Arc<AtomicUsize>>,
    port: Arc<Port>,
    me: Weak<Self>,
    inner: Mutex<Inner>,
    /// Whom it is connected to, for the log: beside `inner`, which is locked when something is said of a connection.
    peer: Mutex<Option<SocketAddr>>,
    owes: AtomicBool,
    /// What goes wrong on demand.
    faults: Option<Box<Faults>>,
}

impl std::fmt::Debug for RcQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RcQp(0x{:06x})", self.number)
    }
}

impl RcQp {
    /// Makes a queue pair. `parts` gets the number.
    pub fn new(
        context: &Arc<Context>,
        srq_cookie: Option<Arc<AtomicUsize>>,
        parts: impl FnOnce(u32) -> Parts,
    ) -> std::io::Result<Arc<Self>> {
        let engine = context.engine;
        let (port, number) = Port::allocate(engine)?;
        let qp = Arc::new_cyclic(|me| Self {
            engine,
            context: Arc::clone(context),
            number,
            cookie: Arc::new(AtomicUsize::new(0)),
            srq_cookie,
            port,
            me: me.clone(),
            inner: Mutex::new(Inner {
                conn: Connection::new(parts(number)),
                tcp: None,
                token: Token::NONE,
                route: None,
                parked: Vec::new(),
                dialing: None,
                dial_until: None,
                redial: None,
                awaited_until: None,
                manager: None,
                managed: false,
                destroyed: false,
                unwatched: false,
                first_by: None,
                deadline: None,
                held_until: None,
                holds: false,
                requests: (0, 0),
                draining: Draining::default(),
            }),
            peer: Mutex::new(None),
            owes: AtomicBool::new(false),
            faults: Faults::of(engine, number).map(Box::new),
        });
        engine
            .qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(number, qp.me.clone());
        stat::know(engine, || qp.me.clone());
        Ok(qp)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ------------------------------------------------------------------ the application

    /// Posts send requests until one is refused; gives its place in the list and why.
    pub fn post_send(
        &self,
        requests: impl Iterator<Item = Result<WorkRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.post_sends(requests.map(given))
    }

    /// Posts send requests, which functions make where they will lie, until one is refused; gives its place in the list and
    /// why.
    #[inline]
    pub fn post_sends<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    {
        self.engine.takes_requests().map_err(|e| (0, e))?;
        let mut inner = self.lock();
        let mut result = Ok(());
        let mut longest = 0;
        for (i, fill) in requests.enumerate() {
            let mut len = 0;
            let fill = |into: &mut WorkRequest| {
                fill(into)?;
                provoke::posted(into.id);
                len = into.payload.len();
                Ok(())
            };
            let posted = match &self.faults {
                None => inner.conn.post_send_with(fill),
                Some(faults) => {
                    made(fill).and_then(|r| self.post_with_faults(&mut inner, r, faults))
                }
            };
            if let Err(e) = posted {
                result = Err((i, e));
                break;
            }
            inner.requests.0 += 1;
            inner.requests.1 += len;
            longest = len.max(longest);
        }
        let burst = self.engine.is_burst();
        let limits = match &inner.tcp {
            Some(tcp) if !tcp.sends_by_socket() => &bounds::COALESCE_SHM,
            _ => &bounds::COALESCE_TCP,
        };
        let may_wait = self.faults.is_none() && inner.tcp.is_some();
        if may_wait
            && burst
            && inner.conn.may_coalesce_burst(limits, longest)
            && self.hold(&mut inner)
        {
            // The second poll in vain sends it.
        } else if may_wait && inner.conn.may_coalesce_behind_ack(limits, longest) {
            self.owe();
        } else {
            let now = clock::now();
            self.turn(&mut inner, now, Receive::Nothing, false);
            self.engine.extend_lease(now);
        }
        result
    }

    /// Says that something is to be sent when a thread looks for work.
    fn owe(&self) {
        if !self.owes.swap(true, Ordering::AcqRel)
            && let Some(me) = self.me.upgrade()
        {
            self.engine.owe(me);
        }
    }

    /// Has it sent with what is posted next. False: nobody polls, and it is to be sent now.
    fn hold(&self, inner: &mut Inner) -> bool {
        if inner.holds {
            self.engine.hold_more();
            return true;
        }
        let me = self.me.upgrade();
        inner.holds = self.engine.hold(me.map(|me| me as Arc<dyn Owes>));
        inner.holds
    }

    fn post_with_faults(
        &self,
        inner: &mut Inner,
        request: WorkRequest,
        faults: &Faults,
    ) -> Result<(), Misuse> {
        let what = What::of_request(&request.op, true);
        let told = |r: Route| SocketAddr::new(r.remote, u16::try_from(r.qpn >> 8).unwrap_or(0));
        let peer = self.peer().or_else(|| inner.route.map(told));
        let len = request.payload.len();
        inner.conn.post_send(request)?;
        let attr = inner.conn.attr();
        let rnr = (attr.rnr_retry, attr.min_rnr_timer);
        let effect: RequestEffect = faults.request(what, peer, Service::Stream, len, rnr);
        if let Some(at) = effect.not_before {
            let waits = inner.held_until.filter(|until| *until > clock::now());
            let until = match waits {
                Some(until) if effect.extends => until.max(at),
                Some(until) => until,
                None => at,
            };
            inner.held_until = Some(until);
            self.ask_deadline(inner, until);
        }
        if let Some(status) = effect.fails {
            inner.conn.inject_error(status);
        } else if effect.kill {
            self.cut(inner);
        }
        Ok(())
    }

    /// A fault: the connection is reset, as if the network or the peer's machine had done it.
    fn cut(&self, inner: &mut Inner) {
        inner.conn.cut();
        if let Some(tcp) = &inner.tcp {
            // Closing then is a reset to the peer.
            let _ = rustix::net::sockopt::set_socket_linger(tcp.fd().get(), Some(Duration::ZERO));
            self.settle(inner, Outcome::Broken(libc::ECONNRESET));
        }
    }

    /// Whether nothing may be sent because a fault delays it.
    fn is_held(&self, inner: &mut Inner, now: Instant) -> bool {
        let Some(until) = inner.held_until else {
            return false;
        };
        if until <= now || inner.destroyed {
            inner.held_until = None;
            return false;
        }
        self.ask_deadline(inner, until);
        true
    }

    /// Posts receives until one is refused.
    pub fn post_recv(
        &self,
        requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.engine.takes_requests().map_err(|e| (0, e))?;
        let mut inner = self.lock();
        for (i, request) in requests.enumerate() {
            let request = request.inspect(|r| provoke::posted(r.id));
            if let Err(e) = request.and_then(|r| inner.conn.post_recv(r)) {
                return Err((i, e));
            }
        }
        Ok(())
    }

    /// Its state and attributes.
    pub fn query(&self) -> (State, Attr) {
        let inner = self.lock();
        (inner.conn.state(), *inner.conn.attr())
    }

    /// Whether it is on its way to having nothing outstanding (`sq_draining`).
    pub fn is_draining(&self) -> bool {
        self.lock().conn.is_draining()
    }

    /// Where its peer is, if it was told.
    pub fn route(&self) -> Option<Route> {
        self.lock().route
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`); `route` comes with the change to RTR.
    pub fn modify(
        &self,
        given: u32,
        next: Option<State>,
        assumed: Option<State>,
        attr: &Attr,
        route: Option<Route>,
    ) -> Result<(), Misuse> {
        self.engine.works()?;
        let now = clock::now();
        let mut inner = self.lock();
        if matches!(next, Some(State::Error | State::Reset)) {
            self.turn(&mut inner, now, Receive::All, true);
        }
        let before = inner.conn.modify(given, next, assumed, attr)?;
        let state = inner.conn.state();
        match state {
            State::Reset => self.drop_stream(&mut inner),
            State::Error => {}
            State::Rtr if before != State::Rtr => {
                inner.route = route;
                self.find_peer(&mut inner, now);
            }
            State::Rts if !inner.managed => {
                let (ird, ord) = (
                    attr_ird(inner.conn.attr()),
                    u32::from(inner.conn.attr().max_rd_atomic),
                );
                inner.conn.set_depths(ird, ord);
                inner.dial_until = Some(
                    now + inner
                        .conn
                        .silence_limit()
                        .unwrap_or(DIAL_AT_LEAST)
                        .max(DIAL_AT_LEAST),
                );
                let waits =
                    inner.tcp.is_none() && inner.dialing.is_none() && inner.redial.is_none();
                if let (true, Some(limit)) = (waits, inner.conn.silence_limit()) {
                    // A card would repeat its requests until then, and give up.
                    let until = now + limit.max(DIAL_AT_LEAST);
                    inner.awaited_until = Some(until);
                    self.ask_deadline(&mut inner, until);
                }
            }
            _ => {}
        }
        self.set_user_timeout(&inner);
        self.turn(&mut inner, now, Receive::Nothing, false);
        Ok(())
    }

    /// The queue pair goes away: requests are dropped, the peer is told.
    pub fn destroy(&self) {
        let now = clock::now();
        {
            let mut inner = self.lock();
            inner.destroyed = true;
            inner.manager = None;
            // What has arrived was received as far as the peer knows, as with a card that works by itself: it is taken
            // and acknowledged before the stream closes.
            self.turn(&mut inner, now, Receive::All, true);
            self.finish_message(&mut inner, now);
            if !is_live(inner.conn.state()) {
                // It was never ready, so it has said nothing: the peer is not told of a connection that begins and ends.
                self.drop_stream(&mut inner);
            }
            inner.conn.leave("destroyed");
            self.turn(&mut inner, now, Receive::Nothing, true);
            self.drop_stream(&mut inner);
            inner.conn.purge();
        }
        self.engine
            .qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.number);
        self.port.release(self.number);
    }

    /// Whether it is connected to a peer that does not tell when it has done what was asked.
    pub fn has_standard_peer(&self) -> bool {
        let inner = self.lock();
        inner.conn.end() == End::Open && inner.conn.peer() == Some(Peer::Standard)
    }

    /// Waits, if that comes in time, until the peer has what was sent over a connection that is closed now. Towards standard
    /// peers a request is complete before.
    pub fn wait_drained(&self, until: Option<Instant>) {
        let draining = self.lock().draining.clone();
        draining.wait_drained(until);
    }

    /// Takes the rest of a message that is half here, if it comes soon: a card would go on receiving while the program is
    /// on its way to destroying the queue pair.
    fn finish_message(&self, inner: &mut Inner, since: Instant) {
        let until = since + LAST_MESSAGE;
        while inner.conn.is_receiving() && inner.conn.state() != State::Error {
            let left = until.saturating_duration_since(clock::now());
            let Some(tcp) = &inner.tcp else { return };
            if left.is_zero() || !tcp.wait(left) {
                return;
            }
            self.turn(inner, clock::now(), Receive::All, true);
        }
    }

    // ------------------------------------------------------------------ finding the peer

    fn find_peer(&self, inner: &mut Inner, now: Instant) {
        if inner.managed || inner.tcp.is_some() {
            return;
        }
        let Some(route) = inner.route else { return };
        if route.qpn == 0 {
            // The connection manager brings the connection.
            return;
        }
        inner.dial_until = Some(now + DIAL_AT_LEAST);
        let own = (device::gid_of(route.local), self.number);
        let peer = (device::gid_of(route.remote), route.qpn);
        if self.number == route.qpn && is_own(route.remote) {
            self.connect_to_itself(inner, now);
        } else if own < peer {
            self.dial(inner, now);
        } else {
            let parked = std::mem::take(&mut inner.parked);
            for (startup, source) in parked {
                // The one that was told to us is taken, the others are refused.
                self.take_incoming(inner, &startup, source, now);
            }
        }
    }

    fn dial(&self, inner: &mut Inner, now: Instant) {
        let Some(route) = inner.route else { return };
        let Some(me) = self.me.upgrade() else { return };
        let mut private_data = HELLO.to_vec();
        private_data.extend_from_slice(&route.qpn.to_be_bytes());
        private_data.extend_from_slice(&self.number.to_be_bytes());
        let config = InitiatorConfig {
            crc: config().crc,
            ird: u16::from(bounds::MAX_RD_ATOMIC),
            max_ird: u16::from(bounds::MAX_RD_ATOMIC),
            ord: u16::from(bounds::MAX_RD_ATOMIC),
            private_data,
            ..InitiatorConfig::default()
        };
        let port = u16::try_from(route.qpn >> 8).unwrap_or(0);
        let peer = SocketAddr::new(route.remote, port);
        let owner = Arc::new(Dialer(Arc::downgrade(&me)));
        let dial = Dial {
            peer,
            bind: Some(SocketAddr::new(route.local, 0)),
            config,
            timeout: REPLY_TIMEOUT,
            retry_refused: Duration::ZERO,
        };
        match Startup::dial(self.engine, owner, dial) {
            Ok(startup) => inner.dialing = Some(startup),
            Err(e) => {
                log!(Info, "qp 0x{:06x}: cannot dial {peer}: {e}", self.number);
                self.dial_failed(inner, now);
            }
        }
    }

    fn dial_failed(&self, inner: &mut Inner, now: Instant) {
        inner.dialing = None;
        if inner.dial_until.is_some_and(|t| now < t) {
            inner.redial = Some(now + DIAL_AGAIN);
            self.ask_deadline(inner, now + DIAL_AGAIN);
        } else {
            log!(Info, "qp 0x{:06x}: the peer cannot be reached", self.number);
            inner.conn.handle_connect_failed();
        }
    }

    /// A queue pair dialed us.
    pub(crate) fn incoming(&self, startup: &Arc<Startup>, source: u32) {
        let now = clock::now();
        let mut inner = self.lock();
        match inner.conn.state() {
            State::Rtr | State::Rts | State::Sqd => {
                self.take_incoming(&mut inner, startup, source, now);
            }
            State::Reset | State::Init => {
                // Several: which of them is the peer is known when the program says so.
                if inner.parked.len() < PARKED_MAX {
                    inner.parked.push((Arc::clone(startup), source));
                } else {
                    let _ = startup.reject(&[]);
                }
            }
            State::Sqe | State::Error => {
                let _ = startup.reject(&[]);
            }
        }
    }

    fn take_incoming(&self, inner: &mut Inner, startup: &Arc<Startup>, source: u32, now: Instant) {
        let expected = inner.route.is_some_and(|r| {
            r.qpn == source
                && (r.remote == startup.peer.ip() || is_own(r.remote) && is_own(startup.peer.ip()))
        });
        if !expected || inner.tcp.is_some() || inner.managed {
            log!(
                Info,
                "qp 0x{:06x}: refused queue pair 0x{source:06x} of {}",
                self.number,
                startup.peer
            );
            let _ = startup.reject(&[]);
            return;
        }
        let most = u16::from(bounds::MAX_RD_ATOMIC);
        match startup.accept(most, most, &[]) {
            Ok(opened) => self.attach(inner, opened, Side::Acceptor, now),
            Err(e) => log!(
                Info,
                "qp 0x{:06x}: the peer's connection broke: {e}",
                self.number
            ),
        }
    }

    fn connect_to_itself(&self, inner: &mut Inner, now: Instant) {
        let pair = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::NONBLOCK | rustix::net::SocketFlags::CLOEXEC,
            None,
        );
        let Ok((a, b)) = pair else {
            inner.conn.handle_connect_failed();
            return;
        };
        let config = StreamConfig {
            crc: false,
            mulpdu: bounds::MULPDU_ANYWARP,
            mulpdu_anywarp: bounds::MULPDU_ANYWARP,
            peer: Peer::Anywarp,
            ird: attr_ird(inner.conn.attr()),
            ord: u32::from(inner.conn.attr().max_rd_atomic),
            initiator: true,
            first: First::Nothing,
            managed: false,
            markers: false,
            shm_handover: None,
        };
        self.start(
            inner,
            Tcp::new(
                EngineFd::new(a),
                Some(EngineFd::new(b)),
                Vec::new(),
                Framing::Aligned,
            ),
            config,
            now,
        );
    }

    // ------------------------------------------------------------------ the stream

    /// The connection manager will bring the connection: do not dial.
    pub fn manage(&self, manager: Weak<dyn Manager>) {
        let mut inner = self.lock();
        inner.managed = true;
        inner.manager = Some(manager);
    }

    /// The connection manager brings the connection.
    pub fn attach_managed(&self, opened: Opened, initiator: bool) {
        let now = clock::now();
        let mut inner = self.lock();
        if inner.destroyed || inner.tcp.is_some() {
            let _none = drain(self.engine, opened.fd);
            return;
        }
        inner.managed = true;
        let side = if initiator {
            Side::ManagedInitiator
        } else {
            Side::ManagedAcceptor
        };
        self.attach(&mut inner, opened, side, now);
    }

    /// Changes what the connection manager decides: rights, depths, retries.
    pub fn with_attr(&self, change: impl FnOnce(&mut Attr)) {
        let mut inner = self.lock();
        change(inner.conn.attr_mut());
        self.set_user_timeout(&inner);
    }

    /// Sets the state past the rules of `ibv_modify_qp`, as the connection manager does.
    pub fn set_state(&self, to: State) {
        let now = clock::now();
        let mut inner = self.lock();
        inner.conn.set_state(to);
        self.turn(&mut inner, now, Receive::Nothing, true);
    }

    /// Ends the connection in order: everything is flushed, the peer hears of it.
    pub fn disconnect(&self) {
        let now = clock::now();
        let mut inner = self.lock();
        // What has arrived is taken and acknowledged first, as in `destroy`.
        self.turn(&mut inner, now, Receive::All, true);
        inner.conn.leave("disconnected");
        self.turn(&mut inner, now, Receive::Nothing, true);
    }

    fn attach(&self, inner: &mut Inner, opened: Opened, side: Side, now: Instant) {
        let params: &StreamParams = &opened.params;
        let managed = matches!(side, Side::ManagedInitiator | Side::ManagedAcceptor);
        let initiator = matches!(side, Side::Initiator | Side::ManagedInitiator);
        let peer = match (managed, initiator, opened.may_be_anywarp) {
            (false, ..) => Peer::Anywarp,
            (true, true, true) => Peer::Anywarp,
            (true, true, false) => Peer::Standard,
            (true, false, true) => Peer::Unknown,
            (true, false, false) => Peer::Standard,
        };
        let first = match (peer, params.rtr) {
            (Peer::Anywarp, _) if initiator => First::Hello,
            (_, Some(Rtr::Write)) => First::Write,
            (_, Some(Rtr::Read)) => First::Read,
            (_, Some(Rtr::Send)) => First::Send,
            (_, None) => First::Nothing,
        };
        let address = socket::peer_addr(&opened.fd);
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = address;
        let (ird, ord) = if managed {
            (u32::from(params.ird), u32::from(params.ord))
        } else {
            (
                attr_ird(inner.conn.attr()),
                u32::from(inner.conn.attr().max_rd_atomic),
            )
        };
        // A peer that is still unknown gets what every peer takes; its Hello raises that.
        let framing = config().framing;
        let mulpdu = if framing.aligns(Some(peer)) {
            tcp::mulpdu(&opened.fd, params.send_markers)
        } else {
            bounds::MULPDU_ANYWARP
        };
        let config = StreamConfig {
            crc: params.crc,
            mulpdu,
            mulpdu_anywarp: bounds::MULPDU_ANYWARP,
            peer,
            ird,
            ord,
            initiator,
            first: if initiator || peer != Peer::Anywarp {
                first
            } else {
                First::Nothing
            },
            managed,
            markers: params.send_markers,
            shm_handover: self.may_share(address),
        };
        log!(
            Info,
            "qp 0x{:06x}: connected to {} ({}), {:?} peer, crc {}, ird {ird}, ord {ord}",
            self.number,
            address.map_or_else(|| "itself".to_owned(), |a| a.to_string()),
            if initiator {
                "we dialed"
            } else {
                "peer dialed"
            },
            config.peer,
            if config.crc { "on" } else { "off" },
        );
        let silent = side == Side::ManagedAcceptor && opened.expects_rtr;
        let tcp = Tcp::new(opened.fd, None, opened.leftover, framing);
        self.start(inner, tcp, config, now);
        if silent && !inner.conn.has_started() {
            inner.first_by = Some(now + REPLY_TIMEOUT);
            self.ask_deadline(inner, now + REPLY_TIMEOUT);
        }
    }

    fn start(&self, inner: &mut Inner, tcp: Tcp, config: StreamConfig, now: Instant) {
        let Some(me) = self.me.upgrade() else { return };
        inner.dialing = None;
        inner.redial = None;
        inner.awaited_until = None;
        inner.conn.attach(config, now);
        self.drop_token(inner);
        inner.token = self.engine.reserve(me);
        // Before the queue pair is ready to receive nobody would read what comes: its socket is watched from then on.
        inner.unwatched = !is_live(inner.conn.state());
        let watched = if inner.unwatched {
            Ok(())
        } else {
            self.engine.watch(inner.token, tcp.fd().get(), false)
        };
        match watched {
            Ok(()) => {}
            Err(e) => {
                log!(
                    Error,
                    "qp 0x{:06x}: cannot watch its socket: {e}",
                    self.number
                );
                inner.conn.handle_connect_failed();
                return;
            }
        }
        inner.tcp = Some(tcp);
        self.set_user_timeout(inner);
        self.turn(inner, now, Receive::All, false);
    }

    /// Whether the peer at `address` may be offered shared memory, or offer us some.
    fn may_share(&self, address: Option<SocketAddr>) -> Option<u32> {
        let may = self.faults.is_none() && address.is_some_and(|a| is_own(a.ip()));
        device::transport().share_after().filter(|_| may)
    }

    /// There is something in shared memory.
    pub(crate) fn carried(&self, now: Instant) {
        let mut inner = self.lock();
        self.turn(&mut inner, now, Receive::Carried, false);
    }

    /// Takes the stream away from the queue pair.
    fn take_tcp(&self, inner: &mut Inner) -> Option<Tcp> {
        let tcp = inner.tcp.take()?;
        if let Some(watch) = tcp.watch() {
            self.engine.look_away(watch);
        }
        Some(tcp)
    }

    /// Tells the kernel how long the peer's machine may stay silent.
    fn set_user_timeout(&self, inner: &Inner) {
        if let (Some(tcp), Some(limit)) = (&inner.tcp, inner.conn.silence_limit()) {
            let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
            set_option(
                tcp.fd().get(),
                libc::IPPROTO_TCP,
                libc::TCP_USER_TIMEOUT,
                ms,
            );
        }
    }

    fn drop_token(&self, inner: &mut Inner) {
        let fd = inner.tcp.as_ref().map(|t| t.fd().get());
        self.engine.remove(inner.token, fd);
        inner.token = Token::NONE;
        inner.deadline = None;
    }

    /// Gives the socket away to be closed in order, and forgets peer and manager.
    fn drop_stream(&self, inner: &mut Inner) {
        self.drop_token(inner);
        if let Some(startup) = inner.dialing.take() {
            startup.cancel();
        }
        for (startup, _) in std::mem::take(&mut inner.parked) {
            let _ = startup.reject(&[]);
        }
        if let Some(tcp) = self.take_tcp(inner) {
            inner.draining = drain(self.engine, tcp.into_fd());
        }
        inner.route = None;
        inner.redial = None;
        inner.awaited_until = None;
        inner.managed = false;
        inner.manager = None;
    }

    /// One turn: receive if there is something, send what can be sent, settle the consequences.
    fn turn(&self, inner: &mut Inner, now: Instant, receive: Receive, flush: bool) {
        let mut outcome = Outcome::Open;
        let live = is_live(inner.conn.state());
        let held = inner.held_until.is_some() && self.is_held(inner, now);
        let mut receive = receive;
        if inner.unwatched
            && live
            && let Some(tcp) = &inner.tcp
        {
            inner.unwatched = false;
            receive = Receive::All;
            let _ = self.engine.watch(inner.token, tcp.fd().get(), false);
        }
        if let Some(tcp) = &mut inner.tcp
            && live
        {
            let was_carried = tcp.watch().is_some();
            if receive != Receive::Nothing {
                let socket = receive == Receive::All;
                let before = tcp.came();
                outcome = tcp.receive(self.engine, &mut inner.conn, now, socket);
                // Who polls looks often in vain.
                let in_vain = before == Some(tcp.counts.rx_bytes) && outcome == Outcome::Open;
                if !flush && tcp.is_drained() && inner.conn.is_quiet() {
                    if in_vain {
                        return;
                    }
                    // Nor is anything to be sent: the program hears sooner of what came.
                    let simple = outcome == Outcome::Open && !tcp.blocked && tcp.watch().is_none();
                    if simple && !inner.conn.wants_shm_offer() && !inner.conn.must_ack() {
                        self.look_ahead(inner);
                        return;
                    }
                }
            }
            if inner.conn.wants_shm_offer() {
                tcp.offer_carrier(&mut inner.conn);
            }
            let was_blocked = tcp.blocked;
            if !held {
                let sent = tcp.transmit(self.engine, &mut inner.conn, now, flush);
                if outcome == Outcome::Open {
                    outcome = sent;
                }
            }
            if let (false, Some(watch)) = (was_carried, tcp.watch()) {
                log!(
                    Info,
                    "qp 0x{:06x}: shares memory with its peer{}",
                    self.number,
                    if tcp.pulls() { "" } else { ", copying twice" }
                );
                self.engine.look_at(watch, &self.me);
            }
            if tcp.blocked != was_blocked && tcp.sends_by_socket() {
                self.engine
                    .want_write(inner.token, tcp.fd().get(), tcp.blocked);
            }
        }
        match outcome {
            Outcome::Open => {}
            Outcome::Eof => inner.conn.handle_eof(false),
            Outcome::Broken(e) => {
                log!(
                    Info,
                    "qp 0x{:06x}: connection lost: {}",
                    self.number,
                    std::io::Error::from_raw_os_error(e)
                );
                inner.conn.handle_eof(true);
            }
        }
        inner.conn.check_peer_left(now);
        self.settle(inner, outcome);
    }

    fn settle(&self, inner: &mut Inner, outcome: Outcome) {
        while let Some(what) = inner.conn.poll_event() {
            self.tell(inner, what);
        }
        let over = outcome != Outcome::Open;
        let done = match inner.conn.end() {
            End::Closing => inner.tcp.as_ref().is_some_and(Tcp::is_drained),
            End::Dead => inner.conn.is_attached() || over,
            End::Open => false,
        };
        if (done || over) && inner.tcp.is_some() {
            self.drop_token(inner);
            if let Some(tcp) = self.take_tcp(inner) {
                if over {
                    drop(tcp);
                } else {
                    inner.draining = drain(self.engine, tcp.into_fd());
                }
            }
            if let Some(manager) = inner.manager.as_ref().and_then(Weak::upgrade) {
                manager.gone();
            }
        }
        self.look_ahead(inner);
    }

    /// Says when time has to pass, and that an acknowledgement is owed.
    fn look_ahead(&self, inner: &mut Inner) {
        if let Some(at) = inner.conn.poll_timeout() {
            self.ask_deadline(inner, at);
        }
        if inner.conn.ack_due() && inner.held_until.is_none() {
            self.owe();
        }
    }

    fn ask_deadline(&self, inner: &mut Inner, at: Instant) {
        if inner.deadline.is_some_and(|t| t <= at) {
            return;
        }
        if inner.token == Token::NONE {
            let Some(me) = self.me.upgrade() else { return };
            inner.token = self.engine.reserve(me);
        }
        inner.deadline = Some(at);
        self.engine.deadline(inner.token, at);
    }

    fn tell(&self, inner: &Inner, what: AsyncEvent) {
        // The shared receive queue outlives the queue pair.
        if inner.destroyed && what != AsyncEvent::SrqLimit {
            return;
        }
        // A connection that breaks with the device is no event of its own: the device's says it.
        let error = matches!(
            what,
            AsyncEvent::QpFatal | AsyncEvent::QpRequest | AsyncEvent::QpAccess
        );
        if error && self.engine.is_broken() {
            return;
        }
        let number = match what {
            AsyncEvent::QpFatal => event::QP_FATAL,
            AsyncEvent::QpRequest => event::QP_REQ_ERR,
            AsyncEvent::QpAccess => event::QP_ACCESS_ERR,
            AsyncEvent::SqDrained => event::SQ_DRAINED,
            AsyncEvent::LastWqe => event::QP_LAST_WQE_REACHED,
            AsyncEvent::SrqLimit => event::SRQ_LIMIT_REACHED,
            AsyncEvent::Started => {
                if let Some(manager) = inner.manager.as_ref().and_then(Weak::upgrade) {
                    manager.started();
                }
                return;
            }
            AsyncEvent::PeerGone => {
                if let Some(manager) = inner.manager.as_ref().and_then(Weak::upgrade) {
                    manager.gone();
                }
                return;
            }
        };
        let cookie = match (what, &self.srq_cookie) {
            (AsyncEvent::SrqLimit, Some(cookie)) => cookie.load(Ordering::Relaxed),
            _ => self.cookie.load(Ordering::Relaxed),
        };
        if cookie == 0 {
            // No program has it: it is the end of a bare connection (`cm`).
            return;
        }
        self.context.events.push(AsyncItem {
            event: number,
            cookie,
        });
    }

    /// The address that it is, or was last, connected to.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Descriptor of its connection, for tests and diagnosis.
    pub fn raw_fd(&self) -> Option<i32> {
        self.lock().tcp.as_ref().map(|t| t.fd().get().as_raw_fd())
    }
}

/// Where a turn looks for what came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receive {
    /// Nowhere.
    Nothing,
    /// In shared memory.
    Carried,
    /// There and at the socket.
    All,
}

/// How a connection came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Initiator,
    Acceptor,
    ManagedInitiator,
    ManagedAcceptor,
}

/// Whether a queue pair in this state looks at its stream.
fn is_live(state: State) -> bool {
    matches!(state, State::Rtr | State::Rts | State::Sqd | State::Error)
}

/// Reads and atomics of the peer that a queue pair serves.
fn attr_ird(attr: &Attr) -> u32 {
    u32::from(attr.max_dest_rd_atomic)
}

/// Whether an address is one of this host.
pub(crate) fn is_own(ip: IpAddr) -> bool {
    ip.is_loopback() || crate::gids::place_of(ip).is_some()
}

impl Counted for RcQp {
    fn tell(&self, line: &mut String) {
        let inner = self.lock();
        let _ = write!(
            line,
            "rc 0x{:06x} state={:?} requests={} request_bytes={} received={} rnr={}",
            self.number,
            inner.conn.state(),
            inner.requests.0,
            inner.requests.1,
            inner.conn.received(),
            inner.conn.not_ready(),
        );
        if let Some(tcp) = &inner.tcp {
            if let Some(peer) = self.peer() {
                let _ = write!(line, " peer={peer}");
            }
            let _ = write!(line, " memory={}", u8::from(tcp.watch().is_some()));
            stat::tell_stream(line, &tcp.counts, tcp.fd().get());
        }
    }
}

impl Source for RcQp {
    fn ready(self: Arc<Self>, readable: bool, _writable: bool, now: Instant) {
        let mut inner = self.lock();
        provoke::working();
        let receive = if readable {
            Receive::All
        } else {
            Receive::Nothing
        };
        self.turn(&mut inner, now, receive, false);
    }

    fn glance(self: Arc<Self>, now: Instant) -> Option<bool> {
        let mut inner = self.lock();
        provoke::working();
        let received = |inner: &Inner| inner.tcp.as_ref().map_or(0, |t| t.counts.rx_bytes);
        let before = received(&inner);
        self.turn(&mut inner, now, Receive::All, false);
        Some(received(&inner) != before)
    }

    fn mute(&self, muted: bool) {
        let inner = self.lock();
        let Some(tcp) = inner.tcp.as_ref().filter(|_| !inner.unwatched) else {
            return;
        };
        // What waits to be sent needs the set, and so does what wakes who looks at shared memory.
        if !muted {
            let writable = tcp.blocked && tcp.sends_by_socket();
            self.engine
                .want_write(inner.token, tcp.fd().get(), writable);
        } else if !tcp.blocked && tcp.watch().is_none() {
            self.engine.watch_nothing(inner.token, tcp.fd().get());
        }
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let mut inner = self.lock();
        provoke::working();
        inner.deadline = None;
        if inner.redial.is_some_and(|t| t <= now) {
            inner.redial = None;
            if inner.tcp.is_none() && inner.route.is_some() && inner.conn.state() != State::Error {
                self.dial(&mut inner, now);
            }
        } else if let Some(at) = inner.redial {
            self.ask_deadline(&mut inner, at);
        }
        if let Some(until) = inner.awaited_until {
            if inner.tcp.is_some() || inner.conn.state() == State::Error {
                inner.awaited_until = None;
            } else if until <= now {
                inner.awaited_until = None;
                log!(Info, "qp 0x{:06x}: the peer did not connect", self.number);
                inner.conn.handle_not_connected();
            } else {
                self.ask_deadline(&mut inner, until);
            }
        }
        if let Some(by) = inner.first_by {
            if inner.conn.has_started() {
                inner.first_by = None;
            } else if by <= now {
                inner.first_by = None;
                log!(
                    Info,
                    "qp 0x{:06x}: the peer asked for a connection and says nothing",
                    self.number
                );
                inner.conn.leave("the peer says nothing");
            } else {
                self.ask_deadline(&mut inner, by);
            }
        }
        inner.conn.handle_timeout(now);
        // Acknowledgements that were held go with the rest.
        let flush = inner.held_until.is_some_and(|until| until <= now);
        self.turn(&mut inner, now, Receive::Nothing, flush);
    }
}

impl Owes for RcQp {
    fn flush_ack(&self, now: Instant) {
        self.owes.store(false, Ordering::Release);
        let mut inner = self.lock();
        inner.holds = false;
        if inner.conn.ack_due() || inner.conn.has_untaken() {
            self.turn(&mut inner, now, Receive::Nothing, true);
        }
    }
}

impl Mortal for RcQp {
    /// Everything is flushed. The stream ends as it is: what would be said of it may be wrong.
    fn device_broke(&self) {
        let mut inner = self.lock();
        inner.conn.leave("internal error");
        self.settle(&mut inner, Outcome::Broken(libc::EIO));
        self.drop_token(&mut inner);
        drop(self.take_tcp(&mut inner));
    }
}

/// Receives the outcome of our dialing.
struct Dialer(Weak<RcQp>);

impl Owner for Dialer {
    fn opened(&self, startup: &Arc<Startup>, opened: Opened) {
        let Some(qp) = self.0.upgrade() else { return };
        let now = clock::now();
        let mut inner = qp.lock();
        let ours = inner
            .dialing
            .as_ref()
            .is_some_and(|d| Arc::ptr_eq(d, startup));
        if ours && inner.tcp.is_none() && !inner.destroyed {
            qp.attach(&mut inner, opened, Side::Initiator, now);
        }
    }

    fn requested(&self, _startup: &Arc<Startup>, _request: Request) {}

    fn failed(&self, startup: &Arc<Startup>, failure: Failure) {
        let Some(qp) = self.0.upgrade() else { return };
        let now = clock::now();
        let mut inner = qp.lock();
        if inner
            .dialing
            .as_ref()
            .is_some_and(|d| Arc::ptr_eq(d, startup))
        {
            log!(
                Debug,
                "qp 0x{:06x}: dialing {}: {failure:?}",
                qp.number,
                startup.peer
            );
            qp.dial_failed(&mut inner, now);
            qp.turn(&mut inner, now, Receive::Nothing, false);
        }
    }
}
