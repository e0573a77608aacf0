//! One measurement: starts a server and a client, waits for them, and parses their output.
//!
//! A *row* compares several *parties*, each a program or a setting. A measurement belongs to one party of a row.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;

use super::args::Bench;
use super::rows::{How, Party, Unit};
use crate::library::Library;
use crate::lines::lines_of;
use crate::sys;

/// The longest wait until a server is ready.
const READY: Duration = Duration::from_secs(15);

/// The longest time of one measurement.
const LIMIT: Duration = Duration::from_secs(40);

/// The time that a server has to exit after its client.
const GRACE: Duration = Duration::from_secs(3);

/// The pause between two checks of the processes of a row.
const CHECK_EVERY: Duration = Duration::from_millis(5);

/// The result of one measurement.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// The measured value, in the unit of the row.
    pub(crate) value: f64,
    /// The share of the client's time in which other programs used its processor, if known.
    pub(crate) waited: Option<f64>,
    /// The other numbers that the program printed, by name.
    pub(crate) numbers: BTreeMap<String, f64>,
    /// The congestion control of the program's TCP, if it reports it.
    pub(crate) congestion: Option<String>,
}

/// The environment of all measurements.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The path of this program.
    pub(crate) anywarp: PathBuf,
    /// The path of `anywarp-cost`.
    pub(crate) verbs: Option<PathBuf>,
    /// The path of the tests' MPI program, if both ends are on this host.
    mpi: Option<PathBuf>,
    /// The command that precedes all servers.
    server: Vec<String>,
    /// The command that precedes all clients.
    client: Vec<String>,
    /// The server's address.
    host: String,
    /// Whether to divide all counts by ten.
    pub(crate) short: bool,
    /// Set by an interrupt.
    pub(crate) interrupted: Arc<AtomicBool>,
}

/// Why there is no value.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The user has interrupted the command.
    Interrupted,
    /// A description of the failure.
    Failed(String),
}

impl From<std::io::Error> for Lost {
    fn from(e: std::io::Error) -> Self {
        Self::Failed(e.to_string())
    }
}

/// Returns whether programs can be pinned to this processor. Tries it with a thread: a processor may be online but forbidden for this
/// process, and this process may be allowed to use more processors than it is bound to now.
fn has_processor(number: u16) -> bool {
    let number = usize::from(number);
    let pin = move || {
        let mut one = CpuSet::new();
        one.set(number);
        sched_setaffinity(None, &one).is_ok()
    };
    number < CpuSet::MAX_CPU && thread::spawn(pin).join().unwrap_or(false)
}

impl Stage {
    pub(crate) fn new(args: &Bench, interrupted: Arc<AtomicBool>) -> Result<Self, String> {
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let mut ends = [words(&args.server_prefix), words(&args.client_prefix)];
        if args.cpus != "none" {
            let (server, client) = args
                .cpus
                .split_once(',')
                .ok_or("--cpus takes two numbers, such as 0,1, or none")?;
            for (end, cpu) in ends.iter_mut().zip([server, client]) {
                let number: u16 = cpu
                    .parse()
                    .map_err(|_| format!("--cpus: {cpu} is not the number of a processor"))?;
                // A prefix may start the program on another machine.
                if end.is_empty() && !has_processor(number) {
                    return Err(format!(
                        "--cpus: there is no processor {cpu} here, or no program may run on it; `--cpus none` does not pin"
                    ));
                }
                end.extend(words("taskset -c"));
                end.push(cpu.to_owned());
            }
        }
        if args.first {
            for end in &mut ends {
                end.extend(words("nice -n -20"));
            }
        }
        let [server, client] = ends;
        Ok(Self {
            anywarp: std::env::current_exe().map_err(|e| e.to_string())?,
            verbs: Library::find().ok().and_then(|library| library.cost()),
            mpi: args.mpi.clone().filter(|_| args.server_prefix.is_empty()),
            server,
            client,
            host: args.host.clone(),
            short: args.short,
            interrupted,
        })
    }

    /// Returns whether the program that `how` needs is installed.
    pub(crate) fn has(&self, how: &How) -> bool {
        match how {
            How::Raw(_) | How::Ours(..) => true,
            How::Verbs(_) | How::VerbsAlone(_) => self.verbs.is_some(),
            How::Perftest(program, _) | How::Peer(program, ..) => in_path(program),
            How::Mpi(launch, _) => {
                self.mpi.is_some() && launch.split(' ').next().is_some_and(in_path)
            }
        }
    }

    /// Returns the commands of the server, if there is one, and of the client. `{host}` is replaced here; `{port}` and
    /// `{word}` are replaced later.
    fn commands(&self, how: &How) -> (Option<Vec<String>>, Vec<String>) {
        let own = self.anywarp.display().to_string();
        let split = |text: &str| -> Vec<String> {
            text.split_whitespace()
                .map(|word| self.scaled(word))
                .collect()
        };
        let run = |words: Vec<String>| -> Vec<String> {
            [vec![own.clone(), "run".to_owned(), "--".to_owned()], words].concat()
        };
        match how {
            How::Raw(words) => {
                let words = split(words);
                let server = [vec![own.clone(), "bench-raw".to_owned()], words.clone()].concat();
                let client = [
                    vec![own.clone(), "bench-raw".to_owned()],
                    words,
                    split("--connect {host} {word}"),
                ]
                .concat();
                (Some(server), client)
            }
            How::Perftest(program, words) => {
                let server = [split(program), split("-F -p {port}"), split(words)].concat();
                let client = [server.clone(), split("{host}")].concat();
                (Some(run(server)), run(client))
            }
            How::Ours(test, words) => {
                let server = [
                    vec![own.clone(), (*test).to_owned()],
                    split("--server --quiet -p {port}"),
                ]
                .concat();
                let client = [
                    vec![own.clone(), (*test).to_owned()],
                    split("{host} --quiet --runs 1 -p {port} --csv /dev/stdout"),
                    split(words),
                ]
                .concat();
                (Some(server), client)
            }
            How::Peer(program, server, client) => (
                Some([split(program), split(server)].concat()),
                [split(program), split(client)].concat(),
            ),
            How::Mpi(launch, words) => {
                let program = self.mpi.as_ref().map(|p| p.display().to_string());
                (
                    None,
                    [split(launch), program.into_iter().collect(), split(words)].concat(),
                )
            }
            How::Verbs(words) => {
                let program = self.verbs.as_ref().map(|p| p.display().to_string());
                let server = [
                    program.into_iter().collect::<Vec<_>>(),
                    split(words),
                    split("--port {port}"),
                ]
                .concat();
                let client = [server.clone(), split("{host}")].concat();
                (Some(run(server)), run(client))
            }
            How::VerbsAlone(words) => {
                let program = self.verbs.as_ref().map(|p| p.display().to_string());
                (
                    None,
                    run([program.into_iter().collect::<Vec<_>>(), split(words)].concat()),
                )
            }
        }
    }

    /// Expands an argument: replaces `{host}`; `N:20000` is a count, which --short reduces.
    fn scaled(&self, word: &str) -> String {
        let word = word.replace("{host}", &self.host);
        match word.strip_prefix("N:").and_then(|n| n.parse::<u64>().ok()) {
            Some(n) if self.short => (n / 10).max(50).to_string(),
            Some(n) => n.to_string(),
            None => word,
        }
    }

    /// Returns the client's command as a user would type it.
    pub(crate) fn command_line(&self, party: &Party) -> String {
        let (_, client) = self.commands(&party.how);
        let variables: Vec<String> = party
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let own = self.anywarp.display().to_string();
        let verbs = self.verbs.as_ref().map(|path| path.display().to_string());
        let mpi = self.mpi.as_ref().map(|path| path.display().to_string());
        let before = self.before_client(&party.how);
        let words = before.iter().chain(&client).map(|word| {
            if *word == own {
                "anywarp".to_owned()
            } else if Some(word) == verbs.as_ref() {
                "anywarp-cost".to_owned()
            } else if Some(word) == mpi.as_ref() {
                "bench-mpi".to_owned()
            } else {
                word.clone()
            }
        });
        variables
            .into_iter()
            .chain(words)
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Returns the command that precedes the client. An MPI launcher starts both ends and pins them itself.
    fn before_client(&self, how: &How) -> &[String] {
        match how {
            How::Mpi(..) => &[],
            _ => &self.client,
        }
    }

    /// Measures once.
    pub(crate) fn measure(&self, party: &Party, unit: Unit) -> Result<Sample, Lost> {
        let port = free_port(&party.how)?;
        let (server, client) = self.commands(&party.how);
        let fill = |words: &[String], word: &str| -> Vec<String> {
            words
                .iter()
                .map(|w| {
                    w.replace("{port}", &port.to_string())
                        .replace("{word}", word)
                })
                .collect()
        };
        let mut word = String::new();
        let mut running = None;
        if let Some(server) = &server {
            let mut end = End::start(&self.server, &fill(server, ""), party, "server")?;
            word = match party.how {
                How::Raw(_) => end.word(self)?,
                _ => {
                    end.listens(port, self)?;
                    String::new()
                }
            };
            running = Some(end);
        }
        let prefix = self.before_client(&party.how);
        let mut end = End::start(prefix, &fill(&client, &word), party, "client")?;
        let (output, waited) = end.finish(LIMIT, self, running.as_mut())?;
        let theirs = match running {
            Some(mut server) => server.last_words(),
            None => String::new(),
        };
        let (mut numbers, congestion) = parse_output(&party.how, &output, &theirs)
            .map_err(|why| Lost::Failed(format!("{why}: {}", excerpt(&output))))?;
        let name = party.value.unwrap_or(match unit {
            Unit::Us => "us",
            Unit::Gbs => "gb_s",
            Unit::Ms => "m_s",
            Unit::Count | Unit::Share => "value",
        });
        let value = numbers
            .get(name)
            .copied()
            .filter(|v| v.is_finite())
            .ok_or_else(|| Lost::Failed(format!("no {name} in: {}", excerpt(&output))))?
            * party.factor;
        numbers.remove(name);
        Ok(Sample {
            value,
            waited,
            numbers,
            congestion,
        })
    }
}

fn excerpt(text: &str) -> String {
    let text = text.trim();
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    last.join(" / ").chars().take(300).collect()
}

fn in_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Returns a free port, for programs that need one as an argument.
fn free_port(how: &How) -> Result<u16, Lost> {
    if matches!(how, How::Raw(_) | How::VerbsAlone(_) | How::Mpi(..)) {
        return Ok(0);
    }
    sys::free_port().map_err(|e| Lost::Failed(e.to_string()))
}

/// A running program, which is killed when this is dropped.
struct End {
    child: Child,
    what: String,
    lines: Receiver<String>,
    errors: Receiver<String>,
    output: String,
}

impl End {
    fn start(prefix: &[String], words: &[String], party: &Party, side: &str) -> Result<Self, Lost> {
        let mut all = prefix.iter().chain(words);
        let program = all.next().cloned().unwrap_or_default();
        let mut child = Command::new(&program)
            .args(all)
            .envs(party.env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| Lost::Failed(format!("{program}: {e}")))?;
        let lines = child.stdout.take().map(lines_of);
        let errors = child.stderr.take().map(lines_of);
        let (Some(lines), Some(errors)) = (lines, errors) else {
            return Err(Lost::Failed("no pipes".to_owned()));
        };
        Ok(Self {
            child,
            what: format!(
                "the {side} ({})",
                words.get(2..).unwrap_or_default().join(" ")
            ),
            lines,
            errors,
            output: String::new(),
        })
    }

    fn complaint(&mut self, why: &str) -> Lost {
        self.drain();
        let errors: Vec<String> = self.errors.try_iter().collect();
        let text = if errors.is_empty() {
            excerpt(&self.output)
        } else {
            excerpt(&errors.join("\n"))
        };
        Lost::Failed(format!("{} {why}: {text}", self.what))
    }

    fn drain(&mut self) {
        for line in self.lines.try_iter() {
            self.output.push_str(&line);
            self.output.push('\n');
        }
    }

    fn gone(&mut self) -> Result<Option<i32>, Lost> {
        Ok(self
            .child
            .try_wait()?
            .map(|status| status.code().unwrap_or(-1)))
    }

    /// Returns the word that a raw server prints when it is ready.
    fn word(&mut self, stage: &Stage) -> Result<String, Lost> {
        let end = Instant::now() + READY;
        loop {
            self.drain();
            if let Some(word) = self.output.lines().find_map(|l| l.strip_prefix("ready ")) {
                return Ok(word.to_owned());
            }
            self.pause(stage, end, "is not ready")?;
        }
    }

    /// Waits until the program listens on `port`.
    fn listens(&mut self, port: u16, stage: &Stage) -> Result<(), Lost> {
        let end = Instant::now() + READY;
        let wanted = format!(":{port:04X}");
        loop {
            for table in ["tcp", "tcp6"] {
                // The file shows the network namespace of the program.
                let path = format!("/proc/{}/net/{table}", self.child.id());
                let text = fs::read_to_string(path).unwrap_or_default();
                let found = text.lines().any(|line| {
                    let mut fields = line.split_whitespace().skip(1);
                    let local = fields.next().unwrap_or_default();
                    local.ends_with(&wanted) && fields.nth(1) == Some("0A")
                });
                if found {
                    return Ok(());
                }
            }
            self.pause(stage, end, &format!("does not listen on port {port}"))?;
        }
    }

    fn pause(&mut self, stage: &Stage, end: Instant, why: &str) -> Result<(), Lost> {
        if stage.interrupted.load(Ordering::Relaxed) {
            return Err(Lost::Interrupted);
        }
        if let Some(code) = self.gone()? {
            thread::sleep(CHECK_EVERY);
            return Err(self.complaint(&format!("ended with {code}")));
        }
        if Instant::now() >= end {
            return Err(self.complaint(why));
        }
        thread::sleep(CHECK_EVERY);
        Ok(())
    }

    /// Returns the nanoseconds that the first thread was runnable but not running.
    fn held_up(&self) -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.child.id())).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    }

    /// Waits for the client to exit. Returns its output, and the share of its time that it was runnable but not running.
    fn finish(
        &mut self,
        limit: Duration,
        stage: &Stage,
        mut server: Option<&mut Self>,
    ) -> Result<(String, Option<f64>), Lost> {
        let began = Instant::now();
        let mut held_up = None;
        loop {
            held_up = self.held_up().filter(|&ns| ns > 0).or(held_up);
            self.drain();
            if let Some(code) = self.gone()? {
                // The thread that reads the pipe closes the channel at the end of the pipe.
                while let Ok(line) = self.lines.recv_timeout(GRACE) {
                    self.output.push_str(&line);
                    self.output.push('\n');
                }
                if code != 0 {
                    if let Some(server) = server.as_deref_mut()
                        && server.gone()?.is_some_and(|code| code != 0)
                    {
                        return Err(server.complaint("failed"));
                    }
                    return Err(self.complaint(&format!("ended with {code}")));
                }
                let took = began.elapsed().as_nanos() as f64;
                return Ok((
                    std::mem::take(&mut self.output),
                    held_up.map(|ns| ns as f64 / took),
                ));
            }
            if stage.interrupted.load(Ordering::Relaxed) {
                return Err(Lost::Interrupted);
            }
            if began.elapsed() >= limit {
                return Err(self.complaint(&format!("has not ended after {} s", limit.as_secs())));
            }
            if let Some(server) = server.as_deref_mut() {
                server.drain();
            }
            thread::sleep(CHECK_EVERY);
        }
    }

    /// Waits for a server to exit, and returns its output. A server that does not exit is killed when this value is dropped.
    fn last_words(&mut self) -> String {
        drop(self.child.stdin.take());
        let end = Instant::now() + GRACE;
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(CHECK_EVERY);
        }
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            while let Ok(line) = self.lines.recv_timeout(GRACE) {
                self.output.push_str(&line);
                self.output.push('\n');
            }
        }
        std::mem::take(&mut self.output)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _nothing_to_do = self.child.wait();
    }
}

type Parsed = (BTreeMap<String, f64>, Option<String>);

/// Parses the output of the programs.
fn parse_output(how: &How, client: &str, server: &str) -> Result<Parsed, String> {
    match how {
        How::Raw(_) | How::Verbs(_) | How::VerbsAlone(_) | How::Mpi(..) => {
            let line = client
                .lines()
                .rev()
                .find(|line| line.starts_with('{'))
                .ok_or("no result")?;
            let value: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
            let members = value.as_object().ok_or("no result")?;
            let numbers = members
                .iter()
                .filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)))
                .collect();
            let congestion = value.get("congestion").and_then(Value::as_str);
            Ok((numbers, congestion.map(str::to_owned)))
        }
        How::Perftest(program, _) => {
            let mut numbers = perftest(program, client).ok_or("no line of results")?;
            // The server counts the datagrams that arrived, the client those that it sent.
            if let Some(theirs) = perftest(program, server) {
                for (name, value) in theirs {
                    numbers.insert(format!("server_{name}"), value);
                }
            }
            Ok((numbers, None))
        }
        How::Ours(..) => Ok((ours(client).ok_or("no line of results")?, None)),
        How::Peer("fi_pingpong", ..) => {
            let line = client
                .lines()
                .rev()
                .find(|line| line.starts_with(|c: char| c.is_ascii_digit()))
                .ok_or("no line of results")?;
            // Columns: bytes, sent, acknowledged, total, time, MB/sec, usec/xfer, Mxfers/sec
            let fields: Vec<&str> = line.split_whitespace().collect();
            let us = fields
                .get(6)
                .and_then(|us| us.parse().ok())
                .ok_or("no line of results")?;
            Ok(([("us".to_owned(), us)].into(), None))
        }
        How::Peer("ucx_perftest", ..) => {
            // Columns: iterations, latency (median, average, overall), MB/s (average, overall), messages/s (average, overall)
            let fields: Vec<f64> = client
                .lines()
                .rev()
                .find_map(|line| {
                    let line = line.trim().trim_start_matches("Final:");
                    let words: Vec<&str> = line.split_whitespace().collect();
                    let numbers: Vec<f64> = words.iter().filter_map(|w| w.parse().ok()).collect();
                    (numbers.len() == 8 && words.len() == 8).then_some(numbers)
                })
                .ok_or("no line of results")?;
            let at = |i: usize| fields.get(i).copied().unwrap_or(f64::NAN);
            Ok((
                [
                    ("us".to_owned(), at(1)),
                    ("gb_s".to_owned(), at(5) * 1048576.0 / 1e9),
                    ("m_s".to_owned(), at(7) / 1e6),
                ]
                .into(),
                None,
            ))
        }
        How::Peer(..) => {
            let mut last = client
                .lines()
                .rev()
                .filter_map(|line| line.trim().parse().ok());
            let value = last.next().ok_or("no result")?;
            Ok(([("value".to_owned(), value)].into(), None))
        }
    }
}

/// Parses the line of results of a perftest program.
fn perftest(program: &str, text: &str) -> Option<BTreeMap<String, f64>> {
    let fields: Vec<f64> = text.lines().rev().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<f64> = fields.iter().filter_map(|w| w.parse().ok()).collect();
        (numbers.len() >= 5 && numbers.len() == fields.len()).then_some(numbers)
    })?;
    let at = |i: usize| fields.get(i).copied();
    let named: Vec<(&str, Option<f64>)> = if program.ends_with("_lat") {
        // Columns: bytes, iterations, least, most, typical, average, deviation, 99 %, 99.9 %
        vec![
            ("us_least", at(2)),
            ("us", at(4)),
            ("us_average", at(5)),
            ("us_p99", at(7)),
        ]
    } else {
        // Columns: bytes, iterations, peak, average in MiB/s, million messages per second
        vec![
            ("gb_s", at(3).map(|mib| mib * 1048576.0 / 1e9)),
            ("m_s", at(4)),
        ]
    };
    Some(
        named
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)))
            .collect(),
    )
}

/// Parses the output of `anywarp ping` and `blast` with --csv.
fn ours(text: &str) -> Option<BTreeMap<String, f64>> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("test,"));
    let (names, values) = (lines.next()?, lines.next()?);
    Some(
        names
            .split(',')
            .zip(values.split(','))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_do_not_exist_are_noticed() {
        assert!((0..64).any(has_processor));
        assert!(!has_processor(1023) && !has_processor(u16::MAX));
    }

    #[test]
    fn lines_of_perftest_are_parsed() {
        let latency = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      1000          4.05           33.18        4.27     	       4.41        	1.00   		5.65    		33.18  
---";
        let seen = perftest("ib_send_lat", latency).unwrap();
        assert_eq!(seen.get("us"), Some(&4.27));
        assert_eq!(seen.get("us_p99"), Some(&5.65));
        let bandwidth = "\
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 65536      5000             5240.21            5209.22\t\t   0.083348
---";
        let seen = perftest("ib_write_bw", bandwidth).unwrap();
        assert_eq!(seen.get("m_s"), Some(&0.083348));
        assert_eq!(
            perftest("ib_write_bw", "Couldn't connect to 127.0.0.1:1"),
            None
        );
    }

    #[test]
    fn lines_of_peers_are_parsed() {
        let fi = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                  64      2k      =2k      250k        0.02s     11.34       5.64       0.18\n";
        let how = How::Peer("fi_pingpong", "", "");
        assert_eq!(parse_output(&how, fi, "").unwrap().0.get("us"), Some(&5.64));
        let ucx = "Final:                  5000     11.970    12.050    12.050        5.06       5.06       82988       82988\n";
        let how = How::Peer("ucx_perftest", "", "");
        let (seen, _) = parse_output(&how, ucx, "").unwrap();
        assert_eq!(seen.get("us"), Some(&11.97));
    }
}
