//! Checks the findings of a figure against the measured values.
//!
//! The values of a second run on the same machine would differ by some noise. To find out whether a second run would give the same
//! verdict, such runs are simulated, with values that differ as much as the samples do. If more than 5 % of the simulated runs give
//! another verdict, the finding is within the noise.

use std::collections::{BTreeMap, BTreeSet};

use super::figures::{Finding, Params, Shape, selects};
use super::store::{Middle, deviation, middle};
use crate::perf::report::sorted;

/// A measured point of a figure: a combination of the values of its axes, with the samples.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    pub(crate) params: Params,
    pub(crate) middle: Middle,
    /// The samples: when each was measured, in seconds, and its value.
    pub(crate) samples: Vec<(f64, f64)>,
}

/// The values of a figure's points.
pub(crate) type Values = Vec<Measured>;

/// The number of simulated runs.
const RUNS: usize = 500;

/// The share of the simulated runs that must give the measured verdict.
const SURE: f64 = 0.95;

/// The points of a comparison are doubtful if the comparison has the other result in more than this share of the simulated runs.
const DOUBTFUL: f64 = 0.02;

/// The deviation of a point is averaged with the typical deviation of all points, which counts as this many samples. The deviation
/// of two samples alone says little.
const TYPICAL: f64 = 3.0;

/// From this number of samples on, the deviation of a point is known well enough to say whether
/// more samples can decide a finding.
const ENOUGH_TO_KNOW: usize = 4;

/// The deviation of a point between two runs, even if the samples of each run agree: in each run
/// the programs are loaded at other addresses.
const BETWEEN_RUNS: f64 = 0.01;

/// The result of checking a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The finding holds.
    Met,
    /// The finding does not hold.
    NotMet,
    /// A second run could have the other result.
    Noise,
    /// There are too few points, or the finding needs a point that has no value.
    Unknown,
}

impl Verdict {
    /// Returns the text for users.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::NotMet => "not met",
            Self::Noise => "within the noise",
            Self::Unknown => "unknown",
        }
    }
}

/// The checked finding with the measured values.
#[derive(Debug, Clone)]
pub(crate) struct Judged {
    pub(crate) verdict: Verdict,
    /// The median of the compared quantity: a ratio, a value, or the x of a crossing.
    pub(crate) number: Option<f64>,
    /// The number with its spread, as text.
    pub(crate) text: String,
    /// The points of which more samples would help to decide the finding.
    pub(crate) doubtful: Vec<Params>,
    /// The number of points that the finding needs and that have no value.
    pub(crate) lacking: usize,
}

/// Returns the x of a value: the value as a number, or its position if it is not a number.
pub(crate) fn place(value: &str, places: &[String]) -> f64 {
    value.parse().unwrap_or_else(|_| {
        let at = places.iter().position(|place| place == value);
        at.map_or(f64::NAN, |at| at as f64)
    })
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

/// A number that a finding is about: the value of a point, or the ratio of the values of two.
#[derive(Debug)]
struct Number {
    /// The points, by their positions in the values.
    points: Vec<usize>,
    /// The x of the first point.
    place: f64,
    value: f64,
    /// The estimated standard deviation of the number in one sample, as a share of the number.
    deviation: f64,
    /// The number of samples, or of pairs of samples.
    count: usize,
    /// The square of the share of the time that the ends waited for processors.
    waited: f64,
}

impl Number {
    fn of(values: &Values, n: usize, place: f64) -> Option<Self> {
        let middle = values.get(n)?.middle;
        Some(Self {
            points: vec![n],
            place,
            value: middle.median,
            deviation: middle.deviation,
            count: middle.count,
            waited: middle.waited.powi(2),
        })
    }

    /// Returns the ratio of point `a` to point `b`.
    ///
    /// The speed of a virtual machine changes from second to second. Samples that were measured soon after each other are compared, so
    /// that these changes do not influence the ratio.
    fn ratio(values: &Values, a: usize, b: usize, place: f64) -> Option<Self> {
        let (one, other) = (values.get(a)?, values.get(b)?);
        let ratios = sorted(pairs(&one.samples, &other.samples).into_iter());
        let (value, deviation, count) = match middle(&ratios).filter(|_| ratios.len() > 1) {
            Some(value) => (value, deviation(&ratios, value), ratios.len()),
            None => (
                one.middle.median / other.middle.median,
                (one.middle.deviation.powi(2) + other.middle.deviation.powi(2)).sqrt(),
                one.middle.count.min(other.middle.count),
            ),
        };
        // The ratio to a value of 0 says nothing, and its deviation would influence the estimated noise of all other ratios.
        if !value.is_finite() {
            return None;
        }
        Some(Self {
            points: vec![a, b],
            place,
            value,
            deviation,
            count,
            waited: one.middle.waited.powi(2) + other.middle.waited.powi(2),
        })
    }
}

/// Returns the ratios of samples of two points, which are given with their times. Each sample is in one ratio at most. Samples that
/// were measured closest to each other are paired first. Ratios that are not finite are left out.
fn pairs(a: &[(f64, f64)], b: &[(f64, f64)]) -> Vec<f64> {
    let all = |of: &[(f64, f64)]| of.iter().copied().enumerate().collect::<Vec<_>>();
    let (a, b) = (all(a), all(b));
    let mut near: Vec<(f64, usize, usize, f64)> = a
        .iter()
        .flat_map(|(i, (at, one))| {
            b.iter()
                .map(move |(j, (then, other))| ((at - then).abs(), *i, *j, one / other))
        })
        .collect();
    near.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (mut of_a, mut of_b) = (BTreeSet::new(), BTreeSet::new());
    near.retain(|(_, i, j, _)| {
        let free = !of_a.contains(i) && !of_b.contains(j);
        free && of_a.insert(*i) && of_b.insert(*j)
    });
    let ratios = near.into_iter().map(|(.., ratio)| ratio);
    ratios.filter(|ratio| ratio.is_finite()).collect()
}

/// One comparison of a finding: of a number, or, for a crossing, of the ratios at all x in their order.
#[derive(Debug)]
struct Test(Vec<Number>);

impl Test {
    /// Returns the compared number, if there is one, and whether the finding holds for it. `of`: the values of the numbers.
    fn check(&self, finding: &Finding, of: &[f64]) -> (Option<f64>, bool) {
        let limit = finding.limit.unwrap_or(f64::NAN);
        let factor = finding.factor;
        let number = if finding.shape == Shape::Crosses {
            // The x at which the ratio falls below 1.
            let above = of.first().is_some_and(|ratio| *ratio > 1.0);
            let below = self.0.iter().zip(of).find(|(_, ratio)| **ratio < 1.0);
            let Some((number, _)) = below.filter(|_| above) else {
                return (None, false);
            };
            number.place
        } else {
            of.first().copied().unwrap_or(f64::NAN)
        };
        let holds = match finding.shape {
            Shape::Less => number < factor,
            Shape::Same => (1.0 / factor..=factor).contains(&number),
            Shape::Rises => number >= factor,
            Shape::Falls => number * factor <= 1.0,
            Shape::AtMost => number <= limit,
            Shape::AtLeast => number >= limit,
            Shape::Crosses => {
                finding.from.is_none_or(|from| number >= from)
                    && finding.to.is_none_or(|to| number <= to)
            }
        };
        (Some(number), holds)
    }

    /// Returns the points of the comparison.
    fn points(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(|number| &number.points).copied()
    }

    fn values(&self) -> Vec<f64> {
        self.0.iter().map(|number| number.value).collect()
    }
}

/// Returns the x of a point.
fn x_of(params: &Params, x: &str, places: &[String]) -> f64 {
    place(params.get(x).map_or("", String::as_str), places)
}

/// Returns whether a finding makes its assertion at an x. A finding about a crossing uses all x, not only those between the limits.
fn within(finding: &Finding, here: f64) -> bool {
    finding.shape == Shape::Crosses
        || finding.from.is_none_or(|from| here >= from) && finding.to.is_none_or(|to| here <= to)
}

/// Returns how many of the `missing` points, which have no value, a finding needs.
fn lacking(
    finding: &Finding,
    values: &Values,
    missing: &[Params],
    x: &str,
    places: &[String],
) -> usize {
    let all = || values.iter().map(|of| &of.params).chain(missing);
    let at = |params: &Params| x_of(params, x, places);
    let of_a = |params: &Params| within(finding, at(params)) && selects(&finding.a, params);
    let of_b = |params: &Params| selects(&finding.b, params);
    let needed = |params: &&Params| match finding.shape {
        // Both points of a comparison are needed. A point that nothing is compared with is not.
        Shape::Less | Shape::Same | Shape::Crosses => {
            of_a(params) && all().any(|other| of_b(other) && alike(finding, params, other))
                || of_b(params) && all().any(|one| of_a(one) && alike(finding, one, params))
        }
        Shape::AtMost | Shape::AtLeast => of_a(params),
        // The first and the last point of a line are needed.
        Shape::Rises | Shape::Falls => {
            let same_line = |other: &&Params| {
                let rest = |axis: &&String| *axis != x;
                of_a(other)
                    && other.len() == params.len()
                    && params
                        .keys()
                        .filter(rest)
                        .all(|axis| params.get(axis) == other.get(axis))
            };
            let line = || all().filter(same_line).map(at);
            let here = at(params);
            let first = line().all(|there| there >= here);
            let last = line().all(|there| there <= here);
            of_a(params) && first != last
        }
    };
    missing.iter().filter(needed).count()
}

/// Returns the comparisons of a finding with `values`, whose horizontal axis is `x`.
fn tests(finding: &Finding, values: &Values, x: &str, places: &[String]) -> Vec<Test> {
    let at = |params: &Params| x_of(params, x, places);
    let counts = |params: &Params| within(finding, at(params));
    let of_a: Vec<usize> = (0..values.len())
        .filter(|&n| {
            values
                .get(n)
                .is_some_and(|of| counts(&of.params) && selects(&finding.a, &of.params))
        })
        .collect();
    let params = |n: usize| values.get(n).map(|of| &of.params);
    let place = |n: usize| params(n).map_or(f64::NAN, at);
    // Returns the points that `finding.b` selects for a comparison with point `n`.
    let others = |n: usize| {
        (0..values.len()).filter(move |&other| {
            let (Some(one), Some(other)) = (params(n), params(other)) else {
                return false;
            };
            selects(&finding.b, other) && alike(finding, one, other)
        })
    };
    // Points that differ only in x, in its order.
    let lines = || {
        let mut lines: BTreeMap<Params, Vec<(f64, usize)>> = BTreeMap::new();
        for &n in &of_a {
            if let Some(params) = params(n) {
                let mut key = params.clone();
                key.remove(x);
                lines.entry(key).or_default().push((at(params), n));
            }
        }
        for line in lines.values_mut() {
            line.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
        lines.into_values()
    };
    match finding.shape {
        Shape::Less | Shape::Same => of_a
            .iter()
            .flat_map(|&n| others(n).map(move |other| (n, other)))
            .filter_map(|(n, other)| Some(Test(vec![Number::ratio(values, n, other, place(n))?])))
            .collect(),
        Shape::AtMost | Shape::AtLeast => of_a
            .into_iter()
            .filter_map(|n| Some(Test(vec![Number::of(values, n, place(n))?])))
            .collect(),
        Shape::Rises | Shape::Falls => lines()
            .filter_map(|line| match (line.first(), line.last()) {
                (Some((from, first)), Some((to, last))) if from < to => {
                    Some(Test(vec![Number::ratio(values, *last, *first, *to)?]))
                }
                _ => None,
            })
            .collect(),
        Shape::Crosses => lines()
            .map(|line| {
                let pair = |(place, n): (f64, usize)| {
                    let same = |other: &usize| {
                        params(n).and_then(|p| p.get(x)) == params(*other).and_then(|p| p.get(x))
                    };
                    Number::ratio(values, n, others(n).find(same)?, place)
                };
                line.into_iter().filter_map(pair).collect::<Vec<_>>()
            })
            .filter(|pairs| pairs.len() > 1)
            .map(Test)
            .collect(),
    }
}

/// Returns whether a finding holds if it holds for `held` of `all` comparisons.
fn enough(finding: &Finding, held: usize, all: usize) -> bool {
    held as f64 >= finding.share * all as f64
}

/// Checks one finding with `values`, whose horizontal axis is `x`. The points `missing` should have a value, but have none. A point
/// has at most `most` samples; with 0 the noise is ignored.
pub(crate) fn judge(
    finding: &Finding,
    values: &Values,
    missing: &[Params],
    x: &str,
    places: &[String],
    most: usize,
) -> Judged {
    let unknown = |text: String, lacking| Judged {
        verdict: Verdict::Unknown,
        number: None,
        text,
        doubtful: Vec::new(),
        lacking,
    };
    let lacking = lacking(finding, values, missing, x, places);
    if lacking > 0 {
        // The verdict on the other points could differ from the verdict on all points.
        let points = if lacking == 1 {
            "a point has".to_owned()
        } else {
            format!("{lacking} points have")
        };
        return unknown(format!("incomplete: {points} no value"), lacking);
    }
    let tests = tests(finding, values, x, places);
    if tests.is_empty() {
        return unknown("not enough points".to_owned(), 0);
    }
    let results: Vec<_> = tests
        .iter()
        .map(|test| test.check(finding, &test.values()))
        .collect();
    let held = results.iter().filter(|(_, holds)| *holds).count();
    let met = enough(finding, held, tests.len());
    // Only shares and rates are compared with a limit, and they do not depend on the addresses of the programs.
    let between = match finding.shape {
        Shape::AtMost | Shape::AtLeast => 0.0,
        _ => BETWEEN_RUNS,
    };
    let errors = errors(&tests, between, None);
    // Returns the number of simulated runs with the measured verdict, and for each comparison that of runs with the other result.
    let simulate = |errors: &[Vec<f64>]| {
        let (mut same, mut changed) = (0, vec![0; tests.len()]);
        let mut random = Random(1);
        for _ in 0..RUNS {
            let mut held = 0;
            let all = tests.iter().zip(errors).zip(&results).zip(&mut changed);
            for (((test, errors), (number, holds)), changed) in all {
                let run: Vec<f64> = test
                    .values()
                    .iter()
                    .zip(errors)
                    .map(|(value, error)| value * (error * random.normal()).exp())
                    .collect();
                let (there, then) = test.check(finding, &run);
                held += usize::from(then);
                // A crossing can be at another place and still be within its limits.
                let moved = finding.shape == Shape::Crosses && there.is_some() != number.is_some();
                *changed += usize::from(then != *holds || moved);
            }
            same += usize::from(enough(finding, held, tests.len()) == met);
        }
        (same, changed)
    };
    let share = |runs: usize| runs as f64 / RUNS as f64;
    let (same, changed) = simulate(&errors);
    let certain = share(same) >= SURE;
    // A single sample says nothing about noise. A smoke test has only one of each point.
    let mut numbers = tests.iter().flat_map(|test| &test.0);
    let single = numbers.any(|number| number.count < 2);
    let sure = most == 0 || certain && !single;
    // Once the deviations are known, it may turn out that even the largest number of samples is too small.
    let known = tests
        .iter()
        .flat_map(|test| &test.0)
        .all(|number| number.count >= ENOUGH_TO_KNOW);
    let hopeless = !certain && known && {
        let (same, _) = simulate(&self::errors(&tests, between, Some(most)));
        share(same) < SURE
    };
    let doubtful: BTreeSet<usize> = tests
        .iter()
        .zip(changed)
        .filter(|_| !sure)
        .flat_map(|(test, changed)| {
            let near = !certain && !hopeless && share(changed) > DOUBTFUL;
            test.points()
                .filter(move |n| near || values.get(*n).is_some_and(|of| of.middle.count < 2))
        })
        .collect();
    let verdict = match (sure, met) {
        (false, _) => Verdict::Noise,
        (true, true) => Verdict::Met,
        (true, false) => Verdict::NotMet,
    };
    let numbers: Vec<f64> = results.iter().filter_map(|(number, _)| *number).collect();
    let (number, mut text) = summary(finding, &numbers, held, tests.len());
    if !sure && single {
        text.push_str(", points with a single sample have an unknown noise");
    } else if !sure {
        let largest = |errors: &Vec<f64>| errors.iter().copied().fold(0.0, f64::max);
        let noise = sorted(errors.iter().map(largest));
        let typical = noise.get(noise.len() / 2).copied().unwrap_or(0.0);
        text.push_str(&format!(
            ", within the noise of {} %",
            digits(typical * 200.0)
        ));
    }
    Judged {
        verdict,
        number,
        text,
        doubtful: doubtful
            .into_iter()
            .filter_map(|n| Some(values.get(n)?.params.clone()))
            .collect(),
        lacking: 0,
    }
}

/// Returns by how much each number of each comparison would differ in another run: a standard
/// deviation, as a share of the number. `between` is the deviation of a point between runs. With
/// `most`, each point counts as if it had that many samples.
fn errors(tests: &[Test], between: f64, most: Option<usize>) -> Vec<Vec<f64>> {
    let numbers = tests.iter().flat_map(|test| &test.0);
    let several = numbers.filter(|number| number.count > 1);
    let several = sorted(several.map(|number| number.deviation));
    let typical = several.get(several.len() / 2).copied().unwrap_or(0.0);
    let error = |number: &Number| {
        let own = number.count.saturating_sub(1) as f64;
        let all = (TYPICAL * typical.powi(2) + own * number.deviation.powi(2)) / (TYPICAL + own);
        let count = most.unwrap_or(number.count).max(1) as f64;
        let between = between.powi(2) * number.points.len() as f64;
        // Both runs deviate from the true value.
        (2.0 * (all / count + between + number.waited)).sqrt()
    };
    let of = |test: &Test| test.0.iter().map(error).collect();
    tests.iter().map(of).collect()
}

/// A random generator, the same in each run so that the same samples have the same verdict (SplitMix64).
struct Random(u64);

impl Random {
    /// Returns a number greater than 0 and less than 1.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((mixed >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// Returns a number with a standard normal distribution.
    fn normal(&mut self) -> f64 {
        let (length, angle) = (self.uniform(), self.uniform());
        (-2.0 * length.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }
}

/// Returns whether two points have the same values on all axes, except on those by which the finding selects b.
fn alike(finding: &Finding, one: &Params, other: &Params) -> bool {
    one.iter()
        .all(|(axis, value)| finding.b.contains_key(axis) || other.get(axis) == Some(value))
}

/// Returns whether a control supports the reason of a finding that does not hold: the finding holds in the control, or its number is
/// at most half as far from the bound, on a logarithmic scale.
pub(crate) fn supports(finding: &Finding, here: &Judged, control: &Judged) -> bool {
    if control.verdict == Verdict::Met {
        return true;
    }
    let beyond = |judged: &Judged| {
        let number = judged.number.filter(|number| *number > 0.0)?;
        Some(match finding.shape {
            Shape::Less => (number / finding.factor).ln(),
            Shape::Same => number.ln().abs() - finding.factor.ln(),
            Shape::Rises => (finding.factor / number).ln(),
            Shape::Falls => (number * finding.factor).ln(),
            Shape::AtMost => (number / finding.limit?).ln(),
            Shape::AtLeast => (finding.limit? / number).ln(),
            Shape::Crosses => return None,
        })
    };
    let (Some(here), Some(there)) = (beyond(here), beyond(control)) else {
        return false;
    };
    here > 0.0 && there <= here / 2.0
}

/// Returns the median of the compared numbers, and a text about them.
fn summary(finding: &Finding, numbers: &[f64], held: usize, all: usize) -> (Option<f64>, String) {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let number = sorted.get(sorted.len() / 2).copied();
    let unit = match finding.shape {
        Shape::Less | Shape::Same | Shape::Rises | Shape::Falls => "× ",
        Shape::AtMost | Shape::AtLeast => "",
        Shape::Crosses => "at ",
    };
    let mut text = number.map_or_else(
        || "they do not cross".to_owned(),
        |number| format!("{unit}{}", digits(number)),
    );
    if let (Some(least), Some(most), true) = (sorted.first(), sorted.last(), sorted.len() > 1) {
        text.push_str(&format!(" ({} to {})", digits(*least), digits(*most)));
    }
    if all > 1 {
        text.push_str(&format!(", holds for {held} of {all}"));
    }
    (number, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::figures::parse;

    #[test]
    fn a_control_supports_a_reason_if_most_of_the_difference_is_gone() {
        let file = "paper = 'pb'\nrunner = 'ping'\n[axis.size]\nvalues = [1, 2]\n[[figure]]\nname = 'x'\ntitle = ''\nasks = ''\n\
             found = ''\nmetric = 'm'\nx = 'size'\n[[figure.finding]]\ntext = ''\nshape = 'less'\nfactor = 1.0\n\
             a = { size = 1 }\nb = { size = 2 }\n";
        let experiment = parse(file).unwrap();
        let finding = &experiment.figures[0].finding[0];
        let judged = |number: f64, verdict| Judged {
            verdict,
            number: Some(number),
            text: String::new(),
            doubtful: Vec::new(),
            lacking: 0,
        };
        let here = judged(2.0, Verdict::NotMet);
        for (number, verdict, supported) in [
            (1.1, Verdict::NotMet, true),
            (1.41, Verdict::NotMet, true),
            (1.42, Verdict::NotMet, false),
            (3.0, Verdict::NotMet, false),
            (3.0, Verdict::Met, true),
        ] {
            let control = judged(number, verdict);
            assert_eq!(supports(finding, &here, &control), supported, "{number}");
        }
        // The median is within the bound already, only some points are not.
        let near = judged(0.9, Verdict::NotMet);
        assert!(!supports(finding, &near, &judged(0.5, Verdict::NotMet)));
    }

    /// Checks a finding with times of polling and of events at 1, 2, 4 and 8.
    fn judged(finding: &str, poll: [f64; 4], event: [f64; 4]) -> (Verdict, Option<f64>) {
        let judged = with_noise(finding, poll, event, 0.0);
        (judged.verdict, judged.number)
    }

    /// The same with a standard deviation of the samples. Each point has four samples.
    fn with_noise(finding: &str, poll: [f64; 4], event: [f64; 4], deviation: f64) -> Judged {
        let (finding, mut values) = measured(finding, poll, event);
        for value in &mut values {
            value.middle.deviation = deviation;
        }
        judge(&finding, &values, &[], "size", &[], 12)
    }

    /// Returns a finding, and values of polling and then of events at 1, 2, 4 and 8.
    fn measured(finding: &str, poll: [f64; 4], event: [f64; 4]) -> (Finding, Values) {
        let file = format!(
            "paper = 'pb'\nrunner = 'ping'\n[axis.size]\nvalues = [1, 2, 4, 8]\n[axis.mode]\nvalues = ['poll', 'event']\n\
             [[figure]]\nname = 'x'\ntitle = ''\nasks = ''\nfound = ''\nmetric = 'm'\nx = 'size'\nlines = ['mode']\n\
             [[figure.finding]]\ntext = ''\n{finding}\n"
        );
        let experiment = parse(&file).unwrap();
        let sizes = ["1", "2", "4", "8"];
        let mut values = Values::new();
        for (mode, of) in [("poll", poll), ("event", event)] {
            for (size, median) in sizes.iter().zip(of) {
                let params = [("size", *size), ("mode", mode)];
                let params = params.map(|(axis, value)| (axis.to_owned(), value.to_owned()));
                let middle = Middle {
                    median,
                    lower: median,
                    upper: median,
                    deviation: 0.0,
                    count: 4,
                    waited: 0.0,
                };
                values.push(Measured {
                    params: params.into(),
                    middle,
                    samples: Vec::new(),
                });
            }
        }
        (experiment.figures[0].finding[0].clone(), values)
    }

    /// Checks a finding without the values of some points, given by their positions.
    fn without(finding: &str, missing: &[usize]) -> Judged {
        let (finding, values) = measured(finding, [6.0, 3.0, 3.0, 1.0], [2.0, 4.0, 4.0, 4.0]);
        let (mut kept, mut gone) = (Values::new(), Vec::new());
        for (n, value) in values.into_iter().enumerate() {
            if missing.contains(&n) {
                gone.push(value.params);
            } else {
                kept.push(value);
            }
        }
        judge(&finding, &kept, &gone, "size", &[], 12)
    }

    #[test]
    fn a_finding_that_lacks_a_value_is_incomplete() {
        let verdict = |finding: &str, missing: &[usize]| {
            let judged = without(finding, missing);
            let unknown = judged.verdict == Verdict::Unknown;
            assert_eq!(
                judged.text.contains("incomplete"),
                unknown,
                "{}",
                judged.text
            );
            assert_eq!(judged.lacking > 0, unknown);
            judged.verdict
        };
        let met = Verdict::Met;
        let less = format!("{LESS}\nfrom = 2");
        assert_eq!(verdict(&less, &[]), met);
        // Points on either side of a comparison are needed, but not those outside of the limits.
        assert_eq!(verdict(&less, &[1]), Verdict::Unknown);
        assert_eq!(verdict(&less, &[7]), Verdict::Unknown);
        assert_eq!(verdict(&less, &[0, 4]), met);
        // Lines need their ends. Those of other lines do not count.
        let falls = "shape = 'falls'\nfactor = 2\na = { mode = 'poll' }";
        for (missing, expected) in [
            (0, Verdict::Unknown),
            (1, met),
            (3, Verdict::Unknown),
            (4, met),
        ] {
            assert_eq!(verdict(falls, &[missing]), expected, "{missing}");
        }
        let part = format!("{falls}\nfrom = 2");
        assert_eq!(verdict(&part, &[0]), met);
        assert_eq!(verdict(&part, &[1]), Verdict::Unknown);
        let crosses = "shape = 'crosses'\na = { mode = 'poll' }\nb = { mode = 'event' }\nto = 4";
        assert_eq!(verdict(crosses, &[]), met);
        for missing in 0..8 {
            assert_eq!(verdict(crosses, &[missing]), Verdict::Unknown, "{missing}");
        }
        let most = "shape = 'at-most'\nlimit = 7\na = { mode = 'poll' }";
        assert_eq!(verdict(most, &[2]), Verdict::Unknown);
        assert_eq!(verdict(most, &[5]), met);
        assert!(without(most, &[1, 2]).text.contains("2 points"));
    }

    #[test]
    fn a_line_is_as_long_as_the_points_that_can_be_measured() {
        let falls = "shape = 'falls'\nfactor = 2\na = { mode = 'poll' }";
        let (finding, mut values) = measured(falls, [9.0, 3.0, 2.0, 1.0], [1.0; 4]);
        // The last point is blank: it is neither measured nor missing.
        values.remove(3);
        assert_eq!(
            judge(&finding, &values, &[], "size", &[], 12).number,
            Some(2.0 / 9.0)
        );
        let less = format!("{LESS}\nfrom = 2");
        let (finding, mut values) = measured(&less, [1.0; 4], [2.0; 4]);
        // Nothing can be compared with a missing point whose counterpart is blank.
        let missing = values.remove(3).params;
        values.remove(6);
        assert_eq!(values[3].params["mode"], "event");
        let judged = judge(&finding, &values, &[missing], "size", &[], 12);
        assert_eq!(judged.verdict, Verdict::Met, "{}", judged.text);
    }

    #[test]
    fn a_single_sample_decides_nothing() {
        let (finding, mut values) = measured(LESS, [1.0; 4], [9.0; 4]);
        let judged = |values: &Values, most| judge(&finding, values, &[], "size", &[], most);
        values[2].middle.count = 1;
        let one = judged(&values, 12);
        assert_eq!(one.verdict, Verdict::Noise);
        assert!(one.text.contains("single sample"), "{}", one.text);
        let sizes: BTreeSet<&str> = one.doubtful.iter().map(|p| p["size"].as_str()).collect();
        assert_eq!(sizes, ["4"].into());
        // In a smoke test all points have a single sample.
        assert_eq!(judged(&values, 0).verdict, Verdict::Met);
        values[2].middle.count = 2;
        assert_eq!(judged(&values, 12).verdict, Verdict::Met);
    }

    #[test]
    fn ratios_to_zero_are_left_out() {
        assert_eq!(
            pairs(&[(0.0, 1.0), (5.0, 2.0)], &[(0.0, 0.0), (5.0, 4.0)]),
            [0.5]
        );
        let zero = [2.0, 2.0, 2.0, 0.0];
        for poll in [[1.0; 4], [1.0, 1.0, 1.0, 0.0]] {
            let judged = with_noise(LESS, poll, zero, 0.04);
            assert_eq!(judged.verdict, Verdict::Met, "{}", judged.text);
            assert!(judged.text.contains("3 of 3"), "{}", judged.text);
        }
    }

    const LESS: &str = "shape = 'less'\na = { mode = 'poll' }\nb = { mode = 'event' }";

    #[test]
    fn a_line_below_another() {
        let two = [2.0; 4];
        assert_eq!(judged(LESS, [1.0; 4], two), (Verdict::Met, Some(0.5)));
        assert_eq!(judged(LESS, two, [1.0; 4]), (Verdict::NotMet, Some(2.0)));
        // Three of four are less than the required 80 %. Of the first three all hold.
        let mostly = [1.0, 1.0, 1.0, 3.0];
        assert_eq!(judged(LESS, mostly, two).0, Verdict::NotMet);
        let some = |more: &str| judged(&format!("{LESS}\n{more}"), mostly, two).0;
        assert_eq!(some("to = 4"), Verdict::Met);
        assert_eq!(some("share = 0.7"), Verdict::Met);
        assert_eq!(some("factor = 0.4"), Verdict::NotMet);
        assert_eq!(some("from = 9"), Verdict::Unknown);
    }

    #[test]
    fn lines_that_rise_fall_and_are_equal() {
        let of = |shape: &str, values| judged(shape, values, values).0;
        let rising = [1.0, 2.0, 3.0, 9.0];
        let rises = "shape = 'rises'\nfactor = 8\na = { mode = 'poll' }";
        assert_eq!(of(rises, rising), Verdict::Met);
        assert_eq!(of(rises, [1.0, 9.0, 9.0, 7.0]), Verdict::NotMet);
        assert_eq!(
            of("shape = 'falls'\nfactor = 2", [8.0, 9.0, 9.0, 3.0]),
            Verdict::Met
        );
        assert_eq!(
            of("shape = 'falls'\nfactor = 2", [8.0, 1.0, 1.0, 5.0]),
            Verdict::NotMet
        );
        let same = "shape = 'same'\nfactor = 1.2\na = { mode = 'poll' }\nb = { mode = 'event' }";
        assert_eq!(of(same, rising), Verdict::Met);
        assert_eq!(judged(same, rising, [2.0; 4]).0, Verdict::NotMet);
        assert_eq!(of("shape = 'at-most'\nlimit = 10", rising), Verdict::Met);
        assert_eq!(of("shape = 'at-least'\nlimit = 2", rising), Verdict::NotMet);
    }

    #[test]
    fn lines_that_cross() {
        let cross =
            "shape = 'crosses'\na = { mode = 'poll' }\nb = { mode = 'event' }\nfrom = 2\nto = 4";
        let two = [2.0; 4];
        assert_eq!(
            judged(cross, [3.0, 3.0, 1.0, 1.0], two),
            (Verdict::Met, Some(4.0))
        );
        assert_eq!(
            judged(cross, [3.0, 3.0, 3.0, 1.0], two),
            (Verdict::NotMet, Some(8.0))
        );
        assert_eq!(judged(cross, [1.0; 4], two), (Verdict::NotMet, None));
    }

    #[test]
    fn a_value_near_its_limit_is_within_the_noise() {
        let two = [2.0; 4];
        let verdict = |poll, deviation| with_noise(LESS, poll, two, deviation).verdict;
        // A ratio of 0.95, with an error of each value in a run of 1 %, 4 % and 20 %.
        assert_eq!(verdict([1.9; 4], 0.0), Verdict::Met);
        assert_eq!(verdict([1.9; 4], 0.08), Verdict::Noise);
        assert_eq!(verdict([1.9; 4], 0.4), Verdict::Noise);
        assert_eq!(verdict([1.0; 4], 0.08), Verdict::Met);
        assert_eq!(verdict([3.0; 4], 0.08), Verdict::NotMet);
        assert_eq!(verdict([1.0; 4], 0.8), Verdict::Noise);
        // The mean of values that differ little between samples can still differ between runs.
        assert_eq!(verdict([1.99; 4], 0.0), Verdict::Noise);
        // A value that is compared with a limit is assumed not to differ between runs.
        let limit = "shape = 'at-most'\nlimit = 2\na = { mode = 'poll' }";
        let judged = with_noise(limit, [1.99; 4], two, 0.0);
        assert_eq!(judged.verdict, Verdict::Met);

        // Only the comparison near the limit is doubtful: with three of four the finding does not hold.
        let judged = with_noise(LESS, [1.0, 1.0, 1.0, 1.88], two, 0.04);
        assert_eq!(judged.verdict, Verdict::Noise);
        let sizes: BTreeSet<&str> = judged.doubtful.iter().map(|p| p["size"].as_str()).collect();
        assert_eq!(sizes, ["8"].into());
        assert_eq!(judged.doubtful.len(), 2);
        assert!(
            judged.text.contains(", within the noise of "),
            "{}",
            judged.text
        );
        // One doubtful comparison does not matter if the others suffice, or if too few hold in any case.
        let enough = format!("{LESS}\nshare = 0.7");
        assert_eq!(
            with_noise(&enough, [1.0, 1.0, 1.0, 1.88], two, 0.04).verdict,
            Verdict::Met
        );
        let few = with_noise(LESS, [1.0, 3.0, 3.0, 1.88], two, 0.04);
        assert_eq!(few.verdict, Verdict::NotMet);
        assert!(few.doubtful.is_empty());
    }

    #[test]
    fn samples_are_compared_with_those_measured_at_the_same_time() {
        // The machine is half as fast in every other second, for both points alike.
        let slow = |at: usize| if at.is_multiple_of(2) { 1.0 } else { 2.0 };
        let point = |value: f64, shift: f64, count: usize| {
            let samples = (0..count).map(|at| (at as f64 + shift, value * slow(at)));
            let samples: Vec<(f64, f64)> = samples.collect();
            let all = sorted(samples.iter().map(|(_, value)| *value));
            let median = middle(&all).unwrap();
            Measured {
                params: Params::new(),
                middle: Middle {
                    median,
                    lower: median,
                    upper: median,
                    deviation: deviation(&all, median),
                    count,
                    waited: 0.0,
                },
                samples,
            }
        };
        let values = vec![point(9.0, 0.0, 4), point(10.0, 0.1, 4), point(10.0, 0.1, 1)];
        let ratio = Number::ratio(&values, 0, 1, 0.0).unwrap();
        assert!((ratio.value - 0.9).abs() < 1e-9, "{ratio:?}");
        assert!(ratio.deviation < 1e-9, "{ratio:?}");
        assert_eq!(ratio.count, 4);
        // One pair has no deviation, so the medians of all samples are compared.
        let ratio = Number::ratio(&values, 0, 2, 0.0).unwrap();
        assert!((ratio.value - 1.35).abs() < 1e-9, "{ratio:?}");
        assert!(ratio.deviation > 0.1, "{ratio:?}");
        // A sample is in one pair only, in the closest.
        let all = pairs(
            &[(0.0, 1.0), (5.0, 2.0)],
            &[(4.0, 4.0), (6.5, 8.0), (9.0, 1.0)],
        );
        assert_eq!(all, [0.5, 1.0 / 8.0]);
    }

    #[test]
    fn a_crossing_within_the_noise() {
        let cross = "shape = 'crosses'\na = { mode = 'poll' }\nb = { mode = 'event' }";
        let two = [2.0; 4];
        let verdict = |last| with_noise(cross, [3.0, 3.0, 3.0, last], two, 0.04).verdict;
        assert_eq!(verdict(1.0), Verdict::Met);
        assert_eq!(verdict(1.96), Verdict::Noise);
        assert_eq!(verdict(3.0), Verdict::NotMet);
    }
}
