//! Datagram queue pairs on a network that loses, duplicates, reorders, damages and delays datagrams.
//!
//! Time is virtual: it moves to the next arrival or deadline. The same seed gives the same losses.
//!
//! ```
//! use std::time::Duration;
//! use anywarp_core::datagram::{Kind, options::Options};
//! use anywarp_sim::{Request, access, send};
//! use anywarp_sim::ether::{Ether, Link};
//!
//! let mut net = Ether::new(1, Link { loss: 0.2, delay: Duration::from_millis(5), ..Link::default() });
//! let a = net.join(Kind::Rd, Options::default());
//! let b = net.join(Kind::Rd, Options::default());
//! let (from, to) = (net[a].host.register(5, access::ALL), net[b].host.register(64, access::ALL));
//! net[a].host.fill(&from, b"hello");
//! net[b].recv(7, &[to.all()]);
//! net.post(a, b, send(1).from(&[from.all()]));
//! net.run(Duration::from_secs(10));
//! assert_eq!(net[b].received()[0].byte_len, 45);
//! assert_eq!(net[b].host.bytes(&to)[40..45], *b"hello");
//! ```

use std::collections::{BinaryHeap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Arrival, DatagramQp, Dropped, Kind, TxDatagram};
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::Completion;
use anywarp_core::verbs::wr::{Destination, RecvRequest, Sge, WorkRequest};

use crate::end::{Host, completions};
use crate::{Rng, World, access};

/// The key of all queue pairs.
pub const QKEY: u32 = 0x1111_1111;

/// [`DatagramQp::check_accounts`] is called after each datagram, except for queue pairs with more than [`CHECKED_PEERS`]
/// peers, or more than [`CHECKED_BYTES`] waiting bytes, because the call would take most of the time.
const CHECKED_PEERS: usize = 16;
const CHECKED_BYTES: usize = 1 << 18;

/// The behaviour of a link. Shares are from 0 to 1.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Share of datagrams that are lost.
    pub loss: f64,
    /// Share of datagrams that arrive twice.
    pub duplicate: f64,
    /// Share of datagrams that are delayed by up to `delay` more, so that others overtake them.
    pub reorder: f64,
    /// Share of datagrams in which a bit is inverted.
    pub corrupt: f64,
    /// Delay of each datagram.
    pub delay: Duration,
    /// Rate in bytes per second; 0: no limit.
    pub rate: u64,
    /// If there is a limit of the rate: bytes that the queue of the link can hold. Further datagrams are lost.
    pub queue: u64,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: Duration::from_micros(50),
            rate: 0,
            queue: u64::MAX,
        }
    }
}

/// Identifies a queue pair on the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(usize);

/// A queue pair on the network.
pub struct Member {
    /// The queue pair.
    pub qp: DatagramQp,
    /// Its device and memory.
    pub host: Host,
    /// Its address.
    pub addr: SocketAddr,
    qpn: u32,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    /// Events that it has raised.
    pub events: Vec<AsyncEvent>,
    /// Numbers of datagrams that it dropped, by reason.
    pub drops: HashMap<Dropped, u64>,
    /// Whether the queue pair is cut off, as if its host had failed: it neither sends nor receives.
    pub dead: bool,
    /// The number of the current stall, and its start. A queue pair stalls when it must not send more before a peer reports
    /// what it has received.
    stall: Option<(u64, Duration)>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("addr", &self.addr)
            .field("qp", &self.qp)
            .finish_non_exhaustive()
    }
}

impl Member {
    /// The address of this queue pair in requests that others send to it.
    pub fn destination(&self) -> Destination {
        Destination {
            addr: self.addr,
            source: None,
            qpn: self.qpn,
            qkey: QKEY,
            hop_limit: 0,
            traffic_class: 0,
        }
    }

    /// Posts a receive.
    pub fn recv(&mut self, id: u64, sges: &[Sge]) {
        let sges = sges.iter().copied().collect();
        self.qp
            .post_recv(RecvRequest { id, sges })
            .expect("room for a receive");
    }

    /// Completions of requests.
    pub fn completed(&mut self) -> Vec<Completion> {
        completions(&self.send_cq)
    }

    /// Completions of receives.
    pub fn received(&mut self) -> Vec<Completion> {
        completions(&self.recv_cq)
    }
}

#[derive(PartialEq, Eq)]
struct Flight {
    at: Duration,
    number: u64,
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl Ord for Flight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap returns the largest entry first.
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Decides about a datagram before the link does: false drops it.
pub type Filter = Box<dyn FnMut(&TxDatagram) -> bool>;

/// The network.
pub struct Ether {
    /// The behaviour of all links.
    pub link: Link,
    /// Called with each datagram.
    pub filter: Option<Filter>,
    /// A stall ends after [`bounds::DATAGRAM_STALL`] and this time, which stands for the delay of a busy host.
    pub late: Duration,
    /// Whether datagrams that arrive from one source at the same time are handled as one run.
    pub coalesce: bool,
    now: Duration,
    rng: Rng,
    seed: u64,
    members: Vec<Member>,
    at: HashMap<SocketAddr, usize>,
    flying: BinaryHeap<Flight>,
    sent: u64,
    /// When the link to an address is free again.
    busy: HashMap<SocketAddr, Duration>,
}

impl std::fmt::Debug for Ether {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ether")
            .field("now", &self.now)
            .field("flying", &self.flying.len())
            .finish_non_exhaustive()
    }
}

impl Index<Id> for Ether {
    type Output = Member;
    fn index(&self, id: Id) -> &Member {
        &self.members[id.0]
    }
}

impl IndexMut<Id> for Ether {
    fn index_mut(&mut self, id: Id) -> &mut Member {
        &mut self.members[id.0]
    }
}

impl Ether {
    /// A network whose links all behave as `link`.
    pub fn new(seed: u64, link: Link) -> Self {
        Self {
            link,
            filter: None,
            late: Duration::ZERO,
            coalesce: false,
            now: Duration::from_secs(1),
            rng: Rng::new(seed),
            seed,
            members: Vec::new(),
            at: HashMap::new(),
            flying: BinaryHeap::new(),
            sent: 0,
            busy: HashMap::new(),
        }
    }

    /// The virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Lets time pass in which no queue pair is called.
    pub fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// All queue pairs.
    pub fn ids(&self) -> impl Iterator<Item = Id> + use<> {
        (0..self.members.len()).map(Id)
    }

    /// Number of datagrams that all queue pairs have sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Adds a queue pair on its own host, ready to send.
    pub fn join(&mut self, kind: Kind, options: Options) -> Id {
        let number = self.members.len();
        let host = World::new(self.seed ^ (number as u64 + 1) << 20).host();
        let addr = IpAddr::from([10, 0, (number >> 8) as u8, number as u8]);
        let addr = SocketAddr::new(addr, 4000);
        self.members
            .push(make(kind, options, host, addr, self.rng.next()));
        self.at.insert(addr, number);
        Id(number)
    }

    /// Replaces a queue pair by a new one, as when a program restarts.
    pub fn restart(&mut self, id: Id, options: Options) {
        let old = &self.members[id.0];
        let (kind, host, addr) = (old.qp.kind(), old.host.clone(), old.addr);
        self.members[id.0] = make(kind, options, host, addr, self.rng.next());
    }

    /// Posts a request of `from` to `to`.
    pub fn post(&mut self, from: Id, to: Id, mut request: WorkRequest) {
        let to = self[to].destination();
        let now = self.now;
        let qp = &mut self[from].qp;
        if !qp.kind().is_connected() {
            request.destination = Some(to);
        }
        qp.set_now(now);
        qp.post_send(request).expect("a request that fits");
    }

    /// Runs until no datagram is under way and no deadline is pending, or for `most`. Returns how long it took.
    pub fn run(&mut self, most: Duration) -> Duration {
        self.run_until(most, |_| false)
    }

    /// As [`Self::run`], but also stops when `done` returns true.
    pub fn run_until(
        &mut self,
        most: Duration,
        mut done: impl FnMut(&mut Self) -> bool,
    ) -> Duration {
        let start = self.now;
        loop {
            for at in 0..self.members.len() {
                self.transmit(at);
            }
            if done(self) {
                break;
            }
            let timeouts = self.members.iter().filter(|m| !m.dead);
            let timeout = timeouts.filter_map(|m| m.qp.poll_timeout()).min();
            let arrival = self.flying.peek().map(|f| f.at);
            let now = self.now;
            for m in &mut self.members {
                let since = m.stall.filter(|(n, _)| m.qp.stall() == Some(*n));
                m.stall = since.or_else(|| m.qp.stall().map(|n| (n, now)));
            }
            let wait = bounds::DATAGRAM_STALL + self.late;
            let stalls = self.members.iter().filter(|m| !m.dead);
            let stalls = stalls.filter_map(|m| m.stall);
            let over = stalls.map(|(_, at)| at + wait).min();
            let all = timeout.into_iter().chain(arrival).chain(over);
            let Some(next) = all.min() else { break };
            if next > start + most {
                self.now = start + most;
                break;
            }
            self.now = self.now.max(next);
            if arrival == Some(next) {
                self.arrive();
            } else {
                let now = self.now;
                for m in self.members.iter_mut().filter(|m| !m.dead) {
                    m.qp.set_now(now);
                    if m.stall.is_some_and(|(_, at)| at + wait <= now) {
                        m.qp.handle_stall();
                        m.stall = None;
                    }
                    if m.qp.poll_timeout().is_some_and(|at| at <= now) {
                        m.qp.handle_timeout();
                    }
                }
            }
        }
        for m in &mut self.members {
            m.qp.set_now(self.now);
        }
        self.now - start
    }

    fn transmit(&mut self, at: usize) {
        let now = self.now;
        // No other datagram is about to be sent, so acknowledgements do not wait for one.
        self.members[at].qp.flush();
        loop {
            let mut out = Vec::new();
            let m = &mut self.members[at];
            m.qp.set_now(now);
            m.qp.poll_tx(&mut out);
            m.qp.handle_written(out.len());
            while let Some(event) = m.qp.poll_event() {
                m.events.push(event);
            }
            if out.is_empty() {
                return;
            }
            let (from, dead) = (m.addr, m.dead);
            for datagram in out {
                if !dead {
                    self.send(from, datagram);
                }
            }
        }
    }

    fn happens(&mut self, share: f64) -> bool {
        share > 0.0 && (self.rng.next() >> 11) as f64 / (1_u64 << 53) as f64 <= share
    }

    fn send(&mut self, from: SocketAddr, datagram: TxDatagram) {
        self.sent += 1;
        if self.filter.as_mut().is_some_and(|pass| !pass(&datagram)) {
            return;
        }
        let link = self.link;
        let len = datagram.bytes.len() as u64;
        let mut leaves = self.now;
        if link.rate > 0 {
            let free = self.busy.entry(datagram.to).or_default();
            let start = (*free).max(self.now);
            let waiting = (start - self.now).as_nanos() * u128::from(link.rate) / 1_000_000_000;
            if waiting > u128::from(link.queue) {
                return;
            }
            *free = start + Duration::from_nanos(len * 1_000_000_000 / link.rate);
            leaves = *free;
        }
        if self.happens(link.loss) {
            return;
        }
        let copies = if self.happens(link.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let mut bytes = datagram.bytes.to_vec();
            if self.happens(link.corrupt) {
                let bit = self.rng.below(bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            let mut at = leaves + link.delay;
            if self.happens(link.reorder) {
                at += link.delay * (self.rng.below(1000) as u32) / 1000;
            }
            let number = self.sent << 1;
            self.flying.push(Flight {
                at,
                number,
                from,
                to: datagram.to,
                bytes,
            });
        }
    }

    fn arrive(&mut self) {
        let Some(flight) = self.flying.pop() else {
            return;
        };
        let (at, from, to) = (flight.at, flight.from, flight.to);
        let mut run = vec![flight.bytes];
        while self.coalesce
            && let Some(next) = self.flying.peek()
            && (next.at, next.from, next.to) == (at, from, to)
            && let Some(next) = self.flying.pop()
        {
            run.push(next.bytes);
        }
        self.deliver_run(from, to, run.iter().map(Vec::as_slice));
    }

    /// Delivers a datagram from any address.
    pub fn deliver(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        self.deliver_run(from, to, std::iter::once(bytes));
    }

    fn deliver_run<'a>(
        &mut self,
        from: SocketAddr,
        to: SocketAddr,
        run: impl Iterator<Item = &'a [u8]>,
    ) {
        let Some(at) = self.at.get(&to).copied() else {
            return;
        };
        let now = self.now;
        let m = &mut self.members[at];
        if m.dead {
            return;
        }
        let arrival = Arrival {
            from,
            to: Some(to.ip()),
            hop_limit: 64,
            traffic_class: 0,
        };
        m.qp.set_now(now);
        let drops = &mut m.drops;
        m.qp.handle_rx_run(&arrival, run, |_, why| {
            *drops.entry(why).or_default() += 1;
        });
        if m.qp.peers() <= CHECKED_PEERS && m.qp.waiting() <= CHECKED_BYTES {
            m.qp.check_accounts();
        }
    }
}

fn make(kind: Kind, options: Options, host: Host, addr: SocketAddr, random: u64) -> Member {
    let cq = || Arc::new(Cq::new(1 << 16, None));
    let (send_cq, recv_cq) = (cq(), cq());
    let qpn = u32::from(addr.port()) << 8 | 5;
    let mut qp = DatagramQp::new(
        Parts {
            rnic: Arc::clone(&host.rnic),
            qpn,
            pd: host.pd,
            send_cq: Arc::clone(&send_cq),
            recv_cq: Arc::clone(&recv_cq),
            rq: RecvQueue::Own {
                requests: std::collections::VecDeque::new(),
                max_wr: 8192,
                max_sge: 4,
            },
            capacity: Capacity {
                max_send_wr: 8192,
                max_recv_wr: 8192,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
            sig_all: true,
        },
        kind,
        options,
        [random, !random],
    );
    let attr = qp.attr_mut();
    attr.qkey = QKEY;
    attr.access = access::ALL;
    attr.rnr_retry = 7;
    qp.set_room(4 << 20);
    qp.set_state(State::Rts);
    Member {
        qp,
        host,
        addr,
        qpn,
        send_cq,
        recv_cq,
        events: Vec::new(),
        drops: HashMap::new(),
        dead: false,
        stall: None,
    }
}
