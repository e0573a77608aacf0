//! The definitions of the figures, read from `studies/*.toml`. A file is one experiment, and each figure shows a part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anywarp_core::fault::Plan;
use serde::Deserialize;

use super::args::Run;

/// How many points (combinations of the values of an experiment's axes) are measured, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Extent {
    /// Everything.
    Full,
    /// `--quick`
    Quick,
    /// `--smoke`
    Smoke,
}

impl Extent {
    /// Returns the extent that the command line selects.
    pub(crate) fn of(run: &Run) -> Self {
        match (run.smoke, run.quick) {
            (true, _) => Self::Smoke,
            (_, true) => Self::Quick,
            _ => Self::Full,
        }
    }

    /// Returns the name of the extent in stored samples and in reports.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Quick => "quick",
            Self::Smoke => "smoke",
        }
    }

    /// Returns the duration of one sample in seconds.
    pub(crate) fn seconds(self) -> f64 {
        match self {
            Self::Full => 1.0,
            Self::Quick => 0.06,
            Self::Smoke => 0.01,
        }
    }

    /// Returns the number of samples of a point.
    pub(crate) fn samples(self) -> usize {
        match self {
            Self::Full => 5,
            Self::Quick => 2,
            Self::Smoke => 1,
        }
    }

    /// Returns the largest number of additional samples of a noisy point.
    pub(crate) fn more_samples(self) -> usize {
        match self {
            Self::Full => 5,
            Self::Quick => 1,
            Self::Smoke => 0,
        }
    }

    /// Returns the largest number of samples of a point that decides a finding.
    pub(crate) fn most_samples(self) -> usize {
        match self {
            Self::Full => 25,
            Self::Quick => 16,
            Self::Smoke => 0,
        }
    }
}

/// The program that measures the points of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Runner {
    /// `anywarp ping`
    Ping,
    /// `anywarp blast`
    Blast,
    /// `anywarp-cost memory`: registration and copying.
    Memory,
    /// `anywarp-cost first`: the time to the first byte.
    First,
    /// `anywarp-cost buffers`: ways to prepare memory, and a Write of it.
    Buffers,
    /// `anywarp-cost broadcast`: datagrams to a group.
    Broadcast,
    /// `studies/mpi.c` and `studies/kernels.c`, under Open MPI.
    Mpi,
    /// `exs-ttcp`
    Exs,
    /// SIPp, ffmpeg, sockperf, iperf3, perftest, and HAProxy with nginx and memcached.
    Apps,
    /// Streams of two kinds on a slow link. Each kind has a virtual lane of its own.
    Lanes,
    /// No program: no figure of the file can be measured.
    None,
}

impl Runner {
    /// Returns the name.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Blast => "blast",
            Self::Memory => "memory",
            Self::First => "first",
            Self::Buffers => "buffers",
            Self::Broadcast => "broadcast",
            Self::Mpi => "mpi",
            Self::Exs => "exs",
            Self::Apps => "apps",
            Self::Lanes => "lanes",
            Self::None => "none",
        }
    }

    /// Returns the expected duration of a sample in seconds, including the start of programs on a typical machine.
    pub(crate) fn seconds(self, extent: Extent) -> f64 {
        let start = match self {
            Self::Ping | Self::Blast | Self::None => 0.08,
            Self::Memory => 0.02,
            Self::Exs | Self::Buffers => 0.1,
            Self::Broadcast => 0.4,
            Self::Mpi | Self::First => 0.6,
            Self::Apps => 2.5,
            Self::Lanes => 2.0,
        };
        extent.seconds() * 1.1 + start
    }
}

/// A value of an axis, as text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(from = "Scalar")]
pub(crate) struct Value(pub(crate) String);

#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Flag(bool),
    Whole(i64),
    Number(f64),
    Text(String),
}

impl From<Scalar> for Value {
    fn from(scalar: Scalar) -> Self {
        Self(match scalar {
            Scalar::Flag(flag) => flag.to_string(),
            Scalar::Whole(number) => number.to_string(),
            Scalar::Number(number) => number.to_string(),
            Scalar::Text(text) => text,
        })
    }
}

/// One or several values.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Values {
    /// One.
    One(Value),
    /// Any of these.
    Many(Vec<Value>),
}

impl Values {
    pub(crate) fn all(&self) -> &[Value] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn has(&self, value: &str) -> bool {
        self.all().iter().any(|one| one.0 == value)
    }
}

/// Selects the points with these values.
pub(crate) type Select = BTreeMap<String, Values>;

/// The value of each axis for a point.
pub(crate) type Params = BTreeMap<String, String>;

/// Returns whether a point is among those selected.
pub(crate) fn selects(select: &Select, params: &Params) -> bool {
    select
        .iter()
        .all(|(axis, values)| params.get(axis).is_some_and(|value| values.has(value)))
}

/// The values of an axis.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Axis {
    values: Vec<Value>,
    /// The values for `--quick`, if they are fewer.
    quick: Option<Vec<Value>>,
    /// The values for `--smoke`, if they are not the first and the last of `quick`.
    smoke: Option<Vec<Value>>,
    /// The settings that a value represents, if the value is only a name: `[axis.place.set.network]`.
    #[serde(default)]
    set: BTreeMap<String, BTreeMap<String, Value>>,
    /// For some values of this axis, which points with the value exist; all of them without an entry: `[axis.rate.only.none]`.
    #[serde(default)]
    only: BTreeMap<String, Select>,
}

impl Axis {
    /// Returns the values to measure.
    pub(crate) fn values(&self, extent: Extent) -> Vec<Value> {
        let quick = self.quick.as_ref().unwrap_or(&self.values);
        match extent {
            Extent::Full => self.values.clone(),
            Extent::Quick => quick.clone(),
            Extent::Smoke => self.smoke.clone().unwrap_or_else(|| {
                let ends: BTreeSet<usize> = [0, quick.len().saturating_sub(1)].into();
                ends.iter().filter_map(|&n| quick.get(n).cloned()).collect()
            }),
        }
    }
}

/// Points that cannot be measured, and why.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Blank {
    /// The points.
    pub(crate) points: Select,
    /// The reason.
    pub(crate) why: String,
}

/// The assertion of a finding, where a and b are the values of two sets of points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Shape {
    /// a < b × factor
    Less,
    /// a and b differ by at most the factor
    Same,
    /// (a at the last x) ≥ (a at the first x) × factor
    Rises,
    /// (a at the last x) × factor ≤ (a at the first x)
    Falls,
    /// a ≤ limit
    AtMost,
    /// a ≥ limit
    AtLeast,
    /// a is above b at the first x, and the first x with a below b is between `from` and `to`
    Crosses,
}

/// A repetition of the finding with one setting changed, to explain why it does not hold.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Control {
    /// The changed settings of all points.
    #[serde(default)]
    pub(crate) set: BTreeMap<String, Value>,
    /// The changed settings of the points a.
    #[serde(default)]
    pub(crate) a: BTreeMap<String, Value>,
    /// The changed settings of the points b.
    #[serde(default)]
    pub(crate) b: BTreeMap<String, Value>,
    /// The points of the finding that are repeated, if not all.
    #[serde(default)]
    pub(crate) only: Select,
    /// The name of the value that is compared, if it is not that of the finding.
    pub(crate) metric: Option<String>,
    /// The explanation that applies if the finding then holds.
    pub(crate) text: String,
}

/// A finding of the paper, as an assertion about the values.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Finding {
    /// The paper's finding in a sentence.
    pub(crate) text: String,
    pub(crate) shape: Shape,
    /// The name of the value that is compared, if it is not that of the figure.
    pub(crate) metric: Option<String>,
    /// The points a.
    #[serde(default)]
    pub(crate) a: Select,
    /// The points b. Each is compared with the point a that has the same values on all axes that do not distinguish a from b.
    #[serde(default)]
    pub(crate) b: Select,
    /// The lowest x for which the assertion is made.
    pub(crate) from: Option<f64>,
    /// The highest x for which the assertion is made.
    pub(crate) to: Option<f64>,
    /// The factor of the assertion.
    #[serde(default = "one")]
    pub(crate) factor: f64,
    /// The limit of the assertion.
    pub(crate) limit: Option<f64>,
    /// The share of the points for which the assertion must hold.
    #[serde(default = "most")]
    pub(crate) share: f64,
    /// The paper's number, which is shown next to the measured one.
    pub(crate) paper: Option<String>,
    /// A possible reason why the finding does not hold on this machine.
    pub(crate) because: Option<String>,
    /// A measurement that checks this reason.
    pub(crate) control: Option<Control>,
    /// Advice if the finding holds, with `{}` for the number.
    pub(crate) hint: Option<String>,
    /// Advice if the finding does not hold.
    pub(crate) hint_not: Option<String>,
}

fn one() -> f64 {
    1.0
}

fn most() -> f64 {
    0.8
}

/// A row of a table that shows for which programs RDMA is suited. The finding of another figure decides each row.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The property of a program.
    pub(crate) parameter: String,
    /// A kind of program with this property.
    pub(crate) example: String,
    /// Whether RDMA is suited according to the paper.
    pub(crate) suits: bool,
    /// The figure whose finding decides the row on this machine, if any; `finding` is the number of that finding.
    pub(crate) figure: Option<String>,
    #[serde(default = "first")]
    pub(crate) finding: usize,
    /// The text of the measurement, with `{}` for the number of the finding.
    #[serde(default)]
    pub(crate) here: String,
}

fn first() -> usize {
    1
}

/// One figure of a paper.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Figure {
    /// The name of the figure in the paper.
    pub(crate) name: String,
    /// What it shows.
    pub(crate) title: String,
    /// The question that the figure answers.
    pub(crate) asks: String,
    /// What the paper says.
    pub(crate) found: String,
    /// Why the figure cannot be measured, if so.
    pub(crate) blank: Option<String>,
    /// The name of the value that the figure shows.
    #[serde(default)]
    pub(crate) metric: String,
    /// The horizontal axis.
    #[serde(default)]
    pub(crate) x: String,
    /// The axes whose values select the line.
    #[serde(default)]
    pub(crate) lines: Vec<String>,
    /// The axes whose values select the chart.
    #[serde(default)]
    pub(crate) charts: Vec<String>,
    /// The points of the experiment that the figure shows.
    #[serde(default)]
    pub(crate) only: Select,
    /// Whether the scale of the values is logarithmic.
    #[serde(default)]
    pub(crate) log: bool,
    #[serde(default)]
    pub(crate) finding: Vec<Finding>,
    /// The rows, if the figure is a table.
    #[serde(default)]
    pub(crate) row: Vec<Row>,
}

/// The contents of a file: one experiment.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    paper: String,
    runner: Runner,
    #[serde(default)]
    fixed: BTreeMap<String, Value>,
    #[serde(default)]
    axis: BTreeMap<String, Axis>,
    #[serde(default)]
    blank: Vec<Blank>,
    figure: Vec<Figure>,
}

/// An experiment.
#[derive(Debug, Clone)]
pub(crate) struct Experiment {
    pub(crate) paper: String,
    pub(crate) runner: Runner,
    fixed: BTreeMap<String, Value>,
    axes: BTreeMap<String, Axis>,
    pub(crate) blanks: Vec<Blank>,
    pub(crate) figures: Vec<Figure>,
}

/// A point of an experiment, which is measured by one program run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) runner: Runner,
    pub(crate) params: Params,
}

impl Point {
    /// Returns the name of the point in the file of samples.
    pub(crate) fn key(&self) -> String {
        let mut key = self.runner.as_str().to_owned();
        for (axis, value) in &self.params {
            key.push_str(&format!(" {axis}={value}"));
        }
        key
    }
}

/// Returns the sort key of a figure: the numbers of its name, then the letters after them. Names without a number are last.
pub(crate) fn order(name: &str) -> (u64, u64, String) {
    let number = |text: &str| {
        let end = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (digits, rest) = text.split_at(end);
        (digits.parse().ok(), rest.to_owned())
    };
    let (Some(first), rest) = number(name) else {
        return (u64::MAX, 0, name.to_owned());
    };
    match rest.strip_prefix('.').map(number) {
        Some((Some(second), rest)) => (first, second, rest),
        _ => (first, 0, rest),
    }
}

/// An axis with the values that the command line gives it: `carrier=tcp,udp`.
#[derive(Debug, Clone)]
pub(crate) struct Varied {
    axis: String,
    values: Vec<Value>,
}

impl std::str::FromStr for Varied {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected AXIS=VALUE,VALUE, as in carrier=tcp,udp".to_owned();
        let (axis, values) = text.split_once('=').ok_or_else(wrong)?;
        let values: Vec<Value> = values.split(',').map(|v| Value(v.to_owned())).collect();
        let distinct: BTreeSet<&Value> = values.iter().collect();
        if axis.is_empty() || values.iter().any(|v| v.0.is_empty()) {
            return Err(wrong());
        }
        if distinct.len() < values.len() {
            return Err(format!("{axis} has a value twice"));
        }
        Ok(Self {
            axis: axis.to_owned(),
            values,
        })
    }
}

/// The axes that every experiment of ping and blast can have.
pub(crate) const VARIABLE: [&str; 20] = [
    "buffers",
    "carrier",
    "crc",
    "device",
    "gro",
    "gso",
    "inline",
    "loss",
    "mode",
    "mtu",
    "network-delay",
    "network-loss",
    "network-rate",
    "offload",
    "posting",
    "qp",
    "rate",
    "segment",
    "signaling",
    "size",
];

/// The axes that take only certain words, and these words. The first list is that of all runners, the second that of ping and
/// blast: an axis with the same name takes other words with other runners.
const WORDS: [(&str, &[&str]); 1] = [("carrier", &["tcp", "udp", "memory", "kernel"])];
const WORDS_OF_PERF: [(&str, &[&str]); 11] = [
    ("crc", BOOLEAN),
    ("gro", BOOLEAN),
    ("gso", BOOLEAN),
    ("inline", BOOLEAN),
    ("mode", &["poll", "event"]),
    ("offload", BOOLEAN),
    (
        "op",
        &[
            "send",
            "send-imm",
            "write",
            "write-imm",
            "write-record",
            "read",
            "write-read",
        ],
    ),
    ("posting", &["single", "list"]),
    ("qp", &["rc", "uc", "ud", "rd"]),
    ("segment", &["path-mtu", "jumbo", "max"]),
    ("signaling", &["full", "periodic"]),
];
const BOOLEAN: &[&str] = &["true", "false"];
/// The values of the numeric axes of ping and blast. The first two are those of their options `--depth` and `--size`.
const BUFFERS: RangeInclusive<u32> = 1..=16383;
const SIZES: RangeInclusive<u32> = 1..=1 << 30;
/// The lengths of packets that the network between two namespaces can have.
pub(super) const MTUS: RangeInclusive<u32> = 576..=9216;

/// Returns why a text is not a number in a range, if it is not.
fn no_number(text: &str, range: RangeInclusive<u32>) -> Option<String> {
    let good = text.parse().is_ok_and(|number| range.contains(&number));
    let (least, most) = range.into_inner();
    (!good).then(|| format!("'{text}' is not a number from {least} to {most}"))
}

/// Replaces the values of axes, in each experiment that can have these axes.
pub(crate) fn vary(experiments: &mut [Experiment], all: &[Varied]) -> Result<(), String> {
    for varied in all {
        let mut taken = false;
        for experiment in experiments.iter_mut() {
            if !experiment.vary(varied) {
                continue;
            }
            taken = true;
            if let Some(why) = experiment
                .unknown_word(varied)
                .or_else(|| experiment.no_quantity(varied))
            {
                return Err(format!("{}={}: {why}", varied.axis, varied.text()));
            }
            if let Some(why) = experiment.fault() {
                return Err(format!("{}={}: {why}", varied.axis, varied.text()));
            }
        }
        if !taken {
            return Err(format!(
                "no chosen figure has the axis {}; figures of ping and blast can have {}, and each figure those of its data file",
                varied.axis,
                VARIABLE.join(", ")
            ));
        }
    }
    Ok(())
}

impl Varied {
    fn text(&self) -> String {
        let all: Vec<&str> = self.values.iter().map(|value| value.0.as_str()).collect();
        all.join(",")
    }
}

/// The abbreviations and titles of the papers.
pub(crate) const PAPERS: [(&str, &str); 5] = [
    (
        "pb",
        "P. MacArthur, R. Russell: A Performance Study to Guide RDMA Programming Decisions (2012)",
    ),
    (
        "hc",
        "P. Frey, G. Alonso: Minimizing the Hidden Cost of RDMA (2009)",
    ),
    (
        "thesis",
        "R. Grant: thesis on RDMA over unreliable datagrams (2012)",
    ),
    (
        "mc",
        "C. Reardon, A. George, C. Cole: Comparative Performance Analysis of RDMA-Enhanced Ethernet (2005)",
    ),
    (
        "exs",
        "R. Russell: A General-Purpose API for iWARP and InfiniBand (2009)",
    ),
];

impl Experiment {
    /// Returns the name of a figure of this experiment, including the paper.
    pub(crate) fn id(&self, figure: &Figure) -> String {
        format!("{}:{}", self.paper, figure.name)
    }

    /// Gives an axis other values. Returns whether this experiment can have the axis.
    fn vary(&mut self, varied: &Varied) -> bool {
        let axis = &varied.axis;
        let known = self.axes.contains_key(axis) || self.fixed.contains_key(axis);
        let general = matches!(self.runner, Runner::Ping | Runner::Blast)
            && VARIABLE.contains(&axis.as_str());
        if !known && !general {
            return false;
        }
        self.fixed.remove(axis);
        self.axes.insert(
            axis.clone(),
            Axis {
                values: varied.values.clone(),
                quick: None,
                smoke: Some(varied.values.clone()),
                set: BTreeMap::new(),
                only: BTreeMap::new(),
            },
        );
        for figure in &mut self.figures {
            figure.only.remove(axis);
            let drawn =
                figure.x == *axis || figure.lines.contains(axis) || figure.charts.contains(axis);
            if !drawn && figure.blank.is_none() && figure.row.is_empty() {
                figure.charts.push(axis.clone());
            }
        }
        true
    }

    /// Returns which value is not one of the words of its axis, if there is one.
    fn unknown_word(&self, varied: &Varied) -> Option<String> {
        let perf = matches!(self.runner, Runner::Ping | Runner::Blast);
        let (_, words) = WORDS
            .iter()
            .chain(WORDS_OF_PERF.iter().filter(|_| perf))
            .find(|(axis, _)| *axis == varied.axis)?;
        let mut values = varied.values.iter();
        let unknown = values.find(|value| !words.contains(&value.0.as_str()))?;
        Some(format!(
            "unknown value '{}'; the values are {}",
            unknown.0,
            words.join(", ")
        ))
    }

    /// Returns why a value is not a number, a rate, a duration or a probability of its axis, if one is not.
    fn no_quantity(&self, varied: &Varied) -> Option<String> {
        if !matches!(self.runner, Runner::Ping | Runner::Blast) {
            return None;
        }
        let mut values = varied.values.iter().map(|value| value.0.as_str());
        let setting = match varied.axis.as_str() {
            "buffers" => return values.find_map(|value| no_number(value, BUFFERS)),
            "size" => return values.find_map(|value| no_number(value, SIZES)),
            "mtu" => {
                let mut values = values.filter(|value| *value != "none");
                return values.find_map(|value| no_number(value, MTUS));
            }
            "loss" | "network-loss" => "loss",
            "network-delay" => "delay",
            "rate" | "network-rate" => "rate",
            _ => return None,
        };
        values
            .filter(|value| *value != "none")
            .find_map(|value| Some(Plan::parse(&format!("{setting}={value}")).err()?.what))
    }

    /// Returns all points, including blank ones.
    pub(crate) fn points(&self, extent: Extent) -> Vec<Point> {
        let mut all: Vec<Params> = vec![
            self.fixed
                .iter()
                .map(|(axis, value)| (axis.clone(), value.0.clone()))
                .collect(),
        ];
        for (name, axis) in &self.axes {
            let values = axis.values(extent);
            all = all
                .into_iter()
                .flat_map(|params| {
                    values.iter().map(move |value| {
                        let mut params = params.clone();
                        params.insert(name.clone(), value.0.clone());
                        for (axis, value) in axis.set.get(&value.0).into_iter().flatten() {
                            params.insert(axis.clone(), value.0.clone());
                        }
                        params
                    })
                })
                .collect();
        }
        let exists = |params: &Params| {
            self.axes.iter().all(|(name, axis)| {
                let value = params.get(name);
                let only = value.and_then(|value| axis.only.get(value));
                only.is_none_or(|only| selects(only, params))
            })
        };
        all.into_iter()
            .filter(exists)
            .map(|params| Point {
                runner: self.runner,
                params,
            })
            .collect()
    }

    /// Returns the values of an axis in the order of the file.
    pub(crate) fn values(&self, axis: &str, extent: Extent) -> Vec<String> {
        match self.axes.get(axis) {
            Some(axis) => axis.values(extent).into_iter().map(|v| v.0).collect(),
            None => self
                .fixed
                .get(axis)
                .map(|v| v.0.clone())
                .into_iter()
                .collect(),
        }
    }

    /// Returns why a point is blank, if it is.
    pub(crate) fn blank(&self, params: &Params) -> Option<&str> {
        self.blanks
            .iter()
            .find(|blank| selects(&blank.points, params))
            .map(|blank| blank.why.as_str())
    }

    /// Returns the points of a figure.
    pub(crate) fn points_of(&self, figure: &Figure, extent: Extent) -> Vec<Point> {
        if figure.blank.is_some() {
            return Vec::new();
        }
        let mut points = self.points(extent);
        points.retain(|point| selects(&figure.only, &point.params));
        points
    }

    /// Returns a description of the first selection that selects nothing, or of the first finding that cannot hold or cannot fail.
    /// This is checked only for the values in the file: with other values ([`vary`]) a finding may have no points.
    fn pointless(&self) -> Option<String> {
        let all = self.points(Extent::Full);
        for figure in self.figures.iter().filter(|f| f.blank.is_none()) {
            let points = self.points_of(figure, Extent::Full);
            let why = unmatched(&figure.only, &all).or_else(|| {
                let mut findings = figure.finding.iter();
                findings.find_map(|finding| pointless(finding, &points))
            });
            if let Some(why) = why {
                return Some(format!("{}: {why}", figure.name));
            }
        }
        None
    }

    /// Returns a description of the first mistake in the file.
    fn fault(&self) -> Option<String> {
        let known = |axis: &String| self.axes.contains_key(axis) || self.fixed.contains_key(axis);
        if !PAPERS.iter().any(|(name, _)| *name == self.paper) {
            return Some(format!("there is no paper {}", self.paper));
        }
        let unnamed = |axis: &Axis| {
            let names = axis
                .set
                .keys()
                .chain(axis.only.keys())
                .find(|name| !axis.values.iter().any(|value| value.0 == **name));
            names.cloned()
        };
        if let Some(name) = self.axes.values().find_map(unnamed) {
            return Some(format!(
                "{name} has settings or a selection, but is no value of its axis"
            ));
        }
        for figure in &self.figures {
            if figure.blank.is_some() {
                continue;
            }
            if self.runner == Runner::None {
                return Some(format!(
                    "{}: a figure without a runner must have a reason in `blank`",
                    figure.name
                ));
            }
            let selects = figure
                .finding
                .iter()
                .flat_map(|finding| [&finding.a, &finding.b])
                .chain([&figure.only]);
            let named = selects
                .flat_map(|select| select.keys())
                .chain(&figure.lines)
                .chain(&figure.charts)
                .chain([&figure.x]);
            if let Some(axis) = named.into_iter().find(|axis| !known(axis)) {
                return Some(format!("{}: there is no axis {axis}", figure.name));
            }
            let drawn = |axis: &&String| {
                **axis == figure.x || figure.lines.contains(axis) || figure.charts.contains(axis)
            };
            let single = |axis: &&String| matches!(figure.only.get(*axis), Some(Values::One(_)));
            if let Some(axis) = self.axes.keys().find(|axis| !drawn(axis) && !single(axis)) {
                return Some(format!(
                    "{}: {axis} is neither drawn nor fixed",
                    figure.name
                ));
            }
            for finding in &figure.finding {
                let limited = matches!(finding.shape, Shape::AtMost | Shape::AtLeast);
                if limited != finding.limit.is_some() {
                    return Some(format!(
                        "{}: at-most and at-least need a limit, and other shapes have none",
                        figure.name
                    ));
                }
            }
        }
        None
    }
}

/// Returns why a finding has the same result whatever is measured, or cannot have a result. `points`: those of its figure.
fn pointless(finding: &Finding, points: &[Point]) -> Option<String> {
    let number = |name: &str, value: f64| format!("the {name} of a finding is {value}");
    if !(finding.factor.is_finite() && finding.factor > 0.0) {
        return Some(number("factor", finding.factor));
    }
    if finding.shape == Shape::Same && finding.factor < 1.0 {
        let factor = number("factor", finding.factor);
        return Some(format!("{factor}, and `same` needs at least 1"));
    }
    if !(finding.share > 0.0 && finding.share <= 1.0) {
        let share = number("share", finding.share);
        return Some(format!("{share}, which is not above 0 and at most 1"));
    }
    if let (Some(from), Some(to)) = (finding.from, finding.to)
        && from > to
    {
        return Some(format!("a finding is about values from {from} to {to}"));
    }
    let only = finding.control.as_ref().map(|control| &control.only);
    if let Some(why) = [&finding.a, &finding.b]
        .into_iter()
        .chain(only)
        .find_map(|select| unmatched(select, points))
    {
        return Some(why);
    }
    if matches!(finding.shape, Shape::Less | Shape::Same | Shape::Crosses) {
        if finding.b.is_empty() {
            return Some("less, same and crosses compare with points b".to_owned());
        }
        let both = |point: &&Point| {
            selects(&finding.a, &point.params) && selects(&finding.b, &point.params)
        };
        if let Some(point) = points.iter().find(both) {
            return Some(format!("a and b both have the point {}", point.key()));
        }
    }
    None
}

/// Returns why a selection selects no point, or which of its values no point has.
fn unmatched(select: &Select, points: &[Point]) -> Option<String> {
    let there = |axis: &String, value: &Value| {
        let mut all = points.iter().map(|point| point.params.get(axis));
        all.any(|has| has == Some(&value.0))
    };
    let missing = select.iter().find_map(|(axis, values)| {
        let mut all = values.all().iter();
        let value = all.find(|value| !there(axis, value))?;
        Some(format!("no point has {axis} = {}", value.0))
    });
    missing.or_else(|| {
        let any = points.iter().any(|point| selects(select, &point.params));
        (!any).then(|| {
            let axes: Vec<&str> = select.keys().map(String::as_str).collect();
            format!(
                "no point has all the values of a selection by {}",
                axes.join(", ")
            )
        })
    })
}

/// Parses the experiment of one file.
pub(crate) fn parse(text: &str) -> Result<Experiment, String> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
    let experiment = Experiment {
        paper: file.paper,
        runner: file.runner,
        fixed: file.fixed,
        axes: file.axis,
        blanks: file.blank,
        figures: file.figure,
    };
    let fault = experiment.fault().or_else(|| experiment.pointless());
    fault.map_or(Ok(experiment), Err)
}

/// Reads all experiments of a folder. They are ordered by paper, and those of one paper by the names of their files.
pub(crate) fn read(folder: &Path) -> Result<Vec<Experiment>, String> {
    let entries = fs::read_dir(folder).map_err(|e| {
        format!(
            "{}: {e}: reinstall anywarp, with share/anywarp/studies",
            folder.display()
        )
    })?;
    let mut paths: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|kind| kind == "toml"))
        .collect();
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        all.push(parse(&text).map_err(|e| format!("{}: {e}", path.display()))?);
    }
    let place = |e: &Experiment| PAPERS.iter().position(|(name, _)| *name == e.paper);
    all.sort_by_key(place);
    let mut names = BTreeSet::new();
    for experiment in &all {
        for figure in &experiment.figures {
            let id = experiment.id(figure);
            if !names.insert(id.clone()) {
                return Err(format!("{}: {id} is defined twice", folder.display()));
            }
        }
    }
    for row in all
        .iter()
        .flat_map(|e| &e.figures)
        .flat_map(|figure| &figure.row)
    {
        let Some(figure) = &row.figure else { continue };
        let mut figures = all
            .iter()
            .flat_map(|e| e.figures.iter().map(move |f| (e.id(f), f)));
        let there = figures.any(|(id, f)| {
            id == *figure
                && row
                    .finding
                    .checked_sub(1)
                    .is_some_and(|n| n < f.finding.len())
        });
        if !there {
            return Err(format!(
                "{}: {figure} has no finding {}, which a table names",
                folder.display(),
                row.finding
            ));
        }
    }
    Ok(all)
}

/// Returns the experiments with the selected figures: `pb:3a`, `pb:3`, `pb`, `all`.
pub(crate) fn choose(all: &[Experiment], names: &[String]) -> Result<Vec<Experiment>, String> {
    let matches = |name: &str, id: &str| {
        let Some(rest) = id.strip_prefix(name) else {
            return name == "all";
        };
        // The parts of figure 3 are 3a, 3b and so on, or 3.1, 3.2 and so on.
        rest.is_empty()
            || rest.starts_with(':') && !name.contains(':')
            || name.contains(':')
                && name.ends_with(|c: char| c.is_ascii_digit())
                && (rest.starts_with('.') || rest.chars().all(|c| c.is_ascii_lowercase()))
    };
    for name in names {
        let mut ids = all
            .iter()
            .flat_map(|e| e.figures.iter().map(|figure| e.id(figure)));
        if !ids.any(|id| matches(name, &id)) {
            return Err(format!(
                "there is no figure {name}; `anywarp study list` lists the figures"
            ));
        }
    }
    let mut chosen = Vec::new();
    for experiment in all {
        let mut one = experiment.clone();
        one.figures.retain(|figure| {
            names
                .iter()
                .any(|name| matches(name, &experiment.id(figure)))
        });
        if !one.figures.is_empty() {
            chosen.push(one);
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        paper = "pb"
        runner = "blast"
        [fixed]
        qp = "rc"
        [axis.size]
        values = [1, 2, 4, 8]
        quick = [1, 4, 8]
        [axis.inline]
        values = [true, false]
        [axis.op]
        values = ["write", "read"]
        [[blank]]
        points = { op = "read", inline = true }
        why = "nothing is sent"
        [[figure]]
        name = "3a"
        title = "t"
        asks = "a"
        found = "f"
        metric = "oneway_us"
        x = "size"
        lines = ["inline"]
        only = { op = "write" }
        [[figure.finding]]
        text = "t"
        shape = "less"
        a = { inline = true }
        b = { inline = false }
        to = 4
        [[figure]]
        name = "31"
        title = "t"
        asks = "a"
        found = "f"
        blank = "no"
    "#;

    #[test]
    fn an_experiment_has_the_points_of_its_axes() {
        let experiment = parse(FILE).unwrap();
        assert_eq!(experiment.points(Extent::Full).len(), 16);
        assert_eq!(experiment.points(Extent::Quick).len(), 12);
        assert_eq!(experiment.points(Extent::Smoke).len(), 8);
        let of = experiment.points_of(&experiment.figures[0], Extent::Quick);
        assert_eq!(of.len(), 6);
        assert_eq!(of[0].key(), "blast inline=true op=write qp=rc size=1");
        let blank = |point: &&Point| experiment.blank(&point.params).is_some();
        let all = experiment.points(Extent::Full);
        assert_eq!(all.iter().filter(blank).count(), 4);
        assert_eq!(experiment.figures[0].finding[0].to, Some(4.0));
    }

    #[test]
    fn a_value_can_stand_for_several_settings() {
        let place = "[axis.place]\nvalues = ['network', 'loopback']\n[axis.place.set.network]\nmtu = 1500\nqp = 'uc'\n[axis.size]";
        let file = FILE.replace("[axis.size]", place);
        let file = file.replace("lines = [\"inline\"]", "lines = [\"inline\", \"place\"]");
        let experiment = parse(&file).unwrap();
        let of = experiment.points_of(&experiment.figures[0], Extent::Quick);
        let keys: Vec<String> = of.iter().map(Point::key).collect();
        assert_eq!(of.len(), 12);
        assert!(keys.contains(
            &"blast inline=true mtu=1500 op=write place=network qp=uc size=1".to_owned()
        ));
        assert!(
            keys.contains(&"blast inline=true op=write place=loopback qp=rc size=1".to_owned())
        );
        let few = file.replace(
            "[axis.size]",
            "[axis.place.only.loopback]\nsize = [1, 8]\n[axis.size]",
        );
        let few = parse(&few).unwrap();
        // Two places, of which one has two of the three sizes.
        assert_eq!(
            few.points_of(&few.figures[0], Extent::Quick).len(),
            2 * (3 + 2)
        );
        let error = parse(&file.replace("set.network", "set.net")).unwrap_err();
        assert!(error.contains("net has settings"), "{error}");
    }

    #[test]
    fn a_name_selects_a_figure_all_its_parts_a_paper_or_all_papers() {
        let all = [parse(FILE).unwrap()];
        let count = |name: &str| {
            let chosen = choose(&all, &[name.to_owned()]).unwrap_or_default();
            chosen.iter().map(|e| e.figures.len()).sum::<usize>()
        };
        assert_eq!(count("pb:3a"), 1);
        assert_eq!(count("pb:3"), 1);
        assert_eq!(count("pb:31"), 1);
        assert_eq!(count("pb"), 2);
        assert_eq!(count("all"), 2);
        for bad in ["pb:4", "p", "", "pb:", "pb:3b", "PB:3a", "all:1"] {
            assert_eq!(count(bad), 0, "{bad}");
        }
    }

    #[test]
    fn the_command_line_gives_an_axis_other_values() {
        let varied = |text: &str| text.parse::<Varied>();
        let mut all = [parse(FILE).unwrap()];
        vary(
            &mut all,
            &[varied("op=read").unwrap(), varied("mtu=1500,9000").unwrap()],
        )
        .unwrap();
        let experiment = &all[0];
        let figure = &experiment.figures[0];
        assert_eq!(figure.charts, ["op", "mtu"]);
        let points = experiment.points_of(figure, Extent::Quick);
        assert_eq!(points.len(), 12);
        assert_eq!(experiment.values("mtu", Extent::Smoke), ["1500", "9000"]);
        assert_eq!(
            points[0].key(),
            "blast inline=true mtu=1500 op=read qp=rc size=1"
        );
        let error = vary(&mut all, &[varied("colour=red").unwrap()]).unwrap_err();
        assert!(
            error.contains("no chosen figure has the axis colour"),
            "{error}"
        );
        for (text, why) in [
            (
                "carrier=tcp,xyz",
                "carrier=tcp,xyz: unknown value 'xyz'; the values are tcp, udp, memory, kernel",
            ),
            (
                "gso=no",
                "gso=no: unknown value 'no'; the values are true, false",
            ),
            (
                "segment=path",
                "segment=path: unknown value 'path'; the values are path-mtu, jumbo, max",
            ),
            (
                "mtu=none,abc",
                "mtu=none,abc: 'abc' is not a number from 576 to 9216",
            ),
            (
                "buffers=0",
                "buffers=0: '0' is not a number from 1 to 16383",
            ),
            (
                "size=64,1K",
                "size=64,1K: '1K' is not a number from 1 to 1073741824",
            ),
            (
                "network-loss=none,2",
                "network-loss=none,2: '2' is not a probability: give 0 to 1, or 0% to 100%",
            ),
            (
                "network-delay=1",
                "network-delay=1: '1' is not a duration: give a number with one of the units us, ms, s",
            ),
        ] {
            assert_eq!(vary(&mut all, &[varied(text).unwrap()]).unwrap_err(), why);
        }
        vary(&mut all, &[varied("carrier=tcp,kernel").unwrap()]).unwrap();
        let mut other = [parse(&FILE.replace("runner = \"blast\"", "runner = \"mpi\"")).unwrap()];
        assert!(vary(&mut other, &[varied("mtu=1500").unwrap()]).is_err());
        vary(&mut other, &[varied("size=7").unwrap()]).unwrap();
        assert_eq!(other[0].points(Extent::Full).len(), 4);
        for bad in ["", "mtu", "mtu=", "=1", "mtu=1,1", "mtu=1,,2"] {
            assert!(varied(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn figures_are_ordered_by_their_numbers() {
        let mut names = ["T1", "10", "3b", "6.10", "3a", "6.4", "ttfb", "5"];
        names.sort_by_key(|name| order(name));
        assert_eq!(names, ["3a", "3b", "5", "6.4", "6.10", "10", "T1", "ttfb"]);
    }

    #[test]
    fn a_file_that_is_not_understood_is_an_error() {
        for (from, to, why) in [
            ("lines = [\"inline\"]", "lines = [\"colour\"]", "colour"),
            ("lines = [\"inline\"]", "", "neither drawn"),
            ("paper = \"pb\"", "paper = \"x\"", "no paper x"),
            ("shape = \"less\"", "shape = \"more\"", "more"),
            ("to = 4", "limit = 4", "limit"),
            ("to = 4", "until = 4", "until"),
        ] {
            let error = parse(&FILE.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn a_finding_that_cannot_fail_or_cannot_hold_is_an_error() {
        for (from, to, why) in [
            ("b = { inline = false }", "", "compare with points b"),
            ("a = { inline = true }", "", "both have the point"),
            (
                "b = { inline = false }",
                "b = { size = 4 }",
                "both have the point",
            ),
            (
                "shape = \"less\"",
                "shape = \"same\"\nfactor = 0.9",
                "factor",
            ),
            ("to = 4", "factor = 0", "factor"),
            ("to = 4", "share = 0", "share"),
            ("to = 4", "share = 1.1", "share"),
            ("to = 4", "from = 4\nto = 2", "from 4 to 2"),
            (
                "b = { inline = false }",
                "b = { inline = \"no\" }",
                "no point has inline = no",
            ),
            (
                "b = { inline = false }",
                "b = { inline = false, size = [8, 16] }",
                "no point has size = 16",
            ),
            // The figure shows only Writes.
            (
                "b = { inline = false }",
                "b = { inline = false, op = \"read\" }",
                "no point has op = read",
            ),
            (
                "only = { op = \"write\" }",
                "only = { op = \"send\" }",
                "no point has op = send",
            ),
            (
                "to = 4",
                "control = { only = { size = 3 }, text = \"\" }",
                "no point has size = 3",
            ),
        ] {
            assert!(FILE.contains(from), "{from}");
            let error = parse(&FILE.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(why), "{why}: {error}");
        }
        // With another value of the axis the finding has no points, but the figure can be measured.
        let mut all = [parse(FILE).unwrap()];
        vary(&mut all, &["inline=true".parse().unwrap()]).unwrap();
        assert_eq!(all[0].points(Extent::Full).len(), 8);
    }

    #[test]
    fn the_files_of_the_tree_are_parsed() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../studies"));
        let all = read(folder).unwrap();
        let figures: usize = all.iter().map(|e| e.figures.len()).sum();
        assert!(figures >= 25, "{figures}");
    }
}
