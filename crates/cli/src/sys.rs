//! System calls: to try the kernel features that the device uses, for network interfaces, socket options, free ports and the number of
//! processors, and to make a child process end when its parent ends or inherit the disposition of SIGPIPE. All
//! unsafe code of this crate is here and in `bench/raw_sys.rs`.
#![allow(
    unsafe_code,
    reason = "system calls that std does not offer, with plain arguments"
)]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

/// `SOL_UDP` option of the kernel's datagram segmentation.
const UDP_SEGMENT: libc::c_int = 103;

/// `SOL_UDP` option of the kernel's datagram coalescing.
const UDP_GRO: libc::c_int = 104;

/// Takes ownership of the descriptor that a system call returned, or returns the error.
fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller passes the result of a call that creates a descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns whether eventfd(2) works.
pub(crate) fn eventfd() -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(drop)
}

/// Returns whether timerfd_create(2) works.
pub(crate) fn timerfd() -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) }).map(drop)
}

/// Returns whether the kernel has epoll_pwait2(2), which waits with a resolution of nanoseconds.
pub(crate) fn epoll_pwait2() -> io::Result<()> {
    // SAFETY: the call takes only a number.
    let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let zero = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let (no_mask, mask_size) = (std::ptr::null::<libc::sigset_t>(), 8usize);
    // SAFETY: one event fits in `event`, `zero` outlives the call, and a null mask is allowed.
    let n = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.as_raw_fd(),
            &raw mut event,
            1,
            &raw const zero,
            no_mask,
            mask_size,
        )
    };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Creates a TUN interface in the network namespace of this thread. The interface exists as long as the file is open.
pub(crate) fn tun(name: &str) -> io::Result<std::fs::File> {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: all bytes of the structure may be zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero, because the kernel expects a C string.
    let room = request.ifr_name.len() - 1;
    for (to, byte) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open, and the request is an ifreq that outlives the call.
    result(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(file)
}

/// Returns the error of a call that returned -1.
pub(crate) fn result(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Sets an integer socket option.
pub(crate) fn set_option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or_default();
    // SAFETY: `value` outlives the call and `size` is its size.
    result(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size,
        )
    })
}

/// Returns whether UDP sockets support segmentation (`UDP_SEGMENT`).
pub(crate) fn udp_gso() -> io::Result<()> {
    set_option(
        &UdpSocket::bind("127.0.0.1:0")?,
        libc::SOL_UDP,
        UDP_SEGMENT,
        1000,
    )
}

/// Returns whether UDP sockets support coalescing (`UDP_GRO`).
pub(crate) fn udp_gro() -> io::Result<()> {
    set_option(&UdpSocket::bind("127.0.0.1:0")?, libc::SOL_UDP, UDP_GRO, 1)
}

/// Returns whether TCP sockets support a time limit for unacknowledged data (`TCP_USER_TIMEOUT`).
pub(crate) fn tcp_user_timeout() -> io::Result<()> {
    set_option(
        &TcpListener::bind("127.0.0.1:0")?,
        libc::IPPROTO_TCP,
        libc::TCP_USER_TIMEOUT,
        1000,
    )
}

/// An interface, or one address of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    /// The address. Each interface also has an entry without an address.
    pub(crate) ip: Option<IpAddr>,
    pub(crate) up: bool,
    pub(crate) loopback: bool,
}

/// Returns the interfaces in the network namespace of this process, and their addresses.
pub(crate) fn interfaces() -> io::Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call writes the head of a list that it allocates.
    result(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is not null, and points to an element of the list.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let has = |flag: libc::c_int| entry.ifa_flags & flag.cast_unsigned() != 0;
        found.push(Interface {
            ip: ip_of(entry.ifa_addr),
            up: has(libc::IFF_UP),
            loopback: has(libc::IFF_LOOPBACK),
        });
    }
    // SAFETY: the list came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// Returns the IP address of an element of the list of getifaddrs.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: `address` is not null, and each address begins with a family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in.
            let ip = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(ip.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6.
            let ip = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(ip.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Returns the number of processors of the machine, whichever of them this process is bound to.
pub(crate) fn processors() -> usize {
    // SAFETY: the call takes only a number.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(online).unwrap_or(0)
}

/// Makes the program that `command` starts receive SIGTERM when the thread that starts it ends, also if a signal kills this process.
pub(crate) fn end_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let ask = move || {
        let term = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(term)?;
        // There is no signal for a parent that ended before the call.
        if rustix::process::getppid() == Some(parent) {
            Ok(())
        } else {
            Err(rustix::io::Errno::SRCH.into())
        }
    };
    // SAFETY: between fork and exec the function only makes system calls; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(ask) };
}

/// Whether SIGPIPE was ignored when this program started.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Called by the loader before `main`: the runtime of Rust ignores SIGPIPE before it calls the `main` of this program.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = note_sigpipe;

extern "C" fn note_sigpipe() {
    // SAFETY: all bytes of the structure may be zero.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call only writes the present action to `before`.
    let rc = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut before) };
    let ignored = rc == 0 && before.sa_sigaction == libc::SIG_IGN;
    PIPE_IGNORED.store(ignored, Ordering::Relaxed);
}

/// Makes the program that `command` executes inherit the disposition of SIGPIPE that this program inherited. `Command` resets it to the
/// default.
pub(crate) fn inherit_sigpipe(command: &mut Command) {
    if !PIPE_IGNORED.load(Ordering::Relaxed) {
        return;
    }
    let ignore = || {
        // SAFETY: the call takes only numbers, and no handler is installed.
        match unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) } {
            libc::SIG_ERR => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // SAFETY: the function makes one system call; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(ignore) };
}

/// Returns a TCP port that no program listens on, for programs that take one as an argument.
///
/// The port is below those that the kernel assigns to connections. Otherwise a connection could get it before the program binds it.
///
/// # Errors
/// None of the 4,000 tried ports is free.
pub(crate) fn free_port() -> io::Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 20_000 + (std::process::id() % 8_000) as u16;
    (0..4_000)
        .map(|_| start + NEXT.fetch_add(1, Ordering::Relaxed) % 4_000)
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .ok_or_else(|| {
            io::Error::other(format!(
                "no TCP port from {start} to {} is free",
                start + 3_999
            ))
        })
}
