//! The deadlines of all peers: retransmissions, probes, and peers that are given up.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::sender::Sender;
use super::{Event, IDLE, PeerState, Reliable};
use crate::datagram::messages::Messages;
use crate::datagram::types::Peer;
use crate::verbs::wc::Status;

impl Reliable {
    /// When [`Self::handle_timeout`] should be called. `receiving`: an incomplete message of a peer has taken a receive.
    pub(in crate::datagram) fn poll_timeout(&self, receiving: bool) -> Option<Duration> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let holds = receiving || self.shares.waiting() > 0;
        let sweep = self.search_at.filter(|_| holds);
        timer.into_iter().chain(sweep).min()
    }

    /// Sets how long a peer may stay silent before it is given up.
    pub(in crate::datagram) fn set_peer_timeout(&mut self, peer_timeout: Duration) {
        self.peer_timeout = peer_timeout;
    }

    /// Records that a peer has sent the first part of a Send, which has taken a receive. If the peer stays silent, it is forgotten,
    /// so that other messages can use the receive.
    pub(in crate::datagram) fn note_receiving(&mut self, now: Duration) {
        self.search_at.get_or_insert(now + IDLE);
    }

    /// Handles the deadlines that have passed. `blocked`: how long a peer may lack a resource before it is given up; `None`:
    /// forever. `messages`: the incomplete messages of the peers.
    pub(in crate::datagram) fn handle_timeout(
        &mut self,
        now: Duration,
        blocked: Option<Duration>,
        messages: &Messages,
    ) {
        if self.search_at.is_some_and(|at| at <= now) {
            self.forget(now, |peer, s| {
                s.rx.as_deref().is_some_and(|rx| rx.held() > 0) || messages.holds_a_receive(peer)
            });
            let holds = messages.any_holds_a_receive() || self.shares.waiting() > 0;
            self.search_at = holds.then_some(now + IDLE / 4);
        }
        while let Some((at, peer)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            let peer_timeout = self.peer_timeout;
            let Some(state) = self.peers.get_mut(&peer) else {
                continue;
            };
            state.timer = None;
            let Some(tx) = &mut state.tx else {
                continue;
            };
            if tx.deadline.is_none_or(|deadline| deadline > now) {
                // The deadline has moved since the entry was made.
                watch(&mut self.timers, &peer, state);
                continue;
            }
            let lacks_resource = tx
                .blocked_on
                .zip(blocked)
                .is_some_and(|(since, most)| now.saturating_sub(since) >= most);
            let is_silent = now.saturating_sub(tx.silent_since) >= peer_timeout;
            let is_stuck = tx.is_stuck(now, peer_timeout.max(STUCK_MIN).saturating_mul(2));
            if lacks_resource || is_silent || is_stuck {
                let tx = state.take_sender(&mut self.shares, &peer);
                state.unheard = true;
                if tx.is_some_and(|tx| tx.has_answers()) {
                    // The peer may still wait for an answer, and would wait for ever.
                    state.begin_session(&self.secret, &mut self.shares, &peer, now);
                    self.events.push_back(Event::Skipped(peer, u64::MAX));
                }
                // The packet numbers are not reset. The base in the next packet tells the peer which of them are skipped.
                let why = if lacks_resource {
                    Status::RnrRetryExceeded
                } else {
                    Status::RetryExceeded
                };
                self.events.push_back(Event::Lost(peer, why));
                continue;
            }
            state.ask = true;
            // The probe sets the next deadline. Before the peer's token is known, there is no probe, and `wait` sets it.
            tx.deadline = None;
            if state.echo == 0 {
                tx.wait(now, &state.path);
            }
            self.enqueue(peer);
            self.watch(&peer);
        }
    }

    /// Probes a peer, unless packets are under way to it, which have the same effect.
    pub(in crate::datagram) fn ask(&mut self, peer: &Peer, now: Duration) {
        let Some(state) = self.peers.get_mut(peer) else {
            return;
        };
        if state.tx.is_none() {
            state.tx = Some(Box::new(Sender::new(state.next, state.room, now)));
            state.ask = true;
            enqueue(&mut self.queued, peer, state);
        }
    }

    /// Makes sure that the timer of a peer is not later than the deadline of its sender.
    pub(super) fn watch(&mut self, peer: &Peer) {
        if let Some(state) = self.peers.get_mut(peer) {
            watch(&mut self.timers, peer, state);
        }
    }

    pub(super) fn enqueue(&mut self, peer: Peer) {
        if let Some(state) = self.peers.get_mut(&peer) {
            enqueue(&mut self.queued, &peer, state);
        }
    }
}

/// A peer that answers, but acknowledges no packet for twice the peer time-out, or twice this time if that is longer, is given up: it would hold
/// the memory of the packets, and the completions of later requests to other peers.
const STUCK_MIN: Duration = Duration::from_secs(5);

/// Adds the peer to the list of those to which something can be sent.
pub(super) fn enqueue(queued: &mut VecDeque<Peer>, peer: &Peer, state: &mut PeerState) {
    if !state.queued {
        state.queued = true;
        queued.push_back(*peer);
    }
}

/// Sets the timer of a peer to the deadline of its sender. A timer that is earlier is not moved:
/// most packets postpone the deadline, and it rarely passes.
pub(super) fn watch(timers: &mut BTreeSet<(Duration, Peer)>, peer: &Peer, state: &mut PeerState) {
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
