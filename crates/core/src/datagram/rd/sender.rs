//! The unacknowledged packets to one peer.
//!
//! A packet keeps its number when it is sent again, and its datagram is kept until it is acknowledged. Losses
//! are detected as in RFC 8985 (RACK): a packet is lost if a packet has arrived that was sent sufficiently
//! later (by time, or by `OVERTAKEN` transmissions). If no acknowledgement arrives at all, a probe is sent.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::ack::{ACK_EACH, ACK_MOST};
use super::congestion::{Acked, Congestion};
use super::numbers::{expand as expand_near, micros};
use super::receiver::AHEAD;
use super::shares::Shares;
use crate::bounds;
use crate::datagram::flow::charge;
use crate::datagram::outgoing::ANSWER;
use crate::datagram::types::{Peer, Tag};
use smallvec::SmallVec;

use crate::wire::dgram::{self, CRC};
use crate::wire::rd::Packet;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    UnderWay,
    Lost,
    Arrived,
}

#[derive(Debug)]
struct Sent {
    /// The packet as it was first sent.
    packet: Arc<Vec<u8>>,
    /// The message that the packet belongs to, and whether it is the last packet of that message.
    tag: Option<Tag>,
    last: bool,
    state: State,
    /// Whether the packet was sent more than once.
    again: bool,
    /// Sequence number of the transmission, over all packets.
    order: u64,
    at: Duration,
    /// When the packet was first sent.
    first_at: Duration,
    /// The state of the sender at this transmission: its count of delivered bytes, when that count was
    /// reached, and the transmission time of the newest delivered packet.
    delivered: u64,
    delivered_at: Duration,
    before: Duration,
}

impl Sent {
    /// The values from which a rate is computed when the packet is acknowledged.
    fn sample(&self) -> Sample {
        Sample {
            order: self.order,
            at: self.at,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            before: self.before,
        }
    }
}

/// The values of a packet's transmission from which rate and losses are computed when the packet has arrived.
#[derive(Debug, Clone, Copy)]
struct Sample {
    order: u64,
    at: Duration,
    delivered: u64,
    delivered_at: Duration,
    before: Duration,
}

impl Sent {
    /// Whether the packet belongs to an answer.
    fn is_answer(&self) -> bool {
        self.tag.is_some_and(|tag| tag & ANSWER != 0)
    }

    /// The datagram in the packet.
    fn data(&self) -> &[u8] {
        let end = self.packet.len().saturating_sub(CRC);
        self.packet.get(Packet::LEN..end).unwrap_or(&[])
    }
}

/// The send state of one peer.
#[derive(Debug)]
pub(super) struct Sender {
    sent: VecDeque<Sent>,
    /// Number of the front packet.
    first: u64,
    /// Bytes under way, and the part of the peer's socket buffer that they use (see [`charge`]).
    flying: u64,
    charge: u64,
    lost: usize,
    /// No packet before this number is lost.
    lost_from: u64,
    /// All ranges of packet numbers beyond the first missing packet that the peer has reported as arrived: the start of each, and its end.
    /// They do not overlap, and a packet in them is never looked at again.
    reported: BTreeMap<u64, u64>,
    /// The bytes of all packets in `sent`, and those of answers.
    bytes: u64,
    answer_bytes: usize,
    /// The bytes that `Shares` counts for the answers.
    counted: usize,
    /// The size of the peer's socket buffer, in the unit of [`charge`].
    room: u64,
    order: u64,
    /// Transmissions in the order of sending: number of the transmission, and number of its packet. Those of
    /// lost and acknowledged packets are removed when they reach the front.
    transmissions: VecDeque<(u64, u64)>,
    delivered: u64,
    delivered_at: Duration,
    /// When the newest delivered packet was sent.
    newest_at: Duration,
    /// Whether the program has limited the rate since nothing was under way: each packet was sent alone, and the window was never full.
    app_limited: bool,
    /// Probes since a packet was last newly acknowledged.
    probes: u32,
    /// When to send a probe.
    pub(super) deadline: Option<Duration>,
    /// When the peer's last packet arrived, or, if that is later, when this end began to wait for the peer.
    pub(super) silent_since: Duration,
    /// When a packet was last acknowledged, or became the only one.
    progress_at: Duration,
    /// Since when the peer reports that it lacks a receive, or another resource for the next packet.
    pub(super) blocked_on: Option<Duration>,
    /// When it has first reported this since the last packet was acknowledged.
    first_blocked: Option<Duration>,
    /// Packets since the last one that requested an acknowledgement.
    unasked: u32,
}

/// A packet to send: its number and its datagram.
pub(super) struct Outgoing<'a> {
    pub(super) seq: u64,
    pub(super) data: Option<&'a [u8]>,
}

impl Sender {
    pub(super) fn new(next: u64, room: u32, now: Duration) -> Self {
        Self {
            sent: VecDeque::new(),
            first: next,
            flying: 0,
            charge: 0,
            lost: 0,
            lost_from: next,
            reported: BTreeMap::new(),
            bytes: 0,
            answer_bytes: 0,
            counted: 0,
            room: room.into(),
            order: 0,
            transmissions: VecDeque::new(),
            delivered: 0,
            delivered_at: now,
            newest_at: now,
            app_limited: true,
            probes: 0,
            deadline: None,
            silent_since: now,
            progress_at: now,
            blocked_on: None,
            first_blocked: None,
            unasked: 0,
        }
    }

    /// Returns a new sender in the memory of another one, if there is one. In a dialogue of short messages each message has a new
    /// sender, so this saves allocations.
    pub(super) fn boxed(
        spare: Option<Box<Self>>,
        next: u64,
        room: u32,
        now: Duration,
    ) -> Box<Self> {
        let new = Self::new(next, room, now);
        let Some(mut this) = spare else {
            return Box::new(new);
        };
        let (mut sent, mut transmissions) = (
            std::mem::take(&mut this.sent),
            std::mem::take(&mut this.transmissions),
        );
        sent.clear();
        transmissions.clear();
        *this = Self {
            sent,
            transmissions,
            ..new
        };
        this
    }

    /// Whether the lists of this sender occupy little memory.
    pub(super) fn is_small(&self) -> bool {
        self.sent.capacity().max(self.transmissions.capacity()) <= 128
    }

    /// The first packet that is not acknowledged.
    pub(super) fn base(&self) -> u64 {
        self.first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Whether packets are lost and have not been sent again.
    pub(super) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Whether a new packet may be sent.
    pub(super) fn has_window(&mut self, cc: &Congestion) -> bool {
        let open = self.lost == 0
            && self.room > 0
            // A peer that acknowledges all packets but the first would otherwise make this end keep any number of them.
            && (self.sent.len() as u64) < AHEAD
            && self.bytes < bounds::RD_SENT_PEER
            && (self.flying == 0 || (self.flying < cc.window() && self.charge < self.room));
        if !open {
            self.app_limited = false;
        }
        open
    }

    /// Whether there is memory for an answer of `len` more bytes to a peer. `this`: the sender to the peer, if there is one.
    pub(super) fn may_keep_answer(
        this: Option<&Self>,
        shares: &Shares,
        peer: &Peer,
        len: usize,
    ) -> bool {
        let (bytes, counted) = this.map_or((0, 0), |tx| (tx.answer_bytes, tx.counted));
        let wanted = counted_for(bytes + len);
        wanted <= counted || shares.has_room_for_answer(peer, wanted - counted)
    }

    /// Counts the memory of the answers under way. Called after packets were added or removed.
    pub(super) fn count(&mut self, shares: &mut Shares, peer: &Peer) {
        let wanted = counted_for(self.answer_bytes);
        if wanted != self.counted {
            shares.change_answers(peer, self.counted, wanted);
            self.counted = wanted;
        }
    }

    /// The bytes that are counted for the answers under way.
    pub(super) fn counted(&self) -> usize {
        self.counted
    }

    /// The bytes of the answers under way, counted anew.
    pub(super) fn counted_anew(&self) -> usize {
        let answers = self.sent.iter().filter(|s| s.is_answer());
        counted_for(answers.map(|s| s.packet.len()).sum())
    }

    /// Whether the peer has acknowledged no packet for the time `most`, and does not report that it lacks a resource. A peer whose
    /// window is 0 gets at least [`CLOSED_MIN`].
    pub(super) fn is_stuck(&self, now: Duration, most: Duration) -> bool {
        let most = if self.room == 0 {
            most.max(CLOSED_MIN)
        } else {
            most
        };
        !self.sent.is_empty()
            && self.blocked_on.is_none()
            && now.saturating_sub(self.progress_at) >= most
    }

    /// Records whether the peer lacks a resource for the next packet.
    pub(super) fn note_blocked(&mut self, is_blocked: bool, now: Duration) {
        // A peer that says the opposite now and then, and acknowledges nothing, must not begin its time anew.
        self.blocked_on = is_blocked.then(|| *self.first_blocked.get_or_insert(now));
    }

    /// Removes the oldest packet.
    fn pop(&mut self) -> Option<Sent> {
        let sent = self.sent.pop_front()?;
        self.first += 1;
        self.bytes -= sent.packet.len() as u64;
        if sent.is_answer() {
            self.answer_bytes -= sent.packet.len();
        }
        Some(sent)
    }

    fn progressed(&mut self, now: Duration) {
        self.progress_at = now;
        self.first_blocked = None;
    }

    /// Counts a new packet of `len` bytes. `alone`: no other packet follows at once. Returns whether the packet should request
    /// an immediate acknowledgement.
    /// The caller calls [`Self::keep`] next.
    pub(super) fn push(
        &mut self,
        len: usize,
        alone: bool,
        now: Duration,
        cc: &mut Congestion,
    ) -> bool {
        let size = len as u64;
        if self.sent.is_empty() {
            // Nothing was under way, so the silence of the peer is measured from now.
            self.silent_since = now;
            self.progressed(now);
            self.delivered_at = now;
            self.newest_at = now;
            self.app_limited = true;
        }
        self.order += 1;
        self.flying += size;
        self.charge += u64::from(charge(len));
        cc.sent(size);
        self.unasked += 1;
        let full = self.flying + size >= cc.window() || self.charge * 2 >= self.room;
        // Several acknowledgements in each round trip are enough: each costs both ends as much as a packet.
        let ask = self.unasked >= ACK_EACH && self.unasked >= self.together(len, cc)
            || full && self.unasked >= self.under_way(len, 4).clamp(4, ACK_EACH);
        if ask {
            self.unasked = 0;
        }
        if !alone {
            self.app_limited = false;
        }
        ask
    }

    /// Returns the number of packets under way divided by `part`. Assumes that each packet has `len` bytes.
    fn under_way(&self, len: usize, part: u32) -> u32 {
        let bytes = u32::try_from(self.flying).unwrap_or(u32::MAX);
        let len = u32::try_from(len).unwrap_or(u32::MAX).max(1);
        bytes / len / part
    }

    /// The number of packets after which an acknowledgement is requested. On a long path acknowledgements trigger the
    /// sending of further packets, so more of them are needed.
    fn together(&self, len: usize, cc: &Congestion) -> u32 {
        if cc.is_short() {
            self.under_way(len, 2).clamp(ACK_EACH, ACK_MOST)
        } else {
            ACK_EACH
        }
    }

    /// Stores the packet until it is acknowledged. Returns whether the deadline has changed.
    pub(super) fn keep(
        &mut self,
        packet: Arc<Vec<u8>>,
        tag: Option<Tag>,
        last: bool,
        now: Duration,
        cc: &Congestion,
    ) -> bool {
        let seq = self.first + self.sent.len() as u64;
        // Packets that are sent at the same time share the deadline.
        let is_more = self.sent.back().is_some_and(|s| s.at == now) && self.deadline.is_some();
        self.transmissions.push_back((self.order, seq));
        let sent = Sent {
            packet,
            tag,
            last,
            state: State::UnderWay,
            again: false,
            order: self.order,
            at: now,
            first_at: now,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            before: self.newest_at,
        };
        self.bytes += sent.packet.len() as u64;
        if sent.is_answer() {
            self.answer_bytes += sent.packet.len();
        }
        self.sent.push_back(sent);
        if !is_more {
            self.arm(now, cc);
        }
        !is_more
    }

    fn arm(&mut self, now: Duration, cc: &Congestion) {
        let wait = if self.room == 0 {
            // The peer answers, but does not report when its window opens again.
            cc.round_trip().map_or(CLOSED, |trip| trip.max(CLOSED))
        } else {
            cc.probe_timeout().min(MAX_PROBE_TIMEOUT) * (1 << self.probes.min(6))
        };
        self.deadline = Some(now + wait.min(MAX_PROBE_TIMEOUT));
    }

    /// Handles an acknowledgement. Calls `done` with each message that is acknowledged completely, and moves
    /// acknowledged packets to `spare`. `answers`: the time at which the packet was sent that `packet` answers, 0 if unknown. Returns whether any
    /// packet was newly acknowledged.
    pub(super) fn acknowledged(
        &mut self,
        packet: &Packet,
        answers: u32,
        now: Duration,
        cc: &mut Congestion,
        spare: &mut Vec<Arc<Vec<u8>>>,
        mut done: impl FnMut(Tag),
    ) -> bool {
        let near = self.first;
        let expand = |n: u32| expand_near(n, near);
        let ack = packet.ack.map_or(near, expand);
        let runs = &packet.arrived;
        let end = self.first + self.sent.len() as u64;
        let ack = ack.min(end);
        let mut acked = Acked::default();
        // The newest of the packets that this acknowledgement adds. Rate and losses are computed from it.
        let mut newest: Option<Sample> = None;
        let mut arrived = |s: &mut Sent, flying: &mut u64, charged: &mut u64, lost: &mut usize| {
            match s.state {
                State::Arrived => return,
                State::Lost => *lost -= 1,
                State::UnderWay => {
                    *flying -= s.packet.len() as u64;
                    *charged -= u64::from(charge(s.packet.len()));
                }
            }
            s.state = State::Arrived;
            acked.bytes += s.packet.len() as u64;
            // If the packet was sent more than once, the first transmission may be the one that arrived. Then nothing
            // can be concluded about packets that were sent between the two transmissions.
            let ahead = answers.wrapping_sub(micros(s.at)).cast_signed();
            if s.again && (answers == 0 || ahead < 0) {
                return;
            }
            if newest.is_none_or(|n| n.order < s.order) {
                newest = Some(s.sample());
            }
        };
        let mut moved = false;
        while self.first < ack {
            let Some(mut s) = self.pop() else {
                break;
            };
            arrived(&mut s, &mut self.flying, &mut self.charge, &mut self.lost);
            moved = true;
            if let (Some(tag), true) = (s.tag, s.last) {
                done(tag);
            }
            if spare.len() < SPARE {
                spare.push(s.packet);
            }
        }
        while let Some(range) = self.reported.first_entry()
            && *range.key() < self.first
        {
            let stop = range.remove();
            if stop > self.first {
                self.reported.insert(self.first, stop);
            }
        }
        for (start, stop) in runs {
            let (start, stop) = (expand(*start).max(self.first), expand(*stop).min(end));
            for (start, stop) in add_range(&mut self.reported, start, stop) {
                let from = usize::try_from(start - self.first).unwrap_or(usize::MAX);
                let many = usize::try_from(stop - start).unwrap_or(0);
                // `VecDeque::range_mut` goes to the first element at once.
                let last = from.saturating_add(many).min(self.sent.len());
                for s in self.sent.range_mut(from.min(last)..last) {
                    arrived(s, &mut self.flying, &mut self.charge, &mut self.lost);
                }
            }
        }
        let new = acked.bytes > 0 || moved;
        if new {
            self.delivered += acked.bytes;
            self.delivered_at = now;
            self.probes = 0;
            self.progressed(now);
        }
        if let Some(newest) = newest {
            if !runs.is_empty() {
                acked.lost = self.find_lost(newest.order, newest.at, cc.reordering());
            }
            // A burst of acknowledgements shortens the interval between arrivals, and a burst of packets the interval
            // between transmissions. So the rate is computed from the longer of the two intervals.
            let arriving = now.saturating_sub(newest.delivered_at);
            let took = arriving.max(newest.at.saturating_sub(newest.before));
            self.newest_at = newest.at;
            if took > Duration::ZERO {
                let bytes = u128::from(self.delivered - newest.delivered);
                let rate = bytes * 1_000_000_000 / took.as_nanos().max(1);
                acked.rate = u64::try_from(rate).ok();
            }
            acked.delivered = self.delivered;
            acked.app_limited = self.app_limited;
            cc.acked(&acked);
        }
        while let Some((_, seq)) = self.transmissions.front()
            && *seq < self.first
        {
            self.transmissions.pop_front();
        }
        if self.sent.is_empty() {
            self.deadline = None;
        } else if new {
            self.arm(now, cc);
        }
        new
    }

    /// Marks packets as lost that were sent sufficiently long before a packet that has arrived. Returns their bytes.
    fn find_lost(&mut self, order: u64, at: Duration, reordering: Duration) -> u64 {
        let mut bytes = 0;
        // The list is in the order of transmission, so the search ends at the first packet that is not lost.
        while let Some((of, seq)) = self.transmissions.front().copied() {
            let place = seq.checked_sub(self.first);
            let place = place.and_then(|place| usize::try_from(place).ok());
            let sent = place.and_then(|place| self.sent.get_mut(place));
            if let Some(s) = sent.filter(|s| s.state == State::UnderWay && s.order == of) {
                let overtaken =
                    s.at + reordering <= at || s.order.saturating_add(OVERTAKEN) <= order;
                if !overtaken {
                    break;
                }
                s.state = State::Lost;
                self.lost += 1;
                self.lost_from = self.lost_from.min(seq);
                self.flying -= s.packet.len() as u64;
                self.charge -= u64::from(charge(s.packet.len()));
                bytes += s.packet.len() as u64;
            }
            self.transmissions.pop_front();
        }
        bytes
    }

    /// Length of the first packet that has not arrived.
    pub(super) fn next_len(&self) -> Option<usize> {
        let mut all = self.sent.iter();
        all.find(|s| s.state != State::Arrived)
            .map(|s| s.packet.len())
    }

    /// When the oldest packet was sent for the first time.
    pub(super) fn oldest(&self) -> Option<Duration> {
        self.sent.front().map(|s| s.first_at)
    }

    /// Whether the oldest packet is the first one of its message, so that no part of this message is acknowledged.
    pub(super) fn begins_message(&self) -> bool {
        let data = self.sent.front().map_or(&[][..], Sent::data);
        !dgram::parse_covered(data).is_ok_and(|d| d.shim.offset != 0)
    }

    /// Whether packets of answers are not acknowledged yet.
    pub(super) fn has_answers(&self) -> bool {
        self.sent.iter().any(Sent::is_answer)
    }

    /// Marks all packets to be sent again, because the peer has forgotten this queue pair and has none of them.
    pub(super) fn start_again(&mut self) {
        for s in &mut self.sent {
            s.state = State::Lost;
            s.again = true;
        }
        (self.flying, self.charge, self.lost) = (0, 0, self.sent.len());
        self.lost_from = self.first;
        self.reported.clear();
        self.transmissions.clear();
    }

    /// Sets the size of the peer's socket buffer.
    pub(super) fn set_room(&mut self, room: u64) {
        self.room = room;
    }

    /// Returns the next lost packet, to be sent again, if the windows of the path and of the peer allow it. The peer's
    /// window may have become smaller since the packet was first sent.
    pub(super) fn again(&mut self, now: Duration, cc: &Congestion) -> Option<Outgoing<'_>> {
        let is_full = self.flying >= cc.window() || self.charge >= self.room;
        if self.lost == 0 || self.room == 0 || (self.flying > 0 && is_full) {
            return None;
        }
        let skip = usize::try_from(self.lost_from.saturating_sub(self.first)).unwrap_or(0);
        let mut rest = self.sent.iter().skip(skip);
        let at = skip + rest.position(|s| s.state == State::Lost)?;
        self.lost_from = self.first + at as u64 + 1;
        self.order += 1;
        let (order, delivered, delivered_at) = (self.order, self.delivered, self.delivered_at);
        let before = self.newest_at;
        let s = self.sent.get_mut(at)?;
        s.state = State::UnderWay;
        s.again = true;
        s.order = order;
        s.at = now;
        s.delivered = delivered;
        s.delivered_at = delivered_at;
        s.before = before;
        self.lost -= 1;
        self.flying += s.packet.len() as u64;
        self.charge += u64::from(charge(s.packet.len()));
        let seq = self.first + at as u64;
        self.transmissions.push_back((order, seq));
        let data = Some(s.data());
        Some(Outgoing { seq, data })
    }

    /// Returns a probe: a packet for a peer that has been silent for too long, which the peer must answer. The probe is the
    /// first packet that has not arrived, or an empty packet if all have arrived or if data may not be sent.
    pub(super) fn probe(&mut self, data: bool, now: Duration, cc: &mut Congestion) -> Outgoing<'_> {
        self.probes += 1;
        if self.probes >= 2 {
            cc.silence();
            self.find_lost(u64::MAX, Duration::MAX, Duration::ZERO);
        }
        self.arm(now, cc);
        let at = self.sent.iter().position(|s| s.state != State::Arrived);
        let at = at.filter(|_| data && self.room > 0);
        self.order += 1;
        let order = self.order;
        let next = self.first + self.sent.len() as u64;
        let found = at.and_then(|at| self.sent.get_mut(at).map(|s| (at, s)));
        let Some((at, s)) = found else {
            return Outgoing {
                seq: next,
                data: None,
            };
        };
        if s.state == State::Lost {
            s.state = State::UnderWay;
            self.lost -= 1;
            self.flying += s.packet.len() as u64;
            self.charge += u64::from(charge(s.packet.len()));
        }
        s.again = true;
        s.order = order;
        s.at = now;
        let seq = self.first + at as u64;
        self.transmissions.push_back((order, seq));
        Outgoing {
            seq,
            data: Some(s.data()),
        }
    }

    /// Sets the next deadline and counts a probe that is not sent: data may not be sent yet, or lost packets are sent
    /// instead.
    pub(super) fn wait(&mut self, now: Duration, cc: &Congestion) {
        self.probes += 1;
        self.arm(now, cc);
    }

    /// Returns the message of packet `seq`, its message number on the wire, and the number after its last packet.
    pub(super) fn message_at(&self, seq: u64) -> Option<(Option<Tag>, u32, u64)> {
        let at = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        let sent = self.sent.get(at)?;
        let id = dgram::parse_covered(sent.data()).map_or(0, |d| d.shim.id);
        let tag = sent.tag;
        let mut end = seq + 1;
        for s in self.sent.iter().skip(at + 1) {
            let same = tag.is_some() && s.tag == tag;
            if !same {
                break;
            }
            end += 1;
        }
        Some((tag, id, end))
    }

    /// Drops the packets before `to`, even those that have not arrived.
    pub(super) fn skip(&mut self, to: u64, now: Duration) {
        self.progressed(now);
        while self.first < to {
            let Some(s) = self.pop() else {
                break;
            };
            match s.state {
                State::UnderWay => {
                    self.flying -= s.packet.len() as u64;
                    self.charge -= u64::from(charge(s.packet.len()));
                }
                State::Lost => self.lost -= 1,
                State::Arrived => {}
            }
        }
        if self.sent.is_empty() {
            self.deadline = None;
        }
    }
}

/// Returns the bytes that are counted for answers of `bytes`.
fn counted_for(bytes: usize) -> usize {
    if bytes <= bounds::RD_ANSWER_FREE {
        0
    } else {
        bytes.next_multiple_of(bounds::RD_ANSWER_UNIT)
    }
}

/// Adds a range to `all`, which has the start and the end of each range. Returns the parts of the range that were not in `all`. Each
/// number is returned once, and each range of `all` is removed once, so a peer cannot make this slow by ranges that overlap.
fn add_range(all: &mut BTreeMap<u64, u64>, start: u64, stop: u64) -> SmallVec<[(u64, u64); 2]> {
    let mut new = SmallVec::new();
    if start >= stop {
        return new;
    }
    let (mut from, mut to, mut at) = (start, stop, start);
    if let Some((before, end)) = all.range(..start).next_back()
        && *end >= start
    {
        (from, to, at) = (*before, stop.max(*end), *end);
    }
    while let Some((next, end)) = all.range(start..=stop).next().map(|(s, e)| (*s, *e)) {
        if at < next {
            new.push((at, next));
        }
        (at, to) = (at.max(end), to.max(end));
        all.remove(&next);
    }
    if at < stop {
        new.push((at, stop));
    }
    all.insert(from, to);
    new
}

/// A packet counts as lost if a packet that was sent this many transmissions later has arrived, even if both
/// were sent at nearly the same time.
const OVERTAKEN: u64 = 16;
/// The number of acknowledged packets whose buffers are kept to be used again.
pub(super) const SPARE: usize = 256;
/// The least time that a peer whose window is 0 has to acknowledge a packet.
const CLOSED_MIN: Duration = Duration::from_secs(60);
/// Time between two probes of a peer whose window is closed.
pub(super) const CLOSED: Duration = Duration::from_millis(50);
/// The longest time between two probes.
const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// Comparison with a plain set of numbers. The ranges come from a small deterministic generator.
    #[test]
    fn each_number_of_a_range_is_new_once() {
        let mut n = 1_u32;
        let mut next = move |below: u32| {
            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from((n >> 8) % below)
        };
        for _ in 0..300 {
            let (mut all, mut model) = (BTreeMap::new(), [false; 100]);
            for _ in 0..60 {
                let (start, stop) = (next(100), next(101));
                let mut expected = Vec::new();
                for at in start..stop {
                    if !std::mem::replace(&mut model[at as usize], true) {
                        expected.push(at);
                    }
                }
                let new = add_range(&mut all, start, stop);
                let new: Vec<u64> = new.iter().flat_map(|(a, b)| *a..*b).collect();
                assert_eq!(new, expected);
                let ranges: Vec<_> = all.iter().collect();
                assert!(ranges.windows(2).all(|w| w[0].1 < w[1].0), "{ranges:?}");
                assert!(ranges.iter().all(|(a, b)| a < b));
            }
        }
    }
}
