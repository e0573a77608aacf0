//! A reliable queue pair counts the memory of packets that wait for earlier ones, and charges it to their senders. These tests compare
//! the charged bytes with the resident memory of the process while hostile peers send as much as they can.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::RefCell;
use std::net::SocketAddr;
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::Options;
use anywarp_core::wire::ddp::{Header, Untagged};
use anywarp_core::wire::dgram::{self, Shim};
use anywarp_core::wire::rd::{self, Packet};
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Msn, Stag};
use anywarp_sim::Rng;
use anywarp_sim::ether::{Ether, Link, QKEY};

/// The orders in which packets arrive, and whether the queue pair delivers in order.
const PATTERNS: [(&str, bool); 5] = [
    ("ascending", true),
    ("alternating", true),
    ("descending", true),
    ("random", true),
    ("alternating", false),
];
const PATTERN: &str = "ANYWARP_TEST_PATTERN";

/// Each order runs in a separate process, whose memory no other test uses.
#[test]
fn waiting_packets_use_no_more_memory_than_they_are_charged() {
    // Under a sanitizer each pattern takes ten times as long, and memory is not measured.
    let patterns = if cfg!(sanitized) { 1 } else { PATTERNS.len() };
    for (at, pattern) in PATTERNS.iter().enumerate().take(patterns) {
        let this = std::env::current_exe().unwrap();
        let mut child = Command::new(this);
        child.args(["--exact", "fill", "--ignored", "--nocapture"]);
        let out = child.env(PATTERN, at.to_string()).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{pattern:?}: {text}{errors}");
        assert!(text.contains("1 passed"), "{text}");
    }
}

/// A peer that has echoed a token uses no more memory than SECURITY.md says, even if the table of peers is full and
/// a packet of each peer waits.
#[test]
fn a_full_table_of_peers_uses_no_more_memory_than_documented() {
    let this = std::env::current_exe().unwrap();
    let mut child = Command::new(this);
    child.args(["--exact", "fill_table_of_peers", "--ignored", "--nocapture"]);
    let out = child.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "{text}");
}

/// Resident memory of this process, bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        << 10
}

/// A datagram of a Send without payload, as packets carry it.
fn datagram() -> Vec<u8> {
    let header = Untagged {
        last: true,
        opcode: Opcode::Send,
        inv_stag: Stag(0),
        qn: 0,
        msn: Msn(1),
        mo: 0,
    };
    let shim = Shim {
        epoch: 1,
        qkey: QKEY,
        id: 1,
        length: 0,
        offset: 0,
        sub_op: 0,
        attributes: 0,
        dst_index: 0,
        src_index: 5,
        immediate: None,
        commit: false,
        parity: false,
        group: 0,
        segment: 0,
    };
    dgram::emit_head(&shim, &Header::Untagged(header))
}

#[test]
#[ignore = "run by a test above"]
fn fill_table_of_peers() {
    // A sanitizer uses additional memory for each allocation, and the test takes ten times as long.
    let peers = if cfg!(sanitized) { 1024 } else { 65_536_u32 };
    let mut net = Ether::new(1, Link::default());
    let near = net.join(Kind::Rd, Options::default());
    let at = net[near].addr;
    let token = Rc::new(RefCell::new(None));
    let store = Rc::clone(&token);
    net.filter = Some(Box::new(move |d| {
        let (packet, _) = rd::parse(&d.bytes).unwrap();
        if packet.challenge {
            *store.borrow_mut() = Some(packet.token);
        }
        false
    }));
    let mut data = datagram();
    data[22] = 5;
    let before = resident();
    let mut challenged = 0;
    for n in 0..peers {
        // One host of each of 2,048 networks in turn, so that no network reaches its limit.
        let (network, host) = (n % 2048, n / 2048 + 1);
        let address = [10, (network >> 8) as u8, network as u8, host as u8];
        let from = SocketAddr::from((address, 4000));
        let blank = Packet {
            token: 99,
            dst_index: 5,
            src_index: 5,
            time: 1,
            ..Packet::default()
        };
        let mut bytes = Vec::new();
        blank.put(false, &mut bytes);
        dgram::seal(&mut bytes);
        net.deliver(from, at, &bytes);
        net.run(Duration::from_micros(10));
        let Some(echo) = token.borrow_mut().take() else {
            continue;
        };
        challenged += 1;
        // The packet waits, because an earlier one is missing.
        let packet = Packet {
            echo,
            seq: 103,
            base: 100,
            ..blank
        };
        let mut bytes = Vec::new();
        packet.put(true, &mut bytes);
        bytes.extend_from_slice(&data);
        dgram::seal(&mut bytes);
        net.deliver(from, at, &bytes);
    }
    let (charged, held) = (net[near].qp.waiting(), resident() - before);
    println!("{challenged} peers: charged {charged}, held {held}");
    assert!(
        challenged > peers / 10 * 9,
        "{challenged} of {peers} peers were challenged"
    );
    // Nearly all challenged peers have an entry, and are charged for a waiting packet.
    assert!(charged > challenged as usize / 10 * 9 * 144, "{charged}");
    assert!(
        cfg!(sanitized) || held <= charged + peers as usize * 1536,
        "{held}"
    );
}

#[test]
#[ignore = "run by a test above"]
fn fill() {
    let pattern = std::env::var(PATTERN).unwrap_or_default();
    let (order, ordered) = PATTERNS[pattern.parse::<usize>().unwrap_or(0)];
    let options = Options {
        ordered,
        ..Options::default()
    };
    let mut net = Ether::new(1, Link::default());
    let near = net.join(Kind::Rd, options);
    let at = net[near].addr;
    let tokens = Rc::new(RefCell::new(Vec::new()));
    let store = Rc::clone(&tokens);
    net.filter = Some(Box::new(move |d| {
        let (packet, _) = rd::parse(&d.bytes).unwrap();
        if packet.challenge {
            store.borrow_mut().push(packet.token);
        }
        false
    }));
    let strangers: Vec<SocketAddr> = (0..60_u8).map(|n| ([10, 1, n, 1], 4000).into()).collect();
    let send = |net: &mut Ether, from, packet: &Packet, data: Option<&[u8]>| {
        let mut bytes = Vec::new();
        packet.put(data.is_some(), &mut bytes);
        bytes.extend_from_slice(data.unwrap_or(&[]));
        dgram::seal(&mut bytes);
        net.deliver(from, at, &bytes);
    };
    let blank = Packet {
        token: 99,
        dst_index: 5,
        src_index: 5,
        time: 1,
        ..Packet::default()
    };
    for stranger in &strangers {
        send(&mut net, *stranger, &blank, None);
        net.run(Duration::from_millis(1));
    }
    let tokens = std::mem::take(&mut *tokens.borrow_mut());
    assert_eq!(tokens.len(), strangers.len());
    let mut data = datagram();
    data[22] = 5;
    let before = resident();
    let mut rng = Rng::new(1);
    for (stranger, token) in strangers.iter().zip(tokens) {
        for n in 0..60_000_u32 {
            let seq = match order {
                "ascending" => n,
                "alternating" => n / 2 * 2,
                "descending" => 60_000 - n,
                _ => rng.below(60_000) as u32,
            };
            let packet = Packet {
                echo: token,
                seq: 101 + seq,
                base: 100,
                ..blank.clone()
            };
            send(&mut net, *stranger, &packet, Some(&data));
        }
    }
    let (charged, held) = (net[near].qp.waiting(), resident() - before);
    println!("{order} {ordered}: charged {charged}, held {held}");
    assert!(charged <= bounds::RD_WAITING && charged > bounds::RD_WAITING / 4 * 3);
    // The memory of each peer's entry is not charged. A sanitizer uses additional memory for each allocation.
    assert!(
        cfg!(sanitized) || held <= charged + strangers.len() * 16_384,
        "{held} for {charged}"
    );
    // After a time of silence the memory is freed.
    let timeout = net[near].qp.poll_timeout().unwrap();
    net[near].qp.set_now(timeout);
    net[near].qp.handle_timeout();
    assert_eq!(net[near].qp.waiting(), 0);
}
