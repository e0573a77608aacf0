//! Work requests: the entries that the application posts.

use smallvec::SmallVec;

use crate::error::Misuse;
use crate::wire::{Stag, To};

/// One element of a scatter/gather list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// Address in the address space of the region (`iova`, usually the virtual address).
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The region's local key.
    pub lkey: Stag,
}

/// A scatter/gather list.
pub type Sges = SmallVec<[Sge; 2]>;

/// Inline data of a work request, copied when the request was posted.
pub type InlineData = SmallVec<[u8; 64]>;

/// The data of a work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// In registered memory.
    Sges(Sges),
    /// In the request itself.
    Inline(InlineData),
}

impl Payload {
    /// No data at all.
    pub fn empty() -> Self {
        Self::Sges(Sges::new())
    }

    /// Bytes in total.
    #[inline]
    pub fn len(&self) -> u64 {
        match self {
            Self::Sges(sges) => sges.iter().map(|s| u64::from(s.len)).sum(),
            Self::Inline(data) => data.len() as u64,
        }
    }

    /// Makes the data inline and empty, and returns it. Inline data of an earlier request is overwritten in place,
    /// because moving [`InlineData`] costs more than filling it.
    #[inline]
    pub fn make_inline(&mut self) -> &mut InlineData {
        if !matches!(self, Self::Inline(data) if !data.spilled()) {
            *self = Self::Inline(InlineData::new());
        }
        match self {
            Self::Inline(data) => {
                data.clear();
                data
            }
            #[expect(clippy::unreachable, reason = "the data was just made inline")]
            Self::Sges(_) => unreachable!(),
        }
    }

    /// Frees memory that the data uses outside the request. The data is not valid afterwards.
    #[inline]
    pub(crate) fn forget_allocation(&mut self) {
        let allocates = match self {
            Self::Sges(sges) => sges.spilled(),
            Self::Inline(data) => data.spilled(),
        };
        if allocates {
            *self = Self::empty();
        }
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// The peer's STag (`rkey`).
    pub rkey: Stag,
    /// Tagged offset: the peer's virtual address for ordinary regions.
    pub to: To,
}

/// Immediate data: four bytes in the order of the wire.
pub type Immediate = [u8; 4];

/// The operation of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Send to a posted receive.
    Send {
        /// Immediate data for the receive completion.
        imm: Option<Immediate>,
        /// The peer's STag that this Send invalidates.
        invalidate: Option<Stag>,
    },
    /// RDMA Write.
    Write {
        /// Destination memory.
        remote: Remote,
        /// Immediate data, which consumes a receive and is reported in its completion.
        imm: Option<Immediate>,
    },
    /// An RDMA Write of one aligned 64-bit word, which is written atomically (`ibv_wr_atomic_write(3)`).
    AtomicWrite {
        /// Destination word.
        remote: Remote,
    },
    /// RDMA Read.
    Read {
        /// Source memory.
        remote: Remote,
    },
    /// Atomic add. The response contains the old value.
    FetchAdd {
        /// The peer's 64-bit word.
        remote: Remote,
        /// The value to add.
        add: u64,
    },
    /// Atomic compare and swap. The response contains the old value.
    CompareSwap {
        /// The peer's 64-bit word.
        remote: Remote,
        /// The value that the word must have.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Invalidate a local STag (memory window of type 2).
    LocalInvalidate {
        /// The STag.
        stag: Stag,
    },
    /// Bind a memory window.
    Bind(Bind),
}

/// A memory window bind, type 1 or 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The window's STag before the bind.
    pub window: Stag,
    /// The window's STag after the bind.
    pub rkey: Stag,
    /// Local key of the region under the window.
    pub mr: Stag,
    /// First byte, in the address space of the region.
    pub addr: u64,
    /// Length in bytes; 0 unbinds.
    pub len: u64,
    /// Access rights of the window.
    pub access: super::access::Access,
}

impl Op {
    /// Whether the operation is executed locally, without a message to the peer.
    #[inline]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate { .. } | Self::Bind(_))
    }

    /// Whether the operation has a response and uses an ORD slot.
    pub fn is_read_or_atomic(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. }
        )
    }
}

/// The destination of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Address and port.
    pub addr: std::net::SocketAddr,
    /// Local address that the datagram is sent from, if the program chose one.
    pub source: Option<std::net::IpAddr>,
    /// Queue pair number at that address.
    pub qpn: u32,
    /// The key that the destination queue pair must have.
    pub qkey: u32,
    /// Hop limit or time to live, 0 for the system's default.
    pub hop_limit: u8,
    /// Traffic class or type of service.
    pub traffic_class: u8,
}

/// A posted send-side work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkRequest {
    /// The `wr_id`.
    pub id: u64,
    /// The operation.
    pub op: Op,
    /// Local data: source, or sink of a Read or atomic.
    pub payload: Payload,
    /// Whether the request has a completion on success, too.
    pub signaled: bool,
    /// Whether to ask the peer to raise a solicited event.
    pub solicited: bool,
    /// For reliable datagrams: whether the program does not need the completion soon, so that the peer may delay the acknowledgement
    /// and send it together with other packets.
    pub ack_later: bool,
    /// Whether the request waits until earlier Reads and atomics are complete.
    pub fence: bool,
    /// For datagram queue pairs: the destination.
    pub destination: Option<Destination>,
    /// For XRC: the shared receive queue at the peer.
    pub srq: Option<u32>,
}

/// Wraps a request for callees that take a function instead of a request. The returned function replaces its argument by the request. If
/// `request` is an error, the function returns that error.
#[inline]
pub fn given(
    request: Result<WorkRequest, Misuse>,
) -> impl FnOnce(&mut WorkRequest) -> Result<(), Misuse> {
    move |into| {
        *into = request?;
        Ok(())
    }
}

impl WorkRequest {
    /// The request that `fill` writes.
    pub fn build(fill: impl FnOnce(&mut Self) -> Result<(), Misuse>) -> Result<Self, Misuse> {
        let mut request = Self::blank();
        fill(&mut request)?;
        Ok(request)
    }

    /// A Send of length 0 without a completion: the initial value of a request.
    #[inline]
    pub fn blank() -> Self {
        Self {
            id: 0,
            op: Op::Send {
                imm: None,
                invalidate: None,
            },
            payload: Payload::Sges(SmallVec::new()),
            signaled: false,
            solicited: false,
            ack_later: false,
            fence: false,
            destination: None,
            srq: None,
        }
    }
}

impl WorkRequest {
    /// Makes this request equal to [`Self::blank`], except for its payload. The payload of an earlier request may stay, because
    /// posting sets the payload of every request.
    #[inline]
    pub(crate) fn make_blank(&mut self) {
        let Self {
            id,
            op,
            payload: _,
            signaled,
            solicited,
            ack_later,
            fence,
            destination,
            srq,
        } = self;
        *id = 0;
        *op = Op::Send {
            imm: None,
            invalidate: None,
        };
        (*signaled, *solicited, *fence) = (false, false, false);
        *ack_later = false;
        (*destination, *srq) = (None, None);
    }
}

/// A posted receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecvRequest {
    /// The `wr_id`.
    pub id: u64,
    /// The memory for the message.
    pub sges: Sges,
}

impl RecvRequest {
    /// The receive that `fill` writes.
    #[inline]
    pub fn build(fill: impl FnOnce(&mut Self) -> Result<(), Misuse>) -> Result<Self, Misuse> {
        let mut request = Self {
            id: 0,
            sges: Sges::new(),
        };
        fill(&mut request)?;
        Ok(request)
    }
}
