//! Writes the results: a self-contained HTML page, a CSV file for each figure, and study.json.
//!
//! A *point* of a figure is a combination of the values of its axes. A *blank* point or figure is one that cannot be measured, for a
//! stated reason. A *control* repeats a finding with one setting changed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use anywarp_plot::{Grid, Series, Small, Spread};
use serde_json::{Value as Json, json};

use super::figures::{
    self, Control, Experiment, Extent, Figure, Finding, PAPERS, Params, Point, Row,
};
use super::finding::{self, Judged, Measured, Values, Verdict, digits, supports};
use super::store::{Known, Store};
use super::{ATTEMPTS, changed, needs, write};
use crate::perf::report::conditions;
use crate::perf::sizes;

/// The columns that the CSV files of all figures have, in this order.
const COLUMNS: [&str; 12] = [
    "device",
    "carrier",
    "qp",
    "op",
    "inline",
    "mode",
    "posting",
    "signaling",
    "buffers",
    "size",
    "rate",
    "loss",
];

/// A figure with its results.
struct Seen<'a> {
    experiment: &'a Experiment,
    figure: &'a Figure,
    id: String,
    points: Vec<Point>,
    /// The result of each finding, and that of its control.
    findings: Vec<(Judged, Option<Judged>)>,
    /// The points without a value, and those of which a measurement has failed, by reason.
    missing: BTreeMap<String, Vec<String>>,
    noisy: BTreeMap<String, Vec<String>>,
    measured: usize,
}

/// All figures.
pub(crate) struct Report<'a> {
    store: &'a Store,
    pinning: String,
    seen: Vec<Seen<'a>>,
}

/// Checks a finding with the stored samples, optionally with the changes of a control.
pub(crate) fn judged(
    experiment: &Experiment,
    figure: &Figure,
    finding: &Finding,
    store: &Store,
    control: Option<&Control>,
) -> Judged {
    let extent = store.extent();
    let metric = control
        .and_then(|control| control.metric.as_ref())
        .or(finding.metric.as_ref())
        .unwrap_or(&figure.metric);
    let (mut values, mut missing) = (Values::new(), Vec::new());
    for point in experiment.points_of(figure, extent) {
        if !needs(finding, &point.params) {
            continue;
        }
        let measured = match control {
            None => Some(point.clone()),
            Some(control) => changed(&point, finding, control),
        };
        let Some(measured) = measured else { continue };
        let known = store.known(&measured);
        if let Some(middle) = known.middle(metric) {
            values.push(Measured {
                params: point.params,
                middle,
                samples: known.timed(metric),
            });
        } else if known.samples.is_empty()
            && known.blank.is_none()
            && !known.was_blank
            && experiment.blank(&measured.params).is_none()
        {
            // A point that was measured without this value, such as one of plain TCP, cannot have it.
            missing.push(point.params);
        }
    }
    let places = experiment.values(&figure.x, extent);
    let most = extent.most_samples();
    finding::judge(finding, &values, &missing, &figure.x, &places, most)
}

/// Returns the description and the unit of a value.
fn unit(metric: &str) -> (&'static str, &'static str) {
    match metric {
        "oneway_us" => ("time one way", "µs"),
        "median_us" => ("time one way, median", "µs"),
        "p99_us" => ("time one way, 99th percentile", "µs"),
        "mbps" => ("throughput", "Mbit/s"),
        "arrived_mbps" => ("throughput at the receiver", "Mbit/s"),
        "delivered" => ("delivered", "%"),
        "cpu_local" => ("active side", "% of a processor"),
        "cpu_remote" => ("passive side", "% of a processor"),
        "program_remote" => ("passive side without the device", "% of a processor"),
        "us" => ("time", "µs"),
        "seconds" => ("time", "s"),
        "mb" => ("memory", "MB"),
        "steps" => ("steps", "1/s"),
        "rate" => ("pages", "1/s"),
        "answers" => ("answers", "1/s"),
        "share" => ("share of the processor time", "%"),
        "ratio" => ("favoured / other", ""),
        "followed" => ("ratio / weight", ""),
        "filled" => ("throughput / rate of the link", ""),
        "favoured_mbps" => ("throughput of the favoured streams", "Mbit/s"),
        "ready_us" => ("time without the transfer", "µs"),
        _ => ("value", ""),
    }
}

/// Formats the value of an axis for users.
fn label(axis: &str, value: &str) -> String {
    let text = match (axis, value) {
        ("inline", "true") => "inline",
        ("inline", "false") => "not inline",
        ("mode", "poll") => "polling",
        ("mode", "event") => "events",
        ("resident", "true") => "resident",
        ("resident", "false") => "not resident",
        ("pin", "true") => "pages locked",
        ("pin", "false") => "pages not locked",
        ("huge", "true") => "pages of 2 MiB",
        ("huge", "false") => "pages of 4 KiB",
        ("streams", "1") => "1 stream",
        ("streams", count) => return format!("{count} streams"),
        ("gso", "true") => "send offload",
        ("gso", "false") => "no send offload",
        ("gro", "true") => "receive offload",
        ("gro", "false") => "no receive offload",
        ("crc", "true") => "with a CRC",
        ("crc", "false") => "without a CRC",
        ("mtu", "none") => "loopback interface",
        ("mtu", bytes) => return format!("packets of {bytes} bytes"),
        ("offload", "true") => "segmentation offload",
        ("offload", "false") => "packets one by one",
        ("processes", "true") => "processes instead of threads",
        ("at_once", "true") => "at once",
        ("at_once", "false") => "one after the other",
        ("threads", "1") => "1 region",
        ("threads", count) => return format!("{count} regions"),
        ("action", "register") => "registration",
        ("action", "deregister") => "deregistration",
        ("action", "copy") => "copy",
        ("exs", "normal") => "EXS, normal",
        ("exs", "immediate") => "EXS, immediate",
        ("exs", "persistent-send") => "EXS, persistent",
        ("exs", "persistent-recv") => "EXS, persistent receive",
        ("exs", "tcp") => "TCP",
        ("exs", "tcp-nagle") => "TCP with Nagle",
        ("wait", "notify") => "a program that sleeps until there is an event",
        ("in_flight", "1") => "1 outstanding",
        ("in_flight", count) => return format!("{count} outstanding"),
        ("network", "tcp") => "MPI over the kernel's TCP",
        ("network", "rdma") => "MPI over RDMA connections",
        ("network", "rdma-memory") => "MPI over RDMA over shared memory",
        ("network", "rdma-udp") => "MPI over RDMA over UDP",
        ("network", "ud") => "MPI over UD",
        ("network", "datagrams") => "MPI over RD and Write-Record",
        ("network", "memory") => "MPI over shared memory",
        ("sockets", "tcp") => "TCP of the kernel",
        ("sockets", "udp") => "UDP of the kernel",
        ("sockets", "rc") => "RDMA over TCP",
        ("sockets", "memory") => "RDMA over shared memory",
        ("sockets", "datagram") => "datagrams, Sends",
        ("sockets", "record") => "datagrams, Write-Records",
        ("sockets", "tcp+tcp") => "twice TCP",
        ("sockets", "tcp+rc") => "TCP and RDMA",
        ("receives", "own") => "receives of each queue pair",
        ("receives", "shared") => "shared receive queue",
        ("receives", "xrc") => "XRC",
        ("test", "lat") => "PingPong",
        ("test", "chain") => "SendRecv",
        ("test", "is") => "IS",
        ("test", "cg") => "CG",
        ("class", class) => return format!("class {class}"),
        ("compute", us) => return format!("{us} µs of computation"),
        ("over", "tcp") => "TCP",
        ("over", "rdma") => "RDMA",
        ("posting", "single") => "single posts",
        ("posting", "list") => "lists",
        ("signaling", "full") => "each signaled",
        ("signaling", "periodic") => "some signaled",
        ("carrier", "tcp") => "over TCP",
        ("carrier", "udp") => "over UDP",
        ("carrier", "memory") => "shared memory",
        ("network-rate" | "rate", "none") => "no limit",
        ("op", "send") => "Send",
        ("op", "write") => "Write",
        ("op", "write-imm") => "Write with immediate",
        ("op", "write-record") => "Write-Record",
        ("op", "read") => "Read",
        ("op", "write-read") => "Write, then Read",
        ("qp", name) => return name.to_uppercase(),
        ("loss", "none") => "none lost",
        ("loss", share) => return format!("{share} lost"),
        ("size", bytes) => return bytes.parse().map_or_else(|_| bytes.to_owned(), sizes::text),
        ("buffers", "1") => "1 buffer",
        ("buffers", count) => return format!("{count} buffers"),
        (_, value) => value,
    };
    text.to_owned()
}

/// Returns the name of an axis for users.
fn across(axis: &str) -> &str {
    match axis {
        "size" => "size",
        "buffers" => "buffers (outstanding operations)",
        "network-rate" | "rate" => "rate of the link",
        "loss" => "datagrams lost",
        other => other,
    }
}

fn labels(axes: &[String], params: &Params) -> String {
    let all: Vec<String> = axes
        .iter()
        .map(|axis| label(axis, params.get(axis).map_or("", String::as_str)))
        .collect();
    all.join(", ")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Returns why the last failed measurement of a point that has samples failed, if the point was given up or has fewer samples than
/// wanted.
fn failure(known: &Known, extent: Extent) -> Option<&String> {
    let why = known.failures.last()?;
    let too_few = known.samples.len() < extent.samples();
    (too_few || known.failures.len() >= ATTEMPTS).then_some(why)
}

impl<'a> Seen<'a> {
    fn new(experiment: &'a Experiment, figure: &'a Figure, store: &Store) -> Self {
        let points = experiment.points_of(figure, store.extent());
        let axes: Vec<String> = figure
            .charts
            .iter()
            .chain(&figure.lines)
            .chain([&figure.x])
            .cloned()
            .collect();
        let (mut missing, mut noisy) = (BTreeMap::new(), BTreeMap::new());
        let note = |to: &mut BTreeMap<String, Vec<String>>, why: String, point: &Point| {
            to.entry(why)
                .or_default()
                .push(labels(&axes, &point.params));
        };
        let mut measured = 0;
        for point in &points {
            let known = store.known(point);
            if let Some(why) = experiment.blank(&point.params) {
                note(&mut missing, format!("blank: {why}"), point);
            } else if known.samples.is_empty() {
                let why = match (known.failures.last(), &known.blank) {
                    (Some(why), _) => format!("failed: {why}"),
                    (_, Some(why)) => format!("blank: {why}"),
                    _ => "not measured".to_owned(),
                };
                note(&mut missing, why, point);
            } else {
                measured += 1;
                if let Some(why) = failure(known, store.extent()) {
                    note(&mut missing, format!("failed: {why}"), point);
                }
                if known.noise().is_some() {
                    note(
                        &mut noisy,
                        "values that differ much from run to run".to_owned(),
                        point,
                    );
                }
            }
        }
        let findings = figure
            .finding
            .iter()
            .map(|finding| {
                let judged = |control| judged(experiment, figure, finding, store, control);
                let here = judged(None);
                let control = finding
                    .control
                    .as_ref()
                    .map(|control| judged(Some(control)));
                (here, control.filter(|c| c.verdict != Verdict::Unknown))
            })
            .collect();
        Self {
            id: experiment.id(figure),
            experiment,
            figure,
            points,
            findings,
            missing,
            noisy,
            measured,
        }
    }

    fn anchor(&self) -> String {
        self.id.replace(':', "-")
    }

    /// Returns why the figure shows no values, if so.
    fn nothing(&self) -> Option<String> {
        match &self.figure.blank {
            Some(why) => Some(format!("blank: {why}")),
            None if self.measured == 0 => {
                let failed = self.failures().next().map(|(why, _)| why);
                Some(match failed.or_else(|| self.missing.keys().next()) {
                    Some(why) if why != "not measured" => why.clone(),
                    _ => format!("not measured: anywarp study run {}", self.id),
                })
            }
            None => None,
        }
    }

    /// Returns a summary of the results of all findings.
    fn verdict(&self) -> String {
        if let Some(nothing) = self.nothing() {
            return nothing;
        }
        let count = |verdict| {
            self.findings
                .iter()
                .filter(|(j, _)| j.verdict == verdict)
                .count()
        };
        let mut text = match (count(Verdict::Met), self.findings.len()) {
            (_, 0) => "measured".to_owned(),
            (met, all) if met == all => format!("met ({met})"),
            (met, all) => format!("{met} of {all} met"),
        };
        let noise = count(Verdict::Noise);
        if noise > 0 {
            let _ = write!(text, ", {noise} within the noise");
        }
        let incomplete = self.findings.iter().filter(|(j, _)| j.lacking > 0).count();
        if incomplete > 0 {
            let _ = write!(text, ", {incomplete} incomplete");
        }
        if self.failures().next().is_some() {
            text.push_str(", some points failed");
        }
        text
    }

    /// The reasons why points failed, each with its points.
    fn failures(&self) -> impl Iterator<Item = (&String, &Vec<String>)> {
        self.missing
            .iter()
            .filter(|(why, _)| why.starts_with("failed"))
    }

    /// Returns the drawing as SVG.
    fn drawing(&self, store: &Store) -> io::Result<String> {
        let extent = store.extent();
        let figure = self.figure;
        let places = self.experiment.values(&figure.x, extent);
        let distinct = |axes: &[String]| {
            let mut all: Vec<Vec<String>> = vec![Vec::new()];
            for axis in axes {
                let values = self.experiment.values(axis, extent);
                all = all
                    .into_iter()
                    .flat_map(|before| {
                        values.iter().map(move |value| {
                            let mut one = before.clone();
                            one.push(value.clone());
                            one
                        })
                    })
                    .collect();
            }
            all
        };
        let has = |axes: &[String], values: &[String], params: &Params| {
            axes.iter()
                .zip(values)
                .all(|(axis, value)| params.get(axis) == Some(value))
        };
        let name = |axes: &[String], values: &[String]| {
            let all: Vec<String> = axes.iter().zip(values).map(|(a, v)| label(a, v)).collect();
            all.join(", ")
        };
        let mut lines = distinct(&figure.lines);
        lines.retain(|line| {
            self.points
                .iter()
                .any(|p| has(&figure.lines, line, &p.params) && !store.known(p).samples.is_empty())
        });
        let legend: Vec<String> = lines.iter().map(|line| name(&figure.lines, line)).collect();
        let mut charts = Vec::new();
        for chart in distinct(&figure.charts) {
            let mut series = Vec::new();
            for (style, line) in lines.iter().enumerate() {
                let of = self.points.iter().filter(|p| {
                    has(&figure.charts, &chart, &p.params) && has(&figure.lines, line, &p.params)
                });
                let of: Vec<&Point> = of.collect();
                let values: Vec<Option<Spread>> = places
                    .iter()
                    .map(|place| {
                        let point = of.iter().find(|p| p.params.get(&figure.x) == Some(place))?;
                        let known = store.known(point);
                        let middle = known.middle(&figure.metric)?;
                        Some(Spread {
                            median: middle.median,
                            least: middle.lower,
                            most: middle.upper,
                            doubtful: known.noise().is_some(),
                        })
                    })
                    .collect();
                if values.iter().any(Option::is_some) {
                    series.push(Series { style, values });
                }
            }
            if !series.is_empty() {
                charts.push(Small {
                    title: name(&figure.charts, &chart),
                    series,
                });
            }
        }
        let shown: Vec<String> = places
            .iter()
            .map(|place| match figure.x.as_str() {
                "buffers" => place.clone(),
                axis => label(axis, place),
            })
            .collect();
        let axis = match unit(&figure.metric) {
            (what, "") => what.to_owned(),
            (what, unit) => format!("{what}, {unit}"),
        };
        anywarp_plot::grid(
            &Grid {
                unit: &axis,
                across: across(&figure.x),
                places: &shown,
                legend: &legend,
                log: figure.log,
                digits,
            },
            &charts,
        )
    }

    /// Returns the CSV file, with one line for each sample.
    fn csv(&self, store: &Store) -> String {
        let samples = self.points.iter().flat_map(|point| {
            let samples = &store.known(point).samples;
            samples
                .iter()
                .enumerate()
                .map(move |(n, sample)| (point, n, sample))
        });
        let metrics: BTreeSet<&String> = samples.clone().flat_map(|(_, _, s)| s.keys()).collect();
        let mut others: BTreeSet<&String> =
            self.points.iter().flat_map(|p| p.params.keys()).collect();
        others.retain(|axis| !COLUMNS.contains(&axis.as_str()));
        let names = |all: &BTreeSet<&String>| {
            all.iter()
                .map(|name| format!(",{name}"))
                .collect::<String>()
        };
        let mut text = format!(
            "figure,{}{},rep{}\n",
            COLUMNS.join(","),
            names(&others),
            names(&metrics)
        );
        for (point, n, sample) in samples {
            text.push_str(&self.id);
            for column in COLUMNS {
                let value = match column {
                    // All points are of one device, unless the device is an axis.
                    "device" if !point.params.contains_key("device") => Some(store.device()),
                    axis => point.params.get(axis).map(String::as_str),
                };
                let _ = write!(text, ",{}", value.unwrap_or_default());
            }
            for axis in &others {
                let _ = write!(
                    text,
                    ",{}",
                    point.params.get(*axis).map_or("", String::as_str)
                );
            }
            let _ = write!(text, ",{}", n + 1);
            for metric in &metrics {
                let value = sample.get(*metric).map_or_else(String::new, f64::to_string);
                let _ = write!(text, ",{value}");
            }
            text.push('\n');
        }
        text
    }

    fn json(&self, store: &Store) -> Json {
        let findings: Vec<Json> = self
            .figure
            .finding
            .iter()
            .zip(&self.findings)
            .map(|(finding, (judged, control))| {
                json!({
                    "text": finding.text,
                    "verdict": judged.verdict.as_str(),
                    "here": judged.number,
                    "here_text": judged.text,
                    "paper": finding.paper,
                    "because": finding.because,
                    "control": control.as_ref().map(|c| json!({
                        "verdict": c.verdict.as_str(), "here": c.number, "supports": supports(finding, judged, c),
                    })),
                })
            })
            .collect();
        let points: Vec<Json> = self
            .points
            .iter()
            .map(|point| {
                let known = store.known(point);
                let middle = known.middle(&self.figure.metric);
                json!({
                    "params": point.params,
                    "median": middle.map(|m| m.median),
                    "lower": middle.map(|m| m.lower),
                    "upper": middle.map(|m| m.upper),
                    "samples": known.samples.len(),
                    "noisy": known.noise(),
                    "blank": self.experiment.blank(&point.params).or(known.blank.as_deref()),
                    "failed": known.failures.last(),
                    "command": known.command,
                })
            })
            .collect();
        json!({
            "figure": self.id,
            "title": self.figure.title,
            "metric": self.figure.metric,
            "verdict": self.verdict(),
            "findings": findings,
            "points": points,
        })
    }

    /// Returns the section of the HTML page.
    fn section(&self, store: &Store) -> io::Result<String> {
        let figure = self.figure;
        let mut text = format!(
            "<section id=\"{}\"><h3>{}: {}</h3>\n<p><b>{}</b> The paper: {}</p>\n",
            self.anchor(),
            escape(&self.id),
            escape(&figure.title),
            escape(&figure.asks),
            escape(&figure.found)
        );
        if let Some(nothing) = self.nothing() {
            let _ = writeln!(
                text,
                "<p class=\"blank\">{}</p></section>",
                escape(&nothing)
            );
            return Ok(text);
        }
        text.push_str(&self.drawing(store)?);
        text.push_str("\n<table><tr><th>the paper's finding</th><th>the paper</th><th>here</th><th></th></tr>\n");
        for (finding, (judged, control)) in figure.finding.iter().zip(&self.findings) {
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"{}\">{}</td></tr>",
                escape(&finding.text),
                escape(finding.paper.as_deref().unwrap_or("–")),
                escape(&judged.text),
                judged.verdict.as_str().replace(' ', ""),
                judged.verdict.as_str()
            );
            if judged.verdict == Verdict::NotMet {
                let _ = writeln!(
                    text,
                    "<tr><td colspan=\"4\" class=\"why\">{}</td></tr>",
                    escape(&why(finding, judged, control.as_ref()))
                );
            }
        }
        text.push_str("</table>\n");
        for (why, of) in self.missing.iter().chain(&self.noisy) {
            let _ = writeln!(
                text,
                "<p class=\"note\">{}: {}.</p>",
                escape(why),
                escape(&few(of))
            );
        }
        text.push_str(&self.details(store));
        text.push_str("</section>\n");
        Ok(text)
    }

    /// Returns all values and commands in a folded element.
    fn details(&self, store: &Store) -> String {
        let figure = self.figure;
        let mut text = format!(
            "<details><summary>values and commands</summary><p><a href=\"{}.csv\">{}.csv</a></p>\
             <table><tr><th></th><th>median</th><th>quartiles</th><th>n</th><th>command</th></tr>\n",
            self.anchor(),
            self.anchor()
        );
        let axes: Vec<String> = figure
            .charts
            .iter()
            .chain(&figure.lines)
            .chain([&figure.x])
            .cloned()
            .collect();
        for point in &self.points {
            let known = store.known(point);
            let Some(middle) = known.middle(&figure.metric) else {
                continue;
            };
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{} to {}</td><td>{}</td><td><code>{}</code></td></tr>",
                escape(&labels(&axes, &point.params)),
                digits(middle.median),
                digits(middle.lower),
                digits(middle.upper),
                known.samples.len(),
                escape(known.command.as_deref().unwrap_or_default())
            );
        }
        text.push_str("</table></details>\n");
        text
    }
}

/// A row of a table of suitability, with the measured result.
#[derive(Debug)]
struct Suited<'a> {
    row: &'a Row,
    /// Whether RDMA is suited on this machine, if that was measured.
    here: Option<bool>,
    why: String,
}

fn yes(suits: bool) -> &'static str {
    if suits { "yes" } else { "no" }
}

/// Returns the first few names, and the number of the others.
fn few(names: &[String]) -> String {
    const FEW: usize = 4;
    let text = names
        .iter()
        .take(FEW)
        .cloned()
        .collect::<Vec<_>>()
        .join("; ");
    match names.len().saturating_sub(FEW) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Returns why a finding does not hold, as far as it is known.
fn why(finding: &Finding, here: &Judged, control: Option<&Judged>) -> String {
    let shown = control.is_some_and(|control| control.verdict == Verdict::Met);
    let supported = control.is_some_and(|control| supports(finding, here, control));
    let mut text = match &finding.because {
        Some(because) if supported => because.clone(),
        Some(because) => format!("Presumably: {because}"),
        None => "Not explained yet.".to_owned(),
    };
    if let (Some(changed), Some(judged)) = (&finding.control, control) {
        let all = [&changed.set, &changed.a, &changed.b];
        let mut set: Vec<String> = all
            .into_iter()
            .flatten()
            .map(|(axis, value)| label(axis, &value.0))
            .collect();
        let chosen = changed.only.iter().flat_map(|(axis, values)| {
            let values = values.all().iter();
            values.map(|value| label(axis, &value.0))
        });
        if set.is_empty() {
            set.extend(chosen);
        }
        set.extend(changed.metric.as_ref().map(|m| unit(m).0.to_owned()));
        let _ = write!(
            text,
            " Measured with {}: {}, {}.",
            set.join(", "),
            judged.text,
            judged.verdict.as_str()
        );
        if supported && !shown {
            text.push_str(" Most of the difference is gone.");
        }
        if shown {
            let _ = write!(text, " {}", changed.text);
        }
    }
    text
}

impl<'a> Report<'a> {
    pub(crate) fn new(all: &'a [Experiment], store: &'a Store, pinning: String) -> Self {
        let mut seen: Vec<Seen<'_>> = all
            .iter()
            .flat_map(|e| e.figures.iter().map(move |figure| (e, figure)))
            .map(|(experiment, figure)| Seen::new(experiment, figure, store))
            .collect();
        seen.sort_by_key(|seen| figures::order(&seen.figure.name));
        Self {
            store,
            pinning,
            seen,
        }
    }

    /// Returns whether a point of these figures failed.
    pub(crate) fn failed(&self, ids: &BTreeSet<String>) -> bool {
        let of = self.seen.iter().filter(|seen| ids.contains(&seen.id));
        of.flat_map(|seen| seen.missing.keys())
            .any(|why| why.starts_with("failed"))
    }

    /// Returns a line for each of these figures and for each of their findings.
    pub(crate) fn summary(&self, ids: &BTreeSet<String>) -> String {
        let mut text = String::new();
        for seen in self.seen.iter().filter(|seen| ids.contains(&seen.id)) {
            let _ = writeln!(text, "{:<12} {}", seen.id, seen.verdict());
            if seen.nothing().is_some() {
                continue;
            }
            for (why, points) in seen.failures() {
                let _ = writeln!(text, "    {why}: {}", few(points));
            }
            for (finding, (judged, control)) in seen.figure.finding.iter().zip(&seen.findings) {
                let _ = writeln!(
                    text,
                    "    {:<16} {}: {}{}",
                    judged.verdict.as_str(),
                    finding.text,
                    judged.text,
                    finding
                        .paper
                        .as_ref()
                        .map_or_else(String::new, |paper| format!(" (paper: {paper})"))
                );
                if judged.verdict == Verdict::NotMet {
                    let _ = writeln!(
                        text,
                        "                     {}",
                        why(finding, judged, control.as_ref())
                    );
                }
            }
        }
        let _ = writeln!(text, "{}", self.tally(|seen| ids.contains(&seen.id)));
        text
    }

    /// Returns how many findings of these figures are met, and how many others a control explains.
    fn tally(&self, of: impl Fn(&Seen<'_>) -> bool) -> String {
        let (mut all, mut met, mut noise, mut changed, mut partly) = (0, 0, 0, 0, 0);
        for seen in self.seen.iter().filter(|seen| of(seen)) {
            for (finding, (judged, control)) in seen.figure.finding.iter().zip(&seen.findings) {
                all += usize::from(judged.verdict != Verdict::Unknown);
                match (judged.verdict, control) {
                    (Verdict::Met, _) => met += 1,
                    (Verdict::Noise, _) => noise += 1,
                    (Verdict::NotMet, Some(c)) if c.verdict == Verdict::Met => changed += 1,
                    (Verdict::NotMet, Some(c)) => {
                        partly += usize::from(supports(finding, judged, c));
                    }
                    _ => {}
                }
            }
        }
        format!(
            "{all} findings: {met} are met, {noise} are within the noise, {changed} are met with one condition changed, for {partly} one \
             changed condition removes most of the difference, {} have at most a presumed reason.",
            all - met - noise - changed - partly
        )
    }

    /// Returns advice based on the findings.
    pub(crate) fn hints(&self) -> String {
        let mut text = String::new();
        for seen in &self.seen {
            for (finding, (judged, _)) in seen.figure.finding.iter().zip(&seen.findings) {
                let hint = match judged.verdict {
                    Verdict::Met => &finding.hint,
                    Verdict::NotMet => &finding.hint_not,
                    Verdict::Noise | Verdict::Unknown => continue,
                };
                if let Some(hint) = hint {
                    let number = judged.number.map(digits).unwrap_or_default();
                    let _ = writeln!(text, "- {} [{}]", hint.replace("{}", &number), seen.id);
                }
            }
        }
        if text.is_empty() {
            text.push_str(
                "there are too few measurements for advice: run `anywarp study run pb --quick`\n",
            );
        }
        for seen in self.seen.iter().filter(|s| !s.figure.row.is_empty()) {
            let rows = self.rows(seen.figure);
            let width = |cell: fn(&Row) -> &String| {
                let all = rows.iter().map(|row| cell(row.row).chars().count());
                all.max().unwrap_or(0)
            };
            let first = width(|row| &row.parameter);
            let second = width(|row| &row.example);
            let _ = writeln!(text, "\n{} [{}]\n", seen.figure.title, seen.id);
            let _ = writeln!(
                text,
                "{:first$}  {:second$}  paper  here  why",
                "what matters", "such as"
            );
            for suited in &rows {
                let _ = writeln!(
                    text,
                    "{:first$}  {:second$}  {:5}  {:4}  {}",
                    suited.row.parameter,
                    suited.row.example,
                    yes(suited.row.suits),
                    suited.here.map_or("?", yes),
                    suited.why
                );
            }
        }
        text
    }

    /// Returns the rows of a table, with the results of the findings that they name.
    fn rows(&self, table: &'a Figure) -> Vec<Suited<'a>> {
        // Whether a figure has any value.
        let any = |id: &String| {
            let mut seen = self.seen.iter();
            seen.any(|seen| seen.id == *id && seen.measured > 0)
        };
        let judge = |row: &'a Row| {
            let named = row.figure.as_ref().and_then(|id| {
                let seen = self.seen.iter().find(|seen| seen.id == *id)?;
                let (judged, _) = seen.findings.get(row.finding.checked_sub(1)?)?;
                Some((id, judged))
            });
            let (here, why) = match named {
                None => (None, "no figure measures this".to_owned()),
                Some((id, judged)) => match judged.verdict {
                    Verdict::Unknown if judged.lacking > 0 && any(id) => {
                        (None, format!("{}: anywarp study run {id}", judged.text))
                    }
                    Verdict::Unknown => (None, format!("not measured: anywarp study run {id}")),
                    Verdict::Noise => (None, format!("{} [{id}]", judged.text)),
                    verdict => {
                        let number = judged.number.map_or_else(|| "?".to_owned(), digits);
                        (
                            Some(row.suits == (verdict == Verdict::Met)),
                            format!("{} [{id}]", row.here.replace("{}", &number)),
                        )
                    }
                },
            };
            Suited { row, here, why }
        };
        table.row.iter().map(judge).collect()
    }

    /// Writes all files. Returns the path of the page.
    pub(crate) fn write(&self) -> io::Result<PathBuf> {
        let folder = self.store.folder();
        for seen in self.seen.iter().filter(|seen| seen.measured > 0) {
            write(
                &folder.join(format!("{}.csv", seen.anchor())),
                &seen.csv(self.store),
            )?;
        }
        let figures: Vec<Json> = self.seen.iter().map(|seen| seen.json(self.store)).collect();
        let all = json!({
            "tool": "anywarp study",
            "version": env!("CARGO_PKG_VERSION"),
            "extent": self.store.extent().as_str(),
            "device": self.store.device(),
            "pinning": self.pinning,
            "conditions": conditions(),
            "figures": figures,
        });
        write(&folder.join("study.json"), &format!("{all:#}\n"))?;
        let page = folder.join("index.html");
        write(&page, &self.page()?)?;
        Ok(page)
    }

    /// Returns the section of the page for a table of suitability.
    fn table(&self, seen: &Seen<'a>) -> String {
        let mut text = format!(
            "<section id=\"{}\"><h3>{}: {}</h3>\n<p><b>{}</b> The paper: {}</p>\n<table><tr><th>what matters</th><th>such as</th>\
             <th>the paper</th><th>here</th><th></th></tr>\n",
            seen.anchor(),
            escape(&seen.id),
            escape(&seen.figure.title),
            escape(&seen.figure.asks),
            escape(&seen.figure.found)
        );
        for suited in self.rows(seen.figure) {
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&suited.row.parameter),
                escape(&suited.row.example),
                yes(suited.row.suits),
                suited.here.map_or("?", yes),
                escape(&suited.why)
            );
        }
        text.push_str("</table></section>\n");
        text
    }

    fn page(&self) -> io::Result<String> {
        let conditions = conditions();
        let of = |name: &str| match conditions.get(name) {
            Some(Json::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let extent = match self.store.extent() {
            Extent::Full => "full",
            Extent::Quick => "--quick: few points, a fraction of a second each",
            Extent::Smoke => "--smoke: the values mean nothing",
        };
        let mut text = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>anywarp study</title>\n<style>{STYLE}</style></head>\
             <body>\n<h1>anywarp study</h1>\n<p>Device: {} ({}). Machine: {}, {} processors, Linux {}, load {}; {}. anywarp {}. Medians, with \
             lines from the lower to the upper quartile; an empty mark is a value that differs much from run to run. Compare \
             shapes and ratios: the papers have absolute values of other machines.</p>\n",
            escape(self.store.device()),
            escape(extent),
            escape(&of("cpu")),
            of("cpus"),
            escape(&of("kernel")),
            escape(&of("load")),
            escape(&self.pinning),
            env!("CARGO_PKG_VERSION")
        );
        let _ = writeln!(text, "<p>{}</p>", escape(&self.tally(|_| true)));
        for (paper, title) in PAPERS {
            let of: Vec<&Seen<'_>> = self
                .seen
                .iter()
                .filter(|seen| seen.experiment.paper == paper)
                .collect();
            if of.is_empty() {
                continue;
            }
            let _ = writeln!(text, "<h2>{}</h2>\n<table>", escape(title));
            for seen in &of {
                let _ = writeln!(
                    text,
                    "<tr><td><a href=\"#{}\">{}</a></td><td>{}</td><td>{}</td></tr>",
                    seen.anchor(),
                    escape(&seen.id),
                    escape(&seen.figure.title),
                    escape(&seen.verdict())
                );
            }
            text.push_str("</table>\n");
            for seen in of {
                if seen.figure.row.is_empty() {
                    text.push_str(&seen.section(self.store)?);
                } else {
                    text.push_str(&self.table(seen));
                }
            }
        }
        text.push_str("</body></html>\n");
        Ok(text)
    }
}

const STYLE: &str = "body{max-width:900px;margin:2em auto;padding:0 1em;font:14px/1.4 sans-serif;color:#222}\
 table{border-collapse:collapse;margin:.5em 0}td,th{padding:2px 8px;vertical-align:top;text-align:left;border-bottom:1px solid #ddd}\
 code{font-size:11px}section{margin:2.5em 0;break-inside:avoid}svg{max-width:100%;height:auto}.met{font-weight:bold}\
 .notmet{font-weight:bold;text-decoration:underline}.why,.note{color:#555;font-size:13px}.blank{border:1px dashed #999;padding:.5em}\
 @media print{details{display:none}}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::store::{Conditions, Miss};

    #[test]
    fn only_a_rate_has_no_limit() {
        assert_eq!(label("rate", "none"), "no limit");
        assert_eq!(label("loss", "none"), "none lost");
        assert_eq!(label("loss", "5%"), "5% lost");
    }

    const FILE: &str = "paper = 'pb'\nrunner = 'ping'\n[axis.mode]\nvalues = ['poll', 'event', 'none']\n[axis.size]\nvalues = [1, 2]\n\
         [[blank]]\npoints = { mode = 'none', size = 2 }\nwhy = 'no'\n[[figure]]\nname = '1'\ntitle = ''\nasks = ''\nfound = ''\n\
         metric = 'oneway_us'\nx = 'size'\nlines = ['mode']\n[[figure.finding]]\ntext = ''\nshape = 'less'\na = { mode = 'poll' }\n\
         b = { mode = ['event', 'none'] }\n";

    /// Returns a store in a folder with this name, with two samples of each point of the experiment that is not blank, except of the
    /// point with the key `except`.
    fn store(name: &str, experiment: &Experiment, except: &str) -> Store {
        let folder = std::env::temp_dir().join(format!("anywarp-{name}-{}", std::process::id()));
        let conditions = Conditions::new(Extent::Quick, "d".to_owned(), false);
        let mut store = Store::open(&folder, conditions, true).unwrap();
        for point in experiment.points(Extent::Quick) {
            let us = if point.params["mode"] == "poll" {
                1.0
            } else {
                9.0
            };
            if experiment.blank(&point.params).is_none() && point.key() != except {
                add(&mut store, &point, Ok(us));
                add(&mut store, &point, Ok(us));
            }
        }
        store
    }

    fn add(store: &mut Store, point: &Point, outcome: Result<f64, Miss>) {
        let outcome = outcome.map(|us| [("oneway_us".to_owned(), us)].into());
        store.add(point, String::new(), outcome, 0.1).unwrap();
    }

    #[test]
    fn a_failure_of_a_point_with_samples_is_reported() {
        let all = [figures::parse(FILE).unwrap()];
        let ids: BTreeSet<String> = ["pb:1".to_owned()].into();
        let points = all[0].points(Extent::Quick);
        let key = points[0].key();
        let failed = |outcomes: &[bool]| {
            let mut store = store("failures", &all[0], &key);
            for ok in outcomes {
                let why = || Miss::Failed("the reason".to_owned());
                add(&mut store, &points[0], ok.then_some(1.0).ok_or_else(why));
            }
            let report = Report::new(&all, &store, String::new());
            let failed = report.failed(&ids);
            assert_eq!(report.summary(&ids).contains("failed: the reason"), failed);
            std::fs::remove_dir_all(store.folder()).unwrap();
            failed
        };
        assert!(!failed(&[true, true]));
        // A single failure does not matter if the point then has all its samples.
        assert!(!failed(&[false, true, true]));
        assert!(failed(&[true, false]));
        assert!(failed(&[false, true]));
        assert!(failed(&[true, true, false, false]));
        assert!(failed(&[false, false]));
    }

    #[test]
    fn a_point_without_a_value_makes_a_finding_incomplete_unless_it_is_blank() {
        let all = [figures::parse(FILE).unwrap()];
        let (figure, finding) = (&all[0].figures[0], &all[0].figures[0].finding[0]);
        let judged = |store: &Store| judged(&all[0], figure, finding, store, None);
        let points = all[0].points(Extent::Quick);
        let mode = |mode: &str| points.iter().find(|p| p.params["mode"] == mode).unwrap();
        let complete = store("complete", &all[0], "");
        assert_eq!(judged(&complete).verdict, Verdict::Met);
        std::fs::remove_dir_all(complete.folder()).unwrap();
        let point = mode("event");
        let mut store = store("incomplete", &all[0], &point.key());
        assert_eq!(judged(&store).verdict, Verdict::Unknown);
        assert!(judged(&store).text.contains("incomplete"));
        add(&mut store, point, Err(Miss::Failed("why".to_owned())));
        assert_eq!(judged(&store).verdict, Verdict::Unknown);
        let ids: BTreeSet<String> = ["pb:1".to_owned()].into();
        let summary = Report::new(&all, &store, String::new()).summary(&ids);
        assert!(summary.contains("0 of 1 met, 1 incomplete"), "{summary}");
        add(&mut store, point, Err(Miss::Blank("not here".to_owned())));
        assert_eq!(judged(&store).verdict, Verdict::Met);
        // A later command reads from the store that the point is blank.
        let conditions = Store::last(store.folder()).unwrap();
        let read = Store::read(store.folder(), conditions).unwrap();
        assert_eq!(judged(&read).verdict, Verdict::Met);
        std::fs::remove_dir_all(store.folder()).unwrap();
    }
}
