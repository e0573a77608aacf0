//! `sendmmsg` and `recvmmsg` for lists that contain messages of datagram-iWARP, with one system call for each list.

use super::buffers::{is_sound, parts, scatter};
use super::dgram::{self, forget_if_refused, join, plan, reader, receive};
use super::{fail, reliable};
use crate::conn::dgram::Dgram;
use crate::conn::table;
use crate::limits;
use crate::message::{self, HEAD, Kind, TAIL};
use crate::real;
use crate::sys;
use libc::{c_int, c_uint, iovec, mmsghdr, timespec};

/// The longest list that the kernel accepts in one call.
const MOST: usize = 1024;

/// Memory of one call: the kernel's list, one `iovec` for each datagram, and the bytes. It holds raw pointers and is not
/// freed on drop: a thread that is cancelled in the call leaks it.
struct Memory {
    all: *mut libc::c_void,
    list: *mut mmsghdr,
    iov: *mut iovec,
    bytes: *mut u8,
}

/// Allocates the memory of a call. The field `all` is null if the allocation fails.
fn memory(n: usize, bytes: usize) -> Memory {
    let (list, iov) = (n * size_of::<mmsghdr>(), n * size_of::<iovec>());
    // SAFETY: `malloc` has no requirements; the parts follow each other in order of decreasing alignment.
    unsafe {
        let all = libc::malloc(list + iov + bytes);
        let at = all.cast::<u8>();
        Memory {
            all,
            list: at.cast(),
            iov: at.wrapping_add(list).cast(),
            bytes: at.wrapping_add(list + iov),
        }
    }
}

fn free(memory: &Memory) {
    let errno = sys::errno();
    // SAFETY: the pointer was allocated by `memory`.
    unsafe { libc::free(memory.all) }
    sys::set_errno(errno);
}

/// Handles `sendmmsg`. Returns `None` if no datagram of the list is a message, so that the caller passes the list to the kernel.
///
/// # Safety
/// The requirements of `sendmmsg` apply.
pub(super) unsafe fn sendmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
) -> Option<c_int> {
    let dgram = table::dgram(fd)?;
    let n = (n as usize).min(MOST);
    if n == 0 || msgs.is_null() {
        return None;
    }
    if flags & libc::MSG_MORE != 0 {
        dgram.hold_back(true);
        return None;
    }
    if dgram.holds_back() {
        // The first datagram continues one that an earlier call has begun with `MSG_MORE`.
        // SAFETY: upheld by the caller.
        return Some(unsafe { send_each(fd, msgs, n, flags) });
    }
    let (mut total, mut messages) = (0usize, 0);
    for i in 0..n {
        // SAFETY: upheld by the caller.
        if let Some(plan) = unsafe { plan(dgram, &raw const (*msgs.add(i)).msg_hdr, flags) } {
            if plan.kind == Kind::Reliable {
                // SAFETY: upheld by the caller.
                return Some(unsafe { send_each(fd, msgs, n, flags) });
            }
            total = total.saturating_add(plan.length + HEAD + TAIL);
            messages += 1;
        }
    }
    dgram.sends_itself();
    if messages == 0 {
        return None;
    }
    let sent = if total <= limits::BATCH {
        // SAFETY: upheld by the caller.
        unsafe { send_list(fd, dgram, msgs, n, flags, total) }
    } else {
        None
    };
    // SAFETY: upheld by the caller.
    Some(sent.unwrap_or_else(|| unsafe { send_each(fd, msgs, n, flags) }))
}

/// Sends the list in one call. Returns `None` if the datagrams must be sent one by one.
///
/// # Safety
/// The requirements of `sendmmsg` apply. `total`: bytes of all datagrams that are messages, with their headers.
unsafe fn send_list(
    fd: c_int,
    dgram: &Dgram,
    msgs: *mut mmsghdr,
    n: usize,
    flags: c_int,
    total: usize,
) -> Option<c_int> {
    let memory = memory(n, total);
    if memory.all.is_null() {
        return None;
    }
    let mut used = 0;
    for i in 0..n {
        // SAFETY: upheld by the caller. The memory has `n` elements and room for each message that the caller counted; a
        // datagram that the caller did not count is sent plain.
        unsafe {
            let given = msgs.add(i);
            let own = memory.list.add(i);
            own.write(*given);
            let Some(plan) = plan(dgram, &raw const (*given).msg_hdr, flags)
                .filter(|plan| used + plan.length + HEAD + TAIL <= total)
            else {
                continue;
            };
            let at = memory.bytes.add(used);
            let parts = parts(&raw const (*given).msg_hdr);
            let size = join(fd, dgram, &plan, parts, at);
            used += size;
            let iov = memory.iov.add(i);
            iov.write(iovec {
                iov_base: at.cast(),
                iov_len: size,
            });
            (*own).msg_hdr.msg_iov = iov;
            (*own).msg_hdr.msg_iovlen = 1;
        }
    }
    // SAFETY: the list is a copy of the caller's with valid buffers.
    let sent = unsafe { real::sendmmsg(fd, memory.list, n as c_uint, flags) };
    if sent < 0 {
        forget_if_refused(dgram);
    }
    for i in 0..usize::try_from(sent).unwrap_or(0) {
        // SAFETY: the kernel has sent this many, at most `n`.
        unsafe {
            let (given, own) = (msgs.add(i), memory.list.add(i));
            let parts = parts(&raw const (*given).msg_hdr);
            let length: usize = parts.iter().map(|part| part.iov_len).sum();
            (*given).msg_len = length as c_uint;
            if (*own).msg_len as usize != length {
                dgram.sent(fd, length);
            }
        }
    }
    free(&memory);
    // EMSGSIZE: the first datagram is too long. It may fit without the added headers. If a later one is too long, the kernel ends the
    // list before it, and the next call gets the error.
    (sent >= 0 || sys::errno() != libc::EMSGSIZE).then_some(sent)
}

/// Sends the datagrams one by one.
///
/// # Safety
/// The requirements of `sendmmsg` apply.
unsafe fn send_each(fd: c_int, msgs: *mut mmsghdr, n: usize, flags: c_int) -> c_int {
    for i in 0..n {
        // SAFETY: upheld by the caller.
        let sent = unsafe {
            let msg = &raw const (*msgs.add(i)).msg_hdr;
            dgram::sendmsg(fd, msg, flags).unwrap_or_else(|| real::sendmsg(fd, msg, flags))
        };
        if sent < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        // SAFETY: upheld by the caller.
        unsafe { (*msgs.add(i)).msg_len = sent as c_uint };
    }
    n as c_int
}

/// Handles `recvmmsg`. Returns `None` if the caller should pass the call to the kernel.
///
/// # Safety
/// The requirements of `recvmmsg` apply.
pub(super) unsafe fn recvmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> Option<c_int> {
    let dgram = reader(fd, flags)?;
    if msgs.is_null() {
        return None;
    }
    // The kernel ends the list before the first header that it refuses.
    let n = (0..(n as usize).min(MOST))
        // SAFETY: upheld by the caller.
        .take_while(|i| unsafe { is_sound(&raw const (*msgs.add(*i)).msg_hdr) })
        .count();
    if n == 0 {
        return None;
    }
    if let Some(pair) = reliable::reader(fd, dgram, flags) {
        // SAFETY: upheld by the caller.
        return Some(unsafe { reliable::recvmmsg(fd, dgram, pair, msgs, n, flags, timeout) });
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        // SAFETY: upheld by the caller.
        return Some(unsafe { reports(fd, dgram, msgs, n, flags) });
    }
    let mut total = 0usize;
    for i in 0..n {
        // SAFETY: upheld by the caller.
        total = total.saturating_add(unsafe { room(msgs, i) });
    }
    // The kernel maps only the pages that a datagram is written to, so large totals cost little.
    let memory = memory(n, total);
    if memory.all.is_null() {
        return Some(fail(libc::ENOMEM));
    }
    let mut used = 0;
    for i in 0..n {
        // SAFETY: upheld by the caller; the memory has `n` elements and `total` bytes.
        unsafe {
            let own = memory.list.add(i);
            own.write(*msgs.add(i));
            let iov = memory.iov.add(i);
            let size = room(msgs, i);
            iov.write(iovec {
                iov_base: memory.bytes.add(used).cast(),
                iov_len: size,
            });
            used += size;
            (*own).msg_hdr.msg_iov = iov;
            (*own).msg_hdr.msg_iovlen = 1;
        }
    }
    // SAFETY: the list is a copy of the caller's with valid buffers.
    let got = unsafe { real::recvmmsg(fd, memory.list, n as c_uint, flags, timeout) };
    if got < 0 {
        forget_if_refused(dgram);
    }
    for i in 0..usize::try_from(got).unwrap_or(0) {
        // SAFETY: the kernel has received this many, at most `n`.
        unsafe { give(fd, dgram, msgs.add(i), memory.list.add(i), flags) };
    }
    free(&memory);
    Some(got)
}

/// Receives error reports (`MSG_ERRQUEUE`) one by one, which is possible because these calls never block.
///
/// # Safety
/// The requirements of `recvmmsg` apply.
unsafe fn reports(fd: c_int, dgram: &Dgram, msgs: *mut mmsghdr, n: usize, flags: c_int) -> c_int {
    for i in 0..n {
        // SAFETY: upheld by the caller.
        let got = unsafe { receive(fd, dgram, &raw mut (*msgs.add(i)).msg_hdr, flags) };
        if got < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        // SAFETY: upheld by the caller.
        unsafe { (*msgs.add(i)).msg_len = got as c_uint };
    }
    n as c_int
}

/// Returns the size of the buffer for a datagram: a message that fits the program's buffers fits with its headers too.
///
/// # Safety
/// The requirements of `recvmmsg` apply.
unsafe fn room(msgs: *mut mmsghdr, i: usize) -> usize {
    // SAFETY: upheld by the caller.
    let parts = unsafe { parts(&raw const (*msgs.add(i)).msg_hdr) };
    let sum = |sum: usize, part: &iovec| sum.saturating_add(part.iov_len);
    parts.iter().fold(HEAD + TAIL, sum).min(limits::DATAGRAM)
}

/// Copies a received datagram to the program's buffers.
///
/// # Safety
/// The kernel has filled `own`, whose only buffer was allocated by the caller.
unsafe fn give(fd: c_int, dgram: &Dgram, given: *mut mmsghdr, own: *mut mmsghdr, flags: c_int) {
    // SAFETY: upheld by the caller.
    unsafe {
        let iov = *(*own).msg_hdr.msg_iov;
        // With `MSG_TRUNC` this is the length of the whole datagram.
        let length = (*own).msg_len as usize;
        let there = length.min(iov.iov_len);
        let bytes = std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), there);
        let is_cut = (*own).msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        let (payload, full, is_message) = match message::open(bytes) {
            Some((_, payload)) => (payload, payload.len(), true),
            // A truncated message has no checksum, so only its header can be checked.
            None => match message::begins(bytes).filter(|_| is_cut) {
                Some(head) => {
                    let payload = bytes.get(head..).unwrap_or(&[]);
                    (payload, length.saturating_sub(head + TAIL), true)
                }
                None => (bytes, length, false),
            },
        };
        let done = scatter(payload, parts(&raw const (*given).msg_hdr));
        let header = &raw mut (*given).msg_hdr;
        (*header).msg_namelen = (*own).msg_hdr.msg_namelen;
        (*header).msg_controllen = (*own).msg_hdr.msg_controllen;
        (*header).msg_flags = (*own).msg_hdr.msg_flags;
        if done < full {
            (*header).msg_flags |= libc::MSG_TRUNC;
        }
        let all = flags & libc::MSG_TRUNC != 0;
        (*given).msg_len = if all { full } else { done } as c_uint;
        if is_message && flags & libc::MSG_PEEK == 0 {
            dgram.received(fd, done);
        }
    }
}
