//! The options of `anywarp sockets`.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use crate::cli::Started;

/// Arguments of `anywarp sockets`.
#[derive(Debug, Args)]
pub(crate) struct Sockets {
    /// What to do
    #[command(subcommand)]
    pub(crate) task: Task,
}

/// What `anywarp sockets` does.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Run a program; its TCP connections to programs that also have the library become iWARP streams
    ///
    /// Sets LD_PRELOAD so that the program and all its children load libanywarp-sockets.so, and then executes the program. A
    /// connection to a program without the library is left to the kernel. Datagrams become messages of datagram-iWARP if a
    /// rule enables that. The rules are checked first; the program is not started if they contain a mistake.
    Run(Run),
    /// Show the sockets of a running program: which use RDMA (upgraded), and why the others do not (plain)
    ///
    /// Shows for each TCP and UDP socket of the process its mode and its addresses. For a socket that uses RDMA it also shows the
    /// bytes that the program has read and written, and for an upgraded TCP socket the window and the memory. A forked child is a
    /// process of its own: pass its process id to see its sockets.
    Stat(Stat),
    /// Check the rules, or show which rule decides about a connection
    ///
    /// Without arguments it reads all sources and reports mistakes. `anywarp sockets check tcp connect 10.1.2.3:6379 nginx`
    /// shows the rule that decides when nginx connects to that address.
    Check(Check),
    /// Ask whether a listener or a UDP socket is registered as one that accepts RDMA
    ///
    /// The exit status is 0 if it is registered, and 1 otherwise. A program with the rule `prefer` upgrades its connections to a
    /// registered listener, and a program with the rule `datagram` sends messages of datagram-iWARP to a registered UDP socket.
    Ask(Ask),
    /// Print the variables that `anywarp sockets run` sets, for a shell, a Dockerfile or a service
    Env(Env),
}

/// Rules of the command line.
#[derive(Debug, Args)]
pub(crate) struct Rules {
    /// A rule with precedence over all other sources; may be given several times (sets ANYWARP_SOCKETS_RULES)
    ///
    /// For example 'connect tcp 10.0.0.0/8:6379 require' or 'all tcp'. The manual page anywarp-sockets.conf(5) describes the
    /// language.
    #[arg(long = "rule", value_name = "RULE")]
    pub(crate) rules: Vec<String>,

    /// A tag for this process, which rules select with `program NAME tag TAG` (sets ANYWARP_SOCKETS_TAG)
    #[arg(long, value_name = "TAG")]
    pub(crate) tag: Option<String>,
}

/// Arguments of `anywarp sockets run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Rules.
    #[command(flatten)]
    pub(crate) rules: Rules,

    /// Log on stderr whether each connection uses RDMA, and why (sets ANYWARP_LOG)
    #[arg(long)]
    pub(crate) log: bool,

    /// The program to start.
    #[command(flatten)]
    pub(crate) started: Started,
}

/// Arguments of `anywarp sockets stat`.
#[derive(Debug, Args)]
pub(crate) struct Stat {
    /// Process id of the program
    pub(crate) pid: u32,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// TCP
    Tcp,
    /// UDP
    Udp,
}

/// The roles of rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// The program connects to the address
    Connect,
    /// The program accepts connections at the address
    Listen,
    /// The program binds a UDP socket to the address
    Bind,
    /// The program sends datagrams to the address
    Send,
}

/// Arguments of `anywarp sockets check`.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The protocol
    #[arg(value_enum, requires = "program")]
    pub(crate) protocol: Option<Protocol>,

    /// The operation of the program
    #[arg(value_enum)]
    pub(crate) role: Option<Role>,

    /// The address that the program connects or sends to, or that its socket is bound to
    #[arg(value_name = "ADDR:PORT")]
    pub(crate) address: Option<SocketAddr>,

    /// The program: its name, or its path
    #[arg(value_hint = ValueHint::CommandName)]
    pub(crate) program: Option<OsString>,

    /// The address of the other end, for rules with `from`
    #[arg(long, value_name = "ADDR", requires = "program")]
    pub(crate) from: Option<IpAddr>,

    /// Rules.
    #[command(flatten)]
    pub(crate) rules: Rules,
}

/// Arguments of `anywarp sockets ask`.
#[derive(Debug, Args)]
pub(crate) struct Ask {
    /// The listener, or the UDP socket
    #[arg(value_name = "ADDR:PORT")]
    pub(crate) address: SocketAddr,

    /// Query a UDP socket
    #[arg(long)]
    pub(crate) udp: bool,
}

/// Arguments of `anywarp sockets env`.
#[derive(Debug, Args)]
pub(crate) struct Env {
    /// Print lines for a POSIX shell (the default)
    #[arg(long, conflicts_with_all = ["docker", "systemd"])]
    pub(crate) shell: bool,

    /// Print lines for a Dockerfile
    #[arg(long, conflicts_with = "systemd")]
    pub(crate) docker: bool,

    /// Print a drop-in file for a systemd service
    #[arg(long)]
    pub(crate) systemd: bool,

    /// Rules.
    #[command(flatten)]
    pub(crate) rules: Rules,
}
