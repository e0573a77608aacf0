//! UDP sockets that datagram queue pairs share.
//!
//! To send, a *run* (datagrams of one length to one destination) is passed to the kernel as one buffer (`UDP_SEGMENT`), and
//! several runs are passed in one call. One call receives several buffers, each of which may be a run that the kernel
//! coalesced (`UDP_GRO`). A thread that receives holds the port's receive lock, so datagrams reach a queue pair in the
//! order of the socket's queue. A *turn* of receiving is one call of [`UdpPort::try_readable`].

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::datagram::rx::destination_index;
use anywarp_core::datagram::{Arrival, TxDatagram};
use anywarp_core::wire::carrier::Message;
use rustix::net::SocketType;
use smallvec::SmallVec;

use super::carrier::{Carrier, Carriers, Port, Sent};
use super::route::{MulticastHome, source_for};
use super::shm::{self, Shm};
pub(crate) use super::sink::DatagramSink;
use super::socket::{self, unmapped};
use crate::clock;
use crate::config::Transport;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank, RwLock};
use crate::mem::TolerateUnmapped;
use crate::process::PerProcess;
use crate::reactor::{Source, Token};
use crate::sys::Io;
use crate::sys::datagram::{self, DATAGRAMS, Datagram, Run};
use crate::sys::socket::{get_option, multicast_interface};
use crate::sys::thread::Uncancelled;

/// Bytes of receive buffer for the largest datagram, or run of datagrams.
const SLOT_BYTES: usize = 1 << 16;
/// Datagrams after which a turn of receiving ends, so that answers are sent, and a polling thread gets the
/// completions and posts the next receives before more arrives.
const TURN_DATAGRAMS: usize = 64;
/// Bytes after which a turn of receiving ends.
const TURN_BYTES: usize = 128 << 10;
/// Largest number of bytes in a run that is received from shared memory (`super::carrier`). The run is copied twice, and is short enough
/// to stay in the processor's first cache.
const MEMORY_RUN_BYTES: usize = 16 << 10;
/// Largest number of turns of [`UdpPort::catch_up`]: enough for all datagrams in the socket's buffer.
const CATCH_UP_TURNS: usize = 256;
/// Largest number of datagrams in one run, a limit of the kernel.
const RUN_DATAGRAMS_MAX: usize = 64;
/// Largest number of payload bytes in one run: the kernel limits a run with its IP and UDP headers to 65,535 bytes.
const RUN_BYTES_MAX: usize = 65_000;

// ---------------------------------------------------------------------- the socket

/// A UDP socket that carries datagram queue pairs.
#[derive(Debug)]
pub struct UdpSocket {
    fd: EngineFd,
    ipv6: bool,
}

impl UdpSocket {
    /// A socket bound to `port` on every address of the host.
    pub(crate) fn bind(port: u16) -> io::Result<Self> {
        let (fd, ipv6) = socket::open_on_every_address(SocketType::DGRAM, port)?;
        Ok(Self { fd, ipv6 })
    }

    #[cfg(test)]
    pub(super) fn fd(&self) -> &EngineFd {
        &self.fd
    }

    /// Bytes that the socket's receive buffer has room for: half of what the kernel accounts for payload and overhead.
    pub(crate) fn receive_buffer(&self) -> u32 {
        let all = get_option(self.fd.get(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        u32::try_from(all.unwrap_or(0) / 2).unwrap_or(0)
    }

    /// Sends datagrams from the front of the list. Returns how many the kernel accepted.
    ///
    /// `run_max` is the longest datagram that may be part of a run. It is lowered when the kernel refuses a run.
    pub(crate) fn send(
        &self,
        datagrams: &[TxDatagram],
        from: Option<IpAddr>,
        run_max: &mut usize,
    ) -> Result<usize, Io> {
        let run_of = |datagrams| Run {
            datagrams,
            from: datagrams.first().and_then(|d: &TxDatagram| d.from).or(from),
        };
        let mut runs: SmallVec<[Run<'_>; DATAGRAMS]> = SmallVec::new();
        let mut rest = datagrams;
        while runs.len() < DATAGRAMS && !rest.is_empty() {
            let (run, behind) = rest.split_at(run_length(rest, *run_max));
            runs.push(run_of(run));
            rest = behind;
        }
        match datagram::send_runs(self.fd.get(), self.ipv6, &runs) {
            Ok(n) => Ok(runs.iter().take(n).map(|r| r.datagrams.len()).sum()),
            Err(Io::Broken(libc::EINVAL | libc::EIO | libc::EMSGSIZE))
                if runs.first().is_some_and(|r| r.datagrams.len() > 1) =>
            {
                // The MTU of the path is smaller than a datagram, or the kernel has no UDP_SEGMENT. If the first datagram is
                // refused alone too, the reason is its address, and runs to other addresses are possible.
                let alone = datagrams.get(..1).unwrap_or(datagrams);
                let sent = datagram::send_runs(self.fd.get(), self.ipv6, &[run_of(alone)])?;
                let len = alone.first().map_or(0, |d| d.bytes.len());
                *run_max = len.saturating_sub(1);
                Ok(sent)
            }
            Err(e) => Err(e),
        }
    }
}

/// How many datagrams at the front of the list can be sent as one run; at least 1 unless the list is empty.
fn run_length(datagrams: &[TxDatagram], run_max: usize) -> usize {
    let Some(first) = datagrams.first() else {
        return 0;
    };
    let len = first.bytes.len();
    if len > run_max || len == 0 {
        return 1;
    }
    let limit = RUN_DATAGRAMS_MAX.min(RUN_BYTES_MAX / len).max(1);
    let mut n = 1;
    for d in datagrams.iter().skip(1).take(limit - 1) {
        let same_way = d.to == first.to
            && d.from == first.from
            && d.hop_limit == first.hop_limit
            && d.traffic_class == first.traffic_class;
        if !same_way || d.bytes.len() > len {
            break;
        }
        n += 1;
        if d.bytes.len() < len {
            // A run ends with its first shorter datagram.
            break;
        }
    }
    n
}

// ---------------------------------------------------------------------- receiving

/// How much is received from a socket in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Batch {
    /// One datagram, or one run.
    One,
    /// As many as there is room for.
    Full,
}

/// The result of [`receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    /// Whether at least one datagram was received.
    any: bool,
    /// Whether more than one datagram was received, so that the next call is likely to find several as well.
    many: bool,
    /// System calls that received something.
    calls: u64,
    /// Whether the last system call received nothing.
    empty: bool,
}

/// Receives from a socket. Calls `each` with the bytes of a run and the length of its datagrams; the last one may be
/// shorter.
pub(crate) fn receive(
    engine: &Engine,
    fd: &EngineFd,
    batch: Batch,
    mut each: impl FnMut(&Arrival, &[u8], usize),
) -> Received {
    let mut stage = engine.rx_buffer();
    let most = (stage.len() / SLOT_BYTES).min(DATAGRAMS);
    let mut slots = if batch == Batch::One { 1 } else { most };
    let mut found = Received {
        any: false,
        many: false,
        calls: 0,
        empty: false,
    };
    let (mut datagrams, mut turn_bytes) = (0, 0);
    while datagrams < TURN_DATAGRAMS && turn_bytes < TURN_BYTES {
        let mut got: SmallVec<[Datagram; DATAGRAMS]> = SmallVec::new();
        let room = stage.get_mut(..slots * SLOT_BYTES).unwrap_or(&mut []);
        if datagram::receive_datagrams(fd.get(), room, SLOT_BYTES, &mut got).is_err() {
            found.empty = true;
            break;
        }
        found.any = true;
        found.calls += 1;
        for d in &got {
            let arrival = Arrival {
                from: unmapped(d.from),
                to: d.to,
                hop_limit: d.hop_limit,
                traffic_class: d.traffic_class,
            };
            let bytes = stage.get(d.at..d.at + d.len).unwrap_or(&[]);
            let size = if d.segment == 0 {
                SLOT_BYTES
            } else {
                d.segment
            };
            found.many |= size < bytes.len();
            datagrams += bytes.len().div_ceil(size).max(1);
            turn_bytes += bytes.len();
            each(&arrival, bytes, size);
        }
        found.many |= got.len() > 1;
        if got.len() < slots || (slots == 1 && !found.many) {
            break;
        }
        slots = most;
    }
    engine.return_rx_buffer(stage);
    found
}

// ---------------------------------------------------------------------- the port

/// System calls that received on a port.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceiveCalls {
    /// Calls that received something.
    pub(crate) found: u64,
    /// Calls that received nothing.
    pub(crate) empty: u64,
}

/// A UDP socket and the queue pairs that share it.
pub(crate) struct UdpPort<S: DatagramSink> {
    engine: &'static Engine,
    socket: Arc<UdpSocket>,
    members: RwLock<BTreeMap<u8, Weak<S>>>,
    /// Queue pairs that wait until the socket has room.
    waiting: Mutex<Vec<Weak<S>>>,
    /// Locked by the thread that receives.
    receiving: Mutex<ReceiveCalls>,
    /// Whether the last receive that found datagrams found more than one.
    many: AtomicBool,
    token: Mutex<Token>,
    /// The number of the port.
    number: u16,
    carriers: Carriers<S>,
}

impl<S: DatagramSink> std::fmt::Debug for UdpPort<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpPort")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// The ports of a process whose queue pairs are of type `S`.
pub(crate) type Registry<S> = PerProcess<Mutex<Vec<Weak<UdpPort<S>>>>>;

impl<S: DatagramSink> UdpPort<S> {
    /// Returns the port of a socket from the registry, or adds it for its first queue pair. `homes`: the interfaces
    /// for multicast.
    pub(crate) fn of(
        registry: &Registry<S>,
        engine: &'static Engine,
        socket: &Arc<UdpSocket>,
        homes: &[MulticastHome],
    ) -> io::Result<Arc<Self>> {
        let mut all = registry.get().lock();
        all.retain(|port| port.strong_count() > 0);
        if let Some(port) = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|port| Arc::ptr_eq(&port.socket, socket))
        {
            return Ok(port);
        }
        socket::tune_datagram(&socket.fd, socket.ipv6);
        for home in homes.iter().filter(|h| h.ip.is_ipv4() || socket.ipv6) {
            multicast_interface(socket.fd.get(), home.ip, home.interface);
        }
        let port = Arc::new(Self {
            engine,
            socket: Arc::clone(socket),
            members: RwLock::new(Rank::UdpMembers, BTreeMap::new()),
            waiting: Mutex::new(Rank::UdpWriters, Vec::new()),
            receiving: Mutex::new(Rank::UdpReceive, ReceiveCalls::default()),
            many: AtomicBool::new(false),
            token: Mutex::new(Rank::UdpToken, Token::NONE),
            number: socket::local_addr(&socket.fd).map_or(0, |a| a.port()),
            carriers: Carriers::new(),
        });
        let listener = Arc::new(Listener(Arc::downgrade(&port)));
        let token = engine.add(listener, socket.fd.get(), false)?;
        *port.token.lock() = token;
        all.push(Arc::downgrade(&port));
        Ok(port)
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Arc<UdpSocket> {
        &self.socket
    }

    /// Delivers datagrams for index `index` to `sink` from now on.
    pub(crate) fn enter(&self, index: u8, sink: Weak<S>) {
        self.members.write().insert(index, sink);
    }

    /// Drops datagrams for index `index` from now on.
    pub(crate) fn leave(&self, index: u8) {
        self.members.write().remove(&index);
    }

    /// System calls that received so far.
    pub(crate) fn calls(&self) -> ReceiveCalls {
        *self.receiving.lock()
    }

    /// Like [`UdpSocket::send`], but sends the datagrams by shared memory if there is a carrier.
    #[inline]
    pub(crate) fn send(
        self: &Arc<Self>,
        datagrams: &[TxDatagram],
        from: Option<IpAddr>,
        run_max: &mut usize,
    ) -> Result<usize, Io> {
        let mut datagrams = datagrams;
        if let Some(first) = datagrams.first() {
            let source = first.from.or(from);
            let offer = || self.offer(first.to, source);
            let carrier = self.carriers.to(first.to, datagrams.len(), offer);
            if carrier.is_some() || self.carriers.any() {
                let same = datagrams.iter().take_while(|d| d.to == first.to).count();
                datagrams = datagrams.get(..same).unwrap_or(datagrams);
            }
            if let Some(carrier) = carrier {
                match carrier.send(datagrams, from, || self.wake(&carrier)) {
                    Sent::Some(n) => return Ok(n),
                    Sent::Full => return Err(Io::WouldBlock),
                    Sent::Unsuitable(n) => datagrams = datagrams.get(..n).unwrap_or(datagrams),
                }
            }
        }
        self.socket.send(datagrams, from, run_max)
    }

    /// Sends a message about carriers. It may be lost. Returns false if it was not sent.
    pub(super) fn tell(&self, to: SocketAddr, from: Option<IpAddr>, message: Message) -> bool {
        let datagram = TxDatagram {
            to,
            from,
            hop_limit: 0,
            traffic_class: 0,
            bytes: message.emit().into(),
        };
        matches!(self.socket.send(&[datagram], None, &mut 0), Ok(1))
    }

    /// Offers memory for the datagrams to `to`, if it is a port of this host.
    fn offer(self: &Arc<Self>, to: SocketAddr, source: Option<IpAddr>) -> Option<Arc<Carrier<S>>> {
        // Closing a descriptor is a cancellation point.
        let _inside = Uncancelled::new();
        if shm::transport() == Transport::Tcp {
            return None;
        }
        let ip = source.or_else(|| source_for(to).ok().map(|source| source.ip()))?;
        let local = SocketAddr::new(ip, self.number);
        if !is_of_one_host(ip, to.ip()) || local == to {
            return None;
        }
        let shm = Shm::offer_to_port(local, to)?;
        let port: Arc<dyn Port<S>> = Arc::clone(self) as _;
        let carrier = Carrier::new(self.engine, Arc::downgrade(&port), shm, local, to);
        let (pid, fd) = carrier.name()?;
        self.tell(to, Some(local.ip()), Message::Offer { pid, fd });
        Some(carrier)
    }

    /// Handles a message about carriers.
    fn handle_message(self: &Arc<Self>, arrival: &Arrival, bytes: &[u8], now: Instant) {
        let (Ok(message), Some(to)) = (Message::parse(bytes), arrival.to) else {
            return;
        };
        let _inside = Uncancelled::new();
        let (local, peer) = (SocketAddr::new(to, self.number), arrival.from);
        if !is_of_one_host(peer.ip(), to) {
            return;
        }
        match message {
            Message::Offer { pid, fd } => {
                let take = || {
                    if shm::transport() == Transport::Tcp {
                        return None;
                    }
                    let shm = Shm::take_from_port(pid, fd, local, peer)?;
                    let port: Arc<dyn Port<S>> = Arc::clone(self) as _;
                    Some(Carrier::new(
                        self.engine,
                        Arc::downgrade(&port),
                        shm,
                        local,
                        peer,
                    ))
                };
                let taken = self.carriers.offered(peer, local < peer, now, take);
                if let Some(carrier) = taken {
                    let proof = carrier.proof();
                    self.tell(peer, Some(to), Message::Take { proof });
                }
            }
            Message::Take { proof } => self.carriers.taken(peer, proof),
            Message::Wake if self.carriers.has(peer) => self.engine.on_wake_up_taken(),
            Message::Wake => {}
        }
    }

    /// Gives the datagrams of `size` bytes to their queue pairs.
    fn deliver(
        &self,
        sinks: &mut Sinks<S>,
        arrival: &Arrival,
        bytes: &[u8],
        size: usize,
        now: Instant,
    ) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (index, run, behind) = split_by_index(rest, size);
            rest = behind;
            let member = |index| {
                let members = self.members.read();
                members.get(&index).and_then(Weak::upgrade)
            };
            if let Some(sink) = index.and_then(|index| sinks.of(index, member)) {
                sink.incoming(arrival, run.chunks(size), now);
            }
        }
    }

    /// Calls [`DatagramSink::writable`] of `sink` when datagrams to `to` can be sent again.
    pub(crate) fn wait_writable(&self, sink: Weak<S>, to: Option<SocketAddr>) {
        let full = to.and_then(|to| self.carriers.full(to));
        if full.is_some_and(|carrier| carrier.wait_writable(sink.clone())) {
            return;
        }
        let mut waiting = self.waiting.lock();
        if waiting.is_empty() {
            let token = *self.token.lock();
            self.engine.want_write(token, self.socket.fd.get(), true);
        }
        waiting.push(sink);
    }

    /// Turns readiness events of the socket on, or off if no queue pair waits for room.
    fn set_armed(&self, armed: bool) {
        let waiting = self.waiting.lock();
        let token = *self.token.lock();
        let fd = self.socket.fd.get();
        if armed {
            self.engine.want_write(token, fd, !waiting.is_empty());
        } else if waiting.is_empty() {
            self.engine.disarm(token, fd);
        }
    }

    fn writable(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock();
            let token = *self.token.lock();
            self.engine.want_write(token, self.socket.fd.get(), false);
            std::mem::take(&mut *waiting)
        };
        for sink in waiting.iter().filter_map(Weak::upgrade) {
            sink.writable();
        }
    }

    /// Receives all datagrams in the socket's buffer and in the memory of carriers.
    pub(crate) fn catch_up(self: &Arc<Self>) {
        self.drain_socket();
        for carrier in self.carriers.active() {
            for _ in 0..CATCH_UP_TURNS {
                if !carrier.has_datagrams() {
                    break;
                }
                self.receive_from(&carrier, clock::now());
            }
        }
    }

    /// Receives all datagrams in the socket's buffer. Returns false if another thread is receiving.
    fn drain_socket(self: &Arc<Self>) -> bool {
        for _ in 0..CATCH_UP_TURNS {
            match self.try_readable(Batch::Full, clock::now()) {
                None => return false,
                Some(false) => break,
                Some(true) => {}
            }
        }
        true
    }

    /// Like [`Self::try_readable`], but also returns false if another thread is receiving, which will receive these datagrams.
    fn readable(self: &Arc<Self>, batch: Batch, now: Instant) -> bool {
        self.try_readable(batch, now).unwrap_or(false)
    }

    /// Receives queued datagrams. Returns whether there were any; `None` if another thread is receiving. `now`: a recent
    /// time.
    fn try_readable(self: &Arc<Self>, batch: Batch, now: Instant) -> Option<bool> {
        // Dropped after the lock is released: this may be the last reference to a queue pair that is being destroyed,
        // and dropping it closes ports.
        let mut sinks = Sinks(SmallVec::new());
        // The thread with the lock receives these datagrams. Those that arrive later make the socket readable again.
        let mut calls = self.receiving.try_lock()?;
        let _tolerant = TolerateUnmapped::in_worker();
        let found = receive(
            self.engine,
            &self.socket.fd,
            batch,
            |arrival, bytes, size| {
                if Message::is(bytes) {
                    bytes
                        .chunks(size)
                        .for_each(|bytes| self.handle_message(arrival, bytes, now));
                } else {
                    self.deliver(&mut sinks, arrival, bytes, size, now);
                }
            },
        );
        // All datagrams of the turn are received before answers are sent. An acknowledgement permits transmissions to its
        // sender. If these began at once, a short request of another peer that is queued behind the acknowledgement would
        // wait for them.
        for (_, sink) in &sinks.0 {
            sink.received();
        }
        calls.found += found.calls;
        calls.empty += u64::from(found.empty);
        if found.any {
            self.many.store(found.many, Ordering::Relaxed);
        }
        Some(found.any)
    }

    /// Receives without having been notified that the socket is readable.
    fn try_recv(self: &Arc<Self>, now: Instant) -> bool {
        let many = self.many.load(Ordering::Relaxed);
        self.readable(if many { Batch::Full } else { Batch::One }, now)
    }
}

impl<S: DatagramSink> Port<S> for UdpPort<S> {
    fn receive_from_socket(self: Arc<Self>) -> bool {
        self.drain_socket()
    }

    fn wake(&self, carrier: &Carrier<S>) -> bool {
        self.tell(carrier.peer, Some(carrier.local.ip()), Message::Wake)
    }

    fn carriers(&self) -> &Carriers<S> {
        &self.carriers
    }

    fn receive_from(&self, carrier: &Carrier<S>, now: Instant) {
        let mut sinks = Sinks(SmallVec::new());
        let Some(_receiving) = self.receiving.try_lock() else {
            return;
        };
        let _tolerant = TolerateUnmapped::in_worker();
        let (mut datagrams, mut bytes) = (0, 0);
        while datagrams < TURN_DATAGRAMS && bytes < TURN_BYTES {
            let (most, left) = (TURN_DATAGRAMS - datagrams, TURN_BYTES - bytes);
            let most_bytes = left.min(MEMORY_RUN_BYTES);
            let run = carrier.receive_run(most, most_bytes, |arrival, run, size| {
                self.deliver(&mut sinks, arrival, run, size, now);
            });
            match run {
                Ok((0, _)) => break,
                Ok((n, len)) => (datagrams, bytes) = (datagrams + n, bytes + len),
                Err(_) => {
                    carrier.close();
                    carrier.stop_receiving();
                    break;
                }
            }
        }
        if datagrams > 0 && carrier.must_wake_for_room() && !self.wake(carrier) {
            carrier.was_not_woken();
        }
        for (_, sink) in &sinks.0 {
            sink.received();
        }
    }
}

/// Whether a datagram with these addresses stays on this host. If the destination is an address of this host, the kernel uses it as
/// the source too. If it is a loopback address, the source may be another loopback address.
fn is_of_one_host(from: IpAddr, to: IpAddr) -> bool {
    from == to || from.is_loopback() && to.is_loopback()
}

/// The receivers of a turn's datagrams, by index; seldom more than one.
struct Sinks<S>(SmallVec<[(u8, Arc<S>); 2]>);

impl<S> Sinks<S> {
    /// Returns the receiver with this index. `find` returns it if it is not in the list yet.
    fn of(&mut self, index: u8, find: impl FnOnce(u8) -> Option<Arc<S>>) -> Option<&S> {
        let at = match self.0.iter().position(|(known, _)| *known == index) {
            Some(at) => at,
            None => {
                self.0.push((index, find(index)?));
                self.0.len() - 1
            }
        };
        self.0.get(at).map(|(_, sink)| &**sink)
    }
}

/// Splits off the datagrams of `size` bytes at the front that are for one queue pair. Returns its index, these
/// datagrams, and the rest.
fn split_by_index(bytes: &[u8], size: usize) -> (Option<u8>, &[u8], &[u8]) {
    let mut datagrams = bytes.chunks(size);
    let index = datagrams.next().and_then(destination_index);
    let more = datagrams
        .take_while(|d| destination_index(d) == index)
        .count();
    let (run, behind) = bytes.split_at(bytes.len().min((1 + more) * size));
    (index, run, behind)
}

impl<S: DatagramSink> Drop for UdpPort<S> {
    fn drop(&mut self) {
        self.carriers.end();
        let token = *self.token.lock();
        self.engine.remove(token, Some(self.socket.fd.get()));
    }
}

/// Refers to the port weakly: the port is dropped with its last queue pair.
struct Listener<S: DatagramSink>(Weak<UdpPort<S>>);

impl<S: DatagramSink> Source for Listener<S> {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant) {
        let Some(port) = self.0.upgrade() else {
            return;
        };
        if readable {
            port.readable(Batch::Full, now);
        }
        if writable {
            port.writable();
        }
    }

    fn try_recv_hot(self: Arc<Self>, now: Instant) -> Option<bool> {
        Some(self.0.upgrade()?.try_recv(now))
    }

    fn set_armed(&self, armed: bool) {
        if let Some(port) = self.0.upgrade() {
            port.set_armed(armed);
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

#[cfg(test)]
mod tests {
    use std::slice::Chunks;

    use super::*;

    fn datagram(port: u16, len: usize) -> TxDatagram {
        TxDatagram {
            to: SocketAddr::from(([127, 0, 0, 1], port)),
            from: None,
            hop_limit: 0,
            traffic_class: 0,
            bytes: vec![0; len].into(),
        }
    }

    /// Two sockets on the loopback interface.
    fn two_sockets() -> (EngineFd, EngineFd) {
        let socket = || {
            let localhost = IpAddr::from([127, 0, 0, 1]);
            let fd = socket::open(localhost, SocketType::DGRAM).unwrap();
            socket::tune_datagram(&fd, false);
            rustix::net::bind(fd.get(), &SocketAddr::new(localhost, 0)).unwrap();
            fd
        };
        (socket(), socket())
    }

    /// Drops what it receives.
    struct Nowhere;

    impl DatagramSink for Nowhere {
        fn incoming(&self, _: &Arrival, _: Chunks<'_, u8>, _: Instant) {}
        fn received(&self) {}
        fn writable(&self) {}
    }

    #[test]
    fn a_socket_that_is_polled_raises_no_events_until_it_is_armed_again() {
        static PORTS: Registry<Nowhere> =
            PerProcess::new(|| Mutex::new(Rank::UdpPorts, Vec::new()));
        let engine = Engine::without_worker().unwrap();
        let socket = Arc::new(UdpSocket::bind(0).unwrap());
        let port = UdpPort::of(&PORTS, engine, &socket, &[]).unwrap();
        let number = socket::local_addr(&socket.fd).unwrap().port();
        let (from, _) = two_sockets();
        let send = || {
            let list = [datagram(number, 100)];
            let run = Run {
                datagrams: &list,
                from: None,
            };
            assert_eq!(datagram::send_runs(from.get(), false, &[run]), Ok(1));
        };
        // Nobody else polls this engine, and the loopback interface delivers at once.
        let raises_event = || engine.poll_all(clock::now());
        send();
        assert!(raises_event());
        for _ in 0..200 {
            send();
            let before = port.calls().found;
            let polls = (0..1000).take_while(|_| {
                engine.on_idle_poll();
                port.calls().found == before
            });
            assert!(polls.count() < 1000);
        }
        send();
        assert!(!raises_event());
        port.set_armed(true);
        assert!(raises_event());
        // A queue pair waits for room, so the events stay on.
        port.wait_writable(Weak::new(), None);
        port.set_armed(false);
        assert!(raises_event());
    }

    /// The kernel refuses a datagram whose source address is not an address of the host, whatever the destination.
    #[test]
    fn a_wrong_source_address_does_not_end_runs_to_others() {
        let socket = UdpSocket::bind(0).unwrap();
        let list = [datagram(9, 100), datagram(9, 100)];
        let mut run_max = usize::MAX;
        let wrong = Some(IpAddr::from([192, 0, 2, 1]));
        assert!(socket.send(&list, wrong, &mut run_max).is_err());
        assert_eq!(run_max, usize::MAX);
        assert_eq!(socket.send(&list, None, &mut run_max).ok(), Some(2));
    }

    #[test]
    fn a_small_batch_takes_a_lone_datagram_and_all_of_a_run() {
        let engine = crate::engine::engine().unwrap();
        let (from, to) = two_sockets();
        let port = socket::local_addr(&to).unwrap().port();
        let send = |lens: &[usize]| {
            let list: Vec<_> = lens.iter().map(|len| datagram(port, *len)).collect();
            let run = Run {
                datagrams: &list,
                from: None,
            };
            assert_eq!(datagram::send_runs(from.get(), false, &[run]), Ok(1));
        };
        let one = || {
            let mut lens = Vec::new();
            let found = receive(engine, &to, Batch::One, |_, bytes, size| {
                lens.extend(bytes.chunks(size).map(<[u8]>::len));
            });
            (found.any, found.many, lens)
        };
        assert_eq!(one(), (false, false, vec![]));
        send(&[100]);
        send(&[200]);
        // The second datagram is left for the next call.
        assert_eq!(one(), (true, false, vec![100]));
        assert_eq!(one(), (true, false, vec![200]));
        send(&[100, 100, 60]);
        send(&[300]);
        assert_eq!(one(), (true, true, vec![100, 100, 60, 300]));
        assert_eq!(one(), (false, false, vec![]));
    }

    #[test]
    fn a_turn_of_receiving_is_limited() {
        let engine = crate::engine::engine().unwrap();
        let (from, to) = two_sockets();
        let port = socket::local_addr(&to).unwrap().port();
        let queued = 2 * TURN_DATAGRAMS;
        for _ in 0..queued {
            let list = [datagram(port, 100)];
            let run = Run {
                datagrams: &list,
                from: None,
            };
            assert_eq!(datagram::send_runs(from.get(), false, &[run]), Ok(1));
        }
        let turn = || {
            let mut datagrams = 0;
            receive(engine, &to, Batch::Full, |_, bytes, size| {
                datagrams += bytes.len().div_ceil(size);
            });
            datagrams
        };
        // The call that reaches the limit may receive some more.
        let first = turn();
        assert!(
            (TURN_DATAGRAMS..TURN_DATAGRAMS + DATAGRAMS).contains(&first),
            "{first}"
        );
        assert_eq!(first + turn(), queued);
    }

    #[test]
    fn datagrams_that_arrive_together_go_to_each_queue_pair_in_runs() {
        let of = |list: &[u8], size: usize, last: usize| {
            let mut bytes: Vec<u8> = list.iter().flat_map(|i| vec![*i; size]).collect();
            bytes.truncate(bytes.len() - size + last);
            let (mut runs, mut rest) = (Vec::new(), &bytes[..]);
            while !rest.is_empty() {
                let (index, run, behind) = split_by_index(rest, size);
                runs.push((index, run.len()));
                rest = behind;
            }
            runs
        };
        assert_eq!(of(&[1], 50, 30), [(Some(1), 30)]);
        assert_eq!(of(&[1, 1, 1], 50, 50), [(Some(1), 150)]);
        assert_eq!(
            of(&[1, 2, 2, 1], 50, 30),
            [(Some(1), 50), (Some(2), 100), (Some(1), 30)]
        );
        // Too short to contain an index.
        assert_eq!(of(&[1, 1], 50, 9), [(Some(1), 50), (None, 9)]);
        assert_eq!(of(&[1, 1], 9, 9), [(None, 18)]);
    }

    #[test]
    fn a_run_is_equal_datagrams_of_one_destination_and_a_shorter_last() {
        let of = |list: &[(u16, usize)]| {
            let list: Vec<_> = list.iter().map(|(p, n)| datagram(*p, *n)).collect();
            run_length(&list, usize::MAX)
        };
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&[(1, 100)]), 1);
        assert_eq!(of(&[(1, 100), (1, 100), (1, 100)]), 3);
        assert_eq!(of(&[(1, 100), (2, 100)]), 1);
        assert_eq!(of(&[(1, 100), (1, 101)]), 1);
        assert_eq!(of(&[(1, 100), (1, 99), (1, 99)]), 2);
        assert_eq!(of(&[(1, 100); 100]), RUN_DATAGRAMS_MAX);
        assert_eq!(of(&[(1, 4000); 100]), RUN_BYTES_MAX / 4000);
        assert_eq!(of(&[(1, 61_000); 2]), 1);
        assert_eq!(run_length(&[datagram(1, 9), datagram(1, 9)], 8), 1);
        // ANYWARP_GSO=0
        assert_eq!(run_length(&[datagram(1, 1), datagram(1, 1)], 0), 1);
    }
}
