//! What can be asked of `anywarp`: subcommands and options, from which help, man pages and completions are made.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::bench::args::Bench;
use crate::bench::raw::Raw;
use crate::perf::args::Perf;
use crate::sockets::args::Sockets;
use crate::study::args::Study;

/// RDMA on any machine: runs unmodified RDMA programs without RDMA hardware
///
/// anywarp is an RDMA network card made of software. It lives inside the process that uses it, needs no
/// kernel module, no device file and no privileges, and speaks iWARP over the machine's own TCP and UDP.
/// Programs find it through the libraries they are linked with anyway, libibverbs and librdmacm; `anywarp
/// run` puts anywarp's versions of the two in front of the distribution's.
#[derive(Debug, Parser)]
#[command(
    name = "anywarp",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    /// What to do
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program with anywarp as its RDMA device
    ///
    /// Sets LD_PRELOAD and LD_LIBRARY_PATH so that the program and all its children load anywarp's
    /// libibverbs.so.1 and librdmacm.so.1, and then becomes the program: no process of anywarp stays behind.
    /// Both variables keep what was set before, behind anywarp's part. `--log info` shows what is set, and why. No
    /// variable of other software is set: UCX, libfabric and others find the device as they find hardware.
    ///
    /// FI_PROVIDER_PATH has the folder of anywarp's provider for libfabric in front, if it is installed: docs/mpi.md.
    ///
    /// A statically linked program, a program of another architecture and a set-user-ID program that gains
    /// privileges cannot be reached this way; for these a warning is printed.
    Run(Run),

    /// Run a program as `anywarp run` does, and write what it sends and receives into a file
    ///
    /// The file is pcapng, for Wireshark and tshark; no privileges are needed, for it is written by the
    /// device inside the program. Addresses, ports and contents are the real ones, the headers of IP, TCP
    /// and UDP are made up, and each connection begins with a handshake so that it can be followed. A
    /// packet is as long as the piece that was sent or received at once. If both ends of a connection
    /// write into the same file, everything is in it twice: give each a file.
    ///
    /// Wireshark knows iWARP over TCP; share/anywarp/wireshark/anywarp.lua adds the datagrams.
    Capture(Capture),

    /// Print the variables that `anywarp run` sets, for a shell, a Dockerfile or another tool
    ///
    /// With --shell the output is for `eval "$(anywarp env --shell)"`, with --docker for a Dockerfile.
    Env(Env),

    /// Show what this machine has for software RDMA, and test that it works
    ///
    /// Each line is ok, warn or fail; a warn or fail names what to do. At the end a self-test moves real bytes
    /// with every opcode between two queue pairs on this machine. The exit status is 1 if a line is fail.
    ///
    /// With the name of a program, of a Python package, or of a folder, it reads those files, runs none of them, and says whether
    /// they will find the device and how to start them: static linking, set-user-ID, another C library, a libibverbs of
    /// its own, programs that start others without LD_PRELOAD.
    Doctor(Doctor),

    /// Measure latency: a message goes there, and one comes back
    ///
    /// Run `anywarp ping --server` on one machine and `anywarp ping HOST` on another, or both on this one. The
    /// program uses verbs alone, and compares every payload. The exit status is 1 if something failed or was wrong.
    Ping(Perf),

    /// Measure bandwidth: messages go one way, as many as the device takes
    ///
    /// Run `anywarp blast --server` on one machine and `anywarp blast HOST` on another, or both on this one. What
    /// arrives is compared, byte by byte; of a Write-Record, also that its validity map is right. Of plain
    /// Writes the last one of each buffer is compared, because it overwrites the others.
    Blast(Perf),

    /// Measure this machine: plain sockets, the device, and what else is installed, side by side
    ///
    /// Without options it takes less than two minutes and starts both ends itself, on this machine. Each value is the
    /// median of some runs, and all that is compared was measured in turn. Programs of perftest, libfabric and UCX take
    /// part if they are installed; the plain sockets are part of this command. The exit status is 1 if something could
    /// not be measured.
    Bench(Bench),

    /// Repeat the experiments of papers about RDMA on this machine, and judge what they found
    ///
    /// Each figure is measured as in the paper, with `anywarp ping` and `blast`, and becomes a drawing beside the paper's finding and
    /// the verdict here. The report is one HTML file; values are in CSV and JSON files beside it.
    Study(Study),

    /// Run unmodified socket programs over RDMA, and list which of their connections use it
    ///
    /// A library is preloaded. TCP connections between two programs that have it become iWARP streams, on the programs' own
    /// descriptors and the same ports; a connection to any other program is the kernel's. Rules decide which connections may be
    /// upgraded: anywarp-sockets.conf(5). docs/sockets.md says what is not there yet.
    Sockets(Sockets),

    /// Show the counters of the queue pairs of a running program
    ///
    /// For programs that were started with ANYWARP_STAT=1 (`anywarp run --stat`). For each queue pair: requests and
    /// messages, bytes, system calls and what each of them moved, what was sent again, what was dropped and why.
    Stat(Stat),

    /// One end of a plain socket's measurement
    #[command(hide = true)]
    BenchRaw(Raw),

    /// Write man pages and shell completions
    #[command(hide = true)]
    Generate(Generate),
}

/// Arguments of `anywarp run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Address of this machine that becomes GID 0 of the device (sets ANYWARP_ADDR)
    #[arg(long, value_name = "ADDR")]
    pub(crate) device_ip: Option<IpAddr>,

    /// Log to stderr what the device does (sets ANYWARP_LOG)
    #[arg(long, value_name = "LEVEL", value_enum)]
    pub(crate) log: Option<LogLevel>,

    /// Give the device the limits of another one, and nothing that it lacks (sets ANYWARP_DEVICE_PROFILE)
    #[arg(long, value_name = "DEVICE", value_enum)]
    pub(crate) profile: Option<DeviceProfile>,

    /// Let things go wrong: settings like loss=0.01,seed=7, rules, or @FILE with them (sets ANYWARP_FAULTS)
    ///
    /// Settings: loss, dup, reorder, corrupt, kill (probabilities), delay, jitter (5ms), rate (10MB/s), dir (tx, rx,
    /// both), seed, summary (on, off). A rule is MATCHES -> ACTION, such as 'op=send nth=3 -> error=remote-access';
    /// rules and settings stand in lines or between semicolons. docs/faults.md has all of them.
    #[arg(long, value_name = "SPEC")]
    pub(crate) faults: Option<OsString>,

    /// Let `anywarp stat` ask the program for its counters (sets ANYWARP_STAT)
    #[arg(long)]
    pub(crate) stat: bool,

    /// Do not preload the path shim, which shows the device under /dev/infiniband and /sys/class/infiniband
    #[arg(long)]
    pub(crate) no_path_shim: bool,

    /// What is started.
    #[command(flatten)]
    pub(crate) started: Started,
}

/// A program to start, behind all options.
#[derive(Debug, Args)]
pub(crate) struct Started {
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM",
        value_hint = ValueHint::CommandWithArguments
    )]
    program: Vec<OsString>,
}

impl Started {
    /// The name of the program and its arguments.
    pub(crate) fn parts(&self) -> Option<(&OsString, &[OsString])> {
        self.program.split_first()
    }
}

/// Arguments of `anywarp stat`.
#[derive(Debug, Args)]
pub(crate) struct Stat {
    /// The program
    pub(crate) pid: u32,

    /// Again every so many seconds, with what was added in the meantime
    #[arg(short, long, value_name = "SECONDS")]
    pub(crate) interval: Option<f64>,

    /// Times to look, with --interval; without it until the program ends
    #[arg(short = 'n', long, requires = "interval")]
    pub(crate) count: Option<u64>,

    /// One JSON object a look
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `anywarp capture`.
#[derive(Debug, Args)]
pub(crate) struct Capture {
    /// The file, which is replaced (sets ANYWARP_CAPTURE)
    #[arg(short, long, value_name = "FILE", default_value = "anywarp.pcapng", value_hint = ValueHint::FilePath)]
    pub(crate) write: PathBuf,

    /// Bytes of each packet that are kept, with its headers; all when not given
    #[arg(long, value_name = "BYTES")]
    pub(crate) snaplen: Option<u64>,

    /// Bytes that one process writes at most; 1 GiB when not given
    #[arg(long, value_name = "BYTES")]
    pub(crate) limit: Option<u64>,

    /// What is run.
    #[command(flatten)]
    pub(crate) run: Run,
}

/// Arguments of `anywarp env`.
#[derive(Debug, Args)]
pub(crate) struct Env {
    /// Lines for a POSIX shell (the default)
    #[arg(long, conflicts_with_all = ["docker", "json"])]
    pub(crate) shell: bool,

    /// Lines for a Dockerfile
    #[arg(long, conflicts_with = "json")]
    pub(crate) docker: bool,

    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// Leave the path shim out
    #[arg(long)]
    pub(crate) no_path_shim: bool,
}

/// Arguments of `anywarp doctor`.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,

    /// Look only, do not run the self-test
    #[arg(long)]
    pub(crate) no_self_test: bool,

    /// A program, a Python package or a folder to look at, instead of the machine
    #[arg(value_name = "PROGRAM", value_hint = ValueHint::CommandName)]
    pub(crate) program: Option<OsString>,
}

/// Arguments of `anywarp generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Folder that gets man/, bash-completion/, zsh/ and fish/ (usually PREFIX/share)
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,

    /// Source tree with docs/man and crates/abi/include
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) tree: PathBuf,
}

/// How much the device logs, from failures only to every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    /// Failures of the device itself
    Error,
    /// Also misuse by the program and what peers did wrong
    Warn,
    /// Also connections and their ends
    Info,
    /// Also each work request
    Debug,
    /// Also each frame
    Trace,
}

impl LogLevel {
    /// The value that ANYWARP_LOG takes.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// Returns whether connections and the variables of `anywarp run` are shown.
    pub(crate) fn shows_info(self) -> bool {
        !matches!(self, Self::Error | Self::Warn)
    }
}

/// Devices whose limits ours can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceProfile {
    /// None: all that there is
    Anywarp,
    /// Linux's software iWARP: reliable connections by rdma_cm, no atomics, no immediate data
    Siw,
    /// Linux's software RoCE
    Rxe,
    /// A ConnectX-6 Dx
    Mlx5,
    /// An Elastic Fabric Adapter: datagrams only
    Efa,
}

impl DeviceProfile {
    /// The value that ANYWARP_DEVICE_PROFILE takes.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Anywarp => "anywarp",
            Self::Siw => "siw",
            Self::Rxe => "rxe",
            Self::Mlx5 => "mlx5",
            Self::Efa => "efa",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_behind_the_program_belong_to_the_program() {
        let cli = Cli::try_parse_from([
            "anywarp", "run", "--log", "info", "rping", "-s", "--log", "x",
        ])
        .unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };

        assert_eq!(run.log, Some(LogLevel::Info));
        assert_eq!(run.started.program, ["rping", "-s", "--log", "x"]);
    }

    #[test]
    fn two_dashes_end_our_options() {
        let cli = Cli::try_parse_from(["anywarp", "run", "--", "rping", "--", "-s"]).unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };

        assert_eq!(run.started.program, ["rping", "--", "-s"]);
    }

    #[test]
    fn a_run_needs_a_program() {
        assert!(Cli::try_parse_from(["anywarp", "run"]).is_err());
        assert!(Cli::try_parse_from(["anywarp", "run", "--device-ip", "nonsense", "x"]).is_err());
    }
}
