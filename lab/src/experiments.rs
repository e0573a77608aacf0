//! `cargo lab experiments [--short] [--only PART]`: measures how many bytes of datagrams arrive in a network that loses packets, in each mode
//! of Write-Record, and how fast reliable datagrams are. `anywarp study` has the figures of the papers.
//!
//! All processes run in namespaces that end with this process. `tests/netlab/relay.c` delays packets, and decides for each packet
//! whether it is lost. The results are compared with those of loss that the device itself injects. The following are errors: a
//! wrong byte, an inexact validity map, a duplicate, too little data that arrives at 1 % loss, and reliable datagrams that
//! are too slow in comparison with the kernel's TCP or with unreliable datagrams. These comparisons use the median of
//! the ratios of consecutive runs; if it is below the bound, up to three times as many runs are made. Other values depend on the machine
//! and are only printed. The long form writes `docs/results`.
//!
//! The short form is for machines with other load. It checks only what does not depend on the load: that no byte is wrong, that validity
//! maps are exact, that each reliable message arrives once, and that enough data arrives when the device injects 1 % loss. The relay
//! loses more packets when it gets no processor time. So the values that are measured with the relay, and the ratios of rates, are printed
//! but not checked, except the shares that arrive between new queue pairs.

use crate::perf::waiting_port;
use crate::process::Process;
use crate::programs::{self, INSIDE};
use anywarp_plot::Chart;
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};
use xtask::{Result, sh};

/// The time limit of one measurement.
const LIMIT: Duration = Duration::from_secs(180);

/// The least share of 1 MiB Write-Records in path-MTU datagrams that must arrive at 1 % loss.
const ARRIVES: f64 = 0.985;

/// The largest difference between the share that arrives with loss in the network and with injected loss.
const AGREE: f64 = 0.005;

/// The least rate of reliable datagrams at 1 % loss and 10 ms, relative to the kernel's TCP.
const OF_TCP: f64 = 0.70;

/// The least rate of reliable datagrams without loss, relative to unreliable datagrams.
const OF_UD: f64 = 0.90;

/// The index of the robust mode, in which a record is created once no more of its message will arrive, among the modes that are
/// measured under loss.
const ROBUST: usize = 1;

/// The number of runs of each comparison, which are measured in turn.
const ROUNDS: usize = 5;

/// A part of the experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    Loss,
    Fresh,
    Reliable,
}

/// Options of `cargo lab experiments`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Measure few sizes briefly, and write nothing.
    #[arg(long)]
    short: bool,
    /// Measure only one part.
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
}

/// The values of one size by the names of their columns.
type Row = BTreeMap<String, f64>;

/// Where the two ends run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Loopback,
    Net,
}

/// The anywarp command, and the results so far.
struct Lab {
    anywarp: PathBuf,
    work: PathBuf,
    /// All values, in the format of the CSV file.
    csv: String,
    /// The drawings by name.
    drawings: Vec<(&'static str, String)>,
    /// The violations that were found.
    failures: Vec<String>,
    short: bool,
}

pub(crate) fn run(options: &Options) -> Result {
    if !sh::dist().join("bin/anywarp").exists() {
        return Err("target/dist does not exist: run `cargo xtask dist` first".into());
    }
    if env::var_os(INSIDE).is_none() {
        return programs::in_namespaces();
    }
    let mut lab = Lab::new(options.short)?;
    let mut page = String::new();
    let wanted = |part| options.only.is_none_or(|only| only == part);
    for (part, name, make) in [
        (
            Part::Loss,
            "loss",
            loss as fn(&mut Lab, bool) -> Result<String>,
        ),
        (Part::Fresh, "fresh", fresh),
        (Part::Reliable, "reliable", reliable),
    ] {
        if wanted(part) {
            let text = make(&mut lab, options.short)?;
            println!("{text}");
            page.push_str(&text);
            if !options.short {
                let folder = sh::root().join("docs/results");
                fs::create_dir_all(&folder)?;
                let head = format!(
                    "<!-- made by `cargo lab experiments --only {name}` -->\n{}",
                    machine()
                );
                fs::write(
                    folder.join(format!("{name}.md")),
                    text.replacen("\n\n", &format!("\n\n{head}\n"), 1),
                )?;
                fs::write(
                    folder.join(format!("{name}.csv")),
                    std::mem::take(&mut lab.csv),
                )?;
                for (name, svg) in lab.drawings.drain(..) {
                    fs::write(folder.join(name), svg)?;
                }
            }
        }
    }
    if lab.failures.is_empty() {
        return Ok(());
    }
    Err(lab.failures.join("\n").into())
}

/// Describes the machine in a line.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("an unknown processor", |(_, name)| name);
    let load = read("/proc/loadavg");
    format!(
        "Machine: {cpu}, {} processors, Linux {}, load {} at the end. MB/s are 10^6 bytes a second.\n",
        std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        read("/proc/sys/kernel/osrelease").trim(),
        load.split(' ').next().unwrap_or_default(),
    )
}

impl Lab {
    fn new(short: bool) -> Result<Self> {
        const SCRIPT: &str = "set -e
mount -t tmpfs tmpfs /run
ip link set lo up
for host in client server; do ip netns add $host; ip -n $host link set lo up
    # The kernel keeps the fragments of an incomplete datagram for 30 s. When its memory for fragments is full, it drops all
    # fragmented datagrams. A shorter time and more memory prevent this.
    ip netns exec $host sh -c 'echo 1 > /proc/sys/net/ipv4/ipfrag_time; echo 268435456 > /proc/sys/net/ipv4/ipfrag_high_thresh'
done";
        sh::run(Command::new("sh").args(["-c", SCRIPT]))?;
        let work = sh::target().join("experiments");
        fs::create_dir_all(&work)?;
        let mut cc = sh::cc();
        cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(work.join("relay"))
            .arg(sh::root().join("tests/netlab/relay.c"));
        sh::run(&mut cc)?;
        Ok(Self {
            anywarp: sh::dist().join("bin/anywarp"),
            work,
            csv: String::new(),
            drawings: Vec::new(),
            failures: Vec::new(),
            short,
        })
    }

    /// Returns a command that runs on one of two hosts, which are network namespaces and represent two machines. Connections on
    /// loopback use TCP too, not shared memory.
    fn on(place: Place, host: &str, program: &std::path::Path) -> Command {
        let mut command = match place {
            Place::Loopback => Command::new(program),
            Place::Net => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", host]).arg(program);
                command
            }
        };
        command.env("ANYWARP_CARRIER", "tcp");
        command
    }

    /// Runs `anywarp TEST` as server, and as client with the arguments `words`. Returns the rows of the client's table.
    fn measure(
        &mut self,
        place: Place,
        test: &str,
        words: &str,
        variables: &[(&str, &str)],
        note: &str,
    ) -> Result<Vec<Row>> {
        let csv = self.work.join("run.csv");
        let _not_there = fs::remove_file(&csv);
        let mut server = Self::on(place, "server", &self.anywarp);
        server
            .args([test, "--server", "-p", "0"])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let mut server = Process::start(&mut server)?;
        let printed = server.first_line(Duration::from_secs(10), true)?;
        let port = waiting_port(&printed)?.to_string();
        let host = if place == Place::Net {
            FAR
        } else {
            "127.0.0.1"
        };
        let mut client = Self::on(place, "client", &self.anywarp);
        client
            .args([test, host, "-q", "-p", &port])
            .args(words.split(' '))
            // On a loaded machine an end may wait long for a processor.
            .args(["--timeout", if self.short { "60" } else { "10" }])
            .arg("--csv")
            .arg(&csv)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let failure = match Process::start(&mut client)?.output(LIMIT) {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(e) => Some(e.to_string()),
        };
        self.failures
            .extend(failure.map(|why| format!("{note} {test} {words}: {why}")));
        let text = fs::read_to_string(&csv).unwrap_or_default();
        let mut lines = text.lines();
        let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let mut rows = Vec::new();
        for line in lines {
            if self.csv.is_empty() {
                let _ = writeln!(self.csv, "experiment,{}", names.join(","));
            }
            let _ = writeln!(self.csv, "{note},{line}");
            rows.push(
                names
                    .iter()
                    .zip(line.split(','))
                    .filter_map(|(name, value)| Some(((*name).to_owned(), value.parse().ok()?)))
                    .collect(),
            );
        }
        eprintln!("{note}: {test} {words}");
        Ok(rows)
    }
}

/// The address of the server on the other side of the relay.
const FAR: &str = "10.78.0.2";

/// The link between the two hosts, which is removed when this is dropped.
struct Link {
    relay: Process,
    stdin: Option<ChildStdin>,
}

impl Link {
    fn new(lab: &Lab, ppm: u32, delay_us: u32) -> Result<Self> {
        Self::with_mtu(lab, ppm, delay_us, 1500)
    }

    fn with_mtu(lab: &Lab, ppm: u32, delay_us: u32, mtu: u32) -> Result<Self> {
        let mut relay = Command::new(lab.work.join("relay"));
        relay
            .args([
                "client",
                "server",
                &ppm.to_string(),
                &delay_us.to_string(),
                "7",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut relay = Process::start(&mut relay)?;
        let stdin = Some(relay.stdin()?);
        let mut up = String::new();
        relay.stdout()?.read_line(&mut up)?;
        if up.trim() != "up" {
            return Err("the relay does not start".into());
        }
        const SCRIPT: &str = "set -e
number=1
for host in client server; do
    ip -n $host link set dev wire mtu \"$1\" txqueuelen 65000 up
    ip -n $host addr add 10.78.0.$number peer 10.78.0.$((3 - number)) dev wire
    number=2
done";
        sh::run(Command::new("sh").args(["-c", SCRIPT, "sh", &mtu.to_string()]))?;
        Ok(Self { relay, stdin })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The relay's network devices are removed with it.
        drop(self.stdin.take());
        let _ended = self.relay.wait(Duration::from_secs(5));
    }
}

fn get(row: &Row, name: &str) -> f64 {
    row.get(name).copied().unwrap_or(f64::NAN)
}

/// Formats a number with about three digits.
fn digits(value: f64) -> String {
    match value {
        v if v.is_nan() => "–".to_owned(),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn size_text(size: f64) -> String {
    match size {
        s if s >= 1048576.0 => format!("{} MiB", s / 1048576.0),
        s if s >= 1024.0 => format!("{} KiB", s / 1024.0),
        s => format!("{s} B"),
    }
}

/// Measures loss (figures 6.6 and 6.7 of the thesis). Returns the page.
fn loss(lab: &mut Lab, short: bool) -> Result<String> {
    const MODES: [(&str, &str); 4] = [
        ("Send", "-t ud -o send"),
        (
            "Write-Record, robust",
            "-t ud -o write-record --record-mode robust --exact",
        ),
        (
            "Write-Record, thesis",
            "-t ud -o write-record --record-mode thesis --exact",
        ),
        (
            "Write-Record, chunk",
            "-t ud -o write-record --record-mode chunk",
        ),
    ];
    const EXTRAS: [(&str, &str); 2] = [
        (
            "robust, the end sent 2 times more",
            "-t ud -o write-record --repeats 2 --exact",
        ),
        (
            "robust, parity 1 to 8",
            "-t ud -o write-record --parity 8 --exact",
        ),
    ];
    let losses: &[u32] = if short {
        &[10_000]
    } else {
        &[1000, 5000, 10_000, 50_000]
    };
    let segments: &[&str] = if short {
        &["path-mtu"]
    } else {
        &["path-mtu", "jumbo", "max"]
    };
    let words = if short {
        // The deadline is long, because a sender that gets no processor time for a while has not lost anything.
        "-s 64K,1M -n 60 --warmup 5 -r 1 --deadline 5000"
    } else {
        "-s 1K,64K,1M -d 0.5 --warmup 5 -r 1"
    };
    let faults = faults(lab)?;
    let mut text = format!(
        "# Loss\n\nFigures 6.6 and 6.7: rate of the bytes that arrive, MB/s, and in parentheses their share of the bytes sent, percent, for each \
         rate of loss. `network`: `tests/netlab/relay.c` between two network namespaces drops IP packets of 1500 bytes, also fragments, \
         independently of one another. `injected`: the device drops datagrams instead (`ANYWARP_FAULTS=loss=…,seed=7`), on the same link \
         without loss. `anywarp blast {words} --segment …`.\n\n"
    );
    if !faults && short {
        lab.failures
            .push("this build has no ANYWARP_FAULTS: injected loss cannot be measured".to_owned());
    }
    if !faults {
        text.push_str(
            "This build has no `ANYWARP_FAULTS`: only loss in the network was measured.\n\n",
        );
    }
    for segment in segments {
        let _ = writeln!(text, "## Datagrams: {segment}\n");
        let mut cells: BTreeMap<(usize, u64), Vec<String>> = BTreeMap::new();
        let mut shares: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for &ppm in losses {
            let share = format!("{}", f64::from(ppm) / 1e6);
            let spec = format!("loss={share},seed=7");
            // Only path-MTU datagrams are lost one by one, because IP does not fragment them. So only for them is injected loss
            // comparable with loss in the network, and only with them are the modes of `EXTRAS` measured.
            let single = *segment == "path-mtu";
            let modes: Vec<(usize, &(&str, &str))> = MODES
                .iter()
                .chain(&EXTRAS)
                .enumerate()
                .filter(|(at, _)| single || *at < MODES.len())
                .collect();
            let link = Link::new(lab, ppm, 0)?;
            let mut network = Vec::new();
            for (_, (mode, line)) in &modes {
                let note = format!("network {mode} {segment} loss {share}");
                let line = format!("{line} --segment {segment} {words}");
                network.push(lab.measure(Place::Net, "blast", &line, &[], &note)?);
            }
            drop(link);
            let link = Link::new(lab, 0, 0)?;
            for ((at, (mode, line)), network) in modes.into_iter().zip(network) {
                let note = format!("{mode} {segment} loss {share}");
                let line = format!("{line} --segment {segment} {words}");
                let injected = if faults && single && (at == ROBUST || !short) {
                    let variables = [("ANYWARP_FAULTS", spec.as_str())];
                    lab.measure(
                        Place::Net,
                        "blast",
                        &line,
                        &variables,
                        &format!("injected {note}"),
                    )?
                } else {
                    Vec::new()
                };
                for row in &network {
                    let size = get(row, "size");
                    if (size - 1048576.0).abs() < 0.5 {
                        let share = get(row, "delivered_share") * 100.0;
                        shares.entry(at).or_default().push(share);
                    }
                    let other = injected
                        .iter()
                        .find(|other| (get(other, "size") - size).abs() < 0.5);
                    check_bounds(lab, &note, ppm, single && at == ROBUST, row, other);
                    let cell = |row: &Row| {
                        format!(
                            "{} ({:.2})",
                            digits(get(row, "arrived_mb_s")),
                            get(row, "delivered_share") * 100.0
                        )
                    };
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        reason = "a whole number"
                    )]
                    let of = cells.entry((at, size as u64)).or_default();
                    of.push(cell(row));
                    of.extend(single.then(|| other.map_or_else(|| "–".to_owned(), cell)));
                }
            }
            drop(link);
        }
        let mode = |at: usize| {
            let all = MODES.iter().chain(&EXTRAS);
            all.map(|(mode, _)| *mode).nth(at).unwrap_or_default()
        };
        let lines: Vec<anywarp_plot::Line<'_>> =
            shares.into_iter().map(|(at, s)| (mode(at), s)).collect();
        let places: Vec<String> = losses
            .iter()
            .map(|ppm| format!("{} %", f64::from(*ppm) / 1e4))
            .collect();
        let title = format!("Share of 1 MiB messages that arrives, datagrams: {segment}");
        let name = match *segment {
            "path-mtu" => "loss-path-mtu.svg",
            "jumbo" => "loss-jumbo.svg",
            _ => "loss-max.svg",
        };
        let chart = Chart {
            title: &title,
            unit: "%",
            places: &places,
            log: false,
            digits,
        };
        let svg = anywarp_plot::lines(&chart, &lines)?;
        lab.drawings.push((name, svg));
        text.push_str("| | size |");
        for ppm in losses {
            let percent = f64::from(*ppm) / 1e4;
            let _ = write!(text, " {percent} % network |");
            if *segment == "path-mtu" {
                let _ = write!(text, " {percent} % injected |");
            }
        }
        let _ = write!(
            text,
            "\n|---|---:|{}\n",
            "---:|".repeat(losses.len() * if *segment == "path-mtu" { 2 } else { 1 })
        );
        for ((at, size), cells) in cells {
            let mode = mode(at);
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            let size = size_text(size as f64);
            let _ = writeln!(text, "| {mode} | {size} | {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    Ok(text)
}

/// Measures new pairs of queue pairs without warm-up: the share of their first four messages of 1 MiB that arrives, when
/// feedback about the sending rate is lost too.
fn fresh(lab: &mut Lab, short: bool) -> Result<String> {
    /// By how much the share that arrives may be less than the share that the loss rate leaves.
    const MORE: f64 = 0.02;
    let words = "-t ud -o write-record --record-mode robust --exact -s 1M -n 4 --warmup 0 -r 1";
    let pairs = if short { 3 } else { 15 };
    let losses: &[u32] = if short {
        &[10_000]
    } else {
        &[1000, 10_000, 50_000]
    };
    let mut text = format!(
        "# Fresh pairs under loss\n\nShare of the first four messages of 1 MiB that arrives between two queue pairs that were just created, in \
         percent: the median of {pairs} pairs, in parentheses the lowest value, and the share that the loss itself leaves. The network drops \
         IP packets (`tests/netlab/relay.c`); on loopback the device drops datagrams at both ends (`ANYWARP_FAULTS=loss=…`). Pace reports are \
         lost as often as data. `anywarp blast {words} --segment …`.\n\n| | datagrams |"
    );
    for ppm in losses {
        let _ = write!(text, " {} % |", f64::from(*ppm) / 1e4);
    }
    let _ = writeln!(text, "\n|---|---|{}", "---:|".repeat(losses.len()));
    for mtu in [Some(1500), Some(9000), None] {
        for segment in ["path-mtu", "jumbo", "max"] {
            if mtu.is_none() && segment == "max" {
                // The path carries the longest datagram without fragmentation, so the result is that of path-mtu.
                continue;
            }
            let place = mtu.map_or_else(|| "loopback".to_owned(), |mtu| format!("MTU {mtu}"));
            let _ = write!(text, "| {place} | {segment} |");
            for &ppm in losses {
                let loss = f64::from(ppm) / 1e6;
                let link = mtu
                    .map(|mtu| Link::with_mtu(lab, ppm, 0, mtu))
                    .transpose()?;
                let mut shares = Vec::new();
                for seed in 0..pairs {
                    let faults = format!("loss={loss},dir=both,seed={seed},summary=off");
                    let variables = [("ANYWARP_FAULTS", faults.as_str())];
                    let (at, variables): (_, &[(&str, &str)]) = if link.is_some() {
                        (Place::Net, &[])
                    } else {
                        (Place::Loopback, &variables)
                    };
                    let line = format!("{words} --segment {segment}");
                    let note = format!("fresh {place} {segment} {loss}");
                    let rows = lab.measure(at, "blast", &line, variables, &note)?;
                    shares.push(
                        rows.first()
                            .map_or(f64::NAN, |row| get(row, "delivered_share")),
                    );
                }
                drop(link);
                let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
                let middle = median(shares);
                // A fragmented datagram is lost if any of its fragments is lost. On loopback the device injects loss at both ends.
                let pieces = match (mtu, segment) {
                    (Some(1500), "jumbo") => 7,
                    (Some(1500), "max") => 42,
                    (Some(_), "max") => 7,
                    (Some(_), _) => 1,
                    (None, _) => 2,
                };
                let expected = (1.0 - loss).powi(pieces);
                let _ = write!(
                    text,
                    " {:.2} ({:.2}) of {:.2} |",
                    middle * 100.0,
                    least * 100.0,
                    expected * 100.0
                );
                // Three pairs send some 200 datagrams of the longest kind, which is too few for a reliable share.
                let tells = !(short && segment == "max");
                if middle.is_nan() || (tells && middle < expected - MORE) {
                    lab.failures.push(format!(
                        "fresh pairs, {place}, {segment}, loss {loss}: {:.2} % arrive, {:.2} % are expected",
                        middle * 100.0,
                        expected * 100.0
                    ));
                }
            }
            text.push('\n');
        }
    }
    Ok(text)
}

/// Checks the bounds under loss, for large robust Write-Records in datagrams that are not fragmented.
fn check_bounds(
    lab: &mut Lab,
    note: &str,
    ppm: u32,
    robust: bool,
    network: &Row,
    injected: Option<&Row>,
) {
    let size = get(network, "size");
    if ppm != 10_000 || !robust || size < 65536.0 {
        return;
    }
    let network_counts = Some(network).filter(|_| !lab.short);
    let shares = [network_counts, injected].map(|row| row.map(|row| get(row, "delivered_share")));
    for share in shares.into_iter().flatten() {
        if size >= 1048576.0 && (share.is_nan() || share < ARRIVES) {
            lab.failures.push(format!(
                "{note}, {size} bytes: {:.3} % arrive, and {:.1} % have to",
                share * 100.0,
                ARRIVES * 100.0
            ));
        }
    }
    if let [Some(network), Some(injected)] = shares
        && (network - injected).abs() > AGREE
    {
        lab.failures.push(format!(
            "{note}, {size} bytes: {:.3} % arrive when the network loses, {:.3} % when the device does",
            network * 100.0,
            injected * 100.0
        ));
    }
    for row in [Some(network), injected].into_iter().flatten() {
        let checked = get(row, "maps_checked");
        if checked.is_nan() || checked < 1.0 {
            lab.failures
                .push(format!("{note}, {size} bytes: no map was compared"));
        }
    }
}

/// Returns whether this build injects faults.
fn faults(lab: &Lab) -> Result<bool> {
    Ok(sh::output(Command::new(&lab.anywarp).args(["run", "--help"]))?.contains("ANYWARP_FAULTS"))
}

/// Measures reliable datagrams in comparison with the kernel's TCP and with unreliable datagrams.
fn reliable(lab: &mut Lab, short: bool) -> Result<String> {
    let seconds = if short { 1 } else { 3 };
    let mut text = String::from(
        "# Reliable datagrams\n\n`anywarp blast -t rd -o write-record --event` verifies that every message arrives exactly once. The \
         kernel's TCP, with the congestion control of the machine, uses the same relay; each run measures both, one after the other. \
         MB/s at the receiver and their ratio, medians of the runs. The ends wait for events, because on a machine with two processors \
         polling ends would leave none for the relay.\n\n\
         | loss | round trip | messages | RD | kernel's TCP | RD / TCP | runs |\n|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let paths: &[(u32, u32)] = if short {
        &[(10_000, 5000)]
    } else {
        &[
            (0, 5000),
            (1000, 5000),
            (10_000, 5000),
            (10_000, 500),
            (0, 0),
            (10_000, 0),
        ]
    };
    let messages: &[(&str, &str)] = if short {
        &[("64K", "--depth 256")]
    } else {
        &[
            ("1K", "--depth 4096 --list 16"),
            ("64K", "--depth 256"),
            ("1M", "--depth 16"),
        ]
    };
    for &(ppm, delay) in paths {
        let link = Link::new(lab, ppm, delay)?;
        for (size, depth) in messages {
            let note = format!("loss {} round trip {} us", f64::from(ppm) / 1e6, 2 * delay);
            let words = format!(
                "-t rd -o write-record -s {size} {depth} --event --warmup 0 -d {seconds} -r 1"
            );
            let bound = (ppm == 10_000 && delay == 5000).then_some(OF_TCP);
            let what = format!("{note}, messages of {size}iB, RD of TCP");
            let seen = versus(lab, &what, bound, |lab| {
                let rows = lab.measure(Place::Net, "blast", &words, &[], &note)?;
                let row = rows.first().cloned().unwrap_or_default();
                // The command itself reports duplicates. This checks that all messages arrived.
                let share = get(&row, "delivered_share");
                if share.is_nan() || (share - 1.0).abs() > 1e-9 {
                    lab.failures
                        .push(format!("{note}: only {share} of the sent messages arrived"));
                }
                Ok((get(&row, "arrived_mb_s"), tcp_rate(seconds)?))
            })?;
            let _ = writeln!(
                text,
                "| {} % | {} ms | {size}iB | {} | {} | {:.2} | {} |",
                f64::from(ppm) / 1e4,
                f64::from(2 * delay) / 1e3,
                digits(seen.ours),
                digits(seen.theirs),
                seen.ratio,
                seen.runs
            );
        }
        drop(link);
    }
    if !short {
        text.push_str(
            "\nRD compared with UD on a path without loss, in turn; MB/s and their ratio, medians. On loopback both ends poll; with \
             the relay they wait for events. A request of UD completes when it is sent, one of RD when it is acknowledged. A request of RD \
             therefore occupies its entry of the send queue for a round trip, and a queue that is too short for the path reduces the rate.\n\n\
             | path | size | depth | UD | RD | RD / UD | runs |\n|---|---:|---:|---:|---:|---:|---:|\n",
        );
        let sizes = [("1K", 512), ("64K", 64), ("1M", 16)];
        let of_relay = [("1K", 4096), ("1K", 512), ("64K", 64), ("1M", 16)];
        for (place, name, wait, sizes) in [
            (Place::Loopback, "loopback", "", &sizes[..]),
            (Place::Net, "relay", " --event", &of_relay),
        ] {
            let link = if place == Place::Net {
                Some(Link::new(lab, 0, 0)?)
            } else {
                None
            };
            for (size, depth) in sizes {
                let what = format!("clean {name}, {size}iB, depth {depth}, RD of UD");
                let short = (place, *size, *depth) == (Place::Net, "1K", 512);
                let seen = versus(lab, &what, (!short).then_some(OF_UD), |lab| {
                    let mut of = |transport: &str| -> Result<f64> {
                        let words = format!(
                            "-t {transport} -o write-record -s {size} --depth {depth} -d 0.5 -r 1{wait}"
                        );
                        let note = format!("clean {name}");
                        let rows = lab.measure(place, "blast", &words, &[], &note)?;
                        Ok(rows
                            .first()
                            .map_or(f64::NAN, |row| get(row, "arrived_mb_s")))
                    };
                    let ud = of("ud")?;
                    Ok((of("rd")?, ud))
                })?;
                let _ = writeln!(
                    text,
                    "| {name} | {size}iB | {depth} | {} | {} | {:.2} | {} |",
                    digits(seen.theirs),
                    digits(seen.ours),
                    seen.ratio,
                    seen.runs
                );
            }
            drop(link);
        }
    }
    text.push('\n');
    Ok(text)
}

/// Two values that were measured in turn.
struct Versus {
    ours: f64,
    theirs: f64,
    ratio: f64,
    runs: usize,
}

/// Calls `run`, which measures two values one after the other, [`ROUNDS`] times, and up to three times as often if the
/// median of their ratios is below `bound`. The median is over all runs, so more runs make it more certain, not higher. A
/// ratio that stays below is a failure. In the short form `run` is called once, and the ratio is only printed.
fn versus(
    lab: &mut Lab,
    what: &str,
    bound: Option<f64>,
    mut run: impl FnMut(&mut Lab) -> Result<(f64, f64)>,
) -> Result<Versus> {
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (bound, rounds) = if lab.short {
        (None, 1)
    } else {
        (bound, ROUNDS)
    };
    let reaches = |ratios: &[f64]| bound.is_none_or(|bound| median(ratios.to_vec()) >= bound);
    while ratios.len() < rounds || (!reaches(&ratios) && ratios.len() < 3 * rounds) {
        let (a, b) = run(lab)?;
        ours.push(a);
        theirs.push(b);
        ratios.push(a / b);
    }
    if let Some(bound) = bound
        && !reaches(&ratios)
    {
        lab.failures.push(format!(
            "{what}: {:.2}, the median of {} runs; the target is {bound:.2}",
            median(ratios.clone()),
            ratios.len()
        ));
    }
    Ok(Versus {
        ours: median(ours),
        theirs: median(theirs),
        ratio: median(ratios.clone()),
        runs: ratios.len(),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the rate of the kernel's TCP over the link in MB/s.
fn tcp_rate(seconds: u64) -> Result<f64> {
    let own = env::current_exe()?;
    let port = programs::free_port()?.to_string();
    let mut server = Lab::on(Place::Net, "server", &own);
    server.args(["experiments-tcp", "take", &port]);
    let mut server = Process::start(server.stdout(Stdio::piped()))?;
    let mut lines = server.stdout()?.lines();
    lines.next().ok_or("the receiver does not start")??;
    let mut client = Lab::on(Place::Net, "client", &own);
    client.args(["experiments-tcp", "give", &port, &seconds.to_string()]);
    Process::start(&mut client)?.status(LIMIT)?;
    let rate = lines.next().ok_or("the receiver printed no rate")??;
    Ok(rate.parse()?)
}

/// Runs one end of the measurement of the kernel's TCP: `take PORT` or `give PORT SECONDS`.
pub(crate) fn tcp(arguments: &[&str]) -> Result {
    let mut buffer = vec![0_u8; 1 << 18];
    match *arguments {
        ["take", port] => {
            let listener = TcpListener::bind(("0.0.0.0", port.parse()?))?;
            println!("ready");
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            let (mut bytes, mut start, mut last) = (0_u64, None, Instant::now());
            loop {
                let n = stream.read(&mut buffer)?;
                if n == 0 {
                    break;
                }
                last = Instant::now();
                if start.is_none() {
                    start = Some(last);
                } else {
                    bytes += n as u64;
                }
            }
            let time = last.duration_since(start.unwrap_or(last)).as_secs_f64();
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            let rate = bytes as f64 / 1e6 / time;
            println!("{rate}");
            Ok(())
        }
        ["give", port, seconds] => {
            let mut stream = TcpStream::connect((FAR, port.parse()?))?;
            stream.set_write_timeout(Some(Duration::from_secs(20)))?;
            let end = Instant::now() + Duration::from_secs(seconds.parse()?);
            while Instant::now() < end {
                stream.write_all(&buffer)?;
            }
            Ok(())
        }
        _ => Err("experiments-tcp: take PORT | give PORT SECONDS".into()),
    }
}
