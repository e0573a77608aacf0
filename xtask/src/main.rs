//! Build and check tasks: `cargo xtask TASK`. Tasks that run programs and measure are in `cargo lab`.

mod check;
mod conformance;
mod layers;
mod load;
mod matrix;
mod package;
mod table;

use clap::Parser;
use std::process::ExitCode;
use xtask::{dist, finish, sh};

/// Builds and checks the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Check formatting, lints, documentation and layers; warnings are errors.
    Check,
    /// Check that files use only modules of their own and lower layers, as listed in xtask/layers.toml, without cycles; write
    /// the table of files in ARCHITECTURE.md.
    Layers {
        /// Write nothing; fail if the table is out of date.
        #[arg(long)]
        check: bool,
    },
    /// Build the libraries and the command into target/dist.
    Dist {
        #[command(flatten)]
        other: Other,
    },
    /// Copy the result of `dist` to a prefix.
    Install {
        /// The prefix, such as /usr/local or ~/.local.
        #[arg(long)]
        prefix: String,
    },
    /// Create Debian packages from the result of `dist`.
    Deb {
        #[command(flatten)]
        other: Other,
    },
    /// Create a Python wheel from the result of `dist`, with a pytest plugin.
    Wheel {
        #[command(flatten)]
        other: Other,
    },
    /// Compare the symbols of the built libraries with those of the distribution, write crates/abi/MATRIX.md, and load the
    /// libraries in all ways that programs use.
    Matrix,
    /// Write the table of programs in README.md.
    Table {
        /// Write nothing; fail if it is out of date.
        #[arg(long)]
        check: bool,
    },
    /// Check that each rule of the RFCs has code and a test; write conformance/README.md.
    Conformance {
        /// Write nothing; fail if it is out of date.
        #[arg(long)]
        check: bool,
    },
}

/// A build for another architecture.
#[derive(Debug, clap::Args)]
struct Other {
    /// Build for this Rust target, such as aarch64-unknown-linux-gnu. The result of `dist` is then in target/dist-ARCHITECTURE, such
    /// as target/dist-aarch64.
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
}

impl Other {
    /// Runs a task for the target.
    fn run(&self, task: fn() -> xtask::Result) -> xtask::Result {
        match self.target.as_deref().filter(|t| !sh::builds_for(t)) {
            Some(target) => sh::build_for(target),
            None => task(),
        }
    }
}

fn main() -> ExitCode {
    finish(match Task::parse() {
        Task::Check => check::run(),
        Task::Layers { check } => layers::run(check),
        Task::Dist { other } => other.run(dist::run),
        Task::Install { prefix } => package::install(&prefix),
        Task::Deb { other } => other.run(package::deb),
        Task::Wheel { other } => other.run(package::wheel),
        Task::Matrix => matrix::run(),
        Task::Table { check } => table::run(check),
        Task::Conformance { check } => conformance::run(check),
    })
}
