//! Measures MPI: compiles the programs of `studies` with Open MPI, and runs them over a network.
//!
//! A *point* is a combination of the values of an experiment's axes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, thread};

use super::figures::{Extent, Params, Point};
use super::process::{Conversation, Ended};
use super::store::{Miss, Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;

/// Open MPI's compiler and launcher, as Debian names them.
const COMPILER: &str = "mpicc.openmpi";
const LAUNCHER: &str = "mpiexec.openmpi";

/// The command that installs Open MPI.
const INSTALL: &str = "apt install openmpi-bin libopenmpi-dev";

/// The two MPI programs. Their sources are in the folder of the figures.
const PROGRAMS: [&str; 2] = ["mpi", "kernels"];

/// The number of outstanding messages in a test of bandwidth.
const DEPTH: u32 = 16;

/// The MPI programs, and the folder that they are compiled to.
#[derive(Debug)]
pub(crate) struct Mpi {
    studies: PathBuf,
    folder: PathBuf,
    /// The folder of the compiled programs, or why there are none.
    programs: Option<Result<PathBuf, Miss>>,
    /// The programs that run, by their network and command. Starting one takes longer than most measurements.
    running: BTreeMap<String, Conversation>,
}

impl Mpi {
    /// Returns the programs in the folder of the figures, to be compiled to the folder of the report.
    pub(crate) fn new(studies: &Path, folder: &Path) -> Self {
        Self {
            studies: studies.to_owned(),
            folder: folder.to_owned(),
            programs: None,
            running: BTreeMap::new(),
        }
    }

    /// Ends the programs.
    pub(crate) fn end(&mut self) {
        // A program takes up to a second to exit. All of them are told to exit first and then waited for, so that they exit at the same time.
        for running in self.running.values_mut() {
            running.hang_up();
        }
        self.running.clear();
    }

    /// Measures a point. Returns the command as a user would type it, and the outcome.
    pub(crate) fn measure(
        &mut self,
        point: &Point,
        extent: Extent,
        library: &Library,
        interrupted: &Interrupted,
    ) -> (String, Outcome) {
        let programs = self
            .programs
            .get_or_insert_with(|| compile(&self.studies, &self.folder));
        let programs = match programs {
            Ok(programs) => programs,
            Err(why) => return (String::new(), Err(why.clone())),
        };
        let failed = |why: String| (String::new(), Err(Miss::Failed(why)));
        let network = point.params.get("network").map_or("", String::as_str);
        let Some(network) = NETWORKS.iter().find(|n| n.name == network) else {
            return failed(format!("unknown network: {network}"));
        };
        let words = words(&point.params, extent);
        let own = match env::current_exe() {
            Ok(own) => own,
            Err(e) => return failed(e.to_string()),
        };
        let ranks = point.params.get("ranks").map_or("2", String::as_str);
        let mut command = Command::new(LAUNCHER);
        let mut options = vec!["-n", ranks, "--oversubscribe"];
        options.extend(binding(ranks, processors()));
        command.args(&options).args(network.options);
        let mut typed = format!(
            "{LAUNCHER} {} {}",
            options.join(" "),
            network.options.join(" ")
        );
        // Containers often have no user besides root.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        if !network.variables.is_empty() {
            command
                .env("ANYWARP_CARRIER", "tcp")
                .envs(network.variables.iter().copied())
                .env("ANYWARP_ADDR", "127.0.0.1")
                .env("ANYWARP_LIB", library.dir())
                .arg(own)
                .args(["run", "--"]);
            typed.push_str(" anywarp run --");
        }
        let (program, words) = words;
        let program = programs.join(program);
        let words = words.join(" ");
        command.arg(&program);
        // Networks can have the same options and differ in their variables.
        let started = format!("{}: {typed} {}", network.name, program.display());
        typed.push_str(&format!(" {} {words}", program.display()));
        let answer = if point
            .params
            .get("test")
            .is_some_and(|test| test == "memory")
        {
            // A new process runs this test, because the memory of a process includes what its earlier tests have allocated.
            command
                .args(words.split(' '))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            Ended::start(&mut command).and_then(|ended| ended.output(interrupted))
        } else {
            let running = self.running.remove(&started);
            let running = running.map_or_else(|| Ended::converse(command.arg("-")), Ok);
            running.and_then(|mut running| {
                let answer = running.ask(&words, is_answer, interrupted)?;
                // A program that has failed is not used again.
                self.running.insert(started, running);
                Ok(answer)
            })
        };
        let size = number(&point.params, "size");
        let outcome = answer.and_then(|text| parse_output(&text, size));
        (typed, outcome.map_err(Miss::Failed))
    }
}

/// Returns the number of processors that this process may use.
fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the options that place the ranks. Each rank stands for a host, so it gets a processor of its own if there are enough:
/// two ranks that poll on the same processor would wait for each other's time slices.
fn binding(ranks: &str, processors: usize) -> &'static [&'static str] {
    match ranks.parse::<usize>() {
        Ok(ranks) if ranks <= processors => &[
            "--use-hwthread-cpus",
            "--map-by",
            "hwthread",
            "--bind-to",
            "hwthread",
        ],
        _ => &["--bind-to", "none"],
    }
}

/// A transport between ranks.
struct Network {
    /// The name in the files of the figures.
    name: &'static str,
    /// The options of Open MPI.
    options: &'static [&'static str],
    /// The environment variables. Networks without any do not use the device.
    variables: &'static [(&'static str, &'static str)],
}

/// UCX over the device, for messages and for one-sided operations. The variable OMPI_MCA_btl of these networks disables Open MPI's own
/// transports, because otherwise one-sided operations would use them.
const UCX: &[&str] = &["--mca", "pml", "ucx", "--mca", "osc", "ucx"];

const NETWORKS: [Network; 7] = [
    Network {
        name: "tcp",
        options: &[
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
        variables: &[],
    },
    Network {
        name: "memory",
        options: &["--mca", "pml", "ob1", "--mca", "btl", "self,vader"],
        variables: &[],
    },
    Network {
        name: "rdma",
        options: UCX,
        variables: &[
            ("UCX_NET_DEVICES", "anywarp0:1"),
            ("UCX_HANDLE_ERRORS", "none"),
            ("UCX_TLS", "rc_verbs,ud_verbs:aux,self"),
            ("OMPI_MCA_btl", "^vader,tcp,openib"),
        ],
    },
    // As "rdma", but the device transfers the data through shared memory, and does not use the kernel's TCP.
    Network {
        name: "rdma-memory",
        options: UCX,
        variables: &[
            ("ANYWARP_CARRIER", "auto"),
            ("UCX_NET_DEVICES", "anywarp0:1"),
            ("UCX_HANDLE_ERRORS", "none"),
            ("UCX_TLS", "rc_verbs,ud_verbs:aux,self"),
            ("OMPI_MCA_btl", "^vader,tcp,openib"),
        ],
    },
    // As "rdma", but the device's connections are its own reliable protocol over datagrams.
    Network {
        name: "rdma-udp",
        options: UCX,
        variables: &[
            ("ANYWARP_RC", "udp"),
            ("UCX_NET_DEVICES", "anywarp0:1"),
            ("UCX_HANDLE_ERRORS", "none"),
            ("UCX_TLS", "rc_verbs,ud_verbs:aux,self"),
            ("OMPI_MCA_btl", "^vader,tcp,openib"),
        ],
    },
    Network {
        name: "ud",
        options: UCX,
        variables: &[
            ("UCX_NET_DEVICES", "anywarp0:1"),
            ("UCX_HANDLE_ERRORS", "none"),
            ("UCX_TLS", "ud_verbs,self"),
            ("OMPI_MCA_btl", "^vader,tcp,openib"),
        ],
    },
    // FI_ANYWARP_LINKS=0: all messages are datagrams. Otherwise ranks on one host would use connections.
    Network {
        name: "datagrams",
        options: &[
            "--mca",
            "pml",
            "cm",
            "--mca",
            "mtl",
            "ofi",
            "--mca",
            "mtl_ofi_provider_include",
            "anywarp",
        ],
        variables: &[
            ("FI_ANYWARP_LINKS", "0"),
            ("OMPI_MCA_btl", "^vader,tcp,openib"),
        ],
    },
];

/// Returns the value of an axis as a number, or 1.
fn number(params: &Params, axis: &str) -> u64 {
    let value = params.get(axis).and_then(|value| value.parse().ok());
    value.unwrap_or(1)
}

/// Returns the program of a point and its arguments.
fn words(params: &Params, extent: Extent) -> (&'static str, Vec<String>) {
    let get = |axis: &str| params.get(axis).map_or("", String::as_str);
    let test = get("test");
    if ["is", "cg"].contains(&test) {
        return ("kernels", vec![get("class").to_owned(), test.to_owned()]);
    }
    let size = number(params, "size");
    let mut words = vec![test.to_owned(), size.to_string()];
    // The seconds that one step takes, or one message at 1 GB/s, without the 10 µs that are added below. The number of messages
    // or steps is such that all of them take about as long as one sample should take.
    let one = match test {
        "steps" => number(params, "compute") as f64 / 1e6,
        _ => size as f64 / 1e9,
    };
    let times = (extent.seconds() / (one + 10e-6)).clamp(10.0, 1e6);
    match test {
        "memory" => {}
        "steps" => words.extend([format!("{times:.0}"), get("compute").to_owned()]),
        "bw" | "both" => words.extend([format!("{times:.0}"), DEPTH.to_string()]),
        _ => words.push(format!("{times:.0}")),
    }
    ("mpi", words)
}

/// Returns whether a line is the result of a command.
fn is_answer(line: &str) -> bool {
    line.starts_with('{') || line.contains(" ranks, ")
}

/// Parses the output of either program. Messages have `size` bytes.
fn parse_output(text: &str, size: u64) -> Result<Sample, String> {
    let bad = || format!("output not understood: {}", text.trim());
    if let Some(line) = text.lines().rev().find(|line| line.starts_with('{')) {
        let mut sample: Sample = serde_json::from_str(line).map_err(|_| bad())?;
        if let Some(us) = sample.get("us").copied() {
            sample.insert("mbps".to_owned(), size as f64 * 8.0 / us);
        }
        return Ok(sample);
    }
    // "2 ranks, is.W 0.103 s"
    let line = text.lines().find(|line| line.contains(" ranks, "));
    let seconds = line
        .and_then(|line| line.strip_suffix(" s")?.split(' ').next_back())
        .and_then(|seconds| seconds.parse::<f64>().ok())
        .ok_or_else(bad)?;
    Ok([("seconds".to_owned(), seconds)].into())
}

fn compile(studies: &Path, folder: &Path) -> Result<PathBuf, Miss> {
    let missing = |program: &str| Miss::Blank(format!("{program} is not installed: {INSTALL}"));
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let folder = std::path::absolute(folder).map_err(|e| e.to_string())?;
    for program in PROGRAMS {
        let source = studies.join(program).with_extension("c");
        let done = Command::new(COMPILER)
            .args(["-O2", "-o"])
            .arg(folder.join(program))
            .arg(&source)
            .arg("-lm")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(|_| missing(COMPILER))?;
        if !done.success() {
            let why = format!("{COMPILER} does not compile {}", source.display());
            return Err(Miss::Failed(why));
        }
    }
    match Command::new(LAUNCHER)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
    {
        Ok(_) => Ok(folder),
        Err(_) => Err(missing(LAUNCHER)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_processor_if_there_are_enough() {
        assert!(binding("2", 2).contains(&"hwthread"));
        assert_eq!(binding("4", 2), ["--bind-to", "none"]);
    }

    #[test]
    fn points_become_commands() {
        let typed = |values: &[(&str, &str)]| {
            let pairs = values
                .iter()
                .map(|(axis, value)| ((*axis).to_owned(), (*value).to_owned()));
            let (program, words) = words(&pairs.collect(), Extent::Quick);
            format!("{program} {}", words.join(" "))
        };
        assert_eq!(
            typed(&[("test", "lat"), ("size", "1000000")]),
            "mpi lat 1000000 59"
        );
        assert_eq!(
            typed(&[("test", "both"), ("size", "1")]),
            "mpi both 1 5999 16"
        );
        assert_eq!(
            typed(&[("test", "steps"), ("size", "9"), ("compute", "990")]),
            "mpi steps 9 60 990"
        );
        assert_eq!(
            typed(&[("test", "memory"), ("size", "1024"), ("ranks", "4")]),
            "mpi memory 1024"
        );
        assert_eq!(typed(&[("test", "cg"), ("class", "W")]), "kernels W cg");
    }

    #[test]
    fn the_output_of_both_programs_is_parsed() {
        let of = |text: &str, name: &str| parse_output(text, 1000).unwrap().get(name).copied();
        assert_eq!(of("x\n{\"us\": 4.0}\n", "mbps"), Some(2000.0));
        assert_eq!(of("{\"mb\": 4.5}\n", "mb"), Some(4.5));
        assert_eq!(of("2 ranks, is.W 0.103 s\n", "seconds"), Some(0.103));
        assert!(parse_output("2 ranks, is.W failed\n", 1).is_err());
    }
}
