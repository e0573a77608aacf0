//! The results (values, medians, ratios) as a table and as JSON, from which they can be read again.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{env, fs, io};

use serde::{Deserialize, Serialize};

use super::rows::{Bound, By, RAW, RAW_RENO, Row};
use super::run::{Sample, Stage};

/// The number of failures after which a party (a program or setting that is compared with others
/// in a row) is not measured again.
const TRIES: usize = 2;

/// A value is marked if other programs had the processor for more than this share of the time.
const DISTURBED: f64 = 0.05;

/// All rows of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) tool: String,
    pub(crate) version: String,
    /// True until all rows are measured.
    pub(crate) partial: bool,
    pub(crate) conditions: Conditions,
    pub(crate) rows: Vec<Seen>,
    /// The row that is being measured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) now: Option<Seen>,
}

/// The machine and the settings.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conditions {
    pub(crate) cpu: String,
    pub(crate) processors: usize,
    pub(crate) kernel: String,
    pub(crate) load: String,
    pub(crate) pinned: String,
    pub(crate) short: bool,
    pub(crate) repeat: u64,
    pub(crate) host_congestion_control: String,
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) seconds_since_1970: u64,
}

/// The results of one row.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) what: String,
    pub(crate) unit: String,
    /// True if lower values are better.
    pub(crate) costs: bool,
    pub(crate) parties: Vec<Values>,
    pub(crate) bounds: Vec<Held>,
}

/// The results of one party.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Values {
    pub(crate) name: String,
    pub(crate) command: String,
    /// False if the party is not installed on this machine.
    pub(crate) there: bool,
    pub(crate) values: Vec<f64>,
    pub(crate) median: Option<f64>,
    pub(crate) least: Option<f64>,
    pub(crate) most: Option<f64>,
    /// For each repetition, the share of the time that other programs had the processor.
    pub(crate) waited: Vec<f64>,
    /// For each repetition, the other numbers that the program printed.
    pub(crate) numbers: Vec<std::collections::BTreeMap<String, f64>>,
    pub(crate) congestion: Option<String>,
    pub(crate) failures: Vec<String>,
}

/// A bound and the measured value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) of: String,
    pub(crate) by: String,
    /// What the bound limits: the "ratio" of the value to that of `by`, how far the value is "beyond" that of `by`, or the value
    /// "itself".
    pub(crate) kind: String,
    pub(crate) limit: f64,
    pub(crate) aim: Option<f64>,
    pub(crate) value: Option<f64>,
    pub(crate) met: Option<bool>,
    pub(crate) aim_met: Option<bool>,
}

/// Returns the median: the middle value, or the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = sorted.get(sorted.len() / 2)?;
    let lower = sorted.get((sorted.len() - 1) / 2)?;
    Some(f64::midpoint(*lower, *upper))
}

/// Formats a number with about three significant digits.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

impl Report {
    pub(crate) fn new(cpus: &str, short: bool, repeat: u64) -> Self {
        let read = |path: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.trim().to_owned()
        };
        let cpu = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| {
                let rest = line.strip_prefix("model name")?;
                Some(rest.trim_start_matches([' ', '\t', ':']).to_owned())
            })
            .unwrap_or_else(|| env::consts::ARCH.to_owned());
        Self {
            tool: "anywarp bench".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            partial: true,
            conditions: Conditions {
                cpu,
                processors: crate::sys::processors(),
                kernel: read("/proc/sys/kernel/osrelease"),
                load: read("/proc/loadavg"),
                pinned: cpus.to_owned(),
                short,
                repeat,
                host_congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control"),
                variables: env::vars()
                    .filter(|(name, _)| name.starts_with("ANYWARP_") && name != "ANYWARP_LIB")
                    .collect(),
                seconds_since_1970: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default()
                    .as_secs(),
            },
            rows: Vec::new(),
            now: None,
        }
    }

    /// Parses a file that [`Self::save`] wrote.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|e| format!("not a file of `anywarp bench --json`: {e}"))
    }

    /// Replaces the file atomically, so that it is always complete.
    pub(crate) fn save(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        if !path.exists() || path.is_file() {
            let mut new = path.as_os_str().to_owned();
            new.push(".new");
            fs::write(&new, text + "\n")?;
            fs::rename(&new, path)
        } else {
            // A file that cannot be replaced, such as /dev/stdout, is written once, at the end.
            if self.partial {
                return Ok(());
            }
            fs::write(path, text + "\n")
        }
    }

    /// Returns the lines above the tables.
    pub(crate) fn head(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} processors, Linux {}, load {}; server and client on processors {}; {} repetitions{}\n\
             TCP congestion control of this host: {}; variables: ",
            c.cpu,
            c.processors,
            c.kernel,
            c.load.split(' ').next().unwrap_or_default(),
            c.pinned,
            c.repeat,
            if c.short { ", short ones" } else { "" },
            c.host_congestion_control,
        );
        let variables: Vec<String> = c
            .variables
            .iter()
            .map(|(n, v)| format!("{n}={v}"))
            .collect();
        text.push_str(&if variables.is_empty() {
            "none".to_owned()
        } else {
            variables.join(" ")
        });
        text.push_str(
            "\nmedian, least..most; ~ marks a value if other programs used the client's processor for more than 5 % of the time\n",
        );
        text
    }

    /// Returns the number of parties that failed.
    pub(crate) fn failures(&self) -> usize {
        let parties = self.rows.iter().flat_map(|row| &row.parties);
        parties.filter(|p| p.there && p.values.is_empty()).count()
    }

    /// Returns the number of bounds that are not met.
    pub(crate) fn missed(&self) -> usize {
        let bounds = self.rows.iter().flat_map(|row| &row.bounds);
        bounds.filter(|bound| bound.met == Some(false)).count()
    }

    /// Returns the lines below the tables.
    pub(crate) fn summary(&self, took: Duration) -> String {
        let mut text = String::new();
        let bounds: Vec<(&Seen, &Held)> = self
            .rows
            .iter()
            .flat_map(|row| row.bounds.iter().map(move |bound| (row, bound)))
            .filter(|(_, bound)| bound.met.is_some())
            .collect();
        let met = bounds
            .iter()
            .filter(|(_, bound)| bound.met == Some(true))
            .count();
        let aims = bounds
            .iter()
            .filter(|(_, bound)| bound.aim_met == Some(true))
            .count();
        let _ = writeln!(
            text,
            "{met} of {} bounds met, {aims} of {} aims met; {} s",
            bounds.len(),
            bounds
                .iter()
                .filter(|(_, bound)| bound.aim.is_some())
                .count(),
            took.as_secs(),
        );
        for (row, bound) in bounds.iter().filter(|(_, bound)| bound.met == Some(false)) {
            let _ = writeln!(
                text,
                "not met: {:<14} {}: {}",
                row.name,
                bound.of,
                bound.text(row)
            );
        }
        for row in &self.rows {
            for party in row
                .parties
                .iter()
                .filter(|p| p.there && p.values.is_empty())
            {
                if let Some(why) = party.failures.last() {
                    let _ = writeln!(text, "failed:  {:<14} {}: {why}", row.name, party.name);
                }
            }
        }
        if self.partial {
            text.push_str("interrupted: not all rows were measured\n");
        }
        text.trim_end().to_owned()
    }
}

impl Seen {
    pub(crate) fn new(row: &Row, stage: &Stage) -> Self {
        Self {
            name: row.name.to_owned(),
            what: row.what.to_owned(),
            unit: row.unit.as_str().to_owned(),
            costs: row.unit.costs(),
            parties: row
                .parties
                .iter()
                .map(|party| Values {
                    name: party.name.clone(),
                    command: stage.command_line(party),
                    there: stage.has(&party.how),
                    values: Vec::new(),
                    median: None,
                    least: None,
                    most: None,
                    waited: Vec::new(),
                    numbers: Vec::new(),
                    congestion: None,
                    failures: Vec::new(),
                })
                .collect(),
            bounds: row.bounds.iter().map(Held::new).collect(),
        }
    }

    /// Returns whether this party is measured again.
    pub(crate) fn goes_on(&self, at: usize) -> bool {
        self.parties
            .get(at)
            .is_some_and(|party| party.there && party.failures.len() < TRIES)
    }

    pub(crate) fn add(&mut self, at: usize, sample: Sample) {
        if let Some(party) = self.parties.get_mut(at) {
            party.values.push(sample.value);
            party.median = median(&party.values);
            party.least = party.values.iter().copied().reduce(f64::min);
            party.most = party.values.iter().copied().reduce(f64::max);
            party.waited.extend(sample.waited);
            party.numbers.push(sample.numbers);
            party.congestion = sample.congestion.or_else(|| party.congestion.take());
        }
        self.judge();
    }

    pub(crate) fn fail(&mut self, at: usize, why: String) {
        if let Some(party) = self.parties.get_mut(at) {
            party.failures.push(why);
        }
    }

    fn median_of(&self, name: &str) -> Option<f64> {
        self.parties.iter().find(|p| p.name == name)?.median
    }

    /// Returns the median of the party `by`, the reference of a bound. Raw TCP may be measured twice,
    /// with the host's congestion control and with reno: the reference is then the better median.
    fn reference(&self, by: &str) -> Option<f64> {
        let median = self.median_of(by);
        if by != RAW {
            return median;
        }
        let better = if self.costs { f64::min } else { f64::max };
        let both = [median, self.median_of(RAW_RENO)];
        both.into_iter().flatten().reduce(better)
    }

    fn judge(&mut self) {
        let mut bounds = std::mem::take(&mut self.bounds);
        for bound in &mut bounds {
            let value = self.median_of(&bound.of);
            bound.value = match bound.kind.as_str() {
                "itself" => value,
                "beyond" => value.zip(self.reference(&bound.by)).map(|(a, b)| a - b),
                _ => value
                    .zip(self.reference(&bound.by).filter(|by| *by > 0.0))
                    .map(|(a, b)| a / b),
            };
            let good = |value: f64, limit: f64| {
                if self.costs {
                    value <= limit
                } else {
                    value >= limit
                }
            };
            bound.met = bound.value.map(|value| good(value, bound.limit));
            bound.aim_met = bound
                .value
                .zip(bound.aim)
                .map(|(value, aim)| good(value, aim));
        }
        self.bounds = bounds;
    }

    /// Returns the lines of the row's table.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{}: {}", self.name, self.what);
        if !self.unit.is_empty() {
            let _ = write!(text, " ({})", self.unit);
        }
        text.push('\n');
        for party in &self.parties {
            let _ = write!(text, "  {:<22}", party.name);
            match (party.median, party.least, party.most) {
                (Some(median), Some(least), Some(most)) => {
                    let waited = super::report::median(&party.waited).unwrap_or_default();
                    let spread = format!("{}..{}", digits(least), digits(most));
                    let _ = write!(
                        text,
                        "{:>8}{} {spread:<14}",
                        digits(median),
                        if waited > DISTURBED { "~" } else { " " },
                    );
                    if let Some(congestion) = &party.congestion {
                        let _ = write!(text, " {congestion}");
                    }
                }
                _ if !party.there => text.push_str("       – not installed"),
                _ => {
                    let why = party.failures.last().map_or("not measured", String::as_str);
                    let _ = write!(text, "       – {why}");
                }
            }
            let mut bounds = self
                .bounds
                .iter()
                .filter(|bound| bound.of == party.name)
                .peekable();
            if party.median.is_some() && bounds.peek().is_some() {
                let texts: Vec<String> = bounds.map(|bound| bound.text(self)).collect();
                let _ = write!(text, " {}", texts.join("; "));
            }
            text.push('\n');
        }
        text
    }
}

impl Held {
    fn new(bound: &Bound) -> Self {
        let (kind, by) = match bound.by {
            By::Ratio(by) => ("ratio", by),
            By::Beyond(by) => ("beyond", by),
            By::Itself => ("itself", ""),
        };
        Self {
            of: bound.of.to_owned(),
            by: by.to_owned(),
            kind: kind.to_owned(),
            limit: bound.limit,
            aim: bound.aim,
            value: None,
            met: None,
            aim_met: None,
        }
    }

    /// Returns the value, what it is compared with, whether the bound is met, the limit and the aim.
    pub(crate) fn text(&self, row: &Seen) -> String {
        let Some(value) = self.value else {
            return String::new();
        };
        let mut text = match self.kind.as_str() {
            "itself" => digits(value),
            "beyond" => format!("{} more than {}", digits(value), self.by),
            _ if self.by == RAW && row.median_of(RAW_RENO).is_some() => {
                format!("{} × the better raw TCP", digits(value))
            }
            _ => format!("{} × {}", digits(value), self.by),
        };
        let sign = if row.costs { "≤" } else { "≥" };
        let _ = write!(
            text,
            " [{} {sign} {}",
            if self.met == Some(true) { "ok" } else { "NOT" },
            digits(self.limit)
        );
        if let Some(aim) = self.aim {
            let _ = write!(
                text,
                ", aim {}{}",
                digits(aim),
                if self.aim_met == Some(true) {
                    " ok"
                } else {
                    ""
                }
            );
        }
        text.push(']');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;
    use std::collections::BTreeMap;

    fn seen(name: &str) -> Seen {
        let row = rows::all(65536)
            .into_iter()
            .find(|row| row.name == name)
            .unwrap();
        Seen {
            name: row.name.to_owned(),
            what: row.what.to_owned(),
            unit: row.unit.as_str().to_owned(),
            costs: row.unit.costs(),
            parties: row
                .parties
                .iter()
                .map(|party| Values {
                    name: party.name.clone(),
                    command: String::new(),
                    there: true,
                    values: Vec::new(),
                    median: None,
                    least: None,
                    most: None,
                    waited: Vec::new(),
                    numbers: Vec::new(),
                    congestion: None,
                    failures: Vec::new(),
                })
                .collect(),
            bounds: row.bounds.iter().map(Held::new).collect(),
        }
    }

    fn value(value: f64) -> Sample {
        Sample {
            value,
            waited: None,
            numbers: BTreeMap::new(),
            congestion: None,
        }
    }

    #[test]
    fn targets_compare_medians() {
        let mut seen = seen("event-64");
        for v in [10.0, 11.0, 9.0] {
            seen.add(0, value(v));
        }
        for v in [13.0, 40.0, 1.0] {
            seen.add(1, value(v));
        }
        let bound = &seen.bounds[0];
        assert_eq!(
            (bound.value, bound.met, bound.aim_met),
            (Some(1.3), Some(true), Some(false))
        );
        for _ in 0..2 {
            seen.add(1, value(13.1));
        }
        assert_eq!(seen.bounds[0].met, Some(false));
    }

    #[test]
    fn targets_compare_with_the_better_raw_value() {
        let mut seen = seen("bw-1m");
        let at = |name: &str| position(&seen, name);
        let (raw, reno, write) = (at(RAW), at(RAW_RENO), at("Write"));
        seen.add(raw, value(4.0));
        seen.add(write, value(4.0));
        assert_eq!(seen.bounds[0].value, Some(1.0));
        seen.add(reno, value(8.0));
        assert_eq!(seen.bounds[0].value, Some(0.5));
        assert!(seen.table().contains("0.50 × the better raw TCP"));
    }

    fn position(seen: &Seen, name: &str) -> usize {
        let position = seen.parties.iter().position(|party| party.name == name);
        position.unwrap()
    }

    #[test]
    fn written_results_are_parsed_again() {
        let mut report = Report::new("0,1", true, 3);
        let mut row = seen("rate-64");
        row.add(position(&row, RAW), value(0.3));
        row.add(position(&row, "Send"), value(3.0));
        report.rows.push(row);
        let text = serde_json::to_string(&report).unwrap();
        assert!(text.contains("\"partial\":true"));
        let again = Report::parse(&text).unwrap();
        assert_eq!(again.rows[0].bounds[0].value.map(f64::round), Some(10.0));
        assert_eq!(again.rows[0].bounds[0].met, Some(true));
        assert!(Report::parse("{}").is_err());
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0]), Some(2.0));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    }
}
