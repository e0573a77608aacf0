//! Runs the selected subcommand. This folder contains the smaller subcommands, one per module; `bench`, `perf`, `sockets` and `study`
//! contain the others.

pub(crate) mod address;
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

/// Runs the selected subcommand.
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

/// Why a subcommand failed. The text is shown to the user.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The drop-in libraries are missing.
    Library(Missing),
    /// The program does not exist.
    NotFound(String),
    /// The program exists but cannot be executed.
    NotExecutable(PathBuf, io::Error),
    /// The value of --faults is invalid, or its file cannot be read.
    Faults(String),
    /// The value of --device-ip is not an address of this machine.
    Address(String),
    /// The rules for sockets are invalid or cannot be read.
    Rules(String),
    /// The counters of a process cannot be read.
    Stat(String),
    /// Writing a file or the output failed.
    Write(PathBuf, io::Error),
}

impl Failure {
    /// Returns the exit status. As in a shell, 127 and 126 mean that the program was not found or cannot be executed. 125 means that
    /// anywarp's libraries are missing; it differs from the usual statuses of programs. 2 means an invalid argument, and 1 another
    /// failure.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(..) => 126,
            Self::Library(_) => 125,
            Self::Faults(_) | Self::Address(_) | Self::Rules(_) => 2,
            Self::Write(..) | Self::Stat(_) => 1,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(missing) => missing.fmt(f),
            Self::Faults(why) => write!(f, "--faults: {why}"),
            Self::Address(why) => write!(f, "--device-ip: {why}"),
            Self::Rules(why) | Self::Stat(why) => f.write_str(why),
            Self::NotFound(program) => write!(f, "{program}: program not found"),
            Self::NotExecutable(path, e) => {
                write!(f, "{}: cannot be executed: {e}", path.display())
            }
            Self::Write(path, e) => write!(f, "{}: {e}", path.display()),
        }
    }
}
