//! Who moves the bytes.
//!
//! 1. A thread that posts sends at once.
//! 2. A thread that polls an empty completion queue makes a *pass* over all sockets that have something.
//! 3. The worker thread does it when nobody polls. A polling thread holds a *lease*: it pushes a timer into the future
//!    while it polls, at most every [`RENEW`]. When the timer runs out the worker takes over, so that it is not woken
//!    at all while the application polls.
//!
//! Two epoll sets: `sockets` has every socket; `worker` is what the thread sleeps in, and has `sockets` (one shot),
//! the lease timer, the deadline timer and a wake-up.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::connection::Rnic;
use anywarp_core::verbs::mr::Regions;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::clock;
use crate::fatal::{self, Mortal};
use crate::lobby::Lobby;
use crate::log;
use crate::mem::UserMemory;
use crate::port::Port;
use crate::qp::RcQp;
use crate::sys::{self, EngineFd, PerProcess};

/// How long the worker stays away after the last poll.
pub const LEASE: Duration = Duration::from_micros(150);
/// How often a polling thread pushes the timer.
pub const RENEW: Duration = Duration::from_micros(60);
/// Ready sockets that one pass handles.
const PASS: usize = 32;
/// Passes that the worker makes before it looks at its timers again.
const BURST: usize = 64;
/// Deadlines from which on stale ones are looked for before there is made room for more.
const COMPACT: usize = 1024;
/// Receive buffers that are kept for reuse.
const SPARE_STAGES: usize = 4;
/// Bytes of a receive buffer: several of the largest FPDUs.
pub const STAGE: usize = 256 * 1024;

/// What may owe its peer an acknowledgement that waits for company.
pub(crate) trait Owes: Send + Sync {
    /// Sends it without.
    fn flush_ack(&self, now: Instant);
}

/// Something with a socket.
pub trait Source: Send + Sync {
    /// Its socket is readable or writable, or has an error.
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant);
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
    start: Instant,
    /// Nanoseconds since `start` until which a polling thread does the work.
    lease_until: AtomicU64,
    renew_at: AtomicU64,
    owed: Mutex<Vec<Arc<dyn Owes>>>,
    owed_count: AtomicUsize,
    stages: Mutex<Vec<Box<[u8]>>>,
    rooms: Mutex<Vec<Vec<u8>>>,
    /// QPN ports of this process.
    pub(crate) ports: Mutex<Vec<Weak<Port>>>,
    /// Reliable queue pairs by number.
    pub(crate) qps: RwLock<HashMap<u32, Weak<RcQp>>>,
    /// Connections that have not said yet what they want.
    pub(crate) lobby: Lobby,
    /// Closed connections that are read on.
    pub(crate) lingering: AtomicUsize,
    /// Who is told when the device breaks.
    pub(crate) mortals: Mutex<Vec<Weak<dyn Mortal>>>,
    broken: AtomicBool,
    generation: u32,
}

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
    sys::watch_fork();
    let home = HOME.get();
    if let Some(engine) = home.engine.get() {
        engine.has_room_io()?;
        return Ok(engine);
    }
    let _making = home.making.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(engine) = home.engine.get() {
        return Ok(engine);
    }
    let engine = Box::new(Engine::new()?);
    // Handed over when the thread is there: without it nothing may be left of the engine. From hand to hand: a thread that
    // begins later may find no memory for what it begins with, and that would end the process.
    let (give, take) = std::sync::mpsc::sync_channel::<&'static Engine>(0);
    std::thread::Builder::new()
        .name(THREAD.into())
        .stack_size(512 * 1024)
        .spawn(move || {
            sys::block_signals();
            if let Ok(engine) = take.recv() {
                engine.work();
            }
        })?;
    let engine: &'static Engine = Box::leak(engine);
    let _ = give.send(engine);
    let _ = home.engine.set(engine);
    Ok(engine)
}

/// Unpredictable numbers from the kernel.
pub fn random_u32() -> u32 {
    // Not inherited: parent and child would hand out the same keys.
    static POOL: PerProcess<Mutex<(usize, [u8; 256])>> =
        PerProcess::new(|| Mutex::new((256, [0; 256])));
    let mut pool = POOL.get().lock().unwrap_or_else(PoisonError::into_inner);
    if pool.0 + 4 > 256 {
        let mut fresh = [0_u8; 256];
        // With no flags getrandom fails only before the kernel's pool is ready; then it blocks.
        let _ = rustix::rand::getrandom(&mut fresh, rustix::rand::GetRandomFlags::empty());
        *pool = (0, fresh);
    }
    let at = pool.0;
    pool.0 += 4;
    pool.1
        .get(at..)
        .and_then(|b| b.first_chunk::<4>())
        .map_or(0, |b| u32::from_ne_bytes(*b))
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
                observer: log::observer(),
            }),
            sockets: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            worker: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            wake: EngineFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            lease_timer: EngineFd::new(timer()?),
            deadline_timer: EngineFd::new(timer()?),
            slots: RwLock::new(Vec::new()),
            free: Mutex::new(Vec::new()),
            deadlines: Mutex::new(BinaryHeap::new()),
            start: clock::now(),
            lease_until: AtomicU64::new(0),
            renew_at: AtomicU64::new(0),
            owed: Mutex::new(Vec::new()),
            owed_count: AtomicUsize::new(0),
            stages: Mutex::new(Vec::new()),
            rooms: Mutex::new(Vec::new()),
            ports: Mutex::new(Vec::new()),
            qps: RwLock::new(HashMap::new()),
            lobby: Lobby::default(),
            lingering: AtomicUsize::new(0),
            mortals: Mutex::new(Vec::new()),
            broken: AtomicBool::new(false),
            generation: sys::generation(),
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
        self.generation == sys::generation()
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
        let now = clock::now();
        self.renew_lease(now);
        if !self.pass(now) {
            self.flush_owed(now);
        }
    }

    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    fn renew_lease(&self, now: Instant) {
        let t = self.nanos(now);
        if t < self.renew_at.load(Ordering::Relaxed) {
            return;
        }
        self.renew_at
            .store(t + RENEW.as_nanos() as u64, Ordering::Relaxed);
        self.lease_until
            .store(t + LEASE.as_nanos() as u64, Ordering::Release);
        set_timer(&self.lease_timer, LEASE);
    }

    /// The address that a reliable queue pair is connected to.
    pub(crate) fn peer_of(&self, qpn: u32) -> Option<SocketAddr> {
        let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
        qps.get(&qpn)?.upgrade()?.peer()
    }

    /// Registers that a queue pair owes its peer an acknowledgement.
    pub(crate) fn owe(&self, qp: Arc<dyn Owes>) {
        self.owed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(qp);
        self.owed_count.fetch_add(1, Ordering::Release);
    }

    /// Sends acknowledgements that found no company.
    pub fn flush_owed(&self, now: Instant) {
        if self.owed_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let owed = std::mem::take(&mut *self.owed.lock().unwrap_or_else(PoisonError::into_inner));
        self.owed_count.fetch_sub(owed.len(), Ordering::AcqRel);
        for qp in owed {
            qp.flush_ack(now);
        }
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
            set_timer(
                &self.deadline_timer,
                at.saturating_duration_since(clock::now()),
            );
        }
    }

    fn run_deadlines(&self) {
        // One look at the clock: what asks for a time that has passed meanwhile waits for the next turn.
        let now = clock::now();
        loop {
            let due = {
                let mut heap = self.heap();
                match heap.peek() {
                    Some(Reverse((at, _))) if *at <= now => heap.pop(),
                    Some(Reverse((at, _))) => {
                        set_timer(&self.deadline_timer, at.saturating_duration_since(now));
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
        loop {
            let turn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.turn()));
            if let Err(payload) = turn {
                fatal::caught("the worker", &*payload);
                // Dropping what a panic carried may panic again.
                let _leaked = std::mem::ManuallyDrop::new(payload);
            }
        }
    }

    /// Whether an internal error was caught: nothing moves any more.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// From now on it is; whether it was.
    pub(crate) fn set_broken(&self) -> bool {
        self.broken.swap(true, Ordering::AcqRel)
    }

    fn turn(&self) {
        let mut events: [epoll::Event; 8] = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        let n = epoll::wait(self.worker.get(), events.as_mut_slice(), None).unwrap_or(0);
        let mut count = [0_u8; 8];
        for event in events.iter().take(n) {
            match event.data.u64() {
                TOKEN_LEASE => {
                    let _ = rustix::io::read(self.lease_timer.get(), &mut count);
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
        for _ in 0..BURST {
            let now = clock::now();
            if self.nanos(now) < self.lease_until.load(Ordering::Acquire) {
                // Somebody polls: the lease timer brings us back when that ends.
                return;
            }
            if !self.pass(now) {
                self.flush_owed(now);
                break;
            }
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
        use rustix::event::{PollFd, PollFlags};
        let time = time.min(WAIT_WORKING);
        let until = clock::now() + time;
        loop {
            let now = clock::now();
            if now >= until {
                return Ok(());
            }
            let lease = time + LEASE;
            self.lease_until
                .store(self.nanos(now + lease), Ordering::Release);
            self.renew_at.store(self.nanos(now), Ordering::Relaxed);
            set_timer(&self.lease_timer, lease);
            self.flush_owed(now);
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::from_borrowed_fd(self.sockets.get(), PollFlags::IN),
            ];
            let left = until.saturating_duration_since(now);
            let left = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            // A broken device does not look at its sockets.
            let watched = if self.is_broken() { 1 } else { fds.len() };
            let watched = fds.get_mut(..watched).unwrap_or(&mut []);
            match rustix::event::poll(watched, Some(&left)) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => {
                    if sys::handlers_interrupt() {
                        return Err(Interrupted);
                    }
                    continue;
                }
                Err(_) => return Ok(()),
            }
            let [event, sockets] = &fds;
            if !sockets.revents().is_empty() {
                self.pass(clock::now());
            }
            if !event.revents().is_empty() {
                return Ok(());
            }
        }
    }

    /// The calling thread will not look at the sockets for a while: the worker takes over now.
    pub fn hand_over(&self) {
        self.lease_until.store(0, Ordering::Release);
        self.renew_at.store(0, Ordering::Relaxed);
        let _ = rustix::io::write(self.wake.get(), &1_u64.to_ne_bytes());
    }
}

/// A signal handler ran that wants the call it interrupted to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted;

/// How long a thread that waits for an event works itself before it leaves the sockets to the worker.
pub const WAIT_WORKING: Duration = Duration::from_millis(20);

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
