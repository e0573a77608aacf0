//! All limits, with unit and reason.

use std::time::Duration;

/// Bytes received from the carrier (the TCP connection of a stream) by a call that waits for events. The rest is read directly into the
/// program's buffer later.
pub const WAIT_READ: usize = 16 * 1024;
/// The number of bytes in place of [`WAIT_READ`] if long messages are expected: enough to detect a long message.
pub const WAIT_LONG: usize = 512;
/// Size in bytes of a buffer for data that is not received directly into the program's buffer.
pub const SCRATCH: usize = 64 * 1024;
/// Size in bytes of a buffer on the stack, for a receive that is expected to fit into it.
pub const FEW: usize = 1024;
/// The number of buffers of [`SCRATCH`] bytes that are kept for reuse. More threads than this rarely receive at the same time.
pub const SCRATCH_KEPT: usize = 4;
/// The largest receive buffer in bytes that the streams of a process share. A wait receives up to half of it ([`WAIT_READ`]) for a
/// stream.
pub const SLAB: usize = 32 * 1024;
/// The most shared receive buffers that are kept while no stream uses them: two megabytes.
pub const SLABS_KEPT: usize = 64;
/// The largest receive buffer in bytes that is kept for other streams although it is longer than [`SLAB`]. It holds a long message whose rest
/// and CRC have not arrived. Otherwise malloc would return the memory to the kernel after each message, and pages would be cleared for the next.
pub const LONG_SLAB: usize = 256 * 1024;
/// The most such buffers that are kept: two megabytes.
pub const LONG_SLABS_KEPT: usize = 8;
/// Bytes that a wait receives for a stream when the streams of the process keep as many bytes as `set pool` permits: enough for a head, so
/// that the program learns of the message.
pub const POOL_EMPTY: usize = 64;
/// Milliseconds after which a program that closes a stream or ends no longer waits for the peer's MPA Reply. This is less than
/// [`EXIT_STREAMS`].
pub const EARLY: u64 = 500;

/// Bytes that a stream may send before the peer's MPA Reply: the smallest window of a peer.
pub const EARLY_BYTES: usize = sockets_base::rules::WINDOW_LEAST as usize;

/// Bytes that a program may write before the peer's MPA Reply has arrived: about what a kernel socket accepts while the peer does
/// not read.
pub const HELD: usize = 64 * 1024;
/// Payloads of a Send up to this many bytes are copied next to their headers: a copy costs less than two more iovec entries.
pub const COPIED: usize = 4096;
/// After this number of consecutive long messages, the carrier may join such messages into longer segments.
pub const RUN: u8 = 8;
/// The most iovec entries of a program's buffer list that one Send carries. The next Send carries further
/// entries.
pub const PARTS: usize = 64;
/// Bytes that `sendfile` reads from the file at a time.
pub const FILE_PIECE: usize = 64 * 1024;
/// A measured wait that is shorter does not count as suitable for polling: the peer has answered on the same processor, or before the thread
/// slept, so no thread on another processor had to be woken.
pub const SPIN_LEAST: Duration = Duration::from_micros(6);
/// A measured wait that is longer does not count as suitable for polling: the peer needs more time for its answers than it takes to wake a
/// thread at each end, even on a slow virtual machine.
pub const SPIN_LONGEST: Duration = Duration::from_micros(300);
/// How long a wait polls while the peer does not poll yet. Waking the peer, which may be on a processor that has to be woken too, takes up to
/// this time.
pub const SPIN_TRY: Duration = Duration::from_micros(150);
/// The number of tries (waits that poll for [`SPIN_TRY`]) after which the thread gives up. Several are needed because the two ends
/// begin with their tries at about the same time, but not at the same wait.
pub const SPIN_TRIES: u8 = 32;
/// The number of tries without an answer after which the thread gives up before it has made [`SPIN_TRIES`] tries.
pub const SPIN_MISSES: u8 = 2;
/// The number of suitable waits in succession after which a thread tries to poll. A wait is suitable if it takes from [`SPIN_LEAST`] to
/// [`SPIN_LONGEST`]. With other work on the processors, some waits are suitable by chance.
pub const SPIN_SUITABLE: u8 = 8;
/// The number of tries in succession with a short wait after which the thread continues to poll.
pub const SPIN_GOOD: u8 = 4;
/// The number of waits that are not measured after an unsuitable one: reading the clock takes a few percent of a short wait.
pub const SPIN_SKIPS: u32 = 16;
/// The number of polled waits that are judged together.
pub const SPIN_SERIES: u32 = 64;
/// A failure resets the number of failures in succession if the mean duration of the waits since the first try is less than that of the
/// suitable waits before the first try, divided by this number.
pub const SPIN_WORTH: u32 = 4;
/// Milliseconds of the period at whose end a thread measures its waits again after a failure. Each failure in succession quadruples it.
pub const SPIN_PERIOD: u64 = 4;
/// Failures in succession beyond this number do not increase the period further.
pub const SPIN_FAILURES: u8 = 4;
/// A longer time between two polls means that another thread has used the processor. The host of a virtual machine also stops the processor,
/// but mostly for shorter times.
pub const SPIN_GAP: Duration = Duration::from_micros(200);
/// Milliseconds that a blocking write waits for the peer's Reply before the call returns and the library's worker thread sends the data. A peer in
/// `accept` answers sooner.
pub const REPLY_WAIT: i32 = 10;
/// Corked payload up to this many bytes waits for more payload of the same message.
pub const CORKED: usize = 4096;
/// Milliseconds after which corked payload is sent, as the kernel does (tcp(7), `TCP_CORK`).
pub const CORK: u64 = 200;
/// Milliseconds for which the worker still checks a stream now and then after [`CORK`] has expired for the last corked payload. A program
/// that corks each of its answers then does not wake the worker for each.
pub const CORK_KEPT: u64 = 1000;
/// Milliseconds between two checks of the worker while it has only streams with corked payload, or streams that it checks because of
/// [`CORK_KEPT`].
pub const CORK_TICK: u64 = 50;
/// Milliseconds between two passes of the worker over the streams with unsent bytes.
pub const WORKER_TICK: i32 = 2;
/// The number of times that a thread with a locked epoll set tries to lock the worker's list.
pub const WORKER_TRIES: u32 = 100;
/// Milliseconds after which a closed stream is abandoned, even if bytes are unsent or the peer has not closed it.
pub const DRAIN: u64 = 5000;
/// The most messages in succession while no payload moves in either direction. A correct peer sends a Limit message for each half of its
/// window that it has read, and announces bytes in shared memory each time this end asks for that, so only a few messages without payload
/// follow each other.
pub const IDLE_MESSAGES: u32 = 1000;
/// Milliseconds for which the peer may leave bytes in the shared memory unread until a writer checks whether the connection still exists.
pub const UNREAD: u64 = 4;
/// The most closed streams that are drained at the same time, since each holds a descriptor. Further ones are closed at once.
pub const DRAINS: usize = 1024;
/// Milliseconds between two checks, when the process exits, of whether the peer has acknowledged the sent bytes.
pub const EXIT_TICK: i32 = 1;
/// The most milliseconds between two checks of whether the peer of a waiting stream still answers.
pub const EXIT_CHECK: i32 = 100;
/// Milliseconds that an exiting process waits for the peers to acknowledge its reliable datagrams. Whether a peer still exists is not known.
pub const EXIT_WAIT: i32 = 1000;
/// Milliseconds that an exiting process waits for all its streams together: as long as a closed stream is drained. It waits for peers whose
/// receive buffers are full: with kernel TCP such a peer would get all bytes.
pub const EXIT_STREAMS: u64 = DRAIN;
/// The number of retransmissions, or of probes of the window, without an answer after which an exiting process does not wait for a peer any
/// more.
pub const UNANSWERED: u8 = 3;
/// Milliseconds that a process that exits, or executes another program, waits for other threads that use its streams, such as the worker. In a
/// signal handler, the interrupted call may hold a stream, so the process does not wait longer.
pub const EXIT_LOCK: u64 = 100;
/// The number of attempts to lock a stream without a pause, in a process that exits or executes another program. It pauses before each further
/// attempt ([`EXIT_TICK`]).
pub const LOCK_TRIES: u32 = 1000;
/// The lowest number of the library's own descriptors. Lower numbers stay free for programs that use
/// `select`.
pub const OWN_FROM: i32 = 1000;
/// The size of the descriptor table: Linux's usual limit for privileged processes. Sockets with higher descriptors stay kernel sockets.
pub const DESCRIPTORS: usize = 1 << 20;
/// Milliseconds after which a waiting thread checks again: a writer that waits for another thread, or a
/// thread that has no eventfd.
pub const FOLLOW: u64 = 20;
/// Milliseconds after which a writer looks for credit if the carrier is shut down for receiving, because `poll` then returns at once.
pub const DEAF_TICK: i32 = 1;

/// Bytes that are peeked at to find a Request: the length of the longest start-up frame.
pub const REQUEST: usize = anywarp_core::bounds::STARTUP_FRAME_MAX;
/// Size in bytes of the memory in which forked processes record the owner of each stream, and of that in which they count the processes that
/// have it: one word for a stream in each.
pub const OWNERS: usize = 256 * 1024;
/// The number of words that are tried to find a free one for a new stream.
pub const OWNER_TRIES: u32 = 1000;
/// The number of owners of words about which the kernel is asked meanwhile, whether they exist.
pub const OWNER_CHECKS: u32 = 64;
/// The number of descriptors that are checked at start for inherited sockets if `/proc` does not list the open ones.
pub const INHERITED: i32 = 32;
/// The longest time, in milliseconds, that a fork waits for a lock of the library, so that the child can use what it protects. Such locks are held
/// for a few microseconds.
pub const FORK_WAIT: u64 = 100;
/// The longest wait, in milliseconds, for the peer to return to plain TCP when a stream is passed to another
/// program. A peer that is blocked in a call on the stream answers much sooner.
pub const HAND_OVER: u64 = 100;
/// The number of entries in the cache of datagram peers. A new entry replaces an old one at the same place, and the peer of the old entry is
/// looked up again at the next datagram to it.
pub const PEERS: usize = 16 * 1024;
/// Milliseconds for which the result of a query is cached: whether the UDP socket at an address accepts
/// messages. If a program without the library then binds the port, it may receive messages until the entry
/// expires. A query takes some ten microseconds.
pub const KNOWN: u64 = 250;
/// The number of received messages after which the queries in the backlog of the socket's name (see
/// `directory.rs`) are accepted and closed. Each peer queries before its first message, and again when the cached result has expired
/// ([`KNOWN`]).
pub const ASKED: u32 = 64;
/// Payloads of a message up to this many bytes are copied next to their headers: a copy costs less than a buffer list for the
/// kernel, and the checksum of one piece costs less than that of several.
pub const JOINED: usize = 4096;
/// The most iovec entries that the kernel accepts in one call (`UIO_MAXIOV`).
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
/// The names of UDP sockets in the directory use a descriptor each. The largest number of names is the number of descriptors that the process
/// may open, divided by this.
pub const NAMES_PART: usize = 8;
/// The number of reliable datagrams that a socket can receive before the program reads. Further packets wait in the queue pair, and
/// their acknowledgements report this to the senders.
pub const RECEIVES: usize = 64;
/// The most reliable datagrams of a socket that are sent and not yet delivered. When this number is reached, the thread for reliable
/// datagrams takes no more of them from the socket pair ([`PAIR`]). When the pair is full too, the program's calls wait, or fail with EAGAIN.
pub const SENDS: usize = 1024;
/// The most payload bytes of the datagrams that [`SENDS`] limits: about what a path of 1 Gbit/s and 30 ms holds.
pub const SEND_BYTES: usize = 4 << 20;
/// The number of datagrams that the thread for reliable datagrams receives by one call.
pub const INBOX: usize = 32;
/// Bytes of the control messages of a received datagram: room for the address, the lifetime, the class, the overflow count and
/// several time stamps.
pub const CONTROL: usize = 256;
/// The longest record between the program and the thread for reliable datagrams, in bytes: headers, control messages, payload.
pub const RECORD: usize = 66 * 1024;
/// Bytes of received datagrams that the thread keeps for a program that does not read, in addition to those in the socket pair between the
/// two ([`PAIR`]). Above this number the thread receives no more packets.
pub const BACKLOG: usize = 1 << 20;
/// The number of datagrams that are received for one socket before other sockets are served.
pub const TURN: usize = 256;
/// The longest time, in milliseconds, that a call of the program waits for the thread for reliable datagrams: `close`, and `bind` to a port
/// in use, until the thread has released the UDP socket; the first call on a socket with a received datagram, until the thread has
/// delivered it.
pub const RELEASE: u64 = 20;
/// Milliseconds for which the MTU of a path is cached.
pub const PATH: u64 = 1000;
/// The most paths whose MTU is cached.
pub const PATHS: usize = 4096;
/// Seconds for which the answer of another host, or the absence of an answer, is cached.
pub const REMOTE: u64 = 60;
/// The most answers of other hosts that are cached.
pub const REMOTES: usize = 4096;
/// The most queries of other hosts that a process looks up in a second. Each may read the kernel's list of sockets.
pub const LOOKUPS: u32 = 200;
/// The size in bytes that is requested for the kernel's queue between the program and the thread for reliable datagrams, in each direction.
pub const PAIR: i32 = 1 << 20;
/// A datagram that fails within this time after it was sent is sent once more, because its peer has restarted. One that fails
/// later has failed because the peer does not answer, which takes five seconds to detect.
pub const RESTART: Duration = Duration::from_secs(3);
/// The largest number of UDP sockets with reliable datagrams is the number of descriptors that the process may open, divided by this. Each
/// of them uses up to five descriptors in addition to the program's own.
pub const RELIABLE_PART: usize = 8;
/// The size in bytes of the ring in shared memory that carries one direction of a stream between two processes of one host. It is as
/// large as the largest window by default.
pub const RING: usize = 1 << 20;
/// The most payload in bytes that is put into a ring in shared memory, or taken out of it, before the other end learns of it: the reader
/// copies a part while the writer copies the next one.
pub const MEMORY_PIECE: usize = 64 * 1024;
/// The most rings ([`RING`]) of a process, one for each direction of a stream. All together have 64 MiB.
pub const MEMORIES: usize = 64;
/// Milliseconds after which an offer of memory that was not accepted is withdrawn when another one is made.
pub const OFFER: u64 = 5000;
/// The most arguments of `execl` and its variants, with the null behind them, for which they use little of the stack.
pub const ARGUMENTS_FEW: usize = 32;
/// The most arguments of `execl` and its variants, with the null behind them: 8 KiB on the stack.
pub const ARGUMENTS: usize = 1024;
