//! `cargo xtask experiments [--short] [--only PART]`: latency, bandwidth, loss and reliability of datagrams beside
//! connections, as chapter 6 of the thesis on datagram-iWARP has them (figures 6.4 to 6.7), on this machine.
//!
//! All in namespaces that end with this process. Loss and delay are those of `tests/netlab/relay.c`, which decides for each
//! packet; it is checked against faults that the device itself injects. What must hold whatever the machine does is an
//! error if it does not: no wrong byte, maps that say what is there, nothing twice, the share that arrives at 1 % loss. What
//! depends on the machine is only told. The long form writes `docs/results`.

use crate::programs::{self, INSIDE};
use crate::{Result, sh};
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Longest time of one measurement.
const LIMIT: Duration = Duration::from_secs(180);

/// Least share that has to arrive of 1 MiB Write-Records in path-MTU datagrams at 1 % loss.
const ARRIVES: f64 = 0.985;

/// How far the shares with loss in the network and with injected loss may be apart.
const AGREE: f64 = 0.005;

/// Place of the robust mode among those that are measured under loss.
const ROBUST: usize = 1;

/// The sizes of figures 6.4 and 6.5.
const SIZES: &str = "1,64,1K,2K,16K,32K,64K,256K,512K,1M,4M";

/// One line of the figures: what it is called, the options, whether RC travels over UDP.
const LINES: [(&str, &str, bool); 12] = [
    ("RC Send", "-t rc -o send", false),
    ("RC Write", "-t rc -o write", false),
    ("RC Read", "-t rc -o read", false),
    ("UD Send", "-t ud -o send", false),
    ("UD Write-Record", "-t ud -o write-record", false),
    ("UD Read", "-t ud -o read", false),
    ("RD Send", "-t rd -o send", false),
    ("RD Write-Record", "-t rd -o write-record", false),
    ("RD Read", "-t rd -o read", false),
    ("RC/UDP Send", "-t rc -o send", true),
    ("RC/UDP Write", "-t rc -o write", true),
    ("RC/UDP Read", "-t rc -o read", true),
];

/// What is run.
#[derive(Debug, Default)]
struct Options {
    short: bool,
    only: Option<String>,
}

/// Values of one size by the name of their column.
type Row = BTreeMap<String, f64>;

/// Where the two ends are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Loopback,
    Net,
}

/// The device's tool, and what it has said.
struct Lab {
    anywarp: PathBuf,
    work: PathBuf,
    /// All values, for the file.
    csv: String,
    /// What must not be.
    failures: Vec<String>,
}

pub(crate) fn run(arguments: &[&str]) -> Result {
    let mut options = Options::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "--short" => options.short = true,
            "--only" => {
                let part = rest
                    .next()
                    .ok_or("--only takes a part: latency, bandwidth, loss, reliable")?;
                options.only = Some((*part).to_owned());
            }
            other => return Err(format!("experiments: {other}: no such option").into()),
        }
    }
    if !sh::dist().join("bin/anywarp").exists() {
        return Err("target/dist is not there: run `cargo xtask dist` first".into());
    }
    if env::var_os(INSIDE).is_none() {
        return programs::in_namespaces("experiments", arguments);
    }
    let mut lab = Lab::new()?;
    let mut page = String::new();
    let wanted = |part: &str| options.only.as_ref().is_none_or(|only| only == part);
    for (part, make) in [
        ("latency", latency as fn(&mut Lab, bool) -> Result<String>),
        ("bandwidth", bandwidth),
        ("loss", loss),
        ("reliable", reliable),
    ] {
        if wanted(part) {
            let text = make(&mut lab, options.short)?;
            println!("{text}");
            page.push_str(&text);
            if !options.short {
                let folder = sh::root().join("docs/results");
                fs::create_dir_all(&folder)?;
                let head = format!(
                    "<!-- made by `cargo xtask experiments --only {part}` -->\n{}",
                    machine()
                );
                fs::write(
                    folder.join(format!("{part}.md")),
                    text.replacen("\n\n", &format!("\n\n{head}\n"), 1),
                )?;
                fs::write(
                    folder.join(format!("{part}.csv")),
                    std::mem::take(&mut lab.csv),
                )?;
            }
        }
    }
    if page.is_empty() {
        return Err("no part has such a name: latency, bandwidth, loss, reliable".into());
    }
    if lab.failures.is_empty() {
        return Ok(());
    }
    Err(lab.failures.join("\n").into())
}

/// The machine, in a line.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("an unknown processor", |(_, name)| name);
    let load = read("/proc/loadavg");
    format!(
        "Machine: {cpu}, {} processors, Linux {}, load {} when this was written. MB/s are 10^6 bytes a second.\n",
        thread::available_parallelism().map_or(0, std::num::NonZero::get),
        read("/proc/sys/kernel/osrelease").trim(),
        load.split(' ').next().unwrap_or_default(),
    )
}

impl Lab {
    fn new() -> Result<Self> {
        const SCRIPT: &str = "set -e
mount -t tmpfs tmpfs /run
ip link set lo up
for host in client server; do ip netns add $host; ip -n $host link set lo up
    # Datagrams that stay incomplete fill what the kernel keeps for putting fragments together, for 30 s each: then it drops
    # all that are fragmented. Here they make room in time.
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
            failures: Vec::new(),
        })
    }

    /// A command on one of the two hosts.
    fn on(place: Place, host: &str, program: &std::path::Path) -> Command {
        match place {
            Place::Loopback => Command::new(program),
            Place::Net => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", host]).arg(program);
                command
            }
        }
    }

    /// Runs `anywarp TEST` at both ends with `words`; the rows of its table.
    fn measure(
        &mut self,
        place: Place,
        test: &str,
        words: &str,
        variables: &[(&str, &str)],
        note: &str,
    ) -> Result<Vec<Row>> {
        let port = programs::free_port()?.to_string();
        let csv = self.work.join("run.csv");
        let _not_there = fs::remove_file(&csv);
        let mut server = Self::on(place, "server", &self.anywarp);
        server
            .args([test, "--server", "-p", &port])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let mut server = Running(server.spawn()?);
        let said = first_line(&mut server.0, Duration::from_secs(10))?;
        if !said.contains("waiting on port") {
            return Err(format!("the server says: {said}").into());
        }
        let host = if place == Place::Net {
            FAR
        } else {
            "127.0.0.1"
        };
        let mut client = Self::on(place, "client", &self.anywarp);
        client
            .args([test, host, "-q", "-p", &port])
            .args(words.split(' '))
            .arg("--csv")
            .arg(&csv)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut client = Running(client.spawn()?);
        let stderr = client.0.stderr.take();
        let status = client.wait(LIMIT)?;
        let mut why = String::new();
        if let Some(mut stderr) = stderr {
            let _what_there_is = stderr.read_to_string(&mut why);
        }
        if status != Some(0) {
            self.failures
                .push(format!("{note} {test} {words}: {}", why.trim()));
        }
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

/// The address of the server behind the relay.
const FAR: &str = "10.78.0.2";

/// A program that ends with this value.
struct Running(Child);

impl Running {
    /// Its exit status, none when it had to be ended.
    fn wait(&mut self, limit: Duration) -> Result<Option<i32>> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status.code());
            }
            thread::sleep(programs::LOOK);
        }
        Ok(None)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _nothing_to_do = self.0.wait();
    }
}

/// The first line on standard error; the others go where ours go.
fn first_line(child: &mut Child, limit: Duration) -> Result<String> {
    let stderr = child.stderr.take().ok_or("no standard error")?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(stderr)
            .lines()
            .map_while(std::result::Result::ok)
        {
            if let Err(mpsc::SendError(line)) = sender.send(line) {
                eprintln!("{line}");
            }
        }
    });
    Ok(receiver
        .recv_timeout(limit)
        .map_err(|_| "the server says nothing")?)
}

/// The link between the two hosts, for as long as this value lives.
struct Link {
    relay: Running,
    stdin: Option<ChildStdin>,
}

impl Link {
    fn new(lab: &Lab, ppm: u32, delay_us: u32) -> Result<Self> {
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
        let mut relay = Running(relay.spawn()?);
        let stdin = relay.0.stdin.take();
        let mut up = String::new();
        let stdout = relay.0.stdout.take().ok_or("no standard output")?;
        BufReader::new(stdout).read_line(&mut up)?;
        if up.trim() != "up" {
            return Err("the relay does not start".into());
        }
        const SCRIPT: &str = "set -e
number=1
for host in client server; do
    ip -n $host link set dev wire mtu 1500 txqueuelen 65000 up
    ip -n $host addr add 10.78.0.$number peer 10.78.0.$((3 - number)) dev wire
    number=2
done";
        sh::run(Command::new("sh").args(["-c", SCRIPT]))?;
        Ok(Self { relay, stdin })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Its devices go with it.
        drop(self.stdin.take());
        let _ended = self.relay.wait(Duration::from_secs(5));
    }
}

fn get(row: &Row, name: &str) -> f64 {
    row.get(name).copied().unwrap_or(f64::NAN)
}

/// A number with about three digits.
fn digits(value: f64) -> String {
    match value {
        v if v.is_nan() => "–".to_owned(),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn say(size: f64) -> String {
    match size {
        s if s >= 1048576.0 => format!("{} MiB", s / 1048576.0),
        s if s >= 1024.0 => format!("{} KiB", s / 1024.0),
        s => format!("{s} B"),
    }
}

/// A table of one value: sizes down, lines across.
fn table(columns: &[(&str, Vec<Row>)], value: &str) -> String {
    let mut text = String::from("| size |");
    for (name, _) in columns {
        let _ = write!(text, " {name} |");
    }
    let _ = write!(text, "\n|---:|{}\n", "---:|".repeat(columns.len()));
    let sizes: Vec<f64> = columns
        .first()
        .map(|(_, rows)| rows.iter().map(|row| get(row, "size")).collect())
        .unwrap_or_default();
    for size in sizes {
        let _ = write!(text, "| {} |", say(size));
        for (_, rows) in columns {
            let row = rows
                .iter()
                .find(|row| (get(row, "size") - size).abs() < 0.5);
            let _ = write!(
                text,
                " {} |",
                row.map_or_else(|| "–".to_owned(), |row| digits(get(row, value)))
            );
        }
        text.push('\n');
    }
    text
}

/// By how much two lines differ, in percent, at the sizes that the thesis names.
fn ratios(columns: &[(&str, Vec<Row>)], value: &str, named: &[(&str, &str, f64, &str)]) -> String {
    let mut text = String::from("| | here | thesis |\n|---|---:|---:|\n");
    for (new, old, size, thesis) in named {
        let of = |name: &str| {
            let rows = columns
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, rows)| rows);
            rows.and_then(|rows| {
                rows.iter()
                    .find(|row| (get(row, "size") - size).abs() < 0.5)
            })
            .map_or(f64::NAN, |row| get(row, value))
        };
        let _ = writeln!(
            text,
            "| {new} against {old}, {} | {:+.1} % | {thesis} |",
            say(*size),
            (of(new) / of(old) - 1.0) * 100.0
        );
    }
    text
}

/// All lines of a figure.
fn figure(lab: &mut Lab, test: &str, words: &str) -> Result<Vec<(&'static str, Vec<Row>)>> {
    let mut columns = Vec::new();
    for (name, line, udp) in LINES {
        let variables: &[(&str, &str)] = if udp { &[("ANYWARP_RC", "udp")] } else { &[] };
        columns.push((
            name,
            lab.measure(
                Place::Loopback,
                test,
                &format!("{line} {words}"),
                variables,
                name,
            )?,
        ));
    }
    Ok(columns)
}

/// Figure 6.4.
fn latency(lab: &mut Lab, short: bool) -> Result<String> {
    let words = if short {
        "-s 1,2K,64K,1M -n 100 -r 1"
    } else {
        &format!("-s {SIZES} -n 1000 -d 0.08 -r 3")
    };
    let columns = figure(lab, "ping", words)?;
    Ok(format!(
        "# Latency\n\nFigure 6.4: one way, half of the round trip (Read: the whole), microseconds, median. Loopback, both ends \
         polling. `anywarp ping {words}` with `-t` and `-o` as the columns say; RC/UDP is RC with `ANYWARP_RC=udp`.\n\n{}\n{}",
        table(&columns, "median_us"),
        ratios(
            &columns,
            "median_us",
            &[
                ("UD Send", "RC Send", 64.0, "-15 % (27-28 against 33 µs)"),
                ("UD Write-Record", "RC Write", 64.0, "-15 %"),
                ("UD Send", "RC Send", 2048.0, "-18.1 %"),
                ("UD Write-Record", "RC Write", 2048.0, "-24.4 %"),
                ("UD Read", "RC Read", 2048.0, "-20.28 %"),
                ("UD Send", "RC Send", 32768.0, "slightly above 0"),
                ("UD Send", "RC Send", 262144.0, "below 0"),
            ]
        )
    ))
}

/// Figure 6.5.
fn bandwidth(lab: &mut Lab, short: bool) -> Result<String> {
    let words = if short {
        "-s 1K,64K,1M -d 0.1 -r 1"
    } else {
        &format!("-s {SIZES} -d 0.15 -r 3")
    };
    let columns = figure(lab, "blast", words)?;
    Ok(format!(
        "# Bandwidth\n\nFigure 6.5: what arrives, MB/s, median of the runs. Loopback, both ends polling, 16 requests \
         outstanding. `anywarp blast {words}` with `-t` and `-o` as the columns say; RC/UDP is RC with `ANYWARP_RC=udp`.\n\n{}\n\
         Share of the bytes that arrived, where less than all can:\n\n{}\n{}",
        table(&columns, "arrived_mb_s"),
        table(
            &columns
                .iter()
                .filter(|(name, _)| name.starts_with("UD"))
                .cloned()
                .collect::<Vec<_>>(),
            "delivered_share"
        ),
        ratios(
            &columns,
            "arrived_mb_s",
            &[
                ("UD Write-Record", "RC Write", 1024.0, "+188.8 %"),
                ("UD Send", "RC Send", 1024.0, "+193 %"),
                ("UD Send", "RC Send", 262144.0, "+33.4 %"),
                ("UD Write-Record", "RC Write", 524288.0, "+256 %"),
                ("UD Read", "RC Read", 1048576.0, "at most +76.1 %"),
            ]
        )
    ))
}

/// Figures 6.6 and 6.7.
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
            "robust, the end said 2 times more",
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
        "-s 64K,1M -n 60 --warmup 5 -r 1"
    } else {
        "-s 1K,64K,1M -d 0.5 --warmup 5 -r 1"
    };
    let faults = faults(lab)?;
    let mut text = format!(
        "# Loss\n\nFigures 6.6 and 6.7: what arrives, MB/s, and its share of what was sent, percent, at each rate of loss. \
         `network`: `tests/netlab/relay.c` between two network namespaces drops IP packets of 1500 bytes, each by itself, also \
         fragments; `injected`: the device drops datagrams instead (`ANYWARP_FAULTS=loss=…,seed=7`), on the same link without loss. `anywarp blast {words} --segment …`.\n\n"
    );
    if !faults {
        text.push_str(
            "This build has no `ANYWARP_FAULTS`: the network's loss alone was measured.\n\n",
        );
    }
    for segment in segments {
        let _ = writeln!(text, "## Datagrams: {segment}\n");
        let mut cells: BTreeMap<(usize, u64), Vec<String>> = BTreeMap::new();
        for &ppm in losses {
            let share = format!("{}", f64::from(ppm) / 1e6);
            let spec = format!("loss={share},seed=7");
            // What the thesis did not have is of interest where datagrams are lost one by one; and only there do the
            // network and the device lose the same.
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
                    let other = injected
                        .iter()
                        .find(|other| (get(other, "size") - size).abs() < 0.5);
                    bars(lab, &note, ppm, single && at == ROBUST, row, other);
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
            let mode = MODES
                .iter()
                .chain(&EXTRAS)
                .nth(at)
                .map_or("", |(mode, _)| mode);
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            let size = say(size as f64);
            let _ = writeln!(text, "| {mode} | {size} | {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    Ok(text)
}

/// What must hold on a path that loses: of large robust Write-Records in datagrams that the path carries whole.
fn bars(lab: &mut Lab, note: &str, ppm: u32, robust: bool, network: &Row, injected: Option<&Row>) {
    let size = get(network, "size");
    if ppm != 10_000 || !robust || size < 65536.0 {
        return;
    }
    let shares = [Some(network), injected].map(|row| row.map(|row| get(row, "delivered_share")));
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
    if get(network, "maps_checked") < 1.0 {
        lab.failures
            .push(format!("{note}, {size} bytes: no map was compared"));
    }
}

/// Whether this build injects faults.
fn faults(lab: &Lab) -> Result<bool> {
    Ok(sh::output(Command::new(&lab.anywarp).args(["run", "--help"]))?.contains("ANYWARP_FAULTS"))
}

/// Reliable datagrams beside the kernel's TCP and beside unreliable ones.
fn reliable(lab: &mut Lab, short: bool) -> Result<String> {
    let (seconds, runs) = if short { (1, 1) } else { (3, 3) };
    let mut text = String::from(
        "# Reliable datagrams\n\n`anywarp blast -t rd -o write-record -s 64K --depth 64`: every message compared, exactly once. The \
         kernel's TCP, with the congestion control that the machine has, over the same relay, one after the other in each run; \
         MB/s at the receiver, median of the runs.\n\n| loss | round trip | RD | kernel's TCP | RD / TCP |\n|---:|---:|---:|---:|---:|\n",
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
    for &(ppm, delay) in paths {
        let link = Link::new(lab, ppm, delay)?;
        let (mut rd, mut tcp) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            let words =
                format!("-t rd -o write-record -s 64K --depth 64 --warmup 0 -d {seconds} -r 1");
            let note = format!("loss {} round trip {} us", f64::from(ppm) / 1e6, 2 * delay);
            let rows = lab.measure(Place::Net, "blast", &words, &[], &note)?;
            for row in &rows {
                rd.push(get(row, "arrived_mb_s"));
                // Lost or doubled is wrong, and the tool says so; here, that all of it came.
                if (get(row, "delivered_share") - 1.0).abs() > 1e-9 {
                    lab.failures.push(format!(
                        "{note}: {} of what was sent arrives",
                        get(row, "delivered_share")
                    ));
                }
            }
            tcp.push(tcp_rate(seconds)?);
        }
        drop(link);
        let (rd, tcp) = (median(rd), median(tcp));
        let _ = writeln!(
            text,
            "| {} % | {} ms | {} | {} | {:.2} |",
            f64::from(ppm) / 1e4,
            f64::from(2 * delay) / 1e3,
            digits(rd),
            digits(tcp),
            rd / tcp
        );
    }
    if !short {
        text.push_str("\nOn a clean path beside UD, in turn; MB/s, median of five:\n\n| path | size | UD | RD | RD / UD |\n|---|---:|---:|---:|---:|\n");
        for (place, name) in [(Place::Loopback, "loopback"), (Place::Net, "relay")] {
            let link = if place == Place::Net {
                Some(Link::new(lab, 0, 0)?)
            } else {
                None
            };
            for size in ["1K", "64K", "1M"] {
                let (mut ud, mut rd) = (Vec::new(), Vec::new());
                for _ in 0..5 {
                    for (transport, rates) in [("ud", &mut ud), ("rd", &mut rd)] {
                        let words = format!(
                            "-t {transport} -o write-record -s {size} --depth 64 -d 0.5 -r 1"
                        );
                        let rows =
                            lab.measure(place, "blast", &words, &[], &format!("clean {name}"))?;
                        rates.extend(rows.iter().map(|row| get(row, "arrived_mb_s")));
                    }
                }
                let (ud, rd) = (median(ud), median(rd));
                let _ = writeln!(
                    text,
                    "| {name} | {size}iB | {} | {} | {:.2} |",
                    digits(ud),
                    digits(rd),
                    rd / ud
                );
            }
            drop(link);
        }
    }
    text.push('\n');
    Ok(text)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What the kernel's TCP carries over the link, MB/s.
fn tcp_rate(seconds: u64) -> Result<f64> {
    let own = env::current_exe()?;
    let port = programs::free_port()?.to_string();
    let mut server = Lab::on(Place::Net, "server", &own);
    let mut server = Running(
        server
            .args(["experiments-tcp", "take", &port])
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("no standard output")?).lines();
    lines.next().ok_or("the receiver does not start")??;
    let mut client = Lab::on(Place::Net, "client", &own);
    let mut client = Running(
        client
            .args(["experiments-tcp", "give", &port, &seconds.to_string()])
            .spawn()?,
    );
    client.wait(LIMIT)?;
    let rate = lines.next().ok_or("the receiver says nothing")??;
    Ok(rate.parse()?)
}

/// An end of the kernel's TCP: `take PORT` or `give PORT SECONDS`.
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
