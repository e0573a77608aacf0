//! `anywarp sockets ask`: queries a host's directory of the listeners and UDP sockets that accept RDMA.
//!
//! On this host the directory consists of the names of abstract Unix sockets. Another host is queried by a UDP datagram.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, UnixStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sockets_base::host::{Host, Machine};
use sockets_base::name::{self, Protocol};
use sockets_base::query;

use super::args::Ask;
use crate::cmd::Failure;

pub(crate) fn run(args: &Ask) -> Result<ExitCode, Failure> {
    let (protocol, address) = if args.udp {
        (Protocol::Udp, args.address)
    } else {
        (Protocol::Tcp, args.address)
    };
    if !Machine.is_here(address.ip().to_canonical()) {
        return Ok(match query_host(protocol, address) {
            Ok(true) => {
                println!("{address}: yes, according to the directory of that host");
                ExitCode::SUCCESS
            }
            Ok(false) => {
                println!("{address}: no, according to the directory of that host");
                ExitCode::FAILURE
            }
            Err(e) => {
                println!(
                    "{address}: the directory of that host does not answer at UDP port {}: {e}; the rule `require` upgrades without \
                    asking",
                    query::PORT
                );
                ExitCode::FAILURE
            }
        });
    }
    match find(protocol, address) {
        Some((pid, uid)) if uid == 0 || uid == rustix::process::geteuid().as_raw() => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            println!(
                "{address}: yes, process {pid} ({}) accepts RDMA",
                name.trim().escape_debug()
            );
            Ok(ExitCode::SUCCESS)
        }
        Some((pid, uid)) => {
            println!(
                "{address}: no: process {pid} of user {uid} is registered, but only sockets of this user and of root are trusted"
            );
            Ok(ExitCode::FAILURE)
        }
        None => {
            println!(
                "{address}: no: there is no {} with libanywarp-sockets.so, or its rules exclude the port",
                if args.udp { "UDP socket" } else { "listener" }
            );
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Asks the directory of another host.
fn query_host(protocol: Protocol, address: SocketAddr) -> io::Result<bool> {
    const WAIT: Duration = Duration::from_millis(500);
    let any: IpAddr = if address.is_ipv4() {
        [0u8; 4].into()
    } else {
        [0u8; 16].into()
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((address.ip(), query::PORT))?;
    let mut nonce = [0u8; 8];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    let asked = query::query(protocol, address.port(), u64::from_ne_bytes(nonce));
    socket.send(&asked)?;
    let mut got = [0u8; 64];
    let until = Instant::now() + WAIT;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let n = match socket.recv(&mut got) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            Err(e) => return Err(e),
        };
        if let Some(yes) = query::parse_answer(got.get(..n).unwrap_or(&[]), &asked) {
            return Ok(yes);
        }
    }
}

/// Returns the process and the user that have registered a listener or a UDP socket: those that
/// have bound its name.
fn find(protocol: Protocol, address: SocketAddr) -> Option<(i32, u32)> {
    name::to_ask(protocol, address).iter().find_map(|name| {
        let name = net::SocketAddr::from_abstract_name(name).ok()?;
        let stream = UnixStream::connect_addr(&name).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        Some((peer.pid.as_raw_pid(), peer.uid.as_raw()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_its_name() {
        let port = crate::sys::free_port().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(find(Protocol::Tcp, address), None);
        let held = name::of(Protocol::Tcp, [0u8; 16].into(), port, false);
        let held = net::SocketAddr::from_abstract_name(held).unwrap();
        let _listener = net::UnixListener::bind_addr(&held).unwrap();
        let (pid, _) = find(Protocol::Tcp, address).unwrap();
        assert_eq!(u32::try_from(pid).unwrap(), std::process::id());
    }
}
