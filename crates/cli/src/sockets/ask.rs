//! `anywarp sockets ask`: queries the directory of listeners and UDP sockets.

use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, UnixStream};
use std::process::ExitCode;

use sockets_base::host::{Host, Machine};
use sockets_base::name::{self, Protocol};

use super::args::Ask;
use crate::cmd::Failure;

pub(crate) fn run(args: &Ask) -> Result<ExitCode, Failure> {
    let (protocol, address) = if args.udp {
        (Protocol::Udp, args.address)
    } else {
        (Protocol::Tcp, args.address)
    };
    if !Machine.is_here(address.ip().to_canonical()) {
        println!(
            "{address}: not asked: it is no address of this network namespace, and other hosts have no directory yet; the \
             rule `require` upgrades without asking"
        );
        return Ok(ExitCode::FAILURE);
    }
    match find(protocol, address) {
        Some((pid, uid)) if uid == 0 || uid == rustix::process::geteuid().as_raw() => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            println!(
                "{address}: yes, process {pid} ({}) understands it",
                name.trim().escape_debug()
            );
            Ok(ExitCode::SUCCESS)
        }
        Some((pid, uid)) => {
            println!(
                "{address}: process {pid} of user {uid} is registered, and is ignored: only sockets of this user and of root are trusted"
            );
            Ok(ExitCode::FAILURE)
        }
        None => {
            println!(
                "{address}: no: no {} there has libanywarp-sockets.so, or its rules leave the port alone",
                if args.udp { "UDP socket" } else { "listener" }
            );
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Returns the process and the user that hold the name of a listener.
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
