//! `cargo lab mpi`: runs the programs of tests/mpi with the distribution's MPIs over the device.
//!
//! Shared memory and plain TCP are disabled, so that all messages between ranks are sent through verbs. With `--compare` the
//! transports of Open MPI are compared instead, those of the device and others.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use xtask::{Result, sh};

/// The time limit of one run in seconds.
const PATIENCE: &str = "120";

/// The least number of bytes that the ranks must exchange, which is much less than they do.
const LEAST: u64 = 4 << 20;

struct Way {
    name: &'static str,
    compiler: &'static str,
    launcher: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

const RC: &str = "rc_verbs,ud_verbs:aux,self";
const UD: &str = "ud_verbs,self";

const WAYS: &[Way] = &[
    Way {
        name: "mpich ch4:ucx rc",
        compiler: "mpicc.mpich",
        launcher: &["mpiexec.mpich", "-launcher", "fork"],
        env: &[("UCX_TLS", RC), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "mpich ch4:ucx ud",
        compiler: "mpicc.mpich",
        launcher: &["mpiexec.mpich", "-launcher", "fork"],
        env: &[("UCX_TLS", UD), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "openmpi pml/ucx rc",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
            "--mca",
            "pml",
            "ucx",
            "--mca",
            "osc",
            "ucx",
        ],
        env: &[("UCX_TLS", RC)],
    },
    Way {
        name: "openmpi mtl/ofi verbs;ofi_rxm",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
            "--mca",
            "pml",
            "cm",
            "--mca",
            "mtl",
            "ofi",
            "--mca",
            "mtl_ofi_provider_include",
            "verbs;ofi_rxm",
        ],
        env: &[],
    },
    Way {
        name: "openmpi mtl/ofi anywarp",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
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
        env: &[],
    },
];

/// The options of `cargo lab mpi`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Compare latency, bandwidth, memory and two kernels over the transports of Open MPI, in this many rounds.
    #[arg(long, value_name = "ROUNDS")]
    compare: Option<usize>,
}

/// The transports that are compared, each with its options of Open MPI.
const TRANSPORTS: &[(&str, &[&str])] = &[
    (
        "`anywarp`",
        &[
            "pml",
            "cm",
            "mtl",
            "ofi",
            "mtl_ofi_provider_include",
            "anywarp",
        ],
    ),
    ("UCX `rc_verbs` over anywarp", &["pml", "ucx"]),
    (
        "`tcp;ofi_rxm`",
        &[
            "pml",
            "cm",
            "mtl",
            "ofi",
            "mtl_ofi_provider_include",
            "tcp;ofi_rxm",
        ],
    ),
    (
        "`udp;ofi_rxd`",
        &[
            "pml",
            "cm",
            "mtl",
            "ofi",
            "mtl_ofi_provider_include",
            "udp;ofi_rxd",
        ],
    ),
    ("`btl/tcp`", &["pml", "ob1", "btl", "tcp,self"]),
];

/// The numbers of ranks for which memory is measured.
const RANKS: [usize; 4] = [2, 4, 8, 16];

/// Compiles a program of tests/mpi or of studies.
fn compile(compiler: &str, source: &str, to: &Path) -> Result {
    sh::run(
        Command::new(compiler)
            // The compiler would warn, because MPICH's constant for "no statuses" looks like an array that is too short.
            .args(["-O2", "-Wall", "-Wno-stringop-overflow", "-o"])
            .arg(to)
            .arg(sh::root().join(source))
            .arg("-lm"),
    )
}

/// Runs a program over a transport. Returns the numbers that it prints.
fn measure(program: &Path, transport: &[&str], ranks: usize, argument: &str) -> Result<Vec<f64>> {
    let mut command = Command::new("timeout");
    command.args([PATIENCE, "mpiexec.openmpi", "--oversubscribe"]);
    for option in transport.chunks(2) {
        command.arg("--mca").args(option);
    }
    command.args(["-n", &ranks.to_string()]);
    command.envs(COMMON.iter().copied()).env("UCX_TLS", RC);
    if transport.contains(&"btl") {
        command.env_remove("OMPI_MCA_btl");
    }
    command
        .arg(sh::dist().join("bin/anywarp"))
        .args(["run", "--device-ip", "127.0.0.1", "--"])
        .arg(program)
        .arg(argument)
        .stdin(Stdio::null());
    let output = command.output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    // Words that are not numbers are units and names.
    let numbers = printed.split_whitespace().filter(|word| word.contains('.'));
    let numbers: Vec<f64> = numbers.filter_map(|word| word.parse().ok()).collect();
    if output.status.success() && !numbers.is_empty() {
        return Ok(numbers);
    }
    Err(format!(
        "{transport:?}, {ranks} ranks: {}: {printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Measures the transports in turn, and prints a table of medians and of the smallest and largest values.
fn compare(rounds: usize) -> Result {
    let work = sh::target().join("mpi");
    std::fs::create_dir_all(&work)?;
    let (program, kernels) = (work.join("compare"), work.join("kernels"));
    compile("mpicc.openmpi", "tests/mpi/compare.c", &program)?;
    compile("mpicc.openmpi", "studies/kernels.c", &kernels)?;
    // For each transport, the columns of all rounds.
    let mut values: Vec<[Vec<f64>; 4]> = TRANSPORTS.iter().map(|_| Default::default()).collect();
    for _ in 0..rounds {
        for (columns, (name, options)) in values.iter_mut().zip(TRANSPORTS) {
            let mut got = Vec::new();
            for (program, argument) in [(&program, "speed"), (&kernels, "A")] {
                match measure(program, options, 2, argument) {
                    Ok(numbers) => got.extend(numbers.into_iter().take(2)),
                    Err(why) => {
                        eprintln!("{name}: {why}");
                        got.extend([f64::NAN; 2]);
                    }
                }
            }
            for (column, value) in columns.iter_mut().zip(got) {
                column.push(value);
            }
        }
    }
    println!(
        "| transport | 8 B one way, µs | 1 MiB, GB/s | IS.A, s | CG.A, s | MB of a rank: 2 ranks | 4 | 8 | 16 |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let all = |values: &[f64]| {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        format!("{:.2} ({least:.2} to {most:.2})", median(values.to_vec()))
    };
    for (columns, (name, options)) in values.iter().zip(TRANSPORTS) {
        let mut row = format!("| {name} |");
        for column in columns {
            row += &format!(" {} |", all(column));
        }
        for ranks in RANKS {
            match measure(&program, options, ranks, "memory").as_deref() {
                Ok([_, _, mb]) => row += &format!(" {mb:.1} |"),
                other => {
                    eprintln!("{name}, memory: {other:?}");
                    row += " failed |";
                }
            }
        }
        println!("{row}");
    }
    Ok(())
}

/// Disables the selection among all devices, the signal handlers of UCX, and Open MPI's own transports.
const COMMON: &[(&str, &str)] = &[
    ("UCX_NET_DEVICES", "anywarp0:1"),
    ("UCX_HANDLE_ERRORS", "none"),
    ("OMPI_MCA_btl", "^vader,tcp,openib"),
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

pub(crate) fn run(options: &Options) -> Result {
    if let Some(rounds) = options.compare {
        return compare(rounds);
    }
    let work = sh::target().join("mpi");
    std::fs::create_dir_all(&work)?;
    let (mut passed, mut failed) = (0, 0);
    // With more ranks than processors the kernels mostly wait for the scheduler.
    let cases: [(&str, &str, &[&str]); 2] = [
        ("tests/mpi/ranks.c", "", &["2", "4"]),
        ("studies/kernels.c", "W", &["2"]),
    ];
    for (way, (source, argument, numbers)) in
        WAYS.iter().flat_map(|way| cases.map(|case| (way, case)))
    {
        let name = Path::new(source).file_stem().unwrap_or_default();
        let name = name.to_string_lossy();
        let program = work.join(format!("{}-{name}", way.compiler));
        compile(way.compiler, source, &program)?;
        for ranks in numbers {
            let begin = Instant::now();
            let mut command = Command::new("timeout");
            command
                .arg(PATIENCE)
                .args(way.launcher)
                .args(["-n", *ranks]);
            command
                .envs(COMMON.iter().copied())
                .envs(way.env.iter().copied());
            // The capture contains all traffic of the device. It is empty if the MPI used another network.
            let capture = work.join("capture.pcapng");
            let _none_yet = std::fs::remove_file(&capture);
            command
                .env("ANYWARP_CAPTURE", &capture)
                .env("ANYWARP_CAPTURE_LIMIT", (2 * LEAST).to_string());
            command
                .arg(sh::dist().join("bin/anywarp"))
                .args(["run", "--device-ip", "127.0.0.1", "--"])
                .arg(&program)
                .args(Some(argument).filter(|a| !a.is_empty()))
                .stdin(Stdio::null());
            let output = command.output()?;
            let printed = String::from_utf8_lossy(&output.stdout);
            let seen = std::fs::metadata(&capture).map_or(0, |m| m.len());
            let name = format!("{}, {name} on {ranks} ranks", way.name);
            let seconds = begin.elapsed().as_secs_f32();
            if seen < LEAST {
                println!("FAIL  {name}: only {seen} bytes went through the device");
                failed += 1;
            } else if output.status.success() && printed.contains(&format!("{ranks} ranks, ")) {
                println!(
                    "ok    {name} ({seconds:.1} s): {}",
                    printed.trim().replace('\n', "; ")
                );
                passed += 1;
            } else {
                println!("FAIL  {name} ({seconds:.1} s): {}", output.status);
                println!("{printed}{}", String::from_utf8_lossy(&output.stderr));
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        return Err("an MPI does not work over the device".into());
    }
    Ok(())
}
