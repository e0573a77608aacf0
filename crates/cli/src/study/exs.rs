//! Measures extended sockets: `exs-ttcp` with both ends on this machine.
//!
//! A *point* is a combination of the values of an experiment's axes.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::figures::{Extent, Point};
use super::process::{Ended, verbs_program};
use super::store::{Miss, Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;

/// The address of both ends.
const HERE: &str = "127.0.0.1";

/// An end of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Server,
    Client,
}

/// Returns the path of `exs-ttcp`, which is installed beside the `anywarp` command.
fn program(library: &Library) -> Option<PathBuf> {
    let prefix = library.dir().parent().and_then(Path::parent)?;
    Some(prefix.join("bin/exs-ttcp")).filter(|path| path.is_file())
}

/// Returns the command line options for a point.
fn words(point: &Point, extent: Extent) -> Vec<String> {
    let get = |axis: &str| point.params.get(axis).map_or("", String::as_str);
    let size: u64 = get("size").parse().unwrap_or(1);
    let (mode, nagle) = match get("exs") {
        "tcp-nagle" => ("tcp", true),
        // In the paper that describes the experiment, the receiver always uses RDMA Reads.
        "normal" => ("read", false),
        mode => (mode, false),
    };
    // The number of messages that fill about the time of a sample, if each takes 20 µs and its bytes are transferred at 500 MB/s.
    let ping = get("test") == "ping";
    let count = extent.seconds() / (size as f64 / 5e8 + 20e-6);
    let mut words: Vec<String> = ["--json", "--mode", mode, "--size", get("size")]
        .map(str::to_owned)
        .into();
    let count = format!("{:.0}", count.clamp(20.0, 200_000.0));
    words.extend(["--count".to_owned(), count]);
    if nagle {
        words.push("--nagle".to_owned());
    }
    match get("in_flight") {
        "" => {}
        number => words.extend(["--in-flight".to_owned(), number.to_owned()]),
    }
    match get("wait") {
        "" => {}
        how => words.extend(["--wait".to_owned(), how.to_owned()]),
    }
    if ping {
        words.push("--ping".to_owned());
    }
    words
}

/// Measures a point. `pin` is called before each program is started, and restricts it to the processors of the server or of the
/// client. Returns the commands as a user would type them, and the outcome.
pub(crate) fn measure(
    point: &Point,
    extent: Extent,
    ours: bool,
    variables: &[(String, String)],
    library: &Library,
    pin: &dyn Fn(Side),
    interrupted: &Interrupted,
) -> (String, Outcome) {
    let Some(program) = program(library) else {
        let why = "the program exs-ttcp is missing: reinstall anywarp";
        return (String::new(), Err(Miss::Failed(why.to_owned())));
    };
    let words = words(point, extent);
    let library = ours.then_some(library);
    let start = |words: &[String]| verbs_program(&program, words, library, variables);
    let run = || {
        pin(Side::Server);
        let listen = ["--listen", HERE, "--port", "0"].map(str::to_owned);
        let (server, line) = Ended::first_line(&mut start(&listen), interrupted)?;
        let port = line.rsplit(' ').next().unwrap_or_default();
        pin(Side::Client);
        let to = [HERE, "--port", port].map(str::to_owned);
        let client = Ended::start(&mut start(&[to.as_slice(), &words].concat()))?;
        let text = client.output(interrupted);
        drop(server);
        parse_output(&text?)
    };
    let mut before = String::new();
    for (name, value) in variables {
        before.push_str(&format!("{name}={value} "));
    }
    if ours {
        before.push_str("anywarp run -- ");
    }
    let command = format!(
        "{before}exs-ttcp --listen {HERE} & {before}exs-ttcp {HERE} {}",
        words.join(" ")
    );
    (command, run().map_err(Miss::Failed))
}

/// Parses the output of `exs-ttcp`.
fn parse_output(text: &str) -> Result<Sample, String> {
    let bad = || format!("output not understood: {}", text.trim());
    let line = text.lines().find(|line| line.starts_with('{'));
    let value: Value = line
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or_else(bad)?;
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    let mut sample = Sample::new();
    let mut set = |name: &str, value: Option<f64>| {
        sample.extend(value.map(|value| (name.to_owned(), value)));
    };
    let median = value.get("latency_us").and_then(|us| us.get("median"));
    let each = number("messages_per_s").map(|rate| 1e6 / rate);
    set("oneway_us", median.and_then(Value::as_f64).or(each));
    set("mbps", number("mib_per_s").map(|mib| mib * 8.388_608));
    set("cpu_local", number("cpu_client_percent"));
    let server = number("cpu_server_percent");
    set("cpu_remote", server);
    let device = number("device_server_percent");
    let program = server.zip(device).map(|(all, device)| all - device);
    set("program_remote", program);
    if sample.contains_key("oneway_us") {
        Ok(sample)
    } else {
        Err(bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tests_are_parsed() {
        let of = |text: &str, name: &str| parse_output(text).unwrap().get(name).copied();
        let rate = "{\"mib_per_s\": 1.0, \"messages_per_s\": 1000.0, \"cpu_client_percent\": 5.0, \
                    \"cpu_server_percent\": 7.0, \"device_server_percent\": 3.0}\n";
        assert_eq!(of(rate, "oneway_us"), Some(1000.0));
        assert_eq!(of(rate, "mbps"), Some(8.388_608));
        assert_eq!(of(rate, "cpu_local"), Some(5.0));
        assert_eq!(of(rate, "program_remote"), Some(4.0));
        let ping = "{\"latency_us\": {\"min\": 1.0, \"median\": 2.5}}\n";
        assert_eq!(of(ping, "oneway_us"), Some(2.5));
        assert!(parse_output("exs-ttcp: no").is_err());
    }
}
