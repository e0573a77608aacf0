//! The state of one stream, from start-up to its end.

use super::handover::{HandoverState, OfferAfter};
use super::requester::Requester;
use super::responder::{Responder, Response};
use crate::bounds;
use crate::ddp::rx::Violation;
use crate::ddp::tx::Message;
use crate::llp::mpa::marker::Inserter;
use crate::rdmap::message::{HELLO_VERSION, NO_STAG, bytes_message, tagged};
use crate::rdmap::terminate::TermContext;
use crate::verbs::counter::Ops;
use crate::verbs::source::Places;
use crate::wire::control::Control;
use crate::wire::ddp::{Header, Untagged};
use crate::wire::rdmap::Opcode;
use crate::wire::{QN_SEND, To};

/// The implementation at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Standard iWARP: Sends and Writes complete when the socket has accepted them; no RNR, no Send with immediate.
    Standard,
    /// Another anywarp: acknowledgements, RNR, Send with immediate.
    Anywarp,
    /// Unknown until its first message arrives.
    Unknown,
}

/// The outcome of start-up.
#[derive(Debug, Clone, Copy)]
pub struct StreamConfig {
    /// Whether CRCs are calculated and checked.
    pub crc: bool,
    /// Largest ULPDU to send.
    pub mulpdu: usize,
    /// Largest ULPDU to send to a peer that was unknown and turns out to be anywarp.
    pub mulpdu_anywarp: usize,
    /// The implementation at the other end.
    pub peer: Peer,
    /// Number of Reads and atomics of the peer that are served at the same time (IRD).
    pub ird: u32,
    /// Largest number of outstanding Reads and atomics of this end (ORD).
    pub ord: u32,
    /// Whether this end opened the connection and sends first. The other end sends nothing before the first message,
    /// unless it knows that its peer is anywarp.
    pub initiator: bool,
    /// The message that makes the stream ready, to be sent first.
    pub first: First,
    /// Whether the connection manager set up the stream. The queue pair then fails when the stream ends, except as `stays` says.
    pub managed: bool,
    /// Whether the queue pair does not fail when the peer's program ends the stream in order. With RoCE it stays as it is until its own
    /// program disconnects it, and with iWARP it fails.
    pub stays: bool,
    /// Whether the peer requests markers in the stream that it receives.
    pub markers: bool,
    /// When other carriers are offered to the peer.
    pub offer_after: OfferAfter,
}

/// The first message of an initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// Nothing.
    Nothing,
    /// The control message Hello, by which an anywarp peer is recognized.
    Hello,
    /// An RDMA Write of length 0.
    Write,
    /// An RDMA Read of length 0.
    Read,
    /// A Send of length 0.
    Send,
}

/// Whether the stream is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It is open.
    Open,
    /// Queued messages are still sent, then the stream is closed for sending.
    Closing,
    /// It is closed or broken.
    Dead,
}

/// A message that is being sent, segment by segment.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) message: Message,
    /// Number of the request that it belongs to; `None` for responses.
    pub(super) request: Option<u64>,
    /// Whether this is the last message of its request. Without a request: whether it is a response that occupies an
    /// IRD slot.
    pub(super) last: bool,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) config: StreamConfig,
    pub(super) peer: Peer,
    pub(super) end: End,
    pub(super) handover: HandoverState,
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    /// A message with fewer payload bytes may be sent by the shortcut `send_short`; 0 turns that off.
    pub(super) short_limit: u64,
    // --- transmit ---
    /// Whether CRCs are calculated.
    pub(super) crc_tx: bool,
    /// Whether this end may send: a responder of MPA sends nothing before the first FPDU has arrived.
    pub(super) may_send: bool,
    pub(super) current: Option<Outgoing>,
    /// Whether shared memory carries the stream to the peer.
    pub(super) in_memory: bool,
    /// Whether a Terminate was queued.
    pub(super) terminated: bool,
    /// Inserts markers into the sent stream, if the peer requests them.
    pub(super) markers: Option<Inserter>,
    // --- receive ---
    /// Whether CRCs are checked.
    pub(super) crc_rx: bool,
    /// Whether a message of the peer has arrived.
    pub(super) started: bool,
    /// The peer's ready-to-receive message was a Write or a Read, which the completion counters have to ignore.
    pub(super) ready_to_receive: Option<Ops>,
    pub(super) bye_received: bool,
    pub(super) direct: Option<Direct>,
}

impl Stream {
    pub(super) fn new(config: StreamConfig, shortcuts: bool) -> Self {
        let mut stream = Self {
            markers: config.markers.then(Inserter::new),
            peer: config.peer,
            end: End::Open,
            handover: HandoverState::new(config.offer_after, config.first == First::Hello),
            requester: Requester::new(config.ord),
            responder: Responder::new(config.ird),
            short_limit: 0,
            crc_tx: config.crc,
            crc_rx: config.crc,
            // RFC 5044 §7.1.2 [mpa-responder-waits]: a responder sends nothing before the first FPDU. It may send
            // earlier if both queue pairs were set up with each other's addresses: the peer is anywarp then, and accepts
            // FPDUs at once.
            may_send: config.initiator || config.peer == Peer::Anywarp,
            current: None,
            in_memory: false,
            terminated: false,
            started: false,
            ready_to_receive: None,
            bye_received: false,
            direct: None,
            config,
        };
        stream.set_short_limit(shortcuts);
        if config.initiator {
            stream.queue_first();
        }
        stream
    }

    /// Queues the message that makes the stream ready.
    fn queue_first(&mut self) {
        let response = match self.config.first {
            First::Nothing => return,
            First::Hello => Response::Control(Control::Hello {
                version: HELLO_VERSION,
                features: self.handover.features(),
            }),
            First::Write => Response::Rtr(tagged(Opcode::Write, NO_STAG, To(0))),
            First::Read => Response::Rtr(self.requester.ready_to_receive_read()),
            First::Send => {
                let msn = self.requester.next_send_msn();
                Response::Rtr(bytes_message(Opcode::Send, QN_SEND, msn, &[]))
            }
        };
        self.responder.push(response);
    }

    /// Sets `short_limit`. The shortcut sends messages of one segment whose payload is copied, on streams without
    /// markers.
    pub(super) fn set_short_limit(&mut self, shortcuts: bool) {
        let room = self.config.mulpdu.saturating_sub(Untagged::LEN);
        self.short_limit = match &self.markers {
            None if shortcuts => (room + 1).min(bounds::COPY_LIMIT) as u64,
            _ => 0,
        };
    }

    /// Queues an acknowledgement of all requests that are done, before the stream ends.
    pub(super) fn push_ack(&mut self) {
        if self.peer == Peer::Anywarp && self.responder.unacknowledged() > 0 {
            let ack = self.responder.acknowledge();
            self.responder.push_control(ack);
        }
    }

    /// Queues a Terminate.
    pub(super) fn push_terminate(&mut self, message: Message) {
        self.terminated = true;
        self.responder.push(Response::Terminate(message));
    }

    /// Drops the rest of the message under way if it belongs to a request: after an incomplete message the peer can
    /// interpret only control messages.
    pub(super) fn cut_request(&mut self) {
        self.current.take_if(|out| out.request.is_some());
    }

    /// The number of requests of both ends, modulo 2³².
    #[inline]
    pub(super) fn requests(&self) -> u32 {
        self.requester.seq().wrapping_add(self.responder.done())
    }

    /// Whether nothing may be framed, because the stream is being handed over to another carrier.
    #[inline]
    pub(super) fn is_tx_sealed(&self) -> bool {
        self.handover.is_tx_sealed(self.end != End::Open)
    }

    /// Whether no message is under way or queued.
    #[inline]
    pub(super) fn is_tx_idle(&self) -> bool {
        self.current.is_none() && self.requester.is_idle() && !self.responder.has_responses()
    }
}

/// An FPDU whose payload is received directly into user memory.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) header: Header,
    pub(super) context: TermContext,
    pub(super) targets: Places,
    /// Payload bytes placed.
    pub(super) placed: u64,
    /// Payload bytes to come.
    pub(super) left: u64,
    pub(super) pad: usize,
    /// A rule that the FPDU broke: the rest of its payload is not placed. The violation is reported after the CRC
    /// field, when the FPDU is complete.
    pub(super) violation: Option<Violation>,
}
