//! Buffers for RDMA over any libibverbs: `libanywarp-buffers.so.1`.
//!
//! Memory that a program sends from or receives into has to be registered, and that is not free. A [`Manager`] does for each
//! buffer what costs least:
//!
//! - up to the *critical size*, which is measured, it copies through memory that is registered already;
//! - above it, it registers the program's memory, and keeps the registration of memory that is used again;
//! - long buffers are registered in [`Pieces`], by several threads, while the pieces before are under way.
//!
//! A registration that is kept must not outlive the memory behind it. The kernel reports ([`Statistics::watching`]) when any code
//! of the process unmaps, moves or empties memory. Without these reports registrations are kept only of memory that the program
//! promises to invalidate itself ([`Lifetime::Stable`]).
//!
//! ```text
//! api      the C functions of <anywarp-buffers.h>
//! pieces   long buffers, in parallel          manager  what is done with a buffer
//! pool     memory to copy through             cache    which registrations are kept; when they end
//! table    the list of what is kept           watch    what the kernel says of the program's memory
//! region   one registration; the critical size         fork     what a child leaves alone
//! ffi      libibverbs
//! ```
//!
//! `man 7 anywarp-buffers` describes the C interface.

mod api;
mod cache;
mod ffi;
mod fork;
mod lock;
mod manager;
mod pieces;
mod pool;
mod region;
mod table;
mod thread;
mod watch;

pub use manager::{Buffer, How, Lifetime, Manager, Settings, Statistics, Use};
pub use pieces::Pieces;
pub use pool::Piece;
pub use region::{Region, critical_size};

/// The error of the last call to libc or verbs.
fn errno() -> libc::c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
