//! The results of the runs, as a table on standard output, CSV and JSON.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::num::NonZero;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::args::{Op, Perf, Transport, word};
use super::side::Numbers;
use super::sizes;

/// The results of both ends of one run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Run {
    /// The client's numbers.
    pub(crate) client: Numbers,
    /// The server's numbers.
    pub(crate) server: Numbers,
    /// The one-way times of a ping, in nanoseconds: half of each round trip, and the whole round trip of a Read.
    pub(crate) samples: Vec<u64>,
}

/// The shortest time in nanoseconds between the first and the last arrival from which a rate of arrival is computed.
const SHORTEST: u64 = 1_000_000;

/// The runs so far.
#[derive(Debug)]
pub(crate) struct Report {
    ping: bool,
    quiet: bool,
    transport: Transport,
    op: Op,
    options: String,
    conditions: Value,
    points: Vec<(u64, Vec<Run>)>,
    partial: bool,
}

/// Values of one size, by the name of their column.
type Row = Vec<(&'static str, Option<f64>)>;

fn of(numbers: &Numbers, name: &str) -> u64 {
    numbers.get(name).copied().unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn float(number: u64) -> f64 {
    number as f64
}

/// Returns the quantile `share` of sorted values.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index of the slice"
    )]
    let at = (last as f64 * share).round() as usize;
    sorted.get(at.min(last)).copied()
}

pub(crate) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    quantile(&sorted(values), 0.5)
}

impl Run {
    /// Returns the numbers of the end that received the messages.
    fn receiver(&self, op: Op) -> &Numbers {
        if matches!(op, Op::Read | Op::WriteRead) {
            &self.client
        } else {
            &self.server
        }
    }

    /// Returns the number of measured messages.
    fn messages(&self) -> u64 {
        of(&self.client, "posted").saturating_sub(of(&self.client, "warmup"))
    }

    /// Returns the sender's rate in megabytes (10^6 bytes) per second; for Reads, that of the reader.
    fn sent_rate(&self, size: u64) -> Option<f64> {
        let time = of(&self.client, "elapsed_ns");
        (time > 0).then(|| float(self.messages() * size) * 1e3 / float(time))
    }

    /// Returns the number of measured bytes that arrived, if it is known.
    fn delivered(&self, op: Op, transport: Transport, size: u64) -> Option<u64> {
        match (op, transport) {
            // The receiver is not notified of plain Writes. On a reliable transport, the acknowledged ones have arrived.
            (Op::Write, Transport::Uc) => None,
            (Op::Write, _) => Some(self.messages() * size),
            _ => Some(of(self.receiver(op), "bytes")),
        }
    }

    /// Returns the rate of arrival in megabytes per second, from the first message to the last, without the bytes of the first. It is
    /// unknown for a run shorter than [`SHORTEST`], in which buffered messages are received faster than they arrived. The receiver is
    /// not notified of Writes, so the result for them is the sender's rate, and `None` over UC.
    fn delivered_rate(&self, op: Op, transport: Transport, size: u64) -> Option<f64> {
        if op == Op::Write {
            return self.sent_rate(size).filter(|_| transport != Transport::Uc);
        }
        let seen = self.receiver(op);
        let time = of(seen, "span_ns");
        (time >= SHORTEST)
            .then(|| float(of(seen, "bytes") - of(seen, "first_bytes")) * 1e3 / float(time))
    }

    /// Returns the number of duplicate messages.
    fn duplicates(&self) -> u64 {
        of(&self.client, "duplicate") + of(&self.server, "duplicate")
    }

    /// Returns the number of errors: messages with a wrong byte, wrong validity maps, and duplicates where they are not
    /// allowed. The network may duplicate a datagram, and an unreliable transport then delivers a Send of one datagram twice.
    fn wrong(&self, op: Op, transport: Transport) -> u64 {
        let may_repeat = matches!(op, Op::Send | Op::SendImm)
            && matches!(transport, Transport::Ud | Transport::Uc);
        let bad = [&self.client, &self.server]
            .into_iter()
            .map(|end| of(end, "bad") + of(end, "map_bad"))
            .sum::<u64>();
        bad + if may_repeat { 0 } else { self.duplicates() }
    }
}

/// Returns the share of the time that an end waited for one of its `processors`.
///
/// A thread also waits for a processor while another thread of the same end uses it. That time is not counted, because the end does
/// not lose it.
fn waited(end: &Numbers, processors: f64) -> f64 {
    let elapsed = float(of(end, "elapsed_ns").max(1));
    let used = float(of(end, "cpu_us")) * 1e3 / elapsed;
    let waited = float(of(end, "waited_ns")) / elapsed;
    waited.min((processors - used).max(0.0))
}

impl Run {
    /// Returns the results for one size by name: one-way times in microseconds, rates in 10^6 bits per second, processor time
    /// in percent of one processor.
    pub(crate) fn figures(
        &self,
        args: &Perf,
        ping: bool,
        size: u64,
    ) -> Result<BTreeMap<String, f64>, String> {
        let wrong = self.wrong(args.op, args.transport);
        if wrong > 0 {
            return Err(format!(
                "{wrong} messages have a wrong byte or validity map, or are duplicates"
            ));
        }
        let (messages, elapsed) = (self.messages(), of(&self.client, "elapsed_ns"));
        if messages == 0 || elapsed == 0 {
            return Err("no message was measured".to_owned());
        }
        let there_and_back = if ping && args.op != Op::Read {
            2.0
        } else {
            1.0
        };
        let oneway_us = float(elapsed) / float(messages) / there_and_back / 1e3;
        let share = |end: &Numbers, name: &str, factor: f64| {
            float(of(end, name)) * factor / float(of(end, "elapsed_ns").max(1))
        };
        let processors = thread::available_parallelism().map_or(1, NonZero::get) as f64;
        let waited = |end| waited(end, processors);
        let waited = waited(&self.client).max(waited(&self.server));
        let mut figures = vec![
            ("messages", float(messages)),
            ("elapsed_s", float(elapsed) / 1e9),
            ("oneway_us", oneway_us),
            ("mbps", float(size) * 8.0 / oneway_us),
            ("cpu_local", share(&self.client, "cpu_us", 1e5)),
            ("cpu_remote", share(&self.server, "cpu_us", 1e5)),
            ("waited", waited),
        ];
        if ping {
            let all = sorted(self.samples.iter().map(|&ns| float(ns) / 1e3));
            figures.extend(quantile(&all, 0.5).map(|us| ("median_us", us)));
            figures.extend(quantile(&all, 0.99).map(|us| ("p99_us", us)));
        } else {
            let delivered = self.delivered(args.op, args.transport, size);
            let rate = self.delivered_rate(args.op, args.transport, size);
            // If very few messages arrive, the time between the first and the last is too short or missing. The rate is then
            // that of all delivered bytes over the whole run.
            let rate = rate.or_else(|| Some(float(delivered?) * 1e3 / float(elapsed)));
            figures.extend(rate.map(|mb_s| ("arrived_mbps", mb_s * 8.0)));
            let sent = float(messages * size);
            figures.extend(delivered.map(|bytes| ("delivered", float(bytes) / sent * 100.0)));
        }
        Ok(figures
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect())
    }
}

impl Report {
    pub(crate) fn new(args: &Perf, ping: bool) -> Self {
        Self {
            ping,
            quiet: args.quiet,
            transport: args.transport,
            op: args.op,
            options: options(args),
            conditions: conditions(),
            points: Vec::new(),
            partial: false,
        }
    }

    /// Prints the lines above the table.
    pub(crate) fn head(&self) {
        println!(
            "# {} {}",
            if self.ping { "ping" } else { "blast" },
            self.options
        );
        if self.ping {
            println!(
                "# one way, microseconds{}",
                if self.op == Op::Read {
                    " (read: round trip)"
                } else {
                    ""
                }
            );
            println!(
                "{:>9} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6}",
                "size", "samples", "median", "p90", "p99", "p99.9", "min", "max", "lost", "wrong"
            );
        } else {
            println!("# MB/s are 10^6 bytes a second; median and spread over the runs");
            println!(
                "{:>9} {:>9} {:>9} {:>9} {:>19} {:>10} {:>8} {:>6} {:>5} {:>5}",
                "size",
                "messages",
                "sent",
                "arrived",
                "least..most",
                "delivered",
                "partial",
                "wrong",
                "cpu",
                "cpu'"
            );
        }
    }

    /// Prints the progress of a long run.
    pub(crate) fn progress(&self, what: &str, text: &str) {
        if !self.quiet && io::stderr().is_terminal() {
            eprint!("\r{what}: {text}\x1b[K\r");
        } else if !self.quiet {
            eprintln!("{what}: {text}");
        }
    }

    pub(crate) fn add(&mut self, size: u64, run: Run) {
        match self.points.last_mut() {
            Some((last, runs)) if *last == size => runs.push(run),
            _ => self.points.push((size, vec![run])),
        }
    }

    /// Ends the report. `partial`: whether runs are missing.
    pub(crate) fn end(&mut self, partial: bool) {
        self.partial = partial;
    }

    /// Returns whether no run has an error, as [`Run::wrong`] counts them.
    pub(crate) fn good(&self) -> bool {
        self.points
            .iter()
            .flat_map(|(_, runs)| runs)
            .all(|run| run.wrong(self.op, self.transport) == 0)
    }

    /// Returns all values of a size.
    fn values(&self, size: u64, runs: &[Run]) -> Row {
        let sum = |name: &'static str| {
            float(runs.iter().map(|run| of(run.receiver(self.op), name)).sum())
        };
        let wrong = float(
            runs.iter()
                .map(|run| run.wrong(self.op, self.transport))
                .sum(),
        );
        if self.ping {
            let all = sorted(
                runs.iter()
                    .flat_map(|run| &run.samples)
                    .map(|&ns| float(ns) / 1e3),
            );
            let medians = sorted(
                runs.iter()
                    .filter_map(|run| median(run.samples.iter().map(|&ns| float(ns) / 1e3))),
            );
            return vec![
                ("samples", Some(float(all.len() as u64))),
                ("median_us", quantile(&all, 0.5)),
                ("p90_us", quantile(&all, 0.9)),
                ("p99_us", quantile(&all, 0.99)),
                ("p999_us", quantile(&all, 0.999)),
                ("min_us", all.first().copied()),
                ("max_us", all.last().copied()),
                ("least_median_us", medians.first().copied()),
                ("most_median_us", medians.last().copied()),
                (
                    "lost",
                    Some(float(
                        runs.iter().map(|run| of(&run.client, "failed")).sum(),
                    )),
                ),
                ("wrong", Some(wrong)),
            ];
        }
        let arrived = sorted(
            runs.iter()
                .filter_map(|run| run.delivered_rate(self.op, self.transport, size)),
        );
        let delivered: Option<u64> = runs
            .iter()
            .map(|run| run.delivered(self.op, self.transport, size))
            .sum();
        let sent: u64 = runs.iter().map(|run| run.messages() * size).sum();
        let cpu = |end: fn(&Run) -> &Numbers| {
            median(runs.iter().map(|run| {
                float(of(end(run), "cpu_us")) * 1e3 / float(of(end(run), "elapsed_ns").max(1))
            }))
        };
        vec![
            (
                "messages",
                Some(float(runs.iter().map(Run::messages).sum())),
            ),
            (
                "sent_mb_s",
                median(runs.iter().filter_map(|run| run.sent_rate(size))),
            ),
            ("arrived_mb_s", quantile(&arrived, 0.5)),
            ("least_mb_s", arrived.first().copied()),
            ("most_mb_s", arrived.last().copied()),
            ("sent_bytes", Some(float(sent))),
            ("delivered_bytes", delivered.map(float)),
            (
                "delivered_share",
                delivered
                    .filter(|_| sent > 0)
                    .map(|bytes| float(bytes) / float(sent)),
            ),
            ("complete", Some(sum("complete"))),
            ("partial", Some(sum("partial"))),
            ("wrong", Some(wrong)),
            (
                "duplicates",
                Some(float(runs.iter().map(Run::duplicates).sum())),
            ),
            ("overwritten", Some(sum("overwritten"))),
            ("maps_checked", Some(sum("map_checked"))),
            ("cpu_client", cpu(|run| &run.client)),
            ("cpu_server", cpu(|run| &run.server)),
        ]
    }

    /// Prints the line of the table for `size`.
    pub(crate) fn row(&self, size: u64) {
        let Some((_, runs)) = self.points.last() else {
            return;
        };
        let row = self.values(size, runs);
        let get = |name: &str| {
            row.iter()
                .find(|(n, _)| *n == name)
                .and_then(|(_, value)| *value)
        };
        let say = |name: &str, digits: usize| {
            get(name).map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
        };
        let size = sizes::text(size);
        if self.ping {
            println!(
                "{size:>9} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6}",
                say("samples", 0),
                say("median_us", 2),
                say("p90_us", 2),
                say("p99_us", 2),
                say("p999_us", 2),
                say("min_us", 2),
                say("max_us", 2),
                say("lost", 0),
                say("wrong", 0)
            );
        } else {
            let spread = format!("{}..{}", say("least_mb_s", 2), say("most_mb_s", 2));
            let share = get("delivered_share")
                .map_or_else(|| "-".to_owned(), |s| format!("{:.3} %", s * 100.0));
            println!(
                "{size:>9} {:>9} {:>9} {:>9} {spread:>19} {share:>10} {:>8} {:>6} {:>5} {:>5}",
                say("messages", 0),
                say("sent_mb_s", 2),
                say("arrived_mb_s", 2),
                say("partial", 0),
                say("wrong", 0),
                say("cpu_client", 2),
                say("cpu_server", 2)
            );
        }
        let _closed = io::stdout().flush();
    }

    /// Returns the CSV file: one line for each size. The last column is 1 if the command was interrupted.
    pub(crate) fn csv(&self) -> String {
        let names = self.values(0, &[]);
        let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        let mut text = format!(
            "test,transport,op,size,runs,{},unfinished\n",
            names.join(",")
        );
        for (size, runs) in &self.points {
            let row = self.values(*size, runs);
            let values: Vec<String> = row
                .iter()
                .map(|(_, value)| value.map_or_else(String::new, |v| format!("{v}")))
                .collect();
            text.push_str(&format!(
                "{},{},{},{size},{},{},{}\n",
                if self.ping { "ping" } else { "blast" },
                word(self.transport),
                word(self.op),
                runs.len(),
                values.join(","),
                u8::from(self.partial)
            ));
        }
        text
    }

    /// Returns the JSON file.
    pub(crate) fn json(&self) -> String {
        let points: Vec<Value> = self
            .points
            .iter()
            .map(|(size, runs)| {
                let row: serde_json::Map<String, Value> =
                    self.values(*size, runs).into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
                let runs: Vec<Value> = runs
                    .iter()
                    .map(|run| json!({ "client": run.client, "server": run.server, "samples_ns": run.samples }))
                    .collect();
                json!({ "size": size, "result": row, "runs": runs })
            })
            .collect();
        let all = json!({
            "tool": "anywarp",
            "version": env!("CARGO_PKG_VERSION"),
            "test": if self.ping { "ping" } else { "blast" },
            "transport": word(self.transport),
            "op": word(self.op),
            "options": self.options,
            "conditions": self.conditions,
            "partial": self.partial,
            "points": points,
        });
        format!("{all:#}\n")
    }
}

/// Returns the options of this measurement as they are typed. Most of those with their default value are left out.
fn options(args: &Perf) -> String {
    let mut options = vec![format!(
        "--transport {} --op {}",
        word(args.transport),
        word(args.op)
    )];
    let mut number = |name: &str, value: u64, usual: u64| {
        if value != usual {
            options.push(format!("--{name} {value}"));
        }
    };
    number("depth", args.depth, 16);
    number("list", args.list, 1);
    number("signal-every", args.signal_every, 1);
    number("gather", args.gather, 1);
    number("parity", args.parity, 0);
    number("repeats", args.repeats, 0);
    number("deadline", args.deadline, 0);
    number("warmup", args.warmup, 50);
    number("buffers", args.buffers.unwrap_or_default(), 0);
    number("iters", args.iters.unwrap_or_default(), 0);
    if args.transport == Transport::Ud || args.transport == Transport::Rd {
        options.push(format!("--segment {}", word(args.segment)));
    }
    if args.transport == Transport::Ud && matches!(args.op, Op::WriteRecord | Op::WriteImm) {
        options.push(format!("--record-mode {}", word(args.record_mode)));
    }
    for (name, flag) in [
        ("batch", args.batch),
        ("inline", args.inline),
        ("event", args.event),
        ("unordered", args.unordered),
        ("exact", args.exact),
        ("system", args.system),
    ] {
        if flag {
            options.push(format!("--{name}"));
        }
    }
    options.extend(args.duration.map(|s| format!("--duration {s}")));
    options.push(format!("--runs {}", args.runs));
    options.join(" ")
}

/// Returns the properties of the machine and the variables set for the device.
pub(crate) fn conditions() -> Value {
    let read = |path: &str| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let cpu = read("/proc/cpuinfo").lines().find_map(|line| {
        line.strip_prefix("model name")
            .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
    });
    let variables: serde_json::Map<String, Value> = env::vars()
        .filter(|(name, _)| name.starts_with("ANYWARP_") && name != "ANYWARP_LIB")
        .map(|(name, value)| (name, json!(value)))
        .collect();
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    json!({
        "kernel": read("/proc/sys/kernel/osrelease"),
        "architecture": env::consts::ARCH,
        "cpu": cpu,
        "cpus": crate::sys::processors(),
        "load": read("/proc/loadavg"),
        "seconds_since_1970": since.as_secs(),
        "variables": variables,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values = sorted([5.0, 1.0, 3.0, 2.0, 4.0].into_iter());
        assert_eq!(quantile(&values, 0.5), Some(3.0));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 0.999), Some(5.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    fn numbers(of: &[(&str, u64)]) -> Numbers {
        of.iter()
            .map(|(name, number)| ((*name).to_owned(), *number))
            .collect()
    }

    #[test]
    fn threads_of_one_end_that_wait_for_each_other_lose_no_time() {
        let end = |cpu_us| {
            numbers(&[
                ("elapsed_ns", 1_000_000),
                ("waited_ns", 400_000),
                ("cpu_us", cpu_us),
            ])
        };
        // The end uses its processor all the time, half of the time, and a tenth of the time.
        for (cpu_us, processors, lost) in [(1000, 1.0, 0.0), (500, 1.0, 0.4), (100, 2.0, 0.4)] {
            assert_eq!(waited(&end(cpu_us), processors), lost, "{cpu_us}");
        }
        assert!((waited(&end(900), 1.0) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_table_reports_incomplete_measurements() {
        let words = ["anywarp", "blast", "127.0.0.1", "-t", "ud"];
        let Command::Blast(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not blast")
        };
        for ping in [false, true] {
            for partial in [false, true] {
                let mut report = Report::new(&args, ping);
                let columns = |line: &str| line.split(',').count();
                let head = report.csv();
                assert!(head.ends_with(",unfinished\n"), "{head}");
                report.add(64, Run::default());
                report.add(128, Run::default());
                report.end(partial);
                let text = report.csv();
                assert!(text.starts_with(&head), "{text}");
                let lines: Vec<&str> = text.lines().skip(1).collect();
                assert_eq!(lines.len(), 2, "{text}");
                for line in lines {
                    let last = if partial { ",1" } else { ",0" };
                    assert!(line.ends_with(last), "{line}");
                    assert_eq!(columns(line), columns(&head), "{line}");
                }
            }
        }
    }

    #[test]
    fn a_rate_leaves_out_the_first_message() {
        let run = Run {
            client: numbers(&[("posted", 15), ("warmup", 5), ("elapsed_ns", 10_000_000)]),
            server: numbers(&[
                ("bytes", 1_000_000),
                ("first_bytes", 100_000),
                ("span_ns", 9_000_000),
                ("bad", 1),
                ("map_bad", 2),
                ("duplicate", 4),
            ]),
            samples: Vec::new(),
        };
        assert_eq!(run.sent_rate(100_000), Some(100.0));
        assert_eq!(
            run.delivered_rate(Op::Send, Transport::Ud, 100),
            Some(100.0)
        );
        assert_eq!(run.delivered(Op::Send, Transport::Ud, 100), Some(1_000_000));
        assert_eq!(run.delivered(Op::Write, Transport::Uc, 100), None);
    }

    #[test]
    fn a_duplicate_message_is_wrong_unless_the_network_may_duplicate() {
        let run = Run {
            server: numbers(&[("bad", 1), ("map_bad", 2), ("duplicate", 4)]),
            ..Run::default()
        };
        assert_eq!(run.wrong(Op::Send, Transport::Ud), 3);
        assert_eq!(run.wrong(Op::Send, Transport::Rd), 7);
        assert_eq!(run.wrong(Op::WriteRecord, Transport::Ud), 7);
        assert_eq!(run.duplicates(), 4);
    }

    #[test]
    fn messages_received_at_once_have_no_rate() {
        let run = Run {
            server: numbers(&[("bytes", 1000), ("first_bytes", 100), ("span_ns", 900)]),
            ..Run::default()
        };
        assert_eq!(run.delivered_rate(Op::Send, Transport::Ud, 100), None);
    }
}
