//! `cargo lab bench-guest`: measures anywarp and the kernel's siw and rxe in one guest with the same programs of perftest, in
//! turn. Without KVM its processors are emulated, so the results compare the stacks on a slow machine.

use super::guest::{self, GUEST, Guest, Remote};
use crate::programs::{self, INSIDE};
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::expect::Exit;
use xtask::{Result, sh};

/// The time limit of one program.
const LIMIT: Duration = Duration::from_secs(90);

/// The default number of repetitions.
const REPEAT: usize = 5;

/// The measurements: the name, the program and its arguments, and whether lower values are better.
const ROWS: [(&str, &str, &str, bool); 6] = [
    ("Send 64 B, µs", "ib_send_lat", "-s 64 -n 1000", true),
    ("Write 64 B, µs", "ib_write_lat", "-s 64 -n 1000", true),
    ("Read 64 B, µs", "ib_read_lat", "-s 64 -n 500", true),
    ("Send 64 KiB, MiB/s", "ib_send_bw", "-s 65536 -n 500", false),
    (
        "Write 64 KiB, MiB/s",
        "ib_write_bw",
        "-s 65536 -n 500",
        false,
    ),
    ("Read 64 KiB, MiB/s", "ib_read_bw", "-s 65536 -n 300", false),
];

/// The stacks: the name, a command that prepares the guest (siw and rxe do not exist at the same time), the prefix of the programs,
/// and their arguments.
const STACKS: [(&str, &str, &str, &str); 4] = [
    ("anywarp", "true", ANYWARP, ""),
    (
        "anywarp, no CRC",
        "true",
        "ANYWARP_CRC=0 LD_PRELOAD=/anywarp/libibverbs.so.1:/anywarp/librdmacm.so.1 ANYWARP_ADDR=10.88.0.2",
        "",
    ),
    (
        "siw",
        "rdma link delete rxe0 2>/dev/null; rdma link show siw0/1 >/dev/null 2>&1 || \
         rdma link add siw0 type siw netdev eth0",
        "",
        "-d siw0",
    ),
    (
        "rxe",
        "modprobe crc32_generic; modprobe rdma_rxe; rdma link delete siw0 2>/dev/null; rdma link show rxe0/1 >/dev/null 2>&1 || \
         rdma link add rxe0 type rxe netdev eth0",
        "",
        "-d rxe0",
    ),
];

const ANYWARP: &str =
    "LD_PRELOAD=/anywarp/libibverbs.so.1:/anywarp/librdmacm.so.1 ANYWARP_ADDR=10.88.0.2";

/// Measures the rows whose name or program contains `filter`, `repeat` times each.
pub(crate) fn run(repeat: Option<usize>, filter: Option<&str>) -> Result {
    let (repeat, filter) = (repeat.unwrap_or(REPEAT), filter.unwrap_or(""));
    let rows: Vec<_> = ROWS
        .iter()
        .filter(|(name, program, ..)| name.contains(filter) || program.contains(filter))
        .collect();
    if rows.is_empty() {
        return Err(format!("no row and no program has {filter} in its name").into());
    }
    if env::var_os(INSIDE).is_none() {
        // The guest is made before the namespaces are entered, because packages are downloaded for it.
        sh::run(Command::new(sh::root().join("tests/interop/make-guest")).stdout(Stdio::null()))?;
        return programs::in_namespaces();
    }
    let work = programs::new_folder(&env::temp_dir())?;
    let done = measure(&work, &rows, repeat);
    fs::remove_dir_all(&work)?;
    let failures = done?;
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("\n").into())
}

/// Measures. Returns the failures.
fn measure(
    work: &std::path::Path,
    rows: &[&(&str, &str, &str, bool)],
    repeat: usize,
) -> Result<Vec<String>> {
    let lib = work.join("root/anywarp");
    fs::create_dir_all(&lib)?;
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        fs::copy(sh::dist().join("lib/anywarp").join(name), lib.join(name))?;
    }
    guest::wire()?;
    let mut guest = Guest::boot(work)?;
    let mut failures = Vec::new();
    let mut table = String::from("| |");
    for (stack, ..) in STACKS {
        let _ = write!(table, " {stack} |");
    }
    let _ = writeln!(
        table,
        " of siw | of rxe |\n|---|{}",
        "---:|".repeat(STACKS.len() + 2)
    );
    let mut port = 7000;
    for (name, program, words, costs) in rows {
        let mut values: [Vec<f64>; STACKS.len()] = Default::default();
        for turn in 1..=repeat {
            for ((stack, prepare, before, options), values) in STACKS.iter().zip(&mut values) {
                port += 1;
                let line = format!("{before} {program} -R -F {options} {words} -p {port}");
                eprintln!("{name}, {turn} of {repeat}: {stack}");
                let outcome = guest
                    .ask(prepare)
                    .and_then(|()| one(&guest, line.trim(), port, *costs));
                match outcome {
                    Ok(value) => values.push(value),
                    Err(why) => failures.push(format!("{name}: {stack}: {why}")),
                }
            }
            if let Some(why) = guest.failure(true) {
                return Err(format!("{name}: {why}\n{}", guest.console_text()).into());
            }
        }
        let medians: Vec<Option<f64>> = values.iter_mut().map(|v| median(v)).collect();
        let _ = write!(table, "| {name} |");
        for (median, values) in medians.iter().zip(&values) {
            match (median, values.first(), values.last()) {
                (Some(median), Some(least), Some(most)) => {
                    let _ = write!(table, " {median:.1} ({least:.1}..{most:.1}) |");
                }
                _ => table.push_str(" – |"),
            }
        }
        for other in [2, 3] {
            let ratio = medians
                .first()
                .copied()
                .flatten()
                .zip(medians.get(other).copied().flatten());
            match ratio {
                Some((ours, theirs)) => {
                    let _ = write!(table, " {:.2} × |", ours / theirs);
                }
                None => table.push_str(" – |"),
            }
        }
        table.push('\n');
    }
    eprintln!("the guest's console:\n{}", guest.console_text());
    println!(
        "median of {repeat} (least..most); the last two columns: anywarp with CRC divided by siw, and by rxe\n\n{table}"
    );
    Ok(failures)
}

/// Sorts the values and returns the median.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Runs both ends of a program. Returns the typical latency, or the average bandwidth.
fn one(guest: &Guest, line: &str, port: u16, latency: bool) -> Result<f64> {
    let end = Instant::now() + LIMIT;
    let mut server = guest.start(line)?;
    // anywarp listens on a TCP port, and the kernel's stacks in the kernel's connection manager.
    guest.ask(&format!(
        "until rdma resource show cm_id 2>/dev/null | grep -q 'LISTEN.*:{port}' || \
         grep -q ':{port:04X} [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6; do usleep 20000; done"
    ))?;
    let mut client = guest.start(&format!("{line} {GUEST}"))?;
    let outcome = both(&mut server, &mut client, end);
    server.end()?;
    client.end()?;
    outcome.map_err(|e| format!("port {port}: {e}\n{}\n{}", server.tail(), client.tail()))?;
    let text = client.output();
    text.lines()
        .rev()
        .find_map(|line| {
            let numbers: Option<Vec<f64>> = line
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect();
            let numbers = numbers.filter(|n| n.len() >= 5)?;
            // Columns for latency: bytes, iterations, least, most, typical; for bandwidth: bytes, iterations, peak, average.
            numbers
                .get(if latency { 4 } else { 3 })
                .copied()
                .filter(|value| value.is_finite() && *value > 0.0)
        })
        .ok_or_else(|| format!("no line of results\n{text}").into())
}

fn both(server: &mut Remote, client: &mut Remote, end: Instant) -> Result {
    client.finish("client", Some(Exit::Code(0)), end)?;
    server.finish("server", Some(Exit::Code(0)), end)
}
