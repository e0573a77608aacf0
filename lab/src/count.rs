//! `cargo lab count`: counts the instructions of posting and receiving with callgrind, and compares them with
//! `tests/c/count.expect`. Unlike times, the counts do not depend on the load of the machine.
//!
//! `cargo lab count --write` stores the new counts.

use crate::c_tests;
use std::fs;
use std::path::Path;
use std::process::Command;
use xtask::{Result, portable, sh};

/// Counts and compares.
pub(crate) fn run(write: bool) -> Result {
    let work = sh::target().join("count");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    fs::create_dir_all(&work)?;
    // The operations are counted over sockets, and again over shared memory that is used from the first request on.
    let mut counted = count(&work, "tcp", "")?;
    let near = count(&work, "eager", "near/")?;
    counted.extend(near.into_iter().filter(|(n, _)| n.starts_with("near/rc")));
    counted.extend(core(&work)?);
    let path = sh::root().join("tests/c/count.expect");
    let expected = parse(&fs::read_to_string(&path)?)?;
    let mut table = String::from(HEAD);
    let mut worse = Vec::new();
    for (name, instructions) in &counted {
        let figure = expected.iter().find(|(n, ..)| n == name);
        let (before, slack) = figure.map_or((*instructions, SLACK), |(_, n, slack)| (*n, *slack));
        println!(
            "{name:<16} {instructions:>7} instructions, expected {before} and at most {slack} % more"
        );
        table.push_str(&format!("{name:<16} {instructions:>7} {slack:>3}\n"));
        if instructions * 100 > before * (100 + slack) {
            worse.push(name.as_str());
        }
    }
    if write {
        fs::write(&path, table)?;
        return Ok(());
    }
    if let Some((name, ..)) = expected
        .iter()
        .find(|(n, ..)| counted.iter().all(|(c, _)| c != n))
    {
        return Err(format!("count: {name} was not counted").into());
    }
    if worse.is_empty() {
        return Ok(());
    }
    Err(format!(
        "more instructions than before: {} (if this is intended: cargo lab count --write)",
        worse.join(", ")
    )
    .into())
}

const HEAD: &str = "# Instructions outside the kernel. post_*, poll_cq: a call of the library for 64 bytes, with its calls of libc. Others: the core receives\n\
# an FPDU (rx), or processes a datagram (ud, rd). Columns: name, instructions, tolerance in percent. Written by `cargo lab count --write`.\n";
/// The tolerance of a new count in percent.
const SLACK: u64 = 15;

/// Runs the program `count` with this carrier. Returns for each phase its name, after `prefix`, and the least number of instructions
/// per operation over several rounds.
fn count(work: &Path, carrier: &str, prefix: &str) -> Result<Vec<(String, u64)>> {
    let binary = c_tests::build("count", &work.join("count"))?;
    let out = work.join(format!("callgrind.{carrier}"));
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(binary)
        .env("LD_LIBRARY_PATH", sh::dist().join("lib/anywarp"))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .env("ANYWARP_CARRIER", carrier)
        .output()
        .map_err(|e| format!("valgrind: {e}: install the package valgrind"))?;
    if !run.status.success() {
        return Err(format!("count: {}", String::from_utf8_lossy(&run.stderr)).into());
    }
    let mut counted: Vec<(String, u64)> = Vec::new();
    for (at, line) in String::from_utf8(run.stdout)?.lines().enumerate() {
        let (name, times) = line
            .split_once(' ')
            .ok_or("count: a line of the output has no number")?;
        let total = total(Path::new(&format!("{}.{}", out.display(), at + 1)))?;
        let each = total / times.parse::<u64>()?;
        let name = format!("{prefix}{name}");
        match counted.iter_mut().find(|(n, _)| *n == name) {
            Some((_, least)) => *least = each.min(*least),
            None => counted.push((name, each)),
        }
    }
    Ok(counted)
}

/// The counted examples of `crates/sim/examples`: the name, the example and its arguments, and the counted function.
const OF_CORE: [(&str, &str, &[&str], &str); 11] = [
    ("rx/send/64", "receive", &["send/64"], "counted"),
    ("rx/write/64", "receive", &["write/64"], "counted"),
    ("rx/write/1024", "receive", &["write/1024"], "counted"),
    ("ud/tx/64", "datagram", &["ud", "64"], "sent"),
    ("ud/tx/1024", "datagram", &["ud", "1024"], "sent"),
    ("ud/rx/64", "datagram", &["ud", "64"], "received"),
    ("ud/rx/1024", "datagram", &["ud", "1024"], "received"),
    ("rd/tx/64", "datagram", &["rd", "64"], "sent"),
    ("rd/rx/64", "datagram", &["rd", "64"], "received"),
    ("rd/rx/1024", "datagram", &["rd", "1024"], "received"),
    ("rd/ack/64", "datagram", &["rd", "64"], "acknowledged"),
];

/// Counts the operations of one message in the core alone, without threads and sockets.
fn core(work: &Path) -> Result<Vec<(String, u64)>> {
    sh::run(portable::cargo()?.args([
        "build",
        "--release",
        "--package=anywarp-sim",
        "--examples",
    ]))?;
    let mut counted = Vec::new();
    for (name, example, arguments, function) in OF_CORE {
        let out = work.join(name.replace('/', "-"));
        let run = Command::new("valgrind")
            .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
            .arg(format!("--toggle-collect={example}::{function}*"))
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(sh::target().join("release/examples").join(example))
            .args(arguments)
            .output()
            .map_err(|e| format!("valgrind: {e}: install the package valgrind"))?;
        if !run.status.success() {
            return Err(format!("count: {}", String::from_utf8_lossy(&run.stderr)).into());
        }
        let times: u64 = String::from_utf8(run.stdout)?.trim().parse()?;
        let total = total(&out)?;
        if total == 0 {
            return Err(format!("count: nothing of {name} was counted").into());
        }
        counted.push((name.to_owned(), total / times));
    }
    Ok(counted)
}

/// Returns the total number of instructions in a dump of callgrind.
fn total(dump: &Path) -> Result<u64> {
    let text = fs::read_to_string(dump)?;
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("totals: "))
        .ok_or("count: the dump has no totals")?;
    Ok(total.trim().parse()?)
}

fn parse(text: &str) -> Result<Vec<(String, u64, u64)>> {
    let lines = text.lines().filter(|l| !l.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let (Some(name), Some(n), Some(slack)) = (words.next(), words.next(), words.next())
            else {
                return Err(format!("tests/c/count.expect: {line}").into());
            };
            Ok((name.to_owned(), n.parse()?, slack.parse()?))
        })
        .collect()
}
