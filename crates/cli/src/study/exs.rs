//! Measures extended sockets: `exs-ttcp` with both ends on this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::figures::{Extent, Point};
use super::process::Ended;
use super::store::{Miss, Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;

/// Returns the path of the program, which is installed beside the command.
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
        mode => (mode, false),
    };
    // The number of messages that takes about as long as a sample, if the throughput is 500 MB/s and a message takes 20 µs, or
    // 200 µs in a ping between sleeping threads.
    let ping = get("test") == "ping";
    let each = if ping { 200e-6 } else { 20e-6 };
    let count = extent.seconds() / (size as f64 / 5e8 + each);
    let mut words: Vec<String> = ["--self", "--json", "--mode", mode, "--size", get("size")]
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
    if ping {
        words.push("--ping".to_owned());
    }
    words
}

/// Measures a point. Returns the command as a user would type it, and the outcome.
pub(crate) fn measure(
    point: &Point,
    extent: Extent,
    ours: bool,
    variables: &[(String, String)],
    library: &Library,
    interrupted: &Interrupted,
) -> (String, Outcome) {
    let Some(program) = program(library) else {
        let why = "the program exs-ttcp is missing: reinstall anywarp";
        return (String::new(), Err(Miss::Failed(why.to_owned())));
    };
    let words = words(point, extent);
    let mut command = Command::new(&program);
    if ours {
        command.envs(library.variables(false, |name| std::env::var_os(name)));
        command.env("ANYWARP_ADDR", "127.0.0.1");
    }
    command
        .args(&words)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut typed = String::new();
    for (name, value) in variables {
        typed.push_str(&format!("{name}={value} "));
    }
    if ours {
        typed.push_str("anywarp run -- ");
    }
    typed.push_str(&format!("exs-ttcp {}", words.join(" ")));
    let outcome = Ended::start(&mut command)
        .and_then(|ended| ended.output(interrupted))
        .and_then(|text| parse_output(&text));
    (typed, outcome.map_err(Miss::Failed))
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
    set("cpu_remote", number("cpu_server_percent"));
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
        let rate =
            "{\"mib_per_s\": 1.0, \"messages_per_s\": 1000.0, \"cpu_client_percent\": 5.0}\n";
        assert_eq!(of(rate, "oneway_us"), Some(1000.0));
        assert_eq!(of(rate, "mbps"), Some(8.388_608));
        assert_eq!(of(rate, "cpu_local"), Some(5.0));
        let ping = "{\"latency_us\": {\"min\": 1.0, \"median\": 2.5}}\n";
        assert_eq!(of(ping, "oneway_us"), Some(2.5));
        assert!(parse_output("exs-ttcp: no").is_err());
    }
}
