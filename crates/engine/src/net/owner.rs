//! The user who owns a socket of this host, from the kernel's socket diagnostics (sock_diag(7)).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// `SOCK_DIAG_BY_FAMILY`: the type of the request and of its answer.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// Bytes of a `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of a `struct inet_diag_req_v2`, which follows the header.
const QUERY: usize = 56;
/// Offset of the user in the answer, which is a header and a `struct inet_diag_msg`.
const USER: usize = HEADER + 64;

/// Whether the TCP socket of this network namespace that is bound to `local` and connected to `remote` belongs to the
/// effective user of this process. False also if there is no such socket or the kernel does not answer.
pub(crate) fn is_this_user(local: SocketAddr, remote: SocketAddr) -> bool {
    let user = user_of(libc::IPPROTO_TCP, local, remote);
    matches!(user, Ok(Some(user)) if user == rustix::process::geteuid().as_raw() && is_one_user(user))
}

/// Whether this number identifies a single user. In a user namespace the kernel reports all users outside the
/// namespace by one number, which can also be that of a user inside (user_namespaces(7)).
fn is_one_user(user: u32) -> bool {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    stands_for_one(
        user,
        &text("/proc/sys/kernel/overflowuid"),
        &text("/proc/self/uid_map"),
    )
}

/// Like [`is_one_user`], with the given contents of files. `overflow` is the content of `/proc/sys/kernel/overflowuid`. If it could not
/// be read, it is empty, and the kernel's default is used. `map` is the content of `/proc/self/uid_map`. If it is empty, the namespace
/// is assumed to lack users, so that fewer users are trusted.
fn stands_for_one(user: u32, overflow: &str, map: &str) -> bool {
    const DEFAULT_OVERFLOW: u32 = 65534;
    let has_all_users = map.split_whitespace().eq(["0", "0", "4294967295"]);
    has_all_users || user != overflow.trim().parse().unwrap_or(DEFAULT_OVERFLOW)
}

/// Whether the unconnected UDP socket of this network namespace that is bound to `local` belongs to the effective
/// user of this process. False also if there is no such socket or the kernel does not answer.
pub(crate) fn is_udp_of_this_user(local: SocketAddr) -> bool {
    udp_user(local)
        .is_some_and(|user| user == rustix::process::geteuid().as_raw() && is_one_user(user))
}

/// Like [`is_udp_of_this_user`], but also true if the socket belongs to root.
pub(crate) fn is_udp_of_this_user_or_root(local: SocketAddr) -> bool {
    udp_user(local) == Some(0) || is_udp_of_this_user(local)
}

/// The user of the unconnected UDP socket of this network namespace that is bound to `local`.
fn udp_user(local: SocketAddr) -> Option<u32> {
    let any: IpAddr = match local {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // For UDP the kernel expects the two addresses of the query in the opposite order.
    user_of(libc::IPPROTO_UDP, SocketAddr::new(any, 0), local).ok()?
}

fn user_of(protocol: i32, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
    let diag = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(netlink::SOCK_DIAG),
    )?;
    rustix::net::send(&diag, &query(protocol, local, remote), SendFlags::empty())?;
    // The kernel has answered when `send` returns.
    let mut answer = [0; 512];
    let (_, n) = rustix::net::recv(&diag, &mut answer, RecvFlags::DONTWAIT)?;
    Ok(user_in(answer.get(..n).unwrap_or(&[])))
}

/// The request for the one socket with these addresses.
fn query(protocol: i32, local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let mut out = Vec::with_capacity(HEADER + QUERY);
    out.extend_from_slice(&((HEADER + QUERY) as u32).to_ne_bytes());
    out.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    out.extend_from_slice(&REQUEST.to_ne_bytes());
    // The sequence number and the port id are 0: the socket is used for one request, so its answer needs no number.
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&[
        u8::try_from(family).unwrap_or(0),
        u8::try_from(protocol).unwrap_or(0),
        0,
        0,
    ]);
    // All states.
    out.extend_from_slice(&u32::MAX.to_ne_bytes());
    out.extend_from_slice(&local.port().to_be_bytes());
    out.extend_from_slice(&remote.port().to_be_bytes());
    out.extend_from_slice(&address(local.ip()));
    out.extend_from_slice(&address(remote.ip()));
    let interface = match local {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    out.extend_from_slice(&interface.to_ne_bytes());
    // No cookie: any socket with these addresses.
    out.extend_from_slice(&[0xff; 8]);
    out
}

fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(v4) => {
            let mut out = [0; 16];
            for (to, from) in out.iter_mut().zip(v4.octets()) {
                *to = from;
            }
            out
        }
    }
}

/// The user in the kernel's answer; `None` if it is an error, such as that there is no such socket.
fn user_in(answer: &[u8]) -> Option<u32> {
    let kind = answer.get(4..6)?.first_chunk::<2>()?;
    let user = answer.get(USER..)?.first_chunk::<4>()?;
    (u16::from_ne_bytes(*kind) == BY_FAMILY).then(|| u32::from_ne_bytes(*user))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn a_socket_of_this_process_belongs_to_its_user() {
        for ip in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(ip) else {
                assert!(ip.starts_with('['), "a host has IPv4");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let (one, other) = (client.local_addr().unwrap(), server.local_addr().unwrap());
            assert!(is_this_user(one, other), "{ip}");
            assert!(is_this_user(other, one), "{ip}");
            let mut nobody = other;
            nobody.set_port(1);
            assert!(!is_this_user(one, nobody), "there is no such connection");
        }
    }

    #[test]
    fn a_datagram_socket_of_this_process_belongs_to_its_user() {
        for ip in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(socket) = UdpSocket::bind(ip) else {
                assert!(ip.starts_with('['), "a host has IPv4");
                continue;
            };
            let mut addr = socket.local_addr().unwrap();
            assert!(is_udp_of_this_user_or_root(addr), "{ip}");
            assert!(is_udp_of_this_user(addr), "{ip}");
            addr.set_port(1);
            assert!(
                !is_udp_of_this_user_or_root(addr),
                "there is no such socket"
            );
        }
    }

    #[test]
    fn the_overflow_uid_is_not_accepted_as_a_user() {
        let initial = "         0          0 4294967295\n";
        let own = "         0       1000          1\n     65534     165534          1\n";
        assert!(stands_for_one(65534, "65534\n", initial));
        assert!(!stands_for_one(65534, "65534\n", own));
        assert!(stands_for_one(0, "65534\n", own));
        assert!(
            !stands_for_one(99, "99\n", own),
            "another number than usual"
        );
        assert!(stands_for_one(1000, "", ""), "without /proc");
        assert!(!stands_for_one(65534, "", ""), "without /proc");
    }

    #[test]
    fn an_answer_of_any_length_is_read_within_its_bounds() {
        let mut answer = vec![0; HEADER + 72];
        answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        answer[USER..USER + 4].copy_from_slice(&7_u32.to_ne_bytes());
        assert_eq!(user_in(&answer), Some(7));
        for len in 0..USER + 4 {
            assert_eq!(user_in(&answer[..len]), None);
        }
        // NLMSG_ERROR.
        answer[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(user_in(&answer), None);
    }
}
