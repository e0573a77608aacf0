//! Socket options, multicast membership and the state of sockets.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Sets an integer socket option; false if that failed.
pub fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> bool {
    // SAFETY: `value` is an int that lives through the call.
    let r = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    r == 0
}

/// Reads an integer socket option.
pub fn get_option(fd: BorrowedFd<'_>, level: i32, name: i32) -> Option<i32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` live through the call and `len` is the size of `value`.
    let r = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    (r == 0).then_some(value)
}

/// Joins or leaves a multicast group on the interface with the index `interface`, which has the address `local`. Returns false
/// if that failed.
pub fn multicast(
    fd: BorrowedFd<'_>,
    group: IpAddr,
    local: IpAddr,
    interface: u32,
    join: bool,
) -> bool {
    match (group, local) {
        (IpAddr::V4(group), IpAddr::V4(local)) => {
            let what = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr {
                    s_addr: u32::from(group).to_be(),
                },
                imr_address: libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                imr_ifindex: i32::try_from(interface).unwrap_or(0),
            };
            let name = if join {
                libc::IP_ADD_MEMBERSHIP
            } else {
                libc::IP_DROP_MEMBERSHIP
            };
            // SAFETY: `what` lives through the call and its size is given.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IP,
                    name,
                    (&raw const what).cast(),
                    size_of::<libc::ip_mreqn>() as libc::socklen_t,
                )
            };
            r == 0
        }
        (IpAddr::V6(group), _) => {
            let what = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr {
                    s6_addr: group.octets(),
                },
                ipv6mr_interface: interface,
            };
            let name = if join {
                libc::IPV6_ADD_MEMBERSHIP
            } else {
                libc::IPV6_DROP_MEMBERSHIP
            };
            // SAFETY: as above.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IPV6,
                    name,
                    (&raw const what).cast(),
                    size_of::<libc::ipv6_mreq>() as libc::socklen_t,
                )
            };
            r == 0
        }
        _ => false,
    }
}

/// Sets the interface that multicast is sent on: for IPv4 by its address `local` and its index, for IPv6 by its index. Returns
/// false if that failed.
pub fn multicast_interface(fd: BorrowedFd<'_>, local: IpAddr, interface: u32) -> bool {
    match local {
        IpAddr::V4(local) => {
            let what = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: 0 },
                imr_address: libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                imr_ifindex: i32::try_from(interface).unwrap_or(0),
            };
            // SAFETY: `what` lives through the call and its size is given.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IP,
                    libc::IP_MULTICAST_IF,
                    (&raw const what).cast(),
                    size_of::<libc::ip_mreqn>() as libc::socklen_t,
                )
            };
            r == 0
        }
        IpAddr::V6(_) => set_option(
            fd,
            libc::IPPROTO_IPV6,
            libc::IPV6_MULTICAST_IF,
            i32::try_from(interface).unwrap_or(0),
        ),
    }
}

/// Bytes that were sent on a TCP socket and that its peer has not acknowledged; 0 for a closed connection.
pub(crate) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an `int`, which is what `bytes` is.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if r == 0 {
        usize::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Number of bytes that the kernel has not sent yet; 0 for other sockets than those of TCP.
pub(crate) fn unsent(fd: BorrowedFd<'_>) -> usize {
    /// From `linux/sockios.h`.
    const SIOCOUTQNSD: libc::Ioctl = 0x894b;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an `int`, which is what `bytes` is.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCOUTQNSD, &raw mut bytes) };
    if r == 0 {
        usize::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// What the kernel has measured on the path of a TCP connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TcpPath {
    pub(crate) least_round_trip: Duration,
    /// Data segments that were sent.
    pub(crate) sent: u32,
    /// Segments that were sent again.
    pub(crate) resent: u32,
}

/// Returns what the kernel has measured on the path of a TCP connection; `None` before Linux 4.6, and for other sockets.
pub(crate) fn tcp_path(fd: BorrowedFd<'_>) -> Option<TcpPath> {
    let info = tcp_info(fd)?;
    (info.tcpi_min_rtt > 0).then_some(TcpPath {
        least_round_trip: Duration::from_micros(info.tcpi_min_rtt.into()),
        sent: info.tcpi_data_segs_out,
        resent: info.tcpi_total_retrans,
    })
}

/// Segments that a TCP connection has retransmitted.
pub(crate) fn tcp_retransmissions(fd: BorrowedFd<'_>) -> Option<u32> {
    tcp_info(fd).map(|info| info.tcpi_total_retrans)
}

fn tcp_info(fd: BorrowedFd<'_>) -> Option<libc::tcp_info> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `len` live through the call and `len` is the size of `info`.
    let r = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // SAFETY: all members are integers, so zeros, and any bytes that the kernel has written, are a valid value.
    (r == 0).then(|| unsafe { info.assume_init() })
}

/// Blocks until a socket is readable, at most for `time`. Returns whether it is.
pub fn wait_readable(fd: BorrowedFd<'_>, time: Duration) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
        fd,
        rustix::event::PollFlags::IN,
    )];
    let time = rustix::event::Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    rustix::event::poll(&mut fds, Some(&time)).is_ok_and(|n| n > 0)
}

/// Whether a descriptor is in non-blocking mode, which the application can change.
pub fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}
