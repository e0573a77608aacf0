//! `cargo lab tutorial`: runs the commands of docs/tutorial.md and compares what they print.
//!
//! A block ```` ```c NAME ```` is written to the file NAME. In a block ```` ```console ```` each line with `$ ` is a command,
//! and the lines below it must appear in the output, in any order, before the next command is run. `…` stands for any text.

use crate::process::Process;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use xtask::{Result, sh};

/// The longest time until the output of a command is complete.
const LIMIT: Duration = Duration::from_secs(20);
/// The pause between two checks of the output.
const PAUSE: Duration = Duration::from_millis(20);

/// A command and the lines that it prints.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    command: String,
    output: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum Block {
    File(String, String),
    Console(Vec<Step>),
}

/// Runs all blocks of the page.
pub(crate) fn run() -> Result {
    let page = fs::read_to_string(sh::root().join("docs/tutorial.md"))?;
    let folder = sh::target().join("tutorial");
    fs::create_dir_all(&folder)?;
    let mut commands = 0;
    for block in blocks(&page)? {
        match block {
            Block::File(name, text) => fs::write(folder.join(name), text)?,
            Block::Console(steps) => {
                play(&folder, &steps)?;
                commands += steps.len();
            }
        }
    }
    println!("{commands} passed, 0 failed");
    Ok(())
}

/// Returns the blocks of a page that are files or commands.
fn blocks(page: &str) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```").filter(|kind| !kind.is_empty()) else {
            continue;
        };
        let body: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if kind == "console" {
            blocks.push(Block::Console(steps(&body)?));
        } else if let Some(name) = kind.strip_prefix("c ") {
            blocks.push(Block::File(name.to_owned(), body.join("\n") + "\n"));
        }
    }
    Ok(blocks)
}

fn steps(body: &[&str]) -> Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    for line in body {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step {
                command: command.to_owned(),
                output: Vec::new(),
            });
        } else {
            let step = steps
                .last_mut()
                .ok_or("tutorial: output before a command")?;
            step.output.push((*line).to_owned());
        }
    }
    Ok(steps)
}

/// Runs the commands of a block in one shell.
fn play(folder: &Path, steps: &[Step]) -> Result {
    let log = folder.join("output");
    let out = File::create(&log)?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Process::start(
        Command::new("bash")
            .current_dir(folder)
            .env(
                "PATH",
                format!("{}:{path}", sh::dist().join("bin").display()),
            )
            // The shell must not read the user's start-up file.
            .env("BASH_ENV", "")
            .stdin(Stdio::piped())
            .stdout(out.try_clone()?)
            .stderr(out),
    )?;
    let mut input = shell.stdin()?;
    // Background processes are killed when the shell exits.
    writeln!(input, "set -u; trap 'kill $(jobs -p) 2>/dev/null' EXIT")?;
    let mut expected = Vec::new();
    for step in steps {
        println!("$ {}", step.command);
        writeln!(input, "{}", step.command)?;
        expected.extend(step.output.iter().cloned());
        let begin = Instant::now();
        while let Some(missing) = missing(&fs::read_to_string(&log)?, &expected) {
            if begin.elapsed() > LIMIT {
                let text = fs::read_to_string(&log)?;
                return Err(
                    format!("tutorial: {}: no line {missing:?} in\n{text}", step.command).into(),
                );
            }
            sleep(PAUSE);
        }
    }
    // An example may fail on purpose, so only the output is checked.
    writeln!(input, "wait")?;
    drop(input);
    shell.status(LIMIT)?;
    Ok(())
}

/// Returns the first expected line without a matching line in the output. The order is not checked, because two ends print into it.
fn missing<'a>(output: &str, expected: &'a [String]) -> Option<&'a str> {
    let mut lines: Vec<&str> = output.lines().collect();
    for line in expected {
        let Some(at) = lines.iter().position(|seen| matches(seen, line)) else {
            return Some(line);
        };
        lines.remove(at);
    }
    None
}

/// Returns whether a line matches the expected one, in which `…` matches any text.
fn matches(line: &str, expected: &str) -> bool {
    let mut parts = expected.split('…');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = rest.get(at + part.len()..).unwrap_or_default();
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_files_and_commands() {
        let page =
            "text\n```c a.c\nint a;\n```\n```sh\nls\n```\n```console\n$ one\nx\ny\n$ two\n```\n";
        let step = |command: &str, output: &[&str]| Step {
            command: command.into(),
            output: output.iter().map(|o| (*o).to_owned()).collect(),
        };
        assert_eq!(
            blocks(page).unwrap(),
            [
                Block::File("a.c".into(), "int a;\n".into()),
                Block::Console(vec![step("one", &["x", "y"]), step("two", &[])]),
            ]
        );
        assert!(blocks("```console\nx\n```\n").is_err());
    }

    #[test]
    fn each_expected_line_needs_a_separate_line() {
        let expected = ["a…".to_owned(), "…c…e".to_owned(), "ab".to_owned()];
        assert_eq!(missing("bcde\nab\nab\n", &expected), None);
        assert_eq!(missing("bcde\nab\n", &expected), Some("ab"));
        assert!(matches("abc", "abc") && !matches("abcd", "abc") && !matches("abc", "abd"));
    }
}
