//! The language of the configuration.
//!
//! ```text
//! program GLOB [tag TAG]                                  # until the next
//! listen|connect tcp ADDR[:PORT[-PORT]] [from ADDR]       tcp | prefer | require | off
//! bind|send      udp ADDR[:PORT[-PORT]]                   udp | off | datagram [require] | record [require]
//! all                                                     one of these
//! set crc on|off;  set window SIZE[..SIZE];  set io_uring hide|leave;  set fallback log|silent
//! ```
//!
//! Sources are looked at from the last to the first, and in each the first rule that matches decides.

use crate::host::Host;
use crate::place::{self, Where};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// What is done with a connection, or with datagrams.
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
    /// Kernel UDP.
    Udp,
    /// Datagrams are Sends of datagram-iWARP where the peer is known to understand them.
    Datagram,
    /// Datagrams are Write-Records of datagram-iWARP where the peer is known to understand them.
    Record,
}

impl Mode {
    const TCP: [Self; 4] = [Self::Tcp, Self::Prefer, Self::Require, Self::Off];
    const UDP: [Self; 4] = [Self::Udp, Self::Datagram, Self::Record, Self::Off];

    /// The word of rules.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::Off => "off",
            Self::Udp => "udp",
            Self::Datagram => "datagram",
            Self::Record => "record",
        }
    }

    /// Whether connections, or datagrams, may be upgraded.
    pub fn upgrades(self) -> bool {
        match self {
            Self::Prefer | Self::Require | Self::Datagram | Self::Record => true,
            Self::Tcp | Self::Off | Self::Udp => false,
        }
    }
}

/// Where a rule applies.
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
    /// Whether a rule about `all` with this mode is about it.
    fn is_for(self, mode: Mode) -> bool {
        match self {
            Self::Listen | Self::Connect => Mode::TCP.contains(&mode),
            Self::Bind | Self::Send => Mode::UDP.contains(&mode),
        }
    }
}

/// The processes that rules are for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct For {
    /// Names of programs; `*` stands for any characters.
    program: String,
    /// The tag that a process must have.
    tag: Option<String>,
}

impl Who {
    /// Whether its connections stay plain whatever the rules: sshd hands a connection from process to process, and ends a
    /// child that makes a system call which it does not expect.
    pub fn is_left_alone(&self) -> bool {
        let alone = ["sshd", "sshd-session", "sshd-auth"];
        self.names.iter().any(|name| alone.contains(&name.as_str()))
    }
}

impl For {
    fn has(&self, who: &Who) -> bool {
        who.names.iter().any(|name| matches(&self.program, name))
            && (self.tag.is_none() || self.tag == who.tag)
    }
}

/// A process, as rules know it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Who {
    /// The name of its file, and the name that it was started by where that is another (a link, a script), without folders.
    pub names: Vec<String>,
    /// Its tag.
    pub tag: Option<String>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    whom: For,
    /// `None`: all roles that the mode is for.
    role: Option<Role>,
    /// Addresses: of the listener's end, or of the peer to connect to.
    at: Where,
    ports: (u16, u16),
    /// The other end's address: of `from`.
    other: Where,
    /// What is done.
    pub mode: Mode,
    /// Of datagrams: the peers understand messages, without being asked.
    pub unasked: bool,
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

/// What rules say about a listener when it begins to listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// The same for all its connections.
    All(Mode),
    /// It depends on the addresses of each.
    Each,
}

/// Settings of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// CRCs are asked for.
    pub crc: bool,
    /// Payload bytes that a peer may have under way: first, and at most.
    pub window: (u32, u32),
    /// `io_uring_setup` is refused, because its I/O is not seen.
    pub hides_io_uring: bool,
    /// A line is written for each connection that might have been upgraded and stays plain.
    pub logs_fallback: bool,
}

/// The smallest window: one page, so that a request of usual length goes in one message.
pub const WINDOW_LEAST: u32 = 4 << 10;
/// The largest: a reader that stops leaves as much in its memory.
pub const WINDOW_MOST: u32 = 64 << 20;

impl Default for Settings {
    fn default() -> Self {
        Self {
            crc: false,
            // A request and its answer fit in the first; beyond the second the throughput of one stream grows no more.
            window: (16 << 10, 1 << 20),
            hides_io_uring: true,
            logs_fallback: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setting {
    Crc(bool),
    Window(u32, u32),
    IoUring(bool),
    Fallback(bool),
}

/// A mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The source.
    pub source: String,
    /// The line, from 1; 0: it is about the whole source.
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
    /// The first to look at is first.
    rules: Vec<Rule>,
    settings: Vec<(For, Setting)>,
}

/// A line while it is read.
struct Line<'a> {
    source: &'a str,
    number: usize,
    text: &'a str,
    /// The rule itself: a line may have several.
    part: &'a str,
    words: Vec<(usize, &'a str)>,
    at: usize,
}

impl<'a> Line<'a> {
    /// The words of `part`, which begins at byte `from` of the line `text`.
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

    /// The next word with its column, and an empty one behind the last.
    fn next(&mut self) -> (usize, &'a str) {
        let word = self.peek();
        self.at += 1;
        word
    }

    fn peek(&self) -> (usize, &'a str) {
        let end = self.words.last().map_or(1, |(column, word)| {
            // The caret stands behind the last word and its blank.
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
                format!("nothing is expected here, but there is {word}"),
            )),
        }
    }

    /// One of these modes, which `expected` names.
    fn mode(&mut self, modes: &[Mode], expected: &str) -> Result<Mode, Mistake> {
        let (column, word) = self.next();
        let found = modes.iter().find(|mode| mode.word() == word);
        let what = match word {
            "reliable" if modes.contains(&Mode::Udp) => {
                format!("reliable is not there yet: expected {expected}")
            }
            _ => format!("expected {expected}"),
        };
        found.copied().ok_or_else(|| self.mistake(column, what))
    }

    /// Whether `require` stands behind a mode of datagrams.
    fn unasked(&mut self, mode: Mode) -> bool {
        let is_there = self.peek().1 == "require" && matches!(mode, Mode::Datagram | Mode::Record);
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

    /// The rest of a rule about TCP.
    fn tcp(&mut self, role: Role, whom: &For) -> Result<Rule, Mistake> {
        let (column, kind) = self.next();
        if kind != "tcp" {
            let word = if role == Role::Listen {
                "listen"
            } else {
                "connect"
            };
            return Err(self.mistake(column, format!("expected tcp behind {word}")));
        }
        let (_, at, ports) = self.place()?;
        let mut other = Where::Any;
        if self.peek().1 == "from" {
            self.at += 1;
            let (column, from, ports) = self.place()?;
            if ports.is_some() {
                return Err(self.mistake(column, "an address without port is expected here"));
            }
            other = from;
        }
        let mut rule = self.rule(Some(role), whom);
        (rule.at, rule.other) = (at, other);
        rule.ports = ports.unwrap_or((0, u16::MAX));
        rule.mode = self.mode(&Mode::TCP, "tcp, prefer, require or off")?;
        Ok(rule)
    }

    /// The rest of a rule about UDP.
    fn udp(&mut self, role: Role, whom: &For) -> Result<Rule, Mistake> {
        let (column, kind) = self.next();
        if kind != "udp" {
            let word = if role == Role::Bind { "bind" } else { "send" };
            return Err(self.mistake(column, format!("expected udp behind {word}")));
        }
        let (_, at, ports) = self.place()?;
        let mut rule = self.rule(Some(role), whom);
        rule.at = at;
        rule.ports = ports.unwrap_or((0, u16::MAX));
        rule.mode = self.mode(&Mode::UDP, "udp, datagram, record or off")?;
        rule.unasked = self.unasked(rule.mode);
        Ok(rule)
    }

    /// The rest of a rule about all.
    fn all(&mut self, whom: &For) -> Result<Rule, Mistake> {
        let mut rule = self.rule(None, whom);
        let modes = [Mode::TCP, Mode::UDP].concat();
        rule.mode = self.mode(
            &modes,
            "tcp, prefer, require or off, or for datagrams udp, datagram or record",
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
            "fallback" => Ok(Setting::Fallback(self.either("log", "silent")?)),
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
            _ => Err(self.mistake(
                column,
                "expected the name of a setting: crc, window, io_uring or fallback",
            )),
        }
    }
}

/// Bytes: a number, also with K or M.
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

impl Policy {
    /// Puts the rules of `text` before those that are there. Lines end as usual, or with `;`.
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
            // A comment has no rules, whatever it contains.
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

    /// The rule that decides about a connection. `addr` is the listening end's address as this process knows it, or the
    /// peer's to connect to; `other` is the other end's, and only asked for if a rule needs it.
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

    /// Whether a rule may make datagrams of this process messages.
    pub fn has_datagrams(&self, who: &Who) -> bool {
        let may = |mode| matches!(mode, Mode::Datagram | Mode::Record);
        self.rules.iter().any(|r| may(r.mode) && r.whom.has(who))
    }

    /// What the rules say about a listener. One at all addresses, and one for which a rule has `from`, is decided about with
    /// each connection.
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

    /// The settings of a process.
    pub fn settings(&self, who: &Who) -> Settings {
        let mut all = Settings::default();
        // The first decides: it is set last.
        for (_, setting) in self.settings.iter().rev().filter(|(whom, _)| whom.has(who)) {
            match *setting {
                Setting::Crc(on) => all.crc = on,
                Setting::Window(least, most) => all.window = (least, most),
                Setting::IoUring(hides) => all.hides_io_uring = hides,
                Setting::Fallback(logs) => all.logs_fallback = logs,
            }
        }
        all
    }
}

/// Whether a name matches a pattern with `*`.
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
    // The parts between two stars are found as early as they can be.
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
    fn the_source_that_is_read_last_is_looked_at_first() {
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
        assert!(a.logs_fallback && a.window.1 == 4 << 20 && !a.hides_io_uring);
        assert!(!b.logs_fallback && b.window.1 == 1 << 20 && !b.hides_io_uring);
    }

    #[test]
    fn listeners_at_all_addresses_are_decided_about_by_connection() {
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
        // Whatever the connection: it stays plain.
        let text = "listen tcp eth0:80 tcp; all tcp";
        assert_eq!(listener(text, "0.0.0.0:80"), all(Mode::Tcp));
        assert_eq!(
            listener("listen tcp eth0:80 prefer", "0.0.0.0:80"),
            Listener::Each
        );
    }

    #[test]
    fn the_other_end_is_looked_at_where_a_rule_says_so() {
        let p = read(
            "connect tcp *:80 from 10.0.0.0/24 prefer; connect tcp *:80 from 11.0.0.0/8 require; all tcp",
        );
        assert_eq!(connect(&p, "x", "12.0.0.1:80"), Some(Mode::Prefer));
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
    fn datagrams_have_rules_of_their_own() {
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
        // A rule about all is for the protocol of its mode; `off` is for both.
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
        // No time that grows with a power of the stars.
        let (pattern, name) = ("*a".repeat(2000) + "b", "a".repeat(20_000));
        assert!(!matches(&pattern, &name));
    }

    #[test]
    fn a_mistake_has_its_place() {
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
            ("bind udp *:80 reliable", 1, 15),
            ("bind udp *:80 udp require", 1, 19),
            ("bind udp *:80 datagram requir", 1, 24),
            ("all datagram require more", 1, 22),
            ("send udp *:80 tcp", 1, 15),
            ("set crc maybe", 1, 9),
            ("set io_uring off", 1, 14),
            ("set fallback error", 1, 14),
            ("set window 16K..8K", 1, 12),
            ("set window 1K", 1, 12),
            ("set window +16K", 1, 12),
            ("set pool 64M", 1, 5),
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
            "f:1:5: expected tcp, prefer, require or off, or for datagrams udp, datagram or record\n  \
             all prefr\n      ^"
        );
    }
}
