//! Conversations with a scripted peer, as text.
//!
//! A script is read line by line; `//` begins a comment. `<` is a message that the peer sends. `>` is a message that
//! the peer must receive, as [`pretty`](anywarp_core::wire::pretty) writes it, with the names of regions instead of
//! their STags and addresses. The script must contain all messages to the peer except acknowledgements and the
//! first message of an initiator, and all completions.
//!
//! ```text
//! // RFC 5041 §7.1 [ddp-bounds]: the last octet is inside, the next is not.
//! register mr0 len 4096 remote-write
//! < write stag mr0 to mr0+4090 len 10 last
//! > Terminate 1/1/01 (ddp tagged: base or bounds) segment 24 [Write stag mr0 to mr0+4090 last]
//! closed
//! memory mr0 zero
//! ```
//!
//! | line | meaning |
//! |---|---|
//! | `peer standard`, `peer anywarp` | the peer's implementation; the default is standard |
//! | `initiator` | the end under test opened the stream; otherwise the peer did |
//! | `first-message` | the script contains the peer's first message; otherwise it is sent without a line |
//! | `no crc`, `ird N`, `ord N`, `mulpdu N` | the outcome of start-up |
//! | `rnr-retry N` | how often the queue pair retries when the peer has no receive; the default is 7, without limit |
//! | `first nothing`, `first read`, `first send`, `first write` | the first message of an initiator; the default is a Write, or a Hello to anywarp |
//! | `rights NAME…` | the access rights of the queue pair; the default is all |
//! | `register NAME len N RIGHT… [foreign]` | a region, perhaps of another protection domain |
//! | `window NAME over MR at N len N RIGHT… [elsewhere]` | a window of type 2, perhaps of another queue pair |
//! | `deregister NAME` | |
//! | `recv ID MR len N`, `post ID OP …` | the application posts |
//! | `< OP WORD…` | the peer sends a message; see below |
//! | `< bytes HEX…`, `< close` | |
//! | `> TEXT` | the peer receives this message |
//! | `completes ID STATUS`, `received ID STATUS [len N]` | the next completion |
//! | `closed`, `open` | the stream is closed and the queue pair has failed, or both work |
//! | `event NAME` | an asynchronous event was raised |
//! | `memory NAME zero`, `memory NAME at N len N data N` | a region: the payload pattern at this place, zeros elsewhere |
//!
//! Words of a message: `stag`, `to`, `len`, `last`, `msn`, `mo`, `inv`, `size`, `source STAG TO`, `sink STAG TO`,
//! `target STAG TO`, `id`, `add`, `compare`, `swap`, `aop`, `value`, `skip N` (the first payload byte is that with the
//! number N). In `terminate LAYER/TYPE/CODE`, `about read-response` or `about atomic-response` after the code names the segment that
//! caused the error. With `swapped` after the code, the Terminate has the layout of Linux siw, and names a Write. Words of
//! a control message: `hello`, `ack N`, `rnr N`, `restart N`, `nak N N`, `ping`, `bye`, `kind N`. To
//! break rules: `dv`, `rv`, `op`, `qn`, `more` (not the last segment), `tagged`, `untagged`, `cut N` (bytes of the ULPDU
//! that are sent), `length N` (the value of the length field), `bad-crc`. Payload byte *i* is *i* modulo 251, plus 1,
//! where *i* is counted in an untagged message from its start, and in a tagged message from the start of each segment.
//!
//! A number may be `NAME+N` or `NAME-N`: the tagged offset N bytes after or before the start of a region or window. An STag may be `NAME^N`:
//! the STag of NAME with the bits of N inverted.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::SplitWhitespace;

use anywarp_core::connection::{End as StreamEnd, First, Peer};
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::pd::Pd;
use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::{Completion, Status};
use anywarp_core::verbs::wr::{Bind, Remote};
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Tagged, Untagged};
use anywarp_core::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest, Terminate};
use anywarp_core::wire::{Msn, QN_ATOMIC_RESPONSE, Stag, To};

use crate::end::{Mr, Request, Setup, access, fetch_add, read, send, write, write_imm};
use crate::raw::framed;
use crate::world::{EndId, RawId, World};

/// Payload byte `i` of a message.
pub(crate) fn payload_byte(i: usize) -> u8 {
    (i % 251 + 1) as u8
}

/// Runs a script; panics at the first line that fails.
pub fn run(text: &str, seed: u64) {
    let mut stage = Stage::new(seed);
    for (number, line) in text.lines().enumerate() {
        let line = line.split("//").next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        stage.line = format!("line {}: {line}", number + 1);
        stage.step(line);
    }
    "end of script".clone_into(&mut stage.line);
    stage.finish();
}

type Words<'a> = Peekable<SplitWhitespace<'a>>;

struct Named {
    stag: Stag,
    base: u64,
    len: usize,
    mr: Option<Mr>,
}

struct Stage {
    line: String,
    setup: Setup,
    initiator: bool,
    has_first_message: bool,
    world: World,
    ends: Option<(EndId, RawId)>,
    names: BTreeMap<String, Named>,
    to_peer: Vec<String>,
    completed: Vec<Completion>,
    received: Vec<Completion>,
}

impl Stage {
    fn new(seed: u64) -> Self {
        Self {
            line: String::new(),
            setup: Setup::standard(),
            initiator: false,
            has_first_message: false,
            world: World::new(seed),
            ends: None,
            names: BTreeMap::new(),
            to_peer: Vec::new(),
            completed: Vec::new(),
            received: Vec::new(),
        }
    }

    fn fail(&self, why: &str) -> ! {
        panic!("{}\n  {why}", self.line);
    }

    /// Returns the two ends. They are created at first use, since earlier lines configure them.
    fn ends(&mut self) -> (EndId, RawId) {
        if let Some(ends) = self.ends {
            return ends;
        }
        let ends = self.world.raw(&self.setup, self.initiator);
        self.ends = Some(ends);
        if self.initiator {
            self.world.run();
            // Discards the Hello or the ready-to-receive message.
            self.world[ends.1].received();
        } else if !self.has_first_message {
            let first = if self.setup.peer == Peer::Anywarp {
                let hello = Control::Hello {
                    version: 1,
                    features: 0,
                };
                hello.header().emit().to_vec()
            } else {
                let write = Tagged {
                    last: true,
                    opcode: Opcode::Write,
                    stag: Stag(1),
                    to: To(0),
                };
                write.emit().to_vec()
            };
            self.world[ends.1].sends(&first);
        }
        ends
    }

    fn settle(&mut self) {
        let (end, raw) = self.ends();
        self.world.run();
        let to_peer = self.world[raw].received();
        for fpdu in to_peer {
            let text = self.with_names(&fpdu.text());
            if !text.starts_with("Control Ack") {
                self.to_peer.push(text);
            }
        }
        self.completed.extend(self.world[end].completed());
        self.received.extend(self.world[end].received());
    }

    fn finish(&mut self) {
        self.settle();
        assert!(
            self.to_peer.is_empty(),
            "also received: {:#?}",
            self.to_peer
        );
        assert!(self.completed.is_empty(), "also: {:#?}", self.completed);
        assert!(self.received.is_empty(), "also: {:#?}", self.received);
        let (end, raw) = self.ends();
        assert!(self.world[raw].incomplete().is_empty());
        let mine: Vec<_> = self.names.values().filter_map(|n| n.mr.clone()).collect();
        self.world[end].check_guards(&mine.iter().collect::<Vec<_>>());
    }

    fn step(&mut self, line: &str) {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words = &mut rest.split_whitespace().peekable();
        match verb {
            "peer" => {
                let setup = if rest == "anywarp" {
                    Setup::anywarp()
                } else {
                    Setup::standard()
                };
                self.setup = setup;
            }
            "initiator" => self.initiator = true,
            "first-message" => self.has_first_message = true,
            "no" => self.setup.crc = false,
            "ird" => self.setup.ird = self.number(words) as u32,
            "ord" => self.setup.ord = self.number(words) as u32,
            "mulpdu" => self.setup.mulpdu = self.number(words) as usize,
            "rnr-retry" => self.setup.rnr_retry = self.number(words) as u8,
            "first" => {
                self.setup.first = match rest {
                    "nothing" => First::Nothing,
                    "read" => First::Read,
                    "send" => First::Send,
                    _ => First::Write,
                }
            }
            "rights" => self.setup.access = self.rights(words),
            "register" => self.register(words),
            "window" => self.window(words),
            "deregister" => {
                let (end, _) = self.ends();
                let mr = self.mr(words);
                self.world[end].deregister(&mr);
            }
            "recv" => {
                let (end, _) = self.ends();
                let id = self.number(words);
                let mr = self.mr(words);
                let len = self.after(words, "len") as usize;
                self.world[end].recv(id, &[mr.part(0, len)]);
            }
            "post" => self.post(words),
            "<" => self.peer_sends(words),
            ">" => self.peer_receives(rest),
            "completes" => {
                self.settle();
                let (id, status) = (self.number(words), self.word(words));
                let next = (!self.completed.is_empty()).then(|| self.completed.remove(0));
                self.expect_completion(next.as_ref(), id, status);
            }
            "received" => {
                self.settle();
                let (id, status) = (self.number(words), self.word(words));
                let next = (!self.received.is_empty()).then(|| self.received.remove(0));
                self.expect_completion(next.as_ref(), id, status);
                if words.peek() == Some(&"len") {
                    let len = self.after(words, "len");
                    assert_eq!(u64::from(next.expect("it was checked above").byte_len), len);
                }
            }
            "closed" | "open" => {
                self.settle();
                let (end, raw) = self.ends();
                let open = verb == "open";
                let is_open = self.world[end].conn.end() == StreamEnd::Open
                    && self.world[end].conn.state() == State::Rts
                    && !self.world[raw].closed;
                let is_closed =
                    self.world[end].conn.state() == State::Error && self.world[raw].closed;
                if !(if open { is_open } else { is_closed }) {
                    self.fail("the stream is in another state");
                }
            }
            "event" => {
                self.settle();
                let event = match rest {
                    "fatal" => AsyncEvent::QpFatal,
                    "request" => AsyncEvent::QpRequest,
                    "access" => AsyncEvent::QpAccess,
                    "started" => AsyncEvent::Started,
                    _ => self.fail("there is no such event"),
                };
                let (end, _) = self.ends();
                if !self.world[end].raised(event) {
                    self.fail("the event was not raised");
                }
            }
            "memory" => self.memory(words),
            _ => self.fail("a line cannot begin with this word"),
        }
    }

    // ------------------------------------------------------------------ words

    fn word<'a>(&self, words: &mut Words<'a>) -> &'a str {
        words
            .next()
            .unwrap_or_else(|| self.fail("a word is missing"))
    }

    fn value(&self, word: &str) -> u64 {
        if let Some((name, rest)) = word.split_once('+') {
            return self.named(name).base.wrapping_add(self.value(rest));
        }
        if let Some((name, rest)) = word.split_once('-') {
            return self.named(name).base.wrapping_sub(self.value(rest));
        }
        let parsed = match word.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => word.parse(),
        };
        parsed.unwrap_or_else(|_| self.fail(&format!("no number: {word}")))
    }

    fn number(&self, words: &mut Words<'_>) -> u64 {
        self.value(self.word(words))
    }

    fn after(&self, words: &mut Words<'_>, name: &str) -> u64 {
        if self.word(words) != name {
            self.fail(&format!("{name} is missing"));
        }
        self.number(words)
    }

    fn named(&self, name: &str) -> &Named {
        self.names
            .get(name)
            .unwrap_or_else(|| self.fail(&format!("no name: {name}")))
    }

    fn stag(&self, words: &mut Words<'_>) -> Stag {
        let word = self.word(words);
        let (name, twist) = word.split_once('^').unwrap_or((word, "0"));
        let stag = match self.names.get(name) {
            Some(named) => named.stag.0,
            None => self.value(name) as u32,
        };
        Stag(stag ^ self.value(twist) as u32)
    }

    fn mr(&self, words: &mut Words<'_>) -> Mr {
        let name = self.word(words);
        let Some(mr) = &self.named(name).mr else {
            self.fail("not a region");
        };
        mr.clone()
    }

    fn rights(&self, words: &mut Words<'_>) -> Access {
        let mut all = Access::LOCAL_WRITE;
        while let Some(word) = words.peek().copied() {
            all = all
                | match word {
                    "remote-write" => Access::REMOTE_WRITE,
                    "remote-read" => Access::REMOTE_READ,
                    "remote-atomic" => Access::REMOTE_ATOMIC,
                    "bind" => Access::MW_BIND,
                    "all" => access::ALL,
                    "local" | "none" => Access::NONE,
                    _ => break,
                };
            words.next();
        }
        all
    }

    fn with_names(&self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("0x") {
            out.push_str(&rest[..at]);
            let digits = &rest[at + 2..];
            let end = digits
                .find(|c: char| !c.is_ascii_hexdigit())
                .unwrap_or(digits.len());
            let number = u64::from_str_radix(&digits[..end], 16).unwrap_or(0);
            let named = self.names.iter().find_map(|(name, n)| {
                let off = number.wrapping_sub(n.base);
                if number == u64::from(n.stag.0) {
                    Some(name.clone())
                } else if number == u64::from(n.stag.0 ^ 1) {
                    Some(format!("{name}^1"))
                } else if n.mr.is_some() && off <= n.len as u64 {
                    Some(format!("{name}+{off}"))
                } else if n.mr.is_some() && off.wrapping_neg() <= 8 {
                    Some(format!("{name}-{}", off.wrapping_neg()))
                } else {
                    None
                }
            });
            out.push_str(&named.unwrap_or_else(|| rest[at..at + 2 + end].to_owned()));
            rest = &digits[end..];
        }
        out + rest
    }

    // ------------------------------------------------------------------ the application

    fn register(&mut self, words: &mut Words<'_>) {
        let (end, _) = self.ends();
        let name = self.word(words).to_owned();
        let len = self.after(words, "len") as usize;
        let rights = self.rights(words);
        let foreign = words.next() == Some("foreign");
        let host = &self.world[end].host;
        let pd = if foreign { Pd::new().id() } else { host.pd };
        let mr = host.register_for(pd, len, rights);
        let named = Named {
            stag: mr.stag(),
            base: mr.region.base(),
            len,
            mr: Some(mr),
        };
        self.names.insert(name, named);
    }

    fn window(&mut self, words: &mut Words<'_>) {
        let (end, _) = self.ends();
        let name = self.word(words).to_owned();
        assert_eq!(self.word(words), "over");
        let mr = self.mr(words);
        let at = self.after(words, "at");
        let len = self.after(words, "len");
        let access = self.rights(words);
        let elsewhere = words.next() == Some("elsewhere");
        let host = self.world[end].host.clone();
        let regions = &host.rnic.regions;
        let window = regions
            .alloc_window(host.pd, true, &mut || host.random())
            .expect("a window");
        let rkey = Stag(window.0 ^ 0x2a);
        let addr = mr.region.base() + at;
        let bind = Bind {
            window,
            rkey,
            mr: mr.stag(),
            addr,
            len,
            access,
        };
        let qpn = self.world[end].qpn() + u32::from(elsewhere);
        regions.bind(&bind, host.pd, qpn).expect("a bind");
        let named = Named {
            stag: rkey,
            base: addr,
            len: len as usize,
            mr: None,
        };
        self.names.insert(name, named);
    }

    fn post(&mut self, words: &mut Words<'_>) {
        let (end, _) = self.ends();
        let id = self.number(words);
        let what = self.word(words);
        let remote = |s: &Self, words: &mut Words<'_>| Remote {
            rkey: s.stag(words),
            to: To(s.number(words)),
        };
        let request = match what {
            "read" => read(id, remote(self, words)),
            "write" => write(id, remote(self, words)),
            "write-imm" => write_imm(id, remote(self, words), [1, 2, 3, 4]),
            "fetch-add" => fetch_add(id, remote(self, words), 1),
            "send" => send(id),
            _ => self.fail("no such request"),
        };
        let mr = self.mr(words);
        let len = self.after(words, "len") as usize;
        self.world[end].post(request.from(&[mr.part(0, len)]));
    }

    fn expect_completion(&self, got: Option<&Completion>, id: u64, status: &str) {
        let want = match status {
            "success" => Status::Success,
            "flushed" => Status::Flushed,
            "local-length" => Status::LocalLength,
            "local-protection" => Status::LocalProtection,
            "remote-access" => Status::RemoteAccess,
            "remote-invalid" => Status::RemoteInvalidRequest,
            "remote-operation" => Status::RemoteOperation,
            "remote-aborted" => Status::RemoteAborted,
            "bad-response" => Status::BadResponse,
            "rnr-retry" => Status::RnrRetryExceeded,
            "retry" => Status::RetryExceeded,
            _ => self.fail("no such status"),
        };
        match got {
            Some(c) if (c.wr_id, c.status) == (id, want) => {}
            other => self.fail(&format!("got {other:?}")),
        }
    }

    fn memory(&mut self, words: &mut Words<'_>) {
        self.settle();
        let (end, _) = self.ends();
        let mr = self.mr(words);
        let mut want = vec![0; mr.len()];
        if words.peek() == Some(&"zero") {
            words.next();
        }
        while words.peek().is_some() {
            let at = self.after(words, "at") as usize;
            let len = self.after(words, "len") as usize;
            let from = self.after(words, "data") as usize;
            for (i, byte) in want[at..at + len].iter_mut().enumerate() {
                *byte = payload_byte(from + i);
            }
        }
        let got = self.world[end].bytes(&mr);
        let differs = got.iter().zip(&want).position(|(a, b)| a != b);
        if let Some(at) = differs {
            self.fail(&format!("byte {at} is {} not {}", got[at], want[at]));
        }
    }

    // ------------------------------------------------------------------ the peer

    fn peer_receives(&mut self, text: &str) {
        self.settle();
        if self.to_peer.is_empty() {
            self.fail("nothing was received");
        }
        let got = self.to_peer.remove(0);
        if got != text {
            self.fail(&format!("received: {got}"));
        }
    }

    fn peer_sends(&mut self, words: &mut Words<'_>) {
        let (_, raw) = self.ends();
        let what = self.word(words);
        match what {
            "close" => return self.world[raw].closes(),
            "bytes" => {
                let hex: String = words.collect();
                let bytes: Vec<u8> = (0..hex.len() / 2)
                    .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex"))
                    .collect();
                return self.world[raw].sends_bytes(&bytes);
            }
            _ => {}
        }
        let (opcode, mut body) = self.opcode(what, words);
        let mut m = PeerMessage::new(opcode);
        while let Some(word) = words.next() {
            m.word(self, word, words);
        }
        if let Some(len) = m.len {
            body = (m.mo as usize..m.mo as usize + len)
                .map(payload_byte)
                .collect();
            if m.skip > 0 {
                body = (m.skip..m.skip + len).map(payload_byte).collect();
            }
        } else {
            m.fill(&mut body);
        }
        let mut ulpdu = m.header();
        ulpdu.extend(body);
        if let Some(cut) = m.cut {
            ulpdu.truncate(cut);
        }
        let mut fpdu = framed(&ulpdu);
        if let Some(length) = m.length {
            fpdu[..2].copy_from_slice(&(length as u16).to_be_bytes());
            let covered = fpdu.len() - 4;
            let crc = crate::raw::crc_of(&fpdu[..covered]);
            fpdu[covered..].copy_from_slice(&crc);
        }
        if m.bad_crc {
            let last = fpdu.len() - 1;
            fpdu[last] ^= 1;
        }
        self.world[raw].sends_bytes(&fpdu);
    }

    /// The opcode of a word, and the body that goes with it if it has no payload.
    fn opcode(&self, what: &str, words: &mut Words<'_>) -> (Opcode, Vec<u8>) {
        let none = Vec::new();
        match what {
            "write" => (Opcode::Write, none),
            "read-response" => (Opcode::ReadResponse, none),
            "send" => (Opcode::Send, none),
            "send-inv" => (Opcode::SendInvalidate, none),
            "send-se" => (Opcode::SendSolicited, none),
            "send-se-inv" => (Opcode::SendSolicitedInvalidate, none),
            "immediate" => (Opcode::Immediate, vec![0; 8]),
            "immediate-se" => (Opcode::ImmediateSolicited, vec![0; 8]),
            "read-request" => (Opcode::ReadRequest, vec![0; ReadRequest::LEN]),
            "fetch-add" | "cmp-swap" => {
                let mut body = vec![0; AtomicRequest::LEN];
                body[3] = if what == "cmp-swap" { 2 } else { 0 };
                (Opcode::AtomicRequest, body)
            }
            "atomic-response" => (Opcode::AtomicResponse, vec![0; AtomicResponse::LEN]),
            "control" => (Opcode::Control, none),
            "terminate" => {
                let code: Vec<u8> = self
                    .word(words)
                    .split('/')
                    .map(|n| u8::from_str_radix(n, 16).expect("a code"))
                    .collect();
                let mut body = Terminate {
                    layer: code[0],
                    etype: code[1],
                    code: code[2],
                    ddp_len: None,
                    ddp_header: None,
                    read_request: None,
                }
                .emit();
                if words.peek() == Some(&"about") {
                    words.next();
                    // M and D are set: the length and the DDP header of the segment follow.
                    body[2] = 0xc0;
                    body.extend([0, 18]);
                    match self.word(words) {
                        "read-response" => body.extend(
                            Tagged {
                                last: true,
                                opcode: Opcode::ReadResponse,
                                stag: Stag(0x700),
                                to: To(0x10),
                            }
                            .emit(),
                        ),
                        "atomic-response" => body.extend(
                            Untagged {
                                last: true,
                                opcode: Opcode::AtomicResponse,
                                inv_stag: Stag(0),
                                qn: QN_ATOMIC_RESPONSE,
                                msn: Msn::FIRST,
                                mo: 0,
                            }
                            .emit(),
                        ),
                        _ => self.fail("no such segment"),
                    }
                }
                if words.peek() == Some(&"swapped") {
                    words.next();
                    // The layout of siw: nibbles swapped, and the bits of M and D at the low end.
                    body[0] = body[0].rotate_left(4);
                    body[2] = 0x03;
                    body.extend([0, 14]);
                    let write = Tagged {
                        last: true,
                        opcode: Opcode::Write,
                        stag: Stag(0x100),
                        to: To(0),
                    };
                    body.extend(write.emit());
                }
                (Opcode::Terminate, body)
            }
            _ => self.fail("no such message"),
        }
    }
}

/// A message of the peer, and its deliberate errors.
struct PeerMessage {
    opcode: Opcode,
    tagged: bool,
    last: bool,
    stag: Stag,
    to: u64,
    qn: u32,
    msn: u32,
    mo: u32,
    len: Option<usize>,
    skip: usize,
    dv: u8,
    rv: u8,
    op: u8,
    cut: Option<usize>,
    length: Option<u64>,
    bad_crc: bool,
    sink: (Stag, u64),
    source: (Stag, u64),
    size: u32,
    id: u32,
    data: [u64; 2],
    aop: Option<u8>,
    value: u64,
}

impl PeerMessage {
    fn new(opcode: Opcode) -> Self {
        Self {
            opcode,
            tagged: opcode.is_tagged(),
            // Only Sends and tagged messages can have several segments.
            last: !opcode.is_send() && !opcode.is_tagged(),
            stag: Stag(0),
            to: 0,
            qn: opcode.queue().unwrap_or(0),
            msn: 1,
            mo: 0,
            len: None,
            skip: 0,
            dv: 1,
            rv: 1,
            op: opcode.bits(),
            cut: None,
            length: None,
            bad_crc: false,
            sink: (Stag(1), 0),
            source: (Stag(1), 0),
            size: 0,
            id: 0,
            data: [0; 2],
            aop: None,
            value: 0,
        }
    }

    fn word(&mut self, stage: &Stage, word: &str, words: &mut Words<'_>) {
        match word {
            "last" => self.last = true,
            "more" => self.last = false,
            "tagged" => self.tagged = true,
            "untagged" => self.tagged = false,
            "bad-crc" => self.bad_crc = true,
            "stag" | "inv" => self.stag = stage.stag(words),
            "source" | "target" => self.source = (stage.stag(words), stage.number(words)),
            "sink" => self.sink = (stage.stag(words), stage.number(words)),
            "hello" => self.stag = Stag(0x0100_0001),
            "ack" => (self.stag, self.msn) = (Stag(0x0200_0000), stage.number(words) as u32),
            "rnr" => (self.stag, self.msn) = (Stag(0x0300_0001), stage.number(words) as u32),
            "restart" => (self.stag, self.msn) = (Stag(0x0400_0000), stage.number(words) as u32),
            "nak" => {
                self.msn = stage.number(words) as u32;
                self.stag = Stag(0x0500_0000 | stage.number(words) as u32);
            }
            "ping" => self.stag = Stag(0x0700_0000),
            "bye" => self.stag = Stag(0x0900_0000),
            "kind" => self.stag = Stag((stage.number(words) as u32) << 24),
            _ => {
                let n = stage.number(words);
                match word {
                    "to" => self.to = n,
                    "len" => self.len = Some(n as usize),
                    "skip" => self.skip = n as usize,
                    "msn" => self.msn = n as u32,
                    "mo" => self.mo = n as u32,
                    "qn" => self.qn = n as u32,
                    "dv" => self.dv = n as u8,
                    "rv" => self.rv = n as u8,
                    "op" => self.op = n as u8,
                    "cut" => self.cut = Some(n as usize),
                    "length" => self.length = Some(n),
                    "size" => self.size = n as u32,
                    "id" => self.id = n as u32,
                    "add" | "swap" => self.data[0] = n,
                    "compare" => self.data[1] = n,
                    "aop" => self.aop = Some(n as u8),
                    "value" => self.value = n,
                    _ => stage.fail(&format!("no such word: {word}")),
                }
            }
        }
    }

    fn header(&self) -> Vec<u8> {
        let mut bytes = if self.tagged {
            Tagged {
                last: self.last,
                opcode: self.opcode,
                stag: self.stag,
                to: To(self.to),
            }
            .emit()
            .to_vec()
        } else {
            Untagged {
                last: self.last,
                opcode: self.opcode,
                inv_stag: self.stag,
                qn: self.qn,
                msn: Msn(self.msn),
                mo: self.mo,
            }
            .emit()
            .to_vec()
        };
        bytes[0] = bytes[0] & !3 | self.dv;
        bytes[1] = self.rv << 6 | self.op;
        bytes
    }

    /// Writes the fields that the line of the script contains into the body of the message.
    fn fill(&self, body: &mut [u8]) {
        match (self.opcode, body.len()) {
            (Opcode::ReadRequest, ReadRequest::LEN) => {
                let request = ReadRequest {
                    sink_stag: self.sink.0,
                    sink_to: To(self.sink.1),
                    size: self.size,
                    source_stag: self.source.0,
                    source_to: To(self.source.1),
                };
                body.copy_from_slice(&request.emit());
            }
            (Opcode::AtomicRequest, AtomicRequest::LEN) => {
                let (stag, to) = (self.source.0, To(self.source.1));
                let swaps = body[3] == 2;
                let request = if swaps {
                    AtomicRequest::cmp_swap(self.id, stag, to, self.data[1], self.data[0])
                } else {
                    AtomicRequest::fetch_add(self.id, stag, to, self.data[0])
                };
                body.copy_from_slice(&request.emit());
                if let Some(aop) = self.aop {
                    body[3] = aop;
                }
            }
            (Opcode::AtomicResponse, AtomicResponse::LEN) => {
                let response = AtomicResponse {
                    id: self.id,
                    value: self.value,
                };
                body.copy_from_slice(&response.emit());
            }
            (Opcode::Immediate | Opcode::ImmediateSolicited, 8) => {
                body[..4].copy_from_slice(&(self.value as u32).to_be_bytes());
            }
            _ => {}
        }
    }
}
