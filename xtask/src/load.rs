//! Checks that the loader finds the built libraries, with `tests/c/load.c` in many environments and with programs of the
//! distribution.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xtask::symbols::{IBVERBS, RDMACM, Version};
use xtask::{Result, sh};

/// Installed programs and drivers for which all references must resolve. Those that are not installed are skipped.
const PROGRAMS: [&str; 24] = [
    "/usr/bin/ibv_devices",
    "/usr/bin/ibv_devinfo",
    "/usr/bin/ibv_asyncwatch",
    "/usr/bin/ibv_rc_pingpong",
    "/usr/bin/ibv_xsrq_pingpong",
    "/usr/bin/rping",
    "/usr/bin/ucmatose",
    "/usr/bin/udaddy",
    "/usr/bin/mckey",
    "/usr/bin/cmtime",
    "/usr/bin/rdma_client",
    "/usr/bin/rdma_xserver",
    "/usr/bin/rstream",
    "/usr/bin/riostream",
    "/usr/bin/rcopy",
    "/usr/bin/udpong",
    "/usr/bin/ib_send_bw",
    "/usr/bin/ib_write_lat",
    "/usr/bin/ib_atomic_bw",
    "/usr/bin/raw_ethernet_bw",
    "/usr/bin/qperf",
    "/usr/bin/fio",
    "/usr/lib/x86_64-linux-gnu/libmlx5.so.1",
    "/usr/lib/x86_64-linux-gnu/libefa.so.1",
];

/// Releases of rdma-core in other distributions. The numbers are those of the newest public version
/// nodes of the two libraries (`IBVERBS_1.n`, `RDMACM_1.n`) and of the private version node
/// (`IBVERBS_PRIVATE_n`).
const RELEASES: [(&str, u32, u32, u32); 5] = [
    ("EL 8.2 (rdma-core 26)", 7, 2, 25),
    ("Ubuntu 20.04 (rdma-core 28)", 8, 2, 25),
    ("Ubuntu 22.04 (rdma-core 39), EL 8", 14, 3, 34),
    ("Ubuntu 24.04 (rdma-core 50), EL 9", 14, 3, 34),
    ("rdma-core 58", 14, 3, 57),
];

/// How the libraries are loaded into a process.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// `LD_LIBRARY_PATH` contains their folder.
    Path,
    /// `LD_PRELOAD` contains both files.
    Preload,
    /// Both variables, as in `anywarp run`.
    Both,
    /// No variable is set.
    None,
}

/// Loads the libraries in all ways that programs use.
pub(crate) fn run() -> Result {
    let lib = sh::dist().join("lib/anywarp");
    let work = sh::target().join("dist-load");
    fs::create_dir_all(&work)?;
    let ours = format!("-L{}", lib.display());
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", lib.display());
    let plain = build(&work, "load", &[])?;
    let linked = ["-DLINKED", "-Wl,-z,now", "-Wl,--no-as-needed"];
    let libraries = ["-libverbs", "-lrdmacm"];
    let against_theirs = build(
        &work,
        "load-theirs",
        &[&linked[..], &libraries[..]].concat(),
    )?;
    let against_ours = build(
        &work,
        "load-ours",
        &[&linked[..], &[&ours], &libraries[..]].concat(),
    )?;
    // Only librdmacm is linked; libibverbs is loaded as its dependency.
    let only_cm = build(
        &work,
        "load-rpath",
        &[
            &[rpath.as_str(), &ours, "-Wl,--no-as-needed"][..],
            &libraries[1..],
        ]
        .concat(),
    )?;

    let folder = lib.display().to_string();
    let mut failures = Vec::new();
    let mut count = 0_usize;
    let mut case = |program: &Path, how: &str, way: Way| -> Result {
        let mut command = Command::new(program);
        command.arg(how);
        environment(&mut command, way, &lib);
        if !matches!(way, Way::None) {
            command.env("EXPECT_DIR", &folder);
        }
        count += 1;
        if !command.status()?.success() {
            failures.push(format!("{} {how} ({way:?})", program.display()));
        }
        Ok(())
    };
    for way in [Way::Path, Way::Preload, Way::Both] {
        for how in ["soname", "deepbind", "rdmacm", &folder] {
            case(&plain, how, way)?;
            case(&against_theirs, how, way)?;
        }
        case(&against_theirs, "linked", way)?;
        case(&against_ours, "linked", way)?;
    }
    // With only the preload, the development link of the distribution would be found.
    for way in [Way::Path, Way::Both] {
        case(&plain, "link", way)?;
    }
    // Without variables: the libraries are found by a path that is passed to dlopen, or by the run
    // path of the program. A program that was built against them runs with the libraries of the
    // distribution.
    case(&plain, &folder, Way::None)?;
    case(&only_cm, "rdmacm", Way::None)?;
    case(&against_ours, "linked", Way::None)?;

    for program in PROGRAMS.iter().filter(|p| Path::new(p).exists()) {
        count += 1;
        let unresolved = unresolved(Path::new(program), &lib)?;
        failures.extend(unresolved.iter().map(|u| format!("{program}: {u}")));
    }
    for release in &RELEASES {
        count += 1;
        let program = of_release(&work, release)?;
        let unresolved = unresolved(&program, &lib)?;
        failures.extend(unresolved.iter().map(|u| format!("{}: {u}", release.0)));
    }
    if failures.is_empty() {
        println!("loaded in {count} ways");
        return Ok(());
    }
    Err(failures.join("\n").into())
}

/// Returns whether a release has a node.
fn has(&(_, verbs, cm, private): &(&str, u32, u32, u32), node: &str) -> bool {
    let number = |prefix: &str| {
        node.strip_prefix(prefix)
            .and_then(|n| n.parse::<u32>().ok())
    };
    number("IBVERBS_1.").is_some_and(|n| n <= verbs)
        || number("RDMACM_1.").is_some_and(|n| n <= cm)
        || number("IBVERBS_PRIVATE_") == Some(private)
}

/// Builds a library that references every function of a release with its versions. Like drivers and programs of that release,
/// it is linked to libraries that have exactly these nodes. A symbol in two nodes is referenced in
/// the newer one. Symbols of the private node are referenced as a driver would reference them.
fn of_release(work: &Path, release: &(&str, u32, u32, u32)) -> Result<PathBuf> {
    let symbols = xtask::symbols::read()?;
    let dir = work.join(format!("release-{}-{}", release.1, release.3));
    fs::create_dir_all(&dir)?;
    let mut users = String::from("void *use[] = {\n");
    let mut declared = String::new();
    let mut stubs = Vec::new();
    for library in [IBVERBS, RDMACM] {
        let (mut code, mut map) = (String::new(), String::new());
        for node in xtask::symbols::nodes(&symbols, library) {
            if !has(release, node) {
                continue;
            }
            let inside = symbols.iter().filter(|s| {
                s.library == library && s.node == node && !matches!(s.version, Version::Legacy(_))
            });
            let mut names = String::new();
            for s in inside {
                let _ = writeln!(code, "int {}(void) {{ return 0; }}", s.name);
                let _ = writeln!(declared, "int {}(void);", s.name);
                let _ = writeln!(users, "(void *){},", s.name);
                let _ = write!(names, "{}; ", s.name);
            }
            let _ = writeln!(map, "{node} {{ global: {names} }};");
        }
        let (source, script) = (dir.join("stub.c"), dir.join("stub.map"));
        fs::write(&source, code)?;
        fs::write(&script, map)?;
        let stub = dir.join(library);
        let mut cc = sh::cc();
        cc.args(["-w", "-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-o"])
            .args([&stub, &source])
            .arg(format!("-Wl,-soname,{library}"))
            .arg(format!("-Wl,--version-script={}", script.display()));
        sh::run(&mut cc)?;
        stubs.push(stub);
    }
    let (source, user) = (dir.join("user.c"), dir.join("user.so"));
    fs::write(&source, format!("{declared}{users}}};\n"))?;
    let mut cc = sh::cc();
    cc.args([
        "-w",
        "-shared",
        "-fPIC",
        "-fno-builtin",
        "-Wl,-z,defs",
        "-o",
    ])
    .args([&user, &source])
    .args(&stubs);
    sh::run(&mut cc)?;
    Ok(user)
}

/// Builds `tests/c/load.c` as `name`.
fn build(work: &Path, name: &str, arguments: &[&str]) -> Result<PathBuf> {
    let program = work.join(name);
    let mut cc = sh::cc();
    cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(sh::root().join("tests/c/load.c"))
        .args(arguments);
    sh::run(&mut cc)?;
    Ok(program)
}

/// Sets the variables for loading the libraries, and clears those of the caller's environment.
fn environment(command: &mut Command, way: Way, lib: &Path) {
    command
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD");
    if matches!(way, Way::Path | Way::Both) {
        command.env("LD_LIBRARY_PATH", lib);
    }
    if matches!(way, Way::Preload | Way::Both) {
        let files = [IBVERBS, RDMACM].map(|l| lib.join(l).display().to_string());
        command.env("LD_PRELOAD", files.join(":"));
    }
}

/// Returns the references of `program` that the loader cannot resolve when it resolves all of them.
fn unresolved(program: &Path, lib: &Path) -> Result<Vec<String>> {
    let mut ldd = Command::new("ldd");
    ldd.arg("-r").arg(program).stdin(Stdio::null());
    environment(&mut ldd, Way::Path, lib);
    // ldd prints errors to either stream. A failed exit status counts as an error too.
    let output = ldd.output()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let bad = ["undefined symbol", "not found", "no version information"];
    let mut found: Vec<String> = text
        .lines()
        .filter(|l| bad.iter().any(|b| l.contains(b)))
        .map(|l| l.trim().to_owned())
        .collect();
    if !text.contains(&lib.display().to_string()) {
        found.push("does not load our libraries".to_owned());
    }
    Ok(found)
}
