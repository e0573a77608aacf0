//! How a reliable queue pair gets its connection.
//!
//! Without the connection manager, the program passes the address and the number of each end to the other
//! (`ibv_modify_qp(3)`). The end with the smaller (address, number) connects to the TCP port in the other end's queue
//! pair number (`connect::qpn_port`). Work requests may be posted before there is a connection. A queue pair that is
//! connected to itself uses a socket pair.
//!
//! With the connection manager, the manager opens the connection and passes it to [`RcQp::attach_managed`].

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::{First, OfferAfter, Peer, StreamConfig};
use anywarp_core::llp::mpa::startup::{InitiatorConfig, Request, Rtr, StreamParams};
use anywarp_core::verbs::qp::{Attr, State};

use super::timers::Timer;
use super::{Inner, Manager, Notice, RcQp, Receive, is_live};
use crate::address;
use crate::clock;
use crate::config::{Framing, config};
use crate::connect::qpn_port::HELLO;
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::connect::trunks::CountedStream;
use crate::fd::EngineFd;
use crate::gids;
use crate::log;
use crate::net::drain::drain;
use crate::net::shm;
use crate::net::socket;
use crate::net::tcp::{self, Tcp};

/// Shortest time that posted requests wait for the connection.
const DIAL_TIMEOUT_MIN: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 3000 });
/// How long one attempt to dial the peer may take.
const DIAL_REPLY_TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(400)
} else {
    REPLY_TIMEOUT
};
/// Shortest pause before a peer is dialed again.
const REDIAL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time between two attempts to dial a peer. It is shorter than [`DIAL_TIMEOUT_MIN`], for which requests of the peer wait: a peer
/// that becomes ready and posts requests is dialed in time.
const REDIAL_INTERVAL_MAX: Duration = Duration::from_secs(2);
/// The time between two attempts is the time that the queue pair has waited so far, divided by this number, but at least
/// [`REDIAL_INTERVAL`] and at most [`REDIAL_INTERVAL_MAX`].
const REDIAL_PART: u32 = 8;
/// Largest number of connections that wait until the program sets the peer. Further ones are rejected.
const EARLY_CONNECTIONS_MAX: usize = 8;

impl RcQp {
    /// Connects to the peer that the program has set, or waits for its connection.
    pub(super) fn find_peer(&self, inner: &mut Inner, now: Instant) {
        if inner.managed || inner.tcp.is_some() {
            return;
        }
        let Some(route) = inner.route else { return };
        if route.qpn == 0 {
            // The connection manager passes the connection.
            return;
        }
        inner.dial_until = Some(now + DIAL_TIMEOUT_MIN);
        inner.dial_since = Some(now);
        let own = (address::gid_of(route.local), self.common.number);
        let peer = (address::gid_of(route.remote), route.qpn);
        let is_itself = self.common.number == route.qpn && is_own(route.remote);
        if is_itself || own < peer {
            self.dial(inner, now);
        } else {
            let early_connections = std::mem::take(&mut inner.early_connections);
            for (startup, source) in early_connections {
                // `accept_peer` rejects connections of queue pairs that are not the peer.
                self.accept_peer(inner, &startup, source, now);
            }
        }
    }

    pub(super) fn dial(&self, inner: &mut Inner, now: Instant) {
        let Some(route) = inner.route else { return };
        inner.dialed_at = Some(now);
        if self.common.number == route.qpn && is_own(route.remote) {
            self.connect_to_itself(inner, now);
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        let mut private_data = HELLO.to_vec();
        private_data.extend_from_slice(&route.qpn.to_be_bytes());
        private_data.extend_from_slice(&self.common.number.to_be_bytes());
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
            timeout: DIAL_REPLY_TIMEOUT,
            retry_refused: Duration::ZERO,
            port_space: None,
        };
        match Startup::dial(self.engine, owner, dial) {
            Ok(startup) => inner.dialing = Some(startup),
            Err(e) => {
                log!(
                    Info,
                    "qp 0x{:06x}: cannot dial {peer}: {e}",
                    self.common.number
                );
                self.dial_failed(inner, now);
            }
        }
    }

    /// Handles that an attempt to dial the peer has failed. Attempts are repeated as long as the queue pair may receive, because the peer's
    /// program may set up its end at any time. IBA 9.7.6.1.3: only posted requests have a time-out.
    fn dial_failed(&self, inner: &mut Inner, now: Instant) {
        inner.dialing = None;
        let may_post = matches!(inner.conn.state(), State::Rts | State::Sqd);
        if may_post && inner.dial_until.is_some_and(|until| until <= now) {
            log!(
                Info,
                "qp 0x{:06x}: the peer cannot be reached",
                self.common.number
            );
            // Requests that are posted later have their own time: see `Connection::check_peer_left`.
            inner.dial_until = None;
            inner.conn.handle_connect_failed();
        }
        if matches!(inner.conn.state(), State::Rtr | State::Rts | State::Sqd) {
            let waited = inner.dial_since.map_or(Duration::ZERO, |t| now - t);
            let interval = (waited / REDIAL_PART).min(REDIAL_INTERVAL_MAX);
            let at = inner.dialed_at.map_or(now, |t| t + interval);
            self.start_timer(inner, Timer::Redial, at.max(now + REDIAL_INTERVAL));
        }
    }

    /// Shortens the pauses between attempts to dial the peer, because the program begins to use the queue pair.
    pub(super) fn dial_soon(&self, inner: &mut Inner, now: Instant) {
        inner.dial_since = Some(now);
        if inner.timers.get(Timer::Redial).is_some() {
            let earliest = inner.dialed_at.map_or(now, |t| t + REDIAL_INTERVAL);
            self.start_timer(inner, Timer::Redial, earliest.max(now));
        }
    }

    /// Handles a connection that queue pair `source` has opened to this one.
    pub(crate) fn incoming(&self, startup: &Arc<Startup>, source: u32) {
        let now = clock::now();
        self.with(|inner| match inner.conn.state() {
            State::Rtr | State::Rts | State::Sqd => {
                self.accept_peer(inner, startup, source, now);
            }
            // The program has not set the peer yet.
            State::Reset | State::Init => {
                // A queue pair that dials again has given up its earlier connection.
                inner.early_connections.retain(|(earlier, of)| {
                    let is_same = *of == source && earlier.peer.ip() == startup.peer.ip();
                    if is_same {
                        let _ = earlier.reject(&[]);
                    }
                    !is_same && earlier.awaits_answer()
                });
                if inner.early_connections.len() < EARLY_CONNECTIONS_MAX {
                    inner.early_connections.push((Arc::clone(startup), source));
                } else {
                    let _ = startup.reject(&[]);
                }
            }
            State::Sqe | State::Error => {
                let _ = startup.reject(&[]);
            }
        });
    }

    fn accept_peer(&self, inner: &mut Inner, startup: &Arc<Startup>, source: u32, now: Instant) {
        let expected = inner.route.is_some_and(|r| {
            r.qpn == source
                && (r.remote == startup.peer.ip() || is_own(r.remote) && is_own(startup.peer.ip()))
        });
        if !expected || inner.tcp.is_some() || inner.managed {
            log!(
                Info,
                "qp 0x{:06x}: rejected queue pair 0x{source:06x} of {}: no connection from it is awaited",
                self.common.number,
                startup.peer
            );
            let _ = startup.reject(&[]);
            return;
        }
        let depth = u16::from(bounds::MAX_RD_ATOMIC);
        match startup.accept(depth, depth, &[]) {
            Ok(opened) => self.attach(inner, opened, Side::Acceptor, false, now),
            Err(e) => log!(
                Info,
                "qp 0x{:06x}: the peer's connection broke: {e}",
                self.common.number
            ),
        }
    }

    /// Connects to itself by a socket pair.
    fn connect_to_itself(&self, inner: &mut Inner, now: Instant) {
        let pair = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::NONBLOCK | rustix::net::SocketFlags::CLOEXEC,
            None,
        );
        let Ok((a, b)) = pair else {
            self.dial_failed(inner, now);
            return;
        };
        let (ird, ord) = depths(inner.conn.attr());
        let config = StreamConfig {
            crc: false,
            mulpdu: bounds::MULPDU_ANYWARP,
            mulpdu_anywarp: bounds::MULPDU_ANYWARP,
            peer: Peer::Anywarp,
            ird,
            ord,
            initiator: true,
            first: First::Nothing,
            managed: false,
            stays: false,
            markers: false,
            offer_after: OfferAfter::NEVER,
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

    /// Called when the queue pair moves to RTS: limits the time that posted requests wait for this end to dial the peer, or for the peer to
    /// dial. The limit is the time for which a hardware adapter would repeat its first request (`timeout` and `retry_cnt`), but at
    /// least [`DIAL_TIMEOUT_MIN`]. With a `timeout` of 0, which means no limit, requests of the end that dials wait for
    /// [`DIAL_TIMEOUT_MIN`] only, and those of the other end without limit. The attempts to dial go on after the limit.
    pub(super) fn limit_dialing(&self, inner: &mut Inner, now: Instant) {
        let (ird, ord) = depths(inner.conn.attr());
        inner.conn.set_depths(ird, ord);
        let limit = inner.conn.silence_limit();
        let until = now + limit.unwrap_or(DIAL_TIMEOUT_MIN).max(DIAL_TIMEOUT_MIN);
        inner.dial_until = Some(until);
        let dials = inner.dialing.is_some() || inner.timers.get(Timer::Redial).is_some();
        if inner.tcp.is_some() {
            return;
        }
        if dials {
            self.dial_soon(inner, now);
        } else if limit.is_some() {
            self.start_timer(inner, Timer::PeerDials, until);
        }
    }

    /// Leaves the connection to a connection manager: the queue pair does not dial.
    pub fn manage(&self, manager: Weak<dyn Manager>) {
        let mut inner = self.lock();
        inner.managed = true;
        inner.manager = Some(manager);
    }

    /// Attaches a connection that the connection manager opened or accepted. `stays`: see [`StreamConfig::stays`].
    pub fn attach_managed(&self, opened: Opened, initiator: bool, stays: bool) {
        let now = clock::now();
        self.with(|inner| {
            if inner.destroyed || inner.tcp.is_some() {
                let _draining = drain(self.engine, opened.fd);
                return;
            }
            inner.managed = true;
            let side = if initiator {
                Side::ManagedInitiator
            } else {
                Side::ManagedAcceptor
            };
            self.attach(inner, opened, side, stays, now);
        });
    }

    fn attach(&self, inner: &mut Inner, opened: Opened, side: Side, stays: bool, now: Instant) {
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
        *self.peer.lock() = address;
        let (ird, ord) = if managed {
            (u32::from(params.ird), u32::from(params.ord))
        } else {
            depths(inner.conn.attr())
        };
        // A peer of unknown kind gets FPDUs that every peer accepts, until its Hello arrives.
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
            stays,
            markers: params.send_markers,
            offer_after: self.offer_after(params, address),
        };
        log!(
            Info,
            "qp 0x{:06x}: connected to {} ({}), {}, crc {}, ird {ird}, ord {ord}",
            self.common.number,
            address.map_or_else(|| "itself".to_owned(), |a| a.to_string()),
            if initiator { "initiator" } else { "responder" },
            match config.peer {
                Peer::Anywarp => "anywarp peer",
                Peer::Standard => "standard iWARP peer",
                Peer::Unknown => "anywarp or standard iWARP peer (its first message tells which)",
            },
            if config.crc { "on" } else { "off" },
        );
        let must_send_first = side == Side::ManagedAcceptor && opened.expects_rtr;
        let mut tcp = Tcp::new(opened.fd, None, opened.leftover, framing);
        tcp.settle_congestion();
        self.start(inner, tcp, config, now);
        if must_send_first && !inner.conn.has_started() {
            self.start_timer(inner, Timer::FirstMessage, now + REPLY_TIMEOUT);
        }
    }

    pub(super) fn start(&self, inner: &mut Inner, tcp: Tcp, config: StreamConfig, now: Instant) {
        let Some(me) = self.me.upgrade() else { return };
        inner.dialing = None;
        inner.timers.stop(Timer::Redial);
        inner.timers.stop(Timer::PeerDials);
        self.drop_token(inner);
        inner.token = self.engine.reserve(me);
        // The socket is watched from state RTR on. Nothing is received before.
        inner.unwatched = !is_live(inner.conn.state());
        if !inner.unwatched
            && let Err(e) = self.engine.watch(inner.token, tcp.fd().get(), false)
        {
            drop(tcp);
            self.cannot_watch(inner, &e);
            if config.managed {
                inner.conn.leave("its socket cannot be watched");
                inner.notify(Notice::Gone);
            } else if config.initiator {
                self.dial_failed(inner, now);
            } else {
                inner.conn.handle_connect_failed();
            }
            self.progress(inner, now, Receive::Nothing, false);
            return;
        }
        // Only a socket that is watched is attached: the end of a stream would not be noticed otherwise.
        inner.conn.attach(config, now);
        inner.tcp = Some(tcp);
        inner.counted = Some(CountedStream::new());
        self.set_user_timeout(inner);
        self.mark_packets(inner);
        self.progress(inner, now, Receive::All, false);
    }

    /// Logs that the socket of the connection could not be added to the engine's epoll set.
    pub(super) fn cannot_watch(&self, inner: &mut Inner, error: &std::io::Error) {
        self.drop_token(inner);
        log!(
            Error,
            "qp 0x{:06x}: cannot watch its socket: {error}",
            self.common.number
        );
    }

    /// The numbers of requests after which this end offers another carrier to the peer at `address`.
    fn offer_after(&self, params: &StreamParams, address: Option<SocketAddr>) -> OfferAfter {
        let without_faults = self.common.faults.is_none();
        let may_share = without_faults && address.is_some_and(|a| is_own(a.ip()));
        // On a trunk, packets have no class or level of their own.
        let may_trunk = without_faults
            && self.common.flow.is_none()
            && config().capture.is_none()
            && !params.send_markers
            && config().framing != Framing::Standard;
        OfferAfter {
            shm: shm::transport().share_after().filter(|_| may_share),
            trunk: config()
                .trunk
                .filter(|_| may_trunk)
                .map(|trunk| trunk.after),
        }
    }
}

/// Which end opened a connection, and whether a connection manager opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Initiator,
    Acceptor,
    ManagedInitiator,
    ManagedAcceptor,
}

/// The inbound and outbound RDMA Read depths of the attributes.
fn depths(attr: &Attr) -> (u32, u32) {
    let (ird, ord) = (attr.max_dest_rd_atomic, attr.max_rd_atomic);
    (ird.into(), ord.into())
}

/// Whether an address is one of this host.
fn is_own(ip: IpAddr) -> bool {
    ip.is_loopback() || gids::index_of(ip).is_some()
}

/// Receives the outcome of [`RcQp::dial`].
struct Dialer(Weak<RcQp>);

impl Dialer {
    /// Calls `f` with the queue pair, if it still waits for this start-up.
    fn with(&self, startup: &Arc<Startup>, f: impl FnOnce(&RcQp, &mut Inner)) {
        let Some(qp) = self.0.upgrade() else { return };
        qp.with(|inner| {
            let dialing = inner.dialing.as_ref();
            if dialing.is_some_and(|dialing| Arc::ptr_eq(dialing, startup)) {
                f(&qp, inner);
            }
        });
    }
}

impl Owner for Dialer {
    fn opened(&self, startup: &Arc<Startup>, opened: Opened) {
        let now = clock::now();
        self.with(startup, |qp, inner| {
            if inner.tcp.is_none() && !inner.destroyed {
                qp.attach(inner, opened, Side::Initiator, false, now);
            }
        });
    }

    fn requested(&self, _startup: &Arc<Startup>, _request: Request) {}

    fn failed(&self, startup: &Arc<Startup>, failure: Failure) {
        let now = clock::now();
        self.with(startup, |qp, inner| {
            log!(
                Debug,
                "qp 0x{:06x}: dialing {}: {failure:?}",
                qp.common.number,
                startup.peer
            );
            qp.dial_failed(inner, now);
            qp.progress(inner, now, Receive::Nothing, false);
        });
    }
}
