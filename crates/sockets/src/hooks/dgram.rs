//! Datagrams: reading and writing UDP sockets that may have messages.
//!
//! The kernel's calls wait, report errors and fill in addresses and control data as they would for the program: only the
//! buffers are others.

use crate::conn::dgram::Dgram;
use crate::conn::show;
use crate::conn::table;
use crate::limits;
use crate::message::{self, HEAD, TAIL};
use crate::peers;
use crate::real;
use crate::sys;
use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, timespec};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A buffer of a thread, for a datagram. It is used by address: a thread that is cancelled in the kernel's call keeps nothing.
struct Buffer {
    at: Cell<*mut u8>,
    /// In use: by the call that a signal has interrupted.
    busy: Cell<bool>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        free(self.at.get());
    }
}

thread_local! {
    static BUFFER: Buffer = const { Buffer { at: Cell::new(std::ptr::null_mut()), busy: Cell::new(false) } };
}

fn free(at: *mut u8) {
    // SAFETY: it was made by `malloc`, or is null.
    unsafe { libc::free(at.cast()) }
}

/// A buffer of [`limits::DATAGRAM`] bytes, to be given back; null: there is no memory.
fn take() -> *mut u8 {
    // SAFETY: no pointer. It is not initialized: the kernel writes what is read.
    let make = || unsafe { libc::malloc(limits::DATAGRAM) }.cast::<u8>();
    let own = BUFFER.try_with(|b| {
        if b.busy.replace(true) {
            return None;
        }
        if b.at.get().is_null() {
            b.at.set(make());
        }
        Some(b.at.get())
    });
    own.ok().flatten().unwrap_or_else(make)
}

fn give_back(at: *mut u8) {
    let is_own = BUFFER.try_with(|b| b.at.get() == at && b.busy.replace(false));
    if is_own != Ok(true) {
        free(at);
    }
}

/// Bytes of a list of buffers.
///
/// # Safety
/// The list of a valid message.
unsafe fn parts<'a>(msg: *const msghdr) -> &'a [iovec] {
    // SAFETY: the caller's.
    unsafe {
        if (*msg).msg_iov.is_null() {
            return &[];
        }
        std::slice::from_raw_parts((*msg).msg_iov, (*msg).msg_iovlen)
    }
}

/// Copies to a list of buffers; returns how much.
///
/// # Safety
/// The buffers are writable.
unsafe fn scatter(bytes: &[u8], parts: &[iovec]) -> usize {
    let mut done = 0;
    for part in parts {
        let n = part.iov_len.min(bytes.len() - done);
        if n > 0 {
            // SAFETY: the caller's; so many bytes are left.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), part.iov_base.cast(), n);
            }
        }
        done += n;
    }
    done
}

/// What the program gets of a datagram, or of the copy of a datagram in a report of an error, which may be cut off.
fn payload(bytes: &[u8], is_report: bool) -> (&[u8], bool) {
    if is_report {
        let rest = message::begins(bytes).and_then(|head| bytes.get(head..));
        return match rest {
            Some(rest) => (
                message::open(bytes).map_or(rest, |(_, payload)| payload),
                true,
            ),
            None => (bytes, false),
        };
    }
    match message::open(bytes) {
        Some((_, payload)) => (payload, true),
        None => (bytes, false),
    }
}

/// Receives a datagram as `recvmsg`.
///
/// # Safety
/// As `recvmsg`.
unsafe fn receive(fd: c_int, dgram: &Dgram, msg: *mut msghdr, flags: c_int) -> isize {
    // SAFETY: the caller's.
    let (mut own, parts) = unsafe { (*msg, parts(msg)) };
    let buffer = take();
    if buffer.is_null() {
        // SAFETY: the caller's.
        return unsafe { real::recvmsg(fd, msg, flags) };
    }
    let mut all = iovec {
        iov_base: buffer.cast(),
        iov_len: limits::DATAGRAM,
    };
    own.msg_iov = &raw mut all;
    own.msg_iovlen = 1;
    // SAFETY: the buffer is writable; the rest is the caller's.
    let n = unsafe { real::recvmsg(fd, &raw mut own, flags) };
    let Ok(length) = usize::try_from(n) else {
        let errno = sys::errno();
        give_back(buffer);
        if errno == libc::ECONNREFUSED
            && let Some(peer) = dgram.peer()
        {
            peers::forget(peer);
        }
        sys::set_errno(errno);
        return n;
    };
    // SAFETY: the kernel has written so many bytes of the buffer.
    let bytes = unsafe { std::slice::from_raw_parts(buffer, length.min(limits::DATAGRAM)) };
    let (payload, is_message) = payload(bytes, flags & libc::MSG_ERRQUEUE != 0);
    // SAFETY: the caller's.
    let done = unsafe { scatter(payload, parts) };
    let length = payload.len();
    if is_message && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0 {
        dgram.received();
        show::message(fd, done, 0);
    }
    give_back(buffer);
    // SAFETY: the caller's.
    unsafe {
        (*msg).msg_namelen = own.msg_namelen;
        (*msg).msg_controllen = own.msg_controllen;
        (*msg).msg_flags = own.msg_flags;
        if done < length {
            (*msg).msg_flags |= libc::MSG_TRUNC;
        }
    }
    if flags & libc::MSG_TRUNC != 0 {
        length as isize
    } else {
        done as isize
    }
}

fn header(parts: *mut iovec, n: size_t) -> msghdr {
    // SAFETY: zeros are a valid message header.
    let mut m: msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = parts;
    m.msg_iovlen = n as _;
    m
}

/// The socket of a call that reads, if messages to it are opened.
#[inline]
fn reader(fd: c_int, flags: c_int) -> Option<&'static Dgram> {
    table::dgram(fd).filter(|d| d.opens() && flags & libc::MSG_OOB == 0)
}

/// `recvfrom`; `None`: it is the kernel's.
///
/// # Safety
/// As `recvfrom`.
#[inline]
pub(super) unsafe fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    alen: *mut socklen_t,
) -> Option<isize> {
    let dgram = reader(fd, flags)?;
    let mut part = iovec {
        iov_base: buf,
        iov_len: len,
    };
    let mut msg = header(&raw mut part, 1);
    // SAFETY: the caller's.
    unsafe {
        if !addr.is_null() && !alen.is_null() {
            msg.msg_name = addr.cast();
            msg.msg_namelen = *alen;
        }
        let n = receive(fd, dgram, &raw mut msg, flags);
        if n >= 0 && !alen.is_null() && !addr.is_null() {
            *alen = msg.msg_namelen;
        }
        Some(n)
    }
}

/// `read`; `None`: it is the kernel's. Reading nothing takes nothing from the socket.
///
/// # Safety
/// As `read`.
#[inline]
pub(super) unsafe fn read(fd: c_int, buf: *mut c_void, len: size_t) -> Option<isize> {
    if len == 0 {
        return None;
    }
    // SAFETY: the caller's.
    unsafe { recvfrom(fd, buf, len, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

/// `readv`; `None`: it is the kernel's.
///
/// # Safety
/// As `readv`.
pub(super) unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int) -> Option<isize> {
    let dgram = reader(fd, 0)?;
    let n = usize::try_from(n).ok().filter(|n| (1..=1024).contains(n))?;
    let mut msg = header(iov.cast_mut(), n);
    // SAFETY: the caller's.
    unsafe {
        if parts(&raw const msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
        Some(receive(fd, dgram, &raw mut msg, 0))
    }
}

/// `recvmsg`; `None`: it is the kernel's.
///
/// # Safety
/// As `recvmsg`.
#[inline]
pub(super) unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> Option<isize> {
    let dgram = reader(fd, flags)?;
    // SAFETY: the caller's.
    unsafe {
        if msg.is_null() || (*msg).msg_iovlen > 1024 {
            return None;
        }
        Some(receive(fd, dgram, msg, flags))
    }
}

/// `recvmmsg`; `None`: it is the kernel's.
///
/// # Safety
/// As `recvmmsg`.
pub(super) unsafe fn recvmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> Option<c_int> {
    let dgram = reader(fd, flags)?;
    let mut until = None;
    if !timeout.is_null() {
        // SAFETY: the caller's.
        let t = unsafe { *timeout };
        let (Ok(seconds), Ok(nanos @ 0..1_000_000_000)) =
            (u64::try_from(t.tv_sec), u32::try_from(t.tv_nsec))
        else {
            // The kernel refuses it.
            return None;
        };
        until = Instant::now().checked_add(Duration::new(seconds, nanos));
    }
    let mut flags = flags;
    for i in 0..n as usize {
        // SAFETY: the caller's.
        let got = unsafe {
            receive(
                fd,
                dgram,
                &raw mut (*msgs.add(i)).msg_hdr,
                flags & !libc::MSG_WAITFORONE,
            )
        };
        if got < 0 {
            return Some(if i > 0 { i as c_int } else { -1 });
        }
        // SAFETY: the caller's.
        unsafe { (*msgs.add(i)).msg_len = got as c_uint };
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        if let Some(until) = until {
            // As the kernel: the time is looked at behind each datagram, and what is left of it is returned.
            let left = until.saturating_duration_since(Instant::now());
            // SAFETY: the caller's.
            unsafe {
                (*timeout).tv_sec = left.as_secs() as libc::time_t;
                (*timeout).tv_nsec = libc::c_long::from(left.subsec_nanos() as i32);
            }
            if left.is_zero() {
                return Some(i as c_int + 1);
            }
        }
    }
    Some(n as c_int)
}

/// Parts of a message on the stack: head, a few buffers of the program, tail.
const FEW: usize = 6;

/// Whether the control part of a call has the kernel make several datagrams of it.
///
/// # Safety
/// As `sendmsg`.
unsafe fn is_segmented(msg: *const msghdr) -> bool {
    const UDP_SEGMENT: c_int = 103;
    // SAFETY: the caller's: the control part is as cmsg(3) describes it.
    unsafe {
        if (*msg).msg_control.is_null() {
            return false;
        }
        let mut at = libc::CMSG_FIRSTHDR(msg);
        while !at.is_null() {
            if (*at).cmsg_level == libc::IPPROTO_UDP && (*at).cmsg_type == UDP_SEGMENT {
                return true;
            }
            at = libc::CMSG_NXTHDR(msg, at);
        }
        false
    }
}

/// Sends a datagram as a message; `None`: it is to go as it is.
///
/// # Safety
/// As `sendmsg`.
unsafe fn transmit(fd: c_int, dgram: &Dgram, msg: *const msghdr, flags: c_int) -> Option<isize> {
    const PLAIN: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY;
    if !dgram.may_send(flags & libc::MSG_MORE != 0) || flags & PLAIN != 0 {
        return None;
    }
    // SAFETY: the caller's.
    let (mut own, parts) = unsafe { (*msg, parts(msg)) };
    let peer = if own.msg_name.is_null() {
        dgram.peer()
    } else {
        // SAFETY: the caller's.
        unsafe { sys::address(own.msg_name.cast(), own.msg_namelen) }
    };
    let peer = peer?;
    let kind = dgram.kind_to(peer)?;
    let length = parts
        .iter()
        .fold(0usize, |sum, part| sum.saturating_add(part.iov_len));
    // SAFETY: the caller's.
    if length > message::LONGEST || parts.len() > 1024 || unsafe { is_segmented(msg) } {
        return None;
    }
    let (epoch, id) = dgram.next(fd, kind);
    let mut head = [0u8; HEAD];
    let head_len = message::head(kind, epoch, id, length, &mut head);
    let head = head.get_mut(..head_len)?;
    let payload = parts.iter().filter(|part| part.iov_len > 0).map(|part| {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) }
    });
    let mut tail: [u8; TAIL] = message::tail(head, payload);
    let one = |bytes: &mut [u8]| iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let (head, tail) = (one(head), one(&mut tail));
    let n = if parts.len() <= FEW {
        let mut list = [tail; FEW + 2];
        let all = std::iter::once(&head).chain(parts);
        for (place, part) in list.iter_mut().zip(all) {
            *place = *part;
        }
        own.msg_iov = list.as_mut_ptr();
        own.msg_iovlen = (parts.len() + 2) as _;
        // SAFETY: the caller's; the kernel reads head and tail here.
        unsafe { real::sendmsg(fd, &raw const own, flags) }
    } else {
        let mut list = [&[head], parts, &[tail]].concat();
        own.msg_iov = list.as_mut_ptr();
        own.msg_iovlen = list.len() as _;
        // SAFETY: as above.
        unsafe { real::sendmsg(fd, &raw const own, flags) }
    };
    if n >= 0 {
        show::message(fd, 0, length);
        return Some(length as isize);
    }
    match sys::errno() {
        // With the headers it is too long for the path, where the socket does not let IP fragment it: without them it may fit.
        libc::EMSGSIZE => None,
        e => {
            if e == libc::ECONNREFUSED {
                peers::forget(peer);
            }
            sys::set_errno(e);
            Some(n)
        }
    }
}

/// `sendmsg`; `None`: it is the kernel's.
///
/// # Safety
/// As `sendmsg`.
#[inline]
pub(super) unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> Option<isize> {
    let dgram = table::dgram(fd)?;
    if msg.is_null() {
        return None;
    }
    // SAFETY: the caller's.
    unsafe { transmit(fd, dgram, msg, flags) }
}

/// `sendto`, `send` and `write`; `None`: it is the kernel's.
///
/// # Safety
/// As `sendto`.
#[inline]
pub(super) unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: *const sockaddr,
    alen: socklen_t,
) -> Option<isize> {
    let dgram = table::dgram(fd)?;
    let mut part = iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    };
    let mut msg = header(&raw mut part, 1);
    msg.msg_name = addr.cast_mut().cast();
    msg.msg_namelen = if addr.is_null() { 0 } else { alen };
    // SAFETY: the caller's.
    unsafe { transmit(fd, dgram, &raw const msg, flags) }
}

/// `writev`; `None`: it is the kernel's. Writing nothing sends nothing.
///
/// # Safety
/// As `writev`.
pub(super) unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int) -> Option<isize> {
    let dgram = table::dgram(fd)?;
    let n = usize::try_from(n).ok().filter(|n| (1..=1024).contains(n))?;
    let msg = header(iov.cast_mut(), n);
    // SAFETY: the caller's.
    unsafe {
        if parts(&raw const msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
        transmit(fd, dgram, &raw const msg, 0)
    }
}

/// `sendmmsg`; `None`: it is the kernel's.
///
/// # Safety
/// As `sendmmsg`.
pub(super) unsafe fn sendmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
) -> Option<c_int> {
    table::dgram(fd)?;
    // The kernel takes no more at once.
    let n = n.min(1024) as usize;
    for i in 0..n {
        // SAFETY: the caller's.
        let sent = unsafe {
            let msg = &raw const (*msgs.add(i)).msg_hdr;
            sendmsg(fd, msg, flags).unwrap_or_else(|| real::sendmsg(fd, msg, flags))
        };
        if sent < 0 {
            return Some(if i > 0 { i as c_int } else { -1 });
        }
        // SAFETY: the caller's.
        unsafe { (*msgs.add(i)).msg_len = sent as c_uint };
    }
    Some(n as c_int)
}

/// The bytes of the next datagram, for FIONREAD; `None`: it is the kernel's.
pub(super) fn readable(fd: c_int) -> Option<usize> {
    let dgram = reader(fd, 0)?;
    let buffer = take();
    if buffer.is_null() {
        return None;
    }
    let mut msg = header(std::ptr::null_mut(), 0);
    let errno = sys::errno();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let mut all = iovec {
        iov_base: buffer.cast(),
        iov_len: limits::DATAGRAM,
    };
    msg.msg_iov = &raw mut all;
    msg.msg_iovlen = 1;
    // SAFETY: the buffer is writable.
    let n = unsafe { real::recvmsg(fd, &raw mut msg, flags) };
    let length = usize::try_from(n).ok().map(|n| {
        // SAFETY: the kernel has written so many bytes of the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(buffer, n.min(limits::DATAGRAM)) };
        payload(bytes, false).0.len()
    });
    give_back(buffer);
    sys::set_errno(errno);
    // An error of the socket was taken by looking: the kernel's call says what it would have said.
    let _ = dgram;
    length
}
