//! `cargo lab valgrind`: our C programs on the libraries as they are installed, under valgrind's memcheck.
//!
//! What memcheck sees and AddressSanitizer does not: bytes that were never written, in what we hand to system calls and in
//! what programs get from us, also in the standard library and in assembler.

use crate::c_tests;
use std::fs;
use std::process::Command;
use xtask::{Result, sh};

/// The programs when none is named: those of one process. In a child of fork(2) all that the threads of the parent
/// held counts as lost.
const PROGRAMS: [&str; 5] = ["selftest", "cm", "access", "exs", "exs_hostile"];

/// Runs what `arguments` name: nothing, or a program and parts of test names.
pub(crate) fn run(arguments: &[&str]) -> Result {
    let (programs, tests) = match arguments.split_first() {
        Some((first, tests)) => (vec![*first], tests),
        None => (PROGRAMS.to_vec(), arguments),
    };
    let work = sh::target().join("valgrind");
    fs::create_dir_all(&work)?;

    // An error that is there on purpose: if it is not found, nothing is.
    if memcheck("planted", &["uninit"])?.is_empty() {
        return Err("valgrind does not find the error in tests/c/planted.c".into());
    }
    let mut failed = Vec::new();
    for name in programs {
        println!("== {name}");
        let report = memcheck(name, tests)?;
        if !report.is_empty() {
            eprintln!("{report}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("under valgrind fail: {}", failed.join(", ")).into())
}

/// Runs a program and returns what there is to complain about.
fn memcheck(name: &str, tests: &[&str]) -> Result<String> {
    let work = sh::target().join("valgrind");
    let binary = c_tests::build(name, &work.join(name))?;
    let log = work.join(name).with_extension("log");
    let status = Command::new("valgrind")
        .args(["--quiet", "--error-exitcode=99", "--fair-sched=yes"])
        .args(["--num-callers=30", "--leak-check=full"])
        // Only "possibly" lost is what a pointer into its middle holds, as hash tables have it.
        .args([
            "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite",
        ])
        .arg(format!("--log-file={}", log.display()))
        .arg(format!(
            "--suppressions={}",
            sh::root().join("tests/valgrind.supp").display()
        ))
        .arg(binary)
        .args(tests)
        .env("LD_LIBRARY_PATH", sh::dist().join("lib/anywarp"))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .status()
        .map_err(|e| format!("valgrind: {e}: install the package valgrind"))?;
    let report = fs::read_to_string(&log)?;
    if report.is_empty() && !status.success() {
        return Ok(format!("{name}: {status}"));
    }
    Ok(report)
}
