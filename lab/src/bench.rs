//! `cargo lab bench`: runs all measurements of `anywarp bench`, including those that need an MPI program (`studies/mpi.c`).
//!
//! With `--netns` the two ends are in network namespaces joined by a veth pair, which are removed after the run. Measurements
//! in a virtual machine are in `interop/bench.rs`.

use crate::programs::{self, INSIDE};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};
use xtask::{Result, sh};

/// The address of the server's end of the link.
const FAR: &str = "10.79.0.2";

/// The MTUs of the link.
const MTUS: [u32; 2] = [1500, 9000];

/// Options of `cargo lab bench`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Measure between two network namespaces, with an MTU of 1500, then of 9000.
    #[arg(long)]
    netns: bool,
    /// Write the results to docs/results.
    #[arg(long)]
    write: bool,
    /// Options of `anywarp bench`: --only ROW…, --repeat N, --short, --json FILE, --strict and others.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Measures the rows that `rest` selects, and checks the bounds.
pub(crate) fn run(options: &Options) -> Result {
    let anywarp = sh::dist().join("bin/anywarp");
    if !anywarp.exists() {
        return Err("the libraries are not built: run `cargo xtask dist` first".into());
    }
    if options.netns && env::var_os(INSIDE).is_none() {
        return programs::in_namespaces();
    }
    let rest: Vec<&str> = options.rest.iter().map(String::as_str).collect();
    if options.write {
        return write(&anywarp, &rest);
    }
    if !options.netns {
        return bench(&anywarp, &rest, None);
    }
    link()?;
    for mtu in MTUS {
        for (host, device) in [("client", "near"), ("server", "wire")] {
            sh::run(Command::new("ip").args([
                "-n",
                host,
                "link",
                "set",
                "dev",
                device,
                "mtu",
                &mtu.to_string(),
            ]))?;
        }
        println!("MTU {mtu}");
        bench(&anywarp, &rest, Some(mtu))?;
    }
    Ok(())
}

/// Measures, and writes the results to docs/results.
fn write(anywarp: &Path, rest: &[&str]) -> Result {
    let json = sh::target().join("bench.json");
    let file = json.display().to_string();
    let mut words = rest.to_vec();
    words.extend(["--json", file.as_str()]);
    bench(anywarp, &words, None)?;
    let folder = sh::root().join("docs/results");
    fs::create_dir_all(&folder)?;
    for name in ["bench.md", "bench.svg"] {
        sh::run(
            Command::new(anywarp)
                .arg("bench")
                .arg("--from")
                .arg(&json)
                .arg("--report")
                .arg(folder.join(name)),
        )?;
    }
    Ok(())
}

/// Creates two hosts, client and server, with a link between them.
fn link() -> Result {
    const SCRIPT: &str = "set -e
mount -t tmpfs tmpfs /run
ip link set lo up
for host in client server; do ip netns add $host; ip -n $host link set lo up; done
ip link add near netns client type veth peer name wire netns server
ip -n client addr add 10.79.0.1/24 dev near
ip -n server addr add 10.79.0.2/24 dev wire
ip -n client link set near up
ip -n server link set wire up";
    sh::run(Command::new("sh").args(["-c", SCRIPT]))
}

/// Builds the MPI program, if an MPI is installed.
fn build_mpi() -> Result<Option<PathBuf>> {
    const COMPILER: &str = "mpicc.openmpi";
    let program = sh::target().join("bench-mpi");
    let mut cc = Command::new(COMPILER);
    // The compiler would warn, because the constant for "no statuses" looks like an array that is too short.
    cc.args(["-O2", "-Wall", "-Wno-stringop-overflow", "-o"])
        .arg(&program)
        .arg(sh::root().join("studies/mpi.c"));
    match cc.status() {
        Ok(status) if status.success() => Ok(Some(program)),
        Ok(_) => Err("studies/mpi.c does not compile".into()),
        Err(_) => {
            println!("the rows have no Open MPI, because {COMPILER} is not installed");
            Ok(None)
        }
    }
}

fn bench(anywarp: &Path, rest: &[&str], mtu: Option<u32>) -> Result {
    let mut command = Command::new(anywarp);
    command.arg("bench");
    if let Some(mpi) = build_mpi()? {
        command.arg("--mpi").arg(mpi);
    }
    if !rest.contains(&"--only") {
        command.arg("--all");
    }
    if let Some(mtu) = mtu {
        command
            .args(["--host", FAR, "--mtu", &mtu.to_string()])
            .args(["--server-prefix", "ip netns exec server"])
            .args(["--client-prefix", "ip netns exec client"]);
    }
    // Each MTU has its own file.
    let mut words = rest.iter();
    while let Some(word) = words.next() {
        command.arg(word);
        if let ("--json" | "--report", Some(mtu)) = (*word, mtu) {
            let path = Path::new(words.next().ok_or("--json needs a file")?);
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let kind = path.extension().unwrap_or_default().to_string_lossy();
            command.arg(path.with_file_name(format!("{name}-{mtu}.{kind}")));
        }
    }
    sh::run(&mut command)
}
