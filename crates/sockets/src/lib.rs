//! Sockets of unmodified programs over RDMA: a library that is preloaded.
//!
//! The program's descriptor stays the kernel's socket, and that socket is the carrier of an iWARP stream: MPA start-up,
//! then FPDUs with RDMAP Sends. Whether a connection is upgraded is decided at its first use; one that is not is the
//! kernel's alone from then on.
//!
//! | file | what |
//! | --- | --- |
//! | `hooks/` | the functions that programs call in place of the C library's |
//! | `conn/set.rs` | epoll sets with upgraded streams in them |
//! | `conn/sock.rs` | a connection: its decision, its owner, the threads that wait for it |
//! | `stream.rs` | an upgraded stream, without waiting |
//! | `wire.rs` | what two ends say to each other |
//! | `conn/dgram.rs` | a UDP socket: whether it understands messages, and to whom it sends some |
//! | `message.rs` | datagrams as messages of datagram-iWARP |
//! | `peers.rs` | what is known of the peers of datagrams |
//! | `conn/show.rs` | what `anywarp sockets stat` reads |
//! | `policy.rs`, `directory.rs` | which connections are upgraded |

pub mod conn;
pub mod directory;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
// A fuzzer's own calls are not to be ours.
#[cfg(not(fuzzing))]
pub mod hooks;
pub mod limits;
pub mod log;
pub mod message;
pub mod owner;
pub mod peers;
pub mod policy;
pub mod queue;
pub mod real;
#[cfg(not(fuzzing))]
pub mod start;
pub mod stream;
pub mod sys;
pub mod wire;
