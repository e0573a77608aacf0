//! Messages on their way out, and where they go.

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

/// How packets to a peer travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) from: Option<IpAddr>,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// The message that is being cut into datagrams.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) message: Message,
    /// Number of its request; an answer to a peer has none.
    pub(super) request: Option<u64>,
    /// It asks for an answer, which completes the request.
    pub(super) asks: bool,
    /// What the reliability layer knows it by.
    pub(super) tag: Tag,
    pub(super) to: Destination,
    /// What all its datagrams have; the offset is set for each.
    pub(super) shim: Shim,
    /// Payload bytes of a datagram.
    pub(super) segment: u64,
    /// The exclusive or of the datagrams of the group under way, how many they are, and where it begins.
    pub(super) group: (Vec<u8>, u8, u32),
    /// Since when it waits for its peer.
    pub(super) waits: Option<Duration>,
}

/// Bytes in front of the payload of any datagram, with an immediate.
pub(super) const HEAD: usize = 26 + 8 + 18;

impl Current {
    /// Whose pace it follows.
    pub(super) fn peer(&self) -> Option<Peer> {
        (!is_many(&self.to)).then(|| peer_of(&self.to))
    }

    /// Bytes of its next datagram, about: no fewer than it has.
    pub(super) fn next_len(&self) -> usize {
        let left = self.message.len.saturating_sub(self.message.sent);
        let len = usize::try_from(left.min(self.segment)).unwrap_or(usize::MAX / 2);
        len + HEAD
    }
}

/// Messages that go to one peer of a reliable queue pair.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) queue: VecDeque<Current>,
    pub(super) ready: bool,
    /// How many of the messages are answers.
    pub(super) answers: usize,
}

/// The end of a Write-Record, to be repeated.
#[derive(Debug)]
pub(super) struct Trailer {
    pub(super) datagram: TxDatagram,
    pub(super) left: u8,
}

/// What became of the request whose turn it was.
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and every message would pay for a box"
)]
pub(super) enum Taken {
    /// Its message is to be cut.
    Message(Current),
    /// It is over, or has failed.
    Done,
    /// There is none, or it has to wait.
    Nothing,
}

/// In a tag: it is no number of the send queue.
pub(super) const OURS: Tag = 1 << 63;

/// Whether an address is that of many.
#[inline]
pub fn is_group(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_multicast() || matches!(ip, IpAddr::V4(ip) if ip.is_broadcast())
}

/// Whether a destination has no pace: a group, or everybody on a subnet.
#[inline]
pub(super) fn is_many(to: &Destination) -> bool {
    is_group(to.addr.ip()) || to.qpn == MULTICAST_QPN
}

/// A destination as a peer is known by.
#[inline]
pub(super) fn peer_of(to: &Destination) -> Peer {
    (canonical(to.addr), index(to.qpn))
}

/// An address as peers are known by: that of an IPv4 host is not one of IPv6.
#[inline]
pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(_) => addr,
        SocketAddr::V6(addr) => SocketAddr::new(addr.ip().to_canonical(), addr.port()),
    }
}

/// How a datagram to a destination travels.
pub(super) fn way_of(to: &Destination) -> Way {
    Way {
        from: to.source,
        hop_limit: to.hop_limit,
        traffic_class: to.traffic_class,
    }
}

/// Which of the queue pairs of a port a number names.
pub(super) fn index(qpn: u32) -> u8 {
    let [.., index] = qpn.to_be_bytes();
    index
}

/// What `ibv_post_send(3)` checks at once.
pub(super) fn check(kind: Kind, options: &Options, request: &WorkRequest) -> Result<(), Misuse> {
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
            "an operation that datagram queue pairs of this kind do not do",
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
                "something else than an unreliable Send to a group",
            ));
        }
    }
    Ok(())
}

/// Whether a batch takes one more datagram.
pub(super) fn has_room(bytes: usize, out: &[TxDatagram]) -> bool {
    out.len() < bounds::DATAGRAM_BATCH && bytes < bounds::TX_BATCH_COPIED
}
