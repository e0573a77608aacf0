//! Operations that wait for a message of a peer: each of them ends even if this message is never sent, or is lost for good.
//!
//! For example, the sender of an *announced* message waits until the receiver *grants* memory for it, and the receiver then waits until
//! the sender has written the message there.
//!
//! A peer that is alive may have given up an operation of this endpoint, because its answer was not acknowledged in time, or because
//! it regarded this endpoint as lost. Therefore an endpoint regularly *asks* the peers about the operations that wait for them, and a
//! peer answers with those that are *unknown* to it. The answer follows all earlier messages of the peer, so an operation
//! that still waits then would wait for ever.

use std::collections::HashSet;

use super::*;
use crate::wire::Waits;

/// The size of an operation in a question: its numbers at both ends, 4 bytes each.
const ASKED: usize = 8;
/// The most operations of a question, which is sent inline.
const ASKED_MOST: usize = (limits::INLINE - HEADER) / ASKED;

/// An operation that waits for a peer.
pub(super) type Waiting = (Remote, Waits, [u32; 2]);

impl Endpoint {
    /// Periodically sends a message to the peers that operations wait for: a question about these operations, or a probe if there
    /// is nothing to ask. The device detects the loss of a peer only when it sends to that peer.
    pub(super) fn ask(&mut self, cx: &mut Shared) {
        self.calls += 1;
        if self.calls < limits::ASK_CALLS {
            return;
        }
        self.calls = 0;
        let elapsed = self.asked.elapsed();
        if elapsed < limits::ASK_AFTER {
            if elapsed >= limits::ASK_AFTER / 2 && !self.has_looked {
                self.has_looked = true;
                self.waited = self.waiting();
            }
            return;
        }
        self.has_looked = false;
        self.asked = Instant::now();
        self.answer_questions(cx);
        let waits = |(_, op): (u32, &Op)| match op {
            Op::Announced { to, .. } | Op::Atomic { to, .. } => Some(*to),
            Op::Sent {
                to, confirmation, ..
            } if *confirmation != Confirmation::NotNeeded => Some(*to),
            _ => None,
        };
        let mut peers: Vec<Remote> = self.ops.iter().filter_map(waits).collect();
        peers.extend(self.incoming.iter().map(|(_, i)| i.message.from));
        peers.extend(self.links.waiting());
        peers.sort_unstable();
        peers.dedup();
        for (_, op) in self.ops.iter() {
            if let Op::Probe { to } = op {
                peers.retain(|peer| peer != to);
            }
        }
        // Only operations that have waited for a while are in a question. The numbers of operations are used again, and the peer may answer after
        // the operation of the question has ended.
        let waiting = self.waiting();
        let before = std::mem::replace(&mut self.waited, waiting.clone());
        let is_old = |w: &Waiting| before.binary_search(w).is_ok();
        let waiting: Vec<Waiting> = waiting.into_iter().filter(is_old).collect();
        for to in peers {
            let from = waiting.partition_point(|(peer, ..)| *peer < to);
            let of_peer = waiting.get(from..).unwrap_or_default();
            let count = of_peer.partition_point(|(peer, ..)| *peer == to);
            let of_peer = of_peer.get(..count).unwrap_or_default();
            let sent = if of_peer.is_empty() {
                self.probe(cx, to)
            } else {
                self.ask_peer(cx, to, of_peer)
            };
            if sent.is_err() {
                return;
            }
            self.report_failed_link(cx, to);
        }
    }

    /// Returns the operations that wait for a message of a peer, sorted.
    fn waiting(&self) -> Vec<Waiting> {
        // Before the device has delivered the announcement or the request, the peer need not know the operation.
        let waits = |(name, op): (u32, &Op)| match op {
            Op::Announced {
                to,
                known: true,
                grant: None,
                ..
            }
            | Op::Sent {
                to,
                confirmation: Confirmation::Receiver,
                ..
            } => Some((*to, Waits::Message, [name, 0])),
            Op::Atomic {
                to, known: true, ..
            } => Some((*to, Waits::Atomic, [name, 0])),
            _ => None,
        };
        let mut all: Vec<Waiting> = self.ops.iter().filter_map(waits).collect();
        let incoming = self.incoming.iter();
        all.extend(incoming.map(|(name, i)| (i.message.from, Waits::Write, [name, i.id])));
        all.sort_unstable();
        all
    }

    /// Sends a message without content, which shows whether a peer responds.
    pub(super) fn probe(&mut self, cx: &mut Shared, to: Remote) -> Result<(), i32> {
        let op = Op::Probe { to };
        let op = self.ops.insert(op).map_err(|_full| FI_EAGAIN)?;
        let id = OP << KIND | u64::from(op);
        let posted = self.post_header(cx, to, id, &Header::new(Kind::Probe));
        if posted.is_err() {
            self.ops.remove(op);
        }
        posted
    }

    /// Asks a peer about operations.
    fn ask_peer(&mut self, cx: &mut Shared, to: Remote, about: &[Waiting]) -> Result<(), i32> {
        let questions = about.chunk_by(|(_, a, _), (_, b, _)| a == b);
        for question in questions.flat_map(|of_kind| of_kind.chunks(ASKED_MOST)) {
            let Some((_, waits, _)) = question.first() else {
                continue;
            };
            let mut header = Header::new(Kind::Ask);
            header.length = question.len() as u64;
            header.tag = *waits as u64;
            let numbers = question.iter().flat_map(|(_, _, numbers)| numbers);
            let content: Vec<u8> = numbers.flat_map(|n| n.to_be_bytes()).collect();
            self.post_message(cx, to, &header, &content, |_inline| Op::Probe { to })?;
        }
        Ok(())
    }

    /// Handles a question of a peer.
    pub(super) fn asked(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        // Without room for an answer the question is dropped. The peer asks again.
        if self.deferred.len() >= limits::DEFERRED {
            return;
        }
        let Some(waits) = Waits::from_number(header.tag) else {
            return;
        };
        let numbers = self.numbers(at, length);
        let (pairs, _) = numbers.as_chunks::<2>();
        // The message or the request may be among the held messages, so the question is ignored. The peer asks again.
        if waits != Waits::Write && !self.held.is_empty() {
            return;
        }
        let unknown: Vec<u32> = match waits {
            Waits::Message => {
                let new = !self.questions.contains_key(&from);
                if new && self.questions.len() >= limits::COUNTED {
                    return;
                }
                let of_peer = self.questions.entry(from).or_default();
                let room = limits::ANNOUNCED.saturating_sub(of_peer.len());
                of_peer.extend(pairs.iter().map(|[name, _]| name).take(room));
                return;
            }
            // A request is executed and answered when it is received, so none of those in the question is left here.
            Waits::Atomic => pairs.iter().map(|[name, _]| *name).collect(),
            Waits::Write => {
                let ends = |[name, id]: &&[u32; 2]| !self.will_write(from, *id, *name);
                pairs.iter().filter(ends).map(|[name, _]| *name).collect()
            }
        };
        self.send_unknown(cx, from, waits, &unknown);
    }

    /// Returns the bytes that follow the header of a message in a receive.
    pub(super) fn content(&self, at: usize, length: usize) -> &[u8] {
        // SAFETY: the receive has completed and is not posted again yet.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        datagram.get(ROUTE_HEADER + HEADER..).unwrap_or_default()
    }

    /// Returns the numbers that follow the header of a message in a receive.
    fn numbers(&self, at: usize, length: usize) -> Vec<u32> {
        let (numbers, _) = self.content(at, length).as_chunks::<4>();
        numbers.iter().map(|n| u32::from_be_bytes(*n)).collect()
    }

    /// Returns whether the message `id` exists and may still be written to the memory that the peer has granted for it as `name`.
    fn will_write(&self, peer: Remote, id: u32, name: u32) -> bool {
        // Without a grant, the message waits for one that is under way, or for another one after a link has failed.
        matches!(self.ops.get(id), Some(Op::Announced { to, grant, .. })
            if *to == peer && grant.is_none_or(|grant| grant.word == name))
    }

    /// Answers the questions about announced messages. They are collected, because each answer needs a search among all stored messages,
    /// which may be many.
    fn answer_questions(&mut self, cx: &mut Shared) {
        if self.questions.is_empty() {
            return;
        }
        let questions = std::mem::take(&mut self.questions);
        let mut known: HashSet<(Remote, u32)> = HashSet::new();
        let stored = self.tagged.announced().chain(self.untagged.announced());
        known.extend(stored.filter(|(from, _)| questions.contains_key(from)));
        known.extend(self.incoming.iter().map(|(_, i)| (i.message.from, i.id)));
        for (_, op) in self.ops.iter() {
            if let Op::Fetch { message, id, .. } = op {
                known.insert((message.from, *id));
            }
        }
        for (from, mut names) in questions {
            names.retain(|name| !known.contains(&(from, *name)));
            self.send_unknown(cx, from, Waits::Message, &names);
        }
    }

    /// Tells a peer that this endpoint knows nothing of operations that wait for it.
    fn send_unknown(&mut self, cx: &mut Shared, to: Remote, waits: Waits, names: &[u32]) {
        for names in names.chunks(ASKED_MOST) {
            // Without room the rest of the answer is dropped. The peer asks again.
            if self.deferred.len() >= limits::DEFERRED {
                return;
            }
            let mut header = Header::new(Kind::Unknown);
            header.length = names.len() as u64;
            header.tag = waits as u64;
            let content = names.iter().flat_map(|name| name.to_be_bytes()).collect();
            self.reply(cx, to, header, content);
        }
    }

    /// Ends operations that are unknown to the peer that they wait for.
    pub(super) fn end_unknown(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        let Some(waits) = Waits::from_number(header.tag) else {
            return;
        };
        for name in self.numbers(at, length) {
            match waits {
                Waits::Message | Waits::Atomic => {
                    let of_kind = match self.ops.get(name) {
                        Some(Op::Announced { to, .. } | Op::Sent { to, .. }) => {
                            waits == Waits::Message && *to == from
                        }
                        Some(Op::Atomic { to, .. }) => waits == Waits::Atomic && *to == from,
                        _ => false,
                    };
                    if of_kind {
                        self.end_unanswered(cx, name, FI_ECONNRESET);
                    }
                }
                Waits::Write => {
                    let incoming = self.incoming.get(name);
                    if incoming.is_some_and(|i| i.message.from == from) {
                        self.end_incoming(cx, name, FI_ECONNRESET);
                    }
                }
            }
        }
    }

    /// Ends an operation that waits for a message of a peer, and has no request in the device.
    pub(super) fn end_unanswered(&mut self, cx: &mut Shared, name: u32, err: i32) {
        let waits = matches!(
            self.ops.get(name),
            Some(
                Op::Announced {
                    known: true,
                    grant: None,
                    ..
                } | Op::Atomic { known: true, .. }
                    | Op::Sent {
                        confirmation: Confirmation::Receiver,
                        ..
                    }
            )
        );
        match waits.then(|| self.ops.remove(name)).flatten() {
            Some(Op::Announced { done, regions, .. }) => {
                // The memory is deregistered before the completion is reported.
                drop(regions);
                self.finish_or_report(cx, done, err);
            }
            Some(Op::Sent { done, .. }) => self.finish_or_report(cx, done, err),
            Some(Op::Atomic { done, .. }) => self.finish(cx, &done, err),
            _ => {}
        }
    }

    /// Ends the receive of a granted message that will not be written.
    pub(super) fn end_incoming(&mut self, cx: &mut Shared, name: u32, err: i32) {
        if let Some(mut incoming) = self.incoming.remove(name) {
            // The memory is deregistered first, so that it is not written after the completion was reported.
            incoming.region = None;
            self.received(cx, &incoming.target, &incoming.message, 0, err);
        }
    }
}
