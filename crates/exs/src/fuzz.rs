//! The entry point of the fuzzer. It accepts any bytes, and panics if the state machine violates an invariant.
//!
//! The first byte selects the scenario: one end whose peer sends arbitrary messages, or two ends whose programs make arbitrary
//! calls. Run it by `scripts/fuzz 60 exs`. A test replays the inputs in `fuzz/corpus/exs`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a violated invariant is a panic"
)]

use crate::flow::{
    self, Action, BUFFER, CONTROLS, Delivery, Flow, OpId, Outcome, Recv, Send, Slot,
};
use crate::wire::{HEADER_LENGTH, Hello, Message, Segment, Segments, Status};
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

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

    /// Returns `right` most of the time, otherwise a near or an arbitrary number.
    fn near(&mut self, right: u32) -> u32 {
        match self.byte() {
            0..200 => right,
            n @ 200..240 => right.wrapping_add(u32::from(n)).wrapping_sub(220),
            _ => self.number(),
        }
    }
}

/// A call of a program.
#[derive(Debug)]
struct Call {
    receives: bool,
    /// Persistent calls may end in any order.
    persistent: bool,
    len: u64,
    ended: Option<(Outcome, u64)>,
    bytes: Vec<u8>,
}

/// One end, with the state that is needed to check the invariants.
#[derive(Debug)]
struct End {
    flow: Flow,
    credits: u32,
    calls: BTreeMap<OpId, Call>,
    next: OpId,
    ring: Vec<u8>,
    /// The buffers with messages of the peer that the state machine has not released. Each has the immediate data of its message.
    slots: BTreeMap<Slot, Vec<u8>>,
    next_slot: Slot,
    reads: VecDeque<(u64, OpId, u64, Segments)>,
    writes: VecDeque<(OpId, Segment)>,
    out: VecDeque<(Message, Vec<u8>)>,
    next_seq: u32,
    /// The messages that the peer has not answered: the sequence number of each, and whether it uses a credit, a permission to send one
    /// message before the earlier ones are answered. The messages without a credit are control messages.
    unanswered: BTreeMap<u32, bool>,
    /// The sequence numbers of the peer that must be answered.
    due: BTreeSet<u32>,
    /// All memory that the peer has advertised.
    offered: Vec<Segment>,
    places: Vec<Segment>,
    /// The receives that the peer has advertised and this end has not answered, and those of this end that the peer has not answered.
    targets: BTreeMap<u32, Segment>,
    readies: BTreeMap<u32, Segment>,
    /// The windows that are bound, with their receives, and those whose invalidation has not completed.
    bound: BTreeMap<u32, OpId>,
    unbinding: VecDeque<u32>,
    /// The calls, sends and receives, in the order in which they ended.
    order: Vec<OpId>,
    /// Whether cancelled calls end in order, too.
    ordered: bool,
    shut: bool,
}

/// Returns the address of a call's memory. The STag is the number of the call.
fn address(call: OpId) -> u64 {
    call << 32
}

/// Returns what the general path does in place of a delivery of the short one.
fn as_actions(delivery: &Delivery, slot: Slot) -> Vec<Action> {
    let &Delivery { sent, recv, len } = delivery;
    let done = |op, len| Action::Complete {
        op,
        outcome: Outcome::Done,
        len,
    };
    let mut actions: Vec<_> = sent.map(|(op, len)| done(op, len)).into_iter().collect();
    actions.push(Action::Copy {
        to: recv,
        at: 0,
        slot,
        skip: 0,
        len,
    });
    actions.push(done(recv, len));
    actions.push(Action::Release(slot));
    actions
}

impl End {
    fn new(ours: Hello, theirs: Hello, buffer: u64) -> Self {
        Self {
            flow: Flow::new(ours, theirs, buffer),
            credits: theirs.credits.into(),
            calls: BTreeMap::new(),
            next: 1,
            ring: vec![0; usize::try_from(buffer).unwrap()],
            slots: BTreeMap::new(),
            next_slot: 0,
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            out: VecDeque::new(),
            next_seq: 1,
            unanswered: BTreeMap::new(),
            due: BTreeSet::new(),
            offered: Vec::new(),
            places: Vec::new(),
            targets: BTreeMap::new(),
            readies: BTreeMap::new(),
            bound: BTreeMap::new(),
            unbinding: VecDeque::new(),
            order: Vec::new(),
            ordered: true,
            shut: false,
        }
    }

    fn call(&mut self, receives: bool, len: u32) -> (OpId, Segments) {
        let id = self.next;
        self.next += 1;
        let fill = if receives { 0 } else { id as u8 };
        let bytes = (0..len).map(|i| if receives { 0 } else { fill ^ (i as u8) });
        self.calls.insert(
            id,
            Call {
                receives,
                persistent: false,
                len: len.into(),
                ended: None,
                bytes: bytes.collect(),
            },
        );
        let memory = Segment {
            addr: address(id),
            stag: id as u32,
            len,
        };
        // Three bytes or more are in two segments with the same STag.
        let first = len / 3;
        let pieces = if first == 0 {
            smallvec![memory]
        } else {
            flow::cut(&[memory], 0, first.into())
                .into_iter()
                .chain(flow::cut(&[memory], first.into(), u64::from(len - first)))
                .collect()
        };
        (id, pieces)
    }

    fn send(&mut self, len: u32, flags: u8, offset: Option<u64>) {
        if self.shut {
            return;
        }
        let (id, mut segments) = self.call(false, len);
        if flags & 4 == 0 {
            segments = smallvec![Segment {
                addr: address(id),
                stag: id as u32,
                len,
            }];
        }
        let send = Send {
            id,
            segments,
            persistent: flags & 1 != 0,
            notify: flags & 3 == 3,
            offset,
        };
        self.calls.get_mut(&id).unwrap().persistent = send.persistent;
        let may_be_short = !send.persistent && send.offset.is_none() && send.segments.len() == 1;
        let mut short = self.flow.clone();
        let sent = may_be_short
            .then(|| short.send_short(id, len.into()))
            .flatten();
        let mut out = Vec::new();
        self.flow.send(send, &mut out);
        if let Some(message) = sent {
            assert_eq!(out, [Action::Message(message, Some(id))]);
            self.is_same(&short);
        }
        self.perform(out);
    }

    fn recv(&mut self, len: u32, flags: u8, offset: Option<u64>) {
        let (id, mut segments) = self.call(true, len);
        if flags & 5 != 0 {
            segments = smallvec![Segment {
                addr: address(id),
                stag: id as u32,
                len,
            }];
        }
        let recv = Recv {
            id,
            segments,
            persistent: flags & 1 != 0,
            wait_all: flags & 2 != 0,
            offset,
            may_be_ready: flags & 8 == 0,
        };
        self.calls.get_mut(&id).unwrap().persistent = recv.persistent;
        let mut out = Vec::new();
        self.flow.recv(recv, &mut out);
        self.perform(out);
    }

    /// Checks that a short path has had the effect of the general one.
    fn is_same(&self, short: &Flow) {
        assert_eq!(*short, self.flow);
        #[cfg(test)]
        tests::SHORT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn cancel(&mut self, id: OpId) {
        let mut out = Vec::new();
        self.flow.cancel(id, &mut out);
        self.perform(out);
    }

    fn shutdown(&mut self) {
        if !std::mem::replace(&mut self.shut, true) {
            let (id, _) = self.call(false, 0);
            let mut out = Vec::new();
            self.flow.shutdown(id, &mut out);
            self.perform(out);
        }
    }

    /// Handles a message of the peer. Returns whether the connection continues.
    fn arrives(&mut self, message: Message, data: Vec<u8>) -> bool {
        let slot = self.next_slot;
        self.next_slot += 1;
        self.slots.insert(slot, data.clone());
        let mut written = None;
        let answered = match &message {
            Message::Ack { seq, .. } => {
                self.unanswered.remove(seq);
                self.readies.remove(seq);
                None
            }
            Message::Ready { seq, segment, .. } => {
                self.targets.insert(*seq, *segment);
                Some(*seq)
            }
            Message::Written { seq, to, .. } => {
                self.unanswered.remove(to);
                written = self.readies.remove(to);
                if written.is_some() {
                    self.bound.remove(to);
                }
                Some(*seq)
            }
            Message::Advert { seq, segments, .. } => {
                self.offered.extend(segments);
                Some(*seq)
            }
            Message::Place { seq, segment } => {
                self.places.push(*segment);
                Some(*seq)
            }
            Message::Immediate { seq, .. }
            | Message::Notify { seq, .. }
            | Message::Cancel { seq, .. }
            | Message::Fin { seq } => Some(*seq),
        };
        self.due.extend(answered);
        if let Some(acked) = message.acks() {
            self.unanswered.remove(&acked.get());
        }
        let mut short = self.flow.clone();
        let delivery = short.arrived_short(&message);
        let mut out = Vec::new();
        let good = self.flow.arrived(message, slot, &mut out).is_ok();
        if let Some(delivery) = delivery {
            assert!(good);
            assert_eq!(out, as_actions(&delivery, slot));
            self.is_same(&short);
        }
        if good {
            // The Write has preceded the message.
            if let Some(memory) = written {
                let (call, at) = (memory.addr >> 32, memory.addr & 0xffff_ffff);
                for (i, byte) in data.iter().enumerate() {
                    self.store(call, at + i as u64, *byte);
                }
            }
            self.perform(out);
        }
        good
    }

    fn read_done(&mut self, peer: &BTreeMap<OpId, Call>) {
        let Some((number, to, at, from)) = self.reads.pop_front() else {
            return;
        };
        let mut at = at;
        for piece in from {
            let call = peer.get(&(piece.addr >> 32));
            for i in 0..u64::from(piece.len) {
                let source = (piece.addr & 0xffff_ffff) + i;
                let byte = call.map_or(0, |c| c.bytes[usize::try_from(source).unwrap()]);
                self.store(to, at, byte);
                at += 1;
            }
        }
        let mut out = Vec::new();
        self.flow.moved(number, &mut out);
        self.perform(out);
    }

    fn write_done(&mut self) -> Option<(OpId, Segment)> {
        let (send, to) = self.writes.pop_front()?;
        let mut out = Vec::new();
        self.flow.written(send, &mut out);
        self.perform(out);
        Some((send, to))
    }

    /// Completes the oldest invalidation of a window. Returns whether there was one.
    fn unbound(&mut self) -> bool {
        let Some(ready) = self.unbinding.pop_front() else {
            return false;
        };
        let bound = self.bound.remove(&ready);
        assert!(bound.is_some(), "{ready} has no window");
        let mut out = Vec::new();
        self.flow.unbound(ready, &mut out);
        self.perform(out);
        true
    }

    fn store(&mut self, to: OpId, at: u64, byte: u8) {
        if to == BUFFER {
            let size = self.ring.len();
            self.ring[usize::try_from(at).unwrap() % size] = byte;
        } else {
            let call = self.calls.get_mut(&to).unwrap();
            assert!(
                call.receives && call.ended.is_none(),
                "data for call {to}, which has ended or is no receive"
            );
            call.bytes[usize::try_from(at).unwrap()] = byte;
        }
    }

    /// Performs the actions of the state machine, and checks that each is permitted.
    fn perform(&mut self, actions: Vec<Action>) {
        // The short paths rely on this.
        assert!(self.flow.checks_quiet());
        for action in actions {
            match action {
                Action::Message(message, data) => self.say(message, data),
                Action::Read {
                    number,
                    to,
                    at,
                    from,
                } => {
                    let len: u64 = from.iter().map(|s| u64::from(s.len)).sum();
                    self.fits(to, at, len);
                    for piece in &from {
                        let inside = |o: &Segment| {
                            let from = piece.addr.wrapping_sub(o.addr);
                            piece.stag == o.stag
                                && from.saturating_add(piece.len.into()) <= o.len.into()
                        };
                        assert!(
                            self.offered.iter().any(inside),
                            "reads what was not offered: {piece:?}"
                        );
                    }
                    self.reads.push_back((number, to, at, from));
                }
                Action::Copy {
                    to,
                    at,
                    slot,
                    skip,
                    len,
                } => {
                    self.fits(to, at, len);
                    let data = self
                        .slots
                        .get(&slot)
                        .expect("copies from a slot that was released");
                    let range =
                        usize::try_from(skip).unwrap()..usize::try_from(skip + len).unwrap();
                    let bytes = data[range].to_vec();
                    for (i, byte) in bytes.into_iter().enumerate() {
                        self.store(to, at + i as u64, byte);
                    }
                }
                Action::Take { to, at, from, len } => {
                    self.fits(to, at, len);
                    for i in 0..len {
                        let size = self.ring.len();
                        let byte = self.ring[usize::try_from(from + i).unwrap() % size];
                        self.store(to, at + i, byte);
                    }
                }
                Action::Write { send, to } => {
                    let call = &self.calls[&send];
                    assert!(!call.receives && call.len == u64::from(to.len));
                    let inside = |p: &Segment| {
                        let from = to.addr.wrapping_sub(p.addr);
                        to.stag == p.stag && from.saturating_add(to.len.into()) <= p.len.into()
                    };
                    assert!(
                        self.places.iter().any(inside),
                        "writes where the peer has no place: {to:?}"
                    );
                    self.writes.push_back((send, to));
                }
                Action::Ready { message, recv } => {
                    if let Message::Ready {
                        seq, window: true, ..
                    } = message
                    {
                        self.bound.insert(seq, recv);
                        assert!(self.bound.len() <= WINDOWS, "more windows than exist");
                    }
                    self.say(message, None);
                }
                Action::Unbind(ready) => {
                    assert!(self.bound.contains_key(&ready));
                    self.unbinding.push_back(ready);
                }
                Action::Put {
                    message, send, to, ..
                } => {
                    let Message::Written {
                        seq, to: number, ..
                    } = message
                    else {
                        panic!("a Write before {message:?}");
                    };
                    let call = &self.calls[&send];
                    assert!(!call.receives && call.len == u64::from(to.len));
                    let memory = self.targets.remove(&number);
                    let memory = memory.expect("the peer waits for this data");
                    assert!(self.due.remove(&number), "{seq} answers {number}");
                    assert!(
                        (to.addr, to.stag) == (memory.addr, memory.stag) && to.len <= memory.len
                    );
                    self.say(message, Some(send));
                }
                Action::Release(slot) => {
                    let removed = self.slots.remove(&slot);
                    assert!(removed.is_some(), "slot {slot} is released twice");
                }
                Action::Complete { op, outcome, len } => {
                    let earlier = self.calls.range(..op).map(|(id, c)| (*id, c));
                    let open: Vec<_> = earlier
                        .filter(|(_, c)| c.ended.is_none() && !c.persistent)
                        .map(|(id, c)| (id, c.receives))
                        .collect();
                    let call = self.calls.get_mut(&op).expect("an event of no call");
                    assert!(
                        call.persistent
                            || (outcome == Outcome::Cancelled && !self.ordered)
                            || open.iter().all(|(_, receives)| *receives != call.receives),
                        "call {op} ended before {open:?}"
                    );
                    assert!(call.ended.is_none(), "call {op} has two events");
                    assert!(len <= call.len, "{len} bytes of a call with {}", call.len);
                    let bound = self.bound.values().any(|recv| *recv == op);
                    assert!(!bound, "call {op} ended before its window");
                    if outcome != Outcome::WasRead {
                        call.ended = Some((outcome, len));
                        self.order.push(op);
                    }
                }
            }
        }
        assert!(
            self.reads.len() <= 16 && self.writes.len() <= 16,
            "more Reads and Writes than the send queue holds"
        );
    }

    fn fits(&self, to: OpId, at: u64, len: u64) {
        if to == BUFFER {
            assert!(len <= self.ring.len() as u64);
        } else {
            let call = &self.calls[&to];
            assert!(call.receives && call.ended.is_none());
            assert!(at + len <= call.len, "{at} + {len} exceed {}", call.len);
        }
    }

    fn flush(&mut self) -> bool {
        let held = self.flow.has_held();
        let mut out = Vec::new();
        self.flow.flush(&mut out);
        assert!(held || out.is_empty());
        let any = !out.is_empty();
        self.perform(out);
        any
    }

    fn say(&mut self, message: Message, data: Option<OpId>) {
        if let Some(acked) = message.acks() {
            let due = self.due.remove(&acked.get());
            assert!(due, "{acked} is answered twice, or unasked");
        }
        let number = match &message {
            Message::Ack { seq, .. } => {
                assert!(self.due.remove(seq), "{seq} is answered twice, or unasked");
                self.targets.remove(seq);
                None
            }
            Message::Ready { seq, segment, .. } => {
                self.readies.insert(*seq, *segment);
                Some((*seq, true))
            }
            Message::Advert { seq, .. }
            | Message::Immediate { seq, .. }
            | Message::Written { seq, .. }
            | Message::Place { seq, .. } => Some((*seq, true)),
            Message::Notify { seq, .. } | Message::Cancel { seq, .. } | Message::Fin { seq } => {
                Some((*seq, false))
            }
        };
        if let Some((seq, credit)) = number {
            assert_eq!(
                seq, self.next_seq,
                "the sequence numbers are not consecutive"
            );
            self.next_seq = self.next_seq.wrapping_add(1);
            self.unanswered.insert(seq, credit);
            let used = self.unanswered.values().filter(|c| **c == credit).count();
            let most = if credit { self.credits } else { CONTROLS };
            assert!(used <= most as usize, "{used} unanswered, {most} allowed");
        }
        let bytes = data.map_or_else(Vec::new, |id| self.calls[&id].bytes.clone());
        // Encoding and parsing a message must give the same message.
        let inside = if matches!(message, Message::Immediate { .. }) {
            bytes.as_slice()
        } else {
            &[]
        };
        let raw = [message.bytes(), inside.to_vec()].concat();
        assert_eq!(Message::read(&raw), Ok(message.clone()));
        self.out.push_back((message, bytes));
    }
}

/// The number of windows of an end, if there are any.
const WINDOWS: usize = 3;

/// Runs a scenario with any bytes: arbitrary messages of a peer, or arbitrary calls of two programs.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let choice = input.byte();
    let hello = |input: &mut Input<'_>| Hello {
        stream: choice & 2 != 0,
        credits: u16::from(input.byte() % 8) + 1,
        immediate: u32::from(input.byte()) * u32::from(choice >> 2 & 1),
        ready: choice & 64 == 0,
        invalidates: choice & 64 == 0,
    };
    let (ours, theirs) = (hello(&mut input), hello(&mut input));
    let buffer = u64::from(input.byte()) * u64::from(choice >> 3 & 1) * 8;
    // Like the socket, an end uses at most as many of the peer's credits as it has itself, because it has no buffers for more answers.
    let limit = |a: Hello, b: Hello| Hello {
        credits: a.credits.min(b.credits),
        ..a
    };
    let windows = choice & 128 != 0;
    let mut end = End::new(ours, limit(theirs, ours), buffer);
    // Only streams have a buffer, so this bit has another meaning for messages.
    end.ordered = choice & 2 != 0 || choice & 8 == 0;
    end.flow.set_ordered(end.ordered);
    if windows {
        end.flow.set_windows(WINDOWS);
    }
    end.flow.set_may_defer(choice & 16 != 0);
    if choice & 1 == 0 {
        hostile(&mut input, end);
    } else {
        let mut peer = End::new(theirs, limit(ours, theirs), buffer / 2);
        peer.flow.set_may_defer(choice & 32 != 0);
        if windows {
            peer.flow.set_windows(WINDOWS);
        }
        friends(&mut input, end, peer);
    }
}

fn hostile(input: &mut Input<'_>, mut end: End) {
    let mut seq = 1u32;
    while !input.0.is_empty() {
        let len = u32::from(input.byte()) << (input.byte() % 4);
        let offset = (input.byte() & 3 == 0).then(|| u64::from(input.byte()));
        match input.byte() % 18 {
            0 | 1 => end.send(len, input.byte(), offset),
            2 | 3 => end.recv(len, input.byte(), offset),
            4 => end.cancel(u64::from(input.byte()) % end.next + 1),
            5 => end.shutdown(),
            6 => {
                end.read_done(&BTreeMap::new());
                end.flow.set_may_defer(input.byte() & 1 != 0);
            }
            7 => {
                end.write_done();
                end.unbound();
                end.flush();
            }
            8 => {
                // Arbitrary bytes, which may form a valid message.
                let count = usize::from(input.byte() % 80).min(input.0.len());
                let (raw, rest) = input.0.split_at(count);
                input.0 = rest;
                if let Ok(message) = Message::read(raw) {
                    let data = raw.get(HEADER_LENGTH..).unwrap_or(&[]).to_vec();
                    let data = if matches!(message, Message::Immediate { .. }) {
                        data
                    } else {
                        Vec::new()
                    };
                    if !end.arrives(message, data) {
                        return;
                    }
                }
            }
            kind => {
                let number = input.near(seq);
                let sent = end.unanswered.keys().next().copied().unwrap_or(1);
                let segment = Segment {
                    addr: u64::from(input.number()) << (input.byte() % 33),
                    stag: input.number(),
                    len,
                };
                let acks = (input.byte() & 3 == 0).then(|| input.near(sent));
                let acks = acks.and_then(NonZeroU32::new);
                let message = match kind {
                    9 | 10 => Message::Advert {
                        seq: number,
                        segments: smallvec![segment; usize::from(input.byte() % 8) + 1],
                        persistent: offset.is_some(),
                        notify: offset.is_some() && input.byte() & 1 != 0,
                        acks,
                    },
                    11 => Message::Immediate {
                        seq: number,
                        len,
                        acks,
                    },
                    12 => Message::Place {
                        seq: number,
                        segment,
                    },
                    13 => Message::Ack {
                        seq: input.near(sent),
                        len: u64::from(input.near(len)),
                        status: [Status::Done, Status::Cancelled, Status::Refused]
                            [usize::from(input.byte() % 3)],
                    },
                    14 => Message::Notify {
                        seq: number,
                        of: input.near(sent),
                        len: len.into(),
                    },
                    16 => Message::Ready {
                        seq: number,
                        segment,
                        last: offset.is_none().then(|| {
                            let last = end.flow.last_advertised();
                            input.near(last)
                        }),
                        acks,
                        window: len & 1 != 0,
                    },
                    17 => {
                        let ready = end.readies.keys().next().copied();
                        Message::Written {
                            seq: number,
                            to: input.near(ready.unwrap_or(1)),
                            len,
                            acks,
                        }
                    }
                    _ if input.byte() & 7 == 0 => Message::Fin { seq: number },
                    _ => Message::Cancel {
                        seq: number,
                        of: u32::from(input.byte()) % seq,
                    },
                };
                if !matches!(message, Message::Ack { .. }) {
                    seq = seq.wrapping_add(1);
                }
                let data = match message {
                    Message::Immediate { len, .. } | Message::Written { len, .. } => {
                        vec![7; len as usize]
                    }
                    _ => Vec::new(),
                };
                if !end.arrives(message, data) {
                    return;
                }
            }
        }
    }
}

/// Delivers the oldest message of `from` to `to`, or completes the oldest read of `from`, or its oldest write and its oldest invalidation of a
/// window. Returns whether there was one.
fn step(from: &mut End, to: &mut End, what: u8) -> bool {
    match what % 3 {
        0 => from.out.pop_front().is_some_and(|(message, data)| {
            let text = format!("{message:?}");
            let accepted = to.arrives(message, data);
            assert!(accepted, "refuses {text} in {:?}", to.flow);
            true
        }),
        1 => {
            let any = !from.reads.is_empty();
            from.read_done(&to.calls);
            any
        }
        _ => from.write_done().is_some() | from.unbound(),
    }
}

fn friends(input: &mut Input<'_>, a: End, b: End) {
    let mut ends = [a, b];
    while !input.0.is_empty() {
        let what = input.byte();
        let [first, second] = &mut ends;
        let (end, other) = if what & 1 == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let len = u32::from(input.byte()) << (what >> 6);
        match what >> 1 & 7 {
            0 => end.send(len, input.byte() & 4, None),
            1 => end.recv(len, input.byte() & 14, None),
            2 if what & 0x30 == 0 => end.cancel(u64::from(input.byte()) % end.next + 1),
            3 if what & 0x30 == 0 => end.shutdown(),
            7 if what & 0x30 == 0 => {
                end.flow.set_may_defer(len & 1 == 0);
                end.flush();
            }
            n => {
                step(end, other, n);
            }
        }
    }
    // Completes everything that is in progress.
    for round in 0.. {
        let [first, second] = &mut ends;
        let mut any = false;
        for what in 0..3 {
            any |= step(first, second, what);
            any |= step(second, first, what);
        }
        any |= first.flush();
        any |= second.flush();
        if any {
            continue;
        }
        first.shutdown();
        second.shutdown();
        // Posts receives until the end of the data was reported. A receive that completes with 0 bytes reports the end or an empty
        // message. So the end was reported if more receives completed with 0 bytes than the other end sent empty messages.
        let open = |e: &End| e.calls.values().any(|c| c.ended.is_none());
        let empty = |e: &End, receives: bool| {
            let calls = e.order.iter().map(|id| &e.calls[id]);
            let calls = calls.filter(|c| c.receives == receives && (c.len > 0 || !receives));
            calls
                .filter(|c| matches!(c.ended, Some((Outcome::Done, 0))))
                .count()
        };
        let mut done = !open(first) && !open(second);
        for (from, to) in [(0, 1), (1, 0)] {
            if empty(&ends[to], true) <= empty(&ends[from], false) {
                ends[to].recv(3000, 0, None);
                done = false;
            }
        }
        if done {
            break;
        }
        assert!(
            round < 100_000,
            "operations of the two ends do not complete: {:?}",
            ends.map(|e| (e.flow, e.order.len(), e.next))
        );
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (&ends[from], &ends[to]);
        for (id, call) in from.calls.iter().chain(&to.calls) {
            assert!(call.ended.is_some(), "call {id} has no event: {call:?}");
        }
        let taken = |end: &End, receives: bool| -> Vec<Vec<u8>> {
            let ended = end.order.iter().map(|id| &end.calls[id]);
            ended
                .filter(|c| c.receives == receives)
                .filter_map(|c| c.ended.map(|(outcome, len)| (c, outcome, len)))
                .filter(|(_, outcome, len)| *outcome != Outcome::Cancelled || *len > 0)
                .map(|(c, _, len)| c.bytes[..usize::try_from(len).unwrap()].to_vec())
                .collect()
        };
        // Compares all bytes in order, and not each message, because an empty message cannot be told from the end of the data.
        let (sent, received) = (taken(from, false).concat(), taken(to, true).concat());
        let all = |end: &End| -> Vec<_> {
            let ended = end.order.iter().map(|id| (*id, &end.calls[id]));
            ended
                .map(|(id, c)| (id, c.receives, c.len, c.ended))
                .collect()
        };
        assert!(
            sent == received,
            "the received bytes are not those that were sent: {:?} and {:?}",
            all(from),
            all(to)
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// The number of calls and messages for which a short path was compared with the general one.
    pub(super) static SHORT: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn every_input_of_the_corpus() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/exs");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(files.len() >= 20, "{} files", files.len());
        for file in files {
            // Prints the name of each input, so that the last line before a panic names the one that failed.
            println!("{}", file.display());
            super::run(&std::fs::read(&file).unwrap());
        }
    }

    struct Random(u64);

    impl Random {
        fn byte(&mut self) -> u8 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 56) as u8
        }
    }

    #[test]
    fn random_bytes() {
        let mut random = Random(1);
        for round in 0..20_000 {
            let bytes: Vec<u8> = (0..round % 600).map(|_| random.byte()).collect();
            super::run(&bytes);
        }
    }

    /// Two programs exchange messages, most of which fit into receives that were posted before, so that receives are advertised and used.
    #[test]
    fn random_conversations() {
        converse(&mut Random(2), 0);
    }

    /// The same with immediate data.
    #[test]
    fn random_conversations_with_immediate_data() {
        converse(&mut Random(3), 127);
        let short = SHORT.load(Relaxed);
        assert!(
            short > 10_000,
            "{short} calls and messages have taken the short path"
        );
    }

    /// `immediate`: the length of the longest immediate data. Most sends have data of this kind, if there is any.
    fn converse(random: &mut Random, immediate: u8) {
        let shift = if immediate > 0 { 0 } else { 3 };
        for round in 0..5_000 {
            // Two ends, messages. Windows, held acknowledgements and the order of cancelled calls are at random.
            let mut bytes = vec![
                random.byte() & 0xb8 | 1 | u8::from(immediate > 0) << 2,
                random.byte(),
                immediate,
                random.byte(),
                immediate,
                0,
            ];
            for _ in 0..round % 400 {
                let end = random.byte() & 1;
                let call = match random.byte() {
                    0..80 => [end | 1 << 1 | 3 << 6, random.byte(), 4],
                    80..150 => [end | shift << 6, random.byte() & 0x7f, 0],
                    150..153 => [end | 2 << 1, 0, random.byte()],
                    153 => [end | 1 << 1, random.byte(), random.byte()],
                    154 => [end, random.byte(), random.byte()],
                    155 if round % 8 == 0 => [end | 3 << 1, 0, 6 << 1],
                    155..158 => [end | 7 << 1, random.byte(), 6 << 1],
                    158..170 => [end | 4 << 1, 0, 6 << 1],
                    170..180 => [end | 5 << 1, 0, 6 << 1],
                    _ => [end | 6 << 1, 0, end ^ 1 | 6 << 1],
                };
                bytes.extend(call);
                // A send, a receive and a cancellation read three bytes. The other entries are two steps, which read two bytes each.
                if call[0] >> 1 & 7 > 2 {
                    bytes.push(0);
                }
            }
            super::run(&bytes);
        }
    }
}
