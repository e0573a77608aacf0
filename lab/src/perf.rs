//! `cargo lab perf`: runs `anywarp ping` and `anywarp blast` briefly with every type of queue pair,
//! operation and way to post and poll. It also tests interrupted runs, and connections to ports of
//! other programs. The results are only compared with wide limits: the runs are too short for
//! measurements, which `cargo lab bench` and `cargo lab experiments` make.

use std::io::{BufRead, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::process::Process;
use xtask::{Result, sh};

/// The operations of each type of queue pair.
const OPERATIONS: [(&str, &[&str]); 4] = [
    ("rc", &["send", "send-imm", "write", "write-imm", "read"]),
    ("uc", &["send", "send-imm", "write", "write-imm"]),
    ("ud", &["send", "send-imm", "write-record", "read"]),
    (
        "rd",
        &[
            "send",
            "send-imm",
            "write",
            "write-imm",
            "write-record",
            "read",
        ],
    ),
];

/// Sets of options. Each entry tells whether the set is for blast only, and whether it is for all
/// operations except Reads.
const WAYS: [(bool, bool, &str); 5] = [
    (false, false, "-s 64,5000"),
    (false, false, "-s 64,5000 --event"),
    (false, true, "-s 5000 --gather 3"),
    (false, true, "-s 64 --inline"),
    (true, false, "-s 64,5000 --list 4 --signal-every 3 --event"),
];

/// Lower bounds for the rate of blast in MB/s, for the best of a few runs: a tenth or less of what two slow processors
/// achieve. A lower value means that one end waits for a processor or for a timer.
const LEAST_RATES: [(&str, &str, u32); 9] = [
    ("tcp", "-t rc -o write -s 1K --list 16", 80),
    ("tcp", "-t rc -o send -s 64", 4),
    ("tcp", "-t rc -o write -s 64K", 400),
    ("tcp", "-t rc -o read -s 64K", 400),
    ("tcp", "-t ud -o send -s 1K", 100),
    ("tcp", "-t rd -o send -s 1K", 40),
    ("tcp", "-t ud -o write-record -s 1M", 500),
    ("auto", "-t rc -o send -s 64", 8),
    ("auto", "-t rc -o write -s 64K", 500),
];

/// Rows of `anywarp bench` with `ib_send_lat`, which polls its completion queue, and `ib_write_lat`, which polls its memory for
/// the peer's Write.
const MEMORY_POLLED: [&str; 2] = ["lat-64k", "shm-64k"];
/// The limit for the time of a Write to a program that polls its memory, as a multiple of the time
/// of a Send. If each Write waits for the device's own thread, the multiple is 9 over TCP, and 20
/// over shared memory.
const MEMORY_POLLED_MAX: f64 = 4.0;

/// The time limit of a short run.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// The time limit for the start of a server, and for the exit of an end after an interrupt or with a wrong port.
const SOON: Duration = Duration::from_secs(8);

pub(crate) fn run() -> Result {
    let mut tally = sh::Tally::default();
    for command in ["ping", "blast"] {
        for (kind, operations) in OPERATIONS {
            let name = format!("{command} {kind}");
            tally.report(&name, every_way(command, kind, operations));
        }
    }
    for (carrier, words, least) in LEAST_RATES {
        tally.report(
            &format!("blast {words}, {carrier}"),
            reaches(carrier, words, least),
        );
    }
    tally.report("few buffers", few_buffers());
    for row in MEMORY_POLLED {
        tally.report(
            &format!("{row}: a program polls its memory"),
            polls_memory(row),
        );
    }
    tally.report("interrupted client", interrupted(true));
    tally.report("interrupted server", interrupted(false));
    tally.report("closed port", closed_port());
    tally.report(
        "foreign port",
        foreign_port(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    );
    tally.report("silent port", foreign_port(b""));
    tally.report("silent strangers", silent_strangers());
    for size in ["1,2", "64,1K"] {
        let name = format!("duplicates of {size}");
        tally.report(&name, duplicates(size));
    }
    tally.end("tests of ping and blast")
}

/// A running server, which is killed when the value is dropped.
struct Server {
    process: Process,
    port: u16,
}

impl Server {
    fn start(command: &str) -> Result<Self> {
        Self::start_over("auto", command)
    }

    fn start_over(carrier: &str, command: &str) -> Result<Self> {
        let mut server = anywarp();
        server
            .env("ANYWARP_CARRIER", carrier)
            .args([command, "--server", "--forever", "-p", "0"])
            .stderr(Stdio::piped())
            .stdout(Stdio::null());
        let mut process = Process::start(&mut server)?;
        let line = process.first_line(SOON, false)?;
        let port = waiting_port(&line)?;
        Ok(Self { process, port })
    }
}

/// Parses the port in the line that a server prints when it is ready.
pub(crate) fn waiting_port(line: &str) -> Result<u16> {
    let port = line.rsplit_once("waiting on port ");
    let port = port.and_then(|(_, port)| port.parse().ok());
    Ok(port.ok_or_else(|| format!("the server prints: {line}"))?)
}

fn anywarp() -> Command {
    let mut command = Command::new(sh::dist().join("bin/anywarp"));
    command
        .env("ANYWARP_ADDR", "127.0.0.1")
        .stdin(Stdio::null());
    command
}

fn client(command: &str, port: u16, words: &str) -> Result<Process> {
    Process::start(
        anywarp()
            .args([command, "-p", &port.to_string(), "127.0.0.1"])
            .args(words.split(' '))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    )
}

fn every_way(command: &str, kind: &str, operations: &[&str]) -> Result {
    let server = Server::start(command)?;
    for operation in operations {
        // Only queue pairs of type RC are also connected by rdma_cm.
        let by_cm = (kind == "rc").then_some((false, false, "-s 64 --cm"));
        for (of_blast, of_sent, way) in WAYS.into_iter().chain(by_cm) {
            if (of_blast && command == "ping") || (of_sent && *operation == "read") {
                continue;
            }
            let mut words = format!("-t {kind} -o {operation} -n 60 --warmup 5 -r 1 -q {way}");
            if of_blast && kind == "rd" {
                words.push_str(" --unordered");
            }
            let output = client(command, server.port, &words)?.output(TIME_LIMIT)?;
            if !output.status.success() {
                let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(format!("{words}: {}: {stderr}", output.status).into());
            }
            let table = String::from_utf8_lossy(&output.stdout).into_owned();
            let sizes = if way.contains(',') { 2 } else { 1 };
            let rows = table.lines().filter(|line| line.starts_with(' '));
            // The first line contains the names of the columns.
            if rows.count() != sizes + 1 {
                return Err(
                    format!("{words}: the table has not one line for each size:\n{table}").into(),
                );
            }
        }
    }
    Ok(())
}

/// Checks that a rate is above its lower bound.
fn reaches(carrier: &str, words: &str, least: u32) -> Result {
    let server = Server::start_over(carrier, "blast")?;
    let csv = sh::target().join("perf-rate.csv");
    let mut client = anywarp();
    client
        .env("ANYWARP_CARRIER", carrier)
        .args(["blast", "-p", &server.port.to_string(), "127.0.0.1"])
        .args("-q -d 0.1 -r 5 --csv".split(' '))
        .arg(&csv)
        .args(words.split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = Process::start(&mut client)?.output(TIME_LIMIT)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {stderr}", output.status).into());
    }
    let table = std::fs::read_to_string(&csv)?;
    let mut lines = table.lines().map(|line| line.split(','));
    let names = lines.next().ok_or("no table")?;
    let most = names.zip(lines.next().ok_or("no line")?);
    let most = most.into_iter().find(|(name, _)| *name == "most_mb_s");
    let most: f64 = most.ok_or("the table has no column most_mb_s")?.1.parse()?;
    println!("      {most:.0} MB/s, at least {least}");
    if most < f64::from(least) {
        return Err(format!("{most} MB/s in the best of five runs").into());
    }
    Ok(())
}

/// Checks that the server ends in time although its few buffers are overwritten many times before it compares them.
fn few_buffers() -> Result {
    let server = Server::start_over("tcp", "blast")?;
    let words = "-t ud -o write-record -s 64 --buffers 8 -d 2 -r 1 -q";
    let output = client("blast", server.port, words)?.output(2 * TIME_LIMIT)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{words}: {}: {stderr}", output.status).into());
    }
    Ok(())
}

/// Checks that a program which polls its memory, and not its completion queue, gets the peer's Writes without a delay.
fn polls_memory(row: &str) -> Result {
    let json = sh::target().join("perf-memory.json");
    let mut bench = anywarp();
    bench
        .args(["bench", "--short", "--repeat", "3", "--only", row, "--json"])
        .arg(&json)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = Process::start(&mut bench)?.output(3 * TIME_LIMIT)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {stderr}", output.status).into());
    }
    let results: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
    let parties = results.pointer("/rows/0/parties");
    let parties = parties.and_then(|all| all.as_array()).ok_or("no parties")?;
    let median = |name: &str| {
        let is_it = |party: &&serde_json::Value| party.get("name").is_some_and(|n| n == name);
        parties.iter().find(is_it)?.get("median")?.as_f64()
    };
    let (Some(send), Some(write)) = (median("Send"), median("Write")) else {
        return Err(format!("{row} has no value for Send or Write").into());
    };
    println!("      Send {send:.1} µs, Write {write:.1} µs");
    if write > MEMORY_POLLED_MAX * send {
        return Err(format!("a Write takes {:.1} times as long as a Send", write / send).into());
    }
    Ok(())
}

/// On a link that duplicates and reorders datagrams each message must be counted once, even if it
/// is too short to contain its number.
fn duplicates(sizes: &str) -> Result {
    let server = Server::start("blast")?;
    let csv = sh::target().join("perf-duplicates.csv");
    let mut client = anywarp();
    client
        .env("ANYWARP_FAULTS", "dup=30%,reorder=10%,summary=off")
        .args(["blast", "-p", &server.port.to_string(), "127.0.0.1"])
        .args(format!("-t ud -o send -n 20000 -r 2 -q -s {sizes} --csv").split(' '))
        .arg(&csv)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = Process::start(&mut client)?.output(TIME_LIMIT)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {stderr}", output.status).into());
    }
    let table = std::fs::read_to_string(&csv)?;
    let mut lines = table.lines();
    let names: Vec<&str> = lines.next().ok_or("no table")?.split(',').collect();
    let mut rows = 0;
    for line in lines {
        let value = |column: &str| -> Result<f64> {
            let at = names.iter().position(|name| *name == column);
            let value = at.and_then(|at| line.split(',').nth(at));
            Ok(value
                .ok_or_else(|| format!("no column {column}"))?
                .parse()?)
        };
        let (share, duplicates) = (value("delivered_share")?, value("duplicates")?);
        // A slow receiver may miss some messages, but none may count twice.
        let sound = (0.5..=1.0).contains(&share) && value("wrong")? == 0.0 && duplicates > 1000.0;
        if !sound {
            return Err(format!("too few or too many messages, or wrong ones: {line}").into());
        }
        rows += 1;
    }
    if rows != 2 {
        return Err(format!("{rows} rows").into());
    }
    Ok(())
}

/// Interrupts one end during a run: both must exit soon, and the results must be marked as incomplete.
fn interrupted(the_client: bool) -> Result {
    let mut server = Server::start("blast")?;
    let json = sh::target().join("perf-interrupted.json");
    let csv = json.with_extension("csv");
    let words = format!(
        "-t rd -o send -s 4K -d 60 -r 1 --json {} --csv {}",
        json.to_str().ok_or("the path is not UTF-8")?,
        csv.to_str().ok_or("the path is not UTF-8")?
    );
    let mut client = client("blast", server.port, &words)?;
    // The client prints its progress once the run has started.
    let mut stderr = client.stderr()?;
    let mut line = String::new();
    stderr.read_line(&mut line)?;
    if !line.contains("msgs=") {
        return Err(format!("not a line of progress: {line}").into());
    }
    let end = if the_client { &client } else { &server.process };
    end.signal(Signal::INT);
    let output = client.output(SOON)?;
    stderr.read_to_string(&mut line)?;
    let expected = if the_client { 130 } else { 1 };
    if output.status.code() != Some(expected) || !line.contains("interrupted") {
        return Err(format!("{}: {line}", output.status).into());
    }
    let written = std::fs::read_to_string(&json)?;
    if !written.contains("\"partial\": true") {
        return Err(format!("the results are not marked as partial: {written}").into());
    }
    let table = std::fs::read_to_string(&csv)?;
    let mut lines = table.lines();
    let marked = lines.next().is_some_and(|l| l.ends_with(",unfinished"))
        && lines.clone().all(|l| l.ends_with(",1"));
    // A server that has exited cannot report what it received.
    if !marked || lines.count() != usize::from(the_client) {
        return Err(format!("the table is not marked as unfinished: {table}").into());
    }
    if the_client {
        // The server must serve the next client.
        let next = "-t rd -o send -n 10 -r 1 -q";
        let output = self::client("blast", server.port, next)?.output(TIME_LIMIT)?;
        if !output.status.success() {
            return Err(format!("the next client failed: {}", output.status).into());
        }
        return Ok(());
    }
    server.process.status(SOON)?;
    Ok(())
}

/// Runs a client with a port on which no program listens.
fn closed_port() -> Result {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    fails_with(port, "does not answer")
}

/// Runs a client with a port of another program, which sends `greeting`.
fn foreign_port(greeting: &'static [u8]) -> Result {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let other = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(greeting)?;
        // Reads until the client has disconnected.
        std::io::copy(&mut stream, &mut std::io::sink())?;
        Ok(())
    });
    let done = fails_with(port, "is the port right?");
    // The thread ends with the client's connection, in whatever way that ended.
    let _reset_or_not = other.join();
    done
}

/// Silent connections of other programs must not delay a client.
fn silent_strangers() -> Result {
    let server = Server::start("blast")?;
    // More connections than the server's limit of pending greetings.
    let strangers = (0..100).map(|_| TcpStream::connect(("127.0.0.1", server.port)));
    let _strangers = strangers.collect::<std::io::Result<Vec<_>>>()?;
    let begin = Instant::now();
    let client = client("blast", server.port, "-t rc -o send -s 64 -d 0.1 -r 1")?;
    let output = client.output(TIME_LIMIT)?;
    // The server waits 5 s for a greeting.
    let time = begin.elapsed();
    if !output.status.success() || time > Duration::from_secs(4) {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{} after {time:?}: {stderr}", output.status).into());
    }
    Ok(())
}

fn fails_with(port: u16, what: &str) -> Result {
    let output = client("ping", port, "-n 1")?.output(SOON)?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(1) && stderr.contains(what) {
        return Ok(());
    }
    Err(format!("{}: {stderr}", output.status).into())
}
