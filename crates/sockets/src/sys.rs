//! System calls on the carrier, as safe functions; errors are errno values.

use crate::limits;
use crate::real;
use libc::{c_int, iovec, msghdr, pollfd, sockaddr, socklen_t};
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;

/// The errno of the last call.
pub fn errno() -> c_int {
    // SAFETY: the C library's location of this thread.
    unsafe { *libc::__errno_location() }
}

/// Sets errno.
pub fn set_errno(e: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = e }
}

fn size(n: isize) -> Result<usize, c_int> {
    usize::try_from(n).map_err(|_| errno())
}

fn done(r: c_int) -> Result<c_int, c_int> {
    if r < 0 { Err(errno()) } else { Ok(r) }
}

fn message(iov: *mut iovec, n: usize) -> msghdr {
    // SAFETY: zeros are a valid message header.
    let mut m: msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = iov;
    m.msg_iovlen = n as _;
    m
}

/// Sends without waiting.
pub fn send(fd: c_int, parts: &[IoSlice<'_>], flags: c_int) -> Result<usize, c_int> {
    let flags = flags | libc::MSG_DONTWAIT;
    if let [one] = parts {
        // SAFETY: the slice is readable.
        return size(unsafe { real::send(fd, one.as_ptr().cast(), one.len(), flags) });
    }
    // An IoSlice is laid out as an iovec, says its documentation; the kernel does not write to it.
    let m = message(parts.as_ptr().cast_mut().cast(), parts.len());
    // SAFETY: the parts are readable.
    size(unsafe { real::sendmsg(fd, &raw const m, flags) })
}

/// Receives without waiting.
pub fn recv(fd: c_int, parts: &mut [IoSliceMut<'_>]) -> Result<usize, c_int> {
    if let [one] = parts {
        // SAFETY: the slice is writable.
        return size(unsafe {
            real::recv(fd, one.as_mut_ptr().cast(), one.len(), libc::MSG_DONTWAIT)
        });
    }
    let mut m = message(parts.as_mut_ptr().cast(), parts.len());
    // SAFETY: the parts are writable.
    size(unsafe { real::recvmsg(fd, &raw mut m, libc::MSG_DONTWAIT) })
}

/// Receives as the program's call would: it may wait.
pub fn receive(fd: c_int, parts: &mut [IoSliceMut<'_>], flags: c_int) -> isize {
    let mut m = message(parts.as_mut_ptr().cast(), parts.len());
    // SAFETY: the parts are writable.
    unsafe { real::recvmsg(fd, &raw mut m, flags) }
}

/// Sends as the program's call would: it may wait.
pub fn transmit(fd: c_int, parts: &[IoSlice<'_>], flags: c_int) -> isize {
    let m = message(parts.as_ptr().cast_mut().cast(), parts.len());
    // SAFETY: the parts are readable.
    unsafe { real::sendmsg(fd, &raw const m, flags) }
}

/// Whether two descriptors are one socket.
pub fn is_same(a: c_int, b: c_int) -> bool {
    // The kernel's number of a socket.
    let cookie = |fd| {
        let mut value = 0u64;
        let mut len = size_of::<u64>() as socklen_t;
        let at = (&raw mut value).cast();
        // SAFETY: value and length belong together.
        let r =
            unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, at, &raw mut len) };
        (r == 0).then_some(value)
    };
    cookie(a).is_some() && cookie(a) == cookie(b)
}

/// Looks at what waits in the socket, without waiting.
pub fn peek(fd: c_int, into: &mut [u8]) -> Result<usize, c_int> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the slice is writable.
    size(unsafe { real::recv(fd, into.as_mut_ptr().cast(), into.len(), flags) })
}

/// Waits for one descriptor; returns its events.
pub fn poll_one(fd: c_int, events: i16, timeout: c_int) -> Result<i16, c_int> {
    let mut p = pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: one element.
    done(unsafe { real::poll(&raw mut p, 1, timeout) })?;
    Ok(p.revents)
}

/// How [`poll_kicked`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kicked {
    /// The descriptor has these events.
    Ready(i16),
    /// Another thread ended the wait, or it is time to look again.
    Other,
    /// Nothing happened in time.
    TimeOut,
}

/// Makes an eventfd, whose number is one that programs do not expect to be free.
pub fn eventfd() -> Option<c_int> {
    // SAFETY: no pointer.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return None;
    }
    let high = copy_high(fd);
    if high.is_some() {
        close(fd);
    }
    high.or(Some(fd))
}

/// Waits for events of a descriptor, or until a count is added to `kick`, an eventfd; without one the wait ends soon.
pub fn poll_kicked(
    fd: c_int,
    events: i16,
    kick: Option<c_int>,
    timeout: c_int,
) -> Result<Kicked, c_int> {
    let one = |fd, events| pollfd {
        fd,
        events,
        revents: 0,
    };
    let mut list = [one(fd, events), one(kick.unwrap_or(-1), libc::POLLIN)];
    let soon = limits::FOLLOW as c_int;
    let is_soon = kick.is_none() && !(0..=soon).contains(&timeout);
    let ms = if is_soon { soon } else { timeout };
    // SAFETY: two elements.
    let found = done(unsafe { real::poll(list.as_mut_ptr(), 2, ms) })?;
    let [carrier, kick] = list;
    if kick.revents != 0 {
        let mut count = [0u8; 8];
        // SAFETY: eight bytes.
        let _ = unsafe { real::read(kick.fd, count.as_mut_ptr().cast(), count.len()) };
    }
    Ok(match (carrier.revents, found) {
        (0, 0) if !is_soon => Kicked::TimeOut,
        (0, _) => Kicked::Other,
        (events, _) => Kicked::Ready(events),
    })
}

/// Reads an option that is a number.
pub fn option(fd: c_int, level: c_int, name: c_int) -> Result<c_int, c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: value and length belong together.
    done(unsafe { real::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}

/// Sets an option that is a number.
pub fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) -> Result<(), c_int> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: value and length belong together.
    done(unsafe { real::setsockopt(fd, level, name, (&raw const value).cast(), len) })?;
    Ok(())
}

/// Makes that closing resets the connection.
pub fn reset_on_close(fd: c_int) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    let len = size_of::<libc::linger>() as socklen_t;
    // SAFETY: value and length belong together.
    let _ = unsafe {
        real::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            len,
        )
    };
}

/// The time that closing may wait, in seconds, if the program has set one.
pub fn linger(fd: c_int) -> Option<c_int> {
    let mut linger = libc::linger {
        l_onoff: 0,
        l_linger: 0,
    };
    let mut len = size_of::<libc::linger>() as socklen_t;
    // SAFETY: value and length belong together.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw mut linger).cast(),
            &raw mut len,
        )
    };
    (r == 0 && linger.l_onoff != 0).then_some(linger.l_linger)
}

/// A time-out of the socket in milliseconds; -1: none.
pub fn timeout(fd: c_int, name: c_int) -> c_int {
    let mut t = libc::timeval {
        tv_sec: 0,
        tv_usec: 0,
    };
    let mut len = size_of::<libc::timeval>() as socklen_t;
    // SAFETY: value and length belong together.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::SOL_SOCKET,
            name,
            (&raw mut t).cast(),
            &raw mut len,
        )
    };
    if r != 0 || (t.tv_sec == 0 && t.tv_usec == 0) {
        return -1;
    }
    let ms = t.tv_sec.saturating_mul(1000) + (t.tv_usec + 999).div_euclid(1000);
    c_int::try_from(ms).unwrap_or(c_int::MAX)
}

/// Whether calls on the descriptor do not wait.
pub fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: no pointer.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, 0) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// Whether the TCP connection of a socket is established.
pub fn is_established(fd: c_int) -> bool {
    let mut info = [0u8; 8];
    let mut len = info.len() as socklen_t;
    // SAFETY: value and length belong together.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // The first byte is the state: 1 established, 8 closed by the peer.
    r == 0 && matches!(info.first(), Some(1 | 8))
}

/// Raises SIGPIPE in this thread, as a write to a socket that is shut down does.
pub fn sigpipe() {
    // SAFETY: no pointer. It goes to the calling thread.
    unsafe {
        libc::raise(libc::SIGPIPE);
    }
}

/// True for a set-user-ID or set-group-ID program and for one with file capabilities: no variable of its caller is read.
pub fn has_more_rights_than_its_caller() -> bool {
    // SAFETY: reads a number that the kernel passed at start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// The path by which the kernel was asked to execute this program.
pub fn started_as() -> Option<std::ffi::OsString> {
    use std::os::unix::ffi::OsStringExt;
    // SAFETY: reads a number that the kernel passed at start.
    let at = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
    if at == 0 {
        return None;
    }
    // SAFETY: it is the address of a C string, which lies above the program's stack as long as the process lives.
    let path = unsafe { std::ffi::CStr::from_ptr(std::ptr::with_exposed_provenance(at)) };
    Some(std::ffi::OsString::from_vec(path.to_bytes().to_vec()))
}

/// Closes a connection for sending.
pub fn shut_down_sending(fd: c_int) -> Result<c_int, c_int> {
    // SAFETY: no pointer.
    done(unsafe { real::shutdown(fd, libc::SHUT_WR) })
}

/// Whether the peer's kernel has acknowledged all that was sent.
pub fn is_delivered(fd: c_int) -> bool {
    let mut left: c_int = 0;
    // SAFETY: the address of an integer, which this request writes.
    let r = unsafe { real::ioctl(fd, libc::TIOCOUTQ, (&raw mut left).expose_provenance()) };
    r != 0 || left == 0
}

/// Closes a descriptor of our own.
pub fn close(fd: c_int) {
    // SAFETY: the caller owns it.
    unsafe {
        real::close(fd);
    }
}

/// Reads a socket address of IPv4 or IPv6.
///
/// # Safety
/// `addr` has `len` bytes.
pub unsafe fn address(addr: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    if addr.is_null() || (len as usize) < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: the family is there.
    let family = unsafe { (*addr).sa_family };
    match c_int::from(family) {
        libc::AF_INET if len as usize >= size_of::<libc::sockaddr_in>() => {
            // SAFETY: so long it is; it may be unaligned.
            let a = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = std::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some(SocketAddr::new(ip.into(), u16::from_be(a.sin_port)))
        }
        libc::AF_INET6 if len as usize >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let a = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = std::net::Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddr::new(ip.into(), u16::from_be(a.sin6_port)))
        }
        _ => None,
    }
}

/// getsockname or getpeername.
type NameOf = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;

/// One of the two addresses of a socket: by getsockname or getpeername.
pub fn name_of(fd: c_int, call: NameOf) -> Option<SocketAddr> {
    // SAFETY: zeros are a valid address; the length is its.
    unsafe {
        let mut a: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
        if call(fd, (&raw mut a).cast(), &raw mut len) != 0 {
            return None;
        }
        address((&raw const a).cast(), len)
    }
}

/// An address as the kernel takes it, and its length.
pub fn raw_address(addr: SocketAddr) -> (libc::sockaddr_storage, socklen_t) {
    // SAFETY: zeros are a valid address.
    let mut all: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = &raw mut all;
    let len = match addr {
        SocketAddr::V4(a) => {
            let at = at.cast::<libc::sockaddr_in>();
            // SAFETY: an address of IPv4 fits in it, and is aligned there.
            unsafe {
                (*at).sin_family = libc::AF_INET as libc::sa_family_t;
                (*at).sin_port = a.port().to_be();
                (*at).sin_addr.s_addr = u32::from(*a.ip()).to_be();
            }
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(a) => {
            let at = at.cast::<libc::sockaddr_in6>();
            // SAFETY: as above.
            unsafe {
                (*at).sin6_family = libc::AF_INET6 as libc::sa_family_t;
                (*at).sin6_port = a.port().to_be();
                (*at).sin6_addr.s6_addr = a.ip().octets();
                (*at).sin6_scope_id = a.scope_id();
            }
            size_of::<libc::sockaddr_in6>()
        }
    };
    (all, len as socklen_t)
}

/// The address from which the kernel would send to another, asked of a socket that sends nothing.
pub fn source(to: SocketAddr) -> Option<SocketAddr> {
    let (addr, len) = raw_address(to);
    let family = c_int::from(addr.ss_family);
    // SAFETY: no pointer.
    let fd = unsafe { real::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: address and length belong together.
    let is_connected = unsafe { real::connect(fd, (&raw const addr).cast(), len) } == 0;
    let own = is_connected
        .then(|| name_of(fd, libc::getsockname))
        .flatten();
    close(fd);
    own
}

/// Whether a socket gets only what comes by one interface.
pub fn has_device(fd: c_int) -> bool {
    let mut name = [0u8; libc::IFNAMSIZ];
    let mut len = name.len() as socklen_t;
    let at = name.as_mut_ptr().cast();
    // SAFETY: value and length belong together.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            at,
            &raw mut len,
        )
    };
    r == 0 && len > 0
}

/// Whether an address of IPv4 is that of all hosts of a network: the kernel refuses it to sockets that have not asked for it.
pub fn is_broadcast(to: SocketAddr) -> bool {
    let to = SocketAddr::new(to.ip().to_canonical(), to.port());
    if !to.is_ipv4() {
        return false;
    }
    let (addr, len) = raw_address(to);
    // SAFETY: no pointer.
    let fd = unsafe { real::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return false;
    }
    // SAFETY: address and length belong together.
    let r = unsafe { real::connect(fd, (&raw const addr).cast(), len) };
    let is_refused = r != 0 && errno() == libc::EACCES;
    close(fd);
    is_refused
}

/// Binds a socket to all addresses and a port that the kernel chooses, as its first datagram would.
pub fn bind_any(fd: c_int) {
    let Some(own) = name_of(fd, libc::getsockname) else {
        return;
    };
    let (addr, len) = raw_address(own);
    // SAFETY: address and length belong together.
    unsafe {
        real::bind(fd, (&raw const addr).cast(), len);
    }
}

/// Random bits; without the kernel's, those of the time.
pub fn random() -> u64 {
    let mut bits = now_ms();
    // SAFETY: eight bytes.
    unsafe {
        libc::getrandom(
            (&raw mut bits).cast(),
            size_of::<u64>(),
            libc::GRND_NONBLOCK,
        );
    }
    bits
}

/// How many descriptors the process may have.
pub fn descriptors() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

/// Milliseconds of a clock that only goes forward, as of the last tick of the kernel: read without a system call.
pub fn now_ms() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure is writable.
    unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut t);
    }
    t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000
}

/// A copy of a descriptor, of a number that programs do not expect to be free.
pub fn copy_high(fd: c_int) -> Option<c_int> {
    // SAFETY: no pointer.
    let copy = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, limits::OWN_FROM as usize) };
    if copy >= 0 {
        return Some(copy);
    }
    // SAFETY: as above.
    let copy = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    (copy >= 0).then_some(copy)
}

/// Reads a part of a file.
pub fn read_at(fd: c_int, into: &mut [u8], offset: i64) -> Result<usize, c_int> {
    // SAFETY: the slice is writable.
    size(unsafe { real::pread(fd, into.as_mut_ptr().cast(), into.len(), offset) })
}

/// Makes memory that others can open by the descriptor: its number, and where it is mapped. It begins with `first`.
pub fn shared(name: &std::ffi::CStr, size: usize, first: &[u8]) -> Option<(c_int, *mut u8)> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // Beyond this limit the kernel would send a signal.
    // SAFETY: the structure is writable.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if !known || limit.rlim_cur < size as libc::rlim_t || first.len() > size {
        return None;
    }
    // SAFETY: a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    let high = copy_high(fd);
    close(fd);
    let fd = high?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory, of a file that has this size.
    let at = unsafe {
        if libc::ftruncate(fd, size as libc::off_t) == 0 {
            libc::mmap(std::ptr::null_mut(), size, access, libc::MAP_SHARED, fd, 0)
        } else {
            libc::MAP_FAILED
        }
    };
    if at == libc::MAP_FAILED {
        close(fd);
        return None;
    }
    let at = at.cast::<u8>();
    // SAFETY: it is shorter than the mapping, which nothing else has yet.
    unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), at, first.len()) };
    Some((fd, at))
}

/// Ends a mapping of [`shared`].
pub fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the caller made it, and does not use it any more.
    unsafe {
        libc::munmap(at.cast(), size);
    }
}
