//! All limits, with unit and reason.

use std::time::Duration;

/// The longest message in bytes that is sent with its header at once, into a receive buffer of the peer's endpoint. Longer
/// messages are announced and written directly to the memory of the receiving program, which for this length costs less than
/// a copy at each end.
pub const EAGER: usize = 16 * 1024;
/// The longest message in bytes that is copied when it is posted (`fi_inject`). MPI libraries inject all messages up to this length, and
/// need no acknowledgement before `MPI_Send` or `MPI_Wait` returns.
pub const INJECT: usize = EAGER;
/// The longest write in bytes that is copied although the program does not inject it. Registering longer memory costs less than the copy, and the
/// memory for copies is shared with messages.
pub const COPIED_WRITE: usize = 4096;
/// The longest message in bytes that is sent inline: the inline limit of the device.
pub const INLINE: usize = 1024;
/// The largest number of buffers of one message.
pub const IOV: usize = 4;
/// The number of receives that an endpoint posts to the device, for all peers together. Each has room for [`EAGER`] bytes and
/// headers. Pages that were never written use no memory.
pub const RECEIVES: usize = 128;
/// The number of used receives that are posted again by one call, which costs much less than a call for each.
pub const REPOST: usize = 8;
/// The number of buffers of [`EAGER`] bytes for outgoing messages that are too long to be sent inline.
pub const SLOTS: usize = 64;
/// The most work requests of an endpoint that have not completed.
pub const REQUESTS: usize = 1024;
/// The most records of announced messages that the device stores until they are read. Beyond that, the writers have to wait.
pub const RECORDS: usize = 256;
/// The most outstanding Reads of each datagram queue pair of an endpoint, and the most responses to Reads that it queues for one peer.
pub const READS: u32 = 128;
/// The most bytes of unexpected messages (messages for which the program has not posted a receive yet) that are stored, where each
/// message counts [`UNEXPECTED_EACH`] bytes more. Beyond that, messages stay in the receives of the device, and their senders
/// have to wait.
pub const UNEXPECTED: usize = 64 << 20;
/// The *share* of a sender, which is the number of bytes of unexpected messages that it may store here, is half of the difference
/// between this number and the bytes that all senders have stored. The rest of [`UNEXPECTED`] is for messages that were sent
/// before their sender knew that its share is used up.
pub const SHARED: usize = 32 << 20;
/// The smallest share of a sender in bytes.
pub const SHARE_MIN: usize = 256 << 10;
/// The most bytes that a sender may store after the notice that its share is used up. An endpoint of this library sends at most
/// [`REQUESTS`] messages of [`INLINE`] bytes and [`SLOTS`] of [`EAGER`] bytes until it reads the notice, and about as many
/// while it handles the completions before the notice.
pub const LATE: usize = 8 << 20;
/// The most announced messages to a peer where the share of this endpoint is used up. Beyond that, sends to this peer are refused
/// (`FI_EAGAIN`).
pub const ANNOUNCED: usize = 4096;
/// The most injected messages, each of at most [`INJECT`] bytes, that an endpoint stores for peers where its share is used up.
pub const COPIES: usize = 4096;
/// The bytes that a stored message uses in addition to its content.
pub const UNEXPECTED_EACH: usize = 160;
/// The most completions of the device that one call handles, so that the program gets its own completions soon.
pub const BATCH: usize = 16;
/// The most entries of a completion queue. Beyond that, sends are refused, so that a program that never reads its completions
/// does not exhaust the memory.
pub const ENTRIES: usize = 1 << 16;
/// The most answers and grants that are queued while the send queue is full. Beyond that, messages and atomic operations of peers
/// have to wait.
pub const DEFERRED: usize = 4096;
/// The largest operand of an atomic operation in bytes. Operand, comparand and header are sent in one message.
pub const ATOMIC: usize = 4096;
/// The default of `FI_OPT_MIN_MULTI_RECV`: a multi-receive buffer is returned to the program when fewer bytes than this remain in it.
pub const MULTI_RECV_MIN: usize = 64;
/// The longest message in bytes, and the longest read or write. No host has so much memory.
pub const MESSAGE: usize = 1 << 40;
/// The longest request to the device in bytes. Longer messages, reads and writes consist of several requests, one after the other.
pub const PIECE: usize = 1 << 30;
/// The most operations that wait because of an operation with `FI_FENCE`. Beyond that, operations are refused (`FI_EAGAIN`).
pub const POSTPONED: usize = 1024;
/// The most peers of an address vector. Each has a name of 16 or 28 bytes, and the device communicates with 65,536 peers at the same
/// time.
pub const PEERS: usize = 1 << 20;
/// The milliseconds without a response after which operations with a peer fail. MPI ranks that share a processor can take seconds to
/// respond.
pub const PEER_TIMEOUT_MS: u32 = 30_000;
/// The messages to and from a peer after which the endpoint makes a link (a reliable connection) to it. Each [`EAGER`] bytes of a long
/// message count as one more.
pub const BUSY: i32 = 64;
/// The messages to and from a peer until the next offer of a link, after the peer has refused one or this endpoint had too many.
pub const REFUSED: i32 = 1024;
/// The most links of an endpoint. Each has memory for 2 × [`LINK_DEPTH`] messages, and on one host the rings of the connection.
/// Pages that were never written use no memory.
pub const LINKS: usize = 8;
/// The number of receives of a link, and the most messages on it that have not completed. The peer acknowledges 32 messages together;
/// with half this number the sender would have to wait for each acknowledgement.
pub const LINK_DEPTH: usize = 64;
/// The most memory windows of a link that are being bound at the same time. While there are so many, further announced messages of the
/// link's peer are written by datagrams.
pub const BINDS: usize = 32;
/// The longest message in bytes that is sent inline on a link.
pub const LINK_INLINE: usize = 256;
/// The most peers whose messages are counted (see [`BUSY`]), and the most peers whose questions an endpoint collects.
pub const COUNTED: usize = 1024;
/// The shortest interval between two probes of the peers that operations wait for.
pub const ASK_AFTER: Duration = Duration::from_secs(2);
/// If at least this number of requests have not completed, or fewer than a quarter of the [`SLOTS`] are free, all messages are to be
/// acknowledged soon. Otherwise messages whose completion was already reported to the program may be acknowledged later.
pub const LATER: usize = 64;
/// The number of polls after which the time is compared with [`ASK_AFTER`]. Reading the clock takes a considerable part of the time of
/// a poll that finds nothing.
pub const ASK_CALLS: u32 = 64;
/// The time that a waiting call polls before it sleeps.
pub const SPIN: Duration = Duration::from_micros(50);
/// The bytes added to each structure that is allocated for the core of libfabric, which copies as many bytes as the structure
/// has in the core's version.
pub const SLACK: usize = 512;
/// The most batches of completions that are handled before a wait. If there are more, the program does not wait but calls again.
pub const BATCHES_BEFORE_WAIT: usize = 256;
/// The time after which closing an endpoint stops waiting for its messages to arrive, if none of them arrives within it.
pub const LINGER: Duration = Duration::from_secs(2);
/// The longest time for which closing an endpoint waits for its messages to arrive, even if they arrive one after the other.
pub const LINGER_MOST: Duration = Duration::from_secs(10);
