//! Completions: the entries that the application polls.

use std::fmt;

use crate::wire::Stag;

/// Status of a completion; the numbers are those of `enum ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Success = 0,
    /// A local buffer was too short for the message, or the message too long for the queue pair.
    LocalLength = 1,
    /// The queue pair could not execute the operation.
    LocalQpOperation = 2,
    /// A local key did not allow the access.
    LocalProtection = 4,
    /// Flushed: the queue pair failed before the request was done.
    Flushed = 5,
    /// A memory window could not be bound.
    WindowBind = 6,
    /// The peer's response was invalid.
    BadResponse = 7,
    /// The peer's message could not be placed (receive side of an access error).
    LocalAccess = 8,
    /// The peer found the request invalid (too long for its receive, or not supported).
    RemoteInvalidRequest = 9,
    /// The peer's memory may not be accessed in this way.
    RemoteAccess = 10,
    /// The peer could not finish the request.
    RemoteOperation = 11,
    /// The peer did not answer.
    RetryExceeded = 12,
    /// The peer had no receive posted for too long.
    RnrRetryExceeded = 13,
    /// The peer aborted the operation.
    RemoteAborted = 16,
    /// Something else failed.
    General = 21,
}

impl Status {
    /// The status with the number `n`, if this stack uses it.
    pub fn from_number(n: u8) -> Option<Self> {
        Some(match n {
            0 => Self::Success,
            1 => Self::LocalLength,
            2 => Self::LocalQpOperation,
            4 => Self::LocalProtection,
            5 => Self::Flushed,
            6 => Self::WindowBind,
            7 => Self::BadResponse,
            8 => Self::LocalAccess,
            9 => Self::RemoteInvalidRequest,
            10 => Self::RemoteAccess,
            11 => Self::RemoteOperation,
            12 => Self::RetryExceeded,
            13 => Self::RnrRetryExceeded,
            16 => Self::RemoteAborted,
            21 => Self::General,
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "flushed",
            Self::WindowBind => "memory window bind error",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request error",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry counter exceeded",
            Self::RnrRetryExceeded => "receiver-not-ready retry counter exceeded",
            Self::RemoteAborted => "remote aborted",
            Self::General => "general error",
        })
    }
}

/// The completed operation; the numbers are those of `enum ibv_wc_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum WcOp {
    /// A Send.
    Send = 0,
    /// An RDMA Write.
    Write = 1,
    /// An RDMA Read.
    Read = 2,
    /// A compare and swap.
    CompareSwap = 3,
    /// A fetch and add.
    FetchAdd = 4,
    /// A memory window bind.
    Bind = 5,
    /// A local invalidate.
    LocalInvalidate = 6,
    /// An atomic write.
    AtomicWrite = 9,
    /// A receive that a Send used.
    Recv = 128,
    /// A receive that a Write with immediate data used.
    RecvWriteImm = 129,
    /// An arrived Write-Record, which used no receive (`IBV_WC_DRIVER1`).
    Record = 135,
}

/// One entry of a completion queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The `wr_id` of the request.
    pub wr_id: u64,
    /// The status.
    pub status: Status,
    /// The operation.
    pub op: WcOp,
    /// Length of the operation in bytes. For a receive it is the length of the Send, or of the Write with immediate data; on UD and RD
    /// that of a Send includes the 40 bytes of the route header. For a record it is the number of bytes that have arrived.
    pub byte_len: u32,
    /// The queue pair that it belongs to.
    pub qpn: u32,
    /// Sender's queue pair, on UD and RD.
    pub src_qpn: u32,
    /// Number of the message, on a datagram queue pair: of a request that was sent, or of a record. 0 otherwise.
    pub message: u32,
    /// Immediate data, in the byte order of the wire.
    pub imm: Option<[u8; 4]>,
    /// STag that the peer's Send invalidated.
    pub invalidated: Option<Stag>,
    /// Whether a route header precedes the data (UD and RD).
    pub grh: bool,
    /// The kind of route header, as drivers report it in the service level of a RoCE v2 datagram: bit 3 is set, and
    /// the lower bits are 1 for IPv6 or 2 for IPv4. IBA annex A17.4.5.1 requires this information, and verbs have no
    /// other field for it.
    pub sl: u8,
    /// Whether the peer requested a solicited event.
    pub solicited: bool,
    /// Vendor error: always 0, because this stack has no error codes of its own. The log gives the reason of a failure.
    pub vendor_err: u32,
}

impl Completion {
    /// A completion without data.
    pub fn new(wr_id: u64, status: Status, op: WcOp, qpn: u32) -> Self {
        Self {
            wr_id,
            status,
            op,
            byte_len: 0,
            qpn,
            src_qpn: 0,
            message: 0,
            imm: None,
            invalidated: None,
            grh: false,
            sl: 0,
            solicited: false,
            vendor_err: 0,
        }
    }
}
