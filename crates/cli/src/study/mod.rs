//! `anywarp study`: measures figures of papers about RDMA on this machine.
//!
//! `figures` reads the definitions of the figures from data files, `runner` measures their points, `store` keeps the samples,
//! `finding` checks the findings of the papers, and `report` writes the results.
//!
//! A *point* has one value on each axis of an experiment, such as size and type of queue pair. It is measured several times; each
//! time gives a *sample*. A point or a figure that cannot be measured is *blank*. A finding that does not hold may have a
//! *control*: the same points with one setting changed, to test an explanation.

mod apps;
pub(crate) mod args;
mod between;
mod calls;
mod devices;
mod exs;
mod figures;
mod finding;
mod lanes;
mod machine;
mod mpi;
mod namespace;
mod process;
mod relay;
mod report;
mod runner;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fs, io};

use self::apps::Apps;
use self::args::{Hints, List, Run, Study, Task};
use self::figures::{Experiment, Extent, Finding, PAPERS, Params, Point, Runner};
use self::finding::Verdict;
use self::machine::Times;
use self::mpi::Mpi;
use self::runner::Bench;
use self::store::{Conditions, Store};
use crate::cmd::Failure;
use crate::library::Library;
use crate::perf::Interrupted;

/// Exit status if a measurement failed.
const FAILED: u8 = 1;

/// Exit status for wrong usage.
const MISUSE: u8 = 2;

/// Exit status after an interrupt.
const INTERRUPTED: u8 = 130;

/// The number of attempts for a point that fails.
const ATTEMPTS: usize = 2;

/// The time for additional samples that decide findings, as a share of the time of the regular ones.
const TO_DECIDE: f64 = 0.6;

/// The interval of progress messages if standard error is not a terminal.
const PROGRESS: Duration = Duration::from_secs(10);

/// The default device.
const OURS: &str = "anywarp";

/// Runs the command.
pub(crate) fn run(args: &Study) -> Result<ExitCode, Failure> {
    let inner = match &args.task {
        Task::Calls(calls) => Some(calls::run(calls)),
        Task::Lanes(lanes) => Some(lanes::run(lanes)),
        Task::Inside(inside) => Some(apps::inside(inside)),
        Task::Between(between) => Some(between::run(between)),
        Task::List(_) | Task::Run(_) | Task::Hints(_) => None,
    };
    if let Some(done) = inner {
        return Ok(done.map_or_else(
            |why| {
                eprintln!("anywarp: {why}");
                ExitCode::from(FAILED)
            },
            |line| {
                println!("{line}");
                ExitCode::SUCCESS
            },
        ));
    }
    let library = Library::find().map_err(Failure::Library)?;
    let folder = args.studies.clone().or_else(|| library.studies());
    let Some(folder) = folder else {
        eprintln!(
            "anywarp: the folder with the data files of the figures is missing: reinstall anywarp"
        );
        return Ok(ExitCode::from(MISUSE));
    };
    let all = figures::read(&folder);
    let done = all.and_then(|all| match &args.task {
        Task::List(list) => self::list(list, &all),
        Task::Run(run) => Work::new(run, &all, library, &folder)?.run(),
        Task::Hints(hints) => self::hints(hints, &all),
        // These tasks were handled above, because they need no figures.
        Task::Calls(_) | Task::Lanes(_) | Task::Inside(_) | Task::Between(_) => {
            Ok(ExitCode::SUCCESS)
        }
    });
    Ok(done.unwrap_or_else(|why| {
        eprintln!("anywarp: {why}");
        ExitCode::from(MISUSE)
    }))
}

/// Lists the figures.
fn list(args: &List, all: &[Experiment]) -> Result<ExitCode, String> {
    let names = if args.figures.is_empty() {
        vec!["all".to_owned()]
    } else {
        args.figures.clone()
    };
    let chosen = figures::choose(all, &names)?;
    for (paper, title) in PAPERS {
        let of: Vec<&Experiment> = chosen.iter().filter(|e| e.paper == paper).collect();
        if of.is_empty() {
            continue;
        }
        println!("{title}");
        let mut figures: Vec<(&Experiment, &figures::Figure)> = of
            .into_iter()
            .flat_map(|e| e.figures.iter().map(move |figure| (e, figure)))
            .collect();
        figures.sort_by_key(|(_, figure)| figures::order(&figure.name));
        for (experiment, figure) in figures {
            let time = |extent| {
                let points = experiment.points_of(figure, extent);
                let points = points
                    .iter()
                    .filter(|p| experiment.blank(&p.params).is_none());
                clock(
                    points.count() as f64
                        * extent.samples() as f64
                        * experiment.runner.seconds(extent),
                )
            };
            let time = match &figure.blank {
                Some(why) => format!("blank: {why}"),
                None => format!("{} (--quick {})", time(Extent::Full), time(Extent::Quick)),
            };
            println!("  {:<12} {} [{time}]", experiment.id(figure), figure.asks);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a duration.
fn clock(seconds: f64) -> String {
    match seconds {
        s if s >= 5400.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 90.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} s", s.max(1.0)),
    }
}

/// Prints advice for programs on this machine, based on the results in the folder of a report.
fn hints(args: &Hints, all: &[Experiment]) -> Result<ExitCode, String> {
    let folder = &args.report;
    let Some(conditions) = Store::last(folder) else {
        return Err(format!(
            "{}: nothing was measured there yet: run `anywarp study run all --quick --report {}`",
            folder.display(),
            folder.display()
        ));
    };
    let store =
        Store::read(folder, conditions).map_err(|e| format!("{}: {e}", folder.display()))?;
    warn_of_unused(&store);
    let report = report::Report::new(all, &store, String::new());
    print!("{}", report.hints());
    Ok(ExitCode::SUCCESS)
}

/// Warns if stored samples are not used.
fn warn_of_unused(store: &Store) {
    if let Some(unused) = store.unused() {
        eprintln!("anywarp: warning: {unused}");
    }
}

/// The state of one `anywarp study run`.
struct Work<'a> {
    args: &'a Run,
    all: &'a [Experiment],
    chosen: Vec<Experiment>,
    store: Store,
    bench: Bench,
    interrupted: Interrupted,
    /// Each point to measure, and its wanted number of samples.
    planned: Vec<(Point, usize)>,
    /// The time that is left for additional samples, in seconds.
    spare: f64,
    shown: Instant,
}

impl<'a> Work<'a> {
    fn new(
        args: &'a Run,
        all: &'a [Experiment],
        library: Library,
        studies: &Path,
    ) -> Result<Self, String> {
        let mut chosen = figures::choose(all, &args.figures)?;
        figures::vary(&mut chosen, &args.vary)?;
        let extent = Extent::of(args);
        if args.first {
            // Programs that are started later inherit the priority.
            rustix::process::nice(-20)
                .map_err(|e| format!("--first: {e}: run it as root, or leave the option out"))?;
        }
        let mut device = args.device.as_deref().unwrap_or(OURS).to_owned();
        if let Some(host) = &args.host {
            device.push_str(&format!(" to {host}"));
        }
        let folder = &args.report;
        let conditions = Conditions::new(extent, device, args.first);
        let store = Store::open(folder, conditions, args.fresh)
            .map_err(|e| format!("{}: {e}: choose another --report", folder.display()))?;
        warn_of_unused(&store);
        let elsewhere = args.host.clone().zip(args.port);
        let interrupted = Interrupted::default();
        crate::perf::note_interrupts(&interrupted);
        Ok(Self {
            args,
            all,
            chosen,
            store,
            bench: Bench::new(
                library,
                extent,
                args.device.clone(),
                elsewhere,
                Mpi::new(studies, folder),
                Apps::new(folder),
                interrupted.clone(),
            ),
            interrupted,
            planned: Vec::new(),
            spare: 0.0,
            shown: Instant::now(),
        })
    }

    fn over(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn run(mut self) -> Result<ExitCode, String> {
        let extent = self.store.extent();
        let chosen = self.chosen.clone();
        for experiment in &chosen {
            for point in points(experiment, extent) {
                self.planned.push((point, extent.samples()));
            }
        }
        let before = Times::now();
        for experiment in &chosen {
            self.measure(experiment)?;
        }
        let meanwhile = Times::now()
            .zip(before)
            .and_then(|(now, then)| now.since(&then));
        let mut machine = self.bench.pinning();
        if let Some((idle, steal)) = meanwhile {
            machine.push_str(&format!(
                "; during the measurement the processors were idle for {idle:.0} % of the time, and the host of the virtual \
                machine took {steal:.1} % of it"
            ));
        }
        if !self.args.quiet && io::stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
        let shown = shown(self.all, &chosen);
        let report = report::Report::new(&shown, &self.store, machine);
        let page = report
            .write()
            .map_err(|e| format!("{}: {e}", self.store.folder().display()))?;
        let ids: BTreeSet<String> = chosen
            .iter()
            .flat_map(|e| e.figures.iter().map(|figure| e.id(figure)))
            .collect();
        print!("{}", report.summary(&ids));
        println!("{}", page.display());
        if self.over() {
            eprintln!("anywarp: interrupted: when started again, the same command continues here");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        Ok(if report.failed(&ids) {
            ExitCode::from(FAILED)
        } else {
            ExitCode::SUCCESS
        })
    }

    /// Measures all points of an experiment in turn. Then repeats the measurement of noisy points and of points that decide a finding.
    /// Finally measures the controls of findings that do not hold.
    fn measure(&mut self, experiment: &Experiment) -> Result<(), String> {
        let extent = self.store.extent();
        let began = Instant::now();
        let all = points(experiment, extent);
        for round in 1..=extent.samples() {
            self.round(experiment, &all, round)?;
        }
        self.catch_up(experiment, &all)?;
        for round in 1..=extent.more_samples() {
            let noisy: Vec<Point> = all
                .iter()
                .filter(|point| {
                    let known = self.store.known(point);
                    known.samples.len() < extent.samples() + round && known.noise().is_some()
                })
                .cloned()
                .collect();
            self.round(experiment, &noisy, extent.samples() + round)?;
        }
        self.spare += began.elapsed().as_secs_f64() * TO_DECIDE;
        self.decide(experiment, false)?;
        let began = Instant::now();
        let controls = controls(experiment, &self.store);
        for point in &controls {
            self.planned.push((point.clone(), extent.samples()));
        }
        for round in 1..=extent.samples() {
            self.round(experiment, &controls, round)?;
        }
        self.catch_up(experiment, &controls)?;
        self.spare += began.elapsed().as_secs_f64() * TO_DECIDE;
        self.decide(experiment, true)
    }

    /// Repeats the measurement of points of findings (or of their controls) that are undecided because of noise, until the findings
    /// are decided or no time for additional samples is left.
    fn decide(&mut self, experiment: &Experiment, of_controls: bool) -> Result<(), String> {
        let most = self.store.extent().most_samples();
        loop {
            let points: Vec<Point> = undecided(experiment, &self.store, of_controls)
                .into_iter()
                .filter(|point| {
                    let known = self.store.known(point);
                    // `round` does not measure the others.
                    known.failures.len() < ATTEMPTS
                        && known.blank.is_none()
                        && (1..most).contains(&known.samples.len())
                })
                .collect();
            if points.is_empty() {
                return Ok(());
            }
            for point in &points {
                let began = Instant::now();
                if self.spare <= 0.0 || self.over() {
                    return Ok(());
                }
                let have = self.store.known(point).samples.len();
                self.round(experiment, std::slice::from_ref(point), have + 1)?;
                self.spare -= began.elapsed().as_secs_f64();
            }
        }
    }

    /// Tries points again that have samples, but too few because an attempt has failed.
    fn catch_up(&mut self, experiment: &Experiment, points: &[Point]) -> Result<(), String> {
        let wanted = self.store.extent().samples();
        for _ in 1..ATTEMPTS {
            let few: Vec<Point> = points
                .iter()
                .filter(|point| (1..wanted).contains(&self.store.known(point).samples.len()))
                .cloned()
                .collect();
            self.round(experiment, &few, wanted)?;
        }
        Ok(())
    }

    /// Measures each point with fewer than `wanted` samples once.
    fn round(
        &mut self,
        experiment: &Experiment,
        points: &[Point],
        wanted: usize,
    ) -> Result<(), String> {
        for point in points {
            if self.over() {
                return Ok(());
            }
            let known = self.store.known(point);
            if known.samples.len() >= wanted
                || known.failures.len() >= ATTEMPTS
                || known.blank.is_some()
            {
                continue;
            }
            self.progress(experiment, point);
            let began = Instant::now();
            let (command, outcome) = self.bench.measure(point);
            if self.over() {
                return Ok(());
            }
            self.store
                .add(point, command, outcome, began.elapsed().as_secs_f64())
                .map_err(|e| format!("{}: {e}", self.store.folder().display()))?;
        }
        Ok(())
    }

    fn progress(&mut self, experiment: &Experiment, point: &Point) {
        let terminal = io::stderr().is_terminal();
        if self.args.quiet || !terminal && self.shown.elapsed() < PROGRESS {
            return;
        }
        self.shown = Instant::now();
        let (mut done, mut left) = (0.0, 0.0);
        for (point, wanted) in &self.planned {
            let known = self.store.known(point);
            let over = known.failures.len() >= ATTEMPTS || known.blank.is_some();
            let have = if over {
                *wanted
            } else {
                known.samples.len().min(*wanted)
            };
            let each = self.store.expected(point);
            done += have as f64 * each;
            left += (wanted - have) as f64 * each;
        }
        let percent = done * 100.0 / (done + left).max(f64::MIN_POSITIVE);
        let figures: Vec<&str> = experiment.figures.iter().map(|f| f.name.as_str()).collect();
        let text = format!(
            "{percent:3.0} %, {} left: {}:{}: {}",
            clock(left),
            experiment.paper,
            figures.join(","),
            point.key()
        );
        if terminal {
            let text: String = text.chars().take(118).collect();
            eprint!("\r{text}\x1b[K");
        } else {
            eprintln!("{text}");
        }
    }
}

/// Returns all experiments. The chosen figures are taken from `chosen`, whose axes `--vary` may have changed.
fn shown(all: &[Experiment], chosen: &[Experiment]) -> Vec<Experiment> {
    let ids: BTreeSet<String> = chosen
        .iter()
        .flat_map(|e| e.figures.iter().map(|figure| e.id(figure)))
        .collect();
    let rest = all.iter().map(|experiment| {
        let mut rest = experiment.clone();
        rest.figures
            .retain(|figure| !ids.contains(&experiment.id(figure)));
        rest
    });
    rest.chain(chosen.iter().cloned()).collect()
}

/// Returns the points of all figures of an experiment, each once, without those that are blank.
fn points(experiment: &Experiment, extent: Extent) -> Vec<Point> {
    let of = experiment
        .figures
        .iter()
        .flat_map(|figure| experiment.points_of(figure, extent));
    let all: BTreeSet<Point> = of
        .filter(|point| point.runner != Runner::None && experiment.blank(&point.params).is_none())
        .collect();
    in_turn(experiment, all)
}

/// Sorts points so that those that a finding compares are measured soon after each other: the axes by which findings select points
/// change most often.
fn in_turn(experiment: &Experiment, points: BTreeSet<Point>) -> Vec<Point> {
    let findings = experiment.figures.iter().flat_map(|figure| &figure.finding);
    let compared: BTreeSet<&String> = findings.flat_map(|finding| finding.b.keys()).collect();
    let mut all: Vec<Point> = points.into_iter().collect();
    all.sort_by_cached_key(|point| {
        let others = point.params.iter();
        let others = others.filter(|(axis, _)| !compared.contains(axis));
        others
            .map(|(axis, value)| (axis.clone(), value.clone()))
            .collect::<Params>()
    });
    all
}

/// Returns the point that a control measures in place of a point of its finding. `None`: the control leaves this point out.
fn changed(point: &Point, finding: &Finding, control: &figures::Control) -> Option<Point> {
    if !figures::selects(&control.only, &point.params) {
        return None;
    }
    let mut params: Params = point.params.clone();
    let mut set = |changes: &BTreeMap<String, figures::Value>| {
        for (axis, value) in changes {
            params.insert(axis.clone(), value.0.clone());
        }
    };
    set(&control.set);
    if figures::selects(&finding.a, &point.params) {
        set(&control.a);
    } else {
        set(&control.b);
    }
    Some(Point {
        runner: point.runner,
        params,
    })
}

/// Returns the points of the controls of findings that do not hold.
fn controls(experiment: &Experiment, store: &Store) -> Vec<Point> {
    let extent = store.extent();
    let mut all = BTreeSet::new();
    for figure in &experiment.figures {
        for finding in &figure.finding {
            let Some(control) = &finding.control else {
                continue;
            };
            let judged = report::judged(experiment, figure, finding, store, None);
            if judged.verdict != Verdict::NotMet {
                continue;
            }
            let named = |point: &&Point| needs(finding, &point.params);
            let points = experiment.points_of(figure, extent);
            let points = points
                .iter()
                .filter(named)
                .filter_map(|point| changed(point, finding, control));
            all.extend(points.filter(|point| experiment.blank(&point.params).is_none()));
        }
    }
    in_turn(experiment, all)
}

/// Returns the points of which more samples would help to decide the findings of an experiment, or the controls of findings
/// that do not hold.
fn undecided(experiment: &Experiment, store: &Store, of_controls: bool) -> Vec<Point> {
    let mut all = BTreeSet::new();
    for figure in &experiment.figures {
        for finding in &figure.finding {
            let here = report::judged(experiment, figure, finding, store, None);
            let judged = match (&finding.control, of_controls) {
                (_, false) => here,
                (Some(control), true) if here.verdict == Verdict::NotMet => {
                    report::judged(experiment, figure, finding, store, Some(control))
                }
                _ => continue,
            };
            let points = judged.doubtful.into_iter().map(|params| Point {
                runner: experiment.runner,
                params,
            });
            match finding.control.as_ref().filter(|_| of_controls) {
                None => all.extend(points),
                Some(control) => {
                    all.extend(points.filter_map(|point| changed(&point, finding, control)));
                }
            }
        }
    }
    in_turn(experiment, all)
}

/// Returns whether a finding uses a point.
fn needs(finding: &Finding, params: &Params) -> bool {
    figures::selects(&finding.a, params)
        || !finding.b.is_empty() && figures::selects(&finding.b, params)
}

/// Writes a file and creates its folder.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_that_a_finding_compares_follow_each_other() {
        let file = "paper = 'pb'\nrunner = 'ping'\n[axis.mode]\nvalues = ['poll', 'event']\n[axis.size]\nvalues = [1, 2, 3]\n\
             [[figure]]\nname = 'x'\ntitle = ''\nasks = ''\nfound = ''\nmetric = 'm'\nx = 'size'\nlines = ['mode']\n[[figure.finding]]\n\
             text = ''\nshape = 'less'\na = { mode = 'poll' }\nb = { mode = 'event' }\n";
        let experiment = figures::parse(file).unwrap();
        let points = points(&experiment, Extent::Full);
        let words: Vec<String> = points
            .iter()
            .map(|point| format!("{} {}", point.params["size"], point.params["mode"]))
            .collect();
        let wanted = [
            "1 event", "1 poll", "2 event", "2 poll", "3 event", "3 poll",
        ];
        assert_eq!(words, wanted);
    }
}
