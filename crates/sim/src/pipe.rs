//! One direction of a byte stream.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::rng::Rng;

/// An arrival at the far end.
#[derive(Debug)]
pub(crate) enum Load {
    Bytes(Vec<u8>),
    /// The near end has closed the stream.
    Fin,
    /// The connection broke.
    Reset,
}

/// The bytes under way. They arrive in order, after some delay and in pieces. The capacity limits their number.
#[derive(Debug)]
pub struct Pipe {
    flights: VecDeque<(Instant, Load)>,
    in_flight: usize,
    last: Option<Instant>,
    /// Capacity in bytes.
    pub capacity: usize,
    /// Longest delay.
    pub delay: Duration,
    /// The connection breaks after this many bytes.
    pub dies_at: Option<u64>,
    /// Number of bytes written so far.
    pub written: u64,
    /// The bytes written so far, if they are recorded.
    pub kept: Option<Vec<u8>>,
    closed: bool,
}

impl Pipe {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let capacity = *rng.pick(&[700, 4_000, 60_000, 200_000, 4_000_000]);
        Self {
            flights: VecDeque::new(),
            in_flight: 0,
            last: None,
            capacity,
            delay: Duration::from_micros(rng.below(200) as u64),
            dies_at: None,
            written: 0,
            kept: None,
            closed: false,
        }
    }

    /// The number of bytes that the next write accepts.
    pub(crate) fn room(&self) -> usize {
        if self.closed {
            0
        } else {
            self.capacity - self.in_flight
        }
    }

    /// Sends bytes, in pieces. Returns true if the connection broke meanwhile.
    pub(crate) fn write(&mut self, now: Instant, rng: &mut Rng, bytes: &[u8]) -> bool {
        let mut bytes = bytes;
        let mut dies = false;
        if let Some(at) = self.dies_at
            && self.written + bytes.len() as u64 >= at
        {
            let alive = usize::try_from(at.saturating_sub(self.written)).expect("few bytes");
            bytes = &bytes[..alive.min(bytes.len())];
            dies = true;
        }
        self.written += bytes.len() as u64;
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(bytes);
        }
        while !bytes.is_empty() {
            let most = *rng.pick(&[3, 40, 1_500, 20_000, 300_000]);
            let (piece, rest) = bytes.split_at((1 + rng.below(most)).min(bytes.len()));
            self.in_flight += piece.len();
            self.fly(now, rng, Load::Bytes(piece.to_vec()));
            bytes = rest;
        }
        dies
    }

    fn fly(&mut self, now: Instant, rng: &mut Rng, load: Load) {
        let delay = Duration::from_nanos(rng.below(self.delay.as_nanos() as usize + 1) as u64);
        let at = self.last.map_or(now, |t| t.max(now)).max(now + delay);
        self.last = Some(at);
        self.flights.push_back((at, load));
    }

    /// Closes the stream for writing. Returns false if it was closed before.
    pub(crate) fn close(&mut self, now: Instant, rng: &mut Rng) -> bool {
        if self.closed {
            return false;
        }
        self.closed = true;
        self.fly(now, rng, Load::Fin);
        true
    }

    /// Breaks the connection. Bytes under way may be lost.
    pub(crate) fn reset(&mut self, now: Instant, rng: &mut Rng) {
        if rng.chance(50) {
            self.flights.clear();
        }
        self.closed = true;
        self.fly(now, rng, Load::Reset);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// When the next piece arrives.
    pub(crate) fn next_arrival(&self) -> Option<Instant> {
        self.flights.front().map(|(at, _)| *at)
    }

    pub(crate) fn arrive(&mut self, now: Instant) -> Option<Load> {
        if self.next_arrival()? > now {
            return None;
        }
        let (_, load) = self.flights.pop_front()?;
        if let Load::Bytes(bytes) = &load {
            self.in_flight = self.in_flight.saturating_sub(bytes.len());
        }
        Some(load)
    }
}
