//! Messages under way from many sources: which bytes of each have arrived, and the records of those that are over.
//!
//! A source is a queue pair elsewhere. Its messages are distinguished by number; no order is assumed, neither between
//! messages nor within one. What a source's datagrams cost us is bounded, and a source is remembered only when one of them
//! has passed every check.
//!
//! A message is *open* from its first datagram on until it is complete or given up, and *closed* from then on: a window
//! of the last `WINDOW` numbers remembers which are, so that a late copy of a datagram never touches memory that the
//! program has gone on to use.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::parity::Groups;
use super::reassemble::{Coverage, Identity, Range};
use super::table::Table;
use super::types::{Dropped, Peer};
use crate::bounds;
use crate::verbs::source::Places;
use crate::verbs::wr::RecvRequest;
use crate::wire::{Stag, To};

/// What came by a Write-Record, as the program reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Address and port of the writer.
    pub from: SocketAddr,
    /// Its queue pair.
    pub src_qpn: u32,
    /// Number of the message, of that source.
    pub id: u32,
    /// The memory written to.
    pub stag: Stag,
    /// Where in it the message begins.
    pub base: To,
    /// Bytes of the message.
    pub length: u32,
    /// Bytes of it that are there.
    pub valid: u32,
    /// A record of one datagram: where in the message it begins. 0 otherwise.
    pub offset: u32,
    /// Four bytes of the writer.
    pub imm: Option<[u8; 4]>,
    /// All of it is there.
    pub complete: bool,
    /// It is of one datagram alone, and others of the message may have their own.
    pub chunk: bool,
    /// Its final datagram, or the word that it ended, arrived.
    pub final_seen: bool,
    /// Names the map of the bytes that are there, until it is released; 0 if it needs none: all are, or a chunk.
    pub map: u64,
}

/// Records that wait for the program, and maps that it has not released.
#[derive(Debug, Default)]
pub struct Records {
    waiting: VecDeque<Record>,
    maps: HashMap<u64, Vec<Range>>,
    last: u64,
    ranges: usize,
}

impl Records {
    /// The oldest record.
    pub(super) fn poll(&mut self) -> Option<Record> {
        self.waiting.pop_front()
    }

    /// The oldest record of a message of a queue pair.
    pub(super) fn take(&mut self, src_qpn: u32, id: u32) -> Option<Record> {
        // Records and their completions have the same order, so this is the first one unless the program has left some.
        let at = self
            .waiting
            .iter()
            .position(|r| r.id == id && r.src_qpn == src_qpn)?;
        self.waiting.remove(at)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The bytes of a message that are there: runs in order, ends excluded.
    pub fn map(&self, map: u64) -> Option<&[Range]> {
        self.maps.get(&map).map(Vec::as_slice)
    }

    /// The program has read a map.
    pub(super) fn release(&mut self, map: u64) -> bool {
        match self.maps.remove(&map) {
            Some(ranges) => {
                self.ranges -= ranges.len();
                true
            }
            None => false,
        }
    }

    /// Whether there is room for one more record of a message that is complete, or of a chunk.
    pub(super) fn has_room(&self, most: u32) -> bool {
        self.waiting.len() + self.maps.len() < most as usize
    }

    /// Adds a record; false if there is no room for it.
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

/// Numbers that are remembered as closed or not; older ones count as closed.
pub(super) const WINDOW: u32 = 1024;

/// Which messages of a source are over.
#[derive(Debug, Default)]
struct Closed {
    /// The newest that is closed.
    top: Option<u32>,
    /// Bit `i`: number `top - i` is closed.
    bits: [u64; (WINDOW / 64) as usize],
}

impl Closed {
    fn has(&self, id: u32) -> bool {
        let Some(top) = self.top else {
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

    fn close(&mut self, id: u32) {
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

/// A message of which not everything has arrived.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) identity: Identity,
    pub(super) coverage: Coverage,
    /// The receive that a Send fills.
    pub(super) receive: Option<RecvRequest>,
    /// The memory of the message.
    pub(super) places: Places,
    /// It is recorded.
    pub(super) record: bool,
    /// Its final datagram was seen.
    pub(super) final_seen: bool,
    pub(super) parity: Option<Box<Groups>>,
    /// When its newest datagram came.
    pub(super) last: Duration,
    /// Reliable: number of its latest packet.
    pub(super) packet: u64,
    /// Reliable: it cannot be completed, and its sender gets an error when it is the turn of one of its packets.
    pub(super) spoilt: Option<Dropped>,
    /// When it is given up, with what is there.
    pub(super) until: Duration,
    /// What stands in the list of timers.
    pub(super) timer: Duration,
}

#[derive(Debug)]
struct Source {
    epoch: u16,
    /// The epoch before; what still comes from it is late.
    before: Option<u16>,
    closed: Closed,
    open: Vec<(u32, Box<Open>)>,
    used: Duration,
}

/// A message that is over and was not complete.
pub(super) type GivenUp = (Peer, u32, Box<Open>);

/// What a datagram is, by source, epoch and number alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Of a message that nothing has come of yet.
    New,
    /// Of one that is open.
    Open,
    /// Of one that is over, or of a queue pair that is no more.
    Late,
}

/// All messages under way.
#[derive(Debug, Default)]
pub(super) struct Messages {
    sources: Table<Peer, Source>,
    /// When a message may have to be given up; looked up again then, for it may have moved.
    timers: BTreeSet<(Duration, Peer, u32)>,
    open: usize,
    /// Runs of bytes in all that are open.
    runs: usize,
    /// Nothing that is open may be given up for something else.
    reliable: bool,
}

/// Messages that a reliable peer may have open when others have taken all the room: one, and an answer between.
const FAIR: usize = 2;

/// A newer message than this many ahead says that nothing more of an older one will come.
const AHEAD: u32 = 8;

impl Messages {
    pub(super) fn new(reliable: bool) -> Self {
        Self {
            reliable,
            ..Self::default()
        }
    }

    /// Whether one more message of `peer` would be one too many.
    pub(super) fn is_full(&self, peer: &Peer) -> bool {
        let theirs = self.sources.get(peer).map_or(0, |s| s.open.len());
        theirs >= bounds::OPEN_MESSAGES_SOURCE
            || (self.open >= bounds::OPEN_MESSAGES && theirs >= FAIR)
    }

    /// Whether all messages together have as many gaps as they may.
    pub(super) fn has_too_many_runs(&self) -> bool {
        self.runs >= bounds::OPEN_RUNS
    }

    /// An open message that had `before` runs has `after`.
    pub(super) fn note_runs(&mut self, before: usize, after: usize) {
        self.runs = (self.runs + after).saturating_sub(before);
    }

    /// Sorts in a datagram. A reliable one comes once, and its sender takes it for done when it is not refused: none is late,
    /// however old its number.
    pub(super) fn turn(&self, peer: &Peer, epoch: u16, id: u32) -> Turn {
        let Some(source) = self.sources.get(peer) else {
            return Turn::New;
        };
        if source.epoch != epoch {
            return match source.before {
                Some(before) if before == epoch && !self.reliable => Turn::Late,
                _ => Turn::New,
            };
        }
        if source.open.iter().any(|(n, _)| *n == id) {
            Turn::Open
        } else if !self.reliable && source.closed.has(id) {
            Turn::Late
        } else {
            Turn::New
        }
    }

    /// A message that is open.
    pub(super) fn get_mut(&mut self, peer: &Peer, id: u32) -> Option<&mut Open> {
        let source = self.sources.get_mut(peer)?;
        source
            .open
            .iter_mut()
            .find(|(n, _)| *n == id)
            .map(|(_, open)| &mut **open)
    }

    /// The source, which is remembered from now on. What it had under way under another epoch is given up, and so is the
    /// oldest message where there are too many.
    fn enter(
        &mut self,
        peer: &Peer,
        epoch: u16,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) -> Option<&mut Source> {
        if !self.sources.contains_key(peer) && self.sources.len() >= bounds::RECORD_SOURCES {
            // Near the oldest is good enough: the first ones of a table in random order.
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
            self.open -= source.open.len();
            for (id, open) in source.open.drain(..) {
                self.runs -= open.coverage.ranges().len();
                self.timers.remove(&(open.timer, *peer, id));
                given_up.push((*peer, id, open));
            }
            source.before = Some(source.epoch);
            source.epoch = epoch;
            source.closed = Closed::default();
        }
        Some(source)
    }

    /// A new message of which more is to come.
    pub(super) fn open(
        &mut self,
        peer: &Peer,
        epoch: u16,
        id: u32,
        open: Open,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) {
        if self.open >= bounds::OPEN_MESSAGES
            && !self.reliable
            && let Some((_, peer, id)) = self.timers.first().copied()
            && let Some(open) = self.close(&peer, id)
        {
            given_up.push((peer, id, open));
        }
        let until = open.until;
        let Some(source) = self.enter(peer, epoch, now, given_up) else {
            return;
        };
        let oldest = (source.open.len() >= bounds::OPEN_MESSAGES_SOURCE)
            .then(|| source.open.first().map(|(id, _)| *id))
            .flatten();
        source.open.push((id, Box::new(open)));
        self.open += 1;
        self.timers.insert((until, *peer, id));
        if let Some(oldest) = oldest
            && let Some(open) = self.close(peer, oldest)
        {
            given_up.push((*peer, oldest, open));
        }
    }

    /// A message came and was over at once.
    pub(super) fn close_single(
        &mut self,
        peer: &Peer,
        epoch: u16,
        id: u32,
        now: Duration,
        given_up: &mut Vec<GivenUp>,
    ) {
        if let Some(source) = self.enter(peer, epoch, now, given_up) {
            source.closed.close(id);
        }
    }

    /// A message is over.
    pub(super) fn close(&mut self, peer: &Peer, id: u32) -> Option<Box<Open>> {
        let source = self.sources.get_mut(peer)?;
        let at = source.open.iter().position(|(n, _)| *n == id)?;
        let (_, open) = source.open.remove(at);
        source.closed.close(id);
        self.open -= 1;
        self.runs -= open.coverage.ranges().len();
        self.timers.remove(&(open.timer, *peer, id));
        Some(open)
    }

    /// Message `id` of a source came: those that are far behind it will get nothing more.
    pub(super) fn overtaken(&mut self, peer: &Peer, id: u32, given_up: &mut Vec<GivenUp>) {
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

    /// Packet `seq` of a reliable source was of message `id`.
    pub(super) fn note_packet(&mut self, peer: &Peer, id: u32, seq: u64) {
        if let Some(open) = self.get_mut(peer, id) {
            open.packet = open.packet.max(seq);
        }
    }

    /// Packets of a reliable source before `base` never come. What had others behind it has lost nothing: a message's
    /// packets have numbers in a row, and the source gives up all or none of them.
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
            self.open -= source.open.len();
            for (id, open) in source.open {
                self.runs -= open.coverage.ranges().len();
                self.timers.remove(&(open.timer, *peer, id));
                given_up.push((*peer, id, open));
            }
        }
    }

    /// Messages that are over by time alone.
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

    /// A message ends earlier than its timer says.
    pub(super) fn hasten(&mut self, peer: &Peer, id: u32, until: Duration) {
        if let Some(open) = self.get_mut(peer, id)
            && until < open.until
        {
            let old = std::mem::replace(&mut open.timer, until);
            open.until = until;
            self.timers.remove(&(old, *peer, id));
            self.timers.insert((until, *peer, id));
        }
    }

    /// When [`Self::expire`] may find something.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.timers.first().map(|(at, ..)| *at)
    }

    /// Gives everything up.
    pub(super) fn clear(&mut self) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        for (peer, mut source) in self.sources.drain() {
            let all = source.open.drain(..);
            given_up.extend(all.map(|(id, open)| (peer, id, open)));
        }
        self.timers.clear();
        self.open = 0;
        self.runs = 0;
        given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_numbers_stay_closed_and_others_open() {
        let mut closed = Closed::default();
        let mut model = std::collections::HashSet::new();
        assert!(!closed.has(5));
        let mut id = u32::MAX - 3000;
        for step in 0..5000_u32 {
            // Forward mostly, sometimes by more, sometimes back.
            id = match step % 97 {
                13 => id.wrapping_add(130),
                50 => id.wrapping_sub(300),
                51 => id.wrapping_add(300),
                _ => id.wrapping_add(2),
            };
            closed.close(id);
            model.insert(id);
            let top = closed.top.unwrap();
            for back in (0..WINDOW).step_by(7) {
                let n = top.wrapping_sub(back);
                assert_eq!(closed.has(n), model.contains(&n), "{n:#x} at {step}");
            }
            assert!(closed.has(top.wrapping_sub(WINDOW)));
            assert!(!closed.has(top.wrapping_add(1)));
        }
    }

    /// Whatever ends messages: the runs that are counted are those of the ones that are open.
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
                2 => messages.overtaken(&who, id + 20, &mut given_up),
                3 => messages.expire(now, &mut given_up),
                4 if step % 3000 < 10 => given_up.extend(messages.clear()),
                5..60 => {
                    messages.close(&who, id.saturating_sub(n % 3));
                }
                _ if messages.turn(&who, epoch, id) == Turn::New => {
                    let until = now + Duration::from_millis(100);
                    let open = Open {
                        identity,
                        coverage: Coverage::default(),
                        receive: None,
                        places: Places::new(),
                        record: true,
                        final_seen: false,
                        parity: None,
                        last: now,
                        packet: 0,
                        spoilt: None,
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
            assert_eq!((messages.open, messages.runs), (open, runs), "step {step}");
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
            final_seen: false,
            parity: None,
            last: Duration::ZERO,
            packet: 0,
            spoilt: None,
            until: Duration::MAX,
            timer: Duration::MAX,
        }
    }

    fn nth(n: usize) -> Peer {
        let [.., a, b, c, d] = n.to_be_bytes();
        (SocketAddr::from(([10, a, b, c], 4000)), d)
    }

    /// One reliable source has no more than its share, and leaves the others theirs.
    #[test]
    fn one_source_has_so_many_open_messages() {
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

    /// Sources are bounded; of reliable ones those that have nothing open go.
    #[test]
    fn so_many_sources_are_remembered() {
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
    fn a_far_jump_leaves_nothing_of_the_window() {
        let mut closed = Closed::default();
        closed.close(1);
        closed.close(1_000_000);
        assert!(closed.has(1_000_000) && !closed.has(999_999));
        assert!(closed.has(1));
    }
}
