//! `bind` and `listen` for plain sockets of the program that need a TCP or UDP port that an identifier of rdma_cm uses.
//!
//! The identifier must release the port, but the kernel does not tell it that another socket needs the port. So the libraries also
//! define these two functions of the C library. The symbols have the version that they had in an old glibc. The dynamic loader
//! resolves a program's calls to them, but a linker does not choose them, because this is not a default version. Each calls the next
//! function of its name, which belongs to another preloaded library or to libc. If that call fails because the port is in use, the
//! function requests that the identifiers move to another port and repeats the call. See docs/decisions/026.

use std::ffi::{CStr, c_int};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use anywarp_engine::cm::make_room;
use libc::{sockaddr, sockaddr_storage, socklen_t};

use crate::cm::address::address_of;
use crate::entry;
use crate::ffi::{Errno, last_errno};

type Bind = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;
type Listen = unsafe extern "C" fn(c_int, c_int) -> c_int;

/// Returns the address of the next function of this name: in the libraries that the loader searches after this one, otherwise in all
/// libraries. (In a program that is linked with librdmacm alone, the loader searches libc before this library.) This library's own
/// function is not found, because it has no default version.
fn next(name: &CStr, cache: &AtomicUsize) -> Result<usize, Errno> {
    let known = cache.load(Ordering::Relaxed);
    if known != 0 {
        return Ok(known);
    }
    // SAFETY: `name` is a C string.
    let look = |handle| unsafe { libc::dlsym(handle, name.as_ptr()) } as usize;
    let found = match look(libc::RTLD_NEXT) {
        0 => look(libc::RTLD_DEFAULT),
        found => found,
    };
    if found == 0 {
        return Err(libc::ENOSYS);
    }
    cache.store(found, Ordering::Relaxed);
    Ok(found)
}

fn result(returned: c_int) -> Result<c_int, Errno> {
    if returned < 0 {
        Err(last_errno())
    } else {
        Ok(returned)
    }
}

fn next_bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = next(c"bind", &NEXT)?;
    // SAFETY: the symbol is a function of this type.
    let next = unsafe { std::mem::transmute::<usize, Bind>(next) };
    // SAFETY: the kernel checks the descriptor and the memory that it is given.
    result(unsafe { next(fd, addr, len) })
}

fn next_listen(fd: c_int, backlog: c_int) -> Result<c_int, Errno> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = next(c"listen", &NEXT)?;
    // SAFETY: the symbol is a function of this type.
    let next = unsafe { std::mem::transmute::<usize, Listen>(next) };
    // SAFETY: the kernel checks the descriptor.
    result(unsafe { next(fd, backlog) })
}

/// Returns an integer option of a socket.
fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: `value` and `len` are live during the call, and `len` is the size of `value`.
    let result =
        unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) };
    (result == 0).then_some(value)
}

/// Makes the call. If the port is in use, requests that the identifiers of rdma_cm release the port, and makes the call again.
fn with_room(
    fd: c_int,
    call: impl Fn() -> Result<c_int, Errno>,
    to: impl FnOnce() -> Option<SocketAddr>,
) -> Result<c_int, Errno> {
    let first = call();
    if first != Err(libc::EADDRINUSE) {
        return first;
    }
    let kind = option(fd, libc::SOL_SOCKET, libc::SO_TYPE);
    let is_stream = match kind {
        Some(libc::SOCK_STREAM) => true,
        Some(libc::SOCK_DGRAM) => false,
        _ => return first,
    };
    let Some(to) = to() else { return first };
    let v6only = to.is_ipv4() || option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Some(1);
    if !make_room(is_stream, to, v6only) {
        return first;
    }
    let second = call();
    let shares = option(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR);
    if second != Err(libc::EADDRINUSE) || !is_stream || shares != Some(0) {
        return second;
    }
    // Connections of the listener still use the port. The kernel lets a socket with `SO_REUSEADDR` share it with them.
    share(fd, true);
    let third = call();
    if third.is_err() {
        share(fd, false);
    }
    third
}

/// Turns `SO_REUSEADDR` on or off.
fn share(fd: c_int, on: bool) {
    let on = c_int::from(on);
    // SAFETY: `on` is live during the call, and its size is passed.
    unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_REUSEADDR,
            (&raw const on).cast(),
            size_of::<c_int>() as socklen_t,
        );
    }
}

entry! {
    /// `bind(2)`.
    ///
    /// # Safety
    /// `addr` points to `len` bytes; the kernel checks this.
    unsafe fn anywarp_bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, minus_one, {
        with_room(fd, || next_bind(fd, addr, len), || {
            // SAFETY: all-zero is a valid sockaddr_storage.
            let mut name: sockaddr_storage = unsafe { std::mem::zeroed() };
            let size = (len as usize).min(size_of::<sockaddr_storage>());
            let at = (&raw mut name).cast::<u8>();
            // SAFETY: the kernel has read the `len` bytes at `addr` and refused only the port; `name` has room for `size`.
            unsafe { std::ptr::copy_nonoverlapping(addr.cast::<u8>(), at, size) };
            // SAFETY: a sockaddr_storage is large enough for an address of each family.
            unsafe { address_of(at.cast::<sockaddr>()) }
        })
    }
}

entry! {
    /// `listen(2)`. Two sockets with `SO_REUSEADDR` can be bound to the same port. Once one of them listens, `listen` fails
    /// for the other.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn anywarp_listen(fd: c_int, backlog: c_int) -> c_int, minus_one, {
        with_room(fd, || next_listen(fd, backlog), || {
            // SAFETY: all-zero is a valid sockaddr_storage.
            let mut name: sockaddr_storage = unsafe { std::mem::zeroed() };
            let mut len = size_of::<sockaddr_storage>() as socklen_t;
            let at = (&raw mut name).cast::<sockaddr>();
            // SAFETY: `name` and `len` are live during the call, and `len` is the size of `name`.
            let result = unsafe { libc::getsockname(fd, at, &raw mut len) };
            // SAFETY: the kernel has written a complete address.
            if result == 0 { unsafe { address_of(at) } } else { None }
        })
    }
}
