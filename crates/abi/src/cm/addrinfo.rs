//! `rdma_getaddrinfo(3)`: converts names, services and hints to addresses.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use anywarp_core::lock::Mutex;
use libc::{addrinfo, sockaddr, socklen_t};

use crate::entry;
use crate::ffi::{Errno, last_errno, put};
use anywarp_verbs_sys::cm::*;
use anywarp_verbs_sys::verbs::*;

/// Resolution by the InfiniBand subnet administrator, which this device does not have.
pub(super) const RAI_SA: c_int = 0x10;

/// Copies an address for the caller to free.
///
/// # Safety
/// `addr` is null or points to `len` readable bytes.
unsafe fn copy(addr: *const sockaddr, len: socklen_t) -> *mut sockaddr {
    if addr.is_null() || len == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: `calloc` has no requirements.
    let to = unsafe { libc::calloc(1, size_of::<libc::sockaddr_storage>().max(len as usize)) };
    if !to.is_null() {
        // SAFETY: the source has `len` bytes, and the destination at least as many.
        unsafe { std::ptr::copy_nonoverlapping(addr.cast::<u8>(), to.cast::<u8>(), len as usize) };
    }
    to.cast()
}

/// Returns the length of an address, which follows from its family. 0 for null, and for a family other than IPv4 and IPv6.
unsafe fn len_of(addr: *const sockaddr) -> socklen_t {
    if addr.is_null() {
        return 0;
    }
    // SAFETY: the pointer is not null, so it points to an address.
    match c_int::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => size_of::<libc::sockaddr_in>() as socklen_t,
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>() as socklen_t,
        _ => 0,
    }
}

/// Creates one element of the result from the hints and an address of `getaddrinfo(3)`.
///
/// # Safety
/// The addresses in `found` and `hints` are valid or null.
unsafe fn answer(found: Option<&addrinfo>, hints: Option<&rdma_addrinfo>) -> *mut rdma_addrinfo {
    let mut out = rdma_addrinfo::default();
    if let Some(hints) = hints {
        out.ai_flags = hints.ai_flags;
        out.ai_qp_type = hints.ai_qp_type;
        out.ai_port_space = hints.ai_port_space;
    }
    let passive = out.ai_flags & RAI_PASSIVE != 0;
    if let Some(found) = found {
        out.ai_family = found.ai_family;
        // SAFETY: `ai_addrlen` is the length of the resolver's address.
        let addr = unsafe { copy(found.ai_addr, found.ai_addrlen) };
        if passive {
            (out.ai_src_addr, out.ai_src_len) = (addr, found.ai_addrlen);
        } else {
            (out.ai_dst_addr, out.ai_dst_len) = (addr, found.ai_addrlen);
        }
        if out.ai_qp_type == 0 && found.ai_socktype == libc::SOCK_DGRAM {
            out.ai_qp_type = IBV_QPT_UD as c_int;
        }
        if out.ai_port_space == 0 && found.ai_protocol == libc::IPPROTO_UDP {
            out.ai_port_space = RDMA_PS_UDP as c_int;
        }
    }
    if let Some(hints) = hints {
        // SAFETY: the program's addresses are valid.
        let (src_len, dst_len) = unsafe {
            (
                hints.ai_src_len.max(len_of(hints.ai_src_addr)),
                hints.ai_dst_len.max(len_of(hints.ai_dst_addr)),
            )
        };
        if out.ai_src_addr.is_null() && !hints.ai_src_addr.is_null() {
            // SAFETY: as above.
            (out.ai_src_addr, out.ai_src_len) =
                (unsafe { copy(hints.ai_src_addr, src_len) }, src_len);
        }
        if out.ai_dst_addr.is_null() && !hints.ai_dst_addr.is_null() && !passive {
            // SAFETY: as above.
            (out.ai_dst_addr, out.ai_dst_len) =
                (unsafe { copy(hints.ai_dst_addr, dst_len) }, dst_len);
        }
        if out.ai_family == 0 {
            let of = if out.ai_dst_addr.is_null() {
                out.ai_src_addr
            } else {
                out.ai_dst_addr
            };
            out.ai_family = if of.is_null() {
                hints.ai_family
            } else {
                // SAFETY: the address is a copy made above.
                c_int::from(unsafe { (*of).sa_family })
            };
        }
    }
    if out.ai_qp_type == 0 {
        let datagram = out.ai_port_space == RDMA_PS_UDP as c_int
            || out.ai_port_space == RDMA_PS_IPOIB as c_int;
        out.ai_qp_type = if datagram { IBV_QPT_UD } else { IBV_QPT_RC } as c_int;
    }
    if out.ai_port_space == 0 {
        out.ai_port_space = if out.ai_qp_type == IBV_QPT_UD as c_int {
            RDMA_PS_UDP
        } else {
            RDMA_PS_TCP
        } as c_int;
    }
    Box::into_raw(Box::new(out))
}

/// Copies a C string into memory of the C allocator. Returns null for null.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn copy_text(text: *mut c_char) -> *mut c_char {
    if text.is_null() {
        return text;
    }
    // SAFETY: a C string (guaranteed by the caller).
    unsafe { libc::strdup(text) }
}

/// Copies the first element of a list, or all elements if `all`. `rdma_freeaddrinfo` frees the copy. Routes and private data
/// are not copied, because no list of this library has them.
///
/// # Safety
/// `list` is valid.
pub(super) unsafe fn duplicate(list: *const rdma_addrinfo, all: bool) -> *mut rdma_addrinfo {
    let mut first: *mut rdma_addrinfo = std::ptr::null_mut();
    let mut last: *mut rdma_addrinfo = std::ptr::null_mut();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: an element of the list (guaranteed by the caller).
        let from = unsafe { &*at };
        // SAFETY: the addresses are valid. `ai_src_len` and `ai_dst_len` may be 0 in hints; the length then follows from the family.
        let (src_len, dst_len) = unsafe {
            (
                from.ai_src_len.max(len_of(from.ai_src_addr)),
                from.ai_dst_len.max(len_of(from.ai_dst_addr)),
            )
        };
        // SAFETY: as above; names are C strings or null.
        let made = unsafe {
            Box::into_raw(Box::new(rdma_addrinfo {
                ai_flags: from.ai_flags,
                ai_family: from.ai_family,
                ai_qp_type: from.ai_qp_type,
                ai_port_space: from.ai_port_space,
                ai_src_len: src_len,
                ai_dst_len: dst_len,
                ai_src_addr: copy(from.ai_src_addr, src_len),
                ai_dst_addr: copy(from.ai_dst_addr, dst_len),
                ai_src_canonname: copy_text(from.ai_src_canonname),
                ai_dst_canonname: copy_text(from.ai_dst_canonname),
                ..rdma_addrinfo::default()
            }))
        };
        if first.is_null() {
            first = made;
        } else {
            // SAFETY: `last` is the element created before.
            unsafe { (*last).ai_next = made };
        }
        last = made;
        at = if all { from.ai_next } else { std::ptr::null() };
    }
    first
}

/// A list of `rdma_getaddrinfo` that is freed when this value is dropped.
#[derive(Debug)]
pub(super) struct List(pub(super) *mut rdma_addrinfo);

impl List {
    /// Returns the list, which the caller frees.
    fn release(mut self) -> *mut rdma_addrinfo {
        std::mem::replace(&mut self.0, std::ptr::null_mut())
    }
}

// SAFETY: the list and what it points to belong to this value alone.
unsafe impl Send for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list was created by `rdma_getaddrinfo` or `duplicate` and is freed once.
        unsafe { rdma_freeaddrinfo(self.0) };
    }
}

/// The result of the last resolution of an identifier.
#[derive(Debug, Clone, Default)]
pub(super) struct Resolved(Arc<Mutex<Option<List>>>);

impl Resolved {
    pub(super) fn set(&self, list: Option<List>) {
        *self.0.lock() = list;
    }

    /// Returns a copy of the list, which the caller frees by `rdma_freeaddrinfo`.
    pub(super) fn duplicate(&self) -> Option<*mut rdma_addrinfo> {
        let list = self.0.lock();
        // SAFETY: the list was created by the resolver.
        list.as_ref().map(|list| unsafe { duplicate(list.0, true) })
    }
}

/// Why addresses were not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The arguments are invalid.
    Arguments(Errno),
    /// An error of the system: `EAI_SYSTEM` of `getaddrinfo(3)`, with its errno.
    System(Errno),
    /// Another code of `getaddrinfo(3)`.
    Code(c_int),
}

impl Failure {
    /// Returns the failure for a code that `getaddrinfo(3)` returned. `errno` is the value after the call; `EAI_SYSTEM` refers to it.
    fn of(code: c_int, errno: Errno) -> Self {
        match code {
            libc::EAI_SYSTEM => Self::System(errno),
            code => Self::Code(code),
        }
    }

    /// Returns the status of the event that reports the failure: a negative errno, or a code as `rdma_getaddrinfo(3)` returns it. Such
    /// codes are negative too, so a program cannot tell `EAI_NONAME` from `-ENOENT`.
    pub(super) fn status(self) -> c_int {
        match self {
            Self::Arguments(e) | Self::System(e) => -e,
            Self::Code(code) => code,
        }
    }
}

/// Returns the socket type and the protocol that stand for the queue pair type and the port space in the hints. `getaddrinfo(3)` returns
/// `EAI_SOCKTYPE` if one is for datagrams and the other is not.
fn socket_type(hints: Option<&rdma_addrinfo>) -> (c_int, c_int) {
    let (qp_type, space) = hints.map_or((0, 0), |h| {
        (
            h.ai_qp_type.cast_unsigned(),
            h.ai_port_space.cast_unsigned(),
        )
    });
    let socktype = match qp_type {
        IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => libc::SOCK_STREAM,
        IBV_QPT_UD => libc::SOCK_DGRAM,
        _ => 0,
    };
    let protocol = match (space, socktype) {
        (RDMA_PS_TCP, _) => libc::IPPROTO_TCP,
        (RDMA_PS_UDP | RDMA_PS_IPOIB, _) => libc::IPPROTO_UDP,
        (_, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        _ => libc::IPPROTO_TCP,
    };
    (socktype, protocol)
}

/// Finds the addresses for the arguments of `rdma_getaddrinfo(3)`.
///
/// # Safety
/// `node` and `service` are null or C strings; the addresses in `hints` are valid or null.
pub(super) unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<List, Failure> {
    let flags = hints.map_or(0, |h| h.ai_flags);
    if flags & RAI_SA != 0 {
        return Err(Failure::Arguments(libc::EOPNOTSUPP));
    }
    if node.is_null() && service.is_null() {
        if hints.is_none() {
            return Err(Failure::Arguments(libc::EINVAL));
        }
        // SAFETY: the addresses of the hints are valid (guaranteed by the caller).
        return Ok(List(unsafe { answer(None, hints) }));
    }
    // SAFETY: an all-zero addrinfo is valid.
    let mut ask: addrinfo = unsafe { std::mem::zeroed() };
    let flag = |of, to| if flags & of != 0 { to } else { 0 };
    ask.ai_flags =
        flag(RAI_PASSIVE, libc::AI_PASSIVE) | flag(RAI_NUMERICHOST, libc::AI_NUMERICHOST);
    ask.ai_family = match hints.map_or(0, |h| h.ai_family) {
        // The resolver has no addresses of this family, so it is asked for those of all other families.
        libc::AF_IB => libc::AF_UNSPEC,
        family => family,
    };
    (ask.ai_socktype, ask.ai_protocol) = socket_type(hints);
    let mut found: *mut addrinfo = std::ptr::null_mut();
    // SAFETY: `node` and `service` are C strings or null (guaranteed by the caller); `ask` and `found` are locals.
    let code = unsafe { libc::getaddrinfo(node, service, &raw const ask, &raw mut found) };
    if code != 0 {
        return Err(Failure::of(code, last_errno()));
    }
    let mut first: *mut rdma_addrinfo = std::ptr::null_mut();
    let mut last: *mut rdma_addrinfo = std::ptr::null_mut();
    let mut at = found;
    while !at.is_null() {
        // SAFETY: an element of the resolver's list.
        let entry = unsafe { &*at };
        // SAFETY: both are valid.
        let made = unsafe { answer(Some(entry), hints) };
        if first.is_null() {
            first = made;
        } else {
            // SAFETY: `last` is the element created before.
            unsafe { (*last).ai_next = made };
        }
        last = made;
        at = entry.ai_next;
    }
    // SAFETY: the list came from getaddrinfo and is freed once.
    unsafe { libc::freeaddrinfo(found) };
    Ok(List(first))
}

entry! {
    /// `rdma_getaddrinfo(3)`: returns 0, an error code of `getaddrinfo(3)`, or -1 with errno. If the code is `EAI_SYSTEM`, errno is set too.
    ///
    /// # Safety
    /// `node` and `service` are null or C strings, `hints` is null or valid, `res` is valid for writes.
    unsafe fn rdma_getaddrinfo(
        node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo, res: *mut *mut rdma_addrinfo,
    ) -> c_int, minus_one, {
        if res.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller; `hints` is null or valid.
        match unsafe { look_up(node, service, hints.as_ref()) } {
            Ok(list) => {
                // SAFETY: `res` is valid for writes (guaranteed by the caller).
                unsafe { put(res, list.release()) }?;
                Ok(0)
            }
            Err(Failure::Arguments(e)) => Err(e),
            Err(Failure::System(_)) => Ok(libc::EAI_SYSTEM),
            Err(Failure::Code(code)) => Ok(code),
        }
    }
}

entry! {
    /// `rdma_freeaddrinfo(3)`.
    ///
    /// # Safety
    /// `res` is null or came from `rdma_getaddrinfo`, and is not used again.
    unsafe fn rdma_freeaddrinfo(res: *mut rdma_addrinfo), nothing, {
        let mut at = res;
        while !at.is_null() {
            // SAFETY: the element was created by `answer` or `duplicate`.
            let entry = unsafe { Box::from_raw(at) };
            at = entry.ai_next;
            // SAFETY: the pointers are null or from the C allocator.
            unsafe {
                libc::free(entry.ai_src_addr.cast());
                libc::free(entry.ai_dst_addr.cast());
                libc::free(entry.ai_src_canonname.cast());
                libc::free(entry.ai_dst_canonname.cast());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_a_failed_look_up_is_an_errno_or_a_code_of_getaddrinfo() {
        let status = |code| Failure::of(code, libc::EMFILE).status();
        assert_eq!(status(libc::EAI_SYSTEM), -libc::EMFILE);
        for code in [libc::EAI_BADFLAGS, libc::EAI_NONAME, libc::EAI_AGAIN] {
            assert_eq!(status(code), code);
        }
        // SAFETY: null is allowed for all three.
        let nothing = unsafe { look_up(std::ptr::null(), std::ptr::null(), None) };
        assert_eq!(nothing.unwrap_err().status(), -libc::EINVAL);
    }
}
