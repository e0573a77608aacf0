//! QPN ports: a TCP listener and a UDP socket with the same port number, which make queue pair numbers unique on the
//! host.
//!
//! A queue pair number is `port << 8 | index`. The kernel assigns ports, so two processes of a host cannot have the
//! same number. A peer that knows address and number of a queue pair knows where to connect or send to.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use anywarp_core::llp::mpa::startup::Request;
use rustix::net::SocketType;

use crate::connect::half_open;
use crate::connect::startup::{Failure, Opened, Owner, Startup};
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::net::socket;
use crate::net::udp::UdpSocket;
use crate::process::PerProcess;
use crate::random::random_u32;
use crate::reactor::{Source, Token};

/// First bytes of the private data in the MPA Request from one queue pair to another. The numbers of the target and
/// of the source queue pair follow.
pub const HELLO: [u8; 4] = *b"aWQ1";
/// First bytes of the private data in the MPA Request that opens a trunk.
pub(super) const TRUNK: [u8; 4] = *b"aWT1";
/// Backlog passed to `listen(2)` for the TCP listener of a QPN port.
const BACKLOG: i32 = 512;
/// Number of ports tried until one is free for both TCP and UDP.
const TRIES: u32 = 64;
/// How many of the most recently freed indexes are not allocated while other indexes are free. A peer of reliable datagrams remembers a
/// queue pair for a minute, and its first request to a new queue pair with the same number fails. A late datagram for the earlier queue
/// pair would be delivered to the new one.
const RECENT: usize = 128;

/// Ports with their numbers.
type Ports = Vec<(u16, Weak<Port>)>;

/// The open ports of this process.
static PORTS: PerProcess<Mutex<Ports>> = PerProcess::new(|| Mutex::new(Rank::Ports, Vec::new()));

/// The number of the first open port of this process; 0: not known.
static FIRST_NUMBER: PerProcess<AtomicU16> = PerProcess::new(|| AtomicU16::new(0));

/// Returns the number of an open port of this process, the first one if it stays open. Never waits.
pub(super) fn first_number() -> Option<u16> {
    let first = FIRST_NUMBER.get();
    let number = first.load(Ordering::Relaxed);
    if number != 0 {
        return Some(number);
    }
    let ports = PORTS.get().try_lock()?;
    let (number, port) = ports.iter().find(|(_, port)| port.strong_count() > 0)?;
    first.store(*number, Ordering::Relaxed);
    // Either the end of the port finds its number here and clears it, or this thread finds that the port has ended.
    fence(Ordering::SeqCst);
    if port.strong_count() == 0 {
        clear_first(*number);
        return None;
    }
    Some(*number)
}

/// Called when a port has ended.
fn clear_first(number: u16) {
    fence(Ordering::SeqCst);
    let order = Ordering::Relaxed;
    let _ = FIRST_NUMBER.get().compare_exchange(number, 0, order, order);
}

/// The private data of an MPA Request that opens a trunk, after [`TRUNK`].
pub(super) struct TrunkRequest {
    /// The number of the trunk.
    pub(super) number: u32,
    /// The number of the process that is to accept it.
    pub(super) target: u32,
    /// The number of the process that opens it, and the port at which that process accepts trunks.
    pub(super) process: u32,
    pub(super) port: u16,
}

impl TrunkRequest {
    fn parse(private_data: &[u8]) -> Option<Self> {
        let rest = private_data.strip_prefix(&TRUNK)?;
        let (number, rest) = rest.split_first_chunk()?;
        let (target, rest) = rest.split_first_chunk()?;
        let (port, rest) = rest.split_first_chunk()?;
        let process = rest.try_into().ok()?;
        Some(Self {
            number: u32::from_be_bytes(*number),
            target: u32::from_be_bytes(*target),
            port: u16::from_be_bytes(*port),
            process: u32::from_be_bytes(process),
        })
    }
}

/// Takes a connection that a peer has opened as a trunk. Returns false if it cannot be used.
type IncomingTrunk =
    fn(engine: &'static Engine, startup: &Arc<Startup>, request: &TrunkRequest) -> bool;

static INCOMING_TRUNK: OnceLock<IncomingTrunk> = OnceLock::new();

/// Sets the function that takes trunks. Until it is set, they are rejected.
pub(super) fn set_incoming_trunk(incoming: IncomingTrunk) {
    let _ = INCOMING_TRUNK.set(incoming);
}

/// Passes a connection from queue pair `source` to queue pair `target`. Returns false if there is no such target.
type Incoming = fn(target: u32, startup: &Arc<Startup>, source: u32) -> bool;

static INCOMING: OnceLock<Incoming> = OnceLock::new();

/// Sets the function that passes accepted connections to their queue pairs. Until it is set, connections are rejected.
pub(crate) fn set_incoming(incoming: Incoming) {
    let _ = INCOMING.set(incoming);
}

/// A QPN port.
pub struct Port {
    engine: &'static Engine,
    /// Its number.
    pub number: u16,
    listener: EngineFd,
    /// The UDP socket of the same number.
    pub udp: Arc<UdpSocket>,
    state: Mutex<State>,
    me: Weak<Self>,
}

struct State {
    indexes: Indexes,
    token: Token,
}

/// The indexes of a port.
struct Indexes {
    used: [bool; 256],
    /// The free indexes that were freed last, oldest first; at most [`RECENT`].
    recent: VecDeque<u8>,
}

impl Indexes {
    fn new() -> Self {
        Self {
            used: [false; 256],
            recent: VecDeque::new(),
        }
    }

    /// Marks an index as used. Returns false if it is used already.
    fn take(&mut self, index: u8) -> bool {
        let is_free = self
            .used
            .get_mut(usize::from(index))
            .is_some_and(|used| !std::mem::replace(used, true));
        if is_free {
            self.recent.retain(|recent| *recent != index);
        }
        is_free
    }

    /// Marks a free index as used, and returns it. Searches from `first` on, and returns an index that was freed recently only if there is
    /// no other one.
    fn take_any(&mut self, first: u8) -> Option<u8> {
        let all = (0..=255).map(|n| first.wrapping_add(n));
        let is_used = |index: u8| self.used.get(usize::from(index)).is_none_or(|used| *used);
        let rested = { all }.find(|index| !is_used(*index) && !self.recent.contains(index));
        let index = rested.or_else(|| self.recent.front().copied())?;
        self.take(index).then_some(index)
    }

    fn free(&mut self, index: u8) {
        let used = self.used.get_mut(usize::from(index));
        if used.is_some_and(|used| std::mem::replace(used, false)) {
            self.recent.push_back(index);
            if self.recent.len() > RECENT {
                self.recent.pop_front();
            }
        }
    }
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// The error if no port is free for both TCP and UDP. It has an OS error number, because it becomes an errno.
fn none_left() -> io::Error {
    io::Error::from_raw_os_error(libc::EADDRINUSE)
}

impl Port {
    /// Allocates a queue pair number, on a port with a free index or on a new port.
    pub fn allocate(engine: &'static Engine) -> io::Result<(Arc<Self>, u32)> {
        engine.has_room_io()?;
        let mut ports = PORTS.get().lock();
        ports.retain(|(_, port)| port.strong_count() > 0);
        for port in ports.iter().filter_map(|(_, port)| port.upgrade()) {
            if let Some(qpn) = port.take_index() {
                port.becomes_first();
                return Ok((port, qpn));
            }
        }
        let port = Self::open(engine, 0)?;
        let qpn = port.take_index().ok_or_else(none_left)?;
        port.becomes_first();
        ports.push((port.number, Arc::downgrade(&port)));
        Ok((port, qpn))
    }

    /// Makes this port the first one if no other one is.
    fn becomes_first(&self) {
        let (new, order) = (self.number, Ordering::Relaxed);
        let _ = FIRST_NUMBER.get().compare_exchange(0, new, order, order);
    }

    /// Allocates the first queue pair number of the port `number`, so that a peer can derive it from the port.
    pub fn allocate_at(engine: &'static Engine, number: u16) -> io::Result<(Arc<Self>, u32)> {
        engine.has_room_io()?;
        let mut ports = PORTS.get().lock();
        ports.retain(|(_, port)| port.strong_count() > 0);
        let present = ports.iter().filter_map(|(_, port)| port.upgrade());
        let port = match { present }.find(|port| port.number == number) {
            Some(port) => port,
            None => {
                let port = Self::open(engine, number)?;
                ports.push((number, Arc::downgrade(&port)));
                port
            }
        };
        if port.lock().indexes.take(0) {
            port.becomes_first();
            Ok((port, u32::from(number) << 8))
        } else {
            Err(none_left())
        }
    }

    /// Opens the port `wanted`; 0 opens any free port.
    fn open(engine: &'static Engine, wanted: u16) -> io::Result<Arc<Self>> {
        let mut last = none_left();
        let tries = if wanted == 0 { TRIES } else { 1 };
        for _ in 0..tries {
            let (listener, _) = socket::open_on_every_address(SocketType::STREAM, wanted)?;
            rustix::net::listen(listener.get(), BACKLOG)?;
            let number = socket::local_addr(&listener).map_or(0, |a| a.port());
            let udp = match UdpSocket::bind(number) {
                Ok(udp) => Arc::new(udp),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    last = e;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let port = Arc::new_cyclic(|me| Self {
                engine,
                number,
                listener,
                udp,
                state: Mutex::new(
                    Rank::PortIndexes,
                    State {
                        indexes: Indexes::new(),
                        token: Token::NONE,
                    },
                ),
                me: me.clone(),
            });
            let accept = Arc::new(Acceptor(Arc::downgrade(&port)));
            let token = engine.add(accept, port.listener.get(), false)?;
            port.lock().token = token;
            return Ok(port);
        }
        Err(last)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Allocates a queue pair number of this port; `None` if all are in use.
    pub(crate) fn take_index(&self) -> Option<u32> {
        // RFC 5042 §5.1.1 [sec-number-guess]: the next number cannot be derived from earlier ones.
        let [first, ..] = random_u32().to_ne_bytes();
        let index = self.lock().indexes.take_any(first)?;
        Some(u32::from(self.number) << 8 | u32::from(index))
    }

    /// Frees a queue pair number.
    pub fn release(&self, qpn: u32) {
        let index = qpn.to_be_bytes()[3];
        self.lock().indexes.free(index);
    }

    fn accept(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let token = self.lock().token;
        let owner: Arc<dyn Owner> = Arc::new(PortOwner { port: me });
        half_open::accept(self.engine, &self.listener, token, &owner);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        clear_first(self.number);
        let token = self.lock().token;
        self.engine.remove(token, Some(self.listener.get()));
    }
}

struct Acceptor(Weak<Port>);

impl Source for Acceptor {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(port) = self.0.upgrade() {
            port.accept();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(port) = self.0.upgrade() {
            let token = port.lock().token;
            half_open::resume(port.engine, &port.listener, token);
        }
    }
}

/// Passes connections from other queue pairs to their targets.
struct PortOwner {
    /// The port stays open while connections to it start up.
    port: Arc<Port>,
}

impl Owner for PortOwner {
    fn opened(&self, _startup: &Arc<Startup>, _opened: Opened) {}

    fn requested(&self, startup: &Arc<Startup>, request: Request) {
        if let Some(trunk) = TrunkRequest::parse(&request.private_data) {
            let engine = self.port.engine;
            let incoming = INCOMING_TRUNK.get();
            if !incoming.is_some_and(|take| take(engine, startup, &trunk)) {
                let _ = startup.reject(&[]);
            }
            return;
        }
        let numbers = match request.private_data.as_slice() {
            [a, b, c, d, t0, t1, t2, t3, s0, s1, s2, s3] if [*a, *b, *c, *d] == HELLO => Some((
                u32::from_be_bytes([*t0, *t1, *t2, *t3]),
                u32::from_be_bytes([*s0, *s1, *s2, *s3]),
            )),
            _ => None,
        };
        let Some((target, source)) = numbers else {
            let _ = startup.reject(&[]);
            return;
        };
        let is_taken = INCOMING
            .get()
            .is_some_and(|incoming| incoming(target, startup, source));
        if !is_taken {
            let _ = startup.reject(&[]);
        }
    }

    fn failed(&self, _startup: &Arc<Startup>, _failure: Failure) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::engine;

    /// [sec-number-guess]
    #[test]
    fn queue_pair_numbers_are_not_sequential() {
        let engine = engine().unwrap();
        let mut held = Vec::new();
        for _ in 0..64 {
            held.push(Port::allocate(engine).unwrap());
        }
        let numbers: Vec<u32> = held.iter().map(|(_, n)| *n).collect();
        let follows = numbers.windows(2).filter(|w| w[1] == w[0] + 1).count();
        // One in 256 follows by chance, and more as the port fills.
        assert!(
            follows < 12,
            "{follows} of 64 numbers follow the one before"
        );
        let unique: std::collections::HashSet<_> = numbers.iter().collect();
        assert_eq!(unique.len(), numbers.len());
        for (port, number) in held {
            assert_eq!(number >> 8, u32::from(port.number));
            port.release(number);
        }
    }

    #[test]
    fn the_port_of_an_offer_is_open() {
        let engine = engine().unwrap();
        let mut held: Vec<_> = std::iter::repeat_with(|| Port::allocate(engine).unwrap())
            .take(300)
            .collect();
        // Other tests may close the first port, or hold the lock of the ports, in the meantime.
        let answers = || {
            (0..100).find_map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                first_number()
                    .filter(|number| std::net::TcpStream::connect(("127.0.0.1", *number)).is_ok())
            })
        };
        // All queue pairs of the first port are destroyed.
        let first = answers().unwrap();
        held.retain(|(port, number)| {
            if port.number == first {
                port.release(*number);
            }
            port.number != first
        });
        assert!(!held.is_empty());
        assert!(answers().is_some());
        for (port, number) in held {
            port.release(number);
        }
    }

    #[test]
    fn freed_indexes_are_used_again_only_after_others() {
        let mut indexes = Indexes::new();
        let mut last = [None; 256];
        for round in 0..1000 {
            // Every search begins at the same index. This is the worst case: elsewhere the first index is a random number.
            let index = indexes.take_any(7).unwrap();
            if let Some(last) = last[usize::from(index)].replace(round) {
                assert!(round - last > RECENT, "{index}: {last} and {round}");
            }
            indexes.free(index);
        }
    }

    #[test]
    fn all_indexes_can_be_used_at_the_same_time() {
        let mut indexes = Indexes::new();
        for _ in 0..2 {
            let mut taken: Vec<u8> = std::iter::from_fn(|| indexes.take_any(200)).collect();
            assert!(!indexes.take(0));
            taken.sort_unstable();
            assert_eq!(taken, (0..=255).collect::<Vec<u8>>());
            taken.into_iter().for_each(|index| indexes.free(index));
        }
        assert!(indexes.take(0));
        assert!(!indexes.take(0));
        indexes.free(0);
        // An index that is not used is not freed a second time.
        indexes.free(0);
        assert_eq!(std::iter::from_fn(|| indexes.take_any(0)).count(), 256);
    }
}
