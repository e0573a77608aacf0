//! The samples on disk, one line for each, so that an interrupted run can be continued.
//!
//! A *sample* is the result of one measurement of a *point*, which is a combination of the values of an experiment's axes. The
//! *extent* of a run says how many points are measured and how long: everything, `--quick` or `--smoke`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::iter;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::figures::{Extent, Point};
use crate::perf::report::{quantile, sorted};

/// The file of samples, in the folder of the report.
const SAMPLES: &str = "samples.jsonl";

/// The values of one sample, by name.
pub(crate) type Sample = BTreeMap<String, f64>;

/// Why there is no sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The measurement failed.
    Failed(String),
    /// The point is blank: it cannot be measured here.
    Blank(String),
}

impl From<String> for Miss {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// The outcome of one attempt.
pub(crate) type Outcome = Result<Sample, Miss>;

/// The values whose spread decides whether a point is noisy. Only the first of them that the samples contain is used.
const JUDGED: [&str; 8] = [
    "oneway_us",
    "us",
    "seconds",
    "median_us",
    "favoured_mbps",
    "mbps",
    "mb",
    "share",
];

/// The spread of the value of [`JUDGED`], as a share of its median, above which a point is noisy.
const SPREAD: f64 = 0.25;

/// The share of the time that an end waited for a processor, above which a point is noisy.
const WAITED: f64 = 0.10;

/// The version of anywarp that measures.
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    extent: String,
    device: String,
    /// The version of anywarp that measured. Older files do not say which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// Whether the measured programs had priority (`--first`). Older files do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first: Option<bool>,
    point: String,
    took_s: f64,
    /// When the measurement ended, in seconds since 1970.
    #[serde(default)]
    at: f64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    values: Sample,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    command: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blank: Option<String>,
}

/// What all samples of a report have in common. The others in the file are not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conditions {
    pub(crate) extent: Extent,
    pub(crate) device: String,
    version: String,
    first: bool,
}

impl Conditions {
    /// Returns the conditions of a measurement by this program. `first`: whether the measured programs have priority.
    pub(crate) fn new(extent: Extent, device: String, first: bool) -> Self {
        Self {
            extent,
            device,
            version: VERSION.to_owned(),
            first,
        }
    }

    /// Returns why a sample of the same extent and device is not used, if so.
    fn difference(&self, line: &Line) -> Option<String> {
        if let Some(version) = line.version.as_ref().filter(|v| **v != self.version) {
            return Some(format!("of anywarp {version} instead of {}", self.version));
        }
        let first = line.first.filter(|first| *first != self.first)?;
        Some(
            if first {
                "with --first"
            } else {
                "without --first"
            }
            .to_owned(),
        )
    }
}

/// The stored samples of one point.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) samples: Vec<Sample>,
    /// When each of them was measured, in seconds.
    pub(crate) times: Vec<f64>,
    /// The command as a user would type it.
    pub(crate) command: Option<String>,
    /// Why the attempts of this run failed.
    pub(crate) failures: Vec<String>,
    /// Why the point is blank, according to this run.
    pub(crate) blank: Option<String>,
    /// Whether the point was blank in an earlier run.
    pub(crate) was_blank: bool,
}

/// A median with quartiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Middle {
    pub(crate) median: f64,
    pub(crate) lower: f64,
    pub(crate) upper: f64,
    /// The estimated standard deviation of one sample, as a share of the median.
    pub(crate) deviation: f64,
    /// The number of samples.
    pub(crate) count: usize,
    /// The share of the time that an end waited for a processor, if it exceeds [`WAITED`], and otherwise 0. With so much waiting, all
    /// samples may have the same error.
    pub(crate) waited: f64,
}

/// The ratio of the standard deviation to the median distance from the median, for a normal distribution.
const TO_STANDARD: f64 = 1.4826;

/// Factors for [`TO_STANDARD`] with 2, 3, 4 … samples. With so few samples the median distance is too small on average.
const FOR_FEW: [f64; 8] = [1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107];

/// Estimates the standard deviation, as a share of the median, from the median distance of the values to their median. Outliers have no
/// influence on the median and on the median distance.
pub(super) fn deviation(all: &[f64], median: f64) -> f64 {
    let Some(at) = all.len().checked_sub(2).filter(|_| median != 0.0) else {
        return 0.0;
    };
    let distances = sorted(all.iter().map(|value| (value - median).abs()));
    let factor = FOR_FEW.get(at).copied().unwrap_or(1.0);
    TO_STANDARD * factor * middle(&distances).unwrap_or(0.0) / median.abs()
}

/// Returns the median of sorted values: of an even number of values the mean of the two in the middle.
pub(super) fn middle(sorted: &[f64]) -> Option<f64> {
    let below = sorted.get(sorted.len().checked_sub(1)? / 2)?;
    Some(f64::midpoint(*below, *sorted.get(sorted.len() / 2)?))
}

impl Known {
    /// Returns the median and the quartiles of a value over the samples.
    pub(crate) fn middle(&self, metric: &str) -> Option<Middle> {
        let all = sorted(self.samples.iter().filter_map(|s| s.get(metric).copied()));
        let (below, above) = (
            all.get(all.len().checked_sub(1)? / 2)?,
            all.get(all.len() / 2)?,
        );
        let median = f64::midpoint(*below, *above);
        Some(Middle {
            median,
            lower: quantile(&all, 0.25)?,
            upper: quantile(&all, 0.75)?,
            deviation: deviation(&all, median),
            count: all.len(),
            waited: self.waited().unwrap_or(0.0),
        })
    }

    /// Returns when a value was measured, and the value, for each sample that has it.
    pub(crate) fn timed(&self, metric: &str) -> Vec<(f64, f64)> {
        let times = self.times.iter().copied().chain(iter::repeat(0.0));
        let all = times.zip(&self.samples);
        all.filter_map(|(at, sample)| Some((at, *sample.get(metric)?)))
            .collect()
    }

    /// Returns the share of the time that an end waited for a processor, if it exceeds [`WAITED`].
    fn waited(&self) -> Option<f64> {
        let all = sorted(self.samples.iter().filter_map(|s| s.get("waited").copied()));
        middle(&all).filter(|waited| *waited > WAITED)
    }

    /// Returns why the point is noisy, if it is.
    pub(crate) fn noise(&self) -> Option<String> {
        let middle = JUDGED.iter().find_map(|name| self.middle(name))?;
        let spread = (middle.upper - middle.lower) / middle.median;
        if spread > SPREAD {
            return Some(format!("spread {:.0} %", spread * 100.0));
        }
        self.waited()
            .map(|waited| format!("waited for a processor {:.0} %", waited * 100.0))
    }
}

/// All stored samples.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    conditions: Conditions,
    file: Option<File>,
    known: BTreeMap<String, Known>,
    /// The number of stored samples that are not used, by reason.
    unused: BTreeMap<String, usize>,
    /// The total duration in seconds and the number of samples, by runner.
    took: BTreeMap<String, (f64, usize)>,
}

impl Store {
    /// Reads the samples with these conditions in `folder`, and opens the file for writing.
    pub(crate) fn open(folder: &Path, conditions: Conditions, fresh: bool) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join(SAMPLES);
        if fresh && path.exists() {
            fs::remove_file(&path)?;
        }
        let mut store = Self::read(folder, conditions)?;
        let mut file = OpenOptions::new().append(true).create(true).open(&path)?;
        // A killed run may have left an incomplete line.
        let text = fs::read(&path)?;
        if text.last().is_some_and(|last| *last != b'\n') {
            file.write_all(b"\n")?;
        }
        store.file = Some(file);
        Ok(store)
    }

    /// Like [`Self::open`], for reading only.
    pub(crate) fn read(folder: &Path, conditions: Conditions) -> io::Result<Self> {
        let mut store = Self {
            folder: folder.to_owned(),
            conditions,
            file: None,
            known: BTreeMap::new(),
            unused: BTreeMap::new(),
            took: BTreeMap::new(),
        };
        let text = match text_of(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            text => text?,
        };
        for line in text.lines() {
            let Ok(line) = serde_json::from_str::<Line>(line) else {
                continue;
            };
            if line.extent != store.conditions.extent.as_str()
                || line.device != store.conditions.device
                || line.failed.is_some()
            {
                continue;
            }
            match store.conditions.difference(&line) {
                None if line.blank.is_some() => {
                    store.known.entry(line.point).or_default().was_blank = true;
                }
                None => store.keep(line),
                Some(_) if line.blank.is_some() => {}
                Some(why) => *store.unused.entry(why).or_default() += 1,
            }
        }
        Ok(store)
    }

    /// Returns the conditions of the last measurement in `folder`, even if it failed.
    pub(crate) fn last(folder: &Path) -> Option<Conditions> {
        let text = text_of(folder).ok()?;
        let mut lines = text.lines().rev();
        let line: Line = lines.find_map(|line| serde_json::from_str(line).ok())?;
        let extent = [Extent::Full, Extent::Quick, Extent::Smoke]
            .into_iter()
            .find(|extent| extent.as_str() == line.extent)?;
        Some(Conditions {
            extent,
            device: line.device,
            version: line.version.unwrap_or_else(|| VERSION.to_owned()),
            first: line.first.unwrap_or_default(),
        })
    }

    /// Returns how many stored samples are not used, and why, if there are any.
    pub(crate) fn unused(&self) -> Option<String> {
        let all: usize = self.unused.values().sum();
        let reasons: Vec<String> = self
            .unused
            .iter()
            .map(|(why, count)| format!("{count} {why}"))
            .collect();
        (all > 0).then(|| {
            format!(
                "{}: {all} of the stored samples are not used, because they were measured under other conditions: {}",
                self.folder.display(),
                reasons.join(", ")
            )
        })
    }

    fn keep(&mut self, line: Line) {
        let runner = line.point.split(' ').next().unwrap_or_default();
        let took = self.took.entry(runner.to_owned()).or_default();
        took.0 += line.took_s;
        took.1 += 1;
        let known = self.known.entry(line.point).or_default();
        known.command = line.command.or_else(|| known.command.take());
        match (line.failed, line.blank) {
            (Some(why), _) => known.failures.push(why),
            (_, Some(why)) => known.blank = Some(why),
            (None, None) => {
                known.samples.push(line.values);
                known.times.push(line.at);
            }
        }
    }

    /// Stores the outcome of one attempt.
    pub(crate) fn add(
        &mut self,
        point: &Point,
        command: String,
        outcome: Outcome,
        took_s: f64,
    ) -> io::Result<()> {
        let first = self.known(point).command.as_ref() != Some(&command);
        let outcome = outcome.and_then(|values| {
            // No median or ratio can be formed with such a value, and JSON has no form for it.
            let wrong = values.iter().find(|(_, value)| !value.is_finite());
            match wrong {
                Some((name, value)) => Err(Miss::Failed(format!("{name} is {value}"))),
                None => Ok(values),
            }
        });
        let (values, failed, blank) = match outcome {
            Ok(values) => (values, None, None),
            Err(Miss::Failed(why)) => (Sample::new(), Some(why), None),
            Err(Miss::Blank(why)) => (Sample::new(), None, Some(why)),
        };
        let line = Line {
            extent: self.conditions.extent.as_str().to_owned(),
            device: self.conditions.device.clone(),
            version: Some(self.conditions.version.clone()),
            first: Some(self.conditions.first),
            point: point.key(),
            took_s,
            at: SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0.0, |elapsed| elapsed.as_secs_f64()),
            values,
            command: first.then_some(command),
            failed,
            blank,
        };
        if let Some(file) = &mut self.file {
            let mut text = serde_json::to_string(&line)?;
            text.push('\n');
            file.write_all(text.as_bytes())?;
        }
        self.keep(line);
        Ok(())
    }

    /// Returns the stored samples of a point.
    pub(crate) fn known(&self, point: &Point) -> &Known {
        static NOTHING: Known = Known {
            samples: Vec::new(),
            times: Vec::new(),
            command: None,
            failures: Vec::new(),
            blank: None,
            was_blank: false,
        };
        self.known.get(&point.key()).unwrap_or(&NOTHING)
    }

    /// Returns the expected duration of a sample in seconds, based on earlier samples of the same runner.
    pub(crate) fn expected(&self, point: &Point) -> f64 {
        match self.took.get(point.runner.as_str()) {
            Some((took, count)) if *count > 0 => took / *count as f64,
            _ => point.runner.seconds(self.conditions.extent),
        }
    }

    /// Returns the folder of the report.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the extent of the measurements.
    pub(crate) fn extent(&self) -> Extent {
        self.conditions.extent
    }

    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        &self.conditions.device
    }
}

/// Returns the text of the file of samples. Where a killed run has cut a line within a character, the text has a substitute, and
/// only this line cannot be read.
fn text_of(folder: &Path) -> io::Result<String> {
    let bytes = fs::read(folder.join(SAMPLES))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::figures::Runner;

    fn point(size: &str) -> Point {
        Point {
            runner: Runner::Ping,
            params: [("size".to_owned(), size.to_owned())].into(),
        }
    }

    fn sample(us: f64) -> Sample {
        [("oneway_us".to_owned(), us), ("waited".to_owned(), 0.0)].into()
    }

    fn of(extent: Extent, first: bool) -> Conditions {
        Conditions::new(extent, "d".to_owned(), first)
    }

    /// Returns a folder for a test.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("anywarp-{name}-{}", std::process::id()));
        let _not_there = fs::remove_dir_all(&folder);
        folder
    }

    fn append(folder: &Path, text: &[u8]) {
        let mut options = OpenOptions::new();
        let file = options.append(true).open(folder.join(SAMPLES));
        file.unwrap().write_all(text).unwrap();
    }

    #[test]
    fn a_line_that_is_cut_within_a_character_is_dropped() {
        let folder = folder("cut");
        let open = || Store::open(&folder, of(Extent::Quick, false), false).unwrap();
        let measured = Ok(sample(1.0));
        open()
            .add(&point("1"), "c".to_owned(), measured, 0.5)
            .unwrap();
        // The first byte of a micro sign.
        append(&folder, b"{\"extent\":\"quick\",\"device\":\"\xc2");
        let measured = Ok(sample(2.0));
        open()
            .add(&point("1"), "c".to_owned(), measured, 0.5)
            .unwrap();
        assert_eq!(open().known(&point("1")).samples.len(), 2);
        assert_eq!(Store::last(&folder), Some(of(Extent::Quick, false)));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn samples_of_another_version_or_priority_are_counted_but_not_used() {
        let folder = folder("others");
        let open = |first| Store::open(&folder, of(Extent::Quick, first), false).unwrap();
        let measure = |store: &mut Store, us| {
            store
                .add(&point("1"), "c".to_owned(), Ok(sample(us)), 0.5)
                .unwrap();
        };
        measure(&mut open(false), 1.0);
        measure(&mut open(true), 2.0);
        measure(&mut open(true), 3.0);
        // Lines without the two fields are from an older file.
        let old = "{\"extent\":\"quick\",\"device\":\"d\",\"point\":\"ping size=1\",\"took_s\":0.5,\"values\":{\"oneway_us\":4.0}}\n";
        append(&folder, old.as_bytes());
        let other = old.replacen('{', "{\"version\":\"0.0.1\",\"first\":true,", 1);
        append(&folder, other.as_bytes());

        let values = |store: &Store| -> Vec<f64> {
            let samples = &store.known(&point("1")).samples;
            samples.iter().map(|sample| sample["oneway_us"]).collect()
        };
        let store = open(false);
        assert_eq!(values(&store), [1.0, 4.0]);
        let unused = store.unused().unwrap();
        assert!(unused.contains("3 of the stored samples"), "{unused}");
        assert!(unused.contains("2 with --first"), "{unused}");
        let version = format!("1 of anywarp 0.0.1 instead of {VERSION}");
        assert!(unused.contains(&version), "{unused}");
        assert_eq!(unused.lines().count(), 1);
        let store = open(true);
        assert_eq!(values(&store), [2.0, 3.0, 4.0]);
        let unused = store.unused().unwrap();
        assert!(unused.contains("1 without --first"), "{unused}");
        // Advice is about the last samples, whichever program measured them.
        let last = Store::last(&folder).unwrap();
        assert_eq!(values(&Store::read(&folder, last).unwrap()), [4.0, 4.0]);
        let fresh = Store::open(&folder, of(Extent::Quick, false), true).unwrap();
        assert_eq!(fresh.unused(), None);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_sample_with_a_value_that_is_not_finite_is_a_failure() {
        let folder = folder("finite");
        let mut store = Store::open(&folder, of(Extent::Quick, false), false).unwrap();
        for us in [f64::INFINITY, f64::NAN] {
            store
                .add(&point("1"), "c".to_owned(), Ok(sample(us)), 0.5)
                .unwrap();
        }
        let known = store.known(&point("1"));
        assert!(known.samples.is_empty());
        assert_eq!(known.failures, ["oneway_us is inf", "oneway_us is NaN"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn samples_survive_a_restart_and_a_partial_line_is_dropped() {
        let folder = std::env::temp_dir().join(format!("anywarp-store-{}", std::process::id()));
        let open = |extent, fresh| Store::open(&folder, of(extent, false), fresh).unwrap();
        let mut store = open(Extent::Quick, true);
        for us in [1.0, 3.0, 2.0] {
            store
                .add(&point("1"), "c".to_owned(), Ok(sample(us)), 0.5)
                .unwrap();
        }
        store
            .add(
                &point("2"),
                "c".to_owned(),
                Err(Miss::Failed("why".to_owned())),
                0.1,
            )
            .unwrap();
        assert_eq!(store.known(&point("2")).failures, ["why"]);
        let blank = Err(Miss::Blank("no".to_owned()));
        store.add(&point("3"), String::new(), blank, 0.0).unwrap();
        assert_eq!(store.known(&point("3")).blank.as_deref(), Some("no"));
        OpenOptions::new()
            .append(true)
            .open(folder.join(SAMPLES))
            .unwrap()
            .write_all(b"{\"extent\":\"qu")
            .unwrap();

        let mut store = open(Extent::Quick, false);
        store
            .add(&point("2"), "c".to_owned(), Ok(sample(9.0)), 0.1)
            .unwrap();
        let store = open(Extent::Quick, false);
        assert_eq!(
            store.known(&point("1")).middle("oneway_us").unwrap().median,
            2.0
        );
        assert_eq!(store.known(&point("1")).command.as_deref(), Some("c"));
        assert_eq!(store.known(&point("2")).samples.len(), 1);
        assert!(store.known(&point("2")).failures.is_empty());
        assert_eq!(store.known(&point("3")).blank, None);
        assert!(store.known(&point("3")).was_blank);
        assert!(!store.known(&point("2")).was_blank);
        assert!(
            open(Extent::Full, false)
                .known(&point("1"))
                .samples
                .is_empty()
        );
        assert!(
            open(Extent::Quick, true)
                .known(&point("1"))
                .samples
                .is_empty()
        );
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_deviation_is_a_share_of_the_median() {
        let of = |all: &[f64]| {
            let samples = all.iter().map(|us| sample(*us)).collect();
            let known = Known {
                samples,
                ..Known::default()
            };
            known.middle("oneway_us").unwrap()
        };
        assert_eq!(of(&[5.0]).deviation, 0.0);
        assert_eq!(of(&[5.0]).count, 1);
        // The standard deviation of two values is their distance, divided by the square root of two.
        let two = of(&[9.0, 11.0]).deviation;
        assert!((0.14..0.21).contains(&two), "{two}");
        assert!((of(&[900.0, 1100.0]).deviation - two).abs() < 1e-9);
        assert_eq!(of(&[900.0, 1100.0]).median, 1000.0);
        assert_eq!(of(&[0.0, 0.0, 4.0]).deviation, 0.0);
        // An outlier has no influence.
        let outlier = of(&[9.0, 10.0, 11.0, 10.5, 900.0]).deviation;
        assert!(outlier < 0.2, "{outlier}");
    }

    #[test]
    fn values_that_differ_much_are_noisy() {
        let known = |us: &[f64]| Known {
            samples: us.iter().map(|us| sample(*us)).collect(),
            ..Known::default()
        };
        assert_eq!(known(&[1.0, 1.1, 1.2]).noise(), None);
        assert!(known(&[1.0, 1.1, 2.0, 2.1]).noise().is_some());
        let mut waited = known(&[1.0]);
        waited.samples[0].insert("waited".to_owned(), 0.5);
        assert!(waited.noise().unwrap().contains("50 %"));
        assert_eq!(waited.middle("oneway_us").unwrap().waited, 0.5);
        assert_eq!(known(&[1.0]).middle("oneway_us").unwrap().waited, 0.0);
        let memory = |mb: f64| Sample::from([("mb".to_owned(), mb), ("kernel_mb".to_owned(), 0.0)]);
        let memory = Known {
            samples: [1.0, 1.1, 2.0, 2.1].map(memory).into(),
            ..Known::default()
        };
        assert!(memory.noise().unwrap().contains("spread"));
    }
}
