//! The entry point of the fuzzer. It accepts any bytes, and panics if an invariant is violated.
//!
//! The first byte selects the target: any bytes of a peer, split into pieces; messages of a peer (some of them invalid); start-up frames;
//! the text of rules; or datagrams. Run the fuzzer by `scripts/fuzz 60 sockets`. A test replays the inputs in `fuzz/corpus/sockets`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a violated invariant is a panic"
)]

use crate::memory::{Mark, Offer};
use crate::message;
use crate::record::{Controls, Record};
use crate::stream;
use crate::wire::{Broken, Kind, LONGEST, Private, Rx, Sink, Tx};
use sockets_base::query;
use sockets_base::rules::Policy;

/// Choices derived from the input. After its last byte all choices are 0.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn number(&mut self) -> u32 {
        u32::from_be_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }
}

/// The bytes that a stream delivered.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) data: Vec<u8>,
    /// Data whose checksum has not been checked yet.
    waiting: Vec<u8>,
    pub(crate) urgent: Vec<u8>,
    pub(crate) offers: Vec<Offer>,
    /// The number of bytes that the peer has put into memory.
    pub(crate) in_memory: usize,
}

impl Sink for Got {
    fn data(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
    }

    fn verified(&mut self) {
        self.data.append(&mut self.waiting);
    }

    fn urgent(&mut self, byte: u8) {
        self.urgent.push(byte);
    }

    fn offer(&mut self, offer: Offer) {
        self.offers.push(offer);
    }

    fn memory(&mut self, mark: Mark, open: u32) -> Result<u32, Broken> {
        let n = mark.beyond(self.in_memory as u64).unwrap_or(0);
        let n = u32::try_from(n).ok().filter(|n| *n <= open);
        let n = n.ok_or(Broken::Credit)?;
        self.in_memory += n as usize;
        Ok(n)
    }
}

const WINDOW: u32 = 4096;

fn peer(window: u32) -> Private {
    Private {
        window,
        longest: LONGEST as u32,
        namespace: 0,
        plain: false,
        memory: true,
    }
}

/// Feeds a stream in pieces whose lengths `piece` returns, and returns the result. If `wholes` is true, each piece is first
/// passed to [`Rx::whole`], which accepts a piece that is one whole message.
fn feed_as(
    bytes: &[u8],
    crc: bool,
    wholes: bool,
    mut piece: impl FnMut() -> usize,
) -> (Got, usize, Option<Broken>) {
    let (mut rx, mut tx) = (Rx::new(WINDOW, crc), Tx::new(&peer(100), crc));
    let mut got = Got::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (now, behind) = rest.split_at(piece().clamp(1, rest.len()));
        rest = behind;
        let before = tx.credit();
        let whole = if wholes { rx.whole(now, &mut tx) } else { None };
        let result = if let Some(payload) = whole {
            got.data.extend_from_slice(payload);
            Ok(())
        } else {
            rx.feed(now, &mut tx, &mut got)
        };
        let all = got.data.len() + got.waiting.len() + got.urgent.len() + got.in_memory;
        // The window does not limit the bytes after a Plain message.
        let is_plain = rx.is_plain();
        assert!(
            is_plain || all <= WINDOW as usize,
            "more bytes were accepted than the window allows"
        );
        assert!(tx.credit() >= before && tx.credit() <= i32::MAX as usize);
        if let Err(why) = result {
            return (got, tx.credit(), Some(why));
        }
        assert!(rx.open() <= WINDOW);
    }
    (got, tx.credit(), None)
}

fn feed(bytes: &[u8], crc: bool, piece: impl FnMut() -> usize) -> (Got, usize, Option<Broken>) {
    feed_as(bytes, crc, false, piece)
}

/// Checks that the result does not depend on how the bytes are split into pieces.
fn pieces(bytes: &[u8], crc: bool, seed: u32) {
    let whole = feed(bytes, crc, || usize::MAX);
    let mut state = seed;
    let parts = feed(bytes, crc, || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as usize % 61
    });
    // If the stream breaks in the middle of a piece, the bytes before the break were consumed in both cases.
    assert_eq!(whole, parts);
}

/// Feeds messages that are valid unless the input changes a byte of them.
fn messages(input: &mut Input<'_>, crc: bool) {
    let mut tx = Tx::new(&peer(i32::MAX as u32), crc);
    let mut wire = Vec::new();
    let mut lengths = Vec::new();
    let mut limit = 100u32;
    let (mut sent, mut in_memory) = (0, 0);
    let mut is_right = true;
    for _ in 0..input.byte() % 16 {
        let kind = match input.byte() % 11 {
            0..4 => Kind::Data,
            4 => Kind::Limit,
            5 => Kind::Urgent,
            6 => Kind::End,
            7 => Kind::Plain,
            8 => Kind::Reset,
            9 => Kind::Offer,
            _ => Kind::Memory,
        };
        let len = match kind {
            Kind::Data => input.number() as usize % 1500,
            Kind::Urgent => 1,
            Kind::Offer => 16,
            Kind::Memory => 8,
            _ => 0,
        };
        limit = limit.wrapping_add(u32::from(input.byte()));
        let mut payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
        let mut bytes = match kind {
            Kind::Data | Kind::Urgent => len,
            _ => 0,
        };
        if kind == Kind::Memory {
            bytes = 1 + usize::from(input.byte());
            in_memory += bytes as u64;
            payload = Mark::new(0, in_memory).emit().to_vec();
        }
        let frame = tx.frame(kind, limit, std::iter::once(&payload[..]));
        tx.went(&frame);
        let from = wire.len();
        wire.extend_from_slice(&frame.head);
        wire.extend_from_slice(&payload);
        wire.extend_from_slice(frame.tail());
        lengths.push(wire.len() - from);
        sent += bytes;
        is_right &= !matches!(kind, Kind::End | Kind::Plain | Kind::Reset);
        if input.byte() > 200 {
            let at = from + input.number() as usize % (wire.len() - from);
            wire[at] ^= input.byte();
            is_right = false;
        }
    }
    if is_right && sent <= WINDOW as usize {
        let (got, credit, why) = feed(&wire, crc, || usize::MAX);
        assert_eq!(why, None);
        assert_eq!(got.data.len() + got.urgent.len() + got.in_memory, sent);
        assert!(wire.is_empty() || credit == limit as usize);
    }
    let mut next = lengths.into_iter();
    assert_eq!(
        feed_as(&wire, crc, true, || next.next().unwrap_or(usize::MAX)),
        feed(&wire, crc, || usize::MAX)
    );
    pieces(&wire, crc, input.number());
}

/// Parses a datagram that is a valid message unless the input changes it.
fn datagram(input: &mut Input<'_>) {
    let choice = input.byte();
    let kind = if choice & 1 == 0 {
        message::Kind::Send
    } else {
        message::Kind::Record
    };
    let mut head = [0; message::HEAD];
    let changes: Vec<(u8, u8)> = (0..choice >> 1 & 3)
        .map(|_| (input.byte(), input.byte()))
        .collect();
    let (epoch, id) = (input.number() as u16, input.number());
    let payload = input.0;
    let length = message::head(kind, epoch, id, payload.len(), &mut head);
    let mut all = [&head[..length], payload].concat();
    for (at, mask) in &changes {
        let place = usize::from(*at) % all.len();
        all[place] ^= mask;
    }
    let tail = message::tail(&all, std::iter::empty());
    all.extend_from_slice(&tail);
    // Parse the bytes as they are, and with a correct checksum.
    let raw = message::open(payload).map_or(0, |(_, inner)| inner.len());
    assert!(raw <= payload.len());
    let opened = message::open(&all);
    if changes.is_empty() {
        assert_eq!(opened, Some((kind, payload)));
    }
    if let Some((kind, inner)) = opened {
        let length = message::head(kind, epoch, id, inner.len(), &mut head);
        assert_eq!(inner.len() + length + message::TAIL, all.len());
        assert_eq!(message::begins(&all), Some(length));
        assert!(message::open(&all[..all.len() - 1]).is_none());
    }
}

/// Parses the input in three formats: as a query of another host, as a [`Record`] of the thread for reliable datagrams, and as control
/// messages.
fn short_formats(data: &[u8]) {
    if let Some((protocol, port, nonce)) = query::parse(data) {
        assert_eq!(query::query(protocol, port, nonce), data);
    }
    if let Some(record) = Record::parse(data) {
        assert_eq!(record.emit().len(), data.len());
    }
    let all: usize = Controls(data).map(|c| c.all.len()).sum();
    assert!(all <= data.len());
}

/// Runs the target that the first byte selects, after the parsers of short formats.
pub fn run(data: &[u8]) {
    short_formats(data);
    let mut input = Input(data);
    let what = input.byte();
    let crc = what & 0x80 != 0;
    if what & 0x40 != 0 {
        return datagram(&mut input);
    }
    match what % 4 {
        0 => {
            let seed = input.number();
            pieces(input.0, crc, seed);
        }
        1 => messages(&mut input, crc),
        2 => {
            if let stream::First::Request(length, reply, _) = stream::first(input.0, crc) {
                assert!(length <= input.0.len() && !reply.is_empty());
                assert!(stream::refusal(input.0).is_some_and(|(n, _)| n == length));
            }
            let _ = Private::parse(input.0);
        }
        _ => {
            let text = String::from_utf8_lossy(input.0);
            if let Err(mistake) = Policy::default().read("f", &text) {
                let line = text
                    .lines()
                    .nth(mistake.line - 1)
                    .expect("the message names its line");
                assert!(mistake.column >= 1 && mistake.column <= line.chars().count() + 2);
                assert!(mistake.to_string().ends_with('^'));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_found_by_the_fuzzer_are_handled() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/sockets");
        let mut files = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            run(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files >= 4, "{files} files");
    }

    #[test]
    fn any_input_is_handled() {
        let mut state = 1u64;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u32
        };
        for _ in 0..20_000 {
            let len = next() as usize % 200;
            let bytes: Vec<u8> = (0..len).map(|_| next() as u8).collect();
            run(&bytes);
        }
    }
}
