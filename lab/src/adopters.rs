//! `cargo lab adopters`: installs programs of other projects from PyPI, unchanged, and runs them on the device.
//!
//! Each program has a separate Python environment in `target/adopters`, which is created again if its versions differ from
//! those listed here. The programs are started as users start them: by `anywarp run`, without other environment variables,
//! each in a new network namespace. Each program compares the data that it received with the data that was sent. The log of
//! the device shows whether the device transferred the data.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::Process;
use xtask::{Result, sh};

/// The time limit for installing a program; `RUN` is that for running it.
const INSTALL: Duration = Duration::from_secs(280);
const RUN: Duration = Duration::from_secs(120);

/// The beginning of the line that a program prints when all data has arrived unchanged.
const EQUAL: &str = "equal ";
/// A part of the line that the device logs when a queue pair is connected.
const CONNECTED: &str = ": connected to ";

struct Adopter {
    /// The name of the script in `tests/adopters`, and of the environment.
    name: &'static str,
    /// The required packages with their versions. Dependencies that are not used here, such as torch, are omitted.
    packages: &'static [&'static str],
    /// Run only with `--nightly`: the packages are large, or other runs have the same paths.
    nightly: bool,
}

/// Options of `cargo lab adopters`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only programs with this in their name.
    #[arg(long, value_name = "PART")]
    filter: Option<String>,
    /// Also the programs that take long to install.
    #[arg(long)]
    nightly: bool,
}

const ADOPTERS: &[Adopter] = &[
    Adopter {
        name: "dlslime_endpoints",
        packages: &["dlslime==0.1.23"],
        nightly: false,
    },
    Adopter {
        name: "mooncake_engine",
        packages: &["mooncake-transfer-engine-non-cuda==0.3.13.post1"],
        nightly: false,
    },
    Adopter {
        name: "infinistore_blocks",
        packages: &["infinistore==0.2.35", "uvloop==0.21.0", "numpy==2.4.6"],
        nightly: false,
    },
    Adopter {
        name: "mpi4py_ranks",
        packages: &["mpi4py==4.1.2", "mpich==5.0.2", "numpy==2.4.6"],
        nightly: true,
    },
    Adopter {
        name: "nixl_agents",
        packages: &["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.4.6"],
        nightly: true,
    },
];

/// Installs and runs the programs.
pub(crate) fn run(options: &Options) -> Result {
    let mut tally = sh::Tally::default();
    let part = options.filter.as_deref();
    let chosen = |a: &&Adopter| match part {
        Some(part) => a.name.contains(part),
        None => options.nightly || !a.nightly,
    };
    for adopter in ADOPTERS.iter().filter(chosen) {
        let begin = Instant::now();
        let done = environment(adopter).and_then(|python| transfer(adopter, &python));
        tally.report(adopter.name, done);
        println!("      {} s", begin.elapsed().as_secs());
    }
    tally.end("adopters")
}

/// Creates the environment of a program if it is not up to date. Returns the path of its Python.
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
