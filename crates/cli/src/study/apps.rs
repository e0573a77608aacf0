//! Measures unmodified programs: SIPp, ffmpeg, sockperf, iperf3, and HAProxy with nginx and memcached, over the kernel's sockets and,
//! with `anywarp sockets run`, over iWARP, and perftest over the device.
//!
//! A *point* is a combination of the values of an experiment's axes. One of them is the *carrier* of the programs' sockets.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use super::args::Inside;
use super::figures::{Extent, Params, Point, Runner};
use super::namespace::{self, BLANK, system};
use super::process::{Ended, READY, ready};
use super::runner::{halves, pin};
use super::store::{Miss, Outcome, Sample};
use crate::library::Library;
use crate::perf::Interrupted;
use crate::sys;

/// The address of both ends.
const HERE: &str = "127.0.0.1";

/// The duration of each SIP call, in milliseconds.
const CALL_MS: u64 = 3000;

/// The pause between two readings of the memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// The files that identify the XRC domains of perftest. perftest does not remove them, and a later run of another user could
/// not open them.
const XRC_FILES: [&str; 2] = ["/tmp/xrc_domain_server", "/tmp/xrc_domain_client"];

/// The file with the video for the player, in the folder of the report.
const FILM: &str = "film.ts";

/// The page of the measurement with three tiers (proxy, web server and database): its name, its length, and the number of
/// clients that request it.
const PAGE: &str = "/page";
const PAGE_BYTES: usize = 4000;
const CLIENTS: &str = "8";

/// The number of frames after which a player has started: one second.
const FRAMES: u32 = 25;

/// The programs, and the folder for what they need.
#[derive(Debug)]
pub(crate) struct Apps {
    folder: PathBuf,
}

/// How the sockets of the programs are carried.
#[derive(Debug, Clone, Copy)]
struct Carrier {
    tcp: bool,
    /// The rule for `anywarp sockets run`; `None` for the kernel's sockets.
    rule: Option<&'static str>,
    /// Whether the device may use shared memory between processes.
    memory: bool,
}

impl Carrier {
    fn named(name: &str) -> Option<Self> {
        let (tcp, rule) = match name {
            "udp" => (false, None),
            "datagram" => (false, Some("all datagram")),
            "record" => (false, Some("all record")),
            "tcp" => (true, None),
            "rc" | "memory" => (true, Some("all require")),
            // perftest does not use sockets for its data.
            "" => (true, None),
            _ => return None,
        };
        let memory = name == "memory";
        Some(Self { tcp, rule, memory })
    }
}

/// The role of a program in a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The program runs until the measurement is over.
    Background,
    /// The exit of the program ends the measurement.
    Measured,
}

/// Starts programs with the library, if the carrier needs it.
struct Programs<'a> {
    carrier: Carrier,
    library: &'a Library,
    folder: &'a Path,
    /// Whether the programs use the device directly, with verbs.
    device: bool,
    /// Whether the device protects messages with a CRC.
    crc: bool,
    /// The commands as a user would type them.
    commands: Vec<String>,
}

impl Programs<'_> {
    /// Starts the program with this name and these arguments, in the folder of the report.
    fn start(&mut self, part: Part, words: &[String]) -> Result<Ended, Miss> {
        self.start_with(part, self.carrier.rule, words)
    }

    /// Starts a program with this rule instead of that of the carrier. If the carrier has no rule, the program uses the
    /// kernel's sockets, and the device if `self.device` is set.
    fn start_with(
        &mut self,
        part: Part,
        rule: Option<&str>,
        words: &[String],
    ) -> Result<Ended, Miss> {
        let rule = rule.filter(|_| self.carrier.rule.is_some());
        let own = env::current_exe().map_err(|e| e.to_string())?;
        let (program, arguments) = words.split_first().ok_or_else(|| "no program".to_owned())?;
        let device = if self.carrier.memory { "auto" } else { "tcp" };
        let mut command;
        let mut typed = String::new();
        match rule {
            Some(rule) => {
                command = Command::new(&own);
                command
                    .args(["sockets", "run", "--rule", rule, "--"])
                    .args(words)
                    .env("ANYWARP_LIB", self.library.dir())
                    .env("ANYWARP_CARRIER", device);
                typed.push_str(&format!(
                    "ANYWARP_CARRIER={device} anywarp sockets run --rule '{rule}' -- "
                ));
            }
            None if self.device => {
                command = Command::new(&own);
                command
                    .args(["run", "--"])
                    .args(words)
                    .env("ANYWARP_LIB", self.library.dir())
                    .env("ANYWARP_ADDR", HERE)
                    .env("ANYWARP_CARRIER", device);
                typed.push_str(&format!("ANYWARP_CARRIER={device} anywarp run -- "));
            }
            None => {
                command = Command::new(program);
                command.args(arguments);
            }
        }
        if !self.crc && !typed.is_empty() {
            command.env("ANYWARP_CRC", "0");
            typed.insert_str(0, "ANYWARP_CRC=0 ");
        }
        typed.push_str(&words.join(" "));
        self.commands.push(typed);
        // Nothing reads the output of a program in the background, and SIPp prints more than a pipe holds.
        let streams = match part {
            Part::Background => [Stdio::null(), Stdio::null()],
            Part::Measured if program == "sipp" => [Stdio::null(), Stdio::piped()],
            Part::Measured => [Stdio::piped(), Stdio::piped()],
        };
        let [stdout, stderr] = streams;
        command
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr);
        Ok(Ended::start(&mut command)?)
    }
}

/// Splits a command into words.
fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Ensures that a program is installed.
pub(super) fn need(program: &str, package: &str) -> Result<(), Miss> {
    let path = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&path).any(|folder| folder.join(program).is_file()) {
        return Ok(());
    }
    let why = format!("{program} is not installed: apt install {package}");
    Err(Miss::Blank(why))
}

impl Apps {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// Measures a point. Returns the commands as a user would type them, and the outcome.
    pub(crate) fn measure(
        &self,
        point: &Point,
        extent: Extent,
        library: &Library,
        interrupted: &Interrupted,
    ) -> (String, Outcome) {
        let get = |axis: &str| point.params.get(axis).map_or("", String::as_str);
        // A point like "tcp+rc" uses several kinds of sockets at the same time.
        let carriers: Option<Vec<Carrier>> =
            get("sockets").split('+').map(Carrier::named).collect();
        let Some((carriers, &carrier)) = carriers
            .as_deref()
            .and_then(|all| Some((all, all.first()?)))
        else {
            let why = format!("unknown kind of sockets: {}", get("sockets"));
            return (String::new(), Err(Miss::Failed(why)));
        };
        if point.params.contains_key("mtu") {
            return self.in_namespace(point, extent, library, interrupted);
        }
        let mut programs = Programs {
            carrier,
            library,
            folder: &self.folder,
            device: false,
            crc: get("crc") != "false",
            commands: Vec::new(),
        };
        let outcome = match get("app") {
            "calls" => calls(&mut programs, extent, interrupted),
            "clients" => clients(&mut programs, get("clients"), interrupted),
            "player" => self.player(&mut programs, interrupted),
            "perftest" => perftest(&mut programs, point, extent, interrupted),
            "tiers" => self.tiers(&mut programs, point, interrupted),
            "profile" => self.profile(&mut programs, get("part"), interrupted),
            "pingpong" => pingpong(&mut programs, get("size"), get("mode"), interrupted),
            "streams" => streams(&mut programs, carriers, get("streams"), interrupted),
            other => Err(Miss::Failed(format!("unknown application: {other}"))),
        };
        (programs.commands.join(" & "), outcome)
    }

    /// Measures a point in a network namespace, whose loopback interface has shorter packets.
    fn in_namespace(
        &self,
        point: &Point,
        extent: Extent,
        library: &Library,
        interrupted: &Interrupted,
    ) -> (String, Outcome) {
        let folder = match std::path::absolute(&self.folder) {
            Ok(folder) => folder.display().to_string(),
            Err(e) => return (String::new(), Err(Miss::Failed(e.to_string()))),
        };
        let mut words: Vec<String> = words("study inside --report");
        words.push(folder);
        if extent == Extent::Smoke {
            words.push("--smoke".to_owned());
        }
        for (axis, value) in &point.params {
            match (axis.as_str(), value.as_str()) {
                ("mtu", mtu) => words.extend(["--mtu".to_owned(), mtu.to_owned()]),
                ("offload", "false") => words.push("--no-offload".to_owned()),
                ("offload", _) => {}
                ("rate", rate) => words.extend(["--rate".to_owned(), rate.to_owned()]),
                (axis, value) => words.push(format!("{axis}={value}")),
            }
        }
        namespace::measure(&words, library, interrupted)
    }

    /// Returns how much of the processor time of a TCP transfer one of its parts uses (see [`part_of`]), in percent. Both ends
    /// are counted together.
    fn profile(
        &self,
        programs: &mut Programs<'_>,
        part: &str,
        interrupted: &Interrupted,
    ) -> Outcome {
        need("perf", "linux-perf")?;
        need("iperf3", "iperf3")?;
        let port = sys::free_port().map_err(|e| e.to_string())?;
        let record = |end: &str, arguments: &str| {
            words(&format!(
                "perf record -q -F 999 -e cpu-clock -o {end}.perf -- iperf3 {arguments}"
            ))
        };
        let server = record("server", &format!("-s -1 -B {HERE} -p {port}"));
        // With -1 the server exits after its client.
        let server = programs.start(Part::Measured, &server)?;
        ready(port, true)?;
        let client = record("client", &format!("-c {HERE} -p {port} -t 1 -l 1M"));
        let client = programs.start(Part::Measured, &client)?;
        for end in [client, server] {
            end.output(interrupted).map_err(|why| {
                // The kernel does not let every user see where it spends its time.
                if why.contains("perf_event_paranoid") || why.contains("ermission") {
                    Miss::Blank("perf may not profile the kernel here: run it as root, or sysctl kernel.perf_event_paranoid=1".to_owned())
                } else {
                    Miss::Failed(why)
                }
            })?;
        }
        let (mut all, mut of_part, mut kernel) = (0.0, 0.0, false);
        for end in ["server", "client"] {
            let report = format!("perf report -q -i {end}.perf --stdio --sort sym -F sample,sym");
            let text = programs
                .start(Part::Measured, &words(&report))?
                .output(interrupted)?;
            kernel |= has_kernel(&text);
            for (samples, symbol) in text.lines().filter_map(sampled) {
                all += samples;
                if part_of(symbol) == part {
                    of_part += samples;
                }
            }
        }
        if all == 0.0 {
            return Err(Miss::Failed("perf has recorded nothing".to_owned()));
        }
        if !kernel {
            // Without privileges perf does not record the kernel, or cannot name its functions.
            let why = "perf shows no functions of the kernel here: run it as root";
            return Err(Miss::Blank(why.to_owned()));
        }
        let share = of_part * 100.0 / all;
        let values = [("share", share), ("samples", all)];
        Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
    }

    /// Returns the time until a player has received the first second of a video that is sent in real time. Over UDP the sender
    /// sends to the player's port; over HTTP the player connects to the sender's port.
    fn player(&self, programs: &mut Programs<'_>, interrupted: &Interrupted) -> Outcome {
        need("ffmpeg", "ffmpeg")?;
        let film = self.folder.join(FILM);
        if !film.exists() {
            make_film(&self.folder, interrupted)?;
        }
        let port = sys::free_port().map_err(|e| e.to_string())?;
        let input = format!("ffmpeg -v error -re -stream_loop -1 -i {FILM} -c copy -f mpegts");
        let probe = "-fflags nobuffer -analyzeduration 100000 -probesize 50000";
        let play = |url: &str| {
            words(&format!(
                "ffmpeg -v error {probe} -i {url} -frames:v {FRAMES} -f null -"
            ))
        };
        let (player, sender, began);
        if programs.carrier.tcp {
            let url = format!("http://{HERE}:{port}");
            let send = format!("{input} -listen 1 {url}");
            sender = programs.start(Part::Background, &words(&send))?;
            ready(port, true)?;
            began = Instant::now();
            player = programs.start(Part::Measured, &play(&url))?;
        } else {
            let url = format!("udp://{HERE}:{port}");
            player = programs.start(Part::Measured, &play(&url))?;
            ready(port, false)?;
            began = Instant::now();
            let send = format!("{input} {url}?pkt_size=1316");
            sender = programs.start(Part::Background, &words(&send))?;
        }
        player.output(interrupted)?;
        let seconds = began.elapsed().as_secs_f64();
        drop(sender);
        Ok([("seconds".to_owned(), seconds)].into())
    }

    /// Returns the rate and the response times of requests for a page. Three programs take part: a proxy asks a web server,
    /// which asks a database. The clients use the kernel's sockets.
    fn tiers(
        &self,
        programs: &mut Programs<'_>,
        point: &Point,
        interrupted: &Interrupted,
    ) -> Outcome {
        let clients = point.params.get("clients").map_or(CLIENTS, String::as_str);
        need("ab", "apache2-utils")?;
        need("memcached", "memcached")?;
        for (program, package) in [("nginx", "nginx"), ("haproxy", "haproxy")] {
            // Debian installs these programs in a folder that is not in the PATH of every user.
            if !Path::new("/usr/sbin").join(program).is_file() {
                need(program, package)?;
            }
        }
        let port = || sys::free_port().map_err(|e| e.to_string());
        let (front, middle, back) = (port()?, port()?, port()?);
        let folder = self.folder.join("tiers");
        let write = |name: &str, text: String| {
            fs::create_dir_all(&folder)
                .and_then(|()| fs::write(folder.join(name), text))
                .map_err(|e| format!("{}: {e}", folder.display()))
        };
        write("haproxy.cfg", proxy(front, middle))?;
        write("nginx.conf", web(middle, back))?;
        let path = |name: &str| {
            std::path::absolute(folder.join(name))
                .map(|path| path.display().to_string())
                .map_err(|e| e.to_string())
        };
        // The connections between the tiers must use RDMA; those of the clients need not.
        let rule = |to: u16| format!("connect tcp {HERE}:{to} require; all prefer");
        let mut tier = |rule: &str, text: &str, more: &[String], port: u16| {
            let arguments: Vec<String> = words(text)
                .into_iter()
                .chain(more.iter().cloned())
                .collect();
            let started = programs.start_with(Part::Background, Some(rule), &arguments)?;
            ready(port, true)?;
            Ok::<Ended, Miss>(started)
        };
        let user = if has_one_user() { "root" } else { "nobody" };
        let database = format!("memcached -u {user} -l {HERE} -p {back} -U 0");
        let database = tier("all prefer", &database, &[], back)?;
        store_page(back).map_err(|e| format!("memcached: {e}"))?;
        let arguments = [
            "-p".to_owned(),
            path("")?,
            "-c".to_owned(),
            path("nginx.conf")?,
        ];
        let server = tier(&rule(back), "/usr/sbin/nginx", &arguments, middle)?;
        let arguments = ["-f".to_owned(), path("haproxy.cfg")?];
        let front_end = tier(&rule(middle), "/usr/sbin/haproxy", &arguments, front)?;
        let times = path("times.csv")?;
        let text = format!("ab -q -k -c {clients} -t 1 -n 1000000 -e");
        let mut arguments = words(&text);
        arguments.extend([times.clone(), format!("http://{HERE}:{front}{PAGE}")]);
        let text = programs
            .start_with(Part::Measured, None, &arguments)?
            .output(interrupted)?;
        drop((front_end, server, database));
        let number = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace()
                .find_map(|word| word.parse::<f64>().ok())
        };
        let bad = || format!("output not understood: {}", text.trim());
        if number("Failed requests:") != Some(0.0) || text.contains("Non-2xx") {
            let count = |name: &str| number(name).unwrap_or(0.0);
            return Err(Miss::Failed(format!(
                "{} pages were not answered, {} with an error page",
                count("Failed requests:"),
                count("Non-2xx responses:")
            )));
        }
        let rate = number("Requests per second:").ok_or_else(bad)?;
        // "99,1.234": the time in milliseconds within which this percentage was answered
        let times = fs::read_to_string(&times).map_err(|e| format!("{times}: {e}"))?;
        let within = |percent: &str| {
            let line = times.lines().find(|line| line.starts_with(percent))?;
            line.split(',').nth(1)?.trim().parse::<f64>().ok()
        };
        let (half, most) = (
            within("50,").ok_or_else(bad)?,
            within("99,").ok_or_else(bad)?,
        );
        let values = [
            ("rate", rate),
            ("median_us", half * 1000.0),
            ("p99_us", most * 1000.0),
        ];
        Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
    }
}

/// Returns the commands that limit the loopback interface to this rate, in Mbit/s.
fn link(rate: u32) -> [String; 2] {
    [
        "tc qdisc add dev lo root handle 1: htb default 1".to_owned(),
        format!(
            "tc class add dev lo parent 1: classid 1:1 htb rate {rate}mbit burst 128k cburst 128k"
        ),
    ]
}

/// Measures one point in this namespace. Returns the sample as JSON.
pub(super) fn inside(args: &Inside) -> Result<String, String> {
    system(&format!("ip link set lo up mtu {}", args.mtu))?;
    if args.no_offload {
        system("ip link set lo gso_max_segs 1")?;
    }
    if let Some(rate) = args.rate {
        for command in link(rate) {
            system(&command)?;
        }
    }
    let pair = |text: &String| {
        let (axis, value) = text.split_once('=')?;
        Some((axis.to_owned(), value.to_owned()))
    };
    let params: Option<Params> = args.values.iter().map(pair).collect();
    let point = Point {
        runner: Runner::Apps,
        params: params.ok_or("the values have the form axis=value")?,
    };
    let extent = if args.smoke {
        Extent::Smoke
    } else {
        Extent::Quick
    };
    let library = Library::find().map_err(|e| e.to_string())?;
    let apps = Apps::new(&args.report);
    let (_, outcome) = apps.measure(&point, extent, &library, &Interrupted::default());
    match outcome {
        Ok(sample) => serde_json::to_string(&sample).map_err(|e| e.to_string()),
        Err(Miss::Blank(why)) => Err(format!("{BLANK}{why}")),
        Err(Miss::Failed(why)) => Err(why),
    }
}

/// Returns whether a report of perf names a function of the kernel.
fn has_kernel(report: &str) -> bool {
    let mut functions = report.lines().filter_map(|line| line.split_once("[k] "));
    functions.any(|(_, symbol)| !symbol.starts_with("0x"))
}

/// Parses a line of `perf report`: the number of samples and the symbol.
fn sampled(line: &str) -> Option<(f64, &str)> {
    let (samples, rest) = line.trim_start().split_once(char::is_whitespace)?;
    let symbol = rest.trim_start().split_once(']')?.1.trim();
    Some((samples.parse().ok()?, symbol))
}

/// Returns the part of a transfer that a function of the kernel or of the program belongs to.
fn part_of(symbol: &str) -> &'static str {
    let has = |words: &[&str]| words.iter().any(|word| symbol.contains(word));
    if has(&["copy", "memcpy", "memmove", "rep_movs"]) {
        "copy"
    } else if has(&[
        "tcp", "ip_", "inet", "skb", "sock", "sk_", "csum", "napi", "softirq", "net_", "dev_",
        "xmit", "backlog", "loopback",
    ]) {
        "protocol"
    } else {
        "rest"
    }
}

/// Stores the page in a database, in the protocol of memcached.
fn store_page(port: u16) -> io::Result<()> {
    let mut stream = TcpStream::connect((HERE, port))?;
    stream.set_read_timeout(Some(READY))?;
    let page = "x".repeat(PAGE_BYTES);
    write!(stream, "set {PAGE} 0 0 {PAGE_BYTES}\r\n{page}\r\n")?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    if &answer == b"STORED\r\n" {
        Ok(())
    } else {
        Err(io::Error::other("the database does not store the page"))
    }
}

/// Returns whether this process is in a user namespace that has no other user, so that a program cannot change to one.
fn has_one_user() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().nth(2) == Some("1")
}

/// Returns the configuration of haproxy.
fn proxy(own: u16, next: u16) -> String {
    format!(
        "global\n    maxconn 1000\n\
         defaults\n    mode http\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n    http-reuse always\n\
         frontend web\n    bind {HERE}:{own}\n    default_backend application\n\
         backend application\n    server one {HERE}:{next}\n"
    )
}

/// Returns the configuration of nginx.
fn web(own: u16, next: u16) -> String {
    let user = if has_one_user() { "user root;\n" } else { "" };
    let folders: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("    {name}_temp_path {name};\n"))
        .concat();
    format!(
        "{user}daemon off;\nworker_processes 1;\npid nginx.pid;\nerror_log stderr warn;\n\
         events {{ worker_connections 512; }}\n\
         http {{\n    access_log off;\n{folders}\
         \x20   upstream database {{ server {HERE}:{next}; keepalive 32; }}\n\
         \x20   server {{\n        listen {HERE}:{own};\n        keepalive_requests 1000000;\n\
         \x20       location / {{ set $memcached_key $uri; memcached_pass database; default_type text/html; }}\n    }}\n}}\n"
    )
}

fn make_film(folder: &Path, interrupted: &Interrupted) -> Result<(), Miss> {
    // A key frame every fifth of a second, so that a player can begin soon.
    let text =
        "-v error -y -f lavfi -i testsrc=size=320x240:rate=25 -t 4 -c:v mpeg2video -g 5 -f mpegts";
    let mut command = Command::new("ffmpeg");
    command
        .args(words(text))
        .arg(FILM)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    Ended::start(&mut command)?.output(interrupted)?;
    Ok(())
}

/// Starts a SIP server. Returns it and its port.
fn server(programs: &mut Programs<'_>) -> Result<(Ended, u16), Miss> {
    need("sipp", "sip-tester")?;
    let port = sys::free_port().map_err(|e| e.to_string())?;
    let transport = if programs.carrier.tcp { "t1" } else { "u1" };
    let text = format!("sipp -sn uas -i {HERE} -p {port} -t {transport} -nostdin");
    let server = programs.start(Part::Background, &words(&text))?;
    ready(port, programs.carrier.tcp)?;
    Ok((server, port))
}

/// Returns the time from a request to its response.
fn calls(programs: &mut Programs<'_>, extent: Extent, interrupted: &Interrupted) -> Outcome {
    let (server, port) = server(programs)?;
    let own = env::current_exe().map_err(|e| e.to_string())?;
    let count = if extent == Extent::Smoke { 10 } else { 200 };
    let mut text = format!("study calls {HERE}:{port} --count {count}");
    if programs.carrier.tcp {
        text.push_str(" --tcp");
    }
    let mut arguments = vec![own.display().to_string()];
    arguments.extend(words(&text));
    let text = programs
        .start(Part::Measured, &arguments)?
        .output(interrupted)?;
    drop(server);
    let sample: Sample = serde_json::from_str(&text)
        .map_err(|_| format!("output not understood: {}", text.trim()))?;
    Ok(sample)
}

/// Returns the memory of a SIP client that has a socket for each of its calls: the memory of the process, and the growth of the
/// kernel's slab.
fn clients(programs: &mut Programs<'_>, count: &str, interrupted: &Interrupted) -> Outcome {
    let (server, port) = server(programs)?;
    let count: u64 = count
        .parse()
        .map_err(|_| format!("clients={count} is not a number"))?;
    let transport = if programs.carrier.tcp { "tn" } else { "un" };
    let rate = (count / 2).max(50);
    let text = format!(
        "sipp -sn uac {HERE}:{port} -i {HERE} -t {transport} -max_socket {} -m {count} -l {count} -r {rate} -d {CALL_MS} -nostdin \
         -timeout 60 -timeout_error",
        count + 10
    );
    let before = slab()?;
    let client = programs.start(Part::Measured, &words(&text))?;
    let pid = client.pid();
    let watch = thread::spawn(move || {
        let mut most = (0.0, 0.0, 0.0);
        while let Some(private) = private(pid) {
            let kernel = slab().unwrap_or(before) - before;
            if private + kernel > most.0 {
                most = (private + kernel, private, kernel);
            }
            thread::sleep(MEMORY_PAUSE);
        }
        most
    });
    let ended = client.output(interrupted);
    let (mb, private, kernel) = watch
        .join()
        .map_err(|_| "the memory was not read".to_owned())?;
    drop(server);
    ended?;
    let values = [("mb", mb), ("private_mb", private), ("kernel_mb", kernel)];
    Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
}

/// Returns the time or the throughput of Sends whose receives are posted to the queue pair, to a shared receive queue, or to the
/// shared receive queue of an XRC domain.
fn perftest(
    programs: &mut Programs<'_>,
    point: &Point,
    extent: Extent,
    interrupted: &Interrupted,
) -> Outcome {
    let get = |axis: &str| point.params.get(axis).map_or("", String::as_str);
    let name = if get("test") == "lat" {
        "ib_send_lat"
    } else {
        "ib_send_bw"
    };
    need(name, "perftest")?;
    let layout = match get("receives") {
        "own" => "",
        "shared" => "--use-srq",
        "xrc" => "-c XRC",
        other => return Err(Miss::Failed(format!("unknown kind of receives: {other}"))),
    };
    let size: f64 = get("size").parse().unwrap_or(1.0);
    let streams = point.params.get("streams").map_or("1", String::as_str);
    // This many messages take about as long as a sample should, if each needs 5 µs, and the time for its bytes at 1 GB/s.
    let count = (extent.seconds() / (size / 1e9 + 5e-6)).max(100.0);
    let port = sys::free_port().map_err(|e| e.to_string())?;
    let mut text = format!("{name} -F -p {port} -s {size} -n {count:.0} {layout}");
    if name == "ib_send_bw" {
        text.push_str(&format!(" -q {streams}"));
    }
    for file in XRC_FILES {
        let _not_there = fs::remove_file(file);
        if layout == "-c XRC" && Path::new(file).exists() {
            let why = format!("{file} belongs to another user: remove it");
            return Err(Miss::Blank(why));
        }
    }
    programs.device = true;
    // The carrier applies to the device: perftest does not use sockets for its data.
    programs.carrier.rule = None;
    // Each end stands for a host. Two ends that poll on the same processor would wait for each other's time slices.
    let halves = halves();
    if let Some((half, _)) = &halves {
        pin(half);
    }
    let server = programs.start(Part::Background, &words(&text))?;
    ready(port, true)?;
    if let Some((_, half)) = &halves {
        pin(half);
    }
    text.push_str(&format!(" {HERE}"));
    let text = programs
        .start(Part::Measured, &words(&text))?
        .output(interrupted)?;
    drop(server);
    for file in XRC_FILES {
        let _not_there = fs::remove_file(file);
    }
    // The last line with numbers: bytes, iterations, and then minimum, maximum and median of the time, or peak and mean rate.
    let numbers = text.lines().rev().find_map(|line| {
        let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        numbers.ok().filter(|numbers| numbers.len() >= 4)
    });
    let bad = || format!("output not understood: {}", text.trim());
    let numbers = numbers.ok_or_else(bad)?;
    let mut sample = Sample::new();
    if name == "ib_send_lat" {
        let us = *numbers.get(4).ok_or_else(bad)?;
        sample.insert("us".to_owned(), us);
        // perftest prints the time of one direction; a request and its answer take twice as long.
        sample.insert("answers".to_owned(), 1e6 / (2.0 * us));
        let most = *numbers.get(7).ok_or_else(bad)?;
        sample.insert("p99_us".to_owned(), most);
    } else {
        let mbps = numbers.get(3).ok_or_else(bad)? * 8.388_608;
        sample.insert("mbps".to_owned(), mbps);
    }
    Ok(sample)
}

/// Returns half of the round-trip time of a message between two programs.
fn pingpong(
    programs: &mut Programs<'_>,
    size: &str,
    mode: &str,
    interrupted: &Interrupted,
) -> Outcome {
    need("sockperf", "sockperf")?;
    let port = sys::free_port().map_err(|e| e.to_string())?;
    // With sockets that do not block, both ends call recv until a message arrives instead of sleeping.
    let poll = if mode == "poll" { " --nonblocked" } else { "" };
    let to = format!("-i {HERE} -p {port} --tcp{poll}");
    let server = format!("sockperf server {to}");
    // Each end stands for a host.
    let halves = halves();
    if let Some((half, _)) = &halves {
        pin(half);
    }
    let server = programs.start(Part::Background, &words(&server))?;
    ready(port, true)?;
    if let Some((_, half)) = &halves {
        pin(half);
    }
    let client = format!("sockperf ping-pong {to} -m {size} -t 1");
    let text = programs
        .start(Part::Measured, &words(&client))?
        .output(interrupted)?;
    drop(server);
    // "sockperf: ---> percentile 50.000 =    6.810"
    let line = text.lines().find(|line| line.contains("percentile 50.000"));
    let us: f64 = line
        .and_then(|line| line.split('=').nth(1)?.trim().parse().ok())
        .ok_or_else(|| format!("output not understood: {}", text.trim()))?;
    Ok([("us".to_owned(), us)].into())
}

/// Returns the throughput of streams over each of the carriers, all at the same time.
fn streams(
    programs: &mut Programs<'_>,
    carriers: &[Carrier],
    count: &str,
    interrupted: &Interrupted,
) -> Outcome {
    need("iperf3", "iperf3")?;
    let (mut servers, mut clients) = (Vec::new(), Vec::new());
    for &carrier in carriers {
        programs.carrier = carrier;
        let port = sys::free_port().map_err(|e| e.to_string())?;
        let server = format!("iperf3 -s -B {HERE} -p {port}");
        servers.push(programs.start(Part::Background, &words(&server))?);
        ready(port, true)?;
        clients.push((
            carrier,
            format!("iperf3 -c {HERE} -p {port} -P {count} -t 1 -J"),
        ));
    }
    let mut running = Vec::new();
    for (carrier, client) in clients {
        programs.carrier = carrier;
        running.push(programs.start(Part::Measured, &words(&client))?);
    }
    let mut mbps = 0.0;
    for client in running {
        let text = client.output(interrupted)?;
        let value: serde_json::Value = serde_json::from_str(&text)
            .map_err(|_| format!("output not understood: {}", text.trim()))?;
        let rate = value.pointer("/end/sum_received/bits_per_second");
        mbps += rate
            .and_then(serde_json::Value::as_f64)
            .ok_or_else(|| "the output of iperf3 has no rate".to_owned())?
            / 1e6;
    }
    drop(servers);
    Ok([("mbps".to_owned(), mbps)].into())
}

/// Returns a field of a file of /proc, in units of 1,000,000 bytes.
fn field(path: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024.0 / 1e6)
}

/// Returns the size of the kernel's slab.
fn slab() -> Result<f64, String> {
    field("/proc/meminfo", "Slab:").ok_or_else(|| "/proc/meminfo has no Slab".to_owned())
}

/// Returns the size of a process's private memory that was written, or `None` if the process has ended.
fn private(pid: u32) -> Option<f64> {
    field(&format!("/proc/{pid}/smaps_rollup"), "Private_Dirty:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_the_rate_of_its_class() {
        let all = link(20);
        assert!(all.iter().all(|command| command.contains(" dev lo ")));
        assert!(all.concat().contains("classid 1:1 htb rate 20mbit"));
    }

    #[test]
    fn functions_belong_to_a_part_of_a_transfer() {
        let text = "        42  [k] _copy_from_iter\n   7  [k] tcp_sendmsg_locked\n 1  [.] main\n\nnot a line\n";
        let all: Vec<_> = text.lines().filter_map(sampled).collect();
        assert_eq!(
            all,
            [
                (42.0, "_copy_from_iter"),
                (7.0, "tcp_sendmsg_locked"),
                (1.0, "main")
            ]
        );
        let parts: Vec<_> = all.iter().map(|(_, symbol)| part_of(symbol)).collect();
        assert_eq!(parts, ["copy", "protocol", "rest"]);
        assert!(has_kernel(text));
        assert!(!has_kernel(
            " 3 [.] iperf_tcp_recv\n 4 [k] 0xffffffff81000000\n"
        ));
    }
}
