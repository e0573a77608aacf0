//! The functions of `rdma/rsocket.h`.

use std::ffi::{c_int, c_long, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anywarp_core::lock::Mutex;
use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, ssize_t, timeval};

use super::buffer::Caller;
use super::dgram::{self, Datagrams};
use super::options::{self, Options, Value};
use super::poll::Asked;
use super::stream::{self, Stream};
use super::{Kind, Socket, address, find, insert, iomap, poll, remove, repoll};
use crate::entry;
use crate::ffi::{arg, arg_mut};

/// The longest `iovec` list, as in the kernel (`UIO_MAXIOV`).
const PARTS: usize = 1024;

/// The result of a call that returns 0.
fn done(result: Result<(), c_int>) -> Result<c_int, c_int> {
    result.map(|()| 0)
}

/// The result of a call that returns a number of octets.
fn count(result: Result<usize, c_int>) -> Result<ssize_t, c_int> {
    result.map(|n| ssize_t::try_from(n).unwrap_or(ssize_t::MAX))
}

/// Wraps the caller's buffer. Returns `EFAULT` if `buf` is null and `len` is not 0.
///
/// # Safety
/// `buf` is null or points to `len` bytes as long as the returned value is live.
unsafe fn buffer(buf: *const c_void, len: usize) -> Result<Caller, c_int> {
    if buf.is_null() && len > 0 {
        return Err(libc::EFAULT);
    }
    // No buffer can be longer than this.
    let len = len.min(isize::MAX as usize);
    // SAFETY: upheld by the caller.
    Ok(unsafe { Caller::new(buf.cast(), len) })
}

/// Wraps the caller's list of buffers.
///
/// # Safety
/// `iov` is null or has `n` elements, and the requirements of [`buffer`] apply to each.
unsafe fn buffers(iov: *const iovec, n: usize) -> Result<Caller, c_int> {
    if n > PARTS {
        return Err(libc::EMSGSIZE);
    }
    if iov.is_null() && n > 0 {
        return Err(libc::EFAULT);
    }
    let parts = (0..n).map(|i| {
        // SAFETY: `i` is less than `n`, the number of elements.
        let part = unsafe { iov.add(i).read_unaligned() };
        (part.iov_base.cast::<u8>().cast_const(), part.iov_len)
    });
    // SAFETY: upheld by the caller.
    unsafe { Caller::gather(parts) }.ok_or(libc::EINVAL)
}

/// Checks the length of a list that was passed as an `int`: `EINVAL` if it is negative or above [`PARTS`].
fn parts(n: c_int) -> Result<usize, c_int> {
    match usize::try_from(n) {
        Ok(n) if n <= PARTS => Ok(n),
        _ => Err(libc::EINVAL),
    }
}

fn send(socket: c_int, from: Result<Caller, c_int>, flags: c_int) -> Result<usize, c_int> {
    let (socket, from) = (find(socket)?, from?);
    match socket.kind {
        Kind::Stream(_) => stream::send(&socket, &from, flags),
        Kind::Datagrams(_) => dgram::send(&socket, &from, None, flags),
    }
}

fn receive(socket: c_int, to: Result<Caller, c_int>, flags: c_int) -> Result<usize, c_int> {
    let (socket, to) = (find(socket)?, to?);
    match socket.kind {
        Kind::Stream(_) => stream::receive(&socket, &to, flags),
        Kind::Datagrams(_) => {
            let got = dgram::receive(&socket, &to, flags)?;
            Ok(receive_result(&got, flags))
        }
    }
}

/// Returns the result of receiving a datagram: the number of copied bytes, or the full length if the flags contain `MSG_TRUNC`.
fn receive_result(got: &dgram::ReceivedDatagram, flags: c_int) -> usize {
    if flags & libc::MSG_TRUNC != 0 {
        got.len
    } else {
        got.copied
    }
}

fn make(domain: c_int, kind: c_int, protocol: c_int) -> Result<c_int, c_int> {
    if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
        return Err(libc::EAFNOSUPPORT);
    }
    let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let kind = kind & !flags;
    let socket = match (kind, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            Socket::make(domain, Options::fresh(), |channel| {
                Ok(Kind::Stream(Box::new(Mutex::new(Stream::new(channel)?))))
            })?
        }
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
            Socket::make(domain, Options::fresh(), |channel| {
                Ok(Kind::Datagrams(Box::new(Mutex::new(Datagrams::new(
                    channel,
                )?))))
            })?
        }
        (libc::SOCK_STREAM | libc::SOCK_DGRAM, _) => return Err(libc::EPROTONOSUPPORT),
        _ => return Err(libc::ESOCKTNOSUPPORT),
    };
    let nonblocking = flags & libc::SOCK_NONBLOCK != 0;
    socket.nonblocking.store(nonblocking, Ordering::Relaxed);
    Ok(insert(socket))
}

entry! {
    /// `rsocket`: `AF_INET` or `AF_INET6`, `SOCK_STREAM` or `SOCK_DGRAM`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, minus_one, {
        make(domain, kind, protocol)
    }
}

/// Returns a socket, and an address of the socket's family.
///
/// # Safety
/// `addr` is null or points to `len` readable bytes.
unsafe fn with_address(
    socket: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> Result<(Arc<Socket>, std::net::SocketAddr), c_int> {
    let socket = find(socket)?;
    // SAFETY: upheld by the caller.
    let address = unsafe { address::read(addr, len, socket.domain) }?;
    Ok((socket, address))
}

entry! {
    /// `rbind`.
    ///
    /// # Safety
    /// `addr` is null or points to `len` readable bytes.
    unsafe fn rbind(socket: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let given = unsafe { with_address(socket, addr, len) };
        done(given.and_then(|(socket, to)| match &socket.kind {
            Kind::Stream(_) => socket.stream()?.bind(to),
            Kind::Datagrams(_) => dgram::bind(&socket, to),
        }))
    }
}

entry! {
    /// `rlisten`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rlisten(socket: c_int, backlog: c_int) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| {
            let any = address::unspecified(socket.domain);
            socket.stream()?.listen(backlog, any)
        }))
    }
}

entry! {
    /// `raccept`.
    ///
    /// # Safety
    /// `addr` is null or points to `*len` bytes; `len` is null or valid.
    unsafe fn raccept(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, minus_one, {
        let listener = find(socket)?;
        let made = stream::accept_next(&listener)?;
        if !addr.is_null() {
            let peer = made.remote().unwrap_or_else(|| address::unspecified(made.domain));
            // SAFETY: upheld by the caller.
            unsafe { address::write(addr, len, made.domain, peer) };
        }
        Ok(insert(made))
    }
}

entry! {
    /// `rconnect`. `AF_UNSPEC` disconnects a datagram socket.
    ///
    /// # Safety
    /// `addr` is null or points to `len` readable bytes.
    unsafe fn rconnect(socket: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let unspecified = len as usize >= size_of::<libc::sa_family_t>()
            && !addr.is_null()
            // SAFETY: as above.
            && c_int::from(unsafe { (&raw const (*addr).sa_family).read_unaligned() }) == libc::AF_UNSPEC;
        done(find(socket).and_then(|found| {
            if let (Kind::Datagrams(_), true) = (&found.kind, unspecified) {
                return dgram::connect(&found, None);
            }
            // SAFETY: upheld by the caller.
            let to = unsafe { address::read(addr, len, found.domain) }?;
            match found.kind {
                Kind::Stream(_) => stream::connect(&found, to),
                Kind::Datagrams(_) => dgram::connect(&found, Some(to)),
            }
        }))
    }
}

entry! {
    /// `rshutdown`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rshutdown(socket: c_int, how: c_int) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| match socket.kind {
            Kind::Stream(_) => stream::shutdown(&socket, how),
            // UDP has no shutdown that the peer could notice.
            Kind::Datagrams(_) => Ok(()),
        }))
    }
}

entry! {
    /// `rclose`: a stream socket waits until the peer has received the sent data, for at most five seconds or the time that
    /// `SO_LINGER` sets.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rclose(socket: c_int) -> c_int, minus_one, {
        done(match remove(socket) {
            Ok(socket) => {
                socket.close();
                Ok(())
            }
            Err(_) => repoll::close(socket),
        })
    }
}

entry! {
    /// `rrecv`.
    ///
    /// # Safety
    /// `buf` points to `len` bytes.
    unsafe fn rrecv(socket: c_int, buf: *mut c_void, len: usize, flags: c_int) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(receive(socket, unsafe { buffer(buf, len) }, flags))
    }
}

/// The common part of `rrecvfrom` and `rrecvmsg`. Returns the number of bytes and whether the datagram was truncated, and writes the
/// sender to `addr`.
///
/// # Safety
/// `addr` is null or points to `*len` bytes; `len` is null or valid.
unsafe fn receive_from(
    socket: c_int,
    to: Result<Caller, c_int>,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(usize, bool), c_int> {
    let (socket, to) = (find(socket)?, to?);
    match socket.kind {
        Kind::Stream(_) => {
            let n = stream::receive(&socket, &to, flags)?;
            if !len.is_null() {
                // A stream has no sender address; TCP sockets do not return one either.
                // SAFETY: the caller passes a valid pointer.
                unsafe { len.write(0) };
            }
            Ok((n, false))
        }
        Kind::Datagrams(_) => {
            let got = dgram::receive(&socket, &to, flags)?;
            if !addr.is_null() {
                // SAFETY: upheld by the caller.
                unsafe { address::write(addr, len, socket.domain, got.from) };
            }
            Ok((receive_result(&got, flags), got.copied < got.len))
        }
    }
}

entry! {
    /// `rrecvfrom`.
    ///
    /// # Safety
    /// `buf` points to `n` bytes. `addr` is null or points to `*len` bytes; `len` is null or valid.
    unsafe fn rrecvfrom(
        socket: c_int, buf: *mut c_void, n: usize, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t,
    ) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        let to = unsafe { buffer(buf, n) };
        // SAFETY: as above.
        count(unsafe { receive_from(socket, to, flags, addr, len) }.map(|(n, _)| n))
    }
}

entry! {
    /// `rrecvmsg`. It never returns ancillary data.
    ///
    /// # Safety
    /// `msg` and everything that it points to are valid.
    unsafe fn rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t, minus_one, {
        // SAFETY: the pointer is null, or it and everything that it points to are valid (guaranteed by the caller).
        unsafe {
            let msg = arg_mut(msg).map_err(|_null| libc::EFAULT)?;
            let to = buffers(msg.msg_iov, msg.msg_iovlen);
            let (addr, len) = (msg.msg_name.cast(), &raw mut msg.msg_namelen);
            let (n, cut) = receive_from(socket, to, flags, addr, len)?;
            msg.msg_flags = if cut { libc::MSG_TRUNC } else { 0 };
            msg.msg_controllen = 0;
            count(Ok(n))
        }
    }
}

entry! {
    /// `rread`.
    ///
    /// # Safety
    /// `buf` points to `len` bytes.
    unsafe fn rread(socket: c_int, buf: *mut c_void, len: usize) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(receive(socket, unsafe { buffer(buf, len) }, 0))
    }
}

entry! {
    /// `rreadv`.
    ///
    /// # Safety
    /// `iov` has `n` elements, each of which describes a buffer.
    unsafe fn rreadv(socket: c_int, iov: *const iovec, n: c_int) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(receive(socket, parts(n).and_then(|n| unsafe { buffers(iov, n) }), 0))
    }
}

entry! {
    /// `rsend`.
    ///
    /// # Safety
    /// `buf` points to `len` bytes.
    unsafe fn rsend(socket: c_int, buf: *const c_void, len: usize, flags: c_int) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(send(socket, unsafe { buffer(buf, len) }, flags))
    }
}

/// The common part of `rsendto` and `rsendmsg`.
///
/// # Safety
/// `addr` is null or points to `len` readable bytes.
unsafe fn send_to(
    socket: c_int,
    from: Result<Caller, c_int>,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> Result<usize, c_int> {
    let (found, from) = (find(socket)?, from?);
    match found.kind {
        // The address is ignored, as it is by TCP sockets.
        Kind::Stream(_) => stream::send(&found, &from, flags),
        Kind::Datagrams(_) => {
            let to = if addr.is_null() {
                None
            } else {
                // SAFETY: upheld by the caller.
                Some(unsafe { address::read(addr, len, found.domain) }?)
            };
            dgram::send(&found, &from, to, flags)
        }
    }
}

entry! {
    /// `rsendto`.
    ///
    /// # Safety
    /// `buf` points to `n` bytes. `addr` is null or points to `len` bytes.
    unsafe fn rsendto(
        socket: c_int, buf: *const c_void, n: usize, flags: c_int, addr: *const sockaddr, len: socklen_t,
    ) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        let from = unsafe { buffer(buf, n) };
        // SAFETY: as above.
        count(unsafe { send_to(socket, from, flags, addr, len) })
    }
}

entry! {
    /// `rsendmsg`. No ancillary data can be sent.
    ///
    /// # Safety
    /// `msg` and everything that it points to are valid.
    unsafe fn rsendmsg(socket: c_int, msg: *const msghdr, flags: c_int) -> ssize_t, minus_one, {
        // SAFETY: the pointer is null, or it and everything that it points to are valid (guaranteed by the caller).
        unsafe {
            let msg = arg(msg).map_err(|_null| libc::EFAULT)?;
            if !msg.msg_control.is_null() && msg.msg_controllen > 0 {
                return Err(libc::EOPNOTSUPP);
            }
            let from = buffers(msg.msg_iov, msg.msg_iovlen);
            count(send_to(socket, from, flags, msg.msg_name.cast(), msg.msg_namelen))
        }
    }
}

entry! {
    /// `rwrite`.
    ///
    /// # Safety
    /// `buf` points to `len` bytes.
    unsafe fn rwrite(socket: c_int, buf: *const c_void, len: usize) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(send(socket, unsafe { buffer(buf, len) }, 0))
    }
}

entry! {
    /// `rwritev`.
    ///
    /// # Safety
    /// `iov` has `n` elements, each of which describes a buffer.
    unsafe fn rwritev(socket: c_int, iov: *const iovec, n: c_int) -> ssize_t, minus_one, {
        // SAFETY: upheld by the caller.
        count(send(socket, parts(n).and_then(|n| unsafe { buffers(iov, n) }), 0))
    }
}

// ---------------------------------------------------------------------- waiting

entry! {
    /// `rpoll`: waits for sockets and other descriptors together.
    ///
    /// # Safety
    /// `fds` has `n` elements.
    unsafe fn rpoll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int, minus_one, {
        let n = n as usize;
        if fds.is_null() && n > 0 {
            return Err(libc::EFAULT);
        }
        let fds = if n == 0 {
            &mut []
        } else {
            // SAFETY: the list has `n` elements that are not used elsewhere during the call (guaranteed by the caller).
            unsafe { std::slice::from_raw_parts_mut(fds, n) }
        };
        let time = u64::try_from(timeout).ok().map(Duration::from_millis);
        poll::poll(fds, time).map(|n| c_int::try_from(n).unwrap_or(c_int::MAX))
    }
}

/// Returns whether a set contains a descriptor.
///
/// # Safety
/// `set` is null or valid.
unsafe fn has(set: *const fd_set, fd: c_int) -> bool {
    // SAFETY: `set` is valid (guaranteed by the caller), and `fd` is below its size.
    !set.is_null() && unsafe { libc::FD_ISSET(fd, set) }
}

entry! {
    /// `rselect`.
    ///
    /// # Safety
    /// The sets and `timeout` are null or valid.
    unsafe fn rselect(
        n: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval,
    ) -> c_int, minus_one, {
        if !(0..=libc::FD_SETSIZE as c_int).contains(&n) {
            return Err(libc::EINVAL);
        }
        let asked: Vec<Asked> = (0..n)
            // SAFETY: guaranteed by the caller; each number is below `FD_SETSIZE`.
            .map(|fd| unsafe { Asked { fd, read: has(read, fd), write: has(write, fd), except: has(except, fd) } })
            .filter(|a| a.read || a.write || a.except)
            .collect();
        // SAFETY: the caller passes null or a valid pointer.
        let time = if let Some(t) = unsafe { timeout.as_ref() } {
            let (Ok(seconds), Ok(micros)) = (u64::try_from(t.tv_sec), u64::try_from(t.tv_usec)) else {
                return Err(libc::EINVAL);
            };
            Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
        } else {
            None
        };
        let ready = poll::select(&asked, time)?;
        let mut bits = 0;
        for set in [read, write, except] {
            if !set.is_null() {
                // SAFETY: the caller passes a valid pointer.
                unsafe { libc::FD_ZERO(set) };
            }
        }
        for a in &ready {
            for (set, on) in [(read, a.read), (write, a.write), (except, a.except)] {
                if on {
                    // SAFETY: the descriptor was in this set, so the set exists and is large enough.
                    unsafe { libc::FD_SET(a.fd, set) };
                    bits += 1;
                }
            }
        }
        Ok(bits)
    }
}

// ---------------------------------------------------------------------- names and options

entry! {
    /// `rgetpeername`.
    ///
    /// # Safety
    /// `addr` is null or points to `*len` bytes; `len` is valid.
    unsafe fn rgetpeername(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| {
            let peer = socket.remote().ok_or(libc::ENOTCONN)?;
            // SAFETY: upheld by the caller.
            unsafe { address::write(addr, len, socket.domain, peer) };
            Ok(())
        }))
    }
}

entry! {
    /// `rgetsockname`.
    ///
    /// # Safety
    /// `addr` is null or points to `*len` bytes; `len` is valid.
    unsafe fn rgetsockname(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, minus_one, {
        done(find(socket).map(|socket| {
            let own = socket.local().unwrap_or_else(|| address::unspecified(socket.domain));
            // SAFETY: upheld by the caller.
            unsafe { address::write(addr, len, socket.domain, own) };
        }))
    }
}

entry! {
    /// `rsetsockopt`.
    ///
    /// # Safety
    /// `value` is null or points to `len` bytes.
    unsafe fn rsetsockopt(
        socket: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t,
    ) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| {
            if value.is_null() {
                return Err(libc::EFAULT);
            }
            // The kernel takes the length as an `int` and refuses negative ones.
            let len = c_int::try_from(len).ok().and_then(|n| usize::try_from(n).ok());
            let mut bytes = vec![0_u8; len.ok_or(libc::EINVAL)?.min(options::LONGEST)];
            // SAFETY: `value` has `len` bytes (guaranteed by the caller), and the vector is not longer.
            unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), bytes.len()) };
            options::set(&socket, level, name, &Value(&bytes))
        }))
    }
}

entry! {
    /// `rgetsockopt`.
    ///
    /// # Safety
    /// `value` points to `*len` bytes; `len` is valid.
    unsafe fn rgetsockopt(
        socket: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t,
    ) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| {
            if value.is_null() || len.is_null() {
                return Err(libc::EFAULT);
            }
            let bytes = options::get(&socket, level, name)?;
            // SAFETY: the caller passes a valid pointer.
            let room = unsafe { len.read() } as usize;
            let n = bytes.len().min(room);
            // SAFETY: `n` is at most the length of both sides.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), n) };
            // SAFETY: the caller passes a valid pointer.
            unsafe { len.write(socklen_t::try_from(n).unwrap_or(0)) };
            Ok(())
        }))
    }
}

entry! {
    /// `rfcntl`: gets and sets the flags of `fcntl(2)`. The function is variadic in C, but this definition has a fixed third
    /// argument: the calling convention uses the same register for both.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn rfcntl(socket: c_int, command: c_int, argument: c_long) -> c_int, minus_one, {
        let socket = find(socket)?;
        // The argument of all these commands is an `int`, and the upper half of the register is undefined.
        let argument = argument as c_int;
        match command {
            libc::F_GETFL if socket.nonblocking.load(Ordering::Relaxed) => Ok(libc::O_RDWR | libc::O_NONBLOCK),
            libc::F_GETFL => Ok(libc::O_RDWR),
            libc::F_SETFL => {
                socket.nonblocking.store(argument & libc::O_NONBLOCK != 0, Ordering::Relaxed);
                Ok(0)
            }
            libc::F_GETFD => Ok(socket.fd_flags.load(Ordering::Relaxed)),
            libc::F_SETFD => {
                socket.fd_flags.store(argument, Ordering::Relaxed);
                Ok(0)
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    }
}

// ---------------------------------------------------------------------- mapped memory

entry! {
    /// `riomap`.
    ///
    /// # Safety
    /// `buf` points to `len` bytes, which stay mapped until `riounmap`.
    unsafe fn riomap(
        socket: c_int, buf: *mut c_void, len: usize, prot: c_int, _flags: c_int, offset: off_t,
    ) -> off_t, minus_one, {
        let start = buf.expose_provenance();
        let socket = find(socket)?;
        // SAFETY: upheld by the caller.
        unsafe { iomap::map(&socket, start, len, prot, offset) }
    }
}

entry! {
    /// `riounmap`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn riounmap(socket: c_int, buf: *mut c_void, len: usize) -> c_int, minus_one, {
        done(find(socket).and_then(|socket| iomap::unmap(&socket, buf.addr(), len)))
    }
}

entry! {
    /// `riowrite`: writes fewer bytes than requested if the peer's mapping is too short. Returns -1, as a `size_t`, on error.
    ///
    /// # Safety
    /// `buf` points to `len` bytes.
    unsafe fn riowrite(
        socket: c_int, buf: *const c_void, len: usize, offset: off_t, flags: c_int,
    ) -> usize, or(usize::MAX), {
        // SAFETY: upheld by the caller.
        let from = unsafe { buffer(buf, len) };
        let socket = find(socket)?;
        iomap::write(&socket, &from?, offset, flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At most [`options::LONGEST`] bytes of a value are read, and a negative length is refused.
    #[test]
    fn the_length_of_an_option_is_limited_to_valid_values() {
        let socket = make(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let value = [0x10_u8; options::LONGEST];
        let set = |len: socklen_t| {
            let (level, name) = (libc::SOL_SOCKET, libc::SO_SNDBUF);
            // SAFETY: at most as many bytes are read as the value has.
            unsafe { rsetsockopt(socket, level, name, value.as_ptr().cast(), len) }
        };
        assert_eq!(set(4), 0);
        assert_eq!(set(c_int::MAX.cast_unsigned()), 0);
        assert_eq!(set(socklen_t::MAX), -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EINVAL));
        // SAFETY: the function has no requirements.
        assert_eq!(unsafe { rclose(socket) }, 0);
    }
}
