//! `cargo lab sanitize`: runs unit tests and the C programs, and with `--long` the simulation, with AddressSanitizer or ThreadSanitizer.
//!
//! ```text
//!   C program, compiled with the sanitizer by cc  ──┐
//!   the sanitizer's runtime of the Rust toolchain ──┴─> the program
//!   Rust crates, compiled with it by nightly rustc ───> libibverbs.so.1
//! ```
//!
//! One runtime serves both compilers. The standard library is not compiled with the sanitizer. AddressSanitizer sees its
//! allocations nevertheless; for ThreadSanitizer `lab/sanitize/sync.rs` reports what its locks do. System calls are made
//! directly, as in production, not through libc: libc's functions are cancellation points, so a thread could be cancelled in
//! the middle of a verb.
//!
//! Each process writes its reports to a file, so that a report of a child process is found even if its parent has killed it
//! or ignores its exit status.

use crate::beside::{self, Done};
use crate::c_tests;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use xtask::{Result, link, sh, symbols};

/// The name that stands for the unit tests in a list of programs.
const UNIT: &str = "unit";

/// The default programs, with arguments that limit their duration. The longest come first.
///
/// Some tests of `strangers` measure the effect of many connections against the clock. With a sanitizer everything is ten times
/// slower, so only the tests that open one connection at a time run.
const SHORT: &[(&str, &[&str])] = &[
    (UNIT, &[]),
    ("chaos", &["--rounds", "3", "--cycles", "50"]),
    ("fork", &[]),
    (FI, OF_FI),
    ("fi_quick", &[]),
    ("scale", &["--qps=32", "--threads=8"]),
    ("selftest", &[]),
    ("cm", &[]),
    (
        "ports",
        &["plain", "rdma", "release", "bind_race", "forked"],
    ),
    ("access", &[]),
    ("addresses", &[]),
    ("surface", &[]),
    ("trunk", &[]),
    ("counters", &[]),
    ("panic", &[]),
    ("rsockets", &[]),
    ("vanish", &[]),
    ("strangers", &["bad_crc", "truncated", "reset", "too_long"]),
    ("foreign", &[]),
    ("nccl", &[]),
    ("profiles", &[]),
    ("buffers", &[]),
    ("sockets", &[]),
    ("sockets_memory", &[]),
    ("datagrams", DATAGRAMS),
    ("datagrams_reliable", DATAGRAMS),
    ("exs", &[]),
    ("exs_hostile", &[]),
    (
        "exs_many",
        &[
            "--sockets=100",
            "--threads=16",
            "--calls=10000",
            "--kills=8",
        ],
    ),
];

/// The program that uses the provider for libfabric.
const FI: &str = "fi";

/// Leaves out the tests that take long: messages longer than 1 GiB, messages in pieces, loss, the flood that uses all names, and most
/// variants of a link that fails.
const OF_FI: &[&str] = &[
    "--without=1gib",
    "--without=1536mib",
    "--without=link_fails_at",
    "--without=link_binds",
    "--without=with_loss",
    "--without=pieces",
    "--without=flood_of_all_names",
];

/// All tests of `datagrams.c` except that in which a program without the sanitizer's runtime loads the library.
const DATAGRAMS: &[&str] = &["--without=vfork_child"];

/// Tests of `sockets.c` that the sanitizers cannot run: a jump out of a call leaves the memory of the call allocated, and the runtime reads from the
/// addresses of a call that the kernel would refuse.
const NOT_SANITIZED: &[&str] = &["--without=jumps_from", "--without=wrong_addresses"];

/// Tests of `sockets.c` that ThreadSanitizer cannot run. It reports the deliberate race of closing a descriptor in use, and it delays signals in
/// blocking calls, which are then not continued.
const SOCKETS_NOT_BY_THREAD: &[&str] = &[
    "--without=closed_while_read",
    "--without=blocked_write_restarts",
    "--without=reads_restart",
];

/// A run of a program on the sockets of `libanywarp-sockets.so`: its name, the program, and its environment.
type OnSockets = (
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);
const SOCKETS: [OnSockets; 4] = [
    ("sockets", "sockets", &[("SOCKETS_UPGRADED", "1")]),
    (
        "sockets_memory",
        "sockets",
        &[
            ("SOCKETS_UPGRADED", "1"),
            ("ANYWARP_SOCKETS_RULES", "all prefer; set memory 1"),
        ],
    ),
    (
        "datagrams",
        "datagrams",
        &[
            ("DATAGRAMS_HEAD", "44"),
            ("ANYWARP_SOCKETS_RULES", "all datagram"),
        ],
    ),
    (
        "datagrams_reliable",
        "datagrams",
        &[
            ("DATAGRAMS_RELIABLE", "1"),
            ("ANYWARP_SOCKETS_RULES", "all reliable"),
        ],
    ),
];

/// The prefix of the wrappers of `libanywarp-sockets.so`. With a sanitizer the library is not preloaded; the program calls the
/// wrappers by these names. Otherwise the runtime's interceptors, which have the names of the C library's functions, would
/// call the wrappers. ThreadSanitizer ignores all atomic operations within an interceptor of a blocking function, so it would
/// not see the locks of the library.
///
/// ```text
///   the program's read  ──> hook_read of the library ──> the runtime's read ──> the C library's read
/// ```
const HOOK: &str = "hook_";

/// Programs that ThreadSanitizer cannot check. In `foreign` a peer is a plain socket of the same process: the device's thread
/// writes memory, and the test reads it after the answering datagram has arrived, an order that the sanitizer does not see.
/// In `ports` plain sockets are used beside listeners: the runtime intercepts `bind` and `listen` and calls those of libc
/// instead of anywarp's.
const NOT_BY_THREAD: &[&str] = &["foreign", "ports"];

/// The sanitizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Address,
    Thread,
}

impl Kind {
    /// Returns the name in options of compilers.
    const fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    /// Returns the environment variables for the runtime.
    fn options(self, name: &str, reports: &Path) -> Vec<(&'static str, String)> {
        let folder = sh::root().join("lab/sanitize");
        let supp = |name: &str| {
            let file = folder.join(name).with_extension("supp");
            format!("suppressions={}:print_suppressions=0", file.display())
        };
        let common = format!(
            "log_path={}:exitcode=99:allow_addr2line=1",
            reports.join("report").display()
        );
        match self {
            Self::Address => {
                // A forked child has none of its parent's threads. Memory that only their stacks refer to is leaked in the
                // child, and LeakSanitizer would wait for these threads.
                let forks = name == "fork" || name.starts_with("datagrams");
                let leaks = u8::from(!forks);
                vec![
                    (
                        "ASAN_OPTIONS",
                        format!("{common}:detect_leaks={leaks}:strict_string_checks=1"),
                    ),
                    ("LSAN_OPTIONS", supp("address")),
                ]
            }
            Self::Thread => vec![(
                "TSAN_OPTIONS",
                format!(
                    "{common}:{}:die_after_fork=0:second_deadlock_stack=1:history_size=4",
                    supp("thread")
                ),
            )],
        }
    }
}

/// The tools and flags of one sanitizer.
#[derive(Debug)]
struct Build {
    kind: Kind,
    /// The folder for all files.
    work: PathBuf,
    /// The target of rustc. It is passed explicitly, so that build scripts are compiled without the sanitizer.
    target: String,
    /// The sanitizer's runtime.
    runtime: PathBuf,
    /// The arguments for linking anything that contains Rust code.
    link: Vec<String>,
}

/// Builds and runs the programs that `arguments` name. After a single name, the arguments of that program may follow.
pub(crate) fn run(kind: Kind, long: bool, arguments: &[&str]) -> Result {
    let known = |name: &str| SHORT.iter().any(|(program, _)| *program == name);
    let names: Vec<&str> = arguments.iter().copied().take_while(|a| known(a)).collect();
    let rest = arguments.get(names.len()..).unwrap_or_default();
    if !rest.is_empty() && names.len() != 1 {
        return Err(format!("sanitize: {}: there is no such program", rest.join(" ")).into());
    }

    let build = Build::new(kind)?;
    let wanted = |name: &str| names.is_empty() || names.contains(&name);
    let libraries = build.libraries()?;
    build.finds_errors(&libraries)?;
    let judged = |name: &str| kind != Kind::Thread || !NOT_BY_THREAD.contains(&name);
    let names: Vec<&str> = SHORT
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| wanted(name) && judged(name))
        .collect();
    let arguments = |name: &str| {
        let short = SHORT.iter().find(|(program, _)| *program == name);
        match rest {
            [] if long => &[],
            [] => short.map_or(&[][..], |(_, arguments)| *arguments),
            rest => rest,
        }
    };
    let judge = |name: &str, command: Command| -> Result<Done> {
        let (output, reports) = build.reports(name, command)?;
        let mut done = Done::from(output);
        done.passed &= reports.is_empty();
        done.output
            .splice(0..0, format!("== {name}\n").into_bytes());
        done.output.extend(reports.join("\n").into_bytes());
        Ok(done)
    };
    // The unit tests run by themselves, because cargo builds them with all processors.
    let (unit, programs): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| **name == UNIT);
    let mut failed = beside::run(&unit, 0, |name| {
        judge(name, build.unit_tests(arguments(name), long))
    })?;
    failed.extend(beside::run(&programs, 0, |name| {
        let command = build.program(name, arguments(name), &libraries)?;
        judge(name, beside::in_namespace(command))
    })?);
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!(
        "these programs fail under the {} sanitizer: {}",
        kind.name(),
        failed.join(", ")
    )
    .into())
}

impl Build {
    fn new(kind: Kind) -> Result<Self> {
        let work = sh::target().join("sanitize").join(kind.name());
        fs::create_dir_all(&work)?;
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let sysroot = sh::output(nightly("rustc").args(["--print", "sysroot"]))?;
        let rustlib = Path::new(sysroot.trim())
            .join("lib/rustlib")
            .join(&target)
            .join("lib");
        let short = match kind {
            Kind::Address => "asan",
            Kind::Thread => "tsan",
        };
        let runtime = rustlib.join(format!("librustc-nightly_rt.{short}.a"));
        if !runtime.exists() {
            return Err(format!("{}: the toolchain has no such runtime", runtime.display()).into());
        }
        let link = match kind {
            Kind::Address => Vec::new(),
            Kind::Thread => sync(&rustlib, &work)?,
        };
        Ok(Self {
            kind,
            work,
            target,
            runtime,
            link,
        })
    }

    /// Returns a cargo command that uses the sanitizer.
    fn cargo(&self) -> Command {
        let mut flags = vec![
            format!("-Zsanitizer={}", self.kind.name()),
            // The standard library is compiled without the sanitizer.
            "-Cunsafe-allow-abi-mismatch=sanitizer".to_owned(),
            // For tests of memory consumption: a sanitizer adds memory to each allocation.
            "--cfg=sanitized".to_owned(),
        ];
        flags.extend(
            self.link
                .iter()
                .map(|argument| format!("-Clink-arg={argument}")),
        );
        let mut command = nightly("cargo");
        command
            .current_dir(sh::root())
            .env("CARGO_TARGET_DIR", self.work.join("build"))
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
            .env("CARGO_INCREMENTAL", "0");
        command
    }

    /// Builds the libraries into a folder.
    fn libraries(&self) -> Result<PathBuf> {
        sh::run(
            self.cargo()
                .args(["build", "--target", &self.target])
                .args(["--package=anywarp-abi", "--package=anywarp-exs"])
                .args(["--package=anywarp-buffers", "--package=anywarp-sockets"])
                .arg("--package=anywarp-fi"),
        )?;
        let built = self.work.join("build").join(&self.target).join("debug");
        let archive = built.join("libanywarp_abi.a");
        let out = self.work.join("lib");
        if out.exists() {
            fs::remove_dir_all(&out)?;
        }
        link::run(
            &symbols::read()?,
            &archive,
            &self.work.join("link"),
            &out,
            Some(&self.link),
        )?;
        let hooks = hooks()?;
        let hook_exports: String = hooks.iter().map(|name| format!("{HOOK}{name}; ")).collect();
        let renamed: Vec<String> = hooks
            .iter()
            .map(|name| format!("-Wl,--defsym={HOOK}{name}={name}"))
            .collect();
        for (name, exports, renamed) in [
            ("sockets", hook_exports.as_str(), renamed.as_slice()),
            (FI, "fi_prov_ini; ", &[]),
        ] {
            let map = self.work.join(name).with_extension("map");
            fs::write(&map, format!("{{ global: {exports}local: *; }};\n"))?;
            let mut cc = sh::cc();
            cc.args(["-shared", "-fPIC"])
                .arg(format!("-Wl,--version-script={}", map.display()))
                .args(["-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,-Bsymbolic-functions"])
                .args(renamed)
                .arg("-Wl,--whole-archive")
                .arg(built.join(format!("libanywarp_{name}.a")))
                .arg("-Wl,--no-whole-archive")
                .args(&self.link)
                .args(["-lgcc_s", "-lm", "-lc", "-o"])
                .arg(out.join(format!("libanywarp-{name}.so")));
            sh::run(&mut cc)?;
        }
        // These libraries use libibverbs and librdmacm.
        for name in ["exs", "anywarp-buffers"] {
            let mut cc = sh::cc();
            cc.args(["-shared", "-fPIC"])
                .arg(format!("-Wl,-soname,lib{name}.so.1"))
                .args(["-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,--whole-archive"])
                .arg(built.join(format!("lib{}.a", name.replace('-', "_"))))
                .arg("-Wl,--no-whole-archive")
                .args(&self.link)
                .arg("-L")
                .arg(&out)
                .args(["-libverbs", "-lrdmacm", "-lgcc_s", "-lm", "-lc", "-o"])
                .arg(out.join(format!("lib{name}.so.1")));
            sh::run(&mut cc)?;
            let link = out.join(format!("lib{name}.so"));
            std::os::unix::fs::symlink(format!("lib{name}.so.1"), link)?;
        }
        Ok(out)
    }

    /// Returns the command for the tests of crates with `unsafe` code. The core and the simulation have none (`forbid`), and their tests
    /// have only one thread, so only `long` checks them. In the tests of `anywarp-sockets` the runtime would find its own functions replaced
    /// by the library's wrappers. Only the C programs check that crate, and `anywarp-abi`.
    fn unit_tests(&self, arguments: &[&str], long: bool) -> Command {
        let mut packages = vec![
            "anywarp-engine",
            "anywarp-shared-memory",
            "anywarp-sockets-base",
            "anywarp-buffers",
            "anywarp-exs",
            "anywarp-fi",
        ];
        if long {
            packages.extend(["anywarp-core", "anywarp-sim"]);
        }
        let mut command = self.cargo();
        command.args([
            "test",
            "--quiet",
            "--no-fail-fast",
            "--target",
            &self.target,
        ]);
        command.args(packages.iter().map(|name| format!("--package={name}")));
        // Documentation tests are skipped, because each is compiled separately.
        command.args(["--lib", "--tests", "--"]).args(arguments);
        command
    }

    /// Checks that the sanitizer finds a deliberate error. Otherwise the other results would be meaningless.
    fn finds_errors(&self, libraries: &Path) -> Result {
        let (test, report) = match self.kind {
            Kind::Address => ("overflow", "heap-buffer-overflow"),
            Kind::Thread => ("race", "data race"),
        };
        let command = self.program("planted", &[test], libraries)?;
        let found = self.reports("planted", command)?.1.join("\n");
        if found.contains(report) && found.contains("anywarp_core::") {
            return Ok(());
        }
        Err(format!(
            "the {} sanitizer does not find the {test} in tests/c/planted.c",
            self.kind.name()
        )
        .into())
    }

    /// Builds one of the C programs, and returns the command that runs it.
    fn program(&self, name: &str, arguments: &[&str], libraries: &Path) -> Result<Command> {
        let on_sockets = SOCKETS.iter().find(|(run, ..)| *run == name);
        let source = on_sockets.map_or(name, |(_, program, _)| program);
        let object = self.work.join(name).with_extension("o");
        let mut cc = sh::cc();
        cc.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra"])
            .arg(format!("-fsanitize={}", self.kind.name()))
            .arg("-I")
            .arg(sh::root().join("crates/exs/include"))
            .arg("-I")
            .arg(sh::root().join("crates/buffers/include"))
            .arg("-c")
            .arg(sh::root().join("tests/c").join(source).with_extension("c"))
            .arg("-o")
            .arg(&object);
        sh::run(&mut cc)?;
        if on_sockets.is_some() {
            let mut calls = Command::new("objcopy");
            for hook in hooks()? {
                calls.arg(format!("--redefine-sym={hook}={HOOK}{hook}"));
            }
            sh::run(calls.arg(&object))?;
        }
        let program = self.work.join(name);
        let mut cc = sh::cc();
        let above = c_tests::above(name).or_else(|| on_sockets.map(|_| "anywarp-sockets"));
        if above.is_some() {
            cc.arg("-L").arg(libraries);
        }
        cc.arg(&object)
            .arg("-Wl,--whole-archive")
            .arg(&self.runtime)
            .args(["-Wl,--no-whole-archive", "-Wl,--export-dynamic"])
            .args(above.map(|library| format!("-l{library}")))
            .args(c_tests::is_on_libfabric(name).then_some("-lfabric"))
            .args(["-libverbs", "-lrdmacm", "-lpthread", "-lm", "-lrt", "-ldl"])
            .arg("-o")
            .arg(&program);
        sh::run(&mut cc)?;
        let mut command = Command::new(program);
        if source == "sockets" {
            command.args(NOT_SANITIZED);
            if self.kind == Kind::Thread {
                command.args(SOCKETS_NOT_BY_THREAD);
            }
        }
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", libraries)
            // Uses the loopback interface, whatever other addresses this machine has.
            .env("ANYWARP_ADDR", "127.0.0.1")
            .env("FI_PROVIDER_PATH", libraries)
            // One line is enough for deliberate panics.
            .env("RUST_BACKTRACE", "0");
        if let Some((.., variables)) = on_sockets {
            command.envs(variables.iter().copied());
        }
        Ok(command)
    }

    /// Runs a command and reads the reports of its processes.
    fn reports(&self, name: &str, mut command: Command) -> Result<(Output, Vec<String>)> {
        let folder = self.work.join("reports").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        let output = command
            .envs(self.kind.options(name, &folder))
            .stdin(Stdio::null())
            .output()?;
        let mut reports = Vec::new();
        for report in fs::read_dir(&folder)? {
            reports.push(fs::read_to_string(report?.path())?);
        }
        Ok((output, reports))
    }
}

/// Returns the names of the functions that `libanywarp-sockets.so` wraps.
fn hooks() -> Result<Vec<String>> {
    let names = xtask::dist::exports_of_sockets()?;
    Ok(names
        .iter()
        .map(|name| name.trim_end_matches(';').to_owned())
        .collect())
}

/// Returns a command for a tool of the nightly toolchain.
fn nightly(tool: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", tool]);
    // Another toolchain has started this process and set these variables.
    for variable in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTFLAGS"] {
        command.env_remove(variable);
    }
    command
}

/// The functions of the standard library that `sync.rs` wraps: the name there, and the parts of the mangled name.
const WRAPPED: [(&str, &str, &str); 6] = [
    ("lock_contended", "5mutex5futex", "5Mutex14lock_contended"),
    ("read_contended", "6rwlock5futex", "6RwLock14read_contended"),
    (
        "write_contended",
        "6rwlock5futex",
        "6RwLock15write_contended",
    ),
    ("wait", "7condvar5futex", "7Condvar4wait"),
    ("wait_timeout", "7condvar5futex", "7Condvar12wait_timeout"),
    ("call", "4once5futex", "4Once4call"),
];

/// Compiles `sync.rs`. Returns the arguments for linking it.
fn sync(rustlib: &Path, work: &Path) -> Result<Vec<String>> {
    let std = fs::read_dir(rustlib)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libstd-") && name.ends_with(".rlib")
        })
        .ok_or("the toolchain has no libstd")?;
    // readelf is used because nm would pass the objects to its plugin for other compilers' bitcode.
    let listing = sh::output(Command::new("readelf").arg("-sW").arg(std))?;
    let object = work.join("sync.o");
    sh::run(
        nightly("rustc")
            .args([
                "--edition=2024",
                "--crate-type=lib",
                "--emit=obj",
                "-O",
                "-o",
            ])
            .arg(&object)
            .arg(sh::root().join("lab/sanitize/sync.rs")),
    )?;
    let mut names = Command::new("objcopy");
    let mut link = vec![
        object.display().to_string(),
        "-Wl,--wrap=__tsan_atomic64_fetch_sub".to_owned(),
    ];
    for (name, module, function) in WRAPPED {
        let symbol = listing
            .split_whitespace()
            .find(|word| {
                word.starts_with("_R") && word.contains(module) && word.ends_with(function)
            })
            .ok_or_else(|| {
                format!("this nightly's libstd has no {function}: look at its locks and at sync.rs")
            })?;
        names.arg(format!("--redefine-sym=wrap_{name}=__wrap_{symbol}"));
        names.arg(format!("--redefine-sym=real_{name}=__real_{symbol}"));
        link.push(format!("-Wl,--wrap={symbol}"));
    }
    sh::run(names.arg(&object))?;
    Ok(link)
}
