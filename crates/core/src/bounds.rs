//! Every limit: name, unit, source and reason.
//!
//! The limits of the card are here. Limits of sockets and times are in the engine:
//!
//! | what | where | limit |
//! | --- | --- | --- |
//! | half-open connections (no MPA Request yet), in a process | `limits.rs` `peer_descriptors` | 512, or a quarter of the descriptors |
//! | time until their MPA Request has arrived | `connect/startup.rs` `REQUEST_TIMEOUT` | 5 s |
//! | time until the program answers a Request | `connect/startup.rs` `ANSWER_TIMEOUT` | 120 s |
//! | Requests that wait for the program, of a listener | `cm/mod.rs` `backlog` | as `rdma_listen` says |
//! | connections accepted in one turn | `connect/half_open.rs` `ACCEPTS_PER_TURN` | 16 |
//! | closed connections that are drained, in a process | `net/drain.rs` `DRAIN_TIMEOUT` | 512, each 2 s |
//! | how long a process that ends waits for them | `net/drain.rs` `EXIT_TIMEOUT` | 1 s |
//! | connections that may wait until a queue pair names their peer | `qp/dial.rs` `PARKED_MAX` | 8 |
//! | bytes received, and sent, in one turn of a queue pair | `net/tcp.rs` `RX_TURN_BYTES`, `TX_TURN_BYTES` | 1 MiB, 256 KiB |
//! | bytes of an FPDU that is not complete, of a queue pair | `net/tcp.rs` `rest` | 65,542 |
//! | bytes that wait in the kernel | `tcp_rmem`, `tcp_wmem`, `tcp_mem` of Linux | per socket and in all |
//! | lines of the log that peers cause | `log.rs` `LINES_PER_SECOND` | 20 a second |

/// Largest message, bytes. The verbs report it as `max_msg_sz`; one DDP message could carry 2^32 - 1.
pub const MAX_MESSAGE: u64 = 1 << 30;

/// Scatter/gather elements of one work request.
///
/// 32 covers the programs that ask for most (UCX and libfabric ask for at most 30); a list that long still fits one
/// `sendmsg` together with its headers.
pub const MAX_SGE: u32 = 32;

/// Bytes of inline data in one work request; above it queue pair creation fails, as programs that probe expect.
pub const MAX_INLINE: u32 = 1024;
/// Bytes of inline data that a queue pair takes if its program asks for fewer.
///
/// A card's work queue elements have room for some, and programs have come to count on it: rdma_xclient sends 16 without
/// having asked. 64 is what the smallest element of common cards leaves.
pub const MIN_INLINE: u32 = 64;

/// Work requests in one send or receive queue.
pub const MAX_WR: u32 = 32_768;

/// Receive requests in one shared receive queue.
pub const MAX_SRQ_WR: u32 = 65_536;

/// Entries of one completion queue.
pub const MAX_CQE: u32 = 4_194_304;

/// Bytes of device memory in one piece, and in all pieces of a process together: what a card has is of this order.
pub const DEVICE_MEMORY_MAX: usize = 256 * 1024;

/// Strictest alignment that device memory is given, as a power of two: a page.
pub const DEVICE_MEMORY_ALIGN_LOG: u32 = 12;

/// RDMA Reads and atomics that one queue pair serves, or has outstanding, at once (IRD, ORD).
///
/// 128 is what the kernel's siw offers at most; each slot costs some 100 bytes once used.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Bytes in a UD message: the largest `active_mtu` that verbs can name.
pub const UD_MTU: u32 = 4096;

/// Bytes of emulated global route header in front of every UD message (IBA: always 40).
pub const GRH_LEN: u32 = 40;

/// Largest ULPDU that we send, in bytes. RFC 5044 section 3 allows 64,768; with its length field this one is a multiple
/// of 4, and needs no padding. Two anywarp ends use it whatever the segment size of the path is.
pub const MULPDU_ANYWARP: usize = 64_766;

/// Smallest MULPDU that we use, in bytes, whatever the segment size of the path is (RFC 5044 section 5: at least 128).
pub const MULPDU_MIN: usize = 128;

/// Payload bytes from which a segment is sent by reference instead of being copied beside its header.
///
/// Below, a copy costs less than another iovec entry and makes the CRC cover exactly what is sent.
pub const COPY_LIMIT: usize = 16 * 1024;

/// Bytes that one transmit batch collects before it is handed to the socket.
pub const TX_BATCH_BYTES: usize = 1 << 20;

/// Bytes that one transmit batch copies before it is handed to the socket: they should still be in the cache then.
pub const TX_BATCH_COPIED: usize = 256 * 1024;

/// Bytes after which a batch takes no further FPDU when many peers do not take what they were sent: one FPDU is above it.
pub const TX_BATCH_SMALL: usize = 16 * 1024;

/// Connections of a process that may have a large batch waiting for their peers, before others get small ones. Peers
/// that never read can bind this many times some 320 KiB, and one FPDU for each further connection.
pub const TX_LARGE_WAITING: usize = 128;

/// Pieces (iovec entries) of one transmit batch; the kernel takes at most 1,024.
pub const TX_BATCH_PIECES: usize = 96;

/// Payload bytes that must still be missing before an FPDU is received straight into user memory.
pub const DIRECT_MIN: usize = 8 * 1024;

/// Responses (Read, atomic, control) that a queue pair holds for sending; a peer that asks for more than its IRD is
/// terminated before this is reached.
pub const RESPONSES_MAX: usize = 1024;

/// Requests of both ends after which a connection on one host is worth memory that its ends share.
pub const CARRIER_AFTER: u32 = 64;

/// Bytes of each direction's ring in memory that two ends share, a power of two.
pub const CARRIER_RING: usize = 256 * 1024;

/// Connections of a process that share memory with their peers; others stay with their sockets.
///
/// Each poll looks at all of them.
pub const CARRIERS: usize = 64;

/// Number of unacknowledged requests from which on a small request may wait to be sent together with others.
///
/// A program that waits for one answer before its next request never has so many.
pub const COALESCE_BEHIND: usize = 4;

/// Limits of the requests that wait to be sent together.
#[derive(Debug, Clone, Copy)]
pub struct Coalesce {
    /// Requests.
    pub max_requests: usize,
    /// Payload bytes of one request; a longer one does not wait.
    pub max_payload: u64,
}

/// The limits for a socket, where one system call sends all of them.
pub const COALESCE_TCP: Coalesce = Coalesce {
    max_requests: 64,
    max_payload: 16 * 1024,
};
/// The limits for shared memory, where no system call is needed.
pub const COALESCE_SHM: Coalesce = Coalesce {
    max_requests: 32,
    max_payload: 4096,
};
/// Payload bytes of all waiting requests together, each counted with the length of the longest that was posted last.
pub const COALESCE_BYTES: u64 = 128 * 1024;

/// Number of done requests after which an acknowledgement is sent at once, without waiting for other messages.
pub const ACK_AFTER: u32 = 32;

/// Private data in a connection request or reply, bytes (RFC 5044 allows 512 with the 4 of RFC 6581 inside).
pub const PRIVATE_DATA_MAX: usize = 508;

/// Bytes of one MPA start-up frame.
pub const STARTUP_FRAME_MAX: usize = 20 + 512;

/// Payload bytes of one datagram of a segmented (UC) message.
pub const DATAGRAM_PAYLOAD: usize = 61_440;

/// Payload bytes of one datagram of a segmented message at least, so that headers never outweigh data by far.
pub const DATAGRAM_PAYLOAD_MIN: usize = 64;

/// Datagrams that one call makes before they are handed to the socket.
pub const DATAGRAM_BATCH: usize = 64;

/// Bytes of buffers that a queue pair keeps for the next datagrams.
pub const DATAGRAM_SPARE: usize = 8 << 20;

/// Runs of bytes of a message that arrived with gaps between them.
///
/// In order there is one; each datagram that overtakes another makes one more, and a lost
/// one makes its message fail. A sender that leaves gaps on purpose gets no more memory than this.
pub const DATAGRAM_RANGES: usize = 64;

/// Room that a peer's socket is taken to have before it said so, bytes as the kernel counts them; less is never assumed.
///
/// Half of what Linux gives a socket whose owner asks for more than an ordinary user may have.
pub const DATAGRAM_WINDOW: u32 = 128 * 1024;

/// Room that a peer is believed to have at most.
pub const DATAGRAM_WINDOW_MAX: u32 = 64 << 20;

/// Peers whose pace one queue pair remembers.
pub const DATAGRAM_PEERS: usize = 1024;

/// How long a sender waits for a report of a peer that has all that it takes at once.
///
/// A fifth of the time after which a receiver gives up a message of which nothing more comes ([`crate::datagram::options`],
/// 100 ms), so that a report which is lost costs time and never a message; longer than most turns of a scheduler.
pub const DATAGRAM_STALL: std::time::Duration = std::time::Duration::from_millis(20);

/// Peers that one queue pair of reliable datagrams knows.
///
/// A peer that comes of itself is taken only while its network (the first 24 bits of an IPv4 address, 48 of an IPv6
/// address) has fewer than there are places left, and its host (32 or 64 bits) fewer than half of that: one network can
/// have half of all places and one host a third, the next network half of the rest. Who has been silent for a minute
/// gives way.
pub const RD_PEERS: usize = 65_536;

/// Bytes of packets from one peer, and from all, that wait for others before them or for a receive, with what keeping
/// them costs; one network can have no more than is left.
pub const RD_WAITING_PEER: usize = 16 << 20;
/// See [`RD_WAITING_PEER`].
pub const RD_WAITING: usize = 64 << 20;

/// Answers that wait to be sent to one reliable peer: twice the Reads and atomics that it may have outstanding.
pub const RD_ANSWERS_PEER: usize = 2 * MAX_RD_ATOMIC as usize;
/// Answers that wait to be sent to all reliable peers. When there are as many, each peer may have four more.
pub const RD_ANSWERS: usize = 16_384;

/// Packets a second that echo wrong tokens and seem to come from one host, after which none of its packets is believed that
/// is not of a peer which is known: to find a token of 32 bits takes months then, and it is good for a minute.
pub const RD_BAD_ECHOES: u16 = 256;

/// Answers to strangers that wait to be sent; more strangers at once get none.
pub const RD_CHALLENGES: usize = 256;

/// Sources whose messages of several datagrams, or recorded ones, one queue pair remembers.
pub const RECORD_SOURCES: usize = 16_384;

/// Messages of which not everything has arrived, of one queue pair and of one source.
pub const OPEN_MESSAGES: usize = 1024;
/// See [`OPEN_MESSAGES`].
pub const OPEN_MESSAGES_SOURCE: usize = 64;

/// Runs of bytes in all validity maps of a queue pair that wait for the program.
pub const RECORD_RANGES: usize = 1 << 20;

/// Runs of bytes of one recorded message that arrived with gaps between them: a loss of 1 % of the datagrams of the
/// longest message makes half as many.
pub const RECORD_GAPS: usize = 32_768;

/// Runs of bytes of all messages of a queue pair that are open, 8 bytes each, in a room of up to twice as many.
///
/// Thirty-two messages with as many gaps as one may have, or what a loss of 1 % makes of 130 messages of 1 GiB. Beyond
/// it a message has [`DATAGRAM_RANGES`] at most, whatever others have; what would be one more is dropped, and waits on
/// a reliable queue pair.
pub const OPEN_RUNS: usize = 1 << 20;

/// Bytes of parity groups that are not complete, of one queue pair. What does not fit is not repaired.
pub const PARITY_BYTES: usize = 16 << 20;

/// Messages of a queue pair whose requests are remembered for error reports, a power of two.
pub const MESSAGES_REMEMBERED: usize = 1024;

/// Errors that peers reported and the program has not read.
pub const ERRORS_WAITING: usize = 256;

/// Errors that are reported to peers, a second.
pub const ERRORS_A_SECOND: u32 = 64;

/// Peers whose cookies one queue pair keeps.
pub const COOKIES: usize = 1024;

/// Bytes of payload, and no more, that a request may be followed by to be worth an answer of its size.
pub const READ_PADDING: usize = 1024;

/// Datagrams that wait because a fault delays them, and their bytes: what 100 ms of a fast link hold. More are lost, as
/// in a queue that is full.
pub const FAULT_DELAYED: usize = 65_536;
/// See [`FAULT_DELAYED`].
pub const FAULT_DELAYED_BYTES: usize = 64 << 20;
/// How long a datagram waits for the one that is to pass it.
pub const FAULT_PASS: std::time::Duration = std::time::Duration::from_millis(10);
