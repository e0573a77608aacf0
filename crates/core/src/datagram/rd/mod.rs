//! Reliable datagrams (RD): each datagram to a peer arrives exactly once, unless one end fails.
//!
//! One queue pair exchanges datagrams with any number of peers. No connection is set up, and state exists only for
//! peers with recent traffic. This layer is below DDP and not part of iWARP. [`crate::wire::rd`] describes the
//! packets.
//!
//! ```text
//!   A                                     B
//!   | token a, echo 0   (no data)         |      B knows nothing and remembers nothing
//!   |------------------------------------>|
//!   |      challenge: token b, echo a     |
//!   |<------------------------------------|
//!   | token a, echo b, seq, base, data    |      the echo proves A's address: B accepts packets
//!   |------------------------------------>|
//!   |        ack, runs, window            |
//!   |<------------------------------------|
//! ```
//!
//! | file | content |
//! |---|---|
//! | `mod.rs` | state of the layer and of a peer |
//! | `transmit.rs` | sending: whether a packet may be sent to a peer, and its header |
//! | `tokens.rs` | tokens: first contact, restarts, proof of addresses |
//! | `receive.rs` | packets of known peers |
//! | `timers.rs` | deadlines of all peers |
//! | `peer_table.rs` | adding and forgetting peers |
//! | `shares.rs` | limits for each host and network |
//! | `sender.rs` | unacknowledged packets to one peer: losses, probes |
//! | `receiver.rs` | packets received from one peer: order, duplicates |
//! | `congestion.rs` | how much may be under way to a peer |
//! | `ack.rs` | when acknowledgements are sent |
//! | `numbers.rs` | packet numbers and times on the wire |
//!
//! In the picture, `seq` is the number of a packet, its sender sends no packet before `base` again, and `runs` are the
//! ranges of packet numbers that have arrived although an earlier packet is missing.
//!
//! A token is a keyed hash of the peer's address and of the time. Its key is random for each queue pair. A token is
//! valid for first contact for a minute at most; afterwards both ends keep the tokens until they forget each other. A
//! packet of a known peer with a different token may come from another queue pair at the same address, so the sender
//! has to echo a new token that was made for this case. After that there are two possibilities. If it is another
//! queue pair, everything under way to the old one fails, because it is unknown which part arrived. If it is the same
//! queue pair, which had forgotten this one, then recent packets have not arrived, and they are sent again.
//!
//! An end that drops what its peer relies on (an answer, or the first part of a message) begins a new session with this
//! peer: it uses another token, and its packets have no instance number, because the peer would recognize the queue pair by that
//! number. For the peer this is as if the queue pair had been replaced, so the peer's outstanding requests fail.

mod ack;
mod congestion;
mod numbers;
mod peer_table;
mod receive;
mod receiver;
mod sender;
mod shares;
mod timers;
mod tokens;
mod transmit;

pub use shares::host_of;

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use super::cookie::Secret;
use super::outgoing::IpFields;
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

/// What the layer reports to the queue pair.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// All messages from the first to the last of these tags have been delivered.
    Done(Tag, Tag),
    /// The peer refuses the message with this tag. `None`: the message has no tag. The number is the message number on
    /// the wire.
    Failed(Peer, Option<Tag>, u32, Status),
    /// All messages to this peer fail with the status.
    Lost(Peer, Status),
    /// The queue pair of the peer was replaced by another one, or has forgotten this one, while no packet was under way to it.
    Restarted(Peer),
    /// Packets of this peer that are missing before this number will never arrive. So the peer's incomplete messages of which all
    /// arrived packets are before this number are given up. `u64::MAX`: the session with the peer is over, and its incomplete messages
    /// make no records.
    Skipped(Peer, u64),
}

/// Peers whose packets wait, by the resource that they wait for.
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

/// What the queue pair has to do with the datagram of a packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RxOutcome {
    /// Nothing: the packet has no datagram, is a duplicate, or waits.
    Nothing,
    /// Deliver it, and report the result with [`Reliable::delivered`], [`Reliable::mark_blocked`] or
    /// [`Reliable::refused`].
    Deliver(u64),
}

#[derive(Debug)]
struct PeerState {
    way: IpFields,
    /// The token that the peer has to echo.
    token: u32,
    /// The peer's token. 0: not known yet.
    echo: u32,
    /// The peer's token before it restarted.
    echo_before: u32,
    /// The instance number of the peer's queue pair. 0: unknown.
    instance: u32,
    /// A random number that packets to the peer contain instead of the time, until the peer has
    /// returned it once.
    nonce: u32,
    /// Whether the peer has shown that it receives at its address. `proven_at` is the second of the
    /// last proof.
    is_proven: bool,
    proven_at: u32,
    /// Whether a new proof is requested, although the last one is still valid: packets to the peer contain the new `nonce`.
    is_renewing: bool,
    /// Bytes that may be sent to the peer until it has shown that it receives at its address.
    credit: u32,
    /// Number of the next packet to the peer.
    next: u64,
    /// Number of the next packet from the peer, used while `rx` is `None`. `None`: no packet has arrived yet.
    /// Numbers begin at 2^32 and are never 0.
    expected: Option<NonZeroU64>,
    tx: Option<Box<Sender>>,
    rx: Option<Box<Receiver>>,
    path: Congestion,
    /// Size of the peer's socket buffer.
    room: u32,
    used: Duration,
    /// Whether the peer is in the list of those to which something can be sent.
    queued: bool,
    /// The lists of waiting peers that contain this one, as bits of [`Resource`].
    waiting_in: u8,
    /// Whether an empty packet that requires an answer has to be sent.
    ask: bool,
    /// Whether this end has begun a new session with the peer. Tokens for first contact are not valid any more, because the
    /// token of the old session may be one of them.
    renewed: bool,
    /// Whether the peer has to be heard before data is sent to it. Something under way to the peer was given up, and since then
    /// the peer may have begun a new session, in which new packets would fail too.
    unheard: bool,
    /// The peer's entry in the list of timers. It may be earlier than the deadline of its sender.
    timer: Option<Duration>,
}

impl PeerState {
    /// Whether packets or probes to the peer are unanswered.
    fn has_under_way(&self) -> bool {
        let tx = self.tx.as_deref();
        tx.is_some_and(|tx| !tx.is_empty() || tx.deadline.is_some())
    }

    /// Begins a new session with the peer. Nothing of the old one is valid any more, and the peer notices the new token.
    /// The caller has given up what was under way to the peer.
    fn begin_session(&mut self, secret: &Secret, shares: &mut Shares, peer: &Peer, now: Duration) {
        if self.echo == 0 {
            // The peer has no session with this token yet.
            return;
        }
        self.token = secret.token(peer, self.token, now);
        self.renewed = true;
        self.echo = 0;
        self.expected = None;
        if let Some(rx) = self.rx.take() {
            shares.change(peer, rx.held(), 0);
        }
        // The entry must stay for as long as the old token would be accepted from an unknown peer.
        self.used = now;
    }

    /// The instance number in packets to the peer, where `instance` is that of the queue pair. A peer that knew an earlier
    /// session must not conclude that this end has only been idle.
    fn own_instance(&self, instance: u32) -> u32 {
        if self.renewed { 0 } else { instance }
    }

    /// Requires a new proof of the address, since another program may use it by now.
    fn require_new_proof(&mut self, secret: &Secret, peer: &Peer, now: Duration) {
        self.nonce = secret.nonce(peer, now);
        self.is_proven = false;
        self.is_renewing = false;
        self.credit = 0;
    }

    /// Removes the sender, with everything that is under way to the peer.
    fn take_sender(&mut self, shares: &mut Shares, peer: &Peer) -> Option<Box<Sender>> {
        let tx = self.tx.take()?;
        if tx.counted() > 0 {
            shares.change_answers(peer, tx.counted(), 0);
        }
        Some(tx)
    }

    /// Returns the sender, which is created if needed.
    fn sender(&mut self, now: Duration) -> &mut Sender {
        let (next, room) = (self.next, self.room);
        self.tx
            .get_or_insert_with(|| Box::new(Sender::new(next, room, now)))
    }

    /// Records that the peer receives at its address.
    fn prove(&mut self, now: Duration) {
        self.is_proven = true;
        self.is_renewing = false;
        self.proven_at = second(now);
    }

    /// Whether `len` bytes may be sent to the peer. Until it has shown that it receives at its address, the limit is
    /// [`AMPLIFICATION`] times the bytes that came from there.
    fn credit_allows(&self, len: usize) -> bool {
        // Some of the credit is reserved for packets that require the proof.
        self.is_proven || len + RESERVED_CREDIT <= self.credit as usize
    }

    fn spend(&mut self, len: usize) {
        if !self.is_proven {
            self.credit = self
                .credit
                .saturating_sub(u32::try_from(len).unwrap_or(u32::MAX));
        }
    }

    /// Updates the state that every packet of the peer changes.
    fn update_from(&mut self, packet: &Packet, now: Duration) {
        self.used = now;
        if packet.instance != 0 {
            self.instance = packet.instance;
        }
        self.room = packet.window.min(bounds::DATAGRAM_WINDOW_MAX);
    }
}

/// Counters of packets that this layer sent or dropped.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RdCounts {
    /// Packets with data that were sent again.
    pub(super) again: u64,
    /// Probes to silent peers.
    pub(super) probes: u64,
    /// Packets that contain only an acknowledgement.
    pub(super) acks: u64,
    /// Received packets that echoed a wrong token.
    pub(super) bad_echo: u64,
}

/// The reliability layer of one queue pair.
#[derive(Debug)]
pub(super) struct Reliable {
    pub(super) counts: RdCounts,
    secret: Secret,
    /// Identifies this queue pair to peers that it has forgotten.
    instance: u32,
    /// Packets with wrong echoes in the current second, by a hash of their source host.
    bad_echoes: Box<[u16; 256]>,
    bad_second: u64,
    /// The host from whose address the limit of wrong echoes was reached, until the queue pair reads it.
    pub(super) guessed: Option<IpAddr>,
    index: u8,
    /// Whether to deliver the packets of a peer in the order in which they were sent.
    ordered: bool,
    /// How long a peer may stay silent.
    peer_timeout: Duration,
    peers: Table<Peer, PeerState>,
    /// How many peer entries, and how much memory for waiting packets, each host and each network
    /// uses.
    shares: Shares,
    queued: VecDeque<Peer>,
    /// The [`Sender`] of a peer to which nothing is under way any more. Its memory is used for the next one.
    spare_sender: Option<Box<Sender>>,
    timers: BTreeSet<(Duration, Peer)>,
    /// Challenges to peers that have not proved their addresses.
    challenges: VecDeque<(Peer, Option<IpAddr>, Packet)>,
    blocked: Blocked,
    /// Number of the first packet to a new peer.
    first_number: u64,
    /// Peers to which an acknowledgement is due soon.
    delayed_acks: Vec<Peer>,
    /// Packets that were acknowledged, whose buffers can be used again.
    spare: Vec<Arc<Vec<u8>>>,
    shells: Vec<Arc<Vec<u8>>>,
    /// When the table of peers was last searched for idle ones.
    last_search: Duration,
    /// When to search the table of peers next for those whose packets wait, or whose incomplete messages have taken receives. Such a peer
    /// has no deadline of its own.
    search_at: Option<Duration>,
    room: u32,
    events: VecDeque<Event>,
}

impl Reliable {
    pub(super) fn new(secret: Secret, index: u8, ordered: bool, peer_timeout: Duration) -> Self {
        Self {
            counts: RdCounts::default(),
            secret,
            instance: secret.start(4).max(1),
            bad_echoes: Box::new([0; 256]),
            bad_second: 0,
            guessed: None,
            index,
            ordered,
            peer_timeout,
            peers: Table::default(),
            shares: Shares::default(),
            queued: VecDeque::new(),
            spare_sender: None,
            timers: BTreeSet::new(),
            challenges: VecDeque::new(),
            blocked: Blocked::default(),
            // The number is above 2^32, so that `numbers::expand` does not fall below 0 for a
            // number on the wire that is earlier than this one.
            first_number: 1 << 32 | u64::from(secret.start(3)),
            delayed_acks: Vec::new(),
            spare: Vec::new(),
            shells: Vec::new(),
            last_search: Duration::ZERO,
            search_at: None,
            room: bounds::DATAGRAM_WINDOW,
            events: VecDeque::new(),
        }
    }

    pub(super) fn set_room(&mut self, room: u32) {
        self.room = room.max(bounds::DATAGRAM_WINDOW);
    }

    /// Gives up all packets under way. The peers, their numbers and received packets are kept, because acknowledged
    /// packets are not sent again. A new session begins with the peers to which answers were under way, and with those
    /// of `failed`.
    pub(super) fn abandon(&mut self, failed: impl Iterator<Item = Peer>, now: Duration) {
        for (peer, state) in &mut self.peers {
            let tx = state.take_sender(&mut self.shares, peer);
            state.timer = None;
            state.unheard = true;
            if tx.is_some_and(|tx| tx.has_answers()) {
                state.begin_session(&self.secret, &mut self.shares, peer, now);
            }
        }
        for peer in failed {
            if let Some(state) = self.peers.get_mut(&peer) {
                state.begin_session(&self.secret, &mut self.shares, &peer, now);
            }
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

    /// Begins a new session with a peer, because this end has dropped something that the peer relies on.
    pub(super) fn begin_session(&mut self, peer: &Peer, now: Duration) {
        if let Some(state) = self.peers.get_mut(peer) {
            state.take_sender(&mut self.shares, peer);
            state.begin_session(&self.secret, &mut self.shares, peer, now);
            self.events.push_back(Event::Skipped(*peer, u64::MAX));
        }
    }

    /// Forgets all peers, and becomes another instance with other tokens. The counters, the size of the socket buffer and
    /// the counts of wrong tokens stay.
    pub(super) fn reset(&mut self) {
        let new = Self::new(
            self.secret.next(),
            self.index,
            self.ordered,
            self.peer_timeout,
        );
        let old = std::mem::replace(self, new);
        self.counts = old.counts;
        self.room = old.room;
        self.bad_echoes = old.bad_echoes;
        self.bad_second = old.bad_second;
        self.guessed = old.guessed;
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Bytes charged for the waiting packets of all peers.
    pub(super) fn waiting(&self) -> usize {
        self.shares.waiting()
    }

    /// Checks that peers are charged at least what they use, and that the sums are right. Only
    /// tests call this, because it counts all waiting packets of all peers.
    pub(super) fn check_accounts(&self) {
        let of_peers = self.peers.values().filter_map(|state| state.rx.as_ref());
        let held: usize = of_peers.map(|rx| rx.counted()).sum();
        let charged = self.shares.waiting();
        assert!(held <= charged, "{held} bytes wait, {charged} are charged");
        assert!(charged <= bounds::RD_WAITING, "{charged} bytes are charged");
        let senders = || self.peers.values().filter_map(|state| state.tx.as_ref());
        let counted: usize = senders().map(|tx| tx.counted()).sum();
        let anew: usize = senders().map(|tx| tx.counted_anew()).sum();
        assert_eq!((counted, anew), (self.shares.answers(), counted));
        assert!(self.shares.is_consistent(), "{:?}", self.shares);
    }

    /// The number of known peers.
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }
}

fn second(now: Duration) -> u32 {
    u32::try_from(now.as_secs()).unwrap_or(u32::MAX)
}

/// A peer with which no packet was exchanged for this time is forgotten. Longer than the lifetime of a datagram in the network, and
/// than the validity of a token for first contact.
const IDLE: Duration = Duration::from_secs(60);
/// If the peer has forgotten this end, unacknowledged packets that are younger than this have not
/// arrived. The limit is less than [`IDLE`] by more than the clocks of two hosts may differ in that
/// time.
const YOUNG: Duration = Duration::from_secs(50);
/// How long a proof of an address is valid, seconds.
const PROOF: u32 = 60;
/// How many seconds before a proof expires a new proof is requested, so that packets under way need not wait for it.
const RENEWAL: u32 = 10;
/// An unproven address gets at most this multiple of the bytes that came from it.
const AMPLIFICATION: usize = 3;
/// Bytes reserved for packets without data.
const RESERVED_CREDIT: usize = 4 * (Packet::LEN + dgram::CRC);

#[cfg(test)]
mod tests;
