//! Checks the findings of a figure against the measured values.

use std::collections::BTreeMap;

use super::figures::{Finding, Params, Shape, selects};
use super::store::Middle;

/// The values of a figure's points.
pub(crate) type Values = Vec<(Params, Middle)>;

/// The result of checking a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The finding holds.
    Met,
    /// The finding does not hold.
    NotMet,
    /// There are too few points.
    Unknown,
}

impl Verdict {
    /// Returns the text for users.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::NotMet => "not met",
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
}

/// Returns the x of a value: the value as a number, or its position if it is not a number.
pub(crate) fn place(value: &str, places: &[String]) -> f64 {
    value.parse().unwrap_or_else(|_| {
        let at = places.iter().position(|place| place == value);
        at.map_or(f64::NAN, |at| at as f64)
    })
}

/// Formats a number with three significant digits.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Checks one finding with `values`, whose horizontal axis is `x`.
pub(crate) fn judge(finding: &Finding, values: &Values, x: &str, places: &[String]) -> Judged {
    let at = |params: &Params| place(params.get(x).map_or("", String::as_str), places);
    let counts = |params: &Params| {
        // A finding about a crossing uses all x, not only those between the limits.
        let here = at(params);
        finding.shape == Shape::Crosses
            || finding.from.is_none_or(|from| here >= from)
                && finding.to.is_none_or(|to| here <= to)
    };
    let judged: Vec<&(Params, Middle)> = values
        .iter()
        .filter(|(params, _)| counts(params) && selects(&finding.a, params))
        .collect();
    let (numbers, holds): (Vec<f64>, Vec<bool>) = match finding.shape {
        Shape::Less | Shape::Same => {
            let mut ratios = Vec::new();
            for (params, value) in judged {
                for (_, other) in values.iter().filter(|(other, _)| {
                    selects(&finding.b, other) && alike(finding, params, other)
                }) {
                    ratios.push(value.median / other.median);
                }
            }
            let holds = |ratio: &f64| match finding.shape {
                Shape::Less => *ratio < finding.factor,
                _ => (1.0 / finding.factor..=finding.factor).contains(ratio),
            };
            let holds = ratios.iter().map(holds).collect();
            (ratios, holds)
        }
        Shape::Rises | Shape::Falls => {
            let ratios: Vec<f64> = lines(judged, x)
                .into_values()
                .filter_map(|line| ends(&line, at))
                .map(|(first, last)| last / first)
                .collect();
            let holds = |ratio: &f64| match finding.shape {
                Shape::Rises => *ratio >= finding.factor,
                _ => ratio * finding.factor <= 1.0,
            };
            let holds = ratios.iter().map(holds).collect();
            (ratios, holds)
        }
        Shape::AtMost | Shape::AtLeast => {
            let limit = finding.limit.unwrap_or(f64::NAN);
            let values: Vec<f64> = judged.iter().map(|(_, value)| value.median).collect();
            let holds = |value: &f64| match finding.shape {
                Shape::AtMost => *value <= limit,
                _ => *value >= limit,
            };
            let holds = values.iter().map(holds).collect();
            (values, holds)
        }
        Shape::Crosses => crossings(finding, values, x, &at),
    };
    summary(finding, &numbers, &holds)
}

/// Returns whether two points have the same values on all axes, except on those by which the finding selects b.
fn alike(finding: &Finding, one: &Params, other: &Params) -> bool {
    one.iter()
        .all(|(axis, value)| finding.b.contains_key(axis) || other.get(axis) == Some(value))
}

/// Groups points that differ only in x.
fn lines<'a>(
    points: Vec<&'a (Params, Middle)>,
    x: &str,
) -> BTreeMap<Params, Vec<&'a (Params, Middle)>> {
    let mut lines: BTreeMap<Params, Vec<&(Params, Middle)>> = BTreeMap::new();
    for point in points {
        let mut key = point.0.clone();
        key.remove(x);
        lines.entry(key).or_default().push(point);
    }
    lines
}

/// Returns the values at the first and the last x of a line.
fn ends(line: &[&(Params, Middle)], at: impl Fn(&Params) -> f64) -> Option<(f64, f64)> {
    let by_place =
        |one: &&&(Params, Middle), other: &&&(Params, Middle)| at(&one.0).total_cmp(&at(&other.0));
    let first = line.iter().min_by(by_place)?;
    let last = line.iter().max_by(by_place)?;
    (at(&first.0) < at(&last.0)).then_some((first.1.median, last.1.median))
}

/// Returns for each line that begins with a above b the first x at which a is below b.
fn crossings(
    finding: &Finding,
    values: &Values,
    x: &str,
    at: &impl Fn(&Params) -> f64,
) -> (Vec<f64>, Vec<bool>) {
    let of = values
        .iter()
        .filter(|(params, _)| selects(&finding.a, params))
        .collect();
    let (mut numbers, mut holds) = (Vec::new(), Vec::new());
    for line in lines(of, x).into_values() {
        let mut both: Vec<(f64, f64)> = line
            .iter()
            .filter_map(|(params, value)| {
                let other = values.iter().find(|(other, _)| {
                    selects(&finding.b, other)
                        && alike(finding, params, other)
                        && other.get(x) == params.get(x)
                })?;
                Some((at(params), value.median / other.1.median))
            })
            .collect();
        both.sort_by(|one, other| one.0.total_cmp(&other.0));
        if both.len() < 2 {
            continue;
        }
        let above = both.first().is_some_and(|(_, ratio)| *ratio > 1.0);
        let below = both.iter().find(|(_, ratio)| *ratio < 1.0);
        match below {
            Some((place, _)) if above => {
                numbers.push(*place);
                holds.push(
                    finding.from.is_none_or(|from| *place >= from)
                        && finding.to.is_none_or(|to| *place <= to),
                );
            }
            _ => holds.push(false),
        }
    }
    (numbers, holds)
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

fn summary(finding: &Finding, numbers: &[f64], holds: &[bool]) -> Judged {
    if holds.is_empty() {
        return Judged {
            verdict: Verdict::Unknown,
            number: None,
            text: "not enough points".to_owned(),
        };
    }
    let held = holds.iter().filter(|held| **held).count();
    let met = held as f64 >= finding.share * holds.len() as f64;
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
    if holds.len() > 1 {
        text.push_str(&format!(", holds for {held} of {}", holds.len()));
    }
    Judged {
        verdict: if met { Verdict::Met } else { Verdict::NotMet },
        number,
        text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::figures::parse;

    #[test]
    fn a_control_supports_a_reason_if_most_of_the_difference_is_gone() {
        let file = "paper = 'pb'\nrunner = 'ping'\n[axis.size]\nvalues = [1]\n[[figure]]\nname = 'x'\ntitle = ''\nasks = ''\n\
             found = ''\nmetric = 'm'\nx = 'size'\n[[figure.finding]]\ntext = ''\nshape = 'less'\nfactor = 1.0\n";
        let experiment = parse(file).unwrap();
        let finding = &experiment.figures[0].finding[0];
        let judged = |number: f64, verdict| Judged {
            verdict,
            number: Some(number),
            text: String::new(),
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
                };
                values.push((params.into(), middle));
            }
        }
        let judged = judge(&experiment.figures[0].finding[0], &values, "size", &[]);
        (judged.verdict, judged.number)
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
        let rising = [1.0, 2.0, 3.0, 8.0];
        let rises = "shape = 'rises'\nfactor = 8\na = { mode = 'poll' }";
        assert_eq!(of(rises, rising), Verdict::Met);
        assert_eq!(of(rises, [1.0, 9.0, 9.0, 7.0]), Verdict::NotMet);
        assert_eq!(
            of("shape = 'falls'\nfactor = 2", [8.0, 9.0, 9.0, 4.0]),
            Verdict::Met
        );
        assert_eq!(
            of("shape = 'falls'\nfactor = 2", [8.0, 1.0, 1.0, 5.0]),
            Verdict::NotMet
        );
        let same = "shape = 'same'\nfactor = 1.2\na = { mode = 'poll' }\nb = { mode = 'event' }";
        assert_eq!(of(same, rising), Verdict::Met);
        assert_eq!(judged(same, rising, [2.0; 4]).0, Verdict::NotMet);
        assert_eq!(of("shape = 'at-most'\nlimit = 8", rising), Verdict::Met);
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
}
