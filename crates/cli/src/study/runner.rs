//! Measures one point by `anywarp ping`, `blast` or `anywarp-cost`, with options that follow from the values of its axes.
//!
//! A *point* is a combination of the values of an experiment's axes, such as size and type of queue pair.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;

use super::OURS;
use super::apps::Apps;
use super::between;
use super::devices;
use super::exs;
use super::figures::{Extent, Params, Point, Runner};
use super::lanes;
use super::mpi::Mpi;
use super::process::{Ended, READY, ready, verbs_program};
use super::store::{Miss, Outcome, Sample};
use crate::cli::{self, Cli};
use crate::library::Library;
use crate::perf::Interrupted;
use crate::perf::args::Perf;
use crate::perf::session::Session;
use crate::sys;

/// The time after which an unused session is closed. The server waits twice as long.
const IDLE: Duration = Duration::from_secs(5);

/// The address of a server on this machine.
const HERE: &str = "127.0.0.1";

/// The carrier that is plain TCP, without the device.
const KERNEL: &str = "kernel";

/// The most messages that `anywarp bench-raw` writes in one call.
const MOST_IN_A_CALL: u32 = 64;

/// The variable with the name of a device of the system's libibverbs.
const SYSTEM: &str = "ANYWARP_PERF_DEVICE";

/// Environment variables of the device.
type Variables = Vec<(String, String)>;

/// The environment in which the points are measured.
#[derive(Debug)]
pub(crate) struct Bench {
    library: Library,
    extent: Extent,
    /// A device of the system's libibverbs.
    device: Option<String>,
    /// The host and the port of a remote server.
    elsewhere: Option<(String, u16)>,
    /// Another network namespace, in which servers are started.
    beyond: Option<Beyond>,
    /// The processors of the server and of the client.
    processors: Option<(Vec<usize>, Vec<usize>)>,
    /// The servers, each by its variables and the number of its stream.
    servers: BTreeMap<(Variables, usize), Server>,
    mpi: Mpi,
    apps: Apps,
    interrupted: Interrupted,
}

/// A network namespace of this machine.
#[derive(Debug)]
pub(crate) struct Beyond {
    /// A process in it.
    pub(crate) process: u32,
    /// The address at which this process reaches the namespace.
    pub(crate) host: String,
}

/// A server, and the session with it. A local server is killed when this is dropped.
#[derive(Debug)]
struct Server {
    child: Option<Child>,
    host: String,
    port: u16,
    session: Option<Session>,
    /// When the session was last used.
    used: Instant,
    /// Whether no connection to it could be made.
    lost: bool,
}

impl Server {
    /// Returns whether the server can still be used: its process runs, as far as it is known, and accepts connections.
    fn usable(&mut self) -> bool {
        let runs = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        !self.lost && self.child.as_mut().is_none_or(runs)
    }

    /// Returns the session with the server, or a new one if there is none or its last use was more than [`IDLE`] ago.
    fn session(&mut self) -> Result<Session, String> {
        if let Some(session) = self.session.take_if(|_| self.used.elapsed() < IDLE) {
            return Ok(session);
        }
        self.session = None;
        let session = Session::connect(&self.host, self.port);
        self.lost = session.is_err();
        session
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.session = None;
        if let Some(child) = &mut self.child {
            let _ended_already = child.kill();
            let _nothing_to_do = child.wait();
        }
    }
}

impl Bench {
    pub(crate) fn new(
        library: Library,
        extent: Extent,
        device: Option<String>,
        elsewhere: Option<(String, u16)>,
        mpi: Mpi,
        apps: Apps,
        interrupted: Interrupted,
    ) -> Self {
        let processors = if elsewhere.is_some() { None } else { halves() };
        Self {
            library,
            extent,
            device,
            elsewhere,
            beyond: None,
            processors,
            servers: BTreeMap::new(),
            mpi,
            apps,
            interrupted,
        }
    }

    /// Starts servers in another namespace from now on.
    pub(crate) fn with_server_in(mut self, beyond: Beyond) -> Self {
        self.beyond = Some(beyond);
        self
    }

    /// Returns the host of the servers: the remote host, the other network namespace, the address of a device of the system's
    /// libibverbs, or the loopback address.
    fn host(&self, device: Option<&str>) -> String {
        let elsewhere = self.elsewhere.as_ref().map(|(host, _)| host.clone());
        let beyond = || self.beyond.as_ref().map(|beyond| beyond.host.clone());
        let of_device = || device.and_then(devices::address);
        elsewhere
            .or_else(beyond)
            .or_else(of_device)
            .unwrap_or_else(|| HERE.to_owned())
    }

    /// Returns the device of a point: one of the system's libibverbs, or `None` for anywarp's own.
    fn device<'a>(&'a self, params: &'a Params) -> Option<&'a str> {
        match params.get("device").map(String::as_str) {
            Some(OURS) => None,
            Some(name) => Some(name),
            None => self.device.as_deref(),
        }
    }

    /// Describes the processors of the server and the client.
    pub(crate) fn pinning(&self) -> String {
        match &self.processors {
            Some((server, client)) => format!("server on {server:?}, client on {client:?}"),
            None => "not pinned".to_owned(),
        }
    }

    /// Measures a point. Returns the command as a user would type it, and the outcome.
    pub(crate) fn measure(&mut self, point: &Point) -> (String, Outcome) {
        if let Some(why) = self.blank(point) {
            return (String::new(), Err(Miss::Blank(why.to_owned())));
        }
        if point.runner != Runner::Mpi {
            self.mpi.end();
        }
        let variables = match self.variables(&point.params) {
            Ok(variables) => variables,
            Err(why) => return (String::new(), Err(Miss::Failed(why))),
        };
        if matches!(
            point.runner,
            Runner::Memory | Runner::First | Runner::Buffers | Runner::Broadcast
        ) {
            return self.cost(point, &variables);
        }
        if places_itself(point) {
            // This thread may still be restricted to the processors of one end of the previous point.
            self.pin_all();
        }
        if point.runner == Runner::Mpi {
            return self
                .mpi
                .measure(point, self.extent, &self.library, &self.interrupted);
        }
        if point.runner == Runner::Apps {
            return self
                .apps
                .measure(point, self.extent, &self.library, &self.interrupted);
        }
        if point.runner == Runner::Lanes {
            return lanes::start(point, self.extent, &self.library, &self.interrupted);
        }
        if point.runner == Runner::Exs {
            let ours = self.device.is_none();
            let on = |side| {
                if let Some((server, client)) = &self.processors {
                    pin(if side == exs::Side::Server {
                        server
                    } else {
                        client
                    });
                }
            };
            return exs::measure(
                point,
                self.extent,
                ours,
                &variables,
                &self.library,
                &on,
                &self.interrupted,
            );
        }
        if between::wanted(&point.params) {
            let (command, outcome) =
                between::start(point, self.extent, &self.library, &self.interrupted);
            // The network between the ends uses their processors, so the ends have to wait for a processor by design.
            return (command, outcome.map(without_waiting));
        }
        if point.params.get("carrier").is_some_and(|c| c == KERNEL) {
            return self.kernel(point);
        }
        let words = match words(point, self.extent) {
            Ok(words) => words,
            Err(why) => return (String::new(), Err(Miss::Failed(why))),
        };
        let streams = match streams(point) {
            Ok(streams) => streams,
            Err(why) => return (String::new(), Err(Miss::Failed(why))),
        };
        let device = self.device(&point.params);
        let host = self.host(device);
        let host = host.as_str();
        let system = if device.is_some() { " --system" } else { "" };
        let name = point.runner.as_str();
        let mut command = String::new();
        for (name, value) in &variables {
            command.push_str(&format!("{name}={value} "));
        }
        command.push_str(&format!(
            "anywarp {name} {host} {}{system}",
            words.join(" ")
        ));
        if streams > 1 {
            command.push_str(&format!(" ({streams} at once)"));
        }
        let all = ["anywarp", name, host]
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .chain(device.map(|_| "--system"));
        let outcome = match Cli::try_parse_from(all).map(|cli| cli.command) {
            Ok(cli::Command::Ping(args)) => self.run(&args, true, &variables, streams),
            Ok(cli::Command::Blast(args)) => self.run(&args, false, &variables, streams),
            Ok(_) => Err("not a command that measures".to_owned()),
            Err(e) => Err(e.to_string().lines().next().unwrap_or_default().to_owned()),
        };
        (command, outcome.map_err(Miss::Failed))
    }

    /// Returns why a point cannot be measured with this device and from this machine, if so.
    fn blank(&self, point: &Point) -> Option<&'static str> {
        let is = |axis: &str, values: &[&str]| {
            let value = point.params.get(axis).map(String::as_str);
            value.is_some_and(|value| values.contains(&value))
        };
        let limited = ["rate", "loss"]
            .iter()
            .any(|axis| point.params.contains_key(*axis) && !is(axis, &["none"]));
        if self.elsewhere.is_some() {
            if !matches!(point.runner, Runner::Ping | Runner::Blast) {
                return Some("this point is measured on one machine, without --host");
            }
            if is("carrier", &["memory"]) {
                return Some("two machines have no memory in common");
            }
            if is("carrier", &[KERNEL]) {
                return Some("the other end of plain TCP is started on this machine only");
            }
            let offload = is("gso", &["false"]) || is("gro", &["false"]);
            if limited || offload || is("carrier", &["udp"]) || is("crc", &["false"]) {
                return Some(
                    "both ends need the same variables, and those of a server on another host cannot be set from here",
                );
            }
        }
        if is("carrier", &[KERNEL]) {
            let one_way = |op: &str| ["send", "write", "write-imm"].contains(&op);
            let op = point.params.get("op").map_or("send", String::as_str);
            if is("qp", &["ud", "rd"]) || !one_way(op) {
                return Some(
                    "plain TCP is measured only with messages in one direction, like Sends and Writes of RC",
                );
            }
        }
        if self.device(&point.params).is_some() {
            if matches!(point.runner, Runner::Mpi | Runner::Apps | Runner::Lanes) {
                return Some("MPI, applications and lanes are measured only with anywarp's device");
            }
            if !is("carrier", &["tcp"]) && point.params.contains_key("carrier") {
                return Some("only anywarp's device has other carriers than TCP");
            }
            if is("qp", &["ud", "rd"]) {
                return Some("only anywarp's device has one-sided and reliable datagrams");
            }
            if is("pin", &["false"]) {
                return Some("only anywarp's device can leave pages unlocked");
            }
            if limited {
                return Some("only anywarp's device can limit rates and inject losses");
            }
        }
        None
    }

    /// Allows the programs that are started next to run on the processors of both ends.
    fn pin_all(&self) {
        if let Some((server, client)) = &self.processors {
            pin(&[server.as_slice(), client.as_slice()].concat());
        }
    }

    /// Runs all streams of the point at the same time, each with a pair of processes.
    fn run(
        &mut self,
        args: &Perf,
        ping: bool,
        variables: &Variables,
        streams: usize,
    ) -> Result<Sample, String> {
        let size = args.size.0.first().copied().unwrap_or(1);
        let mut servers = Vec::new();
        for stream in 0..streams {
            let kept = self.servers.remove(&(variables.clone(), stream));
            let kept = kept.and_then(|mut server| server.usable().then_some(server));
            servers.push(kept.map_or_else(|| self.server(variables), Ok)?);
        }
        if let Some((_, client)) = &self.processors {
            pin(client);
        }
        let (library, interrupted) = (&self.library, &self.interrupted);
        let one = |server: &mut Server| {
            let mut session = server.session()?;
            let run = session.run(args, ping, variables, library, interrupted)?;
            // A session is kept only after a successful run.
            server.session = Some(session);
            server.used = Instant::now();
            run.figures(args, ping, size)
        };
        let samples: Vec<Result<Sample, String>> = match servers.as_mut_slice() {
            [server] => vec![one(server)],
            several => thread::scope(|scope| {
                let threads: Vec<_> = several
                    .iter_mut()
                    .map(|server| scope.spawn(|| one(server)))
                    .collect();
                let failed = |_| Err("a stream's thread has failed".to_owned());
                let ends = threads.into_iter().map(thread::ScopedJoinHandle::join);
                ends.map(|end| end.unwrap_or_else(failed)).collect()
            }),
        };
        for (stream, mut server) in servers.into_iter().enumerate() {
            // The next attempt starts another server in place of one that cannot be used.
            if server.usable() {
                self.servers.insert((variables.clone(), stream), server);
            }
        }
        let samples: Result<Vec<Sample>, String> = samples.into_iter().collect();
        Ok(together(&samples?))
    }

    fn server(&self, variables: &Variables) -> Result<Server, String> {
        if let Some((host, port)) = &self.elsewhere {
            return Ok(Server {
                child: None,
                host: host.clone(),
                port: *port,
                session: None,
                used: Instant::now(),
                lost: false,
            });
        }
        let failed = |e: io::Error| format!("the server does not start: {e}");
        let port = sys::free_port().map_err(failed)?;
        if let Some((server, _)) = &self.processors {
            pin(server);
        }
        let system = variables.iter().find(|(name, _)| name == SYSTEM);
        let host = self.host(system.map(|(_, device)| device.as_str()));
        let mut command = self.command().map_err(failed)?;
        command
            .args(["blast", "--server", "--forever", "--quiet", "--with-parent"])
            .arg(std::process::id().to_string())
            .arg("-p")
            .arg(port.to_string())
            .args(system.map(|_| "--system"))
            .env("ANYWARP_LIB", self.library.dir())
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn().map_err(failed)?;
        let mut server = Server {
            child: Some(child),
            host: host.clone(),
            port,
            session: None,
            used: Instant::now(),
            lost: false,
        };
        let end = Instant::now() + READY;
        loop {
            match Session::connect(&host, port) {
                Ok(session) => {
                    server.session = Some(session);
                    return Ok(server);
                }
                Err(why) if Instant::now() >= end => return Err(why),
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Returns the command that starts this program where servers run.
    fn command(&self) -> io::Result<Command> {
        let own = env::current_exe()?;
        let Some(beyond) = &self.beyond else {
            return Ok(Command::new(own));
        };
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &beyond.process.to_string(), "-n"])
            .arg(own);
        Ok(command)
    }

    /// Measures plain TCP, which has a byte stream in place of messages and no completions.
    fn kernel(&self, point: &Point) -> (String, Outcome) {
        let get = |axis: &str, usual: &str| {
            let value = point.params.get(axis).map_or(usual, String::as_str);
            value.to_owned()
        };
        let event = get("mode", "poll") == "event";
        let probe = match (point.runner, event) {
            (Runner::Ping, true) => "tcp-sleep",
            (Runner::Ping, false) => "tcp-spin",
            _ => "tcp-stream",
        };
        let (size, list) = (get("size", "64"), get("buffers", "16"));
        let list = if probe == "tcp-stream" && get("posting", "single") == "list" {
            list.parse().unwrap_or(1).min(MOST_IN_A_CALL)
        } else {
            1
        }
        .to_string();
        // A network may delay each message by some milliseconds.
        let millis = f64::max(self.extent.seconds() * 1000.0, 50.0);
        let millis = format!("{millis:.0}");
        let words = [
            "bench-raw",
            probe,
            "--size",
            &size,
            "--list",
            &list,
            "--millis",
            &millis,
        ];
        let command = format!("anywarp {}", words.join(" "));
        let run = || -> Result<Sample, String> {
            let failed = |e: io::Error| e.to_string();
            if let Some((server, _)) = &self.processors {
                pin(server);
            }
            let mut server = self.command().map_err(failed)?;
            let (server, word) = Ended::first_line(server.args(words), &self.interrupted)?;
            let word = word.strip_prefix("ready ").unwrap_or_default();
            if let Some((_, client)) = &self.processors {
                pin(client);
            }
            let mut client = Command::new(env::current_exe().map_err(failed)?);
            client
                .args(words)
                .args(["--connect", &self.host(None), word])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let text = Ended::start(&mut client)?.output(&self.interrupted);
            drop(server);
            let text = text?;
            let measured: Sample = raw_values(&text)
                .ok_or_else(|| format!("output not understood: {}", text.trim()))?;
            let bits = size.parse::<f64>().map_err(|e| e.to_string())? * 8.0;
            let us = match (measured.get("us"), measured.get("gb_s")) {
                (Some(us), _) => *us,
                (_, Some(rate)) => bits / (rate * 8000.0),
                _ => return Err(format!("output not understood: {}", text.trim())),
            };
            let values = [("oneway_us", us), ("median_us", us), ("mbps", bits / us)];
            Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
        };
        (command, run().map_err(Miss::Failed))
    }

    /// Runs `anywarp-cost`, with two processes if the point needs them.
    fn cost(&self, point: &Point, variables: &Variables) -> (String, Outcome) {
        let Some(program) = self.library.cost() else {
            let why = "the program anywarp-cost is missing: reinstall anywarp";
            return (String::new(), Err(Miss::Failed(why.to_owned())));
        };
        let mut words = vec![point.runner.as_str().to_owned()];
        let mut add = |name: &str, value: &str| words.extend([name.to_owned(), value.to_owned()]);
        let two = matches!(point.runner, Runner::First | Runner::Buffers);
        if point.runner == Runner::First {
            add(
                "--count",
                if self.extent == Extent::Smoke {
                    "3"
                } else {
                    "20"
                },
            );
        } else {
            for (axis, value) in &point.params {
                match (axis.as_str(), value.as_str()) {
                    ("action" | "size" | "threads" | "policy", value) => {
                        add(&format!("--{axis}"), value);
                    }
                    ("receivers", value) => add("--qps", value),
                    ("resident" | "huge" | "fresh", "true") => add(&format!("--{axis}"), "1"),
                    ("at_once", "true") => add("--at-once", "1"),
                    ("processes", "true") => add("--processes", "1"),
                    _ => {}
                }
            }
            // The measurement must be long enough that each receiver gets a processor in it. The value is in milliseconds.
            let least = if point.runner == Runner::Broadcast {
                200.0
            } else {
                0.0
            };
            let millis = f64::max(self.extent.seconds() * 1000.0, least);
            add("--millis", &format!("{millis:.0}"));
        }
        let library = self.device.is_none().then_some(&self.library);
        let start = |words: &[String]| {
            Ended::start(&mut verbs_program(&program, words, library, variables))
        };
        let run = || {
            let mut server = None;
            let mut client = words.clone();
            if two {
                let port = sys::free_port().map_err(|e| e.to_string())?;
                client.extend(["--port".to_owned(), port.to_string()]);
                if let Some((server, _)) = &self.processors {
                    pin(server);
                }
                server = Some(start(&client)?);
                ready(port, true)?;
                client.push(HERE.to_owned());
            }
            if let Some((_, client)) = &self.processors {
                // Several threads need several processors.
                let all: Vec<usize> = self
                    .processors
                    .iter()
                    .flat_map(|(a, b)| a.iter().chain(b))
                    .copied()
                    .collect();
                pin(if two { client } else { &all });
            }
            let output = start(&client)?.output(&self.interrupted);
            drop(server);
            output
        };
        let mut command = String::new();
        for (name, value) in variables {
            command.push_str(&format!("{name}={value} "));
        }
        if self.device.is_none() {
            command.push_str("anywarp run -- ");
        }
        command.push_str(&format!("{} {}", program.display(), words.join(" ")));
        let outcome = run().and_then(|text| {
            let mut sample: Sample = serde_json::from_str(&text)
                .map_err(|_| format!("output not understood: {}", text.trim()))?;
            if point.params.get("over").is_some_and(|over| over == "tcp") {
                let tcp = sample.get("tcp_us").copied();
                sample.insert("us".to_owned(), tcp.ok_or("no time of TCP")?);
            }
            sample.remove("tcp_us");
            Ok(sample)
        });
        let outcome = outcome.map_err(|why| {
            // The limit of locked memory is a matter of privileges, not of the device, so the point is blank (not measurable here).
            if why.contains("ulimit -l") {
                Miss::Blank(why)
            } else {
                Miss::Failed(why)
            }
        });
        (command, outcome)
    }

    /// Returns the variables of the device that a point needs at both ends.
    fn variables(&self, params: &Params) -> Result<Variables, String> {
        let mut variables = Variables::new();
        let mut set = |name: &str, value: &str| variables.push((name.to_owned(), value.to_owned()));
        let mut faults = Vec::new();
        let device = self.device(params);
        if let Some(device) = device {
            set(SYSTEM, device);
        } else {
            match params.get("carrier").map_or("tcp", String::as_str) {
                "tcp" => set("ANYWARP_CARRIER", "tcp"),
                KERNEL => {}
                "memory" => set("ANYWARP_CARRIER", "auto"),
                "udp" => {
                    set("ANYWARP_CARRIER", "tcp");
                    set("ANYWARP_RC", "udp");
                }
                other => return Err(format!("unknown carrier {other}")),
            }
        }
        if device.is_none() && params.get("pin").is_some_and(|pin| pin == "true") {
            set("ANYWARP_PIN", "1");
        }
        if params.get("crc").is_some_and(|crc| crc == "false") {
            set("ANYWARP_CRC", "0");
        }
        for (axis, name) in [("gso", "ANYWARP_GSO"), ("gro", "ANYWARP_GRO")] {
            if params.get(axis).is_some_and(|on| on == "false") {
                set(name, "0");
            }
        }
        for name in ["rate", "loss"] {
            if let Some(value) = params.get(name)
                && value != "none"
            {
                faults.push(format!("{name}={value}"));
            }
        }
        if !faults.is_empty() {
            faults.push("summary=off".to_owned());
            set("ANYWARP_FAULTS", &faults.join(";"));
        }
        Ok(variables)
    }
}

/// Returns whether a program that measures a point is started once for both ends, and assigns processors to them.
fn places_itself(point: &Point) -> bool {
    match point.runner {
        Runner::Mpi | Runner::Apps | Runner::Lanes => true,
        Runner::Ping | Runner::Blast => between::wanted(&point.params),
        _ => false,
    }
}

/// Returns the numbers of a line of `anywarp bench-raw`.
fn raw_values(text: &str) -> Option<Sample> {
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).ok()?;
    let number = |(name, value): (String, serde_json::Value)| Some((name, value.as_f64()?));
    Some(all.into_iter().filter_map(number).collect())
}

/// Returns the number of streams of a point.
fn streams(point: &Point) -> Result<usize, String> {
    let given = point.params.get("streams").map_or("1", String::as_str);
    let streams = given.parse().ok().filter(|n| (1..=64).contains(n));
    streams.ok_or_else(|| format!("streams={given} is not a number from 1 to 64"))
}

/// Removes the time that the ends waited for a processor. For points whose ends wait by design it does not indicate noise.
fn without_waiting(mut sample: Sample) -> Sample {
    sample.remove("waited");
    sample
}

/// Combines the samples of concurrent streams: the sums of rates and processor times, the longest duration, and the means of
/// all other values.
fn together(samples: &[Sample]) -> Sample {
    let mut all = Sample::new();
    for name in samples.iter().flat_map(BTreeMap::keys) {
        let values = samples
            .iter()
            .filter_map(|sample| sample.get(name).copied());
        let value = match name.as_str() {
            "mbps" | "arrived_mbps" | "messages" | "cpu_local" | "cpu_remote" => values.sum(),
            "elapsed_s" => values.fold(0.0, f64::max),
            _ => values.sum::<f64>() / samples.len() as f64,
        };
        all.insert(name.clone(), value);
    }
    match samples {
        [_] => all,
        // Concurrent streams compete for the processors by design.
        _ => without_waiting(all),
    }
}

/// Returns the options of `anywarp ping` and `blast` for a point.
fn words(point: &Point, extent: Extent) -> Result<Vec<String>, String> {
    let params = &point.params;
    let get = |axis: &str| params.get(axis).map(String::as_str);
    let number = |axis: &str, usual: u64| match get(axis) {
        None => Ok(usual),
        Some(text) => text
            .parse::<u64>()
            .map_err(|_| format!("{axis}={text} is not a number")),
    };
    let (size, buffers) = (number("size", 64)?, number("buffers", 16)?);
    // UD has no plain Write, so the value `write` stands for a Write-Record there.
    let op = match (get("op").unwrap_or("send"), get("qp")) {
        ("write", Some("ud")) => "write-record",
        (op, _) => op,
    };
    let mut words = Vec::new();
    let mut add = |name: &str, value: &str| {
        words.push(name.to_owned());
        if !value.is_empty() {
            words.push(value.to_owned());
        }
    };
    add("-t", get("qp").unwrap_or("rc"));
    add("-o", op);
    add("-s", &size.to_string());
    if point.runner == Runner::Blast {
        add("--depth", &buffers.to_string());
        match get("posting") {
            None | Some("single") => {}
            Some("list") => add("--batch", ""),
            Some(other) => return Err(format!("unknown posting {other}")),
        }
        if op != "write-record" {
            // Twice as many buffers at the receiver as outstanding messages.
            add("--buffers", &(2 * buffers).max(8).to_string());
        }
        add(
            "--warmup",
            &(buffers + if size < 1 << 16 { 32 } else { 2 }).to_string(),
        );
    } else {
        add("--warmup", if size < 1 << 16 { "20" } else { "2" });
    }
    match (get("signaling"), point.runner) {
        (None | Some("full"), _) => {}
        (Some("periodic"), Runner::Blast) => {
            add("--signal-every", &(buffers / 2).max(1).to_string());
        }
        (Some("periodic"), _) => add("--signal-every", "2"),
        (Some(other), _) => return Err(format!("unknown signaling {other}")),
    }
    for (axis, value, word) in [("inline", "true", "--inline"), ("mode", "event", "--event")] {
        if get(axis) == Some(value) {
            add(word, "");
        }
    }
    // Streams have no datagrams: the axis does not change their points.
    if let (Some(segment), Some("ud" | "rd")) = (get("segment"), get("qp")) {
        add("--segment", segment);
    }
    // Streams do not start at the same moment. A longer measurement reduces the share of the time in which only some of them
    // run.
    add(
        "-d",
        &(extent.seconds() * streams(point)? as f64).to_string(),
    );
    add("-r", "1");
    add("--timeout", "20");
    add("-q", "");
    Ok(words)
}

/// Splits the processors that this process may use into two halves.
pub(super) fn halves() -> Option<(Vec<usize>, Vec<usize>)> {
    let set = rustix::thread::sched_getaffinity(None).ok()?;
    let all: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect();
    let (server, client) = all.split_at_checked(all.len() / 2)?;
    (!server.is_empty()).then(|| (server.to_vec(), client.to_vec()))
}

/// Restricts this thread and the processes that it starts to these processors.
pub(super) fn pin(processors: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in processors {
        set.set(cpu);
    }
    let _unpinned_then = rustix::thread::sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options_of(runner: Runner, params: &[(&str, &str)]) -> Result<String, String> {
        let point = Point {
            runner,
            params: params
                .iter()
                .map(|(axis, value)| ((*axis).to_owned(), (*value).to_owned()))
                .collect(),
        };
        words(&point, Extent::Quick).map(|words| words.join(" "))
    }

    #[test]
    fn a_point_becomes_a_command() {
        let blast = options_of(
            Runner::Blast,
            &[
                ("op", "write"),
                ("size", "912"),
                ("buffers", "16"),
                ("posting", "list"),
                ("signaling", "periodic"),
                ("inline", "true"),
                ("mode", "event"),
            ],
        );
        assert_eq!(
            blast.unwrap(),
            "-t rc -o write -s 912 --depth 16 --batch --buffers 32 --warmup 48 --signal-every 8 --inline --event -d 0.06 \
             -r 1 --timeout 20 -q"
        );
        let ping = options_of(
            Runner::Ping,
            &[("op", "write-read"), ("signaling", "periodic")],
        );
        assert_eq!(
            ping.unwrap(),
            "-t rc -o write-read -s 64 --warmup 20 --signal-every 2 -d 0.06 -r 1 --timeout 20 -q"
        );
        for (axis, value) in [("size", "x"), ("posting", "x"), ("signaling", "x")] {
            assert!(
                options_of(Runner::Blast, &[(axis, value)]).is_err(),
                "{axis}"
            );
        }
    }

    #[test]
    fn several_streams_have_the_sum_of_their_rates_and_the_mean_of_their_times() {
        let sample = |mbps: f64, us: f64| -> Sample {
            let values = [("mbps", mbps), ("oneway_us", us), ("waited", us / 100.0)];
            values.map(|(name, value)| (name.to_owned(), value)).into()
        };
        let all = together(&[sample(100.0, 4.0), sample(300.0, 8.0)]);
        let of = |name: &str| all.get(name).copied();
        assert_eq!(of("mbps"), Some(400.0));
        assert_eq!(of("oneway_us"), Some(6.0));
        assert_eq!(of("waited"), None);
        assert_eq!(together(&[sample(1.0, 8.0)]), sample(1.0, 8.0));
        for text in ["0", "x", "65"] {
            assert!(
                options_of(Runner::Blast, &[("streams", text)]).is_err(),
                "{text}"
            );
        }
        let eight = options_of(Runner::Blast, &[("streams", "8")]).unwrap();
        assert!(eight.contains(" -d 0.48 "), "{eight}");
    }

    #[test]
    fn each_command_is_accepted_by_the_command_line() {
        for op in ["send", "write", "write-imm", "read"] {
            let words = options_of(Runner::Blast, &[("op", op), ("posting", "list")]).unwrap();
            let all = ["anywarp", "blast", HERE]
                .into_iter()
                .chain(words.split(' '));
            let cli::Command::Blast(args) = Cli::try_parse_from(all).unwrap().command else {
                panic!("not blast")
            };
            assert_eq!(args.contradiction(false), None);
        }
    }

    #[test]
    fn a_server_that_has_ended_is_not_used_again() {
        let server = |program: &str, words: &[&str]| Server {
            child: Some(Command::new(program).args(words).spawn().unwrap()),
            host: HERE.to_owned(),
            port: sys::free_port().unwrap(),
            session: None,
            used: Instant::now(),
            lost: false,
        };
        let mut running = server("sleep", &["60"]);
        assert!(running.usable());
        // Nothing listens on its port.
        assert!(running.session().is_err());
        assert!(!running.usable());
        let mut ended = server("true", &[]);
        ended.child.as_mut().unwrap().wait().unwrap();
        assert!(!ended.usable());
    }

    #[test]
    fn programs_that_measure_both_ends_may_use_the_processors_of_both() {
        let places = |runner, params: &[(&str, &str)]| {
            let own = |(axis, value): &(&str, &str)| ((*axis).to_owned(), (*value).to_owned());
            let params = params.iter().map(own).collect();
            places_itself(&Point { runner, params })
        };
        for runner in [Runner::Ping, Runner::Blast] {
            assert!(places(runner, &[("mtu", "1500")]));
            assert!(places(runner, &[("network-delay", "1ms")]));
            assert!(!places(runner, &[("mtu", "none")]));
            assert!(!places(runner, &[("size", "1")]));
        }
        for runner in [Runner::Mpi, Runner::Apps, Runner::Lanes] {
            assert!(places(runner, &[]));
        }
        assert!(!places(Runner::Exs, &[]));
    }
}
