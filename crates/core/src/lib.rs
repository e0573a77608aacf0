//! The software RNIC without I/O: queue pairs, RDMAP, DDP and MPA as state machines.
//!
//! This crate reads no clock, opens no socket, starts no thread and dereferences no user address. Time and received
//! bytes are arguments; bytes to send, placements and completions are results. Each layer has one function in each
//! direction, and each step takes the type that the step before it returns:
//!
//! ```text
//!  down: post -> take -> build -> segment -> frame -> gather -> send
//!        sq.rs   connection/tx  connection/build  ddp/tx  llp/mpa/frame  Memory  engine
//!  up:   recv -> deframe -> admit -> place -> deliver -> complete -> poll
//!        engine  llp/mpa/deframe  connection/rx  Memory  connection/deliver  verbs/cq
//! ```
//!
//! Read in this order: [`verbs`] (the objects that the application uses), [`connection`] (one reliable queue pair and
//! its stream), [`datagram`] (queue pairs without a stream), [`rdmap`] (the meaning of operations), [`ddp`] (the
//! placement of bytes), [`llp`] (the transport of segments), [`wire`] (byte layouts). [`fault`] decides which faults
//! are injected, and [`qos`] which queue pair sends next on a slow link.
#![forbid(unsafe_code)]

pub mod bounds;
pub mod connection;
pub mod datagram;
pub mod ddp;
pub mod env;
pub mod error;
pub mod fault;
pub mod llp;
pub mod lock;
pub mod observe;
pub mod pcapng;
pub mod qos;
pub mod rdmap;
mod ring;
mod sync;
pub mod verbs;
pub mod wire;
