//! The subcommands, one per file.

mod capture;
mod doctor;
mod env;
mod generate;
mod run;
mod stat;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::{Cli, Command};
use crate::library::Missing;
use crate::{bench, perf, sockets, study};

pub(crate) use run::{exec, find};

/// Runs what was asked for.
pub(crate) fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Env(args) => env::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Ping(args) => perf::run(&args, true),
        Command::Blast(args) => perf::run(&args, false),
        Command::Bench(args) => bench::run(&args),
        Command::Study(args) => study::run(&args),
        Command::BenchRaw(args) => Ok(bench::raw::run(&args)),
        Command::Sockets(args) => sockets::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Generate(args) => generate::run(&args),
    }
}

/// Why a subcommand could not do its work. Its text is for the person who typed the command.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The drop-in libraries are not there.
    Library(Missing),
    /// There is no such program.
    NotFound(String),
    /// The program is there, and cannot be executed.
    NotExecutable(PathBuf, io::Error),
    /// What is to go wrong cannot be understood, or not be read.
    Faults(String),
    /// Rules for sockets cannot be understood, or not be read.
    Rules(String),
    /// Counters of a process are not to be had.
    Stat(String),
    /// Writing a file or the output failed.
    Write(PathBuf, io::Error),
}

impl Failure {
    /// Exit codes as a shell has them: 127 and 126 about the program; 125 about anywarp itself, so that a
    /// caller can tell it from the program's own status.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(..) => 126,
            Self::Library(_) => 125,
            Self::Faults(_) | Self::Rules(_) => 2,
            Self::Write(..) | Self::Stat(_) => 1,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(missing) => missing.fmt(f),
            Self::Faults(why) => write!(f, "--faults: {why}"),
            Self::Rules(why) | Self::Stat(why) => f.write_str(why),
            Self::NotFound(program) => write!(f, "{program}: program not found"),
            Self::NotExecutable(path, e) => {
                write!(f, "{}: cannot be executed: {e}", path.display())
            }
            Self::Write(path, e) => write!(f, "{}: {e}", path.display()),
        }
    }
}
