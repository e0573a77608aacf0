//! Congestion control: how many bytes may be under way to a peer of reliable datagrams.
//!
//! The window follows a model of the path instead of single losses: the highest delivery rate of the last rounds,
//! times the shortest round trip, and some packets more. (A round ends when as many bytes as the window have been
//! delivered, so it takes about one round trip.) A random loss costs only the lost packet, while a TCP that
//! halves its window for each loss would lose most of the throughput at a loss rate of 1 %. Only a loss rate that
//! indicates an overflowing queue shrinks the window. The rate is measured as in BBR (Cardwell and others, 2016), and
//! the number of packets kept in the queue is as in Vegas (Brakmo and others, 1994). There is no pacing: the arrival
//! of acknowledgements determines when packets are sent.
//!
//! ```text
//!             rate has grown                three rounds                   two probes
//!             by a quarter                  without this growth            without an answer
//!   +-------+                     +-------+                     +--------+                     +-----------+
//!   | start | ------------------> | start | ------------------> | steady | ------------------> | 4 packets |
//!   +-------+ window doubles      +-------+                     +--------+                     +-----------+
//! ```

use std::time::Duration;

/// The window is at least this number of packets of the largest size, or [`LEAST_BYTES`] if that is less, but never less than four packets.
const LEAST_PACKETS: u64 = 16;
/// Packets that each sender may keep in the queue of a path that is fully used.
const QUEUED: u64 = 8;
/// See [`LEAST_PACKETS`]. This is less than one burst of a network card.
const LEAST_BYTES: u64 = 64 * 1024;
/// The first window, bytes.
const FIRST: u64 = 128 * 1024;
/// In the first rounds the window grows up to this multiple of the bandwidth-delay product.
const START: u64 = 3;
/// The largest window, bytes. A larger one gains no throughput.
const WINDOW_MAX: u64 = 64 << 20;
/// The number of rounds of which the highest rate is used.
const RATE_ROUNDS: usize = 6;
/// How long the shortest round trip is remembered.
const RTT_MEMORY: Duration = Duration::from_secs(10);
/// The percentage of lost packets in a round above which a queue is assumed to overflow.
const TOO_MANY_LOST: u64 = 20;
/// Delay above the shortest round trip that all packets of a round may have without being counted
/// as queueing. On a path whose round trip is less than 7/16 of this, a smaller value applies: a
/// longer queue gains no throughput there, and its packets do not fit the caches of the processor.
const SLACK: Duration = Duration::from_millis(1);
/// A packet may be later than the fastest packet of its round by this time without being counted as
/// queueing. A queue delays all packets of a round. A scheduler that runs both ends in time slices
/// of some milliseconds delays only some of them, and the window must cover the packets that arrive
/// meanwhile.
const TURNS: Duration = Duration::from_millis(8);

/// Longest round trip within a host or between neighbours.
const SHORT: Duration = Duration::from_micros(500);

/// The state of one path. It is kept while the peer is idle.
#[derive(Debug, Clone)]
pub(super) struct Congestion {
    window: u64,
    starting: bool,
    /// Highest delivery rate of each of the last rounds, bytes per second.
    rates: [u64; RATE_ROUNDS],
    round: usize,
    /// The round ends when this number of bytes has been delivered.
    round_end: u64,
    lost_in_round: u64,
    delivered_in_round: u64,
    plateau: u64,
    plateau_rounds: u8,
    /// Upper limit of the window while a queue overflows, bytes.
    ceiling: u64,
    largest: u64,
    shortest: Option<Duration>,
    shortest_at: Duration,
    /// The shortest round trips of this round and of the previous one.
    quickest: [Duration; 2],
    smoothed: Option<Duration>,
    deviation: Duration,
}

/// The result of one acknowledgement.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Acked {
    /// Bytes that it newly reports as arrived.
    pub(super) bytes: u64,
    /// Bytes that are newly considered lost.
    pub(super) lost: u64,
    /// Bytes delivered since the beginning.
    pub(super) delivered: u64,
    /// Bytes per second that arrived while the newest of the acknowledged packets was under way.
    pub(super) rate: Option<u64>,
    /// Whether the program provided less data than the window allowed, so the rate is not the limit of the path.
    pub(super) app_limited: bool,
}

impl Congestion {
    pub(super) fn new() -> Self {
        Self {
            window: FIRST,
            starting: true,
            rates: [0; RATE_ROUNDS],
            round: 0,
            round_end: 0,
            lost_in_round: 0,
            delivered_in_round: 0,
            plateau: 0,
            plateau_rounds: 0,
            ceiling: WINDOW_MAX,
            largest: 0,
            shortest: None,
            shortest_at: Duration::ZERO,
            quickest: [Duration::MAX; 2],
            smoothed: None,
            deviation: Duration::ZERO,
        }
    }

    /// Bytes that may be under way.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// If a packet that was sent at least this much later has arrived, a missing packet counts as lost.
    pub(super) fn reordering(&self) -> Duration {
        let shortest = self.shortest.unwrap_or(Duration::from_millis(20));
        (shortest / 4).max(Duration::from_micros(200)) + self.deviation
    }

    /// Whether both ends are on one host or on a small network.
    pub(super) fn is_short(&self) -> bool {
        self.shortest.is_some_and(|shortest| shortest < SHORT)
    }

    /// How long to wait for an acknowledgement before a probe is sent.
    pub(super) fn probe_timeout(&self) -> Duration {
        // Both ends may be busy for a while, and a needless probe costs a packet.
        self.round_trip()
            .map_or(Duration::from_millis(200), |trip| trip + 5 * SLACK)
    }

    /// The time within which an answer arrives, if a round trip was measured.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let smoothed = self.smoothed?;
        Some(smoothed + (self.deviation * 4).max(Duration::from_millis(5)))
    }

    /// Counts a packet of this size as sent.
    pub(super) fn sent(&mut self, bytes: u64) {
        self.largest = self.largest.max(bytes);
    }

    /// Handles a measured round trip (smoothed as in RFC 6298 §2).
    pub(super) fn measured(&mut self, now: Duration, sample: Duration) {
        let old = now.saturating_sub(self.shortest_at) > RTT_MEMORY;
        if old || self.shortest.is_none_or(|s| sample <= s) {
            self.shortest = Some(sample);
            self.shortest_at = now;
        }
        let [this, _] = &mut self.quickest;
        *this = sample.min(*this);
        match self.smoothed {
            None => {
                self.smoothed = Some(sample);
                self.deviation = sample / 2;
            }
            Some(smoothed) => {
                self.deviation = (self.deviation * 3 + smoothed.abs_diff(sample)) / 4;
                self.smoothed = Some((smoothed * 7 + sample) / 8);
            }
        }
    }

    /// Handles an acknowledgement.
    pub(super) fn acked(&mut self, acked: &Acked) {
        if let Some(rate) = acked.rate
            && let Some(best) = self.rates.get_mut(self.round % RATE_ROUNDS)
            && (!acked.app_limited || rate > *best)
        {
            *best = (*best).max(rate);
        }
        self.lost_in_round += acked.lost;
        self.delivered_in_round += acked.bytes;
        if acked.delivered >= self.round_end {
            self.end_round(acked);
        }
        if self.starting {
            // The window doubles in each round as long as the rate grows, up to a multiple of the measured
            // bandwidth-delay product.
            let most = (START * self.target()).clamp(FIRST, WINDOW_MAX);
            self.window = (self.window + acked.bytes).min(most.max(self.window));
        } else {
            let target = self.target();
            self.window = if self.window < target {
                (self.window + acked.bytes).min(target)
            } else {
                target
            };
        }
        self.window = self.window.min(self.ceiling).max(self.least());
    }

    /// Handles two unanswered probes: all packets under way count as lost.
    pub(super) fn silence(&mut self) {
        self.window = 4 * self.largest.max(1500);
    }

    fn least(&self) -> u64 {
        (LEAST_PACKETS * self.largest)
            .min(LEAST_BYTES)
            .max(4 * self.largest)
    }

    fn rate(&self) -> u64 {
        self.rates.iter().copied().max().unwrap_or(0)
    }

    /// The window to aim at. It is the delivery rate, times the sum of the shortest round trip and the delay that [`SLACK`] and [`TURNS`]
    /// permit; then a quarter more; then [`QUEUED`] packets. Each sender keeps so many packets in a queue that senders share, and the
    /// equal numbers make their rates equal.
    fn target(&self) -> u64 {
        let (Some(shortest), Some(smoothed)) = (self.shortest, self.smoothed) else {
            return FIRST;
        };
        let quickest = self.quickest.iter().copied().min();
        let quickest = quickest
            .unwrap_or(smoothed)
            .clamp(shortest, smoothed.max(shortest));
        let queue = (quickest - shortest).min(SLACK.min(SLACK / 8 + 2 * shortest));
        let turns = smoothed.saturating_sub(quickest).min(TURNS);
        let trip = shortest + queue + turns;
        let fill = u128::from(self.rate()) * trip.as_nanos() / 1_000_000_000;
        u64::try_from(fill + fill / 4)
            .unwrap_or(WINDOW_MAX)
            .min(WINDOW_MAX)
            + QUEUED * self.largest
    }

    fn end_round(&mut self, acked: &Acked) {
        let rate = self.rate();
        if self.starting && !acked.app_limited {
            if rate * 4 >= self.plateau * 5 {
                self.plateau = rate;
                self.plateau_rounds = 0;
            } else {
                self.plateau_rounds += 1;
                if self.plateau_rounds >= 3 {
                    self.starting = false;
                }
            }
        }
        let all = self.lost_in_round + self.delivered_in_round;
        if self.lost_in_round * 100 > all * TOO_MANY_LOST && all > 8 * self.largest {
            self.starting = false;
            self.ceiling = (self.window / 10 * 7).max(self.least());
        } else if self.ceiling < WINDOW_MAX {
            self.ceiling = (self.ceiling + self.ceiling / 8 + self.largest).min(WINDOW_MAX);
        }
        self.lost_in_round = 0;
        self.delivered_in_round = 0;
        let [this, before] = &mut self.quickest;
        *before = std::mem::replace(this, Duration::MAX);
        self.round_end = acked.delivered + self.window;
        self.round += 1;
        if let Some(next) = self.rates.get_mut(self.round % RATE_ROUNDS) {
            *next = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Simulates a path of `rate` bytes per second and 10 ms that loses each `nth` packet. Returns the state after
    /// some rounds.
    fn run(rate: u64, nth: u64) -> Congestion {
        let mut c = Congestion::new();
        let (mut now, mut delivered) = (Duration::ZERO, 0);
        for n in 0..4000_u64 {
            c.sent(1500);
            // One window of packets in each round trip, or the rate of the path if that is less.
            let trip = 10 * MS;
            let achieved = (c.window() * 100).min(rate);
            now += Duration::from_nanos(1500 * 1_000_000_000 / achieved);
            c.measured(now, trip);
            let lost = if n % nth == 0 { 1500 } else { 0 };
            delivered += 1500 - lost;
            c.acked(&Acked {
                bytes: 1500 - lost,
                lost,
                delivered,
                rate: Some(achieved),
                app_limited: false,
            });
        }
        c
    }

    #[test]
    fn the_window_fills_the_path_despite_random_losses() {
        for nth in [1_000_000, 100, 10] {
            let window = run(10_000_000, nth).window();
            // 10 MB/s for 10 ms are 100 kB.
            assert!((120_000..160_000).contains(&window), "{window} for 1/{nth}");
        }
    }

    #[test]
    fn losses_of_a_full_queue_shrink_the_window() {
        let window = run(10_000_000, 3).window();
        assert!(window < 100_000, "{window}");
        assert!(window >= 24_000, "{window}");
    }

    #[test]
    fn silence_shrinks_the_window_to_four_packets_and_the_first_answer_restores_it() {
        let mut c = run(10_000_000, 1000);
        c.silence();
        assert_eq!(c.window(), 6000);
        c.acked(&Acked {
            bytes: 1500,
            delivered: 10_000_000,
            ..Acked::default()
        });
        assert!(c.window() >= 24_000);
    }
}
