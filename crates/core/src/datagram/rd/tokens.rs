//! Tokens: the first contact with peers, restarts of peers, and proof of their addresses.

use std::time::Duration;

use super::numbers::micros;
use super::sender::Sender;
use super::shares::prefixes;
use super::{Event, Reliable, YOUNG};
use crate::bounds;
use crate::datagram::outgoing::IpFields;
use crate::datagram::types::{Arrival, Peer};
use crate::verbs::wc::Status;
use crate::wire::rd::Packet;

impl Reliable {
    /// Handles a packet whose tokens are not those of a known peer. Returns true if the peer is known from now on.
    pub(super) fn handle_unknown_token(
        &mut self,
        peer: &Peer,
        arrival: &Arrival,
        packet: &Packet,
        now: Duration,
    ) -> bool {
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
        // A queue pair other than the known one has to echo a token made for this case: the old one may be alive, and
        // the packet may be forged.
        let restarts = known.is_some_and(|s| s.echo != 0 && s.echo != packet.token);
        let instead = if restarts { packet.token } else { 0 };
        let required = known.filter(|_| !restarts).map(|s| s.token);
        // After a new session has begun, the old token is wrong even if it was issued within the last minute.
        let one_only = known.is_some_and(|s| s.renewed) && !restarts;
        let issued = || {
            self.secret
                .has_issued_token(peer, instead, packet.echo, now)
        };
        let right = required == Some(packet.echo) || !one_only && issued();
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
        let way = IpFields {
            from: arrival.to,
            ..IpFields::default()
        };
        if !self.enter(peer, way, true, now) {
            return false;
        }
        self.recognize(peer, packet, now);
        if let Some(state) = self.peers.get_mut(peer) {
            state.token = packet.echo;
            if is_new || restarts {
                // The token shows that the peer received at its address within the last minute.
                state.require_new_proof(&self.secret, peer, now);
            }
        }
        true
    }

    /// Returns whether a token from `peer` has to be treated as a guess: too many packets with wrong tokens came in this second from its
    /// host, or from hosts in the same bucket.
    fn is_guessed(&mut self, peer: &Peer, now: Duration) -> bool {
        if self.bad_second != now.as_secs() {
            self.bad_second = now.as_secs();
            self.bad_echoes.fill(0);
        }
        let at = usize::from(self.secret.bucket(&prefixes(peer).0));
        self.bad_echoes
            .get(at)
            .is_some_and(|n| *n >= bounds::RD_BAD_ECHOES)
    }

    fn note_bad_echo(&mut self, peer: &Peer) {
        let at = usize::from(self.secret.bucket(&prefixes(peer).0));
        if let Some(many) = self.bad_echoes.get_mut(at) {
            *many = many.saturating_add(1);
            if *many == bounds::RD_BAD_ECHOES {
                self.guessed = Some(prefixes(peer).0);
            }
        }
    }

    /// Sends the token of this end in answer to a packet that echoes no valid token. No state of the peer is kept.
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
            instance: self.instance_for(peer),
            window: self.room,
            time: micros(now),
            time_echo: packet.time,
            challenge: true,
            ..Packet::default()
        };
        self.challenges.push_back((*peer, arrival.to, answer));
    }

    /// The instance number in packets to a peer, which may be unknown.
    fn instance_for(&self, peer: &Peer) -> u32 {
        let known = self.peers.get(peer);
        known.map_or(self.instance, |s| s.own_instance(self.instance))
    }

    /// Handles a challenge of the peer. It is accepted if it echoes the token of this end and if this end has sent a
    /// packet. If the peer had another token before, this end sends a packet with a token made for this case, and accepts
    /// only a challenge that echoes this token. So a forged challenge has no effect.
    fn challenged(&mut self, peer: &Peer, arrival: &Arrival, packet: &Packet, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.tx.is_none() || packet.token == state.echo {
            return;
        }
        let asked = state.echo != 0
            && self
                .secret
                .has_issued_token(peer, packet.token, packet.echo, now);
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
                instance: state.own_instance(self.instance),
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
            state.update_from(packet, now);
            state.prove(now);
            let room = state.room;
            if let Some(tx) = &mut state.tx {
                tx.set_room(room.into());
                tx.silent_since = now;
                tx.deadline = None;
                // Packets that count as lost are sent again now. `wait` sets the deadline at which a probe is due.
                if !tx.is_empty() {
                    tx.wait(now, &state.path);
                }
            }
        }
        self.enqueue(*peer);
        self.watch(peer);
    }

    /// Stores the peer's token from `packet`. The peer was not known before, or was replaced by another queue pair,
    /// or has forgotten this one.
    fn recognize(&mut self, peer: &Peer, packet: &Packet, now: Duration) {
        let room = self.room;
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.echo == packet.token {
            return;
        }
        state.unheard = false;
        if state.echo == 0 {
            if let Some(tx) = &mut state.tx
                && tx.is_empty()
            {
                // The packets that waited for the token can be sent.
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
        // The peer forgot this end after a minute without packets from this end, so recent packets have not reached the peer.
        let is_young = |tx: &Sender| tx.oldest().is_some_and(|at| now.saturating_sub(at) < YOUNG);
        match tx {
            // If a part of the oldest message was acknowledged, the peer has forgotten this part, so the rest is useless.
            Some(tx) if forgot_us && is_young(tx) && tx.begins_message() => tx.start_again(),
            Some(_) => {
                state.take_sender(&mut self.shares, peer);
                self.events
                    .push_back(Event::Lost(*peer, Status::RemoteAborted));
            }
            None => {
                state.take_sender(&mut self.shares, peer);
                self.events.push_back(Event::Restarted(*peer));
            }
        }
    }
}
