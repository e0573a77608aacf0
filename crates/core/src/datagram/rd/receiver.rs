//! The packets received from one peer: which have arrived, and which of them wait.
//!
//! A packet is *delivered* when the queue pair has processed its datagram. Only then does the cumulative
//! acknowledgement cover it. A packet *waits* if an earlier packet is missing (ordered delivery) or if the queue pair
//! lacks a receive or another resource for it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::datagram::types::Resource;
use crate::wire::rd::{RUNS, Runs};

/// Packets whose number is this far or further ahead of the first missing one are ignored, and not sent.
pub(super) const AHEAD: u64 = 1 << 16;

/// Memory that a waiting packet uses besides its bytes. A run of consecutive packet numbers uses [`RUN`]. Both are one entry's part of a
/// `BTreeMap` node that is filled as little as possible (5 of 11 entries), plus the overhead of the allocator.
/// `crates/sim/tests/memory.rs` measures the values.
pub(super) const KEPT: usize = 96;
/// See [`KEPT`].
pub(super) const RUN: usize = 48;

/// The class of a packet, by its number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    /// The packet is a duplicate, or its sender has given it up.
    Again,
    /// The packet is too far ahead, or it follows a refused packet.
    Beyond,
    /// The packet is the next one to be delivered.
    Next,
    /// The packet is new, but earlier ones are missing.
    Ahead,
}

/// The receive state of one peer.
#[derive(Debug)]
pub(super) struct Receiver {
    /// All packets before this number are delivered.
    next: u64,
    /// The packets from `next` on that have arrived, as runs (ranges of consecutive numbers): the start of each run, and its
    /// end. The runs are sent with each acknowledgement. The first run may begin before `next`.
    arrived: BTreeMap<u64, u64>,
    /// The datagrams of waiting packets. A packet that was taken for delivery, and not delivered yet, is empty.
    kept: BTreeMap<u64, Box<[u8]>>,
    /// The bytes of waiting packets.
    waiting: usize,
    /// Packets since the last acknowledgement.
    pub(super) unacknowledged: u32,
    /// The part of the socket buffer that these packets have used (see `datagram::flow::charge`).
    pub(super) since: u64,
    /// Whether an acknowledgement has to be sent now.
    pub(super) due: bool,
    /// The time by which an acknowledgement has to be sent. A packet with data that is sent earlier
    /// may carry it.
    pub(super) ack_by: Option<Duration>,
    /// The time in the packet that is being answered.
    pub(super) time: u32,
    /// The resource that the queue pair lacked for a packet, and the number of the packet, until it is delivered.
    pub(super) blocked_on: Option<(Resource, u64)>,
    /// Packet `next` is refused permanently, with this status.
    pub(super) refused: Option<u8>,
    /// Missing packets before this number will never arrive.
    given_up: u64,
    /// Whether a missing packet was skipped, and not all waiting packets before `given_up` are delivered.
    lossy: bool,
    /// An incomplete message will never be complete if all its packets that have arrived have smaller numbers than this.
    pub(super) skipped: Option<u64>,
}

impl Receiver {
    pub(super) fn new(next: u64) -> Self {
        Self {
            next,
            arrived: BTreeMap::new(),
            kept: BTreeMap::new(),
            waiting: 0,
            unacknowledged: 0,
            since: 0,
            due: false,
            ack_by: None,
            time: 0,
            blocked_on: None,
            refused: None,
            given_up: 0,
            lossy: false,
            skipped: None,
        }
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Bytes charged for packets that wait, or have arrived beyond a missing one.
    pub(super) fn held(&self) -> usize {
        self.waiting + self.kept.len() * KEPT + self.arrived.len() * RUN
    }

    /// Bytes that waiting packets actually hold, counted anew.
    pub(super) fn counted(&self) -> usize {
        let bytes: usize = self.kept.values().map(|data| data.len()).sum();
        bytes + self.kept.len() * KEPT + self.arrived.len() * RUN
    }

    /// Whether the number of the next packet is the only state.
    pub(super) fn is_idle(&self) -> bool {
        self.arrived.is_empty()
            && !self.due
            && self.ack_by.is_none()
            && self.blocked_on.is_none()
            && self.refused.is_none()
    }

    /// Updates the state after an acknowledgement was sent.
    pub(super) fn acknowledges(&mut self) {
        self.due = false;
        self.ack_by = None;
        self.unacknowledged = 0;
        self.since = 0;
    }

    pub(super) fn sort(&self, seq: u64) -> Arrived {
        if seq < self.next.max(self.given_up) || self.has(seq) {
            Arrived::Again
        } else if seq - self.next >= AHEAD || self.refused.is_some() {
            Arrived::Beyond
        } else if seq == self.next {
            Arrived::Next
        } else {
            Arrived::Ahead
        }
    }

    /// Whether packet `seq`, which is not smaller than `next`, has arrived.
    fn has(&self, seq: u64) -> bool {
        let run = self.arrived.range(..=seq).next_back();
        run.is_some_and(|(_, end)| *end > seq)
    }

    /// Whether no packet beyond `next` has arrived yet, so that the present packet makes the first gap.
    pub(super) fn runs_are_news(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Stores packet `seq`, which waits. It may have waited before, and have been taken for delivery.
    pub(super) fn keep(&mut self, seq: u64, data: &[u8]) {
        self.waiting += data.len();
        let before = self.kept.insert(seq, data.into());
        self.waiting -= before.map_or(0, |data| data.len());
        self.note(seq);
    }

    /// Records that packet `seq` has arrived.
    fn note(&mut self, seq: u64) {
        let before = self.arrived.range(..=seq).next_back();
        let start = match before {
            Some((_, end)) if *end > seq => return,
            Some((start, end)) if *end == seq => *start,
            _ => seq,
        };
        let end = self.arrived.remove(&(seq + 1)).unwrap_or(seq + 1);
        self.arrived.insert(start, end);
    }

    /// Advances `next` over packets that are delivered.
    fn advance(&mut self) {
        self.trim();
        if let Some((start, end)) = self.arrived.first_key_value()
            && *start <= self.next
        {
            let waits = self
                .kept
                .first_key_value()
                .map_or(u64::MAX, |(seq, _)| *seq);
            self.next = (*end).min(waits);
            self.trim();
        }
    }

    /// Removes runs before `next`.
    fn trim(&mut self) {
        while let Some(first) = self.arrived.first_entry() {
            if *first.get() > self.next {
                break;
            }
            first.remove();
        }
    }

    /// Records that packet `seq` is delivered.
    pub(super) fn delivered(&mut self, seq: u64) {
        self.kept.remove(&seq);
        if seq != self.next {
            self.note(seq);
            return;
        }
        self.next += 1;
        if self.next <= self.given_up {
            self.pass();
        } else if !self.arrived.is_empty() {
            self.advance();
        }
    }

    /// Whether any packet waits.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Whether packet `seq` waits.
    pub(super) fn waits(&self, seq: u64) -> bool {
        self.kept.contains_key(&seq)
    }

    /// Takes the datagram of a waiting packet: of the next one in order, or, if `unordered`, of the first one that waits. Its entry stays,
    /// empty, until the packet is delivered.
    pub(super) fn take_waiting(&mut self, unordered: bool) -> Option<(u64, Vec<u8>)> {
        if self.refused.is_some() {
            return None;
        }
        let mut first = self.kept.first_entry()?;
        let seq = *first.key();
        if !unordered && seq != self.next {
            return None;
        }
        let data = std::mem::take(first.get_mut());
        self.waiting -= data.len();
        Some((seq, data.into_vec()))
    }

    /// Handles a base: the sender will not send packets before `base` again, so those that are missing will not
    /// arrive. Waiting packets before `base` are still delivered, unless their message was refused.
    pub(super) fn skip(&mut self, base: u64) {
        if base <= self.next.max(self.given_up) {
            return;
        }
        if self.refused.take().is_some() {
            self.lossy = true;
            while let Some(entry) = self.kept.first_entry() {
                if *entry.key() >= base {
                    break;
                }
                self.waiting -= entry.remove().len();
            }
            // Packets before `base` that were delivered out of order are covered as well.
            self.next = base;
        }
        self.given_up = base;
        self.pass();
    }

    /// Skips missing packets before `given_up`, up to the next waiting packet.
    fn pass(&mut self) {
        self.advance();
        while self.next < self.given_up {
            let waits = self
                .kept
                .first_key_value()
                .map_or(u64::MAX, |(seq, _)| *seq);
            let to = self.given_up.min(waits);
            if to <= self.next {
                return;
            }
            self.next = to;
            (self.lossy, self.skipped) = (true, Some(to));
            self.advance();
        }
        if std::mem::take(&mut self.lossy) {
            self.skipped = Some(self.given_up);
        }
    }

    /// Refuses packet `next`. Until the sender gives up the message, later packets are ignored when they arrive. Those
    /// that have arrived already are kept: they were acknowledged, so the sender does not send them again.
    pub(super) fn refuse(&mut self, why: u8) {
        self.refused = Some(why);
    }

    /// Returns runs beyond `next` that have arrived: the first ones, and the last ones, which show the most recent
    /// losses.
    pub(super) fn runs(&self) -> Runs {
        if self.arrived.is_empty() {
            return Runs::new();
        }
        let half = RUNS / 2;
        let many = self.arrived.len();
        let last = many.saturating_sub(half).max(RUNS - half).min(many);
        let next = self.next;
        let wire = |(start, end): (&u64, &u64)| ((*start).max(next) as u32, *end as u32);
        let mut runs: Runs = self.arrived.iter().take(RUNS - half).map(wire).collect();
        let behind = self.arrived.iter().rev().take(many - last);
        runs.extend(behind.map(wire));
        if let Some(last) = runs.get_mut(RUNS - half..) {
            last.reverse();
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_delivered_once_in_order() {
        let mut rx = Receiver::new(10);
        assert_eq!(rx.sort(9), Arrived::Again);
        assert_eq!(rx.sort(11), Arrived::Ahead);
        rx.keep(11, b"b");
        assert_eq!(rx.sort(11), Arrived::Again);
        assert_eq!(rx.runs().as_slice(), [(11, 12)]);
        assert_eq!(rx.take_waiting(false), None);
        assert_eq!(rx.sort(10), Arrived::Next);
        rx.delivered(10);
        assert_eq!(rx.take_waiting(false), Some((11, b"b".to_vec())));
        rx.delivered(11);
        assert_eq!((rx.next(), rx.held(), rx.is_idle()), (12, 0, true));
        assert_eq!(rx.sort(12 + AHEAD), Arrived::Beyond);
    }

    #[test]
    fn unordered_packets_are_delivered_on_arrival() {
        let mut rx = Receiver::new(0);
        for seq in [3, 1, 2] {
            assert_eq!(rx.sort(seq), Arrived::Ahead);
            rx.delivered(seq);
            assert_eq!(rx.sort(seq), Arrived::Again);
        }
        assert_eq!(rx.runs().as_slice(), [(1, 4)]);
        rx.delivered(0);
        assert_eq!(rx.next(), 4);
        rx.keep(6, b"waits");
        assert_eq!(rx.take_waiting(true), Some((6, b"waits".to_vec())));
    }

    #[test]
    fn packets_before_the_base_are_skipped() {
        let mut rx = Receiver::new(0);
        rx.delivered(5);
        let skip = |rx: &mut Receiver, base| {
            rx.skip(base);
            rx.skipped.take().is_some()
        };
        assert!(!skip(&mut rx, 0));
        assert!(skip(&mut rx, 5));
        assert_eq!((rx.next(), rx.held()), (6, 0));
        // Nothing of a refused message is delivered.
        rx.keep(7, b"x");
        rx.refuse(10);
        assert_eq!(rx.sort(6), Arrived::Beyond);
        assert!(skip(&mut rx, 8));
        assert_eq!(rx.sort(8), Arrived::Next);
        assert_eq!(rx.held(), 0);
    }

    /// A waiting packet before a base is delivered and acknowledged after the base has arrived; missing packets are
    /// skipped.
    #[test]
    fn a_base_does_not_skip_waiting_packets() {
        let mut rx = Receiver::new(100);
        for seq in [100, 101, 104] {
            rx.keep(seq, b"x");
        }
        rx.skip(102);
        assert_eq!((rx.next(), rx.skipped), (100, None), "nothing is missing");
        rx.skip(107);
        assert_eq!((rx.next(), rx.skipped), (100, None));
        assert_eq!(
            rx.sort(103),
            Arrived::Again,
            "the sender has given up packet 103"
        );
        let mut taken = Vec::new();
        let mut skipped = Vec::new();
        while let Some((seq, _)) = rx.take_waiting(false) {
            taken.push(seq);
            assert_eq!(rx.next(), seq);
            rx.delivered(seq);
            skipped.push(rx.skipped.take());
        }
        assert_eq!(taken, [100, 101, 104]);
        assert_eq!(skipped, [None, Some(104), Some(107)]);
        assert_eq!((rx.next(), rx.held()), (107, 0));
    }

    /// Comparison with a plain set, for packets in any order.
    #[test]
    fn runs_are_the_packets_that_have_arrived() {
        let mut n = 1_u64;
        for _ in 0..200 {
            let mut rx = Receiver::new(0);
            let mut set = std::collections::BTreeSet::new();
            for _ in 0..40 {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let seq = (n >> 33) % 24;
                match rx.sort(seq) {
                    Arrived::Again => assert!(seq < rx.next() || set.contains(&seq)),
                    Arrived::Ahead if n & 1 << 60 == 0 => rx.keep(seq, b"x"),
                    _ => rx.delivered(seq),
                }
                set.insert(seq);
                if n & 3 << 50 == 0 {
                    rx.skip((n >> 40) % 24);
                }
                while let Some((seq, _)) = rx.take_waiting(n & 1 << 55 == 0) {
                    rx.delivered(seq);
                }
                let mut runs: Vec<(u64, u64)> = Vec::new();
                for seq in set.iter().copied().filter(|s| *s >= rx.next()) {
                    match runs.last_mut() {
                        Some((_, end)) if *end == seq => *end += 1,
                        _ => runs.push((seq, seq + 1)),
                    }
                }
                let next = rx.next();
                let known = rx.arrived.iter();
                let known: Vec<(u64, u64)> = known.map(|(a, b)| ((*a).max(next), *b)).collect();
                assert_eq!(known, runs);
            }
        }
    }

    #[test]
    fn the_first_and_the_last_of_many_gaps_are_reported() {
        let mut rx = Receiver::new(0);
        for n in 1..100 {
            rx.delivered(2 * n);
        }
        let runs = rx.runs();
        assert_eq!(runs.len(), RUNS);
        assert_eq!(runs[0], (2, 3));
        assert_eq!(runs[RUNS - 1], (198, 199));
    }
}
