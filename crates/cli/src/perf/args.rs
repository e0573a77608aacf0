//! The options of `anywarp ping` and `anywarp blast`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use super::sizes::Sizes;

/// The default port of a server.
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

    /// Run as server: execute what the client requests, and exit when the client is done
    #[arg(long)]
    pub(crate) server: bool,

    /// With --server: wait for the next client afterwards
    #[arg(long, requires = "server")]
    pub(crate) forever: bool,

    /// With --server: exit when the parent process, which has this number, exits
    #[arg(long, value_name = "PID", requires = "server", hide = true)]
    pub(crate) with_parent: Option<i32>,

    /// TCP port of the connection between the two ends; a server with 0 chooses a free port and prints it
    #[arg(short, long, default_value_t = PORT)]
    pub(crate) port: u16,

    /// Type of queue pair; ud and rd need anywarp at both ends
    #[arg(short, long, value_enum, default_value_t = Transport::Rc)]
    pub(crate) transport: Transport,

    /// Operation
    #[arg(short, long, value_enum, default_value_t = Op::Send)]
    pub(crate) op: Op,

    /// Message lengths in bytes: numbers with K or M, and ranges of powers of two: 64,1K..64K
    #[arg(short, long, default_value = "64")]
    pub(crate) size: Sizes,

    /// Number of messages in a run; 1000 without --duration
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u64).range(1..=34_359_738_367))]
    pub(crate) iters: Option<u64>,

    /// Duration of a run; the run ends earlier after --iters
    #[arg(short, long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,

    /// Number of messages before the measurement starts
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    pub(crate) warmup: u64,

    /// Number of runs for each length; medians are over these
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=999))]
    pub(crate) runs: u64,

    /// Largest number of outstanding requests
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=16383))]
    pub(crate) depth: u64,

    /// Number of requests in one post
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) list: u64,

    /// Post as many requests at once as the send queue has room for, up to 128
    #[arg(long, conflicts_with = "list")]
    pub(crate) batch: bool,

    /// Signal only every Nth request; 2 in a ping with --op write-read leaves the Write unsignaled
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=8191))]
    pub(crate) signal_every: u64,

    /// Send inline: the device copies the data when the request is posted
    #[arg(long)]
    pub(crate) inline: bool,

    /// Sleep until a completion event arrives
    #[arg(long)]
    pub(crate) event: bool,

    /// Poll for completions (the default)
    #[arg(long, conflicts_with = "event")]
    pub(crate) poll: bool,

    /// Number of receive buffers, used in turn; by default as many as fit 32 MiB, but at most 65536
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_048_575))]
    pub(crate) buffers: Option<u64>,

    /// Number of scatter/gather elements of a message
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=16))]
    pub(crate) gather: u64,

    /// ud, rd: length of the datagrams of a message
    #[arg(long, value_enum, default_value_t = Segment::PathMtu)]
    pub(crate) segment: Segment,

    /// ud: when the record of a Write-Record is created
    #[arg(long, value_enum, default_value_t = RecordMode::Robust)]
    pub(crate) record_mode: RecordMode,

    /// ud: number of datagrams for each parity datagram; 0 sends none
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=15))]
    pub(crate) parity: u64,

    /// ud: number of times that the end of a Write-Record is repeated
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=255))]
    pub(crate) repeats: u64,

    /// ud: time without a datagram after which an incomplete Write-Record is recorded; 0 stands for the default, 100
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60_000), hide_default_value = true)]
    pub(crate) deadline: u64,

    /// rd: deliver messages in the order of their arrival
    #[arg(long)]
    pub(crate) unordered: bool,

    /// Prepare the receiver's memory before each Write-Record, so that it is known for each byte whether it arrived; slower
    #[arg(long)]
    pub(crate) exact: bool,

    /// Index of the device's GID
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=255))]
    pub(crate) gid_index: u64,

    /// Service level of the queue pairs: selects their lane (ANYWARP_QOS)
    #[arg(long, value_name = "LEVEL", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=15), hide_default_value = true)]
    pub(crate) sl: u64,

    /// rc: connect by rdma_cm instead of addresses that the two ends exchange; with iWARP devices of the system this is the default
    #[arg(long)]
    pub(crate) cm: bool,

    /// Use the system's libibverbs and its first device instead of anywarp
    #[arg(long)]
    pub(crate) system: bool,

    /// Longest time without any progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout: u64,

    /// Write one line for each length to this file; the column `unfinished` is 1 if the command was interrupted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) csv: Option<PathBuf>,

    /// Write the conditions, the results of each run and every sample to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) json: Option<PathBuf>,

    /// Print no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Types of queue pair, in the order of their numbers in `perf/perf.c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagrams, with one-sided operations
    Ud,
    /// Reliable datagrams
    Rd,
}

/// Operations, in the order of their numbers in `perf/perf.c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    /// Send and Receive
    Send,
    /// Send with immediate data
    SendImm,
    /// RDMA Write; in ping the receiver polls the last byte
    Write,
    /// RDMA Write with immediate data
    WriteImm,
    /// RDMA Write-Record: the receiver gets a record of the bytes that arrived
    WriteRecord,
    /// RDMA Read
    Read,
    /// In ping: RDMA Write, and an RDMA Read of the same bytes; the server's program takes no part
    WriteRead,
}

/// Lengths of datagrams, in the order of the values in `<infiniband/anywarpdv.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Segment {
    /// The path MTU
    PathMtu,
    /// The length of a jumbo frame
    Jumbo,
    /// The longest datagram, which IP fragments
    Max,
}

/// When records are created, in the order of the values in `<infiniband/anywarpdv.h>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecordMode {
    /// When no more datagrams of the message can arrive
    Robust,
    /// When the final datagram arrives
    Thesis,
    /// For each datagram
    Chunk,
}

/// Returns the name of an option's value on the command line.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map(|v| v.get_name().to_owned())
        .unwrap_or_default()
}

impl Perf {
    /// Returns why the options contradict each other, if they do.
    pub(crate) fn contradiction(&self, ping: bool) -> Option<String> {
        let connected = matches!(self.transport, Transport::Rc | Transport::Uc);
        let transport = word(self.transport);
        if self.forever && self.host.is_some() {
            return Some("--forever is for --server".to_owned());
        }
        if self.port == 0 && self.host.is_some() {
            return Some(
                "--port 0 is for --server: give the port that the server prints".to_owned(),
            );
        }
        if let Some(why) = self.of_another_transport() {
            return Some(why);
        }
        if self.cm && self.transport != Transport::Rc {
            return Some("--cm is for --transport rc".to_owned());
        }
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
            return Some(
                "write-read has no --gather, and --signal-every must be 1 or 2".to_owned(),
            );
        }
        if ping && (self.list > 1 || self.batch) {
            return Some("--list and --batch are for blast".to_owned());
        }
        if ping && self.signal_every > 1 && self.op != Op::WriteRead {
            return Some("--signal-every is for blast and for write-read".to_owned());
        }
        if self.duration.is_some_and(|s| !(0.001..1e6).contains(&s)) {
            return Some("--duration must be from 0.001 to 1000000 seconds".to_owned());
        }
        None
    }

    /// Returns which option has no effect with this type of queue pair or this operation, if there is one.
    fn of_another_transport(&self) -> Option<String> {
        let (ud, rd) = (
            self.transport == Transport::Ud,
            self.transport == Transport::Rd,
        );
        let record = self.op == Op::WriteRecord;
        let datagrams = "--transport ud or rd";
        let records = "--transport ud with --op write-record";
        let options = [
            (
                "segment",
                self.segment != Segment::PathMtu,
                ud || rd,
                datagrams,
            ),
            ("unordered", self.unordered, rd, "--transport rd"),
            ("parity", self.parity > 0, ud, "--transport ud"),
            ("repeats", self.repeats > 0, ud && record, records),
            ("deadline", self.deadline > 0, ud, "--transport ud"),
            (
                "record-mode",
                self.record_mode != RecordMode::Robust,
                ud && record,
                records,
            ),
            ("exact", self.exact, record, "--op write-record"),
        ];
        options
            .iter()
            .find(|(_, given, has_effect, _)| *given && !has_effect)
            .map(|(name, _, _, what)| format!("--{name} is for {what}"))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};

    fn contradiction(words: &str) -> Option<String> {
        let all = ["anywarp", "blast"].into_iter().chain(words.split(' '));
        let Command::Blast(args) = Cli::try_parse_from(all).unwrap().command else {
            panic!("not blast")
        };
        args.contradiction(false)
    }

    #[test]
    fn an_option_without_effect_is_refused() {
        for (words, why) in [
            ("h --segment max", "--segment is for --transport ud or rd"),
            ("h --unordered -t ud", "--unordered is for --transport rd"),
            ("h --parity 3", "--parity is for --transport ud"),
            ("h --deadline 5 -t rd", "--deadline is for --transport ud"),
            (
                "h --repeats 5 -t ud",
                "--repeats is for --transport ud with --op write-record",
            ),
            ("h --exact -t ud", "--exact is for --op write-record"),
            ("h --forever", "--forever is for --server"),
            (
                "h -p 0",
                "--port 0 is for --server: give the port that the server prints",
            ),
        ] {
            assert_eq!(contradiction(words).as_deref(), Some(why), "{words}");
        }
        for words in [
            "h --segment path-mtu",
            "h --segment max -t rd --unordered",
            "h -t ud -o write-record --parity 3 --repeats 2 --deadline 5 --record-mode chunk --exact",
            "--server --forever -p 0",
        ] {
            assert_eq!(contradiction(words), None, "{words}");
        }
    }
}
