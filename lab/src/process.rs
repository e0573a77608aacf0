//! A child process that is killed when its value is dropped.
//!
//! The crate `duct` is not used, because tests interact with both ends while they run (they wait for lines of standard error,
//! write standard input and send signals), and programs that start others must be killed as a process group.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Output};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use xtask::Result;

/// The interval at which the exit of a program is checked.
const INTERVAL: Duration = Duration::from_millis(5);

/// The time limit for the exit of a program after SIGTERM, and for the end of its output after its exit.
const GRACE: Duration = Duration::from_secs(2);

/// The time limit for installing or building a program.
pub(crate) const INSTALL: Duration = Duration::from_secs(280);

/// Runs a command that installs or builds a program.
pub(crate) fn step(command: &mut Command) -> Result {
    let status = Process::start_group(command)?.status(INSTALL)?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{}: {status}", command.get_program().display()).into())
}

/// A child process. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    status: Option<ExitStatus>,
    group: bool,
}

impl Process {
    /// Starts a program.
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|e| format!("{name}: {e}"))?;
        Ok(Self {
            name,
            child,
            status: None,
            group: false,
        })
    }

    /// Starts a program in a new process group, which is killed with all its processes.
    pub(crate) fn start_group(command: &mut Command) -> Result<Self> {
        let mut process = Self::start(command.process_group(0))?;
        process.group = true;
        Ok(process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdin(&mut self) -> Result<ChildStdin> {
        Ok(self.child.stdin.take().ok_or("stdin is not piped")?)
    }

    pub(crate) fn stdout(&mut self) -> Result<BufReader<ChildStdout>> {
        let stdout = self.child.stdout.take().ok_or("stdout is not piped")?;
        Ok(BufReader::new(stdout))
    }

    pub(crate) fn stderr(&mut self) -> Result<BufReader<ChildStderr>> {
        let stderr = self.child.stderr.take().ok_or("stderr is not piped")?;
        Ok(BufReader::new(stderr))
    }

    /// Returns the first line on standard error. If `show`, later lines are copied to this process's standard error.
    pub(crate) fn first_line(&mut self, limit: Duration, show: bool) -> Result<String> {
        let stderr = self.stderr()?;
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            for (n, line) in stderr.lines().map_while(std::io::Result::ok).enumerate() {
                if n == 0 {
                    let _gave_up = sender.send(line);
                } else if show {
                    eprintln!("{line}");
                }
            }
        });
        let line = receiver.recv_timeout(limit);
        Ok(line.map_err(|_| format!("{}: printed no line on stderr", self.name))?)
    }

    /// Returns the exit status if the program has exited.
    pub(crate) fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Returns the exit status that [`Self::poll`] or another function has found.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Returns the exit status if the program exits within `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            let status = self.poll()?;
            if status.is_some() || Instant::now() > end {
                return Ok(status);
            }
            thread::sleep(INTERVAL);
        }
    }

    /// Returns the exit status. A program that does not exit within `limit` is killed, which is an error.
    pub(crate) fn status(&mut self, limit: Duration) -> Result<ExitStatus> {
        if let Some(status) = self.wait(limit)? {
            return Ok(status);
        }
        self.kill();
        Err(format!("{}: did not exit within {limit:?}", self.name).into())
    }

    /// Returns the exit status and the output of pipes. A program that does not exit within `limit` is killed, which is an
    /// error that contains its standard error.
    pub(crate) fn output(mut self, limit: Duration) -> Result<Output> {
        let stdout = drain(self.child.stdout.take());
        let stderr = drain(self.child.stderr.take());
        let status = self.status(limit);
        // A process that the program has started may keep the pipes open.
        let [stdout, stderr] = [stdout, stderr].map(|t| t.recv_timeout(GRACE).unwrap_or_default());
        let status = status.map_err(|e| format!("{e}: {}", String::from_utf8_lossy(&stderr)))?;
        Ok(Output {
            status,
            stdout,
            stderr,
        })
    }

    /// Sends a signal to the program, or to its group if it has one.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = i32::try_from(self.id()).ok().and_then(Pid::from_raw) else {
            return;
        };
        // It is not an error if the program has exited already.
        if self.group {
            let _ended = kill_process_group(pid, signal);
        } else if self.status.is_none() {
            let _ended = kill_process(pid, signal);
        }
    }

    /// Stops the program by SIGTERM, or by SIGKILL if it does not exit soon.
    pub(crate) fn end(&mut self) -> Result {
        if self.poll()?.is_none() {
            self.signal(Signal::TERM);
            self.wait(GRACE)?;
        }
        self.kill();
        Ok(())
    }

    /// Kills and reaps the program, and the rest of its group.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        // The number of an empty group may be reused.
        self.group = false;
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads a pipe to its end in a thread, so that the program never blocks on a full pipe.
fn drain(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _what_there_is = pipe.read_to_end(&mut bytes);
        }
        let _gave_up = sender.send(bytes);
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::test_kill_process;
    use std::process::Stdio;

    const LONG: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    #[test]
    fn output_larger_than_a_pipe_is_read_whole() {
        let process = Process::start(&mut shell("head -c 300000 /dev/zero; echo no >&2; exit 3"));
        let output = process.unwrap().output(LONG).unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(output.stdout.len(), 300_000);
        assert_eq!(output.stderr, b"no\n");
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let mut process = Process::start(&mut shell("echo up >&2; exec sleep 60")).unwrap();
        assert_eq!(process.first_line(LONG, false).unwrap(), "up");
        assert!(process.status(Duration::from_millis(1)).is_err());
        let status = process.poll().unwrap().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9)
        );
    }

    #[test]
    fn a_group_ends_with_its_value() {
        let mut process = Process::start_group(&mut shell("sleep 60 & echo $! >&2; wait")).unwrap();
        let child: i32 = process.first_line(LONG, false).unwrap().parse().unwrap();
        let child = Pid::from_raw(child).unwrap();
        assert!(test_kill_process(child).is_ok());
        drop(process);
        let end = Instant::now() + LONG;
        // A killed process is a zombie until init has reaped it.
        let ended = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.as_raw_nonzero()));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        while !ended() {
            assert!(Instant::now() < end);
            thread::sleep(INTERVAL);
        }
    }
}
