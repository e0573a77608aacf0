//! Checks of the machine, made by reading /proc and /sys or by trying system calls.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::Line;
use crate::cli::DeviceProfile;
use crate::cmd::address;
use crate::library::Library;
use crate::sys;

/// The least socket buffer in bytes that holds a burst of datagrams: 1 MiB holds some 700 datagrams of 1500 bytes.
const ENOUGH_BUFFER: u64 = 1 << 20;

/// The least descriptor limit for a program with a hundred connections; a connection uses up to three.
const ENOUGH_DESCRIPTORS: u64 = 1024;

/// The size in bytes to which TCP must be able to enlarge a socket buffer automatically, so that a link with a high
/// bandwidth-delay product is fully used.
const ENOUGH_TCP_BUFFER: u64 = 4 << 20;

/// Returns the results of all checks that do not depend on the library.
pub(super) fn machine() -> Vec<Line> {
    let mut lines = vec![real_devices(), distribution()];
    lines.extend(features());
    lines.push(datagram_buffer("net.core.rmem_max"));
    lines.push(datagram_buffer("net.core.wmem_max"));
    lines.push(tcp_buffer("net.ipv4.tcp_rmem"));
    lines.push(tcp_buffer("net.ipv4.tcp_wmem"));
    lines.push(congestion_control());
    lines.push(descriptors());
    lines.extend(loopback(&sys::interfaces().unwrap_or_default()));
    lines.extend(chosen_address(
        &std::env::var("ANYWARP_ADDR").unwrap_or_default(),
    ));
    lines
}

/// Returns whether data can be sent to this machine's own addresses. This needs the loopback interface, which is down in a new network
/// namespace.
pub(super) fn has_loopback() -> bool {
    sys::interfaces().map_or(true, |all| loopback(&all).is_none())
}

/// Checks that the loopback interface is up. `all`: the interfaces, or none if they are unknown.
fn loopback(all: &[sys::Interface]) -> Option<Line> {
    if all.is_empty() || all.iter().any(|i| i.loopback && i.up) {
        return None;
    }
    Some(Line::fail(
        "network",
        "the interface lo is down: this machine cannot send to itself",
        "ip link set lo up, as root of this network namespace; the self-test does not run without it",
    ))
}

/// Checks the address that the environment selects for GID 0.
fn chosen_address(value: &str) -> Option<Line> {
    if value.is_empty() {
        return None;
    }
    let why = address::check_variable(value).err()?;
    Some(Line::fail(
        "address",
        format!("ANYWARP_ADDR: {why}: the device ignores it"),
        "set it to an address of this machine, or unset it",
    ))
}

/// Reads a kernel setting by its sysctl name.
fn sysctl(name: &str) -> io::Result<String> {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    fs::read_to_string(path).map(|text| text.trim().to_owned())
}

fn real_devices() -> Line {
    let devices: Vec<String> = fs::read_dir("/sys/class/infiniband")
        .map(|dir| {
            dir.flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect()
        })
        .unwrap_or_default();
    if devices.is_empty() {
        Line::ok("RDMA devices of the kernel", "none, and none is needed")
    } else {
        Line::warn(
            "RDMA devices of the kernel",
            devices.join(", "),
            "programs under `anywarp run` see only anywarp0; run them without it to use these",
        )
    }
}

/// Returns the folders in which distributions keep libraries.
fn library_folders() -> Vec<PathBuf> {
    let triplet = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    [triplet.as_str(), "/usr/lib64", "/usr/lib", "/lib64", "/lib"]
        .iter()
        .map(PathBuf::from)
        .collect()
}

/// Returns the path of the distribution's libibverbs, with symbolic links resolved.
fn distribution_verbs() -> Option<PathBuf> {
    library_folders()
        .into_iter()
        .find_map(|dir| fs::canonicalize(dir.join("libibverbs.so.1")).ok())
}

fn distribution() -> Line {
    match distribution_verbs() {
        Some(path) => Line::ok("libibverbs of the distribution", path.display().to_string()),
        None => Line::warn(
            "libibverbs of the distribution",
            "not installed",
            "not needed if your programs run; the packages rdma-core, ibverbs-utils and perftest contain programs to try",
        ),
    }
}

/// Returns the names of the private version nodes in a library, which differ between releases.
fn private_nodes(path: &Path) -> Vec<String> {
    const PREFIX: &[u8] = b"IBVERBS_PRIVATE_";
    let content = fs::read(path).unwrap_or_default();
    let mut nodes: Vec<String> = content
        .split(|b| *b == 0)
        .filter_map(|text| text.strip_prefix(PREFIX))
        .filter(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
        .map(|digits| String::from_utf8_lossy(&[PREFIX, digits].concat()).into_owned())
        .collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

/// Checks whether the drop-in library has the version nodes that the distribution's programs are linked against.
pub(super) fn library(library: &Library) -> Vec<Line> {
    let mut lines = vec![Line::ok("library", library.dir().display().to_string())];
    if let Some(theirs) = distribution_verbs() {
        let ours: Vec<String> = fs::read_dir(library.dir())
            .map(|dir| {
                dir.flatten()
                    .map(|entry| entry.path())
                    .collect::<Vec<PathBuf>>()
            })
            .unwrap_or_default()
            .iter()
            .filter(|path| {
                path.file_name()
                    .and_then(OsStr::to_str)
                    .is_some_and(|name| name.contains(".so"))
            })
            .flat_map(|path| private_nodes(path))
            .collect();
        let missing: Vec<String> = private_nodes(&theirs)
            .into_iter()
            .filter(|node| !ours.contains(node))
            .collect();
        if !missing.is_empty() {
            lines.push(Line::warn(
                "library versions",
                format!(
                    "the distribution's libibverbs has {}, which anywarp's lacks",
                    missing.join(", ")
                ),
                "a program that ends with \"version not found\" needs a newer anywarp",
            ));
        }
    }
    let profile = std::env::var("ANYWARP_DEVICE_PROFILE").unwrap_or_default();
    lines.extend(device_profile(&profile));
    if library.path_shim().is_none() {
        lines.push(Line::warn(
            "path shim",
            "libanywarp-path.so is missing",
            "reinstall anywarp, if UCX or another program that looks for device files does not see the device",
        ));
    }
    lines
}

/// Checks the device profile that the environment selects: the other device whose limits this device reports and enforces.
fn device_profile(name: &str) -> Option<Line> {
    if name.is_empty() || name == DeviceProfile::Anywarp.as_str() {
        return None;
    }
    let known: Vec<&str> = DeviceProfile::value_variants()
        .iter()
        .map(|p| p.as_str())
        .collect();
    Some(if known.contains(&name) {
        Line::warn(
            "device profile",
            format!("{name}: programs get that device's limits, and only its features"),
            "unset ANYWARP_DEVICE_PROFILE to get all features; the self-test runs without it",
        )
    } else {
        Line::fail(
            "device profile",
            format!("ANYWARP_DEVICE_PROFILE={name}: there is no such profile, so no device opens"),
            format!("set it to one of {}, or unset it", known.join(", ")),
        )
    })
}

/// Returns the line for a kernel feature: whether it works, and the effect if it is missing.
fn feature(name: &'static str, tried: io::Result<()>, needed: bool, without: &str) -> Line {
    match tried {
        Ok(()) => Line::ok("kernel", name),
        Err(e) if needed => Line::fail(
            "kernel",
            format!("{name}: {e}"),
            format!("{without}; allow the call in this sandbox"),
        ),
        Err(e) => Line::warn("kernel", format!("{name}: {e}"), without.to_owned()),
    }
}

fn features() -> Vec<Line> {
    vec![
        feature(
            "eventfd",
            sys::eventfd(),
            true,
            "completion channels do not work",
        ),
        feature("timerfd", sys::timerfd(), true, "time-outs do not work"),
        feature(
            "epoll_pwait2",
            sys::epoll_pwait2(),
            false,
            "waits are rounded to milliseconds; needs Linux 5.11",
        ),
        feature(
            "TCP_USER_TIMEOUT",
            sys::tcp_user_timeout(),
            false,
            "the loss of a peer is detected later",
        ),
        feature(
            "UDP segmentation (GSO)",
            sys::udp_gso(),
            false,
            "datagrams are sent one by one; needs Linux 4.18",
        ),
        feature(
            "UDP coalescing (GRO)",
            sys::udp_gro(),
            false,
            "datagrams are received one by one; needs Linux 5.0",
        ),
    ]
}

fn datagram_buffer(name: &'static str) -> Line {
    match sysctl(name).ok().and_then(|text| text.parse::<u64>().ok()) {
        Some(bytes) if bytes >= ENOUGH_BUFFER => Line::ok(name, format!("{bytes} bytes")),
        Some(bytes) => Line::warn(
            name,
            format!("{bytes} bytes: bursts of UD datagrams may be lost"),
            format!(
                "sysctl -w {name}={} as root, on the host if this is a container",
                4 * ENOUGH_BUFFER
            ),
        ),
        None => Line::ok(name, "not readable here (set by the host)"),
    }
}

fn tcp_buffer(name: &'static str) -> Line {
    let largest = sysctl(name)
        .ok()
        .and_then(|text| text.split_whitespace().last()?.parse::<u64>().ok());
    match largest {
        Some(bytes) if bytes >= ENOUGH_TCP_BUFFER => Line::ok(name, format!("up to {bytes} bytes")),
        Some(bytes) => Line::warn(
            name,
            format!("up to {bytes} bytes: a fast link with a long delay is not fully used"),
            format!("raise its third number to {ENOUGH_TCP_BUFFER} or more with sysctl, as root"),
        ),
        None => Line::ok(name, "not readable here (set by the host)"),
    }
}

fn congestion_control() -> Line {
    match sysctl("net.ipv4.tcp_congestion_control") {
        Ok(name) if name.starts_with("bbr") => Line::ok(
            "TCP congestion control",
            format!(
                "{name}; replaced by cubic or reno if the round trip takes less than 100 µs (ANYWARP_CC={name} prevents this)"
            ),
        ),
        Ok(name) => Line::ok("TCP congestion control", name),
        Err(_) => Line::ok(
            "TCP congestion control",
            "not readable here (the kernel's default)",
        ),
    }
}

fn descriptors() -> Line {
    descriptors_of(&fs::read_to_string("/proc/self/limits").unwrap_or_default())
}

/// Checks the limit of open files in the text of /proc/self/limits.
fn descriptors_of(limits: &str) -> Line {
    let Some((soft, hard)) = open_files(limits) else {
        return Line::ok("open files", "no limit found");
    };
    let found = format!("{soft} (at most {hard})");
    if soft == "unlimited"
        || soft
            .parse::<u64>()
            .is_ok_and(|soft| soft >= ENOUGH_DESCRIPTORS)
    {
        Line::ok("open files", found)
    } else {
        let advice = if soft == hard {
            "raise the hard limit, as root (limits.conf(5), LimitNOFILE= of systemd, --ulimit of docker): a connection takes up to \
             three"
                .to_owned()
        } else {
            format!("ulimit -n {hard} before the program starts: a connection takes up to three")
        };
        Line::warn("open files", found, advice)
    }
}

/// Parses the soft and the hard limit of open files from the text of /proc/self/limits.
fn open_files(limits: &str) -> Option<(&str, &str)> {
    let mut words = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?
        .split_whitespace();
    Some((words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn a_device_profile_is_reported_and_an_unknown_one_is_an_error() {
        assert!(device_profile("").is_none());
        assert!(device_profile("anywarp").is_none());
        let known = device_profile("siw").unwrap();
        assert!(known.found.starts_with("siw"), "{}", known.found);
        let unknown = device_profile("siv").unwrap();
        assert!(unknown.advice.unwrap().contains("siw"));
    }

    #[test]
    fn limits_are_parsed() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max open files            1024                 1048576              files\n";

        assert_eq!(open_files(text), Some(("1024", "1048576")));
        assert_eq!(open_files(""), None);
    }

    #[test]
    fn a_limit_that_cannot_be_raised_has_other_advice() {
        let advice = |soft, hard| {
            descriptors_of(&format!("Max open files {soft} {hard} files"))
                .advice
                .unwrap()
        };
        assert!(advice(20, 4096).starts_with("ulimit -n 4096 "));
        assert!(advice(20, 20).starts_with("raise the hard limit"));
    }

    #[test]
    fn a_loopback_interface_that_is_down_is_a_failure() {
        let lo = |up| sys::Interface {
            ip: None,
            up,
            loopback: true,
        };
        assert!(loopback(&[lo(false)]).unwrap().is_fail());
        assert!(loopback(&[lo(true)]).is_none());
        assert!(loopback(&[]).is_none());
    }

    #[test]
    fn an_address_that_the_device_ignores_is_a_failure() {
        assert!(chosen_address("").is_none());
        assert!(chosen_address("127.0.0.1").is_none());
        for value in ["192.0.2.77", "pigeon"] {
            let line = chosen_address(value).unwrap();
            assert!(line.is_fail() && line.found.contains(value), "{line:?}");
        }
    }

    #[test]
    fn every_problem_has_a_remedy() {
        for line in machine() {
            assert_eq!(line.level == Level::Ok, line.advice.is_none(), "{line:?}");
        }
    }

    #[test]
    fn private_nodes_are_found_in_a_library_file() {
        let path = std::env::temp_dir().join(format!("anywarp-nodes-{}", std::process::id()));
        fs::write(
            &path,
            b"x\0IBVERBS_PRIVATE_34\0IBVERBS_PRIVATE_\0IBVERBS_PRIVATE_34\0",
        )
        .unwrap();

        assert_eq!(private_nodes(&path), ["IBVERBS_PRIVATE_34"]);
        fs::remove_file(&path).unwrap();
    }
}
