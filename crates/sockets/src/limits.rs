//! All limits, with unit and reason.

/// Bytes received from the carrier by a call that waits for events. The rest is read directly into the program's buffer later.
pub const WAIT_READ: usize = 16 * 1024;
/// Size in bytes of a buffer for data that is not received directly into the program's buffer.
pub const SCRATCH: usize = 64 * 1024;
/// The number of such buffers that are kept for reuse. More threads than this rarely receive at the same time.
pub const SCRATCH_KEPT: usize = 4;
/// Bytes that a program may write before the peer's MPA Reply has arrived: about what a kernel socket accepts while the peer does
/// not read.
pub const HELD: usize = 64 * 1024;
/// Payloads of a Send up to this many bytes are copied next to their headers: a copy costs less than two more iovec entries.
pub const COPIED: usize = 4096;
/// The most iovec entries of a program's buffer list that one Send carries. The next Send carries further
/// entries.
pub const PARTS: usize = 64;
/// Bytes that `sendfile` reads from the file at a time.
pub const FILE_PIECE: usize = 64 * 1024;
/// Milliseconds that a blocking write waits for the peer's Reply before the call returns and the worker sends the data. A peer in
/// `accept` answers sooner.
pub const REPLY_WAIT: i32 = 10;
/// Milliseconds between two passes of the worker over the streams with unsent bytes.
pub const WORKER_TICK: i32 = 2;
/// Milliseconds after which a closed stream is abandoned, even if bytes are unsent or the peer has not closed it.
pub const DRAIN: u64 = 5000;
/// The most closed streams that are drained at the same time, since each holds a descriptor. Further ones are closed at once.
pub const DRAINS: usize = 1024;
/// Milliseconds between two checks, when the process exits, of whether the peer has acknowledged the sent bytes.
pub const EXIT_TICK: i32 = 1;
/// Milliseconds that an exiting process waits for its streams.
pub const EXIT_WAIT: i32 = 1000;
/// The lowest number of the library's own descriptors. Lower numbers stay free for programs that use
/// `select`.
pub const OWN_FROM: i32 = 1000;
/// The size of the descriptor table: Linux's usual limit for privileged processes. Higher descriptors stay plain.
pub const DESCRIPTORS: usize = 1 << 20;
/// Milliseconds after which a waiting thread checks again: a writer that waits for another thread, or a
/// thread that has no eventfd.
pub const FOLLOW: u64 = 20;
/// Bytes that are peeked at to find a Request: the length of the longest start-up frame.
pub const REQUEST: usize = anywarp_core::bounds::STARTUP_FRAME_MAX;
/// Bytes of the memory that forked processes share for the owner of each stream, one word each.
pub const OWNERS: usize = 256 * 1024;
/// The number of descriptors that are checked at start for inherited sockets. Servers inherit low descriptors.
pub const INHERITED: i32 = 32;
/// The longest wait, in milliseconds, for the peer to return to plain TCP when a stream is passed to another
/// program. A peer that is blocked in a call on the stream answers much sooner.
pub const HAND_OVER: u64 = 100;
/// The size of the cache of datagram peers. A new entry replaces an old one, whose peer is looked up again when it is used.
pub const PEERS: usize = 16 * 1024;
/// Milliseconds for which the result of a query is cached: whether the UDP socket at an address accepts
/// messages. If a program without the library then binds the port, it may receive messages until the entry
/// expires. A query takes some ten microseconds.
pub const KNOWN: u64 = 250;
/// The number of received messages after which the queries in the backlog of the socket's name (see
/// `directory.rs`) are accepted and closed. Each peer queries once before its first message.
pub const ASKED: u32 = 64;
/// Payloads of a message up to this many bytes are copied next to their headers: a copy costs less than a buffer list for the
/// kernel, and the checksum of one piece costs less than that of several.
pub const JOINED: usize = 4096;
/// The most iovec entries that the kernel accepts for one datagram (`UIO_MAXIOV`).
pub const BUFFERS: usize = 1024;
/// The most buffers for which the iovec list of a message is built on the stack, so that sending allocates no
/// memory.
pub const BUFFERS_HERE: usize = 30;
/// Size in bytes of a buffer for one received datagram. UDP datagrams are not longer.
pub const DATAGRAM: usize = 64 * 1024;
/// The most message bytes that one `sendmmsg` call copies. The datagrams of longer lists are sent one by one.
pub const BATCH: usize = 512 * 1024;
/// The number of attempts to lock the stored peer address of a UDP socket for a change, while other threads
/// read it.
pub const TRIES: usize = 100;
/// At most one in this many of the descriptors that the process may open holds the directory name of a UDP
/// socket.
pub const NAMES_PART: usize = 8;
