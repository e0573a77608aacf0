//! Buffers for RDMA over any libibverbs: `libanywarp-buffers.so.1`.
//!
//! Memory that a program sends from or receives into must be registered, which takes time. For each buffer a [`Manager`] chooses the
//! cheapest way:
//!
//! - A buffer up to the *critical size*, which is measured, is copied through memory that is registered already.
//! - For a larger buffer, the program's memory is registered.
//! - The registration of memory longer than 4 KiB that is used repeatedly is cached, and later uses need neither a copy nor a registration.
//! - A long buffer is registered in [`Pieces`] by several threads, while earlier pieces are being sent.
//!
//! A cached registration must end when its memory changes. The kernel reports ([`Statistics::watching`]) when any code of the
//! process unmaps or moves memory, or discards its contents. Without these reports, registrations are cached only for memory that the program
//! invalidates itself ([`Lifetime::Stable`]).
//!
//! ```text
//! api      the C functions of <anywarp-buffers.h>
//! pieces   long buffers, in parallel          manager  chooses how to provide a buffer
//! pool     memory to copy through             cache    cached registrations and their end
//! table    the table of cached registrations  watch    the kernel's reports about the program's memory
//! changes  the changes that were reported     region   one registration; critical size
//! fork     detection of forked children       ffi      libibverbs
//! ```
//!
//! `man 7 anywarp-buffers` describes the C interface.

mod api;
mod cache;
mod changes;
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

/// Returns the errno of the last call to libc or verbs.
fn errno() -> libc::c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
