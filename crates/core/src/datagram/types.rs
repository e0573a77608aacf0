//! The types of datagram queue pairs: kinds, datagrams, reasons to drop one, counters.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;

use crate::error::TermCode;
use crate::verbs::qp::QpType;
use crate::verbs::wc::Status;
use crate::wire::dgram::DgramError;

/// A remote queue pair: its address and port, and its index on that port.
pub(super) type Peer = (SocketAddr, u8);

/// The queue pair number of every member of a multicast group.
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// The services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Unreliable datagram.
    Ud,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram.
    Rd,
    /// Reliable connection over reliable datagrams.
    Rc,
    /// Unreliable connection that uses reliable datagrams.
    ReliableUc,
}

impl Kind {
    /// The type of queue pair.
    pub const fn qp_type(self) -> QpType {
        match self {
            Self::Ud => QpType::Ud,
            Self::Uc | Self::ReliableUc => QpType::Uc,
            Self::Rd => QpType::Rd,
            Self::Rc => QpType::Rc,
        }
    }

    /// Whether lost datagrams are sent again.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rd | Self::Rc | Self::ReliableUc)
    }

    /// Whether the service always has Reads, atomics and Send with Invalidate. UD has Reads only with the option
    /// `one_sided`.
    pub const fn reads(self) -> bool {
        matches!(self, Self::Rd | Self::Rc)
    }

    /// Whether there is one peer only.
    pub const fn is_connected(self) -> bool {
        matches!(self, Self::Uc | Self::Rc | Self::ReliableUc)
    }
}

/// The addressing of a datagram that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Its source.
    pub from: SocketAddr,
    /// The local address or group to which it was sent, if the socket reports it.
    pub to: Option<IpAddr>,
    /// Its hop limit or time to live.
    pub hop_limit: u8,
    /// Its traffic class or type of service.
    pub traffic_class: u8,
}

/// A datagram to send.
///
/// All datagrams of a message have one destination, and all but the last one have the same length, so that the engine can
/// pass several of them to the kernel as one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxDatagram {
    /// Its destination.
    pub to: SocketAddr,
    /// Its source address. `None`: the system chooses.
    pub from: Option<IpAddr>,
    /// Hop limit or time to live, 0 for the system's default.
    pub hop_limit: u8,
    /// Traffic class or type of service.
    pub traffic_class: u8,
    /// The whole datagram, with its checksum.
    pub bytes: Bytes,
}

/// The bytes of a datagram.
#[derive(Debug, Clone)]
pub enum Bytes {
    /// The datagram is the only owner.
    Own(Vec<u8>),
    /// The reliability layer keeps the bytes too, until they are acknowledged.
    Shared(Arc<Vec<u8>>),
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Own(bytes)
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

/// Why a datagram was dropped, or a part of it not placed. Each reason is counted in [`Counters`]; some reasons share a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// It breaks a rule of the format.
    Wire(DgramError),
    /// The queue pair does not receive in its state.
    State,
    /// It is for another queue pair.
    Index,
    /// It has another Q_Key.
    Qkey,
    /// It does not come from the peer.
    Source,
    /// This kind of queue pair does not have the operation.
    Operation,
    /// It contradicts an earlier datagram of its message.
    Mismatch,
    /// All its bytes had arrived before.
    Duplicate,
    /// Its message is complete, was given up, or was replaced by a newer one; or the request that it answers is not
    /// outstanding.
    Late,
    /// No receive was posted.
    NoReceive,
    /// The memory that it names may not be written.
    Access,
    /// Its message is longer than the receive.
    TooLong,
    /// Its message has more gaps than can be stored.
    Gaps,
    /// The memory of the receive was not writable; the queue pair has failed.
    Local,
    /// A limit is reached: of open messages, of their gaps, of queued answers, or of bytes to a peer that has
    /// not proven its address.
    Busy,
    /// Reliable services: the largest number of records is stored already.
    NoRecord,
}

impl Dropped {
    /// The resource that a reliable packet waits for. `None`: the packet is refused.
    pub(super) fn resource(self) -> Option<Resource> {
        match self {
            Self::NoReceive => Some(Resource::Receive),
            Self::Busy => Some(Resource::Room),
            Self::NoRecord => Some(Resource::Record),
            _ => None,
        }
    }

    /// The status with which the sender's request fails, if the packet is refused.
    pub(super) fn status(self) -> Status {
        match self {
            Self::Access => Status::RemoteAccess,
            Self::Local => Status::RemoteOperation,
            _ => Status::RemoteInvalidRequest,
        }
    }

    /// The error that is reported to the sender (RFC 5040 §4.8).
    pub(super) fn terminate(self) -> TermCode {
        match self {
            Self::Access => TermCode::RDMAP_ACCESS,
            Self::TooLong => TermCode::DDP_TOO_LONG,
            Self::Operation => TermCode::RDMAP_OPCODE,
            _ => TermCode::RDMAP_UNSPECIFIED,
        }
    }
}

/// A peer's report of an error with a message of this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorReport {
    /// The peer that reports it.
    pub from: SocketAddr,
    /// Its queue pair.
    pub src_qpn: u32,
    /// The message number; for a Send it is also the MSN.
    pub id: u32,
    /// Layer of the error, as in a Terminate (RFC 5040 §4.8).
    pub layer: u8,
    /// Its type.
    pub etype: u8,
    /// Its code.
    pub code: u8,
    /// The status of the request, if the report ends it.
    pub status: Status,
    /// The `wr_id` of the request, if it is still known.
    pub request: Option<u64>,
}

/// What it means for a request that the socket has accepted a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendEffect {
    /// Nothing: the datagram belongs to no request, or its request completes in another way.
    Nothing,
    /// The request has more datagrams.
    Part(u64),
    /// The request is done.
    End(u64),
    /// The request is complete when its answer arrives.
    Ask(u64),
}

impl SendEffect {
    /// Whether this is the effect of the datagram that follows `count` datagrams, the first of which has the effect `first`.
    #[inline]
    fn continues(self, first: Self, count: u32) -> bool {
        match (first, self) {
            (Self::End(first), Self::End(this)) => this == first + u64::from(count),
            (first, this) => first == this,
        }
    }

    /// The effect of the datagram that follows `count` datagrams, the first of which has this effect.
    pub(super) fn after(self, count: u32) -> Self {
        match self {
            Self::End(first) => Self::End(first + u64::from(count)),
            same => same,
        }
    }
}

/// The effects of datagrams that are not sent yet, in their order. Datagrams of consecutive requests share an entry.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    /// One entry for several datagrams: the effect of the first one, and their number.
    runs: VecDeque<(SendEffect, u32)>,
}

impl Unwritten {
    #[inline]
    pub(super) fn push(&mut self, effect: SendEffect) {
        match self.runs.back_mut() {
            Some((first, count)) if effect.continues(*first, *count) => *count += 1,
            _ => self.runs.push_back((effect, 1)),
        }
    }

    /// Removes at most `most` datagrams of one entry. Returns the effect of the first one, and their number.
    #[inline]
    pub(super) fn take(&mut self, most: usize) -> Option<(SendEffect, u32)> {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let (first, count) = self.runs.front_mut()?;
        let (effect, taken) = (*first, most.min(*count));
        if taken == *count {
            self.runs.pop_front();
        } else {
            *first = effect.after(taken);
            *count -= taken;
        }
        Some((effect, taken))
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
    }
}

/// The counters of a queue pair. They count datagrams unless their description says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Arrived datagrams.
    pub rx_dgrams: u64,
    /// Messages that were delivered.
    pub rx_messages: u64,
    /// Dropped: damaged.
    pub rx_bad_crc: u64,
    /// Dropped: headers that break a rule, contradict each other, or request an operation that the queue pair does
    /// not have.
    pub rx_bad_hdr: u64,
    /// Dropped: wrong Q_Key.
    pub rx_qkey: u64,
    /// Dropped: for another queue pair, or not from the peer.
    pub rx_stray: u64,
    /// Dropped: the queue pair was not ready, the memory of the receive was not writable, or a limit was reached
    /// ([`Dropped::Busy`]).
    pub rx_state: u64,
    /// Dropped: all bytes had arrived before.
    pub rx_dup: u64,
    /// Dropped: the message had ended.
    pub rx_late: u64,
    /// Dropped: no receive posted. Reliable services: packets that waited for a receive or for room for a record.
    pub rx_no_recv: u64,
    /// Dropped: the memory may not be written.
    pub rx_stag: u64,
    /// Dropped: the message was longer than the receive, or had too many gaps.
    pub rx_bounds: u64,
    /// Lost datagrams that were restored from parity.
    pub rx_repaired: u64,
    /// Messages that stayed incomplete, except those that have a record.
    pub evicted: u64,
    /// Records of messages that are complete.
    pub rec_full: u64,
    /// Records of incomplete messages, or of parts of messages.
    pub rec_partial: u64,
    /// Records that could not be stored.
    pub rec_overflow: u64,
    /// Reads that were never answered.
    pub reads_timeout: u64,
    /// Errors that peers reported.
    pub err_in: u64,
    /// Errors reported to peers.
    pub err_out: u64,
    /// Passed to the socket.
    pub tx_dgrams: u64,
    /// Refused by the socket.
    pub tx_errors: u64,
    /// How often sending waited for a report of the peer until the time limit.
    pub tx_stalls: u64,
    /// Reliable services: packets that were sent again.
    pub rd_again: u64,
    /// Reliable services: probes to silent peers.
    pub rd_probes: u64,
    /// Reliable services: packets that contain only an acknowledgement.
    pub rd_acks: u64,
    /// Reliable services: packets with a wrong token.
    pub rd_bad_echo: u64,
}

impl Counters {
    /// All of them with their names.
    pub fn named(&self) -> [(&'static str, u64); 27] {
        [
            ("rx_dgrams", self.rx_dgrams),
            ("rx_messages", self.rx_messages),
            ("rx_bad_crc", self.rx_bad_crc),
            ("rx_bad_hdr", self.rx_bad_hdr),
            ("rx_qkey", self.rx_qkey),
            ("rx_stray", self.rx_stray),
            ("rx_state", self.rx_state),
            ("rx_dup", self.rx_dup),
            ("rx_late", self.rx_late),
            ("rx_no_recv", self.rx_no_recv),
            ("rx_stag", self.rx_stag),
            ("rx_bounds", self.rx_bounds),
            ("rx_repaired", self.rx_repaired),
            ("evicted", self.evicted),
            ("rec_full", self.rec_full),
            ("rec_partial", self.rec_partial),
            ("rec_overflow", self.rec_overflow),
            ("reads_timeout", self.reads_timeout),
            ("err_in", self.err_in),
            ("err_out", self.err_out),
            ("tx_dgrams", self.tx_dgrams),
            ("tx_errors", self.tx_errors),
            ("tx_stalls", self.tx_stalls),
            ("rd_again", self.rd_again),
            ("rd_probes", self.rd_probes),
            ("rd_acks", self.rd_acks),
            ("rd_bad_echo", self.rd_bad_echo),
        ]
    }

    pub(super) fn dropped(&mut self, why: Dropped) {
        let counter = match why {
            Dropped::Wire(DgramError::Crc) => &mut self.rx_bad_crc,
            Dropped::Wire(_) | Dropped::Operation | Dropped::Mismatch => &mut self.rx_bad_hdr,
            Dropped::State | Dropped::Local | Dropped::Busy => &mut self.rx_state,
            Dropped::Index | Dropped::Source => &mut self.rx_stray,
            Dropped::Qkey => &mut self.rx_qkey,
            Dropped::Duplicate => &mut self.rx_dup,
            Dropped::Late => &mut self.rx_late,
            Dropped::NoReceive | Dropped::NoRecord => &mut self.rx_no_recv,
            Dropped::Access => &mut self.rx_stag,
            Dropped::TooLong | Dropped::Gaps => &mut self.rx_bounds,
        };
        *counter += 1;
    }
}

/// Returns the UDP payload, in bytes, that the path to an address carries without fragmentation.
pub type PathMtu = fn(IpAddr) -> u16;

/// A resource that waiting packets need. The packets are handled again when the resource may be available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resource {
    /// A receive.
    Receive,
    /// Room for an open message, for a gap in one, or for an answer.
    Room,
    /// Room for a record.
    Record,
}

impl Resource {
    /// Its bit in a set of resources.
    pub(super) fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The number of a message in the reliability layer.
pub(super) type Tag = u64;

/// The place of a datagram in its message, and how it is acknowledged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// The message.
    pub(super) tag: Tag,
    /// Whether the datagram ends the message.
    pub(super) last: bool,
    /// Whether no other datagram follows at once.
    pub(super) alone: bool,
    /// Whether the acknowledgement is not needed soon.
    pub(super) ack_later: bool,
    /// Whether the message is so long that its end is acknowledged at once.
    pub(super) long: bool,
}
