//! A reliable queue pair: the core's [`Connection`] and the TCP connection that carries it.
//!
//! `dial` connects it to its peer, `progress` moves its bytes, `on_trunk` moves its stream to a connection that it shares with other
//! queue pairs, and `timers` has its timers. All state except the peer's address is behind one
//! lock. Calls of the connection manager ([`Manager`]) are queued under that lock and made after it is released
//! ([`RcQp::unlock`]).

pub mod common;
mod dial;
mod on_trunk;
mod progress;
mod timers;

use std::collections::{HashMap, VecDeque};

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::connection::{Connection, End, Peer};
use anywarp_core::error::Misuse;
use anywarp_core::fault::{Service, What};
use anywarp_core::verbs::counter::{Counter, Ops};
use anywarp_core::verbs::qp::{Attr, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::wr::{RecvRequest, WorkRequest, given};

use crate::clock;
use crate::connect::qpn_port;
use crate::connect::startup::Startup;
use crate::connect::trunks::CountedStream;
use crate::context::Context;
use crate::engine::{DeviceListener, Engine};
use crate::fault::{Faults, RequestEffect};
use crate::locks::{Mutex, MutexGuard, Rank, RwLock};
use crate::net::drain::{Draining, close_finished, drain};
use crate::net::tcp::{Outcome, RX_RING_TURNS, Tcp};
use crate::process::PerProcess;
use crate::qos::Paced;
use crate::reactor::{DelayedAck, PolledMemory, Source, Token};
use crate::stat::{self, HasCounters};
use crate::sys::socket::set_option;
use crate::test_panic;
use crate::trace;
use common::Common;
use timers::{Timer, Timers};

/// How long the destruction of a queue pair waits for the rest of a message that has been received in part.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_millis(20);

/// The largest payload, in bytes, of requests that [`RcQp::send_posted`] sends. Longer ones are sent by [`RcQp::progress`], which
/// does all other work of the connection too, and borrows a large buffer of the engine.
const SHORT: u64 = 2048;

/// Posts of short requests renew the lease once in this many requests. (During the lease, polling threads do the work of the engine's
/// thread.) If the peer shares memory, posts read the clock only for a renewal. The renewal is early enough, because a lease that is due
/// for renewal still runs for much longer than this many requests take.
const LEASE_EACH: u64 = 8;

/// The connection manager of a queue pair. It is called without any lock of the queue pair.
pub trait Manager: Send + Sync {
    /// The peer's first message arrived: the connection works in both directions.
    fn started(&self);
    /// The connection has ended.
    fn gone(&self);
}

/// A pending call of the [`Manager`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notice {
    Started,
    Gone,
}

/// The addressing of a queue pair's peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The local address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The peer's queue pair number; 0: the connection manager finds it.
    pub qpn: u32,
    /// Hop limit or time to live of datagrams, 0 for the system's default.
    pub hop_limit: u8,
    /// Traffic class or type of service of packets.
    pub traffic_class: u8,
    /// Service level.
    pub level: u8,
}

struct Inner {
    conn: Connection,
    tcp: Option<Tcp>,
    token: Token,
    route: Option<Route>,
    /// Peers, with their queue pair numbers, that dialed before the program moved this queue pair to RTR.
    early_connections: Vec<(Arc<Startup>, u32)>,
    dialing: Option<Arc<Startup>>,
    /// When requests that are posted and wait for the connection fail. `None` after that time.
    dial_until: Option<Instant>,
    /// Since when the program needs the connection. The longer this is ago, the longer are the pauses between the attempts to dial.
    dial_since: Option<Instant>,
    /// When the last attempt to dial began.
    dialed_at: Option<Instant>,
    timers: Timers,
    /// When the engine calls `timeout`.
    deadline: Option<Instant>,
    /// Whether the engine calls `timeout` early enough to probe a silent peer (with a Ping). A post can only postpone the probe,
    /// so a post need not compute the time of the probe while this is true.
    probe_covered: bool,
    manager: Option<Weak<dyn Manager>>,
    /// Pending calls of the manager, in order.
    notices: VecDeque<(Weak<dyn Manager>, Notice)>,
    /// Whether a thread is calling the manager.
    notifying: bool,
    /// Whether the connection manager establishes the connection. Otherwise the queue pairs of the two ends do.
    managed: bool,
    destroyed: bool,
    /// Whether the socket is not in the engine's epoll set yet.
    unwatched: bool,
    /// Counts the connection among those of the process while it exists.
    counted: Option<CountedStream>,
    /// Whether requests are corked (kept back to be sent together with the next ones), and the engine has this queue pair in its list.
    corked: bool,
    /// Requests that were posted, and their bytes.
    requests: (u64, u64),
    /// When the queue pair was created.
    created: Instant,
    /// Number of bytes that the peer had taken when [`Timer::Close`] was started.
    taken_at_close: u64,
    /// How often [`Timer::Close`] was started for this connection.
    close_turns: u32,
    /// The last connection, while it is being drained (read until the peer closes it too).
    draining: Draining,
    /// Traffic class or type of service of packets.
    traffic_class: u8,
    /// Whether the queue pair waits until the simulated link (see `qos`) is free: nothing is sent until [`Paced::granted`] is called.
    paced: bool,
}

/// A reliable queue pair.
pub struct RcQp {
    engine: &'static Engine,
    /// Number, events and faults.
    pub common: Common,
    me: Weak<Self>,
    inner: Mutex<Inner>,
    /// The peer's address. It is not in `inner`, because that is locked when lines about a connection are logged.
    peer: Mutex<Option<SocketAddr>>,
}

impl std::fmt::Debug for RcQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RcQp(0x{:06x})", self.common.number)
    }
}

/// The reliable queue pairs of this process by number.
static QUEUE_PAIRS: PerProcess<RwLock<HashMap<u32, Weak<RcQp>>>> =
    PerProcess::new(|| RwLock::new(Rank::QueuePairs, HashMap::new()));

impl RcQp {
    /// The queue pair with a number.
    pub(crate) fn find(number: u32) -> Option<Arc<Self>> {
        QUEUE_PAIRS.get().read().get(&number)?.upgrade()
    }

    /// Passes a connection to queue pair `target`. Returns false if there is no such queue pair.
    fn dispatch_incoming(target: u32, startup: &Arc<Startup>, source: u32) -> bool {
        let Some(qp) = Self::find(target) else {
            return false;
        };
        qp.incoming(startup, source);
        true
    }

    /// The address of the peer of the queue pair with a number.
    fn peer_of(number: u32) -> Option<SocketAddr> {
        Self::find(number)?.peer()
    }

    /// All queue pairs of this process.
    fn all() -> Vec<Arc<dyn DeviceListener>> {
        let queue_pairs = QUEUE_PAIRS.get().read();
        let live = queue_pairs.values().filter_map(Weak::upgrade);
        live.map(|qp| qp as Arc<dyn DeviceListener>).collect()
    }

    /// Creates a queue pair. `parts` is called with its number.
    pub fn new(
        context: &Arc<Context>,
        srq_c_object: Option<Arc<AtomicUsize>>,
        parts: impl FnOnce(u32) -> Parts,
    ) -> std::io::Result<Arc<Self>> {
        let engine = context.engine;
        let common = Common::allocate(context, srq_c_object, 0)?;
        let number = common.number;
        let qp = Arc::new_cyclic(|me| Self {
            engine,
            common,
            me: me.clone(),
            inner: Mutex::new(
                Rank::Qp,
                Inner {
                    conn: Connection::new(parts(number)),
                    tcp: None,
                    token: Token::NONE,
                    route: None,
                    early_connections: Vec::new(),
                    dialing: None,
                    dial_until: None,
                    dial_since: None,
                    dialed_at: None,
                    timers: Timers::default(),
                    deadline: None,
                    probe_covered: false,
                    manager: None,
                    notices: VecDeque::new(),
                    notifying: false,
                    managed: false,
                    destroyed: false,
                    unwatched: false,
                    counted: None,
                    corked: false,
                    requests: (0, 0),
                    created: clock::now(),
                    taken_at_close: 0,
                    close_turns: 0,
                    draining: Draining::default(),
                    traffic_class: 0,
                    paced: false,
                },
            ),
            peer: Mutex::new(Rank::QpPeer, None),
        });
        qpn_port::set_incoming(Self::dispatch_incoming);
        trace::set_peer_lookup(Self::peer_of);
        QUEUE_PAIRS.get().write().insert(number, qp.me.clone());
        engine.set_connected(Self::all);
        stat::register(engine, || qp.me.clone());
        Ok(qp)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Releases the lock and makes the pending calls of the manager.
    ///
    /// One thread at a time makes them, so that they stay in order. Used instead of dropping the guard after
    /// [`RcQp::progress`] or [`RcQp::deliver_events`] was called.
    #[inline]
    fn unlock<'a>(&'a self, inner: MutexGuard<'a, Inner>) {
        if !inner.notices.is_empty() {
            self.notify(inner);
        }
    }

    #[cold]
    fn notify<'a>(&'a self, mut inner: MutexGuard<'a, Inner>) {
        while !inner.notifying
            && let Some((manager, notice)) = inner.notices.pop_front()
        {
            inner.notifying = true;
            drop(inner);
            if let Some(manager) = manager.upgrade() {
                match notice {
                    Notice::Started => manager.started(),
                    Notice::Gone => manager.gone(),
                }
            }
            inner = self.lock();
            inner.notifying = false;
        }
    }

    /// Calls `f` with the queue pair locked.
    fn with<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        let mut inner = self.lock();
        let result = f(&mut inner);
        self.unlock(inner);
        result
    }

    // ------------------------------------------------------------------ the application

    /// Posts send requests until one is refused. Returns the index of the refused one and the reason.
    pub fn post_send(
        &self,
        requests: impl Iterator<Item = Result<WorkRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.post_sends(requests.map(given))
    }

    /// Posts send requests until one is refused. `requests` yields a function for each request, which writes the request to
    /// its slot in the send queue. Returns the index of the refused one and the reason.
    #[inline]
    pub fn post_sends<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    {
        self.post_made(|_| Ok(requests))
    }

    /// Posts all requests, or none if one of them is refused. The list is empty afterwards, unless they are refused.
    pub fn post_batch(&self, requests: &mut Vec<WorkRequest>) -> Result<(), (usize, Misuse)> {
        self.post_made(|conn| {
            conn.check_sends(requests)?;
            Ok(requests.drain(..).map(Ok).map(given))
        })
    }

    /// Like [`Self::post_sends`], with the requests that `make` returns. `make` is called with the lock held.
    #[inline(always)]
    fn post_made<F, I>(
        &self,
        make: impl FnOnce(&Connection) -> Result<I, Misuse>,
    ) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
        I: Iterator<Item = F>,
    {
        self.engine.takes_requests().map_err(|e| (0, e))?;
        let mut inner = self.lock();
        let requests = match make(&inner.conn) {
            Ok(requests) => requests,
            Err(e) => {
                self.unlock(inner);
                return Err((0, e));
            }
        };
        let mut result = Ok(());
        let before = inner.requests.0;
        let others_wait = inner.conn.has_untaken();
        let mut longest = 0;
        for (i, fill) in requests.enumerate() {
            let mut len = 0;
            let fill = |into: &mut WorkRequest| {
                fill(into)?;
                test_panic::posted(into.id);
                len = into.payload.len();
                Ok(())
            };
            let posted = match &self.common.faults {
                None => inner.conn.post_send_with(fill),
                Some(faults) => WorkRequest::build(fill)
                    .and_then(|r| self.post_with_faults(&mut inner, r, faults)),
            };
            if let Err(e) = posted {
                result = Err((i, e));
                break;
            }
            inner.requests.0 += 1;
            inner.requests.1 += len;
            longest = len.max(longest);
        }
        let burst = self.engine.may_cork();
        let limits = match &inner.tcp {
            Some(tcp) if tcp.sends_by_memory() => &bounds::COALESCE_SHM,
            _ => &bounds::COALESCE_TCP,
        };
        let may_wait = self.common.faults.is_none() && inner.tcp.is_some();
        if may_wait
            && burst
            && inner.conn.may_coalesce_burst(limits, longest)
            && self.cork(&mut inner)
        {
            // The requests are corked. The second poll that finds no completion sends them.
        } else if may_wait
            && inner.conn.may_coalesce_behind_ack(limits, longest)
            && (others_wait || self.wait_for_ack(&inner))
        {
            // The requests are sent at the next acknowledgement of the peer, by the next thread that polls, or by the worker before it
            // sleeps. Earlier requests that still wait are sent at one of these times too, or when the ring has room, or when the rate
            // limit permits it.
        } else {
            let shared = inner.tcp.as_ref().is_some_and(Tcp::is_shared);
            let renews = before / LEASE_EACH != inner.requests.0 / LEASE_EACH;
            // Reading the clock takes as long as sending a short message by shared memory. `send_posted` needs no exact time for it:
            // any time in the past will do.
            let any_time = shared && !renews;
            let now = if any_time {
                inner.created
            } else {
                clock::now()
            };
            if longest > SHORT || !self.send_posted(&mut inner, now) {
                let now = if any_time { clock::now() } else { now };
                self.progress(&mut inner, now, Receive::Nothing, false);
                self.engine.on_post(now);
            } else if renews {
                self.engine.on_post(now);
            }
        }
        self.unlock(inner);
        result
    }

    /// Lets requests wait for the next acknowledgement of the peer, which wakes this end if it sleeps. Returns false if they have to be sent
    /// now: the acknowledgement has arrived, or the program computes between its posts.
    fn wait_for_ack(&self, inner: &Inner) -> bool {
        if !self.engine.is_busy_for_long(clock::now()) {
            return false;
        }
        // This is done before `await_ack`, so that a worker that falls asleep meanwhile either sees the scheduled acknowledgement, or is
        // woken by the acknowledgement of the peer.
        self.schedule_ack();
        inner.tcp.as_ref().is_some_and(Tcp::await_ack)
    }

    /// Schedules an acknowledgement, and the requests that are to be sent behind it, to be sent by the next thread that polls.
    fn schedule_ack(&self) {
        self.common.schedule_ack(|| self.me.upgrade());
    }

    /// Corks requests. Returns false if they have to be sent now: no thread polls, or the program computes between its posts.
    fn cork(&self, inner: &mut Inner) -> bool {
        if inner.corked {
            self.engine.cork_more();
            return true;
        }
        let me = self.me.upgrade();
        inner.corked = self.engine.cork(me.map(|me| me as Arc<dyn DelayedAck>));
        inner.corked
    }

    fn post_with_faults(
        &self,
        inner: &mut Inner,
        request: WorkRequest,
        faults: &Faults,
    ) -> Result<(), Misuse> {
        let what = What::of_request(&request.op, false);
        let address = |r: Route| SocketAddr::new(r.remote, u16::try_from(r.qpn >> 8).unwrap_or(0));
        let peer = self.peer().or_else(|| inner.route.map(address));
        let len = request.payload.len();
        inner.conn.post_send(request)?;
        let attr = inner.conn.attr();
        let rnr = (attr.rnr_retry, attr.min_rnr_timer);
        let effect: RequestEffect = faults.request(what, peer, Service::Stream, len, rnr);
        if let Some(at) = effect.not_before {
            let running = inner.timers.get(Timer::Delay);
            let until = match running.filter(|until| *until > clock::now()) {
                Some(until) if effect.extends => until.max(at),
                Some(until) => until,
                None => at,
            };
            self.start_timer(inner, Timer::Delay, until);
        }
        if let Some(status) = effect.fails {
            inner.conn.inject_error(status);
        } else if effect.kill {
            self.cut(inner);
        }
        Ok(())
    }

    /// Injects a fault: resets the connection, as if the network or the peer's machine had done so.
    fn cut(&self, inner: &mut Inner) {
        inner.conn.cut();
        if let Some(tcp) = &inner.tcp {
            // Closing the socket sends a reset.
            let _ = rustix::net::sockopt::set_socket_linger(tcp.fd().get(), Some(Duration::ZERO));
            self.deliver_events(inner, Outcome::Broken(libc::ECONNRESET));
        }
    }

    /// Posts receive requests until one is refused. Returns the index of the refused one and the reason.
    pub fn post_recv(
        &self,
        requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.post_recvs(requests.map(|request| {
            move |into: &mut RecvRequest| {
                *into = request?;
                Ok(())
            }
        }))
    }

    /// Like [`Self::post_recv`]. `requests` yields a function for each receive, which writes its request.
    #[inline]
    pub fn post_recvs<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut RecvRequest) -> Result<(), Misuse>,
    {
        self.engine.takes_requests().map_err(|e| (0, e))?;
        let mut inner = self.lock();
        for (i, fill) in requests.enumerate() {
            let posted = RecvRequest::build(fill).and_then(|request| {
                test_panic::posted(request.id);
                inner.conn.post_recv(request)
            });
            if let Err(e) = posted {
                return Err((i, e));
            }
        }
        Ok(())
    }

    /// The number of the queue pair.
    pub fn number(&self) -> u32 {
        self.common.number
    }

    /// The state and attributes of the queue pair.
    pub fn query(&self) -> (State, Attr) {
        let inner = self.lock();
        (inner.conn.state(), *inner.conn.attr())
    }

    /// Whether the send queue has outstanding requests in state SQD (`sq_draining` of `ibv_query_qp(3)`).
    pub fn is_draining(&self) -> bool {
        self.lock().conn.is_draining()
    }

    /// The addressing of its peer, if the program has set it.
    pub fn route(&self) -> Option<Route> {
        self.lock().route
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`). `route` is set for the change to RTR.
    pub fn modify(
        &self,
        attr_mask: u32,
        next: Option<State>,
        expected_state: Option<State>,
        attr: &Attr,
        route: Option<Route>,
    ) -> Result<(), Misuse> {
        self.engine.works()?;
        let now = clock::now();
        if next == Some(State::Sqd) {
            // The event SQ_DRAINED follows the last acknowledgement.
            self.engine.expect_events();
        }
        let ends = matches!(next, Some(State::Error | State::Reset));
        if ends {
            self.receive_from_trunk(now);
        }
        self.with(|inner| {
            if ends {
                self.receive_arrived(inner, now);
            }
            let before = inner.conn.state();
            if next == Some(State::Reset) && is_live(before) {
                inner
                    .conn
                    .check_modify(attr_mask, next, expected_state, attr)?;
                self.discard(inner, now);
                inner.conn.set_state(State::Reset);
            } else {
                inner.conn.modify(attr_mask, next, expected_state, attr)?;
            }
            match inner.conn.state() {
                State::Reset => self.drop_stream(inner),
                State::Rtr if before != State::Rtr => {
                    inner.route = route;
                    if let Some(route) = route {
                        self.set_service(inner, route.level, route.traffic_class);
                    }
                    self.find_peer(inner, now);
                }
                State::Rts if !inner.managed => self.limit_dialing(inner, now),
                _ => {}
            }
            self.set_user_timeout(inner);
            self.progress(inner, now, Receive::Nothing, false);
            Ok(())
        })
    }

    /// Discards all requests and completions, and sends the last messages of the stream, before RESET.
    fn discard(&self, inner: &mut Inner, now: Instant) {
        // As in `destroy`, the connection manager gets no notice. An injected delay must not hold back the last messages.
        inner.manager = None;
        inner.timers.stop(Timer::Delay);
        inner.conn.discard();
        self.progress(inner, now, Receive::Nothing, true);
    }

    /// Attaches a completion counter (`ibv_qp_attach_comp_cntr(3)`).
    pub fn attach_counter(&self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        // The program may wait for the counter without a poll.
        self.engine.expect_events();
        self.lock().conn.attach_counter(counter, ops)
    }

    /// Receives what has arrived on a stream that is about to end. This can take several calls of [`Self::progress`]. Their number is
    /// limited, because the peer may go on sending.
    fn receive_arrived(&self, inner: &mut Inner, now: Instant) {
        for _ in 0..RX_RING_TURNS {
            self.progress(inner, now, Receive::All, true);
            if !inner.tcp.as_ref().is_some_and(Tcp::has_more) {
                break;
            }
        }
    }

    /// Destroys the queue pair: outstanding requests are dropped, and the connection is closed in order.
    pub fn destroy(&self) {
        let now = clock::now();
        self.receive_from_trunk(now);
        self.with(|inner| {
            inner.destroyed = true;
            inner.manager = None;
            // Data that has arrived here counts as received for the peer, as with a network card, which works
            // independently of the program. So it is placed and acknowledged before the stream closes.
            self.receive_arrived(inner, now);
            self.finish_message(inner, now);
            inner.conn.detach_counters();
            if !is_live(inner.conn.state()) {
                // A connection that exists before RTR has not been used yet. It is closed before `discard`, because otherwise
                // the queue pair would send its last messages, and the peer would see a stream begin and end at once.
                self.drop_stream(inner);
            }
            // Its requests do not complete: another thread may poll the queue before the completions are removed.
            inner.conn.discard();
            self.progress(inner, now, Receive::Nothing, true);
            self.drop_stream(inner);
            inner.conn.purge();
        });
        QUEUE_PAIRS.get().write().remove(&self.common.number);
        self.common.release_number();
    }

    /// Sets the state without the checks of `ibv_modify_qp`, for the connection manager.
    pub fn set_state(&self, to: State) {
        let now = clock::now();
        self.with(|inner| {
            inner.conn.set_state(to);
            self.progress(inner, now, Receive::Nothing, true);
        });
    }

    /// Changes attributes that the connection manager decides: access rights, depths, retries.
    pub fn with_attr(&self, change: impl FnOnce(&mut Attr)) {
        let mut inner = self.lock();
        change(inner.conn.attr_mut());
        inner.probe_covered = false;
        self.set_user_timeout(&inner);
    }

    /// Ends the connection in order: outstanding requests are flushed, the stream is closed.
    pub fn disconnect(&self) {
        let now = clock::now();
        self.receive_from_trunk(now);
        self.with(|inner| {
            // Data that has arrived is placed and acknowledged first, as in `destroy`.
            self.receive_arrived(inner, now);
            inner.conn.leave("disconnected");
            self.progress(inner, now, Receive::Nothing, true);
        });
    }

    /// Whether the queue pair is connected to a standard peer, which does not acknowledge messages.
    pub fn has_standard_peer(&self) -> bool {
        let inner = self.lock();
        inner.conn.end() == End::Open && inner.conn.peer() == Some(Peer::Standard)
    }

    /// Blocks until the peer has acknowledged all bytes of the connection that was closed last, but not longer than
    /// `until`.
    ///
    /// This is needed because requests to a standard peer complete before their bytes have arrived.
    pub fn wait_drained(&self, until: Option<Instant>) {
        let draining = self.lock().draining.clone();
        draining.wait_drained(until);
    }

    /// Receives the rest of a message that has been received in part, if it arrives soon: a network card would
    /// continue to receive while the program is about to destroy the queue pair.
    fn finish_message(&self, inner: &mut Inner, since: Instant) {
        let until = since + LAST_MESSAGE_TIMEOUT;
        while inner.conn.is_receiving() && inner.conn.state() != State::Error {
            let left = until.saturating_duration_since(clock::now());
            let Some(tcp) = inner.tcp.as_ref().filter(|tcp| !tcp.is_on_trunk().1) else {
                return;
            };
            if left.is_zero() || !self.engine.sleeping(|| tcp.wait(left)) {
                return;
            }
            self.progress(inner, clock::now(), Receive::All, true);
        }
    }

    /// Detaches the connection from the queue pair.
    fn take_tcp(&self, inner: &mut Inner) -> Option<Tcp> {
        let tcp = inner.tcp.take()?;
        inner.counted = None;
        if let Some(watch) = tcp.watch() {
            let memory: Arc<dyn PolledMemory> = Arc::clone(watch) as _;
            self.engine.remove_memory(&memory);
        }
        Some(tcp)
    }

    /// Sets the service level, and the traffic class of its packets, for the connection manager.
    pub(crate) fn set_service_of(&self, level: u8, class: u8) {
        let mut inner = self.lock();
        self.set_service(&mut inner, level, class);
    }

    fn set_service(&self, inner: &mut Inner, level: u8, class: u8) {
        inner.traffic_class = class;
        if let Some(flow) = &self.common.flow {
            flow.set_level(level);
        }
        self.mark_packets(inner);
    }

    /// Sets the traffic class of the packets of the connection.
    fn mark_packets(&self, inner: &Inner) {
        let Some(tcp) = inner.tcp.as_ref().filter(|_| inner.traffic_class != 0) else {
            return;
        };
        // A socket has one of the two options, or both.
        let (fd, class) = (tcp.fd().get(), i32::from(inner.traffic_class));
        set_option(fd, libc::IPPROTO_IP, libc::IP_TOS, class);
        set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class);
    }

    /// Sets how long TCP waits for the peer's host to acknowledge data.
    fn set_user_timeout(&self, inner: &Inner) {
        if let Some(tcp) = &inner.tcp {
            tcp.set_trunk_timeout(inner.conn.silence_limit());
        }
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
        inner.probe_covered = false;
    }

    /// Closes the connection in order, and forgets peer and manager.
    fn drop_stream(&self, inner: &mut Inner) {
        self.drop_token(inner);
        if let Some(startup) = inner.dialing.take() {
            startup.cancel();
        }
        for (startup, _) in std::mem::take(&mut inner.early_connections) {
            let _ = startup.reject(&[]);
        }
        match self.take_tcp(inner) {
            Some(tcp) => inner.draining = drain(self.engine, tcp.into_fd()),
            // There was no connection, or it has ended because the peer closed first. If that peer is a queue pair of this process, its
            // socket may have waited only for this end to close, and is closed now.
            None => close_finished(),
        }
        inner.route = None;
        inner.close_turns = 0;
        for timer in [
            Timer::Redial,
            Timer::PeerDials,
            Timer::FirstMessage,
            Timer::Close,
            Timer::Wake,
            Timer::OwnClosed,
        ] {
            inner.timers.stop(timer);
        }
        inner.managed = false;
        inner.manager = None;
    }

    /// The address of its peer, or of the last one.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        *self.peer.lock()
    }

    /// The descriptor of its connection, for tests and diagnosis.
    pub fn raw_fd(&self) -> Option<i32> {
        self.lock().tcp.as_ref().map(|t| t.fd().get().as_raw_fd())
    }
}

/// The sources from which [`RcQp::progress`] receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receive {
    /// None.
    Nothing,
    /// The shared memory that carries the stream.
    SharedMemory,
    /// The shared memory and the socket.
    All,
}

/// Whether a queue pair in this state may have a connection that it has used.
fn is_live(state: State) -> bool {
    matches!(state, State::Rtr | State::Rts | State::Sqd | State::Error)
}

impl HasCounters for RcQp {
    fn write_counters(&self, line: &mut String) {
        let inner = self.lock();
        let _ = write!(
            line,
            "rc 0x{:06x} state={:?} requests={} request_bytes={} received={} rnr={}",
            self.common.number,
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
            let carrier = match tcp.is_on_trunk() {
                (true, true) => "trunk",
                _ if tcp.watch().is_some() => "memory",
                _ => "tcp",
            };
            let _ = write!(line, " carrier={carrier}");
            stat::write_stream_counters(line, &tcp.counts, tcp.fd().get());
        }
    }
}

impl Source for RcQp {
    fn ready(self: Arc<Self>, readable: bool, _writable: bool, now: Instant) {
        let receive = if readable {
            Receive::All
        } else {
            Receive::Nothing
        };
        self.receive(receive, now);
    }

    fn try_recv_hot(self: Arc<Self>, now: Instant) -> Option<bool> {
        // The socket of a stream that arrives in shared memory only receives wake-ups. If it were tried first, the messages in the memory would
        // be received here, and count as data of a socket. Sockets with data are checked often, by system calls.
        let arrives_in_memory =
            |inner: &Inner| inner.tcp.as_ref().is_some_and(Tcp::receives_by_memory);
        if self.engine.has_memories() && arrives_in_memory(&self.lock()) {
            return None;
        }
        Some(self.receive(Receive::All, now))
    }

    fn set_armed(&self, armed: bool) {
        let inner = self.lock();
        let Some(tcp) = inner.tcp.as_ref().filter(|_| !inner.unwatched) else {
            return;
        };
        if tcp.awaits_end() {
            // The end of the connection is known. A watched socket would report it at each wait.
            return;
        }
        // Sockets of two kinds stay watched: a blocked socket, because a thread has to notice when it becomes writable, and the socket of
        // a connection whose peer shares memory, because the peer wakes this end through the socket.
        if armed {
            self.engine
                .want_write(inner.token, tcp.fd().get(), tcp.waits_for_socket());
        } else if !tcp.blocked && tcp.watch().is_none() {
            self.engine.disarm(inner.token, tcp.fd().get());
        }
    }

    /// Called when the peer wrote to, or read from, the memory that carries the stream.
    fn memory_ready(self: Arc<Self>, now: Instant) {
        self.receive(Receive::SharedMemory, now);
    }

    fn flush_memory(self: Arc<Self>, now: Instant) {
        self.with(|inner| {
            // `take_owed_ack` clears a flag that keeps the worker awake. It is called even if nothing may be sent now, for example because
            // of a rate limit: the acknowledgement is then sent as soon as sending is possible.
            if let Some(tcp) = &inner.tcp {
                tcp.take_owed_ack();
            }
            if inner.conn.ack_due() {
                self.progress(inner, now, Receive::Nothing, true);
            }
        });
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        self.with(|inner| {
            test_panic::working();
            self.handle_timeout(inner, now);
        });
    }
}

impl DelayedAck for RcQp {
    fn flush(&self, now: Instant) {
        self.common.take_scheduled_ack();
        self.with(|inner| {
            inner.corked = false;
            if inner.conn.ack_due() || inner.conn.has_untaken() {
                self.progress(inner, now, Receive::Nothing, true);
            }
        });
    }
}

impl Paced for RcQp {
    fn granted(self: Arc<Self>, now: Instant) {
        self.with(|inner| self.progress(inner, now, Receive::Nothing, true));
    }
}

impl DeviceListener for RcQp {
    /// Flushes all requests. The connection is closed without a Terminate, because the state of the core may be
    /// inconsistent.
    fn device_fatal(&self) {
        self.with(|inner| {
            inner.conn.leave("internal error");
            self.deliver_events(inner, Outcome::Broken(libc::EIO));
            self.drop_token(inner);
            drop(self.take_tcp(inner));
        });
    }
}

#[cfg(test)]
mod tests;
