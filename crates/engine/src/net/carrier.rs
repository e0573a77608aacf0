//! Shared memory as the carrier of datagrams between two UDP ports of one user on one host (decision 039).
//!
//! A port that has sent some datagrams ([`Transport::share_after`]) to another port of this host offers it memory, with a message over UDP
//! (`wire::carrier` of the core). Once the other port has opened the memory, each datagram is a record in the ring of its direction
//! ([`super::shm`]). The first bytes of a record are what a UDP socket reports beside the payload:
//!
//! ```text
//!  0           1               2     4
//! +-----------+---------------+-----+----------
//! | hop limit | traffic class |  0  | datagram
//! +-----------+---------------+-----+----------
//! ```
//!
//! No datagram depends on a carrier: a datagram that cannot use it is sent over UDP, and a datagram in the memory may be lost, as
//! with UDP. An end that wants to stop using the carrier sets its `closed` flag; the other end reads the records that are left,
//! and sends over UDP from then on. An end that reads no records for twice
//! [`STALL`], although it was woken in between, has ended, is stopped, or executes another program; its peer then stops using the
//! carrier.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds::CARRIERS;
use anywarp_core::datagram::{Arrival, TxDatagram};

use super::owner;
use super::route::source_for;
use super::shm::{OFFER_LIFETIME, Shm, Watch, transport};
use super::sink::DatagramSink;
use crate::clock;
#[cfg(doc)]
use crate::config::Transport;
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::process;
use crate::reactor::{PolledMemory, Source, Token};
use crate::sys::Io;
use crate::sys::thread::Uncancelled;

/// Bytes of a record before the datagram.
const HEAD: usize = 4;
/// The longest datagram, that of UDP.
const DATAGRAM_MAX: usize = 65_535;
/// The hop limit of a datagram that has none: the default of Linux.
pub(super) const HOP_LIMIT: u8 = 64;
/// An end whose peer has not read anything for this time, although there is something to read, wakes the peer once more. After
/// the same time again it stops using the carrier.
pub(super) const STALL: Duration = Duration::from_millis(100);
/// How long an end still receives from a carrier that it has closed. The peer notices the close within this time.
const LINGER: Duration = Duration::from_secs(2);
/// The first interval between two checks of whether the peer's port still exists. The interval doubles with each check, up to
/// [`CHECK_MAX`].
const CHECK_AFTER: Duration = Duration::from_secs(10);
const CHECK_MAX: Duration = Duration::from_secs(640);
/// After a carrier was refused or has ended, memory is offered again after this number of datagrams.
const OFFER_AGAIN_AFTER: u32 = 1 << 16;
/// Number of datagrams after which an unanswered offer is given up.
const ANSWER_WITHIN: u32 = 1 << 12;
/// Largest number of destinations of a port that are observed. Each send searches this list.
pub(super) const DESTINATIONS_MAX: usize = 16;

/// Largest number of offers that a port examines in one second. Each costs some system calls.
pub(super) const OFFERS_PER_SECOND: u32 = CARRIERS as u32;

/// What a port knows about a destination.
enum State<S: DatagramSink> {
    /// After this number of further datagrams, memory is offered.
    Counting(u32),
    /// Memory was offered. The offer is given up after this number of further datagrams.
    Offered(Arc<Carrier<S>>, u32),
    /// Datagrams are carried by memory.
    Active(Arc<Carrier<S>>),
}

struct Destination<S: DatagramSink> {
    to: SocketAddr,
    state: State<S>,
}

struct Table<S: DatagramSink> {
    destinations: Vec<Destination<S>>,
    /// Offers that may still be examined in the second that began at `second`.
    offers_left: u32,
    second: Instant,
}

/// The destinations of a port and their carriers.
pub(super) struct Carriers<S: DatagramSink> {
    table: Mutex<Table<S>>,
    /// Whether memory was ever offered or accepted.
    any: AtomicBool,
    /// The generation of the process ([`process::generation`]).
    generation: u32,
}

impl<S: DatagramSink> Carriers<S> {
    pub(super) fn new() -> Self {
        let table = Table {
            destinations: Vec::new(),
            offers_left: OFFERS_PER_SECOND,
            second: clock::now(),
        };
        Self {
            table: Mutex::new(Rank::Carriers, table),
            any: AtomicBool::new(false),
            generation: process::generation(),
        }
    }

    /// Returns the carrier for datagrams to `to`, of which `count` are about to be sent. `offer` makes an offer, if
    /// one is due.
    #[inline]
    pub(super) fn to(
        &self,
        to: SocketAddr,
        count: usize,
        offer: impl FnOnce() -> Option<Arc<Carrier<S>>>,
    ) -> Option<Arc<Carrier<S>>> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let mut table = self.table.lock();
        let all = &mut table.destinations;
        let Some(known) = all.iter_mut().find(|d| d.to == to) else {
            if !make_room(all) {
                return None;
            }
            let state = State::Counting(transport().share_after().unwrap_or(u32::MAX));
            all.push(Destination { to, state });
            return None;
        };
        let next = match &mut known.state {
            State::Active(carrier) if !carrier.is_closed() => return Some(Arc::clone(carrier)),
            State::Counting(left) | State::Offered(_, left) if *left > count => {
                *left -= count;
                return None;
            }
            State::Counting(_) => match offer() {
                Some(carrier) => {
                    self.any.store(true, Ordering::Relaxed);
                    State::Offered(carrier, ANSWER_WITHIN)
                }
                None => State::Counting(OFFER_AGAIN_AFTER),
            },
            State::Active(_) | State::Offered(..) => State::Counting(OFFER_AGAIN_AFTER),
        };
        let before = std::mem::replace(&mut known.state, next);
        drop(table);
        before.close();
        None
    }

    /// Whether memory was ever offered or accepted. If so, all datagrams of a send call must have the same destination, so that datagrams
    /// to one destination stay in order.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// The carriers that are in use.
    pub(super) fn active(&self) -> Vec<Arc<Carrier<S>>> {
        let table = self.table.lock();
        let carriers = table.destinations.iter().filter_map(|d| match &d.state {
            State::Active(carrier) => Some(Arc::clone(carrier)),
            _ => None,
        });
        carriers.collect()
    }

    /// Whether there is a carrier to this destination, or memory was offered to it.
    pub(super) fn has(&self, to: SocketAddr) -> bool {
        let table = self.table.lock();
        let known = table.destinations.iter().find(|d| d.to == to);
        known.is_some_and(|d| !matches!(d.state, State::Counting(_)))
    }

    /// Forgets a carrier that has ended.
    pub(super) fn forget(&self, carrier: &Carrier<S>) {
        let mut table = self.table.lock();
        let of = |state: &State<S>| match state {
            State::Active(c) | State::Offered(c, _) => std::ptr::eq(&**c, carrier),
            State::Counting(_) => false,
        };
        let known = table.destinations.iter_mut().find(|d| of(&d.state));
        let before = known
            .map(|known| std::mem::replace(&mut known.state, State::Counting(OFFER_AGAIN_AFTER)));
        drop(table);
        drop(before);
    }

    /// The carrier whose ring is full, if that is the reason why nothing can be sent to `to`.
    pub(super) fn full(&self, to: SocketAddr) -> Option<Arc<Carrier<S>>> {
        let table = self.table.lock();
        let known = table.destinations.iter().find(|d| d.to == to)?;
        match &known.state {
            State::Active(carrier) if carrier.watch().is_full() => Some(Arc::clone(carrier)),
            _ => None,
        }
    }

    /// Handles an offer of `from`. `take` opens the memory. `is_first`: whether the offer of this port has precedence if both ports have
    /// made one. Returns the carrier if the offer is accepted.
    pub(super) fn offered(
        &self,
        from: SocketAddr,
        is_first: bool,
        now: Instant,
        take: impl FnOnce() -> Option<Arc<Carrier<S>>>,
    ) -> Option<Arc<Carrier<S>>> {
        let mut table = self.table.lock();
        if now.saturating_duration_since(table.second) >= Duration::from_secs(1) {
            (table.second, table.offers_left) = (now, OFFERS_PER_SECOND);
        }
        table.offers_left = table.offers_left.checked_sub(1)?;
        let at = table.destinations.iter().position(|d| d.to == from);
        let known = at.and_then(|at| table.destinations.get_mut(at));
        if is_first
            && known
                .as_ref()
                .is_some_and(|d| matches!(d.state, State::Offered(..)))
        {
            return None;
        }
        let taken = take()?;
        self.any.store(true, Ordering::Relaxed);
        let state = State::Active(Arc::clone(&taken));
        match known {
            Some(known) => {
                let before = std::mem::replace(&mut known.state, state);
                drop(table);
                before.close();
            }
            None => {
                // The new entry is added even if the table is full of carriers. The number of carriers is limited (`CARRIERS`), so
                // the table stays small.
                make_room(&mut table.destinations);
                table.destinations.push(Destination { to: from, state });
            }
        }
        Some(taken)
    }

    /// Handles the message in which `from` reports that it has opened the memory.
    pub(super) fn taken(&self, from: SocketAddr, proof: u64) {
        let mut table = self.table.lock();
        let Some(known) = table.destinations.iter_mut().find(|d| d.to == from) else {
            return;
        };
        if let State::Offered(carrier, _) = &known.state
            && carrier.send.lock().shm.taken_by_peer(proof)
        {
            known.state = State::Active(Arc::clone(carrier));
        }
    }

    /// Ends all carriers. A child process has copies of its parent's carriers, and does not touch them, because their locks may be held.
    pub(super) fn end(&self) {
        if self.generation != process::generation() {
            return;
        }
        let all = std::mem::take(&mut self.table.lock().destinations);
        for Destination { state, .. } in all {
            if let State::Active(carrier) | State::Offered(carrier, _) = state {
                carrier.close();
                carrier.remove();
            }
        }
    }
}

/// Makes room for another destination: removes the oldest one without a carrier if there are [`DESTINATIONS_MAX`]. Returns false if all
/// of them have a carrier.
fn make_room<S: DatagramSink>(all: &mut Vec<Destination<S>>) -> bool {
    if all.len() < DESTINATIONS_MAX {
        return true;
    }
    let counting = |d: &Destination<S>| matches!(d.state, State::Counting(_));
    let oldest = all.iter().position(counting);
    oldest.map(|at| all.remove(at)).is_some()
}

impl<S: DatagramSink> State<S> {
    /// Ends the carrier of this state, if it has one.
    fn close(self) {
        if let Self::Active(carrier) | Self::Offered(carrier, _) = self {
            carrier.close();
        }
    }
}

/// A UDP port, as its carriers see it.
pub(super) trait Port<S: DatagramSink>: Send + Sync {
    /// Receives all datagrams in the socket's buffer. Returns false if another thread is receiving.
    fn receive_from_socket(self: Arc<Self>) -> bool;
    /// Receives datagrams from a carrier, with [`Carrier::receive_run`].
    fn receive_from(&self, carrier: &Carrier<S>, now: Instant);
    /// Wakes the peer of a carrier. Returns false if the message could not be sent.
    fn wake(&self, carrier: &Carrier<S>) -> bool;
    /// The carriers of the port.
    fn carriers(&self) -> &Carriers<S>;
}

/// Memory that carries datagrams between a port and one other port.
pub(super) struct Carrier<S: DatagramSink> {
    engine: &'static Engine,
    port: Weak<dyn Port<S>>,
    /// The address of this end, from which its datagrams come.
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    /// Whether the kernel would send datagrams without a source address from `local`.
    is_usual_source: bool,
    polled: Arc<Polled>,
    send: Mutex<Sending>,
    receive: Mutex<Receiving>,
    /// Queue pairs that wait until the ring has room.
    waiting: Mutex<Vec<Weak<S>>>,
    /// Whether datagrams that the peer sent over UDP before may still be in the socket's buffer.
    is_new: AtomicBool,
    token: OnceLock<Token>,
}

struct Sending {
    shm: Shm,
    /// The check whether the peer reads, while there is something to read.
    stall: Option<Stall>,
    closed_at: Option<Instant>,
    /// When to check whether the peer is still there.
    check_at: Instant,
    check_after: Duration,
}

/// A check whether the peer reads, with the positions of the ring at its start. If nothing was read within [`STALL`] although something
/// was there, the peer has stalled.
#[derive(Clone, Copy)]
struct Stall {
    until: Instant,
    taken: u64,
    written: u64,
    /// Whether the peer was woken once more.
    woken: bool,
}

struct Receiving {
    shm: Shm,
    /// The datagrams that [`Carrier::receive_run`] has received at a time.
    run: Vec<u8>,
}

/// The memory, as polling threads see it.
struct Polled {
    watch: Arc<Watch>,
    /// Whether this end sends no more. Datagrams are still received.
    closed: AtomicBool,
    /// Whether queue pairs wait for room.
    waits: AtomicBool,
}

impl Polled {
    /// Whether queue pairs that wait can send now, by this carrier or over UDP. The ring may be full again, because another
    /// queue pair has used the room.
    fn can_send(&self) -> bool {
        self.waits.load(Ordering::Acquire)
            && (!self.watch.is_full() || self.closed.load(Ordering::Relaxed))
    }
}

impl PolledMemory for Polled {
    #[inline]
    fn has_input(&self) -> bool {
        self.watch.has_bytes()
            || self.watch.has_room_again()
            || self.watch.is_closed_by_peer() && !self.closed.load(Ordering::Relaxed)
            || self.can_send()
    }

    fn prepare_sleep(&self, _acks: bool) -> bool {
        self.watch.announce_sleep(|| self.is_ready())
    }

    fn end_sleep(&self) {
        self.watch.withdraw_sleep();
    }
}

/// How [`Carrier::send`] ended.
pub(super) enum Sent {
    /// This number of datagrams was sent.
    Some(usize),
    /// The ring is full.
    Full,
    /// This number of datagrams at the front cannot be sent by the carrier.
    Unsuitable(usize),
}

impl<S: DatagramSink> Carrier<S> {
    /// A carrier that uses `shm`. Datagrams are received from now on.
    pub(super) fn new(
        engine: &'static Engine,
        port: Weak<dyn Port<S>>,
        shm: Shm,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Arc<Self> {
        let receiving = Receiving {
            shm: shm.receiver(),
            run: Vec::new(),
        };
        let first = if shm.is_offered() {
            OFFER_LIFETIME
        } else {
            CHECK_AFTER
        };
        let polled = Polled {
            watch: Arc::clone(shm.watch()),
            closed: AtomicBool::new(false),
            waits: AtomicBool::new(false),
        };
        let sending = Sending {
            shm,
            stall: None,
            closed_at: None,
            check_at: clock::now() + first,
            check_after: CHECK_AFTER,
        };
        let carrier = Arc::new(Self {
            engine,
            port,
            local,
            peer,
            is_usual_source: source_for(peer).is_ok_and(|usual| usual.ip() == local.ip()),
            polled: Arc::new(polled),
            send: Mutex::new(Rank::CarrierSend, sending),
            receive: Mutex::new(Rank::CarrierReceive, receiving),
            waiting: Mutex::new(Rank::UdpWriters, Vec::new()),
            is_new: AtomicBool::new(true),
            token: OnceLock::new(),
        });
        // The reactor refers to the carrier until `remove`.
        let source: Arc<dyn Source> = Arc::clone(&carrier) as _;
        let user = Arc::downgrade(&source);
        let _ = carrier.token.set(engine.reserve(source));
        carrier.set_deadline(clock::now() + first);
        engine.add_memory(Arc::clone(&carrier.polled) as _, user);
        carrier
    }

    /// The process and descriptor by which the peer opens the memory.
    pub(super) fn name(&self) -> Option<(u32, u32)> {
        self.send.lock().shm.name()
    }

    /// The word that the peer's message about opening the memory must contain.
    pub(super) fn proof(&self) -> u64 {
        self.send.lock().shm.proof()
    }

    fn watch(&self) -> &Watch {
        &self.polled.watch
    }

    /// Whether datagrams are sent over UDP from now on.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.has_closed() || self.watch().is_closed_by_peer()
    }

    pub(super) fn has_closed(&self) -> bool {
        self.polled.closed.load(Ordering::Relaxed)
    }

    /// Whether the carrier can send a datagram.
    fn suits(&self, d: &TxDatagram, from: Option<IpAddr>) -> bool {
        d.to == self.peer
            && (d.from.or(from)).map_or(self.is_usual_source, |ip| ip == self.local.ip())
            && d.bytes.len() <= DATAGRAM_MAX
    }

    /// Sends datagrams from the front of the list, and wakes the peer with `wake`, which returns false if it could not.
    pub(super) fn send(
        &self,
        datagrams: &[TxDatagram],
        from: Option<IpAddr>,
        wake: impl FnOnce() -> bool,
    ) -> Sent {
        let (mut count, mut full, mut failed) = (0, false, false);
        let mut sending = self.send.lock();
        let was_full = sending.shm.was_full();
        for d in datagrams.iter().take_while(|d| self.suits(d, from)) {
            let hop_limit = if d.hop_limit == 0 {
                HOP_LIMIT
            } else {
                d.hop_limit
            };
            let head = [hop_limit, d.traffic_class, 0, 0];
            match sending.shm.send_record(&head, &d.bytes) {
                Io::Done(_) => count += 1,
                Io::WouldBlock => {
                    full = true;
                    break;
                }
                _ => {
                    failed = true;
                    break;
                }
            }
        }
        let must_wake = count > 0 && sending.shm.must_wake();
        let deadline = sending.watch_peer(false);
        drop(sending);
        if must_wake && !wake() {
            self.watch().was_not_woken();
        }
        if was_full && count > 0 && self.polled.can_send() {
            // Other queue pairs may wait for room, which the peer will not report any more. The worker or a polling thread tells them: their
            // locks must not be taken here, where the lock of the sending queue pair is held.
            self.engine.wake();
        }
        if let Some(deadline) = deadline {
            self.set_deadline(deadline);
        }
        if failed {
            self.close();
            return Sent::Some(count);
        }
        match (count, full) {
            (0, true) => Sent::Full,
            (0, false) => {
                let prefix = datagrams.iter().take_while(|d| !self.suits(d, from));
                Sent::Unsuitable(prefix.count())
            }
            _ => Sent::Some(count),
        }
    }

    /// Calls [`DatagramSink::writable`] of `sink` when the ring has room again, or when the carrier has ended. Returns
    /// false if the ring is not full, or if the carrier has ended.
    pub(super) fn wait_writable(&self, sink: Weak<S>) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.iter().any(|known| Weak::ptr_eq(known, &sink)) {
            waiting.push(sink);
        }
        self.polled.waits.store(true, Ordering::Release);
        drop(waiting);
        self.watch().is_full() && !self.is_closed()
    }

    fn wake_writers(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock();
            self.polled.waits.store(false, Ordering::Release);
            std::mem::take(&mut *waiting)
        };
        for sink in waiting.iter().filter_map(Weak::upgrade) {
            sink.writable();
        }
    }

    /// Handles room in the ring after it was full.
    fn handle_room(&self) {
        if self.polled.can_send() {
            self.wake_writers();
        }
        if self.watch().has_room_again() {
            // No queue pair has written since the ring was full. Without this call, the memory would count as ready until a queue pair writes.
            self.send.lock().shm.forget_full();
        }
    }

    fn set_deadline(&self, at: Instant) {
        let token = self.token.get().copied().unwrap_or(Token::NONE);
        self.engine.deadline(token, at);
    }

    /// Checks whether the peer reads, and whether it is still there. Returns whether the carrier has ended.
    fn check_peer(&self, now: Instant) -> bool {
        let mut sending = self.send.lock();
        if let Some(closed_at) = sending.closed_at {
            return now >= closed_at + LINGER;
        }
        let mut must_close = false;
        if let Some(stall) = sending.stall.filter(|s| now >= s.until) {
            sending.stall = None;
            let read = self.watch().taken_by_them() != stall.taken;
            let deadline = if read || stall.taken == stall.written {
                sending.watch_peer(false)
            } else if !stall.woken {
                sending.watch_peer(true)
            } else {
                must_close = true;
                None
            };
            let wake = sending.stall.is_some_and(|s| s.woken);
            drop(sending);
            if let Some(deadline) = deadline {
                self.set_deadline(deadline);
            }
            if wake && let Some(port) = self.port.upgrade() {
                port.wake(self);
            }
            sending = self.send.lock();
        }
        if now >= sending.check_at {
            let is_offered = sending.shm.is_offered();
            sending.check_at = now + sending.check_after;
            sending.check_after = (2 * sending.check_after).min(CHECK_MAX);
            let next = sending.check_at;
            drop(sending);
            must_close |= is_offered || !owner::is_udp_of_this_user(self.peer);
            self.set_deadline(next);
        } else {
            drop(sending);
        }
        if must_close {
            self.close();
            if let Some(port) = self.port.upgrade() {
                port.wake(self);
            }
        }
        false
    }

    /// Stops sending. Records of the peer are received for [`LINGER`], in case the peer has not noticed yet.
    pub(super) fn close(&self) {
        if self.polled.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.watch().close();
        let now = clock::now();
        self.send.lock().closed_at = Some(now);
        self.set_deadline(now + LINGER);
    }

    /// Stops receiving: the memory is removed from the list that polling threads look through.
    pub(super) fn stop_receiving(&self) {
        let polled: Arc<dyn PolledMemory> = Arc::clone(&self.polled) as _;
        self.engine.remove_memory(&polled);
    }

    /// Stops receiving, and removes the carrier from the reactor.
    pub(super) fn remove(&self) {
        self.stop_receiving();
        let token = self.token.get().copied().unwrap_or(Token::NONE);
        self.engine.remove(token, None);
    }

    /// Receives one run of datagrams of one length; the last may be shorter. Calls `each` with its bytes and the
    /// length of its datagrams. Returns the number of datagrams and bytes.
    ///
    /// # Errors
    /// The peer has broken a rule of the ring.
    pub(super) fn receive_run(
        &self,
        most: usize,
        most_bytes: usize,
        each: impl FnOnce(&Arrival, &[u8], usize),
    ) -> Result<(usize, usize), Io> {
        let mut receive = self.receive.lock();
        let Receiving { shm, run } = &mut *receive;
        run.clear();
        let (mut first, mut head) = ([0; HEAD], [0; HEAD]);
        let Some(size) = shm.peek_record(&mut first)? else {
            return Ok((0, 0));
        };
        if size > DATAGRAM_MAX {
            return Err(Io::Broken(libc::EPROTO));
        }
        shm.receive_record(HEAD, run);
        let (mut count, mut last) = (1, size);
        while count < most && last == size && run.len() < most_bytes {
            match shm.peek_record(&mut head)? {
                Some(next) if next <= size && next > 0 && head == first => last = next,
                _ => break,
            }
            shm.receive_record(HEAD, run);
            count += 1;
        }
        let [hop_limit, traffic_class, ..] = first;
        let arrival = Arrival {
            from: self.peer,
            to: Some(self.local.ip()),
            hop_limit,
            traffic_class,
        };
        each(&arrival, run, size.max(1));
        Ok((count, run.len()))
    }

    /// Whether there is something to receive.
    pub(super) fn has_datagrams(&self) -> bool {
        self.watch().has_bytes()
    }

    /// Records that the peer was not woken, because the message that wakes it was not sent.
    pub(super) fn was_not_woken(&self) {
        self.watch().was_not_woken();
    }

    /// Whether the peer waits for room and has to be woken.
    pub(super) fn must_wake_for_room(&self) -> bool {
        self.receive.lock().shm.must_wake_for_room()
    }
}

impl Sending {
    /// Starts to check whether the peer reads what is there. Returns the deadline of the check; `None` if a check is running, or if there
    /// is nothing to read. `woken`: whether the caller wakes the peer once more at the start of the check.
    #[inline]
    fn watch_peer(&mut self, woken: bool) -> Option<Instant> {
        if self.stall.is_some() || self.shm.is_all_taken() {
            return None;
        }
        let until = clock::now() + STALL;
        self.stall = Some(Stall {
            until,
            taken: self.shm.watch().taken_by_them(),
            written: self.shm.written(),
            woken,
        });
        Some(until)
    }
}

impl<S: DatagramSink> Source for Carrier<S> {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}

    fn memory_ready(self: Arc<Self>, now: Instant) {
        self.handle_room();
        let Some(port) = self.port.upgrade() else {
            self.close();
            self.remove();
            return;
        };
        if self.is_new.load(Ordering::Acquire) {
            // Datagrams that the peer has sent over UDP before are in the socket's buffer, and are received first.
            if !Arc::clone(&port).receive_from_socket() {
                return;
            }
            self.is_new.store(false, Ordering::Release);
        }
        port.receive_from(&self, now);
        if self.watch().is_closed_by_peer() && !self.watch().has_bytes() {
            self.close();
            self.handle_room();
        }
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        // The check opens a socket, and closing it is a cancellation point.
        let _inside = Uncancelled::new();
        let has_ended = self.check_peer(now);
        if self.is_closed() {
            self.wake_writers();
        }
        if has_ended {
            self.remove();
            if let Some(port) = self.port.upgrade() {
                port.carriers().forget(&self);
            }
        }
    }
}

#[cfg(test)]
impl<S: DatagramSink> Carriers<S> {
    pub(super) fn len(&self) -> usize {
        self.table.lock().destinations.len()
    }
}

#[cfg(test)]
impl<S: DatagramSink> Carrier<S> {
    /// Whether polling threads handle the memory.
    pub(super) fn is_ready(&self) -> bool {
        self.polled.is_ready()
    }

    /// Writes all words of page 0 that acknowledge the requests of a stream, as a peer can.
    pub(super) fn overwrite_done(&self) {
        let sending = self.send.lock();
        for at in [64, 1024] {
            sending.shm.overwrite(at, u64::MAX);
        }
    }
}
