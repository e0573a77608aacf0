//! Which connections are upgraded: the rules of the configuration files, of `ANYWARP_SOCKETS`, and of `--rule`.
//!
//! ```text
//! program GLOB
//! listen|connect tcp ADDR[:PORT[-PORT]] [from|to ADDR]  tcp | prefer | require | off
//! bind|send      udp ADDR[:PORT[-PORT]]                 udp | datagram
//! all            tcp | prefer | require | off
//! set crc        on | off
//! ```
//!
//! Sources are looked at from the last to the first, and in each the first rule that matches decides.

use crate::sys;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

/// What is done with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Kernel TCP.
    Tcp,
    /// RDMA if the peer is known to understand it.
    Prefer,
    /// RDMA, or an error.
    Require,
    /// Not looked at.
    Off,
}

/// Where a rule applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Listeners.
    Listen,
    /// Connections that the program opens.
    Connect,
}

/// A part of the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// Each address.
    Any,
    /// Loopback addresses.
    SameHost,
    /// Addresses with these first bits.
    Prefix(IpAddr, u8),
}

impl Where {
    fn has(&self, addr: IpAddr) -> bool {
        match *self {
            Self::Any => true,
            Self::SameHost => addr.is_loopback(),
            Self::Prefix(prefix, bits) => {
                let bits = u32::from(bits);
                match (prefix, addr) {
                    (IpAddr::V4(a), IpAddr::V4(b)) => {
                        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                        u32::from(a) & mask == u32::from(b) & mask
                    }
                    (IpAddr::V6(a), IpAddr::V6(b)) => {
                        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                        u128::from(a) & mask == u128::from(b) & mask
                    }
                    _ => false,
                }
            }
        }
    }
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// `None`: both roles.
    pub role: Option<Role>,
    /// Names of programs; `*` stands for any characters.
    pub program: String,
    /// Addresses.
    pub at: Where,
    /// Ports.
    pub ports: (u16, u16),
    /// The other end's address: of `from` and `to`.
    pub other: Where,
    /// What is done.
    pub mode: Mode,
    /// Where it stands: source, and line of it.
    pub source: String,
    /// Its line, from 1.
    pub line: usize,
    /// Its text.
    pub text: String,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.source, self.line, self.text)
    }
}

/// A mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The source.
    pub source: String,
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1.
    pub column: usize,
    /// The line's text.
    pub text: String,
    /// What is wrong, and what would be right.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blank: String = self
            .text
            .chars()
            .take(self.column.saturating_sub(1))
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        write!(
            f,
            "{}:{}:{}: {}\n  {}\n  {blank}^",
            self.source, self.line, self.column, self.what, self.text
        )
    }
}

/// A configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// The rules, the first to look at first.
    pub rules: Vec<Rule>,
    /// Whether CRCs are asked for.
    pub crc: bool,
}

/// The words of a line with their columns; a `#` begins a comment.
fn words(line: &str) -> Vec<(usize, &str)> {
    let line = line.split('#').next().unwrap_or("");
    let mut all = Vec::new();
    let mut at = 0;
    for part in line.split([' ', '\t']) {
        if !part.is_empty() {
            all.push((line.get(..at).map_or(0, |s| s.chars().count()) + 1, part));
        }
        at += part.len() + 1;
    }
    all
}

fn place(word: &str) -> Result<(Where, Option<(u16, u16)>), String> {
    let ports = |text: &str| -> Result<(u16, u16), String> {
        let (a, b) = text.split_once('-').unwrap_or((text, text));
        match (a.parse(), b.parse()) {
            (Ok(a), Ok(b)) if a <= b => Ok((a, b)),
            _ => Err(format!(
                "{text} is not a port, or a range of ports such as 8000-8010"
            )),
        }
    };
    let host = |text: &str| -> Result<Where, String> {
        match text {
            "*" => return Ok(Where::Any),
            "@same-host" => return Ok(Where::SameHost),
            _ => {}
        }
        let (addr, bits) = match text.split_once('/') {
            Some((addr, bits)) => (addr, Some(bits)),
            None => (text, None),
        };
        let addr: IpAddr = addr.trim_matches(['[', ']']).parse().map_err(|_| {
            format!("{text} is no address: write 10.0.0.0/8, an address, * or @same-host")
        })?;
        let most = if addr.is_ipv4() { 32 } else { 128 };
        let bits = match bits.map(str::parse::<u8>) {
            None => most,
            Some(Ok(bits)) if bits <= most => bits,
            Some(_) => return Err(format!("a prefix of this address has 0 to {most} bits")),
        };
        Ok(Where::Prefix(addr, bits))
    };
    // IPv6 addresses with a port stand in brackets.
    if let Some(rest) = word.strip_prefix('[') {
        let Some((addr, behind)) = rest.split_once(']') else {
            return Err("a bracket is open: write [fd00::1]:80".to_owned());
        };
        let (bits, port) = match behind.split_once(':') {
            Some((bits, port)) => (bits, Some(port)),
            None => (behind, None),
        };
        return Ok((
            host(&format!("{addr}{bits}"))?,
            port.map(ports).transpose()?,
        ));
    }
    match word.split_once(':') {
        Some((addr, port)) if !port.contains(':') => Ok((host(addr)?, Some(ports(port)?))),
        _ => Ok((host(word)?, None)),
    }
}

fn mode(word: &str) -> Option<Mode> {
    Some(match word {
        "tcp" => Mode::Tcp,
        "prefer" => Mode::Prefer,
        "require" => Mode::Require,
        "off" => Mode::Off,
        _ => return None,
    })
}

impl Policy {
    /// Puts the rules of `text` before those that are there.
    ///
    /// # Errors
    /// The first mistake.
    pub fn read(&mut self, source: &str, text: &str) -> Result<(), Mistake> {
        let mut program = "*".to_owned();
        let mut rules = Vec::new();
        for (i, line) in text.split(['\n', ';']).enumerate() {
            let line = line.trim_end();
            let words = words(line);
            let mistake = |column: usize, what: String| Mistake {
                source: source.to_owned(),
                line: i + 1,
                column,
                text: line.to_owned(),
                what,
            };
            let end = line.chars().count() + 1;
            let Some((column, first)) = words.first().copied() else {
                continue;
            };
            let nth = |n: usize| words.get(n).copied().unwrap_or((end, ""));
            let over = |n: usize| match words.get(n) {
                Some((column, word)) => Err(mistake(
                    *column,
                    format!("nothing is expected here, but there is {word}"),
                )),
                None => Ok(()),
            };
            let modes = |(column, word): (usize, &str)| {
                mode(word).ok_or_else(|| {
                    mistake(column, "expected tcp, prefer, require or off".to_owned())
                })
            };
            let mut rule = Rule {
                role: None,
                program: program.clone(),
                at: Where::Any,
                ports: (0, u16::MAX),
                other: Where::Any,
                mode: Mode::Tcp,
                source: source.to_owned(),
                line: i + 1,
                text: line.trim_start().to_owned(),
            };
            match first {
                "program" => {
                    let (column, name) = nth(1);
                    if name.is_empty() {
                        return Err(mistake(
                            column,
                            "expected the name of a program, with * for any characters".to_owned(),
                        ));
                    }
                    over(2)?;
                    name.clone_into(&mut program);
                }
                "all" => {
                    rule.mode = modes(nth(1))?;
                    over(2)?;
                    rules.push(rule);
                }
                "listen" | "connect" => {
                    rule.role = Some(if first == "listen" {
                        Role::Listen
                    } else {
                        Role::Connect
                    });
                    let (column, kind) = nth(1);
                    if kind != "tcp" {
                        return Err(mistake(column, format!("expected tcp behind {first}")));
                    }
                    let (column, word) = nth(2);
                    let (at, ports) = place(word).map_err(|what| mistake(column, what))?;
                    rule.at = at;
                    rule.ports = ports.unwrap_or((0, u16::MAX));
                    let mut next = 3;
                    if matches!(nth(3).1, "from" | "to") {
                        let (column, word) = nth(4);
                        let (other, ports) = place(word).map_err(|what| mistake(column, what))?;
                        if ports.is_some() {
                            return Err(mistake(
                                column,
                                "an address without port is expected here".to_owned(),
                            ));
                        }
                        rule.other = other;
                        next = 5;
                    }
                    rule.mode = modes(nth(next))?;
                    over(next + 1)?;
                    rules.push(rule);
                }
                "set" => {
                    let (column, name) = nth(1);
                    let (at, value) = nth(2);
                    match (name, value) {
                        ("crc", "on") => self.crc = true,
                        ("crc", "off") => self.crc = false,
                        ("crc", _) => return Err(mistake(at, "expected on or off".to_owned())),
                        _ => {
                            return Err(mistake(
                                column,
                                "expected the name of a setting: crc".to_owned(),
                            ));
                        }
                    }
                    over(3)?;
                }
                _ => {
                    return Err(mistake(
                        column,
                        "expected program, listen, connect, all or set".to_owned(),
                    ));
                }
            }
        }
        rules.append(&mut self.rules);
        self.rules = rules;
        Ok(())
    }

    /// The rule that decides about an address: of a listener, or of the peer to connect to.
    pub fn rule(
        &self,
        role: Role,
        program: &str,
        addr: SocketAddr,
        other: Option<IpAddr>,
    ) -> Option<&Rule> {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        self.rules.iter().find(|r| {
            r.role.is_none_or(|of| of == role)
                && matches(&r.program, program)
                && r.at.has(addr.ip())
                && (r.ports.0..=r.ports.1).contains(&addr.port())
                && (r.other == Where::Any || other.is_some_and(|o| r.other.has(o.to_canonical())))
        })
    }
}

/// Whether a name matches a pattern with `*`.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(rest) = name.strip_prefix(head) else {
        return false;
    };
    if tail.is_empty() {
        return true;
    }
    rest.char_indices()
        .map(|(i, _)| i)
        .chain(std::iter::once(rest.len()))
        .any(|i| rest.get(i..).is_some_and(|r| matches(tail, r)))
}

// ---------------------------------------------------------------------- of this process

#[derive(Debug)]
struct Mine {
    policy: Policy,
    program: String,
}

static MINE: OnceLock<Mine> = OnceLock::new();

/// Rules that stand behind all others.
pub const DEFAULT: &str = "all prefer";

/// The sources of rules in the order in which they are read: name and text.
pub fn sources() -> Vec<(String, String)> {
    let mut all = vec![("default".to_owned(), DEFAULT.to_owned())];
    let mut files = vec![std::path::PathBuf::from("/etc/anywarp/sockets.conf")];
    let home = std::env::var_os("XDG_CONFIG_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| Some(std::path::PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    files.extend(home.map(|h| h.join("anywarp/sockets.conf")));
    for file in files {
        if let Ok(text) = std::fs::read_to_string(&file) {
            all.push((file.display().to_string(), text));
        }
    }
    if let Ok(value) = std::env::var("ANYWARP_SOCKETS")
        && !value.is_empty()
    {
        // A value with a slash and no blank is a file.
        if value.contains('/') && !value.contains([' ', ';']) {
            let text = std::fs::read_to_string(&value);
            all.push((
                value.clone(),
                text.unwrap_or_else(|e| format!("cannot read {value}: {e}")),
            ));
        } else {
            all.push(("ANYWARP_SOCKETS".to_owned(), value));
        }
    }
    all
}

/// The rules of this process.
///
/// A program with more rights than its caller has none, so that all its sockets stay plain: the caller's variables could name
/// a file that the caller may not read, and a mistake in it is shown with its line.
fn load(has_more_rights: bool) -> Policy {
    let mut policy = Policy::default();
    if has_more_rights {
        return policy;
    }
    for (source, text) in sources() {
        if let Err(mistake) = policy.read(&source, &text) {
            // The program runs on plain sockets rather than by half of the rules.
            crate::log::always(&format!("{mistake}\nall sockets stay plain"));
            policy.rules.clear();
            break;
        }
    }
    policy
}

fn mine() -> &'static Mine {
    MINE.get_or_init(|| {
        let policy = load(sys::has_more_rights_than_its_caller());
        let program = std::fs::read_link("/proc/self/exe").ok();
        let program = program.and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
        Mine {
            policy,
            program: program.unwrap_or_default(),
        }
    })
}

/// What this process does with a listener or a connection.
pub fn decide(role: Role, addr: SocketAddr) -> Mode {
    let mine = mine();
    // Its child is killed by a filter for a call too many, and its connections move between processes.
    if mine.program == "sshd" {
        return Mode::Tcp;
    }
    mine.policy
        .rule(role, &mine.program, addr, None)
        .map_or(Mode::Tcp, |r| r.mode)
}

/// Whether this process asks for CRCs.
pub fn crc() -> bool {
    mine().policy.crc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Policy {
        let mut p = Policy::default();
        p.read("t", text).unwrap_or_else(|e| panic!("{e}"));
        p
    }

    #[test]
    fn a_program_with_more_rights_than_its_caller_has_no_rules() {
        assert_eq!(connect(&load(true), "redis-cli", "127.0.0.1:6379"), None);
    }

    fn connect(p: &Policy, program: &str, addr: &str) -> Option<Mode> {
        p.rule(Role::Connect, program, addr.parse().unwrap(), None)
            .map(|r| r.mode)
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let p = read(
            "program nginx  # clients plain\nlisten tcp *:80 tcp\nconnect tcp 10.0.0.0/8:6379-6380 require\n\
             connect tcp 10.0.0.0/8 prefer\nprogram *\nconnect tcp [fd00::]/16:80 off; all tcp",
        );
        assert_eq!(connect(&p, "nginx", "10.1.2.3:6380"), Some(Mode::Require));
        assert_eq!(connect(&p, "nginx", "10.1.2.3:6381"), Some(Mode::Prefer));
        assert_eq!(connect(&p, "nginx", "11.1.2.3:6381"), Some(Mode::Tcp));
        assert_eq!(connect(&p, "curl", "10.1.2.3:6380"), Some(Mode::Tcp));
        assert_eq!(connect(&p, "curl", "[fd00::7]:80"), Some(Mode::Off));
        assert_eq!(connect(&p, "curl", "[::ffff:10.1.2.3]:80"), Some(Mode::Tcp));
        let listen = p.rule(Role::Listen, "nginx", "0.0.0.0:80".parse().unwrap(), None);
        assert_eq!(listen.unwrap().line, 2);
    }

    #[test]
    fn the_source_that_is_read_last_is_looked_at_first() {
        let mut p = read("all tcp");
        p.read("u", "all prefer").unwrap();
        assert_eq!(connect(&p, "x", "1.2.3.4:5"), Some(Mode::Prefer));
    }

    #[test]
    fn names_match_with_stars() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("redis-*", "redis-server", true),
            ("*vlc", "cvlc", true),
            ("*vlc", "vlcx", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("nginx", "nginx2", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_mistake_has_its_place() {
        for (text, line, column) in [
            ("all tcp\n  conect tcp * tcp", 2, 3),
            ("connect udp * tcp", 1, 9),
            ("connect tcp 10.0.0.0/33 tcp", 1, 13),
            ("connect tcp *:80-70 tcp", 1, 13),
            ("connect tcp *:80 tpc", 1, 18),
            ("connect tcp *:80", 1, 17),
            ("connect tcp *:80 tcp more", 1, 22),
            ("listen tcp *:80 from 1.2.3.4:5 tcp", 1, 22),
            ("set crc maybe", 1, 9),
            ("program", 1, 8),
        ] {
            let e = Policy::default().read("f", text).expect_err(text);
            assert_eq!((e.line, e.column), (line, column), "{e}");
            assert!(e.to_string().ends_with('^'));
        }
    }
}
