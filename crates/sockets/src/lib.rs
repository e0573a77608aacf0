//! A preloaded library that runs the sockets of unmodified programs over RDMA.
//!
//! The program's descriptor remains a kernel socket, which becomes the carrier of an iWARP stream: MPA start-up, then FPDUs with
//! RDMAP Sends. Whether a connection is upgraded is decided at its first use. A connection that is not upgraded (*plain*) is
//! left to the kernel from then on.
//!
//! | file | what |
//! | --- | --- |
//! | `hooks/` | the functions that programs call in place of the C library's |
//! | `conn/set.rs` | epoll sets with upgraded streams in them |
//! | `conn/sock.rs` | a connection: whether it is upgraded, its owner process, the threads that wait for it |
//! | `stream.rs` | an upgraded stream, with non-blocking operations |
//! | `wire.rs` | the protocol of two ends: private data and message headers |
//! | `conn/dgram.rs` | a UDP socket: whether it receives iWARP messages, and which peers it sends them to |
//! | `message.rs` | the datagram-iWARP message in a datagram |
//! | `reliable.rs` | the queue pair of a UDP socket whose datagrams are reliable |
//! | `conn/reliable.rs`, `record.rs` | the thread that serves these sockets, and what passes between it and the program's calls |
//! | `peers.rs` | a cache of what is known about the peers of datagrams |
//! | `conn/show.rs` | the table that `anywarp sockets stat` reads |
//! | `policy.rs`, `directory.rs` | which connections are upgraded, and which datagrams become messages |
//! | `remote.rs`, `conn/answers.rs` | the same between hosts: queries to other hosts, and the thread that answers theirs |

pub mod conn;
pub mod directory;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
// In a fuzzer the library must not intercept the fuzzer's own calls.
#[cfg(not(fuzzing))]
pub mod hooks;
pub mod inherited;
pub mod limits;
pub mod log;
pub mod memory;
pub mod message;
pub mod owner;
pub mod peers;
pub mod policy;
pub mod queue;
pub mod real;
pub mod record;
pub mod reliable;
pub mod remote;
pub mod spin;
#[cfg(not(fuzzing))]
mod start;
pub mod stream;
pub mod sys;
pub mod wire;
