//! The abstract UNIX name that stands for a listener which understands a Request.

use std::net::{IpAddr, SocketAddr};

/// The name of a listener at this address. Abstract: its first byte, zero, is not part of it.
pub fn of(addr: IpAddr, port: u16) -> String {
    format!("anywarp/tcp/{}/{port}", addr.to_canonical())
}

/// The names of the listeners that accept connections to `to`: at its address, or at all addresses.
pub fn to_ask(to: SocketAddr) -> Vec<String> {
    let (ip, port) = (to.ip().to_canonical(), to.port());
    let mut all = vec![of(ip, port)];
    if ip.is_ipv4() {
        all.push(of([0u8; 4].into(), port));
    }
    all.push(of([0u8; 16].into(), port));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_at_all_addresses_is_found_too() {
        let names = |a: &str| to_ask(a.parse().unwrap());
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
    }
}
