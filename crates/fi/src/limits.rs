//! Every limit: name, unit and reason.

use std::time::Duration;

/// Payload bytes of a message that goes at once, with its header, into a receive of the peer. Longer ones are announced, and
/// written straight into the memory that receives them: from here on that costs less than a copy at each end.
pub const EAGER: usize = 16 * 1024;
/// Bytes of a message that is copied when it is posted (`fi_inject`): what fits a slot, less than [`EAGER`] so that a burst
/// of them leaves room for others.
pub const INJECT: usize = 4096;
/// Bytes of a message that a work request carries itself: the most that the device takes inline.
pub const INLINE: usize = 1024;
/// Elements of a list of buffers in one message.
pub const IOV: usize = 4;
/// Receives posted to the device, for all peers of an endpoint together. Each takes [`EAGER`] and headers; pages that no
/// message has reached take no memory.
pub const RECEIVES: usize = 128;
/// Buffers for messages that are sent and too long for a work request, of [`EAGER`] bytes.
pub const SLOTS: usize = 64;
/// Work requests of an endpoint that have not completed.
pub const REQUESTS: usize = 1024;
/// Records of rendezvous that wait until they are read. The writers of more wait.
pub const RECORDS: usize = 256;
/// Reads of the one-sided queue pair that are outstanding: as many as the device answers of one peer.
pub const READS: u32 = 128;
/// Bytes of messages without a receive of the program, with [`UNEXPECTED_EACH`] for each. Beyond, messages stay with the
/// device, and their senders wait.
pub const UNEXPECTED: usize = 64 << 20;
/// Bytes that a message without a receive costs beside its content.
pub const UNEXPECTED_EACH: usize = 160;
/// Completions of the device that are handled before the program gets what there is.
pub const BATCH: usize = 16;
/// Entries of a completion queue that wait for the program: sends are refused beyond it, so that a program which never reads
/// does not fill the memory.
pub const ENTRIES: usize = 1 << 16;
/// Answers and grants that wait because the send queue is full. Beyond, atomic operations of peers wait.
pub const DEFERRED: usize = 4096;
/// Bytes of the operands of an atomic operation; operand, comparand and header are one message.
pub const ATOMIC: usize = 4096;
/// Bytes that remain in a buffer for many messages below which it is given back, unless the program says otherwise.
pub const MULTI_RECV_MIN: usize = 64;
/// Longest message, bytes: what the device writes at once.
pub const MESSAGE: usize = 1 << 30;
/// Peers that one address vector holds: each index has a name of 16 bytes, and the device speaks with 65,536 peers at once.
pub const PEERS: usize = 1 << 20;
/// How long a peer may be silent before what was sent to it fails, in milliseconds. Ranks that share a processor are away for
/// seconds.
pub const PEER_TIMEOUT_MS: u32 = 30_000;
/// How long a rendezvous may stay without a byte before its sender is asked whether it is there.
pub const ASK_AFTER: Duration = Duration::from_secs(2);
/// How long a call that waits polls without a pause.
pub const SPIN: Duration = Duration::from_micros(50);
/// Bytes behind each structure that is allocated for the core of libfabric, which copies as many as its own version has.
pub const SLACK: usize = 512;
/// How long an endpoint that closes waits for what it has sent to arrive.
pub const LINGER: Duration = Duration::from_secs(2);
