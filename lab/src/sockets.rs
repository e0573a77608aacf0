//! `cargo lab sockets`: runs the test programs `tests/c/sockets.c` and `tests/c/datagrams.c` with the kernel's sockets and
//! with those of `libanywarp-sockets.so`, and then the tests of tests/sockets for `anywarp sockets` and for other programs. With `--bars`
//! it measures upgraded streams against kernel TCP.

use crate::beside;
use rustix::process::geteuid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::{Result, sh};

/// The time limit of a job in seconds.
const LIMIT: &str = "400";

/// Runs the test program for streams, whose arguments are the library and the program.
const STREAMS: &str = r#"echo '== tests/c/sockets.c, sockets of the kernel'
"$2"
echo '== tests/c/sockets.c, upgraded'
SOCKETS_UPGRADED=1 LD_PRELOAD="$1" "$2"
echo '== tests/c/sockets.c, upgraded, with a small window'
SOCKETS_UPGRADED=1 ANYWARP_SOCKETS_RULES='all prefer; set window 16K' LD_PRELOAD="$1" "$2" \
    writable both_ways mixed short_writes writes_to reads_ bursts
echo '== tests/c/sockets.c, upgraded, with a window that grows'
SOCKETS_UPGRADED=1 ANYWARP_SOCKETS_RULES='all prefer; set window 16K..256K; set memory off' LD_PRELOAD="$1" "$2" room_behind_unread_data_before
echo '== tests/c/sockets.c, upgraded by a rule that requires it'
SOCKETS_UPGRADED=1 ANYWARP_SOCKETS_RULES='all require' LD_PRELOAD="$1" "$2" spawn_b
echo '== tests/c/sockets.c, upgraded, payload in shared memory'
SOCKETS_UPGRADED=1 ANYWARP_SOCKETS_RULES='all prefer; set memory 1' LD_PRELOAD="$1" "$2""#;

/// Runs the test program for datagrams with the MTUs of the loopback interface and of Ethernet. Its arguments are the library and the program.
const DATAGRAMS: &str = r#"for mtu in 65536 1500; do
    ip link set lo mtu "$mtu"
    echo "== tests/c/datagrams.c, MTU $mtu"
    "$2"
    for mode in 'datagram 44' 'record 40'; do
        echo "== tests/c/datagrams.c, MTU $mtu, ${mode% *}"
        DATAGRAMS_HEAD=${mode#* } ANYWARP_SOCKETS_RULES="all ${mode% *}" LD_PRELOAD="$1" "$2"
    done
    echo "== tests/c/datagrams.c, MTU $mtu, reliable"
    DATAGRAMS_RELIABLE=1 ANYWARP_SOCKETS_RULES='all reliable' LD_PRELOAD="$1" "$2"
done"#;

/// Runs a command, which is one of the tests of tests/sockets.
const COMMAND: &str = r#"exec "$@""#;

/// Options of `cargo lab sockets`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Measure upgraded streams against kernel TCP in place of the tests.
    #[arg(long)]
    bars: bool,
    /// Number of rounds.
    #[arg(long, value_name = "N", default_value_t = 11, requires = "bars")]
    rounds: usize,
    /// Measure only rows with this in their name.
    #[arg(long, value_name = "PART", default_value = "", requires = "bars")]
    only: String,
    /// Write the table to docs/results/sockets.md.
    #[arg(long, requires = "bars")]
    write: bool,
}

/// The head of docs/results/sockets.md.
const HEAD: &str = "# Sockets of unmodified programs and kernel TCP\n\n\
    `cargo lab sockets --bars --write` generates this page. Each row is measured in each round once on the kernel's sockets and once with \
    `anywarp sockets run` at both ends, or at the server in the rows with a plain client. The namespaces are connected by a veth pair with frames \
    of 1,500 bytes. A ratio compares the medians. CPU is the ratio of the processor time of both programs for the same work. In the rows of idle \
    programs the bar is for the value itself.\n\n";

/// Runs all tests, or with `--bars` the measurements.
pub(crate) fn run(options: &Options) -> Result {
    let library = sh::dist().join("lib/anywarp/libanywarp-sockets.so");
    if !library.exists() {
        return Err(format!("{}: missing; run `cargo xtask dist`", library.display()).into());
    }
    if options.bars {
        return bars(options);
    }
    let program = compiled("c/sockets.c", "sockets-semantics")?;
    let datagrams = compiled("c/datagrams.c", "datagrams-semantics")?;
    let relay = compiled("netlab/relay.c", "sockets-relay")?;
    let anywarp = sh::dist().join("bin/anywarp");
    // The longest ones come first.
    let jobs: [(&str, &str, &[&Path]); 9] = [
        ("datagrams", COMMAND, &[&anywarp]),
        ("streams", STREAMS, &[&library, &program]),
        ("check", COMMAND, &[&library, &anywarp]),
        ("reliable", COMMAND, &[&anywarp, &relay]),
        ("memory", COMMAND, &[&anywarp]),
        ("datagram sockets", DATAGRAMS, &[&library, &datagrams]),
        ("hosts", COMMAND, &[&anywarp]),
        ("command", COMMAND, &[&anywarp]),
        ("hostile", COMMAND, &[&anywarp]),
    ];
    let failed = beside::run(&jobs.map(|(name, ..)| name), 0, |name| {
        let (_, script, arguments) = jobs
            .iter()
            .find(|job| job.0 == name)
            .ok_or("the job is not in the list")?;
        let mut command = in_namespace(script);
        if *script == COMMAND {
            command.arg(sh::root().join("tests/sockets").join(name));
        }
        Ok(command.args(*arguments).output()?.into())
    })?;
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("tests of the sockets fail: {}", failed.join(", ")).into())
}

/// Returns a command that runs a script in a new network namespace. Its next arguments are those of the script.
fn in_namespace(script: &str) -> Command {
    let mut command = Command::new("timeout");
    command
        .arg(LIMIT)
        .arg("unshare")
        // For root all users stay mapped, because sshd changes to its own user.
        .args((!geteuid().is_root()).then_some("--map-root-user"))
        .args(["--net", "sh", "-c"])
        .arg(format!("set -e\nip link set lo up\n{script}"))
        .arg("sh");
    command
}

/// Runs the measurements of tests/sockets/bars in a new network namespace.
fn bars(options: &Options) -> Result {
    let mut command = Command::new("unshare");
    command
        .args((!geteuid().is_root()).then_some("--map-root-user"))
        .arg("--net")
        .arg(sh::root().join("tests/sockets/bars"))
        .arg(sh::dist().join("bin/anywarp"))
        .arg(format!("--rounds={}", options.rounds))
        .arg(format!("--only={}", options.only));
    let table = sh::output(&mut command)?;
    println!("{table}");
    if options.write {
        fs::write(
            sh::root().join("docs/results/sockets.md"),
            format!("{HEAD}{table}"),
        )?;
    }
    Ok(())
}

/// Builds a program of `tests`.
fn compiled(source: &str, name: &str) -> Result<PathBuf> {
    let program = sh::target().join(name);
    let mut cc = sh::cc();
    cc.args([
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
    ])
    .arg(&program)
    .arg(sh::root().join("tests").join(source))
    .arg("-lpthread");
    sh::run(&mut cc)?;
    Ok(program)
}
