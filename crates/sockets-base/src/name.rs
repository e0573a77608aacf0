//! The abstract UNIX name that stands for a listener which understands a Request, or for a UDP socket that understands messages.

use std::net::{IpAddr, SocketAddr};

/// What a name is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A listener.
    Tcp,
    /// A UDP socket.
    Udp,
}

/// The name of a socket at this address. Abstract: its first byte, zero, is not part of it.
pub fn of(protocol: Protocol, addr: IpAddr, port: u16) -> String {
    let protocol = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    format!("anywarp/{protocol}/{}/{port}", addr.to_canonical())
}

/// The names of the sockets that get what is sent to `to`: at its address, or at all addresses.
pub fn to_ask(protocol: Protocol, to: SocketAddr) -> Vec<String> {
    let (ip, port) = (to.ip().to_canonical(), to.port());
    let mut all = vec![of(protocol, ip, port)];
    if ip.is_ipv4() {
        all.push(of(protocol, [0u8; 4].into(), port));
    }
    all.push(of(protocol, [0u8; 16].into(), port));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_at_all_addresses_is_found_too() {
        let names = |a: &str| to_ask(Protocol::Tcp, a.parse().unwrap());
        let v4 = [
            "anywarp/tcp/10.0.0.1/80",
            "anywarp/tcp/0.0.0.0/80",
            "anywarp/tcp/::/80",
        ];
        assert_eq!(names("10.0.0.1:80"), v4);
        assert_eq!(names("[::ffff:10.0.0.1]:80"), v4);
        assert_eq!(
            names("[::1]:80"),
            ["anywarp/tcp/::1/80", "anywarp/tcp/::/80"]
        );
        let udp = of(Protocol::Udp, [127, 0, 0, 1].into(), 53);
        assert_eq!(udp, "anywarp/udp/127.0.0.1/53");
    }
}
