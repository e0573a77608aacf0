//! `cargo lab study --guest`: runs `anywarp study` in the guest on three devices side by side: anywarp, and the kernel's siw and rxe.

use super::guest::{self, Guest};
use crate::programs::{self, INSIDE};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::expect::Exit;
use xtask::{Result, sh};

/// The time limit of the study. The guest's processors are emulated.
const LIMIT: Duration = Duration::from_secs(300);

/// Creates an rxe device beside siw0. The study uses the address of the interface that both devices share.
const PREPARE: &str =
    "modprobe crc32_generic; modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0";

/// The figures, measured with Writes and Sends. Writes with immediate data are not measured, because siw has none.
const FIGURES: &str = "pb:3a pb:8a --vary op=write,send --vary inline=false";

/// The devices.
const DEVICES: [&str; 3] = ["anywarp", "rxe0", "siw0"];

pub(crate) fn run() -> Result {
    if env::var_os(INSIDE).is_none() {
        // The guest is made before the namespaces are entered, because packages are downloaded for it.
        sh::run(Command::new(sh::root().join("tests/interop/make-guest")).stdout(Stdio::null()))?;
        return programs::in_namespaces();
    }
    let work = programs::new_folder(&env::temp_dir())?;
    let done = study(&work);
    fs::remove_dir_all(&work)?;
    done
}

fn study(work: &Path) -> Result {
    let root = work.join("root");
    fs::create_dir_all(&root)?;
    sh::run(
        Command::new("cp")
            .arg("-r")
            .arg(sh::dist())
            .arg(root.join("anywarp")),
    )?;
    guest::wire()?;
    let guest = Guest::boot(work)?;
    guest.ask(PREPARE)?;
    let line = format!(
        "/anywarp/bin/anywarp study run {FIGURES} --smoke -q --report /study --vary device={} --vary carrier=tcp; \
         echo \"exit $?\"; cat /study/pb-*.csv; sed 's/,/\\n/g' /study/study.json | grep '\"failed\": *\"' | sort | uniq -c",
        DEVICES.join(",")
    );
    let mut remote = guest.start(&line)?;
    let ended = remote.finish("study", Some(Exit::Code(0)), Instant::now() + LIMIT);
    let text = remote.output();
    println!("{text}");
    ended?;
    if !text.lines().any(|line| line == "exit 0") {
        return Err("a measurement failed".into());
    }
    let measured: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| {
            DEVICES
                .into_iter()
                .find(|name| line.split(',').any(|f| f == *name))
        })
        .collect();
    if measured.len() != DEVICES.len() {
        return Err(format!("only {measured:?} were measured").into());
    }
    Ok(())
}
