//! Draws the results: one bar chart for each row, as an SVG file or inside an HTML page; or writes tables.
//!
//! A *row* compares several *parties*, each a program or a setting.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use anywarp_plot::{Bar, Panel};

use super::report::{Report, Seen, digits};

/// The format of a drawing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A picture.
    Svg,
    /// A page that includes the picture and the commands.
    Html,
    /// Tables.
    Markdown,
}

impl Format {
    /// Returns the format that the end of the file name selects.
    pub(crate) fn of(path: &Path) -> Result<Self, String> {
        match path.extension().and_then(OsStr::to_str) {
            Some("svg") => Ok(Self::Svg),
            Some("html" | "htm") => Ok(Self::Html),
            Some("md") => Ok(Self::Markdown),
            _ => Err(format!(
                "--report: {} does not end in .svg, .html or .md",
                path.display()
            )),
        }
    }
}

/// Writes the drawing.
pub(crate) fn draw(report: &Report, format: Format, path: &Path) -> io::Result<()> {
    let text = match format {
        Format::Html => page(report, &svg(report)?),
        Format::Markdown => tables(report),
        Format::Svg => svg(report)?,
    };
    fs::write(path, text)
}

/// Returns all values as tables.
fn tables(report: &Report) -> String {
    let mut text = format!(
        "<!-- made by `anywarp bench --report` -->\n# Benchmarks\n\n{}\n",
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
                .bounds
                .iter()
                .filter(|bound| bound.of == party.name && bound.value.is_some())
                .map(|bound| bound.text(row))
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

/// Returns the colour of a party: grey for plain sockets and memory, blue for the device, orange for others.
fn colour(name: &str, command: &str) -> (u8, u8, u8) {
    if name.starts_with("raw") || command.contains("bench-raw") {
        (0x8a, 0x8f, 0x98)
    } else if command.contains("anywarp ") {
        (0x2f, 0x6f, 0xde)
    } else {
        (0xd9, 0x8a, 0x2b)
    }
}

fn panel(row: &Seen) -> Panel {
    let note = if row.costs {
        "less is better"
    } else {
        "more is better"
    };
    let unit = if row.unit.is_empty() { "" } else { ", " };
    let bars = row.parties.iter().filter_map(|party| {
        let median = party.median?;
        let ratio = row
            .bounds
            .iter()
            .find(|b| b.of == party.name && b.kind == "ratio");
        let ratio = ratio.and_then(|bound| Some((&bound.by, bound.value?)));
        Some(Bar {
            name: party.name.clone(),
            colour: colour(&party.name, &party.command),
            median,
            least: party.least?,
            most: party.most?,
            value: match ratio {
                Some((by, ratio)) => format!("{} ({} × {by})", digits(median), digits(ratio)),
                None => digits(median),
            },
        })
    });
    Panel {
        title: format!("{}{unit}{}", row.what, row.unit),
        note: note.to_owned(),
        bars: bars.collect(),
    }
}

fn svg(report: &Report) -> io::Result<String> {
    let c = &report.conditions;
    let partial = if report.partial { " (interrupted)" } else { "" };
    let head = [
        format!(
            "anywarp {}{partial}: {}, {} processors, Linux {}, TCP {}; medians of {} runs, lines from least to most",
            report.version, c.cpu, c.processors, c.kernel, c.host_congestion_control, c.repeat,
        ),
        "grey: plain sockets and memory; blue: anywarp; orange: others".to_owned(),
    ];
    let panels = report.rows.iter().map(panel);
    let panels: Vec<Panel> = panels.filter(|panel| !panel.bars.is_empty()).collect();
    anywarp_plot::bars(&head, &panels)
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
            "seconds_since_1970":0},"rows":[{"name":"r","what":"w","unit":"µs","costs":true,"bounds":[],"parties":[
            {"name":"raw TCP","command":"x","there":true,"values":[4.0],"median":4.0,"least":4.0,"most":4.0,
             "waited":[],"numbers":[],"congestion":null,"failures":[]},
            {"name":"gone","command":"x","there":true,"values":[],"median":null,"least":null,"most":null,
             "waited":[],"numbers":[],"congestion":null,"failures":["why"]}]}]}"#;
        let report = Report::parse(text).unwrap();
        let drawing = svg(&report).unwrap();
        assert!(drawing.contains("raw TCP") && !drawing.contains("gone"));
        assert!(drawing.contains("a&lt;b") && !drawing.contains("a<b"));
        assert!(tables(&report).contains("| raw TCP | 4.00 | 4.00..4.00 |"));
        assert!(page(&report, &drawing).contains("<code>x</code>"));
    }
}
