//! A child process that measures. Dropping the value that represents it kills the process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::library::Library;
use crate::lines::lines_of;
use crate::perf::Interrupted;
use crate::sys;

/// The time limit for the start of a server.
pub(crate) const READY: Duration = Duration::from_secs(10);

/// The longest duration of one run.
const LONGEST: Duration = Duration::from_secs(120);

/// The time that a program has to exit after a signal, so that it can stop its children.
const GRACE: Duration = Duration::from_secs(1);

/// The time between two checks whether the study was interrupted, while it waits for an answer.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The longest wait for the end of a pipe after the program has exited. A process that the program has started may hold the pipe
/// open; what the program itself has written is read long before.
const REST: Duration = Duration::from_secs(2);

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
                Err(RecvTimeoutError::Disconnected) => return Err(self.last_error()),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            }
            // This is also checked after each line that is no answer, so that a program that prints such lines all the time does
            // not delay the end of an interrupted study.
            if interrupted.load(Ordering::Relaxed) {
                return Err("interrupted".to_owned());
            }
            if Instant::now() >= end {
                return Err(format!("no answer after {} s", LONGEST.as_secs()));
            }
        }
    }

    /// Returns the last line of the error messages of the program, which has closed its output.
    fn last_error(&self) -> String {
        let end = Instant::now() + REST;
        let mut last = None;
        while let Ok(line) = self
            .errors
            .recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            if !line.trim().is_empty() {
                last = Some(line);
            }
        }
        last.unwrap_or_else(|| "the program failed without a message".to_owned())
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
    /// Starts a program. The program also ends if a signal kills this process, which then drops nothing: `anywarp study run` may have
    /// started this process in a namespace, and ends it by a signal after an interrupt.
    ///
    /// The thread that calls this must not end before the program does.
    pub(crate) fn start(command: &mut Command) -> Result<Self, String> {
        sys::end_with_parent(command);
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|e| format!("{name}: {e}"))?;
        Ok(Self(child))
    }

    /// Starts a program, and returns the first line of its output.
    pub(crate) fn first_line(
        command: &mut Command,
        interrupted: &Interrupted,
    ) -> Result<(Self, String), String> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = Self::start(command)?;
        let stdout = process.0.stdout.take().ok_or("the program has no output")?;
        let (sender, first) = mpsc::channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = String::new();
            let read = reader.read_line(&mut line).map_err(|e| e.to_string());
            let _nobody_waits = sender.send(read.map(|_| line));
            // If the pipe were closed, the program would be killed when it writes more.
            let _ended = io::copy(&mut reader, &mut io::sink());
        });
        let end = Instant::now() + READY;
        let line = loop {
            match first.recv_timeout(LOOK_EVERY) {
                Ok(line) => break line?,
                Err(_) if interrupted.load(Ordering::Relaxed) => {
                    return Err("interrupted".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(_) => break String::new(),
            }
        };
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

    /// Returns the output of a program that has exited successfully, or the line of its error messages that says why it failed.
    pub(crate) fn output(mut self, interrupted: &Interrupted) -> Result<String, String> {
        // The pipes are read while the program runs, because it would not end if its output filled a pipe.
        let output = self.0.stdout.take().map(Text::of);
        let errors = self.0.stderr.take().map(Text::of);
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
        let text = text.map_or_else(|| Ok(String::new()), |text| text.wait(interrupted))?;
        if status.success() {
            return Ok(text);
        }
        Err(reason(&text)
            .unwrap_or("the program failed without a message")
            .to_owned())
    }
}

/// Returns the line of error messages that says why a program failed: the first one that begins with "error", or else the first one.
/// Lines after it are often hints, such as how to get help.
fn reason(text: &str) -> Option<&str> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let is_error = |line: &&str| {
        let word = line.trim_start().get(..5);
        word.is_some_and(|word| word.eq_ignore_ascii_case("error"))
    };
    lines.clone().find(is_error).or_else(|| lines.next())
}

/// The text of a pipe, which a thread reads.
struct Text {
    /// What was read so far.
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Receives the result when the pipe has ended.
    ended: Receiver<io::Result<()>>,
}

impl Text {
    /// Starts a thread that reads a pipe to its end.
    fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (sender, ended) = mpsc::channel();
        let all = Arc::clone(&bytes);
        thread::spawn(move || {
            let mut part = [0; 8192];
            let result = loop {
                match pipe.read(&mut part) {
                    Ok(0) => break Ok(()),
                    Ok(n) => all
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .extend_from_slice(part.get(..n).unwrap_or_default()),
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => break Err(e),
                }
            };
            let _nobody_waits = sender.send(result);
        });
        Self { bytes, ended }
    }

    /// Returns the text of a program that has exited. If another process holds the pipe open, this is the text that was read within
    /// [`REST`].
    fn wait(self, interrupted: &Interrupted) -> Result<String, String> {
        let end = Instant::now() + REST;
        loop {
            match self.ended.recv_timeout(LOOK_EVERY) {
                Ok(result) => {
                    result.map_err(|e| e.to_string())?;
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("the output was not read".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if interrupted.load(Ordering::Relaxed) => {
                    return Err("interrupted".to_owned());
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
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
    use std::os::unix::process::ExitStatusExt;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_reason_of_a_failure_is_not_the_hint_after_it() {
        let clap = "\nerror: unexpected argument '--x' found\n\nUsage: y\n\nFor more information, try '--help'.\n";
        assert_eq!(reason(clap), Some("error: unexpected argument '--x' found"));
        assert_eq!(
            reason("reading\nError: no peer\nusage\n"),
            Some("Error: no peer")
        );
        assert_eq!(reason(" \nfirst\nsecond\n"), Some("first"));
        assert_eq!(reason("\n"), None);
    }

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

    /// Runs `f` in a thread. Fails if it does not return within 20 s.
    fn within_limit<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, done) = mpsc::channel();
        thread::spawn(move || sender.send(f()));
        done.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn noted(interrupted: bool) -> Interrupted {
        Arc::new(AtomicBool::new(interrupted))
    }

    #[test]
    fn a_server_that_prints_nothing_is_waited_for_only_until_a_limit_or_an_interrupt() {
        let first = |script: &'static str, interrupted: bool| {
            within_limit(move || {
                let line = Ended::first_line(&mut shell(script), &noted(interrupted));
                line.map(|(_, line)| line)
            })
        };
        assert_eq!(first("exec sleep 60", true).unwrap_err(), "interrupted");
        assert_eq!(
            first("exec sleep 60", false).unwrap_err(),
            "the server does not start"
        );
        assert_eq!(
            first("exit 0", false).unwrap_err(),
            "the server does not start"
        );
        assert_eq!(first("echo ready; exec sleep 60", false).unwrap(), "ready");
    }

    #[test]
    fn a_server_can_print_more_than_its_first_line() {
        let mut command = shell("echo ready; sleep 0.2; seq 50000 && exec sleep 60");
        let (mut server, line) = Ended::first_line(&mut command, &noted(false)).unwrap();
        assert_eq!(line, "ready");
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end {
            assert!(server.0.try_wait().unwrap().is_none());
            thread::sleep(CHECK_EVERY);
        }
    }

    #[test]
    fn a_program_that_prints_other_lines_all_the_time_can_be_interrupted() {
        let asked = within_limit(|| {
            let mut command = shell("while echo no; do sleep 0.005; done");
            let mut program = Ended::converse(&mut command).unwrap();
            program.ask("go", |line| line == "yes", &noted(true))
        });
        assert_eq!(asked.unwrap_err(), "interrupted");
    }

    #[test]
    fn a_process_in_the_background_does_not_delay_the_result() {
        let output = |script: &'static str| {
            within_limit(move || {
                let mut command = shell(script);
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                Ended::start(&mut command).unwrap().output(&noted(false))
            })
        };
        assert_eq!(output("sleep 30 & echo done").unwrap(), "done\n");
        let failed = output("sleep 30 & echo why >&2; exit 1");
        assert_eq!(failed.unwrap_err(), "why");
        let asked = within_limit(|| {
            let mut command = shell("sleep 30 >/dev/null & echo why >&2; exit 1");
            let mut program = Ended::converse(&mut command).unwrap();
            program.ask("go", |line| line == "yes", &noted(false))
        });
        assert_eq!(asked.unwrap_err(), "why");
    }

    #[test]
    fn a_program_ends_with_the_thread_that_starts_it() {
        let mut ended = within_limit(|| Ended::start(Command::new("sleep").arg("60")).unwrap());
        let end = Instant::now() + Duration::from_secs(20);
        let status = loop {
            if let Some(status) = ended.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "the program is still running");
            thread::sleep(CHECK_EVERY);
        };
        assert_eq!(status.signal(), Some(libc::SIGTERM));
    }
}
