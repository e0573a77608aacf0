//! Sends messages of reliable queue pairs. Each peer has a queue, and the queues are served in turn.
//!
//! In its *turn*, a queue sends a limited number of datagrams. Then the next queue has its turn.

use crate::datagram::DatagramQp;
use crate::datagram::outgoing::{
    ANSWER, Current, IpFields, Taken, has_room, ip_fields_of, peer_of,
};
use crate::datagram::types::{Bytes, Peer, SendEffect, TxDatagram};

/// Largest number of datagrams to a peer in one turn.
const PEER_TURN: usize = 16;
/// Bytes to a peer after which its turn ends. Without this limit, [`PEER_TURN`] datagrams of the largest size would
/// be a megabyte.
const PEER_TURN_BYTES: usize = 64 * 1024;
/// Largest number of requests in all queues. Later requests stay in the send queue.
const QUEUED_REQUESTS_MAX: usize = 4096;

impl DatagramQp {
    pub(super) fn poll_lanes(&mut self, out: &mut Vec<TxDatagram>) {
        let mut bytes = 0;
        self.poll_reliable(&mut bytes, out);
        loop {
            while self.queued_requests < QUEUED_REQUESTS_MAX && has_room(bytes, out) {
                if self.send_single(&mut bytes, out) {
                    continue;
                }
                match self.take() {
                    Taken::Message(current) => self.cut_at_once(current, &mut bytes, out),
                    Taken::Done => {}
                    Taken::Nothing => break,
                }
            }
            let Some(peer) = self.ready.front().copied().filter(|_| has_room(bytes, out)) else {
                break;
            };
            let goes_on = self.peer_turn(&peer, &mut bytes, out);
            // The list is empty if the queue pair has failed in this turn.
            let Some(peer) = self.ready.pop_front() else {
                break;
            };
            if goes_on {
                self.ready.push_back(peer);
            } else if let Some(to_peer) = self.peer_queues.get_mut(&peer) {
                to_peer.ready = false;
            }
        }
        // The turns may have found peers that are not known yet: the reliability layer sends requests for a token to
        // them.
        self.poll_reliable(&mut bytes, out);
        self.handle_rd_events();
    }

    /// Sends the packets of the reliability layer: acknowledgements, probes and packets that are sent again.
    pub(super) fn poll_reliable(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) {
        let now = self.now;
        while has_room(*bytes, out) {
            let packet = self.rd.as_deref_mut().and_then(|rd| rd.poll(now));
            let Some((peer, way, packet)) = packet else {
                break;
            };
            *bytes += packet.len();
            self.hand_out(&peer, way, packet, out);
        }
    }

    /// Sends up to one turn of datagrams to a peer. Returns false if nothing more can be sent to it now.
    pub(super) fn peer_turn(
        &mut self,
        peer: &Peer,
        bytes: &mut usize,
        out: &mut Vec<TxDatagram>,
    ) -> bool {
        let (begin, most) = (out.len(), *bytes + PEER_TURN_BYTES);
        let in_turn = |bytes: usize, out: &Vec<TxDatagram>| {
            out.len() < begin + PEER_TURN && bytes < most && has_room(bytes, out)
        };
        while in_turn(*bytes, out) {
            let Some((mut current, way)) = self.next_of(peer) else {
                return false;
            };
            let mut goes_on = true;
            let mut open = true;
            while goes_on && open && in_turn(*bytes, out) {
                goes_on = self.cut(&mut current, bytes, out);
                open = goes_on && self.has_window(peer, way, &current);
            }
            if goes_on {
                self.queue_message(current, true, true);
            }
            if !open && goes_on {
                return false;
            }
        }
        true
    }

    /// Sends as much of a new message as possible; the rest enters the queue of its peer. The whole message enters the
    /// queue if other messages wait already.
    pub(super) fn cut_at_once(
        &mut self,
        mut current: Current,
        bytes: &mut usize,
        out: &mut Vec<TxDatagram>,
    ) {
        let peer = peer_of(&current.to);
        if !self.ready.is_empty() || self.peer_queues.contains_key(&peer) {
            self.queue_message(current, false, true);
            return;
        }
        let way = ip_fields_of(&current.to);
        if !self.has_window(&peer, way, &current) {
            // An acknowledgement makes the queue ready.
            self.queue_message(current, false, false);
            return;
        }
        let (mut goes_on, mut open) = (true, true);
        while goes_on && open && has_room(*bytes, out) {
            goes_on = self.cut(&mut current, bytes, out);
            open = goes_on && self.has_window(&peer, way, &current);
        }
        if goes_on {
            self.queue_message(current, true, open);
        }
    }

    /// Whether the next datagram of a message may be sent to the peer.
    pub(super) fn has_window(&mut self, peer: &Peer, way: IpFields, message: &Current) -> bool {
        self.may_send(peer, way, message.next_len(), message.tag & ANSWER != 0)
    }

    /// Whether a datagram of `len` bytes may be sent to the peer.
    pub(super) fn may_send(
        &mut self,
        peer: &Peer,
        way: IpFields,
        len: usize,
        is_answer: bool,
    ) -> bool {
        let now = self.now;
        let rd = self.rd.as_deref_mut();
        rd.is_some_and(|rd| rd.may_send(peer, way, len, is_answer, now))
    }

    /// Removes the first message from the queue of `peer`, if its next datagram may be sent now.
    pub(super) fn next_of(&mut self, peer: &Peer) -> Option<(Current, IpFields)> {
        // RTR is enough: a queue pair in RTR has no requests to send, but it answers those of its peers.
        if self.receives().is_err() {
            return None;
        }
        let to_peer = self.peer_queues.get_mut(peer)?;
        let Some(first) = to_peer.queue.front() else {
            self.peer_queues.remove(peer);
            return None;
        };
        let (way, len) = (ip_fields_of(&first.to), first.next_len());
        let is_answer = first.tag & ANSWER != 0;
        if !self.may_send(peer, way, len, is_answer) {
            // An acknowledgement makes the queue ready again.
            return None;
        }
        let to_peer = self.peer_queues.get_mut(peer)?;
        let current = to_peer.queue.pop_front()?;
        if current.tag & ANSWER == 0 {
            self.queued_requests -= 1;
        } else {
            self.queued_answers -= 1;
            to_peer.answers -= 1;
        }
        Some((current, way))
    }

    /// Adds a message to the queue of its peer: at the end, or at the front if a part of it was sent already. `ready`:
    /// its next datagram may be sent now.
    pub(super) fn queue_message(&mut self, current: Current, front: bool, ready: bool) {
        let peer = peer_of(&current.to);
        let to_peer = self.peer_queues.entry(peer).or_default();
        if current.tag & ANSWER == 0 {
            self.queued_requests += 1;
        } else {
            self.queued_answers += 1;
            to_peer.answers += 1;
        }
        if front {
            to_peer.queue.push_front(current);
        } else {
            to_peer.queue.push_back(current);
        }
        if ready && !to_peer.ready {
            to_peer.ready = true;
            self.ready.push_back(peer);
        }
    }

    /// Marks the queue of a peer as ready to send.
    pub(in crate::datagram) fn make_ready(&mut self, peer: &Peer) {
        if let Some(to_peer) = self.peer_queues.get_mut(peer)
            && !to_peer.ready
        {
            to_peer.ready = true;
            self.ready.push_back(*peer);
        }
    }

    pub(super) fn hand_out(
        &mut self,
        peer: &Peer,
        way: IpFields,
        bytes: Bytes,
        out: &mut Vec<TxDatagram>,
    ) {
        self.unwritten.push(SendEffect::Nothing);
        out.push(TxDatagram {
            to: peer.0,
            from: way.from,
            hop_limit: way.hop_limit,
            traffic_class: way.traffic_class,
            bytes,
        });
    }
}
