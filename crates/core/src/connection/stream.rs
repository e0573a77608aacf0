//! The state of one stream, from start-up to its end.

use std::collections::VecDeque;
use std::time::Instant;

use super::shm_handover::ShmHandover;
use crate::bounds;
use crate::ddp::rx::Violation;
use crate::ddp::tx::Message;
use crate::llp::mpa::marker::Inserter;
use crate::rdmap::message::{HELLO_VERSION, NO_STAG, bytes_message, tagged};
use crate::rdmap::read::{PendingAtomic, PendingRead};
use crate::rdmap::terminate::TermContext;
use crate::verbs::source::Places;
use crate::wire::control::Control;
use crate::wire::ddp::{Header, Untagged};
use crate::wire::rdmap::{Opcode, ReadRequest};
use crate::wire::{Msn, QN_READ, QN_SEND, To};

/// The implementation at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Standard iWARP: completions at the socket, no RNR, no Send with immediate.
    Standard,
    /// Another anywarp: acknowledgements, RNR, Send with immediate.
    Anywarp,
    /// Not known before its first message.
    Unknown,
}

/// The outcome of start-up.
#[derive(Debug, Clone, Copy)]
pub struct StreamConfig {
    /// CRCs are calculated and checked.
    pub crc: bool,
    /// Largest ULPDU to send.
    pub mulpdu: usize,
    /// Largest ULPDU to send to a peer that was unknown and turns out to be anywarp.
    pub mulpdu_anywarp: usize,
    /// The implementation at the other end.
    pub peer: Peer,
    /// Reads and atomics of the peer that are served at once (IRD).
    pub ird: u32,
    /// Reads and atomics outstanding at most (ORD).
    pub ord: u32,
    /// This end opened the connection and sends first. The other end sends nothing before the first message.
    pub initiator: bool,
    /// The message that makes the stream ready, to be sent first.
    pub first: First,
    /// Made through the connection manager: the queue pair fails when the stream ends.
    pub managed: bool,
    /// The peer asked for markers in what it receives.
    pub markers: bool,
    /// Number of requests after which shared memory is offered to the peer; `None`: the peer is on another host.
    pub shm_handover: Option<u32>,
}

/// The first message of an initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// Nothing.
    Nothing,
    /// Our Hello.
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

/// A message of which some segments are sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) message: Message,
    /// Number of the request that it belongs to; `None` for responses.
    pub(super) request: Option<u64>,
    /// Last message of its request.
    pub(super) last: bool,
}

/// A message to send that is not of the send queue.
#[derive(Debug)]
pub(super) enum Response {
    Read(Message),
    Atomic(Message),
    Control(Control),
    Terminate(Message),
    Rtr(Message),
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) config: StreamConfig,
    pub(super) peer: Peer,
    pub(super) end: End,
    pub(super) handover: ShmHandover,
    /// A message with fewer payload bytes may be sent by the shortcut `send_short`; 0 turns that off.
    pub(super) short_limit: u64,
    /// CRCs are calculated.
    pub(super) crc_tx: bool,
    /// CRCs are checked.
    pub(super) crc_rx: bool,
    // --- transmit ---
    pub(super) may_send: bool,
    pub(super) current: Option<Outgoing>,
    /// Messages of the request that was taken last, still to be sent.
    pub(super) parts: VecDeque<Message>,
    pub(super) parts_of: u64,
    pub(super) responses: VecDeque<Response>,
    /// Sequence number of the last request message.
    pub(super) seq: u32,
    pub(super) next_send_msn: u32,
    pub(super) next_read_msn: u32,
    pub(super) next_atomic_response_msn: u32,
    pub(super) next_atomic_id: u32,
    pub(super) acked: u32,
    pub(super) ack_scan: u64,
    /// The shared receive queue that the peer was last told to use (XRC).
    pub(super) selected_srq: Option<u32>,
    pub(super) reads: VecDeque<PendingRead>,
    pub(super) atomics: VecDeque<PendingAtomic>,
    pub(super) rnr_until: Option<Instant>,
    /// The peer waits for a Restart at this number.
    pub(super) restart: Option<u32>,
    pub(super) terminated: bool,
    /// Puts markers into what we send, if the peer wants them.
    pub(super) markers: Option<Inserter>,
    // --- receive ---
    pub(super) started: bool,
    pub(super) bye_received: bool,
    /// Sequence number of the last request message of the peer that is done.
    pub(super) done: u32,
    pub(super) done_acked: u32,
    pub(super) recv_send_msn: u32,
    pub(super) recv_read_msn: u32,
    pub(super) recv_atomic_response_msn: u32,
    pub(super) receive: Option<ReceiveUnderWay>,
    pub(super) send_immediate: Option<[u8; 4]>,
    pub(super) write_bytes: u64,
    pub(super) last_write: Option<u32>,
    /// Requests are dropped until the peer restarts at this number.
    pub(super) discarding: Option<u32>,
    pub(super) serving: u32,
    pub(super) direct: Option<Direct>,
    pub(super) last_rx: Option<Instant>,
    pub(super) pinged: bool,
}

impl Stream {
    /// Queues the message that makes the stream ready.
    pub(super) fn queue_first(&mut self) {
        match self.config.first {
            First::Nothing => {}
            First::Hello => self.responses.push_back(Response::Control(Control::Hello {
                version: HELLO_VERSION,
                features: self.handover.features(),
            })),
            First::Write => {
                self.responses
                    .push_back(Response::Rtr(tagged(Opcode::Write, NO_STAG, To(0))));
            }
            First::Read => {
                let request = ReadRequest {
                    sink_stag: NO_STAG,
                    sink_to: To(0),
                    size: 0,
                    source_stag: NO_STAG,
                    source_to: To(0),
                };
                let msn = self.next_read_msn;
                self.next_read_msn = msn.wrapping_add(1);
                self.seq = self.seq.wrapping_add(1);
                self.reads.push_back(PendingRead {
                    request: u64::MAX,
                    sink: None,
                    stag: NO_STAG,
                    to: To(0),
                    len: 0,
                    received: 0,
                });
                self.responses.push_back(Response::Rtr(bytes_message(
                    Opcode::ReadRequest,
                    QN_READ,
                    msn,
                    &request.emit(),
                )));
            }
            First::Send => {
                let msn = self.next_send_msn;
                self.next_send_msn = msn.wrapping_add(1);
                self.responses.push_back(Response::Rtr(bytes_message(
                    Opcode::Send,
                    QN_SEND,
                    msn,
                    &[],
                )));
            }
        }
    }

    /// Sets the limit of the shortcut for sending: one segment, of which the payload is copied, and no markers.
    pub(super) fn set_short_limit(&mut self, shortcuts: bool) {
        let room = self.config.mulpdu.saturating_sub(Untagged::LEN);
        self.short_limit = match &self.markers {
            None if shortcuts => (room + 1).min(bounds::COPY_LIMIT) as u64,
            _ => 0,
        };
    }

    /// Queues an acknowledgement of all requests that are done, before the stream ends.
    pub(super) fn push_ack(&mut self) {
        if self.peer == Peer::Anywarp && self.done != self.done_acked {
            self.done_acked = self.done;
            self.responses
                .push_back(Response::Control(Control::Ack { seq: self.done }));
        }
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
    /// A rule that it broke: no more of it is placed. It is reported when its CRC is known to be right, since the FPDU may
    /// be damaged.
    pub(super) violation: Option<Violation>,
}

/// A Send that is arriving.
#[derive(Debug)]
pub(super) struct ReceiveUnderWay {
    pub(super) request_id: u64,
    pub(super) places: Places,
    pub(super) room: u64,
    pub(super) received: u64,
    pub(super) msn: Msn,
    pub(super) opcode: Opcode,
}
