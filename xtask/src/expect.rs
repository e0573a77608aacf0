//! The expectation files in `tests/programs`, which define how unmodified programs are run and what they must print.
//!
//! `tests/programs/README.md` describes the format. This file parses it into [`Program`]s.

use crate::{Result, sh};
use regex_lite::Regex;
use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The contents of one file: a program and its cases.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// The name of the command.
    pub name: String,
    /// The Debian package that contains the program.
    pub package: String,
    /// A short description of what the program tests.
    pub shows: String,
    /// The cases, in the order in which they run.
    pub cases: Vec<Case>,
}

/// One run of a program, or of a server and its clients.
#[derive(Debug, Clone)]
pub struct Case {
    /// The name of the case, which is unique in its file.
    pub name: String,
    /// The command that is started first; the clients start when it listens. `None`: the clients need no server.
    pub server: Option<String>,
    /// The commands that run one after the other.
    pub clients: Vec<String>,
    /// The expected exit status of the server. `None`: the server does not exit by itself and is killed.
    pub server_exit: Option<Exit>,
    /// The expected exit status of each client. `None`: the clients do not exit by themselves and are killed.
    pub client_exit: Option<Exit>,
    /// Patterns that must match the output of the clients.
    pub stdout: Vec<Regex>,
    /// Patterns that must match the output of the server.
    pub server_stdout: Vec<Regex>,
    /// Patterns that must not match the output of either side.
    pub never: Vec<Regex>,
    /// Environment variables of both sides.
    pub env: Vec<(String, String)>,
    /// The time limit of the whole case.
    pub timeout: Duration,
    /// The time after its start at which the server is assumed to be ready. `None`: when its port is bound.
    pub settle: Option<Duration>,
    /// Files with fixed names that the programs leave. They are removed, because the programs of another user could not use them.
    pub removes: Vec<String>,
    /// The port of a program with a fixed port.
    pub port: Option<u16>,
    /// Whether to use IPv6.
    pub ipv6: bool,
    /// Whether the case takes so long that it runs only when requested.
    pub nightly: bool,
    /// Whether TCP packets between the two hosts are dropped, except those of the case's port. The case runs only between namespaces.
    pub firewall: bool,
    /// Why the case cannot pass, for each [`Place`].
    pub skip: [Option<String>; 2],
    /// The keys of cases in `tests/interop`.
    pub interop: Interop,
}

/// Additional keys of a case whose other end is siw.
#[derive(Debug, Clone, Default)]
pub struct Interop {
    /// The stack that is always the server. `None`: the case runs twice, once with each stack as the server.
    pub only: Option<Server>,
    /// Module parameters of siw.
    pub siw: Vec<(String, String)>,
    /// Patterns that must match anywarp's log.
    pub log: Vec<Regex>,
    /// Display filters of tshark, each of which must match a packet of the connection.
    pub wire: Vec<String>,
    /// Display filters that must match no packet.
    pub never_wire: Vec<String>,
    /// The least percentage of anywarp's large FPDUs that must begin at the start of a TCP segment.
    pub aligned: Option<usize>,
}

impl Interop {
    /// Returns whether the case checks the packets on the wire.
    pub fn looks_at_the_wire(&self) -> bool {
        !self.wire.is_empty() || !self.never_wire.is_empty() || self.aligned.is_some()
    }
}

/// The side whose program is the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// The guest, with the kernel's siw.
    Siw,
    /// The host, with anywarp.
    Anywarp,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Siw => "siw-serves",
            Self::Anywarp => "anywarp-serves",
        })
    }
}

/// An accepted exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Exactly this one.
    Code(i32),
    /// Any status.
    Any,
}

/// Where a case runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Both ends on the loopback interface.
    Loopback,
    /// The two ends in different network namespaces.
    Namespaces,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "loopback",
            Self::Namespaces => "netns",
        })
    }
}

impl Case {
    /// Returns a case with the default values of all keys.
    fn new() -> Self {
        Self {
            name: String::new(),
            server: None,
            clients: Vec::new(),
            server_exit: Some(Exit::Code(0)),
            client_exit: Some(Exit::Code(0)),
            stdout: Vec::new(),
            server_stdout: Vec::new(),
            never: Vec::new(),
            env: Vec::new(),
            timeout: Duration::from_secs(60),
            settle: None,
            removes: Vec::new(),
            port: None,
            ipv6: false,
            nightly: false,
            firewall: false,
            skip: [None, None],
            interop: Interop::default(),
        }
    }

    /// Returns why the case is not expected to pass at `place`.
    pub fn skipped(&self, place: Place) -> Option<&str> {
        let [loopback, namespaces] = &self.skip;
        match place {
            Place::Loopback => loopback.as_deref(),
            Place::Namespaces => namespaces.as_deref(),
        }
    }
}

/// Reads all files of `tests/programs`, in the order of their names.
pub fn read() -> Result<Vec<Program>> {
    read_folder("tests/programs")
}

/// Reads all files of a folder, in the order of their names.
pub fn read_folder(folder: &str) -> Result<Vec<Program>> {
    let dir = sh::root().join(folder);
    let mut files: Vec<_> = fs::read_dir(&dir)?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|e| e == "expect"));
    files.sort();
    files.iter().map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Result<Program> {
    let text = fs::read_to_string(path)?;
    parse(&text).map_err(|e| format!("{}: {e}", path.display()).into())
}

/// A case as written, before `each` expands it.
struct Draft {
    /// The number, the key and the value of each line.
    lines: Vec<(usize, String, String)>,
}

fn parse(text: &str) -> Result<Program> {
    let mut program = Program::default();
    let mut common: Vec<(usize, String, String)> = Vec::new();
    let mut drafts: Vec<Draft> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let (key, value) = (key.to_owned(), value.trim().to_owned());
        match (key.as_str(), drafts.last_mut()) {
            ("program", None) => program.name = value,
            ("package", None) => program.package = value,
            ("shows", None) => program.shows = value,
            ("case", _) => drafts.push(Draft {
                lines: vec![(number + 1, key, value)],
            }),
            (_, None) => common.push((number + 1, key, value)),
            (_, Some(draft)) => draft.lines.push((number + 1, key, value)),
        }
    }
    if program.name.is_empty() || program.package.is_empty() || program.shows.is_empty() {
        return Err("program, package and shows must stand before the first case".into());
    }
    for draft in drafts {
        let lines: Vec<_> = common.iter().chain(&draft.lines).cloned().collect();
        program.cases.extend(expand(&lines)?);
    }
    let mut names: Vec<&str> = program.cases.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    let before = names.len();
    names.dedup();
    if before == 0 || names.len() != before {
        return Err("a file needs cases, each with a name of its own".into());
    }
    Ok(program)
}

/// Returns one case for each value of the `each` line, or a single case without such a line.
fn expand(lines: &[(usize, String, String)]) -> Result<Vec<Case>> {
    let Some((_, _, each)) = lines.iter().find(|(_, key, _)| key == "each") else {
        return Ok(vec![one_case(lines)?]);
    };
    let mut words = each.split_whitespace();
    let Some(name) = words.next() else {
        return Err("each needs a name and values".into());
    };
    let marker = format!("{{{name}}}");
    words
        .map(|value| {
            let lines: Vec<_> = lines
                .iter()
                .map(|(n, key, text)| (*n, key.clone(), text.replace(&marker, value)))
                .collect();
            one_case(&lines)
        })
        .collect()
}

fn one_case(lines: &[(usize, String, String)]) -> Result<Case> {
    let mut case = Case::new();
    for (number, key, value) in lines {
        set(&mut case, key, value).map_err(|e| format!("line {number}: {key}: {e}"))?;
    }
    if case.clients.is_empty() {
        return Err(format!("case {} runs nothing", case.name).into());
    }
    Ok(case)
}

fn set(case: &mut Case, key: &str, value: &str) -> Result {
    let regex = || Regex::new(&format!("(?m){value}"));
    let reason = || {
        if value.is_empty() {
            Err("a skip needs a reason")
        } else {
            Ok(Some(value.to_owned()))
        }
    };
    match key {
        "case" => value.clone_into(&mut case.name),
        "each" => {}
        "server" => case.server = Some(value.to_owned()),
        "client" | "run" => case.clients.push(value.to_owned()),
        "server-exit" => case.server_exit = exit(value)?,
        "exit" => case.client_exit = exit(value)?,
        "stdout" => case.stdout.push(regex()?),
        "server-stdout" => case.server_stdout.push(regex()?),
        "never" => case.never.push(regex()?),
        "env" => {
            let (name, value) = value.split_once('=').ok_or("NAME=VALUE")?;
            case.env.push((name.to_owned(), value.to_owned()));
        }
        "timeout" => case.timeout = Duration::from_secs(value.parse()?),
        "removes" => case.removes.push(value.to_owned()),
        "settle" => case.settle = Some(Duration::from_millis(value.parse()?)),
        "port" => case.port = Some(value.parse()?),
        "ipv6" => case.ipv6 = true,
        "nightly" => case.nightly = true,
        "firewall" => case.firewall = true,
        "skip" => case.skip = [reason()?, reason()?],
        "only" => {
            case.interop.only = Some(match value {
                "siw-serves" => Server::Siw,
                "anywarp-serves" => Server::Anywarp,
                _ => return Err("siw-serves or anywarp-serves".into()),
            });
        }
        "siw" => {
            let (name, value) = value.split_once('=').ok_or("NAME=VALUE")?;
            case.interop.siw.push((name.to_owned(), value.to_owned()));
        }
        "log" => case.interop.log.push(regex()?),
        "wire" => case.interop.wire.push(value.to_owned()),
        "aligned" => case.interop.aligned = Some(value.parse()?),
        "never-wire" => case.interop.never_wire.push(value.to_owned()),
        "skip-loopback" => case.skip[0] = reason()?,
        "skip-netns" => case.skip[1] = reason()?,
        _ => return Err("no such key".into()),
    }
    Ok(())
}

/// Parses a status, `any`, or `stays` for a program that does not exit by itself.
fn exit(value: &str) -> Result<Option<Exit>> {
    Ok(match value {
        "stays" => None,
        "any" => Some(Exit::Any),
        code => Some(Exit::Code(code.parse()?)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "program x\npackage p\nshows s\n";

    #[test]
    fn all_files_can_be_read() {
        for program in read().unwrap() {
            for case in program.cases {
                let name = format!("{}/{}", program.name, case.name);
                let interop = format!("{:?}", case.interop);
                assert_eq!(interop, format!("{:?}", Interop::default()), "{name}");
            }
        }
        read_folder("tests/interop").unwrap();
    }

    #[test]
    fn lines_before_the_first_case_hold_for_all_and_each_makes_several() {
        let text = format!(
            "{HEAD}timeout 5\n# remark\n\ncase size_{{n}}\n  each n 1 2\n  server a -s {{n}}\n  \
             client b {{n}}\ncase other\n run c\n timeout 7\n server-exit stays\n"
        );
        let program = parse(&text).unwrap();

        let told: Vec<_> = program
            .cases
            .iter()
            .map(|c| (c.name.as_str(), c.server.as_deref(), c.timeout.as_secs()))
            .collect();
        assert_eq!(
            told,
            [
                ("size_1", Some("a -s 1"), 5),
                ("size_2", Some("a -s 2"), 5),
                ("other", None, 7)
            ]
        );
        assert_eq!(program.cases[1].clients, ["b 2"]);
        assert_eq!(program.cases[2].server_exit, None);
    }

    #[test]
    fn errors_are_reported_with_their_line() {
        let mistakes = [
            ("case a\nrun x\ntimeuot 3", "line 6: timeuot: no such key"),
            ("case a\nrun x\nskip", "line 6: skip: a skip needs a reason"),
            ("case a", "case a runs nothing"),
            (
                "case a\nrun x\ncase a\nrun y",
                "a file needs cases, each with a name of its own",
            ),
            ("", "a file needs cases, each with a name of its own"),
        ];
        for (text, error) in mistakes {
            let got = parse(&format!("{HEAD}{text}\n")).unwrap_err().to_string();
            assert_eq!(got, error);
        }
    }

    #[test]
    fn a_reason_may_hold_for_one_place() {
        let program = parse(&format!("{HEAD}case a\nrun x\nskip-netns no route\n")).unwrap();

        assert_eq!(
            program.cases[0].skipped(Place::Namespaces),
            Some("no route")
        );
        assert_eq!(program.cases[0].skipped(Place::Loopback), None);
    }
}
