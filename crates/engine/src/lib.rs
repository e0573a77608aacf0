//! Drives the software RNIC with sockets, timers, threads and registered user memory.
//!
//! [`engine`] owns the RNIC and the [`reactor`], which decides which thread receives and sends: a thread of the
//! program, or a worker thread. [`context`] is an open device, [`objects`] has the objects created in it, [`qp`] and
//! [`dgram`] the queue pairs, [`cm`] the connection manager, [`connect`] connections that no queue pair owns yet. The
//! table of all files, by layer, is in ARCHITECTURE.md. A file uses only files of its own layer and of lower ones.
//!
//! Outside tests, `unsafe` blocks are only in `mem`, `process`, `reserve`, `shared`, `fd` and `sys`.

#![allow(
    rustdoc::private_intra_doc_links,
    reason = "only this workspace uses the crate; its documentation is built with private items"
)]

pub mod address;
mod capture;
pub mod channel;
pub mod clock;
pub mod cm;
pub mod config;
pub mod connect;
pub mod context;
pub mod dgram;
pub mod engine;
pub mod events;
mod fault;
pub mod fd;
pub mod gids;
pub mod limits;
pub mod locks;
pub mod log;
mod mem;
pub mod net;
pub mod objects;
mod pin;
pub mod process;
pub mod qos;
pub mod qp;
pub mod random;
pub mod reactor;
pub mod reserve;
mod shared;
pub mod stat;
mod sync;
pub mod sys;
mod test_panic;
mod trace;
