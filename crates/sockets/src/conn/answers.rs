//! Answers the queries of other hosts: whether a socket of this namespace accepts RDMA.
//!
//! Each process with names in the directory has a thread that answers. The threads of one user's processes have sockets at the
//! same port (SO_REUSEPORT), and the kernel gives each query to one of them. When a process ends, the others still answer. A
//! query asks about the address to which it was sent, and no other. A thread answers at most [`limits::LOOKUPS`] queries a
//! second, and an answer is as long as its query.

use crate::conn::show;
use crate::conn::table;
use crate::conn::worker::spawn;
use crate::directory;
use crate::limits;
use crate::sys::{self, Inbox, Received, Route};
use libc::c_int;
use sockets_base::host;
use sockets_base::name::Protocol;
use sockets_base::query;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static STARTED: AtomicBool = AtomicBool::new(false);
static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// Starts the thread unless there is one, or no other host can ask. Called after an attempt to register a socket in the directory, and for
/// each accepted connection.
pub fn start() {
    if STARTED.swap(true, Ordering::AcqRel) {
        return;
    }
    let errno = sys::errno();
    let _stays = sys::NotCancelled::begin();
    if host::has_network()
        && let Some((socket, is_v6)) = sys::shared_udp(query::PORT)
    {
        table::own(socket);
        show::own(socket);
        SOCKET.store(socket, Ordering::Release);
        spawn("anywarp-ask", move || run(socket, is_v6));
    }
    sys::set_errno(errno);
}

/// Called in the child of a fork. The parent's thread does not run in the child. The child starts a thread of its own when it accepts
/// a connection or registers a socket in the directory.
pub fn forked() {
    STARTED.store(false, Ordering::Release);
    let socket = SOCKET.swap(-1, Ordering::AcqRel);
    if socket >= 0 {
        table::close_own(socket);
    }
}

fn run(socket: c_int, is_v6: bool) {
    let mut inbox = Inbox::allocate();
    let (mut second, mut left) = (0, 0);
    loop {
        // The program may have put another descriptor at this number.
        if SOCKET.load(Ordering::Acquire) != socket
            || sys::poll_one(socket, libc::POLLIN, -1).is_err()
        {
            return;
        }
        let now = sys::now_ms() / 1000;
        if now != second {
            (second, left) = (now, limits::LOOKUPS);
        }
        let Ok(n) = inbox.receive(socket) else {
            continue;
        };
        for i in 0..n {
            let Some(received) = inbox.get(i).filter(|_| left > 0) else {
                continue;
            };
            left -= 1;
            if let Some((answer, route)) = answer(&received, is_v6) {
                // If this fails, the other host gets no answer, as if this host had no directory.
                let _ = sys::send_datagram(socket, &answer, &route);
            }
        }
    }
}

/// Called when the program is about to put a descriptor of its own at `fd`. If that is the thread's socket, the thread must not
/// use it any more.
pub fn lost(fd: c_int) {
    let _ = SOCKET.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
}

fn answer(received: &Received<'_>, is_v6: bool) -> Option<([u8; query::LEN], Route)> {
    let asked = query::parse(received.bytes)?;
    let (protocol, port, _) = asked;
    let to = received.destination()?;
    let at = SocketAddr::new(to, port);
    let owner = directory::owner(protocol, at);
    let yes = owner.is_some_and(|owner| owner == 0 || is_of(protocol, at, owner));
    let route = Route {
        to: received.from,
        from: Some(to),
        is_v6,
        is_whole: false,
    };
    Some((query::answer(asked, yes), route))
}

/// Returns whether all sockets that receive what is sent to `at` belong to `user`, who holds the name in the directory. Otherwise
/// the name does not show that these sockets accept RDMA.
fn is_of(protocol: Protocol, at: SocketAddr, user: u32) -> bool {
    let files = match protocol {
        Protocol::Tcp => ["tcp", "tcp6"],
        Protocol::Udp | Protocol::Reliable => ["udp", "udp6"],
    };
    let mut users = Vec::new();
    for file in files {
        let text = fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
        users.extend(
            text.lines()
                .skip(1)
                .filter_map(|line| user_of(line, protocol, at)),
        );
    }
    !users.is_empty() && users.iter().all(|u| *u == user)
}

/// Returns the user of a socket in a line of `/proc/net/tcp` or `/proc/net/udp`, if the socket receives what is sent to `at`.
fn user_of(line: &str, protocol: Protocol, at: SocketAddr) -> Option<u32> {
    const LISTEN: &str = "0A";
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let (ip, port) = words.get(1)?.split_once(':')?;
    if u16::from_str_radix(port, 16).ok()? != at.port()
        || (protocol == Protocol::Tcp && *words.get(3)? != LISTEN)
    {
        return None;
    }
    // The address is printed as words of 32 bits in the byte order of the host.
    let mut octets = [0u8; 16];
    for (place, hex) in octets.chunks_exact_mut(4).zip(ip.as_bytes().chunks(8)) {
        let word = u32::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?;
        place.copy_from_slice(&word.to_ne_bytes());
    }
    let ip: IpAddr = match (ip.len(), octets) {
        (8, [a, b, c, d, ..]) => Ipv4Addr::new(a, b, c, d).into(),
        (32, all) => Ipv6Addr::from(all).to_canonical(),
        _ => return None,
    };
    let is_it = ip.is_unspecified() || ip == at.ip().to_canonical();
    is_it.then(|| words.get(7)?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_user_of_what_is_received() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let rest = "00000000:00000000 00:00000000 00000000  1000        0 31337 1 0000000000000000";
        let tcp = |local: &str, state: &str| format!("   0: {local} 00000000:0000 {state} {rest}");
        let user = |line: &str, a: &str| user_of(line, Protocol::Tcp, at(a));
        let line = tcp("0100007F:1F90", "0A");
        assert_eq!(user(&line, "127.0.0.1:8080"), Some(1000));
        assert_eq!(user(&line, "127.0.0.1:8081"), None);
        assert_eq!(user(&line, "10.0.0.1:8080"), None);
        assert_eq!(user(&tcp("0100007F:1F90", "01"), "127.0.0.1:8080"), None);
        assert_eq!(
            user(&tcp("00000000:1F90", "0A"), "10.0.0.1:8080"),
            Some(1000)
        );
        let six = tcp("0000000000000000FFFF00000100007F:1F90", "0A");
        assert_eq!(user(&six, "127.0.0.1:8080"), Some(1000));
        let all = tcp("00000000000000000000000000000000:1F90", "0A");
        assert_eq!(user(&all, "10.0.0.1:8080"), Some(1000));
        let udp = tcp("0100007F:1F90", "07");
        assert_eq!(
            user_of(&udp, Protocol::Udp, at("127.0.0.1:8080")),
            Some(1000)
        );
        for wrong in ["", "0:", "0: x:1F90 y 0A", "0: 00:1F90 y 0A a b c 1"] {
            assert_eq!(user(wrong, "127.0.0.1:8080"), None);
        }
    }

    #[test]
    fn this_users_sockets_are_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        // SAFETY: no pointer is passed.
        let me = unsafe { libc::getuid() };
        assert!(is_of(Protocol::Udp, at, me));
        assert!(!is_of(Protocol::Udp, at, me + 1));
        drop(socket);
        assert!(!is_of(Protocol::Udp, at, me));
    }
}
