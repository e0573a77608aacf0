//! System calls as safe functions. Errors are errno values.

use crate::limits;
use crate::real;
use crate::record;
use libc::{c_int, c_uint, iovec, msghdr, pollfd, sockaddr, socklen_t};
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Returns errno.
pub fn errno() -> c_int {
    // SAFETY: the C library returns the errno location of this thread.
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

/// Returns a message header with a list of buffers.
pub fn message(iov: *mut iovec, n: usize) -> msghdr {
    // SAFETY: an all-zero message header is valid.
    let mut m: msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = iov;
    m.msg_iovlen = n as _;
    m
}

/// Sends without blocking.
pub fn send(fd: c_int, parts: &[IoSlice<'_>], flags: c_int) -> Result<usize, c_int> {
    let flags = flags | libc::MSG_DONTWAIT;
    if let [one] = parts {
        // SAFETY: the slice is readable.
        return size(unsafe { real::send(fd, one.as_ptr().cast(), one.len(), flags) });
    }
    // The documentation of IoSlice guarantees the layout of an iovec. The kernel does not write to it.
    let m = message(parts.as_ptr().cast_mut().cast(), parts.len());
    // SAFETY: the parts are readable.
    size(unsafe { real::sendmsg(fd, &raw const m, flags) })
}

/// Receives without blocking.
pub fn recv(fd: c_int, parts: &mut [IoSliceMut<'_>]) -> Result<usize, c_int> {
    recv_as(fd, parts, libc::MSG_DONTWAIT)
}

/// Receives with flags.
pub fn recv_as(fd: c_int, parts: &mut [IoSliceMut<'_>], flags: c_int) -> Result<usize, c_int> {
    if let [one] = parts {
        // SAFETY: the slice is writable.
        return size(unsafe { real::recv(fd, one.as_mut_ptr().cast(), one.len(), flags) });
    }
    let mut m = message(parts.as_mut_ptr().cast(), parts.len());
    // SAFETY: the parts are writable.
    size(unsafe { real::recvmsg(fd, &raw mut m, flags) })
}

/// Receives with the program's flags, so it may block.
pub fn receive(fd: c_int, parts: &mut [IoSliceMut<'_>], flags: c_int) -> isize {
    let mut m = message(parts.as_mut_ptr().cast(), parts.len());
    // SAFETY: the parts are writable.
    unsafe { real::recvmsg(fd, &raw mut m, flags) }
}

/// Sends with the program's flags, so it may block.
pub fn transmit(fd: c_int, parts: &[IoSlice<'_>], flags: c_int) -> isize {
    let m = message(parts.as_ptr().cast_mut().cast(), parts.len());
    // SAFETY: the parts are readable.
    unsafe { real::sendmsg(fd, &raw const m, flags) }
}

/// Returns the number that the kernel has assigned to a socket (`SO_COOKIE`), or `None` if `fd` is not a socket.
pub fn cookie(fd: c_int) -> Option<u64> {
    let mut value = 0u64;
    let mut len = size_of::<u64>() as socklen_t;
    let at = (&raw mut value).cast();
    // SAFETY: the length is that of the value.
    let r = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_COOKIE, at, &raw mut len) };
    (r == 0).then_some(value)
}

/// Returns whether two descriptors refer to the same socket.
pub fn is_same(a: c_int, b: c_int) -> bool {
    cookie(a).is_some() && cookie(a) == cookie(b)
}

/// Ends `SO_LINGER`, so that `close` does not wait.
pub fn close_at_once(fd: c_int) {
    let linger = libc::linger {
        l_onoff: 0,
        l_linger: 0,
    };
    let at = (&raw const linger).cast();
    let len = size_of::<libc::linger>() as socklen_t;
    // SAFETY: the length is that of the value.
    unsafe {
        real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, at, len);
    }
}

/// Peeks at the received bytes without blocking.
pub fn peek(fd: c_int, into: &mut [u8]) -> Result<usize, c_int> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the slice is writable.
    size(unsafe { real::recv(fd, into.as_mut_ptr().cast(), into.len(), flags) })
}

/// Waits for one descriptor. Returns its events.
pub fn poll_one(fd: c_int, events: i16, timeout: c_int) -> Result<i16, c_int> {
    let mut p = pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: the list has one element.
    done(unsafe { real::poll(&raw mut p, 1, timeout) })?;
    Ok(p.revents)
}

/// The result of [`poll_kicked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kicked {
    /// The descriptor has these events.
    Ready(i16),
    /// Another thread ended the wait, or the caller has no eventfd and must check again.
    Other,
    /// The time-out has expired.
    TimeOut,
}

/// Opens an eventfd, with a descriptor number above those that programs commonly use.
pub fn eventfd() -> Option<c_int> {
    // SAFETY: no pointer is passed.
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

/// Makes an eventfd readable.
pub fn ring(fd: c_int) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer has eight bytes.
    let _ = unsafe { real::write(fd, one.as_ptr().cast(), one.len()) };
}

/// Makes an eventfd unreadable.
pub fn hush(fd: c_int) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer has eight bytes.
    let _ = unsafe { real::read(fd, count.as_mut_ptr().cast(), count.len()) };
}

/// Waits for events of a descriptor, or until `kick`, an eventfd, is written. Without `kick` the wait is short.
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
    // SAFETY: the list has two elements.
    let found = done(unsafe { real::poll(list.as_mut_ptr(), 2, ms) })?;
    let [carrier, kick] = list;
    if kick.revents != 0 {
        hush(kick.fd);
    }
    Ok(match (carrier.revents, found) {
        (0, 0) if !is_soon => Kicked::TimeOut,
        (0, _) => Kicked::Other,
        (events, _) => Kicked::Ready(events),
    })
}

/// Returns an integer socket option.
pub fn option(fd: c_int, level: c_int, name: c_int) -> Result<c_int, c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the length is that of the value.
    done(unsafe { real::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}

/// Sets an integer socket option.
pub fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) -> Result<(), c_int> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the length is that of the value.
    done(unsafe { real::setsockopt(fd, level, name, (&raw const value).cast(), len) })?;
    Ok(())
}

/// Makes `close` reset the connection (`SO_LINGER` with 0 seconds).
pub fn reset_on_close(fd: c_int) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    let len = size_of::<libc::linger>() as socklen_t;
    // SAFETY: the length is that of the value.
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

/// Returns the value of an option, or `None` if the socket has no such option. Bytes that the kernel does not write are 0.
///
/// # Safety
/// Any bytes form a valid `T`.
unsafe fn structure<T>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: at most `len` bytes are written to `value`, and any bytes are valid (guaranteed by the caller).
    unsafe {
        let r = real::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len);
        (r == 0).then(|| value.assume_init())
    }
}

/// Returns the `SO_LINGER` time in seconds, if the program has set one.
pub fn linger(fd: c_int) -> Option<c_int> {
    // SAFETY: the structure consists of integers.
    let linger = unsafe { structure::<libc::linger>(fd, libc::SOL_SOCKET, libc::SO_LINGER) }?;
    (linger.l_onoff != 0).then_some(linger.l_linger)
}

/// Returns a time-out option in milliseconds, or -1 if it is not set.
pub fn timeout(fd: c_int, name: c_int) -> c_int {
    // SAFETY: the structure consists of integers.
    let t = unsafe { structure::<libc::timeval>(fd, libc::SOL_SOCKET, name) };
    let Some(t) = t.filter(|t| (t.tv_sec, t.tv_usec) != (0, 0)) else {
        return -1;
    };
    let ms = t.tv_sec.saturating_mul(1000) + (t.tv_usec + 999).div_euclid(1000);
    c_int::try_from(ms).unwrap_or(c_int::MAX)
}

/// Returns whether the descriptor is non-blocking.
pub fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: no pointer is passed.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, 0) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// Returns the number of processors of this machine that are in use.
pub fn processors() -> libc::c_long {
    // SAFETY: no pointer is passed.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }
}

/// Returns the state of the TCP connection of a socket.
fn tcp_state(fd: c_int) -> Option<u8> {
    let mut info = [0u8; 8];
    let mut len = info.len() as socklen_t;
    // SAFETY: the length is that of the value.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    info.first().copied().filter(|_| r == 0)
}

/// Returns whether the TCP connection of a socket is established.
pub fn is_established(fd: c_int) -> bool {
    // ESTABLISHED or CLOSE_WAIT.
    matches!(tcp_state(fd), Some(1 | 8))
}

/// Returns whether the TCP connection of a socket is being opened.
pub fn is_connecting(fd: c_int) -> bool {
    // SYN_SENT or SYN_RECV.
    matches!(tcp_state(fd), Some(2 | 3))
}

/// Raises SIGPIPE in the calling thread, as a write after shutdown does.
pub fn sigpipe() {
    // SAFETY: no pointer is passed.
    unsafe {
        libc::raise(libc::SIGPIPE);
    }
}

/// Returns true for a set-user-ID or set-group-ID program and for one with file capabilities. Such a program must not trust the
/// environment of its caller.
pub fn has_more_rights_than_its_caller() -> bool {
    // SAFETY: the call returns a number that the kernel passed at start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns the path that was passed to `execve` for this program.
pub fn started_as() -> Option<std::ffi::OsString> {
    use std::os::unix::ffi::OsStringExt;
    // SAFETY: the call returns a number that the kernel passed at start.
    let at = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
    if at == 0 {
        return None;
    }
    // SAFETY: this is the address of a C string above the program's stack, which is valid as long as the process.
    let path = unsafe { std::ffi::CStr::from_ptr(std::ptr::with_exposed_provenance(at)) };
    Some(std::ffi::OsString::from_vec(path.to_bytes().to_vec()))
}

/// Shuts a connection down for sending.
pub fn shut_down_sending(fd: c_int) -> Result<c_int, c_int> {
    // SAFETY: no pointer is passed.
    done(unsafe { real::shutdown(fd, libc::SHUT_WR) })
}

/// Returns whether the peer's kernel has acknowledged all sent bytes.
pub fn is_delivered(fd: c_int) -> bool {
    let mut left: c_int = 0;
    // SAFETY: the argument is the address of an integer, which this request writes.
    let r = unsafe { real::ioctl(fd, libc::TIOCOUTQ, (&raw mut left).expose_provenance()) };
    r != 0 || left == 0
}

/// Returns whether the peer's host has not answered for some time: about a second and a half with the kernel's default timers. A peer
/// whose receive buffer is full answers the kernel's probes of its window.
pub fn is_unreachable(fd: c_int) -> bool {
    // SAFETY: the structure consists of integers.
    let info = unsafe { structure::<libc::tcp_info>(fd, libc::IPPROTO_TCP, libc::TCP_INFO) };
    info.is_some_and(|i| i.tcpi_retransmits.max(i.tcpi_probes) >= limits::UNANSWERED)
}

/// The end of a call with SO_RCVTIMEO or SO_SNDTIMEO. The clock is read when the call sleeps for the first time.
#[derive(Debug, Default)]
pub struct TimeLimit(Option<Option<Instant>>);

impl TimeLimit {
    /// Returns the remaining milliseconds, or -1 if there is no limit. `option`: the name of the option.
    pub fn left(&mut self, fd: c_int, option: c_int) -> c_int {
        let end = *self.0.get_or_insert_with(|| {
            let ms = u64::try_from(timeout(fd, option)).ok()?;
            Instant::now().checked_add(Duration::from_millis(ms))
        });
        let Some(end) = end else { return -1 };
        let left = end.saturating_duration_since(Instant::now());
        let micros = left.as_micros();
        c_int::try_from(micros.div_ceil(1000)).unwrap_or(c_int::MAX)
    }
}

/// Returns whether the peer has ended its direction of the connection, or the connection has ended.
pub fn has_peer_ended(fd: c_int) -> bool {
    const ESTABLISHED: u8 = 1;
    const FIN_WAIT_1: u8 = 4;
    const FIN_WAIT_2: u8 = 5;
    // SAFETY: the structure consists of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as socklen_t;
    // SAFETY: the length is that of the structure.
    let r = unsafe {
        real::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    r != 0 || ![ESTABLISHED, FIN_WAIT_1, FIN_WAIT_2].contains(&info.tcpi_state)
}

/// Shuts a connection down for receiving, which wakes the threads that receive from it.
pub fn shut_down_receiving(fd: c_int) {
    // SAFETY: no pointer is passed.
    unsafe {
        real::shutdown(fd, libc::SHUT_RD);
    }
}

/// Returns whether a call that a signal has interrupted continues (`SA_RESTART`). Which signal it was is not known, so all handlers of the
/// process must have the flag, except those of signals that a thread causes itself. The library's waits are calls of `poll`, which the
/// kernel never continues.
pub fn signals_restart() -> bool {
    const OWN: [c_int; 7] = [
        libc::SIGABRT,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGSEGV,
        libc::SIGSYS,
        libc::SIGTRAP,
    ];
    let mut others = (1..=64).filter(|signal| !OWN.contains(signal));
    others.all(|signal| {
        // SAFETY: the structure consists of integers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the action is only read. The C library refuses the signals that it uses itself.
        let r = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        let handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        r != 0 || !handled || action.sa_flags & libc::SA_RESTART != 0
    })
}

/// Resets a TCP connection. The descriptor stays open.
pub fn disconnect(fd: c_int) {
    let addr = sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    // SAFETY: the length is that of the address.
    unsafe {
        real::connect(fd, &raw const addr, size_of::<sockaddr>() as socklen_t);
    }
}

/// Closes a descriptor of the library.
pub fn close(fd: c_int) {
    // SAFETY: the caller owns the descriptor.
    unsafe {
        real::close(fd);
    }
}

/// Converts an IPv4 or IPv6 socket address.
///
/// # Safety
/// `addr` points to `len` readable bytes.
pub unsafe fn address(addr: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    if addr.is_null() || (len as usize) < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: `len` covers the family.
    let family = unsafe { (*addr).sa_family };
    match c_int::from(family) {
        libc::AF_INET if len as usize >= size_of::<libc::sockaddr_in>() => {
            // SAFETY: `len` covers the structure, which may be unaligned.
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

/// Returns the local address (getsockname) or the peer's (getpeername).
pub fn name_of(fd: c_int, call: NameOf) -> Option<SocketAddr> {
    // SAFETY: an all-zero address is valid, and the length is its size.
    unsafe {
        let mut a: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
        if call(fd, (&raw mut a).cast(), &raw mut len) != 0 {
            return None;
        }
        address((&raw const a).cast(), len)
    }
}

/// Returns an address in the kernel's format, and its length.
pub fn raw_address(addr: SocketAddr) -> (libc::sockaddr_storage, socklen_t) {
    // SAFETY: an all-zero address is valid.
    let mut all: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = &raw mut all;
    let len = match addr {
        SocketAddr::V4(a) => {
            let at = at.cast::<libc::sockaddr_in>();
            // SAFETY: the storage is large enough and aligned for an IPv4 address.
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

/// Returns the source address that the kernel chooses for packets to `to`. Connects a UDP socket, which sends nothing.
pub fn source(to: SocketAddr) -> Option<SocketAddr> {
    let (addr, len) = raw_address(to);
    let family = c_int::from(addr.ss_family);
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the length is that of the address.
    let is_connected = unsafe { real::connect(fd, (&raw const addr).cast(), len) } == 0;
    let own = is_connected
        .then(|| name_of(fd, libc::getsockname))
        .flatten();
    close(fd);
    own
}

/// Returns whether a socket is bound to one interface.
pub fn has_device(fd: c_int) -> bool {
    let mut name = [0u8; libc::IFNAMSIZ];
    let mut len = name.len() as socklen_t;
    let at = name.as_mut_ptr().cast();
    // SAFETY: the length is that of the value.
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

/// Returns whether an IPv4 address is a broadcast address: the kernel refuses to connect a socket without `SO_BROADCAST` to it.
pub fn is_broadcast(to: SocketAddr) -> bool {
    let to = SocketAddr::new(to.ip().to_canonical(), to.port());
    if !to.is_ipv4() {
        return false;
    }
    let (addr, len) = raw_address(to);
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return false;
    }
    // SAFETY: the length is that of the address.
    let r = unsafe { real::connect(fd, (&raw const addr).cast(), len) };
    let is_refused = r != 0 && errno() == libc::EACCES;
    close(fd);
    is_refused
}

/// Binds a socket to the wildcard address and a port that the kernel chooses, as its first datagram would.
pub fn bind_any(fd: c_int) {
    let Some(own) = name_of(fd, libc::getsockname) else {
        return;
    };
    let (addr, len) = raw_address(own);
    // SAFETY: the length is that of the address.
    unsafe {
        real::bind(fd, (&raw const addr).cast(), len);
    }
}

/// Returns random bits from the kernel, or bits of the time if the kernel has none.
pub fn random() -> u64 {
    let mut bits = now_ms();
    // SAFETY: the buffer has eight bytes.
    unsafe {
        libc::getrandom(
            (&raw mut bits).cast(),
            size_of::<u64>(),
            libc::GRND_NONBLOCK,
        );
    }
    bits
}

/// Returns whether the process has children that it has not waited for.
pub fn has_children() -> bool {
    // SAFETY: a structure of numbers, which the call fills.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: the structure is writable. No child is waited for.
    let r = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) };
    r == 0 || errno() != libc::ECHILD
}

/// Returns the limit of open descriptors of the process.
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

/// Returns the milliseconds of the coarse monotonic clock, which is read without a system call.
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

/// Duplicates a descriptor to a number above those that programs commonly use, or to any number
/// from 3 on if the limit of descriptors does not allow that.
pub fn copy_high(fd: c_int) -> Option<c_int> {
    // SAFETY: no pointer is passed.
    let copy = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, limits::OWN_FROM as usize) };
    if copy >= 0 {
        return Some(copy);
    }
    // SAFETY: as above.
    let copy = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    (copy >= 0).then_some(copy)
}

/// Reads a part of a file (`pread`).
pub fn read_at(fd: c_int, into: &mut [u8], offset: i64) -> Result<usize, c_int> {
    // SAFETY: the slice is writable.
    size(unsafe { real::pread(fd, into.as_mut_ptr().cast(), into.len(), offset) })
}

/// Returns whether the process may create a file of `size` bytes. A file above the limit (`RLIMIT_FSIZE`) would raise SIGXFSZ.
pub fn may_have_file_of(size: usize) -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    known && limit.rlim_cur >= size as libc::rlim_t
}

/// Creates a memory file that begins with `first`. Returns its descriptor and the address where it is mapped.
pub fn shared(name: &std::ffi::CStr, size: usize, first: &[u8]) -> Option<(c_int, *mut u8)> {
    if !may_have_file_of(size) || first.len() > size {
        return None;
    }
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    let high = copy_high(fd);
    close(fd);
    let fd = high?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: this is a new mapping of a file of this size.
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
    // SAFETY: `first` is not longer than the mapping, which no other code uses yet.
    unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), at, first.len()) };
    Some((fd, at))
}

/// Removes a mapping that the library has made.
pub fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the caller has made the mapping and does not use it any more.
    unsafe {
        libc::munmap(at.cast(), size);
    }
}

/// Creates two connected sockets that keep message boundaries. Their descriptor numbers are those of [`copy_high`].
pub fn pair() -> Option<[c_int; 2]> {
    let mut low = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array has room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, low.as_mut_ptr()) } != 0 {
        return None;
    }
    let high = low.map(copy_high);
    low.into_iter().for_each(close);
    if let [Some(a), Some(b)] = high {
        return Some([a, b]);
    }
    high.into_iter().flatten().for_each(close);
    None
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Ends the thread if it was cancelled.
pub fn cancellation_point() {
    // SAFETY: the function has no requirements.
    unsafe { real::pthread_testcancel() };
}

/// While this value exists, its thread is not cancelled.
#[derive(Debug)]
pub struct NotCancelled(c_int);

impl NotCancelled {
    /// Turns cancellation of this thread off.
    pub fn begin() -> Self {
        const DISABLE: c_int = 1;
        let mut before = 0;
        // SAFETY: the pointer is valid.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for NotCancelled {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: the pointer is valid, and the state is the former one.
        unsafe { pthread_setcancelstate(self.0, &raw mut ours) };
    }
}

/// Copies the value of an option from one socket to another.
pub fn copy_option(from: c_int, to: c_int, name: c_int) {
    let mut value = [0u8; 16];
    let mut len = value.len() as socklen_t;
    // SAFETY: the length is that of the value.
    unsafe {
        let at = value.as_mut_ptr().cast();
        if real::getsockopt(from, libc::SOL_SOCKET, name, at, &raw mut len) == 0 {
            real::setsockopt(to, libc::SOL_SOCKET, name, at, len);
        }
    }
}

/// Returns the UDP payload, in bytes, that the path to `ip` carries without fragmentation, as far as this host knows.
pub fn path_mtu(ip: IpAddr) -> u16 {
    const ETHERNET: c_int = 1500;
    let ip = ip.to_canonical();
    let (addr, len) = raw_address(SocketAddr::new(ip, 9));
    let family = c_int::from(addr.ss_family);
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    // SAFETY: the length is that of the address.
    let connected = fd >= 0 && unsafe { real::connect(fd, (&raw const addr).cast(), len) } == 0;
    let (level, name, headers) = if ip.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU, 28)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU, 48)
    };
    let mtu = if connected {
        option(fd, level, name).unwrap_or(ETHERNET)
    } else {
        ETHERNET
    };
    if fd >= 0 {
        close(fd);
    }
    (mtu.clamp(576, 65_535) - headers) as u16
}

/// Creates an epoll set. Its descriptor number is that of [`copy_high`].
pub fn epoll() -> Option<c_int> {
    // SAFETY: no pointer is passed.
    let low = unsafe { real::epoll_create1(libc::EPOLL_CLOEXEC) };
    if low < 0 {
        return None;
    }
    let high = copy_high(low);
    close(low);
    high
}

/// Changes an epoll set.
pub fn epoll_change(set: c_int, op: c_int, fd: c_int, events: u32, data: u64) {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: the event is a local variable.
    unsafe {
        real::epoll_ctl(set, op, fd, &raw mut event);
    }
}

/// Waits for events. Returns their number, which is 0 after a time-out or a signal.
pub fn epoll_wait(set: c_int, events: &mut [libc::epoll_event], timeout: c_int) -> usize {
    let most = c_int::try_from(events.len()).unwrap_or(c_int::MAX);
    // SAFETY: the slice has this many elements.
    let n = unsafe { real::epoll_wait(set, events.as_mut_ptr(), most, timeout) };
    usize::try_from(n).unwrap_or(0)
}

/// Control messages of a datagram to send.
struct Controls {
    bytes: [u64; 12],
    len: usize,
}

impl Controls {
    fn add<T>(&mut self, level: c_int, kind: c_int, value: T) {
        let space = {
            // SAFETY: this only computes a length.
            unsafe { libc::CMSG_SPACE(size_of::<T>() as c_uint) as usize }
        };
        if self.len + space > size_of_val(&self.bytes) {
            return;
        }
        let at = self.bytes.as_mut_ptr().wrapping_byte_add(self.len);
        let head = at.cast::<libc::cmsghdr>();
        // SAFETY: there is room for the header and the value, and the place is aligned for the header.
        unsafe {
            (*head).cmsg_level = level;
            (*head).cmsg_type = kind;
            (*head).cmsg_len = libc::CMSG_LEN(size_of::<T>() as c_uint) as usize;
            libc::CMSG_DATA(head).cast::<T>().write_unaligned(value);
        }
        self.len += space;
    }

    /// Adds the address to send from.
    fn add_source(&mut self, from: IpAddr, is_v6: bool) {
        // SAFETY: all-zero structures are valid.
        let (mut v4, mut v6): (libc::in_pktinfo, libc::in6_pktinfo) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        match from.to_canonical() {
            IpAddr::V4(ip) if !is_v6 => {
                v4.ipi_spec_dst.s_addr = u32::from(ip).to_be();
                self.add(libc::IPPROTO_IP, libc::IP_PKTINFO, v4);
            }
            IpAddr::V4(ip) => {
                v6.ipi6_addr.s6_addr = ip.to_ipv6_mapped().octets();
                self.add(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, v6);
            }
            IpAddr::V6(ip) => {
                v6.ipi6_addr.s6_addr = ip.octets();
                self.add(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, v6);
            }
        }
    }
}

/// How a datagram is sent.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Its destination.
    pub to: SocketAddr,
    /// The address to send from. `None`: the kernel chooses.
    pub from: Option<IpAddr>,
    /// The socket has IPv6 addresses.
    pub is_v6: bool,
    /// `UDP_SEGMENT` of the socket does not apply.
    pub is_whole: bool,
}

/// Returns the destination address in a control message `IP_PKTINFO` or `IPV6_PKTINFO`, and `None`
/// for other control messages.
pub fn destination(level: c_int, kind: c_int, data: &[u8]) -> Option<IpAddr> {
    match (level, kind) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            let at = std::mem::offset_of!(libc::in_pktinfo, ipi_addr);
            Some(IpAddr::from(*data.get(at..)?.first_chunk::<4>()?))
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            Some(IpAddr::from(*data.first_chunk::<16>()?).to_canonical())
        }
        _ => None,
    }
}

/// Returns the source address that the program chose by a control message `IP_PKTINFO` or
/// `IPV6_PKTINFO`, and `None` for other control messages.
pub fn chosen_source(level: c_int, kind: c_int, data: &[u8]) -> Option<IpAddr> {
    match (level, kind) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            let at = std::mem::offset_of!(libc::in_pktinfo, ipi_spec_dst);
            Some(IpAddr::from(*data.get(at..)?.first_chunk::<4>()?))
        }
        _ => destination(level, kind, data),
    }
}

/// Returns an address in the format in which the kernel returns it for an IPv6 socket (`is_v6`) or an IPv4 socket, and its
/// length.
pub fn name_bytes(addr: SocketAddr, is_v6: bool) -> ([u8; 28], usize) {
    let addr = match addr {
        SocketAddr::V4(a) if is_v6 => SocketAddr::new(a.ip().to_ipv6_mapped().into(), a.port()),
        addr => addr,
    };
    let (all, len) = raw_address(addr);
    let mut bytes = [0u8; 28];
    // SAFETY: the storage is larger than this, and all of it is initialized.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const all).cast(), bytes.as_mut_ptr(), bytes.len());
    }
    (bytes, len as usize)
}

/// Sends a datagram without blocking.
pub fn send_datagram(fd: c_int, bytes: &[u8], route: &Route) -> Result<(), c_int> {
    const UDP_SEGMENT: c_int = 103;
    let to = match route.to {
        SocketAddr::V4(to) if route.is_v6 => {
            SocketAddr::new(to.ip().to_ipv6_mapped().into(), to.port())
        }
        to => to,
    };
    let (mut addr, len) = raw_address(to);
    let mut part = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut m = message(&raw mut part, 1);
    m.msg_name = (&raw mut addr).cast();
    m.msg_namelen = len;
    let mut control = Controls {
        bytes: [0; 12],
        len: 0,
    };
    if let Some(from) = route.from {
        control.add_source(from, route.is_v6);
    }
    if route.is_whole {
        control.add(libc::IPPROTO_UDP, UDP_SEGMENT, 0u16);
    }
    if control.len > 0 {
        m.msg_control = control.bytes.as_mut_ptr().cast();
        m.msg_controllen = control.len;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: address, bytes and control data are local variables or borrowed.
    size(unsafe { real::sendmsg(fd, &raw const m, flags) }).map(|_| ())
}

/// Sends a datagram and waits for an answer: the first received datagram that `is_answer` accepts.
/// Returns `None` if no answer arrives within `wait`, or if the port is closed.
pub fn exchange<R>(
    to: SocketAddr,
    bytes: &[u8],
    wait: Duration,
    mut is_answer: impl FnMut(&[u8]) -> Option<R>,
) -> Option<R> {
    let (addr, len) = raw_address(to);
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(c_int::from(addr.ss_family), kind, 0) };
    if fd < 0 {
        return None;
    }
    let until = Instant::now() + wait;
    // SAFETY: the length is that of the address.
    let is_connected = unsafe { real::connect(fd, (&raw const addr).cast(), len) } == 0;
    let is_sent = is_connected && send(fd, &[IoSlice::new(bytes)], libc::MSG_NOSIGNAL).is_ok();
    let mut found = None;
    while is_sent && found.is_none() {
        let left = until.saturating_duration_since(Instant::now());
        let time = libc::timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(left.subsec_nanos() as i32),
        };
        let mut p = pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the list has one element, and the time is a local variable.
        let ready = unsafe { real::ppoll(&raw mut p, 1, &raw const time, std::ptr::null()) };
        let mut got = [0u8; 64];
        match recv(fd, &mut [IoSliceMut::new(&mut got)]) {
            Ok(n) => {
                found = got.get(..n).and_then(&mut is_answer);
                // The peer may send other datagrams faster than they are received.
                if left.is_zero() {
                    break;
                }
            }
            Err(libc::EAGAIN | libc::EINTR) if ready != 0 && !left.is_zero() => {}
            Err(_) => break,
        }
    }
    close(fd);
    found
}

/// Creates a UDP socket that several processes of one user may bind to the same port of all addresses. Returns its descriptor,
/// and whether it has IPv6 addresses.
pub fn shared_udp(port: u16) -> Option<(c_int, bool)> {
    let any = [IpAddr::from([0u8; 16]), IpAddr::from([0u8; 4])];
    any.into_iter().find_map(|any| {
        let (addr, len) = raw_address(SocketAddr::new(any, port));
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        // SAFETY: no pointer is passed.
        let fd = unsafe { real::socket(c_int::from(addr.ss_family), kind, 0) };
        if fd < 0 {
            return None;
        }
        let (level, info) = if any.is_ipv6() {
            let _ = set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0);
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
        } else {
            (libc::IPPROTO_IP, libc::IP_PKTINFO)
        };
        let is_ready = set_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).is_ok()
            && set_option(fd, level, info, 1).is_ok()
            // SAFETY: the length is that of the address.
            && unsafe { real::bind(fd, (&raw const addr).cast(), len) } == 0;
        let high = is_ready.then(|| copy_high(fd)).flatten();
        close(fd);
        Some((high?, any.is_ipv6()))
    })
}

/// Memory for datagrams that are received by one call.
#[derive(Debug)]
pub struct Inbox {
    bytes: Vec<u8>,
    control: Vec<u64>,
    names: Vec<libc::sockaddr_storage>,
    heads: Vec<libc::mmsghdr>,
    parts: Vec<iovec>,
}

/// A datagram in an [`Inbox`].
#[derive(Debug, Clone, Copy)]
pub struct Received<'a> {
    /// The payload.
    pub bytes: &'a [u8],
    /// The source address.
    pub from: SocketAddr,
    /// The source address in the kernel's format.
    pub name: &'a [u8],
    /// The control messages, in the format of cmsg(3).
    pub control: &'a [u8],
}

impl Received<'_> {
    /// Returns the address to which the datagram was sent, if the socket reports it.
    pub fn destination(&self) -> Option<IpAddr> {
        record::Controls(self.control).find_map(|c| destination(c.level, c.kind, c.data))
    }
}

impl Inbox {
    /// Bytes of memory for the control messages of each datagram.
    const CONTROL: usize = limits::CONTROL;

    /// Allocates memory for [`limits::INBOX`] datagrams.
    pub fn allocate() -> Self {
        // SAFETY: all-zero headers and addresses are valid.
        let (name, head) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let none = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            bytes: vec![0; limits::INBOX * limits::DATAGRAM],
            control: vec![0; limits::INBOX * Self::CONTROL / size_of::<u64>()],
            names: vec![name; limits::INBOX],
            heads: vec![head; limits::INBOX],
            parts: vec![none; limits::INBOX],
        }
    }

    /// Receives datagrams without blocking. Returns their number.
    pub fn receive(&mut self, fd: c_int) -> Result<usize, c_int> {
        let (bytes, control) = (self.bytes.as_mut_ptr(), self.control.as_mut_ptr());
        let all = self
            .heads
            .iter_mut()
            .zip(&mut self.parts)
            .zip(&mut self.names);
        for (i, ((head, part), name)) in all.enumerate() {
            part.iov_base = bytes.wrapping_add(i * limits::DATAGRAM).cast();
            part.iov_len = limits::DATAGRAM;
            head.msg_len = 0;
            let m = &mut head.msg_hdr;
            m.msg_name = std::ptr::from_mut(name).cast();
            m.msg_namelen = size_of::<libc::sockaddr_storage>() as socklen_t;
            m.msg_iov = part;
            m.msg_iovlen = 1;
            m.msg_control = control.wrapping_byte_add(i * Self::CONTROL).cast();
            m.msg_controllen = Self::CONTROL;
            m.msg_flags = 0;
        }
        let n = self.heads.len() as c_uint;
        // SAFETY: each header points to parts of the inbox's memory that no other header points to.
        let n = unsafe {
            let none = std::ptr::null_mut();
            real::recvmmsg(fd, self.heads.as_mut_ptr(), n, libc::MSG_DONTWAIT, none)
        };
        usize::try_from(n).map_err(|_| errno())
    }

    /// Returns datagram `i` of the last call. `None`: there is none, or it has no address.
    pub fn get(&self, i: usize) -> Option<Received<'_>> {
        let head = self.heads.get(i)?;
        let from = i * limits::DATAGRAM;
        let bytes = self.bytes.get(from..from + head.msg_len as usize)?;
        let name = self.names.get(i)?;
        let len = (head.msg_hdr.msg_namelen as usize).min(size_of::<libc::sockaddr_in6>());
        // SAFETY: the kernel has written the address, and all of the storage is initialized.
        let name: &[u8] =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(name).cast(), len) };
        // SAFETY: as above.
        let from = unsafe { address(name.as_ptr().cast(), len as socklen_t) }?;
        let control = (head.msg_hdr.msg_controllen).min(Self::CONTROL);
        let all = self.control.get(i * Self::CONTROL / size_of::<u64>()..)?;
        // SAFETY: the vector has this many bytes for each datagram, which are initialized.
        let control = unsafe { std::slice::from_raw_parts(all.as_ptr().cast(), control) };
        Some(Received {
            bytes,
            from,
            name,
            control,
        })
    }
}
