//! A connection as a state machine without I/O. It matches sends with receives and schedules the transfers.
//!
//! ```text
//! send() recv() cancel() shutdown()  ─┐
//! arrived() moved() written()        ─┴─> Flow ──> Action: send a message, read, write, copy, complete
//! ```
//!
//! The receiver of data reads it from the sender's memory. An advertisement of the sender waits in `adverts` for a receive,
//! and a receive waits in `recvs` for an advertisement. The transfer of a matched pair is called a *move*. Moves end in the
//! order in which they began. A *persistent* send or receive stays active for any number of transfers.
//!
//! A receiver that waits for the next message can advertise the memory of its receives ([`Message::Ready`]). The sender writes the data of its next
//! send into the memory of the first of them by an RDMA Write, and reports it ([`Message::Written`]). Each advertised receive gets one send, in order.
//! The sender refuses all advertised receives if it had already advertised its next send, or if that send cannot be written there: it is
//! empty, short enough for immediate data, longer than the receive, persistent, or in several segments. Refused receives get their data by RDMA
//! Reads or as immediate data. The two ends are *in step* as long as nothing was refused.

use crate::wire::{Bad, Hello, Message, Segment, Segments, Status};
use std::collections::VecDeque;
use std::num::NonZeroU32;

mod short;

pub(crate) use short::Delivery;

/// The most control messages (cancels, notifications, the end of the direction) in flight. A *credit* permits an end to send one more message before the peer has
/// answered the earlier ones. Control messages have credits of their own, because they are answered as soon as they arrive.
pub(crate) const CONTROLS: u32 = 4;

/// The number of an operation of the program.
pub(crate) type OpId = u64;

/// Stands for the buffer of a stream where the number of a receive is expected. An offset in the buffer is a position in the stream.
pub(crate) const BUFFER: OpId = 0;

/// The index of a message buffer that contains immediate data, which is the data of a short send in the message itself.
pub(crate) type Slot = usize;

/// A send of the program.
#[derive(Debug, Clone)]
#[cfg_attr(any(test, fuzzing), derive(PartialEq))]
pub(crate) struct Send {
    pub(crate) id: OpId,
    pub(crate) segments: Segments,
    pub(crate) persistent: bool,
    pub(crate) notify: bool,
    /// The offset in the peer's persistent receive, for a send into its memory.
    pub(crate) offset: Option<u64>,
}

/// A receive of the program.
#[derive(Debug, Clone)]
#[cfg_attr(any(test, fuzzing), derive(PartialEq))]
pub(crate) struct Recv {
    pub(crate) id: OpId,
    pub(crate) segments: Segments,
    pub(crate) persistent: bool,
    pub(crate) wait_all: bool,
    pub(crate) offset: Option<u64>,
    /// Whether it may be advertised to the peer. An advertised receive is cancelled only when the peer has answered.
    pub(crate) may_be_ready: bool,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Truncated,
    /// The peer has read a persistent send, which stays active.
    WasRead,
    Cancelled,
    Invalid,
    BothPersistent,
}

/// An action for the caller. Actions must be performed in the order of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Sends a message, followed by the data of a send if there is one.
    Message(Message, Option<OpId>),
    /// Reads the peer's memory into that of a receive, from `at` on. [`Flow::moved`] is called when all bytes have arrived.
    Read {
        number: u64,
        to: OpId,
        at: u64,
        from: Segments,
    },
    /// Copies `len` bytes of immediate data from `skip` on into the memory of a receive.
    Copy {
        to: OpId,
        at: u64,
        slot: Slot,
        skip: u64,
        len: u64,
    },
    /// Copies bytes of the stream's buffer from offset `from` on into the memory of a receive.
    Take {
        to: OpId,
        at: u64,
        from: u64,
        len: u64,
    },
    /// Writes the data of a send to the peer's memory. [`Flow::written`] is called when the write has completed.
    Write { send: OpId, to: Segment },
    /// Writes the data of a send to the peer's memory, and then sends the message. The answer of the peer shows that the write has completed.
    Put {
        message: Message,
        send: OpId,
        to: Segment,
        /// Whether the STag is that of a memory window, which the message invalidates.
        window: bool,
    },
    /// Sends a [`Message::Ready`], which advertises the memory of a receive. If it contains a window, a window is bound to this memory before,
    /// and its STag is sent.
    Ready { message: Message, recv: OpId },
    /// Invalidates the window of the [`Message::Ready`] with this number. [`Flow::unbound`] is called when it is invalid.
    Unbind(u32),
    /// Releases the message buffer: a receive is posted with it again.
    Release(Slot),
    /// Reports an operation.
    Complete {
        op: OpId,
        outcome: Outcome,
        len: u64,
    },
}

#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Advert {
    seq: u32,
    segments: Segments,
    slot: Option<Slot>,
    len: u64,
    taken: u64,
    notify: bool,
}

#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Move {
    number: u64,
    recv: OpId,
    len: u64,
    truncated: bool,
    ends_recv: bool,
    /// The advertisement that ends with this move, if one does: its number, its length, and the buffer of its immediate
    /// data.
    ends_advert: Option<(u32, u64, Option<Slot>)>,
    /// The persistent advertisement whose owner is notified of this move.
    notify: Option<u32>,
    done: bool,
}

#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Waiting {
    recv: Recv,
    len: u64,
    asked: u64,
    got: u64,
    /// Whether the receive was cancelled: it gets no more bytes than those that are being read into its memory.
    cancelled: bool,
    /// The number of the message that has advertised the receive, until the peer has answered it.
    ready: Option<u32>,
    /// The number of such a message whose window is being invalidated. Meanwhile the receive gets no data and does not end.
    unbinding: Option<u32>,
    /// How the receive has ended. This is reported after the earlier receives.
    ended: Option<Outcome>,
}

impl Waiting {
    fn new(recv: Recv, ended: Option<Outcome>) -> Self {
        Self {
            len: total(&recv.segments),
            recv,
            asked: 0,
            got: 0,
            cancelled: false,
            ready: None,
            unbinding: None,
            ended,
        }
    }
}

#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Sent {
    seq: u32,
    op: Option<OpId>,
    len: u64,
    kind: Kind,
    /// The answer of the peer, which is reported after the earlier sends.
    answer: Option<(Outcome, u64)>,
    /// The number of the message whose end this one requests.
    cancels: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Once,
    Persistent { notify: bool },
    Place,
    Ready,
    Control,
}

/// What an end that sends data knows of the receives that the peer has advertised ([`Message::Ready`]).
#[derive(Debug, Default)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Targets {
    /// The receives for the next sends.
    waiting: VecDeque<Target>,
    /// Whether the last one was usable, and nothing but written sends has followed.
    in_step: bool,
    /// The number of the last message with data or an advertisement that was sent.
    last: u32,
}

/// A receive of the peer.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(any(test, fuzzing), derive(PartialEq))]
struct Target {
    /// The number of the message that has advertised it.
    number: u32,
    memory: Segment,
    /// Whether the STag is that of a memory window.
    window: bool,
}

/// When an end that receives data advertises its receives ([`Message::Ready`]).
#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Ahead {
    /// Whether both ends may advertise receives.
    understood: bool,
    /// Whether the peer may advertise its receives by windows.
    invalidates: bool,
    /// The most receives that are advertised at the same time.
    most: usize,
    /// Whether each is advertised by a memory window.
    windows: bool,
    /// The number of advertised receives, and of those whose window is being invalidated.
    count: usize,
    unbinding: usize,
    /// Whether another receive can be advertised, and this waits until the program has had the opportunity to answer.
    due: bool,
    /// Whether the ends are in step, as far as this end knows.
    in_step: bool,
    /// The number of the peer's last message with data or an advertisement.
    last: u32,
    /// The number of sends that the peer has to advertise before this end advertises a receive again.
    pause: u32,
    /// The length of the last pause, halved for each send that the peer has written since. The next pause is twice as long.
    last_pause: u32,
}

impl Ahead {
    /// Ends the advertisement `ready` of a receive, which the peer has not used.
    fn take_back(&mut self, waiting: &mut Waiting, ready: u32, out: &mut Vec<Action>) {
        waiting.ready = None;
        if self.windows {
            waiting.unbinding = Some(ready);
            self.unbinding += 1;
            out.push(Action::Unbind(ready));
        } else if waiting.cancelled {
            waiting.ended = Some(Outcome::Cancelled);
        }
    }

    /// Records that the peer has not used an advertised receive.
    fn slow_down(&mut self) {
        self.last_pause = (self.last_pause * 2).clamp(MIN_PAUSE, MAX_PAUSE);
        self.pause = self.last_pause;
    }
}

/// The limits of [`Ahead::pause`]. They are lower in tests, which make calls at random and would otherwise hardly ever advertise a receive.
const MIN_PAUSE: u32 = if RANDOM { 1 } else { 4 };
const MAX_PAUSE: u32 = if RANDOM { 2 } else { 256 };
const RANDOM: bool = cfg!(any(test, fuzzing));

/// The buffer of a stream, for bytes that arrive before their receive.
#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
struct Buffer {
    size: u64,
    /// Positions in the stream: of the first byte that no receive has taken, of the end of the received bytes in the buffer,
    /// and of the end of the bytes that are being read into it.
    taken: u64,
    landed: u64,
    asked: u64,
}

/// One end of a connection.
#[derive(Debug)]
#[cfg_attr(any(test, fuzzing), derive(Clone, PartialEq))]
pub(crate) struct Flow {
    stream: bool,
    /// Advertisements that may still be sent.
    credits: u32,
    controls: u32,
    /// The longest immediate data that the peer accepts.
    immediate: u64,
    next_seq: u32,
    /// Whether cancelled operations are reported in the order of the calls, as all others are.
    ordered: bool,
    sends: VecDeque<Send>,
    /// The operations in `sends` that are cancelled and wait for the report of earlier ones.
    cancelled: Vec<OpId>,
    sent: VecDeque<Sent>,
    /// Cancels and notifications that wait for a credit of [`CONTROLS`].
    waiting_controls: VecDeque<(ControlKind, u32, u64)>,
    fin: Option<OpId>,
    fin_sent: bool,
    /// The peer's persistent receive: sequence number and memory.
    place: Option<(u32, Segment)>,
    writes: VecDeque<(OpId, u64)>,
    targets: Targets,
    /// Answers to the end of a persistent receive of the peer, which wait for the completion of local writes into its memory.
    place_ends: VecDeque<(u32, usize, Status)>,

    /// The most unanswered messages that the peer may have.
    granted: u32,
    our_immediate: u64,
    peer_unanswered: u32,
    peer_seq: u32,
    adverts: VecDeque<Advert>,
    persistent: Option<Advert>,
    /// Whether an acknowledgement may be held back for the next advertisement of this end.
    may_defer: bool,
    /// The sequence number and the length of the acknowledgement that is held back. Its status is done, and all bytes were taken.
    deferred: Option<(u32, u64)>,
    /// Whether this end sends advertisements that can carry acknowledgements. It is set when one is sent, and cleared when a held
    /// acknowledgement had to be sent as a message of its own. While it is not set, no acknowledgement is held back.
    answers: bool,
    recvs: VecDeque<Waiting>,
    ahead: Ahead,
    buffer: Buffer,
    moves: VecDeque<Move>,
    next_move: u64,
    /// Persistent advertisements of the peer that have ended. Each is answered when the moves before the given number have
    /// ended.
    persistent_ends: VecDeque<(u32, u64, Status)>,
    /// The local persistent receive, with its sequence number once it is sent.
    standing: Option<(Recv, Option<u32>)>,
    /// Persistent receives that have ended while reads into their memory are still in progress.
    standing_ends: Vec<(OpId, Outcome, u64)>,
    peer_fin: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ControlKind {
    Notify,
    Cancel,
}

/// The most moves in progress. Each uses up to 15 send queue entries.
const MAX_MOVES: usize = 16;
/// The most writes in progress. Each uses up to 8 send queue entries.
const MAX_WRITES: usize = 16;
/// The most receives that are advertised at the same time.
pub(crate) const MAX_READY: u16 = 16;

impl Flow {
    /// Returns the state of a new connection. `buffer`: the number of bytes of a stream that may be read before there is a
    /// receive for them.
    pub(crate) fn new(ours: Hello, theirs: Hello, buffer: u64) -> Self {
        let may_advance = ours.ready && theirs.ready && !ours.stream;
        Self {
            stream: ours.stream,
            credits: u32::from(theirs.credits),
            controls: CONTROLS,
            immediate: u64::from(theirs.immediate.min(ours.immediate)),
            next_seq: 1,
            ordered: true,
            sends: VecDeque::new(),
            cancelled: Vec::new(),
            sent: VecDeque::new(),
            waiting_controls: VecDeque::new(),
            fin: None,
            fin_sent: false,
            place: None,
            writes: VecDeque::new(),
            targets: Targets::default(),
            place_ends: VecDeque::new(),
            granted: u32::from(ours.credits),
            our_immediate: u64::from(ours.immediate),
            peer_unanswered: 0,
            peer_seq: 0,
            adverts: VecDeque::new(),
            persistent: None,
            may_defer: false,
            deferred: None,
            answers: true,
            recvs: VecDeque::new(),
            ahead: Ahead {
                // Half of the credits are left for sends.
                most: if may_advance && theirs.credits > 2 {
                    usize::from((theirs.credits / 2).min(MAX_READY))
                } else {
                    0
                },
                understood: may_advance,
                invalidates: ours.invalidates,
                windows: false,
                count: 0,
                unbinding: 0,
                due: false,
                in_step: false,
                last: 0,
                // Short messages contain their data, so it makes no sense to advertise receives for them.
                pause: u32::from(theirs.immediate.min(ours.immediate) > 0),
                last_pause: 0,
            },
            buffer: Buffer {
                size: if ours.stream { buffer } else { 0 },
                taken: 0,
                landed: 0,
                asked: 0,
            },
            moves: VecDeque::new(),
            next_move: 0,
            persistent_ends: VecDeque::new(),
            standing: None,
            standing_ends: Vec::new(),
            peer_fin: false,
        }
    }

    /// Returns the most receives that are advertised at the same time.
    pub(crate) fn most_ready(&self) -> usize {
        self.ahead.most
    }

    /// Receives are advertised by memory windows, of which there are `count`.
    pub(crate) fn set_windows(&mut self, count: usize) {
        self.ahead.windows = true;
        self.ahead.most = self.ahead.most.min(count);
    }

    /// Returns whether a receive would get data at once, and whether a send would be advertised at once.
    pub(crate) fn ready(&self) -> (bool, bool) {
        let input = !self.adverts.is_empty()
            || self.persistent.is_some()
            || self.peer_fin
            || self.buffer.landed > self.buffer.taken;
        (
            input,
            self.sends.is_empty() && self.credits > 0 && self.fin.is_none() && !self.fin_sent,
        )
    }

    /// Returns whether a receive waits for data of the peer, and would get the end of the data.
    pub(crate) fn waits(&self, op: OpId) -> bool {
        let waits =
            |w: &Waiting| w.recv.id == op && !w.cancelled && w.asked == 0 && w.ended.is_none();
        self.recvs.iter().any(waits)
    }

    /// Returns whether the peer has ended its direction, and all remaining data is in the buffer.
    pub(crate) fn is_at_end(&self) -> bool {
        self.peer_fin
            && self.adverts.is_empty()
            && self.moves.is_empty()
            && self.persistent.is_none()
    }

    /// Returns the number of the last message with data or an advertisement that was sent.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn last_advertised(&self) -> u32 {
        self.targets.last
    }

    /// Returns the longest send that is sent as immediate data.
    pub(crate) fn immediate(&self) -> u64 {
        self.immediate
    }

    /// Returns whether the program has ended its direction.
    pub(crate) fn is_shut(&self) -> bool {
        self.fin.is_some() || self.fin_sent
    }

    /// Sets whether acknowledgements may be held back. The caller then has to call [`Flow::flush`] within a short time.
    pub(crate) fn set_may_defer(&mut self, may: bool) {
        self.may_defer = may;
    }

    /// Returns whether messages are held back.
    pub(crate) fn has_held(&self) -> bool {
        self.deferred.is_some() || self.ahead.due
    }

    /// Sends what is held back, because the program does nothing that could carry it.
    pub(crate) fn flush(&mut self, out: &mut Vec<Action>) {
        if self.ahead.due {
            self.advertise_receives(out);
        }
        self.send_held(out);
    }

    fn send_held(&mut self, out: &mut Vec<Action>) {
        if let Some((seq, len)) = self.deferred.take() {
            self.answers = false;
            out.push(ack(seq, len, Status::Done));
        }
    }

    pub(crate) fn send(&mut self, send: Send, out: &mut Vec<Action>) {
        self.sends.push_back(send);
        self.progress(out);
        if self.ahead.due {
            self.advertise_receives(out);
        }
    }

    pub(crate) fn recv(&mut self, recv: Recv, out: &mut Vec<Action>) {
        if !recv.persistent && self.is_quiet() {
            self.recvs.push_back(Waiting::new(recv, None));
            return;
        }
        let len = total(&recv.segments);
        let ended = if self.standing.is_some() || recv.persistent && self.persistent.is_some() {
            Some(Outcome::BothPersistent)
        } else if recv.persistent
            && (recv.segments.len() != 1 || len == 0 || !self.recvs.is_empty())
        {
            Some(Outcome::Invalid)
        } else {
            None
        };
        if recv.persistent && ended.is_none() {
            self.standing = Some((recv, None));
        } else {
            self.recvs.push_back(Waiting::new(recv, ended));
        }
        self.progress(out);
    }

    /// Returns whether no transfer is in progress and the peer has answered all messages, including the end of the direction.
    pub(crate) fn is_drained(&self) -> bool {
        self.fin_sent
            && self.moves.is_empty()
            && self.writes.is_empty()
            && self.sends.is_empty()
            && self.sent.is_empty()
    }

    /// Returns whether the peer has all data of this end. Transfers from the peer may be in progress.
    pub(crate) fn has_delivered(&self) -> bool {
        self.sends.is_empty()
            && self.writes.is_empty()
            && self
                .sent
                .iter()
                .all(|s| matches!(s.kind, Kind::Place | Kind::Ready))
    }

    /// Ends the direction to the peer once all sends are advertised.
    pub(crate) fn shutdown(&mut self, op: OpId, out: &mut Vec<Action>) {
        self.send_held(out);
        self.fin = Some(op);
        self.progress(out);
    }

    /// Sets whether cancelled operations are reported in the order of the calls, or at once.
    pub(crate) fn set_ordered(&mut self, ordered: bool) {
        self.ordered = ordered;
    }

    /// Returns whether the peer has to do something before a cancelled operation can be reported: answer the request to cancel it, or send
    /// the data that is being read into its memory.
    pub(crate) fn needs_peer(&self, op: OpId) -> bool {
        if self.moves.iter().any(|m| m.recv == op) || self.writes.iter().any(|(w, _)| *w == op) {
            return true;
        }
        let sent = self
            .sent
            .iter()
            .find(|s| s.op == Some(op) && s.answer.is_none());
        sent.is_some_and(|sent| {
            let waits =
                |(k, of, _): &(ControlKind, u32, u64)| *k == ControlKind::Cancel && *of == sent.seq;
            self.waiting_controls.iter().any(waits)
                || self.sent.iter().any(|s| s.cancels == Some(sent.seq))
        })
    }

    /// Returns the most bytes that can be on their way to the peer or from it.
    pub(crate) fn in_progress(&self) -> u64 {
        let sends = self
            .sent
            .iter()
            .filter(|s| !matches!(s.kind, Kind::Place | Kind::Ready));
        let sent = sends.map(|s| s.len);
        let moves = self.moves.iter().map(|m| m.len);
        let ready = self.recvs.iter().filter(|w| w.ready.is_some());
        sent.chain(moves)
            .chain(ready.map(|w| w.len))
            .chain(self.writes.iter().map(|(_, len)| *len))
            .sum()
    }

    /// Forgets the receives, which the end of the connection has ended. Later ones get the buffered data and the end of the stream.
    pub(crate) fn end_receives(&mut self) {
        self.recvs.clear();
        self.ahead.count = 0;
        self.ahead.most = 0;
        self.standing = None;
        self.standing_ends.clear();
    }

    /// Requests the end of an operation. The operation is reported in any case, and may still succeed.
    pub(crate) fn cancel(&mut self, op: OpId, out: &mut Vec<Action>) {
        if let Some(at) = self.sends.iter().position(|s| s.id == op) {
            // Persistent sends have no place in the order.
            let in_order = self.ordered && self.sends.get(at).is_some_and(|s| !s.persistent);
            if !in_order {
                self.sends.remove(at);
                self.cancelled.retain(|c| *c != op);
                out.push(complete(op, Outcome::Cancelled, 0));
            } else if !self.cancelled.contains(&op) {
                self.cancelled.push(op);
                self.report_cancelled(out);
            }
        } else if let Some(at) = self.recvs.iter().position(|w| w.recv.id == op) {
            let moving = self.moves.iter().any(|m| m.recv == op);
            if let Some(waiting) = self.recvs.get_mut(at).filter(|w| w.ended.is_none()) {
                waiting.cancelled = true;
                if let Some(of) = waiting.ready {
                    self.request_cancel(of);
                } else if waiting.unbinding.is_some() {
                    // It ends when the window is invalid.
                } else if !moving && self.ordered {
                    waiting.ended = Some(Outcome::Cancelled);
                } else if !moving {
                    out.push(complete(op, Outcome::Cancelled, waiting.got));
                    self.recvs.remove(at);
                }
            }
        } else if let Some((_, None)) = self.standing.as_ref().filter(|(r, _)| r.id == op) {
            self.standing = None;
            self.end_standing(op, Outcome::Cancelled, 0, out);
        } else if let Some(sent) = self
            .sent
            .iter()
            .find(|s| s.op == Some(op) && s.answer.is_none())
        {
            let of = sent.seq;
            if sent.kind != Kind::Control {
                self.request_cancel(of);
            }
        }
        self.progress(out);
    }

    /// Adds a request to the peer to end the message `of` of this end.
    fn request_cancel(&mut self, of: u32) {
        let cancel = (ControlKind::Cancel, of, 0);
        let asked = self.sent.iter().any(|s| s.cancels == Some(of));
        if !asked && !self.waiting_controls.contains(&cancel) {
            self.waiting_controls.push_back(cancel);
        }
    }

    /// Handles a message of the peer. Its immediate data stays in `slot` until [`Action::Release`].
    pub(crate) fn arrived(
        &mut self,
        message: Message,
        slot: Slot,
        out: &mut Vec<Action>,
    ) -> Result<(), Bad> {
        if let Message::Ack { seq, len, status } = message {
            out.push(Action::Release(slot));
            self.answered(seq, len, status, out)?;
            self.progress(out);
            return Ok(());
        }
        let seq = match &message {
            Message::Advert { seq, .. }
            | Message::Immediate { seq, .. }
            | Message::Place { seq, .. }
            | Message::Notify { seq, .. }
            | Message::Cancel { seq, .. }
            | Message::Fin { seq }
            | Message::Ready { seq, .. }
            | Message::Written { seq, .. }
            | Message::Ack { seq, .. } => *seq,
        };
        if seq != self.peer_seq.wrapping_add(1) {
            return Err(Bad::Order);
        }
        self.peer_seq = seq;
        if let Some(acked) = message.acks() {
            let sent = self.sent.iter().find(|s| s.seq == acked.get());
            let len = sent.filter(|s| s.kind == Kind::Once).map(|s| s.len);
            self.answered(acked.get(), len.ok_or(Bad::Order)?, Status::Done, out)?;
        }
        if matches!(
            message,
            Message::Advert { .. }
                | Message::Immediate { .. }
                | Message::Place { .. }
                | Message::Ready { .. }
                | Message::Written { .. }
        ) {
            if self.peer_unanswered >= self.granted || self.peer_fin {
                return Err(Bad::Order);
            }
            self.peer_unanswered += 1;
        }
        let mut held = false;
        match message {
            Message::Advert {
                segments,
                persistent,
                notify,
                ..
            } => {
                self.out_of_step(seq, out);
                let len = total(&segments);
                let empty = self.stream && len == 0;
                let advert = Advert {
                    seq,
                    segments,
                    slot: None,
                    len,
                    taken: 0,
                    notify,
                };
                if empty {
                    self.answer(seq, 0, Status::Done, out);
                } else if !persistent {
                    self.adverts.push_back(advert);
                } else if self.standing.is_some() {
                    self.answer(seq, 0, Status::Refused, out);
                } else {
                    let old = self.persistent.replace(advert);
                    self.end_persistent(old, Status::Done, out);
                }
            }
            Message::Immediate { len, .. } => {
                let len = u64::from(len);
                if len > self.our_immediate {
                    return Err(Bad::Field);
                }
                self.out_of_step(seq, out);
                self.ahead.pause = self.ahead.pause.max(1);
                // In a stream, an empty message would look like the end of the data to the receiving program.
                if self.stream && len == 0 {
                    self.answer(seq, 0, Status::Done, out);
                } else {
                    held = true;
                    let slot = Some(slot);
                    self.adverts.push_back(Advert {
                        seq,
                        segments: Segments::new(),
                        slot,
                        len,
                        taken: 0,
                        notify: false,
                    });
                }
            }
            Message::Ready {
                segment,
                last,
                window,
                ..
            } => {
                let target = Target {
                    number: seq,
                    memory: segment,
                    window,
                };
                self.arrived_ready(target, last, out)?;
            }
            Message::Written { to, len, .. } => {
                let waiting = self.recvs.iter_mut().find(|w| w.ready.is_some());
                let waiting = waiting.filter(|w| w.ready == Some(to) && u64::from(len) <= w.len);
                let waiting = waiting.ok_or(Bad::Order)?;
                waiting.ready = None;
                waiting.asked = len.into();
                let recv = waiting.recv.id;
                self.ahead.count -= 1;
                self.ahead.last = seq;
                self.ahead.last_pause /= 2;
                self.end_ready(to);
                // Earlier messages, which may still be read, are answered before.
                self.begin(Move {
                    number: 0,
                    recv,
                    len: len.into(),
                    truncated: false,
                    ends_recv: true,
                    ends_advert: Some((seq, len.into(), None)),
                    notify: None,
                    done: true,
                });
            }
            Message::Place { segment, .. } => {
                self.leave_step(out);
                if let Some((old, _)) = self.place.replace((seq, segment)) {
                    self.end_place(old, Status::Done, out);
                }
            }
            Message::Notify { of, len, .. } => {
                let notify = Kind::Persistent { notify: true };
                let sent = self
                    .sent
                    .iter()
                    .find(|s| s.seq == of && s.kind == notify && s.answer.is_none());
                match sent {
                    Some(sent) if len <= sent.len => {
                        if let Some(op) = sent.op {
                            out.push(complete(op, Outcome::WasRead, len));
                        }
                    }
                    _ => return Err(Bad::Order),
                }
                self.acknowledge(seq, out);
            }
            Message::Cancel { of, .. } => {
                let target = self.targets.waiting.iter().position(|t| t.number == of);
                if let Some(at) = target {
                    self.targets.waiting.remove(at);
                    self.answer(of, 0, Status::Cancelled, out);
                } else if self.place.is_some_and(|(s, _)| s == of) {
                    self.place = None;
                    self.end_place(of, Status::Cancelled, out);
                } else if self.persistent.as_ref().is_some_and(|a| a.seq == of) {
                    let old = self.persistent.take();
                    self.end_persistent(old, Status::Cancelled, out);
                } else if let Some(at) = self
                    .adverts
                    .iter()
                    .position(|a| a.seq == of && a.taken == 0)
                {
                    if let Some(slot) = self.adverts.remove(at).and_then(|a| a.slot) {
                        out.push(Action::Release(slot));
                    }
                    self.answer(of, 0, Status::Cancelled, out);
                }
                self.acknowledge(seq, out);
            }
            Message::Fin { .. } => {
                let last = self.ahead.last;
                self.out_of_step(last, out);
                self.peer_fin = true;
                self.acknowledge(seq, out);
            }
            Message::Ack { .. } => {}
        }
        if !held {
            // The receive is posted before the answer is sent, because the answer permits the peer to send another message.
            out.insert(0, Action::Release(slot));
        }
        self.progress(out);
        Ok(())
    }

    /// Records that all bytes of a move have arrived in the memory of its receive.
    pub(crate) fn moved(&mut self, number: u64, out: &mut Vec<Action>) {
        if let Some(found) = self.moves.iter_mut().find(|m| m.number == number) {
            found.done = true;
        }
        self.progress(out);
    }

    /// Records that the write of a send has completed.
    pub(crate) fn written(&mut self, send: OpId, out: &mut Vec<Action>) {
        if let Some(at) = self.writes.iter().position(|(op, _)| *op == send)
            && let Some((op, len)) = self.writes.remove(at)
        {
            out.push(complete(op, Outcome::Done, len));
            for end in &mut self.place_ends {
                end.1 = end.1.saturating_sub(1);
            }
            while let Some((seq, 0, status)) = self.place_ends.front().copied() {
                self.place_ends.pop_front();
                self.answer(seq, 0, status, out);
            }
        }
        self.progress(out);
    }

    /// Handles the advertisement of a receive of the peer.
    fn arrived_ready(
        &mut self,
        target: Target,
        last: Option<u32>,
        out: &mut Vec<Action>,
    ) -> Result<(), Bad> {
        if !self.ahead.understood || (target.window && !self.ahead.invalidates) {
            return Err(Bad::Order);
        }
        let in_step = match last {
            Some(last) => last == self.targets.last && self.targets.waiting.is_empty(),
            None => self.targets.in_step,
        };
        let persistent = |s: &Sent| matches!(s.kind, Kind::Persistent { .. });
        let usable =
            in_step && !self.is_shut() && self.place.is_none() && !self.sent.iter().any(persistent);
        if usable {
            self.targets.in_step = true;
            self.targets.waiting.push_back(target);
        } else {
            self.leave_step(out);
            self.answer(target.number, 0, Status::Refused, out);
        }
        Ok(())
    }

    /// Refuses the advertised receives of the peer, because what this end does next does not match them.
    fn leave_step(&mut self, out: &mut Vec<Action>) {
        self.targets.in_step = false;
        while let Some(target) = self.targets.waiting.pop_front() {
            self.answer(target.number, 0, Status::Refused, out);
        }
    }

    /// Records that the peer has sent the message `seq`, before which it has refused all advertised receives.
    fn out_of_step(&mut self, seq: u32, out: &mut Vec<Action>) {
        self.ahead.last = seq;
        self.ahead.in_step = false;
        if self.ahead.count == 0 {
            self.ahead.pause = self.ahead.pause.saturating_sub(1);
            return;
        }
        self.ahead.count = 0;
        self.ahead.slow_down();
        for waiting in &mut self.recvs {
            let Some(ready) = waiting.ready else {
                continue;
            };
            self.ahead.take_back(waiting, ready, out);
            // The answer of the peer will only return the credit.
            if let Some(sent) = self.sent.iter_mut().find(|s| s.seq == ready) {
                sent.op = None;
            }
        }
    }

    /// Removes the message that has advertised a receive, because the peer has answered it.
    fn end_ready(&mut self, seq: u32) {
        let ready = |s: &Sent| s.seq == seq && s.kind == Kind::Ready;
        if let Some(at) = self.sent.iter().position(ready) {
            self.sent.remove(at);
            self.credits += 1;
        }
        forget_cancel(&mut self.waiting_controls, seq);
    }

    /// Records that the peer does not use the receive that the message `seq` advertised.
    fn unused_ready(&mut self, seq: u32, status: Status, out: &mut Vec<Action>) {
        self.end_ready(seq);
        let waiting = self.recvs.iter_mut().find(|w| w.ready == Some(seq));
        let Some(waiting) = waiting else { return };
        self.ahead.count -= 1;
        self.ahead.take_back(waiting, seq, out);
        if status == Status::Refused && self.ahead.in_step {
            // The peer refuses all advertised receives that it has. These refusals count as one.
            self.ahead.in_step = false;
            self.ahead.slow_down();
        }
    }

    /// Records that the window of the message `seq`, which advertised a receive, is invalid.
    pub(crate) fn unbound(&mut self, seq: u32, out: &mut Vec<Action>) {
        let waiting = self.recvs.iter_mut().find(|w| w.unbinding == Some(seq));
        if let Some(waiting) = waiting {
            waiting.unbinding = None;
            if waiting.cancelled {
                waiting.ended = Some(Outcome::Cancelled);
            }
            self.ahead.unbinding -= 1;
        }
        self.progress(out);
    }

    /// Advertises the receives for the peer's next sends.
    fn advertise_receives(&mut self, out: &mut Vec<Action>) {
        self.ahead.due = false;
        while self.ahead.count < self.ahead.most
            && self.ahead.pause == 0
            // The receives whose windows become invalid get data before all others.
            && self.ahead.unbinding == 0
            // Some credits are left for sends.
            && self.credits > 1
            && self.credits as usize * 2 > self.ahead.most
            && self.adverts.is_empty()
            && self.persistent.is_none()
            && self.standing.is_none()
            && !self.peer_fin
            && !self.is_shut()
            && (self.ahead.in_step || self.ahead.count == 0)
        {
            let moves = &self.moves;
            let waits = |w: &&mut Waiting| {
                w.ready.is_none()
                    && w.ended.is_none()
                    && w.asked == 0
                    && !moves.iter().any(|m| m.recv == w.recv.id)
            };
            let Some(waiting) = self.recvs.iter_mut().find(waits) else {
                return;
            };
            let segment = match waiting.recv.segments.as_slice() {
                [segment] if segment.len > 0 => *segment,
                _ => return,
            };
            if !waiting.recv.may_be_ready || waiting.recv.offset.is_some_and(|o| o != 0) {
                return;
            }
            let seq = self.next_seq;
            waiting.ready = Some(seq);
            let recv = waiting.recv.id;
            self.next_seq = seq.wrapping_add(1);
            self.ahead.count += 1;
            self.credits -= 1;
            self.sent.push_back(Sent {
                seq,
                op: Some(recv),
                len: 0,
                kind: Kind::Ready,
                answer: None,
                cancels: None,
            });
            let last = (!self.ahead.in_step).then_some(self.ahead.last);
            self.ahead.in_step = true;
            let message = Message::Ready {
                seq,
                segment,
                last,
                acks: self.carried(),
                window: self.ahead.windows,
            };
            out.push(Action::Ready { message, recv });
        }
    }

    fn answered(
        &mut self,
        seq: u32,
        len: u64,
        status: Status,
        out: &mut Vec<Action>,
    ) -> Result<(), Bad> {
        let at = self
            .sent
            .iter()
            .position(|s| s.seq == seq && s.answer.is_none())
            .ok_or(Bad::Order)?;
        let earlier = self.sent.iter().take(at).any(|s| s.kind == Kind::Once);
        let sent = self.sent.get_mut(at).filter(|s| len <= s.len);
        let sent = sent.ok_or(Bad::Field)?;
        if sent.kind == Kind::Ready {
            if status == Status::Done {
                return Err(Bad::Field);
            }
            self.unused_ready(seq, status, out);
            return Ok(());
        }
        if sent.kind == Kind::Control {
            self.controls += 1;
        } else {
            self.credits += 1;
            forget_cancel(&mut self.waiting_controls, seq);
        }
        let outcome = match status {
            Status::Done if sent.kind == Kind::Once && len < sent.len => Outcome::Truncated,
            Status::Done => Outcome::Done,
            Status::Cancelled => Outcome::Cancelled,
            Status::Refused => Outcome::BothPersistent,
        };
        let in_order = sent.kind == Kind::Once && (self.ordered || outcome != Outcome::Cancelled)
            || matches!(sent.kind, Kind::Persistent { .. }) && status == Status::Refused;
        if in_order && earlier {
            sent.answer = Some((outcome, len));
            return Ok(());
        }
        let (op, kind) = (sent.op, sent.kind);
        if at == 0 {
            self.sent.pop_front();
        } else {
            self.sent.remove(at);
        }
        match op {
            Some(op) if kind == Kind::Place => {
                self.standing = None;
                self.end_standing(op, outcome, len, out);
            }
            Some(op) => out.push(complete(op, outcome, len)),
            None => {}
        }
        if kind == Kind::Once {
            self.report_answered(out);
        }
        Ok(())
    }

    /// Reports the answered sends that no unanswered one precedes.
    fn report_answered(&mut self, out: &mut Vec<Action>) {
        let waits = |s: &Sent| s.kind == Kind::Once || s.answer.is_some();
        while let Some(at) = self.sent.iter().position(waits)
            && let Some(Sent { op, answer, .. }) = self.sent.get(at)
            && let Some((outcome, len)) = *answer
        {
            out.extend(op.map(|op| complete(op, outcome, len)));
            self.sent.remove(at);
        }
    }

    /// Reports the cancelled sends that no waiting send precedes. If earlier sends are not answered yet, a cancelled send is reported after
    /// their answers.
    fn report_cancelled(&mut self, out: &mut Vec<Action>) {
        while !self.cancelled.is_empty() {
            let first = self.sends.iter().position(|s| !s.persistent);
            let Some((at, id)) = first.and_then(|at| Some((at, self.sends.get(at)?.id))) else {
                return;
            };
            let of = self.cancelled.iter().position(|c| *c == id);
            let Some(of) = of.filter(|_| self.writes.is_empty()) else {
                return;
            };
            self.cancelled.swap_remove(of);
            self.sends.remove(at);
            if self.sent.iter().any(|s| s.kind == Kind::Once) {
                // No message has the number 0, so no answer of the peer refers to this entry.
                self.sent.push_back(Sent {
                    seq: 0,
                    op: Some(id),
                    len: 0,
                    kind: Kind::Once,
                    answer: Some((Outcome::Cancelled, 0)),
                    cancels: None,
                });
            } else {
                out.push(complete(id, Outcome::Cancelled, 0));
            }
        }
    }

    /// Reports the end of a persistent receive once no read into its memory is in progress.
    fn end_standing(&mut self, op: OpId, outcome: Outcome, len: u64, out: &mut Vec<Action>) {
        if self.moves.iter().any(|m| m.recv == op) {
            self.standing_ends.push((op, outcome, len));
        } else {
            out.push(complete(op, outcome, len));
        }
    }

    /// Answers a message that used a credit.
    fn answer(&mut self, seq: u32, len: u64, status: Status, out: &mut Vec<Action>) {
        self.peer_unanswered = self.peer_unanswered.saturating_sub(1);
        self.send_held(out);
        out.push(ack(seq, len, status));
    }

    /// Acknowledges an advertisement whose bytes were all taken, or holds the acknowledgement back for the next advertisement of
    /// this end.
    fn answer_taken(&mut self, seq: u32, len: u64, out: &mut Vec<Action>) {
        let may_follow = self.credits > 0 && self.place.is_none() && !self.is_shut();
        if !self.may_defer || !self.answers || !may_follow || seq == 0 {
            return self.answer(seq, len, Status::Done, out);
        }
        self.peer_unanswered = self.peer_unanswered.saturating_sub(1);
        // Sends of the peer complete in the order in which they began.
        self.send_held(out);
        self.deferred = Some((seq, len));
    }

    /// Takes the held acknowledgement, for a message that is sent now.
    fn carried(&mut self) -> Option<NonZeroU32> {
        let held = self.deferred.take();
        held.and_then(|(seq, _)| NonZeroU32::new(seq))
    }

    /// Answers a control message.
    #[expect(clippy::unused_self, reason = "the counterpart of `answer`")]
    fn acknowledge(&self, seq: u32, out: &mut Vec<Action>) {
        out.push(ack(seq, 0, Status::Done));
    }

    fn end_persistent(&mut self, old: Option<Advert>, status: Status, out: &mut Vec<Action>) {
        let Some(old) = old else { return };
        if self.moves.is_empty() {
            self.answer(old.seq, 0, status, out);
        } else {
            self.persistent_ends
                .push_back((old.seq, self.next_move, status));
        }
    }

    fn end_place(&mut self, seq: u32, status: Status, out: &mut Vec<Action>) {
        if self.writes.is_empty() {
            self.answer(seq, 0, status, out);
        } else {
            self.place_ends.push_back((seq, self.writes.len(), status));
        }
    }

    /// Returns whether [`Flow::is_quiet`] is right.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn checks_quiet(&self) -> bool {
        if !self.is_quiet() {
            return true;
        }
        let mut after = self.clone();
        let mut out = Vec::new();
        after.progress(&mut out);
        out.is_empty() && after == *self
    }

    fn progress(&mut self, out: &mut Vec<Action>) {
        self.finish_moves(out);
        self.report_received(out);
        while self.may_start_move() && self.start_move(out) {
            self.finish_moves(out);
            self.report_received(out);
        }
        self.start_sends(out);
        // As long as the peer knows of a receive, its program's next send does not depend on another advertisement, but perhaps on an answer
        // that this end's program is about to send.
        if self.may_defer && self.ahead.count > 0 {
            self.ahead.due = self.ahead.count < self.ahead.most
                && self.ahead.pause == 0
                && self.recvs.len() > self.ahead.count;
        } else {
            self.advertise_receives(out);
        }
        self.start_controls(out);
        self.answer_persistent(out);
    }

    /// Returns whether there is something to read and a place for it. Otherwise [`Flow::start_move`] has nothing to do.
    fn may_start_move(&self) -> bool {
        let has_input = !self.adverts.is_empty()
            || self.persistent.is_some()
            || self.peer_fin
            || self.buffer.asked > self.buffer.taken;
        has_input
            && (!self.recvs.is_empty() || self.standing.is_some() || self.buffer.size > 0)
            && self.moves.len() < MAX_MOVES
    }

    /// Reports the receives that have ended and that no other one precedes.
    fn report_received(&mut self, out: &mut Vec<Action>) {
        while let Some(Waiting {
            recv,
            got,
            ended: Some(outcome),
            ..
        }) = self.recvs.front()
        {
            out.push(complete(recv.id, *outcome, *got));
            self.recvs.pop_front();
        }
        if !self.ordered {
            self.recvs.retain(|w| {
                let cancelled = w.ended == Some(Outcome::Cancelled);
                if cancelled {
                    out.push(complete(w.recv.id, Outcome::Cancelled, w.got));
                }
                !cancelled
            });
        }
    }

    /// Matches the first waiting receive with the advertisements of the peer. Returns whether the state has changed.
    fn start_move(&mut self, out: &mut Vec<Action>) -> bool {
        if let Some((recv, _)) = &self.standing {
            // The peer sent these advertisements before it knew of the persistent receive. Their data is read to the
            // beginning of the memory of this receive.
            let (id, len) = (recv.id, total(&recv.segments));
            if self.buffer.asked > self.buffer.taken {
                let left = self.buffer.landed - self.buffer.taken;
                self.buffer.taken += overwritten(left, len);
                return self.take_buffered(id, 0, len, out) > 0;
            }
            let Some(advert) = self.adverts.front_mut() else {
                return false;
            };
            if self.stream {
                advert.taken += overwritten(advert.len - advert.taken, len);
            }
            self.take_advert(id, 0, len, false, out);
            return true;
        }
        let more = |w: &Waiting, stream: bool, moving: bool| {
            if w.cancelled || w.ended.is_some() {
                false
            } else if w.ready.or(w.unbinding).is_some() {
                // The next data is for this receive, and it cannot have it now.
                true
            } else if stream && w.recv.wait_all && w.len > 0 {
                w.asked < w.len
            } else {
                w.asked == 0 && !moving
            }
        };
        let moves = &self.moves;
        let stream = self.stream;
        let Some(at) = self
            .recvs
            .iter()
            .position(|w| more(w, stream, moves.iter().any(|m| m.recv == w.recv.id)))
        else {
            return self.fill_buffer(out);
        };
        let Some(waiting) = self.recvs.get_mut(at) else {
            return false;
        };
        if waiting.ready.or(waiting.unbinding).is_some() {
            return false;
        }
        let (id, asked, offset) = (waiting.recv.id, waiting.asked, waiting.recv.offset);
        let room = waiting.len - asked;
        if self.buffer.asked > self.buffer.taken && offset.is_none_or(|o| o == 0) {
            // The bytes in the buffer precede those of all advertisements in the stream.
            let wait_all = waiting.recv.wait_all;
            let len = self.take_buffered(id, asked, room, out);
            let ends = (len > 0 && !wait_all) || len == room;
            if let Some(waiting) = self.recvs.get_mut(at) {
                waiting.asked += len;
                waiting.got += len;
                // No move of this receive is in progress: earlier ones have ended, and later bytes of the stream are read
                // into the buffer.
                waiting.ended = ends.then_some(Outcome::Done);
            }
            return ends || len > 0;
        }
        if let Some(persistent) = self.persistent.as_ref().filter(|_| self.adverts.is_empty()) {
            // A peer that does not acknowledge notifications gets no more of them.
            if persistent.notify && self.waiting_controls.len() >= MAX_MOVES {
                return false;
            }
            let skip = offset.unwrap_or(0);
            let fits =
                skip <= persistent.len && (offset.is_none() || room <= persistent.len - skip);
            if !fits {
                waiting.ended = Some(Outcome::Invalid);
                return true;
            }
            let len = room.min(persistent.len - skip);
            let from = cut(&persistent.segments, skip, len);
            let notify = persistent.notify.then_some(persistent.seq);
            let number = self.begin(Move {
                number: 0,
                recv: id,
                len,
                truncated: false,
                ends_recv: true,
                ends_advert: None,
                notify,
                done: len == 0,
            });
            // One read of the persistent send ends the receive, even if the send is shorter than the receive. Otherwise the
            // receive would read the same data again.
            self.asked(at, room);
            if len > 0 {
                out.push(Action::Read {
                    number,
                    to: id,
                    at: asked,
                    from,
                });
            }
        } else if !self.adverts.is_empty() {
            if offset.is_some_and(|o| o != 0) {
                waiting.ended = Some(Outcome::Invalid);
                return true;
            }
            let wait_all = waiting.recv.wait_all && self.stream;
            let len = self.take_advert(id, asked, room, wait_all, out);
            self.asked(at, len);
        } else if self.peer_fin && self.moves.is_empty() {
            waiting.ended = Some(Outcome::Done);
        } else {
            return false;
        }
        true
    }

    /// Reads the first advertisement into the buffer of the stream if the buffer has room for all of it. Called when no receive
    /// waits. Returns whether there was such an advertisement.
    fn fill_buffer(&mut self, out: &mut Vec<Action>) -> bool {
        let room = self.buffer.size - (self.buffer.asked - self.buffer.taken);
        let left = self.adverts.front().map(|a| a.len - a.taken);
        let fits = self.buffer.size > 0 && left.is_some_and(|left| left <= room);
        if fits {
            let at = self.buffer.asked;
            self.buffer.asked += self.take_advert(BUFFER, at, room, true, out);
        }
        fits
    }

    /// Copies received bytes from the buffer of the stream to a receive. Returns their number.
    fn take_buffered(&mut self, to: OpId, at: u64, room: u64, out: &mut Vec<Action>) -> u64 {
        let from = self.buffer.taken;
        let len = room.min(self.buffer.landed - from);
        if len > 0 {
            self.buffer.taken += len;
            out.push(Action::Take { to, at, from, len });
        }
        len
    }

    fn asked(&mut self, at: usize, len: u64) {
        if let Some(waiting) = self.recvs.get_mut(at) {
            waiting.asked += len;
        }
    }

    /// Starts moves of the first advertisement for up to `room` bytes. Returns the number of bytes.
    fn take_advert(
        &mut self,
        recv: OpId,
        at: u64,
        room: u64,
        wait_all: bool,
        out: &mut Vec<Action>,
    ) -> u64 {
        let Some(mut advert) = self.adverts.pop_front() else {
            return 0;
        };
        let left = advert.len - advert.taken;
        let len = left.min(room);
        let skip = advert.taken;
        let from = cut(&advert.segments, skip, len);
        let slot = advert.slot;
        advert.taken += len;
        let truncated = len < left && !self.stream;
        let ends_advert =
            (advert.taken == advert.len || truncated).then_some((advert.seq, advert.taken, slot));
        let ends_recv = recv != BUFFER && self.standing.is_none() && (!wait_all || len == room);
        if ends_advert.is_none() {
            self.adverts.push_front(advert);
        }
        let number = self.begin(Move {
            number: 0,
            recv,
            len,
            truncated,
            ends_recv,
            ends_advert,
            notify: None,
            // Immediate data is copied at once.
            done: len == 0 || slot.is_some(),
        });
        if let Some(slot) = slot {
            out.push(Action::Copy {
                to: recv,
                at,
                slot,
                skip,
                len,
            });
        } else if len > 0 {
            out.push(Action::Read {
                number,
                to: recv,
                at,
                from,
            });
        }
        len
    }

    /// Adds a move and returns its number.
    fn begin(&mut self, begun: Move) -> u64 {
        let number = self.next_move;
        self.next_move += 1;
        self.moves.push_back(Move { number, ..begun });
        number
    }

    fn finish_moves(&mut self, out: &mut Vec<Action>) {
        while self.moves.front().is_some_and(|m| m.done) {
            let Some(ended) = self.moves.pop_front() else {
                return;
            };
            if ended.recv == BUFFER {
                self.buffer.landed += ended.len;
            }
            let at = self.recvs.iter().position(|w| w.recv.id == ended.recv);
            if let Some(waiting) = at.and_then(|at| self.recvs.get_mut(at)) {
                waiting.got += ended.len;
                if ended.ends_recv {
                    waiting.ended = Some(if ended.truncated {
                        Outcome::Truncated
                    } else {
                        Outcome::Done
                    });
                } else if waiting.cancelled && !self.moves.iter().any(|m| m.recv == ended.recv) {
                    waiting.ended = Some(Outcome::Cancelled);
                }
            }
            self.report_received(out);
            let mut standing = self.standing_ends.iter();
            if let Some(at) = standing.position(|(op, ..)| *op == ended.recv)
                && !self.moves.iter().any(|m| m.recv == ended.recv)
            {
                let (op, outcome, len) = self.standing_ends.remove(at);
                out.push(complete(op, outcome, len));
            }
            if let Some((seq, taken, slot)) = ended.ends_advert {
                out.extend(slot.map(Action::Release));
                if ended.truncated {
                    self.answer(seq, taken, Status::Done, out);
                } else {
                    self.answer_taken(seq, taken, out);
                }
            }
            if let Some(of) = ended.notify {
                self.waiting_controls
                    .push_back((ControlKind::Notify, of, ended.len));
            }
        }
    }

    /// Answers persistent advertisements that have ended, after their last move has ended and its notification was sent.
    fn answer_persistent(&mut self, out: &mut Vec<Action>) {
        if self.persistent_ends.is_empty() {
            return;
        }
        let oldest = self.moves.front().map_or(self.next_move, |m| m.number);
        while let Some((seq, before, status)) = self.persistent_ends.front().copied()
            && before <= oldest
            && !self
                .waiting_controls
                .iter()
                .any(|(k, of, _)| *k == ControlKind::Notify && *of == seq)
        {
            self.persistent_ends.pop_front();
            self.answer(seq, 0, status, out);
        }
    }

    fn number(&mut self) -> u32 {
        let seq = self.next_seq;
        self.next_seq = seq.wrapping_add(1);
        seq
    }

    fn start_sends(&mut self, out: &mut Vec<Action>) {
        if self.sends.is_empty() && self.standing.is_none() {
            return;
        }
        if let Some((recv, None)) = &self.standing
            && self.credits > 0
            && !self.is_shut()
            && let [segment] = recv.segments.as_slice()
        {
            let (id, segment) = (recv.id, *segment);
            let seq = self.number();
            self.credits -= 1;
            self.sent.push_back(Sent {
                seq,
                op: Some(id),
                len: u64::from(segment.len),
                kind: Kind::Place,
                answer: None,
                cancels: None,
            });
            if let Some((_, sent)) = &mut self.standing {
                *sent = Some(seq);
            }
            // After this message the peer sends by Writes. They start only when its advertised sends are acknowledged.
            self.send_held(out);
            out.push(Action::Message(Message::Place { seq, segment }, None));
        }
        loop {
            self.report_cancelled(out);
            let Some(send) = self.sends.front() else {
                return;
            };
            if self.cancelled.contains(&send.id) {
                return;
            }
            let len = total(&send.segments);
            // Sends are reported in the order in which they began.
            let answered = !self.sent.iter().any(|s| s.kind == Kind::Once);
            if let Some((_, place)) = self.place {
                let offset = send.offset.unwrap_or(0);
                let room = u64::from(place.len).checked_sub(offset);
                if !answered {
                    return;
                } else if send.persistent || room.is_none_or(|room| len > room) {
                    if !self.writes.is_empty() {
                        return;
                    }
                    let outcome = if send.persistent {
                        Outcome::BothPersistent
                    } else {
                        Outcome::Invalid
                    };
                    out.push(complete(send.id, outcome, 0));
                } else if self.writes.len() < MAX_WRITES {
                    let Ok(len) = u32::try_from(len) else { return };
                    self.writes.push_back((send.id, u64::from(len)));
                    let to = Segment {
                        addr: place.addr.wrapping_add(offset),
                        stag: place.stag,
                        len,
                    };
                    out.push(Action::Write { send: send.id, to });
                } else {
                    return;
                }
                self.sends.pop_front();
                continue;
            }
            if send.offset.is_some_and(|o| o != 0) || self.credits == 0 || !self.writes.is_empty() {
                return;
            }
            let fits = |t: &&Target| {
                !send.persistent
                    && send.segments.len() == 1
                    && (self.immediate + 1..=u64::from(t.memory.len)).contains(&len)
            };
            let target = self.targets.waiting.front().filter(fits).copied();
            if target.is_some() {
                // The message to the peer is also the answer.
                self.targets.waiting.pop_front();
                self.peer_unanswered = self.peer_unanswered.saturating_sub(1);
            } else {
                self.leave_step(out);
            }
            self.credits -= 1;
            let Some(send) = self.sends.pop_front() else {
                return;
            };
            let seq = self.number();
            self.targets.last = seq;
            self.answers = true;
            let kind = if send.persistent {
                Kind::Persistent {
                    notify: send.notify,
                }
            } else {
                Kind::Once
            };
            self.sent.push_back(Sent {
                seq,
                op: Some(send.id),
                len,
                kind,
                answer: None,
                cancels: None,
            });
            if let (Some(target), Ok(len)) = (target, u32::try_from(len)) {
                let message = Message::Written {
                    seq,
                    to: target.number,
                    len,
                    acks: self.carried(),
                };
                out.push(Action::Put {
                    message,
                    send: send.id,
                    to: Segment {
                        len,
                        ..target.memory
                    },
                    window: target.window,
                });
            } else if !send.persistent && len <= self.immediate && send.segments.len() == 1 {
                let len = u32::try_from(len).unwrap_or(0);
                let acks = self.carried();
                out.push(Action::Message(
                    Message::Immediate { seq, len, acks },
                    Some(send.id),
                ));
            } else {
                let message = Message::Advert {
                    seq,
                    segments: send.segments,
                    persistent: send.persistent,
                    notify: send.notify,
                    acks: self.carried(),
                };
                out.push(Action::Message(message, None));
            }
        }
    }

    fn start_controls(&mut self, out: &mut Vec<Action>) {
        if self.waiting_controls.is_empty() && self.fin.is_none() {
            return;
        }
        while self.controls > 0 {
            let Some((kind, of, len)) = self.waiting_controls.pop_front() else {
                break;
            };
            let seq = self.number();
            self.controls -= 1;
            self.sent.push_back(Sent {
                seq,
                op: None,
                len: 0,
                kind: Kind::Control,
                answer: None,
                cancels: (kind == ControlKind::Cancel).then_some(of),
            });
            if kind == ControlKind::Notify {
                // The acknowledgement of an earlier send goes first, because the peer reports both as events of sends, in order.
                self.send_held(out);
            }
            let message = match kind {
                ControlKind::Notify => Message::Notify { seq, of, len },
                ControlKind::Cancel => Message::Cancel { seq, of },
            };
            out.push(Action::Message(message, None));
        }
        if self.controls > 0
            && self.sends.is_empty()
            // Operations of this direction end in the order in which they began.
            && self.writes.is_empty()
            && !self.sent.iter().any(|s| s.kind == Kind::Once)
            && let Some(op) = self.fin.take()
        {
            self.leave_step(out);
            let seq = self.number();
            self.controls -= 1;
            self.fin_sent = true;
            self.sent.push_back(Sent {
                seq,
                op: Some(op),
                len: 0,
                kind: Kind::Control,
                answer: None,
                cancels: None,
            });
            out.push(Action::Message(Message::Fin { seq }, None));
        }
    }
}

/// Removes a queued request to end the message `seq`, which the peer has answered.
fn forget_cancel(controls: &mut VecDeque<(ControlKind, u32, u64)>, seq: u32) {
    controls.retain(|(kind, of, _)| *kind != ControlKind::Cancel || *of != seq);
}

fn ack(seq: u32, len: u64, status: Status) -> Action {
    Action::Message(Message::Ack { seq, len, status }, None)
}

fn complete(op: OpId, outcome: Outcome, len: u64) -> Action {
    Action::Complete { op, outcome, len }
}

/// Returns how many of `left` bytes need not be moved to a persistent receive of `room` bytes, because later ones overwrite them. Each
/// part is placed at the beginning of the memory, so the last two parts determine its contents. Without this limit, the peer could cause
/// a read for each byte that it advertises.
fn overwritten(left: u64, room: u64) -> u64 {
    let parts = left.div_ceil(room.max(1));
    parts.saturating_sub(2) * room
}

pub(crate) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|s| u64::from(s.len)).sum()
}

/// Returns the part of a list of memory that begins after `skip` bytes and has `len` bytes.
pub(crate) fn cut(segments: &[Segment], mut skip: u64, mut len: u64) -> Segments {
    let mut part = Segments::new();
    for segment in segments {
        let here = u64::from(segment.len);
        let from = skip.min(here);
        let count = (here - from).min(len);
        if let (Ok(count), true) = (u32::try_from(count), count > 0) {
            part.push(Segment {
                addr: segment.addr.wrapping_add(from),
                stag: segment.stag,
                len: count,
            });
        }
        skip -= from;
        len -= count;
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    fn flow() -> Flow {
        let hello = Hello {
            stream: false,
            credits: 2,
            immediate: 64,
            ready: false,
            invalidates: false,
        };
        Flow::new(hello, hello, 0)
    }

    fn memory(len: u32) -> Segments {
        smallvec![Segment {
            addr: 0x1000,
            stag: 7,
            len,
        }]
    }

    fn advert(seq: u32) -> Message {
        Message::Advert {
            seq,
            segments: memory(100),
            persistent: false,
            notify: false,
            acks: None,
        }
    }

    fn send(id: OpId, persistent: bool) -> Send {
        Send {
            id,
            segments: memory(100),
            persistent,
            notify: false,
            offset: None,
        }
    }

    fn recv(id: OpId) -> Recv {
        Recv {
            id,
            segments: memory(100),
            persistent: false,
            wait_all: false,
            offset: None,
            may_be_ready: true,
        }
    }

    #[test]
    fn messages_that_break_the_rules_are_refused() {
        let ack = |seq, len| Message::Ack {
            seq,
            len,
            status: Status::Done,
        };
        let cases: [(&str, Vec<Message>, Bad); 9] = [
            (
                "more adverts than credits",
                vec![advert(1), advert(2), advert(3)],
                Bad::Order,
            ),
            ("a number twice", vec![advert(1), advert(1)], Bad::Order),
            ("an answer to nothing", vec![ack(9, 0)], Bad::Order),
            (
                "an answer twice",
                vec![ack(1, 100), ack(1, 100)],
                Bad::Order,
            ),
            (
                "more taken than was advertised",
                vec![ack(1, 101)],
                Bad::Field,
            ),
            (
                "a notification of a send without notify",
                vec![Message::Notify {
                    seq: 1,
                    of: 1,
                    len: 1,
                }],
                Bad::Order,
            ),
            (
                "an acknowledgement of nothing in an advertisement",
                vec![Message::Immediate {
                    seq: 1,
                    len: 1,
                    acks: NonZeroU32::new(2),
                }],
                Bad::Order,
            ),
            (
                "an acknowledgement of a persistent send in an advertisement",
                vec![Message::Immediate {
                    seq: 1,
                    len: 1,
                    acks: NonZeroU32::new(1),
                }],
                Bad::Order,
            ),
            (
                "too much immediate data",
                vec![Message::Immediate {
                    seq: 1,
                    len: 65,
                    acks: None,
                }],
                Bad::Field,
            ),
        ];
        for (name, messages, bad) in cases {
            let mut flow = flow();
            let mut out = Vec::new();
            flow.send(send(1, true), &mut out);
            let last = messages.len() - 1;
            for (at, message) in messages.into_iter().enumerate() {
                let wanted = if at == last { Err(bad) } else { Ok(()) };
                assert_eq!(flow.arrived(message, at, &mut out), wanted, "{name}");
            }
        }
    }

    #[test]
    fn a_receive_reads_and_answers_when_all_is_there() {
        let mut flow = flow();
        let mut out = Vec::new();
        flow.recv(recv(5), &mut out);
        assert!(out.is_empty());
        assert_eq!(flow.arrived(advert(1), 3, &mut out), Ok(()));
        let read = Action::Read {
            number: 0,
            to: 5,
            at: 0,
            from: memory(100),
        };
        assert_eq!(out, [Action::Release(3), read]);
        out.clear();
        flow.moved(0, &mut out);
        let answer = Message::Ack {
            seq: 1,
            len: 100,
            status: Status::Done,
        };
        assert_eq!(
            out,
            [
                complete(5, Outcome::Done, 100),
                Action::Message(answer, None)
            ]
        );
    }

    #[test]
    fn a_send_is_written_only_after_the_answers_of_those_before_it() {
        let mut flow = flow();
        let mut out = Vec::new();
        flow.send(send(1, false), &mut out);
        let segment = Segment {
            addr: 0x1000,
            stag: 7,
            len: 200,
        };
        let place = Message::Place { seq: 1, segment };
        assert_eq!(flow.arrived(place, 0, &mut out), Ok(()));
        out.clear();
        flow.send(send(2, false), &mut out);
        assert_eq!(out, []);
        let ack = Message::Ack {
            seq: 1,
            len: 100,
            status: Status::Done,
        };
        assert_eq!(flow.arrived(ack, 1, &mut out), Ok(()));
        let to = Segment {
            len: 100,
            ..segment
        };
        let done = complete(1, Outcome::Done, 100);
        assert_eq!(
            out,
            [Action::Release(1), done, Action::Write { send: 2, to }]
        );
    }

    #[test]
    fn a_stream_reads_into_its_buffer_unless_a_receive_is_posted() {
        let mut flow = stream();
        let mut out = Vec::new();
        let read = |number, to, at| Action::Read {
            number,
            to,
            at,
            from: memory(100),
        };
        // No receive is posted. Two advertisements fit into the buffer, and the third has to wait.
        for (seq, at) in [(1, 0), (2, 100)] {
            assert_eq!(flow.arrived(advert(seq), 0, &mut out), Ok(()));
            let expected = [Action::Release(0), read(u64::from(seq) - 1, BUFFER, at)];
            assert_eq!(out, expected);
            out.clear();
        }
        assert_eq!(flow.arrived(advert(3), 0, &mut out), Ok(()));
        assert_eq!(out, [Action::Release(0)]);
        out.clear();
        flow.moved(0, &mut out);
        let answer = Message::Ack {
            seq: 1,
            len: 100,
            status: Status::Done,
        };
        assert_eq!(out, [Action::Message(answer, None)]);
        out.clear();
        // A receive gets the bytes that have arrived, and the next one waits for the rest.
        let take = |to, at, from, len| Action::Take { to, at, from, len };
        flow.recv(recv(5), &mut out);
        let done = complete(5, Outcome::Done, 100);
        assert_eq!(out, [take(5, 0, 0, 100), done, read(2, BUFFER, 200)]);
        out.clear();
        flow.recv(recv(6), &mut out);
        assert_eq!(out, []);
        flow.moved(1, &mut out);
        let (taken, done) = (take(6, 0, 100, 100), complete(6, Outcome::Done, 100));
        assert!(out.contains(&taken) && out.contains(&done), "{out:?}");
        out.clear();
        // The third advertisement has been read into the buffer, and receive 7 takes it. Receive 8 is posted before there is data
        // for it, so the fourth advertisement is read into the memory of that receive.
        flow.moved(2, &mut out);
        out.clear();
        flow.recv(recv(7), &mut out);
        flow.recv(recv(8), &mut out);
        assert_eq!(out, [take(7, 0, 200, 100), complete(7, Outcome::Done, 100)]);
        out.clear();
        assert_eq!(flow.arrived(advert(4), 0, &mut out), Ok(()));
        assert_eq!(out, [Action::Release(0), read(3, 8, 0)]);
    }

    /// Returns a stream with a buffer of 250 bytes.
    fn stream() -> Flow {
        let hello = Hello {
            stream: true,
            credits: 4,
            immediate: 0,
            ready: true,
            invalidates: true,
        };
        Flow::new(hello, hello, 250)
    }

    /// Returns an end that advertises receives, whose peer does too.
    fn ahead() -> Flow {
        let hello = Hello {
            stream: false,
            credits: 4,
            immediate: 0,
            ready: true,
            invalidates: true,
        };
        Flow::new(hello, hello, 0)
    }

    fn ready(seq: u32, last: Option<u32>) -> Message {
        Message::Ready {
            seq,
            segment: memory(100)[0],
            last,
            acks: None,
            window: false,
        }
    }

    #[test]
    fn waiting_receives_are_advertised_and_end_in_order() {
        let mut flow = ahead();
        let mut out = Vec::new();
        for (number, last) in [(1, Some(0)), (2, None)] {
            let message = ready(number, last);
            let id = OpId::from(number) + 4;
            flow.recv(recv(id), &mut out);
            assert_eq!(out, [Action::Ready { message, recv: id }]);
            out.clear();
        }
        // Half of the credits are left for sends.
        flow.recv(recv(7), &mut out);
        assert_eq!(out, []);
        let written = |seq, to, len| Message::Written {
            seq,
            to,
            len,
            acks: None,
        };
        assert_eq!(flow.arrived(written(1, 1, 60), 3, &mut out), Ok(()));
        let next = Action::Ready {
            message: ready(3, None),
            recv: 7,
        };
        let ends = [
            Action::Release(3),
            complete(5, Outcome::Done, 60),
            ack(1, 60, Status::Done),
            next,
        ];
        assert_eq!(out, ends);
        for (bad, name) in [
            (written(2, 3, 60), "not the next receive"),
            (written(2, 2, 101), "more than the receive has room for"),
            (written(2, 1, 60), "a receive that has ended"),
            (
                Message::Ack {
                    seq: 2,
                    len: 0,
                    status: Status::Done,
                },
                "a receive cannot be done without data",
            ),
        ] {
            let mut flow = ahead();
            flow.recv(recv(5), &mut out);
            flow.recv(recv(6), &mut out);
            assert_eq!(flow.arrived(written(1, 1, 60), 3, &mut out), Ok(()));
            assert!(flow.arrived(bad, 4, &mut out).is_err(), "{name}");
        }
    }

    #[test]
    fn the_last_credit_is_left_for_a_send() {
        let hello = Hello {
            credits: 3,
            stream: false,
            immediate: 0,
            ready: true,
            invalidates: true,
        };
        let mut flow = Flow::new(hello, hello, 0);
        let mut out = Vec::new();
        flow.send(send(1, false), &mut out);
        flow.send(send(2, false), &mut out);
        out.clear();
        flow.recv(recv(3), &mut out);
        assert_eq!(out, []);
        flow.send(send(4, false), &mut out);
        assert_eq!(out.len(), 1, "{out:?}");
    }

    #[test]
    fn a_send_is_written_to_an_advertised_receive() {
        let mut flow = ahead();
        let mut out = Vec::new();
        for (slot, last) in [(0, Some(0)), (1, None)] {
            let message = ready(slot as u32 + 1, last);
            assert_eq!(flow.arrived(message, slot, &mut out), Ok(()));
            assert_eq!(out, [Action::Release(slot)]);
            out.clear();
        }
        flow.send(send(7, false), &mut out);
        let message = Message::Written {
            seq: 1,
            to: 1,
            len: 100,
            acks: None,
        };
        let put = Action::Put {
            message,
            send: 7,
            to: memory(100)[0],
            window: false,
        };
        assert_eq!(out, [put]);
        out.clear();
        // The next send does not fit, so the second receive is refused and the send is advertised.
        let long = Send {
            segments: memory(101),
            ..send(8, false)
        };
        flow.send(long, &mut out);
        assert_eq!(out[0], ack(2, 0, Status::Refused));
        assert!(matches!(
            out[1],
            Action::Message(Message::Advert { seq: 2, .. }, None)
        ));
        out.clear();
        // The peer sends two advertisements before it knows of the refusal: one follows a refused receive, and the other names a message that
        // is not the last.
        for (seq, last) in [(3, None), (4, Some(1))] {
            assert_eq!(flow.arrived(ready(seq, last), 0, &mut out), Ok(()));
            assert!(out.contains(&ack(seq, 0, Status::Refused)), "{out:?}");
            out.clear();
        }
        assert_eq!(flow.arrived(ready(5, Some(2)), 0, &mut out), Ok(()));
        assert_eq!(out, [Action::Release(0)]);
    }

    #[test]
    fn a_receive_whose_advertisement_crosses_that_of_a_send_is_read() {
        for windows in [false, true] {
            let mut flow = ahead();
            if windows {
                flow.set_windows(2);
            }
            let mut out = Vec::new();
            flow.recv(recv(5), &mut out);
            out.clear();
            assert_eq!(flow.arrived(advert(1), 0, &mut out), Ok(()));
            let read = Action::Read {
                number: 0,
                to: 5,
                at: 0,
                from: memory(100),
            };
            if windows {
                // The peer must not be able to write any more when the data is read.
                assert_eq!(out, [Action::Release(0), Action::Unbind(1)]);
                out.clear();
                flow.unbound(1, &mut out);
                assert_eq!(out, [read]);
            } else {
                assert_eq!(out, [Action::Release(0), read]);
            }
        }
    }

    #[test]
    fn an_advertised_receive_is_cancelled_when_the_peer_has_given_it_back() {
        let mut flow = ahead();
        let mut out = Vec::new();
        flow.recv(recv(5), &mut out);
        out.clear();
        flow.cancel(5, &mut out);
        flow.cancel(5, &mut out);
        let request = Message::Cancel { seq: 2, of: 1 };
        assert_eq!(out, [Action::Message(request, None)]);
        assert!(flow.needs_peer(5));
        out.clear();
        let given_back = Message::Ack {
            seq: 1,
            len: 0,
            status: Status::Cancelled,
        };
        assert_eq!(flow.arrived(given_back, 0, &mut out), Ok(()));
        assert_eq!(
            out,
            [Action::Release(0), complete(5, Outcome::Cancelled, 0)]
        );
    }

    #[test]
    fn an_answer_carries_the_acknowledgement() {
        let mut flow = flow();
        flow.set_may_defer(true);
        let mut out = Vec::new();
        let first = Message::Immediate {
            seq: 1,
            len: 10,
            acks: None,
        };
        flow.recv(recv(5), &mut out);
        flow.recv(recv(6), &mut out);
        assert_eq!(flow.arrived(first, 0, &mut out), Ok(()));
        assert!(!out.iter().any(|a| matches!(a, Action::Message(..))));
        assert!(flow.has_held());
        out.clear();
        flow.send(send(7, false), &mut out);
        assert!(
            matches!(
                out.as_slice(),
                [Action::Message(Message::Advert { acks, .. }, None)] if *acks == NonZeroU32::new(1)
            ),
            "{out:?}"
        );
        assert!(!flow.has_held());
        // If the program sends nothing, `flush` sends the acknowledgement as a message of its own.
        out.clear();
        let second = Message::Immediate {
            seq: 2,
            len: 10,
            acks: NonZeroU32::new(1),
        };
        assert_eq!(flow.arrived(second, 1, &mut out), Ok(()));
        assert!(out.contains(&complete(7, Outcome::Done, 100)), "{out:?}");
        out.clear();
        flow.flush(&mut out);
        assert_eq!(out, [ack(2, 10, Status::Done)]);
    }

    #[test]
    fn a_program_that_only_receives_acknowledges_at_once() {
        let mut flow = flow();
        flow.set_may_defer(true);
        let mut out = Vec::new();
        for seq in 1..=3 {
            flow.recv(recv(4 + OpId::from(seq)), &mut out);
            out.clear();
            let message = Message::Immediate {
                seq,
                len: 10,
                acks: None,
            };
            assert_eq!(flow.arrived(message, 0, &mut out), Ok(()));
            let at_once = out.contains(&ack(seq, 10, Status::Done));
            assert_eq!(at_once, seq > 1, "message {seq}: {out:?}");
            flow.flush(&mut out);
        }
    }

    #[test]
    fn a_notification_follows_the_acknowledgement_of_an_earlier_send() {
        let mut flow = flow();
        flow.set_may_defer(true);
        let mut out = Vec::new();
        flow.recv(recv(5), &mut out);
        flow.recv(recv(6), &mut out);
        let first = Message::Immediate {
            seq: 1,
            len: 10,
            acks: None,
        };
        let second = Message::Advert {
            seq: 2,
            segments: memory(100),
            persistent: true,
            notify: true,
            acks: None,
        };
        assert_eq!(flow.arrived(first, 0, &mut out), Ok(()));
        assert_eq!(flow.arrived(second, 1, &mut out), Ok(()));
        let moved = out.iter().find_map(|a| match a {
            Action::Read { number, .. } => Some(*number),
            _ => None,
        });
        flow.moved(moved.unwrap(), &mut out);
        let messages: Vec<_> = out
            .iter()
            .filter(|a| matches!(a, Action::Message(..)))
            .collect();
        assert!(
            matches!(
                messages.as_slice(),
                [
                    Action::Message(Message::Ack { seq: 1, .. }, None),
                    Action::Message(Message::Notify { of: 2, .. }, None)
                ]
            ),
            "{messages:?}"
        );
    }

    #[test]
    fn an_empty_message_waits_for_its_receive() {
        let mut flow = flow();
        let mut out = Vec::new();
        let empty = Message::Advert {
            seq: 1,
            segments: memory(0),
            persistent: false,
            notify: false,
            acks: None,
        };
        assert_eq!(flow.arrived(empty, 0, &mut out), Ok(()));
        assert_eq!(out, [Action::Release(0)]);
        out.clear();
        flow.recv(recv(5), &mut out);
        assert!(
            out.contains(&complete(5, Outcome::Done, 0)),
            "the receive ends with the empty message: {out:?}"
        );
    }

    #[test]
    fn an_empty_waitall_receive_ends_like_any_empty_receive() {
        let ends = |wait_all| {
            let mut flow = stream();
            let mut out = Vec::new();
            let empty = Recv {
                segments: memory(0),
                wait_all,
                ..recv(5)
            };
            flow.recv(empty, &mut out);
            assert_eq!(flow.arrived(advert(1), 0, &mut out), Ok(()));
            flow.moved(0, &mut out);
            out.contains(&complete(5, Outcome::Done, 0))
        };
        assert!(ends(false) && ends(true));
    }

    /// Returns the reported operations.
    fn completions(out: &[Action]) -> Vec<Action> {
        let all = out.iter().filter(|a| matches!(a, Action::Complete { .. }));
        all.cloned().collect()
    }

    fn answer(seq: u32, len: u64, status: Status) -> Message {
        Message::Ack { seq, len, status }
    }

    #[test]
    fn a_cancelled_waitall_receive_ends_after_the_read_in_progress() {
        let mut flow = stream();
        let mut out = Vec::new();
        let all = Recv {
            segments: memory(500),
            wait_all: true,
            ..recv(5)
        };
        flow.recv(all, &mut out);
        flow.recv(recv(6), &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        out.clear();
        flow.cancel(5, &mut out);
        assert_eq!(out, [], "memory of the receive is still written to");
        flow.moved(0, &mut out);
        let end = complete(5, Outcome::Cancelled, 100);
        assert_eq!(out.first(), Some(&end), "{out:?}");
        out.clear();
        // The next bytes of the stream are those of the next receive.
        flow.arrived(advert(2), 0, &mut out).unwrap();
        let next = |a: &Action| matches!(a, Action::Read { to: 6, at: 0, .. });
        assert!(out.iter().any(next), "{out:?}");
    }

    #[test]
    fn cancelled_operations_are_reported_in_turn() {
        let mut flow = stream();
        let mut out = Vec::new();
        (5..8).for_each(|id| flow.recv(recv(id), &mut out));
        flow.cancel(6, &mut out);
        assert_eq!(out, [], "an earlier receive waits");
        flow.cancel(6, &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        flow.moved(0, &mut out);
        let expected = [
            complete(5, Outcome::Done, 100),
            complete(6, Outcome::Cancelled, 0),
        ];
        assert_eq!(completions(&out), expected);
        out.clear();
        // Sends 11 to 14 have messages. Sends 15 and 16 wait for credits.
        (11..17).for_each(|id| flow.send(send(id, false), &mut out));
        out.clear();
        flow.cancel(15, &mut out);
        assert_eq!(out, [], "the earlier sends are not answered");
        for seq in 1..=4 {
            flow.arrived(answer(seq, 100, Status::Done), 0, &mut out)
                .unwrap();
        }
        let done = completions(&out);
        let expected = [
            complete(14, Outcome::Done, 100),
            complete(15, Outcome::Cancelled, 0),
        ];
        assert_eq!(done.get(3..), Some(&expected[..]), "{done:?}");
        out.clear();
        flow.cancel(16, &mut out);
        flow.arrived(answer(5, 0, Status::Cancelled), 0, &mut out)
            .unwrap();
        assert_eq!(completions(&out), [complete(16, Outcome::Cancelled, 0)]);
    }

    #[test]
    fn cancelled_operations_are_reported_at_once_if_the_program_asks_for_it() {
        let mut flow = flow();
        flow.set_ordered(false);
        let mut out = Vec::new();
        (5..8).for_each(|id| flow.recv(recv(id), &mut out));
        (8..11).for_each(|id| flow.send(send(id, false), &mut out));
        out.clear();
        flow.cancel(6, &mut out);
        flow.cancel(10, &mut out);
        let expected = [6, 10].map(|id| complete(id, Outcome::Cancelled, 0));
        assert_eq!(out, expected);
        out.clear();
        flow.arrived(answer(2, 0, Status::Cancelled), 0, &mut out)
            .unwrap();
        assert_eq!(completions(&out), [complete(9, Outcome::Cancelled, 0)]);
    }

    #[test]
    fn a_cancelled_operation_needs_the_peer_until_the_request_is_answered() {
        let mut flow = flow();
        let mut out = Vec::new();
        flow.send(send(5, false), &mut out);
        assert!(!flow.needs_peer(5), "nothing was requested");
        flow.cancel(5, &mut out);
        assert!(flow.needs_peer(5));
        // The peer reads the data already, so the request has no effect.
        flow.arrived(answer(2, 0, Status::Done), 0, &mut out)
            .unwrap();
        assert!(!flow.needs_peer(5));
        flow.recv(recv(6), &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        flow.cancel(6, &mut out);
        assert!(flow.needs_peer(6), "its memory is written to");
        flow.moved(0, &mut out);
        assert!(!flow.needs_peer(6));
    }

    #[test]
    fn a_receive_after_the_end_follows_no_persistent_one() {
        let mut flow = stream();
        let mut out = Vec::new();
        let standing = Recv {
            persistent: true,
            ..recv(5)
        };
        flow.recv(standing, &mut out);
        flow.arrived(Message::Fin { seq: 1 }, 0, &mut out).unwrap();
        flow.end_receives();
        out.clear();
        flow.recv(recv(6), &mut out);
        assert_eq!(out, [complete(6, Outcome::Done, 0)]);
    }

    #[test]
    fn a_short_persistent_receive_needs_few_reads_for_a_long_advertisement() {
        let mut flow = stream();
        let mut out = Vec::new();
        let standing = Recv {
            segments: memory(8),
            persistent: true,
            ..recv(5)
        };
        flow.recv(standing, &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        let reads: Vec<_> = out
            .iter()
            .filter_map(|a| match a {
                Action::Read { at, from, .. } => Some((*at, from.first()?.addr, total(from))),
                _ => None,
            })
            .collect();
        // The memory has the same contents as after 13 reads of up to 8 bytes each: bytes 96 to 99, and then 92 to 95.
        assert_eq!(reads, [(0, 0x1000 + 88, 8), (0, 0x1000 + 96, 4)]);
        out.clear();
        (0..2).for_each(|number| flow.moved(number, &mut out));
        assert!(out.contains(&ack(1, 100, Status::Done)), "{out:?}");
    }

    #[test]
    fn a_refused_receive_is_reported_after_the_earlier_ones() {
        let mut flow = flow();
        let mut out = Vec::new();
        flow.recv(recv(5), &mut out);
        let persistent = Recv {
            persistent: true,
            ..recv(6)
        };
        flow.recv(persistent, &mut out);
        assert_eq!(out, []);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        flow.moved(0, &mut out);
        let expected = [
            complete(5, Outcome::Done, 100),
            complete(6, Outcome::Invalid, 0),
        ];
        assert_eq!(completions(&out), expected);
    }

    #[test]
    fn an_empty_receive_is_reported_after_the_earlier_ones() {
        let mut flow = stream();
        let mut out = Vec::new();
        flow.recv(recv(5), &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        // No receive waits for these bytes, so they are read into the buffer.
        flow.arrived(advert(2), 0, &mut out).unwrap();
        out.clear();
        let empty = Recv {
            segments: memory(0),
            ..recv(6)
        };
        flow.recv(empty, &mut out);
        assert_eq!(out, []);
        flow.moved(0, &mut out);
        let expected = [
            complete(5, Outcome::Done, 100),
            complete(6, Outcome::Done, 0),
        ];
        assert_eq!(completions(&out), expected);
    }

    #[test]
    fn sends_are_reported_in_order_whatever_the_order_of_their_answers() {
        let mut flow = stream();
        let mut out = Vec::new();
        (5..8).for_each(|id| flow.send(send(id, false), &mut out));
        out.clear();
        flow.arrived(answer(2, 0, Status::Done), 0, &mut out)
            .unwrap();
        assert_eq!(out, [Action::Release(0)]);
        let twice = flow.arrived(answer(2, 0, Status::Done), 0, &mut out);
        assert_eq!(twice, Err(Bad::Order));
        out.clear();
        flow.arrived(answer(1, 100, Status::Done), 0, &mut out)
            .unwrap();
        let expected = [
            Action::Release(0),
            complete(5, Outcome::Done, 100),
            complete(6, Outcome::Truncated, 0),
        ];
        assert_eq!(out, expected);
    }

    #[test]
    fn a_refused_write_is_reported_after_the_earlier_ones() {
        let mut flow = flow();
        let mut out = Vec::new();
        let place = Message::Place {
            seq: 1,
            segment: memory(150)[0],
        };
        flow.arrived(place, 0, &mut out).unwrap();
        flow.send(send(5, false), &mut out);
        out.clear();
        let beyond = Send {
            offset: Some(100),
            ..send(6, false)
        };
        flow.send(beyond, &mut out);
        assert_eq!(out, []);
        flow.written(5, &mut out);
        let expected = [
            complete(5, Outcome::Done, 100),
            complete(6, Outcome::Invalid, 0),
        ];
        assert_eq!(out, expected);
    }

    #[test]
    fn a_peer_without_acknowledgements_gets_no_more_notifications() {
        let mut flow = flow();
        let mut out = Vec::new();
        let block = Message::Advert {
            seq: 1,
            segments: memory(100),
            persistent: true,
            notify: true,
            acks: None,
        };
        flow.arrived(block, 0, &mut out).unwrap();
        let mut started = 0;
        let mut read_all = |flow: &mut Flow, out: &mut Vec<Action>| {
            while let Some(action) = out.pop() {
                if let Action::Read { number, .. } = action {
                    started += 1;
                    flow.moved(number, out);
                }
            }
            started
        };
        for id in 1..100 {
            flow.recv(recv(id), &mut out);
            let started = read_all(&mut flow, &mut out);
            assert!(started <= CONTROLS as usize + MAX_MOVES);
            assert!(flow.waiting_controls.len() <= MAX_MOVES);
        }
        // Acknowledged notifications make room for all the others.
        for seq in 1..100 {
            flow.arrived(answer(seq, 0, Status::Done), 0, &mut out)
                .unwrap();
            read_all(&mut flow, &mut out);
        }
        assert_eq!(read_all(&mut flow, &mut out), 99);
        assert!(flow.recvs.is_empty() && flow.waiting_controls.is_empty());
    }

    #[test]
    fn an_empty_persistent_receive_is_refused() {
        let mut flow = stream();
        let mut out = Vec::new();
        let empty = Recv {
            segments: memory(0),
            persistent: true,
            ..recv(5)
        };
        flow.recv(empty, &mut out);
        assert_eq!(out, [complete(5, Outcome::Invalid, 0)]);
    }

    /// The peer sends an advertisement, and then ends the persistent receive that it is read into.
    #[test]
    fn a_persistent_receive_ends_after_the_reads_into_it() {
        let mut flow = flow();
        let mut out = Vec::new();
        let standing = Recv {
            persistent: true,
            ..recv(5)
        };
        flow.recv(standing, &mut out);
        flow.arrived(advert(1), 0, &mut out).unwrap();
        assert!(out.iter().any(|a| matches!(a, Action::Read { to: 5, .. })));
        out.clear();
        let refused = Message::Ack {
            seq: 1,
            len: 0,
            status: Status::Refused,
        };
        flow.arrived(refused, 1, &mut out).unwrap();
        let end = complete(5, Outcome::BothPersistent, 0);
        assert!(!out.contains(&end), "{out:?}");
        flow.moved(0, &mut out);
        assert!(out.contains(&end), "{out:?}");
    }

    #[test]
    fn a_waitall_receive_reads_a_persistent_send_once() {
        let mut flow = stream();
        let mut out = Vec::new();
        let block = Message::Advert {
            seq: 1,
            segments: memory(100),
            persistent: true,
            notify: false,
            acks: None,
        };
        flow.arrived(block, 0, &mut out).unwrap();
        let all = Recv {
            segments: memory(150),
            wait_all: true,
            ..recv(5)
        };
        flow.recv(all, &mut out);
        let reads = out.iter().filter(|a| matches!(a, Action::Read { .. }));
        assert_eq!(reads.count(), 1, "{out:?}");
        flow.moved(0, &mut out);
        assert!(out.contains(&complete(5, Outcome::Done, 100)), "{out:?}");
    }

    #[test]
    fn sends_wait_for_credits() {
        let mut flow = flow();
        let mut out = Vec::new();
        (1..=3).for_each(|id| flow.send(send(id, false), &mut out));
        assert_eq!(out.len(), 2);
        out.clear();
        let ack = Message::Ack {
            seq: 1,
            len: 100,
            status: Status::Done,
        };
        assert_eq!(flow.arrived(ack, 0, &mut out), Ok(()));
        let third = Action::Message(advert(3), None);
        assert_eq!(
            out,
            [Action::Release(0), complete(1, Outcome::Done, 100), third]
        );
    }
}
