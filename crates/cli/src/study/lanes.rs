//! Streams of two kinds that share a slow link, each kind in a lane of its own, in a network namespace.
//!
//! `anywarp study lanes` runs in the namespace. Either the device arbitrates the link (`ANYWARP_QOS`), or the kernel does: HTB on the
//! loopback interface selects the class by the DSCP of a packet. The rates are those of the bytes that the peers acknowledge, as
//! `ss` shows them, in an interval in which all streams run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use super::args::Lanes;
use super::figures::{Extent, Point};
use super::namespace::{self, system};
use super::process::{Ended, READY, ready};
use super::store::{Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;
use crate::sys;

/// The address of both ends.
const HERE: &str = "127.0.0.1";

/// The service levels of the background and of the favoured streams. Their traffic classes are the levels times 32.
const LEVELS: [u8; 2] = [1, 2];

/// The bytes that each kind of streams must have sent before the measurement begins.
const BEGUN: u64 = 50_000;

/// The time between the first bytes and the measurement: until the windows of TCP have adapted.
const SETTLE: Duration = Duration::from_millis(300);

/// The name under which the processes of a measurement share the link of the device.
const LINK: &str = "lanes.link";

/// Returns the traffic class of a service level.
fn class(level: u8) -> u8 {
    level << 5
}

/// Returns the settings of the device's link.
fn settings(args: &Lanes, link: &Path) -> String {
    let (rate, factor) = (args.rate, args.factor);
    // The third lane is for levels without streams.
    let map = "qos_sl2vl=2,0,1,2,2,2,2,2,2,2,2,2,2,2,2,2";
    let tables = if args.blocking {
        format!("qos_high_limit={factor};qos_vlarb_high=1:1;qos_vlarb_low=0:1,2:1")
    } else {
        format!("qos_vlarb_low=0:1,1:{factor},2:1")
    };
    format!("rate={rate}Mbit/s;link={};{tables};{map}", link.display())
}

/// Returns the commands that make the kernel's link: a class for each kind, with rates in the ratio of the weights.
fn classes(args: &Lanes) -> Vec<String> {
    let rate = f64::from(args.rate);
    let share = rate / f64::from(u16::from(args.factor) + 1);
    let mut all = vec![
        "tc qdisc add dev lo root handle 1: htb default 30".to_owned(),
        format!(
            "tc class add dev lo parent 1: classid 1:10 htb rate {rate}mbit ceil {rate}mbit burst 128k cburst 128k"
        ),
        // Acknowledgements and control connections.
        format!(
            "tc class add dev lo parent 1: classid 1:30 htb rate {rate}mbit burst 128k quantum 60000"
        ),
    ];
    for (level, rate_of) in LEVELS.into_iter().zip([share, rate - share]) {
        let kilobits = (rate_of * 1000.0).round();
        all.push(format!(
            "tc class add dev lo parent 1:10 classid 1:{level} htb rate {kilobits}kbit ceil {rate}mbit burst 64k cburst 64k quantum 60000"
        ));
        all.push(format!(
            "tc filter add dev lo parent 1: protocol ip u32 match ip tos 0x{:02x} 0xfc flowid 1:{level}",
            class(level)
        ));
    }
    all
}

/// The streams of one kind: `rc` is `anywarp blast` over queue pairs, `rdma` is iperf3 with `anywarp sockets run`, and `kernel` is iperf3
/// alone.
struct Kind<'a> {
    name: &'a str,
    streams: usize,
    level: u8,
}

impl<'a> Kind<'a> {
    /// Parses a name and a number of streams, such as `rc:3`.
    fn parse(text: &'a str, level: u8) -> Result<Self, String> {
        let parsed = text
            .split_once(':')
            .and_then(|(name, n)| Some((name, n.parse().ok().filter(|n| (1..=16).contains(n))?)));
        let known = parsed.filter(|(name, _)| ["rc", "rdma", "kernel"].contains(name));
        let (name, streams) = known.ok_or_else(|| {
            format!("{text} is not rc, rdma or kernel with a number of streams, as in rc:2")
        })?;
        Ok(Self {
            name,
            streams,
            level,
        })
    }

    /// Starts the servers and the clients.
    fn start(&self, args: &Lanes, qos: &str, running: &mut Vec<Ended>) -> Result<(), String> {
        let own = env::current_exe().map_err(|e| e.to_string())?;
        let seconds = args.seconds + 20.0;
        let launch = |words: &[&str], client: bool| {
            let sockets: &[&str] = if self.name == "rdma" {
                &["sockets", "run", "--rule", "all require", "--"]
            } else {
                &[]
            };
            let mut command = if self.name == "kernel" {
                Command::new(words.first().copied().unwrap_or_default())
            } else {
                Command::new(&own)
            };
            if self.name == "kernel" {
                command.args(words.iter().skip(1));
            } else {
                command
                    .args(sockets)
                    .args(words)
                    .env("ANYWARP_CARRIER", "tcp");
            }
            if client && self.name == "rc" {
                command.env("ANYWARP_QOS", qos);
            }
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            Ended::start(&mut command)
        };
        let number = |n: f64| format!("{n:.0}");
        if self.name == "rc" {
            for _ in 0..self.streams {
                let port = sys::free_port().map_err(|e| e.to_string())?.to_string();
                running.push(launch(
                    &["blast", "--server", "--event", "-q", "-p", &port],
                    false,
                )?);
                ready(port.parse().unwrap_or(0), true)?;
                let (level, size) = (self.level.to_string(), args.size.to_string());
                let (depth, seconds) = (args.depth.to_string(), number(seconds));
                let words = [
                    "blast", HERE, "-p", &port, "--event", "-q", "-r", "1", "--warmup", "2",
                    "--sl", &level, "-s", &size, "--depth", &depth, "-d", &seconds,
                ];
                running.push(launch(&words, true)?);
            }
            return Ok(());
        }
        let port = sys::free_port().map_err(|e| e.to_string())?.to_string();
        running.push(launch(&["iperf3", "-s", "-B", HERE, "-p", &port], false)?);
        ready(port.parse().unwrap_or(0), true)?;
        let (class, streams) = (class(self.level).to_string(), self.streams.to_string());
        let (size, seconds) = (args.size.to_string(), number(seconds));
        let words = [
            "iperf3", "-c", HERE, "-p", &port, "-S", &class, "-P", &streams, "-l", &size, "-t",
            &seconds,
        ];
        running.push(launch(&words, true)?);
        Ok(())
    }
}

/// Returns the acknowledged bytes of all sockets with each of the traffic classes, from the output of `ss`.
fn acknowledged(text: &str) -> [u64; 2] {
    let mut all = [0; 2];
    let mut of = None;
    for line in text.lines() {
        if !line.starts_with(char::is_whitespace) {
            let tos = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix("tos:0x"));
            let tos = tos.and_then(|tos| u8::from_str_radix(tos, 16).ok());
            of = LEVELS.iter().position(|level| Some(class(*level)) == tos);
        } else if let Some(sum) = of.and_then(|of| all.get_mut(of)) {
            let bytes = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix("bytes_acked:"));
            *sum += bytes
                .and_then(|bytes| bytes.parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    all
}

/// Runs the streams in this namespace. Returns the sample as JSON.
pub(crate) fn run(args: &Lanes) -> Result<String, String> {
    system("ip link set lo up")?;
    // Reno increases its window until the queue of the class is full, so each class always has something to send.
    system("sysctl -q -w net.ipv4.tcp_congestion_control=reno")?;
    let link = env::temp_dir().join(format!("anywarp-{}-{LINK}", std::process::id()));
    let mut qos = settings(args, &link);
    if args.kernel {
        if args.blocking {
            return Err(
                "--blocking is for the device's arbiter: the kernel's has no high limit".to_owned(),
            );
        }
        // If packets were longer, the class with the smallest share would send only a few in a second.
        system("ip link set lo mtu 16000 gso_max_segs 1")?;
        for command in classes(args) {
            system(&command)?;
        }
        // With this rate the device does not limit anything, and only sets the DSCP of the packets.
        "rate=1000Gbit/s".clone_into(&mut qos);
    }
    let (background, favoured) = (
        Kind::parse(&args.background, LEVELS[0])?,
        Kind::parse(&args.favoured, LEVELS[1])?,
    );
    if !args.kernel && (background.name != "rc" || favoured.name != "rc") {
        return Err(
            "without --kernel both kinds must be rc: the device arbitrates only verbs".to_owned(),
        );
    }
    let mut running = Vec::new();
    let measured = background
        .start(args, &qos, &mut running)
        .and_then(|()| favoured.start(args, &qos, &mut running))
        .and_then(|()| measure(Duration::from_secs_f64(args.seconds)));
    drop(running);
    let _not_there = std::fs::remove_file(&link);
    let [background, favoured] = measured?;
    let (sum, ratio) = (background + favoured, favoured / background);
    let values = [
        ("favoured_mbps", favoured),
        ("background_mbps", background),
        ("mbps", sum),
        ("ratio", ratio),
        ("followed", ratio / f64::from(args.factor)),
        ("filled", sum / f64::from(args.rate)),
    ];
    let sample: Sample = values.map(|(name, value)| (name.to_owned(), value)).into();
    serde_json::to_string(&sample).map_err(|e| e.to_string())
}

/// Returns the rates of both kinds in Mbit/s, over an interval in which all their streams run.
fn measure(window: Duration) -> Result<[f64; 2], String> {
    let now = || system("ss -tinH --tos").map(|text| (Instant::now(), acknowledged(&text)));
    let end = Instant::now() + READY;
    while now()?.1.iter().any(|bytes| *bytes < BEGUN) {
        if Instant::now() >= end {
            return Err("not all streams have begun to send".to_owned());
        }
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(SETTLE);
    let (begun, before) = now()?;
    thread::sleep(window);
    let (ended, after) = now()?;
    let seconds = ended.duration_since(begun).as_secs_f64();
    let rate = |of: usize| {
        let (before, after) = (before.get(of).copied(), after.get(of).copied());
        let bytes = after.unwrap_or(0).checked_sub(before.unwrap_or(0));
        // `ss` no longer counts the bytes of a stream that has ended, so the difference may be negative.
        let bytes = bytes
            .filter(|bytes| *bytes > 0)
            .ok_or("a stream has stopped")?;
        Ok::<f64, String>(bytes as f64 * 8.0 / seconds / 1e6)
    };
    Ok([rate(0)?, rate(1)?])
}

/// Measures a point, which is a combination of the values of the experiment's axes. Returns the command as a user would type it, and
/// the outcome.
pub(crate) fn start(
    point: &Point,
    extent: Extent,
    library: &Library,
    interrupted: &Interrupted,
) -> (String, Outcome) {
    let get = |axis: &str| point.params.get(axis).map(String::as_str);
    let seconds = match extent {
        Extent::Full => "5",
        Extent::Quick => "0.5",
        Extent::Smoke => "0.3",
    };
    let streams = get("streams").unwrap_or("1");
    let kind = |axis: &str| {
        let kind = get(axis).unwrap_or("rc");
        if kind.contains(':') {
            kind.to_owned()
        } else {
            format!("{kind}:{streams}")
        }
    };
    let (favoured, background) = (kind("favoured"), kind("background"));
    let mut words = vec![
        "study",
        "lanes",
        "--favoured",
        &favoured,
        "--background",
        &background,
        "--seconds",
        seconds,
    ];
    for (axis, option) in [
        ("factor", "--factor"),
        ("rate", "--rate"),
        ("size", "--size"),
        ("buffers", "--depth"),
    ] {
        if let Some(value) = get(axis) {
            words.extend([option, value]);
        }
    }
    if get("arbitration") == Some("blocking") {
        words.push("--blocking");
    }
    if get("arbiter") == Some("kernel") {
        words.push("--kernel");
    }
    let programs = || {
        super::apps::need("ss", "iproute2")?;
        if favoured.starts_with("rc") && background.starts_with("rc") {
            return Ok(());
        }
        super::apps::need("iperf3", "iperf3")
    };
    if let Err(miss) = programs() {
        return (String::new(), Err(miss));
    }
    let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    namespace::measure(&words, library, interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Lanes {
        Lanes {
            favoured: "rdma:3".to_owned(),
            background: "rc:1".to_owned(),
            factor: 4,
            rate: 1000,
            size: 8192,
            depth: 64,
            seconds: 1.0,
            blocking: false,
            kernel: false,
        }
    }

    #[test]
    fn acknowledged_bytes_are_summed_by_traffic_class() {
        let text = "ESTAB 0 0 127.0.0.1:1 127.0.0.1:2 tos:0x20 class_id:0\n\
                    \t reno bytes_sent:9 bytes_acked:1000 x\n\
                    ESTAB 0 0 127.0.0.1:3 127.0.0.1:4 tos:0x40 class_id:0\n\t bytes_acked:20\n\
                    ESTAB 0 0 127.0.0.1:5 127.0.0.1:6 tos:0 class_id:0\n\t bytes_acked:300\n\
                    ESTAB 0 0 [::ffff:127.0.0.1]:7 [::ffff:127.0.0.1]:8 tos:0x40 tclass:0x40\n\t bytes_acked:4\n";
        assert_eq!(acknowledged(text), [1000, 24]);
        assert_eq!(acknowledged(""), [0, 0]);
    }

    #[test]
    fn the_settings_of_the_device_are_accepted() {
        for factor in [1, 4, 255] {
            for blocking in [false, true] {
                let args = Lanes {
                    factor,
                    blocking,
                    ..args()
                };
                let text = settings(&args, Path::new("/tmp/link"));
                let settings = anywarp_core::qos::Settings::parse(&text).unwrap();
                assert_eq!(settings.rate, 125_000_000);
                assert_ne!(settings.lanes[1], settings.lanes[2], "{text}");
            }
        }
    }

    #[test]
    fn the_classes_of_the_kernel_have_the_ratio_of_the_weights() {
        let all = classes(&Lanes {
            factor: 3,
            ..args()
        })
        .join("\n");
        assert!(all.contains("classid 1:1 htb rate 250000kbit"), "{all}");
        assert!(all.contains("classid 1:2 htb rate 750000kbit"), "{all}");
        assert!(all.contains("tos 0x40 0xfc flowid 1:2"), "{all}");
    }

    #[test]
    fn a_kind_has_a_number_of_streams() {
        assert_eq!(Kind::parse("rdma:3", 1).unwrap().streams, 3);
        for bad in ["rdma", "rc:0", "rc:17", "ud:1", "rc:x", ""] {
            assert!(Kind::parse(bad, 1).is_err(), "{bad}");
        }
    }
}
