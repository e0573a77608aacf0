//! The receiving half from one peer: which packets have arrived, and which of them wait.
//!
//! A packet is *delivered* when the queue pair has taken its datagram, and only then acknowledged for good. It *waits*
//! when one before it is missing (ordered delivery) or when the queue pair has no receive for it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::datagram::types::Resource;
use crate::wire::rd::{RUNS, Runs};

/// Packets beyond the first missing one that are looked at.
const AHEAD: u64 = 1 << 16;

/// Bytes that a packet which waits costs besides its own, and bytes of a run: their part of a node of a map that is filled
/// as badly as it can be (5 of 11), and what an allocator adds to each piece. `crates/sim/tests/memory.rs` measures it.
pub(super) const KEPT: usize = 96;
/// See [`KEPT`].
pub(super) const RUN: usize = 48;

/// What a packet is, by its number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    /// It was here before.
    Again,
    /// It is too far ahead, or there is no room for it.
    Beyond,
    /// It is the next one to be delivered.
    Next,
    /// It is new, but others are missing before it.
    Ahead,
}

/// Packets from a peer.
#[derive(Debug)]
pub(super) struct Receiver {
    /// All before it are delivered.
    next: u64,
    /// What has arrived from there on, as runs of numbers, end by start: they are sent with each acknowledgement. The first
    /// may begin before `next`.
    arrived: BTreeMap<u64, u64>,
    /// Those of them that wait; one that was taken out and not delivered yet is empty.
    kept: BTreeMap<u64, Box<[u8]>>,
    /// Bytes that wait.
    waiting: usize,
    /// Packets since the last acknowledgement.
    pub(super) unacknowledged: u32,
    /// Charge of them.
    pub(super) since: u64,
    /// An acknowledgement is to be sent.
    pub(super) due: bool,
    /// One is to be sent, with something else if there is anything by then.
    pub(super) soon: Option<Duration>,
    /// The clock of the packet that is answered.
    pub(super) time: u32,
    /// The queue pair lacked this for a packet that waits.
    pub(super) blocked_on: Option<Resource>,
    /// Packet `next` is refused for good: why.
    pub(super) refused: Option<u8>,
    /// What is missing before this number never comes.
    given_up: u64,
    /// Something that is missing was passed, and not all that waits before `given_up` is delivered.
    lossy: bool,
    /// Messages of which no packet has come from this number on will never be complete.
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
            soon: None,
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

    /// Bytes of memory that packets cost which wait or have arrived beyond a missing one.
    pub(super) fn held(&self) -> usize {
        self.waiting + self.kept.len() * KEPT + self.arrived.len() * RUN
    }

    /// Bytes that packets which wait really hold, counted anew.
    pub(super) fn counted(&self) -> usize {
        let bytes: usize = self.kept.values().map(|data| data.len()).sum();
        bytes + self.kept.len() * KEPT + self.arrived.len() * RUN
    }

    /// Nothing is remembered but the number.
    pub(super) fn is_idle(&self) -> bool {
        self.arrived.is_empty()
            && !self.due
            && self.soon.is_none()
            && self.blocked_on.is_none()
            && self.refused.is_none()
    }

    /// An acknowledgement goes out.
    pub(super) fn acknowledges(&mut self) {
        self.due = false;
        self.soon = None;
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

    /// Whether packet `seq`, which is not before `next`, has arrived.
    fn has(&self, seq: u64) -> bool {
        let run = self.arrived.range(..=seq).next_back();
        run.is_some_and(|(_, end)| *end > seq)
    }

    /// Nothing was beyond `next` before the packet that came.
    pub(super) fn runs_are_news(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Packet `seq` waits.
    pub(super) fn keep(&mut self, seq: u64, data: &[u8]) {
        self.waiting += data.len();
        self.kept.insert(seq, data.into());
        self.note(seq);
    }

    /// Packet `seq` has arrived.
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

    /// What is delivered right behind `next` belongs to what is before it.
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

    /// Runs before `next` are over.
    fn trim(&mut self) {
        while let Some(first) = self.arrived.first_entry() {
            if *first.get() > self.next {
                break;
            }
            first.remove();
        }
    }

    /// Packet `seq` is delivered.
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

    /// Takes a packet out that waits: the next one in order, or any if `unordered`.
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

    /// The sender will not send anything before `base` again: what is missing there never comes. What waits there is delivered
    /// first, unless it is of a message that was refused.
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
            // What was delivered in front of it, out of order, is over as well.
            self.next = base;
        }
        self.given_up = base;
        self.pass();
    }

    /// Passes what is missing before `given_up`, up to the next packet that waits.
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

    /// Packet `next` is refused; everything behind it waits until the sender gives it up. What was acknowledged is kept: it
    /// will not be sent again.
    pub(super) fn refuse(&mut self, why: u8) {
        self.refused = Some(why);
    }

    /// The runs beyond `next` that have arrived: the first ones, and the last, since they tell of what is lost now.
    pub(super) fn runs(&self) -> Runs {
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
    fn without_order_each_is_delivered_as_it_comes() {
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
    fn what_is_given_up_is_skipped() {
        let mut rx = Receiver::new(0);
        rx.delivered(5);
        let skip = |rx: &mut Receiver, base| {
            rx.skip(base);
            rx.skipped.take().is_some()
        };
        assert!(!skip(&mut rx, 0));
        assert!(skip(&mut rx, 5));
        assert_eq!((rx.next(), rx.held()), (6, 0));
        // Of a message that is refused nothing is delivered.
        rx.keep(7, b"x");
        rx.refuse(10);
        assert_eq!(rx.sort(6), Arrived::Beyond);
        assert!(skip(&mut rx, 8));
        assert_eq!(rx.sort(8), Arrived::Next);
        assert_eq!(rx.held(), 0);
    }

    /// What waits before a base is delivered and acknowledged only then; what is missing between is passed.
    #[test]
    fn a_base_does_not_pass_what_waits() {
        let mut rx = Receiver::new(100);
        for seq in [100, 101, 104] {
            rx.keep(seq, b"x");
        }
        rx.skip(102);
        assert_eq!((rx.next(), rx.skipped), (100, None), "nothing is missing");
        rx.skip(107);
        assert_eq!((rx.next(), rx.skipped), (100, None));
        assert_eq!(rx.sort(103), Arrived::Again, "it was given up");
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

    /// Against a plain set, in any order.
    #[test]
    fn runs_are_what_has_arrived() {
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
    fn many_gaps_are_told_of_at_both_ends() {
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
