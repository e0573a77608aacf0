//! `anywarp bench`: measures plain sockets, this device and other installed software on this machine in turn.
//!
//! `rows` defines the measurements and comparisons, `run` measures once, `raw` implements the plain sockets (with system calls in
//! `raw_sys`), `report` prints the results and `plot` draws them.
//!
//! A *row* compares several *parties*, each a program or a setting. Only values of one run are compared: each repetition measures
//! all parties of a row one after the other, and the medians are those of all repetitions.

pub(crate) mod args;
mod plot;
pub(crate) mod raw;
mod raw_sys;
mod report;
mod rows;
mod run;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use std::{fs, io};

use self::args::Bench;
use self::plot::Format;
use self::report::{Report, Seen};
use self::rows::Row;
use self::run::{Lost, Stage};
use crate::cmd::Failure;

/// The default number of repetitions: with --all or --only, and otherwise.
const REPEAT: (u64, u64) = (7, 3);

/// Exit status if a measurement failed, or, with --strict, if a bound is not met.
const FAILED: u8 = 1;

/// Exit status for wrong usage.
const MISUSE: u8 = 2;

/// Exit status after an interrupt.
const INTERRUPTED: u8 = 130;

/// Runs the command.
pub(crate) fn run(args: &Bench) -> Result<ExitCode, Failure> {
    let write = |path: &Path, e: io::Error| Failure::Write(path.to_owned(), e);
    let misuse = |why: String| {
        eprintln!("anywarp: {why}");
        Ok(ExitCode::from(MISUSE))
    };
    let drawn = args.report.as_deref().map(|path| (path, Format::of(path)));
    let drawn = match drawn {
        None => None,
        Some((path, Ok(format))) => Some((path, format)),
        Some((_, Err(why))) => return misuse(why),
    };
    if let (Some(from), Some((to, format))) = (&args.from, drawn) {
        let text = fs::read_to_string(from).map_err(|e| write(from, e))?;
        return match Report::parse(&text) {
            Ok(report) => {
                plot::draw(&report, format, to).map_err(|e| write(to, e))?;
                Ok(ExitCode::SUCCESS)
            }
            Err(why) => misuse(format!("{}: {why}", from.display())),
        };
    }
    let mut all = rows::all(args.mtu.unwrap_or_else(loopback_mtu));
    if args.server_prefix != args.client_prefix {
        // The two ends are on different hosts, which share no memory.
        all.retain(|row| !row.name.starts_with("shm-"));
    }
    if args.list {
        for row in &all {
            println!("{:<14} {}", row.name, row.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = match choose(args, all) {
        Ok(chosen) => chosen,
        Err(why) => return misuse(why),
    };
    // Errors of these files are reported before the measurements, which take minutes.
    for (path, is_replaced) in [(&args.json, true), (&args.report, false)] {
        if let Some(path) = path {
            can_write(path, is_replaced).map_err(|e| write(path, e))?;
        }
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    crate::perf::note_interrupts(&interrupted);
    let stage = match Stage::new(args, Arc::clone(&interrupted)) {
        Ok(stage) => stage,
        Err(why) => return misuse(why),
    };
    let usual = if args.all || !args.only.is_empty() {
        REPEAT.0
    } else {
        REPEAT.1
    };
    let repeat = args.repeat.unwrap_or(usual);
    let mut report = Report::new(&args.cpus, args.short, repeat);
    let keep = |report: &Report| match &args.json {
        Some(path) => report.save(path).map_err(|e| write(path, e)),
        None => Ok(()),
    };
    println!("{}", report.head());
    let began = Instant::now();
    let count = chosen.len();
    for (at, row) in chosen.iter().enumerate() {
        let seen = measure(
            row,
            &stage,
            repeat,
            &format!("{} of {count}", at + 1),
            &mut |seen| {
                report.now = Some(seen.clone());
                keep(&report)
            },
        )?;
        report.rows.push(seen);
        report.now = None;
        if let Some(seen) = report.rows.last() {
            println!("{}", seen.table());
        }
        keep(&report)?;
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
    }
    report.partial = interrupted.load(Ordering::Relaxed);
    keep(&report)?;
    if let Some((path, format)) = drawn {
        plot::draw(&report, format, path).map_err(|e| write(path, e))?;
    }
    println!("{}", report.summary(began.elapsed()));
    Ok(if report.partial {
        ExitCode::from(INTERRUPTED)
    } else if report.failures() > 0 || args.strict && report.missed() > 0 {
        ExitCode::from(FAILED)
    } else {
        ExitCode::SUCCESS
    })
}

/// Checks that the file can be written, or created in its folder. `is_replaced`: a regular file is replaced by a new one.
fn can_write(path: &Path, is_replaced: bool) -> io::Result<()> {
    let writable = |path: &Path| rustix::fs::access(path, rustix::fs::Access::WRITE_OK);
    match path.metadata() {
        Ok(file) if file.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(file) if !(is_replaced && file.is_file()) => Ok(writable(path)?),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => {
            let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
            Ok(writable(folder.unwrap_or_else(|| Path::new(".")))?)
        }
    }
}

/// Returns the rows that the options select.
fn choose(args: &Bench, all: Vec<Row>) -> Result<Vec<Row>, String> {
    if args.only.is_empty() {
        return Ok(all
            .into_iter()
            .filter(|row| args.all || row.usual)
            .collect());
    }
    for name in &args.only {
        if !all.iter().any(|row| row.name.starts_with(name.as_str())) {
            return Err(format!(
                "there is no row {name}; `anywarp bench --list` prints the names"
            ));
        }
    }
    // A complete name selects only that row.
    let exact = |name: &String| all.iter().any(|row| row.name == name);
    let exact: Vec<bool> = args.only.iter().map(exact).collect();
    Ok(all
        .iter()
        .filter(|row| {
            args.only.iter().zip(&exact).any(|(name, exact)| {
                if *exact {
                    row.name == name
                } else {
                    row.name.starts_with(name.as_str())
                }
            })
        })
        .cloned()
        .collect())
}

/// The prefix of the names of UD rows. A measurement of such a row is repeated once if it fails: perftest waits for datagrams that were
/// lost because the receiver got no processor.
const UD_ROWS: &str = "ud-";

/// Measures all parties of a row in turn, `repeat` times.
fn measure(
    row: &Row,
    stage: &Stage,
    repeat: u64,
    place: &str,
    keep: &mut impl FnMut(&Seen) -> Result<(), Failure>,
) -> Result<Seen, Failure> {
    let mut seen = Seen::new(row, stage);
    let terminal = io::stderr().is_terminal();
    for number in 1..=repeat {
        for (at, party) in row.parties.iter().enumerate() {
            // A party that is not installed, or has failed twice, is not measured again.
            if !seen.goes_on(at) {
                continue;
            }
            let text = format!(
                "{} ({place}), {number} of {repeat}: {}",
                row.name, party.name
            );
            if terminal {
                eprint!("\r{text}\x1b[K");
            } else if at == 0 {
                eprintln!("{text}");
            }
            let mut outcome = stage.measure(party, row.unit);
            if matches!(outcome, Err(Lost::Failed(_))) && row.name.starts_with(UD_ROWS) {
                outcome = stage.measure(party, row.unit);
            }
            match outcome {
                Ok(sample) => seen.add(at, sample),
                Err(Lost::Interrupted) => {
                    if terminal {
                        eprintln!();
                    }
                    return Ok(seen);
                }
                Err(Lost::Failed(why)) => seen.fail(at, why),
            }
            keep(&seen)?;
        }
    }
    if terminal {
        eprint!("\r\x1b[K");
    }
    Ok(seen)
}

/// Returns the MTU of the loopback interface.
fn loopback_mtu() -> u32 {
    fs::read_to_string("/sys/class/net/lo/mtu")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65536)
}
