//! Work requests: what the application posts.

use smallvec::SmallVec;

use crate::error::Misuse;
use crate::wire::{Stag, To};

/// One element of a scatter/gather list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// Address in the region's own terms (`iova`, usually the virtual address).
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The region's local key.
    pub lkey: Stag,
}

/// A scatter/gather list.
pub type Sges = SmallVec<[Sge; 2]>;

/// Inline data of a work request, copied when it was posted.
pub type InlineData = SmallVec<[u8; 64]>;

/// Where the data of a work request lies.
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

    /// Gives back memory beside the request, if its data needed some: what is left is of no use.
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

/// Immediate data: the four bytes as they travel.
pub type Immediate = [u8; 4];

/// What a work request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Send to a posted receive.
    Send {
        /// Value that goes to the receive completion.
        imm: Option<Immediate>,
        /// The peer's STag that this Send invalidates.
        invalidate: Option<Stag>,
    },
    /// RDMA Write.
    Write {
        /// Where to.
        remote: Remote,
        /// Value that consumes a receive and goes to its completion.
        imm: Option<Immediate>,
    },
    /// An RDMA Write of one aligned 64-bit word that appears at once (`ibv_wr_atomic_write(3)`).
    AtomicWrite {
        /// Where to.
        remote: Remote,
    },
    /// RDMA Read.
    Read {
        /// Where from.
        remote: Remote,
    },
    /// Atomic add; the old value comes back.
    FetchAdd {
        /// The peer's 64-bit word.
        remote: Remote,
        /// What to add.
        add: u64,
    },
    /// Atomic compare and swap; the old value comes back.
    CompareSwap {
        /// The peer's 64-bit word.
        remote: Remote,
        /// What the word must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
    },
    /// Invalidate a local STag (memory window of type 2).
    LocalInvalidate {
        /// Which.
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
    /// The window's STag after it.
    pub rkey: Stag,
    /// Local key of the region under the window.
    pub mr: Stag,
    /// First byte, in the region's terms.
    pub addr: u64,
    /// Length in bytes; 0 unbinds.
    pub len: u64,
    /// Access rights of the window.
    pub access: super::access::Access,
}

impl Op {
    /// Whether the operation is done here, without a message to the peer.
    #[inline]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::LocalInvalidate { .. } | Self::Bind(_))
    }

    /// Whether the operation waits for an answer of the peer in an ORD slot.
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
    /// Our address that the datagram is sent from, if the program chose one.
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
    /// The application's number.
    pub id: u64,
    /// What to do.
    pub op: Op,
    /// Local data: source, or sink of a Read or atomic.
    pub payload: Payload,
    /// Make a completion on success too.
    pub signaled: bool,
    /// Ask the peer to raise a solicited event.
    pub solicited: bool,
    /// Wait for earlier Reads and atomics.
    pub fence: bool,
    /// For datagram queue pairs: the destination.
    pub destination: Option<Destination>,
    /// For XRC: the shared receive queue at the peer.
    pub srq: Option<u32>,
}

/// A function that fills in a request that exists already, for callees that take such a function.
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
            fence: false,
            destination: None,
            srq: None,
        }
    }
}

impl WorkRequest {
    /// Makes this request one of [`Self::blank`].
    #[inline]
    pub(crate) fn make_blank(&mut self) {
        let Self {
            id,
            op,
            payload,
            signaled,
            solicited,
            fence,
            destination,
            srq,
        } = self;
        *id = 0;
        *op = Op::Send {
            imm: None,
            invalidate: None,
        };
        *payload = Payload::Sges(SmallVec::new());
        (*signaled, *solicited, *fence) = (false, false, false);
        (*destination, *srq) = (None, None);
    }
}

/// A posted receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecvRequest {
    /// The application's number.
    pub id: u64,
    /// Where the message goes.
    pub sges: Sges,
}
