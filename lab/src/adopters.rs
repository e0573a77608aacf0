//! `cargo lab adopters`: software of other people that is in PyPI, installed as it is and run on the device.
//!
//! Each has a Python environment of its own in `target/adopters`, made when the versions that are named here are not the ones in
//! it. The programs are started as users start them: by `anywarp run`, and with no variable besides. Each compares what it has
//! transferred; that the device carried it is told by the device's log. They run in a network namespace of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::Process;
use xtask::{Result, sh};

/// Longest time to install one, and to run it.
const INSTALL: Duration = Duration::from_secs(280);
const RUN: Duration = Duration::from_secs(120);

/// What a program prints last when all that it has transferred is equal.
const EQUAL: &str = "equal ";
/// What the device's log says of a connection of queue pairs.
const CONNECTED: &str = ": connected to ";

struct Adopter {
    /// Name of the script in `tests/adopters`, and of its environment.
    name: &'static str,
    /// Everything that it needs, with versions: dependencies that it does not use here, as torch, are left out.
    packages: &'static [&'static str],
}

const ADOPTERS: &[Adopter] = &[
    Adopter {
        name: "mooncake_engine",
        packages: &["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
    },
    Adopter {
        name: "nixl_agents",
        packages: &["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.4.6"],
    },
];

/// Installs and runs those with `filter` in their name.
pub(crate) fn run(filter: Option<&str>) -> Result {
    let mut tally = sh::Tally::default();
    let part = filter.unwrap_or_default();
    for adopter in ADOPTERS.iter().filter(|a| a.name.contains(part)) {
        let begin = Instant::now();
        let done = environment(adopter).and_then(|python| transfer(adopter, &python));
        tally.report(adopter.name, done);
        println!("      {} s", begin.elapsed().as_secs());
    }
    tally.end("adopters")
}

/// The Python of an environment that has the packages.
fn environment(adopter: &Adopter) -> Result<PathBuf> {
    let dir = sh::target().join("adopters").join(adopter.name);
    let python = dir.join("bin/python");
    let stamp = dir.join("installed");
    let wanted = adopter.packages.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|has| has == wanted) {
        return Ok(python);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    step(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
    step(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(["--disable-pip-version-check", "--only-binary=:all:"])
            .args(adopter.packages),
    )?;
    fs::write(&stamp, wanted)?;
    Ok(python)
}

fn step(command: &mut Command) -> Result {
    let status = Process::start_group(command)?.status(INSTALL)?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{}: {status}", command.get_program().display()).into())
}

/// Runs the program of an adopter.
fn transfer(adopter: &Adopter, python: &Path) -> Result {
    let script = sh::root().join(format!("tests/adopters/{}.py", adopter.name));
    let mut command = Command::new("unshare");
    command
        .args(["--map-root-user", "--net", "sh", "-c"])
        .args(["ip link set lo up && exec \"$@\"", "sh"])
        .arg(sh::dist().join("bin/anywarp"))
        .args(["run", "--log", "info", "--"])
        .arg(python)
        .arg(script)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let done = Process::start_group(&mut command)?.output(RUN)?;
    let printed = String::from_utf8_lossy(&done.stdout);
    let log = String::from_utf8_lossy(&done.stderr);
    let what = if !done.status.success() {
        done.status.to_string()
    } else if !printed.lines().any(|line| line.starts_with(EQUAL)) {
        "it did not compare what it transferred".to_owned()
    } else if !log.contains(CONNECTED) {
        "it did not use the device".to_owned()
    } else {
        return Ok(());
    };
    Err(format!("{what}\n{printed}{log}").into())
}
