//! The hooks that read and write: `read`, `recv`, `send`, `write`, `sendfile` and their variants.

use super::life::set_entry;
use super::wait::{Until, kick, time_error};
use super::{batch, dgram, fail, fail_long, is_nowhere};
use crate::conn::sock::{self, GONE, Mode, Others, Sock, Wait};
use crate::conn::table::{self, Entry};
use crate::directory;
use crate::limits;
use crate::queue::Dest;
use crate::real;
use crate::stream::Cut;
use crate::sys::{self, Kicked, TimeLimit};
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};
use std::io::{IoSlice, IoSliceMut};
use std::ptr::{null, null_mut};

/// Returns the stream of `fd` to write to, after deciding an undecided connection. `None`: the call goes to the kernel.
///
/// # Errors
/// The errno with which the program's call fails.
#[inline]
fn writer(fd: c_int, flags: c_int) -> Result<Option<&'static Sock>, c_int> {
    let Some(sock) = table::sock(fd) else {
        return Ok(None);
    };
    if sock.mode() == Mode::Up || sock.decide(fd, true) == Mode::Up {
        return Ok(Some(sock));
    }
    // As in `wait_first`.
    if sock.mode() == Mode::Accepted && !sock.is_ours(fd) {
        return Err(libc::EIO);
    }
    wait_connected(fd, sock, flags, libc::SO_SNDTIMEO)
}

/// Returns the stream of `fd` to read from, after deciding an undecided connection. `None`: the call goes to the kernel.
///
/// # Errors
/// The errno with which the program's call fails.
#[inline]
fn reader(fd: c_int, flags: c_int) -> Result<Option<&'static Sock>, c_int> {
    let Some(sock) = table::sock(fd) else {
        return Ok(None);
    };
    if flags & libc::MSG_ERRQUEUE != 0 {
        // The kernel has the queue of errors.
        return Ok(None);
    }
    if sock.mode() == Mode::Up || sock.decide(fd, false) == Mode::Up {
        return Ok(Some(sock));
    }
    if flags & libc::MSG_OOB != 0 {
        // A read of the urgent byte does not wait.
        return Ok(None);
    }
    wait_first(fd, sock, flags)
}

/// Returns whether the descriptor is a connection that is, or may become, a stream. On a connection the kernel's `read` returns 0 at once if
/// it is asked for no bytes.
fn is_connection(fd: c_int) -> bool {
    table::sock(fd).is_some_and(|sock| sock.mode() != Mode::Plain)
}

/// Waits for the first byte of an accepted connection as the kernel's call would, then decides whether to upgrade the connection. If the
/// wait fails, the program's call fails with the same errno. It is not passed to the kernel, which could return the bytes of a Request
/// that arrives in between.
#[cold]
fn wait_first(
    fd: c_int,
    sock: &'static Sock,
    flags: c_int,
) -> Result<Option<&'static Sock>, c_int> {
    while sock.mode() == Mode::Accepted {
        // In a child that was forked while another thread had locked the connection, it stays undecided.
        if !sock.is_ours(fd) {
            return Err(libc::EIO);
        }
        let mut byte = 0u8;
        let flags = libc::MSG_PEEK | flags & libc::MSG_DONTWAIT;
        // SAFETY: the buffer has one byte.
        let n = unsafe { real::recv(fd, (&raw mut byte).cast(), 1, flags) };
        if n < 0 {
            return Err(sys::errno());
        }
        sock.decide(fd, false);
    }
    wait_connected(fd, sock, flags, libc::SO_RCVTIMEO)
}

/// Waits until TCP has connected as the kernel's call would, then decides. The kernel's call could send bytes before the Request. `option`:
/// the name of the socket option with the time-out of the call.
#[cold]
fn wait_connected(
    fd: c_int,
    sock: &'static Sock,
    flags: c_int,
    option: c_int,
) -> Result<Option<&'static Sock>, c_int> {
    let mut limit = TimeLimit::default();
    while sock.mode() == Mode::Connecting {
        if !sys::is_connecting(fd) {
            // Either TCP has connected, or the kernel's call returns the error.
            sock.decide(fd, false);
            break;
        }
        if flags & libc::MSG_DONTWAIT != 0 || sys::is_nonblocking(fd) {
            return Err(libc::EAGAIN);
        }
        let left = limit.left(fd, option);
        match sys::poll_one(fd, libc::POLLOUT, left) {
            Ok(0) => return Err(libc::EAGAIN),
            Err(libc::EINTR) if interrupted(left) == 0 => {}
            Err(e) => return Err(e),
            Ok(_) => {}
        }
    }
    Ok((sock.mode() == Mode::Up).then_some(sock))
}

fn receive(fd: c_int, sock: &'static Sock, parts: &mut [IoSliceMut<'_>], flags: c_int) -> isize {
    if !sock.is_ours(fd) {
        return fail_long(libc::EIO);
    }
    let mut dest = Dest::new(parts);
    if flags & libc::MSG_OOB != 0 {
        let peek = flags & libc::MSG_PEEK != 0;
        let got = sock.with(|s| s.read_urgent(fd, &mut dest, peek, sock.may_pull()));
        return match got {
            Some((Ok(()), _)) => dest.done() as isize,
            Some((Err(e), _)) => fail_long(e),
            None => fail_long(libc::EBADF),
        };
    }
    if dest.is_full() {
        // The program has no room. As in the kernel, the call waits for a byte, and leaves it.
        let mut byte = [0];
        let parts = &mut [IoSliceMut::new(&mut byte)];
        let flags = flags & libc::MSG_DONTWAIT | libc::MSG_PEEK;
        return receive(fd, sock, parts, flags).min(0);
    }
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0 && !peek;
    let mut limit = TimeLimit::default();
    // OpenSSL looks at errno after a `read` that returns 0, so a call that succeeds does not change it.
    let errno = sys::errno();
    sock::wake_this_thread();
    loop {
        let waits = flags & libc::MSG_DONTWAIT == 0;
        let (result, sleeps) = sock.read(fd, &mut dest, peek, all, waits);
        if sleeps {
            if sleep(fd, sock, &mut limit) {
                continue;
            }
            let e = sys::errno();
            let done = dest.done();
            return if done > 0 {
                sys::set_errno(errno);
                done as isize
            } else {
                fail_long(e)
            };
        }
        let done = dest.done();
        sys::set_errno(errno);
        return match result {
            Err(GONE) if done == 0 && sock.is_disconnected() => fail_long(libc::ECONNRESET),
            Err(GONE) if done == 0 => sys::receive(fd, dest.rest(), flags),
            Err(e) if done == 0 => fail_long(e),
            Ok(()) | Err(_) => done as isize,
        };
    }
}

/// Reads up to `len` bytes and discards them, as TCP does with MSG_TRUNC.
fn discard(fd: c_int, sock: &'static Sock, len: usize, flags: c_int) -> isize {
    let mut scrap = vec![0; len.min(limits::SCRATCH)];
    let parts = &mut [IoSliceMut::new(&mut scrap)];
    receive(fd, sock, parts, flags & !libc::MSG_TRUNC)
}

/// Returns the errno of a wait that a signal has interrupted: 0 if the program's call continues. Calls with a time limit fail
/// (signal(7)).
fn interrupted(left: c_int) -> c_int {
    if left < 0 && sys::signals_restart() {
        0
    } else {
        libc::EINTR
    }
}

/// A thread that is counted as a sleeper.
struct Sleeper {
    sock: &'static Sock,
    /// The eventfd by which other threads wake this one.
    watched: Option<c_int>,
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if let Some(kick) = self.watched {
            self.sock.unwatch(kick);
        }
        self.sock.awake();
    }
}

/// Sleeps until the carrier (the stream's TCP connection) has bytes, or another thread has left some. The caller must be counted as a
/// sleeper. Returns false if the call must fail with errno.
fn sleep(fd: c_int, sock: &'static Sock, limit: &mut TimeLimit) -> bool {
    // The guard removes the thread from the count even if the thread is cancelled while it sleeps.
    let mut sleeper = Sleeper {
        sock,
        watched: None,
    };
    if sys::is_nonblocking(fd) {
        drop(sleeper);
        sys::set_errno(libc::EAGAIN);
        return false;
    }
    let e = match sock.watch_others(kick) {
        Others::Left => 0,
        Others::Absent => {
            let mut byte = 0u8;
            // SAFETY: the buffer has one byte.
            let n = unsafe { real::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
            if n < 0 { sys::errno() } else { 0 }
        }
        Others::Present(kick) => {
            sleeper.watched = kick;
            let left = limit.left(fd, libc::SO_RCVTIMEO);
            match sys::poll_kicked(fd, libc::POLLIN, kick, left) {
                Ok(Kicked::TimeOut) => libc::EAGAIN,
                Ok(Kicked::Ready(_) | Kicked::Other) if left == 0 => libc::EAGAIN,
                Ok(Kicked::Ready(_) | Kicked::Other) => 0,
                Err(libc::EINTR) => interrupted(left),
                Err(e) => e,
            }
        }
    };
    let e = if sock.is_closed(fd) { libc::EBADF } else { e };
    drop(sleeper);
    sys::set_errno(e);
    // The next receive records and returns other errors.
    !matches!(e, libc::EINTR | libc::EAGAIN | libc::EBADF)
}

fn transmit(fd: c_int, sock: &'static Sock, parts: &mut [IoSlice<'_>], flags: c_int) -> isize {
    if !sock.is_ours(fd) {
        return fail_long(libc::EIO);
    }
    if flags & libc::MSG_OOB == 0 {
        return transmit_all(fd, sock, parts, flags);
    }
    let total: usize = parts.iter().map(|p| p.len()).sum();
    let last = parts.iter().rev().find_map(|p| p.last()).copied();
    let Some(byte) = last else { return 0 };
    // The bytes before the urgent one are ordinary ones.
    let before = total - 1;
    if before > 0 {
        let mut ordinary: Vec<IoSlice<'_>> = Cut::new(parts, before).map(IoSlice::new).collect();
        let sent = transmit_all(fd, sock, &mut ordinary, flags & !libc::MSG_OOB);
        if sent != before as isize {
            return sent;
        }
    }
    match transmit_all(fd, sock, &mut [IoSlice::new(&[byte])], flags) {
        1 => total as isize,
        _ if before > 0 => before as isize,
        failed => failed,
    }
}

/// Writes, and waits if the call may. With MSG_OOB there is only one byte.
fn transmit_all(fd: c_int, sock: &'static Sock, parts: &mut [IoSlice<'_>], flags: c_int) -> isize {
    let waits = flags & libc::MSG_DONTWAIT == 0;
    let mut rest = parts;
    let total: usize = rest.iter().map(|p| p.len()).sum();
    let mut done = 0;
    // Only `cannot_write` raises SIGPIPE, and only if nothing was written. The kernel would raise it too if a later part of the program's
    // write fails.
    let kernel = flags & (libc::MSG_MORE | libc::MSG_OOB) | libc::MSG_NOSIGNAL;
    // `is_nonblocking` is a system call, so it is not called for a write that neither has to wait nor starts the stream.
    let may_wait = waits;
    let mut waits = false;
    let mut limit = TimeLimit::default();
    let is_starting = loop {
        IoSlice::advance_slices(&mut rest, 0);
        let (result, wait) = sock.write(fd, rest, kernel, waits);
        match result {
            Ok(n) => {
                done += n;
                IoSlice::advance_slices(&mut rest, n);
                if done >= total {
                    break wait == Some(Wait::Reply);
                }
            }
            Err(libc::EAGAIN) => {
                if !waits && may_wait && !sys::is_nonblocking(fd) {
                    waits = true;
                    continue;
                }
                let Some(wait) = wait else {
                    return if done > 0 {
                        done as isize
                    } else {
                        fail_long(libc::EAGAIN)
                    };
                };
                let e = wait_to_write(fd, sock, wait, &mut limit);
                if e != 0 {
                    return if done > 0 {
                        done as isize
                    } else {
                        fail_long(e)
                    };
                }
            }
            Err(GONE) if sock.is_disconnected() => {
                return if done > 0 {
                    done as isize
                } else {
                    fail_long(libc::ECONNRESET)
                };
            }
            Err(GONE) => {
                let n = sys::transmit(fd, rest, flags);
                return if n < 0 && done > 0 {
                    done as isize
                } else {
                    n.saturating_add(done as isize)
                };
            }
            Err(e) => {
                if done > 0 {
                    return done as isize;
                }
                return cannot_write(e, flags);
            }
        }
    };
    // A blocking write gives the peer time to answer the Request, which offers the upgrade.
    if is_starting && may_wait && !sys::is_nonblocking(fd) {
        let ready = sys::poll_one(fd, libc::POLLIN, limits::REPLY_WAIT);
        if let Ok(events) = ready {
            sock.process(fd, events, libc::POLLIN);
        }
    }
    done as isize
}

/// Fails a write that has sent nothing. Raises SIGPIPE for a broken pipe.
fn cannot_write(errno: c_int, flags: c_int) -> isize {
    if errno == libc::EPIPE && flags & libc::MSG_NOSIGNAL == 0 {
        sys::sigpipe();
    }
    fail_long(errno)
}

/// Waits until more can be written. Returns an errno, or 0.
fn wait_to_write(fd: c_int, sock: &'static Sock, wait: Wait, limit: &mut TimeLimit) -> c_int {
    let left = limit.left(fd, libc::SO_SNDTIMEO);
    // While this thread sleeps, other threads do not reuse the object of a closed connection for another connection.
    let writer = sock.sleeping_writer();
    let result = match wait {
        Wait::Other(turn) => match sock.follow(turn, kick, left) {
            Ok(()) if left == 0 => Ok(Kicked::TimeOut),
            Ok(()) => Ok(Kicked::Other),
            Err(e) => Err(e),
        },
        Wait::Reply => return 0,
        Wait::Room => sys::poll_one(fd, libc::POLLOUT, left).map(|events| match events {
            0 => Kicked::TimeOut,
            events => Kicked::Ready(events),
        }),
        Wait::Credit(kick) => {
            let result = wait_for_credit(fd, sock, kick, left);
            sock.led();
            result
        }
    };
    if sock.is_closed(fd) {
        return libc::EBADF;
    }
    drop(writer);
    match result {
        Ok(Kicked::TimeOut) => libc::EAGAIN,
        Ok(Kicked::Other) => 0,
        Ok(Kicked::Ready(ready)) => {
            sock.process(fd, ready, libc::POLLIN);
            0
        }
        Err(libc::EINTR) => interrupted(left),
        Err(e) => e,
    }
}

/// Waits until the carrier has bytes, which may be credit, or another thread writes to the eventfd `kick`. `left`: the milliseconds of
/// the wait, or -1.
fn wait_for_credit(
    fd: c_int,
    sock: &'static Sock,
    kick: Option<c_int>,
    left: c_int,
) -> Result<Kicked, c_int> {
    if sock.stream().as_ref().is_some_and(|s| s.is_deaf()) {
        // `poll` always reports a carrier that is shut down for receiving, so the caller looks at the carrier at intervals instead.
        let kicked = sys::poll_kicked(-1, 0, kick, limits::DEAF_TICK)?;
        return Ok(match kicked {
            Kicked::TimeOut if left == 0 => Kicked::TimeOut,
            Kicked::TimeOut => Kicked::Ready(libc::POLLIN),
            other => other,
        });
    }
    sys::poll_kicked(fd, libc::POLLIN, kick, left)
}

/// Returns whether a call on a stream has failed because `fd` is not a socket: the program has closed the stream by a call that the library
/// does not see, and opened something else. The library then forgets the stream, and the call goes to the kernel.
#[inline]
fn is_stale(fd: c_int, n: isize) -> bool {
    let is_stale = n < 0 && sys::errno() == libc::ENOTSOCK;
    if is_stale {
        set_entry(fd, Entry::Other);
    }
    is_stale
}

/// Why a call cannot use the memory that the program passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    /// The call fails with this errno at once.
    Fails(c_int),
    /// There is no memory at address 0. A call that reads waits until there is something to read, and then fails with EFAULT.
    Null,
}

/// The most bytes that the kernel reads or writes in one call.
const MOST: usize = 0x7fff_f000;

/// Returns a buffer of the program for reading.
///
/// # Safety
/// `buf` points to `len` writable bytes, or to no memory (see [`is_nowhere`]).
#[inline]
unsafe fn one_mut<'a>(buf: *mut c_void, len: size_t) -> Result<IoSliceMut<'a>, Wrong> {
    match checked(buf, len)? {
        0 => Ok(IoSliceMut::new(&mut [])),
        // SAFETY: upheld by the caller.
        len => Ok(IoSliceMut::new(unsafe {
            std::slice::from_raw_parts_mut(buf.cast(), len)
        })),
    }
}

/// Returns a buffer of the program for writing.
///
/// # Safety
/// `buf` points to `len` readable bytes, or to no memory (see [`is_nowhere`]).
#[inline]
unsafe fn one<'a>(buf: *const c_void, len: size_t) -> Result<IoSlice<'a>, Wrong> {
    match checked(buf, len)? {
        0 => Ok(IoSlice::new(&[])),
        // SAFETY: upheld by the caller.
        len => Ok(IoSlice::new(unsafe {
            std::slice::from_raw_parts(buf.cast(), len)
        })),
    }
}

/// Returns the number of bytes of a buffer that one call uses.
#[inline]
fn checked(buf: *const c_void, len: size_t) -> Result<usize, Wrong> {
    match len {
        1.. if buf.is_null() => Err(Wrong::Null),
        1.. if is_nowhere(buf) => Err(Wrong::Fails(libc::EFAULT)),
        _ => Ok(len.min(MOST)),
    }
}

/// Returns element `i` of a list of buffers.
///
/// # Safety
/// The list has this element.
unsafe fn element(iov: *const iovec, i: usize) -> Result<iovec, Wrong> {
    // SAFETY: upheld by the caller.
    let v = unsafe { *iov.add(i) };
    if isize::try_from(v.iov_len).is_err() {
        return Err(Wrong::Fails(libc::EINVAL));
    }
    Ok(v)
}

/// Checks a list of `n` buffers. `too_long`: the errno for a list that the kernel does not accept.
fn check_list(iov: *const iovec, n: usize, too_long: c_int) -> Result<(), Wrong> {
    if n > limits::BUFFERS {
        return Err(Wrong::Fails(too_long));
    }
    if n > 0 && is_nowhere(iov) {
        return Err(Wrong::Fails(libc::EFAULT));
    }
    Ok(())
}

/// Returns a list of buffers for reading.
///
/// # Safety
/// The requirements of `readv` apply, but addresses may be those of no memory (see [`is_nowhere`]).
unsafe fn list_mut<'a>(
    iov: *const iovec,
    n: usize,
    too_long: c_int,
) -> Result<Vec<IoSliceMut<'a>>, Wrong> {
    check_list(iov, n, too_long)?;
    (0..n)
        .map(|i| {
            // SAFETY: upheld by the caller.
            unsafe {
                let v = element(iov, i)?;
                one_mut(v.iov_base, v.iov_len)
            }
        })
        .collect()
}

/// Returns a list of buffers for writing.
///
/// # Safety
/// The requirements of `writev` apply, but addresses may be those of no memory (see [`is_nowhere`]).
unsafe fn list<'a>(
    iov: *const iovec,
    n: usize,
    too_long: c_int,
) -> Result<Vec<IoSlice<'a>>, Wrong> {
    check_list(iov, n, too_long)?;
    (0..n)
        .map(|i| {
            // SAFETY: upheld by the caller.
            unsafe {
                let v = element(iov, i)?;
                one(v.iov_base, v.iov_len)
            }
        })
        .collect()
}

/// Returns the number of bytes in a list of buffers, whose addresses do not matter.
///
/// # Safety
/// The requirements of [`list_mut`] apply.
unsafe fn total(iov: *const iovec, n: usize) -> Result<usize, Wrong> {
    check_list(iov, n, libc::EMSGSIZE)?;
    (0..n).try_fold(0usize, |all, i| {
        // SAFETY: upheld by the caller.
        let v = unsafe { element(iov, i) }?;
        Ok(all.saturating_add(v.iov_len))
    })
}

/// Handles a read into memory that cannot be used. What could be read stays unread.
#[cold]
fn receive_wrong(fd: c_int, sock: &'static Sock, wrong: Wrong, flags: c_int) -> isize {
    if let Wrong::Fails(errno) = wrong {
        return fail_long(errno);
    }
    let mut byte = [0];
    let flags = flags & !libc::MSG_WAITALL | libc::MSG_PEEK;
    match receive(fd, sock, &mut [IoSliceMut::new(&mut byte)], flags) {
        1.. => fail_long(libc::EFAULT),
        n => n,
    }
}

/// Reads into one buffer.
///
/// # Safety
/// The requirements of [`one_mut`] apply.
#[inline]
unsafe fn receive_one(
    fd: c_int,
    sock: &'static Sock,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> isize {
    // SAFETY: upheld by the caller.
    match unsafe { one_mut(buf, len) } {
        Ok(one) => receive(fd, sock, &mut [one], flags),
        Err(wrong) => receive_wrong(fd, sock, wrong, flags),
    }
}

/// Fails a write from memory that cannot be used.
#[cold]
fn transmit_wrong(wrong: Wrong) -> isize {
    fail_long(match wrong {
        Wrong::Fails(errno) => errno,
        Wrong::Null => libc::EFAULT,
    })
}

/// Writes one buffer.
///
/// # Safety
/// The requirements of [`one`] apply.
#[inline]
unsafe fn transmit_one(
    fd: c_int,
    sock: &'static Sock,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> isize {
    // SAFETY: upheld by the caller.
    match unsafe { one(buf, len) } {
        Ok(one) => transmit(fd, sock, &mut [one], flags),
        Err(wrong) => transmit_wrong(wrong),
    }
}

/// See `read(2)`.
///
/// # Safety
/// The requirements of `read` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    if len == 0 && is_connection(fd) {
        return 0;
    }
    match reader(fd, 0) {
        Ok(Some(sock)) => {
            // SAFETY: upheld by the caller.
            let n = unsafe { receive_one(fd, sock, buf, len, 0) };
            if is_stale(fd, n) {
                // SAFETY: as above.
                return unsafe { real::read(fd, buf, len) };
            }
            n
        }
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::read(fd, buf, len).unwrap_or_else(|| real::read(fd, buf, len))
        },
        Err(e) => fail_long(e),
    }
}

/// See `read(2)`. `room` is the size of the buffer.
///
/// # Safety
/// The requirements of `read` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    if len > room {
        // SAFETY: upheld by the caller. The C library aborts the program.
        return unsafe { real::__read_chk(fd, buf, len, room) };
    }
    // SAFETY: upheld by the caller.
    unsafe { read(fd, buf, len) }
}

/// See `recv(2)`.
///
/// # Safety
/// The requirements of `recv` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match reader(fd, flags) {
        // The program's memory may be shorter than `len`, which counts the bytes to discard.
        Ok(Some(sock)) if flags & libc::MSG_TRUNC != 0 => discard(fd, sock, len, flags),
        // SAFETY: upheld by the caller.
        Ok(Some(sock)) => unsafe { receive_one(fd, sock, buf, len, flags) },
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::recvfrom(fd, buf, len, flags, null_mut(), null_mut())
                .unwrap_or_else(|| real::recv(fd, buf, len, flags))
        },
        Err(e) => fail_long(e),
    }
}

/// See `recv(2)`. `room` is the size of the buffer.
///
/// # Safety
/// The requirements of `recv` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    if len > room {
        // SAFETY: upheld by the caller. The C library aborts the program.
        return unsafe { real::__recv_chk(fd, buf, len, room, flags) };
    }
    // SAFETY: upheld by the caller.
    unsafe { recv(fd, buf, len, flags) }
}

/// See `recvfrom(2)`.
///
/// # Safety
/// The requirements of `recvfrom` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    alen: *mut socklen_t,
) -> ssize_t {
    match reader(fd, flags) {
        Ok(Some(sock)) => {
            let n = if flags & libc::MSG_TRUNC != 0 {
                discard(fd, sock, len, flags)
            } else {
                // SAFETY: upheld by the caller.
                unsafe { receive_one(fd, sock, buf, len, flags) }
            };
            if n >= 0 && !addr.is_null() && is_nowhere(alen) {
                return fail_long(libc::EFAULT);
            }
            if n >= 0 && !addr.is_null() {
                // TCP returns no address either.
                // SAFETY: upheld by the caller.
                unsafe { *alen = 0 };
            }
            n
        }
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::recvfrom(fd, buf, len, flags, addr, alen)
                .unwrap_or_else(|| real::recvfrom(fd, buf, len, flags, addr, alen))
        },
        Err(e) => fail_long(e),
    }
}

/// See `recvfrom(2)`. `room` is the size of the buffer.
///
/// # Safety
/// The requirements of `recvfrom` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    alen: *mut socklen_t,
) -> ssize_t {
    if len > room {
        // SAFETY: upheld by the caller. The C library aborts the program.
        return unsafe { real::__recvfrom_chk(fd, buf, len, room, flags, addr, alen) };
    }
    // SAFETY: upheld by the caller.
    unsafe { recvfrom(fd, buf, len, flags, addr, alen) }
}

/// See `readv(2)`.
///
/// # Safety
/// The requirements of `readv` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: upheld by the caller. A negative number is larger than any list.
    if is_connection(fd) && matches!(unsafe { total(iov, n as usize) }, Ok(0)) {
        return 0;
    }
    match reader(fd, 0) {
        Ok(Some(sock)) => {
            // SAFETY: upheld by the caller. A negative number is larger than any list.
            match unsafe { list_mut(iov, n as usize, libc::EINVAL) } {
                Ok(mut parts) => {
                    let done = receive(fd, sock, &mut parts, 0);
                    if is_stale(fd, done) {
                        // SAFETY: as above.
                        return unsafe { real::readv(fd, iov, n) };
                    }
                    done
                }
                Err(wrong) => receive_wrong(fd, sock, wrong, 0),
            }
        }
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe { dgram::readv(fd, iov, n).unwrap_or_else(|| real::readv(fd, iov, n)) },
        Err(e) => fail_long(e),
    }
}

/// Returns the message header with which `recvmsg` or `sendmsg` does the same as `preadv2` or `pwritev2` with the offset -1 on a socket,
/// and the flags. `None`: the call goes to the kernel.
///
/// # Errors
/// The errno with which the program's call fails.
fn as_message(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> Result<Option<(msghdr, c_int)>, c_int> {
    let is_known = matches!(table::get(fd), Entry::Sock(_) | Entry::Dgram(_));
    if offset != -1 || !is_known {
        return Ok(None);
    }
    const IGNORED: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
    if flags & !(libc::RWF_NOWAIT | IGNORED) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if !(0..=limits::BUFFERS as c_int).contains(&n) {
        return Err(libc::EINVAL);
    }
    let waits = if flags & libc::RWF_NOWAIT != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    Ok(Some((sys::message(iov.cast_mut(), n as usize), waits)))
}

/// See `preadv2(2)`.
///
/// # Safety
/// The requirements of `preadv2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match as_message(fd, iov, n, offset, flags) {
        // The kernel does not ask the socket if the list has no bytes.
        // SAFETY: upheld by the caller.
        Ok(Some(_)) if matches!(unsafe { total(iov, n as usize) }, Ok(0)) => 0,
        // SAFETY: upheld by the caller.
        Ok(Some((mut msg, flags))) => unsafe { recvmsg(fd, &raw mut msg, flags) },
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe { real::preadv2(fd, iov, n, offset, flags) },
        Err(e) => fail_long(e),
    }
}

/// See `preadv2(2)`.
///
/// # Safety
/// The requirements of `preadv2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: upheld by the caller.
    unsafe { preadv2(fd, iov, n, offset, flags) }
}

/// See `pwritev2(2)`.
///
/// # Safety
/// The requirements of `pwritev2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match as_message(fd, iov, n, offset, flags) {
        // As in `preadv2`.
        // SAFETY: upheld by the caller.
        Ok(Some(_)) if matches!(unsafe { total(iov, n as usize) }, Ok(0)) => 0,
        // SAFETY: upheld by the caller.
        Ok(Some((msg, flags))) => unsafe { sendmsg(fd, &raw const msg, flags) },
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe { real::pwritev2(fd, iov, n, offset, flags) },
        Err(e) => fail_long(e),
    }
}

/// See `pwritev2(2)`.
///
/// # Safety
/// The requirements of `pwritev2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: upheld by the caller.
    unsafe { pwritev2(fd, iov, n, offset, flags) }
}

/// See `recvmsg(2)`.
///
/// # Safety
/// The requirements of `recvmsg` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    match reader(fd, flags) {
        Ok(Some(sock)) if !is_nowhere(msg) => {
            // SAFETY: upheld by the caller.
            let (iov, count) = unsafe { ((*msg).msg_iov, (*msg).msg_iovlen) };
            let n = if flags & libc::MSG_TRUNC != 0 {
                // SAFETY: upheld by the caller.
                match unsafe { total(iov, count) } {
                    Ok(len) => discard(fd, sock, len, flags),
                    Err(wrong) => receive_wrong(fd, sock, wrong, flags),
                }
            } else {
                // SAFETY: upheld by the caller.
                match unsafe { list_mut(iov, count, libc::EMSGSIZE) } {
                    Ok(mut parts) => receive(fd, sock, &mut parts, flags),
                    Err(wrong) => receive_wrong(fd, sock, wrong, flags),
                }
            };
            if n >= 0 {
                // SAFETY: upheld by the caller.
                unsafe {
                    (*msg).msg_namelen = 0;
                    (*msg).msg_controllen = 0;
                    (*msg).msg_flags = flags & libc::MSG_OOB;
                }
            }
            n
        }
        // SAFETY: upheld by the caller.
        Ok(_) => unsafe {
            dgram::recvmsg(fd, msg, flags).unwrap_or_else(|| real::recvmsg(fd, msg, flags))
        },
        Err(e) => fail_long(e),
    }
}

/// See `recvmmsg(2)`.
///
/// # Safety
/// The requirements of `recvmmsg` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if is_connection(fd) {
        // SAFETY: the program passes a time or null.
        if !unsafe { Until::accepts(timeout) } {
            return fail(time_error(timeout));
        }
        if n == 0 {
            return 0;
        }
    }
    match reader(fd, flags) {
        Ok(Some(_)) => {}
        Ok(None) => {
            // SAFETY: upheld by the caller.
            return unsafe {
                batch::recvmmsg(fd, msgs, n, flags, timeout)
                    .unwrap_or_else(|| real::recvmmsg(fd, msgs, n, flags, timeout))
            };
        }
        Err(e) => return fail(e),
    }
    if is_nowhere(msgs) {
        return fail(libc::EFAULT);
    }
    // SAFETY: the program passes a time or null.
    let until = unsafe { Until::spec(timeout) };
    let rest = if flags & libc::MSG_WAITFORONE != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    let mut done = 0;
    for i in 0..n as usize {
        let flags = flags & !libc::MSG_WAITFORONE | if i > 0 { rest } else { 0 };
        // SAFETY: upheld by the caller.
        let got = unsafe { recvmsg(fd, &raw mut (*msgs.add(i)).msg_hdr, flags) };
        if got < 0 {
            if i == 0 {
                return -1;
            }
            break;
        }
        // SAFETY: upheld by the caller.
        unsafe { (*msgs.add(i)).msg_len = got as c_uint };
        done += 1;
        // As in the kernel, the time is compared only when a message has arrived.
        if got == 0 || until.is_over() {
            break;
        }
    }
    // SAFETY: the program passes a time or null.
    unsafe { until.give_left(timeout) };
    done
}

/// See `write(2)`.
///
/// # Safety
/// The requirements of `write` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    match writer(fd, 0) {
        Ok(Some(sock)) => {
            // SAFETY: upheld by the caller.
            let n = unsafe { transmit_one(fd, sock, buf, len, 0) };
            if is_stale(fd, n) {
                // SAFETY: as above.
                return unsafe { real::write(fd, buf, len) };
            }
            n
        }
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::sendto(fd, buf, len, 0, null(), 0).unwrap_or_else(|| real::write(fd, buf, len))
        },
        Err(e) => fail_long(e),
    }
}

/// See `send(2)`.
///
/// # Safety
/// The requirements of `send` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match writer(fd, flags) {
        // SAFETY: upheld by the caller.
        Ok(Some(sock)) => unsafe { transmit_one(fd, sock, buf, len, flags) },
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::sendto(fd, buf, len, flags, null(), 0)
                .unwrap_or_else(|| real::send(fd, buf, len, flags))
        },
        Err(e) => fail_long(e),
    }
}

/// See `sendto(2)`.
///
/// # Safety
/// The requirements of `sendto` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    addr: *const sockaddr,
    alen: socklen_t,
) -> ssize_t {
    match writer(fd, flags) {
        // SAFETY: upheld by the caller.
        Ok(Some(sock)) => unsafe { transmit_one(fd, sock, buf, len, flags) },
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::sendto(fd, buf, len, flags, addr, alen)
                .unwrap_or_else(|| real::sendto(fd, buf, len, flags, addr, alen))
        },
        Err(e) => fail_long(e),
    }
}

/// See `writev(2)`.
///
/// # Safety
/// The requirements of `writev` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: upheld by the caller. A negative number is larger than any list.
    if is_connection(fd) && matches!(unsafe { total(iov, n as usize) }, Ok(0)) {
        return 0;
    }
    match writer(fd, 0) {
        Ok(Some(sock)) => {
            // SAFETY: upheld by the caller. A negative number is larger than any list.
            match unsafe { list(iov, n as usize, libc::EINVAL) } {
                Ok(mut parts) => {
                    let done = transmit(fd, sock, &mut parts, 0);
                    if is_stale(fd, done) {
                        // SAFETY: as above.
                        return unsafe { real::writev(fd, iov, n) };
                    }
                    done
                }
                Err(wrong) => transmit_wrong(wrong),
            }
        }
        // SAFETY: upheld by the caller.
        Ok(None) => unsafe {
            dgram::writev(fd, iov, n).unwrap_or_else(|| real::writev(fd, iov, n))
        },
        Err(e) => fail_long(e),
    }
}

/// Handles the descriptors that `msg` passes to another process (`SCM_RIGHTS`). Connections and UDP sockets become plain. Listeners lose
/// their names in the directory.
///
/// # Safety
/// The requirements of `sendmsg` apply.
unsafe fn hand_over(msg: *const msghdr) {
    if is_nowhere(msg) {
        return;
    }
    // SAFETY: upheld by the caller; the control part has the format of cmsg(3).
    unsafe {
        if is_nowhere((*msg).msg_control) {
            return;
        }
        let mut at = libc::CMSG_FIRSTHDR(msg);
        while !at.is_null() {
            if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                let bytes = ((*at).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let first = libc::CMSG_DATA(at).cast::<c_int>();
                for i in 0..bytes / size_of::<c_int>() {
                    let fd = first.add(i).read_unaligned();
                    if let Some(dgram) = table::dgram(fd) {
                        dgram.hand_over(fd);
                    }
                    if let Entry::Listener(_) = table::get(fd)
                        && let Some(name) = directory::give_up(fd)
                    {
                        table::close_own(name);
                    }
                    if let Some(sock) = table::sock(fd)
                        && !(sock.is_ours(fd) && sock.hand_over(fd))
                    {
                        crate::log::always(&format!(
                            "stream {fd} is passed to another process, which cannot use it; add a rule with the mode tcp for it"
                        ));
                    }
                }
            }
            at = libc::CMSG_NXTHDR(msg, at);
        }
    }
}

/// See `sendmsg(2)`.
///
/// # Safety
/// The requirements of `sendmsg` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: upheld by the caller.
    unsafe { hand_over(msg) };
    match writer(fd, flags) {
        Ok(Some(sock)) if !is_nowhere(msg) => {
            // SAFETY: upheld by the caller.
            match unsafe { list((*msg).msg_iov, (*msg).msg_iovlen, libc::EMSGSIZE) } {
                Ok(mut parts) => transmit(fd, sock, &mut parts, flags),
                Err(wrong) => transmit_wrong(wrong),
            }
        }
        // SAFETY: upheld by the caller.
        Ok(_) => unsafe {
            dgram::sendmsg(fd, msg, flags).unwrap_or_else(|| real::sendmsg(fd, msg, flags))
        },
        Err(e) => fail_long(e),
    }
}

/// See `sendmmsg(2)`.
///
/// # Safety
/// The requirements of `sendmmsg` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
) -> c_int {
    if n == 0 && is_connection(fd) {
        return 0;
    }
    let writer = match writer(fd, flags) {
        Ok(writer) => writer,
        Err(e) => return fail(e),
    };
    if writer.is_none() {
        let all = if is_nowhere(msgs) { 0 } else { n.min(1024) };
        for i in 0..all as usize {
            // SAFETY: upheld by the caller.
            unsafe { hand_over(&raw const (*msgs.add(i)).msg_hdr) };
        }
        // SAFETY: upheld by the caller.
        return unsafe {
            batch::sendmmsg(fd, msgs, n, flags)
                .unwrap_or_else(|| real::sendmmsg(fd, msgs, n, flags))
        };
    }
    if is_nowhere(msgs) {
        return fail(libc::EFAULT);
    }
    for i in 0..n as usize {
        // SAFETY: upheld by the caller.
        let sent = unsafe { sendmsg(fd, &raw const (*msgs.add(i)).msg_hdr, flags) };
        if sent < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        // SAFETY: upheld by the caller.
        unsafe { (*msgs.add(i)).msg_len = sent as c_uint };
    }
    n as c_int
}

/// See `sendfile(2)`.
///
/// # Safety
/// The requirements of `sendfile` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    n: size_t,
) -> ssize_t {
    let sock = match writer(out, 0) {
        Ok(Some(sock)) => sock,
        // SAFETY: upheld by the caller.
        Ok(None) => return unsafe { real::sendfile(out, from, offset, n) },
        Err(e) => return fail_long(e),
    };
    if !offset.is_null() && is_nowhere(offset) {
        return fail_long(libc::EFAULT);
    }
    // SAFETY: upheld by the caller; `lseek` takes no pointer.
    let at = unsafe {
        if offset.is_null() {
            libc::lseek(from, 0, libc::SEEK_CUR)
        } else {
            *offset
        }
    };
    if at < 0 {
        // The kernel refuses a pipe with EINVAL too, and programs then use `read` and `write`.
        return fail_long(match sys::errno() {
            e if offset.is_null() && e != libc::ESPIPE => e,
            _ => libc::EINVAL,
        });
    }
    let mut buffer = vec![0u8; limits::FILE_PIECE.min(n)];
    let mut done = 0usize;
    while done < n {
        let want = buffer.len().min(n - done);
        let Some(piece) = buffer.get_mut(..want) else {
            break;
        };
        let got = match sys::read_at(from, piece, at + done as off_t) {
            Ok(0) => break,
            Ok(got) => got,
            Err(_) if done > 0 => break,
            Err(libc::EISDIR) => return fail_long(libc::EINVAL),
            Err(e) => return fail_long(e),
        };
        let piece = buffer.get(..got).unwrap_or(&[]);
        let sent = transmit(out, sock, &mut [IoSlice::new(piece)], 0);
        if sent < 0 {
            if done > 0 {
                break;
            }
            return -1;
        }
        done += sent as usize;
        if (sent as usize) < got {
            break;
        }
    }
    // SAFETY: upheld by the caller; `lseek` takes no pointer.
    unsafe {
        if offset.is_null() {
            libc::lseek(from, at + done as off_t, libc::SEEK_SET);
        } else {
            *offset = at + done as off_t;
        }
    }
    done as ssize_t
}

/// See `sendfile(2)`.
///
/// # Safety
/// The requirements of `sendfile` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    n: size_t,
) -> ssize_t {
    // SAFETY: upheld by the caller.
    unsafe { sendfile(out, from, offset, n) }
}

/// See `splice(2)`. Fails with EINVAL on an upgraded stream, so that the program uses `read` and `write`.
///
/// # Safety
/// The requirements of `splice` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    off_in: *mut i64,
    to: c_int,
    off_out: *mut i64,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    let waits = if flags & libc::SPLICE_F_NONBLOCK != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    let sock = reader(from, waits).and_then(|sock| Ok(sock.or(writer(to, waits)?)));
    match sock {
        Ok(None) => {}
        Ok(Some(_)) => return fail_long(libc::EINVAL),
        Err(e) => return fail_long(e),
    }
    // SAFETY: upheld by the caller.
    unsafe { real::splice(from, off_in, to, off_out, n, flags) }
}
