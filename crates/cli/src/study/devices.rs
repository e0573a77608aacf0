//! The addresses of devices of the system's libibverbs.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

use super::namespace::system;

/// Returns the IPv4 address at which a device is reached: one of its GIDs, as with RoCE, or the address of the interface whose
/// link address is at the beginning of the device's first GID, as with iWARP.
pub(super) fn address(device: &str) -> Option<String> {
    let folder = Path::new("/sys/class/infiniband")
        .join(device)
        .join("ports/1/gids");
    let gid = |n: u8| fs::read_to_string(folder.join(n.to_string())).ok();
    let by_gid = (0..8).filter_map(gid).find_map(|gid| mapped(&gid));
    by_gid.or_else(|| {
        let wanted = link_address(&gid(0)?)?;
        let interfaces = fs::read_dir("/sys/class/net").ok()?;
        let found = interfaces.flatten().find(|entry| {
            let own = fs::read_to_string(entry.path().join("address"));
            own.is_ok_and(|own| own.trim() == wanted)
        })?;
        let name = found.file_name().to_string_lossy().into_owned();
        of_interface(&system(&format!("ip -o -4 addr show dev {name}")).ok()?)
    })
}

/// Returns the IPv4 address that a GID contains, if any.
fn mapped(gid: &str) -> Option<String> {
    let gid: Ipv6Addr = gid.trim().parse().ok()?;
    gid.to_ipv4_mapped().map(|address| address.to_string())
}

/// Returns the link address at the beginning of a GID.
fn link_address(gid: &str) -> Option<String> {
    let gid: Ipv6Addr = gid.trim().parse().ok()?;
    let octets = gid.octets();
    let bytes: Vec<String> = octets.iter().take(6).map(|b| format!("{b:02x}")).collect();
    Some(bytes.join(":"))
}

/// Returns the address in a line of `ip -o -4 addr`.
fn of_interface(text: &str) -> Option<String> {
    let (_, rest) = text.split_once(" inet ")?;
    rest.split(['/', ' ']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_names_an_address_or_an_interface() {
        let roce = "0000:0000:0000:0000:0000:ffff:0a58:0002\n";
        assert_eq!(mapped(roce).as_deref(), Some("10.88.0.2"));
        let iwarp = "5254:0012:3456:0000:0000:0000:0000:0000\n";
        assert_eq!(mapped(iwarp), None);
        assert_eq!(link_address(iwarp).as_deref(), Some("52:54:00:12:34:56"));
        let line = "2: eth0    inet 10.88.0.2/24 scope global eth0\\       valid_lft forever";
        assert_eq!(of_interface(line).as_deref(), Some("10.88.0.2"));
        assert_eq!(of_interface(""), None);
    }
}
