//! A UDP socket of the program whose datagrams a rule may turn into messages of datagram-iWARP.
//!
//! Each datagram in the kernel's socket is delivered to the program: a message as its payload, any other (*plain*) datagram
//! unchanged. The library queues nothing and sends nothing of its own, so all waiting is done by the kernel. A datagram that
//! cannot be sent as a message is sent plain, which every receiver accepts.

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

/// The socket is registered in the directory as one that understands messages.
const ENTERED: u32 = 1;
/// The socket stays plain.
const PINNED: u32 = 2;
/// The program has called `bind` on the socket.
const BOUND: u32 = 4;
/// `UDP_CORK` is set: a datagram is built by several calls and is sent plain.
const CORKED: u32 = 8;
/// The kernel holds the beginning of a datagram that the program sent with `MSG_MORE`.
const MORE: u32 = 16;
/// `UDP_SEGMENT` is set: the kernel makes several datagrams of one call. They are sent plain.
const SEGMENTS: u32 = 32;
/// The socket was registered at some time, so messages may still arrive.
const EXPECTS: u32 = 64;
/// `SO_PEEK_OFF` is set: the program may read from the middle of a datagram, so its calls go to the kernel unchanged.
const MIDDLE: u32 = 128;
/// `IP_RECVERR` is set: the kernel queues error reports for the program.
const REPORTS: u32 = 256;
/// IP fragmentation is off: the kernel refuses datagrams that are longer than the path MTU.
const WHOLE: u32 = 512;
/// `peer` is out of date: it could not be locked when the program changed it.
const STALE: u32 = 1024;

/// The number of UDP sockets of this process that may have messages.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

/// A UDP socket.
#[derive(Debug)]
pub struct Dgram {
    state: AtomicU32,
    /// The rule for the local address: 0 none, 1 Send, 2 Write-Record. The flag 4 is added if
    /// peers are assumed to understand messages.
    own: AtomicU8,
    /// 1: the table of sockets shows this socket as one that sends Write-Records.
    shown: AtomicU8,
    numbers: AtomicUsize,
    /// The descriptor that holds the socket's name in the directory, or -1.
    name: AtomicI32,
    /// The socket's number in the headers of its messages. Random, as is the first message number.
    epoch: AtomicU32,
    id: AtomicU32,
    received: AtomicU32,
    /// The peer of a connected socket. Only `try_lock` is used, so that no call blocks: a datagram is sent plain if another thread
    /// holds the lock, or held it when the process forked.
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

/// Returns whether the address is multicast or broadcast. Such datagrams stay plain, because not all receivers may understand
/// messages.
fn is_group(addr: SocketAddr) -> bool {
    match addr.ip().to_canonical() {
        std::net::IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        std::net::IpAddr::V6(ip) => ip.is_multicast(),
    }
}

impl Dgram {
    /// Returns the state for a new socket of the program.
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

    /// Returns whether received messages are unwrapped.
    pub fn opens(&self) -> bool {
        !self.has(MIDDLE)
    }

    /// Returns whether messages may still arrive.
    pub fn expects(&self) -> bool {
        self.has(EXPECTS)
    }

    /// Records that the program sets `SO_PEEK_OFF`: each peek continues where the last one ended.
    pub fn reads_from_the_middle(&self, on: bool) {
        self.put(MIDDLE, on);
    }

    /// Called after the program has bound the socket.
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

    /// Called after the program has connected the socket, or disconnected it (`None`).
    pub fn connected(&self, fd: c_int, peer: Option<SocketAddr>) {
        self.set_peer(peer);
        match peer {
            Some(peer) => {
                // The peer may send before the program does, so the socket is registered now.
                if let Some(kind) = self.kind_to(peer) {
                    self.enter(fd, kind);
                }
            }
            // The kernel has released the port, which the kernel had chosen.
            None if !self.has(BOUND) => self.leave(fd),
            None => {}
        }
    }

    fn set_peer(&self, peer: Option<SocketAddr>) {
        // Readers hold the lock for a few instructions, unless they were preempted.
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

    /// Returns the peer of a connected socket.
    pub fn peer(&self) -> Option<SocketAddr> {
        let peer = self.peer.try_read().ok().and_then(|peer| *peer);
        peer.filter(|_| !self.has(STALE))
    }

    /// Registers the socket in the directory. `kind`: the kind of the messages that it sends.
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
                // Another thread has closed the socket meanwhile.
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

    /// Removes the socket from the directory.
    fn leave(&self, fd: c_int) {
        if self.state.fetch_and(!ENTERED, Ordering::AcqRel) & ENTERED != 0 {
            show::forget(fd);
        }
        let name = self.name.swap(-1, Ordering::AcqRel);
        if name >= 0 && directory::leave_udp(name) {
            table::close_own(name);
        }
    }

    /// Makes the socket plain permanently. Messages that have arrived or are on the way are still unwrapped.
    pub fn pin(&self, fd: c_int, why: Why) {
        self.put(PINNED, true);
        let name = self.name.load(Ordering::Acquire);
        if name >= 0 {
            // This also ends the name for processes that inherited it by fork.
            directory::end_udp(name);
        }
        self.leave(fd);
        show::plain(fd, why);
    }

    /// Records `UDP_CORK`.
    pub fn cork(&self, on: bool) {
        self.put(CORKED, on);
    }

    /// Records `UDP_SEGMENT`.
    pub fn segment(&self, on: bool) {
        self.put(SEGMENTS, on);
    }

    /// Records `IP_RECVERR`.
    pub fn report(&self, on: bool) {
        self.put(REPORTS, on);
    }

    /// Records whether `IP_MTU_DISCOVER` has a value that turns IP fragmentation off.
    pub fn keep_whole(&self, on: bool) {
        self.put(WHOLE, on);
    }

    /// Returns whether the kernel holds the beginning of a datagram, which the next call continues.
    pub fn holds_back(&self) -> bool {
        self.has(MORE)
    }

    /// See [`Self::holds_back`].
    pub fn hold_back(&self, on: bool) {
        self.put(MORE, on);
    }

    /// Returns whether datagrams may be sent as messages. Not with `IP_RECVERR` and fragmentation off: a datagram that exceeds the
    /// path MTU only because of the added headers would leave an error report in the queue.
    pub fn may_send(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state & (PINNED | CORKED | MORE | SEGMENTS) == 0
            && state & (REPORTS | WHOLE) != REPORTS | WHOLE
    }

    /// Returns the kind of the messages to `peer`, or `None` if datagrams to it are plain.
    pub fn kind_to(&self, peer: SocketAddr) -> Option<Kind> {
        let own = self.own.load(Ordering::Relaxed);
        let known = match peers::get(peer) {
            // The entry may have been made for a socket without a rule, which does not query the directory.
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

    /// Returns the numbers for the next message: that of the socket and that of the message. Registers the socket, because the peer
    /// may answer with messages.
    pub fn next(&self, fd: c_int, kind: Kind) -> (u16, u32) {
        if !self.has(ENTERED) {
            self.enter(fd, kind);
        }
        let id = self.id.fetch_add(1, Ordering::Relaxed);
        (self.epoch.load(Ordering::Relaxed) as u16, id)
    }

    /// Counts a sent message of `bytes` payload bytes.
    pub fn sent(&self, fd: c_int, bytes: usize) {
        show::message(fd, self.shown(), 0, bytes);
    }

    /// Counts a received message, of which the program has read `bytes` payload bytes.
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

    /// Counts one more descriptor of the socket.
    pub fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// Called when the program closes a descriptor of the socket, after it was removed from the table.
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

/// Looks a peer up in the rules and the directory, and caches the result.
fn find_out(peer: SocketAddr, bound: bool) -> Known {
    let errno = sys::errno();
    let rule = policy::datagrams(Role::Send, peer);
    let asks = match rule {
        None => bound,
        Some((mode, unasked)) => mode.upgrades() && !unasked,
    };
    let may = rule.map_or(bound, |(mode, _)| mode.upgrades()) && !is_group(peer);
    // A broadcast address is treated as a group.
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
