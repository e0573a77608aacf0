//! Pacing: how much may be under way to a peer before it has reported.
//!
//! A socket drops datagrams that its owner does not fetch in time. A program that posts a hundred sends at once to
//! the same host would lose most of them, while hardware loses none. So a receiver sends *reports* from time to time:
//! the last datagram that it has seen, and the size of its socket buffer. A sender waits while more than this size
//! is under way. Such a wait is called a *stall*, and ends with a report or after a limited time. A report that is lost,
//! wrong or missing delays messages, and loses none. If a peer stays silent for several stalls, the sender no
//! longer waits for it, and waits again after its next report. For a peer that has never reported, one stall is enough. Without reports the sender
//! sends at a fixed rate, low enough that no queue on the path overflows.
//!
//! Any host can send reports, and a stall delays the messages to all peers. So a report counts only if it names a
//! datagram that was sent to its source, and the room is at least [`bounds::DATAGRAM_WINDOW`], whatever the report says.
//!
//! A report is a control datagram ([`Control::Ack`] with the number of the last message that was seen) with a payload:
//!
//! ```text
//!  0                              4          8
//! +------------------------------+----------+
//! | end of the payload last seen |   room   |
//! +------------------------------+----------+
//! ```

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use super::outgoing::index;
use super::table::Recent;
use super::types::{MULTICAST_QPN, Peer};
use crate::bounds;
use crate::verbs::wr::Destination;
use crate::wire::Msn;
use crate::wire::control::Control;
use crate::wire::ddp::Untagged;
use crate::wire::dgram::{self, Shim};

/// The last datagram of a sender that a receiver has seen, and the receiver's room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    /// The message of the datagram that was seen last.
    pub(super) id: u32,
    /// Where in the message the payload of that datagram ends.
    pub(super) end: u32,
    /// How much may be under way to the receiver, as a charge (see [`charge`]).
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

    /// Parses a report. `None` if the datagram is not a report.
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

/// The *charge* of a datagram: the part of a socket's receive buffer that it uses. The kernel counts the memory of a
/// datagram, which is up to twice its length, and a structure for each.
pub(crate) fn charge(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX / 4) * 2 + 1024
}

/// The datagrams that are under way to a peer.
#[derive(Debug)]
pub(super) struct Window {
    /// Message, end of payload and charge of each datagram that the peer has not reported. The charge is 0 if the datagram is
    /// assumed to be lost, or was sent while the peer was silent: it does not use the window, but the peer may still report it.
    under_way: VecDeque<(u32, u32, u32)>,
    /// The first and the last message of the datagrams that were removed from this list since the last report, although the peer may
    /// still report them.
    forgotten: Option<(u32, u32)>,
    charge: u64,
    limit: u64,
    /// A silent peer is assumed to fetch datagrams at [`SILENT_RATE`]. Those that it has fetched before this time are not in `charge`
    /// any more.
    reduced_until: Duration,
    /// The number of stalls since the last report. A peer that has never reported starts at [`NEVER_REPORTED`].
    silence: u8,
}

/// The number of stalls after which a peer that used to report counts as silent.
const STALLS_UNTIL_SILENT: u8 = 10;
/// The number of stalls with which a peer that has never reported starts: after one stall it counts as silent.
const NEVER_REPORTED: u8 = STALLS_UNTIL_SILENT - 1;
/// The number of reports that a source gets for its first datagrams, so that the loss of one report does not stop it.
const EARLY: u8 = 4;
/// The charge per second that a silent peer is assumed to fetch. It allows some 33,000 datagrams of 1,500 bytes per second.
const SILENT_RATE: u64 = 128 << 20;
/// The charge that may be under way to a silent peer.
const SILENT_WINDOW: u64 = 1 << 20;
/// How long the queue pair waits at least when [`SILENT_WINDOW`] is full.
const SILENT_WAIT: Duration = Duration::from_millis(1);
/// The number of datagrams with a charge of 0 that are remembered one by one. At [`SILENT_RATE`] they are those of the last 31 ms if
/// each fills a packet of 1,500 bytes, and of the last 9 ms if they are short.
const REMEMBERED: usize = 1024;
/// The most message numbers in [`Window::forgotten`]. A forged report with any number would hit them once in 65,536 times.
const FORGOTTEN: u32 = 1 << 16;

impl Window {
    fn new() -> Self {
        Self {
            under_way: VecDeque::new(),
            forgotten: None,
            charge: 0,
            limit: bounds::DATAGRAM_WINDOW.into(),
            reduced_until: Duration::ZERO,
            silence: NEVER_REPORTED,
        }
    }

    /// Whether the peer does not report, so that the fixed rate applies.
    fn is_silent(&self) -> bool {
        self.silence >= STALLS_UNTIL_SILENT
    }

    /// The charge that a silent peer is assumed to have fetched since `reduced_until`.
    fn fetched(&self, now: Duration) -> u64 {
        let time = now
            .saturating_sub(self.reduced_until)
            .min(Duration::from_secs(1));
        let fetched = u128::from(SILENT_RATE) * time.as_nanos() / 1_000_000_000;
        u64::try_from(fetched).unwrap_or(u64::MAX)
    }

    #[inline]
    pub(super) fn is_full(&self, now: Duration) -> bool {
        if self.is_silent() {
            self.charge.saturating_sub(self.fetched(now)) >= SILENT_WINDOW
        } else {
            // One datagram may always be under way.
            self.charge > 0 && self.charge >= self.limit
        }
    }

    /// Records a datagram of message `id`, whose payload ends at `end` of the message.
    #[inline]
    pub(super) fn sent(&mut self, id: u32, end: u32, bytes: usize, now: Duration) {
        let charge = charge(bytes);
        if self.is_silent() {
            self.charge = self.charge.saturating_sub(self.fetched(now));
            self.reduced_until = now;
            if self.under_way.len() >= REMEMBERED
                && let Some((forgotten, ..)) = self.under_way.pop_front()
            {
                self.forget(forgotten);
            }
            self.under_way.push_back((id, end, 0));
        } else {
            self.under_way.push_back((id, end, charge));
        }
        self.charge += u64::from(charge);
    }

    /// Records that a datagram of message `id` is not in the list any more.
    fn forget(&mut self, id: u32) {
        let first = self.forgotten.map(|(first, _)| first);
        let first = first.filter(|first| id.wrapping_sub(*first) < FORGOTTEN);
        self.forgotten = Some((first.unwrap_or(id), id));
    }

    /// Whether a datagram of message `id` may have been removed from the list.
    fn is_forgotten(&self, id: u32) -> bool {
        let covers = |(first, last): (u32, u32)| id.wrapping_sub(first) <= last.wrapping_sub(first);
        self.forgotten.is_some_and(covers)
    }

    /// Assumes that all datagrams under way are lost. They are remembered, because their report may only be late.
    fn assume_lost(&mut self) {
        while self.under_way.len() > REMEMBERED
            && let Some((forgotten, ..)) = self.under_way.pop_front()
        {
            self.forget(forgotten);
        }
        self.under_way.shrink_to(REMEMBERED);
        for (_, _, charge) in &mut self.under_way {
            *charge = 0;
        }
        self.charge = 0;
        self.silence = self.silence.saturating_add(1);
    }
}

/// The datagrams that have come from a peer.
#[derive(Debug, Default)]
struct Source {
    /// The charge of its datagrams since the last report.
    since: u64,
    /// Bytes that came from the peer, minus bytes that were sent to it in answer. See [`Flow::spend`].
    credit: u64,
    /// The number of reports to the peer, up to 255.
    reports_sent: u8,
}

/// The windows to all peers, and the reports to them.
#[derive(Debug, Default)]
pub(super) struct Flow {
    windows: Recent<Peer, Window>,
    sources: Recent<Peer, Source>,
    /// Reports to send: the peer, the source address, and the report.
    reports: VecDeque<(Peer, Option<IpAddr>, Report)>,
    /// The room that this end reports.
    room: u32,
    stalled: Option<Peer>,
    /// When the stall of a silent peer ends.
    until: Option<Duration>,
    /// The number of stalls so far.
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

    /// Whether a datagram may be sent to `peer` now. If not, the queue pair stalls until the peer reports or the stall is ended.
    pub(super) fn may_send(&mut self, peer: &Peer, now: Duration) -> bool {
        let window = self.windows.get(peer);
        let Some(window) = window.filter(|w| w.is_full(now)) else {
            return true;
        };
        if self.stalled != Some(*peer) {
            self.until = window.is_silent().then_some(now + SILENT_WAIT);
            self.stalled = Some(*peer);
            self.stalls += 1;
        }
        false
    }

    /// Whether a datagram may be sent to `peer` now. If not, no wait begins.
    pub(super) fn is_open(&self, peer: &Peer, now: Duration) -> bool {
        let window = self.windows.get(peer);
        window.is_none_or(|w| !w.is_full(now))
    }

    /// Assumes that all datagrams under way to `peer` are lost, because it does not report.
    pub(super) fn assume_lost(&mut self, peer: &Peer) {
        if let Some(window) = self.windows.get_mut(peer) {
            window.assume_lost();
        }
    }

    /// Records a datagram to `peer`.
    pub(super) fn sent(&mut self, peer: Peer, id: u32, end: u32, bytes: usize, now: Duration) {
        self.window(peer).sent(id, end, bytes, now);
    }

    /// The window to `to`, if it is the peer of the last datagram. In most lookups this avoids converting the address.
    #[inline]
    pub(super) fn last_window(&mut self, to: &Destination) -> Option<&mut Window> {
        let (peer, window) = self.windows.last_mut()?;
        let is_peer = peer.0 == to.addr && peer.1 == index(to.qpn) && to.qpn != MULTICAST_QPN;
        is_peer.then_some(window)
    }

    /// The window to `peer`.
    #[inline]
    pub(super) fn window(&mut self, peer: Peer) -> &mut Window {
        let (window, cleared) =
            self.windows
                .get_or_insert(peer, bounds::DATAGRAM_PEERS, Window::new);
        if cleared {
            self.stalled = None;
            self.until = None;
        }
        window
    }

    /// Handles a report of `peer`. A report that covers nothing that was sent is ignored: it would end the silence of a peer
    /// that does not take part in pacing, and the queue pair would wait for this peer again and again.
    pub(super) fn handle_report(&mut self, peer: &Peer, report: &Report) {
        let Some(window) = self.windows.get_mut(peer) else {
            return;
        };
        // Datagrams stay nearly in order on the way, so all that were sent before the reported one have arrived or
        // are lost. Their numbers do not tell the order: an answer has the number of the peer's request. A message may have several
        // datagrams in the list. The newest of those whose payload ends no later than the report says is searched for.
        let is_of_message = |(id, ..): &(u32, u32, u32)| *id == report.id;
        let seen = window
            .under_way
            .iter()
            .rposition(|sent| is_of_message(sent) && sent.1 <= report.end)
            .map(|at| at + 1)
            .or_else(|| window.under_way.iter().position(is_of_message))
            .unwrap_or(0);
        if seen == 0 && !window.is_forgotten(report.id) {
            return;
        }
        window.forgotten = None;
        if window.is_silent() {
            window.charge = 0;
        }
        window.silence = 0;
        // No receiver has less room, so a report of less only serves to delay this end.
        window.limit = report
            .room
            .clamp(bounds::DATAGRAM_WINDOW, bounds::DATAGRAM_WINDOW_MAX)
            .into();
        for (_, _, charge) in window.under_way.drain(..seen) {
            window.charge = window.charge.saturating_sub(charge.into());
        }
        let open = window.charge == 0 || window.charge < window.limit;
        if self.stalled == Some(*peer) && open {
            self.stalled = None;
            self.until = None;
        }
    }

    /// The time at which [`Self::end_silent_stall`] ends a stall.
    pub(super) fn silent_stall_end(&self) -> Option<Duration> {
        self.until
    }

    /// Ends the stall of a silent peer if its time has passed.
    pub(super) fn end_silent_stall(&mut self, now: Duration) {
        if self.until.is_some_and(|until| until <= now) {
            self.stalled = None;
            self.until = None;
        }
    }

    /// Number of the present stall.
    pub(super) fn stall(&self) -> Option<u64> {
        self.stalled.map(|_| self.stalls)
    }

    /// Ends the stall of a peer that has not reported for too long. All datagrams under way to it are assumed to be lost.
    pub(super) fn give_up_waiting(&mut self) {
        self.until = None;
        if let Some(peer) = self.stalled.take() {
            self.assume_lost(&peer);
        }
    }

    // ------------------------------------------------------------------ receiver

    /// Records a datagram of `bytes` from `peer`. Returns whether a report is due, for which the caller calls
    /// [`Self::schedule_report`]: for the first datagrams, and whenever a quarter of the room was used since the last report.
    pub(super) fn count_arrival(&mut self, peer: Peer, bytes: usize) -> bool {
        let quarter = u64::from(self.room / 4);
        let (source, _) = self
            .sources
            .get_or_insert(peer, bounds::DATAGRAM_PEERS, Source::default);
        source.since += u64::from(charge(bytes));
        source.credit += bytes as u64;
        // A sender that has received no report stops when the first window is full, which may hold only two datagrams.
        // One report may be lost, so each of the first datagrams is reported.
        source.reports_sent < EARLY || source.since >= quarter
    }

    /// Whether an answer of `bytes` may be sent to `peer`. Its address may be forged, so no more bytes are sent to an
    /// address than came from there.
    pub(super) fn spend(&mut self, peer: &Peer, bytes: usize) -> bool {
        let Some(source) = self.sources.get_mut(peer) else {
            return false;
        };
        let left = source.credit.checked_sub(bytes as u64);
        source.credit = left.unwrap_or(source.credit);
        left.is_some()
    }

    /// Schedules the report of a datagram that came from `peer` to our address `from`.
    pub(super) fn schedule_report(&mut self, peer: Peer, from: Option<IpAddr>, id: u32, end: u32) {
        let waits = self.reports.iter().position(|r| r.0 == peer);
        let has_room = self.reports.len() < bounds::DATAGRAM_PEERS;
        if waits.is_none() && !(has_room && self.spend(&peer, REPORT)) {
            return;
        }
        if let Some(source) = self.sources.get_mut(&peer) {
            source.since = 0;
            source.reports_sent = source.reports_sent.saturating_add(waits.is_none().into());
        }
        let report = Report {
            id,
            end,
            room: self.room,
        };
        if let Some(waiting) = waits.and_then(|at| self.reports.get_mut(at)) {
            // The newer report replaces the older one, whose bytes were taken from the credit already.
            *waiting = (peer, from, report);
        } else {
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
    use std::net::SocketAddr;

    const NOW: Duration = Duration::from_secs(100);

    fn peer(port: u16) -> Peer {
        (SocketAddr::from(([10, 0, 0, 1], port)), 3)
    }

    #[test]
    fn a_report_survives_the_wire() {
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
        while flow.may_send(&peer(1), NOW) {
            flow.sent(peer(1), id, 100, 1000, NOW);
            id = id.wrapping_add(1);
        }
        assert_eq!(flow.stall(), Some(1));
        assert!(flow.may_send(&peer(2), NOW), "each peer has a window");
        let mut report = Report {
            id: id.wrapping_sub(1),
            end: 99,
            room: bounds::DATAGRAM_WINDOW,
        };
        // All but the last one arrived. The message numbers wrap around.
        flow.handle_report(&peer(2), &report);
        assert_eq!(flow.stall(), Some(1));
        flow.handle_report(&peer(1), &report);
        assert_eq!(flow.stall(), None);
        assert_eq!(flow.windows.get(&peer(1)).unwrap().under_way.len(), 1);
        report.end = 100;
        flow.handle_report(&peer(1), &report);
        assert_eq!(flow.windows.get(&peer(1)).unwrap().charge, 0);
        // A report of a datagram that was not sent yet does no harm.
        report.id = report.id.wrapping_add(1000);
        flow.handle_report(&peer(1), &report);
        assert!(flow.may_send(&peer(1), NOW));
    }

    /// The peer numbers its requests, and an answer has the number of its request. This end numbers its own messages. So the numbers do not
    /// tell which of the two was sent first.
    #[test]
    fn a_report_covers_what_was_sent_before() {
        for answer in [1 << 30, (1 << 31) + 6] {
            let mut flow = Flow::new();
            for id in [answer, 5, answer] {
                flow.sent(peer(1), id, 100, 1000, NOW);
            }
            let report = Report {
                id: 5,
                end: 100,
                room: bounds::DATAGRAM_WINDOW,
            };
            flow.handle_report(&peer(1), &report);
            let left = &flow.windows.get(&peer(1)).unwrap().under_way;
            assert_eq!(*left, [(answer, 100, charge(1000))]);
        }
    }

    /// Sends as many datagrams as may be sent at the time `now`. Returns their number.
    fn fill(flow: &mut Flow, now: Duration) -> u64 {
        let mut n = 0;
        while n < 100_000 && flow.may_send(&peer(1), now) {
            flow.sent(peer(1), 1, 100, 1000, now);
            n += 1;
        }
        n
    }

    #[test]
    fn the_fixed_rate_applies_to_a_silent_peer_until_it_reports() {
        let mut flow = Flow::new();
        let n = fill(&mut flow, NOW);
        assert!(n < 100);
        flow.give_up_waiting();
        assert_eq!(flow.stall(), None);
        // From now on the fixed rate applies.
        assert_eq!(
            fill(&mut flow, NOW),
            SILENT_WINDOW.div_ceil(charge(1000).into())
        );
        let report = Report {
            id: 1,
            end: 100,
            room: 1 << 20,
        };
        flow.handle_report(&peer(1), &report);
        assert_eq!((flow.stall(), flow.silent_stall_end()), (None, None));
        let more = fill(&mut flow, NOW);
        assert!(more > n && more < 10_000);
        assert_eq!((flow.stall(), flow.silent_stall_end()), (Some(3), None));
        // The peer has reported before, so it counts as silent only after more stalls.
        for stall in 4..=STALLS_UNTIL_SILENT.into() {
            flow.give_up_waiting();
            assert_eq!(fill(&mut flow, NOW), more);
            assert_eq!(flow.stall(), Some(stall));
        }
        for _ in 0..2 {
            flow.give_up_waiting();
            assert_eq!(fill(&mut flow, NOW), more);
            assert_eq!(flow.silent_stall_end(), None);
        }
        flow.give_up_waiting();
        fill(&mut flow, NOW);
        assert_eq!(flow.silent_stall_end(), Some(NOW + SILENT_WAIT));
    }

    /// Neither a small room nor reports of datagrams that were never sent make the sender wait for a peer more often than for one
    /// that does not report.
    #[test]
    fn false_reports_do_not_delay_the_sender() {
        for room in [0, bounds::DATAGRAM_WINDOW_MAX] {
            let mut flow = Flow::new();
            let alone = fill(&mut flow, NOW);
            let report = Report {
                id: 99,
                end: 100,
                room,
            };
            flow.handle_report(&peer(1), &report);
            assert_eq!(flow.stall(), Some(1));
            flow.give_up_waiting();
            for _ in 0..5 {
                flow.handle_report(&peer(1), &report);
                assert!(fill(&mut flow, NOW + Duration::from_secs(1)) > alone);
                flow.give_up_waiting();
            }
            assert!(flow.windows.get(&peer(1)).unwrap().is_silent());
        }
        // A report of datagrams that were sent counts, but its room is at least that of every receiver.
        let mut flow = Flow::new();
        let alone = fill(&mut flow, NOW);
        let report = Report {
            id: 1,
            end: 100,
            room: 0,
        };
        flow.handle_report(&peer(1), &report);
        assert_eq!((flow.stall(), fill(&mut flow, NOW)), (None, alone));
    }

    /// A report counts even if it arrives when the datagram is assumed to be lost, and one report of a datagram that was sent to a
    /// silent peer ends the silence.
    #[test]
    fn a_late_report_shows_that_the_peer_is_not_silent() {
        let mut flow = Flow::new();
        let mut report = Report {
            id: 0,
            end: 100,
            room: 1 << 20,
        };
        flow.sent(peer(1), 0, 100, 1000, NOW);
        flow.handle_report(&peer(1), &report);
        let mut last = 0;
        let fill = |flow: &mut Flow, last: &mut u32| {
            while flow.may_send(&peer(1), NOW) {
                *last += 1;
                flow.sent(peer(1), *last, 100, 1000, NOW);
            }
        };
        // Each report comes only after its datagram is assumed to be lost.
        for _ in 0..3 * STALLS_UNTIL_SILENT {
            fill(&mut flow, &mut last);
            flow.give_up_waiting();
            let before = last;
            fill(&mut flow, &mut last);
            report.id = before;
            flow.handle_report(&peer(1), &report);
            let window = flow.windows.get(&peer(1)).unwrap();
            assert_eq!(window.silence, 0);
            let charges = window.under_way.iter().map(|sent| u64::from(sent.2));
            assert_eq!(window.charge, charges.sum::<u64>());
            assert!(flow.stall().is_some(), "the newer datagrams are under way");
        }
        for _ in 0..STALLS_UNTIL_SILENT {
            fill(&mut flow, &mut last);
            flow.give_up_waiting();
        }
        assert!(flow.windows.get(&peer(1)).unwrap().is_silent());
        fill(&mut flow, &mut last);
        let window = flow.windows.get(&peer(1)).unwrap();
        assert!(window.under_way.len() <= REMEMBERED);
        // A report counts however late it is, but one of a datagram from before the silence does not.
        let (first, _) = window.forgotten.unwrap();
        assert!(window.is_silent() && last - first > 2 * REMEMBERED as u32);
        for (id, counts) in [(first - 1, false), (first, true)] {
            report.id = id;
            flow.handle_report(&peer(1), &report);
            let window = flow.windows.get(&peer(1)).unwrap();
            assert_eq!(!window.is_silent(), counts);
        }
        for _ in 0..STALLS_UNTIL_SILENT {
            fill(&mut flow, &mut last);
            flow.give_up_waiting();
        }
        fill(&mut flow, &mut last);
        report.id = last - 100;
        flow.handle_report(&peer(1), &report);
        let window = flow.windows.get(&peer(1)).unwrap();
        assert_eq!((window.silence, window.under_way.len()), (0, 100));
        assert_eq!((flow.stall(), flow.silent_stall_end()), (None, None));
    }

    #[test]
    fn the_rate_to_a_silent_peer_follows_the_clock() {
        let mut flow = Flow::new();
        fill(&mut flow, NOW);
        flow.give_up_waiting();
        let (mut now, mut sent) = (NOW, fill(&mut flow, NOW));
        while now < NOW + Duration::from_secs(1) {
            let stall = flow.stall();
            assert!(stall.is_some());
            flow.end_silent_stall(now + SILENT_WAIT / 2);
            assert_eq!(flow.stall(), stall, "too early");
            now += SILENT_WAIT;
            flow.end_silent_stall(now);
            assert_eq!(flow.stall(), None);
            sent += fill(&mut flow, now);
        }
        let charged = sent * u64::from(charge(1000));
        let most = SILENT_RATE + 2 * SILENT_WINDOW;
        assert!((SILENT_RATE..most).contains(&charged), "{charged}");
    }

    #[test]
    fn the_first_datagrams_are_reported_and_then_a_quarter_of_the_room_at_a_time() {
        let mut flow = Flow::new();
        flow.set_room(1 << 20);
        let mut reported = Vec::new();
        for id in 1..=1000 {
            if flow.count_arrival(peer(1), 1000) {
                flow.schedule_report(peer(1), None, id, 5);
            }
            if let Some((to, _, report)) = flow.next_report() {
                assert_eq!(to, peer(1));
                assert_eq!((report.id, report.room), (id, 1 << 20));
                reported.push(id);
            }
        }
        let each = (1_u32 << 18).div_ceil(charge(1000));
        let steps: Vec<u32> = reported.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!((reported[0], &steps[..5]), (1, &[1, 1, 1, each, each][..]));
    }

    #[test]
    fn a_report_that_replaces_a_waiting_report_is_not_counted_again() {
        let mut flow = Flow::new();
        let mut reported = 0;
        for batch in 0..5 {
            for id in batch * 10..batch * 10 + 10 {
                if flow.count_arrival(peer(1), 30) {
                    flow.schedule_report(peer(1), None, id, 5);
                }
            }
            reported += usize::from(flow.next_report().is_some());
            assert!(flow.next_report().is_none());
        }
        assert_eq!(reported, usize::from(EARLY));
    }

    #[test]
    fn unknown_sources_use_a_bounded_amount_of_memory() {
        let mut flow = Flow::new();
        for port in 0..u16::MAX {
            flow.count_arrival(peer(port), 1000);
            flow.schedule_report(peer(port), None, 1, 1);
            flow.sent(peer(port), 1, 1, 1, NOW);
        }
        assert!(flow.sources.len() <= bounds::DATAGRAM_PEERS);
        assert!(flow.windows.len() <= bounds::DATAGRAM_PEERS);
        assert!(flow.reports.len() <= bounds::DATAGRAM_PEERS);
    }

    /// A source whose report finds no room in the list is reported with its next datagram.
    #[test]
    fn a_report_without_room_in_the_list_is_not_counted() {
        let mut flow = Flow::new();
        flow.count_arrival(peer(0), 1000);
        for port in 1..=1024 {
            flow.reports.push_back((
                peer(port),
                None,
                Report {
                    id: 1,
                    end: 1,
                    room: 0,
                },
            ));
        }
        assert_eq!(flow.reports.len(), bounds::DATAGRAM_PEERS);
        flow.schedule_report(peer(0), None, 1, 1);
        let source = flow.sources.get(&peer(0)).unwrap();
        assert_eq!((source.reports_sent, source.credit), (0, 1000));
        flow.next_report();
        flow.schedule_report(peer(0), None, 2, 1);
        assert_eq!(flow.reports.back().unwrap().0, peer(0));
    }

    #[test]
    fn no_address_is_sent_more_bytes_than_it_sent() {
        let mut flow = Flow::new();
        let (mut came, mut went) = (0, 0);
        for n in 0..100 {
            let due = flow.count_arrival(peer(1), 41);
            came += 41;
            for part in [30, REPORT, 20] {
                if n % 3 == 0 && flow.spend(&peer(1), part) {
                    went += part;
                }
            }
            if due {
                flow.schedule_report(peer(1), None, n, 0);
            }
            went += flow.next_report().map_or(0, |_| REPORT);
            assert!(went <= came, "{went} of {came}");
        }
        assert!(went >= REPORT && flow.sources.get(&peer(1)).unwrap().reports_sent > 0);
        assert!(!flow.spend(&peer(2), 1));
    }
}
