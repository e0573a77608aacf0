//! Checks of the address that is to become GID 0 of the device.

use std::net::IpAddr;

use crate::sys::{self, Interface};

/// Checks that this machine has the address, on an interface that need not be up yet. Returns the reason if it does not.
pub(crate) fn check(ip: IpAddr) -> Result<(), String> {
    match sys::interfaces() {
        Ok(all) => check_among(ip, &all),
        // The interfaces cannot be listed here: the device reports an address that it does not find.
        Err(_) => Ok(()),
    }
}

fn check_among(ip: IpAddr, all: &[Interface]) -> Result<(), String> {
    let ip = ip.to_canonical();
    // All addresses of 127.0.0.0/8 are this machine's own, although only one of them is listed.
    let is_local = matches!(ip, IpAddr::V4(v4) if v4.is_loopback());
    if is_local || all.iter().any(|interface| interface.ip == Some(ip)) {
        Ok(())
    } else {
        Err(format!("{ip} is not an address of this machine"))
    }
}

/// Checks the value of ANYWARP_ADDR. Returns the reason if it is not an address of this machine.
pub(crate) fn check_variable(value: &str) -> Result<(), String> {
    match value.parse() {
        Ok(ip) => check(ip),
        Err(_) => Err(format!("{value} is not an IP address")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_this_machine_are_accepted() {
        let of = |ip: &str, up| Interface {
            ip: Some(ip.parse().unwrap()),
            up,
            loopback: false,
        };
        let all = [of("10.0.0.1", true), of("fd00::1", false)];
        let is_own = |ip: &str| check_among(ip.parse().unwrap(), &all).is_ok();
        for ip in [
            "10.0.0.1",
            "::ffff:10.0.0.1",
            "fd00::1",
            "127.0.0.1",
            "127.0.0.2",
        ] {
            assert!(is_own(ip), "{ip}");
        }
        for ip in ["10.0.0.2", "0.0.0.0", "255.255.255.255", "224.0.0.1", "::"] {
            assert!(!is_own(ip), "{ip}");
        }
    }

    #[test]
    fn the_addresses_of_this_machine_are_read() {
        let own = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(check(own.local_addr().unwrap().ip()).is_ok());
        let why = check_variable("192.0.2.77").unwrap_err();
        assert_eq!(why, "192.0.2.77 is not an address of this machine");
        assert!(check_variable("10.0.0.1,10.0.0.2").is_err());
    }
}
