//! `cargo lab bench`: runs all measurements of `anywarp bench`, including those that need an MPI program (`studies/mpi.c`).
//!
//! With `--netns` the two ends are in network namespaces joined by a veth pair. The namespaces are removed after the run.
//! Measurements in a virtual machine are in `interop/bench.rs`.

use crate::programs::{self, INSIDE};
use std::ffi::OsString;
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
    /// Measure over the loopback interface, and write the results to docs/results.
    #[arg(long, conflicts_with = "netns")]
    write: bool,
    /// Options of `anywarp bench`: --only ROW…, --repeat N, --short, --json FILE, --strict and others.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Runs `anywarp bench`, which measures the rows of its table that `--only` selects, or all, and compares each with its target.
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
pub(crate) fn link() -> Result {
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
    // The compiler would warn that MPI_STATUSES_IGNORE, which stands for no array, is an array too short for MPI_Waitall.
    cc.args(["-O2", "-Wall", "-Wno-stringop-overflow", "-o"])
        .arg(&program)
        .arg(sh::root().join("studies/mpi.c"));
    match cc.status() {
        Ok(status) if status.success() => Ok(Some(program)),
        Ok(_) => Err("studies/mpi.c does not compile".into()),
        Err(_) => {
            println!("Open MPI is not measured, because {COMPILER} is not installed");
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
    command.args(with_mtu(rest, mtu)?);
    sh::run(&mut command)
}

/// Adds the MTU to the names of the files that `anywarp bench` writes, so that the run with the next MTU does not overwrite them.
fn with_mtu(rest: &[&str], mtu: Option<u32>) -> Result<Vec<OsString>> {
    let mut changed = Vec::new();
    let mut words = rest.iter();
    while let Some(word) = words.next() {
        changed.push(word.into());
        if let ("--json" | "--report", Some(mtu)) = (*word, mtu) {
            let path = Path::new(words.next().ok_or_else(|| format!("{word} needs a file"))?);
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let kind = path.extension().unwrap_or_default().to_string_lossy();
            changed.push(path.with_file_name(format!("{name}-{mtu}.{kind}")).into());
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mtu_has_its_own_files() {
        let rest = ["--short", "--json", "a/b.json", "--report", "c.svg"];
        let changed = with_mtu(&rest, Some(9000)).unwrap();
        assert_eq!(
            changed,
            [
                "--short",
                "--json",
                "a/b-9000.json",
                "--report",
                "c-9000.svg"
            ]
        );
        assert_eq!(with_mtu(&rest, None).unwrap(), rest);
        let error = with_mtu(&["--report"], Some(1500)).unwrap_err();
        assert_eq!(error.to_string(), "--report needs a file");
    }

    #[test]
    fn results_between_namespaces_are_not_written_to_docs() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        let parse = |words: &[&str]| {
            let words = ["bench"].iter().chain(words);
            <Line as clap::Parser>::try_parse_from(words).map(|line| line.options)
        };
        assert!(parse(&["--netns", "--write"]).is_err());
        let options = parse(&["--write", "--only", "lat"]).unwrap();
        assert!(options.write && options.rest == ["--only", "lat"]);
    }
}
