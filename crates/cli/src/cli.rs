//! The subcommands and options of `anywarp`. Help, man pages and completions are generated from them.

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
/// anywarp is a software RNIC (an RDMA network card). It is part of the process that uses it, needs no kernel
/// module, no device file and no privileges, and uses iWARP over the machine's TCP and UDP. Programs access it
/// through the libraries that they are linked with, libibverbs and librdmacm; `anywarp run` loads anywarp's
/// versions of the two instead of the distribution's.
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
    /// libibverbs.so.1 and librdmacm.so.1, and then executes the program in the same process. Earlier values of both
    /// variables are kept after anywarp's part. `--log info` shows what is set, and why. UCX,
    /// libfabric and other libraries find the device like a hardware device, without variables of
    /// their own.
    ///
    /// If anywarp's provider for libfabric is installed, its folder is put first in
    /// FI_PROVIDER_PATH (see docs/mpi.md). On a machine with at most two processors
    /// MC_WORKERS_PER_CTX is set to 1 unless the user has set it: by default two threads of Mooncake
    /// poll without a pause, and leave no processor to the other end of a transfer. `anywarp env` does not print this
    /// variable.
    ///
    /// This does not work for a statically linked program, a program of another architecture or a program that gains
    /// privileges by set-user-ID or file capabilities; for these a warning is printed.
    Run(Run),

    /// Run a program like `anywarp run`, and write its network traffic to a file
    ///
    /// The file has the format pcapng, for Wireshark and tshark. The device inside the program writes it, so no
    /// privileges are needed. Addresses, ports and contents are the real ones. The headers of IP, TCP and UDP are
    /// generated, and each connection begins with a generated handshake so that tools can follow it. A packet
    /// contains the bytes of one system call. Use a separate file for each end of a connection: a file of both ends
    /// would contain everything twice.
    ///
    /// Wireshark dissects iWARP over TCP; share/anywarp/wireshark/anywarp.lua adds the datagrams.
    Capture(Capture),

    /// Print the variables that `anywarp run` sets, for a shell, a Dockerfile or another tool
    ///
    /// With --shell the output is for `eval "$(anywarp env --shell)"`, with --docker for a Dockerfile.
    Env(Env),

    /// Check this machine's support for software RDMA, and test that the device works
    ///
    /// Each line is ok, warn or fail, and a warn or fail comes with advice. A self-test at the end transfers data with
    /// every opcode between two queue pairs on this machine. The exit status is 1 if a line is fail.
    ///
    /// With the name of a program, of a Python package, or of a folder, the command reads the files
    /// of that program, package or folder without running any of them, and reports whether they will
    /// find the device and how to start them. It detects static linking, set-user-ID, file
    /// capabilities, another C library, a bundled libibverbs, and programs that start others without LD_PRELOAD.
    Doctor(Doctor),

    /// Measure latency: the two ends send messages to each other in turn
    ///
    /// Run `anywarp ping --server` on one machine and `anywarp ping HOST` on another, or both on this one. The
    /// program uses only verbs, and compares every payload. The exit status is 1 if a run failed or a payload was wrong.
    Ping(Perf),

    /// Measure bandwidth: one end sends messages as fast as the device accepts them
    ///
    /// Run `anywarp blast --server` on one machine and `anywarp blast HOST` on another, or both on this one. The
    /// receiver compares every byte, and for a Write-Record also the validity map. Plain Writes overwrite each other,
    /// so only the last one of each buffer is compared.
    Blast(Perf),

    /// Measure this machine: plain sockets, the device, and other installed software
    ///
    /// Without options it takes less than two minutes and starts both ends itself, on this machine. Each value is the
    /// median of several runs, and compared values are measured in turn. Programs of perftest, libfabric and UCX are
    /// included if they are installed; the plain sockets are part of this command. The exit status is 1 if a
    /// measurement failed.
    Bench(Bench),

    /// Repeat the experiments of papers about RDMA on this machine, and check their findings
    ///
    /// Each figure is measured as in the paper, with `anywarp ping` and `blast`. Below its drawing, a table shows each finding
    /// of the paper and whether it holds on this machine. The report is one HTML file, with the values in CSV and JSON files beside it.
    Study(Study),

    /// Run unmodified socket programs over RDMA, and list which of their connections use it
    ///
    /// Preloads a library. TCP connections between two programs with the library become iWARP streams, on the programs' own
    /// descriptors and the same ports. A connection to any other program is left to the kernel. Rules decide which connections may be
    /// upgraded: anywarp-sockets.conf(5). docs/sockets.md lists what is not supported yet.
    Sockets(Sockets),

    /// Show the counters of the queue pairs of a running program
    ///
    /// The program must have been started with ANYWARP_STAT=1 (`anywarp run --stat`). Shows for each queue pair the requests and
    /// messages, the bytes, the system calls and the bytes per call, what was retransmitted, and what was dropped and why.
    Stat(Stat),

    /// Run one end of a measurement of plain sockets
    #[command(hide = true)]
    BenchRaw(Raw),

    /// Write man pages and shell completions
    #[command(hide = true)]
    Generate(Generate),
}

/// Arguments of `anywarp run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Address of this machine to use as GID 0 of the device (sets ANYWARP_ADDR)
    #[arg(long, value_name = "ADDR")]
    pub(crate) device_ip: Option<IpAddr>,

    /// Level of the device's log on stderr (sets ANYWARP_LOG)
    #[arg(long, value_name = "LEVEL", value_enum)]
    pub(crate) log: Option<LogLevel>,

    /// Report and enforce the limits and missing features of another device (sets ANYWARP_DEVICE_PROFILE)
    #[arg(long, value_name = "DEVICE", value_enum)]
    pub(crate) profile: Option<DeviceProfile>,

    /// Inject faults: settings like loss=0.01,seed=7, rules, or @FILE to read both from a file (sets ANYWARP_FAULTS)
    ///
    /// Settings: loss, dup, reorder, corrupt, kill (probabilities), delay, jitter (5ms), rate (10MB/s), dir (tx, rx,
    /// both), seed, summary (on, off). A rule is MATCHES -> ACTION, such as 'op=send nth=3 -> error=remote-access';
    /// rules and settings are separated by newlines or semicolons. docs/faults.md describes all of them.
    #[arg(long, value_name = "SPEC")]
    pub(crate) faults: Option<OsString>,

    /// Let `anywarp stat` read the program's counters (sets ANYWARP_STAT)
    #[arg(long)]
    pub(crate) stat: bool,

    /// Do not preload the path shim, which shows the device under /dev/infiniband and /sys/class/infiniband
    #[arg(long)]
    pub(crate) no_path_shim: bool,

    /// The program to start.
    #[command(flatten)]
    pub(crate) started: Started,
}

/// A program to start, after all options.
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
    /// Returns the name of the program and its arguments.
    pub(crate) fn parts(&self) -> Option<(&OsString, &[OsString])> {
        self.program.split_first()
    }
}

/// Arguments of `anywarp stat`.
#[derive(Debug, Args)]
pub(crate) struct Stat {
    /// Process id of the program
    pub(crate) pid: u32,

    /// Repeat every SECONDS, and show what was added since the last report
    #[arg(short, long, value_name = "SECONDS")]
    pub(crate) interval: Option<f64>,

    /// Number of reports with --interval; by default until the program exits
    #[arg(short = 'n', long, requires = "interval")]
    pub(crate) count: Option<u64>,

    /// Print one JSON object for each report
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `anywarp capture`.
#[derive(Debug, Args)]
pub(crate) struct Capture {
    /// The file, which is overwritten (sets ANYWARP_CAPTURE)
    #[arg(short, long, value_name = "FILE", default_value = "anywarp.pcapng", value_hint = ValueHint::FilePath)]
    pub(crate) write: PathBuf,

    /// Bytes to keep of each packet, including its headers; by default all
    #[arg(long, value_name = "BYTES")]
    pub(crate) snaplen: Option<u64>,

    /// Most bytes that one process writes; by default 1 GiB
    #[arg(long, value_name = "BYTES")]
    pub(crate) limit: Option<u64>,

    /// The program to run.
    #[command(flatten)]
    pub(crate) run: Run,
}

/// Arguments of `anywarp env`.
#[derive(Debug, Args)]
pub(crate) struct Env {
    /// Print lines for a POSIX shell (the default)
    #[arg(long, conflicts_with_all = ["docker", "json"])]
    pub(crate) shell: bool,

    /// Print lines for a Dockerfile
    #[arg(long, conflicts_with = "json")]
    pub(crate) docker: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// Omit the path shim
    #[arg(long)]
    pub(crate) no_path_shim: bool,
}

/// Arguments of `anywarp doctor`.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,

    /// Skip the self-test
    #[arg(long)]
    pub(crate) no_self_test: bool,

    /// A program, a Python package or a folder to check, instead of the machine
    #[arg(value_name = "PROGRAM", value_hint = ValueHint::CommandName)]
    pub(crate) program: Option<OsString>,
}

/// Arguments of `anywarp generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Folder in which man/, bash-completion/, zsh/ and fish/ are created (usually PREFIX/share)
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,

    /// Source tree with docs/man and crates/abi/include
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) tree: PathBuf,
}

/// Log levels of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    /// Failures of the device itself
    Error,
    /// Also misuse by the program and protocol errors of peers
    Warn,
    /// Also the start and end of connections
    Info,
    /// Also each work request
    Debug,
    /// Also each frame
    Trace,
}

impl LogLevel {
    /// Returns the value for ANYWARP_LOG.
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

/// The device profiles: the devices whose limits and missing features anywarp's device can report and enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceProfile {
    /// No profile: all features of anywarp
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
    /// Returns the value for ANYWARP_DEVICE_PROFILE.
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
    fn options_after_the_program_belong_to_the_program() {
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
