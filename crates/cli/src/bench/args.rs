//! The options of `anywarp bench`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Arguments of `anywarp bench`.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Measure only the rows of --list with these names, or with names that begin with these words
    #[arg(long, value_name = "ROW", num_args = 1..)]
    pub(crate) only: Vec<String>,

    /// Measure all rows; by default only the most important ones, which takes two minutes
    #[arg(long)]
    pub(crate) all: bool,

    /// List the rows without measuring
    #[arg(long)]
    pub(crate) list: bool,

    /// Number of repetitions; each one measures all programs of a row in turn
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=999))]
    pub(crate) repeat: Option<u64>,

    /// Measure for a tenth of the time; the values are less exact
    #[arg(long)]
    pub(crate) short: bool,

    /// Write all results to this file after each measurement; its field `partial` is true until the
    /// last one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) json: Option<PathBuf>,

    /// Draw the results into this file: .svg, .html (with all commands), or .md (tables)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) report: Option<PathBuf>,

    /// Measure nothing, and draw the --report from this file, which an earlier --json wrote
    #[arg(long, value_name = "FILE", requires = "report", value_hint = ValueHint::FilePath)]
    pub(crate) from: Option<PathBuf>,

    /// Processors of the server and of the client; `none` does not pin them
    #[arg(long, default_value = "0,1", value_name = "SERVER,CLIENT")]
    pub(crate) cpus: String,

    /// Raise the priority of the measured programs (nice -20); needs privileges
    #[arg(long)]
    pub(crate) first: bool,

    /// Run the server through this command, such as `ip netns exec NAME`
    #[arg(long, value_name = "WORDS", default_value = "", hide = true)]
    pub(crate) server_prefix: String,

    /// Run the client through this command
    #[arg(long, value_name = "WORDS", default_value = "", hide = true)]
    pub(crate) client_prefix: String,

    /// The server's address
    #[arg(long, default_value = "127.0.0.1", hide = true)]
    pub(crate) host: String,

    /// MTU of the link to the server; by default that of the loopback interface
    #[arg(long, hide = true)]
    pub(crate) mtu: Option<u32>,

    /// An MPI program of the tests
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) mpi: Option<PathBuf>,

    /// Fail if a required bound is not met
    #[arg(long, hide = true)]
    pub(crate) strict: bool,
}
