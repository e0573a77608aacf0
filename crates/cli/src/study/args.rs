//! The options of `anywarp study`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::figures::{Extent, MTUS, Varied};

/// The default folder of the report.
const REPORT: &str = "anywarp-study";

/// Arguments of `anywarp study`.
#[derive(Debug, Args)]
pub(crate) struct Study {
    /// What to do
    #[command(subcommand)]
    pub(crate) task: Task,

    /// Folder with the data files of the figures
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, hide = true, global = true)]
    pub(crate) studies: Option<PathBuf>,
}

/// What `anywarp study` does.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// List the figures: the question, and the expected time of the measurement on this machine
    List(List),
    /// Measure figures, and write a report
    ///
    /// Every sample is stored in the folder of the report at once. An interrupted run continues from there when it is started
    /// again with the same options, and figures that are added later use the stored samples.
    ///
    /// The exit status is 0 if everything was measured, whatever the findings are; 1 if a measurement failed; 2 if there is
    /// no such figure or the folder of the report cannot be written; 130 after an interrupt.
    Run(Run),
    /// Print advice for programs on this machine, based on the measurements
    Hints(Hints),
    /// Call a SIP server, one call at a time, and print the time of a response
    #[command(hide = true)]
    Calls(Calls),
    /// Measure two kinds of streams on a slow link, and print their rates; run it in a network namespace, because it changes the
    /// loopback interface
    #[command(hide = true)]
    Lanes(Lanes),
    /// Measure one point with application programs, and print the values; run it in a network namespace, because it changes the
    /// loopback interface
    #[command(hide = true)]
    Inside(Inside),
    /// Measure a point of ping or blast between two network namespaces, and print the values; must be started in a network
    /// namespace of its own
    #[command(hide = true)]
    Between(Between),
}

/// Arguments of `anywarp study between`.
#[derive(Debug, Args)]
pub(crate) struct Between {
    /// The values of the axes: size=64
    #[arg(required = true, value_name = "AXIS=VALUE")]
    pub(crate) values: Vec<String>,

    /// Measure by ping instead of blast
    #[arg(long)]
    pub(crate) ping: bool,

    /// Length of the packets of the network, bytes
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(i64::from(*MTUS.start())..=i64::from(*MTUS.end())))]
    pub(crate) mtu: u32,

    /// Delay of each packet: 1ms
    #[arg(long, default_value = "0us")]
    pub(crate) delay: String,

    /// Loss of packets in each direction: 1%
    #[arg(long, default_value = "0")]
    pub(crate) loss: String,

    /// Rate of the network in each direction: 1Gbit/s
    #[arg(long)]
    pub(crate) rate: Option<String>,

    /// Each segment of TCP is a packet of its own when it passes the network
    #[arg(long)]
    pub(crate) no_offload: bool,

    /// full, quick or smoke
    #[arg(long, default_value = "quick")]
    pub(crate) extent: Extent,
}

/// Arguments of `anywarp study inside`.
#[derive(Debug, Args)]
pub(crate) struct Inside {
    /// The values of the axes, such as app=tiers
    #[arg(required = true, value_name = "AXIS=VALUE")]
    pub(crate) values: Vec<String>,

    /// MTU of the loopback interface, bytes
    #[arg(long)]
    pub(crate) mtu: u32,

    /// Disable segmentation offload: each TCP segment passes the loopback interface as a packet of its own
    #[arg(long)]
    pub(crate) no_offload: bool,

    /// Rate of the loopback interface, in Mbit/s
    #[arg(long)]
    pub(crate) rate: Option<u32>,

    /// Folder for the files of the programs
    #[arg(long, value_name = "DIR")]
    pub(crate) report: PathBuf,

    /// Measure briefly
    #[arg(long)]
    pub(crate) smoke: bool,
}

/// Arguments of `anywarp study lanes`.
#[derive(Debug, Args)]
pub(crate) struct Lanes {
    /// The favoured streams: rc (queue pairs), rdma (sockets over RDMA) or kernel (sockets of the kernel), and their number,
    /// such as rdma:3
    #[arg(long, default_value = "rc:1")]
    pub(crate) favoured: String,

    /// The other streams, in the same form
    #[arg(long, default_value = "rc:1")]
    pub(crate) background: String,

    /// Weight of the favoured streams; with --blocking, the value of qos_high_limit
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) factor: u8,

    /// Rate of the link, Mbit/s
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) rate: u32,

    /// Length of messages, bytes
    #[arg(long, default_value_t = 8192)]
    pub(crate) size: u32,

    /// Largest number of outstanding messages of each rc stream
    #[arg(long, default_value_t = 64)]
    pub(crate) depth: u32,

    /// Duration of the measurement
    #[arg(long, default_value_t = 1.0)]
    pub(crate) seconds: f64,

    /// Give the favoured streams a lane of high priority instead of a weight
    #[arg(long)]
    pub(crate) blocking: bool,

    /// Let the kernel arbitrate by the DSCP of the packets, instead of the device
    #[arg(long)]
    pub(crate) kernel: bool,
}

/// Arguments of `anywarp study calls`.
#[derive(Debug, Args)]
pub(crate) struct Calls {
    /// Address and port of the server
    pub(crate) server: SocketAddr,

    /// Number of calls
    #[arg(long, default_value = "100")]
    pub(crate) count: usize,

    /// Connect over TCP instead of UDP
    #[arg(long)]
    pub(crate) tcp: bool,
}

/// Arguments of `anywarp study list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only these figures: pb:3a, pb:3 for all of its parts, pb for the paper
    #[arg(value_name = "FIGURE")]
    pub(crate) figures: Vec<String>,
}

/// Arguments of `anywarp study run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Figures: pb:3a, pb:3 for all of its parts, pb for the paper, or all
    #[arg(required = true, value_name = "FIGURE")]
    pub(crate) figures: Vec<String>,

    /// Measure fewer points, for a fraction of a second each: all figures in less than 20 minutes
    #[arg(long, conflicts_with = "smoke")]
    pub(crate) quick: bool,

    /// Measure two points of each line, once and briefly, to check that everything works
    #[arg(long)]
    pub(crate) smoke: bool,

    /// Folder of the report: index.html, a CSV file for each figure, study.json, and the samples
    #[arg(long, value_name = "DIR", default_value = REPORT, value_hint = ValueHint::DirPath)]
    pub(crate) report: PathBuf,

    /// Give an axis these values, in each chosen figure that can have it: carrier=tcp,udp compares carriers, device=anywarp,siw0
    /// compares devices, and mtu=1500,9000 compares networks
    #[arg(long, value_name = "AXIS=VALUE[,VALUE]")]
    pub(crate) vary: Vec<Varied>,

    /// Measure this device of the system's libibverbs instead of anywarp
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,

    /// Host on which `anywarp blast --server --forever` runs; by default both ends run on this host
    #[arg(long, value_name = "HOST", requires = "port")]
    pub(crate) host: Option<String>,

    /// Port of that server
    #[arg(long, requires = "host")]
    pub(crate) port: Option<u16>,

    /// Delete the stored samples and start again
    #[arg(long)]
    pub(crate) fresh: bool,

    /// Raise the priority of the measured programs (nice -20); needs privileges
    #[arg(long)]
    pub(crate) first: bool,

    /// Print no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Arguments of `anywarp study hints`.
#[derive(Debug, Args)]
pub(crate) struct Hints {
    /// Folder of the report of an earlier `anywarp study run`
    #[arg(long, value_name = "DIR", default_value = REPORT, value_hint = ValueHint::DirPath)]
    pub(crate) report: PathBuf,
}
