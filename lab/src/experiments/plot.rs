//! Lines over a row of sizes or rates, as an SVG.

use std::fmt::Write as _;

/// Pixels.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 430.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

/// Distinct also without colours: each line has a pattern as well.
const COLOURS: [&str; 6] = [
    "#1b6ca8", "#c0392b", "#27853e", "#8e44ad", "#b8860b", "#444444",
];
const PATTERNS: [&str; 3] = ["", "7 4", "2 3"];

/// A line: its name, and a value for each place that has one.
pub(super) type Line<'a> = (&'a str, Vec<f64>);

/// Draws `lines` over `places`, on a logarithmic scale if `log`.
pub(super) fn draw(
    title: &str,
    unit: &str,
    places: &[String],
    lines: &[Line<'_>],
    log: bool,
) -> String {
    let values = || {
        let all = lines.iter().flat_map(|(_, values)| values.iter().copied());
        all.filter(|v| v.is_finite() && (!log || *v > 0.0))
    };
    let scale = |v: f64| if log { v.log10() } else { v };
    let top = values().fold(f64::MIN, f64::max);
    let least = values().fold(f64::MAX, f64::min);
    if places.is_empty() || top < least {
        return String::new();
    }
    let (low, high) = if log {
        (
            least.log10().floor(),
            top.log10().ceil().max(least.log10().floor() + 1.0),
        )
    } else {
        (0.0, (top * 1.05).max(f64::MIN_POSITIVE))
    };
    let step = (WIDTH - LEFT - RIGHT) / (places.len().max(2) - 1) as f64;
    let x = |n: usize| LEFT + step * n as f64;
    let y = |v: f64| {
        let part = (scale(v) - low) / (high - low);
        HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{title}</text>\n"
    );
    let marks: Vec<f64> = if log {
        let mut marks = Vec::new();
        let mut at = low;
        while at <= high + 0.01 {
            marks.push(10_f64.powf(at));
            at += 1.0;
        }
        marks
    } else {
        (0..=5).map(|n| high * f64::from(n) / 5.0).collect()
    };
    for mark in marks {
        let at = y(mark);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 5.0,
            at + 4.0,
            super::digits(mark)
        );
    }
    let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{unit}</text>", TOP - 4.0);
    // Names that would run into each other are left out.
    let every = places.len().div_ceil(12);
    for (n, place) in places.iter().enumerate().step_by(every) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{place}</text>",
            x(n),
            HEIGHT - BOTTOM + 18.0
        );
    }
    for (n, (name, values)) in lines.iter().enumerate() {
        let colour = COLOURS.get(n % COLOURS.len()).unwrap_or(&"black");
        let pattern = PATTERNS
            .get(n / COLOURS.len() % PATTERNS.len())
            .unwrap_or(&"");
        let points: Vec<String> = values
            .iter()
            .enumerate()
            .filter(|(_, v)| v.is_finite() && (!log || **v > 0.0))
            .map(|(n, v)| format!("{:.1},{:.1}", x(n), y(*v)))
            .collect();
        let line = TOP + 16.0 * n as f64;
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" stroke-dasharray=\"{pattern}\" points=\"{}\"/>\n\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{line:.1}\" y2=\"{line:.1}\" stroke=\"{colour}\" stroke-width=\"1.6\" \
             stroke-dasharray=\"{pattern}\"/><text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
            points.join(" "),
            WIDTH - RIGHT + 14.0,
            WIDTH - RIGHT + 40.0,
            WIDTH - RIGHT + 46.0,
            line + 4.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_and_place_is_drawn_and_what_is_missing_is_left_out() {
        let places = ["1 B".to_owned(), "2 B".to_owned()];
        let lines: [Line<'_>; 2] = [("one", vec![1.0, 1000.0]), ("two", vec![f64::NAN, 10.0])];
        let svg = draw("title", "MB/s", &places, &lines, true);
        assert_eq!(svg.matches("<polyline").count(), 2);
        for text in ["one", "two", "1 B", "2 B", "title", "MB/s", "1000"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN"));
        assert_eq!(draw("title", "MB/s", &[], &[], false), "");
    }
}
