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
//! | `mod.rs` | the state of the layer and of a peer |
//! | `transmit.rs` | what may go to a peer, and the packets that go |
//! | `tokens.rs` | getting to know a peer, restarts, proof of addresses |
//! | `receive.rs` | packets of peers that are known |
//! | `timers.rs` | deadlines of all peers |
//! | `places.rs` | which peers get a place, and which are forgotten |
//! | `shares.rs` | what hosts and networks may take |
//! | `sender.rs` | one peer's packets that are not acknowledged: losses, probes |
//! | `receiver.rs` | one peer's packets that have arrived: order, duplicates |
//! | `congestion.rs` | how much may be under way to a peer |
//! | `ack.rs` | when acknowledgements are sent |
//! | `numbers.rs` | packet numbers and times on the wire |
//!
//! A token is a keyed hash of the peer's address and of the time, from a key that is drawn for each queue pair. With one it
//! begins, for a minute at most; then both ends keep their tokens until they forget each other. A peer that comes with
//! another token than before is another queue pair than before, once it has echoed a token that was made for that question:
//! what was under way to the old one has failed, because it is unknown what of it arrived. If it is the same queue pair,
//! which had forgotten this one, nothing that was sent lately had arrived, and it is sent again.

mod ack;
mod congestion;
mod numbers;
mod places;
mod receive;
mod receiver;
mod sender;
mod shares;
mod timers;
mod tokens;
mod transmit;

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::cookie::Secret;
use super::outgoing::Way;
use super::table::Table;
use super::types::{Peer, Resource, Tag};
use crate::bounds;
use crate::verbs::wc::Status;
use crate::wire::dgram;
use crate::wire::rd::Packet;
use congestion::Congestion;
use receiver::Receiver;
use sender::Sender;
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
    /// Packets from this peer before this number never come: messages of which no later one came will not be complete. `u64::MAX`:
    /// the peer is gone, and its messages leave no records.
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

    /// Another program may receive at its address by now.
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
    /// The host in whose name so many wrong echoes came that this second's limit was reached, until it is reported.
    pub(super) guessed: Option<IpAddr>,
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
    /// Answers to peers that have not proved their address.
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
            guessed: None,
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
}

fn second(now: Duration) -> u32 {
    u32::try_from(now.as_secs()).unwrap_or(u32::MAX)
}

/// Longer than a datagram can be on its way, and than a token is good with which a peer begins.
const IDLE: Duration = Duration::from_secs(60);
/// Less than [`IDLE`] by more than clocks differ.
const YOUNG: Duration = Duration::from_secs(50);
/// How long it counts that a peer has shown that it receives at its address, seconds.
const PROOF: u32 = 60;
/// How many times what came from an address goes there until then.
const AMPLIFICATION: usize = 3;
/// Bytes of packets without data.
const QUESTIONS: usize = 4 * (Packet::LEN + dgram::CRC);

#[cfg(test)]
mod tests;
