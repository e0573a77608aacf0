//! The verbs program of one run: starts it, sends its parameters, reads its output and kills it.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use super::side::{Event, Numbers};
use crate::library::Library;

/// The running program, which is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct End {
    child: Child,
    stdin: ChildStdin,
}

impl End {
    /// Starts the program for run `of` with `numbers` as its arguments and `variables` in its environment. `address` becomes
    /// GID 0 of its device.
    pub(crate) fn start(
        library: &Library,
        system: bool,
        address: IpAddr,
        numbers: &Numbers,
        variables: &[(String, String)],
        of: u64,
        events: Sender<Event>,
    ) -> Result<Self, String> {
        let program = library
            .perf()
            .ok_or_else(|| "the program anywarp-perf is missing: reinstall anywarp".to_owned())?;
        let mut command = Command::new(&program);
        command.args(
            numbers
                .iter()
                .map(|(name, number)| format!("{name}={number}")),
        );
        if !system {
            command.envs(library.variables(false, |name| env::var_os(name)));
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        if env::var_os("ANYWARP_ADDR").is_none() {
            command.env("ANYWARP_ADDR", address.to_canonical().to_string());
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // An interrupt by the keyboard must reach only this command, which then ends the
            // program cleanly.
            .process_group(0)
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the verbs program has no pipes".to_owned());
        };
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if events.send(Event::Line { of, line }).is_err() {
                    return;
                }
            }
            let _receiver_gone = events.send(Event::Ended { of });
        });
        Ok(Self { child, stdin })
    }

    /// Writes one line to the program's standard input.
    pub(crate) fn write_line(&mut self, line: &str) -> Result<(), String> {
        writeln!(self.stdin, "{line}").map_err(|e| format!("the verbs program has ended: {e}"))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _nothing_to_do = self.child.wait();
    }
}

/// Parses the numbers of a line `WORD name=number name=number …`.
pub(crate) fn numbers(line: &str) -> Numbers {
    line.split_whitespace()
        .filter_map(|word| {
            let (name, number) = word.split_once('=')?;
            Some((name.to_owned(), number.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_names() {
        let seen = numbers("done bytes=12 gid=00ff device=x messages=3");
        assert_eq!(seen.get("bytes"), Some(&12));
        assert_eq!(seen.get("messages"), Some(&3));
        assert_eq!(seen.get("device"), None);
    }
}
