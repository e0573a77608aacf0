//! Lists of datagrams: sendmmsg and recvmmsg with messages among them, in one call of the kernel.

use super::dgram::{self, is_sound, join, parts, plan, reader, receive, scatter};
use super::fail;
use crate::conn::dgram::Dgram;
use crate::conn::table;
use crate::limits;
use crate::message::{self, HEAD, TAIL};
use crate::real;
use crate::sys;
use libc::{c_int, c_uint, iovec, mmsghdr, timespec};

/// Datagrams that the kernel takes in one call.
const MOST: usize = 1024;

/// Memory of one call: the kernel's list, a buffer for each datagram, and the bytes. It is used by address: a thread that is cancelled
/// in the call keeps it.
struct Memory {
    all: *mut libc::c_void,
    list: *mut mmsghdr,
    iov: *mut iovec,
    bytes: *mut u8,
}

/// Null: there is none.
fn memory(n: usize, bytes: usize) -> Memory {
    let (list, iov) = (n * size_of::<mmsghdr>(), n * size_of::<iovec>());
    // SAFETY: no pointer; the parts follow each other, and their alignments do not grow.
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
    // SAFETY: `memory` made it.
    unsafe { libc::free(memory.all) }
    sys::set_errno(errno);
}

/// `sendmmsg`; `None`: it is the kernel's, because nothing of it is a message.
///
/// # Safety
/// As `sendmmsg`.
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
        // The first belongs to what other calls have begun.
        // SAFETY: the caller's.
        return Some(unsafe { send_each(fd, msgs, n, flags) });
    }
    let (mut total, mut messages) = (0usize, 0);
    for i in 0..n {
        // SAFETY: the caller's.
        if let Some(plan) = unsafe { plan(dgram, &raw const (*msgs.add(i)).msg_hdr, flags) } {
            total = total.saturating_add(plan.length + HEAD + TAIL);
            messages += 1;
        }
    }
    if messages == 0 {
        return None;
    }
    let sent = if total <= limits::BATCH {
        // SAFETY: the caller's.
        unsafe { send_list(fd, dgram, msgs, n, flags, total) }
    } else {
        None
    };
    // SAFETY: the caller's.
    Some(sent.unwrap_or_else(|| unsafe { send_each(fd, msgs, n, flags) }))
}

/// Sends them in one call; `None`: each is to be sent alone.
///
/// # Safety
/// As `sendmmsg`. `total`: bytes of all that are messages, with their headers.
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
        // SAFETY: the caller's; the memory has so many elements, and room for each message that was planned before: a
        // datagram that was not is sent as it is.
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
    // SAFETY: the list is that of the caller, but for its buffers.
    let sent = unsafe { real::sendmmsg(fd, memory.list, n as c_uint, flags) };
    for i in 0..usize::try_from(sent).unwrap_or(0) {
        // SAFETY: so many were sent.
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
    // The first may be too long with its headers alone, and where the kernel ended the list it says why in the next call.
    (sent >= 0 || sys::errno() != libc::EMSGSIZE).then_some(sent)
}

/// Sends them one by one.
///
/// # Safety
/// As `sendmmsg`.
unsafe fn send_each(fd: c_int, msgs: *mut mmsghdr, n: usize, flags: c_int) -> c_int {
    for i in 0..n {
        // SAFETY: the caller's.
        let sent = unsafe {
            let msg = &raw const (*msgs.add(i)).msg_hdr;
            dgram::sendmsg(fd, msg, flags).unwrap_or_else(|| real::sendmsg(fd, msg, flags))
        };
        if sent < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        // SAFETY: the caller's.
        unsafe { (*msgs.add(i)).msg_len = sent as c_uint };
    }
    n as c_int
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
    if msgs.is_null() {
        return None;
    }
    // The kernel's call ends before the first that it refuses.
    let n = (0..(n as usize).min(MOST))
        // SAFETY: the caller's.
        .take_while(|i| unsafe { is_sound(&raw const (*msgs.add(*i)).msg_hdr) })
        .count();
    if n == 0 {
        return None;
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        // SAFETY: the caller's.
        return Some(unsafe { reports(fd, dgram, msgs, n, flags) });
    }
    let mut total = 0usize;
    for i in 0..n {
        // SAFETY: the caller's.
        total = total.saturating_add(unsafe { room(msgs, i) });
    }
    // Pages that no datagram reaches are not there.
    let memory = memory(n, total);
    if memory.all.is_null() {
        return Some(fail(libc::ENOMEM));
    }
    let mut used = 0;
    for i in 0..n {
        // SAFETY: the caller's; the memory has so many elements, and bytes.
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
    // SAFETY: the list is that of the caller, but for its buffers.
    let got = unsafe { real::recvmmsg(fd, memory.list, n as c_uint, flags, timeout) };
    for i in 0..usize::try_from(got).unwrap_or(0) {
        // SAFETY: so many were received.
        unsafe { give(fd, dgram, msgs.add(i), memory.list.add(i), flags) };
    }
    free(&memory);
    Some(got)
}

/// Receives reports of errors one by one: these calls never wait.
///
/// # Safety
/// As `recvmmsg`.
unsafe fn reports(fd: c_int, dgram: &Dgram, msgs: *mut mmsghdr, n: usize, flags: c_int) -> c_int {
    for i in 0..n {
        // SAFETY: the caller's.
        let got = unsafe { receive(fd, dgram, &raw mut (*msgs.add(i)).msg_hdr, flags) };
        if got < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        // SAFETY: the caller's.
        unsafe { (*msgs.add(i)).msg_len = got as c_uint };
    }
    n as c_int
}

/// Bytes for a datagram, so that a message that fits the buffers of the program is whole.
///
/// # Safety
/// As `recvmmsg`.
unsafe fn room(msgs: *mut mmsghdr, i: usize) -> usize {
    // SAFETY: the caller's.
    let parts = unsafe { parts(&raw const (*msgs.add(i)).msg_hdr) };
    let sum = |sum: usize, part: &iovec| sum.saturating_add(part.iov_len);
    parts.iter().fold(HEAD + TAIL, sum).min(limits::DATAGRAM)
}

/// Gives a datagram that was received to the program's buffers.
///
/// # Safety
/// The kernel has filled `own`, whose one buffer the caller has made.
unsafe fn give(fd: c_int, dgram: &Dgram, given: *mut mmsghdr, own: *mut mmsghdr, flags: c_int) {
    // SAFETY: the caller's.
    unsafe {
        let iov = *(*own).msg_hdr.msg_iov;
        // With MSG_TRUNC it is the length of the datagram.
        let length = (*own).msg_len as usize;
        let there = length.min(iov.iov_len);
        let bytes = std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), there);
        let is_cut = (*own).msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        let (payload, full, is_message) = match message::open(bytes) {
            Some((_, payload)) => (payload, payload.len(), true),
            // Of one that is longer than the buffers the checksum is not there.
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
