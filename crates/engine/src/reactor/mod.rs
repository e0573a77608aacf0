//! Progress: the threads of the program, or the worker thread, receive, send and run deadlines.
//!
//! 1. A thread that posts sends at once, or corks the request: keeps it back, to send it together with the next ones ([`cork`]).
//! 2. A thread that polls an empty completion queue handles all sockets that are ready, and renews the [`lease`]: the time for
//!    which the sockets are left to polling threads.
//! 3. The worker thread ([`worker`]) handles the sockets when no thread polls. It is not woken for them while the lease runs.
//!
//! There are two epoll sets. `sockets` contains every socket. The worker sleeps on `worker`, which contains `sockets`
//! (one shot), the timers of the lease and of the first deadline, and an eventfd.
//!
//! The reactor does not depend on queue pairs: a queue pair is a [`Source`] with a [`Token`], and may be a
//! [`DelayedAck`] and a user of [`PolledMemory`].

mod alarm;
mod arming;
mod buffers;
mod cork;
mod deadlines;
mod hot;
mod lease;
#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
mod quiet;
mod sleepers;
mod sources;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod time;
mod together;
mod turns;
pub(crate) mod worker;

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use smallvec::SmallVec;

use crate::clock;
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank, RwLock};
use crate::sys::{socket, thread};
pub(crate) use alarm::Alarm;
use arming::{Armings, Pollers};
use buffers::Buffers;
pub use buffers::RX_BUFFER_LEN;
use cork::{Cork, IdlePoll};
pub(crate) use cork::{DatagramPosts, Polls};
use deadlines::Deadlines;
use hot::{HotSocket, Tried};
use lease::{Actions, Lease, WAIT_SLICE};
use quiet::Quiet;
use sleepers::Sleepers;
use sources::Sources;
pub use sources::{Source, Token};
use time::Epoch;
pub(crate) use together::{SharedSender, added, together};
use turns::Turns;

/// A deadline that is handled this much later than its time is late, in nanoseconds.
const LATE: u64 = 50_000_000;
/// Largest number of ready sockets that one system call returns.
const READY_MAX: usize = 32;
/// While polled memory (shared with a peer process: [`PolledMemory`]) has something to receive, one in this number of polls that find
/// no completion also checks the sockets, if a check is due ([`Turns::sockets_are_due`]). If a check is late
/// ([`Turns::sockets_are_late`]), the next such poll checks them in any case.
/// Polling memory needs no system call; checking the sockets does.
const SOCKETS_EACH_HIT: u64 = 64;
/// As [`SOCKETS_EACH_HIT`], while polled memory has nothing to receive.
const SOCKETS_EACH_MISS: u64 = 16;

/// How long a thread that waits for an event handles the sockets before it leaves them to the worker.
pub const WAIT_WORKING: Duration = Duration::from_millis(20);
/// The longest time that acknowledgements wait while polls still receive something, nanoseconds.
const ACK_DELAY_MAX: u64 = 200_000;
/// How long polls have to receive nothing before acknowledgements are sent, nanoseconds. Many programs poll until a completion queue is
/// empty, or poll a second queue, before they answer, and the answer carries the acknowledgement.
const ACK_HOLD: u64 = 1_000;

/// A queue pair with delayed acknowledgements, or corked requests.
pub(crate) trait DelayedAck: Send + Sync {
    /// Sends the acknowledgements and the requests.
    fn flush(&self, now: Instant);

    /// Sends the acknowledgements that are due. The others are scheduled again, because the calling thread will poll
    /// again soon.
    fn flush_due(&self, now: Instant) {
        self.flush(now);
    }
}

/// Memory that a peer process writes to. It has to be polled, because a write to it makes no socket readable.
pub(crate) trait PolledMemory: Send + Sync {
    /// Whether there is something to receive, or room to send after there was none.
    fn has_input(&self) -> bool;
    /// Whether the peer waits for an acknowledgement.
    fn owes_ack(&self) -> bool {
        false
    }
    /// Whether a poll has something to do.
    fn is_ready(&self) -> bool {
        self.has_input() || self.owes_ack()
    }
    /// Requests that the peer sends a wake-up through the socket from now on; for an acknowledgement alone only if `acks` is set. Returns
    /// whether the memory is ready already.
    fn prepare_sleep(&self, acks: bool) -> bool;
    /// Withdraws the request of [`Self::prepare_sleep`], if the peer has not sent a wake-up yet.
    fn end_sleep(&self);
}

/// Polled memory and the source that uses it.
type PolledMemories = Vec<(Arc<dyn PolledMemory>, Weak<dyn Source>)>;
/// Users of memory that is ready.
type ReadyMemories = SmallVec<[Arc<dyn Source>; 2]>;
/// Queue pairs with scheduled acknowledgements. Each message schedules one, so this must not cost an allocation, and
/// does not if there are few queue pairs.
type DelayedAcks = SmallVec<[Arc<dyn DelayedAck>; 4]>;

const TOKEN_SOCKETS: u64 = 1;
const TOKEN_LEASE: u64 = 2;
const TOKEN_DEADLINE: u64 = 3;
const TOKEN_WAKE: u64 = 4;

/// Drives the sources of a process.
pub struct Reactor {
    sockets: EngineFd,
    worker: EngineFd,
    wake: EngineFd,
    lease_timer: EngineFd,
    deadline_timer: EngineFd,
    epoch: Epoch,
    sources: Sources,
    deadlines: Deadlines,
    lease: Lease,
    pollers: Pollers,
    cork: Cork,
    datagram_posts: DatagramPosts,
    quiet: Quiet,
    turns: Turns,
    hot: HotSocket,
    buffers: Buffers,
    /// Queue pairs with corked requests.
    corked: Mutex<Vec<Arc<dyn DelayedAck>>>,
    delayed: Mutex<DelayedAcks>,
    delayed_count: AtomicUsize,
    /// The time of the first poll that did not send the delayed acknowledgements; 0: there was none.
    delayed_since: AtomicU64,
    memories: RwLock<PolledMemories>,
    memory_count: AtomicUsize,
    /// Rotates the order in which memories are handled.
    rotation: AtomicUsize,
    sleepers: Sleepers,
    /// Whether the program has requested events that an acknowledgement may raise ([`Self::expect_events`]).
    may_await_events: AtomicBool,
    /// Number of times that the worker returned from the kernel.
    wakes: AtomicU64,
    /// Whether an internal error was caught. Nothing is sent or received after it.
    broken: AtomicBool,
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor")
            .field("lease", &self.lease)
            .field("cork", &self.cork)
            .finish_non_exhaustive()
    }
}

impl Reactor {
    /// A reactor without sources. [`worker::spawn`] starts its worker.
    pub(crate) fn new() -> io::Result<Self> {
        let timer = || {
            timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )
        };
        let reactor = Self {
            sockets: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            worker: EngineFd::new(epoll::create(CreateFlags::CLOEXEC)?),
            wake: EngineFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            lease_timer: EngineFd::new(timer()?),
            deadline_timer: EngineFd::new(timer()?),
            epoch: Epoch::new(clock::now()),
            sources: Sources::new(),
            deadlines: Deadlines::new(),
            #[cfg(not(test))]
            lease: Lease::new(),
            #[cfg(test)]
            lease: Lease::for_slow_machines(),
            pollers: Pollers::new(),
            cork: Cork::new(),
            datagram_posts: DatagramPosts::default(),
            quiet: Quiet::new(),
            turns: Turns::new(),
            hot: HotSocket::new(),
            buffers: Buffers::new(),
            corked: Mutex::new(Rank::Corked, Vec::new()),
            delayed: Mutex::new(Rank::DelayedAcks, DelayedAcks::new()),
            delayed_count: AtomicUsize::new(0),
            delayed_since: AtomicU64::new(0),
            memories: RwLock::new(Rank::PolledMemory, Vec::new()),
            memory_count: AtomicUsize::new(0),
            rotation: AtomicUsize::new(0),
            sleepers: Sleepers::new(),
            may_await_events: AtomicBool::new(false),
            wakes: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        };
        for (fd, token, flags) in [
            (
                &reactor.sockets,
                TOKEN_SOCKETS,
                EventFlags::IN | EventFlags::ONESHOT,
            ),
            (&reactor.lease_timer, TOKEN_LEASE, EventFlags::IN),
            (&reactor.deadline_timer, TOKEN_DEADLINE, EventFlags::IN),
            (&reactor.wake, TOKEN_WAKE, EventFlags::IN),
        ] {
            add(&reactor.worker, fd.get(), token, flags)?;
        }
        Ok(reactor)
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

    /// Registers a source without a socket, which only has deadlines.
    pub fn reserve(&self, source: Arc<dyn Source>) -> Token {
        self.sources.insert(source)
    }

    /// Watches a socket for a registered source.
    pub fn watch(&self, token: Token, fd: BorrowedFd<'_>, writable: bool) -> io::Result<()> {
        add(&self.sockets, fd, token.0, interest(writable))
    }

    /// Sets whether a source waits for its socket to be writable. Readiness events of the socket are turned on.
    pub fn want_write(&self, token: Token, fd: BorrowedFd<'_>, writable: bool) {
        let _ = epoll::modify(
            self.sockets.get(),
            fd,
            EventData::new_u64(token.0),
            interest(writable),
        );
    }

    /// Turns readiness events of a socket off until [`Self::want_write`].
    pub(crate) fn disarm(&self, token: Token, fd: BorrowedFd<'_>) {
        let data = EventData::new_u64(token.0);
        let _ = epoll::modify(self.sockets.get(), fd, data, EventFlags::empty());
    }

    /// Stops watching a socket.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(self.sockets.get(), fd);
    }

    /// Removes a source.
    pub fn remove(&self, token: Token, fd: Option<BorrowedFd<'_>>) {
        if token == Token::NONE {
            return;
        }
        if let Some(fd) = fd {
            self.unwatch(fd);
        }
        drop(self.sources.remove(token));
    }

    // ------------------------------------------------------------------ sockets

    /// Handles all sockets that are ready. Returns whether there were any.
    pub fn poll_all(&self, now: Instant) -> bool {
        if self.is_broken() {
            return false;
        }
        // The array is not initialized, because that would cost as much as the rest of a call that finds nothing.
        let mut events = [const { MaybeUninit::uninit() }; READY_MAX];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let waited = epoll::wait(self.sockets.get(), &mut events, Some(&at_once));
        let Ok((events, _)) = waited else {
            return false;
        };
        match events {
            [] => {}
            [event] => self.hot.set(&self.sources, Token(event.data.u64())),
            _ => self.hot.set(&self.sources, Token::NONE),
        }
        let found = !events.is_empty();
        for event in events {
            // If a source or another thread has marked the device as broken, the other events are not handled, because
            // they could look like closed connections.
            if self.is_broken() {
                return false;
            }
            if let Some(source) = self.sources.get(Token(event.data.u64())) {
                let flags = event.flags;
                let failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
                source.ready(
                    failed || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                    failed || flags.contains(EventFlags::OUT),
                    now,
                );
            }
        }
        found
    }

    /// Tries to receive from the hot socket ([`hot`]), and handles all sockets that are ready if a check is due.
    /// Returns whether something had arrived. `nth`: the number of this idle poll.
    fn poll_ready(&self, nth: u64, now: Instant) -> bool {
        let Tried { found, poll_all } = self.hot.try_recv(&self.sources, nth, now);
        // The result is true if the hot socket had something, even if the other sockets have nothing.
        let others = poll_all && self.poll_all(now);
        found || others
    }

    // ------------------------------------------------------------------ polls and posts

    /// Counts a poll that found completions.
    #[inline]
    pub(crate) fn on_successful_poll(&self) {
        self.lease.count_successful_poll();
    }

    /// Called when a context gets its first completion queue, or with `false` when its last one is destroyed.
    pub(crate) fn set_context_used(&self, used: bool) {
        self.lease.set_used(used);
    }

    /// Called when the program of a context with completion queues has declared that it makes progress only by polls, or with
    /// `false` when this no longer holds.
    pub(crate) fn set_context_polled(&self, polled: bool) {
        self.lease.set_polled(polled);
    }

    /// When datagram queue pairs last posted and sent.
    pub(crate) fn datagram_posts(&self) -> &DatagramPosts {
        &self.datagram_posts
    }

    /// The time in nanoseconds, as the other methods of this type use it.
    pub(crate) fn nanos(&self, now: Instant) -> u64 {
        self.epoch.nanos(now)
    }

    /// The number of polls of completion queues, and of those that found nothing.
    pub(crate) fn polls(&self) -> Polls {
        Polls {
            all: self
                .lease
                .successful_polls()
                .wrapping_add(self.cork.idle_polls()),
            idle: self.cork.idle_polls(),
        }
    }

    /// Called when a poll found its completion queue empty (an *idle poll*): the calling thread handles what is ready. This
    /// is called a *turn* ([`turns`]). While memory is polled, most idle polls of a busy loop only look at the memory.
    pub fn on_idle_poll(&self) {
        let (idle_polls, then) = self.cork.on_idle_poll();
        let IdlePoll::Proceed { flush } = then else {
            return;
        };
        let mut ready = ReadyMemories::new();
        self.find_memories(|memory| memory.is_ready(), &mut ready);
        if ready.is_empty() && !flush && self.may_skip_turn(idle_polls) {
            return;
        }
        let now = clock::now();
        let t = self.epoch.nanos(now);
        self.turns.on_turn(t);
        let actions = self.lease.on_poll(t);
        if actions.set_timer.is_some() {
            self.pollers.on_renewal(thread::number(), t);
        }
        self.perform(actions);
        if flush {
            // Each queue pair makes a system call, and all together may take longer than a lease.
            self.flush_corked(now, || self.renew_lease(clock::now()));
        }
        let from_memory = handle_memories(ready, now);
        let sockets_each = if from_memory {
            SOCKETS_EACH_HIT
        } else {
            SOCKETS_EACH_MISS
        };
        let sockets = !self.has_memories()
            || idle_polls.is_multiple_of(sockets_each) && self.turns.sockets_are_due(t)
            || self.turns.sockets_are_late(t);
        let from_sockets = sockets && self.poll_ready(idle_polls, now);
        if sockets {
            self.turns.on_sockets(from_sockets, t);
        }
        let found = from_sockets || from_memory;
        self.quiet.on_poll(found, t);
        if self.has_delayed() && (self.is_delayed_too_long(t) || self.is_held_long_enough(found, t))
        {
            together(|| {
                for (nth, qp) in self.take_delayed().into_iter().enumerate() {
                    if nth > 0 {
                        self.renew_lease(clock::now());
                    }
                    qp.flush_due(now);
                }
            });
        }
        // Polling threads run deadlines too: the worker may get no processor while this thread uses one.
        if self.deadlines.is_due(t) {
            self.run_late_deadlines(t);
        }
        if found {
            // The lease can end during this turn, and the worker can wake and sleep again before the turn is complete. If the program
            // does not poll again, only the worker can send the acknowledgements of this turn and receive the remaining data.
            self.ensure_lease(false);
        } else if self.quiet.should_yield(idle_polls, t) {
            rustix::thread::sched_yield();
            self.quiet.on_yield(t, self.epoch.nanos(clock::now()));
        }
    }

    /// Called while a poll goes on receiving or sending: it may take longer than its lease.
    pub(crate) fn renew_lease(&self, now: Instant) {
        self.perform(self.lease.on_poll(self.epoch.nanos(now)));
    }

    /// Called while a call of the program goes on sending: if a lease runs, the call may take longer than that lease.
    pub(crate) fn keep_lease(&self) {
        let now = clock::now();
        if !thread::is_worker() && self.lease.runs(self.epoch.nanos(now)) {
            self.renew_lease(now);
        }
    }

    /// Whether this idle poll may end after it has checked the polled memory.
    #[inline]
    fn may_skip_turn(&self, idle_polls: u64) -> bool {
        self.has_memories() && !self.has_delayed() && self.turns.may_skip(idle_polls)
    }

    /// Whether several threads of the program poll.
    pub(crate) fn has_several_pollers(&self, now: Instant) -> bool {
        // The tests of one process poll in several threads.
        !cfg!(test) && self.pollers.are_several(self.epoch.nanos(now))
    }

    /// Called when a request was posted and sent.
    #[inline]
    pub(crate) fn on_post(&self, now: Instant) {
        self.perform(self.lease.on_post(self.epoch.nanos(now)));
    }

    /// Called when a completion queue is armed: the program is about to sleep, so nothing may wait for its next poll.
    pub(crate) fn on_arm(&self) {
        self.expect_events();
        self.lease.on_arm();
        self.cork.on_arm();
        self.flush_delayed(clock::now());
    }

    /// Called when the program may wait for an event that an acknowledgement raises. From its next sleep on, the worker is also woken for
    /// acknowledgements; a thread that waits for an event is woken for them from its next slice on ([`WAIT_SLICE`]).
    #[inline]
    pub(crate) fn expect_events(&self) {
        if !self.may_await_events.load(Ordering::Relaxed)
            && !self.may_await_events.swap(true, Ordering::SeqCst)
        {
            // A worker that sleeps already has requested no wake-ups for acknowledgements.
            self.wake();
        }
    }

    /// Carries out the actions that the lease returned.
    #[inline]
    fn perform(&self, actions: Actions) {
        let take_sockets = || {
            // The worker no longer wakes if a socket is ready, because this thread handles it.
            let _ = epoll::modify(
                self.worker.get(),
                self.sockets.get(),
                EventData::new_u64(TOKEN_SOCKETS),
                EventFlags::ONESHOT,
            );
        };
        actions.carry_out(take_sockets, |after| set_timer(&self.lease_timer, after));
    }

    /// Called when the calling thread will not handle the sockets for a while: the worker takes over now.
    pub fn hand_over(&self) {
        self.lease.end();
        self.wake();
    }

    /// Called when the calling thread has armed a completion queue and will wait for the event in its own `poll` or
    /// `epoll_wait`. Does the same as [`Self::hand_over`] if a lease runs, no other thread polls, and this thread is expected to sleep ([`arming`]).
    pub(crate) fn end_lease(&self) {
        thread_local! {
            static ARMINGS: Cell<Armings> = const { Cell::new(Armings::new()) };
        }
        let t = self.epoch.nanos(clock::now());
        if self.pollers.on_sleep(thread::number(), t) || !self.lease.runs(t) {
            return;
        }
        let mut armings = ARMINGS.get();
        let will_sleep = armings.will_sleep(thread::sleeps());
        ARMINGS.set(armings);
        if will_sleep {
            self.hand_over();
        } else {
            self.lease.on_sleepless_arm(t);
        }
    }

    /// Wakes the worker. It handles what is ready, unless a lease runs.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(self.wake.get(), &1_u64.to_ne_bytes());
    }

    // ------------------------------------------------------------------ corked requests, delayed acknowledgements

    /// Whether a request that is posted to a stream now may be corked ([`cork`]).
    pub(crate) fn may_cork(&self) -> bool {
        self.cork.on_post()
    }

    /// Corks posted requests. Returns false if they have to be sent now: no thread polls, or the program computes between its posts.
    pub(crate) fn cork(&self, qp: Option<Arc<dyn DelayedAck>>) -> bool {
        let now = clock::now();
        let t = self.epoch.nanos(now);
        if !self.lease.is_polled(t) || !self.cork.is_busy(t) {
            return false;
        }
        self.cork_since(self.cork.idle_polls(), now, qp);
        true
    }

    /// Whether the program has posted so often for a while that a request may wait for the acknowledgement of earlier ones.
    pub(crate) fn is_busy_for_long(&self, now: Instant) -> bool {
        self.cork.is_busy_for_long(self.epoch.nanos(now))
    }

    /// Corks further requests of a queue pair that has corked requests.
    pub(crate) fn cork_more(&self) {
        self.cork.corked(self.cork.idle_polls());
    }

    /// Corks requests. `idle_polls`: how many polls had found nothing when they were posted. `qp`: the queue pair, if it is not registered
    /// as corked yet.
    pub(crate) fn cork_since(
        &self,
        idle_polls: u64,
        now: Instant,
        qp: Option<Arc<dyn DelayedAck>>,
    ) {
        let is_first = qp.is_some();
        if is_first {
            self.corked.lock().extend(qp);
        }
        self.cork.corked(idle_polls);
        self.perform(self.lease.on_cork(self.epoch.nanos(now)));
        if is_first {
            let t = || self.epoch.nanos(clock::now());
            if !self.cork.is_covered(|| self.lease.is_polled(t())) {
                self.perform(self.lease.grant(t(), true));
            }
        }
    }

    /// Sends the corked requests. Calls `between` between two queue pairs.
    fn flush_corked(&self, now: Instant, between: impl Fn()) {
        self.cork.uncork();
        let corked = std::mem::take(&mut *self.corked.lock());
        together(|| {
            for (nth, qp) in corked.into_iter().enumerate() {
                if nth > 0 {
                    between();
                }
                qp.flush(now);
            }
        });
    }

    /// Schedules the acknowledgements of a queue pair. They are sent with its next message, by an idle poll when polls
    /// have received nothing for [`ACK_HOLD`], by the worker before it sleeps, or when they have waited for
    /// [`ACK_DELAY_MAX`].
    pub(crate) fn schedule_ack(&self, qp: Arc<dyn DelayedAck>) {
        self.delayed.lock().push(qp);
        self.delayed_count.fetch_add(1, Ordering::Release);
    }

    /// Sends corked requests and all delayed acknowledgements.
    pub fn flush_delayed(&self, now: Instant) {
        if self.cork.is_corked() {
            self.flush_corked(now, || ());
        }
        together(|| {
            for qp in self.take_delayed() {
                qp.flush(now);
            }
        });
        if self.has_memories() {
            let mut owing = ReadyMemories::new();
            self.find_memories(|memory| memory.owes_ack(), &mut owing);
            for source in owing {
                source.flush_memory(now);
            }
        }
    }

    /// Whether acknowledgements have waited for longer than [`ACK_DELAY_MAX`], since the first poll that did not send them.
    /// Without this limit, a peer that sends without a pause would delay the acknowledgements to all others forever.
    fn is_delayed_too_long(&self, t: u64) -> bool {
        if !self.has_delayed() {
            return false;
        }
        let since = self.delayed_since.load(Ordering::Relaxed);
        if since == 0 {
            self.delayed_since.store(t.max(1), Ordering::Relaxed);
        }
        since != 0 && t.saturating_sub(since) > ACK_DELAY_MAX
    }

    /// Whether idle polls have received nothing for [`ACK_HOLD`], so that delayed acknowledgements are to be sent.
    /// `found`: whether this poll has received something.
    fn is_held_long_enough(&self, found: bool, t: u64) -> bool {
        // In shared memory a separate message for the acknowledgement costs less than waiting for the answer.
        if self.has_memories() {
            return !found;
        }
        !found && self.quiet.polled_in_vain(t) > ACK_HOLD
    }

    fn has_delayed(&self) -> bool {
        self.delayed_count.load(Ordering::Acquire) > 0
    }

    fn take_delayed(&self) -> DelayedAcks {
        if !self.has_delayed() {
            return DelayedAcks::new();
        }
        self.delayed_since.store(0, Ordering::Relaxed);
        let delayed = std::mem::take(&mut *self.delayed.lock());
        self.delayed_count
            .fetch_sub(delayed.len(), Ordering::AcqRel);
        delayed
    }

    // ------------------------------------------------------------------ polled memory

    #[inline]
    pub(crate) fn has_memories(&self) -> bool {
        self.memory_count.load(Ordering::Relaxed) > 0
    }

    /// Registers memory to be polled for a source, whose [`Source::memory_ready`] is called.
    pub(crate) fn add_memory(&self, memory: Arc<dyn PolledMemory>, source: Weak<dyn Source>) {
        let mut memories = self.memories.write();
        memories.push((memory, source));
        self.memory_count.store(memories.len(), Ordering::Relaxed);
    }

    /// Stops polling the memory.
    pub(crate) fn remove_memory(&self, memory: &Arc<dyn PolledMemory>) {
        let mut memories = self.memories.write();
        memories.retain(|(m, _)| !Arc::ptr_eq(m, memory));
        self.memory_count.store(memories.len(), Ordering::Relaxed);
    }

    /// Adds the users of memory for which `is_ready` is true to `found`, which most polls leave empty.
    #[inline]
    fn find_memories(
        &self,
        is_ready: impl Fn(&dyn PolledMemory) -> bool,
        found: &mut ReadyMemories,
    ) {
        if self.has_memories() && !self.is_broken() {
            for (memory, source) in self.memories.read().iter() {
                if is_ready(&**memory) {
                    found.extend(source.upgrade());
                }
            }
            // Without this rotation, one peer would always be served first: it can answer first, so its memory is ready again at
            // the next turn.
            if found.len() > 1 {
                let first = self.rotation.fetch_add(1, Ordering::Relaxed) % found.len();
                found.rotate_left(first);
            }
        }
    }

    /// Handles memory for which `is_ready` is true. Returns whether there was any.
    fn poll_memory(&self, now: Instant, is_ready: impl Fn(&dyn PolledMemory) -> bool) -> bool {
        let mut ready = ReadyMemories::new();
        self.find_memories(is_ready, &mut ready);
        handle_memories(ready, now)
    }

    /// Called when this thread has received a byte by which a peer woke this process. The peer sends the next byte only
    /// after a thread of this process has announced again that it sleeps.
    ///
    /// The worker announces this whenever it sleeps. A polling thread does not, and relies on the worker, which wakes at the
    /// end of the lease. A poll can take longer than its lease; then no lease runs, and one is started. If another thread waits
    /// for an event, its long lease is shortened, because that thread will not receive the byte.
    pub(crate) fn on_wake_up_taken(&self) {
        if thread::is_worker() {
            return;
        }
        let others = self.hot.sleepers() > usize::from(thread::is_waiting());
        self.ensure_lease(others);
    }

    /// Starts a lease if none runs, so that the worker wakes at its end. `shorten`: a running lease is replaced by a short
    /// one.
    #[inline]
    fn ensure_lease(&self, shorten: bool) {
        let t = self.epoch.nanos(clock::now());
        if shorten || !self.lease.runs(t) {
            self.perform(self.lease.grant(t, true));
        }
    }

    /// Requests wake-ups from all peers. Returns whether some memory is ready already.
    fn memory_prepare_sleep(&self) -> bool {
        let acks = self.may_await_events.load(Ordering::SeqCst);
        let ready = self.has_memories() && !self.is_broken() && self.announce_sleep(acks);
        // Requests may have been posted meanwhile that wait for an acknowledgement (`RcQp::wait_for_ack`).
        ready || !acks && self.has_memories() && self.has_delayed()
    }

    fn announce_sleep(&self, acks: bool) -> bool {
        self.sleepers.announce();
        let memories = self.memories.read();
        memories
            .iter()
            .fold(false, |any, (memory, _)| memory.prepare_sleep(acks) || any)
    }

    /// Called by the worker when it is awake: withdraws the requests for wake-ups that no peer has seen yet. The worker looks at all
    /// memories after this.
    fn memory_end_sleep(&self) {
        if !self.has_memories() {
            return;
        }
        let withdraw = || {
            for (memory, _) in &*self.memories.read() {
                memory.end_sleep();
            }
        };
        self.sleepers.withdraw(withdraw, || {
            self.announce_sleep(self.may_await_events.load(Ordering::SeqCst));
        });
    }

    /// Calls `sleep`, in which the calling thread requests wake-ups from peers and waits for them.
    pub(crate) fn sleeping<R>(&self, sleep: impl FnOnce() -> R) -> R {
        self.sleepers.count(sleep)
    }

    // ------------------------------------------------------------------ buffers

    /// A receive buffer of [`RX_BUFFER_LEN`] bytes.
    pub(crate) fn rx_buffer(&self) -> Box<[u8]> {
        self.buffers.take_rx()
    }

    /// Returns a receive buffer for reuse.
    pub(crate) fn return_rx_buffer(&self, buffer: Box<[u8]>) {
        self.buffers.return_rx(buffer);
    }

    /// A transmit buffer.
    pub(crate) fn tx_buffer(&self) -> Vec<u8> {
        self.buffers.take_tx()
    }

    /// Returns a transmit buffer for reuse.
    pub(crate) fn return_tx_buffer(&self, buffer: Vec<u8>) {
        self.buffers.return_tx(buffer);
    }

    // ------------------------------------------------------------------ deadlines

    /// Requests [`Source::timeout`] of `token` at `at`.
    pub fn deadline(&self, token: Token, at: Instant) {
        let set_timer = || self.wake_worker_at(at, clock::now());
        self.deadlines
            .add(token, at, &self.sources, self.epoch, set_timer);
    }

    /// Sets the timer of the first deadline, which is at `at`. While a thread polls, that thread runs the deadlines, so the timer is
    /// set one lease later than the deadline: the worker runs the deadline only if the thread has stopped polling before.
    fn wake_worker_at(&self, at: Instant, now: Instant) {
        let polled = self.lease.runs_deadlines(self.epoch.nanos(now));
        let at = if polled { at + self.lease.short() } else { at };
        set_timer(&self.deadline_timer, at.saturating_duration_since(now));
    }

    /// Runs the deadlines that are due. If one is late, because the process was stopped or had no processor, first receives what
    /// has arrived: an acknowledgement that waits in a socket must not count as missing.
    fn run_late_deadlines(&self, t: u64) {
        if self.deadlines.is_due(t.saturating_sub(LATE)) {
            let now = clock::now();
            self.poll_memory(now, |memory| memory.has_input());
            self.poll_all(now);
        }
        self.run_deadlines();
    }

    fn run_deadlines(&self) {
        // The clock is read once: a deadline that passes during this turn is handled in the next one.
        let now = clock::now();
        let set_timer = |at| self.wake_worker_at(at, now);
        while let Some(token) = self.deadlines.pop_due(now, self.epoch, set_timer) {
            if let Some(source) = self.sources.get(token) {
                source.timeout(now);
            }
        }
    }

    // ------------------------------------------------------------------ state

    fn count_wake(&self) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of times that the worker returned from the kernel.
    pub(crate) fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Whether an internal error was caught: nothing is sent or received any more.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Marks the device as broken. Returns whether it was broken before.
    pub(crate) fn set_broken(&self) -> bool {
        self.broken.swap(true, Ordering::AcqRel)
    }

    /// Whether [`Self::wake`] was called and the worker has not woken since.
    #[cfg(test)]
    pub(crate) fn is_woken(&self) -> bool {
        socket::wait_readable(self.wake.get(), Duration::ZERO)
    }

    /// The end of the lease, and whether it runs.
    #[cfg(test)]
    pub(crate) fn lease_end(&self) -> (u64, bool) {
        let t = self.epoch.nanos(clock::now());
        (self.lease.ends_at(), self.lease.runs(t))
    }

    // ------------------------------------------------------------------ threads that wait for an event

    /// Blocks until `fd` is readable, and handles the sockets meanwhile. For threads that wait for an event.
    ///
    /// Returns after [`WAIT_WORKING`] at the latest, so that the caller can check its condition. `Err` if a signal
    /// handler that interrupts system calls has run.
    pub fn work_until_readable(&self, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        self.work_for(WAIT_WORKING, fd)
    }

    /// [`Self::work_until_readable`] for `time`, or [`WAIT_WORKING`] if that is shorter.
    pub fn work_for(&self, time: Duration, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        self.hot.begin_sleep(&self.sources);
        let worked = thread::waiting(|| self.sleeping(|| self.work_and_wait(time, fd)));
        self.hot.end_sleep();
        worked
    }

    fn work_and_wait(&self, time: Duration, fd: BorrowedFd<'_>) -> Result<(), Interrupted> {
        use rustix::event::{PollFd, PollFlags};
        let time = time.min(WAIT_WORKING);
        let mut now = clock::now();
        let until = now + time;
        for nth in 1.. {
            if now >= until {
                break;
            }
            let slice = until.saturating_duration_since(now).min(WAIT_SLICE);
            self.perform(self.lease.on_wait(self.epoch.nanos(now), slice));
            self.flush_delayed(now);
            if self.memory_prepare_sleep() {
                self.poll_memory(now, |memory| memory.is_ready());
                let t = self.epoch.nanos(now);
                if self.turns.sockets_are_late(t) {
                    self.poll_all(now);
                    self.turns.on_sockets(false, t);
                }
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
            // The sockets of a broken device are not handled.
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
                    self.poll_all(now);
                }
                break;
            }
            if !sockets.revents().is_empty() {
                let Tried { found, poll_all } = self.hot.try_recv(&self.sources, nth, now);
                if poll_all || !found {
                    self.poll_all(now);
                }
            }
        }
        Ok(())
    }
}

/// Lets the users of memory receive what is in it. Returns whether there are any.
#[inline]
fn handle_memories(ready: ReadyMemories, now: Instant) -> bool {
    let any = !ready.is_empty();
    for source in ready {
        source.memory_ready(now);
    }
    any
}

/// A signal handler that interrupts system calls (one without `SA_RESTART`) has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted;

fn add(set: &EngineFd, fd: BorrowedFd<'_>, token: u64, flags: EventFlags) -> io::Result<()> {
    Ok(epoll::add(set.get(), fd, EventData::new_u64(token), flags)?)
}

fn interest(writable: bool) -> EventFlags {
    let flags = EventFlags::IN | EventFlags::RDHUP;
    if writable {
        flags | EventFlags::OUT
    } else {
        flags
    }
}

/// Reads the counter of a timer or eventfd, which makes it unreadable again.
fn drain_counter(fd: &EngineFd) {
    let mut count = [0_u8; 8];
    let _ = rustix::io::read(fd.get(), &mut count);
}

/// Sets a one-shot timer. With a time of zero it fires at once.
fn set_timer(timer: &EngineFd, after: Duration) {
    // A value of zero would stop the timer.
    let after = after.max(Duration::from_nanos(1));
    let value = Timespec {
        tv_sec: after.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: after.subsec_nanos().into(),
    };
    let once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let _ = timerfd_settime(
        timer.get(),
        TimerfdTimerFlags::empty(),
        &Itimerspec {
            it_interval: once,
            it_value: value,
        },
    );
}
