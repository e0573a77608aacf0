//! `anywarp sockets stat`: the sockets of a running program.
//!
//! The library in that process keeps a table of the sockets in a memfd, which this command reads through /proc. The addresses
//! come from /proc/PID/net.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;

use serde_json::{Value, json};
use sockets_base::stat::{NAME, Record, SIZE, State, Table, Why};

use super::args::Stat;
use crate::cmd::Failure;

/// A socket of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Socket {
    fd: u32,
    local: SocketAddr,
    /// `None` for a listener and for an unconnected UDP socket.
    peer: Option<SocketAddr>,
    udp: bool,
    record: Record,
}

pub(crate) fn run(args: &Stat) -> Result<ExitCode, Failure> {
    let (name, sockets, totals) = read(args.pid).map_err(Failure::Stat)?;
    if args.json {
        println!("{}", as_json(args.pid, &name, &sockets, totals));
    } else {
        print!("{}", text(args.pid, &name, &sockets, totals));
    }
    Ok(ExitCode::SUCCESS)
}

type Found = (String, Vec<Socket>, (u64, u64));

fn read(pid: u32) -> Result<Found, String> {
    let dir = format!("/proc/{pid}");
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => format!("there is no process {pid}"),
        _ => format!("process {pid}: {e}"),
    };
    let name = fs::read_to_string(format!("{dir}/comm")).map_err(failed)?;
    let name = name.trim().escape_debug().to_string();
    let mut inodes = BTreeMap::new();
    let mut table = None;
    for entry in fs::read_dir(format!("{dir}/fd")).map_err(failed)? {
        let Ok(entry) = entry else { continue };
        let fd = entry.file_name().to_string_lossy().parse::<u32>();
        let (Ok(fd), Ok(link)) = (fd, fs::read_link(entry.path())) else {
            continue;
        };
        let link = link.to_string_lossy().into_owned();
        if let Some(inode) = link
            .strip_prefix("socket:[")
            .and_then(|l| l.strip_suffix(']'))
        {
            inodes.insert(fd, inode.to_owned());
        } else if link == format!("/memfd:{NAME} (deleted)") {
            table = File::open(entry.path()).ok();
        }
    }
    let Some(table) = table else {
        let maps = fs::read_to_string(format!("{dir}/maps")).unwrap_or_default();
        return Err(if maps.contains("libanywarp-sockets.so") {
            format!("process {pid} ({name}) has the library, but has not used a socket yet")
        } else {
            format!(
                "process {pid} ({name}) does not have the library: start it with `anywarp sockets run`"
            )
        });
    };
    let mut bytes = Vec::new();
    let limited = &mut table.take(SIZE as u64);
    limited.read_to_end(&mut bytes).map_err(failed)?;
    let table = Table::new(&bytes)
        .ok_or_else(|| format!("process {pid} ({name}) has the library of another version"))?;
    let mut kernel = BTreeMap::new();
    for (file, udp) in [
        ("tcp", false),
        ("tcp6", false),
        ("udp", true),
        ("udp6", true),
    ] {
        let lines = fs::read_to_string(format!("{dir}/net/{file}")).unwrap_or_default();
        let all = lines.lines().skip(1).filter_map(line);
        kernel.extend(all.map(|(inode, (local, peer))| (inode, (local, peer, udp))));
    }
    let unknown = Record {
        state: State::Plain,
        why: Why::NotSeen,
        window: 0,
        memory: 0,
        bytes_in: 0,
        bytes_out: 0,
    };
    let sockets = inodes.into_iter().filter_map(|(fd, inode)| {
        let (local, peer, udp) = *kernel.get(&inode)?;
        let record = table.record(fd).filter(|r| r.state != State::Unknown);
        if record.is_some_and(|r| r.state == State::Own) {
            return None;
        }
        Some(Socket {
            fd,
            local,
            // For a UDP socket without peer the kernel shows an address with port 0.
            peer: peer.filter(|peer| !udp || peer.port() != 0),
            udp,
            record: record.unwrap_or(unknown),
        })
    });
    Ok((name, sockets.collect(), table.totals()))
}

/// Parses a line of `/proc/net/tcp`: the inode, the local address, and the peer's address unless the socket listens.
fn line(text: &str) -> Option<(String, (SocketAddr, Option<SocketAddr>))> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let (local, peer) = (address(words.get(1)?)?, address(words.get(2)?)?);
    let listens = *words.get(3)? == "0A";
    let inode = (*words.get(9)?).to_owned();
    Some((inode, (local, (!listens).then_some(peer))))
}

/// Parses an address in the kernel's format: 32-bit words in native byte order, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (hex, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |n: usize| {
        let digits = hex.get(8 * n..8 * n + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip: IpAddr = match hex.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

fn mode(socket: &Socket) -> &'static str {
    match (socket.peer, socket.record.state) {
        (_, State::Plain) if socket.udp => "udp",
        // A listener that the rules exclude.
        (None, State::Plain) => "listener, plain",
        (_, state) => state.text(),
    }
}

fn text(pid: u32, name: &str, sockets: &[Socket], (upgraded, stayed): (u64, u64)) -> String {
    let count = |state| {
        sockets
            .iter()
            .filter(|s| (s.peer.is_some() || s.udp) && s.record.state == state)
            .count()
    };
    let mut text = format!(
        "process {pid} ({name}): {} upgraded, {} plain, {} undecided; since its start {upgraded} upgraded, {stayed} plain\n",
        [
            State::Upgraded,
            State::Datagram,
            State::Record,
            State::Reliable,
        ]
        .map(count)
        .iter()
        .sum::<usize>(),
        count(State::Plain),
        count(State::Undecided),
    );
    let _infallible = writeln!(
        text,
        "{:<5} {:<15} {:<25} {:<25} {:>12} {:>12} {:>8} {:>8}",
        "fd", "mode", "local", "peer", "read", "written", "window", "memory"
    );
    for s in sockets {
        let r = &s.record;
        let peer = s.peer.map_or_else(|| "-".to_owned(), |p| p.to_string());
        let rest = match r.state {
            State::Upgraded => format!(
                "{:>12} {:>12} {:>8} {:>8}",
                r.bytes_in, r.bytes_out, r.window, r.memory
            ),
            State::Datagram | State::Record | State::Reliable => {
                format!("{:>12} {:>12}", r.bytes_in, r.bytes_out)
            }
            State::Plain if s.peer.is_some() || s.udp => r.why.text().to_owned(),
            _ => String::new(),
        };
        let row = format!(
            "{:<5} {:<15} {:<25} {peer:<25} {rest}",
            s.fd,
            mode(s),
            s.local.to_string()
        );
        let _infallible = writeln!(text, "{}", row.trim_end());
    }
    text
}

fn as_json(pid: u32, name: &str, sockets: &[Socket], (upgraded, stayed): (u64, u64)) -> Value {
    let all: Vec<Value> = sockets
        .iter()
        .map(|s| {
            let r = &s.record;
            let is_plain = r.state == State::Plain && (s.peer.is_some() || s.udp);
            json!({
                "fd": s.fd, "mode": mode(s), "local": s.local.to_string(), "peer": s.peer.map(|p| p.to_string()),
                "why": is_plain.then(|| r.why.text()), "read": r.bytes_in, "written": r.bytes_out,
                "window": r.window, "memory": r.memory,
            })
        })
        .collect();
    json!({ "pid": pid, "name": name, "upgraded": upgraded, "stayed_plain": stayed, "sockets": all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        if cfg!(target_endian = "little") {
            let v4 = "   0: 0100007F:18EB 0100007F:A3F2 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0";
            let (inode, (local, peer)) = line(v4).unwrap();
            assert_eq!(inode, "4711");
            assert_eq!(local.to_string(), "127.0.0.1:6379");
            assert_eq!(peer.unwrap().to_string(), "127.0.0.1:41970");
            let v6 = "0000000000000000FFFF00000100007F:0050";
            assert_eq!(address(v6).unwrap().to_string(), "127.0.0.1:80");
            let one = "00000000000000000000000001000000:0050";
            assert_eq!(address(one).unwrap().to_string(), "[::1]:80");
        }
        assert!(line("").is_none() && address("xyz:1").is_none() && address("é000000:1").is_none());
    }

    #[test]
    fn sockets_become_a_table_and_json() {
        let record = Record {
            state: State::Upgraded,
            why: Why::NotSeen,
            window: 16384,
            memory: 400,
            bytes_in: 7,
            bytes_out: 9,
        };
        let at: SocketAddr = "127.0.0.1:80".parse().unwrap();
        let socket = |fd, peer, record| Socket {
            fd,
            local: at,
            peer,
            udp: false,
            record,
        };
        let plain = Record {
            state: State::Plain,
            why: Why::NoRequest,
            ..record
        };
        let all = [
            socket(3, None, plain),
            socket(4, Some(at), record),
            socket(5, Some(at), plain),
        ];
        let text = text(1, "x", &all, (4, 2));
        assert!(text.starts_with(
            "process 1 (x): 1 upgraded, 1 plain, 0 undecided; since its start 4 upgraded, 2 plain\n"
        ));
        assert!(
            text.contains("listener, plain") && text.contains(" 16384      400\n"),
            "{text}"
        );
        assert!(text.ends_with(" the peer sent no Request\n"), "{text}");
        let bound = Socket {
            udp: true,
            ..socket(
                6,
                None,
                Record {
                    state: State::Datagram,
                    ..record
                },
            )
        };
        let text = super::text(1, "x", &[bound], (4, 2));
        assert!(
            text.starts_with("process 1 (x): 1 upgraded") && text.contains("\n6     datagram "),
            "{text}"
        );
        let value = as_json(1, "x", &all, (4, 2));
        assert_eq!(value["sockets"][1]["read"], 7);
        assert_eq!(value["sockets"][2]["why"], "the peer sent no Request");
        assert_eq!(value["sockets"][1]["why"], Value::Null);
    }

    #[test]
    fn a_process_without_the_library_is_explained() {
        let why = read(std::process::id()).unwrap_err();
        assert!(why.contains("anywarp sockets run"), "{why}");
        assert!(read(u32::MAX).unwrap_err().contains("there is no process"));
    }
}
