//! A UDP socket of the program whose datagrams a rule may turn into messages of datagram-iWARP.
//!
//! Each datagram in the kernel's socket is delivered to the program: a message as its payload, any other (*plain*) datagram
//! unchanged. The library queues nothing and sends nothing of its own, so all waiting is done by the kernel. A datagram that
//! cannot be sent as a message is sent plain, which every receiver accepts.
//!
//! If a rule may make datagrams reliable, a thread of the library reads and writes the kernel's socket, and the program's calls use one
//! end of a pair of local sockets: see `reliable.rs`.

use crate::conn::answers;
use crate::conn::reliable::{self, Shared};
use crate::conn::show;
use crate::conn::table;
use crate::directory::{self, Answer};
use crate::limits;
use crate::log;
use crate::message::Kind;
use crate::owner;
use crate::peers::{self, Known};
use crate::policy;
use crate::record;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use sockets_base::name::Protocol;
use sockets_base::rules::{Mode, Role};
use sockets_base::stat::{State, Why};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

/// The socket is registered in the directory as one that accepts messages.
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

/// The number of UDP sockets of this process whose datagrams may be messages.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

/// A UDP socket.
#[derive(Debug)]
pub struct Dgram {
    state: AtomicU32,
    /// The rule for the local address: 0 none, 1 Send, 2 Write-Record, 3 reliable Send. The flag 4 is added if
    /// peers are assumed to accept messages.
    own: AtomicU8,
    /// The [`Kind`] of messages that this socket sends, as a number. The table of sockets shows it.
    shown: AtomicU8,
    numbers: AtomicUsize,
    /// The descriptor that holds the socket's name in the directory, or -1.
    name: AtomicI32,
    /// The descriptor that holds the socket's name as one that accepts reliable datagrams, or -1.
    reliable_name: AtomicI32,
    /// The program's end of the pair of local sockets, or -1.
    pair: AtomicI32,
    /// The process whose thread serves the socket. 0: none does.
    server: RwLock<Option<&'static AtomicU32>>,
    shared: RwLock<Arc<Shared>>,
    /// The socket's number in the headers of its messages. Random, as is the first message number.
    epoch: AtomicU32,
    id: AtomicU32,
    received: AtomicU32,
    /// The peer of a connected socket. Only `try_read` and `try_write` are used, so that no call blocks: a datagram is sent plain if
    /// another thread changes the peer, or did so when the process forked.
    peer: RwLock<Option<SocketAddr>>,
}

static FREE: Mutex<Vec<&'static Dgram>> = Mutex::new(Vec::new());

fn rule_bits(rule: Option<(Mode, bool)>) -> u8 {
    match rule {
        Some((Mode::Datagram, unasked)) => 1 | u8::from(unasked) << 2,
        Some((Mode::Record, unasked)) => 2 | u8::from(unasked) << 2,
        Some((Mode::Reliable, unasked)) => 3 | u8::from(unasked) << 2,
        _ => 0,
    }
}

fn kind_of(bits: u8) -> Option<Kind> {
    match bits & 3 {
        1 => Some(Kind::Send),
        2 => Some(Kind::Record),
        3 => Some(Kind::Reliable),
        _ => None,
    }
}

/// Returns whether the address is a multicast address or 255.255.255.255. Datagrams to it stay plain, because some of the receivers may
/// not accept messages. [`find_out`] handles the broadcast addresses of networks.
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
                reliable_name: AtomicI32::new(-1),
                pair: AtomicI32::new(-1),
                server: RwLock::new(None),
                shared: RwLock::new(Arc::default()),
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
        // A socket without its pair cannot be reliable.
        let reliable = self
            .pair()
            .map(|_| (Protocol::Reliable, &self.reliable_name));
        for (protocol, place) in [(Protocol::Udp, &self.name)].into_iter().chain(reliable) {
            let Some((name, is_new)) = directory::enter_udp(fd, protocol, own) else {
                continue;
            };
            if is_new {
                table::own(name);
            }
            place.store(name, Ordering::Release);
            if !self.has(ENTERED) {
                // Another thread has closed the socket meanwhile.
                self.leave(fd);
                return;
            }
        }
        answers::start();
        log::with(|| format!("datagrams {fd}: {own} accepts messages"));
        self.shown.store(kind as u8, Ordering::Relaxed);
        show::datagrams(fd, self.shown());
    }

    fn shown(&self) -> State {
        match self.shown.load(Ordering::Relaxed) {
            0 => State::Datagram,
            1 => State::Record,
            _ => State::Reliable,
        }
    }

    /// Removes the socket from the directory.
    fn leave(&self, fd: c_int) {
        if self.state.fetch_and(!ENTERED, Ordering::AcqRel) & ENTERED != 0 {
            show::forget(fd);
        }
        for place in self.names() {
            let name = place.swap(-1, Ordering::AcqRel);
            if name >= 0 && directory::leave_udp(name) {
                table::close_own(name);
            }
        }
    }

    fn names(&self) -> [&AtomicI32; 2] {
        [&self.name, &self.reliable_name]
    }

    /// Makes the socket plain permanently. Messages that have arrived or are on the way are still unwrapped.
    pub fn pin(&self, fd: c_int, why: Why) {
        self.put(PINNED, true);
        for place in self.names() {
            let name = place.load(Ordering::Acquire);
            if name >= 0 {
                // This also ends the name for processes that inherited it by fork.
                directory::end_udp(name);
            }
        }
        self.leave(fd);
        show::plain(fd, why);
    }

    /// Makes the socket plain because it is passed to another program, which then receives the datagrams itself.
    pub fn hand_over(&self, fd: c_int) {
        self.release();
        self.pin(fd, Why::Handed);
    }

    /// Records `UDP_CORK`.
    pub fn cork(&self, on: bool) {
        self.put(CORKED, on);
        if on {
            self.with_shared(|shared| shared.build(true));
        }
    }

    /// Called after the kernel has sent what was corked.
    pub fn uncorked(&self) {
        self.with_shared(|shared| shared.build(self.has(CORKED | MORE)));
    }

    /// Records `UDP_SEGMENT`.
    pub fn segment(&self, on: bool) {
        self.put(SEGMENTS, on);
        self.with_shared(|shared| shared.segment(on));
    }

    /// Records `IP_RECVERR`.
    pub fn report(&self, on: bool) {
        self.put(REPORTS, on);
    }

    /// Records whether `IP_MTU_DISCOVER` has a value that turns IP fragmentation off.
    pub fn keep_whole(&self, on: bool) {
        self.put(WHOLE, on);
    }

    /// Returns whether the kernel refuses datagrams that are longer than the path MTU.
    pub fn is_kept_whole(&self) -> bool {
        self.has(WHOLE)
    }

    /// Returns whether the kernel holds the beginning of a datagram, which the next call continues.
    pub fn holds_back(&self) -> bool {
        self.has(MORE)
    }

    /// See [`Self::holds_back`].
    pub fn hold_back(&self, on: bool) {
        self.put(MORE, on);
        self.with_shared(|shared| shared.build(on || self.has(CORKED)));
    }

    /// Returns whether datagrams may be sent as messages. With `IP_RECVERR` and fragmentation off they may not: a datagram
    /// that exceeds the path MTU only because of the added headers would leave an error report in the queue.
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
            Some(known) if known.rule.is_some() || own == 0 || is_known(known, own) => known,
            known => find_out(peer, own, known),
        };
        let bits = match known.rule {
            None => own,
            rule => rule_bits(rule),
        };
        let kind = kind_of(bits)?;
        let answer = match kind {
            Kind::Reliable => known.reliable,
            Kind::Send | Kind::Record => known.messages,
        };
        let may = !is_group(peer) && (answer == Some(true) || bits & 4 != 0);
        let is_possible = kind != Kind::Reliable || self.may_be_reliable(peer);
        may.then_some(if is_possible { kind } else { Kind::Send })
    }

    /// Returns whether datagrams to `peer` may be reliable. A connected socket does not receive the acknowledgements of other
    /// peers. With IP_RECVERR an error report contains the datagram that was sent, and the library can
    /// unwrap it only if it is a message.
    fn may_be_reliable(&self, peer: SocketAddr) -> bool {
        let is_peer = |own: SocketAddr| {
            own.port() == peer.port() && own.ip().to_canonical() == peer.ip().to_canonical()
        };
        self.pair().is_some() && !self.has(REPORTS) && self.peer().is_none_or(is_peer)
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
            let errno = sys::errno();
            for place in self.names() {
                let name = place.load(Ordering::Acquire);
                if name >= 0 {
                    directory::sweep_udp(name);
                }
            }
            sys::set_errno(errno);
        }
    }

    /// Counts one more descriptor of the socket.
    pub fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// Called when the program closes a descriptor of the socket, after the descriptor was removed from the table.
    pub fn closing(&'static self, fd: c_int) {
        if self.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.leave(fd);
            self.close_end();
            LIVE.fetch_sub(1, Ordering::Relaxed);
            if let Some(mut free) = FREE.try_lock() {
                free.push(self);
            }
        }
    }
}

/// Reliable datagrams.
impl Dgram {
    /// Prepares a new socket for reliable datagrams. Without descriptors for the pair its datagrams are unreliable.
    pub fn make_reliable(&self, fd: c_int) {
        let most = sys::descriptors() / limits::RELIABLE_PART;
        if reliable::LIVE.load(Ordering::Acquire) >= most {
            return;
        }
        let Some([pair, other]) = sys::pair() else {
            return;
        };
        for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            sys::copy_option(fd, pair, name);
        }
        // A large buffer, so that the program and the thread wake each other less often.
        for end in [pair, other] {
            let _ = sys::set_option(end, libc::SOL_SOCKET, libc::SO_SNDBUF, limits::PAIR);
        }
        let is_v6 = sys::option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Ok(libc::AF_INET6);
        let (level, name) = if is_v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
        } else {
            (libc::IPPROTO_IP, libc::IP_PKTINFO)
        };
        let shared = Arc::<Shared>::default();
        shared.set_end(other);
        shared.want_info(sys::option(fd, level, name).unwrap_or(0) != 0);
        // Acknowledgements have to come from the address that the packet was sent to.
        let _ = sys::set_option(fd, level, name, 1);
        table::own(pair);
        table::own(other);
        if let Ok(mut place) = self.server.write() {
            *place = owner::word(owner::NOBODY);
            if let Some(word) = *place {
                shared.set_server(word);
            }
        }
        if let Ok(mut place) = self.shared.write() {
            *place = shared;
        }
        self.pair.store(pair, Ordering::Release);
        reliable::LIVE.fetch_add(1, Ordering::AcqRel);
    }

    fn with_shared<R: Default>(&self, call: impl FnOnce(&Shared) -> R) -> R {
        if self.pair().is_none() {
            return R::default();
        }
        self.shared
            .try_read()
            .map_or_else(|_| R::default(), |shared| call(&shared))
    }

    /// Called before a datagram is sent through the kernel's socket, not through the pair.
    pub fn sends_itself(&self) {
        self.with_shared(Shared::sends_itself);
    }

    /// Returns whether there is a pending error for the program.
    pub fn has_error(&self) -> bool {
        self.with_shared(Shared::has_error)
    }

    /// Takes the pending error of a socket with a pair, or 0.
    pub fn take_error(&self) -> i32 {
        self.with_shared(Shared::take_error)
    }

    /// Moves descriptors of the library to other numbers, because the program is about to put one of its own at `fd`.
    pub fn move_away(&self, fd: c_int) {
        if self.pair() == Some(fd) {
            reliable::move_to_other(&self.pair);
        }
        self.with_shared(|shared| shared.move_away(fd));
    }

    /// Returns the program's end of the pair, if datagrams of the socket may be reliable.
    #[inline]
    pub fn pair(&self) -> Option<c_int> {
        let pair = self.pair.load(Ordering::Acquire);
        (pair >= 0).then_some(pair)
    }

    /// Returns the program's end for a call that reads, writes or waits. Starts the thread that serves the socket if none does.
    pub fn served(&self, fd: c_int) -> Option<c_int> {
        let pair = self.pair()?;
        let word = self.server.try_read().ok().and_then(|word| *word)?;
        let me = owner::me();
        let server = owner::owner_of(word);
        // In a child of a fork, the parent's thread serves the socket while the parent lives.
        let is_served = server.is_some_and(|server| server == me || owner::exists(server));
        if !is_served && !owner::is_visitor() {
            let _stays = sys::NotCancelled::begin();
            // Another thread may have closed the socket meanwhile.
            let is_open = self.pair() == Some(pair);
            if is_open && owner::replace(word, server) && !self.start(fd) {
                word.store(owner::NOBODY, Ordering::Release);
            }
        }
        Some(pair)
    }

    fn start(&self, fd: c_int) -> bool {
        let errno = sys::errno();
        let is_readable = sys::poll_one(fd, libc::POLLIN, 0) == Ok(libc::POLLIN);
        let shared = self.shared.try_read().map(|shared| Arc::clone(&shared));
        let is_served = shared.is_ok_and(|shared| reliable::serve(fd, shared));
        // The first call may be one that does not wait. It must find datagrams that have arrived before it.
        if is_served
            && is_readable
            && let Some(pair) = self.pair()
        {
            let _ = sys::poll_one(pair, libc::POLLIN, limits::RELEASE as i32);
        }
        sys::set_errno(errno);
        is_served
    }

    /// Called when the process exits: the thread does not serve the socket any longer.
    pub fn leave_to_others(&self) {
        if let Some(word) = self.server.try_read().ok().and_then(|word| *word) {
            let me = owner::me();
            let _ = word.compare_exchange(me, owner::NOBODY, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Records whether the program wants the destination address of each datagram. Returns whether the socket has a pair: then the
    /// option of the kernel's socket must stay set, because the library needs these addresses.
    pub fn want_info(&self, on: bool) -> bool {
        self.with_shared(|shared| {
            shared.want_info(on);
            true
        })
    }

    /// Called after the program has shut down the socket. Further datagrams go to the kernel, which returns the error.
    pub fn shut_down(&self, how: c_int) {
        if how != libc::SHUT_RD {
            self.put(PINNED, true);
        }
        if how != libc::SHUT_WR
            && let Some(pair) = self.pair()
        {
            // SAFETY: no pointer is passed.
            unsafe {
                crate::real::shutdown(pair, libc::SHUT_RD);
            }
        }
    }

    /// Closes the program's end.
    fn close_end(&self) {
        let pair = self.pair.swap(-1, Ordering::AcqRel);
        if pair < 0 {
            return;
        }
        reliable::LIVE.fetch_sub(1, Ordering::AcqRel);
        let word = self.server.try_read().ok().and_then(|word| *word);
        let server = word.and_then(owner::owner_of);
        table::close_own(pair);
        let Ok(shared) = self.shared.try_read() else {
            return;
        };
        if server != Some(owner::me()) {
            // This process has copies of the thread's descriptors, which none of its threads uses.
            shared.close_copies();
            if server.is_none() {
                shared.give_back_server();
            }
        } else {
            let errno = sys::errno();
            reliable::wait_released(&shared);
            sys::set_errno(errno);
        }
    }

    /// Ends reliable datagrams, because the socket is passed to another program. This program can still read datagrams that the thread
    /// has received before.
    fn release(&self) {
        if let Some(pair) = self.pair() {
            let bytes = record::Record::empty(record::Kind::Release).emit();
            let _ = sys::send(pair, &[std::io::IoSlice::new(&bytes)], libc::MSG_NOSIGNAL);
            let word = self.server.try_read().ok().and_then(|word| *word);
            if word.and_then(owner::owner_of).is_none() {
                self.close_end();
            }
        }
    }

    /// Called when the program's end has no more datagrams. Returns whether the socket is plain (for example because it was passed to
    /// another program, or shut down), so that the call goes to the kernel's socket.
    pub fn is_over(&self) -> bool {
        let is_over = self.has(PINNED);
        if is_over {
            self.close_end();
        }
        is_over
    }
}

fn is_known(known: Known, own: u8) -> bool {
    let answer = match kind_of(own) {
        Some(Kind::Reliable) => known.reliable,
        _ => known.messages,
    };
    answer.is_some()
}

/// Looks a peer up in the rules and the directory, and caches the result. `own`: the rule of the local address. `known`: the
/// entry that is cached, if any; its answer for the other protocol (messages or reliable datagrams) is kept.
fn find_out(peer: SocketAddr, own: u8, known: Option<Known>) -> Known {
    let errno = sys::errno();
    let rule = policy::datagrams(Role::Send, peer);
    let asks = match rule {
        None => own != 0,
        Some((mode, unasked)) => mode.upgrades() && !unasked,
    };
    let may = rule.map_or(own != 0, |(mode, _)| mode.upgrades()) && !is_group(peer);
    // The broadcast address of a network is treated as a group.
    let is_alone = may && !sys::is_broadcast(peer);
    let bits = rule.map_or(own, |rule| rule_bits(Some(rule)));
    let is_reliable = kind_of(bits) == Some(Kind::Reliable);
    let protocol = if is_reliable {
        Protocol::Reliable
    } else {
        Protocol::Udp
    };
    let answer = (asks && is_alone).then(|| directory::ask_udp(protocol, peer));
    let accepts = answer.map(|answer| answer == Answer::Yes);
    let known = if may && !is_alone {
        Known {
            rule: Some((Mode::Udp, false)),
            messages: Some(false),
            reliable: Some(false),
        }
    } else if is_reliable {
        Known {
            rule,
            messages: known.and_then(|known| known.messages),
            reliable: accepts,
        }
    } else {
        Known {
            rule,
            messages: accepts,
            reliable: known.and_then(|known| known.reliable),
        }
    };
    if answer != Some(Answer::Busy) {
        peers::set(peer, known);
    }
    sys::set_errno(errno);
    known
}
