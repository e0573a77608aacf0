//! A UDP socket of the program, where a rule lets its datagrams become messages.
//!
//! Each datagram that the kernel has for the socket is one of the program's: a message, whose payload it gets, or one that is
//! delivered as it came. Nothing is kept here and nothing is sent that the program did not send, so that all waits are the
//! kernel's. A datagram that cannot go as a message goes as it is: every receiver takes it.

use crate::conn::show;
use crate::conn::table;
use crate::directory::{self, Answer};
use crate::limits;
use crate::log;
use crate::message::Kind;
use crate::peers::{self, Known};
use crate::policy;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use sockets_base::rules::{Mode, Role};
use sockets_base::stat::{State, Why};
use std::net::SocketAddr;
use std::sync::RwLock;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// The directory says that it understands messages.
const ENTERED: u32 = 1;
/// It stays plain.
const PINNED: u32 = 2;
/// The program has bound it.
const BOUND: u32 = 4;
/// The program puts datagrams together from several calls: these are plain.
const CORKED: u32 = 8;
/// The kernel holds bytes of a datagram back that the program has begun by MSG_MORE.
const MORE: u32 = 16;
/// The kernel makes several datagrams of one call: these are plain.
const SEGMENTS: u32 = 32;
/// It has entered at some time: messages may be under way to it, also when it has left.
const EXPECTS: u32 = 64;
/// The program reads from the middle of datagrams: its calls are the kernel's.
const MIDDLE: u32 = 128;
/// The program gets the kernel's reports of errors.
const REPORTS: u32 = 256;
/// Its datagrams are not fragmented: the kernel refuses those that are too long for the path.
const WHOLE: u32 = 512;
/// Another thread had the peer when it changed.
const STALE: u32 = 1024;

/// UDP sockets of this process that may have messages.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

/// A UDP socket.
#[derive(Debug)]
pub struct Dgram {
    state: AtomicU32,
    /// What the rule about its own address says: 0 nothing, 1 Send, 2 Write-Record; 4: its peers understand messages.
    own: AtomicU8,
    /// 1: the table of sockets shows it as one that sends Write-Records.
    shown: AtomicU8,
    numbers: AtomicUsize,
    /// The descriptor that holds its name in the directory; -1: there is none.
    name: AtomicI32,
    /// Random, as are the numbers of messages first.
    epoch: AtomicU32,
    id: AtomicU32,
    received: AtomicU32,
    /// The peer that it is connected to. It is only tried to lock it: a datagram is plain if another thread has it, or had it
    /// when the process forked.
    peer: RwLock<Option<SocketAddr>>,
}

static FREE: Mutex<Vec<&'static Dgram>> = Mutex::new(Vec::new());

fn rule_bits(rule: Option<(Mode, bool)>) -> u8 {
    match rule {
        Some((Mode::Datagram, unasked)) => 1 | u8::from(unasked) << 2,
        Some((Mode::Record, unasked)) => 2 | u8::from(unasked) << 2,
        _ => 0,
    }
}

fn kind_of(bits: u8) -> Option<Kind> {
    match bits & 3 {
        1 => Some(Kind::Send),
        2 => Some(Kind::Record),
        _ => None,
    }
}

/// A group, or all hosts of a network: their members need not understand the same.
fn is_group(addr: SocketAddr) -> bool {
    match addr.ip().to_canonical() {
        std::net::IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        std::net::IpAddr::V6(ip) => ip.is_multicast(),
    }
}

impl Dgram {
    /// A socket that the program has made.
    pub fn new() -> &'static Self {
        let free = FREE.try_lock().and_then(|mut free| free.pop());
        let it = free.unwrap_or_else(|| {
            Box::leak(Box::new(Self {
                state: AtomicU32::new(0),
                own: AtomicU8::new(0),
                shown: AtomicU8::new(0),
                numbers: AtomicUsize::new(1),
                name: AtomicI32::new(-1),
                epoch: AtomicU32::new(0),
                id: AtomicU32::new(0),
                received: AtomicU32::new(0),
                peer: RwLock::new(None),
            }))
        });
        it.state.store(0, Ordering::Relaxed);
        it.own.store(0, Ordering::Relaxed);
        it.numbers.store(1, Ordering::Relaxed);
        let random = sys::random();
        it.epoch.store(random as u32, Ordering::Relaxed);
        it.id.store((random >> 32) as u32, Ordering::Relaxed);
        it.set_peer(None);
        LIVE.fetch_add(1, Ordering::Relaxed);
        it
    }

    fn has(&self, bits: u32) -> bool {
        self.state.load(Ordering::Acquire) & bits != 0
    }

    fn put(&self, bits: u32, on: bool) {
        if on {
            self.state.fetch_or(bits, Ordering::AcqRel);
        } else {
            self.state.fetch_and(!bits, Ordering::AcqRel);
        }
    }

    /// Whether messages to it are opened.
    pub fn opens(&self) -> bool {
        !self.has(MIDDLE)
    }

    /// Whether messages may be under way to it.
    pub fn expects(&self) -> bool {
        self.has(EXPECTS)
    }

    /// `SO_PEEK_OFF`: a look at a datagram goes on where the last one ended.
    pub fn reads_from_the_middle(&self, on: bool) {
        self.put(MIDDLE, on);
    }

    /// The program has bound it.
    pub fn bound(&self, fd: c_int) {
        self.put(BOUND, true);
        let Some(own) = sys::name_of(fd, libc::getsockname) else {
            return;
        };
        if is_group(own) {
            return;
        }
        let rule = policy::datagrams(Role::Bind, own);
        let bits = rule_bits(rule);
        self.own.store(bits, Ordering::Relaxed);
        if let Some(kind) = kind_of(bits) {
            self.enter(fd, kind);
        }
    }

    /// The program has connected it, or ended its connection.
    pub fn connected(&self, fd: c_int, peer: Option<SocketAddr>) {
        self.set_peer(peer);
        match peer {
            Some(peer) => {
                // Answers may come before it sends anything.
                if let Some(kind) = self.kind_to(peer) {
                    self.enter(fd, kind);
                }
            }
            // The kernel has given up a port that it has chosen itself.
            None if !self.has(BOUND) => self.leave(fd),
            None => {}
        }
    }

    fn set_peer(&self, peer: Option<SocketAddr>) {
        // Those who read it have it for a few instructions, unless they were interrupted.
        for _ in 0..limits::TRIES {
            if let Ok(mut place) = self.peer.try_write() {
                *place = peer;
                self.put(STALE, false);
                return;
            }
            self.put(STALE, true);
            std::hint::spin_loop();
        }
    }

    /// The peer that it is connected to.
    pub fn peer(&self) -> Option<SocketAddr> {
        let peer = self.peer.try_read().ok().and_then(|peer| *peer);
        peer.filter(|_| !self.has(STALE))
    }

    /// Messages to it are understood from now on, and the directory says so. `kind`: of the messages that it sends.
    fn enter(&self, fd: c_int, kind: Kind) {
        if self.has(ENTERED | PINNED) {
            return;
        }
        let mut own = sys::name_of(fd, libc::getsockname);
        if own.is_some_and(|own| own.port() == 0) {
            sys::bind_any(fd);
            own = sys::name_of(fd, libc::getsockname);
        }
        let Some(own) = own.filter(|own| own.port() != 0) else {
            return;
        };
        if self.state.fetch_or(ENTERED | EXPECTS, Ordering::AcqRel) & ENTERED != 0 {
            return;
        }
        if let Some((name, is_new)) = directory::enter_udp(fd, own) {
            if is_new {
                table::own(name);
            }
            self.name.store(name, Ordering::Release);
            if !self.has(ENTERED) {
                // Another thread has closed it meanwhile.
                self.leave(fd);
                return;
            }
        }
        log::with(|| format!("datagrams {fd}: {own} understands messages"));
        self.shown
            .store(u8::from(kind == Kind::Record), Ordering::Relaxed);
        show::datagrams(fd, self.shown());
    }

    fn shown(&self) -> State {
        match self.shown.load(Ordering::Relaxed) {
            0 => State::Datagram,
            _ => State::Record,
        }
    }

    /// The directory does not name it any more.
    fn leave(&self, fd: c_int) {
        if self.state.fetch_and(!ENTERED, Ordering::AcqRel) & ENTERED != 0 {
            show::forget(fd);
        }
        let name = self.name.swap(-1, Ordering::AcqRel);
        if name >= 0 && directory::leave_udp(name) {
            table::close_own(name);
        }
    }

    /// It is to be the kernel's alone from now on. Messages that are there already, or under way, are opened.
    pub fn pin(&self, fd: c_int, why: Why) {
        self.put(PINNED, true);
        let name = self.name.load(Ordering::Acquire);
        if name >= 0 {
            // Also for processes that were forked.
            directory::end_udp(name);
        }
        self.leave(fd);
        show::plain(fd, why);
    }

    /// `UDP_CORK`.
    pub fn cork(&self, on: bool) {
        self.put(CORKED, on);
    }

    /// `UDP_SEGMENT`.
    pub fn segment(&self, on: bool) {
        self.put(SEGMENTS, on);
    }

    /// `IP_RECVERR`.
    pub fn report(&self, on: bool) {
        self.put(REPORTS, on);
    }

    /// `IP_MTU_DISCOVER`, with a value by which datagrams are not fragmented.
    pub fn keep_whole(&self, on: bool) {
        self.put(WHOLE, on);
    }

    /// Whether the kernel holds bytes back that the next call goes on with.
    pub fn holds_back(&self) -> bool {
        self.has(MORE)
    }

    /// See [`Self::holds_back`].
    pub fn hold_back(&self, on: bool) {
        self.put(MORE, on);
    }

    /// Whether datagrams may be messages. One that is too long with its headers alone would leave a report behind.
    pub fn may_send(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state & (PINNED | CORKED | MORE | SEGMENTS) == 0
            && state & (REPORTS | WHOLE) != REPORTS | WHOLE
    }

    /// What messages to a peer are; `None`: datagrams to it are plain.
    pub fn kind_to(&self, peer: SocketAddr) -> Option<Kind> {
        let own = self.own.load(Ordering::Relaxed);
        let known = match peers::get(peer) {
            // A socket without a rule of its own did not ask.
            Some(known) if known.understands.is_some() || known.rule.is_some() || own == 0 => known,
            _ => find_out(peer, own != 0),
        };
        let bits = match known.rule {
            None => own,
            rule => rule_bits(rule),
        };
        let may = !is_group(peer) && (known.understands == Some(true) || bits & 4 != 0);
        kind_of(bits).filter(|_| may)
    }

    /// The numbers of the next message: of the socket, and its own. Answers to it are understood.
    pub fn next(&self, fd: c_int, kind: Kind) -> (u16, u32) {
        if !self.has(ENTERED) {
            self.enter(fd, kind);
        }
        let id = self.id.fetch_add(1, Ordering::Relaxed);
        (self.epoch.load(Ordering::Relaxed) as u16, id)
    }

    /// A message of so many bytes was sent.
    pub fn sent(&self, fd: c_int, bytes: usize) {
        show::message(fd, self.shown(), 0, bytes);
    }

    /// A message has come, of which the program has read so many bytes.
    pub fn received(&self, fd: c_int, bytes: usize) {
        if self.has(ENTERED) {
            show::message(fd, self.shown(), bytes, 0);
        }
        let n = self.received.fetch_add(1, Ordering::Relaxed);
        if n.is_multiple_of(limits::ASKED) {
            let name = self.name.load(Ordering::Acquire);
            if name >= 0 {
                let errno = sys::errno();
                directory::sweep_udp(name);
                sys::set_errno(errno);
            }
        }
    }

    /// There is one more number of it.
    pub fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// The program closes a number of it, which the table has forgotten.
    pub fn closing(&'static self, fd: c_int) {
        if self.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.leave(fd);
            LIVE.fetch_sub(1, Ordering::Relaxed);
            if let Some(mut free) = FREE.try_lock() {
                free.push(self);
            }
        }
    }
}

/// Asks the rules and the directory about a peer.
fn find_out(peer: SocketAddr, bound: bool) -> Known {
    let errno = sys::errno();
    let rule = policy::datagrams(Role::Send, peer);
    let asks = match rule {
        None => bound,
        Some((mode, unasked)) => mode.upgrades() && !unasked,
    };
    let may = rule.map_or(bound, |(mode, _)| mode.upgrades()) && !is_group(peer);
    // All hosts of a network, as a group.
    let is_alone = may && !sys::is_broadcast(peer);
    let answer = (asks && is_alone).then(|| directory::ask_udp(peer));
    let known = if may && !is_alone {
        Known {
            rule: Some((Mode::Udp, false)),
            understands: Some(false),
        }
    } else {
        Known {
            rule,
            understands: answer.map(|answer| answer == Answer::Yes),
        }
    };
    if answer != Some(Answer::Busy) {
        peers::set(peer, known);
    }
    sys::set_errno(errno);
    known
}
