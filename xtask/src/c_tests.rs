//! `cargo xtask c-tests`: our own C programs, compiled against the distribution's headers and libraries and run
//! on ours.

use crate::{Result, link, sh, symbols};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs; each is one file in `tests/c`.
const PROGRAMS: &[&str] = &[
    "selftest",
    "cm",
    "access",
    "addresses",
    "chaos",
    "dv",
    "faults",
    "flood",
    "fork",
    "group",
    "hostile",
    "nccl",
    "pages",
    "profiles",
    "rsockets",
    "scale",
    "scarce",
    "stat",
    "strangers",
    "surface",
    "vanish",
    PANIC,
];

/// The one that needs a library which panics when it is asked to: a build with debug assertions.
const PANIC: &str = "panic";

/// Programs that run once more, and what carries their connections then. In most tests `auto`, as it is when nothing is
/// said, is TCP: they end before it changes over.
const CARRIERS: &[(&str, &str)] = &[
    ("selftest", "eager"),
    ("selftest", "copy"),
    ("selftest", "tcp"),
    ("cm", "eager"),
    ("access", "eager"),
    ("access", "copy"),
    ("chaos", "eager"),
    ("chaos", "tcp"),
    ("vanish", "eager"),
    ("vanish", "tcp"),
    ("fork", "eager"),
];

/// Builds and runs the programs; `arguments` are names of programs, and for one program parts of test names.
pub(crate) fn run(arguments: &[&str]) -> Result {
    let (program, tests) = match arguments.split_first() {
        Some((first, rest)) if PROGRAMS.contains(first) => (Some(*first), rest),
        Some((first, _)) => {
            return Err(format!(
                "c-tests: {first}: no such program among {}",
                PROGRAMS.join(", ")
            )
            .into());
        }
        None => (None, arguments),
    };
    let work = sh::target().join("c-tests");
    fs::create_dir_all(&work)?;
    let mut failed = Vec::new();
    for name in PROGRAMS
        .iter()
        .filter(|name| program.is_none_or(|p| p == **name))
    {
        let binary = build(name, &work.join(name))?;
        println!("== {name}");
        let mut command = if *name == PANIC {
            on_debug_build(&binary)?
        } else {
            let mut command = Command::new(sh::dist().join("bin/anywarp"));
            // On the loopback interface, whatever other addresses this machine has.
            command
                .args(["run", "--device-ip", "127.0.0.1", "--"])
                .arg(&binary);
            command
        };
        command.args(tests);
        if !command.status()?.success() {
            failed.push((*name).to_owned());
        }
        for (_, carrier) in CARRIERS.iter().filter(|(n, _)| n == name) {
            println!("== {name} by {carrier}");
            if !command.env("ANYWARP_CARRIER", carrier).status()?.success() {
                failed.push(format!("{name} by {carrier}"));
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("C tests fail: {}", failed.join(", ")).into())
}

/// Runs a program on libraries with debug assertions, which are built for it.
fn on_debug_build(binary: &Path) -> Result<Command> {
    sh::run(sh::cargo().args(["build", "--quiet", "--package=anywarp-abi"]))?;
    let lib = sh::target().join("debug-lib");
    if lib.exists() {
        fs::remove_dir_all(&lib)?;
    }
    link::run(
        &symbols::read()?,
        &sh::target().join("debug/libanywarp_abi.a"),
        &sh::target().join("debug-link"),
        &lib,
        None,
    )?;
    let mut command = Command::new(binary);
    command
        .env("LD_LIBRARY_PATH", &lib)
        .env("LD_PRELOAD", lib.join(symbols::IBVERBS))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// Compiles `tests/c/NAME.c`, as a program of the distribution would be, to `to`.
pub(crate) fn build(name: &str, to: &Path) -> Result<PathBuf> {
    let source = sh::root().join("tests/c").join(name);
    build_from(&source.with_extension("c"), to)
}

/// The same for any source.
pub(crate) fn build_from(source: &Path, to: &Path) -> Result<PathBuf> {
    let mut cc = sh::cc();
    cc.args([
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Werror",
        "-o",
    ])
    .arg(to)
    .arg(source)
    .args(["-libverbs", "-lrdmacm", "-lpthread"]);
    sh::run(&mut cc)?;
    Ok(to.to_path_buf())
}
