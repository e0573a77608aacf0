//! The functions of `<exs.h>` that this crate calls. They are defined by the crate `exs`.

use libc::{c_int, c_void, sockaddr, socklen_t, timeval};

pub(crate) const VERSION: c_int = 1;
pub(crate) const EVT_ACCEPT: c_int = 3;
pub(crate) const CANCEL_AHANDLE: c_int = 2;
pub(crate) const SHUT_WR: c_int = 1;
pub(crate) const PERSISTENT: c_int = 1;
pub(crate) const WAITALL: c_int = 4;
/// `EXS_MHANDLE_UNREGISTERED`.
pub(crate) const UNREGISTERED: c_int = -2;

/// `exs_event_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Event {
    pub(crate) kind: c_int,
    pub(crate) errno: c_int,
    pub(crate) fd: c_int,
    pub(crate) ahandle: isize,
    /// The union. For a transfer the second word is the length; for an accept the first word contains the descriptor.
    pub(crate) body: [u64; 6],
}

unsafe extern "C" {
    pub(crate) fn exs_init(version: c_int) -> c_int;
    pub(crate) fn exs_qcreate(depth: c_int) -> c_int;
    pub(crate) fn exs_qdequeue(q: c_int, events: *mut Event, n: c_int, wait: *mut timeval)
    -> c_int;
    pub(crate) fn exs_mregister(addr: *mut c_void, len: usize, flags: c_int) -> c_int;
    pub(crate) fn exs_mderegister(handle: c_int, flags: c_int) -> c_int;
    pub(crate) fn exs_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub(crate) fn exs_bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    pub(crate) fn exs_listen(fd: c_int, backlog: c_int) -> c_int;
    pub(crate) fn exs_getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    pub(crate) fn exs_accept(
        fd: c_int,
        addr: *mut c_void,
        flags: c_int,
        q: c_int,
        ah: isize,
    ) -> c_int;
    pub(crate) fn exs_connect(
        fd: c_int,
        addr: *const sockaddr,
        len: socklen_t,
        flags: c_int,
        q: c_int,
        ah: isize,
    ) -> c_int;
    pub(crate) fn exs_send(
        fd: c_int,
        from: *const c_void,
        len: usize,
        flags: c_int,
        q: c_int,
        ah: isize,
        handle: c_int,
    ) -> c_int;
    pub(crate) fn exs_recv(
        fd: c_int,
        to: *mut c_void,
        len: usize,
        flags: c_int,
        q: c_int,
        ah: isize,
        handle: c_int,
    ) -> c_int;
    pub(crate) fn exs_send_offset(
        fd: c_int,
        from: *const c_void,
        len: usize,
        flags: c_int,
        q: c_int,
        ah: isize,
        handle: c_int,
        offset: u64,
    ) -> c_int;
    pub(crate) fn exs_recv_offset(
        fd: c_int,
        to: *mut c_void,
        len: usize,
        flags: c_int,
        q: c_int,
        ah: isize,
        handle: c_int,
        offset: u64,
    ) -> c_int;
    pub(crate) fn exs_cancel(fd: c_int, flags: c_int, ah: isize) -> c_int;
    pub(crate) fn exs_shutdown(fd: c_int, how: c_int, q: c_int, ah: isize) -> c_int;
    pub(crate) fn exs_close(fd: c_int) -> c_int;
}
