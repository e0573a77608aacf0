//! The software RNIC without a host: queue pairs, RDMAP, DDP and MPA as pure state.
//!
//! Nothing here reads a clock, opens a socket, starts a thread or follows an address. Time and bytes come in as
//! arguments; bytes to send, placements and completions go out. Each layer has one verb down and one verb up, and
//! each step takes the type that the step before it returns:
//!
//! ```text
//!  down: post -> take -> build -> segment -> frame -> gather -> send
//!        sq.rs   connection/tx  connection/build  ddp/tx  llp/mpa/frame  Memory  engine
//!  up:   recv -> deframe -> admit -> place -> deliver -> complete -> poll
//!        engine  llp/mpa/deframe  connection/rx  Memory  connection/deliver  verbs/cq
//! ```
//!
//! Read in this order: [`verbs`] (what the application sees), [`connection`] (one reliable queue pair and its
//! stream), [`datagram`] (queue pairs without a stream), [`rdmap`] (what an operation means), [`ddp`] (where bytes
//! go), [`llp`] (how a segment travels), [`wire`] (byte layouts). [`fault`] decides which faults are injected.
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
pub mod rdmap;
mod ring;
mod sync;
pub mod verbs;
pub mod wire;
