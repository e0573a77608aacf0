//! Who moves the bytes.
//!
//! 1. A thread that posts sends at once.
//! 2. A thread that polls an empty completion queue makes a *pass* over all sockets that have something.
//! 3. The worker thread does it when nobody polls. A polling thread holds a *lease*: it pushes a timer into the future
//!    while it polls, at most every [`RENEW`], and later more seldom. When the timer runs out the worker takes over, so
//!    that it is not woken at all while the application polls.
//!
//! Two epoll sets: `sockets` has every socket; `worker` is what the thread sleeps in, and has `sockets` (one shot),
//! the lease timer, the deadline timer and a wake-up.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use anywarp_core::verbs::mr::Regions;
use anywarp_core::verbs::rnic::Rnic;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use smallvec::SmallVec;

use crate::clock;
use crate::config::config;
use crate::fatal::{self, Mortal};
use crate::fd::EngineFd;
use crate::lobby::Lobby;
use crate::log;
use crate::mem::UserMemory;
use crate::net::shm::Watch;
use crate::port::Port;
use crate::process;
use crate::process::PerProcess;
use crate::qp::RcQp;
use crate::sys::{socket, thread};
use crate::trace;

/// How long the worker stays away after the last poll. Tests of it do not depend on how fast the machine is.
pub const LEASE: Duration = if cfg!(test) {
    Duration::from_millis(20)
} else {
    Duration::from_micros(150)
};
/// How often a polling thread pushes the timer.
pub const RENEW: Duration = Duration::from_micros(60);
/// Who has polled for so long without a pause is given more time, and pushes the timer less often: one that is the next of
/// its processor to fire costs 12 µs to push in a virtual machine.
const STEADY: Duration = Duration::from_millis(2);
const STEADY_LEASE: Duration = if cfg!(test) {
    Duration::from_millis(25)
} else {
    Duration::from_millis(1)
};
const STEADY_RENEW: Duration = Duration::from_micros(700);
/// How long posts alone keep the worker away after the last poll.
const POSTING: Duration = Duration::from_millis(4);
/// No count of polls.
const NOTHING_HELD: u64 = u64::MAX;
/// Ready sockets that one pass handles.
const PASS: usize = 32;
/// Looks in vain after which a socket is like any other.
const HOT_MISSES: usize = 256;
/// Looks at one socket in which it had something, after which it is taken out of the set.
const HOT_HITS: usize = 64;
/// Passes that the worker makes before it looks at its timers again.
const BURST: usize = 64;
/// Posts with no more than one poll in vain each from which on the next ones wait.
const BURST_BEGINS: u64 = 4;
/// How long the worker looks for more before it sleeps: to be woken takes longer, and costs the sender too.
const STAY: Duration = if cfg!(test) {
    Duration::from_millis(20)
} else {
    Duration::from_micros(25)
};
/// How often it looks: what came meanwhile is received, and answered, together.
const LOOK_EACH: Duration = Duration::from_nanos(1000);
/// Deadlines from which on stale ones are looked for before there is made room for more.
const COMPACT: usize = 1024;
/// Receive buffers that are kept for reuse.
const SPARE_STAGES: usize = 4;
/// Bytes of a receive buffer: several of the largest FPDUs.
pub const STAGE: usize = 256 * 1024;

/// What may owe its peer an acknowledgement, or a request, that waits for company.
pub(crate) trait Owes: Send + Sync {
    /// Sends it without.
    fn flush_ack(&self, now: Instant);

    /// The same where somebody looks again soon: what may wait a little longer is owed again.
    fn flush_ack_due(&self, now: Instant) {
        self.flush_ack(now);
    }
}

/// Something with a socket.
pub trait Source: Send + Sync {
    /// Its socket is readable or writable, or has an error.
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant);
    /// Looks at its socket, although nobody says that it has something; whether it had. `None`: it does not.
    fn glance(self: Arc<Self>, _now: Instant) -> Option<bool> {
        None
    }
    /// Its socket stays in the set, but the set is not told of it, or is again: whoever polls looks there anyway.
    fn mute(&self, _muted: bool) {}
    /// A time that it asked for has come.
    fn timeout(self: Arc<Self>, now: Instant);
}

struct Slot {
    generation: u32,
    source: Option<Arc<dyn Source>>,
}

/// Names a registered source; a stale one names nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// No source.
    pub const NONE: Self = Self(u64::MAX);
}

/// The engine: one in a process.
pub struct Engine {
    /// The software RNIC.
    pub rnic: Arc<Rnic>,
    sockets: EngineFd,
    worker: EngineFd,
    wake: EngineFd,
    lease_timer: EngineFd,
    deadline_timer: EngineFd,
    slots: RwLock<Vec<Slot>>,
    free: Mutex<Vec<u32>>,
    deadlines: Mutex<BinaryHeap<Reverse<(Instant, Token)>>>,
    /// The first of them, nanoseconds since `start`: who polls looks at it too.
    due_at: AtomicU64,
    start: Instant,
    /// Nanoseconds since `start` until which a polling thread does the work.
    lease_until: AtomicU64,
    renew_at: AtomicU64,
    /// Since when there was no pause in the polling.
    steady_since: AtomicU64,
    /// The same, without a thread that waits for an event: that one does not look at deadlines.
    polled_until: AtomicU64,
    /// When the lease was over at a post last, if no event was asked for since, and how many polls there had been.
    posted_at: AtomicU64,
    polls_at: AtomicU64,
    /// Counts polls of completion queues, and those that found nothing.
    polls: AtomicU64,
    idle_polls: AtomicU64,
    /// Times that the worker came back from the kernel.
    wakes: AtomicU64,
    /// Who holds requests back, and how many polls had found nothing when the last one was posted.
    held: Mutex<Vec<Arc<dyn Owes>>>,
    held_at: AtomicU64,
    owed: Mutex<Owed>,
    owed_count: AtomicUsize,
    /// How many posts there were since a poll was in vain, and how many such polls there had been.
    burst: AtomicU64,
    burst_at: AtomicU64,
    /// How many polls in vain there had been when events were asked for.
    armed_at: AtomicU64,
    stages: Mutex<Vec<Box<[u8]>>>,
    rooms: Mutex<Vec<Vec<u8>>>,
    /// QPN ports of this process.
    pub(crate) ports: Mutex<Vec<Weak<Port>>>,
    /// Reliable queue pairs by number.
    pub(crate) qps: RwLock<HashMap<u32, Weak<RcQp>>>,
    /// Connections that have not said yet what they want.
    pub(crate) lobby: Lobby,
    /// Who is told when the device breaks.
    pub(crate) mortals: Mutex<Vec<Weak<dyn Mortal>>>,
    /// Shared memory that streams come through, and whose.
    carriers: RwLock<Carriers>,
    carrier_count: AtomicUsize,
    /// The one socket that had something last, and how often since then it had nothing.
    hot: AtomicU64,
    hot_misses: AtomicUsize,
    hot_hits: AtomicUsize,
    /// The same while the set is not told of it: that costs whoever sends 0.3 µs, on one host the peer.
    muted: Mutex<Token>,
    mutes: AtomicBool,
    /// Threads that sleep until the set is told of something.
    waiting: AtomicUsize,
    broken: AtomicBool,
    generation: u32,
}

type Carriers = Vec<(Arc<Watch>, Weak<RcQp>)>;
/// Mostly one, which takes no memory of its own: each message makes one.
type Owed = SmallVec<[Arc<dyn Owes>; 4]>;

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("rnic", &self.rnic)
            .finish_non_exhaustive()
    }
}

const TOKEN_SOCKETS: u64 = 1;
const TOKEN_LEASE: u64 = 2;
const TOKEN_DEADLINE: u64 = 3;
const TOKEN_WAKE: u64 = 4;

/// The engine of a process, and the lock of who makes it.
#[derive(Default)]
struct Home {
    engine: OnceLock<&'static Engine>,
    making: Mutex<()>,
}

static HOME: PerProcess<Home> = PerProcess::new(Home::default);

/// The engine of this process, if it was made.
pub(crate) fn current() -> Option<&'static Engine> {
    HOME.get().engine.get().copied()
}

/// The name of the engine's thread.
pub(crate) const THREAD: &str = "anywarp";

/// The engine of this process; made, with its thread, at the first call. A forked child makes its own. `EIO` when it broke.
pub fn engine() -> io::Result<&'static Engine> {
    process::watch_fork();
    let home = HOME.get();
    if let Some(engine) = home.engine.get() {
        engine.has_room_io()?;
        return Ok(engine);
    }
    let _making = home.making.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(engine) = home.engine.get() {
        return Ok(engine);
    }
    for warning in &config().warnings {
        log!(Warn, "{warning}");
    }
    let engine = Box::new(Engine::new()?);
    // Handed over when the thread is there: without it nothing may be left of the engine. From hand to hand: a thread that
    // begins later may find no memory for what it begins with, and that would end the process.
    let (give, take) = std::sync::mpsc::sync_channel::<&'static Engine>(0);
    std::thread::Builder::new()
        .name(THREAD.into())
        .stack_size(512 * 1024)
        .spawn(move || {
            thread::block_signals();
            if let Ok(engine) = take.recv() {
                engine.work();
            }
        })?;
    let engine: &'static Engine = Box::leak(engine);
    let _ = give.send(engine);
    let _ = home.engine.set(engine);
    Ok(engine)
}

fn add(set: &EngineFd, fd: BorrowedFd<'_>, token: u64, flags: EventFlags) -> io::Result<()> {
    Ok(epoll::add(set.get(), fd, EventData::new_u64(token), flags)?)
}

impl Engine {
    fn new() -> io::Result<Self> {
        let timer = || {
            timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )
        };
        let engine = Self {
            rnic: Arc::new(Rnic {
                regions: Regions::new(),
                memory: Box::new(UserMemory),
                observer: trace::observer(),
            }),
            sockets: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            worker: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            wake: EngineFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            lease_timer: EngineFd::new(timer()?),
            deadline_timer: EngineFd::new(timer()?),
            slots: RwLock::new(Vec::new()),
            free: Mutex::new(Vec::new()),
            deadlines: Mutex::new(BinaryHeap::new()),
            due_at: AtomicU64::new(u64::MAX),
            start: clock::now(),
            lease_until: AtomicU64::new(0),
            renew_at: AtomicU64::new(0),
            steady_since: AtomicU64::new(0),
            polled_until: AtomicU64::new(0),
            posted_at: AtomicU64::new(0),
            polls_at: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            idle_polls: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            held: Mutex::new(Vec::new()),
            held_at: AtomicU64::new(NOTHING_HELD),
            owed: Mutex::new(Owed::new()),
            owed_count: AtomicUsize::new(0),
            burst: AtomicU64::new(0),
            burst_at: AtomicU64::new(0),
            armed_at: AtomicU64::new(1 << 63),
            stages: Mutex::new(Vec::new()),
            rooms: Mutex::new(Vec::new()),
            ports: Mutex::new(Vec::new()),
            qps: RwLock::new(HashMap::new()),
            lobby: Lobby::default(),
            mortals: Mutex::new(Vec::new()),
            carriers: RwLock::new(Vec::new()),
            carrier_count: AtomicUsize::new(0),
            hot: AtomicU64::new(Token::NONE.0),
            hot_misses: AtomicUsize::new(0),
            hot_hits: AtomicUsize::new(0),
            muted: Mutex::new(Token::NONE),
            mutes: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            generation: process::generation(),
        };
        add(
            &engine.worker,
            engine.sockets.get(),
            TOKEN_SOCKETS,
            EventFlags::IN | EventFlags::ONESHOT,
        )?;
        add(
            &engine.worker,
            engine.lease_timer.get(),
            TOKEN_LEASE,
            EventFlags::IN,
        )?;
        add(
            &engine.worker,
            engine.deadline_timer.get(),
            TOKEN_DEADLINE,
            EventFlags::IN,
        )?;
        add(
            &engine.worker,
            engine.wake.get(),
            TOKEN_WAKE,
            EventFlags::IN,
        )?;
        Ok(engine)
    }

    /// Whether it was made by this process, and not by one that this process was forked from.
    pub fn is_current(&self) -> bool {
        self.generation == process::generation()
    }

    // ------------------------------------------------------------------ sources

    /// Registers a source and its socket.
    pub fn add(
        &self,
        source: Arc<dyn Source>,
        fd: BorrowedFd<'_>,
        writable: bool,
    ) -> io::Result<Token> {
        let token = self.reserve(source);
        if let Err(e) = self.watch(token, fd, writable) {
            self.remove(token, None);
            return Err(e);
        }
        Ok(token)
    }

    /// Registers a source without a socket: it gets deadlines.
    pub fn reserve(&self, source: Arc<dyn Source>) -> Token {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let index = match free {
            Some(index) => index,
            None => {
                slots.push(Slot {
                    generation: 0,
                    source: None,
                });
                u32::try_from(slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        let Some(slot) = slots.get_mut(index as usize) else {
            return Token::NONE;
        };
        slot.source = Some(source);
        Token(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Watches a socket for a registered source.
    pub fn watch(&self, token: Token, fd: BorrowedFd<'_>, writable: bool) -> io::Result<()> {
        add(&self.sockets, fd, token.0, interest(writable))
    }

    /// Changes whether a source waits for its socket to be writable.
    pub fn want_write(&self, token: Token, fd: BorrowedFd<'_>, writable: bool) {
        let _ = epoll::modify(
            self.sockets.get(),
            fd,
            EventData::new_u64(token.0),
            interest(writable),
        );
    }

    /// Keeps a socket in the set, but is not told of it until [`Engine::want_write`].
    pub(crate) fn watch_nothing(&self, token: Token, fd: BorrowedFd<'_>) {
        let data = EventData::new_u64(token.0);
        let _ = epoll::modify(self.sockets.get(), fd, data, EventFlags::empty());
    }

    /// No longer watches a socket.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(self.sockets.get(), fd);
    }

    /// Forgets a source.
    pub fn remove(&self, token: Token, fd: Option<BorrowedFd<'_>>) {
        if token == Token::NONE {
            return;
        }
        if let Some(fd) = fd {
            self.unwatch(fd);
        }
        let index = token.0 as u32;
        let source = {
            let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
            let Some(slot) = slots.get_mut(index as usize) else {
                return;
            };
            if slot.generation != (token.0 >> 32) as u32 {
                return;
            }
            slot.generation = slot.generation.wrapping_add(1);
            slot.source.take()
        };
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(index);
        drop(source);
    }

    fn source(&self, token: u64) -> Option<Arc<dyn Source>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get(token as u32 as usize)?;
        if slot.generation != (token >> 32) as u32 {
            return None;
        }
        slot.source.clone()
    }

    // ------------------------------------------------------------------ passes

    /// Handles sockets that are ready now; returns whether there were any.
    pub fn pass(&self, now: Instant) -> bool {
        if self.is_broken() {
            return false;
        }
        let mut events: [epoll::Event; PASS] = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; PASS];
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let Ok(n) = epoll::wait(self.sockets.get(), events.as_mut_slice(), Some(&none)) else {
            return false;
        };
        if let Some(event) = events.first().filter(|_| n == 1) {
            self.set_hot(Token(event.data.u64()));
        } else if n > 1 {
            self.set_hot(Token::NONE);
        }
        for event in events.iter().take(n) {
            // Broken by one of them, or by another thread: the rest hears of that, and not of closed connections.
            if self.is_broken() {
                return false;
            }
            if let Some(source) = self.source(event.data.u64()) {
                let flags = event.flags;
                let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
                source.ready(
                    broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                    broken || flags.contains(EventFlags::OUT),
                    now,
                );
            }
        }
        n > 0
    }

    /// What a thread does that finds its completion queue empty.
    pub fn poll_pass(&self) {
        let before = self.idle_polls.fetch_add(1, Ordering::Relaxed);
        let held_at = self.held_at.load(Ordering::Acquire);
        if before == held_at {
            // Something was posted just now, and is held because more may be: the next poll shows whether it is.
            return;
        }
        let now = clock::now();
        let t = self.nanos(now);
        self.renew_lease(t, false);
        if before > held_at {
            self.flush_held(now);
        }
        let carried = self.carrier_pass(now);
        // A look at the sockets is a system call, one at memory is not: memory is looked at more often.
        let sockets = !self.has_carriers() || before.is_multiple_of(if carried { 64 } else { 8 });
        let looked = sockets && self.look(before, now);
        if !looked && !carried {
            for qp in self.take_owed() {
                qp.flush_ack_due(now);
            }
        }
        // The worker may not get a processor for as long as this thread has one.
        if t >= self.due_at.load(Ordering::Relaxed) {
            self.run_deadlines();
        }
    }

    /// Looks for what sockets have, in a pass after so many polls in vain; whether there was something.
    fn look(&self, turn: u64, now: Instant) -> bool {
        let (found, all) = self.glance(turn, now);
        // A look at all that finds nothing more does not undo what was found.
        let passed = all && self.pass(now);
        found || passed
    }

    /// Looks at the one socket that had something last, which is likely to have the next: receiving at once, without
    /// asking which socket has something, saves a system call. Whether it had, and whether all are to be asked about.
    fn glance(&self, turn: u64, now: Instant) -> (bool, bool) {
        let hot = self.hot.load(Ordering::Relaxed);
        if hot == Token::NONE.0 {
            return (false, true);
        }
        match self.source(hot).and_then(|source| source.glance(now)) {
            Some(true) => {
                self.hot_misses.store(0, Ordering::Relaxed);
                // Two threads may count one: these are guesses.
                let hits = self.hot_hits.load(Ordering::Relaxed) + 1;
                self.hot_hits.store(hits, Ordering::Relaxed);
                if hits.is_multiple_of(HOT_HITS) && !self.mutes.load(Ordering::Relaxed) {
                    self.mute(Token(hot));
                }
                (true, turn.is_multiple_of(16))
            }
            Some(false) => {
                let misses = self.hot_misses.load(Ordering::Relaxed) + 1;
                self.hot_misses.store(misses, Ordering::Relaxed);
                if misses >= HOT_MISSES {
                    self.set_hot(Token::NONE);
                }
                (false, misses >= HOT_MISSES || turn.is_multiple_of(4))
            }
            None => {
                self.set_hot(Token::NONE);
                (false, true)
            }
        }
    }

    /// Which socket had something last.
    fn set_hot(&self, token: Token) {
        if self.hot.swap(token.0, Ordering::SeqCst) != token.0 {
            self.hot_hits.store(0, Ordering::Relaxed);
            self.unmute();
        }
        self.hot_misses.store(0, Ordering::Relaxed);
    }

    /// The set is not told of this socket any longer, while every look for work begins with it.
    #[cold]
    fn mute(&self, token: Token) {
        let mut muted = self.muted.lock().unwrap_or_else(PoisonError::into_inner);
        if *muted != Token::NONE {
            return;
        }
        // Said first, looked at then, and the other way round where these change: either this is not done, or it is undone.
        self.mutes.store(true, Ordering::SeqCst);
        let first = self.hot.load(Ordering::SeqCst) == token.0;
        let waited = self.waiting.load(Ordering::SeqCst) > 0;
        match self.source(token.0) {
            Some(source) if first && !waited => {
                *muted = token;
                source.mute(true);
            }
            _ => self.mutes.store(false, Ordering::SeqCst),
        }
    }

    /// The set is told of every socket again. Behind a change of `hot` or of `waiting`.
    fn unmute(&self) {
        if !self.mutes.load(Ordering::SeqCst) {
            return;
        }
        let mut muted = self.muted.lock().unwrap_or_else(PoisonError::into_inner);
        let token = std::mem::replace(&mut *muted, Token::NONE);
        self.mutes.store(false, Ordering::SeqCst);
        if let Some(source) = self.source(token.0) {
            source.mute(false);
        }
    }

    /// A completion queue is polled.
    pub(crate) fn note_poll(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
    }

    /// How often completion queues were polled, and how often in vain.
    pub(crate) fn polls(&self) -> (u64, u64) {
        let polls = self.polls.load(Ordering::Relaxed);
        (polls, self.idle_polls.load(Ordering::Relaxed))
    }

    /// What was posted waits for more, while somebody polls. False: nobody does, and it is to be sent now.
    pub(crate) fn hold(&self, qp: Option<Arc<dyn Owes>>) -> bool {
        let now = clock::now();
        if !self.is_polled(now) {
            return false;
        }
        let idle_polls = self.idle_polls.load(Ordering::Relaxed);
        self.hold_since(idle_polls, now, qp);
        true
    }

    /// More was posted for a queue pair that is held already.
    pub(crate) fn hold_more(&self) {
        let idle_polls = self.idle_polls.load(Ordering::Relaxed);
        self.held_at.store(idle_polls, Ordering::Release);
    }

    /// Something was posted after so many polls in vain, and waits for more. It goes after two more of them; if nobody polls
    /// any more the worker sends it when the lease ends. `qp`: who is to be told, if that is not known.
    pub(crate) fn hold_since(&self, idle_polls: u64, now: Instant, qp: Option<Arc<dyn Owes>>) {
        let first = qp.is_some();
        if first {
            let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            held.extend(qp);
        }
        self.held_at.store(idle_polls, Ordering::Release);
        self.renew_lease(self.nanos(now), true);
        if first {
            // Whoever ends the lease looks for what is held afterwards, as we look for the lease: one sees the other.
            fence(Ordering::SeqCst);
            let now = clock::now();
            if !self.is_polled(now) {
                self.give_lease(self.nanos(now), true);
            }
        }
    }

    /// What is held goes.
    fn flush_held(&self, now: Instant) {
        self.held_at.store(NOTHING_HELD, Ordering::Release);
        let held = std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner));
        for qp in held {
            qp.flush_ack(now);
        }
    }

    // ------------------------------------------------------------------ shared memory

    fn has_carriers(&self) -> bool {
        self.carrier_count.load(Ordering::Relaxed) > 0
    }

    fn carriers(&self) -> RwLockReadGuard<'_, Carriers> {
        self.carriers.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever looks for work looks there too.
    pub(crate) fn look_at(&self, watch: &Arc<Watch>, qp: &Weak<RcQp>) {
        let mut carriers = self
            .carriers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        carriers.push((Arc::clone(watch), Weak::clone(qp)));
        self.carrier_count.store(carriers.len(), Ordering::Relaxed);
    }

    /// Nobody does any longer.
    pub(crate) fn look_away(&self, watch: &Arc<Watch>) {
        let mut carriers = self
            .carriers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        carriers.retain(|(w, _)| !Arc::ptr_eq(w, watch));
        self.carrier_count.store(carriers.len(), Ordering::Relaxed);
    }

    /// Handles queue pairs for which there is something in shared memory; returns whether there were any.
    fn carrier_pass(&self, now: Instant) -> bool {
        if !self.has_carriers() || self.is_broken() {
            return false;
        }
        let ready: SmallVec<[Weak<RcQp>; 8]> = {
            let carriers = self.carriers();
            let ready = carriers.iter().filter(|(watch, _)| watch.is_ready());
            ready.map(|(_, qp)| Weak::clone(qp)).collect()
        };
        for qp in &ready {
            if let Some(qp) = qp.upgrade() {
                qp.carried(now);
            }
        }
        !ready.is_empty()
    }

    /// From here on peers that share memory must wake us. Whether there is something already.
    fn carriers_sleep(&self) -> bool {
        self.has_carriers()
            && !self.is_broken()
            && self
                .carriers()
                .iter()
                .fold(false, |any, (watch, _)| watch.sleep() || any)
    }

    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    #[inline]
    fn renew_lease(&self, t: u64, shorten: bool) {
        if t >= self.renew_at.load(Ordering::Relaxed) {
            self.give_lease(t, shorten);
        }
    }

    fn give_lease(&self, t: u64, shorten: bool) {
        let lease = self.lease(t);
        let until = t + lease.as_nanos() as u64;
        self.polled_until.store(until, Ordering::Relaxed);
        if !shorten && self.lease_until.load(Ordering::Acquire) >= until {
            // The longer one of a thread that waited for an event.
            self.renew_at
                .store(t + RENEW.as_nanos() as u64, Ordering::Relaxed);
            return;
        }
        let before = self.lease_until.swap(until, Ordering::AcqRel);
        if before < t {
            self.steady_since.store(t, Ordering::Relaxed);
            // The worker had the sockets, and would be woken by the next that has something, for nothing.
            let _ = epoll::modify(
                self.worker.get(),
                self.sockets.get(),
                EventData::new_u64(TOKEN_SOCKETS),
                EventFlags::ONESHOT,
            );
        }
        // Last: a thread that loses its processor in between must not take the sockets from a worker whom no timer wakes.
        self.push_timer(t, lease);
    }

    /// How long a lease is that is given at `t`.
    fn lease(&self, t: u64) -> Duration {
        let runs = t <= self.lease_until.load(Ordering::Acquire);
        let since = self.steady_since.load(Ordering::Relaxed);
        if runs && t.saturating_sub(since) >= STEADY.as_nanos() as u64 {
            STEADY_LEASE
        } else {
            LEASE
        }
    }

    /// The worker looks after the sockets when the lease that was given at `t` ends.
    fn push_timer(&self, t: u64, lease: Duration) {
        let renew = if lease > LEASE { STEADY_RENEW } else { RENEW };
        self.renew_at
            .store(t + renew.as_nanos() as u64, Ordering::Relaxed);
        set_timer(&self.lease_timer, lease);
    }

    /// Whoever polls posts now, and will poll again: a list of posts may take longer than the lease, with a system call in
    /// each. For some time only, and it is no poll: nobody looks at sockets and deadlines meanwhile.
    pub(crate) fn extend_lease(&self, now: Instant) {
        let t = self.nanos(now);
        if t < self.renew_at.load(Ordering::Relaxed) {
            return;
        }
        let until = self.lease_until.load(Ordering::Acquire);
        if posts_extend(t, until, self.polled_until.load(Ordering::Relaxed)) {
            let lease = self.lease(t);
            let until = t + lease.as_nanos() as u64;
            self.lease_until.store(until, Ordering::Release);
            self.push_timer(t, lease);
        } else if until <= t {
            // It polls too, but never in vain, since the worker receives what completes: the two would stand in each
            // other's way for ever.
            let polls = self.polls.load(Ordering::Relaxed);
            let before = self.posted_at.swap(t, Ordering::Relaxed);
            let polled = self.polls_at.swap(polls, Ordering::Relaxed) != polls;
            if polled && t <= before + POSTING.as_nanos() as u64 {
                self.give_lease(t, false);
            }
        }
    }

    /// A program asks for an event: it is about to sleep, and does not poll.
    pub(crate) fn note_arm(&self) {
        self.posted_at.store(0, Ordering::Relaxed);
        let idle = self.idle_polls.load(Ordering::Relaxed);
        self.armed_at.store(idle, Ordering::Relaxed);
    }

    /// The address that a reliable queue pair is connected to.
    pub(crate) fn peer_of(&self, qpn: u32) -> Option<SocketAddr> {
        let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
        qps.get(&qpn)?.upgrade()?.peer()
    }

    /// A program posts; whether it has posted so much, with no more than one poll in vain each, that what it posts may wait for
    /// more. Who waited for something sends what he posts then at once, and goes on.
    pub(crate) fn is_burst(&self) -> bool {
        let idle = self.idle_polls.load(Ordering::Relaxed);
        // Who waits for events polls once in vain behind each, and then sleeps: nobody would send what waits.
        if idle.wrapping_sub(self.armed_at.load(Ordering::Relaxed)) <= 1 {
            self.burst.store(0, Ordering::Relaxed);
            return false;
        }
        let before = self.burst_at.load(Ordering::Relaxed);
        if before != idle {
            self.burst_at.store(idle, Ordering::Relaxed);
        }
        let waited = idle.wrapping_sub(before) > 1;
        let before = match self.burst.load(Ordering::Relaxed) {
            before if !waited => before,
            before if before > BURST_BEGINS => BURST_BEGINS - 1,
            _ => 0,
        };
        self.burst.store(before + 1, Ordering::Relaxed);
        before >= BURST_BEGINS
    }

    /// Whether somebody polls, and the worker comes if that ends.
    pub(crate) fn is_polled(&self, now: Instant) -> bool {
        let t = self.nanos(now);
        let until = self.lease_until.load(Ordering::Acquire);
        // The longer lease is of a thread that waits for an event.
        t < until && until <= t + STEADY_LEASE.as_nanos() as u64
    }

    /// Registers that a queue pair owes its peer an acknowledgement.
    pub(crate) fn owe(&self, qp: Arc<dyn Owes>) {
        self.owed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(qp);
        self.owed_count.fetch_add(1, Ordering::Release);
    }

    /// Sends acknowledgements that found no company, and what is held.
    pub fn flush_owed(&self, now: Instant) {
        // See `hold_since`.
        fence(Ordering::SeqCst);
        if self.held_at.load(Ordering::Acquire) != NOTHING_HELD {
            self.flush_held(now);
        }
        for qp in self.take_owed() {
            qp.flush_ack(now);
        }
    }

    fn take_owed(&self) -> Owed {
        if self.owed_count.load(Ordering::Acquire) == 0 {
            return Owed::new();
        }
        let owed = std::mem::take(&mut *self.owed.lock().unwrap_or_else(PoisonError::into_inner));
        self.owed_count.fetch_sub(owed.len(), Ordering::AcqRel);
        owed
    }

    /// A receive buffer.
    pub(crate) fn stage(&self) -> Box<[u8]> {
        self.stages
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .unwrap_or_else(|| vec![0; STAGE].into_boxed_slice())
    }

    /// Gives a receive buffer back.
    pub(crate) fn return_stage(&self, stage: Box<[u8]>) {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        if stages.len() < SPARE_STAGES {
            stages.push(stage);
        }
    }

    /// A transmit buffer.
    pub(crate) fn room(&self) -> Vec<u8> {
        self.rooms
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .unwrap_or_default()
    }

    /// Gives a transmit buffer back.
    pub(crate) fn return_room(&self, room: Vec<u8>) {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if rooms.len() < SPARE_STAGES {
            rooms.push(room);
        }
    }

    // ------------------------------------------------------------------ deadlines

    fn heap(&self) -> MutexGuard<'_, BinaryHeap<Reverse<(Instant, Token)>>> {
        self.deadlines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for [`Source::timeout`] of `token` at `at`.
    pub fn deadline(&self, token: Token, at: Instant) {
        let mut heap = self.heap();
        if heap.len() >= COMPACT && heap.len() == heap.capacity() {
            // Most deadlines are of what has ended long before: they would be kept until their time comes.
            let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
            heap.retain(|Reverse((_, token))| {
                let slot = slots.get(token.0 as u32 as usize);
                slot.is_some_and(|s| s.generation == (token.0 >> 32) as u32)
            });
        }
        let first = heap.peek().is_none_or(|Reverse((t, _))| at < *t);
        heap.push(Reverse((at, token)));
        if first {
            self.due_at.store(self.nanos(at), Ordering::Relaxed);
            self.wake_worker_at(at, clock::now());
        }
    }

    /// Sets the timer of the deadlines. While somebody polls, who keeps them too, the worker sleeps on, unless that ends
    /// just then.
    fn wake_worker_at(&self, at: Instant, now: Instant) {
        let polled = self.nanos(now) < self.polled_until.load(Ordering::Relaxed);
        let at = if polled { at + LEASE } else { at };
        set_timer(&self.deadline_timer, at.saturating_duration_since(now));
    }

    fn run_deadlines(&self) {
        // One look at the clock: what asks for a time that has passed meanwhile waits for the next turn.
        let now = clock::now();
        loop {
            let due = {
                let mut heap = self.heap();
                let first = heap.peek().map(|Reverse((at, _))| *at);
                let due_at = first.map_or(u64::MAX, |at| self.nanos(at));
                self.due_at.store(due_at, Ordering::Relaxed);
                match first {
                    Some(at) if at <= now => heap.pop(),
                    Some(at) => {
                        self.wake_worker_at(at, now);
                        None
                    }
                    None => None,
                }
            };
            let Some(Reverse((_, token))) = due else {
                return;
            };
            if let Some(source) = self.source(token.0) {
                source.timeout(now);
            }
        }
    }

    // ------------------------------------------------------------------ the thread

    /// The worker's loop. A panic in it breaks the device, never the process.
    fn work(&self) {
        let mut stays = Stays::default();
        loop {
            let turn = std::panic::AssertUnwindSafe(|| self.turn(&mut stays));
            let turn = std::panic::catch_unwind(turn);
            if let Err(payload) = turn {
                fatal::caught("the worker", &*payload);
                // Dropping what a panic carried may panic again.
                let _leaked = std::mem::ManuallyDrop::new(payload);
            }
        }
    }

    /// Times that the worker came back from the kernel.
    pub(crate) fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Whether an internal error was caught: nothing moves any more.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// From now on it is; whether it was.
    pub(crate) fn set_broken(&self) -> bool {
        self.broken.swap(true, Ordering::AcqRel)
    }

    fn turn(&self, stays: &mut Stays) {
        let mut events: [epoll::Event; 8] = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        let n = epoll::wait(self.worker.get(), events.as_mut_slice(), None).unwrap_or(0);
        self.wakes.fetch_add(1, Ordering::Relaxed);
        let mut count = [0_u8; 8];
        let mut fired = false;
        for event in events.iter().take(n) {
            match event.data.u64() {
                TOKEN_LEASE => {
                    let _ = rustix::io::read(self.lease_timer.get(), &mut count);
                    fired = true;
                }
                TOKEN_DEADLINE => {
                    let _ = rustix::io::read(self.deadline_timer.get(), &mut count);
                    self.run_deadlines();
                }
                TOKEN_WAKE => {
                    let _ = rustix::io::read(self.wake.get(), &mut count);
                }
                _ => {}
            }
        }
        let (mut passes, mut stay_until) = (0, None);
        while passes < BURST {
            let now = clock::now();
            let (t, until) = (self.nanos(now), self.lease_until.load(Ordering::Acquire));
            if t < until {
                // Somebody polls: the lease timer brings us back when that ends.
                if fired {
                    // It was set for another thread's shorter one.
                    set_timer(&self.lease_timer, Duration::from_nanos(until - t));
                }
                return;
            }
            self.set_hot(Token::NONE);
            let carried = self.carrier_pass(now);
            if self.pass(now) || carried {
                passes += 1;
                if let Some(until) = stay_until.take() {
                    stays.ended(now < until);
                }
                continue;
            }
            match stay_until {
                None => {
                    self.flush_owed(now);
                    if passes == 0 || self.is_broken() || !stays.begin() {
                        break;
                    }
                    stay_until = Some(now + STAY);
                }
                Some(until) if now >= until => {
                    stays.ended(false);
                    break;
                }
                Some(_) => {}
            }
            if t >= self.due_at.load(Ordering::Relaxed) {
                self.run_deadlines();
            }
            // Without yielding: who yields gives away the whole share of whoever else wants this processor.
            let next = now + LOOK_EACH;
            while clock::now() < next {
                std::hint::spin_loop();
            }
        }
        if passes >= BURST {
            // There may be nothing more, and nobody who says what is owed.
            self.flush_owed(clock::now());
        }
        if self.carriers_sleep() {
            // At once again.
            let _ = rustix::io::write(self.wake.get(), &1_u64.to_ne_bytes());
        }
        if self.is_broken() {
            // Nobody reads the sockets any more: they would wake us for ever.
            return;
        }
        let _ = epoll::modify(
            self.worker.get(),
            self.sockets.get(),
            EventData::new_u64(TOKEN_SOCKETS),
            EventFlags::IN | EventFlags::ONESHOT,
        );
    }

    /// Blocks until `fd` is readable, working meanwhile. For threads that wait for an event.
    ///
    /// Returns after some time in any case, so that the caller can look again; `Err` when a signal handler ran that
    /// wants calls to be interrupted.
    pub fn work_until_readable(&self, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        self.work_for(WAIT_WORKING, fd)
    }

    /// The same, for `time` at most, which is no longer than [`WAIT_WORKING`].
    pub fn work_for(&self, time: Duration, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.unmute();
        let worked = self.work_and_wait(time, fd);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        worked
    }

    fn work_and_wait(&self, time: Duration, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        use rustix::event::{PollFd, PollFlags};
        let time = time.min(WAIT_WORKING);
        let mut now = clock::now();
        let until = now + time;
        for turn in 1.. {
            if now >= until {
                break;
            }
            let slice = until.saturating_duration_since(now).min(WAIT_SLICE);
            self.lease_for_wait(now, slice);
            self.flush_owed(now);
            if self.carriers_sleep() {
                self.carrier_pass(now);
                if socket::wait_readable(fd, Duration::ZERO) {
                    break;
                }
                now = clock::now();
                continue;
            }
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::from_borrowed_fd(self.sockets.get(), PollFlags::IN),
            ];
            let left = Timespec {
                tv_sec: 0,
                tv_nsec: slice.subsec_nanos().into(),
            };
            // A broken device does not look at its sockets.
            let watched = if self.is_broken() { 1 } else { fds.len() };
            let watched = fds.get_mut(..watched).unwrap_or(&mut []);
            match rustix::event::poll(watched, Some(&left)) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => {
                    if thread::handlers_interrupt() {
                        return Err(Interrupted);
                    }
                }
                Err(_) => break,
            }
            now = clock::now();
            let [event, sockets] = &fds;
            if !event.revents().is_empty() {
                if !sockets.revents().is_empty() {
                    self.pass(now);
                }
                break;
            }
            if !sockets.revents().is_empty() {
                let (found, all) = self.glance(turn, now);
                if all || !found {
                    self.pass(now);
                }
            }
        }
        Ok(())
    }

    /// The worker stays away while this thread waits for as long as `slice`, and comes when it has not come back by then.
    fn lease_for_wait(&self, now: Instant, slice: Duration) {
        let t = self.nanos(now);
        let needed = t + (slice + LEASE).as_nanos() as u64;
        if self.lease_until.load(Ordering::Acquire) >= needed {
            return;
        }
        // For the next waits too: each message has one.
        let lease = 2 * WAIT_SLICE + LEASE;
        self.lease_until
            .store(t + lease.as_nanos() as u64, Ordering::Release);
        self.renew_at.store(t, Ordering::Relaxed);
        self.steady_since.store(t, Ordering::Relaxed);
        set_timer(&self.lease_timer, lease);
    }

    /// The calling thread will not look at the sockets for a while: the worker takes over now.
    pub fn hand_over(&self) {
        self.lease_until.store(0, Ordering::Release);
        self.renew_at.store(0, Ordering::Relaxed);
        let _ = rustix::io::write(self.wake.get(), &1_u64.to_ne_bytes());
    }
}

/// Whether the worker stays awake for [`STAY`] when there is nothing more: while that pays. Where the sender shares our
/// processor, or sends seldom, nothing comes meanwhile, and it is tried only now and then.
#[derive(Debug, Default)]
struct Stays {
    /// What they have brought lately.
    credit: u32,
    /// How often it went to sleep at once.
    sleeps: u32,
}

impl Stays {
    /// Most credit: it is lost again in five stays.
    const MOST: u32 = 16;
    /// Without credit each so many times is a try.
    const TRY: u32 = 64;

    fn begin(&mut self) -> bool {
        if self.credit > 0 {
            return true;
        }
        self.sleeps = self.sleeps.wrapping_add(1);
        self.sleeps.is_multiple_of(Self::TRY)
    }

    /// Whether something came in time: what came later may have come because somebody else had our processor meanwhile.
    fn ended(&mut self, paid: bool) {
        self.credit = if paid {
            Self::MOST.min(self.credit + 2)
        } else {
            self.credit / 2
        };
    }
}

/// Whether a post at `t` pushes a lease that ends at `until`; polls alone had it until `polled`. All in nanoseconds.
fn posts_extend(t: u64, until: u64, polled: u64) -> bool {
    let (lease, posting) = (STEADY_LEASE.as_nanos() as u64, POSTING.as_nanos() as u64);
    // It runs; it is not the longer one of a thread that waits for an event; and somebody has polled not long ago.
    t < until && until <= t + lease && t <= polled + posting
}

/// A signal handler ran that wants the call it interrupted to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted;

/// How long a thread that waits for an event works itself before it leaves the sockets to the worker.
pub const WAIT_WORKING: Duration = Duration::from_millis(20);
/// How long it waits at a time. For twice that the worker stays away when it does something else; and a timer that is not
/// the next of its processor to fire, before the kernel's own, costs little to push.
const WAIT_SLICE: Duration = Duration::from_millis(4);

fn interest(writable: bool) -> EventFlags {
    let flags = EventFlags::IN | EventFlags::RDHUP;
    if writable {
        flags | EventFlags::OUT
    } else {
        flags
    }
}

/// Sets a one-shot timer; a time that has passed fires at once.
fn set_timer(timer: &EngineFd, after: Duration) {
    let after = after.max(Duration::from_nanos(1));
    let value = Timespec {
        tv_sec: after.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: after.subsec_nanos().into(),
    };
    let zero = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let _ = timerfd_settime(
        timer.get(),
        TimerfdTimerFlags::empty(),
        &Itimerspec {
            it_interval: zero,
            it_value: value,
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_push_the_lease_of_polls_for_a_while() {
        let (lease, posting) = (STEADY_LEASE.as_nanos() as u64, POSTING.as_nanos() as u64);
        let polled = 10 * posting;
        assert!(posts_extend(polled - 1, polled, polled));
        assert!(posts_extend(polled + posting, polled + posting + 1, polled));
        // Too long after the last poll; a lease that is over; the longer one of a thread that waits for an event.
        assert!(!posts_extend(
            polled + posting + 1,
            polled + posting + 2,
            polled
        ));
        assert!(!posts_extend(polled, polled, polled));
        assert!(!posts_extend(polled, polled + lease + 1, polled));
    }

    #[test]
    fn who_polls_for_long_is_given_more_time_until_it_pauses() {
        let engine = Engine::new().unwrap();
        let given = |t: u64| {
            engine.renew_lease(t, false);
            Duration::from_nanos(engine.lease_until.load(Ordering::Relaxed) - t)
        };
        let (steady, renew) = (STEADY.as_nanos() as u64, RENEW.as_nanos() as u64);
        // Pauses are longer than a lease.
        for start in [1_000_000, 1_000_000_000] {
            let mut t = start;
            while t < start + steady {
                assert_eq!(given(t), LEASE);
                t += renew;
            }
            assert_eq!(given(t), STEADY_LEASE);
        }
    }

    #[test]
    fn who_posts_and_polls_in_turns_posts_a_burst() {
        let engine = Engine::new().unwrap();
        let polls = |n| engine.idle_polls.fetch_add(n, Ordering::Relaxed);
        for _ in 0..BURST_BEGINS {
            assert!(!engine.is_burst());
            polls(1);
        }
        assert!(engine.is_burst());
        // One post goes at once behind a wait, and the next ones wait again.
        polls(2);
        assert!(!engine.is_burst());
        polls(1);
        assert!(engine.is_burst());
        // Who waits behind each is no longer busy.
        for _ in 0..2 * BURST_BEGINS {
            polls(2);
            assert!(!engine.is_burst());
        }
        for _ in 1..BURST_BEGINS {
            assert!(!engine.is_burst());
        }
        assert!(engine.is_burst());
        // Who asks for events polls once in vain behind each.
        for _ in 0..2 * BURST_BEGINS {
            engine.note_arm();
            assert!(!engine.is_burst());
            polls(1);
            assert!(!engine.is_burst());
        }
        // And is like any other when he polls on.
        polls(2);
        for _ in 0..BURST_BEGINS {
            assert!(!engine.is_burst());
        }
        assert!(engine.is_burst());
    }

    #[test]
    fn nothing_is_held_where_nobody_polls() {
        let engine = Engine::new().unwrap();
        assert!(!engine.hold(None));
        engine.renew_lease(engine.nanos(clock::now()), false);
        assert!(engine.hold(None));
    }

    /// The lease ends between a look at it and the request that is held for it: nobody else would send that.
    #[test]
    fn what_is_held_when_the_lease_has_ended_brings_the_worker_back() {
        use std::os::fd::AsFd;
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let owing = Arc::new(Owing(ours, Duration::ZERO));
        let engine = Engine::new().unwrap();
        let looked = clock::now();
        engine.give_lease(engine.nanos(looked), false);
        let timer = engine.lease_timer.get();
        assert!(socket::wait_readable(timer.as_fd(), 100 * LEASE));
        engine.turn(&mut Stays::default());
        let at = engine.idle_polls.load(Ordering::Relaxed);
        engine.hold_since(at, looked, Some(owing as Arc<dyn Owes>));
        assert!(engine.is_polled(clock::now()));
        assert!(socket::wait_readable(timer.as_fd(), 100 * LEASE));
        engine.turn(&mut Stays::default());
        assert_eq!(engine.held_at.load(Ordering::Relaxed), NOTHING_HELD);
    }

    /// As where the worker receives all that completes: each poll finds something, and none looks at sockets.
    #[test]
    fn who_posts_and_polls_without_ever_looking_gets_the_lease_back() {
        let engine = Engine::new().unwrap();
        let has_lease = |at: Instant| engine.lease_until.load(Ordering::Relaxed) > engine.nanos(at);
        let start = clock::now() + Duration::from_secs(1);
        let later = |n: u32| start + n * Duration::from_millis(1);
        engine.extend_lease(later(1));
        engine.extend_lease(later(2));
        assert!(!has_lease(later(2)), "it only posts");
        engine.note_poll();
        engine.note_arm();
        engine.extend_lease(later(3));
        assert!(!has_lease(later(3)), "it waits for events");
        engine.note_poll();
        engine.extend_lease(later(4) + POSTING);
        assert!(!has_lease(later(4) + POSTING), "it posted long ago");
        engine.note_poll();
        engine.extend_lease(later(5) + POSTING);
        assert!(has_lease(later(5) + POSTING));
    }

    /// Two leases cross, and the timer of the shorter one was set last.
    #[test]
    fn a_timer_that_fires_in_a_lease_is_set_again() {
        use std::os::fd::AsFd;
        let engine = Engine::new().unwrap();
        let t = engine.nanos(clock::now());
        let lease = Duration::from_millis(100);
        engine
            .lease_until
            .store(t + lease.as_nanos() as u64, Ordering::Relaxed);
        set_timer(&engine.lease_timer, Duration::ZERO);
        engine.turn(&mut Stays::default());
        let timer = engine.lease_timer.get();
        assert!(!socket::wait_readable(timer.as_fd(), Duration::ZERO));
        assert!(socket::wait_readable(timer.as_fd(), 100 * lease));
        assert!(engine.nanos(clock::now()) >= t + lease.as_nanos() as u64);
    }

    #[test]
    fn the_worker_stays_awake_while_that_pays() {
        let mut stays = Stays::default();
        let tries = |stays: &mut Stays| (0..2 * Stays::TRY).filter(|_| stays.begin()).count();
        assert_eq!(tries(&mut stays), 2);
        stays.ended(true);
        assert!(stays.begin());
        for _ in 0..100 {
            stays.ended(true);
        }
        for _ in 0..5 {
            assert!(stays.begin());
            stays.ended(false);
        }
        assert_eq!(tries(&mut stays), 2);
    }

    /// Owes something that is said with a byte to a socket, which takes some time.
    struct Owing(std::os::unix::net::UnixStream, Duration);

    impl Owes for Owing {
        fn flush_ack(&self, _now: Instant) {
            std::thread::sleep(self.1);
            assert_eq!(rustix::io::write(&self.0, &[1]), Ok(1));
        }
    }

    /// What is owed is said before the worker waits for more, and what that brings is received in the same turn.
    #[test]
    fn who_stays_awake_receives_what_comes_meanwhile() {
        let (soon, late) = (Duration::ZERO, 2 * STAY);
        // What came in time paid for one stay, and the next was in vain; late it paid for none.
        let cases = [
            (0, soon, (true, 0)),
            (1, soon, (false, 1)),
            (2, late, (false, 0)),
        ];
        for (credit, delay, after) in cases {
            let (engine, bytes, other) = quiet();
            assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
            let owing = Arc::new(Owing(other, delay));
            engine.owe(Arc::clone(&owing) as Arc<dyn Owes>);
            let mut stays = Stays { credit, sleeps: 0 };
            engine.turn(&mut stays);
            assert!(engine.take_owed().is_empty());
            let left = bytes.take();
            assert_eq!((left, stays.credit), after);
        }
    }

    /// However much there is before: a peer that waits for its acknowledgement sends nothing that would wake us.
    #[test]
    fn what_is_owed_is_said_behind_any_number_of_passes() {
        for passes in [1, BURST - 1, BURST, BURST + 1] {
            let (engine, _bytes, other) = quiet();
            for _ in 0..passes {
                assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
            }
            let owing = Arc::new(Owing(other, Duration::ZERO));
            engine.owe(Arc::clone(&owing) as Arc<dyn Owes>);
            engine.turn(&mut Stays::default());
            assert!(engine.take_owed().is_empty(), "behind {passes} passes");
        }
    }

    /// Takes a byte at each look; what it was told, in order.
    struct Bytes {
        engine: &'static Engine,
        token: Mutex<Token>,
        fd: std::os::unix::net::UnixStream,
        told: Mutex<Vec<&'static str>>,
    }

    impl Bytes {
        fn tell(&self, what: &'static str) {
            let mut told = self.told.lock().unwrap();
            if told.last() != Some(&what) {
                told.push(what);
            }
        }

        fn take(&self) -> bool {
            rustix::io::read(&self.fd, &mut [0]).is_ok()
        }
    }

    impl Source for Bytes {
        fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
            self.tell("ready");
            self.take();
        }

        fn glance(self: Arc<Self>, _now: Instant) -> Option<bool> {
            self.tell("looked");
            Some(self.take())
        }

        fn mute(&self, muted: bool) {
            use std::os::fd::AsFd;
            let token = *self.token.lock().unwrap();
            if muted {
                self.tell("mute");
                self.engine.watch_nothing(token, self.fd.as_fd());
            } else {
                self.tell("unmute");
                self.engine.want_write(token, self.fd.as_fd(), false);
            }
        }

        fn timeout(self: Arc<Self>, _now: Instant) {}
    }

    /// An engine without a thread, a source, and the other end of its socket.
    fn quiet() -> (&'static Engine, Arc<Bytes>, std::os::unix::net::UnixStream) {
        use std::os::fd::AsFd;
        // It knows the source and the source knows it: what counts leaks wants both to be known to somebody else.
        static ALL: Mutex<Vec<&Engine>> = Mutex::new(Vec::new());
        let engine: &'static Engine = Box::leak(Box::new(Engine::new().unwrap()));
        ALL.lock().unwrap().push(engine);
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let bytes = Arc::new(Bytes {
            engine,
            token: Mutex::new(Token::NONE),
            fd: ours,
            told: Mutex::default(),
        });
        let source = Arc::clone(&bytes) as Arc<dyn Source>;
        let token = engine.add(source, bytes.fd.as_fd(), false).unwrap();
        *bytes.token.lock().unwrap() = token;
        (engine, bytes, theirs)
    }

    /// The same, where that socket alone has something: `send` gives it a byte.
    fn hot() -> (&'static Engine, Arc<Bytes>, impl Fn()) {
        let (engine, bytes, theirs) = quiet();
        let send = move || assert_eq!(rustix::io::write(&theirs, &[1]), Ok(1));
        for _ in 0..=HOT_HITS {
            send();
            assert!(engine.look(1, clock::now()));
        }
        (engine, bytes, send)
    }

    #[test]
    fn a_socket_that_is_looked_at_anyway_is_not_told_of_until_the_worker_takes_over() {
        let (engine, bytes, send) = hot();
        assert_eq!(*bytes.told.lock().unwrap(), ["ready", "looked", "mute"]);
        send();
        assert!(!engine.pass(clock::now()));
        engine.hand_over();
        engine.turn(&mut Stays::default());
        assert_eq!(
            bytes.told.lock().unwrap().get(3..).unwrap(),
            ["unmute", "ready"]
        );
        // The worker left it in the set.
        send();
        assert!(engine.pass(clock::now()));
    }

    #[test]
    fn another_socket_that_has_something_has_the_set_told_of_both() {
        use std::os::fd::AsFd;
        let (engine, bytes, send) = hot();
        let (other, end) = std::os::unix::net::UnixStream::pair().unwrap();
        let source = Arc::clone(&bytes) as Arc<dyn Source>;
        engine.add(source, other.as_fd(), false).unwrap();
        rustix::io::write(&end, &[1]).unwrap();
        assert!(engine.pass(clock::now()));
        assert!(bytes.told.lock().unwrap().contains(&"unmute"));
        send();
        assert!(engine.pass(clock::now()));
    }

    #[test]
    fn who_sleeps_until_the_set_has_something_is_woken() {
        use std::os::fd::AsFd;
        let (engine, bytes, send) = hot();
        send();
        let (quiet, _end) = std::os::unix::net::UnixStream::pair().unwrap();
        let before = bytes.told.lock().unwrap().len();
        engine
            .work_for(Duration::from_millis(1), quiet.as_fd())
            .unwrap();
        let told = bytes.told.lock().unwrap().split_off(before);
        assert_eq!(told, ["unmute", "looked"]);
        bytes.told.lock().unwrap().clear();
        // As long as somebody sleeps nothing is taken out.
        engine.waiting.fetch_add(1, Ordering::SeqCst);
        for _ in 0..=2 * HOT_HITS {
            send();
            assert!(engine.look(1, clock::now()));
        }
        assert!(!bytes.told.lock().unwrap().contains(&"mute"));
        engine.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
