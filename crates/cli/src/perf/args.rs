//! The options of `anywarp ping` and `anywarp blast`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use super::sizes::Sizes;

/// Where the server is reached when no port is given.
const PORT: u16 = 18516;

/// Arguments of `anywarp ping` and `anywarp blast`.
#[derive(Debug, Args)]
pub(crate) struct Perf {
    /// The machine on which the server runs
    #[arg(
        required_unless_present = "server",
        conflicts_with = "server",
        value_name = "HOST"
    )]
    pub(crate) host: Option<String>,

    /// Be the server: it takes what the client asks for, and ends with it
    #[arg(long)]
    pub(crate) server: bool,

    /// With --server: go on with the next client
    #[arg(long, requires = "server")]
    pub(crate) forever: bool,

    /// With --server: end when the program that started it ends
    #[arg(long, requires = "server", hide = true)]
    pub(crate) with_parent: bool,

    /// TCP port on which the two ends agree on what to do; a server with 0 takes a free one and prints it
    #[arg(short, long, default_value_t = PORT)]
    pub(crate) port: u16,

    /// Kind of queue pair; ud and rd need anywarp at both ends
    #[arg(short, long, value_enum, default_value_t = Transport::Rc)]
    pub(crate) transport: Transport,

    /// Operation
    #[arg(short, long, value_enum, default_value_t = Op::Send)]
    pub(crate) op: Op,

    /// Bytes of a message: numbers with K or M, and ranges of powers of two: 64,1K..64K
    #[arg(short, long, default_value = "64")]
    pub(crate) size: Sizes,

    /// Messages of a run; 1000 when there is no --duration
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u64).range(1..1 << 35))]
    pub(crate) iters: Option<u64>,

    /// Seconds of a run, which ends earlier after --iters
    #[arg(short, long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,

    /// Messages before those that are measured
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(..1 << 32))]
    pub(crate) warmup: u64,

    /// Times that each size is run; medians are over these
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..1000))]
    pub(crate) runs: u64,

    /// Requests that may be outstanding
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..16384))]
    pub(crate) depth: u64,

    /// Requests that are posted at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) list: u64,

    /// Post as many requests at once as there is room for when completions have come
    #[arg(long, conflicts_with = "list")]
    pub(crate) batch: bool,

    /// Every how many requests one asks for a completion; in ping of write-read, 2 leaves out that of the Write
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..8192))]
    pub(crate) signal_every: u64,

    /// Give the device the bytes with the request, not their address
    #[arg(long)]
    pub(crate) inline: bool,

    /// Sleep until a completion comes
    #[arg(long)]
    pub(crate) event: bool,

    /// Ask for completions all the time (the default)
    #[arg(long, conflicts_with = "event")]
    pub(crate) poll: bool,

    /// Messages that have memory of their own at the receiver, in turn; by default as many as 32 MiB hold
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1 << 20))]
    pub(crate) buffers: Option<u64>,

    /// Pieces that a message is gathered from
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=16))]
    pub(crate) gather: u64,

    /// ud, rd: how long the datagrams of a message are
    #[arg(long, value_enum, default_value_t = Segment::PathMtu)]
    pub(crate) segment: Segment,

    /// ud: when the record of a Write-Record is made
    #[arg(long, value_enum, default_value_t = RecordMode::Robust)]
    pub(crate) record_mode: RecordMode,

    /// ud: datagrams to one parity datagram; 0: none
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=15))]
    pub(crate) parity: u64,

    /// ud: times that the end of a Write-Record is sent again
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=255))]
    pub(crate) repeats: u64,

    /// ud: how long a Write-Record may go without a datagram before it is recorded as it is; the usual is 100
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60_000), hide_default_value = true)]
    pub(crate) deadline: u64,

    /// rd: deliver messages as they come
    #[arg(long)]
    pub(crate) unordered: bool,

    /// Prepare the receiver's memory before each Write-Record, so that each byte is known to be there or not; slower
    #[arg(long)]
    pub(crate) exact: bool,

    /// GID of the device, by its index
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..256))]
    pub(crate) gid_index: u64,

    /// Use the system's libibverbs and its first device, not anywarp's
    #[arg(long)]
    pub(crate) system: bool,

    /// Longest time without any progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..3600))]
    pub(crate) timeout: u64,

    /// One line for each size into this file; the column `unfinished` is 1 if the command was ended before it had measured all
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) csv: Option<PathBuf>,

    /// Conditions, what each run saw and every sample into this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) json: Option<PathBuf>,

    /// Print no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Kinds of queue pair, in the order that the verbs program counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagrams, also one-sided
    Ud,
    /// Reliable datagrams
    Rd,
}

/// Operations, in the order that the verbs program counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    /// Send and Receive
    Send,
    /// Send with immediate data
    SendImm,
    /// RDMA Write; in ping the receiver looks at the last byte
    Write,
    /// RDMA Write with immediate data
    WriteImm,
    /// RDMA Write-Record: the receiver learns what of it is there
    WriteRecord,
    /// RDMA Read
    Read,
    /// In ping: RDMA Write, and an RDMA Read of the same bytes back; the server's program takes no part
    WriteRead,
}

/// Lengths of datagrams, as `<infiniband/anywarpdv.h>` counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Segment {
    /// What the path carries whole
    PathMtu,
    /// What jumbo frames carry
    Jumbo,
    /// What IP carries in fragments
    Max,
}

/// When records are made, as `<infiniband/anywarpdv.h>` counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecordMode {
    /// When nothing more of the message will come
    Robust,
    /// When its final datagram comes
    Thesis,
    /// For each datagram
    Chunk,
}

/// The name that an option's value has on the command line.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map(|v| v.get_name().to_owned())
        .unwrap_or_default()
}

impl Perf {
    /// Why this cannot be done, in the words of the command line.
    pub(crate) fn contradiction(&self, ping: bool) -> Option<String> {
        let connected = matches!(self.transport, Transport::Rc | Transport::Uc);
        let transport = word(self.transport);
        if self.op == Op::WriteRecord && connected {
            return Some(format!(
                "{transport} has no Write-Record: use --op write or write-imm, or --transport ud or rd"
            ));
        }
        if self.op == Op::Write && self.transport == Transport::Ud {
            return Some("ud has no plain Write: use --op write-record".to_owned());
        }
        if self.op == Op::Read && self.transport == Transport::Uc {
            return Some("uc has no Read: use --transport rc, ud or rd".to_owned());
        }
        if self.op == Op::Read && (self.inline || self.gather > 1) {
            return Some(
                "--inline and --gather are for what is sent, not for --op read".to_owned(),
            );
        }
        if self.inline && self.size.0.iter().any(|&size| size > 4096) {
            return Some("--inline is for messages of at most 4096 bytes".to_owned());
        }
        if self.op == Op::WriteRead && (!ping || self.transport != Transport::Rc) {
            return Some("write-read is for ping with --transport rc".to_owned());
        }
        if self.op == Op::WriteRead && (self.gather > 1 || self.signal_every > 2) {
            return Some("write-read has no --gather, and --signal-every is 1 or 2".to_owned());
        }
        if ping && (self.list > 1 || self.batch) {
            return Some("--list and --batch are for blast".to_owned());
        }
        if ping && self.signal_every > 1 && self.op != Op::WriteRead {
            return Some("--signal-every is for blast and for write-read".to_owned());
        }
        if self.duration.is_some_and(|s| !(0.001..1e6).contains(&s)) {
            return Some("--duration is from 0.001 to 1000000 seconds".to_owned());
        }
        None
    }
}
