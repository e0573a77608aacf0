//! The language of the configuration of `anywarp sockets`.
//!
//! ```text
//! program GLOB [tag TAG]                                  # applies to the rules and settings up to the next such line
//! listen|connect tcp ADDR[:PORT[-PORT]] [from ADDR]       tcp | prefer | require | off
//! connect tcp LOCAL to ADDR[:PORT[-PORT]]                 the same modes, for connections from the address LOCAL
//! bind|send      udp ADDR[:PORT[-PORT]]                   udp | off | DATAGRAMS [require]
//! all                                                     any of these modes
//! DATAGRAMS: datagram | record | reliable
//! set crc on|off;  set window SIZE[..SIZE];  set io_uring hide|leave;  set fallback log|silent|error
//! set ask TIME|off;  set pool SIZE;  set share process|off;  set spin TIME|off;  set memory SIZE|off
//! ```
//!
//! The source that was read last has precedence. Within a source the first matching rule decides.

use crate::host::Host;
use crate::place::{self, Where};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// How a connection or a datagram is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Kernel TCP.
    Tcp,
    /// RDMA if the peer is known to accept it.
    Prefer,
    /// RDMA, or an error.
    Require,
    /// The library ignores the socket.
    Off,
    /// Kernel UDP.
    Udp,
    /// Datagrams are sent as Sends of datagram-iWARP to peers that are known to accept them.
    Datagram,
    /// Datagrams are sent as Write-Records of datagram-iWARP to peers that are known to accept them.
    Record,
    /// Datagrams are sent as reliable Sends of datagram-iWARP to peers that are known to accept them. Lost ones are
    /// retransmitted.
    Reliable,
}

impl Mode {
    const TCP: [Self; 4] = [Self::Tcp, Self::Prefer, Self::Require, Self::Off];
    const UDP: [Self; 5] = [
        Self::Udp,
        Self::Datagram,
        Self::Record,
        Self::Reliable,
        Self::Off,
    ];

    /// Returns the keyword of the mode.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::Off => "off",
            Self::Udp => "udp",
            Self::Datagram => "datagram",
            Self::Record => "record",
            Self::Reliable => "reliable",
        }
    }

    /// Returns whether datagrams become messages.
    pub fn is_messages(self) -> bool {
        matches!(self, Self::Datagram | Self::Record | Self::Reliable)
    }

    /// Returns whether the mode allows an upgrade of connections or datagrams.
    pub fn upgrades(self) -> bool {
        match self {
            Self::Prefer | Self::Require => true,
            Self::Datagram | Self::Record | Self::Reliable => true,
            Self::Tcp | Self::Off | Self::Udp => false,
        }
    }
}

/// The kind of operation that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Listeners.
    Listen,
    /// Connections that the program opens.
    Connect,
    /// UDP sockets that the program binds.
    Bind,
    /// Datagrams that the program sends.
    Send,
}

impl Role {
    /// Returns whether an `all` rule with this mode applies to the role.
    fn is_for(self, mode: Mode) -> bool {
        match self {
            Self::Listen | Self::Connect => Mode::TCP.contains(&mode),
            Self::Bind | Self::Send => Mode::UDP.contains(&mode),
        }
    }
}

/// The processes that a rule applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct For {
    /// A pattern for names of programs, in which `*` matches any characters.
    program: String,
    /// The tag that a process must have, if any.
    tag: Option<String>,
}

impl Who {
    /// Returns whether all connections of the process stay plain, regardless of the rules. This holds for sshd, which passes
    /// connections between processes and kills a child process that makes an unexpected system call, and for rsync, which reads a connection
    /// in one process and writes to it in another.
    pub fn is_left_alone(&self) -> bool {
        let alone = ["sshd", "sshd-session", "sshd-auth", "rsync"];
        self.names.iter().any(|name| alone.contains(&name.as_str()))
    }
}

impl For {
    fn has(&self, who: &Who) -> bool {
        who.names.iter().any(|name| matches(&self.program, name))
            && (self.tag.is_none() || self.tag == who.tag)
    }
}

/// The properties of a process that rules refer to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Who {
    /// The file name of the executable, and that of the link or script by which it was started, both without directories.
    pub names: Vec<String>,
    /// The value of `ANYWARP_SOCKETS_TAG`.
    pub tag: Option<String>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    whom: For,
    /// `None`: all roles that the mode applies to.
    role: Option<Role>,
    /// The addresses that the rule matches: for `listen` and `bind` the local ones, for `connect` and `send` those of the peer.
    at: Where,
    ports: (u16, u16),
    /// The addresses after `from`, or before `to`: those of the other end of the connection.
    other: Where,
    /// The mode of the matching connections or datagrams.
    pub mode: Mode,
    /// `require` for datagrams: peers are assumed to accept messages, without a query.
    pub unasked: bool,
    /// The name of the source.
    pub source: String,
    /// The line number, from 1.
    pub line: usize,
    /// The text of the rule.
    pub text: String,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.source, self.line, self.text)
    }
}

/// The result of checking the rules when a socket begins to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// All connections have the same mode.
    All(Mode),
    /// The mode depends on the addresses of each connection.
    Each,
}

/// What happens if a connection that a rule would upgrade cannot be upgraded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// It stays plain.
    Silent,
    /// It stays plain, and a line is logged.
    Log,
    /// `connect` fails.
    Error,
}

/// The settings of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Request CRCs from the peer.
    pub crc: bool,
    /// The receive window in payload bytes: initial and maximum.
    pub window: (u32, u32),
    /// Refuse `io_uring_setup`, because the library cannot intercept I/O through a ring.
    pub hides_io_uring: bool,
    /// What happens if a connection that a rule would upgrade cannot be.
    pub fallback: Fallback,
    /// Microseconds to wait for another host's answer to whether it accepts RDMA. 0: other hosts are not asked.
    pub ask: u32,
    /// The most memory in bytes for received bytes that the program has not read, of all streams of the process.
    pub pool: u32,
    /// A stream without unread bytes has no receive buffer, because the streams of the process share the buffers.
    pub shares: bool,
    /// Microseconds for which a thread may poll for an answer before it sleeps. 0: it sleeps at once.
    pub spin: u32,
    /// A stream between two processes of one host offers shared memory for further payload after it has sent this number of bytes.
    /// 0: it never offers memory.
    pub memory: u32,
}

/// The longest time of [`Settings::spin`] in microseconds: about what it takes to wake a thread on a processor that sleeps.
pub const SPIN_MOST: u32 = 100;
/// The smallest pool in bytes: a few buffers.
pub const POOL_LEAST: u32 = 64 << 10;
/// The largest value of [`Settings::memory`].
pub const MEMORY_MOST: u32 = 1 << 30;
/// The largest pool in bytes.
pub const POOL_MOST: u32 = 1 << 30;
/// The smallest window in bytes: one page, so that a request of usual length fits one message.
pub const WINDOW_LEAST: u32 = 4 << 10;
/// The largest window in bytes. This much may be buffered for a program that does not read.
pub const WINDOW_MOST: u32 = 64 << 20;

impl Default for Settings {
    fn default() -> Self {
        Self {
            crc: false,
            // The initial window is about what the kernel accepts for a peer that does not read, because there are programs of which both ends
            // send before they read. Larger maximums do not increase the throughput.
            window: (256 << 10, 1 << 20),
            hides_io_uring: true,
            fallback: Fallback::Silent,
            ask: 1000,
            pool: 64 << 20,
            shares: true,
            // The time that an answer takes on one host if no thread has to be woken for it, plus a margin.
            spin: 50,
            // To make and map the memory takes as long as to send about this much.
            memory: 1 << 20,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setting {
    Crc(bool),
    Window(u32, u32),
    IoUring(bool),
    Fallback(Fallback),
    Ask(u32),
    Pool(u32),
    Share(bool),
    Spin(u32),
    Memory(u32),
}

/// A mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The name of the source.
    pub source: String,
    /// The line number, from 1. 0: the mistake concerns the whole source.
    pub line: usize,
    /// The column number, from 1.
    pub column: usize,
    /// The text of the line.
    pub text: String,
    /// The description, with what was expected.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            return write!(f, "{}: {}", self.source, self.what);
        }
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

impl std::error::Error for Mistake {}

/// A configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// In the order in which they are checked.
    rules: Vec<Rule>,
    settings: Vec<(For, Setting)>,
}

/// A line that is being parsed.
struct Line<'a> {
    source: &'a str,
    number: usize,
    text: &'a str,
    /// The current rule: a line may contain several, separated by `;`.
    part: &'a str,
    words: Vec<(usize, &'a str)>,
    at: usize,
}

impl<'a> Line<'a> {
    /// Splits `part` into words. `part` begins at byte `from` of the line `text`.
    fn new(source: &'a str, number: usize, text: &'a str, from: usize, part: &'a str) -> Self {
        let mut words = Vec::new();
        let mut at = from;
        for word in part.split([' ', '\t']) {
            if !word.is_empty() {
                words.push((text.get(..at).map_or(0, |s| s.chars().count()) + 1, word));
            }
            at += word.len() + 1;
        }
        Self {
            source,
            number,
            text,
            part,
            words,
            at: 0,
        }
    }

    /// Returns the next word and its column. After the last word, returns an empty word.
    fn next(&mut self) -> (usize, &'a str) {
        let word = self.peek();
        self.at += 1;
        word
    }

    fn peek(&self) -> (usize, &'a str) {
        let end = self.words.last().map_or(1, |(column, word)| {
            // The caret is placed after the last word and a blank.
            column + word.chars().count() + 1
        });
        self.words.get(self.at).copied().unwrap_or((end, ""))
    }

    fn mistake(&self, column: usize, what: impl Into<String>) -> Mistake {
        Mistake {
            source: self.source.to_owned(),
            line: self.number,
            column,
            text: self.text.trim_end().to_owned(),
            what: what.into(),
        }
    }

    fn end(&mut self) -> Result<(), Mistake> {
        match self.next() {
            (_, "") => Ok(()),
            (column, word) => Err(self.mistake(
                column,
                format!("expected the end of the rule instead of {word}"),
            )),
        }
    }

    /// Parses one of `modes`. `expected` lists them for the error message.
    fn mode(&mut self, modes: &[Mode], expected: &str) -> Result<Mode, Mistake> {
        let (column, word) = self.next();
        let found = modes.iter().find(|mode| mode.word() == word);
        let what = || self.mistake(column, format!("expected {expected}"));
        found.copied().ok_or_else(what)
    }

    /// Parses an optional `require` after a mode of datagrams.
    fn unasked(&mut self, mode: Mode) -> bool {
        let is_there = self.peek().1 == "require" && mode.is_messages();
        self.at += usize::from(is_there);
        is_there
    }

    fn place(&mut self) -> Result<(usize, Where, Option<place::Ports>), Mistake> {
        let (column, word) = self.next();
        if word.is_empty() {
            return Err(self.mistake(column, "expected an address, such as 10.0.0.0/8:80 or *"));
        }
        let (at, ports) = place::parse(word).map_err(|what| self.mistake(column, what))?;
        Ok((column, at, ports))
    }

    fn either(&mut self, yes: &str, no: &str) -> Result<bool, Mistake> {
        match self.next() {
            (_, word) if word == yes => Ok(true),
            (_, word) if word == no => Ok(false),
            (column, _) => Err(self.mistake(column, format!("expected {yes} or {no}"))),
        }
    }

    fn whom(&mut self) -> Result<For, Mistake> {
        let (column, name) = self.next();
        if name.is_empty() {
            return Err(self.mistake(
                column,
                "expected the name of a program, with * for any characters",
            ));
        }
        let mut whom = For {
            program: name.to_owned(),
            tag: None,
        };
        if self.peek().1 == "tag" {
            self.at += 1;
            let (column, tag) = self.next();
            if tag.is_empty() {
                return Err(self.mistake(column, "expected a tag"));
            }
            whom.tag = Some(tag.to_owned());
        }
        Ok(whom)
    }

    /// Parses the rest of a TCP rule.
    fn tcp(&mut self, role: Role, whom: &For) -> Result<Rule, Mistake> {
        let (column, kind) = self.next();
        if kind != "tcp" {
            let word = if role == Role::Listen {
                "listen"
            } else {
                "connect"
            };
            return Err(self.mistake(column, format!("expected tcp after {word}")));
        }
        let (column, mut at, mut ports) = self.place()?;
        let mut other = Where::Any;
        if self.peek().1 == "to" && role == Role::Connect {
            if ports.is_some() {
                let what =
                    "expected an address without a port: the address before `to` is the local one";
                return Err(self.mistake(column, what));
            }
            self.at += 1;
            other = at;
            (_, at, ports) = self.place()?;
        } else if self.peek().1 == "from" {
            self.at += 1;
            let (column, from, ports) = self.place()?;
            if ports.is_some() {
                return Err(self.mistake(column, "expected an address without a port"));
            }
            other = from;
        }
        let mut rule = self.rule(Some(role), whom);
        (rule.at, rule.other) = (at, other);
        rule.ports = ports.unwrap_or((0, u16::MAX));
        rule.mode = self.mode(&Mode::TCP, "tcp, prefer, require or off")?;
        Ok(rule)
    }

    /// Parses the rest of a UDP rule.
    fn udp(&mut self, role: Role, whom: &For) -> Result<Rule, Mistake> {
        let (column, kind) = self.next();
        if kind != "udp" {
            let word = if role == Role::Bind { "bind" } else { "send" };
            return Err(self.mistake(column, format!("expected udp after {word}")));
        }
        let (_, at, ports) = self.place()?;
        let mut rule = self.rule(Some(role), whom);
        rule.at = at;
        rule.ports = ports.unwrap_or((0, u16::MAX));
        rule.mode = self.mode(&Mode::UDP, "udp, datagram, record, reliable or off")?;
        rule.unasked = self.unasked(rule.mode);
        Ok(rule)
    }

    /// Parses the rest of an `all` rule.
    fn all(&mut self, whom: &For) -> Result<Rule, Mistake> {
        let mut rule = self.rule(None, whom);
        let modes = [&Mode::TCP[..], &Mode::UDP].concat();
        rule.mode = self.mode(
            &modes,
            "tcp, prefer, require or off, or for datagrams udp, datagram, record or reliable",
        )?;
        rule.unasked = self.unasked(rule.mode);
        Ok(rule)
    }

    fn rule(&self, role: Option<Role>, whom: &For) -> Rule {
        Rule {
            whom: whom.clone(),
            role,
            at: Where::Any,
            ports: (0, u16::MAX),
            other: Where::Any,
            mode: Mode::Tcp,
            unasked: false,
            source: self.source.to_owned(),
            line: self.number,
            text: self.part.trim().to_owned(),
        }
    }

    fn setting(&mut self) -> Result<Setting, Mistake> {
        let (column, name) = self.next();
        match name {
            "crc" => Ok(Setting::Crc(self.either("on", "off")?)),
            "io_uring" => Ok(Setting::IoUring(self.either("hide", "leave")?)),
            "fallback" => match self.next() {
                (_, "log") => Ok(Setting::Fallback(Fallback::Log)),
                (_, "silent") => Ok(Setting::Fallback(Fallback::Silent)),
                (_, "error") => Ok(Setting::Fallback(Fallback::Error)),
                (column, _) => Err(self.mistake(column, "expected log, silent or error")),
            },
            "window" => {
                let (column, value) = self.next();
                let (a, b) = value.split_once("..").unwrap_or((value, value));
                match (size(a), size(b)) {
                    (Some(a), Some(b)) if WINDOW_LEAST <= a && a <= b && b <= WINDOW_MOST => {
                        Ok(Setting::Window(a, b))
                    }
                    _ => Err(self.mistake(
                        column,
                        "expected a size, or two such as 16K..1M, from 4K to 64M",
                    )),
                }
            }
            "ask" => {
                let (column, value) = self.next();
                let micros = if value == "off" {
                    Some(0)
                } else {
                    micros(value)
                };
                micros.map(Setting::Ask).ok_or_else(|| {
                    self.mistake(
                        column,
                        "expected off, or a time such as 500us or 2ms, up to 1s",
                    )
                })
            }
            "pool" => {
                let (column, value) = self.next();
                let bytes = size(value).filter(|n| (POOL_LEAST..=POOL_MOST).contains(n));
                bytes
                    .map(Setting::Pool)
                    .ok_or_else(|| self.mistake(column, "expected a size from 64K to 1024M"))
            }
            "share" => Ok(Setting::Share(self.either("process", "off")?)),
            "spin" => {
                let (column, value) = self.next();
                let micros = if value == "off" {
                    Some(0)
                } else {
                    micros(value).filter(|n| *n <= SPIN_MOST)
                };
                micros
                    .map(Setting::Spin)
                    .ok_or_else(|| self.mistake(column, "expected off, or a time from 1us to 100us"))
            }
            "memory" => {
                let (column, value) = self.next();
                let bytes = if value == "off" {
                    Some(0)
                } else {
                    size(value).filter(|n| (1..=MEMORY_MOST).contains(n))
                };
                bytes.map(Setting::Memory).ok_or_else(|| {
                    self.mistake(column, "expected off, or a size up to 1024M")
                })
            }
            _ => Err(self.mistake(
                column,
                "expected the name of a setting: crc, window, io_uring, fallback, ask, pool, share, spin or memory",
            )),
        }
    }
}

/// Parses a number of bytes, with an optional suffix K or M.
fn size(text: &str) -> Option<u32> {
    let (digits, unit) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => text
            .strip_suffix('M')
            .map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    if !digits.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u32>().ok()?.checked_mul(unit)
}

/// Parses a time with the unit us, ms or s, of at most a second and not 0, as microseconds.
fn micros(text: &str) -> Option<u32> {
    let units = [("us", 1), ("ms", 1000), ("s", 1_000_000)];
    let (digits, unit) = units
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))?;
    if !digits.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let micros = digits.parse::<u32>().ok()?.checked_mul(unit)?;
    (1..=1_000_000).contains(&micros).then_some(micros)
}

impl Policy {
    /// Inserts the rules of `text` before the existing ones. A newline or `;` ends a rule.
    ///
    /// # Errors
    /// The first mistake.
    pub fn read(&mut self, source: &str, text: &str) -> Result<(), Mistake> {
        let mut whom = For {
            program: "*".to_owned(),
            tag: None,
        };
        let mut rules = Vec::new();
        let mut settings = Vec::new();
        for (i, whole) in text.lines().enumerate() {
            // Text after `#` is a comment, even if it contains `;`.
            let code = whole.split('#').next().unwrap_or("");
            let mut from = 0;
            for part in code.split(';') {
                let mut line = Line::new(source, i + 1, whole, from, part);
                from += part.len() + 1;
                match line.next() {
                    (_, "") => continue,
                    (_, "program") => whom = line.whom()?,
                    (_, "listen") => rules.push(line.tcp(Role::Listen, &whom)?),
                    (_, "connect") => rules.push(line.tcp(Role::Connect, &whom)?),
                    (_, "bind") => rules.push(line.udp(Role::Bind, &whom)?),
                    (_, "send") => rules.push(line.udp(Role::Send, &whom)?),
                    (_, "all") => rules.push(line.all(&whom)?),
                    (_, "set") => settings.push((whom.clone(), line.setting()?)),
                    (column, _) => {
                        return Err(line.mistake(
                            column,
                            "expected program, listen, connect, bind, send, all or set",
                        ));
                    }
                }
                line.end()?;
            }
        }
        rules.append(&mut self.rules);
        self.rules = rules;
        settings.append(&mut self.settings);
        self.settings = settings;
        Ok(())
    }

    fn rules<'a, 'b>(
        &'a self,
        role: Role,
        who: &'b Who,
        port: u16,
    ) -> impl Iterator<Item = &'a Rule> + use<'a, 'b> {
        self.rules.iter().filter(move |r| {
            r.role.map_or_else(|| role.is_for(r.mode), |of| of == role)
                && r.whom.has(who)
                && (r.ports.0..=r.ports.1).contains(&port)
        })
    }

    /// Returns the rule that decides about a connection. `addr` is the local address of a listener's connection, or the
    /// peer's address of a connection that the program opens. `other` returns the address of the other end, and is called
    /// only if a rule needs it.
    pub fn rule(
        &self,
        role: Role,
        who: &Who,
        addr: SocketAddr,
        other: impl Fn() -> Option<IpAddr>,
        host: &dyn Host,
    ) -> Option<&Rule> {
        self.rules(role, who, addr.port()).find(|r| {
            r.at.has(addr.ip(), host)
                && (r.other == Where::Any || other().is_some_and(|o| r.other.has(o, host)))
        })
    }

    /// Returns whether a rule may turn datagrams of this process into messages.
    pub fn has_datagrams(&self, who: &Who) -> bool {
        self.may(who, Mode::is_messages)
    }

    /// Returns whether a rule may make datagrams of this process reliable.
    pub fn has_reliable(&self, who: &Who) -> bool {
        self.may(who, |mode| mode == Mode::Reliable)
    }

    fn may(&self, who: &Who, is_it: impl Fn(Mode) -> bool) -> bool {
        self.rules.iter().any(|r| is_it(r.mode) && r.whom.has(who))
    }

    /// Returns the mode of a listener's connections. The rules have to be checked for each connection if a rule that upgrades
    /// connections is among those that may match, and the match depends on an address that is known only when the connection arrives:
    /// the local address if the listener is bound to a wildcard address, or the address after `from`.
    pub fn listener(&self, who: &Who, addr: SocketAddr, host: &dyn Host) -> Listener {
        let everywhere = addr.ip().to_canonical().is_unspecified();
        let mut upgrades = false;
        let mut depends = false;
        for r in self.rules(Role::Listen, who, addr.port()) {
            let unknown = everywhere && r.at != Where::Any;
            if !unknown && !r.at.has(addr.ip(), host) {
                continue;
            }
            if !unknown && r.other == Where::Any {
                return if depends && (upgrades || r.mode.upgrades()) {
                    Listener::Each
                } else {
                    Listener::All(r.mode)
                };
            }
            depends = true;
            upgrades |= r.mode.upgrades();
        }
        if upgrades {
            Listener::Each
        } else {
            Listener::All(Mode::Tcp)
        }
    }

    /// Returns the settings of a process.
    pub fn settings(&self, who: &Who) -> Settings {
        let mut all = Settings::default();
        // The first setting in the list has precedence, so it is applied last.
        for (_, setting) in self.settings.iter().rev().filter(|(whom, _)| whom.has(who)) {
            match *setting {
                Setting::Crc(on) => all.crc = on,
                Setting::Window(least, most) => all.window = (least, most),
                Setting::IoUring(hides) => all.hides_io_uring = hides,
                Setting::Fallback(fallback) => all.fallback = fallback,
                Setting::Ask(micros) => all.ask = micros,
                Setting::Pool(bytes) => all.pool = bytes,
                Setting::Share(shares) => all.shares = shares,
                Setting::Spin(micros) => all.spin = micros,
                Setting::Memory(bytes) => all.memory = bytes,
            }
        }
        all
    }
}

/// Returns whether a name matches a pattern, in which `*` matches any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or("")) else {
        return false;
    };
    let Some(last) = pattern
        .contains('*')
        .then(|| parts.next_back().unwrap_or(""))
    else {
        return rest.is_empty();
    };
    // Each part between two stars is matched at its first occurrence.
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = rest.get(at + part.len()..).unwrap_or("");
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::in_prefix;

    struct Here;
    impl Host for Here {
        fn is_here(&self, addr: IpAddr) -> bool {
            addr.is_loopback() || addr == IpAddr::from([10, 0, 0, 7])
        }
        fn is_on(&self, interface: &str, addr: IpAddr) -> bool {
            interface == "eth0" && in_prefix([10, 0, 0, 0].into(), 24, addr)
        }
    }

    fn read(text: &str) -> Policy {
        let mut p = Policy::default();
        p.read("t", text).unwrap_or_else(|e| panic!("{e}"));
        p
    }

    fn who(program: &str) -> Who {
        Who {
            names: vec![program.to_owned()],
            tag: None,
        }
    }

    fn connect(p: &Policy, program: &str, addr: &str) -> Option<Mode> {
        let from = || Some([10, 0, 0, 7].into());
        p.rule(
            Role::Connect,
            &who(program),
            addr.parse().unwrap(),
            from,
            &Here,
        )
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
        let at = "127.0.0.1:80".parse().unwrap();
        let rule = p.rule(Role::Listen, &who("nginx"), at, || None, &Here);
        assert_eq!(rule.unwrap().to_string(), "t:2: listen tcp *:80 tcp");
    }

    #[test]
    fn the_last_source_is_searched_first() {
        let mut p = read("all tcp; set crc off; set window 8K");
        p.read("u", "all prefer; set crc on").unwrap();
        assert_eq!(connect(&p, "x", "1.2.3.4:5"), Some(Mode::Prefer));
        let settings = p.settings(&who("x"));
        assert!(settings.crc && settings.window == (8 << 10, 8 << 10));
    }

    #[test]
    fn settings_and_rules_are_for_their_programs_and_tags() {
        let p = read(
            "program nginx tag edge\nall tcp\nset fallback log\nset window 16K..4M\nprogram *\nall prefer\n\
             set io_uring leave",
        );
        let edge = Who {
            names: vec!["nginx".to_owned()],
            tag: Some("edge".to_owned()),
        };
        let mode = |w: &Who| {
            let at = "127.0.0.1:80".parse().unwrap();
            p.rule(Role::Connect, w, at, || None, &Here).unwrap().mode
        };
        assert_eq!(
            (mode(&edge), mode(&who("nginx"))),
            (Mode::Tcp, Mode::Prefer)
        );
        let (a, b) = (p.settings(&edge), p.settings(&who("nginx")));
        assert!(a.fallback == Fallback::Log && a.window.1 == 4 << 20 && !a.hides_io_uring);
        assert!(b.fallback == Fallback::Silent && b.window.1 == 1 << 20 && !b.hides_io_uring);
        let texts = [
            "",
            "set ask off",
            "set ask 500us",
            "set ask 2ms",
            "set ask 1s",
        ];
        let asks = texts.map(|text| read(text).settings(&who("x")).ask);
        assert_eq!(asks, [1000, 0, 500, 2000, 1_000_000]);
        let pool = |text| {
            let all = read(text).settings(&who("x"));
            (all.pool, all.shares)
        };
        assert_eq!(pool(""), (64 << 20, true));
        assert_eq!(pool("set pool 1M; set share off"), (1 << 20, false));
        let spins = ["", "set spin off", "set spin 100us"];
        let spins = spins.map(|text| read(text).settings(&who("x")).spin);
        assert_eq!(spins, [50, 0, 100]);
        let memories = ["", "set memory off", "set memory 64K"];
        let memories = memories.map(|text| read(text).settings(&who("x")).memory);
        assert_eq!(memories, [1 << 20, 0, 64 << 10]);
    }

    #[test]
    fn listeners_at_all_addresses_are_decided_for_each_connection() {
        let listener =
            |text: &str, addr: &str| read(text).listener(&who("x"), addr.parse().unwrap(), &Here);
        let all = Listener::All;
        assert_eq!(listener("all prefer", "0.0.0.0:80"), all(Mode::Prefer));
        assert_eq!(listener("", "0.0.0.0:80"), all(Mode::Tcp));
        let text = "listen tcp eth0:80 prefer; all tcp";
        assert_eq!(listener(text, "0.0.0.0:80"), Listener::Each);
        assert_eq!(listener(text, "[::]:80"), Listener::Each);
        assert_eq!(listener(text, "0.0.0.0:81"), all(Mode::Tcp));
        assert_eq!(listener(text, "10.0.0.7:80"), all(Mode::Prefer));
        assert_eq!(listener(text, "127.0.0.1:80"), all(Mode::Tcp));
        let text = "listen tcp *:80 from 10.0.0.0/8 require; all prefer";
        assert_eq!(listener(text, "127.0.0.1:80"), Listener::Each);
        // No rule upgrades a connection of this listener, so it is not checked for each connection.
        let text = "listen tcp eth0:80 tcp; all tcp";
        assert_eq!(listener(text, "0.0.0.0:80"), all(Mode::Tcp));
        assert_eq!(
            listener("listen tcp eth0:80 prefer", "0.0.0.0:80"),
            Listener::Each
        );
    }

    #[test]
    fn the_other_end_is_compared_if_a_rule_names_it() {
        let p = read(
            "connect tcp *:80 from 10.0.0.0/24 prefer; connect tcp *:80 from 11.0.0.0/8 require; all tcp",
        );
        assert_eq!(connect(&p, "x", "12.0.0.1:80"), Some(Mode::Prefer));
        // The same with the local address first.
        let text = "connect tcp 10.0.0.0/24 to 12.0.0.0/8:80-90 prefer; connect tcp 11.0.0.0/8 to *:80 require; all tcp";
        let p = read(text);
        assert_eq!(connect(&p, "x", "12.0.0.1:90"), Some(Mode::Prefer));
        assert_eq!(connect(&p, "x", "12.0.0.1:91"), Some(Mode::Tcp));
        assert_eq!(connect(&p, "x", "13.0.0.1:80"), Some(Mode::Tcp));
        let p = read("listen tcp @same-host:80 from eth0 require; all tcp");
        let mode = |from: [u8; 4]| {
            let at = "10.0.0.7:80".parse().unwrap();
            p.rule(Role::Listen, &who("x"), at, || Some(from.into()), &Here)
                .unwrap()
                .mode
        };
        assert_eq!(
            (mode([10, 0, 0, 9]), mode([10, 0, 1, 9])),
            (Mode::Require, Mode::Tcp)
        );
    }

    #[test]
    fn datagrams_have_separate_rules() {
        let p = read(
            "program sipp\nbind udp *:5060 datagram\nsend udp 224.0.0.0/4 udp\nsend udp 10.0.0.0/8 record require\n\
             program *\nall prefer",
        );
        let udp = |p: &Policy, role, program: &str, addr: &str| {
            p.rule(role, &who(program), addr.parse().unwrap(), || None, &Here)
                .map(|r| (r.mode, r.unasked))
        };
        let sipp = |role, addr| udp(&p, role, "sipp", addr);
        assert_eq!(
            sipp(Role::Bind, "0.0.0.0:5060"),
            Some((Mode::Datagram, false))
        );
        assert_eq!(sipp(Role::Bind, "0.0.0.0:5061"), None);
        assert_eq!(sipp(Role::Send, "224.0.0.1:1"), Some((Mode::Udp, false)));
        assert_eq!(sipp(Role::Send, "10.0.0.1:1"), Some((Mode::Record, true)));
        assert_eq!(udp(&p, Role::Send, "x", "10.0.0.1:1"), None);
        assert!(p.has_datagrams(&who("sipp")) && !p.has_datagrams(&who("x")));
        assert!(!p.has_reliable(&who("sipp")));
        let p = read("program sipp\nbind udp *:5060 reliable\nsend udp *:5060 reliable require");
        let sipp = |role| udp(&p, role, "sipp", "10.0.0.1:5060");
        assert_eq!(sipp(Role::Bind), Some((Mode::Reliable, false)));
        assert_eq!(sipp(Role::Send), Some((Mode::Reliable, true)));
        assert!(p.has_reliable(&who("sipp")) && !p.has_reliable(&who("x")));
        // An `all` rule applies to the protocol of its mode; `off` applies to both.
        let at = "10.0.0.1:1";
        let p = read("all datagram; all require");
        assert_eq!(udp(&p, Role::Send, "x", at), Some((Mode::Datagram, false)));
        assert_eq!(connect(&p, "x", at), Some(Mode::Require));
        let p = read("all off; all datagram; all prefer");
        assert_eq!(udp(&p, Role::Bind, "x", at), Some((Mode::Off, false)));
        assert_eq!(connect(&p, "x", at), Some(Mode::Off));
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
            ("a*a", "a", false),
            ("nginx", "nginx2", false),
            ("nginx", "ngin", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        // The run time must not grow exponentially with the number of stars.
        let (pattern, name) = ("*a".repeat(2000) + "b", "a".repeat(20_000));
        assert!(!matches(&pattern, &name));
    }

    #[test]
    fn an_error_has_a_position() {
        for (text, line, column) in [
            ("all tcp\n  conect tcp * tcp", 2, 3),
            ("all tcp; conect tcp * tcp", 1, 10),
            ("# one; two\nall tcp # three; four\nall\tprefr", 3, 5),
            ("connect udp * tcp", 1, 9),
            ("connect tcp 10.0.0.0/33 tcp", 1, 13),
            ("connect tcp *:80-70 tcp", 1, 13),
            ("connect tcp *:80 tpc", 1, 18),
            ("connect tcp *:80", 1, 18),
            ("connect tcp", 1, 13),
            ("connect tcp *:80 tcp more", 1, 22),
            ("listen tcp *:80 from 1.2.3.4:5 tcp", 1, 22),
            ("bind tcp *:80 udp", 1, 6),
            ("bind udp *:80 relaible", 1, 15),
            ("bind udp *:80 udp require", 1, 19),
            ("bind udp *:80 datagram requir", 1, 24),
            ("all datagram require more", 1, 22),
            ("send udp *:80 tcp", 1, 15),
            ("set crc maybe", 1, 9),
            ("set io_uring off", 1, 14),
            ("set fallback errors", 1, 14),
            ("set ask", 1, 9),
            ("set ask 5", 1, 9),
            ("set ask 0ms", 1, 9),
            ("set ask 1001ms", 1, 9),
            ("set ask ms", 1, 9),
            ("set window 16K..8K", 1, 12),
            ("set window 1K", 1, 12),
            ("set window +16K", 1, 12),
            ("set pools 64M", 1, 5),
            ("set pool 63K", 1, 10),
            ("set pool 1025M", 1, 10),
            ("set share host", 1, 11),
            ("set memory", 1, 12),
            ("set memory 0", 1, 12),
            ("set memory 1025M", 1, 12),
            ("set spin", 1, 10),
            ("set spin 101us", 1, 10),
            ("set spin 0us", 1, 10),
            ("connect tcp eth0 to", 1, 21),
            ("connect tcp eth0:80 to 10.0.0.1 tcp", 1, 13),
            ("connect tcp eth0 to 10.0.0.1 from eth0 tcp", 1, 30),
            ("listen tcp eth0 to 10.0.0.1 tcp", 1, 17),
            ("program", 1, 9),
            ("program x tag", 1, 15),
            ("program x y", 1, 11),
        ] {
            let e = Policy::default().read("f", text).expect_err(text);
            assert_eq!((e.line, e.column), (line, column), "{e}");
            assert!(e.to_string().ends_with('^'));
        }
        assert_eq!(
            Policy::default()
                .read("f", "all prefr")
                .unwrap_err()
                .to_string(),
            "f:1:5: expected tcp, prefer, require or off, or for datagrams udp, datagram, record or reliable\n  \
             all prefr\n      ^"
        );
    }
}
