//! Measurements in a network namespace of their own: this program starts itself in the namespace, with a subcommand that measures
//! one point.
//!
//! A *point* is a combination of the values of an experiment's axes.

use std::env;
use std::process::{Command, Stdio};

use super::process::Ended;
use super::store::{Miss, Outcome};
use crate::library::Library;
use crate::perf::Interrupted;

/// The first word of the error message of a subcommand that measures one point, if the point cannot be measured on this machine.
pub(super) const BLANK: &str = "blank: ";

/// Runs a command of the system.
pub(super) fn system(text: &str) -> Result<String, String> {
    let mut words = text.split_whitespace();
    let program = words.next().unwrap_or_default();
    let run = |path: &str| Command::new(path).args(words.clone()).output();
    // Debian installs these programs in a folder that is not in the PATH of every user.
    let output = run(program)
        .or_else(|_| run(&format!("/usr/sbin/{program}")))
        .map_err(|e| format!("{program}: {e}: apt install iproute2"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    let why = why
        .lines()
        .next()
        .unwrap_or("the program failed without a message");
    Err(format!("{text}: {why}"))
}

/// Runs `anywarp` with these arguments in a namespace. Returns the command as a user would type it, and the sample that it
/// prints.
pub(super) fn measure(
    words: &[String],
    library: &Library,
    interrupted: &Interrupted,
) -> (String, Outcome) {
    // An ordinary user also needs a user namespace, in which the process has all privileges.
    let flags = if rustix::process::geteuid().is_root() {
        "-n"
    } else {
        "-Urn"
    };
    let command = format!("unshare {flags} anywarp {}", words.join(" "));
    (command, in_namespace(flags, words, library, interrupted))
}

fn in_namespace(
    flags: &str,
    words: &[String],
    library: &Library,
    interrupted: &Interrupted,
) -> Outcome {
    let may = Command::new("unshare").args([flags, "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        let why = "this user may not create network namespaces: run it as root";
        return Err(Miss::Blank(why.to_owned()));
    }
    let own = env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new("unshare");
    command
        .arg(flags)
        .arg(own)
        .args(words)
        .env("ANYWARP_LIB", library.dir())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let text = Ended::start(&mut command)?
        .output(interrupted)
        .map_err(|why| match why.split_once(BLANK) {
            Some((_, why)) => Miss::Blank(why.to_owned()),
            None => Miss::Failed(why),
        })?;
    serde_json::from_str(&text)
        .map_err(|_| Miss::Failed(format!("output not understood: {}", text.trim())))
}
