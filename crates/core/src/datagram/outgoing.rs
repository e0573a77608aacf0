//! Messages to send and their destinations.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::options::Options;
use super::types::{Kind, MULTICAST_QPN, Peer, Tag, TxDatagram};
use crate::bounds;
use crate::ddp::tx::Message;
use crate::error::Misuse;
use crate::verbs::wr::{Destination, Op, WorkRequest};
use crate::wire::dgram::Shim;

/// The IP fields of packets to a peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct IpFields {
    pub(super) from: Option<IpAddr>,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// A message that is being cut into datagrams.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) message: Message,
    /// Number of its request. `None` for an answer to a peer.
    pub(super) request: Option<u64>,
    /// Whether the request is complete only when an answer arrives.
    pub(super) asks: bool,
    /// Identifies the message in the reliability layer.
    pub(super) tag: Tag,
    pub(super) to: Destination,
    /// The shim of its datagrams. The offset is set for each datagram.
    pub(super) shim: Shim,
    /// Largest number of payload bytes in one datagram.
    pub(super) segment: u64,
    /// The parity sum of the current group, the number of datagrams in it, and the offset of the first.
    pub(super) group: (Vec<u8>, u8, u32),
    /// Since when the message waits for the window of its peer.
    pub(super) waits: Option<Duration>,
}

/// Largest number of bytes in front of the payload of a datagram with immediate data.
pub(super) const HEAD: usize = 26 + 8 + 18;

impl Current {
    /// The peer whose window limits the message. `None` for multicast.
    pub(super) fn peer(&self) -> Option<Peer> {
        (!has_no_window(&self.to)).then(|| peer_of(&self.to))
    }

    /// An upper limit of the length of its next datagram.
    pub(super) fn next_len(&self) -> usize {
        let left = self.message.len.saturating_sub(self.message.sent);
        let len = usize::try_from(left.min(self.segment)).unwrap_or(usize::MAX / 2);
        len + HEAD
    }
}

/// The queued messages to one peer of a reliable queue pair.
#[derive(Debug, Default)]
pub(super) struct PeerQueue {
    pub(super) queue: VecDeque<Current>,
    pub(super) ready: bool,
    /// The number of queued messages that are answers.
    pub(super) answers: usize,
}

/// The final datagram of a Write-Record, which is repeated.
#[derive(Debug)]
pub(super) struct Trailer {
    pub(super) datagram: TxDatagram,
    pub(super) left: u8,
}

/// The result of taking a request from the send queue.
#[expect(
    clippy::large_enum_variant,
    reason = "the value is used at once, and a box would be an allocation for each message"
)]
pub(super) enum Taken {
    /// The message of the request is to be cut into datagrams.
    Message(Current),
    /// The request is complete, or has failed.
    Done,
    /// There is no request, or it has to wait.
    Nothing,
}

/// Bit of a tag: the message is an answer, not a request of the send queue.
pub(super) const ANSWER: Tag = 1 << 63;

/// Whether an address is a multicast address or the limited broadcast address.
#[inline]
pub fn is_group(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_multicast() || matches!(ip, IpAddr::V4(ip) if ip.is_broadcast())
}

/// Whether a destination has no window: it is a multicast or broadcast address.
#[inline]
pub(super) fn has_no_window(to: &Destination) -> bool {
    is_group(to.addr.ip()) || to.qpn == MULTICAST_QPN
}

/// Returns the peer of a destination.
#[inline]
pub(super) fn peer_of(to: &Destination) -> Peer {
    (canonical(to.addr), index(to.qpn))
}

/// Returns the address of a peer in canonical form: an IPv4-mapped IPv6 address becomes an IPv4 address.
#[inline]
pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(_) => addr,
        SocketAddr::V6(addr) => SocketAddr::new(addr.ip().to_canonical(), addr.port()),
    }
}

/// Returns the IP fields for packets to a destination.
pub(super) fn ip_fields_of(to: &Destination) -> IpFields {
    IpFields {
        from: to.source,
        hop_limit: to.hop_limit,
        traffic_class: to.traffic_class,
    }
}

/// Returns the index of a queue pair on its port, which is the low byte of its number.
pub(super) fn index(qpn: u32) -> u8 {
    let [.., index] = qpn.to_be_bytes();
    index
}

/// Checks a request when it is posted (`ibv_post_send(3)`).
#[inline]
pub(super) fn check(kind: Kind, options: &Options, request: &WorkRequest) -> Result<(), Misuse> {
    let sends = matches!(
        request.op,
        Op::Send {
            invalidate: None,
            ..
        }
    );
    if kind == Kind::Ud && sends && request.destination.is_some() {
        return Ok(());
    }
    check_other(kind, options, request)
}

/// [`check`] without the fast path for a Send of UD.
fn check_other(kind: Kind, options: &Options, request: &WorkRequest) -> Result<(), Misuse> {
    let fits = match &request.op {
        Op::Send {
            invalidate: None, ..
        } => true,
        Op::Write { .. } => kind != Kind::Ud || options.one_sided,
        Op::Read { .. } => kind.reads() || (kind == Kind::Ud && options.one_sided),
        Op::LocalInvalidate { .. } | Op::Bind(_) => kind != Kind::Ud,
        Op::Send { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. } => kind.reads(),
        Op::AtomicWrite { .. } => false,
    };
    if !fits {
        return Err(Misuse::InvalidArgument(
            "an operation that datagram queue pairs of this kind do not support",
        ));
    }
    if !kind.is_connected() && !request.op.is_local() {
        let Some(to) = &request.destination else {
            return Err(Misuse::InvalidArgument(
                "a request on a datagram queue pair without an address handle",
            ));
        };
        let sends = matches!(request.op, Op::Send { .. });
        if (kind.is_reliable() || !sends) && is_group(to.addr.ip()) {
            return Err(Misuse::InvalidArgument(
                "a request to a multicast group that is not an unreliable Send",
            ));
        }
    }
    Ok(())
}

/// Whether one more datagram fits the batch.
pub(super) fn has_room(bytes: usize, out: &[TxDatagram]) -> bool {
    out.len() < bounds::DATAGRAM_BATCH && bytes < bounds::TX_BATCH_COPIED
}
