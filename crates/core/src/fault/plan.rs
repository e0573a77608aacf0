//! Reads a plan of faults from text.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::verbs::wc::Status;
use crate::verbs::wr::Op;
use crate::wire::rdmap::Opcode;
use crate::wire::{dgram, rd};

/// A plan of faults.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Seed of all random decisions.
    pub seed: u64,
    /// The faults of all requests and datagrams.
    pub link: Link,
    /// The faults of the requests and datagrams that match a rule.
    pub rules: Vec<Rule>,
    /// Whether a summary of the faults is printed when the process ends.
    pub summary: bool,
}

/// The faults of all requests and datagrams, as a bad cable causes them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Link {
    /// Probability that a datagram is lost.
    pub loss: f64,
    /// Probability that a datagram is duplicated.
    pub dup: f64,
    /// Probability that a datagram is overtaken by the next one.
    pub reorder: f64,
    /// Probability that one bit of a datagram is inverted.
    pub corrupt: f64,
    /// Probability that a request of a reliable queue pair ends its connection.
    pub kill: f64,
    /// Delay of each datagram, and of each request of a stream.
    pub delay: Duration,
    /// Largest amount by which a delay is shorter or longer than `delay`.
    pub jitter: Duration,
    /// Rate in bytes per second.
    pub rate: Option<u64>,
    /// The direction of the faults; `None`: both.
    pub dir: Option<Direction>,
}

/// Direction of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From this process.
    Tx,
    /// To this process.
    Rx,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tx => "tx",
            Self::Rx => "rx",
        })
    }
}

/// The queue pairs that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhichQp {
    /// All queue pairs.
    Any,
    /// The Nth queue pair that the process created, from 1.
    Nth(u32),
    /// The queue pair with this number.
    Number(u32),
}

/// The operation of a request or datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Send, with or without immediate.
    Send,
    /// RDMA Write.
    Write,
    /// Write-Record.
    WriteRecord,
    /// An RDMA Read Request.
    Read,
    /// An RDMA Read Response.
    ReadResponse,
    /// An Atomic Request.
    Atomic,
    /// An Atomic Response.
    AtomicResponse,
    /// An error report.
    Error,
    /// Acknowledgements and other control messages.
    Ack,
    /// Bind of a memory window.
    Bind,
    /// Local invalidate.
    Invalidate,
    /// A datagram that cannot be parsed.
    Unknown,
}

const WHATS: [(&str, What); 11] = [
    ("send", What::Send),
    ("write", What::Write),
    ("write-record", What::WriteRecord),
    ("read", What::Read),
    ("read-response", What::ReadResponse),
    ("atomic", What::Atomic),
    ("atomic-response", What::AtomicResponse),
    ("error", What::Error),
    ("ack", What::Ack),
    ("bind", What::Bind),
    ("invalidate", What::Invalidate),
];

impl What {
    /// The operation of a posted request. `records`: Writes of the queue pair are Write-Records.
    pub fn of_request(op: &Op, records: bool) -> Self {
        match op {
            Op::Send { .. } => Self::Send,
            Op::Write { .. } | Op::AtomicWrite { .. } if records => Self::WriteRecord,
            Op::Write { .. } | Op::AtomicWrite { .. } => Self::Write,
            Op::Read { .. } => Self::Read,
            Op::FetchAdd { .. } | Op::CompareSwap { .. } => Self::Atomic,
            Op::LocalInvalidate { .. } => Self::Invalidate,
            Op::Bind(_) => Self::Bind,
        }
    }

    /// The operation of a datagram.
    pub fn of_datagram(bytes: &[u8]) -> Self {
        let parsed = if rd::is_packet(bytes) {
            match rd::parse(bytes) {
                Ok((_, None)) => return Self::Ack,
                Ok((_, Some(inner))) => dgram::parse_covered(inner),
                Err(_) => return Self::Unknown,
            }
        } else {
            dgram::parse(bytes)
        };
        let Ok(datagram) = parsed else {
            return Self::Unknown;
        };
        match datagram.header.opcode() {
            Opcode::Write => Self::Write,
            Opcode::WriteRecord => Self::WriteRecord,
            Opcode::ReadRequest => Self::Read,
            Opcode::ReadResponse => Self::ReadResponse,
            Opcode::Send
            | Opcode::SendInvalidate
            | Opcode::SendSolicited
            | Opcode::SendSolicitedInvalidate
            | Opcode::Immediate
            | Opcode::ImmediateSolicited => Self::Send,
            Opcode::Terminate => Self::Error,
            Opcode::AtomicRequest => Self::Atomic,
            Opcode::AtomicResponse => Self::AtomicResponse,
            Opcode::Control => Self::Ack,
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WHATS.iter().find(|(_, what)| what == self);
        f.write_str(name.map_or("unknown", |(name, _)| name))
    }
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// The datagram is lost.
    Drop,
    /// One bit of the datagram is inverted.
    Corrupt,
    /// The datagram is duplicated.
    Dup,
    /// The next datagram overtakes this one.
    Reorder,
    /// The datagram or request is delayed.
    Delay(Duration),
    /// The rate is limited to this number of bytes per second.
    Slow(u64),
    /// The connection is reset.
    Kill,
    /// The request completes with this status and is not sent.
    Fail(Status),
    /// The peer is not ready to receive this number of times.
    Rnr(u32),
}

impl Action {
    /// Whether the action applies only to requests, whatever the kind of the queue pair.
    fn is_of_requests(self) -> bool {
        matches!(self, Self::Kill | Self::Fail(_) | Self::Rnr(_))
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.write_str("drop"),
            Self::Corrupt => f.write_str("corrupt"),
            Self::Dup => f.write_str("dup"),
            Self::Reorder => f.write_str("reorder"),
            Self::Delay(by) => write!(f, "delay={}us", by.as_micros()),
            Self::Slow(rate) => write!(f, "slow={rate}B/s"),
            Self::Kill => f.write_str("kill"),
            Self::Fail(status) => match STATUSES.iter().find(|(_, s)| s == status) {
                Some((name, _)) => write!(f, "error={name}"),
                None => write!(f, "error={status}"),
            },
            Self::Rnr(times) => write!(f, "rnr={times}"),
        }
    }
}

/// Completion errors that a rule can name.
const STATUSES: [(&str, Status); 13] = [
    ("local-length", Status::LocalLength),
    ("local-qp-operation", Status::LocalQpOperation),
    ("local-protection", Status::LocalProtection),
    ("flushed", Status::Flushed),
    ("window-bind", Status::WindowBind),
    ("bad-response", Status::BadResponse),
    ("remote-invalid-request", Status::RemoteInvalidRequest),
    ("remote-access", Status::RemoteAccess),
    ("remote-operation", Status::RemoteOperation),
    ("retry-exceeded", Status::RetryExceeded),
    ("rnr-retry-exceeded", Status::RnrRetryExceeded),
    ("remote-aborted", Status::RemoteAborted),
    ("general", Status::General),
];

/// One rule of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Line of the rule in the text.
    pub line: u32,
    /// The queue pairs that the rule applies to.
    pub qp: WhichQp,
    /// Address and port of the peer; `None`: any.
    pub peer: Option<(IpAddr, Option<u16>)>,
    /// The operation; `None`: any.
    pub what: Option<What>,
    /// The direction; `None`: both.
    pub dir: Option<Direction>,
    /// Only the Nth item that matches, from 1.
    pub nth: Option<u64>,
    /// Every Nth item that matches.
    pub every: Option<u64>,
    /// Probability of the action for an item that matches.
    pub chance: Option<f64>,
    /// Largest number of faults of the rule on one queue pair.
    pub times: u64,
    /// The fault.
    pub action: Action,
}

/// An error in the text of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// Line, from 1.
    pub line: u32,
    /// Character in it, from 1.
    pub column: u32,
    /// The error, and the valid forms.
    pub what: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "line {}, character {}: {}",
            self.line, self.column, self.what
        )
    }
}

impl std::error::Error for Wrong {}

// ---------------------------------------------------------------------- reading

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            link: Link {
                dir: Some(Direction::Tx),
                ..Link::default()
            },
            rules: Vec::new(),
            summary: true,
        }
    }
}

/// A piece of text and its position.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    line: u32,
    column: u32,
}

impl<'a> Word<'a> {
    fn wrong(&self, what: impl Into<String>) -> Wrong {
        Wrong {
            line: self.line,
            column: self.column,
            what: what.into(),
        }
    }

    /// The part after byte `at`.
    fn from(&self, at: usize) -> Self {
        let (before, text) = self.text.split_at_checked(at).unwrap_or((self.text, ""));
        let passed = u32::try_from(before.chars().count()).unwrap_or(u32::MAX);
        Self {
            text,
            line: self.line,
            column: self.column.saturating_add(passed),
        }
    }

    /// The part before byte `at`.
    fn until(&self, at: usize) -> Self {
        Self {
            text: self.text.get(..at).unwrap_or(self.text),
            ..*self
        }
    }

    /// The pieces between characters for which `is_border` holds; empty ones are left out.
    fn pieces(self, is_border: fn(char) -> bool) -> impl Iterator<Item = Word<'a>> {
        let mut rest = self;
        std::iter::from_fn(move || {
            loop {
                let start = rest.text.find(|c| !is_border(c))?;
                rest = rest.from(start);
                let end = rest.text.find(is_border).unwrap_or(rest.text.len());
                let piece = rest.until(end);
                rest = rest.from(end);
                if !piece.text.is_empty() {
                    return Some(piece);
                }
            }
        })
    }

    /// Name and value at the first `=`.
    fn pair(self) -> Result<(Self, Self), Wrong> {
        match self.text.find('=') {
            Some(at) => Ok((self.until(at), self.from(at + 1))),
            None => Err(self.wrong(format!("'{}' has no value: write NAME=VALUE", self.text))),
        }
    }

    fn number(&self) -> Result<u64, Wrong> {
        let parsed = match self.text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => self.text.parse(),
        };
        parsed.map_err(|_| self.wrong(format!("'{}' is not a whole number", self.text)))
    }

    fn count(&self) -> Result<u64, Wrong> {
        match self.number()? {
            0 => Err(self.wrong(format!("'{}' is not allowed: give 1 or more", self.text))),
            n => Ok(n),
        }
    }

    fn probability(&self) -> Result<f64, Wrong> {
        let (digits, scale) = match self.text.strip_suffix('%') {
            Some(digits) => (digits, 100.0),
            None => (self.text, 1.0),
        };
        match digits.parse::<f64>() {
            Ok(p) if (0.0..=scale).contains(&p) => Ok(p / scale),
            _ => Err(self.wrong(format!(
                "'{}' is not a probability: give 0 to 1, or 0% to 100%",
                self.text
            ))),
        }
    }

    /// A number and its unit.
    fn measured(&self, units: &[(&str, f64)], what: &str) -> Result<f64, Wrong> {
        let end = self
            .text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(self.text.len());
        let number = self.until(end).text.parse::<f64>();
        let unit = self.from(end);
        let scale = units.iter().find(|(name, _)| *name == unit.text);
        match (number, scale) {
            (Ok(n), Some((_, scale))) => Ok(n * scale),
            _ => {
                let names: Vec<_> = units.iter().map(|(name, _)| *name).collect();
                Err(self.wrong(format!(
                    "'{}' is not a {what}: give a number with one of the units {}",
                    self.text,
                    names.join(", ")
                )))
            }
        }
    }

    fn duration(&self) -> Result<Duration, Wrong> {
        let seconds = self.measured(&[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)], "duration")?;
        if seconds > 60.0 {
            return Err(self.wrong(format!("'{}' is longer than 60s", self.text)));
        }
        Ok(Duration::from_secs_f64(seconds))
    }

    fn rate(&self) -> Result<u64, Wrong> {
        let units = [
            ("B/s", 1.0),
            ("kB/s", 1e3),
            ("MB/s", 1e6),
            ("GB/s", 1e9),
            ("kbit/s", 1e3 / 8.0),
            ("Mbit/s", 1e6 / 8.0),
            ("Gbit/s", 1e9 / 8.0),
        ];
        let rate = self.measured(&units, "rate")?;
        if !(1.0..=1e12).contains(&rate) {
            return Err(self.wrong(format!("'{}' is not between 1B/s and 1000GB/s", self.text)));
        }
        Ok(rate as u64)
    }

    fn direction(&self) -> Result<Option<Direction>, Wrong> {
        match self.text {
            "tx" => Ok(Some(Direction::Tx)),
            "rx" => Ok(Some(Direction::Rx)),
            "both" => Ok(None),
            other => Err(self.wrong(format!("'{other}' is not a direction: use tx, rx or both"))),
        }
    }

    fn one_of<T: Copy>(&self, names: &[(&str, T)], what: &str) -> Result<T, Wrong> {
        let found = names.iter().find(|(name, _)| *name == self.text);
        found.map(|(_, value)| *value).ok_or_else(|| {
            let all: Vec<_> = names.iter().map(|(name, _)| *name).collect();
            self.wrong(format!(
                "'{}' is not one of the {what}: {}",
                self.text,
                all.join(", ")
            ))
        })
    }
}

impl Plan {
    /// Reads a plan. A line is a comment if it begins with `#`. Otherwise each of its parts between semicolons is a list of settings
    /// or a rule.
    ///
    /// # Errors
    /// The first error in the text.
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        let mut plan = Self::default();
        for (at, line) in text.lines().enumerate() {
            let line = Word {
                text: line,
                line: u32::try_from(at + 1).unwrap_or(u32::MAX),
                column: 1,
            };
            if line.text.trim_start().starts_with('#') {
                continue;
            }
            for part in line.pieces(|c| c == ';') {
                match part.text.find("->") {
                    Some(arrow) => {
                        let rule = rule(part.until(arrow), part.from(arrow + 2))?;
                        plan.rules.push(rule);
                    }
                    None => {
                        for setting in part.pieces(|c| c == ',' || c.is_whitespace()) {
                            plan.set(setting)?;
                        }
                    }
                }
            }
        }
        Ok(plan)
    }

    fn set(&mut self, setting: Word<'_>) -> Result<(), Wrong> {
        let (name, value) = setting.pair()?;
        let link = &mut self.link;
        match name.text {
            "seed" => self.seed = value.number()?,
            "loss" => link.loss = value.probability()?,
            "dup" => link.dup = value.probability()?,
            "reorder" => link.reorder = value.probability()?,
            "corrupt" => link.corrupt = value.probability()?,
            "kill" => link.kill = value.probability()?,
            "delay" => link.delay = value.duration()?,
            "jitter" => link.jitter = value.duration()?,
            "rate" => link.rate = Some(value.rate()?),
            "dir" => link.dir = value.direction()?,
            "summary" => self.summary = value.one_of(&[("on", true), ("off", false)], "choices")?,
            "qp" | "peer" | "op" | "nth" | "every" | "p" | "times" => {
                return Err(name.wrong(format!(
                    "'{}' is only allowed in a rule, which ends with '-> ACTION'",
                    name.text
                )));
            }
            other => {
                return Err(name.wrong(format!(
                    "'{other}' is not one of the settings: seed, loss, dup, reorder, corrupt, kill, delay, jitter, \
                     rate, dir, summary"
                )));
            }
        }
        Ok(())
    }
}

fn rule(matches: Word<'_>, action: Word<'_>) -> Result<Rule, Wrong> {
    let mut rule = Rule {
        line: matches.line,
        qp: WhichQp::Any,
        peer: None,
        what: None,
        dir: Some(Direction::Tx),
        nth: None,
        every: None,
        chance: None,
        times: u64::MAX,
        action: Action::Drop,
    };
    let mut rx = None;
    for word in matches.pieces(char::is_whitespace) {
        let (name, value) = word.pair()?;
        match name.text {
            "qp" => rule.qp = which_qp(value)?,
            "peer" => rule.peer = peer(value)?,
            "op" if value.text == "any" => rule.what = None,
            "op" => rule.what = Some(value.one_of(&WHATS, "operations")?),
            "dir" => {
                rule.dir = value.direction()?;
                rx = (rule.dir != Some(Direction::Tx)).then_some(value);
            }
            "nth" => rule.nth = Some(value.count()?),
            "every" => rule.every = Some(value.count()?),
            "p" => rule.chance = Some(value.probability()?),
            "times" => rule.times = value.count()?,
            other => {
                return Err(name.wrong(format!(
                    "'{other}' is not one of the matches: qp, peer, op, nth, every, p, times, dir"
                )));
            }
        }
    }
    let mut words = action.pieces(char::is_whitespace);
    let Some(word) = words.next() else {
        return Err(action.wrong("the action after '->' is missing"));
    };
    if let Some(more) = words.next() {
        return Err(more.wrong(format!(
            "'{}' is not allowed here: a rule has only one action",
            more.text
        )));
    }
    rule.action = self::action(word)?;
    if let (true, Some(dir)) = (rule.action.is_of_requests(), rx) {
        return Err(dir.wrong(format!(
            "'{}' applies only to requests that this process posts: use dir=tx",
            word.text
        )));
    }
    Ok(rule)
}

fn which_qp(value: Word<'_>) -> Result<WhichQp, Wrong> {
    if value.text == "any" {
        return Ok(WhichQp::Any);
    }
    let small = |n: u64| {
        u32::try_from(n)
            .map_err(|_| value.wrong(format!("'{}' is not a queue pair number", value.text)))
    };
    if value.text.starts_with('#') {
        return Ok(WhichQp::Nth(small(value.from(1).count()?)?));
    }
    Ok(WhichQp::Number(small(value.number()?)?))
}

fn peer(value: Word<'_>) -> Result<Option<(IpAddr, Option<u16>)>, Wrong> {
    if value.text == "any" {
        return Ok(None);
    }
    if let Ok(ip) = value.text.parse::<IpAddr>() {
        return Ok(Some((ip, None)));
    }
    match value.text.parse::<SocketAddr>() {
        Ok(addr) => Ok(Some((addr.ip(), Some(addr.port())))),
        Err(_) => Err(value.wrong(format!(
            "'{}' is not an address: use any, an IP address, or address:port ([address]:port for IPv6)",
            value.text
        ))),
    }
}

fn action(word: Word<'_>) -> Result<Action, Wrong> {
    match word.text {
        "drop" => return Ok(Action::Drop),
        "corrupt" => return Ok(Action::Corrupt),
        "dup" => return Ok(Action::Dup),
        "reorder" => return Ok(Action::Reorder),
        "kill" => return Ok(Action::Kill),
        "rnr" => return Ok(Action::Rnr(1)),
        _ => {}
    }
    let unknown = || {
        word.wrong(format!(
            "'{}' is not one of the actions: drop, corrupt, dup, reorder, delay=TIME, slow=RATE, kill, error=STATUS, \
             rnr, rnr=TIMES",
            word.text
        ))
    };
    let (name, value) = word.pair().map_err(|_| unknown())?;
    match name.text {
        "delay" => Ok(Action::Delay(value.duration()?)),
        "slow" => Ok(Action::Slow(value.rate()?)),
        "error" => Ok(Action::Fail(value.one_of(&STATUSES, "statuses")?)),
        "rnr" => {
            let times = value.count()?;
            Ok(Action::Rnr(u32::try_from(times).unwrap_or(u32::MAX)))
        }
        _ => Err(unknown()),
    }
}
