//! The functions that read and write UDP sockets whose datagrams may be reliable. Instead of the UDP socket they use one end of a pair
//! of local sockets. A thread of the library has the other end (see [`crate::conn::reliable`]).

use super::buffers::{Plan, give_back, header, parts, result, scatter, take};
use super::wait::{Until, time_error};
use crate::conn::dgram::Dgram;
use crate::limits;
use crate::message::Kind;
use crate::peers;
use crate::real;
use crate::record::{self, Controls, HEAD, Record};
use crate::sys;
use libc::{c_int, c_uint, iovec, mmsghdr, msghdr, timespec};
use std::mem::MaybeUninit;

/// Returns the flags for a call on the pair, so that the call blocks if one on the program's socket would.
fn flags_for(fd: c_int, flags: c_int) -> c_int {
    let flags = flags & (libc::MSG_PEEK | libc::MSG_DONTWAIT) | libc::MSG_NOSIGNAL;
    if flags & libc::MSG_DONTWAIT == 0 && sys::is_nonblocking(fd) {
        flags | libc::MSG_DONTWAIT
    } else {
        flags
    }
}

/// Returns the program's end of the pair for a read. `None`: the call goes to the kernel's socket.
pub(super) fn reader(fd: c_int, dgram: &Dgram, flags: c_int) -> Option<c_int> {
    if flags & (libc::MSG_ERRQUEUE | libc::MSG_OOB) != 0 {
        return None;
    }
    dgram.served(fd)
}

/// Receives a datagram like `recvmsg`. `pair`: the program's end. Returns `None` if the socket was passed to another
/// program, or shut down, so that the call goes to the kernel's socket.
///
/// # Safety
/// The requirements of `recvmsg` apply. The buffer list is sound.
pub(super) unsafe fn receive(
    fd: c_int,
    dgram: &Dgram,
    pair: c_int,
    msg: *mut msghdr,
    flags: c_int,
) -> Option<isize> {
    let error = take_error(dgram);
    if error != 0 {
        return Some(super::fail_long(error));
    }
    let buffer = take();
    if buffer.is_null() {
        return Some(super::fail_long(libc::ENOMEM));
    }
    let own = flags_for(fd, flags);
    // SAFETY: the buffer has this many bytes.
    let n = unsafe { real::recv(pair, buffer.cast(), limits::RECORD, own) };
    let Ok(n) = usize::try_from(n) else {
        let errno = sys::errno();
        give_back(buffer);
        sys::set_errno(errno);
        return Some(-1);
    };
    // SAFETY: the kernel has written `n` bytes of the buffer.
    let bytes = unsafe { std::slice::from_raw_parts(buffer, n) };
    let record = Record::parse(bytes);
    let Some(record) = record.filter(|r| r.kind == record::Kind::Datagram) else {
        give_back(buffer);
        if n > 0 {
            if own & libc::MSG_PEEK != 0 {
                skip_error(pair);
            }
            // This record reports an error. Another call may have taken the error already.
            // SAFETY: upheld by the caller.
            return unsafe { receive(fd, dgram, pair, msg, flags) };
        }
        // Nothing was read: the socket was passed to another program, or this program has shut it down.
        return (!dgram.is_over()).then_some(0);
    };
    // SAFETY: upheld by the caller.
    let done = unsafe {
        let done = scatter(record.payload, parts(msg));
        (*msg).msg_flags = 0;
        if done < record.payload.len() {
            (*msg).msg_flags |= libc::MSG_TRUNC;
        }
        if (*msg).msg_name.is_null() {
            (*msg).msg_namelen = 0;
        } else {
            let room = ((*msg).msg_namelen as usize).min(record.name.len());
            std::ptr::copy_nonoverlapping(record.name.as_ptr(), (*msg).msg_name.cast(), room);
            (*msg).msg_namelen = record.name.len() as c_uint;
        }
        give_controls(record.control, msg);
        done
    };
    let length = record.payload.len();
    if record.is_message && flags & libc::MSG_PEEK == 0 {
        dgram.received(fd, done);
    }
    give_back(buffer);
    Some(result((done, length), flags))
}

/// Copies the control messages that fit. As in the kernel, the last one needs no room for its padding, and is cut if its data does not fit.
///
/// # Safety
/// The requirements of `recvmsg` apply.
unsafe fn give_controls(bytes: &[u8], msg: *mut msghdr) {
    // SAFETY: upheld by the caller.
    unsafe {
        let room = if (*msg).msg_control.is_null() {
            0
        } else {
            (*msg).msg_controllen
        };
        let mut done = 0;
        for c in Controls(bytes) {
            let left = room - done;
            let length = size_of::<libc::cmsghdr>() + c.data.len();
            if length > left {
                (*msg).msg_flags |= libc::MSG_CTRUNC;
            }
            if left < size_of::<libc::cmsghdr>() {
                break;
            }
            let copied = length.min(left);
            let to = (*msg).msg_control.cast::<u8>().add(done);
            std::ptr::copy_nonoverlapping(c.all.as_ptr(), to, copied);
            // The length of the message, which is the first member of its head.
            to.cast::<usize>().write_unaligned(copied);
            done += c.all.len().min(left);
        }
        (*msg).msg_controllen = done;
    }
}

/// Sends a datagram reliably. Returns `None` if it must be sent as an unreliable message, for one of these reasons:
///
/// - It has control messages that the queue pair cannot pass on.
/// - Its destination is a link-local address, which is valid only with the number of an interface.
/// - It has as many buffers as the kernel accepts, and the record needs one more.
/// - The socket has no pair, or there is no memory for the buffer list.
///
/// # Safety
/// The requirements of `sendmsg` apply.
pub(super) unsafe fn transmit(
    fd: c_int,
    dgram: &Dgram,
    plan: &Plan,
    msg: *const msghdr,
    flags: c_int,
) -> Option<isize> {
    // SAFETY: upheld by the caller.
    let (control, parts) = unsafe { (controls(msg), parts(msg)) };
    let mut from = None;
    for c in Controls(control) {
        from = Some(sys::chosen_source(c.level, c.kind, c.data)?);
    }
    if let std::net::IpAddr::V6(ip) = plan.peer.ip()
        && ip.is_unicast_link_local()
    {
        return None;
    }
    // The head of the record is one more buffer.
    if parts.len() >= limits::BUFFERS {
        return None;
    }
    let pair = dgram.served(fd)?;
    let error = take_error(dgram);
    if error != 0 {
        return Some(super::fail_long(error));
    }
    // Registers the socket, as the first message of any kind does.
    dgram.next(fd, Kind::Reliable);
    let (name, name_len) = sys::name_bytes(plan.peer, false);
    let source = from.filter(|ip| !ip.is_unspecified()).map(record::source);
    let (source, source_len) = source.unwrap_or(([0; 16], 0));
    let record = Record {
        is_message: true,
        name: name.get(..name_len)?,
        control: source.get(..source_len)?,
        ..Record::empty(record::Kind::Datagram)
    };
    let mut head = [0u8; HEAD + 16];
    let head_len = HEAD + source_len;
    head.get_mut(..HEAD)?
        .copy_from_slice(&record.head(plan.length));
    head.get_mut(HEAD..head_len)?
        .copy_from_slice(record.control);
    let mut few = [const { MaybeUninit::<iovec>::uninit() }; limits::BUFFERS_HERE + 1];
    let all = parts.len() + 1;
    let is_long = all > few.len();
    // If the thread is cancelled in the call, this frame is unwound without destructors, so the memory of a long list leaks.
    let list = if is_long {
        // SAFETY: no pointer is passed.
        unsafe { libc::malloc(all * size_of::<iovec>()) }.cast::<iovec>()
    } else {
        few.as_mut_ptr().cast()
    };
    if list.is_null() {
        return None;
    }
    let own = header(list, all);
    let flags = flags_for(fd, flags & !libc::MSG_PEEK);
    // SAFETY: the list has `all` elements; the kernel only reads the header; the rest is upheld by the caller.
    let n = unsafe {
        list.write(iovec {
            iov_base: head.as_mut_ptr().cast(),
            iov_len: head_len,
        });
        std::ptr::copy_nonoverlapping(parts.as_ptr(), list.add(1), parts.len());
        let n = real::sendmsg(pair, &raw const own, flags);
        if is_long {
            let errno = sys::errno();
            libc::free(list.cast());
            sys::set_errno(errno);
        }
        n
    };
    if n < 0 {
        return Some(n);
    }
    dgram.sent(fd, plan.length);
    Some(plan.length as isize)
}

/// Returns the control messages of a program's datagram.
///
/// # Safety
/// The requirements of `sendmsg` apply.
unsafe fn controls<'a>(msg: *const msghdr) -> &'a [u8] {
    // SAFETY: upheld by the caller.
    unsafe {
        if (*msg).msg_control.is_null() {
            return &[];
        }
        std::slice::from_raw_parts((*msg).msg_control.cast(), (*msg).msg_controllen)
    }
}

/// Receives a list of datagrams like `recvmmsg`.
///
/// # Safety
/// The requirements of `recvmmsg` apply. The first `n` headers are sound.
pub(super) unsafe fn recvmmsg(
    fd: c_int,
    dgram: &Dgram,
    pair: c_int,
    msgs: *mut mmsghdr,
    n: usize,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: upheld by the caller.
    if !unsafe { Until::accepts(timeout) } {
        return super::fail(time_error(timeout));
    }
    // SAFETY: upheld by the caller.
    let until = unsafe { Until::spec(timeout) };
    let mut done = 0;
    for i in 0..n {
        let more = if i > 0 && flags & libc::MSG_WAITFORONE != 0 {
            libc::MSG_DONTWAIT
        } else {
            0
        };
        // SAFETY: upheld by the caller.
        let got = unsafe {
            let msg = &raw mut (*msgs.add(i)).msg_hdr;
            // If the socket was passed to another program, the list ends here.
            receive(fd, dgram, pair, msg, flags | more)
                .unwrap_or_else(|| super::fail_long(libc::EAGAIN))
        };
        if got < 0 {
            if i == 0 {
                return -1;
            }
            break;
        }
        // SAFETY: upheld by the caller.
        unsafe { (*msgs.add(i)).msg_len = got as c_uint };
        done += 1;
        // As in the kernel's `recvmmsg`, the time-out is checked only after a datagram.
        if until.is_over() {
            break;
        }
    }
    // SAFETY: upheld by the caller.
    unsafe { until.give_left(timeout) };
    done
}

/// Takes the pending error of the socket. Returns 0 if there is none.
pub(super) fn take_error(dgram: &Dgram) -> c_int {
    if !dgram.has_error() {
        return 0;
    }
    let error = dgram.take_error();
    if let Some(pair) = dgram.pair().filter(|_| error != 0) {
        skip_error(pair);
    }
    if error == libc::ECONNREFUSED
        && let Some(peer) = dgram.peer()
    {
        peers::forget(peer);
    }
    error
}

/// Removes the next record if it only reports an error.
fn skip_error(pair: c_int) {
    let errno = sys::errno();
    let mut head = [0u8; HEAD];
    let n = sys::peek(pair, &mut head).unwrap_or(0);
    let record = head.get(..n).and_then(Record::parse);
    if record.is_some_and(|r| r.kind == record::Kind::Error) {
        let _ = sys::recv(pair, &mut [std::io::IoSliceMut::new(&mut head)]);
    }
    sys::set_errno(errno);
}

/// Returns the payload length of the next datagram, 0 if there is none.
pub(super) fn readable(pair: c_int) -> usize {
    let mut head = [0u8; HEAD];
    let errno = sys::errno();
    let n = sys::peek(pair, &mut head).unwrap_or(0);
    sys::set_errno(errno);
    Record::length(head.get(..n).unwrap_or(&[])).unwrap_or(0)
}
