//! `anywarp ping` and `anywarp blast`: latency and bandwidth of a device, with every payload compared.
//!
//! Each end is a command that starts a verbs program for each run ([`end`], `perf/perf.c`), which measures. The two commands
//! negotiate the parameters over TCP ([`side`]) and print the results as a table and to files ([`report`]). Other commands
//! use them through `session`.

pub(crate) mod args;
mod end;
pub(crate) mod report;
pub(crate) mod session;
mod side;
pub(crate) mod sizes;

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::args::{Op, Perf, Transport};
use self::end::End;
use self::report::{Report, Run};
use self::side::{Event, Numbers, Side, Word};
use crate::cmd::Failure;
use crate::library::Library;

/// How often an end checks whether it was interrupted.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// The interval of keep-alive messages.
const TICK: Duration = Duration::from_secs(1);

/// The most connections of a server that may be waiting for a greeting.
const GREETINGS_MAX: usize = 64;

/// The default memory of the receive buffers in bytes.
const MEMORY: u64 = 32 << 20;

/// The most memory in bytes that a client may request of a server.
const MOST: u64 = 4 << 30;

/// Exit status if a run failed.
const FAILED: u8 = 1;

/// Exit status for wrong usage.
const MISUSE: u8 = 2;

/// Exit status of an interrupted client, which is that of a program that SIGINT kills.
const INTERRUPTED: u8 = 130;

/// Set by SIGINT and SIGTERM.
pub(crate) type Interrupted = Arc<AtomicBool>;

/// Why a run failed.
#[derive(Debug)]
enum Lost {
    /// The run failed; the connection between the ends still works.
    Run(String),
    /// The other end has disconnected, or speaks another protocol.
    Peer(String),
}

/// Makes SIGINT and SIGTERM set `interrupted`. A second signal ends the command at once.
pub(crate) fn note_interrupts(interrupted: &Arc<AtomicBool>) {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let set =
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(interrupted))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(interrupted)));
        if let Err(e) = set {
            eprintln!("anywarp: warning: an interrupt will discard the measurements: {e}");
        }
    }
}

/// Runs either end.
pub(crate) fn run(args: &Perf, ping: bool) -> Result<ExitCode, Failure> {
    if let Some(why) = args.contradiction(ping) {
        eprintln!("anywarp: {why}");
        return Ok(ExitCode::from(MISUSE));
    }
    let library = Library::find().map_err(Failure::Library)?;
    let interrupted = Interrupted::default();
    note_interrupts(&interrupted);
    let done = match &args.host {
        Some(host) => client(args, ping, host, &library, &interrupted)?,
        None => serve(args, &library, &interrupted),
    };
    Ok(match done {
        Ok(_) if args.host.is_some() && interrupted.load(Ordering::Relaxed) => {
            eprintln!("anywarp: interrupted: the measurement is incomplete");
            ExitCode::from(INTERRUPTED)
        }
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(why) => {
            eprintln!("anywarp: {why}");
            ExitCode::from(FAILED)
        }
    })
}

/// Receives the events of this end, and sends keep-alive messages.
struct Watch {
    events: Receiver<Event>,
    sender: Sender<Event>,
    ticked: Instant,
    /// The number of the run. Lines from programs of earlier runs are ignored.
    run: u64,
}

impl Watch {
    fn new() -> Self {
        let (sender, events) = mpsc::channel();
        Self {
            events,
            sender,
            ticked: Instant::now(),
            run: 0,
        }
    }

    /// Returns the next event, or `None` when the caller should check other conditions.
    fn next(&mut self, side: &mut Side) -> Result<Option<Event>, Lost> {
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            side.send(&Word::Tick).map_err(Lost::Peer)?;
        }
        match self.events.recv_timeout(CHECK_EVERY) {
            Ok(Event::Word(Word::Tick)) => Ok(None),
            Ok(Event::Gone(why)) => Err(Lost::Peer(why)),
            Ok(Event::Word(Word::Failed(why))) => Err(Lost::Run(format!("the other end: {why}"))),
            Ok(Event::Line { of, .. } | Event::Ended { of }) if of != self.run => Ok(None),
            Ok(Event::Line { of, line }) => match line.strip_prefix("error ") {
                Some(why) => Err(Lost::Run(why.to_owned())),
                None => Ok(Some(Event::Line { of, line })),
            },
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Lost::Run("no events".to_owned())),
        }
    }

    /// Waits at most `limit` for an event that `wanted` accepts.
    fn until<T>(
        &mut self,
        side: &mut Side,
        what: &str,
        limit: Duration,
        mut wanted: impl FnMut(Event) -> Option<T>,
    ) -> Result<T, Lost> {
        let end = Instant::now() + limit;
        loop {
            match self.next(side)? {
                Some(Event::Ended { .. }) => {
                    return Err(Lost::Run(
                        "the verbs program ended without an error message".to_owned(),
                    ));
                }
                Some(event) => {
                    if let Some(found) = wanted(event) {
                        return Ok(found);
                    }
                }
                None if Instant::now() >= end => {
                    return Err(Lost::Run(format!("no {what} within {} s", limit.as_secs())));
                }
                None => {}
            }
        }
    }

    /// Starts the verbs program of a new run.
    fn start(
        &mut self,
        args: &Perf,
        library: &Library,
        address: IpAddr,
        plan: &Numbers,
        variables: &[(String, String)],
    ) -> Result<End, Lost> {
        self.run += 1;
        End::start(
            library,
            args.system,
            address,
            plan,
            variables,
            self.run,
            self.sender.clone(),
        )
        .map_err(Lost::Run)
    }
}

/// Returns a function that accepts a line of the verbs program that begins with `word`, and returns the whole line.
fn line(word: &'static str) -> impl Fn(Event) -> Option<String> {
    move |event| match event {
        Event::Line { line, .. } if line.split(' ').next() == Some(word) => Some(line),
        _ => None,
    }
}

/// Returns the parameters of the verbs program for messages of `size` bytes.
fn plan(args: &Perf, ping: bool, size: u64) -> Numbers {
    let number = |flag: bool| u64::from(flag);
    let stride = (size + 127) / 64 * 64;
    let depth = if ping { args.depth.min(16) } else { args.depth };
    // One-sided messages overwrite the buffers in turn. There must be enough buffers that outstanding messages do not overlap.
    let slots = args
        .buffers
        .unwrap_or_else(|| {
            (MEMORY / stride).clamp(
                if args.op == Op::WriteRecord {
                    4 * depth
                } else {
                    8
                },
                65536,
            )
        })
        .max(if args.op == Op::Send { 1 } else { 2 * depth });
    [
        ("blast", number(!ping)),
        ("transport", args.transport as u64),
        ("op", args.op as u64),
        ("size", size),
        ("depth", depth),
        ("list", args.list),
        ("fill", number(args.batch)),
        ("signal_every", args.signal_every),
        ("inlined", number(args.inline)),
        ("event", number(args.event)),
        ("slots", slots),
        ("gather", args.gather),
        (
            "iters",
            args.iters
                .unwrap_or_else(|| if args.duration.is_some() { 0 } else { 1000 }),
        ),
        (
            "duration_ms",
            args.duration.map_or(0, |s| {
                (Duration::try_from_secs_f64(s)
                    .unwrap_or_default()
                    .as_millis()) as u64
            }),
        ),
        ("warmup", args.warmup),
        ("segment", args.segment as u64),
        ("record_mode", args.record_mode as u64),
        ("parity", args.parity),
        ("repeats", args.repeats),
        ("deadline_ms", args.deadline),
        ("unordered", number(args.unordered)),
        ("exact", number(args.exact)),
        ("gid_index", args.gid_index),
        ("sl", args.sl),
        ("cm", number(args.cm)),
        ("idle_ms", args.timeout * 1000),
    ]
    .into_iter()
    .map(|(name, number)| (name.to_owned(), number))
    .collect()
}

// ---------------------------------------------------------------- the client

/// Runs the client. Returns true if all runs succeeded and all bytes were correct.
fn client(
    args: &Perf,
    ping: bool,
    host: &str,
    library: &Library,
    interrupted: &Interrupted,
) -> Result<Result<bool, String>, Failure> {
    let mut report = Report::new(args, ping);
    let done = measure(args, ping, host, library, interrupted, &mut report);
    report.end(done.is_err() || interrupted.load(Ordering::Relaxed));
    for (path, text) in [(&args.csv, report.csv()), (&args.json, report.json())] {
        if let Some(path) = path {
            std::fs::write(path, text).map_err(|e| Failure::Write(path.clone(), e))?;
        }
    }
    Ok(done.map(|()| report.good()))
}

fn measure(
    args: &Perf,
    ping: bool,
    host: &str,
    library: &Library,
    interrupted: &Interrupted,
    report: &mut Report,
) -> Result<(), String> {
    let mut watch = Watch::new();
    let stream = side::connect(host, args.port)?;
    let address = stream.local_addr().map_err(|e| e.to_string())?.ip();
    let mut side = Side::greet(stream, watch.sender.clone())
        .map_err(|why| format!("{host}, port {}: {why}", args.port))?;
    report.head();
    for &size in &args.size.0 {
        for number in 1..=args.runs {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(());
            }
            let plan = plan(args, ping, size);
            let what = format!("{} run {number} of {}", sizes::text(size), args.runs);
            let run = one_run(
                args,
                &plan,
                &[],
                address,
                library,
                &mut watch,
                &mut side,
                interrupted,
                |text| {
                    report.progress(&what, text);
                },
            );
            match run {
                Ok(run) => report.add(size, run),
                Err(Lost::Run(why) | Lost::Peer(why)) => {
                    let _gone_already = side.send(&Word::End);
                    return Err(format!("{what}: {why}"));
                }
            }
        }
        report.row(size);
    }
    let _gone_already = side.send(&Word::End);
    Ok(())
}

#[expect(
    clippy::too_many_arguments,
    reason = "the parameters of one run; a struct for them would be used only here"
)]
fn one_run(
    args: &Perf,
    plan: &Numbers,
    variables: &[(String, String)],
    address: IpAddr,
    library: &Library,
    watch: &mut Watch,
    side: &mut Side,
    interrupted: &Interrupted,
    mut progress: impl FnMut(&str),
) -> Result<Run, Lost> {
    let limit = Duration::from_secs(args.timeout + 10);
    side.send(&Word::Run(plan.clone())).map_err(Lost::Peer)?;
    let mut end = watch.start(args, library, address, plan, variables)?;
    let outcome = (|| {
        let (mut mine, mut theirs) = (None, None);
        watch.until(side, "queue pair", limit, |event| {
            match event {
                Event::Line { line, .. } if line.starts_with("hello ") => mine = Some(line),
                Event::Word(Word::Pair(pair)) => theirs = Some(pair),
                _ => {}
            }
            (mine.is_some() && theirs.is_some()).then_some(())
        })?;
        let (mine, theirs) = (mine.unwrap_or_default(), theirs.unwrap_or_default());
        side.send(&Word::Pair(mine)).map_err(Lost::Peer)?;
        end.write_line(&theirs.replacen("hello", "peer", 1))
            .map_err(Lost::Run)?;
        let (mut here, mut there) = (false, false);
        watch.until(side, "connection", limit, |event| {
            match event {
                Event::Line { line, .. } if line == "armed" => here = true,
                Event::Word(Word::Armed) => there = true,
                _ => {}
            }
            (here && there).then_some(())
        })?;
        end.write_line("go").map_err(Lost::Run)?;
        let mut samples: Vec<u64> = Vec::new();
        let mut stop_reported = false;
        let mine = loop {
            if interrupted.load(Ordering::Relaxed) && !stop_reported {
                stop_reported = true;
                end.write_line("stop").map_err(Lost::Run)?;
            }
            match watch.next(side)? {
                Some(Event::Line { line, .. }) => match line.split_once(' ') {
                    Some(("done", rest)) => break end::numbers(rest),
                    Some(("progress", rest)) => progress(rest),
                    Some(("samples", rest)) => {
                        samples.extend(rest.split(' ').filter_map(|n| n.parse::<u64>().ok()));
                    }
                    _ => {}
                },
                Some(Event::Ended { .. }) => {
                    return Err(Lost::Run(
                        "the verbs program ended without an error message".to_owned(),
                    ));
                }
                _ => {}
            }
        };
        let sent = mine.get("posted").copied().unwrap_or_default();
        side.send(&Word::Stop { sent }).map_err(Lost::Peer)?;
        let theirs = watch.until(side, "result of the server", limit, |event| match event {
            Event::Word(Word::Seen(seen)) => Some(seen),
            _ => None,
        })?;
        Ok(Run {
            client: mine,
            server: theirs,
            samples,
        })
    })();
    if let Err(Lost::Run(why)) = &outcome {
        let _gone_already = side.send(&Word::Failed(why.clone()));
    }
    outcome
}

// ---------------------------------------------------------------- the server

fn serve(args: &Perf, library: &Library, interrupted: &Interrupted) -> Result<bool, String> {
    if let Some(parent) = args.with_parent {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
            .map_err(|e| format!("cannot detect the end of the parent process: {e}"))?;
        // There is no signal for a parent that exited before the call.
        let now = rustix::process::getppid().map(rustix::process::Pid::as_raw_pid);
        if now != Some(parent) {
            return Err(format!("the parent process {parent} has exited"));
        }
    }
    let any: IpAddr = Ipv6Addr::UNSPECIFIED.into();
    let listener = TcpListener::bind((any, args.port))
        .or_else(|_| TcpListener::bind(("0.0.0.0", args.port)))
        .map_err(|e| {
            format!(
                "port {} is not available: {e}; choose another with --port",
                args.port
            )
        })?;
    let port = listener.local_addr().map_err(|e| e.to_string())?.port();
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    if !args.quiet {
        eprintln!("anywarp: waiting on port {port}");
    }
    let mut all_well = true;
    let greetings = Greetings::new();
    while !interrupted.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, from)) => greetings.begin(stream, from.ip().to_canonical()),
            Err(e) if passes(&e) => std::thread::sleep(CHECK_EVERY / 5),
            Err(e) => return Err(format!("port {port}: {e}")),
        }
        let Ok((from, client)) = greetings.ended.try_recv() else {
            continue;
        };
        let Some(client) = client else {
            eprintln!("anywarp: warning: {from} is not a client: connection closed");
            continue;
        };
        match session(args, client, library, interrupted) {
            Ok(()) if !args.forever => return Ok(all_well),
            Ok(()) => {}
            Err(why) => {
                eprintln!("anywarp: {from}: {why}");
                all_well = false;
                if !args.forever {
                    return Ok(false);
                }
            }
        }
    }
    Ok(all_well)
}

/// Returns whether a later `accept` may succeed after this error. This is the case if no connection was waiting, if the client has
/// already closed the connection (Linux may report a network error instead), or if the host has no free descriptor or memory now.
fn passes(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
        || matches!(
            error.raw_os_error(),
            Some(
                libc::ECONNABORTED
                    | libc::EPROTO
                    | libc::ENETDOWN
                    | libc::ENETUNREACH
                    | libc::EHOSTDOWN
                    | libc::EHOSTUNREACH
                    | libc::ENOPROTOOPT
                    | libc::ENONET
                    | libc::EOPNOTSUPP
                    | libc::EMFILE
                    | libc::ENFILE
                    | libc::ENOBUFS
                    | libc::ENOMEM
            )
        )
}

/// The connections that wait for a greeting. Each has a thread, so that a silent one does not delay the others.
struct Greetings {
    sender: Sender<(IpAddr, Option<Client>)>,
    /// Receives the address of each connection whose greeting has ended, and the client if the greeting was valid.
    ended: Receiver<(IpAddr, Option<Client>)>,
    /// The connections that wait for a greeting, with a number for each, oldest first.
    waiting: Arc<Mutex<VecDeque<(u64, TcpStream)>>>,
    begun: Cell<u64>,
}

/// A connection with a valid greeting.
struct Client {
    watch: Watch,
    side: Side,
    /// The local address of the connection.
    address: IpAddr,
}

impl Client {
    fn greet(stream: TcpStream) -> Option<Self> {
        let watch = Watch::new();
        stream.set_nonblocking(false).ok()?;
        let address = stream.local_addr().ok()?.ip();
        let side = Side::greet(stream, watch.sender.clone()).ok()?;
        Some(Self {
            watch,
            side,
            address,
        })
    }
}

impl Greetings {
    fn new() -> Self {
        let (sender, ended) = mpsc::channel();
        Self {
            sender,
            ended,
            waiting: Arc::default(),
            begun: Cell::new(0),
        }
    }

    /// Waits for the greeting of a connection. If too many connections are waiting, the oldest is closed: a client sends its
    /// greeting at once.
    fn begin(&self, stream: TcpStream, from: IpAddr) {
        let Ok(copy) = stream.try_clone() else {
            return;
        };
        let number = self.begun.get();
        self.begun.set(number + 1);
        {
            let mut waiting = lock(&self.waiting);
            if waiting.len() >= GREETINGS_MAX
                && let Some((_, oldest)) = waiting.pop_front()
            {
                let _closed_by_its_peer = oldest.shutdown(Shutdown::Both);
            }
            waiting.push_back((number, copy));
        }
        let (sender, waiting) = (self.sender.clone(), Arc::clone(&self.waiting));
        std::thread::spawn(move || {
            let client = Client::greet(stream);
            lock(&waiting).retain(|(n, _)| *n != number);
            let _server_has_ended = sender.send((from, client));
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves one client.
fn session(
    args: &Perf,
    client: Client,
    library: &Library,
    interrupted: &Interrupted,
) -> Result<(), String> {
    let Client {
        mut watch,
        mut side,
        address,
    } = client;
    let mut failed = None;
    loop {
        if interrupted.load(Ordering::Relaxed) {
            let _gone_already = side.send(&Word::Failed("interrupted".to_owned()));
            return Err("interrupted".to_owned());
        }
        let event = match watch.next(&mut side) {
            Ok(event) => event,
            Err(Lost::Peer(why)) => return Err(failed.unwrap_or(why)),
            Err(Lost::Run(why)) => {
                failed = Some(why);
                continue;
            }
        };
        match event {
            Some(Event::Word(Word::End)) => return failed.map_or(Ok(()), Err),
            Some(Event::Word(Word::Run(plan))) => {
                match serve_run(
                    args,
                    plan,
                    address,
                    library,
                    &mut watch,
                    &mut side,
                    interrupted,
                ) {
                    Ok(()) => {}
                    Err(Lost::Peer(why)) => return Err(why),
                    Err(Lost::Run(why)) => {
                        let _gone_already = side.send(&Word::Failed(why.clone()));
                        failed = Some(why);
                    }
                }
            }
            _ => {} // events of a run that failed
        }
    }
}

/// Checks whether this end can execute a client's request.
fn checked(mut plan: Numbers) -> Result<Numbers, Lost> {
    let of = |name: &str| plan.get(name).copied().unwrap_or_default();
    let memory = (of("size").saturating_add(128)).saturating_mul(of("slots"));
    if of("size") > 1 << 30 || memory > MOST {
        return Err(Lost::Run(format!(
            "{memory} bytes of memory are more than {MOST}: ask for fewer --buffers"
        )));
    }
    if of("transport") > Transport::Rd as u64 || of("op") > Op::WriteRead as u64 {
        return Err(Lost::Run(
            "an operation that is not known: install the same version at both ends".to_owned(),
        ));
    }
    plan.insert("server".to_owned(), 1);
    Ok(plan)
}

fn serve_run(
    args: &Perf,
    plan: Numbers,
    address: IpAddr,
    library: &Library,
    watch: &mut Watch,
    side: &mut Side,
    interrupted: &Interrupted,
) -> Result<(), Lost> {
    let mut plan = checked(plan)?;
    plan.insert("gid_index".to_owned(), args.gid_index);
    let limit = Duration::from_secs(args.timeout + 10);
    let mut end = watch.start(args, library, address, &plan, &[])?;
    let mine = watch.until(side, "queue pair", limit, line("hello"))?;
    side.send(&Word::Pair(mine)).map_err(Lost::Peer)?;
    let theirs = watch.until(
        side,
        "queue pair of the client",
        limit,
        |event| match event {
            Event::Word(Word::Pair(pair)) => Some(pair),
            _ => None,
        },
    )?;
    end.write_line(&theirs.replacen("hello", "peer", 1))
        .map_err(Lost::Run)?;
    watch.until(side, "connection", limit, line("armed"))?;
    end.write_line("go").map_err(Lost::Run)?;
    side.send(&Word::Armed).map_err(Lost::Peer)?;
    // From now on the client measures. There is no time limit while it sends keep-alive messages.
    loop {
        match watch.next(side)? {
            Some(Event::Word(Word::Stop { sent })) => {
                end.write_line(&format!("stop sent={sent}"))
                    .map_err(Lost::Run)?;
            }
            Some(Event::Line { line, .. }) if line.starts_with("done ") => {
                return side
                    .send(&Word::Seen(end::numbers(&line)))
                    .map_err(Lost::Peer);
            }
            Some(Event::Ended { .. }) => {
                return Err(Lost::Run(
                    "the verbs program ended without an error message".to_owned(),
                ));
            }
            _ if interrupted.load(Ordering::Relaxed) => {
                return Err(Lost::Run("interrupted".to_owned()));
            }
            _ => {}
        }
    }
}
