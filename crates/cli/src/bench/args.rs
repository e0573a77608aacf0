//! The options of `anywarp bench`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Arguments of `anywarp bench`.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Measure only these: a name from --list, or its beginning
    #[arg(long, value_name = "ROW", num_args = 1..)]
    pub(crate) only: Vec<String>,

    /// Measure everything; without it, the most important rows, in two minutes
    #[arg(long)]
    pub(crate) all: bool,

    /// List what can be measured, and measure nothing
    #[arg(long)]
    pub(crate) list: bool,

    /// Times that each is measured, in turn with what it is compared with
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1000))]
    pub(crate) repeat: Option<u64>,

    /// A tenth of the time for each, for a look
    #[arg(long)]
    pub(crate) short: bool,

    /// Write everything into this file after each measurement; `partial` in it is true until all are done
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) json: Option<PathBuf>,

    /// Draw what was measured into this file: .svg, .html (also with all commands), or .md (tables)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) report: Option<PathBuf>,

    /// Draw the --report from this file of --json, and measure nothing
    #[arg(long, value_name = "FILE", requires = "report", value_hint = ValueHint::FilePath)]
    pub(crate) from: Option<PathBuf>,

    /// Processors of the server and of the client; `none` leaves them where they are
    #[arg(long, default_value = "0,1", value_name = "SERVER,CLIENT")]
    pub(crate) cpus: String,

    /// Let what is measured go before the other programs of the machine (nice -20); needs privileges
    #[arg(long)]
    pub(crate) first: bool,

    /// Run the server with these words in front, such as `ip netns exec NAME`
    #[arg(long, value_name = "WORDS", default_value = "", hide = true)]
    pub(crate) server_prefix: String,

    /// The same for the client
    #[arg(long, value_name = "WORDS", default_value = "", hide = true)]
    pub(crate) client_prefix: String,

    /// The server's address
    #[arg(long, default_value = "127.0.0.1", hide = true)]
    pub(crate) host: String,

    /// MTU of the link to the server; without it that of the loopback
    #[arg(long, hide = true)]
    pub(crate) mtu: Option<u32>,

    /// An MPI program of the tests
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) mpi: Option<PathBuf>,

    /// Fail when a bar is not met
    #[arg(long, hide = true)]
    pub(crate) strict: bool,
}
