//! A datagram queue pair: the core's [`DatagramQp`] and the UDP port that carries it.
//!
//! `cork` decides when posted datagrams are sent, `progress` receives and sends, and `group` has the multicast
//! groups. Arriving datagrams come from [`UdpPort`], which finds the queue pair by the index in the datagram's
//! header.

mod cork;
mod group;
mod progress;

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::slice::Chunks;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::bounds;
use anywarp_core::datagram::is_group;
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Arrival, Counters, DatagramQp, Kind, TxDatagram};
use anywarp_core::error::Misuse;
use anywarp_core::fault::{Service, What};
use anywarp_core::verbs::counter::{Counter, Ops};
use anywarp_core::verbs::qp::{Attr, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::wr::{Destination, RecvRequest, WorkRequest, given};

use smallvec::SmallVec;

use crate::clock;
use crate::config::config;
use crate::context::Context;
use crate::engine::DeviceListener;
use crate::fault::{Deliver, Faults};
use crate::gids;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log;
use crate::net::route::{MulticastHome, is_broadcast, path_mtu};
use crate::net::udp::{self, DatagramSink, ReceiveCalls, UdpPort};
use crate::process::PerProcess;
use crate::qos::Paced;
use crate::qp::Route;
use crate::qp::common::Common;
use crate::random::random_u32;
use crate::reactor::{DelayedAck, Source, Token};
use crate::stat::{self, HasCounters};
use cork::Cork;
use group::Group;

struct Inner {
    core: DatagramQp,
    /// The time that was last passed to the core.
    now: Instant,
    /// Datagrams taken from the core. The first `sent` of them were passed to the kernel.
    pending: Vec<TxDatagram>,
    sent: usize,
    /// Whether the socket's send buffer was full.
    blocked: bool,
    /// Numbers of datagrams and bytes received since responses were last sent.
    unanswered: (usize, usize),
    cork: Cork,
    /// Length in bytes of the longest datagram that may be sent in a run: several datagrams to one destination that the
    /// kernel splits (`UDP_SEGMENT`).
    run_max: usize,
    /// The address that a connected peer expects datagrams from.
    source: Option<IpAddr>,
    groups: Vec<Arc<Group<DgramQp>>>,
    /// The current stall (a wait for a report of the peer): its number and its start.
    stall: Option<(u64, Instant)>,
    token: Token,
    /// When the engine calls `timeout`.
    deadline: Option<Instant>,
    destroyed: bool,
    /// Number of attempts to send datagrams. Each is a system call, unless shared memory carries the datagrams.
    calls: u64,
}

impl Inner {
    /// Sets the time of the core, unless the core's time is later already, because another thread read the clock later but
    /// acquired the lock first.
    #[inline]
    fn set_now(&mut self, now: Instant) {
        if now > self.now {
            self.now = now;
            self.core
                .set_now(now.saturating_duration_since(clock::start()));
        }
    }
}

/// A datagram queue pair.
pub struct DgramQp {
    /// Number, events and faults.
    pub common: Common,
    /// Its service.
    pub kind: Kind,
    udp: Arc<UdpPort<Self>>,
    me: Weak<Self>,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for DgramQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DgramQp({:?} 0x{:06x})", self.kind, self.common.number)
    }
}

/// The index of a queue pair on its port.
fn index(number: u32) -> u8 {
    let [.., index] = number.to_be_bytes();
    index
}

/// The UDP ports of this process that have datagram queue pairs.
static PORTS: udp::Registry<DgramQp> = PerProcess::new(|| Mutex::new(Rank::UdpPorts, Vec::new()));
/// The multicast groups that queue pairs of this process are members of.
static GROUPS: group::Registry<DgramQp> = PerProcess::new(|| Mutex::new(Rank::Groups, Vec::new()));

/// The address and interface that multicast of an address family uses: those of the first GID of the family.
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
    /// Creates a queue pair. `parts` is called with its number.
    pub fn new(
        context: &Arc<Context>,
        srq_c_object: Option<Arc<AtomicUsize>>,
        kind: Kind,
        options: Options,
        parts: impl FnOnce(u32) -> Parts,
    ) -> std::io::Result<Arc<Self>> {
        let common = Common::allocate(context, srq_c_object, options.port)?;
        let number = common.number;
        let ipv4 = multicast_home(true).unwrap_or(MulticastHome::LOOPBACK);
        let homes: SmallVec<[_; 2]> = multicast_home(false).into_iter().chain([ipv4]).collect();
        let udp = match UdpPort::of(&PORTS, context.engine, &common.port.udp, &homes) {
            Ok(udp) => udp,
            Err(e) => {
                common.release_number();
                return Err(e);
            }
        };
        let random = || u64::from(random_u32()) << 32 | u64::from(random_u32());
        let mut core = DatagramQp::new(parts(number), kind, options, [random(), random()]);
        core.set_room(udp.socket().receive_buffer());
        core.set_paths(path_mtu);
        let qp = Arc::new_cyclic(|me| Self {
            common,
            kind,
            udp,
            me: me.clone(),
            inner: Mutex::new(
                Rank::DatagramQp,
                Inner {
                    core,
                    now: clock::start(),
                    pending: Vec::new(),
                    sent: 0,
                    blocked: false,
                    unanswered: (0, 0),
                    #[cfg(not(test))]
                    cork: Cork::new(),
                    #[cfg(test)]
                    cork: Cork::for_slow_machines(),
                    run_max: if config().gso { usize::MAX } else { 0 },
                    source: None,
                    groups: Vec::new(),
                    stall: None,
                    token: Token::NONE,
                    deadline: None,
                    destroyed: false,
                    calls: 0,
                },
            ),
        });
        qp.udp.enter(index(number), qp.me.clone());
        let listener: Arc<dyn DeviceListener> = Arc::clone(&qp) as _;
        context.engine.subscribe(Arc::downgrade(&listener));
        Ok(qp)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.lock_now().0
    }

    /// Locks the state and sets the time of the core. Returns that time too.
    fn lock_now(&self) -> (MutexGuard<'_, Inner>, Instant) {
        let mut inner = self.lock_timeless();
        let now = clock::now();
        inner.set_now(now);
        (inner, now)
    }

    /// Locks the state without setting the time of the core, for operations that do not depend on the time. Reading the
    /// clock costs as much as posting a receive request.
    fn lock_timeless(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Locks the state. If the core is about to give up a message or request whose deadline has passed, the datagrams
    /// in the socket's buffer are received first, in case the process was not scheduled before the deadline.
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

    /// Posts send requests until one is refused. Returns its index in the list and the reason.
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
        self.post_made(|core| {
            core.check_sends(requests)?;
            Ok(requests.drain(..).map(Ok).map(given))
        })
    }

    /// Like [`Self::post_sends`], with the requests that `make` returns. `make` is called with the lock held.
    #[inline]
    fn post_made<F, I>(
        &self,
        make: impl FnOnce(&DatagramQp) -> Result<I, Misuse>,
    ) -> Result<(), (usize, Misuse)>
    where
        F: FnOnce(&mut WorkRequest) -> Result<(), Misuse>,
        I: Iterator<Item = F>,
    {
        self.common
            .context
            .engine
            .takes_requests()
            .map_err(|e| (0, e))?;
        let mut inner = self.lock_timeless();
        let requests = make(&inner.core).map_err(|e| (0, e))?;
        let (mut result, mut posted_requests) = (Ok(()), 0);
        for (i, fill) in requests.enumerate() {
            let mut len = 0;
            let fill = |into: &mut WorkRequest| {
                fill(into)?;
                len = into.payload.len();
                Ok(())
            };
            let posted = match &self.common.faults {
                None => inner.core.post_send_with(fill),
                Some(faults) => WorkRequest::build(fill)
                    .and_then(|r| self.post_with_faults(&mut inner, r, faults)),
            };
            if let Err(e) = posted {
                result = Err((i, e));
                break;
            }
            inner.cork.posted(len);
            posted_requests += 1;
        }
        let posts = self.common.context.engine.datagram_posts();
        posts.count(posted_requests);
        if !inner.blocked {
            self.send_or_cork(&mut inner);
        }
        self.deliver_events(&mut inner);
        result
    }

    fn post_with_faults(
        &self,
        inner: &mut Inner,
        request: WorkRequest,
        faults: &Faults,
    ) -> Result<(), Misuse> {
        let connected = self.kind.is_connected();
        let what = What::of_request(&request.op, inner.core.writes_records());
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
        // Reliable datagrams have no count of RNR retries.
        let retries = if connected { attr.rnr_retry } else { 0 };
        let rnr = (retries, attr.min_rnr_timer);
        if let Some(status) = faults.request(what, peer, service, len, rnr).fails {
            inner.core.inject_error(status);
        }
        Ok(())
    }

    /// Posts receive requests until one is refused. Returns its index in the list and the reason.
    pub fn post_recv(
        &self,
        mut requests: impl Iterator<Item = Result<RecvRequest, Misuse>>,
    ) -> Result<(), (usize, Misuse)> {
        self.common
            .context
            .engine
            .takes_requests()
            .map_err(|e| (0, e))?;
        // A packet of a reliable peer may wait for a receive.
        let reliable = self.kind.is_reliable();
        let mut inner = if reliable {
            self.lock()
        } else {
            self.lock_timeless()
        };
        let core = &mut inner.core;
        let mut posted = 0;
        // The compiler inlines the iterator into this loop. With `enumerate` it would not, and posting a receive
        // request would take some 45 more instructions.
        let result = requests.try_for_each(|request| {
            core.post_recv(request?)?;
            posted += 1;
            Ok(())
        });
        // The receives before a refused one may have got packets already.
        if reliable {
            self.resume(&mut inner);
        }
        result.map_err(|e| (posted, e))
    }

    /// Called when receives were posted to the shared receive queue: a packet of a reliable peer may wait for one.
    pub(crate) fn take_shared_receives(&self) {
        let mut inner = self.lock();
        if !inner.destroyed {
            inner.core.handle_receives();
            self.resume(&mut inner);
        }
    }

    /// Sends the datagrams that a posted receive has made possible, if any.
    #[inline(never)]
    fn resume(&self, inner: &mut Inner) {
        if inner.core.wants_tx() || inner.core.state() == State::Error {
            self.state_changed(inner);
        }
    }

    /// Calls `f` with the core, and sends the datagrams that result.
    pub fn with<R>(&self, f: impl FnOnce(&mut DatagramQp) -> R) -> R {
        let mut inner = self.lock_caught_up();
        let result = f(&mut inner.core);
        self.send_pending(&mut inner);
        result
    }

    /// The queue pair number.
    pub fn number(&self) -> u32 {
        self.common.number
    }

    /// Returns whether the send queue has outstanding requests in state SQD (`sq_draining` of `ibv_query_qp(3)`).
    pub fn is_draining(&self) -> bool {
        self.lock().core.is_draining()
    }

    /// State and attributes.
    pub fn query(&self) -> (State, Attr) {
        let inner = self.lock();
        (inner.core.state(), *inner.core.attr())
    }

    /// Returns three numbers: the attempts to send datagrams of this queue pair, the system calls that received datagrams for
    /// any queue pair of its port, and the system calls that tried to receive on the port and found nothing.
    pub(crate) fn calls(&self) -> (u64, u64, u64) {
        let ReceiveCalls { found, empty } = self.udp.calls();
        (self.lock().calls, found, empty)
    }

    /// Counters of messages and datagrams.
    pub fn counters(&self) -> Counters {
        self.lock().core.counters()
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`). `route` is set when a connected queue pair changes to RTR.
    pub fn modify(
        &self,
        attr_mask: u32,
        next: Option<State>,
        expected_state: Option<State>,
        attr: &Attr,
        route: Option<Route>,
    ) -> Result<(), Misuse> {
        self.common.context.engine.works()?;
        let mut inner = self.lock();
        if matches!(next, Some(State::Reset | State::Error)) {
            self.flush_before_end(&mut inner);
        }
        inner.core.modify(attr_mask, next, expected_state, attr)?;
        if let (true, Some(route)) = (self.kind.is_connected(), route) {
            let port = u16::try_from(route.qpn >> 8).unwrap_or(0);
            // The peer accepts datagrams only from the address that its program has set.
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
        self.state_changed(&mut inner);
        Ok(())
    }

    /// Changes attributes that the connection manager sets.
    pub fn with_attr(&self, change: impl FnOnce(&mut Attr)) {
        change(self.lock().core.attr_mut());
    }

    /// Sets the state without the checks of `ibv_modify_qp`, for the connection manager.
    pub fn set_state(&self, to: State) {
        let mut inner = self.lock();
        if matches!(to, State::Reset | State::Error) {
            self.flush_before_end(&mut inner);
        }
        inner.core.set_state(to);
        self.state_changed(&mut inner);
    }

    /// Attaches a completion counter (`ibv_qp_attach_comp_cntr(3)`).
    pub fn attach_counter(&self, counter: &Arc<Counter>, ops: Ops) -> Result<(), Misuse> {
        self.lock().core.attach_counter(counter, ops)
    }

    /// Destroys the queue pair: outstanding requests and their completions are dropped.
    pub fn destroy(&self) {
        self.udp.leave(index(self.common.number));
        let groups = {
            let mut inner = self.lock();
            self.flush_before_end(&mut inner);
            inner.destroyed = true;
            // An event of the shared receive queue, which outlives this queue pair, may still have to be raised.
            self.deliver_events(&mut inner);
            let counters = inner.core.counters();
            log!(
                Debug,
                "qp 0x{:06x}: {}",
                self.common.number,
                NotZero(&counters)
            );
            inner.core.detach_counters();
            inner.core.reset();
            inner.pending = Vec::new();
            inner.sent = 0;
            let token = std::mem::replace(&mut inner.token, Token::NONE);
            self.common.context.engine.remove(token, None);
            std::mem::take(&mut inner.groups)
        };
        for group in groups {
            group.leave(&self.me);
        }
        self.common.release_number();
    }

    /// Whether the queue pair is a member of a multicast group.
    pub fn is_in_group(&self) -> bool {
        !self.lock().groups.is_empty()
    }

    /// Joins or leaves a multicast group (`ibv_attach_mcast(3)`, `ibv_detach_mcast(3)`).
    pub fn multicast(&self, ip: IpAddr, join: bool) -> Result<(), Misuse> {
        let ip = ip.to_canonical();
        if self.kind != Kind::Ud {
            return Err(Misuse::InvalidArgument(
                "multicast on a queue pair that is not UD",
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
                let group =
                    Group::of(&GROUPS, self.common.context.engine, ip, home).map_err(|e| {
                        log!(
                            Warn,
                            "qp 0x{:06x}: cannot join {ip}: {e}",
                            self.common.number
                        );
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
}

impl DatagramSink for DgramQp {
    fn incoming(&self, arrival: &Arrival, run: Chunks<'_, u8>, now: Instant) {
        match &self.common.faults {
            None => self.deliver_run(arrival, run, now),
            Some(faults) => run.for_each(|bytes| {
                let sink: Weak<dyn Deliver> = self.me.clone();
                faults.receive(&sink, arrival, bytes);
            }),
        }
    }

    fn received(&self) {
        self.answer();
    }

    fn writable(&self) {
        let mut inner = self.lock();
        inner.blocked = false;
        self.transmit(&mut inner);
        self.deliver_events(&mut inner);
    }
}

impl Deliver for DgramQp {
    fn deliver(&self, arrival: &Arrival, bytes: &[u8]) {
        self.deliver_run(arrival, std::iter::once(bytes), clock::now());
        self.answer();
    }
}

impl Source for DgramQp {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        // The UDP port owns the socket, and handles its readiness.
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let mut inner = self.lock_caught_up();
        if inner.destroyed {
            return;
        }
        if inner.deadline.is_some_and(|at| at <= now) {
            inner.deadline = None;
        }
        // The deadline may be that of an earlier stall.
        if let (Some(present), Some((number, since))) = (inner.core.stall(), inner.stall)
            && present == number
            && since + bounds::DATAGRAM_STALL <= now
        {
            log!(
                Debug,
                "qp 0x{:06x}: the peer does not acknowledge in time",
                self.common.number
            );
            inner.stall = None;
            inner.core.handle_stall();
        }
        let due = inner.core.poll_timeout();
        if due.is_some_and(|at| clock::start() + at <= now) {
            inner.core.handle_timeout();
        }
        self.state_changed(&mut inner);
        self.schedule(&mut inner);
    }
}

impl DgramQp {
    /// Registers the counters of this queue pair for `anywarp stat`.
    pub fn register_counters(self: &Arc<Self>) {
        stat::register(self.common.context.engine, || {
            let counted: Arc<dyn HasCounters> = Arc::clone(self) as _;
            Arc::downgrade(&counted)
        });
    }
}

impl HasCounters for DgramQp {
    fn write_counters(&self, line: &mut String) {
        let kind = match self.kind {
            Kind::Ud => "ud",
            Kind::Uc => "uc",
            Kind::Rd => "rd",
            Kind::ReliableUc => "uc/rd",
            Kind::Rc => "rc/rd",
        };
        let _ = write!(line, "{kind} 0x{:06x}", self.number());
        for (name, value) in self.counters().named() {
            let _ = write!(line, " {name}={value}");
        }
        let (sent, found, empty) = self.calls();
        let _ = write!(
            line,
            " tx_calls={sent} port_rx_calls={} port_rx_empty={empty}",
            found + empty
        );
    }
}

impl Paced for DgramQp {
    fn granted(self: Arc<Self>, _now: Instant) {
        let mut inner = self.lock();
        if !inner.destroyed && !inner.blocked {
            self.transmit(&mut inner);
            self.deliver_events(&mut inner);
        }
    }
}

impl DelayedAck for DgramQp {
    fn flush(&self, now: Instant) {
        self.common.take_scheduled_ack();
        let mut inner = self.lock();
        let engine = self.common.context.engine;
        inner
            .cork
            .uncork(engine.polls(), engine.nanos(now), engine.datagram_posts());
        if inner.destroyed {
            return;
        }
        inner.core.flush();
        self.send_pending(&mut inner);
    }

    fn flush_due(&self, _now: Instant) {
        self.common.take_scheduled_ack();
        let mut inner = self.lock();
        if inner.destroyed {
            return;
        }
        inner.core.flush_due();
        self.send_pending(&mut inner);
        self.schedule_ack(&inner);
    }
}

impl DeviceListener for DgramQp {
    fn device_fatal(&self) {
        let mut inner = self.lock();
        if inner.destroyed {
            return;
        }
        inner.core.set_state(State::Error);
        self.discard_pending(&mut inner);
        self.deliver_events(&mut inner);
    }
}

/// Formats the counters that are not zero.
struct NotZero<'a>(&'a Counters);

impl std::fmt::Display for NotZero<'_> {
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
