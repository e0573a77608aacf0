//! The abstract UNIX socket name by which a process registers a listener that accepts an MPA Request, or a UDP socket that
//! accepts messages or reliable datagrams.

use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr};

/// The kind of socket that a name is registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A listener.
    Tcp,
    /// A UDP socket that accepts messages of datagram-iWARP.
    Udp,
    /// A UDP socket that also accepts packets of reliable datagrams.
    Reliable,
}

/// An upper bound for the length of a name: no IPv6 address has a longer text than this one.
const LONGEST: usize = "anywarp/udp/ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255/65535/v6".len();

/// A name. Creating one allocates no memory, so signal handlers may create names. The zero byte before an abstract name is
/// not included.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Name {
    fn new(text: fmt::Arguments<'_>) -> Self {
        let mut name = Self {
            bytes: [0; LONGEST],
            length: 0,
        };
        // The buffer has room for every name, so this cannot fail.
        let _ = name.write_fmt(text);
        name
    }
}

impl Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        let place = self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&[])
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_ref().escape_ascii())
    }
}

/// Returns the name of a socket that is bound to this address. `v6_only`: the socket is bound to `::` and accepts no IPv4.
pub fn of(protocol: Protocol, addr: IpAddr, port: u16, v6_only: bool) -> Name {
    let protocol = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Reliable => "rd",
    };
    let more = if v6_only { "/v6" } else { "" };
    let addr = addr.to_canonical();
    Name::new(format_args!("anywarp/{protocol}/{addr}/{port}{more}"))
}

/// Returns the names of the sockets that can receive packets to `to`: those bound to the address, and to wildcard addresses.
pub fn to_ask(protocol: Protocol, to: SocketAddr) -> [Name; 3] {
    let (ip, port) = (to.ip().to_canonical(), to.port());
    let all = IpAddr::from([0u8; 16]);
    let of_family = if ip.is_ipv4() {
        of(protocol, [0u8; 4].into(), port, false)
    } else {
        of(protocol, all, port, true)
    };
    [
        of(protocol, ip, port, false),
        of_family,
        of(protocol, all, port, false),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_at_all_addresses_is_found_too() {
        let names = |a: &str| {
            let all = to_ask(Protocol::Tcp, a.parse().unwrap());
            all.map(|name| format!("{name:?}"))
        };
        let v4 = [
            "anywarp/tcp/10.0.0.1/80",
            "anywarp/tcp/0.0.0.0/80",
            "anywarp/tcp/::/80",
        ];
        assert_eq!(names("10.0.0.1:80"), v4);
        assert_eq!(names("[::ffff:10.0.0.1]:80"), v4);
        let v6 = [
            "anywarp/tcp/::1/80",
            "anywarp/tcp/::/80/v6",
            "anywarp/tcp/::/80",
        ];
        assert_eq!(names("[::1]:80"), v6);
        let udp = of(Protocol::Udp, [127, 0, 0, 1].into(), 53, false);
        assert_eq!(udp.as_ref(), b"anywarp/udp/127.0.0.1/53");
        let long = of(Protocol::Udp, [0xff; 16].into(), 65535, true);
        let text = "anywarp/udp/ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/65535/v6";
        assert_eq!(long.as_ref(), text.as_bytes());
    }
}
