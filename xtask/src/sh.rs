//! Running of programs, and paths of the workspace.

use crate::Result;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Returns the folder of the workspace.
pub fn root() -> PathBuf {
    // Read at run time, not at build time, because copies of the workspace may share a build folder.
    let mut path = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    path.pop();
    path
}

/// Returns the build folder of cargo: `CARGO_TARGET_DIR`, or `target`.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The variable from which cargo reads the target to build for. [`build_for`] sets it.
const BUILD_TARGET: &str = "CARGO_BUILD_TARGET";

/// Returns the target of this build if it is of another architecture than this machine.
pub fn cross_target() -> Option<String> {
    let target = std::env::var(BUILD_TARGET).ok()?;
    (first_part(&target) != std::env::consts::ARCH).then_some(target)
}

/// Returns the architecture of the target, with its name in Rust.
pub fn arch() -> String {
    cross_target().map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |target| first_part(&target).to_owned(),
    )
}

fn first_part(target: &str) -> &str {
    target.split('-').next().unwrap_or_default()
}

/// Runs this program again with the same arguments, to build for `target`. The compiler and linker are those of Debian's
/// package for that architecture, unless `CC` and cargo's variable for the linker name others.
pub fn build_for(target: &str) -> Result {
    let gcc = format!("{}-gcc", target.replace("-unknown", ""));
    let cc = std::env::var_os("CC").unwrap_or_else(|| gcc.into());
    let linker = format!(
        "CARGO_TARGET_{}_LINKER",
        target.replace('-', "_").to_uppercase()
    );
    let mut again = Command::new(std::env::current_exe()?);
    again
        .args(std::env::args_os().skip(1))
        .env(BUILD_TARGET, target)
        .env("CC", &cc);
    if std::env::var_os(&linker).is_none() {
        again.env(linker, &cc);
    }
    run(&mut again)
}

/// Returns whether [`build_for`] started this process for the target.
pub fn builds_for(target: &str) -> bool {
    std::env::var(BUILD_TARGET).is_ok_and(|set| set == target)
}

/// Makes a cargo command build for this machine.
pub fn natively(cargo: &mut Command) -> &mut Command {
    cargo.env_remove(BUILD_TARGET).env_remove("CC")
}

/// Returns the folder for the results of `cargo build --release`.
pub fn release() -> PathBuf {
    match std::env::var_os(BUILD_TARGET) {
        Some(named) => target().join(named).join("release"),
        None => target().join("release"),
    }
}

/// Returns the folder for the result of `cargo xtask dist`: `dist`, or `dist-ARCHITECTURE` for another architecture.
pub fn dist() -> PathBuf {
    match cross_target() {
        Some(_) => target().join(format!("dist-{}", arch())),
        None => target().join("dist"),
    }
}

/// Returns the cargo that runs this program.
pub fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root());
    command
}

/// Returns the C compiler: `CC`, or `cc`.
pub fn cc() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

/// Runs a program. If it fails, the error names it.
pub fn run(command: &mut Command) -> Result {
    let status = command
        .status()
        .map_err(|e| format!("{}: {e}", name(command)))?;
    if !status.success() {
        return Err(format!("{}: {status}", name(command)).into());
    }
    Ok(())
}

/// Runs a program and returns its output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", name(command)))?;
    if !output.status.success() {
        return Err(format!("{}: {}", name(command), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn name(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|w| w.to_string_lossy()).collect();
    words.join(" ")
}

/// Prints the result of each of several checks, and finally the number of failures.
#[derive(Debug, Default)]
pub struct Tally {
    passed: usize,
    failed: usize,
}

impl Tally {
    /// Prints the result of one check.
    pub fn report(&mut self, name: &str, done: Result) {
        match done {
            Ok(()) => {
                println!("ok    {name}");
                self.passed += 1;
            }
            Err(e) => {
                println!("FAIL  {name}: {e}");
                self.failed += 1;
            }
        }
    }

    /// Prints the totals. Fails if a check failed.
    pub fn end(self, things: &str) -> Result {
        println!("{} passed, {} failed", self.passed, self.failed);
        match self.failed {
            0 => Ok(()),
            n => Err(format!("{n} {things} failed").into()),
        }
    }
}
