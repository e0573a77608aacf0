//! What can be asked of `anywarp`: subcommands and options, from which help, man pages and completions are made.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::bench::args::Bench;
use crate::bench::raw::Raw;
use crate::perf::args::Perf;

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
    /// Both variables keep what was set before, behind anywarp's part.
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

    /// Say what this machine has for software RDMA, and test that it works
    ///
    /// Each line is ok, warn or fail; a warn or fail says what to do. At the end a self-test moves real bytes
    /// with every opcode between two queue pairs on this machine. The exit status is 1 if a line is fail.
    Doctor(Doctor),

    /// Measure latency: a message goes there, and one comes back
    ///
    /// Run `anywarp ping --server` on one machine and `anywarp ping HOST` on another, or both on this one. The
    /// program uses verbs alone, and compares every payload. The exit status is 1 if something failed or was wrong.
    Ping(Perf),

    /// Measure bandwidth: messages go one way, as many as the device takes
    ///
    /// Run `anywarp blast --server` on one machine and `anywarp blast HOST` on another, or both on this one. What
    /// arrives is compared, byte by byte; of a Write-Record, also that its validity map says what is there. Of plain
    /// Writes the last one of each buffer is compared, for nobody sees the others.
    Blast(Perf),

    /// Measure this machine: plain sockets, the device, and what else is installed, side by side
    ///
    /// Without options it takes less than two minutes and starts both ends itself, on this machine. Each value is the
    /// median of some runs, and all that is compared was measured in turn. Programs of perftest, libfabric and UCX take
    /// part if they are installed; the plain sockets are part of this command. The exit status is 1 if something could
    /// not be measured.
    Bench(Bench),

    /// Say what the queue pairs of a running program have done
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

    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM",
        value_hint = ValueHint::CommandWithArguments
    )]
    pub(crate) program: Vec<OsString>,
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
}

/// Arguments of `anywarp generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Folder that gets man/, bash-completion/, zsh/ and fish/ (usually PREFIX/share)
    #[arg(value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

/// How much the device says, from failures only to every frame.
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

/// A variable that the device or the command reads.
pub(crate) struct Variable {
    /// Its name.
    pub(crate) name: &'static str,
    /// The form of its value.
    pub(crate) value: &'static str,
    /// What it does, in whole sentences.
    pub(crate) text: &'static str,
}

/// All variables, in the order of the manual.
pub(crate) const VARIABLES: &[Variable] = &[
    Variable {
        name: "ANYWARP_LOG",
        value: "error|warn|info|debug|trace",
        text: "How much the device writes to stderr. Nothing when unset. The level info names connections and \
               why they ended; debug adds each work request and trace each frame.",
    },
    Variable {
        name: "ANYWARP_ADDR",
        value: "ADDRESS",
        text: "The IPv4 or IPv6 address of this machine that becomes GID 0, the address that most programs \
               use. When unset it is the first IPv4 address, or else the first IPv6 address, of an interface \
               that is up and not the loopback; on a machine without one, that of the loopback. All other \
               addresses follow as GID 1, 2 and so on; link-local addresses are left out.",
    },
    Variable {
        name: "ANYWARP_FACE",
        value: "roce|iwarp|ib",
        text: "What the device calls itself; roce when unset. It changes only what queries report, for \
               programs that behave differently by type. What travels is the same.",
    },
    Variable {
        name: "ANYWARP_DEVICE_PROFILE",
        value: "anywarp|siw|rxe|mlx5|efa",
        text: "A device whose limits are shown and enforced, and whose missing features are missing, so that \
               code can be tried against it: Linux's software iWARP (siw) or software RoCE (rxe), a \
               ConnectX-6 Dx (mlx5), an Elastic Fabric Adapter without SRD (efa). `anywarp run --profile` sets it. \
               What travels is the same. With another value the device does not open.",
    },
    Variable {
        name: "ANYWARP_CRC",
        value: "0|1",
        text: "Whether this side asks for a CRC32C in each frame on TCP; 1 when unset. It is left out only \
               where both sides ask for none.",
    },
    Variable {
        name: "ANYWARP_CARRIER",
        value: "tcp|auto|eager|copy",
        text: "What carries reliable connections between two processes of one user on one host, begun over TCP: memory \
               that they share, once a connection has carried some requests (auto, when unset) or from the first on \
               (eager); shared memory without copying from one process to the other, which hardened systems forbid \
               and auto then leaves out by itself (copy); TCP all the time (tcp). One that says tcp is enough for TCP.",
    },
    Variable {
        name: "ANYWARP_PIN",
        value: "1",
        text: "Registering memory locks its pages, as a card's driver does, within the limit of `ulimit -l`: more is \
               ENOMEM. A page is unlocked with the last region that has it. Regions paged on demand are left alone.",
    },
    Variable {
        name: "ANYWARP_PREFAULT",
        value: "1",
        text: "Registering memory brings its pages in, so that the first transfer does not wait for them. They are not \
               locked.",
    },
    Variable {
        name: "ANYWARP_CC",
        value: "NAME",
        text: "The congestion control of this side's connections over TCP (reno, cubic, bbr, …), of those that \
               net.ipv4.tcp_allowed_congestion_control names; the host's when unset. `anywarp stat` shows it.",
    },
    Variable {
        name: "ANYWARP_RC",
        value: "tcp|udp",
        text: "What carries reliable connections that programs make by themselves, with ibv_modify_qp: standard iWARP \
               over TCP (when unset), or the reliable datagrams of anywarp over UDP. Both sides have to choose the \
               same. Connections of rdma_cm are always over TCP.",
    },
    Variable {
        name: "ANYWARP_UC",
        value: "udp|rd",
        text: "What carries unreliable connections: datagrams that may be lost (when unset), or reliable ones. Both \
               sides have to choose the same.",
    },
    Variable {
        name: "ANYWARP_FAULTS",
        value: "SPEC|@FILE",
        text: "What is to go wrong, for trying how a program takes it: settings of the link such as \
               loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,kill=0.001,delay=5ms,jitter=1ms,rate=10MB/s,dir=both,seed=7, \
               and rules such as 'op=send nth=3 -> error=remote-access'. The same seed brings the same faults. Each is \
               logged at the level info, and a summary is written to stderr at exit unless it says summary=off. \
               ANYWARP_FAULTS_FILE names a file with the same. `anywarp run --faults` sets it, after a check; with a text \
               that cannot be understood the device does not open.",
    },
    Variable {
        name: "ANYWARP_STAT",
        value: "0|1",
        text: "Whether `anywarp stat PID` may ask the program for the counters of its queue pairs; 0 when unset. With 1 \
               the device listens on an abstract socket, anywarp-stat-PID, for processes of the same user.",
    },
    Variable {
        name: "ANYWARP_CAPTURE",
        value: "FILE",
        text: "Appends what the device sends and receives to this pcapng file. ANYWARP_CAPTURE_SNAPLEN is \
               the number of bytes of a packet that are kept (all when unset), ANYWARP_CAPTURE_LIMIT the \
               number of bytes that a process writes at most (1 GiB when unset). `anywarp capture` sets them.",
    },
    Variable {
        name: "ANYWARP_PROFILE",
        value: "auto|standard|large",
        text: "How peers on rdma_cm connections are spoken to; auto when unset. Then a peer that is not anywarp gets \
               frames that fill one TCP segment each and begin with it, as hardware likes them, and two anywarp \
               ends use large frames and messages of their own. standard: no peer is let know that \
               this side is anywarp, so that only standard iWARP travels. large: peers that are not anywarp \
               get large frames too; software such as the kernel's siw takes them.",
    },
    Variable {
        name: "ANYWARP_LIB",
        value: "DIRECTORY",
        text: "Where the command finds libibverbs.so.1 and librdmacm.so.1. When unset, ../lib/anywarp seen \
               from the folder of the anywarp program.",
    },
];

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
        assert_eq!(run.program, ["rping", "-s", "--log", "x"]);
    }

    #[test]
    fn two_dashes_end_our_options() {
        let cli = Cli::try_parse_from(["anywarp", "run", "--", "rping", "--", "-s"]).unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };

        assert_eq!(run.program, ["rping", "--", "-s"]);
    }

    #[test]
    fn a_run_needs_a_program() {
        assert!(Cli::try_parse_from(["anywarp", "run"]).is_err());
        assert!(Cli::try_parse_from(["anywarp", "run", "--device-ip", "nonsense", "x"]).is_err());
    }
}
