//! Measures MPI: compiles `studies/mpi.c` with Open MPI, and runs it with two ranks over a network.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use super::figures::{Extent, Point};
use super::process::Ended;
use super::store::{Miss, Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;

/// Open MPI's compiler and launcher, as Debian names them.
const COMPILER: &str = "mpicc.openmpi";
const LAUNCHER: &str = "mpiexec.openmpi";

/// The command that installs them.
const INSTALL: &str = "apt install openmpi-bin libopenmpi-dev";

/// The MPI program, and the folder that it is compiled to.
#[derive(Debug)]
pub(crate) struct Mpi {
    source: PathBuf,
    folder: PathBuf,
    /// The compiled program, or why there is none.
    program: Option<Result<PathBuf, Miss>>,
}

impl Mpi {
    /// Returns the program in the folder of the figures, to be compiled to the folder of the report.
    pub(crate) fn new(studies: &Path, folder: &Path) -> Self {
        Self {
            source: studies.join("mpi.c"),
            folder: folder.to_owned(),
            program: None,
        }
    }

    /// Measures a point. Returns the command as a user would type it, and the outcome.
    pub(crate) fn measure(
        &mut self,
        point: &Point,
        extent: Extent,
        library: &Library,
        interrupted: &Interrupted,
    ) -> (String, Outcome) {
        if self.program.is_none() {
            self.program = Some(compile(&self.source, &self.folder));
        }
        let program = match &self.program {
            Some(Ok(program)) => program,
            Some(Err(why)) => return (String::new(), Err(why.clone())),
            None => return (String::new(), Err(Miss::Failed("no program".to_owned()))),
        };
        let get = |axis: &str| point.params.get(axis).map_or("", String::as_str);
        let size: u64 = get("size").parse().unwrap_or(1);
        // The count for the duration of a sample, at 1 GB/s and 10 µs per message.
        let times = extent.seconds() / (size as f64 / 1e9 + 10e-6);
        let words = [
            get("test").to_owned(),
            size.to_string(),
            format!("{:.0}", times.clamp(10.0, 1e6)),
        ];
        let own = match env::current_exe() {
            Ok(own) => own,
            Err(e) => return (String::new(), Err(Miss::Failed(e.to_string()))),
        };
        let mut command = Command::new(LAUNCHER);
        command.args(["-n", "2", "--oversubscribe", "--bind-to", "none"]);
        let mut said = format!("{LAUNCHER} -n 2 --oversubscribe --bind-to none");
        let network: &[&str] = match get("network") {
            "tcp" => &[
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "self,tcp",
                "--mca",
                "btl_tcp_if_include",
                "lo",
            ],
            "memory" => &["--mca", "pml", "ob1", "--mca", "btl", "self,vader"],
            "rdma" => &["--mca", "pml", "ucx", "--mca", "osc", "ucx"],
            other => {
                return (
                    String::new(),
                    Err(Miss::Failed(format!("there is no network {other}"))),
                );
            }
        };
        command.args(network);
        said.push_str(&format!(" {}", network.join(" ")));
        // Containers often have no user besides root.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        if get("network") == "rdma" {
            command
                .envs([
                    ("UCX_NET_DEVICES", "anywarp0:1"),
                    ("UCX_HANDLE_ERRORS", "none"),
                    ("UCX_TLS", "rc_verbs,ud_verbs:aux,self"),
                    ("OMPI_MCA_btl", "^vader,tcp,openib"),
                    ("ANYWARP_CARRIER", "tcp"),
                    ("ANYWARP_ADDR", "127.0.0.1"),
                ])
                .env("ANYWARP_LIB", library.dir())
                .arg(own)
                .args(["run", "--"]);
            said.push_str(" anywarp run --");
        }
        command
            .arg(program)
            .args(&words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        said.push_str(&format!(" {} {}", program.display(), words.join(" ")));
        let outcome = Ended::start(&mut command)
            .and_then(|ended| ended.output(interrupted))
            .and_then(|text| {
                let line = text.lines().rev().find(|line| line.starts_with('{'));
                let mut sample: Sample = line
                    .and_then(|line| serde_json::from_str(line).ok())
                    .ok_or_else(|| format!("not understood: {}", text.trim()))?;
                if let Some(us) = sample.get("us").copied() {
                    sample.insert("mbps".to_owned(), size as f64 * 8.0 / us);
                }
                Ok(sample)
            });
        (said, outcome.map_err(Miss::Failed))
    }
}

fn compile(source: &Path, folder: &Path) -> Result<PathBuf, Miss> {
    let missing = |program: &str| Miss::Blank(format!("{program} is not installed: {INSTALL}"));
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let folder = std::path::absolute(folder).map_err(|e| e.to_string())?;
    let program = folder.join("mpi");
    let done = Command::new(COMPILER)
        .args(["-O2", "-o"])
        .arg(&program)
        .arg(source)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|_| missing(COMPILER))?;
    if !done.success() {
        return Err(Miss::Failed(format!(
            "{COMPILER} does not compile {}",
            source.display()
        )));
    }
    match Command::new(LAUNCHER)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
    {
        Ok(_) => Ok(program),
        Err(_) => Err(missing(LAUNCHER)),
    }
}
