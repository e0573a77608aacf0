//! `cargo lab valgrind`: runs the C programs with the installed libraries under valgrind's memcheck.
//!
//! Unlike AddressSanitizer, memcheck detects uninitialized bytes in arguments of system calls and in the data that programs get, even
//! in the standard library and in assembler code.

use crate::c_tests;
use std::fs;
use std::process::Command;
use xtask::{Result, sh};

/// The default programs, whose work is done in one process.
const PROGRAMS: [&str; 5] = ["selftest", "cm", "access", "exs", "exs_hostile"];

/// Leaves out the test of `exs_hostile` that measures how long other peers are delayed.
const WITHOUT_TIMES: &[&str] = &["--without=half_open"];

/// Runs the default programs, or the program and the tests that `arguments` name.
pub(crate) fn run(arguments: &[&str]) -> Result {
    let (programs, tests) = match arguments.split_first() {
        Some((first, tests)) => (vec![*first], tests),
        None => (PROGRAMS.to_vec(), arguments),
    };
    let work = sh::target().join("valgrind");
    fs::create_dir_all(&work)?;

    // memcheck must find a deliberate error; otherwise the other results would be meaningless.
    if memcheck("planted", &["uninit"])?.is_empty() {
        return Err("valgrind does not find the error in tests/c/planted.c".into());
    }
    let mut failed = Vec::new();
    for name in programs {
        println!("== {name}");
        let report = match (name, tests) {
            ("exs_hostile", []) => memcheck(name, WITHOUT_TIMES)?,
            _ => memcheck(name, tests)?,
        };
        if !report.is_empty() {
            eprintln!("{report}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("failed under valgrind: {}", failed.join(", ")).into())
}

/// Runs a program and returns the errors that memcheck reports.
fn memcheck(name: &str, tests: &[&str]) -> Result<String> {
    let work = sh::target().join("valgrind");
    let binary = c_tests::build(name, &work.join(name))?;
    let log = work.join(name).with_extension("log");
    let status = Command::new("valgrind")
        .args(["--quiet", "--error-exitcode=99", "--fair-sched=yes"])
        .args(["--num-callers=30", "--leak-check=full"])
        // A child of fork(2) does not have the parent's threads, so memcheck would report the memory that they own as lost.
        .arg("--child-silent-after-fork=yes")
        // "Possibly lost" memory is referenced by a pointer into its middle, which hash tables use, so it is not an error.
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
