//! A link with virtual lanes: decides in virtual time who sends the next packet.
//!
//! A *flow* is the sending side of one queue pair. It may send as long as its allowance is positive. The link carries
//! one packet after the other at its rate, and each packet increases the allowance of one flow. A flow may send more
//! than its allowance at once, because an FPDU is longer than a packet: the allowance becomes negative, and later
//! packets make it positive again. So the rate of the link, and the share of it that each lane gets, are exact over time,
//! although bytes leave in larger pieces.

use std::collections::{BTreeMap, BTreeSet};

use super::settings::{LANES, LEVELS, Settings, Share};
use crate::bounds::{QOS_AHEAD, QOS_CATCH_UP, QOS_PACKET, QOS_SILENCE};

/// A time in nanoseconds from any fixed moment.
pub type Nanos = u64;

/// The name of a flow, unique on the link.
pub type FlowId = u64;

/// The first word of a link's encoded state, with the version of the encoding.
const MAGIC: u64 = 0x616e_7977_6c6b_0001;

/// Limit of a decoded number of bytes, positive or negative.
const COUNT_MAX: i64 = 1 << 48;

/// The state of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flow {
    lane: u8,
    /// Bytes that it may send. Negative: bytes that it has sent too early.
    allowance: i64,
    /// The allowance at which the flow gets no more packets; 0 if it has nothing to send.
    demand: i64,
    /// When its process was last known to be alive.
    seen: Nanos,
}

impl Flow {
    /// Whether packets are carried for it: it wants to send, or has sent too early.
    fn is_eligible(&self) -> bool {
        self.allowance < self.demand
    }
}

/// A table of lanes that are served in turn, each with its weight.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Table {
    shares: Vec<Share>,
    /// The credit of each entry: bytes that it may still send in its turn.
    credits: Vec<i64>,
    /// The entry whose turn it is.
    turn: usize,
}

impl Table {
    fn new(shares: &[Share]) -> Self {
        Self {
            shares: shares.to_vec(),
            credits: vec![0; shares.len()],
            turn: 0,
        }
    }

    /// Whether this table has a weight for one of the lanes in the bit mask `waiting`.
    fn serves(&self, waiting: u32) -> bool {
        self.shares
            .iter()
            .any(|share| share.weight > 0 && waiting >> share.lane & 1 == 1)
    }

    /// The entry that sends next; `None` if no lane of the table waits.
    ///
    /// An entry sends as long as it has credit, and may exceed it with its last packet. The excess is deducted from its
    /// next turn, so that weights of fewer bytes than a packet are met too. If no waiting entry has credit, a new round begins.
    fn pick(&mut self, waiting: u32) -> Option<usize> {
        let count = self.shares.len();
        let waits = |share: &Share| share.weight > 0 && waiting >> share.lane & 1 == 1;
        for _ in 0..2 {
            let found = (0..count)
                .map(|step| (self.turn % count + step) % count)
                .find(|&at| {
                    let share = self.shares.get(at).is_some_and(waits);
                    share && self.credits.get(at).is_some_and(|credit| *credit > 0)
                });
            if let Some(at) = found {
                self.turn = at;
                return Some(at);
            }
            // Begins as many rounds as it takes until a waiting lane has credit.
            let entries = self.shares.iter().zip(&self.credits);
            let rounds = entries
                .filter(|(share, _)| waits(share))
                .map(|(share, credit)| (share.bytes() - credit) / share.bytes())
                .min()?;
            for (share, credit) in self.shares.iter().zip(&mut self.credits) {
                *credit += rounds * share.bytes();
                if !waits(share) {
                    // A lane that has nothing to send loses its turn, but the excess of earlier turns still counts.
                    *credit = (*credit).min(0);
                }
            }
            self.turn = self.turn.wrapping_add(1) % count.max(1);
        }
        None
    }
}

/// A link and the flows on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    rate: u64,
    lanes: [u8; LEVELS],
    high_limit: Option<u32>,
    high: Table,
    low: Table,
    /// Bytes of high priority that may be sent before a waiting packet of low priority.
    high_left: i64,
    /// The time at which all packets so far have been carried.
    free_at: Nanos,
    flows: BTreeMap<FlowId, Flow>,
    /// The eligible flows of each lane.
    queues: [BTreeSet<FlowId>; LANES],
    /// For each lane, the flow that was served last.
    last: [FlowId; LANES],
}

impl Link {
    /// A link without flows.
    pub fn new(settings: &Settings) -> Self {
        Self {
            rate: settings.rate.max(1),
            lanes: settings.lanes,
            high_limit: settings.high_limit,
            high: Table::new(&settings.high),
            low: Table::new(&settings.low),
            high_left: i64::from(settings.high_limit.unwrap_or(0)),
            free_at: 0,
            flows: BTreeMap::new(),
            queues: std::array::from_fn(|_| BTreeSet::new()),
            last: [0; LANES],
        }
    }

    /// A flow of service level `level` wants to send. Returns how many bytes it may send now; 0: it has to wait until
    /// [`Self::allowance`] is positive.
    pub fn ask(&mut self, now: Nanos, id: FlowId, level: u8) -> u64 {
        let demand = self.flows.get(&id).map_or(1, |flow| flow.demand.max(1));
        self.want(now, id, level, demand);
        self.serve(now);
        self.allowance(id)
    }

    /// A flow has sent `bytes`. With `more` it wants to send more, and waits.
    pub fn sent(&mut self, now: Nanos, id: FlowId, level: u8, bytes: u64, more: bool) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.allowance -= i64::try_from(bytes).unwrap_or(i64::MAX);
            if !more {
                // It keeps the rest of its allowance for its next message, at most one packet.
                flow.allowance = flow.allowance.min(QOS_PACKET);
            }
        }
        let demand = if more { self.ahead() } else { 0 };
        self.want(now, id, level, demand);
    }

    /// How many bytes a flow may send now.
    pub fn allowance(&self, id: FlowId) -> u64 {
        let allowance = self.flows.get(&id).map_or(0, |flow| flow.allowance);
        u64::try_from(allowance).unwrap_or(0)
    }

    /// Whether the flow is on the link.
    pub fn knows(&self, id: FlowId) -> bool {
        self.flows.contains_key(&id)
    }

    /// Forgets a flow.
    pub fn leave(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.remove(&id)
            && let Some(queue) = self.queues.get_mut(usize::from(flow.lane))
        {
            queue.remove(&id);
        }
    }

    /// Carries the packets for which the link has had time until `now`.
    pub fn serve(&mut self, now: Nanos) {
        while self.free_at <= now {
            let Some((len, sent_before)) = self.carry_packet(now) else {
                return;
            };
            // The link has carried bytes that left before in the meantime, also if no thread called this function.
            if !sent_before {
                self.free_at = self.free_at.max(now.saturating_sub(QOS_CATCH_UP));
            }
            self.free_at += self.time_of(len);
        }
    }

    /// When the flow may send if no other flow is served before it; `None` if it has nothing to send.
    pub fn next(&self, id: FlowId) -> Option<Nanos> {
        let flow = self.flows.get(&id).filter(|flow| flow.demand > 0)?;
        let missing = u64::try_from(-flow.allowance).unwrap_or(0);
        Some(self.free_at + self.time_of(missing))
    }

    /// Removes the flows that have neither asked to send nor been touched ([`Self::touch`]) for the time [`QOS_SILENCE`]: their processes
    /// have ended, or they have nothing to send. Flows that have sent too early stay until the link has carried these bytes.
    pub fn forget_silent(&mut self, now: Nanos) {
        let silent =
            |flow: &Flow| now.saturating_sub(flow.seen) > QOS_SILENCE && flow.allowance >= 0;
        let gone: Vec<_> = self
            .flows
            .iter()
            .filter(|(_, flow)| silent(flow))
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.leave(id);
        }
    }

    /// Notes that the process of a flow is alive.
    pub fn touch(&mut self, now: Nanos, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.seen = now;
        }
    }

    fn time_of(&self, bytes: u64) -> Nanos {
        let time = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        u64::try_from(time).unwrap_or(u64::MAX / 2)
    }

    /// The allowance, in bytes, up to which a flow that wants to send more gets packets without sending.
    fn ahead(&self) -> i64 {
        let carried = u128::from(self.rate) * u128::from(QOS_CATCH_UP) / 1_000_000_000;
        i64::try_from(carried).unwrap_or(i64::MAX).max(QOS_AHEAD)
    }

    /// Sets what a flow wants, and creates it if it is new.
    fn want(&mut self, now: Nanos, id: FlowId, level: u8, demand: i64) {
        let lane = self
            .lanes
            .get(usize::from(level) % LEVELS)
            .copied()
            .unwrap_or(0);
        let idle = self.waiting() == 0;
        let flow = self.flows.entry(id).or_insert(Flow {
            lane,
            allowance: 0,
            demand: 0,
            seen: now,
        });
        flow.seen = now;
        flow.demand = demand;
        let (before, eligible) = (usize::from(flow.lane), flow.is_eligible());
        flow.lane = lane;
        if let Some(queue) = self.queues.get_mut(before) {
            queue.remove(&id);
        }
        if eligible && let Some(queue) = self.queues.get_mut(usize::from(lane)) {
            queue.insert(id);
            if idle {
                // Time in which the link was idle is not available for later packets.
                self.free_at = self.free_at.max(now);
            }
        }
    }

    /// The lanes with eligible flows, as bits.
    fn waiting(&self) -> u32 {
        let lanes = self.queues.iter().enumerate();
        lanes.fold(0, |bits, (lane, queue)| {
            bits | u32::from(!queue.is_empty()) << lane
        })
    }

    /// Carries a packet of the flow whose turn it is. Returns its length, and whether the flow had sent its bytes before; `None` if no flow
    /// waits.
    fn carry_packet(&mut self, now: Nanos) -> Option<(u64, bool)> {
        let waiting = self.waiting();
        let (high, low) = (self.high.serves(waiting), self.low.serves(waiting));
        // IBA 7.6.9.2: when the limit is reached, one packet of low priority is sent. A limit of 0 allows one packet of high
        // priority.
        let limit = i64::from(self.high_limit.unwrap_or(0)).max(1);
        let unlimited = self.high_limit.is_none();
        let from_high = high && (unlimited || !low || self.high_left > 0);
        if !from_high && !low {
            return None;
        }
        let table = if from_high {
            &mut self.high
        } else {
            &mut self.low
        };
        let at = table.pick(waiting)?;
        let lane = usize::from(table.shares.get(at)?.lane);
        let (len, sent_before) = self.carry_for(lane, now)?;
        let table = if from_high {
            &mut self.high
        } else {
            &mut self.low
        };
        *table.credits.get_mut(at)? -= len;
        if !from_high || self.high_left <= 0 {
            self.high_left = limit;
        }
        if from_high {
            self.high_left -= len;
        }
        u64::try_from(len).ok().map(|len| (len, sent_before))
    }

    /// Gives a packet to the next flow of a lane. Returns its length, and whether the flow had sent its bytes before.
    fn carry_for(&mut self, lane: usize, now: Nanos) -> Option<(i64, bool)> {
        let (queue, last) = (self.queues.get_mut(lane)?, self.last.get_mut(lane)?);
        let next = queue.range(last.saturating_add(1)..).next();
        let next = next.or_else(|| queue.first());
        let id = *next?;
        *last = id;
        let flow = self.flows.get_mut(&id)?;
        let len = if flow.demand > 0 {
            QOS_PACKET
        } else {
            (-flow.allowance).clamp(1, QOS_PACKET)
        };
        let sent_before = flow.allowance < 0;
        flow.allowance += len;
        if !flow.is_eligible() {
            queue.remove(&id);
        }
        debug_assert!(now >= flow.seen, "the time never decreases");
        Some((len, sent_before))
    }

    // ------------------------------------------------------------------ sharing

    /// Encodes the state, for other processes that share the link.
    pub fn encode(&self, fingerprint: u64) -> Vec<u8> {
        let mut words = vec![
            MAGIC,
            fingerprint,
            self.free_at,
            self.high_left.cast_unsigned(),
        ];
        for table in [&self.high, &self.low] {
            words.push(table.turn as u64);
            words.extend(table.credits.iter().map(|credit| credit.cast_unsigned()));
        }
        words.extend(self.last);
        words.push(self.flows.len() as u64);
        for (id, flow) in &self.flows {
            let (allowance, demand) = (flow.allowance.cast_unsigned(), flow.demand.cast_unsigned());
            words.extend([*id, u64::from(flow.lane), allowance, demand, flow.seen]);
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Decodes the state of a link with these settings.
    ///
    /// # Errors
    /// Why the bytes are not a state of this link.
    pub fn decode(settings: &Settings, bytes: &[u8], now: Nanos) -> Result<Self, &'static str> {
        let mut words = bytes.chunks_exact(8).map(|chunk| {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        if words.next() != Some(MAGIC) {
            return Err("it is not the state of a link: name a file that does not exist yet");
        }
        if words.next() != Some(settings.fingerprint()) {
            return Err(
                "it belongs to a link with other settings: give all processes the same ones, or remove the file",
            );
        }
        let mut link = Self::new(settings);
        link.fill(&mut words)
            .ok_or("its end is missing: remove the file")?;
        // The link is never busy for longer than a packet takes. If `free_at` is later than that, the state was stored before
        // the host was booted.
        let busy = link.free_at.saturating_sub(now);
        if busy > link.time_of(QOS_PACKET.unsigned_abs()) {
            return Ok(Self::new(settings));
        }
        Ok(link)
    }

    fn fill(&mut self, words: &mut impl Iterator<Item = u64>) -> Option<()> {
        self.free_at = words.next()?;
        self.high_left = count(words.next()?);
        for table in [&mut self.high, &mut self.low] {
            table.turn = usize::try_from(words.next()?).ok()?;
            for credit in &mut table.credits {
                *credit = count(words.next()?);
            }
        }
        for last in &mut self.last {
            *last = words.next()?;
        }
        for _ in 0..words.next()? {
            let (id, lane) = (words.next()?, words.next()?);
            let flow = Flow {
                lane: u8::try_from(lane).ok()?,
                allowance: count(words.next()?),
                demand: count(words.next()?),
                seen: words.next()?,
            };
            if flow.is_eligible() {
                self.queues.get_mut(usize::from(flow.lane))?.insert(id);
            }
            self.flows.insert(id, flow);
        }
        Some(())
    }
}

/// Decodes a number of bytes. Numbers out of range, which only a damaged file has, are limited, so that sums do not overflow.
fn count(word: u64) -> i64 {
    word.cast_signed().clamp(-COUNT_MAX, COUNT_MAX)
}
