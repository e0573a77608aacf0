//! A child process that measures. Dropping the value that represents it kills the process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::library::Library;
use crate::lines::lines_of;
use crate::perf::Interrupted;

/// The time limit for the start of a server.
pub(crate) const READY: Duration = Duration::from_secs(10);

/// The longest duration of one run.
const LONGEST: Duration = Duration::from_secs(120);

/// The time that a program has to exit after a signal, so that it can stop its children.
const GRACE: Duration = Duration::from_secs(1);

/// The time between two checks whether the study was interrupted, while it waits for an answer.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The pause between two checks whether a program has exited.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// A process that is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw)
            && matches!(self.0.try_wait(), Ok(None))
        {
            let _ended_already = kill_process(pid, Signal::TERM);
        }
        self.wait();
        let _ended_already = self.0.kill();
        let _nothing_to_do = self.0.wait();
    }
}

/// A program that runs the commands in the lines of its input. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Conversation {
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Receiver<String>,
    process: Ended,
}

impl Conversation {
    /// Runs a command, and returns the first line of the output for which `is_answer` holds.
    pub(crate) fn ask(
        &mut self,
        command: &str,
        is_answer: impl Fn(&str) -> bool,
        interrupted: &Interrupted,
    ) -> Result<String, String> {
        let input = self.input.as_mut().ok_or("the program has ended")?;
        // If this fails, the program has ended, and its error messages say why.
        let _ended = writeln!(input, "{command}").and_then(|()| input.flush());
        let end = Instant::now() + LONGEST;
        loop {
            match self.lines.recv_timeout(LOOK_EVERY) {
                Ok(line) if is_answer(&line) => return Ok(line),
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let last = self.errors.iter().filter(|line| !line.trim().is_empty());
                    let last = last.last();
                    return Err(
                        last.unwrap_or_else(|| "the program failed without a message".to_owned())
                    );
                }
                Err(RecvTimeoutError::Timeout) if interrupted.load(Ordering::Relaxed) => {
                    return Err("interrupted".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => {
                    return Err(format!("no answer after {} s", LONGEST.as_secs()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Conversation {
    /// Ends the input, which ends the program.
    pub(crate) fn hang_up(&mut self) {
        self.input = None;
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.hang_up();
        self.process.wait();
    }
}

/// Returns the command that runs a verbs program with these arguments and variables. `library` is anywarp's library, or `None` if
/// the program uses the system's.
pub(crate) fn verbs_program(
    program: &Path,
    words: &[String],
    library: Option<&Library>,
    variables: &[(String, String)],
) -> Command {
    let mut command = Command::new(program);
    if let Some(library) = library {
        command.envs(library.variables(false, |name| env::var_os(name)));
        command.env("ANYWARP_ADDR", "127.0.0.1");
    }
    command
        .args(words)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

impl Ended {
    /// Starts a program.
    pub(crate) fn start(command: &mut Command) -> Result<Self, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|e| format!("{name}: {e}"))?;
        Ok(Self(child))
    }

    /// Starts a program, and returns the first line of its output.
    pub(crate) fn first_line(command: &mut Command) -> Result<(Self, String), String> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = Self::start(command)?;
        let mut line = String::new();
        if let Some(stdout) = &mut process.0.stdout {
            let mut reader = BufReader::new(stdout);
            reader.read_line(&mut line).map_err(|e| e.to_string())?;
        }
        if line.is_empty() {
            return Err("the server does not start".to_owned());
        }
        Ok((process, line.trim_end().to_owned()))
    }

    /// Starts a program that runs the commands in the lines of its input.
    pub(crate) fn converse(command: &mut Command) -> Result<Conversation, String> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = Self::start(command)?;
        let lines = process.0.stdout.take().map(lines_of);
        let errors = process.0.stderr.take().map(lines_of);
        Ok(Conversation {
            input: process.0.stdin.take(),
            lines: lines.ok_or("the program has no output")?,
            errors: errors.ok_or("the program has no error messages")?,
            process,
        })
    }

    /// Waits a moment for the program to end by itself.
    fn wait(&mut self) {
        let end = Instant::now() + GRACE;
        while Instant::now() < end && matches!(self.0.try_wait(), Ok(None)) {
            thread::sleep(CHECK_EVERY);
        }
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns the output of a program that has exited successfully, or the last line of its error messages.
    pub(crate) fn output(mut self, interrupted: &Interrupted) -> Result<String, String> {
        // Read while the program runs: it would not end if its output filled a pipe.
        let output = self.0.stdout.take().map(text_of);
        let errors = self.0.stderr.take().map(text_of);
        let end = Instant::now() + LONGEST;
        let status = loop {
            match self.0.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break status,
                None if interrupted.load(Ordering::Relaxed) => return Err("interrupted".to_owned()),
                None if Instant::now() >= end => {
                    return Err(format!(
                        "the program has not ended after {} s",
                        LONGEST.as_secs()
                    ));
                }
                None => thread::sleep(CHECK_EVERY),
            }
        };
        let text = if status.success() { output } else { errors };
        let text = text.map_or_else(|| Ok(String::new()), finished)?;
        if status.success() {
            return Ok(text);
        }
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        Err(last
            .unwrap_or("the program failed without a message")
            .to_owned())
    }
}

/// Starts a thread that reads a pipe to its end.
fn text_of(mut pipe: impl Read + Send + 'static) -> JoinHandle<io::Result<String>> {
    thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).map(|_| text)
    })
}

/// Returns the text that a thread of [`text_of`] reads.
fn finished(reader: JoinHandle<io::Result<String>>) -> Result<String, String> {
    let text = reader
        .join()
        .map_err(|_| "the output was not read".to_owned())?;
    text.map_err(|e| e.to_string())
}

/// Waits until a server is bound to its port.
pub(crate) fn ready(port: u16, tcp: bool) -> Result<(), String> {
    let end = Instant::now() + READY;
    let wanted = format!(":{port:04X}");
    let tables: [(&str, &str); 2] = if tcp {
        [("/proc/net/tcp", "0A"), ("/proc/net/tcp6", "0A")]
    } else {
        [("/proc/net/udp", "07"), ("/proc/net/udp6", "07")]
    };
    while Instant::now() < end {
        for (table, state) in tables {
            let text = fs::read_to_string(table).unwrap_or_default();
            let bound = |line: &str| {
                let mut fields = line.split_whitespace().skip(1);
                fields.next().is_some_and(|local| local.ends_with(&wanted))
                    && fields.nth(1) == Some(state)
            };
            if text.lines().any(bound) {
                return Ok(());
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err("the server does not start".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn an_output_that_does_not_fit_into_a_pipe_is_returned() {
        let mut command = Command::new("seq");
        command
            .arg("50000")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let program = Ended::start(&mut command).unwrap();
        let text = program.output(&Arc::new(AtomicBool::new(false))).unwrap();
        assert_eq!(text.lines().count(), 50_000);
    }
}
