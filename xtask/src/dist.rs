//! `cargo xtask dist`: what is installed, in `target/dist`.
//!
//! ```text
//! bin/anywarp
//! lib/anywarp/libibverbs.so.1  librdmacm.so.1  and their .so links
//! lib/anywarp/anywarp-selftest what `anywarp doctor` runs: tests/c/selftest.c
//! lib/anywarp/anywarp-perf     what `anywarp ping` and `anywarp blast` run: crates/cli/perf/perf.c
//! lib/anywarp/libanywarp-path.so  what shows the device as files: crates/cli/shim/path-shim.c
//! include/                     our own headers, if there are any
//! share/                       manual pages (from docs/man) and completions
//! share/anywarp/wireshark/     the dissector of datagrams
//! ```

use crate::{Result, glibc, link, sh, symbols};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Builds everything and puts it in place at once.
pub fn run() -> Result {
    let symbols = symbols::read()?;
    sh::run(sh::cargo().args([
        "build",
        "--release",
        "--package=anywarp-abi",
        "--package=anywarp-cli",
    ]))?;
    let built = sh::target().join("release");
    let work = sh::target().join("dist-link");

    // Built in a folder beside the result, which is renamed at the end: a running program keeps its old files, and no
    // program finds half of the new ones.
    let dist = sh::dist();
    let new = dist.with_extension("new");
    remove(&new)?;
    let lib = new.join("lib/anywarp");
    link::run(&symbols, &built.join("libanywarp_abi.a"), &work, &lib, None)?;
    verbs_program("anywarp-selftest", "tests/c/selftest.c", &lib, &work)?;
    verbs_program("anywarp-perf", "crates/cli/perf/perf.c", &lib, &work)?;
    path_shim(&lib, &work)?;
    let bin = new.join("bin");
    fs::create_dir_all(&bin)?;
    fs::copy(built.join("anywarp"), bin.join("anywarp"))?;
    copy_tree(&sh::root().join("crates/abi/include"), &new.join("include"))?;
    generate(&bin.join("anywarp"), &new.join("share"))?;
    copy_tree(
        &sh::root().join("crates/cli/wireshark"),
        &new.join("share/anywarp/wireshark"),
    )?;

    glibc::check(&new)?;
    remove(&dist)?;
    fs::rename(&new, &dist)?;
    println!("{}", dist.display());
    Ok(())
}

/// Builds a plain verbs program against the libraries in `lib`.
fn verbs_program(name: &str, source: &str, lib: &Path, work: &Path) -> Result {
    let mut cc = sh::cc();
    cc.args(["-O2", "-o"])
        .arg(lib.join(name))
        .arg(sh::root().join(source))
        .arg("-L")
        .arg(lib)
        .args(["-libverbs", "-lrdmacm", "-lpthread"])
        .args(glibc::arguments(work, glibc::Into::Program)?);
    sh::run(&mut cc)
}

/// Builds the path shim, which needs nothing but libc.
fn path_shim(lib: &Path, work: &Path) -> Result {
    let mut cc = sh::cc();
    // The checking macros of libc would turn the functions that are replaced into others.
    cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-nonnull-compare", "-U_FORTIFY_SOURCE"])
        .args([
            "-fPIC",
            "-fvisibility=hidden",
            "-shared",
            "-Wl,-z,now",
            "-o",
        ])
        .arg(lib.join("libanywarp-path.so"))
        .arg(sh::root().join("crates/cli/shim/path-shim.c"))
        .args(glibc::arguments(work, glibc::Into::Replacement)?);
    sh::run(&mut cc)
}

/// Lets the command write its manual pages and completions.
fn generate(anywarp: &Path, share: &Path) -> Result {
    fs::create_dir_all(share)?;
    let mut generate = Command::new(anywarp);
    sh::run(generate.arg("generate").arg(share).arg(sh::root()))
}

/// Copies `from`, if it exists, to `to`.
pub fn copy_tree(from: &Path, to: &Path) -> Result {
    if !from.exists() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// Removes a folder with all that is in it, if it exists.
fn remove(path: &Path) -> Result {
    if path.exists() {
        fs::remove_dir_all(path)?;
    }
    Ok(())
}
