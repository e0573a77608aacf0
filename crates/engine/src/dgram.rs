//! A datagram queue pair: the core's [`DatagramQp`] and the UDP socket of its port.
//!
//! The thread that posts sends at once; what the socket does not take waits until it is writable. Datagrams that
//! arrive come from the carrier (`net/udp.rs`), which finds the queue pair by the index in the shim.

use std::net::{IpAddr, SocketAddr};
use std::slice::Chunks;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::tx::is_group;
use anywarp_core::datagram::{Arrival, Counters, DatagramQp, Kind, TxDatagram};
use anywarp_core::error::Misuse;
use anywarp_core::fault::{Service, What};
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::{Attr, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::wr::{Destination, RecvRequest, WorkRequest, given};
use anywarp_core::wire::pretty;

use smallvec::SmallVec;

use crate::clock;
use crate::device::{AsyncItem, Context, event};
use crate::fatal::Mortal;
use crate::fault::{Deliver, Faults};
use crate::gids;
use crate::log;
use crate::net::route::{MulticastHome, is_broadcast, path_mtu};
use crate::net::udp::{self, DatagramSink, ReceiveCalls, UdpPort};
use crate::port::Port;
use crate::process::PerProcess;
use crate::qp::Route;
use crate::random::random_u32;
use crate::sys::Io;
use crate::worker::{LEASE, Owes, Source, Token};

mod group;

use group::Group;

/// Bytes that are posted and wait for no more: about a run of the kernel.
const HOLD: u64 = 48 << 10;
/// Who sends again within this time, and has polled in between, is busy sending.
const BUSY: Duration = if cfg!(test) {
    LEASE
} else {
    Duration::from_micros(50)
};
/// Datagrams of a run that are answered together. Reliable ones say when they want to be answered: once at the end of a run,
/// for an answer costs its receiver as much as some datagrams do.
const ANSWER: usize = 24;
const RUN: usize = 64;
/// Bytes that one queue pair sends in one turn, before others have theirs.
const TURN: usize = 4 << 20;

struct Inner {
    core: DatagramQp,
    /// Datagrams of the core, of which the first `sent` are with the kernel.
    pending: Vec<TxDatagram>,
    sent: usize,
    /// Waits for room in the socket.
    blocked: bool,
    /// What was posted and is not with the core's datagrams yet: requests and bytes.
    held: (usize, u64),
    /// The engine knows of it.
    holds: bool,
    /// Polls when the first of it was held back.
    held_after: u64,
    /// Polls in vain when something was posted last, and all polls when something was sent last, and when that was.
    posted: u64,
    sent_after: u64,
    sent_at: Instant,
    /// Longest datagram that may be sent in a run.
    run_max: usize,
    /// Address to send from, if it matters to the peer.
    source: Option<IpAddr>,
    groups: Vec<Arc<Group<DgramQp>>>,
    /// The wait for the peer that is under way, and since when.
    stall: Option<(u64, Instant)>,
    /// For deadlines, and the one that is set.
    token: Token,
    alarm: Option<Instant>,
    destroyed: bool,
    /// System calls that sent.
    calls: u64,
}

/// A datagram queue pair, UD or UC.
pub struct DgramQp {
    context: Arc<Context>,
    /// Its number.
    pub number: u32,
    /// Which of the two services.
    pub kind: Kind,
    /// Address of the C object.
    pub cookie: Arc<AtomicUsize>,
    /// Address of the shared receive queue's C object.
    srq_cookie: Option<Arc<AtomicUsize>>,
    port: Arc<Port>,
    udp: Arc<UdpPort<Self>>,
    me: Weak<Self>,
    /// The engine knows that an acknowledgement waits for company.
    owes: AtomicBool,
    /// What goes wrong on demand.
    faults: Option<Box<Faults>>,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for DgramQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DgramQp({:?} 0x{:06x})", self.kind, self.number)
    }
}

/// Where on its port a queue pair is.
fn index(number: u32) -> u8 {
    let [.., index] = number.to_be_bytes();
    index
}

/// The UDP ports of this process that have datagram queue pairs.
static PORTS: udp::Registry<DgramQp> = PerProcess::new(Mutex::default);
/// The multicast groups that queue pairs of this process are members of.
static GROUPS: group::Registry<DgramQp> = PerProcess::new(Mutex::default);

/// The address and interface that multicast of a family uses: those of the first GID of the family.
fn multicast_home(ipv4: bool) -> Option<MulticastHome> {
    gids::gids()
        .iter()
        .find(|g| g.ip.is_ipv4() == ipv4)
        .map(|g| MulticastHome {
            ip: g.ip,
            interface: g.interface,
        })
}

impl DgramQp {
    /// Makes a queue pair. `parts` gets the number.
    pub fn new(
        context: &Arc<Context>,
        srq_cookie: Option<Arc<AtomicUsize>>,
        kind: Kind,
        options: Options,
        parts: impl FnOnce(u32) -> Parts,
    ) -> std::io::Result<Arc<Self>> {
        let (port, number) = Port::allocate(context.engine)?;
        let ipv4 = multicast_home(true).unwrap_or(MulticastHome::LOOPBACK);
        let homes: SmallVec<[_; 2]> = multicast_home(false).into_iter().chain([ipv4]).collect();
        let udp = match UdpPort::of(&PORTS, context.engine, &port.udp, &homes) {
            Ok(udp) => udp,
            Err(e) => {
                port.release(number);
                return Err(e);
            }
        };
        let random = || u64::from(random_u32()) << 32 | u64::from(random_u32());
        let mut core = DatagramQp::new(parts(number), kind, options, [random(), random()]);
        core.set_room(udp.socket().receive_buffer());
        core.set_paths(path_mtu);
        let qp = Arc::new_cyclic(|me| Self {
            context: Arc::clone(context),
            number,
            kind,
            cookie: Arc::new(AtomicUsize::new(0)),
            srq_cookie,
            port,
            udp,
            me: me.clone(),
            owes: AtomicBool::new(false),
            faults: Faults::of(context.engine, number).map(Box::new),
            inner: Mutex::new(Inner {
                core,
                pending: Vec::new(),
                sent: 0,
                blocked: false,
                held: (0, 0),
                holds: false,
                held_after: 0,
                posted: 0,
                sent_after: 0,
                sent_at: clock::start(),
                run_max: usize::MAX,
                source: None,
                groups: Vec::new(),
                stall: None,
                token: Token::NONE,
                alarm: None,
                destroyed: false,
                calls: 0,
            }),
        });
        qp.udp.enter(index(number), qp.me.clone());
        let mortal: Arc<dyn Mortal> = Arc::clone(&qp) as _;
        context.engine.watch_over(Arc::downgrade(&mortal));
        Ok(qp)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.lock_now().0
    }

    /// The same, and what time it is.
    fn lock_now(&self) -> (MutexGuard<'_, Inner>, Instant) {
        let mut inner = self.lock_timeless();
        let now = clock::now();
        inner
            .core
            .set_now(now.saturating_duration_since(clock::start()));
        (inner, now)
    }

    /// For what does not depend on time: to read the clock costs as much as to post a receive.
    fn lock_timeless(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, once what came is handed over, if something is about to be given up because nothing came.
    fn lock_caught_up(&self) -> MutexGuard<'_, Inner> {
        let inner = self.lock();
        let waited = inner.stall.is_some_and(|(_, since)| {
            clock::now().saturating_duration_since(since) >= bounds::DATAGRAM_STALL
        });
        if !waited && !inner.core.gives_up() {
            return inner;
        }
        drop(inner);
        self.udp.catch_up();
        self.lock()
    }

    // ------------------------------------------------------------------ the application

    /// Posts send requests until one is refused; gives its place in the list and why.
    pub fn post_send(
        &self,
        requests: impl Iterator<Item = Result<WorkRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.post_sends(requests.map(given))
    }

    /// The same with functions that make a request where it will lie.
    #[inline]
    pub fn post_sends<F>(&self, requests: impl Iterator<Item = F>) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
    {
        self.context.engine.takes_requests().map_err(|e| (0, e))?;
        let (mut inner, now) = self.lock_now();
        let mut result = Ok(());
        for (i, fill) in requests.enumerate() {
            let mut len = 0;
            let fill = |into: &mut WorkRequest| {
                fill(into)?;
                len = into.payload.len();
                Ok(())
            };
            let posted = match &self.faults {
                None => inner.core.post_send_with(fill),
                Some(faults) => WorkRequest::build(fill)
                    .and_then(|r| self.post_with_faults(&mut inner, r, faults)),
            };
            if let Err(e) = posted {
                result = Err((i, e));
                break;
            }
            inner.held.0 += 1;
            inner.held.1 += len;
        }
        if !inner.blocked && !self.waits_for_more(&mut inner, now) {
            self.transmit(&mut inner);
        }
        self.settle(&mut inner);
        result
    }

    /// Whether what was posted may wait for more, to go in one run with it. Who posts and polls in turns will post again; who
    /// has polled twice in vain since waits for something, and what he posts goes at once.
    fn waits_for_more(&self, inner: &mut Inner, now: Instant) -> bool {
        let engine = self.context.engine;
        let (polls, idle) = engine.polls();
        let waited = idle.saturating_sub(std::mem::replace(&mut inner.posted, idle)) > 1;
        let (requests, bytes) = inner.held;
        let full = requests >= bounds::DATAGRAM_BATCH || bytes >= HOLD;
        // Who has not polled since, or not for long, may do something else than to poll.
        let busy = polls != inner.sent_after && now.duration_since(inner.sent_at) < BUSY;
        if waited || full || !busy {
            // A full run goes for its length alone: what is posted behind it waits for the rest of its own run.
            if !full {
                inner.sent_after = polls;
            }
            inner.sent_at = now;
            return false;
        }
        let tell = !std::mem::replace(&mut inner.holds, true);
        if tell {
            inner.held_after = polls;
        }
        let me = if tell { self.me.upgrade() } else { None };
        engine.hold_since(idle, now, me.map(|me| me as Arc<dyn Owes>));
        true
    }

    fn post_with_faults(
        &self,
        inner: &mut Inner,
        request: WorkRequest,
        faults: &Faults,
    ) -> Result<(), Misuse> {
        let connected = self.kind.is_connected();
        let what = What::of_request(&request.op, connected);
        let peer = match &request.destination {
            Some(destination) if !connected => Some(destination.addr),
            _ => inner.core.peer().map(|p| p.addr),
        };
        let len = request.payload.len();
        inner.core.post_send(request)?;
        let service = if self.kind.is_reliable() {
            Service::Reliable
        } else {
            Service::Unreliable
        };
        let attr = inner.core.attr();
        let rnr = (attr.rnr_retry, attr.min_rnr_timer);
        if let Some(status) = faults.request(what, peer, service, len, rnr).fails {
            inner.core.inject_error(status);
        }
        Ok(())
    }

    /// What was not sent is thrown away.
    fn throw_away(&self, inner: &mut Inner) {
        inner.pending.clear();
        inner.sent = 0;
        if let Some(faults) = &self.faults {
            faults.forget();
        }
    }

    /// Posts receives until one is refused.
    pub fn post_recv(
        &self,
        requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.context.engine.takes_requests().map_err(|e| (0, e))?;
        // Somebody may have waited for it, if the queue pair is reliable.
        let feeds = self.kind.is_reliable();
        let mut inner = if feeds {
            self.lock()
        } else {
            self.lock_timeless()
        };
        for (i, request) in requests.enumerate() {
            if let Err(e) = request.and_then(|r| inner.core.post_recv(r)) {
                return Err((i, e));
            }
        }
        if feeds {
            self.go_on(&mut inner);
        }
        Ok(())
    }

    /// Does something with the core, and then what follows from it.
    pub fn with<R>(&self, f: impl FnOnce(&mut DatagramQp) -> R) -> R {
        let mut inner = self.lock_caught_up();
        let result = f(&mut inner.core);
        self.go_on(&mut inner);
        result
    }

    /// Its state and attributes.
    pub fn query(&self) -> (State, Attr) {
        let inner = self.lock();
        (inner.core.state(), *inner.core.attr())
    }

    /// System calls that sent, and those that received for all queue pairs of the port: with something, without.
    pub(crate) fn calls(&self) -> (u64, u64, u64) {
        let ReceiveCalls { found, empty } = self.udp.calls();
        (self.lock().calls, found, empty)
    }

    /// What it has seen.
    pub fn counters(&self) -> Counters {
        self.lock().core.counters()
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`); `route` comes with the change of UC to RTR.
    pub fn modify(
        &self,
        given: u32,
        next: Option<State>,
        assumed: Option<State>,
        attr: &Attr,
        route: Option<Route>,
    ) -> Result<(), Misuse> {
        self.context.engine.works()?;
        let mut inner = self.lock();
        if matches!(next, Some(State::Reset | State::Error)) {
            self.last_words(&mut inner);
        }
        inner.core.modify(given, next, assumed, attr)?;
        if let (true, Some(route)) = (self.kind.is_connected(), route) {
            let port = u16::try_from(route.qpn >> 8).unwrap_or(0);
            // The peer hears us only from the address that it was told.
            inner.source = (!route.local.is_unspecified()).then_some(route.local);
            inner.core.set_peer(Destination {
                addr: SocketAddr::new(route.remote, port),
                source: None,
                qpn: route.qpn,
                qkey: 0,
                hop_limit: route.hop_limit,
                traffic_class: route.traffic_class,
            });
        }
        self.changed(&mut inner);
        Ok(())
    }

    /// Changes what the connection manager decides.
    pub fn with_attr(&self, change: impl FnOnce(&mut Attr)) {
        change(self.lock().core.attr_mut());
    }

    /// Sets the state past the rules of `ibv_modify_qp`, as the connection manager does.
    pub fn set_state(&self, to: State) {
        let mut inner = self.lock();
        if matches!(to, State::Reset | State::Error) {
            self.last_words(&mut inner);
        }
        inner.core.set_state(to);
        self.changed(&mut inner);
    }

    /// The queue pair goes away: requests and completions are dropped.
    pub fn destroy(&self) {
        self.udp.leave(index(self.number));
        let groups = {
            let mut inner = self.lock();
            self.last_words(&mut inner);
            inner.destroyed = true;
            let counters = inner.core.counters();
            log!(Debug, "qp 0x{:06x}: {}", self.number, Said(&counters));
            inner.core.reset();
            inner.pending = Vec::new();
            inner.sent = 0;
            let token = std::mem::replace(&mut inner.token, Token::NONE);
            self.context.engine.remove(token, None);
            std::mem::take(&mut inner.groups)
        };
        for group in groups {
            group.leave(&self.me);
        }
        self.port.release(self.number);
    }

    /// Joins or leaves a multicast group (`ibv_attach_mcast(3)`, `ibv_detach_mcast(3)`).
    pub fn multicast(&self, ip: IpAddr, join: bool) -> Result<(), Misuse> {
        let ip = ip.to_canonical();
        if self.kind != Kind::Ud {
            return Err(Misuse::InvalidArgument(
                "multicast on a connected queue pair",
            ));
        }
        if !is_group(ip) && !is_broadcast(ip) {
            return Err(Misuse::InvalidArgument(
                "neither a multicast nor a broadcast address",
            ));
        }
        let mut inner = self.lock();
        let at = inner.groups.iter().position(|g| g.ip == ip);
        match (join, at) {
            (true, Some(_)) => Ok(()),
            (true, None) => {
                let home = multicast_home(ip.is_ipv4()).unwrap_or(MulticastHome::LOOPBACK);
                let group = Group::of(&GROUPS, self.context.engine, ip, home).map_err(|e| {
                    log!(Warn, "qp 0x{:06x}: cannot join {ip}: {e}", self.number);
                    Misuse::NoMemory
                })?;
                group.enter(self.me.clone());
                inner.groups.push(group);
                inner.core.join(ip);
                Ok(())
            }
            (false, Some(at)) => {
                let group = inner.groups.swap_remove(at);
                inner.core.leave(ip);
                drop(inner);
                group.leave(&self.me);
                Ok(())
            }
            (false, None) => Err(Misuse::InvalidArgument("not a member of the group")),
        }
    }

    // ------------------------------------------------------------------ the socket

    /// Receives datagrams that no fault was injected into.
    fn deliver_run<'a>(&self, arrival: &Arrival, run: impl Iterator<Item = &'a [u8]>) {
        let mut inner = self.lock();
        if inner.destroyed {
            return;
        }
        let (number, from) = (self.number, arrival.from);
        let answer = if self.kind.is_reliable() { RUN } else { ANSWER };
        for (n, bytes) in run.enumerate() {
            // What is to be answered is answered once for many, but soon enough that the sender goes on meanwhile.
            if n % answer == answer - 1 && !inner.blocked && inner.core.wants_tx() {
                self.transmit(&mut inner);
            }
            log!(
                Trace,
                "qp 0x{number:06x}: from {from}: {}",
                pretty::udp(bytes)
            );
            if let Err(why) = inner.core.handle_rx(arrival, bytes) {
                log!(
                    Debug,
                    "qp 0x{number:06x}: dropped a datagram from {from}: {why:?}: {}",
                    pretty::udp(bytes)
                );
            }
        }
        if !inner.blocked && inner.core.wants_tx() {
            self.transmit(&mut inner);
        }
        self.remember_owed(&inner);
        self.watch(&mut inner);
        self.settle(&mut inner);
    }

    /// The engine is told if an acknowledgement waits for company.
    fn remember_owed(&self, inner: &Inner) {
        if inner.core.ack_due()
            && !self.owes.swap(true, Ordering::AcqRel)
            && let Some(me) = self.me.upgrade()
        {
            self.context.engine.owe(me);
        }
    }

    /// Peers hear that what they sent has arrived, before there is nobody left to say so, and what waits for a poll goes.
    fn last_words(&self, inner: &mut Inner) {
        if inner.core.ack_due() {
            inner.core.flush();
        } else if inner.held.0 == 0 {
            return;
        }
        if !inner.blocked {
            self.transmit(inner);
        }
    }

    /// Sends what there is to send, after something happened.
    fn go_on(&self, inner: &mut Inner) {
        if inner.core.wants_tx() || inner.core.state() == State::Error {
            self.changed(inner);
        } else {
            self.watch(inner);
            self.settle(inner);
        }
    }

    /// The state may have changed: what must not be sent any more is thrown away, what may be now is sent.
    fn changed(&self, inner: &mut Inner) {
        if matches!(inner.core.state(), State::Reset | State::Error) {
            self.throw_away(inner);
        }
        if !inner.blocked {
            self.transmit(inner);
        }
        self.settle(inner);
    }

    /// Sends what can be sent.
    fn transmit(&self, inner: &mut Inner) {
        let mut bytes = 0;
        inner.held = (0, 0);
        loop {
            if inner.sent >= inner.pending.len() {
                for datagram in inner.pending.drain(..) {
                    inner.core.recycle(datagram);
                }
                inner.sent = 0;
                inner.core.poll_tx(&mut inner.pending);
                if inner.pending.is_empty() {
                    self.watch(inner);
                    return;
                }
                if bytes >= TURN {
                    break;
                }
            }
            let rest = inner.pending.get(inner.sent..).unwrap_or(&[]);
            inner.calls += 1;
            let sent = match &self.faults {
                None => self
                    .udp
                    .socket()
                    .send(rest, inner.source, &mut inner.run_max),
                Some(faults) => {
                    faults.send(self.udp.socket(), rest, inner.source, &mut inner.run_max)
                }
            };
            match sent {
                Ok(n) => {
                    bytes += rest.iter().take(n).map(|d| d.bytes.len()).sum::<usize>();
                    inner.sent += n;
                    inner.core.handle_written(n);
                }
                Err(Io::Broken(e)) => {
                    static SAID: log::Rarely = log::Rarely::new();
                    if SAID.now() {
                        let to = rest.first().map(|d| d.to);
                        let e = std::io::Error::from_raw_os_error(e);
                        log!(Warn, "qp 0x{:06x}: cannot send to {to:?}: {e}", self.number);
                    }
                    inner.sent += 1;
                    inner.core.handle_send_error();
                }
                Err(_) => break,
            }
            if inner.core.state() == State::Error {
                // A completion queue had no room.
                self.throw_away(inner);
            }
        }
        // Goes on when the socket is writable, in the turn of whoever looks at sockets then.
        inner.blocked = true;
        self.udp.wait_writable(self.me.clone());
    }

    /// Sees to it that somebody looks when time alone changes something: a peer that says nothing is not waited for too
    /// long, and what the core has to do by the clock is done.
    fn watch(&self, inner: &mut Inner) {
        if inner.destroyed {
            return;
        }
        let stall = inner.core.stall();
        if stall != inner.stall.map(|(number, _)| number) {
            inner.stall = stall.map(|number| (number, clock::now()));
        }
        let stall = inner.stall.map(|(_, since)| since + bounds::DATAGRAM_STALL);
        let core = inner.core.poll_timeout().map(|at| clock::start() + at);
        let Some(at) = stall.into_iter().chain(core).min() else {
            return;
        };
        if inner.alarm.is_some_and(|alarm| alarm <= at) {
            // It looks again then.
            return;
        }
        if inner.token == Token::NONE {
            let Some(me) = self.me.upgrade() else { return };
            inner.token = self.context.engine.reserve(me);
        }
        inner.alarm = Some(at);
        self.context.engine.deadline(inner.token, at);
    }

    // ------------------------------------------------------------------ events

    fn settle(&self, inner: &mut Inner) {
        while let Some(what) = inner.core.poll_event() {
            // The shared receive queue outlives the queue pair.
            if !inner.destroyed || what == AsyncEvent::SrqLimit {
                self.tell(what);
            }
        }
    }

    fn tell(&self, what: AsyncEvent) {
        let number = match what {
            AsyncEvent::QpFatal => event::QP_FATAL,
            AsyncEvent::QpRequest => event::QP_REQ_ERR,
            AsyncEvent::QpAccess => event::QP_ACCESS_ERR,
            AsyncEvent::SqDrained => event::SQ_DRAINED,
            AsyncEvent::LastWqe => event::QP_LAST_WQE_REACHED,
            AsyncEvent::SrqLimit => event::SRQ_LIMIT_REACHED,
            // There is no stream to begin or end.
            AsyncEvent::Started | AsyncEvent::PeerGone => return,
        };
        let cookie = match (what, &self.srq_cookie) {
            (AsyncEvent::SrqLimit, Some(cookie)) => cookie.load(Ordering::Relaxed),
            _ => self.cookie.load(Ordering::Relaxed),
        };
        self.context.events.push(AsyncItem {
            event: number,
            cookie,
        });
    }
}

impl DatagramSink for DgramQp {
    fn incoming(&self, arrival: &Arrival, run: Chunks<'_, u8>) {
        match &self.faults {
            None => self.deliver_run(arrival, run),
            Some(faults) => run.for_each(|bytes| {
                let sink: Weak<dyn Deliver> = self.me.clone();
                faults.receive(&sink, arrival, bytes);
            }),
        }
    }

    fn writable(&self) {
        let mut inner = self.lock();
        inner.blocked = false;
        self.transmit(&mut inner);
        self.settle(&mut inner);
    }
}

impl Deliver for DgramQp {
    fn deliver(&self, arrival: &Arrival, bytes: &[u8]) {
        self.deliver_run(arrival, std::iter::once(bytes));
    }
}

impl Source for DgramQp {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        // Its socket is the carrier's.
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let mut inner = self.lock_caught_up();
        if inner.destroyed {
            return;
        }
        if inner.alarm.is_some_and(|alarm| alarm <= now) {
            inner.alarm = None;
        }
        // A deadline of an earlier stall that ended means nothing.
        if let (Some(present), Some((number, since))) = (inner.core.stall(), inner.stall)
            && present == number
            && since + bounds::DATAGRAM_STALL <= now
        {
            log!(
                Debug,
                "qp 0x{:06x}: the receiver does not say that it keeps up",
                self.number
            );
            inner.stall = None;
            inner.core.handle_stall();
        }
        let due = inner.core.poll_timeout();
        if due.is_some_and(|at| clock::start() + at <= now) {
            inner.core.handle_timeout();
        }
        self.changed(&mut inner);
        self.watch(&mut inner);
    }
}

impl Owes for DgramQp {
    fn flush_ack(&self, now: Instant) {
        self.owes.store(false, Ordering::Release);
        let mut inner = self.lock();
        if std::mem::take(&mut inner.holds) {
            let (polls, idle) = self.context.engine.polls();
            inner.sent_at = now;
            inner.sent_after = polls;
            if polls != inner.held_after {
                // The polls in vain were for what was held: no wait for something else, and no end of polling.
                inner.posted = idle;
                inner.sent_after = polls.wrapping_sub(1);
            }
        }
        if inner.destroyed {
            return;
        }
        inner.core.flush();
        self.go_on(&mut inner);
    }

    fn flush_ack_due(&self, _now: Instant) {
        self.owes.store(false, Ordering::Release);
        let mut inner = self.lock();
        if inner.destroyed {
            return;
        }
        inner.core.flush_due();
        self.go_on(&mut inner);
        self.remember_owed(&inner);
    }
}

impl Mortal for DgramQp {
    fn device_broke(&self) {
        let mut inner = self.lock();
        if inner.destroyed {
            return;
        }
        inner.core.set_state(State::Error);
        self.throw_away(&mut inner);
        self.settle(&mut inner);
    }
}

/// Counters that are not zero, for the log.
struct Said<'a>(&'a Counters);

impl std::fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut first = true;
        for (name, n) in self.0.named().into_iter().filter(|(_, n)| *n > 0) {
            write!(f, "{}{name} {n}", if first { "" } else { ", " })?;
            first = false;
        }
        if first {
            f.write_str("nothing")
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
