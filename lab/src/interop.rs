//! `cargo lab interop`: tests that anywarp and the kernel's siw interoperate.
//!
//! siw runs in a QEMU guest that `tests/interop/make-guest` builds from Debian packages. The guest is booted once, and is replaced only
//! after a failure. An agent in it runs the programs of each case. The guest, and the network between guest and host, are in namespaces
//! that end with this process.

pub(crate) mod bench;
mod guest;
pub(crate) mod study;
mod wire;

use crate::c_tests;
use crate::programs::{self, CHECK_EVERY, Failed, Host, INSIDE, LocalProcess, plain};
use guest::{Guest, Remote};
use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use wire::Capture;
use xtask::expect::{self, Case, Exit, Program, Server};
use xtask::{Result, sh};

/// The longest time until a server listens.
const READY: Duration = Duration::from_secs(10);

/// The time limit for all cases, which take some 2 minutes on an idle machine. Each case has a limit of its own too.
const RUN: Duration = Duration::from_secs(15 * 60);

/// The program for extended sockets, in target/dist and in the guest.
const EXS_TTCP: &str = "bin/exs-ttcp";
/// The name of [`Environment::extended_sockets_on_rxe`].
const RXE: &str = "rxe-serves/exs-ttcp/both-ends-on-rxe";
/// The time limit of this test. The guest's processors are emulated.
const RXE_LIMIT: Duration = Duration::from_secs(60);

/// The largest number of times that a failed guest is replaced in one run.
const REBOOTS: u32 = 4;

/// Options of `cargo lab interop`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Only cases with this in their name.
    #[arg(long, value_name = "PART")]
    filter: Option<String>,
    /// Log level of the device; the log is shown when a case fails.
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Keep the captures in this folder.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// List the cases without running them.
    #[arg(long)]
    list: bool,
}

/// A case, and the stack that runs its server. The other stack runs its clients.
struct Variant<'a> {
    name: String,
    case: &'a Case,
    server: Server,
}

/// Returns each case with each stack as the server. Cases that change parameters of the siw driver come last.
fn variants<'a>(programs: &'a [Program], options: &Options) -> Vec<Variant<'a>> {
    let mut variants: Vec<Variant<'_>> = Vec::new();
    for (program, case) in programs::all(programs) {
        for server in [Server::Siw, Server::Anywarp] {
            let name = format!("{server}/{}/{}", program.name, case.name);
            let wanted = options
                .filter
                .as_ref()
                .is_none_or(|part| name.contains(part.as_str()));
            if wanted && case.interop.only.is_none_or(|only| only == server) {
                variants.push(Variant { name, case, server });
            }
        }
    }
    variants.sort_by_key(|variant| !variant.case.interop.siw.is_empty());
    variants
}

/// Runs the cases that the arguments select.
pub(crate) fn run(options: &Options) -> Result {
    let programs = expect::read_folder("tests/interop")?;
    let variants = variants(&programs, options);
    let with_rxe = options
        .filter
        .as_ref()
        .is_none_or(|part| RXE.contains(part.as_str()));
    if options.list {
        for variant in &variants {
            println!("{}", variant.name);
        }
        if with_rxe {
            println!("{RXE}");
        }
        return Ok(());
    }
    if variants.is_empty() && !with_rxe {
        return Err("no case matches the filter".into());
    }
    if env::var_os(INSIDE).is_none() {
        // The guest is built before the namespaces are entered, because packages are downloaded for it.
        sh::run(Command::new(sh::root().join("tests/interop/make-guest")).stdout(Stdio::null()))?;
        return programs::in_namespaces();
    }
    let start = Instant::now();
    let mut environment = Environment::new(options)?;
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (number, variant) in variants.iter().enumerate() {
        if start.elapsed() > RUN {
            let left = variants.len() - number;
            return Err(format!("{left} cases were not run within {} s", RUN.as_secs()).into());
        }
        let start = Instant::now();
        let outcome = environment.run_with_retry(variant, true)?;
        let seconds = start.elapsed().as_secs_f64();
        let name = &variant.name;
        match (outcome, variant.case.skipped(expect::Place::Namespaces)) {
            (Ok(()), None) => {
                passed += 1;
                println!("ok    {name}  ({seconds:.1} s)");
            }
            (Err(_), Some(reason)) => {
                skipped += 1;
                println!("skip  {name}  {reason}");
            }
            (Ok(()), Some(reason)) => {
                failed += 1;
                println!("FAIL  {name}  passes, although it is skipped with the reason: {reason}");
            }
            (Err(why), None) => {
                failed += 1;
                println!("FAIL  {name}  {}  ({seconds:.1} s)", why.reason);
                for line in why.output.lines() {
                    println!("        {line}");
                }
            }
        }
        std::io::stdout().flush()?;
    }
    if with_rxe {
        match environment.extended_sockets_on_rxe() {
            Ok(()) => {
                passed += 1;
                println!("ok    {RXE}");
            }
            Err(reason) => {
                failed += 1;
                println!("FAIL  {RXE}  {reason}");
            }
        }
    }
    println!(
        "{passed} passed, {failed} failed, {skipped} skipped, {} s",
        start.elapsed().as_secs()
    );
    if failed > 0 {
        return Err("some cases between anywarp and siw failed".into());
    }
    Ok(())
}

/// The environment of the cases.
struct Environment {
    work: PathBuf,
    guest: Guest,
    log: Option<String>,
    keep: Option<PathBuf>,
    /// The port of the last case. Each case gets a new one.
    port: u16,
    /// The number of guests that may still be booted.
    reboots: u32,
}

impl Drop for Environment {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.work);
    }
}

/// A program of a case, on the host or in the guest.
enum Process {
    Local(LocalProcess),
    Remote(Remote),
}

impl Process {
    fn finish(&mut self, side: &str, expected: Option<Exit>, end: Instant) -> Result {
        match self {
            Self::Local(process) => process.finish(expected, end),
            Self::Remote(remote) => remote.finish(side, expected, end),
        }
    }

    fn end(&mut self) -> Result {
        match self {
            Self::Local(process) => process.end(),
            Self::Remote(remote) => remote.end(),
        }
    }

    /// Returns the output, without the log.
    fn printed(&self, logs: bool) -> String {
        match self {
            Self::Local(process) if logs => process.output("out"),
            Self::Local(process) => process.output("out") + &process.output("err"),
            Self::Remote(remote) => remote.output(),
        }
    }

    fn tail(&self) -> String {
        match self {
            Self::Local(process) => process.tail(),
            Self::Remote(remote) => remote.tail(),
        }
    }
}

impl Environment {
    fn new(options: &Options) -> Result<Self> {
        let work = programs::new_folder(&env::temp_dir())?;
        if !sh::dist().join("bin/anywarp").exists() {
            return Err("target/dist does not exist: run `cargo xtask dist` first".into());
        }
        let peer = work.join("root/bin/peer");
        fs::create_dir_all(work.join("root/bin"))?;
        c_tests::build_from(&sh::root().join("tests/interop/peer.c"), &peer)?;
        // Extended sockets, which use the guest's verbs libraries.
        fs::create_dir_all(work.join("root/lib"))?;
        for file in [EXS_TTCP, "lib/libexs.so.1"] {
            fs::copy(sh::dist().join(file), work.join("root").join(file))?;
        }
        guest::wire()?;
        let guest = Guest::boot(&work)?;
        Ok(Self {
            work,
            guest,
            log: options.log.clone(),
            keep: options.keep.clone(),
            port: 7000,
            reboots: REBOOTS,
        })
    }

    /// Runs both ends of extended sockets in the guest, on the kernel's rxe. Unlike siw it has memory windows, with which receives are
    /// advertised. This is the last test, because it deletes siw's device.
    fn extended_sockets_on_rxe(&self) -> Result {
        self.guest.ask(
            "modprobe crc32_generic; modprobe rdma_rxe; rdma link delete siw0 2>/dev/null; \
             rdma link add rxe0 type rxe netdev eth0",
        )?;
        let address = guest::GUEST;
        let client = format!("exs-ttcp {address} --port 7900 --verify --count 60");
        let line = format!(
            "exs-ttcp --listen {address} --port 7900 --keep & \
             until grep -q ':1EDC [0-9A-F]*:0000 0A' /proc/net/tcp; do usleep 20000; done; \
             {client} --size 1,4K,300000 && {client} --ping --size 64,4K && {client} --mode read --size 4K; \
             result=$?; kill $!; exit $result"
        );
        let mut remote = self.guest.start(&line)?;
        let end = Instant::now() + RXE_LIMIT;
        let ended = remote.finish("client", Some(Exit::Code(0)), end);
        remote.end()?;
        ended.map_err(|e| format!("{e}\n{}", remote.tail()).into())
    }

    /// Runs a case, and a second time if it fails. If the guest has failed, the second run is in a new one. A case counts as
    /// failed if it fails twice.
    fn run_with_retry(
        &mut self,
        variant: &Variant<'_>,
        again: bool,
    ) -> Result<std::result::Result<(), Failed>> {
        let outcome = self.run_case(variant);
        let passed = matches!(outcome, Ok(Ok(())));
        let Some(reason) = self.guest.failure(passed) else {
            if let (true, Ok(Err(failed))) = (again, &outcome) {
                // The guest's processors are emulated, which occasionally exposes a race in siw. Such a case passes the second time, and
                // one that fails because of anywarp fails again.
                println!(
                    "again {}: {}\n{}",
                    variant.name, failed.reason, failed.output
                );
                return self.run_with_retry(variant, false);
            }
            return outcome;
        };
        let output = self.guest.console_text();
        let name = &variant.name;
        if self.reboots == 0 {
            return Err(format!(
                "{name}: {reason}; the guest has been rebooted too often\n{output}"
            )
            .into());
        }
        self.reboots -= 1;
        println!("reboot after {name}: {reason}\n{output}");
        self.guest.reboot(&self.work)?;
        if again {
            return self.run_with_retry(variant, false);
        }
        Ok(Err(Failed { reason, output }))
    }

    /// Runs a case. The outer error is one of the test environment, the inner one a failure of the case.
    fn run_case(&mut self, variant: &Variant<'_>) -> Result<std::result::Result<(), Failed>> {
        let case = variant.case;
        self.port += 1;
        let port = case.port.unwrap_or(self.port);
        self.guest.set_up(&case.interop.siw)?;
        let judged = case.interop.looks_at_the_wire();
        let capture = (judged || self.keep.is_some())
            .then(|| Capture::start(&self.work.join(format!("{port}.pcap")), port))
            .transpose()?;
        let mut processes = Vec::new();
        let mut outcome = self.run_programs(variant, port, &mut processes);
        for (_, process) in &mut processes {
            if let Err(left) = process.end() {
                outcome = Err(match outcome {
                    Ok(()) => left,
                    Err(why) => format!("{why}; {left}").into(),
                });
            }
        }
        let file = capture.map(Capture::finish).transpose()?;
        let verdict = match outcome {
            Ok(()) => self.verdict(case, &processes).map_or(Ok(()), Err),
            Err(reason) => Err(reason.to_string()),
        };
        let verdict = match (verdict, &file) {
            (Ok(()), Some(file)) if judged => wire::judge(file, &case.interop).map_or(Ok(()), Err),
            (verdict, _) => verdict,
        };
        if let (Some(keep), Some(file)) = (&self.keep, &file) {
            fs::create_dir_all(keep)?;
            fs::copy(file, keep.join(variant.name.replace('/', "-") + ".pcap"))?;
        }
        Ok(verdict.map_err(|reason| Failed {
            reason,
            output: processes
                .iter()
                .map(|(_, process)| process.tail())
                .collect::<Vec<_>>()
                .join("\n"),
        }))
    }

    fn run_programs(
        &self,
        variant: &Variant<'_>,
        port: u16,
        processes: &mut Vec<(Host, Process)>,
    ) -> Result {
        let case = variant.case;
        let end = Instant::now() + case.timeout;
        if let Some(line) = &case.server {
            let process = self.start(variant, Host::Server, line, port)?;
            processes.push((Host::Server, process));
            let Some((_, process)) = processes.last_mut() else {
                return Err("no server".into());
            };
            let latest = Instant::now() + READY.min(case.timeout);
            match process {
                Process::Local(process) => {
                    while !process.listens(port) {
                        if process.poll()?.is_some() {
                            return Err("the server exited before it listened".into());
                        }
                        if Instant::now() > latest {
                            return Err("the server does not listen".into());
                        }
                        sleep(CHECK_EVERY);
                    }
                }
                Process::Remote(remote) => self.guest.await_listener(port, remote, latest)?,
            }
        }
        for line in &case.clients {
            let mut client = self.start(variant, Host::Client, line, port)?;
            let finished = client.finish("client", case.client_exit, end);
            processes.push((Host::Client, client));
            finished?;
        }
        if let Some((Host::Server, server)) = processes.first_mut() {
            server.finish("server", case.server_exit, end)?;
        }
        Ok(())
    }

    /// Starts a program of a case on its host.
    fn start(&self, variant: &Variant<'_>, host: Host, line: &str, port: u16) -> Result<Process> {
        let address = |host: Host| {
            if is_local(variant.server, host) {
                guest::HOST
            } else {
                guest::GUEST
            }
        };
        let line = line
            .replace("{port}", &port.to_string())
            .replace("{server}", address(Host::Server))
            .replace("{client}", address(Host::Client))
            .replace("{own}", address(host));
        if !is_local(variant.server, host) {
            return Ok(Process::Remote(self.guest.start(&line)?));
        }
        let mut words = line.split_whitespace();
        let program = words.next().ok_or("an empty command line")?;
        let mut command = Command::new(sh::dist().join("bin/anywarp"));
        command.args(["run", "--device-ip", guest::HOST, "--"]);
        if program == "peer" {
            command.arg(self.work.join("root/bin/peer"));
        } else if EXS_TTCP.ends_with(program) {
            command.arg(sh::dist().join(EXS_TTCP));
        } else {
            command.arg(program);
        }
        command
            .args(words)
            .current_dir(&self.work)
            .stdin(Stdio::null());
        for name in ["LD_PRELOAD", "LD_LIBRARY_PATH", "ANYWARP_LIB", INSIDE] {
            command.env_remove(name);
        }
        match &self.log {
            Some(level) => command.env("ANYWARP_LOG", level),
            None if !variant.case.interop.log.is_empty() => command.env("ANYWARP_LOG", "info"),
            None => command.env_remove("ANYWARP_LOG"),
        };
        command.envs(variant.case.env.iter().map(|(name, value)| (name, value)));
        Ok(Process::Local(LocalProcess::start(
            command, line, host, &self.work,
        )?))
    }

    /// Checks the output. Returns `None` if it is as expected.
    fn verdict(&self, case: &Case, processes: &[(Host, Process)]) -> Option<String> {
        let logs = self.log.is_some() || !case.interop.log.is_empty();
        let printed = |host: Option<Host>| -> String {
            processes
                .iter()
                .filter(|(h, _)| host.is_none_or(|host| host == *h))
                .map(|(_, process)| process.printed(logs) + "\n")
                .collect()
        };
        for (host, expected) in [
            (Host::Client, &case.stdout),
            (Host::Server, &case.server_stdout),
        ] {
            let text = printed(Some(host));
            if let Some(missing) = expected.iter().find(|regex| !regex.is_match(&text)) {
                let (side, missing) = (host.namespace(), plain(missing.as_str()));
                return Some(format!("the {side} does not print {missing}"));
            }
        }
        let log: String = processes
            .iter()
            .map(|(_, process)| match process {
                Process::Local(process) => process.output("err"),
                Process::Remote(_) => String::new(),
            })
            .collect();
        if let Some(missing) = case.interop.log.iter().find(|regex| !regex.is_match(&log)) {
            let missing = plain(missing.as_str());
            return Some(format!("the log does not contain {missing}"));
        }
        let all = printed(None);
        let found = case.never.iter().find(|regex| regex.is_match(&all))?;
        Some(format!("something prints {}", plain(found.as_str())))
    }
}

/// Returns whether this end runs on anywarp.
fn is_local(server: Server, host: Host) -> bool {
    (server == Server::Anywarp) == (host == Host::Server)
}

/// Returns a file's name for a message.
pub(crate) fn shown(path: &Path) -> String {
    path.display().to_string()
}
