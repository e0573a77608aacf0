//! Reliable datagrams (RD): each datagram to a peer arrives exactly once, as long as both ends live.
//!
//! One queue pair talks to any number of peers; there is no connection to set up, and state only for peers that were
//! talked to lately. It belongs to this layer, not to iWARP above it. What goes over the wire is in [`crate::wire::rd`].
//!
//! ```text
//!   A                                     B
//!   | token a, echo 0   (no data)         |      B knows nothing and remembers nothing
//!   |------------------------------------>|
//!   |      challenge: token b, echo a     |
//!   |<------------------------------------|
//!   | token a, echo b, seq, base, data    |      A receives at its address: B takes its packets
//!   |------------------------------------>|
//!   |        ack, runs, window            |
//!   |<------------------------------------|
//! ```
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | peers, tokens, restarts, timers |
//! | `ack.rs` | when acknowledgements are sent |
//! | `numbers.rs` | packet numbers and times on the wire |
//! | `sender.rs` | packets that are not acknowledged: losses, probes |
//! | `receiver.rs` | packets that have arrived: order, duplicates |
//! | `congestion.rs` | how much may be under way |
//! | `shares.rs` | what hosts and networks may take |
//!
//! A token is a keyed hash of the peer's address and of the time, from a key that is drawn for each queue pair. With one it
//! begins, for a minute at most; then both ends keep their tokens until they forget each other. A peer that comes with
//! another token than before is another queue pair than before, once it has echoed a token that was made for that question:
//! what was under way to the old one has failed, because nobody can say what of it arrived. If it is the same queue pair,
//! which had forgotten us, nothing that was sent lately had arrived, and it is sent again.

mod ack;
mod congestion;
mod numbers;
mod receiver;
mod sender;
mod shares;

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::cookie::Secret;
use super::flow::charge;
use super::outgoing::Way;
use super::table::Table;
use super::types::{Arrival, Bytes, Peer, Resource, Tag};
use crate::bounds;
use crate::verbs::wc::Status;
use crate::wire::dgram;
use crate::wire::rd::Packet;
use ack::{
    ACK_DELAY, ACK_DELAY_MANY_PEERS, ACK_DELAY_PER_KILOBYTE, ACK_WITH_GAPS, MANY, PART, PIPELINE,
    together,
};
use congestion::Congestion;
use numbers::{expand, micros};
use receiver::{Arrived, Receiver};
use sender::{Outgoing, Sender};
use shares::Shares;

/// What became known.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Messages arrived and were delivered: those from the first to the last.
    Done(Tag, Tag),
    /// The peer refuses a message, or the message that was under way when it fell silent. None: it had none of ours.
    /// With the number that the message has on the wire.
    Failed(Peer, Option<Tag>, u32, Status),
    /// Everything to this peer is off.
    Lost(Peer, Status),
    /// It is another one than before, and nothing was under way to it.
    Restarted(Peer),
    /// Packets from this peer before this number never come: messages of which no later one came will not be complete. All:
    /// it is gone, and nothing is said of its messages.
    Skipped(Peer, u64),
}

/// Peers whose packets wait, by what they wait for.
#[derive(Debug, Default)]
struct Blocked {
    receive: VecDeque<Peer>,
    room: VecDeque<Peer>,
    record: VecDeque<Peer>,
}

impl Blocked {
    fn of(&mut self, want: Resource) -> &mut VecDeque<Peer> {
        match want {
            Resource::Receive => &mut self.receive,
            Resource::Room => &mut self.room,
            Resource::Record => &mut self.record,
        }
    }
}

/// What to do with the datagram of a packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RxOutcome {
    /// Nothing: there is none, or it is not new, or it waits.
    Nothing,
    /// Deliver it, and say so with [`Reliable::delivered`], [`Reliable::mark_blocked`] or [`Reliable::refused`].
    Deliver(u64),
}

#[derive(Debug)]
struct PeerState {
    way: Way,
    /// What it has to echo.
    token: u32,
    /// Its token; 0: not known yet.
    echo: u32,
    /// Its token before it restarted.
    echo_before: u32,
    /// Which queue pair it is; 0: it did not say.
    instance: u32,
    /// What stands for our clock in packets to it until it has been returned.
    nonce: u32,
    /// It has shown that it receives at its address, and in which second.
    is_proven: bool,
    proven_at: u32,
    /// Bytes that may be sent to it until it has.
    credit: u32,
    /// Number of the next packet.
    next: u64,
    /// Number of the next packet from it, when nothing of it waits; `None`: nothing came yet.
    expected: Option<u64>,
    tx: Option<Box<Sender>>,
    rx: Option<Box<Receiver>>,
    path: Congestion,
    /// Room of its socket.
    room: u32,
    used: Duration,
    /// Stands in the list of those that have something to send.
    queued: bool,
    /// In which lists of those that wait it stands.
    stands: u8,
    /// An empty packet that asks for something is to be sent.
    ask: bool,
    /// What stands in the list of timers: its sender's deadline, or earlier.
    timer: Option<Duration>,
}

impl PeerState {
    /// Whether packets or questions of ours are under way to it.
    fn has_under_way(&self) -> bool {
        let tx = self.tx.as_deref();
        tx.is_some_and(|tx| !tx.is_empty() || tx.deadline.is_some())
    }

    /// It may be somebody else by now that receives at its address.
    fn doubt(&mut self, secret: &Secret, peer: &Peer, now: Duration) {
        self.nonce = secret.nonce(peer, now);
        self.is_proven = false;
        self.credit = 0;
    }

    /// Its sender, which is made if there is none.
    fn sender(&mut self, now: Duration) -> &mut Sender {
        let (next, room) = (self.next, self.room);
        self.tx
            .get_or_insert_with(|| Box::new(Sender::new(next, room, now)))
    }

    /// It does receive there.
    fn prove(&mut self, now: Duration) {
        self.is_proven = true;
        self.proven_at = second(now);
    }

    /// Whether `len` bytes may be sent to it: until it has shown that it receives at its address no more than
    /// [`AMPLIFICATION`] times what came from there.
    fn affords(&self, len: usize) -> bool {
        // Some is left for packets that ask again.
        self.is_proven || len + QUESTIONS <= self.credit as usize
    }

    fn spend(&mut self, len: usize) {
        if !self.is_proven {
            self.credit = self
                .credit
                .saturating_sub(u32::try_from(len).unwrap_or(u32::MAX));
        }
    }

    /// What each packet of it tells.
    fn hears(&mut self, packet: &Packet, now: Duration) {
        self.used = now;
        if packet.instance != 0 {
            self.instance = packet.instance;
        }
        self.room = packet.window.min(bounds::DATAGRAM_WINDOW_MAX);
    }
}

/// What the layer sent of itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RdCounts {
    /// Packets with data, once more.
    pub(super) again: u64,
    /// Packets that ask a silent peer.
    pub(super) probes: u64,
    /// Packets that only acknowledge.
    pub(super) acks: u64,
    /// Packets that echoed a token which is not theirs.
    pub(super) bad_echo: u64,
}

/// The reliability layer of one queue pair.
#[derive(Debug)]
pub(super) struct Reliable {
    pub(super) counts: RdCounts,
    secret: Secret,
    /// What peers know this queue pair by when they were forgotten.
    instance: u32,
    /// Packets with wrong echoes in one second, by a hash of the host that they seem to come from.
    bad_echoes: Box<[u16; 256]>,
    bad_second: u64,
    index: u8,
    /// Deliver packets of a peer in the order in which it sent them.
    ordered: bool,
    /// How long a peer may be silent.
    patience: Duration,
    peers: Table<Peer, PeerState>,
    /// What of the places and of the memory for packets that wait is whose.
    shares: Shares,
    queued: VecDeque<Peer>,
    timers: BTreeSet<(Duration, Peer)>,
    /// Answers to strangers.
    challenges: VecDeque<(Peer, Option<IpAddr>, Packet)>,
    blocked: Blocked,
    /// Number of the first packet to a peer that is new.
    floor: u64,
    /// Peers that wait for an acknowledgement.
    soon: Vec<Peer>,
    /// Packets that were acknowledged, and those of them whose bytes were given back.
    spare: Vec<Arc<Vec<u8>>>,
    shells: Vec<Arc<Vec<u8>>>,
    /// When the table of peers was searched for idle ones.
    swept: Duration,
    /// When it is to be searched for peers of which packets wait for nothing.
    sweep_at: Option<Duration>,
    room: u32,
    events: VecDeque<Event>,
}

impl Reliable {
    pub(super) fn new(secret: Secret, index: u8, ordered: bool, patience: Duration) -> Self {
        Self {
            counts: RdCounts::default(),
            secret,
            instance: secret.start(4).max(1),
            bad_echoes: Box::new([0; 256]),
            bad_second: 0,
            index,
            ordered,
            patience,
            peers: Table::default(),
            shares: Shares::default(),
            queued: VecDeque::new(),
            timers: BTreeSet::new(),
            challenges: VecDeque::new(),
            blocked: Blocked::default(),
            // Above 2^32, so that numbers before it can be told.
            floor: 1 << 32 | u64::from(secret.start(3)),
            soon: Vec::new(),
            spare: Vec::new(),
            shells: Vec::new(),
            swept: Duration::ZERO,
            sweep_at: None,
            room: bounds::DATAGRAM_WINDOW,
            events: VecDeque::new(),
        }
    }

    pub(super) fn set_room(&mut self, room: u32) {
        self.room = room.max(bounds::DATAGRAM_WINDOW);
    }

    /// Everything that we have under way is given up. Peers and numbers are remembered, and what has arrived from them: what
    /// was acknowledged will not be sent again.
    pub(super) fn abandon(&mut self) {
        for state in self.peers.values_mut() {
            state.tx = None;
            state.timer = None;
        }
        for peer in self.queued.drain(..) {
            if let Some(state) = self.peers.get_mut(&peer) {
                state.queued = false;
            }
        }
        self.timers.clear();
        self.challenges.clear();
        self.events.clear();
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Bytes that packets which wait are charged, of all peers.
    pub(super) fn waiting(&self) -> usize {
        self.shares.waiting()
    }

    /// Checks that peers are charged at least what they hold, and that the shares add up; counts everything, for tests.
    pub(super) fn check_accounts(&self) {
        let of_peers = self.peers.values().filter_map(|state| state.rx.as_ref());
        let held: usize = of_peers.map(|rx| rx.counted()).sum();
        let charged = self.shares.waiting();
        assert!(held <= charged, "{held} bytes wait, {charged} are charged");
        assert!(charged <= bounds::RD_WAITING, "{charged} bytes are charged");
        assert!(self.shares.is_consistent(), "{:?}", self.shares);
    }

    /// Peers that are known.
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }

    // ------------------------------------------------------------------ sending

    /// Whether a datagram of `len` bytes may be given out to `peer` now. A peer that is not known is asked for its token first,
    /// and one that has not shown that it receives at its address is asked to do so before much is sent.
    pub(super) fn may_send(&mut self, peer: &Peer, way: Way, len: usize, now: Duration) -> bool {
        let room = self.room;
        if let Some(state) = self.peers.get_mut(peer)
            && state.echo != 0
        {
            state.used = now;
            if !state.affords(Packet::LEN + len + dgram::CRC) {
                state.sender(now);
                if let Some(tx) = state.tx.as_mut().filter(|tx| tx.deadline.is_none()) {
                    tx.wait(now, &state.path);
                    state.ask = true;
                    watch(&mut self.timers, peer, state);
                    enqueue(&mut self.queued, peer, state);
                }
                return false;
            }
            if state.room == 0 {
                // It is asked now and then whether it has room again.
                let tx = state.sender(now);
                if tx.deadline.is_none() {
                    tx.deadline = Some(now + CLOSED);
                    watch(&mut self.timers, peer, state);
                }
                return false;
            }
            return match &mut state.tx {
                Some(tx) => tx.has_window(&state.path),
                None => true,
            };
        }
        if !self.enter(peer, way, false, now) {
            self.events
                .push_back(Event::Lost(*peer, Status::LocalQpOperation));
            return false;
        }
        if let Some(state) = self.peers.get_mut(peer)
            && state.tx.is_none()
        {
            let mut tx = Sender::new(state.next, room, now);
            tx.wait(now, &state.path);
            state.tx = Some(Box::new(tx));
            state.ask = true;
            watch(&mut self.timers, peer, state);
            enqueue(&mut self.queued, peer, state);
        }
        false
    }

    /// Gives out a datagram: `packet` has room for the header, then the datagram, and no CRC; it is returned whole. `last`:
    /// it ends the message `tag`; `alone`: nothing follows it at once.
    pub(super) fn push(
        &mut self,
        peer: &Peer,
        mut packet: Vec<u8>,
        (tag, last, alone): (Tag, bool, bool),
        now: Duration,
    ) -> Option<(Way, Bytes)> {
        let (me, room) = ((self.index, self.instance), self.room);
        let state = self.peers.get_mut(peer)?;
        state.used = now;
        state.spend(packet.len() + dgram::CRC);
        let tx = state
            .tx
            .get_or_insert_with(|| Box::new(Sender::new(state.next, state.room, now)));
        let ask = tx.push(packet.len() + dgram::CRC, alone, now, &mut state.path);
        let mut head = header(state, peer, me, room, now);
        head.seq = state.next as u32;
        head.ack_now = ask;
        head.ack_soon = alone;
        // Runs follow in a packet of their own, so that this one is never longer than its path carries.
        let whole = head.arrived.is_empty();
        head.arrived.clear();
        if let Some(front) = packet.first_chunk_mut() {
            *front = head.head(true);
        }
        dgram::seal(&mut packet);
        let mut kept = self.shells.pop().unwrap_or_default();
        match Arc::get_mut(&mut kept) {
            Some(bytes) => *bytes = packet,
            None => kept = Arc::new(packet),
        }
        state.next += 1;
        let tx = state.tx.as_mut();
        let armed =
            tx.is_some_and(|tx| tx.keep(Arc::clone(&kept), Some(tag), last, now, &state.path));
        if let (true, Some(rx)) = (whole, &mut state.rx) {
            rx.acknowledges();
        }
        if armed {
            watch(&mut self.timers, peer, state);
        }
        Some((state.way, Bytes::Shared(kept)))
    }

    /// The next packet that the layer itself wants to send.
    pub(super) fn poll(&mut self, now: Duration) -> Option<(Peer, Way, Bytes)> {
        if let Some((peer, from, packet)) = self.challenges.pop_front() {
            let way = Way {
                from,
                ..Way::default()
            };
            let nothing = Outgoing { seq: 0, data: None };
            return Some((peer, way, wrap(packet, &nothing).into()));
        }
        while let Some(peer) = self.queued.front().copied() {
            if let Some((way, bytes)) = self.poll_peer(&peer, now) {
                return Some((peer, way, bytes.into()));
            }
            self.queued.pop_front();
            if let Some(state) = self.peers.get_mut(&peer) {
                state.queued = false;
                if state.rx.as_ref().is_some_and(|rx| rx.is_idle()) {
                    state.expected = state.rx.take().map(|rx| rx.next());
                }
                let over = |tx: &Sender| tx.is_empty() && tx.deadline.is_none();
                if state.tx.as_deref().is_some_and(over) && state.echo != 0 {
                    state.tx = None;
                }
            }
        }
        None
    }

    fn poll_peer(&mut self, peer: &Peer, now: Duration) -> Option<(Way, Vec<u8>)> {
        let (me, room) = ((self.index, self.instance), self.room);
        let state = self.peers.get_mut(peer)?;
        let counts = &mut self.counts;
        let affords = state.is_proven || {
            let next = state.tx.as_deref().and_then(Sender::next_len);
            next.is_none_or(|len| state.affords(len))
        };
        let mut packet = header(state, peer, me, room, now);
        let ask = std::mem::take(&mut state.ask);
        // A packet with data has no room for runs: they follow.
        let mut whole = true;
        let due = state.rx.as_ref().is_some_and(|rx| rx.due);
        let ack = |counts: &mut RdCounts, packet: Packet| {
            due.then(|| {
                counts.acks += 1;
                let nothing = Outgoing {
                    seq: state.next,
                    data: None,
                };
                wrap(packet, &nothing)
            })
        };
        let bytes = match &mut state.tx {
            _ if state.echo == 0 => {
                // Nothing but the token is sent to somebody who may not be there.
                packet.ack_now = true;
                let nothing = Outgoing {
                    seq: state.next,
                    data: None,
                };
                ask.then(|| wrap(packet, &nothing))
            }
            Some(tx) if ask => {
                packet.ack_now = true;
                whole = packet.arrived.is_empty();
                packet.arrived.clear();
                counts.probes += 1;
                Some(wrap(packet, &tx.probe(affords, now, &mut state.path)))
            }
            Some(tx) if affords => match tx.again(now, &state.path) {
                Some(again) => {
                    packet.ack_now = true;
                    whole = packet.arrived.is_empty();
                    packet.arrived.clear();
                    counts.again += 1;
                    Some(wrap(packet, &again))
                }
                None => ack(counts, packet),
            },
            _ => ack(counts, packet),
        }?;
        watch(&mut self.timers, peer, state);
        if !state.is_proven && bytes.len() > state.credit as usize {
            // As if it were lost on the way.
            return None;
        }
        state.spend(bytes.len());
        if let Some(rx) = &mut state.rx
            && whole
        {
            rx.acknowledges();
        }
        Some((state.way, bytes))
    }

    /// Gives back the buffers of packets that were acknowledged.
    pub(super) fn recycle(&mut self, mut give: impl FnMut(Vec<u8>)) {
        for mut packet in self.spare.drain(..) {
            // Otherwise it waits to be sent once more.
            if let Some(bytes) = Arc::get_mut(&mut packet) {
                give(std::mem::take(bytes));
                if self.shells.len() < sender::SPARE {
                    self.shells.push(packet);
                }
            }
        }
    }

    /// Whether acknowledgements wait for company.
    pub(super) fn ack_due(&self) -> bool {
        !self.soon.is_empty()
    }

    /// Acknowledgements that found no company go without: those whose time has come by `now`.
    pub(super) fn flush(&mut self, now: Duration) {
        let mut later = std::mem::take(&mut self.soon);
        later.retain(|peer| {
            let Some(state) = self.peers.get_mut(peer) else {
                return false;
            };
            let Some(at) = state.rx.as_mut().and_then(|rx| rx.soon.map(|at| (rx, at))) else {
                return false;
            };
            let (rx, at) = at;
            if at > now {
                return true;
            }
            rx.due = true;
            enqueue(&mut self.queued, peer, state);
            false
        });
        self.soon = later;
    }

    /// Whether [`Self::poll`] may have something.
    pub(super) fn wants_tx(&self) -> bool {
        !self.queued.is_empty() || !self.challenges.is_empty()
    }

    // ------------------------------------------------------------------ receiving

    /// A packet came. `data`: whether it has a datagram.
    pub(super) fn handle(
        &mut self,
        peer: &Peer,
        arrival: &Arrival,
        packet: &Packet,
        data: Option<&[u8]>,
        now: Duration,
    ) -> RxOutcome {
        let is_known =
            |s: &PeerState| packet.echo == s.token && packet.token == s.echo && !packet.challenge;
        let (peers, context) = self.rx_context();
        if let Some(state) = peers.get_mut(peer).filter(|s| is_known(s)) {
            return context.take(peer, state, packet, data, now);
        }
        if !self.meet(peer, arrival, packet, now) {
            return RxOutcome::Nothing;
        }
        let (peers, context) = self.rx_context();
        match peers.get_mut(peer) {
            Some(state) => context.take(peer, state, packet, data, now),
            None => RxOutcome::Nothing,
        }
    }

    /// The peers, and what else a packet of one of them changes.
    fn rx_context(&mut self) -> (&mut Table<Peer, PeerState>, RxContext<'_>) {
        let context = RxContext {
            ordered: self.ordered,
            quarter: u64::from(self.room / 4),
            secret: self.secret,
            known: self.peers.len(),
            shares: &mut self.shares,
            sweep_at: &mut self.sweep_at,
            soon: &mut self.soon,
            queued: &mut self.queued,
            timers: &mut self.timers,
            events: &mut self.events,
            spare: &mut self.spare,
        };
        (&mut self.peers, context)
    }

    /// A packet with tokens that are not those of a peer that is known. True: it is one from now on.
    fn meet(&mut self, peer: &Peer, arrival: &Arrival, packet: &Packet, now: Duration) -> bool {
        if packet.challenge {
            self.challenged(peer, arrival, packet, now);
            return false;
        }
        if packet.echo != 0 && self.is_guessed(peer, now) {
            self.counts.bad_echo += 1;
            return false;
        }
        let known = self.peers.get(peer);
        let is_new = known.is_none();
        if known.is_some_and(|s| s.echo_before == packet.token) {
            return false;
        }
        // Another queue pair than the one that is known has to echo a token that it got instead of that one: the old one may
        // be alive, and this one not be there.
        let restarts = known.is_some_and(|s| s.echo != 0 && s.echo != packet.token);
        let instead = if restarts { packet.token } else { 0 };
        let required = known.filter(|_| !restarts).map(|s| s.token);
        let right =
            required == Some(packet.echo) || self.secret.gave(peer, instead, packet.echo, now);
        if !right {
            let fresh = || self.secret.token(peer, instead, now);
            let token = required.unwrap_or_else(fresh);
            self.challenge(peer, arrival, packet, token, now);
            if packet.echo != 0 {
                self.counts.bad_echo += 1;
                self.note_bad_echo(peer);
            }
            return false;
        }
        let way = Way {
            from: arrival.to,
            ..Way::default()
        };
        if !self.enter(peer, way, true, now) {
            return false;
        }
        self.recognize(peer, packet, now);
        if let Some(state) = self.peers.get_mut(peer) {
            state.token = packet.echo;
            if is_new || restarts {
                // Its address was right up to a minute ago.
                state.doubt(&self.secret, peer, now);
            }
        }
        true
    }

    /// Whether so many packets of this second echoed wrong tokens, from the host of `peer` as it seems, that somebody tries
    /// them out.
    fn is_guessed(&mut self, peer: &Peer, now: Duration) -> bool {
        if self.bad_second != now.as_secs() {
            self.bad_second = now.as_secs();
            self.bad_echoes.fill(0);
        }
        let at = usize::from(self.secret.bucket(&shares::prefixes(peer).0));
        self.bad_echoes
            .get(at)
            .is_some_and(|n| *n >= bounds::RD_BAD_ECHOES)
    }

    fn note_bad_echo(&mut self, peer: &Peer) {
        let at = usize::from(self.secret.bucket(&shares::prefixes(peer).0));
        if let Some(many) = self.bad_echoes.get_mut(at) {
            *many = many.saturating_add(1);
        }
    }

    /// A peer is known from now on, if there is room for one more.
    fn enter(&mut self, peer: &Peer, way: Way, comes: bool, now: Duration) -> bool {
        if let Some(state) = self.peers.get_mut(peer) {
            state.used = now;
            return true;
        }
        if !self.shares.has_place(peer, comes) {
            if now.saturating_sub(self.swept) < SWEEP {
                return false;
            }
            self.swept = now;
            self.forget_idle(now);
            if !self.shares.has_place(peer, comes) {
                return false;
            }
        }
        self.shares.enter(peer);
        let token = self.secret.token(peer, 0, now);
        let state = PeerState {
            way,
            token,
            echo: 0,
            echo_before: 0,
            instance: 0,
            nonce: 0,
            is_proven: true,
            proven_at: second(now),
            credit: 0,
            // Above 2^32, so that numbers before it can be told.
            next: self.floor,
            expected: None,
            tx: None,
            rx: None,
            path: Congestion::new(),
            room: bounds::DATAGRAM_WINDOW,
            used: now,
            queued: false,
            stands: 0,
            ask: false,
            timer: None,
        };
        self.peers.insert(*peer, state);
        true
    }

    /// Forgets peers that have been silent for longer than a datagram can be on its way, unless something is under way to
    /// them, whatever of theirs is incomplete or waits. They remember us: when one is known again, its numbers go on beyond
    /// all that anybody was sent.
    fn forget_idle(&mut self, now: Duration) {
        self.forget(now, |_| true);
        self.swept = now;
        if self.peers.len() < self.peers.capacity() / 4 {
            self.peers.shrink_to(2 * self.peers.len());
        }
        for list in [
            &mut self.blocked.receive,
            &mut self.blocked.room,
            &mut self.blocked.record,
            &mut self.queued,
        ] {
            if list.len() < list.capacity() / 4 {
                list.shrink_to(2 * list.len());
            }
        }
        self.shares.shrink();
    }

    /// The same for those of them that `which` selects.
    fn forget(&mut self, now: Duration, which: impl Fn(&PeerState) -> bool) {
        let Self {
            peers,
            shares,
            events,
            floor,
            ..
        } = self;
        peers.retain(|peer, s| {
            let stays = s.has_under_way() || now.saturating_sub(s.used) < IDLE || !which(s);
            if !stays {
                *floor = (*floor).max(s.next);
                if let Some(rx) = s.rx.take() {
                    shares.change(peer, rx.held(), 0);
                }
                shares.leave(peer);
                if s.expected.is_some() {
                    // The rest of a message that is not complete will never come.
                    events.push_back(Event::Skipped(*peer, u64::MAX));
                }
            }
            stays
        });
    }

    /// Somebody who does not know our token, or an old one: it is told, and nothing remembered.
    fn challenge(
        &mut self,
        peer: &Peer,
        arrival: &Arrival,
        packet: &Packet,
        token: u32,
        now: Duration,
    ) {
        if self.challenges.len() >= bounds::RD_CHALLENGES {
            return;
        }
        let answer = Packet {
            token,
            echo: packet.token,
            dst_index: peer.1,
            src_index: self.index,
            instance: self.instance,
            window: self.room,
            time: micros(now),
            time_echo: packet.time,
            challenge: true,
            ..Packet::default()
        };
        self.challenges.push_back((*peer, arrival.to, answer));
    }

    /// The peer requires its token. It is believed if it echoes ours, and if we asked. One that required another token before
    /// is asked once more, with a token that was made for this question: a forged packet ends nothing.
    fn challenged(&mut self, peer: &Peer, arrival: &Arrival, packet: &Packet, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.tx.is_none() || packet.token == state.echo {
            return;
        }
        let asked = state.echo != 0 && self.secret.gave(peer, packet.token, packet.echo, now);
        if packet.echo != state.token && !asked {
            return;
        }
        if state.echo != 0 && !asked {
            let question = Packet {
                token: self.secret.token(peer, packet.token, now),
                seq: state.next as u32,
                base: state.next as u32,
                dst_index: peer.1,
                src_index: self.index,
                instance: self.instance,
                window: self.room,
                time: micros(now),
                ack_now: true,
                ..Packet::default()
            };
            if self.challenges.len() < bounds::RD_CHALLENGES {
                self.challenges.push_back((*peer, arrival.to, question));
            }
            return;
        }
        if state.echo == 0 {
            let trip = micros(now).wrapping_sub(packet.time_echo);
            state
                .path
                .measured(now, Duration::from_micros(u64::from(trip).min(10_000_000)));
        }
        self.recognize(peer, packet, now);
        if let Some(state) = self.peers.get_mut(peer) {
            state.hears(packet, now);
            state.prove(now);
            let room = state.room;
            if let Some(tx) = &mut state.tx {
                tx.set_room(room.into());
                tx.heard = now;
                tx.deadline = None;
                // What is to be sent again is sent now, or when this says so.
                if !tx.is_empty() {
                    tx.wait(now, &state.path);
                }
            }
        }
        self.enqueue(*peer);
        self.watch(peer);
    }

    /// The peer's token is that of `packet`: it was not known, or it is another queue pair than before, or one that has
    /// forgotten us.
    fn recognize(&mut self, peer: &Peer, packet: &Packet, now: Duration) {
        let room = self.room;
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.echo == packet.token {
            return;
        }
        if state.echo == 0 {
            if let Some(tx) = &mut state.tx
                && tx.is_empty()
            {
                // What waited for the token can go.
                **tx = Sender::new(state.next, room, now);
            }
            state.echo = packet.token;
            return;
        }
        state.echo_before = std::mem::replace(&mut state.echo, packet.token);
        state.expected = None;
        if let Some(rx) = state.rx.take() {
            self.shares.change(peer, rx.held(), 0);
        }
        self.events.push_back(Event::Skipped(*peer, u64::MAX));
        let forgot_us = packet.instance != 0 && packet.instance == state.instance;
        state.instance = packet.instance;
        let tx = state.tx.as_deref_mut().filter(|tx| !tx.is_empty());
        // It had been silent for a minute then: what was first sent later never reached it.
        let is_young = |tx: &Sender| tx.oldest().is_some_and(|at| now.saturating_sub(at) < YOUNG);
        match tx {
            Some(tx) if forgot_us && is_young(tx) => tx.start_again(),
            Some(_) => {
                state.tx = None;
                self.events
                    .push_back(Event::Lost(*peer, Status::RemoteAborted));
            }
            None => {
                state.tx = None;
                self.events.push_back(Event::Restarted(*peer));
            }
        }
    }

    /// The queue pair took the datagram of packet `seq`. Whether others of the peer wait.
    pub(super) fn delivered(&mut self, peer: &Peer, seq: u64) -> bool {
        let Some(state) = self.peers.get_mut(peer) else {
            return false;
        };
        let Some(rx) = &mut state.rx else {
            return false;
        };
        let before = rx.held();
        rx.delivered(seq);
        self.shares.change(peer, before, rx.held());
        if let Some(base) = rx.skipped.take() {
            self.events.push_back(Event::Skipped(*peer, base));
        }
        // What waited is told of at once: its sender would ask for it seldom.
        rx.due |= rx.blocked_on.take().is_some();
        let waits = rx.has_kept();
        if rx.due {
            enqueue(&mut self.queued, peer, state);
        }
        waits
    }

    /// The queue pair lacks something for the datagram of packet `seq`: it waits.
    pub(super) fn mark_blocked(&mut self, peer: &Peer, seq: u64, data: &[u8], want: Resource) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        let Some(rx) = state.rx.as_deref_mut() else {
            return;
        };
        if keep(&mut self.shares, peer, rx, seq, data) {
            rx.blocked_on = Some(want);
            rx.due = true;
            self.sweep_at.get_or_insert(state.used + IDLE);
        }
        if state.stands & want.bit() == 0 && self.blocked.of(want).len() < bounds::RD_PEERS {
            state.stands |= want.bit();
            self.blocked.of(want).push_back(*peer);
        }
        enqueue(&mut self.queued, peer, state);
    }

    /// The queue pair refuses the message of packet `seq`.
    pub(super) fn refused(&mut self, peer: &Peer, seq: u64, data: &[u8], why: Status) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        let Some(rx) = state.rx.as_deref_mut() else {
            return;
        };
        if !self.ordered && seq != rx.next() {
            // Only the next packet can be refused. It may be acknowledged already, so it waits for that.
            if keep(&mut self.shares, peer, rx, seq, data) {
                self.sweep_at.get_or_insert(state.used + IDLE);
            }
            return;
        }
        rx.refuse(why as u8);
        rx.due = true;
        self.enqueue(*peer);
    }

    /// A datagram that waits and can be delivered, now that one of the same peer was.
    pub(super) fn take_waiting(&mut self, peer: &Peer) -> Option<(u64, Vec<u8>)> {
        let unordered = !self.ordered;
        let rx = self.peers.get_mut(peer)?.rx.as_deref_mut()?;
        let before = rx.held();
        let taken = rx.take_waiting(unordered);
        self.shares.change(peer, before, rx.held());
        taken
    }

    /// A peer whose packets wait for something that may be there now.
    pub(super) fn next_blocked(&mut self, want: Resource) -> Option<Peer> {
        let peer = self.blocked.of(want).pop_front()?;
        if let Some(state) = self.peers.get_mut(&peer) {
            state.stands &= !want.bit();
        }
        Some(peer)
    }

    /// Whether packets of a peer wait for such a thing.
    pub(super) fn is_blocked(&self, peer: &Peer, want: Resource) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.blocked_on == Some(want))
    }

    /// Whether packet `seq` of a peer waits.
    pub(super) fn waits(&self, peer: &Peer, seq: u64) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.waits(seq))
    }

    // ------------------------------------------------------------------ timers

    /// When [`Self::handle_timeout`] should be called.
    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let sweep = self.sweep_at.filter(|_| self.shares.waiting() > 0);
        timer.into_iter().chain(sweep).min()
    }

    /// How long a peer may be silent before it is given up.
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Time has passed.
    pub(super) fn handle_timeout(&mut self, now: Duration, blocked: Option<Duration>) {
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.forget(now, |s| s.rx.as_deref().is_some_and(|rx| rx.held() > 0));
            self.sweep_at = (self.shares.waiting() > 0).then_some(now + IDLE / 4);
        }
        while let Some((at, peer)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            let patience = self.patience;
            let Some(state) = self.peers.get_mut(&peer) else {
                continue;
            };
            state.timer = None;
            let Some(tx) = &mut state.tx else {
                continue;
            };
            if tx.deadline.is_none_or(|deadline| deadline > now) {
                // It has moved.
                watch(&mut self.timers, &peer, state);
                continue;
            }
            let hungry = tx
                .blocked_on
                .zip(blocked)
                .is_some_and(|(since, most)| now.saturating_sub(since) >= most);
            if hungry || now.saturating_sub(tx.heard) >= patience {
                state.tx = None;
                // Its numbers go on; where they begin is told by the next packet.
                let why = if hungry {
                    Status::RnrRetryExceeded
                } else {
                    Status::RetryExceeded
                };
                self.events.push_back(Event::Lost(peer, why));
                continue;
            }
            state.ask = true;
            // The probe sets the next one.
            tx.deadline = None;
            if state.echo == 0 {
                tx.wait(now, &state.path);
            }
            self.enqueue(peer);
            self.watch(&peer);
        }
    }

    /// Asks a peer whether it is still there. Where packets are under way to it, they do.
    pub(super) fn ask(&mut self, peer: &Peer, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.tx.is_none() {
            state.tx = Some(Box::new(Sender::new(state.next, state.room, now)));
            state.ask = true;
            enqueue(&mut self.queued, peer, state);
        }
    }

    /// Sees to it that the timer of a peer is not later than its sender wants it.
    fn watch(&mut self, peer: &Peer) {
        if let Some(state) = self.peers.get_mut(peer) {
            watch(&mut self.timers, peer, state);
        }
    }

    fn enqueue(&mut self, peer: Peer) {
        if let Some(state) = self.peers.get_mut(&peer) {
            enqueue(&mut self.queued, &peer, state);
        }
    }
}

/// What a packet changes besides its peer, so that it is looked up once.
struct RxContext<'a> {
    ordered: bool,
    secret: Secret,
    /// A part of the room: an acknowledgement is due behind as much.
    quarter: u64,
    /// How many peers there are.
    known: usize,
    shares: &'a mut Shares,
    sweep_at: &'a mut Option<Duration>,
    soon: &'a mut Vec<Peer>,
    queued: &'a mut VecDeque<Peer>,
    timers: &'a mut BTreeSet<(Duration, Peer)>,
    events: &'a mut VecDeque<Event>,
    spare: &'a mut Vec<Arc<Vec<u8>>>,
}

impl RxContext<'_> {
    /// A packet of a peer that is known.
    fn take(
        mut self,
        peer: &Peer,
        state: &mut PeerState,
        packet: &Packet,
        data: Option<&[u8]>,
        now: Duration,
    ) -> RxOutcome {
        state.hears(packet, now);
        if !state.is_proven && packet.time_echo == state.nonce {
            state.prove(now);
        }
        if state.is_proven
            && second(now).saturating_sub(state.proven_at) >= PROOF
            && !state.has_under_way()
        {
            state.doubt(&self.secret, peer, now);
        }
        if !state.is_proven {
            let len =
                Packet::LEN + 8 * packet.arrived.len() + dgram::CRC + data.map_or(0, <[u8]>::len);
            let len = u32::try_from(AMPLIFICATION * len).unwrap_or(0);
            state.credit = state
                .credit
                .saturating_add(len)
                .min(bounds::DATAGRAM_WINDOW);
        }
        self.acknowledged(peer, state, packet, now);
        self.sort(peer, state, packet, data, now)
    }

    /// What the packet acknowledges.
    fn acknowledged(&mut self, peer: &Peer, state: &mut PeerState, packet: &Packet, now: Duration) {
        // Who is sent nothing has nothing to acknowledge.
        let Some(tx) = &mut state.tx else {
            return;
        };
        tx.heard = now;
        tx.set_room(state.room.into());
        if packet.time_echo != 0 && packet.time_echo != state.nonce {
            let trip = micros(now).wrapping_sub(packet.time_echo);
            if trip < 1 << 30 {
                state.path.measured(now, Duration::from_micros(trip.into()));
            }
        }
        let near = tx.base();
        let events = &mut *self.events;
        let ack = packet.ack.map(|ack| expand(ack, near));
        tx.acknowledged(
            packet,
            now,
            &mut state.path,
            self.spare,
            |tag| match events.back_mut() {
                Some(Event::Done(_, last)) if *last + 1 == tag => *last = tag,
                _ => events.push_back(Event::Done(tag, tag)),
            },
        );
        tx.blocked_on = match (packet.not_ready, tx.blocked_on) {
            (true, None) => Some(now),
            (true, since) => since,
            (false, _) => None,
        };
        if packet.refused != 0
            && let Some((tag, id, end)) = ack.and_then(|ack| tx.message_at(ack))
        {
            // Its packets are not sent again, and the next one says so.
            tx.skip(end);
            state.ask = true;
            let status = Status::from_number(packet.refused).unwrap_or(Status::General);
            self.events.push_back(Event::Failed(*peer, tag, id, status));
        }
        watch(self.timers, peer, state);
        enqueue(self.queued, peer, state);
    }

    /// What becomes of the datagram of a packet.
    fn sort(
        &mut self,
        peer: &Peer,
        state: &mut PeerState,
        packet: &Packet,
        data: Option<&[u8]>,
        now: Duration,
    ) -> RxOutcome {
        let mut crowded = false;
        let expected = state.expected;
        // The first packet of all tells where numbers begin.
        let start = || 1 << 32 | u64::from(packet.base);
        let rx = state
            .rx
            .get_or_insert_with(|| Box::new(Receiver::new(expected.unwrap_or_else(start))));
        state.expected = Some(rx.next());
        let near = rx.next();
        let before = rx.held();
        let base = expand(packet.base, near);
        rx.skip(base);
        self.shares.change(peer, before, rx.held());
        if let Some(base) = rx.skipped.take() {
            self.events.push_back(Event::Skipped(*peer, base));
        }
        rx.due |= packet.ack_now;
        // What was under way to us, or was acknowledged since.
        let ahead = packet.seq.wrapping_sub(packet.base);
        if packet.ack_soon {
            // Who has sent much since what we have acknowledged does not wait for each packet: the next one is about to come.
            let next =
                ACK_DELAY + ACK_DELAY_PER_KILOBYTE * data.map_or(0, <[u8]>::len) as u32 / 1000;
            let wait = if ahead < PIPELINE {
                Duration::ZERO
            } else if ahead >= MANY && rx.unacknowledged < ahead / PART {
                next + ACK_DELAY_MANY_PEERS
            } else {
                next
            };
            if rx.soon.is_none() {
                rx.soon = Some(now + wait);
                self.soon.push(*peer);
                crowded = self.soon.len() > 2 * self.known + 64;
            }
        }
        rx.time = packet.time;
        let mut outcome = RxOutcome::Nothing;
        if let Some(data) = data {
            let seq = expand(packet.seq, near);
            rx.unacknowledged += 1;
            rx.since += u64::from(charge(data.len()));
            rx.due |= rx.unacknowledged >= together(ahead) || rx.since >= self.quarter;
            match rx.sort(seq) {
                Arrived::Again | Arrived::Beyond => rx.due = true,
                Arrived::Next => outcome = RxOutcome::Deliver(seq),
                Arrived::Ahead => {
                    // A gap is told at once, and then now and then: each says all that the ones before did.
                    rx.due |= rx.runs_are_news() || rx.unacknowledged >= ACK_WITH_GAPS;
                    if !self.ordered {
                        // That it has arrived has to be remembered.
                        if self.shares.has_room(peer, rx.held(), receiver::RUN) {
                            outcome = RxOutcome::Deliver(seq);
                        }
                    } else if dgram::parse_covered(data).is_ok() {
                        keep(self.shares, peer, rx, seq, data);
                    }
                    self.sweep_at.get_or_insert(now + IDLE);
                }
            }
        }
        if rx.due {
            enqueue(self.queued, peer, state);
        }
        if crowded {
            // Those that found company meanwhile, and are owed again, stand there more than once.
            self.soon.sort_unstable();
            self.soon.dedup();
        }
        outcome
    }
}

/// Packet `seq` waits, if there is room for it and what it costs.
fn keep(shares: &mut Shares, peer: &Peer, rx: &mut Receiver, seq: u64, data: &[u8]) -> bool {
    let before = rx.held();
    if !shares.has_room(peer, before, data.len() + receiver::KEPT + receiver::RUN) {
        return false;
    }
    rx.keep(seq, data);
    shares.change(peer, before, rx.held());
    true
}

fn second(now: Duration) -> u32 {
    u32::try_from(now.as_secs()).unwrap_or(u32::MAX)
}

/// The peer has something to send.
fn enqueue(queued: &mut VecDeque<Peer>, peer: &Peer, state: &mut PeerState) {
    if !state.queued {
        state.queued = true;
        queued.push_back(*peer);
    }
}

/// A timer that is too early is left where it is: with most packets the deadline moves away, and seldom comes.
fn watch(timers: &mut BTreeSet<(Duration, Peer)>, peer: &Peer, state: &mut PeerState) {
    let Some(wanted) = state.tx.as_ref().and_then(|tx| tx.deadline) else {
        return;
    };
    if state.timer.is_some_and(|at| at <= wanted) {
        return;
    }
    if let Some(old) = state.timer.replace(wanted) {
        timers.remove(&(old, *peer));
    }
    timers.insert((wanted, *peer));
}

/// The header of the next packet to a peer.
fn header(
    state: &PeerState,
    peer: &Peer,
    (index, instance): (u8, u32),
    room: u32,
    now: Duration,
) -> Packet {
    let rx = state.rx.as_deref();
    let next = rx.map(Receiver::next).or(state.expected);
    // Otherwise the time between would count as a round trip.
    let answers = rx.filter(|rx| rx.due || rx.soon.is_some());
    Packet {
        token: state.token,
        echo: state.echo,
        seq: 0,
        base: state.tx.as_ref().map_or(state.next, |tx| tx.base()) as u32,
        dst_index: peer.1,
        src_index: index,
        ack: next.map(|next| next as u32),
        instance,
        window: room,
        time: if state.is_proven {
            micros(now)
        } else {
            state.nonce
        },
        time_echo: answers.map_or(0, |rx| rx.time),
        arrived: answers.map(Receiver::runs).unwrap_or_default(),
        challenge: false,
        not_ready: rx.is_some_and(|rx| rx.blocked_on.is_some()),
        ack_now: false,
        ack_soon: false,
        refused: rx.and_then(|rx| rx.refused).unwrap_or(0),
    }
}

fn wrap(mut packet: Packet, what: &Outgoing<'_>) -> Vec<u8> {
    packet.seq = what.seq as u32;
    let data = what.data.unwrap_or(&[]);
    let mut bytes = Vec::with_capacity(Packet::LEN + 8 * packet.arrived.len() + data.len() + 4);
    packet.put(what.data.is_some(), &mut bytes);
    bytes.extend_from_slice(data);
    dgram::seal(&mut bytes);
    bytes
}

/// Time between two searches of a full table: who fills it cannot make each packet search it.
const SWEEP: Duration = Duration::from_secs(1);
/// Longer than a datagram can be on its way, and than a token is good with which a peer begins.
const IDLE: Duration = Duration::from_secs(60);
/// Less than [`IDLE`] by more than clocks differ.
const YOUNG: Duration = Duration::from_secs(50);
/// How long it counts that a peer has shown that it receives at its address, seconds.
const PROOF: u32 = 60;
/// How many times what came from an address goes there until then.
const AMPLIFICATION: usize = 3;
/// Time between two questions to a peer that takes nothing.
const CLOSED: Duration = Duration::from_millis(50);
/// Bytes of packets without data.
const QUESTIONS: usize = 4 * (Packet::LEN + dgram::CRC);

#[cfg(test)]
mod tests;
