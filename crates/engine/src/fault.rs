//! Injects faults: `ANYWARP_FAULTS=SETTINGS` or `@FILE`, `ANYWARP_FAULTS_FILE=FILE`, or `anywarp run --faults`. The
//! settings are described in [`anywarp_core::fault`] and `docs/faults.md`.
//!
//! Faults are injected into datagrams between queue pair and socket, in both directions, and into send requests of all kinds
//! of queue pairs when they are posted. Delayed datagrams wait in one queue of the process. Fault injection is off by
//! default. A queue pair then has no `Faults`, and the only cost is to check whether it has.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::datagram::{Arrival, Bytes, TxDatagram};
use anywarp_core::fault::{Action, Decision, Decisions, Direction, Plan, Service, What};

use crate::clock;
use crate::config::config;
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::mem::TolerateUnmapped;
use crate::net::udp::UdpSocket;
use crate::process::{Inherited, PerProcess};
use crate::reactor::{Alarm, Source};
use crate::sys::{Io, thread};

// ---------------------------------------------------------------------- settings

/// The settings of the environment, which are read once. `Err`: they cannot be read or parsed, which is logged once.
fn plan() -> Result<Option<&'static Plan>, ()> {
    static PLAN: Inherited<Result<Option<Plan>, ()>> = Inherited::new(|| match read() {
        Ok(plan) => {
            if plan.is_some() {
                thread::at_exit(at_exit);
            }
            Ok(plan)
        }
        Err(why) => {
            log::write(log::Level::Error, format_args!("{why}"));
            Err(())
        }
    });
    match PLAN.get() {
        Ok(plan) => Ok(plan.as_ref()),
        Err(()) => Err(()),
    }
}

/// Returns `EINVAL` if the settings of the environment cannot be read or parsed: a test without its faults would prove
/// nothing.
pub(crate) fn check() -> io::Result<()> {
    match plan() {
        Ok(_) => Ok(()),
        Err(()) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

fn read() -> Result<Option<Plan>, String> {
    let (name, file) = match (&config().faults, &config().faults_file) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            return Err("ANYWARP_FAULTS and ANYWARP_FAULTS_FILE: set one of the two".into());
        }
        (None, Some(file)) => ("ANYWARP_FAULTS_FILE", file.clone()),
        (Some(text), None) => {
            let text = text.to_string_lossy().into_owned();
            match text.strip_prefix('@') {
                Some(file) => ("ANYWARP_FAULTS", PathBuf::from(file)),
                None => {
                    return Plan::parse(&text)
                        .map(Some)
                        .map_err(|e| format!("ANYWARP_FAULTS, {e}"));
                }
            }
        }
    };
    from_file(&file)
        .map(Some)
        .map_err(|e| format!("{name}: {e}"))
}

fn from_file(path: &Path) -> Result<Plan, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Plan::parse(&text).map_err(|e| format!("{}, {e}", path.display()))
}

// ---------------------------------------------------------------------- counters

/// Counters of this process, for the summary.
struct Done {
    queue_pairs: AtomicU32,
    requests: AtomicU64,
    datagrams: AtomicU64,
    /// Datagrams that were dropped because too many were delayed.
    overflowed: AtomicU64,
    /// Injected faults, by line of the rule and by action.
    faults: Mutex<BTreeMap<(Option<u32>, String), u64>>,
}

impl Done {
    fn new() -> Self {
        Self {
            queue_pairs: AtomicU32::default(),
            requests: AtomicU64::default(),
            datagrams: AtomicU64::default(),
            overflowed: AtomicU64::default(),
            faults: Mutex::new(Rank::FaultCounts, BTreeMap::new()),
        }
    }
}

static DONE: PerProcess<Done> = PerProcess::new(Done::new);

/// The text of the summary; `None` if there was no queue pair, or if the counters of faults are locked.
fn summary(plan: &Plan, done: &Done) -> Option<String> {
    let queue_pairs = done.queue_pairs.load(Ordering::Relaxed);
    if queue_pairs == 0 {
        return None;
    }
    let count = |n: u64, what| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut text = format!(
        "seed {}, {}, {}, {}:",
        plan.seed,
        count(queue_pairs.into(), "queue pair"),
        count(done.requests.load(Ordering::Relaxed), "request"),
        count(done.datagrams.load(Ordering::Relaxed), "datagram"),
    );
    // The process exits, and the thread that holds this lock may have ended without releasing it.
    let faults = done.faults.try_lock()?;
    if faults.is_empty() {
        text.push_str(" no fault");
    }
    let mut comma = "";
    for ((line, action), n) in faults.iter() {
        let _ = match line {
            Some(line) => write!(text, "{comma} {n} {action} (line {line})"),
            None => write!(text, "{comma} {n} {action}"),
        };
        comma = ",";
    }
    let overflowed = done.overflowed.load(Ordering::Relaxed);
    if overflowed > 0 {
        let _ = write!(text, "; {overflowed} lost because too many were delayed");
    }
    Some(text)
}

/// Sends the delayed datagrams and prints the summary when the process exits.
extern "C" fn at_exit() {
    static RAN: AtomicBool = AtomicBool::new(false);
    // Threads that read the settings at the same time may each have registered the function.
    if RAN.swap(true, Ordering::Relaxed) {
        return;
    }
    let Ok(Some(plan)) = plan() else { return };
    if let Some(mut late) = LATE.get().try_lock() {
        let datagrams = std::mem::take(&mut late.datagrams);
        drop(late);
        for (_, delayed) in datagrams {
            if let Delayed::Out(socket, datagram, from) = delayed {
                let _ = socket.send(&[datagram], from, &mut 0);
            }
        }
    }
    if plan.summary
        && let Some(text) = summary(plan, DONE.get())
    {
        let line = format!("anywarp[{}] faults: {text}\n", std::process::id());
        let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
    }
}

/// Counts and logs the faults of one request or datagram.
fn note(decisions: &Decisions, decision: &Decision, thing: &str, what: What, len: u64) {
    let mut faults = DONE.get().faults.lock();
    for cause in &decision.causes {
        // The time of a delay differs between datagrams: all delays are counted as one fault.
        let name = match cause.action {
            Action::Delay(_) => "delay".to_owned(),
            Action::Slow(_) => "slow".to_owned(),
            other => other.to_string(),
        };
        *faults.entry((cause.line, name)).or_default() += 1;
        let all_the_time =
            cause.line.is_none() && matches!(cause.action, Action::Delay(_) | Action::Slow(_));
        let level = if all_the_time {
            log::Level::Debug
        } else {
            log::Level::Info
        };
        if log::wants(level) {
            let why = cause
                .line
                .map_or_else(String::new, |line| format!(" (line {line})"));
            // The line contains only numbers that are the same in each run.
            log::write(
                level,
                format_args!(
                    "fault: qp #{} {thing} {}, {what}, {len} bytes: {}{why}",
                    decisions.nth(),
                    decision.item,
                    cause.action
                ),
            );
        }
    }
}

// ---------------------------------------------------------------------- delayed datagrams

/// Receives the datagrams that arrived and were not dropped.
pub(crate) trait Deliver: Send + Sync {
    /// A datagram arrived.
    fn deliver(&self, arrival: &Arrival, bytes: &[u8]);
}

/// A delayed datagram.
enum Delayed {
    Out(Arc<UdpSocket>, TxDatagram, Option<IpAddr>),
    In(Weak<dyn Deliver>, Arrival, Vec<u8>),
}

impl Delayed {
    fn len(&self) -> usize {
        match self {
            Self::Out(_, datagram, _) => datagram.bytes.len(),
            Self::In(_, _, bytes) => bytes.len(),
        }
    }

    /// Sends or delivers the datagram. Returns false if the socket has no room.
    fn forward(&self) -> bool {
        match self {
            Self::Out(socket, datagram, from) => !matches!(
                socket.send(std::slice::from_ref(datagram), *from, &mut 0),
                Ok(0) | Err(Io::WouldBlock)
            ),
            Self::In(sink, arrival, bytes) => {
                if let Some(sink) = sink.upgrade() {
                    sink.deliver(arrival, bytes);
                }
                true
            }
        }
    }
}

/// The time at which a delayed datagram is sent or delivered, and a sequence number for datagrams with the same time.
type Key = (Instant, u64);

#[derive(Default)]
struct Late {
    datagrams: BTreeMap<Key, Delayed>,
    bytes: usize,
    next: u64,
    alarm: Alarm,
}

static LATE: PerProcess<Mutex<Late>> =
    PerProcess::new(|| Mutex::new(Rank::DelayedDatagrams, Late::default()));

/// Pause before a datagram is sent again to a socket that had no room.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// Delays a datagram until `at`. `None`: too many are delayed, and it is dropped.
fn delay(engine: &'static Engine, at: Instant, delayed: Delayed) -> Option<Key> {
    let mut late = LATE.get().lock();
    let len = delayed.len();
    if late.datagrams.len() >= bounds::FAULT_DELAYED
        || late.bytes + len > bounds::FAULT_DELAYED_BYTES
    {
        drop(late);
        DONE.get().overflowed.fetch_add(1, Ordering::Relaxed);
        return None;
    }
    late.next += 1;
    let key = (at, late.next);
    late.bytes += len;
    late.datagrams.insert(key, delayed);
    late.watch(engine);
    Some(key)
}

/// Removes a delayed datagram from the queue before its time.
fn release(key: Key) -> Option<Delayed> {
    let mut late = LATE.get().lock();
    let delayed = late.datagrams.remove(&key)?;
    late.bytes -= delayed.len();
    Some(delayed)
}

impl Late {
    fn watch(&mut self, engine: &'static Engine) {
        let Some((&(at, _), _)) = self.datagrams.first_key_value() else {
            return;
        };
        let register = || engine.reserve(Arc::new(Clock(engine)));
        if let Some(source) = self.alarm.set(at, register) {
            engine.deadline(source, at);
        }
    }

    fn take_due(&mut self, now: Instant) -> Vec<Delayed> {
        let mut due = Vec::new();
        while let Some(first) = self.datagrams.first_entry()
            && first.key().0 <= now
        {
            let delayed = first.remove();
            self.bytes -= delayed.len();
            due.push(delayed);
        }
        due
    }
}

/// Sends and delivers the delayed datagrams that are due.
struct Clock(&'static Engine);

impl Source for Clock {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        // This source has no socket, so the function is never called.
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let due = {
            let mut late = LATE.get().lock();
            late.alarm.passed(now);
            let due = late.take_due(now);
            late.watch(self.0);
            due
        };
        let _tolerant = TolerateUnmapped::in_worker();
        for delayed in due {
            if !delayed.forward() {
                delay(self.0, now + RETRY_AFTER, delayed);
            }
        }
    }
}

// ---------------------------------------------------------------------- a queue pair

/// The state of one direction of a queue pair's datagrams.
#[derive(Default)]
struct DirectionState {
    /// Decisions for the next datagrams, for which the socket had no room.
    decided: VecDeque<Decision>,
    /// The delayed datagrams that wait until the next one has overtaken them: one and its copies, or several in a row.
    parked: Vec<Key>,
    /// When everything that was sent before has been transmitted, at the configured rate.
    busy: Option<Instant>,
}

impl DirectionState {
    /// When a datagram or request of `len` bytes may be sent; `None`: now.
    fn due(&mut self, decision: &Decision, len: u64, now: Instant) -> Option<Instant> {
        let mut at = now + decision.delay;
        if let Some(rate) = decision.rate {
            let from = self.busy.map_or(now, |busy| busy.max(now));
            let done = from + time_of(len, rate);
            self.busy = Some(done);
            at += done - now;
        }
        (at > now).then_some(at)
    }
}

/// How long `len` bytes take at `rate` bytes per second.
fn time_of(len: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(len as f64 / rate.max(1) as f64)
}

/// The fault injection of one queue pair.
pub(crate) struct Faults {
    engine: &'static Engine,
    decisions: Mutex<Decisions>,
    out: Mutex<DirectionState>,
    into: Mutex<DirectionState>,
}

/// The effect of the injected faults on a posted request.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct RequestEffect {
    /// The request is not sent, and fails with this status.
    pub(crate) fails: Option<anywarp_core::verbs::wc::Status>,
    /// Whether the connection is reset.
    pub(crate) kill: bool,
    /// Nothing is sent before this time.
    pub(crate) not_before: Option<Instant>,
    /// Whether the delay also extends one that is already running. The constant delay of the link does not: otherwise a
    /// program that posts continuously would never send.
    pub(crate) extends: bool,
}

impl Faults {
    /// The fault injection of a new queue pair; `None` if no faults are configured.
    pub(crate) fn of(engine: &'static Engine, number: u32) -> Option<Self> {
        let plan = plan().ok().flatten()?;
        let nth = DONE.get().queue_pairs.fetch_add(1, Ordering::Relaxed) + 1;
        log!(Debug, "fault: qp #{nth} has the number 0x{number:06x}");
        Some(Self {
            engine,
            decisions: Mutex::new(Rank::FaultDecisions, Decisions::new(plan, nth, number)),
            out: Mutex::new(Rank::FaultDirection, DirectionState::default()),
            into: Mutex::new(Rank::FaultDirection, DirectionState::default()),
        })
    }

    /// Decides about a posted request of `len` bytes. `rnr`: the RNR retry count and the code of the RNR timer.
    pub(crate) fn request(
        &self,
        what: What,
        peer: Option<SocketAddr>,
        service: Service,
        len: u64,
        rnr: (u8, u8),
    ) -> RequestEffect {
        DONE.get().requests.fetch_add(1, Ordering::Relaxed);
        let mut decisions = self.decisions.lock();
        let mut decision = decisions.request(what, peer, service);
        if decision.is_nothing() {
            return RequestEffect::default();
        }
        note(&decisions, &decision, "request", what, len);
        drop(decisions);
        let now = clock::now();
        let mut effect = RequestEffect {
            fails: decision.failure(),
            kill: decision.does(Action::Kill),
            not_before: None,
            extends: decision.rate.is_some() || decision.causes.iter().any(|c| c.line.is_some()),
        };
        let (retries, timer) = rnr;
        let not_ready = decision.not_ready();
        // IBA 9.7.5.2.8: seven means without limit.
        if retries != 7 && not_ready > u32::from(retries) && effect.fails.is_none() {
            effect.fails = Some(anywarp_core::verbs::wc::Status::RnrRetryExceeded);
        } else {
            let timer = Duration::from_micros(anywarp_core::verbs::qp::rnr_timer_us(timer));
            decision.delay += timer.saturating_mul(not_ready);
        }
        if service == Service::Stream {
            effect.not_before = self.out.lock().due(&decision, len, now);
        } else if effect.kill && effect.fails.is_none() {
            // There is no connection to reset, so the request fails as if the peer did not answer.
            effect.fails = Some(anywarp_core::verbs::wc::Status::RetryExceeded);
        }
        effect
    }

    /// Sends datagrams from the front of the list like [`UdpSocket::send`]; returns how many were sent, delayed or
    /// dropped.
    pub(crate) fn send(
        &self,
        socket: &Arc<UdpSocket>,
        datagrams: &[TxDatagram],
        from: Option<IpAddr>,
        run_max: &mut usize,
    ) -> Result<usize, Io> {
        let mut out = self.out.lock();
        {
            let mut decisions = self.decisions.lock();
            for d in datagrams.iter().skip(out.decided.len()) {
                DONE.get().datagrams.fetch_add(1, Ordering::Relaxed);
                let (decision, what) = decisions.datagram(Direction::Tx, d.to, &d.bytes);
                note(
                    &decisions,
                    &decision,
                    "tx datagram",
                    what,
                    d.bytes.len() as u64,
                );
                out.decided.push_back(decision);
            }
        }
        // If datagrams wait to be overtaken, exactly one is sent before them.
        let most = if out.parked.is_empty() { usize::MAX } else { 1 };
        let clean = out.decided.iter().take(most);
        let clean = clean.take_while(|f| f.is_nothing()).count();
        let passed = match (datagrams.get(..clean), datagrams.first()) {
            (Some(whole), _) if clean > 0 => {
                let sent = socket.send(whole, from, run_max);
                let gone = match &sent {
                    Ok(n) => *n,
                    // The caller drops the first datagram.
                    Err(Io::Broken(_)) => 1,
                    Err(_) => 0,
                };
                out.decided.drain(..gone.min(clean));
                sent?
            }
            (_, Some(first)) => {
                if let Some(decision) = out.decided.pop_front() {
                    self.send_one(&mut out, socket, first, from, &decision);
                    if decision.does(Action::Drop) || decision.does(Action::Reorder) {
                        return Ok(1);
                    }
                }
                1
            }
            _ => return Ok(0),
        };
        if passed > 0 {
            for delayed in out.parked.drain(..).filter_map(release) {
                if !delayed.forward() {
                    delay(self.engine, clock::now() + RETRY_AFTER, delayed);
                }
            }
        }
        Ok(passed)
    }

    /// Injects the faults of `decision` into one datagram, and sends it unless it is dropped.
    fn send_one(
        &self,
        out: &mut DirectionState,
        socket: &Arc<UdpSocket>,
        datagram: &TxDatagram,
        from: Option<IpAddr>,
        decision: &Decision,
    ) {
        if decision.does(Action::Drop) {
            return;
        }
        let mut datagram = datagram.clone();
        if decision.does(Action::Corrupt) {
            let mut bytes = datagram.bytes.to_vec();
            decision.corrupt(&mut bytes);
            datagram.bytes = Bytes::Own(bytes);
        }
        let now = clock::now();
        let len = datagram.bytes.len() as u64;
        let copies = 1 + usize::from(decision.does(Action::Dup));
        let late = out.due(decision, len, now);
        let at = late.or_else(|| {
            decision
                .does(Action::Reorder)
                .then_some(now + bounds::FAULT_PASS)
        });
        for _ in 0..copies {
            let delayed = Delayed::Out(Arc::clone(socket), datagram.clone(), from);
            match at {
                Some(at) => {
                    let key = delay(self.engine, at, delayed);
                    if late.is_none() {
                        out.parked.extend(key);
                    }
                }
                None => {
                    if !delayed.forward() {
                        delay(self.engine, now + RETRY_AFTER, delayed);
                    }
                }
            }
        }
    }

    /// Discards the decisions for datagrams that are not going to be sent.
    pub(crate) fn forget(&self) {
        self.out.lock().decided.clear();
    }

    /// Injects faults into a datagram that arrived for `sink`, and delivers it unless it is dropped.
    pub(crate) fn receive(&self, sink: &Weak<dyn Deliver>, arrival: &Arrival, bytes: &[u8]) {
        DONE.get().datagrams.fetch_add(1, Ordering::Relaxed);
        let decision = {
            let mut decisions = self.decisions.lock();
            let (decision, what) = decisions.datagram(Direction::Rx, arrival.from, bytes);
            note(
                &decisions,
                &decision,
                "rx datagram",
                what,
                bytes.len() as u64,
            );
            decision
        };
        if decision.does(Action::Drop) {
            return;
        }
        let mut bytes = bytes.to_vec();
        if decision.does(Action::Corrupt) {
            decision.corrupt(&mut bytes);
        }
        let now = clock::now();
        let copies = 1 + usize::from(decision.does(Action::Dup));
        let passes = decision.does(Action::Reorder);
        let (late, parked) = {
            let mut into = self.into.lock();
            let late = into.due(&decision, bytes.len() as u64, now);
            let parked = if passes {
                Vec::new()
            } else {
                std::mem::take(&mut into.parked)
            };
            (late, parked)
        };
        let at = late.or_else(|| passes.then_some(now + bounds::FAULT_PASS));
        for _ in 0..copies {
            let delayed = Delayed::In(Weak::clone(sink), *arrival, bytes.clone());
            match at {
                Some(at) => {
                    let key = delay(self.engine, at, delayed);
                    if late.is_none() {
                        self.into.lock().parked.extend(key);
                    }
                }
                None => {
                    delayed.forward();
                }
            }
        }
        for delayed in parked.into_iter().filter_map(release) {
            delayed.forward();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(delay: Duration, rate: Option<u64>) -> Decision {
        Decision {
            delay,
            rate,
            ..Decision::default()
        }
    }

    #[test]
    fn a_rate_delays_later_datagrams_and_a_delay_does_not() {
        let now = clock::now();
        let mut way = DirectionState::default();
        let late = decision(Duration::from_millis(5), None);
        for _ in 0..3 {
            assert_eq!(
                way.due(&late, 1000, now),
                Some(now + Duration::from_millis(5))
            );
        }
        assert_eq!(way.due(&Decision::default(), 1000, now), None);
        let slow = decision(Duration::ZERO, Some(1_000_000));
        for n in 1..4 {
            assert_eq!(
                way.due(&slow, 1000, now),
                Some(now + Duration::from_millis(n))
            );
        }
        // After a pause the rate is not exceeded to catch up.
        let later = now + Duration::from_secs(1);
        assert_eq!(
            way.due(&slow, 1000, later),
            Some(later + Duration::from_millis(1))
        );
    }

    #[test]
    fn the_summary_counts_all_faults() {
        let done = Done::new();
        let plan = Plan::default();
        assert_eq!(summary(&plan, &done), None);
        done.queue_pairs.store(1, Ordering::Relaxed);
        done.requests.store(1, Ordering::Relaxed);
        done.datagrams.store(1, Ordering::Relaxed);
        let singular = "seed 1, 1 queue pair, 1 request, 1 datagram: no fault";
        assert_eq!(summary(&plan, &done).as_deref(), Some(singular));
        done.datagrams.store(0, Ordering::Relaxed);
        done.queue_pairs.store(2, Ordering::Relaxed);
        done.requests.store(5, Ordering::Relaxed);
        let head = "seed 1, 2 queue pairs, 5 requests, 0 datagrams:";
        assert_eq!(summary(&plan, &done), Some(format!("{head} no fault")));
        done.faults.lock().insert((None, "drop".into()), 3);
        done.faults.lock().insert((Some(4), "kill".into()), 1);
        done.overflowed.store(7, Ordering::Relaxed);
        assert_eq!(
            summary(&plan, &done),
            Some(format!(
                "{head} 3 drop, 1 kill (line 4); 7 lost because too many were delayed"
            ))
        );
    }
}
