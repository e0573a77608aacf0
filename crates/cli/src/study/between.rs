//! Measures a point of ping or blast between two network namespaces, with the length, the delay and the loss of packets that the
//! point asks for.
//!
//! A *point* is a combination of the values of an experiment's axes; some of them describe the network.
//!
//! `anywarp study between` runs in a namespace of its own, makes a second one for the server, and joins the two by a pair of
//! veth interfaces; or, if packets are delayed or lost, by two TUN interfaces and threads that forward their packets.
//! Unlike the faults of the device, such a network affects every carrier and plain TCP alike.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anywarp_core::fault::Plan;

use super::apps::Apps;
use super::args::Between;
use super::figures::{Extent, Params, Point, Runner};
use super::mpi::Mpi;
use super::namespace::{self, system};
use super::process::{Ended, READY};
use super::relay::{self, Path};
use super::runner::{Bench, Beyond};
use super::store::{Miss, Outcome};
use crate::library::Library;
use crate::perf::Interrupted;

/// The axes that describe the network.
const NETWORK: [&str; 5] = [
    "mtu",
    "network-delay",
    "network-loss",
    "network-rate",
    "offload",
];

/// The address of the client, and that of the server.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// Returns whether a point is measured between two namespaces.
pub(super) fn wanted(params: &Params) -> bool {
    NETWORK
        .iter()
        .any(|axis| params.get(*axis).is_some_and(|value| value != "none"))
}

/// Measures a point between two namespaces. Returns the command, and the sample.
pub(super) fn start(
    point: &Point,
    extent: Extent,
    library: &Library,
    interrupted: &Interrupted,
) -> (String, Outcome) {
    let mut words: Vec<String> = ["study", "between", "--extent", extent.as_str()]
        .map(str::to_owned)
        .into();
    if point.runner == Runner::Ping {
        words.push("--ping".to_owned());
    }
    for (axis, value) in &point.params {
        match axis.as_str() {
            axis if NETWORK.contains(&axis) && value == "none" => {}
            "network-rate" => words.extend(["--rate".to_owned(), value.clone()]),
            "mtu" => words.extend(["--mtu".to_owned(), value.clone()]),
            "offload" if value == "false" => words.push("--no-offload".to_owned()),
            "offload" => {}
            "network-delay" => words.extend(["--delay".to_owned(), value.clone()]),
            "network-loss" => words.extend(["--loss".to_owned(), value.clone()]),
            _ => words.push(format!("{axis}={value}")),
        }
    }
    namespace::measure(&words, library, interrupted)
}

/// Measures one point from this namespace. Returns the sample as JSON.
pub(super) fn run(args: &Between) -> Result<String, String> {
    let path = path(args)?;
    let rate = args.rate.as_deref().map(rate).transpose()?;
    let pair = |text: &String| {
        let (axis, value) = text.split_once('=')?;
        Some((axis.to_owned(), value.to_owned()))
    };
    let params: Option<Params> = args.values.iter().map(pair).collect();
    let mut params = params.ok_or("the values have the form axis=value")?;
    let device = params.remove("device").filter(|name| name != super::OURS);
    let point = Point {
        runner: if args.ping {
            Runner::Ping
        } else {
            Runner::Blast
        },
        params,
    };
    let other = namespace()?;
    connect(&other, args, path)?;
    if let Some(rate) = rate {
        for command in limits(rate) {
            system(&command)?;
            system(&format!("nsenter -t {} -n {command}", other.pid()))?;
        }
    }
    let library = Library::find().map_err(|e| e.to_string())?;
    let beyond = Beyond {
        process: other.pid(),
        host: ADDRESSES[1].to_owned(),
    };
    let nowhere = std::path::Path::new("/dev/null");
    let mut bench = Bench::new(
        library,
        args.extent,
        device,
        None,
        Mpi::new(nowhere, nowhere),
        Apps::new(nowhere),
        Interrupted::default(),
    )
    .with_server_in(beyond);
    let (_, outcome) = bench.measure(&point);
    match outcome {
        Ok(sample) => serde_json::to_string(&sample).map_err(|e| e.to_string()),
        Err(Miss::Blank(why)) => Err(format!("{}{why}", namespace::BLANK)),
        Err(Miss::Failed(why)) => Err(why),
    }
}

/// Parses the delay and the loss, which have the syntax of the same settings in the device's faults.
fn path(args: &Between) -> Result<Path, String> {
    let text = format!("delay={};loss={}", args.delay, args.loss);
    let link = Plan::parse(&text).map_err(|e| e.to_string())?.link;
    Ok(Path {
        delay: link.delay,
        loss: link.loss,
    })
}

/// Parses the rate of the network, which has the syntax of the same setting in the device's faults. Returns bits per second.
fn rate(text: &str) -> Result<u64, String> {
    let plan = Plan::parse(&format!("rate={text}")).map_err(|e| e.to_string())?;
    plan.link
        .rate
        .map(|bytes| bytes.saturating_mul(8))
        .ok_or_else(|| format!("the rate {text} is no limit"))
}

/// Returns the commands that limit the rate at which an end sends. As in a network card, packets wait in a queue if the link is busy.
/// The queue holds the bytes that the link sends in 2 ms, but at least 256 KiB.
fn limits(rate: u64) -> [String; 3] {
    let queue = (rate / 8 / 500).max(256 * 1024);
    [
        "tc qdisc add dev wire root handle 1: htb default 1".to_owned(),
        format!(
            "tc class add dev wire parent 1: classid 1:1 htb rate {rate}bit burst 128k cburst 128k"
        ),
        format!("tc qdisc add dev wire parent 1:1 bfifo limit {queue}"),
    ]
}

/// Starts a process in a new network namespace, which exists as long as the process.
fn namespace() -> Result<Ended, String> {
    let mut command = Command::new("unshare");
    command
        .args(["-n", "sleep", "600"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let process = Ended::start(&mut command)?;
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let (own, other) = (of("self"), process.pid().to_string());
    let end = Instant::now() + READY;
    // The program first runs in the namespace of its parent.
    while of(&other).is_none_or(|space| Some(space) == own) {
        if Instant::now() >= end {
            return Err("the second namespace does not start".to_owned());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(process)
}

/// Joins this namespace and that of a process.
fn connect(other: &Ended, args: &Between, path: Path) -> Result<(), String> {
    let (pid, mtu) = (other.pid(), args.mtu);
    let there = |text: &str| system(&format!("nsenter -t {pid} -n {text}")).map(drop);
    if path == Path::default() {
        system(&format!(
            "ip link add wire mtu {mtu} type veth peer name wire mtu {mtu} netns {pid}"
        ))?;
    } else {
        let file = |pid: &str| {
            File::open(format!("/proc/{pid}/ns/net")).map_err(|e| format!("the namespace: {e}"))
        };
        relay::start(&file("self")?, &file(&pid.to_string())?, path)?;
        system(&format!("ip link set wire mtu {mtu}"))?;
        there(&format!("ip link set wire mtu {mtu}"))?;
    }
    let [here, far] = ADDRESSES;
    // A point-to-point interface needs the address of the other end for the route.
    system(&format!("ip addr add {here} peer {far} dev wire"))?;
    there(&format!("ip addr add {far} peer {here} dev wire"))?;
    if args.no_offload {
        // The kernel then segments TCP data before it passes the interface, so each packet is one frame.
        system("ip link set wire gso_max_segs 1")?;
        there("ip link set wire gso_max_segs 1")?;
    }
    for device in ["lo", "wire"] {
        system(&format!("ip link set {device} up"))?;
        there(&format!("ip link set {device} up"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(delay: &str, loss: &str) -> Between {
        Between {
            values: Vec::new(),
            ping: false,
            mtu: 1500,
            delay: delay.to_owned(),
            loss: loss.to_owned(),
            no_offload: false,
            rate: None,
            extent: Extent::Quick,
        }
    }

    #[test]
    fn delay_and_loss_are_written_as_those_of_faults() {
        let late = path(&args("5ms", "1%")).unwrap();
        assert_eq!(late.delay, Duration::from_millis(5));
        assert!((late.loss - 0.01).abs() < 1e-9);
        assert_eq!(path(&args("0us", "0")).unwrap(), Path::default());
        for (delay, loss) in [("5", "1%"), ("5ms", "200%"), ("x", "0")] {
            assert!(path(&args(delay, loss)).is_err(), "{delay} {loss}");
        }
    }

    #[test]
    fn a_point_with_an_axis_of_the_network_needs_namespaces() {
        let params = |axis: &str| Params::from([(axis.to_owned(), "1".to_owned())]);
        for axis in NETWORK {
            assert!(wanted(&params(axis)), "{axis}");
        }
        assert!(!wanted(&params("loss")));
        let none = Params::from([("network-rate".to_owned(), "none".to_owned())]);
        assert!(!wanted(&none));
    }

    #[test]
    fn the_rate_is_that_of_the_sending_end() {
        assert_eq!(rate("1Gbit/s"), Ok(1_000_000_000));
        for text in ["none", "1", "fast"] {
            assert!(rate(text).is_err(), "{text}");
        }
        let all = limits(1_000_000_000).concat();
        assert!(all.contains("htb rate 1000000000bit"), "{all}");
    }
}
