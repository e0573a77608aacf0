//! Sends packets: whether a packet may be sent to a peer now, and its header.
//!
//! The parent module describes tokens and proof of addresses. A *run* is a range of packet numbers that have arrived
//! although an earlier packet is missing.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use super::numbers::micros;
use super::receiver::Receiver;
use super::sender::{CLOSED, Outgoing, Sender};
use super::timers::{enqueue, watch};
use super::{Event, PeerState, RdCounts, Reliable, sender};
use crate::datagram::outgoing::IpFields;
use crate::datagram::types::{Bytes, Part, Peer};
use crate::verbs::wc::Status;
use crate::wire::dgram;
use crate::wire::rd::Packet;

impl Reliable {
    /// Whether a datagram of `len` bytes may be sent to `peer` now. A peer that is not known is asked for its token
    /// first. A peer whose address is not proven has to prove it before much is sent. After packets to a peer were given up, a
    /// packet has to arrive from it before more is sent.
    pub(in crate::datagram) fn may_send(
        &mut self,
        peer: &Peer,
        way: IpFields,
        len: usize,
        is_answer: bool,
        now: Duration,
    ) -> bool {
        let room = self.room;
        if let Some(state) = self.peers.get_mut(peer)
            && state.echo != 0
        {
            state.used = now;
            if state.unheard || !state.credit_allows(Packet::LEN + len + dgram::CRC) {
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
                // The peer is probed from time to time, to learn whether its window is open again.
                let tx = state.sender(now);
                if tx.deadline.is_none() {
                    tx.deadline = Some(now + CLOSED);
                    watch(&mut self.timers, peer, state);
                }
                return false;
            }
            let is_open = match &mut state.tx {
                Some(tx) => tx.has_window(&state.path),
                None => true,
            };
            let len = Packet::LEN + len + dgram::CRC;
            if is_open
                && is_answer
                && !Sender::may_keep_answer(state.tx.as_deref(), &self.shares, peer, len)
            {
                // The peer is asked from time to time, and its answer makes this end try again.
                let tx = state.sender(now);
                if tx.deadline.is_none() {
                    tx.deadline = Some(now + CLOSED);
                    watch(&mut self.timers, peer, state);
                }
                return false;
            }
            return is_open;
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

    /// Makes a packet that contains a datagram, and returns it. `packet` begins with space for the packet's header, which
    /// this function fills in; the datagram without its CRC follows.
    pub(in crate::datagram) fn push(
        &mut self,
        peer: &Peer,
        mut packet: Vec<u8>,
        Part {
            tag,
            last,
            alone,
            ack_later,
            long,
        }: Part,
        now: Duration,
    ) -> Option<(IpFields, Bytes)> {
        let (me, room) = ((self.index, self.instance), self.room);
        let state = self.peers.get_mut(peer)?;
        state.used = now;
        state.spend(packet.len() + dgram::CRC);
        let (spare, next, room_there) = (&mut self.spare_sender, state.next, state.room);
        let tx = state
            .tx
            .get_or_insert_with(|| Sender::boxed(spare.take(), next, room_there, now));
        let ask = tx.push(packet.len() + dgram::CRC, alone, now, &mut state.path);
        let mut head = header(state, peer, me, room, now);
        head.seq = state.next as u32;
        head.ack_now = ask || alone && long && !ack_later;
        head.ack_soon = alone && !ack_later;
        // Runs are sent in a separate packet, so that this packet does not exceed the MTU.
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
        if let Some(tx) = &mut state.tx {
            tx.count(&mut self.shares, peer);
        }
        if let (true, Some(rx)) = (whole, &mut state.rx) {
            rx.acknowledges();
        }
        if armed {
            watch(&mut self.timers, peer, state);
        }
        Some((state.way, Bytes::Shared(kept)))
    }

    /// Returns the next packet without new data: a challenge, an acknowledgement, a retransmission or a probe.
    pub(in crate::datagram) fn poll(&mut self, now: Duration) -> Option<(Peer, IpFields, Bytes)> {
        if let Some((peer, from, packet)) = self.challenges.pop_front() {
            let way = IpFields {
                from,
                ..IpFields::default()
            };
            let nothing = Outgoing { seq: 0, data: None };
            return Some((peer, way, wrap(packet, &nothing).into()));
        }
        while let Some(peer) = self.queued.front().copied() {
            if let Some((way, bytes)) = self.poll_peer(&peer, now) {
                return Some((peer, way, bytes.into()));
            }
            self.queued.pop_front();
            let Some(state) = self.peers.get_mut(&peer) else {
                continue;
            };
            state.queued = false;
            if state.rx.as_ref().is_some_and(|rx| rx.is_idle()) {
                state.expected = state.rx.take().and_then(|rx| NonZeroU64::new(rx.next()));
            }
            let over = |tx: &Sender| tx.is_empty() && tx.deadline.is_none();
            if state.tx.as_deref().is_some_and(over) && state.echo != 0 {
                let tx = state.take_sender(&mut self.shares, &peer);
                self.spare_sender = tx.filter(|tx| tx.is_small());
            }
        }
        None
    }

    fn poll_peer(&mut self, peer: &Peer, now: Duration) -> Option<(IpFields, Vec<u8>)> {
        let (me, room) = ((self.index, self.instance), self.room);
        let state = self.peers.get_mut(peer)?;
        let counts = &mut self.counts;
        let credit_allows = state.is_proven || {
            let next = state.tx.as_deref().and_then(Sender::next_len);
            next.is_none_or(|len| state.credit_allows(len))
        };
        let ask = std::mem::take(&mut state.ask);
        let lost = |tx: &Sender| tx.has_lost() && credit_allows;
        let due = state.rx.as_ref().is_some_and(|rx| rx.due);
        if !ask && !due && !state.tx.as_deref().is_some_and(lost) {
            return None;
        }
        let mut packet = header(state, peer, me, room, now);
        // A packet with data has no room for runs. They are sent next.
        let mut whole = true;
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
                // The peer's token is not known yet: the packet has the token of this end, and no data.
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
                Some(wrap(packet, &tx.probe(credit_allows, now, &mut state.path)))
            }
            Some(tx) if credit_allows => match tx.again(now, &state.path) {
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
            // The packet is dropped, as if it were lost in the network.
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

    /// Passes the buffers of packets that were acknowledged to `give`.
    pub(in crate::datagram) fn recycle(&mut self, mut give: impl FnMut(Vec<u8>)) {
        for mut packet in self.spare.drain(..) {
            // A datagram to send may still refer to the packet. Its buffer is not reused then.
            if let Some(bytes) = Arc::get_mut(&mut packet) {
                give(std::mem::take(bytes));
                if self.shells.len() < sender::SPARE {
                    self.shells.push(packet);
                }
            }
        }
    }

    /// Whether acknowledgements wait for packets with data that can carry them.
    pub(in crate::datagram) fn ack_due(&self) -> bool {
        !self.delayed_acks.is_empty()
    }

    /// Sends acknowledgements in separate packets if their delay has ended by `now`.
    pub(in crate::datagram) fn flush(&mut self, now: Duration) {
        let mut later = std::mem::take(&mut self.delayed_acks);
        later.retain(|peer| {
            let Some(state) = self.peers.get_mut(peer) else {
                return false;
            };
            let Some(at) = state
                .rx
                .as_mut()
                .and_then(|rx| rx.ack_by.map(|at| (rx, at)))
            else {
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
        self.delayed_acks = later;
    }

    /// Whether [`Self::poll`] may return a packet.
    pub(in crate::datagram) fn wants_tx(&self) -> bool {
        !self.queued.is_empty() || !self.challenges.is_empty()
    }
}

/// Returns the header of the next packet to a peer.
fn header(
    state: &PeerState,
    peer: &Peer,
    (index, instance): (u8, u32),
    room: u32,
    now: Duration,
) -> Packet {
    let rx = state.rx.as_deref();
    let next = rx
        .map(Receiver::next)
        .or_else(|| state.expected.map(u64::from));
    // The peer's time is returned only with an acknowledgement that is due. Otherwise the peer would count the time
    // for which this end was idle as part of the round trip.
    let answers = rx.filter(|rx| rx.due || rx.ack_by.is_some());
    Packet {
        token: state.token,
        echo: state.echo,
        seq: 0,
        base: state.tx.as_ref().map_or(state.next, |tx| tx.base()) as u32,
        dst_index: peer.1,
        src_index: index,
        ack: next.map(|next| next as u32),
        instance: state.own_instance(instance),
        window: room,
        time: if state.is_proven && !state.is_renewing {
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
