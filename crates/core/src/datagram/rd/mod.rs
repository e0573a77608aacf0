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
//! | `sender.rs` | packets that are not acknowledged: losses, probes |
//! | `receiver.rs` | packets that have arrived: order, duplicates |
//! | `congestion.rs` | how much may be under way |
//!
//! A token is a keyed hash of the peer's address and comes from a key that is drawn for each queue pair. A peer that
//! answers with another token than before is another queue pair than before: what was under way to the old one has
//! failed, because nobody can say what of it arrived.

mod congestion;
mod receiver;
mod sender;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Arrival;
use super::Bytes;
use super::cookie::Secret;
use super::flow::{Peer, charge};
use crate::bounds;
use crate::verbs::wc::Status;
use crate::wire::dgram;
use crate::wire::rd::Packet;
use congestion::Congestion;
use receiver::{Arrived, Receiver};
use sender::{Outgoing, Sender};

pub(super) use sender::Tag;

/// How packets to a peer travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) from: Option<IpAddr>,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// What became known.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A message arrived and was delivered.
    Done(Tag),
    /// The peer refuses a message, or the message that was under way when it fell silent. None: it had none of ours.
    Failed(Peer, Option<Tag>, Status),
    /// Everything to this peer is off.
    Lost(Peer, Status),
    /// Messages from this peer that are not complete never will be.
    Skipped(Peer),
}

/// What to do with the datagram of a packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing: there is none, or it is not new, or it waits.
    Nothing,
    /// Deliver it, and say so with [`Reliable::delivered`], [`Reliable::starved`] or [`Reliable::refused`].
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
    /// An empty packet that asks for something is to be sent.
    ask: bool,
    /// The deadline that stands in the list of timers.
    timer: Option<Duration>,
}

/// The reliability layer of one queue pair.
#[derive(Debug)]
pub(super) struct Reliable {
    secret: Secret,
    index: u8,
    /// Deliver packets of a peer in the order in which it sent them.
    ordered: bool,
    /// How long a peer may be silent.
    patience: Duration,
    peers: HashMap<Peer, PeerState>,
    queued: VecDeque<Peer>,
    timers: BTreeSet<(Duration, Peer)>,
    /// Answers to strangers.
    challenges: VecDeque<(Peer, Option<IpAddr>, Packet)>,
    /// Peers whose packets wait for a receive.
    starving: VecDeque<Peer>,
    /// Number of the first packet to a peer that is new.
    floor: u64,
    /// Peers that wait for an acknowledgement.
    soon: Vec<Peer>,
    /// Packets that were acknowledged.
    spare: Vec<Arc<Vec<u8>>>,
    /// Bytes that wait, of all peers.
    waiting: usize,
    /// When the table of peers was searched for idle ones.
    swept: Duration,
    room: u32,
    events: VecDeque<Event>,
}

fn micros(at: Duration) -> u32 {
    // 0 means "none".
    (at.as_micros() as u32).max(1)
}

/// The number near `near` whose lower half is `wire`.
fn expand(wire: u32, near: u64) -> u64 {
    let ahead = wire.wrapping_sub(near as u32).cast_signed();
    near.wrapping_add_signed(i64::from(ahead))
}

impl Reliable {
    pub(super) fn new(secret: Secret, index: u8, ordered: bool, patience: Duration) -> Self {
        Self {
            secret,
            index,
            ordered,
            patience,
            peers: HashMap::new(),
            queued: VecDeque::new(),
            timers: BTreeSet::new(),
            challenges: VecDeque::new(),
            starving: VecDeque::new(),
            // Above 2^32, so that numbers before it can be told.
            floor: 1 << 32 | u64::from(secret.start(3)),
            soon: Vec::new(),
            spare: Vec::new(),
            waiting: 0,
            swept: Duration::ZERO,
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

    /// Peers that are known.
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }

    // ------------------------------------------------------------------ sending

    /// Whether a datagram may be given out to `peer` now. A peer that is not known is asked for its token first.
    pub(super) fn may_send(&mut self, peer: &Peer, way: Way, now: Duration) -> bool {
        if !self.enter(peer, way, now) {
            self.events
                .push_back(Event::Lost(*peer, Status::LocalQpOperation));
            return false;
        }
        let room = self.room;
        let Some(state) = self.peers.get_mut(peer) else {
            return false;
        };
        if state.echo == 0 {
            if state.tx.is_none() {
                let mut tx = Sender::new(state.next, room, now);
                tx.wait(now, &state.path);
                state.tx = Some(Box::new(tx));
                state.ask = true;
                self.enqueue(*peer);
                self.watch(peer);
            }
            return false;
        }
        match &mut state.tx {
            Some(tx) => tx.has_window(&state.path),
            None => true,
        }
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
        let (index, room) = (self.index, self.room);
        let state = self.peers.get_mut(peer)?;
        state.used = now;
        let tx = state
            .tx
            .get_or_insert_with(|| Box::new(Sender::new(state.next, state.room, now)));
        let ask = tx.push(packet.len() + dgram::CRC, alone, now, &mut state.path);
        let mut head = header(state, peer, index, room, now);
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
        let packet = Arc::new(packet);
        state.next += 1;
        if let Some(tx) = &mut state.tx {
            tx.keep(Arc::clone(&packet), Some(tag), last, now, &state.path);
        }
        if let (true, Some(rx)) = (whole, &mut state.rx) {
            rx.acknowledges();
        }
        let way = state.way;
        self.watch(peer);
        Some((way, Bytes::Shared(packet)))
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
                self.watch(&peer);
                return Some((peer, way, bytes.into()));
            }
            self.queued.pop_front();
            if let Some(state) = self.peers.get_mut(&peer) {
                state.queued = false;
                if state.rx.as_ref().is_some_and(|rx| rx.is_idle()) {
                    state.expected = state.rx.take().map(|rx| rx.next());
                }
                if state.tx.as_ref().is_some_and(|tx| tx.is_empty()) && state.echo != 0 {
                    state.tx = None;
                }
            }
            self.watch(&peer);
        }
        None
    }

    fn poll_peer(&mut self, peer: &Peer, now: Duration) -> Option<(Way, Vec<u8>)> {
        let (index, room) = (self.index, self.room);
        let state = self.peers.get_mut(peer)?;
        let mut packet = header(state, peer, index, room, now);
        let ask = std::mem::take(&mut state.ask);
        // A packet with data has no room for runs: they follow.
        let mut whole = true;
        let due = state.rx.as_ref().is_some_and(|rx| rx.due);
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
                Some(wrap(packet, &tx.probe(now, &mut state.path)))
            }
            Some(tx) => match tx.again(now, &state.path) {
                Some(again) => {
                    packet.ack_now = true;
                    whole = packet.arrived.is_empty();
                    packet.arrived.clear();
                    Some(wrap(packet, &again))
                }
                None => due.then(|| {
                    let nothing = Outgoing {
                        seq: state.next,
                        data: None,
                    };
                    wrap(packet, &nothing)
                }),
            },
            None => due.then(|| {
                let nothing = Outgoing {
                    seq: state.next,
                    data: None,
                };
                wrap(packet, &nothing)
            }),
        }?;
        if let Some(rx) = &mut state.rx
            && whole
        {
            rx.acknowledges();
        }
        Some((state.way, bytes))
    }

    /// Gives back the buffers of packets that were acknowledged.
    pub(super) fn recycle(&mut self, give: impl FnMut(Vec<u8>)) {
        let spare = self.spare.drain(..);
        spare
            .filter_map(|packet| Arc::try_unwrap(packet).ok())
            .for_each(give);
    }

    /// Whether acknowledgements wait for company.
    pub(super) fn owes(&self) -> bool {
        !self.soon.is_empty()
    }

    /// Acknowledgements that found no company go without.
    pub(super) fn flush(&mut self) {
        for peer in std::mem::take(&mut self.soon) {
            if let Some(rx) = self.receiver(&peer)
                && rx.soon
            {
                rx.due = true;
                self.enqueue(peer);
            }
        }
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
    ) -> Verdict {
        let known = self.peers.get(peer).map(|s| s.token);
        let token = known.unwrap_or_else(|| self.secret.token(peer));
        if packet.challenge {
            self.challenged(peer, packet, token, now);
            return Verdict::Nothing;
        }
        if packet.echo != token {
            self.challenge(peer, arrival, packet, token, now);
            return Verdict::Nothing;
        }
        let way = Way {
            from: arrival.to,
            ..Way::default()
        };
        if !self.enter(peer, way, now) || !self.recognize(peer, packet.token, now) {
            return Verdict::Nothing;
        }
        self.acknowledged(peer, packet, now);
        let verdict = self.sort(peer, packet, data);
        self.enqueue_if_due(peer);
        verdict
    }

    /// A peer is known from now on, if there is room for one more.
    fn enter(&mut self, peer: &Peer, way: Way, now: Duration) -> bool {
        if let Some(state) = self.peers.get_mut(peer) {
            state.used = now;
            return true;
        }
        if self.peers.len() >= bounds::RD_PEERS {
            if now.saturating_sub(self.swept) < SWEEP {
                return false;
            }
            self.swept = now;
            self.forget_idle(now);
            if self.peers.len() >= bounds::RD_PEERS {
                return false;
            }
        }
        let token = self.secret.token(peer);
        let state = PeerState {
            way,
            token,
            echo: 0,
            echo_before: 0,
            // Above 2^32, so that numbers before it can be told.
            next: self.floor,
            expected: None,
            tx: None,
            rx: None,
            path: Congestion::new(),
            room: bounds::DATAGRAM_WINDOW,
            used: now,
            queued: false,
            ask: false,
            timer: None,
        };
        self.peers.insert(*peer, state);
        true
    }

    /// Forgets peers that have been idle for longer than a datagram can be on its way. They remember us: when one is known
    /// again, its numbers go on beyond all that anybody was sent.
    fn forget_idle(&mut self, now: Duration) {
        let floor = &mut self.floor;
        self.peers.retain(|_, s| {
            let stays = s.tx.is_some() || s.rx.is_some() || now.saturating_sub(s.used) < IDLE;
            if !stays {
                *floor = (*floor).max(s.next);
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
            seq: 0,
            base: 0,
            dst_index: peer.1,
            src_index: self.index,
            ack: None,
            window: self.room,
            time: micros(now),
            time_echo: packet.time,
            arrived: smallvec::SmallVec::new(),
            challenge: true,
            not_ready: false,
            ack_now: false,
            ack_soon: false,
            refused: 0,
        };
        self.challenges.push_back((*peer, arrival.to, answer));
    }

    /// The peer wants its token to be echoed. Only if it knows ours, and only if we asked.
    fn challenged(&mut self, peer: &Peer, packet: &Packet, token: u32, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if packet.echo != token || state.tx.is_none() || packet.token == state.echo {
            return;
        }
        if state.echo == 0 {
            let trip = micros(now).wrapping_sub(packet.time_echo);
            state
                .path
                .measured(now, Duration::from_micros(u64::from(trip).min(10_000_000)));
        }
        self.recognize(peer, packet.token, now);
        if let Some(state) = self.peers.get_mut(peer) {
            state.room = packet
                .window
                .clamp(bounds::DATAGRAM_WINDOW, bounds::DATAGRAM_WINDOW_MAX);
            let room = state.room;
            if let Some(tx) = &mut state.tx {
                tx.set_room(room.into());
                tx.heard = now;
                tx.deadline = None;
            }
        }
        self.enqueue(*peer);
        self.watch(peer);
    }

    /// The peer's token is `token`. False: it is one that it had before.
    fn recognize(&mut self, peer: &Peer, token: u32, now: Duration) -> bool {
        let room = self.room;
        let Some(state) = self.peers.get_mut(peer) else {
            return false;
        };
        if state.echo == token {
            return true;
        }
        if state.echo_before == token {
            return false;
        }
        let restarted = state.echo != 0;
        if restarted {
            // Another queue pair than before.
            state.echo_before = state.echo;
            state.expected = None;
            if let Some(rx) = state.rx.take() {
                self.waiting -= rx.waiting();
            }
            let under_way = state.tx.as_ref().is_some_and(|tx| !tx.is_empty());
            state.tx = None;
            self.events.push_back(Event::Skipped(*peer));
            if under_way {
                self.events
                    .push_back(Event::Lost(*peer, Status::RemoteAborted));
            }
        } else if let Some(tx) = &mut state.tx
            && tx.is_empty()
        {
            // What waited for the token can go.
            **tx = Sender::new(state.next, room, now);
        }
        state.echo = token;
        true
    }

    /// What the packet acknowledges.
    fn acknowledged(&mut self, peer: &Peer, packet: &Packet, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        state.room = packet
            .window
            .clamp(bounds::DATAGRAM_WINDOW, bounds::DATAGRAM_WINDOW_MAX);
        let Some(tx) = &mut state.tx else {
            return;
        };
        tx.heard = now;
        tx.set_room(state.room.into());
        if packet.time_echo != 0 {
            let trip = micros(now).wrapping_sub(packet.time_echo);
            if trip < 1 << 30 {
                state.path.measured(now, Duration::from_micros(trip.into()));
            }
        }
        let near = tx.base();
        let events = &mut self.events;
        let ack = packet.ack.map(|ack| expand(ack, near));
        tx.acknowledged(packet, now, &mut state.path, &mut self.spare, |tag| {
            events.push_back(Event::Done(tag));
        });
        tx.starved = match (packet.not_ready, tx.starved) {
            (true, None) => Some(now),
            (true, since) => since,
            (false, _) => None,
        };
        if packet.refused != 0
            && let Some((tag, end)) = ack.and_then(|ack| tx.message_at(ack))
        {
            // Its packets are not sent again, and the next one says so.
            tx.skip(end);
            state.ask = true;
            let status = Status::from_number(packet.refused).unwrap_or(Status::General);
            self.events.push_back(Event::Failed(*peer, tag, status));
        }
        self.enqueue(*peer);
        self.watch(peer);
    }

    fn sort(&mut self, peer: &Peer, packet: &Packet, data: Option<&[u8]>) -> Verdict {
        let ordered = self.ordered;
        let quarter = u64::from(self.room / 4);
        let Some(state) = self.peers.get_mut(peer) else {
            return Verdict::Nothing;
        };
        let expected = state.expected;
        // The first packet of all tells where numbers begin.
        let start = || 1 << 32 | u64::from(packet.base);
        let rx = state
            .rx
            .get_or_insert_with(|| Box::new(Receiver::new(expected.unwrap_or_else(start))));
        state.expected = Some(rx.next());
        let near = rx.next();
        let before = rx.waiting();
        if rx.skip(expand(packet.base, near)) {
            self.waiting -= before - rx.waiting();
            self.events.push_back(Event::Skipped(*peer));
        }
        rx.due |= packet.ack_now;
        if packet.ack_soon && !rx.soon {
            rx.soon = true;
            self.soon.push(*peer);
        }
        let Some(data) = data else {
            rx.time = packet.time;
            return Verdict::Nothing;
        };
        let seq = expand(packet.seq, near);
        rx.time = packet.time;
        rx.unacknowledged += 1;
        rx.since += u64::from(charge(data.len()));
        rx.due |= rx.unacknowledged >= ACK_EACH || rx.since >= quarter;
        match rx.sort(seq) {
            Arrived::Again | Arrived::Beyond => {
                rx.due = true;
                Verdict::Nothing
            }
            Arrived::Next => Verdict::Deliver(seq),
            Arrived::Ahead => {
                // A gap is told at once, and then now and then: each says all that the ones before did.
                rx.due |= rx.runs_are_news() || rx.unacknowledged >= ACK_WITH_GAPS;
                if !ordered {
                    return Verdict::Deliver(seq);
                }
                if self.waiting + data.len() <= bounds::RD_WAITING
                    && rx.waiting() + data.len() <= bounds::RD_WAITING_PEER
                {
                    rx.keep(seq, data);
                    self.waiting += data.len();
                }
                Verdict::Nothing
            }
        }
    }

    /// The queue pair took the datagram of packet `seq`.
    pub(super) fn delivered(&mut self, peer: &Peer, seq: u64) {
        if let Some(rx) = self.receiver(peer) {
            rx.delivered(seq);
            rx.starved = false;
        }
        self.enqueue_if_due(peer);
    }

    /// The queue pair has no receive for the datagram of packet `seq`: it waits.
    pub(super) fn starved(&mut self, peer: &Peer, seq: u64, data: &[u8]) {
        let full = self.waiting + data.len() > bounds::RD_WAITING;
        let Some(rx) = self.receiver(peer) else {
            return;
        };
        if !full && rx.waiting() + data.len() <= bounds::RD_WAITING_PEER {
            rx.keep(seq, data);
            rx.starved = true;
            rx.due = true;
            self.waiting += data.len();
        }
        if !self.starving.contains(peer) && self.starving.len() < bounds::RD_PEERS {
            self.starving.push_back(*peer);
        }
        self.enqueue(*peer);
    }

    /// The queue pair refuses the message of packet `seq`.
    pub(super) fn refused(&mut self, peer: &Peer, seq: u64, data: &[u8], why: Status) {
        let (ordered, waiting) = (self.ordered, self.waiting);
        let Some(rx) = self.receiver(peer) else {
            return;
        };
        if !ordered && seq != rx.next() {
            // Only the next packet can be refused. It may be acknowledged already, so it waits for that.
            if waiting + data.len() <= bounds::RD_WAITING
                && rx.waiting() + data.len() <= bounds::RD_WAITING_PEER
            {
                rx.keep(seq, data);
                self.waiting += data.len();
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
        let taken = self.receiver(peer)?.take_waiting(unordered);
        if let Some((_, data)) = &taken {
            self.waiting -= data.len();
        }
        taken
    }

    /// A peer whose packets wait for a receive, which may be there now.
    pub(super) fn next_starving(&mut self) -> Option<Peer> {
        self.starving.pop_front()
    }

    /// Whether packets of a peer wait for a receive.
    pub(super) fn is_starving(&self, peer: &Peer) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.starved)
    }

    /// Whether packet `seq` of a peer waits.
    pub(super) fn waits(&self, peer: &Peer, seq: u64) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.waits(seq))
    }

    fn receiver(&mut self, peer: &Peer) -> Option<&mut Receiver> {
        self.peers.get_mut(peer)?.rx.as_deref_mut()
    }

    // ------------------------------------------------------------------ timers

    /// When [`Self::handle_timeout`] should be called.
    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Time has passed.
    pub(super) fn handle_timeout(&mut self, now: Duration, starving: Option<Duration>) {
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
            let hungry = tx
                .starved
                .zip(starving)
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

    /// Keeps the timer of a peer where its sender wants it.
    fn watch(&mut self, peer: &Peer) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        let wanted = state.tx.as_ref().and_then(|tx| tx.deadline);
        if state.timer == wanted {
            return;
        }
        if let Some(old) = state.timer.take() {
            self.timers.remove(&(old, *peer));
        }
        if let Some(at) = wanted {
            self.timers.insert((at, *peer));
            state.timer = Some(at);
        }
    }

    fn enqueue(&mut self, peer: Peer) {
        if let Some(state) = self.peers.get_mut(&peer)
            && !state.queued
        {
            state.queued = true;
            self.queued.push_back(peer);
        }
    }

    fn enqueue_if_due(&mut self, peer: &Peer) {
        let due = self
            .peers
            .get(peer)
            .and_then(|s| s.rx.as_ref())
            .is_some_and(|rx| rx.due);
        if due {
            self.enqueue(*peer);
        }
    }
}

/// The header of the next packet to a peer.
fn header(state: &PeerState, peer: &Peer, index: u8, room: u32, now: Duration) -> Packet {
    let rx = state.rx.as_deref();
    let next = rx.map(Receiver::next).or(state.expected);
    // Otherwise the time between would count as a round trip.
    let answers = rx.filter(|rx| rx.due || rx.soon);
    Packet {
        token: state.token,
        echo: state.echo,
        seq: 0,
        base: state.tx.as_ref().map_or(state.next, |tx| tx.base()) as u32,
        dst_index: peer.1,
        src_index: index,
        ack: next.map(|next| next as u32),
        window: room,
        time: micros(now),
        time_echo: answers.map_or(0, |rx| rx.time),
        arrived: answers.map(Receiver::runs).unwrap_or_default(),
        challenge: false,
        not_ready: rx.is_some_and(|rx| rx.starved),
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

/// Packets that are acknowledged together: where none is missing, and where some are.
const ACK_EACH: u32 = 32;
const ACK_WITH_GAPS: u32 = 8;
/// Time between two searches of a full table: who fills it cannot make each packet search it.
const SWEEP: Duration = Duration::from_secs(1);
/// Longer than a datagram can be on its way.
const IDLE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        (([10, 0, 0, 1], 4000).into(), 3)
    }

    /// A peer that was forgotten remembers the numbers that it was sent: those to come are beyond them.
    #[test]
    fn numbers_go_on_when_a_peer_was_forgotten() {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
        let at = Duration::from_secs;
        assert!(!rd.may_send(&peer(), Way::default(), at(1)));
        let first = rd.peers[&peer()].next;
        let token = rd.peers[&peer()].token;
        let arrival = Arrival {
            from: peer().0,
            to: None,
            hop_limit: 0,
            traffic_class: 0,
        };
        let (hello, _) = crate::wire::rd::parse(&rd.poll(at(1)).unwrap().2).unwrap();
        let packet = Packet {
            token: 77,
            echo: token,
            challenge: true,
            ..hello
        };
        rd.handle(&peer(), &arrival, &packet, None, at(1));
        for n in 0..5 {
            assert!(rd.may_send(&peer(), Way::default(), at(1)));
            let packet = vec![0; Packet::LEN + 50];
            assert!(rd.push(&peer(), packet, (n, true, true), at(1)).is_some());
        }
        // What is under way is not forgotten.
        rd.forget_idle(at(100));
        assert_eq!(rd.peers(), 1);
        rd.abandon();
        rd.forget_idle(at(30));
        assert_eq!(rd.peers(), 1);
        rd.forget_idle(at(100));
        assert_eq!(rd.peers(), 0);
        rd.may_send(&peer(), Way::default(), at(100));
        assert_eq!(rd.peers[&peer()].next, first + 5);
    }

    #[test]
    fn an_idle_peer_costs_less_than_a_kibibyte() {
        // Its place in the table and one byte beside it; the table is 7/16 full at least.
        let place = size_of::<(Peer, PeerState)>() + 1;
        eprintln!("{place} bytes, {} at most", place * 16 / 7);
        assert!(place * 16 / 7 <= 1024, "{place}");
    }
}
