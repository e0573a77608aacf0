//! Incomplete messages from many sources, and the records of Write-Records that have ended.
//!
//! A source is a remote queue pair. Its messages are identified by their numbers. Messages of a source may arrive in
//! any order, and so may the datagrams of a message. The memory for each source is limited, and a source is stored
//! only after one of its datagrams has passed every check.
//!
//! A message is *open* from its first datagram until it is complete or given up, and *closed* afterwards. A bitmap of
//! the last `WINDOW` message numbers tells which are closed, so that a late duplicate of a datagram does not
//! overwrite memory that the program uses again. The bitmap is forgotten when no such duplicate can exist any more: a source
//! also numbers messages that leave no state here, and after 2^31 of those its next number would look old.
//!
//! The *epoch* in a datagram distinguishes its queue pair from an earlier one with the same queue pair number. A *run* is a
//! contiguous range of the bytes of a message that have arrived.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::parity::Groups;
use super::reassemble::{Coverage, Identity, LIFETIME, REPLACED_FOR, Range, Replaced};
use super::table::Table;
use super::types::{Dropped, Peer};
use crate::bounds;
use crate::verbs::source::Places;
use crate::verbs::wr::RecvRequest;
use crate::wire::{Stag, To};

/// The record of a Write-Record, as the program reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Address and port of the sender.
    pub from: SocketAddr,
    /// Queue pair number of the sender.
    pub src_qpn: u32,
    /// Message number, as chosen by the sender.
    pub id: u32,
    /// STag of the memory that was written.
    pub stag: Stag,
    /// Tagged offset of the first byte of the message.
    pub base: To,
    /// Length of the message, bytes.
    pub length: u32,
    /// Number of bytes that have arrived.
    pub valid: u32,
    /// The offset in the message if the record is of one datagram, otherwise 0.
    pub offset: u32,
    /// Immediate data.
    pub imm: Option<[u8; 4]>,
    /// Whether all bytes of the message have arrived.
    pub complete: bool,
    /// Whether the record is of one datagram. Other datagrams of the message may have records too.
    pub chunk: bool,
    /// Whether the final datagram of the message, or its end-of-message datagram, has arrived.
    pub final_seen: bool,
    /// Identifies the map of the bytes that have arrived, until the program releases it. 0 if there is no map: the
    /// message is complete, or the record is of one datagram.
    pub map: u64,
}

/// Records that the program has not fetched, and maps that it has not released.
#[derive(Debug, Default)]
pub struct Records {
    waiting: VecDeque<Record>,
    maps: HashMap<u64, Vec<Range>>,
    last: u64,
    ranges: usize,
}

impl Records {
    /// Removes and returns the oldest record.
    pub(super) fn poll(&mut self) -> Option<Record> {
        self.waiting.pop_front()
    }

    /// Removes and returns the oldest record of message `id` of the queue pair `src_qpn`.
    pub(super) fn take(&mut self, src_qpn: u32, id: u32) -> Option<Record> {
        // Records and their completions have the same order, so this is the first one unless the program has skipped
        // some.
        let at = self
            .waiting
            .iter()
            .position(|r| r.id == id && r.src_qpn == src_qpn)?;
        self.waiting.remove(at)
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the runs of bytes that have arrived, in order. The end of a run is exclusive.
    pub fn map(&self, map: u64) -> Option<&[Range]> {
        self.maps.get(&map).map(Vec::as_slice)
    }

    /// Releases a map. Returns false if there is no such map.
    pub(super) fn release(&mut self, map: u64) -> bool {
        match self.maps.remove(&map) {
            Some(ranges) => {
                self.ranges -= ranges.len();
                true
            }
            None => false,
        }
    }

    /// Whether one more record can be stored.
    pub(super) fn has_room(&self, most: u32) -> bool {
        self.waiting.len() + self.maps.len() < most as usize
    }

    /// Stores a record. Returns false if there is no room for it or its map.
    pub(super) fn push(&mut self, mut record: Record, ranges: &[Range], most: u32) -> bool {
        if !self.has_room(most) {
            return false;
        }
        if !record.complete && !record.chunk {
            if self.ranges + ranges.len() > bounds::RECORD_RANGES {
                return false;
            }
            self.last += 1;
            self.ranges += ranges.len();
            record.map = self.last;
            self.maps.insert(self.last, ranges.to_vec());
        }
        self.waiting.push_back(record);
        true
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.maps.clear();
        self.ranges = 0;
    }
}

/// The length of the bitmap of closed messages. Older numbers count as closed.
pub(super) const WINDOW: u32 = 1024;

/// The closed messages of a source.
///
/// They are forgotten when none was closed for [`LIFETIME`]. Between two messages that are closed here, a source may send
/// any number of messages that leave no state. After 2^31 of these, the number of the next message would count as older than
/// `top`. A source needs longer than [`LIFETIME`] to send so many.
#[derive(Debug, Default)]
struct Closed {
    /// When the last datagram of the message that was closed last arrived.
    at: Duration,
    /// The largest closed number.
    top: Option<u32>,
    /// Bit `i` is set if number `top - i` is closed.
    bits: [u64; (WINDOW / 64) as usize],
}

impl Closed {
    fn is_forgotten(&self, now: Duration) -> bool {
        now.saturating_sub(self.at) >= LIFETIME
    }

    fn has(&self, id: u32, now: Duration) -> bool {
        let Some(top) = self.top.filter(|_| !self.is_forgotten(now)) else {
            return false;
        };
        let behind = top.wrapping_sub(id);
        if behind >= 1 << 31 {
            return false;
        }
        behind >= WINDOW || {
            let word = self.bits.get((behind / 64) as usize);
            word.is_some_and(|w| w >> (behind % 64) & 1 == 1)
        }
    }

    fn close(&mut self, id: u32, now: Duration) {
        if self.is_forgotten(now) {
            *self = Self::default();
        }
        self.at = self.at.max(now);
        let behind = match self.top {
            None => {
                self.top = Some(id);
                0
            }
            Some(top) if top.wrapping_sub(id) < 1 << 31 => top.wrapping_sub(id),
            Some(top) => {
                self.shift(id.wrapping_sub(top));
                self.top = Some(id);
                0
            }
        };
        if let Some(word) = self.bits.get_mut((behind / 64) as usize) {
            *word |= 1 << (behind % 64);
        }
    }

    fn shift(&mut self, by: u32) {
        let (words, bits) = ((by / 64) as usize, by % 64);
        let old = self.bits;
        for (at, word) in self.bits.iter_mut().enumerate() {
            let low = at.checked_sub(words).and_then(|from| old.get(from));
            let below = at.checked_sub(words + 1).and_then(|from| old.get(from));
            *word = low.map_or(0, |w| w << bits);
            if bits > 0 {
                *word |= below.map_or(0, |w| w >> (64 - bits));
            }
        }
    }
}

/// A message of which not all bytes have arrived.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) identity: Identity,
    pub(super) coverage: Coverage,
    /// The receive that a Send fills.
    pub(super) receive: Option<RecvRequest>,
    /// The memory of the message.
    pub(super) places: Places,
    /// Whether the message is a Write-Record.
    pub(super) record: bool,
    /// Whether each datagram of the Write-Record makes its own record.
    pub(super) chunks: bool,
    /// Whether the final datagram has arrived.
    pub(super) final_seen: bool,
    pub(super) parity: Option<Box<Groups>>,
    /// When the most recent datagram of the message arrived.
    pub(super) last: Duration,
    /// Reliable services: number of the latest packet of the message.
    pub(super) packet: u64,
    /// Reliable services: the message failed for this reason, and its later packets are refused.
    pub(super) failed: Option<Dropped>,
    /// When the message is given up, with the bytes that have arrived by then. Until the final datagram arrives, each datagram
    /// with new bytes postpones it.
    pub(super) until: Duration,
    /// The time of the message's entry in the list of timers.
    pub(super) timer: Duration,
}

impl Open {
    fn is_send(&self) -> bool {
        self.identity.base.is_none()
    }
}

#[derive(Debug)]
struct Source {
    epoch: u16,
    before: Option<Replaced>,
    closed: Closed,
    open: Vec<(u32, Box<Open>)>,
    used: Duration,
}

/// A message that ended incomplete.
pub(super) type GivenUp = (Peer, u32, Box<Open>);

/// The state of the message of a datagram, as found by source, epoch and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageStatus {
    /// No datagram of the message has arrived yet.
    New,
    /// The message is open.
    Open,
    /// The message has ended, or its queue pair has been replaced by a newer one.
    Late,
}

/// All open messages.
#[derive(Debug, Default)]
pub(super) struct Messages {
    sources: Table<Peer, Source>,
    /// When messages may have to be given up. A message's deadline may have moved since its entry was made.
    timers: BTreeSet<(Duration, Peer, u32)>,
    counts: Counts,
    /// Whether the service is reliable. Then no open message may be given up to make room for another.
    reliable: bool,
}

/// Sums over all open messages.
#[derive(Debug, Default)]
struct Counts {
    open: usize,
    /// Sends, which have taken a receive.
    sends: usize,
    /// Runs of bytes that have arrived.
    runs: usize,
}

impl Counts {
    fn add(&mut self, open: &Open) {
        self.open += 1;
        self.sends += usize::from(open.is_send());
        self.runs += open.coverage.ranges().len();
    }

    fn remove(&mut self, open: &Open) {
        self.open -= 1;
        self.sends -= usize::from(open.is_send());
        self.runs -= open.coverage.ranges().len();
    }
}

/// Open messages that each reliable peer may have when all of [`bounds::OPEN_MESSAGES`] are used: a request, and an
/// answer.
const FAIR: usize = 2;

/// A message is given up when a message of the same source arrives whose number is larger by more than this.
const AHEAD: u32 = 8;

impl Messages {
    pub(super) fn new(reliable: bool) -> Self {
        Self {
            reliable,
            ..Self::default()
        }
    }

    /// Whether no further message of `peer` may be opened.
    pub(super) fn is_full(&self, peer: &Peer) -> bool {
        let theirs = self.sources.get(peer).map_or(0, |s| s.open.len());
        theirs >= bounds::OPEN_MESSAGES_SOURCE
            || (self.counts.open >= bounds::OPEN_MESSAGES && theirs >= FAIR)
    }

    /// Whether any message is open.
    pub(super) fn any_open(&self) -> bool {
        self.counts.open > 0
    }

    /// Whether an open message has taken a receive, which other messages lack until this one ends.
    pub(super) fn any_holds_a_receive(&self) -> bool {
        self.counts.sends > 0
    }

    /// Whether an open message of `peer` has taken a receive.
    pub(super) fn holds_a_receive(&self, peer: &Peer) -> bool {
        let source = self.sources.get(peer);
        source.is_some_and(|s| s.open.iter().any(|(_, open)| open.is_send()))
    }

    /// Whether all open messages together have the largest number of runs.
    pub(super) fn has_too_many_runs(&self) -> bool {
        self.counts.runs >= bounds::OPEN_RUNS
    }

    /// Updates the number of runs after those of one message changed from `before` to `after`.
    pub(super) fn note_runs(&mut self, before: usize, after: usize) {
        let runs = &mut self.counts.runs;
        *runs = (*runs + after).saturating_sub(before);
    }

    /// Returns the state of the message of a datagram. Never [`MessageStatus::Late`] in a reliable service: the reliability
    /// layer has removed duplicates, and a packet that is dropped as late is acknowledged, so its sender would count the
    /// packet as delivered.
    pub(super) fn status(&self, peer: &Peer, epoch: u16, id: u32, now: Duration) -> MessageStatus {
        let Some(source) = self.sources.get(peer) else {
            return MessageStatus::New;
        };
        if source.epoch != epoch {
            return match source.before {
                Some(before) if before.covers(epoch, now) && !self.reliable => MessageStatus::Late,
                _ => MessageStatus::New,
            };
        }
        if source.open.iter().any(|(n, _)| *n == id) {
            MessageStatus::Open
        } else if !self.reliable && source.closed.has(id, now) {
            MessageStatus::Late
        } else {
            MessageStatus::New
        }
    }

    /// Whether a message with this epoch would replace the queue pair of a source that sent messages lately.
    pub(super) fn would_replace(&self, peer: &Peer, epoch: u16, now: Duration) -> bool {
        let sends = |s: &Source| !s.open.is_empty() || now.saturating_sub(s.used) < REPLACED_FOR;
        let source = self.sources.get(peer);
        source.is_some_and(|s| s.epoch != epoch && sends(s))
    }

    /// Returns an open message.
    pub(super) fn get_mut(&mut self, peer: &Peer, id: u32) -> Option<&mut Open> {
        let source = self.sources.get_mut(peer)?;
        source
            .open
            .iter_mut()
            .find(|(n, _)| *n == id)
            .map(|(_, open)| &mut **open)
    }

    /// Returns the state of a source, which is created if needed. If the source has a new epoch, its open messages of
    /// the old one are given up. If there are too many sources, one that was not used lately is removed.
    fn enter(
        &mut self,
        peer: &Peer,
        epoch: u16,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) -> &mut Source {
        if !self.sources.contains_key(peer) && self.sources.len() >= bounds::RECORD_SOURCES {
            // The least recently used of 64 arbitrary sources: a search of all would cost too much.
            let may_go = |s: &Source| !self.reliable || s.open.is_empty();
            let some = self.sources.iter().filter(|(_, s)| may_go(s)).take(64);
            let oldest = some.min_by_key(|(_, s)| s.used);
            if let Some(oldest) = oldest.map(|(peer, _)| *peer) {
                self.forget(&oldest, given_up);
            }
        }
        let source = self.sources.entry(*peer).or_insert_with(|| Source {
            epoch,
            before: None,
            closed: Closed::default(),
            open: Vec::new(),
            used: now,
        });
        source.used = now;
        if source.epoch != epoch {
            for (id, open) in source.open.drain(..) {
                self.counts.remove(&open);
                self.timers.remove(&(open.timer, *peer, id));
                given_up.push((*peer, id, open));
            }
            source.before = Some(Replaced::new(source.epoch, now));
            source.epoch = epoch;
            source.closed = Closed::default();
        }
        source
    }

    /// Adds a message of which more datagrams are expected. If there are too many open messages, the one with the earliest
    /// deadline is given up; if there are too many of this source, its oldest one.
    pub(super) fn open(
        &mut self,
        peer: &Peer,
        epoch: u16,
        id: u32,
        open: Open,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) {
        if self.counts.open >= bounds::OPEN_MESSAGES
            && !self.reliable
            && let Some((_, peer, id)) = self.timers.first().copied()
            && let Some(open) = self.close(&peer, id)
        {
            given_up.push((peer, id, open));
        }
        let until = open.until;
        self.counts.add(&open);
        let source = self.enter(peer, epoch, now, given_up);
        let oldest = (source.open.len() >= bounds::OPEN_MESSAGES_SOURCE)
            .then(|| source.open.first().map(|(id, _)| *id))
            .flatten();
        source.open.push((id, Box::new(open)));
        self.timers.insert((until, *peer, id));
        if let Some(oldest) = oldest
            && let Some(open) = self.close(peer, oldest)
        {
            given_up.push((*peer, oldest, open));
        }
    }

    /// Marks a message that consisted of one datagram as closed.
    pub(super) fn close_single(
        &mut self,
        peer: &Peer,
        epoch: u16,
        id: u32,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) {
        let source = self.enter(peer, epoch, now, given_up);
        source.closed.close(id, now);
    }

    /// Closes an open message and returns it.
    pub(super) fn close(&mut self, peer: &Peer, id: u32) -> Option<Box<Open>> {
        let source = self.sources.get_mut(peer)?;
        let at = source.open.iter().position(|(n, _)| *n == id)?;
        let (_, open) = source.open.remove(at);
        source.closed.close(id, open.last);
        self.counts.remove(&open);
        self.timers.remove(&(open.timer, *peer, id));
        Some(open)
    }

    /// Gives up messages of a source whose numbers are smaller than `id`, the number of a message that arrived, by
    /// more than [`AHEAD`].
    pub(super) fn give_up_overtaken(&mut self, peer: &Peer, id: u32, given_up: &mut Vec<GivenUp>) {
        let Some(source) = self.sources.get(peer) else {
            return;
        };
        let behind: Vec<u32> = source
            .open
            .iter()
            .map(|(n, _)| *n)
            .filter(|n| (AHEAD + 1..1 << 31).contains(&id.wrapping_sub(*n)))
            .collect();
        for id in behind {
            if let Some(open) = self.close(peer, id) {
                given_up.push((*peer, id, open));
            }
        }
    }

    /// Records that packet `seq` of a reliable source belongs to message `id`.
    pub(super) fn note_packet(&mut self, peer: &Peer, id: u32, seq: u64) {
        if let Some(open) = self.get_mut(peer, id) {
            open.packet = open.packet.max(seq);
        }
    }

    /// Gives up messages whose packets were abandoned by their reliable source: packets before `base` that have not
    /// arrived will not arrive any more. The packets of a message have consecutive numbers, and a source abandons all or none
    /// of them, so a message with a later packet is not affected.
    pub(super) fn skip(&mut self, peer: &Peer, base: u64, given_up: &mut Vec<GivenUp>) {
        let Some(source) = self.sources.get(peer) else {
            return;
        };
        let open = source.open.iter().filter(|(_, open)| open.packet < base);
        let ids: Vec<u32> = open.map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(open) = self.close(peer, id) {
                given_up.push((*peer, id, open));
            }
        }
    }

    fn forget(&mut self, peer: &Peer, given_up: &mut Vec<GivenUp>) {
        if let Some(source) = self.sources.remove(peer) {
            for (id, open) in source.open {
                self.counts.remove(&open);
                self.timers.remove(&(open.timer, *peer, id));
                given_up.push((*peer, id, open));
            }
        }
    }

    /// Gives up messages whose deadline has passed.
    pub(super) fn expire(&mut self, now: Duration, given_up: &mut Vec<GivenUp>) {
        while let Some((at, peer, id)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            let Some(open) = self.get_mut(&peer, id) else {
                continue;
            };
            if open.until > now {
                let until = open.until;
                open.timer = until;
                self.timers.insert((until, peer, id));
            } else if let Some(open) = self.close(&peer, id) {
                given_up.push((peer, id, open));
            }
        }
    }

    /// Sets an earlier deadline for a message.
    pub(super) fn shorten_deadline(&mut self, peer: &Peer, id: u32, until: Duration) {
        if let Some(open) = self.get_mut(peer, id)
            && until < open.until
        {
            let old = std::mem::replace(&mut open.timer, until);
            open.until = until;
            self.timers.remove(&(old, *peer, id));
            self.timers.insert((until, *peer, id));
        }
    }

    /// The time at which [`Self::expire`] may have something to do.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.timers.first().map(|(at, ..)| *at)
    }

    /// Gives up all messages.
    pub(super) fn clear(&mut self) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        for (peer, mut source) in self.sources.drain() {
            let all = source.open.drain(..);
            given_up.extend(all.map(|(id, open)| (peer, id, open)));
        }
        self.timers.clear();
        self.counts = Counts::default();
        given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn closed_numbers_stay_closed_and_others_open() {
        let mut closed = Closed::default();
        let mut model = std::collections::HashSet::new();
        assert!(!closed.has(5, NOW));
        let mut id = u32::MAX - 3000;
        for step in 0..5000_u32 {
            // The number mostly grows by two, sometimes by more, and sometimes shrinks.
            id = match step % 97 {
                13 => id.wrapping_add(130),
                50 => id.wrapping_sub(300),
                51 => id.wrapping_add(300),
                _ => id.wrapping_add(2),
            };
            closed.close(id, NOW);
            model.insert(id);
            let top = closed.top.unwrap();
            for back in (0..WINDOW).step_by(7) {
                let n = top.wrapping_sub(back);
                assert_eq!(closed.has(n, NOW), model.contains(&n), "{n:#x} at {step}");
            }
            assert!(closed.has(top.wrapping_sub(WINDOW), NOW));
            assert!(!closed.has(top.wrapping_add(1), NOW));
        }
    }

    /// The counted runs are those of the open messages, whatever the reason why others were closed.
    #[test]
    fn runs_are_counted_as_long_as_their_message_is_open() {
        let identity = identity();
        let peer = |n: u16| -> Peer { (SocketAddr::from(([10, 0, 0, 1], n)), 1) };
        let mut messages = Messages::new(false);
        let mut given_up = Vec::new();
        let mut n = 1_u32;
        for step in 0..20_000_u32 {
            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let now = Duration::from_millis(step.into());
            let (who, id, what) = (peer((n >> 8) as u16 % 40), step / 7, n >> 24);
            let epoch = (step / 5000) as u16 + 1;
            match what {
                0 => messages.skip(&who, u64::MAX, &mut given_up),
                1 => messages.forget(&who, &mut given_up),
                2 => messages.give_up_overtaken(&who, id + 20, &mut given_up),
                3 => messages.expire(now, &mut given_up),
                4 if step % 3000 < 10 => given_up.extend(messages.clear()),
                5..60 => {
                    messages.close(&who, id.saturating_sub(n % 3));
                }
                _ if messages.status(&who, epoch, id, now) == MessageStatus::New => {
                    let until = now + Duration::from_millis(100);
                    let open = Open {
                        identity,
                        coverage: Coverage::default(),
                        receive: None,
                        places: Places::new(),
                        record: true,
                        chunks: false,
                        final_seen: false,
                        parity: None,
                        last: now,
                        packet: 0,
                        failed: None,
                        until,
                        timer: until,
                    };
                    messages.open(&who, epoch, id, open, now, &mut given_up);
                }
                _ => {
                    if let Some(open) = messages.get_mut(&who, id) {
                        let before = open.coverage.ranges().len();
                        let from = (n >> 4) % 990;
                        open.coverage.add(from, from + 5, 1000).unwrap();
                        let after = open.coverage.ranges().len();
                        messages.note_runs(before, after);
                    }
                }
            }
            let all = messages.sources.values().flat_map(|s| &s.open);
            let (open, runs) = all.fold((0, 0), |(open, runs), (_, m)| {
                (open + 1, runs + m.coverage.ranges().len())
            });
            assert_eq!(
                (messages.counts.open, messages.counts.runs),
                (open, runs),
                "step {step}"
            );
        }
        assert!(given_up.len() > 100, "{}", given_up.len());
    }

    fn identity() -> Identity {
        Identity {
            opcode: crate::wire::rdmap::Opcode::WriteRecord,
            length: 1000,
            base: Some((Stag(1), To(0))),
            imm: None,
            invalidate: None,
            solicited: false,
        }
    }

    fn open() -> Open {
        Open {
            identity: identity(),
            coverage: Coverage::default(),
            receive: None,
            places: Places::new(),
            record: true,
            chunks: false,
            final_seen: false,
            parity: None,
            last: Duration::ZERO,
            packet: 0,
            failed: None,
            until: Duration::MAX,
            timer: Duration::MAX,
        }
    }

    fn nth(n: usize) -> Peer {
        let [.., a, b, c, d] = n.to_be_bytes();
        (SocketAddr::from(([10, a, b, c], 4000)), d)
    }

    /// A reliable source cannot open more messages than its share, and the others keep theirs.
    #[test]
    fn the_open_messages_of_one_source_are_limited() {
        let mut messages = Messages::new(true);
        let mut given_up = Vec::new();
        for id in 0..bounds::OPEN_MESSAGES_SOURCE as u32 {
            assert!(!messages.is_full(&nth(0)), "{id}");
            messages.open(&nth(0), 1, id, open(), Duration::ZERO, &mut given_up);
        }
        assert!(messages.is_full(&nth(0)));
        assert!(!messages.is_full(&nth(1)));
        assert!(given_up.is_empty());
    }

    /// The number of sources is limited. Reliable sources are removed only if they have no open message.
    #[test]
    fn the_number_of_sources_is_limited() {
        for reliable in [false, true] {
            let mut messages = Messages::new(reliable);
            let mut given_up = Vec::new();
            for n in 0..bounds::RECORD_SOURCES + 500 {
                let now = Duration::from_millis(n as u64);
                if n < 5 {
                    messages.open(&nth(n), 1, 7, open(), now, &mut given_up);
                } else {
                    messages.close_single(&nth(n), 1, 7, now, &mut given_up);
                }
                assert!(messages.sources.len() <= bounds::RECORD_SOURCES, "{n}");
            }
            if reliable {
                assert!((0..5).all(|n| messages.get_mut(&nth(n), 7).is_some()));
                assert!(given_up.is_empty());
            }
        }
    }

    #[test]
    fn a_jump_beyond_the_window_clears_it() {
        let mut closed = Closed::default();
        closed.close(1, NOW);
        closed.close(1_000_000, NOW);
        assert!(closed.has(1_000_000, NOW) && !closed.has(999_999, NOW));
        assert!(closed.has(1, NOW));
    }

    /// A source sends 2^31 messages that leave no state, and then one that does.
    #[test]
    fn closed_numbers_are_forgotten_when_no_datagram_of_theirs_can_arrive() {
        let who = nth(1);
        let mut messages = Messages::new(false);
        let mut given_up = Vec::new();
        let (old, new) = (5, 20 + (1 << 31));
        messages.close_single(&who, 1, old, NOW, &mut given_up);
        let end = NOW + LIFETIME;
        for id in [old, new] {
            let before = end - Duration::from_nanos(1);
            assert_eq!(messages.status(&who, 1, id, before), MessageStatus::Late);
            assert_eq!(messages.status(&who, 1, id, end), MessageStatus::New);
        }
        messages.close_single(&who, 1, new, end, &mut given_up);
        assert_eq!(messages.status(&who, 1, new, end), MessageStatus::Late);
        assert_eq!(messages.status(&who, 1, new + 1, end), MessageStatus::New);
        // The time counts from the last datagram of a message, also if the message was opened long before.
        let last = end + 2 * LIFETIME;
        let message = Open { last, ..open() };
        messages.open(&who, 1, new + 1, message, end, &mut given_up);
        messages.close(&who, new + 1);
        let late = last + LIFETIME - Duration::from_nanos(1);
        assert_eq!(messages.status(&who, 1, new + 1, late), MessageStatus::Late);
    }
}
