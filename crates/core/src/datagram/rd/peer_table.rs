//! The table of peers: when a peer is added, and which peers are forgotten.

use std::time::Duration;

use super::congestion::Congestion;
use super::{Event, IDLE, PeerState, Reliable, second};
use crate::bounds;
use crate::datagram::outgoing::IpFields;
use crate::datagram::types::Peer;

/// Minimum time between two searches of a full table. Without it, each packet of a flood would cause a search.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

impl Reliable {
    /// Adds a peer. Returns false if there is no room for one more. `is_incoming`: the peer sent the first packet.
    pub(super) fn enter(
        &mut self,
        peer: &Peer,
        way: IpFields,
        is_incoming: bool,
        now: Duration,
    ) -> bool {
        if let Some(state) = self.peers.get_mut(peer) {
            state.used = now;
            return true;
        }
        if !self.shares.has_room_for_peer(peer, is_incoming) {
            if now.saturating_sub(self.last_search) < SEARCH_INTERVAL {
                return false;
            }
            self.last_search = now;
            self.forget_idle(now);
            if !self.shares.has_room_for_peer(peer, is_incoming) {
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
            is_renewing: false,
            proven_at: second(now),
            credit: 0,
            // Numbers begin above 2^32, so that the expansion of a truncated number that is earlier than this one is not below 0.
            next: self.first_number,
            expected: None,
            tx: None,
            rx: None,
            path: Congestion::new(),
            room: bounds::DATAGRAM_WINDOW,
            used: now,
            queued: false,
            waiting_in: 0,
            ask: false,
            renewed: false,
            unheard: false,
            timer: None,
        };
        self.peers.insert(*peer, state);
        true
    }

    /// Forgets peers with which no packet was exchanged for [`IDLE`], unless packets are under way to them. Their
    /// incomplete messages and waiting packets are dropped. Such a peer may still remember this queue pair, so the packet numbers
    /// of a new entry are larger than all that were sent before.
    pub(super) fn forget_idle(&mut self, now: Duration) {
        self.forget(now, |_, _| true);
        self.last_search = now;
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

    /// Forgets those idle peers that `which` selects (see [`Self::forget_idle`]).
    pub(super) fn forget(&mut self, now: Duration, which: impl Fn(&Peer, &PeerState) -> bool) {
        let Self {
            peers,
            shares,
            events,
            first_number,
            ..
        } = self;
        peers.retain(|peer, s| {
            let stays = s.has_under_way() || now.saturating_sub(s.used) < IDLE || !which(peer, s);
            if !stays {
                *first_number = (*first_number).max(s.next);
                if let Some(rx) = s.rx.take() {
                    shares.change(peer, rx.held(), 0);
                }
                s.take_sender(shares, peer);
                shares.leave(peer);
                if s.expected.is_some() {
                    // The rest of its incomplete messages will not arrive.
                    events.push_back(Event::Skipped(*peer, u64::MAX));
                }
            }
            stays
        });
    }
}
