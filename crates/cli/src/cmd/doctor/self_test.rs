//! Checks of the device: whether it opens, which addresses it has, and whether data arrives.

use std::io::Read;
use std::net::Ipv6Addr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use super::Line;
use crate::library::Library;

/// The longest time for opening the device.
const OPEN_TIME: Duration = Duration::from_secs(20);

/// The longest time for the whole self-test, which normally takes seconds.
const TEST_TIME: Duration = Duration::from_secs(300);

/// The pause between two checks whether a program has exited.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// The result of a program.
struct Outcome {
    /// Whether the exit status was 0; `None` for a program that did not end in time.
    good: Option<bool>,
    /// The standard output, followed by the standard error.
    text: String,
}

/// Runs the self-test program on the drop-in libraries, for at most `time`.
fn run_program(library: &Library, args: &[&str], time: Duration) -> io::Result<Outcome> {
    let Some(program) = library.self_test() else {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the program anywarp-selftest is missing",
        ));
    };
    let mut child = Command::new(program)
        .args(args)
        .envs(library.variables(false, |name| env::var_os(name)))
        // The self-test needs all features of the device.
        .env_remove("ANYWARP_DEVICE_PROFILE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let readers: Vec<thread::JoinHandle<String>> = [
        child
            .stdout
            .take()
            .map(|pipe| thread::spawn(move || read_all(pipe))),
        child
            .stderr
            .take()
            .map(|pipe| thread::spawn(move || read_all(pipe))),
    ]
    .into_iter()
    .flatten()
    .collect();

    let end = Instant::now() + time;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(CHECK_EVERY);
    };
    let mut text = String::new();
    for reader in readers {
        text.push_str(&reader.join().unwrap_or_default());
    }
    Ok(Outcome {
        good: status.map(|status| status.success()),
        text,
    })
}

fn read_all(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    let _what_came_before_the_error = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Opens the device and lists its addresses. The second value tells whether the self-test can run.
pub(super) fn device(library: &Library) -> (Vec<Line>, bool) {
    let advice = "set ANYWARP_LOG=debug and run `anywarp doctor` again to see why";
    match run_program(library, &["--device"], OPEN_TIME) {
        Err(e) => (vec![Line::fail("device", e.to_string(), advice)], false),
        Ok(Outcome { good: None, .. }) => {
            let found = format!("does not open within {} s", OPEN_TIME.as_secs());
            (vec![Line::fail("device", found, advice)], false)
        }
        Ok(Outcome {
            good: Some(false),
            text,
        }) => {
            let message = text
                .lines()
                .last()
                .unwrap_or("it ended without a message")
                .to_owned();
            (
                vec![Line::fail(
                    "device",
                    format!("does not open: {message}"),
                    advice,
                )],
                false,
            )
        }
        Ok(Outcome { text, .. }) => {
            let name = text
                .lines()
                .find_map(|line| line.strip_prefix("device "))
                .unwrap_or("?");
            let mut lines = vec![Line::ok("device", format!("{name} opens"))];
            lines.extend(text.lines().filter_map(gid));
            (lines, true)
        }
    }
}

/// Converts a line `gid INDEX ADDRESS ifindex N` of the self-test program into a line of the report.
fn gid(line: &str) -> Option<Line> {
    let mut words = line.strip_prefix("gid ")?.split_whitespace();
    let (index, address) = (
        words.next()?,
        words.next()?.parse::<Ipv6Addr>().ok()?.to_canonical(),
    );
    let interface = words
        .nth(1)
        .and_then(interface)
        .unwrap_or_else(|| "no interface".to_owned());
    let found = format!("GID {index} is {address} ({interface})");
    if index == "0" && address.is_loopback() {
        let advice = "set ANYWARP_ADDR to an address of this machine that others reach, if they are to use the device";
        return Some(Line::warn(
            "address",
            format!("{found}: only this machine reaches it"),
            advice,
        ));
    }
    Some(Line::ok("address", found))
}

/// Returns the name of the interface with this index.
fn interface(number: &str) -> Option<String> {
    let entries = fs::read_dir("/sys/class/net").ok()?;
    entries.flatten().find_map(|entry| {
        let index = fs::read_to_string(entry.path().join("ifindex")).ok()?;
        (index.trim() == number).then(|| entry.file_name().to_string_lossy().into_owned())
    })
}

/// Runs the self-test: every opcode between two queue pairs on this machine.
pub(super) fn run(library: &Library) -> Line {
    let advice = "set ANYWARP_LOG=info and run `anywarp doctor` again; a failure without an explanation in the log is a bug";
    match run_program(library, &[], TEST_TIME) {
        Err(e) => Line::fail("self-test", e.to_string(), advice),
        Ok(outcome) => result(&outcome, advice),
    }
}

/// Returns the line for the output of the self-test program.
fn result(outcome: &Outcome, advice: &str) -> Line {
    let lines = || outcome.text.lines();
    let failed: Vec<&str> = lines().filter_map(|l| l.strip_prefix("FAIL ")).collect();
    let Some(good) = outcome.good else {
        let passed = lines().filter(|line| line.starts_with("ok ")).count();
        let found = format!(
            "no end within {} s; until then {passed} passed, {} failed",
            TEST_TIME.as_secs(),
            failed.len()
        );
        let found = [&[found.as_str()][..], &failed].concat().join("; ");
        return Line::fail("self-test", found, advice);
    };
    let totals = lines()
        .rev()
        .find(|line| line.contains(" passed, "))
        .unwrap_or("no result");
    if good && failed.is_empty() {
        Line::ok("self-test", format!("all opcodes over loopback: {totals}"))
    } else {
        Line::fail(
            "self-test",
            [&[totals][..], &failed].concat().join("; "),
            advice,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn an_address_line_is_parsed() {
        let line = gid("gid 1 ::ffff:127.0.0.1 ifindex 1").unwrap();
        assert_eq!(line.found, "GID 1 is 127.0.0.1 (lo)");
        assert_eq!(line.level, Level::Ok);

        let line = gid("gid 0 ::1 ifindex 999999").unwrap();
        assert_eq!(line.level, Level::Warn);
        assert!(gid("device anywarp0").is_none());
        assert!(gid("gid").is_none());
    }

    #[test]
    fn the_results_before_a_self_test_is_cut_off_are_reported() {
        let of = |good, text: &str| {
            let text = text.to_owned();
            result(&Outcome { good, text }, "")
        };
        let cut = of(None, "ok send\nok write\nFAIL read timed out\n");
        assert!(cut.is_fail());
        assert_eq!(
            cut.found,
            "no end within 300 s; until then 2 passed, 1 failed; read timed out"
        );
        assert!(!of(Some(true), "ok send\n1 passed, 0 failed, 0 skipped\n").is_fail());
        assert!(of(Some(false), "").is_fail());
    }
}
