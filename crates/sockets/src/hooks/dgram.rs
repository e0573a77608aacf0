//! The hooks that read and write UDP sockets whose datagrams may be messages of datagram-iWARP.
//!
//! The kernel's calls still wait, report errors, and fill in addresses and control data. The
//! library only replaces the buffers. Only reliable datagrams use another socket than the program's
//! (see `reliable.rs`). A datagram that is not a message is called plain: the kernel sends it
//! unchanged.

use super::buffers::{Plan, gather, give_back, header, is_sound, parts, result, scatter, take};
use super::reliable;
use crate::conn::dgram::Dgram;
use crate::conn::table;
use crate::limits;
use crate::message::{self, HEAD, Kind, TAIL};
use crate::peers;
use crate::real;
use crate::sys;
use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t};
use std::mem::MaybeUninit;
use std::net::SocketAddr;

/// Returns the bytes of a datagram that the program gets, and whether the datagram is a message. `is_report`: the bytes are the
/// quoted datagram in an error report, which may be cut off.
fn payload(bytes: &[u8], is_report: bool) -> (&[u8], bool) {
    if is_report {
        return message::quoted(bytes).map_or((bytes, false), |payload| (payload, true));
    }
    match message::open(bytes) {
        Some((_, payload)) => (payload, true),
        None => (bytes, false),
    }
}

/// Called when a call has failed, with its errno set. If the kernel reports that no socket is bound
/// at the peer's port any more, removes what is known about the peer, because a program that binds
/// there later may not have the library.
pub(super) fn forget_if_refused(dgram: &Dgram) {
    let errno = sys::errno();
    if errno == libc::ECONNREFUSED
        && let Some(peer) = dgram.peer()
    {
        peers::forget(peer);
    }
    sys::set_errno(errno);
}

/// Copies the payload of a datagram that was received into the thread's buffer to the program's buffers. Returns the number of
/// bytes copied and the full length of the payload, or `None` if the kernel's call failed (`n` is negative).
///
/// # Safety
/// The kernel has written `n` bytes of the buffer. The buffers of the program are writable.
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
        sys::set_errno(errno);
        forget_if_refused(dgram);
        return None;
    };
    // SAFETY: upheld by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(buffer, length.min(limits::DATAGRAM)) };
    let (payload, is_message) = payload(bytes, flags & libc::MSG_ERRQUEUE != 0);
    // SAFETY: upheld by the caller.
    let done = unsafe { scatter(payload, parts) };
    let length = payload.len();
    if is_message && flags & (libc::MSG_PEEK | libc::MSG_ERRQUEUE) == 0 {
        dgram.received(fd, done);
    }
    give_back(buffer);
    Some((done, length))
}

/// Receives a datagram like `recvmsg`.
///
/// # Safety
/// The requirements of `recvmsg` apply.
pub(super) unsafe fn receive(fd: c_int, dgram: &Dgram, msg: *mut msghdr, flags: c_int) -> isize {
    if let Some(pair) = reliable::reader(fd, dgram, flags) {
        // SAFETY: upheld by the caller.
        if let Some(n) = unsafe { reliable::receive(fd, dgram, pair, msg, flags) } {
            return n;
        }
    }
    // SAFETY: upheld by the caller.
    let (mut own, parts) = unsafe { (*msg, parts(msg)) };
    let buffer = take();
    if buffer.is_null() {
        // SAFETY: upheld by the caller.
        return unsafe { real::recvmsg(fd, msg, flags) };
    }
    let mut all = iovec {
        iov_base: buffer.cast(),
        iov_len: limits::DATAGRAM,
    };
    own.msg_iov = &raw mut all;
    own.msg_iovlen = 1;
    // SAFETY: the buffer is writable; the rest is upheld by the caller.
    let n = unsafe { real::recvmsg(fd, &raw mut own, flags) };
    // SAFETY: upheld by the caller.
    let Some(found) = (unsafe { deliver(fd, dgram, buffer, n, parts, flags) }) else {
        return n;
    };
    // SAFETY: upheld by the caller.
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

/// Returns the socket of a read call if received messages must be unwrapped. A socket that is not yet registered in the
/// directory, and to which peers therefore send no messages, is included: while this call waits, another thread may send a message,
/// which registers the socket.
#[inline]
pub(super) fn reader(fd: c_int, flags: c_int) -> Option<&'static Dgram> {
    table::dgram(fd).filter(|d| d.opens() && flags & libc::MSG_OOB == 0)
}

/// Handles `recvfrom`. Returns `None` if the call goes to the kernel.
///
/// # Safety
/// The requirements of `recvfrom` apply.
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
    let is_wrong = buf.is_null() && len > 0;
    let part = iovec {
        iov_base: buf,
        iov_len: if is_wrong { 0 } else { len },
    };
    if let Some(pair) = reliable::reader(fd, dgram, flags) {
        // SAFETY: upheld by the caller.
        match unsafe { recvfrom_pair(fd, dgram, pair, part, flags, addr, alen) } {
            // The datagram is consumed although the call fails, as in the kernel.
            Some(0..) if is_wrong => return Some(super::fail_long(libc::EFAULT)),
            Some(n) => return Some(n),
            None => {}
        }
    }
    if is_wrong {
        return None;
    }
    let buffer = take();
    if buffer.is_null() {
        return None;
    }
    // SAFETY: the buffer is writable; the rest is upheld by the caller.
    unsafe {
        let n = real::recvfrom(fd, buffer.cast(), limits::DATAGRAM, flags, addr, alen);
        let found = deliver(fd, dgram, buffer, n, &[part], flags);
        Some(found.map_or(n, |found| result(found, flags)))
    }
}

/// Handles `recvfrom` of a socket whose datagrams may be reliable.
///
/// # Safety
/// The requirements of `recvfrom` apply.
unsafe fn recvfrom_pair(
    fd: c_int,
    dgram: &Dgram,
    pair: c_int,
    mut part: iovec,
    flags: c_int,
    addr: *mut sockaddr,
    alen: *mut socklen_t,
) -> Option<isize> {
    let mut msg = header(&raw mut part, 1);
    // SAFETY: upheld by the caller.
    unsafe {
        if !addr.is_null() && !alen.is_null() {
            msg.msg_name = addr.cast();
            msg.msg_namelen = *alen;
        }
        let n = reliable::receive(fd, dgram, pair, &raw mut msg, flags)?;
        if n >= 0 && !msg.msg_name.is_null() {
            *alen = msg.msg_namelen;
        }
        Some(n)
    }
}

/// Handles `read`. Returns `None` if the call goes to the kernel. A read of 0 bytes consumes no datagram.
///
/// # Safety
/// The requirements of `read` apply.
#[inline]
pub(super) unsafe fn read(fd: c_int, buf: *mut c_void, len: size_t) -> Option<isize> {
    if len == 0 {
        return None;
    }
    // SAFETY: upheld by the caller.
    unsafe { recvfrom(fd, buf, len, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

/// Handles `readv`. Returns `None` if the call goes to the kernel.
///
/// # Safety
/// The requirements of `readv` apply.
pub(super) unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int) -> Option<isize> {
    let dgram = reader(fd, 0)?;
    let mut msg = header(iov.cast_mut(), usize::try_from(n).ok()?);
    // SAFETY: upheld by the caller.
    unsafe {
        let msg = &raw const msg;
        if !is_sound(msg) || parts(msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
    }
    // SAFETY: upheld by the caller.
    unsafe { Some(receive(fd, dgram, &raw mut msg, 0)) }
}

/// Handles `recvmsg`. Returns `None` if the call goes to the kernel.
///
/// # Safety
/// The requirements of `recvmsg` apply.
#[inline]
pub(super) unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> Option<isize> {
    let dgram = reader(fd, flags)?;
    // SAFETY: upheld by the caller.
    unsafe {
        if msg.is_null() || !is_sound(msg) {
            return None;
        }
        Some(receive(fd, dgram, msg, flags))
    }
}

/// Returns whether the control data makes the kernel split the payload into several datagrams (`UDP_SEGMENT`).
///
/// # Safety
/// The requirements of `sendmsg` apply.
unsafe fn is_segmented(msg: *const msghdr) -> bool {
    const UDP_SEGMENT: c_int = 103;
    // SAFETY: upheld by the caller; the control part has the format of cmsg(3).
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

/// Decides how to send a datagram as a message. `None`: it is sent plain.
///
/// # Safety
/// The requirements of `sendmsg` apply.
pub(super) unsafe fn plan(dgram: &Dgram, msg: *const msghdr, flags: c_int) -> Option<Plan> {
    /// Payload bytes that every path is assumed to carry: all hosts accept IP datagrams of 576 bytes (RFC 791).
    const SHORT: usize = 512;
    const PLAIN: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY | libc::MSG_MORE;
    // SAFETY: upheld by the caller.
    if !dgram.may_send() || flags & PLAIN != 0 || unsafe { !is_sound(msg) } {
        return None;
    }
    // SAFETY: upheld by the caller.
    let (own, parts) = unsafe { (*msg, parts(msg)) };
    let peer = if own.msg_name.is_null() {
        dgram.peer()
    } else {
        // SAFETY: upheld by the caller.
        unsafe { sys::address(own.msg_name.cast(), own.msg_namelen) }
    };
    let peer = peer?;
    let kind = dgram.kind_to(peer)?;
    let length = parts
        .iter()
        .fold(0usize, |sum, part| sum.saturating_add(part.iov_len));
    // If IP fragmentation is off, the program expects EMSGSIZE for a datagram that exceeds the path MTU. Reliable datagrams would be
    // sent in several packets, so this one is sent unreliably, and the kernel refuses it.
    let is_refused = kind == Kind::Reliable
        && dgram.is_kept_whole()
        && length > SHORT
        && length > usize::from(sys::path_mtu(peer.ip()));
    let kind = if is_refused { Kind::Send } else { kind };
    let is_long = length > message::LONGEST && kind != Kind::Reliable;
    // SAFETY: upheld by the caller.
    if is_long || length > longest(&peer) || unsafe { is_segmented(msg) } {
        return None;
    }
    Some(Plan { peer, kind, length })
}

/// Returns the longest payload that a message or reliable datagram to this address may have. A longer one is passed to the
/// kernel, which refuses it over IPv4, and sends it unchanged over IPv6 if a UDP datagram can have this length.
fn longest(peer: &SocketAddr) -> usize {
    if peer.ip().to_canonical().is_ipv4() {
        crate::reliable::LONGEST
    } else {
        message::LONGEST
    }
}

/// Writes a whole message to `at`. Returns its length.
///
/// # Safety
/// The buffers of `parts` are readable and contain `plan.length` bytes in all. `at` has room for these bytes, and `HEAD + TAIL` more.
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
    // SAFETY: upheld by the caller; the checksum reads only bytes that were written above.
    unsafe {
        std::ptr::copy_nonoverlapping(head.as_ptr(), at, head_len);
        gather(parts, at.add(head_len));
        let before = std::slice::from_raw_parts(at, end);
        let tail = message::tail(before, std::iter::empty());
        std::ptr::copy_nonoverlapping(tail.as_ptr(), at.add(end), TAIL);
    }
    end + TAIL
}

/// Sends a piece of a datagram that is built by several calls (`MSG_MORE`). Returns `None` if this call sends a whole
/// datagram.
///
/// # Safety
/// The requirements of `sendmsg` apply.
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
    // SAFETY: upheld by the caller.
    let n = unsafe { real::sendmsg(fd, msg, flags) };
    // After some errors the kernel keeps the pieces from earlier calls.
    if n >= 0 && !more {
        dgram.hold_back(false);
    }
    Some(n)
}

/// Sends a datagram as a message. Returns `None` if it must be sent plain.
///
/// # Safety
/// The requirements of `sendmsg` apply.
unsafe fn transmit(fd: c_int, dgram: &Dgram, msg: *const msghdr, flags: c_int) -> Option<isize> {
    // SAFETY: upheld by the caller.
    let planned = unsafe { plan(dgram, msg, flags) };
    if let Some(plan) = planned.as_ref().filter(|plan| plan.kind == Kind::Reliable) {
        // SAFETY: upheld by the caller.
        if let Some(n) = unsafe { reliable::transmit(fd, dgram, plan, msg, flags) } {
            return Some(n);
        }
    }
    let error = reliable::take_error(dgram);
    if error != 0 {
        return Some(super::fail_long(error));
    }
    dgram.sends_itself();
    // SAFETY: upheld by the caller.
    if let Some(n) = unsafe { put_together(fd, dgram, msg, flags) } {
        return Some(n);
    }
    // SAFETY: upheld by the caller.
    let (plan, mut own, parts) = unsafe { (planned?, *msg, parts(msg)) };
    if plan.length > message::LONGEST {
        return None;
    }
    let length = plan.length;
    let n = if length <= limits::JOINED {
        let mut all = [const { MaybeUninit::<u8>::uninit() }; HEAD + limits::JOINED + TAIL];
        let at = all.as_mut_ptr().cast::<u8>();
        // SAFETY: `parts` contains `length` bytes in all, for which `all` has room; the caller guarantees that the buffers are valid.
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
            // SAFETY: upheld by the caller.
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
        // If the thread is cancelled in the call, this frame is unwound and has no destructor, so a long list leaks.
        let list = if is_long {
            // SAFETY: no pointer is passed.
            unsafe { libc::malloc(all * size_of::<iovec>()) }.cast::<iovec>()
        } else {
            few.as_mut_ptr().cast()
        };
        if list.is_null() {
            return None;
        }
        // SAFETY: the list has `all` elements; the kernel only reads head and tail; the rest is upheld by the caller.
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
        // The socket has fragmentation off, and with the headers the datagram exceeds the path MTU. It may fit without them.
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

/// Handles `sendmsg`. Returns `None` if the call goes to the kernel.
///
/// # Safety
/// The requirements of `sendmsg` apply.
#[inline]
pub(super) unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> Option<isize> {
    let dgram = table::dgram(fd)?;
    if msg.is_null() {
        return None;
    }
    // SAFETY: upheld by the caller.
    unsafe { transmit(fd, dgram, msg, flags) }
}

/// Handles `sendto`, `send` and `write`. Returns `None` if the call goes to the kernel.
///
/// # Safety
/// The requirements of `sendto` apply.
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
    // SAFETY: upheld by the caller.
    unsafe { transmit(fd, dgram, &raw const msg, flags) }
}

/// Handles `writev`. Returns `None` if the call goes to the kernel. An empty list sends nothing.
///
/// # Safety
/// The requirements of `writev` apply.
pub(super) unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int) -> Option<isize> {
    let dgram = table::dgram(fd)?;
    let msg = header(iov.cast_mut(), usize::try_from(n).ok()?);
    // SAFETY: upheld by the caller.
    unsafe {
        let msg = &raw const msg;
        if !is_sound(msg) || parts(msg).iter().all(|part| part.iov_len == 0) {
            return None;
        }
    }
    // SAFETY: upheld by the caller.
    unsafe { transmit(fd, dgram, &raw const msg, 0) }
}

/// Returns the length of the next datagram for `FIONREAD`. Returns `None` if the call goes to the kernel.
pub(super) fn readable(fd: c_int) -> Option<usize> {
    let dgram = reader(fd, 0)?;
    if let Some(pair) = reliable::reader(fd, dgram, 0) {
        return Some(reliable::readable(pair));
    }
    let mut there: c_int = 0;
    // SAFETY: the argument is the address of an integer, which this request writes.
    let r = unsafe { real::ioctl(fd, libc::FIONREAD, (&raw mut there).expose_provenance()) };
    // Peeking would consume a pending error. In that case the length with the headers is returned.
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
        // SAFETY: the kernel has written `n` bytes of the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(buffer, n.min(limits::DATAGRAM)) };
        payload(bytes, false).0.len()
    });
    give_back(buffer);
    sys::set_errno(errno);
    length
}
