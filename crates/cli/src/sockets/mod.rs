//! `anywarp sockets`: unmodified socket programs over RDMA.

pub(crate) mod args;
mod ask;
mod check;
mod env;
mod stat;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use sockets_base::rules::Policy;
use sockets_base::sources::{self, COMMAND, TAG};

use crate::cmd::{Failure, exec, find};
use crate::elf;
use crate::library::{Library, with_sockets};
use args::{Rules, Run, Sockets, Task};

/// Runs the selected subcommand.
pub(crate) fn run(args: &Sockets) -> Result<ExitCode, Failure> {
    match &args.task {
        Task::Run(args) => start(args),
        Task::Stat(args) => stat::run(args),
        Task::Check(args) => check::run(args),
        Task::Ask(args) => ask::run(args),
        Task::Env(args) => env::run(args),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Rules {
    /// Returns the value of the variable that passes the rules to the library: these rules, followed by the inherited ones.
    fn value(&self, inherited: Option<String>) -> Option<String> {
        // The rules are joined in one line, in which a comment would hide the following ones.
        let own = self.rules.iter().map(|rule| {
            let lines = rule.lines().map(|l| l.split('#').next().unwrap_or(""));
            lines.collect::<Vec<_>>().join("; ")
        });
        let own = own.collect::<Vec<_>>().join("; ");
        match (own.is_empty(), inherited.filter(|text| !text.is_empty())) {
            (true, inherited) => inherited,
            (false, None) => Some(own),
            // `program *` ends the program section of these rules before the inherited ones.
            (false, Some(before)) => Some(format!("{own}; program *; {before}")),
        }
    }

    /// Reads all rules that would apply to a program that is started with these rules.
    fn read(&self) -> Result<Policy, Failure> {
        let command = self.value(variable(COMMAND));
        let all = sources::all(|name| match name {
            COMMAND => command.clone(),
            name => variable(name),
        });
        sources::read(&all).map_err(|mistake| Failure::Rules(mistake.to_string()))
    }

    /// Returns the variables for a program.
    fn variables(&self, inherited: Option<String>) -> Vec<(&'static str, String)> {
        let rules = self.value(inherited).map(|value| (COMMAND, value));
        let tag = self.tag.clone().map(|tag| (TAG, tag));
        rules.into_iter().chain(tag).collect()
    }
}

/// Executes the program.
fn start(args: &Run) -> Result<ExitCode, Failure> {
    let Some((name, rest)) = args.started.parts() else {
        return Err(Failure::NotFound(String::new())); // clap requires a program
    };
    args.rules.read()?;
    let program = find(name)?;
    let preload = Library::sockets().map_err(Failure::Library)?;
    for obstacle in elf::obstacles(&program, &preload) {
        eprintln!("anywarp: warning: {obstacle}: its sockets remain kernel sockets");
    }
    let mut command = Command::new(&program);
    command
        .arg0(name)
        .args(rest)
        .env(
            "LD_PRELOAD",
            with_sockets(&preload, std::env::var_os("LD_PRELOAD")),
        )
        .envs(args.rules.variables(variable(COMMAND)));
    if args.log {
        command.env("ANYWARP_LOG", "info");
    }
    Err(exec(command))
}

/// Returns the names of a program in rules: the name of its file after links are resolved, and the given name if it is different.
fn names(program: &OsString) -> Vec<String> {
    let name = |path: &std::path::Path| Some(path.file_name()?.to_string_lossy().into_owned());
    let file = find(program).ok().and_then(|path| path.canonicalize().ok());
    let mut names: Vec<String> = file.as_deref().and_then(name).into_iter().collect();
    names.extend(name(std::path::Path::new(program)));
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(list: &[&str]) -> Rules {
        Rules {
            rules: list.iter().map(|r| (*r).to_owned()).collect(),
            tag: None,
        }
    }

    #[test]
    fn rules_of_the_command_line_are_one_line_before_those_of_an_outer_run() {
        assert_eq!(rules(&[]).value(None), None);
        assert_eq!(
            rules(&[]).value(Some("all tcp".to_owned())).unwrap(),
            "all tcp"
        );
        let two = rules(&["program x # why", "all tcp"]);
        assert_eq!(two.value(None).unwrap(), "program x ; all tcp");
        let outer = two.value(Some("all off".to_owned())).unwrap();
        assert_eq!(outer, "program x ; all tcp; program *; all off");
        assert!(Policy::default().read("t", &outer).is_ok());
    }

    #[test]
    fn an_error_is_shown_with_its_position() {
        let why = rules(&["all prefr"]).read().unwrap_err().to_string();
        assert!(
            why.starts_with("--rule:1:5: expected tcp, prefer, require or off, or for ")
                && why.contains("\n  all prefr\n      ^"),
            "{why}"
        );
    }

    #[test]
    fn a_program_is_matched_by_the_names_of_its_link_and_file() {
        assert_eq!(names(&"no-such-program".into()), ["no-such-program"]);
        assert!(names(&"/bin/sh".into()).contains(&"sh".to_owned()));
    }
}
