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

/// Returns the folder for the result of `cargo xtask dist`.
pub fn dist() -> PathBuf {
    target().join("dist")
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
            n => Err(format!("{n} {things} are not as they should be").into()),
        }
    }
}
