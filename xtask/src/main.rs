//! Build and check tasks: `cargo xtask TASK`. What runs programs and measures is `cargo lab`.

mod check;
mod conformance;
mod floors;
mod load;
mod matrix;
mod package;
mod table;

use clap::Parser;
use std::process::ExitCode;
use xtask::{dist, finish};

/// Builds and checks the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Formatting, lints, documentation and floors; warnings are errors.
    Check,
    /// Checks that files name only modules of lower floors, as xtask/floors.toml lists them, and none in a circle; writes
    /// the table of files in ARCHITECTURE.md.
    Floors {
        /// Write nothing; fail if the table is out of date.
        #[arg(long)]
        check: bool,
    },
    /// Builds the libraries and the tool into target/dist.
    Dist,
    /// Copies what `dist` built below a folder.
    Install {
        /// Such as /usr/local or ~/.local.
        #[arg(long)]
        prefix: String,
    },
    /// Makes two Debian packages of it: one with the tool, one that makes the device visible to every program.
    Deb,
    /// Makes a Python wheel of it, with a pytest plugin.
    Wheel,
    /// Compares the built libraries' symbols with the distribution's, writes crates/abi/MATRIX.md, and loads the libraries in
    /// every way that programs do.
    Matrix,
    /// Writes the table of programs in README.md.
    Table {
        /// Write nothing; fail if it is out of date.
        #[arg(long)]
        check: bool,
    },
    /// Checks that each rule of the RFCs has code and test; writes conformance/README.md.
    Conformance {
        /// Write nothing; fail if it is out of date.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    finish(match Task::parse() {
        Task::Check => check::run(),
        Task::Floors { check } => floors::run(check),
        Task::Dist => dist::run(),
        Task::Install { prefix } => package::install(&prefix),
        Task::Deb => package::deb(),
        Task::Wheel => package::wheel(),
        Task::Matrix => matrix::run(),
        Task::Table { check } => table::run(check),
        Task::Conformance { check } => conformance::run(check),
    })
}
