//! Draws what was measured: one panel of bars a row, in an SVG of its own or inside a page.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use super::report::{Report, Seen, digits};

/// Pixels: of the drawing, of the names on the left, of a line, of the space between panels.
const WIDTH: f64 = 860.0;
const NAMES: f64 = 190.0;
const VALUES: f64 = 190.0;
const LINE: f64 = 22.0;
const GAP: f64 = 26.0;

/// Writes the drawing; a name that ends with .html gets a page with the commands as well, one with .md tables.
pub(crate) fn draw(report: &Report, path: &Path) -> io::Result<()> {
    let kind = path.extension().unwrap_or_default().to_string_lossy();
    let text = match kind.as_ref() {
        "html" | "htm" => page(report, &svg(report)),
        "md" => tables(report),
        _ => svg(report),
    };
    fs::write(path, text)
}

/// All values as tables.
fn tables(report: &Report) -> String {
    let mut text = format!(
        "<!-- made by `anywarp bench --report` -->\n# Measured\n\n{}\n",
        report.head()
    );
    if report.partial {
        text.push_str("This run was interrupted.\n\n");
    }
    for row in &report.rows {
        let unit = if row.unit.is_empty() {
            String::new()
        } else {
            format!(", {}", row.unit)
        };
        let _ = writeln!(
            text,
            "## {}: {}{unit}\n\n| | median | least..most | | command |\n|---|---:|---:|---|---|",
            row.name, row.what
        );
        for party in row.parties.iter().filter(|p| p.there) {
            let held: Vec<String> = row
                .bars
                .iter()
                .filter(|bar| bar.of == party.name && bar.value.is_some())
                .map(|bar| bar.say(row))
                .collect();
            let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), digits);
            let _ = writeln!(
                text,
                "| {} | {} | {}..{} | {} | `{}` |",
                party.name,
                number(party.median),
                number(party.least),
                number(party.most),
                held.join("; "),
                party.command,
            );
        }
        text.push('\n');
    }
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Colours: plain sockets and memory, ours, others.
fn colour(name: &str, command: &str) -> &'static str {
    if name.starts_with("raw") || command.contains("bench-raw") {
        "#8a8f98"
    } else if command.contains("anywarp ") {
        "#2f6fde"
    } else {
        "#d98a2b"
    }
}

fn panel(out: &mut String, row: &Seen, mut y: f64) -> f64 {
    let note = if row.costs {
        "less is better"
    } else {
        "more is better"
    };
    let _ = writeln!(
        out,
        "<text x=\"0\" y=\"{:.0}\" class=\"t\">{}{}</text><text x=\"{WIDTH}\" y=\"{:.0}\" class=\"n e\">{note}</text>",
        y + 14.0,
        escape(&row.what),
        if row.unit.is_empty() {
            String::new()
        } else {
            format!(", {}", row.unit)
        },
        y + 14.0,
    );
    y += LINE;
    let most = row
        .parties
        .iter()
        .filter_map(|p| p.most)
        .fold(0.0, f64::max);
    let scale = if most > 0.0 {
        (WIDTH - NAMES - VALUES) / most
    } else {
        0.0
    };
    for party in &row.parties {
        let (Some(median), Some(least), Some(most)) = (party.median, party.least, party.most)
        else {
            continue;
        };
        let middle = y + LINE / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" class=\"e\">{}</text>\
             <rect x=\"{NAMES}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
             <path d=\"M{:.1} {middle:.1}H{:.1}\" class=\"s\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            NAMES - 8.0,
            middle + 4.0,
            escape(&party.name),
            y + 3.0,
            (median * scale).max(1.0),
            LINE - 6.0,
            colour(&party.name, &party.command),
            NAMES + least * scale,
            NAMES + most * scale,
            NAMES + most * scale + 6.0,
            middle + 4.0,
            {
                let mut text = digits(median);
                let bar = row
                    .bars
                    .iter()
                    .find(|b| b.of == party.name && b.kind == "ratio");
                if let Some((bar, ratio)) = bar.and_then(|b| Some((b, b.value?))) {
                    let _ = write!(text, " ({} × {})", digits(ratio), escape(&bar.by));
                }
                text
            },
        );
        y += LINE;
    }
    y + GAP
}

fn svg(report: &Report) -> String {
    let mut panels = String::new();
    let mut y = 44.0;
    for row in report
        .rows
        .iter()
        .filter(|row| row.parties.iter().any(|p| p.median.is_some()))
    {
        y = panel(&mut panels, row, y);
    }
    let c = &report.conditions;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-10 0 {} {:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <style>text{{fill:#222}}.t{{font-weight:bold;font-size:13px}}.n{{fill:#777}}.e{{text-anchor:end}}\
         .s{{stroke:#222;stroke-width:1.2}}</style>\n\
         <rect x=\"-10\" width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"0\" y=\"14\" class=\"n\">anywarp {}{}: {}, {} processors, Linux {}, TCP {}; medians of {} runs, \
         lines from least to most</text>\n\
         <text x=\"0\" y=\"30\" class=\"n\">grey: plain sockets and memory; blue: anywarp; orange: others</text>\n\
         {panels}</svg>\n",
        WIDTH + 20.0,
        y,
        escape(&report.version),
        if report.partial { " (interrupted)" } else { "" },
        escape(&c.cpu),
        c.processors,
        escape(&c.kernel),
        escape(&c.host_congestion_control),
        c.repeat,
    )
}

fn page(report: &Report, drawing: &str) -> String {
    let mut commands = String::new();
    for row in &report.rows {
        let _ = writeln!(
            commands,
            "<h3>{}: {}</h3><table>",
            escape(&row.name),
            escape(&row.what)
        );
        for party in &row.parties {
            let values: Vec<String> = party.values.iter().map(|v| digits(*v)).collect();
            let _ = writeln!(
                commands,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td><code>{}</code></td></tr>",
                escape(&party.name),
                party.median.map(digits).unwrap_or_default(),
                values.join(" "),
                escape(&party.command),
            );
        }
        commands.push_str("</table>\n");
    }
    format!(
        "<!doctype html>\n<meta charset=\"utf-8\"><title>anywarp bench</title>\n\
         <style>body{{max-width:900px;margin:2em auto;font:14px sans-serif}}td{{padding:1px 8px;vertical-align:top}}\
         code{{font-size:11px}}</style>\n<h1>anywarp bench</h1>\n{drawing}\n<h2>Values and commands</h2>\n{commands}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_has_every_party_with_a_value_and_is_escaped() {
        let text = r#"{"tool":"","version":"1","partial":false,"conditions":{"cpu":"a<b","processors":2,"kernel":"6",
            "load":"","pinned":"0,1","short":false,"repeat":3,"host_congestion_control":"reno","variables":[],
            "seconds_since_1970":0},"rows":[{"name":"r","what":"w","unit":"µs","costs":true,"bars":[],"parties":[
            {"name":"raw TCP","command":"x","there":true,"values":[4.0],"median":4.0,"least":4.0,"most":4.0,
             "waited":[],"said":[],"congestion":null,"failures":[]},
            {"name":"gone","command":"x","there":true,"values":[],"median":null,"least":null,"most":null,
             "waited":[],"said":[],"congestion":null,"failures":["why"]}]}]}"#;
        let report = Report::parse(text).unwrap();
        let drawing = svg(&report);
        assert!(drawing.contains("raw TCP") && !drawing.contains("gone"));
        assert!(drawing.contains("a&lt;b") && !drawing.contains("a<b"));
        assert!(tables(&report).contains("| raw TCP | 4.00 | 4.00..4.00 |"));
        assert!(page(&report, &drawing).contains("<code>x</code>"));
    }
}
