//! Runs several test programs at the same time. Most of them spend most of their time waiting.

use std::io::Write as _;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use xtask::Result;

/// The result of a job: whether it passed, and its output.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) passed: bool,
    pub(crate) output: Vec<u8>,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            passed: output.status.success(),
            output: [output.stdout, output.stderr].concat(),
        }
    }
}

/// Runs `job` for each name, at most one per processor and `more` at a time. Returns the names for which it failed. If network
/// namespaces are not permitted, the jobs run one after the other.
///
/// The output of a job is printed when the job ends, so that the lines of two jobs are not mixed. The longest jobs should come first.
pub(crate) fn run<'a>(
    names: &[&'a str],
    more: usize,
    job: impl Fn(&str) -> Result<Done> + Sync,
) -> Result<Vec<&'a str>> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let work = || {
        while let Some(name) = names.get(next.fetch_add(1, Relaxed)) {
            let begin = Instant::now();
            println!("   {name} begins");
            let done = job(name).unwrap_or_else(|e| Done {
                passed: false,
                output: format!("FAIL {name}: {e}\n").into_bytes(),
            });
            if !done.passed {
                failed
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(*name);
            }
            let seconds = begin.elapsed().as_secs();
            let mut stdout = std::io::stdout().lock();
            // A closed standard output is not an error, because the exit status reports the result.
            let _closed = stdout
                .write_all(&done.output)
                .and_then(|()| writeln!(stdout, "   {name}: {seconds} s"));
        }
    };
    let at_once = if *NAMESPACES {
        thread::available_parallelism()?.get() + more
    } else {
        1
    };
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(work);
        }
    });
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Whether this machine permits network namespaces.
static NAMESPACES: LazyLock<bool> = LazyLock::new(|| {
    Command::new("unshare")
        .args(["--net", "ip", "link", "set", "lo", "up"])
        .output()
        .is_ok_and(|output| output.status.success())
});

/// Returns the command in a new network namespace, where its ports cannot conflict with those of others. If namespaces are not
/// permitted, returns the command unchanged.
pub(crate) fn in_namespace(command: Command) -> Command {
    if !*NAMESPACES {
        return command;
    }
    let mut inside = Command::new("unshare");
    inside
        .args(["--net", "sh", "-c"])
        .args(["ip link set lo up && exec \"$@\"", "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => inside.env(name, value),
            None => inside.env_remove(name),
        };
    }
    inside
}
