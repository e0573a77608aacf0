//! `cargo lab c-tests`: compiles the C programs of tests/c against the distribution's headers and libraries, and runs them
//! with anywarp's libraries.

use crate::beside;
use rustix::process::geteuid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use xtask::{Result, link, sh, symbols};

/// The programs. Each of them is one file in `tests/c`, except [`EXAMPLES`]. The longest come first.
const PROGRAMS: &[&str] = &[
    "chaos",
    "cm",
    "faults",
    "selftest",
    "vanish",
    FI,
    FI_QUICK,
    PANIC,
    EXS_MANY,
    EXS,
    "access",
    "addresses",
    BUFFERS,
    "counters",
    "dv",
    "foreign",
    EXAMPLES,
    EXS_HOSTILE,
    EXS_NETPERF,
    "fork",
    "group",
    "nccl",
    "newer",
    "ports",
    "profiles",
    "qos",
    "rsockets",
    "surface",
    "trunk",
    ELEVATED,
    "fair",
    "flood",
    "hostile",
    "carrier",
    "pages",
    "scale",
    "scarce",
    "stat",
    "strangers",
];

/// The program that is linked to anywarp's libraries by path, because the loader ignores environment variables in a
/// set-group-ID program.
const ELEVATED: &str = "elevated";

/// The program that tests the provider for libfabric.
const FI: &str = "fi";

/// The program that checks what libfabric's own tests require of the provider.
const FI_QUICK: &str = "fi_quick";

/// The program that is linked to libanywarp-buffers.
pub(crate) const BUFFERS: &str = "buffers";

/// The prefix of programs that are linked to libexs, whose header and library belong to this project.
pub(crate) const EXS: &str = "exs";

/// A peer of extended sockets that violates their protocol.
const EXS_HOSTILE: &str = "exs_hostile";

/// Many sockets, threads and queues of extended sockets, and peers that are killed.
const EXS_MANY: &str = "exs_many";

/// A program in the style of existing programs for the ES-API.
const EXS_NETPERF: &str = "exs_netperf";

/// The programs of the man pages in `docs/man/examples`. Each exits with 0 on success.
const EXAMPLES: &str = "examples";

/// The program that needs a build with debug assertions, in which a function of the library panics on request.
const PANIC: &str = "panic";

/// Programs that run again with this value of `ANYWARP_CARRIER`, the transport between processes of one host. `tcp` keeps
/// connections on TCP. `eager` moves them to shared memory before the first request. The default, `auto`, moves them after
/// some requests, so most tests end before that. [`TRUNK`] stands for `tcp` with a trunk, which is one TCP connection for many
/// queue pairs, from the first request on.
const CARRIERS: &[(&str, &str)] = &[
    ("selftest", "eager"),
    ("selftest", "tcp"),
    ("selftest", TRUNK),
    ("cm", "eager"),
    ("cm", TRUNK),
    ("access", "eager"),
    ("chaos", "eager"),
    ("chaos", "tcp"),
    ("chaos", TRUNK),
    ("counters", "eager"),
    ("counters", TRUNK),
    ("vanish", "eager"),
    ("vanish", "tcp"),
    ("vanish", TRUNK),
    ("fork", "eager"),
    ("fork", TRUNK),
    ("fi", "tcp"),
];

/// The test of `chaos` that does not run with [`TRUNK`]: its peer exits without having acknowledged all requests, about when the hand-over
/// of its queue pair to the trunk takes place. A message of the hand-over to a process that has ended is answered by a reset, after which it is
/// unknown what the peer had received.
const NOT_DURING_A_HAND_OVER: &str = "--without=peer_takes_and_ends";

/// See [`CARRIERS`].
const TRUNK: &str = "tcp and ANYWARP_TRUNK=eager";

/// The beginning of the names of those tests of `fi` in which endpoints make a connection.
const OF_CONNECTIONS: &str = "link";

/// Tests of `chaos` whose connections use datagrams, whatever `ANYWARP_CARRIER` is.
const OF_DATAGRAMS: [&str; 2] = [
    "--without=killed_peer_over_datagrams",
    "--without=killed_peer_with_loss",
];

/// Programs that run a second time with IPv6. Their peers are plain sockets: invalid peers, and a second implementation of the
/// datagram format.
const IPV6: &[&str] = &["foreign", "flood", "strangers"];

/// Returns a command that runs the program on the loopback interface, whatever other addresses this machine has.
fn on_loopback(binary: &Path, address: &str) -> Command {
    let mut command = Command::new(sh::dist().join("bin/anywarp"));
    command
        .args(["run", "--device-ip", address, "--"])
        .arg(binary);
    command
}

/// Programs that measure time or memory, or that load the whole machine. They run alone, one after the other.
const ALONE: &[&str] = &[
    "carrier",
    "fair",
    "flood",
    "hostile",
    "pages",
    "scale",
    "scarce",
    "stat",
    "strangers",
];

/// Builds and runs the programs. `arguments` are names of programs, or one program and parts of test names.
pub(crate) fn run(arguments: &[&str]) -> Result {
    let work = sh::target().join("c-tests");
    fs::create_dir_all(&work)?;
    let skips = Skips::read()?;
    let failed = match arguments.split_first() {
        None => run_all(&work, &skips)?,
        Some((name, tests)) if PROGRAMS.contains(name) => run_program(name, tests, &work, &skips)?,
        Some((name, _)) => {
            return Err(format!(
                "c-tests: {name}: no such program among {}",
                PROGRAMS.join(", ")
            )
            .into());
        }
    };
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("C tests fail: {}", failed.join(", ")).into())
}

/// Runs all programs. Returns the names of those that failed.
fn run_all(work: &Path, skips: &Skips) -> Result<Vec<String>> {
    let (alone, beside): (Vec<&str>, Vec<&str>) =
        PROGRAMS.iter().partition(|name| ALONE.contains(name));
    let this = std::env::current_exe()?;
    // One program more than there are processors runs at a time, because as many as there are processors leave half of the processor
    // time unused.
    let failed = beside::run(&beside, 1, |name| {
        let mut command = Command::new(&this);
        command.args(["c-tests", name]);
        Ok(beside::in_namespace(command).output()?.into())
    })?;
    let mut failed: Vec<String> = failed.into_iter().map(str::to_owned).collect();
    for name in alone {
        let begin = Instant::now();
        failed.extend(run_program(name, &[], work, skips)?);
        println!("   {name}: {} s", begin.elapsed().as_secs());
    }
    Ok(failed)
}

/// Builds one program and runs it in all its variants. Returns the variants that failed.
fn run_program(name: &str, tests: &[&str], work: &Path, skips: &Skips) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    println!("== {name}");
    if name == EXAMPLES {
        if !run_examples(work)? {
            failed.push(name.to_owned());
        }
        return Ok(failed);
    }
    let binary = build(name, &work.join(name))?;
    let mut command = if name == PANIC {
        on_debug_build(&binary)?
    } else {
        on_loopback(&binary, "127.0.0.1")
    };
    command.args(tests);
    if !run_one(&mut command, name, work, skips)? {
        failed.push(name.to_owned());
    }
    if name == EXS && tests.is_empty() && !run_ttcp()? {
        failed.push("exs-ttcp".to_owned());
    }
    if IPV6.contains(&name) {
        println!("== {name} over IPv6");
        if let Err(e) = std::net::UdpSocket::bind("[::1]:0") {
            println!("skip: this machine has no IPv6: {e}");
        } else {
            let mut command = on_loopback(&binary, "::1");
            command.env("TEST_ADDR", "::1");
            if !run_one(command.args(tests), name, work, skips)? {
                failed.push(format!("{name} over IPv6"));
            }
        }
    }
    for (_, carrier) in CARRIERS.iter().filter(|(n, _)| *n == name) {
        println!("== {name} with ANYWARP_CARRIER={carrier}");
        if *carrier == TRUNK {
            command.env("ANYWARP_TRUNK", "eager");
            command.env("ANYWARP_CARRIER", "tcp");
            if name == "chaos" {
                command.arg(NOT_DURING_A_HAND_OVER);
            }
        } else {
            command.env_remove("ANYWARP_TRUNK");
            command.env("ANYWARP_CARRIER", carrier);
        }
        if name == "chaos" {
            command.args(OF_DATAGRAMS);
        }
        if name == "fi" && tests.is_empty() {
            command.arg(OF_CONNECTIONS);
        }
        if !run_one(&mut command, name, work, skips)? {
            failed.push(format!("{name} with ANYWARP_CARRIER={carrier}"));
        }
    }
    Ok(failed)
}

/// Examples that recover from lost datagrams. They run with injected faults too.
const EXAMPLES_WITH_LOSS: &[&str] = &["repair_record", "record_completions"];

/// Compiles the programs of the man pages as anywarpdv(7) describes, and runs them. Returns whether all passed.
fn run_examples(work: &Path) -> Result<bool> {
    let lib = sh::dist().join("lib/anywarp");
    let mut linked = vec![
        format!("-I{}", sh::dist().join("include").display()),
        format!("-L{}", lib.display()),
        format!("-Wl,-rpath,{}", lib.display()),
    ];
    let by_pkg_config = [with_pkg_config("exs")?, with_pkg_config("anywarp-buffers")?].concat();
    linked.extend(by_pkg_config);
    let mut all = true;
    for entry in fs::read_dir(sh::root().join("docs/man/examples"))? {
        let source = entry?.path();
        let name = source.file_stem().unwrap_or_default().to_string_lossy();
        let binary = compile(&source, &work.join(format!("example-{name}")), &linked)?;
        let loss = EXAMPLES_WITH_LOSS.contains(&&*name).then_some("loss=10%");
        for faults in std::iter::once("").chain(loss) {
            let mut command = Command::new(&binary);
            // libexs has no run path for the verbs libraries that it needs.
            command.env("LD_LIBRARY_PATH", &lib);
            if !faults.is_empty() {
                command.env("ANYWARP_FAULTS", faults);
            }
            let output = command.env("ANYWARP_ADDR", "127.0.0.1").output()?;
            if output.status.success() {
                println!(
                    "ok {name}{}{faults}",
                    if faults.is_empty() { "" } else { " " }
                );
            } else {
                let error = String::from_utf8_lossy(&output.stderr);
                println!("FAIL {name} {faults}: {}: {error}", output.status);
                all = false;
            }
        }
    }
    Ok(all)
}

/// Arguments that exs-ttcp refuses with status 2.
const WRONG_TTCP: [&str; 7] = [
    "",
    "--self 127.0.0.1",
    "--self --listen",
    "--listen --port 65536",
    "--listen --port https",
    "127.0.0.1 --keep",
    "--self --size 17M",
];

/// Runs each mode of exs-ttcp briefly and compares all bytes. Returns whether all passed.
fn run_ttcp() -> Result<bool> {
    let bin = sh::dist().join("bin");
    let mut all = true;
    for words in WRONG_TTCP {
        // In `anywarp run`, so that a mistake that is not found gives another status than 2.
        let mut command = Command::new("timeout");
        command.arg("20").arg(bin.join("anywarp"));
        command.args(["run", "--"]).arg(bin.join("exs-ttcp"));
        command.args(words.split_whitespace());
        let output = command.output()?;
        if output.status.code() != Some(2) {
            println!("FAIL exs-ttcp {words}: {}", output.status);
            all = false;
        }
    }
    for mode in [
        "normal",
        "read",
        "immediate",
        "persistent-send",
        "persistent-recv",
        "tcp",
        "transaction",
    ] {
        if mode != "tcp" {
            // Only the mode `tcp` has Nagle's algorithm. The other modes refuse the option.
            let mut command = Command::new(bin.join("anywarp"));
            command.args(["run", "--"]).arg(bin.join("exs-ttcp"));
            command.args(["--self", "--nagle", "--mode", mode]);
            let output = command.output()?;
            if output.status.code() != Some(2) {
                println!("FAIL exs-ttcp {mode} --nagle: {}", output.status);
                all = false;
            }
        }
        for more in [&[][..], &["--ping"], &["--stream", "--in-flight", "64"]] {
            if mode == "transaction" && more == ["--ping"] {
                continue;
            }
            let mut command = Command::new(bin.join("anywarp"));
            command
                .args(["run", "--device-ip", "127.0.0.1", "--"])
                .arg(bin.join("exs-ttcp"))
                .args(["--self", "--verify", "--json", "--size", "1,7,4K,100001"])
                .args(["--count", "150", "--mode", mode])
                .args(more);
            let output = command.output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let rows = text.lines().filter(|l| l.contains("\"verified\": \"all\""));
            if output.status.success() && rows.count() == 4 {
                println!("ok exs-ttcp {mode} {}", more.join(" "));
            } else {
                let error = String::from_utf8_lossy(&output.stderr);
                println!("FAIL exs-ttcp {mode} {}: {error}", more.join(" "));
                all = false;
            }
        }
    }
    Ok(all)
}

/// Runs a program. Returns whether it passed and skipped only tests that it may skip.
fn run_one(command: &mut Command, program: &str, work: &Path, skips: &Skips) -> Result<bool> {
    let skipped = work.join(format!("{program}.skipped"));
    fs::write(&skipped, "")?;
    let mut passed = command.env("CHECK_SKIPS", &skipped).status()?.success();
    for line in fs::read_to_string(&skipped)?.lines() {
        let test = line.split_whitespace().next().unwrap_or_default();
        if !skips.allow(program, test) {
            println!("FAIL {program} skips {line}: not in tests/c/skips.expect for this machine");
            passed = false;
        }
    }
    Ok(passed)
}

/// The tests that may skip themselves on this machine.
struct Skips(Vec<(String, String)>);

impl Skips {
    fn read() -> Result<Self> {
        let text = fs::read_to_string(sh::root().join("tests/c/skips.expect"))?;
        Self::parse(&text, holds)
    }

    /// Parses the entries whose condition `holds`.
    fn parse(text: &str, holds: impl Fn(&str) -> Option<bool>) -> Result<Self> {
        let mut allowed = Vec::new();
        for line in text
            .lines()
            .filter(|l| !l.starts_with('#') && !l.is_empty())
        {
            let mut words = line.split_whitespace();
            let (Some(program), Some(test), Some(when), Some(_why)) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                return Err(format!(
                    "tests/c/skips.expect: {line}: expected program, test, condition, reason"
                )
                .into());
            };
            match holds(when) {
                Some(true) => allowed.push((program.to_owned(), test.to_owned())),
                Some(false) => {}
                None => {
                    return Err(format!("tests/c/skips.expect: {when}: no such condition").into());
                }
            }
        }
        Ok(Self(allowed))
    }

    fn allow(&self, program: &str, test: &str) -> bool {
        let matches = |(p, t): &(String, String)| p == program && (t == "*" || t == test);
        self.0.iter().any(matches)
    }
}

/// Returns whether a condition of `skips.expect` holds on this machine, or `None` if there is no such condition.
fn holds(when: &str) -> Option<bool> {
    let fails = |program: &str, arguments: &[&str]| {
        let made = Command::new(program).args(arguments).output();
        !made.is_ok_and(|output| output.status.success())
    };
    let bridge = "ip link add anywarp0 type bridge";
    Some(match when {
        "unprivileged" => !geteuid().is_root(),
        "no-netns" => fails("unshare", &["--net", "sh", "-c", bridge]),
        "no-ptrace" => {
            fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| {
                scope.trim() != "0" && !(scope.trim() == "1" && geteuid().is_root())
            })
        }
        _ => return None,
    })
}

/// Returns a command that runs a program with libraries with debug assertions, which are built here.
fn on_debug_build(binary: &Path) -> Result<Command> {
    sh::run(sh::cargo().args(["build", "--quiet", "--package=anywarp-abi"]))?;
    let lib = sh::target().join("debug-lib");
    if lib.exists() {
        fs::remove_dir_all(&lib)?;
    }
    link::run(
        &symbols::read()?,
        &sh::target().join("debug/libanywarp_abi.a"),
        &sh::target().join("debug-link"),
        &lib,
        None,
    )?;
    let mut command = Command::new(binary);
    command
        .env("LD_LIBRARY_PATH", &lib)
        .env("LD_PRELOAD", lib.join(symbols::IBVERBS))
        .env("ANYWARP_ADDR", "127.0.0.1")
        .env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// Compiles `tests/c/NAME.c` to `to`, like a program of the distribution.
pub(crate) fn build(name: &str, to: &Path) -> Result<PathBuf> {
    let source = sh::root().join("tests/c").join(name);
    let mut by_path = Vec::new();
    if name == ELEVATED {
        by_path.push(format!(
            "-Wl,-rpath,{}",
            sh::dist().join("lib/anywarp").display()
        ));
    }
    if is_on_libfabric(name) {
        by_path.push("-lfabric".to_owned());
    }
    if let Some(library) = above(name) {
        by_path = linked_above(library);
    }
    compile(&source.with_extension("c"), to, &by_path)
}

/// Returns whether a program is linked to libfabric.
pub(crate) fn is_on_libfabric(name: &str) -> bool {
    [FI, FI_QUICK].contains(&name)
}

/// Returns the name of the library based on verbs that a program is linked with, if any.
pub(crate) fn above(name: &str) -> Option<&'static str> {
    if name == BUFFERS {
        Some("anywarp-buffers")
    } else {
        name.starts_with(EXS).then_some("exs")
    }
}

/// Returns the compiler arguments for programs that use a library based on verbs.
fn linked_above(library: &str) -> Vec<String> {
    let dist = sh::dist();
    vec![
        format!("-I{}", dist.join("include").display()),
        format!("-L{}", dist.join("lib").display()),
        format!("-Wl,-rpath,{}", dist.join("lib").display()),
        format!("-l{library}"),
    ]
}

/// Returns the compiler arguments that pkg-config prints for a library in `target/dist`.
fn with_pkg_config(library: &str) -> Result<Vec<String>> {
    let output = Command::new("pkg-config")
        .env("PKG_CONFIG_PATH", sh::dist().join("lib/pkgconfig"))
        .args(["--cflags", "--libs", library])
        .output()?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("pkg-config {library}: {error}").into());
    }
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

/// Like [`build`], for any source file.
pub(crate) fn build_from(source: &Path, to: &Path) -> Result<PathBuf> {
    compile(source, to, &[])
}

fn compile(source: &Path, to: &Path, more: &[String]) -> Result<PathBuf> {
    let mut cc = sh::cc();
    cc.args([
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Werror",
        "-o",
    ])
    .arg(to)
    .arg(source)
    .args(more)
    .args(["-libverbs", "-lrdmacm", "-lpthread", "-lm"]);
    sh::run(&mut cc)?;
    Ok(to.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_tests_may_skip_themselves_where_their_condition_holds() {
        let text = "# why\n\na * yes because\nb one yes because\nc * no because\n";
        let holds = |when: &str| Some(when == "yes");
        let skips = Skips::parse(text, holds).unwrap();
        assert!(skips.allow("a", "x") && skips.allow("b", "one"));
        assert!(!skips.allow("b", "two") && !skips.allow("c", "x") && !skips.allow("d", "x"));
        assert!(Skips::parse("a *", holds).is_err());
        assert!(Skips::parse("a * when why", |_| None).is_err());
    }
}
