//! The addresses and ports in a rule.

use crate::host::{Host, in_prefix};
use std::net::IpAddr;

/// A set of IP addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Where {
    /// All addresses.
    Any,
    /// Addresses of this machine.
    SameHost,
    /// Addresses with this prefix and prefix length.
    Prefix(IpAddr, u8),
    /// Addresses of an interface and of the networks that it is in.
    Interface(String),
}

impl Where {
    /// Returns whether the set contains an address.
    pub fn has(&self, addr: IpAddr, host: &dyn Host) -> bool {
        let addr = addr.to_canonical();
        match self {
            Self::Any => true,
            Self::SameHost => host.is_here(addr),
            Self::Prefix(prefix, bits) => in_prefix(*prefix, *bits, addr),
            Self::Interface(name) => host.is_on(name, addr),
        }
    }
}

/// A range of ports, both ends included.
pub type Ports = (u16, u16);

fn ports(text: &str) -> Result<Ports, String> {
    let (a, b) = text.split_once('-').unwrap_or((text, text));
    match (a.parse(), b.parse()) {
        (Ok(a), Ok(b)) if a <= b => Ok((a, b)),
        _ => Err(format!(
            "{text} is not a port, or a range of ports such as 8000-8010"
        )),
    }
}

/// Returns whether a text can be the name of a network interface: at most 15 characters, and after a dot (a VLAN) only digits.
fn is_interface(text: &str) -> bool {
    let (name, vlan) = text.split_once('.').unwrap_or((text, "0"));
    text.len() <= 15
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
        && !vlan.is_empty()
        && vlan.chars().all(|c| c.is_ascii_digit())
}

fn host(text: &str) -> Result<Where, String> {
    let wrong = || {
        format!(
            "{text} is not an address: write 10.0.0.0/8, an address, * for all, @same-host, or the name of an interface"
        )
    };
    match text {
        "*" => return Ok(Where::Any),
        "@same-host" => return Ok(Where::SameHost),
        // Without this case, `localhost` would be parsed as the name of an interface, which never matches.
        "localhost" => return Err(wrong()),
        _ => {}
    }
    if is_interface(text) {
        return Ok(Where::Interface(text.to_owned()));
    }
    let (addr, bits) = match text.split_once('/') {
        Some((addr, bits)) => (addr, Some(bits)),
        None => (text, None),
    };
    let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
    let most = if addr.is_ipv4() { 32 } else { 128 };
    let bits = match bits.map(str::parse::<u8>) {
        None => most,
        Some(Ok(bits)) if bits <= most => bits,
        Some(_) => return Err(format!("a prefix of this address has 0 to {most} bits")),
    };
    Ok(Where::Prefix(addr, bits))
}

/// Parses `ADDR[:PORT[-PORT]]`. An IPv6 address with a port is enclosed in brackets.
///
/// # Errors
/// A description of the mistake.
pub fn parse(word: &str) -> Result<(Where, Option<Ports>), String> {
    if let Some(rest) = word.strip_prefix('[') {
        let Some((addr, behind)) = rest.split_once(']') else {
            return Err("a bracket is open: write [fd00::1]:80".to_owned());
        };
        let (bits, port) = match behind.split_once(':') {
            Some((bits, port)) => (bits, Some(port)),
            None => (behind, None),
        };
        return Ok((
            host(&format!("{addr}{bits}"))?,
            port.map(ports).transpose()?,
        ));
    }
    match word.split_once(':') {
        Some((addr, port)) if !port.contains(':') => Ok((host(addr)?, Some(ports(port)?))),
        _ => Ok((host(word)?, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Here;
    impl Host for Here {
        fn is_here(&self, addr: IpAddr) -> bool {
            addr == IpAddr::from([10, 0, 0, 7])
        }
        fn is_on(&self, interface: &str, addr: IpAddr) -> bool {
            interface == "eth0" && in_prefix([10, 0, 0, 0].into(), 24, addr)
        }
    }

    #[test]
    fn addresses_prefixes_interfaces_and_ports_are_read() {
        let has = |word: &str, addr: &str| parse(word).unwrap().0.has(addr.parse().unwrap(), &Here);
        assert!(has("*", "1.2.3.4") && has("10.0.0.0/8:80", "10.9.9.9"));
        assert!(has("10.0.0.1", "::ffff:10.0.0.1") && !has("10.0.0.1", "10.0.0.2"));
        assert!(has("eth0:80", "10.0.0.9") && !has("eth0", "10.0.1.9") && !has("eth1", "10.0.0.9"));
        assert!(has("@same-host", "10.0.0.7") && !has("@same-host", "10.0.0.8"));
        assert!(has("[fd00::]/16:80", "fd00::1") && has("fd00::/16", "fd00::1"));
        let ports = |word: &str| parse(word).unwrap().1;
        assert_eq!(ports("*:80"), Some((80, 80)));
        assert_eq!(ports("eth0.7:80-90"), Some((80, 90)));
        assert_eq!(ports("[::1]:80"), Some((80, 80)));
        assert_eq!(ports("fd00::/16"), None);
    }

    #[test]
    fn an_invalid_address_is_reported() {
        for word in [
            "localhost",
            "example.com",
            "10.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "[::1",
            "*:0x50",
            "*:90-80",
            "*:",
            "",
            "a-name-that-is-too-long",
            "eth0.",
            "-x",
        ] {
            assert!(parse(word).is_err(), "{word}");
        }
    }
}
