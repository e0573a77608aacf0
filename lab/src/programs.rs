//! `cargo lab programs`: runs unmodified programs of other projects as an ordinary user, and checks their output.
//!
//! Cases that are known to fail, with a reason, run too. If one of them passes, its reason is out of date and
//! the run fails. With `--netns` all processes run in namespaces that end with this process, so that nothing
//! remains.

use crate::process::Process;
use anywarp_core::wire::signpost::Port;
use rustix::process::geteuid;
use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use xtask::expect::{self, Case, Exit, Place, Program};
use xtask::{Result, dist, sh};

/// The ports for cases, which are below the range from which the kernel assigns ports.
const PORTS: std::ops::Range<u16> = 20_000..30_000;
/// The port spaces of rdma_cm whose listeners do not bind the kernel's port with the same number: UDP and IPoIB.
const DATAGRAM_SPACES: [u16; 2] = [0x0111, 0x0002];

/// The pause between two checks of a running program.
pub(crate) const CHECK_EVERY: Duration = Duration::from_millis(10);

/// The longest time until a server has bound its port.
const READY: Duration = Duration::from_secs(10);

/// The time for which a program that should not exit is watched.
const STAY: Duration = Duration::from_millis(1500);

/// The time limit of a skipped case, which runs only to check that it still fails.
const SKIPPED: Duration = Duration::from_secs(8);

/// The time limit of `anywarp doctor`.
const DOCTOR: Duration = Duration::from_secs(60);

/// The number of lines of a program's output that are shown when its case fails.
const TAIL: usize = 12;

/// The most cases of one run that may fail once and pass when they are repeated. Programs of other projects have races, which
/// a loaded machine exposes. The run names each such case, so that repeated failures can be investigated.
const UNSTEADY: usize = 1;

/// The variable that is set when this program runs again inside its namespaces.
pub(crate) const INSIDE: &str = "ANYWARP_LAB_INSIDE";

/// Options of `cargo lab programs`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Only cases with this in their name, which is `PROGRAM/CASE`.
    #[arg(long, value_name = "PART")]
    filter: Option<String>,
    /// Log level of the device; the log is shown when a case fails.
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Run between two network namespaces instead of on loopback.
    #[arg(long)]
    netns: bool,
    /// Include the cases that are marked `nightly`.
    #[arg(long)]
    nightly: bool,
    /// List the cases without running them.
    #[arg(long)]
    list: bool,
    /// Run the programs of the system whose root is this folder (see `cargo lab distros`), in new namespaces over their loopback
    /// interface.
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,
    /// Only programs of these Debian packages.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    packages: Vec<String>,
    /// Only one case of each program.
    #[arg(long)]
    first: bool,
    /// Run `anywarp doctor` first.
    #[arg(long)]
    doctor: bool,
    /// A file with additional cases that do not pass: `PROGRAM/CASE REASON`, or `PROGRAM REASON` for all cases of a program.
    #[arg(long, value_name = "FILE")]
    skips: Option<PathBuf>,
}

impl Options {
    fn selects(&self, name: &str) -> bool {
        self.filter
            .as_ref()
            .is_none_or(|part| name.contains(part.as_str()))
    }

    /// Returns the selected cases.
    fn cases<'a>(&self, programs: &'a [Program]) -> Vec<(&'a Program, &'a Case)> {
        let mut chosen: Vec<(&Program, &Case)> = Vec::new();
        for (program, case) in all(programs) {
            let in_turn = (self.nightly || !case.nightly) && (self.netns || !case.firewall);
            let packaged = self.packages.is_empty() || self.packages.contains(&program.package);
            let seen = chosen.last().is_some_and(|(p, _)| p.name == program.name);
            let name = format!("{}/{}", program.name, case.name);
            if in_turn && packaged && !(self.first && seen) && self.selects(&name) {
                chosen.push((program, case));
            }
        }
        chosen
    }
}

/// Runs the cases that the arguments select.
pub(crate) fn run(options: &Options) -> Result {
    let programs = expect::read()?;
    if options.list {
        for (program, case) in options.cases(&programs) {
            println!("{}/{}", program.name, case.name);
        }
        return Ok(());
    }
    if (options.netns || options.tree.is_some()) && env::var_os(INSIDE).is_none() {
        return in_namespaces();
    }
    let environment = Environment::new(options)?;
    if options.doctor {
        environment.doctor()?;
    }
    let mut tally = Tally::default();
    for (program, case) in options.cases(&programs) {
        tally.judge(&environment, program, case)?;
    }
    tally.report();
    if tally.failed > 0 || tally.unsteady > UNSTEADY {
        return Err("some cases failed".into());
    }
    if tally.passed + tally.skipped == 0 {
        return Err("no case matches the filter".into());
    }
    Ok(())
}

pub(crate) fn all(programs: &[Program]) -> impl Iterator<Item = (&Program, &Case)> {
    programs
        .iter()
        .flat_map(|p| p.cases.iter().map(move |c| (p, c)))
}

/// Replaces this process by one that runs the task again in new network, mount and process namespaces. They are removed with
/// their first process, and the kernel then kills all other processes in them. Returns only if this fails.
pub(crate) fn in_namespaces() -> Result {
    let mut command = Command::new("unshare");
    // The kernel keeps the registered binary formats for each user namespace, so emulation needs a new one.
    if !geteuid().is_root() || sh::cross_target().is_some() {
        command.args(["--user", "--map-root-user"]);
    }
    command
        .args([
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        .arg(env::current_exe()?)
        .args(env::args_os().skip(1))
        .env(INSIDE, "1");
    Err(format!("unshare: {}", command.exec()).into())
}

/// Counts the cases by result, and prints each.
#[derive(Debug, Default)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// The number of cases that failed and then passed when they were repeated.
    unsteady: usize,
    /// The cases that did not pass at first, with the reason. They are printed again at the end.
    reasons: Vec<String>,
}

impl Tally {
    fn report(&self) {
        for line in &self.reasons {
            println!("{line}");
        }
        println!(
            "{} passed, {} of them when repeated; {} failed, {} skipped",
            self.passed, self.unsteady, self.failed, self.skipped
        );
    }

    fn judge(&mut self, environment: &Environment, program: &Program, case: &Case) -> Result {
        let name = format!("{}/{}", program.name, case.name);
        let place = environment.place;
        let start = Instant::now();
        let skipped = environment.skipped(program, case);
        let outcome = environment.run_case(case, skipped.is_some())?;
        let seconds = start.elapsed().as_secs_f64();
        match (outcome, skipped) {
            (Ok(()), None) => {
                self.passed += 1;
                println!("ok    {place:8}  {name}  ({seconds:.1} s)");
            }
            (Err(_), Some(reason)) => {
                self.skipped += 1;
                println!("skip  {place:8}  {name}  {reason}");
            }
            (Ok(()), Some(reason)) => {
                self.failed += 1;
                let line = format!(
                    "FAIL  {place:8}  {name}  passes, although it is skipped with the reason: {reason}"
                );
                println!("{line}");
                self.reasons.push(line);
            }
            (Err(why), None) => {
                self.show("FAIL", &format!("{place:8}  {name}"), &why, seconds);
                let start = Instant::now();
                match environment.run_case(case, false)? {
                    Ok(()) => {
                        self.passed += 1;
                        self.unsteady += 1;
                        println!("ok    {place:8}  {name}  passes when repeated");
                    }
                    Err(again) => {
                        self.failed += 1;
                        let seconds = start.elapsed().as_secs_f64();
                        self.show("AGAIN", &format!("{place:8}  {name}"), &again, seconds);
                    }
                }
            }
        }
        std::io::stdout().flush()?;
        Ok(())
    }

    /// Prints a failure with the output of the programs.
    fn show(&mut self, verdict: &str, name: &str, why: &Failed, seconds: f64) {
        let line = format!("{verdict:5} {name}  {}  ({seconds:.1} s)", why.reason);
        println!("{line}");
        for output in why.output.lines() {
            println!("        {output}");
        }
        self.reasons.push(line);
    }
}

/// Why a case failed, and the last lines of its programs' output.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) reason: String,
    pub(crate) output: String,
}

/// The environment of the cases: the installed files, a folder for output, and two hosts.
struct Environment {
    place: Place,
    work: PathBuf,
    anywarp: PathBuf,
    log: Option<String>,
    /// The root folder of the system whose programs run, if it is another one. It contains `work`.
    tree: Option<PathBuf>,
    /// The cases that do not pass in that system, with the reason.
    skips: BTreeMap<String, String>,
    /// Whether programs are started as an ordinary user, because this process is root.
    drop_root: bool,
}

impl Drop for Environment {
    fn drop(&mut self) {
        let _gone_or_not_ours = fs::remove_dir_all(&self.work);
    }
}

/// One of the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Server,
    Client,
}

impl Host {
    pub(crate) fn namespace(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }

    fn address(self, place: Place, ipv6: bool) -> IpAddr {
        let last = match self {
            Self::Server => 1,
            Self::Client => 2,
        };
        match (place, ipv6) {
            (Place::Loopback, false) => IpAddr::from([127, 0, 0, last]),
            (Place::Loopback, true) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1u16]),
            (Place::Namespaces, false) => IpAddr::from([10, 77, 0, last]),
            (Place::Namespaces, true) => IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, u16::from(last)]),
        }
    }
}

impl Environment {
    fn new(options: &Options) -> Result<Self> {
        let tree = options.tree.as_deref().map(enter).transpose()?;
        let work = match &tree {
            Some(tree) => new_folder(&tree.join("tmp"))?,
            None => new_folder(&env::temp_dir())?,
        };
        fs::set_permissions(&work, fs::Permissions::from_mode(0o755))?;
        // The runtime directory of the programs' user, which is removed at the end.
        fs::create_dir(work.join("run"))?;
        fs::set_permissions(work.join("run"), fs::Permissions::from_mode(0o1777))?;
        let environment = Self {
            place: if options.netns {
                Place::Namespaces
            } else {
                Place::Loopback
            },
            anywarp: work.join("dist/bin/anywarp"),
            work,
            log: options.log.clone(),
            tree,
            skips: match &options.skips {
                Some(file) => skips(
                    &fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?,
                )?,
                None => BTreeMap::new(),
            },
            drop_root: geteuid().is_root() && is_initial_user_namespace(),
        };
        if !sh::dist().join("bin/anywarp").exists() {
            return Err("target/dist does not exist: run `cargo xtask dist` first".into());
        }
        // The installed files are copied to a folder that an ordinary user can read.
        let mut copy = Command::new("cp");
        copy.arg("-rL")
            .arg(sh::dist())
            .arg(environment.work.join("dist"));
        sh::run(&mut copy)?;
        let mut open = Command::new("chmod");
        open.args(["-R", "a+rX,u+w"])
            .arg(environment.work.join("dist"));
        sh::run(&mut open)?;
        for program in ["bin/anywarp", "lib/anywarp/anywarp-selftest"] {
            let path = environment.work.join("dist").join(program);
            if path.exists() {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
            }
        }
        // Commands run in the folder `work`, and name these files as files/NAME.
        dist::copy_tree(
            &sh::root().join("tests/programs/files"),
            &environment.work.join("files"),
        )?;
        let mut open = Command::new("chmod");
        open.args(["-R", "a+rX"])
            .arg(environment.work.join("files"));
        sh::run(&mut open)?;
        if options.netns {
            make_hosts()?;
        }
        Ok(environment)
    }

    /// Returns the reason why a case is expected to fail, if it is.
    fn skipped<'a>(&'a self, program: &Program, case: &'a Case) -> Option<&'a str> {
        let name = format!("{}/{}", program.name, case.name);
        let here = self
            .skips
            .get(&name)
            .or_else(|| self.skips.get(&program.name));
        here.map(String::as_str)
            .or_else(|| case.skipped(self.place))
    }

    /// Runs `anywarp doctor` in the environment of the programs.
    fn doctor(&self) -> Result {
        let words = [
            self.prefix(Host::Client)?,
            vec![self.inside(&self.anywarp)?],
        ]
        .concat();
        let (program, arguments) = words.split_first().ok_or("an empty command line")?;
        let mut command = Command::new(program);
        command.args(arguments).arg("doctor").stdin(Stdio::null());
        let line = "anywarp doctor".to_owned();
        let mut doctor = LocalProcess::start(command, line, Host::Client, &self.work)?;
        let done = doctor.finish(Some(Exit::Code(0)), Instant::now() + DOCTOR);
        doctor.end()?;
        done.map_err(|e| format!("doctor: {e}\n{}", doctor.tail()))?;
        println!("ok    doctor");
        Ok(())
    }

    /// Returns a path as programs in the tree see it.
    fn inside(&self, path: &Path) -> Result<String> {
        let tree = self.tree.as_deref().unwrap_or_else(|| Path::new("/"));
        Ok(format!("/{}", path.strip_prefix(tree)?.display()))
    }

    /// Returns the command prefix for the host, the tree and the user.
    fn prefix(&self, host: Host) -> Result<Vec<String>> {
        let mut words: Vec<String> = Vec::new();
        let mut add = |text: &[&str]| words.extend(text.iter().map(|w| (*w).to_owned()));
        if self.place == Place::Namespaces {
            add(&["ip", "netns", "exec", host.namespace()]);
        }
        if let Some(tree) = &self.tree {
            add(&["chroot"]);
            if self.drop_root {
                add(&["--userspec=65534:65534", "--groups="]);
            }
            let tree = tree.display().to_string();
            add(&[&tree, "env", "-C", &self.inside(&self.work)?]);
        } else if self.drop_root {
            add(&[
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "--",
            ]);
        }
        Ok(words)
    }

    /// Runs a case. The outer error is one of the test environment, the inner one a failure of the case.
    fn run_case(&self, case: &Case, skipped: bool) -> Result<std::result::Result<(), Failed>> {
        let mut processes = Processes::default();
        self.remove(&case.removes);
        let outcome = self.run_programs(case, skipped, &mut processes);
        for process in processes.server.iter_mut().chain(&mut processes.clients) {
            process.end()?;
        }
        self.remove(&case.removes);
        let reason = match outcome {
            Ok(()) => processes.verdict(case, self.log.is_some()),
            Err(reason) => Some(reason.to_string()),
        };
        Ok(match reason {
            None => Ok(()),
            Some(reason) => Err(Failed {
                reason,
                output: processes.tails(),
            }),
        })
    }

    /// Removes files of the system whose programs run.
    fn remove(&self, files: &[String]) {
        let root = self.tree.as_deref().unwrap_or_else(|| Path::new("/"));
        for file in files {
            let _not_there = fs::remove_file(root.join(file.trim_start_matches('/')));
        }
    }

    /// Starts the server, waits for it, runs the clients, and waits for the server's exit.
    fn run_programs(&self, case: &Case, skipped: bool, processes: &mut Processes) -> Result {
        let limit = if skipped {
            case.timeout.min(SKIPPED)
        } else {
            case.timeout
        };
        let end = Instant::now() + limit;
        let port = case.port.map_or_else(free_port, Ok)?;
        let _firewall = case.firewall.then(|| Firewall::new(port)).transpose()?;

        if let Some(line) = &case.server {
            let process = self.start(Host::Server, line, case, port)?;
            let server = processes.server.insert(process);
            let settled = case.settle.map(|time| Instant::now() + time);
            let latest = Instant::now() + READY.min(limit);
            while !settled.map_or_else(|| server.listens(port), |time| Instant::now() >= time) {
                if server.poll()?.is_some() {
                    return Err("the server exited before it listened".into());
                }
                if Instant::now() > latest {
                    return Err(format!("the server does not listen on port {port}").into());
                }
                sleep(CHECK_EVERY);
            }
        }
        for line in &case.clients {
            let mut client = self.start(Host::Client, line, case, port)?;
            let finished = client.finish(case.client_exit, end);
            processes.clients.push(client);
            finished?;
        }
        if let Some(server) = &mut processes.server {
            server.finish(case.server_exit, end)?;
        }
        Ok(())
    }

    /// Starts a program of a case on its host.
    fn start(&self, host: Host, line: &str, case: &Case, port: u16) -> Result<LocalProcess> {
        let address = |host: Host| host.address(self.place, case.ipv6).to_string();
        let line = line
            .replace("{port}", &port.to_string())
            .replace("{server}", &address(Host::Server))
            .replace(
                "{server4}",
                &Host::Server.address(self.place, false).to_string(),
            )
            .replace("{client}", &address(Host::Client))
            .replace("{own}", &address(host));
        let mut words = self.prefix(host)?;
        let mut add = |text: &[&str]| words.extend(text.iter().map(|w| (*w).to_owned()));
        add(&[&self.inside(&self.anywarp)?, "run", "--"]);
        add(&line.split_whitespace().collect::<Vec<&str>>());

        let (program, arguments) = words.split_first().ok_or("an empty command line")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(&self.work)
            .stdin(Stdio::null());
        for name in [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "ANYWARP_LOG",
            "ANYWARP_ADDR",
            "ANYWARP_FACE",
            "ANYWARP_DEVICE_PROFILE",
            "ANYWARP_LIB",
            INSIDE,
        ] {
            command.env_remove(name);
        }
        command
            .env("HOME", self.inside(&self.work)?)
            .env("XDG_RUNTIME_DIR", self.inside(&self.work.join("run"))?);
        match self.place {
            // The client uses the server's address too: its own, 127.0.0.2, is not listed at the loopback
            // interface, so it is not a GID.
            Place::Loopback => command.env("ANYWARP_ADDR", address(Host::Server)),
            Place::Namespaces if case.ipv6 => command.env("ANYWARP_ADDR", address(host)),
            Place::Namespaces => &mut command,
        };
        if let Some(level) = &self.log {
            command.env("ANYWARP_LOG", level);
        }
        command.envs(case.env.iter().map(|(name, value)| (name, value)));
        LocalProcess::start(command, line, host, &self.work)
    }
}

/// Creates a new folder for one run. The process id is not enough for a unique name, because in a namespace it is always the same.
pub(crate) fn new_folder(within: &Path) -> Result<PathBuf> {
    for attempt in 0..1000_u32 {
        let name = format!("anywarp-programs-{}-{attempt}", std::process::id());
        let path = within.join(name);
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(format!("{}: {e}", path.display()).into()),
        }
    }
    Err("no unused name for a folder was found".into())
}

/// Returns whether this process is in the initial user namespace, where root can change to any other user.
pub(crate) fn is_initial_user_namespace() -> bool {
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().last() == Some("4294967295"))
}

/// Parses a file of `--skips`; `#` starts a comment.
fn skips(text: &str) -> Result<BTreeMap<String, String>> {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim());
    let pair = |line: &str| {
        let (name, reason) = line
            .split_once(char::is_whitespace)
            .ok_or("a name without a reason")?;
        Ok((name.to_owned(), reason.trim().to_owned()))
    };
    lines.filter(|line| !line.is_empty()).map(pair).collect()
}

/// Mounts the usual system folders in a tree, in this process's mount namespace. Returns the canonical path of the tree.
fn enter(tree: &Path) -> Result<PathBuf> {
    const SCRIPT: &str = "set -e
ip link set lo up
ip route add 224.0.0.0/4 dev lo
cd \"$1\"
mkdir -p proc sys dev tmp
chmod 1777 tmp
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
";
    let tree = tree
        .canonicalize()
        .map_err(|e| format!("{}: {e}", tree.display()))?;
    sh::run(Command::new("sh").args(["-c", SCRIPT, "enter"]).arg(&tree))?;
    if sh::cross_target().is_some() {
        emulate(&sh::arch())?;
    }
    Ok(tree)
}

/// Registers qemu-user for programs of another architecture, in the user namespace of this process.
fn emulate(arch: &str) -> Result {
    const DIR: &str = "/proc/sys/fs/binfmt_misc";
    // The ELF header before the field `e_machine`, with the mask of each byte: 64 bits, little endian, an executable or a library.
    const HEAD: &str = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00";
    const MASK: &str =
        r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff";
    let machine = match arch {
        "aarch64" => r"\xb7\x00",
        other => return Err(format!("programs of {other} are not emulated").into()),
    };
    let mut mount = Command::new("mount");
    sh::run(mount.args(["-t", "binfmt_misc", "binfmt_misc", DIR]))
        .map_err(|e| format!("{e} (formats of a user namespace need Linux 6.7)"))?;
    // P: the program gets its original argv[0]. F: the kernel opens the interpreter now, so the tree needs none.
    let entry = format!(":{arch}:M::{HEAD}{machine}:{MASK}:/usr/bin/qemu-{arch}-static:PF");
    fs::write(format!("{DIR}/register"), entry)
        .map_err(|e| format!("qemu-user-static is needed: {e}").into())
}

/// Creates two hosts with a link between them, in this process's namespaces.
fn make_hosts() -> Result {
    const SCRIPT: &str = "set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip netns add server
ip netns add client
ip link add wire netns server type veth peer name wire netns client
for host in server:1 client:2; do
    name=${host%:*} number=${host#*:}
    ip -n $name link set lo up
    ip -n $name addr add 10.77.0.$number/24 dev wire
    ip -n $name addr add fd77::$number/64 dev wire nodad
    ip -n $name link set wire up
    ip -n $name route add 224.0.0.0/4 dev wire
done
for i in 1 2 3 4 5 6 7 8 9 10; do
    ip netns exec client sh -c 'grep -q 1 /sys/class/net/wire/carrier' && exit 0
    sleep 0.1
done
echo 'the wire between the namespaces does not come up' >&2
exit 1
";
    sh::run(Command::new("sh").args(["-c", SCRIPT]))
}

/// Rules of both hosts that drop TCP packets from the other host, except those of one port. Dropping this value removes them.
struct Firewall;

impl Firewall {
    fn new(port: u16) -> Result<Self> {
        // Routing rules are used, because iptables and nftables are not always installed. The rule for the table of local addresses usually
        // has the first priority, 0. Here it gets the priority 100, so that the rules that drop packets (60) apply before it.
        const SCRIPT: &str = "set -e
for host in server client; do
    ip -n $host rule add pref 100 lookup local
    ip -n $host rule del pref 0
    ip -n $host rule add pref 50 iif wire ipproto tcp dport $1 lookup local
    ip -n $host rule add pref 51 iif wire ipproto tcp sport $1 lookup local
    ip -n $host rule add pref 60 iif wire ipproto tcp blackhole
done
";
        let rules = Self;
        let mut add = Command::new("sh");
        sh::run(add.args(["-c", SCRIPT, "firewall", &port.to_string()]))?;
        Ok(rules)
    }
}

impl Drop for Firewall {
    fn drop(&mut self) {
        const SCRIPT: &str = "for host in server client; do
    ip -n $host rule add pref 0 lookup local
    for pref in 50 51 60 100; do
        ip -n $host rule del pref $pref
    done
done
";
        if let Err(why) = sh::run(Command::new("sh").args(["-c", SCRIPT])) {
            eprintln!("the rules of a case are not removed: {why}");
        }
    }
}

/// Returns a port that is free for TCP and for UDP.
pub(crate) fn free_port() -> Result<u16> {
    // The start depends on the process and the case, so that concurrent runs rarely choose the same port.
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    let span = PORTS.end - PORTS.start;
    let first = u16::try_from(std::process::id() % u32::from(span)).unwrap_or_default();
    for _ in 0..span {
        let step = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let port = PORTS.start + (first.wrapping_add(step)) % span;
        let free = |address: &str| {
            TcpListener::bind((address, port)).is_ok() && UdpSocket::bind((address, port)).is_ok()
        };
        if free("0.0.0.0") && free("::") {
            return Ok(port);
        }
    }
    Err("no free port".into())
}

/// The programs of a case.
#[derive(Debug, Default)]
struct Processes {
    server: Option<LocalProcess>,
    clients: Vec<LocalProcess>,
}

impl Processes {
    fn all(&self) -> impl Iterator<Item = &LocalProcess> {
        self.server.iter().chain(&self.clients)
    }

    fn of(&self, host: Host) -> impl Iterator<Item = &LocalProcess> {
        self.all().filter(move |p| p.host == host)
    }

    /// Checks the output. Returns `None` if it is as expected. With `logs`, standard error contains logs and
    /// is not checked.
    fn verdict(&self, case: &Case, logs: bool) -> Option<String> {
        let printed = |host| {
            self.of(host)
                .map(|p| p.output("out"))
                .collect::<Vec<_>>()
                .join("\n")
        };
        for (host, expected) in [
            (Host::Client, &case.stdout),
            (Host::Server, &case.server_stdout),
        ] {
            let text = printed(host);
            if let Some(missing) = expected.iter().find(|regex| !regex.is_match(&text)) {
                let side = host.namespace();
                return Some(format!(
                    "the {side} does not print {}",
                    plain(missing.as_str())
                ));
            }
        }
        let streams: &[&str] = if logs { &["out"] } else { &["out", "err"] };
        let everything: String = self
            .all()
            .flat_map(|p| streams.iter().map(|stream| p.output(stream)))
            .collect();
        let found = case
            .never
            .iter()
            .find(|regex| regex.is_match(&everything))?;
        let line = everything.lines().find(|line| found.is_match(line));
        Some(match line {
            Some(line) => format!("something prints {}: {line}", plain(found.as_str())),
            None => format!("something prints {}", plain(found.as_str())),
        })
    }

    fn tails(&self) -> String {
        self.all()
            .map(LocalProcess::tail)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Returns a pattern as written in the file.
pub(crate) fn plain(pattern: &str) -> &str {
    pattern.strip_prefix("(?m)").unwrap_or(pattern)
}

/// A program that is running or has exited.
#[derive(Debug)]
pub(crate) struct LocalProcess {
    host: Host,
    line: String,
    process: Process,
    /// The path of its output files, without `.out` and `.err`.
    files: PathBuf,
}

impl LocalProcess {
    pub(crate) fn start(
        mut command: Command,
        line: String,
        host: Host,
        work: &Path,
    ) -> Result<Self> {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let files = work.join(format!("output-{number}"));
        command
            .stdout(File::create(files.with_extension("out"))?)
            .stderr(File::create(files.with_extension("err"))?);
        let process = Process::start_group(&mut command).map_err(|e| format!("{line}: {e}"))?;
        Ok(Self {
            host,
            line,
            process,
            files,
        })
    }

    pub(crate) fn poll(&mut self) -> Result<Option<ExitStatus>> {
        self.process.poll()
    }

    /// Returns whether the program's network namespace has a bound port of this number, or the signpost of a datagram port of rdma_cm: the UDP
    /// socket that tells peers which UDP port the listener uses. Connected sockets do not count.
    pub(crate) fn listens(&self, port: u16) -> bool {
        let candidates = DATAGRAM_SPACES.map(|space| {
            Port {
                space,
                number: port,
            }
            .candidate_ports()
        });
        ["tcp", "tcp6", "udp", "udp6"].iter().any(|table| {
            let path = format!("/proc/{}/net/{table}", self.process.id());
            fs::read_to_string(path).is_ok_and(|text| {
                let signpost = |candidate: &u16| has_bound_port(&text, table, *candidate);
                has_bound_port(&text, table, port)
                    || table.starts_with("udp") && candidates.iter().flatten().any(signpost)
            })
        })
    }

    /// Waits for the expected exit.
    pub(crate) fn finish(&mut self, expected: Option<Exit>, end: Instant) -> Result {
        let side = self.host.namespace();
        let Some(expected) = expected else {
            if let Some(status) = self.process.wait(STAY)? {
                return Err(format!("the {side} should not exit, but exited with {status}").into());
            }
            return self.end();
        };
        let left = end.saturating_duration_since(Instant::now());
        let status = self.process.wait(left)?;
        let status = status.ok_or_else(|| format!("the {side} did not exit in time"))?;
        match expected {
            Exit::Code(code) if status.code() != Some(code) => {
                Err(format!("the {side} ends with {status}, expected {code}").into())
            }
            _ => Ok(()),
        }
    }

    /// Kills the program and the processes that it has started.
    pub(crate) fn end(&mut self) -> Result {
        self.process.end()
    }

    pub(crate) fn output(&self, which: &str) -> String {
        let bytes = fs::read(self.files.with_extension(which)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn tail(&self) -> String {
        let status = self
            .process
            .ended()
            .map_or_else(|| "ended by us".to_owned(), |status| status.to_string());
        let mut text = format!("{}: {} ({status})", self.host.namespace(), self.line);
        for which in ["out", "err"] {
            let output = self.output(which);
            let lines: Vec<&str> = output.lines().collect();
            for line in lines.iter().skip(lines.len().saturating_sub(TAIL)) {
                text.push_str(&format!("\n  {which}| {line}"));
            }
        }
        text
    }
}

/// Looks for a bound port in a table of /proc/net: a TCP socket must be listening.
fn has_bound_port(text: &str, table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    text.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (Some(local), Some(_remote), Some(state)) = (words.next(), words.next(), words.next())
        else {
            return false;
        };
        local.ends_with(&suffix) && (table.starts_with("udp") || state == LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_port_is_detected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/self/net/tcp").unwrap();

        assert!(has_bound_port(&table, "tcp", port));
        drop(listener);
        // A process that another test starts inherits the socket until it calls exec.
        let end = Instant::now() + Duration::from_secs(5);
        let bound = || {
            let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
            has_bound_port(&table, "tcp", port)
        };
        while bound() {
            assert!(Instant::now() < end);
            sleep(CHECK_EVERY);
        }
    }
}
