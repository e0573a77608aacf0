//! Two ends of the software RNIC on a simulated network.
//!
//! A test simulates a conversation, which a seed determines. [`World`] has the clock and the links. Each end is a [`Connection`] of the
//! core with memory and completion queues. The ends exchange byte streams through pipes, which delay the bytes, deliver them in pieces
//! of any size, are often full, and may break at any byte. The same seed gives the same conversation:
//!
//! ```
//! use anywarp_sim::{Request, Setup, World, access, send};
//!
//! let mut w = World::new(1);
//! let (a, b) = w.pair(&Setup::anywarp());
//! let (from, to) = (w[a].register(5, access::ALL), w[b].register(16, access::ALL));
//! w[a].fill(&from, b"hello");
//! w[b].recv(7, &[to.all()]);
//! w[a].post(send(1).from(&[from.all()]));
//! w.run();
//! assert_eq!(w[b].received()[0].byte_len, 5);
//! assert_eq!(w[b].bytes(&to)[..5], *b"hello");
//! ```
//!
//! A failing test prints its seed. `ANYWARP_SEED=<seed> cargo test <name>` runs it with that seed only.
//!
//! | file | content |
//! |---|---|
//! | `world.rs` | time, links, steps |
//! | `end.rs` | one end, as an application sees it |
//! | `pipe.rs` | one direction of a byte stream |
//! | `ether.rs` | datagram queue pairs on a lossy network |
//! | `memory.rs` | an address space |
//! | `raw.rs` | a scripted peer, which sends and receives single FPDUs |
//! | `script.rs` | conversations with a scripted peer, as text |
//! | `trace.rs` | the steps of the data path as text |
//! | `rng.rs` | random numbers from a seed, and the seeds of tests |
//! | `fuzz/` | the functions that a fuzzer calls |
//!
//! [`Connection`]: anywarp_core::connection::Connection
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test tool panics on errors"
)]

mod end;
pub mod ether;
pub mod fuzz;
mod memory;
mod pipe;
mod raw;
mod rng;
mod script;
mod trace;
mod world;

pub use end::{
    End, Host, Mr, Request, Setup, access, compare_swap, fetch_add, read, send, send_imm,
    send_invalidate, write, write_imm,
};
pub use memory::{BASE, Space};
pub use pipe::Pipe;
pub use raw::{Fpdu, Raw, crc_of, framed};
pub use rng::{Rng, each_seed};
pub use script::run as run_script;
pub use trace::{Log, lines, render};
pub use world::{EndId, RawId, World};
