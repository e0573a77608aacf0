//! Drives the software RNIC with sockets, timers, threads and registered user memory.
//!
//! | file | what |
//! |---|---|
//! | [`device`] | the device, its addresses and limits; contexts |
//! | [`verbs`] | objects that a context makes: regions, completion queues, queue pairs |
//! | [`qp`] | a reliable queue pair and its TCP connection |
//! | [`dgram`] | datagram queue pairs |
//! | [`port`] | QPN ports: a TCP listener and a UDP socket with one number |
//! | [`connect::startup`] | connections in MPA start-up, before a queue pair owns them |
//! | `lobby` | connections of strangers, bounded |
//! | [`gids`] | the GID table, and how it follows the host's addresses |
//! | [`fatal`] | what happens after a panic |
//! | `fault` | faults that somebody asked for |
//! | [`cm`] | the connection manager |
//! | [`worker`] | who moves the bytes: the calling thread, else a thread of ours |
//! | [`channel`] | completion channels, asynchronous events |
//! | [`reserve`] | what is left when the host has no more memory |
//! | `mem`, `sys`, `fd`, `reserve`, `shared` | the files with `unsafe` |

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
mod pin;
pub mod process;
mod provoke;
pub mod qp;
pub mod random;
pub mod reactor;
pub mod reserve;
mod shared;
pub mod stat;
mod sync;
pub mod sys;
mod trace;
pub mod verbs;
