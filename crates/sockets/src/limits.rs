//! Every limit: name, unit and reason.

/// Bytes taken from the carrier in a wait: what is more is read straight into the program's buffer.
pub const WAIT_READ: usize = 16 * 1024;
/// Bytes of one buffer that receives what does not go straight to the program.
pub const SCRATCH: usize = 64 * 1024;
/// Such buffers that are kept for the next call. More threads than these rarely receive at once.
pub const SCRATCH_KEPT: usize = 4;
/// Bytes that a program may write before the peer's MPA Reply is there: about what a kernel socket takes without a peer
/// that reads.
pub const HELD: usize = 64 * 1024;
/// Payload bytes of a Send that are copied beside their headers: below, a copy costs less than two more iovec entries.
pub const COPIED: usize = 4096;
/// Elements of a list of buffers in one Send; the rest goes with the next.
pub const PARTS: usize = 64;
/// Bytes of a file that `sendfile` reads at once.
pub const FILE_PIECE: usize = 64 * 1024;
/// How long a write of a socket that waits is held for the Reply of the peer, in milliseconds, before it returns and the
/// worker goes on: longer than a peer needs that is in its `accept`.
pub const REPLY_WAIT: i32 = 10;
/// Milliseconds after which the worker looks at streams with bytes that wait.
pub const WORKER_TICK: i32 = 2;
/// How long the rest of a closed stream is sent, and the peer's end of it awaited, in milliseconds, before it is given up.
pub const DRAIN: u64 = 5000;
/// Closed streams that are drained at once; one more is closed immediately. Each holds a descriptor.
pub const DRAINS: usize = 1024;
/// Milliseconds between two questions, when the process ends, whether the peer has acknowledged what was sent.
pub const EXIT_TICK: i32 = 1;
/// How long a process that ends waits for its streams, in milliseconds.
pub const EXIT_WAIT: i32 = 1000;
/// The first number for descriptors of the library: above those that programs use with select.
pub const OWN_FROM: i32 = 1000;
/// Descriptors that the table has room for: Linux's usual limit for privileged processes. Others stay plain.
pub const DESCRIPTORS: usize = 1 << 20;
/// Milliseconds between two looks of a writer that another thread is to wake.
pub const FOLLOW: u64 = 20;
/// Bytes looked at for a Request: the longest start-up frame.
pub const REQUEST: usize = anywarp_core::bounds::STARTUP_FRAME_MAX;
/// Bytes of memory that processes share to know which of them owns a stream: a word each.
pub const OWNERS: usize = 256 * 1024;
/// Numbers of descriptors that a program is looked at for when it starts: what servers inherit is among the first.
pub const INHERITED: i32 = 32;
/// How long a stream that is handed to another program waits until the peer sends plain TCP as well, in milliseconds. A peer that
/// waits for the stream answers within a fraction of that.
pub const HAND_OVER: u64 = 100;
/// Peers of datagrams of which something is known. One more takes the place of another, about which the directory is asked again.
pub const PEERS: usize = 16 * 1024;
/// How long it is known whether a peer of datagrams understands messages, in milliseconds: so long a program without the library
/// that takes over a port may get messages. Asking takes some ten microseconds.
pub const KNOWN: u64 = 250;
/// Messages to a socket after which those that have asked for it are swept: each asks before it sends its first message.
pub const ASKED: u32 = 64;
/// Payload bytes of a message that are copied beside their headers: below, a copy costs less than a list of buffers for the kernel, and
/// the checksum of one piece less than that of several.
pub const JOINED: usize = 4096;
/// Buffers of a datagram: longer lists are refused by the kernel.
pub const BUFFERS: usize = 1024;
/// Buffers of a message whose list is made on the stack, so that sending it allocates nothing.
pub const BUFFERS_HERE: usize = 30;
/// Bytes for a datagram that is looked at: UDP has no longer ones.
pub const DATAGRAM: usize = 64 * 1024;
/// Bytes of messages that one call of sendmmsg copies: longer lists are sent one by one.
pub const BATCH: usize = 512 * 1024;
/// Times that the peer of a UDP socket is tried to change while other threads read it.
pub const TRIES: usize = 100;
/// Names of UDP sockets take at most this part of the descriptors that the process may have.
pub const NAMES_PART: usize = 8;
