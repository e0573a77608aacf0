//! `cargo xtask count`: instructions of posting, counted by callgrind and held against the figures in
//! `tests/c/count.expect`. A count does not depend on what else the machine does, as times do.
//!
//! `cargo xtask count --write` takes what was counted as the new figures.

use crate::{Result, c_tests, sh};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Counts and compares.
pub(crate) fn run(arguments: &[&str]) -> Result {
    let write = match arguments {
        [] => false,
        ["--write"] => true,
        _ => return Err("usage: cargo xtask count [--write]".into()),
    };
    let work = sh::target().join("count");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    fs::create_dir_all(&work)?;
    let counted = count(&work)?;
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
        "more instructions than before: {} (if that is right: cargo xtask count --write)",
        worse.join(", ")
    )
    .into())
}

const HEAD: &str = "# Instructions of library and libc to post 64 bytes, without the kernel's: what, how many, percent that may come on\n\
# top. Written by `cargo xtask count --write`.\n";
/// For a figure that is new, percent.
const SLACK: u64 = 15;

/// Runs the program; gives each phase and its instructions for one time, the least of several rounds.
fn count(work: &Path) -> Result<Vec<(String, u64)>> {
    let binary = c_tests::build("count", &work.join("count"))?;
    let out = work.join("callgrind.out");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(binary)
        .env("LD_LIBRARY_PATH", sh::dist().join("lib/anywarp"))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .output()
        .map_err(|e| format!("valgrind: {e}: install the package valgrind"))?;
    if !run.status.success() {
        return Err(format!("count: {}", String::from_utf8_lossy(&run.stderr)).into());
    }
    let mut counted: Vec<(String, u64)> = Vec::new();
    for (at, line) in String::from_utf8(run.stdout)?.lines().enumerate() {
        let (name, times) = line
            .split_once(' ')
            .ok_or("count: a line without a number")?;
        let dump = fs::read_to_string(format!("{}.{}", out.display(), at + 1))?;
        let total = dump
            .lines()
            .find_map(|l| l.strip_prefix("totals: "))
            .ok_or("count: a dump without totals")?;
        let total: u64 = total.trim().parse()?;
        let each = total / times.parse::<u64>()?;
        match counted.iter_mut().find(|(n, _)| n == name) {
            Some((_, least)) => *least = each.min(*least),
            None => counted.push((name.to_owned(), each)),
        }
    }
    Ok(counted)
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
