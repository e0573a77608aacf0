//! Extended sockets (ES-API) over any RDMA device: `libexs.so.1`.
//!
//! ```text
//! api      the C functions of <exs.h>
//! library  tables of sockets, queues and memory; the thread that waits for devices
//! socket   a connection with its buffers   op     operations of the program
//! queue    events                          memory registrations (by anywarp-buffers)
//! flow     decides what to transfer when: a state machine without I/O
//! wire     messages and private data       ffi    libibverbs and librdmacm
//! ```
//!
//! `docs/exs.md` describes the protocol, and `man 7 exs` the interface.

mod api;
mod ffi;
mod flow;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod library;
mod lock;
mod memory;
mod op;
mod queue;
mod socket;
mod wire;

/// Returns whether memory of `exs_mregister` may be written by peers after a receive of this socket, until `exs_mderegister`. This is so on
/// an iWARP device, whose memory for receives has the right `IBV_ACCESS_REMOTE_WRITE`. With `EXS_MHANDLE_UNREGISTERED` the access ends before
/// the event. Returns true if the socket is not connected.
#[must_use]
pub fn lets_peers_write_received(fd: libc::c_int) -> bool {
    let socket = library::get().and_then(|library| library.socket(fd));
    !socket.is_ok_and(|socket| socket.device().is_ok_and(|(device, _)| !device.iwarp))
}

/// Returns the errno of the last call to libc or verbs.
fn errno() -> libc::c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
