//! `cargo lab distros`: runs the programs of other releases of Debian, each in a directory tree, with the same build of anywarp.
//!
//! A tree contains packages of a release and their dependencies, unpacked but not configured. Creating one takes a minute,
//! and trees are kept in `target/trees`. Programs run in a tree as in `cargo lab programs`, in namespaces that are removed after
//! the run.

use crate::process::Process;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use xtask::{Result, sh};

/// The releases, oldest first: the name, and a description.
const RELEASES: [(&str, &str); 4] = [
    ("bullseye", "Debian 11: rdma-core 33, glibc 2.31"),
    ("bookworm", "Debian 12: rdma-core 44, glibc 2.36"),
    ("trixie", "Debian 13: rdma-core 56, glibc 2.41"),
    ("sid", "Debian unstable: rdma-core 65, glibc 2.43"),
];

/// The releases that run by default: the oldest and the newest.
const SHORT: [&str; 2] = ["bullseye", "sid"];

/// The release whose arm64 programs run under qemu.
const ARM64: [&str; 1] = ["bookworm"];

/// The packages whose programs are run.
const PACKAGES: [&str; 3] = ["rdmacm-utils", "ibverbs-utils", "perftest"];

/// Other packages in a tree: for `env`, `cmp`, and the links in the root folder.
const BESIDE: [&str; 3] = ["coreutils", "diffutils", "base-files"];

/// The time limit for creating a tree.
const MAKE: Duration = Duration::from_secs(300);

/// Options of `cargo lab distros`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only these releases; by default the oldest and the newest.
    releases: Vec<String>,
    /// All releases and all cases, instead of one case of each program.
    #[arg(long)]
    nightly: bool,
    /// Run arm64 programs under qemu-user, with the libraries that `cargo xtask dist --target
    /// aarch64-unknown-linux-gnu` has built; by default the programs of Debian 12.
    #[arg(long)]
    arm64: bool,
    /// Only cases with this in their name, which is `PROGRAM/CASE`.
    #[arg(long, value_name = "PART")]
    filter: Option<String>,
}

/// Creates missing trees, and runs the programs in each.
pub(crate) fn run(options: &Options) -> Result {
    for name in &options.releases {
        if !RELEASES.iter().any(|(known, _)| known == name) {
            return Err(format!("{name}: this release is not listed").into());
        }
    }
    let short: &[&str] = if options.arm64 { &ARM64 } else { &SHORT };
    let mut failed = Vec::new();
    for (name, what) in RELEASES {
        let asked = options.releases.iter().any(|r| r == name);
        let all = options.nightly && !options.arm64;
        if !(asked || options.releases.is_empty() && (all || short.contains(&name))) {
            continue;
        }
        let begin = Instant::now();
        println!("== {name} ({what})");
        let tree = tree(name, options.arm64)?;
        let mut lab = Command::new(std::env::current_exe()?);
        lab.args(["programs", "--doctor", "--packages", &PACKAGES.join(",")])
            .arg("--skips")
            .arg(
                sh::root()
                    .join("tests/distros")
                    .join(folder(name, options.arm64)),
            )
            .arg("--tree")
            .arg(&tree);
        if options.arm64 {
            lab.env("CARGO_BUILD_TARGET", "aarch64-unknown-linux-gnu");
        }
        if !options.nightly && options.filter.is_none() {
            lab.arg("--first");
        }
        if let Some(part) = &options.filter {
            lab.args(["--filter", part]);
        }
        if let Err(e) = sh::run(&mut lab) {
            failed.push(format!("{name}: {e}"));
        }
        println!("== {name}: {} s", begin.elapsed().as_secs());
    }
    match failed.as_slice() {
        [] => Ok(()),
        failed => Err(failed.join("\n").into()),
    }
}

/// Returns the name of a release's tree, which is also that of its file in `tests/distros`.
fn folder(name: &str, arm64: bool) -> String {
    let suffix = if arm64 { "-arm64" } else { "" };
    format!("{name}{suffix}")
}

/// Returns the tree of a release. Creates it if it does not exist.
fn tree(name: &str, arm64: bool) -> Result<PathBuf> {
    let tree = sh::target().join("trees").join(folder(name, arm64));
    if tree.exists() {
        return Ok(tree);
    }
    let new = tree.with_extension("new");
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    fs::create_dir_all(&new)?;
    let log = tree.with_extension("log");
    let packages = [&PACKAGES[..], &BESIDE].concat().join(",");
    let mut make = Command::new("mmdebstrap");
    make.args(["--variant=extract", "--skip=check/qemu", "--quiet"])
        .args(arm64.then_some("--architectures=arm64"))
        .arg(format!("--include={packages}"))
        // The release file in a snapshot of an archive may have expired.
        .arg("--aptopt=Acquire::Check-Valid-Until \"false\"")
        .arg("--aptopt=Acquire::Languages \"none\"")
        .arg(name)
        .arg(&new)
        .arg(mirror())
        .stderr(fs::File::create(&log)?);
    let status = Process::start_group(&mut make)?.status(MAKE)?;
    if !status.success() {
        let log = fs::read_to_string(&log).unwrap_or_default();
        return Err(format!("mmdebstrap {name}: {status}\n{log}").into());
    }
    fs::rename(&new, &tree)?;
    Ok(tree)
}

/// Returns the archive from which this machine installs Debian packages, or that of Debian.
fn mirror() -> String {
    let lists = [
        "/etc/apt/sources.list",
        "/etc/apt/sources.list.d/debian.sources",
    ];
    let texts = lists
        .iter()
        .filter_map(|list| fs::read_to_string(list).ok());
    texts
        .filter_map(|text| mirror_in(&text))
        .next()
        .unwrap_or_else(|| "http://deb.debian.org/debian".to_owned())
}

/// Returns the first address of a Debian archive in a sources list of apt.
fn mirror_in(text: &str) -> Option<String> {
    let lines = text
        .lines()
        .filter(|line| line.starts_with("deb ") || line.starts_with("URIs:"));
    let mut words = lines.flat_map(str::split_whitespace);
    let is_archive = |word: &&str| {
        let path = word.trim_end_matches('/');
        path.contains("://")
            && Path::new(path)
                .file_name()
                .is_some_and(|name| name == "debian")
    };
    words.find(is_archive).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_found_in_lists_of_both_forms() {
        let old = "# deb http://no.example/debian sid main\n\
            deb http://a.example/debian-security sid main\ndeb [trusted=yes] http://b.example/debian/ sid main\n";
        assert_eq!(mirror_in(old).as_deref(), Some("http://b.example/debian/"));
        let new = "Types: deb\nURIs: http://c.example/debian\nSuites: sid\n";
        assert_eq!(mirror_in(new).as_deref(), Some("http://c.example/debian"));
        assert_eq!(mirror_in("URIs: http://c.example/ubuntu\n"), None);
    }
}
