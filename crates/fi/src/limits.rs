//! Every limit: name, unit and reason.

use std::time::Duration;

/// Payload bytes up to which a message is sent at once, with its header, into a receive buffer of the peer's endpoint.
/// Longer messages are announced, and written straight into the memory of the receiving program, which from this length on
/// costs less than a copy at each end.
pub const EAGER: usize = 16 * 1024;
/// The longest message that is copied when it is posted (`fi_inject`), bytes. It is shorter than [`EAGER`], so that a burst
/// of them leaves room for other messages.
pub const INJECT: usize = 4096;
/// The longest message that is sent inline, bytes: the inline limit of the device.
pub const INLINE: usize = 1024;
/// The largest number of buffers of one message.
pub const IOV: usize = 4;
/// Receives that an endpoint posts to the device, for all peers together. Each has room for [`EAGER`] bytes and headers.
/// Pages that were never written take no memory.
pub const RECEIVES: usize = 128;
/// Buffers of [`EAGER`] bytes, for outgoing messages that are too long to be sent inline.
pub const SLOTS: usize = 64;
/// Work requests of an endpoint that have not completed.
pub const REQUESTS: usize = 1024;
/// Records of rendezvous that the device stores until they are read. If there are more, their writers wait.
pub const RECORDS: usize = 256;
/// Outstanding Reads of the one-sided queue pair: as many as the device answers for one peer.
pub const READS: u32 = 128;
/// Bytes of the messages that wait for a receive of the program, each counted with [`UNEXPECTED_EACH`]. Above this limit
/// messages stay in the receives of the device, and their senders wait.
pub const UNEXPECTED: usize = 64 << 20;
/// Bytes that a message which waits for a receive takes in addition to its content.
pub const UNEXPECTED_EACH: usize = 160;
/// Completions of the device that are handled in one call, so that the program gets its own completions soon.
pub const BATCH: usize = 16;
/// Entries of a completion queue that wait for the program. If there are more, sends are refused, so that a program that
/// never reads its completions does not use up the memory.
pub const ENTRIES: usize = 1 << 16;
/// Answers and grants that wait because the send queue is full. If there are more, atomic operations of peers wait.
pub const DEFERRED: usize = 4096;
/// The largest operand of an atomic operation, bytes. Operand, comparand and header are one message.
pub const ATOMIC: usize = 4096;
/// A buffer for many messages is returned to the program when fewer bytes than this remain in it. The program can set
/// another value.
pub const MULTI_RECV_MIN: usize = 64;
/// Longest message, bytes: that of the device.
pub const MESSAGE: usize = 1 << 30;
/// Peers that one address vector holds: each index has a name of 16 bytes, and the device speaks with 65,536 peers at once.
pub const PEERS: usize = 1 << 20;
/// How long a peer may be silent before operations with it fail, in milliseconds. MPI ranks that share a processor do not
/// answer for seconds.
pub const PEER_TIMEOUT_MS: u32 = 30_000;
/// How long a rendezvous may stay without a byte before its sender gets a message that shows whether it is still there.
pub const ASK_AFTER: Duration = Duration::from_secs(2);
/// How long a waiting call polls before it sleeps.
pub const SPIN: Duration = Duration::from_micros(50);
/// Bytes behind each structure that is allocated for the core of libfabric, which copies as many bytes as the structure has
/// in its own version.
pub const SLACK: usize = 512;
/// How long an endpoint waits, when it is closed, until its messages have arrived.
pub const LINGER: Duration = Duration::from_secs(2);
