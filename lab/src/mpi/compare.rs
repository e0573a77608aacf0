//! `cargo lab mpi --compare`: measures the programs of `studies` over each transport that uses the device, and over TCP and UDP.
//!
//! The transports take turns, so that other work on the machine disturbs all of them alike. On one host they are those of Open MPI.
//! Between two network namespaces, which stand for two hosts, they are those of MPICH, whose launcher needs no network to its ranks.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use xtask::{Result, sh};

use super::{COMMON, Library, MPICH_5, RC, TIME_LIMIT, UCX, UD, compile};
use crate::bench;
use crate::process::Process;
use crate::programs::{self, INSIDE};

/// A transport: the MPI with the options that select the transport, and environment variables.
struct Transport {
    name: &'static str,
    mpi: Library,
    env: &'static [(&'static str, &'static str)],
}

const ONE_HOST: &[Transport] = &[
    Transport {
        name: "`anywarp`",
        mpi: Library::OpenMpi(ofi!("anywarp")),
        env: &[],
    },
    Transport {
        name: "UCX `rc_verbs` over anywarp",
        mpi: Library::OpenMpi(UCX),
        env: &[("UCX_TLS", RC)],
    },
    Transport {
        name: "`tcp;ofi_rxm`",
        mpi: Library::OpenMpi(ofi!("tcp;ofi_rxm")),
        env: &[],
    },
    Transport {
        name: "`udp;ofi_rxd`",
        mpi: Library::OpenMpi(ofi!("udp;ofi_rxd")),
        env: &[],
    },
    Transport {
        name: "`btl/tcp`",
        mpi: Library::OpenMpi(&["pml", "ob1", "btl", "tcp,self"]),
        env: &[("OMPI_MCA_btl", "tcp,self")],
    },
];

const OFI: (&str, &str) = ("MPIR_CVAR_CH4_NETMOD", "ofi");
const NETMOD_UCX: (&str, &str) = ("MPIR_CVAR_CH4_NETMOD", "ucx");

const TWO_HOSTS: &[Transport] = &[
    Transport {
        name: "`anywarp`",
        mpi: Library::Wheel(&MPICH_5),
        env: &[OFI, ("FI_PROVIDER", "anywarp")],
    },
    Transport {
        name: "UCX `rc_verbs` over anywarp",
        mpi: Library::Wheel(&MPICH_5),
        env: &[NETMOD_UCX, ("UCX_TLS", RC)],
    },
    Transport {
        name: "UCX `ud_verbs` over anywarp",
        mpi: Library::Wheel(&MPICH_5),
        env: &[NETMOD_UCX, ("UCX_TLS", UD)],
    },
    Transport {
        name: "`tcp`",
        mpi: Library::Wheel(&MPICH_5),
        env: &[OFI, ("FI_PROVIDER", "tcp")],
    },
    Transport {
        name: "`tcp;ofi_rxm`",
        mpi: Library::Wheel(&MPICH_5),
        env: &[OFI, ("FI_PROVIDER", "tcp;ofi_rxm")],
    },
    Transport {
        name: "`udp;ofi_rxd`",
        mpi: Library::Wheel(&MPICH_5),
        env: &[OFI, ("FI_PROVIDER", "udp;ofi_rxd")],
    },
];

/// A column of times or rates: its title, the program, its arguments, and the name of the value that it prints. `mpi` prints JSON. The
/// others run kernels of the NAS benchmarks, and print a line for each kernel that ends with the time in seconds.
type Speed = (&'static str, &'static str, &'static str, &'static str);

const SPEEDS: [Speed; 7] = [
    ("8 B one way, µs", "mpi", "lat 8 20000", "us"),
    ("4 KiB, µs", "mpi", "lat 4096 10000", "us"),
    ("1 MiB, GB/s", "mpi", "bw 1048576 640 16", "gb_s"),
    ("IS.B, s", "kernels", "B is", "seconds"),
    ("CG.A, s", "kernels", "A cg", "seconds"),
    ("MG.A, s", "mg", "A", "seconds"),
    ("LU.A, s", "lu", "A", "seconds"),
];

/// Measurements of reliable datagrams without an MPI, for the first columns: the command, its options, the column of its table, and the
/// factor that converts the value to the unit of the column here.
const RAW: [(&str, &str, &str, f64); 3] = [
    ("ping", "-t rd -s 8 -n 20000 --poll", "median_us", 1.0),
    ("ping", "-t rd -s 4096 -n 10000 --poll", "median_us", 1.0),
    ("blast", "-t rd -o write -s 1M -n 640", "sent_mb_s", 1e-3),
];

/// The numbers of ranks for which memory is measured.
const RANKS: [usize; 4] = [2, 4, 8, 16];

/// Runs a rank in its namespace. Each namespace has one address besides that of its loopback interface.
const PLACE: &str = "case $PMI_RANK in 0) host=client;; *) host=server;; esac
exec ip netns exec $host \"$@\"";

/// The address of the second host.
const FAR: &str = "10.79.0.2";

/// The values of a transport in all rounds, by column.
type Values = Vec<Vec<f64>>;

/// Measures the transports in turn, and prints a table of medians and of the smallest and largest values. `only`: measures the columns with
/// this in their titles. If it is empty, memory is measured too, but not between namespaces.
pub(super) fn run(rounds: usize, netns: bool, only: &str) -> Result {
    if netns && env::var_os(INSIDE).is_none() {
        // Installing needs a network, and the namespaces have none.
        Library::Wheel(&MPICH_5).compiler()?;
        return programs::in_namespaces();
    }
    let transports = if netns {
        bench::link()?;
        TWO_HOSTS
    } else {
        ONE_HOST
    };
    let work = sh::target().join("mpi/compare");
    fs::create_dir_all(&work)?;
    let compiler = transports
        .first()
        .map_or_else(|| Err("no transport".into()), |t| t.mpi.compiler())?;
    for program in ["mpi", "kernels", "mg", "lu"] {
        let source = format!("studies/{program}.c");
        compile(&compiler, &source, &work.join(program))?;
    }
    let wanted = |title: &str| title.contains(only);
    if !SPEEDS.iter().any(|(title, ..)| wanted(title)) {
        let titles: Vec<&str> = SPEEDS.iter().map(|s| s.0).collect();
        return Err(format!("--only {only}: the columns are {}", titles.join(", ")).into());
    }
    let mut values: Vec<Values> = vec![vec![Vec::new(); SPEEDS.len()]; transports.len()];
    let mut raw: Values = vec![Vec::new(); RAW.len()];
    let keep = |name: &str, column: &mut Vec<f64>, result: Result<f64>| {
        column.push(result.unwrap_or_else(|why| {
            eprintln!("{name}: {why}");
            f64::NAN
        }));
    };
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (columns, transport) in values.iter_mut().zip(transports) {
            let columns = columns.iter_mut().zip(SPEEDS);
            for (column, (_, program, arguments, value)) in columns.filter(|(_, s)| wanted(s.0)) {
                let result = measure(&work.join(program), transport, 2, netns, arguments, value);
                keep(transport.name, column, result);
            }
        }
        let raw = raw.iter_mut().zip(RAW).zip(SPEEDS);
        for ((column, test), _) in raw.filter(|(_, s)| netns && wanted(s.0)) {
            keep(RAW_NAME, column, measure_raw(&work, test));
        }
    }
    let titles: Vec<&str> = SPEEDS.iter().map(|s| s.0).filter(|t| wanted(t)).collect();
    let has_memory = !netns && only.is_empty();
    let memory = if !has_memory {
        ""
    } else {
        " MB of a rank: 2 ranks | 4 | 8 | 16 |"
    };
    println!("| transport | {} |{memory}", titles.join(" | "));
    let columns = titles.len() + if has_memory { RANKS.len() } else { 0 };
    println!("| --- |{}", " ---: |".repeat(columns));
    for (columns, transport) in values.iter().zip(transports) {
        let mut row = format!("| {} |", transport.name);
        for column in columns.iter().filter(|column| !column.is_empty()) {
            row += &format!(" {} |", cell(column));
        }
        for ranks in RANKS.iter().filter(|_| has_memory) {
            let mpi = work.join("mpi");
            match measure(&mpi, transport, *ranks, netns, "memory 1024", "mb") {
                Ok(mb) => row += &format!(" {mb:.1} |"),
                Err(why) => {
                    eprintln!("{}: {why}", transport.name);
                    row += " failed |";
                }
            }
        }
        println!("{row}");
    }
    if netns {
        let mut cells: Vec<String> = raw
            .iter()
            .filter(|column| !column.is_empty())
            .map(|column| cell(column))
            .collect();
        cells.resize(titles.len(), String::new());
        println!("| {RAW_NAME} | {} |", cells.join(" | "));
    }
    Ok(())
}

const RAW_NAME: &str = "reliable datagrams without MPI";

fn cell(values: &[f64]) -> String {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
    let (least, most) = (at(0), at(values.len().saturating_sub(1)));
    format!("{:.2} ({least:.2} to {most:.2})", at(values.len() / 2))
}

/// Runs a program of `studies` over a transport. Returns the value that it prints.
fn measure(
    program: &Path,
    transport: &Transport,
    ranks: usize,
    netns: bool,
    arguments: &str,
    value: &str,
) -> Result<f64> {
    let mut command = Command::new("timeout");
    command.arg(TIME_LIMIT);
    transport.mpi.launch(&mut command)?;
    command
        .args(["-n", &ranks.to_string()])
        .envs(COMMON.iter().copied())
        .env("MPIR_CVAR_NOLOCAL", "1")
        .envs(transport.env.iter().copied());
    let anywarp = sh::dist().join("bin/anywarp");
    if netns {
        command.args(["sh", "-c", PLACE, "sh"]);
        command.arg(anywarp).arg("run");
    } else {
        command.arg(anywarp);
        command.args(["run", "--device-ip", "127.0.0.1"]);
    }
    command
        .arg("--")
        .arg(program)
        .args(arguments.split(' '))
        .stdin(Stdio::null());
    let output = command.output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let parsed = match value {
        // "2 ranks, cg.A verified 0.103 s"
        "seconds" => printed.lines().find_map(|line| {
            line.strip_suffix(" s")?
                .split(' ')
                .next_back()?
                .parse()
                .ok()
        }),
        _ => printed.lines().find_map(|line| {
            let values: BTreeMap<String, f64> = serde_json::from_str(line).ok()?;
            values.get(value).copied()
        }),
    };
    let failure = || {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!(
            "{ranks} ranks, {arguments}: {}: {printed}{errors}",
            output.status
        )
    };
    let parsed = parsed.filter(|_| output.status.success());
    Ok(parsed.ok_or_else(failure)?)
}

/// Measures reliable datagrams between the two hosts.
fn measure_raw(
    work: &Path,
    (test, options, wanted, factor): (&str, &str, &str, f64),
) -> Result<f64> {
    let on = |host: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", host]);
        command.arg(sh::dist().join("bin/anywarp")).arg(test);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let table = work.join("raw.csv");
    let mut server = Process::start_group(on("server").arg("--server"))?;
    // The client tries again until the server listens.
    let mut status = None;
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(100));
        let mut client = on("client");
        client
            .args(options.split(' '))
            .args(["--quiet", "--csv"])
            .arg(&table)
            .arg(FAR)
            .stderr(Stdio::null());
        let done = client.status()?;
        status = Some(done);
        if done.success() {
            break;
        }
    }
    server.status(Duration::from_secs(10))?;
    if !status.is_some_and(|status| status.success()) {
        return Err(format!("{test} {options} has failed").into());
    }
    let text = fs::read_to_string(&table)?;
    let mut lines = text.lines().map(|line| line.split(','));
    let (titles, values) = (lines.next(), lines.next_back());
    let cell = titles.zip(values).and_then(|(titles, values)| {
        let mut cells = titles.zip(values);
        cells.find(|(title, _)| *title == wanted)?.1.parse().ok()
    });
    let value: f64 = cell.ok_or_else(|| format!("{test}: no {wanted} in {text}"))?;
    Ok(value * factor)
}
