//! Receives the packets of known peers, and decides which datagrams are delivered now.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use super::ack::{
    ACK_DELAY, ACK_DELAY_MANY, ACK_DELAY_PER_KILOBYTE, ACK_WITH_GAPS, MANY, PART, PIPELINE,
    together,
};
use super::numbers::{expand, micros};
use super::receiver::{Arrived, Receiver};
use super::shares::Shares;
use super::timers::{enqueue, watch};
use super::{
    AMPLIFICATION, Event, IDLE, PROOF, PeerState, RENEWAL, Reliable, RxOutcome, receiver, second,
};
use crate::bounds;
use crate::datagram::cookie::Secret;
use crate::datagram::flow::charge;
use crate::datagram::table::Table;
use crate::datagram::types::{Arrival, Peer, Resource};
use crate::verbs::wc::Status;
use crate::wire::dgram;
use crate::wire::rd::Packet;

impl Reliable {
    /// Handles a packet. `data`: its datagram, if it has one.
    pub(in crate::datagram) fn handle(
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
        if !self.handle_unknown_token(peer, arrival, packet, now) {
            return RxOutcome::Nothing;
        }
        let (peers, context) = self.rx_context();
        match peers.get_mut(peer) {
            Some(state) => context.take(peer, state, packet, data, now),
            None => RxOutcome::Nothing,
        }
    }

    /// Returns the peers, and the other state that a packet may change.
    fn rx_context(&mut self) -> (&mut Table<Peer, PeerState>, RxContext<'_>) {
        let context = RxContext {
            ordered: self.ordered,
            quarter: u64::from(self.room / 4),
            secret: self.secret,
            known: self.peers.len(),
            shares: &mut self.shares,
            search_at: &mut self.search_at,
            delayed_acks: &mut self.delayed_acks,
            queued: &mut self.queued,
            timers: &mut self.timers,
            events: &mut self.events,
            spare: &mut self.spare,
        };
        (&mut self.peers, context)
    }

    /// Records that the datagram of packet `seq` was delivered. Returns whether other packets of the peer wait.
    pub(in crate::datagram) fn delivered(&mut self, peer: &Peer, seq: u64) -> bool {
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
        // A delivery after a wait is acknowledged at once, because the sender probes only from time to time. The numbers are compared
        // because an unordered queue pair delivers other packets while one waits.
        rx.due |= rx.blocked_on.take_if(|(_, of)| *of == seq).is_some();
        let waits = rx.has_kept();
        if rx.due {
            enqueue(&mut self.queued, peer, state);
        }
        waits
    }

    /// Records that the datagram of packet `seq` waits for a resource of the queue pair.
    pub(in crate::datagram) fn mark_blocked(
        &mut self,
        peer: &Peer,
        seq: u64,
        data: &[u8],
        want: Resource,
    ) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        let Some(rx) = state.rx.as_deref_mut() else {
            return;
        };
        // This is reported even if there is no memory for the datagram: the peer sends it again, and must not take this end for one that
        // does not acknowledge.
        rx.blocked_on = Some((want, seq));
        rx.due = true;
        if keep(&mut self.shares, peer, rx, seq, data) {
            self.search_at.get_or_insert(state.used + IDLE);
        }
        if state.waiting_in & want.bit() == 0 && self.blocked.of(want).len() < bounds::RD_PEERS {
            state.waiting_in |= want.bit();
            self.blocked.of(want).push_back(*peer);
        }
        enqueue(&mut self.queued, peer, state);
    }

    /// Records that the queue pair refuses the message of packet `seq`. Returns false if the peer cannot be informed yet.
    pub(in crate::datagram) fn refused(
        &mut self,
        peer: &Peer,
        seq: u64,
        data: &[u8],
        why: Status,
    ) -> bool {
        let Some(state) = self.peers.get_mut(peer) else {
            return false;
        };
        let Some(rx) = state.rx.as_deref_mut() else {
            return false;
        };
        if !self.ordered && seq != rx.next() {
            // Only the next packet can be refused. This one may be acknowledged already, so it is kept until it is
            // the next.
            if keep(&mut self.shares, peer, rx, seq, data) {
                self.search_at.get_or_insert(state.used + IDLE);
            }
            return false;
        }
        rx.refuse(why as u8);
        // The packet may have waited for a resource before. It no longer does, and must not delay other peers that wait for the resource.
        rx.blocked_on = None;
        rx.due = true;
        self.enqueue(*peer);
        true
    }

    /// Removes and returns a waiting datagram that can be delivered now.
    pub(in crate::datagram) fn take_waiting(&mut self, peer: &Peer) -> Option<(u64, Vec<u8>)> {
        let unordered = !self.ordered;
        let rx = self.peers.get_mut(peer)?.rx.as_deref_mut()?;
        let before = rx.held();
        let taken = rx.take_waiting(unordered);
        self.shares.change(peer, before, rx.held());
        taken
    }

    /// Returns a peer whose packets wait for a resource that may be available now.
    pub(in crate::datagram) fn next_blocked(&mut self, want: Resource) -> Option<Peer> {
        let peer = self.blocked.of(want).pop_front()?;
        if let Some(state) = self.peers.get_mut(&peer) {
            state.waiting_in &= !want.bit();
        }
        Some(peer)
    }

    /// Whether packets of a peer wait for a resource.
    pub(in crate::datagram) fn is_blocked(&self, peer: &Peer, want: Resource) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.blocked_on.is_some_and(|(on, _)| on == want) && rx.has_kept())
    }

    /// Whether packet `seq` of a peer waits.
    pub(in crate::datagram) fn waits(&self, peer: &Peer, seq: u64) -> bool {
        let rx = self.peers.get(peer).and_then(|s| s.rx.as_ref());
        rx.is_some_and(|rx| rx.waits(seq))
    }
}

/// The state besides the peer that a packet may change. It is borrowed separately, so that the peer is looked up
/// once.
struct RxContext<'a> {
    ordered: bool,
    secret: Secret,
    /// A quarter of the socket buffer. An acknowledgement is due after this many bytes.
    quarter: u64,
    /// The number of known peers.
    known: usize,
    shares: &'a mut Shares,
    search_at: &'a mut Option<Duration>,
    delayed_acks: &'a mut Vec<Peer>,
    queued: &'a mut VecDeque<Peer>,
    timers: &'a mut BTreeSet<(Duration, Peer)>,
    events: &'a mut VecDeque<Event>,
    spare: &'a mut Vec<Arc<Vec<u8>>>,
}

impl RxContext<'_> {
    /// Handles a packet of a known peer.
    fn take(
        mut self,
        peer: &Peer,
        state: &mut PeerState,
        packet: &Packet,
        data: Option<&[u8]>,
        now: Duration,
    ) -> RxOutcome {
        state.update_from(packet, now);
        state.unheard = false;
        let is_wanted = !state.is_proven || state.is_renewing;
        if is_wanted && packet.time_echo == state.nonce {
            state.prove(now);
        }
        let age = second(now).saturating_sub(state.proven_at);
        if state.is_proven && age >= PROOF {
            // The packets under way wait for the proof, so it is requested at once.
            state.ask |= state.has_under_way();
            state.require_new_proof(&self.secret, peer, now);
        } else if state.is_proven && !state.is_renewing && age >= PROOF - RENEWAL {
            state.nonce = self.secret.nonce(peer, now);
            state.is_renewing = true;
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

    /// Handles the acknowledgement in a packet.
    fn acknowledged(&mut self, peer: &Peer, state: &mut PeerState, packet: &Packet, now: Duration) {
        // Nothing was sent to the peer, so there is nothing that it can acknowledge.
        let Some(tx) = &mut state.tx else {
            return;
        };
        tx.silent_since = now;
        tx.set_room(state.room.into());
        // Packets that request a proof contain the nonce in place of the time, so an echo of the nonce measures nothing.
        let time_echo = if packet.time_echo == state.nonce {
            0
        } else {
            packet.time_echo
        };
        if time_echo != 0 {
            let trip = micros(now).wrapping_sub(time_echo);
            if trip < 1 << 30 {
                state.path.measured(now, Duration::from_micros(trip.into()));
            }
        }
        let near = tx.base();
        let events = &mut *self.events;
        let ack = packet.ack.map(|ack| expand(ack, near));
        tx.acknowledged(
            packet,
            time_echo,
            now,
            &mut state.path,
            self.spare,
            |tag| match events.back_mut() {
                Some(Event::Done(_, last)) if *last + 1 == tag => *last = tag,
                _ => events.push_back(Event::Done(tag, tag)),
            },
        );
        tx.note_blocked(packet.not_ready, now);
        if packet.refused != 0
            && let Some((tag, id, end)) = ack.and_then(|ack| tx.message_at(ack))
        {
            // The packets of the refused message are not sent again. The base in the next packet tells the peer to
            // skip them.
            tx.skip(end, now);
            state.ask = true;
            let status = Status::from_number(packet.refused).unwrap_or(Status::General);
            self.events.push_back(Event::Failed(*peer, tag, id, status));
        }
        tx.count(self.shares, peer);
        watch(self.timers, peer, state);
        enqueue(self.queued, peer, state);
    }

    /// Decides what to do with the datagram of a packet.
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
        // The base of the first packet tells where the peer's numbers begin.
        let start = || 1 << 32 | u64::from(packet.base);
        let rx = state
            .rx
            .get_or_insert_with(|| Box::new(Receiver::new(expected.map_or_else(start, u64::from))));
        state.expected = NonZeroU64::new(rx.next());
        let near = rx.next();
        let before = rx.held();
        let base = expand(packet.base, near);
        rx.skip(base);
        // The sender has given up the packet that waited.
        let next = rx.next();
        rx.blocked_on.take_if(|(_, of)| *of < next);
        self.shares.change(peer, before, rx.held());
        if let Some(base) = rx.skipped.take() {
            self.events.push_back(Event::Skipped(*peer, base));
        }
        rx.due |= packet.ack_now;
        // The number of packets before this one that the peer may still send again.
        let ahead = packet.seq.wrapping_sub(packet.base);
        if packet.ack_soon {
            // If the peer has many packets under way, its next packet is about to arrive, and the acknowledgement is
            // delayed until then.
            let next =
                ACK_DELAY + ACK_DELAY_PER_KILOBYTE * data.map_or(0, <[u8]>::len) as u32 / 1000;
            let wait = if ahead < PIPELINE {
                Duration::ZERO
            } else if ahead >= MANY && rx.unacknowledged < ahead / PART {
                next + ACK_DELAY_MANY
            } else {
                next
            };
            if rx.ack_by.is_none() {
                rx.ack_by = Some(now + wait);
                self.delayed_acks.push(*peer);
                crowded = self.delayed_acks.len() > 2 * self.known + 64;
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
                    // The first gap is reported at once, and later ones after some packets, since each report
                    // contains all earlier ones.
                    rx.due |= rx.runs_are_news() || rx.unacknowledged >= ACK_WITH_GAPS;
                    if !self.ordered {
                        // There must be room to store the packet number.
                        if self.shares.has_room(peer, rx.held(), receiver::RUN) {
                            outcome = RxOutcome::Deliver(seq);
                        }
                    } else if dgram::parse_covered(data).is_ok() {
                        keep(self.shares, peer, rx, seq, data);
                    }
                    self.search_at.get_or_insert(now + IDLE);
                }
            }
        }
        if rx.due {
            enqueue(self.queued, peer, state);
        }
        if crowded {
            // The list contains a peer twice if a packet has carried its first acknowledgement and a second one has become
            // due since.
            self.delayed_acks.sort_unstable();
            self.delayed_acks.dedup();
        }
        outcome
    }
}

/// Stores packet `seq` until it can be delivered. Returns false if its memory cannot be charged to the peer. A packet
/// that was taken for delivery and has to wait again is always stored: it may be acknowledged already, so its sender
/// does not send it again.
fn keep(shares: &mut Shares, peer: &Peer, rx: &mut Receiver, seq: u64, data: &[u8]) -> bool {
    let before = rx.held();
    let needs_room = !rx.waits(seq);
    if needs_room && !shares.has_room(peer, before, data.len() + receiver::KEPT + receiver::RUN) {
        return false;
    }
    rx.keep(seq, data);
    shares.change(peer, before, rx.held());
    true
}
