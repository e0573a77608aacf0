//! `cargo lab adopters`: builds or installs programs of other projects, unchanged, and runs them on the device.
//!
//! The PyPI packages of a program are installed in an environment in `target/adopters`, which is created again if its versions differ
//! from those listed here. Rust crates are built there from crates.io with their own lock file. Programs and libraries of Debian
//! are those of the system. The programs are started as users start them: by `anywarp run`, without other environment variables,
//! each in a new network namespace. Each program compares the data that it received with the data that was sent. The log of
//! the device shows whether the device transferred the data.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::process::{INSTALL, Process, step};
use crate::python;
use xtask::{Result, sh};

/// The time limit for running a program.
const RUN: Duration = Duration::from_secs(120);

/// The beginning of the line that a program prints when all data has arrived unchanged.
const EQUAL: &str = "equal ";
/// A part of the line that the device logs when a queue pair is connected.
const CONNECTED: &str = ": connected to ";

struct Adopter {
    /// The name of the program in `tests/adopters`, without its ending.
    name: &'static str,
    source: Source,
    /// Run only with `--nightly` or if `--filter` selects it: the packages are large, or other programs already exercise the same code of the device.
    nightly: bool,
}

/// Where the software comes from, and the language of the program in `tests/adopters`.
enum Source {
    /// From PyPI, with a Python program. The value lists the required packages with their versions, without dependencies that are
    /// not used here, such as torch.
    Python(&'static [&'static str]),
    /// From Debian, with a program for Debian's Python, which uses installed modules or runs installed programs.
    Debian,
    /// From Debian, with a program in C or C++.
    Library {
        ending: &'static str,
        compiler: &'static str,
        libraries: &'static [&'static str],
    },
    /// From crates.io, with a Python program whose arguments are the folder of the built examples and the tests.
    Crate {
        package: &'static str,
        version: &'static str,
        /// The integration tests that use the device.
        tests: &'static [&'static str],
    },
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
        source: Source::Python(&["dlslime==0.1.23"]),
        nightly: false,
    },
    Adopter {
        name: "mooncake_engine",
        source: Source::Python(&["mooncake-transfer-engine-non-cuda==0.3.13.post1"]),
        nightly: false,
    },
    Adopter {
        name: "mooncake_store",
        source: Source::Python(&["mooncake-transfer-engine-non-cuda==0.3.13.post1"]),
        nightly: false,
    },
    Adopter {
        name: "infinistore_blocks",
        source: Source::Python(&["infinistore==0.2.35", "uvloop==0.21.0", "numpy==2.4.6"]),
        nightly: false,
    },
    Adopter {
        name: "gloo_ranks",
        source: Source::Library {
            ending: "cc",
            compiler: "c++",
            libraries: &["gloo"],
        },
        nightly: false,
    },
    Adopter {
        name: "rpma_regions",
        source: Source::Library {
            ending: "c",
            compiler: "cc",
            libraries: &["rpma", "ibverbs"],
        },
        nightly: false,
    },
    Adopter {
        name: "iser_disk",
        source: Source::Debian,
        nightly: false,
    },
    Adopter {
        name: "qemu_migration",
        source: Source::Debian,
        nightly: false,
    },
    Adopter {
        name: "udapl_endpoints",
        source: Source::Debian,
        nightly: false,
    },
    Adopter {
        name: "sideway_crate",
        source: Source::Crate {
            package: "sideway",
            version: "0.4.3",
            tests: &[
                "test_qp",
                "test_cq",
                "test_mr_and_cq",
                "test_post_send",
                "test_atomic",
            ],
        },
        nightly: false,
    },
    Adopter {
        name: "mpi4py_ranks",
        source: Source::Python(&["mpi4py==4.1.2", "mpich==5.0.2", "numpy==2.4.6"]),
        nightly: true,
    },
    // Needs gromacs, which takes 300 MB.
    Adopter {
        name: "gromacs_water",
        source: Source::Debian,
        nightly: true,
    },
    // Needs python3-torch, which brings 117 other packages.
    Adopter {
        name: "tensorpipe_rpc",
        source: Source::Debian,
        nightly: true,
    },
    Adopter {
        name: "nixl_agents",
        source: Source::Python(&["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.4.6"]),
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
        let done = prepare(adopter).and_then(|command| transfer(&command));
        tally.report(adopter.name, done);
        println!("      {} s", begin.elapsed().as_secs());
    }
    tally.end("adopters")
}

/// Installs or builds what a program needs. Returns its command.
fn prepare(adopter: &Adopter) -> Result<Vec<PathBuf>> {
    let folder = |name| sh::target().join("adopters").join(name);
    let dir = folder(adopter.name);
    let program = |ending| sh::root().join(format!("tests/adopters/{}.{ending}", adopter.name));
    Ok(match &adopter.source {
        Source::Python(packages) => {
            // Programs that use the same package share its environment.
            let package = packages.first().and_then(|p| p.split("==").next());
            let dir = folder(package.unwrap_or(adopter.name));
            vec![python::environment(&dir, packages)?, program("py")]
        }
        Source::Debian => vec!["/usr/bin/python3".into(), program("py")],
        Source::Library {
            ending,
            compiler,
            libraries,
        } => {
            fs::create_dir_all(&dir)?;
            let binary = dir.join("program");
            step(
                Command::new(compiler)
                    .args(["-O1", "-o"])
                    .arg(&binary)
                    .arg(program(ending))
                    .args(libraries.iter().map(|library| format!("-l{library}"))),
            )?;
            vec![binary]
        }
        Source::Crate {
            package,
            version,
            tests,
        } => {
            let manifest = unpacked(&dir, package, version)?;
            let mut command = vec!["python3".into(), program("py"), dir.join("debug/examples")];
            command.extend(built(&dir, &manifest, tests)?);
            command
        }
    })
}

/// The part of cargo's messages and metadata that is used.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

/// Downloads a crate as a dependency of a package that this function writes. Returns the path of the crate's manifest.
fn unpacked(dir: &Path, package: &str, version: &str) -> Result<PathBuf> {
    let user = dir.join("user");
    fs::create_dir_all(user.join("src"))?;
    let manifest = user.join("Cargo.toml");
    fs::write(
        &manifest,
        format!(
            "[package]\nname = \"user\"\nedition = \"2024\"\n[dependencies]\n{package} = \"={version}\"\n[workspace]\n"
        ),
    )?;
    fs::write(user.join("src/lib.rs"), "")?;
    let mut cargo = sh::cargo();
    cargo
        .args([
            "metadata",
            "--quiet",
            "--format-version=1",
            "--manifest-path",
        ])
        .arg(&manifest);
    let metadata: Metadata = serde_json::from_slice(&captured(&mut cargo)?)?;
    let mut packages = metadata.packages.into_iter();
    let found = packages.find(|p| p.name == package);
    Ok(found
        .ok_or("cargo metadata does not name the crate")?
        .manifest_path)
}

/// Builds the examples and some tests of a crate. Returns the paths of the tests.
fn built(dir: &Path, manifest: &Path, tests: &[&str]) -> Result<Vec<PathBuf>> {
    let cargo = |task| {
        let mut cargo = sh::cargo();
        cargo
            .args([task, "--quiet", "--locked", "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(dir)
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo
    };
    step(cargo("build").arg("--examples"))?;
    let names = tests.iter().flat_map(|test| ["--test", test]);
    let mut command = cargo("test");
    command
        .args(["--no-run", "--message-format=json", "--lib"])
        .args(names);
    let messages = captured(&mut command)?;
    let mut programs = Vec::new();
    for message in serde_json::Deserializer::from_slice(&messages).into_iter::<Message>() {
        if let Message {
            target: Some(target),
            executable: Some(program),
        } = message?
            && (target.kind == ["test"] || target.kind == ["lib"])
        {
            programs.push(program);
        }
    }
    if programs.len() != tests.len() + 1 {
        return Err(format!(
            "{} tests were built, expected {}",
            programs.len(),
            tests.len() + 1
        )
        .into());
    }
    Ok(programs)
}

/// Returns what a command writes.
fn captured(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_owned();
    command.stdout(Stdio::piped());
    let done = Process::start_group(command)?.output(INSTALL)?;
    if done.status.success() {
        return Ok(done.stdout);
    }
    Err(format!("{}: {}", name.display(), done.status).into())
}

/// Runs the program of an adopter.
fn transfer(program: &[PathBuf]) -> Result {
    let mut command = Command::new("unshare");
    command
        .args(["--map-root-user", "--net", "sh", "-c"])
        .args(["ip link set lo up && exec \"$@\"", "sh"])
        .arg(sh::dist().join("bin/anywarp"))
        .args(["run", "--log", "info", "--"])
        .args(program)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let done = Process::start_group(&mut command)?.output(RUN)?;
    let printed = String::from_utf8_lossy(&done.stdout);
    let log = String::from_utf8_lossy(&done.stderr);
    let what = if !done.status.success() {
        done.status.to_string()
    } else if !printed.lines().any(|line| line.starts_with(EQUAL)) {
        "it did not report that the received data is equal".to_owned()
    } else if !log.contains(CONNECTED) {
        "the log shows no connection of the device".to_owned()
    } else {
        return Ok(());
    };
    Err(format!("{what}\n{printed}{log}").into())
}
