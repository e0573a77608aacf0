//! Datagrams: reading and writing UDP sockets that may have messages.
//!
//! The kernel's calls wait, report errors and fill in addresses and control data as they would for the program: only the
//! buffers are others.

use crate::conn::dgram::Dgram;
use crate::conn::table;
use crate::limits;
use crate::message::{self, HEAD, Kind, TAIL};
use crate::peers;
use crate::real;
use crate::sys;
use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::net::SocketAddr;

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

/// Whether the kernel would take the list of buffers of a message: what it refuses is not looked at here.
///
/// # Safety
/// `msg` is readable, and so is its list, unless it is longer than the kernel's lists.
pub(super) unsafe fn is_sound(msg: *const msghdr) -> bool {
    // SAFETY: the caller's.
    unsafe {
        (*msg).msg_iovlen <= limits::BUFFERS
            && ((*msg).msg_iovlen == 0 || !(*msg).msg_iov.is_null())
            && parts(msg)
                .iter()
                .all(|part| !part.iov_base.is_null() || part.iov_len == 0)
    }
}

/// The list of buffers of a message.
///
/// # Safety
/// The list of a valid message.
pub(super) unsafe fn parts<'a>(msg: *const msghdr) -> &'a [iovec] {
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
pub(super) unsafe fn scatter(bytes: &[u8], parts: &[iovec]) -> usize {
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

/// Copies a list of buffers.
///
/// # Safety
/// The buffers are readable, and `at` has room for all of them.
unsafe fn gather(parts: &[iovec], at: *mut u8) {
    let mut done = 0;
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(part.iov_base.cast(), at.add(done), part.iov_len) };
        done += part.iov_len;
    }
}

/// What the program gets of a datagram, or of the copy of a datagram in a report of an error, which may be cut off.
fn payload(bytes: &[u8], is_report: bool) -> (&[u8], bool) {
    if is_report {
        return message::quoted(bytes).map_or((bytes, false), |payload| (payload, true));
    }
    match message::open(bytes) {
        Some((_, payload)) => (payload, true),
        None => (bytes, false),
    }
}

/// A call that receives into a buffer of this thread has returned `n`: gives the payload to the program's buffers. Returns the bytes
/// that they got, and how many there were.
///
/// # Safety
/// The kernel has written `n` bytes of the buffer; those of the program are writable.
unsafe fn deliver(
    fd: c_int,
    dgram: &Dgram,
    buffer: *mut u8,
    n: isize,
    parts: &[iovec],
    flags: c_int,
) -> Option<(usize, usize)> {
    let Ok(length) = usize::try_from(n) else {
        let errno = sys::errno();
        give_back(buffer);
        if errno == libc::ECONNREFUSED
            && let Some(peer) = dgram.peer()
        {
            peers::forget(peer);
        }
        sys::set_errno(errno);
        return None;
    };
    // SAFETY: the caller's.
    let bytes = unsafe { std::slice::from_raw_parts(buffer, length.min(limits::DATAGRAM)) };
    let (payload, is_message) = payload(bytes, flags & libc::MSG_ERRQUEUE != 0);
    // SAFETY: the caller's.
    let done = unsafe { scatter(payload, parts) };
    let length = payload.len();
    if is_message && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0 {
        dgram.received(fd, done);
    }
    give_back(buffer);
    Some((done, length))
}

/// What a call returns.
fn result((done, length): (usize, usize), flags: c_int) -> isize {
    // Of a report the kernel does not say how long it was.
    if flags & libc::MSG_TRUNC != 0 && flags & libc::MSG_ERRQUEUE == 0 {
        length as isize
    } else {
        done as isize
    }
}

/// Receives a datagram as `recvmsg`.
///
/// # Safety
/// As `recvmsg`.
pub(super) unsafe fn receive(fd: c_int, dgram: &Dgram, msg: *mut msghdr, flags: c_int) -> isize {
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
    // SAFETY: the caller's.
    let Some(found) = (unsafe { deliver(fd, dgram, buffer, n, parts, flags) }) else {
        return n;
    };
    // SAFETY: the caller's.
    unsafe {
        (*msg).msg_namelen = own.msg_namelen;
        (*msg).msg_controllen = own.msg_controllen;
        (*msg).msg_flags = own.msg_flags;
        if found.0 < found.1 {
            (*msg).msg_flags |= libc::MSG_TRUNC;
        }
    }
    result(found, flags)
}

fn header(parts: *mut iovec, n: size_t) -> msghdr {
    // SAFETY: zeros are a valid message header.
    let mut m: msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = parts;
    m.msg_iovlen = n as _;
    m
}

/// The socket of a call that reads, if messages to it are opened. They are from its beginning: the call may wait until the
/// socket has entered, by a message of another thread.
#[inline]
pub(super) fn reader(fd: c_int, flags: c_int) -> Option<&'static Dgram> {
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
    let dgram = reader(fd, flags).filter(|_| !buf.is_null() || len == 0)?;
    let part = iovec {
        iov_base: buf,
        iov_len: len,
    };
    let buffer = take();
    if buffer.is_null() {
        return None;
    }
    // SAFETY: the buffer is writable; the rest is the caller's.
    unsafe {
        let n = real::recvfrom(fd, buffer.cast(), limits::DATAGRAM, flags, addr, alen);
        let found = deliver(fd, dgram, buffer, n, &[part], flags);
        Some(found.map_or(n, |found| result(found, flags)))
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
    let mut msg = header(iov.cast_mut(), usize::try_from(n).ok()?);
    // SAFETY: the caller's.
    unsafe {
        let msg = &raw const msg;
        if !is_sound(msg) || parts(msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
    }
    // SAFETY: the caller's.
    unsafe { Some(receive(fd, dgram, &raw mut msg, 0)) }
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
        if msg.is_null() || !is_sound(msg) {
            return None;
        }
        Some(receive(fd, dgram, msg, flags))
    }
}

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

/// How a datagram goes as a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    peer: SocketAddr,
    kind: Kind,
    /// Payload bytes.
    pub(super) length: usize,
}

/// How a datagram goes as a message; `None`: it is to go as it is.
///
/// # Safety
/// As `sendmsg`.
pub(super) unsafe fn plan(dgram: &Dgram, msg: *const msghdr, flags: c_int) -> Option<Plan> {
    const PLAIN: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY | libc::MSG_MORE;
    // SAFETY: the caller's.
    if !dgram.may_send() || flags & PLAIN != 0 || unsafe { !is_sound(msg) } {
        return None;
    }
    // SAFETY: the caller's.
    let (own, parts) = unsafe { (*msg, parts(msg)) };
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
    if length > message::LONGEST || unsafe { is_segmented(msg) } {
        return None;
    }
    Some(Plan { peer, kind, length })
}

/// Writes a whole message; returns its length.
///
/// # Safety
/// `at` has room for the headers and the bytes of the list, whose buffers are readable.
pub(super) unsafe fn join(
    fd: c_int,
    dgram: &Dgram,
    plan: &Plan,
    parts: &[iovec],
    at: *mut u8,
) -> usize {
    let (epoch, id) = dgram.next(fd, plan.kind);
    let mut head = [0u8; HEAD];
    let head_len = message::head(plan.kind, epoch, id, plan.length, &mut head);
    let end = head_len + plan.length;
    // SAFETY: the caller's; what the checksum reads was written.
    unsafe {
        std::ptr::copy_nonoverlapping(head.as_ptr(), at, head_len);
        gather(parts, at.add(head_len));
        let before = std::slice::from_raw_parts(at, end);
        let tail = message::tail(before, std::iter::empty());
        std::ptr::copy_nonoverlapping(tail.as_ptr(), at.add(end), TAIL);
    }
    end + TAIL
}

/// Sends a datagram that is put together from several calls; `None`: it is not.
///
/// # Safety
/// As `sendmsg`.
unsafe fn put_together(
    fd: c_int,
    dgram: &Dgram,
    msg: *const msghdr,
    flags: c_int,
) -> Option<isize> {
    let more = flags & libc::MSG_MORE != 0;
    if !more && !dgram.holds_back() {
        return None;
    }
    if more {
        dgram.hold_back(true);
    }
    // SAFETY: the caller's.
    let n = unsafe { real::sendmsg(fd, msg, flags) };
    // After some errors the kernel still has what there was before.
    if n >= 0 && !more {
        dgram.hold_back(false);
    }
    Some(n)
}

/// Sends a datagram as a message; `None`: it is to go as it is.
///
/// # Safety
/// As `sendmsg`.
unsafe fn transmit(fd: c_int, dgram: &Dgram, msg: *const msghdr, flags: c_int) -> Option<isize> {
    // SAFETY: the caller's.
    if let Some(n) = unsafe { put_together(fd, dgram, msg, flags) } {
        return Some(n);
    }
    // SAFETY: the caller's.
    let (plan, mut own, parts) = unsafe { (plan(dgram, msg, flags)?, *msg, parts(msg)) };
    let length = plan.length;
    let n = if length <= limits::JOINED {
        let mut all = [const { MaybeUninit::<u8>::uninit() }; HEAD + limits::JOINED + TAIL];
        let at = all.as_mut_ptr().cast::<u8>();
        // SAFETY: so long it is; the buffers are the caller's.
        unsafe {
            let size = join(fd, dgram, &plan, parts, at);
            if own.msg_control.is_null() {
                let (addr, alen) = (own.msg_name.cast(), own.msg_namelen);
                real::sendto(fd, at.cast(), size, flags, addr, alen)
            } else {
                let mut part = iovec {
                    iov_base: at.cast(),
                    iov_len: size,
                };
                own.msg_iov = &raw mut part;
                own.msg_iovlen = 1;
                real::sendmsg(fd, &raw const own, flags)
            }
        }
    } else {
        let (epoch, id) = dgram.next(fd, plan.kind);
        let mut head = [0u8; HEAD];
        let head_len = message::head(plan.kind, epoch, id, length, &mut head);
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
        let mut few = [const { MaybeUninit::<iovec>::uninit() }; limits::BUFFERS_HERE + 2];
        let all = parts.len() + 2;
        let is_long = all > few.len();
        // A thread that is cancelled in the call is unwound through this frame, and keeps a long list.
        let list = if is_long {
            // SAFETY: no pointer.
            unsafe { libc::malloc(all * size_of::<iovec>()) }.cast::<iovec>()
        } else {
            few.as_mut_ptr().cast()
        };
        if list.is_null() {
            return None;
        }
        // SAFETY: the list has so many elements; the rest is the caller's; the kernel reads head and tail here.
        unsafe {
            list.write(head);
            std::ptr::copy_nonoverlapping(parts.as_ptr(), list.add(1), parts.len());
            list.add(1 + parts.len()).write(tail);
            own.msg_iov = list;
            own.msg_iovlen = all as _;
            let n = real::sendmsg(fd, &raw const own, flags);
            if is_long {
                let errno = sys::errno();
                libc::free(list.cast());
                sys::set_errno(errno);
            }
            n
        }
    };
    if n >= 0 {
        dgram.sent(fd, length);
        return Some(length as isize);
    }
    match sys::errno() {
        // With the headers it is too long for the path, where the socket does not let IP fragment it: without them it may fit.
        libc::EMSGSIZE => None,
        e => {
            if e == libc::ECONNREFUSED {
                peers::forget(plan.peer);
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
    let msg = header(iov.cast_mut(), usize::try_from(n).ok()?);
    // SAFETY: the caller's.
    unsafe {
        let msg = &raw const msg;
        if !is_sound(msg) || parts(msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
    }
    // SAFETY: the caller's.
    unsafe { transmit(fd, dgram, &raw const msg, 0) }
}

/// The bytes of the next datagram, for FIONREAD; `None`: it is the kernel's.
pub(super) fn readable(fd: c_int) -> Option<usize> {
    reader(fd, 0)?;
    let mut there: c_int = 0;
    // SAFETY: the address of an integer, which this request writes.
    let r = unsafe { real::ioctl(fd, libc::FIONREAD, (&raw mut there).expose_provenance()) };
    // Looking at a datagram would take an error that waits. Then it is said how long the message is.
    if r < 0 || there == 0 || !matches!(sys::poll_one(fd, 0, 0), Ok(e) if e & libc::POLLERR == 0) {
        return None;
    }
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
    length
}
