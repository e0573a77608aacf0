//! Pacing: how much may be under way to a peer before it said that it keeps up.
//!
//! A socket drops what its owner does not fetch in time, and a program that posts a hundred sends at once would lose
//! most of them where no wire slows it down; hardware loses none of them. So a receiver *reports* now and then how far
//! it has come and how much room its socket has, and a sender waits when more than that is under way. Reports are
//! advice: one that is lost, false or missing costs time, never a message. A peer that stays silent is not waited for
//! any more until it speaks again; one that never spoke is waited for once.
//!
//! A report is a control datagram ([`Control::Ack`] with the number of the last message that was seen) with a payload:
//!
//! ```text
//!  0                              4          8
//! +------------------------------+----------+
//! | end of the payload last seen |   room   |
//! +------------------------------+----------+
//! ```

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use crate::bounds;
use crate::wire::Msn;
use crate::wire::control::Control;
use crate::wire::ddp::Untagged;
use crate::wire::dgram::{self, Shim};

/// A queue pair elsewhere: its address and port, and its index there.
pub(super) type Peer = (SocketAddr, u8);

/// How far a receiver has come with a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    /// The message of the datagram that it saw last.
    pub(super) id: u32,
    /// Where in the message the payload of that datagram ends.
    pub(super) end: u32,
    /// Charge that may be under way to it.
    pub(super) room: u32,
}

impl Report {
    /// Bytes of the payload.
    pub(super) const LEN: usize = 8;

    /// Header and payload.
    pub(super) fn emit(&self) -> (Untagged, [u8; Self::LEN]) {
        let [e0, e1, e2, e3] = self.end.to_be_bytes();
        let [r0, r1, r2, r3] = self.room.to_be_bytes();
        let header = Control::Ack { seq: self.id }.header();
        (header, [e0, e1, e2, e3, r0, r1, r2, r3])
    }

    /// Reads a report; `None` if it is something else.
    pub(super) fn parse(header: &Untagged, payload: &[u8]) -> Option<Self> {
        let Ok(Control::Ack { seq }) = Control::parse(header) else {
            return None;
        };
        let [e0, e1, e2, e3, r0, r1, r2, r3] = *payload.first_chunk::<{ Self::LEN }>()?;
        Some(Self {
            id: Msn(seq).0,
            end: u32::from_be_bytes([e0, e1, e2, e3]),
            room: u32::from_be_bytes([r0, r1, r2, r3]),
        })
    }
}

/// Bytes of the datagram of a report.
const REPORT: usize = Shim::LEN + Untagged::LEN + Report::LEN + dgram::CRC;

/// What a datagram of `bytes` takes of a socket's room. The kernel counts the memory that it lies in, which is up to
/// twice as much, and a structure of its own.
pub(crate) fn charge(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX / 4) * 2 + 1024
}

/// What is under way to a peer.
#[derive(Debug)]
struct Window {
    /// Message, end of payload, and charge of each datagram that was not reported.
    under_way: VecDeque<(u32, u32, u32)>,
    charge: u64,
    limit: u64,
    /// Stalls since it reported last; none of it was heard yet at [`UNHEARD`].
    silence: u8,
}

/// Stalls after which a peer that used to report is not waited for any more.
const PATIENCE: u8 = 10;
/// A peer that never reported; one stall is enough.
const UNHEARD: u8 = PATIENCE - 1;

impl Window {
    /// It does not report: never mind.
    fn is_silent(&self) -> bool {
        self.silence >= PATIENCE
    }
}

/// What has come from a peer.
#[derive(Debug, Default)]
struct Source {
    /// Charge since the last report.
    since: u64,
    /// Bytes that came from it, less those that it was sent for them.
    credit: u64,
    told: bool,
}

/// Windows to all peers, and reports to them.
#[derive(Debug, Default)]
pub(super) struct Flow {
    windows: HashMap<Peer, Window>,
    sources: HashMap<Peer, Source>,
    /// To whom, from which of our addresses, what.
    reports: VecDeque<(Peer, Option<IpAddr>, Report)>,
    /// Room that we announce.
    room: u32,
    stalled: Option<Peer>,
    /// Counts stalls.
    stalls: u64,
}

impl Flow {
    pub(super) fn new() -> Self {
        Self {
            room: bounds::DATAGRAM_WINDOW,
            ..Self::default()
        }
    }

    /// Forgets all peers.
    pub(super) fn reset(&mut self) {
        let (room, stalls) = (self.room, self.stalls);
        *self = Self {
            room,
            stalls,
            ..Self::default()
        };
    }

    pub(super) fn set_room(&mut self, room: u32) {
        self.room = room.max(bounds::DATAGRAM_WINDOW);
    }

    // ------------------------------------------------------------------ sender

    /// Whether a datagram may be sent to `peer` now. If not, the queue pair is stalled until a report comes.
    pub(super) fn may_send(&mut self, peer: &Peer) -> bool {
        let full = self
            .windows
            .get(peer)
            .is_some_and(|w| !w.is_silent() && w.charge >= w.limit);
        if full && self.stalled != Some(*peer) {
            self.stalled = Some(*peer);
            self.stalls += 1;
        }
        !full
    }

    /// Whether a datagram may be sent to `peer` now; nobody waits for it if not.
    pub(super) fn is_open(&self, peer: &Peer) -> bool {
        let window = self.windows.get(peer);
        window.is_none_or(|w| w.is_silent() || w.charge < w.limit)
    }

    /// What is under way to `peer` counts as lost, since it says nothing.
    pub(super) fn forgive(&mut self, peer: &Peer) {
        if let Some(window) = self.windows.get_mut(peer) {
            window.silence = window.silence.saturating_add(1);
            window.under_way = VecDeque::new();
            window.charge = 0;
        }
    }

    /// A datagram goes to `peer`.
    pub(super) fn sent(&mut self, peer: Peer, id: u32, end: u32, bytes: usize) {
        if self.windows.len() >= bounds::DATAGRAM_PEERS && !self.windows.contains_key(&peer) {
            self.windows.clear();
            self.stalled = None;
        }
        let window = self.windows.entry(peer).or_insert_with(|| Window {
            under_way: VecDeque::new(),
            charge: 0,
            limit: bounds::DATAGRAM_WINDOW.into(),
            silence: UNHEARD,
        });
        if !window.is_silent() {
            let charge = charge(bytes);
            window.under_way.push_back((id, end, charge));
            window.charge += u64::from(charge);
        }
    }

    /// `peer` reports.
    pub(super) fn handle_report(&mut self, peer: &Peer, report: &Report) {
        let Some(window) = self.windows.get_mut(peer) else {
            return;
        };
        window.silence = 0;
        let room = report
            .room
            .clamp(bounds::DATAGRAM_WINDOW, bounds::DATAGRAM_WINDOW_MAX);
        window.limit = room.into();
        // Datagrams stay in order on the way, or nearly so: what was sent before one that arrived is no longer there.
        while let Some((id, end, charge)) = window.under_way.front().copied() {
            let ahead = id.wrapping_sub(report.id);
            let seen = (ahead == 0 && end <= report.end) || ahead >= 1 << 31;
            if !seen {
                break;
            }
            window.under_way.pop_front();
            window.charge = window.charge.saturating_sub(charge.into());
        }
        if self.stalled == Some(*peer) && window.charge < window.limit {
            self.stalled = None;
        }
    }

    /// Number of the present stall.
    pub(super) fn stall(&self) -> Option<u64> {
        self.stalled.map(|_| self.stalls)
    }

    /// The peer has been silent for long enough: what was under way to it counts as lost.
    pub(super) fn give_up_waiting(&mut self) {
        if let Some(peer) = self.stalled.take() {
            self.forgive(&peer);
        }
    }

    // ------------------------------------------------------------------ receiver

    /// A datagram of `bytes` came from `peer`.
    pub(super) fn came(&mut self, peer: Peer, bytes: usize) {
        if self.sources.len() >= bounds::DATAGRAM_PEERS && !self.sources.contains_key(&peer) {
            self.sources.clear();
        }
        let source = self.sources.entry(peer).or_default();
        source.since += u64::from(charge(bytes));
        source.credit += bytes as u64;
    }

    /// Whether `bytes` may be sent to `peer` for what came from there: its address may be somebody else's, and no more goes
    /// there than came from there.
    pub(super) fn spend(&mut self, peer: &Peer, bytes: usize) -> bool {
        let Some(source) = self.sources.get_mut(peer) else {
            return false;
        };
        let left = source.credit.checked_sub(bytes as u64);
        source.credit = left.unwrap_or(source.credit);
        left.is_some()
    }

    /// A datagram that [`Self::came`] from `peer` to our address `from` is reported, if it is the first one or a part of our
    /// room has come since.
    pub(super) fn heard(&mut self, peer: Peer, from: Option<IpAddr>, id: u32, end: u32) {
        let quarter = u64::from(self.room / 4);
        let due = |s: &Source| !s.told || s.since >= quarter;
        if !self.sources.get(&peer).is_some_and(due) || !self.spend(&peer, REPORT) {
            return;
        }
        if let Some(source) = self.sources.get_mut(&peer) {
            source.since = 0;
            source.told = true;
        }
        let report = Report {
            id,
            end,
            room: self.room,
        };
        if let Some(waiting) = self.reports.iter_mut().find(|r| r.0 == peer) {
            // The newer one says all that the older one would have said.
            *waiting = (peer, from, report);
        } else if self.reports.len() < bounds::DATAGRAM_PEERS {
            self.reports.push_back((peer, from, report));
        }
    }

    /// The next report to send.
    pub(super) fn next_report(&mut self) -> Option<(Peer, Option<IpAddr>, Report)> {
        self.reports.pop_front()
    }

    /// Whether there are reports to send.
    pub(super) fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(port: u16) -> Peer {
        (SocketAddr::from(([10, 0, 0, 1], port)), 3)
    }

    #[test]
    fn a_report_reads_as_it_was_written() {
        let report = Report {
            id: 0xfedc_ba98,
            end: 0x1234,
            room: 77,
        };
        let (header, payload) = report.emit();
        assert_eq!(Report::parse(&header, &payload), Some(report));
        assert_eq!(Report::parse(&header, &payload[..7]), None);
        assert_eq!(Report::parse(&Control::Ping.header(), &payload), None);
    }

    #[test]
    fn a_full_window_opens_when_its_peer_reports() {
        let mut flow = Flow::new();
        let mut id = u32::MAX - 3;
        while flow.may_send(&peer(1)) {
            flow.sent(peer(1), id, 100, 1000);
            id = id.wrapping_add(1);
        }
        assert_eq!(flow.stall(), Some(1));
        assert!(flow.may_send(&peer(2)), "another peer has its own");
        let mut report = Report {
            id: id.wrapping_sub(1),
            end: 99,
            room: 0,
        };
        // All but the last one arrived, over the end of the numbers.
        flow.handle_report(&peer(2), &report);
        assert_eq!(flow.stall(), Some(1));
        flow.handle_report(&peer(1), &report);
        assert_eq!(flow.stall(), None);
        assert_eq!(flow.windows[&peer(1)].under_way.len(), 1);
        report.end = 100;
        flow.handle_report(&peer(1), &report);
        assert_eq!(flow.windows[&peer(1)].charge, 0);
        // A report of something that was not sent yet changes nothing to the worse.
        report.id = report.id.wrapping_add(1000);
        flow.handle_report(&peer(1), &report);
        assert!(flow.may_send(&peer(1)));
    }

    #[test]
    fn a_silent_peer_is_not_waited_for_until_it_speaks() {
        let mut flow = Flow::new();
        let fill = |flow: &mut Flow| {
            let mut n = 0;
            while n < 10_000 && flow.may_send(&peer(1)) {
                flow.sent(peer(1), 1, 100, 1000);
                n += 1;
            }
            n
        };
        let n = fill(&mut flow);
        assert!(n < 100);
        flow.give_up_waiting();
        assert_eq!(flow.stall(), None);
        assert_eq!(fill(&mut flow), 10_000);
        let report = Report {
            id: 1,
            end: 100,
            room: 1 << 20,
        };
        flow.handle_report(&peer(1), &report);
        let more = fill(&mut flow);
        assert!(more > n && more < 10_000);
        assert_eq!(flow.stall(), Some(2));
        // It is known to report, so it has more patience.
        for stall in 3..=PATIENCE.into() {
            flow.give_up_waiting();
            assert_eq!(fill(&mut flow), more);
            assert_eq!(flow.stall(), Some(stall));
        }
        flow.give_up_waiting();
        assert_eq!(fill(&mut flow), more);
        flow.give_up_waiting();
        assert_eq!(fill(&mut flow), 10_000);
    }

    #[test]
    fn the_first_datagram_is_reported_and_then_a_quarter_of_the_room_at_a_time() {
        let mut flow = Flow::new();
        flow.set_room(1 << 20);
        let mut reported = Vec::new();
        for id in 1..=1000 {
            flow.came(peer(1), 1000);
            flow.heard(peer(1), None, id, 5);
            if let Some((to, _, report)) = flow.next_report() {
                assert_eq!(to, peer(1));
                assert_eq!((report.id, report.room), (id, 1 << 20));
                reported.push(id);
            }
        }
        let each = (1 << 18) / charge(1000) + 1;
        assert_eq!(reported[..3], [1, 1 + each, 1 + 2 * each]);
    }

    #[test]
    fn strangers_cost_a_bounded_amount() {
        let mut flow = Flow::new();
        for port in 0..u16::MAX {
            flow.came(peer(port), 1000);
            flow.heard(peer(port), None, 1, 1);
            flow.sent(peer(port), 1, 1, 1);
        }
        assert!(flow.sources.len() <= bounds::DATAGRAM_PEERS);
        assert!(flow.windows.len() <= bounds::DATAGRAM_PEERS);
        assert!(flow.reports.len() <= bounds::DATAGRAM_PEERS);
    }

    #[test]
    fn nobody_is_sent_more_than_came_from_there() {
        let mut flow = Flow::new();
        let (mut came, mut went) = (0, 0);
        for n in 0..100 {
            flow.came(peer(1), 41);
            came += 41;
            for part in [30, REPORT, 20] {
                if n % 3 == 0 && flow.spend(&peer(1), part) {
                    went += part;
                }
            }
            flow.heard(peer(1), None, n, 0);
            went += flow.next_report().map_or(0, |_| REPORT);
            assert!(went <= came, "{went} of {came}");
        }
        assert!(went >= REPORT && flow.sources[&peer(1)].told);
        assert!(!flow.spend(&peer(2), 1));
    }
}
