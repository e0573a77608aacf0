//! The limits of the device, each with its unit, and with its source or reason where there is one.
//!
//! Limits of sockets, and time limits, are in the engine:
//!
//! | what | where | limit |
//! | --- | --- | --- |
//! | half-open connections (no MPA Request yet) per process | `limits.rs` `peer_descriptors` | 512, or a quarter of the descriptors if less |
//! | time until their MPA Request has arrived | `connect/startup.rs` `REQUEST_TIMEOUT` | 5 s |
//! | time until the program answers a Request | `connect/startup.rs` `ANSWER_TIMEOUT` | 120 s |
//! | unanswered connect requests of a listener | `cm/mod.rs` `backlog` | the backlog of `rdma_listen` |
//! | connections that a listener accepts at a time | `connect/half_open.rs` `ACCEPTS_PER_TURN` | 16 |
//! | closed connections per process, read until the peer closes | `net/drain.rs` `DRAIN_TIMEOUT` | as many as half-open connections; each 2 s |
//! | how long an exiting process waits until peers have acknowledged all data | `net/drain.rs` `EXIT_TIMEOUT` | 1 s |
//! | connections that may wait until the program sets the peer of their queue pair | `qp/dial.rs` `EARLY_CONNECTIONS_MAX` | 8 |
//! | bytes that a queue pair receives, and sends, before other sources have their turn | `net/tcp.rs` `RX_TURN_BYTES`, `TX_TURN_BYTES` | 1 MiB, 256 KiB |
//! | bytes of an incomplete FPDU per queue pair | `net/tcp.rs` `rest` | 65,543 |
//! | bytes that wait for the socket of a trunk | `net/trunk.rs` `PENDING_MAX` | 256 KiB (512 KiB for a stream that ends) and one batch |
//! | bytes of an incomplete frame of a trunk | `net/trunk.rs` `rest` | 66,571 |
//! | bytes on a trunk for a queue pair that has not read the peer's last message on its own connection | `net/tcp/seat.rs` `EARLY_MAX` | 4 KiB |
//! | bytes in the socket buffers of the kernel | `tcp_rmem`, `tcp_wmem`, `tcp_mem` of Linux | per socket and in total |
//! | lines of the log that peers cause | `log.rs` `LINES_PER_SECOND` | 20 a second |

/// Largest message, bytes. The verbs report it as `max_msg_sz`; one DDP message could carry 2^32 - 1.
pub const MAX_MESSAGE: u64 = 1 << 30;

/// Scatter/gather elements of one work request.
///
/// 32 is enough for the programs with the longest lists (UCX and libfabric use at most 30). A list of this length
/// fits one `sendmsg` together with its headers.
pub const MAX_SGE: u32 = 32;

/// Bytes of inline data in one work request. If a program requests more, the creation of its queue pair fails, as
/// programs that search for the limit expect.
pub const MAX_INLINE: u32 = 1024;
/// Bytes of inline data that a queue pair supports if its program requests fewer.
///
/// The work queue entries of network cards have room for some inline data, and some programs rely on it: rdma_xclient
/// sends 16 bytes without having requested them. 64 bytes fit into the smallest entry of common cards.
pub const MIN_INLINE: u32 = 64;
/// Bytes of inline data that a queue pair supports for each element of its longest list.
///
/// On common cards, and in rxe, inline data uses the space of the list: 16 bytes for each element. FUSEE requests lists of
/// 16 elements and no inline data, and writes 96 bytes inline.
pub const INLINE_PER_SGE: u32 = 16;

/// Work requests in one send or receive queue.
pub const MAX_WR: u32 = 32_768;

/// Receive requests in one shared receive queue.
pub const MAX_SRQ_WR: u32 = 65_536;

/// Entries of one completion queue.
pub const MAX_CQE: u32 = 4_194_304;

/// Bytes of device memory in one allocation, and in all allocations of a process together. Network cards have a
/// similar amount.
pub const DEVICE_MEMORY_MAX: usize = 256 * 1024;

/// Largest alignment of device memory, as a power of two: a page.
pub const DEVICE_MEMORY_ALIGN_LOG: u32 = 12;

/// RDMA Reads and atomics that one queue pair serves, or has outstanding, at the same time (IRD, ORD).
///
/// 128 is the largest number that the kernel's siw offers. Each slot uses some 100 bytes.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Bytes in a UD message: the largest value of `active_mtu` in verbs.
pub const UD_MTU: u32 = 4096;

/// Bytes of emulated global route header in front of every UD message (IBA: always 40).
pub const GRH_LEN: u32 = 40;

/// Largest ULPDU to send, in bytes. RFC 5044 section 3 allows 64,768. With the length field this value is a multiple
/// of 4, so it needs no padding. Two anywarp ends use it whatever the segment size of the path is.
pub const MULPDU_ANYWARP: usize = 64_766;

/// Smallest MULPDU to use, in bytes, however small the segments of the path are (RFC 5044 section 4.5: at least 128).
pub const MULPDU_MIN: usize = 128;

/// On a stream without CRCs, a segment of a request with at least this number of payload bytes is sent by reference instead of being
/// copied next to its header. A copy of fewer bytes costs less than another iovec entry.
///
/// With CRCs every segment is copied, so that its CRC matches the bytes that are sent even if the program changes its buffer meanwhile.
pub const COPY_LIMIT: usize = 16 * 1024;

/// Bytes that one transmit batch collects before it is handed to the socket.
pub const TX_BATCH_BYTES: usize = 1 << 20;

/// Bytes that one transmit batch copies before it is passed to the socket. Most of them are then still in the cache.
pub const TX_BATCH_COPIED: usize = 256 * 1024;

/// Bytes after which a batch accepts no further FPDU while many peers do not read. One FPDU may exceed it.
pub const TX_BATCH_SMALL: usize = 16 * 1024;

/// Connections of a process that may have a large batch waiting for their peers. Further connections use small batches.
/// So if no peer reads, these connections hold about 320 KiB each, and each further connection [`TX_BATCH_SMALL`] and one FPDU at most.
pub const TX_LARGE_WAITING: usize = 128;

/// Pieces (iovec entries) of one transmit batch. The kernel accepts at most 1,024.
pub const TX_BATCH_PIECES: usize = 96;

/// Bytes of a packet on a link with virtual lanes: the largest MTU of InfiniBand.
pub const QOS_PACKET: i64 = 4096;

/// A link with virtual lanes sends packets late if no thread of its senders ran when the packets were due. The link makes up
/// for at most this number of nanoseconds.
pub const QOS_CATCH_UP: u64 = 10_000_000;

/// A sender on a link with virtual lanes that does not send when it could may send the bytes later: at most this number of bytes, or
/// the number of bytes that the link carries in [`QOS_CATCH_UP`], if that is more.
pub const QOS_AHEAD: i64 = 256 * 1024;

/// A sender on a link that processes share counts as ended if for this number of nanoseconds it has not asked to send, and its process has
/// not accessed the link while the sender waited.
pub const QOS_SILENCE: u64 = 1_000_000_000;

/// An FPDU is received directly into user memory only if at least this number of its payload bytes has not arrived yet.
pub const DIRECT_MIN: usize = 8 * 1024;

/// Queued responses (Read, atomic, control) of a queue pair. A peer that exceeds its IRD is terminated before this
/// number is reached.
pub const RESPONSES_MAX: usize = 1024;

/// Number of requests, of both ends together, after which a connection on one host switches to shared memory. For datagrams it is the
/// number of datagrams that one UDP port has sent to another.
pub const CARRIER_AFTER: u32 = 64;

/// Bytes of each direction's ring in memory that two ends share, a power of two.
pub const CARRIER_RING: usize = 256 * 1024;

/// Connections and pairs of UDP ports of a process that use memory shared with their peers, together with the unanswered offers of such
/// memory. Others continue to use their sockets.
///
/// Each poll checks the memory of all of them.
pub const CARRIERS: usize = 64;

/// Queue pairs that two processes must have with each other before their streams share a trunk, unless `ANYWARP_TRUNK` is set.
pub const TRUNK_MIN: usize = 16;

/// Open trunks of a process from which on it accepts no others, and peer processes with which it may share a trunk.
pub const TRUNKS: usize = 256;

/// Open trunks between a process and one host from which on the process accepts no others from this host.
pub const TRUNKS_PEER: usize = 16;

/// If at least this number of requests is unacknowledged, a small request may wait to be sent together with others.
///
/// A program that waits for each answer before its next request never has so many.
pub const COALESCE_BEHIND: usize = 4;

/// Limits of the requests that wait to be sent together.
#[derive(Debug, Clone, Copy)]
pub struct Coalesce {
    /// Requests.
    pub max_requests: usize,
    /// Payload bytes of one request; a longer one does not wait.
    pub max_payload: u64,
}

/// The limits for a socket. One system call sends all of them.
pub const COALESCE_TCP: Coalesce = Coalesce {
    max_requests: 64,
    max_payload: 16 * 1024,
};
/// The limits for shared memory, where no system call is needed.
pub const COALESCE_SHM: Coalesce = Coalesce {
    max_requests: 32,
    max_payload: 4096,
};
/// Payload bytes of all waiting requests together, where each is assumed to be as long as the longest request of the last
/// post.
pub const COALESCE_BYTES: u64 = 128 * 1024;

/// When this end has executed this number of the peer's requests without acknowledging them, it sends an acknowledgement at once, without
/// waiting for other messages.
pub const ACK_AFTER: u32 = 32;

/// Least length in bytes of a Write that is acknowledged at once if the receiving program makes progress only by polls
/// (`ANYWARPDV_PROGRESS_POLLED`). Such a program often computes after it has received so much, and an acknowledgement that waits for the
/// program's next message or poll would come late. For shorter Writes a separate acknowledgement costs too much.
///
/// This limit does not apply to other receiving programs. The peer of such a program may post a Write, poll its completion queue until
/// the Write is acknowledged, and then read its own memory in a loop until the answer is there. The peer receives only while it polls
/// the completion queue, and an early acknowledgement would end these polls before the answer arrives.
pub const ACK_AT_ONCE: u64 = 16 * 1024;

/// Private data in a connection request or reply, bytes (RFC 5044 allows 512, of which RFC 6581 uses 4).
pub const PRIVATE_DATA_MAX: usize = 508;

/// Bytes of one MPA start-up frame.
pub const STARTUP_FRAME_MAX: usize = 20 + 512;

/// Largest payload of one datagram of a segmented message, bytes.
pub const DATAGRAM_PAYLOAD: usize = 61_440;

/// Smallest payload of one datagram of a segmented message, bytes, so that headers do not use most of the datagram.
pub const DATAGRAM_PAYLOAD_MIN: usize = 64;

/// Datagrams after which one call of `DatagramQp::poll_tx` cuts no others, so that these are passed to the socket. The parity datagram and
/// the repeated final datagrams that follow the last one may exceed this number.
pub const DATAGRAM_BATCH: usize = 64;

/// Bytes of buffers that a queue pair keeps for the next datagrams.
pub const DATAGRAM_SPARE: usize = 8 << 20;

/// Runs (contiguous ranges) of bytes of one message that has gaps.
///
/// A message that arrives in order has one run. Each datagram that overtakes another makes one more, and a lost
/// datagram makes its message fail. The limit bounds the memory for a sender that leaves gaps on purpose.
pub const DATAGRAM_RANGES: usize = 64;

/// The socket buffer that a peer is assumed to have until it reports one, bytes as the kernel counts them. A receiver
/// never reports less.
///
/// This is less than a third of what Linux gives a socket if an unprivileged user requests more than the default of
/// `net.core.rmem_max` allows.
pub const DATAGRAM_WINDOW: u32 = 128 * 1024;

/// Upper limit for the socket buffer that a peer reports.
pub const DATAGRAM_WINDOW_MAX: u32 = 64 << 20;

/// Peers whose windows one queue pair keeps.
pub const DATAGRAM_PEERS: usize = 1024;

/// How long a sender with a full window waits for a report of its peer.
///
/// This is a fifth of the time after which a receiver gives up an incomplete message ([`crate::datagram::options`],
/// 100 ms), so a lost report costs time but no message. It is longer than most time slices of a scheduler.
pub const DATAGRAM_STALL: std::time::Duration = std::time::Duration::from_millis(20);

/// Peers that one queue pair of reliable datagrams knows.
///
/// The entries of peers that send first are limited per network (the first 24 bits of an IPv4 address, or 48 of an IPv6
/// address) and per host (32 or 64 bits). A network may not have more entries than are free, and a host may not have more
/// than half as many as are free. So one network can use half of all entries, one host can use a third, and a second
/// network can use half of the remaining entries. Peers that have been silent for a minute are removed if needed.
pub const RD_PEERS: usize = 65_536;

/// Bytes of waiting packets of one peer, with their overhead. [`RD_WAITING`] is the limit for all peers. The
/// packets of one network may not occupy more bytes than are free.
pub const RD_WAITING_PEER: usize = 16 << 20;
/// See [`RD_WAITING_PEER`].
pub const RD_WAITING: usize = 64 << 20;

/// Bytes of answers to reliable peers that are sent and not acknowledged. The bytes to each peer are rounded up to a multiple of
/// [`RD_ANSWER_UNIT`]. A network may not have more than are free, and a host not more than half as many, so that one network can use half,
/// and one host a third. If there is no room for the next answer to a peer, the peer is probed from time to time; its reply to the probe
/// makes this end try again.
pub const RD_ANSWER_BYTES: usize = 256 << 20;
/// The unit in which these bytes are counted. Up to [`RD_ANSWER_FREE`] bytes to a peer are not counted, so that short answers need no
/// accounting. If there are more, all of them are counted.
pub const RD_ANSWER_UNIT: usize = 16 << 10;
/// See [`RD_ANSWER_UNIT`].
pub const RD_ANSWER_FREE: usize = 4 << 10;
/// Bytes of the packets to one reliable peer from the first unacknowledged packet on: twice its largest window, so that a lost packet
/// does not stop the others while it is sent again.
pub const RD_SENT_PEER: u64 = 2 * DATAGRAM_WINDOW_MAX as u64;

/// Queued answers to one reliable peer: twice the Reads and atomics that it may have outstanding.
pub const RD_ANSWERS_PEER: usize = 2 * MAX_RD_ATOMIC as usize;
/// Queued answers to all reliable peers. Beyond this number, each peer may have four queued answers.
pub const RD_ANSWERS: usize = 16_384;

/// Packets with wrong tokens per second from one host, after which further packets of unknown peers at that host that echo any
/// token are dropped. So a search for a token of 32 bits takes months, while a token is valid for a minute at most.
pub const RD_BAD_ECHOES: u16 = 256;

/// Queued answers to unknown peers. Further unknown peers get none.
pub const RD_CHALLENGES: usize = 256;

/// Sources for which one queue pair keeps state: senders of Write-Records, or of messages that consist of several datagrams.
pub const RECORD_SOURCES: usize = 16_384;

/// Incomplete messages of one queue pair. [`OPEN_MESSAGES_SOURCE`] is the limit for one source. Beyond this number, each reliable peer may
/// still have two.
pub const OPEN_MESSAGES: usize = 1024;
/// See [`OPEN_MESSAGES`].
pub const OPEN_MESSAGES_SOURCE: usize = 64;

/// Runs of bytes in all validity maps of a queue pair that the program has not released.
pub const RECORD_RANGES: usize = 1 << 20;

/// Runs of bytes of one Write-Record with gaps. If the datagrams of the longest message fit an MTU of 1500 bytes and 1 %
/// of them are lost, the message has about a quarter of this number.
pub const RECORD_GAPS: usize = 32_768;

/// Runs of bytes of all open messages of a queue pair. A run occupies 8 bytes of an allocation that may be twice as large as
/// its runs need.
///
/// These are 32 messages with the largest number of gaps, or 130 messages of 1 GiB with 1 % of losses at an MTU of
/// 1500 bytes. Beyond this limit each message may have [`DATAGRAM_RANGES`]. A datagram that would need another run is dropped. On a
/// reliable queue pair it waits instead.
pub const OPEN_RUNS: usize = 1 << 20;

/// Bytes of incomplete parity groups of one queue pair. Groups beyond this limit are not repaired.
pub const PARITY_BYTES: usize = 16 << 20;

/// Messages of a queue pair whose requests are stored for error reports, a power of two.
pub const MESSAGES_REMEMBERED: usize = 1024;

/// Errors that peers reported and the program has not read.
pub const ERRORS_WAITING: usize = 256;

/// Error reports sent to peers per second.
pub const ERRORS_A_SECOND: u32 = 64;

/// Peers whose cookies one queue pair keeps.
pub const COOKIES: usize = 1024;

/// Queued answers to the Reads of all peers of an unreliable queue pair, or twice as many as one peer may have (`max_reads` of
/// [`crate::datagram::options`]) if that is more. An answer has no data before it is sent, and takes some 300 bytes.
///
/// A queue pair receives many datagrams before it sends again. With this limit, each of 32 peers may have as many Reads as the default of
/// `max_reads` allows.
pub const READ_ANSWERS: usize = 512;

/// A Read Request without a cookie is padded to the length of its answer if the answer has at most this number of bytes.
pub const READ_PADDING: usize = 1024;

/// Datagrams that an injected fault delays at the same time. A fast link carries about this number in 100 ms. Further datagrams
/// are lost, as in a full queue. [`FAULT_DELAYED_BYTES`] limits their bytes.
pub const FAULT_DELAYED: usize = 65_536;
/// See [`FAULT_DELAYED`].
pub const FAULT_DELAYED_BYTES: usize = 64 << 20;
/// How long a datagram waits to be overtaken by the next one.
pub const FAULT_PASS: std::time::Duration = std::time::Duration::from_millis(10);
