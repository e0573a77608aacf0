//! `anywarp doctor`: checks the machine and the device, and whether a program will find the device.

mod checks;
mod program;
mod self_test;

use std::process::ExitCode;

use serde_json::{Value, json};

use super::Failure;
use crate::cli::Doctor;
use crate::library::Library;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Works.
    Ok,
    /// Works, but could be improved.
    Warn,
    /// Does not work.
    Fail,
}

impl Level {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line of the report.
#[derive(Debug)]
struct Line {
    level: Level,
    topic: &'static str,
    found: String,
    /// Advice, which every line that is not ok has.
    advice: Option<String>,
}

impl Line {
    fn ok(topic: &'static str, found: impl Into<String>) -> Self {
        Self {
            level: Level::Ok,
            topic,
            found: found.into(),
            advice: None,
        }
    }

    fn warn(topic: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Warn,
            topic,
            found: found.into(),
            advice: Some(advice.into()),
        }
    }

    fn fail(topic: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Fail,
            topic,
            found: found.into(),
            advice: Some(advice.into()),
        }
    }

    fn is_fail(&self) -> bool {
        self.level == Level::Fail
    }

    fn print(&self) {
        println!("{:<4}  {}: {}", self.level.as_str(), self.topic, self.found);
        if let Some(advice) = &self.advice {
            println!("      -> {advice}");
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "level": self.level.as_str(),
            "topic": self.topic,
            "found": self.found,
            "advice": self.advice,
        })
    }
}

/// Receives the lines of the report. Prints them at once, or collects them for the JSON object.
struct Report {
    json: bool,
    lines: Vec<Line>,
}

impl Report {
    fn add(&mut self, line: Line) {
        if !self.json {
            line.print();
        }
        self.lines.push(line);
    }

    fn count(&self, level: Level) -> usize {
        self.lines.iter().filter(|line| line.level == level).count()
    }

    fn finish(&self) -> ExitCode {
        let failed = self.count(Level::Fail);
        if self.json {
            let lines: Vec<Value> = self.lines.iter().map(Line::to_json).collect();
            println!("{}", json!({ "ok": failed == 0, "lines": lines }));
        } else {
            println!(
                "{} ok, {} warn, {failed} fail",
                self.count(Level::Ok),
                self.count(Level::Warn)
            );
        }
        ExitCode::from(u8::from(failed > 0))
    }
}

/// Runs all checks, then the self-test.
pub(crate) fn run(args: &Doctor) -> Result<ExitCode, Failure> {
    let mut report = Report {
        json: args.json,
        lines: Vec::new(),
    };
    let library = Library::find();
    if let Some(name) = &args.program {
        let library = library.map_err(Failure::Library)?;
        for line in program::lines(name, &library)? {
            report.add(line);
        }
        return Ok(report.finish());
    }

    for line in checks::machine() {
        report.add(line);
    }
    match library {
        Err(missing) => report.add(Line::fail(
            "library",
            missing.to_string(),
            "reinstall anywarp",
        )),
        Ok(library) => {
            for line in checks::library(&library) {
                report.add(line);
            }
            let (lines, usable) = self_test::device(&library);
            for line in lines {
                report.add(line);
            }
            if usable && !args.no_self_test && checks::has_loopback() {
                report.add(self_test::run(&library));
            }
        }
    }
    Ok(report.finish())
}
