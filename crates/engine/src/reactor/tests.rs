//! Tests of the reactor with real sockets and timers, without a worker thread. A test calls the worker's methods itself.
//!
//! A *lease* is the time for which a polling thread handles the sockets; the worker leaves them alone until it ends. A request is *corked*
//! if it is posted and kept back, to be sent together with the next ones. A socket is *hot* if the last successful check for ready sockets
//! found no other one. After many receives with success it is *disarmed*: it raises no events of epoll. A program *arms* a completion queue
//! when it requests an event.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, Weak};

use super::hot::{DISARM_AFTER_HITS, STEADY_HITS};
use super::worker::{AckHold, HOLD_FOR, ROUNDS_MAX, SpinBudget};
use super::*;

/// Longer than any delay of a loaded machine between two lines of a test.
const LONG: Duration = Duration::from_millis(20);

/// A budget whose spins last long enough to receive bytes that a test sends during a spin.
fn budget() -> SpinBudget {
    SpinBudget::new(LONG)
}

/// Acknowledgements whose flush waits for a delay and then writes a byte to a socket.
struct Acknowledges(UnixStream, Duration);

impl DelayedAck for Acknowledges {
    fn flush(&self, _now: Instant) {
        std::thread::sleep(self.1);
        assert_eq!(rustix::io::write(&self.0, &[1]), Ok(1));
    }
}

/// Receives one byte at a time, and records which of its methods were called.
struct Bytes {
    reactor: &'static Reactor,
    token: Mutex<Token>,
    fd: UnixStream,
    calls: Mutex<Vec<&'static str>>,
}

impl Bytes {
    fn record(&self, what: &'static str) {
        let mut calls = self.calls.lock().unwrap();
        if calls.last() != Some(&what) {
            calls.push(what);
        }
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn recv(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0]).is_ok()
    }
}

impl Source for Bytes {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        self.record("ready");
        self.recv();
    }

    fn try_recv_hot(self: Arc<Self>, _now: Instant) -> Option<bool> {
        self.record("tried");
        Some(self.recv())
    }

    fn set_armed(&self, armed: bool) {
        let token = *self.token.lock().unwrap();
        if armed {
            self.record("rearmed");
            self.reactor.want_write(token, self.fd.as_fd(), false);
        } else {
            self.record("disarmed");
            self.reactor.disarm(token, self.fd.as_fd());
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.record("timeout");
    }
}

fn reactor() -> &'static Reactor {
    // Reactor and source refer to each other: a static list keeps leak detection from reporting them.
    static ALL: Mutex<Vec<&Reactor>> = Mutex::new(Vec::new());
    let reactor: &'static Reactor = Box::leak(Box::new(Reactor::new().unwrap()));
    ALL.lock().unwrap().push(reactor);
    reactor
}

/// A reactor without a thread, a source, and the other end of its socket.
fn idle() -> (&'static Reactor, Arc<Bytes>, UnixStream) {
    let reactor = reactor();
    let (bytes, theirs) = add_source(reactor);
    (reactor, bytes, theirs)
}

/// Adds a source. Returns it and the other end of its socket.
fn add_source(reactor: &'static Reactor) -> (Arc<Bytes>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let bytes = Arc::new(Bytes {
        reactor,
        token: Mutex::new(Token::NONE),
        fd: ours,
        calls: Mutex::default(),
    });
    let source = Arc::clone(&bytes) as Arc<dyn Source>;
    let token = reactor.add(source, bytes.fd.as_fd(), false).unwrap();
    *bytes.token.lock().unwrap() = token;
    (bytes, theirs)
}

/// A reactor whose socket has become hot and was disarmed, the owner of the socket, and a function that sends a byte to the socket.
fn hot() -> (&'static Reactor, Arc<Bytes>, impl Fn()) {
    let (reactor, bytes, theirs) = idle();
    let send = move || assert_eq!(rustix::io::write(&theirs, &[1]), Ok(1));
    for _ in 0..=DISARM_AFTER_HITS {
        send();
        assert!(reactor.poll_ready(1, clock::now()));
    }
    (reactor, bytes, send)
}

/// As long as one socket has all the data, polls that find nothing there check the other sockets less often.
#[test]
fn the_other_sockets_are_checked_less_often_if_one_has_all_data() {
    let (reactor, _first, first) = idle();
    let (_second, second) = add_source(reactor);
    let send = |to: &UnixStream| assert_eq!(rustix::io::write(to, &[1]), Ok(1));
    let poll = |nth| reactor.poll_ready(nth, clock::now());
    send(&first);
    assert!(poll(1));
    send(&second);
    assert!(!poll(2) && poll(4));
    for _ in 0..=STEADY_HITS {
        send(&second);
        assert!(poll(1));
    }
    send(&first);
    assert!(!poll(4) && !poll(8) && poll(16));
    // Now the first socket is hot, and has had one message.
    send(&second);
    assert!(poll(4));
}

#[test]
fn nothing_is_corked_while_no_thread_polls() {
    let reactor = reactor();
    assert!(!reactor.cork(None));
    // If the test is preempted, the lease may have ended.
    let corked = (0..100).any(|_| {
        reactor.on_idle_poll();
        reactor.may_cork();
        reactor.cork(None)
    });
    assert!(corked);
}

/// A queue pair whose flush takes three quarters of a lease. It records whether the lease had not ended when its flush began.
struct Slow(&'static Reactor, Mutex<Vec<bool>>);

impl DelayedAck for Slow {
    fn flush(&self, _now: Instant) {
        let runs = self.0.lease.runs(self.0.epoch.nanos(clock::now()));
        self.1.lock().unwrap().push(runs);
        std::thread::sleep(self.0.lease.short() * 3 / 4);
    }
}

/// If the lease ended while one poll sends the requests of many queue pairs, the worker would begin to handle the sockets, and both threads
/// would wait for the same locks.
#[test]
fn a_poll_that_sends_for_many_queue_pairs_keeps_its_lease() {
    let reactor = reactor();
    let kept = |corked: bool| {
        let all: Vec<_> = (0..3)
            .map(|_| Arc::new(Slow(reactor, Mutex::default())))
            .collect();
        let listed = all.iter().map(|qp| Arc::clone(qp) as Arc<dyn DelayedAck>);
        if corked {
            reactor.on_idle_poll();
            for qp in listed {
                reactor.cork_since(reactor.cork.idle_polls(), clock::now(), Some(qp));
            }
        } else {
            listed.for_each(|qp| reactor.schedule_ack(qp));
        }
        while all.iter().any(|qp| qp.1.lock().unwrap().is_empty()) {
            reactor.on_idle_poll();
        }
        all.iter().all(|qp| *qp.1.lock().unwrap() == [true])
    };
    // If the test is preempted, the lease may have ended.
    assert!((0..20).any(|_| kept(true)), "corked requests");
    assert!((0..20).any(|_| kept(false)), "acknowledgements");
}

/// One call can copy many MiB to a ring of shared memory while the peer reads it.
#[test]
fn a_call_that_sends_for_long_keeps_a_lease_but_starts_none() {
    let reactor = reactor();
    reactor.keep_lease();
    assert!(!reactor.lease_end().1, "a lease was started");
    let pause = reactor.lease.short() * 3 / 4;
    let kept = || {
        reactor.on_idle_poll();
        std::thread::sleep(pause);
        let (before, runs) = reactor.lease_end();
        reactor.keep_lease();
        runs && reactor.lease_end().0 > before
    };
    // If the test is preempted, the lease may have ended.
    assert!((0..20).any(|_| kept()), "the lease was not renewed");
}

/// A thread finds that the lease still runs, and corks a request after the lease has ended. If the timer were not set again, no thread would
/// send that request.
#[test]
fn corking_after_the_end_of_the_lease_sets_the_timer_again() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let qp = Arc::new(Acknowledges(ours, Duration::ZERO));
    let reactor = reactor();
    let checked = clock::now();
    reactor.perform(reactor.lease.grant(reactor.epoch.nanos(checked), false));
    let timer = reactor.lease_timer.get();
    assert!(socket::wait_readable(timer.as_fd(), 100 * LONG));
    reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
    let idle_polls = reactor.cork.idle_polls();
    reactor.cork_since(idle_polls, checked, Some(qp as Arc<dyn DelayedAck>));
    assert!(reactor.cork.is_corked());
    assert!(socket::wait_readable(timer.as_fd(), 100 * LONG));
    reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
    assert!(!reactor.cork.is_corked());
}

/// One thread starts a long lease, and another one then sets the timer for a shorter lease. The timer fires while the long one runs.
#[test]
fn a_timer_that_fires_during_a_lease_is_set_again() {
    let reactor = reactor();
    let start = clock::now();
    let wait = reactor.lease.on_wait(reactor.epoch.nanos(start), 5 * LONG);
    let lease = wait.set_timer.unwrap();
    set_timer(&reactor.lease_timer, Duration::ZERO);
    reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
    let timer = reactor.lease_timer.get();
    assert!(socket::wait_readable(timer.as_fd(), 100 * lease));
    assert!(clock::now() >= start + lease);
}

/// The worker sends delayed acknowledgements, and then spins: it polls the sockets for a while before it sleeps. What the peer sends after
/// it has got the acknowledgement is received in the same turn.
#[test]
fn a_spinning_worker_receives_arriving_data() {
    let (soon, late) = (Duration::ZERO, 2 * LONG);
    // Something that arrives while the worker spins adds to its credit for spins. The next spin, in which nothing arrives, halves the
    // credit. What arrives after the spin adds none.
    let cases = [
        (0, soon, (true, 0)),
        (1, soon, (false, 1)),
        (2, late, (false, 0)),
    ];
    for (credit, delay, after) in cases {
        let (reactor, bytes, other) = idle();
        assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
        // The value is kept: dropping it would close the peer's end, and the socket of `bytes` would be ready from then on.
        let qp = Arc::new(Acknowledges(other, delay));
        reactor.schedule_ack(Arc::clone(&qp) as Arc<dyn DelayedAck>);
        let mut spin = SpinBudget::with_credit(LONG, credit);
        reactor.sleep_and_work(&mut spin, &mut AckHold::default());
        assert!(reactor.take_delayed().is_empty());
        let left = bytes.recv();
        assert_eq!((left, spin.credit()), after);
    }
}

/// A program that polls until its queue is empty, and then answers, sends the acknowledgement with its answer.
#[test]
fn a_first_empty_poll_leaves_the_acknowledgement_for_the_answer() {
    let (reactor, bytes, other) = idle();
    let qp = Arc::new(Acknowledges(other, Duration::ZERO));
    reactor.schedule_ack(Arc::clone(&qp) as Arc<dyn DelayedAck>);
    reactor.on_idle_poll();
    assert!(!bytes.recv(), "the first empty poll has sent it");
    // Without an answer a later poll sends the acknowledgement.
    std::thread::sleep(Duration::from_nanos(2 * ACK_HOLD));
    reactor.on_idle_poll();
    assert!(bytes.recv());
    assert!(reactor.take_delayed().is_empty());
    // The time counts from the last poll that found something.
    reactor.schedule_ack(Arc::clone(&qp) as Arc<dyn DelayedAck>);
    let held_long_enough = |found: bool, t: u64| {
        reactor.quiet.on_poll(found, t);
        reactor.is_held_long_enough(found, t)
    };
    assert!(!held_long_enough(true, 5 * ACK_HOLD));
    assert!(!held_long_enough(false, 6 * ACK_HOLD));
    assert!(!held_long_enough(true, 7 * ACK_HOLD));
    assert!(!held_long_enough(false, 8 * ACK_HOLD));
    assert!(held_long_enough(false, 10 * ACK_HOLD));
    drop(reactor.take_delayed());
}

/// Notes the time of its flush.
struct Flushed(Mutex<Option<Instant>>);

impl DelayedAck for Flushed {
    fn flush(&self, now: Instant) {
        *self.0.lock().unwrap() = Some(now);
    }
}

/// A poll that finds something shows that the program is about to answer, and the acknowledgement can travel with the answer. A program that
/// waits for a Write polls its memory instead, and its peer waits for the acknowledgement.
#[test]
fn the_worker_holds_an_acknowledgement_only_if_a_poll_has_succeeded() {
    let (reactor, _bytes, other) = idle();
    let mut hold = AckHold::default();
    for _ in 0..10 {
        reactor.on_successful_poll();
        let ack = Arc::new(Flushed(Mutex::new(None)));
        reactor.schedule_ack(Arc::clone(&ack) as Arc<dyn DelayedAck>);
        assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
        let begin = clock::now();
        reactor.sleep_and_work(&mut SpinBudget::new(Duration::ZERO), &mut hold);
        let flushed = *ack.0.lock().unwrap();
        assert!(flushed.unwrap() - begin >= HOLD_FOR);
        let polls = reactor.lease.successful_polls();
        assert!(!hold.expects_answer(polls), "there was no poll since");
    }
}

/// A peer that waits for its acknowledgement sends nothing that would wake the worker, regardless of how much it sent
/// before.
#[test]
fn delayed_acknowledgements_are_sent_after_any_number_of_rounds() {
    for rounds in [1, ROUNDS_MAX - 1, ROUNDS_MAX, ROUNDS_MAX + 1] {
        let (reactor, _bytes, other) = idle();
        for _ in 0..rounds {
            assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
        }
        let qp = Arc::new(Acknowledges(other, Duration::ZERO));
        reactor.schedule_ack(Arc::clone(&qp) as Arc<dyn DelayedAck>);
        reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
        assert!(reactor.take_delayed().is_empty(), "after {rounds} rounds");
    }
}

#[test]
fn a_hot_socket_is_disarmed_until_the_worker_takes_over() {
    let (reactor, bytes, send) = hot();
    assert_eq!(bytes.calls(), ["ready", "tried", "disarmed"]);
    send();
    assert!(!reactor.poll_all(clock::now()));
    reactor.hand_over();
    reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
    assert_eq!(bytes.calls(), ["rearmed", "ready"]);
    // The worker has left the socket armed.
    send();
    assert!(reactor.poll_all(clock::now()));
}

#[test]
fn another_ready_socket_rearms_the_hot_one() {
    let (reactor, bytes, send) = hot();
    let (other, end) = UnixStream::pair().unwrap();
    let source = Arc::clone(&bytes) as Arc<dyn Source>;
    reactor.add(source, other.as_fd(), false).unwrap();
    rustix::io::write(&end, &[1]).unwrap();
    assert!(reactor.poll_all(clock::now()));
    assert!(bytes.calls().contains(&"rearmed"));
    send();
    assert!(reactor.poll_all(clock::now()));
}

#[test]
fn a_thread_that_sleeps_until_a_socket_is_ready_is_woken() {
    let (reactor, bytes, send) = hot();
    send();
    let (quiet, _end) = UnixStream::pair().unwrap();
    bytes.calls();
    reactor
        .work_for(Duration::from_millis(1), quiet.as_fd())
        .unwrap();
    assert_eq!(bytes.calls(), ["rearmed", "tried"]);
    // Nothing is disarmed while a thread sleeps.
    reactor.hot.begin_sleep(&reactor.sources);
    for _ in 0..=2 * DISARM_AFTER_HITS {
        send();
        assert!(reactor.poll_ready(1, clock::now()));
    }
    assert!(!bytes.calls().contains(&"disarmed"));
    reactor.hot.end_sleep();
}

/// A process that was stopped receives before it treats its peers as silent.
#[test]
fn what_has_arrived_is_received_before_a_late_deadline() {
    for polls in [false, true] {
        let (reactor, bytes, other) = idle();
        let token = *bytes.token.lock().unwrap();
        let late = clock::now() - Duration::from_nanos(2 * LATE);
        reactor.deadline(token, late);
        assert_eq!(rustix::io::write(&other, &[1]), Ok(1));
        if polls {
            reactor.on_idle_poll();
        } else {
            assert!(socket::wait_readable(
                reactor.deadline_timer.get(),
                100 * LONG
            ));
            reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
        }
        assert_eq!(bytes.calls().get(..2), Some(&["ready", "timeout"][..]));
    }
}

/// Memory with something to receive, until it is received.
struct Memory(AtomicBool);

impl PolledMemory for Memory {
    fn has_input(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn prepare_sleep(&self, _acks: bool) -> bool {
        self.is_ready()
    }

    fn end_sleep(&self) {}
}

struct MemoryUser(Arc<Memory>);

impl Source for MemoryUser {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}
    fn timeout(self: Arc<Self>, _now: Instant) {}
    fn memory_ready(self: Arc<Self>, _now: Instant) {
        self.0.0.store(false, Ordering::SeqCst);
    }
}

#[test]
fn a_poll_handles_memory_that_is_ready() {
    let reactor = reactor();
    let memory = Arc::new(Memory(AtomicBool::new(true)));
    let user: Arc<dyn Source> = Arc::new(MemoryUser(Arc::clone(&memory)));
    let polled = Arc::clone(&memory) as Arc<dyn PolledMemory>;
    let weak: Weak<dyn Source> = Arc::downgrade(&user);
    reactor.add_memory(Arc::clone(&polled), weak);
    reactor.on_idle_poll();
    assert!(!memory.is_ready());
    memory.0.store(true, Ordering::SeqCst);
    reactor.remove_memory(&polled);
    reactor.on_idle_poll();
    assert!(memory.is_ready(), "memory was polled after it was removed");
}

/// Memory that always has something to receive.
struct Full;

impl PolledMemory for Full {
    fn has_input(&self) -> bool {
        true
    }

    fn prepare_sleep(&self, _acks: bool) -> bool {
        true
    }

    fn end_sleep(&self) {}
}

/// Notes its number when its memory is handled.
struct Numbered(usize, Arc<Mutex<Vec<usize>>>);

impl Source for Numbered {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}
    fn timeout(self: Arc<Self>, _now: Instant) {}
    fn memory_ready(self: Arc<Self>, _now: Instant) {
        self.1.lock().unwrap().push(self.0);
    }
}

#[test]
fn each_memory_is_handled_first_in_turn() {
    let reactor = reactor();
    let order = Arc::new(Mutex::new(Vec::new()));
    let users = [0, 1, 2].map(|n| Arc::new(Numbered(n, Arc::clone(&order))) as Arc<dyn Source>);
    for user in &users {
        reactor.add_memory(Arc::new(Full), Arc::downgrade(user));
    }
    for _ in 0..3 {
        assert!(reactor.poll_memory(clock::now(), |memory| memory.is_ready()));
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 1, 2, 0, 2, 0, 1]);
}

/// Shared memory that records the requests for wake-ups. `Some(true)`: for acknowledgements too; `Some(false)`: not for them; `None`: the
/// request was withdrawn.
struct Sleeper(Mutex<Vec<Option<bool>>>);

impl PolledMemory for Sleeper {
    fn has_input(&self) -> bool {
        false
    }

    fn prepare_sleep(&self, acks: bool) -> bool {
        self.0.lock().unwrap().push(Some(acks));
        false
    }

    fn end_sleep(&self) {
        self.0.lock().unwrap().push(None);
    }
}

/// The program requests an event while the worker sleeps. An acknowledgement may raise that event, so it has to wake the worker.
#[test]
fn acknowledgements_wake_the_worker_once_the_program_requests_events() {
    let reactor = reactor();
    let memory = Arc::new(Sleeper(Mutex::new(Vec::new())));
    let user: Weak<MemoryUser> = Weak::new();
    reactor.add_memory(Arc::clone(&memory) as Arc<dyn PolledMemory>, user);
    let sleep = || {
        reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
        std::mem::take(&mut *memory.0.lock().unwrap())
    };
    reactor.wake();
    assert_eq!(sleep(), [Some(false)]);
    reactor.on_arm();
    // Without a wake-up the worker would sleep forever.
    assert_eq!(sleep(), [None, Some(true)]);
    reactor.on_arm();
    assert!(!socket::wait_readable(reactor.wake.get(), Duration::ZERO));
}

/// A thread that waits for an event needs the wake-ups.
#[test]
fn the_worker_withdraws_its_requests_for_wake_ups_unless_another_thread_sleeps() {
    let reactor = reactor();
    let memory = Arc::new(Sleeper(Mutex::new(Vec::new())));
    let user: Weak<MemoryUser> = Weak::new();
    reactor.add_memory(Arc::clone(&memory) as Arc<dyn PolledMemory>, user);
    let wake = || {
        reactor.wake();
        reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
        std::mem::take(&mut *memory.0.lock().unwrap())
    };
    assert_eq!(wake(), [Some(false)], "it has requested nothing before");
    assert_eq!(wake(), [None, Some(false)]);
    reactor.sleeping(|| {
        reactor.memory_prepare_sleep();
        assert_eq!(wake(), [Some(false); 2], "another thread sleeps");
    });
    assert_eq!(wake(), [None, Some(false)]);
}

/// Requests that wait for an acknowledgement are sent when it arrives. If the worker went to sleep before there were such requests, it has
/// not asked the peer to wake it for acknowledgements.
#[test]
fn the_worker_does_not_sleep_while_requests_wait_for_an_acknowledgement() {
    let reactor = reactor();
    let user: Weak<MemoryUser> = Weak::new();
    let memory = Arc::new(Sleeper(Mutex::new(Vec::new())));
    reactor.add_memory(memory as Arc<dyn PolledMemory>, user);
    assert!(!reactor.memory_prepare_sleep());
    let qp = Arc::new(Flushed(Mutex::new(None)));
    reactor.schedule_ack(Arc::clone(&qp) as Arc<dyn DelayedAck>);
    assert!(reactor.memory_prepare_sleep());
    reactor.wake();
    reactor.sleep_and_work(&mut budget(), &mut AckHold::default());
    assert!(qp.0.lock().unwrap().is_some());
    assert!(!reactor.memory_prepare_sleep());
}

/// A poll can receive the byte that should wake the worker although no lease runs any more. The peer sends the next such byte only after the
/// worker has slept again. So the poll starts a new lease, at whose end the worker handles what has arrived.
#[test]
fn a_wake_up_that_is_taken_without_a_lease_starts_one() {
    let reactor = reactor();
    let timer = reactor.lease_timer.get();
    reactor.on_wake_up_taken();
    assert!(socket::wait_readable(timer.as_fd(), 100 * LONG));
    // While a lease runs, nothing changes. If the test is preempted, the lease may have ended.
    let unchanged = (0..100).any(|_| {
        reactor.on_wake_up_taken();
        let before = reactor.lease_end();
        reactor.on_wake_up_taken();
        reactor.lease_end() == before
    });
    assert!(unchanged);
}

/// A thread receives the byte that should wake another thread, which waits for an event. Perhaps the first thread does not poll again for a
/// while.
#[test]
fn a_wake_up_that_is_taken_from_a_waiting_thread_shortens_its_lease() {
    let reactor = reactor();
    let is_shortened_by = |take: &dyn Fn()| {
        // If the test is preempted, the lease of the waiting thread may have ended, or may be about to end.
        (0..100).any(|_| {
            reactor.lease.end();
            let t = reactor.epoch.nanos(clock::now());
            reactor.perform(reactor.lease.on_wait(t, WAIT_SLICE));
            let (before, _) = reactor.lease_end();
            take();
            let (after, _) = reactor.lease_end();
            after < before
        })
    };
    let take = || reactor.on_wake_up_taken();
    assert!(!is_shortened_by(&take), "no other thread waits");
    reactor.hot.begin_sleep(&reactor.sources);
    assert!(is_shortened_by(&take));
    assert!(
        !is_shortened_by(&|| thread::waiting(take)),
        "the waiting thread itself took the wake-up"
    );
    reactor.hot.end_sleep();
}

/// Ends the lease while the memory is handled, as if that took longer than the lease.
struct SlowUser(&'static Reactor);

impl Source for SlowUser {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {}
    fn timeout(self: Arc<Self>, _now: Instant) {}
    fn memory_ready(self: Arc<Self>, _now: Instant) {
        self.0.lease.end();
    }
}

#[test]
fn a_poll_that_outlives_its_lease_starts_another_one() {
    let reactor = reactor();
    let memory = Arc::new(Memory(AtomicBool::new(true)));
    let user: Arc<dyn Source> = Arc::new(SlowUser(reactor));
    let weak: Weak<dyn Source> = Arc::downgrade(&user);
    reactor.add_memory(Arc::clone(&memory) as Arc<dyn PolledMemory>, weak);
    reactor.on_idle_poll();
    assert_ne!(reactor.lease_end().0, 0, "no lease was started");
    let timer = reactor.lease_timer.get();
    assert!(socket::wait_readable(timer.as_fd(), 100 * LONG));
}

/// Whether arming ends the lease in each of many tries. `arm` makes one try, and returns whether the lease has ended. One try is not enough:
/// on a busy machine the lease may end by itself.
fn arming_ends_the_lease(mut arm: impl FnMut() -> bool) -> bool {
    (0..50).all(|_| arm())
}

#[test]
fn arming_does_not_end_the_lease_while_another_thread_polls() {
    let reactor = reactor();
    let ends = |others: bool| {
        arming_ends_the_lease(|| {
            reactor.hand_over();
            reactor.on_idle_poll();
            // After a sleep, the thread is expected to sleep again.
            std::thread::sleep(Duration::from_millis(1));
            if others {
                std::thread::scope(|threads| {
                    threads
                        .spawn(|| {
                            reactor.hand_over();
                            reactor.on_idle_poll();
                        })
                        .join()
                })
                .unwrap();
            }
            reactor.end_lease();
            !reactor.lease_end().1
        })
    };
    assert!(ends(false));
    assert!(!ends(true));
}

#[test]
fn arming_does_not_end_the_lease_if_the_thread_did_not_sleep_after_its_last_armings() {
    let reactor = reactor();
    let ends = |sleeps: bool| {
        arming_ends_the_lease(|| {
            if sleeps {
                std::thread::sleep(Duration::from_millis(1));
            }
            reactor.hand_over();
            reactor.on_idle_poll();
            reactor.end_lease();
            !reactor.lease_end().1
        })
    };
    assert!(ends(true));
    assert!(!ends(false));
}
