//! The thread for the reliable datagrams of the process.
//!
//! The UDP socket also receives datagrams that the program must not see: acknowledgements, repeated packets, and packets that wait
//! for an earlier one. If the program waited for the UDP socket, they would wake it. So the library creates a pair of connected
//! local sockets for each such UDP socket. The program's calls read, write and wait at one end. A thread of the library has the
//! other end and the UDP socket:
//!
//! ```text
//!  program's calls <-> end | end <-> thread: queue pair <-> UDP socket <-> network
//! ```
//!
//! Because the program calls the kernel for a local socket, blocking, time-outs, signals and all kinds of waits work as without the
//! library. The thread starts when such a socket is first used. It also serves the children of a fork. After the process that runs
//! the thread has ended, the next process that uses the socket starts its own thread.

use crate::conn::show;
use crate::conn::table;
use crate::conn::worker::spawn;
use crate::limits;
use crate::log;
use crate::message;
use crate::owner;
use crate::record::{Controls, Kind, Record, parse_source};
use crate::reliable::Reliable;
use crate::sys::{self, Inbox};
use anywarp_core::datagram::{Arrival, TxDatagram};
use anywarp_core::lock::Mutex;
use libc::{c_int, epoll_event};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The number of UDP sockets of this process with reliable datagrams.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

/// What the program's calls and the thread share about a socket.
#[derive(Debug, Default)]
pub struct Shared {
    /// The program's `close` need not wait: the thread has closed its copy of the UDP socket, or keeps it open only to send what is
    /// not acknowledged.
    released: AtomicBool,
    /// The program has set `IP_PKTINFO` or `IPV6_RECVPKTINFO`, so it gets these control messages.
    wants_info: AtomicBool,
    /// The pending error of the UDP socket, or 0. A record of the kind `Error` wakes the program.
    error: AtomicI32,
    /// The numbers of the thread's descriptors: its end of the pair, and its copy of the UDP socket.
    end: AtomicI32,
    socket: AtomicI32,
    /// Since the last error, the program has sent a datagram directly by the UDP socket, and not by the thread.
    direct: AtomicBool,
    /// `UDP_SEGMENT` is set. It must not apply to packets.
    segments: AtomicBool,
    /// True while the kernel collects a datagram from several calls of the program (MSG_MORE, UDP_CORK): a packet that is sent
    /// meanwhile would become a part of it. Changed with [`SENDING`] locked.
    builds: AtomicBool,
    /// The word with the process that serves the socket, and the number of forks when the socket got it: if the process has forked since,
    /// another process may have the socket.
    server: OnceLock<(&'static AtomicU32, u32)>,
}

impl Shared {
    /// Records whether the program gets the destination address of each datagram.
    pub fn want_info(&self, on: bool) {
        self.wants_info.store(on, Ordering::Release);
    }

    /// Returns whether an error waits for the program.
    pub fn has_error(&self) -> bool {
        self.error.load(Ordering::Acquire) != 0
    }

    /// Takes the pending error, or 0.
    pub fn take_error(&self) -> i32 {
        self.error.swap(0, Ordering::AcqRel)
    }

    /// Sets the word that the thread gives back when it no longer serves the socket.
    pub fn set_server(&self, word: &'static AtomicU32) {
        let _ = self.server.set((word, owner::forks()));
    }

    /// Gives back the word of a socket that no thread has served, unless another process may have the socket.
    pub fn give_back_server(&self) {
        if let Some((word, forks)) = self.server.get()
            && *forks == owner::forks()
        {
            owner::give_back_unowned(word);
        }
    }

    /// Sets the descriptor number of the thread's end.
    pub fn set_end(&self, end: c_int) {
        self.end.store(end, Ordering::Release);
    }

    /// Returns the descriptor number of the thread's end.
    pub fn end(&self) -> c_int {
        self.end.load(Ordering::Acquire)
    }

    fn socket(&self) -> c_int {
        self.socket.load(Ordering::Acquire)
    }

    /// Stores the number of the thread's copy of the UDP socket, and closes the copy that was stored before, if any.
    fn replace_socket(&self, socket: c_int) {
        let before = self.socket.swap(socket, Ordering::AcqRel);
        // 0 is the initial value.
        if before > 0 {
            table::close_own(before);
        }
    }

    /// Closes the copies of the thread's descriptors in a process whose threads do not use them.
    pub fn close_copies(&self) {
        self.close_end();
        self.replace_socket(0);
    }

    /// Closes the thread's end of the pair.
    fn close_end(&self) {
        let end = self.end.swap(-1, Ordering::AcqRel);
        if end >= 0 {
            table::close_own(end);
        }
    }

    /// Moves a descriptor of the thread to another number, because the program is about to put one of its own there.
    pub fn move_away(&self, fd: c_int) {
        for place in [&self.end, &self.socket] {
            if place.load(Ordering::Acquire) == fd {
                move_to_other(place);
            }
        }
    }

    /// Called before the program sends a datagram directly by the UDP socket.
    pub fn sends_itself(&self) {
        self.direct.store(true, Ordering::Release);
    }

    /// Records `UDP_SEGMENT`.
    pub fn segment(&self, on: bool) {
        self.segments.store(on, Ordering::Release);
    }

    /// Called before the first and after the last of several calls from which the kernel builds a datagram.
    pub fn build(&self, on: bool) {
        if self.builds.load(Ordering::Acquire) == on {
            return;
        }
        let sending = SENDING.lock();
        self.builds.store(on, Ordering::Release);
        drop(sending);
        if !on {
            wake_thread();
        }
    }
}

/// Duplicates the descriptor with the number at `place`, and stores the number of the copy.
pub fn move_to_other(place: &AtomicI32) {
    if let Some(copy) = sys::copy_high(place.load(Ordering::Acquire)) {
        table::own(copy);
        place.store(copy, Ordering::Release);
    }
}

/// A socket for the thread to serve.
#[derive(Debug)]
struct Job {
    /// The number of the program's descriptor, for the log.
    fd: c_int,
    shared: Arc<Shared>,
    rd: Reliable,
}

/// Whether the thread runs, and the sockets that it has not taken over yet.
#[derive(Debug, Default)]
struct ThreadState {
    new: Vec<Job>,
    /// The sockets of which the thread has copies.
    served: Vec<Arc<Shared>>,
    is_running: bool,
}

/// The eventfd that wakes the thread, and its epoll set, or -1.
static WAKE: AtomicI32 = AtomicI32::new(-1);
static SET: AtomicI32 = AtomicI32::new(-1);

static THREAD: Mutex<Option<ThreadState>> = Mutex::new(None);
/// Locked while the thread sends a packet. One lock for all sockets, so that a fork can hold it.
static SENDING: Mutex<()> = Mutex::new(());
/// Tells the thread to close its copies of sockets that the program has closed, because the program needs their port.
static ABANDONS: AtomicBool = AtomicBool::new(false);
/// The number of closed sockets whose datagrams are not all acknowledged.
static DRAINING: AtomicUsize = AtomicUsize::new(0);
/// Set when the process exits. 1 asks the thread to report when all datagrams are acknowledged, and 2 is its report.
static EXIT: AtomicU32 = AtomicU32::new(0);

fn wake_thread() {
    let fd = WAKE.load(Ordering::Acquire);
    if fd >= 0 {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer has eight bytes.
        let _ = unsafe { crate::real::write(fd, one.as_ptr().cast(), one.len()) };
    }
}

/// Moves the eventfd or the epoll set to another number if it is at `fd`, because the program is about to put a descriptor of its
/// own there.
pub fn move_away(fd: c_int) {
    for place in [&WAKE, &SET] {
        if place.load(Ordering::Acquire) == fd {
            move_to_other(place);
        }
    }
}

/// Starts the thread. If this fails, no descriptor stays open, because each later call tries it again.
fn start() -> bool {
    let Some(set) = sys::epoll() else {
        return false;
    };
    let Some(wake) = sys::eventfd() else {
        sys::close(set);
        return false;
    };
    table::own(set);
    table::own(wake);
    sys::epoll_change(
        set,
        libc::EPOLL_CTL_ADD,
        wake,
        libc::EPOLLIN as u32,
        WAKE_EVENT,
    );
    WAKE.store(wake, Ordering::Release);
    SET.store(set, Ordering::Release);
    let is_running = spawn("anywarp-rd", || Thread::new().run());
    if !is_running {
        close_descriptors();
    }
    is_running
}

/// Closes the eventfd and the epoll set of a thread that does not run.
fn close_descriptors() {
    for place in [&WAKE, &SET] {
        let fd = place.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            table::close_own(fd);
        }
    }
}

/// Makes the thread serve the UDP socket `fd`. Returns false if no thread, descriptor or queue pair can be created.
pub fn serve(fd: c_int, shared: Arc<Shared>) -> bool {
    let Some(rd) = Reliable::new(path_mtu, sys::random) else {
        return false;
    };
    let mut guard = THREAD.lock();
    let thread = guard.get_or_insert_default();
    if !thread.is_running {
        thread.is_running = start();
        if !thread.is_running {
            return false;
        }
    }
    let Some(socket) = sys::copy_high(fd) else {
        return false;
    };
    table::own(socket);
    show::own(socket);
    // A child of a fork has a copy of the parent's descriptor, which is closed here.
    shared.replace_socket(socket);
    thread.served.push(Arc::clone(&shared));
    thread.new.push(Job { fd, shared, rd });
    wake_thread();
    true
}

/// Waits until the thread has released a socket that the program has closed.
pub fn wait_released(shared: &Shared) {
    let until = Instant::now() + Duration::from_millis(limits::RELEASE);
    while !shared.released.load(Ordering::Acquire) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Makes the thread close its copies of the sockets that the program has closed, although not all datagrams are acknowledged: the
/// program needs a port that they hold. Returns whether there were any.
pub fn abandon() -> bool {
    if DRAINING.load(Ordering::Acquire) == 0 {
        return false;
    }
    ABANDONS.store(true, Ordering::Release);
    wake_thread();
    let until = Instant::now() + Duration::from_millis(limits::RELEASE);
    while DRAINING.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(50));
    }
    true
}

/// Called when the process exits: waits until the peers have acknowledged its datagrams, then lets other processes that have the
/// sockets serve them.
pub fn end() {
    if LIVE.load(Ordering::Relaxed) + DRAINING.load(Ordering::Relaxed) == 0 {
        return;
    }
    finish(Instant::now() + Duration::from_millis(limits::EXIT_WAIT as u64));
    table::for_each(|_, entry| {
        if let table::Entry::Dgram(dgram) = entry {
            dgram.leave_to_others();
        }
    });
}

/// Waits until the peers have acknowledged all datagrams, but not longer than `until`.
fn finish(until: Instant) {
    // A signal handler may end the process while this thread holds the lock.
    let is_running = THREAD
        .try_lock()
        .is_some_and(|t| t.as_ref().is_some_and(|t| t.is_running));
    if !is_running {
        return;
    }
    EXIT.store(1, Ordering::Release);
    wake_thread();
    while EXIT.load(Ordering::Acquire) == 1 && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Locks the state of the thread while the process forks, and keeps the thread from sending: the child would inherit a lock that no
/// thread of its own releases.
pub fn hold() -> Held {
    Held {
        thread: THREAD.lock(),
        _sending: SENDING.lock(),
    }
}

/// The locks of [`hold`].
#[derive(Debug)]
pub struct Held {
    thread: MutexGuard<'static, Option<ThreadState>>,
    _sending: MutexGuard<'static, ()>,
}

impl Held {
    /// Called in the child of a fork, which has no thread.
    pub fn forked(mut self) {
        if let Some(state) = self.thread.take() {
            // Also of sockets that the program has closed. If this process serves one of the others later, it makes its own copy.
            for shared in state.served {
                shared.replace_socket(0);
            }
            close_descriptors();
        }
        DRAINING.store(0, Ordering::Release);
    }
}

// ---------------------------------------------------------------------- the thread

/// The epoll data of the eventfd. The data of a socket is twice its key in [`Thread::sockets`], plus one for its UDP socket.
const WAKE_EVENT: u64 = u64::MAX;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const EDGE: u32 = libc::EPOLLET as u32;

thread_local! {
    static PATHS: RefCell<HashMap<IpAddr, (u16, u64)>> = RefCell::new(HashMap::new());
}

fn path_mtu(ip: IpAddr) -> u16 {
    let now = sys::now_ms();
    PATHS.with_borrow_mut(|paths| {
        if let Some((mtu, since)) = paths.get(&ip)
            && now - since < limits::PATH
        {
            return *mtu;
        }
        if paths.len() >= limits::PATHS {
            paths.clear();
        }
        let mtu = sys::path_mtu(ip);
        paths.insert(ip, (mtu, now));
        mtu
    })
}

fn set() -> c_int {
    SET.load(Ordering::Acquire)
}

struct Thread {
    start: Instant,
    sockets: HashMap<u64, Socket>,
    next: u64,
    deadlines: BTreeSet<(Duration, u64)>,
    inbox: Inbox,
    bytes: Vec<u8>,
    packets: Vec<TxDatagram>,
}

struct Socket {
    fd: c_int,
    now: Duration,
    /// The size of the socket's receive buffer.
    room: u32,
    is_v6: bool,
    shared: Arc<Shared>,
    rd: Reliable,
    /// The records for which the program's end has no room yet.
    records: VecDeque<Vec<u8>>,
    backlog: usize,
    /// Packets that the UDP socket does not accept yet.
    unsent: VecDeque<TxDatagram>,
    deadline: Option<Duration>,
    /// The UDP socket may have datagrams that were not received yet.
    has_more: bool,
    /// The program has sent a datagram since the last error.
    has_sent: bool,
    /// The epoll events that are requested for the thread's end.
    events: u32,
    /// The thread's end is no longer in the epoll set.
    has_left: bool,
    /// Set when the program has closed its end or passed the socket on: the latest time at which the thread closes the socket.
    until: Option<Instant>,
    /// The thread must not use the UDP socket any more.
    is_passed_on: bool,
}

impl Thread {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            sockets: HashMap::new(),
            next: 0,
            deadlines: BTreeSet::new(),
            inbox: Inbox::allocate(),
            bytes: vec![0; limits::RECORD],
            packets: Vec::new(),
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn run(mut self) {
        let mut events = vec![epoll_event { events: 0, u64: 0 }; 64];
        let mut again = Vec::new();
        loop {
            let wait = match self.deadlines.first() {
                _ if !again.is_empty() => 0,
                Some((at, _)) => {
                    let left = at.saturating_sub(self.now());
                    // Rounded up, so that the deadline has passed afterwards.
                    c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
                }
                None => -1,
            };
            let n = sys::epoll_wait(set(), &mut events, wait);
            let mut ready: BTreeSet<u64> = again.drain(..).collect();
            for event in events.iter().take(n) {
                let data = event.u64;
                if data == WAKE_EVENT {
                    self.add_new();
                    // A socket may be able to send again.
                    let waits = self.sockets.iter().filter(|(_, s)| !s.unsent.is_empty());
                    ready.extend(waits.map(|(id, _)| *id));
                    continue;
                }
                if let Some(socket) = self.sockets.get_mut(&(data >> 1)) {
                    if data & 1 == 1 {
                        socket.has_more = true;
                    } else if event.events & libc::EPOLLHUP as u32 != 0 {
                        socket.leave_set();
                    }
                }
                ready.insert(data >> 1);
            }
            let now = self.now();
            while let Some((at, id)) = self.deadlines.first().copied()
                && at <= now
            {
                self.deadlines.pop_first();
                ready.insert(id);
            }
            // `EXIT` is loaded before the turns, so that the report below covers everything that the program wrote before it set
            // `EXIT`.
            let exits = EXIT.load(Ordering::Acquire) == 1;
            if exits || ABANDONS.load(Ordering::Acquire) {
                ready.extend(self.sockets.keys());
            }
            let abandons = ABANDONS.swap(false, Ordering::AcqRel);
            for id in ready {
                if self.turn(id, abandons) {
                    again.push(id);
                }
            }
            if exits && again.is_empty() && !self.sockets.values().any(Socket::is_busy) {
                EXIT.store(2, Ordering::Release);
            }
        }
    }

    /// Takes over the new sockets.
    fn add_new(&mut self) {
        let mut eight = [0u8; 8];
        // SAFETY: the buffer has eight bytes.
        let _ = unsafe {
            crate::real::read(
                WAKE.load(Ordering::Acquire),
                eight.as_mut_ptr().cast(),
                eight.len(),
            )
        };
        let new = THREAD
            .lock()
            .as_mut()
            .map_or_else(Vec::new, |thread| std::mem::take(&mut thread.new));
        for job in new {
            let fd = job.shared.socket();
            let option = |name| sys::option(fd, libc::SOL_SOCKET, name);
            let room = option(libc::SO_RCVBUF).unwrap_or(0);
            let mut socket = Socket {
                now: Duration::ZERO,
                room: u32::try_from(room).unwrap_or(0),
                fd: job.fd,
                is_v6: option(libc::SO_DOMAIN) == Ok(libc::AF_INET6),
                shared: job.shared,
                rd: job.rd,
                records: VecDeque::new(),
                backlog: 0,
                unsent: VecDeque::new(),
                deadline: None,
                has_more: false,
                has_sent: false,
                events: IN,
                has_left: false,
                until: None,
                is_passed_on: false,
            };
            socket.rd.set_room(socket.room);
            let id = self.next;
            self.next += 1;
            let add = libc::EPOLL_CTL_ADD;
            let end = socket.shared.end();
            sys::epoll_change(set(), add, end, IN, id << 1);
            sys::epoll_change(set(), add, fd, IN | OUT | EDGE, id << 1 | 1);
            self.sockets.insert(id, socket);
        }
    }

    /// Receives, delivers and sends for a socket what is possible without waiting. Returns whether there is more to do at once.
    fn turn(&mut self, id: u64, abandons: bool) -> bool {
        let now = self.now();
        let Some(socket) = self.sockets.get_mut(&id) else {
            return false;
        };
        socket.now = now;
        socket.rd.set_now(now);
        socket.receive(&mut self.inbox);
        if socket.rd.timeout().is_some_and(|at| at <= now) {
            socket.rd.handle_timeout();
        }
        socket.deliver();
        let was_open = socket.until.is_none();
        let more = socket.take(&mut self.bytes);
        socket.transmit(&mut self.packets);
        if socket.done() && socket.events & IN == 0 {
            // There is room for further datagrams of the program now.
            socket.take(&mut self.bytes);
            socket.transmit(&mut self.packets);
        }
        socket.request_events(id);
        let deadline = socket.rd.timeout();
        if deadline != socket.deadline
            && let Some(old) = std::mem::replace(&mut socket.deadline, deadline)
        {
            self.deadlines.remove(&(old, id));
        }
        if let Some(at) = deadline {
            self.deadlines.insert((at, id));
        }
        let Some(until) = socket.until else {
            return more || socket.has_more_to_receive();
        };
        if was_open {
            DRAINING.fetch_add(1, Ordering::AcqRel);
            socket.leave_end();
        }
        if abandons || !socket.is_busy() || Instant::now() >= until {
            self.close(id);
            return false;
        }
        // The queue pair may have no deadline, for example if no packet waits for an acknowledgement. So the thread also wakes at
        // `until`.
        let latest = now + until.saturating_duration_since(Instant::now());
        if deadline.is_none_or(|at| at > latest)
            && let Some(socket) = self.sockets.get_mut(&id)
        {
            if let Some(old) = socket.deadline.replace(latest) {
                self.deadlines.remove(&(old, id));
            }
            self.deadlines.insert((latest, id));
        }
        false
    }

    fn close(&mut self, id: u64) {
        let Some(socket) = self.sockets.remove(&id) else {
            return;
        };
        if let Some(at) = socket.deadline {
            self.deadlines.remove(&(at, id));
        }
        if socket.rd.is_busy() {
            log::line(&format!(
                "datagrams {}: closed before all were acknowledged",
                socket.fd
            ));
        }
        sys::epoll_change(set(), libc::EPOLL_CTL_DEL, socket.shared.socket(), 0, 0);
        show::forget(socket.shared.socket());
        // With the lock, so that the child of a fork knows all copies.
        let mut state = THREAD.lock();
        if let Some(state) = state.as_mut() {
            state
                .served
                .retain(|shared| !Arc::ptr_eq(shared, &socket.shared));
        }
        socket.shared.replace_socket(0);
        drop(state);
        // A socket that was passed on must not be served again here.
        if let Some((word, forks)) = socket.shared.server.get()
            && !socket.is_passed_on
            && *forks == owner::forks()
        {
            owner::give_back(word);
        }
        socket.shared.released.store(true, Ordering::Release);
        DRAINING.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Socket {
    /// Returns whether datagrams of the program are not acknowledged, or packets not sent.
    fn is_busy(&self) -> bool {
        !self.is_passed_on && (self.rd.is_busy() || !self.unsent.is_empty())
    }

    fn has_more_to_receive(&self) -> bool {
        self.has_more && self.accepts()
    }

    /// Returns whether the thread may receive datagrams. It may not while the program has left too many unread.
    fn accepts(&self) -> bool {
        self.backlog < limits::BACKLOG
    }

    /// Adds a record for the program.
    fn give(&mut self, record: &Record<'_>) {
        if self.until.is_none() {
            let bytes = record.emit();
            self.backlog += bytes.len();
            self.records.push_back(bytes);
        }
    }

    /// Adds records for the datagrams that the queue pair has delivered. `arrived`: the datagram that was received last.
    fn give_delivered(&mut self, arrived: Option<(&sys::Received<'_>, &[u8])>) {
        loop {
            let mut all = Vec::new();
            self.rd.delivered(|d| all.push(d));
            for d in &all {
                let same = |r: &sys::Received<'_>| {
                    r.from.ip().to_canonical() == d.from.ip() && r.from.port() == d.from.port()
                };
                let mut record = Record {
                    is_message: true,
                    payload: d.payload(),
                    ..Record::empty(Kind::Datagram)
                };
                // The program gets the address and the control messages of the packet that completed the datagram.
                if let Some((received, control)) = arrived.filter(|(r, _)| same(r)) {
                    (record.name, record.control) = (received.name, control);
                    self.give(&record);
                } else {
                    let (name, len) = sys::name_bytes(d.from, self.is_v6);
                    record.name = name.get(..len).unwrap_or(&[]);
                    self.give(&record);
                }
            }
            if !self.accepts() || !self.rd.accept() {
                return;
            }
        }
    }

    /// Receives datagrams from the UDP socket.
    fn receive(&mut self, inbox: &mut Inbox) {
        let mut left = limits::TURN;
        while self.has_more && left > 0 && self.accepts() && !self.is_passed_on {
            let n = match inbox.receive(self.shared.socket()) {
                Ok(n) => n,
                Err(libc::EAGAIN) => {
                    self.has_more = false;
                    return;
                }
                Err(libc::EINTR) => continue,
                Err(errno) => {
                    left -= 1;
                    self.failed(errno);
                    continue;
                }
            };
            left = left.saturating_sub(n);
            for i in 0..n {
                if let Some(received) = inbox.get(i) {
                    self.arrived(&received);
                }
            }
        }
    }

    fn arrived(&mut self, received: &sys::Received<'_>) {
        let mut arrival = Arrival {
            from: received.from,
            to: None,
            hop_limit: 64,
            traffic_class: 0,
        };
        let mut control = Vec::new();
        let wants_info = self.shared.wants_info.load(Ordering::Acquire);
        for c in Controls(received.control) {
            let to = sys::destination(c.level, c.kind, c.data);
            arrival.to = arrival.to.or(to);
            if to.is_none() || wants_info {
                control.extend_from_slice(c.all);
            }
        }
        if self.rd.handle(&arrival, received.bytes) {
            self.give_delivered(Some((received, &control)));
            return;
        }
        let opened = message::open(received.bytes).map(|(_, payload)| payload);
        self.give(&Record {
            is_message: opened.is_some(),
            name: received.name,
            control: &control,
            payload: opened.unwrap_or(received.bytes),
            ..Record::empty(Kind::Datagram)
        });
    }

    /// Handles an error of the UDP socket.
    fn failed(&mut self, errno: c_int) {
        // Each datagram of the program causes at most one error, as with the kernel. Repeated packets cause none, and neither do
        // acknowledgements, which are refused if their peer has exited.
        let is_direct = self.shared.direct.swap(false, Ordering::AcqRel);
        let has_sent = self.rd.is_busy() && std::mem::take(&mut self.has_sent);
        // The socket is connected, and its peer has ended. Packets that are sent again would cause further errors, which the
        // kernel would return to calls of the program.
        if errno == libc::ECONNREFUSED
            && self.rd.is_busy()
            && let Some(rd) = Reliable::new(path_mtu, sys::random)
        {
            self.rd = rd;
            self.rd.set_now(self.now);
            self.rd.set_room(self.room);
            self.unsent.clear();
        }
        if is_direct || has_sent || errno != libc::ECONNREFUSED {
            self.shared.error.store(errno, Ordering::Release);
            self.give(&Record::empty(Kind::Error));
        }
    }

    /// Sends the stored records to the program's end of the pair.
    fn deliver(&mut self) {
        while let Some(record) = self.records.front() {
            match sys::send(
                self.shared.end(),
                &[std::io::IoSlice::new(record)],
                libc::MSG_NOSIGNAL,
            ) {
                Ok(_) => {
                    self.backlog -= record.len();
                    self.records.pop_front();
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => break,
                Err(_) => {
                    // The program has closed its end.
                    self.records.clear();
                    self.backlog = 0;
                }
            }
        }
        if self.accepts() {
            self.give_delivered(None);
        }
    }

    /// Takes datagrams of the program, as long as there is room for them. Returns whether there are more.
    fn take(&mut self, bytes: &mut [u8]) -> bool {
        for _ in 0..limits::TURN {
            // What the program sent before it closed its end stays in the kernel's queue until there is room.
            if self.until.is_some() || !self.rd.has_room() {
                return false;
            }
            let n = match sys::recv(self.shared.end(), &mut [std::io::IoSliceMut::new(bytes)]) {
                Ok(n) => n,
                Err(libc::EINTR) => continue,
                Err(libc::EAGAIN) => return false,
                Err(_) => 0,
            };
            let record = bytes.get(..n).and_then(Record::parse);
            match record {
                Some(record) if record.kind == Kind::Datagram => self.send(&record),
                Some(record) if record.kind == Kind::Release => {
                    self.is_passed_on = true;
                    self.until = Some(Instant::now());
                }
                Some(_) => {}
                None => {
                    let wait = Duration::from_millis(limits::DRAIN);
                    self.until = Some(Instant::now() + wait);
                }
            }
        }
        true
    }

    fn send(&mut self, record: &Record<'_>) {
        // SAFETY: the slice has this length.
        let to = unsafe { sys::address(record.name.as_ptr().cast(), record.name.len() as u32) };
        let Some(to) = to else { return };
        let from = parse_source(record.control);
        self.has_sent = true;
        if !self.rd.send(to, from, record.payload) {
            log::line(&format!(
                "datagrams {}: a datagram to {to} was not sent",
                self.fd
            ));
        }
    }

    /// Sends packets.
    fn transmit(&mut self, packets: &mut Vec<TxDatagram>) {
        if self.is_passed_on {
            return;
        }
        self.rd.acknowledge();
        loop {
            if self.unsent.is_empty() {
                self.rd.packets(packets);
                self.unsent.extend(packets.drain(..));
            }
            let Some(packet) = self.unsent.front() else {
                return;
            };
            let to = sys::Route {
                to: packet.to,
                from: packet.from,
                is_v6: self.is_v6,
                is_whole: self.shared.segments.load(Ordering::Acquire),
            };
            let sending = SENDING.lock();
            if self.shared.builds.load(Ordering::Acquire) {
                // The thread is woken when the datagram is complete.
                return;
            }
            let sent = sys::send_datagram(self.shared.socket(), &packet.bytes, &to);
            drop(sending);
            match sent {
                Ok(()) => self.rd.written(self.unsent.pop_front().into_iter()),
                // The epoll set reports when there is room again.
                Err(libc::EAGAIN | libc::ENOBUFS) => return,
                Err(libc::EINTR) => {}
                // The error belongs to an earlier datagram. The packet was not sent.
                Err(libc::ECONNREFUSED) => self.failed(libc::ECONNREFUSED),
                Err(errno) => {
                    log::with(|| {
                        format!(
                            "datagrams {}: a packet to {} was not sent: errno {errno}",
                            self.fd, packet.to
                        )
                    });
                    self.unsent.pop_front();
                    self.rd.refused();
                }
            }
        }
    }

    /// Removes the datagrams whose outcome is known. Returns whether there is room for further ones.
    fn done(&mut self) -> bool {
        let done = self.rd.done();
        if done.failed > 0 {
            log::line(&format!(
                "datagrams {}: {} were given up: the peer did not answer, or refused them",
                self.fd, done.failed
            ));
        }
        self.rd.has_room()
    }

    /// Changes the epoll events of the thread's end.
    fn request_events(&mut self, id: u64) {
        let mut events = 0;
        if self.rd.has_room() {
            events |= IN;
        }
        if !self.records.is_empty() {
            events |= OUT;
        }
        if events != self.events && self.until.is_none() && !self.has_left {
            sys::epoll_change(
                set(),
                libc::EPOLL_CTL_MOD,
                self.shared.end(),
                events,
                id << 1,
            );
            self.events = events;
        }
    }

    /// Removes the thread's end from the epoll set, which would report the hang-up again and again. What the program has sent before
    /// is read when there is room.
    fn leave_set(&mut self) {
        if !self.has_left {
            sys::epoll_change(set(), libc::EPOLL_CTL_DEL, self.shared.end(), 0, 0);
            self.has_left = true;
        }
    }

    /// Closes the thread's end, because the program has closed its own.
    fn leave_end(&mut self) {
        self.records.clear();
        self.backlog = 0;
        self.leave_set();
        self.shared.close_end();
        // The thread may keep the UDP socket open for a while. The program's `close` does not wait for that.
        if self.is_busy() {
            self.shared.released.store(true, Ordering::Release);
        }
    }
}
