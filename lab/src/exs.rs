//! `cargo lab exs`: measures extended sockets, verbs, rsockets and plain TCP, and checks the ratios.
//!
//! Each round runs every program once, so that other load on the machine affects all of them. A ratio is computed from two
//! values of one round, and the median over the rounds is checked.

use crate::process::Process;
use crate::programs::{self, INSIDE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use xtask::{Result, sh};

/// Options of `cargo lab exs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run one round with few messages, compare all bytes, and check no ratios.
    #[arg(long)]
    short: bool,
    /// Number of rounds.
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: usize,
    /// Write the table to docs/results/exs.md.
    #[arg(long)]
    write: bool,
}

/// The time limit of a program.
const LIMIT: Duration = Duration::from_secs(60);

type Variable = (&'static str, &'static str);

const TCP: Variable = ("ANYWARP_CARRIER", "tcp");

/// A program of the table.
struct Row {
    name: &'static str,
    /// The arguments after `exs-ttcp --self --json`, or a command with the placeholders `{port}`, `{count}` and `{client}`.
    command: &'static str,
    kind: Kind,
    /// The number of messages in one run.
    count: u32,
    /// The environment variable of both ends that selects the transport. `None`: the default, which is shared memory on one host.
    transport: Option<Variable>,
}

impl Row {
    /// The same row with another name, over another transport.
    const fn over(self, transport: Variable, name: &'static str) -> Self {
        Self {
            name,
            transport: Some(transport),
            ..self
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `exs-ttcp`: MiB/s, or µs of a ping.
    Exs,
    /// perftest: MiB/s in column 4.
    Bandwidth,
    /// perftest: µs in column 5, the median.
    Latency,
    /// `rstream`: Gbit/s.
    Rstream,
}

const ROWS: &[Row] = &[
    exs("exs normal 64 KiB", "--mode normal --size 64K", 8000),
    exs(
        "exs normal 64 KiB, one buffer",
        "--mode normal --size 64K --buffers 1",
        8000,
    ),
    NORMAL,
    exs(
        "exs normal 1 MiB, stream",
        "--mode normal --size 1M --stream",
        800,
    ),
    exs(
        "exs normal 1 MiB, stream, one buffer",
        "--mode normal --size 1M --stream --buffers 1",
        800,
    ),
    exs("exs immediate 64 KiB", "--mode immediate --size 64K", 8000),
    exs(
        "exs persistent send 1 MiB",
        "--mode persistent-send --size 1M",
        800,
    ),
    exs(
        "exs persistent receive 1 MiB",
        "--mode persistent-recv --size 1M",
        800,
    ),
    ONE_NORMAL,
    exs(
        "exs persistent send 1 MiB, one buffer",
        "--mode persistent-send --size 1M --buffers 1",
        800,
    ),
    exs(
        "exs persistent receive 1 MiB, one buffer",
        "--mode persistent-recv --size 1M --buffers 1",
        800,
    ),
    exs("exs transaction 1 MiB", "--mode transaction --size 1M", 800),
    exs("plain TCP 64 KiB", "--mode tcp --size 64K", 8000),
    exs("plain TCP 1 MiB", "--mode tcp --size 1M", 800),
    READ_BW,
    FOUR_READS,
    WRITE_BW,
    FOUR_WRITES,
    Row {
        name: "rstream 64 KiB",
        command: "rstream -p {port} -S 65536 -I 1 -C {count} {client}",
        kind: Kind::Rstream,
        count: 8000,
        transport: None,
    },
    Row {
        name: "rstream 1 MiB",
        command: "rstream -p {port} -S 1048576 -I 1 -C {count} {client}",
        kind: Kind::Rstream,
        count: 800,
        transport: None,
    },
    NORMAL_PING,
    READ_PING,
    IMMEDIATE_PING,
    PERSISTENT_PING,
    exs(
        "plain TCP 64 B, one way",
        "--ping --mode tcp --size 64",
        20000,
    ),
    SEND_LAT,
    WRITE_LAT,
    // These rows use the transport of connections between two hosts.
    NORMAL.over(TCP, "exs normal 1 MiB, TCP"),
    ONE_NORMAL.over(TCP, "exs normal 1 MiB, one buffer, TCP"),
    READ_BW.over(TCP, "ib_read_bw 1 MiB, TCP"),
    FOUR_READS.over(TCP, "ib_read_bw 1 MiB, four buffers, TCP"),
    NORMAL_PING.over(TCP, "exs normal 64 B, one way, TCP"),
    READ_PING.over(TCP, "exs read 64 B, one way, TCP"),
    IMMEDIATE_PING.over(TCP, "exs immediate 64 B, one way, TCP"),
    PERSISTENT_PING.over(TCP, "exs persistent receive 64 B, one way, TCP"),
    SEND_LAT.over(TCP, "ib_send_lat 64 B, TCP"),
    WRITE_LAT.over(TCP, "ib_write_lat 64 B, TCP"),
];

const NORMAL: Row = exs("exs normal 1 MiB", "--mode normal --size 1M", 800);
/// `ib_read_bw` and `ib_write_bw` have one buffer for each queue pair, however many messages are in flight, and `rstream` has one buffer.
/// `exs-ttcp` has by default one buffer for each message in flight, and more buffers need more of the processor's cache. So bounds
/// compare these programs with rows of `exs-ttcp` that have as many buffers.
const ONE_NORMAL: Row = exs(
    "exs normal 1 MiB, one buffer",
    "--mode normal --size 1M --buffers 1",
    800,
);
const NORMAL_PING: Row = exs(
    "exs normal 64 B, one way",
    "--ping --mode normal --size 64",
    20000,
);
/// Normal sends without advertised receives, so that the receiver transfers all data with RDMA Reads, as in Russell's paper (see
/// docs/exs.md).
const READ_PING: Row = exs(
    "exs read 64 B, one way",
    "--ping --mode read --size 64",
    20000,
);
const IMMEDIATE_PING: Row = exs(
    "exs immediate 64 B, one way",
    "--ping --mode immediate --size 64",
    20000,
);
const PERSISTENT_PING: Row = exs(
    "exs persistent receive 64 B, one way",
    "--ping --mode persistent-recv --size 64",
    20000,
);
const READ_BW: Row = perftest(
    "ib_read_bw 1 MiB",
    "ib_read_bw -d anywarp0 -F -p {port} -s 1048576 -n {count} {client}",
    Kind::Bandwidth,
    800,
);
/// This row and [`FOUR_WRITES`] have four queue pairs, and so four buffers, like the rows of `exs-ttcp` with its four messages in flight.
const FOUR_READS: Row = perftest(
    "ib_read_bw 1 MiB, four buffers",
    "ib_read_bw -d anywarp0 -F -p {port} -q 4 -s 1048576 -n {count} {client}",
    Kind::Bandwidth,
    200,
);
const WRITE_BW: Row = perftest(
    "ib_write_bw 1 MiB",
    "ib_write_bw -d anywarp0 -F -p {port} -s 1048576 -n {count} {client}",
    Kind::Bandwidth,
    800,
);
const FOUR_WRITES: Row = perftest(
    "ib_write_bw 1 MiB, four buffers",
    "ib_write_bw -d anywarp0 -F -p {port} -q 4 -s 1048576 -n {count} {client}",
    Kind::Bandwidth,
    200,
);
const SEND_LAT: Row = perftest(
    "ib_send_lat 64 B",
    "ib_send_lat -d anywarp0 -F -p {port} -s 64 -n {count} {client}",
    Kind::Latency,
    20000,
);
const WRITE_LAT: Row = perftest(
    "ib_write_lat 64 B",
    "ib_write_lat -d anywarp0 -F -p {port} -s 64 -n {count} {client}",
    Kind::Latency,
    20000,
);

const fn exs(name: &'static str, command: &'static str, count: u32) -> Row {
    Row {
        name,
        command,
        kind: Kind::Exs,
        count,
        transport: None,
    }
}

const fn perftest(name: &'static str, command: &'static str, kind: Kind, count: u32) -> Row {
    Row {
        name,
        command,
        kind,
        count,
        transport: None,
    }
}

/// A bound for the ratio of a row to another one.
struct Bound {
    row: &'static str,
    to: &'static str,
    limit: Limit,
}

enum Limit {
    AtLeast(f64),
    AtMost(f64),
    /// The ratio is shown and not checked.
    Shown,
}

const BOUNDS: &[Bound] = &[
    bound(
        "exs normal 1 MiB",
        "ib_read_bw 1 MiB, four buffers",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs normal 1 MiB, one buffer",
        "ib_read_bw 1 MiB",
        Limit::AtLeast(0.95),
    ),
    bound("exs normal 1 MiB", "plain TCP 1 MiB", Limit::AtLeast(0.9)),
    bound(
        "exs persistent send 1 MiB",
        "ib_read_bw 1 MiB, four buffers",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs persistent send 1 MiB, one buffer",
        "ib_read_bw 1 MiB",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs persistent receive 1 MiB",
        "ib_write_bw 1 MiB, four buffers",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs persistent receive 1 MiB, one buffer",
        "ib_write_bw 1 MiB",
        Limit::AtLeast(0.95),
    ),
    bound("exs normal 64 KiB", "rstream 64 KiB", Limit::Shown),
    bound(
        "exs normal 64 KiB, one buffer",
        "rstream 64 KiB",
        Limit::AtLeast(1.0),
    ),
    bound("exs normal 1 MiB", "rstream 1 MiB", Limit::Shown),
    bound(
        "exs normal 1 MiB, one buffer",
        "rstream 1 MiB",
        Limit::AtLeast(1.0),
    ),
    bound("exs normal 1 MiB, stream", "rstream 1 MiB", Limit::Shown),
    bound(
        "exs normal 1 MiB, stream, one buffer",
        "rstream 1 MiB",
        Limit::AtLeast(1.0),
    ),
    bound(
        "exs immediate 64 B, one way",
        "ib_send_lat 64 B",
        Limit::AtMost(1.25),
    ),
    bound(
        "exs persistent receive 64 B, one way",
        "ib_write_lat 64 B",
        Limit::AtMost(1.15),
    ),
    bound(
        "exs normal 64 B, one way",
        "ib_send_lat 64 B",
        Limit::AtMost(2.6),
    ),
    bound(
        "exs normal 1 MiB, TCP",
        "ib_read_bw 1 MiB, four buffers, TCP",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs normal 1 MiB, one buffer, TCP",
        "ib_read_bw 1 MiB, TCP",
        Limit::AtLeast(0.95),
    ),
    bound(
        "exs immediate 64 B, one way, TCP",
        "ib_send_lat 64 B, TCP",
        Limit::AtMost(1.25),
    ),
    bound(
        "exs persistent receive 64 B, one way, TCP",
        "ib_write_lat 64 B, TCP",
        Limit::AtMost(1.15),
    ),
    bound(
        "exs normal 64 B, one way, TCP",
        "ib_send_lat 64 B, TCP",
        Limit::AtMost(2.6),
    ),
    bound(
        "exs immediate 64 B, one way",
        "plain TCP 64 B, one way",
        Limit::Shown,
    ),
    bound(
        "exs transaction 1 MiB",
        "exs persistent send 1 MiB",
        Limit::Shown,
    ),
];

const fn bound(row: &'static str, to: &'static str, limit: Limit) -> Bound {
    Bound { row, to, limit }
}

/// The most processor time, in percent, that the sender may use in mode `persistent-send`, without that of the device.
const SENDER: f64 = 1.0;

/// The results of all runs.
#[derive(Default)]
struct Figures {
    /// MiB/s or µs by row, one value for each round.
    values: BTreeMap<&'static str, Vec<f64>>,
    /// The processor time of client and server in percent, including that of the device.
    cpu: BTreeMap<&'static str, Vec<(f64, f64)>>,
    /// The processor time of the sender in mode `persistent-send`, in percent, without that of the device.
    sender: Vec<f64>,
    /// The number of bytes that the library copied in modes that should not copy.
    copied: u64,
}

/// Measures, prints the table, and checks the bounds.
pub(crate) fn run(options: &Options) -> Result {
    if env::var_os(INSIDE).is_none() {
        return programs::in_namespaces();
    }
    sh::run(Command::new("ip").args(["link", "set", "lo", "up"]))?;
    let rounds = if options.short {
        1
    } else {
        options.rounds.max(1)
    };
    let mut figures = Figures::default();
    let mut port = 18600;
    for _ in 0..rounds {
        for row in ROWS {
            port += 1;
            let count = if options.short {
                row.count / 40 + 20
            } else {
                row.count
            };
            let measured = measure(row, port, count, options.short, &mut figures);
            let value = measured.map_err(|e| format!("{}: {e}", row.name))?;
            if value.is_nan() || value <= 0.0 {
                return Err(format!("{}: measures {value}", row.name).into());
            }
            figures.values.entry(row.name).or_default().push(value);
        }
    }
    if options.short {
        simultaneous_pings()?;
        rust_examples()?;
    }
    let load = fs::read_to_string("/proc/loadavg")?;
    let load = load.split_whitespace().next().unwrap_or_default();
    let (mut text, missed) = table(&figures, rounds);
    writeln!(text, "\nLoad of the machine at the end: {load}.")?;
    println!("{text}");
    if options.write {
        fs::write(
            sh::root().join("docs/results/exs.md"),
            format!("{HEAD}{text}"),
        )?;
    }
    if figures.copied > 0 {
        return Err(format!(
            "{} bytes were copied in modes that do not copy",
            figures.copied
        )
        .into());
    }
    if options.short || missed.is_empty() {
        return Ok(());
    }
    Err(format!("bounds that are not met: {}", missed.join(", ")).into())
}

const HEAD: &str = "# Extended sockets, verbs, rsockets and TCP\n\n\
    `cargo lab exs --write` generates this page. Both ends are on one machine. The device has its default configuration, in which \
    reliable connections of one host use shared memory. The rows with TCP use the transport of connections between hosts \
    (`ANYWARP_CARRIER=tcp`); rdma_cm does not connect over UDP. A ratio compares two figures of one round; the table has the medians. CPU is the \
    processor time of client / server, including the device in these processes.\n\n";

/// Returns the table, and the bounds that are not met.
fn table(figures: &Figures, rounds: usize) -> (String, Vec<String>) {
    let mut text = format!("Rounds: {rounds}.\n\n| what | median | CPU |\n| --- | ---: | ---: |\n");
    for row in ROWS {
        let values = figures.values.get(row.name).map_or(&[][..], Vec::as_slice);
        let unit = if is_latency(row) { "µs" } else { "MiB/s" };
        let cpu = figures.cpu.get(row.name).map_or_else(String::new, |all| {
            let (client, server): (Vec<_>, Vec<_>) = all.iter().copied().unzip();
            format!("{:.0} % / {:.0} %", median(&client), median(&server))
        });
        let _infallible = writeln!(
            text,
            "| {} | {:.2} {unit} | {cpu} |",
            row.name,
            median(values)
        );
    }
    text.push_str("\n| ratio | median | bound |\n| --- | ---: | --- |\n");
    let mut missed = Vec::new();
    for bound in BOUNDS {
        let of = |name| figures.values.get(name).map_or(&[][..], Vec::as_slice);
        let ratios: Vec<f64> = of(bound.row)
            .iter()
            .zip(of(bound.to))
            .map(|(a, b)| a / b)
            .collect();
        let ratio = median(&ratios);
        let (met, shown) = match bound.limit {
            Limit::AtLeast(limit) => (ratio >= limit, format!(">= {limit}")),
            Limit::AtMost(limit) => (ratio <= limit, format!("<= {limit}")),
            Limit::Shown => (true, String::new()),
        };
        let verdict = if met { "" } else { ", not met" };
        let name = format!("{} : {}", bound.row, bound.to);
        let _infallible = writeln!(text, "| {name} | {ratio:.2} | {shown}{verdict} |");
        if !met {
            missed.push(name);
        }
    }
    let sender = median(&figures.sender);
    let verdict = if sender <= SENDER { "" } else { ", not met" };
    let _infallible = writeln!(
        text,
        "| processor time of a persistent send's program and library, without the device | {sender:.2} % | <= {SENDER} %{verdict} |"
    );
    if sender > SENDER {
        missed.push("processor time of the sender".to_owned());
    }
    let _infallible = writeln!(
        text,
        "| bytes copied by the library in normal and persistent modes | {} | 0 |",
        figures.copied
    );
    (text, missed)
}

fn is_latency(row: &Row) -> bool {
    row.kind == Kind::Latency || row.command.contains("--ping")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs several pings at the same time, each with one message in flight. The processes compete for the processors and are preempted
/// often. So if an end used one buffer for both the current message and the next one, it would find wrong data in a message.
fn simultaneous_pings() -> Result {
    let ttcp = sh::dist().join("bin/exs-ttcp");
    let start = |_| {
        let mut command = on_device(&ttcp.to_string_lossy(), Some(TCP));
        let args = "--self --ping --mode immediate --size 1 --in-flight 1 --count 5000";
        Process::start(command.args(args.split_whitespace()))
    };
    let pings: Vec<Process> = (0..4).map(start).collect::<Result<_>>()?;
    for ping in pings {
        finish(ping)?;
    }
    Ok(())
}

/// Builds and runs the examples of the Rust crate, which test themselves.
fn rust_examples() -> Result {
    const IWARP: Variable = ("ANYWARP_FACE", "iwarp");
    let access: &[&str] = &["no peer may write to the buffers"];
    let echo: &[&str] = &["4 messages", "memory was read and written"];
    sh::run(sh::cargo().args([
        "build",
        "--quiet",
        "--package=anywarp-exs-async",
        "--examples",
    ]))?;
    for (name, face, expected) in [
        ("echo", None, echo),
        ("echo", Some(IWARP), echo),
        ("access", None, access),
        ("access", Some(IWARP), access),
    ] {
        let program = sh::target().join("debug/examples").join(name);
        let mut command = on_device(&program.to_string_lossy(), face);
        let output = finish(Process::start(&mut command)?)?;
        if !expected.iter().all(|text| output.contains(text)) {
            return Err(format!("unexpected output of the example {name}: {output}").into());
        }
    }
    Ok(())
}

/// Returns a command that runs a program with the device. `transport`: an environment variable that configures the device; for most
/// programs it selects the transport.
fn on_device(program: &str, transport: Option<Variable>) -> Command {
    let mut command = Command::new(sh::dist().join("bin/anywarp"));
    command.envs(transport);
    command
        .args(["run", "--device-ip", "127.0.0.1", "--"])
        .arg(program);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a row once. Returns MiB/s or µs.
fn measure(row: &Row, port: u16, count: u32, verify: bool, figures: &mut Figures) -> Result<f64> {
    if row.kind == Kind::Exs {
        let ttcp = sh::dist().join("bin/exs-ttcp");
        let mut command = on_device(&ttcp.to_string_lossy(), row.transport);
        command.args(["--self", "--json", "--count", &count.to_string()]);
        command.args(row.command.split_whitespace());
        if verify {
            command.arg("--verify");
        }
        let text = finish(Process::start(&mut command)?)?;
        return exs_figures(row, &text, figures);
    }
    let words = |client: &str| {
        row.command
            .replace("{port}", &port.to_string())
            .replace("{count}", &count.to_string())
            .replace("{client}", client)
    };
    let start = |line: &str| {
        let mut words = line.split_whitespace();
        let mut command = on_device(words.next().unwrap_or_default(), row.transport);
        Process::start(command.args(words))
    };
    let server = start(&words(""))?;
    await_listener(port)?;
    let client = if row.kind == Kind::Rstream {
        "-s 127.0.0.1"
    } else {
        "127.0.0.1"
    };
    let text = finish(start(&words(client))?)?;
    finish(server)?;
    figure(row.kind, &text).ok_or_else(|| format!("not understood: {text}").into())
}

/// Returns the output of a program, which must succeed.
fn finish(process: Process) -> Result<String> {
    let output = process.output(LIMIT)?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {error}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until a program listens on a port, of the system or of the device.
fn await_listener(port: u16) -> Result {
    let until = Instant::now() + Duration::from_secs(10);
    let wanted = format!(":{port:04X} ");
    while Instant::now() < until {
        for list in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let text = fs::read_to_string(list).unwrap_or_default();
            if text
                .lines()
                .any(|l| l.contains(&wanted) && l.contains(" 0A "))
            {
                return Ok(());
            }
        }
        sleep(Duration::from_millis(5));
    }
    Err(format!("no server listens on port {port}").into())
}

fn exs_figures(row: &Row, text: &str, figures: &mut Figures) -> Result<f64> {
    let line = text.lines().find(|line| line.starts_with('{'));
    let value: Value = serde_json::from_str(line.ok_or("the program printed no JSON")?)?;
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    let cpu = number("cpu_client_percent").zip(number("cpu_server_percent"));
    figures.cpu.entry(row.name).or_default().extend(cpu);
    if row.command.contains("persistent-send") {
        let device = number("device_client_percent");
        let sender = number("cpu_client_percent").zip(device);
        figures
            .sender
            .extend(sender.map(|(all, device)| all - device));
    }
    if !row.command.contains("immediate") && !row.command.contains("--stream") {
        for end in ["copied_client", "copied_server"] {
            figures.copied += value.get(end).and_then(Value::as_u64).ok_or("no counter")?;
        }
    }
    let median = value.get("latency_us").and_then(|us| us.get("median"));
    let figure = median
        .and_then(Value::as_f64)
        .or_else(|| number("mib_per_s"));
    figure.ok_or_else(|| format!("not understood: {text}").into())
}

/// Returns the value in the output of perftest or of `rstream`, or `None` if there is none.
fn figure(kind: Kind, text: &str) -> Option<f64> {
    if kind == Kind::Rstream {
        // Columns: name bytes xfers iters total time Gb/sec usec/xfer
        let line = text
            .lines()
            .rev()
            .find(|line| line.split_whitespace().count() >= 8)?;
        let gigabits: f64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
        return Some(gigabits * 1e9 / 8.0 / f64::from(1 << 20));
    }
    let column = if kind == Kind::Bandwidth { 3 } else { 4 };
    let line = text
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"))
        .nth(1)?;
    line.split_whitespace().nth(column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_the_programs_are_found() {
        let bandwidth = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                         65536      1000             5000.00            4999.50              0.08\n";
        assert_eq!(figure(Kind::Bandwidth, bandwidth), Some(4999.5));
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
                       2       1000          3.00           40.00        3.50             3.60\n";
        assert_eq!(figure(Kind::Latency, latency), Some(3.5));
        let stream = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\n\
                      custom    64k     1k      1       62m         0.03s     8.388608     32.0\n";
        assert_eq!(figure(Kind::Rstream, stream), Some(1000.0));
        assert_eq!(figure(Kind::Rstream, "refused\n"), None);
    }

    #[test]
    fn each_target_names_existing_rows() {
        for bound in BOUNDS {
            for name in [bound.row, bound.to] {
                assert!(ROWS.iter().any(|row| row.name == name), "{name}");
            }
        }
    }
}
